"""rectgrad explain over many photos: results, reuse of existing results, interruptions, unusual files."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import graphs
import rectgrad
from commands import FILE, HERE, TINY, photo, resident, size_of
from rectgrad import photos
from rectgrad.cli.explain import Explain
from rectgrad.cli.run import Plan
from rectgrad.cli.run import run as run_plan
from rectgrad.models import load
from rectgrad.models.fingerprint import fingerprint
from rectgrad.photos import files


def test_explain_writes_picture_record_and_map(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    status, out, err = run("explain", cat, "--model", TINY, "--maps", "npy", "--q", "60", "--out", "results")
    assert (status, err) == (0, "")
    assert "results/cat.png" in out.splitlines()
    assert size_of("results/cat.png")[0] > 1000
    said = json.loads(Path("results/cat.json").read_text())
    assert len(said["top5"]) == 4
    assert said["target"] == said["top5"][0]
    assert said["settings"]["options"]["q"] == 60
    model = load(TINY)
    inputs = model.prepare(model.crop(photos.read(cat)))[None]
    expected = rectgrad.attribute(model.module, inputs, "rectgrad", q=60)[0]
    assert np.allclose(np.load("results/cat.npy"), expected.numpy(), atol=1e-6)


def test_specificity_is_in_the_record_and_printed(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    common = ("explain", cat, "--model", TINY, "--out", "r")
    _, out, _ = run(*common, "--q", "60")
    expected = rectgrad.explain(cat, TINY, q=60)
    assert json.loads(Path("r/cat.json").read_text())["specificity"] == round(expected.specificity, 4)
    assert expected.notes[0] in out
    smooth = (*common, "--method", "smoothgrad", "--samples", "2")
    _, out, _ = run(*smooth)
    assert "Specificity –: not computed" in out
    _, out, _ = run(*smooth, "--specificity", "--json")
    assert 0 <= json.loads(out)["specificity"] <= 1


def test_explain_follows_method_options_and_target(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    common = ("explain", cat, "--model", TINY, "--maps", "npz", "--out", "r", "--target", "blue bird")
    status, out, _ = run(*common, "--method", "smoothgrad", "--over", "rectgrad", "--samples", "2", "--json")
    assert status == 0
    line = json.loads(out)
    assert line["target"]["index"] == 2
    assert line["settings"]["options"] == {"over": "rectgrad", "samples": 2, "noise": 0.1, "seed": 0}
    model = load(TINY)
    inputs = model.prepare(model.crop(photos.read(cat)))[None]
    expected = rectgrad.attribute(model.module, inputs, "smoothgrad", 2, over="rectgrad", samples=2)[0]
    with np.load("r/cat.npz") as content:
        assert np.allclose(content["map"], expected.numpy(), atol=1e-6)


def test_options_of_the_averaged_method(run, tmp_path):
    options = ("--method", "smoothgrad", "--over", "rectgrad", "--samples", "2", "--q", "60", "--json")
    status, _, _ = run("explain", photo(tmp_path / "a.png"), "--model", TINY, *options, "--maps", "npy")
    assert status == 0
    model = load(TINY)
    inputs = model.prepare(model.crop(photos.read(tmp_path / "a.png")))[None]
    inner = rectgrad.RectGrad(q=60)
    expected = rectgrad.attribute(model.module, inputs, "smoothgrad", over=inner, samples=2)[0]
    assert np.allclose(np.load("explained/a.npy"), expected.numpy(), atol=1e-6)


def test_a_folder_is_explained_by_a_capture_where_it_pays(run, tmp_path, monkeypatch):
    for i in range(7):
        photo(tmp_path / "photos" / f"{i}.png", seed=i)
    common = ["explain", "photos", "--model", TINY, "--q", "60", "--batch-size", "2", "--maps", "npy"]
    run(*common, "--out", "ordinary")
    graphs.on_the_cpu(monkeypatch)
    run(*common, "--out", "captured")
    assert graphs.Graph.replays == 2 + 2 * 2  # checks; the batches in the middle, each with its specificity
    for i in range(7):
        a, b = (np.load(f"{out}/{i}.npy") for out in ("ordinary", "captured"))
        assert np.allclose(a, b, atol=1e-6)
        a, b = (json.loads(Path(out, f"{i}.json").read_text()) for out in ("ordinary", "captured"))
        assert a["specificity"] == b["specificity"]
        assert a["top5"] == b["top5"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_pairs_of_batches_give_the_results_of_one_after_the_other(run, tmp_path, monkeypatch):
    inside, most, alone = set(), [], threading.Lock()
    explain = Explain.explain

    def explained(self, network, batch):
        with alone:
            inside.add(threading.get_ident())
            most.append((len(inside), torch.get_num_threads()))
        time.sleep(0.05)
        found = explain(self, network, batch)
        with alone:
            inside.remove(threading.get_ident())
        return found

    monkeypatch.setattr(Explain, "explain", explained)
    for i in range(9):
        photo(tmp_path / "photos" / f"{i}.png", seed=i)
    common = ("explain", "photos", "--model", "cifar10_cnn", "--batch-size", "2", "--maps", "npy")
    status, _, _ = run(*common, "--out", "pairs")
    assert (status, torch.get_num_threads(), max(most)) == (0, 2, (2, 1))
    most.clear()
    monkeypatch.setattr("rectgrad.cli.explain.MODELS", {})  # as for a model of the user's
    run(*common, "--out", "single")
    assert max(most) == (1, 2)
    for i in range(9):
        a, b = (np.load(f"{out}/{i}.npy") for out in ("pairs", "single"))
        assert np.allclose(a, b, atol=1e-5 * np.abs(b).max())
        a, b = (json.loads(Path(out, f"{i}.json").read_text()) for out in ("pairs", "single"))
        assert a["specificity"] == pytest.approx(b["specificity"], abs=0.02)
        assert (a["target"]["index"], a["photo"]) == (b["target"]["index"], b["photo"])


@pytest.mark.usefixtures("two_threads")
def test_a_single_batch_has_all_threads(run, tmp_path, monkeypatch):
    threads = []
    explain = Explain.explain

    def explained(*given):
        threads.append(torch.get_num_threads())
        return explain(*given)

    monkeypatch.setattr(Explain, "explain", explained)
    run("explain", photo(tmp_path / "a.png"), photo(tmp_path / "b.png", seed=1), "--model", "cifar10_cnn")
    assert threads == [2]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("no map")])
def test_an_error_in_a_pair_of_batches_ends_the_run(tmp_path, monkeypatch, error):
    seen = []

    def explained(self, network, batch):
        seen.append(len(batch))
        if len(seen) == 2:
            raise error
        return explain(self, network, batch)

    explain = Explain.explain
    monkeypatch.setattr(Explain, "explain", explained)
    sources = files.sources([photo(tmp_path / f"{i}.png", seed=i) for i in range(40)])
    plan = Plan(
        load("cifar10_cnn"), Explain(rectgrad.RectGrad()), tmp_path / "r", batch_size=2, in_pairs=True
    )
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_plan(plan, sources, lambda *_: None)
    assert len(seen) < 8
    assert torch.get_num_threads() == 2


def test_what_is_done_is_not_done_again_unless_the_settings_change(run, tmp_path):
    photo(tmp_path / "photos" / "a.png")
    photo(tmp_path / "photos" / "b.png", seed=1)
    run("explain", "photos", "--model", TINY, "--q", "60", "--out", "r")
    before = {p: p.stat().st_mtime_ns for p in Path("r").glob("*.png")}
    assert len(before) == 2
    Path("r/b.png").unlink()
    run("explain", "photos", "--model", TINY, "--q", "60", "--out", "r")
    assert Path("r/a.png").stat().st_mtime_ns == before[Path("r/a.png")]
    assert Path("r/b.png").exists()
    run("explain", "photos", "--model", TINY, "--q", "50", "--out", "r")
    assert Path("r/a.png").stat().st_mtime_ns != before[Path("r/a.png")]
    lines = Path("r/explained.jsonl").read_text().splitlines()
    assert [json.loads(line)["picture"] for line in lines] == ["a.png", "b.png"]


def test_a_changed_photo_or_changed_weights_are_explained_again(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    code = tmp_path / "net.py"
    code.write_text((HERE / "tiny_model.py").read_text())
    common = ("explain", cat, "--q", "60", "--out", "r", "--model", f"{code}:tiny")
    run(*common)
    first = json.loads(Path("r/cat.json").read_text())
    run("explain", tmp_path, *common[2:])
    assert json.loads(Path("r/cat.json").read_text()) == first
    code.write_text(code.read_text().replace("manual_seed(0)", "manual_seed(7)"))
    run(*common)
    second = json.loads(Path("r/cat.json").read_text())
    assert second["top5"] != first["top5"]
    photo(cat, seed=9)
    run(*common)
    assert json.loads(Path("r/cat.json").read_text())["top5"] != second["top5"]
    stamp = Path("r/cat.png").stat().st_mtime_ns
    run(*common, "--again")
    assert Path("r/cat.png").stat().st_mtime_ns != stamp


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--method", "smoothgrad", "--over", "rectgrad", "--samples", "2", "--q", "60"), ("--q", "30")),
        (("--q", "60"), ("--dark",)),
        (("--q", "60", "--maps", "npy"), ("--maps", "npz")),
    ],
)
def test_another_inner_option_page_or_kind_of_map_is_another_result(run, tmp_path, first, second):
    cat = photo(tmp_path / "cat.png")
    run("explain", cat, "--model", TINY, "--out", "r", *first)
    stamp = Path("r/cat.png").stat().st_mtime_ns
    run("explain", cat, "--model", TINY, "--out", "r", *first, *second)
    assert Path("r/cat.png").stat().st_mtime_ns != stamp


def test_results_are_not_explained_and_runs_add_up(run, tmp_path):
    photo(tmp_path / "a.png")
    photo(tmp_path / "b.png", seed=1)
    _, out, _ = run("explain", ".", "--model", TINY, "--q", "60")
    assert "2 photos explained" in out
    _, out, _ = run("explain", ".", "--model", TINY, "--q", "60")
    assert "2 photos explained, 2 of them in an earlier run" in out
    photo(tmp_path / "c.png", seed=2)
    Path("explained/list.json").write_text("[1, 2]")  # an unrelated file
    run("explain", "c.png", "--model", TINY, "--q", "60")
    assert len(Path("explained/explained.jsonl").read_text().splitlines()) == 3


def test_results_of_another_command_are_not_compared(run, tmp_path):
    photo(tmp_path / "a.png")
    run("explain", ".", "--model", TINY, "--q", "60")
    run("compare", ".", "--model", TINY, "--q", "60", "--methods", "saliency")
    assert len(Path("compared/explained.jsonl").read_text().splitlines()) == 1


def test_a_photo_that_does_not_fit_into_memory_is_named(run, tmp_path, monkeypatch):
    def decode(*_):
        raise MemoryError

    photo(tmp_path / "a.png")
    monkeypatch.setattr("rectgrad.photos.decode", decode)
    status, _, err = run("explain", "a.png", "--model", TINY)
    assert (status, err) == (2, "rectgrad: a.png: not enough memory\n")


@pytest.mark.parametrize("missing", ["nowhere.png", "nothing-*.png", "none/"])
def test_a_missing_photo_among_others_is_listed_at_the_end(run, tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    photo(tmp_path / "a.png")
    status, _, err = run("explain", missing, "a.png", "--model", TINY, "--q", "60")
    assert status == 1
    assert err.splitlines()[-1] == f"rectgrad: {missing.rstrip('/')}: no such file"
    assert Path("explained/a.png").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="needs signals")
def test_an_interrupted_run_says_how_to_resume(tmp_path):
    folder = tmp_path / "photos"
    for i in range(200):
        photo(folder / f"p{i:03}.png", seed=i)
    model = TINY.replace(":tiny", ":slow")
    command = [sys.executable, "-m", "rectgrad", "explain", str(folder), "--model", model, "--q", "60"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "rectgrad: interrupted; run the same command again to resume"
    done = len(list((tmp_path / "out").glob("*.json")))
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<li ") == done < 200
    assert f"{200 - done} more to do" in page
    assert len((tmp_path / "out" / "explained.jsonl").read_text().splitlines()) == done


def strange_files(folder):
    """Six that can be read, in six ways, and five that cannot."""
    rng = np.random.default_rng(1)
    picture = Image.fromarray(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8))
    picture.convert("CMYK").save(folder / "s_cmyk.jpg")
    picture.convert("L").save(folder / "s_grey.jpg")
    Image.fromarray(rng.integers(0, 65535, (50, 50), dtype=np.uint16)).save(folder / "s_16bit.png")
    picture.convert("RGBA").save(folder / "s_clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "s_turned.jpg", exif=exif)
    Image.new("RGB", (12_000, 9_000), "teal").save(folder / "s_huge.jpg", quality=30)
    (folder / "bad_empty.jpg").write_bytes(b"")
    (folder / "bad_text.jpg").write_text("hello")
    whole = (folder / "s_grey.jpg").read_bytes()
    (folder / "bad_cut.jpg").write_bytes(whole[: len(whole) // 3])
    (folder / "bad_png.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    (folder / "bad_head.jpg").write_bytes(b"\xff\xd8\xff" + os.urandom(300))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_flood_of_mixed_files(tmp_path):
    """150 photos of mixed sizes and strange kinds: all that can be read is explained, memory stays level."""
    folder = tmp_path / "photos"
    folder.mkdir()
    strange_files(folder)
    rng = random.Random(0)
    for i in range(150 - 11):
        photo(folder / f"p{i:03}.jpg", (rng.randrange(20, 900), rng.randrange(20, 900)), seed=i)
    plan = Plan(load(TINY), Explain(rectgrad.RectGrad(q=60)), tmp_path / "out")
    results, memory = {}, []

    def done(source, result):
        results[source.name] = result
        memory.append(resident())

    run_plan(plan, files.sources([str(folder)]), done)
    broken = sorted(name for name, result in results.items() if isinstance(result, Exception))
    assert broken == ["bad_cut", "bad_empty", "bad_head", "bad_png", "bad_text"]
    assert len(results) == 150
    assert abs(memory[149] - memory[49]) < 50
    assert len(list((tmp_path / "out").glob("*.png"))) == 145


def test_a_photo_that_goes_away_meanwhile_stops_nothing(tmp_path):
    """Photos are decoded ahead; what happens to the file after that does not matter."""
    for i in range(6):
        photo(tmp_path / "photos" / f"p{i}.png", seed=i)
    plan = Plan(load(TINY), Explain(rectgrad.RectGrad(q=60)), tmp_path / "out", batch_size=2)
    results = []

    def done(source, result):
        results.append(result)
        (tmp_path / "photos" / "p1.png").unlink(missing_ok=True)

    assert run_plan(plan, files.sources([str(tmp_path / "photos")]), done) == 6
    assert not any(isinstance(result, Exception) for result in results)


def test_broken_files_are_listed_and_the_status_is_1(run, tmp_path):
    folder = tmp_path / "photos"
    photo(folder / "good.png")
    (folder / "bad.jpg").write_text("hello")
    status, _, err = run("explain", "photos", "--model", TINY, "--q", "60", "--out", "r")
    assert status == 1
    assert re.search(r"rectgrad: photos/bad\.jpg: not an image", err)
    assert Path("r/good.png").exists()


def test_a_run_resumes_after_being_killed_at_any_moment(tmp_path):
    """SIGKILL at random moments: every visible file is whole, and the restarted run finishes the rest."""
    folder, out = tmp_path / "photos", tmp_path / "out"
    for i in range(40):
        photo(folder / f"p{i:02}.png", seed=i)
    command = [sys.executable, "-m", "rectgrad", "explain", str(folder), "--model", TINY]
    command += ["--q", "60", "--maps", "npz", "--batch-size", "2", "--out", str(out)]
    rng = random.Random(3)
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen = len(list(out.glob("*.json"))) if out.exists() else 0
        deadline = time.monotonic() + 60
        while (
            process.poll() is None and len(list(out.glob("*.json"))) <= seen and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in out.rglob("[!.]*"):
            whole(path)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "40 photos explained" in done.stdout
    assert {p.suffix for p in out.iterdir()} == {".png", ".json", ".npz", ".jsonl", ".html", ""}
    assert len([p for p in out.rglob("*") if p.is_file()]) == 4 * 40 + 2
    assert not list(out.rglob(".*"))
    assert (out / "index.html").read_text().count("<li ") == 40


def whole(path):
    """Fails on a file that is not complete."""
    if path.suffix == ".png":
        with Image.open(path) as picture:
            picture.load()
    elif path.suffix == ".npz":
        with np.load(path) as content:
            assert content["map"].shape == (3, 32, 32)
    elif path.suffix == ".jpg":
        with Image.open(path) as picture:
            picture.load()
    elif path.suffix in (".json", ".jsonl"):
        assert all(json.loads(line)["settings"] for line in path.read_text().splitlines())
    elif path.suffix == ".html":
        assert path.read_text().endswith("</html>\n")


def test_the_sample_photo_with_the_default_model(run):
    """What `make demo` does: the cat's eyes stand out, the background is empty."""
    status, out, _ = run("explain", "--maps", "npy", "--out", "demo")
    assert status == 0
    assert "tiger cat" in out
    path, specificity, next_step = out.splitlines()[-3:]
    assert path == "demo/chelsea.png"
    assert re.match(r"Specificity 0\.\d\d: this map looks nearly the same for any class", specificity)
    assert next_step.startswith("Next: ")
    assert "explain PHOTO --method rectgrad_gated" in next_step
    plane = np.load("demo/chelsea.npy").sum(0)
    assert plane.shape == (224, 224)
    eyes = plane[50:150, 25:120].sum() + plane[80:150, 160:224].sum()
    assert eyes > 0.9 * plane.sum()
    assert (plane == 0).mean() > 0.8


def test_a_full_disk_is_one_line_and_leaves_no_part(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "r/.a.png.part")

    monkeypatch.setattr(files, "save_picture", full)
    status, _, err = run("explain", photo(tmp_path / "a.png"), "--model", TINY, "--q", "60", "--out", "r")
    assert status == 2
    assert "No space left" in err
    assert len(err.splitlines()) == 1
    assert not Path("r").exists() or list(Path("r").iterdir()) == []


def test_another_photo_of_the_same_name_size_and_time_is_another_photo(run, tmp_path):
    cat = tmp_path / "cat.bmp"
    answers = []
    for seed in (0, 1):
        photo(cat, seed=seed)
        os.utime(cat, ns=(10**18, 10**18))
        answers.append(run("explain", cat, "--model", TINY, "--q", "60", "--out", "r", "--json")[1])
    first, second = map(json.loads, answers)
    assert first["top5"] != second["top5"]
    assert first["photo"] != second["photo"]


def test_a_result_names_the_weights_that_made_it():
    model = load(TINY)
    same = fingerprint(load(TINY))
    assert fingerprint(model) == same
    with torch.no_grad():
        model.module[0].weight[0, 0, 0, 0] += 1e-3
    assert fingerprint(model) != same
    assert fingerprint(replace(load(TINY), mean=(0.4, 0.5, 0.5))) != same
    assert fingerprint(replace(load(TINY), labels=["a", "b", "c", "d"])) != same
    buffered = load(TINY)
    buffered.module.register_buffer("shift", torch.zeros(()))
    assert fingerprint(buffered) != same


def test_other_weights_of_the_same_model_are_explained_again(tmp_path):
    photo(tmp_path / "cat.png")
    sources = files.sources([str(tmp_path / "cat.png")])
    plan = Plan(load(TINY), Explain(rectgrad.RectGrad(q=60)), tmp_path / "out")
    assert [run_plan(plan, sources, lambda *_: None) for _ in range(2)] == [1, 0]
    with torch.no_grad():
        plan.model.module[0].weight[0, 0, 0, 0] += 1e-3
    assert run_plan(plan, sources, lambda *_: None) == 1


def test_each_photo_has_its_own_result_whatever_it_is_called(run, tmp_path):
    listed = "a.jpg a.png a.jpg.png A.JPG n1/a.jpg a.png.bmp ä.png a\u0308.png a.json.png".split()
    listed += ["c.bmp", "c.png/d.png"]  # a folder named like the result of c.bmp
    for seed, name in enumerate(listed):
        photo(tmp_path / "photos" / name, seed=seed)
    common = ("explain", "photos", "--model", TINY, "--q", "60", "--out", "r")
    status, out, _ = run(*common, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert (status, len(records)) == (0, len(listed))
    for record in records:
        with open(record["image"], "rb") as file:
            assert record["photo"] == files.digest(file)
        assert json.loads(Path("r", record["picture"][:-4] + ".json").read_text()) == record
    assert len({record["picture"].lower() for record in records}) == len(records)
    assert Path("r/n1/a.json").exists()
    _, out, _ = run(*common)
    assert f"{len(records)} photos explained, {len(records)} of them in an earlier run" in out


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_names_that_are_not_utf8_and_names_that_are_very_long(run, tmp_path):
    photo(tmp_path / "photos" / "good.png")
    os.rename(tmp_path / "photos" / "good.png", os.fsencode(tmp_path / "photos") + b"/\xff\xfe.png")
    photo(tmp_path / "photos" / ("x" * 250 + ".png"), seed=1)
    status, out, _ = run("explain", "photos", "--model", TINY, "--q", "60", "--out", "r")
    assert status == 0
    assert "2 photos explained" in out
    assert len(Path("r/explained.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_a_low_specificity_comes_with_a_caution_everywhere(run, tmp_path):
    photo(tmp_path / "photos" / "a.png")
    photo(tmp_path / "photos" / "b.png", seed=3)
    common = ("explain", "photos", "--model", "cifar10_cnn", "--out", "r")
    _, out, _ = run(*common, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    low = [record for record in records if record["specificity"] < 0.3]
    assert len(low) == 1
    assert all("use rectgrad_gated" in record["caution"] for record in low)
    assert all(record["caution"] == "" for record in records if record not in low)
    _, out, _ = run(*common)
    assert f"below 0.3 for {len(low)} of 2" in out
    assert "Such a map looks nearly the same for any class" in out
    page = Path("r/index.html").read_text()
    assert page.count('class="low"') == len(low)
    assert "Such a map looks nearly the same for any class" in page
    _, out, _ = run(*common, "--no-specificity", "--json")
    assert json.loads(out.splitlines()[0])["specificity"] is None


def test_a_warning_is_in_the_record_and_the_page_not_on_the_terminal(run, tmp_path):
    photo(tmp_path / "photos" / "a.png")
    photo(tmp_path / "photos" / "b.png", seed=3)
    status, out, err = run("explain", "photos", "--model", TINY, "--out", "r", "--tau", "1e9")
    assert (status, [line for line in err.splitlines() if "explaining" not in line]) == (0, [])
    first, second = map(json.loads, Path("r/explained.jsonl").read_text().splitlines())
    assert first["warnings"][0].startswith("the map is zero: layer '3'")  # the photo, not "sample 0"
    assert first["specificity"] is second["specificity"] is None
    assert second["notes"][0] == "Specificity –: the map is zero."
    assert "passed nothing above tau" in second["warnings"][0]
    assert "2 with warnings" in out
    assert Path("r/index.html").read_text().count('class="warning"') == 2


def test_a_single_output_has_no_confidence(run, tmp_path):
    model = f"{FILE}:no_function"  # a network in the file is as good as a function that returns one
    status, out, _ = run("explain", photo(tmp_path / "a.png"), "--model", model, "--method", "saliency")
    assert (status, "nan" in out) == (0, False)
    record = json.loads(Path("explained/a.json").read_text(), parse_constant=pytest.fail)
    assert record["target"] == {"index": 0, "name": "output", "confidence": None}
    page = Path("explained/index.html").read_text()
    assert 'data-confidence=""' in page
    assert "confidence <b>–</b>" in page


def test_the_next_step_is_about_the_same_model_and_class(run, tmp_path):
    common = (photo(tmp_path / "a b.png"), "--model", TINY, "--target", "blue bird")
    _, out, _ = run("explain", *common, "--q", "60")
    command = out.splitlines()[-1].partition("  (")[0].partition(" rectgrad ")[2] or out.splitlines()[-1]
    for part in (f"--model {shlex.quote(TINY)}", "--target 'blue bird'", "a b.png'"):
        assert part in command


def test_an_error_names_the_file_that_was_to_be_written(run, tmp_path):
    (tmp_path / "r" / "a.png").mkdir(parents=True)
    status, _, err = run("explain", photo(tmp_path / "a.png"), "--model", TINY, "--q", "60", "--out", "r")
    assert status == 2
    assert err.strip().endswith("r/a.png")


def test_overlay_or_map_alone_and_smoothed(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    drawn = {}
    for options in ((), ("--only", "map"), ("--only", "overlay"), ("--only", "overlay", "--smooth")):
        run("explain", cat, "--model", TINY, "--q", "60", "--out", "r", *options)
        with Image.open("r/cat.png") as picture:
            drawn[options] = np.asarray(picture.convert("RGB")).astype(float)
    everything, map_alone, overlay, smoothed = drawn.values()
    assert overlay.shape[1] < map_alone.shape[1] < everything.shape[1] / 2
    assert smoothed.shape == overlay.shape
    assert not np.array_equal(smoothed, overlay)
    with pytest.raises(ValueError, match="'map' or 'overlay'"):
        rectgrad.explain(cat, TINY, q=60).show(only="photo")
