"""What the rows of a chunk share gives the numbers of separate work and of the metrics themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import rectgrad
from rectgrad import metrics
from rectgrad.verdict.case import Case, Chunk
from rectgrad.verdict.matched import Matched
from rectgrad.verdict.measures import MEASURES
from rectgrad.verdict.photos import Known, Replayed
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.rows import Row, rows_of
from rectgrad.verdict.work import UNITS, Worker

SMALL = replace(PRESETS["quick"], steps=4, draws=3, stages=2, subsets=5, squares=6, chunk=6)
METHODS = ["saliency", "rectgrad", "gradcam"]


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(200, 4),
    ).eval()
    x = torch.rand(6, 3, 14, 14)
    with torch.no_grad():
        net[-1].weight *= 5
        net[-1].bias -= net(x).mean(0)
    masks = torch.rand(6, 14, 14) > 0.5
    return Case(net, x, SMALL, tuple(MEASURES), 3, masks)


@pytest.fixture(scope="module")
def rows():
    return rows_of(METHODS, SMALL, 3)


def without_seconds(values):
    return {key: value for key, value in values.items() if key != "seconds"}


@pytest.fixture(scope="module")
def shared(case, rows):
    """All units of all rows, by one object."""
    photos = Worker(case).opened(Chunk(0, 6))
    return {(unit, row.name): without_seconds(photos.compute(unit, row)) for row in rows for unit in UNITS}


def test_shared_work_gives_the_numbers_of_separate_work(case, rows, shared):
    for row in reversed(rows):
        for unit in reversed(UNITS):
            alone = without_seconds(Worker(case).opened(Chunk(0, 6)).compute(unit, row))
            assert "error" not in alone
            np.testing.assert_equal(alone, shared[unit, row.name])


def test_shared_work_gives_the_numbers_of_the_metrics(case, shared):
    x, net = case.inputs, case.model
    target = net(x).argmax(1)
    assert len(target.unique()) > 1

    def probabilities(images):
        return net(images).softmax(1)

    def road(order):
        return metrics.road(net, x, maps, target, order=order, seed=3)

    zero, infidelity = (
        torch.zeros_like(x),
        {"draws": 6, "seed": 3, "baseline": "mean", "perturbation": "square"},
    )
    for name in METHODS:

        def attribute(inputs, classes, name=name):
            return rectgrad.attribute(net, inputs, name, classes)

        maps = attribute(x, target)
        effects = maps * (x - x.mean((2, 3), keepdim=True)) if name == "saliency" else maps
        ratio = [
            metrics.infidelity(net, x, each, target, multiplied=True, optimal_scaling=True, **infidelity)
            for each in (effects, zero)
        ]
        expected = {
            "insertion_mean": metrics.area(
                metrics.insertion(probabilities, x, maps, target, steps=4, baseline="mean")
            ),
            "deletion_blur": metrics.area(
                metrics.deletion(probabilities, x, maps, target, steps=4, baseline="blur")
            ),
            "road": (road("least").probability - road("most").probability).mean(1),
            "road_accuracy": (road("least").correct - road("most").correct).mean(1),
            "sensitivity_n": metrics.sensitivity_n(
                net, x, maps, target, fractions=SMALL.fractions, subsets=5, baseline="mean", seed=3
            ).nanmean(1),
            "infidelity": ratio[0] / ratio[1],
            "max_sensitivity": metrics.max_sensitivity(
                x, maps, target, attribute=attribute, radius=case.radius, draws=3, seed=3
            ),
            "specificity": metrics.specificity(maps, attribute(x, net(x).argmin(1))),
            "inside": metrics.inside(maps, case.masks, share=True),
        }
        zero_maps = (maps == 0).flatten(1).all(1)
        for measure, values in expected.items():
            found = shared[MEASURES[measure].unit, name][measure]
            values = values.masked_fill(zero_maps, torch.nan).tolist()
            assert found == pytest.approx(values, abs=2e-5, nan_ok=True), (name, measure)
            assert np.isfinite(found).any()


def test_the_network_runs_once_on_what_is_the_same_for_every_row(case, rows):
    seen = []
    hook = case.model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    photos = Worker(case).opened(Chunk(0, 6))
    counts = []
    for row in rows:
        seen.clear()
        photos.maps(row)
        maps = sum(seen)
        photos.compute("removal", row)
        photos.compute("effects", row)
        counts.append(sum(seen) - maps)
    hook.remove()
    curves = 4 * (SMALL.steps - 1)  # without their ends
    road = 2 * 7
    baselines, subsets, squares = 2, 3 * SMALL.subsets, SMALL.squares
    assert counts[0] == 6 * (curves + road + baselines + subsets + squares)
    assert set(counts[1:]) == {6 * (curves + road)}


def test_rows_with_the_same_method_are_computed_once(case):
    photos = Worker(case).opened(Chunk(0, 6))
    first, again, other = (
        Row("a", rectgrad.RectGrad(q=90)),
        Row("b", rectgrad.RectGrad(q=90)),
        Row("c", rectgrad.RectGrad(q=80)),
    )
    assert photos.compute("removal", first) is photos.compute("removal", again)
    assert photos.compute("removal", other) != photos.compute("removal", first)


def test_matched_maps_are_processed_from_the_maps_of_their_method(case):
    base, method = Row("a", rectgrad.Saliency()), Matched(rectgrad.Saliency(), True, True, 0.9)
    photos = Worker(case).opened(Chunk(0, 6))
    photos.maps(base)
    seen = []
    hook = case.model.register_forward_pre_hook(lambda *_: seen.append(1))
    found = photos.maps(Row("a: matched", method))
    hook.remove()
    assert seen == []
    target = case.outputs.argmax(1)
    torch.testing.assert_close(found, rectgrad.attribute(case.model, case.inputs, method, target))


def test_known_images_are_recognised_by_their_memory():
    ran, x = [], torch.rand(2, 3)
    known = Known(lambda images: ran.append(1) or images.sum(1), [(x, torch.zeros(2))])
    assert known(x).tolist() == [0, 0]
    assert known(x.split(2)[0]).tolist() == [0, 0]
    assert ran == []
    assert known(x.clone()).tolist() == x.sum(1).tolist()
    assert known(x[:1]).tolist() == x[:1].sum(1).tolist()
    assert len(ran) == 2


def test_replayed_answers_follow_the_calls():
    replayed = Replayed(lambda images: images.sum(1))
    first = [replayed(torch.full((2, 3), float(i))) for i in range(3)]
    replayed.position = 0
    again = [replayed(torch.full((2, 3), -1.0)) for _ in range(3)]
    assert all(map(torch.equal, first, again))
    assert replayed(torch.ones(2, 3)).tolist() == [3, 3]
