"""Converts the arguments of `explain` to one form: a model with its class names, and prepared pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rectgrad import photos
from rectgrad.api import layer_attributions
from rectgrad.explanation.captures import Captures, Replay
from rectgrad.kernels.relevance_ops import BOXED
from rectgrad.methods import LRP, METHODS, Method
from rectgrad.models import ImageModel, classes, load

Picture = str | Path | Image.Image | np.ndarray | Tensor
Prepare = Callable[[Image.Image], Tensor]
P = TypeVar("P", Image.Image, np.ndarray)
Labels = Sequence[str] | str | Path

FAR = 10.0  # times the brightest pixel: values from 0 to 255 are above it, and noisy copies are not


class Prepared(NamedTuple):
    """The input of the network for one picture, and the same crop as a photo, if there is one."""

    inputs: Tensor
    photo: Image.Image | None


@dataclass(frozen=True)
class Network:
    """A model, its class names, its preprocessing, and its captures until `close`."""

    name: str
    module: Callable[..., object]
    names: Sequence[Sequence[str]]  # the names of each class, the display name first; empty if unknown
    image_model: ImageModel | None = None
    own: Prepare | None = None
    _captures: Captures = field(default_factory=Captures, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        model: str | ImageModel | Callable[..., object] | None,
        prepare: Prepare | None = None,
        labels: Labels | None = None,
        device: str | torch.device | None = None,
    ) -> Network:
        if isinstance(model, type):
            raise TypeError(f"model is the class {model.__name__}; pass an instance of it")
        if isinstance(model, str) and model in METHODS:
            raise ValueError(f"{model!r} is a method, not a model: pass method={model!r}")
        if prepare is not None and not callable(prepare):
            raise TypeError(
                "prepare must be a function from a PIL image to the tensor (C, H, W) that the model takes, "
                f"not {prepare!r}"
            )
        names = _names(labels)
        if model is None or isinstance(model, str):
            model = load() if model is None else load(model)
            if device is not None:
                check_device(device)
                model.module.to(device)
        if isinstance(model, ImageModel):
            network = cls(model.name, model.module, names or model.names(), model, prepare)
        elif callable(model):
            network = cls(type(model).__name__, model, names, None, prepare)
        else:
            raise TypeError(
                "model must be a name (see rectgrad.models.MODELS), an ImageModel or a module, not "
                f"{type(model).__name__}"
            )
        network._check_device(device)
        return network

    @property
    def device(self) -> torch.device:
        """The device of the model's weights; the CPU if it has none."""
        tensors = (
            [*self.module.parameters(), *self.module.buffers()] if isinstance(self.module, nn.Module) else []
        )
        return tensors[0].device if tensors else torch.device("cpu")

    def _check_device(self, device: str | torch.device | None) -> None:
        wanted = torch.device(device) if device is not None else self.device
        same_index = None in (wanted.index, self.device.index) or wanted.index == self.device.index
        if wanted.type != self.device.type or not same_index:
            raise ValueError(
                f"device={str(device)!r}, but the model is on {self.device}; move it first: "
                f"model.to({str(device)!r})"
            )

    def layers(self, inputs: Tensor, method: Method, target: object) -> list[tuple[str, Tensor]]:
        """One picture at each layer that has rows and columns, from the output to the input."""
        attributions = layer_attributions(self.module, inputs.to(self.device), method, target)  # type: ignore[arg-type]
        found = [(name, values[0].cpu()) for name, values in attributions if values[0].dim() == 2]
        if not found:
            raise ValueError(
                f"no activation of {self.name} has rows and columns, as in many transformers, so no layer "
                "can be drawn; the method gradcam draws the last one with positions"
            )
        return found

    def check_type(self, inputs: Tensor) -> None:
        """Raises an error if the inputs have another type than the weights, a likely reason of a failure."""
        parameters = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        types = {each.dtype for each in parameters if each.is_floating_point()}
        if types and inputs.dtype not in types:
            listed = " and ".join(map(str, types))
            raise TypeError(
                f"the picture became a tensor of type {inputs.dtype}, but the weights of {self.name} are "
                f"{listed}; convert the tensor with .to({listed.split()[0]})"
            )

    def replay(self, inputs: Tensor, method: Method, target: object) -> Replay | None:
        """A batch explained by a capture; None if an ordinary call is needed: see `Captures.replay`."""
        return self._captures.replay(self.module, inputs, method, target)

    def close(self) -> None:
        """Frees the memory of captures."""
        self._captures.release()

    def label(self, index: int) -> str:
        return self.names[index][0] if index < len(self.names) else f"class {index}"

    def find_class(self, query: str | int) -> int:
        """The index of a class, given as an index or a name."""
        return classes.find(self.names, query)

    def check_labels(self, count: int) -> None:
        classes.check_count(self.name, self.names, count)

    def bounded(self, method: Method) -> Method:
        """The method with the smallest and largest value of a pixel, if it needs them."""
        if isinstance(over := vars(method).get("over"), Method):
            return replace(method, over=self.bounded(over))  # type: ignore[call-arg]
        needs = isinstance(method, LRP) and method.composite in BOXED and method.low is None is method.high
        if not needs or self.image_model is None or self.own is not None:
            return method
        colours = list(zip(self.image_model.mean, self.image_model.std, strict=True))
        low, high = (tuple((end - mean) / std for mean, std in colours) for end in (0, 1))
        return replace(method, low=low, high=high)  # type: ignore[call-arg]

    def prepared(self, picture: Picture) -> Prepared:
        """Prepares a path, picture, array or tensor for the model."""
        if isinstance(picture, Tensor):
            return self._from_tensor(picture)
        return self.from_photo(_photo(picture))

    def from_photo(self, photo: Image.Image) -> Prepared:
        """Crops and scales an RGB photo for the model."""
        if self.own is not None:
            inputs = _checked(self.own(photo))
            return Prepared(inputs, _drawn(inputs))
        if self.image_model is None:
            raise TypeError(
                f"{self.name} has no preprocessing of its own; pass prepare=, a function from a PIL image to "
                "the tensor (C, H, W) that the model takes, or pass that tensor instead of a picture"
            )
        return self.from_crop(self.image_model.crop(photo))

    def from_crop(self, crop: Image.Image) -> Prepared:
        """Prepares a photo that is already cropped for the model."""
        assert self.image_model is not None
        return Prepared(self.image_model.prepare(crop), crop)

    def _from_tensor(self, inputs: Tensor) -> Prepared:
        if self.image_model is None or self.own is not None:
            return Prepared(inputs, None)
        if inputs.dim() != 3 or len(inputs) != 3:
            sizes = inputs.shape if inputs.dim() == 3 else ("N", *inputs.shape)  # a row of a tensor
            given = f"({', '.join(map(str, sizes))})"
            raise ValueError(
                f"{self.name} takes a tensor (3, height, width), not shape {given}; pass a path, a PIL image "
                "or an array (H, W, 3) to have it preprocessed"
            )
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (self.image_model.mean, self.image_model.std))
        pixels = inputs.detach().cpu().float() * std + mean
        if pixels.numel() and float(pixels.max()) > FAR:
            raise ValueError(
                f"the tensor has values up to {float(inputs.max()):.3g}, far above those that {self.name} "
                "takes; pass a path, a PIL image or an array (H, W, 3) of uint8 to have it preprocessed"
            )
        return Prepared(inputs, _picture(pixels))


def check_device(device: str | torch.device) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200]
        if reason.startswith(("Expected one of", "Invalid device string")):
            raise ValueError(f"unknown device {device!r}; devices are cpu, cuda, cuda:1 and mps") from None
        if reason.startswith(
            ("Could not run", "Tensor.item")
        ):  # torch was built without it, or it has no data
            reason = "this installation of torch cannot compute on it"
        raise ValueError(f"device {str(device)!r} is not available: {reason}") from None


def single(tensor: Tensor) -> bool:
    """Whether a tensor is one picture, (C, H, W) or (1, ...), rather than a batch of them."""
    return tensor.dim() in (1, 3) or len(tensor) == 1


def _checked(inputs: object) -> Tensor:
    """Checks what `prepare` returned and removes its batch dimension, if any."""
    if not isinstance(inputs, Tensor):
        raise TypeError(f"prepare returned {type(inputs).__name__}; it must return a tensor (C, H, W)")
    return inputs[0] if inputs.dim() == 4 and len(inputs) == 1 else inputs


def _photo(picture: object) -> Image.Image:
    """An upright picture in 8-bit RGB."""
    if isinstance(picture, (str, Path)):
        if str(picture).startswith(("http://", "https://")):
            raise ValueError(f"{picture!r} is a URL; download it first and pass the path of the file")
        if not str(picture) or Path(picture).is_dir():
            what = "is a folder, not a photo" if str(picture) else "is no path"
            raise ValueError(f"{str(picture)!r} {what}; pass the path of a photo, or a list of paths")
        return photos.read(picture)
    if isinstance(picture, Image.Image):
        return photos.upright_rgb(_not_empty(picture, picture.size))
    if isinstance(picture, np.ndarray):
        return Image.fromarray(_not_empty(_eight_bits(picture), picture.shape))
    raise TypeError(
        "image must be a path, a PIL image, an array (H, W, 3), a tensor that the model takes, or a list of "
        f"these, not {type(picture).__name__}"
    )


def _not_empty(picture: P, shape: tuple[int, ...]) -> P:
    if 0 in shape:
        raise ValueError(f"the picture has no pixels: its size is {' × '.join(map(str, shape))}")
    return picture


def _eight_bits(array: np.ndarray) -> np.ndarray:
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"an array must have the shape (H, W, 3), not {array.shape}{_hint(array)}")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise TypeError(f"an array must be uint8, or float from 0 to 1, not {array.dtype}")
    low, high = float(array.min(initial=0)), float(array.max(initial=0))
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"an array of floats must have values from 0 to 1, not from {low:.3g} to {high:.3g}; divide by "
            "255 if they are pixels, or pass the model's input as a tensor"
        )
    return (array * 255).round().astype(np.uint8)


def _hint(array: np.ndarray) -> str:
    if array.ndim == 3 and array.shape[0] == 3:
        return "; move the channels last: array.transpose(1, 2, 0)"
    if array.ndim == 3 and array.shape[2] == 4:
        return "; leave out the alpha channel: array[:, :, :3]"
    if array.ndim == 4:
        return "; pass several pictures as a list: list(array)"
    if array.ndim == 2 or array.shape[2:] == (1,):
        return "; repeat a grey picture for each colour channel: np.stack([array] * 3, axis=2)"
    return ""


def _drawn(inputs: Tensor) -> Image.Image | None:
    """Draws a tensor whose preprocessing is unknown: each channel is scaled to its own range."""
    if inputs.dim() != 3 or len(inputs) != 3:
        return None
    x = inputs.detach().cpu().float()
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    return _picture((x - low) / (high - low).clamp(min=1e-12))


def _picture(values: Tensor) -> Image.Image:
    """Converts (3, H, W) values from 0 to 1 to a picture."""
    pixels = (values.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def _names(labels: Labels | None) -> Sequence[Sequence[str]]:
    if labels is None:
        return []
    if isinstance(labels, (str, Path)):
        return classes.read(labels)
    if isinstance(labels, (Mapping, Set)):  # a list of it would be its keys, or in any order
        raise TypeError(
            f"labels is a {type(labels).__name__}; pass a list of the class names in the order of the "
            "outputs of the model"
        )
    return [[str(label)] for label in labels]
