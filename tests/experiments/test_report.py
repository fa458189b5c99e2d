"""Every experiment runs from start to report: figures with captions, tables, findings; one page, offline."""

import json
import re
from html.parser import HTMLParser

import pytest

from rectgrad import data
from rectgrad.experiments import EXPERIMENTS, lab, maps, sheets
from rectgrad.experiments.report import report
from rectgrad.experiments.reproduce import experiment, reproduce
from small_gallery import SMALL, small_gallery

NUMBERS = {
    "images": 12, "seeds": 1, "per_class": 2, "steps": 2, "trials": 2, "shown": 2, "networks": 1, "draws": 1,
    "q": 74, "eps": 0.3, "changed_at_most": 6, "methods": ["random", "rectgrad", "saliency"],
    "fractions": [0.1, 0.9], "retraining": {"pictures": 100, "epochs": 1},
}  # fmt: skip
FEW = ("saliency", "deconv", "guided_backprop", "deeplift", "rectgrad", "rectgrad_prr")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All experiments on a small dataset, with few methods, and the report."""
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(data.DATASETS, "shapes", lambda: SMALL)
        patch.setitem(lab.EPOCHS, "shapes", 4)
        patch.setattr(lab, "gallery", lambda *given: (small_gallery(), []))
        for name in EXPERIMENTS:
            module = experiment(name)
            used = {key: NUMBERS[key] for key in module.PRESETS["quick"]}
            levels = {"q": [0, 20, 50, 80, 99]} if name == "threshold" else {}
            patch.setitem(module.PRESETS, "quick", {**used, **levels})
            if hasattr(module, "COMPARED"):
                patch.setattr(module, "COMPARED", FEW)
            if name == "sanity":
                patch.setattr(module, "METHODS", FEW)
        patch.setattr(maps, "COMPARED", FEW)
        patch.setattr(sheets.methods, "__defaults__", (FEW,))
        for name in EXPERIMENTS:
            reproduce(name, out=out)
        report(out)
    return out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_from_start_to_end(name, folder):
    module = experiment(name)
    record = json.loads((folder / "shapes" / f"{name}.json").read_text())
    json.dumps(record["metrics"], allow_nan=False)  # any reader of JSON takes it
    keys = [figure.removeprefix(name).removeprefix("-").removesuffix(".png") for figure in record["figures"]]
    assert set(keys) <= set(module.CAPTIONS)
    for figure in record["figures"]:
        assert (folder / "shapes" / figure).stat().st_size > 500
    for table in module.tables(record["metrics"]):
        assert all(len(row) == len(table.head) for row in table.rows)
    for finding in module.findings(record["metrics"]):
        assert finding.holds in (True, False, None)
        assert finding.claim.endswith(".")
        assert re.search(r"\d|cannot", finding.because)
    assert not list((folder / "shapes").glob(".*"))


def test_the_page_is_whole_and_needs_no_network(folder):
    page = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not re.search(r"https?://", page)
    pictures = [attrs for tag, attrs in tags.found if tag == "img"]
    assert len(pictures) == len(list((folder / "shapes").glob("*.png")))
    for attrs in pictures:
        assert (folder / attrs["src"]).exists()
        assert len(attrs["alt"]) > 30
    anchors = {attrs["id"] for tag, attrs in tags.found if "id" in attrs}
    assert anchors == {f"shapes-{name}" for name in EXPERIMENTS}
    assert {
        attrs["href"][1:] for tag, attrs in tags.found if tag == "a" and attrs["href"][0] == "#"
    } == anchors


def test_the_papers_numbers_stand_beside_ours(folder):
    page = (folder / "report.html").read_text()
    assert "0.746" in page
    assert "0.731" in page
    assert page.count("The paper: ") == len(EXPERIMENTS)


def test_a_missing_figure_is_drawn_again_and_nothing_computed(folder, monkeypatch):
    """Also what a run without figures leaves: the record stays as it was made."""
    module = experiment("feature-frequency")
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    monkeypatch.setitem(lab.EPOCHS, "shapes", 4)
    monkeypatch.setitem(module.PRESETS, "quick", {"per_class": 2})
    monkeypatch.setattr(module, "run", None)
    path = folder / "shapes" / "feature-frequency.json"
    before, figure = json.loads(path.read_text()), path.with_suffix(".png")
    figure.unlink()
    assert reproduce("feature-frequency", out=folder) == path
    assert figure.exists()
    assert json.loads(path.read_text()) == before


def test_agreement_with_other_implementations_is_shown(folder):
    found = {
        "against": "Captum",
        "float64_largest": 1e-15,
        "float32_median": 2e-7,
        "float32_largest": 3e-2,
        "n": 100,
    }
    (folder / "shapes" / "agreement.json").write_text(
        json.dumps({"dataset": "shapes", "agreement": {"deeplift": found}})
    )
    page = report(folder).read_text()
    assert "Agreement with other implementations on 100 shapes images" in page
    assert "3.0e-02" in page
