"""verdict.html: one file that opens without a network connection. The answers come first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rectgrad.verdict.answers import INCONCLUSIVE, ranked_on
from rectgrad.verdict.measures import QUESTIONS
from rectgrad.verdict.page.leaderboard import leaderboard
from rectgrad.verdict.page.measure_cards import cards
from rectgrad.verdict.page.tables import agreement, costs, matched, pairs, ranks

Json = dict[str, Any]
_STYLE = Path(__file__).with_name("page.css")


def page(record: Json, pictures: Sequence[Json] = ()) -> str:
    """The page of a record; `pictures` are data URLs of the photos on which methods disagree."""
    title = f"Which map to trust on {record['model']}"
    sections = [
        _section("Which method for which question", _answers(record)),
        _section("Leaderboard", leaderboard(record)),
        _section("What these numbers do not show", _claims(record)),
        _section("Not judged", _failures(record)),
        _section("Every measure", cards(record)),
        _section("Do the measures agree?", ranks(record) + agreement(record)),
        _section("With the same post-processing", matched(record)),
        _section("Photos on which the methods disagree most", _photos(record, pictures)),
        _section("Pairs of methods", pairs(record)),
        _section("Time and memory", costs(record)),
        _section("How this was made", _settings(record)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(_summary(record))}</p>\n</header>\n<main>\n"
        f"{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n" if content else ""


def _summary(record: Json) -> str:
    n, methods, controls = record["photos"]["n"], len(record["methods"]), len(record["controls"])
    return (
        f"{methods} method{'s' if methods != 1 else ''} and {controls} controls on {n} photo"
        f"{'s' if n != 1 else ''}{ranked_on(record)}, preset {record['preset']['name']}. Controls are maps "
        "that do not depend on the network."
    )


def _answers(record: Json) -> str:
    found = []
    for question, meaning in QUESTIONS.items():
        answer = record["answers"][question]
        if answer == INCONCLUSIVE:
            why = [e["why"] + "." for e in record["failures"] if e["what"] == f'"{question}"']
            own = f'"{question}": '
            why += ["Not shown: " + c.removeprefix(own) for c in record["claims"] if c.startswith(own)]
            said = '<p class="answer open">inconclusive</p>' + f"<p>{escape(' '.join(why))}</p>"
        else:
            names = "".join(f"<b>{escape(name)}</b>" for name in answer)
            said = f'<p class="answer">{names}</p>' + ("<p>Tied for best.</p>" if len(answer) > 1 else "")
        found.append(f"<article><h3>“{question}”</h3><p>{escape(meaning)}</p>{said}</article>")
    note = (
        "A method beats another one if it is significantly better in at least one measure of the question "
        "and significantly worse in none. The answer names the methods that beat every control and that no "
        "other such method beats."
    )
    return f'<div class="answers">{"".join(found)}</div><p class="faint">{note}</p>'


def _claims(record: Json) -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in record["claims"])
    return f"<p>This verdict does not support these claims:</p><ul>{items}</ul>" if items else ""


def _failures(record: Json) -> str:
    own = [each for each in record["failures"] if each["kind"] != "question"]  # shown beside the question
    items = "".join(f"<li><b>{escape(e['what'])}</b>: {escape(e['why'])}</li>" for e in own)
    return f"<ul>{items}</ul>" if items else ""


def _photos(record: Json, pictures: Sequence[Json]) -> str:
    rows = []
    for each in pictures:
        i = each["photo"]
        classes = record["photos"]["classes"]
        label = f"{classes[i]}, {record['photos']['names'][i]}" if classes else record["photos"]["names"][i]
        photo = [_figure(each["picture"], "photo")] if each["picture"] else []
        maps = [_figure(picture, name) for name, picture in each["maps"].items()]
        text = f"{escape(label)}: mean rank correlation {each['correlation']:.2f}"
        rows.append(f'<h3>{text}</h3><div class="strip">{"".join(photo + maps)}</div>')
    return "".join(rows)


def _figure(picture: str, name: str) -> str:
    return (
        f'<figure><img src="{picture}" alt="{escape(name)}"><figcaption>{escape(name)}</figcaption></figure>'
    )


def _settings(record: Json) -> str:
    where, preset = record["environment"], record["preset"]
    threads = f"{where['threads']} thread{'s' if where['threads'] != 1 else ''}"
    device = where["gpu"] or f"{where['cpu']}, {threads}"
    lines = {
        "command": where["command"],
        "versions": f"rectgrad {where['rectgrad']}, torch {where['torch']}, Python {where['python']}",
        "commit": where["commit"] or "unknown",
        "device": device,
        "date": where["date"],
        "seconds": f"{record['seconds']:g}",
        "seed": record["seed"],
        "preset": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in preset.items()),
        **{f"method {name}": options for name, options in record["methods"].items()},
    }
    if record["grid"]:
        grid = record["grid"]
        rows, columns = grid["shape"]
        size = "resized to fit the input" if grid["fit"] else "each at its full size"
        only = ": the network gives every class a probability above 0.02" if grid["fit"] else ""
        lines["grids"] = (
            f"{rows} x {columns} photos, {size}; {grid['kept']} of {grid['tried']} that were tried{only}"
        )
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in lines.items())
    return f"<dl>{items}</dl>"
