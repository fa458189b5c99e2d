"""Every experiment runs from start to report: figures with captions, tables, findings; one page, offline."""

import base64
import html
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from rectgrad import data, many
from rectgrad.data import Dataset, shapes
from rectgrad.experiments import EXPERIMENTS, lab, maps, markup, matched, sheets, summary
from rectgrad.experiments import report as pages
from rectgrad.experiments.findings import VERDICTS, Finding, corrected
from rectgrad.experiments.report import report
from rectgrad.experiments.reproduce import experiment, reproduce
from rectgrad.methods.catalog import METHODS
from small_gallery import small_gallery, tinted

NUMBERS = {
    "images": 14, "per_class": 4, "matched": 8, "photo_count": 2, "steps": 2, "trials": 1, "shown": 2,
    "q": 74, "networks": 1, "eps": 0.3, "methods": ["random", "rectgrad", "smoothgrad"], "road": 8,
    "fractions": [0.1, 0.9], "seeds": 1, "retraining": {"pictures": 20, "epochs": 1},
    "blurred": ["random", "rectgrad"], "ties": ["ties by distance"], "swapped": ["rectgrad"],
    "samples": {"smoothgrad": [3]},
}  # fmt: skip
SMALL = Dataset("shapes", tuple(shapes.CLASSES), tinted(80, 1), tinted(40, 2))
FEW = ("saliency", "deconv", "guided_backprop", "deeplift", "rectgrad", "rectgrad_prr")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All experiments on a small dataset, with few methods and two networks, and the report."""
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(data.DATASETS, "shapes", lambda: SMALL)
        patch.setitem(lab.EPOCHS, "shapes", 4)
        patch.setitem(lab.NETWORKS, "quick", 2)
        patch.setattr(sys.modules[many.train.__module__], "THREADS", 1)
        patch.setattr(lab, "gallery", lambda *given: (small_gallery(), []))
        for name in EXPERIMENTS:
            module = experiment(name)
            used = {key: NUMBERS[key] for key in module.PRESETS["quick"]}
            levels = {"q": [0, 20, 50, 80, 99]} if name == "threshold" else {}
            patch.setitem(module.PRESETS, "quick", {**used, **levels})
            if hasattr(module, "COMPARED"):
                patch.setattr(module, "COMPARED", FEW)
        patch.setitem(METHODS, "smoothgrad", replace(METHODS["smoothgrad"], samples=2))
        patch.setattr(experiment("sanity"), "METHODS", ("saliency", "rectgrad"))
        patch.setattr(experiment("class-sensitivity"), "LEVELS", (50, 98))
        patch.setattr(matched, "COMPARED", ("saliency", "deeplift", "rectgrad"))
        patch.setattr(maps, "COMPARED", FEW)
        patch.setattr(sheets.methods, "__defaults__", (FEW,))
        for name in EXPERIMENTS:
            reproduce(name, out=out)
        report(out)
    return out


def record_of(folder, name):
    return json.loads((folder / "shapes" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_from_start_to_end(name, folder):
    module, record = experiment(name), record_of(folder, name)
    json.dumps(record["metrics"], allow_nan=False)  # any reader of JSON takes it
    keys = {re.sub(rf"^{name}-?|\.(webp|svg)$", "", figure) for figure in record["figures"]}
    assert keys == set(module.CAPTIONS)
    for figure in record["figures"]:
        assert (folder / "shapes" / figure).stat().st_size > 500
    for table in module.tables(record["metrics"]):
        assert all(len(row) == len(table.head) for row in table.rows)
    for finding in module.findings(record["metrics"]):
        assert finding.holds in (True, False, None)
        assert finding.claim.endswith(".")
        assert re.search(r"\d|cannot|undefined", finding.because)
        assert "nan" not in finding.because
    assert not list((folder / "shapes").glob(".*"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_is_whole(name, folder):
    record = record_of(folder, name)
    assert record["settings"]["preset"] == record["preset"] == "quick"
    assert len(record["code"]) == 16
    assert {"train", "test"} <= set(record["data"])
    assert 0 < record["accuracy"] <= 1
    assert record["seconds"] >= 0
    used = {key for key in record["weights"] if key.startswith("standard")}
    one = name in ("feature-maps",)
    assert used == {"standard, seed 0"} | (set() if one else {"standard, seed 1"})
    assert ("patch, seed 1" in record["weights"]) == (name == "patch")
    assert ("tiny" in record["weights"]) == getattr(experiment(name), "PHOTOS", False)


def test_the_page_is_whole_and_needs_no_network(folder):
    page = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    written = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link|<iframe", written)
    for tag, attrs in tags.found:
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            assert key not in attrs or attrs[key].startswith(("data:", "#")), (tag, key)
    pictures = [attrs for tag, attrs in tags.found if tag == "img"]
    figures = [figure for name in EXPERIMENTS for figure in record_of(folder, name)["figures"]]
    assert len(pictures) == len(figures)
    for attrs in pictures:
        kind, content = re.fullmatch(r"data:image/(svg\+xml|webp);base64,(.+)", attrs["src"]).groups()
        content = base64.b64decode(content)
        if kind == "webp":
            Image.open(io.BytesIO(content)).load()
        else:
            assert content.rstrip().endswith(b"</svg>")
            assert not re.search(rb'href="(?!#|data:)', content)  # nothing outside the file
        assert len(attrs["alt"]) > 30
    anchors = {attrs["id"] for tag, attrs in tags.found if "id" in attrs}
    assert anchors == set(EXPERIMENTS)
    assert {attrs["href"][1:] for tag, attrs in tags.found if tag == "a"} == anchors


def test_every_finding_is_on_the_page_and_corrected(folder):
    """In the picture of squares, in the table of claims, and in its section with the numbers."""
    page = html.unescape((folder / "report.html").read_text())
    every = [f for name in EXPERIMENTS for f in experiment(name).findings(record_of(folder, name)["metrics"])]
    after = corrected(every)
    assert any(f.p is not None for f in every)
    assert page.count("<rect ") == len(every)
    for found in after:
        assert f"<title>{VERDICTS[found.holds]}: {found.claim}</title>" in page
        assert page.count(f"<td>{found.claim}</td>") == 2
        assert found.because in page
    assert [markup.CLASS_OF[f.holds] for f in after] == re.findall(r'<rect class="(\w+)"', page)


def test_squares_of_two_datasets_do_not_overlap():
    many = [Finding(f"claim {i}.", None, "") for i in range(30)]
    drawn = summary.figure({"patch": {"cifar10": many, "shapes": many[:3]}}, ["cifar10", "shapes"])
    x = [int(at) for at in re.findall(r'<rect class="open" x="(\d+)"', drawn)]
    assert len(set(x)) == 33
    assert max(x[:30]) + summary.SIZE < min(x[30:])
    assert max(x) + summary.SIZE <= int(re.search(r'viewBox="0 0 (\d+)', drawn)[1])


def test_the_papers_numbers_stand_beside_ours(folder):
    page = (folder / "report.html").read_text()
    assert "0.746" in page
    assert "0.731" in page
    assert "0.5385" in page
    assert page.count("The paper: ") == len(EXPERIMENTS)


def test_networks_that_learned_nothing_are_no_result(folder, monkeypatch):
    monkeypatch.setattr(pages, "LOWEST", 1.01)
    page = pages.page(folder, pages._records(folder))
    assert page.count("only, so their maps are no result and are not shown.</p>") == len(EXPERIMENTS)
    assert "<img" not in page
    assert "<rect " not in page


def test_a_missing_figure_is_drawn_again_and_nothing_computed(folder, monkeypatch):
    """Also what a run without figures leaves: the record stays as it was made."""
    module = experiment("feature-frequency")
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    monkeypatch.setitem(lab.EPOCHS, "shapes", 4)
    monkeypatch.setitem(module.PRESETS, "quick", {"per_class": NUMBERS["per_class"]})
    monkeypatch.setattr(module, "run", None)
    path = folder / "shapes" / "feature-frequency.json"
    before, figure = json.loads(path.read_text()), path.with_suffix(".svg")
    drawn = figure.read_bytes()
    figure.unlink()
    assert reproduce("feature-frequency", out=folder) == path
    assert figure.read_bytes() == drawn
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
