"""The grid pointing game in both protocols, on 2 x 1, 2 x 2 and 3 x 3 photos, for every one-pass method.

    python benchmarks/grid_pointing.py PHOTOS --json results/grid/efficientnet_lite0.json [--device cuda]
        [--model efficientnet_lite0] [--methods a,b] [--composites 500] [--perturbed 50] [--candidates 40000]

Protocol A (Böhle et al. 2021; Rao et al. 2022): photos that the network names with p > 0.9, each cell at the
network's full input size. Protocol B: cells resized to fit the ordinary input; a composite is kept if every
class in it has p > 0.02. Where too few pass, as with nine photos, "B asked" requires it only of the class
that is asked for. Cells take turns in being asked for, and each photo is asked for once. `--perturbed N` adds
occlusion and RISE (1,000 masks) on N composites. With --labelled, file names begin with the WordNet id of
every k-th class of ImageNet, and photos that the network names wrongly are left out.

Each cell of the table is the mean score with its 95 % interval over composites; chance is 1 / cells. Finished
parts are kept beside the record, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectgrad import attribute
from rectgrad.bench.environment import commit, environment
from rectgrad.experiments.parts import Parts
from rectgrad.explanation import Network
from rectgrad.methods import METHODS, GradCAM, Method
from rectgrad.metrics import grid, statistics
from rectgrad.models import load
from rectgrad.photos import files
from rectgrad.verdict.album import album
from rectgrad.verdict.case import Case
from rectgrad.verdict.grids import SURE
from rectgrad.verdict.presets import PRESETS, is_cheap
from rectgrad.verdict.rows import Row, rows_of

SHAPES = {"2 x 1": (1, 2), "2 x 2": (2, 2), "3 x 3": (3, 3)}  # photos beside each other, by rows
PROTOCOLS = ("A", "B", "B asked")
Shape = tuple[int, int]
VALUES = 3 * 50 * 224 * 224  # of the composites that are computed together
SEED = 0


class Game(NamedTuple):
    """Composites of one size and protocol."""

    photos: Tensor  # (count, cells), by number
    shape: Shape
    fit: bool
    tried: int

    def asked(self, start: int, stop: int) -> Tensor:
        """The cell that is asked for."""
        return torch.arange(start, stop) % self.photos.shape[1]


def game(case: Case, protocol: str, shape: Shape, count: int, candidates: int, usable: Tensor) -> Game:
    classes = case.outputs.argmax(1)
    if protocol == "A":
        sure = usable[case.outputs.softmax(1).amax(1)[usable] > SURE]
        index, tried = grid.usable_photos(classes[sure], shape, count, candidates, seed=SEED)
        return Game(sure[index], shape, False, tried)

    def recognised(index: Tensor) -> Tensor:
        photos = usable[index]
        images = grid.composites(case.inputs, photos, shape, fit=True)
        found = grid.recognised_cells(case.evaluated(images).cpu(), classes[photos])
        return found.all(1, keepdim=True).expand_as(found) if protocol == "B" else found

    index, tried = grid.usable_photos(classes[usable], shape, count, candidates, recognised, SEED)
    return Game(usable[index], shape, True, tried)


def scores(case: Case, played: Game, row: Row, count: int) -> Iterator[list[float]]:
    """Of each composite, in batches."""
    classes = case.outputs.argmax(1)
    size = max(VALUES // (case.inputs[0].numel() * (1 if played.fit else played.photos.shape[1])), 1)
    for start in range(0, min(count, len(played.photos)), size):
        index = played.photos[start : min(start + size, count)]
        cells = played.asked(start, start + len(index))
        x = grid.composites(case.inputs, index, played.shape, played.fit)
        target = classes[index.gather(1, cells[:, None])[:, 0]].to(case.device)
        maps = attribute(case.model, x, row.method, target)
        yield grid.grid_pointing(maps, played.shape, cells.to(case.device)).double().cpu().tolist()


def table(
    case: Case, rows: list[Row], given: argparse.Namespace, parts: Parts, usable: Tensor
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    enough: dict[str, bool] = {}
    for protocol in given.protocols:
        for name, shape in SHAPES.items():
            if protocol == "B asked" and enough.get(name):
                continue
            try:
                played = game(case, protocol, shape, given.composites, given.candidates, usable)
            except ValueError as error:  # too few classes
                found.setdefault(protocol, {})[name] = {"error": str(error)}
                continue
            enough[name] = protocol == "B" and len(played.photos) == given.composites
            chance = round(1 / played.photos.shape[1], 4)
            kept = {"kept": len(played.photos), "tried": played.tried, "chance": chance}
            print(f"{protocol}, {name}: {kept}", flush=True)
            cells = {row.name: _cell(case, played, row, parts, f"{protocol}-{name}", given) for row in rows}
            found.setdefault(protocol, {})[name] = kept | {"methods": cells}
    return found


def _cell(case: Case, played: Game, row: Row, parts: Parts, label: str, given: Any) -> dict[str, Any]:
    count, started = given.composites if is_cheap(row.method) else given.perturbed, time.monotonic()

    def compute() -> dict[str, Any]:
        try:
            return {"scores": [value for batch in scores(case, played, row, count) for value in batch]}
        except (ValueError, RuntimeError) as error:
            return {"error": " ".join(str(error).split())}

    values = parts.part(f"{label}-{row.name}-{row.digest}", compute)
    if not values.get("scores"):
        return {"error": values.get("error", "no composites")}
    mean, low, high, n = (each.tolist()[0] for each in statistics.bootstrap(values["scores"], seed=SEED))
    seconds = time.monotonic() - started
    print(f"  {row.name:22} {mean:.3f} ({low:.3f} to {high:.3f}), n {n}, {seconds:.1f} s", flush=True)
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4), "n": n}


def chosen_rows(given: argparse.Namespace, network: Network) -> list[Row]:
    """One-pass methods, HiResCAM and controls; perturbation methods if they are asked for."""
    preset = replace(PRESETS["full"], samples=10)
    names = [
        name for name, method in METHODS.items() if method.ready and method.one_backward and method.runs_model
    ]
    names += ["occlusion", "rise"] if given.perturbed else []
    rows = rows_of(given.methods or names, preset, SEED)
    extra: list[tuple[str, Method]] = [("hirescam", GradCAM(variant="hirescam"))]
    rows += [Row(name, method) for name, method in extra if given.methods is None]
    return [replace(row, method=network.bounded(row.method)) for row in rows]


def right(case: Case, names: list[str], labelled: bool) -> Tensor:
    """The photos that may be used, by number."""
    every = torch.arange(len(case.inputs))
    if not labelled:
        return every
    order = sorted({Path(name).stem.split("_")[0] for name in names})
    step = case.outputs.shape[1] // len(order)  # every second class of 1,000
    truth = torch.tensor([order.index(Path(name).stem.split("_")[0]) * step for name in names])
    return every[case.outputs.argmax(1) == truth]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--protocols", type=lambda text: text.split(","), default=PROTOCOLS)
    parser.add_argument("--composites", type=int, default=500)
    parser.add_argument("--perturbed", type=int, default=0)
    parser.add_argument("--candidates", type=int, default=40_000)
    parser.add_argument("--labelled", action="store_true")
    given = parser.parse_args()
    started = time.monotonic()
    loaded = load(given.model, weights=given.weights)
    loaded.module.to(given.device)
    network = Network.of(loaded)
    shown = album(network, given.photos, 10**9)
    case = Case(network.module, shown.inputs.to(given.device), PRESETS["full"], ("grid_pointing",), SEED)
    usable = right(case, shown.names, given.labelled)
    settings = case.digests() | {"candidates": given.candidates, "composites": given.composites}
    parts = Parts(given.json.with_name(f"{given.json.stem}-parts"), settings)
    found = table(case, chosen_rows(given, network), given, parts, usable)
    record = {
        "model": given.model,
        "photos": len(case.inputs),
        "usable": len(usable),
        "table": found,
        "settings": {key: str(value) for key, value in vars(given).items()},
        "digests": case.digests(),
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment(given.device),
        "commit": commit(),
    }
    files.save_json(record, given.json)


if __name__ == "__main__":
    main()
