"""The library changes no process-wide state: it is the same after importing and using all of it."""

import subprocess
import sys

PROGRAM = """
import contextlib, gc, importlib, os, pkgutil, sys, tempfile, warnings
import matplotlib.figure, numpy, PIL.Image, safetensors.torch, torch, typer
for other in ("captum.attr", "triton"):  # other packages may change the state when they are imported
    with contextlib.suppress(ImportError):
        importlib.import_module(other)
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # so may parts of torch

def state():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "warnings": list(warnings.filters),
        "garbage collector": (gc.isenabled(), gc.get_threshold()),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "pillow": PIL.Image.MAX_IMAGE_PIXELS,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": (cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
        "figures": {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"},
    }

before = state()
import rectgrad
for module in pkgutil.walk_packages(rectgrad.__path__, "rectgrad."):
    if module.name not in ("rectgrad.__main__", "rectgrad.app.page", "rectgrad.app.controls"):
        with contextlib.suppress(ImportError):  # optional packages
            importlib.import_module(module.name)

from pathlib import Path
from rectgrad import photos, training
from rectgrad.bench.plan import Plan, applied
from rectgrad.data import shapes
from rectgrad.experiments import sanity
from rectgrad.many import fixed_threads
model = rectgrad.models.load("cifar10_cnn")
with tempfile.TemporaryDirectory() as folder:
    PIL.Image.new("RGB", (40, 40)).save(f"{folder}/a.png")
    x = model.prepare(model.crop(photos.read(f"{folder}/a.png")))[None]
    safetensors.torch.save_file(model.module.state_dict(), f"{folder}/a.safetensors")
    rectgrad.models.load("cifar10_cnn", weights=f"{folder}/a.safetensors")
    torch.save(model.module.state_dict(), f"{folder}/a.pt")
    with contextlib.suppress(rectgrad.models.ModelUnavailableError):  # older versions of torch refuse it
        rectgrad.models.load("cifar10_cnn", weights=f"{folder}/a.pt")
    rectgrad.models.load(sys.argv[1])
maps = rectgrad.attribute(model.module, x, "smoothgrad", samples=2)
rectgrad.image.show(maps[0])
sanity.randomised(model.module, ("dense1",), 0)
with applied(Plan(threads=1, tf32=True)), fixed_threads():
    training.train(shapes.generate(20, 0), training.Plan(epochs=1))
for name, value in state().items():
    assert value == before[name], name
"""
FACTORY = """
import torch

def make():
    return torch.nn.Flatten()
"""


def test_nothing_of_the_process_changes(tmp_path):
    factory = tmp_path / "net.py"
    factory.write_text(FACTORY)
    command = [sys.executable, "-c", PROGRAM, f"{factory}:make"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
