"""Sensitivity-n, infidelity and max-sensitivity, compared with slow versions on the same draws."""

import numpy as np
import pytest
import torch
from torch import nn

from rectgrad import metrics
from reference import metrics as slow

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 20, 5)).double().eval()
INPUTS, MAPS = torch.rand(3, 3, 6, 7).double(), torch.randn(3, 3, 6, 7).double()
BASELINE = torch.rand(3, 6, 7).double()
TARGET = [1, 0, 4]


class Watched:
    """A model that keeps the images it was shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x.clone())
        return MODEL(x)


def score_of(i):
    return lambda image: float(MODEL(torch.from_numpy(image)[None]).detach()[0, TARGET[i]])


# Sensitivity-n


@pytest.mark.parametrize("batch_size", [None, 2])
def test_sensitivity_n(batch_size):
    model = Watched()
    found = metrics.sensitivity_n(
        model, INPUTS, MAPS, TARGET, fractions=(0.1, 0.5), subsets=7, baseline=BASELINE, batch_size=batch_size
    )
    assert found.shape == (3, 2)
    shown = torch.cat(model.seen).reshape(1 + 2 * 7, 3, 3, 6, 7)[1:]
    replaced = (shown == BASELINE).all(2)  # draws, samples, pixels
    assert replaced.sum((2, 3)).tolist() == [[4] * 3] * 7 + [[21] * 3] * 7
    for i in range(3):
        for k in range(2):
            subsets = replaced[7 * k : 7 * k + 7, i].numpy()
            expected = slow.subset_correlation(
                score_of(i), INPUTS[i].numpy(), BASELINE.numpy(), MAPS[i].numpy(), subsets
            )
            assert float(found[i, k]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_sensitivity_n_of_a_map_that_does_not_vary_is_undefined(kind):
    """All subsets of one size have the same sum, but for rounding."""
    maps = torch.full((3, 3, 6, 7), 0.1, dtype=kind)
    found = metrics.sensitivity_n(lambda x: x.sum((1, 2, 3)), INPUTS.to(kind), maps, subsets=20)
    assert found.isnan().all()


def test_sensitivity_n_of_a_linear_model_is_one_for_gradient_times_input():
    weights = torch.randn(3, 6, 7).double()
    found = metrics.sensitivity_n(
        lambda x: (x * weights).sum((1, 2, 3)),
        INPUTS,
        INPUTS * weights,
        fractions=(0.01, 0.3, 0.9),
        subsets=20,
    )
    torch.testing.assert_close(found, torch.ones(3, 3).double())


def test_subsets_are_random_in_every_draw_and_sample():
    model = Watched()
    metrics.sensitivity_n(model, INPUTS, MAPS, TARGET, fractions=(0.5,), subsets=30, baseline=-1.0)
    replaced = (torch.stack(model.seen[1:]) == -1).all(2).double()
    assert len({each.numpy().tobytes() for draw in replaced for each in draw}) == 90
    shares = replaced.mean((0, 1))
    assert float(shares.min()) > 0.3
    assert float(shares.max()) < 0.7


def test_a_zero_map_has_no_correlation():
    assert metrics.sensitivity_n(MODEL, INPUTS, 0 * MAPS, 1, fractions=(0.5,), subsets=3).isnan().all()


# Infidelity


def changes_of(model, draws):
    """The perturbations that a model was shown, (draws, N, ...)."""
    shown = torch.cat(model.seen).reshape(1 + draws, 3, 3, 6, 7)
    return INPUTS - shown[1:]


@pytest.mark.parametrize("perturbation", ["square", "gaussian"])
@pytest.mark.parametrize("optimal_scaling", [False, True])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_infidelity(perturbation, optimal_scaling, batch_size):
    model = Watched()
    found = metrics.infidelity(
        model,
        INPUTS,
        MAPS,
        TARGET,
        perturbation=perturbation,
        draws=6,
        side=2,
        baseline=BASELINE,
        optimal_scaling=optimal_scaling,
        batch_size=batch_size,
    )
    changes = changes_of(model, 6)
    for i in range(3):
        own = [each.numpy() for each in changes[:, i]]
        expected = slow.infidelity(
            score_of(i), INPUTS[i].numpy(), MAPS[i].numpy(), own, optimal_scaling=optimal_scaling
        )
        assert float(found[i]) == pytest.approx(expected, rel=1e-9)


def test_squares_are_whole_and_everywhere():
    model = Watched()
    metrics.infidelity(model, INPUTS, MAPS, TARGET, draws=60, side=3, baseline=-1.0)
    replaced = (torch.stack(model.seen[1:]) == -1).all(2).flatten(0, 1)
    rows, columns = replaced.any(2), replaced.any(1)
    assert replaced.sum((1, 2)).tolist() == [9] * 180
    assert rows.sum(1).tolist() == columns.sum(1).tolist() == [3] * 180
    assert replaced.any(0).all()


def test_noise_of_the_gaussian_perturbation():
    model = Watched()
    metrics.infidelity(model, INPUTS, MAPS, TARGET, perturbation="gaussian", draws=40, noise=0.3)
    assert float(changes_of(model, 40).std()) == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("perturbation", ["square", "gaussian"])
def test_the_gradient_of_a_linear_model_has_no_infidelity(perturbation):
    weights = torch.randn(3, 6, 7).double()

    def linear(x):
        return (x * weights).sum((1, 2, 3))

    gradients = weights.expand(3, -1, -1, -1)
    options = {"perturbation": perturbation, "baseline": BASELINE}
    assert float(metrics.infidelity(linear, INPUTS, gradients, **options).max()) < 1e-20
    multiplied = gradients * (INPUTS - BASELINE)
    assert float(metrics.infidelity(linear, INPUTS, multiplied, multiplied=True, **options).max()) < 1e-20
    assert float(metrics.infidelity(linear, INPUTS, 3 * gradients, **options).min()) > 1e-4
    scaled = metrics.infidelity(linear, INPUTS, 3 * gradients, optimal_scaling=True, **options)
    assert float(scaled.max()) < 1e-20


def test_a_perturbation_may_be_a_function():
    changes = torch.randn(4, 3, 3, 6, 7).double()
    found = metrics.infidelity(MODEL, INPUTS, MAPS, TARGET, perturbation=lambda x, j: changes[j], draws=4)
    for i in range(3):
        own = [each.numpy() for each in changes[:, i]]
        expected = slow.infidelity(score_of(i), INPUTS[i].numpy(), MAPS[i].numpy(), own)
        assert float(found[i]) == pytest.approx(expected, rel=1e-9)


# Max-sensitivity


def test_max_sensitivity():
    seen = []

    def attribute(x, target):
        assert target is TARGET
        seen.append(x)
        return x.square() - x.roll(1, 3)

    maps = attribute(INPUTS, TARGET)
    found = metrics.max_sensitivity(INPUTS, maps, TARGET, attribute=attribute, radius=0.3, draws=8)
    noise = torch.stack(seen[1:]) - INPUTS
    assert float(noise.abs().max()) <= 0.3
    assert float(noise.std()) == pytest.approx(0.6 / np.sqrt(12), rel=0.05)
    for i in range(3):
        others = [(each[i].square() - each[i].roll(1, 2)).numpy() for each in seen[1:]]
        assert float(found[i]) == pytest.approx(slow.max_sensitivity(maps[i].numpy(), others), abs=1e-12)


def test_a_map_that_never_changes_is_stable_and_a_zero_map_is_undefined():
    maps = MAPS.clone()
    maps[1] = 0
    found = metrics.max_sensitivity(INPUTS, maps, attribute=lambda x, t: maps)
    assert found.isnan().tolist() == [False, True, False]
    assert found[0] == found[2] == 0


def f(**options):
    return {"model": MODEL, "inputs": INPUTS, "maps": MAPS, "target": 1} | options


ERRORS = {
    "infidelity(inputs of shape (3, 3, 6, 7), maps of shape (3, 6, 7))": lambda: metrics.infidelity(
        **f(maps=MAPS[:, 0])
    ),
    "infidelity(perturbation='circle')": lambda: metrics.infidelity(**f(perturbation="circle")),
    "infidelity(side=7) for 6 by 7 pixels": lambda: metrics.infidelity(**f(side=7)),
    "infidelity(draws=0)": lambda: metrics.infidelity(**f(draws=0)),
    "sensitivity_n(fractions=(0.0,)": lambda: metrics.sensitivity_n(**f(fractions=(0.0,))),
    "subsets=1)": lambda: metrics.sensitivity_n(**f(subsets=1)),
    "sensitivity_n(inputs of shape (3, 3, 6, 7), maps of shape (3, 6))": lambda: metrics.sensitivity_n(
        **f(maps=MAPS[:, 0, :, 0])
    ),
    "max_sensitivity(radius=-1, draws=10)": lambda: metrics.max_sensitivity(
        INPUTS, MAPS, attribute=lambda x, t: x, radius=-1
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_restate_the_call(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert message in str(error.value)
