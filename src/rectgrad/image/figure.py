"""Matplotlib figures for papers and notebooks, with vector output and a labelled colour bar."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from rectgrad.image.colour import Values, cap, colours, overlay, plane, scheme_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(
    values: Values,
    photo: Image.Image | None = None,
    title: str = "",
    *,
    name: str | None = None,
    dark: bool = False,
) -> Figure:
    """A map with its colour bar; with a photo, also the photo and an overlay."""
    from matplotlib.figure import Figure

    _check_photo(values, photo)
    panels = 1 if photo is None else 3
    page = Figure(figsize=(3.4 * panels + 0.6, 3.6), layout="constrained", facecolor=_page(dark))
    axes = np.atleast_1d(page.subplots(1, panels))
    place = axes[0] if photo is None else axes[1]
    _map(page, place, values, name or scheme_of(values, dark), dark)
    if photo is not None:
        axes[0].imshow(photo)
        axes[2].imshow(overlay(photo, values))
    for axis in axes:
        axis.set_axis_off()
    if title:
        page.suptitle(title, color=_ink(dark))
    return page


def show(
    values: Values,
    photo: Image.Image | None = None,
    title: str = "",
    *,
    name: str | None = None,
    dark: bool = False,
) -> Image.Image:
    """Returns the figure as a picture, which a notebook displays if the call is the last line of a cell."""
    drawn = io.BytesIO()
    figure(values, photo, title, name=name, dark=dark).savefig(drawn, format="png", dpi=120)
    return Image.open(drawn)


def _check_photo(values: Values, photo: object) -> None:
    """Checks that the photo has the same pixels as the map."""
    if photo is None:
        return
    if not isinstance(photo, Image.Image):
        raise TypeError(
            f"photo must be a PIL image, not {type(photo).__name__}: pass the crop that the network saw, "
            "model.crop(picture), or call rectgrad.explain(picture, model).show()"
        )
    height, width = plane(values).shape
    if photo.size != (width, height):
        raise ValueError(
            f"the photo has {photo.width} × {photo.height} pixels and the map {width} × {height}: pass the "
            "crop that the network saw, model.crop(picture), or call rectgrad.explain(picture, model).show()"
        )


def _map(page: Figure, axis: Any, values: Values, name: str, dark: bool) -> None:
    from matplotlib.colors import ListedColormap

    capped, limit = cap(values)
    limit = limit or 1.0
    low = -limit if name.startswith("signed") else 0.0
    table = ListedColormap(colours(name) / 255)
    drawn = axis.imshow(capped, cmap=table, vmin=low, vmax=limit, interpolation="nearest")
    scale = page.colorbar(drawn, ax=axis, fraction=0.046, pad=0.03)
    scale.set_label("attribution, capped at the 0.5th and 99.5th percentile", color=_ink(dark), size=7)
    scale.ax.tick_params(labelsize=7, colors=_ink(dark))


def _page(dark: bool) -> str:
    return "#101114" if dark else "#ffffff"


def _ink(dark: bool) -> str:
    return "#e8e6e1" if dark else "#1c1d21"
