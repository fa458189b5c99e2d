"""Metrics compared with Captum's and Quantus' on the same inputs, maps and random draws, to 1e-4.

Known differences, all of Quantus 0.6.0:
- ROAD fails on colour images, because it ranks the channels of a pixel separately and then takes the ranks
  for pixels. Here, the second and third channel of the maps are lower than all pixels of the first.
- Infidelity removes blocks one after the other without restoring them, and repeats this `n_perturb_samples`
  times although nothing is random. Here, our metric gets these perturbations.
- Sensitivity-n is a different quantity (see `sensitivity_n`); FaithfulnessCorrelation is the same as ours.
- PixelFlipping and FaithfulnessCorrelation remove single channels of a pixel, ours all channels at once: the
  comparison is on grey images.
"""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rectgrad
from rectgrad import metrics
from rectgrad.metrics.scores import Scores
from rectgrad.metrics.sensitivity import subset_correlation
from rectgrad.models import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import quantus
    from captum.metrics import infidelity as captum_infidelity
    from captum.metrics import sensitivity_max

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CLASSES = torch.tensor([1, 2, 3, 4, 5, 6])


class Grey(nn.Module):
    """The CIFAR CNN for images with one channel."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.expand(-1, 3, -1, -1))


@pytest.fixture(scope="module")
def model():
    return load("cifar10_cnn").module


def batch(model, channels=3):
    inputs = torch.rand(6, channels, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return inputs, rectgrad.attribute(model, inputs, "saliency", CLASSES)


def ask_quantus(metric, model, inputs, maps, **options):
    return metric(
        model=model,
        x_batch=inputs.numpy().copy(),
        y_batch=CLASSES.numpy(),
        a_batch=maps.numpy().copy(),
        device="cpu",
        **options,
    )


def agree(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_infidelity_agrees_with_captum(model, normalize):
    inputs, maps = batch(model)
    changes = 0.1 * torch.randn(5, *inputs.shape, generator=torch.Generator().manual_seed(1))
    by_sample = changes.transpose(0, 1).flatten(0, 1)
    expected = captum_infidelity(
        model,
        lambda x: (by_sample, x - by_sample),
        inputs,
        maps,
        target=CLASSES,
        n_perturb_samples=5,
        normalize=normalize,
    )
    found = metrics.infidelity(
        model,
        inputs,
        maps,
        CLASSES,
        perturbation=lambda x, j: changes[j],
        draws=5,
        optimal_scaling=normalize,
    )
    agree(found, expected.detach())


def test_max_sensitivity_agrees_with_captum(model):
    inputs, maps = batch(model)
    seen = []

    def attribute(x, target):
        seen.append(x)
        return rectgrad.attribute(model, x, "saliency", target)

    found = metrics.max_sensitivity(inputs, maps, CLASSES, attribute=attribute, radius=0.1, draws=4)
    noisy = torch.stack(seen, 1).flatten(0, 1)
    expected = sensitivity_max(
        lambda x, target: rectgrad.attribute(model, x, "saliency", target),
        inputs,
        perturb_func=lambda x: noisy,
        n_perturb_samples=4,
        target=CLASSES,
    )
    agree(found, expected)


def test_max_sensitivity_agrees_with_quantus(model):
    inputs, maps = batch(model)
    seen = []

    def attribute(x, target):
        seen.append(x)
        return rectgrad.attribute(model, x, "saliency", target)

    found = metrics.max_sensitivity(inputs, maps, CLASSES, attribute=attribute, radius=0.1, draws=4)
    noisy = iter([each.flatten(1).numpy() for each in seen])
    metric = quantus.MaxSensitivity(
        nr_samples=4,
        abs=False,
        normalise=False,
        perturb_func=lambda arr, indices, **_: next(noisy),
        disable_warnings=True,
    )

    def explain(model, inputs, targets, **_):
        return rectgrad.attribute(
            model, torch.from_numpy(inputs), "saliency", torch.from_numpy(targets)
        ).numpy()

    agree(found, ask_quantus(metric, model, inputs, maps, explain_func=explain))


def test_infidelity_agrees_with_quantus(model):
    inputs, maps = batch(model)
    black = inputs.flatten(1).amin(1)[:, None, None, None]

    def growing(x, j):
        """Blocks of 8 x 8 pixels are removed in reading order, j + 1 of them."""
        number = torch.arange(32)[:, None] // 8 * 4 + torch.arange(32) // 8
        return torch.where(number <= j, x - black, 0)

    metric = quantus.Infidelity(perturb_patch_sizes=[8], n_perturb_samples=2, disable_warnings=True)
    expected = ask_quantus(metric, model, inputs, maps, softmax=False)
    agree(metrics.infidelity(model, inputs, maps, CLASSES, perturbation=growing, draws=16), expected)


def test_road_agrees_with_quantus(model):
    inputs, maps = batch(model)
    pixels = maps.sum(1, keepdim=True)
    channels = torch.cat([pixels, *[pixels.amin().expand_as(pixels) - 1] * 2], 1)
    shares = [10, 20, 30, 40, 50, 70, 90]
    metric = quantus.ROAD(
        percentages=[p / 3 for p in shares], noise=0.0, normalise=False, disable_warnings=True
    )
    classes = model(inputs).argmax(1)
    accuracy = metric(
        model=model,
        x_batch=inputs.numpy().copy(),
        y_batch=classes.numpy(),
        a_batch=channels.numpy(),
        device="cpu",
    )
    found = metrics.road(model, inputs, maps, noise=0.0)
    agree(found.correct.mean(0), list(accuracy.values()))
    assert 0 < float(found.correct.mean()) < 1


def test_imputed_images_agree_with_quantus(model):
    inputs, maps = batch(model)
    seen = []
    metrics.road(lambda x: seen.append(x) or model(x), inputs, maps, CLASSES, noise=0.0)
    order = maps.sum(1).flatten(1).argsort(dim=1, descending=True, stable=True).numpy()
    for fraction, images in zip((0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9), seen, strict=True):
        for photo, indices, found in zip(inputs.numpy(), order, images, strict=True):
            first = indices[: int(fraction * 1024)]
            agree(found, quantus.functions.perturb_func.noisy_linear_imputation(photo, first, noise=0.0))


def test_deletion_agrees_with_quantus(model):
    grey = Grey(model).eval()
    inputs, maps = batch(grey, channels=1)
    metric = quantus.PixelFlipping(
        features_in_step=64, normalise=False, perturb_baseline=0.3, disable_warnings=True
    )
    expected = ask_quantus(metric, grey, inputs, maps)
    found = metrics.deletion(lambda x: grey(x).softmax(1), inputs, maps, CLASSES, steps=16, baseline=0.3)
    agree(found[:, 1:], expected)


def test_sensitivity_n_agrees_with_quantus_faithfulness_correlation(model):
    grey = Grey(model).eval()
    inputs, maps = batch(grey, channels=1)
    metric = quantus.FaithfulnessCorrelation(
        nr_runs=20,
        subset_size=100,
        perturb_baseline=0.3,
        normalise=False,
        return_aggregate=False,
        disable_warnings=True,
    )
    np.random.seed(0)
    expected = ask_quantus(metric, grey, inputs, maps, softmax=False)
    np.random.seed(0)
    subsets = []
    for _ in range(20):
        chosen = torch.zeros(6, 1024, dtype=torch.bool)
        for own in chosen:
            own[torch.from_numpy(np.random.choice(1024, 100, replace=False))] = True
        subsets.append(chosen)
    scores = Scores(grey, CLASSES, 6)
    found = subset_correlation(
        scores, scores(inputs), inputs, torch.full_like(inputs, 0.3), maps, iter(subsets)
    )
    agree(found, expected)


def test_randomisation_agrees_with_quantus(model):
    inputs, maps = batch(model)
    seen = []

    def explain(model, inputs, targets, **_):
        found = rectgrad.attribute(model, torch.from_numpy(inputs), "saliency", torch.from_numpy(targets))
        seen.append(found)
        return found.numpy()

    expected = ask_quantus(quantus.MPRT(disable_warnings=True), model, inputs, maps, explain_func=explain)
    assert list(expected) == ["original", "dense2", "dense1", "conv4", "conv3", "conv2", "conv1"]
    agree(metrics.randomisation(maps, seen).T, list(expected.values()))


def test_shares_inside_a_mask_agree_with_quantus(model):
    inputs, maps = batch(model)
    mask = torch.zeros(6, 1, 32, 32, dtype=torch.bool)
    mask[:, :, 5:20, 8:30] = True
    positive = maps.sum(1, keepdim=True).clamp(min=0)
    metric = quantus.RelevanceMassAccuracy(normalise=False, disable_warnings=True)
    expected = ask_quantus(metric, model, inputs, positive, s_batch=mask.numpy())
    agree(metrics.inside(positive, mask, share=True), expected)
