"""Reading photos: every common format, upright and in 8-bit RGB, or a one-line error message."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectgrad import photos

LEFT, RIGHT = (200, 40, 30), (20, 60, 220)


def halves(size=(40, 20)):
    """Red on the left, blue on the right."""
    picture = Image.new("RGB", size, RIGHT)
    picture.paste(LEFT, (0, 0, size[0] // 2, size[1]))
    return picture


def colours_of(picture):
    values = np.asarray(picture).astype(int)
    return values[values.shape[0] // 2, 2], values[values.shape[0] // 2, -3]


def assert_halves(picture, tolerance=12):
    assert picture.mode == "RGB"
    for seen, wanted in zip(colours_of(picture), (LEFT, RIGHT), strict=True):
        assert np.abs(seen - np.array(wanted)).max() <= tolerance


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tiff", "gif", "ppm"])
def test_usual_formats(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    halves().save(path)
    assert_halves(photos.read(path), tolerance=60 if suffix in ("webp", "gif") else 12)


@pytest.mark.parametrize(
    ("orientation", "size"), [(3, (40, 20)), (6, (20, 40)), (8, (20, 40)), (2, (40, 20))]
)
def test_the_camera_s_rotation_is_respected(tmp_path, orientation, size):
    turned = halves()
    undo = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    turned = turned.transpose(undo.get(orientation, Image.Transpose.FLIP_LEFT_RIGHT))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.jpg"
    turned.save(path, exif=exif, quality=95)
    assert photos.read(path).size == (40, 20)
    assert_halves(photos.read(path), tolerance=40)
    assert turned.size == ((20, 40) if orientation in (6, 8) else (40, 20))


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path):
    values = np.full((10, 10), 128 * 257, dtype=np.uint16)
    path = tmp_path / "deep.png"
    Image.fromarray(values).save(path)
    assert np.asarray(photos.read(path)).tolist() == np.full((10, 10, 3), 128).tolist()


def test_transparency_is_composited_on_white(tmp_path):
    picture = Image.new("RGBA", (10, 10), (255, 0, 0, 0))
    picture.paste((0, 0, 255, 255), (0, 0, 5, 10))
    path = tmp_path / "clear.png"
    picture.save(path)
    read = photos.read(path)
    assert read.getpixel((2, 5)) == (0, 0, 255)
    assert read.getpixel((8, 5)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["L", "P", "LA", "CMYK", "YCbCr", "HSV"])
def test_every_colour_mode_becomes_rgb(mode):
    picture = photos.to_rgb(Image.new("RGB", (8, 8), (100, 100, 100)).convert(mode))
    assert picture.mode == "RGB"
    assert np.abs(np.asarray(picture).astype(int) - 100).max() <= 2


@pytest.mark.parametrize(("value", "kind"), [(25_700, np.int32), (100 / 255, np.float32)])
def test_deep_pictures_are_scaled(value, kind):
    picture = Image.fromarray(np.full((8, 8), value, kind))
    assert set(np.asarray(photos.to_rgb(picture)).flat) == {100}


def test_a_large_jpeg_is_decoded_small_but_never_below_what_is_enough(tmp_path):
    path = tmp_path / "large.jpg"
    halves((3200, 1600)).save(path)
    picture = photos.read(path, enough=300)
    assert picture.size == (800, 400)
    assert_halves(picture)
    assert photos.read(path).size == (3200, 1600)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an image"),
        (b"just some text", "not an image"),
        (b"\xff\xd8\xff\xe0 and then nothing", "not an image|broken|truncated|cannot"),
    ],
)
def test_what_is_no_image_says_so(tmp_path, content, words):
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(photos.UnreadableImageError, match=rf"broken\.jpg: .*({words})"):
        photos.read(path)


@pytest.mark.parametrize("name", ["photo.jpg", "photo.eps", "photo.png"])
def test_postscript_is_not_interpreted(name, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    path = tmp_path / name
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(photos.UnreadableImageError, match="not an image, or not in a supported format"):
        photos.read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_picture_of_floats_that_are_not_finite_says_so(value, tmp_path):
    values = np.zeros((8, 8), np.float32)
    values[3, 3] = value
    path = tmp_path / "float.tif"
    Image.fromarray(values).save(path)
    with pytest.raises(photos.UnreadableImageError, match=r"float\.tif: contains NaN or an infinity"):
        photos.read(path)


def test_a_truncated_file_says_so(tmp_path):
    path = tmp_path / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(photos.UnreadableImageError, match=r"cut\.png: "):
        photos.read(path)


def test_an_error_of_any_kind_in_a_decoder_says_so(tmp_path):
    """Pillow's decoder of AVIF raises RuntimeError."""
    path = tmp_path / "cut.avif"
    try:
        Image.radial_gradient("L").convert("RGB").save(path)
    except (OSError, ValueError, KeyError):
        pytest.skip("this Pillow has no AVIF")
    content = bytearray(path.read_bytes())
    content[-400:] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="decode"), Image.open(path) as opened:
        opened.load()
    with pytest.raises(photos.UnreadableImageError, match=r"cut\.avif: cannot be read"):
        photos.read(path)


def test_a_missing_file_and_a_folder_say_so(tmp_path):
    with pytest.raises(photos.UnreadableImageError, match="no such file"):
        photos.read(tmp_path / "nowhere.png")
    with pytest.raises(photos.UnreadableImageError, match="folder"):
        photos.read(tmp_path)


def test_the_pixel_limit_is_ours(tmp_path):
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 8_000)).save(path)
    with pytest.raises(photos.UnreadableImageError, match=r"bomb.png: .*limit of 150 megapixels"):
        photos.read(path)
    Image.new("1", (40_000, 10_000)).save(path)
    with pytest.raises(photos.UnreadableImageError, match="limit of 150 megapixels"):
        photos.read(path)


def test_reading_changes_no_state_of_the_process(tmp_path):
    """100 megapixels exceed Pillow's limit, but not ours: no warning, and Pillow keeps its limit."""
    path = tmp_path / "large.png"
    Image.new("1", (10_000, 10_000)).save(path)
    program = (
        "import sys, warnings, numpy, PIL.Image\n"
        "before = list(warnings.filters), PIL.Image.MAX_IMAGE_PIXELS\n"
        "from rectgrad import photos\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print(photos.read(sys.argv[1]).size, [str(each.message) for each in caught])\n"
        "print((list(warnings.filters), PIL.Image.MAX_IMAGE_PIXELS) == before)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(10000, 10000) []", "True"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device that never ends")
def test_a_device_or_a_pipe_is_no_photo(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in ("/dev/zero", tmp_path / "pipe.jpg"):
        with pytest.raises(photos.UnreadableImageError, match="not a regular file"):
            photos.read(path)
