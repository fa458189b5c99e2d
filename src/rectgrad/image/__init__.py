"""Draws maps: colours, overlays, sheets of panels, and figures for papers and notebooks."""

from rectgrad.image.colour import (
    blurred,
    cap,
    colour,
    colour_names,
    colours,
    final_threshold,
    overlay,
    plane,
    scheme_of,
    upsample,
)
from rectgrad.image.figure import figure, show
from rectgrad.image.png import png
from rectgrad.image.sheet import PAGE, Panel, bar, enlarged, sheet
from rectgrad.image.words import words, words_html

__all__ = [
    "PAGE",
    "Panel",
    "bar",
    "blurred",
    "cap",
    "colour",
    "colour_names",
    "colours",
    "enlarged",
    "figure",
    "final_threshold",
    "overlay",
    "plane",
    "png",
    "scheme_of",
    "sheet",
    "show",
    "upsample",
    "words",
    "words_html",
]
