"""The maps of the former engine, which `make_stored_maps.py` stored, against those of the present one."""

import numpy as np
import pytest

import rectgrad
from make_stored_maps import LEFT_OUT, NOT_COMPARED, OPTIONS, Found, found, layers_of, read
from stored_networks import NETWORKS

ABOUT, STORED = read()
COMPARED = [(name, key) for name, maps in STORED.items() for key in maps if key not in NOT_COMPARED]


def tolerance_of(name: str) -> float:
    """The largest error allowed, as a share of the stored map's maximum."""
    return 2e-2 if name.endswith("bfloat16") else 1e-5


def assert_same(name: str, key: str, present: Found, stored: Found) -> None:
    """Both are arrays that agree, or exceptions of the same class."""
    if isinstance(present, str) or isinstance(stored, str):
        assert present == stored, key
        return
    assert [x.shape for x in present] == [x.shape for x in stored], key
    for i, (x, y) in enumerate(zip(present, stored, strict=True)):
        largest = np.abs(y).max()
        error = np.abs(x - y).max()
        assert error <= tolerance_of(name) * largest, f"{key} {i}: differs by {error:.1e} of {largest:.1e}"


def test_the_file_holds_all_networks_and_methods() -> None:
    assert set(STORED) == set(NETWORKS)
    assert len(STORED) >= 60
    assert len(OPTIONS) == 12
    assert set(OPTIONS) <= set(rectgrad.METHODS)
    assert ABOUT["options"] == OPTIONS
    expected = {(name, key) for name in NETWORKS for key in (*OPTIONS, "layers")} - LEFT_OUT
    assert {(name, key) for name, maps in STORED.items() for key in maps} == expected


def test_the_stored_maps_are_worth_comparing() -> None:
    """Every sample of every map has values other than zero."""
    for name, key in COMPARED:
        maps = STORED[name][key]
        for values in () if isinstance(maps, str) or key == "layers" else maps:
            assert np.isfinite(values).all(), (name, key)
            assert np.abs(values.reshape(len(values), -1)).max(1).min() > 0, (name, key)


@pytest.mark.parametrize("name", STORED)
def test_maps_and_layers(name: str) -> None:
    for key, stored in STORED[name].items():
        if key not in NOT_COMPARED:
            assert_same(name, key, found(name, key), stored)


@pytest.mark.parametrize("name", [name for name, layers in ABOUT["layers"].items() if layers])
def test_layer_names(name: str) -> None:
    assert [layer for layer, _ in layers_of(name)] == ABOUT["layers"][name]
