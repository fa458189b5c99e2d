// A searchable list: typing into the text field filters it.

import { element } from "./dom.js";

/**
 * label, help: texts. search: async (text) => items {index, label, note}. pick: called with the chosen item.
 * Returns a function that shows an item as the chosen one.
 */
export function combobox(host, { id, label, help, search, pick }) {
  const input = element("input", {
    id, type: "text", role: "combobox", autocomplete: "off", spellcheck: "false", "aria-autocomplete": "list",
    "aria-expanded": "false", "aria-controls": `${id}-list`, "aria-describedby": `${id}-help`,
  });
  const list = element("ul", { id: `${id}-list`, role: "listbox", "aria-label": label, hidden: "" });
  host.classList.add("combobox");
  host.append(
    element("label", { for: id }, label), input, list, element("p", { id: `${id}-help`, class: "help" }, help),
  );
  let items = [];
  let active = -1;
  let chosen = null;
  let requests = 0;

  async function open(text) {
    const number = ++requests;
    const found = await search(text);
    if (number !== requests) return; // a newer search has started
    items = found;
    list.replaceChildren(...items.map(option));
    if (!items.length) list.append(element("li", { class: "none" }, `No class matches “${text}”.`));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    activate(text || !chosen ? 0 : Math.max(0, items.findIndex((each) => each.index === chosen.index)));
  }

  function option(item, i) {
    const selected = String(item.index === chosen?.index);
    const row = element("li", { id: `${id}-${i}`, role: "option", "aria-selected": selected }, item.label);
    if (item.note) row.append(element("small", {}, item.note));
    row.addEventListener("pointerdown", (event) => event.preventDefault()); // keeps the focus in the input
    row.addEventListener("click", () => take(item));
    return row;
  }

  function activate(i) {
    active = items.length ? (i + items.length) % items.length : -1;
    for (const row of list.querySelectorAll(".active")) row.classList.remove("active");
    const row = list.children[active];
    if (active < 0) return input.removeAttribute("aria-activedescendant");
    row.classList.add("active");
    row.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", row.id);
  }

  function close() {
    requests++;
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    input.value = chosen?.label ?? "";
  }

  function take(item) {
    chosen = item;
    close();
    pick(item);
  }

  input.addEventListener("click", () => {
    input.select();
    if (list.hidden) open("");
  });
  input.addEventListener("input", () => open(input.value.trim()));
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (list.hidden) open("");
      else activate(active + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Enter" && !list.hidden) {
      if (items[active]) take(items[active]);
    } else if (event.key === "Escape" && !list.hidden) {
      close();
      event.stopPropagation();
    } else return;
    event.preventDefault();
  });

  return (item) => {
    chosen = item;
    if (list.hidden) input.value = item?.label ?? "";
  };
}
