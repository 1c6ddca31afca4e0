"""The sum of a private round: every client clipped, the sum noised, the denominator public.

In the place of `RunningSum`, with the same two calls. Only the noised numbers leave it; who contributed is kept for the
acknowledgement of clients that keep state, and is not for the log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from keyfed.engine.sums.codec import MOST_COUNTS, ClippedUpload, Vector, clip_upload, decode_clipped, mass_unit
from keyfed.federated.public.rules import held
from keyfed.federated.types import Aggregate, ClientId, Params, Refusal, Share
from keyfed.private.dp.noise import Noising, norm_of


def most_called(expected: float) -> int:
    """Return ⌈n + 5√n⌉: a public number above which hardly ever so many are drawn where n are expected.

    Example:
      >>> most_called(100.0)
      150
    """
    return math.ceil(expected + 5 * math.sqrt(expected))


class NoisedSum:
    """Σ clip_S([scale·upload, κ·mass]) + N(0, std²), divided by a public number or by the noisy mass.

    Masses travel as coordinates of the same vector, times κ (`codec.mass_unit`). Half counts travel with it, each
    within ±½ for a client. n of them have noise of √n · bit_std each, so they cost what one of bit_std does:
    n · (½ / √n σ_b)² = (2σ_b)⁻² (see `noise.update_noise`).

    Args:
      ratio: r of a masked sum, whose weights are held within [1/r, 1] (`rules.held`); None for a plain one.
    """

    def __init__(self, like: Params, noising: Noising, ratio: float | None = None) -> None:
        self._noising, self._ratio = noising, ratio
        self._like = like
        self._total = {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in like.items() if name not in noising.frozen
        }
        self._mass = dict.fromkeys(self._total, 0.0)
        self._kappa = mass_unit(noising.clip, len(self._total))
        self._counts = dict.fromkeys(noising.statistics if noising.bit_std is not None else (), 0.0)
        assert len(self._counts) <= MOST_COUNTS, "a client's vector has no room for so many half counts"
        self._contributors: list[ClientId] = []

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client's upload, clipped."""
        layers, masses, halves = self._clipped(upload, share)
        for name, layer in layers.items():
            self._total[name].add_(layer)
        for name, mass in masses.items():
            self._mass[name] += mass
        for name, number in halves.items():
            self._counts[name] += number
        if not share.silent:  # what a silent client meant to send was not sent: it must not believe so
            self._contributors.append(client)

    def _clipped(self, upload: Params, share: Share) -> ClippedUpload:
        share = share if self._ratio is None else held(share, self._ratio, silent=True)
        bounded, masses = self._noising, self._noising.floor is not None
        return clip_upload(upload, share, bounded.clip, self._total, masses=masses, statistics=self._counts)

    def take(self, total: Vector, contributors: Sequence[ClientId]) -> None:
        r"""Take a sum that was masked, in the place of `add`: within what its clients may sum up to, m·S.

        .. math::  Σ · \min(1, mS/‖Σ‖),\qquad m = ⌈n + 5\sqrt n⌉

        for n clients that are called in expectation: m is public, and does not depend on who was drawn. Honest clients
        do not notice it. Going to the nearest point of a ball brings no two sums further apart. So whatever liars send,
        an honest client moves the sum by S at most.
        """
        read = decode_clipped(total, self._total, self._counts, self._noising.clip)
        clients = most_called(self._noising.called)
        most, norm = clients * self._noising.clip, norm_of(read.layers.values(), read.masses.values())
        shrink = most / norm if norm > most else 1.0
        self._total = {name: layer.mul_(shrink) for name, layer in read.layers.items()}
        self._mass = {name: mass * shrink for name, mass in read.masses.items()}
        self._counts = {name: min(max(count, -clients / 2), clients / 2) for name, count in read.halves.items()}
        self._contributors = list(contributors)

    def refuse(self, client: ClientId) -> None:
        """Do nothing: who is refused adds zeros."""

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
        for name, count in self._counts.items():
            assert n.bit_std is not None, "half counts have noise"
            off = n.bit_std * math.sqrt(len(self._counts)) * float(draw(f"told/{name}", torch.Size(())))
            facts[name] = [0.5 + (count + off) / n.called]
        none = dict.fromkeys(total, 0.0)
        return Aggregate(total, mass, none, none, tuple(self._contributors), tuple(refused), weights=None, facts=facts)
