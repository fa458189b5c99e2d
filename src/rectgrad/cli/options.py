"""Options that several commands share. Those of the methods come from the methods' own fields."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from PIL import Image
from torch import Tensor

from rectgrad import photos
from rectgrad.api import Record, record
from rectgrad.explanation import check_labels
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS, as_method, name_of
from rectgrad.models import ImageModel, load
from rectgrad.photos import files
from rectgrad.photos.files import Source

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


class Option(NamedTuple):
    """An option of one or more methods."""

    kind: type
    help: str
    methods: list[str]


def method_options() -> dict[str, Option]:
    """Every option of every method, from the fields of the methods."""
    found: dict[str, Option] = {}
    for name, method in METHODS.items():
        for field in fields(method):
            kind = _KINDS.get(str(field.type), str)
            option = found.setdefault(field.name, Option(kind, field.metadata.get("help", ""), []))
            option.methods.append(name)
    return found


def with_method_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one option for each field of a method, gathered into its `options` argument."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "options"]
    extra = [_parameter(name, option) for name, option in method_options().items()]

    def wrapper(**given: Any) -> Any:
        options = {p.name: given.pop(p.name) for p in extra}
        return command(**given, options={k: v for k, v in options.items() if v is not None})

    wrapper.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def _parameter(name: str, option: Option) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    flags = f"{flag}/--no-{flag[2:]}" if option.kind is bool else flag
    help_text = f"{option.help} ({', '.join(option.methods)})".strip()
    described = typer.Option(flags, help=help_text, show_default=False)
    annotation: Any = Annotated[option.kind | None, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class Network(NamedTuple):
    """A model on its device, and the class asked about."""

    model: ImageModel
    device: str
    target: int | None

    def record(self, crop: Image.Image) -> Record:
        """One forward pass of what the network sees of a photo."""
        kept = record(self.model.module, self.inputs(crop))
        check_labels(self.model, getattr(kept.outputs, "logits", kept.outputs).shape[1])
        return kept

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


def photos_meant(images: list[str] | None, out: Path | None = None) -> list[Source]:
    found = files.sources(images if images is not None else [str(files.sample_photo())], but=out)
    if not found:
        raise ValueError(f"all photos named lie in {str(out)!r}, where the results go")
    return found


def configured(name: str, options: dict[str, Any]) -> Method:
    """A method by name; of an average, options that are not its own go to the method it averages."""
    own = [field.name for field in fields(as_method(name, {}))]
    inner = {key: value for key, value in options.items() if key not in own}
    if "over" not in own or not inner:
        return as_method(name, options)
    average = as_method(name, {key: value for key, value in options.items() if key in own})
    over = options.get("over", name_of(average.over))  # type: ignore[attr-defined]
    return replace(average, over=as_method(over, inner))  # type: ignore[call-arg]


def marks(*names: str | Path | None) -> tuple:
    """Marks of the files among the names: a model's code, its weights, its labels."""
    paths = [Path(str(name).rpartition(":")[0] or str(name)) for name in names if name is not None]
    return tuple([str(path), *files.mark(path)] for path in paths if path.is_file())


def readable(found: list[Source], broken: list[str]) -> Iterator[tuple[Source, Image.Image]]:
    """The photos that can be read; a sentence about each of the others goes to `broken`."""
    for source in found:
        try:
            yield source, photos.read(source.path)
        except photos.UnreadableImageError as error:
            broken.append(str(error))


def results_folder(out: Path) -> None:
    """Fit to write results to; made with the first of them."""
    first = next(place for place in (out, *out.absolute().parents) if os.path.lexists(place))
    if not first.is_dir():
        raise ValueError(f"--out {str(out)!r}: {str(first)!r} is a file, not a folder")
    files.sweep_parts(out)


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
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from None
    return device
