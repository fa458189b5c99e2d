"""The command line as people use it: help, errors in one line, progress."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import rectgrad
from commands import FILE, TINY, photo
from rectgrad import cli
from rectgrad.cli import COMMANDS
from rectgrad.cli import progress as bars
from rectgrad.cli.options import picture_methods
from rectgrad.cli.progress import evaluating, progress
from rectgrad.methods.catalog import METHODS
from rectgrad.methods.method import progress as told


def test_no_arguments_and_the_version(run):
    status, out, _ = run()
    assert status == 0
    assert "Commands:" in out
    assert len(out.splitlines()) > 10
    _, out, _ = run("--version")
    assert out.strip() == rectgrad.__version__


def test_lists(run):
    _, out, _ = run("methods")
    assert all(name in out for name in METHODS)
    assert "rectgrad_prr          rectgrad with --prr." in out
    assert "--tau unset" in out
    assert "--no-prr" in out
    assert max(map(len, out.splitlines())) <= 100
    _, out, _ = run("methods", "--json")
    assert json.loads(out)["smoothgrad"]["over"] == "saliency"
    assert json.loads(out)["expected_gradients"] == {"over": "saliency", "samples": 50, "seed": 0}
    _, out, _ = run("models")
    assert "efficientnet_lite0" in out
    _, out, _ = run("models", "--json")
    assert "how" in json.loads(out)["inception_v4"]


ERRORS = {
    "no such command": (["expain"], "The commands are explain"),
    "no such option": (["explain", "--qq", "3"], "--qq"),
    "no such file": (["explain", "nowhere.jpg"], "nowhere.jpg"),
    "nothing matches": (["explain", "x*.jpg"], "x*.jpg"),
    "empty folder": (["explain", "empty"], "no images"),
    "no such model": (["explain", "--model", "resnet"], "efficientnet_lite0"),
    "no such factory": (["explain", "--model", "nothing.py:make"], "nothing.py"),
    "photos without photos": (["reproduce", "claims", "--model", "inception_v4"], "coherence"),
    "no records": (["reproduce", "report", "--out", "empty"], "no records"),
    "no such weights": (["explain", "--model", "inception_v4", "--weights", "none.pt"], "none.pt"),
    "no such method": (["explain", "--method", "scorecam"], "rectgrad"),
    "option of another method": (["explain", "--method", "saliency", "--q", "90"], "saliency"),
    "bad q": (["explain", "--q", "101"], "from 0 to 100"),
    "q is no number": (["explain", "--q", "high"], "'--q'"),
    "bad rule": (["explain", "--rule", "PR9"], "PR1"),
    "no such inner method": (["explain", "--method", "smoothgrad", "--over", "x"], "unknown method 'x'"),
    "bad samples": (["explain", "--method", "smoothgrad", "--samples", "0"], "samples"),
    "no such class": (["explain", "--model", TINY, "--target", "horse"], "horse"),
    "ambiguous class": (["explain", "--model", TINY, "--target", "blue"], "blue bird"),
    "class out of range": (["explain", "--model", TINY, "--target", "7"], "7"),
    "a model for grey pictures": (
        ["explain", "photo.png", "--model", f"{FILE}:for_grey"],
        "fails on an input of shape (1, 3, 224, 224) and type torch.float32 (RuntimeError: Given groups=1",
    ),
    "a model that returns a dict": (
        ["compare", "photo.png", "--model", f"{FILE}:Named"],
        "returns a dict, not the scores of the classes",
    ),
    "a model for grey pictures in the explorer": (
        ["app", "--model", f"{FILE}:for_grey"],
        "(RuntimeError: Given",
    ),
    "a model for grey pictures to judge": (
        ["judge", "photo.png", "--model", f"{FILE}:for_grey"],
        "(RuntimeError: Given groups=1",
    ),
    "a model without weights": (
        ["explain", "photo.png", "--model", f"{FILE}:without_weights"],
        "create it on the CPU",
    ),
    "a device that torch lacks": (
        ["explain", "photo.png", "--model", TINY, "--device", "meta"],
        "device 'meta' is not available: this installation",
    ),
    "lazy layers": (
        ["explain", "--model", TINY.replace(":tiny", ":lazy"), "photo.png"],
        "lazy layers without",
    ),
    "bad device": (["explain", "--model", TINY, "--device", "quantum"], "unknown device 'quantum'"),
    "empty name": (["explain", ""], "empty"),
    "too few names": (
        ["explain", "--model", TINY, "--labels", "taken", "photo.png"],
        "4 classes, but the number of class names is 1",
    ),
    "bad maps": (["explain", "--maps", "csv"], "npy or npz"),
    "bad batch size": (["explain", "--batch-size", "0"], "batch-size"),
    "bad sweep": (["sweep", "--q", "1,two"], "'two'"),
    "bad window": (["explain", "--method", "occlusion", "--window", "0"], "window must be at least 1"),
    "bad masks": (["explain", "--method", "rise", "--masks", "many"], "'--masks'"),
    "tensor": (["explain", "--method", "expected_gradients", "--baselines", "0"], "--baselines"),
    "needs a tensor": (["explain", "--method", "deeplift_shap", "--model", TINY], "needs baselines"),
    "bad comparison": (["compare", "--methods", "saliency,x"], "unknown method 'x'"),
    "out is a file": (["explain", "--model", TINY, "--out", "taken"], "taken"),
    "weights that no option reads": (
        ["train", "--out", "net.pt"],
        "a .safetensors file to write, not 'net.pt'",
    ),
    "weights into a file": (["train", "--out", "taken/a.safetensors"], "the path of a file to write"),
    "records into a file": (["reproduce", "noise-level", "--out", "taken/a"], "is a file, not a folder"),
    "unreadable photo": (["layers", "taken", "--model", TINY], "taken"),
    "unreadable photo to explain": (["explain", "taken", "--model", TINY], "taken: not an image"),
    "bad picture": (["explain", "--only", "photo"], "map or overlay"),
    "layers of an average": (
        ["layers", "--methods", "smoothgrad", "photo.png"],
        "smoothgrad has no single backward pass",
    ),
    "a URL": (["explain", "https://example.org/cat.jpg"], "is a URL; download it first"),
    "a port that does not exist": (["app", "--port", "99999"], "'--port'"),
    "maps of layers": (["layers", "--maps", "npy"], "npz"),
    "bad engine": (["explain", "--engine", "spark"], "local or ray"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_line_and_status_2(run, tmp_path, name):
    arguments, words = ERRORS[name]
    if arguments[0] == "app":
        pytest.importorskip("fastapi")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("text")
    photo(tmp_path / "photo.png")
    before = sorted(os.listdir(tmp_path))
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("rectgrad: ")
    assert words in err
    assert sorted(os.listdir(tmp_path)) == before


def test_an_unforeseen_fault_keeps_its_traceback(monkeypatch):
    def fault(**_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(cli, "app", fault)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_every_command_has_help_that_ends_in_an_example(run):
    for command in COMMANDS:
        status, out, _ = run(command, "--help")
        assert status == 0
        assert f"Example: rectgrad {command}" in out
    _, out, _ = run("--help")
    assert all(command in out for command in COMMANDS)


TWICE = """
import os, signal, sys, time
from rectgrad import cli

def work(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:  # cleaning up takes long
        if sys.argv[1] == "twice":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

cli.app = work
cli.main()
"""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_a_second_interrupt_prints_no_traceback(times):
    done = subprocess.run([sys.executable, "-c", TWICE, times], capture_output=True, text=True, timeout=50)
    assert done.returncode == 130
    assert done.stderr == (
        "" if times == "twice" else "rectgrad: interrupted; run the same command again to resume\n"
    )


def test_the_interrupt_of_the_caller_comes_back(run):
    run("--help")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_help_answers_without_torch():
    script = (
        "import sys; sys.argv = ['rectgrad', '--help']\n"
        "from rectgrad.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
    assert "explain" in done.stdout


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("explain", None, "PASSIVE"),
        ("layers", "ACTIVE", "ACTIVE"),
        ("bench", None, None),
    ],
)
def test_commands_over_photos_let_waiting_threads_sleep(run, monkeypatch, command, given, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    run(command, "--help")
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_the_settings_of_the_process_precede_torch():
    script = (
        "import os, sys; sys.argv = ['rectgrad', 'explain', '--help']\n"
        "from rectgrad import cli\n"
        "tune, seen = cli._tune_process, []\n"
        "cli._tune_process = lambda: (seen.append('torch' in sys.modules), tune())\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(seen, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[False] True"


def test_attributing_pulls_in_no_heavy_package():
    script = (
        "import sys, torch, rectgrad\n"
        "rectgrad.attribute(lambda x: x.relu().square(), torch.rand(1, 60), target=0, q=1)\n"
        "heavy = 'matplotlib PIL fastapi uvicorn ray timm torchvision transformers typer'.split()\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert all(hasattr(rectgrad, name) for name in rectgrad.__all__)
    assert set(rectgrad.__all__) <= set(dir(rectgrad))
    assert torch.is_tensor(rectgrad.attribute(lambda x: x.square().sum(1), torch.rand(2, 3), "saliency"))


def test_progress_is_plain_lines_off_a_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress(40, "explaining") as advance:
        for _ in range(40):
            now[0] += 1
            advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "explaining: 10/40, 1/s, 30 s left",
        "explaining: 20/40, 1/s, 20 s left",
        "explaining: 30/40, 1/s, 10 s left",
        "explaining: 40/40, 1/s",
    ]


def test_progress_is_a_bar_with_rate_and_time_left_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(3, "explaining") as advance:
        for _ in range(3):
            advance()
    assert "explaining" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    assert "/s" in screen.getvalue()
    assert "0:00:00" in screen.getvalue()


def test_all_methods_are_those_that_take_seconds():
    chosen = picture_methods("all", 98)
    assert set(METHODS) - set(chosen) == {"deeplift_shap", "rise"}
    assert list(picture_methods("rise", 98)) == ["rise"]


def test_the_progress_of_a_map_that_takes_long(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with evaluating():
        for done in range(1, 41):  # quick: nothing to tell
            told.get()(done, 40)
        assert capsys.readouterr().err == ""
        for done in range(1, 41):
            now[0] += 1
            told.get()(done, 40)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("evaluating: 14/40")
    assert last.startswith("evaluating: 40/40")
    assert told.get()(1, 2) is None


def test_the_progress_of_a_map_is_a_bar_below_that_of_the_photos(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("rectgrad.cli.progress.SOON", -1)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(2, "explaining") as advance, evaluating():
        [shown] = bars._live
        for _ in range(2):
            for done in range(1, 31):
                told.get()(done, 30)
            shown.refresh()
            advance()
    assert "evaluating" in screen.getvalue()
    assert "30/30" in screen.getvalue()
    assert "2/2" in screen.getvalue()
