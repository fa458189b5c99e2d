"""A run that was killed, and a run on Ray, give the verdict of an undisturbed run."""

import ast
import importlib.util
import json
import linecache
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import rectgrad
from planted import PatchNet, pictures
from rectgrad.bench import environment
from rectgrad.methods import Method
from rectgrad.verdict.case import COMPUTES
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.work import Photos

TIMES = ("seconds", "costs", "environment", "times")
COUNTS = {
    "photos": 5,
    "evaluated": 3,
    "repeated": 2,
    "costly": 3,
    "costly_repeated": 2,
    "matched": 2,
    "chunk": 3,
}
SMALL = replace(PRESETS["quick"], **COUNTS, steps=3, draws=1, stages=2, subsets=3, squares=3)
METHODS = ["saliency", "rectgrad"]
MEASURES = "insertion,deletion,sensitivity_n,randomisation,max_sensitivity,specificity,gini"

# Ends itself by SIGKILL, which nothing can catch, while the 12th part is being written.
KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from rectgrad.photos import files
from test_resume import run

written, save = [], files.save_text
def save_text(text, path):
    written.append(path)
    if len(written) == 12:
        Path(str(path) + ".part").write_text(text[:20])
        os.kill(os.getpid(), signal.SIGKILL)
    save(text, path)
files.save_text = save_text
run(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class Moody(Method):
    """Fails as long as a file exists."""

    broken: Path
    one_backward = False

    def raw(self, request):
        if self.broken.exists():
            raise OSError("no space left on device")
        return tuple(x.detach() for x in request.inputs)


def run(out, pictures_seed=0, weight=4.0, **options):
    network = PatchNet().eval()
    with torch.no_grad():
        network.last.weight[1] = weight
    x = pictures(network, 5, pictures_seed)
    return rectgrad.judge(network, x, METHODS, measures=MEASURES, preset=SMALL, out=out, **options)


def without_times(folder):
    record = json.loads((folder / "verdict.json").read_text())
    return json.dumps({key: value for key, value in record.items() if key not in TIMES})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.fixture
def undisturbed(tmp_path, whole):
    """The verdict of an undisturbed run, of which each test has a copy."""
    shutil.copytree(whole, tmp_path / "undisturbed")
    return without_times(whole)


def test_a_killed_run_resumes(tmp_path, undisturbed, monkeypatch):
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here), str(here.parent)])
    out = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finished = list((out / "parts").rglob("*.json"))
    assert len(finished) == 11
    assert not (out / "verdict.json").exists()

    computed, compute = [], Photos.compute
    monkeypatch.setattr(Photos, "compute", lambda *given: computed.append(given) or compute(*given))
    run(out)
    assert without_times(out) == undisturbed
    parts = [
        path for path in (out / "parts").rglob("*.json") if not path.name.startswith(("picture", "cost"))
    ]
    assert len(computed) == len(parts) - len(finished)
    computed.clear()
    run(out)
    assert computed == []


DAMAGED = {
    "cut short": lambda text, whole: text[:30],
    "a number": lambda text, whole: json.dumps(whole | {"value": 3}),
    "another number of photos": lambda text, whole: json.dumps(whole | {"value": {"insertion": [0.5] * 9}}),
    "words": lambda text, whole: json.dumps(whole | {"value": {"insertion": ["x"] * 3}}),
    "an error that is a number": lambda text, whole: json.dumps(whole | {"value": {"error": 3}}),
}


def test_a_damaged_part_is_computed_again(tmp_path, undisturbed):
    out = tmp_path / "undisturbed"
    part = next((out / "parts").rglob("removal-rectgrad*.json"))
    text = part.read_text()
    for name, damage in DAMAGED.items():
        part.write_text(damage(text, json.loads(text)))
        run(out)
        assert without_times(out) == undisturbed, name


@pytest.mark.parametrize("change", [{"seed": 1}, {"pictures_seed": 1}, {"weight": 5.0}], ids=str)
def test_another_seed_photo_or_weight_does_not_use_the_parts(tmp_path, undisturbed, change):
    out = tmp_path / "undisturbed"
    before = set((out / "parts").iterdir())
    run(out, **change)
    assert len(set((out / "parts").iterdir()) - before) == 1
    assert without_times(out) != undisturbed


def test_another_function_with_the_same_name_does_not_use_the_parts(tmp_path):
    x = torch.rand(4, 3, 8, 8)

    def deletion(sign):
        def network(images):
            return torch.stack([sign * images.mean((1, 2, 3)), images[:, 0, 0, 0]], 1)

        found = rectgrad.judge(network, x, "saliency", measures="deletion_mean", preset=SMALL, out=tmp_path)
        return found.table["deletion_mean"]["saliency"]["mean"]

    assert deletion(1) != deletion(-1)


EVERYTHING = {"mine", "saliency", "random", "edges", "centre", "brightness"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("SCALE = 1", "SCALE = -1", {"mine"}),
        ("def forward", "extra = 0\n    def forward", EVERYTHING),
        ("", "", set()),
    ],
)
def test_code_of_the_user_that_changes_is_run(tmp_path, monkeypatch, old, new, expected):
    """The file of a method; the layers of a network, although its weights and outputs are the same."""
    code = """
import torch
from torch import nn
from dataclasses import dataclass
from rectgrad.methods import Method
SCALE = 1
def helped(x): return x * SCALE
@dataclass(frozen=True)
class Mine(Method):
    one_backward = False
    runs_model = False
    def raw(self, request): return tuple(helped(x.detach()) for x in request.inputs)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, x): return torch.stack([x.sum((1, 2, 3)) * self.scale, 0 * x[:, 0, 0, 0]], 1)
"""
    x, computed, compute = torch.rand(3, 3, 8, 8), [], Photos.compute
    monkeypatch.setattr(
        Photos, "compute", lambda self, unit, row: computed.append(row.name) or compute(self, unit, row)
    )

    def rows(text):
        (tmp_path / "mine.py").write_text(text)
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", module)
        spec.loader.exec_module(module)
        computed.clear()
        methods = {"mine": module.Mine(), "saliency": rectgrad.Saliency()}
        rectgrad.judge(module.Net().eval(), x, methods, measures="gini", preset=SMALL, out=tmp_path / "out")
        return set(computed)

    assert rows(code) == EVERYTHING
    assert rows(code.replace(old, new)) == expected


def test_all_code_that_computes_is_in_the_digest():
    """What the modules of a unit of work import, through any number of modules."""
    package = Path(rectgrad.__file__).parent
    # nothing in them changes a number: settings and texts are in the digest themselves, weights are hashed
    others = {"__init__.py", "bench/environment.py", "verdict/presets.py", "verdict/measures.py"}
    others |= {"explanation/warning_log.py", "models/fingerprint.py", "models/image_model.py"}
    inside = lambda path: path.split("/")[0] in environment.COMPUTES or path in COMPUTES  # noqa: E731
    seen, todo = set(), [path for path in COMPUTES if path.startswith("verdict")]
    while todo:
        path = todo.pop()
        seen.add(path)
        if path not in others:
            todo += imported(package, path) - seen - set(todo)
    assert len(seen) > 60
    assert {path for path in seen if not inside(path)} <= others


def imported(package, path):
    """Files of the package that one of its files imports at run time."""
    tree, found = ast.parse((package / path).read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rectgrad":
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    files = [f"{'/'.join(name.split('.')[1:])}{end}" for name in found for end in (".py", "/__init__.py")]
    return {file for file in files if (package / file).is_file()}


def test_what_failed_is_tried_again(tmp_path):
    x, broken = pictures(PatchNet(), 4, 0), tmp_path / "broken"
    broken.touch()
    for error in (True, False):
        found = rectgrad.judge(
            PatchNet().eval(), x, {"moody": Moody(broken)}, measures="gini", preset=SMALL, out=tmp_path
        )
        assert ("moody" in found.table["gini"]) != error
        broken.unlink(missing_ok=True)


def test_ray_gives_the_same_numbers(tmp_path, undisturbed, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rectgrad[ray]'")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(rectgrad.__file__).parents[1])
    )  # the network's file is not on it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        run(tmp_path / "ray", engine="ray")
    finally:
        ray.shutdown()
    assert without_times(tmp_path / "ray") == undisturbed
