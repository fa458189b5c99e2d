// The photo and its maps: drawing, sizing, enlarging, and moving them together.

import { draw, drawPhoto, drawScale } from "./colour.js";
import { $, element } from "./dom.js";
import { about, isDark, methodOf, state, titleOf } from "./state.js";

const panels = new Map(); // "photo" or a method's name -> {root, view, base, map, …}
const LEAST = 180; // pixels: the width of a picture below which the page scrolls instead
const act = {}; // remove(method), use(instead, method), measure(method), changed()
let photo = null; // the image as the page shows it
let size = [1, 1];
let count = 0; // number of maps shown so far
let look = ""; // everything that the colours of the maps depend on

export function start(actions) {
  Object.assign(act, actions);
  new ResizeObserver(fit).observe($("#stage"));
  addEventListener("resize", fit);
  $("#close").addEventListener("click", () => enlarge(null));
  $("#zoom-in").addEventListener("click", () => zoomBy(1.5));
  $("#zoom-out").addEventListener("click", () => zoomBy(1 / 1.5));
  $("#zoom-reset").addEventListener("click", () => moveTo([1, 0, 0]));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.large) enlarge(null);
  });
}

/** Creates panels for the photo and the chosen methods, in order. */
export function arrange() {
  const names = ["photo", ...state.methods];
  for (const name of panels.keys()) if (!names.includes(name)) panels.delete(name);
  for (const name of names) if (!panels.has(name)) panels.set(name, panel(name));
  const roots = names.map((name) => panels.get(name).root);
  if (roots.some((root, i) => $("#panels").children[i] !== root) || $("#panels").children.length > roots.length) {
    $("#panels").replaceChildren(...roots);
  }
  const single = state.methods.length === 1;
  for (const [name, each] of panels) if (each.remove) each.remove.hidden = single || Boolean(state.large && name);
  showLarge();
}

function panel(name) {
  const title = name === "photo" ? "Photo" : titleOf(name);
  const base = element("canvas", { class: "base", "aria-hidden": "true" });
  const map = element("canvas", { class: "map", "aria-hidden": "true" });
  const layers = element("div", { class: "layers" }, base, map);
  const view = element("button", { type: "button", class: "view" }, layers);
  const settings = element("span", { class: "settings" });
  const time = element("span", { class: "time" });
  const caption = element("figcaption", {}, element("b", {}, title), settings, time);
  const root = element("figure", { class: "panel", "data-method": name }, caption, view);
  const made = { root, view, base, map, layers, settings, time, title };
  view.addEventListener("click", () => clicked(name));
  draggable(view);
  if (name === "photo") {
    root.append(element("p", { class: "hint" }, "Click a picture to enlarge it. The square is what the network sees."));
    return made;
  }
  made.remove = element("button", { type: "button", class: "remove", "aria-label": `Remove ${title}`, title: "Remove" }, "×");
  made.remove.addEventListener("click", () => act.remove(name));
  caption.append(made.remove);
  made.progress = element("progress", { "aria-label": `Progress of ${title}`, hidden: "" });
  made.scale = element("canvas", { "aria-hidden": "true" });
  made.legend = element("p", { class: "legend" });
  made.trust = element("div", { class: "trust" });
  made.warnings = element("ul", { class: "warnings", "aria-label": `Warnings about ${title}`, hidden: "" });
  view.append(made.progress);
  root.append(made.legend, made.trust, made.warnings);
  return made;
}

// --- what is shown ---

/** The picture in the server's response. */
export async function decoded(found) {
  const image = new Image();
  image.src = found.shown;
  await image.decode();
  return image;
}

/** Shows a photo: `found` is the server's response, `image` its picture. */
export function showPhoto(found, image) {
  photo = image;
  size = found.size;
  $("#stage").style.setProperty("--shape", `${size[0]} / ${size[1]}`);
  const own = panels.get("photo");
  own.settings.textContent = found.name;
  own.view.setAttribute("aria-label", `Photo: ${found.name}. Enlarge`);
  drawPhoto(own.base, photo);
  for (const [name, each] of panels) if (name !== "photo") forget(each);
  fit();
}

/** Clears a panel whose map belongs to another photo. */
function forget(own) {
  own.pale = own.found = null;
  own.map.width = own.base.width = 1;
  for (const part of [own.legend, own.trust, own.warnings]) part.replaceChildren();
  own.warnings.hidden = true;
  own.trust.className = "trust";
}

/** Shows the map of a method. */
export function showMap(name, map, label) {
  const own = panels.get(name);
  if (!own) return;
  own.found = map;
  own.root.dataset.map = ++count;
  own.root.classList.remove("waiting", "failed");
  own.progress.hidden = true;
  own.settings.textContent = map.settings;
  own.time.textContent = map.seconds < 1 ? `${Math.round(map.seconds * 1000)} ms` : `${map.seconds.toFixed(1)} s`;
  own.time.title = "Time of the map, without the forward pass";
  own.view.setAttribute("aria-label", `Map by ${own.title} for ${label}. Enlarge`);
  own.warnings.replaceChildren(...map.warnings.map((text) => element("li", {}, text)));
  own.warnings.hidden = !map.warnings.length;
  own.trust.classList.add("old"); // until the specificity of this map arrives
  paint(name);
}

/** Redraws all maps if their colours or the overlay have changed. */
export function repaint() {
  const now = JSON.stringify([state.overlay, state.colours, isDark()]);
  if (now === look) return;
  look = now;
  for (const [name, own] of panels) {
    own.pale = null;
    if (name === "photo" ? photo : own.found) paint(name);
  }
}

function paint(name) {
  const own = panels.get(name);
  if (name === "photo") return drawPhoto(own.base, photo);
  draw(own.map, own.found, state.overlay);
  own.base.hidden = !state.overlay;
  if (state.overlay && own.pale !== photo) {
    drawPhoto(own.base, photo, true);
    own.pale = photo;
  }
  drawScale(own.scale, own.found);
  const [left, right] = own.found.signed ? ["against", "for"] : ["no effect", "for"];
  own.legend.replaceChildren(element("span", {}, left), own.scale, element("span", {}, `${right} ${own.found.label}`));
  own.legend.title = own.found.signed
    ? "Red pixels raise the score of the class, blue ones lower it; the background colour has no effect."
    : "The stronger the colour, the more a pixel raises the score of the class.";
}

/** Shows the specificity of a map. */
export function showSpecificity(name, found) {
  const own = panels.get(name);
  if (!own) return;
  own.root.classList.remove("waiting");
  own.progress.hidden = true;
  own.trust.className = found.low ? "trust caution" : "trust";
  const value = found.value === null ? "–" : found.value.toFixed(2);
  const note = found.note && ` ${found.note[0].toUpperCase()}${found.note.slice(1)}.`;
  own.trust.replaceChildren(element("p", {}, element("b", {}, `Specificity ${value}`), note));
  own.trust.title = "How specific the map is to this class: 0 means that it is the same for any class, 1 that it has nothing in common with the map of the least likely class.";
  if (found.low && about.recommended !== name) {
    const better = methodOf(about.recommended).title;
    const button = element("button", { type: "button", class: "better" }, `Why this class? Use ${better}`);
    button.addEventListener("click", () => act.use(about.recommended, name));
    own.trust.append(button);
  }
  if (found.measurable) {
    const button = element("button", { type: "button", class: "measure" }, "Measure it");
    button.title = "Takes as long as the map did.";
    button.addEventListener("click", () => act.measure(name));
    own.trust.append(button);
  }
  fit();
}

/** Marks a panel as outdated: a new map has been requested. */
export function waiting(name, message = {}) {
  const own = panels.get(name);
  if (!own) return;
  own.root.classList.add("waiting");
  own.progress.hidden = false;
  if (message.total) {
    own.progress.max = message.total;
    own.progress.value = Math.min(message.done, message.total);
  } else own.progress.removeAttribute("value");
  own.time.textContent = message.total ? `${Math.min(message.done, message.total)} of ${message.total}` : "…";
}

export function failed(name, text) {
  const own = panels.get(name);
  if (!own) return;
  own.root.classList.remove("waiting");
  own.root.classList.add("failed");
  own.progress.hidden = true;
  own.trust.replaceChildren();
  own.warnings.replaceChildren(element("li", {}, text));
  own.warnings.hidden = false;
}

// --- size ---

/** Makes the pictures as large as the window allows. */
export function fit() {
  const box = $("#panels");
  const shown = [...panels.values()].map((each) => each.root).filter((root) => root.offsetParent);
  if (!shown.length || !box.clientWidth) return;
  const phone = matchMedia("(max-width: 760px)").matches;
  const style = getComputedStyle(box);
  const gap = parseFloat(style.columnGap) || 0;
  const extra = Math.max(...shown.map((root) => root.offsetHeight - $(".view", root).offsetHeight));
  const bottom = $("#bar").offsetHeight + (phone ? 0 : $("#more").firstElementChild.offsetHeight + 12);
  const height = innerHeight - box.getBoundingClientRect().top - scrolled() - bottom - 16;
  const shape = size[0] / size[1];
  let best = 0;
  let columns = 1;
  for (let count = 1; count <= shown.length; count++) {
    const rows = Math.ceil(shown.length / count);
    const wide = (box.clientWidth - gap * (count - 1)) / count;
    const high = ((height - gap * (rows - 1)) / rows - extra) * shape;
    const width = Math.min(wide, high);
    if (width > best) [best, columns] = [width, count];
  }
  if (best < LEAST) {
    // They do not fit: the page scrolls.
    columns = Math.max(1, Math.min(shown.length, Math.floor((box.clientWidth + gap) / (LEAST + gap))));
    const wide = (box.clientWidth - gap * (columns - 1)) / columns;
    best = Math.min(wide, Math.max(LEAST, (height - extra) * shape));
  }
  box.style.setProperty("--cell", `${Math.floor(best)}px`);
  box.style.setProperty("--columns", columns);
  move();
}

function scrolled() {
  const scroller = $("#scroll");
  return -(scroller ? scroller.scrollTop : scrollY);
}

// --- enlarging ---

function clicked(name) {
  if (state.large) return;
  enlarge(name === "photo" ? state.methods[0] : name);
}

export function enlarge(name) {
  const before = state.large;
  state.large = name;
  if (!name) state.zoom = [1, 0, 0];
  act.changed();
  (name ? panels.get(name).view : panels.get(before)?.view)?.focus();
}

function showLarge() {
  if (state.large && !state.methods.includes(state.large)) state.large = null;
  document.body.classList.toggle("large", Boolean(state.large));
  $("#toolbar").hidden = !state.large;
  for (const [name, own] of panels) own.root.hidden = Boolean(state.large) && ![state.large, "photo"].includes(name);
  fit();
}

// --- moving ---

function move() {
  const [factor, x, y] = state.large ? state.zoom : [1, 0, 0];
  for (const own of panels.values()) {
    own.layers.style.transform = `translate(${100 * x}%, ${100 * y}%) scale(${factor})`;
  }
  $("#zoom").textContent = `${Math.round(100 * factor)} %`;
}

function moveTo([factor, x, y]) {
  factor = Math.min(Math.max(factor, 1), 20);
  const most = (factor - 1) / 2; // the picture stays in its frame
  state.zoom = [factor, clamp(x, most), clamp(y, most)].map((value) => Number(value.toFixed(4)));
  move();
  act.moved();
}

function clamp(value, most) {
  return Math.min(Math.max(value, -most), most);
}

/** Zooms around a point, given relative to the centre as a fraction of the picture. */
function zoomBy(by, px = 0, py = 0) {
  const [factor, x, y] = state.zoom;
  const next = Math.min(Math.max(factor * by, 1), 20);
  moveTo([next, px - ((px - x) * next) / factor, py - ((py - y) * next) / factor]);
}

function draggable(view) {
  const pointers = new Map();
  const at = (event) => {
    const box = view.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width - 0.5, (event.clientY - box.top) / box.height - 0.5];
  };
  view.addEventListener("wheel", (event) => {
    if (!state.large) return;
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY / 400), ...at(event));
  }, { passive: false });
  view.addEventListener("pointerdown", (event) => {
    if (!state.large) return;
    view.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
  });
  view.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()];
    const here = at(event);
    const [fromX, fromY] = pointers.get(event.pointerId);
    pointers.set(event.pointerId, here);
    const [factor, x, y] = state.zoom;
    if (pointers.size === 1) return moveTo([factor, x + here[0] - fromX, y + here[1] - fromY]);
    const now = [...pointers.values()];
    zoomBy(distance(now) / Math.max(distance(before), 1e-3), (now[0][0] + now[1][0]) / 2, (now[0][1] + now[1][1]) / 2);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    view.addEventListener(end, (event) => pointers.delete(event.pointerId));
  }
  view.addEventListener("keydown", (event) => {
    if (!state.large) return;
    const [factor, x, y] = state.zoom;
    const step = 0.1;
    const moves = {
      "+": [factor * 1.5, x * 1.5, y * 1.5], "=": [factor * 1.5, x * 1.5, y * 1.5],
      "-": [factor / 1.5, x / 1.5, y / 1.5], "0": [1, 0, 0],
      ArrowLeft: [factor, x + step, y], ArrowRight: [factor, x - step, y],
      ArrowUp: [factor, x, y + step], ArrowDown: [factor, x, y - step],
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    moveTo(moves[event.key]);
  });
}

function distance([[ax, ay], [bx, by]]) {
  return Math.hypot(ax - bx, ay - by);
}
