"""The controls: equal post-processing for every method, masks of other images, other classes, rings."""

import numpy as np
import pytest
import torch
from torch import nn

import rectgrad
from rectgrad.data import scaled, shapes
from rectgrad.experiments import class_sensitivity, feature_frequency, matched, padding_trick, units
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import channel_maps, comparison_map
from rectgrad.experiments.statistics import difference, estimate
from rectgrad.methods import RectGrad, Saliency, SmoothGrad
from rectgrad.methods.catalog import METHODS
from rectgrad.metrics import gini, outside
from rectgrad.models import load
from rectgrad.verdict.matched import Steps, bare

IMAGES = shapes.generate(6, 3)
X, MASKS = scaled(IMAGES.pixels), torch.from_numpy(IMAGES.masks)
FEW = ("saliency", "guided_backprop", "deeplift", "rectgrad")


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return load("cifar10_cnn").module.requires_grad_(False)


# Matched comparisons


def variant(module: nn.Module, method: str, steps: Steps) -> torch.Tensor:
    base = bare(METHODS[method])
    maps = channel_maps(module, X, matched.padded(base) if steps.padding else base)
    return matched.processed(
        maps, X, steps, base, gini(comparison_map(module, X, "rectgrad")).clamp(max=0.98)
    )


def test_all_steps_make_rectgrads_own_map(module):
    assert torch.equal(variant(module, "rectgrad", matched.FULL), comparison_map(module, X, "rectgrad"))
    plain = RectGrad(multiply_by_input=False, positive_only=False, padding_trick=False)
    assert torch.equal(variant(module, "rectgrad", matched.BARE), comparison_map(module, X, plain))


def test_every_method_takes_the_same_steps(module):
    """Written out for gradients: times input, then the positive part of each channel, then the sum."""
    raw = rectgrad.attribute(module, X, "guided_backprop")
    assert torch.allclose(variant(module, "guided_backprop", Steps()), raw.sum(1))
    assert torch.allclose(variant(module, "guided_backprop", Steps(True)), (raw * X).sum(1))
    assert torch.allclose(variant(module, "guided_backprop", Steps(False, True)), raw.clamp(min=0).sum(1))
    both = variant(module, "guided_backprop", Steps(True, True))
    assert torch.allclose(both, (raw * X).clamp(min=0).sum(1))


def test_maps_that_contain_the_input_are_not_multiplied_again(module):
    for method in ("integrated_gradients", "deeplift"):
        usual = comparison_map(module, X, method)
        assert torch.allclose(variant(module, method, Steps(True)), usual, atol=1e-6)


def test_the_padding_trick_of_a_gradient(module):
    """The gradient is zero where a window of a convolution reaches into the padding: one pixel all round."""
    x = X.clone().requires_grad_()
    y = x
    for name, layer in module.named_children():
        y = layer(y.flatten(1) if name == "dense1" else y)
        if isinstance(layer, nn.Conv2d):
            side = y.shape[-1]
            mask = torch.zeros(side, side)
            mask[1:-1, 1:-1] = 1
            y.register_hook(lambda R, mask=mask: R * mask)
    (expected,) = torch.autograd.grad(y.amax(1).sum(), x)
    found = channel_maps(module, X, matched.padded(Saliency()))
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, channel_maps(module, X, Saliency()), atol=1e-2)


def test_who_takes_the_padding_trick():
    assert matched.padded(METHODS["deeplift"]) is METHODS["deeplift"]  # has a rule of its own
    assert matched.padded(METHODS["epsilon_lrp"]) is METHODS["epsilon_lrp"]
    assert matched.padded(SmoothGrad()).over == matched.padded(Saliency()) != Saliency()


def test_maps_are_cut_to_rectgrads_gini_index(module):
    wanted = gini(comparison_map(module, X, "rectgrad")).clamp(max=0.98)
    for method in ("saliency", "guided_backprop", "deeplift"):
        before, after = (variant(module, method, steps) for steps in (matched.FULL, matched.CUT))
        assert (gini(before) < wanted).all()
        assert torch.allclose(gini(after), wanted, atol=0.01)
        assert torch.equal(after[after != 0], before[after != 0])


def test_matched_values_of_every_variant(module, monkeypatch, tmp_path):
    """All methods in variants with the input, only gradients in the others."""
    monkeypatch.setattr(matched, "COMPARED", FEW)
    lab = Lab("noise-level", "shapes", "quick", {}, tmp_path)
    monkeypatch.setattr(Lab, "_images", {"train": "", "test": ""})
    found = matched.measured(lab, [module], X, lambda maps: outside(maps, MASKS, share=True), "outside")
    assert list(found) == [matched.name_of(steps) for steps in matched.VARIANTS]
    assert len(found) == 16
    for steps in matched.VARIANTS:
        about = found[matched.name_of(steps)]
        gradients = {"saliency", "guided_backprop", "rectgrad"}
        assert set(about) == (set(FEW) if steps.times_input else gradients)
        values = {m: outside(variant(module, m, steps), MASKS, share=True).numpy() for m in about}
        for method, value in about.items():
            assert value["mean"] == pytest.approx(values[method].mean(), rel=1e-4)
            above = (values[method] - values["rectgrad"]).mean()
            assert value["above"]["mean"] == pytest.approx(above, abs=1e-5)


def test_matched_findings_compare_within_a_variant():
    """RectGrad is the lowest without post-processing only."""
    rng = np.random.default_rng(0)

    def about(ours: float) -> dict:
        values = {"saliency": 0.5, "deconv": 0.6, "rectgrad": ours}
        given = {name: level + rng.normal(0, 0.01, (5, 40)) for name, level in values.items()}
        return {
            name: {**estimate(each), "above": difference(each, given["rectgrad"])}
            for name, each in given.items()
        }

    levels = {matched.BARE: 0.4, matched.FULL: 0.55, matched.CUT: 0.5}
    found = matched.findings({matched.name_of(steps): about(at) for steps, at in levels.items()}, "share")
    assert [each.holds for each in found] == [True, False, None]
    assert all(each.ours for each in found)


# Other classes


def test_the_other_classes():
    torch.manual_seed(0)
    outputs = torch.randn(200, 5)
    predicted, others = class_sensitivity.targets(outputs)
    order = outputs.argsort(1, descending=True)
    assert torch.equal(predicted, outputs.argmax(1))
    assert torch.equal(others["runner-up"], order[:, 1])
    assert torch.equal(others["least likely"], outputs.argmin(1))
    places = (order == others["random"][:, None]).nonzero()[:, 1]
    assert set(places.tolist()) == {1, 2, 3, 4}  # every class but the predicted one
    assert torch.equal(class_sensitivity.targets(outputs)[1]["random"], others["random"])


def test_class_sensitivity_compares_maps_of_the_same_image(module):
    found = class_sensitivity._measure(module, X, METHODS["saliency"])
    outputs = module(X)
    one, other = (
        rectgrad.attribute(module, X, "saliency", target=t).sum(1)
        for t in (outputs.argmax(1), outputs.argmin(1))
    )
    expected = rectgrad.metrics.rank_correlation(one, other)
    assert found["rank least likely"] == pytest.approx(expected.tolist(), abs=1e-5)
    k = 51  # 5 % of 1024 pixels
    for i in range(len(X)):
        top = [set(m[i].abs().flatten().topk(k).indices.tolist()) for m in (one, other)]
        assert found["shared least likely"][i] == pytest.approx(len(top[0] & top[1]) / k, abs=0.02)
    floor = rectgrad.metrics.unrelated(rectgrad.metrics.rank_correlation, one)
    assert found["rank unrelated images"] == pytest.approx(floor.tolist(), abs=1e-5)


# Rings


def test_rings_are_a_seventh_of_the_shorter_side_wide():
    for height, width in ((14, 14), (28, 21), (32, 32)):
        found, step = padding_trick.ring_of(height, width), min(height, width) / 7
        for y in range(height):
            for x in range(width):
                depth = min(y, x, height - 1 - y, width - 1 - x)
                assert int(found[y, x]) == min(int(depth / step + 1e-9), 3)
    assert (padding_trick.ring_of(224, 224) == 0)[:32].all()
    assert not (padding_trick.ring_of(224, 224) == 0)[32:-32, 32:-32].any()


def test_the_shares_of_the_rings_add_up(module):
    ring = padding_trick.ring_of(32, 32)
    found = padding_trick._shares(module, X, "rectgrad", ring)
    for kind, method in (("with", RectGrad()), ("without", RectGrad(padding_trick=False))):
        assert np.sum(found[kind], axis=0) == pytest.approx(np.ones(len(X)))
        maps = rectgrad.attribute(module, X, method).sum(1).abs()
        outer = [float(m[ring == 0].sum() / m.sum()) for m in maps]
        assert found[kind][0] == pytest.approx(outer, rel=1e-4)


def test_whether_an_object_reaches_the_outer_ring():
    objects = torch.zeros(3, 14, 14, dtype=torch.bool)
    objects[0, 4:10, 4:10] = True  # inside
    objects[1, 2:12, 2:12] = True  # touches the ring, but is not in it
    objects[2, 1:7, 4:10] = True  # a sixth is in the ring
    assert padding_trick.reaching(objects).tolist() == [False, False, True]


# Masks of other images, positions and borders


def test_a_difference_ring_by_ring():
    torch.manual_seed(0)
    active, where = torch.rand(4, 16, 16), torch.rand(4, 16, 16) < 0.4
    where[:, 5:, 10:] = False
    found = feature_frequency.difference(active, where, feature_frequency.distances(16, 2))
    for i in range(4):
        total = weight = 0.0
        for r in range(12):
            on, off = [], []
            for y in range(2, 14):
                for x in range(2, 14):
                    if int(np.hypot(y - 7.5, x - 7.5)) == r:
                        (on if where[i, y, x] else off).append(float(active[i, y, x]))
            if on and off:
                n = min(len(on), len(off))
                total, weight = total + n * (np.mean(on) - np.mean(off)), weight + n
        assert float(found[i]) == pytest.approx(total / weight, abs=1e-5)


def test_each_position_has_one_distance_and_the_border_none():
    found = feature_frequency.distances(16, 3)
    assert torch.equal(found.sum(0)[3:13, 3:13], torch.ones(10, 10))
    assert found.sum() == 100


def test_activity_that_depends_on_the_position_alone_is_no_difference():
    """Active in the middle, where objects are: the plain difference is large, at equal distances it is 0."""
    at = torch.arange(16) - 7.5
    middle = ((at[:, None].square() + at.square()).sqrt().floor() < 5).float()
    activation = middle.expand(12, 3, 16, 16)
    torch.manual_seed(0)
    objects = torch.rand(12, 32, 32) < 0.15
    objects[:, 10:22, 10:22] |= torch.rand(12, 12, 12) < 0.6
    found = feature_frequency.compared(activation, objects, 2, units.of_other_classes(np.arange(12) // 2))
    assert np.mean(found["plain"]) > 0.3
    assert np.abs(found["centred"]).max() < 1e-6
    assert np.abs(found["beyond"]).max() < 1e-6


def test_the_null_is_the_difference_for_masks_of_other_images():
    """Activity that is the same in all images is no evidence about the object of any."""
    torch.manual_seed(0)
    objects = torch.rand(12, 32, 32) < 0.4
    same = torch.randn(1, 3, 16, 16).expand(12, -1, -1, -1)
    where = units.resized(objects, 16)
    own = torch.where(where[:, None], 1.0, -1.0).expand(-1, 3, -1, -1)
    labels = np.arange(12) // 2
    others = units.of_other_classes(labels)
    for activation in (same, own):
        found = feature_frequency.compared(activation, objects, 2, others)
        active, rings = (activation > 0).float().mean(1), feature_frequency.distances(16, 2)
        for i in range(12):
            null = [
                feature_frequency.difference(active[i : i + 1], where[j : j + 1], rings)
                for j in np.flatnonzero(labels != labels[i])  # ten images
            ]
            expected = found["centred"][i] - float(torch.cat(null).mean())
            assert found["beyond"][i] == pytest.approx(expected, abs=1e-5)
    assert abs(np.mean(feature_frequency.compared(same, objects, 2, others)["beyond"])) < 0.02
    assert np.mean(feature_frequency.compared(own, objects, 2, others)["beyond"]) > 0.9


def test_the_masks_of_the_null_are_spread_over_all_other_classes():
    labels = np.repeat(np.arange(10), 10)  # the order of the images with masks
    others = units.of_other_classes(labels).numpy()
    assert others.shape == (10, 100)
    for i in range(100):
        assert len(set(others[:, i])) == 10
        assert set(labels[others[:, i]]) == set(range(10)) - {labels[i]}
    with pytest.raises(ValueError, match="the same class"):
        units.of_other_classes(np.zeros(4, dtype=int))
