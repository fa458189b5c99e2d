"""The pages of docs/ run as they stand: their Python, their commands' names and options, their links.

A block is left out only by a line `<!-- not run: reason -->` before it; few may be, and they are counted.
"""

import importlib
import inspect
import json
import re
import runpy
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
from PIL import Image

import rectgrad
from rectgrad import cli
from rectgrad.cli import COMMANDS
from rectgrad.methods.catalog import METHODS
from rectgrad.photos import read
from rectgrad.photos.files import sample_photo

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.joinpath("docs").glob("*.md"))
MOST_EXEMPT = 5
BETWEEN = ("&&", ";", "|")

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    code: str
    reason: str | None


def blocks(page: Path, kind: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page.name, line, match["kind"], match["code"], match["reason"]))
    return [block for block in found if block.kind == kind]


def names(pages: list[Path]) -> list[str]:
    return [page.stem for page in pages]


@pytest.fixture
def without_onednn():
    """Some virtual machines announce matrix instructions for half types that they lack."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
OTHERS = [ROOT / "README.md", ROOT / "examples" / "README.md"]  # the README's Python: test_readme.py
WITH_BASH = [page for page in (*OTHERS, *PAGES) if blocks(page, "bash")]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in order, in one namespace, beside a photo named cat.jpg."""
    monkeypatch.chdir(tmp_path)
    read(sample_photo()).save("cat.jpg")
    scope = {"__name__": "docs"}
    for block in blocks(page, "python"):
        if block.reason is None:
            blank = "\n" * (block.line - 1)  # so that a traceback has the page's own line numbers
            exec(compile(blank + block.code, str(page), "exec"), scope)


def commands(block: Block) -> list[list[str]]:
    """The words of each call of rectgrad in a bash block: those after `&&`, `;`, `--` and variables too."""
    calls = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace(";", " ; "), comments=True)
        for start, word in enumerate(words):
            before = words[start - 1] if start else ";"
            if word == "rectgrad" and (before in (*BETWEEN, "--") or re.match(r"\w+=", before)):
                end = next((i for i in range(start, len(words)) if words[i] in BETWEEN), None)
                calls.append(words[start + 1 : end])
    return calls


def options_of(name: str) -> set[str]:
    module = importlib.import_module(f"rectgrad.cli.{COMMANDS[name][0]}")
    command = typer.main.get_command(getattr(module, f"{name}_app"))
    return {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}


def wrong_in(words: list[str]) -> str | None:
    """What is wrong with a call, if anything."""
    if not words or words[0] not in COMMANDS:
        return f"no command {words[:1]}; there are {', '.join(COMMANDS)}"
    known = options_of(words[0])
    unknown = [word for word in words[1:] if word.startswith("-") and word.split("=")[0] not in known]
    return f"{words[0]} has no option {unknown[0]}" if unknown else None


@pytest.mark.parametrize("page", WITH_BASH, ids=names(WITH_BASH))
def test_commands_and_their_options_exist(page):
    for block in blocks(page, "bash"):
        for words in commands(block) if block.reason is None else []:
            assert not wrong_in(words), f"{page.name}:{block.line}: rectgrad {' '.join(words)}"


def calls() -> list[tuple[str, ...]]:
    """Every call of rectgrad that a page shows, once."""
    found = (w for page in WITH_BASH for b in blocks(page, "bash") if not b.reason for w in commands(b))
    return list(dict.fromkeys(map(tuple, found)))


def quick(call: tuple[str, ...]) -> bool:
    """Whether a call ends by itself within seconds: no training, no measuring, no server, no cluster."""
    return call[0] in ("explain", "compare", "sweep", "layers", "methods", "models") and "ray" not in call


@pytest.mark.parametrize("call", list(filter(quick, calls())), ids=" ".join)
def test_quick_commands_run(call, tmp_path, monkeypatch, capsys):
    """Beside the photos that the pages speak of. By default, averages are of two inputs here."""
    monkeypatch.chdir(tmp_path)
    for name, option in {"smoothgrad": "samples", "integrated_gradients": "steps"}.items():
        monkeypatch.setitem(METHODS, name, replace(METHODS[name], **{option: 2}))
    Path("photos").mkdir()
    for place in ("cat.jpg", "photos/cat.jpg", "photos/other.jpg", "chelsea.png", "coffee.png"):
        read(sample_photo()).save(place)
    monkeypatch.setattr("sys.argv", ["rectgrad", *call])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0, capsys.readouterr().err


def test_the_other_commands_are_told(capsys):
    others = [" ".join(call) for call in calls() if not quick(call)]
    with capsys.disabled():
        print(f"\ndocs: {len(others)} commands checked by name and options, not run: {'; '.join(others)}")
    assert len(others) <= 25


def test_a_wrong_command_is_found():
    def found(code):
        return [wrong_in(words) for words in commands(Block("", 1, "bash", code, None))]

    assert found("rectgrad explain cat.jpg --q 95  # --not an option\n") == [None]
    assert found("RAY=1 rectgrad data cifar10 && rectgrad explode\n")[0] is None
    assert "explode" in found("RAY=1 rectgrad data cifar10 && rectgrad explode\n")[1]
    assert found("rectgrad explain --method smoothgrad --over rectgrad --samples 2\n") == [None]
    assert "explode" in found("ray job submit -- \\\n  rectgrad explode\n")[0]
    assert "--colour" in found("rectgrad explain cat.jpg \\\n  --colour red\n")[0]


def test_few_blocks_are_exempt(capsys):
    exempt = [
        b for page in (*OTHERS, *PAGES) for kind in ("python", "bash") for b in blocks(page, kind) if b.reason
    ]
    with capsys.disabled():
        told = "; ".join(f"{b.page}:{b.line} ({b.reason})" for b in exempt)
        print(f"\ndocs: {len(exempt)} blocks not run{': ' + told if told else ''}")
    assert len(exempt) <= MOST_EXEMPT


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_and_images_exist(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation():
    navigation = ROOT.joinpath("mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"([\w-]+\.(?:md|ipynb))$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (*PAGES, *ROOT.joinpath("docs").glob("*.ipynb")))


def test_the_gallery_shows_every_photo_with_its_source():
    """At most 30 photos may be shown, each at 224 pixels or less."""
    page = ROOT.joinpath("docs", "gallery.md").read_text(encoding="utf-8")
    sheets = runpy.run_path(str(ROOT / "docs" / "gallery.py"))["SHEETS"]
    photos = {row.file for rows in sheets.values() for row in rows}
    assert len(photos) == 24
    for name, rows in sheets.items():
        with Image.open(ROOT / "docs" / "images" / f"gallery-{name}.jpg") as drawn:
            columns = 3 + max(len(row.parts) for row in rows)
            assert drawn.width <= 12 + columns * (224 + 12)
            assert drawn.height <= 12 + len(rows) * (224 + 56)
        assert f"](images/gallery-{name}.jpg)" in page
    for photo in photos:
        subject = photo.removesuffix(".jpg").partition("_")[2].replace("_", " ")
        assert subject in page.lower(), photo
    assert "github.com/EliSchwartz/imagenet-sample-images" in page
    shown = {path.name for path in ROOT.joinpath("docs", "images").glob("gallery-*")}
    assert shown == {f"gallery-{name}.jpg" for name in sheets}


ASPECTS = {
    "formula": "```text",
    "citation": r"et al\. \(?\d{4}|and \w+ \d{4}",
    "what it answers": r"\*\*It answers\*\*",
    "what it cannot": r"\*\*It does not answer\*\*",
    "cost": r"\*\*Cost\*\*",
}
NINE = (
    "gradcam guided_gradcam lrp attn_lrp excitation_backprop expected_gradients deeplift_shap occlusion rise"
).split()


def test_every_method_is_drawn_on_six_photos_of_the_gallery():
    script = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    gallery = {row.file for rows in script["SHEETS"].values() for row in rows}
    assert len(set(script["SIX"]) & gallery) == 6
    drawn = {name for rows in script["METHODS"].values() for _, name, _ in rows}
    assert set(NINE) <= drawn <= rectgrad.METHODS.keys()
    page = ROOT.joinpath("docs", "methods.md").read_text(encoding="utf-8")
    for name, rows in script["METHODS"].items():
        assert f"](images/methods-{name}.jpg)" in page
        with Image.open(ROOT / "docs" / "images" / f"methods-{name}.jpg") as picture:
            assert picture.height == 12 + (1 + len(rows)) * (24 + 132 + 12)  # a row each, and the photos


@pytest.mark.parametrize("name", sorted(rectgrad.METHODS.keys() - {"random"}))
def test_a_method_is_described_in_full(name):
    page = ROOT.joinpath("docs", "methods.md").read_text(encoding="utf-8")
    section = re.search(rf"^###? [^\n]*`{name}`[^\n]*\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)[1]
    assert [aspect for aspect, words in ASPECTS.items() if not re.search(words, section)] == []


def test_the_comparison_cites_tests_that_exist():
    text = ROOT.joinpath("docs", "comparison.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"`(tests/\w+\.py)`", text))
    assert cited
    assert all(ROOT.joinpath(path).is_file() for path in cited)


def test_the_pages_name_every_method_and_everything_public():
    methods = ROOT.joinpath("docs", "methods.md").read_text(encoding="utf-8")
    for name in rectgrad.METHODS:
        assert f"`{name}`" in methods, name
    api = ROOT.joinpath("docs", "api.md").read_text(encoding="utf-8")
    for name in rectgrad.__all__:
        assert re.search(rf"^::: rectgrad\.(\w+\.)*{name}\b", api, flags=re.MULTILINE), name


def test_the_methods_page_has_a_row_for_every_option():
    """In the section whose heading names the method, or another method of its class."""
    text = ROOT.joinpath("docs", "methods.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for name, method in rectgrad.METHODS.items():
        names = [f"`{n}`" for n, other in rectgrad.METHODS.items() if type(other) is type(method)]
        section = next(s for s in sections if any(n in s.partition("\n")[0] for n in names))
        listed = re.findall(r"^\| `(\w+)` \| `", section, flags=re.MULTILINE)
        assert set(listed) == {field.name for field in fields(method)}, name


@pytest.mark.parametrize("name", ["explain", "attribute", "capture", "Explanation"])
def test_the_api_page_has_a_row_for_every_parameter(name):
    """In the table between the name's own heading and the next one."""
    text = ROOT.joinpath("docs", "api.md").read_text(encoding="utf-8")
    section = re.search(rf"^::: [\w.]+\.{name}\n(.*?)^:::", text, flags=re.DOTALL | re.MULTILINE)[1]
    cells = re.findall(r"^\| (`.+?`) \|", section, flags=re.MULTILINE)
    assert re.findall(r"\w+", " ".join(cells)) == list(inspect.signature(getattr(rectgrad, name)).parameters)


def test_the_page_of_questions_shows_the_verdict():
    verdict = json.loads((ROOT / "results/verdicts/efficientnet_lite0/verdict.json").read_text())
    text = (ROOT / "docs/which-method.md").read_text()
    measures = ("insertion_blur", "deletion_blur", "road", "grid_pointing", "specificity")
    for row in verdict["ranks"]["order"]:
        name = f"control `{row}`" if row in verdict["controls"] else f"`{row}`"
        cells = " | ".join(f"{verdict['table'][measure][row]['mean']:.2f}" for measure in measures)
        assert f"| {name} | {cells} |" in text


def test_the_page_of_questions_has_the_answers_of_every_verdict():
    lines = (ROOT / "docs/which-method.md").read_text().splitlines()
    for path in sorted((ROOT / "results/verdicts").glob("*/verdict.json")):
        name = path.parent.name.replace("efficientnet_lite", "Lite").replace("cifar10_cnn-", "CNN ")
        name = name.replace("cifar10_resnet", "ResNet").replace("cifar10_vit", "ViT").replace("-", " ")
        answers = json.loads(path.read_text())["answers"].values()
        cells = [each if isinstance(each, str) else ", ".join(f"`{m}`" for m in each) for each in answers]
        assert f"| {name} | {' | '.join(cells)} |" in lines
