"""Gradients of linear ops against torch's, from tensors and from the few units that passed."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rectgrad
from native_levels import LEVELS, LIBRARY, close, library, needs_native
from rectgrad.kernels import linear_ops, native
from rectgrad.kernels.linear_ops import AvgPool, Conv, Linear, Scale, outside_zeroed
from rectgrad.kernels.native import Native
from rectgrad.kernels.sparse import Sparse, dense


def passed(R, level):
    """The units of R that are not zero: a `Sparse` if they are few."""
    return Native(library(level)).rectify(torch.ones_like(R), R, len(R), None, 0.0, "PR2", [])


def thinned(R, share):
    return R * (torch.rand(R.shape) < share)


def torchs(call, x, R):
    """Autograd's gradient."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(x), x, R)
    return grad


def agrees(found, R, wanted):
    """The gradient is torch's, and came from lists if R has some."""
    grad, path = found
    assert path == ("sparse" if isinstance(R, Sparse) else "dense")
    close(dense(grad), wanted)


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from([1, 2, 2, 2]))
    kernel = tuple(draw(st.sampled_from([1, 1, 2, 3, 3, 5, 7])) for _ in range(dims))
    if draw(st.booleans()):
        kernel = (kernel[0],) * dims
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    per_group = draw(st.sampled_from([1, 1, 2, 3, 8, 16, 17, 33]))
    out = groups * draw(st.sampled_from([1, 1, 2, 5, 18]))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(dims))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(dims))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(low, low + 24)) for low in least)
    torch.manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(draw(st.integers(1, 3)), groups * per_group, *size)
    weight = torch.randn(out, per_group, *kernel)
    return x, weight, (stride, padding, dilation, groups)


def convolution(x, weight, given):
    """The call, and its op."""
    call = F.conv1d if x.dim() == 3 else F.conv2d
    return lambda x: call(x, weight, None, *given), Conv(x, weight, given)


def check_conv(x, weight, given, share, level, scale=None, within=None):
    call, conv = convolution(x, weight, given)
    R = thinned(torch.randn_like(call(x)), share)
    few = passed(R, level)
    if scale is not None:
        R = R * scale.reshape(1, -1, *(1,) * (R.dim() - 2))
        few = few.scaled(scale) if isinstance(few, Sparse) else R
    wanted = torchs(call, x, outside_zeroed(R, within))
    agrees(conv.gradient(few, within), few, wanted)
    agrees(conv.gradient(R, within), R, wanted)


@needs_native
@settings(max_examples=400, deadline=None)
@given(
    conv=convolutions(),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.6]),
    level=st.sampled_from(LEVELS or ["base"]),
    scaled=st.booleans(),
    data=st.data(),
)
def test_convolutions_of_every_shape(conv, share, level, scaled, data):
    x, weight, given = conv
    within = None
    if data.draw(st.booleans()):
        size = convolution(x, weight, given)[0](x).shape[2:]
        firsts = [data.draw(st.integers(0, n - 1)) for n in size]
        within = tuple((i, data.draw(st.integers(i + 1, n))) for i, n in zip(firsts, size, strict=True))
    scale = torch.randn(len(weight)) if scaled else None
    check_conv(*conv, share, level, scale, within)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("channels", "size", "out", "kernel", "stride", "padding", "groups"),
    [
        (3, 224, 64, 7, 2, 3, 1),
        (64, 112, 32, 3, 1, 1, 1),
        (70, 150, 20, 3, 2, 1, 1),
        (130, 120, 24, 1, 1, 0, 1),
        (96, 112, 96, 3, 2, 1, 96),
        (40, 61, 40, 5, 1, 2, 40),
        (32, 300, 4, 5, 1, 2, 2),
    ],
)
def test_layers_cut_into_several_tiles(level, channels, size, out, kernel, stride, padding, groups):
    torch.manual_seed(0)
    x, weight = torch.randn(2, channels, size, size), torch.randn(out, channels // groups, kernel, kernel)
    check_conv(x, weight, (stride, padding, 1, groups), 0.02, level)


@pytest.mark.parametrize("given", [(2, 1, 1, 1), ([2, 1], [1, 0], [1, 2], 1), (None, "valid", None, None)])
def test_arguments_as_calls_write_them(given):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    plain = tuple(default if value is None else value for value, default in zip(given, (1, 0, 1, 1)))  # noqa: B905
    R = torch.randn_like(F.conv2d(x, weight, None, *plain))
    agrees(Conv(x, weight, given).gradient(R), R, torchs(lambda x: F.conv2d(x, weight, None, *plain), x, R))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_a_convolution_has_the_layout_of_its_input(layout, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8).to(dtype).to(memory_format=layout)
    weight = torch.randn(6, 4, 3, 3).to(dtype)
    R = torch.randn_like(F.conv2d(x, weight))
    grad, _ = Conv(x, weight, (1, 0, 1, 1)).gradient(R)
    assert torch.equal(grad, torchs(lambda x: F.conv2d(x, weight), x, R))
    assert grad.is_contiguous(memory_format=layout)


def test_three_dimensions():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5, 6, 7), torch.randn(4, 3, 3, 3, 3)
    R = torch.randn_like(F.conv3d(x, weight, None, 2, 1))
    agrees(
        Conv(x, weight, (2, 1, 1, 1)).gradient(R), R, torchs(lambda x: F.conv3d(x, weight, None, 2, 1), x, R)
    )


@needs_native
@settings(max_examples=100, deadline=None)
@given(
    positions=st.sampled_from([(), (1,), (5,), (197,), (3, 70)]),
    inputs=st.sampled_from([1, 7, 64, 128, 129, 300]),
    outputs=st.sampled_from([1, 10, 77]),
    share=st.sampled_from([0.0, 0.02, 0.2]),
    level=st.sampled_from(LEVELS or ["base"]),
)
def test_linear_layers(positions, inputs, outputs, share, level):
    x, weight = torch.randn(3, *positions, inputs), torch.randn(outputs, inputs)
    linear = Linear(x, weight)
    R = thinned(torch.randn_like(F.linear(x, weight)), share)
    few = passed(R, level)
    wanted = torchs(lambda x: F.linear(x, weight), x, R)
    agrees(linear.gradient(few), few, wanted)
    agrees(linear.gradient(R), R, wanted)


def negated(x):
    """The same values, stored with the other sign and a bit that says so."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg()
    return lazy


@needs_native
def test_weights_with_a_negative_bit():
    """Kernels read the memory as it is."""
    torch.manual_seed(0)
    x, weight, matrix = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3), torch.randn(5, 9)
    R = thinned(torch.randn(2, 6, 7, 7), 0.1)
    wanted = torchs(lambda x: F.conv2d(x, weight), x, R)
    for each in (passed(R, LIBRARY.level), negated(R), passed(negated(R), LIBRARY.level)):
        close(Conv(x, negated(weight), (1, 0, 1, 1)).gradient(each)[0], wanted)
        close(Conv(x, weight, (1, 0, 1, 1)).gradient(each)[0], wanted)
    R = thinned(torch.randn(2, 4, 9, 5), 0.1)
    wanted = torchs(lambda x: F.linear(x, matrix), x, R)
    for each in (passed(R, LIBRARY.level), negated(R)):
        close(Linear(x, negated(matrix)).gradient(each)[0], wanted)
    variance, factor = torch.rand(4) + 0.1, torch.randn(4)
    R = thinned(torch.randn_like(x), 0.1)
    wanted = R * (factor / (variance + 1e-3).sqrt()).reshape(1, -1, 1, 1)
    for each in (passed(R, LIBRARY.level), R, negated(R)):
        close(dense(Scale(negated(variance), factor, 1e-3, torch.float32).gradient(each)[0]), wanted)
        close(dense(Scale(variance, negated(factor), 1e-3, torch.float32).gradient(each)[0]), wanted)


@needs_native
def test_average_pooling_of_a_gradient_with_a_negative_bit():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    y = F.avg_pool2d(x, 2)
    R = torch.randn_like(y)
    grad, _ = AvgPool(x, 2, None, 0, True).gradient(negated(R))
    close(grad, torchs(lambda x: F.avg_pool2d(x, 2), x, R))


@pytest.mark.parametrize("kind", ["conv", "linear", "scale"])
def test_a_weight_that_was_modified(kind):
    """Its gradient would be that of other weights."""
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(4, 4, 1, 1)
    op = {
        "conv": lambda: Conv(x, weight, (1, 0, 1, 1)),
        "linear": lambda: Linear(x, weight[:, :, 0, 0]),
        "scale": lambda: Scale(torch.ones(4), weight[:, 0, 0, 0], 1e-3, torch.float32),
    }[kind]()
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        op.gradient(torch.randn(2, 4, 9, 4 if kind == "linear" else 9))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "expanded", "slice", "channels last"])
def test_batch_norms(weighted, dtype, layout):
    """Those that use their running statistics; torch's own gradient in double precision is the truth."""
    torch.manual_seed(0)
    x, variance = torch.randn(1, 6, 5, 5, dtype=dtype), torch.rand(6, dtype=dtype) + 0.1
    factor = torch.randn(6, dtype=dtype) if weighted else None
    R = torch.randn(1, 12, 5, 5, dtype=dtype)
    R = {
        "plain": R[:, :6].contiguous(),
        "expanded": R[:, :6, :1, :1].expand(1, 6, 5, 5),
        "slice": R[:, ::2],
        "channels last": R[:, :6].to(memory_format=torch.channels_last),
    }[layout]

    def call(x):
        weight = None if factor is None else factor.double()
        return F.batch_norm(x, torch.zeros(6).double(), variance.double(), weight, eps=1e-3)

    wanted = torchs(call, x.double(), R.double().contiguous())
    grad, path = Scale(variance, factor, 1e-3, dtype).gradient(R)
    assert path == "dense"
    assert grad.dtype is dtype
    assert (grad.double() - wanted).abs().max() <= 4 * torch.finfo(dtype).eps * wanted.abs().max()


@needs_native
@pytest.mark.parametrize("weighted", [True, False])
def test_batch_norms_of_lists(weighted):
    torch.manual_seed(0)
    R, variance = thinned(torch.randn(2, 6, 5, 5), 0.1), torch.rand(6) + 0.1
    factor = torch.randn(6) if weighted else None
    scale = Scale(variance, factor, 1e-3, torch.float32)
    few = passed(R, LIBRARY.level)
    grad, path = scale.gradient(few)
    assert isinstance(grad, Sparse)
    assert path == "sparse"
    close(dense(grad), scale.gradient(R)[0])
    assert torch.equal(dense(few), R)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 7), (3, 4, 9, 11), (1, 64, 40, 40), (2, 0, 3), (0, 3, 4)])
def test_a_dense_gradient_times_a_scale(shape, level):
    """One pass, and rounded as often as in two."""
    torch.manual_seed(0)
    R, variance, factor = torch.randn(shape), torch.rand(shape[1]) * 3, torch.randn(shape[1])
    by = (1, -1, *(1,) * (len(shape) - 2))
    inverse = (variance.double() + 1e-3).rsqrt().float().reshape(by)
    with mock.patch.object(native, "load", return_value=library(level)):
        assert torch.equal(native.scaled(R, variance, None, 1e-3), R * inverse)
        expected = (R * inverse).mul_(factor.reshape(by))
        assert torch.equal(native.scaled(R, variance, factor, 1e-3), expected)


@needs_native
@settings(max_examples=200, deadline=None)
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    padded=st.booleans(),
    level=st.sampled_from(LEVELS or ["base"]),
)
def test_average_pooling(size, kernel, stride, padding, padded, level):
    assume(all(2 * p <= k <= n + 2 * p for n, k, p in zip(size, kernel, padding, strict=True)))
    x = torch.randn(2, 3, *size)
    y = F.avg_pool2d(x, kernel, stride, padding, False, padded)
    R = torch.randn_like(y)
    with mock.patch.object(native, "load", return_value=library(level)):
        grad, _ = AvgPool(x, kernel, stride, padding, padded).gradient(R)
    close(grad, torchs(lambda x: F.avg_pool2d(x, kernel, stride, padding, False, padded), x, R))


@needs_native
@pytest.mark.parametrize("seed", range(10))
def test_average_pooling_of_a_gradient_that_is_not_dense(seed):
    """It is copied, and the copy is there until it was read."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(64, 5),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 34, 34)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_KERNELS", "portable")
        expected = rectgrad.attribute(model, x, target=1, q=50.0)
    close(rectgrad.attribute(model, x, target=1, q=50.0), expected)


@settings(deadline=None)
@given(data=st.data())
def test_a_transposed_convolution_is_the_gradient(data):
    """As CUDA devices compute it: whatever the windows leave over."""
    numbers = data.draw(st.tuples(*[st.integers(1, 4)] * 4, st.integers(0, 3), st.integers(1, 9)))
    kernel, stride, dilation, channels, padding, room = numbers
    size = max(1, dilation * (kernel - 1) + room - 2 * padding)
    if size + 2 * padding <= dilation * (kernel - 1):
        return
    x = torch.randn(2, 3, size, dtype=torch.float64)
    weight = torch.randn(channels, 3, kernel, dtype=torch.float64)
    y = F.conv1d(x, weight, None, stride, padding, dilation)
    windows = linear_ops.geometry((kernel,), stride, padding, dilation, 1)
    left = linear_ops._left_over((size,), tuple(y.shape[2:]), windows)
    R = torch.randn_like(y)
    wanted = torchs(lambda x: F.conv1d(x, weight, None, stride, padding, dilation), x, R)
    found = linear_ops._TRANSPOSED[1](
        R, weight, None, windows.stride, windows.padding, left, 1, windows.dilation
    )
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted)


def test_a_region_does_not_hide_what_is_not_finite():
    inside = outside_zeroed(torch.ones(1, 1, 4, 4), ((1, 3), (0, 4)))
    assert torch.equal(inside[0, 0, :, 0], torch.tensor([0.0, 1, 1, 0]))
    assert outside_zeroed(torch.full((1, 1, 4, 4), torch.inf), ((1, 3), (1, 3))).isnan().any()
