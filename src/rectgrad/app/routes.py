"""The HTTP routes of the explorer.

A page refers to photos by ids that the server issued, to models and methods by their listed names, and to
options by their values. Paths and URLs sent by a page are never opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import numpy as np
from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException

from rectgrad import image
from rectgrad.app import controls, drawing, script, streams
from rectgrad.app.folder import ALL, Folder
from rectgrad.app.guard import UPLOAD, address_of
from rectgrad.app.query import Query
from rectgrad.app.server import TemporaryFolder
from rectgrad.app.service import QS, Prediction, Service
from rectgrad.app.sessions import STORED, Photo, Session, Sessions
from rectgrad.app.work import LaneName, Work
from rectgrad.models import Guess, ModelUnavailableError
from rectgrad.photos import files
from rectgrad.photos.names import readable

T = TypeVar("T")
ENDED = "This page was idle for too long. Reload it."
LARGE = 25_000_000  # pixels; larger photos are decoded in a lane of their own
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Opening(BaseModel):
    """A photo to open with a model."""

    model_config = ConfigDict(extra="forbid")
    photo: str = Field(max_length=100)
    model: str = Field(max_length=100)


class Search(Opening):
    """A search for classes by part of their name."""

    search: str = Field("", max_length=100)


class View(Opening):
    """A photo and the state of the controls."""

    methods: list[str] = Field(max_length=30)
    options: dict[str, dict[str, bool | int | float | str | None]] = {}
    target: int | None = None
    versus: int | None = None
    final: bool = False
    colours: str = "auto"
    overlay: float = Field(0.0, ge=0, le=1)
    dark: bool = False
    measure: list[str] = []  # slow methods whose specificity was requested
    have: list[str] = []  # methods whose maps the page already has
    known: list[str] = []  # methods whose specificity the page already has

    def query(self) -> Query:
        """The validated state of the controls. Invalid values raise an error that names them."""
        query = Query(
            methods=tuple(dict.fromkeys(self.methods)),
            options=controls.parse(self.options),
            target=self.target,
            versus=self.versus,
            final_threshold=self.final,
            colours=self.colours,
            overlay=self.overlay,
            dark=self.dark,
        )
        if self.colours not in ("auto", *image.colour_names()):
            raise ValueError(f"unknown colours {self.colours!r}")
        for method in query.configured().values():
            controls.check(method)
        return query


class Step(BaseModel):
    at: int
    by: int = Field(ge=-1, le=1)
    chosen: str = Field(ALL, max_length=20)


class Explorer:
    """The state behind the routes: sessions, photos and running computations."""

    def __init__(self, service: Service, temporary: TemporaryFolder, folder: Folder | None = None) -> None:
        self.service, self.temporary, self.folder = service, temporary, folder
        self.work = Work()
        self.sessions = Sessions(service.release)
        self.samples = {} if folder is not None else {each.name: each.path for each in _samples()}
        self._arriving = 0  # bytes of uploads that are being received

    def close(self) -> bool:
        """Stops everything. Returns whether all has ended."""
        return self.work.close() and (self.folder is None or self.folder.close())

    def session(self, token: str) -> Session:
        session = self.sessions.get(token)
        if session is None:
            raise HTTPException(401, ENDED)
        return session

    def photo(self, session: Session, photo: str) -> Photo:
        """The photo with this id: one that this visitor uploaded, a sample, or one in the folder."""
        kind, _, name = photo.partition(":")
        if photo in session.uploads:
            return session.uploads[photo]
        if kind == "sample" and name in self.samples:
            return Photo(self.samples[name], self.samples[name].name)
        if kind == "folder" and self.folder is not None:
            if name not in self.folder.ids:
                raise HTTPException(404, "The photo of this link is not in the folder.")
            path = self.folder.sources[self.folder.ids[name]].path
            return Photo(path, readable(path.name))
        raise HTTPException(
            404, "This photo is not on the server: uploads are deleted after 15 minutes. Upload it again."
        )

    async def opened(self, session: Session, given: Opening) -> tuple[Prediction, Any]:
        """A photo with its top classes, and its crop at the resolution of the page."""
        photo, model = self.photo(session, given.photo), given.model
        await self.load(session, model)
        size = await self.compute(
            session, ("size", photo.path), lambda: self.service.pixels(photo.path, photo.name), "photos"
        )
        found, shown = await self.compute(
            session,
            ("photo", photo.path, model),
            lambda: self.service.open(photo.path, photo.name, model),
            "photos" if size <= LARGE else "large photos",
        )
        prediction = await self.compute(
            session, ("classes", found.digest), lambda: self.service.classified(found)
        )
        session.remember(given.photo, prediction)
        return prediction, shown

    async def load(self, session: Session, model: str) -> None:
        """Loads a model, outside the lanes of photos and maps: this may take long."""
        if not self.service.is_loaded(model):
            await self.compute(session, ("model", model), lambda: self.service.network(model), "models")

    async def store(self, session: Session, request: Request, name: str) -> str:
        """Stores an upload and returns its id. All uploads together never exceed their limit."""
        path, size = self.temporary.new_file(), 0
        try:
            with open(path, "wb") as file:
                async for part in request.stream():
                    size += len(part)
                    self._arriving += len(part)
                    if self._arriving > STORED // 2:
                        raise HTTPException(503, "Too many uploads at a time. Try again.")
                    self.sessions.make_room(self._arriving)
                    file.write(part)
            if self.sessions.get(session.owner[1]) is not session:  # ended meanwhile; nobody would delete it
                raise HTTPException(401, ENDED)
            return session.add(path, name)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise HTTPException(507, "The server cannot store the photo.") from None
            raise
        finally:
            self._arriving -= size

    async def prediction(self, session: Session, given: Opening) -> Prediction:
        known = session.predictions.get((given.photo, given.model))
        await self.load(session, given.model)
        prediction = known or (await self.opened(session, given))[0]
        self.sessions.look(session, prediction.digest)
        return prediction

    async def resolve(self, token: str, view: View) -> tuple[Session, Query, Prediction]:
        """The session of a request, its query, and the network's prediction for its photo."""
        session, query = self.session(token), view.query()
        return session, query, await self.prediction(session, view)

    async def compute(
        self, session: Session, key: Any, compute: Callable[[], T], lane: LaneName = "fast"
    ) -> T:
        """Runs a computation and returns its result; it is stopped if the caller is cancelled."""
        task = self.work.join(key, compute, lane, session.owner)
        try:
            return await asyncio.shield(asyncio.wrap_future(task.future))
        finally:
            self.work.leave(task)


def _samples() -> list[files.Source]:
    try:
        return files.sample_photos()
    except ValueError:
        return []


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by name. They are read once; no other files are served."""
    return {
        each.name: (each.read_bytes(), KINDS[Path(each.name).suffix])
        for each in resources("rectgrad.app").joinpath("page").iterdir()
        if Path(each.name).suffix in KINDS
    }


def create(explorer: Explorer) -> FastAPI:
    """Creates the application, to be wrapped in a `Guard`."""

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        cleaning = asyncio.create_task(explorer.sessions.clean_up())
        yield
        cleaning.cancel()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=running)
    static = page_files()
    service, sessions = explorer.service, explorer.sessions

    @app.exception_handler(AnyHTTPException)  # those of the router and of the parser, too
    async def refused(_: Request, error: AnyHTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def misunderstood(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    for kind in (ValueError, TypeError, RuntimeError, MemoryError, ModelUnavailableError, FileNotFoundError):

        @app.exception_handler(kind)
        async def failed(_: Request, error: Exception) -> Response:
            return JSONResponse({"error": streams.message_of(error)}, 400)

    @app.get("/")
    async def page() -> Response:
        return Response(*static["index.html"][:1], media_type=static["index.html"][1])

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, "No such file.")
        return Response(static[name][0], media_type=static[name][1])

    @app.post("/api/session")
    async def begin(request: Request, session: str | None = Header(None)) -> dict[str, Any]:
        """Starts or resumes a session and returns what the page needs to draw its controls."""
        return {
            "session": sessions.open(session, address_of(request)),
            "models": service.models(),
            "methods": controls.methods(),
            "options": controls.options(),
            "colours": drawing.colour_tables(),
            "marks": QS,
            "samples": list(explorer.samples),
            "folder": None if explorer.folder is None else _photos_of(explorer.folder),
            "limit": UPLOAD,
            **streams.advice(),
        }

    @app.post("/api/pause")
    async def pause(request: Request) -> None:
        """Called when a page is closed or reloaded. Its uploads are kept for a while; its results are freed.

        The session is sent as the body, because `sendBeacon` cannot set headers.
        """
        own = sessions.get((await request.body()).decode("ascii", "replace"))
        if own is not None:
            sessions.look(own, "")

    @app.post("/api/upload")
    async def upload(request: Request, name: str = "photo", session: str = Header()) -> dict[str, str]:
        shown = Path(name.replace("\\", "/")).name[:200] or "photo"
        return {"photo": await explorer.store(explorer.session(session), request, shown)}

    @app.post("/api/open")
    async def open_photo(given: Opening, session: str = Header()) -> dict[str, Any]:
        own = explorer.session(session)
        prediction, shown = await explorer.opened(own, given)
        sessions.look(own, prediction.digest)
        return {
            "photo": given.photo,
            "model": given.model,
            "name": prediction.name,
            "size": prediction.crop.size,
            "shown": drawing.data_url(shown),
            "guesses": [_without_nan(guess) for guess in prediction.guesses],
        }

    @app.post("/api/classes")
    async def classes(given: Search, session: str = Header()) -> list[dict[str, Any]]:
        """The classes whose names match, best first; all classes if the search is empty."""
        prediction = await explorer.prediction(explorer.session(session), given)
        return service.classes(prediction, given.search)

    @app.post("/api/maps")
    async def maps(view: View, session: str = Header()) -> Response:
        own, query, prediction = await explorer.resolve(session, view)
        wanted = streams.Wanted(service, prediction, query, view.have, view.known, view.measure)
        return _stream(streams.maps(explorer.work, own.begin("maps"), wanted))

    @app.post("/api/layers")
    async def layers(view: View, session: str = Header()) -> Response:
        own, query, prediction = await explorer.resolve(session, view)
        return _stream(streams.layers(explorer.work, own.begin("layers"), service, prediction, query))

    @app.post("/api/sparsity")
    async def sparsity(view: View, session: str = Header()) -> Response:
        own, query, prediction = await explorer.resolve(session, view)
        return _stream(streams.sparsity(explorer.work, own.begin("sparsity"), service, prediction, query))

    @app.post("/api/script")
    async def python(view: View, session: str = Header()) -> dict[str, str]:
        _, query, prediction = await explorer.resolve(session, view)
        return {"script": script.lines(prediction, query, service.load_arguments(prediction.model))}

    @app.post("/api/download/{kind}")
    async def download(kind: Literal["png", "npz", "py"], view: View, session: str = Header()) -> Response:
        own, query, prediction = await explorer.resolve(session, view)
        content = await _file(explorer, own, kind, prediction, query)
        name = quote(f"{Path(prediction.name).stem}-explained.{kind}")
        return Response(
            content,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f"attachment; filename*=utf-8''{name}"},
        )

    if explorer.folder is not None:
        _folder_routes(app, explorer, explorer.folder)
    return app


def _photos_of(folder: Folder) -> list[dict[str, str]]:
    listed = zip(folder.ids, folder.sources, strict=True)
    return [{"photo": f"folder:{id}", "name": readable(source.name)} for id, source in listed]


def _without_nan(guess: Guess) -> dict[str, Any]:
    """A class as JSON, which has no NaN: the probability of a single output is null."""
    return {**asdict(guess), "probability": None if math.isnan(guess.probability) else guess.probability}


def _folder_routes(app: FastAPI, explorer: Explorer, folder: Folder) -> None:
    @app.post("/api/folder")
    async def filters(session: str = Header()) -> dict[str, Any]:
        explorer.session(session)
        choices = [{"label": label, "value": value} for label, value in folder.choices()]
        return {"choices": choices, "finished": folder.finished.is_set()}

    @app.post("/api/folder/step")
    async def step(given: Step, session: str = Header()) -> dict[str, int]:
        explorer.session(session)
        return {"at": folder.step(given.at, given.by, given.chosen)}


def _stream(messages: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(messages, media_type="application/octet-stream")


async def _file(
    explorer: Explorer, session: Session, kind: str, prediction: Prediction, query: Query
) -> bytes:
    """The file to download: png, npz or py."""
    service = explorer.service
    if kind == "py":
        return script.lines(prediction, query, service.load_arguments(prediction.model)).encode()
    target, results = query.resolve_target(prediction.top), []
    for method in query.configured().values():
        # A picture shows the specificity of a slow map only if it was computed before.
        ready = service.has_specificity(prediction, method, target)
        whole = kind == "png" and (ready or not controls.is_slow(method))
        compute = service.measured if whole else service.map
        slow = service.is_slow(prediction, method, target)
        key = (compute.__name__, service.key(prediction, method, target))
        found: Any = await explorer.compute(
            session, key, partial(compute, prediction, method, target), "slow" if slow else "fast"
        )
        results.append(found if whole else found.explanation)
    write = partial(_written, kind, prediction, query, results)
    return await explorer.compute(session, ("file", kind, prediction.digest, repr(query)), write, "downloads")


def _written(kind: str, prediction: Prediction, query: Query, results: list[Any]) -> bytes:
    if kind == "png":
        return image.png(drawing.sheet(results, query))
    stream = io.BytesIO()
    arrays = {name: each.map.float().numpy() for name, each in zip(query.methods, results, strict=True)}
    np.savez_compressed(stream, photo=np.asarray(prediction.crop), **arrays)
    return stream.getvalue()
