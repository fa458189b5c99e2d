"""The page: its layout and its events. The service computes what it shows."""

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
from rectgrad.app.controls import Controls
from rectgrad.app.folder import ALL, Folder
from rectgrad.app.query import Query
from rectgrad.app.service import Prediction, Service
from rectgrad.engine.target import contrast
from rectgrad.models import MODELS, ModelUnavailableError
from rectgrad.photos import files

T = TypeVar("T")
FIRST = ["rectgrad", "saliency", "guided_backprop"]
WAITING = "<p class='hint'>Drop a photo or choose a sample.</p>"
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
    """The explorer's page over a service; `blocks` is what gradio serves."""

    def __init__(self, service: Service, folder: Folder | None = None) -> None:
        self.service, self.folder = service, folder
        self._current: dict[str, Prediction] = {}
        self._lock = threading.Lock()
        # Two threads do all the work: every thread that runs a network keeps its own buffers.
        self._workers = ThreadPoolExecutor(2)
        with gr.Blocks(title="rectgrad", analytics_enabled=False, fill_width=True) as self.blocks:
            self._layout()
            self._wire()

    # --- layout ---

    def _layout(self) -> None:
        gr.HTML("<h1>rectgrad</h1><p>See what a network looked at, without the noise.</p>", elem_id="head")
        self.prediction = gr.State(None)
        with gr.Row(elem_id="columns"):
            with gr.Column(elem_id="photo-column"):
                self._photo_column()
            with gr.Column(elem_id="settings-column"):
                self._settings_column()
            with gr.Column(elem_id="results-column"):
                self._results_column()

    def _photo_column(self) -> None:
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

    def _settings_column(self) -> None:
        self.target = gr.Dropdown([], label="Class to explain", info="Type to search.", elem_id="target")
        self.versus = gr.Dropdown(
            [("any other", NONE)],
            value=NONE,
            label="Rather than",
            info="A second class to contrast with.",
            elem_id="versus",
        )
        self.methods = gr.Dropdown(
            drawing.titles(), value=FIRST, multiselect=True, label="Methods to compare", elem_id="methods"
        )
        self.controls = Controls(FIRST)
        self.model = gr.Dropdown(_models(self.service), value=self.service.first.name, label="Model")
        with gr.Accordion("Picture", open=False):
            self.final = gr.Checkbox(
                False,
                label="final threshold for the baselines",
                info="Shows only the top 5 % of their maps, as in the paper's comparisons.",
            )
            self.colours = gr.Dropdown(
                ["auto", *image.colour_names()],
                value="auto",
                label="Colours",
                info="auto: depends on sign and theme.",
            )
            self.overlay = gr.Slider(
                0, 1, 0, step=0.05, label="Overlay", info="0: only the map.", elem_id="overlay", buttons=[]
            )
        self.dark = gr.Checkbox(False, label="dark", visible="hidden")

    def _browser(self, folder: Folder) -> None:
        self.filter = gr.Dropdown(folder.choices(), value=ALL, label="Predicted class", elem_id="filter")
        self.position = gr.Dropdown(
            [(source.name, i) for i, source in enumerate(folder.sources)],
            value=0,
            label="Photo in the folder",
        )
        with gr.Row():
            self.previous = gr.Button("← previous", size="sm", elem_id="previous")
            self.next = gr.Button("next →", size="sm", elem_id="next")
        self.timer = gr.Timer(2)

    def _results_column(self) -> None:
        self.summary = gr.HTML(WAITING, elem_id="summary")
        self.maps = gr.HTML("", elem_id="maps")
        with gr.Row():
            kinds = {"png": "Picture (PNG)", "npz": "Maps (NPZ)", "py": "Python code"}
            self.buttons = {
                kind: gr.Button(f"Download {title}", size="sm", elem_id=f"save-{kind}")
                for kind, title in kinds.items()
            }
        self.downloads = {
            kind: gr.DownloadButton(visible="hidden", elem_id=f"download-{kind}") for kind in self.buttons
        }
        with gr.Accordion("Layer by layer, from the output to the input", open=True):
            self.layers = gr.HTML("", elem_id="layers")
        with gr.Accordion("Sparsity of RectGrad's map (Gini index) against q", open=True):
            self.curve = gr.HTML("", elem_id="curve")
        with gr.Accordion("Python", open=False):
            self.lines = gr.Code("", language="python", label="The same maps in Python", interactive=False)

    # --- events ---

    def _wire(self) -> None:
        self.settings = [
            *(self.methods, self.target, self.versus, self.final, self.colours, self.overlay, self.dark),
            *self.controls.fields.values(),
        ]
        new = [self.prediction, self.target, self.versus, self.summary]
        drawn = [self.maps, self.lines, self.summary]
        more = [self.layers, self.curve]
        busy: dict[str, Any] = {"concurrency_id": "explain", "concurrency_limit": 2}
        last: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "queue": False}

        redraw = gr.on(
            [control.input for control in self.settings],
            self.draw,
            [self.prediction, *self.settings],
            drawn,
            api_name="draw",
            **last,
        )
        redraw.then(self.detail, [self.prediction, *self.settings], more, **last, api_visibility="private")

        def draw_after(event: Any) -> None:
            then = event.then(
                self.draw, [self.prediction, *self.settings], drawn, **last, api_visibility="private"
            )
            then.then(self.detail, [self.prediction, *self.settings], more, **last, api_visibility="private")

        shown = [self.photo, *new]
        given = [self.photo, self.model]
        # No preprocessing by gradio: our own error messages name the file and the reason.
        event = self.photo.input(self.upload, given, shown, api_name="look", preprocess=False, **busy)
        draw_after(event)
        for button, path in self.samples:
            event = button.click(self._opener(path), [self.model], shown, api_visibility="private", **busy)
            draw_after(event)
        changed = self.model.input(
            self.change_model, [self.prediction, self.model], new, api_visibility="private", **busy
        )
        draw_after(changed)
        if self.folder is not None:
            self._wire_folder(self.folder, new, draw_after, busy)
        self.methods.input(
            self.controls.shown, self.methods, [*self.controls.groups.values()], api_visibility="private"
        )
        for kind, button in self.buttons.items():
            save = functools.partial(self.save, kind)
            ready = button.click(
                save, [self.prediction, *self.settings], self.downloads[kind], api_name=f"save_{kind}", **busy
            )
            ready.success(None, js=f"() => document.querySelector('#download-{kind}').click()")
        self.blocks.load(None, outputs=self.dark, js=DARK)
        self.blocks.load(None, js=KEYS)
        self.blocks.unload(self.leave)

    def _wire_folder(
        self, folder: Folder, new: list[Any], draw_after: Callable[[Any], None], busy: dict[str, Any]
    ) -> None:
        """Buttons and filter change the position in the folder; a new position opens its photo."""

        def show(at: int, model: str, request: gr.Request) -> list[Any]:
            return self.open_file(folder.sources[at].path, model, request)

        def stepping(by: int) -> Callable[[int, str], int]:
            return lambda at, chosen: folder.step(at, by, chosen)

        def ticked(chosen: str) -> list[Any]:
            return [
                gr.update(choices=folder.choices(), value=chosen),
                gr.Timer(active=not folder.finished.is_set()),
            ]

        private: dict[str, Any] = {"api_visibility": "private"}
        steps = ((self.previous.click, -1), (self.next.click, 1), (self.filter.input, 0))
        for event, by in steps:
            event(stepping(by), [self.position, self.filter], self.position, **private)
        shown = [self.photo, *new]
        draw_after(self.position.change(show, [self.position, self.model], shown, **private, **busy))
        draw_after(self.blocks.load(show, [self.position, self.model], shown, **private, **busy))
        self.timer.tick(ticked, self.filter, [self.filter, self.timer], show_progress="hidden", **private)

    # --- event handlers ---

    def upload(self, given: Any, model: str, request: gr.Request) -> list[Any]:
        """A photo was uploaded or cleared. An unreadable one is removed, so that the next can be dropped."""
        if given is None:
            self._set_current(request, None)
            return [gr.update(), None, gr.update(), gr.update(), WAITING]
        path = _uploaded(given)
        if path is None or model not in _models(self.service):
            return [
                None,
                None,
                gr.update(),
                gr.update(),
                _alert("not a photo that was uploaded to this page"),
            ]
        results = self._predict(path, Path(given.get("orig_name") or path).name, model, request)
        return [gr.update() if results[0] else None, *results]

    def open_file(self, path: Path, model: str, request: gr.Request) -> list[Any]:
        results = self._predict(path, path.name, model, request)
        shown = gr.update() if results[0] is None else np.asarray(results[0].crop)
        return [shown, *results]

    def _opener(self, path: Path) -> Callable[[str, gr.Request], list[Any]]:
        def take(model: str, request: gr.Request) -> list[Any]:
            return self.open_file(path, model, request)

        return take

    def change_model(self, prediction: Prediction | None, model: str, request: gr.Request) -> list[Any]:
        """Classifies the current photo with another model."""
        if prediction is None:
            return [None, gr.update(), gr.update(), WAITING]
        return self._predict(prediction.path, prediction.name, model, request)

    def _predict(self, path: Path, name: str, model: str, request: gr.Request) -> list[Any]:
        try:
            prediction = self._run(self.service.predict, path, name, model)
        except (photos.UnreadableImageError, ModelUnavailableError, ValueError, MemoryError) as error:
            return [None, gr.update(), gr.update(), _alert(str(error) or "out of memory")]
        self._set_current(request, prediction)
        classes = self.service.classes(prediction)
        return [
            prediction,
            gr.update(choices=classes, value=prediction.top),
            gr.update(choices=[("any other", NONE), *classes], value=NONE),
            drawing.guesses(prediction, ""),
        ]

    def _query(self, values: tuple[Any, ...]) -> Query:
        methods, target, versus, final, colours, overlay, dark, *fields = values
        return Query(
            methods=tuple(methods),
            options=self.controls.options(fields),
            target=target,
            versus=None if versus in (None, NONE) else versus,
            final_threshold=final,
            colours=colours,
            overlay=overlay,
            dark=dark,
        )

    def draw(self, prediction: Prediction | None, *values: Any) -> list[Any]:
        if prediction is None:
            return ["", "", gr.update()]
        try:
            query = self._query(values)
            results = self._run(self.service.maps, prediction, query)
        except (ValueError, TypeError, RuntimeError) as error:
            return [gr.update(), gr.update(), _alert(str(error))]
        summary = drawing.guesses(prediction, self.caption(prediction, query))
        return [
            drawing.maps(prediction, results, query),
            script.lines(prediction, query, self.service.load_arguments(prediction.model)),
            summary,
        ]

    def detail(self, prediction: Prediction | None, *values: Any) -> list[str]:
        if prediction is None:
            return ["", ""]
        try:
            query = self._query(values)
            q = query.options["RectGrad"]["q"]
            points, results = (
                self._run(self.service.sparsity, prediction, query),
                self._run(self.service.layers, prediction, query),
            )
            return [drawing.layers(results, query), drawing.curve(points, q)]
        except (ValueError, TypeError, RuntimeError):
            return ["", ""]  # `draw` shows the error

    def save(self, kind: str, prediction: Prediction | None, *values: Any) -> str:
        """Writes the file to download: png, npz or py."""
        if prediction is None:
            raise gr.Error("Upload a photo first.", print_exception=False)
        query = self._query(values)
        folder = tempfile.mkdtemp(dir=os.environ["GRADIO_TEMP_DIR"])
        path = Path(folder, f"{Path(prediction.name).stem}-rectgrad.{kind}")
        if kind == "py":
            path.write_text(
                script.lines(prediction, query, self.service.load_arguments(prediction.model)),
                encoding="utf-8",
            )
            return str(path)
        results = self._run(self.service.maps, prediction, query)
        if kind == "npz":
            with open(path, "wb") as stream:
                maps = {name: each.values for name, each in results.items()}
                np.savez_compressed(stream, photo=np.asarray(prediction.crop), **maps)  # type: ignore[arg-type]
        else:
            drawing.sheet(prediction, results, query, self.caption(prediction, query)).save(
                path, compress_level=3
            )
        return str(path)

    def _run(self, task: Callable[..., T], *args: Any) -> T:
        return self._workers.submit(task, *args).result()

    def caption(self, prediction: Prediction, query: Query) -> str:
        model, target = self.service.model(prediction.model), query.resolve_target(prediction.top)
        if isinstance(target, contrast):
            return f"Why {model.label(target.a)} rather than {model.label(target.b)}?"
        return f"Why {model.label(target)}?"

    # --- sessions ---

    def leave(self, request: gr.Request) -> None:
        self._set_current(request, None)

    def _set_current(self, request: gr.Request, prediction: Prediction | None) -> None:
        """Sets the current photo of a session and releases photos that no session uses."""
        session = str(getattr(request, "session_hash", None))
        with self._lock:
            before = self._current.pop(session, None)
            if prediction is not None:
                self._current[session] = prediction
            used = {each.digest for each in self._current.values()}
        if before is not None and before.digest not in used:
            self.service.release(before)


def _uploaded(given: Any) -> Path | None:
    """The path of an uploaded file; None for any other file."""
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        return None
    path, ours = Path(given["path"]).resolve(), Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    return path if path.is_relative_to(ours) and path.is_file() else None


def _alert(message: str) -> str:
    return f'<p class="alert" role="alert">{escape(message)}</p>'


def _models(service: Service) -> list[str]:
    """The models that can be loaded by name."""
    named = [name for name in MODELS if not any(letter in name for letter in ":.")]
    return list(dict.fromkeys([service.first.name, *named]))


def _samples() -> list[files.Source]:
    try:
        return files.sample_photos()
    except ValueError:
        return []
