r"""What this device learnt of its user: words, pairs of words, a dictionary, words never to be suggested.

With u(w) the uses of w and b(v, w) its uses after v, once a word (pair) was used `learn_after` times, and their sums
:math:`c_u`, :math:`c_b(v)`,

.. math::
   p(w) = \lambda_b \frac{b(v, w)}{c_b(v)} + (1 - \lambda_b)\Big(\lambda_u \frac{u(w)}{c_u} + (1 - \lambda_u)\,
   p_\mathrm{model}(w)\Big), \qquad
   \lambda_b = \frac{c_b}{c_b + k_b}, \quad \lambda_u = \min\Big(\lambda_\max, \frac{c_u}{c_u + k_u}\Big)

Nothing here leaves the device, and everything can be seen, taken away and carried to another device as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.keyboard.context import Constants, constants, fold, has_control, has_number, is_wordlike
from keyfed.keyboard.lexicon import KeyboardLexicon
from keyfed.text.vocab import SPECIALS

FORMAT = 1


@dataclass
class PersonalWords:
    """Counts of one user. Words are folded (lower case, plain apostrophes)."""

    words: dict[str, int] = field(default_factory=dict)  # uses of each word
    pairs: dict[str, dict[str, int]] = field(default_factory=dict)  # the same after each word, "" at a line start
    dictionary: dict[str, str] = field(default_factory=dict)  # the user's own words, folded → as written
    blocked: set[str] = field(default_factory=set)  # words never suggested, by anything
    learning: bool = True  # finished words are counted
    incognito: bool = False  # suggestions come from the model only and nothing is learnt
    version: int = 0  # goes up with every change that suggestions depend on
    constants: Constants = field(default_factory=constants)
    _room: int = field(default=0, repr=False, compare=False)  # entries that fit for certain; counted anew when used up

    def learn(self, word: str, previous: str = "") -> bool:
        """Count a finished word and its pair with the word before; not while incognito or with learning off.

        Returns:
          Whether it was counted.
        """
        if self.incognito or not self.learning or not self.learnable(word):
            return False
        key, before = fold(word), fold(previous)
        self.words[key] = self.words.get(key, 0) + 1
        if before == "" or self.learnable(before):  # a number or an address is not kept as the word before either
            after = self.pairs.setdefault(before, {})
            after[key] = after.get(key, 0) + 1
        self._make_room(2)
        self.version += 1
        return True

    def unlearn(self, word: str, previous: str = "") -> None:
        """Take back one use that `learn` counted, of a correction that was undone."""
        if not self.learnable(word):
            return
        key, before = fold(word), fold(previous)
        _take_one(self.words, key)
        _take_one(self.pairs.get(before, {}), key)
        if not self.pairs.get(before, True):
            del self.pairs[before]
        self.version += 1

    def keep(self, word: str) -> None:
        """Learn a word at once, as one whose correction was undone; not while incognito or with learning off.

        Of "i" and its like only the dictionary tells which form is meant: "I" counts as the same word.
        """
        if self.incognito or not self.learning or not self.learnable(word):
            return
        key = fold(word)
        self.words[key] = max(self.words.get(key, 0), self.constants.learn_after)
        self._make_room(1)
        self.version += 1
        if key in self.constants.capital_i:
            self.add(word)

    def learnable(self, word: str) -> bool:
        """Whether a word may be learnt: no digits, no address, no closing quote at its end, not too long.

        Example:
          >>> [PersonalWords().learnable(w) for w in ("Kiel", "b4", "me@x.de", "a.b", "…", "rock'")]
          [True, False, False, False, False, False]
        """
        if not is_wordlike(word) or not _is_one_word(word, self.constants) or word[-1] in self.constants.closing_joints:
            return False
        return not has_number(word) and not any(c in self.constants.unlearnt for c in word)

    def add(self, word: str) -> None:
        """Put a word into the user's dictionary; it counts as used `learn_after` times.

        Raises:
          DataError: No word, one that is too long, or the lists are full.
        """
        if not is_wordlike(word) or not _is_one_word(word, self.constants):
            raise DataError(
                f"{len(word)} characters cannot be a word of the dictionary: expected 1 to "
                f"{self.constants.longest_word} characters, no blank, at least one letter"
            )
        self._check_lists(fold(word) in self.dictionary)
        self.dictionary[fold(word)] = word
        self._make_room(1)
        self.version += 1

    def forget(self, word: str) -> None:
        """Remove a word, its pairs and its dictionary entry."""
        key = fold(word)
        self.words.pop(key, None)
        self.dictionary.pop(key, None)
        self.pairs.pop(key, None)
        for before in [before for before, after in self.pairs.items() if key in after]:
            del self.pairs[before][key]
            if not self.pairs[before]:
                del self.pairs[before]
        self.version += 1

    def forget_all(self) -> None:
        """Remove everything: counts, dictionary and list of blocked words."""
        for held in (self.words, self.pairs, self.dictionary, self.blocked):
            held.clear()
        self.version += 1

    def block(self, word: str) -> None:
        """Never suggest a word (or an emoji) again, nor correct to it.

        Raises:
          DataError: Not one word, as an import would refuse it, or the lists are full.
        """
        key = fold(word)
        if not _is_one_word(key, self.constants):
            raise DataError(
                f"{len(word)} characters cannot be blocked: expected one word of 1 to {self.constants.longest_word}, "
                "no blank or control character"
            )
        self._check_lists(key in self.blocked)
        self.blocked.add(key)
        self._make_room(1)
        self.version += 1

    def unblock(self, word: str) -> None:
        """Allow a blocked word again."""
        self.blocked.discard(fold(word))
        self.version += 1

    def _check_lists(self, is_there: bool) -> None:
        """Refuse one more word on the user's own lists if an export could not hold it: these are never cut down."""
        most = self.constants.most_entries
        if not is_there and len(self.dictionary) + len(self.blocked) >= most:
            raise DataError(f"the dictionary and the blocked words are full: at most {most:,} are kept")

    def _make_room(self, added: int) -> None:
        """Forget the pairs and words of the lowest counts, the oldest first, once an import would refuse the export.

        A tenth is cleared at once, and entries are counted only when they might not fit: most words cost nothing.
        """
        self._room -= added
        if self._room >= 0:
            return
        most = self.constants.most_entries
        lists = len(self.dictionary) + len(self.blocked)
        entries = lists + len(self.words) + sum(map(len, self.pairs.values()))
        if entries > most:
            held = [(n, before, word) for before, after in self.pairs.items() for word, n in after.items()]
            rare = sorted([*held, *((n, None, word) for word, n in self.words.items())], key=lambda entry: entry[0])
            for _, before, word in rare[: entries - most * 9 // 10]:
                del (self.words if before is None else self.pairs[before])[word]
            self.pairs = {before: after for before, after in self.pairs.items() if after}
            entries = lists + len(self.words) + sum(map(len, self.pairs.values()))
        self._room = most - entries

    def uses(self) -> dict[str, int]:
        """Return u of the words that count, dictionary included."""
        least = self.constants.learn_after
        counting = {word: n for word, n in self.words.items() if n >= least}
        return counting | {word: max(least, self.words.get(word, 0)) for word in self.dictionary}

    def uses_after(self, previous: str) -> dict[str, int]:
        """Return b of the words that count after a word."""
        return {w: n for w, n in self.pairs.get(previous, {}).items() if n >= self.constants.learn_after}

    def knows(self, word: str) -> bool:
        """Whether a word counts or is in the dictionary; also while incognito, so that it is not corrected away."""
        key = fold(word)
        return key in self.dictionary or self.words.get(key, 0) >= self.constants.learn_after

    def to_json(self) -> str:
        """Return everything that was learnt as one JSON object."""
        held = {"words": self.words, "pairs": self.pairs, "dictionary": list(self.dictionary.values())}
        return json.dumps({"format": FORMAT, **held, "blocked": sorted(self.blocked)}, ensure_ascii=False)

    def take(self, text: str) -> None:
        """Put what `to_json` wrote in the place of what is here, or refuse it whole.

        Raises:
          DataError: Not such an object, or too large; nothing is changed then.
        """
        found = checked(text, self.constants)
        self.words = {fold(w): n for w, n in found["words"].items()}
        self.pairs = {fold(v): {fold(w): n for w, n in after.items()} for v, after in found["pairs"].items()}
        self.dictionary = {fold(w): w for w in found["dictionary"]}
        self.blocked = {fold(w) for w in found["blocked"]}
        self._room = 0
        self.version += 1


def _take_one(counts: dict[str, int], key: str) -> None:
    if counts.get(key, 0) > 1:
        counts[key] -= 1
    else:
        counts.pop(key, None)


def checked(text: str, k: Constants) -> dict[str, Any]:
    """Return an exported document if it is one.

    Raises:
      DataError: What is wrong with it, in one line.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"learnt words: not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f'learnt words: expected an object with "format": {FORMAT}, as the keyboard exports it')
    kinds = {"words": dict, "pairs": dict, "dictionary": list, "blocked": list}
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise DataError(f"learnt words: {key!r} should be of type {kind.__name__}")
    lists = [found["words"], found["dictionary"], found["blocked"], *_tables(found["pairs"])]
    entries = sum(map(len, lists))
    if entries > k.most_entries:
        raise DataError(f"learnt words: {entries:,} entries; at most {k.most_entries:,} are taken")
    for counts in (found["words"], *_tables(found["pairs"])):
        _check_counts(counts, k)
    for word in (*found["dictionary"], *found["blocked"], *(v for v in found["pairs"] if v != "")):
        _check_word(word, k)
    return found


def _tables(pairs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for before, after in pairs.items():
        if not isinstance(after, dict):
            raise DataError(f"learnt words: pairs of a word of {len(before)} characters should be of type dict")
    return list(pairs.values())


def _check_counts(counts: Mapping[str, Any], k: Constants) -> None:
    for word, n in counts.items():
        _check_word(word, k)
        if type(n) is not int or not 1 <= n < 1 << 53:
            raise DataError(f"learnt words: a word of {len(word)} characters has no count; expected a positive integer")


def _is_one_word(word: str, k: Constants) -> bool:
    return word.split() == [word] and len(word) <= k.longest_word and not has_control(word)


def _check_word(word: Any, k: Constants) -> None:
    if not isinstance(word, str) or not _is_one_word(word, k):
        raise DataError(
            f"learnt words: an entry of {len(str(word))} characters is not a word: expected 1 to {k.longest_word}, no "
            "blank or control character"
        )


Floats = NDArray[np.float64]


def without_specials(logp: Floats) -> Floats:
    """Return log-probabilities over the vocabulary with the specials taken out and the rest summing to one."""
    rest = np.array(logp, np.float64)
    rest[: len(SPECIALS)] = -np.inf
    most = rest.max(initial=-np.inf)
    return rest if most == -np.inf else rest - (most + np.log(np.exp(rest - most).sum()))


def mixed(
    logp: Floats, previous: str, lexicon: KeyboardLexicon, own: Sequence[str], personal: PersonalWords, k: Constants
) -> tuple[Floats, Floats]:
    """Return log p (module docstring) of the lexicon's words and of the user's own words outside the vocabulary.

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
