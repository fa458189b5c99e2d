"""verdict.json: what is written is read back, and it is small."""

import json
import math

import pytest

import rectgrad
from planted import PatchNet, Shown, pictures
from rectgrad.verdict import record, values
from rectgrad.verdict.presets import PRESETS


@pytest.fixture(scope="module")
def verdict():
    network = PatchNet().eval()
    methods = {"truth": Shown(network.regions), "half": Shown(network.regions, 0.5)}
    measures = "insertion,deletion,gini,specificity"
    return rectgrad.judge(
        network, pictures(network, 8, 0), methods, measures=measures, preset=PRESETS["quick"].of_photos(8)
    )


def rounded(pairs):
    return [
        {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in pair.items()} for pair in pairs
    ]


def test_what_was_written_is_read(verdict, tmp_path):
    verdict.save(tmp_path)
    found = record.read(tmp_path / "verdict.json")
    given = json.loads(json.dumps(verdict.record))  # tuples become lists
    assert found.keys() == given.keys()
    assert found["pairs"] == rounded(given["pairs"])
    assert len(found["pairs"]) == 15 * len({pair["measure"] for pair in found["pairs"]}) > 15
    assert found["matched"]
    for variant, own in found["matched"].items():
        assert own["pairs"] == rounded(given["matched"][variant]["pairs"])
        assert own["table"] == given["matched"][variant]["table"]
    for key in found.keys() - {"pairs", "matched"}:
        assert found[key] == given[key], key


def test_the_file_is_small_and_has_a_line_for_each_key(verdict):
    written = record.text(verdict.record)
    assert len(written) < 0.5 * len(json.dumps(verdict.record, indent=1))
    assert written.count("\n") == len(verdict.record) + 3  # the columns of pairs, and two brackets
    assert json.loads(written)["pair_columns"] == list(record.COLUMNS)


def test_numbers_are_rounded_and_undefined_ones_become_null():
    given = {"a": [math.pi * 1e-7, math.nan, 3], "b": {"c": (math.inf, -math.inf, "text", None, True)}}
    assert record.plain(given) == {"a": [3.14159e-07, None, 3], "b": {"c": [None, None, "text", None, True]}}
    assert record.plain(math.pi, 2) == 3.1


def test_times_are_summed_over_chunks_and_variants():
    computed = {
        ("maps", "a"): {0: {"seconds": 1.5}, 10: {"seconds": 0.25}},
        ("maps", "b"): {0: {"seconds": 2.0}},
        ("matched", "a: no post-processing"): {0: {"seconds": 0.5}},
        ("matched", "a: times input, positive part"): {0: {"seconds": 0.125}, 8: {"error": "no"}},
    }
    assert values.times(computed) == {"maps": {"a": 1.75, "b": 2.0}, "matched": {"a": 0.62}}


def test_a_verdict_has_the_times_of_every_unit_and_row(verdict):
    rows = {"truth", "half", "random", "edges", "centre", "brightness"}
    assert verdict.record["times"].keys() == {"maps", "removal", "matched"}
    assert verdict.record["times"]["maps"].keys() == verdict.record["times"]["removal"].keys() == rows
    assert all(seconds >= 0 for own in verdict.record["times"].values() for seconds in own.values())
