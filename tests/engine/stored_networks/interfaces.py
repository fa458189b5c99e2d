"""Inputs and outputs of unusual form."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from stored_networks.registry import Written, conv, head, network


@network((3, 2, 6, 6), (3, 7), seed=2)
def two_inputs():
    """A picture and a vector in, one score of shape (N,) out."""

    def forward(net, picture, vector):
        picture = F.max_pool2d(torch.relu(net.conv(picture)), 2).flatten(1)
        vector = torch.relu(net.vector(vector))
        return net.head(torch.relu(net.joint(torch.cat([picture, vector], dim=1)))).squeeze(1)

    return Written(
        forward, conv=conv(2, 4), vector=nn.Linear(7, 6), joint=nn.Linear(42, 9), head=nn.Linear(9, 1)
    )


Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


@network()
def logits_object():
    def forward(net, x):
        x = F.relu(net.a(x))
        return Outputs(net.head(F.relu(net.b(x))), net.aux(x))

    return Written(forward, a=conv(3, 5), b=conv(5, 4), head=head(256), aux=head(320))


@network((3, 10))
def one_score():
    """An output of shape (N, 1)."""
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))


@network((1, 3, 8, 8), seed=1)
def one_sample():
    return nn.Sequential(conv(3, 5), nn.ReLU(), nn.MaxPool2d(2), conv(5, 5), nn.ReLU(), head(80))


@network((3, 10))
def output_is_an_activation():
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5), nn.ReLU())


@network()
def input_is_activated():
    """The first step is an activation of the input itself, which is used elsewhere too."""

    def forward(net, x):
        return net.head(F.relu(net.a(F.relu(x)) + net.b(x)))

    return Written(forward, a=conv(3, 4), b=conv(3, 4, 1), head=head(256))
