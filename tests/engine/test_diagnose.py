"""Numbers that are not finite are an error that names the layer; a map that is zero because a layer passed
nothing comes with a warning that says what would let something through."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import ANY_NETWORK, BACKWARD, RUNNING
from passes import by_bridge
from refusals import FEW, INF, NAN, net, points, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


# --- not a number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ANY_NETWORK)
def test_an_input_that_is_not_finite(name: str, value: float) -> None:
    x = points()
    x[1, 2] = value
    words = "NaN" if value != value else "infinity"
    with pytest.raises(ValueError, match=f"input.*contains (an )?{words}"):
        rectgrad.attribute(net(F.relu), x, name, 0, **FEW.get(name, {}))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("layer", ["a", "b", "c"])
@pytest.mark.parametrize("name", RUNNING)
def test_a_weight_that_is_not_finite_names_the_first_layer(name: str, layer: str, value: float) -> None:
    model = net(F.relu)
    with torch.no_grad():
        getattr(model, layer).bias[0] = value
    with pytest.raises(ValueError, match=f"output of layer '{layer}'.*contains"):
        rectgrad.attribute(model, points(), name, 0, **FEW.get(name, {}))


class Root(nn.Module):
    """sqrt behind a ReLU: where the ReLU is off, an infinite gradient arrives that its mask would hide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.c = nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.gate(self.a(x)).sqrt())


# DeepLIFT's multiplier of a square root is finite everywhere, and relevance passes it unchanged.
FINITE = ("random", "deeplift", "epsilon_lrp", "lrp", "attn_lrp", "excitation_backprop")


@pytest.mark.parametrize("name", [n for n in BACKWARD if n not in FINITE])
@pytest.mark.parametrize("ask", [rectgrad.attribute, by_bridge])
def test_a_gradient_that_is_not_finite_behind_a_mask(ask: Callable, name: str) -> None:
    with pytest.raises(ValueError, match=r"gradient arriving at layer 'gate'.*contains an infinity"):
        ask(seeded(lambda: Root().eval()), points(), name, 0, **FEW.get(name, {}))


@pytest.mark.parametrize("name", [n for n in RUNNING if n not in ("smoothgrad", "rise")])
def test_large_finite_numbers_are_no_error(name: str) -> None:
    """Their sum overflows, they do not."""
    model, x = nn.Sequential(nn.ReLU(), nn.Flatten()).eval(), 3e38 * torch.ones(1, 6)
    options = {"tau": 0.0} if "rectgrad" in name else {**FEW, "occlusion": {}}.get(name, {})
    maps = rectgrad.attribute(model, x, name, 0, **options)
    assert bool(maps.isfinite().all())
    assert int(maps.count_nonzero()) == 1


# --- maps that are zero because a layer passed nothing -----------------------------------------------------


def narrow(d: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, d), nn.ReLU(), nn.Linear(d, 1)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(d)) + 0.1)
    return model


@pytest.mark.parametrize("d", [2, 3, 7, 13, 24, 25])
def test_a_layer_too_small_for_q(d: int) -> None:
    """At q = 98 tau is the largest score of a layer of up to 25 units. The q that is named passes one unit,
    the next hundredth none."""
    model, x = narrow(d), points(1).abs()
    with pytest.warns(UserWarning, match="is zero") as caught:
        maps = rectgrad.attribute(model, x, "rectgrad", 0)
    assert not maps.any()
    assert caught[0].filename == __file__
    found = re.search(r"layer '1' with (\d+) units.*q=98.*largest q .* is (\d+\.\d+)", str(caught[0].message))
    assert found, str(caught[0].message)
    assert int(found[1]) == d
    q = float(found[2])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q).any())
    with pytest.warns(UserWarning, match="is zero"):
        assert not rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2)).any()


def test_a_layer_just_large_enough_for_q_is_silent() -> None:
    assert bool(rectgrad.attribute(narrow(27), points(1).abs(), "rectgrad", 0).any())


def test_a_layer_with_tied_scores() -> None:
    """Three units share the largest score: the q that is named passes all three."""
    model = narrow(10)
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.copy_(torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1, 1, 1]))
        model[2].weight.fill_(1.0)
    x = points(1).abs()
    with pytest.warns(UserWarning, match="with 10 units") as caught:
        rectgrad.attribute(model, x, "rectgrad", 0)
    q = float(re.search(r"largest q .* is (\d+\.\d+)", str(caught[0].message))[1])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q).any())
    with pytest.warns(UserWarning, match="is zero"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2))


def test_the_advice_holds_for_linear_interpolation() -> None:
    """Two units share the largest score, so a linear percentile reaches it before q = 100."""
    model = narrow(11)
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.copy_(torch.tensor([3.0, 3, *range(9)]) / 3)
        model[0].bias[:2] = 9.0
        model[2].weight.fill_(1.0)
    x, linear = points(1).abs(), {"interpolation": "linear"}
    with pytest.warns(UserWarning, match="with 11 units") as caught:
        rectgrad.attribute(model, x, "rectgrad", 0, q=98, **linear)
    q = float(re.search(r"largest q .* is (\d+\.\d+)", str(caught[0].message))[1])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q, **linear).any())
    with pytest.warns(UserWarning, match="is zero"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2), **linear)


def said(model: nn.Module, x: Tensor) -> str:
    """What is warned of when the map turns out zero, if anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not rectgrad.attribute(model, x, "rectgrad", 0).any()
    return " ".join(str(warning.message) for warning in caught)


def test_a_layer_that_did_pass_something_is_not_blamed() -> None:
    """The gradient that passed the ReLU ends in weights that are zero: no advice about q helps."""
    model = narrow(100)
    with torch.no_grad():
        model[0].weight.zero_()
    assert "passed nothing" not in said(model, points(1))


def test_a_layer_whose_gradient_the_padding_trick_took_is_not_blamed() -> None:
    """The one unit that passes lies on the border: what stopped it is the padding trick, not the layer."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1)
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[3].weight.fill_(0.01)
        model[3].weight[0, 0] = 100.0
    assert "passed nothing" not in said(model.eval(), torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_one_silent_sample_among_others_is_named(batch_size: int | None) -> None:
    model, x = narrow(20), points(3).abs()
    with torch.no_grad():
        model[0].weight.zero_()[0, 0] = model[0].weight[1, 1] = 1.0
        model[0].bias.zero_()
    x[:, 0], x[:, 1] = torch.tensor([2.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0])
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    with pytest.warns(UserWarning, match="map of sample 1 is zero.*20 units"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=95, batch_size=batch_size)


@pytest.mark.parametrize("units", [1, 3])
def test_silent_samples_where_rows_are_no_samples(units: int) -> None:
    """Features first: a row of the activation is a unit."""
    weight, x = torch.ones(units, 2), torch.tensor([[5.0, 6], [1, 2], [3, 1]])
    nothing = f"{units} units passed nothing above tau=10; its largest score is"
    with (
        pytest.warns(UserWarning, match=f"sample 2.*{nothing} 4"),
        pytest.warns(UserWarning, match=f"sample 1.*{nothing} 3"),
    ):
        maps = rectgrad.attribute(lambda x: F.relu(weight @ x.T).sum(0), x, rectgrad.RectGrad(tau=10.0))
    assert maps.any(1).tolist() == [True, False, False]


def test_silent_samples_of_a_program_for_one_batch_size() -> None:
    """As exported programs are: the warning does not ask for fewer samples."""
    model = narrow(10)

    def program(x: Tensor) -> Tensor:
        if len(x) != 3:
            raise AssertionError("Guard failed: x.size()[0] == 3")
        out: Tensor = model(x)
        return out

    with pytest.warns(UserWarning, match="map of sample 0 is zero, and so are those of 1, 2: .*10 units"):
        rectgrad.attribute(program, points(3).abs(), "rectgrad", 0)
