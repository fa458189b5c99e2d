"""Draws the sheets of docs/gallery.md, one photo a row, and those of docs/methods.md, one method a row.

    python docs/gallery.py PHOTOS           # docs/gallery.md
    python docs/gallery.py PHOTOS methods   # docs/methods.md; about 10 minutes on two cores

PHOTOS is a folder with the files named below. Each panel is a call of `rectgrad.explain` with the default
network. For a failure, two more calls cover a part of the photo: first what the map marks, then the object
itself.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import rectgrad
from rectgrad.explanation import Explanation
from rectgrad.image import Panel, colour, sheet
from rectgrad.models import ImageModel

IMAGES = Path(__file__).parent / "images"
GREY = (127, 127, 127)
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels of the photo


@dataclass(frozen=True)
class Row:
    """A photo, the parts of it to cover, by name, and the class to explain; None: the most probable one."""

    file: str
    parts: dict[str, Box] = field(default_factory=dict)
    target: str | None = None


SHEETS: dict[str, list[Row]] = {
    "animals": [
        Row("n01614925_bald_eagle.jpg"),
        Row("n01632458_spotted_salamander.jpg"),
        Row("n02391049_zebra.jpg"),
        Row("n02447366_badger.jpg"),
        Row("n02417914_ibex.jpg"),
        Row("n01774750_tarantula.jpg"),
    ],
    "things": [
        Row("n03445777_golf_ball.jpg"),
        Row("n03187595_dial_telephone.jpg"),
        Row("n04141975_scale.jpg"),
        Row("n03272010_electric_guitar.jpg"),
        Row("n04127249_safety_pin.jpg"),
        Row("n03109150_corkscrew.jpg"),
    ],
    "places": [
        Row("n03788195_mosque.jpg"),
        Row("n04532670_viaduct.jpg"),
        Row("n09472597_volcano.jpg"),
        Row("n07760859_custard_apple.jpg"),
        Row("n07753592_banana.jpg"),
        Row("n01737021_water_snake.jpg"),
    ],
    "failures": [
        Row("n09288635_geyser.jpg", {"the watermark": (16, 101, 240, 156), "the geyser": (76, 16, 166, 240)}),
        Row("n04476259_tray.jpg", {"the watermark": (30, 106, 222, 166), "the tray": (16, 48, 240, 210)}),
        Row("n03786901_mortar.jpg", {"the fingers": (166, 36, 191, 106), "the bowl": (36, 126, 240, 240)}),
        Row("n11879895_rapeseed.jpg", {"the trees": (16, 121, 240, 166), "the field": (16, 166, 240, 240)}),
        Row(
            "n03127747_crash_helmet.jpg", {"the wheel": (99, 130, 169, 230), "the rider": (136, 16, 210, 99)}
        ),
        Row("n04409515_tennis_ball.jpg", {"the head": (91, 36, 186, 146), "the ball": (121, 161, 196, 240)}),
        Row("n04409515_tennis_ball.jpg", target="hammer"),
    ],
}


# Six photos of the sheets above, and every method in two sheets: its label, its name and its options.
SIX = [
    "n01614925_bald_eagle.jpg",
    "n01632458_spotted_salamander.jpg",
    "n02391049_zebra.jpg",
    "n03272010_electric_guitar.jpg",
    "n03187595_dial_telephone.jpg",
    "n03788195_mosque.jpg",
]
METHODS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "gradients": [
        ("rectgrad", "rectgrad", {}),
        ("rectgrad_prr", "rectgrad_prr", {}),
        ("rectgrad_mod", "rectgrad_mod", {}),
        ("saliency", "saliency", {}),
        ("gradient_x_input", "gradient_x_input", {}),
        ("guided_backprop", "guided_backprop", {}),
        ("deconv", "deconv", {}),
        ("smoothgrad", "smoothgrad", {}),
        ("integrated_gradients", "integrated_gradients", {}),
        ("expected_gradients", "expected_gradients", {}),
        ("random", "random", {}),
    ],
    "classes": [
        ("rectgrad", "rectgrad", {}),
        ("rectgrad_gated", "rectgrad_gated", {}),
        ("guided_gradcam, rectgrad", "guided_gradcam", {"over": "rectgrad"}),
        ("guided_gradcam", "guided_gradcam", {}),
        ("gradcam", "gradcam", {}),
        ("lrp", "lrp", {}),
        ("epsilon_lrp", "epsilon_lrp", {}),
        ("attn_lrp", "attn_lrp", {}),
        ("excitation_backprop", "excitation_backprop", {}),
        ("deeplift", "deeplift", {}),
        ("deeplift_shap", "deeplift_shap", {}),
        ("occlusion", "occlusion", {}),
        ("rise, 500 masks", "rise", {"masks": 500}),
    ],
}


def panels(net: ImageModel, folder: Path, row: Row) -> list[Panel]:
    """Photo, map and overlay, and the photo without each of the parts."""
    photo = Image.open(folder / row.file).convert("RGB")
    found = rectgrad.explain(photo, net, target=row.target)
    drawn = [
        Panel(found.photo, found.caption, "photo"),
        Panel(colour(found.map), "RectGrad", f"specificity {found.specificity:.2f}"),
        Panel(found.overlay(), "", "overlay"),
    ]
    for part, box in row.parts.items():
        answer = covered(net, photo, box, found.target.index)
        drawn.append(Panel(answer.photo, answer.caption, f"without {part}"))
    return drawn


def covered(net: ImageModel, photo: Image.Image, box: Box, target: int) -> Explanation:
    """What the network says about a class without a part of the photo."""
    changed = photo.copy()
    changed.paste(GREY, box)
    return rectgrad.explain(changed, net, target=target)


def methods_sheet(net: ImageModel, photos: list[Image.Image], name: str) -> Image.Image:
    """A row of photos, then a row for each method. Above a map: its specificity, if it takes one pass."""
    inputs = torch.stack([net.prepare(net.crop(photo)) for photo in photos])
    found = [rectgrad.explain(photo, net) for photo in photos]
    rows = [[Panel(each.photo, each.target.label) for each in found]]
    for _, method, options in METHODS[name]:
        rows.append([])
        for i, photo in enumerate(photos):
            others = torch.cat([inputs[:i], inputs[i + 1 :]])
            own = {**options, "baselines": others} if method == "deeplift_shap" else options
            map_ = rectgrad.explain(photo, net, method, **own)
            title = "" if map_.specificity is None else f"specificity {map_.specificity:.2f}"
            rows[-1].append(Panel(colour(map_.map), title))
    return sheet(rows, labels=["", *(label for label, _, _ in METHODS[name])], cell=132)


def draw_methods(net: ImageModel, folder: Path) -> None:
    photos = [Image.open(folder / file).convert("RGB") for file in SIX]
    for name in METHODS:
        save(methods_sheet(net, photos, name), f"methods-{name}")


def draw_gallery(net: ImageModel, folder: Path) -> None:
    for name, rows in SHEETS.items():
        cell = 132 if any(row.parts for row in rows) else 224
        save(sheet([panels(net, folder, row) for row in rows], cell=cell), f"gallery-{name}")


def save(page: Image.Image, name: str) -> None:
    page.save(IMAGES / f"{name}.jpg", quality=85, subsampling=0, optimize=True)


if __name__ == "__main__":
    draw = draw_methods if "methods" in sys.argv[2:] else draw_gallery
    draw(rectgrad.models.load(), Path(sys.argv[1]))
