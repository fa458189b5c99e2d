"""rectgrad bench"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rectgrad.bench import NETWORKS, Plan, run
from rectgrad.cli import CommandExit, bench_tables
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress

bench_app = typer.Typer(add_completion=False, rich_markup_mode=None)

Models = Annotated[list[str] | None, typer.Option("--model", help=f"{', '.join(NETWORKS)}; may be repeated.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="See `rectgrad methods`; may be repeated.")
]


@bench_app.command("bench")
def bench(
    model: Models = None,
    method: Methods = None,
    device: shared.Device = "auto",
    batch: Annotated[int, typer.Option(help="Images per batch.")] = 1,
    pixels: Annotated[
        int | None, typer.Option(help="Height and width of the images; default: the network's own.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of timed rounds.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Use the channels-last memory format.")
    ] = False,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="TF32 on CUDA; default: torch's setting.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's setting.")] = None,
    averages: Annotated[
        bool, typer.Option("--averages", help="Include SmoothGrad and Integrated Gradients, 50 passes each.")
    ] = False,
    naive: Annotated[
        bool,
        typer.Option(
            "--naive/--no-naive", help="Include straightforward RectGrad implementations in plain torch."
        ),
    ] = True,
    captum: Annotated[
        bool | None,
        typer.Option("--captum/--no-captum", help="Include Captum's methods; default: if it is installed."),
    ] = None,
    selection: Annotated[
        bool, typer.Option("--selection", help="Also time the selection of tau on its own.")
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Also measure how the cost grows with batch size and image size."),
    ] = False,
    as_json: Annotated[
        str | None, typer.Option("--json", help="Write the results to this file; - for stdout.")
    ] = None,
) -> None:
    """Measure the time and memory of each method relative to the plain gradient.

    Networks have random weights, so nothing is downloaded. Rounds are interleaved, and each ratio is computed
    within its round. The --json file is updated after each network.

    Example: rectgrad bench --model resnet50 --batch 4 --method rectgrad --json speed.json
    """
    plan = Plan(
        models=tuple(model or ("efficientnet_lite0",)),
        device=shared.resolve_device(device),
        batch=batch,
        pixels=pixels,
        methods=tuple(method or ()),
        rounds=rounds,
        channels_last=channels_last,
        tf32=tf32,
        dtype=dtype,
        threads=threads,
        averages=averages,
        captum=captum,
        naive=naive,
        selection=selection,
        scaling=scaling,
    )
    file, shown = _file(as_json), as_json != "-"
    try:
        result = run(plan, file, progress, bench_tables.printer(plan) if shown else _ignore)
    except KeyboardInterrupt:
        saved = f"; finished results are in {file}" if file and file.exists() else ""
        print(f"rectgrad: interrupted{saved}", file=sys.stderr)
        raise CommandExit(130) from None
    if not shown:
        print(json.dumps(result, ensure_ascii=False))
    elif file:
        print(file)


def _file(as_json: str | None) -> Path | None:
    """The output file."""
    if as_json in (None, "-"):
        return None
    file = Path(as_json)
    shared.check_file("--json", file, ", or - for stdout")
    return file


def _ignore(kind: str, section: dict[str, Any]) -> None:
    """Prints nothing: stdout is for the JSON."""
