"""Sessions. A session is one page in one browser. Sessions are isolated: each sees only its own uploads."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rectgrad.app.lanes import Owner
from rectgrad.app.service import Prediction

SESSIONS = 200  # limit; beyond it, a session is ended of the address that has most
UPLOADS = 3  # photos that a session keeps
STORED = 1000 * 2**20  # bytes of all uploads; beyond them, an upload is deleted of the address that has most
MINUTES = 15  # a session ends after this time without requests


@dataclass
class Photo:
    """A file to explain, and its original name."""

    path: Path
    name: str
    size: int = 0  # bytes that it counts for; 0 for a photo that was not uploaded


class Request:
    """A request. `replaced` is set when the same session sends a newer one about the same subject."""

    def __init__(self, owner: Owner = ("", "")) -> None:
        self.owner = owner
        self.replaced = asyncio.Event()


@dataclass
class Session:
    owner: Owner = ("", "")  # network address and token
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
        older, self._requests[subject] = self._requests.get(subject), Request(self.owner)
        if older is not None:
            older.replaced.set()
        return self._requests[subject]

    def add(self, path: Path, name: str) -> str:
        """Adds an uploaded photo, deletes the oldest one if there are too many, and returns the id."""
        photo = f"upload:{secrets.token_hex(8)}"
        self.uploads[photo] = Photo(path, name, path.stat().st_size)
        while len(self.uploads) > UPLOADS:
            self.delete_oldest()
        return photo

    def stored(self) -> int:
        return sum(photo.size for photo in self.uploads.values())

    def delete_oldest(self) -> None:
        self._delete(next(iter(self.uploads)))

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

    def open(self, token: str | None = None, address: str = "") -> str:
        """Returns the token of an existing session, or that of a new one."""
        self.end_idle()
        if token is not None and self.get(token):
            return token
        while len(self._sessions) >= SESSIONS:
            self.end(self._idle_longest(lambda session: 1).owner[1])
        token = secrets.token_urlsafe(16)
        self._sessions[token] = Session((address, token))
        return token

    def make_room(self, size: int) -> None:
        """Deletes uploads until another of this size fits."""
        while sum(map(Session.stored, self._sessions.values())) + size > STORED:
            self._idle_longest(Session.stored).delete_oldest()

    def _idle_longest(self, share: Callable[[Session], int]) -> Session:
        """Of the address with the largest share, the session that was idle longest and has one. Visitors can
        only displace others who share their address."""
        shares: Counter[str] = Counter()
        for session in self._sessions.values():
            shares[session.owner[0]] += share(session)
        largest = shares.most_common(1)[0][0]
        found = [each for each in self._sessions.values() if each.owner[0] == largest and share(each)]
        return min(found, key=lambda session: session.seen)

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
