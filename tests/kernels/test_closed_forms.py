"""Gradients in closed form are autograd's: of every call in CLOSED_FORMS, however it is written."""

import pytest
import torch
import torch.nn.functional as F

from rectgrad.engine.recorder import Recorder
from rectgrad.kernels.closed_forms import CLOSED_FORMS

WEIGHT = torch.linspace(-1, 2, 7, dtype=torch.float64)
BIAS = torch.linspace(1, 3, 7, dtype=torch.float64)
COMPLEX = torch.complex(WEIGHT, BIAS)
MATRIX = torch.linspace(-2, 2, 42, dtype=torch.float64).reshape(7, 6)

CALLS = [
    # joined, pooled
    lambda x: torch.cat((x, 2 * x), -1),
    lambda x: torch.cat([x, x], dim=1),
    lambda x: torch.concat((x, x)) + torch.concatenate((x, 2 * x)),
    lambda x: F.max_pool2d(x, 3, 2, 1),
    lambda x: F.max_pool2d(x, 2, stride=(1, 2), dilation=2),
    lambda x: F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)[0],
    lambda x: F.avg_pool2d(x, (2, 3), padding=1),
    lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=2),
    lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
    lambda x: F.adaptive_avg_pool2d(x, (2, None)),
    lambda x: F.adaptive_avg_pool2d(x, 7) + F.adaptive_avg_pool2d(x, (3, 9)).mean(),
    # another shape or order
    lambda x: x.permute(0, 2, -1, 1).transpose(1, -1),
    lambda x: x.permute((3, 2, 0, 1)).swapaxes(0, 1).swapdims(2, -1),
    lambda x: F.pad(x, (1, 2, 0, 3)),
    lambda x: F.pad(x, (1, 2), value=3.0) * x.sum(),
    lambda x: F.pad(x, (1, -2, 2, 1)),
    lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"),
    lambda x: F.pad(x, (0, 1, 2, 3, 4, 5, 1, 0)),
    lambda x: torch.constant_pad_nd(x, (0, 1, 2, 0)),
    lambda x: x.flatten(2).unsqueeze(-1).squeeze(-1).unflatten(1, (2, 2)),
    lambda x: x.contiguous().view(x.shape[0], 2, -1, 7),
    lambda x: x.transpose(1, 2).reshape(len(x), -1, 1, 1),
    # sums and products
    lambda x: x * x.mean((2, 3), keepdim=True),
    lambda x: x.mean(1)[:, None] * torch.sigmoid(x),
    lambda x: x.sigmoid().mul(3) * torch.arange(7.0, dtype=x.dtype) + 2 * x.mean(dim=[-1, 0]).sum(),
    lambda x: torch.special.expit(x.mean()) * x * x,
    lambda x: torch.multiply(x, x[:1, :, :1]),
    lambda x: (x - torch.arange(7.0, dtype=x.dtype)) / torch.arange(1.0, 8.0, dtype=x.dtype),
    lambda x: (1 - x) + x.mean((2, 3), keepdim=True) - x[:1] * 2,
    lambda x: x.mean(1, keepdim=True) - x.sub(3).subtract(x),
    lambda x: torch.add(x, x.mean(), alpha=3) / 4 + x / (x.abs() + 1),
    lambda x: 2 / (x.exp() + 1) + torch.rsub(x, 2) + (x + 1).divide(3),
    lambda x: torch.div(x, 3) * F.hardsigmoid(x * 2) + x.tanh().clone(),
    lambda x: torch.true_divide(x, 3) + torch.div(x, 2, rounding_mode=None),
    lambda x: (x * 3).clone(memory_format=torch.channels_last).tanh() + torch.ones(1, dtype=x.dtype),
    lambda x: (x * 2j + x.exp()).abs() + ((x + 1j) / (2 - 1j)).abs() + (1j - x.exp() * x).angle(),
    lambda x: (1j * x.relu() - x).angle() + torch.rsub(x.exp(), 2j).abs(),
    lambda x: x.sum(1),
    lambda x: x.sum((1, -1), keepdim=True) * x,
    lambda x: torch.sum(x, [0, 2], True) - x.sum(-1, keepdim=True),
    lambda x: x.sum() * x.sum(dim=2).sum(dim=(0,)),
    lambda x: x.sum(axis=1) + x.sum(1, dtype=torch.float64),
    lambda x: x.sum().sum(0) + x.mean().mean(-1) + x.sum(()),
    # activations
    lambda x: F.relu(input=x) + F.relu(x) + x.relu(),
    lambda x: F.relu6(x) + F.relu6(2 * x),
    lambda x: F.hardtanh(x, 0.0, 6.0) + x.clamp(0, 6) + x.clamp(min=0),
    lambda x: F.silu(x) + torch.nn.SiLU()(x),
    lambda x: F.gelu(x),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.gelu(x, approximate="none") + torch.nn.GELU("tanh")(x),
    lambda x: F.hardswish(x) + F.hardswish(3 * x),
    lambda x: F.mish(x),
    # softmax and norms
    lambda x: F.softmax(x, 1),
    lambda x: x.softmax(dim=-1) * torch.softmax(x, 2),
    lambda x: torch._softmax(x, 1, False) + F.softmax(x, -1, dtype=torch.float64),
    lambda x: F.log_softmax(x, 1) + F.softmin(x, 1),
    lambda x: F.layer_norm(x, (7,)),
    lambda x: F.layer_norm(x, (7, 7), eps=0.1),
    lambda x: F.layer_norm(x, [7], WEIGHT),
    lambda x: F.layer_norm(x, (7,), WEIGHT, BIAS, 0.01),
    lambda x: F.layer_norm(x, (7,), bias=BIAS),
    lambda x: torch.layer_norm(x, (7,), WEIGHT, BIAS),
    lambda x: F.layer_norm(x.permute(0, 3, 1, 2), (4, 7)).permute(0, 2, 3, 1),
    lambda x: F.layer_norm(x.transpose(-1, -2), (7,), WEIGHT).mean(1),
    lambda x: F.layer_norm(x, (7,), x.mean((0, 1, 2)), BIAS),
    # matrix products
    lambda x: x @ x,
    lambda x: x @ x.transpose(-2, -1),
    lambda x: x @ MATRIX,
    lambda x: MATRIX.T @ x,
    lambda x: torch.matmul(x, x[:1, :1]),
    lambda x: torch.matmul(x[0, 0], x) + x.matmul(other=MATRIX[:, :1]),
    lambda x: x @ x[0, 0, 0],
    lambda x: torch.bmm(x[0], x[1]) + x[1].bmm(x[1]),
    lambda x: torch.mm(x[0, 0], x[1, 2]) @ MATRIX,
    lambda x: torch.mm(MATRIX.T, x[0, 1]) + x[0, 0].mm(MATRIX).T,
    # complex numbers
    lambda x: torch.view_as_real(torch.fft.fft(x) * COMPLEX * torch.fft.fft(x)),
    lambda x: torch.view_as_real(torch.fft.fft(x) / COMPLEX @ COMPLEX.diag() * 2j),
    # parts
    lambda x: x[0],
    lambda x: x[:, 1:3] + x[:, -1:],
    lambda x: x[..., ::2],
    lambda x: x[:, None, 0, 1:],
    lambda x: x[0, 1, 2] * x[-1, :, 2:5, 0].sum(),
    lambda x: x[1, 3, 6, 6] + x[:, :, 2:2].sum(),
    lambda x: x[[1, 0]] + x[torch.tensor([0, 1]), 2].unsqueeze(1),
    lambda x: x[x > 0] * 2,
    lambda x: x[True] + x[None],
    lambda x: x[:, torch.tensor(1) : 3] * x[()][:, :2],
]


def recorded(call, x):
    """The result of a call on a recorder, the recorder, and the op of x."""
    recorder = Recorder({})
    entry = recorder.enter(x)
    with recorder:
        y = call(x)
    return y, recorder, entry


def values():
    """Random ones, and those where a derivative jumps."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    x[0, 0, :2, :6] = torch.tensor([[0.0, 6, -3, 3, -6, 1], [-0.0, 2, 1.5, 8, -1, 3]])
    return x


def same_gradient(call, x, tolerance=1e-12):
    leaf = x.clone().requires_grad_()
    y, recorder, entry = recorded(call, leaf)
    for R in (torch.randn_like(y).detach(), torch.randn((), dtype=y.dtype).expand(y.shape)):
        arrived = {y._rectgrad: R}
        with torch.no_grad():
            for op in reversed(recorder.ops):
                if op is entry or op not in arrived:
                    continue
                for source, grad in zip(op.sources, op.vjp(arrived.pop(op)), strict=True):
                    if grad is not None:
                        arrived[source] = arrived[source] + grad if source in arrived else grad
        other = x.clone().requires_grad_()
        result = call(other)
        assert torch.equal(y, result)
        (wanted,) = torch.autograd.grad(result, other, R)
        found = arrived[entry]
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_is_autograds(call):
    same_gradient(call, values())


@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_of_a_strided_tensor_is_autograds(call):
    torch.manual_seed(1)
    storage = torch.randn(2, 7, 7, 8, dtype=torch.float64)
    same_gradient(lambda x: call(x.permute(0, 3, 1, 2)[:, ::2]), storage)


def test_every_call_in_closed_form_is_met():
    """So that none is without a test above."""
    met = set()
    for call in CALLS:
        _, recorder, _ = recorded(call, values().requires_grad_())
        met |= {op.name for op in recorder.ops if op.back is not None}
    assert set(CLOSED_FORMS) <= met


def test_a_closed_form_holds_no_more_than_it_reads():
    """Neither the input of a shape change, nor a graph."""
    for call in (lambda x: x.reshape(2, -1), lambda x: x[:, 0], lambda x: x.sum(1), lambda x: x + 1):
        _, recorder, _ = recorded(call, values().requires_grad_())
        (op,) = recorder.ops[1:]
        assert op.needed == ()
        assert op._local is None
        assert op._leaves == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.gelu(x) + F.silu(x),
        lambda x: F.softmax(x, -1),
        lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
        lambda x: F.layer_norm(x, (7,), WEIGHT.to(x.dtype)),
        lambda x: x @ x.transpose(1, 2).transpose(1, 2),
        lambda x: x.sum((2, 3)) + x.sum((2, 3), dtype=torch.float32).to(x.dtype),
        lambda x: x[:, 1] * x.mean(1),
    ],
)
def test_half_types(call, dtype):
    same_gradient(call, values().to(dtype), tolerance=torch.finfo(dtype).eps)
