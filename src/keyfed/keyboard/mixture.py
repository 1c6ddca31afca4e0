"""The model's next-word probabilities mixed with what this device learnt (equation: `keyfed.keyboard.personal`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.lexicon import Lexicon
from keyfed.keyboard.personal import Personal
from keyfed.keyboard.tables import Constants
from keyfed.text.vocab import SPECIALS

Floats = NDArray[np.float64]


def without_specials(logp: Floats) -> Floats:
    """Return log-probabilities over the vocabulary with the specials taken out and the rest summing to one."""
    rest = np.array(logp, np.float64)
    rest[: len(SPECIALS)] = -np.inf
    most = rest.max(initial=-np.inf)
    return rest if most == -np.inf else rest - (most + np.log(np.exp(rest - most).sum()))


def mixed(
    logp: Floats, previous: str, lexicon: Lexicon, own: Sequence[str], personal: Personal, k: Constants
) -> tuple[Floats, Floats]:
    """Return log p of the lexicon's words and of the user's own words, which the vocabulary does not have.

    Args:
      logp: the model's, over the vocabulary.
      previous: the word before.
      own: folded words that count and are not in the lexicon.
    """
    model = without_specials(logp)[lexicon.ids]
    uses = {} if personal.incognito else personal.uses()
    after = {} if personal.incognito else personal.uses_after(previous)
    if not uses and not after:
        return model, np.full(len(own), -np.inf)
    total, total_after = sum(uses.values()), sum(after.values())
    by_use = min(k.lambda_most, total / (total + k.k_unigram)) if total else 0.0
    by_pair = total_after / (total_after + k.k_bigram) if total_after else 0.0
    p = np.concatenate([(1 - by_pair) * (1 - by_use) * np.exp(model), np.zeros(len(own))])
    place = {word: len(lexicon) + i for i, word in enumerate(own)} | lexicon.place
    for counts, share in ((uses, (1 - by_pair) * by_use), (after, by_pair)):
        whole = sum(counts.values())
        for word, n in counts.items():
            if word in place:
                p[place[word]] += share * n / whole
    with np.errstate(divide="ignore"):
        log = np.log(p)
    return log[: len(lexicon)], log[len(lexicon) :]
