"""Access to the explorer, its sessions, and the cleanup of its files."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from rectgrad.app import server, sessions
from rectgrad.app.sessions import Sessions
from rectgrad.cli import app as command_line


@pytest.fixture(autouse=True)
def no_password(monkeypatch):
    monkeypatch.delenv(server.AUTH, raising=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "use --auth FILE, a file with user:password, or --insecure"),
        (["--host", "nonsense.invalid", "--insecure"], "cannot listen on --host nonsense.invalid: "),
        (["--auth", "me:secret"], "--auth expects a file that contains user:password"),
        (["--auth", "/no/such/file"], "--auth /no/such/file: No such file or directory"),
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


def test_a_password_or_a_word_opens_it_to_others(tmp_path, monkeypatch):
    password = tmp_path / "password"
    password.write_text("me:secret:word\nsecond line\n")
    assert accepts(server.check_access("0.0.0.0", password, False), "me:secret:word")
    assert server.check_access("0.0.0.0", None, True) is None
    assert server.check_access("127.0.0.1", None, False) is None
    monkeypatch.setenv(server.AUTH, "you:other")
    assert accepts(server.check_access("0.0.0.0", None, False), "you:other")
    assert accepts(server.check_access("127.0.0.1", None, True), "you:other")  # a password always counts
    assert accepts(server.check_access("0.0.0.0", password, False), "me:secret:word")  # the file, if both


def accepts(login, text: str) -> bool:
    """Whether this user and password is accepted, and no other."""
    given = [text, text[:-1], text + "x", text.replace("me:", "us:")]
    headers = [{"authorization": f"Basic {base64.b64encode(each.encode()).decode()}"} for each in given]
    scopes = [{"type": "http", "headers": [(k.encode(), v.encode())]} for h in headers for k, v in h.items()]
    refused = [login.refusal(Request(scope)) is not None for scope in scopes]
    return refused == [each != text for each in given]


@pytest.mark.parametrize("content", ["me", "me:", ":secret", "", "\n", "\nme:secret"])
def test_a_file_without_a_password_is_refused(content, tmp_path):
    password = tmp_path / "password"
    password.write_text(content)
    with pytest.raises(ValueError, match="password must have the form user:password"):
        server.check_access("127.0.0.1", password, False)


def test_the_names_that_a_server_is_known_under(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Mine")
    monkeypatch.setattr(socket, "getfqdn", lambda: "mine.example")
    local = {"127.0.0.1", "localhost", "::1"}
    assert server.accepted_names("127.0.0.1", []) == local
    assert server.accepted_names("0.0.0.0", ["Proxy.example"]) == {
        *local,
        "0.0.0.0",
        "mine",
        "mine.example",
        "proxy.example",
    }


# --- temporary files ---


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return server.TemporaryFolder()


def test_temporary_files_go_away(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rectgrad-app-999999999-x").mkdir()
    temporary = server.TemporaryFolder()
    assert [temporary.path] == list(tmp_path.iterdir())
    old, new = temporary.new_file(), temporary.new_file()
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    temporary.remove_old(time.time() - 60)
    assert not old.exists()
    assert new.exists()
    temporary.close()
    assert not temporary.path.exists()


def test_planted_names_do_nothing(monkeypatch, tmp_path):
    """Names that are no number of a process, links and files in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "mine").mkdir(parents=True)
    (tmp_path / "mine" / "photo.png").touch()
    (tmp_path / "temporary").mkdir()
    for owner in ("99999999999999999999", "²", "٣", "notes", "-1", "1e3", "", str(os.getpid()), "1"):
        (tmp_path / "temporary" / f"rectgrad-app-{owner}-x").mkdir()
    (tmp_path / "temporary" / "rectgrad-app-999999999-link").symlink_to(tmp_path / "mine")
    (tmp_path / "temporary" / "rectgrad-app-999999998-file").touch()
    planted = set((tmp_path / "temporary").iterdir())
    temporary = server.TemporaryFolder()
    assert set((tmp_path / "temporary").iterdir()) - {temporary.path} == planted
    assert (tmp_path / "mine" / "photo.png").exists()


def test_what_vanishes_meanwhile_does_not_stop_the_cleaning(temporary, monkeypatch):
    """A session deletes its photo between the listing and the check; then the folder itself goes."""
    for i in range(3):
        (temporary.path / f"{i}").touch()
    lstat = Path.lstat

    def vanishing(path: Path):
        (temporary.path / "1").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    temporary.remove_old(time.time() + 60)
    assert list(temporary.path.iterdir()) == []
    temporary.path.rmdir()
    temporary.remove_old(time.time() + 60)


def test_the_cleaning_thread_goes_on_after_the_folder_vanished(temporary, monkeypatch):
    waits = iter([False, False, True])
    rounds = []
    monkeypatch.setattr(temporary._stop, "wait", lambda seconds: next(waits))
    remove_old = temporary.remove_old
    monkeypatch.setattr(temporary, "remove_old", lambda before: (rounds.append(before), remove_old(before)))
    temporary.path.rmdir()
    temporary._clean_up()
    assert len(rounds) == 2


def test_empty_folders_are_removed_and_links_are_not_followed(temporary, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").touch()
    (temporary.path / "a" / "b").mkdir(parents=True)
    (temporary.path / "a" / "photo").touch()
    (temporary.path / "link").symlink_to(tmp_path / "mine")
    (temporary.path / "dangling").symlink_to(tmp_path / "nowhere")
    temporary.remove_old(time.time() + 60)
    assert list(temporary.path.iterdir()) == []
    assert (tmp_path / "mine" / "photo.png").exists()
    (temporary.path / "new").mkdir()
    temporary.remove_old(time.time() - 60)
    assert (temporary.path / "new").exists()


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


def test_beyond_the_limit_a_session_ends_of_the_address_that_has_most(monkeypatch):
    monkeypatch.setattr(sessions, "SESSIONS", 5)
    known = Sessions(lambda digest: None)
    alone = [known.open(address=f"10.0.0.{i}") for i in range(2)]
    many = [known.open(address="10.0.0.9") for _ in range(50)]
    assert [known.get(each) is not None for each in alone] == [True, True]
    assert [known.get(each) is not None for each in many] == [False] * 47 + [True] * 3


def test_the_quota_of_uploads_holds_and_deletes_those_of_who_stores_most(monkeypatch, tmp_path):
    monkeypatch.setattr(sessions, "STORED", 10)
    known = Sessions(lambda digest: None)
    small, large = known.get(known.open(address="10.0.0.1")), known.get(known.open(address="10.0.0.2"))
    known.make_room(1)
    small.add(uploaded(tmp_path, "small"), "small.png")
    for i in range(30):
        known.make_room(3)
        (tmp_path / f"{i}").write_bytes(b"xxx")
        large.add(tmp_path / f"{i}", "large.png")
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 10
    assert (tmp_path / "small").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["27", "28", "29", "small"]
