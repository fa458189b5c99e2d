"""What the recorder cannot link goes to the bridge, is tried once, and leaves nothing behind."""

import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rectgrad
from passes import METHODS, agree, bridging, by_bridge, made, relu_then_add, view_written


class Reversed(torch.autograd.Function):
    """Linear, with a gradient of its own and a name that autograd's nodes have too."""

    @staticmethod
    def forward(ctx, x):
        ctx.name = "reversed"
        return x

    @staticmethod
    def backward(ctx, R):
        return -R


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


def stored(net, x):
    out = torch.zeros_like(x)
    out[:, :2] = F.relu(x[:, :2])
    return out


def accumulated(net, x):
    """Data written into what was a constant."""
    total, y = torch.zeros_like(x), F.relu(x)
    total.add_(y)
    return total * y


def asked(net, x):
    return F.relu(x) if x.grad_fn is not None else x


def cut(net, x):
    return F.relu(x) + x.detach()


def cut_by_data(net, x):
    return F.relu(x) + x.data


def under_autocast(net, x):
    with torch.autocast("cpu", enabled=True):
        return F.relu(x)


def under_a_dispatch_mode(net, x):
    with BaseTorchDispatchMode():
        return F.relu(x)


def out_given(net, x):
    out = torch.empty_like(x)
    torch.add(x.detach(), 1, out=out)
    return F.relu(x) * out


def clamped(net, x):
    x[:, :2].relu_()
    return x.clamp(min=torch.full((4, 1, 1), -0.1, dtype=torch.float64))


def recurrent(net, x):
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 4).double()
    return cell(F.relu(x.mean((2, 3)))).reshape(len(x), 4, 1, 1)


def strided(net, x):
    return F.relu(x).as_strided((2, 4, 3, 6), x.stride())


def indexed_into(net, x):
    y = torch.zeros_like(x).index_add(1, torch.tensor([3, 2, 1, 0]), F.relu(x))
    y.index_copy_(1, torch.tensor([0]), x[:, :1])
    return y


BRIDGED = [
    *(view_written, viewed_then_written, through_a_function, without_gradient, hooked, stored),
    *(asked, cut, cut_by_data, under_autocast, under_a_dispatch_mode, out_given, clamped, recurrent),
    *(accumulated, strided, indexed_into),
]


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "saliency"])
@pytest.mark.parametrize("step", BRIDGED)
def test_the_bridge_for_the_rest(step, method, passes):
    net, x = made(step)
    options = METHODS[method]
    maps = rectgrad.attribute(net, x, method, target=1, **options)
    assert passes == ["bridged"]
    fresh, _ = made(step)  # of which nothing is known
    assert agree(maps, by_bridge(fresh, x, method, target=1, **options))
    assert bool(maps.any())
    assert net.runs == 0


def counted(net, x):
    net.seen += 1
    return F.relu(x) * net.seen


def divided(net, x):
    net.seen.add_(4)
    return F.relu(x) / net.seen


def convolved(net, x):
    net.kernel.add_(1)
    return F.relu(F.conv2d(x, net.kernel, padding=1))


def multiplied(net, x):
    net.matrix.add_(1)
    return F.relu(x) @ net.matrix


def applied(net, x):
    net.matrix.add_(1)
    return F.relu(F.linear(x, net.matrix))


def scaled(net, x):
    net.variance.add_(3)
    return F.relu(F.batch_norm(x, torch.zeros_like(net.variance), net.variance))


def raised(net, x):
    """By a graph of its own."""
    net.seen += 2
    return F.relu(x) ** net.seen


def checkpointed(net, x):
    return checkpoint(F.relu, x, use_reentrant=False)


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "epsilon_lrp"])
@pytest.mark.parametrize(
    "step", [counted, divided, convolved, multiplied, applied, scaled, raised, checkpointed]
)
def test_a_buffer_that_is_written_in_the_pass(step, method):
    """The gradient is that of the values in the pass; afterwards the model has its own again."""
    net, x = made(step)
    net.kernel = torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    net.matrix = torch.zeros(6, 6, dtype=torch.float64)
    net.variance = torch.ones(4, dtype=torch.float64)
    maps = rectgrad.attribute(net, x, method, target=1, **METHODS[method])
    assert agree(maps, by_bridge(net, x, method, target=1, **METHODS[method]))
    assert agree(maps, rectgrad.attribute(net, x, method, target=1, **METHODS[method]))
    assert bool(maps.any())
    assert net.runs == 0
    assert not any(bool(buffer.any()) for buffer in (net.seen, net.kernel, net.matrix))


@pytest.mark.parametrize("write", [lambda buffer: buffer.add_(1), lambda buffer: buffer.view(-1).add_(1)])
@pytest.mark.parametrize("method", ["rectgrad", "saliency"])
def test_a_buffer_made_in_inference_mode_is_written_in_the_pass(method, write):
    def step(net, x):
        write(net.scale)
        return view_written(net, x) * net.scale

    maps = []
    for inference in (True, False):
        net, x = made(step)
        with torch.inference_mode(inference):
            net.scale = torch.arange(4.0, dtype=torch.float64).reshape(4, 1, 1)
            maps.append(rectgrad.attribute(net, x, method, target=1, **METHODS[method]))
            assert torch.equal(net.scale.flatten(), torch.arange(4.0, dtype=torch.float64))
    assert agree(*maps)


def test_a_value_is_modified_out_of_sight_and_then_in_sight():
    def step(net, x):
        y = F.relu(x)
        with torch._C.DisableTorchFunction():
            y.add_(1)
        return y.mul_(2)

    net, x = made(step)
    with pytest.raises(rectgrad.UnsupportedModelError, match="an unrecorded call modified"):
        rectgrad.attribute(net, x, "rectgrad", target=1)


def test_data_is_not_written_into_a_tensor_made_in_inference_mode():
    """Autograd cannot record that, so there is no map."""
    net, x = made(lambda net, x: net.scale.copy_(F.relu(x)))
    with torch.inference_mode():
        net.scale = torch.zeros(2, 4, 6, 6, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="inference"):
            rectgrad.attribute(net, x, "saliency", target=1)


@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_training_mode_goes_to_the_bridge(passes):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).double()
    before = [b.clone() for b in net.buffers()]
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    maps = rectgrad.attribute(net.train(), x, "guided_backprop", target=1)
    assert passes == ["bridged"]
    assert bool(maps.any())
    assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))


def test_what_surrounds_the_call_goes_to_the_bridge(passes):
    """The caller's own autocast, mode or anomaly detection may change what an op does."""
    net, x = made(relu_then_add)
    wanted = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    passes.clear()
    with Watching():
        assert agree(rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            assert agree(rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0), wanted)
    with torch.autocast("cpu"):
        rectgrad.attribute(net.float(), x.float(), "rectgrad", target=1, q=50.0)
    assert passes == ["bridged"] * 3


MATRIX = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def mixed(x):
    return torch.einsum("ncij,cd->ndij", F.relu(x), MATRIX)


def part_then_whole(net, x):
    x[:, :2].mul_(mixed(x)[:, :2])
    x[:].relu_()
    return x


def part_then_whole_apart(net, x):
    return F.relu(torch.cat((x[:, :2] * mixed(x)[:, :2], x[:, 2:]), 1))


def part_only(net, x):
    y = mixed(x)
    y[:, :2].relu_()
    return y


def part_only_apart(net, x):
    y = mixed(x)
    return torch.cat((F.relu(y[:, :2]), y[:, 2:]), 1)


@pytest.mark.parametrize("method", ["rectgrad", "rectgrad_mod"])
@pytest.mark.parametrize(
    "steps", [(part_then_whole, part_then_whole_apart), (part_only, part_only_apart)], ids=["whole", "part"]
)
def test_which_activation_is_the_last_does_not_depend_on_where_it_writes(steps, method):
    maps = [rectgrad.attribute(*made(step), method, target=1, q=30.0) for step in steps]
    assert agree(*maps)
    assert bool(maps[0].any())


def doubled(x):
    return x * 2 + 1


def test_a_scripted_part_is_no_constant():
    def scripted(net, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have it compiled
            return F.relu(torch.jit.script(doubled)(x) + x)

    net, x = made(scripted)
    with pytest.raises(rectgrad.UnsupportedModelError, match="scripted"):
        rectgrad.attribute(net, x)


def test_a_model_that_catches_everything(passes):
    """What a recorder raises must not send the model down another path."""

    def careful(net, x):
        try:
            return view_written(net, x)
        except BaseException:
            return F.relu(-x)

    net, x = made(careful)
    maps = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert passes == ["bridged"]
    other, _ = made(view_written)
    assert agree(maps, by_bridge(other, x, "rectgrad", target=1, q=50.0))

    def target(outputs):
        try:
            return outputs.relu_()[:, 0] if outputs.grad_fn is not None else outputs[:, 1]
        except BaseException:
            return outputs[:, 2]

    net, x = made(relu_then_add)
    maps = rectgrad.attribute(net, x, "guided_backprop", target=target)
    assert agree(maps, by_bridge(net, x, "guided_backprop", target=target))


def test_what_cannot_be_linked_is_tried_once():
    calls = []
    net, x = made(lambda net, x: calls.append(0) or view_written(net, x))
    for _ in range(3):
        rectgrad.attribute(net, x[:1], "rectgrad", target=1, q=50.0)
    assert len(calls) == 4


def test_a_model_is_forgotten_with_the_model():
    """Another model at the same address is another model."""
    from rectgrad.engine import backward

    living = {id(model): model for ref in backward._bridged.values() if (model := ref()) is not None}
    for _ in range(20):
        net, x = made(view_written)
        assert not backward._is_bridged(net)
        rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
        assert backward._is_bridged(net)
        del net
    assert {id(ref()) for ref in backward._bridged.values() if ref() is not None} <= living.keys()
    other, x = made(relu_then_add)
    with bridging(other):
        backward._bridged[id(other)] = weakref.ref(made(view_written)[0])  # as if that had been here before
        assert not backward._is_bridged(other)


def test_a_tensor_of_another_pass_is_no_link(passes):
    kept = []
    net, x = made(lambda net, x: F.relu(x) + (kept.append(x) or kept[0]))
    first = rectgrad.attribute(net, x, "rectgrad", target=1, q=50.0)
    assert passes == ["recorded"]
    rectgrad.attribute(net, x, "guided_backprop", target=1)
    assert passes == ["recorded", "bridged"]
    assert bool(first.any())


def test_the_targets_own_tensors_stay_as_they_were(passes):
    head = nn.Linear(5, 1).double()

    def target(outputs):
        head.weight.requires_grad_(False)
        head.bias.data = torch.zeros(1, dtype=torch.float64)
        return head(outputs)[:, 0]

    net, x = made(relu_then_add)
    before = head.bias.detach().clone()
    rectgrad.attribute(net, x, "rectgrad", target=target, q=50.0)
    assert passes == ["bridged"]
    assert head.weight.requires_grad
    assert torch.equal(head.bias, before)


def test_a_gradient_that_somebody_looks_at_is_a_whole_tensor():
    """Hooks and `retain_grad` see tensors, also where the units that passed are kept as lists."""
    seen, kept = [], []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Linear(24, 10)

        def forward(self, x):
            y = self.norm(self.conv(x))
            y.register_hook(lambda R: seen.append(R.clone()))
            z = self.conv(x)
            z.retain_grad()
            kept.append(z)
            return self.head((torch.relu(y) + torch.relu(self.norm(z))).mean((2, 3)))

    torch.manual_seed(0)
    rectgrad.attribute(Watched().eval(), torch.randn(2, 3, 48, 48))
    assert seen[0].isfinite().all()
    assert (seen[0] != 0).any()
    assert kept[0].grad.isfinite().all()
    assert (kept[0].grad != 0).any()
