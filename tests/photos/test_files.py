"""Finding photos, and writing files atomically."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage.metrics import structural_similarity

from rectgrad import photos
from rectgrad.photos import files
from rectgrad.photos.stream import batches, prefetch


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_folders_patterns_and_files(tmp_path):
    touch(tmp_path, "a/one.jpg", "a/deep/two.PNG", "a/notes.txt", "b/three.jpg", "b/four.gif")
    names = [s.name for s in files.sources([str(tmp_path / "a")])]
    assert names == ["deep/two", "one"]
    assert [s.name for s in files.sources([str(tmp_path / "b" / "*.jpg")])] == ["three"]
    assert [s.name for s in files.sources([str(tmp_path / "a" / "notes.txt")])] == ["notes"]


def test_two_files_never_share_a_name(tmp_path):
    touch(tmp_path, "cat.jpg", "cat.png", "dog.png", "sub/cat.jpg")
    sources = files.sources([str(tmp_path)])
    assert len({s.name for s in sources}) == 4
    assert [s.name for s in files.sources([str(tmp_path / "dog.png")])] == ["dog"]
    twice = files.sources([str(tmp_path / "dog.png"), str(tmp_path)])
    assert len(twice) == 4


def test_results_of_other_runs_are_no_photos(tmp_path):
    touch(tmp_path, "a.jpg", "deep/b.jpg", "deep/results/b.png", "deep/results/thumbnails/b.jpg")
    touch(tmp_path, f"deep/results/{files.RECORDS}", "results/c.png")
    assert [s.name for s in files.sources([str(tmp_path)])] == ["a", "deep/b", "results/c"]
    assert [s.name for s in files.sources([str(tmp_path / "deep" / "results")])] == ["b", "thumbnails/b"]


def test_same_file_names_in_two_places(tmp_path):
    touch(tmp_path, "a/cat.jpg", "b/cat.jpg")
    names = [s.name for s in files.sources([str(tmp_path / "a"), str(tmp_path / "b")])]
    assert len(set(names)) == 2


def test_results_hidden_files_and_other_names_are_left_alone(tmp_path):
    """A new photo renames only the one it clashes with."""
    touch(tmp_path, "a.png", "b.png", "out/a.png", ".hidden/c.png", ".d.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    names = {s.name for s in files.sources([str(tmp_path)], exclude=tmp_path / "out")}
    assert names == {"a", "b", "gone"}
    touch(tmp_path, "a.jpg")
    names = {s.name for s in files.sources([str(tmp_path)], exclude=tmp_path / "out")}
    assert names == {"a.png", "a.jpg", "b", "gone"}
    with pytest.raises(ValueError, match="empty"):
        files.sources([""])


@pytest.mark.parametrize("argument", ["nowhere.jpg", "nothing-*.png"])
def test_what_is_not_there_is_named(tmp_path, argument):
    with pytest.raises(ValueError, match="no such file, folder or pattern"):
        files.sources([str(tmp_path / argument)])


def test_a_folder_without_images_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"no images in the folder.*\.jpg"):
        files.sources([str(tmp_path)])


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "result.txt"
    files.save_text("first", path)

    def interrupted():
        with files.atomic(path) as part:
            part.write_text("half")
            assert path.read_text() == "first"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_who_is_reading_an_old_result_reads_it_to_its_end(tmp_path):
    """The new one takes its place in one step; it is not written over it."""
    path = tmp_path / "result.txt"
    files.save_text("first " * 100_000, path)
    with open(path) as reader:
        assert reader.read(6) == "first "
        files.save_text("second", path)
        assert len(reader.read()) == 599_994
    assert path.read_text() == "second"


def test_leftovers_of_a_killed_run_go_away_and_those_of_a_live_one_stay(tmp_path):
    dead = tmp_path / ".a.png.999999999.part"
    alive = tmp_path / f".b.png.{os.getpid()}.part"
    touch(tmp_path, dead.name, alive.name)
    files.remove_partial_files(tmp_path)
    assert os.listdir(tmp_path) == [alive.name]


def test_pictures_are_small_and_look_the_same(tmp_path):
    """A photo that is enlarged smoothly, as on the sheets, beside a colour bar and a white page."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)).resize(
        (224, 224), Image.Resampling.BICUBIC
    )
    page = Image.new("RGB", (600, 480), "white")
    page.paste(small.resize((448, 448), Image.Resampling.LANCZOS), (10, 10))
    page.paste(Image.linear_gradient("L").resize((20, 448)), (500, 10))
    page.save(tmp_path / "plain.png", compress_level=3)
    files.save_picture(page, tmp_path / "saved.png")
    with Image.open(tmp_path / "saved.png") as picture:
        saved = np.asarray(picture)
    assert abs(saved.astype(int) - np.asarray(page)).max() <= 2
    assert (saved[0, 0] == 255).all()
    assert structural_similarity(saved, np.asarray(page), channel_axis=2) > 0.99
    assert (tmp_path / "saved.png").stat().st_size < 0.6 * (tmp_path / "plain.png").stat().st_size


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_arrays_come_back(tmp_path, suffix):
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    path = tmp_path / f"map.{suffix}"
    files.save_array(values, path)
    loaded = np.load(path)
    assert np.array_equal(loaded["map"] if suffix == "npz" else loaded, values)


def test_work_ahead_is_in_order_bounded_and_passes_errors_on():
    started, finished = [], []

    def slow(i):
        started.append(i)
        time.sleep(0.001 * (i % 3))
        if i == 7:
            raise ValueError("seven")
        return i * i

    most = 0
    for item, future in prefetch(slow, range(50), workers=3, depth=5):
        most = max(most, len(started) - len(finished))
        finished.append(item)
        if item == 7:
            assert isinstance(future.exception(), ValueError)
        else:
            assert future.result() == item * item
    assert finished == list(range(50))
    assert most <= 6


def test_prompt_results_do_not_wait_for_the_depth():
    pulled = []

    def items():
        for i in range(1000):
            pulled.append(i)
            yield i
            time.sleep(0.002)

    results = prefetch(str, items(), depth=1000, prompt=True)
    assert next(results)[1].result() == "0"
    assert len(pulled) < 1000
    results.close()


def test_batches():
    assert list(batches(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batches([], 3)) == []


def test_names_never_lead_out_of_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for path in ("photo.png", "folder/photo.png"):
        Path(path).touch()
    found = files.sources(["folder/../photo.png", "photo.png", "folder/photo.png"])
    assert len(found) == len({source.name for source in found}) == 2
    assert not any(".." in Path(source.name).parts or Path(source.name).is_absolute() for source in found)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_names_that_cannot_be_read_do_not_stop_the_others(tmp_path):
    """A loop of links, a link to a pipe, a folder called like a picture, bytes that are no text."""
    folder, out = tmp_path / "photos", tmp_path / "out"
    (folder / "b.png").mkdir(parents=True)
    for name in (
        b"b.jpg",
        b"caf\xe9.jpg",
        b"n\n.jpg",
        b"-x.jpg",
        b"a" * 251 + b".jpg",
        b"b.png/in.jpg",
    ):
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).touch()
    (folder / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(tmp_path / "pipe")
    (folder / "pipe.jpg").symlink_to(tmp_path / "pipe")
    found = files.sources([str(folder)], exclude=out)
    assert len(found) == 8
    assert len({each.name for each in found}) == 8
    for name in ("loop.jpg", "pipe.jpg"):
        with pytest.raises(photos.UnreadableImageError, match=name):
            photos.read(folder / name)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda number: calls.append("sync"))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    files.save_text("text", tmp_path / "a.txt")
    assert calls == ["sync", "rename"]


def test_a_planted_link_is_not_written_through(tmp_path):
    """Its name is that of the partial file."""
    (tmp_path / "precious").write_text("text")
    (tmp_path / f".a.txt.{os.getpid()}.part").symlink_to(tmp_path / "precious")
    files.save_text("new", tmp_path / "a.txt")
    assert (tmp_path / "precious").read_text() == "text"
    assert (tmp_path / "a.txt").read_text() == "new"
    assert not (tmp_path / "a.txt").is_symlink()


def test_json_keeps_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    files.save_json({"name": name}, tmp_path / "a.json")
    assert files.load_record(tmp_path / "a.json") == {"name": name}


@pytest.mark.parametrize("name", ["9" * 20, "²", "٣", "-1", "", "1e3"])
def test_a_planted_name_is_no_process(name, tmp_path):
    assert not files.ended(name)
    planted = tmp_path / f".a.png.{name}.part"
    planted.touch()
    files.remove_partial_files(tmp_path)
    assert planted.exists()
