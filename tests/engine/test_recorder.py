"""The recorder: the same maps as over the bridge, for every method, also as a record and layer by layer."""

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import rectgrad
from networks import NETWORKS
from passes import METHODS, agree, bridging, by_bridge, made, relu_then_add

pytestmark = pytest.mark.filterwarnings("ignore:the map of sample", "ignore:Using padding='same'")


# The mixer writes on a view, which only the bridge follows.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_same_as_over_the_bridge(name, method, passes):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, method, target=0, **METHODS[method])
    assert set(passes) == {"bridged" if name == "mixer" else "recorded"}
    passes.clear()
    assert agree(maps, by_bridge(model, inputs, method, target=0, **METHODS[method]))
    assert set(passes) == {"bridged"}


@pytest.mark.parametrize("method", ["rectgrad", "epsilon_lrp"])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_layers_as_over_the_bridge(name, method, passes):
    model, inputs = NETWORKS[name](0)
    layers = rectgrad.layer_attributions(model, inputs, method, target=0, **METHODS[method])
    with bridging(model):
        bridged = rectgrad.layer_attributions(model, inputs, method, target=0, **METHODS[method])
    assert [name for name, _ in layers] == [name for name, _ in bridged]
    assert agree(tuple(m for _, m in layers), tuple(m for _, m in bridged))
    if name != "mixer":
        assert "recorded" in passes
    assert "bridged" in passes


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "saliency", "epsilon_lrp"])
@pytest.mark.parametrize("name", ["plain_cnn", "residual", "mobile"])
def test_to_the_last_bit_as_a_record(name, method, passes):
    """Whoever explains a picture with a record gets the very same map."""
    model, inputs = NETWORKS[name](0)
    model, inputs = model.float(), inputs.float()
    maps = rectgrad.attribute(model, inputs, method, target=0)
    assert torch.equal(maps, rectgrad.record(model, inputs).attribute(method, target=0))
    assert set(passes) == {"recorded"}


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_record_answers_every_method_as_often_as_asked(name):
    model, inputs = NETWORKS[name](0)
    kept = rectgrad.record(model, inputs)
    with bridging(model):
        bridged = rectgrad.record(model, inputs)
    expected = {
        m: rectgrad.attribute(model, inputs, m, target=0, **options) for m, options in METHODS.items()
    }
    for method in (*METHODS, *METHODS):
        assert agree(kept.attribute(method, target=0, **METHODS[method]), expected[method])
        assert agree(bridged.attribute(method, target=0, **METHODS[method]), expected[method])


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


def attentive(net, x):
    tokens = F.relu(x).flatten(2).transpose(1, 2)
    weights = F.softmax(tokens @ tokens.transpose(1, 2), dim=-1)
    return (weights @ tokens).transpose(1, 2).unsqueeze(-1)


def smooth(net, x):
    return F.gelu(x) + F.silu(x) + F.mish(x) + F.hardswish(x) + F.gelu(x, approximate="tanh")


def picked(net, x):
    y = F.relu(x)
    return (y[:, :, 1:] + y[..., :-1, :]) * y.sum((2, 3), keepdim=True) + y[:, :, None, 0, :2].sum(-1, True)


def turned(net, x):
    """Attributes that are calls."""
    y = F.relu(x).flatten(2).mT
    return (y @ net.conv.weight.flatten(1)[:, :4].T).mT.unsqueeze(-1)


def clamped_by_data(net, x):
    return F.relu(x.clamp(x.mean(), max=x.amax((2, 3), keepdim=True)))


def of_two_types(net, x):
    return F.relu(x + F.linear(x.float(), torch.eye(6)))


def added_in_place(net, x):
    y = F.relu(x)
    z = net.conv.weight.mean() * y
    z += y
    z = z.masked_fill_(y > 1, 0.5)
    return F.relu(z, inplace=True)


def weighted_sum(net, x):
    """torch's old way to say `alpha`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return F.relu(torch.add(x, 3, x.flip(1)))


def on_a_grid(net, x):
    """A function of torch that dispatches once more inside, and constants of the data's shape and type."""
    rows, columns = torch.meshgrid(x[0, 0, 0], x[0, 0, :, 0], indexing="ij")
    places = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy")[0]
    return F.relu(x) + rows * columns + places.type_as(x).expand_as(x)


def under_a_mode(net, x):
    """Inside the model, what a mode does is seen."""

    class Halving(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result / 2 if func is torch.exp else result

    with Halving():
        return F.relu(x) * torch.exp(x)


LINKED = [
    *(relu_then_add, several, masked, gated, normed, pooled),
    *(attentive, smooth, picked, turned, clamped_by_data, of_two_types, added_in_place, under_a_mode),
    *(weighted_sum, on_a_grid),
]


@pytest.mark.parametrize("step", LINKED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:DeepLIFT's map")
def test_recorded(step, method, passes):
    net, x = made(step)
    maps = rectgrad.attribute(net, x, method, target=1, **METHODS[method])
    assert set(passes) == {"recorded"}
    if (step, method) == (relu_then_add, "saliency"):  # autograd has no gradient for it
        net, _ = made(lambda net, x: F.relu(F.relu(x) + x))
    assert agree(maps, by_bridge(net, x, method, target=1, **METHODS[method]))


def test_a_rule_around_ours_is_asked_at_every_activation():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Around(rectgrad.RectGrad):
        def rules(self):
            def around(rule):
                @functools.wraps(rule.apply)
                def asked(op, R):
                    seen.append(op.family)
                    return rule(op, R)

                return dataclasses.replace(rule, apply=asked)

            return {family: around(rule) for family, rule in super().rules().items()}

    model, inputs = NETWORKS["residual"](0)
    model, inputs = model.float(), inputs.float()
    maps = rectgrad.attribute(model, inputs, Around(q=60.0), target=0)
    assert seen.count("relu") == 5
    assert torch.equal(maps, rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0))


@pytest.mark.parametrize("family", ["conv", "batch_norm"])
def test_somebodys_own_rule_for_an_op_is_asked(family):
    seen = []

    class Own(rectgrad.RectGrad):
        def rules(self):
            def own(op, R):
                seen.append(op.shape)
                return tuple(2 * grad for grad in op.vjp(R))

            return {**super().rules(), **rectgrad.engine.op.as_rules({family: own})}

    model, inputs = NETWORKS["residual"](0)
    model, inputs = model.float(), inputs.float()
    options = {"q": 80.0, "padding_trick": False}
    maps = rectgrad.attribute(model, inputs, Own(**options), target=0)
    calls = len(seen)
    assert calls == {"conv": 6, "batch_norm": 8}[family]
    recorded = rectgrad.record(model, inputs).attribute(Own(**options), target=0)
    assert len(seen) == 2 * calls
    assert torch.equal(maps, recorded)


@pytest.mark.parametrize("ask", [rectgrad.attribute, by_bridge])
def test_a_map_is_detached_whatever_a_rule_returns(ask):
    factor = torch.ones((), requires_grad=True)

    class Own(rectgrad.GuidedBackprop):
        def rules(self):
            def own(op, R):
                with torch.enable_grad():
                    return factor * R

            return {"relu": own}

    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3)).eval()
    assert not ask(model, torch.ones(2, 4), Own(), target=1).requires_grad


def test_an_error_of_the_model_is_said_as_it_is():
    def broken(net, x):
        raise KeyError("mine")

    net, x = made(broken)
    with pytest.raises(KeyError, match="mine"):
        rectgrad.attribute(net, x)
    net, x = made(lambda net, x: F.relu(x))
    with pytest.raises(RuntimeError, match="channels"):
        rectgrad.attribute(net, x[:, :2])


def test_callable_targets_are_recorded_too(passes):
    net, x = made(relu_then_add)

    def target(outputs):
        return F.relu(outputs[:, 1] - outputs[:, 2]) + outputs.exp().sum(1)

    for method in ("rectgrad", "guided_backprop"):
        for asked in (target, rectgrad.contrast(1, 2)):
            passes.clear()
            maps = rectgrad.attribute(net, x, method, target=asked)
            assert passes == ["recorded"]
            assert agree(maps, by_bridge(net, x, method, target=asked))


def test_a_weight_that_was_modified_after_it_was_recorded():
    net, x = made(relu_then_add)
    kept = rectgrad.record(net, x)
    kept.attribute("rectgrad", target=1)
    with torch.no_grad():
        net.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="record it again"):
        kept.attribute("rectgrad", target=1)


def test_a_factor_that_was_overwritten():
    """As torch has it: the derivative of a product needs its factors as they were."""

    def step(net, x):
        factor = F.relu(x)
        y = factor * x
        factor += 1
        return y

    net, x = made(step)
    maps = rectgrad.attribute(net, x, "saliency", target=1)
    other, _ = made(lambda net, x: F.relu(x) * x)
    assert agree(maps, rectgrad.attribute(other, x, "saliency", target=1))


def test_a_module_that_is_used_twice_is_two_ops():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
    kept = rectgrad.record(nn.Sequential(model, model, nn.Flatten()), torch.randn(1, 3, 5, 5))
    assert [row.family for row in kept.trace.rows] == ["conv", "relu", "conv", "relu", ""]


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop"])
@pytest.mark.parametrize("dims", [1, 2])
def test_the_relu_inside_an_lp_pooling_is_no_activation(method, dims, passes):
    """torch takes the root of relu(|sum of squares|), which has nothing to rectify."""
    torch.manual_seed(0)
    first, last = ((nn.Conv1d, nn.Conv2d)[dims - 1](*c, 3).double() for c in ((2, 6), (6, 4)))
    pooling, mean = ((F.lp_pool1d, F.avg_pool1d), (F.lp_pool2d, F.avg_pool2d))[dims - 1]

    def rooted(x):
        return (mean(x**2, 2) * 2**dims).sqrt()

    def net(pool):
        return lambda x: last(pool(F.softplus(first(x)))).flatten(2).mean(2)

    x = torch.randn(2, 2, *[13] * dims).double()
    maps = [
        rectgrad.attribute(net(pool), x, method, target=1) for pool in (lambda x: pooling(x, 2, 2), rooted)
    ]
    torch.testing.assert_close(*maps)


def test_a_record_copies_what_is_overwritten_once():
    """The op that made it and the op that overwrites it keep the same copy."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()).eval()
    x = torch.randn(2, 3, 6, 6)
    norm, relu = (row.op for row in rectgrad.record(model, x).trace.rows[1:3])
    torch.testing.assert_close(relu.inputs[0], model[:2](x), rtol=0, atol=0)
    torch.testing.assert_close(relu.output, relu.inputs[0].relu(), rtol=0, atol=0)
    assert norm.output.data_ptr() == relu.inputs[0].data_ptr() != relu.output.data_ptr()


@pytest.mark.parametrize("method", ["rectgrad", "saliency"])
def test_a_view_as_the_same_dtype_has_no_gradient(method):
    """Autograd treats `view(dtype)` as a constant."""
    net, x = made(lambda net, x: torch.relu(x) + x.sigmoid().view(x.dtype) * x)
    constant, _ = made(lambda net, x: torch.relu(x) + x.sigmoid().detach() * x)
    maps = rectgrad.attribute(net, x, method, target=1, **METHODS[method])
    assert agree(maps, rectgrad.attribute(constant, x, method, target=1, **METHODS[method]))


@pytest.mark.parametrize(("given", "named"), [((None, None, True), {}), ((), {"training": True})])
def test_a_batch_norm_that_updates_its_statistics_is_not_linked(given, named, passes):
    mean, variance = torch.zeros(4).double(), torch.ones(4).double()
    net, x = made(lambda net, x: F.relu(F.batch_norm(x, mean, variance, *given, **named)))
    rectgrad.attribute(net, x, "saliency", target=1)
    assert set(passes) == {"bridged"}
