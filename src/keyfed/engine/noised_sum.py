"""The sum of a private round: every client clipped, the sum noised, the denominator public.

In the place of `RunningSum`, with the same two calls. Only the noised numbers leave it; who contributed is kept for the
acknowledgement of clients that keep state, and is not for the log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from keyfed.errors import PrivacyError
from keyfed.federated.types import Aggregate, ClientId, Params, Refusal, Share
from keyfed.private.noise import Noising, clip_factor, norm_of


def words_of(like: Params) -> int:
    """Numbers in a client's vector: every parameter, a mass for every layer, the half count."""
    return sum(p.numel() for p in like.values()) + len(like) + 1


class NoisedSum:
    """Σ clip_S([scale·upload, κ·mass]) + N(0, std²), divided by a public number or by the noisy mass.

    Masses travel as coordinates of the same vector, times κ = S/(2√L) for L layers: masses of 1 in all layers take half
    of the clip. Clipping scales upload and mass alike, so a ratio does not notice it.
    """

    def __init__(self, like: Params, noising: Noising) -> None:
        self._noising = noising
        self._like = like
        self._total = {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in like.items() if name not in noising.frozen
        }
        self._mass = dict.fromkeys(self._total, 0.0)
        self._kappa = noising.clip / (2 * math.sqrt(max(1, len(self._total))))
        self._within = 0.0
        self._contributors: list[ClientId] = []

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client's part, clipped."""
        parts, masses, within = self._part(upload, share)
        for name, part in parts.items():
            self._total[name].add_(part)
        for name, mass in masses.items():
            self._mass[name] += mass
        self._within += within
        self._contributors.append(client)

    def _part(self, upload: Params, share: Share) -> tuple[Params, dict[str, float], float]:
        """What one client adds: its upload and its masses, clipped together, and half a count."""
        assert share.log is None, "a private share is a number within [0, 1]"
        ratio = self._noising.floor is not None
        masses = {name: self._kappa * share.mass[name] for name in self._total} if ratio else {}
        parts = {name: upload[name].double() * share.scale[name] for name in self._total}
        norm = norm_of(parts.values(), masses.values())
        factor = clip_factor(norm, self._noising.clip)
        clipped = {name: part.mul_(factor) for name, part in parts.items()}
        # ±½ and not 0 or 1: then one client moves the count by ½ at most. A client that keeps state has clipped its
        # upload itself; counted as it arrives it would always be within, and the clip would shrink to nothing.
        within = 0.5 if norm <= self._noising.clip and not share.clipped else -0.5
        return clipped, {name: factor * mass for name, mass in masses.items()}, within

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
        if n.bit_std is not None:
            count = self._within + n.bit_std * float(draw("within", torch.Size(())))
            facts["within"] = [0.5 + count / n.called]
        nobody = dict.fromkeys(total, 0.0)
        return Aggregate(
            total, mass, nobody, nobody, tuple(self._contributors), tuple(refused), weights=None, facts=facts
        )
