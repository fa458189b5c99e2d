"""rectgrad explain"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.explain_ray import ModelSpec, run_on_ray
from rectgrad.cli.index import of_many
from rectgrad.cli.report import Outcome, process
from rectgrad.cli.run import Drawn, Json, Plan, array, run, summary_of
from rectgrad.explanation import Explanation, Network, Prepared, explain_prepared, recommended
from rectgrad.explanation.result import PICTURES
from rectgrad.explanation.trust import LOW
from rectgrad.methods import Method
from rectgrad.methods.catalog import name_of, plain_value
from rectgrad.models import MODELS
from rectgrad.photos import names

DEFAULT = "efficientnet_lite0"
explain_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Explain:
    """One method, and one picture for each photo."""

    method: Method
    target: int | None = None  # None: the top class of each photo
    dark: bool = False
    specificity: bool | None = None  # None: for methods that need one pass
    only: str | None = None  # "map" or "overlay"
    smooth: bool = False

    def settings(self) -> Json:
        return {
            "method": name_of(self.method),
            "options": {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)},
            "target": self.target,
            "dark": self.dark,
            "specificity": self.specificity,
            "only": self.only,
            "smooth": self.smooth,
        }

    def explain(self, network: Network, batch: list[Prepared]) -> list[Explanation]:
        n = len(batch)
        return explain_prepared(network, batch, n, self.method, self.target, n, self.specificity)

    def draw(self, answer: Explanation) -> Drawn:
        picture = answer.show(dark=self.dark, only=self.only, smooth=self.smooth)
        return Drawn(picture, answer.overlay(), array(answer), summary_of(answer))


@explain_app.command("explain")
@shared.with_method_options
def explain_command(
    images: shared.Images = None,
    method: Annotated[str, typer.Option(help="Attribution method; see `rectgrad methods`.")] = recommended(
        "where"
    ),
    target: shared.Target = None,
    model: shared.ModelName = DEFAULT,
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Photos per batch.")] = 8,
    out: shared.Out = Path("explained"),
    maps: shared.Maps = None,
    only: Annotated[str | None, typer.Option(help="Draw only one panel: map or overlay.")] = None,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Blur the map in the overlay, for slides.")
    ] = False,
    dark: shared.Dark = False,
    specificity: shared.WithSpecificity = None,
    engine: Annotated[str, typer.Option(help="local, or ray to use all cores or a cluster.")] = "local",
    again: shared.Again = False,
    as_json: shared.AsJson = False,
    *,
    options: dict[str, Any],
) -> int:
    """Explain photos: what did the network look at?

    Writes OUT/NAME.png (photo, map, overlay), OUT/NAME.json (the explained class, the top 5, the specificity)
    and, with --maps, the raw map of each photo. OUT/index.html shows all results. Existing results are kept,
    so an interrupted run can be resumed.

    Example: rectgrad explain photos/ --method rectgrad --q 95 --maps npz --out explained
    """
    shared.check_choice("--maps", maps, shared.KINDS)
    shared.check_choice("--only", only, PICTURES)
    shared.check_choice("--engine", engine, ("local", "ray"))
    configured = shared.build_method(method, options)
    sources = shared.find_photos(images, out)
    network = shared.network(model, weights, labels, device, target)
    work = Explain(configured, network.target, dark, specificity, only, smooth)
    made_from = shared.code_of(model)
    # A user's model may keep state between its layers that a concurrent call would overwrite. A single batch
    # gets all threads.
    built_in = network.model.name in MODELS and network.device == "cpu"
    in_pairs = built_in and configured.one_backward and len(sources) > batch_size
    plan = Plan(network.model, work, out, maps, batch_size, network.device, made_from, again, in_pairs)
    shared.prepare_output(out)
    execute: Callable[..., int] = run
    if engine == "ray":
        execute = functools.partial(run_on_ray, ModelSpec(model, weights, labels))
    outcome = process("explain", plan, sources, as_json, execute)
    if not as_json and outcome.records:
        if len(sources) == 1:
            again_with = {"--model": model, "--weights": weights, "--labels": labels, "--target": target}
            _print_one(outcome.records[0], out, _command(images, again_with))
        else:
            _print_many(outcome, out)
    return shared.exit_status(outcome.broken, len(sources) > 1)


def _command(images: list[str] | None, given: Mapping[str, object]) -> str:
    """The photo and the options that name the network and the class, for another command."""
    chosen = [
        f"{flag} {shlex.quote(str(value))}" for flag, value in given.items() if value not in (None, DEFAULT)
    ]
    photo = "PHOTO" if images is None else names.readable(images[0])
    photo = f"./{photo}" if photo.startswith("-") else photo  # it would be an option
    return " ".join([shlex.quote(photo), *chosen])


def _print_one(record: Json, out: Path, photo: str) -> None:
    """Prints the top five classes, the class of --target, the path of the picture, the specificity, and what
    to try next."""
    asked, target = record["settings"]["target"] is not None, record["target"]
    for candidate in record["top5"] + [target] * (target not in record["top5"]):
        confidence = "" if candidate["confidence"] is None else f"{candidate['confidence']:.1%}"
        explained = "  (explained)" if asked and candidate == target else ""
        print(f"{confidence:>7}  {names.readable(candidate['name'])}{explained}")
    print(out / record["picture"])
    for note in record["notes"]:
        print(note)
    print(_next_step(record, photo))


def _next_step(record: Json, photo: str) -> str:
    better = recommended("why this class")
    if record["caution"] and better != record["settings"]["method"]:
        return f"Next: {_program()} explain {photo} --method {better}  (why this class)"
    return f"Next: {_program()} compare {photo}  (several methods side by side)"


def _program() -> str:
    """The command that the user can type to run this program again."""
    called = sys.argv[0]
    if Path(called).name == "__main__.py":
        return "python -m rectgrad"
    return "rectgrad" if shutil.which("rectgrad") else os.path.relpath(called)


def _print_many(outcome: Outcome, out: Path) -> None:
    """Prints a summary. The last line is the path to open."""
    count = len(outcome.records)
    existing = f", {count - outcome.computed} of them in an earlier run" if outcome.computed < count else ""
    print(f"{count} photo{'s' if count > 1 else ''} explained{existing}")
    values = [record["specificity"] for record in outcome.records if record["specificity"] is not None]
    if values:
        low = sum(value < LOW for value in values)
        print(
            f"Specificity: median {statistics.median(values):.2f}; below {LOW:g} for {low} of {len(values)}"
        )
    for caution in dict.fromkeys(record["caution"] for record in outcome.records if record["caution"]):
        print(of_many(caution))
    warned = sum(bool(record["warnings"]) for record in outcome.records)
    if warned:
        print(f'{warned} with warnings; to see them, select "with warnings" on the page')
    print(out / "index.html")
