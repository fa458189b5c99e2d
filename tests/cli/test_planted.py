"""Files in the folder for the results that are not of this run, and names and models that mislead."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import HERE, TINY, photo

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
RECORD = {"settings": {"model": "m", "method": "x"}, "picture": "x.png", "image": "x.jpg"}
TARGET = {"name": "cat", "confidence": 0.5}
PLANTED = {
    "many brackets": "[" * 100_000,
    "a list": "[1]",
    "a target that is text": json.dumps(RECORD | {"target": "cat"}),
    "a confidence that is text": json.dumps(RECORD | {"target": TARGET | {"confidence": "high"}}),
    "a picture that is a list": json.dumps(RECORD | {"target": TARGET, "picture": ["x.png"]}),
    "settings that are a number": json.dumps(RECORD | {"target": TARGET, "settings": 3}),
    "a percentile that is text": json.dumps(
        RECORD | {"target": TARGET, "settings": {"method": "rectgrad", "options": {"q": "high"}}}
    ),
    "warnings that are numbers": json.dumps(RECORD | {"target": TARGET, "warnings": [1]}),
    "a confidence that no float can be": json.dumps(RECORD | {"target": TARGET | {"confidence": 10**400}}),
    "a specificity that no float can be": json.dumps(RECORD | {"target": TARGET, "specificity": 10**400}),
    "a percentile that no float can be": json.dumps(
        RECORD | {"target": TARGET, "settings": {"method": "rectgrad", "options": {"q": 10**400}}}
    ),
    "a thumbnail on another server": json.dumps(
        RECORD | {"target": TARGET, "thumbnail": "//example.org/x.jpg"}
    ),
    "the record of another picture": json.dumps(RECORD | {"target": TARGET, "picture": "cat.png"}),
    "not UTF-8": b"\xff\xfe{",
}


def listed(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "explained.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["x", "cat"], ids=["beside the record", "in its place"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_file_that_is_no_record_is_not_shown(run, tmp_path, planted, name):
    photo(tmp_path / "cat.png")
    content = PLANTED[planted]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / f"{name}.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    status, _, err = run("explain", "cat.png", "--model", TINY, "--q", "60", "--out", "r")
    assert (status, err) == (0, "")
    assert [record["image"] for record in listed(tmp_path / "r")] == ["cat.png"]


def test_a_file_that_is_larger_than_the_memory_is_not_read(run, tmp_path):
    photo(tmp_path / "cat.png")
    (tmp_path / "r").mkdir()
    with open(tmp_path / "r" / "x.json", "wb") as file:
        file.truncate(10**12)  # takes no space on the disk
    assert run("explain", "cat.png", "--model", TINY, "--q", "60", "--out", "r")[0] == 0
    assert len(listed(tmp_path / "r")) == 1


@needs_pipes
@pytest.mark.parametrize("name", ["x", "cat"], ids=["beside the record", "in its place"])
def test_a_pipe_is_not_read(run, tmp_path, name):
    photo(tmp_path / "cat.png")
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / f"{name}.json")
    assert run("explain", "cat.png", "--model", TINY, "--q", "60", "--out", "r")[0] == 0
    assert len(listed(tmp_path / "r")) == 1


def test_results_of_a_run_in_a_folder_inside_are_not_taken_for_those_of_this_one(run, tmp_path):
    """Both have a picture cat.png."""
    photo(tmp_path / "cat.png")
    photo(tmp_path / "other" / "cat.png", seed=1)
    command = ["--model", TINY, "--q", "60", "--out"]
    for name, out in (("cat.png", "r"), ("other/cat.png", "r/inside"), ("cat.png", "r")):
        assert run("explain", name, *command, out)[0] == 0
    assert [record["image"] for record in listed(tmp_path / "r")] == ["cat.png"]
    assert [record["image"] for record in listed(tmp_path / "r" / "inside")] == ["other/cat.png"]


def test_markup_in_names_and_records_is_text(run, tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'"
    labels = "\n".join(f"{evil} {i}" for i in range(4))
    (tmp_path / "labels.txt").write_text(labels)
    photo(tmp_path / "photos" / f"{evil.replace('/', '')}.png")
    command = ["--model", TINY, "--labels", "labels.txt", "--out", "r"]
    assert run("explain", "photos", *command)[0] == 0
    page = (tmp_path / "r" / "index.html").read_text()
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 2


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_files_and_folders_whose_names_are_not_utf8(run, tmp_path, as_json):
    name = os.fsdecode(b"caf\xe9")
    photo(tmp_path / "cat.png")
    shutil.copy(HERE / "tiny_model.py", tmp_path / f"{name}.py")
    command = ["explain", "cat.png", "--model", f"{name}.py:tiny", "--out", name, *["--json"] * as_json]
    for _ in range(2):
        status, out, _ = run(*command)
        assert status == 0
        assert "caf\\udce9" in out
    record = json.loads((tmp_path / name / "cat.json").read_text())
    assert record["settings"]["made_from"][0][0] == f"{name}.py"


def test_names_cannot_control_the_terminal(run, tmp_path):
    evil = "\x1b]0;title\x07\x9b31m\u202egpj\u2066"
    (tmp_path / "labels.txt").write_text("\n".join(f"{evil}{i}" for i in range(4)))
    for name in ("good", "bad"):
        photo(tmp_path / "photos" / f"{name}{evil}\nx.png")
    next((tmp_path / "photos").glob("bad*")).write_bytes(b"no image")
    command = ["--model", TINY, "--labels", "labels.txt", "--out", "r"]
    status, out, err = run("explain", "photos", *command)
    assert (status, len(err.splitlines())) == (1, 2)  # progress, and the photo that cannot be read
    _, more, why = run("explain", next((tmp_path / "photos").glob("good*")), *command)
    _, none, unknown = run("explain", "photos", *command, "--target", f"{evil}9")
    assert "red" not in more + none
    for text in (out, err, more, why, none, unknown):
        assert not set(text) & set("\x1b\x07\x9b\u202e\u2066")


EXITS = """
import sys
from torch import nn
class Exits(nn.Module):
    def forward(self, x):
        sys.exit(0)
def make():
    return Exits()
"""


def test_a_model_that_exits_is_an_error(run, tmp_path):
    """A status of 0 would say that the results are there."""
    photo(tmp_path / "cat.png")
    (tmp_path / "model.py").write_text(EXITS)
    status, out, err = run("explain", "cat.png", "--model", "model.py:make", "--out", "r")
    assert (status, out, err) == (2, "", "rectgrad: the code of the model called sys.exit(0)\n")
    assert not (tmp_path / "r").exists()


def test_a_reader_that_stops_reading_is_no_error():
    """As of `rectgrad models | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rectgrad", "models"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="starts the command from a shell")
def test_closed_streams_are_no_error(tmp_path):
    """As of a scheduler that starts the command without any."""
    for i in range(2):
        photo(tmp_path / "photos" / f"{i}.png", seed=i)
    command = [sys.executable, "-m", "rectgrad", "explain", "photos", "--model", TINY, "--out", "r"]
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=tmp_path).returncode == 0
    assert (tmp_path / "r" / "1.png").exists()


RAISES = """
class Ends(BaseException):
    pass
def make():
    raise Ends("here")
def later():
    from torch import nn
    class Raises(nn.Module):
        def forward(self, x):
            raise Ends("here")
    return Raises()
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("make", "model.py: make() failed (Ends: here)"),
        ("later", "the code of the model raised Ends('here')"),
    ],
)
def test_a_model_that_raises_what_is_no_exception_is_an_error(run, tmp_path, factory, said):
    photo(tmp_path / "cat.png")
    (tmp_path / "model.py").write_text(RAISES)
    status, out, err = run("explain", "cat.png", "--model", f"model.py:{factory}", "--out", "r")
    assert (status, out, err) == (2, "", f"rectgrad: {said}\n")


WANDERS = """
import os, sys
os.chdir("elsewhere")
print("imported")
def make():
    os.chdir("..")
    os.chdir("elsewhere")
    sys.path.clear()
    sys.path.extend(PATH)
    print("made")
    found = tiny()
    found.module.register_forward_hook(lambda *_: print("ran"))
    return found
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_prints_and_changes_the_folder(run, tmp_path, as_json):
    """Photos are found and results written where the command was started; what it prints is no result."""
    photo(tmp_path / "cat.png")
    (tmp_path / "elsewhere").mkdir()
    tiny = (HERE / "tiny_model.py").read_text()
    (tmp_path / "model.py").write_text(f"{tiny}\nPATH = {sys.path!r}\n{WANDERS}")
    status, out, err = run(
        "explain", "cat.png", "--model", "model.py:make", "--out", "r", *["--json"] * as_json
    )
    assert status == 0
    assert (tmp_path / "r" / "cat.png").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert set(err.split()) == {"imported", "made", "ran"}
    if as_json:
        assert json.loads(out)["image"] == "cat.png"
    assert not {"imported", "made", "ran"} & set(out.split())


@needs_pipes
@pytest.mark.parametrize("option", ["--labels", "--weights"])
def test_a_pipe_as_weights_or_labels_is_an_error(run, tmp_path, option):
    photo(tmp_path / "cat.png")
    os.mkfifo(tmp_path / "pipe.pt")
    status, _, err = run("explain", "cat.png", "--model", TINY, option, "pipe.pt", "--out", "r")
    assert (status, err) == (2, f"rectgrad: {option} 'pipe.pt': no such file\n")
