"""Small files that take a decoder very long, or a lot of memory."""

import contextlib
import io
import re
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator

import PIL
import pytest
from PIL import Image

from rectgrad import photos
from rectgrad.app.work import Stopped, Work
from rectgrad.photos import limits

GREY = Image.radial_gradient("L").convert("RGB")
SKIPS = int(PIL.__version__.partition(".")[0]) >= 13  # Pillow itself skips tags that are larger than the file
pytestmark = pytest.mark.filterwarnings("ignore:Tag data larger than file")
MEMORY = 400 * 2**20


def saved(kind: str, picture: Image.Image = GREY, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def decoded(content: bytes, **options) -> Image.Image:
    return photos.decode(io.BytesIO(content), **options)


def tags(count: int, size: int, own: tuple = ()) -> bytes:
    """TIFF with tags that share their bytes, after those of the picture."""
    end = 8 + 2 + 12 * (len(own) + count) + 4
    entries = [(*each, end if each[0] == 273 else value) for *each, value in own]
    entries += [(1000 + i, 1, size, end) for i in range(count)]
    return (
        b"II*\0"
        + struct.pack("<LH", 8, len(entries))
        + b"".join(struct.pack("<HHLL", *each) for each in entries)
        + bytes(4 + size)
    )


PICTURE = ((256, 3, 1, 16), (257, 3, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 0))


def in_segments(exif: bytes) -> bytes:
    """A JPEG with EXIF data in as many segments as it takes."""
    parts = [exif[i : i + 65_000] for i in range(0, len(exif), 65_000)]
    segments = [b"\xff\xe1" + struct.pack(">H", 8 + len(part)) + b"Exif\0\0" + part for part in parts]
    plain = saved("JPEG")
    return plain[:2] + b"".join(segments) + plain[2:]


def with_text(exif: bytes) -> bytes:
    """A PNG with EXIF data as ImageMagick writes it."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(exif)}\n{exif.hex()}\n", zip=True)
    return saved("PNG", pnginfo=info)


BOMBS = {
    "TIFF": lambda: tags(4000, 2**18, PICTURE),
    "JPEG": lambda: in_segments(tags(4000, 2**18)),
    "PNG": lambda: saved("PNG", exif=b"Exif\0\0" + tags(4000, 2**18)),
    "PNG with text": lambda: with_text(tags(4000, 2**18)),
    "WebP": lambda: saved("WEBP", exif=b"Exif\0\0" + tags(4000, 2**18)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_tags_that_share_their_bytes_do_not_fill_the_memory(kind):
    content = BOMBS[kind]()
    refused = pytest.raises(photos.UnreadableImageError, match=r"too much memory|128 KB of EXIF")
    tracemalloc.start()
    with contextlib.nullcontext() if SKIPS and kind == "TIFF" else refused:
        decoded(content)
    assert tracemalloc.get_traced_memory()[1] < MEMORY
    tracemalloc.stop()


@pytest.mark.skipif("AVIF" not in Image.registered_extensions().values(), reason="Pillow without AVIF")
def test_the_rotation_of_avif_does_not_need_its_exif_data():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(saved("AVIF", GREY.resize((64, 32)), exif=exif)).size == (32, 64)
    bomb = saved("AVIF", exif=b"Exif\0\0" + tags(4000, 2**18))
    tracemalloc.start()
    assert decoded(bomb).size == GREY.size
    assert tracemalloc.get_traced_memory()[1] < MEMORY
    tracemalloc.stop()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_does_not_fit_into_memory_is_named(tmp_path):
    """A small file that claims one long row, within the limit of pixels, which is too long for Pillow."""
    sizes = ((256, 4, 1, 134_000_000), (257, 3, 1, 1), (258, 3, 1, 32), (259, 3, 1, 1), (262, 3, 1, 1))
    content = tags(0, 1, (*sizes, (273, 4, 1, 0), (339, 3, 1, 2)))
    (tmp_path / "row.tif").write_bytes(content)
    said = "row.tif: 134000000 x 1 pixels do not fit into memory"
    with pytest.raises(photos.UnreadableImageError, match=said):
        photos.read(tmp_path / "row.tif")


def test_exif_data_of_a_usual_size_is_read():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a" * 60_000
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        assert decoded(saved(kind, GREY.resize((64, 32)), exif=exif)).size == (32, 64), kind


def test_comments_in_a_picture_of_text_take_no_time():
    comments, started = b"#\n" * 2**20, time.process_time()
    content = b"P3 # a\n2 #b\n1\n255\n" + comments + b"1 2 #\n 3\n4 5 6 #"
    assert list(decoded(content).tobytes()) == [1, 2, 3, 4, 5, 6]
    assert decoded(b"P1\n2 1\n#" + b"a" * 9 + b"\n0 1\n").tobytes() == bytes([255] * 3 + [0] * 3)
    assert time.process_time() - started < 5


def scans(side: int, count: int) -> bytes:
    """A progressive JPEG that repeats a scan of a few bytes."""
    content = saved("JPEG", Image.new("L", (side, side), 90), progressive=True)
    found = re.findall(rb"\xff\xda\x00\x08(?:[^\xff]|\xff\x00)+", content, re.DOTALL)
    return content[:-2] + min(found, key=len) * count + content[-2:]


def comments(count: int) -> bytes:
    """A GIF with many comments, which Pillow joins one by one."""
    content = saved("GIF")
    at = content.index(b",")
    return content[:at] + b"\x21\xfe\x01a\x00" * count + content[at:]


@pytest.mark.parametrize("content", [scans(1000, 20_000), comments(200_000)], ids=["JPEG", "GIF"])
def test_a_file_that_takes_too_long_is_refused(content, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    monkeypatch.setattr(limits, "SECONDS_PER_MEGAPIXEL", 0.2)
    started = time.thread_time()
    with pytest.raises(photos.UnreadableImageError, match="takes too long to decode"):
        decoded(content)
    assert time.thread_time() - started < 3


def test_parts_of_a_picture_that_share_their_bytes(monkeypatch):
    rows = 40_000
    own = ((256, 4, 1, 1), (257, 4, 1, rows), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1))
    own += ((273, 4, rows, 0), (277, 3, 1, 1), (278, 4, 1, 1))
    content = tags(0, 0, own)[:-4] + bytes(4) + struct.pack("<L", 8) * rows
    with pytest.raises(photos.UnreadableImageError, match="too much memory"):
        decoded(content)


def test_where_others_wait_no_format_keeps_all_threads_waiting():
    content = saved("JPEG2000", Image.new("L", (2000, 1001)))
    assert decoded(content).size == (2000, 1001)
    with pytest.raises(photos.UnreadableImageError, match="JPEG2000 of more than 2 megapixels"):
        decoded(content, tick=lambda: None)
    assert decoded(saved("JPEG2000"), tick=lambda: None).size == GREY.size


@pytest.fixture
def work() -> Iterator[Work]:
    found = Work()
    yield found
    found.close()


def test_in_the_explorer_a_slow_photo_lets_others_go_first_and_stops_when_nobody_waits(work, tmp_path):
    from rectgrad.app.service import read

    bomb, photo = tmp_path / "bomb", tmp_path / "photo"
    bomb.write_bytes(scans(1000, 60_000))
    photo.write_bytes(saved("JPEG"))
    began = threading.Event()

    def slow() -> None:
        began.set()
        read(bomb, "bomb.jpg")

    task = work.join("bomb", slow, "photos", ("10.0.0.1", "one"))
    assert began.wait(10)
    other = work.join("photo", lambda: read(photo, "photo.jpg"), "photos", ("10.0.0.2", "two"))
    assert other.future.result(10).size == GREY.size
    assert not task.future.done()
    work.leave(task)
    assert task.lane.idle.wait(10)
    assert task.future.cancelled() or isinstance(task.future.exception(), Stopped)
