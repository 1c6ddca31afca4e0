r"""A vocabulary that no text was collected for: every client sends the words it uses, the server counts clients.

With :math:`B_k` the ballot of client k, a word w has :math:`v(w) = |\{k : w \in B_k\}|` votes, and the vocabulary is

.. math:: \text{the first } V - 4 \text{ of } \{w : v(w) \ge m\} \text{ by } (-v(w), w).

`ballot` is what a device computes, `elect` what a server does with what it is sent; neither knows of the other's data.
A ballot says which words, not how often nor in which order, and has at most K (`most_words`) of them.

With noise (`elect_privately`) the vocabulary carries a guarantee. Adding or removing one client changes the votes of at
most K words, each by one: the counts move by at most √K. Every count that is not 0 gets Gaussian noise of standard
deviation σ = z·√K, and a word enters if its noisy count reaches a threshold τ. What a single client alone said must
stay out: each of its K words passes with chance 1 − Φ((τ − 1)/σ), so τ is such that all of them together pass with
chance at most δ/2; the noise has the other half.

.. math::  τ = 1 + σ · Φ^{-1}\big((1 − δ/2)^{1/K}\big)

References:
  Korolova, Kenthapadi, Mishra, Ntoulas, *Releasing Search Queries and Clicks Privately*, WWW 2009; Wilson et al.,
  *Differentially Private SQL with Bounded User Contribution*, 2019 (τ-thresholding).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from statistics import NormalDist

from keyfed.errors import ConfigError, DataError
from keyfed.text.vocab import SPECIALS, TokenKind, Vocab, cutter

# Of two votes one may be an attacker's, who guesses a word to learn whether some single other person uses it.
MIN_CLIENTS = 3
# 22 of the 39 clients of sotu use more; of its training tokens 2.23 % are then unknown, 2.21 % without a cap.
MOST_WORDS = 4_000

Ballot = frozenset[str]


def ballot(
    lines: Iterable[str],
    *,
    kind: TokenKind,
    lower: bool,
    tokenised: bool,
    least_uses: int = 1,
    most_words: int | None = MOST_WORDS,
    known: Container[str] = (),
) -> Ballot:
    """Return what one client sends: the words of its own training text, most frequent first where there are too many.

    Args:
      lines: The client's training lines.
      kind: `"word"` or `"char"`.
      lower: Whether to write everything in lower case.
      tokenised: Whether the text is cut at white space only.
      least_uses: Uses from which on a word is sent.
      most_words: Words sent at most, ties going by the word itself; None sends all.
      known: Words of a public vocabulary, which no client needs to send: the places are for new ones.

    Example:
      >>> said = ballot(["b a b", "c <unk> c"], kind="word", lower=True, tokenised=True, most_words=2)
      >>> sorted(said)
      ['b', 'c']
      >>> sorted(ballot(["b a b"], kind="word", lower=True, tokenised=True, known={"b"}))
      ['a']
    """
    if least_uses < 1:
        raise ConfigError(f"least_uses must be at least 1, got {least_uses}")
    if most_words is not None and most_words < 1:
        raise ConfigError(f"most_words must be at least 1, got {most_words}")
    uses = Counter(chain.from_iterable(map(cutter(kind, tokenised=tokenised, lower=lower), lines)))
    said = [word for word, n in uses.items() if n >= least_uses and word not in SPECIALS and word not in known]
    if most_words is not None and len(said) > most_words:
        said = sorted(said, key=lambda word: (-uses[word], word))[:most_words]
    return frozenset(said)


@dataclass(frozen=True, slots=True)
class Election:
    """What came of a vote. Words that were not elected are counted and forgotten.

    Attributes:
      words: Elected, by falling number of clients, then by the word.
      votes: Clients of each of them.
      ballots: Clients who voted, empty ballots included.
      types: Different words on all ballots.
      too_few: Words of fewer clients than `min_clients`.
      no_room: Words of enough clients that did not fit in.
    """

    words: tuple[str, ...]
    votes: tuple[int, ...]
    ballots: int
    types: int
    too_few: int
    no_room: int

    def vocab(self, kind: TokenKind, *, lower: bool, tokenised: bool) -> Vocab:
        """Return the elected words behind the four specials; the arguments are those of the ballots."""
        return Vocab(kind, (*SPECIALS, *self.words), lower=lower, tokenised=tokenised)

    def beyond(self, known: Vocab) -> Vocab:
        """Return a vocabulary with the elected words behind its own, which keep their numbers."""
        return replace(known, words=(*known.words, *self.words))


def elect(
    ballots: Iterable[Collection[str]],
    *,
    size: int | None,
    min_clients: int = MIN_CLIENTS,
    allow_single: bool = False,
) -> Election:
    """Count the clients of each word and take the words of the most; ties go by the word itself.

    Ballots are read once, one at a time, in any order.

    Args:
      ballots: The words of each client; a word counts once a ballot.
      size: Entries wanted, the four specials included; None takes every word of enough clients.
      min_clients: Clients a word needs.
      allow_single: Whether `min_clients` may be 1, so that what a single person wrote reaches everybody.

    Raises:
      ConfigError: A number makes no sense, or a single client would be enough.
      DataError: No client voted, or no word has enough clients.

    Example:
      >>> found = elect([{"the", "mine"}, {"the", "a"}, {"a", "the"}], size=None, min_clients=2)
      >>> found.words, found.votes, found.types, found.too_few
      (('the', 'a'), (3, 2), 3, 1)
    """
    if size is not None and size <= len(SPECIALS):
        raise ConfigError(f"vocabulary size {size} leaves no room: {len(SPECIALS)} entries are special")
    if min_clients < 1:
        raise ConfigError(f"min_clients must be at least 1, got {min_clients}")
    if min_clients == 1 and not allow_single:
        raise ConfigError(
            "min_clients 1 lets the words of a single person into a vocabulary that everybody gets; take 2 or more, "
            f"{MIN_CLIENTS} by default, or allow it with --allow-single"
        )
    votes, voters = _count_votes(ballots)
    if not votes:
        raise DataError(f"no words to elect: the ballots of all {voters:,} clients are empty")
    shared = [word for word, n in votes.items() if n >= min_clients]
    if not shared:
        raise DataError(f"no word is on the ballots of {min_clients} or more of the {voters:,} clients; ask for fewer")
    elected = sorted(shared, key=lambda word: (-votes[word], word))[: None if size is None else size - len(SPECIALS)]
    return Election(
        words=tuple(elected),
        votes=tuple(votes[word] for word in elected),
        ballots=voters,
        types=len(votes),
        too_few=len(votes) - len(shared),
        no_room=len(shared) - len(elected),
    )


def _count_votes(ballots: Iterable[Collection[str]], most_words: int | None = None) -> tuple[Counter[str], int]:
    """Return the clients of each word, and how many clients voted; a word counts once a ballot."""
    votes: Counter[str] = Counter()
    voters = 0
    for words in ballots:
        said = set(words)
        if most_words is not None and len(said) > most_words:
            raise DataError(f"a ballot has {len(said):,} words, more than the {most_words:,} that were agreed")
        votes.update(said)
        voters += 1
    for special in SPECIALS:
        del votes[special]  # no client of ours sends one; another's must not make an entry twice
    return votes, voters


def threshold(sigma: float, delta: float, most_words: int) -> float:
    """Return τ, below which no noisy count is released.

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

    Only counts that are noised are released: the votes of the words elected, as whole numbers.

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
    votes, _ = _count_votes(ballots, most_words)
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
    # How many different words there are, and how many fell below the threshold, was not noised: it is not released.
    return Election(
        words=tuple(elected),
        votes=tuple(round(noisy[word]) for word in elected),
        ballots=0,
        types=0,
        too_few=0,
        no_room=len(passed) - len(elected),
    )
