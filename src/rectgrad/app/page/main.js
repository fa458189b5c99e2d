// The page: connects the controls to the state and the maps.

import * as api from "./api.js";
import { combobox } from "./combobox.js";
import * as controls from "./controls.js";
import * as details from "./details.js";
import { $, complain, element, menu, notify } from "./dom.js";
import * as maps from "./maps.js";
import * as panels from "./panels.js";
import * as photos from "./photos.js";
import { about, fromLink, link, methodOf, state, view } from "./state.js";

const ANY = { index: null, label: "any other class" };
let opened = null; // the server's response for the photo that is shown
let names = new Map(); // index -> label of the classes seen so far
let openings = 0;
let uploads = 0;
let unopened = null; // the state in a link whose photo is not on the server
let showTarget;
let showVersus;

async function boot() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  Object.assign(about, await api.start());
  $("#model").replaceChildren(...about.models.map((name) => element("option", {}, name)));
  const colours = ["auto", ...Object.keys(about.colours)];
  $("#colours").replaceChildren(...colours.map((name) => element("option", { value: name }, name.replace("_", ", "))));
  showTarget = combobox($("#class-field"), {
    id: "target", label: "Class to explain", help: "Type to search all classes.",
    search: (text) => search(text, []), pick: ({ index }) => change({ target: index }),
  });
  showVersus = combobox($("#versus-field"), {
    id: "versus", label: "Rather than", help: "Optional: a second class to contrast it with.",
    search: (text) => search(text, [ANY]), pick: ({ index }) => change({ versus: index }),
  });
  controls.drawMethods(changed);
  controls.drawBar(changed);
  photos.start(take, (photo) => open({ photo, name: null, target: null, versus: null }));
  panels.start({ remove, use, changed, moved: remember, measure: maps.measureSpecificity });
  details.start();
  wire();
  Object.assign(state, fromLink());
  await open({}, true);
}

function wire() {
  menu($("#method"), $("#methods"));
  const close = menu($("#share"), $("#shared"));
  for (const kind of ["png", "npz", "py"]) {
    $(`#save-${kind}`).addEventListener("click", () => {
      close();
      save(kind);
    });
  }
  $("#model").addEventListener("change", () => open({ model: $("#model").value, target: null, versus: null }));
  $("#show-map").addEventListener("click", () => change({ overlay: 0 }));
  $("#show-overlay").addEventListener("click", () => change({ overlay: state.overlay || 0.85 }));
  $("#overlay").addEventListener("input", () => change({ overlay: Number($("#overlay").value) }));
  $("#colours").addEventListener("change", () => change({ colours: $("#colours").value }));
  $("#final").addEventListener("change", () => change({ final: $("#final").checked }));
  $("#link").addEventListener("click", () => {
    close();
    copyLink();
  });
  $("#theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme !== "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    localStorage.setItem("theme", document.documentElement.dataset.theme);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  addEventListener("hashchange", () => {
    if (location.hash === link()) return;
    open(fromLink(), true);
  });
}

// --- the photo ---

async function take(file) {
  const before = openings;
  const number = ++uploads;
  try {
    notify(`Uploading ${file.name} …`);
    const photo = await api.upload(file, about.limit);
    if (number !== uploads || before !== openings) return; // another photo was chosen meanwhile
    // If a link refers to an upload that was deleted, its settings are applied to the photo opened now.
    const kept = unopened ?? (opened ? { target: null, versus: null } : {});
    await open({ ...kept, photo, name: file.name });
  } catch (error) {
    complain(error.message);
  }
}

/**
 * Opens a photo, or reopens the current one with another model. The state changes once the photo is there, so
 * that the controls always act on the photo that is shown.
 */
async function open(changes, linked = false) {
  const number = ++openings;
  const next = { ...state, ...changes };
  if (!next.photo) return complain("Open a photo, drop one here or paste it.");
  document.body.classList.add("opening");
  try {
    const found = await api.ask("api/open", { photo: next.photo, model: next.model });
    const known = new Map(opened?.model === found.model ? names : []);
    for (const { index, label } of found.guesses) known.set(index, label);
    const [image] = await Promise.all([panels.decoded(found), nameClasses(next, known)]);
    if (number !== openings) return;
    Object.assign(state, changes, { target: next.target, versus: next.versus });
    opened = found;
    unopened = null;
    names = known;
    complain();
    kinds = ""; // a link may have set other values
    panels.arrange();
    panels.showPhoto(found, image);
    changed();
  } catch (error) {
    if (number !== openings) return;
    if (linked) unopened = changes;
    complain(linked && next.name ? `This link shows ${next.name}. Open that photo to see the same view.` : error.message);
    photos.show();
    panels.arrange();
    controls.showMethods();
    controls.showBar();
  } finally {
    if (number === openings) document.body.classList.remove("opening");
  }
}

/** Requests the names of the classes in a link. Classes that do not exist are removed from it. */
async function nameClasses(next, known) {
  for (const index of [next.target, next.versus]) {
    if (index === null || known.has(index)) continue;
    for (const each of await classes("", next)) known.set(each.index, each.label);
    if (!known.has(index)) Object.assign(next, { target: null, versus: null });
  }
}

// --- classes ---

function classes(search, { photo, model } = state) {
  return api.ask("api/classes", { photo, model, search });
}

/** The classes that match a search; if it is empty, the network's guesses come first. */
async function search(text, always) {
  const known = names; // another model has others
  const found = await classes(text);
  for (const each of found) known.set(each.index, each.label);
  if (text) return found;
  const guessed = opened.guesses.map(({ index, label, probability }) => ({ index, label, note: percent(probability) }));
  const top = new Set(guessed.map((each) => each.index));
  return [...always, ...guessed, ...found.filter((each) => !top.has(each.index))];
}

function percent(share) {
  return share === null ? "" : `${(100 * share).toFixed(1)} %`; // a single output has no probability
}

function drawGuesses() {
  const target = state.target ?? opened.guesses[0].index;
  $("#guesses").replaceChildren(
    ...opened.guesses.map(({ index, label, probability }) => {
      const meter = element("meter", { min: 0, max: 1, value: probability ?? 0, "aria-hidden": "true" });
      const pressed = String(index === target);
      const button = element("button", { type: "button", "aria-pressed": pressed, title: `Explain ${label}` },
        element("span", {}, label), meter, element("b", {}, percent(probability)));
      button.addEventListener("click", () => change({ target: index }));
      return element("li", {}, button);
    }),
  );
}

// --- the state ---

function change(changes) {
  Object.assign(state, changes);
  changed();
}

/** Draws the page for the current state and requests missing maps. */
function changed() {
  if (!opened) return;
  if (state.target === opened.guesses[0].index) state.target = null;
  const target = state.target ?? opened.guesses[0].index;
  const label = names.get(target);
  const versus = state.versus === null || state.versus === target ? null : names.get(state.versus);
  const question = versus ? `${label} rather than ${versus}` : label;
  $("#question").textContent = `Evidence for ${question}`;
  document.title = `${label}: ${opened.name} – rectgrad`;
  showTarget({ index: target, label });
  showVersus(state.versus === null ? ANY : { index: state.versus, label: names.get(state.versus) });
  drawGuesses();
  controls.showMethods();
  controls.showBar();
  showOptions();
  photos.show();
  panels.arrange();
  panels.repaint();
  remember();
  maps.refresh(question);
  details.refresh();
}

let kinds = "";
/** Redraws the options only if the chosen methods changed: a redrawn control would lose the focus. */
function showOptions() {
  const now = String([...new Set(state.methods.map((name) => methodOf(name).kind))]);
  if (now !== kinds) controls.drawOptions(changed);
  kinds = now;
}

function remember() {
  history.replaceState(null, "", link());
}

function remove(name) {
  change({ methods: state.methods.filter((each) => each !== name) });
}

/** Replaces one method by another. */
function use(instead, name) {
  change({ methods: [...new Set(state.methods.map((each) => (each === name ? instead : each)))] });
}

// --- links and downloads ---

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    notify("Link copied.");
  } catch {
    notify("The link is in the address bar of the browser.");
  }
}

async function save(kind) {
  try {
    notify("Preparing the download …");
    const { name, content } = await api.file(`api/download/${kind}`, view());
    const anchor = element("a", { href: URL.createObjectURL(content), download: name });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
    notify(`${name} saved.`);
  } catch (error) {
    complain(error.message);
  }
}

boot().catch((error) => complain(error.message));
