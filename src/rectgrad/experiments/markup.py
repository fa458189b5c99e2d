"""The report's HTML: style, tables, and figures that are embedded in the page."""

from __future__ import annotations

import base64
import io
import re
from html import escape
from pathlib import Path

from PIL import Image

from rectgrad.experiments.findings import VERDICTS, Finding, Table

QUALITY = 50  # of embedded pictures
CLASS_OF = {True: "yes", False: "no", None: "open"}

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1d21; --faint: #63656e; --line: #e3e3e6;
  --soft: #f6f6f8; --yes: #1d7a3a; --no: #b3261e; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --page: #17181b; --ink: #e8e6e1; --faint: #9a9ca6;
  --line: #33353c; --soft: #202227; --yes: #66c783; --no: #ff8a80; --open: #e0b252; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 75rem; padding: 1.5rem; }
h1 { margin: 0 0 .25rem; } h2 { margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; } h3 { margin: 1.5rem 0 .5rem; } p, blockquote { max-width: 50rem; }
.faint { color: var(--faint); font-size: .875rem; } a { color: inherit; }
nav a { margin-right: 1rem; display: inline-block; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(40rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { min-width: 640px; max-width: 100%; height: auto; }
figure img { max-width: 100%; height: auto; background: #fff; }
figcaption { color: var(--faint); font-size: .9375rem; max-width: 50rem; }
.wide, .text { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; margin: .5rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { font-variant-numeric: tabular-nums; } .wide th, .wide td { white-space: nowrap; }
td b, td b + span, td a { white-space: nowrap; } b.yes { color: var(--yes); } b.no { color: var(--no); }
b.open { color: var(--open); } rect.yes { fill: var(--yes); } rect.no { fill: var(--no); }
rect.open { fill: var(--open); } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
blockquote { margin: .5rem 0; padding-left: 1rem; border-left: 3px solid var(--line); }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--faint); }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; font-size: .8125rem; }
"""


def verdict(found: Finding | None) -> str:
    """The verdict in its colour, with the corrected p."""
    if found is None:
        return '<span class="faint">no result</span>'
    p = "" if found.p is None else f' <span class="faint">p {number_of(found.p)}</span>'
    return f'<b class="{CLASS_OF[found.holds]}">{VERDICTS[found.holds]}</b>{p}'


def number_of(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"= {p:.3f}"


def table(given: Table, kind: str = "wide") -> str:
    rows = [[escape(cell) for cell in row] for row in given.rows]
    note = f'<p class="faint">{escape(given.note)}</p>' if given.note else ""
    return grid([escape(cell) for cell in given.head], rows, kind) + note


def grid(head: list[str], rows: list[list[str]], kind: str) -> str:
    """A table whose cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(path: Path, caption: str) -> str:
    """An embedded figure."""
    vector, data = path.suffix == ".svg", path.read_bytes()
    kind = "svg+xml" if vector else path.suffix[1:]
    encoded = base64.b64encode(_shorter(data) if vector else _smaller(data)).decode()
    source, text = f"data:image/{kind};base64,{encoded}", escape(caption)
    return f'<figure><img loading="lazy" src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def _shorter(svg: bytes) -> bytes:
    """The drawing with two decimals and without line breaks in paths, two thirds of its size."""
    return re.sub(rb"\s*\n\s*", b" ", re.sub(rb"(\.\d\d)\d+", rb"\1", svg))


def _smaller(picture: bytes) -> bytes:
    """The picture in a quality that suffices on a page, half of its size; the file itself keeps its own."""
    small = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as opened:
        opened.convert("RGB").save(small, format="WEBP", quality=QUALITY, method=6)
    return min(picture, small.getvalue(), key=len)


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""
