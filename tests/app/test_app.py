"""The explorer without a browser: what it answers, to whom, and what it leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import explorer
import rectgrad
from rectgrad.app import drawing, query, script, server
from rectgrad.app.folder import ALL, Folder
from rectgrad.app.query import Query
from rectgrad.app.service import Cache, Service
from rectgrad.cli import app as command_line
from rectgrad.methods.catalog import METHODS
from rectgrad.models import load
from rectgrad.photos import UnreadableImageError


@pytest.fixture(scope="module")
def service():
    return Service(load("cifar10_cnn"))


def photo_of(path: Path, seed: int, size: int = 48) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def seen(service, tmp_path):
    path = photo_of(tmp_path / "noise.png", 0)
    return service.predict(path, "noise.png", "cifar10_cnn")


# --- what is asked and answered -----------------------------------------------------------------------------


def test_controls_that_were_not_moved_leave_every_method_as_it_is_listed():
    options = {kind.__name__: query.defaults(kind) for kind, _ in query.kinds()}
    assert Query(tuple(METHODS), options).configured() == METHODS


CONTROLS = """
from dataclasses import fields

from rectgrad.app.query import Query
from rectgrad.app.service import Service
from rectgrad.app.page import Page
from rectgrad.methods.catalog import METHODS
from rectgrad.models import load

page = Page(Service(load("cifar10_cnn")))
wanted = {(type(m).__name__, f.name) for m in METHODS.values() for f in fields(m)}
assert set(page.controls.fields) == wanted
values = [control.value for control in page.controls.fields.values()]
assert Query(tuple(METHODS), page.controls.options(values)).configured() == METHODS

# A photo that was not uploaded is none, whoever names it.
import os, pathlib, tempfile
from rectgrad.app.page import _uploaded
ours = pathlib.Path(os.environ["GRADIO_TEMP_DIR"], "a.png")
ours.touch()
with tempfile.NamedTemporaryFile(suffix=".png") as other:
    assert _uploaded({"path": str(ours)}) == ours.resolve()
    for path in (other.name, f"{ours.parent}/../{pathlib.Path(other.name).name}", "/etc/passwd", "", None):
        assert _uploaded({"path": path}) is None, path
"""


def test_every_option_of_every_method_has_a_control(tmp_path):
    """In a process of its own: gradio leaves sockets open."""
    place = {**os.environ, "GRADIO_TEMP_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CONTROLS], env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_control_that_was_moved_reaches_all_of_its_kind_and_no_other():
    found = Query(
        ("rectgrad", "rectgrad_prr", "saliency"), {"RectGrad": {"q": 90.0, "prr": False}}
    ).configured()
    assert found["rectgrad"] == rectgrad.RectGrad(q=90.0)
    assert found["rectgrad_prr"] == rectgrad.RectGrad(q=90.0, prr=True)
    assert found["saliency"] == rectgrad.Saliency()


@pytest.mark.parametrize("name", METHODS)
def test_maps_are_those_of_attribute_bit_for_bit(service, seen, name):
    asked = Query((name,), {}, target=3, versus=5)
    x = service.inputs(seen)
    expected = rectgrad.attribute(service.first.module, x, name, rectgrad.contrast(3, 5))
    assert np.array_equal(service.maps(seen, asked)[name].values, expected[0].numpy())


def test_the_python_lines_say_what_was_moved(seen):
    asked = Query(("rectgrad", "smoothgrad"), {"RectGrad": {"q": 90.0}, "SmoothGrad": {"over": "rectgrad"}})
    lines = script.lines(
        seen, asked, Service(load("cifar10_cnn"), weights=Path("w.pt")).load_arguments("cifar10_cnn")
    )
    assert "load('cifar10_cnn', weights='w.pt')" in lines
    assert f"'rectgrad', target={seen.top}, q=90.0" in lines
    assert "'smoothgrad', target=" in lines
    assert "over='rectgrad'" in lines


def test_texts_from_outside_are_escaped(service, tmp_path):
    path = photo_of(tmp_path / "a.png", 1)
    seen = service.predict(path, "<script>alert(1)</script>.png", "cifar10_cnn")
    asked = Query(("saliency",), {})
    assert "<script>" not in drawing.maps(seen, service.maps(seen, asked), asked)


def test_classes_without_names_can_be_chosen_too(service, seen, tmp_path):
    named = service.classes(seen)
    assert sorted(index for _, index in named) == list(range(10))
    assert named[0][0].startswith(seen.guesses[0].label)
    nameless = Service(replace(load("cifar10_cnn"), labels=[], synonyms=[]))
    found = nameless.classes(nameless.predict(seen.path, "a.png", "cifar10_cnn"))
    assert [index for _, index in found[5:]] == sorted(index for _, index in found[5:])
    assert all(label.startswith("class ") for label, _ in found)


def test_final_threshold_is_for_the_baselines_alone(service, seen):
    asked = Query(("rectgrad", "saliency"), {}, final_threshold=True)
    maps = service.maps(seen, asked)
    drawn = {name: drawing.plane(name, each.values, asked) for name, each in maps.items()}
    assert np.array_equal(drawn["rectgrad"], maps["rectgrad"].values.sum(0))
    assert (drawn["saliency"] != 0).mean() <= 0.06


def test_layers_and_sparsity(service, seen):
    asked = Query(("rectgrad",), {"RectGrad": {"q": 90.0}})
    assert [name for name, _ in service.layers(seen, asked)]
    assert (
        drawing.layers(service.layers(seen, Query(("random",), {})), asked).count("no layer attributions")
        == 1
    )
    curve = service.sparsity(seen, asked)
    assert curve[0][0] == 0
    assert "<svg" in drawing.curve(curve, 90)


def test_photos_are_bounded_in_pixels(service, tmp_path):
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    with pytest.raises(UnreadableImageError, match=r"^mine: .*limit of 150 megapixels"):
        service.predict(tmp_path / "huge.png", "mine", "cifar10_cnn")


def test_a_shelf_keeps_the_last_and_makes_each_once():
    made: list[int] = []
    shelf: Cache[int] = Cache(2)

    def make(n: int) -> int:
        made.append(n)
        time.sleep(0.02)
        return n

    threads = [threading.Thread(target=lambda: shelf.get(1, lambda: make(1))) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert made == [1]
    shelf.get(2, lambda: make(2))
    shelf.get(3, lambda: make(3))
    shelf.get(1, lambda: make(1))
    assert made == [1, 2, 3, 1]


# --- a folder ---


def test_a_folder_is_stepped_through_by_class(service, tmp_path):
    for i in range(5):
        photo_of(tmp_path / f"{i}.png", i)
    (tmp_path / "9.png").write_text("no photo")
    folder = Folder(tmp_path, service)
    folder.start()
    assert folder.finished.wait(30)
    assert len(folder) == 6
    assert len(folder.classes) == 5
    assert folder.step(5, 1, ALL) == 0
    assert folder.step(0, -1, ALL) == 5
    wanted = str(folder.classes[2])
    assert folder.step(2, 1, wanted) in folder.rows(wanted)
    assert folder.choices()[0][0] == "all photos (6)"


# --- who may see what ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "--auth user:password, or --insecure"),
        (["--host", "nonsense.invalid", "--insecure"], "--host nonsense.invalid cannot be served: "),
        (["--auth", "me"], "--auth takes user:password"),
        (["/no/such/folder"], "'/no/such/folder' is not a folder"),
        (["--model", "nonsense"], "unknown model 'nonsense'"),
    ],
)
def test_the_command_says_what_is_wrong_with_it(arguments, sentence, capsys):
    found = CliRunner().invoke(command_line, ["app", *arguments])
    assert found.exit_code != 0
    assert sentence in str(found.exception or found.output) + found.output


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} cannot be served: Address already in use"):
            server.check_address("127.0.0.1", port)
    server.check_address("127.0.0.1", None)


def test_a_password_or_a_word_opens_it_to_others():
    assert server.check_access("0.0.0.0", "me:secret:word", False) == ("me", "secret:word")
    assert server.check_access("0.0.0.0", None, True) is None
    assert server.check_access("127.0.0.1", None, False) is None


def test_temporary_files_go_away(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rectgrad-app-999999999-x").mkdir()
    (tmp_path / "rectgrad-app-notes").mkdir()  # somebody else's
    temporary = server.TemporaryFolder()
    assert {temporary.path, tmp_path / "rectgrad-app-notes"} == set(tmp_path.iterdir())
    old, new = temporary.path / "a" / "old.png", temporary.path / "new.png"
    old.parent.mkdir()
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    photo_of(folder / "given.png", 3)
    with explorer.served(str(folder), "--model", "cifar10_cnn") as found:
        yield found


SECRET = "the launch code is 4711"


def test_no_endpoint_gives_a_file_that_was_not_given(served, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    up, bare = "../" * 12, str(secret)[1:]
    encoded = "..%2f" * 12
    ways = [str(secret), f"{up}{bare}", f"%2e%2e/{up}{bare}", f"file://{secret}", f"//{bare}", encoded + bare]
    ways += ["/proc/self/environ", "/etc/passwd", f"{up}etc/passwd", "file:///etc/passwd", "pyproject.toml"]
    ways += [str(Path(rectgrad.__file__))]
    with httpx.Client(base_url=served.url, timeout=30) as http:
        config = http.get("/config").json()
        api = (
            "file= file/ stream/ proxy= deep_link?session_hash= startup-events/ process_recording/ download/"
        )
        other = "file= static/ assets/ svelte/ custom_component/x/y/z/ theme.css?x= monitoring/ svg/"
        places = (
            [f"/gradio_api/{each}" for each in api.split()] + [f"/{each}" for each in other.split()] + ["/"]
        )
        for place in places:
            for way in ways:
                answer = http.get(f"{place}{way}")
                assert not leaked(answer.text), (place, way)
        for i, dependency in enumerate(config["dependencies"]):
            for way in ways:
                for given in (
                    {"path": way},
                    {"path": way, "url": f"file://{way}"},
                    {"path": "x", "url": way},
                ):
                    sent = {"path": "", "meta": {"_type": "gradio.FileData"}, "orig_name": "a.png", **given}
                    data = [sent, "cifar10_cnn"] + [None] * (len(dependency["inputs"]) - 2)
                    body = {"data": data, "fn_index": i, "session_hash": "s"}
                    answer = http.post("/gradio_api/run/predict", json=body)
                    assert not leaked(answer.text), (dependency["api_name"], given)
        sent = http.post(
            "/gradio_api/upload", files={"files": ("../../../../tmp/rectgrad-escaped.png", b"x")}
        )
        assert not Path("/tmp/rectgrad-escaped.png").exists()
        assert sent.status_code in (200, 400)
        assert (
            http.post("/gradio_api/upload", files={"files": ("big.png", b"0" * (21 * 2**20))}).status_code
            == 413
        )


def leaked(text: str) -> bool:
    return SECRET in text or "root:x:0" in text or "GRADIO_TEMP_DIR=" in text or "__getattr__" in text


def test_visitors_see_their_own_photos(served, tmp_path):
    clients = [
        explorer.Client(served.url, photo_of(tmp_path / f"{i}.png", 100 + i, size=32)) for i in range(4)
    ]
    wrong: list[str] = []
    threads = [threading.Thread(target=visit, args=(client, 3, wrong)) for client in clients]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    [client.close() for client in clients]


def visit(client: explorer.Client, times: int, wrong: list[str]) -> None:
    """Asks repeatedly: the photo that comes back must be the client's own."""
    try:
        with Image.open(client.photo) as own:
            expected = np.asarray(own)
        service, asked = Service(load("cifar10_cnn")), Query(("rectgrad", "saliency"), {})
        seen = service.predict(client.photo, "a.png", "cifar10_cnn")
        panels = explorer.pictures(drawing.maps(seen, service.maps(seen, asked), asked))
        for _ in range(times):
            client.look()
            shown = client.draw()
            if len(shown) != 3 or not np.array_equal(shown[0], expected):
                wrong.append(f"{client.photo.name}: another photo")
            far = [np.abs(a.astype(int) - b).mean() for a, b in zip(shown, panels, strict=True)]
            if max(far) > 2:
                wrong.append(f"{client.photo.name}: another's map, {far}")
    except Exception as error:
        wrong.append(f"{client.photo.name}: {error!r}")


def test_a_page_with_a_password_asks_for_it():
    with explorer.served("--model", "cifar10_cnn", "--auth", "me:secret") as found:
        assert httpx.get(f"{found.url}/config").status_code == 401
        assert httpx.get(f"{found.url}/gradio_api/info").status_code == 401
        login = httpx.post(f"{found.url}/login", data={"username": "me", "password": "wrong"})
        assert login.status_code == 400
