"""The command line. A command is imported when it runs, so that `--help` is fast.

Invalid input prints one line on stderr and exits with status 2. With several files, the valid ones are
processed, the invalid ones are listed, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rectgrad import __version__

# name: (module, help text in the list of commands)
COMMANDS = {
    "explain": ("explain", "Explain photos: one picture and one JSON record each."),
    "compare": ("compare", "Compare methods side by side, as in the paper's Figure 1."),
    "sweep": ("sweep", "Show RectGrad at many thresholds, as in the paper's Figure 4."),
    "layers": ("layers", "Show each layer's attribution, as in the paper's Figure 7."),
    "judge": ("judge", "Judge which methods to trust on a network and photos."),
    "app": ("explorer", "Start the explorer, an interactive web page."),
    "bench": ("bench", "Measure the time and memory of each method."),
    "data": ("data", "Download CIFAR-10 and its object masks."),
    "train": ("train", "Train the paper's CNN or another small network."),
    "reproduce": ("reproduce", "Run an experiment from the paper."),
    "methods": ("lists", "List the methods and their options."),
    "models": ("lists", "List the models and how to obtain them."),
}
OVER_PHOTOS = ("explain", "compare", "sweep", "layers")


class LazyGroup(TyperGroup):
    """Lists its commands by name and imports only the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a stub with name and help text, which is enough for the list of commands."""
        if cmd_name not in COMMANDS:
            return None
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, help=COMMANDS[cmd_name][1])(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        if name in OVER_PHOTOS:
            _tune_process()
        module = importlib.import_module(f"rectgrad.cli.{COMMANDS[name][0]}")
        command = typer.main.get_command(getattr(module, f"{name}_app"))
        return name, command, rest


def _tune_process() -> None:
    """Settings for a network that runs while pictures are drawn. They must precede the import of torch.

    Threads of OpenMP that wait for each other sleep instead of spinning, which leaves the cores to those that
    draw. Freed memory is kept: glibc would return a layer's activations to the system at once, which then
    clears the same pages for the next layer (a tenth of the time of the command).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**30)):
            ctypes.CDLL(None).mallopt(option, value)


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def rectgrad(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Show what a neural network looked at, without the noise.

    Example: rectgrad explain cat.jpg --method rectgrad --q 98
    """


@contextlib.contextmanager
def _ended_by_second_interrupt() -> Iterator[None]:
    """The first Ctrl-C stops the work, which cleans up; a second one ends the process at once, silently."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, lambda *_: os._exit(130))
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class CommandExit(SystemExit):
    """Ends a command with a status. Any other SystemExit comes from the code of a model."""


@_ended_by_second_interrupt()
def main() -> None:
    for name in ("stdout", "stderr"):  # closed by the caller, or a Windows program without a console
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that are not UTF-8
    try:
        status = app(standalone_mode=False)
    except KeyboardInterrupt:
        _interrupted()
    except CommandExit:
        raise
    except (SystemExit, BrokenPipeError) as error:  # a status of 0 would hide missing results
        # A closed pipe, as of `rectgrad models | head -1`; the argument parser reports it as SystemExit.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            _fail(f"the code of the model called sys.exit({error.code!r})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "Abort":
            _interrupted()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(0)
        _fail(_message(error))
    except BaseException as error:  # neither an error nor an interrupt of Python's
        _fail(f"the code of the model raised {type(error).__name__}({', '.join(map(repr, error.args))})")
    if status == 130:
        _interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _interrupted() -> None:
    """Ctrl-C, which the argument parser may report as an error or as a status."""
    _fail("interrupted; run the same command again to resume", 130)


def _fail(message: str, status: int = 2) -> None:
    from rectgrad.photos.names import readable

    print(f"rectgrad: {readable(message)}", file=sys.stderr)
    sys.exit(status)


def _message(error: Exception) -> str:
    """The error as one line. An unexpected error is a bug in rectgrad and keeps its traceback."""
    if hasattr(error, "format_message"):  # raised by the argument parser
        valid = f" The commands are {', '.join(COMMANDS)}." if "No such command" in str(error) else ""
        return " ".join(error.format_message().split()) + valid
    if isinstance(error, OSError):
        name = error.filename2 or error.filename  # of a renaming, the file that was to be written
        where = f": {name}" if name else ""
        return f"{error.strerror or error}{where}"
    if isinstance(error, (ValueError, TypeError)) or type(error).__name__ in _EXPECTED:
        return with_option_names(" ".join(str(error).split()))
    raise error


def with_option_names(message: str) -> str:
    """Replaces Python arguments by command-line options: weights=FILE becomes --weights FILE."""
    return re.sub(r"\b(weights|labels)=(?=FILE|['\"])", r"--\1 ", message)


_EXPECTED = ("UnsupportedModelError", "ModelUnavailableError", "DataUnavailableError", "UnreadableImageError")
