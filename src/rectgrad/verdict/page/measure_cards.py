"""One card for each measure: mean, interval and number of photos of every row, with a drawing."""

from __future__ import annotations

from html import escape
from typing import Any

Json = dict[str, Any]
WIDTH, HEIGHT, MARGIN = 200, 18, 6


def cards(record: Json) -> str:
    found = []
    for question in [
        *dict.fromkeys(e["question"] for e in record["measures"].values() if e["question"]),
        None,
    ]:
        own = [name for name in record["table"] if record["measures"][name]["question"] == question]
        if own:
            title = f"“{question}”" if question else "Checks and descriptions, which do not rank methods"
            drawn = "".join(_card(record, name) for name in own)
            found.append(f'<h3>{title}</h3><div class="cards">{drawn}</div>')
    note = (
        "Intervals are 95 % bootstrap intervals over photos; for 2 to 5 photos (n), they are too narrow. "
        "The dashed line is the best control."
    )
    return f'<p class="faint">{note}</p>{"".join(found)}'


def _card(record: Json, name: str) -> str:
    about, cells = record["measures"][name], record["table"][name]
    sign = -1 if about["better"] == "lower" else 1
    order = sorted(cells, key=lambda row: -sign * cells[row]["mean"])
    low, high = _range(cells)
    best = [cells[row]["mean"] for row in order if row in record["controls"]][:1] if about["better"] else []
    lines = "".join(_line(row, cells[row], low, high, best, row in record["controls"]) for row in order)
    arrow = {"higher": "higher is better", "lower": "lower is better", None: "neither good nor bad"}[
        about["better"]
    ]
    source = f" {escape(about['citation'])}." if about["citation"] else ""
    return (
        f"<article><h4>{escape(about['title'])} <small>{arrow}</small></h4>"
        f'<p class="faint">{escape(about["help"])}{source}</p><div class="scroll"><table class="numbers">'
        f"<tbody>{lines}</tbody></table></div></article>"
    )


def _range(cells: Json) -> tuple[float, float]:
    values = [
        cell[key] for cell in cells.values() for key in ("low", "high", "mean") if cell[key] is not None
    ]
    low, high = min(values), max(values)
    return low, high if high > low else low + 1


def _line(row: str, cell: Json, low: float, high: float, best: list[float], control: bool) -> str:
    def place(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (value - low) / (high - low)

    middle = HEIGHT / 2
    control_line = (
        f'<line class="dash" x1="{place(best[0]):.1f}" x2="{place(best[0]):.1f}" y2="{HEIGHT}"/>'
        if best
        else ""
    )
    interval = (
        f'<line x1="{place(cell["low"]):.1f}" x2="{place(cell["high"]):.1f}" y1="{middle}" y2="{middle}"/>'
        if cell["low"] is not None
        else ""
    )
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{control_line}{interval}'
        f'<circle cx="{place(cell["mean"]):.1f}" cy="{middle}" r="3.5"/></svg>'
    )
    kind = ' class="control"' if control else ""
    return (
        f"<tr{kind}><th>{escape(row)}</th><td>{drawing}</td><td>{number(cell['mean'])}</td>"
        f"<td>{span(cell)}</td><td>n {cell['n']}</td></tr>"
    )


def span(cell: Json) -> str:
    """An interval; a dash for a single photo."""
    return f"{number(cell['low'])} to {number(cell['high'])}" if cell["low"] is not None else "–"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{round(value, 3) + 0.0:.3f}" if abs(value) < 100 else f"{value:.3g}"  # avoids -0.000
