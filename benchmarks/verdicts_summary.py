"""One table from the verdicts of several networks of one architecture: mean and range over the networks.

    python benchmarks/verdicts_summary.py results/verdicts/cifar10_cnn-*/verdict.json --json FILE

For every measure and row: the mean over networks, the lowest and the highest network, and in how many
networks the row is significantly better and worse than RectGrad (Holm's correction within each verdict). The
answers of each network stand beside it.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rectgrad.verdict.record import PAIR_DIGITS, read

Json = dict[str, Any]
BASE = "rectgrad"


def cell(records: list[Json], measure: str, row: str) -> Json:
    means = [each["table"][measure][row]["mean"] for each in records if row in each["table"].get(measure, {})]
    winners = [_winner(each, measure, row) for each in records]
    rounded = (
        float(f"{value:.{PAIR_DIGITS}g}") for value in (statistics.mean(means), min(means), max(means))
    )
    found: Json = dict(zip(("mean", "low", "high"), rounded, strict=True)) | {"networks": len(means)}
    return found if row == BASE else found | {"better": winners.count(row), "worse": winners.count(BASE)}


def _winner(record: Json, measure: str, row: str) -> str | None:
    """The significantly better one of a row and RectGrad."""
    pairs = (pair for pair in record["pairs"] if pair["measure"] == measure)
    return next((pair["better"] for pair in pairs if {pair["a"], pair["b"]} == {row, BASE}), None)


def summary(paths: list[Path]) -> Json:
    records = [read(path) for path in paths]
    table: Json = {}
    for measure in {name: None for each in records for name in each["table"]}:
        rows = {row: None for each in records for row in each["table"].get(measure, {})}
        table[measure] = {row: cell(records, measure, row) for row in rows}
    networks = {
        path.parent.name: {
            "weights": each["digests"]["weights"],
            "photos": each["photos"]["n"],
            "commit": each["environment"]["commit"],
            "answers": each["answers"],
        }
        for path, each in zip(paths, records, strict=True)
    }
    return {"model": records[0]["model"], "networks": networks, "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verdicts", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found = summary(given.verdicts)
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    given.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for measure, rows in found["table"].items():
        print(measure)
        for row, own in rows.items():
            print(f"  {row:22} {own['mean']:.3f} ({own['low']:.3f} to {own['high']:.3f})")


if __name__ == "__main__":
    main()
