"""rectgrad judge"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.explanation import Network
from rectgrad.models import load
from rectgrad.verdict import Verdict
from rectgrad.verdict.judging import judged
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.run import ENGINES

judge_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@judge_app.command("judge")
def judge(
    images: Annotated[list[str], typer.Argument(help="Photos, folders or glob patterns.")],
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated names from `rectgrad methods`, or all.")
    ] = "all",
    measures: Annotated[str, typer.Option(help="Comma-separated measures, or all.")] = "all",
    masks: Annotated[
        Path | None, typer.Option(help="Folder of object masks with the names of the photos.")
    ] = None,
    preset: Annotated[str, typer.Option(help="quick (50 photos) or full (500 photos).")] = "quick",
    device: shared.Device = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray to use all cores or a cluster.")] = "local",
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    out: shared.Out = Path("verdict"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Judge which methods to trust on a network and photos.

    Writes OUT/verdict.html, a page that needs no network connection, and OUT/verdict.json. Methods are
    compared with each other and with maps that know nothing of the network. Finished parts are kept in
    OUT/parts, so an interrupted run resumes.

    Example: rectgrad judge photos/ --methods rectgrad,saliency,gradcam --out verdict
    """
    shared.check_choice("--preset", preset, tuple(PRESETS))
    shared.check_choice("--engine", engine, ENGINES)
    sources = shared.find_photos(images, out)
    loaded = load(model, weights=weights, labels=labels)
    loaded.module.to(shared.resolve_device(device))
    shared.prepare_output(out)
    network = Network.of(loaded)
    verdict = judged(network, sources, methods, measures, masks, preset, out, engine, seed, progress)
    print(json.dumps(verdict.record, ensure_ascii=False)) if as_json else _print(verdict, out)
    broken = [each["why"] for each in verdict.failures if each["kind"] == "photo"]
    return shared.exit_status(broken, len(sources) > 1)


def _print(verdict: Verdict, out: Path) -> None:
    print(verdict)
    for each in verdict.failures:
        if each["kind"] != "photo":
            print(f"  not judged: {each['what']}: {each['why']}")
    print(out / "verdict.html")
