"""rectgrad's methods inside the real Quantus: a metric of each of its kinds."""

import warnings

import numpy as np
import pytest
import torch

import rectgrad
from every_method import EVERY, QUICK
from rectgrad.interop.quantus import explain, explain_func
from rectgrad.models import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import quantus


@pytest.fixture(scope="module")
def model():
    return load("cifar10_cnn").module


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4, 3, 32, 32)).astype(np.float32)
    s = np.zeros((4, 1, 32, 32), dtype=bool)
    s[:, :, 8:24, 8:24] = True
    return x, np.array([1, 2, 3, 4]), s


@pytest.mark.parametrize("name", EVERY)
def test_explain_is_ours_summed_over_channels(model, batch, name):
    (x, y, _), options = batch, QUICK.get(name, {})
    expected = rectgrad.attribute(model, torch.from_numpy(x), name, torch.from_numpy(y), **options).numpy()
    assert np.array_equal(explain(model, x, y, name, **options), expected.sum(1, keepdims=True))
    assert np.array_equal(explain(model, x, y, name, reduce_axes=(), **options), expected)


METRICS = {
    "faithfulness": lambda: quantus.FaithfulnessCorrelation(
        nr_runs=10, subset_size=64, perturb_baseline="mean", disable_warnings=True
    ),
    "robustness": lambda: quantus.MaxSensitivity(nr_samples=2, disable_warnings=True),
    "randomisation": lambda: quantus.MPRT(disable_warnings=True, return_average_correlation=True),
    "complexity": lambda: quantus.Sparseness(disable_warnings=True),
    "localisation": lambda: quantus.RelevanceMassAccuracy(disable_warnings=True),
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("name", ["rectgrad", "saliency"])
def test_a_metric_of_each_kind_takes_it(model, batch, kind, name, capsys):
    x, y, s = batch
    scores = METRICS[kind]()(
        model=model,
        x_batch=x,
        y_batch=y,
        a_batch=None,
        s_batch=s,
        device="cpu",
        explain_func=explain_func(name),
    )
    values = np.asarray(list(scores.values()) if isinstance(scores, dict) else scores, dtype=float)
    assert values.size >= 1
    assert np.isfinite(values).all()


def test_sparser_maps_have_a_higher_sparseness(model, batch):
    x, y, _ = batch
    scores = {
        q: quantus.Sparseness(disable_warnings=True)(
            model=model, x_batch=x, y_batch=y, a_batch=None, explain_func=explain,
            explain_func_kwargs={"method": "rectgrad", "q": q}, device="cpu",
        )
        for q in (0, 98)
    }  # fmt: skip
    assert np.mean(scores[98]) > np.mean(scores[0])


def test_a_wrong_option_fails_early():
    with pytest.raises(TypeError, match="no option 'quantile'"):
        explain_func("rectgrad", quantile=3)
