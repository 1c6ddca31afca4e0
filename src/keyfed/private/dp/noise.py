r"""Clipping and Gaussian noise, which bound and protect one client; independent noise, and noise of a tree.

A client's scaled upload (for ratio methods with its masses) is one vector v_k. It is clipped *last*, in double
precision, to :math:`v_k · S/\max(‖v_k‖, S)`; a vector that is not finite is refused before. So adding or removing a
client moves the sum by at most S, and the noise has standard deviation z·S in every coordinate.

In a deployment noise comes from the operating system and its bits are kept nowhere. In a simulation it derives from
(seed, round, attempt), so that a run repeats. The seed takes the noise off again, so such a run is SIMULATED. A retried
round has another attempt number: two sums never share their noise.

**Tree aggregation (DP-FTRL)** is noise for running sums whose clients need not be sampled. What matters of a training
run are its prefix sums P_t = Σ_{s≤t} x_s. Every whole dyadic block of rounds has one noise vector. P_t is released with
the noise N_t of the blocks that make up [0, t), one for every 1 among the binary digits of t. So its variance grows
with log t and not with t. A round's own release is the difference,

.. math::  A_t = x_t + N_{t+1} − N_t,

from which every server rule goes on as post-processing. One client that takes part at least `gap` rounds apart moves
the blocks by `accounting.forest_sensitivity`; no round's cohort need be secret or random. There is no restart.

References:
  Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, *Practical and Private (Deep) Learning without Sampling or Shuffling*,
  ICML 2021 (arXiv 2103.00039), algorithm 1.
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
from keyfed.federated.cohort import derive_seed

Draw = Callable[[str, torch.Size], Tensor]  # (name of a coordinate block, shape) → standard normals, float64 on the CPU
CHUNK = 1 << 20  # normals made at a time from the operating system's bytes


class Noising(NamedTuple):
    """How one round's sum is bounded, noised and divided.

    Attributes:
      clip: S, the largest norm of one client's upload, as it is summed.
      std: standard deviation of the noise in every coordinate of the sum.
      bit_std: that of the noise in the half counts, if there were one only. n of them have √n times as much each, so
        that together they cost the same. None counts nothing.
      called: clients called in expectation: a public number.
      denominator: what the sum of a method with fixed weights is divided by: their expected weight.
      floor: least mass that a ratio method divides by; None for methods with fixed weights.
      release: books the release, then returns the noise for it.
      frozen: layers that are not trained: their sum is known to be 0.
      statistics: names of the half counts: "within" is that of unclipped clients (adaptive clipping), the others are
        `Share.statistics`.
    """

    clip: float
    std: float
    bit_std: float | None
    called: float
    denominator: float
    floor: float | None
    release: Callable[[], Draw]
    frozen: frozenset[str] = frozenset()
    statistics: tuple[str, ...] = ("within",)


def norm_of(tensors: Iterable[Tensor], numbers: Iterable[float] = ()) -> float:
    """Return the Euclidean norm of tensors and numbers as one vector.

    The squares are summed without rounding but at the end (`exact_squares`): a browser, a processor with other vector
    units and a GPU clip an upload to the same bits.
    """
    pieces = [piece for t in tensors for piece in exact_squares(t)] + [x * x for x in numbers]
    return math.sqrt(math.fsum(pieces)) if math.isfinite(sum(pieces)) else math.nan


def exact_squares(t: Tensor) -> tuple[float, float]:
    r"""Return the sum of the squares of a tensor's numbers in double precision, and what rounding took off it.

    Every addition is Knuth's: s = fl(a + b), v = s − a, e = (a − (s − v)) + (b − v), a + b = s + e exactly.

    Example:
      >>> exact_squares(torch.tensor([1.0, 2.0**-27, 2.0**-27], dtype=torch.float64))
      (1.0, 1.1102230246251565e-16)
    """
    sums, lost = t.double().square().flatten(), 0.0
    while sums.numel() > 1:
        half = sums.numel() // 2
        a, b, rest = sums[:half], sums[half : 2 * half], sums[2 * half :]
        s = a + b
        v = s - a
        lost += float(((a - (s - v)) + (b - v)).sum())
        sums = torch.cat([s, rest])
    return (float(sums) if sums.numel() else 0.0), lost


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
            chunk = made[start : start + CHUNK]
            for _ in range(4):
                chunk += _normals(chunk.size, entropy) / 2
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


Node = tuple[int, int]  # height h and number j: the block of rounds [j·2^h, (j+1)·2^h)
NodeNoise = Callable[[Node, str, torch.Size], Tensor]


def nodes_of(rounds: int) -> list[Node]:
    """Return the blocks that make up the first rounds, the largest first.

    Example:
      >>> nodes_of(6)  # rounds 0 to 3, and 4 to 5
      [(2, 0), (1, 2)]
    """
    found, start = [], 0
    for height in range(rounds.bit_length() - 1, -1, -1):
        if rounds >> height & 1:
            found.append((height, start >> height))
            start += 1 << height
    return found


def change_of(leaf: int) -> tuple[list[Node], list[Node]]:
    """Return the blocks whose noise a leaf's release adds, and those whose noise it takes off.

    Example:
      >>> change_of(5)  # from the block of 4 and round 4 to the block of 4 and the block of 2
      ([(1, 2)], [(0, 4)])
    """
    before, after = nodes_of(leaf), nodes_of(leaf + 1)
    return [n for n in after if n not in before], [n for n in before if n not in after]


def _leaf(leaf: int, added: NodeNoise, removed: NodeNoise) -> Draw:
    """Return the noise of one leaf: that of the blocks it adds, less that of the blocks it takes off."""
    plus, minus = change_of(leaf)

    def draw(name: str, shape: torch.Size) -> Tensor:
        noise = torch.zeros(shape, dtype=torch.float64)
        for place in plus:
            noise += added(place, name, shape)
        for place in minus:
            noise -= removed(place, name, shape)
        return noise

    return draw


def derived_tree(seed: int, leaf: int) -> Draw:
    """Noise of one leaf in a simulation; every block's is derived from the seed, so nothing need be kept."""

    def node(place: Node, name: str, shape: torch.Size) -> Tensor:
        return derived(derive_seed(seed, "tree"), place[0], place[1])(name, shape)

    return _leaf(leaf, node, node)


class KeptTree:
    """Noise of a deployment: drawn once, kept as long as a later round takes it off again, O(log T) vectors.

    `state` and `load` are for the checkpoint: noise that was lost cannot be taken off, and drawing a block again would
    release two sums under the same noise.
    """

    def __init__(self, fresh: Callable[[], Draw]) -> None:
        self._fresh = fresh
        self._kept: dict[tuple[Node, str], Tensor] = {}

    def leaf(self, leaf: int) -> Draw:
        """Return the noise of one leaf; leaves come in order, each once."""
        fresh = self._fresh()

        def drawn(place: Node, name: str, shape: torch.Size) -> Tensor:
            made = self._kept[place, name] = fresh(name, shape)
            return made

        return _leaf(leaf, drawn, lambda place, name, shape: self._kept.pop((place, name)))

    @property
    def state(self) -> dict[str, Tensor]:
        """What must be in the checkpoint."""
        return {f"{height}/{number}/{name}": t for ((height, number), name), t in self._kept.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._kept = {}
        for key, tensor in state.items():
            height, number, name = key.split("/", 2)
            self._kept[(int(height), int(number)), name] = tensor


def group_of(client: str, groups: int, seed: int) -> int:
    """Return which of `groups` turns a client has: it takes part in rounds t ≡ group, so at least `groups` apart."""
    return derive_seed(seed, "separation", client) % groups
