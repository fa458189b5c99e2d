"""Downloads with progress and checksums. An interrupted download resumes."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rectgrad.data.dataset import DataUnavailableError

CHUNK = 1 << 20
# (number of steps, description) -> a context that yields a function to call after each step
Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]


def no_progress(total: int, what: str) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def download(address: str, path: Path, digest: str | None = None, progress: Progress = no_progress) -> Path:
    """Downloads a file to `path` and verifies its digest, "md5:..." or "sha256:...". An interrupted download
    resumes from `path`.part."""
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _append(address, part, path.name, progress)
    except (http.client.HTTPException, OSError, ValueError) as error:  # a server can answer anything
        reason = getattr(error, "reason", None) or error
        raise DataUnavailableError(
            f"{address} could not be downloaded ({' '.join(str(reason).split())}); download it on a machine "
            "with network access and pass the file with --from"
        ) from error
    check(part, digest, address)
    with open(part, "rb+") as written:
        os.fsync(written.fileno())
    os.replace(part, path)
    return path


def _append(address: str, part: Path, what: str, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # the file is complete
            return
        raise
    with response:
        if done and response.status != 206:  # the server sends the whole file
            done = 0
        remaining = int(response.headers.get("Content-Length") or 0)
        with open(part, "ab" if done else "wb") as file, progress(-(-remaining // CHUNK), what) as advance:
            received = _copy(response, file, advance)
    if received < remaining:
        raise OSError(
            f"the connection was lost after {received} of {remaining} bytes; run the command again to resume"
        )


def _copy(source: Any, file: Any, advance: Callable[[], None]) -> int:
    received = 0
    while chunk := source.read(CHUNK):
        file.write(chunk)
        received += len(chunk)
        advance()
    return received


def check(path: Path, digest: str | None, name: str) -> None:
    """Raises an error and removes the file if its digest differs."""
    if digest is None:
        return
    algorithm, _, expected = digest.partition(":")
    actual = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            actual.update(chunk)
    if actual.hexdigest() != expected:
        path.unlink()
        raise DataUnavailableError(
            f"{name} is damaged: its {algorithm} is {actual.hexdigest()}, not {expected}; try again"
        )
