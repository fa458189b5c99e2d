"""Single rules on hand-made layers: the padding trick and PRR, window by window, in 1 to 3 dimensions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rectgrad
from rectgrad.rules import masked_padding, proportional_pooling


def gradient(rules, forward, x, R=None):
    """What arrives at x when R (ones) goes back through `forward`."""
    x = x.clone().requires_grad_()
    with rectgrad.propagate(rules):
        y = forward(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y) if R is None else R)
    return grad


def passed_positions(conv, x):
    """Output positions (of one map) at which gradient goes back through `conv` under the padding trick."""
    size = conv(x).shape[2:]
    passed = torch.zeros(size, dtype=torch.bool)
    for where in torch.cartesian_prod(*(torch.arange(s) for s in size)).reshape(-1, len(size)):
        R = torch.zeros(1, 1, *size, dtype=x.dtype)
        R[(0, 0, *where)] = 1
        passed[tuple(where)] = bool(gradient({"conv": masked_padding()}, conv, x, R).any())
    return passed


def reads_padding(dims, size, kernel, stride, padding, dilation):
    """The same by definition: push zeros and ones through, and see which windows lost an element."""
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    weight = torch.ones(1, 1, *(kernel,) * dims, dtype=torch.float64)
    seen = conv(
        torch.ones(1, 1, *(size,) * dims, dtype=torch.float64),
        weight,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    return (seen < kernel**dims)[0, 0]


@settings(max_examples=200, deadline=None)
@given(
    dims=st.integers(1, 2),
    size=st.integers(3, 8),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_padding_trick_zeroes_exactly_the_windows_that_saw_padding(
    dims, size, kernel, stride, padding, dilation
):
    if size + 2 * padding < dilation * (kernel - 1) + 1:
        return
    mask = reads_padding(dims, size, kernel, stride, padding, dilation)
    weight = torch.rand(1, 1, *(kernel,) * dims, dtype=torch.float64) + 0.5
    conv = (F.conv1d, F.conv2d)[dims - 1]
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    x = torch.ones(1, 1, *(size,) * dims, dtype=torch.float64)
    kept = torch.ones_like(mask) if mask.all() else ~mask
    R = torch.rand(1, 1, *mask.shape, dtype=torch.float64)
    masked = gradient({"conv": masked_padding()}, lambda x: conv(x, weight, **options), x, R)
    expected = gradient({}, lambda x: conv(x, weight, **options), x, R * kept)
    assert torch.equal(masked, expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_own_padding_same_padding_and_separate_padding_agree(dims):
    """3 wide, stride 1: one pixel all round, however the padding is written; the parts add up."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    torch.manual_seed(dims)
    own = conv(1, 1, 3, padding=1, bias=False).double()
    same, bare = (conv(1, 1, 3, padding=p, bias=False).double() for p in ("same", 0))
    wide, half = conv(1, 1, 5, padding=2, bias=False).double(), conv(1, 1, 5, padding=1, bias=False).double()
    for other in (same, bare):
        other.load_state_dict(own.state_dict())
    half.load_state_dict(wide.state_dict())
    x = torch.randn(1, 1, *(7,) * dims, dtype=torch.float64)
    pads = (1, 1) * dims
    inner = torch.ones((7,) * dims, dtype=torch.bool)
    for d in range(dims):
        inner &= ((torch.arange(7) > 0) & (torch.arange(7) < 6)).reshape(
            [-1 if i == d else 1 for i in range(dims)]
        )
    assert torch.equal(passed_positions(own, x), inner)
    rules = {"conv": masked_padding(), "pad": lambda op, R: op.vjp(R)}
    expected = gradient(rules, own, x)
    assert torch.equal(gradient(rules, same, x), expected)
    assert torch.allclose(gradient(rules, lambda x: bare(F.pad(x, pads)), x), expected, atol=1e-14)
    zero_pad = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)[dims - 1](1)
    assert torch.allclose(gradient(rules, lambda x: bare(zero_pad(x)), x), expected, atol=1e-14)
    added_up = gradient(rules, lambda x: half(F.pad(x, pads)), x)
    assert torch.allclose(added_up, gradient(rules, wide, x), atol=1e-14)


@pytest.mark.filterwarnings("ignore:no rule will act")
def test_what_does_not_count_as_zero_padding():
    """Reflection, cropping, padding by another value, padding of channels, transposed convolutions."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, bias=False).double()
    reflecting = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect", bias=False).double()
    transposed = nn.ConvTranspose2d(2, 2, 3, padding=1).double()
    x = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    one = torch.randn(1, 1, 7, 7, dtype=torch.float64)
    rules = {"conv": masked_padding(), "pad": lambda op, R: op.vjp(R)}
    plain = [
        (reflecting, x),
        (transposed, x),
        (lambda x: conv(F.pad(x, (-1, -1, -1, -1))), x),
        (lambda x: conv(F.pad(x, (1, 1, 1, 1), value=0.5)), x),
        (lambda x: conv(F.pad(x, (0, 0, 0, 0, 0, 1))), one),
        (lambda x: conv(F.pad(x, (1, 1, 1, 1)).relu()), x),
    ]
    for forward, given_x in plain:
        assert torch.equal(gradient(rules, forward, given_x), gradient({}, forward, given_x))


def test_one_sided_padding_masks_one_side():
    """TensorFlow's "same" for a strided convolution pads the far side only."""
    conv = nn.Conv2d(1, 1, 3, stride=2, bias=False).double()
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    rules = {"conv": masked_padding(), "pad": lambda op, R: op.vjp(R)}
    R = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    inside = R.clone()
    inside[..., 3, :] = inside[..., :, 3] = 0

    def forward(x):
        return conv(F.pad(x, (0, 1, 0, 1)))

    assert torch.equal(gradient(rules, forward, x, R), gradient({}, forward, x, inside))


IMAGE, KERNEL = (
    torch.arange(49.0).reshape(1, 1, 7, 7).double().cos(),
    torch.arange(9.0).reshape(1, 1, 3, 3).double(),
)
FROM_THE_INPUT = {  # convolutions with a kernel or a bias that depends on the input
    "kernel": lambda x: F.conv2d(x, x.mean() * KERNEL, padding=1),
    "kernel_same": lambda x: F.conv2d(x, x.mean() * KERNEL, padding="same"),
    "kernel_of_padded": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), x.mean() * KERNEL),
    "kernel_by_name": lambda x: F.conv2d(weight=x.mean() * KERNEL, input=x, padding=1),
    "padded_kernel": lambda x: F.conv2d(x, F.pad(x.mean() * KERNEL[..., 1:2], (1, 1)), padding=1),
    "kernel_of_a_constant": lambda x: F.conv2d(IMAGE, x.mean() * KERNEL, padding=1),
    "bias_of_a_constant": lambda x: F.conv2d(IMAGE, KERNEL, x.mean((0, 2, 3)), padding=1),
}


@pytest.mark.parametrize("name", FROM_THE_INPUT)
def test_the_padding_is_that_of_the_image_whatever_depends_on_the_input(name):
    """One pixel all round, also for dynamic filters, recorded or over the bridge."""
    forward, R = FROM_THE_INPUT[name], torch.linspace(-1, 2, 49, dtype=torch.float64).reshape(1, 1, 7, 7)
    x, inside = IMAGE.sin() + 1, torch.zeros_like(R)
    inside[..., 1:-1, 1:-1] = R[..., 1:-1, 1:-1]
    expected = gradient({}, forward, x, inside)
    rules = {"conv": masked_padding(), "pad": lambda op, R: op.vjp(R)}
    assert torch.allclose(gradient(rules, forward, x, R), expected, atol=1e-12)
    everything = rectgrad.RectGrad(tau=-1e30, multiply_by_input=False, positive_only=False)
    found = rectgrad.attribute(
        lambda x: (forward(x) + 1e3).relu(), x, everything, lambda y: (y * R).sum((1, 2, 3))
    )
    assert torch.allclose(found, expected, atol=1e-12)


def test_a_mask_that_would_leave_nothing_is_not_applied():
    conv = nn.Conv2d(1, 1, 5, padding=2).double()
    x = torch.randn(1, 1, 2, 2, dtype=torch.float64)
    assert torch.equal(gradient({"conv": masked_padding()}, conv, x), gradient({}, conv, x))


def shared_by_hand(x, R, windows):
    """R * x / (sum of the window + count * 1e-10) for each element; windows add up. 1d, one channel."""
    grad = torch.zeros_like(x)
    for r, window in zip(R.flatten(), windows, strict=True):
        total = sum(x[0, 0, i] for i in window)
        for i in window:
            grad[0, 0, i] += r * x[0, 0, i] / (total + len(window) * 1e-10)
    return grad


@pytest.mark.parametrize(
    ("forward", "windows"),
    [
        (lambda x: F.max_pool1d(x, 2), [(0, 1), (2, 3), (4, 5)]),
        (lambda x: F.max_pool1d(x, 3, stride=2), [(0, 1, 2), (2, 3, 4), (4, 5, 6)]),
        (lambda x: F.max_pool1d(x, 3, stride=2, padding=1), [(0, 1), (1, 2, 3), (3, 4, 5), (5, 6)]),
        (lambda x: F.max_pool1d(x, 2, ceil_mode=True), [(0, 1), (2, 3), (4, 5), (6,)]),
        (lambda x: F.max_pool1d(x, 2, dilation=3, stride=1), [(0, 3), (1, 4), (2, 5), (3, 6)]),
        (lambda x: F.adaptive_max_pool1d(x, 3), [(0, 1, 2), (2, 3, 4), (4, 5, 6)]),
        (lambda x: F.max_pool1d(x, 2, return_indices=True)[0], [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_prr_shares_in_proportion(forward, windows):
    x = torch.tensor([[[3.0, 1, 0, 0, 2, 5, 4]]], dtype=torch.float64)
    R = torch.arange(1.0, len(windows) + 1, dtype=torch.float64).reshape(1, 1, -1)
    shared = gradient({"max_pool": proportional_pooling()}, forward, x, R)
    assert torch.allclose(shared, shared_by_hand(x, R, windows), rtol=1e-12)


def test_prr_keeps_what_arrives_and_leaves_dead_windows_out():
    x = torch.rand(2, 3, 9, 9, dtype=torch.float64)
    x[0, 0] = 0
    R = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    shared = gradient({"max_pool": proportional_pooling()}, lambda x: F.max_pool2d(x, 3, 2), x, R)
    assert not shared[0, 0].any()
    sums, arriving = shared.sum((2, 3)), R.sum((2, 3))
    arriving[0, 0] = 0
    assert torch.allclose(sums, arriving, rtol=1e-8)


def test_prr_on_a_negative_window_is_max_pooling():
    x = torch.tensor([[[-3.0, 1, 2, 1]]], dtype=torch.float64)
    shared = gradient({"max_pool": proportional_pooling()}, lambda x: F.max_pool1d(x, 2), x)
    assert torch.allclose(shared, torch.tensor([[[0.0, 1, 2 / 3, 1 / 3]]], dtype=torch.float64), atol=1e-9)


def test_a_rule_reads_the_output_as_it_was_before_it_was_overwritten():
    """An in-place step after a recorded op does not change what the op's rule sees."""
    seen = []

    def spy(op, R):
        seen.append((op.inputs[0].clone(), op.output.clone()))
        return op.vjp(R)

    x = torch.randn(2, 4, dtype=torch.float64)
    linear = nn.Linear(4, 4).double()

    def forward(x):
        y = linear(x)
        z = y.tanh()
        y.mul_(3)
        y += 1
        F.relu(y, inplace=True)
        return y + z

    gradient({"linear": spy}, forward, x)
    assert torch.equal(seen[0][0], x)
    assert torch.equal(seen[0][1], linear(x).detach())
