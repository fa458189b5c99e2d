"""The examples run as a person would run them, and what they print is what they promise."""

import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def printed(capsys):
    """What an example prints. The random state and the warning filters stay as they were."""

    def run(name: str) -> str:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern: str, text: str) -> list[float]:
    """Every number that `pattern` finds; at least one."""
    found = [float(value) for value in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in:\n{text}"
    return found


def number(pattern: str, text: str) -> float:
    (found,) = numbers(pattern, text)
    return found


def test_signal_1d(printed):
    text = printed("signal_1d")
    assert number(r"accuracy: ([\d.]+)", text) > 0.95
    share, plain = number(r"on the pattern: ([\d.]+)", text), number(r"plain gradient: ([\d.]+)", text)
    assert share > 0.9
    assert share > plain + 0.2
    pattern, drawn = re.search(r"pattern (\S+)\n +map (\S+)", text).groups()
    assert len(pattern) == len(drawn) == 128
    assert pattern[drawn.index("█")] == "█"


def test_volume_3d(printed):
    text = printed("volume_3d")
    assert number(r"accuracy: ([\d.]+)", text) > 0.95
    share, plain = number(r"on the object: ([\d.]+)", text), number(r"plain gradient: ([\d.]+)", text)
    assert share > 0.7
    assert share > plain + 0.3
    assert "inside the object" in text


def test_tabular(printed):
    text = printed("tabular")
    assert number(r"accuracy: ([\d.]+)", text) > 0.95
    assert "q=98: 200 of 200 maps are zero" in text
    assert re.search(r"warning: .*layer '\d' with 16 units passed nothing at q=98", text)
    q, zero = re.findall(r"^q=([\d.]+): (\d+) of 200 maps are zero$", text, re.MULTILINE)[-1]
    assert float(q) == numbers(r"passes one unit is ([\d.]+)", text)[-1]
    assert zero == "0"
    assert number(r"share of income and debt: ([\d.]+)", text) > 0.7


def test_text(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = printed("text")
    assert min(numbers(r"accuracy: ([\d.]+)", text)) > 0.95
    assert number(r"word of opinion has the highest score: ([\d.]+)", text) > 0.95
    assert number(r"score of padding: ([\d.e-]+)", text) == 0
    assert number(r"subject has a higher score than the other noun: ([\d.]+)", text) > 0.95
    strongest = re.findall(r"\x1b\[48;2;109;7;18;38;2;255;255;255m(\w+)\x1b\[0m", text)  # the darkest red
    words, page = set(strongest), (tmp_path / "words.html").read_text()
    assert len(strongest) == page.count("background: rgb(109,7,18)") == 8
    assert all(f">{word}</span>" in page for word in words)
    assert words <= set("lovely brilliant moving dull tedious clumsy".split()) | {
        f"{noun}{end}" for noun in ("key", "coin", "letter", "book") for end in ("", "s")
    }


def test_segmentation(printed):
    text = printed("segmentation")
    assert number(r"right class: ([\d.]+)", text) > 0.97
    for name, other in ("disc", "cross"), ("cross", "disc"):
        line = re.search(f"why {name}: .*", text)[0]
        assert number(rf"([\d.]+) on the {name}", line) > 0.75
        assert number(rf"([\d.]+) on the {other}", line) < 0.1


def test_detection(printed):
    text = printed("detection")
    assert min(numbers(r"score ([\d.]+)", text)) > 0.9
    own, other = numbers(r"in it: ([\d.]+)", text), numbers(r"in the other: ([\d.]+)", text)
    assert len(own) == len(other) == 2
    assert min(own) > 0.75
    assert max(other) < 0.05
    for true, found in re.findall(r"square at \[(.*)\]: found at \[(.*)\]", text):
        pairs = zip(true.split(","), found.split(","), strict=True)
        assert all(abs(int(a) - int(b)) <= 3 for a, b in pairs)


def test_data_parallel(printed):
    text = printed("data_parallel")
    assert number(r"largest value ([\d.]+)", text) > 0
    for form in "nn.DataParallel", "torch.compile", "torch.fx.symbolic_trace", "torch.export":
        assert number(rf"{re.escape(form)}: largest difference ([\d.e+-]+)", text) < 1e-6
    assert re.search(r"torch\.jit\.script: refused\n  RectGrad cannot explain .* scripted module", text)


def test_every_example_is_listed_and_tested():
    listed = re.findall(r"^- \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(listed) == there
    assert {f"test_{name}" for name in there} <= set(globals())
