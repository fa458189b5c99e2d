"""The first part of the report: what the paper says, what holds here, and how we know, for all datasets side
by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rectgrad.experiments import markup
from rectgrad.experiments.findings import VERDICTS, Finding

Findings = Mapping[str, Mapping[str, Sequence[Finding]]]  # experiment -> dataset -> its findings
NAMES = {"cifar10": "CIFAR-10", "shapes": "shapes"}
SIZE, STEP, LEFT, GAP = 14, 18, 160, 36


def name_of(dataset: str) -> str:
    return NAMES.get(dataset, dataset)


def paired(by_dataset: Mapping[str, Sequence[Finding]]) -> dict[str, dict[str, Finding]]:
    """claim -> dataset -> finding, in the order of the claims."""
    claims: dict[str, dict[str, Finding]] = {}
    for dataset, found in by_dataset.items():
        for each in found:
            claims.setdefault(each.claim, {})[dataset] = each
    return claims


def figure(found: Findings, datasets: Sequence[str]) -> str:
    """A row per experiment and a square per finding, in the colour of its verdict; its claim is the
    tooltip."""
    height = STEP * (len(found) + 2)
    most = max((len(own) for by_dataset in found.values() for own in by_dataset.values()), default=0)
    column = STEP * max(most, 8) + GAP
    parts = [
        f'<text x="{LEFT + column * k}" y="13">{escape(name_of(each))}</text>'
        for k, each in enumerate(datasets)
    ]
    for row, (name, by_dataset) in enumerate(found.items(), start=1):
        y = STEP * row + 6
        parts.append(f'<a href="#{name}"><text x="0" y="{y + 11}">{escape(name)}</text></a>')
        for k, dataset in enumerate(datasets):
            for i, each in enumerate(by_dataset.get(dataset, ())):
                parts.append(_square(LEFT + column * k + STEP * i, y, each))
    width = LEFT + column * len(datasets)
    label = "verdicts of all findings by experiment and dataset"
    drawn = f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{label}">'
    key = ", ".join(f'<b class="{markup.CLASS_OF[h]}">■ {word}</b>' for h, word in VERDICTS.items())
    caption = f"One square per finding, in the order of the tables below: {key}. Outlined: not in the paper."
    return f"<figure>{drawn}{''.join(parts)}</svg><figcaption>{caption}</figcaption></figure>"


def _square(x: int, y: int, found: Finding) -> str:
    edge = ' fill-opacity="0.35" stroke="currentColor"' if found.ours else ""
    place = f'x="{x}" y="{y}" width="{SIZE}" height="{SIZE}"'
    title = escape(f"{VERDICTS[found.holds]}: {found.claim}")
    return f'<rect class="{markup.CLASS_OF[found.holds]}" {place}{edge}><title>{title}</title></rect>'


def table(found: Findings, datasets: Sequence[str]) -> str:
    """The paper's claims with their verdicts, then those that the paper does not make."""
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for name, by_dataset in found.items():
        for claim, each in paired(by_dataset).items():
            verdicts = [markup.verdict(each.get(dataset)) for dataset in datasets]
            ours = next(iter(each.values())).ours
            rows[ours].append([escape(claim), *verdicts, f'<a href="#{name}">{escape(name)}</a>'])
    names = [escape(name_of(dataset)) for dataset in datasets]
    papers = markup.grid(["what the paper says", *names, "how we know"], rows[False], "text")
    others = markup.grid(["claim", *names, "experiment"], rows[True], "text")
    title = "Controls and questions that the paper does not ask"
    return (papers if rows[False] else "") + (f"<h3>{title}</h3>{others}" if rows[True] else "")


def section(by_dataset: Mapping[str, Sequence[Finding]], datasets: Sequence[str]) -> str:
    """The findings of one experiment with their numbers."""
    shown = [dataset for dataset in datasets if dataset in by_dataset]
    rows = []
    for claim, each in paired(by_dataset).items():
        cells = [
            f'{markup.verdict(each[d])}<br><span class="faint">{escape(each[d].because)}</span>'
            if d in each
            else ""
            for d in shown
        ]
        rows.append([escape(claim), *cells])
    return markup.grid(["claim", *map(name_of, shown)], rows, "text") if rows else ""
