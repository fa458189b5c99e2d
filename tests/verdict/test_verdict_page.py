"""The command, and the page it writes."""

import json
import re
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectgrad import cli
from rectgrad.verdict import presets
from rectgrad.verdict.page.leaderboard import leaderboard
from rectgrad.verdict.page.measure_cards import number
from rectgrad.verdict.record import read

TINY = f"{Path(__file__).parents[1] / 'tiny_model.py'}:tiny"
COUNTS = {
    "photos": 6,
    "evaluated": 4,
    "repeated": 2,
    "costly": 4,
    "costly_repeated": 2,
    "matched": 2,
    "chunk": 4,
}
SMALL = replace(presets.PRESETS["quick"], **COUNTS, steps=3, draws=1, stages=2, subsets=3, squares=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five photos, one file that is none, and masks."""
    here, random = tmp_path_factory.mktemp("judge"), np.random.default_rng(0)
    for name in ("photos", "masks"):
        (here / name).mkdir()
    for i in range(5):
        values = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(values).resize((32, 32)).save(here / "photos" / f"{i}.png")
        mask = np.zeros((32, 32), dtype=np.uint8)
        mask[8:24, 8:24] = 255
        Image.fromarray(mask).save(here / "masks" / f"{i}.png")
    (here / "photos" / "broken.jpg").write_text("no photo")
    (here / "few").mkdir()
    Image.new("L", (32, 32)).save(here / "few" / "0.png")
    return here


@pytest.fixture(scope="module")
def call(folder):
    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(presets.PRESETS, "quick", SMALL)
            patch.setattr(presets.Preset, "enough", lambda self, rows, measures: self)
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["rectgrad", "judge", *arguments])
            with pytest.raises(SystemExit) as stopped:
                cli.main()
        return stopped.value.code

    return run


@pytest.fixture(scope="module")
def status(call):
    return call(
        "photos", "--model", TINY, "--methods", "saliency,rectgrad", "--masks", "masks", "--out", "out"
    )


@pytest.fixture(scope="module")
def record(status, folder):
    return read(folder / "out" / "verdict.json")


@pytest.fixture(scope="module")
def page(status, folder):
    return (folder / "out" / "verdict.html").read_text()


def test_files_and_status(status, folder, record):
    assert status == 1  # one of several photos could not be read
    assert {path.name for path in (folder / "out").iterdir()} == {"verdict.html", "verdict.json", "parts"}
    assert [each["what"] for each in record["failures"] if each["kind"] == "photo"] == ["broken"]
    assert record["photos"]["n"] == 5
    assert {"inside", "pointing_game"} <= set(record["table"])


def test_numbers_have_no_negative_zero():
    assert [number(value) for value in (-0.0001, -0.0006, 0.25, None)] == ["0.000", "-0.001", "0.250", "–"]


def test_the_page_has_every_row_and_number(record, page):
    rows = [*record["methods"], *record["controls"]]
    board = page[page.index("<h2>Leaderboard") : page.index("<h2>What these numbers do not")]
    assert re.findall(r"<b>(.*?)</b>", board) == record["ranks"]["order"]
    assert sorted(record["ranks"]["order"]) == sorted(rows)
    for name, cells in record["table"].items():
        start = page.index(f"<h4>{record['measures'][name]['title']} ")
        card = page[start : page.index("</article>", start)]
        for row, cell in cells.items():
            line = re.search(rf"<th>{row}</th>(.*?)</tr>", card, re.DOTALL)[1]
            shown = re.findall(r"<td>([^<]*)</td>", line)
            interval = f"{number(cell['low'])} to {number(cell['high'])}"
            assert shown == [number(cell["mean"]), interval, f"n {cell['n']}"]
    for claim in record["claims"]:
        assert claim in unescape(page)
    assert "not an image, or not in a supported format" in page


def test_the_page_says_next_to_a_question_that_photos_are_too_few(record, page):
    said = [each for each in record["failures"] if each["kind"] == "question"]
    assert '"where"' in [each["what"] for each in said]
    answers = page[page.index("<h2>Which method for which question") : page.index("<h2>Leaderboard")]
    assert all(each["why"] in answers for each in said)
    assert "Not shown: that any method is better than all controls." in answers
    assert page.count(said[0]["why"]) == len([each for each in said if each["why"] == said[0]["why"]])


def test_checks_of_few_photos_are_values_without_a_yes_or_no(record):
    def board(n):
        cells = {"saliency": {"mean": 0.123, "low": 0.1, "high": 0.2, "n": n}}
        table = {**record["table"], "specificity": cells, "randomisation_last": {}}
        line = re.search(r"<b>saliency</b>.*?</tr>", leaderboard({**record, "table": table}), re.DOTALL)[0]
        return re.sub(r"<[^>]*>", " ", line).split("lost")[-1]

    assert "0.12, n 5" in board(5)
    assert not re.search(r"\b(yes|no)\b", board(5))
    assert re.search(r"no +0.12", board(6))


def test_the_page_needs_nothing_else(page):
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page)
    assert "<script" not in page
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)


def test_pairs_tell_how_many_photos_are_needed(record):
    pair = next(each for each in record["pairs"] if each["measure"] == "deletion_blur")
    assert set(pair) >= {"a", "b", "difference", "low", "high", "n", "p", "holm", "better", "photos_needed"}
    assert pair["holm"] >= pair["p"]


def test_json(call, folder, capsys):
    status = call("photos/0.png", "photos/1.png", "photos/2.png", "--model", TINY, "--methods", "gradcam",
                  "--measures", "gini,specificity", "--seed", "3", "--out", "other", "--json")  # fmt: skip
    printed = json.loads(capsys.readouterr().out)
    assert status == 0
    assert printed == json.loads((folder / "other" / "verdict.json").read_text())
    assert set(printed["table"]) == {"gini", "specificity", "specificity_floor"}
    assert printed["seed"] == 3


def test_what_the_code_of_a_model_prints_is_not_in_the_json(call, capsys):
    chatty = TINY.replace(":tiny", ":chatty")
    assert call("photos/0.png", "--model", chatty, "--methods", "saliency",
                "--measures", "gini", "--out", "chatty", "--json") == 0  # fmt: skip
    printed = capsys.readouterr()
    assert json.loads(printed.out)["photos"]["n"] == 1
    assert {"factory", "forward"} <= set(printed.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["photos", "--preset", "slow"], "--preset must be quick or full, not 'slow'"),
        (["photos", "--engine", "spark"], "--engine must be local or ray"),
        (["photos", "--methods", "magic"], "unknown method 'magic'"),
        (["photos", "--measures", "beauty"], "unknown measure 'beauty'"),
        (["nowhere"], "no such file, folder or pattern"),
        (["photos", "--masks", "few", "--methods", "saliency"], "no mask for '1'"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line(call, folder, capsys, arguments, said):
    assert call(*arguments, *(["--model", TINY, "--out", "bad"] if arguments else [])) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert not (folder / "bad" / "verdict.json").exists()
