r"""A vocabulary that carries a guarantee: noisy votes, and only of words that enough clients said.

Adding or removing one client changes the votes of at most K words, each by one: the counts move by at most √K. Every
count that is not 0 gets Gaussian noise of standard deviation σ = z·√K, and a word enters if its noisy count reaches a
threshold τ. What a single client alone said must stay out: each of its K words passes with chance
1 − Φ((τ − 1)/σ), so τ is such that all of them together pass with chance at most δ/2; the noise has the other half.

.. math::  τ = 1 + σ · Φ^{-1}\big((1 − δ/2)^{1/K}\big)

References:
  Korolova, Kenthapadi, Mishra, Ntoulas, *Releasing Search Queries and Clicks Privately*, WWW 2009; Wilson et al.,
  *Differentially Private SQL with Bounded User Contribution*, 2019 (τ-thresholding).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from statistics import NormalDist

from keyfed.errors import DataError
from keyfed.text.election import Election
from keyfed.text.vocab import SPECIALS, cutter


def threshold(sigma: float, delta: float, most_words: int) -> float:
    """Return τ, below which no noisy count is told.

    Example:
      >>> round(threshold(10.0, 1e-6, 100), 1)
      58.3
    """
    # log1p and expm1: (1 − δ/2)^{1/K} differs from 1 by less than a float can say otherwise.
    beyond = -math.expm1(math.log1p(-delta / 2) / most_words)
    return 1 - sigma * NormalDist().inv_cdf(beyond)


def ngrams(lines: Iterable[str], order: int, *, lower: bool, tokenised: bool, most: int) -> frozenset[str]:
    """Return a client's most frequent runs of `order` words, joined by blanks: its ballot for phrases.

    Example:
      >>> sorted(ngrams(["a b a b", "c d"], 2, lower=True, tokenised=True, most=2))
      ['a b', 'b a']
    """
    cut = cutter("word", tokenised=tokenised, lower=lower)
    uses: Counter[str] = Counter()
    for line in lines:
        words = [word for word in cut(line) if word not in SPECIALS]
        uses.update(" ".join(words[k : k + order]) for k in range(len(words) - order + 1))
    return frozenset(sorted(uses, key=lambda phrase: (-uses[phrase], phrase))[:most])


def elect_privately(
    ballots: Iterable[Collection[str]],
    *,
    size: int | None,
    most_words: int,
    sigma: float,
    delta: float,
    draw: Callable[[int], Iterable[float]],
    scale: float = 1.0,
    min_clients: int = 1,
) -> Election:
    """Count the clients of each word, add noise, and take the words of the highest noisy counts above the threshold.

    Only counts that are noised are told: the votes of the words elected, as whole numbers.

    Args:
      ballots: the words of each client, at most `most_words` of them.
      size: entries wanted, the four specials included; None takes every word above the threshold.
      sigma: standard deviation of the noise of a count.
      delta: δ of the guarantee, half of which is for the threshold.
      draw: returns that many standard normals.
      scale: clients there are / clients of an imagined fleet: noise and threshold of that fleet, on these counts.
      min_clients: clients a word needs in any case, by its noisy count.

    Raises:
      DataError: a ballot is too long, or no word has enough clients.
    """
    votes: Counter[str] = Counter()
    for said in ballots:
        if len(set(said)) > most_words:
            raise DataError(f"a ballot has {len(set(said)):,} words, more than the {most_words:,} that were agreed")
        votes.update(set(said))
    for special in SPECIALS:
        del votes[special]
    words = sorted(votes)  # in an order that does not depend on who came first
    least = max(threshold(sigma, delta, most_words) * scale, min_clients)
    noisy = {word: votes[word] + sigma * scale * x for word, x in zip(words, draw(len(words)), strict=True)}
    passed = sorted((word for word in words if noisy[word] >= least), key=lambda word: (-noisy[word], word))
    if not passed:
        raise DataError(
            f"no word has the {least:,.0f} clients that the noise of {sigma * scale:,.3g} asks for; more "
            "clients, fewer words a client (--most-words) or a larger epsilon"
        )
    elected = passed[: None if size is None else max(0, size - len(SPECIALS))]
    # How many different words there are, and how many fell below the threshold, was not noised: it is not told.
    return Election(
        words=tuple(elected),
        votes=tuple(round(noisy[word]) for word in elected),
        ballots=0,
        types=0,
        too_few=0,
        no_room=len(passed) - len(elected),
    )
