"""`rectgrad.metrics` compared with slow versions, scipy, skimage and Quantus, and in edge cases."""

import inspect
import warnings

import numpy as np
import pytest
import torch

from rectgrad import metrics
from reference import metrics as slow

SHAPES = [(3, 1, 9, 8), (2, 3, 8, 11), (4, 7, 7)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def make_maps(shape, dtype=torch.float64, seed=0):
    """Random maps, the first with many ties and zeros, the last all zero."""
    maps = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    maps[0] = (maps[0] * 1.5).round()
    maps[-1] = 0
    return maps.to(dtype)


def make_masks(shape, seed=0):
    n, height, width = shape[0], *shape[-2:]
    return torch.rand(n, height, width, generator=torch.Generator().manual_seed(seed)) < 0.4


def as_samples(maps):
    """Each sample as float64 numpy (C, H, W)."""
    return [m.double().reshape(-1, *m.shape[-2:]).numpy() for m in maps]


def assert_agrees(values, expected, dtype=torch.float64, tolerance=None):
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert values.shape == (len(expected),)
    tolerance = tolerance or (1e-10 if dtype == torch.float64 else 1e-4)
    np.testing.assert_allclose(values.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def each(metric, *batches, **options):
    return [metric(*sample, **options) for sample in zip(*batches, strict=True)]


on_all_maps = pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, dtype) for shape in SHAPES for dtype in DTYPES], ids=str
)


def curved(x):
    return x.square().sum((1, 2, 3))


# every metric of one batch of maps, with what else it needs
METRICS = {
    "total_variation": lambda m: metrics.total_variation(m),
    "total_variation normalized": lambda m: metrics.total_variation(m, normalize=True),
    "gini": metrics.gini,
    "zero_share": metrics.zero_share,
    "inside": lambda m: metrics.inside(m, torch.eye(8, dtype=torch.bool)),
    "outside share": lambda m: metrics.outside(m, torch.eye(8, dtype=torch.bool), share=True),
    "in_box": lambda m: metrics.in_box(m, (1, 2, 3, 4)),
    "pointing_game": lambda m: metrics.pointing_game(m, torch.eye(8, dtype=torch.bool), 1),
    "rank_correlation": lambda m: metrics.rank_correlation(m, m.flip(-1)),
    "ssim": lambda m: metrics.ssim(m, m.flip(-1)),
    "insertion": lambda m: metrics.insertion(lambda x: x.sum((1, 2, 3)), m.cos(), m, steps=3),
    "deletion": lambda m: metrics.deletion(lambda x: x.sum((1, 2, 3)), m.cos(), m, steps=3),
    "area": lambda m: metrics.area(m.flatten(1)),
    "road": lambda m: (
        metrics.road(lambda x: x.flatten(1)[:, :5], m.cos(), m, fractions=(0.3, 0.7)).probability
    ),
    "sensitivity_n": lambda m: metrics.sensitivity_n(curved, m.cos(), m, fractions=(0.1, 0.5), subsets=4),
    "infidelity": lambda m: metrics.infidelity(curved, m.cos(), m, draws=3),
    "infidelity gaussian": lambda m: metrics.infidelity(curved, m.cos(), m, perturbation="gaussian", draws=3),
    "max_sensitivity": lambda m: metrics.max_sensitivity(m.cos(), m, attribute=lambda x, t: x.sin(), draws=2),
    "specificity": lambda m: metrics.specificity(m, m.flip(-1)),
    "randomisation": lambda m: metrics.randomisation(m, [m.flip(-1), m + 1]),
    "grid_pointing": lambda m: metrics.grid_pointing(m, (2, 2), 1),
}
# their inputs keep their type
ASK_A_MODEL = "insertion deletion road sensitivity_n infidelity max_sensitivity".split()
# these read values, which the "meta" device does not hold
READ_VALUES = {"in_box", "specificity", "grid_pointing"} | {
    name for name in METRICS if name.split()[0] in ASK_A_MODEL[2:]
}
on_all_metrics = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())


# Against the slow twins


@on_all_maps
@pytest.mark.parametrize("normalize", [False, True])
def test_total_variation(shape, dtype, normalize):
    maps = make_maps(shape, dtype)
    expected = each(slow.total_variation, as_samples(maps), normalize=normalize)
    assert_agrees(metrics.total_variation(maps, normalize=normalize), expected, dtype)


@on_all_maps
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("side", ["inside", "outside"])
def test_inside_and_outside(shape, dtype, share, side):
    maps, masks = make_maps(shape, dtype), make_masks(shape)
    expected = each(getattr(slow, side), as_samples(maps), masks.numpy(), share=share)
    assert_agrees(getattr(metrics, side)(maps, masks, share=share), expected, dtype)


@on_all_maps
@pytest.mark.parametrize("share", [False, True])
def test_in_box(shape, dtype, share):
    maps, height, width = make_maps(shape, dtype), *shape[-2:]
    boxes = torch.tensor([[0, 0, height, width], [1, 2, 3, 4], [6, 6, 1, 1], [0, 3, 5, 2]])[: len(maps)]
    expected = each(slow.in_box, as_samples(maps), boxes.tolist(), share=share)
    assert_agrees(metrics.in_box(maps, boxes, share=share), expected, dtype)
    expected = each(slow.in_box, as_samples(maps), [(2, 1, 4, 3)] * len(maps), share=share)
    assert_agrees(metrics.in_box(maps, (2, 1, 4, 3), share=share), expected, dtype)


@on_all_maps
@pytest.mark.parametrize("metric", ["gini", "zero_share"])
def test_sparsity(shape, dtype, metric):
    maps = make_maps(shape, dtype)
    assert_agrees(getattr(metrics, metric)(maps), each(getattr(slow, metric), as_samples(maps)), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tolerance", [0, 1, 1.5, 3])
def test_pointing_game(shape, tolerance):
    shape = (40, *shape[1:])
    maps, masks = make_maps(shape), make_masks(shape, seed=1)
    masks &= make_masks(shape, seed=2) & make_masks(shape, seed=3)
    maps[:9] = maps[:9].clamp(max=0)  # several largest values
    expected = each(slow.pointing_game, as_samples(maps), masks.numpy(), tolerance=tolerance)
    assert 0 < sum(expected) < len(expected)
    assert_agrees(metrics.pointing_game(maps, masks, tolerance), expected)


@on_all_maps
@pytest.mark.parametrize("absolute", [False, True])
def test_rank_correlation(shape, dtype, absolute):
    a, b = make_maps(shape, dtype), make_maps(shape, dtype, seed=1)
    expected = each(slow.rank_correlation, as_samples(a), as_samples(b), absolute=absolute)
    assert np.isnan(expected[-1])
    assert_agrees(metrics.rank_correlation(a, b, absolute=absolute), expected, dtype)


@on_all_maps
@pytest.mark.parametrize("data_range", [None, 2.5])
def test_ssim(shape, dtype, data_range):
    a, b = make_maps(shape, dtype), make_maps(shape, dtype, seed=1)
    b[1] = a[1] + 0.3 * b[1]
    expected = each(slow.ssim, as_samples(a), as_samples(b), data_range=data_range)
    assert_agrees(metrics.ssim(a, b, data_range), expected, dtype)


@pytest.mark.parametrize("map_channels", [1, 3])
@pytest.mark.parametrize("steps", [1, 7, 100])
@pytest.mark.parametrize("batch_size", [None, 1, 2, 5])
def test_insertion_and_deletion(map_channels, steps, batch_size):
    maps, inputs = make_maps((3, map_channels, 5, 6)), make_maps((3, 3, 5, 6), seed=1).cos()
    baseline = make_maps((3, 5, 6), seed=2)
    weights = make_maps((4, 3, 5, 6), seed=3)[1]
    images, fills = as_samples(inputs), [baseline.numpy()] * 3

    def score(x):
        return (x * weights).sum((1, 2, 3)).tanh()

    def slow_score(x):
        return np.tanh((x * weights.numpy()).sum())

    for metric, starts, ends in ((metrics.insertion, fills, images), (metrics.deletion, images, fills)):
        curves = metric(score, inputs, maps, steps=steps, baseline=baseline, batch_size=batch_size)
        samples = zip(starts, ends, as_samples(maps), strict=True)
        expected = [slow.curve(slow_score, s, e, m, steps) for s, e, m in samples]
        np.testing.assert_allclose(curves.numpy(), expected, atol=1e-10)
        assert curves.shape == (3, steps + 1)
        assert_agrees(metrics.area(curves), each(slow.area, curves.numpy()))


# Against other libraries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("absolute", [False, True])
def test_rank_correlation_agrees_with_scipy(dtype, absolute):
    spearmanr = pytest.importorskip("scipy.stats").spearmanr
    a, b = make_maps((4, 3, 20, 20), dtype), make_maps((4, 3, 20, 20), dtype, seed=1)
    b[1] = a[1].exp() - 0.9 * b[1]
    b[-1, 0, 0, 0] = 1  # the other map is constant
    a[2, 0, 0, 0] = torch.nan
    pairs = [(p.abs(), q.abs()) if absolute else (p, q) for p, q in zip(a, b, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of the constant map
        expected = [spearmanr(p.flatten().numpy(), q.flatten().numpy()).statistic for p, q in pairs]
    assert np.isnan(expected).tolist() == [False, False, True, True]
    assert_agrees(metrics.rank_correlation(a, b, absolute=absolute), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("data_range", [None, 3.0])
def test_ssim_agrees_with_skimage(dtype, scale, shift, data_range):
    skimage = pytest.importorskip("skimage.metrics")
    a, b = make_maps((4, 3, 16, 20), dtype) + shift, make_maps((4, 3, 16, 20), dtype, seed=1) + shift
    b[1] = a[1] + 0.2 * b[1]
    a, b = a[:-1] * scale, b[:-1] * scale
    expected = []
    for p, q in zip(as_samples(a), as_samples(b), strict=True):
        extent = max(p.max(), q.max()) - min(p.min(), q.min()) if data_range is None else data_range * scale
        expected.append(skimage.structural_similarity(p, q, channel_axis=0, data_range=extent))
    data_range = None if data_range is None else data_range * scale
    assert_agrees(metrics.ssim(a, b, data_range), expected, dtype, tolerance=1e-4)


@pytest.mark.parametrize("keep", [1.0, 0.3, 0.02], ids="keep {}".format)
def test_gini_agrees_with_quantus(keep):
    maps = make_maps((5, 3, 32, 32), torch.float32)[:-1]
    maps[torch.rand(maps.shape, generator=torch.Generator().manual_seed(1)) > keep] = 0
    maps *= torch.tensor([1.0, 1e-6, 1e3, -1.0])[:, None, None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Quantus and what it imports
        metric = pytest.importorskip("quantus").Sparseness(disable_warnings=True)
        # one map per call, since it scales by the batch's maximum; copies, since it works in place
        singles = [m[None].numpy() for m in maps]
        expected = [metric(None, m.copy(), np.zeros(1, int), m.copy())[0] for m in singles]
    assert_agrees(metrics.gini(maps), expected, torch.float32)


# Meaning, at values known by hand


def test_values_known_by_hand():
    spike = torch.zeros(1, 1, 8, 8)
    spike[0, 0, 3, 4] = -2.0
    corner = torch.zeros(8, 8, dtype=torch.bool)
    corner[:4, :5] = True
    assert metrics.total_variation(spike).tolist() == [8.0]
    assert metrics.total_variation(spike, normalize=True).tolist() == [4.0]
    assert metrics.gini(spike).tolist() == pytest.approx([63 / 64])
    assert metrics.gini(torch.ones(1, 8, 8)).tolist() == [0.0]
    assert metrics.zero_share(spike).tolist() == [63 / 64]
    assert metrics.inside(spike, corner).tolist() == [2.0]
    assert metrics.outside(spike, corner).tolist() == [0.0]
    assert metrics.in_box(spike, (3, 4, 1, 1), share=True).tolist() == [1.0]
    assert metrics.pointing_game(-spike, corner).tolist() == [1.0]
    assert metrics.pointing_game(-spike, ~corner).tolist() == [0.0]
    assert metrics.pointing_game(-spike, ~corner, tolerance=1).tolist() == [1.0]
    assert metrics.area(torch.tensor([[0.0, 1.0], [1.0, 1.0]])).tolist() == [0.5, 1.0]


def test_rank_correlation_sees_order_only():
    maps = make_maps((3, 50))[:2]
    assert metrics.rank_correlation(maps, maps.exp()).tolist() == pytest.approx([1.0, 1.0])
    assert metrics.rank_correlation(maps, -maps).tolist() == pytest.approx([-1.0, -1.0])
    assert metrics.rank_correlation(maps, -maps, absolute=True).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.1, -7e20])
def test_ssim_of_equal_constant_maps_is_one(value):
    maps = torch.full((2, 3, 9, 9), value)
    assert metrics.ssim(maps, maps).tolist() == [1.0, 1.0]
    assert metrics.ssim(maps, maps + 1e21)[0] < 0.9


def test_zero_maps_have_defined_values():
    zeros, mask = torch.zeros(2, 3, 8, 8), torch.eye(8, dtype=torch.bool)
    assert metrics.total_variation(zeros, normalize=True).tolist() == [0, 0]
    assert metrics.inside(zeros, mask, share=True).tolist() == [0, 0]
    assert metrics.outside(zeros, mask, share=True).tolist() == [0, 0]
    assert metrics.in_box(zeros, (0, 0, 2, 2), share=True).tolist() == [0, 0]
    assert metrics.gini(zeros).tolist() == [0, 0]
    assert metrics.zero_share(zeros).tolist() == [1, 1]


def test_shares_stay_in_the_unit_interval():
    maps = make_maps((64, 33, 31), torch.float32).mT
    mask = torch.ones(31, 33, dtype=torch.bool)
    assert metrics.inside(maps, mask, share=True)[:-1].eq(1).all()
    assert metrics.outside(maps, ~mask, share=True)[:-1].eq(1).all()
    assert metrics.inside(maps, ~mask, share=True).eq(0).all()


def test_scale_free_metrics_ignore_scale():
    maps = make_maps((3, 2, 8, 8), torch.float32)
    for metric in ("gini", "total_variation normalized", "outside share", "ssim"):
        torch.testing.assert_close(METRICS[metric](maps * 1e-20), METRICS[metric](maps), msg=metric)


@pytest.mark.parametrize("form", ["(H, W)", "(N, H, W)", "(N, 1, H, W)"])
def test_mask_forms_mean_the_same(form):
    maps, mask = make_maps((2, 3, 8, 8)), make_masks((1, 8, 8))[0]
    given = {"(H, W)": mask, "(N, H, W)": mask.expand(2, 8, 8), "(N, 1, H, W)": mask.expand(2, 1, 8, 8)}
    expected = each(slow.inside, as_samples(maps), [mask.numpy()] * 2)
    assert_agrees(metrics.inside(maps, given[form]), expected)
    expected = each(slow.pointing_game, as_samples(maps), [mask.numpy()] * 2)
    assert_agrees(metrics.pointing_game(maps, given[form]), expected)


def test_further_channel_dimensions_are_channels():
    maps, other = make_maps((2, 2, 3, 8, 8)), make_maps((2, 2, 3, 8, 8), seed=1)
    flat, mask = maps.flatten(1, 2), torch.eye(8, dtype=torch.bool)
    assert torch.equal(metrics.total_variation(maps), metrics.total_variation(flat))
    assert torch.equal(metrics.inside(maps, mask), metrics.inside(flat, mask))
    assert torch.equal(metrics.ssim(maps, other), metrics.ssim(flat, other.flatten(1, 2)))


def test_boxes_of_small_integer_types_do_not_wrap():
    maps = torch.ones(1, 200, 200)
    box = torch.tensor([100, 100, 100, 100], dtype=torch.int8)
    assert metrics.in_box(maps, box).tolist() == [10000.0]


def test_a_score_may_hold_labels():
    inputs, labels = torch.arange(12.0).reshape(3, 1, 2, 2), torch.tensor([2, 0, 3])
    curves = metrics.insertion(
        lambda x: x.flatten(1).gather(1, labels[:, None])[:, 0], inputs, torch.ones(3, 1, 2, 2), steps=4
    )
    # reading order: pixel j is in place from step j + 1 on
    assert curves.tolist() == [[0, 0, 0, 2, 2], [0, 4, 4, 4, 4], [0, 0, 0, 0, 11]]


def test_baseline_may_be_a_number():
    def total(x):
        return x.sum((1, 2, 3))

    inputs, maps = torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2)
    assert metrics.insertion(total, inputs, maps, steps=2, baseline=3.0).tolist() == [[12, 8, 4]]
    assert metrics.deletion(total, inputs, maps, steps=2, baseline=3.0).tolist() == [[4, 8, 12]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_score_sees_the_type_of_the_inputs_without_gradients(dtype):
    seen = []

    def score(x):
        seen.append((x.dtype, torch.is_grad_enabled()))
        return x.sum((1, 2, 3))

    inputs = make_maps((2, 1, 3, 3), dtype)
    curves = metrics.insertion(score, inputs, inputs, steps=2)
    assert seen == [(dtype, False)] * 3
    assert curves.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# What holds for every metric


@on_all_metrics
def test_a_sample_scores_the_same_alone_as_in_a_batch(metric):
    maps = make_maps((5, 3, 8, 8))
    alone = torch.cat([metric(m[None]) for m in maps])
    torch.testing.assert_close(metric(maps), alone, rtol=1e-12, atol=1e-12, equal_nan=True)


@on_all_metrics
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_types_are_computed_in_float32(metric, dtype):
    maps = make_maps((3, 2, 8, 8), dtype) * 50  # a float16 sum of squares would overflow
    wide = maps.double() if dtype == torch.float64 else maps.float()
    values = metric(maps)
    assert values.dtype == wide.dtype
    if not any(metric is METRICS[name] for name in METRICS if name.split()[0] in ASK_A_MODEL):
        assert torch.equal(values.nan_to_num(9), metric(wide).nan_to_num(9))


@on_all_metrics
def test_a_map_with_nan_has_no_value(metric):
    """And the other samples have theirs."""
    maps = make_maps((3, 3, 8, 8))
    expected = metric(maps)
    maps[1, 2, 2, 2] = torch.nan
    values = metric(maps)
    assert values[1].isnan().all()
    torch.testing.assert_close(values[::2], expected[::2], equal_nan=True)


@on_all_metrics
def test_no_samples_give_an_empty_result(metric):
    values = metric(torch.zeros(0, 3, 8, 8))
    assert values.dtype == torch.float32
    assert values.shape == metric(torch.zeros(1, 3, 8, 8))[:0].shape


@on_all_metrics
def test_maps_are_not_modified_and_memory_layout_does_not_matter(metric):
    maps = make_maps((3, 3, 8, 8))
    before = maps.clone()
    values = metric(maps)
    assert torch.equal(maps, before)
    layout = maps.to(memory_format=torch.channels_last)
    torch.testing.assert_close(metric(layout), values, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", sorted(METRICS.keys() - READ_VALUES))
def test_results_stay_on_the_device_of_the_maps(name):
    # "meta" is the one other device that every machine has
    assert METRICS[name](torch.zeros(2, 3, 8, 8, device="meta")).device.type == "meta"


def test_a_curve_leaves_inputs_alone_even_if_the_score_does_not():
    inputs = make_maps((2, 1, 3, 3))
    before = inputs.clone()
    metrics.deletion(lambda x: x.zero_().sum((1, 2, 3)), inputs, inputs, steps=2)
    assert torch.equal(inputs, before)


def test_everything_public_is_listed():
    functions = {name for name, value in vars(metrics).items() if inspect.isfunction(value)}
    assert functions == set(metrics.__all__)


# Errors restate the call


def maps_of(*shape):
    return torch.zeros(shape)


def masks_of(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def curve_of(inputs=None, maps=None, score=None, **options):
    inputs = maps_of(2, 3, 8, 8) if inputs is None else inputs
    maps = maps_of(2, 8, 8) if maps is None else maps
    return metrics.insertion(score or (lambda x: x.sum((1, 2, 3))), inputs, maps, **options)


ERRORS = {
    "total_variation(maps of shape (8, 8))": lambda: metrics.total_variation(maps_of(8, 8)),
    "gini(maps of shape (8,))": lambda: metrics.gini(maps_of(8)),
    "zero_share(maps of shape ())": lambda: metrics.zero_share(maps_of()),
    "inside(maps of shape (2, 8, 8), mask of shape (3, 8, 8)": lambda: metrics.inside(
        maps_of(2, 8, 8), masks_of(3, 8, 8)
    ),
    "outside(maps of shape (2, 3, 8, 8), mask of shape (2, 3, 8, 8)": lambda: metrics.outside(
        maps_of(2, 3, 8, 8), masks_of(2, 3, 8, 8)
    ),
    "inside(mask of type torch.float32)": lambda: metrics.inside(maps_of(2, 8, 8), maps_of(8, 8)),
    "pointing_game(maps of shape (2, 8, 8), mask of shape (8, 7)": lambda: metrics.pointing_game(
        maps_of(2, 8, 8), masks_of(8, 7)
    ),
    "pointing_game(tolerance=-1)": lambda: metrics.pointing_game(maps_of(2, 8, 8), masks_of(8, 8), -1),
    "box (0, 5, 8, 4)": lambda: metrics.in_box(maps_of(2, 8, 8), (0, 5, 8, 4)),
    "box (1, 0, 8, 8)": lambda: metrics.in_box(maps_of(2, 8, 8), (1, 0, 8, 8)),
    "box (-1, 0, 2, 2)": lambda: metrics.in_box(
        maps_of(2, 8, 8), torch.tensor([[0, 0, 1, 1], [-1, 0, 2, 2]])
    ),
    "box (0, 0, 0, 2)": lambda: metrics.in_box(maps_of(2, 8, 8), (0, 0, 0, 2)),
    "box of shape (3, 4)": lambda: metrics.in_box(maps_of(2, 8, 8), torch.ones(3, 4, dtype=torch.int64)),
    "box of shape (4,) and type torch.float32": lambda: metrics.in_box(maps_of(2, 8, 8), torch.ones(4)),
    "rank_correlation(a of shape (2, 8), b of shape (2, 9))": lambda: metrics.rank_correlation(
        maps_of(2, 8), maps_of(2, 9)
    ),
    "ssim(a of shape (2, 8, 8), b of shape (1, 8, 8))": lambda: metrics.ssim(
        maps_of(2, 8, 8), maps_of(1, 8, 8)
    ),
    "ssim(maps of 8 by 6 pixels)": lambda: metrics.ssim(maps_of(2, 8, 6), maps_of(2, 8, 6)),
    "ssim(data_range=0)": lambda: metrics.ssim(maps_of(2, 8, 8), maps_of(2, 8, 8), data_range=0),
    "inputs of shape (2, 3, 8, 8), maps of shape (2, 8, 7)": lambda: curve_of(maps=maps_of(2, 8, 7)),
    "inputs of shape (2, 3, 8, 8), maps of shape (1, 8, 8)": lambda: curve_of(maps=maps_of(1, 8, 8)),
    "steps=0": lambda: curve_of(steps=0),
    "batch_size=0": lambda: curve_of(batch_size=0),
    "baseline='grey': needs a number, a tensor, or one of 'blur', 'mean'": lambda: curve_of(baseline="grey"),
    "target=[1, 2, 0]: needs None, an int, or one class for each of 2 samples": lambda: curve_of(
        score=lambda x: x.sum((2, 3)), target=[1, 2, 0]
    ),
    "target='cat': needs None, an int": lambda: curve_of(target="cat"),
    "target=[3, 3] for outputs of shape (2, 3): needs classes from 0 to 2": lambda: curve_of(
        score=lambda x: x.sum((2, 3)), target=3
    ),
    "model returned one score for each image, (2,): needs target=None": lambda: curve_of(target=1),
    "baseline of shape (2, 8, 8) for inputs of shape (2, 3, 8, 8)": lambda: curve_of(
        baseline=maps_of(2, 8, 8)
    ),
    "images of shape (2, 3, 8, 8)) returned (2, 3, 8)": lambda: curve_of(score=lambda x: x.sum(3)),
    "images of shape (2, 3, 8, 8)) returned ()": lambda: curve_of(score=lambda x: x.sum()),
    "images of shape (2, 3, 8, 8)) returned float": lambda: curve_of(score=lambda x: 0.5),
    "area(curve of shape (2, 1))": lambda: metrics.area(maps_of(2, 1)),
}


@pytest.mark.parametrize(("message", "call"), ERRORS.items(), ids=ERRORS.keys())
def test_errors_restate_the_call(message, call):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
    assert "needs" in str(error.value)
