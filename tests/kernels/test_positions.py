"""Which dimensions are positions, from the shapes of the calls of a pass."""

import pytest
import torch

from rectgrad.kernels.positions import Grids, mirrors

N = 2


def grids(*calls: tuple, dims: int = 2, side: int = 1) -> Grids:
    """What a pass of these calls, (name, family, source, shape), has met. side: of the input."""
    found = Grids(N, [(N, 3, *(side,) * dims)])
    for call in calls:
        found.meet(*call)
    return found


CONV = ("conv2d", "conv", (N, 3, 12, 16), (N, 8, 3, 4))
TOKENS = [CONV, ("flatten", "", (N, 8, 3, 4), (N, 8, 12)), ("transpose", "", (N, 8, 12), (N, 12, 8))]


def numbered(*sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)


def test_channels_second():
    x = numbered(N, 5, 3, 4)
    assert torch.equal(grids(CONV).image(x.shape, False)(x), x)
    assert torch.equal(grids(CONV).image(x.shape, True)(x), x)  # (5, 3) is no image


def test_channels_last():
    x = numbered(N, 3, 4, 5)
    assert torch.equal(grids(CONV).image(x.shape, True)(x), x.movedim(-1, 1))
    assert torch.equal(grids(CONV).image(x.shape, False)(x), x.movedim(-1, 1))  # (4, 5) is no image


def test_the_nearest_layer_decides_where_sizes_do_not():
    square = grids(("conv2d", "conv", (N, 3, 4, 4), (N, 4, 4, 4)))
    x = numbered(N, 4, 4, 4)
    assert torch.equal(square.image(x.shape, False)(x), x)
    assert torch.equal(square.image(x.shape, True)(x), x.movedim(-1, 1))


def test_tokens():
    x = numbered(N, 12, 7)
    assert torch.equal(grids(*TOKENS).image(x.shape, True)(x), x.transpose(1, 2).reshape(N, 7, 3, 4))
    assert grids(*TOKENS).image((N, 7, 12), True) is None
    flat = numbered(N, 7, 12)
    assert torch.equal(grids(*TOKENS).image(flat.shape, False)(flat), flat.reshape(N, 7, 3, 4))


def test_class_and_register_tokens_are_left_out():
    found = grids(*TOKENS)
    found.join([((N, 2, 7), False), ((N, 12, 7), True), ((N, 1, 7), False)])  # two in front, one behind
    found.join([((N, 1, 7), False), ((N, 15, 7), True)])  # and one in front of all
    x = numbered(N, 16, 7)
    expected = x[:, 3:15].transpose(1, 2).reshape(N, 7, 3, 4)
    assert torch.equal(found.image(x.shape, True)(x), expected)
    assert found.image((N, 13, 7), True) is None


def test_a_reshape_shows_an_image():
    """As in Swin, whose later stages have no convolution."""
    view = ("view", "", (N, 20, 6), (N, 4, 5, 6))
    for call in (view, ("reshape", "", *view[:1:-1])):
        assert grids(call).image((N, 20, 9), True) is not None
        assert grids(call).image((N, 4, 5, 9), True) is not None


def test_a_part_of_an_image_is_one():
    part = ("__getitem__", "", (N, 3, 4, 8), (N, 2, 2, 8))
    assert grids(CONV, part).image((N, 2, 2, 9), True) is not None
    assert grids(part).image((N, 2, 2, 9), True) is None


@pytest.mark.parametrize(
    "call",
    [
        ("view", "", (N, 12, 8), (N, 12, 2, 4)),  # the heads of attention
        ("view", "", (N, 12, 8), (N, 12, 1, 8)),
        ("conv2d", "conv", (6, 3, 3, 4), (6, 8, 3, 4)),  # windows folded into the batch
        ("conv1d", "conv", (N, 1, 12), (N, 1, 12)),  # a gate over channels
        ("adaptive_avg_pool2d", "avg_pool", (N, 8, 1, 1), (N, 8, 1, 1)),
        ("linear", "linear", (N, 3, 4, 8), (N, 3, 4, 8)),
    ],
    ids=lambda call: call[0],
)
def test_no_image(call):
    for shape in ((N, 12, 8), (N, 3, 4, 8), (N, 8, 3, 4), (N, 1, 8), (N, 8, 1, 1)):
        assert grids(call).image(shape, True) is None
        assert grids(call).image(shape, False) is None


def test_the_last_image_before_counts_then_the_first_after():
    found = grids(CONV, ("conv2d", "conv", (N, 8, 6, 2), (N, 8, 6, 2)))
    now = found.now
    found.meet("conv2d", "conv", (N, 8, 2, 6), (N, 8, 2, 6))
    x = numbered(N, 12, 1)
    assert found.image(x.shape, True, now)(x).shape == (N, 1, 6, 2)
    assert found.image((N, 8, 2, 6), False) is not None


def test_other_numbers_of_dimensions():
    signal = grids(("conv1d", "conv", (N, 3, 20), (N, 8, 10)), dims=1)
    x = numbered(N, 8, 10)
    assert torch.equal(signal.image(x.shape, False)(x), x)
    assert torch.equal(signal.image((N, 10, 8), True)(x.transpose(1, 2)), x)
    volume = grids(("conv3d", "conv", (N, 3, 6, 6, 6), (N, 8, 2, 3, 4)), dims=3)
    assert volume.image((N, 24, 5), True)(numbered(N, 24, 5)).shape == (N, 5, 2, 3, 4)


def test_other_first_dimensions_have_no_positions():
    assert grids(CONV).image((N * 4, 8, 3, 4), False) is None
    assert grids(CONV).image((N, 12), False) is None


def test_a_pointwise_convolution_is_no_evidence_of_an_image():
    """As in MobileViTV2: positions within a patch, and patches."""
    call, weight = ("conv2d", "conv", (N, 8, 4, 6), (N, 9, 4, 6)), torch.ones(9, 8, 1, 1)
    assert grids((*call, (0, weight, None))).image((N, 9, 4, 6), False) is None
    assert grids((*call, (0, torch.ones(9, 8, 3, 3), None))).image((N, 9, 4, 6), False) is not None
    known = ("max_pool2d", "max_pool", (N, 8, 8, 12), (N, 8, 4, 6))
    assert grids(known, (*call, (0, weight, None))).image((N, 9, 4, 6), False) is not None
    own = ("conv2d", "conv", (N, 3, 7, 7), (N, 9, 7, 7), (0, weight, None))
    assert grids(own, side=7).image((N, 9, 7, 7), False) is not None  # of the input


def test_patches_become_tokens():
    for patches in ((N, 3, 4, 2, 2, 5), (N, 3, 4, 5, 2, 2)):
        found = Grids(N, [(N, 5, 6, 8)])
        found.meet("reshape", "", patches, (N, 12, 20))
        assert found.image((N, 12, 7), True).grid == (3, 4)


def test_windows_and_their_heads_are_no_image():
    """As in Hiera, whose tokens are in the order of windows."""
    windows = ("reshape", "", (N * 4, 3, 4, 8), (N, 48, 8))
    stem = ("conv2d", "conv", (N, 3, 24, 32), (N, 8, 6, 8))
    assert grids(stem).image((N, 48, 8), True).grid == (6, 8)
    assert grids(stem, windows).image((N, 48, 8), True) is None
    heads = ("reshape", "", (N, 48, 24), (N, 4, 12, 3, 2, 4)), ("reshape", "", (N, 4, 12, 2, 4), (N, 48, 8))
    pooled = ("view", "", (N, 48, 8), (N, 4, 12, 8)), ("view", "", (N, 12, 8), (N, 4, 3, 8))
    found = grids(stem, windows, *heads, *pooled)
    assert found.image((N, 48, 8), True) is None
    assert found.image((N, 12, 8), True) is None
    assert grids(stem, *heads).image((N, 48, 8), True).grid == (6, 8)


def test_unfolded_windows_are_no_tokens():
    parts = ("unfold", None, (N, 3, 4, 6), (N, 12, 6)), ("reshape", "", (N, 12, 6), (N, 3, 4, 6))
    assert grids(*parts).image((N, 3, 4, 6), True) is None


@pytest.mark.parametrize("call", [
    ("view", "", (N, 5, 6), (N, 5, 2, 3)),
    ("reshape", "", (N, 5, 2, 3), (N, 5, 6)),
    ("conv1d", "conv", (N, 9, 5), (N, 9, 5)),
])  # fmt: skip
def test_words_are_no_positions(call):
    found = Grids(N, [(N, 5, 6)])
    found.meet(*call)
    assert found.image((N, 5, 9), True) is None
    assert found.image((N, 9, 5), False) is None


@pytest.mark.parametrize(
    ("name", "sizes", "given", "expected"),
    [
        ("flip", 4, (-1,), True),
        ("flip", 4, (0, [1, 2]), True),
        ("flip", 4, (1,), False),  # channels
        ("flip", 3, (1,), True),
        ("flip", 4, ([0],), False),
        ("rot90", 4, (2, (2, 3)), True),
        ("roll", 4, (2, 3), False),
    ],
)
def test_what_mirrors_an_image(name, sizes, given, expected):
    assert mirrors(name, (2, 3, 4, 5)[:sizes], given) is expected
