"""Tables of the page: ranks, agreement of measures, matched comparisons, pairs, time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rectgrad.verdict.page.measure_cards import number, span

Json = dict[str, Any]
LONGEST = 400  # pairs on the page; all are in verdict.json


def ranks(record: Json) -> str:
    """The rank of every row in every ranked measure."""
    by_measure = record["ranks"]["by_measure"]
    if not by_measure:
        return ""
    most = max((rank for own in by_measure.values() for rank in own.values()), default=1)
    head = ["", *(_title(record, name) for name in by_measure)]
    lines = []
    for row in record["ranks"]["order"]:
        cells = [_shaded(own.get(row), 1, most) for own in by_measure.values()]
        lines.append((row in record["controls"], [f"<th>{escape(row)}</th>", *cells]))
    note = "Rank: 1 plus the number of rows that are significantly better. Equal ranks are ties."
    return f"<p>{note}</p>{_table(head, lines)}"


def agreement(record: Json) -> str:
    """The agreement between the rankings of rows by two measures."""
    found = record["ranks"]["agreement"]
    if len(found) < 2:
        return ""
    head = ["", *(_title(record, name) for name in found)]
    lines = [
        (False, [f"<th>{_title(record, a)}</th>", *(_correlation(found[a][b], a == b) for b in found)])
        for a in found
    ]
    values = [found[a][b] for a in found for b in found if a < b and found[a][b] is not None]
    low = [each for each in values if each < 0.5]
    note = (
        "Spearman's correlation between the rankings of all rows by two measures. 1: the same order; 0: "
        f"unrelated; below 0: opposite. {len(low)} of {len(values)} pairs of measures are below 0.5."
    )
    return f"<p>{note}</p>{_table(head, lines)}"


def matched(record: Json) -> str:
    """The leaders with equal post-processing."""
    if not record["matched"]:
        return ""
    measures = list(dict.fromkeys(m for each in record["matched"].values() for m in each["table"]))
    head = ["post-processing", "method", *(_title(record, name) for name in measures)]
    lines = []
    for variant, found in record["matched"].items():
        methods = list(dict.fromkeys(row for own in found["table"].values() for row in own))
        for i, row in enumerate(methods):
            first = f'<th rowspan="{len(methods)}">{escape(variant)}</th>' if i == 0 else ""
            cells = [_cell(found["table"][m].get(row), _best(found["pairs"], m, row)) for m in measures]
            lines.append((False, [first, f"<th>{escape(row)}</th>", *cells]))
    note = (
        "Multiplying by the input, keeping positive values, the padding trick and cutting small values "
        "improve many methods. Here the same steps are applied to the leaders. Maps of contributions are "
        "not multiplied by the input again. A star marks a method that is significantly better "
        "than another one."
    )
    return f"<p>{note}</p>{_table(head, lines)}"


def pairs(record: Json) -> str:
    """Differences between methods, and the numbers of photos needed to distinguish them."""
    ranked = [name for name, about in record["measures"].items() if about["question"]]
    own = [
        p for p in record["pairs"] if p["measure"] in ranked and {p["a"], p["b"]} <= record["methods"].keys()
    ]
    if not own:
        return ""
    measures = len({p["measure"] for p in own})
    head = ["measure", "a", "b", "a - b", "95 % interval", "p, Holm", "better", "n", "photos needed"]
    lines = [
        (
            False,
            [
                f"<td>{_title(record, p['measure'])}</td>",
                *(f"<td>{escape(p[key])}</td>" for key in ("a", "b")),
                f"<td>{number(p['difference'])}</td><td>{span(p)}</td>",
                f"<td>{p['holm']:.3f}</td><td>{escape(p['better'] or 'tied')}</td><td>{p['n']}</td>",
                f"<td>{p['photos_needed'] if p['photos_needed'] is not None else '–'}</td>",
            ],
        )
        for p in own[:LONGEST]
    ]
    note = (
        "Photos needed: how many would tell the two apart in a single test at 5 % with a power of 80 %, if "
        "the difference stays as observed. With the correction for all tests, more are needed."
    )
    more = f" The first {LONGEST} of {len(own)}; all are in verdict.json." if len(own) > LONGEST else ""
    return (
        f"<details><summary>{len(own)} comparisons of two methods in {measures} measures</summary>"
        f"<p>{note}{more}</p>{_table(head, lines)}</details>"
    )


def costs(record: Json) -> str:
    head = ["method", "time", "memory", "seconds per photo"]
    lines = [
        (
            False,
            [
                f"<th>{escape(name)}</th>",
                *(f"<td>{_times(cost[key])}</td>" for key in ("time", "memory")),
                f"<td>{cost['seconds']:.3g}</td>",
            ],
        )
        for name, cost in sorted(record["costs"].items(), key=lambda each: each[1]["seconds"])
    ]
    return f"<p>Multiples of a plain gradient, for one photo.</p>{_table(head, lines)}" if lines else ""


def _times(ratio: float | None) -> str:
    return f"{ratio:.1f}×" if ratio else "–"


def _title(record: Json, name: str) -> str:
    return escape(record["measures"][name]["title"])


def _table(head: Sequence[str], lines: Sequence[tuple[bool, Sequence[str]]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    kinds = {True: ' class="control"', False: ""}
    body = "".join(f"<tr{kinds[control]}>{''.join(cells)}</tr>" for control, cells in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _shaded(rank: int | None, low: int, high: int) -> str:
    if rank is None:
        return '<td class="centred">–</td>'
    strength = 0 if high == low else (high - rank) / (high - low)
    return f'<td class="shade" style="--s:{strength:.2f}">{rank}</td>'


def _correlation(value: float | None, same: bool) -> str:
    if value is None or same:
        return '<td class="centred">–</td>'
    return f'<td class="shade" style="--s:{max(value, 0):.2f}">{value:.2f}</td>'


def _cell(cell: Json | None, best: bool) -> str:
    if cell is None:
        return "<td>–</td>"
    star = " ★" if best else ""
    return f"<td>{number(cell['mean'])}{star}<br><small>{span(cell)}, n {cell['n']}</small></td>"


def _best(pairs: Sequence[Json], measure: str, row: str) -> bool:
    return any(pair["measure"] == measure and pair["better"] == row for pair in pairs)
