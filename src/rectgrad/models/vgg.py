"""VGG-16 without batch norm (Simonyan and Zisserman, 2014, configuration D).

Attributes are named like torchvision's keys, so that its files load unchanged.
"""

from __future__ import annotations

from torch import Tensor, nn

# channels of the convolutions before each max pooling
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Takes images of 224×224 pixels; every activation is an in-place ReLU."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolutions())
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def convolutions(channels: int = 3) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stage in STAGES:
        for out in stage:
            layers += nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)
            channels = out
        layers.append(nn.MaxPool2d(2))
    return layers
