import sys

import pytest

from rectgrad import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("explain", ...) -> (status, stdout, stderr), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rectgrad", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call
