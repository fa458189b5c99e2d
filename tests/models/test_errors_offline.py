"""A hub that cannot be reached: one line, no log of retries, and the option as the command line calls it."""

import logging
import sys

import pytest

from model_helpers import one_line
from rectgrad import cli
from rectgrad.models import ModelUnavailableError, load
from rectgrad.models.packages import errors_from

HUB_LOG = logging.getLogger("huggingface_hub.utils._http")


class ConnectError(Exception):
    """As httpx calls it."""


def fail(*_, **__):
    HUB_LOG.warning("'[Errno -2]' thrown while requesting HEAD https://hub/model")
    HUB_LOG.warning("Retrying in 1s [Retry 1/5].")
    try:
        raise ConnectError("no route")
    except ConnectError as error:
        raise OSError("We couldn't connect\nto the hub") from error


@pytest.fixture
def offline(standins, monkeypatch):
    import huggingface_hub
    import timm
    import torchvision.models
    import transformers

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setattr(torchvision.models, "get_model", fail)
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", fail)


FIXES = {
    "inception_v4": "model.safetensors on a machine with network access and pass the file as weights=FILE",
    "timm:tiny": "pass the file as weights=FILE",
    "torchvision:tiny": "pass the file as weights=FILE",
    "hf:owner/cropped": "load hf:FOLDER",
}


@pytest.mark.parametrize(("name", "fix"), FIXES.items())
def test_one_line_that_names_the_fix(offline, caplog, name, fix):
    with pytest.raises(ModelUnavailableError) as error:
        load(name)
    start = f"the weights of {name} could not be downloaded: the server cannot be reached; "
    assert one_line(error).startswith(start)
    assert one_line(error).endswith(fix)
    assert caplog.records == []


def test_the_hub_s_other_messages_are_kept(caplog):
    with errors_from("hub", "model"):
        HUB_LOG.warning("your token has expired")
    HUB_LOG.warning("Retrying in 1s [Retry 1/5].")  # another download
    assert [record.getMessage() for record in caplog.records] == [
        "your token has expired",
        "Retrying in 1s [Retry 1/5].",
    ]


@pytest.mark.parametrize("name", ["inception_v4", "timm:tiny"])
def test_the_command_line_names_its_own_option(offline, monkeypatch, capsys, tmp_path, name):
    (tmp_path / "a.png").touch()
    monkeypatch.setattr(sys, "argv", ["rectgrad", "explain", str(tmp_path / "a.png"), "--model", name])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pass the file as --weights FILE")
    assert "weights=" not in line
