r"""Clipping and Gaussian noise: the two acts that bound and hide one client.

A client's part v_k (its scaled upload, and for ratio methods its masses) is one vector. It is clipped *last*, in double
precision, to :math:`v_k · S/\max(‖v_k‖, S)`, a non-finite one being refused first; so adding or removing a client moves
the sum by at most S, and the noise has standard deviation z·S in every coordinate.

In a deployment noise comes from the operating system and its bits are kept nowhere. In a simulation it derives from
(seed, round, attempt), so that a run repeats; whoever has the seed can take it off again, so such a run is SIMULATED.
A retried round has another attempt number: two sums never share their noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keyfed.errors import PrivacyError
from keyfed.federated.sampling import derive_seed

Draw = Callable[[str, torch.Size], Tensor]  # (name of a coordinate block, shape) → standard normals, float64 on the CPU
CHUNK = 1 << 20  # normals made at a time from the operating system's bytes


class Noising(NamedTuple):
    """How one round's sum is bounded, noised and divided.

    Attributes:
      clip: S, the largest norm of one client's part.
      std: standard deviation of the noise in every coordinate of the sum.
      bit_std: that of the noise in the half counts, if there were one only: n of them have √n times as much each, so
        that together they cost the same; None counts nothing.
      called: clients called in expectation: public, whoever came.
      denominator: what the sum of a method with fixed weights is divided by: their expected weight.
      floor: least mass that a ratio method divides by; None for methods with fixed weights.
      release: books the release, then returns the noise for it.
      frozen: layers that nobody trains: everybody knows that their sum is 0.
      told: names of the half counts: "within" is that of unclipped clients (adaptive clipping), the others are
        `Share.told`.
    """

    clip: float
    std: float
    bit_std: float | None
    called: float
    denominator: float
    floor: float | None
    release: Callable[[], Draw]
    frozen: frozenset[str] = frozenset()
    told: tuple[str, ...] = ("within",)


def norm_of(tensors: Iterable[Tensor], numbers: Iterable[float] = ()) -> float:
    """Return the Euclidean norm of tensors and numbers as one vector, accumulated in double precision."""
    squares = sum(float(t.double().square().sum()) for t in tensors) + sum(x * x for x in numbers)
    return math.sqrt(squares) if math.isfinite(squares) else math.nan


def clip_factor(norm: float, clip: float) -> float:
    """Return S/max(norm, S), the factor that brings a vector within the clip.

    Example:
      >>> clip_factor(4.0, 1.0), clip_factor(0.0, 1.0)
      (0.25, 1.0)
    """
    if not math.isfinite(norm):
        raise PrivacyError("a client's part has no finite norm, so it cannot be clipped; it must be refused before")
    return clip / max(norm, clip)


def derived(seed: int, round: int, attempt: int) -> Draw:
    """Noise of a simulation: a function of the run's seed, the round and how often that round was released already."""

    def draw(name: str, shape: torch.Size) -> Tensor:
        made = torch.Generator().manual_seed(derive_seed(seed, "privacy noise", round, attempt, name))
        return torch.randn(shape, generator=made, dtype=torch.float64)

    return draw


def system(entropy: Callable[[int], bytes] = os.urandom) -> Draw:
    """Noise of a deployment: from the operating system's randomness, never the same twice, kept nowhere.

    Four normals are added and halved: the low bits of a single floating-point normal can give it away (Mironov 2012).
    """

    def draw(name: str, shape: torch.Size) -> Tensor:
        del name
        count = shape.numel()
        made = np.zeros(count)
        for start in range(0, count, CHUNK):
            part = made[start : start + CHUNK]
            for _ in range(4):
                part += _normals(part.size, entropy) / 2
        return torch.from_numpy(made).reshape(shape)

    return draw


def _normals(count: int, entropy: Callable[[int], bytes]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Box and Muller: √(−2 ln u) cos 2πv from uniform u, v of 53 bits."""
    bits = np.frombuffer(entropy(16 * count), dtype=np.uint64).reshape(2, count) >> np.uint64(11)
    u, v = (bits + 0.5) * 2.0**-53
    made: np.ndarray[tuple[int], np.dtype[np.float64]] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    return made


def update_noise(z: float, bit_std: float | None) -> float:
    r"""Return z_Δ of the update when the count of unclipped clients is released too, so that both cost what z does.

    .. math::  z_Δ = (z^{-2} − (2σ_b)^{-2})^{-1/2}

    References:
      Andrew, Thakkar, McMahan, Ramaswamy, *Differentially Private Learning with Adaptive Clipping*, 2021 (arXiv
      1905.03871), theorem 1.

    Example:
      >>> round(update_noise(1.0, 5.0), 6), update_noise(1.0, None)
      (1.005038, 1.0)
    """
    if bit_std is None or z == 0:
        return z
    if z >= 2 * bit_std:
        raise PrivacyError(
            f"the noise of {z:.4g} leaves nothing for the update: counts (of unclipped clients, of losses) take it all "
            f"with privacy.count_noise {bit_std:.4g}; set that above {z / 2:.4g}, or privacy.quantile=none"
        )
    return float((z**-2 - (2 * bit_std) ** -2) ** -0.5)


def next_clip(clip: float, within: float, quantile: float, rate: float) -> float:
    r"""Move the clip towards a quantile of the clients' norms: S ← S·exp(−η_C(b̃ − γ)), b̃ the noisy share within S.

    Example:
      >>> next_clip(1.0, 0.5, 0.5, 0.2)
      1.0
      >>> next_clip(1.0, 0.0, 0.5, 0.2) > 1 > next_clip(1.0, 1.0, 0.5, 0.2)
      True
    """
    return clip * math.exp(-rate * (min(max(within, 0.0), 1.0) - quantile))


def clipped(upload: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Return an upload within the clip, for clients that must remember what they sent; a non-finite one as it is."""
    norm = norm_of(upload.values())
    if not math.isfinite(norm) or norm <= clip:
        return dict(upload)
    # A hair less than the clip: rounding to the upload's precision must not push it over.
    factor = clip * (1 - 1e-6) / norm
    return {name: (u.double() * factor).to(u.dtype) for name, u in upload.items()}
