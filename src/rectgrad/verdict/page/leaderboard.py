"""The leaderboard: one line per method, readable at a glance."""

from __future__ import annotations

from html import escape
from typing import Any

from rectgrad.explanation.trust import LOW
from rectgrad.verdict.answers import FEW, ignores_weights, unspecific
from rectgrad.verdict.table import places

Json = dict[str, Any]
_KEY = " ".join(f'<span class="key {kind}">{kind}</span>' for kind in ("won", "tied", "lost"))
_HEAD = (
    "",
    "method",
    f"comparisons {_KEY} in %",
    "depends on the class",
    "depends on the weights",
    "time",
)


def leaderboard(record: Json) -> str:
    head = "".join(f"<th>{each}</th>" for each in (_HEAD if record["costs"] else _HEAD[:-1]))
    place = places(record["ranks"]["shares"])
    lines = "".join(_line(record, place.get(name), name) for name in record["ranks"]["order"])
    compared = [record["measures"][name]["title"] for name in record["ranks"]["by_measure"]]
    note = (
        f"Each row is compared with every other row in {', '.join(compared)}. A comparison is won if the "
        "paired difference is significant at 5 % after Holm's correction. Depends on the class: "
        f"specificity, no if below {LOW:g}. Depends on the weights: no if the map hardly changes "
        f"when all weights are random. From fewer than {FEW} photos, the value alone is shown."
    ) + (" Time: multiples of a plain gradient." if record["costs"] else "")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll board">{table}</div><p class="faint">{escape(note)}</p>'


def _line(record: Json, place: int | None, name: str) -> str:
    control = name in record["controls"]
    shares = record["ranks"]["shares"].get(name)
    bar = _bar(shares) if shares else "not compared"
    table = {} if control else record["table"]  # a control does not look at the network
    cells = [
        str(place or ""),
        f"<b>{escape(name)}</b>" + (" <i>control</i>" if control else ""),
        bar,
        _check(table.get("specificity", {}).get(name), unspecific(name, table)),
        _check(table.get("randomisation_last", {}).get(name), ignores_weights(name, table)),
        *([_times(record["costs"].get(name))] if record["costs"] else []),
    ]
    kind = ' class="control"' if control else ""
    return f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _bar(shares: Json) -> str:
    parts = [(kind, 100 * shares[kind]) for kind in ("won", "tied", "lost")]
    said = ", ".join(f"{kind} {share:.0f} %" for kind, share in parts)
    drawn = "".join(
        f'<span class="{kind}" style="width:{share:.1f}%">{round(share) if share >= 8 else ""}</span>'
        for kind, share in parts
        if share > 0
    )
    return f'<div class="bar" role="img" aria-label="{said}" title="{said}">{drawn}</div>'


def _check(cell: Json | None, failed: bool) -> str:
    if cell is None:
        return '<span class="faint">–</span>'
    if cell["n"] < FEW:
        return f"<small>{cell['mean']:.2f}, n {cell['n']}</small>"
    said = "no" if failed else "yes"
    return f'<span class="{said}">{said}</span> <small>{cell["mean"]:.2f}</small>'


def _times(cost: Json | None) -> str:
    if cost is None or cost["time"] is None:
        return '<span class="faint">–</span>'
    return f"{cost['time']:.1f}×"
