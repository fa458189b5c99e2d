"""Untrusted files: no code in them runs, nothing is written outside its folder, memory is not exhausted.

Elsewhere: pickles as weights by torch.save and by pickle, damaged and other files of weights, in
models/test_weights.py; pickles in a folder of CIFAR-10, archives of something else, in data/test_data.py;
real pictures above the pixel limit in photos/test_photos.py; uploads and texts in the explorer in
app/test_app.py.
"""

import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from rectgrad import cli, photos
from rectgrad.data import DataUnavailableError, cifar10, masks
from rectgrad.models import ModelUnavailableError, load
from rectgrad.models.cifar import CifarCNN


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder of its own to work in, with the cache beside it."""
    monkeypatch.setenv("RECTGRAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def run(monkeypatch, capsys):
    """run("explain", ...) -> (status, stderr)."""

    def call(*arguments: Any) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["rectgrad", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, capsys.readouterr().err

    return call


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def photo(path: Path) -> Path:
    Image.radial_gradient("L").convert("RGB").resize((40, 32)).save(path)
    return path


# --- weights -----------------------------------------------------------------------------------------------


class Calls:
    """A pickle that calls a function when loaded."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


def checkpoint(name: str) -> Any:
    """Where a tensor should be, as an argument of a class that is allowed."""
    return {"state_dict": {"conv1.weight": Calls(torch.nn.Parameter, Calls(os.mkdir, name))}}


TRAPS: dict[str, Callable[[str], Any]] = {
    "mkdir": lambda name: Calls(os.mkdir, name),
    "system": lambda name: Calls(os.system, f"mkdir {name}"),
    "eval": lambda name: Calls(eval, f"__import__('os').mkdir('{name}')"),
    "exec": lambda name: Calls(exec, f"import os; os.mkdir('{name}')"),
    "a pickle in a pickle": lambda name: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, name))),
    "inside a checkpoint": checkpoint,
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's, before it refuses
def test_no_way_of_writing_a_pickle_runs(trap: str, protocol: int) -> None:
    content = pickle.dumps(TRAPS[trap]("sprung"), protocol=protocol)
    Path("bare.pt").write_bytes(content)
    whole = Path("archive.pt")
    torch.save(CifarCNN().state_dict(), whole)
    with zipfile.ZipFile(whole) as opened, zipfile.ZipFile("trap.pth", "w") as written:
        for name in opened.namelist():
            written.writestr(name, content if name.endswith("data.pkl") else opened.read(name))
    for path in ("bare.pt", "trap.pth"):
        with pytest.raises(ModelUnavailableError, match="could run code") as error:
            load("cifar10_cnn", weights=path)
        assert "\n" not in str(error.value)
    assert not Path("sprung").exists()


def test_the_traps_are_traps() -> None:
    for name, trap in TRAPS.items():
        with contextlib.suppress(Exception):  # some fail once the harm is done
            pickle.loads(pickle.dumps(trap("sprung")))
        assert Path("sprung").exists(), name
        Path("sprung").rmdir()


def test_the_name_of_a_file_does_not_make_its_pickle_run() -> None:
    """As text (protocol 0), and called .safetensors, .bin or nothing."""
    for name in ("w.pt", "w.safetensors", "w.bin", "w"):
        for protocol in (0, 2):
            Path(name).write_bytes(pickle.dumps(Calls(os.mkdir, "sprung"), protocol=protocol))
            with pytest.raises(ModelUnavailableError):
                load("cifar10_cnn", weights=name)
    assert not Path("sprung").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_archive_is_no_file_of_weights() -> None:
    torch.jit.save(torch.jit.script(CifarCNN()), "scripted.pt")
    with pytest.raises(ModelUnavailableError, match=r"scripted\.pt"):
        load("cifar10_cnn", weights="scripted.pt")


def test_the_command_line_refuses_in_one_line(run) -> None:
    torch.save(Calls(os.mkdir, "sprung"), "trap.pt")
    status, said = run("explain", photo(Path("a.png")), "--model", "cifar10_cnn", "--weights", "trap.pt")
    assert (status, len(said.splitlines())) == (2, 1)
    assert "could run code" in said
    assert everything(Path()) == {"a.png", "trap.pt"}


def header(entries: Any, length: int | None = None, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: tuple = (2,), offsets: tuple = (0, 8)) -> dict:
    return {"conv1.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


EIGHT = bytes(8)
LIES = {
    "a header of 2**63 bytes": header({}, 2**63),
    "a header longer than the file": header({}, 10**6),
    "no JSON": header(b"\xff" * 64),
    "a list": header([1, 2]),
    "entries that are numbers": header({"conv1.weight": 3}),
    "data beyond the end": header(entry(offsets=(0, 2**40)), data=EIGHT),
    "a terabyte that is not there": header(entry(shape=(2**38,), offsets=(0, 2**40)), data=EIGHT),
    "a shape that overflows": header(entry(shape=(2**33, 2**33)), data=EIGHT),
    "a negative size": header(entry(shape=(-2,)), data=EIGHT),
    "offsets the other way round": header(entry(offsets=(8, 0)), data=EIGHT),
    "an unknown type": header(entry("Q7"), data=EIGHT),
    "deep nesting": header(b"[" * 100_000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_header_is_a_one_line_error(lie: str) -> None:
    Path("w.safetensors").write_bytes(LIES[lie])
    with pytest.raises(ModelUnavailableError, match=r"w\.safetensors.*damaged") as error:
        load("cifar10_cnn", weights="w.safetensors")
    assert "\n" not in str(error.value)


def test_an_honest_header_is_read() -> None:
    """The control: the files above are rejected only because of their false header."""
    Path("w.safetensors").write_bytes(header(entry(), data=EIGHT))
    assert list(safetensors.torch.load_file("w.safetensors")) == ["conv1.weight"]
    with pytest.raises(ValueError, match=r"conv1\.weight is 2 for"):
        load("cifar10_cnn", weights="w.safetensors")


# --- archives ----------------------------------------------------------------------------------------------


def png(mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (32, 32)).save(stream, "PNG")
    return stream.getvalue()


def archive(members: dict[str, tuple[bytes, str | bytes]]) -> str:
    """name: (type, content of a file or target of a link)."""
    with tarfile.open("archive.tar", "w") as opened:
        for name, (kind, content) in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o4777
            if isinstance(content, str):
                member.linkname = content
            else:
                member.size = len(content)
            opened.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return "archive.tar"


def sly(content: bytes, names: list[str], outside: Path) -> dict[str, tuple[bytes, str | bytes]]:
    """Files that would leave their folder, and links and devices in the way of what is looked for."""
    absolute = str(outside.absolute())
    members: dict[str, tuple[bytes, str | bytes]] = {"x": (tarfile.SYMTYPE, absolute)}
    for name in names:
        for folder in (absolute, "../../outside", "x"):
            members[f"{folder}/{name}"] = tarfile.REGTYPE, content
        members[f"links/{name}"] = tarfile.SYMTYPE, str(outside / "secret")
        members[f"hard/{name}"] = tarfile.LNKTYPE, "../../outside/secret"
        members[f"fifo/{name}"] = tarfile.FIFOTYPE, b""
        members[f"device/{name}"] = tarfile.CHRTYPE, b""
    return members


@pytest.fixture
def outside(tmp_path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(pickle.dumps({b"data": Calls(os.mkdir, "sprung")}))
    return folder


def test_an_archive_of_cifar_writes_nothing(tmp_path, outside) -> None:
    batches = ["test_batch", *(f"data_batch_{i}" for i in range(1, 6))]
    source = archive(sly(pickle.dumps({b"data": Calls(os.mkdir, "sprung")}), batches, outside))
    before = everything(tmp_path)
    with pytest.raises(DataUnavailableError, match="is not the official"):
        cifar10.install(source)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_not_followed(outside, kind) -> None:
    """A link that is called test_batch would have a file of this machine read as if it were the archive's."""
    source = archive({"test_batch": (kind, str(outside / "secret"))})
    with pytest.raises(DataUnavailableError, match="is not CIFAR-10"):
        cifar10.install(source)
    source = archive({name: (kind, str(outside / "secret")) for name in ("cat_1.png", "cat_1_mask.png")})
    with pytest.raises(DataUnavailableError, match="it has no images CLASS_NUMBER"):
        masks.read(Path(source))


def test_an_archive_of_masks_writes_nothing(tmp_path, outside) -> None:
    """Its images are read, whatever folder their names claim."""
    members = sly(png(), ["cat_1.png"], outside) | {"../cat_1_mask.png": (tarfile.REGTYPE, png("L"))}
    source = archive(members)
    before = everything(tmp_path)
    assert [(pair.label, pair.number) for pair in masks.read(Path(source))] == [(3, 1)]
    assert everything(tmp_path) == before


# --- pictures ----------------------------------------------------------------------------------------------

SIDE = 60_000  # 3.6 gigapixels, in a few hundred bytes


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def claimed_png(side: int) -> bytes:
    start = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def saved(kind: str) -> bytearray:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, kind)
    return bytearray(stream.getvalue())


def patched(kind: str, at: int, form: str) -> bytes:
    """A small picture of which the header claims SIDE x SIDE."""
    content = saved(kind)
    struct.pack_into(form, content, at, SIDE, SIDE)
    return bytes(content)


def claimed_tiff() -> bytes:
    tags = {256: SIDE, 257: SIDE, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: SIDE, 279: 100}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(104)


def claimed_ico() -> bytes:
    inner = claimed_png(SIDE)
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(inner), 22) + inner


BOMBS = {
    "png": lambda: claimed_png(SIDE),
    "jpg": lambda: patched("JPEG", saved("JPEG").index(b"\xff\xc0") + 5, ">HH"),
    "gif": lambda: patched("GIF", 6, "<HH"),
    "bmp": lambda: patched("BMP", 18, "<ii"),
    "tiff": claimed_tiff,
    "ppm": lambda: b"P6 %d %d 255\n" % (SIDE, SIDE) + bytes(99),
    "ico": claimed_ico,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_few_bytes_that_claim_gigapixels_are_refused(kind: str) -> None:
    path = Path(f"bomb.{kind}")
    path.write_bytes(BOMBS[kind]())
    with pytest.raises(photos.UnreadableImageError, match=rf"bomb\.{kind}: .*exceeds? the limit of 150 meg"):
        photos.read(path)


def test_a_bomb_among_photos_is_listed_and_the_others_are_done(run) -> None:
    Path("photos").mkdir()
    photo(Path("photos/good.png"))
    Path("photos/bomb.png").write_bytes(BOMBS["png"]())
    status, said = run("explain", "photos", "--model", "cifar10_cnn", "--q", "80", "--out", "out")
    assert status == 1
    assert "bomb.png: 60000 x 60000 pixels exceed the limit of 150 megapixels" in said
    assert Path("out/good.png").exists()


def test_a_bomb_in_an_archive_of_masks_is_a_one_line_error() -> None:
    members = {name: (tarfile.REGTYPE, claimed_png(SIDE)) for name in ("cat_1.png", "cat_1_mask.png")}
    with pytest.raises(DataUnavailableError, match=r"cat_1\.png"):
        masks.read(Path(archive(members)))


# --- code beside photos ------------------------------------------------------------------------------------

MODEL = """
import pathlib
pathlib.Path("sprung").mkdir()
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 2))
"""
NAMES = (
    "model cifar10_cnn cifar10 efficientnet_lite0 photos factory conftest sitecustomize timm torch".split()
)


@pytest.fixture
def mined() -> list[str]:
    """A folder of photos with Python files under many importable names. Returns arguments for a command."""
    for name in NAMES:
        Path(f"{name}.py").write_text(MODEL)
    for name in ("numpy", "rectgrad", "models"):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text(MODEL)
    photo(Path("a.png"))
    return ["--q", "80", "--device", "cpu", "--out", "out"]


@pytest.mark.parametrize("command", ["explain", "layers"])
def test_code_beside_photos_is_not_run(tmp_path, mined, command: str) -> None:
    """In a fresh process, started as the installed command is: by a script in another folder."""
    script = tmp_path / "installed.py"
    script.write_text("from rectgrad.cli import main\nmain()\n")
    line = [sys.executable, script, command, "a.png", "--model", "cifar10_cnn", *mined]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0
    assert "out/a.png" in done.stdout.splitlines()
    assert not Path("sprung").exists()


@pytest.mark.parametrize("name", ["model", "model.py", "model.make", "models", "./model"])
def test_a_name_that_is_no_factory_runs_nothing(run, mined, name: str) -> None:
    status, said = run("explain", "a.png", "--model", name, *mined)
    assert (status, len(said.splitlines())) == (2, 1)
    assert not Path("sprung").exists()


def test_a_factory_that_is_named_runs(run, mined) -> None:
    """The control: if the code ran, the test would notice."""
    status, _ = run("explain", "a.png", "--model", "model.py:make", *mined)
    assert status == 0
    assert Path("sprung").exists()


def test_the_class_names_of_a_stranger_are_text(run, mined) -> None:
    names = [f"{{__import__('os').mkdir('sprung')}} {i}" for i in range(10)]
    Path("names.txt").write_text("\n".join(names))
    status, _ = run("explain", "a.png", "--model", "cifar10_cnn", "--labels", "names.txt", *mined)
    assert status == 0
    assert json.loads(Path("out/a.json").read_text())["target"]["name"].startswith("{__import__")
    assert not Path("sprung").exists()
