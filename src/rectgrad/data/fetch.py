"""Downloads: with progress, going on where they stopped, and checked."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rectgrad.data.dataset import DataUnavailableError

CHUNK = 1 << 20
# (number of steps, what) -> a context that gives a function to call after each step
Watch = Callable[[int, str], AbstractContextManager[Callable[[], None]]]


def unwatched(total: int, what: str) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def download(address: str, path: Path, digest: str | None = None, watch: Watch = unwatched) -> Path:
    """The file at an address, at `path`. `digest`: "md5:..." or "sha256:...". What a stopped download left
    (`path`.part) is not fetched again."""
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _append(address, part, path.name, watch)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataUnavailableError(
            f"{address} could not be downloaded ({' '.join(str(reason).split())}); fetch it where there is a "
            "network and give the file with --from"
        ) from error
    check(part, digest, address)
    os.replace(part, path)
    return path


def _append(address: str, part: Path, what: str, watch: Watch) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to fetch
            return
        raise
    with answer:
        if done and answer.status != 206:  # the server starts from the beginning
            done = 0
        left = int(answer.headers.get("Content-Length") or 0)
        with open(part, "ab" if done else "wb") as file, watch(-(-left // CHUNK), what) as advance:
            received = _copy(answer, file, advance)
    if received < left:
        raise OSError(f"the connection ended after {received} of {left} bytes; run it again to go on")


def _copy(source: Any, file: Any, advance: Callable[[], None]) -> int:
    received = 0
    while chunk := source.read(CHUNK):
        file.write(chunk)
        received += len(chunk)
        advance()
    return received


def check(path: Path, digest: str | None, name: str) -> None:
    """An error where a file is not the one expected; it is removed, lest it be gone on with."""
    if digest is None:
        return
    kind, _, wanted = digest.partition(":")
    found = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    if found.hexdigest() != wanted:
        path.unlink()
        raise DataUnavailableError(
            f"{name} arrived damaged: its {kind} is {found.hexdigest()}, not {wanted}; run it again"
        )
