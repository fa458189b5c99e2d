"""The page: what is where, and which control asks what. Answers come from the desk."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
import numpy as np

from rectgrad import image, photos
from rectgrad.app import drawing, script
from rectgrad.app.ask import Ask
from rectgrad.app.controls import Controls
from rectgrad.app.desk import Desk, Seen
from rectgrad.app.folder import ALL, Folder
from rectgrad.engine.target import contrast
from rectgrad.models import MODELS, ModelUnavailableError
from rectgrad.photos import files

T = TypeVar("T")
FIRST = ["rectgrad", "saliency", "guided_backprop"]
WAITING = "<p class='hint'>Drop a photo, or choose a sample.</p>"
NONE = -1  # no second class
KEYS = """
() => { document.addEventListener('keydown', (event) => {
  const typing = event.target.closest('input, textarea, select, [role=listbox], [contenteditable]');
  const id = { ArrowLeft: 'previous', ArrowRight: 'next' }[event.key];
  if (id && !typing) document.querySelector('#' + id)?.click();
}); }
"""
DARK = "() => document.body.classList.contains('dark')"


class Page:
    """The explorer's page over a desk; `blocks` is what gradio serves."""

    def __init__(self, desk: Desk, folder: Folder | None = None) -> None:
        self.desk, self.folder = desk, folder
        self._visits: dict[str, Seen] = {}
        self._lock = threading.Lock()
        # Two threads do the work, whoever asks: each one that ever did keeps buffers of its own.
        self._workers = ThreadPoolExecutor(2)
        with gr.Blocks(title="rectgrad", analytics_enabled=False, fill_width=True) as self.blocks:
            self._layout()
            self._wire()

    # --- what is where ---

    def _layout(self) -> None:
        gr.HTML("<h1>rectgrad</h1><p>What a network looked at, without the noise.</p>", elem_id="head")
        self.seen = gr.State(None)
        with gr.Row(elem_id="all"):
            with gr.Column(elem_id="given"):
                self._given()
            with gr.Column(elem_id="asked"):
                self._asked()
            with gr.Column(elem_id="answer"):
                self._answer()

    def _given(self) -> None:
        self.photo = gr.Image(
            label="Photo", sources=["upload", "clipboard", "webcam"], height=240, elem_id="photo", buttons=[]
        )
        if self.folder is not None:
            self._browser(self.folder)
        self.samples = []
        with gr.Row(visible=self.folder is None):
            for source in _samples():
                button = gr.Button(source.name, size="sm", min_width=70, elem_id=f"sample-{source.name}")
                self.samples.append((button, source.path))

    def _asked(self) -> None:
        self.target = gr.Dropdown([], label="Class to explain", info="Type to search.", elem_id="target")
        self.versus = gr.Dropdown(
            [("any other", NONE)], value=NONE, label="Rather than", info="A second class.", elem_id="versus"
        )
        self.methods = gr.Dropdown(
            drawing.titles(), value=FIRST, multiselect=True, label="Methods to compare", elem_id="methods"
        )
        self.controls = Controls(FIRST)
        self.model = gr.Dropdown(_models(self.desk), value=self.desk.first.name, label="Model")
        with gr.Accordion("Picture", open=False):
            self.final = gr.Checkbox(
                False,
                label="final threshold of the baselines",
                info="Shows only the upper 5 % of their maps, as the paper's comparisons do.",
            )
            self.colours = gr.Dropdown(
                ["auto", *image.colour_names()],
                value="auto",
                label="Colours",
                info="auto: by sign and theme.",
            )
            self.overlay = gr.Slider(
                0, 1, 0, step=0.05, label="Overlay", info="0: the map alone.", elem_id="overlay", buttons=[]
            )
        self.dark = gr.Checkbox(False, label="dark", visible="hidden")

    def _browser(self, folder: Folder) -> None:
        self.filter = gr.Dropdown(folder.choices(), value=ALL, label="Predicted class", elem_id="filter")
        self.place = gr.Dropdown(
            [(source.name, i) for i, source in enumerate(folder.sources)],
            value=0,
            label="Photo of the folder",
        )
        with gr.Row():
            self.previous = gr.Button("← previous", size="sm", elem_id="previous")
            self.next = gr.Button("next →", size="sm", elem_id="next")
        self.timer = gr.Timer(2)

    def _answer(self) -> None:
        self.said = gr.HTML(WAITING, elem_id="said")
        self.maps = gr.HTML("", elem_id="maps")
        with gr.Row():
            kinds = {"png": "Picture (PNG)", "npz": "Maps (NPZ)", "py": "Python lines"}
            self.buttons = {
                kind: gr.Button(f"Download {said}", size="sm", elem_id=f"save-{kind}")
                for kind, said in kinds.items()
            }
        self.given = {
            kind: gr.DownloadButton(visible="hidden", elem_id=f"given-{kind}") for kind in self.buttons
        }
        with gr.Accordion("Layer by layer, from the output to the input", open=True):
            self.layers = gr.HTML("", elem_id="layers")
        with gr.Accordion("Sparsity of RectGrad's map (Gini index) against q", open=True):
            self.curve = gr.HTML("", elem_id="curve")
        with gr.Accordion("Python", open=False):
            self.lines = gr.Code("", language="python", label="The same maps in Python", interactive=False)

    # --- which control asks what ---

    def _wire(self) -> None:
        self.asked = [
            *(self.methods, self.target, self.versus, self.final, self.colours, self.overlay, self.dark),
            *self.controls.fields.values(),
        ]
        new = [self.seen, self.target, self.versus, self.said]
        drawn = [self.maps, self.lines, self.said]
        more = [self.layers, self.curve]
        busy: dict[str, Any] = {"concurrency_id": "explain", "concurrency_limit": 2}
        last: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "queue": False}

        redraw = gr.on(
            [control.input for control in self.asked],
            self.draw,
            [self.seen, *self.asked],
            drawn,
            api_name="draw",
            **last,
        )
        redraw.then(self.detail, [self.seen, *self.asked], more, **last, api_visibility="private")

        def draw_after(event: Any) -> None:
            then = event.then(self.draw, [self.seen, *self.asked], drawn, **last, api_visibility="private")
            then.then(self.detail, [self.seen, *self.asked], more, **last, api_visibility="private")

        shown = [self.photo, *new]
        given = [self.photo, self.model]
        # As it came: what is wrong with a file, we say ourselves.
        event = self.photo.input(self.take, given, shown, api_name="look", preprocess=False, **busy)
        draw_after(event)
        for button, path in self.samples:
            event = button.click(self._taking(path), [self.model], shown, api_visibility="private", **busy)
            draw_after(event)
        again = self.model.input(self.again, [self.seen, self.model], new, api_visibility="private", **busy)
        draw_after(again)
        if self.folder is not None:
            self._wire_folder(self.folder, new, draw_after, busy)
        self.methods.input(
            self.controls.shown, self.methods, [*self.controls.groups.values()], api_visibility="private"
        )
        for kind, button in self.buttons.items():
            save = functools.partial(self.save, kind)
            ready = button.click(
                save, [self.seen, *self.asked], self.given[kind], api_name=f"save_{kind}", **busy
            )
            ready.success(None, js=f"() => document.querySelector('#given-{kind}').click()")
        self.blocks.load(None, outputs=self.dark, js=DARK)
        self.blocks.load(None, js=KEYS)
        self.blocks.unload(self.leave)

    def _wire_folder(
        self, folder: Folder, new: list[Any], draw_after: Callable[[Any], None], busy: dict[str, Any]
    ) -> None:
        """Steps set the list of photos; the list shows one."""

        def show(at: int, model: str, request: gr.Request) -> list[Any]:
            return self.take_file(folder.sources[at].path, model, request)

        def stepping(by: int) -> Callable[[int, str], int]:
            return lambda at, wanted: folder.step(at, by, wanted)

        def ticked(wanted: str) -> list[Any]:
            return [
                gr.update(choices=folder.choices(), value=wanted),
                gr.Timer(active=not folder.finished.is_set()),
            ]

        private: dict[str, Any] = {"api_visibility": "private"}
        steps = ((self.previous.click, -1), (self.next.click, 1), (self.filter.input, 0))
        for event, by in steps:
            event(stepping(by), [self.place, self.filter], self.place, **private)
        shown = [self.photo, *new]
        draw_after(self.place.change(show, [self.place, self.model], shown, **private, **busy))
        draw_after(self.blocks.load(show, [self.place, self.model], shown, **private, **busy))
        self.timer.tick(ticked, self.filter, [self.filter, self.timer], show_progress="hidden", **private)

    # --- answers ---

    def take(self, given: Any, model: str, request: gr.Request) -> list[Any]:
        """A photo was dropped, or cleared. One that cannot be read makes room for the next."""
        if given is None:
            self._visit(request, None)
            return [gr.update(), None, gr.update(), gr.update(), WAITING]
        path = _uploaded(given)
        if path is None or model not in _models(self.desk):
            return [None, None, gr.update(), gr.update(), _alert("that is no photo given to this page")]
        found = self._looked(path, Path(given.get("orig_name") or path).name, model, request)
        return [gr.update() if found[0] else None, *found]

    def take_file(self, path: Path, model: str, request: gr.Request) -> list[Any]:
        found = self._looked(path, path.name, model, request)
        shown = gr.update() if found[0] is None else np.asarray(found[0].crop)
        return [shown, *found]

    def _taking(self, path: Path) -> Callable[[str, gr.Request], list[Any]]:
        def take(model: str, request: gr.Request) -> list[Any]:
            return self.take_file(path, model, request)

        return take

    def again(self, seen: Seen | None, model: str, request: gr.Request) -> list[Any]:
        """The same photo, seen by another model."""
        if seen is None:
            return [None, gr.update(), gr.update(), WAITING]
        return self._looked(seen.path, seen.name, model, request)

    def _looked(self, path: Path, name: str, model: str, request: gr.Request) -> list[Any]:
        try:
            seen = self._work(self.desk.look, path, name, model)
        except (photos.UnreadableImageError, ModelUnavailableError, ValueError, MemoryError) as error:
            return [None, gr.update(), gr.update(), _alert(str(error) or "out of memory")]
        self._visit(request, seen)
        classes = self.desk.classes(seen)
        return [
            seen,
            gr.update(choices=classes, value=seen.top),
            gr.update(choices=[("any other", NONE), *classes], value=NONE),
            drawing.guesses(seen, ""),
        ]

    def ask(self, values: tuple[Any, ...]) -> Ask:
        methods, target, versus, final, colours, overlay, dark, *fields = values
        return Ask(
            methods=tuple(methods),
            options=self.controls.options(fields),
            target=target,
            versus=None if versus in (None, NONE) else versus,
            final_threshold=final,
            colours=colours,
            overlay=overlay,
            dark=dark,
        )

    def draw(self, seen: Seen | None, *values: Any) -> list[Any]:
        if seen is None:
            return ["", "", gr.update()]
        try:
            ask = self.ask(values)
            found = self._work(self.desk.maps, seen, ask)
        except (ValueError, TypeError, RuntimeError) as error:
            return [gr.update(), gr.update(), _alert(str(error))]
        said = drawing.guesses(seen, self.caption(seen, ask))
        return [drawing.maps(seen, found, ask), script.lines(seen, ask, self.desk.loading(seen.model)), said]

    def detail(self, seen: Seen | None, *values: Any) -> list[str]:
        if seen is None:
            return ["", ""]
        try:
            ask = self.ask(values)
            q = ask.options["RectGrad"]["q"]
            points, found = self._work(self.desk.sparsity, seen, ask), self._work(self.desk.layers, seen, ask)
            return [drawing.layers(found, ask), drawing.curve(points, q)]
        except (ValueError, TypeError, RuntimeError):
            return ["", ""]  # what is wrong is said above the maps

    def save(self, kind: str, seen: Seen | None, *values: Any) -> str:
        """The file of a kind, to be downloaded."""
        if seen is None:
            raise gr.Error("There is no photo yet.", print_exception=False)
        ask = self.ask(values)
        folder = tempfile.mkdtemp(dir=os.environ["GRADIO_TEMP_DIR"])
        path = Path(folder, f"{Path(seen.name).stem}-rectgrad.{kind}")
        if kind == "py":
            path.write_text(script.lines(seen, ask, self.desk.loading(seen.model)), encoding="utf-8")
            return str(path)
        found = self._work(self.desk.maps, seen, ask)
        if kind == "npz":
            with open(path, "wb") as stream:
                maps = {name: each.values for name, each in found.items()}
                np.savez_compressed(stream, photo=np.asarray(seen.crop), **maps)  # type: ignore[arg-type]
        else:
            drawing.sheet(seen, found, ask, self.caption(seen, ask)).save(path, compress_level=3)
        return str(path)

    def _work(self, task: Callable[..., T], *args: Any) -> T:
        return self._workers.submit(task, *args).result()

    def caption(self, seen: Seen, ask: Ask) -> str:
        model, target = self.desk.model(seen.model), ask.explained(seen.top)
        if isinstance(target, contrast):
            return f"Why {model.label(target.a)} rather than {model.label(target.b)}?"
        return f"Why {model.label(target)}?"

    # --- who looks at what ---

    def leave(self, request: gr.Request) -> None:
        self._visit(request, None)

    def _visit(self, request: gr.Request, seen: Seen | None) -> None:
        """What a visitor looks at now; what nobody looks at is let go."""
        visitor = str(getattr(request, "session_hash", None))
        with self._lock:
            before = self._visits.pop(visitor, None)
            if seen is not None:
                self._visits[visitor] = seen
            used = {each.digest for each in self._visits.values()}
        if before is not None and before.digest not in used:
            self.desk.forget(before)


def _uploaded(given: Any) -> Path | None:
    """The file of an upload; None for any other."""
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        return None
    path, ours = Path(given["path"]).resolve(), Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    return path if path.is_relative_to(ours) and path.is_file() else None


def _alert(sentence: str) -> str:
    return f'<p class="alert" role="alert">{escape(sentence)}</p>'


def _models(desk: Desk) -> list[str]:
    """Those that a name is enough for."""
    named = [name for name in MODELS if not any(letter in name for letter in ":.")]
    return list(dict.fromkeys([desk.first.name, *named]))


def _samples() -> list[files.Source]:
    try:
        return files.sample_photos()
    except ValueError:
        return []
