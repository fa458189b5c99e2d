"""One sample's map never depends on its neighbours: alone, in a batch, in chunks, and in eight threads."""

import threading

import pytest
import torch

import rectgrad
from every_method import EVERY, QUICK, possible
from networks import NETWORKS

SMALL = QUICK | {"smoothgrad": {"samples": 3}, "integrated_gradients": {"steps": 4}}
OPTIONS = {name: {"q": 80.0} if name.startswith("rectgrad") else {} for name in EVERY} | SMALL
NAMES = ["plain_cnn", "residual", "mixer", "library_attention", "folded", "two_inputs", "mobile"]


def sevenfold(name):
    """The network and seven different samples of its input."""
    model, inputs = NETWORKS[name](3)
    many = inputs if isinstance(inputs, tuple) else (inputs,)
    generator = torch.Generator().manual_seed(5)
    many = tuple(
        torch.randn(7, *x.shape[1:], generator=generator, dtype=torch.float64).to(x.dtype) for x in many
    )
    return model, many if isinstance(inputs, tuple) else many[0]


def row(inputs, i):
    return tuple(x[i : i + 1] for x in inputs) if isinstance(inputs, tuple) else inputs[i : i + 1]


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


def assert_close(maps, expected):
    for a, b in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.filterwarnings("ignore:the map of sample")
@pytest.mark.parametrize(("name", "method"), [(n, m) for n in NAMES for m in EVERY if possible(m, n)])
def test_alone_in_a_batch_and_in_chunks(name, method):
    model, inputs = sevenfold(name)
    together = rectgrad.attribute(model, inputs, method, **OPTIONS[method])
    assert_close(rectgrad.attribute(model, inputs, method, batch_size=2, **OPTIONS[method]), together)
    for i in range(7):
        alone = rectgrad.attribute(model, row(inputs, i), method, **OPTIONS[method])
        assert_close(alone, row(together, i) if isinstance(together, tuple) else together[i : i + 1])


@pytest.mark.filterwarnings("ignore:the map of sample")
def test_samples_that_look_like_another_dimension():
    """As many samples as channels, positions or tokens: sizes alone do not tell which dimension is which."""

    class TokensFirst(torch.nn.Module):
        """(samples, tokens, features) turned to (tokens, samples, features), as sequence models do."""

        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(5, 40), torch.nn.Linear(40, 3)

        def forward(self, x):
            return self.two(self.one(x.transpose(0, 1)).relu()).mean(0)

    torch.manual_seed(0)
    model = TokensFirst().double().eval()
    x = torch.randn(4, 4, 5, dtype=torch.float64)
    together = rectgrad.attribute(model, x, "rectgrad", q=80)
    for i in range(4):
        assert_close(rectgrad.attribute(model, x[i : i + 1], "rectgrad", q=80), together[i : i + 1])


def test_what_comes_with_each_sample_is_cut_with_it():
    """Targets, further arguments and baselines with one row for each sample follow the chunks."""
    model, x = sevenfold("plain_cnn")

    def shifted(x, shift, *, scale):
        return model(x + shift) * scale

    shift = torch.randn(7, 1, 1, 1, dtype=x.dtype)
    scale = torch.rand(7, 1, dtype=x.dtype)
    target, baseline = [0, 1, 2, 1, 0, 2, 1], torch.randn_like(x)
    call = {
        "target": target,
        "baseline": baseline,
        "forward_args": (shift,),
        "forward_kwargs": {"scale": scale},
    }
    together = rectgrad.attribute(shifted, x, "deeplift", **call)
    assert_close(rectgrad.attribute(shifted, x, "deeplift", batch_size=2, **call), together)
    contrast = {**call, "target": rectgrad.contrast(target, 3)}
    together = rectgrad.attribute(shifted, x, "deeplift", **contrast)
    assert_close(rectgrad.attribute(shifted, x, "deeplift", batch_size=3, **contrast), together)


@pytest.mark.filterwarnings("ignore:the map of sample")
def test_eight_threads_on_one_model():
    """400 calls from eight threads, with different methods, give exactly the maps of one thread."""
    model, inputs = NETWORKS["residual"](1)
    expected = {m: rectgrad.attribute(model, inputs, m, **OPTIONS[m]) for m in EVERY}
    methods = list(expected)
    wrong, start = [], threading.Barrier(8)

    def work(worker):
        start.wait()
        for call in range(50):
            method = methods[(worker + call) % len(methods)]
            if not torch.equal(
                rectgrad.attribute(model, inputs, method, **OPTIONS[method]), expected[method]
            ):
                wrong.append(method)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:the map of sample")
def test_threads_sharing_one_record():
    """One recorded pass serves several methods at once."""
    model, inputs = NETWORKS["plain_cnn"](1)
    kept = rectgrad.record(model, inputs)
    methods = ["rectgrad", "saliency", "guided_backprop", "deconv", "epsilon_lrp", "rectgrad_mod"] * 8
    expected = {m: rectgrad.attribute(model, inputs, m, **OPTIONS[m]) for m in set(methods)}
    results = [None] * len(methods)

    def work(i):
        results[i] = kept.attribute(methods[i], **OPTIONS[methods[i]])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for method, maps in zip(methods, results, strict=True):
        assert_close(maps, expected[method])
