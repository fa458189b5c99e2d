"""Each experiment measures what it says: its numbers against slow or independent ones."""

import types

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from torch import nn

import rectgrad
from rectgrad.data import scaled, shapes
from rectgrad.experiments import (
    accumulation,
    adversarial,
    feature_maps,
    feature_occlusion,
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


@pytest.mark.parametrize("together", [2, 5, 20])
def test_steps_may_run_together(together, module):
    args = (module, X, MASKS, "conv3", "background", 6, 1)
    one_by_one = feature_occlusion.occluded_logits(*args)
    assert torch.allclose(feature_occlusion.occluded_logits(*args, together), one_by_one, atol=1e-4)
    assert one_by_one.std(0).mean() > 0.01


def test_the_null_of_occlusion_has_masks_of_other_classes(module):
    """Written out: all units of a region zeroed by multiplying the activation with the mask."""
    labels = np.array([0, 0, 1, 1, 2, 2])
    lab = types.SimpleNamespace(device="cpu", masked=lambda: (X, MASKS, types.SimpleNamespace(labels=labels)))
    found = feature_occlusion._others(lab, module, "conv4")

    def margin(i: int, keep: torch.Tensor) -> float:
        hook = module.relu4.register_forward_hook(lambda _, __, y: y * keep)
        try:
            logits = module(X[i : i + 1])[0].tolist()
        finally:
            hook.remove()
        return logits.pop(labels[i]) - max(logits)

    for i in range(6):
        drops = []
        for j in np.flatnonzero(labels != labels[i]):
            where = units.resized(MASKS[j : j + 1], 16)[0].float()
            drops.append(
                margin(i, where) - margin(i, 1 - where)
            )  # without the background, without the object
        assert found[i] == pytest.approx(np.mean(drops), abs=1e-3)


def test_an_effect_of_size_and_place_does_not_decide_that_objects_matter():
    """The units of the object matter more, but not more than those under the masks of other classes."""
    rng = np.random.default_rng(0)
    more, null = (2 + rng.normal(0, 0.1, (5, 40)) for _ in range(2))
    about = {"margin": [3.0, 2.0, 1.0], "drop": statistics.spread(more)}
    found = {
        "object": about,
        "background": about,
        "more": statistics.estimate(more),
        "null": statistics.estimate(null),
        "beyond": statistics.difference(more, null),
    }
    assert feature_occlusion.findings({"conv1": found})[0].holds is None
    found["beyond"] = statistics.difference(more, null - 1)
    assert feature_occlusion.findings({"conv1": found})[0].holds is True


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
    ours = adversarial.edges(X).sum(1).numpy()
    for picture, found in zip(grey, ours, strict=True):
        both = [ndimage.sobel(picture, axis, mode="nearest") / 8 for axis in (0, 1)]
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


def test_gradients_of_saliency_are_autograds(module):
    x = X.clone().requires_grad_()
    places = {"input": x}
    y = x
    for name, layer in module.named_children():
        y = layer(y.flatten(1) if name == "dense1" else y)
        if name in ("relu1", "relu2", "relu3", "relu4"):
            places = {name: y, **places}
    expected = torch.autograd.grad(y.amax(1).sum(), list(places.values()))
    found = accumulation.gradients(module, X, "saliency")
    assert list(found) == list(places) == list(accumulation.layers(module, X, "saliency"))
    for (name, plane), R in zip(found.items(), expected, strict=True):
        assert torch.allclose(plane, R.abs().sum(1), rtol=1e-4, atol=1e-6), name
    assert not any(layer._forward_hooks for layer in module.children())


def test_gradients_of_rectgrad_follow_its_rule(module):
    """At the input, RectGrad's map without its multiplication by the input."""
    raw = {"multiply_by_input": False, "positive_only": False}
    expected = rectgrad.attribute(module, X, "rectgrad", **raw).abs().sum(1)
    assert torch.allclose(accumulation.gradients(module, X, "rectgrad")["input"], expected, atol=1e-6)


def test_masks_of_the_nearest_area():
    where = torch.zeros(8, 4, 4, dtype=torch.bool)
    for i, area in enumerate((1, 9, 3, 2, 16, 4, 12, 8)):
        where[i].view(-1)[:area] = True
    found = accumulation.alike(where)
    assert found.shape == (5, 8)
    assert found[:, 0].tolist() == [3, 2, 5, 7, 1]  # areas 2, 3, 4, 8, 9 for an area of 1
    assert found[:2, 4].tolist() == [6, 1]
    assert not (found == torch.arange(8)).any()  # never the image itself
    assert accumulation.alike(where[:3]).shape == (2, 3)


def test_the_null_is_the_share_outside_masks_of_the_same_area():
    torch.manual_seed(0)
    plane = torch.randn(7, 16, 16)
    plane[3] = 0
    objects = torch.rand(7, 32, 32) < torch.linspace(0.1, 0.7, 7)[:, None, None]
    found = accumulation.shares(plane, objects)
    where = units.resized(objects, 16)
    areas = where.flatten(1).sum(1).tolist()
    for i in range(7):
        others = sorted((j for j in range(7) if j != i), key=lambda j: (abs(areas[i] - areas[j]), j))[:5]
        null = [float(plane[i][~where[j]].abs().sum() / plane[i].abs().sum()) for j in others]
        assert found["null"][i] == pytest.approx(np.mean(null), nan_ok=True)
        share = float(plane[i][~where[i]].abs().sum() / plane[i].abs().sum())
        assert found["share"][i] == pytest.approx(share, nan_ok=True)
        assert found["area"][i] == pytest.approx(float((~where[i]).float().mean()))
    assert np.isnan(found["share"][3])  # a zero map has no share


def test_a_mosaic_shows_every_channel():
    activation = torch.rand(8, 16, 16)
    activation[5] = 0
    page = np.asarray(feature_maps.mosaic(activation))
    step = feature_maps.TILE + feature_maps.GAP
    tile = page[2 * step : 2 * step + 32, step : step + 32]  # channel 5 of two columns
    assert (tile == 255).all()
    first = 255 * (1 - activation[0] / activation[0].max()).numpy()
    assert np.abs(page[:32:2, :32:2, 0] - first).max() < 1


# Pictures and findings


def test_pairs_are_the_first_two_of_a_class():
    assert pairs([3, 1, 3, 2, 1, 3]) == [(1, 4), (0, 2)]
    assert pairs([1, 2, 3]) == []


def test_growth_is_decided_beyond_the_nulls():
    def found(growth: float, networks: int = 5) -> dict:
        values = np.random.default_rng(0).normal(growth, 0.01, (networks, 100))
        share = {"mean": 0.4, "std": 0.1, "n": 100, "null": {"mean": 0.4, "std": 0.1, "n": 100}, "area": 0.7}
        about = {
            "layers": {"a": share, "b": share},
            "growth": {**statistics.estimate(values), "from": "a", "to": "b"},
        }
        return {"product": about, "gradient": about}

    def verdicts(saliency: dict, ours: dict) -> list:
        return [f.holds for f in accumulation.findings({"saliency": saliency, "rectgrad": ours})]

    assert verdicts(found(0.03), found(-0.03)) == [True] * 4
    assert verdicts(found(-0.03), found(0.03)) == [False] * 4
    assert verdicts(found(0.0), found(0.0)) == [None] * 4
    assert verdicts(found(0.03, networks=1), found(-0.03, networks=1)) == [None] * 4


def test_a_map_of_zeros_has_no_share():
    maps = torch.zeros(2, 4, 4)
    maps[1, 0, 0] = 1
    first, second = nan_where_zero(torch.tensor([0.0, 0.5]), maps)
    assert np.isnan(first)
    assert second == 0.5


def test_a_picture_counts_once_however_many_networks_there_are():
    nan = float("nan")
    values = {
        f"{kind} {key}": np.array([[[0.2, 0.4, nan]], [[0.6, nan, nan]]])  # networks, layers, pictures
        for kind in sanity.KINDS
        for key in sanity.MEASURES
    }
    floors = {f"floor {key}": np.full((2, 3), 0.1) for key in sanity.MEASURES}
    (found,) = sanity._summary(values | floors)["cascading"]["rank"]
    assert found["n"] == 2
    assert found["undefined"] == 3
    assert found["each"] == pytest.approx([0.3, 0.6])  # of each network
    assert found["mean"] == pytest.approx(0.45)
    assert found["std"] == pytest.approx(0.0)  # between the pictures: 0.4 and 0.4


def test_all_pictures_whose_class_changed_and_only_steady_controls(module):
    """Noise so strong that the control changes the class of some pictures too."""
    pictures = shapes.generate(40, 5)
    x = scaled(pictures.pixels)
    noisy = adversarial._noisy(x, 0.4)
    before, after, control = (
        module(each).argmax(1) for each in (x, adversarial.attacked(module, x, 0.4), noisy)
    )
    chosen = adversarial._chosen(module, x, noisy, 0.4)
    assert chosen["changed"] == (before != after).nonzero().flatten().tolist()
    assert chosen["kept"] == pytest.approx(float((before == control).float().mean()))
    found = adversarial._measure(x, noisy, 0.4, module, "saliency")
    changed, steady = before != after, before == control
    assert 0 < int((changed & steady).sum()) < int(changed.sum())
    for key in ("rank_control", "rank_absolute_control", "ssim_control", "loss"):
        assert (~np.isnan(found[key])).tolist() == (changed & steady).tolist()
    for key in ("rank", "rank_absolute", "ssim", "edges"):
        assert (~np.isnan(found[key])).tolist() == changed.tolist()
    one, other = (rectgrad.attribute(module, each, "saliency").sum(1) for each in (x, noisy))
    row = int((changed & steady).nonzero()[0])
    expected = stats.spearmanr(one[row].flatten().numpy(), other[row].flatten().numpy())[0]
    assert found["rank_control"][row] == pytest.approx(expected, abs=1e-4)


def test_an_attack_that_changes_nothing_has_no_values(module):
    noisy = adversarial._noisy(X, 0.0)
    found = adversarial._measure(X, noisy, 0.0, module, "saliency")
    assert all(np.isnan(values).all() and len(values) == len(X) for values in found.values())
