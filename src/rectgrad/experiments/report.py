"""The report: one HTML file with the findings, figures and tables of all records in a folder.

It works offline: figures are inside, nothing is loaded from the network or from other files. Verdicts are
corrected for the number of findings on the page (Holm). Records of networks that have hardly learned
anything, and records that an earlier version made, are named, but not shown as results.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rectgrad.experiments import EXPERIMENTS, markup, summary
from rectgrad.experiments.findings import Finding, Table, corrected
from rectgrad.experiments.gallery import MODEL, PAPERS
from rectgrad.experiments.lab import NO_PHOTOS
from rectgrad.experiments.reproduce import experiment, outdated
from rectgrad.methods.catalog import title_of
from rectgrad.photos import files

Record = dict[str, Any]
LOWEST = 0.5  # test accuracy; with less, a record is no result
CITATION = """@inproceedings{kim2019saliency,
  title     = {Why are Saliency Maps Noisy? Cause of and Solution to Noisy Saliency Maps},
  author    = {Kim, Beomsu and Seo, Junghoon and Jeon, Seunghyeon and Koo, Jamyoung and Choe, Jeongyeol
               and Jeon, Taegyun},
  booktitle = {IEEE/CVF International Conference on Computer Vision Workshop (ICCVW)},
  year      = {2019}
}"""
INTRODUCTION = (
    "Why are saliency maps noisy, and does Rectified Gradient help? We repeated the paper's experiments on "
    "{}. A finding holds, or does not hold, if its p is below 0.05 after Holm's correction over all findings "
    "on this page; otherwise it is inconclusive. Intervals are over networks and images. A claim about a "
    "method needs networks of several training seeds: with one network, as in the preset quick, it is "
    "inconclusive."
)


def report(out: Path) -> Path:
    """Writes report.html from the records in the folders of `out`."""
    records = _records(out)
    if not records:
        raise ValueError(f"no records in {str(out)!r}: run `rectgrad reproduce ID --out {out}` first")
    files.save_text(page(out, records, _agreements(out)), out / "report.html")
    return out / "report.html"


def _records(out: Path) -> dict[str, dict[str, Record]]:
    """experiment -> dataset -> record, in the order of the experiments."""
    folders = sorted(path for path in out.iterdir() if path.is_dir()) if out.is_dir() else ()
    records: dict[str, dict[str, Record]] = {}
    for name in EXPERIMENTS:
        for folder in folders:
            record = files.load_record(folder / f"{name}.json")
            if "metrics" in record:
                records.setdefault(name, {})[record["dataset"]] = record
    return records


def _agreements(out: Path) -> list[Record]:
    """The records of benchmarks/agreement.py."""
    records = [files.load_record(path) for path in sorted(out.glob("*/agreement.json"))]
    return [record for record in records if record]


def page(out: Path, records: dict[str, dict[str, Record]], agreements: Sequence[Record] = ()) -> str:
    found = _findings(records)
    datasets = sorted({dataset for by_dataset in records.values() for dataset in by_dataset})
    names = " and ".join(map(summary.name_of, datasets))
    links = "".join(f'<a href="#{name}">{escape(name)}</a>' for name in records)
    sections = [_section(out, name, each, found[name], datasets) for name, each in records.items()]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>rectgrad: the experiments</title><style>{markup.STYLE}</style>"
        f"<h1>The experiments</h1><p>{escape(INTRODUCTION.format(names))}</p>\n"
        f"{summary.figure(found, datasets)}\n<h2>What the paper says, what holds here, how we know</h2>"
        f"{summary.table(found, datasets)}\n<nav>{links}</nav>\n{''.join(sections)}"
        f"{''.join(map(_agreement, agreements))}"
        f"<h2>Citation</h2><p>The method and the claims are from:</p><pre>{CITATION}</pre></html>\n"
    )


def _findings(records: dict[str, dict[str, Record]]) -> dict[str, dict[str, list[Finding]]]:
    """experiment -> dataset -> findings, corrected over all of them."""
    found = {
        name: {
            dataset: experiment(name).findings(record["metrics"])
            for dataset, record in by_dataset.items()
            if _omission(record) is None
        }
        for name, by_dataset in records.items()
    }
    every = iter(corrected([f for each in found.values() for own in each.values() for f in own]))
    return {
        name: {dataset: [next(every) for _ in own] for dataset, own in by_dataset.items()}
        for name, by_dataset in found.items()
    }


def _omission(record: Record) -> str | None:
    """Why a record is not shown; None if it is."""
    if outdated(record):
        again = f"rectgrad reproduce {record['experiment']} --dataset {record['dataset']}"
        return (
            "made by an earlier version, so its numbers and figures are left out; to run it again: "
            f"{again} --preset {record['preset']}"
        )
    accuracy = record.get("accuracy")
    if accuracy is not None and accuracy < LOWEST:
        return (
            f"the networks reach a test accuracy of {accuracy:.2f} only, so their maps are no result and are "
            "not shown"
        )
    return None


def _section(
    out: Path,
    name: str,
    records: dict[str, Record],
    findings: dict[str, list[Finding]],
    datasets: Sequence[str],
) -> str:
    module = experiment(name)
    shown = {dataset: record for dataset, record in records.items() if _omission(record) is None}
    parts = [
        f'<h2 id="{name}">{escape(module.TITLE)}</h2>',
        f"<blockquote>The paper: {escape(module.PAPER)}</blockquote>",
        *(_warning(record) for dataset, record in records.items() if dataset not in shown),
        summary.section(findings, datasets),
        *_figures(out, module.CAPTIONS, shown),
        *(_numbers(record, module.tables(record["metrics"])) for record in shown.values()),
    ]
    return "\n".join(parts)


def _warning(record: Record) -> str:
    name = summary.name_of(record["dataset"])
    text = f"{name}, preset {record['preset']}: {_omission(record)}."
    return f"<p>{escape(text)}</p>"


def _figures(out: Path, captions: dict[str, str], records: dict[str, Record]) -> list[str]:
    """The first figure of each dataset side by side; the others are folded away. Photos do not depend on the
    dataset and are shown once."""
    by_key: dict[str, list[Path]] = {}
    for dataset, record in records.items():
        for name in record["figures"] or ():
            by_key.setdefault(_key(record, name), []).append(out / dataset / name)
    drawn = {key: _pair(paths, captions[key]) for key, paths in by_key.items()}
    first, *others = drawn or [""]
    more = "".join(drawn[key] for key in others)
    return [drawn.get(first, ""), markup.folded("More figures", more)]


def _key(record: Record, name: str) -> str:
    return Path(name).stem.removeprefix(record["experiment"]).removeprefix("-")


def _pair(paths: Sequence[Path], caption: str) -> str:
    different = {path.read_bytes(): path for path in reversed(paths) if path.exists()}
    parts = [
        markup.figure(
            path, f"{summary.name_of(path.parent.name)}. {caption}" if len(different) > 1 else caption
        )
        for path in reversed(different.values())
    ]
    return f'<div class="pair">{"".join(parts)}</div>'


def _numbers(record: Record, tables: Sequence[Table]) -> str:
    notes = "".join(f'<p class="faint">Note: {escape(note)}.</p>' for note in _notes(record))
    command = (
        f"rectgrad reproduce {record['experiment']} --dataset {record['dataset']} --preset {record['preset']}"
    )
    about = f'<p class="faint">{escape(_provenance(record))}<br><code>{escape(command)}</code></p>'
    content = f"{about}{''.join(map(markup.table, tables))}{notes}"
    return markup.folded(f"Numbers and provenance, {summary.name_of(record['dataset'])}", content)


def _agreement(record: Record) -> str:
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
    title = f"Agreement with other implementations on {n} {summary.name_of(record['dataset'])} images"
    return f"<h2>{escape(title)}</h2>{markup.table(Table(head, rows, note))}\n"


def _provenance(record: Record) -> str:
    where = record["environment"]
    device = where["gpu"] or f"{where['cpu']}, threads: {where['threads']}"
    hidden = ("experiment", "dataset", "preset", "q", "photos")
    settings = {key: value for key, value in record["settings"].items() if key not in hidden}
    networks = "; ".join(record["weights"])
    return (
        f"Preset {record['preset']}: {_words(settings)}; networks: {networks}. {device}; torch "
        f"{where['torch']}; {record['seconds']:.0f} s; {where['date'][:10]}; commit "
        f"{(record['commit'] or 'unknown')[:12]}, code {record['code']}"
    )


def _words(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, dict):
        pairs = (f"{str(key).replace('_', ' ')}: {_words(each)}" for key, each in value.items())
        return "; ".join(pairs) or "none"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _notes(record: Record) -> list[str]:
    model, notes = record["settings"].get("model"), [str(note) for note in record["notes"]]
    if model != MODEL or any(note.startswith(NO_PHOTOS) for note in notes):
        return notes
    command = f"rectgrad reproduce {record['experiment']} --dataset {record['dataset']} --model {PAPERS}"
    paper = (
        f"photos are classified by {model}, not by the paper's Inception V4, whose weights are a 171 MB "
        f"download; to use it: {command}"
    )
    return [*notes, paper]
