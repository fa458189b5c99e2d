"""Specificity, and the values to expect of unrelated photos."""

import numpy as np
import pytest
import torch

from rectgrad import metrics
from rectgrad.explanation import trust
from reference import metrics as slow


def pairs(n=6, shape=(3, 9, 8), dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, n, *shape, generator=random).to(dtype)
    b[1] = a[1]
    a[2], b[2] = (a[2] * 1.5).round(), (a[2] * 1.4).round()  # ties
    b[3][..., 1:] = 0  # fewer positions than 5 %
    b[4] = 0
    a[5] = 0
    return a, b


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 1.0])
def test_specificity(share):
    a, b = pairs()
    expected = [slow.specificity(p.numpy(), q.numpy(), share) for p, q in zip(a, b, strict=True)]
    found = metrics.specificity(a, b, share)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    assert found[1] == 0
    assert found[4] == 1
    assert found[5].isnan()


def test_the_picture_s_specificity_is_the_same_number():
    for map, other, value in zip(*pairs(), metrics.specificity(*pairs()).tolist(), strict=True):
        found = trust.specificity(map, other).value
        assert (found is None and value != value) or found == value
    assert trust.specificity(torch.tensor([3.0, 1, 2]), torch.tensor([0.1, 5, 0])).value == 1.0


def test_unrelated_maps_are_those_of_other_photos():
    maps = pairs()[0][:5]
    for measure in (metrics.specificity, metrics.rank_correlation):
        found = metrics.unrelated(measure, maps, pairs=2)
        for i in range(5):
            others = [measure(maps[i : i + 1], maps[(i - k) % 5][None]) for k in (1, 2)]
            torch.testing.assert_close(found[i], torch.cat(others).mean())


def test_undefined_values_are_left_out():
    maps = torch.randn(4, 3, 9, 8)
    maps[1] = 0
    found = metrics.unrelated(metrics.rank_correlation, maps, pairs=3)
    assert found.isnan().tolist() == [False, True, False, False]


ERRORS = {
    "specificity(share=0)": lambda: metrics.specificity(*pairs(), share=0),
    "specificity(a of shape (6, 3, 9, 8), b of shape (5, 3, 9, 8))": lambda: metrics.specificity(
        pairs()[0], pairs()[1][1:]
    ),
    "unrelated(maps of 1 photos)": lambda: metrics.unrelated(metrics.specificity, torch.rand(1, 3, 9, 8)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_restate_the_call(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert message in str(error.value)
