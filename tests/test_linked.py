"""Linked passes: the same maps as a tape's, and a tape for everything that is not simple."""

import dataclasses
import functools
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rectgrad
from networks import NETWORKS
from rectgrad import kernels
from rectgrad.engine import backward as linked_pass
from rectgrad.engine import chains
from rectgrad.engine import request as subject
from rectgrad.engine.recorder import LinkedTape
from rectgrad.kernels import linear_ops as steps
from rectgrad.ops.derivatives import DIRECT

METHODS = ("rectgrad", "rectgrad_prr", "rectgrad_mod", "guided_backprop", "deconv")


@pytest.fixture
def passes(monkeypatch):
    """For every pass that was tried, whether its maps came from links."""
    found = []
    backward = linked_pass.LinkedPass.backward

    def watched(self, *args, **kwargs):
        maps = backward(self, *args, **kwargs)
        found.append("linked")
        return maps

    monkeypatch.setattr(linked_pass.LinkedPass, "backward", watched)
    return found


def by_tape(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(subject, "linked", lambda *_: None)
        return rectgrad.attribute(*args, **kwargs)


def agree(a, b):
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),)
    return all(torch.allclose(x, y, rtol=0, atol=1e-9 * float(y.abs().max())) for x, y in pairs)


# One of them writes on a view, which only a tape follows.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.filterwarnings("ignore:the map of sample", "ignore:Using padding='same'")
def test_same_as_a_tape(name, method, passes, monkeypatch):
    model, inputs = NETWORKS[name](0)
    options = {"q": 60.0} if method.startswith("rectgrad") else {}
    maps = rectgrad.attribute(model, inputs, method, target=0, **options)
    assert bool(passes) == (name not in ("mixer",))
    assert agree(maps, by_tape(monkeypatch, model, inputs, method, target=0, **options))


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "saliency"])
@pytest.mark.parametrize("name", ["plain_cnn", "residual", "mobile"])
@pytest.mark.filterwarnings("ignore:the map of sample")
def test_to_the_last_bit_as_a_record(name, method):
    """A record has a tape: whoever explains a picture with one gets the very same map."""
    model, inputs = NETWORKS[name](0)
    model, inputs = model.float(), inputs.float()
    maps = rectgrad.attribute(model, inputs, method, target=0)
    assert torch.equal(maps, rectgrad.record(model, inputs).attribute(method, target=0))


class Net(nn.Module):
    """conv, `step`, linear: the step is what a test is about."""

    def __init__(self, step):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.step, self.runs = step, 0

    def forward(self, x):
        self.runs += 1
        x = self.step(self, self.conv(x))
        return self.fc(x.mean((2, 3)))


def made(step):
    torch.manual_seed(3)
    return Net(step).double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def relu_then_add(net, x):
    """The record of a ReLU keeps a copy of what is overwritten."""
    y = F.relu(x)
    y += x
    return F.relu(y)


def several(net, x):
    a, b = x.chunk(2, 1)
    values, _ = F.relu(torch.cat([b, a], 1)).reshape(len(x), 4, -1).max(2, keepdim=True)
    return values.unsqueeze(3)


def masked(net, x):
    mask = torch.ones_like(x).cumsum(2) > 2
    return F.relu(x) * mask * (x > -1)


def gated(net, x):
    return F.relu(x) * F.relu6(x + 3) / 6


def normed(net, x):
    weight = net.conv.weight.flatten(1).mean(1)
    return F.relu(F.layer_norm(x, x.shape[1:]) * weight.view(1, -1, 1, 1))


def pooled(net, x):
    y = F.avg_pool2d(F.relu(x), 3, 2, 1, count_include_pad=False)
    z = F.max_pool2d(F.relu(x), (3, 2), 2, 1, ceil_mode=True)[:, :, :3, :3]
    return torch.cat((y, z), -1) + F.adaptive_avg_pool2d(x, 1)


LINKED = [relu_then_add, several, masked, gated, normed, pooled]


@pytest.mark.parametrize("step", LINKED)
@pytest.mark.parametrize("method", METHODS)
def test_linked(step, method, passes, monkeypatch):
    net, x = made(step)
    options = {"q": 50.0} if method.startswith("rectgrad") else {}
    maps = rectgrad.attribute(net, x, method, target=1, **options)
    assert passes
    assert agree(maps, by_tape(monkeypatch, net, x, method, target=1, **options))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, R):
        return -R


def view_written(net, x):
    x[:, :2].relu_()
    return x


def viewed_then_written(net, x):
    left = x[:, :2]
    x.relu_()
    return torch.cat((left, x[:, 2:]), 1)


def through_a_function(net, x):
    return F.relu(Reversed.apply(x))


def without_gradient(net, x):
    with torch.no_grad():
        scale = x.relu().mean()
    return F.relu(x) * scale


def hooked(net, x):
    x.register_hook(lambda R: 2 * R)
    return F.relu(x)


def counted(net, x):
    net.seen += 1
    return F.relu(x) * net.seen


def stored(net, x):
    out = torch.zeros_like(x)
    out[:, :2] = F.relu(x[:, :2])
    return out


def checkpointed(net, x):
    return checkpoint(F.relu, x, use_reentrant=False)


def asked(net, x):
    return F.relu(x) if x.grad_fn is not None else x


def cut(net, x):
    return F.relu(x) + x.detach()


def under_autocast(net, x):
    with torch.autocast("cpu", enabled=True):
        return F.relu(x)


def doubled(x):
    return x * 2 + 1


def scripted(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have it compiled
        return F.relu(torch.jit.script(doubled)(x) + x)


UNLINKED = [
    view_written,
    viewed_then_written,
    through_a_function,
    without_gradient,
    hooked,
    counted,
    stored,
    checkpointed,
    asked,
    cut,
    under_autocast,
]


@pytest.mark.parametrize("step", UNLINKED)
def test_a_tape_for_the_rest(step, passes, monkeypatch):
    net, x = made(step)
    maps = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert not passes
    assert agree(maps, by_tape(monkeypatch, net, x, "rectgrad", target=1, q=50.0))
    assert net.runs == 0
    assert float(net.seen) == 0


def test_a_scripted_part_is_no_constant():
    net, x = made(scripted)
    with pytest.raises(rectgrad.UnsupportedModelError, match="scripted"):
        rectgrad.attribute(net, x)


def test_a_model_that_catches_everything(passes, monkeypatch):
    """What a linked pass raises must not send the model another way."""

    def careful(net, x):
        try:
            return view_written(net, x)
        except BaseException:
            return F.relu(-x)

    net, x = made(careful)
    maps = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert not passes
    other, _ = made(view_written)
    assert agree(maps, by_tape(monkeypatch, other, x, "rectgrad", target=1, q=50.0))

    def target(outputs):
        try:
            return outputs.relu_()[:, 0] if outputs.grad_fn is not None else outputs[:, 1]
        except BaseException:
            return outputs[:, 2]

    net, x = made(relu_then_add)
    maps = rectgrad.attribute(net, x, "guided_backprop", target=target)
    assert agree(maps, by_tape(monkeypatch, net, x, "guided_backprop", target=target))


def test_what_cannot_be_linked_is_tried_once():
    calls = []
    net, x = made(lambda net, x: calls.append(0) or view_written(net, x))
    for _ in range(3):
        rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert len(calls) == 4


def test_a_factor_that_was_overwritten():
    """As torch has it: the derivative of a product needs its factors as they were."""

    def step(net, x):
        factor = F.relu(x)
        y = factor * x
        factor += 1
        return y

    net, x = made(step)
    with pytest.raises(RuntimeError, match="inplace"):
        rectgrad.attribute(net, x, "rectgrad", target=1)


def scaled(norm, weight):
    return weight * norm.scale.reshape(-1, *(1,) * (weight.dim() - 1))


@pytest.fixture
def folding(monkeypatch):
    """Batch norms in the weights, as on a GPU."""
    found = []
    monkeypatch.setattr(chains, "_on_gpu", lambda *weights: found.append(weights) or True)
    monkeypatch.setattr(steps.Scale, "times", scaled)
    return found


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop"])
@pytest.mark.parametrize("name", ["residual", "mobile"])
@pytest.mark.filterwarnings("ignore:the map of sample")
def test_batch_norms_in_the_weights(name, method, folding, passes, monkeypatch):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, method, target=0)
    assert passes
    assert folding
    assert agree(maps, by_tape(monkeypatch, model, inputs, method, target=0))


@pytest.mark.filterwarnings("ignore:the map of sample")
def test_a_rule_around_ours_is_asked_at_every_activation():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Around(rectgrad.RectGrad):
        def rules(self):
            def around(rule):
                @functools.wraps(rule)
                def asked(op, R):
                    seen.append(op.family)
                    return rule(op, R)

                return asked

            return {family: around(rule) for family, rule in super().rules().items()}

    model, inputs = NETWORKS["residual"](0)
    model, inputs = model.float(), inputs.float()
    maps = rectgrad.attribute(model, inputs, Around(q=60.0), target=0)
    assert seen.count("relu") == 5
    assert torch.equal(maps, rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0))


@pytest.mark.parametrize("family", ["conv", "batch_norm"])
def test_somebodys_own_rule_for_a_step_is_asked(family):
    """Also where activation, batch norm and convolution could go back in one call."""
    seen = []

    class Own(rectgrad.RectGrad):
        def rules(self):
            def own(op, R):
                seen.append(op.shape)
                return tuple(2 * grad for grad in op.vjp(R))

            return {**super().rules(), family: own}

    model, inputs = NETWORKS["residual"](0)
    model, inputs = model.float(), inputs.float()
    options = {"q": 80.0, "padding_trick": False}
    maps = rectgrad.attribute(model, inputs, Own(**options), target=0)
    calls = len(seen)
    assert calls == {"conv": 6, "batch_norm": 8}[family]
    recorded = rectgrad.record(model, inputs).attribute(Own(**options), target=0)
    assert len(seen) == 2 * calls
    assert torch.equal(maps, recorded)


@pytest.fixture
def masking(monkeypatch):
    """The padding trick inside the selection, as on a GPU."""
    regions, rectify = [], kernels.rectify

    def masked(*args):
        *args, within = args if len(args) == 9 else (*args, None)
        result = rectify(*args)
        regions.append(within)
        return steps.outside_zeroed(result, within)

    monkeypatch.setenv("RECTGRAD_KERNELS", "portable")
    monkeypatch.setattr(kernels, "masks", lambda a: a.dim() == 4)
    monkeypatch.setattr(kernels, "rectify", masked)
    return regions


@pytest.mark.parametrize("name", ["plain_cnn", "residual", "inception", "strided"])
@pytest.mark.filterwarnings("ignore:the map of sample", "ignore:Using padding='same'")
def test_the_padding_trick_in_the_selection(name, masking, passes, monkeypatch):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0)
    assert passes
    assert any(within is not None for within in masking)
    del masking[:]
    assert agree(maps, by_tape(monkeypatch, model, inputs, "rectgrad", target=0, q=60.0))
    rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0, padding_trick=False)
    assert not any(within is not None for within in masking)


def test_what_is_read_beside_the_activation_is_not_masked(masking, passes, monkeypatch):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            x = self.conv(x)
            return (F.relu(self.last(F.relu(x))) + x).sum((1, 2, 3)).unsqueeze(1)

    torch.manual_seed(0)
    model, x = Beside().double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    maps = rectgrad.attribute(model, x, "rectgrad", target=0, q=50.0)
    assert passes
    assert [within is not None for within in masking] == [True, False]
    assert agree(maps, by_tape(monkeypatch, model, x, "rectgrad", target=0, q=50.0))


def test_what_is_read_beside_the_batch_norm_is_not_scaled(folding, passes, monkeypatch):
    class Twice(nn.Module):
        def __init__(self, beside):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.norm.running_var.fill_(9)
            self.beside = beside

        def forward(self, x):
            x = self.conv(F.relu(x))
            if self.beside:
                return F.relu(self.norm(x)).sum((1, 2, 3)) + x.sum((1, 2, 3))
            self.norm(x)
            return x

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    for beside in (True, False):
        net = Twice(beside).double().eval()
        target = None if beside else (lambda y: y[:, 0].sum((1, 2)))
        maps = rectgrad.attribute(net, x, "guided_backprop", target=target)
        assert agree(maps, by_tape(monkeypatch, net, x, "guided_backprop", target=target))
    assert len(passes) == 2


def test_an_error_of_the_model_is_said_as_it_is(passes):
    def broken(net, x):
        raise KeyError("mine")

    net, x = made(broken)
    with pytest.raises(KeyError, match="mine"):
        rectgrad.attribute(net, x)
    net, x = made(lambda net, x: F.relu(x))
    with pytest.raises(RuntimeError, match="channels"):
        rectgrad.attribute(net, x[:, :2])


def test_a_tensor_of_another_pass_is_no_link(passes, monkeypatch):
    kept = []
    net, x = made(lambda net, x: F.relu(x) + (kept.append(x) or kept[0]))
    first = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert passes
    passes.clear()
    rectgrad.attribute(net, x, "guided_backprop", target=1)
    assert not passes
    assert bool(first.any())


def test_callable_targets_are_linked_too(passes, monkeypatch):
    net, x = made(relu_then_add)

    def target(outputs):
        return F.relu(outputs[:, 1] - outputs[:, 2]) + outputs.exp().sum(1)

    for method in ("rectgrad", "guided_backprop"):
        maps = rectgrad.attribute(net, x, method, target=target)
        assert agree(maps, by_tape(monkeypatch, net, x, method, target=target))
    assert len(passes) == 2


def test_the_targets_own_tensors_stay_as_they_were(passes):
    head = nn.Linear(5, 1).double()

    def target(outputs):
        head.weight.requires_grad_(False)
        head.bias.data = torch.zeros(1, dtype=torch.float64)
        return head(outputs)[:, 0]

    net, x = made(relu_then_add)
    before = head.bias.detach().clone()
    rectgrad.attribute(net, x, "rectgrad", target=target, q=50.0)
    assert not passes
    assert head.weight.requires_grad
    assert torch.equal(head.bias, before)


def test_every_call_in_closed_form_is_met():
    """So that none stands there without a test above."""
    met = set()

    class Watching(LinkedTape):
        def _link(self, op, sources, y):
            met.add(op.name)
            return super()._link(op, sources, y)

    x = torch.randn(2, 4, 6, 6).requires_grad_()
    tape = Watching({})
    tape.enter(x)
    with tape:
        y = torch.cat((x, x), 1)
        torch.concat((x, x)), torch.concatenate((x, x))
        torch.multiply(x, x) * x.mean(1, True), x.sigmoid(), torch.special.expit(x)
        x.transpose(0, 1).swapaxes(1, 2).swapdims(2, 3).permute(3, 2, 1, 0)
        F.pad(x, (1, 1)), torch.constant_pad_nd(x, (1, 1))
        F.avg_pool2d(F.max_pool2d(y, 2), 2), F.adaptive_avg_pool2d(y, 1)
        x.view(2, -1).unflatten(1, (4, 36)), x.reshape(-1).unsqueeze(0).squeeze(0), x.flatten(1)
        x + 1, x.sub(1), torch.subtract(x, 1), 1 - x, x / 2, torch.divide(x, 2), torch.true_divide(x, 2)
        x.tanh(), F.hardsigmoid(x), x.clone()
    assert set(DIRECT) <= met


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat((x, 2 * x), -1),
        lambda x: torch.cat([x, x], dim=1),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 2, stride=(1, 2), dilation=2),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)[0],
        lambda x: F.avg_pool2d(x, (2, 3), padding=1),
        lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=2),
        lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
        lambda x: F.adaptive_avg_pool2d(x, (2, None)),
        lambda x: F.adaptive_avg_pool2d(x, 7) + F.adaptive_avg_pool2d(x, (3, 9)).mean(),
        lambda x: x.permute(0, 2, -1, 1).transpose(1, -1),
        lambda x: x.permute((3, 2, 0, 1)).swapaxes(0, 1),
        lambda x: x * x.mean((2, 3), keepdim=True),
        lambda x: x.mean(1)[:, None] * torch.sigmoid(x),
        lambda x: x.sigmoid().mul(3) * torch.arange(7.0, dtype=x.dtype) + 2 * x.mean(dim=[-1, 0]).sum(),
        lambda x: torch.special.expit(x.mean()) * x * x,
        lambda x: F.pad(x, (1, 2, 0, 3)),
        lambda x: F.pad(x, (1, 2), value=3.0) * x.sum(),
        lambda x: F.pad(x, (1, -2, 2, 1)),
        lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"),
        lambda x: F.pad(x, (0, 1, 2, 3, 4, 5, 1, 0)),
        lambda x: torch.constant_pad_nd(x, (0, 1, 2, 0)),
        lambda x: x.flatten(2).unsqueeze(-1),
        lambda x: (x - torch.arange(7.0, dtype=x.dtype)) / torch.arange(1.0, 8.0, dtype=x.dtype),
        lambda x: (1 - x) + x.mean((2, 3), keepdim=True) - x[:1] * 2,
        lambda x: x.mean(1, keepdim=True) - x.sub(3).subtract(x),
        lambda x: torch.add(x, x.mean(), alpha=3) / 4 + x / (x.abs() + 1),
        lambda x: 2 / (x.exp() + 1) + torch.rsub(x, 2) + (x + 1).divide(3),
        lambda x: torch.div(x, 3) * F.hardsigmoid(x * 2) + x.tanh().clone(),
        lambda x: (x * 3).clone(memory_format=torch.channels_last).tanh() + torch.ones(1, dtype=x.dtype),
        lambda x: x.view(x.shape[0], 2, -1, 7),
        lambda x: x.transpose(1, 2).reshape(len(x), -1, 1, 1),
    ],
)
def test_closed_forms_are_autograds(call):
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    leaf, tape = x.clone().requires_grad_(), LinkedTape({})
    entry = tape.enter(leaf)
    with tape:
        y = call(leaf)
    R = torch.randn_like(y)
    y._rectgrad.R = R
    with torch.no_grad():
        for op in reversed(tape.ops):
            if op.R is not None:
                linked_pass.pass_on(op)
    other = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(other), other, R)
    assert torch.allclose(entry.R, wanted, rtol=1e-12, atol=1e-12)


def test_the_garbage_collector_is_left_alone():
    def seen(net, x):
        states.append(gc.isenabled())
        return F.relu(x)

    states = []
    net, x = made(seen)
    rectgrad.attribute(net, x)
    assert states == [True]
    assert gc.isenabled()
