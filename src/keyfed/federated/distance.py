r"""Distances between θ and each client's parameters, layer by layer: what attentive mediators look at.

Each takes θ and the stacked uploads Δ_k = w_k − θ and returns one number a client for every layer, [m] in float64.
A client whose numbers are not finite has distance nan (it is refused anyhow). Clients are read one at a time, so the
float64 copies cost one layer of one client (on a GPU also all clients' Gram matrices of a layer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from keyfed.federated.types import Distance, Params

Reading = Literal["absolute", "softmax", "histogram", "raw"]
Norm = Literal["spectral", "frobenius"]
BINS = 64  # of the histogram reading
MOST_DIVERGENCE = math.log(2)  # nats, the largest Jensen–Shannon divergence of two distributions
SQUARINGS = 24  # of the Gram matrix: p = 2^24 in `_largest_by_squaring`


def spectral() -> Distance:
    r"""Spectral norm of matrices, Euclidean norm of vectors: d_k^l = ‖w_k^l − θ^l‖₂ (FedAtt as its authors' code).

    The largest singular value is the root of the largest eigenvalue of the Gram matrix of the smaller side: a V × 300
    layer needs the eigenvalues of 300 × 300 numbers.
    """
    one_by_one = _of_change(lambda change: _largest_singular(change) if change.dim() > 1 else _norm(change))

    def distance(theta: Params, upload: Params) -> dict[str, Tensor]:
        # On a GPU all clients' small Gram matrices together: one of them would leave it idle.
        together = {name: u for name, u in upload.items() if u.is_cuda and u.dim() > 2 and len(u)}
        rest = {name: u for name, u in upload.items() if name not in together}
        found = dict(one_by_one(theta, rest)) | {name: _largest_singulars(u) for name, u in together.items()}
        return {name: found[name] for name in upload}

    return distance


def frobenius() -> Distance:
    r"""Root of the sum of squares of a layer's change: d_k^l = ‖w_k^l − θ^l‖_F."""
    return _of_change(_norm)


def norm(which: Norm) -> Distance:
    """Return a norm of a layer's change by its name."""
    return spectral() if which == "spectral" else frobenius()


def jensen_shannon(reading: Reading = "absolute") -> Distance:
    r"""Jensen–Shannon divergence, in nats, between distributions made of θ^l and of w_k^l; at most ln 2.

    .. math::  d_k^l = \tfrac12 KL(p ‖ \tfrac{p+q}{2}) + \tfrac12 KL(q ‖ \tfrac{p+q}{2})

    Weights are signed and no distribution, so p (from θ^l) and q (from w_k^l) need a reading:

    - `absolute`: |w| / Σ|w|; a layer of zeros is read as uniform.
    - `softmax`: e^w / Σe^w over the layer's weights.
    - `histogram`: how many of the layer's weights fall into each of 64 equal bins between the smallest and the
      largest weight of both models.
    - `raw`: |w| as it is, no distribution: equation 2 to the letter. It has no limit, and is large where layers are.

    References:
      Wu, Liang, Wang, *FedMed*, Sensors 2020, equation 2 (which does not say how weights become probabilities).
    """

    def divergence(theta: Tensor, change: Tensor) -> Tensor:
        client = theta + change.reshape(-1)
        if reading == "histogram":
            low, high = torch.stack([theta, client]).aminmax()
            if not bool(low < high):
                return theta.new_zeros(())
            p, q = (torch.histc(w, BINS, float(low), float(high)) / w.numel() for w in (theta, client))
        elif reading == "softmax":
            p, q = torch.softmax(theta, 0), torch.softmax(client, 0)
        elif reading == "raw":
            p, q = theta.abs(), client.abs()
        else:
            p, q = _shares(theta), _shares(client)
        return _divergence(p, q)

    def distance(theta: Params, upload: Params) -> dict[str, Tensor]:
        out = {}
        for name, changes in upload.items():
            out[name] = _each(changes, partial(divergence, theta[name].double().reshape(-1)))
        return out

    return distance


def most_divergence(reading: Reading) -> float:
    """Return the largest divergence that can occur: ln 2 of distributions."""
    return math.inf if reading == "raw" else MOST_DIVERGENCE


def _of_change(size: Callable[[Tensor], Tensor]) -> Distance:
    def distance(theta: Params, upload: Params) -> dict[str, Tensor]:
        del theta  # the upload is the difference already
        return {name: _each(changes, size) for name, changes in upload.items()}

    return distance


def _each(changes: Tensor, number: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `number` to every client's float64 change; nan where that is not finite, [m]."""
    if changes.is_cuda:  # without asking: a GPU would wait for every answer
        finite = [torch.isfinite(c) for c in changes]
        calm = (torch.where(f, c, 0).double() for f, c in zip(finite, changes, strict=True))
        out = [torch.where(f.all(), number(c), torch.nan) for f, c in zip(finite, calm, strict=True)]
    else:
        out = [
            number(c.double()) if bool(torch.isfinite(c).all()) else c.new_full((), torch.nan, dtype=torch.float64)
            for c in changes
        ]
    return torch.stack(out) if out else changes.new_zeros(0, dtype=torch.float64)


def _norm(change: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(change)
    return norm


def _largest_singular(change: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(_gram(change))[-1].clamp(min=0).sqrt()
    return largest


def _gram(change: Tensor) -> Tensor:
    matrix = change.reshape(change.shape[0], -1)
    return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix


def _largest_singulars(changes: Tensor) -> Tensor:
    """`_largest_singular` of every client's change, [m]; nan where it is not finite. No value is read from a GPU."""
    grams = torch.stack([_gram(c.double()) for c in changes])
    return torch.where(torch.isfinite(grams).all(-1).all(-1), _largest_eigenvalues(grams).sqrt(), torch.nan)


def _largest_eigenvalues(grams: Tensor) -> Tensor:
    r"""Largest eigenvalues of positive semi-definite matrices [m, n, n] from their powers, in products only.

    .. math::  λ ≤ (\mathrm{tr}\, G^{p})^{1/p} ≤ n^{1/p} λ,\qquad p = 2^{24}

    Each product squares the one before, scaled to trace 1; the excess of the bound, ln(n)/p, is below 1e-6 for any n
    that fits in memory. On a GPU an eigenvalue solver takes many times as long.
    """

    def trace(power: Tensor) -> Tensor:
        return power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(power.dtype).tiny)

    log, power = grams.new_zeros(len(grams)), grams
    for step in range(SQUARINGS):
        size = trace(power)
        log = log + size.log() / 2.0**step
        power = power / size[:, None, None]
        power = power @ power
    return (log + trace(power).log() / 2.0**SQUARINGS).exp()


def _shares(weights: Tensor) -> Tensor:
    size = weights.abs()
    total = size.sum()
    return torch.where(total > 0, size / total, 1 / size.numel())


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    middle = ((p + q) / 2).clamp(min=torch.finfo(p.dtype).tiny)
    halves = torch.xlogy(p, p / middle).sum() + torch.xlogy(q, q / middle).sum()
    return (halves / 2).clamp(min=0.0)
