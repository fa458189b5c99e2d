"""ROAR and KAR: which pixels are removed, which cells there are, areas and findings."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from rectgrad.data import shapes
from rectgrad.experiments import rankings, roar_kar
from rectgrad.experiments.roar_kar import Cell
from rectgrad.models import load

PAPER = roar_kar.PRESETS["paper"]


def test_the_papers_cells_come_first():
    cells = roar_kar.cells(PAPER)
    assert len(cells) == len(set(cells)) == len({cell.name for cell in cells}) == 270 + 45 + 90
    assert all(cell.mode in ("roar", "kar") and not cell.blurred for cell in cells[:270])
    assert {cell.mode for cell in cells[270:315]} == {"mask"}
    assert all(cell.blurred and cell.seed == 0 for cell in cells[315:])


def test_roar_removes_what_kar_keeps():
    ranks = torch.arange(1024)
    for fraction in PAPER["fractions"]:
        gone = []
        for mode in ("roar", "kar", "mask"):
            hidden = Cell("rectgrad", mode, fraction, 0).hidden(0)
            gone.append((ranks >= hidden.low) & (ranks < hidden.high))
            assert hidden.mask_alone == (mode == "mask")
        assert torch.equal(gone[0], ~gone[1])
        assert torch.equal(gone[0], gone[2])
        assert int(gone[0].sum()) == round(1024 * fraction)
        assert gone[0][0]  # the most important pixel


def test_areas_by_hand():
    fractions = [0.1, 0.3, 0.5, 0.7, 0.9]
    assert roar_kar.area([0.5] * 5, fractions, "roar") == pytest.approx(0.5)
    assert roar_kar.area([0.5] * 5, fractions, "kar") == pytest.approx(0.5)
    falling = [0.9, 0.7, 0.5, 0.3, 0.1]
    assert roar_kar.area(falling, fractions, "roar") == pytest.approx(0.5)
    assert roar_kar.area([1, 0, 0, 0, 0], fractions, "roar") == pytest.approx(0.125)
    assert roar_kar.area([1, 0, 0, 0, 0], fractions, "kar") == pytest.approx(0.875)


def test_places_are_those_of_sorting():
    torch.manual_seed(0)
    values = torch.randn(4, 1024)
    found = rankings.ranks(values)
    for row, ranks in zip(values.tolist(), found.tolist(), strict=True):
        order = sorted(range(1024), key=lambda i: -row[i])
        assert [ranks[i] for i in order] == list(range(1024))


def test_blur_is_scipys():
    maps = torch.randn(3, 32, 32)
    for given, found in zip(maps.numpy(), rankings.blur(maps).numpy(), strict=True):
        assert np.abs(found - ndimage.gaussian_filter(given, 1.0, mode="nearest", truncate=4)).max() < 1e-5


def test_a_ranking_is_of_the_map_and_the_same_every_time():
    module, images = load("cifar10_cnn").module, shapes.generate(5, 0)
    first, again = (rankings.ranking(module, images, "saliency", seed=1) for _ in range(2))
    assert torch.equal(first, again)
    assert (first.long().sort(1).values == torch.arange(1024)).all()
    maps = rankings.comparison_map(module, roar_kar_inputs(images), "saliency").flatten(1)
    best = first.argmin(1)
    assert (maps[torch.arange(5), best] >= maps.amax(1) - 5e-4).all()


def roar_kar_inputs(images):
    return rankings.scaled(images.pixels)


def metrics(roar: dict[str, float], kar: dict[str, float], mask: float = 0.1) -> dict:
    """Flat curves with the given areas, spread over three seeds by 0.001."""
    numbers = {"methods": list(roar), "fractions": [0.1, 0.5, 0.9], "seeds": 3}
    accuracies = {}
    for cell in roar_kar.cells(numbers):
        level = {"roar": roar[cell.method], "kar": 1 - kar[cell.method], "mask": mask}[cell.mode]
        accuracies[cell] = level + 0.001 * (cell.seed - 1)
    return roar_kar.summarise(accuracies, numbers)


def test_findings_follow_the_numbers():
    roar = {"random": 0.60, "rectgrad": 0.50, "saliency": 0.55}
    kar = {"random": 0.40, "rectgrad": 0.35, "saliency": 0.30}
    found = roar_kar.findings(metrics(roar, kar))
    assert [finding.holds for finding in found] == [True, False, True, True]
    close = roar_kar.findings(metrics({**roar, "saliency": 0.5005}, kar, mask=0.5))
    assert [finding.holds for finding in close] == [None, False, False, True]
    single = {**metrics(roar, kar)}
    for name in roar:
        for mode in ("roar", "kar"):
            single[name] = {
                **single[name],
                mode: {**single[name][mode], "area": {"mean": roar[name], "std": 0.0, "n": 1}},
            }
    assert [finding.holds for finding in roar_kar.findings(single)][:2] == [
        None,
        None,
    ]  # inconclusive with one seed
    table = roar_kar.tables(metrics(roar, kar))[0]
    assert table.rows[1][:4] == ["RectGrad", "0.5000 ± 0.0010", "0.5385", "0.4990"]
