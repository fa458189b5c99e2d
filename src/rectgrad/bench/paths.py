"""Which layers used the sparse kernel in the backward pass of a method."""

from __future__ import annotations

from rectgrad.api import preserved
from rectgrad.bench.case import Case
from rectgrad.engine.request import Request
from rectgrad.engine.trace import Trace
from rectgrad.methods.catalog import METHODS


def sparse_share(trace: Trace | None) -> float | None:
    """The share of layers with `op.path == "sparse"` among those that report a path; None if none does."""
    rows = trace.rows if trace is not None else []
    paths = [path for row in rows if (path := getattr(row.op, "path", None)) is not None]
    return sum(path == "sparse" for path in paths) / len(paths) if paths else None


def trace_of(case: Case, name: str) -> Trace | None:
    """The trace of `attribute`, for a method with a single backward pass."""
    request = Request(case.module, (case.inputs,), (), {}, case.target)
    preserved(request, lambda: METHODS[name].maps(request))
    return request.trace
