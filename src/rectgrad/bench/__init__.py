"""Benchmarks: time and memory of methods relative to the plain gradient, in interleaved rounds.

    result = rectgrad.bench.run(rectgrad.bench.Plan(models=("resnet50",), batch=8))

Everything here is plain functions and dicts; the command line is in cli/bench.py.
"""

from rectgrad.bench.networks import NETWORKS
from rectgrad.bench.plan import Plan
from rectgrad.bench.suite import run

__all__ = ["NETWORKS", "Plan", "run"]
