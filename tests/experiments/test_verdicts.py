"""Verdicts that the numbers do not carry are inconclusive."""

import numpy as np
import torch
from torch import nn

from rectgrad.experiments import (
    class_sensitivity,
    coherence,
    feature_maps,
    matched,
    noise_level,
    padding_trick,
    sanity,
    statistics,
    threshold,
)
from rectgrad.experiments.findings import Finding


def verdict_on_tau(networks: int, tau: float) -> Finding:
    """The finding that tau is close to 0, from the layers of some networks."""
    values = tau + np.random.default_rng(0).normal(0, 1e-3, (networks, 40))
    levels = [0, 20, 50, 80, 99]
    curve = [statistics.estimate(values)] * len(levels)
    about = {
        "q": levels,
        "gini": curve,
        "overlap_20_80": statistics.estimate(values),
        "layers": {"1 relu5": {"tau": curve}, "2 relu4": {"tau": curve}},
    }
    return threshold.findings({"cnn": about})[1]


def test_one_network_does_not_decide_whether_tau_is_close_to_0():
    assert verdict_on_tau(5, 0.001).holds is True
    assert verdict_on_tau(5, 0.05).holds is False
    assert verdict_on_tau(5, -0.05).holds is False
    assert verdict_on_tau(5, 0.01).holds is None
    assert verdict_on_tau(1, 0.001).holds is None
    assert "dense layer 1" in verdict_on_tau(5, 0.05).because


def test_a_zero_map_is_not_the_sparsest(monkeypatch):
    maps = torch.zeros(2, 4, 4)
    maps[0, 1, 1] = 1
    monkeypatch.setattr(coherence, "comparison_map", lambda module, x, method: maps)
    found = coherence._sparsity(maps, nn.Identity(), "rectgrad")
    for key, values in found.items():
        assert values[0] > 0.9, key
        assert np.isnan(values[1]), key


def similar(value: float, floor: float, seed: int) -> dict[str, np.ndarray]:
    """Similarities (networks, images) to the map of the least likely class, and to unrelated maps."""
    rng = np.random.default_rng(seed)
    return {
        f"{key} {which}": mean + rng.normal(0, 0.05, (5, 40))
        for key in class_sensitivity.MEASURES
        for which, mean in (("least likely", value), ("unrelated images", floor))
    }


def test_similarity_that_unrelated_images_have_too_is_not_insensitivity_to_the_class():
    saliency = similar(0.1, 0.0, 0)
    for value in (0.8, 0.35, 0.1):
        found = class_sensitivity._summary(similar(value, 0.25, 1), saliency)["rank least likely"]
        assert np.isclose(found["above floor"]["mean"], value - 0.25, atol=0.02)
        assert np.isclose(found["above saliency"]["mean"], value - 0.25 - 0.1, atol=0.02)


def test_similarity_that_unrelated_images_have_too_is_not_insensitivity_to_the_weights():
    values = {"cascading rank": np.full((5, 6, 40), 0.4), "floor rank": np.full((5, 40), 0.3)}
    values["cascading rank"][:, :-1] = 0.9
    assert np.allclose(sanity.beyond_floor(values, "rank"), 0.1)
    assert sanity.beyond_floor(values, "rank").shape == (5, 40)


def test_maps_without_a_value_are_counted():
    values = np.full((1, 30), 0.5)
    values[0, :7] = np.nan
    assert class_sensitivity._cell(statistics.spread(values)).endswith(", 7 undefined")
    assert "undefined" not in class_sensitivity._cell(statistics.spread(values[:, 7:]))


def test_the_padding_trick_hides_an_object_only_if_its_share_of_the_map_falls():
    """It removes attribution of the object in the outer ring, but more of the background."""
    rng = np.random.default_rng(0)

    def place(without: float, with_: float) -> dict:
        values = {k: m + rng.normal(0, 0.01, (5, 40)) for k, m in (("without", without), ("with", with_))}
        removed = statistics.difference(values["without"], values["with"])
        return {**{k: statistics.estimate(v) for k, v in values.items()}, "removed": removed}

    groups = {
        key: {"n": 40, "object": place(0.07, 0.05), "background": place(0.2, 0.1), "outside": place(0.5, at)}
        for key, at in (("reaching", 0.45), ("inside", 0.4))
    }
    rings = {**place(0.3, 0.1), "without": [place(0.3, 0.1)["without"]], "with": [place(0.3, 0.1)["with"]]}
    found = padding_trick.findings({"objects": groups, "dataset": {"rectgrad": rings, "area": [0.5]}})
    assert [each.holds for each in found] == [True, True, False, True]


def test_chosen_images_of_one_network_decide_nothing():
    def found(background: float) -> dict:
        return {"3": {"active": {"conv1": {"object": 0.5, "background": background}}}}

    assert feature_maps.findings(found(0.4))[0].holds is None
    assert feature_maps.findings(found(0.0))[0].holds is False


def test_total_variation_at_the_same_gini_index_is_quoted_with_the_effect_of_the_cut(monkeypatch):
    def values(level: float) -> dict:
        return {"saliency": {"mean": level, "above": {}}, "rectgrad": {"mean": 1.25, "above": {}}}

    rows = {matched.name_of(steps): values(1.5) for steps in matched.VARIANTS}
    rows[matched.name_of(matched.FULL)] = values(1.125)
    monkeypatch.setattr(noise_level, "others", lambda metrics, key: [])
    monkeypatch.setattr(noise_level, "order", lambda metrics, key: "")
    last = noise_level.findings({"matched": {"outside": rows, "total_variation": rows}})[-1]
    assert "Gini" in last.claim
    assert "saliency 1.5" in last.because.lower()
    assert last.because.lower().index("saliency 1.12") > last.because.index("the cut makes edges")
