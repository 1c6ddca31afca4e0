"""Word vectors as the embedding to start from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keyfed.errors import ShapeMismatch
from keyfed.model.language_model import ModelSpec, init_params
from keyfed.run.start import with_vectors

SPEC = ModelSpec("small", "gru", vocab=7, embed=3, hidden=5)
MATCHED = np.array([False, False, False, True, True, False, True])


def test_matched_rows_are_the_vectors_and_all_else_stays():
    params = init_params(SPEC, 1)
    matrix = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    matrix[~MATCHED] = np.nan  # must not be read
    found = with_vectors(params, SPEC, matrix, MATCHED)
    table = found["embedding.weight"].numpy()
    assert np.array_equal(table[MATCHED], matrix[MATCHED])
    assert np.array_equal(table[~MATCHED], params["embedding.weight"].numpy()[~MATCHED])
    assert list(found) == list(params)
    assert all(torch.equal(found[name], p) for name, p in params.items() if name != "embedding.weight")
    assert all(torch.equal(params[name], p) for name, p in init_params(SPEC, 1).items())


def test_vectors_that_do_not_fit_are_refused():
    params = init_params(SPEC, 1)
    with pytest.raises(ShapeMismatch, match=r"\[7, 4\].*3 wide; reduce them to 3, or set model.embed=4"):
        with_vectors(params, SPEC, np.zeros((7, 4), np.float32), MATCHED)
    with pytest.raises(ShapeMismatch, match="vocabulary of 7"):
        with_vectors(params, SPEC, np.zeros((6, 3), np.float32), MATCHED[:6])
