"""Which way the layers took in a method's backward pass: a kernel for sparse gradients, or the dense one."""

from __future__ import annotations

from rectgrad.api import preserved
from rectgrad.bench.case import Case
from rectgrad.engine.request import Request
from rectgrad.engine.trace import Trace
from rectgrad.methods.catalog import METHODS


def sparse_share(trace: Trace | None) -> float | None:
    """Of the layers whose op says which path it took; None where none does.

    This is the one place that knows how an op says so: `op.path`, "sparse" or "dense".
    """
    rows = trace.rows if trace is not None else []
    paths = [path for row in rows if (path := getattr(row.op, "path", None)) is not None]
    return sum(path == "sparse" for path in paths) / len(paths) if paths else None


def trace_of(case: Case, name: str) -> Trace | None:
    """The trace of what `attribute` runs, for a method of one pass."""
    request = Request(case.module, (case.inputs,), (), {}, case.target)
    preserved(request, lambda: METHODS[name].maps(request))
    return request.trace
