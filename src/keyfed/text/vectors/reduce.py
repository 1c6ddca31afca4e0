r"""Fewer numbers a word: PCA, and PCA between two post-processings (PP-PCA-PP).

With the rows of X the vectors of our words (those without one take no part, and stay zero):

    PCA(X, N)              Y = (X − X̄) Uᵀ, the rows of U the first N principal components
    PPA(X, D)              X ← X − X̄;  v ← v − Σ_{i ≤ D} (u_iᵀ v) u_i for every row v   (algorithm 1)
    PP-PCA-PP(X, N, D)     PPA(PCA(PPA(X, D), N), D)                                    (algorithm 2)

Components have no sign of their own; the entry largest in absolute value is made positive, so that two
machines agree. Arithmetic is in float64, the result in float32.

References:
  Stremmel and Singh, *Pretraining Federated Text Models for Next Word Prediction*, 2020, algorithms 1 and 2.
  Mu and Viswanath, *All-but-the-Top*, 2018. Raunak et al., *Effective Dimensionality Reduction for Word
  Embeddings*, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Vectors of fewer dimensions.

    Attributes:
      matrix: float32 [words, dim]; rows of words without a vector are zero.
      explained: Share of the variance that each component kept explains [dim]: of PCA's input, so
        after the first post-processing where there is one.
      removed_before: Share of the variance of each component removed before PCA [D]; empty for PCA.
      removed_after: … and after PCA [D].
    """

    matrix: NDArray[np.float32]
    explained: Float64
    removed_before: Float64
    removed_after: Float64


def pca(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int) -> Reduced:
    """Reduce to the first principal components, fitted on the matched rows.

    Raises:
      ConfigError: `dim` is below 1 or more than the vectors can give, or scikit-learn is missing.
      DataError: Fewer than two rows are matched, or all are equal.

    Example:
      >>> line = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [9.0, 0.0]])
      >>> pca(line, np.array([True, True, True, False]), 1).matrix.round(3).tolist()
      [[-1.4140000343322754], [0.0], [1.4140000343322754], [0.0]]
    """
    rows = _usable(matrix, matched, dim)
    reduced, explained = _transform(rows, dim)
    nothing = np.zeros(0)
    return Reduced(_put_back(reduced, matched), explained, nothing, nothing)


def pp_pca_pp(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int, remove: int = 7) -> Reduced:
    """Post-process, reduce by PCA, post-process again (algorithm 2), fitted on the matched rows.

    Args:
      remove: D, the components removed before and after; 0 leaves PCA alone.

    Raises:
      ConfigError: `dim` is below 1 or more than the vectors can give, `remove` is negative or would leave
        nothing, or scikit-learn is missing.
      DataError: Fewer than two rows are matched, or all are equal.
    """
    if not 0 <= remove < dim:
        raise ConfigError(f"{remove} components to remove of {dim}; expected 0 to {dim - 1}")
    rows = _usable(matrix, matched, dim)
    if remove >= min(rows.shape[1], len(rows) - 1):  # nothing but rounding errors would be left
        raise ConfigError(f"{remove} components to remove from {len(rows):,} vectors of {rows.shape[1]}; take fewer")
    purified, before = _post_process(rows, remove)
    reduced, explained = _transform(purified, dim)
    result, after = _post_process(reduced, remove)
    return Reduced(_put_back(result, matched), explained, before, after)


def _post_process(x: Float64, remove: int) -> tuple[Float64, Float64]:
    """Return PPA(X, D) (algorithm 1) and the share of the variance of each component removed."""
    x = x - x.mean(axis=0)
    if remove == 0:
        return x, np.zeros(0)
    u, shares = _components(x, remove)
    return x - (x @ u.T) @ u, shares


def _transform(x: Float64, dim: int) -> tuple[Float64, Float64]:
    """Return PCA(X, N) and the share of the variance that each component explains."""
    u, shares = _components(x, dim)
    return (x - x.mean(axis=0)) @ u.T, shares


def _components(x: Float64, count: int) -> tuple[Float64, Float64]:
    """Return the first principal components [count, width], signs fixed, and their shares of the variance."""
    fitted = _scikit_learn().PCA(count, svd_solver="covariance_eigh").fit(x)
    u: Float64 = fitted.components_
    largest = np.take_along_axis(u, np.abs(u).argmax(axis=1)[:, None], axis=1)
    return u * np.where(largest < 0, -1.0, 1.0), np.asarray(fitted.explained_variance_ratio_, np.float64)


def _scikit_learn() -> Any:
    try:
        from sklearn import decomposition
    except ImportError:
        raise ConfigError("reducing word vectors needs scikit-learn: pip install scikit-learn") from None
    return decomposition


def _usable(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int) -> Float64:
    """Return the matched rows in float64, where they can be reduced to `dim` dimensions."""
    rows = matrix[matched].astype(np.float64)
    if len(rows) < 2 or not np.ptp(rows, axis=0).any():
        raise DataError(f"{len(rows):,} words with a vector, not two of them different; expected many to reduce them")
    most = min(rows.shape)
    if not 1 <= dim <= most:
        raise ConfigError(
            f"{dim} dimensions from {len(rows):,} vectors of {rows.shape[1]}; expected 1 to {most} (more words, "
            "or wider vectors, give more)"
        )
    return rows


def _put_back(rows: Float64, matched: NDArray[np.bool_]) -> NDArray[np.float32]:
    matrix = np.zeros((len(matched), rows.shape[1]), np.float32)
    matrix[matched] = rows
    return matrix
