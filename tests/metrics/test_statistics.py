"""Intervals, tests and ranks, compared with scipy and with values known by hand."""

import numpy as np
import pytest
from scipy import stats

from rectgrad.metrics import statistics
from reference import metrics as slow

RANDOM = np.random.default_rng(0)


def test_bootstrap_intervals_agree_with_scipy():
    values = RANDOM.exponential(size=(60, 3))
    found = statistics.bootstrap(values, draws=20_000)
    np.testing.assert_allclose(found.mean, values.mean(0))
    level = 1 - 2 * stats.norm.cdf(-stats.t.ppf(0.975, 59) * (60 / 59) ** 0.5)
    for k in range(3):
        options = {"method": "percentile", "n_resamples": 20_000, "confidence_level": level}
        expected = stats.bootstrap(
            (values[:, k],), np.mean, rng=np.random.default_rng(1), **options
        ).confidence_interval
        assert found.low[k] == pytest.approx(expected.low, abs=0.015)
        assert found.high[k] == pytest.approx(expected.high, abs=0.015)
    assert found.n.tolist() == [60] * 3


@pytest.mark.parametrize(("photos", "of"), [(6, 6), (6, 50), (12, 12), (80, 80)])
def test_intervals_cover_the_truth_as_often_as_they_say(photos, of):
    """Of few photos too, which may be some of more. Plain percentiles of 6 photos cover it in 85 %."""
    values = np.full((of, 2000), np.nan)
    values[:photos] = np.random.default_rng(photos).normal(size=(photos, 2000))
    found = statistics.bootstrap(values, draws=2000)
    assert 0.91 < ((found.low <= 0) & (found.high >= 0)).mean() < 0.985


@pytest.mark.parametrize("photos", [6, 17, 200])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_tails_of_an_interval_follow_students_distribution(photos, level):
    t = stats.t.ppf((1 + level) / 2, photos - 1)
    expected = stats.norm.cdf(-t * (photos / (photos - 1)) ** 0.5)
    assert statistics._tail(photos, level) == pytest.approx(expected, rel=0.02)


def test_one_photo_has_no_interval():
    found = statistics.bootstrap([[1.0, 2.0]])
    assert found.mean.tolist() == [1, 2]
    assert np.isnan([found.low, found.high]).all()


def test_undefined_values_are_left_out_of_their_column():
    values = RANDOM.normal(size=(50, 3))
    values[::2, 1] = np.nan
    values[:, 2] = np.nan
    found = statistics.bootstrap(values)
    assert found.n.tolist() == [50, 25, 0]
    assert found.mean[1] == pytest.approx(values[1::2, 1].mean())
    assert np.isnan([found.mean[2], found.low[2], found.high[2]]).all()
    width = found.high[1] - found.low[1]
    assert width == pytest.approx(2 * 1.96 * np.nanstd(values[:, 1]) / 25**0.5, rel=0.1)
    assert statistics.sign_flip_test(values)[2] == 1


def test_the_same_seed_gives_the_same_numbers():
    values = RANDOM.normal(size=(30, 2))
    first, again = statistics.bootstrap(values, seed=3), statistics.bootstrap(values, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_equal_methods_have_no_difference():
    zeros = np.zeros((40, 1))
    found = statistics.bootstrap(zeros)
    assert found.low == found.high == 0
    assert statistics.sign_flip_test(zeros).tolist() == [1]
    assert statistics.photos_needed(zeros).tolist() == [np.inf]


@pytest.mark.parametrize("photos", [12, 17])
def test_undefined_values_do_not_change_p(photos):
    """All signs of the photos that are defined are tried, however many others there are."""
    values = RANDOM.normal(0.5, 1, size=(photos, 3))
    sparse = np.full((200, 3), np.nan)
    for k in range(3):
        sparse[RANDOM.permutation(200)[:photos], k] = values[:, k]
    for seed in range(3):
        found = statistics.sign_flip_test(sparse, seed=seed)
        np.testing.assert_allclose(found, statistics.sign_flip_test(values), rtol=1e-12)


def test_sign_flips_agree_with_the_exact_test():
    """All signs are tried where they are few; random ones come close."""
    differences = RANDOM.normal(0.5, 1, size=(10, 4))
    differences[3:5, 3] = np.nan
    found = statistics.sign_flip_test(differences, draws=128)  # of 512
    drawn = statistics.sign_flip_test(np.concatenate([differences, np.zeros((30, 4))]), draws=50_000)
    for k in range(4):
        own = differences[:, k]
        exact = stats.permutation_test(
            (own[~np.isnan(own)],), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert found[k] == pytest.approx(exact, rel=1e-9)
        assert drawn[k] == pytest.approx(exact, abs=0.01)
        assert drawn[k] != found[k]


def test_float32_values_that_are_equal_are_ties():
    """5/7 - 3/7 and 2/7 - 0 differ by rounding, which must not decide whether a mean is as far from 0."""
    sevenths = np.random.default_rng(0).integers(0, 8, (2, 12, 50))
    a, b = (np.float32(each) / np.float32(7) for each in sevenths)
    exact = statistics.sign_flip_test(sevenths[0] - sevenths[1])
    np.testing.assert_array_equal(statistics.sign_flip_test(a.astype(float) - b.astype(float)), exact)


@pytest.mark.parametrize("photos", [1, 2, 7, 17])
def test_photos_that_all_agree_have_the_smallest_exact_p(photos):
    values = RANDOM.uniform(0.1, 1, size=(photos, 2)) * [1, -1]
    for seed in range(3):
        assert statistics.sign_flip_test(values, seed=seed).tolist() == [2.0 ** (1 - photos)] * 2


def test_holm():
    for size in (1, 2, 9):
        p = RANDOM.uniform(0, 0.2, size=size)
        assert statistics.holm(p).tolist() == pytest.approx(slow.holm(p.tolist()))
    assert statistics.holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([]).tolist() == []


def test_ranks_count_the_methods_that_are_better():
    # a beats c, b beats c: a and b are tied
    better = [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert statistics.ranks(better).tolist() == [1, 1, 3]
    assert statistics.ranks(np.zeros((4, 4))).tolist() == [1] * 4


def test_photos_needed_reach_the_power():
    """With that many photos, about 80 % of experiments find the difference."""
    pilot = RANDOM.normal(0.3, 1, size=(2000, 1))
    needed = int(statistics.photos_needed(pilot)[0])
    z = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert needed == np.ceil((z * pilot.std(ddof=1) / pilot.mean()) ** 2)
    found = [
        stats.ttest_1samp(RANDOM.normal(pilot.mean(), pilot.std(), needed), 0).pvalue < 0.05
        for _ in range(400)
    ]
    assert 0.7 < np.mean(found) < 0.88
    assert np.isnan(statistics.photos_needed([1.0]))
    assert statistics.photos_needed([1.0, 1.0]).tolist() == [6]  # 2^-5 < 0.05 < 2^-4
    assert statistics.photos_needed([1.0, 1.0], alpha=0.01).tolist() == [8]


def test_errors_restate_the_call():
    with pytest.raises(ValueError, match=r"values of shape \(0,\)"):
        statistics.bootstrap([])
