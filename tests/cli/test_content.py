"""Results belong to the content of a photo and to the weights that explained it, whatever names, times and
other processes do."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import rectgrad
from commands import TINY, photo
from rectgrad import photos
from rectgrad.cli.explain import Explain
from rectgrad.cli.run import Plan
from rectgrad.cli.run import run as run_plan
from rectgrad.experiments import parts
from rectgrad.models import load
from rectgrad.photos import files, names


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return files.digest(file)


def map_of(path: Path, q: float = 60) -> np.ndarray:
    model = load(TINY)
    return rectgrad.attribute(model.module, model.prepare(model.crop(photos.read(path)))[None], q=q)[
        0
    ].numpy()


def test_two_processes_into_one_folder_take_turns(tmp_path):
    """Their settings differ. No result mixes files of both, and none of the two loses a photo."""
    for i in range(6):
        photo(tmp_path / "photos" / f"{i}.png", seed=i)
    (tmp_path / "hold").touch()
    model = TINY.replace(":tiny", ":held")
    command = [sys.executable, "-m", "rectgrad", "explain", "photos", "--model", model, "--maps", "npy"]
    command += ["--out", "out", "--batch-size", "1", "--json", "--q"]
    errors = [tmp_path / "60.txt", tmp_path / "30.txt"]

    def start(errors):
        with errors.open("w") as file:
            return subprocess.Popen(
                [*command, errors.stem], cwd=tmp_path, stdout=subprocess.PIPE, stderr=file
            )

    both = [start(each) for each in errors]
    waits = "waiting for another process that writes to out"
    deadline = time.monotonic() + 120
    while not any(waits in each.read_text() for each in errors) and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "hold").unlink()
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [len(out.splitlines()) for out in said] == [6, 6]
    assert sum(waits in each.read_text() for each in errors) == 1
    records = [json.loads((tmp_path / "out" / f"{i}.json").read_text()) for i in range(6)]
    (q,) = {record["settings"]["options"]["q"] for record in records}  # those of the second one
    for i in range(6):
        found = np.load(tmp_path / "out" / f"{i}.npy")
        assert np.allclose(found, map_of(tmp_path / "photos" / f"{i}.png", q), atol=1e-6)
    assert not list((tmp_path / "out").rglob(".*"))


def test_a_photo_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """Its record names the content that was explained, not what the file contains afterwards."""
    cat, other = photo(tmp_path / "cat.bmp"), photo(tmp_path / "other.bmp", seed=1)
    before, expected, changed = digest(cat), map_of(cat), other.read_bytes()
    decode = photos.decode

    def late(file, enough=None):
        with open(cat, "r+b") as same:  # the same file, as an editor or a camera writes it
            same.write(changed)
        return decode(file, enough)

    monkeypatch.setattr(photos, "decode", late)
    found = []
    plan = Plan(load(TINY), Explain(rectgrad.RectGrad(q=60)), tmp_path / "out", maps="npy")
    run_plan(plan, files.sources([str(cat)]), lambda source, result: found.append(result))
    assert found[0]["photo"] == before
    assert np.allclose(np.load(tmp_path / "out" / "cat.npy"), expected, atol=1e-6)
    monkeypatch.undo()
    assert run_plan(plan, files.sources([str(cat)]), lambda source, result: found.append(result)) == 1
    assert found[1]["photo"] == digest(other)


def test_a_clock_that_was_moved_back(run, tmp_path):
    """Results are from the future, the new photo is from 1970; then the other way round."""
    cat = photo(tmp_path / "cat.png")
    common = ("explain", cat, "--model", TINY, "--q", "60", "--out", "r", "--json")
    for seed, of_photo, of_results in ((1, 0, 4 * 10**9), (2, 4 * 10**9, 0)):
        first = json.loads(run(*common)[1])
        for path in Path("r").rglob("*"):
            os.utime(path, (of_results, of_results))
        os.utime(cat, (of_photo, of_photo))
        assert run(*common)[1] == json.dumps(first, ensure_ascii=False) + "\n"
        assert Path("r/cat.png").stat().st_mtime == of_results  # unchanged: not explained again
        photo(cat, seed=seed)
        os.utime(cat, (of_photo, of_photo))
        assert json.loads(run(*common)[1])["photo"] == digest(cat) != first["photo"]


def weak(monkeypatch, module) -> None:
    """The first half of every short hash is the same, as someone who tries many names could arrange it."""
    sha256 = module.hashlib.sha256

    class Weak:
        def __init__(self, content: bytes) -> None:
            self._real = sha256(content).hexdigest()

        def hexdigest(self) -> str:
            return "0" * 16 + self._real

    monkeypatch.setattr(module, "hashlib", type("hashlib", (), {"sha256": Weak}))


def test_short_hashes_that_collide_are_no_common_name(monkeypatch, tmp_path):
    weak(monkeypatch, names)
    long = "x" * 300
    given = [(Path(f"/{a}/{b}/{long}{a}.jpg"), Path(f"{long}{a}.jpg")) for a in "ab" for b in "cd"]
    given += [(Path("/a/e/cat.jpg"), Path("cat.jpg")), (Path("/b/e/cat.jpg"), Path("cat.jpg"))]
    found = names.unique_names(given)
    assert len({names.folded(name) for name in found}) == len(given)


def test_parts_of_other_settings_or_of_a_similar_name_are_other_parts(monkeypatch, tmp_path):
    weak(monkeypatch, parts)
    one, other = (parts.Parts(tmp_path, {"seed": seed}) for seed in (0, 1))
    assert [one.part("a", lambda: 1), other.part("a", lambda: 2)] == [1, 2]
    monkeypatch.undo()
    similar = ["a b", "a_b", "a/b", "a:b"]
    for i, name in enumerate(similar):
        one.array(name, lambda i=i: np.array([i]))
        one.keep(name, i)
    assert [int(one.array(name, lambda: np.array([-1]))[0]) for name in similar] == [0, 1, 2, 3]
    assert [one.known(name) for name in similar] == [0, 1, 2, 3]


@pytest.mark.parametrize("planted", ["[" * 100_000, "[1]", "3", '{"part": "a"}', '{"value": 2}', "{"])
def test_a_file_that_is_no_part_is_computed_again(tmp_path, planted):
    kept = parts.Parts(tmp_path, {})
    kept.keep("a", 1)
    (path,) = kept.folder.iterdir()
    path.write_text(planted)
    assert kept.known("a") is None
    assert kept.seconds() == 0
    assert kept.part("a", lambda: 2) == 2


@pytest.mark.parametrize("planted", [b"", b"\x93NUMPY\1\0", b"PK\3\4", b"PK\5\6" + bytes(18), b"\x80\4N."])
def test_a_file_that_is_no_array_is_computed_again(tmp_path, planted):
    kept = parts.Parts(tmp_path, {})
    kept.array("a", lambda: np.array([1]))
    (path,) = kept.folder.iterdir()
    path.write_bytes(planted)
    assert list(kept.array("a", lambda: np.array([2]))) == [2]
    assert list(kept.array("a", lambda: pytest.fail("computed twice"))) == [2]


def test_a_part_that_another_process_removes_is_not_lost(monkeypatch, tmp_path):
    kept = parts.Parts(tmp_path, {})
    monkeypatch.setattr(files, "save_json", lambda value, path: None)
    assert kept.keep("a", (1, 2)) == [1, 2]


def test_the_time_of_parts_is_not_negative_if_the_clock_is_moved_back(monkeypatch, tmp_path):
    times = iter([1000.0, 1010.0, 500.0])
    monkeypatch.setattr(parts.time, "time", lambda: next(times))
    kept = parts.Parts(tmp_path, {})
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.seconds() == 10.0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_one_bad_name_does_not_stop_the_rest(run, tmp_path):
    """Names of 255 bytes, with bytes that are no text, a newline or a leading dash; a folder called like a
    result, a loop of links and a link to a pipe."""
    folder = tmp_path / "photos"
    photo(folder / "a.jpg")
    photo(folder / "a.png" / "in.jpg", seed=1)
    listed = [
        b"caf\xe9.jpg",
        b"n\n.jpg",
        b"-x.jpg",
        b"--model.jpg",
        b"b" * 251 + b".jpg",
        b"con.jpg",
        b"e .jpg",
    ]
    for i, name in enumerate(listed):
        photo(folder / "new.jpg", seed=2 + i)
        os.rename(folder / "new.jpg", os.path.join(os.fsencode(folder), name))
    (folder / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(tmp_path / "pipe")
    (folder / "pipe.jpg").symlink_to(tmp_path / "pipe")
    status, out, err = run("explain", "photos", "--model", TINY, "--q", "60", "--out", "r", "--json")
    assert status == 1
    records = [json.loads(line) for line in out.splitlines()]
    assert len({record["photo"] for record in records}) == len(records) == 2 + len(listed)
    assert all(Path("r", record["picture"]).exists() for record in records)
    for name in ("loop.jpg", "pipe.jpg"):
        assert sum(name in line for line in err.splitlines()) == 1


def test_planted_names_among_the_results_do_nothing(run, tmp_path):
    photo(tmp_path / "cat.png")
    out = tmp_path / "r"
    out.mkdir()
    planted = [out / f".a.png.{name}.part" for name in ("99999999999999999999", "²", "٣", "-1", "x")]
    planted.append(out / "rectgrad-app-99999999999999999999-x")
    [path.touch() for path in planted]
    (out / ".gone.png.999999999.part").touch()
    status, _, err = run("explain", "cat.png", "--model", TINY, "--q", "60", "--out", "r")
    assert (status, err) == (0, "")
    assert all(path.exists() for path in planted)
    assert not (out / ".gone.png.999999999.part").exists()  # of a process that has ended


def test_files_of_two_runs_are_never_taken_for_one_result(run, tmp_path, monkeypatch):
    cat = photo(tmp_path / "cat.png")
    common = ("explain", cat, "--model", TINY, "--out", "r")
    run(*common, "--q", "60", "--maps", "npy")
    first = Path("r/cat.png").read_bytes()

    def full(picture, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:  # after the picture of the second run has been written
        patched.setattr(files, "save_thumbnail", full)
        assert run(*common, "--method", "saliency")[0] == 2
    assert Path("r/cat.png").read_bytes() != first
    assert not Path("r/cat.npy").exists()  # of the first run
    run(*common, "--q", "60")
    assert Path("r/cat.png").read_bytes() == first


def test_maps_of_the_same_settings_are_kept_in_both_formats(run, tmp_path):
    common = ("explain", photo(tmp_path / "cat.png"), "--model", TINY, "--out", "r")
    run(*common, "--q", "60", "--maps", "npy")
    run(*common, "--q", "60", "--maps", "npz")
    assert Path("r/cat.npy").exists()
    Path("r/other.npy").write_bytes(b"")
    run(*common, "--q", "50")
    assert sorted(path.name for path in Path("r").glob("*.np*")) == ["other.npy"]


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    with pytest.raises(OSError) as raised, files.atomic(tmp_path / "a.png"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path / "a.png")
    full = r"cannot be written; the disk may be full .3 requested and 0 written.*a\.npy"
    with pytest.raises(OSError, match=full), files.atomic(tmp_path / "a.npy"):
        raise OSError("3 requested and 0 written")
    assert not any(tmp_path.iterdir())


def test_the_explained_class_is_printed_and_the_next_command_can_be_run(run, tmp_path):
    dashed = photo(tmp_path / "-a.png")
    _, out, _ = run("explain", "--model", TINY, "--target", "3", "--", dashed.name)
    [line] = [line for line in out.splitlines() if "(explained)" in line]
    assert rectgrad.models.load(TINY).label(3) in line
    command = out.splitlines()[-1]
    assert " ./-a.png " in command


def test_options_of_averages_and_baselines(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    _, _, err = run("explain", cat, "--model", TINY, "--method", "smoothgrad", "--q", "90")
    assert "neither smoothgrad nor saliency, the method that it averages, has the option --q" in err
    for command in ("explain", "compare"):
        option = "--method" if command == "explain" else "--methods"
        _, _, err = run(command, cat, "--model", TINY, option, "deeplift_shap")
        assert "deeplift_shap needs baselines, which cannot be given on the command line" in err
