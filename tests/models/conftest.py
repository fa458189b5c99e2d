"""timm, torchvision, transformers and huggingface_hub, played by the small packages in standins/."""

import sys

import pytest

from model_helpers import PACKAGES, STANDINS
from rectgrad.models import ImageModel, load, weights


@pytest.fixture
def standins(monkeypatch):
    """Replaces the real packages with stand-ins, and removes them afterwards."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STANDINS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def lite0() -> ImageModel:
    return load()


@pytest.fixture(autouse=True)
def reads_pickles(request, monkeypatch):
    """As torch 2.6 does, so that older ones are tested too."""
    if request.node.get_closest_marker("any_torch") is None:
        monkeypatch.setattr(weights, "_safe", lambda path: path)
