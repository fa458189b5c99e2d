"""Expected Gradients against its formula; what it has in common with other averages: test_averages.py."""

import pytest
import torch

import rectgrad
import reference
from networks import NETWORKS
from rectgrad.kernels.draws import bytes_of, generator_of
from reference.averages import blurred, expected


def draws_of(x, count, seed, samples):
    """For each draw of a sample the number of a baseline, and a number between 0 and 1."""
    own = [generator_of(str(seed).encode(), str(j).encode(), bytes_of(x.float())) for j in range(samples)]
    pairs = [torch.rand(2, generator=generator).tolist() for generator in own]
    return [(int(u * count), t) for u, t in pairs]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("network", ["plain_cnn", "residual", "conv1d", "conv3d"])
def test_expected_gradients_is_the_formula(network, given):
    model, x = NETWORKS[network](1)
    baselines = torch.randn(4, *x.shape[1:], dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    options = {"baselines": baselines} if given else {}
    maps = rectgrad.attribute(model, x, "expected_gradients", 1, samples=8, seed=3, **options)
    graph = reference.trace(model)
    for row, found in zip(x, maps, strict=True):
        sample, start = row[None], torch.zeros_like(model(row[None]))
        start[0, 1] = 1
        blurry = [blurred(sample, share) for share in (0.02, 0.04, 0.08, 0.16, 0.32)]
        bank = list(baselines[:, None]) if given else blurry
        pairs = [((bank[i],), t) for i, t in draws_of(row, len(bank), 3, 8)]
        right = expected(graph, (sample,), start, pairs)[0]
        assert (found - right).abs().max() <= 1e-9 * right.abs().max()


def test_expected_gradients_of_several_inputs_share_their_draws():
    model, inputs = NETWORKS["two_inputs"](0)
    baselines = tuple(torch.stack([0.5 * x[0], x[1], -x[2], 0 * x[0]]) for x in inputs)
    maps = rectgrad.attribute(model, inputs, "expected_gradients", samples=3, baselines=baselines)
    generator = generator_of(b"0", b"0", b"".join(bytes_of(x[0].float()) for x in inputs))
    assert [m.shape for m in maps] == [x.shape for x in inputs]
    (u, t), points = torch.rand(2, generator=generator).tolist(), []
    run = lambda *point: points.append(point) or model(*point)  # noqa: E731
    rectgrad.attribute(run, inputs, "expected_gradients", samples=3, baselines=baselines)
    for x, b, seen in zip(inputs, baselines, points[1], strict=True):
        chosen = b[int(4 * u)]
        torch.testing.assert_close(seen[0].detach(), chosen + t * (x[0] - chosen))


@pytest.mark.parametrize(
    ("baselines", "said"),
    [
        (torch.rand(3, 8, 8), r"a tensor \(B, 3, 8, 8\) with a baseline in each row, not \(3, 8, 8\)"),
        (torch.rand(0, 3, 8, 8), r"not \(0, 3, 8, 8\)"),
        (0.5, "not 0.5"),
        ([torch.rand(2, 3, 8, 8)], r"not \[tensor"),
        (torch.rand(2, 3, 8, 9), "does not broadcast"),
        ((torch.rand(2, 3, 8, 8),) * 2, "2 baselines were given for 1 input"),
        (torch.full((2, 3, 8, 8), float("nan")), "the baseline contains a NaN"),
    ],
)
@pytest.mark.parametrize("method", ["expected_gradients", "deeplift_shap"])
def test_baselines_that_make_no_sense(method, baselines, said):
    model, x = NETWORKS["plain_cnn"](0)
    with pytest.raises(ValueError, match=said) as raised:
        rectgrad.attribute(model, x, method, 1, baselines=baselines)
    assert len(str(raised.value)) < 200


def test_as_many_draws_as_one_likes_tend_to_completeness():
    """The mean of the score's differences from the baselines is the sum of the map, in the limit."""
    model, x = NETWORKS["plain_cnn"](0)
    baselines = torch.randn(3, *x.shape[1:], dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    maps = rectgrad.attribute(model, x, "expected_gradients", 2, samples=3000, baselines=baselines)
    with torch.no_grad():
        difference = model(x)[:, 2] - model(baselines)[:, 2].mean()
    assert (maps.flatten(1).sum(1) - difference).abs().max() < 0.15 * difference.abs().max()


def test_a_sample_has_its_own_draws_and_the_seed_decides():
    model, x = NETWORKS["plain_cnn"](0)
    maps = [rectgrad.attribute(model, x, "expected_gradients", 1, samples=4, seed=s) for s in (0, 0, 1)]
    assert torch.equal(maps[0], maps[1])
    assert not torch.allclose(maps[0], maps[2])
    again = rectgrad.attribute(model, x.flip(0), "expected_gradients", 1, samples=4).flip(0)
    torch.testing.assert_close(again, maps[0], rtol=1e-9, atol=1e-12)
