"""Draws the words of a text on backgrounds coloured by their values, for a terminal and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from rectgrad.image.colour import Values, as_array, colours

FAINT = 0.04  # of the largest value: a word below it keeps the colours of its surroundings
_PARAGRAPH = "font: 1.05em/2 system-ui, sans-serif"
_WORD = "padding: 0.2em 0.3em; border-radius: 0.25em"

Ink = tuple[str, np.ndarray]  # colours of the text and of its background


def words(tokens: Sequence[str], values: Values | Sequence[float]) -> str:
    """The tokens with ANSI escape codes: red for positive values, blue for negative ones, in 24-bit colours.

    values: one for each token, or a map (tokens, embedding), which is summed over the embedding.
    """
    inked = _inked(tokens, values)
    return " ".join(token if ink is None else _escaped(token, *ink) for token, _, ink in inked)


def words_html(tokens: Sequence[str], values: Values | Sequence[float]) -> str:
    """The same as an HTML paragraph; a word shows its value when the pointer is over it."""
    spans = [_span(*each) for each in _inked(tokens, values)]
    return f'<p style="{_PARAGRAPH}">{" ".join(spans)}</p>'


def _inked(tokens: Sequence[str], values: Any) -> Iterator[tuple[str, float, Ink | None]]:
    """Each token, its value, and the colours of text and background, if it is not faint."""
    numbers = np.asarray(as_array(values), dtype=np.float64)
    numbers = numbers.sum(1) if numbers.ndim == 2 else numbers
    if numbers.shape != (len(tokens),):
        raise ValueError(f"{len(tokens)} tokens need one value each, not shape {numbers.shape}")
    largest, table = max(np.abs(numbers).max(initial=0), np.finfo(float).tiny), colours("signed").round()
    for token, value in zip(tokens, numbers.tolist(), strict=True):
        share = value / largest
        if abs(share) < FAINT:
            yield token, value, None
        else:
            yield token, value, _ink(table[round(127.5 * (1 + share))].astype(int))


def _ink(background: np.ndarray) -> Ink:
    """Black or white, whichever is easier to read on a background."""
    return ("black" if background @ (0.299, 0.587, 0.114) > 140 else "white"), background


def _escaped(token: str, text: str, background: np.ndarray) -> str:
    shade = 0 if text == "black" else 255
    return f"\x1b[48;2;{';'.join(map(str, background))};38;2;{shade};{shade};{shade}m{token}\x1b[0m"


def _span(token: str, value: float, ink: Ink | None) -> str:
    style = (
        _WORD if ink is None else f"{_WORD}; background: rgb({','.join(map(str, ink[1]))}); color: {ink[0]}"
    )
    return f'<span style="{style}" title="{value:+.3g}">{escape(token)}</span>'
