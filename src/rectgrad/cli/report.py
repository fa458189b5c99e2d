"""Runs a plan over photos and reports to the user: progress, index page, results and exit status."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.index import Index
from rectgrad.cli.progress import evaluating, progress
from rectgrad.cli.run import Json, Plan, run
from rectgrad.photos import files, reading
from rectgrad.photos.files import Source


class Outcome(NamedTuple):
    """The records in the order of the photos, how many are new, and the errors of unreadable files."""

    records: list[Json]
    computed: int
    broken: list[str]


def process(
    command: str, plan: Plan, sources: list[Source], as_json: bool, execute: Callable[..., int] = run
) -> Outcome:
    """Runs the plan. The index page is complete even if the run is interrupted."""
    broken: list[str] = []
    records: dict[str, Json] = {}
    turn, printed = files.exclusive(plan.out, lambda: waits(plan.out)), contextlib.redirect_stdout(sys.stderr)
    results = sys.stdout  # and what the code of a model prints is none
    with turn, printed, progress(len(sources), _DOING[command]) as advance, evaluating():
        index = Index(plan.out, command, len(sources))

        def done(source: Source, result: Json | BaseException) -> None:
            if isinstance(result, BaseException):
                memory = isinstance(result, MemoryError)  # has no message of its own
                broken.append(f"{source.path}: not enough memory" if memory else str(result))
                index.add(None)
            else:
                records[source.name] = result
                index.add(result)
                if as_json:
                    print(json.dumps(result, ensure_ascii=False), file=results, flush=True)
            advance()

        try:
            computed = execute(plan, sources, done)
        finally:
            index.close()
    return Outcome([records[each.name] for each in sources if each.name in records], computed, broken)


def waits(out: Path) -> None:
    print(f"rectgrad: waiting for another process that writes to {out}", file=sys.stderr, flush=True)


_DOING = {"explain": "explaining", "compare": "comparing", "sweep": "sweeping", "layers": "layers"}


def report_sheets(plan: Plan, outcome: Outcome, as_json: bool, together: Path | None = None) -> int:
    """Prints the path to open (a single sheet, the sheet of all photos, or the index page) and returns the
    exit status."""
    pictures = [plan.out / record["picture"] for record in outcome.records]
    if together is not None and pictures:
        files.save_picture(_stacked(pictures), together)
    if pictures and not as_json:
        print(together or (pictures[0] if len(pictures) == 1 else plan.out / "index.html"))
    return shared.exit_status(outcome.broken, len(outcome.records) + len(outcome.broken) > 1)


def _stacked(paths: list[Path]) -> Image.Image:
    """The pictures in these files, one below the other."""
    pictures = [reading.read(path) for path in paths]
    width, height = max(each.width for each in pictures), sum(each.height for each in pictures)
    page = Image.new("RGB", (width, height), pictures[0].getpixel((0, 0)) or image.PAGE[False])
    y = 0
    for each in pictures:
        page.paste(each, (0, y))
        y += each.height
    return page
