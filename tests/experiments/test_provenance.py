"""What a result is keyed by: settings, the code that computes it, and the data. Records of earlier versions
are listed, not read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import rectgrad
from rectgrad import data
from rectgrad.bench import environment
from rectgrad.data import Dataset, shapes
from rectgrad.experiments import claims, lab, parts
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.parts import Parts
from rectgrad.experiments.report import report
from rectgrad.experiments.reproduce import reproduce

SMALL = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(40, 1), shapes.generate(20, 2))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package's source, which a test may change."""
    copied = tmp_path / "package"
    ignored = shutil.ignore_patterns("*.so", "*.safetensors", "__pycache__")
    shutil.copytree(Path(rectgrad.__file__).parent, copied, ignore=ignored)
    monkeypatch.setattr(rectgrad, "__file__", str(copied / "__init__.py"))
    environment.code_digest.cache_clear()
    yield copied
    environment.code_digest.cache_clear()


def changed(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")
    environment.code_digest.cache_clear()


def test_a_digest_of_code_changes_with_its_files_only(package):
    before = environment.code_digest()
    assert before == environment.code_digest()
    changed(package / "app" / "__init__.py")
    assert environment.code_digest() == before
    changed(package / "rules" / "rectified.py")
    after = environment.code_digest()
    assert after != before
    with_training = environment.code_digest("training.py", "data")
    changed(package / "training.py")
    assert environment.code_digest() == after
    assert environment.code_digest("training.py", "data") != with_training


def test_a_renamed_file_is_other_code(package):
    before = environment.code_digest()
    (package / "rules" / "rectified.py").rename(package / "rules" / "rectified_units.py")
    environment.code_digest.cache_clear()
    assert environment.code_digest() != before


@pytest.mark.parametrize(
    ("file", "matters"),
    [
        ("experiments/noise_level.py", True),
        ("experiments/matched.py", True),
        ("verdict/matched.py", True),
        ("verdict/rows.py", True),
        ("metrics/maps.py", True),
        ("kernels/native/conv.c", True),
        ("kernels/native/rectgrad.h", True),
        ("many/train.py", True),
        ("data/shapes.py", True),
        ("experiments/patch.py", False),
        ("experiments/report.py", False),
        ("experiments/markup.py", False),
        ("app/server.py", False),
    ],
)
def test_a_result_depends_on_its_own_code(file, matters, package, tmp_path):
    work = Lab("noise-level", "shapes", "quick", {}, tmp_path)
    before = work.code
    changed(package / file)
    assert (work.code != before) is matters


def test_parts_of_other_code_or_other_images_are_not_used(package, tmp_path, monkeypatch):
    def fresh() -> Parts:
        return Lab("noise-level", "shapes", "quick", {}, tmp_path).parts

    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    fresh().keep("a", 1)
    assert fresh().known("a") == 1
    other = replace(SMALL, test=shapes.generate(20, 9))
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: other)
    assert fresh().known("a") is None
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    assert fresh().known("a") == 1
    changed(package / "experiments" / "noise_level.py")
    assert fresh().known("a") is None


def test_other_weights_are_noticed(tmp_path):
    kept = Parts(tmp_path, {})
    kept.same("weights", "abc")
    kept.same("weights", "abc")
    with pytest.raises(ValueError, match="weights: xyz now, abc when"):
        kept.same("weights", "xyz")


def test_seconds_are_counted_over_all_starts(tmp_path, monkeypatch):
    """Of each start until its last part; the pause before the next start is not counted."""
    now = [0.0]
    monkeypatch.setattr(parts.time, "time", lambda: now[0])
    monkeypatch.setattr(parts.time, "time_ns", lambda: int(now[0] * 1e9))
    kept = Parts(tmp_path, {})
    for moment, make in ((100, kept.start), (110, lambda: kept.keep("a", 1)), (500, kept.start)):
        now[0] = float(moment)
        make()
    now[0] = 530.0
    assert kept.seconds() == pytest.approx(10 + 30)


# Records of earlier versions


def record_of(name: str, **more) -> dict:
    return {
        "experiment": name,
        "dataset": "shapes",
        "preset": "quick",
        "metrics": {"of another form": 1},
        "figures": [f"{name}.png", f"{name}-forgotten.png"],
        "notes": [],
        **more,
    }


def test_a_record_of_an_earlier_version_is_listed(tmp_path):
    folder = tmp_path / "shapes"
    folder.mkdir()
    for name in ("patch", "roar-kar"):
        (folder / f"{name}.json").write_text(json.dumps(record_of(name)))
    page = report(tmp_path).read_text()
    for name in ("patch", "roar-kar"):
        text = (
            "shapes, preset quick: made by an earlier version, so its numbers and figures are left out; to "
            f"run it again: rectgrad reproduce {name} --dataset shapes --preset quick."
        )
        assert f"<p>{text}</p>" in page
    assert "<img" not in page


def test_the_records_in_the_repository_make_a_report(tmp_path):
    folder = Path(__file__).parents[2] / "results"
    copied = tmp_path / "results"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("bench", "verdicts", "*.html"))
    records = [json.loads(path.read_text()) for path in copied.glob("*/*.json")]
    measured = [each for each in records if "metrics" in each]
    assert len(measured) > 20
    page = report(copied).read_text()
    assert page.count("made by an earlier version") == sum("code" not in each for each in measured)
    assert page.count("Numbers and provenance") == sum("code" in each for each in measured)


def test_a_record_of_an_earlier_version_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RECTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    monkeypatch.setitem(lab.EPOCHS, "shapes", 1)
    monkeypatch.setitem(claims.PRESETS, "quick", {"networks": 1, "images": 2})
    path = reproduce("claims", out=tmp_path)
    made = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in made.items() if k != "code"} | {"metrics": {}}))
    again = json.loads(reproduce("claims", out=tmp_path).read_text())
    assert again["metrics"] == made["metrics"]
    assert again["code"] == made["code"]
