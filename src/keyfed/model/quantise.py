r"""Weights in eight bits: one symmetric scale a row.

.. math:: s_r = \max_c |w_{rc}| / 127, \qquad q_{rc} = \mathrm{round}(w_{rc} / s_r), \qquad ŵ_{rc} = s_r\, q_{rc}

so :math:`|ŵ - w| \le s_r / 2`. The page widens the weights when it loads them and the graph stays that of float32: the
download shrinks, the arithmetic does not change.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SCALE = ".scale"  # behind the name of a matrix: its scales
MOST = 127


def quantise_rows(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return q int8 [rows, columns] and s float32 [rows]; a row of zeros has scale 0.

    Example:
      >>> q, scale = quantise_rows(np.array([[0.5, -1.27], [0.0, 0.0]], np.float32))
      >>> q.tolist(), [round(float(s), 4) for s in scale]
      ([[50, -127], [0, 0]], [0.01, 0.0])
    """
    scale = (np.abs(matrix).max(axis=1, initial=0.0) / MOST).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)[:, None].astype(np.float64)
    return np.rint(matrix / safe).clip(-MOST, MOST).astype(np.int8), scale


def widen_rows(q: NDArray[np.int8], scale: Floats) -> Floats:
    """Return ŵ = s q in float32, the same bits in every language: one product a number."""
    return q.astype(np.float32) * scale[:, None].astype(np.float32)


def quantise(params: Mapping[str, Floats]) -> dict[str, NDArray[np.generic]]:
    """Return what the weights file holds: matrices as NAME and NAME.scale, vectors as they are."""
    out: dict[str, NDArray[np.generic]] = {}
    for name, value in params.items():
        if value.ndim == 2:
            out[name], out[name + SCALE] = quantise_rows(value)
        else:
            out[name] = value
    return out


def widen(stored: Mapping[str, NDArray[np.generic]]) -> dict[str, Floats]:
    """Return the weights of a weights file in float32, whichever precision it has."""
    out: dict[str, Floats] = {}
    for name, value in stored.items():
        if value.dtype == np.int8:
            out[name] = widen_rows(value.astype(np.int8), stored[name + SCALE].astype(np.float32))
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in stored):
            out[name] = value.astype(np.float32)
    return out
