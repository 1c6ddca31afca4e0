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

from collections.abc import Callable, Sequence
from typing import NamedTuple

Numbers = Sequence[float]
WITHIN = "within"  # the half count that the clip follows
LOSS, BELOW = "loss", "below"  # those that the switch and the limit of top-K follow

MOST_LOSS = 16.0  # nats per token: above any loss that a model of 2^23 words begins with
NOT_YET = 1e300  # the change of a loss before there are two to compare: above every threshold, and finite
LEAST_REACH = 1.0  # nats: how far from each other the clients of one round usually lie
LEAST_STEP, MOST_STEP = 1e-3, 2.0  # nats: what the limit of top-K moves by at most in one round
WIDEN, NARROW = 1.2, 0.6  # slower up than down: one wrong side by chance must not cost a round with nobody


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
        return max(0.0, mean + change), after, change if seen else NOT_YET, seen + 1

    return Followed((MOST_LOSS / 2, max(MOST_LOSS / 2, least), NOT_YET, 0.0), told, learn)


def still_moves(numbers: Numbers, threshold: float) -> bool:
    """Whether the released mean losses of the two rounds before differ by at least ε; true in the first two rounds."""
    return abs(numbers[2]) >= threshold


def loss_limit(beta: float) -> Followed:
    r"""Follow the β-quantile of the losses: numbers (the limit τ, reach r, the last round's s).

    .. math::  t_k = ½ + \frac{1[ℓ_k ≤ τ] − β}{2\max(β, 1 − β)},\qquad
               s = \frac{e}{1 − β} \text{ if } e > 0 \text{ else } \frac{e}{β},\qquad τ ← τ − r s

    with e = 2 max(β, 1 − β)(t̄ − ½), which is (those below − β · those who came) / those expected. It is 0 at the
    quantile however many come: who is absent shortens a step and does not turn it. s is 1 if everybody is below τ, −1
    if nobody is.

    Losses may lie within hundredths of a nat of each other, all of them falling, so the reach finds its own size: after
    two rounds on the same side it grows, after two on different sides it shrinks, the more the further off they were,
    r ← r · (1.2 or 0.6)^min(1, |s| + |s of the round before|). τ starts above every loss: everybody counts until it has
    come down, at 2 nats a round.

    Args:
      beta: share β of the cohort that counts.
    """
    wide = 2 * max(beta, 1 - beta)

    def told(loss: float, numbers: Numbers) -> float:
        return 0.5 + (float(loss <= numbers[0]) - beta) / wide

    def learn(numbers: Numbers, noisy: float) -> tuple[float, ...]:
        limit, reach, before = numbers
        excess = wide * (min(max(noisy, 0.0), 1.0) - 0.5)
        side = max(-1.0, min(1.0, excess / (1 - beta) if excess > 0 else excess / beta))
        if side * before != 0:
            factor = WIDEN if side * before > 0 else NARROW
            reach *= factor ** min(1.0, abs(side) + abs(before))
        reach = min(max(reach, LEAST_STEP), MOST_STEP)
        return min(max(limit - reach * side, 0.0), MOST_LOSS), reach, side

    return Followed((MOST_LOSS, MOST_STEP, 0.0), told, learn)
