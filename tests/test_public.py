"""The public surface as an editor shows it: names, signatures, representations."""

import inspect
import subprocess
import sys

import pytest
import torch

import rectgrad
from networks import NETWORKS

CALLS = {
    name: getattr(rectgrad, name)
    for name in rectgrad.__all__
    if callable(getattr(rectgrad, name)) and not name.endswith("Error") and name not in ("Capture", "Record")
}
CALLS |= {
    "Record.attribute": rectgrad.Record.attribute,
    "Capture.__call__": rectgrad.Capture.__call__,
    "image.show": rectgrad.image.show,
    "image.figure": rectgrad.image.figure,
    "image.overlay": rectgrad.image.overlay,
    "models.load": rectgrad.models.load,
}
CALLS |= {f"metrics.{name}": getattr(rectgrad.metrics, name) for name in rectgrad.metrics.__all__}
CALLS |= {
    f"Explanation.{name}": function
    for name, function in inspect.getmembers(rectgrad.Explanation, inspect.isfunction)
    if not name.startswith("_")
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_says_what_it_takes(name):
    signature = inspect.signature(CALLS[name])
    for each in signature.parameters.values():
        assert each.name == "self" or "Any" not in str(each.annotation), each
        assert each.name == "self" or each.annotation is not inspect.Parameter.empty, each
    assert signature.return_annotation is not inspect.Signature.empty
    assert "Any" not in str(signature.return_annotation)


def test_dir_lists_what_is_public_and_nothing_else():
    program = "import rectgrad; print(*dir(rectgrad)); rectgrad.explain; print(*dir(rectgrad))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == second == " ".join(sorted(rectgrad.__all__))
    for name in rectgrad.__all__:
        assert getattr(rectgrad, name) is not None


def test_a_record_says_what_it_holds():
    model, x = NETWORKS["plain_cnn"](0)
    kept = rectgrad.record(model, x)
    shape = " × ".join(map(str, x.shape))
    outputs = " × ".join(map(str, model(x).shape))
    assert repr(kept) == (
        f"Record({type(model).__name__}, inputs {shape}, outputs {outputs}, {len(kept.trace.rows)} ops, cpu)"
    )
    assert repr(rectgrad.record(torch.relu, torch.rand(2, 3))) == (
        "Record(relu, inputs 2 × 3, outputs 2 × 3, 1 ops, cpu)"
    )
