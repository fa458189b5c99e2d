"""Records over time: many targets, writes in between, hooks, threads; and inputs of unusual shape."""

import threading

import pytest
import torch
from torch import nn

import rectgrad
from every_method import ANY_NETWORK, QUICK
from networks import NETWORKS


class Counting(nn.Module):
    """A network whose backward hook writes on a buffer, and whose forward pass keeps something."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 40), nn.Linear(40, 3)
        self.register_buffer("count", torch.zeros(1))
        self.cache = None
        self.a.register_full_backward_hook(lambda *_: self.count.add_(1) and None)

    def forward(self, x):
        self.cache = float(x.detach().sum())
        return self.b(self.a(x).relu())


def in_time(work, seconds=60.0):
    """Run in another thread; fails where it would wait for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def test_a_hook_that_writes_during_a_record_s_backward_pass():
    model, x = Counting().eval(), torch.randn(2, 4)
    kept = rectgrad.record(model, x)
    kept.attribute("saliency", 0)
    kept.attribute("rectgrad", 0, q=50)
    assert model.count.item() == 0
    in_time(lambda: rectgrad.attribute(model, x, "saliency", 0))
    assert model.count.item() == 0


def test_a_record_does_not_grow_with_its_targets():
    model, x = NETWORKS["plain_cnn"](0)
    kept = rectgrad.record(model, x)
    rows = len(kept.trace.rows)
    for _ in range(5):
        kept.attribute("deconv", lambda out: out.relu().sum(1))
    assert len(kept.trace.rows) == rows


@pytest.mark.parametrize("first", [0, 1])
def test_a_record_answers_each_question_as_if_it_were_the_only_one(first):
    """Which activation is the last depends on the output that is explained."""

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 30), nn.Linear(30, 30), nn.Linear(30, 1)

        def forward(self, x):
            h = self.a(x).relu()
            return self.c(h), self.c(self.b(h).relu())

    torch.manual_seed(0)
    model, x = TwoHeads().eval(), torch.randn(2, 6)
    kept = rectgrad.record(model, x)
    for head in (first, 1 - first):
        target = lambda outputs: outputs[head][:, 0]  # noqa: E731, B023
        expected = rectgrad.attribute(model, x, "rectgrad_mod", target, q=50)
        assert torch.equal(kept.attribute("rectgrad_mod", target, q=50), expected)


def test_a_record_keeps_its_own_input():
    model, x = NETWORKS["plain_cnn"](0)
    expected = rectgrad.attribute(model, x, "gradient_x_input", 1)
    kept = rectgrad.record(model, x)
    x.zero_()
    assert torch.equal(kept.attribute("gradient_x_input", 1), expected)


def test_a_record_of_a_model_that_was_trained_since_says_so():
    model, x = NETWORKS["plain_cnn"](0)
    kept = rectgrad.record(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="changed after it was recorded"):
        kept.attribute("saliency", 1)


def test_a_thread_does_not_answer_another_ones_question():
    """One is half-way through its question when another asks the same record about another class."""
    half_way, answered = threading.Event(), threading.Event()

    def slow(outputs):
        scaled = outputs * 2
        half_way.set()
        answered.wait(1.0)  # in vain, if the other has to wait
        return scaled[:, 0]

    model, x = NETWORKS["plain_cnn"](0)
    kept = rectgrad.record(model, x)
    first, second = (kept.attribute("guided_backprop", target) for target in (0, 1))
    found = []

    def other():
        half_way.wait(10.0)
        found.append(kept.attribute("guided_backprop", 1))
        answered.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert torch.allclose(kept.attribute("guided_backprop", slow), 2 * first)
    thread.join()
    assert torch.equal(found[0], second)


def test_two_functions_around_one_module_in_threads():
    """Both leave the module as it was, whoever ends last."""
    model = Counting().eval()
    functions = [lambda x: model(x), lambda x: model(x) * 2, lambda x: model(x) + 1]

    def work(function):
        for _ in range(20):
            rectgrad.attribute(function, torch.randn(2, 4), "saliency", 0)

    threads = [threading.Thread(target=work, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.cache is None
    assert model.count.item() == 0


@pytest.mark.parametrize("method", ANY_NETWORK)
def test_inputs_of_one_number_a_sample(method):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(1, 60), nn.ReLU(), nn.Linear(60, 3)).eval()
    x = torch.rand(5)
    options = QUICK.get(method, {})
    maps = rectgrad.attribute(lambda x: layers(x.unsqueeze(1)), x, method, 1, **options)
    wide = rectgrad.attribute(layers, x.unsqueeze(1), method, 1, **options)
    assert maps.shape == (5,)
    # Of one value, the range is zero, and so is the noise. A mask of one position has cells to choose from.
    if method not in ("smoothgrad", "rise"):
        assert torch.allclose(maps, wide.squeeze(1), atol=1e-6)


def test_an_incomplete_deeplift_says_what_is_missing():
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()
    nn.init.uniform_(layers[0].weight, 0.1, 1)
    x = torch.rand(2, 6) + 1
    with pytest.warns(UserWarning, match=r"sums to .* instead of .*cumprod"):
        rectgrad.attribute(lambda x: layers(x).cumprod(1), x, "deeplift", 5)
    kept = rectgrad.record(layers, x)
    maps = kept.attribute("deeplift", 0)
    error = kept.trace.completeness_error
    difference = layers(x)[:, 0] - layers(torch.zeros_like(x))[:, 0]
    assert torch.allclose(maps.sum(1) - difference, error, atol=1e-6)
    assert error.abs().max() < 1e-5


def test_layer_attributions_leave_no_tensors_behind():
    """Freed at once, without waiting for the garbage collector."""
    import gc

    model, x = NETWORKS["plain_cnn"](0)

    def alive():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    rectgrad.layer_attributions(model, x, "saliency", 1)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(3):
            rectgrad.layer_attributions(model, x, "saliency", 1)
            rectgrad.attribute(model, x, "rectgrad", 1, q=60)
            rectgrad.record(model, x).attribute("epsilon_lrp", 1)
        assert alive() <= before + 2
    finally:
        gc.enable()
