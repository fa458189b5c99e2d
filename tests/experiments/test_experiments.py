"""Experiments: no part is computed twice, an interrupted run gives the same result, and the statistics."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import rectgrad
from rectgrad import data, training
from rectgrad.data import Dataset, scaled, shapes
from rectgrad.experiments import (
    EXPERIMENTS,
    feature_frequency,
    lab,
    maps,
    matched,
    noise_level,
    patch,
    rationale,
)
from rectgrad.experiments.parts import Parts
from rectgrad.experiments.reproduce import experiment, reproduce
from rectgrad.models import ModelUnavailableError
from rectgrad.models.fingerprint import weights_digest
from small_gallery import small_gallery

SMALL = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(100, 1), shapes.generate(60, 2))


def no_gallery(*given):
    raise ModelUnavailableError("no photos in this test")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the networks are that were trained."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(monkeypatch, tmp_path, cache):
    """A small dataset, a short training, few methods."""
    monkeypatch.setenv("RECTGRAD_CACHE", str(cache))
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    monkeypatch.setitem(lab.EPOCHS, "shapes", 6)
    monkeypatch.setattr(lab, "gallery", no_gallery)
    monkeypatch.setattr(noise_level, "COMPARED", ("saliency", "rectgrad", "guided_backprop"))
    monkeypatch.setattr(matched, "COMPARED", ("saliency", "rectgrad"))
    monkeypatch.setitem(noise_level.PRESETS, "quick", {"per_class": 2, "images": 30, "matched": 4})
    return tmp_path / "results"


def test_a_part_is_made_once(tmp_path):
    made = []
    for _ in range(3):
        parts = Parts(tmp_path, {"q": 98})
        assert parts.part("a b/c", lambda: made.append(1) or {"x": [1.5]}) == {"x": [1.5]}
    assert made == [1]
    Parts(tmp_path, {"q": 97}).part("a b/c", lambda: made.append(2) or 0)  # other settings, other parts
    assert made == [1, 2]
    parts.clear()
    (left,) = tmp_path.iterdir()  # those of other settings stay
    Parts(tmp_path, {"q": 97}).clear()
    assert not tmp_path.exists()
    assert left != parts.folder


def test_a_large_part_is_made_once(tmp_path):
    made = []
    for _ in range(2):
        parts = Parts(tmp_path, {})
        found = parts.array("order", lambda: made.append(1) or np.arange(5, dtype=np.int16))
        assert found.dtype == np.int16
        assert found.tolist() == [0, 1, 2, 3, 4]
    assert made == [1]


def test_a_quick_run_does_not_replace_a_long_one(small, monkeypatch):
    monkeypatch.setitem(noise_level.PRESETS, "paper", {"per_class": 2, "images": 20, "matched": 4})
    monkeypatch.setitem(lab.NETWORKS, "paper", 1)
    path = reproduce("noise-level", preset="paper", out=small)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="another folder with --out"):
        reproduce("noise-level", out=small)
    assert path.read_bytes() == before


def test_what_was_missing_is_shown_once_it_is_there(small, monkeypatch):
    """A record without photos is recomputed when photos become available; damaged photos are skipped."""
    first = json.loads(reproduce("rationale", out=small).read_text())
    assert first["notes"][0].startswith("no photos were shown")
    assert "rationale-photos.webp" not in first["figures"]
    monkeypatch.setattr(lab, "gallery", lambda *given: (small_gallery(), ["bad.png: broken"]))
    second = json.loads(reproduce("rationale", out=small).read_text())
    assert "rationale-photos.webp" in second["figures"]
    assert second["notes"] == ["skipped: bad.png: broken"]


def test_a_half_written_part_is_made_again(tmp_path):
    parts = Parts(tmp_path, {})
    parts.part("a", lambda: 1)
    (file,) = parts.folder.iterdir()
    file.write_text('{"part": "a", "val')
    assert parts.part("a", lambda: 2) == 2


class StoppedError(BaseException):
    pass


@pytest.mark.parametrize("seed", range(3))
def test_stopped_at_any_moment_the_outcome_is_the_same(seed, small, monkeypatch, tmp_path):
    whole = json.loads(reproduce("noise-level", out=small / "whole").read_text())
    rng = np.random.default_rng(seed)
    calls, stops = [0], set(rng.choice(8, 4, replace=False).tolist())

    def stopping(module, name):
        """Every call makes a part; some are stopped before or after their work."""
        original = getattr(module, name)

        def make(*args, **kwargs):
            calls[0] += 1
            if calls[0] - 1 in stops and rng.random() < 0.5:
                raise StoppedError
            found = original(*args, **kwargs)
            if calls[0] - 1 in stops:
                raise StoppedError
            return found

        monkeypatch.setattr(module, name, make)

    for module, name in ((noise_level, "_outside"), (noise_level, "_roughness"), (matched, "_values")):
        stopping(module, name)
    for _ in range(6):
        try:
            path = reproduce("noise-level", out=small / "stopped")
            break
        except StoppedError:
            assert not (small / "stopped" / "shapes" / "noise-level.json").exists()
    assert json.loads(path.read_text())["metrics"] == whole["metrics"]
    assert calls[0] == 8 + 4  # 3 methods x 2 measures, 2 matched comparisons, and those that were stopped
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "noise-level-matched.svg",
        "noise-level.json",
        "noise-level.svg",
    ]


def test_a_finished_experiment_is_not_run_again(small, monkeypatch):
    path = reproduce("noise-level", out=small)
    before = path.read_bytes()
    monkeypatch.setattr(noise_level, "run", None)
    assert reproduce("noise-level", out=small).read_bytes() == before
    with pytest.raises(TypeError):
        reproduce("noise-level", out=small, seed=1)  # another question


def test_a_record_says_what_made_it(small):
    record = json.loads(reproduce("noise-level", out=small, seed=3).read_text())
    assert record["settings"]["images"] == 30
    assert (record["experiment"], record["dataset"], record["preset"], record["seed"]) == (
        "noise-level",
        "shapes",
        "quick",
        3,
    )
    assert record["environment"]["torch"] == torch.__version__
    assert record["metrics"]["rectgrad"]["total_variation"]["n"] == 30


def test_a_record_of_several_networks(small, monkeypatch):
    """Each training seed is a network of its own; the record has their digests and the mean of each."""
    monkeypatch.setitem(lab.NETWORKS, "quick", 2)
    record = json.loads(reproduce("noise-level", out=small, seed=4).read_text())
    work = lab.Lab("noise-level", "shapes", "quick", noise_level.PRESETS["quick"], small, seed=4)
    one, other = work.networks()
    assert record["weights"] == {
        "standard, seed 4": weights_digest(one),
        "standard, seed 5": weights_digest(other),
    }
    assert weights_digest(one) != weights_digest(other)
    assert record["accuracy"] == np.mean([training.accuracy(m, SMALL.test) for m in (one, other)])
    assert (record["code"], record["data"]) == (work.code, {**work.data(), "masks": record["data"]["masks"]})
    found = record["metrics"]["saliency"]["outside_share"]
    x, objects, _ = work.masked()
    for module, mean in zip((one, other), found["each"], strict=True):
        maps = rectgrad.attribute(module, x, "saliency").sum(1)
        shares = [float(m[~o].abs().sum() / m.abs().sum()) for m, o in zip(maps, objects, strict=True)]
        assert mean == pytest.approx(np.mean(shares), rel=1e-4)


def test_noise_level_measures_what_it_says(small):
    record = json.loads(reproduce("noise-level", out=small).read_text())
    work = lab.Lab("noise-level", "shapes", "quick", noise_level.PRESETS["quick"], small)
    x, objects, images = work.masked()
    assert (np.bincount(images.labels) <= 2).all()
    found = rectgrad.attribute(work.network, x, "rectgrad").sum(1)
    outside = [float(m[~o].abs().sum() / m.abs().sum()) for m, o in zip(found, objects, strict=True)]
    assert record["metrics"]["rectgrad"]["outside_share"]["mean"] == pytest.approx(np.mean(outside), rel=1e-4)
    right = training.logits(work.network, x).argmax(1).numpy() == images.labels
    assert right.all()


def test_the_patch_is_the_same_in_all_pictures_and_nothing_else_changes():
    before = SMALL.test
    after = patch.patched(before)
    assert (after.pixels[:, :10, :10] == after.pixels[:1, :10, :10]).all()
    assert (after.pixels[:, 10:] == before.pixels[:, 10:]).all()
    assert (after.pixels[:, :, 10:] == before.pixels[:, :, 10:]).all()
    noise = np.random.RandomState(100).randint(0, 255, (10, 10, 3))
    assert (after.pixels[0, :10, :10] == noise).all()


def test_patch_measures_what_it_says(small, monkeypatch):
    monkeypatch.setattr(patch, "COMPARED", ("saliency", "rectgrad"))
    monkeypatch.setitem(patch.PRESETS, "quick", {"images": 20, "matched": 3})
    path = reproduce("patch", out=small)
    metrics = json.loads(path.read_text())["metrics"]
    work = lab.Lab("patch", "shapes", "quick", patch.PRESETS["quick"], small)
    module = work.trained("patch", patch.patched)
    x = scaled(patch.patched(SMALL.test).pixels[:20])
    found = rectgrad.attribute(module, x, "saliency").sum(1).abs()
    expected = found[:, :8, :8].sum((1, 2))
    assert metrics["saliency"]["amount"]["mean"] == pytest.approx(float(expected.mean()), rel=1e-4)
    shares = expected / found.sum((1, 2))
    assert metrics["saliency"]["share"]["mean"] == pytest.approx(float(shares.mean()), rel=1e-4)
    assert set(metrics["accuracy"]) == {"standard", "patch"}
    drawn = {p.name for p in path.parent.iterdir()} - {path.name}
    assert drawn == {"patch.svg", "patch-matched.svg", "patch-maps.webp"}


def test_frequencies_by_counting():
    torch.manual_seed(0)
    activation, objects = torch.randn(5, 7, 16, 16), torch.rand(5, 32, 32) < 0.5
    inside, outside = feature_frequency.frequencies(activation, objects)
    for i in range(5):
        found = {True: [], False: []}
        for y in range(16):
            for x in range(16):
                on_object = objects[i, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].sum() >= 2
                found[bool(on_object)] += (activation[i, :, y, x] > 0).tolist()
        assert inside[i] == pytest.approx(np.mean(found[True]), abs=1e-6)
        assert outside[i] == pytest.approx(np.mean(found[False]), abs=1e-6)


def test_feature_frequency_runs_on_the_masked_pictures(small):
    each = feature_frequency.PRESETS["quick"]["per_class"]
    record = json.loads(reproduce("feature-frequency", out=small).read_text())
    assert list(record["metrics"]) == ["conv1", "conv2", "conv3", "conv4"]
    for found in record["metrics"].values():
        beyond = found["beyond"]
        assert 0 < beyond["n"] <= 10 * each
        assert found["plain"]["mean"] == pytest.approx(found["object"]["mean"] - found["background"]["mean"])
        assert beyond["effect"] == pytest.approx(beyond["mean"] / beyond["std"])


def test_rationale_is_the_papers(small):
    metrics = json.loads(reproduce("rationale", out=small).read_text())["metrics"]
    assert {rule: metrics[rule]["units"] for rule in rationale.UNITS} == {
        "PR1": [2],
        "PR2": [3],
        "PR3": [1],
        "PR4": [4],
    }


def test_claims_hold(small, monkeypatch):
    claims = experiment("claims")
    monkeypatch.setitem(claims.PRESETS, "quick", {"networks": 2, "images": 8})
    metrics = json.loads(reproduce("claims", out=small).read_text())["metrics"]
    assert list(metrics) == ["random 0", "random 1", "trained 0"]
    for found in metrics.values():
        assert found["claim 1"] <= 1e-6 * found["largest map value"]
        assert found["claim 2"] <= 1e-6 * found["largest map value"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_presets(name):
    module = experiment(name)
    assert set(module.PRESETS) == {"quick", "paper"}
    assert module.PRESETS["quick"].keys() == module.PRESETS["paper"].keys()
    named = lab.Lab(name, "shapes", "quick", {}, Path(), shows_photos=True).settings()
    assert not named.keys() & module.PRESETS["quick"].keys()  # every parameter is among the settings
    assert module.TITLE
    assert module.__doc__


def test_the_final_threshold_is_the_papers():
    """The 95th percentile of the map; below it 0, or the threshold where that is negative."""
    rng = np.random.default_rng(0)
    for shift in (0.0, -5.0):
        values = rng.normal(size=(3, 8, 8)).astype(np.float32) + shift
        cut = maps.with_final_threshold(torch.from_numpy(values), "saliency").numpy()
        for value, found in zip(values, cut, strict=True):
            tau = np.percentile(value, 95).astype(np.float32)
            assert (found == np.where(value < tau, min(tau, 0), value)).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "noise"}, "noise-level"),
        ({"name": "claims", "dataset": "mnist"}, "cifar10, shapes"),
        ({"name": "claims", "preset": "slow"}, "quick, paper"),
    ],
)
def test_a_wrong_name(given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        reproduce(**given, out=tmp_path)
