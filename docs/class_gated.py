"""Draws the figures of docs/class-gated.md.

    python docs/class_gated.py PHOTOS

PHOTOS is a folder with the files named below. The network is the default one.
"""

import sys
from pathlib import Path

from PIL import Image

import rectgrad
from rectgrad.explanation import Explanation
from rectgrad.image import Panel, colour, sheet
from rectgrad.models import ImageModel

IMAGES = Path(__file__).parent / "images"
METHODS = {"RectGrad": {"method": "rectgrad"}, "gated": {"method": "rectgrad_gated"}}
FORMS = {
    **METHODS,
    "gated, no padding trick": {"method": "rectgrad_gated", "padding_trick": False},
}
HALVES = ("n02391049_zebra.jpg", "n03445777_golf_ball.jpg")
ASKED = ("zebra", "golf ball", "hammer")
FAILURES = {
    "n04409515_tennis_ball.jpg": "tennis ball",
    "n03127747_crash_helmet.jpg": "crash helmet",
    "n04476259_tray.jpg": "tray",
}


def side_by_side(left: Image.Image, right: Image.Image) -> Image.Image:
    """The middle halves of two photos of one size."""
    width, height = left.size
    both = Image.new("RGB", left.size)
    for i, photo in enumerate((left, right)):
        both.paste(photo.crop((width // 4, 0, width // 4 + width // 2, height)), (i * (width // 2), 0))
    return both


def classes(net: ImageModel, photo: Image.Image) -> list[list[Panel]]:
    """A row for each method: the photo and the map of each class."""
    rows = []
    for name, options in METHODS.items():
        found = [rectgrad.explain(photo, net, target=target, **options) for target in ASKED]
        maps = [Panel(colour(each.map), each.caption, name) for each in found]
        rows.append([Panel(found[0].photo, "", "photo"), *maps])
    return rows


def forms(net: ImageModel, photo: Image.Image, target: str) -> list[Panel]:
    """Photo, where the class is, and the maps."""
    found = {name: rectgrad.explain(photo, net, target=target, **each) for name, each in FORMS.items()}
    where: Explanation = rectgrad.explain(photo, net, "gradcam", target=target, variant="hirescam")
    return [
        Panel(where.photo, where.caption, "photo"),
        Panel(where.overlay(), "", "c at the class layer"),
        *(Panel(colour(each.map), "", name) for name, each in found.items()),
    ]


if __name__ == "__main__":
    net, folder = rectgrad.models.load(), Path(sys.argv[1])
    both = side_by_side(*(Image.open(folder / file).convert("RGB") for file in HALVES))
    failed = [
        forms(net, Image.open(folder / file).convert("RGB"), target) for file, target in FAILURES.items()
    ]
    for name, rows in {"classes": classes(net, both), "failures": failed}.items():
        page = sheet(rows, cell=224 if name == "classes" else 180)
        page.save(IMAGES / f"class-gated-{name}.jpg", quality=85, subsampling=0, optimize=True)
