"""Models from other packages: timm, torchvision and Hugging Face transformers.

Each model keeps its own preprocessing, except that images are always cropped, never distorted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.models import classes, weights
from rectgrad.models.image_model import ImageModel
from rectgrad.models.packages import errors_from, imported

_OFFLINE = "download them on a machine with network access and pass the file as weights=FILE"


def timm(name: str, file: Path | None) -> ImageModel:
    own = _after(name)
    package = imported("timm", name, "pip install 'rectgrad[timm]'")
    with errors_from("timm", name, _OFFLINE):
        module = package.create_model(own, pretrained=file is None)
        config = package.data.resolve_model_data_config(module)
        labels = (getattr(module, "pretrained_cfg", None) or {}).get("label_names") or ()
    if module.num_classes == 1000:
        names = classes.bundled("imagenet")
    else:
        names = classes.split(labels)
    return _filled(
        file,
        name=name,
        module=module,
        names=names,
        size=tuple(config["input_size"][1:]),
        mean=config["mean"],
        std=config["std"],
        crop_fraction=config["crop_pct"],
        interpolation=config["interpolation"],
    )


def torchvision(name: str, file: Path | None) -> ImageModel:
    own = _after(name)
    models = imported("torchvision.models", name, "pip install torchvision")
    with errors_from("torchvision", name, _OFFLINE):
        module = models.get_model(own, weights="DEFAULT" if file is None else None)
        published = models.get_model_weights(own).DEFAULT
        steps = published.transforms()
        crop, resize = steps.crop_size[0], steps.resize_size[0]
    return _filled(
        file,
        name=name,
        module=module,
        names=[[category] for category in published.meta["categories"]],
        size=(crop, crop),
        mean=steps.mean,
        std=steps.std,
        crop_fraction=min(crop / resize, 1.0),
        interpolation=steps.interpolation.value,
    )


def hugging_face(name: str, file: Path | None) -> ImageModel:
    if file is not None:
        raise ValueError(
            f"{name} does not take weights={str(file)!r}: use a folder that contains them, hf:FOLDER"
        )
    own = _after(name)
    package = imported("transformers", name, "pip install transformers")
    with errors_from("transformers", name, "copy a downloaded folder of the model here and load hf:FOLDER"):
        module = package.AutoModelForImageClassification.from_pretrained(own)
        processor = package.AutoImageProcessor.from_pretrained(own)
        id2label = module.config.id2label
        names = classes.split([id2label[i] for i in range(len(id2label))])
        inputs = _inputs(processor)
    return _filled(None, name=name, module=module, names=names, **inputs)


def _inputs(processor: Any) -> dict[str, Any]:
    """The preprocessing of a Hugging Face image processor as fields of an ImageModel."""
    from PIL import Image

    size, fraction = _sides(processor.size), getattr(processor, "crop_pct", None) or 1.0
    if getattr(processor, "do_center_crop", False):
        resized, size = min(size), _sides(processor.crop_size)
        fraction = min(min(size) / resized, 1.0)
    scaled = 255 * processor.rescale_factor if processor.do_rescale else 255.0
    normal = processor.do_normalize
    return {
        "size": size,
        "mean": [m / scaled for m in (processor.image_mean if normal else (0, 0, 0))],
        "std": [s / scaled for s in (processor.image_std if normal else (1, 1, 1))],
        "crop_fraction": fraction,
        "interpolation": Image.Resampling(int(processor.resample)).name.lower(),
    }


def _sides(size: Any) -> tuple[int, int]:
    edge = size.get("shortest_edge")
    return (edge, edge) if edge else (size["height"], size["width"])


def _after(name: str) -> str:
    prefix, _, rest = name.partition(":")
    if not rest:
        raise ValueError(f"{name!r} has no model name; use {prefix}:NAME")
    return rest


def _filled(file: Path | None, *, names: list[list[str]], mean: Any, std: Any, **others: Any) -> ImageModel:
    if file is not None:
        weights.fill(others["module"], weights.read(file), file)
    return ImageModel(mean=tuple(mean), std=tuple(std), **classes.fields(names), **others)
