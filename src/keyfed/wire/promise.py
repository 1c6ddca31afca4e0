r"""What a client of a private run sends, and what it holds the server to.

The client clips its own part, [scale·upload, κ·mass] as one vector, to the public clip S of the round, last and in
double precision; nothing else of it leaves the device: no loss, no count, no held-out figure. It refuses a clip that
the run's own rule cannot have led to: S stays as it began, or moves by at most e^{η} a step,

.. math::  S_0 e^{−ηt(1−γ)} ≤ S_t ≤ S_0 e^{ηtγ}, \qquad |\ln S_t − \ln S_u| ≤ η(t − u)

with rate η and quantile γ (`private.dp.noise.next_clip`), t below the number of rounds that was told when the run
began, and S_u the clip of this client's last part. With tree noise it also counts the steps between two parts of its
own, in its device's memory. Steps are the server's count; the client only sees that they never go back. What it cannot
see is
the noise: that is added after its part has left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keyfed.engine.sums.codec import ClippedUpload, Vector, clip_upload, encode_clipped, mass_unit, words_of
from keyfed.federated.public.rules import held
from keyfed.federated.types import Params, Share
from keyfed.private.secagg.threshold import PRIVATE_RATIO
from keyfed.wire.device_store import LastPart
from keyfed.wire.messages import Rejected, number, whole_number

SLACK = 1e-9  # of a clip that was computed in another order


class Asked(NamedTuple):
    """The public numbers of a private round: the clip, and the number of releases before it."""

    clip: float
    step: int

    @property
    def public(self) -> dict[str, Any]:
        """As they are sent, and as masks are bound to them."""
        return {"clip": self.clip, "step": self.step}


@dataclass(frozen=True, slots=True)
class Promise:
    """What a private run promised when it began, as a client checks it.

    Attributes:
      clip: the first clip S₀.
      quantile: γ, and `rate` η, of a clip that moves; None for one that stays.
      ratio: the method divides by its own mass, so masses are sent.
      noise: the noise multiplier that the server said it adds; nobody can check that from here.
      rounds: rounds of the run, beyond which no clip can have moved.
      separation: steps between two uploads of one client; None where clients are drawn.
    """

    clip: float
    quantile: float | None
    rate: float
    ratio: bool
    noise: float
    rounds: int
    separation: int | None = None

    def check(self, public: object, round: int, part: object, purpose: str, last: LastPart | None = None) -> Asked:
        """Read a round's public numbers; refuse what the run's promise does not allow.

        Args:
          last: when this client took part before, and with which clip.
        """
        if purpose != "upload" or part is not None:
            raise Rejected("refused by client", "a private run asks for clipped uploads only, and never for a score")
        if not isinstance(public, dict) or set(public) != {"clip", "step"}:
            raise Rejected("malformed", "a private round without its clip and step")
        clip, step = number(public, "clip"), whole_number(public, "step")
        if round >= self.rounds:
            raise Rejected("refused by client", f"round {round + 1} of a run that promised {self.rounds}")
        low = high = 0.0
        if self.quantile is not None:
            low, high = -self.rate * round * (1 - self.quantile), self.rate * round * self.quantile
        if not clip > 0 or not low - SLACK <= math.log(clip / self.clip) <= high + SLACK:
            raise Rejected(
                "refused by client", f"a clip of {clip:.6g} in round {round + 1} of a run that began with {self.clip:g}"
            )
        if last is not None:
            most = 0.0 if self.quantile is None else self.rate * max(1, step - last.step)
            if abs(math.log(clip / last.clip)) > most + SLACK:
                raise Rejected(
                    "refused by client", f"a clip of {clip:.6g} in step {step} after {last.clip:.6g} in {last.step}"
                )
        return Asked(clip, step)

    def upload(self, upload: Params, share: Share, clip: float) -> tuple[Params, dict[str, Any]]:
        """Clip what goes into a plain sum, for the server to clip once more; return layers and numbers as sent."""
        clipped, unit = self._clipped(upload, share, clip), mass_unit(clip, len(upload))
        layers = {name: layer.to(upload[name].dtype) for name, layer in clipped.layers.items()}
        masses = {name: mass / unit for name, mass in clipped.masses.items()}
        return layers, {"masses": masses, "whole": clipped.halves["within"] > 0}

    def vector(self, upload: Params, share: Share | None, clip: float) -> Vector:
        """Clip what goes into a masked sum and write it as integers; zeros where nothing was trained."""
        if share is None:
            return np.zeros(words_of(upload), np.uint32)
        share = held(share, PRIVATE_RATIO)  # it refuses a weight of 0: only simulations have that
        return encode_clipped(self._clipped(upload, share, clip), upload, clip)

    def _clipped(self, upload: Params, share: Share, clip: float) -> ClippedUpload:
        return clip_upload(upload, share, clip, upload, masses=self.ratio, statistics=("within",))


def share_of(head: Any, layers: Mapping[str, object], *, ratio: bool) -> Share:
    """Read the numbers of a part that came from outside, as a share of what is clipped once more."""
    masses = head.get("masses") if isinstance(head, dict) else None
    if not isinstance(masses, dict) or set(masses) != (set(layers) if ratio else set()):
        raise Rejected("malformed", "a part whose masses are not those of the model's layers")
    if not isinstance(head.get("whole"), bool):
        raise Rejected("malformed", "a part that does not say whether it was clipped")
    scale = dict.fromkeys(layers, 1.0)
    mass = {name: number(masses, name, 0.0, 1.0) for name in layers} if ratio else scale
    return Share(scale, mass, clipped=not head["whole"])
