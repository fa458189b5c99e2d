"""The README's Python runs as it stands, and its lists are complete."""

import re
from pathlib import Path

from rectgrad.cli import COMMANDS
from rectgrad.methods.catalog import METHODS
from rectgrad.models import MODELS
from rectgrad.photos import read
from rectgrad.photos.files import sample_photo

README = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    read(sample_photo()).save("cat.jpg")
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(block, scope)
    assert "half" in capsys.readouterr().out


def test_it_names_every_method_command_and_model():
    for name in [*METHODS, *(n for n in MODELS if n[0].islower())]:
        assert f"`{name}`" in README, name
    for command in COMMANDS:
        assert f"rectgrad {command}" in README, command
