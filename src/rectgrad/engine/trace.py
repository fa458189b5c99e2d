"""The trace of a forward pass: which ops were met, in which layer, and which rule each one used."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rectgrad import ops

if TYPE_CHECKING:
    from rectgrad.engine.op import Op


_FUNCTION_FILE = torch.autograd.function.__file__
_SCREEN = 18  # rows of a table that is not shown whole
_LINEAR_IN_ONE = frozenset("conv conv_transpose linear matmul mul div batch_norm".split())


class Row(NamedTuple):
    name: str
    module: Any  # the innermost module running at the time, or None
    shape: tuple[int, ...]
    family: str | None
    inputs: int  # how many data tensors it takes
    source: tuple[int, ...] = ()  # shape of the first of them
    op: Op | None = None  # None: not recorded, so always the plain gradient
    function: str | None = None  # the custom autograd.Function it was called in

    @property
    def rule(self) -> str:
        if self.op is not None and self.op.rule != "plain":
            return self.op.rule
        return "plain"


class Trace:
    """Every call that depends on the input, in the order of the forward pass."""

    def __init__(self, rows: list[Row], root: nn.Module | None) -> None:
        self.rows, self.root = rows, root
        self.hidden: list[Row] = []  # calls inside custom autograd.Functions, where gradients are off
        self.by_hand: dict[str, None] = {}  # calls of which an activation may have been made
        self.turned = False  # dimensions changed places through an attribute, which has no row
        self.recurrent: dict[str, str] = {}  # calls of recurrent layers, which hide their activations
        # DeepLIFT: sum of the map minus the difference of the scores, for each sample
        self.completeness_error: Tensor | None = None

    def layers(self) -> list[str]:
        """A name for each row: its module's, with the op where the module holds more than one."""
        names = module_names(self.root or _outermost(self.rows))
        labels = [_label(row, names) for row in self.rows]
        total, met = Counter(labels), Counter[str]()
        for i, label in enumerate(labels):
            met[label] += 1
            if total[label] > 1:
                labels[i] = f"{label}#{met[label]}"
        return labels

    def layers_of_ops(self) -> dict[int, str]:
        """The layer of each recorded op, by the op's id."""
        rows = zip(self.rows, self.layers(), strict=True)
        return {id(row.op): layer for row, layer in rows if row.op is not None}

    def layer_of(self, op: Op) -> str:
        return self.layers_of_ops().get(id(op), op.name)

    def plain(self) -> list[str]:
        """Ops that are not linear and passed by their plain derivative: where a method that claims
        completeness is not exact."""
        rows = zip(self.rows, self.layers(), strict=True)
        return [layer for row, layer in rows if row.rule == "plain" and not linear(row)]

    def table(self, all: bool = False) -> str:
        """One line for each call: op, layer, shape, rule. A long table is cut to a screenful unless `all`."""
        lines = [("op", "layer", "shape", "rule")]
        for row, layer in zip(self.rows, self.layers(), strict=True):
            lines.append((row.family or row.name, layer, "×".join(map(str, row.shape)) or "scalar", row.rule))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        drawn = ["  ".join(f.ljust(w) for f, w in zip(x, widths, strict=True)).rstrip() for x in lines]
        return "\n".join(drawn if all or len(self.rows) <= _SCREEN else self._cut(drawn))

    def _cut(self, drawn: list[str]) -> list[str]:
        """The first and the last lines of a table, and how often each rule was used."""
        first, last = _SCREEN * 2 // 3, _SCREEN // 3
        rules = Counter(row.rule for row in self.rows).most_common()
        return [
            *drawn[: first + 1],
            f"... {len(self.rows) - first - last} more; trace.table(all=True) shows every call",
            *drawn[-last:],
            f"{len(self.rows)} calls: " + ", ".join(f"{count} {rule}" for rule, count in rules),
        ]

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def linear(row: Row) -> bool:
    """Whether the plain gradient of this call is exact, as a linear step's is."""
    if row.name in ops.ROUTING or row.family in ("add", "sum", "avg_pool", "pad"):
        return True
    return row.family in _LINEAR_IN_ONE and row.inputs == 1


def module_names(root: nn.Module | None) -> dict[int, str]:
    return {} if root is None else {id(module): name for name, module in root.named_modules()}


def _label(row: Row, names: dict[int, str]) -> str:
    if row.module is None:
        return row.name
    name = names.get(id(row.module), type(row.module).__name__)
    if name and next(row.module.children(), None) is None:
        return name
    return f"{name}/{row.name}".lstrip("/")


def _outermost(rows: list[Row]) -> nn.Module | None:
    """The module that holds all the others met, when there is one."""
    modules = {id(row.module): row.module for row in rows if isinstance(row.module, nn.Module)}
    for module in modules.values():
        if modules.keys() <= {id(m) for m in module.modules()}:
            return module
    return None


def calling_function() -> str | None:
    """The custom autograd.Function whose forward is running."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == _FUNCTION_FILE and "cls" in frame.f_locals:
            return frame.f_locals["cls"].__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


def calling_module(engine: str = "") -> nn.Module | None:
    """The innermost module whose method is running, `engine` being the file of frames to pass over."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == engine:
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        code = frame.f_code
        method = _METHODS.get(id(code))
        if method is None or method[0] is not code:
            method = _METHODS[id(code)] = (code, code.co_argcount > 0 and code.co_varnames[0] == "self")
        if method[1]:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


_METHODS: dict[int, tuple[Any, bool]] = {}  # code objects that were met: whether they are methods
