"""The composites of a verdict: enough of them, none that repeats the evidence of another one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rectgrad
from rectgrad.verdict.case import Case, part_name
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.rows import rows_of

QUICK = replace(PRESETS["quick"], composites=12)


class Brightest(nn.Module):
    """The class of a picture is its brightest channel; larger scales make it surer."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return self.scale * x.relu().mean((2, 3))


def pictures(n, classes=4, side=8):
    """Class i is brightest in channel i, by an amount that differs from photo to photo."""
    random = torch.Generator().manual_seed(0)
    x = 0.1 * torch.rand(n, classes, side, side, generator=random)
    strength = 1 + 4 * torch.rand(n, generator=random)
    x[torch.arange(n), torch.arange(n) % classes] += strength[:, None, None]
    return x


def case(x, scale=1.0, preset=QUICK, measures=("grid_pointing",)):
    return Case(Brightest(scale).eval(), x, preset, measures)


def test_composites_are_tried_until_there_are_enough():
    """This network recognises all classes only if they are about equally bright."""
    x = pictures(50)
    found = case(x, 15.0).grid
    assert (found.shape, len(found.photos)) == ((2, 2), QUICK.composites)
    assert found.tried > 3 * QUICK.composites
    images = rectgrad.metrics.grid.composites(x, found.photos, found.shape, fit=True)
    sure = Brightest(15.0)(images).detach().softmax(1)  # the classes of a composite are all four
    assert float(sure.min()) > 0.02


def test_a_photo_is_asked_for_once():
    """Six photos are no more evidence in twelve grids than in six."""
    found = case(pictures(6)).grid
    asked = [int(photos[i % 4]) for i, photos in enumerate(found.photos)]
    assert sorted(asked) == list(range(6))


def test_few_photos_in_many_grids_answer_nothing():
    x = pictures(5)
    methods = {"truth": rectgrad.GradientXInput()}
    found = rectgrad.judge(Brightest().eval(), x, methods, measures="grid,specificity")
    assert found.answers["why this class"] == "inconclusive"
    said = {each["what"]: each["why"] for each in found.failures}
    assert said['"why this class"'].startswith("5 grids of photos are too few")
    assert found.record["grid"]["kept"] == 5
    assert found.record["grid"]["tried"] >= 5


def test_pairs_where_too_few_larger_grids_are_recognised():
    found = case(pictures(50), 25.0).grid
    assert found.shape == (1, 2)
    assert len(found.photos) == QUICK.composites


def test_full_size_needs_enough_photos_of_which_the_network_is_sure():
    x = pictures(60)
    full = replace(QUICK, full_size=True)
    assert not case(x, 25.0, full).grid.fit
    assert case(x, 0.1, full).grid.fit


REASONS = {
    "the network recognises every class in 0 of 600 grids that were tried": (pictures(40, 2), 1e4),
    "the network's top class is the same for all photos": (pictures(40)[::4], 1.0),
    "photos of 1 x 1 pixels are too small for grids": (pictures(40, side=1), 1.0),
    "grids need photos (C, H, W), not (4, 3, 8, 8)": (
        pictures(40)[:, :, None].expand(-1, -1, 3, -1, -1),
        1.0,
    ),
}


@pytest.mark.parametrize("why", REASONS)
def test_why_there_are_no_grids(why):
    x, scale = REASONS[why]
    given = case(x, scale)
    if x.dim() == 5:
        given = replace(given, model=lambda images: images.mean((2, 3, 4)))
    assert given.unavailable == {"grid_pointing": why}
    assert not [chunk for chunk in given.chunks() if chunk.composite]


def test_photos_of_one_pixel_are_judged():
    found = rectgrad.judge(Brightest().eval(), pictures(8, side=1), ["saliency"], measures="grid,gini")
    assert found.table["gini"]["saliency"]["n"] == 8
    assert "too small for grids" in found.failures[0]["why"]


def test_parts_of_other_composites_are_not_used():
    """Rounding may decide whether a composite is kept; a part must not be taken for that of another one."""
    row = rows_of(["saliency"], QUICK, 0)[0]
    names = []
    for scale in (1.0, 15.0):
        names.append({part_name("grid", row, c) for c in case(pictures(50), scale).chunks() if c.composite})
    assert names[0]
    assert not names[0] & names[1]
