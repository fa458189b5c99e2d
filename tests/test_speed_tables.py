"""The speed tables of the README and of docs/speed.md have the numbers of the records in results/bench."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CPU = {
    "cpu-engine-batch4": ("vgg16", "resnet50", "inception_v4"),
    "cpu-engine-batch1": ("efficientnet_lite0",),
}
NAMES = {"VGG-16": "vgg16", "ResNet-50": "resnet50", "Inception V4": "inception_v4"}
NAMES |= {"EfficientNet-Lite0": "efficientnet_lite0"}


def record(name):
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text(encoding="utf-8"))


def on_cpu():
    """model -> RectGrad's time relative to a plain gradient."""
    found = {each["model"]: each["rows"] for name in CPU for each in record(name)["models"]}
    return {model: next(r["ratio"] for r in rows if r["name"] == "rectgrad") for model, rows in found.items()}


def on_gpu():
    """(call, batch, channels last) -> the same, for ResNet-50."""
    found = {}
    for each in record("h200-engine")["results"]:
        for call in ("attribute", "capture"):
            found[call, each["batch"], each["channels_last"]] = each["ratios"][call][1]
    return found


def rows(page, heading):
    """The cells of the first table of four or of three columns after a heading."""
    text = (ROOT / page).read_text(encoding="utf-8").split(heading)[1]
    table = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Speed"), ("docs/speed.md", "### The present")]
)
def test_a_table_has_the_numbers_of_its_records(page, heading):
    cpu, gpu, seen = on_cpu(), on_gpu(), 0
    for what, batch, *rest in rows(page, heading):
        numbers = re.findall(r"\d\.\d\d", rest[-1] if page == "README.md" else rest[1])
        if "H200" in what:
            orders = [order for order in (False, True) if ("channels last" if order else "NCHW") in what]
            calls = [
                call for call, word in (("attribute", "ordinary"), ("capture", "captured")) if word in what
            ]
            wanted = [gpu[call, int(batch), order] for call in calls for order in orders]
        elif what.split(",")[0] in NAMES and ":" not in what:
            wanted = [cpu[NAMES[what.split(",")[0]]]]
        else:
            continue
        assert numbers == [f"{ratio:.2f}" for ratio in wanted], what
        seen += 1
    assert seen == 8
