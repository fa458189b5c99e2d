"""rectgrad judge"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.cli.report import waits
from rectgrad.data import DATASETS, Dataset, Images
from rectgrad.explanation import Network
from rectgrad.photos import files
from rectgrad.verdict import Verdict
from rectgrad.verdict.judging import judged
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.record import text
from rectgrad.verdict.run import ENGINES

judge_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@judge_app.command("judge")
def judge(
    images: Annotated[
        list[str],
        typer.Argument(help=f"Photos, folders or glob patterns, or a dataset: {' or '.join(DATASETS)}."),
    ],
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
    count: Annotated[
        int | None,
        typer.Option(
            help="Number of photos, for every measure; default: the numbers of the preset.",
            show_default=False,
        ),
    ] = None,
    device: shared.Device = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray to use all cores or a cluster.")] = "local",
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    out: shared.Out = Path("verdict"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Judge which methods to trust on a network and photos.

    Writes OUT/verdict.html, a page that needs no network connection, and OUT/verdict.json. Methods are
    compared with each other and with controls that do not depend on the network. Finished parts are kept in
    OUT/parts, so an interrupted run resumes. Of a dataset, test images are used; those of `shapes` have
    masks.

    Example: rectgrad judge photos/ --methods rectgrad,saliency,gradcam --out verdict

    Example: rectgrad judge cifar10 --model cifar10_resnet --preset full --count 1000
    """
    shared.check_choice("--preset", preset, tuple(PRESETS))
    shared.check_choice("--engine", engine, ENGINES)
    settings = PRESETS[preset] if count is None else PRESETS[preset].of_photos(count)
    data = _dataset(images)
    # The first images: every k-th one of `shapes`, whose classes alternate, might be of the same class.
    test = None if data is None else data.test.rows(slice(settings.photos))
    photos = (
        shared.find_photos(images, out) if test is None else [Image.fromarray(each) for each in test.pixels]
    )
    loaded, resolved, _ = shared.network(model, weights, labels, device, None)
    printed = contextlib.redirect_stdout(sys.stderr)  # what the code of a model prints is no result
    with printed:
        shared.check_alone(loaded, resolved)
    shared.prepare_output(out)
    # A built-in network with the user's weights was trained on the dataset if the numbers of classes agree.
    fits = data is not None and weights is not None and len(data.classes) == len(loaded.labels)
    network = Network.of(
        loaded, labels=data.classes if data is not None and fits and labels is None else None
    )
    if weights is not None:
        network = replace(network, name=f"{network.name} ({weights.name})")
    objects = masks if masks is not None or test is None else _masks(test)
    with files.exclusive(out, lambda: waits(out)), printed:  # both files of the verdict are from one run
        verdict = judged(network, photos, methods, measures, objects, settings, out, engine, seed, progress)
    print(text(verdict.record), end="") if as_json else _print(verdict, out)
    broken = [each["why"] for each in verdict.failures if each["kind"] == "photo"]
    return shared.exit_status(broken, len(photos) > 1)


def _masks(images: Images) -> list[Image.Image] | None:
    """As pictures, which are cropped like the photos."""
    return None if images.masks is None else [Image.fromarray(np.uint8(255) * each) for each in images.masks]


def _dataset(images: list[str]) -> Dataset | None:
    """The dataset with the given name, unless there is a file or folder of that name."""
    named = len(images) == 1 and images[0] in DATASETS and not Path(images[0]).exists()
    return DATASETS[images[0]]() if named else None


def _print(verdict: Verdict, out: Path) -> None:
    print(verdict)
    for each in verdict.failures:
        if each["kind"] != "photo":
            print(f"  not judged: {each['what']}: {each['why']}")
    print(out / "verdict.html")
