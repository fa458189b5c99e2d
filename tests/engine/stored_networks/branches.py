"""Residual, dense and branched networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stored_networks.gates import SqueezeExcite
from stored_networks.registry import Written, conv, conv_norm, head, network


@network()
def residual_in_place():
    def forward(net, x):
        x = F.relu(net.stem(x))
        out = net.b(F.relu(net.a(x)))
        out += x
        out = F.relu(out, inplace=True)
        branch = net.c(out)
        return net.head(branch.add_(out).relu_())

    return Written(forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), head=head(320))


@network()
def residual_torch_add():
    def forward(net, x):
        x = torch.relu(net.stem(x))
        x = torch.add(x, net.b(torch.relu(net.a(x))))
        x = torch.relu(torch.add(x, net.c(x), alpha=0.5))
        return net.head(torch.sub(x, net.d(x), alpha=0.25).relu())

    return Written(
        forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), d=conv(5, 5), head=head(320)
    )


@network()
def residual_operator():
    def forward(net, x):
        x = net.stem(x).relu()
        x = (x + net.b(net.a(x).relu())).relu()
        x = x - 0.5 * net.c(x).relu() + 0.1
        return net.head((1 - x).relu())

    return Written(forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), head=head(320))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.first, self.second = conv_norm(channels, out, stride=stride), conv_norm(out, out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None if channels == out else conv_norm(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.second(self.relu(self.first(x)))
        out += identity
        return self.relu(out)


@network((2, 3, 12, 12))
def resnet():
    return nn.Sequential(
        conv_norm(3, 6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), BasicBlock(6, 6), BasicBlock(6, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


@network()
def resnet_before_activation():
    def forward(net, x):
        x = net.stem(x)
        x = x + net.conv2(F.relu(net.norm2(net.conv1(F.relu(net.norm1(x))))))
        return net.head(F.relu(net.norm3(x)).mean((2, 3)))

    return Written(
        forward, stem=conv(3, 6), norm1=nn.BatchNorm2d(6), conv1=conv(6, 6), norm2=nn.BatchNorm2d(6),
        conv2=conv(6, 6), norm3=nn.BatchNorm2d(6), head=nn.Linear(6, 5),
    )  # fmt: skip


@network()
def densenet():
    def forward(net, x):
        features = [net.stem(x)]
        for norm, layer in ((net.norm0, net.conv0), (net.norm1, net.conv1), (net.norm2, net.conv2)):
            features.append(layer(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        x = F.avg_pool2d(net.transition(F.relu(torch.cat(features, 1))), 2)
        return net.head(F.relu(net.norm3(x), inplace=True))

    layers = {f"conv{i}": conv(5 + 3 * i, 3, bias=False) for i in range(3)}
    norms = {f"norm{i}": nn.BatchNorm2d(5 + 3 * i) for i in range(3)}
    return Written(
        forward, stem=conv(3, 5), **layers, **norms, transition=conv(14, 6, 1), norm3=nn.BatchNorm2d(6),
        head=head(96),
    )  # fmt: skip


class Concat(nn.Module):
    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


@network((2, 3, 9, 9))
def inception():
    block = Concat(
        nn.Sequential(conv(4, 3, 1), nn.ReLU()),
        nn.Sequential(
            conv(4, 3, (1, 3), padding=(0, 1)), nn.ReLU(), conv(3, 3, (3, 1), padding=(1, 0)), nn.ReLU()
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(4, 3, 1), nn.ReLU()),
        nn.MaxPool2d(3, 1, 1),
    )
    reduction = Concat(
        nn.Sequential(conv(13, 5, stride=2, padding=1), nn.ReLU()), nn.MaxPool2d(2, ceil_mode=True)
    )
    return nn.Sequential(conv(3, 4, 2, padding=0), nn.ReLU(), block, reduction, nn.AvgPool2d(2), head(72))


@network()
def mobilenet():
    def forward(net, x):
        x = net.stem(x)
        return net.head((x + net.block(x)).mean([2, 3]))

    block = nn.Sequential(
        conv_norm(5, 10, 1), nn.ReLU6(inplace=True), conv_norm(10, 10, groups=10), nn.ReLU6(inplace=True),
        conv_norm(10, 5, 1),
    )  # fmt: skip
    stem = nn.Sequential(conv_norm(3, 5, stride=2), nn.ReLU6(inplace=True))
    return Written(forward, stem=stem, block=block, head=nn.Linear(5, 5))


@network(seed=1)
def efficientnet():
    def forward(net, x):
        x = net.stem(x)
        return net.head(net.dropout(F.adaptive_avg_pool2d(x + net.block(x), 1).flatten(1)))

    block = nn.Sequential(
        conv_norm(5, 8, 1), nn.SiLU(inplace=True), conv_norm(8, 8, 5, groups=8), nn.SiLU(inplace=True),
        SqueezeExcite(8, torch.sigmoid, nn.SiLU(inplace=True)), conv_norm(8, 5, 1),
    )  # fmt: skip
    stem = nn.Sequential(conv_norm(3, 5, stride=2), nn.SiLU(inplace=True))
    return Written(forward, stem=stem, block=block, dropout=nn.Dropout(0.2), head=nn.Linear(5, 5))


@network()
def shufflenet():
    def forward(net, x):
        x = net.stem(x)
        for _ in range(2):
            left, right = x.chunk(2, dim=1)
            x = torch.cat((left, net.branch(right)), dim=1)
            n, c, h, w = x.size()
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return net.head(x.mean([2, 3]))

    branch = nn.Sequential(
        conv_norm(4, 4, 1), nn.ReLU(inplace=True), conv_norm(4, 4, groups=4), conv_norm(4, 4, 1),
        nn.ReLU(inplace=True),
    )  # fmt: skip
    return Written(forward, stem=conv(3, 8, stride=2), branch=branch, head=nn.Linear(8, 5))


@network()
def convnext():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm = conv(5, 5, 5, groups=5), nn.LayerNorm(5)
            self.expand, self.reduce = nn.Linear(5, 10), nn.Linear(10, 5)
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x):
            y = self.norm(self.mix(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.reduce(F.gelu(self.expand(y)))).permute(0, 3, 1, 2)

    def forward(net, x):
        return net.head(net.norm(net.blocks(net.stem(x)).mean([-2, -1])))

    return Written(
        forward, stem=conv(3, 5, 2, 2, padding=0), blocks=nn.Sequential(Block(), Block()),
        norm=nn.LayerNorm(5), head=nn.Linear(5, 5),
    )  # fmt: skip


@network()
def unet():
    def forward(net, x):
        x1 = net.down1(x)
        x2 = net.down2(F.max_pool2d(x1, 2))
        x3 = F.interpolate(net.up(x2), scale_factor=1.0, mode="nearest")
        y = net.merge(torch.cat([x1, x3], dim=1))
        return net.out(y)[:, :, 2:6, 3:7].mean((2, 3))

    return Written(
        forward, down1=nn.Sequential(conv_norm(3, 5), nn.ReLU(inplace=True)),
        down2=nn.Sequential(conv_norm(5, 6), nn.ReLU(inplace=True)), up=nn.ConvTranspose2d(6, 5, 2, stride=2),
        merge=nn.Sequential(conv(10, 5), nn.ReLU()), out=conv(5, 4, 1),
    )  # fmt: skip
