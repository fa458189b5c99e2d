"""`judge` and its result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectgrad.api import Model
from rectgrad.bench.environment import commit, environment
from rectgrad.explanation import Network
from rectgrad.explanation.network import Picture, Prepare
from rectgrad.methods import Method
from rectgrad.models import ImageModel
from rectgrad.photos import files
from rectgrad.verdict import answers, table
from rectgrad.verdict.case import Case
from rectgrad.verdict.measures import MEASURES, chosen
from rectgrad.verdict.pictures import Album, album, masks_of
from rectgrad.verdict.presets import Preset, preset_of
from rectgrad.verdict.rows import Row, rows_of
from rectgrad.verdict.run import ENGINES, Computed, Progress, no_progress, parts_of, run

Json = dict[str, Any]
Photos = str | Path | Sequence[Picture] | Tensor


@dataclass
class Verdict:
    """The result of `judge`. `record` has everything, as in verdict.json.

    table: measure -> row -> mean, low, high (95 % interval over photos) and n.
    pairs: for every measure and pair of rows, the paired difference, its interval and Holm's p.
    ranks: `order`, best first; `by_measure`, with ties; `shares` of comparisons won, tied and lost;
    `agreement` of the measures.
    answers: question -> methods that are tied for best, or "inconclusive".
    failures: what could not be judged, and why.
    """

    record: Json = field(repr=False)
    pictures: list[Json] = field(default_factory=list, repr=False)  # of photos, for the page

    def __getattr__(self, name: str) -> Any:
        if name in ("table", "pairs", "ranks", "answers", "claims", "failures", "matched", "costs"):
            return self.record[name]
        raise AttributeError(f"a Verdict has no attribute {name!r}")

    def save(self, folder: str | Path) -> Path:
        """Writes verdict.json and verdict.html; returns the path of the page."""
        files.save_text(
            json.dumps(self.record, indent=1, ensure_ascii=False) + "\n", Path(folder) / "verdict.json"
        )
        return Path(folder) / "verdict.json"

    def __repr__(self) -> str:
        order = [row for row in self.ranks["order"] if row not in self.record["controls"]]
        said = [f"  {q}: {a if isinstance(a, str) else ', '.join(a)}" for q, a in self.answers.items()]
        head = f"Verdict on {self.record['model']}: {self.record['photos']['n']} photos, {len(order)} methods"
        return "\n".join([head, f"  order: {', '.join(order)}", *said])


def judge(
    model: str | ImageModel | Model | None,
    photos: Photos,
    methods: str | Sequence[str] | Mapping[str, Method] = "all",
    *,
    measures: str | Sequence[str] = "all",
    masks: str | Path | Sequence[Picture] | Tensor | None = None,
    preset: str | Preset = "quick",
    prepare: Prepare | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    seed: int = 0,
    progress: Progress = no_progress,
) -> Verdict:
    """Measures which methods show what a network used, on your own photos, next to maps that know nothing.

    model: a name, an ImageModel, or your own module, which needs `prepare` or tensors.
    photos: a folder, a list of paths, PIL images or arrays, or a tensor (N, ...) that the model takes. Each
    is explained for the network's top class, so no labels are needed.
    methods: names, "all", or a mapping from names to methods.
    measures: names, or "all".
    masks: of the objects, as a folder with one picture per photo of the same name, a list, or a boolean
    tensor (N, H, W).
    preset: "quick" (50 photos) or "full" (500 photos).
    out: a folder for the verdict. Finished parts are kept there, and an interrupted run resumes.
    engine: "local", or "ray" for all cores or a cluster.

        verdict = rectgrad.judge("efficientnet_lite0", "photos/", ["rectgrad", "saliency"], out="verdict")
        print(verdict.answers["where"])
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
    started, chosen_preset, wanted = time.monotonic(), preset_of(preset), chosen(measures)
    rows = rows_of(methods, chosen_preset, seed)
    network = Network.of(model, prepare, None, device)
    shown = album(network, photos, chosen_preset.photos)
    known = masks_of(network, masks, shown)
    case = Case(network.module, shown.inputs, chosen_preset, wanted, seed, known)
    parts = parts_of(case, Path(out) if out is not None else None)
    computed = run(case, rows, parts, engine, progress)
    record = _record(case, network, shown, rows, computed)
    record["seconds"] = round(time.monotonic() - started, 1)
    verdict = Verdict(_plain(record))
    if out is not None:
        verdict.save(out)
    return verdict


def _record(case: Case, network: Network, shown: Album, rows: list[Row], computed: Computed) -> Json:
    values, failures = _values(case, rows, computed)
    failures = shown.broken + failures
    record: Json = {
        "model": network.name,
        "preset": asdict(case.preset),
        "seed": case.seed,
        "photos": {"n": len(case.inputs), "names": shown.names, "classes": _classes(case, network)},
        "methods": {row.name: _described(row) for row in rows if not row.control},
        "controls": [row.name for row in rows if row.control],
        "measures": {name: _about(case, name) for name in case.measures},
        "table": {name: table.cells(found, case.seed) for name, found in values.items() if found},
    }
    compared = [name for name in values if MEASURES[name].better is not None]
    record["pairs"] = [pair for name in compared for pair in table.pairs(name, values[name], case.seed)]
    judged = [row.name for row in rows if any(row.name in found for found in values.values())]
    record["ranks"] = table.ranks(judged, record["table"], record["pairs"])
    names = [row.name for row in rows if not row.control and row.name in judged]
    controls = [row.name for row in rows if row.control and row.name in judged]
    record["answers"] = answers.answers(names, controls, record)
    record["claims"] = answers.claims(names, controls, record)
    record["failures"] = failures
    record["costs"] = _costs(rows, computed)
    record["grid"] = _about_grid(case)
    record["environment"] = environment(str(case.device)) | {"commit": commit()}
    return record


def _values(
    case: Case, rows: list[Row], computed: Computed
) -> tuple[dict[str, dict[str, np.ndarray]], list[Json]]:
    """measure -> row -> one value per photo (NaN where there is none), and what failed."""
    lengths = {"grid": case.preset.composites}
    values: dict[str, dict[str, np.ndarray]] = {
        name: {} for name in case.measures if name not in case.unavailable
    }
    failures = [
        {"what": MEASURES[name].title, "why": why}
        for name, why in case.unavailable.items()
        if why != NO_MASKS
    ]
    for row in rows:
        failed: dict[str, str] = {}
        zero = counted = 0
        for (unit, name), chunks in computed.items():
            if name != row.name:
                continue
            errors = [value["error"] for value in chunks.values() if "error" in value]
            if errors:
                failed.setdefault(errors[0], unit)
                continue
            n = lengths.get(unit, len(case.inputs))
            for measure in case.wanted(unit):
                column = np.full(n, np.nan)
                for start, found in chunks.items():
                    if measure in found:
                        column[start : start + len(found[measure])] = found[measure]
                if np.isfinite(column).any():
                    values[measure][row.name] = column
            if unit == "maps":
                zero += sum(value["zero"] for value in chunks.values())
                counted += max(start for start in chunks) and 0
        failures += [{"what": row.name, "why": why} for why in failed]
        if zero:
            failures.append(
                {"what": row.name, "why": f"the maps of {zero} photos are zero; they are left out"}
            )
    return values, failures


NO_MASKS = "no masks were given"


def _classes(case: Case, network: Network) -> list[str] | None:
    if not case.has_classes:
        return None
    return [network.label(int(index)) for index in case.outputs.argmax(1)]


def _described(row: Row) -> str:
    return repr(row.method)


def _about(case: Case, name: str) -> Json:
    each = MEASURES[name]
    return {
        "title": each.title,
        "better": each.better,
        "question": each.question,
        "help": each.help,
        "citation": each.citation,
    }


def _about_grid(case: Case) -> Json | None:
    if "grid_pointing" not in case.measures or case.grid is None:
        return None
    return {
        "shape": case.grid.shape,
        "kept": len(case.grid.photos),
        "dropped": case.grid.dropped,
        "chance": 1 / case.grid.photos.shape[1],
    }


def _costs(rows: list[Row], computed: Computed) -> Json:
    """Seconds per photo."""
    found = {}
    for row in rows:
        seconds = [v["seconds"] for v in computed.get(("maps", row.name), {}).values() if "seconds" in v]
        if seconds:
            found[row.name] = {"seconds": sum(seconds) / len(seconds)}
    return found


def _plain(value: Any) -> Any:
    """As JSON can hold it: NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
