"""The trace of a forward pass: its ops, their layers, and the rule that each one used."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rectgrad import ops

if TYPE_CHECKING:
    from rectgrad.engine.op import Op
    from rectgrad.kernels.relevance_ops import Conservation

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_CALL: Any = nn.Module.__call__.__code__
_SCREEN = 18  # rows of a table that is not shown whole


class Row(NamedTuple):
    name: str
    modules: tuple[Any, ...]  # that were running, the innermost first
    shape: tuple[int, ...]
    family: str | None
    inputs: int  # number of data tensors
    source: tuple[int, ...] = ()  # shape of the first of them
    op: Op | None = None  # None: not recorded, so always the plain gradient

    @property
    def rule(self) -> str:
        return "plain" if self.op is None else self.op.rule

    @property
    def linear(self) -> bool:
        """Whether the call is linear, so that its plain gradient is exact."""
        always = self.name in ops.ROUTING or self.family in ("add", "sum", "avg_pool", "pad")
        in_one = self.family in "conv conv_transpose linear matmul mul div batch_norm".split()
        return always or (in_one and self.inputs == 1)


class Trace:
    """Every call that depends on the input, in the order of the forward pass."""

    def __init__(self, rows: list[Row], root: nn.Module | None) -> None:
        self.rows, self.root = rows, root
        self.hidden: dict[str, list[str]] = {}  # calls inside of custom autograd.Functions
        self.by_hand: dict[str, None] = {}  # calls that may belong to a hand-written activation
        self.turned = False  # dimensions were swapped by an attribute, which has no row
        self.completeness_error: Tensor | None = None  # DeepLIFT: sum of the map minus difference of scores
        self.conservation: Conservation | None = None  # LRP on a record: where relevance went

    def layers(self) -> list[str]:
        """A name for each row: that of its module, followed by the op if the module has submodules."""
        names = module_names(self.root or outermost(self.rows))
        labels = [_label(row, names) for row in self.rows]
        total, numbers = Counter(labels), {label: itertools.count(1) for label in labels}
        return [f"{each}#{next(numbers[each])}" if total[each] > 1 else each for each in labels]

    def layers_of_ops(self) -> dict[int, str]:
        """The layer of each recorded op, by the op's id."""
        return {id(row.op): layer for row, layer in zip(self.rows, self.layers(), strict=True) if row.op}

    def layer_of(self, op: Op) -> str:
        return self.layers_of_ops().get(id(op), op.name)

    def plain(self) -> list[str]:
        """The ops that are not linear but used their plain gradient, so that completeness is not exact."""
        rows = zip(self.rows, self.layers(), strict=True)
        return [layer for row, layer in rows if row.rule == "plain" and not row.linear]

    def unknown(self) -> list[str]:
        """The names of calls without a family, without duplicates. One of them may be an activation."""
        known = ops.ROUTING | ops.BY_HAND | ops.NEW_TENSORS
        return list(dict.fromkeys(row.name for row in self.rows if not row.family and row.name not in known))

    def table(self, all: bool = False) -> str:
        """One line for each call: op, layer, shape, rule. Tables are cut to a screenful unless `all`."""
        lines = [("op", "layer", "shape", "rule")]
        for row, layer in zip(self.rows, self.layers(), strict=True):
            lines.append((row.family or row.name, layer, "×".join(map(str, row.shape)) or "scalar", row.rule))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        drawn = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join(drawn if all or len(self.rows) <= _SCREEN else self._cut(drawn))

    def _cut(self, drawn: list[str]) -> list[str]:
        """The first and the last lines of a table, and how often each rule was used."""
        first, last = _SCREEN * 2 // 3, _SCREEN // 3
        more = f"... {len(self.rows) - first - last} more; trace.table(all=True) shows every call"
        rules = Counter(row.rule for row in self.rows).most_common()
        total = f"{len(self.rows)} calls: " + ", ".join(f"{count} {rule}" for rule, count in rules)
        return [*drawn[: first + 1], more, *drawn[-last:], total]

    def __repr__(self) -> str:
        return self.table()


def module_names(root: nn.Module | None) -> dict[int, str]:
    return {} if root is None else {id(module): name for name, module in root.named_modules()}


def _label(row: Row, names: dict[int, str]) -> str:
    if not row.modules:
        return row.name
    name = names.get(id(row.modules[0]), type(row.modules[0]).__name__)
    if name and next(row.modules[0].children(), None) is None:
        return name
    return f"{name}/{row.name}".lstrip("/")


def outermost(rows: list[Row]) -> nn.Module | None:
    """The module that contains all modules in the rows, if there is one."""
    met = {id(row.modules[0]): row.modules[0] for row in rows if row.modules}
    return next((each for each in met.values() if met.keys() <= set(map(id, each.modules()))), None)


def calling_function() -> str | None:
    """The custom autograd.Function whose forward is running."""
    frames = walk_stack(sys._getframe())
    return next((frame.f_locals["cls"].__name__ for frame, _ in frames if frame.f_code is _APPLY), None)


def calling_modules(engine: str = "") -> tuple[nn.Module, ...]:
    """The modules whose methods are running, innermost first. engine: a file whose frames are skipped."""
    found, frame = list[nn.Module](), sys._getframe(1)
    while frame is not None:
        code = frame.f_code  # beyond the innermost method, only calls of modules count, which is fast
        if code is _CALL or (not found and code.co_varnames[:1] == ("self",) and code.co_filename != engine):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                found.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
