"""Statistics and verdicts: intervals over networks and images, which claims are decided, and how they are
corrected."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from rectgrad.experiments import feature_frequency, findings, statistics
from rectgrad.experiments.findings import Effect, Finding, corrected, decided, effect


def values(networks: int, images: int, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    """Values with an effect of the network and one of the image."""
    rng = np.random.default_rng(seed)
    own, shared = rng.normal(0, 0.1, (networks, 1)), rng.normal(0, 0.5, (1, images))
    return shift + own + shared + rng.normal(0, 0.2, (networks, images))


# Student's t


@pytest.mark.parametrize("df", [1.0, 2.0, 4.0, 7.3, 30.0, 2000.0])
@pytest.mark.parametrize("t", [0.0, 0.5, 2.0, 8.0, 40.0])
def test_student_p_is_scipys(t, df):
    near = 1e-3 if t < 10 else 1e-2  # at 40 and 2000 degrees of freedom, p is 1e-257
    assert statistics.student_p(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=near, abs=0)


def test_student_p_in_closed_form():
    for t in (0.3, 1.0, 12.0):
        assert statistics.student_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))
        assert statistics.student_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)


@pytest.mark.parametrize("df", [1.0, 2.5, 4.0, 99.0])
def test_quantiles_are_scipys(df):
    assert statistics.student_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-5)
    assert statistics.student_quantile(df, 0.99) == pytest.approx(stats.t.ppf(0.995, df), rel=1e-5)


# Estimates


def test_one_network_is_the_ordinary_t_test():
    given, base = values(1, 100, 0.1)[0], values(1, 100, seed=1)[0]
    for found, expected in (
        (statistics.estimate(given), stats.ttest_1samp(given, 0)),
        (statistics.difference(given, base), stats.ttest_rel(given, base)),
    ):
        assert found["p"] == pytest.approx(expected.pvalue, rel=1e-4)
        assert found["interval"] == pytest.approx(list(expected.confidence_interval()), rel=1e-4)
        assert found["df"] == pytest.approx(99)
        assert "networks" not in found


def test_networks_and_images_both_add_to_the_variance():
    given = values(5, 60, 0.3)
    found = statistics.estimate(given)
    networks, images = given.mean(1), given.mean(0)
    parts = networks.var(ddof=1) / 5, images.var(ddof=1) / 60
    error = math.sqrt(sum(parts))
    df = sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 59)
    assert found["mean"] == pytest.approx(given.mean())
    assert found["error"] == pytest.approx(error)
    assert found["df"] == pytest.approx(df)
    assert found["interval"] == pytest.approx(stats.t.interval(0.95, df, given.mean(), error), rel=1e-5)
    assert found["p"] == pytest.approx(2 * stats.t.sf(given.mean() / error, df), rel=1e-4)
    assert found["each"] == pytest.approx(list(networks))
    assert (found["networks"], found["n"], found["std"]) == (5, 60, pytest.approx(images.std(ddof=1)))


def test_an_interval_covers_the_mean_of_other_networks_too():
    """The rate over repetitions is at least the nominal one; over images alone it is far below."""
    draws = [values(5, 40, seed=seed) for seed in range(200)]
    both = [statistics.estimate(each)["interval"] for each in draws]
    alone = [statistics.estimate(each.mean(0))["interval"] for each in draws]
    covered, naive = (np.mean([low < 0 < high for low, high in each]) for each in (both, alone))
    assert covered >= 0.94
    assert naive < covered - 0.02


def test_differences_are_paired():
    given = values(3, 50)
    found = statistics.difference(given + 0.01, given)
    assert found["mean"] == pytest.approx(0.01)
    assert found["error"] == pytest.approx(0, abs=1e-12)
    assert found["interval"] == pytest.approx([0.01, 0.01])


def test_undefined_values_are_left_out_and_counted():
    given = values(2, 30)
    given[0, 3] = given[1, 4] = np.nan
    given[:, 7] = np.nan
    found = statistics.spread(given)
    assert (found["n"], found["undefined"]) == (29, 4)
    assert found["each"] == pytest.approx(list(np.nanmean(given, 1)))
    assert found["quartiles"] == pytest.approx(list(np.nanpercentile(given, (25, 50, 75))))
    assert found["whiskers"] == pytest.approx(list(np.nanpercentile(given, (5, 95))))
    assert statistics.spread([float("nan")]) == {"n": 0, "undefined": 1}
    assert "undefined" not in statistics.spread(values(2, 30))
    json.dumps(found, allow_nan=False)


def test_few_images_have_no_interval():
    assert "interval" not in statistics.spread([1.0, 2.0, 3.0])
    assert "interval" not in statistics.estimate(values(5, 19))
    assert "interval" in statistics.estimate(values(5, 20))


def test_a_mean_without_spread():
    assert statistics.estimate(np.zeros((3, 30)))["p"] == 1.0
    assert statistics.estimate(np.ones((3, 30)))["p"] == 0.0


def test_p_against_another_mean():
    given = values(1, 80, 0.2)[0]
    expected = stats.ttest_1samp(given, 0.15).pvalue
    assert statistics.p_value(statistics.estimate(given), 0.15) == pytest.approx(expected, rel=1e-4)


def test_one_value_per_network():
    given = [0.71, 0.74, 0.735]
    found = statistics.over_networks(given)
    expected = stats.ttest_1samp(given, 0).confidence_interval()
    assert found["interval"] == pytest.approx(list(expected), rel=1e-5)
    assert found["error"] == pytest.approx(stats.sem(given))
    assert "interval" not in statistics.over_networks([0.7])
    assert statistics.over_networks([0.7])["networks"] == 1


def test_a_gap_of_independent_values_is_welchs():
    a, b = [0.71, 0.74, 0.735], [0.70, 0.69, 0.72, 0.66]
    found = statistics.gap(statistics.over_networks(a), statistics.over_networks(b))
    expected = stats.ttest_ind(a, b, equal_var=False)
    assert found["df"] == pytest.approx(expected.df)
    assert statistics.p_value(found) == pytest.approx(expected.pvalue, rel=1e-5)


def test_a_single_value_varies_like_the_others():
    """Student's test of one value against several."""
    a, b = [0.71, 0.74, 0.735], [0.60]
    expected = stats.ttest_ind(a, b)
    for one, other, sign in ((a, b, 1), (b, a, -1)):
        found = statistics.gap(statistics.over_networks(one), statistics.over_networks(other))
        assert found["mean"] * sign == pytest.approx(np.mean(a) - 0.6)
        assert statistics.p_value(found) == pytest.approx(expected.pvalue, rel=1e-5)
    lone = statistics.gap(statistics.over_networks([0.7]), statistics.over_networks([0.6]))
    assert effect(lone).p is None


# Effects and verdicts


def test_evidence_has_a_sign_and_needs_two_networks():
    found = statistics.estimate(values(3, 40, 0.4))
    assert effect(found) == Effect(found["mean"], found["p"])
    assert effect(found, sign=-1).mean == -found["mean"]
    assert effect(found, against=0.5).mean == pytest.approx(found["mean"] - 0.5)
    assert effect(found, against=0.5).p == pytest.approx(statistics.p_value(found, 0.5))
    assert effect(statistics.estimate(values(1, 40, 0.4))).p is None
    assert effect(statistics.estimate(values(3, 10, 0.4))).p is None  # too few images
    assert effect(statistics.spread([float("nan")])) == Effect(0.0, None)


def test_a_claim_holds_with_the_largest_p_of_its_effects():
    found = decided("all.", [Effect(0.2, 0.001), Effect(0.1, 0.04)], "")
    assert (found.holds, found.p) == (True, 0.04)
    found = decided("all.", [Effect(0.2, 0.001), Effect(0.1, 0.06)], "")
    assert (found.holds, found.p) == (None, 0.06)


def test_a_claim_fails_with_the_smallest_p_of_the_negative_ones_times_the_number():
    found = decided("all.", [Effect(0.2, 0.001), Effect(-0.1, 0.01), Effect(-0.1, 0.9)], "")
    assert (found.holds, found.p) == (False, pytest.approx(0.03))
    found = decided("all.", [Effect(0.2, 0.001), Effect(-0.1, 0.02), Effect(-0.1, 0.9)], "")
    assert (found.holds, found.p) == (None, pytest.approx(0.06))
    assert decided("all.", [Effect(-0.1, 0.9)] * 2, "").p == 1.0


def test_a_claim_is_inconclusive_without_evidence():
    assert decided("all.", [Effect(0.2, 0.001), Effect(0.2, None)], "").holds is None
    assert decided("all.", [Effect(0.2, 0.001), Effect(0.2, None)], "").p is None
    assert decided("all.", [], "").holds is None


def test_holms_correction_over_a_report():
    found = [
        Finding("a", True, "", 0.012),
        Finding("b", False, "", 0.001),
        Finding("c", True, "", None),  # true without a test: not among those that are corrected
        Finding("d", True, "", 0.03),
        Finding("e", None, "", 0.5),
    ]
    after = corrected(found)
    assert [each.p for each in after] == pytest.approx([0.036, 0.004, None, 0.06, 0.5])
    assert [each.holds for each in after] == [True, False, True, None, None]
    assert [each.claim for each in after] == list("abcde")
    assert corrected([found[2]]) == [found[2]]
    assert corrected([]) == []


def test_a_finding_needs_its_interval():
    base = values(5, 100)
    rng = np.random.default_rng(0)
    measured = {
        "rectgrad": base,
        "saliency": base + 0.5 + rng.normal(0, 0.05, base.shape),
        "deconv": base + rng.normal(0, 0.5, base.shape) + rng.normal(0, 0.05, (5, 1)),
        "deeplift": base - 0.3,
    }
    found = statistics.by_method(
        {name: {"share": each} for name, each in measured.items()}, ("rectgrad", "deeplift")
    )

    def lowest(base: str, *exclude: str) -> bool | None:
        return decided("lowest.", findings.others(found, "share", base, exclude), "").holds

    assert lowest("rectgrad", "deeplift", "deconv") is True
    assert lowest("rectgrad", "deeplift") is None
    assert lowest("rectgrad") is False
    assert lowest("deeplift") is True
    assert (
        decided("highest.", findings.others(found, "share", "rectgrad", ("deconv", "deeplift"), -1), "").holds
        is False
    )
    assert findings.order(found, "share", 1).startswith("DeepLIFT")
    single = statistics.by_method({name: {"share": each[:1]} for name, each in measured.items()})
    assert decided("lowest.", findings.others(single, "share"), "").holds is None


@pytest.mark.parametrize(
    ("shift", "noise", "holds"),
    [(0.1, 0.01, False), (0.0, 0.01, True), (0.0, 0.5, None), (0.015, 0.3, None), (0.03, 0.5, None)],
)
def test_equal_frequencies_need_a_test_of_their_own(shift, noise, holds):
    """That no difference was found does not show that there is none."""
    rng = np.random.default_rng(3)
    given = rng.normal(0, noise, (5, 100))
    given += shift - given.mean()
    found = feature_frequency._finding("equal.", statistics.estimate(given), "")
    assert found.holds is holds
    assert feature_frequency._finding("equal.", statistics.estimate(given[:1]), "").holds is None
    if holds:
        about = statistics.estimate(given)
        one_sided = [
            stats.t.sf((feature_frequency.EQUAL - sign * about["mean"]) / about["error"], about["df"])
            for sign in (1, -1)
        ]
        assert found.p == pytest.approx(max(one_sided), rel=1e-4)


def test_numbers_as_text():
    assert findings.number(0.12345) == "0.123"
    assert findings.number(0.000123) == "0.0001"
    assert findings.mean({"n": 0}) == "undefined"
    assert findings.mean({"n": 3, "mean": 0.5, "std": 0.25}) == "0.5 ± 0.25"
    assert findings.mean({"n": 50, "mean": 0.5, "std": 0.2, "interval": [0.4, 0.6]}) == "0.5 [0.4, 0.6]"
