"""Each experiment measures what it says: its numbers against slow or independent ones."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from torch import nn

import rectgrad
from rectgrad import data
from rectgrad.data import Dataset, scaled, shapes
from rectgrad.experiments import (
    accumulation,
    adversarial,
    feature_maps,
    feature_occlusion,
    findings,
    lab,
    sanity,
    statistics,
    threshold,
    units,
)
from rectgrad.experiments.gallery import pairs
from rectgrad.experiments.maps import nan_where_zero
from rectgrad.kernels.reference import percentile
from rectgrad.models import CifarCNN, load

FEW = shapes.generate(6, 3)
X = scaled(FEW.pixels)
MASKS = torch.from_numpy(FEW.masks)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return load("cifar10_cnn").module.requires_grad_(False)


# Switching units off


def test_margins_by_hand():
    logits = torch.tensor([[[3.0, 1.0, 5.0], [0.0, 2.0, -1.0]]])
    assert feature_occlusion.margins(logits, torch.tensor([0, 1])).tolist() == [[-2.0, 2.0]]


@pytest.mark.parametrize("place", ["object", "background"])
@pytest.mark.parametrize("name", ["conv1", "conv4"])
def test_units_go_off_in_order_and_only_where_they_should(name, place, module):
    """Every step switches off its share of the region's units, more and more of them, nothing else."""
    seen = []
    relu = getattr(module, units.LAYERS[name])
    following = {"conv1": module.conv2, "conv4": module.pool2}[name]
    watch = following.register_forward_hook(lambda m, given, y: seen.append(given[0].clone()))
    try:
        logits = feature_occlusion.occluded_logits(module, X, MASKS, name, place, 4, trial=1)
    finally:
        watch.remove()
    assert not relu._forward_hooks
    before = seen[0]
    where = units.resized(MASKS, before.shape[-1])
    where = (where if place == "object" else ~where).unsqueeze(1).expand_as(before)
    assert torch.equal(logits[0], module(X))
    last = torch.zeros_like(before, dtype=torch.bool)
    for k, after in enumerate(seen):
        off = (after == 0) & (before != 0)
        assert not (off & ~where).any()
        assert (off | ~last).all()  # what was off stays off
        assert torch.equal(after[~off], before[~off])
        last = off
        for i in range(len(X)):
            active, region = int(off[i].sum()), int((before[i] != 0)[where[i]].sum())
            assert abs(active - region * k / 4) <= 0.08 * region + 2  # of 4 parts
    assert torch.equal(seen[-1] == 0, where | (before == 0))


def test_trials_have_orders_of_their_own(module):
    a, b = (feature_occlusion.occluded_logits(module, X, MASKS, "conv2", "object", 2, t) for t in (0, 1))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[2], b[2])  # all off
    assert not torch.equal(a[1], b[1])


def test_masks_of_lower_resolution():
    masks = torch.zeros(1, 4, 4, dtype=torch.bool)
    masks[0, :2, :2] = True
    masks[0, 2, 2] = True
    masks[0, 0, 2:] = True
    assert units.resized(masks, 2).tolist() == [[[True, True], [False, False]]]


# The threshold


def test_tau_and_zeros_that_are_noted(module):
    seen: list = []
    maps = rectgrad.attribute(module, X, threshold.Watching(q=90, seen=seen))
    assert torch.equal(maps, rectgrad.attribute(module, X, "rectgrad", q=90))
    assert [d for _, _, d in seen] == [256, 64 * 256, 64 * 256, 32 * 1024, 32 * 1024]
    a = module.relu5(module.dense1(module.pool2(units_of(module, X)).flatten(1)))
    scores = a * module.dense2.weight[module(X).argmax(1)]
    tau, zeros, _ = seen[0]
    assert torch.allclose(tau, percentile(scores, 90) / scores.amax(1))
    assert torch.allclose(zeros, (scores == 0).float().mean(1))


def units_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return units.activations(module, x)["conv4"]


def test_overlap_of_maps():
    a = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    b = torch.tensor([[[0.0, 3.0], [0.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]], [[1.0, 0.0], [0.0, 0.0]]])
    assert threshold.overlap(a, b).tolist() == pytest.approx([0.5, 0.25, 0.0])
    assert threshold.overlap(b, b).tolist() == pytest.approx([1.0, 1.0, 1.0])


# The attack


def test_fgsm_moves_every_pixel_against_the_class(module):
    moved = adversarial.attacked(module, X, 0.01)
    x = X.clone().requires_grad_()
    scores = module(x)
    torch.nn.functional.cross_entropy(scores, scores.argmax(1), reduction="sum").backward()
    assert torch.equal(moved, (X + 0.01 * x.grad.sign()).clamp(-1, 1))
    before, after = (module(each).softmax(1).gather(1, scores.argmax(1)[:, None]) for each in (X, moved))
    assert (after < before).all()
    assert not any(p.requires_grad or p.grad is not None for p in module.parameters())


def test_an_attack_stays_in_the_range_of_inputs():
    scale = adversarial.Scale((0.5, 0.2, 0.1), (0.25, 0.5, 2.0))
    x = torch.stack([scale.input(v, X).expand(3, 8, 8) for v in (0.0, 1.0)])
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    moved = adversarial.attacked(network, x, 10.0, scale)
    low, high = scale.input(0, x), scale.input(1, x)
    assert (moved >= low).all()
    assert (moved <= high).all()
    assert scale.picture(x[1]).getextrema() == ((255, 255),) * 3
    assert isinstance(scale.picture(x[0]), Image.Image)


def test_edges_are_sobels():
    grey = X.mean(1).numpy()
    ours = adversarial.edges(X).numpy()
    for picture, found in zip(grey, ours, strict=True):
        both = [ndimage.sobel(picture, axis, mode="nearest") for axis in (0, 1)]
        assert np.abs(found - np.hypot(*both)).max() < 1e-5
    maps = torch.randn(len(X), 32, 32)
    correlation = adversarial.edge_correlation(maps, X)
    expected = stats.pearsonr(maps[2].abs().flatten().numpy(), ours[2].flatten())[0]
    assert float(correlation[2]) == pytest.approx(expected, abs=1e-5)
    assert adversarial.edge_correlation(torch.zeros(1, 32, 32), X[:1]).isnan().all()


# Random weights


def test_only_the_named_layers_lose_their_weights(module):
    changed = sanity.reinitialised(module, ("dense2", "conv4"), 0)
    for name, layer in module.named_children():
        if list(layer.parameters()):
            same = torch.equal(layer.weight, getattr(changed, name).weight)
            assert same == (name not in ("dense2", "conv4"))
    named = [name for name, layer in CifarCNN().named_children() if hasattr(layer, "weight")]
    assert tuple(reversed(named)) == sanity.LAYERS


def test_a_random_network_has_another_saliency_map(module):
    changed = sanity.reinitialised(module, sanity.LAYERS, 0)
    a, b = (rectgrad.attribute(m, X, "saliency", target=0).sum(1) for m in (module, changed))
    assert abs(float(rectgrad.metrics.rank_correlation(a, b).mean())) < 0.15


# Accumulation and feature maps


def test_layers_end_at_the_input(module):
    planes = accumulation.layers(module, X, "saliency")
    assert list(planes) == ["relu4", "relu3", "relu2", "relu1", "input"]
    product = rectgrad.attribute(module, X, "gradient_x_input").sum(1)
    assert torch.allclose(planes["input"], product, atol=1e-6)
    signed = rectgrad.attribute(module, X, "rectgrad", positive_only=False).sum(1)
    assert torch.equal(accumulation.layers(module, X, "rectgrad")["input"], signed)


def test_a_mosaic_shows_every_channel():
    activation = torch.rand(8, 16, 16)
    activation[5] = 0
    page = np.asarray(feature_maps.mosaic(activation))
    step = feature_maps.TILE + feature_maps.GAP
    tile = page[2 * step : 2 * step + 32, step : step + 32]  # channel 5 of two columns
    assert (tile == 255).all()
    first = 255 * (1 - activation[0] / activation[0].max()).numpy()
    assert np.abs(page[:32:2, :32:2, 0] - first).max() < 1


# Words and numbers


def test_spreads_against_scipy():
    rng = np.random.default_rng(0)
    values = rng.normal(2, 3, 400)
    found = statistics.spread([*values, float("nan")])
    low, high = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert found["interval"] == pytest.approx([low, high], rel=1e-3)
    assert (found["n"], found["undefined"]) == (400, 1)
    assert found["quartiles"] == pytest.approx(list(np.percentile(values, (25, 50, 75))))
    assert "interval" not in statistics.spread([1.0, 2.0, 3.0])
    assert statistics.spread([float("nan")]) == {"n": 0, "undefined": 1}
    json.dumps(found, allow_nan=False)


def test_a_finding_needs_its_interval():
    rng = np.random.default_rng(0)
    base = rng.normal(1, 0.2, 100)
    values = {
        "rectgrad": base,
        "saliency": base + 0.5,
        "deconv": base + rng.normal(0, 0.5, 100),
        "deeplift": base - 0.3,
    }
    found = statistics.by_method({name: {"share": each} for name, each in values.items()})
    assert findings.below(found, "share", "saliency") is True
    assert findings.below(found, "share", "deconv") is None
    assert findings.below(found, "share", "deeplift") is False
    assert findings.below_all(found, "share") is False
    assert findings.below_all(found, "share", ("deeplift",)) is None
    assert findings.below_all(found, "share", ("deeplift", "deconv")) is True
    assert findings.least(found, "share", "saliency") is False
    assert findings.least(found, "share", "deeplift") is True
    assert findings.least({n: found[n] for n in ("rectgrad", "deconv")}, "share", "rectgrad") is None
    assert findings.order(found, "share", 1).startswith("DeepLIFT")


def test_pairs_are_the_first_two_of_a_class():
    assert pairs([3, 1, 3, 2, 1, 3]) == [(1, 4), (0, 2)]
    assert pairs([1, 2, 3]) == []


def test_growth_is_decided_by_its_interval_alone():
    def found(low: float, high: float) -> dict:
        share = {"mean": 0.4, "std": 0.1, "n": 100, "interval": [0.3, 0.5]}
        growth = {
            "mean": (low + high) / 2,
            "std": 0.1,
            "n": 100,
            "interval": [low, high],
            "from": "a",
            "to": "b",
        }
        return {"layers": {"a": share, "b": share}, "growth": growth}

    both = {"saliency": found(0.01, 0.05), "rectgrad": found(-0.05, -0.01)}
    assert [f.holds for f in accumulation.findings(both)] == [True, True]
    swapped = {"saliency": both["rectgrad"], "rectgrad": both["saliency"]}
    assert [f.holds for f in accumulation.findings(swapped)] == [False, False]
    unsure = {"saliency": found(-0.01, 0.02), "rectgrad": found(-0.01, 0.02)}
    assert [f.holds for f in accumulation.findings(unsure)] == [None, None]


def test_a_map_of_zeros_has_no_share():
    maps = torch.zeros(2, 4, 4)
    maps[1, 0, 0] = 1
    first, second = nan_where_zero(torch.tensor([0.0, 0.5]), maps)
    assert np.isnan(first)
    assert second == 0.5


def test_a_picture_counts_once_however_often_weights_are_drawn():
    nan = float("nan")
    first, second = [[0.2, 0.4, nan]], [[0.6, nan, nan]]  # one layer, three pictures
    (found,) = sanity._combine([first, second])
    assert (found["n"], found["undefined"]) == (2, 1)
    assert found["mean"] == pytest.approx(0.4)  # of 0.4 and 0.4
    assert found["draws"] == pytest.approx([0.3, 0.6])


def test_all_pictures_whose_class_changed_and_only_steady_controls(monkeypatch, tmp_path, module):
    """Noise so strong that the control changes the class of some pictures too."""
    pictures = shapes.generate(40, 5)
    dataset = Dataset("cifar10", tuple(shapes.CLASSES), pictures, pictures)
    monkeypatch.setitem(data.DATASETS, "cifar10", lambda: dataset)
    work = lab.Lab(
        "adversarial", "cifar10", "quick", {"images": 40, "changed_at_most": 99, "eps": 0.4}, tmp_path
    )
    x = scaled(pictures.pixels)
    before, after = (module(each).argmax(1) for each in (x, adversarial.attacked(module, x, 0.4)))
    rows = adversarial._chosen(work)["changed"]
    assert rows == (before != after).nonzero().flatten().tolist()
    numbers = torch.tensor(rows)
    found = adversarial._measure(work, x[rows], numbers, "saliency")
    steady = module(adversarial._noisy(work, x[rows], numbers)).argmax(1) == before[rows]
    assert 0 < int(steady.sum()) < len(rows)
    for key in ("rank_control", "rank_absolute_control", "ssim_control"):
        assert (~np.isnan(found[key])).tolist() == steady.tolist()
    assert not np.isnan(found["rank"]).any()
