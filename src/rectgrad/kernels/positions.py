"""Positions: which dimensions of a tensor are those of an image, by the shapes of the calls that made it.

A tensor has its channels second, (N, C, d1..dk), or last: (N, d1..dk, C), or tokens (N, T, C), some of which
may be class and register tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, permutations
from math import prod
from operator import mul
from typing import Any, NamedTuple

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


def mirrors(name: str, shape: Sizes, given: Iterable[Any]) -> bool:
    """Whether a call reverses the positions of a result of this shape. given: its arguments."""
    parts = given if name in ("flip", "rot90") else ()
    listed = chain.from_iterable(each if isinstance(each, (tuple, list)) else (each,) for each in parts)
    dims = {each % len(shape) for each in listed if type(each) is int}
    return bool(dims - {0, 1 if len(shape) > 3 else 0})  # channels may be reversed


class Grids:
    """The image sizes that occur in a pass, with as many dimensions as an input. `now`: the calls so far."""

    def __init__(self, n: int, inputs: Iterable[Sizes]) -> None:
        self._n, self._inputs = n, [tuple(shape[1:]) for shape in inputs]
        self._dims = {len(shape) - 1 for shape in self._inputs}
        # By the sizes of a tensor's positions, or the number of tokens: when, the image and its first token.
        # Tokens in an order that is not an image's have an image without sizes.
        self._seen: dict[Sizes, list[tuple[int, Sizes, int]]] = {}
        self.now, self._windows = 0, False  # whether tokens are those of one window after the other
        for shape in self._inputs:
            self._add(shape[1:])

    def meet(
        self, name: str, family: str | None, source: Sizes, shape: Sizes, given: Iterable[Any] = ()
    ) -> None:
        """Processes a call: its name, its family, the shapes of its first input and its result, and its
        arguments, if known."""
        self.now, source, shape = self.now + 1, tuple(source), tuple(shape)
        if family in ("conv", "conv_transpose", "max_pool", "avg_pool"):
            # A convolution of single positions is no evidence of an image.
            pointwise = any(isinstance(w, Tensor) and set(w.shape[2:]) == {1} for w in given)
            for each in (source, shape) if not pointwise or source[2:] in self._seen else ():
                self._add(each[2:] if each[:1] == (self._n,) else ())
        elif name == "__getitem__" and len(source) == len(shape) > 3 and source[1:-1] in self._seen:
            self._add(shape[1:-1])  # some positions of an image with channels last
        elif name in CHANGES_SHAPE and min(len(source), len(shape)) == 3:
            self._reshape(source, shape)
        elif name in ("unfold", "im2col") and len(source) > len(shape) == 3:
            self._note(shape[1:2], ())  # the channels of all positions of a window

    def _reshape(self, source: Sizes, shape: Sizes) -> None:
        """An image or its patches, (N, d1..dk, ...), become tokens, or tokens become an image."""
        tokens, image = sorted((source, shape), key=len)
        for k in self._dims:
            grid, rest = image[1 : 1 + k], image[1 + k :]
            known = self._seen.get(tokens[1:2], [(0, () if self._windows else grid, 0)])[-1][1]
            if len(image) == k + 2 > 3 and shape is tokens and shape[0] == self._n != source[0]:
                self._windows = True  # several images of each sample, as in Hiera
                self._note(tokens[1:2], ())
            elif known and min(grid, default=0) > 1 and prod(grid) == tokens[1]:
                whole = (tuple(map(mul, grid, sides)) for sides in permutations(rest, k))
                if len(rest) == 1 < k or (shape is tokens and any(each in self._seen for each in whole)):
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
        # As many positions as the input has channels: the words of embeddings (N, T, C).
        words = any(grid == shape[:1] != shape[1:] for shape in self._inputs)
        if len(grid) in self._dims and prod(grid) > 1 and not words:
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
                _, grid, first = before[-1] if before else seen[0]
                return Image(channels_last, grid, first) if grid else None
        return None
