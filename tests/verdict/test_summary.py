"""benchmarks/verdicts_summary.py: one table from the verdicts of several networks."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rectgrad.verdict import record

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verdicts_summary.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("verdicts_summary", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(a, b, better, measure="road"):
    numbers = dict.fromkeys(("difference", "low", "high", "p", "holm"), 0.5)
    return {"measure": measure, "a": a, "b": b, **numbers, "n": 9, "better": better, "photos_needed": None}


def verdict(folder, name, means, pairs, answer):
    (folder / name).mkdir()
    cells = {row: {"mean": mean, "low": 0.0, "high": 1.0, "n": 9} for row, mean in means.items()}
    given = {
        "model": "cifar10_cnn",
        "photos": {"n": 9},
        "table": {"road": cells, "gini": {"rectgrad": cells["rectgrad"]}},
        "pairs": pairs,
        "answers": {"where": answer},
        "matched": {},
        "digests": {"weights": name[-1] * 4},
        "environment": {"commit": "abc"},
    }
    path = folder / name / "verdict.json"
    path.write_text(record.text(given))
    return path


@pytest.fixture
def paths(tmp_path):
    first = verdict(
        tmp_path,
        "cnn-0",
        {"saliency": 0.2, "rectgrad": 0.5, "edges": 0.1},
        [pair("saliency", "rectgrad", "rectgrad"), pair("rectgrad", "edges", "rectgrad")],
        ["rectgrad"],
    )
    second = verdict(
        tmp_path,
        "cnn-1",
        {"saliency": 0.4, "rectgrad": 0.3},
        [pair("saliency", "rectgrad", "saliency"), pair("saliency", "rectgrad", None, "gini")],
        "inconclusive",
    )
    return [first, second]


def test_mean_range_and_wins_over_networks(script, paths):
    found = script.summary(paths)
    assert found["model"] == "cifar10_cnn"
    assert found["table"] == {
        "road": {
            "saliency": {"mean": 0.3, "low": 0.2, "high": 0.4, "networks": 2, "better": 1, "worse": 1},
            "rectgrad": {"mean": 0.4, "low": 0.3, "high": 0.5, "networks": 2},
            "edges": {"mean": 0.1, "low": 0.1, "high": 0.1, "networks": 1, "better": 0, "worse": 1},
        },
        "gini": {"rectgrad": {"mean": 0.4, "low": 0.3, "high": 0.5, "networks": 2}},
    }
    assert found["networks"] == {
        "cnn-0": {"weights": "0000", "photos": 9, "commit": "abc", "answers": {"where": ["rectgrad"]}},
        "cnn-1": {"weights": "1111", "photos": 9, "commit": "abc", "answers": {"where": "inconclusive"}},
    }


def test_the_command_writes_and_prints_the_table(script, paths, tmp_path, monkeypatch, capsys):
    out = tmp_path / "summary.json"
    monkeypatch.setattr(sys, "argv", ["verdicts_summary", *map(str, paths), "--json", str(out)])
    script.main()
    assert json.loads(out.read_text()) == script.summary(paths)
    assert "rectgrad               0.400 (0.300 to 0.500)" in capsys.readouterr().out
