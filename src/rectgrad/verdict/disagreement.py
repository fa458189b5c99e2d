"""The photos on which methods disagree most, and pictures of their maps."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from PIL import Image

from rectgrad import image
from rectgrad.experiments.parts import Parts
from rectgrad.explanation import Network
from rectgrad.metrics import rank_correlation
from rectgrad.verdict.album import Album
from rectgrad.verdict.case import Case
from rectgrad.verdict.rows import Row
from rectgrad.verdict.run import Computed, Memory
from rectgrad.verdict.work import Worker

PHOTOS, SIZE = 3, 128
Json = dict[str, Any]


def disagreements(methods: Sequence[str], computed: Computed) -> list[Json]:
    """Photos by the mean rank correlation of the methods' maps, lowest first, at a resolution of 14 x 14.

    Only photos for which all methods have maps are compared.
    """
    coarse = {name: _coarse(computed.get(("maps", name), {})) for name in methods}
    coarse = {name: maps for name, maps in coarse.items() if maps}
    if len(coarse) < 2:
        return []
    common = sorted(set.intersection(*(set(maps) for maps in coarse.values())))
    if not common:
        return []
    stacked = [torch.tensor([maps[i] for i in common], dtype=torch.float32) for maps in coarse.values()]
    each = torch.stack([rank_correlation(a, b) for a, b in combinations(stacked, 2)]).nanmean(0)
    found = [{"photo": i, "correlation": value} for i, value in zip(common, each.tolist(), strict=True)]
    return sorted(found, key=lambda one: one["correlation"])[:PHOTOS]


def _coarse(chunks: dict[int, Any]) -> dict[int, list[int]]:
    return {start + i: m for start, values in chunks.items() for i, m in enumerate(values.get("coarse", ()))}


def drawn(
    case: Case, network: Network, shown: Album, rows: Sequence[Row], record: Json, parts: Parts | Memory
) -> list[Json]:
    """For each of these photos, its picture and one for each method, as data URLs."""
    order = [name for name in record["ranks"]["order"] if name in record["methods"]]
    methods = sorted((row for row in rows if row.name in order), key=lambda row: order.index(row.name))
    found, worker = [], Worker(case)
    for each in record["disagreements"]:
        i = each["photo"]
        crop = shown.crops[i]
        pictures = {}
        for row in methods:
            with contextlib.suppress(Exception):  # the failure is reported elsewhere
                pictures[row.name] = _picture(case, worker, row, i, parts)
        photo = _encoded(crop) if crop is not None else None
        found.append({**each, "picture": photo, "maps": pictures})
    return found


def _picture(case: Case, worker: Worker, row: Row, i: int, parts: Parts | Memory) -> str:
    name = f"picture-{row.name}-{row.digest}-{i}"
    known = parts.known(name)
    if known is not None:
        return known
    inputs, outputs = case.inputs[i : i + 1].to(case.device), case.outputs[i : i + 1].to(case.device)
    maps = worker.maps(row.method, inputs, outputs.argmax(1) if case.has_classes else None)
    return parts.keep(name, _encoded(image.colour(image.plane(maps[0][0].cpu()))))


def _encoded(picture: Image.Image) -> str:
    """A data URL of the picture at SIZE pixels."""
    stream = io.BytesIO()
    sized = picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    Image.fromarray(np.asarray(sized)).save(stream, format="JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
