"""Normal noise: the published generator, its distribution, and independence of draws and batches."""

import pytest
import torch

from rectgrad.kernels import draws
from reference import noise as slow

KEYS = torch.tensor([0, 1234567, 2**63 - 1, 42], dtype=torch.int64)
# The first numbers of splitmix64: from Vigna's C code for state 0, and as widely published for 1234567.
PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423],
}


@pytest.mark.parametrize("state", PUBLISHED)
def test_the_reference_is_splitmix64(state):
    assert slow.splitmix64(state, 3) == PUBLISHED[state]


@pytest.mark.parametrize("shape", [(3, 4, 4), (5,), (1,), (3, 3, 3)])
@pytest.mark.parametrize("j", [0, 1, 7])
def test_numbers_are_those_of_the_reference(shape, j):
    found = draws.normal(KEYS, j, shape)
    size = torch.Size(shape).numel()
    expected = [slow.normal(key, j, size) for key in KEYS.tolist()]
    assert found.shape == (4, *shape)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected).reshape(4, *shape), rtol=1e-6, atol=1e-6)


def test_the_distribution_is_normal():
    """Moments of 10^6 numbers, within five standard errors; the tails have their share."""
    n = 10**6
    values = draws.normal(KEYS[3:], 0, (n,)).double()[0]
    assert abs(float(values.mean())) < 5 / n**0.5
    assert abs(float(values.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((values**3).mean())) < 5 * (15 / n) ** 0.5
    assert abs(float((values**4).mean()) - 3) < 5 * (96 / n) ** 0.5
    for limit, share in ((1.0, 0.317311), (3.0, 0.0026998), (4.0, 6.334e-5)):
        outside = float((values.abs() > limit).double().mean())
        assert abs(outside - share) < 5 * (share / n) ** 0.5


def correlations(rows):
    """The largest correlation of two rows, in standard errors."""
    return float(torch.corrcoef(rows.double()).fill_diagonal_(0).abs().max()) * rows.shape[1] ** 0.5


def test_draws_and_keys_are_independent():
    n = 50_000
    by_number = torch.cat([draws.normal(KEYS[3:], j, (n,)) for j in range(12)])
    by_key = draws.normal(torch.arange(12), 0, (n,))
    halves = by_number.reshape(24, n // 2)  # cosines and sines of the same radius
    assert correlations(by_number) < 5
    assert correlations(by_key) < 5
    assert correlations(halves) < 5
    assert len(by_number.unique()) > 0.99 * by_number.numel()


def test_repeated_calls_and_batches_do_not_matter():
    whole = draws.normal(KEYS, 3, (2, 5))
    assert torch.equal(whole, draws.normal(KEYS, 3, (2, 5)))
    assert torch.equal(whole[2:3], draws.normal(KEYS[2:3], 3, (2, 5)))
    assert torch.equal(whole.flip(0), draws.normal(KEYS.flip(0), 3, (2, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_noise_of_a_sample_depends_on_its_own_values(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6).to(dtype)
    whole, alone = draws.noisy((x,), 0.1, 5), draws.noisy((x[1:2],), 0.1, 5)
    scale = 0.1 * (x.amax((1, 2), keepdim=True) - x.amin((1, 2), keepdim=True))
    for j in range(3):
        (found,) = whole(j)
        assert found.dtype == dtype
        assert torch.equal(found[1:2], alone(j)[0])
        expected = torch.stack([slow.noise_of((each,), 5, j)[0] for each in x.float()])
        tolerance = 4 * torch.finfo(dtype).eps * float(x.abs().max()) + 1e-6
        torch.testing.assert_close(found, (x + scale * expected).to(dtype), rtol=0, atol=tolerance)
    for other in (draws.noisy((x,), 0.1, 6)(0), whole(1)):
        assert (other[0] == whole(0)[0]).double().mean() < 0.1


@pytest.mark.parametrize("sizes", [(4000, 2000), (2000, 4000), (3000, 3000)], ids=str)
def test_inputs_of_a_tuple_do_not_share_their_noise(sizes):
    """Neither in one draw nor in different ones, whatever their sizes."""
    inputs = tuple(torch.linspace(0, 1, size, dtype=torch.float64)[None] for size in sizes)
    point = draws.noisy(inputs, 1.0, 0)
    drawn = [found - x for j in range(4) for found, x in zip(point(j), inputs, strict=True)]
    values = (torch.cat([each[0] for each in drawn]) * 1e9).round()
    assert len(values) - len(values.unique()) < 0.002 * len(values)
