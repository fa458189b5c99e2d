"""Agreement with Captum's LayerGradCam and GuidedGradCam, which are told the layer that we find.

Captum resizes without a positive part unless `relu_attributions` is set, and GuidedGradCam always takes it
before resizing, as the paper does; so do we. The two orders differ where the map changes its sign.
"""

import copy

import pytest
import torch
from captum.attr import GuidedGradCam, LayerAttribution, LayerGradCam
from test_captum import SEEDS, build, convolutions, resnet, vgg
from torch import Tensor, nn

import rectgrad

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting (forward, )?backward hooks"),
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
]


class Mixed(nn.Module):
    """Branches of convolutions and of pooling side by side."""

    def __init__(self, channels: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU()),
                nn.Sequential(*convolutions(channels, 5, 6)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, 3, 1), nn.ReLU()),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def inception() -> tuple[nn.Module, Tensor]:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(13, 6)]
    model = nn.Sequential(*convolutions(3, 8), nn.MaxPool2d(2), Mixed(8), Mixed(13), *head)
    return model, torch.randn(3, 3, 16, 12)


LAYERS = {vgg: "features.11", resnet: "features.6.relu", inception: "4"}


def assert_agree(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """A map may be zero, where nothing speaks for a class, but not that of every class."""
    for maps, theirs in pairs:
        error = (maps - theirs).abs().flatten(1).amax(1)
        assert (error <= 1e-5 * theirs.abs().flatten(1).amax(1)).all()
    assert all(any(bool(theirs[n].any()) for _, theirs in pairs) for n in range(len(pairs[0][0])))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", LAYERS)
def test_gradcam(make, seed):
    model, x, _ = build(make, seed)
    twin, kept, pairs = copy.deepcopy(model), rectgrad.record(model, x), []
    captum = LayerGradCam(twin, twin.get_submodule(LAYERS[make]))
    for target in range(6):
        maps = kept.attribute("gradcam", target)
        rows = zip(kept.trace.rows, kept.trace.layers(), strict=True)
        assert [name.partition("/")[0] for row, name in rows if row.rule == "class layer"] == [LAYERS[make]]
        cam = captum.attribute(x.clone(), target, relu_attributions=True).detach()
        pairs.append((maps.sum(1, keepdim=True), LayerAttribution.interpolate(cam, x.shape[2:], "bilinear")))
        pairs.append((rectgrad.attribute(model, x, "gradcam", target, layer=LAYERS[make]), maps))
    assert_agree(pairs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", LAYERS)
def test_guided_gradcam(make, seed):
    model, x, _ = build(make, seed)
    twin, pairs = copy.deepcopy(model), []
    captum = GuidedGradCam(twin, twin.get_submodule(LAYERS[make]))
    for target in range(6):
        theirs = captum.attribute(x.clone(), target, interpolate_mode="bilinear").detach()
        pairs.append((rectgrad.attribute(model, x, "guided_gradcam", target), theirs))
    assert_agree(pairs)
