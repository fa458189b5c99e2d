"""index.html and explained.jsonl next to the results of a run, updated while it works.

The page is a single file that can be opened from disk: the cards are HTML, and a small script filters and
sorts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rectgrad.explanation.trust import LOW
from rectgrad.photos import files
from rectgrad.photos.names import folded

Json = dict[str, Any]
_HERE = Path(__file__).parent


class Index:
    """The records in the output folder, including those of earlier runs."""

    def __init__(self, out: Path, command: str, total: int) -> None:
        self.out, self.command, self.total = out, command, total
        self.records = _stored(out)
        self.processed = 0
        self._next = 0.0

    def add(self, record: Json | None) -> None:
        """Adds the record of a finished photo; None if it could not be read."""
        self.processed += 1
        if record is not None:
            self.records[record["picture"]] = record
        if time.monotonic() >= self._next:
            self.write()

    def close(self) -> None:
        """Writes the page from the files in the folder, which also has results that were not added because
        of an interruption."""
        added = len(self.records)
        self.records = _stored(self.out)
        self.processed += len(self.records) - added
        self.write()

    def write(self) -> None:
        """Writes both files. `add` waits 100 times as long as this took before it writes them again."""
        if not self.records:
            return
        started = time.monotonic()
        records = [self.records[picture] for picture in sorted(self.records)]
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        files.save_text("".join(lines), self.out / files.RECORDS)
        left = max(self.total - self.processed, 0)
        files.save_text(page(records, self.command, left), self.out / "index.html")
        ended = time.monotonic()
        self._next = ended + 100 * (ended - started)


def _stored(out: Path) -> dict[str, Json]:
    """The records in the folder, by picture."""
    paths = list(out.rglob("*.json")) if out.is_dir() else []
    records = ((files.load_record(path), path.relative_to(out).with_suffix(".png")) for path in paths)
    return {each["picture"]: each for each, picture in records if _is_shown(each, picture.as_posix())}


def _is_shown(record: Json, picture: str) -> bool:
    """Whether this is the record of that picture. The folder may contain other files, and subfolders with the
    results of other runs, whose records name pictures relative to the subfolder. A browser would load a
    thumbnail from wherever it is."""
    try:
        same = folded(record["picture"]) == folded(picture)  # file systems normalise names
        same = same and (record.get("thumbnail") or "thumbnails/").startswith("thumbnails/")
        return same and bool(_card(record) + _made_by([record]) + _caution([record]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False


def page(records: list[Json], command: str, left: int = 0) -> str:
    """A page with all results. left: number of photos that the run has not processed yet."""
    style, script = (_HERE.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    count = f"{len(records)} photo{'s' if len(records) != 1 else ''}"
    unfinished = (
        f'<p role="status">{left} more to do. Reload this page to see new results.</p>' if left else ""
    )
    cards = "\n".join(map(_card, records))
    wide = "" if command == "explain" else ' class="wide"'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>rectgrad {command}: {count}</title>\n<style>\n{style}</style>\n</head>\n<body{wide}>\n"
        f"<header>\n<h1>rectgrad {command}: {count}</h1>\n<p>{escape(_made_by(records))}</p>\n{unfinished}\n"
        f'{_caution(records)}</header>\n{_CONTROLS}<ul id="cards">\n{cards}\n</ul>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


_CONTROLS = """<form id="controls" role="search" hidden>
<label>Filter <input id="text" type="search" placeholder="class or file name" autocomplete="off"></label>
<label>Show <select id="show">
<option value="all">all</option>
<option value="low">low specificity</option>
<option value="high">other specificity</option>
<option value="warned">with warnings</option>
</select></label>
<label>Sort by <select id="sort">
<option value="name">file name</option>
<option value="class">class</option>
<option value="-confidence">highest confidence</option>
<option value="confidence">lowest confidence</option>
<option value="-specificity">highest specificity</option>
<option value="specificity">lowest specificity</option>
</select></label>
<output id="count"></output>
</form>
"""


def _made_by(records: list[Json]) -> str:
    """The model and the method of all results."""
    settings = [record["settings"] for record in records]
    models = dict.fromkeys(str(each.get("model")) for each in settings)
    methods = dict.fromkeys(_method(each) for each in settings)
    several = any("methods" in each for each in settings)
    return f"Model: {_few(models)}. {'Maps' if several else 'Method'}: {_few(methods)}."


def _method(settings: Json) -> str:
    if "method" not in settings:
        return ", ".join(settings.get("methods", ()))
    q = settings.get("options", {}).get("q")
    return settings["method"] + ("" if q is None else f", q = {q:g}")


def _few(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    return "; ".join(listed[:limit]) + (f" and {len(listed) - limit} others" if len(listed) > limit else "")


def _caution(records: list[Json]) -> str:
    """How many maps have a low specificity, and what that means; empty if there are none."""
    cautions = dict.fromkeys(text for record in records if (text := record.get("caution")))
    if not cautions:
        return ""
    low = sum(bool(record.get("caution")) for record in records)
    sentences = " ".join(escape(of_many(text)) for text in cautions)
    several = any("methods" in record["settings"] for record in records)
    what = f"{'A map with s' if several else 'S'}pecificity below {LOW:g} for {low} of {len(records)} photos."
    return f'<p class="caution"><strong>{what}</strong> {sentences}</p>\n'


def of_many(caution: str) -> str:
    """Rewrites the caution about one map as a sentence about several maps."""
    text = caution.replace("this map", "such a map", 1)
    return f"{text[0].upper()}{text[1:]}."


def _card(record: Json) -> str:
    """One photo: thumbnail, class, confidence, specificity and warnings."""
    target, name = record["target"], record["picture"].removesuffix(".png")
    low = bool(record.get("caution"))
    number = _lowest(record.get("specificity"))
    data = {
        "name": name,
        "class": target["name"],
        "confidence": "" if target["confidence"] is None else target["confidence"],
        "specificity": "" if number is None else number,
        "low": int(low),
        "warned": int(bool(record.get("warnings"))),
    }
    attributes = " ".join(f'data-{key}="{escape(str(value))}"' for key, value in data.items())
    warned = "".join(f'<p class="warning">{escape(text)}</p>' for text in record.get("warnings", ()))
    return (
        f"<li {attributes}>"
        f'<a href="{_url(record["picture"])}"><img loading="lazy" decoding="async" '
        f'src="{_url(record.get("thumbnail") or record["picture"])}" alt="Map of {escape(name)}"></a>'
        f"<h2>{escape(target['name'])}</h2>"
        f"<p>confidence <b>{_percent(target['confidence'])}</b><br>specificity {_shown(record, low)}</p>"
        f'<p class="file" title="{escape(record["image"])}">{escape(name)}</p>{warned}</li>'
    )


def _lowest(specificity: Any) -> float | None:
    """The number to sort by: the lowest one if there are several maps."""
    values = specificity.values() if isinstance(specificity, dict) else [specificity]
    return min((value for value in values if value is not None), default=None)


def _shown(record: Json, low: bool) -> str:
    value = record.get("specificity")
    if isinstance(value, dict) and len(value) > 4:
        known = [each for each in value.values() if each is not None]
        return f"<b>{_number(min(known))}</b> to <b>{_number(max(known))}</b>" if known else _number(None)
    if isinstance(value, dict):
        return ", ".join(f"{escape(name)} <b>{_number(each)}</b>" for name, each in value.items())
    return f"<b>{_number(value)}</b>" + (' <span class="low">low</span>' if low else "")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _url(path: str) -> str:
    return escape(quote(path))
