"""rectgrad explain"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.explain_ray import ModelSpec, explain_on_ray
from rectgrad.cli.progress import progress
from rectgrad.cli.run import Plan, explain_photos
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
    batch_size: Annotated[int, typer.Option(min=1, help="Photos per batch.")] = 8,
    out: shared.Out = Path("explained"),
    maps: Annotated[str | None, typer.Option(help="Save the raw maps as npy or npz.")] = None,
    dark: shared.Dark = False,
    engine: Annotated[str, typer.Option(help="local, or ray: all cores, or a cluster.")] = "local",
    again: Annotated[bool, typer.Option("--again", help="Recompute existing results.")] = False,
    specificity: Annotated[
        bool, typer.Option("--specificity", help="Compute it also for methods that need many passes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per photo.")] = False,
    *,
    options: dict[str, Any],
) -> int:
    """Explain photos: what did the network look at?

    Writes OUT/NAME.png (photo, map, overlay), OUT/NAME.json (the explained class, the top 5) and, with
    --maps, the raw map of each photo. Existing results are kept, so that an interrupted run resumes.

    Example: rectgrad explain photos/ --method rectgrad --q 95 --maps npz --out explained
    """
    if maps not in (None, "npy", "npz"):
        raise ValueError(f"--maps must be npy or npz, not {maps!r}")
    configured = shared.build_method(method, options)
    sources = shared.find_photos(images, out)
    network = shared.network(model, weights, labels, device, target)
    made_from = shared.fingerprints(model, weights, labels)
    plan = Plan(
        network.model,
        configured,
        out,
        network.target,
        maps,
        batch_size,
        network.device,
        dark,
        made_from,
        again,
        specificity or None,
    )
    shared.prepare_output(out)
    run = (
        explain_photos
        if engine == "local"
        else functools.partial(_on_ray(engine), ModelSpec(model, weights, labels))
    )
    return explain_and_report(plan, sources, as_json, run)


def _on_ray(engine: str) -> Callable[..., int]:
    if engine != "ray":
        raise ValueError(f"--engine must be local or ray, not {engine!r}")
    return explain_on_ray


def explain_and_report(
    plan: Plan, sources: list[Source], as_json: bool, run: Callable[..., int] = explain_photos
) -> int:
    """Explains the photos, prints the results and the unreadable files, and returns the exit status."""
    broken: list[str] = []
    results: dict[str, Any] = {}

    with progress(len(sources), "explaining") as advance:

        def done(source: Source, result: Any) -> None:
            if isinstance(result, BaseException):
                broken.append(str(result))
            else:
                results[source.name] = result
                if as_json:
                    print(json.dumps(result, ensure_ascii=False), flush=True)
            advance()

        computed = run(plan, sources, done)
    _write_summary(plan.out)
    if not as_json:
        ordered = [results[source.name] for source in sources if source.name in results]
        _print_results(plan, ordered, computed)
    return shared.exit_status(broken)


def _write_summary(out: Path) -> None:
    """Writes explained.jsonl: the records of this run and of earlier ones."""
    contents = (files.load_json(path) for path in sorted(out.rglob("*.json")))
    records = (each for each in contents if isinstance(each, dict) and "settings" in each)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    files.save_text(text, out / "explained.jsonl")


def _print_results(plan: Plan, results: list[dict[str, Any]], computed: int) -> None:
    """The last line is the path to open."""
    for result in results[:1] if len(results) == 1 else []:
        for candidate in result["top5"]:
            print(f"{candidate['confidence']:7.1%}  {candidate['name']}")
        for note in result["notes"]:
            print(note)
    existing = f", {len(results) - computed} of them earlier" if computed < len(results) else ""
    if len(results) > 1:
        print(f"{len(results)} photos explained{existing}")
    if results:
        print(plan.out / results[0]["picture"] if len(results) == 1 else plan.out)
