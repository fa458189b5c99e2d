"""The report: one HTML page with the figures, tables and findings of all records in a folder.

It works offline: figures are local files and nothing is loaded from the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.findings import Finding, Table
from rectgrad.experiments.gallery import MODEL, PAPERS
from rectgrad.experiments.lab import NO_PHOTOS
from rectgrad.experiments.reproduce import experiment
from rectgrad.methods.catalog import title_of
from rectgrad.photos import files

HOLDS = {True: ("yes", "holds"), False: ("no", "does not hold"), None: ("open", "inconclusive")}

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1d21; --faint: #6b6d76; --line: #e3e3e6;
  --soft: #f6f6f8; --yes: #1d7a3a; --no: #b3261e; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --page: #17181b; --ink: #e8e6e1; --faint: #9a9ca6; 
  --line: #33353c; --soft: #202227; --yes: #66c783; --no: #ff8a80; --open: #e0b252; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 75rem; padding: 1.5rem; }
h1 { margin: 0 0 .25rem; } h2 { margin: 3rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 2rem; }
h3 { margin: 1.5rem 0 .5rem; } p { max-width: 50rem; } .faint { color: var(--faint); font-size: .875rem; }
nav a { margin-right: 1rem; display: inline-block; } a { color: inherit; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; background: #fff; }
figcaption { max-width: 50rem; color: var(--faint); font-size: .9375rem; }
.wide, .text { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; margin: .5rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { font-variant-numeric: tabular-nums; } th, td { white-space: nowrap; }
.text td { white-space: normal; } .text td:last-child { white-space: nowrap; }
ul.findings { list-style: none; padding: 0; } ul.findings li { padding: .5rem .75rem; margin: .4rem 0;
  background: var(--soft); border-left: 4px solid; border-radius: 3px; max-width: 60rem; }
li.yes { border-color: var(--yes) !important; } li.no { border-color: var(--no) !important; }
li.open { border-color: var(--open) !important; } li b { margin-right: .35rem; }
li.yes b { color: var(--yes); } li.no b { color: var(--no); } li.open b { color: var(--open); }
blockquote { margin: .5rem 0; padding-left: 1rem; border-left: 3px solid var(--line); max-width: 50rem; }
"""


def report(out: Path) -> Path:
    """Writes report.html from the records in the folders of `out`."""
    records = _records(out)
    if not records:
        raise ValueError(f"no records in {str(out)!r}: run `rectgrad reproduce ID --out {out}` first")
    files.save_text(page(records, _agreements(out)), out / "report.html")
    return out / "report.html"


def _records(out: Path) -> list[dict[str, Any]]:
    """The records by dataset, in the order of the experiments."""
    records = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir()) if out.is_dir() else ():
        for name in EXPERIMENTS:
            record = files.load_json(folder / f"{name}.json")
            if record is not None and "metrics" in record:
                records.append(record)
    return records


def _agreements(out: Path) -> list[dict[str, Any]]:
    """The records of benchmarks/agreement.py."""
    records = [files.load_json(path) for path in sorted(out.glob("*/agreement.json"))]
    return [record for record in records if record is not None]


def page(records: Sequence[dict[str, Any]], agreements: Sequence[dict[str, Any]] = ()) -> str:
    names = sorted({record["dataset"] for record in records})
    links = "".join(f"<p>{escape(name)}: {_links(name, records)}</p>" for name in names)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>rectgrad: the experiments</title><style>{_STYLE}</style>"
        "<h1>The experiments</h1><p>Why are saliency maps noisy, and does Rectified Gradient help? We "
        "repeated the paper's experiments. Each section shows what the paper found, whether our numbers "
        "support it, the figures and the numbers. A finding is “inconclusive” if the 95 % interval of the "
        f"difference includes zero, or if numbers cannot decide it.</p><nav>{links}</nav>\n"
        f"<h3>All findings</h3>{_overview(records)}\n{''.join(map(_agreement, agreements))}"
        f"{''.join(map(_section, records))}</html>\n"
    )


def _links(dataset: str, records: Iterable[dict[str, Any]]) -> str:
    chosen = [record for record in records if record["dataset"] == dataset]
    return " ".join(f'<a href="#{_anchor(r)}">{escape(r["experiment"])}</a>' for r in chosen)


def _anchor(record: dict[str, Any]) -> str:
    return f"{record['dataset']}-{record['experiment']}"


def _overview(records: Iterable[dict[str, Any]]) -> str:
    rows = [
        [r["dataset"], r["experiment"], finding.claim, HOLDS[finding.holds][1]]
        for r in records
        for finding in experiment(r["experiment"]).findings(r["metrics"])
    ]
    return _table(Table(["dataset", "experiment", "finding", "our result"], rows), "text")


def _agreement(record: dict[str, Any]) -> str:
    """A table that compares the measured maps with other implementations."""
    head = ["method", "compared with", "largest difference, float64", "median, float32", "largest, float32"]
    rows = [
        [title_of(name), found["against"]]
        + [f"{found[key]:.1e}" for key in ("float64_largest", "float32_median", "float32_largest")]
        for name, found in record["agreement"].items()
    ]
    note = (
        "Largest difference within a map, relative to its largest value, to implementations that do not use "
        "our engine. In float32 a few maps differ more, because a unit close to zero or to tau may end up on "
        "either side."
    )
    n = next(iter(record["agreement"].values()))["n"]
    title = f"<h3>Agreement with other implementations on {n} {escape(record['dataset'])} images</h3>"
    return f"{title}{_table(Table(head, rows, note))}\n"


def _section(record: dict[str, Any]) -> str:
    module = experiment(record["experiment"])
    metrics = record["metrics"]
    parts = [
        f'<h2 id="{_anchor(record)}">{escape(module.TITLE)}</h2>',
        f'<p class="faint">{escape(_provenance(record))}</p>',
        f"<blockquote>The paper: {escape(module.PAPER)}</blockquote>",
        _findings(module.findings(metrics)),
        *(_figure(record, name, module.CAPTIONS) for name in record["figures"] or ()),
        *(_table(table) for table in module.tables(metrics)),
        *(f'<p class="faint">Note: {escape(note)}.</p>' for note in _notes(record)),
    ]
    return "\n".join(parts)


def _provenance(record: dict[str, Any]) -> str:
    where = record["environment"]
    device = where["gpu"] or f"{where['cpu']}, {where['threads']} threads"
    shown = {
        k: v
        for k, v in record["settings"].items()
        if k not in ("experiment", "dataset", "preset", "q", "photos")
    }
    numbers = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())
    return (
        f"{record['dataset']}, preset {record['preset']}: {numbers}. {device}; torch {where['torch']}; "
        f"{record['seconds']:.0f} s; {where['date'][:10]}; commit {(record['commit'] or 'unknown')[:12]}. "
        f"rectgrad reproduce {record['experiment']} --dataset {record['dataset']} --preset {record['preset']}"
    )


def _notes(record: dict[str, Any]) -> list[str]:
    model = record["settings"].get("model")
    if model != MODEL or any(note.startswith(NO_PHOTOS) for note in record["notes"]):
        return record["notes"]
    command = f"rectgrad reproduce {record['experiment']} --dataset {record['dataset']} --model {PAPERS}"
    paper = (
        f"photos are classified by {model}, not by the paper's Inception V4, whose weights are a 171 MB "
        f"download; to use it: {command}"
    )
    return [*record["notes"], paper]


def _findings(findings: Sequence[Finding]) -> str:
    items = [
        f'<li class="{HOLDS[each.holds][0]}"><b>{HOLDS[each.holds][1]}</b> {escape(each.claim)}'
        f'<br><span class="faint">{escape(each.because)}</span></li>'
        for each in findings
    ]
    return f'<ul class="findings">{"".join(items)}</ul>'


def _figure(record: dict[str, Any], name: str, captions: dict[str, str]) -> str:
    key = name.removeprefix(record["experiment"]).removeprefix("-").removesuffix(".png")
    caption = escape(captions[key])
    source = quote(f"{record['dataset']}/{name}")
    shown = f'<a href="{source}"><img loading="lazy" src="{source}" alt="{caption}"></a>'
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def _table(table: Table, kind: str = "wide") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f'<p class="faint">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    )
