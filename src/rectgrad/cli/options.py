"""Options and helper functions that several commands share.

The options of a method are the fields of its dataclass, which define their names, types and help texts.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch.nn.parameter import is_lazy

from rectgrad.explanation.network import check_device
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS, as_method, every_name, name_of
from rectgrad.methods.options import offered, type_of
from rectgrad.models import MODELS, ImageModel, load
from rectgrad.models.errors import reason
from rectgrad.photos import files
from rectgrad.photos.files import Source
from rectgrad.photos.names import readable

Images = Annotated[
    list[str] | None, typer.Argument(help="Photos, folders or glob patterns; default: a sample photo.")
]
ModelName = Annotated[
    str, typer.Option("--model", help="A name from `rectgrad models`, or path/to/file.py:factory.")
]
Weights = Annotated[
    Path | None, typer.Option(help="File with the model's weights: safetensors or a state dict.")
]
Labels = Annotated[Path | None, typer.Option(help="Text file with one class name per line.")]
Target = Annotated[
    str | None, typer.Option(help="Class to explain, by index or name; default: the top class.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Dark = Annotated[bool, typer.Option("--dark", help="Draw on a dark background.")]
Maps = Annotated[str | None, typer.Option(help="Save the raw maps as npy or npz.")]
Together = Annotated[bool, typer.Option("--together", help="Also put all photos on one sheet.")]
Again = Annotated[bool, typer.Option("--again", help="Recompute existing results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line per photo.")]
WithSpecificity = Annotated[
    bool | None,
    typer.Option(
        "--specificity/--no-specificity",
        help="Measure how specific a map is to its class; default: for methods that need one pass.",
        show_default=False,
    ),
]

KINDS = ("npy", "npz")  # formats of raw maps


class Option(NamedTuple):
    """An option of one or more methods. help: maps each help text to the methods it applies to."""

    type: type
    help: dict[str, list[str]]


def method_options() -> dict[str, Option]:
    """Every option of every method, from the fields of the methods."""
    options: dict[str, Option] = {}
    for name, method in METHODS.items():
        for field in offered(method):
            kind = type_of(field)
            known = options.get(field.name, Option(kind, {}))
            text = field.metadata.get("help", "")
            help_texts = {**known.help, text: [*known.help.get(text, []), name]}
            options[field.name] = Option(_common_type(known.type, kind), help_texts)
    return options


def _common_type(a: type, b: type) -> type:
    """The type of an option that two methods declare differently."""
    if a is b:
        return a
    return float if {a, b} == {int, float} else str


def with_method_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds one option for each field of a method, and collects them into the argument `options`."""
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
    flags = f"{flag}/--no-{flag[2:]}" if option.type is bool else flag
    help_text = " ".join(f"{text} ({', '.join(names)})".strip() for text, names in option.help.items())
    described = typer.Option(flags, help=help_text, show_default=False)
    annotation: Any = Annotated[option.type | None, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class Network(NamedTuple):
    """A model on its device, and the class to explain (None: the top class)."""

    model: ImageModel
    device: str
    target: int | None


def network(name: str, weights: Path | None, labels: Path | None, device: str, target: str | None) -> Network:
    resolved = resolve_device(device)
    with contextlib.redirect_stdout(sys.stderr):  # what the code of a model prints is no result
        model = load(name, weights=weights, labels=labels)
    if any(map(is_lazy, (*model.module.parameters(), *model.module.buffers()))):
        raise ValueError(f"{name} has lazy layers without weights; run the network once in the factory")
    try:
        model.module.to(resolved)
    except NotImplementedError as error:
        raise ValueError(f"{name} is on the meta device, without weights; create it on the CPU") from error
    return Network(model, resolved, None if target is None else model.find_class(target))


def check_alone(model: ImageModel, device: str) -> None:
    """Raises an error if a user's model itself fails on an input of its size, or returns no class scores."""
    if model.name in MODELS:
        return
    inputs = torch.zeros(1, 3, *model.size, device=device)
    try:
        with torch.no_grad():
            outputs = model.module(inputs)
    except Exception as error:
        raise ValueError(
            f"{model.name} fails on an input of shape {tuple(inputs.shape)} and type {inputs.dtype} "
            f"({reason(error)}); wrap it in a module that takes such an input, or return an ImageModel of "
            "another size"
        ) from error
    scores = getattr(outputs, "logits", outputs)
    if not isinstance(scores, torch.Tensor) or scores.dim() not in (1, 2):
        shape = f" of shape {tuple(scores.shape)}" if isinstance(scores, torch.Tensor) else ""
        raise TypeError(
            f"{model.name} returns a {type(scores).__name__}{shape}, not the scores of the classes, "
            "(N, classes); wrap it in a module that returns them"
        )


def picture_methods(names: str, q: float) -> dict[str, Method]:
    """Methods by name, configured as in the paper's figures: RectGrad keeps its negative values."""
    check_percentile(q)
    chosen = every_name() if names == "all" else [name.strip() for name in names.split(",")]
    return {name: _picture_method(name, q) for name in chosen}


def check_percentile(q: float | None) -> None:
    """Raises an error if a percentile was given as a fraction."""
    if q is not None and 0.5 <= q < 1:
        raise ValueError(f"--q is a percentile from 0 to 100, not a fraction: use --q {100 * q:g}, not {q:g}")


def _picture_method(name: str, q: float) -> Method:
    method = build_method(name, {})
    return as_method(name, {"q": q, "positive_only": False}) if isinstance(method, RectGrad) else method


def find_photos(
    images: list[str] | None, out: Path | None = None, reserved: Collection[str] = ()
) -> list[Source]:
    """The photos to process. Photos in the output folder are skipped, because they are results."""
    given = images if images is not None else [str(files.sample_photo())]
    sources = files.sources(given, exclude=out, reserved=reserved)
    if not sources:
        raise ValueError(f"all photos are in {str(out)!r}, the folder for the results")
    return sources


def check_choice(option: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise ValueError(f"{option} must be {' or '.join(choices)}, not {value!r}")


def build_method(name: str, options: dict[str, Any]) -> Method:
    """A method by name. Options that an average does not have are passed to the method that it averages."""
    check_percentile(options.get("q"))
    if METHODS.get(name) is not None and not METHODS[name].ready:
        raise ValueError(f"{name} needs baselines, which cannot be given on the command line: use Python")
    own = [field.name for field in fields(as_method(name, {}))]
    inner = {key: value for key, value in options.items() if key not in own}
    if "over" not in own or not inner:
        return as_method(name, _converted(name, options))
    average = as_method(name, _converted(name, {k: v for k, v in options.items() if k in own}))
    over = options.get("over", name_of(average.over))  # type: ignore[attr-defined]
    known = [field.name for field in fields(as_method(over, {}))]
    for option in inner:
        if option not in known:
            flag = "--" + option.replace("_", "-")
            raise TypeError(
                f"neither {name} nor {over}, the method that it averages, has the option {flag}; to average "
                "another method, use --over, such as --over rectgrad"
            )
    return replace(average, over=as_method(over, _converted(over, inner)))  # type: ignore[call-arg]


def _converted(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the types of this method, where other methods declare them differently."""
    types = {field.name: type_of(field) for field in fields(as_method(name, {}))}
    return {key: _convert(key, value, types.get(key, str)) for key, value in options.items()}


def _convert(name: str, value: Any, kind: type) -> Any:
    if kind in (str, bool) or isinstance(value, kind):
        return value
    try:
        converted = kind(value)
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} must be a number, not {value!r}") from None
    return value if isinstance(value, float) and converted != value else converted  # 2.5 is not an int


def code_of(model: str) -> tuple:
    """The Python file of a model with the hash of its content. Weights and labels are part of the model."""
    path = Path(model.rpartition(":")[0] or model)
    if not path.is_file():
        return ()
    with open(path, "rb") as file:
        return ((str(path), files.digest(file)),)


def prepare_output(out: Path) -> None:
    """Checks that results can be written to `out`. The folder is created with the first result."""
    check_folder(out)
    files.remove_partial_files(out)


def check_folder(out: Path) -> None:
    existing = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ValueError(f"--out {str(out)!r}: {str(existing)!r} is a file, not a folder")


def check_file(option: str, file: Path, other: str = "") -> None:
    """Checks that a file can be written. It is checked first, because the work may take an hour. other: what
    else the option takes."""
    parent = next(each for each in file.absolute().parents if each.exists())
    if file.is_dir() or not parent.is_dir():
        raise ValueError(f"{option} must be the path of a file to write{other}, not {str(file)!r}")


def exit_status(broken: list[str], several: bool) -> int:
    """Prints the errors of unreadable files and returns the exit status: 2 if there was only one file."""
    for message in broken:
        print(f"rectgrad: {readable(message)}", file=sys.stderr)
    return (1 if several else 2) if broken else 0


def resolve_device(device: str) -> str:
    """Checks that a device is available; `auto` selects the fastest."""
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    check_device(device)
    return device
