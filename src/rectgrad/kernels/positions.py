"""Positions: which dimensions of a tensor are those of an image, by the shapes of the calls that made it.

A tensor has its channels second, (N, C, d1..dk), or last: (N, d1..dk, C), or tokens (N, T, C), some of which
may be class and register tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from torch import Tensor

from rectgrad.ops.table import CHANGES_SHAPE

Sizes = tuple[int, ...]
Image = Callable[[Tensor], Tensor]  # from a tensor to (N, C, d1..dk)


class Grids:
    """The images that a pass meets, of as many dimensions as one of its inputs. A later one replaces an
    earlier one of as many positions, until `after` is set: then the first one counts."""

    def __init__(self, n: int, dims: Iterable[int]) -> None:
        self._n, self._dims = n, frozenset(dims)
        # By the sizes of a tensor's positions, or the number of tokens: the image and its first token.
        self._seen: dict[Sizes, tuple[Sizes, int]] = {}
        self.after = False

    def meet(self, name: str, family: str | None, source: Sizes, shape: Sizes) -> None:
        """A call by its name and family, with the shapes of its first input and its result."""
        source, shape = tuple(source), tuple(shape)
        if family in ("conv", "conv_transpose", "max_pool", "avg_pool"):
            for each in (source, shape):
                self._add(each[2:] if each[:1] == (self._n,) else ())
        elif name == "__getitem__" and len(source) == len(shape) > 3 and source[1:-1] in self._seen:
            self._add(shape[1:-1])  # some positions of an image with channels last
        elif name in CHANGES_SHAPE and min(len(source), len(shape)) == 3:
            tokens, image = sorted((source, shape), key=len)
            for k in self._dims:
                grid = image[1 : 1 + k]
                if len(image) > k + 1 and min(grid, default=0) > 1 and prod(grid) == tokens[1]:
                    self._add(grid)

    def join(self, lengths: Iterable[tuple[int, bool]]) -> None:
        """Tokens side by side: the number of each part, and whether it depends on the input."""
        lengths, start = list(lengths), 0
        for length, data in lengths:
            if data and (length,) in self._seen:
                grid, first = self._seen[length,]
                self._note((sum(each for each, _ in lengths),), grid, start + first)
            start += length

    def _add(self, grid: Sizes) -> None:
        if len(grid) in self._dims and prod(grid) > 1:
            self._note(grid, grid)
            self._note((prod(grid),), grid)

    def _note(self, sizes: Sizes, grid: Sizes, first: int = 0) -> None:
        if not self.after or sizes not in self._seen:
            self._seen[sizes] = grid, first

    def image(self, shape: Sizes, last: bool) -> Image | None:
        """How to turn tensors of a shape into (N, C, d1..dk); None if they have no positions. last: the layer
        that made them keeps its channels last, which counts where sizes do not tell."""
        shape = tuple(shape)
        if len(shape) < 3 or shape[0] != self._n:
            return None
        for channels_last in (last, not last) if len(shape) > 3 else (last,):
            sizes = shape[1:-1] if channels_last else shape[2:]
            if sizes in self._seen:
                grid, first = self._seen[sizes]
                return lambda x: _image(x.movedim(-1, 1) if channels_last else x, grid, first)
        return None


def _image(x: Tensor, grid: Sizes, first: int) -> Tensor:
    return x if x.dim() > 3 else x[:, :, first : first + prod(grid)].unflatten(2, grid)
