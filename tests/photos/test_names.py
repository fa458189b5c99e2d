"""Names of results: one for each photo on every file system, whatever the photos are called."""

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectgrad.photos import files
from rectgrad.photos.names import folded, unique_names

# Few letters, so that names clash: case, two forms of umlauts, dots, suffixes of photos and of results.
PIECE = st.sampled_from(
    ["a", "A", "b", "ä", "a\u0308", "Ä", "ß", "SS", ".", "_", " ", "~", "ﬁ", "\udcff", "x" * 90]
)
STEM = st.lists(PIECE, min_size=1, max_size=4).map("".join).filter(lambda text: text.strip(". "))
SUFFIX = st.sampled_from([".jpg", ".JPG", ".png", ".jpg.png", ".json", ".png.jpg", ""])
FILE = st.builds(str.__add__, STEM, SUFFIX)
FOLDER = st.one_of(FILE, st.sampled_from(["a.png", "index.html", "explained.jsonl", "thumbnails", "a.png_"]))
RELATIVE = st.builds(lambda folders, file: "/".join([*folders, file]), st.lists(FOLDER, max_size=2), FILE)
PHOTO = st.tuples(st.sampled_from(["/one", "/two", "/two/a"]), RELATIVE)
RESERVED = st.lists(st.sampled_from(["compare", "a", "B"]), max_size=2, unique=True)


def written(name):
    """Every file that a run may write for one photo."""
    return [*(f"{name}{suffix}" for suffix in (".png", ".json", ".npy", ".npz")), f"thumbnails/{name}.jpg"]


def on_any_disk(path):
    """Another spelling of `folded`: no case, decomposed."""
    return unicodedata.normalize("NFD", path).lower()


@given(st.lists(PHOTO, max_size=12, unique_by="/".join), RESERVED)
def test_no_two_photos_share_a_result(photos, reserved):
    given_photos = [(Path(root, relative), Path(relative)) for root, relative in photos]
    names = unique_names(given_photos, reserved)
    assert len({folded(name) for name in names} | set(map(folded, reserved))) == len(names) + len(reserved)
    paths = [path for name in [*names, *reserved] for path in written(name)]
    paths += ["index.html", "explained.jsonl"]
    assert len({on_any_disk(path) for path in paths}) == len(paths)
    folders = {str(parent) for path in paths for parent in Path(on_any_disk(path)).parents}
    assert not folders & {on_any_disk(path) for path in paths}  # a folder is no file
    for path in paths:
        parts = Path(path).parts
        assert ".." not in parts
        assert not os.path.isabs(path)
        assert all(len(part.encode()) <= 220 for part in parts[-1:])


@given(st.lists(PHOTO, min_size=1, max_size=8, unique_by="/".join), st.randoms())
def test_names_do_not_depend_on_the_order(photos, random):
    given_photos = [(Path(root, relative), Path(relative)) for root, relative in photos]
    names = dict(zip(given_photos, unique_names(given_photos), strict=True))
    random.shuffle(given_photos)
    assert dict(zip(given_photos, unique_names(given_photos), strict=True)) == names


@given(st.lists(st.sampled_from(["n1", "n2", "deep/n3"]), min_size=1, max_size=3, unique=True), FILE)
def test_folders_are_kept(folders, file):
    photos = [(Path("/root", folder, "x.jpg"), Path(folder, "x.jpg")) for folder in folders]
    assert unique_names(photos) == [f"{folder}/x" for folder in folders]


def named(folder, *arguments):
    return [source.name for source in files.sources([str(folder / each) for each in arguments])]


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_longer_names_for_those_that_clash(tmp_path):
    touch(tmp_path, "a.jpg", "a.png", "a.jpg.png", "b.jpg", "B.JPG", "c.jpg")
    by_file = dict(zip(sorted(os.listdir(tmp_path)), named(tmp_path, "."), strict=True))
    assert by_file["a.jpg"] != by_file["a.png"] != by_file["a.jpg.png"]
    assert by_file["c.jpg"] == "c"
    assert folded(by_file["b.jpg"]) != folded(by_file["B.JPG"])


def test_two_folders_with_a_photo_of_the_same_name(tmp_path):
    touch(tmp_path, "one/cat.jpg", "two/cat.jpg", "two/dog.jpg")
    assert named(tmp_path, "one", "two") == ["one/cat", "two/cat", "dog"]
    assert named(tmp_path, "one/cat.jpg", "two/cat.jpg") == ["one/cat", "two/cat"]


def test_a_pattern_keeps_the_folders_that_it_searches(tmp_path):
    touch(tmp_path, "n1/cat.jpg", "n2/cat.jpg", "n2/deep/dog.jpg")
    assert named(tmp_path, "*/cat.jpg") == ["n1/cat", "n2/cat"]
    assert named(tmp_path, "**/*.jpg") == ["n1/cat", "n2/cat", "n2/deep/dog"]
    assert named(tmp_path, "n2/*.jpg") == ["cat"]


def test_a_name_that_the_command_uses_itself(tmp_path):
    touch(tmp_path, "compare.jpg")
    [source] = files.sources([str(tmp_path)], reserved=["compare"])
    assert source.name == "compare.jpg"


@pytest.mark.parametrize("name", ["con", "NUL", "com1.old", "aux "])
def test_names_of_devices(name):
    [found] = unique_names([(Path(f"{name}.jpg"), Path(f"{name}.jpg"))])
    assert found.endswith("_")
    [inside] = unique_names([(Path(name, "a.jpg"), Path(name, "a.jpg"))])
    assert inside == f"{name}_/a"


@pytest.mark.parametrize("name", ["ends.", "ends "])
def test_folders_do_not_end_in_dots_or_spaces(name):
    [found] = unique_names([(Path(name, "a.jpg"), Path(name, "a.jpg"))])
    assert found == f"{name}_/a"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_can_be_stored_where_file_names_are_not_utf8(monkeypatch, encoding):
    """In such a locale, Python reads the bytes of a name in that encoding, or escapes them."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: encoding)
    paths = [
        Path("/photos", name.encode().decode(encoding, "surrogateescape")) for name in ("фото.jpg", "кот.jpg")
    ]
    names = unique_names([(path, Path(path.name)) for path in paths])
    assert len({name.encode(encoding) for name in names}) == 2
