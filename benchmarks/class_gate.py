"""Class-gated RectGrad beside other methods on photos, and other forms of the gate.

    python benchmarks/class_gate.py --photos photos.tar --out gate.json [--rows baseline] [--device cuda]

--photos is a folder or a tar file. The photos at even positions of the sorted names are for development, the
others for confirmation (--half). Rows: `baseline`, `variants`, `all`, or names separated by semicolons. The
file is written after each row and rows that it already has are skipped: an interrupted run can be resumed.
Needs torch, numpy, Pillow and the model's weights (--weights FILE, or an installed package). Then

    python benchmarks/class_gate.py --out gate.json --record results/class-gate/efficientnet-lite0-even.json

writes a small record: no values of single photos, but the differences between rows, paired by photo.

Columns, one value for each photo, the class with the largest output being explained:
    runner-up, random class, least likely   overlap with the map of another class: share of the 5 % largest
        |channel sums| in common, or of the non-zero ones of the map that has fewer; zero maps count as 0
    random layer   the same with the map of a network whose last layer has normal weights of the trained
        standard deviation
    deletion, insertion   mean probability of the class when the 2, 5, 10, 20 and 40 % of the positions with
        the largest |channel sum|, averaged over 5 x 5, are replaced by a 31 x 31 mean filter, or alone kept
    Gini   of the |channel sums|; zero: share of maps that are zero
    half   composites of two photos side by side, each class asked for once: share on the half of that photo
Intervals are 95 % bootstrap intervals over photos, or over composites.

Variants are the gated method without the padding trick, and one change each.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import rectgrad
from rectgrad import (
    GradCAM,
    GradientXInput,
    GuidedBackprop,
    GuidedGradCAM,
    IntegratedGradients,
    RectGrad,
    metrics,
    ops,
    rules,
)
from rectgrad.bench.environment import commit, environment
from rectgrad.kernels.class_maps import Gate, class_map
from rectgrad.kernels.reference import percentile
from rectgrad.methods import Method
from rectgrad.methods.rectgrad import GatedRectGrad
from rectgrad.metrics import grid
from rectgrad.metrics.statistics import bootstrap
from rectgrad.models import ImageModel, load

SHARES = (0.02, 0.05, 0.10, 0.20, 0.40)  # of the positions
COLUMNS = ("runner-up", "random class", "least likely", "random layer", "deletion", "insertion", "Gini")
SUFFIXES = (".jpg", ".jpeg", ".png")


# --- variants of the gate ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant(RectGrad):
    """Gated RectGrad with another function of the class map. power, cut: g to a power, or 1 where g exceeds a
    number. cam: the class map's formula, or "rectified", a * R of the units that pass at the class layer.
    top: the share of the rectified activations, from the output, at which the gate acts. layer: the module
    whose output is used instead of the class layer's. both: times the class layer's. conserve: what passes is
    scaled to the sum of all positive scores. against: the class map is that of the output minus the mean of
    all outputs, or of the log-probability."""

    padding_trick: bool = False
    gate: str | None = "class"
    power: float = 1.0
    cut: float | None = None
    cam: str = "hirescam"
    top: float = 1.0
    layer: str | None = None
    both: bool = False
    conserve: bool = False
    against: str | None = None
    everything = property(lambda self: self.layer is not None)

    def prepared(self, request: Any, passed: Any, scores: Tensor) -> Any:
        return VariantPlan(self, request, passed, scores)

    def gated(self, gate: Any) -> Any:
        found = super().gated(gate)
        if self.conserve:
            found |= dict.fromkeys(ops.RECTIFIERS, conserved(found["relu"]))
        return found


AGAINST: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "mean": lambda target: lambda outputs: target(outputs) - outputs.mean(1),
    "log-probability": lambda target: lambda outputs: target(outputs) - outputs.logsumexp(1),
}


class VariantPlan(GatedRectGrad):
    """The plan of a variant: the same walks, another gate."""

    def __init__(self, method: Variant, request: Any, passed: Any, scores: Tensor) -> None:
        super().__init__(method, request, passed, scores)
        gate = VariantGate(method, request, passed, scores)
        self.rules = lambda: method.gated(gate)


class VariantGate(rules.ClassGate):
    def __init__(self, method: Variant, request: Any, passed: Any, scores: Tensor) -> None:
        walk, plain = GradCAM(), replace(request, observe=None)
        super().__init__(walk, plain, passed, scores)
        usual, target = self.cams, request.resolved(passed.outputs)
        asked = scores if method.against is None else passed.scores(AGAINST[method.against](target))
        found = rules.class_layers(walk, plain, passed, asked, method.layer)
        passed.scores(target)  # from which the next walk starts
        self.cams = Gate([(each.rows, _cam(each.a, each.R, method)) for each in found])
        self._others = [usual] if method.both else []
        self._method = method
        rectified = [op for op in passed.ops if op.family in ops.RECTIFIERS]
        self._acts = {id(op) for op in rectified[len(rectified) - round(method.top * len(rectified)) :]}

    def __call__(self, op: Any) -> Tensor | None:
        if id(op) not in self._acts:
            return None
        g = super().__call__(op)
        for other in self._others if g is not None else ():
            g = g * other.at(self._images().get(id(op)), tuple(op.shape))
        if g is None:
            return None
        g = g**self._method.power
        return g if self._method.cut is None else (g > self._method.cut).to(g)


def _cam(a: Tensor, R: Tensor, method: Variant) -> Tensor:
    if method.cam != "rectified":
        return class_map(a, R, method.cam)
    score = (a.float() * R.float()).flatten(1)
    tau = percentile(score, method.q).clamp(min=0).unsqueeze(1)
    return torch.where(score > tau, score, 0).reshape(a.shape).sum(1, keepdim=True)


def conserved(rule: Any) -> Any:
    """A rectified rule whose result is scaled: the passing scores a * R sum to what all positive ones do."""

    def apply(op: Any, R: Tensor) -> Tensor:
        passed = rule.apply(op, R)
        passed = passed if isinstance(passed, Tensor) else passed.dense()
        own = ((op.output * each).clamp(min=0).reshape(op.batch, -1).sum(1) for each in (R, passed))
        before, after = own
        factor = torch.where(after > 0, before / after.clamp(min=torch.finfo(after.dtype).tiny), 1)
        return passed * factor.reshape(-1, *(1,) * (passed.dim() - 1))

    return replace(rule, apply=apply)


def rows(layers: list[str]) -> dict[str, dict[str, Method]]:
    """The methods by the name of their row, in two groups. layers: activations before the class layer."""
    plain = {"padding_trick": False}
    baseline: dict[str, Method] = {
        "rectgrad": RectGrad(),
        "rectgrad, no trick": RectGrad(**plain),
        "rectgrad x c": GuidedGradCAM(RectGrad(), variant="hirescam"),
        "rectgrad x c, no trick": GuidedGradCAM(RectGrad(**plain), variant="hirescam"),
        "gated": RectGrad(gate="class"),
        "gated, no trick": RectGrad(gate="class", **plain),
        "gated, q=95": RectGrad(gate="class", q=95),
        "gated, q=95, no trick": RectGrad(gate="class", q=95, **plain),
        "guided backprop x c": GuidedGradCAM(GuidedBackprop(), variant="hirescam"),
        "gradient x input": GradientXInput(),
        "c alone": GradCAM(variant="hirescam"),
        "integrated gradients": IntegratedGradients(),
    }
    variants: dict[str, Method] = {
        "g^2": Variant(power=2),
        "g^0.5": Variant(power=0.5),
        "g^4": Variant(power=4),
        "g > 0.25": Variant(cut=0.25),
        "g > 0.5": Variant(cut=0.5),
        "g > 0.75": Variant(cut=0.75),
        "g > 0.5, q=95": Variant(cut=0.5, q=95),
        "g^2, q=95": Variant(power=2, q=95),
        "c of Grad-CAM": Variant(cam="gradcam"),
        "c of LayerCAM": Variant(cam="layercam"),
        "c of Grad-CAM++": Variant(cam="gradcam++"),
        "c of rectified R": Variant(cam="rectified"),
        "top quarter": Variant(top=0.25),
        "top half": Variant(top=0.5),
        "top three quarters": Variant(top=0.75),
        "q=90": Variant(q=90),
        "q=99": Variant(q=99),
        "PR2": Variant(rule="PR2"),
        "mod": Variant(rule="mod"),
        "c against the mean": Variant(against="mean"),
        "c against the mean, q=96": Variant(against="mean", q=96),
        "c of log-probability": Variant(against="log-probability"),
        "c of log-probability, q=96": Variant(against="log-probability", q=96),
        "c of log-probability, g > 0.5": Variant(against="log-probability", cut=0.5),
        "c of log-probability, mod": Variant(against="log-probability", rule="mod"),
        "c of log-probability, g^2": Variant(against="log-probability", power=2),
        "c of log-probability, g^0.5": Variant(against="log-probability", power=0.5),
        "c of log-probability, g > 0.25": Variant(against="log-probability", cut=0.25),
        "c of log-probability, g^2, q=96": Variant(against="log-probability", power=2, q=96),
        "c of log-probability, g > 0.5, q=96": Variant(against="log-probability", cut=0.5, q=96),
        "c of log-probability, top half": Variant(against="log-probability", top=0.5),
        "c of log-probability, trick": Variant(against="log-probability", padding_trick=True),
        "c of log-probability, trick, q=96": Variant(against="log-probability", padding_trick=True, q=96),
        "g > 0.25, q=96": Variant(cut=0.25, q=96),
        "g > 0.5, q=96": Variant(cut=0.5, q=96),
        "g^2, q=96": Variant(power=2, q=96),
        "mod, q=96": Variant(rule="mod", q=96),
        "mod, g > 0.25, q=96": Variant(rule="mod", cut=0.25, q=96),
        "PR2, q=96": Variant(rule="PR2", q=96),
        "g^2, trick": Variant(power=2, padding_trick=True),
        "g > 0.5, trick": Variant(cut=0.5, padding_trick=True),
        "mod, trick": Variant(rule="mod", padding_trick=True),
        "conserved": Variant(conserve=True),
        "conserved, g^2": Variant(conserve=True, power=2),
        "conserved, q=95": Variant(conserve=True, q=95),
    }
    for layer in layers:
        variants[f"c at {layer}"] = Variant(layer=layer)
        variants[f"c and c at {layer}"] = Variant(layer=layer, both=True)
        variants[f"c and c at {layer}, q=96"] = Variant(layer=layer, both=True, q=96)
    return {"baseline": baseline, "variants": variants}


# --- photos ------------------------------------------------------------------------------------------------


def photos(source: Path, model: ImageModel, half: str, count: int | None) -> tuple[list[str], Tensor]:
    """The names and inputs of every second photo of a folder or a tar file, by sorted names."""
    found = dict(_files(source))
    names = sorted(found)[0 if half == "even" else 1 :: 2][:count]
    pictures = (Image.open(io.BytesIO(found[name]())).convert("RGB") for name in names)
    return names, torch.stack([model.prepare(model.crop(picture)) for picture in pictures])


def _files(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if source.is_dir():
        for path in source.rglob("*"):
            if path.suffix.lower() in SUFFIXES:
                yield path.relative_to(source).as_posix(), path.read_bytes
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(SUFFIXES):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, io.BytesIO(content.read()).getvalue


# --- the measures ------------------------------------------------------------------------------------------


class Study:
    """A network, its photos in batches, the classes to ask for and the composites."""

    def __init__(self, module: nn.Module, inputs: Tensor, device: str, batch: int, composites: int) -> None:
        self.module, self.device, self.batch = module.to(device).eval(), device, batch
        self.inputs = inputs
        self.outputs = self._outputs(inputs)
        order = self.outputs.argsort(1, descending=True)
        random = torch.Generator().manual_seed(0)
        other = torch.randint(1, order.shape[1], (len(inputs),), generator=random)
        self.top = order[:, 0]
        self.classes = {
            "runner-up": order[:, 1],
            "random class": (self.top + other) % order.shape[1],  # never the explained one
            "least likely": order[:, -1],
        }
        self.randomised = random_last_layer(self.module)
        index = grid.grid_photos(self.top, (1, 2), composites) if composites else torch.zeros(0, 2).long()
        pairs, asked = grid.composites(inputs, index, (1, 2), fit=True), self.top[index]
        kept = grid.recognised(self._outputs(pairs), asked) if len(pairs) else torch.zeros(0).bool()
        self.pairs, self.asked = pairs[kept], asked[kept]

    def _outputs(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [self.module(x.to(self.device)).float().cpu() for x in inputs.split(self.batch)]
        return torch.cat(parts) if parts else torch.zeros(0, 1)

    def measured(self, method: Method) -> dict[str, list[float]]:
        """One value for each photo, or composite, in each column."""
        zeros = [f"zero, {name}" for name in (*self.classes, "random layer")]
        columns: dict[str, list[Tensor]] = {c: [] for c in (*COLUMNS, "zero", "marked", "half", *zeros)}
        for start in range(0, len(self.inputs), self.batch):
            part = slice(start, start + self.batch)
            for name, value in self._part(method, self.inputs[part].to(self.device), part).items():
                columns[name].append(value.double().cpu())
        for start in range(0, len(self.pairs), self.batch):
            x, asked = (each[start : start + self.batch] for each in (self.pairs, self.asked))
            maps = [rectgrad.attribute(self.module, x.to(self.device), method, asked[:, i]) for i in range(2)]
            shares = [grid.grid_pointing(m, (1, 2), i) for i, m in enumerate(maps)]
            columns["half"].append((sum(shares) / 2).double().cpu())
        return {name: torch.cat(values).tolist() for name, values in columns.items() if values}

    def _part(self, method: Method, x: Tensor, part: slice) -> dict[str, Tensor]:
        top = self.top[part]
        maps = rectgrad.attribute(self.module, x, method, top)
        others = {
            name: rectgrad.attribute(self.module, x, method, classes[part])
            for name, classes in self.classes.items()
        }
        others["random layer"] = rectgrad.attribute(self.randomised, x, method, top)
        found = {name: overlap(maps, other) for name, other in others.items()}
        found |= {f"zero, {name}": (other.flatten(1) == 0).all(1) for name, other in others.items()}
        found["deletion"], found["insertion"] = self._curves(x, maps, top.to(x.device))
        m = maps.sum(1).abs()
        found |= {"Gini": metrics.gini(m), "zero": (m.flatten(1) == 0).all(1)}
        return found | {"marked": (m != 0).flatten(1).float().mean(1)}

    def _curves(self, x: Tensor, maps: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities without and with only the largest positions, averaged over the shares."""
        blurred = F.avg_pool2d(x, 31, 1, 15, count_include_pad=False)
        m = F.avg_pool2d(maps.sum(1, keepdim=True).abs(), 5, 1, 2, count_include_pad=False)
        order = m.flatten(1).argsort(dim=1, descending=True, stable=True)  # ties by position
        places = torch.arange(order.shape[1], device=x.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, places).reshape(m.shape)
        sums = [torch.zeros(len(x), device=x.device) for _ in range(2)]
        for share in SHARES:
            chosen = rank < round(share * order.shape[1])
            for i, picture in enumerate((torch.where(chosen, blurred, x), torch.where(chosen, x, blurred))):
                with torch.no_grad():
                    sums[i] += self.module(picture).float().softmax(1).gather(1, top[:, None])[:, 0]
        return sums[0] / len(SHARES), sums[1] / len(SHARES)


def overlap(maps: Tensor, others: Tensor) -> Tensor:
    """Share of the largest positions in common; 0 where one of the maps is zero."""
    return (1 - metrics.specificity(maps, others)).nan_to_num(0)


@torch.no_grad()
def random_last_layer(module: nn.Module) -> nn.Module:
    """A copy whose last linear layer has normal weights of the trained standard deviation."""
    changed = copy.deepcopy(module)
    last = [layer for layer in changed.modules() if isinstance(layer, nn.Linear)][-1]
    drawn = torch.randn(last.weight.shape, generator=torch.Generator().manual_seed(0))
    last.weight.copy_(drawn.to(last.weight) * last.weight.std())
    return changed


# --- the table ---------------------------------------------------------------------------------------------


def summary(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Mean and interval of each column."""
    found = {name: bootstrap(column) for name, column in values.items()}
    return {name: [round(float(x[0]), 4) for x in each[:3]] for name, each in found.items()}


PAIRS = {
    "gated": ("rectgrad", "rectgrad x c", "guided backprop x c"),
    "gated, no trick": ("rectgrad, no trick", "guided backprop x c", "gradient x input"),
    **dict.fromkeys(
        ("g^2", "g^4", "g > 0.25", "g > 0.5", "PR2", "mod", "c of LayerCAM", "c of log-probability"),
        ("gated, no trick",),
    ),
}


def record(written: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: means with intervals, paired differences, and the rows that are missing."""
    done = written["rows"]
    asked = written["asked"] | {"photos": [Path(file).name for file in written["asked"]["photos"]]}
    paired = {f"{a} - {b}": differences(done[a], done[b]) for a, others in PAIRS.items() for b in others}
    return {
        "n": {"photos": len(asked["photos"]), "composites": len(done["gated"]["values"]["half"])},
        "environment": written["environment"],
        "commit": written["commit"],
        "rows": {name: {key: row[key] for key in ("method", "mean")} for name, row in done.items()},
        "paired differences": paired,
        "not measured": [name for group in rows([]).values() for name in group if name not in done],
        "asked": asked,
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[float]]:
    """Mean and interval of each column of one row minus another's."""
    both = {c: zip(a["values"][c], b["values"][c], strict=True) for c in HEAD}
    return summary({c: [x - y for x, y in pairs] for c, pairs in both.items()})


def line(name: str, means: dict[str, list[float]]) -> str:
    cells = [f"{means[c][0]:.3f} ({means[c][1]:.2f}-{means[c][2]:.2f})" if c in means else "" for c in HEAD]
    return f"{name:38}" + "".join(f"{cell:>20}" for cell in cells)


HEAD = (*COLUMNS, "half", "zero")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--half", choices=("even", "odd"), default="even")
    parser.add_argument("--count", type=int, help="photos; default: all of the half")
    parser.add_argument(
        "--composites", type=int, default=400, help="before those not recognised are left out"
    )
    parser.add_argument("--rows", default="baseline")
    parser.add_argument("--layers", default="", help="activations to try as the class layer, by commas")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="write a small record of --out, and compute nothing")
    args = parser.parse_args()
    if args.record is not None:
        args.record.write_text(json.dumps(record(json.loads(args.out.read_text())), indent=1) + "\n")
        return
    warnings.filterwarnings("ignore", "the map of sample")
    model = load(args.model, weights=args.weights)
    groups = rows([layer for layer in args.layers.split(",") if layer])
    every = groups["baseline"] | groups["variants"]
    names = {**{k: list(v) for k, v in groups.items()}, "all": list(every)}
    wanted = names.get(args.rows) or [name.strip() for name in args.rows.split(";")]
    files, inputs = photos(args.photos, model, args.half, args.count)
    study = Study(model.module, inputs, args.device, args.batch, args.composites)
    asked = {key: getattr(args, key) for key in ("model", "half", "composites")} | {"photos": files}
    written = json.loads(args.out.read_text()) if args.out.exists() else {"asked": asked, "rows": {}}
    if written["asked"] != asked:
        raise SystemExit(f"{args.out} is of other photos or another model; remove it or choose another file")
    print(f"{len(files)} photos, {len(study.pairs)} composites")
    print(" " * 38 + "".join(f"{name:>20}" for name in HEAD))
    for name in wanted:
        if name not in written["rows"]:
            started = time.perf_counter()
            values = study.measured(every[name])
            written["rows"][name] = {
                "method": rectgrad.methods.catalog.describe(every[name]),
                "mean": summary(values),
                "values": {column: [round(x, 5) for x in each] for column, each in values.items()},
                "seconds": round(time.perf_counter() - started, 1),
            }
            written |= {"environment": environment(args.device), "commit": commit()}
            args.out.write_text(json.dumps(written) + "\n")
        print(line(name, written["rows"][name]["mean"]), flush=True)


if __name__ == "__main__":
    main()
