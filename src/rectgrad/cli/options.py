"""Options that several commands share. Those of the methods come from the methods' own fields."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from PIL import Image
from torch import Tensor

from rectgrad import files, photos
from rectgrad.catalog import METHODS, as_method
from rectgrad.files import Source
from rectgrad.methods import Method, RectGrad
from rectgrad.models import ImageModel, load
from rectgrad.records import Record, record

Images = Annotated[
    list[str] | None, typer.Argument(help="Photos, folders or patterns; none: the sample photo.")
]
ModelName = Annotated[str, typer.Option("--model", help="See `rectgrad models`; or path/to/file.py:factory.")]
Weights = Annotated[Path | None, typer.Option(help="Weights of the model, safetensors or a state dict.")]
Labels = Annotated[Path | None, typer.Option(help="Class names, one a line.")]
Target = Annotated[str | None, typer.Option(help="Class to explain, index or name; none: the top one.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Dark = Annotated[bool, typer.Option("--dark", help="Pictures for a dark page.")]

_KINDS = {
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "float | None": float,
    "Method": str,
    "Any": float,
}


def method_fields() -> dict[str, tuple[type, list[str]]]:
    """Every option of every method: its type and the methods that have it."""
    found: dict[str, tuple[type, list[str]]] = {}
    for name, method in METHODS.items():
        for field in fields(method):
            kind = _KINDS[str(field.type)]
            found.setdefault(field.name, (kind, []))[1].append(name)
    return found


def with_method_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one option for each field of a method, gathered into its `options` argument."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "options"]
    extra = [_parameter(name, *what) for name, what in method_fields().items()]

    def wrapper(**given: Any) -> Any:
        options = {p.name: given.pop(p.name) for p in extra}
        return command(**given, options={k: v for k, v in options.items() if v is not None})

    wrapper.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def _parameter(name: str, kind: type, methods: list[str]) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    option = typer.Option(flags, help=f"of {', '.join(methods)}", show_default=False)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class Network(NamedTuple):
    """A model on its device, and the class asked about."""

    model: ImageModel
    device: str
    target: int | None

    def record(self, crop: Image.Image) -> Record:
        """One forward pass of what the network sees of a photo."""
        return record(self.model.module, self.inputs(crop))

    def inputs(self, crop: Image.Image) -> Tensor:
        return self.model.prepare(crop).unsqueeze(0).to(self.device)


def network(name: str, weights: Path | None, labels: Path | None, device: str, target: str | None) -> Network:
    place = device_of(device)
    model = load(name, weights=weights, labels=labels)
    model.module.to(place)
    return Network(model, place, None if target is None else model.find_class(target))


def picture_methods(names: str, q: float) -> dict[str, Method]:
    """Methods by name, as the paper draws them: RectGrad keeps its negative values."""
    wanted = list(METHODS) if names == "all" else [name.strip() for name in names.split(",")]
    return {name: _drawn(name, q) for name in wanted}


def _drawn(name: str, q: float) -> Method:
    method = as_method(name, {})
    return as_method(name, {"q": q, "positive_only": False}) if isinstance(method, RectGrad) else method


def photos_meant(images: list[str] | None) -> list[Source]:
    return files.sources(images or [str(files.sample_photo())])


def readable(found: list[Source], broken: list[str]) -> Iterator[tuple[Source, Image.Image]]:
    """The photos that can be read; a sentence about each of the others goes to `broken`."""
    for source in found:
        try:
            yield source, photos.read(source.path)
        except photos.UnreadableImageError as error:
            broken.append(str(error))


def status(broken: list[str]) -> int:
    """Names what could not be read, and the exit status for it."""
    for sentence in broken:
        print(f"rectgrad: {sentence}", file=sys.stderr)
    return 1 if broken else 0


def device_of(device: str) -> str:
    """A device that is there; `auto`: the fastest."""
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
