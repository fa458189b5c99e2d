"""Archives: whatever is in them, the result is the files that are wanted, or a message."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from rectgrad.data import DataUnavailableError, archive, cifar10, masks

PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def tar(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def read(path: Path, largest: int = 100) -> dict[str, bytes]:
    return dict(archive.members(path, lambda name: name.startswith("a"), largest))


@pytest.mark.parametrize("kind", [None, *PACKED])
def test_the_files_that_are_wanted(kind, tmp_path):
    content = tar({"x/a1": b"one", "a2": b"two", "a3": bytes(101), "b": b"four"})
    (tmp_path / "x").write_bytes(content if kind is None else PACKED[kind](content))
    assert read(tmp_path / "x") == {"a1": b"one", "a2": b"two"}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("at", [4, 40, 300, 700])
def test_damage_anywhere_is_a_message(kind, at, tmp_path):
    content = bytearray(PACKED[kind](tar({"a": os.urandom(600)})))
    content[at : at + 8] = b"\xff" * 8
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataUnavailableError, match="is damaged or truncated"):
        read(tmp_path / "x", 600)


@pytest.mark.parametrize("kind", PACKED)
def test_a_bomb_is_not_unpacked(kind, tmp_path, monkeypatch):
    """Neither a large file nor an entry whose long name tarfile would hold in memory."""
    monkeypatch.setattr(archive, "LARGEST", 2**21)
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2**30
    for content in (tar({"b": bytes(2**23)}), name.tobuf() + bytes(2**23)):
        (tmp_path / "x").write_bytes(PACKED[kind](content))
        with pytest.raises(DataUnavailableError, match="it has more than 2 MB"):
            read(tmp_path / "x")


def test_an_archive_that_is_compressed_twice_is_refused(tmp_path):
    """Else the second decompression would have no limit."""
    (tmp_path / "x").write_bytes(gzip.compress(bz2.compress(tar({"a": b"one"}))))
    with pytest.raises(DataUnavailableError, match="is damaged or truncated"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "labels",
    [b"{", b"[" * 100_000, b"\xff", b"[[1], [2, 3]]", b"{}", b"[1e400]", b'["x"]', b"[1%s]" % (b"0" * 30)],
)
def test_labels_that_are_none(labels):
    with pytest.raises(DataUnavailableError, match=r"test_lables\.json is not a list of classes"):
        cifar10._labels(labels, "test_lables.json")
    assert cifar10._labels(json.dumps([3, 1]).encode(), "").tolist() == [3, 1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_a_pipe_in_a_folder_is_not_read(tmp_path):
    (tmp_path / "test_batch").write_bytes(b"x")
    os.mkfifo(tmp_path / "data_batch_1")
    with pytest.raises(DataUnavailableError, match="data_batch_1 is missing"):
        cifar10.install(str(tmp_path))


def test_pictures_of_masks_that_are_none(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "TIFF")
    broken = bytearray(stream.getvalue())
    broken[4:8] = b"\xff" * 4
    for content in (bytes(broken), b"GIF89a", b""):
        (tmp_path / "x").write_bytes(tar({"cat_1.png": content}))
        with pytest.raises(DataUnavailableError, match=r"cat_1\.png"):
            masks.read(tmp_path / "x")
    (tmp_path / "x").write_bytes(tar({f"cat_{'9' * 5000}.png": b"x"}))
    with pytest.raises(DataUnavailableError, match=r"damaged|not an image|no images"):
        masks.read(tmp_path / "x")
