"""Positions: which dimensions of a tensor are those of an image, by the shapes of the calls that made it.

A tensor has its channels second, (N, C, d1..dk), or last: (N, d1..dk, C), or tokens (N, T, C), some of which
may be class and register tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from torch import Tensor

from rectgrad.ops.table import CHANGES_SHAPE

Sizes = tuple[int, ...]


class Image(NamedTuple):
    """How a tensor's positions are laid out. Called with a tensor, it returns a view, (N, C, d1..dk)."""

    channels_last: bool
    grid: Sizes
    first: int  # of the tokens in the grid

    def __call__(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1) if self.channels_last else x
        if x.dim() > 3:
            return x
        return x[:, :, self.first : self.first + prod(self.grid)].unflatten(2, self.grid)


class Grids:
    """The image sizes that occur in a pass, with as many dimensions as an input. `now`: the calls so far."""

    def __init__(self, n: int, dims: Iterable[int]) -> None:
        self._n, self._dims = n, frozenset(dims)
        # By the sizes of a tensor's positions, or the number of tokens: when, the image and its first token.
        self._seen: dict[Sizes, list[tuple[int, Sizes, int]]] = {}
        self.now = 0

    def meet(self, name: str, family: str | None, source: Sizes, shape: Sizes) -> None:
        """Processes a call: its name, its family, and the shapes of its first input and its result."""
        self.now, source, shape = self.now + 1, tuple(source), tuple(shape)
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

    def join(self, parts: Iterable[tuple[Sizes, bool]]) -> None:
        """Concatenated tokens: the shape of each part, and whether it depends on the input. Parts that do
        not, such as the cached keys and values of a language model, have no positions."""
        parts, start = list(parts), 0
        if any(len(shape) != 3 for shape, _ in parts):
            return
        lengths = [(shape[1], data) for shape, data in parts]
        for length, data in lengths:
            if data and (length,) in self._seen:
                _, grid, first = self._seen[length,][-1]
                self._note((sum(each for each, _ in lengths),), grid, start + first)
            start += length

    def _add(self, grid: Sizes) -> None:
        if len(grid) in self._dims and prod(grid) > 1:
            self._note(grid, grid)
            self._note((prod(grid),), grid)

    def _note(self, sizes: Sizes, grid: Sizes, first: int = 0) -> None:
        self._seen.setdefault(sizes, []).append((self.now, grid, first))

    def image(self, shape: Sizes, last: bool, now: int | None = None) -> Image | None:
        """Of tensors of a shape; None if they have no positions. last: the layer that made them keeps its
        channels last, which counts where sizes do not tell. Of several images of as many positions, the last
        one that was met until `now` counts, or the first one after it."""
        shape = tuple(shape)
        if len(shape) < 3 or shape[0] != self._n:
            return None
        for channels_last in (last, not last) if len(shape) > 3 else (last,):
            sizes = shape[1:-1] if channels_last else shape[2:]
            if sizes in self._seen:
                seen = self._seen[sizes]
                before = [each for each in seen if now is None or each[0] <= now]
                return Image(channels_last, *(before[-1] if before else seen[0])[1:])
        return None
