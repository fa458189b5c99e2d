"""Evaluating a network: channels last where it can, with the same outputs."""

import pytest
import torch
from torch import nn

from rectgrad.metrics.scores import Scores

torch.manual_seed(0)
X = torch.randn(5, 3, 12, 12)


class Net(nn.Module):
    """Notes how its inputs are stored. `view` needs the ordinary way."""

    def __init__(self, flatten):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 25, 4)
        self.flatten, self.seen = flatten, []

    def forward(self, x):
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        y = torch.relu(self.norm(self.conv(x)))
        return self.last(self.flatten(nn.functional.max_pool2d(y, 2)))


FLATTEN = {"flatten": lambda y: y.flatten(1), "view": lambda y: y.view(len(y), -1)}
SEEN = {"flatten": [True] * 3, "view": [True, False, False, False]}  # refused once, then never tried again


@pytest.mark.parametrize("kind", FLATTEN)
def test_channels_last_gives_the_same_outputs(kind):
    net = Net(FLATTEN[kind]).eval()
    expected = net(X).detach()
    net.seen.clear()
    scores = Scores(net, None, len(X), batch_size=2)
    torch.testing.assert_close(scores.outputs(X), expected, rtol=1e-5, atol=1e-5)
    assert net.seen == SEEN[kind]
    torch.testing.assert_close(scores(X), expected.amax(1), rtol=1e-5, atol=1e-5)


def test_functions_and_other_inputs_are_given_as_they_are():
    net = Net(FLATTEN["flatten"]).eval()
    Scores(lambda x: net(x), None, len(X)).outputs(X)
    assert net.seen == [False]
    flat, x = nn.Linear(6, 3), X.reshape(-1, 6)
    assert torch.equal(Scores(flat, None, len(x)).outputs(x), flat(x))


def test_an_error_of_the_network_is_its_own():
    net = Net(lambda y: y.view(7, -1)).eval()
    with pytest.raises(RuntimeError, match=r"shape '\[7, -1\]' is invalid"):
        Scores(net, None, len(X)).outputs(X)


def test_the_caller_s_images_are_not_modified():
    given = X.clone()
    Scores(Net(FLATTEN["flatten"]).eval(), None, len(X)).outputs(given)
    assert torch.equal(given, X)
    assert given.stride() == X.stride()
