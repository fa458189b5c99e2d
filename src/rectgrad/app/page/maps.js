// Requests maps: only those that are missing, for the newest state; outdated responses are dropped.

import { stream } from "./api.js";
import { announce, complain, withdraw } from "./dom.js";
import * as panels from "./panels.js";
import { methodOf, state, titleOf, view } from "./state.js";

const PATIENCE = 250; // milliseconds that a fast map may take before a newer request replaces it

const shown = new Map(); // method -> {key, map, specificity}
const measure = new Set(); // keys of slow maps whose specificity was requested
let running = null;
let queued = 0;
let complaint = ""; // the last error of a request for maps

/** Everything that a map depends on. */
function keyOf(name) {
  const { photo, model, target, versus, final, options } = state;
  return JSON.stringify([photo, model, target, versus, final, name, options[methodOf(name).kind] ?? {}]);
}

export function measureSpecificity(name) {
  measure.add(keyOf(name));
  shown.get(name).specificity = null;
  refresh();
}

/** Requests what the view is missing. `label`: the name of the explained class. */
export function refresh(label = refresh.label) {
  refresh.label = label;
  for (const name of shown.keys()) if (!state.methods.includes(name)) shown.delete(name);
  clearTimeout(queued);
  const missing = state.methods.filter((name) => shown.get(name)?.key !== keyOf(name));
  if (!missing.length && state.methods.every((name) => shown.get(name).specificity)) return stop();
  // While a slider moves, a map that is nearly finished is shown before the next one is requested.
  const left = running?.fast.size ? running.began + PATIENCE - performance.now() : 0;
  if (left > 0) queued = setTimeout(refresh, left);
  else request();
}

function stop() {
  running?.controller.abort();
  running = null;
}

async function request() {
  stop();
  const keys = new Map(state.methods.map((name) => [name, keyOf(name)]));
  const have = state.methods.filter((name) => shown.get(name)?.key === keys.get(name));
  const missing = state.methods.filter((name) => !have.includes(name));
  const own = {
    controller: new AbortController(),
    began: performance.now(),
    label: refresh.label,
    fast: new Set(missing.filter((name) => !methodOf(name).slow)),
  };
  running = own;
  const timer = setTimeout(() => missing.forEach((name) => own.fast.has(name) && panels.waiting(name)), 200);
  missing.filter((name) => methodOf(name).slow).forEach((name) => panels.waiting(name));
  const known = have.filter((name) => shown.get(name).specificity);
  const requested = state.methods.filter((name) => measure.has(keys.get(name)));
  try {
    const messages = stream("api/maps", { ...view(), have, known, measure: requested }, own.controller.signal);
    for await (const message of messages) {
      if (running !== own) return;
      receive(message, keys, own);
      if (message.kind === "progress" && !own.told) announce(summary());
      own.told ||= message.kind === "progress";
      if (queued && !own.fast.size && message.kind === "map") refresh();
    }
    if (running === own) running = null;
    withdraw(complaint);
    announce(summary());
  } catch (error) {
    if (running !== own) return; // replaced, or aborted
    running = null;
    missing.forEach((name) => panels.failed(name, "No map."));
    complaint = error.message;
    complain(complaint);
  } finally {
    clearTimeout(timer);
  }
}

function receive(message, keys, own) {
  const name = message.method;
  if (message.kind === "progress") panels.waiting(name, message);
  if (message.kind === "error") {
    own.fast.delete(name);
    shown.delete(name);
    panels.failed(name, message.error);
  }
  if (message.kind === "map") {
    own.fast.delete(name);
    message.label = own.label;
    shown.set(name, { key: keys.get(name), specificity: null });
    panels.showMap(name, message, own.label);
  }
  if (message.kind === "specificity") {
    const own = shown.get(name);
    if (own) own.specificity = message;
    panels.showSpecificity(name, message);
  }
}

function summary() {
  const there = state.methods.filter((name) => shown.get(name)?.key === keyOf(name));
  const parts = there.map((name) => {
    const value = shown.get(name).specificity?.value;
    return titleOf(name) + (typeof value === "number" ? `, specificity ${value.toFixed(2)}` : "");
  });
  const rest = running ? state.methods.filter((name) => !there.includes(name)).map(titleOf) : [];
  const maps = parts.length ? [`Maps for ${refresh.label}: ${parts.join("; ")}.`] : [];
  return [...maps, ...(rest.length ? [`Computing ${rest.join(", ")}.`] : [])].join(" ");
}
