"""Shared weights, views and in-place writes."""

import torch
import torch.nn.functional as F
from torch import nn

from stored_networks.registry import Written, conv, head, network


@network()
def shared_weights():
    def forward(net, x):
        x = net.relu(net.first(x))
        for _ in range(2):
            x = x + net.relu(net.norm(net.conv(x)))
        return net.head(net.relu(net.conv(x)))

    return Written(
        forward, first=conv(3, 5), conv=conv(5, 5), norm=nn.BatchNorm2d(5), relu=nn.ReLU(), head=head(320)
    )


@network((2, 3, 6, 6), (2, 3, 6, 6))
def siamese():
    def forward(net, left, right):
        a, b = (F.relu(net.tower(x)).amax((2, 3)) for x in (left, right))
        return net.head(torch.cat([a, b, torch.abs(a - b), a * b], dim=1))

    tower = nn.Sequential(conv(3, 6), nn.ReLU(inplace=True), conv(6, 6, stride=2))
    return Written(forward, tower=tower, head=nn.Linear(24, 5))


@network()
def views_and_slices():
    def forward(net, x):
        x = F.relu(net.a(x))
        x = x[:, :, 1:7, ::2] + x[..., 1:7, 1::2]
        x = x.narrow(1, 1, 4).reshape(-1, 4, 24).permute(0, 2, 1).unflatten(1, (6, 4)).movedim(-1, 1)
        x = F.relu(net.b(x)).flip(3).transpose(2, 3)
        return net.head(x.index_select(1, torch.tensor([3, 0, 0])).expand(-1, -1, -1, -1))

    return Written(forward, a=conv(3, 5), b=conv(4, 4), head=head(72))


@network()
def splits_and_chunks():
    def forward(net, x):
        a, b, c = net.a(x).split([2, 3, 1], dim=1)
        d, e = F.relu(net.b(x)).chunk(2, 1)
        first, *rest = torch.tensor_split(net.c(x), 3, dim=2)
        y = torch.cat([F.relu(a), b.relu(), c * c, d - e], dim=1)
        return net.head(y) + net.other(torch.cat([F.relu(first), *rest], dim=2))

    return Written(
        forward, a=conv(3, 6), b=conv(3, 4), c=conv(3, 2), head=head(512), other=head(128)
    )  # fmt: skip


@network()
def stacks_and_unbinds():
    def forward(net, x):
        x = torch.stack([F.relu(net.a(x)), F.relu(net.b(x)), net.c(x)], dim=2)
        p, q, r = x.unbind(2)
        y = torch.stack((p + q, q * r), -1).sum(-1)
        rows = [F.relu(row) for row in net.d(y).unbind(dim=3)]
        return net.head(torch.stack(rows[::-1], dim=3))

    return Written(forward, a=conv(3, 4), b=conv(3, 4), c=conv(3, 4), d=conv(4, 4), head=head(256))


@network()
def writes_on_views():
    def forward(net, x):
        x = net.a(x)
        x[:, :2].relu_()
        x = net.b(x)
        F.relu(x[:, 2:, ::2], inplace=True)
        x = net.c(x)
        flat = x.view(x.shape[0], -1)
        flat[:, :32].mul_(0.5)
        x.transpose(2, 3)[:, 1].add_(1.0)
        flat.clamp_(min=0)
        return net.head(x)

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 4), head=head(256))


@network()
def setitem():
    def forward(net, x):
        out = x.new_zeros(x.shape[0], 6, 8, 8)
        out[:, :4] = F.relu(net.a(x))
        out[:, 4:] = net.b(x)
        out[:, 5] = out[:, 3]
        out[:, :, 0] += 1
        out = net.c(out)
        out[:, 1, 2:4] = 0.5
        return net.head(F.relu(out))

    return Written(forward, a=conv(3, 4), b=conv(3, 2), c=conv(6, 4), head=head(256))


@network()
def in_place_arithmetic():
    def forward(net, x):
        y = net.a(x)
        y.mul_(2).add_(0.1).div_(1.5)
        y.relu_()
        z = torch.empty_like(y).copy_(net.b(y))
        z -= y
        z *= 0.7
        z.masked_fill_(torch.eye(8, dtype=torch.bool), 0.3)
        return net.head(F.relu(z))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), head=head(320))


@network((2, 3, 6, 6))
def gathers_and_repeats():
    def forward(net, x):
        x = F.relu(net.a(x)).flatten(2)
        order = torch.arange(35, -1, -1).expand(x.shape[0], 4, -1)
        x = x.gather(2, order).cumsum(-1) * 0.1
        x = F.relu(net.b(x.transpose(1, 2)))
        x = x.repeat(1, 1, 2) + x.repeat_interleave(2, dim=-1)
        return net.head(x[:, torch.tensor([0, 5, 5, 20]), :])

    return Written(forward, a=conv(3, 4), b=nn.Linear(4, 4), head=head(32))
