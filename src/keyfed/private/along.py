r"""What a private round tells besides its sum, and which public numbers learn from it.

Two rules of FedMed read the losses of everybody: the switch between attention and tokens, and top-K. In a private round
a client tells one number t within [0, 1] for each, beside its clipped part. The sum of t − ½ moves by ½ at most when
one client is added or removed, has noise of its own that the round's z pays for, and is divided by the expected cohort.
What comes of it is public: it decides about the *next* round, never about its own.

References:
  Andrew, Thakkar, McMahan, Ramaswamy, *Differentially Private Learning with Adaptive Clipping*, 2021 (arXiv
  1905.03871): the noisy bit that a quantile is followed by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from keyfed.private.noise import next_clip

Numbers = Sequence[float]
WITHIN = "within"  # the half count that the clip follows
LOSS, BELOW = "loss", "below"  # those that the switch and the limit of top-K follow

MOST_LOSS = 16.0  # nats per token: above any loss that a model of 2^23 words begins with
LEAST_REACH = 1.0  # nats: how far from each other the clients of one round usually lie


class Followed(NamedTuple):
    """Public numbers that follow the clients' losses by one noisy number a round.

    Attributes:
      start: the numbers before the first round.
      told: (a client's loss, the numbers) → t; the sum cuts it to [0, 1].
      learn: (the numbers, the noisy mean of t over the expected cohort) → the numbers of the next round.
    """

    start: tuple[float, ...]
    told: Callable[[float, Numbers], float]
    learn: Callable[[Numbers, float], tuple[float, ...]]


def mean_loss(threshold: float) -> Followed:
    r"""Follow the mean loss L: numbers (L, reach r, last change of L, rounds seen).

    .. math::  t_k = ½ + \frac{ℓ_k − L}{2r},\qquad L ← L + 2r(\bar t − ½)

    A client tells how far its loss is from the last L, not the loss: then the public denominator, which is not the
    number of those who came, errs by a share of the *change* of L only. Exact, at no noise, while everybody's loss is
    within r of L and as many come as are expected. The reach starts with all losses inside, halves every round down to
    max(1 nat, 2ε), and doubles after a round in which L moved by half of it or more.

    Args:
      threshold: ε, the change that the switch asks for.
    """
    least = max(LEAST_REACH, 2 * threshold)

    def told(loss: float, numbers: Numbers) -> float:
        mean, reach, *_ = numbers
        return 0.5 + (loss - mean) / (2 * reach)

    def learn(numbers: Numbers, noisy: float) -> tuple[float, ...]:
        mean, reach, _, seen = numbers
        change = 2 * reach * (min(max(noisy, 0.0), 1.0) - 0.5)
        after = min(2 * reach, max(MOST_LOSS / 2, least)) if abs(change) >= reach / 2 else max(reach / 2, least)
        # What the first round tells is its distance from a guess, not from a round before.
        return max(0.0, mean + change), after, change if seen else math.inf, seen + 1

    return Followed((MOST_LOSS / 2, max(MOST_LOSS / 2, least), math.inf, 0.0), told, learn)


def still_moves(numbers: Numbers, threshold: float) -> bool:
    """Whether the released mean losses of the two rounds before differ by at least ε; true in the first two rounds."""
    return abs(numbers[2]) >= threshold


def loss_limit(beta: float, rate: float) -> Followed:
    r"""Follow the β-quantile of the losses: the number τ, below which a client counts.

    .. math::  t_k = 1[ℓ_k ≤ τ],\qquad τ ← τ · \exp(−η(\bar t − β)),\qquad η = \min(1, η_C/(1 − β))

    τ starts above every loss, so that everybody counts, and falls by η_C while everybody is below it. As losses fall,
    more than a share β lies below the last rounds' τ.

    Args:
      beta: share β of the cohort that counts.
      rate: η_C, privacy.clip_rate.
    """
    speed = min(1.0, rate / (1 - beta))

    def learn(numbers: Numbers, noisy: float) -> tuple[float, ...]:
        return (min(next_clip(numbers[0], noisy, beta, speed), MOST_LOSS),)

    return Followed((MOST_LOSS,), lambda loss, numbers: float(loss <= numbers[0]), learn)
