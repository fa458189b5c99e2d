"""Words on the colours of their values: in a terminal, and as HTML."""

import re

import numpy as np
import pytest
import torch

from rectgrad import image

TOKENS = ["I", "<3", "this", "film", "not"]
VALUES = [0.0, 2.0, 0.02, 0.5, -1.0]
RED = "109;7;18"  # the strongest value


def test_a_terminal_shows_the_same_words():
    shown = image.words(TOKENS, VALUES)
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == "I <3 this film not"
    assert shown.count("\x1b[0m") == shown.count("\x1b[48;2;") == 3


def test_the_strongest_word_has_the_strongest_colour_and_faint_ones_have_none():
    shown = image.words(TOKENS, VALUES)
    found = {word: ink for ink, word in re.findall(r"\x1b\[48;2;([\d;]+);38;[\d;]+m(\S+)\x1b", shown)}
    assert found.keys() == {"<3", "film", "not"}
    assert found["<3"] == RED
    table = image.colours("signed").round().astype(int)
    assert found["not"] == ";".join(map(str, table[64]))
    assert image.words(TOKENS, np.zeros(5)) == " ".join(TOKENS)


def test_text_can_be_read_on_its_colour():
    shades = re.findall(
        r"48;2;(\d+);(\d+);(\d+);38;2;(\d+);", image.words("a b c d".split(), [1, 0.1, -0.1, -1])
    )
    assert [text for *_, text in shades] == ["255", "0", "0", "255"]
    for red, green, blue, text in shades:
        brightness = 0.299 * int(red) + 0.587 * int(green) + 0.114 * int(blue)
        assert abs(brightness - int(text)) > 110


def test_html_escapes_words_and_says_their_values():
    page = image.words_html(TOKENS, VALUES)
    assert page.count("<span") == len(TOKENS)
    assert ">&lt;3</span>" in page
    assert "<3" not in page
    assert re.findall(r'title="([^"]+)"', page) == ["+0", "+2", "+0.02", "+0.5", "-1"]
    assert page.count("background: rgb(") == 3


def test_a_map_of_embeddings_is_summed_for_each_word():
    maps = torch.tensor(VALUES)[:, None] * torch.tensor([0.25, 0.75])
    assert image.words(TOKENS, maps) == image.words(TOKENS, torch.tensor(VALUES))
    assert image.words(TOKENS, maps.bfloat16().requires_grad_()).count("\x1b[48;2;") == 3


def test_each_word_needs_a_value():
    with pytest.raises(ValueError, match=r"5 tokens need one value each, not shape \(4,\)"):
        image.words(TOKENS, VALUES[:4])
    assert image.words([], []) == ""
