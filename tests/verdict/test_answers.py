"""Statistics and answers, from given numbers."""

import numpy as np
import pytest

from rectgrad.metrics import statistics
from rectgrad.verdict import answers, table
from rectgrad.verdict.matched import SAME_SPARSITY
from rectgrad.verdict.presets import PRESETS, least_photos

RANDOM = np.random.default_rng(1)
PHOTOS = np.random.default_rng(0).normal(size=20)  # photos differ more than methods do


@pytest.fixture(autouse=True)
def same_numbers_whatever_ran_before():
    RANDOM.bit_generator.state = np.random.default_rng(1).bit_generator.state


def column(mean):
    return PHOTOS + mean + 0.1 * RANDOM.normal(size=20)


def judged(values, methods, controls=("edges",), measure="insertion_blur", **extra):
    verdict = {
        "pairs": table.pairs({measure: values}, 0),
        "table": {measure: table.cells(values, 0), **extra},
    }
    verdict["ranks"] = table.ranks([*methods, *controls], verdict["table"], verdict["pairs"])
    verdict["answers"] = answers.answers(methods, controls, verdict)
    return verdict


def test_pairs_are_paired_and_corrected():
    values = {"good": column(0.3), "bad": column(0), "edges": column(0)}
    first, second, third = table.pairs({"insertion_blur": values}, 0)
    assert (first["a"], first["b"], first["better"]) == ("good", "bad", "good")
    assert first["low"] <= first["difference"] <= first["high"]
    assert first["high"] - first["low"] < 0.2  # the spread of the photos cancels
    assert third["better"] is None
    assert third["holm"] >= third["p"] >= 0.05
    assert first["holm"] == pytest.approx(3 * min(first["p"], second["p"]), rel=0.6)
    assert third["photos_needed"] > 20 >= first["photos_needed"]


def test_the_correction_is_over_all_pairs_in_all_measures():
    """Holm's method by hand. Descriptions, which have no better side, are not compared."""
    measures = ("insertion_blur", "deletion_mean", "specificity", "gini")
    steps = {"insertion_blur": 0.3, "deletion_mean": -0.06, "specificity": 0.05, "gini": 0.3}
    values = {m: {"a": column(steps[m]), "b": column(0), "c": column(0)} for m in measures}
    found = table.pairs(values, 0)
    assert [(p["measure"], p["a"], p["b"]) for p in found] == [
        (m, a, b) for m in measures[:3] for a, b in (("a", "b"), ("a", "c"), ("b", "c"))
    ]
    p_values = []
    for pair in found:
        rows = values[pair["measure"]]
        difference = rows[pair["a"]] - rows[pair["b"]]
        p_values.append(float(statistics.sign_flip_test(difference, seed=0)[0]))
        assert pair["p"] == p_values[-1]
        assert pair["difference"] == pytest.approx(difference.mean())
    order, largest, corrected = sorted(range(9), key=lambda i: p_values[i]), 0.0, {}
    for done, i in enumerate(order):
        largest = max(largest, min(1.0, (9 - done) * p_values[i]))
        corrected[i] = largest
    assert [pair["holm"] for pair in found] == pytest.approx([corrected[i] for i in range(9)])
    for pair in found:
        larger, smaller = (pair["a"], pair["b"]) if pair["difference"] > 0 else (pair["b"], pair["a"])
        wins = smaller if pair["measure"] == "deletion_mean" else larger
        assert pair["better"] == (wins if pair["holm"] < 0.05 else None)
    alone = {m: table.pairs({m: values[m]}, 0) for m in measures[:3]}
    milder = [pair["holm"] for own in alone.values() for pair in own]
    assert all(a <= pair["holm"] for a, pair in zip(milder, found, strict=True))
    assert any(a < 0.05 <= pair["holm"] for a, pair in zip(milder, found, strict=True))


@pytest.mark.parametrize(("rows", "measures"), [(8, 20), (5, 3), (27, 22)])
def test_enough_photos_for_the_correction(rows, measures):
    """With the photos of `enough`, a difference in which all agree is significant, whatever the seed; far
    fewer photos cannot be enough, and the verdict says so."""
    preset = PRESETS["quick"].enough(rows, measures)
    tests = rows * (rows - 1) // 2 * measures
    assert preset.evaluated == preset.costly <= preset.composites
    unanimous = RANDOM.uniform(0.1, 1, size=(preset.evaluated, 1))
    draws = max(20_000, table.FINE * tests)
    assert all(tests * statistics.sign_flip_test(unanimous, draws, seed)[0] < 0.05 for seed in range(3))
    least = least_photos(tests)
    assert least <= preset.evaluated
    assert tests * 2.0 ** (1 - least) < 0.05 <= tests * 2.0 ** (2 - least)


@pytest.mark.parametrize(("photos", "few"), [(6, True), (7, False)])
def test_too_few_photos_are_said(photos, few):
    """Of three pairs: 3 / 2^6 is below 0.05, 3 / 2^5 is not."""
    values = {name: column(mean)[:photos] for name, mean in (("a", 3.0), ("b", 1.0), ("edges", -1.0))}
    verdict = judged(values, ["a", "b"])
    said = answers.too_few(verdict)
    assert (verdict["answers"]["where"] == "inconclusive") == few
    why = "6 photos are too few: with 3 comparisons, 7 or more are needed"
    assert said == ([{"kind": "question", "what": '"where"', "why": why}] if few else [])


def test_few_photos_are_not_too_few_if_a_difference_is_significant():
    """Holm's method corrects the smallest p of 6 photos, 2^-5, only for the tests that are left."""
    steps = {"insertion_blur": 20, "insertion_mean": 20, "deletion_blur": 20, "sensitivity_n": 6}
    values = {
        measure: {
            row: np.concatenate([column(mean)[:photos], np.full(20 - photos, np.nan)])
            for row, mean in (("a", 3.0), ("edges", -1.0))
        }
        for measure, photos in steps.items()
    }
    pairs = table.pairs(values, 0)
    assert pairs[-1]["n"] == 6 < least_photos(len(pairs))
    assert pairs[-1]["better"] == "a"
    assert answers.too_few({"pairs": pairs}) == []


def test_lower_is_better_for_deletion():
    pairs = table.pairs({"deletion_blur": {"a": column(0), "b": column(0.3)}}, 0)
    assert pairs[0]["better"] == "a"


def test_photos_that_one_method_lacks_are_left_out():
    short = column(0.3)
    short[8:] = np.nan
    (pair,) = table.pairs({"insertion_blur": {"a": short, "b": column(0)}}, 0)
    assert pair["n"] == 8


def test_ranks_share_ties():
    values = {"a": column(0.3), "b": column(0.3), "c": column(0)}
    verdict = judged({**values, "edges": column(-0.3)}, ["a", "b", "c"])
    assert verdict["ranks"]["by_measure"]["insertion_blur"] == {"a": 1, "b": 1, "c": 3, "edges": 4}
    assert set(verdict["ranks"]["order"][:2]) == {"a", "b"}
    assert verdict["ranks"]["order"][2:] == ["c", "edges"]
    assert verdict["ranks"]["shares"]["c"] == {
        "won": pytest.approx(1 / 3),
        "tied": pytest.approx(0),
        "lost": pytest.approx(2 / 3),
    }
    assert verdict["answers"]["where"] == ["a", "b"]


def test_equal_rows_share_a_place_and_rows_without_comparisons_come_last():
    values = {"a": column(0.3), "c": column(-0.3), "edges": column(0)}
    verdict = {"pairs": table.pairs({"insertion_blur": {**values, "copy": values["a"]}}, 0)}
    means = {
        "insertion_blur": {row: {"mean": v.mean()} for row, v in {**values, "copy": values["a"]}.items()}
    }
    ranks = table.ranks(["new", "c", "a", "edges", "copy"], means, verdict["pairs"])
    assert ranks["order"] == ["a", "copy", "edges", "c", "new"]
    assert table.places(ranks["shares"]) == {"a": 1, "copy": 1, "edges": 3, "c": 4}


def test_measures_agree_on_the_rows_that_both_have():
    means = {row: {"mean": float(value)} for row, value in zip("abcde", (5, 3, 4, 1, 2), strict=True)}
    few = {row: {"mean": float(value)} for row, value in zip("abd", (2, 1, 0), strict=True)}
    found = table.agreement({"insertion_blur": means, "road": few, "deletion_blur": means})
    assert found["insertion_blur"]["road"] == pytest.approx(1)
    assert found["deletion_blur"]["road"] == pytest.approx(-1)


def test_a_method_must_beat_every_control():
    values = {"best": column(0.3), "worst": column(0), "edges": column(0.35), "random": column(-0.3)}
    verdict = judged(values, ["best", "worst"], ["edges", "random"])
    assert verdict["answers"]["where"] == "inconclusive"
    claims = answers.claims(["best", "worst"], ["edges", "random"], verdict)
    assert "best and worst: that the maps show more of the network than edges." in claims
    assert any(claim == '"where": that any method is better than all controls.' for claim in claims)


def test_all_methods_tied_is_inconclusive():
    values = {"a": column(0.3), "b": column(0.3), "edges": column(0)}
    verdict = judged(values, ["a", "b"])
    assert verdict["answers"]["where"] == "inconclusive"
    claims = answers.claims(["a", "b"], ["edges"], verdict)
    assert '"where": which of a and b is best. They are tied.' in claims


@pytest.mark.parametrize(("specificity", "expected"), [(0.1, "inconclusive"), (0.9, ["a"])])
def test_a_map_that_does_not_depend_on_the_class_does_not_say_why(specificity, expected):
    cells = {"a": {"mean": specificity, "n": 6}, "b": {"mean": 0.9, "n": 6}}
    values = {"a": column(0.3), "b": column(0), "edges": column(0)}
    verdict = judged(values, ["a", "b"], measure="grid_pointing", specificity=cells)
    assert verdict["answers"]["why this class"] == expected
    claims = " ".join(answers.claims(["a", "b"], ["edges"], verdict))
    assert ("a (0.10): that the maps show why this class was chosen" in claims) == (specificity < 0.3)
    open_question = (
        "that any method answers it. a beats all controls, but the maps hardly depend on the class."
    )
    assert (open_question in claims) == (specificity < 0.3)


def test_claims_from_few_photos_say_so():
    """The leaderboard gives the value alone for fewer than six photos."""
    cells = {"a": {"mean": 0.1, "n": 5}, "b": {"mean": 0.2, "n": 6}}
    verdict = judged({"a": column(0.3), "b": column(0), "edges": column(0)}, ["a", "b"], specificity=cells)
    said = " ".join(answers.claims(["a", "b"], ["edges"], verdict))
    assert "a (0.10, n 5) and b (0.20): that the maps show why" in said


def test_methods_that_lose_to_one_another_are_not_tied():
    """a beats b, b beats c and c beats a, each in another measure; all beat the control."""
    steps = {"insertion_blur": (0.5, 0.3, 0.4), "insertion_mean": (0.4, 0.5, 0.3), "road": (0.3, 0.4, 0.5)}
    ties = {"insertion_blur": "c", "insertion_mean": "a", "road": "b"}
    values = {
        measure: {
            row: np.full(20, np.nan) if row == ties[measure] else column(mean)
            for row, mean in zip("abc", means, strict=True)
        }
        | {"edges": column(0)}
        for measure, means in steps.items()
    }
    verdict = {"pairs": table.pairs(values, 0), "table": {}}
    verdict["answers"] = answers.answers("abc", ["edges"], verdict)
    assert verdict["answers"]["where"] == "inconclusive"
    said = '"where": which of a, b and c is best. Each one loses to another one.'
    assert said in answers.claims("abc", ["edges"], verdict)


@pytest.mark.parametrize(
    ("last", "floor", "expected"),
    [((0.5, 0.4), 0.1, True), ((0.5, 0.2), 0.1, False), ((0.95, 0.9), 1.0, True)],
)
def test_maps_that_ignore_the_weights(last, floor, expected):
    mean, low = last
    cells = {
        "randomisation_last": {"a": {"mean": mean, "low": low}},
        "randomisation_floor": {"a": {"mean": floor}},
    }
    assert answers.ignores_weights("a", cells) is expected


def test_a_lead_that_equal_sparsity_reverses_is_no_claim():
    """Of the methods that are an answer, and in the same measure."""
    values = {"best": column(0.6), "second": column(0.3), "edges": column(0)}
    verdict = judged(values, ["best", "second"])
    assert verdict["answers"]["where"] == ["best"]
    for gains, wrong in (((0.3, 0.6), True), ((0.6, 0.3), False), ((0.3, 0.3), False)):
        cut = dict(zip(("best", "second"), map(column, gains), strict=True))
        verdict["matched"] = {SAME_SPARSITY: {"pairs": table.pairs({"insertion_blur": cut}, 0)}}
        found = answers.reversals(verdict)
        assert [claim.startswith("best: that it is better than second") for claim in found] == [True] * wrong
        verdict["matched"] = {SAME_SPARSITY: {"pairs": table.pairs({"deletion_blur": cut}, 0)}}
        assert not answers.reversals(verdict)  # no lead in this measure
    verdict["answers"]["where"] = ["second"]
    verdict["matched"] = {SAME_SPARSITY: {"pairs": table.pairs({"insertion_blur": values}, 0)}}
    assert not answers.reversals(verdict)
    assert not answers.reversals({**verdict, "matched": {}})
