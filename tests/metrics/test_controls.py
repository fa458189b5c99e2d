"""Control maps and matched post-processing."""

import numpy as np
import pytest
import torch
from scipy.ndimage import sobel

from rectgrad import metrics
from rectgrad.metrics import controls, matching
from reference import metrics as slow

CONTROLS = [controls.edges, controls.centre, controls.brightness]


def test_edges_are_those_of_a_sobel_filter():
    inputs = torch.rand(2, 3, 9, 12).double()
    found = controls.edges(inputs)
    assert found.shape == inputs.shape
    for photo, m in zip(inputs.numpy(), found.sum(1).numpy(), strict=True):
        grey = photo.mean(0)
        expected = np.hypot(sobel(grey, 0, mode="nearest"), sobel(grey, 1, mode="nearest")) / 8
        np.testing.assert_allclose(m, expected, atol=1e-12)


def test_the_centre_is_a_gaussian():
    found = controls.centre(torch.rand(2, 3, 40, 60)).sum(1)
    assert found.shape == (2, 40, 60)
    torch.testing.assert_close(found, found.flip(1))
    torch.testing.assert_close(found, found.flip(2))
    weights = found[0].double()
    rows, columns = (torch.arange(size).double() for size in weights.shape)
    # log-densities are parabolas: their second difference is -1 / sigma^2
    for line, side in ((weights[:, 30].log(), 40), (weights[20].log(), 60)):
        torch.testing.assert_close(
            line.diff().diff(), torch.full((side - 2,), -1 / (side / 4) ** 2).double(), rtol=1e-3, atol=1e-6
        )
    assert len(rows) < len(columns)


def test_brightness_is_the_mean_of_the_channels_above_the_darkest_pixel():
    inputs = torch.randn(2, 3, 9, 12)
    found = controls.brightness(inputs).sum(1)
    grey = inputs.mean(1)
    torch.testing.assert_close(found, grey - grey.flatten(1).min(1).values[:, None, None])
    assert found.amin((1, 2)).tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 8, 9), (2, 2, 3, 8, 9), (0, 3, 8, 9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_controls_have_the_shape_and_type_of_the_inputs(control, shape, dtype):
    inputs = torch.rand(shape).to(dtype)
    found = control(inputs)
    assert found.shape == inputs.shape
    assert found.dtype == dtype
    for m, photo in zip(found, inputs, strict=True):
        torch.testing.assert_close(control(photo[None])[0], m)


def test_times_input_and_positive_part():
    maps, inputs = torch.tensor([[[[-1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0]], [[-5.0, 6.0]]]])
    assert matching.times_input(maps, inputs).tolist() == [[[[-3, 8]], [[5, 12]]]]
    assert matching.positive_part(maps).tolist() == [[[[0, 2]]]]


@pytest.mark.parametrize("wanted", [0.0, 0.5, 0.8, 0.95])
def test_cut_to_gini(wanted):
    maps = torch.randn(4, 2, 5, 6).double()
    maps[1] = (maps[1] * 2).round()  # ties
    maps[2] = 0
    maps[3, 0] = 0  # sparse already
    found = matching.cut_to_gini(maps, wanted)
    for m, cut in zip(maps.numpy(), found.numpy(), strict=True):
        np.testing.assert_array_equal(cut, slow.cut_to_gini(m, wanted))
    assert torch.equal(found[2], maps[2])


def test_one_gini_for_each_sample_is_reached_as_closely_as_one_entry_allows():
    maps, wanted = torch.randn(3, 3, 32, 32), torch.tensor([0.6, 0.9, 0.99])
    reached = metrics.gini(matching.cut_to_gini(maps, wanted))
    torch.testing.assert_close(reached, wanted, rtol=0, atol=2e-3)
    assert (reached >= wanted - 1e-6).all()


def test_a_constant_map_is_never_cut_to_nothing():
    maps = torch.ones(1, 1, 4, 4)
    assert torch.equal(matching.cut_to_gini(maps, 0.9), maps)
    with pytest.raises(ValueError, match=r"cut_to_gini\(gini=1\)"):
        matching.cut_to_gini(maps, 1)
