// The state of the view, and the link that restores it.

export const about = {}; // methods, options, colours …: sent by the server
export const state = {};
const LISTS = "methods";

/** The initial state of a page. */
export function initial() {
  return {
    photo: about.folder ? about.folder[0].photo : about.samples.length ? `sample:${about.samples[0]}` : null,
    name: null, // file name of an upload
    model: about.models[0],
    target: null, // null: the network's best guess
    versus: null,
    methods: [about.first],
    options: {},
    overlay: 0,
    colours: "auto",
    final: false,
    large: null, // the method that is enlarged
    zoom: [1, 0, 0], // factor, and the shift to the right and down as fractions of the picture
  };
}

/** The state that the address of the page describes. */
export function fromLink() {
  return { ...initial(), ...parsedLink(location.hash.slice(1)) };
}

/** The part of a link after the #: everything that differs from the initial state. */
export function link() {
  const first = initial();
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (key === "options") continue;
    if (key === "photo" || JSON.stringify(value) !== JSON.stringify(first[key])) {
      if (value !== null) parts.set(key, value);
    }
  }
  for (const [kind, options] of Object.entries(state.options)) {
    for (const [name, value] of Object.entries(options)) {
      if (value !== defaultOf(kind, name)) parts.set(`${kind}.${name}`, JSON.stringify(value));
    }
  }
  return `#${parts.toString().replaceAll("%3A", ":").replaceAll("%2C", ",")}`;
}

function parsedLink(text) {
  const found = { options: {} };
  for (const [key, value] of new URLSearchParams(text)) {
    const [kind, option] = key.split(".");
    if (option && about.options[kind]?.some((each) => each.name === option)) {
      (found.options[kind] ??= {})[option] = parsed(value);
    } else if (key === LISTS) {
      const known = value.split(",").filter((name) => methodOf(name));
      if (known.length) found.methods = known;
    } else if (key === "zoom") {
      const numbers = value.split(",").map(Number);
      if (numbers.length === 3 && numbers.every(Number.isFinite)) found.zoom = numbers;
    } else if (["target", "versus"].includes(key) && /^\d+$/.test(value)) found[key] = Number(value);
    else if (key === "overlay" && value >= 0 && value <= 1) found.overlay = Number(value);
    else if (key === "final") found.final = value === "true";
    else if (key === "model" && about.models.includes(value)) found.model = value;
    else if (key === "colours" && value in about.colours) found.colours = value;
    else if (key === "large" && methodOf(value)) found.large = value;
    else if (["photo", "name"].includes(key)) found[key] = value;
  }
  return found;
}

function parsed(value) {
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}

export function methodOf(name) {
  return about.methods.find((each) => each.name === name);
}

/** The title of a method on the page. */
export function titleOf(name) {
  const { title } = methodOf(name);
  return title[0].toUpperCase() + title.slice(1);
}

export function optionsOf(kind) {
  return about.options[kind] ?? [];
}

function defaultOf(kind, name) {
  return optionsOf(kind).find((each) => each.name === name)?.default;
}

/** The value of an option: the chosen one, or the default. */
export function valueOf(kind, name) {
  const chosen = state.options[kind]?.[name];
  return chosen === undefined ? defaultOf(kind, name) : chosen;
}

export function setOption(kind, name, value) {
  state.options = { ...state.options, [kind]: { ...state.options[kind], [name]: value } };
}

/** The class of methods whose threshold the slider moves: the first chosen one that has a q. */
export function thresholded() {
  const kinds = state.methods.map((name) => methodOf(name).kind);
  return kinds.find((kind) => optionsOf(kind).some((option) => option.name === "q"));
}

/** The part of the state that the server needs. */
export function view() {
  const { photo, model, methods, options, target, versus, final, colours, overlay } = state;
  return { photo, model, methods, options, target, versus, final, colours, overlay, dark: isDark() };
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
