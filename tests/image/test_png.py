"""Sheets as PNG files: smaller than lossless ones, and the same to the eye."""

import io

import numpy as np
import pytest
from PIL import Image
from skimage.metrics import structural_similarity

from rectgrad import image, photos
from rectgrad.photos.files import sample_photos


def decoded(content):
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()  # checks the checksums
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return np.asarray(picture)


def lossless(picture):
    stream = io.BytesIO()
    picture.save(stream, format="PNG", compress_level=3)
    return stream.getvalue()


def drawn(path):
    """Photo, map and overlay as a sheet has them; the map is sparse and follows edges."""
    whole = photos.read(path)
    side = min(whole.size)
    photo = whole.crop((0, 0, side, side)).resize((224, 224), Image.Resampling.BICUBIC)
    down, across = np.gradient(np.asarray(photo.convert("L"), dtype=np.float32))
    map = image.final_threshold(np.hypot(down, across))
    panels = [
        image.Panel(photo, "photo", smooth=True),
        image.Panel(image.colour(map), "rectgrad"),
        image.Panel(image.overlay(photo, map), "overlay"),
        image.Panel(image.bar(map, 448), framed=False),
    ]
    return image.sheet([panels], path.stem, cell=448, notes=["Specificity 0.10."])


@pytest.mark.parametrize("photo", sample_photos(), ids=lambda source: source.name)
def test_a_sheet_is_small_and_looks_the_same(photo):
    page = drawn(photo.path)
    content = image.png(page)
    saved, before = decoded(content), np.asarray(page)
    assert saved.shape == before.shape
    assert structural_similarity(saved, before, channel_axis=2) > 0.99
    assert len(content) < 0.66 * len(lossless(page))


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (7, 16), (9, 17), (30, 33)])
@pytest.mark.parametrize("kind", ["noise", "smooth", "white", "black"])
def test_colours_are_rounded_and_nothing_else(size, kind):
    rng = np.random.default_rng(0)
    picture = Image.new("RGB", size, kind if kind in ("white", "black") else 0)
    if kind == "noise":
        picture = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    if kind == "smooth":
        picture = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)).resize(size)
    values = np.asarray(picture)
    assert np.array_equal(decoded(image.png(picture)), 5 * np.round(values / 5))


def test_other_modes_are_saved_as_rgb():
    grey = Image.linear_gradient("L")
    assert np.array_equal(decoded(image.png(grey)), decoded(image.png(grey.convert("RGB"))))
