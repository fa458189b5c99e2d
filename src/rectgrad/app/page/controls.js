// The list of methods and their options, built from the server's description of them.

import { $, element } from "./dom.js";
import { about, methodOf, optionsOf, setOption, state, thresholded, titleOf, valueOf } from "./state.js";

/** Draws the list of methods. `changed` is called when one is selected or deselected. */
export function drawMethods(changed) {
  const groups = [
    ["One backward pass: immediate", about.methods.filter((each) => !each.slow)],
    ["Many passes: several seconds", about.methods.filter((each) => each.slow)],
  ];
  $("#methods").replaceChildren(
    ...groups.flatMap(([title, methods]) => [element("h3", {}, title), ...methods.map(row)]),
  );
  $("#methods").addEventListener("change", (event) => {
    const { value, checked } = event.target;
    const rest = state.methods.filter((name) => name !== value);
    if (!checked && !rest.length) return void (event.target.checked = true); // at least one stays selected
    state.methods = checked ? [...state.methods, value] : rest;
    changed();
  });
}

function row(method) {
  const box = element("input", { type: "checkbox", value: method.name });
  return element("label", {}, box, element("span", {}, titleOf(method.name), element("small", {}, method.help)));
}

export function showMethods() {
  const titles = state.methods.map(titleOf);
  $("#method").textContent = titles.length > 2 ? `${titles[0]} and ${titles.length - 1} more` : titles.join(", ");
  for (const box of document.querySelectorAll("#methods input")) box.checked = state.methods.includes(box.value);
}

/** Draws the options of the chosen methods. `changed` is called when one changes. */
export function drawOptions(changed) {
  const kinds = [...new Set(state.methods.map((name) => methodOf(name).kind))].filter((kind) => optionsOf(kind).length);
  const open = new Set([...document.querySelectorAll("#options details[open]")].map((each) => each.dataset.kind));
  $("#options").replaceChildren(
    ...kinds.map((kind) => {
      const listed = about.methods.find((each) => each.kind === kind);
      const fields = optionsOf(kind).filter((option) => option.name !== "q" || kind !== thresholded());
      const box = element(
        "details", { class: "options", "data-kind": kind },
        element("summary", {}, `Options of ${listed.title}`), ...fields.map((option) => field(kind, option, changed)),
      );
      box.open = open.has(kind);
      return box;
    }),
  );
}

function field(kind, option, changed) {
  const id = `option-${kind}-${option.name}`;
  const input = control(kind, option, id);
  input.addEventListener("change", () => {
    setOption(kind, option.name, read(input, option));
    changed();
  });
  const help = element("p", { class: "help", id: `${id}-help` }, option.help);
  if (option.control === "checkbox") {
    return element("div", { class: "field check" }, element("label", {}, input, ` ${option.label}`), help);
  }
  return element("div", { class: "field" }, element("label", { for: id }, option.label), input, help);
}

function control(kind, option, id) {
  const value = valueOf(kind, option.name);
  const common = { id, "aria-describedby": `${id}-help` };
  if (option.control === "checkbox") {
    const box = element("input", { ...common, type: "checkbox" });
    box.checked = value;
    return box;
  }
  if (option.control === "list") {
    const choices = option.choices.map((each) => element("option", { value: each.value ?? "" }, each.label));
    const list = element("select", common, ...choices);
    list.value = value ?? "";
    return list;
  }
  const numeric = option.control !== "text";
  const box = element("input", { ...common, type: numeric ? "number" : "text", placeholder: "none" });
  if (numeric) box.step = option.control === "integer" ? "1" : "any";
  if (option.low !== null) box.min = option.low;
  if (option.high !== null) box.max = option.high;
  box.value = value ?? "";
  return box;
}

function read(input, option) {
  if (option.control === "checkbox") return input.checked;
  if (option.control === "list") return option.choices.find((each) => (each.value ?? "") === input.value).value;
  if (option.control === "text") return input.value;
  return input.value === "" ? option.default : Number(input.value);
}

/** The slider of the threshold, and the switch between map and overlay. */
export function drawBar(changed) {
  $("#q-marks").replaceChildren(...about.marks.map(mark));
  $("#q").addEventListener("input", () => {
    setOption(thresholded(), "q", Number($("#q").value));
    changed();
  });
}

function mark(q) {
  const tick = element("i", {}, [95, 99].includes(q) ? "" : String(q));
  tick.style.left = `${q}%`;
  return tick;
}

export function showBar() {
  const kind = thresholded();
  $("#q-field").hidden = !kind;
  if (kind) {
    const q = valueOf(kind, "q");
    if (Number($("#q").value) !== q) $("#q").value = q;
    $("#q-value").textContent = q;
    $("#q-help").textContent = optionsOf(kind).find((option) => option.name === "q").help;
    $("#q").setAttribute("aria-valuetext", `q ${q}`);
  }
  $("#show-map").setAttribute("aria-pressed", String(state.overlay === 0));
  $("#show-overlay").setAttribute("aria-pressed", String(state.overlay > 0));
  $("#overlay").value = state.overlay;
  $("#colours").value = state.colours;
  $("#final").checked = state.final;
  $("#model").value = state.model;
}
