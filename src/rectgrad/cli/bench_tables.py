"""The tables of `rectgrad bench`, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from rectgrad.bench import Plan

Row = dict[str, Any]
WIDTHS = (22, 8, 9, 11, 7, 9, 7, 7)
HEADINGS = ("", "ms", "× plain", "quartiles", "MB", "× plain", "total", "sparse")
GROUPS = {
    "plain": None,
    "rectgrad": "rectgrad",
    "naive": "RectGrad without the padding trick, tau by",
    "captum": "Captum",
}
LEGEND = """\
ms         time of one call: median of {rounds} rounds
× plain    ratio to the plain gradient of the same round: median and quartiles
MB         peak memory of the call, without the network and the images
total      ratio of total peak memory, including the network and the images
sparse     share of layers whose kernel skips units that the threshold zeroed"""


def printer(plan: Plan) -> Callable[[str, Row], None]:
    """Returns a function that prints a section of the result."""
    console = Console(highlight=False)
    show = {"environment": environment, "models": comparison, "selection": selection, "scaling": scaling}
    return lambda kind, section: show[kind](console, section, plan)


def environment(console: Console, section: Row, plan: Plan) -> None:
    kernels = section["kernels"].get(plan.device.partition(":")[0], "torch's own")
    where = section["gpu"] or f"{section['cpu']}, {section['cores']} cores, threads: {section['threads']}"
    note(console, f"{where}; torch {section['torch']}; kernels: {kernels}")


def comparison(console: Console, section: Row, plan: Plan) -> None:
    size = f"{section['batch']} × 3 × {section['pixels']} × {section['pixels']}"
    _title(console, section["model"], f"{size}, {plan.dtype}, {plan.device}")
    _line(console, HEADINGS, style="bold")
    for group, title in GROUPS.items():
        _group(console, section, group, title)
    remarks(console, section)
    if section["model"] == plan.models[-1]:
        console.print(f"\n{LEGEND.format(rounds=plan.rounds)}", style="dim")


def _group(console: Console, section: Row, group: str, title: str | None) -> None:
    rows = [row for row in section["rows"] if row["group"] == group]
    failed = [row["name"] for row in section["failed"] if row["group"] == group]
    if title and (rows or failed):
        console.print(title, style="bold")
    indent = "  " if title else ""
    for row in rows:
        _line(console, (f"{indent}{row['name']}{'*' if row['note'] else ''}", *numbers(row)))
    for name in failed:
        _line(console, (f"{indent}{name}*", "-"))


def numbers(row: Row) -> list[str]:
    """The cells of a row after its name."""
    memory, share = row["memory"] or {}, row["sparse_share"]
    return [
        amount(row["ms"]),
        ratio(row["ratio"]),
        spread(row),
        amount(memory["growth"] / 1e6) if memory else "",
        ratio(memory.get("growth_ratio")),
        ratio(memory.get("total_ratio")),
        "" if share is None else f"{share:.0%}",
    ]


def remarks(console: Console, section: Row) -> None:
    """Prints why methods failed or are not comparable: each remark once, with all its methods."""
    names_by_remark: dict[str, list[str]] = {}
    for row in section["rows"]:
        if row["note"]:
            names_by_remark.setdefault(row["note"], []).append(row["name"])
    for row in section["failed"]:
        names_by_remark.setdefault(row["reason"].partition(". ")[0], []).append(row["name"])
    for remark, names in names_by_remark.items():
        note(console, f"* {', '.join(names)}: {remark}")


def selection(console: Console, section: Row, plan: Plan) -> None:
    samples, units = section["shape"]
    _title(console, "selection of tau", f"{samples} samples, {units:,} units each, half of them 0")
    _line(console, ("", "ms", "× ours", "quartiles"), style="bold")
    for row in section["rows"]:
        _line(console, (f"  {row['name']}", amount(row["ms"]), ratio(row["ratio"]), spread(row)))
    remarks(console, section)


def scaling(console: Console, section: Row, plan: Plan) -> None:
    for against in ("batch", "pixels"):
        rows, slopes = section[against]["rows"], section[against]["slopes"]
        _title(console, f"{section['model']} by {against}", f"ms and × plain, {plan.dtype}, {plan.device}")
        table = Table(box=None, padding=(0, 0, 0, 2))
        for heading in (against, *(cell for name in slopes for cell in (name, "×"))):
            table.add_column(heading, justify="right")
        for row in rows:
            cells = ((amount(row["ms"].get(name)), ratio(row["ratio"].get(name))) for name in slopes)
            table.add_row(str(row[against]), *(cell for pair in cells for cell in pair))
        console.print(table)
        powers = ", ".join(f"{name} {p:.2f}" for name, p in slopes.items() if p is not None)
        note(console, f"slope of log time over log size (1 is linear): {powers}")
        for reason in {each["reason"]: None for row in rows for each in row["failed"]}:
            note(console, f"- {reason}")


def amount(value: float | None) -> str:
    """A number with about three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def spread(row: Row) -> str:
    low, high = map(ratio, row["ratio_quartiles"])
    return "" if low == high else f"{low}-{high}"


def note(console: Console, text: str) -> None:
    """Prints wrapped text without interpreting brackets as markup."""
    wrapped = textwrap.fill(text, min(console.width, 100), subsequent_indent="  ")
    console.print(wrapped, style="dim", markup=False)


def _title(console: Console, name: str, rest: str) -> None:
    console.print(f"\n[bold]{name}[/]  {rest}\n")


def _line(console: Console, cells: Iterable[str], style: str | None = None) -> None:
    first, *others = cells
    rest = (cell.rjust(width) for cell, width in zip(others, WIDTHS[1:], strict=False))
    console.print((first.ljust(WIDTHS[0]) + "".join(rest)).rstrip(), style=style, markup=False)
