"""Fuzzes image files, other files and command lines for a given time.

    python benchmarks/fuzz.py [--seconds 60] [--seed 0] [--out FILE] [--case images:17]

Images: reads small images of many formats and modes with bytes flipped, removed, inserted or duplicated, and
files of formats that must not be opened, such as PostScript. The result must be an RGB picture or a one-line
error, within seconds. Files: the same for weights, checkpoints, records, parts, archives, batches of CIFAR-10
and class names. Commands: runs commands with random combinations of valid and invalid option values, among
folders, photos, models, weights and archives that are meant to mislead. The exit status must be 0, 1 or 2,
with a single line on stderr for 2, and no file may be written outside --out or overwritten. All run in child
processes; a child that crashes or hangs is counted and replaced.

A case depends only on the seed and its number; --case repeats one with full output. The exit status is 1 if
a case failed. Writes results/bench/fuzz.json by default.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import importlib
import io
import itertools
import json
import lzma
import math
import multiprocessing
import os
import pickle
import random
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

HANGS = 60  # seconds without a response after which the child is killed
# Time limit of a case in seconds. A few bytes can encode a picture just below the limit of 150 megapixels.
SLOW = {"images": 20, "files": 20, "commands": 20}


class Outcome(NamedTuple):
    """kind: the category to count. fault: what is wrong, in one line; None if nothing is. told: details."""

    kind: str
    fault: str | None = None
    told: str = ""


# --- images ------------------------------------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "MPO", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "ICO", "JPEG2000", "AVIF")
FOREIGN = ("EPS", "PDF", "TGA", "PCX", "IM", "SGI", "XBM", "MSP", "DDS", "ICNS")  # must not be opened
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F")
TIFF = ("tiff_lzw", "tiff_deflate", "packbits", "jpeg")
SIZES = ((1, 1), (17, 9), (64, 48))


def picture(mode: str, size: tuple[int, int]) -> Image.Image:
    grey = Image.radial_gradient("L").resize(size)
    if mode in ("LA", "PA", "RGBA"):
        colour = Image.merge("RGBA", [grey, grey.rotate(90), grey.rotate(180), grey])
        return colour.convert("LA" if mode == "LA" else "RGBA") if mode != "PA" else grey.convert("PA")
    if mode in ("1", "L", "I", "I;16", "F"):
        return grey.convert(mode)
    colour = Image.merge("RGB", [grey, grey.rotate(90), grey.rotate(180)])
    return colour.convert("LAB") if mode == "LAB" else colour.convert(mode)


def originals() -> list[bytes]:
    """Images in every format and mode that Pillow can write, also with EXIF rotation and several frames."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture("RGB", (17, 9)), picture("RGB", (17, 9)).rotate(90)]
    ways: list[dict[str, Any]] = [{}, {"exif": exif}, {"save_all": True, "append_images": frames}]
    found = []
    for kind, mode, size in itertools.product(FORMATS, MODES, SIZES):
        if kind in ("JPEG2000", "AVIF") and size == SIZES[-1]:
            continue  # slow to write
        # Other modes are left out: libtiff corrupts memory when it fails to write them as JPEG.
        own = [{"compression": name} for name in TIFF] if kind == "TIFF" and mode in ("L", "RGB") else []
        for way in [*ways, *own]:
            stream = io.BytesIO()
            with contextlib.suppress(Exception):  # Pillow fails in many ways
                picture(mode, size).save(stream, kind, **way)
                Image.open(stream).load()  # Pillow cannot read everything that it writes
                found.append(stream.getvalue())
    return found


def foreign() -> list[bytes]:
    """Images in formats that must not be opened, and pictures of numbers that are not finite."""
    found = []
    for kind, mode in itertools.product(FOREIGN, ("1", "L", "RGB")):
        stream = io.BytesIO()
        with contextlib.suppress(Exception):
            picture(mode, SIZES[1]).save(stream, kind)
            found.append(stream.getvalue())
    found.append(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(never) print\nshowpage\n")
    for value, compression in itertools.product((math.nan, math.inf, -math.inf), (None, "tiff_lzw")):
        values, stream = np.zeros((9, 17), np.float32), io.BytesIO()
        values[3, 4] = value
        Image.fromarray(values).save(stream, "TIFF", compression=compression)
        found.append(stream.getvalue())
    return found


def broken(content: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The bytes with a few random defects."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 2, 4, 16, 200)))
        mishap = draw.randrange(7)
        if mishap == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif mishap == 1:
            del data[at:]
        elif mishap == 2:
            del data[at:end]
        elif mishap == 3:
            data[at:at] = draw.randbytes(draw.choice((1, 3, 50)))
        elif mishap == 4:
            data[at:at] = data[at:end]
        elif mishap == 5:
            data[at:end] = draw.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - at)
        elif mishap == 6:
            other = draw.choice(others)
            data[at:] = other[draw.randrange(len(other)) :]
    return bytes(data)


def images(folder: Path, seed: int) -> Callable[[int], Outcome]:
    from rectgrad import photos

    known, others, path = originals(), foreign(), folder / "photo"

    def case(number: int) -> Outcome:
        draw = random.Random(f"{seed} images {number}")
        wrong = draw.random() < 0.1
        content = draw.choice(others if wrong else known)
        intact = draw.random() < 0.05  # a control
        whole = intact and not wrong
        path.write_bytes(content if intact else broken(content, known, draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = photos.read(path, enough=draw.choice((None, 16)))
        except photos.UnreadableImageError as error:
            message = str(error).replace(str(path), path.name, 1)
            if whole or "\n" in message or message == str(error):
                return Outcome("refused", f"refused, whole: {whole}, with {message!r}")
            return Outcome("refused")
        except BaseException as error:
            return Outcome("fault", f"{type(error).__name__}: {error}", traceback.format_exc())
        if intact and wrong:
            return Outcome("picture", "a picture from a file that must not be opened")
        if found.mode != "RGB" or min(found.size) < 1:
            return Outcome("picture", f"a picture in {found.mode} of {found.size}")
        return Outcome("whole picture" if whole else "picture")

    return case


# --- other files -------------------------------------------------------------------------------------------


class Loader(NamedTuple):
    """Contents of a kind of file, the function that reads it, and the errors that it may raise."""

    contents: list[bytes]
    name: str
    load: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = ()


def loaders(folder: Path) -> dict[str, Loader]:
    import safetensors.torch
    import torch

    from rectgrad import training
    from rectgrad.cli import index
    from rectgrad.data import DataUnavailableError, cifar10, digest_of, masks, shapes
    from rectgrad.experiments.parts import Parts
    from rectgrad.models import ModelUnavailableError, classes, load

    state = {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}
    factory = folder / "small.py"
    factory.write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(3, 2))\n")

    def weights(path: Path) -> None:
        module = load(f"{factory}:make", weights=path).module
        if any(value.dtype != torch.float32 for value in module.parameters()):
            raise AssertionError("weights of another type")

    pickled = []
    for given in (
        state,
        {"state_dict": state},
        {0: torch.ones(1)},
        {"0.weight": torch.ones(1, device="meta")},
    ):
        stream = io.BytesIO()
        torch.save(given, stream)
        pickled.append(stream.getvalue())
    few = shapes.generate(4, 0)
    plan = training.Plan(epochs=1, batch=4)
    training.train(few, plan, checkpoint=folder / "checkpoint")
    target = {"index": 1, "name": "cat", "confidence": 0.5}
    options = {"model": "m", "method": "rectgrad", "options": {"q": 98.0}}
    record = {
        "image": "x.jpg",
        "target": target,
        "top5": [target],
        "specificity": 0.5,
        "caution": "",
        "notes": [],
    }
    record |= {"warnings": ["w"], "settings": options, "photo": "0", "picture": "x.png", "thumbnail": "t.jpg"}
    kept = Parts(folder / "parts", {})
    kept.keep("a", [1.0, 2.0])
    (part,) = kept.folder.iterdir()
    several = io.BytesIO()
    with tarfile.open(fileobj=several, mode="w") as opened:
        for name in ("cat_1.png", "cat_1_mask.png"):
            stream = io.BytesIO()
            picture("L", (32, 32)).save(stream, "PNG")
            member = tarfile.TarInfo(f"m/{name}")
            member.size = stream.tell()
            stream.seek(0)
            opened.addfile(member, stream)
    plain = several.getvalue()
    batch = pickle.dumps({"data": "x" * (10_000 * 3072), "labels": list(range(10)) * 1000}, protocol=2)

    def shown(path: Path) -> None:
        if found := index._stored(path.parent):
            index.page(list(found.values()), "explain")

    def part_read(path: Path) -> None:
        shutil.copy(path, part)
        kept.known("a")
        kept.seconds()

    refused = ModelUnavailableError, ValueError
    json_record = json.dumps(record).encode()
    archived = [plain, gzip.compress(plain), bz2.compress(plain), lzma.compress(plain)]
    return {
        "pickled weights": Loader(pickled, "w.pt", weights, refused),
        "safetensors": Loader([safetensors.torch.save(state)], "w.safetensors", weights, refused),
        "checkpoint": Loader(
            [(folder / "checkpoint").read_bytes()],
            "c.safetensors",
            lambda path: training.load_checkpoint(path, plan, digest_of(few)),
        ),
        "record": Loader([json_record, b"[" * 100_000], "x.json", shown),
        "part": Loader([part.read_bytes()], "part", part_read),
        "archive": Loader(archived, "a.tar", masks.read, (DataUnavailableError,)),
        "batch": Loader([batch], "b", lambda p: cifar10._batch(p.read_bytes(), "b"), (DataUnavailableError,)),
        "labels": Loader([b"cat, house cat\ndog\n", "\ufeffé\n".encode()], "l.txt", classes.read, refused),
    }


def others(folder: Path, seed: int) -> Callable[[int], Outcome]:
    known = loaders(folder)
    kinds = [kind for kind in known for _ in range(1 if kind == "batch" else 10)]

    def case(number: int) -> Outcome:
        draw = random.Random(f"{seed} files {number}")
        kind = draw.choice(kinds)
        own = known[kind]
        place = folder / "given"
        place.mkdir(exist_ok=True)
        path = place / own.name
        path.write_bytes(broken(draw.choice(own.contents), own.contents, draw))
        try:
            own.load(path)
        except own.errors as error:
            several = "\n" in str(error)
            return Outcome(f"{kind}, refused", f"refused with {str(error)!r}" if several else None)
        except BaseException as error:
            return Outcome("fault", f"{kind}: {type(error).__name__}: {error}", traceback.format_exc())
        finally:
            path.unlink()
        return Outcome(f"{kind}, read")

    return case


# --- commands ----------------------------------------------------------------------------------------------

PICTURES = ("explain", "compare", "sweep", "layers")  # run more often
# Of photos, in the folder `names`. The last four cannot be read.
NAMES = "-x.png", "--out.png", "n\n\x1b[31m.png", "caf\udce9.png", "b" * 251 + ".png", "<b>.png", "con.png"
UNREADABLE = "loop.png", "pipe.png", "link.png", "ps.png"
LONG = ("train", "bench")  # only run with --help
PATHS = ["", "nowhere", "text.txt", "folder", "x" * 300, "caf\udce9", "-", "photo.png/below", "*", "pipe.pt"]
PHOTOS = (
    ["photo.png", "grey.jpg", "folder"],
    [
        "broken.png",
        "*.png",
        "empty",
        "folder/../photo.png",
        "names",
        "n*/*",
        "float.tif",
        "a.jpg",
        *PATHS,
    ],
)
ARCHIVES = ["batches", "long.tgz", "bomb.tgz", "short.tar", "links.tar", "cnn.pt"]
# Files of weights that no network has, by name, and factories that fail: see `furnish`.
WEIGHTS = ("integers", "meta", "both", "complex", "sparse", "nan", "expanded")
FACTORIES = [f"exits.py:{name}" for name in ("make", "while_running", "none")] + ["leaves.py:make"]
STRANGE = ["", *"-1 1e30 -inf inf nan 1e400 0x10 x 9999999999999999999999".split()]
SOME = "rectgrad rectgrad_prr rectgrad_mod saliency guided_backprop deconv epsilon_lrp deeplift".split()
MORE = "rectgrad_gated gradcam guided_gradcam lrp occlusion rise smoothgrad integrated_gradients".split()
Values = tuple[list[str], list[str]]  # mostly valid values, mostly invalid values
VALUES: dict[str, Values] = {
    "images": PHOTOS,
    "photo": PHOTOS,
    "folder": (["folder"], PATHS),
    "method": ([*SOME, *MORE, "random"], ["gradcamera", ""]),
    "methods": (
        ["saliency,rectgrad", "saliency, deconv", "gradcam,rectgrad_gated,lrp"],
        ["all", "saliency,", ",", "", "x"],
    ),
    "gate": (["class"], ["x", ""]),
    "layer": (["conv1", "relu3"], ["conv9", ""]),
    "composite": (["epsilon", "epsilon_plus_flat", "zplus"], ["x", ""]),
    "masks": (["folder", "2", "3"], [*PATHS, "names", "0", "-1"]),  # of `judge`, and of RISE
    "measures": (["gini", "specificity,inside", "zero_share"], ["all", "x", ",", ""]),
    "seed": (["0", "7"], STRANGE),
    "only": (["map", "overlay"], ["x", ""]),
    "over": ([*SOME, "random"], ["smoothgrad", "x", ""]),
    "q": (["0", "50", "98", "100"], ["100.1", "0,50,98", "1,two", ",", *STRANGE]),
    "tau": (["0", "0.5", "-1"], STRANGE),
    "rule": (["PR1", "PR2", "PR3", "PR4", "mod"], ["PR9", ""]),
    "interpolation": (["nearest", "linear"], ["cubic", ""]),
    "quadrature": (["trapezoid", "right"], ["left", ""]),
    "samples": (["1", "2"], ["0", "-1", "x", "1.5"]),
    "steps": (["2", "3"], ["1", "0", "-1", "x"]),
    "count": (["2", "3", "1000000000"], ["1", "0", "x"]),
    "batch_size": (["1", "2"], ["0", "-1", "x", "1000000000000000000000"]),
    "target": (["cat", "3", "９"], ["-1", "99", "c", "", "dog ", "²", "caf\udce9", "horse\nship"]),
    "device": (["cpu", "auto"], ["cpu:7", "cuda:99", "meta", "mps", "quantum", "", "cpu:x", "vulkan"]),
    "out": (["out", "out/deep/er", "../beside", ".", "planted"], [*PATHS, "caf\udce9", "dangling"]),
    "maps": (["npy", "npz"], ["csv", ""]),
    "engine": (["local"], ["slurm", ""]),
    "weights": (
        ["cnn.safetensors", "cnn.pt"],
        ["trap.pt", "garbage.safetensors", *(f"{name}.pt" for name in WEIGHTS), *PATHS],
    ),
    "labels": (["ten.txt"], ["few.txt", "bytes.txt", "empty.txt", *PATHS]),
    "model": (
        ["cifar10_cnn"],
        ["resnet", "", "net.py", "net.py:", "net.py:make", "net.py:wrong", ":", *FACTORIES, "pipe.pt:make"],
    ),
    "dataset": (["shapes"], ["cifar10", "x", ""]),
    "preset": (["quick"], ["paper", "x", ""]),
    "name": (["claims", "cifar10"], ["report", "roar-kar", "all", "x", "", "masks"]),
    "source": (PATHS, PATHS),
    "host": (["127.0.0.1"], ["0.0.0.0", "example.org", ""]),
    "auth": (["user"], ["", "user", ":", "user:", ":password"]),
}
NUMBER: Values = (["0", "1", "0.5"], STRANGE)  # for all other options
# Options that keep a command from long work, a download or a server. The last value of an option counts.
BOUNDS: dict[str, list[list[str]]] = {
    "reproduce": [["--preset", "x"], ["--dataset", "x"]],
    "data": [["--from", name] for name in (*PATHS, *ARCHIVES) if name],
    "judge": [
        ["--preset", "x"],
        ["--methods", "x"],
        [
            "--preset",
            "quick",
            "--count",
            "2",
            "--methods",
            "saliency,rectgrad",
            "--measures",
            "gini,zero_share",
        ],
    ],
    "app": [["--auth", "user"], ["--auth", ""], ["--auth", ":password"]],
}


def command_line(draw: random.Random) -> list[str]:
    from rectgrad.cli import COMMANDS

    name = draw.choice([*COMMANDS, *PICTURES * 4])
    if name in LONG:
        return [name, "--help"]
    words = list(drawn_options(name, draw))
    if draw.random() < 0.05:
        words.insert(draw.randrange(len(words) + 1), draw.choice(["--nonsense", "-x", "--q", "--help"]))
    return [name, *words, *draw.choice(BOUNDS.get(name, [[]]))]


def drawn_options(name: str, draw: random.Random) -> Iterator[str]:
    """Arguments, and a random choice of the options that the command declares."""
    import typer

    from rectgrad.cli import COMMANDS

    module = importlib.import_module(f"rectgrad.cli.{COMMANDS[name][0]}")
    share, care = draw.choice((0.03, 0.1, 0.3)), draw.choice((0.5, 0.9, 0.97))

    def value(key: str) -> str:
        return draw.choice(VALUES.get(key, NUMBER)[draw.random() > care])

    for parameter in typer.main.get_command(getattr(module, f"{name}_app")).params:
        key = parameter.name or ""
        if parameter.param_type_name == "argument":
            yield from (value(key) for _ in range(draw.randrange(1, 3) if key == "images" else 1))
        elif key in ("model", "device", "out") or (draw.random() < share and key not in ("help", "insecure")):
            yield draw.choice([*parameter.opts, *parameter.secondary_opts])
            if not getattr(parameter, "is_flag", False):
                yield value(key)


def furnish(folder: Path) -> None:
    """Creates the files that the command lines refer to."""
    import safetensors.torch
    import torch

    from rectgrad.models import load

    state = load("cifar10_cnn").module.state_dict()
    safetensors.torch.save_file(state, folder / "cnn.safetensors")
    torch.save(state, folder / "cnn.pt")
    torch.save({"conv1.weight": print}, folder / "trap.pt")
    (folder / "garbage.safetensors").write_bytes(b"\x10" * 99)
    picture("RGB", (40, 32)).save(folder / "photo.png")
    picture("L", (32, 40)).save(folder / "grey.jpg")
    (folder / "broken.png").write_bytes((folder / "photo.png").read_bytes()[:200])
    for name in ("folder", "empty"):
        (folder / name).mkdir()
    shutil.copy(folder / "photo.png", folder / "folder" / "inside.png")
    (folder / "text.txt").write_text("text")
    (folder / "ten.txt").write_text("".join(f"class {i}\n" for i in range(10)))
    (folder / "few.txt").write_text("one\ntwo\n")
    (folder / "bytes.txt").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_text("")
    (folder / "net.py").write_text("def make():\n    return 3\n")
    (folder / "exits.py").write_text(EXITS)
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    misleading(folder, state)
    hostile_names(folder)
    hostile_archives(folder)
    planted(folder / "planted")


EXITS = """
import sys
from torch import nn
class Exits(nn.Module):
    def forward(self, x):
        sys.exit(0)
def make():
    sys.exit(0)
def while_running():
    return Exits()
def none():
    return None
"""


def misleading(folder: Path, state: dict[str, Any]) -> None:
    """The files of WEIGHTS."""
    import torch

    given: dict[str, dict] = {
        "integers": dict(enumerate(state.values())),
        "meta": {key: value.to("meta") for key, value in state.items()},
        "both": state | {f"module.{key}": value for key, value in state.items()},
        "complex": {key: value.to(torch.complex64) for key, value in state.items()},
        "sparse": {key: value.to_sparse() for key, value in state.items()},
        "nan": {key: value * math.nan for key, value in state.items()},
        "expanded": {key: torch.zeros(1).expand(10**13) for key in state},
    }
    for name in WEIGHTS:
        torch.save(given[name], folder / f"{name}.pt")


def hostile_names(folder: Path) -> None:
    (folder / "names" / "a.png").mkdir(parents=True)
    (folder / "a.jpg").mkdir()
    for name in ("a.jpg/a.png", "names/a.png/in.png", "names/a.jpg", *(f"names/{name}" for name in NAMES)):
        shutil.copy(folder / "photo.png", folder / name)
    os.mkfifo(folder / "pipe.pt")
    for name, target in zip(UNREADABLE, ("loop.png", "../pipe.pt", "/dev/zero", "../text.txt"), strict=True):
        (folder / "names" / name).symlink_to(target)
    (folder / "dangling").symlink_to("nowhere/at/all")
    values = np.full((9, 9), math.nan, np.float32)
    Image.fromarray(values).save(folder / "float.tif")


def hostile_archives(folder: Path) -> None:
    """Batches that would run code, entries with absurd sizes, links out of the archive, and a bomb."""
    (folder / "batches").mkdir()
    (folder / "batches" / "test_batch").write_bytes(pickle.dumps({b"data": print}))
    os.mkfifo(folder / "batches" / "data_batch_1")
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2**33
    (folder / "long.tgz").write_bytes(gzip.compress(name.tobuf() + bytes(2**20)))
    (folder / "bomb.tgz").write_bytes(gzip.compress(bytes(2**22)) * 300)
    member = tarfile.TarInfo("cat_1.png")
    member.size = 2**30
    (folder / "short.tar").write_bytes(member.tobuf() + bytes(1000))
    with tarfile.open(folder / "links.tar", "w") as opened:
        for each in ("test_batch", "test_batch.png", "cat_1.png", "cat_1_mask.png"):
            link = tarfile.TarInfo(f"../{each}")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            opened.addfile(link)


def planted(folder: Path) -> None:
    """A folder for results with files that are none."""
    (folder / "thumbnails").mkdir(parents=True)
    (folder / "photo.json").write_text("[" * 100_000)
    target = {"name": "<script>alert(1)</script>", "confidence": "high"}
    record = {"picture": "x.png", "settings": 3, "target": target}
    (folder / "x.json").write_text(json.dumps(record))
    (folder / "y.json").write_text(json.dumps([record]))
    os.mkfifo(folder / "z.json")
    (folder / "grey.json").symlink_to("/dev/zero")
    (folder / ".photo.png.99999999999999999999.part").touch()


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def commands(folder: Path, seed: int) -> Callable[[int], Outcome]:
    from rectgrad import cli

    entry = cli.app
    home = folder / "home"
    home.mkdir()
    os.environ["RECTGRAD_CACHE"] = str(folder / "cache")
    furnish(home)
    before = contents(folder)

    def case(number: int) -> Outcome:
        words = command_line(random.Random(f"{seed} commands {number}"))
        os.chdir(home)
        cli.app = entry  # importing the module of the command `app` replaces it
        status, stderr = run(words)
        out = (home / words[_last(words, "--out") + 1]).absolute() if "--out" in words[:-1] else home / "none"
        wrong = judged(status, stderr, changed(folder, before, out))
        return Outcome(f"{words[0]} {status}", wrong, f"rectgrad {shlex.join(words)}\n{stderr}")

    return case


def _last(words: list[str], word: str) -> int:
    return len(words) - 1 - words[::-1].index(word)


def run(words: list[str]) -> tuple[Any, str]:
    """Exit status and stderr of a command, as a shell would see them."""
    from rectgrad import cli

    with tempfile.TemporaryFile() as err, open(os.devnull, "wb") as out:
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status: Any = None
        try:
            sys.argv = ["rectgrad", *words]
            cli.main()
        except SystemExit as stopped:
            status = stopped.code
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(UnicodeError, OSError):
                sys.stdout.flush()
            sys.stderr.flush()
            for own, fd in zip(kept, (1, 2), strict=True):
                os.dup2(own, fd)
                os.close(own)
        err.seek(0)
        return status, err.read().decode(errors="backslashreplace")


def changed(folder: Path, before: dict[Path, bytes | None], out: Path) -> list[str]:
    """The files that a command must not have written; all changes are undone."""
    wrong, now = [], contents(folder)
    for path in sorted(now, reverse=True):  # the contents of a folder come before the folder
        if path not in before:
            results = Path(os.path.normpath(out))
            inside = results == path or results in path.parents or path in results.parents
            if not inside or path.name.endswith(".part"):
                wrong.append(f"made {path.relative_to(folder)}")
            path.rmdir() if path.is_dir() else path.unlink()
    for path, content in before.items():
        if "planted" not in path.parts and now.get(path, b"") != content:
            wrong.append(f"changed {path.relative_to(folder)}")
            path.mkdir(exist_ok=True) if content is None else path.write_bytes(content)
    if out.name == "planted":
        shutil.rmtree(folder / "home" / "planted")
        planted(folder / "home" / "planted")
    return wrong


def judged(status: Any, stderr: str, written: list[str]) -> str | None:
    lines = stderr.splitlines()
    if status not in (0, 1, 2):
        return f"status {status}: {lines[-1] if lines else 'no message'}"
    if "Traceback" in stderr:
        return "a traceback"
    if status == 2 and (len(lines) != 1 or not stderr.startswith("rectgrad: ")):
        return f"status 2 with {len(lines)} lines: {lines[:1]}"
    if status == 2 and PYTHONS.search(stderr):
        return f"an internal message of Python: {stderr.strip()}"
    return "; ".join(written) or None


# Messages of Python that reveal a bug even if they are printed like an error message for the user.
PYTHONS = re.compile(
    r"values to unpack|object is not|object has no|NoneType|positional argument|out of range$|"
    r"division by zero|not subscriptable|surrogates not allowed"
)


# --- the child and its parent ------------------------------------------------------------------------------

KINDS = {"images": images, "files": others, "commands": commands}


def child(kind: str, seed: int, first: int, answers: Any) -> None:
    """Runs cases from `first` on until it is killed, and sends each outcome."""
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # hides messages of the decoders
    with tempfile.TemporaryDirectory() as folder:
        case = KINDS[kind](Path(folder).resolve(), seed)
        answers.send("ready")
        for number in itertools.count(first):
            started = time.perf_counter()
            outcome = case(number)
            answers.send((number, time.perf_counter() - started, outcome))


class Children:
    """Runs one child at a time; a new child continues where the last one ended."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.following, self.restarts = kind, seed, 0, -1
        self.context = multiprocessing.get_context("spawn")

    def start(self) -> None:
        self.answers, theirs = self.context.Pipe(duplex=False)
        arguments = self.kind, self.seed, self.following, theirs
        self.process = self.context.Process(target=child, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.restarts += 1
        if not self.answers.poll(120) or self.answers.recv() != "ready":
            raise RuntimeError(f"the child process for {self.kind} does not start")

    def answer(self) -> tuple[int, float, Outcome]:
        """The number, duration and outcome of the next case. Starts a new child if it crashes or hangs."""
        started, number = time.perf_counter(), self.following
        self.following += 1
        with contextlib.suppress(EOFError):
            if self.answers.poll(HANGS):
                return self.answers.recv()
        self.process.join(0.1)
        ended = self.process.exitcode
        self.stop()
        self.start()
        what = f"no response in {HANGS} s" if ended is None else f"the process exited with {ended}"
        return number, time.perf_counter() - started, Outcome("crashed or hung", what)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def fuzz(kind: str, seed: int, seconds: float) -> dict[str, Any]:
    """Runs cases for this many seconds. Returns counts, the slowest case and the faults."""
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    children, slowest = Children(kind, seed), (0.0, 0)
    children.start()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        number, spent, outcome = children.answer()
        counts[outcome.kind] += 1
        slowest = max(slowest, (spent, number))
        fault = outcome.fault or (f"took {spent:.1f} s" if spent > SLOW[kind] else None)
        if fault:
            ends_of = [outcome.told.strip().splitlines()[at] for at in (0, -1) if outcome.told.strip()]
            told = "\n".join(dict.fromkeys(ends_of))  # first and last line; --case prints everything
            faults.append({"case": f"{kind}:{number}", "seed": seed, "fault": fault, "told": told})
    children.stop()
    return {
        "cases": counts.total(),
        "counts": dict(sorted(counts.items())),
        "slowest": {"case": f"{kind}:{slowest[1]}", "seconds": slowest[0]},
        "restarts": children.restarts,
        "faults": len(faults),
        "first_faults": faults[:50],
    }


def again(case: str, seed: int) -> None:
    """Repeats one case in this process with full output."""
    kind, _, number = case.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        outcome = KINDS[kind](Path(folder).resolve(), seed)(int(number))
        print(outcome.kind, outcome.fault or "", outcome.told, sep="\n")
        os.chdir("/")
    sys.exit(1 if outcome.fault else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="total time; each kind gets a third")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/bench/fuzz.json"))
    parser.add_argument("--case", help="KIND:NUMBER of a case to repeat")
    given = parser.parse_args()
    if given.case:
        again(given.case, given.seed)
    from rectgrad.bench.environment import commit, environment
    from rectgrad.photos import files

    record: dict[str, Any] = {"environment": environment("cpu"), "commit": commit()}
    record |= {"seed": given.seed, "seconds": given.seconds}
    for kind in KINDS:
        record[kind] = fuzz(kind, given.seed, given.seconds / len(KINDS))
        print(f"{kind}: {record[kind]['cases']} cases, {record[kind]['counts']}", flush=True)
        for fault in record[kind]["first_faults"]:
            print(f"  {fault['fault'].strip()}\n    {fault['told'].strip()[:300]}")
            print(f"    repeat: python benchmarks/fuzz.py --seed {fault['seed']} --case {fault['case']}")
    files.save_json(record, given.out)
    sys.exit(1 if any(record[kind]["faults"] for kind in KINDS) else 0)


if __name__ == "__main__":
    main()
