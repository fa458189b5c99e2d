"""The engine as people use it: propagate with their own rules, the trace, records, layer attributions."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import rectgrad
from every_method import EVERY, QUICK, possible
from networks import NETWORKS
from passes import by_bridge
from rectgrad import ops
from rectgrad.engine.op import Rule


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).eval()


def test_a_rule_of_ones_own():
    model, x = small(), torch.randn(2, 1, 4, 4, requires_grad=True)
    with rectgrad.propagate({"relu": lambda op, R: 2 * R * (op.output > 0)}):
        scores = model(x)[:, 1]
    (doubled,) = torch.autograd.grad(scores.sum(), x)
    (plain,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    assert torch.allclose(doubled, 2 * plain)
    assert all(p.grad is None for p in model.parameters())


def test_backward_inside_the_context_leaves_the_parameters_alone():
    model, x = small(), torch.randn(2, 1, 4, 4, requires_grad=True)
    with rectgrad.propagate({"relu": lambda op, R: R.clamp(min=0)}) as trace:
        model(x)[:, 1].sum().backward()
    assert torch.equal(x.grad, rectgrad.attribute(model, x, "deconv", target=1))
    assert all(p.grad is None for p in model.parameters())
    assert [row.rule for row in trace.rows] == ["plain", "<lambda>", "plain", "plain", "plain", "plain"]


@pytest.mark.parametrize("way", ["propagate", "recorded", "bridged"])
def test_a_rule_acts_on_the_ops_that_concern_it_alone(way):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    x = torch.randn(2, 4, requires_grad=True)
    nothing = Rule(lambda op, R: 0 * R, "nothing", concerns=lambda op: op.shape[-1] > 8)
    doubled = Rule(lambda op, R: 2 * op.vjp(R)[0], "doubled", concerns=lambda op: op.shape[-1] == 8)

    class Own(rectgrad.GuidedBackprop):
        def rules(self):
            return {"relu": doubled, "linear": nothing}

    expected = 2 * rectgrad.attribute(model, x, "saliency", target=1)
    if way == "propagate":
        with rectgrad.propagate({"relu": doubled, "linear": nothing}):
            model(x)[:, 1].sum().backward()
        assert torch.allclose(x.grad, expected)
    else:
        ask = rectgrad.attribute if way == "recorded" else by_bridge
        assert torch.allclose(ask(model, x, Own(), target=1), expected)


def test_the_trace_prints_op_layer_shape_and_rule():
    kept = rectgrad.record(small(), torch.randn(1, 1, 4, 4))
    kept.attribute("guided_backprop", target=0)
    assert str(kept.trace).splitlines() == [
        "op       layer  shape    rule",
        "conv     0      1×2×4×4  plain",
        "relu     1      1×2×4×4  guided",
        "flatten  2      1×32     plain",
        "linear   3      1×3      plain",
    ]


def test_the_trace_names_functional_and_repeated_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.act = nn.Linear(3, 3), nn.ReLU()

        def forward(self, x):
            return torch.relu(self.act(self.inner(self.act(x))))

    model = nn.Sequential(Twice(), nn.Linear(3, 2))
    layers = rectgrad.record(model.eval(), torch.randn(2, 3)).trace.layers()
    assert layers == ["0.act#1", "0.inner", "0.act#2", "0/relu", "1"]


def test_steps_without_an_exact_rule_are_listed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    kept = rectgrad.record(lambda x: model(x).sort(dim=1).values.cumprod(1), torch.randn(2, 4))
    kept.attribute("epsilon_lrp", target=0)
    assert [name.split("/")[-1] for name in kept.trace.plain()] == ["sort", "cumprod"]


@pytest.mark.parametrize("rules", [{"rulu": print}, {"clamp": print}])
def test_an_unknown_family_is_named(rules):
    with pytest.raises(ValueError, match=r"unknown op family.*relu"), rectgrad.propagate(rules):
        pass


def test_a_rule_that_meets_nothing_says_so():
    with (
        pytest.warns(UserWarning, match=r"the model has no gelu, only .*relu"),
        rectgrad.propagate({"gelu": print}),
    ):
        small()(torch.randn(1, 1, 4, 4, requires_grad=True))


@pytest.mark.parametrize("wrong", [lambda op, R: None, lambda op, R: R[:, :1], lambda op, R: (R, R)])
def test_a_rule_that_returns_something_else_is_named(wrong):
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    with rectgrad.propagate({"relu": wrong}):
        score = small()(x)[0, 0]
    with pytest.raises(ValueError, match=r"the rule '<lambda>' returned .* of relu in ReLU"):
        score.backward()


def test_a_rule_must_be_callable():
    with pytest.raises(TypeError, match="relu"), rectgrad.propagate({"relu": 3}):
        pass


ONE_PASS = [name for name, method in rectgrad.METHODS.items() if method.one_backward and name != "deeplift"]


@pytest.mark.filterwarnings("ignore:the map of sample", "ignore:Using padding='same'")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_gives_the_maps_of_attribute_and_runs_the_model_once(name):
    model, inputs = NETWORKS[name](2)
    methods = [method for method in EVERY if possible(method, name)]
    expected = {
        method: rectgrad.attribute(model, inputs, method, **QUICK.get(method, {})) for method in methods
    }
    runs = []

    def counted(*args):
        runs.append(len(args))
        return model(*args)

    kept = rectgrad.record(counted, inputs)
    before = len(runs)
    with torch.no_grad():
        outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert torch.allclose(kept.outputs, outputs, rtol=1e-12)
    assert not kept.outputs.requires_grad
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for method in set(ONE_PASS) & set(methods):
            assert_close(kept.attribute(method, **QUICK.get(method, {})), expected[method])
    diagnosed = sum("it ends at layer" in str(each.message) for each in said)  # by another pass
    # The second run: one sample alone, to tell sizes apart.
    assert name == "folded" or len(runs) - diagnosed == before <= 2
    assert_close(kept.attribute("deeplift"), expected["deeplift"])


def assert_close(maps, expected):
    maps, expected = (m if isinstance(m, tuple) else (m,) for m in (maps, expected))
    for a, b in zip(maps, expected, strict=True):
        assert (a - b).abs().max() <= 1e-9 * b.abs().max()


def test_a_record_answers_for_several_targets():
    model, x = NETWORKS["plain_cnn"](0)
    kept = rectgrad.record(model, x)
    for target in (0, 1, [2] * len(x), rectgrad.contrast(0, 1), lambda out: out[:, 1] * 2):
        assert_close(
            kept.attribute("epsilon_lrp", target), rectgrad.attribute(model, x, "epsilon_lrp", target)
        )


def test_contrast_is_the_difference_of_two_explanations():
    model, x = NETWORKS["plain_cnn"](0)
    a, b = (rectgrad.attribute(model, x, "saliency", target=t) for t in (0, 1))
    assert_close(rectgrad.attribute(model, x, "saliency", target=rectgrad.contrast(0, 1)), a - b)


def test_an_output_object_with_logits_is_understood():
    class Output(dict):
        logits = property(lambda self: self["logits"])

    model, x = NETWORKS["plain_cnn"](0)
    wrapped = rectgrad.attribute(lambda x: Output(logits=model(x)), x, "saliency", target=1)
    assert torch.equal(wrapped, rectgrad.attribute(model, x, "saliency", target=1))


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_single_output_needs_no_target(shape):
    x = torch.randn(3, 4)
    maps = rectgrad.attribute(lambda x: x.square().sum(1).reshape(shape), x, "saliency")
    assert torch.allclose(maps, 2 * x)


def test_layer_attributions_run_from_output_to_input():
    """a * R as it arrives, averaged over channels, for a convolutional and a token network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)
    )
    model = model.double().eval()
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    (name2, second), (name1, first) = rectgrad.layer_attributions(model, x, "saliency", target=1)
    assert (name2, name1) == ("3", "1")
    assert (second.shape, first.shape) == ((3, 2, 2), (3, 4, 4))
    a1 = model[:2](x).detach().requires_grad_()
    (R,) = torch.autograd.grad(model[2:](a1)[:, 1].sum(), a1)
    assert torch.allclose(first, (a1 * R).mean(1))


def test_layer_attributions_average_tokens_over_their_last_dimension():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Flatten(), nn.Linear(45, 2)).eval()
    ((name, values),) = rectgrad.layer_attributions(model, torch.randn(3, 5, 6), "rectgrad", target=0)
    assert (name, values.shape) == ("1", (3, 5))


def test_layer_attributions_average_channels_where_no_layer_comes_first():
    """An activation of the image itself has its channels where the image has them."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(36, 2)).eval()
    ((name, values),) = rectgrad.layer_attributions(model, torch.rand(3, 2, 6, 5), "saliency", target=0)
    assert (name, values.shape) == ("0", (3, 6, 5))


def test_layer_attributions_follow_the_method():
    """Behind a rule that passes nothing, nothing arrives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)).eval()
    with pytest.warns(UserWarning, match="'3' with 50 units"):
        pairs = rectgrad.layer_attributions(model, torch.rand(2, 6), "rectgrad", tau=1e9)
    assert pairs[0][1].any()
    assert not pairs[1][1].any()
    with pytest.raises(ValueError, match="SmoothGrad"):
        rectgrad.layer_attributions(model, torch.rand(2, 6), "smoothgrad")


def test_importing_rectgrad_pulls_in_torch_and_numpy_alone():
    script = (
        "import sys, torch, numpy; before = set(sys.modules); import rectgrad; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - {'rectgrad'} "
        "- set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_rectifier_is_a_family():
    assert set(ops.FAMILIES) >= ops.RECTIFIERS


def test_a_long_trace_prints_as_a_screenful_and_whole_on_demand():
    torch.manual_seed(0)
    layers = [layer for _ in range(15) for layer in (nn.Linear(30, 30), nn.ReLU())]
    kept = rectgrad.record(nn.Sequential(*layers).eval(), torch.randn(1, 30))
    kept.attribute("rectgrad", 0, q=20)
    whole, shown = kept.trace.table(all=True).splitlines(), str(kept.trace).splitlines()
    assert len(whole) == 31
    assert shown == [
        *whole[:13],
        "... 12 more; trace.table(all=True) shows every call",
        *whole[-6:],
        "30 calls: 15 plain, 15 rectified",
    ]
