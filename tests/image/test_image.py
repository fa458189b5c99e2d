"""Maps to pictures: the numbers behind the colours."""

import numpy as np
import pytest
import torch
from PIL import Image

from rectgrad import image


def test_a_plane_is_the_sum_over_channels():
    values = torch.arange(24.0).reshape(2, 3, 4)
    assert np.array_equal(image.plane(values), values.sum(0).numpy())
    assert np.array_equal(image.plane(values.bfloat16()[None]), values.sum(0).numpy())
    with pytest.raises(ValueError, match=r"\(2, 2, 3, 4\)"):
        image.plane(torch.zeros(2, 2, 3, 4))


def test_the_final_threshold_zeroes_below_the_95th_percentile():
    values = np.arange(100.0).reshape(10, 10)
    cut = image.final_threshold(values)
    assert np.count_nonzero(cut) == 5
    assert cut.max() == 99
    negative = image.final_threshold(values - 200)
    assert np.unique(negative).size == 6
    assert negative.min() == pytest.approx(np.percentile(values - 200, 95))


def test_values_are_capped_at_half_a_percent_on_either_side():
    values = np.linspace(-1, 1, 10_000).reshape(100, 100)
    values[0, 0], values[-1, -1] = -50, 50
    capped, limit = image.cap(values)
    assert limit == pytest.approx(0.99, abs=0.005)
    assert capped.max() == pytest.approx(0.99, abs=0.005)
    assert capped.min() == pytest.approx(-0.99, abs=0.005)


def test_a_sparse_map_is_not_capped_to_nothing():
    """Where the percentile is 0, the largest value takes its place."""
    values = np.zeros((100, 100))
    values[3, 4] = 7
    capped, limit = image.cap(values)
    assert (capped.max(), limit) == (7, 7)


def test_colours_say_sign_and_size():
    values = np.array([[-1.0, -0.5, 0.0, 0.5, 1.0]]).repeat(5, 0)
    pixels = np.asarray(image.colour(values)).astype(int)[0]
    blue, white, red = pixels[0], pixels[2], pixels[4]
    assert blue[2] > blue[0]
    assert red[0] > red[2]
    assert white.min() >= 250
    assert pixels[1].sum() > blue.sum()
    assert image.scheme_of(np.abs(values)) == "unsigned"
    assert np.asarray(image.colour(values, dark=True))[0, 2].max() < 30


def test_a_zero_map_is_an_empty_page():
    assert np.asarray(image.colour(np.zeros((4, 4)), "signed")).min() >= 250
    with pytest.raises(ValueError, match="signed_dark"):
        image.colour(np.zeros((4, 4)), "viridis")


def test_an_overlay_leaves_the_photo_where_the_map_is_zero():
    photo = Image.new("RGB", (40, 40), (90, 90, 90))
    values = np.zeros((40, 40))
    values[:10] = 1
    values[10:20] = -1
    pixels = np.asarray(image.overlay(photo, values)).astype(int)
    assert pixels[2, 5, 0] > pixels[2, 5, 2] + 40
    assert pixels[15, 5, 2] > pixels[15, 5, 0] + 40
    assert np.ptp(pixels[30, 5]) == 0


def test_a_sheet_holds_its_panels_at_their_place():
    panels = [image.Panel(Image.new("RGB", (50, 50), colour), colour) for colour in ("red", "green", "blue")]
    page = image.sheet([panels, panels[::-1]], "three colours", labels=["one", "two"])
    found = {page.getpixel((x, y)) for x in range(page.width) for y in range(0, page.height, 5)}
    assert {(255, 0, 0), (0, 128, 0), (0, 0, 255)} <= found
    assert page.getpixel((1, 1)) == (255, 255, 255)
    assert image.sheet([panels], dark=True).getpixel((1, 1)) == (16, 17, 20)


def test_a_long_caption_is_shortened():
    """Class names come from files of others; the page is as wide as its caption."""
    panels = [[image.Panel(Image.new("RGB", (50, 50)))]]
    assert image.sheet(panels, "a" * 100_000).width < image.sheet(panels, "a" * 200).width + 50


def test_small_pictures_are_enlarged_by_whole_pixels():
    tiny = Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]] * 2, dtype=np.uint8))
    page = image.sheet([[image.Panel(tiny, framed=False)]], cell=64)
    values = np.unique(np.asarray(page))
    assert set(values) == {0, 255}


def test_the_colour_bar_names_the_capped_range():
    """The same numbers in the figure for papers."""
    values = np.zeros((30, 30))
    values[0, 0], values[1, 1] = 0.25, -0.5
    figure = image.figure(values, title="a map")
    (low, high) = figure.axes[-1].get_ylim()
    assert (low, high) == (-0.5, 0.5)
    assert "99.5th" in figure.axes[-1].get_ylabel()
    assert image.bar(values, 100).size[1] == 100


def test_a_notebook_shows_what_show_returns():
    photo = Image.new("RGB", (30, 30), "teal")
    figure = image.figure(torch.rand(3, 30, 30), photo, "cat")
    assert len(figure.axes) == 4
    assert figure._suptitle.get_text() == "cat"
    shown = image.show(torch.rand(3, 30, 30), photo, "cat")
    assert shown._repr_png_()[:4] == b"\x89PNG"
    assert (np.asarray(shown.convert("RGB")) == (0, 128, 128)).all(-1).any()
