"""A call that is interrupted at a random moment raises KeyboardInterrupt once and leaves nothing behind.

`benchmarks/interrupts.py` describes the checks and makes many more interrupts. It runs in its own process: an
interrupt that is lost, or a lock that stays held, must not affect other tests.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rectgrad

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "interrupts.py"
COUNT = 70  # each network with each method, by a signal and by another thread


def test_an_interrupt_that_became_another_error_ends_the_call():
    """A model's own clean-up fails while the interrupt is on its way up: it is an interrupt all the same."""
    runs = []

    def model(x):
        runs.append(len(x))
        try:
            if len(runs) == 1:
                raise KeyboardInterrupt
        finally:
            if len(runs) == 1:
                raise RuntimeError("the clean-up failed")
        return torch.relu(x)

    with pytest.raises(KeyboardInterrupt):
        rectgrad.attribute(model, torch.ones(1, 30), "guided_backprop", 0)
    assert runs == [1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_interrupted_calls_leave_nothing_behind(tmp_path):
    out = tmp_path / "interrupts.json"
    options = ["--count", str(COUNT), "--seed", "0", "--wait", "60", "--out", str(out)]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert not record["faults"], json.dumps(record["faults"], indent=1)
    assert record["models_held"] == 0
    for kind, counts in record["kinds"].items():
        assert counts["surfaced"] == counts["interrupts"] == COUNT // 2, kind
        assert counts["maps"] == 2 * (counts["interrupts"] + counts.get("late", 0))
