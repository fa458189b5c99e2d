"""On networks where the truth is known by construction, the verdict finds it."""

from dataclasses import replace

import pytest

import rectgrad
from planted import NETWORKS, Copycat, PatchNet, Shown, pictures
from rectgrad.verdict.presets import PRESETS

SMALL = replace(PRESETS["quick"], photos=12, chunk=12, steps=6, leaders=0)
SEEDS = range(20)


def judged(network, methods, seed, measures="insertion_mean,deletion_mean"):
    x = pictures(network, 12, seed)
    return rectgrad.judge(network, x, methods, measures=measures, preset=SMALL, seed=seed)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_truth_is_first_and_random_last(name):
    network = NETWORKS[name]().eval()
    methods = {
        "noise": rectgrad.RandomMap(7),
        "half": Shown(network.regions, 0.5),
        "truth": Shown(network.regions),
    }
    for seed in SEEDS:
        verdict = judged(network, methods, seed)
        order = verdict.ranks["order"]
        assert order[0] == "truth"
        assert [row for row in order if row in methods][-1] == "noise"
        assert "truth" in verdict.answers["where"]
        assert "noise" not in verdict.answers["where"]


def test_intervals_of_equal_methods_contain_zero():
    network = PatchNet().eval()
    contained = {"noise": 0, "copy": 0}
    for seed in SEEDS:
        methods = {
            "truth": Shown(network.regions),
            "copy": Shown(network.regions),
            "noise": rectgrad.RandomMap(100 + seed),
        }
        verdict = judged(network, methods, seed, "deletion_mean")
        found = {(pair["a"], pair["b"]): pair for pair in verdict.pairs}
        noise, copy = found["noise", "random"], found["truth", "copy"]
        assert noise["difference"] != 0
        contained["noise"] += noise["low"] <= 0 <= noise["high"]
        contained["copy"] += copy["low"] <= 0 <= copy["high"]
        assert copy["better"] is None
    assert min(contained.values()) >= 17


def test_controls_expose_a_copy_of_the_edges():
    network = PatchNet().eval()
    methods = {"truth": Shown(network.regions), "copycat": Copycat()}
    verdict = judged(network, methods, 0)
    assert verdict.answers["where"] == ["truth"]
    said = [claim for claim in verdict.record["claims"] if "show more of the network than" in claim]
    assert any("copycat" in claim and "edges" in claim for claim in said)
    assert not any("truth" in claim for claim in said)
