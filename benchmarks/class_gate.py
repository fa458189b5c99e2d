"""Class-gated RectGrad beside other methods on photos, and other forms of the gate.

    python benchmarks/class_gate.py --photos photos.tar --out gate.json [--variants baseline] [--device cuda]

--photos is a folder or a tar file. The photos at even positions of the sorted names are for development, the
others for confirmation (--half). Variants: `baseline`, `forms`, `sparse`, `all`, or names separated by
semicolons. The file is written after each one and those that it already has are skipped: an interrupted run
can be resumed. Needs torch, numpy, Pillow and the model's weights (--weights FILE, or an installed package).
Then

    python benchmarks/class_gate.py --out gate.json --record results/class-gate/efficientnet-lite0-even.json

writes a small record: no values of single photos, but each row's differences from `gated` (or --reference),
paired by photo. With --brief, it has only the means of the columns with a goal, and of `marked`: the share of
the positions at which the map is not zero.

Columns, one value for each photo, the class with the largest output being explained:
    runner-up, random class, least likely   overlap with the map of another class: share of the 5 % largest
        |channel sums| in common, or of the non-zero ones of the map that has fewer; zero maps count as 0
    random layer   the same with the map of a network whose last layer has normal weights of the trained
        standard deviation
    deletion, insertion   mean probability of the class when the 2, 5, 10, 20 and 40 % of the positions with
        the largest |channel sum|, averaged over 5 x 5, are replaced by a 31 x 31 mean filter, or alone kept
    Gini   of the |channel sums|; zero: share of maps that are zero
    half   composites of two photos side by side, each class asked for once: share on the half of that photo
Intervals are 95 % bootstrap intervals over photos, or over composites. A row marked with an asterisk reaches
every goal (GOALS). All numbers are computed in float32, without TF32.

The forms of the gate are in class_gate_forms.py, the measures in class_gate_measures.py.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from class_gate_forms import SPARSE, baseline, forms, named
from class_gate_measures import Study, photos

from rectgrad.bench.environment import commit, environment
from rectgrad.methods import Method
from rectgrad.metrics.statistics import bootstrap
from rectgrad.models import load

HEAD = (
    "runner-up",
    "random class",
    "least likely",
    "random layer",
    "deletion",
    "insertion",
    "Gini",
    "half",
    "zero",
)
MOST = {"random class": 0.20, "random layer": 0.25, "deletion": 0.43}
LEAST = {"insertion": 0.24, "Gini": 0.95}
BRIEF = (*MOST, *LEAST, "marked")

Values = dict[str, list[float]]


def summary(values: Values) -> Values:
    """Mean and interval of each column. Columns of one length are resampled together."""
    found: Values = {}
    for n in {len(column) for column in values.values()}:
        names = [name for name, column in values.items() if len(column) == n]
        mean, low, high, _ = bootstrap(np.array([values[name] for name in names]).T)
        found |= {
            name: np.round(each, 4).tolist() for name, *each in zip(names, mean, low, high, strict=True)
        }
    return {name: found[name] for name in values}


def differences(a: Values, b: Values) -> Values:
    """Mean and interval of each column of one row minus another's, paired by photo."""
    return summary({c: (np.array(a[c]) - np.array(b[c])).tolist() for c in HEAD if c in a and c in b})


def reaches(means: Values) -> bool:
    """Whether a row reaches every goal."""
    most = all(means[name][0] <= value for name, value in MOST.items())
    return most and all(means[name][0] >= value for name, value in LEAST.items())


def record(written: dict[str, Any], reference: str, brief: bool) -> dict[str, Any]:
    """What is kept of a run: means with intervals, and paired differences from the reference. brief: only the
    means of the columns of BRIEF."""
    done = written["rows"]
    asked = written["asked"] | {"photos": [Path(file).name for file in written["asked"]["photos"]]}
    values = {name: row["values"] for name, row in done.items()}
    first = next(iter(values.values()))
    return {
        "n": {"photos": len(asked["photos"]), "composites": len(first.get("half", []))},
        "goals": {"at most": MOST, "at least": LEAST},
        "environment": written["environment"],
        "commit": written["commit"],
        "rows": {
            name: {"mean": {column: row["mean"][column] for column in BRIEF}}
            if brief
            else {
                "method": row["method"],
                "reaches every goal": reaches(row["mean"]),
                "mean": row["mean"],
                f"minus {reference}": differences(values[name], values[reference]),
            }
            for name, row in done.items()
        },
        "asked": asked,
    }


def row(study: Study, method: Method) -> dict[str, Any]:
    started = time.perf_counter()
    values = study.measured(method)
    return {
        "method": repr(method),
        "mean": summary(values),
        "values": {column: [round(x, 5) for x in each] for column, each in values.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }


def line(name: str, row: dict[str, Any]) -> str:
    means = row["mean"]
    cells = [f"{means[c][0]:.3f} ({means[c][1]:.2f}-{means[c][2]:.2f})" if c in means else "" for c in HEAD]
    star = "*" if reaches(means) else " "
    return f"{star}{name:49}" + "".join(f"{cell:>20}" for cell in cells) + f"{row['seconds']:>8} s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--half", choices=("even", "odd"), default="even")
    parser.add_argument("--step", type=int, default=1, help="every n-th photo of the half")
    parser.add_argument("--count", type=int, help="photos; default: all of the half")
    parser.add_argument("--composites", type=int, default=200, help="before those not recognised are removed")
    parser.add_argument("--variants", default="baseline")
    parser.add_argument("--layers", default="", help="activations to try as the class layer, by commas")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="write a small record of --out, and compute nothing")
    parser.add_argument("--reference", default="gated", help="with --record: the row that is subtracted")
    parser.add_argument("--brief", action="store_true", help="with --record: many rows in little space")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.record is not None:
        kept = record(json.loads(args.out.read_text()), args.reference, args.brief)
        args.record.write_text(json.dumps(kept, indent=None if args.brief else 1) + "\n")
        return
    warnings.filterwarnings("ignore", "the map of sample")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    first, rest = baseline(), forms([layer for layer in args.layers.split(",") if layer])
    every: dict[str, Method] = {**first, **rest}
    names = {
        "baseline": list(first),
        "forms": list(rest),
        "sparse": [named(each) for each in SPARSE],
        "all": [*list(first)[:2], *rest, *list(first)[2:]],
    }
    wanted = names.get(args.variants) or [name.strip() for name in args.variants.split(";")]
    model = load(args.model, weights=args.weights)
    files, inputs = photos(args.photos, model, args.half, args.step, args.count)
    asked = {key: getattr(args, key) for key in ("model", "half", "composites")} | {"photos": files}
    written = json.loads(args.out.read_text()) if args.out.exists() else {"asked": asked, "rows": {}}
    if written["asked"] != asked:
        raise SystemExit(f"{args.out} is of other photos or another model; remove it or choose another file")
    study = Study(model.module, inputs, args.device, args.batch, args.composites)
    print(f"{len(files)} photos, {len(study.pairs)} composites")
    print(" " * 50 + "".join(f"{name:>20}" for name in HEAD), flush=True)
    for name in wanted:
        if name not in written["rows"]:
            written["rows"][name] = row(study, every[name])
            written |= {"environment": environment(args.device), "commit": commit()}
            args.out.write_text(json.dumps(written) + "\n")
        print(line(name, written["rows"][name]), flush=True)


if __name__ == "__main__":
    main()
