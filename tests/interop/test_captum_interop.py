"""rectgrad's methods inside the real Captum."""

import pytest
import torch
from captum.attr import NoiseTunnel
from captum.attr import visualization as captum_pictures
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor, nn

import rectgrad
from every_method import EVERY, QUICK
from rectgrad.interop.captum import MethodAttribution
from rectgrad.methods.catalog import METHODS
from rectgrad.models import load

pytestmark = pytest.mark.filterwarnings("ignore:.*DeepLIFT's map:UserWarning")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load("cifar10_cnn").module


@pytest.fixture
def x() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("name", EVERY)
def test_attribute_is_ours(model, x, name):
    options = QUICK.get(name, {})
    ours = rectgrad.attribute(model, x, name, target=[1, 2, 3], **options)
    for target in ([1, 2, 3], torch.tensor([1, 2, 3])):
        assert torch.equal(MethodAttribution(model, name, **options).attribute(x, target=target), ours)


@pytest.mark.parametrize("name", EVERY)
def test_noise_tunnel_takes_it(model, x, name):
    tunnel = NoiseTunnel(MethodAttribution(model, name, **QUICK.get(name, {})))
    torch.manual_seed(0)
    found = tunnel.attribute(x, nt_type="smoothgrad", nt_samples=3, stdevs=0.1, target=1)
    assert found.shape == x.shape
    assert found.isfinite().all()


def test_noise_tunnel_without_noise_is_the_method(model, x):
    method = MethodAttribution(model, "rectgrad", q=90)
    found = NoiseTunnel(method).attribute(x, nt_samples=2, stdevs=0.0, target=1)
    assert torch.allclose(found, method.attribute(x, target=1), atol=1e-6)


@pytest.mark.parametrize("name", ["rectgrad", "guided_backprop", "integrated_gradients"])
def test_metrics_take_it(model, x, name):
    method = MethodAttribution(model, name)
    maps = method.attribute(x, target=1)

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        return noise, inputs - noise

    assert infidelity(model, perturb, x, maps, target=1).shape == (3,)
    worst = sensitivity_max(method.attribute, x, target=1, n_perturb_samples=2)
    assert worst.shape == (3,)
    assert (worst >= 0).all()


def test_its_visualisation_takes_it(model, x):
    from matplotlib.figure import Figure

    maps = MethodAttribution(model, "rectgrad").attribute(x[:1], target=1)
    page = Figure()
    values = maps[0].permute(1, 2, 0).numpy()
    captum_pictures.visualize_image_attr(values, plt_fig_axis=(page, page.subplots()), use_pyplot=False)
    assert page.axes


def test_places_in_outputs_of_more_dimensions(x):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 1)).eval()
    method = MethodAttribution(net, "saliency")
    point = method.attribute(x, target=(1, 5, 6))
    assert torch.equal(point, rectgrad.attribute(net, x, "saliency", lambda y: y[:, 1, 5, 6]))
    several = method.attribute(x, target=[(1, 5, 6), (0, 2, 2), (1, 0, 0)])
    assert torch.equal(several[0], point[0])
    assert several[1, :, 1:4, 1:4].any()
    assert not several[1, :, 5:, 5:].any()


def test_further_arguments_and_several_inputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)

        def forward(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
            return (self.first(a + b).relu() * scale)[:, :3]

    a, b = torch.randn(2, 4), torch.randn(2, 4)
    one, other = MethodAttribution(Two().eval(), "saliency").attribute((a, b), 1, additional_forward_args=2.0)
    assert torch.equal(one, other)


def test_what_multiplies_by_the_input_says_so(model):
    multiplies = {name: MethodAttribution(model, name).multiplies_by_inputs for name in METHODS}
    assert multiplies["rectgrad"]
    assert multiplies["integrated_gradients"]
    assert multiplies["expected_gradients"]
    assert multiplies["deeplift_shap"]
    assert not multiplies["saliency"]
    assert not multiplies["guided_backprop"]
    assert not multiplies["occlusion"]
    assert not MethodAttribution(model, "rectgrad", multiply_by_input=False).multiplies_by_inputs
