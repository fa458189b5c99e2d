"""The same maps on a GPU, float16 included. Skipped where there is none."""

import threading

import pytest
import torch

import rectgrad
from every_method import EVERY, QUICK, possible
from networks import NETWORKS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

OPTIONS = QUICK | {"smoothgrad": {"samples": 3}, "integrated_gradients": {"steps": 4}}


def on(value, *to):
    return tuple(x.to(*to) for x in value) if isinstance(value, tuple) else value.to(*to)


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop"])
@pytest.mark.parametrize(
    "name", ["plain_cnn", "strided", "residual", "inception", "mobile", "conv1d", "conv3d"]
)
def test_batch_norms_in_the_weights(name, method):
    """In float32, where they are folded, against the CPU's double. Guided backpropagation has no threshold
    that a last bit could cross."""
    model, inputs = NETWORKS[name](0)
    expected = rectgrad.attribute(model, inputs, method, target=0)
    maps = rectgrad.attribute(model.cuda().float(), inputs.cuda().float(), method, target=0)
    far = (maps.cpu() - expected).abs() > 2e-3 * expected.abs().max()  # TF32 may be on
    assert float(far.double().mean()) <= (0.02 if method == "rectgrad" else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name in NETWORKS for method in EVERY if possible(method, name)]
)
def test_the_map_of_the_cpu(name, method):
    model, inputs = NETWORKS[name](0)
    expected = as_tuple(rectgrad.attribute(model, inputs, method, target=0, **OPTIONS.get(method, {})))
    model.cuda()
    maps = rectgrad.attribute(model, on(inputs, "cuda"), method, target=0, **OPTIONS.get(method, {}))
    for a, b in zip(as_tuple(maps), expected, strict=True):
        assert a.is_cuda
        # torch's own activations differ between devices beyond the last bits
        tolerance = 1e-4 if name == "activations" else 1e-9
        assert (a.cpu() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "method", ["saliency", "gradient_x_input", "guided_backprop", "deconv", "epsilon_lrp"]
)
def test_half_types_are_close_to_float32(method, dtype):
    model, inputs = NETWORKS["plain_cnn"](0)
    model, inputs = model.cuda(), inputs.cuda()
    expected = rectgrad.attribute(model, inputs, method, target=1)
    maps = rectgrad.attribute(model.to(dtype), inputs.to(dtype), method, target=1)
    assert maps.dtype == dtype
    # 8 bits of mantissa: now and then a unit near zero changes sides
    tolerance = 0.05 if dtype == torch.float16 else 0.3
    assert (maps.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rectgrad_is_finite_and_sparse(dtype):
    model, inputs = NETWORKS["plain_cnn"](0)
    maps = rectgrad.attribute(model.cuda().to(dtype), inputs.cuda().to(dtype), "rectgrad", target=1, q=80)
    assert maps.dtype == dtype
    assert maps.isfinite().all()
    assert 0 < maps.count_nonzero() < maps.numel()


@pytest.mark.filterwarnings("ignore")
def test_eight_threads_on_one_gpu():
    model, inputs = NETWORKS["residual"](1)
    model, inputs = model.cuda(), inputs.cuda()
    options = {m: {"q": 80.0} if m.startswith("rectgrad") else OPTIONS.get(m, {}) for m in EVERY}
    expected = {m: rectgrad.attribute(model, inputs, m, **options[m]) for m in EVERY}
    wrong = []

    def work(worker):
        for call in range(20):
            method = list(expected)[(worker + call) % len(expected)]
            maps = rectgrad.attribute(model, inputs, method, **options[method])
            if (maps - expected[method]).abs().max() > 1e-9 * expected[method].abs().max():
                wrong.append(method)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_random_state_of_the_device_is_untouched():
    model, inputs = NETWORKS["plain_cnn"](0)
    model = torch.nn.Sequential(model.cuda(), torch.nn.Dropout()).train()
    before = torch.cuda.get_rng_state()
    with pytest.warns(UserWarning, match="training mode"):
        rectgrad.attribute(model, inputs.cuda(), "saliency", target=1)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_networks_have_a_gradient_in_eval_mode(kind):
    """cuDNN's own have none; and a ReLU inside one is out of a rule's reach."""

    class Reader(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.rnn = kind(5, 8, batch_first=True, **options)
            self.head = torch.nn.Linear(8, 30)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1]).relu()

    torch.manual_seed(0)
    model, x = Reader().double().eval(), torch.randn(2, 6, 5, dtype=torch.float64)
    expected = rectgrad.attribute(model, x, "guided_backprop", 3)
    maps = rectgrad.attribute(model.cuda(), x.cuda(), "guided_backprop", 3)
    assert (maps.cpu() - expected).abs().max() <= 1e-9
    if kind is torch.nn.RNN:
        model = Reader(nonlinearity="relu").double().eval().cuda()
        with pytest.raises(rectgrad.UnsupportedModelError, match="ReLU"):
            rectgrad.attribute(model, x.cuda(), "rectgrad", 3)
