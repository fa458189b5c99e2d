"""A new method is one class and one entry in METHODS: commands, explorer and benchmarks pick it up.

Each test runs in a fresh process that registers two methods before anything else of rectgrad is imported.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

METHODS = '''
from dataclasses import dataclass
from typing import ClassVar

from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS
from rectgrad.methods.options import option


@dataclass(frozen=True)
class Scaled(Method):
    """The gradient times a factor."""

    strength: float = option(2.0, "Factor of the gradient.", low=0)
    noise: int = 0  # SmoothGrad has a float of this name
    quadrature: str = option("squared", "Not a quadrature.", choices=("squared", "cubed"))
    suffix: str = "none"
    layer: str | None = None
    cutoff: float | None = None
    flip: bool = False

    def finish(self, raw, inputs):
        sign = -1 if self.flip else 1
        return tuple(sign * self.strength * each for each in raw)


@dataclass(frozen=True)
class Nothing(Method):
    thresholds: ClassVar[bool] = True
    title: ClassVar[str] = "nothing at all"

    def finish(self, raw, inputs):
        return tuple(each * 0 for each in raw)


METHODS |= {"scaled": Scaled(), "nothing": Nothing()}
'''
CLI = "from rectgrad.cli import main; main()"


STRINGS = "from __future__ import annotations\n"  # makes the types of the fields strings
both_annotations = pytest.mark.parametrize("run", ["", STRINGS], ids=["types", "strings"], indirect=True)


@pytest.fixture
def run(request, tmp_path):
    """Runs code after the registration, with arguments; returns what it printed."""
    (tmp_path / "new_methods.py").write_text(getattr(request, "param", STRINGS) + METHODS)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")

    def call(code, *arguments, status=0):
        places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": places}
        command = [sys.executable, "-c", f"import new_methods\n{code}", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return call


def test_it_is_listed_with_its_options(run):
    out = run(CLI, "methods")
    assert "The gradient times a factor." in out
    assert "--strength 2.0" in out
    listed = json.loads(run(CLI, "methods", "--json"))
    assert listed["scaled"]["layer"] is None
    assert listed["nothing"] == {}


@both_annotations
def test_its_options_are_in_the_help(run):
    out = " ".join(run(CLI, "explain", "--help").split())
    assert "Factor of the gradient. (scaled)" in out
    assert "Quadrature: trapezoid or right. (integrated_gradients) Not a quadrature. (scaled)" in out
    for option in ("--strength <float>", "--suffix <str>", "--layer <str>", "--cutoff <float>", "--flip"):
        assert option in out


@both_annotations
def test_it_explains_a_photo(run, tmp_path):
    common = ("explain", "photo.png", "--model", "cifar10_cnn", "--device", "cpu", "--maps", "npy")
    options = ("--strength", "3", "--noise", "1", "--layer", "conv1", "--cutoff", "0.5", "--flip")
    line = json.loads(run(CLI, *common, "--method", "scaled", *options, "--out", "new", "--json"))
    given = line["settings"]["options"]
    assert given["noise"] == 1
    assert given["layer"] == "conv1"
    assert (given["strength"], given["cutoff"], given["flip"]) == (3.0, 0.5, True)
    run(CLI, *common, "--method", "saliency", "--out", "old")
    scaled, plain = (np.load(tmp_path / folder / "photo.npy") for folder in ("new", "old"))
    assert np.allclose(scaled, -3 * plain)


@both_annotations
def test_invalid_options_are_one_line(run):
    common = ("explain", "photo.png", "--model", "cifar10_cnn", "--method", "scaled")
    assert "strength must be at least 0" in run(CLI, *common, "--strength", "-1", status=2)
    assert "'squared', 'cubed'" in run(CLI, *common, "--quadrature", "right", status=2)
    assert "noise must be an integer, not 1.5" in run(CLI, *common, "--noise", "1.5", status=2)


def test_it_is_compared(run, tmp_path):
    common = ("photo.png", "--model", "cifar10_cnn", "--device", "cpu")
    run(CLI, "compare", *common, "--methods", "scaled,nothing,rectgrad")
    assert (tmp_path / "compared" / "photo.png").exists()


def test_the_benchmark_runs_it(run):
    assert "scaled" in run("from rectgrad.bench import Plan; print(Plan().chosen)")


def test_the_explorer_has_its_controls(run):
    code = """
from rectgrad.app import controls
from rectgrad.app.query import Query
from rectgrad.methods.catalog import METHODS

fields = {field["name"]: field for field in controls.options()["Scaled"]}
defaults = {kind: {f["name"]: f["default"] for f in own} for kind, own in controls.options().items()}
assert Query(tuple(METHODS), controls.parse(defaults)).configured() == METHODS
given = {"Scaled": {"suffix": "abc", "layer": "conv1", "cutoff": "0.5", "strength": 3}}
options = controls.parse(given)["Scaled"]
assert options == {"suffix": "abc", "layer": "conv1", "cutoff": 0.5, "strength": 3.0}
print([fields[name]["control"] for name in ("strength", "noise", "quadrature", "suffix", "flip")])
print(fields["strength"]["help"], {m["name"]: m["title"] for m in controls.methods()}["nothing"])
"""
    kinds, texts = run(code).splitlines()[-2:]
    assert kinds == "['number', 'integer', 'list', 'text', 'checkbox']"
    assert texts == "Factor of the gradient. nothing at all"


def test_a_zero_map_with_a_threshold_is_reported(run):
    code = """
import torch, rectgrad
model = rectgrad.models.load("cifar10_cnn").module
maps = rectgrad.attribute(model, torch.rand(2, 3, 32, 32), "nothing")
kept = rectgrad.record(model, torch.rand(2, 3, 32, 32)).attribute("nothing")
print(bool(maps.any()), bool(kept.any()))
"""
    assert run(code).split() == ["False", "False"]
