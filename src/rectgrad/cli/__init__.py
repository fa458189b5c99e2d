"""The command line: thin. Commands are imported when they are run, so that help answers at once.

Bad input is one line on stderr and exit status 2; among several files the good ones are done, the bad ones
listed, exit status 1.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rectgrad import __version__

# name: (module, what the list of commands says)
COMMANDS = {
    "explain": ("explain", "Explain photos: a picture and a JSON line each."),
    "compare": ("compare", "All methods side by side, the paper's Figure 1."),
    "sweep": ("sweep", "RectGrad at many thresholds, the paper's Figure 4."),
    "layers": ("layers", "Attribution layer by layer, the paper's Figure 7."),
    "app": ("explorer", "The explorer: see it in a browser."),
    "bench": ("bench", "What each method costs against the plain gradient."),
    "data": ("data", "Get CIFAR-10 and its masks ready."),
    "train": ("train", "Train the paper's CNN."),
    "reproduce": ("reproduce", "Run an experiment of the paper."),
    "methods": ("lists", "List the methods and their options."),
    "models": ("lists", "List the models and how to get them."),
}


class LazyGroup(TyperGroup):
    """Knows its commands by name; imports the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """For the list of commands: name and sentence alone."""
        if cmd_name not in COMMANDS:
            return None
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, help=COMMANDS[cmd_name][1])(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        module = importlib.import_module(f"rectgrad.cli.{COMMANDS[name][0]}")
        command = typer.main.get_command(getattr(module, f"{name}_app"))
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def rectgrad(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """What a neural network looked at, without the noise.

    Example: rectgrad explain cat.jpg --method rectgrad --q 98
    """


def main() -> None:
    try:
        status = app(standalone_mode=False)
    except KeyboardInterrupt:
        _stopped()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "Abort":
            _stopped()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(0)
        _fail(_sentence(error))
    if status == 130:
        _stopped()
    sys.exit(status if isinstance(status, int) else 0)


def _stopped() -> None:
    """Ctrl-C, which the argument parser may hand on as an error or as a status."""
    _fail("stopped; run the same command again to go on", 130)


def _fail(sentence: str, status: int = 2) -> None:
    print(f"rectgrad: {sentence}", file=sys.stderr)
    sys.exit(status)


def _sentence(error: Exception) -> str:
    """What is wrong, in one line. Anything unforeseen is a fault of ours and keeps its traceback."""
    if hasattr(error, "format_message"):  # the argument parser's own
        known = f" Commands are {', '.join(COMMANDS)}." if "No such command" in str(error) else ""
        return " ".join(error.format_message().split()) + known
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    if isinstance(error, (ValueError, TypeError)) or type(error).__name__ in _OURS:
        return " ".join(str(error).split())
    raise error


_OURS = ("UnsupportedModelError", "ModelUnavailableError", "DataUnavailableError", "UnreadableImageError")
