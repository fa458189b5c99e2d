"""Where epsilon-LRP's relevance goes: it sums to the score less what biases and epsilon absorbed, checked
against sums that do not come from the engine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import rectgrad
from complete_networks import Apply, cnn, mlp, prepare, residual
from rectgrad.engine.backward import remember_bridged


def relu_mlp() -> tuple[nn.Module, Tensor]:
    return mlp(nn.ReLU(), nn.Linear(8, 8), nn.ReLU())


def relu_cnn() -> tuple[nn.Module, Tensor]:
    return cnn(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))


def relu_resnet() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1))
    again = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), Apply(residual, body=body, again=again), nn.MaxPool2d(2))


RELU_NETWORKS = [relu_mlp, relu_cnn, relu_resnet]


def lrp(model: nn.Module, x: Tensor, **options) -> Tensor:
    return rectgrad.attribute(model, x, "epsilon_lrp", target=1, **options)


def shifts(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """For each layer its bias and the constant it adds to a linear map of its input."""
    found = []
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            scale = module.weight / (module.running_var + module.eps).sqrt()
            found.append((module.bias, (module.bias - scale * module.running_mean).detach()))
        elif getattr(module, "bias", None) is not None:
            found.append((module.bias, module.bias.detach()))
    return found


@pytest.mark.parametrize("build", RELU_NETWORKS)
def test_lrp_and_what_shifts_absorb_sum_to_the_score(build):
    """A ReLU network is linear around an input: score = input * gradient + shifts * their gradients."""
    model, x = prepare(build)
    for sample in x.split(1):
        score = model(sample)[0, 1]
        biases, constants = zip(*shifts(model), strict=True)
        slopes = torch.autograd.grad(score, biases)
        absorbed = sum((g * b).sum() for g, b in zip(slopes, constants, strict=True))
        assert absorbed.abs() > 0.1 * score.abs()
        torch.testing.assert_close(lrp(model, sample, epsilon=1e-12).sum() + absorbed, score.detach())


@pytest.mark.parametrize("build", RELU_NETWORKS)
def test_lrp_tends_to_gradient_times_input(build):
    model, x = prepare(build)
    limit = rectgrad.attribute(model, x, "gradient_x_input", target=1)
    errors = [
        ((lrp(model, x, epsilon=epsilon) - limit).abs().max() / limit.abs().max()).item()
        for epsilon in (1e-1, 1e-4, 1e-7, 1e-10, 0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01
    assert errors[-2] < 1e-6
    assert errors[-1] < 1e-12


@torch.no_grad()
def lrp_by_hand(layers: nn.Sequential, x: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of linear layers and ReLUs, for output 1 of one sample: its relevance, what was absorbed, its score.

    R_i = sum_j x_i w_ij R_j / (z_j + epsilon * sign(z_j)); a ReLU passes relevance as it is.
    """
    values = [x]
    for layer in layers:
        values.append(layer(values[-1]))
    relevance = torch.zeros_like(values[-1])
    relevance[1] = score = values[-1][1]
    absorbed = torch.zeros_like(score)
    for layer, a, z in reversed(list(zip(layers, values, values[1:], strict=False))):
        if isinstance(layer, nn.Linear):
            share = relevance / (z + epsilon * z.sign())
            absorbed += (share * (layer.bias + epsilon * z.sign())).sum()
            relevance = a * (share @ layer.weight)
    return relevance, absorbed, score


@pytest.mark.parametrize("epsilon", [1e-4, 0.05, 1.0])
def test_lrp_layer_by_layer(epsilon):
    model, x = prepare(relu_mlp)
    for sample, given in zip(x, lrp(model, x, epsilon=epsilon), strict=True):
        relevance, absorbed, score = lrp_by_hand(model, sample, epsilon)
        torch.testing.assert_close(given, relevance)
        torch.testing.assert_close(given.sum() + absorbed, score)


# --- batch norm, folded into the layer before it or not ----------------------------------------------------


def conv_norms() -> tuple[nn.Module, Tensor]:
    strided = nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), *strided, nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8))


def linear_norms() -> tuple[nn.Module, Tensor]:
    return mlp(
        nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU(),
        nn.Linear(9, 9),
    )  # fmt: skip


def transposed_conv_norms() -> tuple[nn.Module, Tensor]:
    up = nn.ConvTranspose2d(6, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), *up)


def norms_in_blocks() -> tuple[nn.Module, Tensor]:
    def block(self: Apply, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)

    def conv_norm(kernel: int) -> list[nn.Module]:
        return [nn.Conv2d(6, 6, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(6)]

    blocks = [
        Apply(
            block,
            body=nn.Sequential(*conv_norm(3), nn.ReLU(), *conv_norm(3)),
            shortcut=nn.Sequential(*conv_norm(1)),
        )
        for _ in range(2)
    ]
    return cnn(nn.ReLU(), *blocks)


def folded(model: nn.Module) -> nn.Module:
    """The same network with every batch norm that follows a layer of a Sequential put into its weights."""
    model = copy.deepcopy(model)
    for sequence in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        for i, (layer, norm) in enumerate(zip(list(sequence), list(sequence)[1:], strict=False)):
            if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
                sequence[i], sequence[i + 1] = fuse(layer, norm), nn.Identity()
    return model


def fuse(layer: nn.Module, norm: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, nn.ConvTranspose2d))


@pytest.mark.parametrize("build", [conv_norms, linear_norms, transposed_conv_norms, norms_in_blocks])
@pytest.mark.parametrize("method", ["epsilon_lrp", "deeplift", "gradient_x_input"])
def test_folding_batch_norms_changes_nothing(build, method):
    model, x = prepare(build)
    plain = folded(model).eval()
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in plain.modules())
    torch.testing.assert_close(model(x), plain(x))
    maps, expected = (rectgrad.attribute(m, x, method, target=1) for m in (model, plain))
    assert (maps - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_batch_norm_is_folded_through_a_change_of_shape():
    """Tokens: a linear layer has its channels last, the norm wants them second."""
    linear, norm, head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(56, 4)
    tail = nn.Sequential(nn.ReLU(), nn.Flatten(), head)

    def forward(self: Apply, x: Tensor) -> Tensor:
        return self.tail(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))

    net = Apply(forward, linear=linear, norm=norm, tail=tail)
    model, x = prepare(lambda: (net, torch.randn(3, 7, 5)))
    expected = lrp(nn.Sequential(fuse_linear_bn_eval(linear, norm), *tail).eval(), x)
    assert (lrp(model, x) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("beside", [nn.Identity(), nn.ReLU()])
@pytest.mark.parametrize("epsilon", [1e-4, 0.1])
def test_a_layer_with_two_readers_is_not_folded(epsilon, beside):
    """y = linear(x) goes into a norm and past it: y, norm(y) and their sum are each a sum of their own."""
    linear, norm, head = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    net = Apply(
        lambda self, x: self.head((self.norm(y := self.linear(x)) + beside(y)).relu()),
        linear=linear,
        norm=norm,
        head=head,
    )
    model, x = prepare(lambda: (net, torch.randn(3, 5)))

    def stable(z: Tensor) -> Tensor:
        return z / (z + epsilon * z.sign())

    with torch.no_grad():
        y = linear(x)
        normed, other = norm(y), beside(y)
        total = normed + other
        score = head(total.relu())[:, 1:2]
        at_sum = head.weight[1] * stable(score) * (total > 0) * stable(total)
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        at_y = at_sum * stable(normed) * scale + at_sum * (other / y)
        expected = x * ((at_y * stable(y)) @ linear.weight)
    torch.testing.assert_close(lrp(model, x, epsilon=epsilon), expected)


# --- composites --------------------------------------------------------------------------------------------

COMPOSITES = {
    "epsilon_plus_flat": {},
    "epsilon_alpha2_beta1_flat": {},
    "epsilon_gamma_box": {"low": -9.0, "high": 9.0},
    "zplus": {},
    "gamma": {},
    "deep_taylor": {},
}
EVERY_COMPOSITE = pytest.mark.parametrize("composite", COMPOSITES)


def lively_cnn() -> tuple[nn.Module, Tensor]:
    """Something excites every class."""
    features = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
    )
    head = nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*features, *head), 2 * torch.randn(3, 3, 10, 9)


def by_composite(model: nn.Module, x: Tensor, composite: str, **options) -> Tensor:
    options = {**COMPOSITES[composite], **options}
    return rectgrad.attribute(model, x, "lrp", composite=composite, **options)


def test_epsilon_lrp_is_the_epsilon_composite():
    model, x = prepare(relu_resnet)
    maps = rectgrad.attribute(model, x, "lrp", target=1, composite="epsilon", epsilon=1e-4)
    assert torch.equal(maps, rectgrad.attribute(model, x, "epsilon_lrp", target=1))


@pytest.mark.parametrize("build", [conv_norms, linear_norms, transposed_conv_norms, norms_in_blocks])
@EVERY_COMPOSITE
def test_folding_batch_norms_changes_no_composite(build, composite):
    model, x = prepare(build)
    maps, expected = (by_composite(m, x, composite) for m in (model, folded(model).eval()))
    assert expected.abs().max() > 0
    assert (maps - expected).abs().max() < 1e-10 * expected.abs().max()


@EVERY_COMPOSITE
def test_one_sample_does_not_depend_on_the_others(composite):
    model, x = prepare(relu_resnet)
    maps = by_composite(model, x, composite)
    alone = torch.cat([by_composite(model, sample, composite) for sample in x.split(1)])
    assert (maps - alone).abs().max() < 1e-12 * maps.abs().max()


@EVERY_COMPOSITE
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_half_types(composite, kind, tolerance):
    model, x = prepare(lively_cnn)
    x[:, :, 0] = 0
    expected = by_composite(model, x, composite)
    maps = by_composite(model.to(kind), x.to(kind), composite)
    assert maps.dtype == kind
    assert (maps.double() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("composite", ["epsilon_plus_flat", "epsilon_gamma_box", "deep_taylor"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16])
def test_black_pixels_get_relevance_from_the_first_layer(composite, kind):
    """Also where x is 0 and relevance / x would not be finite."""
    model, x = prepare(lively_cnn)
    x[:, :, 2:5, 3:6] = 0
    x[:, :, 6] = -0.0
    maps = by_composite(model.to(kind), x.to(kind), composite)
    assert (maps[:, :, 2:5, 3:6] != 0).any((1, 2, 3)).all()
    assert (maps[:, :, 6] != 0).any((1, 2)).all()


def test_normalisation_inside_the_model_changes_nothing():
    """The flat rule of the first layer, which is the convolution in both."""
    model, x = prepare(lively_cnn)
    mean, std = (
        torch.tensor([0.4, 0.5, -0.1]).view(3, 1, 1).double(),
        torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1),
    )
    inside = Apply(lambda self, x: self.model((x - mean) / std), model=model)
    maps, expected = (
        by_composite(inside, x, "epsilon_plus_flat"),
        by_composite(model, (x - mean) / std, "epsilon_plus_flat"),
    )
    torch.testing.assert_close(maps, expected)


def test_bounds_follow_the_input_into_the_model():
    """A number, one for each channel or a tensor; of the network's input, not of the convolution's."""
    model, x = prepare(lively_cnn)
    low, high, scale = (
        (-8.0, -9.0, -7.0),
        (7.0, 9.0, 8.0),
        torch.tensor([2.0, -0.5, 3.0]).view(3, 1, 1).double(),
    )
    expected = by_composite(model, x, "epsilon_gamma_box", low=low, high=high)
    as_tensors = {"low": torch.tensor(low).view(3, 1, 1), "high": torch.tensor(high).view(1, 3, 1, 1)}
    assert torch.equal(by_composite(model, x, "epsilon_gamma_box", **as_tensors), expected)
    inside = Apply(lambda self, x: self.model((x - 1) * scale), model=model)
    ends = [(torch.tensor(end).view(3, 1, 1) / scale + 1) for end in (low, high)]
    bounds = {"low": torch.minimum(*ends), "high": torch.maximum(*ends)}
    maps = by_composite(inside, x / scale + 1, "epsilon_gamma_box", **bounds)
    torch.testing.assert_close(maps, expected)


PLACES = torch.linspace(-1, 1, 180).view(1, 2, 10, 9).double()
BEFORE_THE_FIRST_LAYER = {  # how many channels it makes of three, how, and the same in other words
    "part": (1, lambda x: x.chunk(3, 1)[2], lambda x: x[:, 2:]),
    "parts": (2, lambda x: torch.stack(x.unbind(1)[:0:-1], 1), lambda x: x[:, [2, 1]]),
    "unequal_parts": (2, lambda x: x.split([1, 2], 1)[1], lambda x: x[:, 1:]),
    "order": (3, lambda x: x[:, [2, 1, 0]], lambda x: torch.stack([x[:, 2], x[:, 1], x[:, 0]], 1)),
    "places": (
        5,
        lambda x: torch.cat([x, PLACES.expand(len(x), -1, -1, -1)], 1),
        lambda x: F.pad(x, (0, 0, 0, 0, 0, 2)) + F.pad(PLACES, (0, 0, 0, 0, 3, 0)),
    ),
    "mask": (3, lambda x: x.masked_fill(PLACES[:, :1] > -0.3, 0.0), lambda x: x * (PLACES[:, :1] <= -0.3)),
    "in_place": (
        3,
        lambda x: x.clone().sub_(0.3).div_(0.4).flip(1),
        lambda x: ((x - 0.3) / 0.4)[:, [2, 1, 0]],
    ),
}


@pytest.mark.parametrize("composite", ["epsilon_plus_flat", "epsilon_gamma_box", "deep_taylor"])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_LAYER)
def test_what_comes_before_the_first_layer(name, composite):
    """What the bounds are there, and what is no input: recorded, from a record and over the bridge."""
    channels, before, same = BEFORE_THE_FIRST_LAYER[name]
    model, x = prepare(lively_cnn)
    model[0] = nn.Conv2d(channels, 8, 3, padding=1).double()
    low, high = (torch.tensor(ends).view(3, 1, 1).double() for ends in ([-7, -8, -9], [9, 6, 7]))
    options = {} if composite == "epsilon_plus_flat" else {"low": low, "high": high}
    expected = by_composite(lambda x: model(same(x)), x, composite, **options)
    written = Apply(lambda self, x: model(before(x)), model=model)
    kept = rectgrad.record(written, x).attribute("lrp", composite=composite, **options)
    recorded = by_composite(written, x, composite, **options)
    remember_bridged(written)
    for maps in (recorded, kept, by_composite(written, x, composite, **options)):
        torch.testing.assert_close(maps, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_a_step_before_the_first_layer_that_cannot_be_seen():
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x - 0.5

        @staticmethod
        def backward(ctx, R):
            return R

    model, x = prepare(lively_cnn)
    hidden = Apply(lambda self, x: model(Centred.apply(x)), model=model)
    with pytest.raises(rectgrad.UnsupportedModelError, match="follow the input to the first layer"):
        by_composite(hidden, x, "epsilon_plus_flat")
    assert torch.isfinite(by_composite(hidden, x, "zplus")).all()


def test_bounds_are_asked_for_and_checked():
    model, x = prepare(lively_cnn)
    with pytest.raises(ValueError, match="LRP: low must be given for the composite 'epsilon_gamma_box'"):
        rectgrad.attribute(model, x, "lrp", composite="epsilon_gamma_box", high=1.0)
    with pytest.raises(ValueError, match="low must not be larger than high, and 1 is larger than 0"):
        rectgrad.attribute(model, x, "lrp", composite="epsilon_gamma_box", low=1, high=0)
    for low in ("dark", torch.zeros(4, 1, 1), torch.zeros(3, 3, 10, 9)):
        with pytest.raises(
            ValueError, match=r"low and high must be a number, one for each channel, or a tensor"
        ):
            by_composite(model, x, "epsilon_gamma_box", low=low)
    with pytest.raises(ValueError) as raised:
        by_composite(model, x, "epsilon_gamma_box", low=torch.zeros(4, 40, 40))
    assert len(str(raised.value)) < 200
    bounds = {"low": [-2.0, -1.0, -3.0], "high": (2.0, 3.0, 1.0)}  # one for each channel, in either form
    same = {name: torch.tensor(each, dtype=x.dtype).reshape(3, 1, 1) for name, each in bounds.items()}
    maps = (rectgrad.attribute(model, x, "lrp", composite="deep_taylor", **each) for each in (bounds, same))
    assert torch.equal(*maps)


def test_only_layers_without_another_one_before_are_first():
    """The input is added to the first layer's output: the layers behind it have their ordinary rule."""
    first, second, head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    net = Apply(
        lambda self, x: self.head(self.second(x + self.first(x).relu()).relu()),
        first=first, second=second, head=head,
    )  # fmt: skip
    model, x = prepare(lambda: (net, torch.rand(2, 5)))
    kept = rectgrad.record(model, x)
    kept.attribute("lrp", target=1)
    rules = {row.name: row.rule for row in kept.trace.rows}
    assert rules["linear"] == "lrp_epsilon (first lrp_flat)"
    with torch.no_grad():
        a = first(x).relu()
        h = x + a
        z = second(h)
        score = head(z.relu())[:, 1:2]
        at_h = h * ((head.weight[1] * (z > 0)) @ second.weight)  # epsilon is small
        flat = (at_h * a / h).sum(1, keepdim=True).expand(2, 5) / 5
    maps = kept.attribute("lrp", target=1, epsilon=1e-12)
    torch.testing.assert_close(maps, at_h * x / h + flat)
    assert (score != 0).all()


# --- excitation backprop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_excitation_is_a_probability(target):
    """Of one, whatever the score and its sign, unless a process ends in a unit that nothing excites."""
    model, x = prepare(lively_cnn)
    maps = rectgrad.attribute(model, x, "excitation_backprop", target=target)
    assert (maps >= 0).all()
    torch.testing.assert_close(maps.sum((1, 2, 3)), torch.ones(3).double())


def test_contrastive_excitation_is_what_the_opposite_unit_does_not_get():
    model, x = prepare(lively_cnn)
    opposite = copy.deepcopy(model)
    with torch.no_grad():
        opposite[-1].weight.neg_()
    maps, dual = (rectgrad.attribute(m, x, "excitation_backprop", target=1) for m in (model, opposite))
    contrast = rectgrad.attribute(model, x, "excitation_backprop", target=1, contrastive=True)
    torch.testing.assert_close(contrast, (maps - dual).clamp(min=0))


# --- averages and captures ---------------------------------------------------------------------------------


def test_a_map_without_excitation_names_the_layer_where_it_ends():
    """Class 0 has negative weights alone; in the second sample, no unit before it is active."""
    first, last = nn.Linear(2, 3, bias=False).double(), nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        first.weight.fill_(1)
        last.weight.copy_(torch.tensor([[-1.0, -2, -3], [1, 2, -3]]))
    model, x = nn.Sequential(first, nn.ReLU(), last).eval(), torch.tensor([[1.0, 2], [-1, -2]]).double()
    with pytest.warns(UserWarning, match="sample 0 is zero: it ends at layer '2', where no positive input"):
        assert not rectgrad.attribute(model, x, "excitation_backprop", target=0).any()
    with pytest.warns(UserWarning, match="sample 1 is zero: it ends at layer '2'"):
        maps = rectgrad.attribute(model, x, "excitation_backprop", target=1)
    assert maps.sum(1).tolist() == pytest.approx([1, 0])
    rectgrad.attribute(model, x[:1], "excitation_backprop", target=1)  # without a warning


@pytest.mark.parametrize("over", ["lrp", "attn_lrp", "excitation_backprop"])
def test_smoothgrad_averages_finished_maps(over):
    model, x = prepare(relu_resnet)
    x[:, :, 4:] = 0
    few = {"samples": 3, "noise": 0.0}
    maps = rectgrad.attribute(model, x, "smoothgrad", target=1, over=over, **few)
    torch.testing.assert_close(maps, rectgrad.attribute(model, x, over, target=1))
    assert torch.equal(
        rectgrad.capture(model, x, over)(x, target=1), rectgrad.attribute(model, x, over, target=1)
    )
