"""`make demo` on a machine that lacks something: one line that says what."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

OLD = f"""#!/bin/sh
if [ "$1" = --version ]; then echo Python 3.9.18; fi
if [ "$1" = -c ]; then exec {sys.executable} -c "import sys; sys.version_info = (3, 9, 18); $2"; fi
"""
NEW = """#!/bin/sh
if [ "$1" = -m ]; then
  mkdir -p .venv/bin
  printf '#!/bin/sh\\necho ERROR: No matching distribution >&2; exit 1\\n' > .venv/bin/python
  chmod +x .venv/bin/python
fi
"""


def make(folder, python):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "build_native.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    command = ["make", "demo", f"PYTHON={folder / 'python'}"]
    # Inside `make test`, an inner make would report the folders it enters.
    plain = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_an_old_python(tmp_path):
    first, *rest = make(tmp_path, OLD)
    assert first == (
        "rectgrad needs Python 3.10 or later; Python 3.9.18 is too old. "
        "Name another one: make demo PYTHON=python3.11"
    )
    assert len(rest) == 1  # make's own
    assert not (tmp_path / ".venv").exists()


def test_no_network(tmp_path):
    first, second, *rest = make(tmp_path, NEW)
    assert first == "ERROR: No matching distribution"
    assert second.startswith("The packages could not be installed: see pip's message above.")
    assert "If there is no network access, run this again with it" in second
    assert len(rest) == 1
