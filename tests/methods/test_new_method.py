"""A new method is one class and one entry in METHODS: commands, explorer and benchmarks pick it up.

They run in fresh processes that register two methods before anything else of rectgrad is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

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
STRINGS = "from __future__ import annotations\n"  # makes the types of the fields strings

# Runs commands, whose words are the lines of the input. Prints a status and what was said for each of them.
RUN = """
import new_methods, contextlib, io, json, sys
from rectgrad.cli import main

for line in sys.stdin:
    sys.argv, said = ["rectgrad", *json.loads(line)], (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
        try:
            main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code or 0
    print(json.dumps([status, *(each.getvalue() for each in said)]))
"""
COMMON = ("explain", "photo.png", "--model", "cifar10_cnn", "--device", "cpu", "--maps", "npy")
GIVEN = ("--strength", "3", "--noise", "1", "--layer", "conv1", "--cutoff", "0.5", "--flip")
COMMANDS = {
    "methods": ("methods",),
    "methods as JSON": ("methods", "--json"),
    "help": ("explain", "--help"),
    "scaled": (*COMMON, "--method", "scaled", *GIVEN, "--out", "new", "--json"),
    "saliency": (*COMMON, "--method", "saliency", "--out", "old"),
    "too low": (*COMMON, "--method", "scaled", "--strength", "-1"),
    "no choice": (*COMMON, "--method", "scaled", "--quadrature", "right"),
    "no integer": (*COMMON, "--method", "scaled", "--noise", "1.5"),
    "compare": ("compare", *COMMON[1:-2], "--methods", "scaled,nothing,rectgrad"),
}


def python(folder: Path, code: str, given: str = "") -> str:
    """What a fresh process prints, which finds the module `new_methods` in the folder."""
    places = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": places}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["", STRINGS], ids=["types", "strings"])
def ran(request, tmp_path_factory):
    """The folder of a process that ran all commands, and for each the status, stdout and stderr."""
    folder = tmp_path_factory.mktemp("new")
    (folder / "new_methods.py").write_text(request.param + METHODS)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.png")
    out = python(folder, RUN, "\n".join(map(json.dumps, COMMANDS.values())))
    return folder, dict(zip(COMMANDS, map(json.loads, out.splitlines()), strict=True))


def out_of(ran, command: str) -> str:
    status, out, err = ran[1][command]
    assert status == 0, err
    return out


def test_it_is_listed_with_its_options(ran):
    out = out_of(ran, "methods")
    assert "The gradient times a factor." in out
    assert "--strength 2.0" in out
    listed = json.loads(out_of(ran, "methods as JSON"))
    assert listed["scaled"]["layer"] is None
    assert listed["nothing"] == {}


def test_its_options_are_in_the_help(ran):
    out = " ".join(out_of(ran, "help").split())
    assert "Factor of the gradient. (scaled)" in out
    assert "Quadrature: trapezoid or right. (integrated_gradients) Not a quadrature. (scaled)" in out
    for option in ("--strength <float>", "--suffix <str>", "--layer <str>", "--cutoff <float>", "--flip"):
        assert option in out


def test_it_explains_a_photo(ran):
    given = json.loads(out_of(ran, "scaled"))["settings"]["options"]
    assert given["noise"] == 1
    assert given["layer"] == "conv1"
    assert (given["strength"], given["cutoff"], given["flip"]) == (3.0, 0.5, True)
    out_of(ran, "saliency")
    scaled, plain = (np.load(ran[0] / folder / "photo.npy") for folder in ("new", "old"))
    assert np.allclose(scaled, -3 * plain)


def test_invalid_options_are_one_line(ran):
    for command, words in (
        ("too low", "strength must be at least 0"),
        ("no choice", "'squared', 'cubed'"),
        ("no integer", "noise must be an integer, not 1.5"),
    ):
        status, _, err = ran[1][command]
        assert status == 2
        assert words in err
        assert len(err.splitlines()) == 1


def test_it_is_compared(ran):
    out_of(ran, "compare")
    assert (ran[0] / "compared" / "photo.png").exists()


def test_benchmark_explorer_and_library_find_it(tmp_path):
    (tmp_path / "new_methods.py").write_text(STRINGS + METHODS)
    code = """
import new_methods, torch, rectgrad
from rectgrad.app import controls
from rectgrad.app.query import Query
from rectgrad.bench import Plan
from rectgrad.methods.catalog import METHODS

assert "scaled" in Plan().chosen

fields = {field["name"]: field for field in controls.options()["Scaled"]}
defaults = {kind: {f["name"]: f["default"] for f in own} for kind, own in controls.options().items()}
assert Query(tuple(METHODS), controls.parse(defaults)).configured() == METHODS
given = {"Scaled": {"suffix": "abc", "layer": "conv1", "cutoff": "0.5", "strength": 3}}
options = controls.parse(given)["Scaled"]
assert options == {"suffix": "abc", "layer": "conv1", "cutoff": 0.5, "strength": 3.0}
print([fields[name]["control"] for name in ("strength", "noise", "quadrature", "suffix", "flip")])
print(fields["strength"]["help"], {m["name"]: m["title"] for m in controls.methods()}["nothing"])

model = rectgrad.models.load("cifar10_cnn").module
maps = rectgrad.attribute(model, torch.rand(2, 3, 32, 32), "nothing")  # has thresholds, and a zero map
kept = rectgrad.record(model, torch.rand(2, 3, 32, 32)).attribute("nothing")
print(bool(maps.any()), bool(kept.any()))
"""
    kinds, texts, zero = python(tmp_path, code).splitlines()
    assert kinds == "['number', 'integer', 'list', 'text', 'checkbox']"
    assert texts == "Factor of the gradient. nothing at all"
    assert zero == "False False"
