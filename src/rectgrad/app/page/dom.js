// Small helper functions for the document.

export const $ = (selector, root = document) => root.querySelector(selector);

/** Creates an element with attributes and children; text is never interpreted as HTML. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Lets a button show and hide its menu. Clicking elsewhere, pressing Escape or leaving the menu hides it. */
export function menu(button, list) {
  const toggle = (open) => {
    list.hidden = !open;
    if (open && getComputedStyle(list).position === "fixed") place(button, list);
    button.setAttribute("aria-expanded", String(open));
  };
  button.addEventListener("click", () => toggle(list.hidden));
  document.addEventListener("pointerdown", (event) => {
    if (!list.contains(event.target) && !button.contains(event.target)) toggle(false);
  });
  for (const each of [button, list]) {
    each.addEventListener("focusout", (event) => {
      const to = event.relatedTarget;
      if (to && !list.contains(to) && to !== button) toggle(false);
    });
    each.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || list.hidden) return;
      toggle(false);
      button.focus();
      event.stopPropagation();
    });
  }
  return () => toggle(false);
}

/** Places a menu below its button and inside the window, however the page is scrolled. */
function place(button, list) {
  const box = button.getBoundingClientRect();
  const width = Math.min(Math.max(box.width, 360), innerWidth - 24);
  Object.assign(list.style, {
    top: `${box.bottom + 6}px`,
    left: `${Math.min(box.left, innerWidth - width - 12)}px`,
    width: `${width}px`,
    maxHeight: `${Math.max(innerHeight - box.bottom - 18, 160)}px`,
  });
}

/** Shows an error message below the maps, or hides the previous one. */
export function complain(text = "") {
  $("#message").textContent = text;
  $("#message").hidden = !text;
}

/** Hides an error message, unless another one has replaced it. */
export function withdraw(text) {
  if ($("#message").textContent === text) complain();
}

/** Shows a short message for a moment. */
export function notify(text) {
  const note = $("#note");
  note.textContent = text;
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => (note.textContent = ""), 2500);
}

/** Announces a change to screen readers. */
export function announce(text) {
  $("#status").textContent = text;
}
