"""The responses of the explorer's server: their content, access, and order."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from itertools import product
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import explorer
import rectgrad
from rectgrad.app.routes import Explorer, create
from rectgrad.app.server import TemporaryFolder
from rectgrad.app.service import Service
from rectgrad.models import load
from rectgrad.photos import files

# Prints when a computation was stopped, and after how many inputs.
WATCHED = """
from rectgrad.app import work
run = work.Task.run
def watched(self, compute):
    try:
        return run(self, compute)
    except work.Stopped:
        print("stopped after", self.done, flush=True)
        raise
work.Task.run = watched
from rectgrad.cli import main
main()
"""
SLOW = {"IntegratedGradients": {"steps": 9999}}


def png_of(seed: int, size: int = 32) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "given.png").write_bytes(png_of(3))
    with explorer.served(str(folder), "--model", "cifar10_cnn", code=WATCHED) as found:
        yield found


@pytest.fixture
def client(served):
    found = explorer.Client(served.url)
    found.upload(png_of(0))
    assert found.open().is_success
    yield found
    found.close()


# --- files ---

SECRET = "the launch code is 4711"


def leaked(text: str) -> bool:
    return SECRET in text or "root:x:0" in text or "PATH=" in text or "__getattr__" in text


def test_no_route_gives_a_file_that_was_not_given(served, client, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    up, bare = "../" * 12, str(secret)[1:]
    encoded = "..%2f" * 12
    ways = [str(secret), f"{up}{bare}", f"%2e%2e/{up}{bare}", f"file://{secret}", f"//{bare}", encoded + bare]
    ways += ["/proc/self/environ", "/etc/passwd", f"{up}etc/passwd", "file:///etc/passwd", "pyproject.toml"]
    ways += [str(Path(rectgrad.__file__)), "../routes.py", "..%2froutes.py", "http://127.0.0.1:1/x.png"]
    routes = "session upload open classes maps layers sparsity script folder folder/step".split()
    routes += [f"download/{kind}" for kind in ("png", "npz", "py")]
    for way in ways:
        for place in ("/", "/page/", "/page/..%2f", "/api/", "/api/download/", "/static/", "/file=", "/docs"):
            assert not leaked(client.http.get(f"{place}{way}").text), (place, way)
    # Every two of way, route and place in the request meet.
    for (i, way), (j, route) in product(enumerate(ways), enumerate(routes)):
        asked = [
            ("photo", way),
            ("photo", f"upload:{way}"),
            ("photo", f"folder:{way}"),
            ("photo", f"sample:{way}"),
            ("model", way),
            ("model", f"{way}:make"),
            ("colours", way),
            ("options", {"RectGrad": {"rule": way}}),
            None,
        ][(i + j) % 9]
        if asked is None:
            answer = client.http.post(f"/api/{route}", params={"name": way}, content=way.encode())
        else:
            answer = client.http.post(f"/api/{route}", json={**client.view("saliency"), asked[0]: asked[1]})
        assert not leaked(answer.text), (route, asked)
        assert answer.status_code < 500, (route, asked)


def test_a_photo_is_named_by_an_id_that_the_session_was_given(served, client):
    for photo in ("folder:0", "folder:-1", "folder:", "sample:chelsea", "upload:0", "given.png", ""):
        assert client.http.post("/api/open", json={"photo": photo, "model": "cifar10_cnn"}).status_code == 404
    [listed] = client.http.post("/api/session").json()["folder"]
    assert client.open(listed["photo"]).json()["name"] == "given.png"
    given = {"photo": listed["photo"], "model": "own.py:make"}
    assert client.http.post("/api/open", json=given).status_code == 400


def test_every_error_has_a_message(client):
    """Those of the router and of the parser, too."""
    client.http.headers["Content-Type"] = "application/json"
    for answer in (client.http.get("/nothing"), client.http.post("/api/open", content=b"[" * 60_000)):
        assert list(answer.json()) == ["error"]


def test_an_upload_cannot_choose_where_it_is_stored(client):
    for name in (
        "../../../../tmp/rectgrad-escaped.png",
        "..\\..\\rectgrad-escaped.png",
        "/tmp/rectgrad-escaped.png",
    ):
        assert client.upload(png_of(1), name).is_success
        assert client.open().json()["name"] == "rectgrad-escaped.png"
    assert not Path("/tmp/rectgrad-escaped.png").exists()


def test_uploads_are_bounded(client):
    assert client.upload(b"0" * (20 * 2**20 + 1)).status_code == 413
    answer = client.http.post(
        "/api/upload", content=(b"0" * 2**20 for _ in range(30)), params={"name": "no-length.png"}
    )
    assert answer.status_code == 413


def test_invalid_photos_produce_an_error_message(client):
    whole = png_of(0, 400)
    huge = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(huge, format="PNG")
    said = {
        "broken.png": (whole[: len(whole) // 2], "broken.png: cannot be read"),
        "huge.png": (huge.getvalue(), "20000 x 10000 pixels exceed the limit of 150 megapixels"),
        "text.jpg": (b"Dear diary", "text.jpg: not an image, or not in a supported format"),
        "empty.png": (b"", "empty.png: not an image, or not in a supported format"),
    }
    for name, (content, sentence) in said.items():
        assert client.upload(content, name).is_success
        answer = client.open()
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]
        assert "/tmp" not in answer.json()["error"]
    client.upload(png_of(0))
    assert client.open().is_success


# --- visitors ---


def test_visitors_see_their_own_photos(served):
    wrong: list[str] = []
    threads = [threading.Thread(target=visit, args=(served.url, i, wrong)) for i in range(10)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


def visit(url: str, seed: int, wrong: list[str]) -> None:
    """Sends requests repeatedly: the returned photo and maps must be the visitor's own."""
    try:
        client, content = explorer.Client(url), png_of(100 + seed)
        with Image.open(io.BytesIO(content)) as picture:
            own = picture.convert("RGB")
        model = load("cifar10_cnn")
        x = model.prepare(model.crop(own)).unsqueeze(0)
        expected = {
            name: rectgrad.attribute(model.module, x, name)[0].numpy() for name in ("rectgrad", "saliency")
        }
        for _ in range(3):
            client.upload(content)
            client.open()
            shown = client.arrays("rectgrad", "saliency")
            if not np.array_equal(shown.pop("photo"), np.asarray(own)):
                wrong.append(f"{seed}: another's photo")
            # Threads split sums differently, so maps agree only to rounding; another visitor's would differ.
            far = [np.abs(shown[name] - expected[name]).max() for name in expected]
            if max(far) > 1e-3 * max(np.abs(each).max() for each in expected.values()):
                wrong.append(f"{seed}: another's map, {far}")
        client.close()
    except Exception as error:
        wrong.append(f"{seed}: {error!r}")


def test_an_upload_belongs_to_its_session(served, client):
    other = explorer.Client(served.url)
    other.photo = client.photo
    for answer in (other.open(), other.http.post("/api/maps", json=other.view("saliency"))):
        assert answer.status_code == 404
    other.http.headers["session"] = "guessed"
    assert other.open().status_code == 401
    other.close()


def test_pages_of_other_sites_are_not_answered(served):
    assert httpx.get(served.url, headers={"Host": "evil.example"}).status_code == 403
    for origin in ("http://evil.example", "null"):
        answer = httpx.post(f"{served.url}/api/session", headers={"Origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    answer = httpx.get(served.url)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_a_page_with_a_password_asks_for_it(tmp_path):
    (tmp_path / "password").write_text("me:secret:word\n")
    with (
        explorer.served("--model", "cifar10_cnn", "--auth", str(tmp_path / "password")) as found,
        httpx.Client(base_url=found.url) as browser,
    ):
        assert browser.get("/", auth=("me", "secret:word")).status_code == 200
        for path in ("/", "/page/main.js", "/api/session"):
            for login in (None, ("me", "wrong"), ("me", ""), ("you", "secret:word")):
                assert httpx.request("POST", found.url + path, auth=login).status_code == 401
        assert httpx.get(found.url, headers={"Authorization": "Basic nonsense"}).status_code == 401
        invented = {"X-Forwarded-For": "10.1.2.3"}
        for password, headers in (("guess", {}), ("secret:word", {}), ("secret:word", invented)):
            answer = httpx.get(found.url, auth=("me", password), headers=headers)
            assert answer.status_code == 429  # ten were wrong
        assert browser.get("/").status_code == 200  # by its cookie
        if Path("/proc/self/cmdline").exists():  # what `ps` shows to everyone on the machine
            assert b"secret" not in Path(f"/proc/{found.process.pid}/cmdline").read_bytes()


# --- maps ---


def test_fast_maps_come_first_and_slow_ones_report_their_progress(client):
    found = client.maps("integrated_gradients", "rectgrad", options={"IntegratedGradients": {"steps": 1000}})
    maps = [each["method"] for each in found if each["kind"] == "map"]
    assert maps == ["rectgrad", "integrated_gradients"]
    progress = [each for each in found if each["kind"] == "progress"]
    assert {each["method"] for each in progress} == {"integrated_gradients"}
    assert {each["total"] for each in progress} == {1000}
    done = [each["done"] for each in progress]
    assert done == sorted(done)
    assert done[-1] > done[0]


def test_a_slow_map_with_few_passes_comes_before_one_with_many(client):
    options = {"RISE": {"masks": 300}, "SmoothGrad": {"samples": 3}}
    found = client.maps("rise", "smoothgrad", options=options)
    assert [each["method"] for each in found if each["kind"] == "map"] == ["smoothgrad", "rise"]


def test_the_values_of_a_map_are_those_of_the_library(client):
    shown = next(each for each in client.maps("saliency") if each["kind"] == "map")
    service = Service(load("cifar10_cnn"))
    with Image.open(io.BytesIO(png_of(0))) as picture:
        crop = service.first.crop(picture.convert("RGB"))
    x = service.first.prepare(crop).unsqueeze(0)
    capped, limit = rectgrad.image.cap(rectgrad.attribute(load("cifar10_cnn").module, x, "saliency")[0])
    assert shown["limit"] == pytest.approx(limit, rel=1e-4)
    assert np.abs(shown["values"] - capped / limit).max() < 1e-3


def test_only_what_the_page_lacks_is_sent(client):
    found = client.maps("saliency", "rectgrad", have=["saliency"], known=["saliency"])
    assert {each["method"] for each in found if "method" in each} == {"rectgrad"}


def begun(client, *methods, **more):
    """A running request: its messages so far, and the thread that reads the rest."""
    found: list[dict] = []
    first = threading.Event()

    def read() -> None:
        rest = b""
        with client.http.stream("POST", "/api/maps", json=client.view(*methods, **more)) as answer:
            for part in answer.iter_bytes():
                rest += part
                while len(rest) >= 8:
                    text, data = np.frombuffer(rest[:8], "<u4")
                    size = 8 + int(text) + int(data)
                    if len(rest) < size:
                        break
                    found.extend(explorer.messages(rest[:size]))
                    rest = rest[size:]
                if any(each.get("done", 0) > 0 for each in found):
                    first.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert first.wait(60)
    return found, thread


def stops(served) -> list[str]:
    return [line for line in served.log if line.startswith("stopped after")]


def test_a_newer_request_stops_the_older_one(served, client):
    before = len(stops(served))
    older, thread = begun(client, "integrated_gradients", options=SLOW)
    newer = client.maps("rectgrad")
    thread.join(60)
    assert not thread.is_alive()
    assert "map" not in [each["kind"] for each in older]
    assert [each["method"] for each in newer if each["kind"] == "map"] == ["rectgrad"]
    deadline = time.monotonic() + 30
    while len(stops(served)) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0 < int(stops(served)[-1].split()[-1]) < 9999


def test_closing_a_page_stops_its_computations(served):
    before = len(stops(served))
    leaving = explorer.Client(served.url)
    leaving.upload(png_of(5))
    leaving.open()
    with leaving.http.stream(
        "POST", "/api/maps", json=leaving.view("integrated_gradients", options=SLOW)
    ) as answer:
        next(answer.iter_bytes())
    leaving.close()
    deadline = time.monotonic() + 30
    while len(stops(served)) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(stops(served)) > before


def test_a_slow_map_that_a_newer_request_also_needs_continues(served, client):
    before = stops(served)
    options = {"IntegratedGradients": {"steps": 2000}}
    older, thread = begun(client, "integrated_gradients", options=options)
    moved = {**options, "RectGrad": {"q": 50}}
    newer = client.maps("integrated_gradients", "rectgrad", options=moved)
    thread.join(60)
    assert [each["method"] for each in newer if each["kind"] == "map"] == ["rectgrad", "integrated_gradients"]
    assert "map" not in [each["kind"] for each in older]
    assert stops(served) == before
    first = next(
        each for each in newer if each["kind"] == "progress" and each["method"] == "integrated_gradients"
    )
    assert first["done"] >= max(each["done"] for each in older if each["kind"] == "progress")


def test_an_error_of_one_map_is_shown_with_that_map(client):
    answer = client.http.post("/api/maps", json=client.view("rectgrad", options={"RectGrad": {"q": 101}}))
    assert answer.status_code == 400
    assert answer.json()["error"] == "RectGrad: q must be from 0 to 100, not 101.0"
    answer = client.http.post("/api/maps", json=client.view("nonsense"))
    assert "unknown method 'nonsense'" in answer.json()["error"]
    found = client.maps("rectgrad", "random", target=77)
    errors = {each["method"]: each["error"] for each in found if each["kind"] == "error"}
    assert "77" in errors["rectgrad"]


def test_warnings_of_the_library_arrive_with_the_map(client):
    found = client.maps("rectgrad", "saliency", options={"RectGrad": {"q": 100}})
    warnings = {each["method"]: each["warnings"] for each in found if each["kind"] == "map"}
    assert "is zero" in warnings["rectgrad"][0]
    assert warnings["saliency"] == []


def test_a_page_that_is_closed_frees_what_was_computed_for_it(served):
    client = explorer.Client(served.url)
    client.upload(png_of(7))
    client.open()
    first, again = client.maps("integrated_gradients"), client.maps("integrated_gradients")
    client.http.post("/api/pause", content=client.http.headers["session"])
    anew = client.maps("integrated_gradients")
    times = [next(m["seconds"] for m in found if m["kind"] == "map") for found in (first, again, anew)]
    assert times[0] == times[1] != times[2]  # computed again; the upload was kept
    client.close()


def test_texts_from_outside_are_data(client):
    client.upload(png_of(0), "<script>alert(1)<script>.png")
    assert client.open().json()["name"] == "<script>alert(1)<script>.png"  # JSON; the page never parses it
    answer = client.http.post("/api/download/py", json=client.view("saliency"))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "attachment" in answer.headers["content-disposition"]


def test_samples_are_offered_without_a_folder():
    application = Explorer(Service(load("cifar10_cnn")), TemporaryFolder())
    with contextlib.closing(application.temporary), TestClient(create(application)) as client:
        opened = client.post("/api/session").json()
        names = opened["samples"]
        assert names == [each.name for each in files.sample_photos()]
        asked = {"photo": f"sample:{names[0]}", "model": "cifar10_cnn"}
        answer = client.post("/api/open", json=asked, headers={"session": opened["session"]}).json()
        assert answer["name"] == "chelsea.png"
        assert base64.b64decode(answer["shown"].split(",")[1])[:2] == b"\xff\xd8"
        assert application.close()
