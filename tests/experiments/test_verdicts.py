"""Verdicts that the numbers do not carry are inconclusive."""

import numpy as np
import torch
from torch import nn

from rectgrad.experiments import coherence, statistics, threshold
from rectgrad.experiments.findings import Finding


def verdict_on_tau(networks: int, tau: float) -> Finding:
    """The finding that tau is close to 0, from the layers of some networks."""
    values = tau + np.random.default_rng(0).normal(0, 1e-3, (networks, 40))
    levels = [0, 20, 50, 80, 99]
    curve = [statistics.estimate(values)] * len(levels)
    about = {
        "q": levels,
        "gini": curve,
        "overlap_20_80": statistics.estimate(values),
        "layers": {"1 relu5": {"tau": curve}, "2 relu4": {"tau": curve}},
    }
    return threshold.findings({"cnn": about})[1]


def test_one_network_does_not_decide_whether_tau_is_close_to_0():
    assert verdict_on_tau(5, 0.001).holds is True
    assert verdict_on_tau(5, 0.05).holds is False
    assert verdict_on_tau(5, -0.05).holds is False
    assert verdict_on_tau(5, 0.01).holds is None
    assert verdict_on_tau(1, 0.001).holds is None
    assert "dense layer 1" in verdict_on_tau(5, 0.05).because


def test_a_zero_map_is_not_the_sparsest(monkeypatch):
    maps = torch.zeros(2, 4, 4)
    maps[0, 1, 1] = 1
    monkeypatch.setattr(coherence, "comparison_map", lambda module, x, method: maps)
    found = coherence._sparsity(maps, nn.Identity(), "rectgrad")
    for key, values in found.items():
        assert values[0] > 0.9, key
        assert np.isnan(values[1]), key
