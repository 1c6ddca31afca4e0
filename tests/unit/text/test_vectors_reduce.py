"""PCA and PP-PCA-PP beside a transcription of the source's two algorithms in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DataError
from keyfed.reports.figures import draw_explained
from keyfed.text.vectors import pca, pp_pca_pp


def components(x: np.ndarray, count: int) -> np.ndarray:
    """The first principal components, the largest entry of each positive: by SVD, not by scikit-learn."""
    _, _, u = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return np.stack([row * np.sign(row[np.argmax(np.abs(row))]) for row in u[:count]]) if count else u[:0]


def algorithm_1(x: np.ndarray, d: int) -> np.ndarray:
    """PPA(X, D), line by line."""
    x = x - x.mean(axis=0)
    u = components(x, d)
    return np.stack([v - sum((u_i @ v) * u_i for u_i in u) for v in x])


def pca_transform(x: np.ndarray, n: int) -> np.ndarray:
    return (x - x.mean(axis=0)) @ components(x, n).T


def algorithm_2(x: np.ndarray, n: int, d: int) -> np.ndarray:
    """PP_PCA_PP(X, N, D), line by line."""
    x = algorithm_1(x, d)
    x = pca_transform(x, n)
    return algorithm_1(x, d)


def vectors(words: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors as words have them: a common mean, a few strong directions; a fifth of the words without."""
    rng = np.random.default_rng(seed)
    strength = 3.0 / np.arange(1, width + 1) ** 0.7
    turn, _ = np.linalg.qr(rng.normal(size=(width, width)))
    matrix = (rng.normal(size=(words, width)) * strength) @ turn + rng.normal(size=width)
    matched = rng.random(words) > 0.2
    return np.where(matched[:, None], matrix, 0.0).astype(np.float32), matched


def test_pca_is_the_transcription():
    matrix, matched = vectors(400, 30)
    got = pca(matrix, matched, 10)
    np.testing.assert_allclose(got.matrix[matched], pca_transform(matrix[matched].astype(float), 10), atol=1e-5)
    assert got.matrix.dtype == np.float32
    assert got.matrix.shape == (400, 10)
    assert not got.matrix[~matched].any()


@pytest.mark.parametrize("remove", [1, 3, 7])
@pytest.mark.parametrize("dim", [10, 30])
def test_pp_pca_pp_is_the_transcription(dim, remove):
    matrix, matched = vectors(400, 30)
    got = pp_pca_pp(matrix, matched, dim, remove)
    expected = algorithm_2(matrix[matched].astype(float), dim, remove)
    # To the same width, the directions removed are the last components: zero but for rounding, and any basis will do.
    kept = min(dim, 30 - remove)
    np.testing.assert_allclose(got.matrix[matched][:, :kept], expected[:, :kept], atol=1e-5)
    np.testing.assert_allclose(got.matrix[matched][:, kept:], 0.0, atol=1e-5)
    assert not got.matrix[~matched].any()
    assert (len(got.explained), len(got.removed_before), len(got.removed_after)) == (dim, remove, remove)
    assert got.removed_before[0] > got.explained[0]


def test_seven_components_are_removed_unless_told_otherwise():
    matrix, matched = vectors(300, 20)
    np.testing.assert_array_equal(pp_pca_pp(matrix, matched, 12).matrix, pp_pca_pp(matrix, matched, 12, 7).matrix)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_removing_nothing_is_pca(seed, dim):
    matrix, matched = vectors(80, 12, seed)
    plain, both = pca(matrix, matched, dim), pp_pca_pp(matrix, matched, dim, 0)
    np.testing.assert_allclose(both.matrix, plain.matrix, atol=1e-5)
    np.testing.assert_allclose(both.explained, plain.explained, atol=1e-9)
    assert len(both.removed_before) == len(both.removed_after) == 0


def test_explained_shares_are_those_of_the_variance():
    matrix, matched = vectors(400, 30)
    got = pca(matrix, matched, 30)
    variances = got.matrix[matched].var(axis=0, dtype=float)
    np.testing.assert_allclose(got.explained, variances / variances.sum(), atol=1e-6)
    assert got.explained.sum() == pytest.approx(1.0)
    assert (np.diff(got.explained) <= 0).all()


def test_order_of_words_and_unmatched_rows_do_not_matter():
    matrix, matched = vectors(200, 16)
    order = np.random.default_rng(3).permutation(200)
    for reduce in (pca, pp_pca_pp):
        got = reduce(matrix, matched, 9).matrix
        np.testing.assert_allclose(reduce(matrix[order], matched[order], 9).matrix, got[order], atol=1e-5)
        np.testing.assert_allclose(reduce(matrix[matched], matched[matched], 9).matrix, got[matched], atol=1e-5)


def test_what_cannot_be_reduced_is_one_line():
    matrix, matched = vectors(200, 16)
    for dim in (0, 17):
        with pytest.raises(ConfigError, match=f"{dim} dimensions from .* vectors of 16; expected 1 to 16"):
            pca(matrix, matched, dim)
    with pytest.raises(ConfigError, match="5 dimensions from 4 vectors of 16; expected 1 to 4"):
        pca(matrix[matched][:4], np.ones(4, bool), 5)
    for remove in (-1, 8):
        with pytest.raises(ConfigError, match=f"{remove} components to remove of 8; expected 0 to 7"):
            pp_pca_pp(matrix, matched, 8, remove)
    with pytest.raises(ConfigError, match="3 components to remove from 4 vectors"):
        pp_pca_pp(matrix[matched][:4], np.ones(4, bool), 4, 3)
    with pytest.raises(DataError, match="1 words with a vector"):
        pca(matrix, np.arange(200) == np.argmax(matched), 1)
    with pytest.raises(DataError, match="not two of them different"):
        pca(np.ones((9, 4)), np.ones(9, bool), 2)


def _shares(reduced):
    return reduced.explained, reduced.removed_before


def test_the_plot_of_explained_variance():
    matrix, matched = vectors(200, 16)
    whole = pca(matrix, matched, 16).explained
    plot = draw_explained(*_shares(pp_pca_pp(matrix, matched, 9, 2)))
    assert plot.light[:8] == plot.dark[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot.light != plot.dark
    # The components kept are those after the removed ones, in shares of the whole variance.
    kept, first, removed = (f"{share:.1%}" for share in (whole[2:11].sum(), whole[2], whole[:2].sum()))
    assert plot.alt.endswith(f"9 kept with {kept}, the first {first}; 2 removed with {removed}")
    assert "removed" not in draw_explained(*_shares(pca(matrix, matched, 1))).alt
