"""Randomised copies of a network: which weights change, how, and that the model does not."""

import copy

import pytest
import torch
from torch import nn

from rectgrad import metrics
from rectgrad.metrics.random_weights import layer_groups, randomised, stages


class Token(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(40))
        self.body = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20))
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        return self.head(self.body(x + self.token))


@pytest.fixture
def model():
    torch.manual_seed(0)
    found = Token().eval()
    with torch.no_grad():  # a trained batch norm is not constant
        found.body[1].weight.normal_()
        found.body[1].running_mean.normal_()
    return found


def changed_layers(model, copied):
    """The layers of which some parameter differs."""
    before = dict(model.named_parameters())
    names = [name for name, weights in copied.named_parameters() if not torch.equal(weights, before[name])]
    return {name.rpartition(".")[0] for name in names}


def test_groups_are_equal_and_start_at_the_output(model):
    assert layer_groups(model, 5) == [("head",), ("body.3",), ("body.1",), ("body.0",), ("",)]
    assert layer_groups(model, 2) == [("head", "body.3"), ("body.1", "body.0", "")]
    assert layer_groups(model, 99) == layer_groups(model, 5)


def test_cascading_and_alone(model):
    before = copy.deepcopy(model.state_dict())
    groups = layer_groups(model, 3)
    cascade, alone = list(stages(model, 3)), list(stages(model, 3, "alone"))
    for i in range(3):
        assert alone[i].layers == groups[i]
        assert cascade[i].layers == sum(groups[: i + 1], ())
        for stage in (cascade[i], alone[i]):
            assert changed_layers(model, stage.model) == set(stage.layers)
            assert not stage.model.training
            assert torch.equal(stage.model.body[1].running_mean, model.body[1].running_mean)
    # a layer gets the same weights alone and in the cascade
    torch.testing.assert_close(alone[2].model.body[0].weight, cascade[2].model.body[0].weight)
    after = model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_weights_keep_their_mean_and_spread():
    layer = nn.Sequential(nn.Linear(300, 300))
    with torch.no_grad():
        layer[0].weight.uniform_(3, 4)
    found = randomised(layer, ["0"])[0].weight
    assert float(found.mean()) == pytest.approx(3.5, abs=0.01)
    assert float(found.std()) == pytest.approx(12**-0.5, rel=0.02)
    correlation = torch.corrcoef(torch.stack([found.flatten(), layer[0].weight.detach().flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.02


def test_weights_depend_on_the_seed_and_the_global_state_does_not_change(model):
    state = torch.get_rng_state()
    first, again, other = (randomised(model, ["head"], seed).head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_of_a_fresh_network(model):
    fresh = Token()
    found = randomised(model, ["head", ""], fresh=fresh)
    assert torch.equal(found.head.weight, fresh.head.weight)
    assert torch.equal(found.token, fresh.token)
    assert changed_layers(model, found) == {"head", ""}


def test_similarity_of_each_stage():
    maps = torch.randn(4, 3, 8, 8)
    others = [maps, -maps, torch.randn(4, 3, 8, 8)]
    found = metrics.randomisation(maps, others)
    assert found.shape == (4, 3)
    torch.testing.assert_close(found[:, :2], torch.ones(4, 2))
    torch.testing.assert_close(found[:, 2], metrics.rank_correlation(maps, others[2], absolute=True))
    torch.testing.assert_close(
        metrics.randomisation(maps, iter(others), metrics.ssim)[:, 2], metrics.ssim(maps, others[2])
    )


def test_errors_restate_the_call(model):
    with pytest.raises(ValueError, match=r"stages\(kind='all'\)"):
        next(stages(model, kind="all"))
    with pytest.raises(ValueError, match=r"layer_groups\(groups=5\) of 0 layers"):
        layer_groups(nn.ReLU())
