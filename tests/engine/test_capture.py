"""`rectgrad.capture`: the maps of `attribute`, and an error when the inputs or the model have changed."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import rectgrad
from rectgrad import StaleCaptureError, UnsupportedModelError

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
METHODS = {
    "expected_gradients": {"samples": 4},
    "occlusion": {},
    "rise": {"masks": 20},
    "rectgrad": {"q": 80},
    "rectgrad_prr": {"q": 80},
    "rectgrad_mod": {"q": 80},
    "saliency": {},
    "gradient_x_input": {},
    "guided_backprop": {},
    "deconv": {},
    "smoothgrad": {"samples": 3},
    "integrated_gradients": {"steps": 3},
    "epsilon_lrp": {},
    "deeplift": {"baseline": 0.1},
    "random": {},
}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, kernels for other batch sizes round convolutions differently with TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Net(nn.Module):
    """Counts how often its Python code runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 6, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        Net.runs += 1
        return self.body(x)


def network(device: str = "cpu") -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().eval().to(device)


def images(n: int = 3, seed: int = 1, device: str = "cpu") -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def close(maps: Tensor, expected: Tensor) -> bool:
    return bool((maps - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_maps_of_attribute(method: str, device: str) -> None:
    model = network(device)
    captured = rectgrad.capture(model, images(device=device), method, **METHODS[method])
    for seed in (1, 2, 3):
        x = images(seed=seed, device=device)
        for target in (None, 2, [0, 1, 4], torch.tensor([3, 3, 0], device=device)):
            expected = rectgrad.attribute(model, x, method, target, **METHODS[method])
            assert close(captured(x, target), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])
def test_the_models_python_does_not_run_again(method: str) -> None:
    captured = rectgrad.capture(network("cuda"), images(device="cuda"), method, **METHODS[method])
    Net.runs = 0
    captured(images(seed=5, device="cuda"))
    captured(images(seed=6, device="cuda"), 1)
    assert Net.runs == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_captured_with_tf32(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model, x = network("cuda"), images(device="cuda")
    captured = rectgrad.capture(model, x, method, **METHODS[method])
    assert captured(x).shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_fresh_tensors(device: str) -> None:
    captured = rectgrad.capture(network(device), images(device=device), q=80)
    first = captured(images(device=device))
    kept = first.clone()
    captured(images(seed=9, device=device))
    assert torch.equal(first, kept)
    assert not first.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_weights_updated_in_place_take_effect(device: str) -> None:
    model, x = network(device), images(device=device)
    captured = rectgrad.capture(model, x, q=80)
    with torch.no_grad():
        model.body[0].weight.mul_(-1.5)
        model.body[1].running_var.mul_(3)
    assert close(captured(x), rectgrad.attribute(model, x, q=80))


@pytest.mark.parametrize("device", DEVICES)
def test_a_replaced_weight_is_stale(device: str) -> None:
    model, x = network(device), images(device=device)
    captured = rectgrad.capture(model, x, q=80)
    model.body[4].weight = nn.Parameter(model.body[4].weight.detach().clone())
    with pytest.raises(StaleCaptureError, match=r"'weight' was replaced.*capture"):
        captured(x)


def test_moved_data_is_stale() -> None:
    model, x = network(), images()
    captured = rectgrad.capture(model, x, q=80)
    model.body[4].bias.data = model.body[4].bias.data.clone()
    with pytest.raises(StaleCaptureError, match="'bias' was replaced"):
        captured(x)


def test_a_changed_training_flag_is_stale() -> None:
    model, x = network(), images()
    captured = rectgrad.capture(model, x, q=80)
    model.body[1].train()
    with pytest.raises(StaleCaptureError, match="training flag"):
        captured(x)


@pytest.mark.parametrize(
    "x", [images(2), images().double(), torch.randn(3, 3, 10, 8)], ids=["batch", "type", "shape"]
)
def test_other_inputs_are_stale(x: Tensor) -> None:
    captured = rectgrad.capture(network(), images(), q=80)
    with pytest.raises(StaleCaptureError, match=r"captured for \(3, 3, 8, 8\) float32 on cpu, not for"):
        captured(x)


def test_another_number_of_inputs_is_stale() -> None:
    captured = rectgrad.capture(network(), images(), q=80)
    with pytest.raises(StaleCaptureError, match="capture again"):
        captured((images(), images()))


def test_inputs_that_are_no_tensors_are_refused_as_in_an_ordinary_call() -> None:
    captured = rectgrad.capture(network(), images(), q=80)
    with pytest.raises(TypeError, match="not list"):
        captured([0.0])


def test_a_model_in_training_mode_is_refused() -> None:
    refused = pytest.raises(UnsupportedModelError, match=r"training mode.*eval\(\)")
    with refused, pytest.warns(UserWarning, match="training mode"):
        rectgrad.capture(network().train(), images())


def test_a_callable_target_is_given_at_capture() -> None:
    model, x = network(), images()
    target = rectgrad.contrast(1, 2)
    captured = rectgrad.capture(model, x, q=80, target=target)
    assert close(captured(x), rectgrad.attribute(model, x, target=target, q=80))
    with pytest.raises(ValueError, match="given at capture"):
        captured(x, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_map_warns_as_an_ordinary_call_does(device: str) -> None:
    model, x = network(device), images(device=device)
    captured = rectgrad.capture(model, x, tau=0.01)
    with torch.no_grad():
        model.body[7].weight.mul_(1e-6)
    with pytest.warns(UserWarning, match="is zero: layer"):
        captured(x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_is_an_error_as_in_an_ordinary_call(device: str) -> None:
    model, x = network(device), images(device=device)
    captured = rectgrad.capture(model, x, q=80)
    bad = x.clone()
    bad[1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"input of shape .* contains NaN"):
        captured(bad)
    with torch.no_grad():
        model.body[0].weight[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="contains"):
        captured(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_control_flow_that_depends_on_values_is_refused() -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.mean() > 0 else 1)

    with pytest.raises(UnsupportedModelError, match="cannot be captured"):
        rectgrad.capture(Branching().eval().cuda(), images(device="cuda"), q=80)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_from_several_threads(device: str) -> None:
    model = network(device)
    captured = rectgrad.capture(model, images(device=device), q=80)
    inputs = [images(seed=i, device=device) for i in range(8)]
    expected = [rectgrad.attribute(model, x, q=80) for x in inputs]
    found: dict[int, Tensor] = {}

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = captured(inputs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(close(found[i], expected[i]) for i in range(8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_is_freed() -> None:
    model, x = network("cuda"), images(64, device="cuda")
    rectgrad.capture(model, x, q=80).release()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    captured = rectgrad.capture(model, x, q=80)
    captured.release()
    assert close(captured(x), rectgrad.attribute(model, x, q=80))
    del captured
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_model_is_not_kept_alive_by_a_released_capture() -> None:
    model = network()
    captured = rectgrad.capture(model, images(), q=80)
    gone = weakref.ref(model)
    del captured, model
    gc.collect()
    assert gone() is None
