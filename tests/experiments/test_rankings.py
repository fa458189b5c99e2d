"""Rankings of pixels, their variants, and ROAD beside them."""

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from rectgrad.data import scaled, shapes
from rectgrad.experiments import leak, rankings
from rectgrad.experiments.maps import comparison_map
from rectgrad.models import load

IMAGES = shapes.generate(24, 0)
X = scaled(IMAGES.pixels)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return load("cifar10_cnn").module.requires_grad_(False)


def test_places_are_those_of_sorting():
    torch.manual_seed(0)
    values = torch.randn(4, 1024)
    found = rankings.ranks(values)
    for row, ranks in zip(values.tolist(), found.tolist(), strict=True):
        order = sorted(range(1024), key=lambda i: -row[i])
        assert [ranks[i] for i in order] == list(range(1024))


def test_further_keys_break_ties_in_their_order():
    torch.manual_seed(0)
    first, second, third = torch.randint(0, 3, (2, 60)), torch.randint(0, 3, (2, 60)), torch.randn(2, 60)
    found = rankings.ranks(first, second, third)
    for row in range(2):
        keys = list(zip(first[row].tolist(), second[row].tolist(), third[row].tolist(), strict=True))
        order = sorted(range(60), key=lambda i: tuple(-key for key in keys[i]))
        assert [int(found[row, i]) for i in order] == list(range(60))


def test_blur_is_scipys():
    maps = torch.randn(3, 32, 32)
    for given, found in zip(maps.numpy(), rankings.blur(maps).numpy(), strict=True):
        assert np.abs(found - ndimage.gaussian_filter(given, 1.0, mode="nearest", truncate=4)).max() < 1e-5


def test_nearness_counts_steps_to_the_nearest_marked_pixel():
    torch.manual_seed(0)
    maps = torch.where(torch.rand(3, 32, 32) < 0.01, torch.randn(3, 32, 32), 0)
    maps[2] = -1.0  # nothing is marked
    for given, found in zip(maps.numpy(), rankings.nearness(maps).numpy(), strict=True):
        if (given > 0).any():
            expected = 32 - ndimage.distance_transform_cdt(given <= 0, metric="chessboard")
            assert (found == expected.clip(0)).all()
        else:
            assert not found.any()


def test_a_ranking_is_of_the_map_and_the_same_every_time(module):
    (first,), (again,) = (rankings.rankings(module, IMAGES, "saliency", seed=1) for _ in range(2))
    assert torch.equal(first, again)
    assert (first.long().sort(1).values == torch.arange(1024)).all()
    maps = comparison_map(module, X, "saliency").flatten(1)
    best = first.long().argmin(1)
    assert (maps[torch.arange(len(X)), best] >= maps.amax(1) - 10 * rankings.NOISE).all()


def test_chunks_do_not_matter(module, monkeypatch):
    variants = ("", "blurred", "any picture", "same class")
    whole = rankings.rankings(module, IMAGES, "rectgrad", variants, seed=1)
    monkeypatch.setattr(rankings, "CHUNK", 7)
    assert torch.equal(rankings.rankings(module, IMAGES, "rectgrad", variants, seed=1), whole)


def test_each_variant_of_a_ranking(module):
    """What the map orders stays first; the rest is ordered by what the variant says."""
    names = ("blurred", "ties by gradient", "", "ties by distance", "any picture", "same class")
    found = dict(zip(names, rankings.rankings(module, IMAGES, "rectgrad", names, seed=3).long(), strict=True))
    maps = comparison_map(module, X, "rectgrad")
    gradient = comparison_map(module, X, "gradient_x_input").abs().flatten(1)
    near = rankings.nearness(maps).flatten(1)
    flat = maps.flatten(1)
    for row in range(len(X)):
        marked = flat[row] > 0
        count = int(marked.sum())
        for name, key in (("ties by gradient", gradient), ("ties by distance", near)):
            order = found[name][row].argsort()
            assert marked[order[:count]].all()
            assert (flat[row][order].diff() <= 0).all()
            assert (key[row][order[count:]].diff() <= 0).all()
        smooth = rankings.blur(maps[row : row + 1]).flatten()
        order = found["blurred"][row].argsort()
        assert (smooth[order].diff() < 20 * rankings.NOISE).all()
    for name, partners in rankings.PARTNERS.items():
        rows = torch.from_numpy(partners(IMAGES.labels, 3))
        assert torch.equal(found[name], found[""][rows])


@pytest.mark.parametrize("seed", range(5))
def test_a_picture_is_never_its_own_partner(seed):
    labels = np.random.default_rng(seed).integers(0, 4, 31)
    labels[:8] = [0, 1, 2, 3] * 2
    for partners in (rankings.any_picture(labels, seed), rankings.same_class(labels, seed)):
        assert sorted(partners) == list(range(31))  # each region is used once
        assert (partners != np.arange(31)).all()
    assert (labels[rankings.same_class(labels, seed)] == labels).all()
    assert (labels[rankings.any_picture(labels, seed)] != labels).any()


def test_a_class_of_one_picture_has_no_partner():
    with pytest.raises(ValueError, match="no other picture of class 2"):
        rankings.same_class(np.array([0, 0, 2, 1, 1]), 0)


# ROAD and the leak


def residuals(values: np.ndarray, given: np.ndarray) -> np.ndarray:
    design = np.stack([np.ones_like(given), given], axis=1)
    return values - design @ np.linalg.lstsq(design, values, rcond=None)[0]


def test_a_partial_correlation_is_that_of_the_residuals():
    rng = np.random.default_rng(0)
    z = rng.normal(size=40)
    x, y = 0.7 * z + rng.normal(size=40), -0.4 * z + 0.3 * rng.normal(size=40)
    xy, xz, yz = (np.corrcoef(a, b)[0, 1] for a, b in ((x, y), (x, z), (y, z)))
    expected = np.corrcoef(residuals(x, z), residuals(y, z))[0, 1]
    assert leak.partial_correlation(xy, xz, yz) == pytest.approx(expected)
    assert np.isnan(leak.partial_correlation(1.0, 1.0, 1.0))


def test_correlations_over_methods_are_spearmans():
    rng = np.random.default_rng(1)
    columns = {name: rng.normal(size=10).tolist() for name in ("roar", "kar", "road", "leak")}
    found = leak.correlations(columns)
    for pair in ("roar, road", "kar, road", "roar, leak", "kar, leak", "road, leak"):
        a, b = pair.split(", ")
        expected = stats.spearmanr(columns[a], columns[b])
        assert found[pair]["r"] == pytest.approx(expected.statistic)
        assert found[pair]["p"] == pytest.approx(expected.pvalue, rel=1e-4)
    ranks = {name: stats.rankdata(values) for name, values in columns.items()}
    for mode in ("roar", "kar"):
        both = (residuals(ranks[name], ranks["leak"]) for name in (mode, "road"))
        r = np.corrcoef(*both)[0, 1]
        about = found[f"{mode}, road given leak"]
        assert about["r"] == pytest.approx(r)
        assert about["df"] == 7
        assert about["p"] == pytest.approx(2 * stats.t.sf(abs(r) * (7 / (1 - r**2)) ** 0.5, 7), rel=1e-4)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_equal_orders_of_few_methods_are_no_proof(n):
    """p is the share of all orders that are as extreme, for perfect correlations of either sign."""
    rising = [float(i) for i in range(n)]
    found = leak.correlations({"roar": rising, "kar": rising[::-1], "road": rising, "leak": [0.0] * n})
    orders = [stats.spearmanr(rising, order).statistic for order in permutations(rising)]
    expected = np.mean([abs(r) > 1 - 1e-9 for r in orders])
    for pair, r in (("roar, road", 1.0), ("kar, road", -1.0)):
        assert found[pair]["r"] == pytest.approx(r)
        assert found[pair]["p"] == pytest.approx(expected)


def test_too_few_methods_have_no_p():
    found = leak.correlations({name: [0.1, 0.2] for name in ("roar", "kar", "road", "leak")})
    assert found["roar, road"]["p"] is None
    assert found["roar, road given leak"] == {"r": None, "p": None, "df": -1}
    one = leak.correlations({name: [0.1] for name in ("roar", "kar", "road", "leak")})
    assert one["roar, road"]["r"] is None


def test_road_removes_the_most_important_pixels_first(module):
    """A map that is large where the network looks does better than its negative."""
    found = leak._road(module, IMAGES, "gradient_x_input")
    assert found["difference"] == pytest.approx(found["least"] - found["most"])
    assert found["most"] < found["least"]
    assert 0 < leak._road(module, IMAGES, "rectgrad")["ordered"] < found["ordered"] <= 1
