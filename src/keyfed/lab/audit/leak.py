r"""Words from one transmitted update: an attack of a few lines that needs no optimisation.

- **Input rows.** Without tied weights the embedding's row of a word changes only if the client read that word: the
  rows that changed are its words.
- **Output bias.** With tied weights every row changes, but ∂loss/∂b = softmax − counts: the bias of a word rises only
  if the client wrote it. The sign gives the words, and sorting by it the likeliest first.

On what a secure sum shows of a client (uniform integers), and on a sum with noise, the same attack must do no better
than drawing words by chance.

References:
  Melis, Song, De Cristofaro, Shmatikov, *Exploiting Unintended Feature Leakage in Collaborative Learning*, S&P 2019.
  Suliman, Leith, *Two Models are Better than One: Federated Learning Is Not Private For Google GBoard*, 2022.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int64]
RECOVERED = 0.9  # share of a client's words above which an update gives it away
SIGNS = 4.0  # standard errors above chance from which on an attack is better than chance


class Leak(NamedTuple):
    """What an attack on one view of an update found.

    Attributes:
      recovered: share of the client's words among the |words| best guesses; precision and recall are the same there.
      chance: what guessing at random recovers.
      precision, recall: of the plain rule (rows that changed; a positive sign), which needs no knowledge of |words|.
      frequent: share of the client's 100 most frequent words (or all, if fewer) among as many first guesses.
      better_than_chance: recovered exceeds chance by four standard errors.
    """

    recovered: float
    chance: float
    precision: float
    recall: float
    frequent: float
    better_than_chance: bool


def scores_of_rows(change: Tensor) -> Tensor:
    """Score words by how far their input rows moved."""
    return change.double().square().sum(1).sqrt()


def scores_of_bias(change: Tensor) -> Tensor:
    """Score words by how much their output bias rose."""
    return change.double()


def judge_guesses(scores: Tensor, counts: NDArray[np.int64], first: int) -> Leak:
    """Compare an attack's scores with the words a client has.

    Args:
      scores: one a word of the vocabulary, larger where the attacker believes that the client has it.
      counts: how often the client has each word.
      first: entries before this one are no words (specials) and are never guessed.
    """
    guessed = torch.argsort(scores[first:], descending=True).numpy() + first
    words = np.flatnonzero(counts[first:]) + first
    have = np.zeros(len(counts), np.bool_)
    have[words] = True
    if not len(words):
        raise ValueError("the client has no words")
    k, vocabulary = len(words), len(counts) - first
    recovered = float(have[guessed[:k]].mean())
    chance = k / vocabulary
    positive = (scores > 0).numpy().copy()
    positive[:first] = False
    hits = int(have[positive].sum())
    top = min(100, k)
    frequent = set((np.argsort(-counts[first:], kind="stable")[:top] + first).tolist())
    # Hypergeometric: k guesses without replacement among `vocabulary` words of which k are right.
    error = math.sqrt(chance * (1 - chance) / k * (vocabulary - k) / max(1, vocabulary - 1))
    return Leak(
        recovered,
        chance,
        hits / max(1, int(positive.sum())),
        hits / k,
        len(frequent & set(guessed[:top].tolist())) / top,
        recovered > chance + SIGNS * error,
    )


def masked_view(words: NDArray[np.uint32]) -> Tensor:
    """Read ring elements as the signed numbers an attacker would take them for, centred at 0."""
    return torch.from_numpy(words.view(np.int32).astype(np.float64))
