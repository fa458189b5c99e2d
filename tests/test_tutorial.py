"""The tutorial runs, its stored outputs are those of today's code, and its prose says what they show."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOK = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
TOOL = runpy.run_path(str(DOCS / "notebook.py"))


@pytest.fixture(scope="module")
def done():
    with torch.random.fork_rng(devices=[]):
        return TOOL["run"](NOTEBOOK)


def text(output: dict) -> str:
    """What an output says, without its pictures."""
    data = output.get("data", {"text/plain": output.get("text")})
    said = "\n".join("".join(data[kind]) for kind in sorted(data) if kind.startswith("text/"))
    return re.sub(r"<[^>]*>", "\n", said)


def kinds(cell: dict) -> list:
    """The media types of a cell's outputs and their text, with # for every number."""
    number = r"\d[\d.]*(e[+-]\d+)?"
    return [(sorted(each.get("data", ())), re.sub(number, "#", text(each))) for each in cell["outputs"]]


def test_the_stored_outputs_are_current(done):
    for old, new in zip(NOTEBOOK["cells"], done["cells"], strict=True):
        if old["cell_type"] == "code":
            advice = f"cell {old['id']!r} has other outputs: python docs/notebook.py docs/tutorial.ipynb"
            assert kinds(old) == kinds(new), advice
    assert (DOCS / "tutorial.ipynb").stat().st_size < 1_500_000


def test_the_prose_is_right(done):
    """The sentences below the cells draw conclusions from these numbers."""
    said = {cell["id"]: "\n".join(map(text, cell.get("outputs", ()))) for cell in done["cells"]}

    def number(cell: str, pattern: str) -> float:
        return float(re.search(pattern, said[cell])[1])

    assert number("numbers", r"specificity: (.+)") == 0.04
    assert number("hammer", r"Specificity ([\d.]+):") < 0.1
    assert number("why", r"Specificity ([\d.]+)\.") > 0.5
    assert number("cover", r"spoon: espresso (\d+)%") >= 90
    assert number("cover", r"front rim: espresso (\d+)%") >= 85
    assert number("cover", r"coffee: espresso (\d+)%") < 50
    assert number("train", r"accuracy: (\d+)%") >= 95
    assert number("own", r"(\d+)% of the map is on the mark") > 75
    assert "a disc with the mark is called a square" in said["own-test"]
    assert "a square without it is called a disc" in said["own-test"]
    assert number("rule", r"map: (.+)") < 1e-6


def test_a_notebook_becomes_a_page():
    class Picture:
        def _repr_png_(self):
            return b"png"

    class Styled:
        def _repr_html_(self):
            return "<b>bold</b>"

    def code(*source: str) -> dict:
        return {"cell_type": "code", "source": list(source)}

    cells = [{"cell_type": "markdown", "source": ["# Title"]}, code("x = 1\n", "print(x)\n", "x + 1")]
    assert TOOL["markdown"](TOOL["run"]({"cells": cells})) == (
        "# Title\n\n```python\nx = 1\nprint(x)\nx + 1\n```\n\n```text\n1\n```\n\n```text\n2\n```"
    )
    picture, styled = (TOOL["shown"]({"data": TOOL["displayed"](each)}) for each in (Picture(), Styled()))
    assert picture == '<p><img alt="Output of the cell above" src="data:image/png;base64,cG5n"></p>'
    assert styled == "<b>bold</b>"
    with pytest.raises(ZeroDivisionError):
        TOOL["run"]({"cells": [code("1 / 0")]})
