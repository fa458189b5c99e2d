"""Wrong arguments and unusual outputs: one sentence that says what was given and what would be right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import BACKWARD, RUNNING
from refusals import FEW, INF, NAN, net, points

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (3, ValueError, "target 3 is out of range.*3 outputs, 0 to 2"),
        (-1, ValueError, "target -1 is out of range"),
        ([0, 7], ValueError, "target 7 is out of range"),
        ([0], ValueError, r"shape \(1,\).*each of 2 samples"),
        ([0, 1, 2], ValueError, r"shape \(3,\).*each of 2 samples"),
        ([[0], [1]], ValueError, r"shape \(2, 1\).*each of 2 samples"),
        (1.0, TypeError, "target must be .*an int.*got 1.0"),
        (torch.tensor([0.0, 1.0]), TypeError, "integer tensor"),
        (True, TypeError, "got True"),
        ("cat", TypeError, "got 'cat'"),
        ([], (TypeError, ValueError), "one class for each"),
    ],
)
def test_a_target_that_names_no_class(name: str, target: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, target, **FEW.get(name, {}))


@pytest.mark.parametrize("target", [3, [0, 7], "cat", rectgrad.contrast(0, 9)])
def test_a_bad_target_in_chunks_and_on_a_record(target: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"out of range|must be"):
        rectgrad.attribute(net(F.relu), points(), "saliency", target, batch_size=1)
    with pytest.raises((ValueError, TypeError), match=r"out of range|must be"):
        rectgrad.record(net(F.relu), points()).attribute("saliency", target)


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        (
            "rectgradd",
            ValueError,
            "unknown method 'rectgradd'; did you mean 'rectgrad'. methods are rectgrad, .*random",
        ),
        ("RectGrad", ValueError, "unknown method 'RectGrad'"),
        (None, TypeError, "name or an instance.*not None"),
        (rectgrad.RectGrad, TypeError, "instance"),
    ],
)
def test_an_unknown_method(method: Any, error: type, words: str) -> None:
    for call in (rectgrad.attribute, rectgrad.layer_attributions):
        with pytest.raises(error, match=words):
            call(net(F.relu), points(), method)
    with pytest.raises(error, match=words):
        rectgrad.record(net(F.relu), points()).attribute(method)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("rectgrad", {"Q": 90}, TypeError, "'rectgrad' has no option 'Q'; its options are q, tau"),
        ("saliency", {"q": 90}, TypeError, "'saliency' has no option 'q'"),
        ("rectgrad", {"q": 101}, ValueError, "q must be from 0 to 100, not 101"),
        ("rectgrad", {"q": -1}, ValueError, "q must be from 0 to 100"),
        ("rectgrad", {"q": NAN}, ValueError, "q must be from 0 to 100, not nan"),
        ("rectgrad", {"q": "a"}, TypeError, "q must be a number, not 'a'"),
        ("rectgrad", {"q": None}, TypeError, "q must be a number"),
        ("rectgrad", {"q": True}, TypeError, "q must be a number"),
        ("rectgrad", {"q": torch.tensor([90.0, 95.0])}, (TypeError, ValueError), "q must be a number"),
        ("rectgrad", {"q": np.array([90.0, 95.0])}, (TypeError, ValueError), "q must be a number"),
        ("rectgrad", {"tau": NAN}, ValueError, "tau must be a number"),
        ("rectgrad", {"tau": "0"}, TypeError, "tau must be a number"),
        ("rectgrad", {"rule": "PR9"}, ValueError, "rule must be one of 'PR1'.*'mod', not 'PR9'"),
        ("rectgrad", {"interpolation": "cubic"}, ValueError, "one of 'nearest', 'linear'"),
        ("rectgrad", {"prr": "yes"}, TypeError, "prr must be True or False, not 'yes'"),
        ("smoothgrad", {"samples": 0}, ValueError, "samples must be at least 1, not 0"),
        ("smoothgrad", {"samples": 2.5}, TypeError, "samples must be an integer"),
        ("smoothgrad", {"noise": -0.1}, ValueError, "noise must be at least 0"),
        ("smoothgrad", {"noise": NAN}, ValueError, "noise must be at least 0"),
        ("smoothgrad", {"noise": INF, "samples": 2}, ValueError, "noise"),
        ("smoothgrad", {"over": "nothing"}, ValueError, "unknown method 'nothing'"),
        ("smoothgrad", {"over": None}, TypeError, "over must be a method or its name"),
        ("integrated_gradients", {"steps": 0}, ValueError, "steps must be at least"),
        ("integrated_gradients", {"steps": 1}, ValueError, "steps must be at least 2"),
        ("integrated_gradients", {"steps": "many"}, TypeError, "steps must be an integer"),
        ("integrated_gradients", {"quadrature": "left"}, ValueError, "one of 'trapezoid', 'right'"),
        ("integrated_gradients", {"baseline": "black"}, TypeError, "baseline must be a number or a tensor"),
        ("integrated_gradients", {"baseline": NAN, "steps": 2}, ValueError, "baseline"),
        ("deeplift", {"baseline": NAN}, ValueError, "baseline"),
        ("deeplift", {"baseline": torch.tensor([INF] * 6)}, ValueError, "baseline"),
        ("deeplift", {"baseline": torch.zeros(5)}, ValueError, r"shape \(5,\).*broadcast.*\(2, 6\)"),
        ("deeplift", {"baseline": torch.zeros(3, 2, 6)}, ValueError, "broadcast"),
        ("deeplift", {"baseline": (0.0, 0.0)}, ValueError, "2 baselines.*1 input"),
        ("integrated_gradients", {"baseline": torch.zeros(5), "steps": 2}, ValueError, "broadcast"),
        ("epsilon_lrp", {"epsilon": -1}, ValueError, "epsilon must be at least 0"),
        ("epsilon_lrp", {"epsilon": NAN}, ValueError, "epsilon must be at least 0"),
        ("epsilon_lrp", {"epsilon": INF}, ValueError, "epsilon"),
        ("random", {"seed": "a"}, TypeError, "seed must be an integer"),
    ],
)
def test_an_option_out_of_range(name: str, options: dict, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, **options)


def test_options_go_with_a_name() -> None:
    with pytest.raises(TypeError, match=r"options \(q\).*dataclasses.replace"):
        rectgrad.attribute(net(F.relu), points(), rectgrad.RectGrad(), q=90)


@pytest.mark.parametrize("batch_size", [0, -1, "a", 1.5, True])
def test_a_batch_size_that_is_no_count(batch_size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="batch_size must be an integer of at least 1"):
        rectgrad.attribute(net(F.relu), points(), batch_size=batch_size)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (torch.ones(2, 6, dtype=torch.long), TypeError, "torch.int64.*floating"),
        (torch.ones(2, 6, dtype=torch.uint8), TypeError, r"torch.uint8.*\.float\(\) / 255"),
        (torch.ones(2, 6, dtype=torch.complex64), TypeError, "complex64.*(real|floating)"),
        (np.zeros((2, 6), dtype=np.float32), TypeError, "tensor.*ndarray"),
        ([points()], TypeError, "tuple.*list"),
        (None, TypeError, "NoneType"),
        (torch.tensor(1.0), ValueError, "first dimension of samples"),
        ((), ValueError, "empty tuple"),
        ((points(2), points(3)), ValueError, "number of samples: 2 and 3"),
        ((points(), torch.ones(2, dtype=torch.long)), TypeError, "torch.int64"),
    ],
)
def test_inputs_that_have_no_map(inputs: Any, error: type, words: str) -> None:
    for call in (rectgrad.attribute, rectgrad.record, rectgrad.layer_attributions):
        with pytest.raises(error, match=words):
            call(net(F.relu), inputs)


@pytest.mark.parametrize("model", [3, "resnet50", None])
def test_a_model_that_cannot_be_called(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a module or a function"):
        rectgrad.attribute(model, points())


def test_forward_args_that_are_one_tensor() -> None:
    """A tensor is a sequence of its rows: unpacking it would call the model with arguments nobody gave."""
    with pytest.raises(TypeError, match="forward_args"):
        rectgrad.attribute(lambda x, *rows: x * 2, points(), "saliency", forward_args=torch.zeros(2, 3))


@pytest.mark.parametrize("call", [rectgrad.attribute, rectgrad.record, rectgrad.layer_attributions])
def test_training_mode_is_said(call: Callable) -> None:
    model = net(F.relu)
    model.b = nn.Sequential(model.b, nn.Dropout(0.1))
    model.train()
    with pytest.warns(UserWarning, match=r"training mode.*model.eval\(\)") as caught:
        call(model, points())
    assert caught[0].filename == __file__, "the warning should point at the caller's line"
    model.eval()
    model.b.train()
    with pytest.warns(UserWarning, match="training mode"):
        call(model, points())


def test_layers_of_a_method_without_a_backward_pass() -> None:
    with pytest.raises(ValueError, match="SmoothGrad has no single backward pass"):
        rectgrad.layer_attributions(net(F.relu), points(), "smoothgrad")


# --- outputs -----------------------------------------------------------------------------------------------


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(F.relu)(x)


WEIGHT = torch.ones(6, 3, requires_grad=True)

CUT_OFF: dict[str, Callable] = {
    "detach": lambda x: net(F.relu)(x).detach(),
    "detached input": lambda x: net(F.relu)(x.detach()),
    "no_grad": without_gradient,
    "numpy": lambda x: torch.from_numpy(net(F.relu)(x).detach().numpy()),
    "argmax": lambda x: F.one_hot(net(F.relu)(x).argmax(1), 3).float(),
    "a weight that requires grad": lambda x: F.relu(x.detach() @ WEIGHT),
}


@pytest.mark.parametrize("model", CUT_OFF)
@pytest.mark.parametrize("name", BACKWARD)
def test_an_output_that_does_not_depend_on_the_input(name: str, model: str) -> None:
    with pytest.raises(ValueError, match="does not depend on the input"):
        rectgrad.attribute(CUT_OFF[model], points(), name, 1, **FEW.get(name, {}))


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize(
    ("wrap", "error", "words"),
    [
        (lambda y: y[:, :, None, None].expand(-1, -1, 4, 5), ValueError, r"\(2, 3, 4, 5\).*callable target"),
        (lambda y: (y, y), TypeError, "a tuple of 2.*callable target"),
        (lambda y: {"out": y}, TypeError, "a dict with 'out'.*callable target"),
        (lambda y: y.sum(), ValueError, r"shape \(\) for 2 samples.*callable target"),
        (lambda y: y[:1], ValueError, r"shape \(1, 3\) for 2 samples"),
        (lambda y: y[:, :0], ValueError, r"\(2, 0\)"),
        (lambda y: y > 0, ValueError, "torch.bool.*no real scores"),
        (lambda y: None, TypeError, "NoneType.*callable target"),
        (lambda y: y * 1j, TypeError, "a complex tensor, not a real tensor.*callable target"),
    ],
)
def test_an_output_that_needs_a_callable_target(name: str, wrap: Callable, error: type, words: str) -> None:
    model = net(F.relu)
    with pytest.raises(error, match=words):
        rectgrad.attribute(lambda x: wrap(model(x)), points(), name, **FEW.get(name, {}))


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (lambda out: out[:, :1], ValueError, r"callable target returned shape \(2, 1\); it must be \(2,\)"),
        (lambda out: out.sum(), ValueError, r"returned shape \(\); it must be \(2,\)"),
        (lambda out: 1.0, TypeError, r"a float.*tensor \(2,\)"),
        (lambda out: None, TypeError, "NoneType"),
        (lambda out: list(out[:, 0]), TypeError, "a list of 2"),
        (lambda out: out[:, 0] * 1j, TypeError, r"a complex tensor; it must return a real tensor \(2,\)"),
    ],
)
def test_a_callable_target_that_gives_no_scores(name: str, target: Callable, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, target, **FEW.get(name, {}))


@pytest.mark.parametrize("target", [lambda out: out[:, 0].detach(), lambda out: out.argmax(1)])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_callable_target_without_a_gradient(name: str, target: Callable) -> None:
    with pytest.raises(ValueError, match="does not depend on the input"):
        rectgrad.attribute(net(F.relu), points(), name, target, **FEW.get(name, {}))
