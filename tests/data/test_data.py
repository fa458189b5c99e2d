"""Datasets: every source is read, verified and cached, and failures produce clear messages."""

import functools
import hashlib
import http.server
import io
import json
import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectgrad.data import (
    Dataset,
    DataUnavailableError,
    Images,
    cifar10,
    digest_of,
    fetch,
    masks,
    scaled,
    shapes,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RECTGRAD_CACHE", str(tmp_path / "cache"))


# --- CIFAR-10 ----------------------------------------------------------------------------------------------


@functools.cache
def made_up() -> dict[str, Images]:
    """As many images of noise as CIFAR-10 has."""
    rng = np.random.default_rng(0)
    return {
        part: Images(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n))
        for part, n in cifar10.SIZES.items()
    }


@pytest.fixture
def accepted(monkeypatch):
    """Makes the checks accept the generated images as CIFAR-10."""
    digests = {part: digest_of(images) for part, images in made_up().items()}
    monkeypatch.setattr(cifar10, "DIGESTS", digests)
    official = {name: hashlib.md5(content).hexdigest() for name, content in official_files().items()}
    monkeypatch.setattr(cifar10, "BATCH_DIGESTS", official)


def batches() -> dict[str, Images]:
    train, test = made_up()["train"], made_up()["test"]
    cut = {f"data_batch_{i + 1}": train.rows(slice(10_000 * i, 10_000 * (i + 1))) for i in range(5)}
    return {**cut, "test_batch": test}


def string(content: bytes) -> bytes:
    """A string as Python 2 pickles it."""
    size = len(content)
    return (b"U" + bytes([size]) if size < 256 else b"T" + size.to_bytes(4, "little")) + content


ARRAY = (  # an array of 10,000 x 3072 bytes, up to its content
    b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01M\x10'"
    b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    b"K\x00tb\x89"
)


def official_batch(images: Images) -> bytes:
    """As the official archive has them: a pickle that Python 2 wrote."""
    data = images.pixels.transpose(0, 3, 1, 2).tobytes()
    labels = b"".join(b"K" + bytes([label]) for label in images.labels)
    head = (
        b"\x80\x02}q\x01(" + string(b"batch_label") + b"q\x02" + string(b"training batch 1 of 5") + b"q\x03"
    )
    names = string(b"filenames") + b"q\x0c]q\r(" + string(b"tabby_s_000001.png") + b"q\x0ee"
    listed = string(b"labels") + b"q\x04]q\x05(" + labels + b"e"
    return head + listed + string(b"data") + b"q\x06" + ARRAY + string(data) + b"tb" + names + b"u."


@functools.cache
def official_files() -> dict[str, bytes]:
    return {name: official_batch(images) for name, images in batches().items()}


def test_the_official_form_is_a_pickle():
    """What the tests write can be loaded by pickle itself, with the same content."""
    images = batches()["test_batch"]
    found = pickle.loads(official_batch(images), encoding="bytes")
    assert found[b"labels"] == images.labels.tolist()
    assert (found[b"data"] == images.pixels.transpose(0, 3, 1, 2).reshape(-1, 3072)).all()


def package_files() -> dict[str, bytes]:
    found = {}
    for name, images in batches().items():
        stream = io.BytesIO()
        Image.fromarray(images.pixels.reshape(10_000, 1024, 3)).save(stream, "PNG", compress_level=0)
        found[f"{name}.png"] = stream.getvalue()
    for part, images in made_up().items():
        found[f"{part}_lables.json"] = json.dumps(images.labels.tolist()).encode()
    return found


FORMS = {"official": (official_files, "cifar-10-batches-py"), "package": (package_files, "package")}


def written(form: str, folder: Path, packed: bool, files: dict[str, bytes] | None = None) -> Path:
    make, name = FORMS[form]
    for file, content in (files or make()).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_bytes(content)
    if not packed:
        return folder
    archive = folder / "archive.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=0) as opened:
        opened.add(folder / name, name)
    return archive


@pytest.mark.parametrize(("form", "packed"), [("official", True), ("package", False)])
def test_every_form_gives_the_same(form, packed, tmp_path, accepted):
    """Each form once, packed or not: `test_a_missing_batch` finds the files of all four."""
    place = cifar10.install(str(written(form, tmp_path / "given", packed)))
    assert place == cifar10.place()
    found = cifar10.load()
    for part in cifar10.SIZES:
        assert (getattr(found, part).pixels == made_up()[part].pixels).all()
        assert (getattr(found, part).labels == made_up()[part].labels).all()
    assert found.classes[3] == "cat"


def test_other_pictures_are_refused(tmp_path, monkeypatch):
    """Also where only the test images differ: both digests are checked before anything is kept."""
    drawn = shapes.generate(20, 0)
    monkeypatch.setattr(cifar10, "_package", lambda read: {"train": drawn, "test": drawn})
    folder = written("package", tmp_path, packed=False, files={"test_batch.png": b""})
    for digests in ({}, {"train": digest_of(drawn)}):
        monkeypatch.setattr(cifar10, "DIGESTS", cifar10.DIGESTS | digests)
        with pytest.raises(DataUnavailableError, match="not those of CIFAR-10"):
            cifar10.install(str(folder))
        assert not cifar10.place().exists()


def test_nothing_there_yet():
    with pytest.raises(DataUnavailableError, match="rectgrad data cifar10"):
        cifar10.load()


def test_a_wrong_folder(tmp_path):
    with pytest.raises(
        DataUnavailableError, match=r"does not contain CIFAR-10: no test_batch or test_batch\.png"
    ):
        cifar10.install(str(tmp_path))
    with pytest.raises(DataUnavailableError, match="no such file or folder"):
        cifar10.install(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("packed", [True, False], ids=["an archive", "a folder"])
@pytest.mark.parametrize("form", FORMS)
def test_a_missing_batch(form, packed, tmp_path):
    ending = {"official": "", "package": ".png"}[form]
    given = written(form, tmp_path, packed, {f"test_batch{ending}": b"not read"})
    with pytest.raises(DataUnavailableError, match=rf"data_batch_1{ending} is missing"):
        cifar10.install(str(given))


def test_an_archive_cut_short(tmp_path):
    content = np.random.default_rng(0).bytes(100_000)
    archive = written("official", tmp_path, packed=True, files=dict.fromkeys(cifar10.BATCH_DIGESTS, content))
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(DataUnavailableError, match="damaged"):
        cifar10.install(str(archive))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def object_array() -> bytes:
    """An array of objects from raw bytes: unpickled, numpy would follow them as pointers."""
    return official_batch(batches()["test_batch"]).replace(b"U\x02u1", b"U\x02O8")


@pytest.mark.parametrize(
    "content", [pickle.dumps({b"data": Evil()}), pickle.dumps({b"data": Evil()}, protocol=2), b"\x80\x02}."]
)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "with the right md5"])
def test_a_pickle_that_would_run_code_does_not(content, known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in cifar10.BATCH_DIGESTS:
        (tmp_path / name).write_bytes(content)
    if known:
        digest = hashlib.md5(content).hexdigest()
        monkeypatch.setattr(cifar10, "BATCH_DIGESTS", dict.fromkeys(cifar10.BATCH_DIGESTS, digest))
    words = "is not a CIFAR-10 batch" if known else "its md5 differs"
    with pytest.raises(DataUnavailableError, match=words):
        cifar10.install(str(tmp_path))
    assert not (tmp_path / "evil").exists()


def test_an_array_of_objects_is_read_as_bytes():
    content = object_array()
    data, _ = cifar10._batch(content, "test_batch")
    assert data.dtype == np.uint8
    assert data.shape == (10_000, 3072)


def test_nothing_is_parsed_before_its_digest_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "_batch", lambda *_: pytest.fail("parsed"))
    folder = written("official", tmp_path, False, dict.fromkeys(cifar10.BATCH_DIGESTS, b"other content"))
    with pytest.raises(DataUnavailableError, match="data_batch_1 is not the official"):
        cifar10.install(str(folder))


def test_pixels_are_scaled_as_the_paper_does():
    x = scaled(np.array([[[[0, 127, 255]]]], dtype=np.uint8))
    assert x.shape == (1, 3, 1, 1)
    assert x.flatten().tolist() == pytest.approx([-1, 127 / 127.5 - 1, 1])


# --- downloads ---------------------------------------------------------------------------------------------


# What a server can answer that is no HTTP, or is cut short.
ANSWERS = {
    "/nonsense": b"nonsense\r\n\r\n",
    "/length": b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\nx",
    "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99\r\nx",
    "/headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
}


class Server(http.server.SimpleHTTPRequestHandler):
    content = bytes(range(256)) * 20_000
    asked: list = []  # noqa: RUF012 - of the test that runs

    def do_GET(self):
        if self.path in ANSWERS:
            self.wfile.write(ANSWERS[self.path])
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.asked.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        stop = start + 2_000_000 if self.path == "/short" else None
        self.wfile.write(self.content[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Server.asked.clear()
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()
    thread.join()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_an_interrupted_download_resumes(server, tmp_path):
    path = tmp_path / "file"
    with pytest.raises(DataUnavailableError, match="the connection was lost after 2000000"):
        fetch.download(f"{server}/short", path)
    assert not path.exists()
    fetch.download(f"{server}/whole", path, digest(Server.content))
    assert path.read_bytes() == Server.content
    assert Server.asked == [0, 2_000_000]


def test_a_damaged_download_is_not_kept(server, tmp_path):
    with pytest.raises(DataUnavailableError, match="is damaged"):
        fetch.download(f"{server}/whole", tmp_path / "file", digest(b"something else"))
    assert list(tmp_path.glob("file*")) == []


@pytest.mark.parametrize("path", ANSWERS)
def test_a_server_that_answers_nonsense(server, tmp_path, path):
    with pytest.raises(DataUnavailableError, match="could not be downloaded") as error:
        fetch.download(f"{server}{path}", tmp_path / "file")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "file").exists()


def test_no_network(tmp_path):
    with pytest.raises(DataUnavailableError, match="on a machine with network access"):
        fetch.download("http://127.0.0.1:9/file", tmp_path / "file")


# --- masks -------------------------------------------------------------------------------------------------


def archived(pairs: dict[str, Image.Image], path: Path) -> Path:
    with tarfile.open(path, "w") as opened:
        for name, picture in pairs.items():
            stream = io.BytesIO()
            picture.save(stream, "PNG")
            member = tarfile.TarInfo(f"CIFAR10_mask/{name}")
            member.size = stream.tell()
            stream.seek(0)
            opened.addfile(member, stream)
    return path


def large(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels).resize((128, 128), Image.Resampling.LANCZOS)


@pytest.fixture
def masked(tmp_path, monkeypatch):
    """An archive like the authors', and the images it was made of."""
    train = shapes.generate(100, 5)
    monkeypatch.setattr(cifar10, "load", lambda: Dataset("cifar10", cifar10.CLASSES, train, train))
    rows = [7, 17, 93, 22, 7]  # in the order of classes and numbers
    names = ["horse_1", "horse_2", "cat_2", "bird_9", "horse_10"]
    pairs = {}
    for row, name in zip(rows, names, strict=True):
        pairs[f"{name}.png"] = large(train.pixels[row][..., ::-1])
        pairs[f"{name}_mask.png"] = large(np.where(train.masks[row], 0, 255).astype(np.uint8))
    return archived(pairs, tmp_path / "CIFAR10_mask.tar"), train


def test_masks_are_matched_to_the_rows(masked):
    archive, train = masked
    masks.install(str(archive))
    found = masks.load()
    assert found.index.tolist() == [22, 93, 7, 17, 7]
    assert found.label.tolist() == [2, 3, 7, 7, 7]
    agreement = (found.mask == train.masks[found.index]).mean((1, 2))
    assert agreement.min() > 0.95  # the border of a resized mask may differ


def test_a_picture_that_is_not_in_cifar(masked, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    pairs = {"cat_1.png": Image.fromarray(noise), "cat_1_mask.png": Image.fromarray(noise[..., 0])}
    with pytest.raises(DataUnavailableError, match="cat_1 does not match any image"):
        masks.install(str(archived(pairs, tmp_path / "other.tar")))


def test_an_archive_of_something_else(masked, tmp_path):
    picture = Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8))
    with pytest.raises(DataUnavailableError, match="not the authors' archive"):
        masks.install(str(archived({"holiday.png": picture}, tmp_path / "other.tar")))
    with pytest.raises(DataUnavailableError, match=r"do not match: \[\(3, 1\)\]"):
        masks.install(str(archived({"cat_1.png": picture}, tmp_path / "half.tar")))
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(DataUnavailableError, match="damaged or truncated"):
        masks.install(str(tmp_path / "text.tar"))


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"PK\5\6" + bytes(18), b"\x80\4N."])
def test_damaged_masks_in_the_cache(content, tmp_path, monkeypatch):
    monkeypatch.setenv("RECTGRAD_CACHE", str(tmp_path))
    masks.place().write_bytes(content)
    with pytest.raises(DataUnavailableError, match=r"masks\.npz is damaged; delete it"):
        masks.load()


def test_a_damaged_download_of_masks_is_not_read_again(masked, server, monkeypatch):
    monkeypatch.setattr(masks, "ADDRESS", f"{server}/whole")  # bytes, but no archive
    with pytest.raises(DataUnavailableError, match="damaged or truncated"):
        masks.install()
    assert not list(cifar10.place().parent.glob("*.tar"))


# --- shapes ------------------------------------------------------------------------------------------------


def test_shapes_depend_on_seed_and_number_alone():
    few, more, other = shapes.generate(20, 3), shapes.generate(30, 3), shapes.generate(20, 4)
    assert (few.pixels == more.pixels[:20]).all()
    assert not (few.pixels == other.pixels).all()
    assert few.labels.tolist() == [*range(10), *range(10)]


def test_masks_of_shapes_are_where_the_object_is():
    images = shapes.generate(200, 0)
    share = images.masks.mean((1, 2))
    assert share.min() > 0.04
    assert share.max() < 0.45
    edges = images.masks[:, [0, -1]].any((1, 2)) | images.masks[:, :, [0, -1]].any((1, 2))
    assert edges.mean() < 0.1  # objects are not cut off at the border
    # Inside the object the colour changes little, across its border much.
    inside = images.masks[:, :, 1:] & images.masks[:, :, :-1]
    border = images.masks[:, :, 1:] ^ images.masks[:, :, :-1]
    change = np.abs(np.diff(images.pixels.astype(int), axis=2)).max(-1)
    assert change[border].mean() > 3 * change[inside].mean()
