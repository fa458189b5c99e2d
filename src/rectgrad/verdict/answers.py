"""From statistics to sentences: which method answers which question, and which claims cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rectgrad.explanation.trust import LOW
from rectgrad.verdict.matched import SAME_SPARSITY
from rectgrad.verdict.measures import HOW_MUCH, MEASURES, QUESTIONS, WHERE, WHY
from rectgrad.verdict.presets import least_photos

Json = dict[str, Any]
INCONCLUSIVE = "inconclusive"
SIMILAR = 0.2  # similarity above that of unrelated photos from which a map ignores the weights
EQUAL = 0.9  # and from which it does in any case
FEW = 6  # photos: an interval of fewer cannot cover 95 %


def answers(methods: Sequence[str], controls: Sequence[str], verdict: Json) -> dict[str, list[str] | str]:
    """For each question, the methods that are tied for best, or "inconclusive".

    A method beats another one if it is significantly better in at least one measure of the question, and
    significantly worse in none. The answer has the methods that beat every control and that no other such
    method beats; it is inconclusive if that is no method, or every one. For "why this class", the maps of a
    method must also depend on the class.
    """
    return {question: _answer(question, methods, controls, verdict) for question in QUESTIONS}


def _answer(question: str, methods: Sequence[str], controls: Sequence[str], verdict: Json) -> list[str] | str:
    own = _pairs(question, verdict)
    able = _specific(question, _above_controls(methods, controls, own), verdict)
    best = [row for row in able if not any(beats(other, row, own) for other in able)]
    return INCONCLUSIVE if not best or len(best) == len(methods) > 1 else best


def _pairs(question: str, verdict: Json) -> list[Json]:
    return [pair for pair in verdict["pairs"] if MEASURES[pair["measure"]].question == question]


def _above_controls(methods: Sequence[str], controls: Sequence[str], own: Sequence[Json]) -> list[str]:
    return [row for row in methods if all(beats(row, control, own) for control in controls)]


def _specific(question: str, rows: Sequence[str], verdict: Json) -> list[str]:
    """Maps that are the same for every class do not say why one was chosen."""
    return [row for row in rows if question != WHY or not unspecific(row, verdict["table"])]


def beats(a: str, b: str, pairs: Sequence[Json]) -> bool:
    """Whether a is significantly better than b in at least one measure, and significantly worse in none."""
    winners = {pair["better"] for pair in pairs if {pair["a"], pair["b"]} == {a, b}}
    return a in winners and b not in winners


def unspecific(row: str, table: Mapping[str, Mapping[str, Json]]) -> bool:
    """Whether the map of a class that the network rules out is nearly the same."""
    cell = table.get("specificity", {}).get(row)
    return cell is not None and cell["mean"] < LOW


def too_few(verdict: Json) -> list[dict[str, str]]:
    """Questions for which there are so few photos that no difference is significant. With fewer photos than
    `least_photos` one can be, if many others are: Holm's method corrects it for the remaining tests only."""
    found, tests = [], len(verdict["pairs"])
    for question in QUESTIONS:
        own = _pairs(question, verdict)
        most = max((pair["n"] for pair in own), default=0)
        if 0 < most < least_photos(tests) and not any(pair["better"] for pair in own):
            several = "" if most == 1 else "s"
            what = f"grid{several} of photos" if question == WHY else f"photo{several}"
            few = f"{most} {what} {'is' if most == 1 else 'are'} too few"
            why = f"{few}: with {tests} comparisons, {least_photos(tests)} or more are needed"
            found.append({"kind": "question", "what": f'"{question}"', "why": why})
    return found


def ranked_on(verdict: Json) -> str:
    """Says on how many photos methods were ranked, if these are fewer than all."""
    photos = [p["n"] for p in verdict["pairs"] if MEASURES[p["measure"]].question in (WHERE, HOW_MUCH)]
    return f", ranked on {max(photos)} of them" if photos and max(photos) < verdict["photos"]["n"] else ""


def claims(methods: Sequence[str], controls: Sequence[str], verdict: Json) -> list[str]:
    """Claims that the numbers do not support, one sentence each."""
    table, found = verdict["table"], []
    for question, answer in verdict["answers"].items():
        if answer == INCONCLUSIVE:
            found.append(_why_open(question, methods, controls, verdict))
        elif len(answer) > 1:
            found.append(f'"{question}": that one of {_listed(answer)} is better than the others.')
    for alike, names in _no_better(methods, controls, verdict["pairs"]).items():
        found.append(f"{_listed(names)}: that the maps show more of the network than {_listed(alike)}.")
    unsure = [row for row in methods if unspecific(row, table)]
    if unsure:
        found.append(
            f"{_with_values(unsure, table['specificity'])}: that the maps show why this class was chosen. "
            "They mark nearly the same positions for the least likely class (specificity in parentheses)."
        )
    fixed = [row for row in methods if ignores_weights(row, table)]
    if fixed:
        found.append(
            f"{_with_values(fixed, table['randomisation_last'])}: that the maps depend on what the network "
            "learned. They stay similar if all weights are random (rank correlation in parentheses)."
        )
    return found


def reversals(verdict: Json) -> list[str]:
    """Leads that are reversed if all maps have the same post-processing and sparsity: a sentence for each
    method that is an answer."""
    lost: dict[str, dict[str, None]] = {}
    leads = {(pair["measure"], pair["better"], _loser(pair)) for pair in verdict["pairs"] if pair["better"]}
    for pair in verdict["matched"].get(SAME_SPARSITY, {"pairs": ()})["pairs"]:
        if pair["better"] and (pair["measure"], _loser(pair), pair["better"]) in leads:
            lost.setdefault(_loser(pair), {})[pair["better"]] = None
    named = [row for answer in verdict["answers"].values() if answer != INCONCLUSIVE for row in answer]
    return [
        f"{row}: that it is better than {_listed(list(lost[row]))} whatever the post-processing. With the "
        "same post-processing and the same sparsity, it is significantly worse in insertion or deletion."
        for row in dict.fromkeys(named)
        if row in lost
    ]


def _loser(pair: Json) -> str:
    return str(pair["b"] if pair["better"] == pair["a"] else pair["a"])


def ignores_weights(row: str, table: Mapping[str, Mapping[str, Json]]) -> bool:
    """Whether the map hardly changes with random weights: it stays almost equal or, over its whole interval,
    more similar than maps of other photos."""
    last, floor = (table.get(f"randomisation_{each}", {}).get(row) for each in ("last", "floor"))
    if last is None:
        return False
    if last["mean"] > EQUAL or floor is None or last["low"] is None:
        return bool(last["mean"] > EQUAL)
    return bool(last["low"] - floor["mean"] > SIMILAR)


def _no_better(
    methods: Sequence[str], controls: Sequence[str], pairs: Sequence[Json]
) -> dict[tuple[str, ...], list[str]]:
    """For each set of controls that a method never beats in a ranked measure: the methods concerned."""
    ranked = [pair for pair in pairs if MEASURES[pair["measure"]].ranked]
    won = {(pair["better"], row) for pair in ranked for row in (pair["a"], pair["b"])}
    found: dict[tuple[str, ...], list[str]] = {}
    for row in methods if ranked else ():
        alike = tuple(control for control in controls if (row, control) not in won)
        if alike:
            found.setdefault(alike, []).append(row)
    return found


def _with_values(names: Sequence[str], cells: Mapping[str, Json]) -> str:
    few = {row: f", n {cells[row]['n']}" for row in names if cells[row]["n"] < FEW}
    return _listed([f"{row} ({cells[row]['mean']:.2f}{few.get(row, '')})" for row in names])


def _why_open(question: str, methods: Sequence[str], controls: Sequence[str], verdict: Json) -> str:
    own = _pairs(question, verdict)
    if not own:
        return f'"{question}": which method is best. No measure of this question could be computed.'
    able = _above_controls(methods, controls, own)
    if not able:
        return f'"{question}": that any method is better than all controls.'
    specific = _specific(question, able, verdict)
    if not specific:
        return (
            f'"{question}": that any method answers it. {_listed(able)} '
            f"{'beat' if len(able) > 1 else 'beats'} all controls, but the maps hardly depend on the class."
        )
    wins = any(beats(a, b, own) for a in specific for b in specific)
    why = "Each one loses to another one" if wins else "They are tied"
    return f'"{question}": which of {_listed(specific)} is best. {why}.'


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
