"""rectgrad explain"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.explain_ray import Named, explain_with
from rectgrad.cli.progress import progress
from rectgrad.explanation import Plan, explain
from rectgrad.photos import files
from rectgrad.photos.files import Source

explain_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@explain_app.command("explain")
@shared.with_method_options
def explain_command(
    images: shared.Images = None,
    method: Annotated[str, typer.Option(help="See `rectgrad methods`.")] = "rectgrad",
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Photos at a time.")] = 8,
    out: shared.Out = Path("explained"),
    maps: Annotated[str | None, typer.Option(help="Keep the raw maps: npy or npz.")] = None,
    dark: shared.Dark = False,
    engine: Annotated[str, typer.Option(help="local, or ray: on all cores, or a cluster.")] = "local",
    again: Annotated[bool, typer.Option("--again", help="Do what is already there once more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each photo on stdout.")] = False,
    *,
    options: dict[str, Any],
) -> int:
    """Explain photos: what did the network look at?

    Each photo gives OUT/NAME.png (photo, map, overlay), OUT/NAME.json (the class explained, the top 5) and,
    with --maps, the raw map. What is already there is not done again; a run that was stopped goes on.

    Example: rectgrad explain photos/ --method rectgrad --q 95 --maps npz --out explained
    """
    if maps not in (None, "npy", "npz"):
        raise ValueError(f"--maps must be npy or npz, not {maps!r}")
    chosen = shared.configured(method, options)
    found = shared.photos_meant(images, out)
    network = shared.network(model, weights, labels, device, target)
    made_from = shared.marks(model, weights, labels)
    plan = Plan(
        network.model, chosen, out, network.target, maps, batch_size, network.device, dark, made_from, again
    )
    shared.results_folder(out)
    run = explain if engine == "local" else functools.partial(_on_ray(engine), Named(model, weights, labels))
    return report(plan, found, as_json, run)


def _on_ray(engine: str) -> Callable[..., int]:
    if engine != "ray":
        raise ValueError(f"--engine must be local or ray, not {engine!r}")
    return explain_with


def report(plan: Plan, found: list[Source], as_json: bool, run: Callable[..., int] = explain) -> int:
    """Explain and tell: a line for each photo, the broken ones at the end. Returns the exit status."""
    broken: list[str] = []
    lines: dict[str, Any] = {}

    with progress(len(found), "explaining") as advance:

        def done(source: Source, result: Any) -> None:
            if isinstance(result, BaseException):
                broken.append(str(result))
            else:
                lines[source.name] = result
                if as_json:
                    print(json.dumps(result, ensure_ascii=False), flush=True)
            advance()

        fresh = run(plan, found, done)
    ordered = [lines[source.name] for source in found if source.name in lines]
    everything = (files.load_json(path) for path in sorted(plan.out.rglob("*.json")))
    ours = (known for known in everything if isinstance(known, dict) and "settings" in known)
    text = "".join(json.dumps(known, ensure_ascii=False) + "\n" for known in ours)
    files.save_text(text, plan.out / "explained.jsonl")  # of this run and of those before
    if not as_json:
        _say(plan, ordered, fresh)
    return shared.status(broken)


def _say(plan: Plan, results: list[dict[str, Any]], fresh: int) -> None:
    """The last line is the path of what to look at."""
    for result in results[:1] if len(results) == 1 else []:
        for candidate in result["top5"]:
            print(f"{candidate['confidence']:7.1%}  {candidate['name']}")
    before = f", {len(results) - fresh} of them before" if fresh < len(results) else ""
    if len(results) > 1:
        print(f"{len(results)} photos explained{before}")
    if results:
        print(plan.out / results[0]["picture"] if len(results) == 1 else plan.out)
