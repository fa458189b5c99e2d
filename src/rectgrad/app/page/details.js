// The sections below the maps: layers, sparsity and Python. They are computed only while they are open.

import { ask, stream } from "./api.js";
import { draw } from "./colour.js";
import { $, element } from "./dom.js";
import { state, thresholded, valueOf, view } from "./state.js";

const parts = { layers, sparsity, python };
const done = {}; // name -> what it shows
const running = {};
let timer = 0;

export function start() {
  for (const name of Object.keys(parts)) $(`#${name}`).addEventListener("toggle", refresh);
}

/** Fills the open sections once the controls have stopped moving. */
export function refresh() {
  clearTimeout(timer);
  timer = setTimeout(() => Object.keys(parts).forEach(fill), 400);
}

async function fill(name) {
  const box = $(`#${name}`);
  const requested = JSON.stringify(view());
  if (!box.open || !state.photo || done[name] === requested) return;
  running[name]?.abort();
  running[name] = new AbortController();
  try {
    await parts[name](box, running[name].signal);
    done[name] = requested;
  } catch (error) {
    if (error.name !== "AbortError") $(".strip, .curve, pre", box).textContent = error.message;
  }
}

async function layers(box, signal) {
  const made = [];
  for await (const layer of stream("api/layers", view(), signal)) {
    if (layer.kind === "error") throw new Error(layer.error);
    if (layer.kind !== "layer") continue;
    const canvas = element("canvas", { role: "img", "aria-label": `Attribution at ${layer.title}` });
    draw(canvas, { ...layer, signed: true });
    const size = `${layer.width} × ${layer.height}`;
    made.push(element("figure", {}, canvas, element("figcaption", {}, element("b", {}, layer.title), ` ${size}`)));
    made.at(-1).title = layer.name;
  }
  if (made.length) {
    made[0].querySelector("figcaption").append(element("i", {}, " deepest"));
    made.at(-1).querySelector("figcaption").append(element("i", {}, " first"));
  }
  const none = element("p", { class: "help" }, "Layers cannot be shown for the chosen methods, because they need many passes.");
  $(".strip", box).replaceChildren(...(made.length ? made : [none]));
}

async function sparsity(box, signal) {
  const points = [];
  for await (const point of stream("api/sparsity", view(), signal)) {
    if (point.kind === "error") throw new Error(point.error);
    if (point.kind === "point") points.push([point.q, point.gini]);
  }
  $(".curve", box).replaceChildren(curve(points, thresholded() ? valueOf(thresholded(), "q") : null));
}

/** Gini index against q. The axis is stretched towards 100, where maps change most. */
function curve(points, q) {
  const place = (i) => 40 + (300 * i) / (points.length - 1);
  const low = Math.min(0, ...points.map(([, y]) => y));
  const high = (y) => 120 - (105 * (y - low)) / (1 - low);
  const values = points.map(([x, y]) => `${y.toFixed(2)} at ${x}`).join(", ");
  const drawn = svg("svg", { viewBox: "0 0 352 150", role: "img", "aria-label": `Sparsity against q: ${values}` });
  if (q !== null) {
    const after = points.findIndex(([x]) => x >= q);
    const i = after < 0 ? points.length - 1 : Math.max(after, 1);
    const [a, b] = [points[i - 1][0], points[i][0]];
    const x = place(i - 1 + Math.min((q - a) / (b - a), 1));
    drawn.append(svg("line", { class: "here", x1: x, x2: x, y1: 12, y2: 122 }));
  }
  drawn.append(svg("polyline", { points: points.map(([, y], i) => `${place(i)},${high(y)}`).join(" ") }));
  points.forEach(([x, y], i) => {
    drawn.append(svg("circle", { cx: place(i), cy: high(y), r: 3 }, svg("title", {}, `q ${x}: ${y.toFixed(2)}`)));
    drawn.append(svg("text", { x: place(i), y: 136, "text-anchor": "middle" }, String(x)));
  });
  drawn.append(svg("text", { x: 34, y: 18, "text-anchor": "end" }, "1"));
  drawn.append(svg("text", { x: 34, y: 124, "text-anchor": "end" }, low.toFixed(low ? 2 : 0)));
  return drawn;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function python(box, signal) {
  $("pre", box).textContent = (await ask("api/script", view(), signal)).script;
}
