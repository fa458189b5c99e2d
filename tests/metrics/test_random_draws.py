"""Random numbers of metrics: the same in threads, and for a sample alone."""

import pytest
import torch

from rectgrad.metrics import draws

X = torch.arange(30.0).reshape(5, 6)


@pytest.mark.parametrize("fill", ["normal", "uniform"])
def test_threads_draw_the_same_numbers(monkeypatch, fill):
    expected = getattr(draws.Draws(X, 3), fill)(40)
    monkeypatch.setattr(draws, "MANY", 1)
    random = draws.Draws(X, 3)
    assert torch.equal(getattr(random, fill)(40), expected)
    assert not torch.equal(getattr(random, fill)(40), expected)
    assert torch.equal(getattr(draws.Draws(X[2:3], 3), fill)(40), expected[2:3])
