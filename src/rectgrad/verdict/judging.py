"""`judge` and its result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rectgrad.api import Model
from rectgrad.bench.environment import commit, environment
from rectgrad.explanation import Network
from rectgrad.explanation.network import Picture, Prepare
from rectgrad.methods import Method
from rectgrad.models import ImageModel
from rectgrad.photos import files
from rectgrad.photos.files import Source
from rectgrad.verdict import answers, table
from rectgrad.verdict.album import Album, album, masks_of, with_outputs
from rectgrad.verdict.case import Case
from rectgrad.verdict.costs import costs
from rectgrad.verdict.disagreement import disagreements, drawn
from rectgrad.verdict.matched import matched_rows
from rectgrad.verdict.measures import MEASURES, chosen
from rectgrad.verdict.page import page
from rectgrad.verdict.presets import Preset, preset_of
from rectgrad.verdict.record import plain, text
from rectgrad.verdict.rows import Row, rows_of
from rectgrad.verdict.run import ENGINES, Progress, kept_in, no_progress, run
from rectgrad.verdict.values import Columns, columns, failures, times

Json = dict[str, Any]
Photos = str | Path | Sequence[Picture | Source] | Tensor
Masks = str | Path | Sequence[Picture] | Tensor


@dataclass
class Verdict:
    """The result of `judge`.

    table: measure -> row -> mean, low and high (95 % interval over photos), n.
    pairs: for every measure and pair of rows, the paired difference, its interval and Holm's p.
    ranks: `order`, best first; `by_measure`, with ties; `shares` of comparisons won, tied and lost;
    `agreement` of the measures.
    answers: question -> methods that are tied for best, or "inconclusive".
    failures: what could not be judged, and why.
    record: all of this with settings, versions and `times`, the seconds of each unit of work and row.
    """

    record: Json = field(repr=False)
    pictures: list[Json] = field(default_factory=list, repr=False)  # maps of photos, for the page

    @property
    def table(self) -> dict[str, dict[str, Json]]:
        return self.record["table"]

    @property
    def pairs(self) -> list[Json]:
        return self.record["pairs"]

    @property
    def ranks(self) -> Json:
        return self.record["ranks"]

    @property
    def answers(self) -> dict[str, list[str] | str]:
        return self.record["answers"]

    @property
    def failures(self) -> list[dict[str, str]]:
        return self.record["failures"]

    def save(self, folder: str | Path) -> Path:
        """Writes verdict.json and verdict.html. Returns the path of the page."""
        files.save_text(text(self.record), Path(folder) / "verdict.json")
        files.save_text(page(self.record, self.pictures), Path(folder) / "verdict.html")
        return Path(folder) / "verdict.html"

    def __repr__(self) -> str:
        n, methods = self.record["photos"]["n"], self.record["methods"]
        order = [row for row in self.ranks["order"] if row in methods]
        said = [f"  {q}: {a if isinstance(a, str) else ', '.join(a)}" for q, a in self.answers.items()]
        counts = ", ".join(
            f"{k} {what}{'s' if k != 1 else ''}" for k, what in ((len(order), "method"), (n, "photo"))
        )
        head = f"Verdict on {self.record['model']}: {counts}{answers.ranked_on(self.record)}"
        place = table.places(self.ranks["shares"])
        tied = [place.get(a) == place.get(b) for a, b in pairwise(order)]
        listed = "".join(f"{' = ' if same else ', '}{row}" for same, row in zip(tied, order[1:], strict=True))
        return "\n".join([head, f"  order: {''.join(order[:1])}{listed}", *said])


def judge(
    model: str | ImageModel | Model | None,
    photos: Photos,
    methods: str | Sequence[str] | Mapping[str, Method] = "all",
    *,
    measures: str | Sequence[str] = "all",
    masks: Masks | None = None,
    preset: str | Preset = "quick",
    prepare: Prepare | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    seed: int = 0,
) -> Verdict:
    """Measures which methods show what a network used in your own photos, compared with controls.

    model: a name, an ImageModel, or your own module, which needs `prepare` or tensors.
    photos: a folder, a list of paths, PIL images or arrays, or a tensor (N, ...) that the model takes. Each
    is explained for the network's top class, so no labels are needed.
    methods: names, "all", or a mapping from names to methods. measures: names, or "all".
    masks: of the objects: a folder with one picture per photo of the same name, a list, or a boolean tensor
    (N, H, W).
    preset: "quick" (50 photos) or "full" (500 photos).
    out: a folder for the verdict. Finished parts are kept there, and an interrupted run resumes.
    engine: "local", or "ray" for all cores or a cluster.

        verdict = rectgrad.judge("efficientnet_lite0", "photos/", ["rectgrad", "saliency"], out="verdict")
        print(verdict.answers["where"])
    """
    network = Network.of(model, prepare, None, device)
    return judged(network, photos, methods, measures, masks, preset, out, engine, seed)


def judged(
    network: Network,
    photos: Photos,
    methods: str | Sequence[str] | Mapping[str, Method],
    measures: str | Sequence[str],
    masks: Masks | None,
    preset: str | Preset,
    out: str | Path | None,
    engine: str,
    seed: int,
    progress: Progress = no_progress,
) -> Verdict:
    """`judge`, for a network that is already loaded, with progress."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: needs an integer from 0 to 2**63 - 1")
    started, settings = time.monotonic(), preset_of(preset)
    if getattr(network.module, "training", False):
        raise ValueError(f"{network.name} is in training mode; call model.eval() first")
    rows, wanted = rows_of(methods, settings, seed), chosen(measures)
    rows = [replace(row, method=network.bounded(row.method)) for row in rows]
    settings = settings.enough(len(rows), len([name for name in wanted if MEASURES[name].better]))
    shown = album(network, photos, settings.photos)
    case = Case(network.module, shown.inputs, settings, wanted, seed, masks_of(network, masks, shown))
    if (usable := with_outputs(shown, case.outputs)) is not shown:
        shown = usable
        case = replace(case, inputs=shown.inputs, masks=masks_of(network, masks, shown))
    parts = kept_in(Path(out) if out is not None else None, case)
    computed = run(case, rows, parts, engine, progress)
    found = columns(case, computed)
    record = _about(case, network, shown, rows) | _statistics(case, rows, found)
    leaders = _leaders(rows, record, settings)
    variants = matched_rows(
        leaders, {row: cell["mean"] for row, cell in record["table"].get("gini", {}).items()}
    )
    several = [row for own in variants.values() for row in own]
    tuned = run(case, several, parts, engine, progress)
    record["matched"] = _matched(case, variants, columns(case, tuned))
    record["claims"] += answers.reversals(record)
    record["failures"] = (
        shown.broken + failures(case, [*rows, *several], computed | tuned) + answers.too_few(record)
    )
    record["disagreements"] = disagreements([row.name for row in rows if not row.control], computed)
    record["costs"] = costs(case, rows, parts) if measures == "all" else {}
    record["times"] = times(computed | tuned)
    record["seconds"] = round(time.monotonic() - started, 1)
    verdict = Verdict(plain(record), drawn(case, network, shown, rows, record, parts))
    if out is not None:
        verdict.save(out)
    return verdict


def _about(case: Case, network: Network, shown: Album, rows: Sequence[Row]) -> Json:
    classes = [network.label(int(i)) for i in case.outputs.argmax(1)] if case.has_classes else None
    grid = "grid_pointing" in case.measures and case.grid
    return {
        "model": network.name,
        "photos": {"n": len(case.inputs), "names": shown.names, "classes": classes},
        "methods": {row.name: str(row.method) for row in rows if not row.control},
        "controls": [row.name for row in rows if row.control],
        "measures": {name: MEASURES[name].about() for name in case.measures},
        "grid": grid
        and {"shape": grid.shape, "kept": len(grid.photos), "tried": grid.tried, "fit": grid.fit},
        "preset": asdict(case.preset),
        "seed": case.seed,
        "digests": case.digests(),
        "environment": environment(str(case.device)) | {"commit": commit()},
    }


def _statistics(case: Case, rows: Sequence[Row], found: Columns) -> Json:
    """Table, pairs, ranks, answers and claims."""
    record: Json = {"table": {name: table.cells(each, case.seed) for name, each in found.items()}}
    record["pairs"] = table.pairs(found, case.seed)
    names = [row for row in rows if any(row.name in each for each in found.values())]
    record["ranks"] = table.ranks([row.name for row in names], record["table"], record["pairs"])
    methods, controls = ([row.name for row in names if row.control == kind] for kind in (False, True))
    record["answers"] = answers.answers(methods, controls, record)
    record["claims"] = answers.claims(methods, controls, record)
    return record


def _leaders(rows: Sequence[Row], record: Json, preset: Preset) -> list[Row]:
    """The methods for matched comparisons, best first."""
    methods = {row.name: row for row in rows if not row.control}
    return [methods[name] for name in record["ranks"]["order"] if name in methods][: preset.leaders]


def _matched(case: Case, variants: Mapping[str, Sequence[Row]], found: Columns) -> Json:
    """variant -> cells and pairs of the leaders."""
    result: Json = {}
    for variant, rows in variants.items():
        short = {row.name: row.name.removesuffix(f": {variant}") for row in rows}
        own = {m: {short[r]: v for r, v in each.items() if r in short} for m, each in found.items()}
        own = {measure: each for measure, each in own.items() if each}
        if own:
            result[variant] = {
                "table": {measure: table.cells(each, case.seed) for measure, each in own.items()},
                "pairs": table.pairs(own, case.seed),
            }
    return result
