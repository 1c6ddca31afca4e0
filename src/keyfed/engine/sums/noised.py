"""The sum of a private round: every client clipped, the sum noised, the denominator public.

In the place of `RunningSum`, with the same two calls. Only the noised numbers leave it; who contributed is kept for the
acknowledgement of clients that keep state, and is not for the log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from keyfed.errors import PrivacyError
from keyfed.federated.public.rules import held
from keyfed.federated.types import Aggregate, ClientId, Params, Refusal, Share
from keyfed.private.dp.noise import Noising, clip_factor, norm_of

MOST_TOLD = 3  # half counts that a client's vector has room for: within the clip, its loss, below the limit


def words_of(like: Params) -> int:
    """Numbers in a client's vector: every parameter, a mass for every layer, the half counts."""
    return sum(p.numel() for p in like.values()) + len(like) + MOST_TOLD


def half(told: float) -> float:
    """Return what a client adds to a half count for a number t within [0, 1]: t − ½, never beyond ±½.

    ±½ and not 0 or 1: then one client more or less moves the count by ½ at most.

    Example:
      >>> half(1.0), half(0.25), half(-7.0)
      (0.5, -0.25, -0.5)
    """
    if math.isnan(told):
        raise PrivacyError("a client tells a number that is none, which nothing bounds; it must be refused before")
    return min(max(told, 0.0), 1.0) - 0.5


class NoisedSum:
    """Σ clip_S([scale·upload, κ·mass]) + N(0, std²), divided by a public number or by the noisy mass.

    Masses travel as coordinates of the same vector, times κ = S/(2√L) for L layers: masses of 1 in all layers take half
    of the clip. Clipping scales upload and mass alike, so a ratio does not notice it.

    Half counts travel beside it, each within ±½ for a client. n of them have noise of √n · bit_std each, so they cost
    what one of bit_std does: n · (½ / √n σ_b)² = (2σ_b)⁻² (see `noise.update_noise`).

    Args:
      ratio: r of a masked sum, whose weights are held within [1/r, 1] (`private_shares.held`); None for a plain one.
    """

    def __init__(self, like: Params, noising: Noising, ratio: float | None = None) -> None:
        self._noising, self._ratio = noising, ratio
        self._like = like
        self._total = {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in like.items() if name not in noising.frozen
        }
        self._mass = dict.fromkeys(self._total, 0.0)
        self._kappa = noising.clip / (2 * math.sqrt(max(1, len(self._total))))
        self._told = dict.fromkeys(noising.told if noising.bit_std is not None else (), 0.0)
        assert len(self._told) <= MOST_TOLD, "a client's vector has no room for so many half counts"
        self._contributors: list[ClientId] = []

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client's part, clipped."""
        parts, masses, told = self._part(upload, share)
        for name, part in parts.items():
            self._total[name].add_(part)
        for name, mass in masses.items():
            self._mass[name] += mass
        for name, number in told.items():
            self._told[name] += number
        if not share.silent:  # what a silent client meant to send was not sent: it must not believe so
            self._contributors.append(client)

    def _part(self, upload: Params, share: Share) -> tuple[Params, dict[str, float], dict[str, float]]:
        """What one client adds: its upload and its masses, clipped together, and its half counts."""
        assert share.log is None, "a private share is a number within [0, 1]"
        if self._ratio is not None:
            share = held(share, self._ratio, silent=True)
        ratio = self._noising.floor is not None
        masses = {name: self._kappa * share.mass[name] for name in self._total} if ratio else {}
        parts = {name: upload[name].double() * share.scale[name] for name in self._total}
        norm = norm_of(parts.values(), masses.values())
        factor = 0.0 if share.silent else clip_factor(norm, self._noising.clip)
        clipped = {name: part.mul_(factor) for name, part in parts.items()}
        # A client that keeps state has clipped its upload itself; counted as it arrives it would always be within, and
        # the clip would shrink to nothing. One that is silent counts as if it were not, for the same reason.
        told = {"within": float(norm <= self._noising.clip and not share.clipped), **share.told}
        halves = {name: half(told[name]) for name in self._told}
        return clipped, {name: factor * mass for name, mass in masses.items()}, halves

    def refuse(self, client: ClientId) -> None:
        """Do nothing: who is refused adds zeros."""

    def shift(self, by: Params) -> None:
        """Refuse noise of a method's own: it would be added to what is divided by a public number."""
        raise PrivacyError(f"a private sum has its own noise; {len(by)} layers of another were to be added")

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Book the release, then return the noised sum; an empty cohort's is noise alone."""
        n = self._noising
        draw = n.release()
        total: Params = {}
        mass: dict[str, float] = {}
        for name, p in self._like.items():
            if name in n.frozen:
                total[name], mass[name] = torch.zeros_like(p), 1.0
                continue
            noise = draw(name, p.shape).to(p.device)
            total[name] = self._total[name].add_(noise, alpha=n.std).to(p.dtype)
            mass[name] = n.denominator
            if n.floor is not None:
                noisy = self._mass[name] + n.std * float(draw(f"mass/{name}", torch.Size(())))
                mass[name] = max(noisy / self._kappa, n.floor)
        facts: dict[str, list[float]] = {}
        for name, count in self._told.items():
            assert n.bit_std is not None, "half counts have noise"
            off = n.bit_std * math.sqrt(len(self._told)) * float(draw(f"told/{name}", torch.Size(())))
            facts[name] = [0.5 + (count + off) / n.called]
        nobody = dict.fromkeys(total, 0.0)
        return Aggregate(
            total, mass, nobody, nobody, tuple(self._contributors), tuple(refused), weights=None, facts=facts
        )
