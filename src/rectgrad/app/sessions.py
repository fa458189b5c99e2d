"""Sessions. A session is one page in one browser. Sessions are isolated: each sees only its own uploads."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rectgrad.app.service import Prediction

SESSIONS = 200  # limit; beyond it, the session that was idle longest is ended
UPLOADS = 3  # photos that a session keeps
MINUTES = 15  # a session ends after this time without requests


@dataclass
class Photo:
    """A file to explain, and its original name."""

    path: Path
    name: str


class Request:
    """A request. `replaced` is set when the same session sends a newer one about the same subject."""

    def __init__(self) -> None:
        self.replaced = asyncio.Event()


@dataclass
class Session:
    uploads: dict[str, Photo] = field(default_factory=dict)
    predictions: dict[tuple[str, str], Prediction] = field(default_factory=dict)  # by photo and model
    digest: str = ""  # of the photo that is shown
    seen: float = field(default_factory=time.monotonic)
    _requests: dict[str, Request] = field(default_factory=dict)

    def remember(self, photo: str, prediction: Prediction) -> None:
        """Keeps the prediction for a photo; only the last few are kept."""
        self.predictions.pop((photo, prediction.model), None)
        self.predictions[photo, prediction.model] = prediction
        while len(self.predictions) > UPLOADS:
            del self.predictions[next(iter(self.predictions))]

    def begin(self, subject: str) -> Request:
        """Starts a request about a subject and marks the previous one as replaced."""
        older, self._requests[subject] = self._requests.get(subject), Request()
        if older is not None:
            older.replaced.set()
        return self._requests[subject]

    def add(self, path: Path, name: str) -> str:
        """Adds an uploaded photo, deletes the oldest one if there are too many, and returns the id."""
        photo = f"upload:{secrets.token_hex(8)}"
        self.uploads[photo] = Photo(path, name)
        while len(self.uploads) > UPLOADS:
            self._delete(next(iter(self.uploads)))
        return photo

    def _delete(self, photo: str) -> None:
        self.uploads.pop(photo).path.unlink(missing_ok=True)

    def end(self) -> None:
        for request in self._requests.values():
            request.replaced.set()
        for photo in list(self.uploads):
            self._delete(photo)


class Sessions:
    """All sessions. `unused` is called with the digest of a photo that no session shows anymore."""

    def __init__(self, unused: Callable[[str], None]) -> None:
        self._sessions: dict[str, Session] = {}
        self._unused = unused

    def open(self, token: str | None = None) -> str:
        """Returns the token of an existing session, or that of a new one."""
        self.end_idle()
        if token is not None and self.get(token):
            return token
        while len(self._sessions) >= SESSIONS:
            self.end(min(self._sessions, key=lambda each: self._sessions[each].seen))
        token = secrets.token_urlsafe(16)
        self._sessions[token] = Session()
        return token

    def get(self, token: str) -> Session | None:
        session = self._sessions.get(token)
        if session is not None:
            session.seen = time.monotonic()
        return session

    def look(self, session: Session, digest: str) -> None:
        """Called when a session shows another photo."""
        before, session.digest = session.digest, digest
        self._release(before)

    def end(self, token: str) -> None:
        session = self._sessions.pop(token, None)
        if session is not None:
            session.end()
            self._release(session.digest)

    async def clean_up(self) -> None:
        """Ends idle sessions once a minute, until it is cancelled."""
        while True:
            await asyncio.sleep(60)
            self.end_idle()

    def end_idle(self) -> None:
        before = time.monotonic() - 60 * MINUTES
        for token in [token for token, session in self._sessions.items() if session.seen < before]:
            self.end(token)

    def _release(self, digest: str) -> None:
        if digest and all(session.digest != digest for session in self._sessions.values()):
            self._unused(digest)
