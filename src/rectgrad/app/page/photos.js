// Where photos come from: a file, the clipboard, the camera, a sample or a folder.

import { ask } from "./api.js";
import { $, complain, element } from "./dom.js";
import { about, state } from "./state.js";

/** `take` receives a file, `choose` the id of a photo that the server has. */
export function start(take, choose) {
  $("#open").addEventListener("click", () => $("#file").click());
  $("#file").addEventListener("change", () => {
    if ($("#file").files.length) take($("#file").files[0]);
    $("#file").value = ""; // so that the same file can be chosen again
  });
  for (const kind of ["dragover", "drop"]) {
    addEventListener(kind, (event) => {
      event.preventDefault();
      const dropped = kind === "drop" && event.dataTransfer.files[0];
      if (dropped) take(dropped);
    });
  }
  addEventListener("paste", (event) => {
    const pasted = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
    if (pasted) take(pasted);
  });
  camera(take);
  if (about.folder) folder(choose);
  else samples(choose);
}

function samples(choose) {
  const names = about.samples.map((name) => element("option", { value: `sample:${name}` }, name));
  $("#samples").replaceChildren(element("option", { value: "", disabled: "" }, "Samples"), ...names);
  $("#samples-field").hidden = !names.length;
  $("#samples").addEventListener("change", () => choose($("#samples").value));
}

let at = 0; // the photo of the folder that was requested last, which may be one that cannot be opened
let shown = null;

export function show() {
  if (about.folder && state.photo?.startsWith("folder:")) {
    $("#position").value = state.photo;
    if (state.photo !== shown) at = placeOf(state.photo);
    shown = state.photo;
  }
  if (!about.folder) $("#samples").value = state.photo?.startsWith("sample:") ? state.photo : "";
}

/** The place of a photo in the folder; that of the first one if it is not there. */
function placeOf(photo) {
  return Math.max(0, about.folder.findIndex((each) => each.photo === photo));
}

function folder(choose) {
  $("#folder").hidden = false;
  $("#position").replaceChildren(
    ...about.folder.map(({ photo, name }) => element("option", { value: photo }, name)),
  );
  const go = (to) => {
    at = to;
    choose(about.folder[at].photo);
  };
  $("#position").addEventListener("change", () => go(placeOf($("#position").value)));
  let steps = Promise.resolve(); // a step starts where the one before it ended
  const step = (by) => {
    const next = async () => go((await ask("api/folder/step", { at, by, chosen: $("#filter").value })).at);
    steps = steps.then(next).catch((error) => complain(error.message));
  };
  $("#previous").addEventListener("click", () => step(-1));
  $("#next").addEventListener("click", () => step(1));
  $("#filter").addEventListener("change", () => step(0));
  addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const typing = event.target.closest("input, textarea, select, [role=listbox], dialog");
    if (by && !typing && !state.large) step(by);
  });
  filters();
}

/** Updates the list of classes, which grows in the background until all photos are classified. */
async function filters() {
  const { choices, finished } = await ask("api/folder", {});
  const chosen = $("#filter").value || choices[0].value;
  $("#filter").replaceChildren(...choices.map(({ value, label }) => element("option", { value }, label)));
  $("#filter").value = chosen;
  if (!finished) setTimeout(filters, 2000);
}

function camera(take) {
  $("#camera").hidden = !navigator.mediaDevices?.getUserMedia;
  const dialog = $("#camera-dialog");
  const video = $("video", dialog);
  $("#camera").addEventListener("click", async () => {
    $("#camera").disabled = true; // until the visitor has answered
    try {
      video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
      dialog.showModal();
    } catch (error) {
      complain(`The camera cannot be used: ${error.message}`);
    } finally {
      $("#camera").disabled = false;
    }
  });
  $("#shoot").addEventListener("click", () => {
    const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => take(new File([blob], "camera.png", { type: "image/png" })));
    dialog.close();
  });
  $("#camera-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => video.srcObject?.getTracks().forEach((track) => track.stop()));
}
