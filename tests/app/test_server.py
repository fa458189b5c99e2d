"""Access to the explorer, its sessions, and the cleanup of its files."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rectgrad.app import server, sessions
from rectgrad.app.sessions import Sessions
from rectgrad.cli import app as command_line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "--auth user:password, or --insecure"),
        (["--host", "nonsense.invalid", "--insecure"], "cannot listen on --host nonsense.invalid: "),
        (["--auth", "me"], "--auth must have the form user:password"),
        (["/no/such/folder"], "'/no/such/folder' is not a folder"),
        (["--model", "nonsense"], "unknown model 'nonsense'"),
    ],
)
def test_wrong_options_produce_an_error_message(arguments, sentence):
    found = CliRunner().invoke(command_line, ["app", *arguments])
    assert found.exit_code != 0
    assert sentence in str(found.exception or found.output) + found.output


def test_a_port_that_is_taken_is_named_and_without_a_port_another_is_found(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on .*--port {port}: Address already in use"):
            server.listen("127.0.0.1", port)
        monkeypatch.setattr(server, "FIRST_PORT", port)
        with server.listen("127.0.0.1", None) as found:
            assert found.getsockname()[1] != port


def test_a_password_or_a_word_opens_it_to_others():
    assert server.check_access("0.0.0.0", "me:secret:word", False) == ("me", "secret:word")
    assert server.check_access("0.0.0.0", None, True) is None
    assert server.check_access("127.0.0.1", None, False) is None


def test_temporary_files_go_away(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rectgrad-app-999999999-x").mkdir()
    (tmp_path / "rectgrad-app-notes").mkdir()  # not ours
    temporary = server.TemporaryFolder()
    assert {temporary.path, tmp_path / "rectgrad-app-notes"} == set(tmp_path.iterdir())
    old, new = temporary.new_file(), temporary.new_file()
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    temporary.remove_old(time.time() - 60)
    assert not old.exists()
    assert new.exists()
    monkeypatch.setattr(server, "MEGABYTES", 0)
    temporary.remove_old(0)
    assert not new.exists()
    temporary.close()
    assert not temporary.path.exists()


# --- sessions ---


def uploaded(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(b"x")
    return folder / name


def test_a_session_keeps_its_last_uploads_and_no_others(tmp_path):
    session = sessions.Session()
    ids = [session.add(uploaded(tmp_path, f"{i}"), f"{i}.png") for i in range(5)]
    assert list(session.uploads) == ids[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]


def test_a_newer_request_replaces_the_older_one_of_its_subject():
    async def run() -> None:
        session = sessions.Session()
        maps, layers = session.begin("maps"), session.begin("layers")
        newer = session.begin("maps")
        assert maps.replaced.is_set()
        assert not layers.replaced.is_set()
        assert not newer.replaced.is_set()

    asyncio.run(run())


def test_a_photo_is_released_when_no_session_shows_it():
    released: list[str] = []
    known = Sessions(released.append)
    a, b = known.get(known.open()), known.get(known.open())
    known.look(a, "cat")
    known.look(b, "cat")
    known.look(a, "dog")
    assert released == []
    known.look(b, "dog")
    assert released == ["cat"]


def test_silent_sessions_end_with_their_uploads(monkeypatch, tmp_path):
    released: list[str] = []
    known = Sessions(released.append)
    token = known.open()
    known.get(token).add(uploaded(tmp_path, "a"), "a.png")
    known.look(known.get(token), "cat")
    assert known.open(token) == token  # a page that is reloaded
    known.get(token).seen = time.monotonic() - 60 * sessions.MINUTES - 1
    known.end_idle()
    assert known.get(token) is None
    assert released == ["cat"]
    assert list(tmp_path.iterdir()) == []
    assert known.open(token) != token  # tokens cannot be chosen by the client
    monkeypatch.setattr(sessions, "SESSIONS", 2)
    tokens = [known.open() for _ in range(3)]
    assert sum(known.get(each) is not None for each in tokens) == 2
