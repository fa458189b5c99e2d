"""ROAD and its linear imputation, compared with a dense solution of the same system."""

import numpy as np
import pytest
import torch
from torch import nn

from rectgrad import metrics
from rectgrad.metrics import removal
from rectgrad.metrics.curves import pixel_order
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.imputation import linear_imputation
from rectgrad.metrics.scores import Scores
from reference import metrics as slow

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
INPUTS, MAPS = torch.rand(4, 3, 8, 8), torch.rand(4, 8, 8)
MODEL[3].bias.data -= MODEL(INPUTS).mean(0)  # so that the classes differ


def masks(kind, n, height, width, share):
    """(N, 1, H, W): scattered pixels, one hole in the middle, all but a corner, or blocks of 4 x 4."""
    random = torch.Generator().manual_seed(1)
    rows, columns = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)
    values = {
        "scattered": torch.rand(n, height, width, generator=random),
        "hole": -(rows**2 + columns**2).expand(n, -1, -1),
        "corner": (rows + 0.9 * columns).expand(n, -1, -1),
        "blocks": torch.rand(n, -(-height // 4), -(-width // 4), generator=random)
        .repeat_interleave(4, 1)
        .repeat_interleave(4, 2)[:, :height, :width],
    }[kind].flatten(1)
    order = values.argsort(dim=1, descending=True, stable=True)[:, : int(share * height * width)]
    found = torch.zeros(n, height * width, dtype=torch.bool).scatter_(1, order, True)
    return found.reshape(n, 1, height, width)


def photos(n, height, width, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    smooth = nn.functional.interpolate(
        torch.randn(n, 3, 4, 4, generator=random), (height, width), mode="bicubic"
    )
    return (smooth + 0.3 * torch.randn(n, 3, height, width, generator=random)).to(dtype)


@pytest.mark.parametrize("kind", ["scattered", "hole", "corner", "blocks"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (17, 26), (8, 8), (6, 40)])
def test_imputation_solves_the_linear_system(kind, share, height, width):
    images, removed = photos(3, height, width), masks(kind, 3, height, width, share)
    found = linear_imputation(images, removed)
    for image, gone, filled in zip(images.double(), removed, found, strict=True):
        expected = slow.linear_imputation(image.numpy(), gone[0].numpy())
        np.testing.assert_allclose(filled.numpy(), expected, rtol=0, atol=1e-4)
    assert torch.equal(found[~removed.expand_as(found)], images[~removed.expand_as(images)])


@pytest.mark.parametrize("kind", ["scattered", "hole", "blocks"])
def test_large_images_satisfy_the_equations(kind):
    """A dense solution is out of reach; every removed pixel must be the mean of its neighbours."""
    removed = masks(kind, 1, 224, 224, 0.9)
    found = linear_imputation(photos(1, 224, 224, torch.float64), removed, tolerance=1e-9)
    weights = torch.tensor([[1.0, 2, 1], [2, 0, 2], [1, 2, 1]]).double()[None, None] / 12
    mean = nn.functional.conv2d(found, weights.expand(3, -1, -1, -1), padding=1, groups=3)
    mean = mean / nn.functional.conv2d(torch.ones_like(found[:, :1]), weights, padding=1)
    assert float(torch.where(removed, found - mean, 0).abs().max()) < 1e-9


def test_imputation_of_an_image_does_not_depend_on_the_batch():
    images = photos(5, 24, 20, torch.float64)
    removed = torch.cat(
        [masks(kind, 1, 24, 20, 0.7) for kind in ("scattered", "hole", "corner", "blocks")] * 2
    )[:5]
    alone = [linear_imputation(images[i : i + 1], removed[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(linear_imputation(images, removed), torch.cat(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["scattered", "hole", "blocks"])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.2, 0.7])
def test_single_precision_is_enough_for_every_mask(kind, share):
    """Few scattered pixels make the coarse grids nearly singular."""
    images, removed = photos(200, 32, 32), masks(kind, 200, 32, 32, share)
    exact = linear_imputation(images.double(), removed, tolerance=1e-11)
    torch.testing.assert_close(linear_imputation(images, removed).double(), exact, rtol=0, atol=5e-5)


def test_a_constant_image_and_a_mask_without_pixels_stay_as_they_are():
    flat = torch.full((2, 3, 12, 12), 0.7)
    torch.testing.assert_close(linear_imputation(flat, masks("hole", 2, 12, 12, 0.9)), flat)
    images = photos(2, 12, 12)
    assert torch.equal(linear_imputation(images, torch.zeros(2, 1, 12, 12, dtype=torch.bool)), images)


def expected_images(order, fraction):
    found = []
    for image, m in zip(INPUTS.double().numpy(), MAPS.double().numpy(), strict=True):
        places = slow.ranked_pixels(m[None])
        places = places if order == "most" else places[::-1]
        removed = np.zeros((8, 8), dtype=bool)
        for y, x in places[: int(fraction * 64)]:
            removed[y, x] = True
        found.append(slow.linear_imputation(image, removed))
    return torch.from_numpy(np.stack(found)).float()


@pytest.mark.parametrize("order", ["most", "least"])
@pytest.mark.parametrize("target", [None, 2, [0, 1, 2, 4]])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_road(order, target, batch_size):
    fractions = (0.1, 0.3, 0.9)
    found = metrics.road(
        MODEL, INPUTS, MAPS, target, fractions=fractions, order=order, noise=0, batch_size=batch_size
    )
    classes = MODEL(INPUTS).argmax(1) if target is None else torch.as_tensor(target).expand(4)
    assert len(set(MODEL(INPUTS).argmax(1).tolist())) > 1
    for k, fraction in enumerate(fractions):
        outputs = MODEL(expected_images(order, fraction)).detach()
        assert torch.equal(found.correct[:, k], (outputs.argmax(1) == classes).float())
        expected = outputs.softmax(1)[range(4), classes]
        torch.testing.assert_close(found.probability[:, k], expected, rtol=0, atol=1e-4)


def seen_by(noise, seed=0, inputs=INPUTS, maps=MAPS, **options):
    """The images that the model is shown, without the clean ones."""
    seen = []

    def model(x):
        seen.append(x.clone())
        return x.flatten(1)[:, :3]

    metrics.road(model, inputs, maps, 0, noise=noise, seed=seed, fractions=(0.5,), **options)
    return torch.cat(seen)


def test_noise_is_on_the_removed_pixels_only():
    inputs, maps = photos(3, 64, 64), torch.rand(3, 64, 64)
    clean, noisy = (seen_by(noise, inputs=inputs, maps=maps) for noise in (0.0, 0.3))
    removed = maps.flatten(1).argsort(1, descending=True).argsort(1).reshape(3, 1, 64, 64) < 2048
    added = noisy - clean
    assert float(added.masked_fill(removed, 0).abs().max()) == 0
    assert float(added[removed.expand_as(added)].std()) == pytest.approx(0.3, rel=0.05)
    both = (removed[0] & removed[1]).expand(3, -1, -1)  # every photo has its own noise
    assert float((added[0] - added[1])[both].std()) == pytest.approx(0.3 * 2**0.5, rel=0.05)


def test_noise_depends_on_the_seed_and_the_sample_alone():
    assert torch.equal(seen_by(0.1), seen_by(0.1, batch_size=1))
    assert torch.equal(seen_by(0.1)[2:], seen_by(0.1, inputs=INPUTS[2:], maps=MAPS[2:]))
    assert not torch.equal(seen_by(0.1), seen_by(0.1, seed=1))


def test_fractions_are_not_rounded_down_by_floating_point():
    """0.29 * 100 is 28.999999999999996."""
    maps = torch.arange(100.0).reshape(1, 10, 10)
    inputs = torch.ones(1, 1, 10, 10)
    seen = []
    metrics.road(
        lambda x: seen.append(x) or x.flatten(1)[:, :2], inputs, maps, 0, fractions=(0.29,), noise=1.0
    )
    assert int((seen[0] != 1).sum()) == 29


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_model_sees_the_type_of_the_inputs(dtype):
    seen = []
    found = metrics.road(
        lambda x: seen.append(x.dtype) or x.flatten(1)[:, :3],
        INPUTS.to(dtype),
        MAPS.to(dtype),
        fractions=(0.5,),
    )
    assert set(seen) == {dtype}
    assert found.probability.dtype == found.correct.dtype == torch.float32


ERRORS = {
    "road(order='first')": lambda: metrics.road(MODEL, INPUTS, MAPS, order="first"),
    "road(fractions=(0.5, 1.0))": lambda: metrics.road(MODEL, INPUTS, MAPS, fractions=(0.5, 1.0)),
    "road(inputs of shape (4, 3, 8, 8), maps of shape (4, 8, 7))": lambda: metrics.road(
        MODEL, INPUTS, MAPS[..., 1:]
    ),
    "needs a classifier": lambda: metrics.road(lambda x: x.sum((1, 2, 3)), INPUTS, MAPS),
    "needs classes from 0 to 4": lambda: metrics.road(MODEL, INPUTS, MAPS, 5),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_restate_the_call(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert message in str(error.value)


def answered(photos=slice(None), size=None):
    """The answers for some of the photos, with the noise that they have among all."""
    rank, random = pixel_order("road", INPUTS, MAPS), Draws(INPUTS, 0)
    noise = [0.1 * random.normal(3, 8, 8)[photos] for _ in range(5)]
    inputs = INPUTS[photos]
    scores = Scores(MODEL, MODEL(inputs).argmax(1), len(inputs), size)
    return removal.answers(scores, inputs, rank[photos], (0.1, 0.3, 0.5, 0.7, 0.9), noise)


@pytest.mark.parametrize("size", [1, 3])
def test_answers_do_not_depend_on_chunks(size):
    whole, parts = answered(), [answered(slice(0, 1)), answered(slice(1, 4))]
    for k in range(2):
        torch.testing.assert_close(torch.cat([part[k] for part in parts]), whole[k], rtol=0, atol=1e-5)
        torch.testing.assert_close(answered(size=size)[k], whole[k], rtol=0, atol=1e-5)


@pytest.mark.parametrize("together", [2, 5, 100])
@pytest.mark.parametrize("size", [None, 3])
def test_masks_that_are_solved_together_give_the_same_answers(monkeypatch, together, size):
    """As on a GPU."""
    expected = answered(size=size)
    monkeypatch.setattr(removal, "_together", lambda inputs: together)
    solved = []

    def counted(images, removed):
        solved.append(len(images))
        return linear_imputation(images, removed)

    monkeypatch.setattr(removal, "linear_imputation", counted)
    found = answered(size=size)
    assert sum(solved) == 5 * len(INPUTS)
    assert max(solved) == min(together * (size or 4), 5 * 4)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
