"""Insertion and deletion of a classifier: which output is the score, and what replaces a pixel."""

from types import SimpleNamespace

import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import nn

from rectgrad import metrics
from rectgrad.metrics import curves
from rectgrad.metrics.scores import Scores

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
INPUTS, MAPS = torch.rand(4, 3, 8, 8), torch.rand(4, 8, 8)
CURVES = pytest.mark.parametrize("curve", [metrics.insertion, metrics.deletion])


def by_hand(curve, classes, **options):
    """The same with a function that holds the labels."""
    classes = torch.as_tensor(classes)
    return curve(lambda x: MODEL(x).gather(1, classes[:, None])[:, 0], INPUTS, MAPS, steps=7, **options)


@CURVES
def test_the_score_is_the_output_of_the_target(curve):
    top = MODEL(INPUTS).argmax(1).tolist()
    assert len(set(top)) > 1
    for target, classes in (
        (None, top),
        (3, [3] * 4),
        ([1, 0, 2, 4], [1, 0, 2, 4]),
        (torch.tensor([1, 0, 2, 4], dtype=torch.int32), [1, 0, 2, 4]),
    ):
        expected = by_hand(curve, classes)
        assert torch.equal(curve(MODEL, INPUTS, MAPS, target, steps=7), expected)
        in_parts = curve(MODEL, INPUTS, MAPS, target, steps=7, batch_size=3)
        torch.testing.assert_close(in_parts, expected)


@pytest.mark.parametrize("steps", [1, 7, 64, 100])  # of 64 pixels
@pytest.mark.parametrize("clean_last", [True, False])
def test_known_ends_are_not_evaluated_again(steps, clean_last):
    order = curves.pixel_order("curve", INPUTS, MAPS)
    start, end = torch.zeros_like(INPUTS), INPUTS
    evaluated = []

    def scores():
        return Scores(lambda x: evaluated.append(len(x)) or MODEL(x), 2, len(INPUTS))

    expected = curves.curve(scores(), start, end, order, steps, clean_last)
    assert len(evaluated) == steps + 1
    evaluated.clear()
    ends = MODEL(start)[:, 2].detach(), MODEL(end)[:, 2].detach()
    assert torch.equal(curves.curve(scores(), start, end, order, steps, clean_last, ends), expected)
    counts = [k * 64 // steps for k in range(steps + 1)]
    assert len(evaluated) == len([n for n in counts if 0 < n < 64])


@CURVES
def test_the_class_is_that_of_the_clean_inputs(curve):
    """Not that of the blank picture, which the model may take for something else."""
    before = curve(MODEL, INPUTS, MAPS, steps=7, baseline=5.0)
    assert torch.equal(before, by_hand(curve, MODEL(INPUTS).argmax(1), baseline=5.0))


@CURVES
def test_outputs_with_logits_and_single_outputs(curve):
    wrapped = curve(lambda x: SimpleNamespace(logits=MODEL(x)), INPUTS, MAPS, 2, steps=7)
    assert torch.equal(wrapped, by_hand(curve, [2] * 4))
    single = curve(lambda x: MODEL(x)[:, 2:3], INPUTS, MAPS, steps=7)
    assert torch.equal(single, wrapped)


def test_the_mean_is_each_channel_s_own():
    first = metrics.insertion(lambda x: x[:, 1, 0, 0], INPUTS, MAPS, steps=2, baseline="mean")[:, 0]
    torch.testing.assert_close(first, INPUTS[:, 1].mean((1, 2)))


@pytest.mark.parametrize("size", [(40, 60), (3, 5), (1, 1)])
def test_blur_is_a_gaussian_of_five_percent_of_the_shorter_side(size):
    inputs = torch.rand(2, 3, *size, dtype=torch.float64)
    seen = []
    metrics.deletion(lambda x: seen.append(x) or x.sum((1, 2, 3)), inputs, inputs, steps=1, baseline="blur")
    sigma = 0.05 * min(size)
    radius = max(round(3 * sigma), 1)
    expected = gaussian_filter(
        inputs.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, radius, radius)
    )
    torch.testing.assert_close(seen[-1], torch.from_numpy(expected))
