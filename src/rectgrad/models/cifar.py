"""The paper's CNN for CIFAR-10: four convolutions and two dense layers, with a ReLU after all but the
last."""

from __future__ import annotations

from torch import Tensor, nn


class CifarCNN(nn.Module):
    """Takes images of 32×32 pixels scaled to -1..1. Initial weights are Glorot-uniform, biases zero."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv3, self.relu3 = nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        self.conv4, self.relu4 = nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.dense1, self.relu5 = nn.Linear(64 * 8 * 8, 256), nn.ReLU()
        self.dense2 = nn.Linear(256, classes)
        self.apply(_glorot)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        x = self.relu4(self.conv4(self.relu3(self.conv3(self.pool1(x)))))
        return self.dense2(self.relu5(self.dense1(self.pool2(x).flatten(1))))


def _glorot(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        nn.init.xavier_uniform_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
