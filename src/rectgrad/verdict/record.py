"""verdict.json: a record as a small file. `read` gives back what `text` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
COLUMNS = ("difference", "low", "high", "n", "p", "holm", "better", "photos_needed")
DIGITS, PAIR_DIGITS = 6, 4  # significant ones


def plain(value: Any, digits: int = DIGITS) -> Any:
    """Converts to JSON values with rounded numbers: NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: plain(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, digits) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def text(record: Json) -> str:
    """JSON, one line for each key. Pairs are lists of `pair_columns`, by measure and rows, and rounded."""
    matched = {name: {**own, "pairs": _packed(own["pairs"])} for name, own in record["matched"].items()}
    packed = {**record, "pair_columns": COLUMNS, "pairs": _packed(record["pairs"]), "matched": matched}
    lines = (f"{json.dumps(key)}: {_compact(value)}" for key, value in packed.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: str | Path) -> Json:
    """The record in a verdict.json."""
    record: Json = json.loads(Path(path).read_text(encoding="utf-8"))
    columns = record.pop("pair_columns")
    for each in (record, *record["matched"].values()):
        each["pairs"] = [
            {"measure": measure, "a": a, "b": b, **dict(zip(columns, values, strict=True))}
            for measure, rows in each["pairs"].items()
            for a, others in rows.items()
            for b, values in others.items()
        ]
    return record


def _packed(pairs: Sequence[Json]) -> Json:
    found: Json = {}
    for pair in pairs:
        own = found.setdefault(pair["measure"], {}).setdefault(pair["a"], {})
        own[pair["b"]] = plain([pair[name] for name in COLUMNS], PAIR_DIGITS)
    return found


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
