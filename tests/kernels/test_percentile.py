"""Percentile selection against Python's sorted() and numpy's percentile."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rectgrad.kernels.reference import percentile

units = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), st.sampled_from([0.0, -0.0, 1.0, -1.0])),
    min_size=1,
    max_size=120,
)


@settings(max_examples=400, deadline=None)
@given(values=units, q=st.one_of(st.floats(0, 100), st.integers(0, 100).map(float)))
def test_nearest_is_the_element_of_the_specification(values, q):
    score = torch.tensor([values], dtype=torch.float32)
    row = sorted(score[0].tolist(), reverse=True)
    expected = row[round((len(row) - 1) * (1 - q / 100))]
    assert percentile(score, q).item() == expected


@settings(max_examples=400, deadline=None)
@given(values=units, q=st.floats(0, 100))
def test_linear_is_numpys(values, q):
    score = torch.tensor([values], dtype=torch.float64)
    expected = np.percentile(np.array(values, dtype=np.float64), q, method="linear")
    assert np.isclose(percentile(score, q, "linear").item(), expected, rtol=1e-12, atol=1e-9)


def test_each_row_has_its_own():
    score = torch.tensor([[1.0, 2, 3, 4, 5], [50, 40, 30, 20, 10]])
    assert percentile(score, 75).tolist() == [4.0, 40.0]
    assert percentile(score, 0).tolist() == [1.0, 10.0]
    assert percentile(score, 100).tolist() == [5.0, 50.0]


def test_exact_above_the_integers_of_float32():
    """2**24 + 3 units: an index computed in float32 would be off by one."""
    d = 2**24 + 3
    score = torch.zeros(1, d, dtype=torch.float64)
    score[0] = torch.arange(d, dtype=torch.float64)
    index = round((d - 1) * (1 - 98 / 100))
    assert percentile(score, 98).item() == d - 1 - index
