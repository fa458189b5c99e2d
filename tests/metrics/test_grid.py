"""The grid pointing game: composites and scores."""

import pytest
import torch

from rectgrad import metrics
from rectgrad.metrics import controls
from rectgrad.metrics.grid import composites, grid_photos, recognised, recognised_cells, usable_photos
from reference import metrics as slow

SHAPES = [(2, 2), (3, 3), (1, 3)]


def test_photos_of_a_composite_have_distinct_classes():
    classes = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    found = grid_photos(classes, (2, 2), 50)
    assert found.shape == (50, 4)
    assert all(sorted(row) == [0, 1, 2, 3] for row in classes[found].tolist())
    assert set(found.flatten().tolist()) == set(range(8))
    assert torch.equal(found, grid_photos(classes.tolist(), (2, 2), 50))
    assert not torch.equal(found, grid_photos(classes, (2, 2), 50, seed=1))
    assert len({tuple(classes[row].tolist()) for row in found}) > 5  # the cells change too


@pytest.mark.parametrize("shape", SHAPES)
def test_a_composite_has_its_photos_in_reading_order(shape):
    photos, index = torch.rand(9, 3, 5, 6), grid_photos(range(9), shape, 4)
    found = composites(photos, index, shape)
    assert found.shape == (4, 3, 5 * shape[0], 6 * shape[1])
    for image, row in zip(found, index, strict=True):
        for cell, photo in enumerate(row):
            y, x = divmod(cell, shape[1])
            assert torch.equal(image[:, 5 * y : 5 * y + 5, 6 * x : 6 * x + 6], photos[photo])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fitted_composite_has_the_size_of_a_photo(shape):
    """Also if the cells cannot be equal; a photo of one colour stays one."""
    photos, index = torch.rand(9, 3, 1, 1).expand(9, 3, 32, 34), grid_photos(range(9), shape, 2)
    found = composites(photos, index, shape, fit=True)
    assert found.shape == (2, 3, 32, 34)
    for image, row in zip(found, index, strict=True):
        for cell, photo in enumerate(row):
            y, x = divmod(cell, shape[1])
            tall, wide = 32 / shape[0], 34 / shape[1]
            part = image[:, round(y * tall) : round((y + 1) * tall), round(x * wide) : round((x + 1) * wide)]
            torch.testing.assert_close(part, photos[photo, :, :1, :1].expand_as(part))


def test_composites_whose_classes_are_all_recognised():
    outputs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.38, 0.01, 0.01]]).log()
    assert recognised(outputs, torch.tensor([[0, 3], [0, 1]])).tolist() == [True, True]
    assert recognised(outputs, torch.tensor([[0, 3], [0, 3]])).tolist() == [True, False]
    assert recognised_cells(outputs, torch.tensor([[0, 3], [0, 3]])).tolist() == [[True, True], [True, False]]
    assert recognised(outputs, torch.tensor([[0, 3], [0, 1]]), least=0.1).tolist() == [False, True]


def test_usable_composites():
    """Only photo 0 may be asked for, or photos of class 1; every composite that is tried counts."""
    classes, seen = torch.arange(40) % 5, []

    def usable(photos):
        seen.append(photos)
        return (photos == 0) | (classes[photos] == 1)

    photos, tried = usable_photos(classes, (2, 2), 6, 2000, usable, seed=3)
    asked = [int(row[i % 4]) for i, row in enumerate(photos)]
    assert len(set(asked)) == 6
    assert all(i == 0 or classes[i] == 1 for i in asked)
    drawn = torch.cat(seen).tolist()
    assert 6 < tried <= len(drawn)
    assert photos.tolist()[-1] == drawn[tried - 1]
    assert all(len({int(classes[i]) for i in row}) == 4 for row in drawn)
    few, every = usable_photos(classes, (2, 2), 20, 300, usable, seed=3)  # of nine that may be asked for
    assert (len(few) <= 9, every) == (True, 300)
    assert few.tolist()[:6] == photos.tolist()
    none, tried = usable_photos(classes, (1, 2), 6, 50, lambda photos: photos < 0)
    assert (none.shape, tried) == ((0, 2), 50)
    assert usable_photos(classes, (1, 2), 100, 9999).photos.shape == (40, 2)  # one for each photo


@pytest.mark.parametrize("shape", SHAPES)
def test_grid_pointing(shape):
    maps = torch.randn(5, 3, 10, 13).double()
    maps[3] = maps[3].clamp(max=0)
    for cell in range(shape[0] * shape[1]):
        expected = [slow.grid_pointing(m.numpy(), shape, cell) for m in maps]
        found = metrics.grid_pointing(maps, shape, cell)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
        assert found[3] == 0
    cells = [0, 1, 2, 1, 0]
    expected = [slow.grid_pointing(m.numpy(), shape, cell) for m, cell in zip(maps, cells, strict=True)]
    assert metrics.grid_pointing(maps, shape, cells).tolist() == pytest.approx(expected)


def test_controls():
    flat, centred = torch.ones(1, 3, 30, 30), controls.centre(torch.ones(1, 3, 30, 30))
    for shape in SHAPES:
        chance = 1 / (shape[0] * shape[1])
        assert metrics.grid_pointing(flat, shape, 0).tolist() == pytest.approx([chance])
    assert metrics.grid_pointing(centred, (2, 2), 3).tolist() == pytest.approx([0.25])
    assert float(metrics.grid_pointing(centred, (3, 3), 4)) > 0.2


ERRORS = {
    "grid_photos(photos of 3 classes, shape=(2, 2))": lambda: grid_photos([0, 1, 2, 2], (2, 2), 1),
    "usable_photos(photos of 3 classes, shape=(2, 2))": lambda: usable_photos([0, 1, 2, 2], (2, 2), 1, 1),
    "grid_pointing(shape=(2, 2), cell=4)": lambda: metrics.grid_pointing(torch.rand(1, 8, 8), (2, 2), 4),
    "9 cells in 8 pixels": lambda: metrics.grid_pointing(torch.rand(1, 8, 8), (9, 2), 4),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_restate_the_call(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert message in str(error.value)
