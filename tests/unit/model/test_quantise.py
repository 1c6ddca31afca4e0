"""Eight bits a weight: the bound, the borders, and the file back again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from keyfed.model.language_model import quantise, quantise_rows, widen, widen_rows

matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-1e3, 1e3, width=32))


@settings(deadline=None, max_examples=60)
@given(matrices)
def test_the_error_is_at_most_half_a_step_of_the_row(matrix):
    q, scale = quantise_rows(matrix)
    assert q.dtype == np.int8
    assert np.abs(q.astype(int)).max() <= 127
    error = np.abs(widen_rows(q, scale).astype(np.float64) - matrix)
    bound = scale[:, None] / 2 + 1e-5 * np.abs(matrix) + 1e-37
    assert (error <= bound).all()


def test_a_row_uses_its_whole_range_and_zeros_stay_zero():
    matrix = np.array([[0.1, -0.2], [1000.0, 1.0], [0.0, 0.0]], np.float32)
    q, scale = quantise_rows(matrix)
    assert np.abs(q.astype(int)).max(1).tolist() == [127, 127, 0]
    assert scale[2] == 0
    assert widen_rows(q, scale)[2].tolist() == [0, 0]


def test_vectors_stay_as_they_are_and_widening_knows_both_precisions():
    params = {"a.weight": np.eye(3, dtype=np.float32), "a.bias": np.array([0.123, 4, 5], np.float32)}
    stored = quantise(params)
    assert sorted(stored) == ["a.bias", "a.weight", "a.weight.scale"]
    assert stored["a.bias"].tolist() == params["a.bias"].tolist()
    wide = widen(stored)
    assert sorted(wide) == ["a.bias", "a.weight"]
    np.testing.assert_allclose(wide["a.weight"], np.eye(3), atol=1e-6)
    assert all(np.array_equal(widen(params)[name], params[name]) for name in params)


def test_widening_what_was_quantised_and_quantising_again_changes_nothing():
    matrix = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    q, scale = quantise_rows(matrix)
    again, _ = quantise_rows(widen_rows(q, scale))
    assert np.array_equal(q, again)
