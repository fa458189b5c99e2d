"""rectgrad bench"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rectgrad.bench import NETWORKS, Plan, run
from rectgrad.cli import bench_tables
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress

bench_app = typer.Typer(add_completion=False, rich_markup_mode=None)

Models = Annotated[list[str] | None, typer.Option("--model", help=f"{', '.join(NETWORKS)}; repeatable.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="See `rectgrad methods`; repeatable.")]


@bench_app.command("bench")
def bench(
    model: Models = None,
    method: Methods = None,
    device: shared.Device = "auto",
    batch: Annotated[int, typer.Option(help="Pictures at a time.")] = 1,
    pixels: Annotated[int | None, typer.Option(help="Side of the pictures; none: the network's own.")] = None,
    rounds: Annotated[int, typer.Option(help="How often everything is timed.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Memory format.")] = False,
    tf32: Annotated[bool | None, typer.Option("--tf32/--no-tf32", help="On CUDA; none: torch's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of the CPU; none: torch's.")] = None,
    averages: Annotated[
        bool, typer.Option("--averages", help="SmoothGrad and Integrated Gradients too: 50 passes each.")
    ] = False,
    naive: Annotated[
        bool, typer.Option("--naive/--no-naive", help="RectGrad written plainly, tau by torch's selections.")
    ] = True,
    captum: Annotated[
        bool | None, typer.Option("--captum/--no-captum", help="Captum's counterparts; none: if installed.")
    ] = None,
    selection: Annotated[bool, typer.Option("--selection", help="Also the selection of tau alone.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Also cost by batch and by pixels.")] = False,
    as_json: Annotated[str | None, typer.Option("--json", help="Results to this file; - for stdout.")] = None,
) -> None:
    """What each method costs: time and memory against the plain gradient of the same network.

    Networks have random weights, so nothing is downloaded. Contenders take turns, round after round, and a
    ratio is taken within its round. The file of --json is written anew after each network.

    Example: rectgrad bench --model resnet50 --batch 4 --method rectgrad --json speed.json
    """
    plan = Plan(
        models=tuple(model or ("efficientnet_lite0",)),
        device=shared.device_of(device),
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
        result = run(plan, file, progress, bench_tables.printer(plan) if shown else _nothing)
    except KeyboardInterrupt:
        kept = f"; what was finished is in {file}" if file and file.exists() else ""
        print(f"rectgrad: stopped{kept}", file=sys.stderr)
        raise SystemExit(130) from None
    if not shown:
        print(json.dumps(result, ensure_ascii=False))
    elif file:
        print(file)


def _file(as_json: str | None) -> Path | None:
    """Where the results go, known to be writable in principle before an hour of work."""
    if as_json in (None, "-"):
        return None
    file = Path(as_json)
    parent = next(each for each in file.absolute().parents if each.exists())
    if file.is_dir() or not parent.is_dir():
        raise ValueError(f"--json {as_json!r} must be a file in a folder, or - for stdout")
    return file


def _nothing(kind: str, section: dict[str, Any]) -> None:
    """JSON alone."""
