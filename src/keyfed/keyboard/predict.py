r"""Scores, edits and swipes → the strip above the keys, and what a separator will put in the place of the typed word.

Bayes' rule in nats, with F the cost of a whole word and C that of its beginning (`keyfed.keyboard.lexicon`):

.. math::
   \mathrm{full}(w) = \log p(w) - \alpha F(w), \qquad
   \mathrm{completion}(w) = \log p(w) - \alpha C(w) - \mathrm{complete}, \qquad
   \mathrm{score}(w) = \max(\mathrm{full}, \mathrm{completion})

against the typed word itself, which has log p(w) if it is known and `unknown_word` − `unknown_letter` · letters if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.context import (
    Constants,
    Context,
    KeyLayout,
    Point,
    all_capitals,
    belongs,
    constants,
    display,
    emoji_table,
    fold,
    has_number,
    is_capital,
    layout_of,
    offensive_words,
    starts_sentence,
)
from keyfed.keyboard.lexicon import KeyboardLexicon, is_suggestible
from keyfed.keyboard.personal import PersonalWords, mixed
from keyfed.text.vocab import SPECIALS, Vocab

Floats = NDArray[np.float64]
Kind = Literal["word", "literal", "completion", "correction", "emoji", "next"]

RANKED = 16  # candidates that are looked at for three slots; some may be shown alike
SHOWN = 5  # of these, no two alike: three for the slots, the typed word and the correction being shown anyway


@dataclass(frozen=True, slots=True)
class Slot:
    """One suggestion: what is shown and typed, the word it stands for (folded), and why it is there."""

    text: str
    word: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Strip:
    """Three suggestions, the best in the middle."""

    slots: tuple[Slot | None, Slot | None, Slot | None]  # left, middle, right
    correction: str | None = None  # what a separator will put in the place of the typed word, if anything


EMPTY = Strip((None, None, None))


@dataclass(frozen=True, slots=True)
class KeyboardSettings:
    """What a user can switch."""

    autocorrect: bool = True  # separators correct the typed word
    emoji: bool = True  # emoji are offered
    clean: bool = True  # offensive words are held back


class Predictor:
    """A vocabulary, a layout and a user's counts: ranks words given the model's log-probabilities."""

    def __init__(
        self,
        vocab: Vocab,
        personal: PersonalWords | None = None,
        *,
        forms: Mapping[str, str] | None = None,
        layout: KeyLayout | None = None,
        settings: KeyboardSettings | None = None,
        k: Constants | None = None,
    ) -> None:
        self.k = k or constants()
        self.vocab = vocab
        self.personal = personal or PersonalWords()
        self.settings = settings or KeyboardSettings()
        self.layout = layout or layout_of("qwerty")
        self._forms = forms or {}
        entries = enumerate(vocab.words[len(SPECIALS) :], len(SPECIALS))
        numbered = [(i, w) for i, w in entries if is_suggestible(w, self.k)]
        self.lexicon = KeyboardLexicon([w for _, w in numbered], [i for i, _ in numbered], self.layout, self.k)
        self._own: tuple[int, KeyboardLexicon] | None = None
        self._allowed: tuple[int, bool, NDArray[np.bool_]] | None = None
        self._mixed: tuple[Floats, str, int, bool, tuple[Floats, Floats]] | None = None

    def suggest(self, logp: Floats, context: Context, taps: Sequence[Point | None] = ()) -> Strip:
        """Return the strip.

        Args:
          logp: the model's log-probabilities of the next token, [vocabulary].
          context: what stands left of the cursor.
          taps: where the finger came down for each typed character, as far as known.
        """
        typed = context.typed
        if len(typed) > self.k.max_typed:
            return EMPTY
        if not typed:
            return self._next(logp, context)
        ranked = self._ranked(logp, context, taps)
        literal = Slot(typed, fold(typed), "literal")
        corrected = self.correct(logp, context, taps)
        if corrected is not None:
            others = [s for s in ranked if s.text not in (typed, corrected.text)]
            ordered = [corrected, literal, *others]
        else:
            others = [s for s in ranked[1:] if s.text != typed]
            ordered = [ranked[0], *([literal] if ranked[0].text != typed else []), *others]
        return Strip(_three(ordered, self._emoji(fold(typed))), corrected.text if corrected else None)

    def correct(self, logp: Floats, context: Context, taps: Sequence[Point | None] = ()) -> Slot | None:
        """Return what a separator puts in the place of the typed word, or None where it stays."""
        typed, k = context.typed, self.k
        if not self.settings.autocorrect or not self.is_correctable(typed):
            return None
        key = fold(typed)
        if key in self._held_back() or self.personal.dictionary.get(key) == typed:
            return None
        if key in k.capital_i:  # whether it is known says nothing here: the counts are those of "I"
            shown = display(key, typed, False, self._forms, k)
            return None if shown == typed else Slot(shown, key, "correction")
        if sum(map(str.isalpha, typed)) < 2 or self.personal.knows(typed):
            return None
        best: tuple[float, Slot] | None = None
        for lexicon, scores, allowed in self._parts(logp, context.previous):
            cost = lexicon.typing(typed, taps).full
            full = np.where(allowed & (cost <= k.correct_max), scores - k.alpha * cost, -np.inf)
            at = int(full.argmax()) if len(full) else 0
            if len(full) and (best is None or full[at] > best[0]):
                best = float(full[at]), self._slot(lexicon, at, context, "correction")
        known = key in self.lexicon.places
        margin = k.margin_known if known else k.margin_unknown
        if best is None or not best[0] > self._literal(logp, context) + margin:
            return None
        return None if best[1].word == key else best[1]

    def is_correctable(self, typed: str) -> bool:
        """Whether a typed word is one that may be corrected: no number, address, abbreviation or closing quote.

        Example:
          >>> p = Predictor(Vocab("word", SPECIALS, lower=True, tokenised=False))
          >>> [p.is_correctable(w) for w in ("teh", "Teh", "TEH", "iPhnoe", "b4", "x@y", "rock'")]
          [True, True, False, False, False, False, False]
        """
        if not typed or len(typed) > self.k.max_typed or not belongs(typed[-1]) or all_capitals(typed):
            return False
        odd = has_number(typed) or any(c in self.k.unlearnt for c in typed)
        return not odd and not any(map(is_capital, typed[1:]))

    def gesture(self, logp: Floats, context: Context, points: Sequence[Point], n: int = 3) -> list[Slot]:
        """Return the n best words for a swipe, best first."""
        found: list[tuple[float, int, Slot]] = []
        for which, (lexicon, scores, allowed) in enumerate(self._parts(logp, context.previous)):
            places, score = lexicon.templates.score(points, scores, self.k)
            score = np.where(allowed[places], score, -np.inf)
            for at in best_of(score, RANKED):
                slot = self._slot(lexicon, int(places[at]), context, "word")
                found.append((-float(score[at]), which * len(self.lexicon) + int(places[at]), slot))
        return _unlike((slot for *_, slot in sorted(found, key=lambda f: f[:2])), n)

    def _next(self, logp: Floats, context: Context) -> Strip:
        ranked: list[tuple[float, int, KeyboardLexicon, int]] = []
        for which, (lexicon, scores, allowed) in enumerate(self._parts(logp, context.previous)):
            score = np.where(allowed, scores, -np.inf)
            ranked += [(-float(score[at]), which, lexicon, at) for at in best_of(score, RANKED)]
        ranked.sort(key=lambda r: r[:2])
        best = (self._slot(lexicon, at, context, "next") for _, _, lexicon, at in ranked)
        return Strip(_three(_unlike(best, SHOWN), self._emoji(context.previous)))

    def _ranked(self, logp: Floats, context: Context, taps: Sequence[Point | None]) -> list[Slot]:
        """Return the best of the candidates and the literal, best first, no two alike; never empty."""
        k, typed = self.k, context.typed
        most = min(k.max_cost_most, k.max_cost + k.max_cost_letter * len(typed))
        found: list[tuple[float, int, KeyboardLexicon | None, int, Kind]] = []
        for which, (lexicon, scores, allowed) in enumerate(self._parts(logp, context.previous)):
            cost, beginning = self._costs(lexicon, typed, taps)
            full = scores - k.alpha * cost
            completion = scores - k.alpha * beginning - k.complete
            score = np.where(allowed & (np.minimum(cost, beginning) <= most), np.maximum(full, completion), -np.inf)
            for at in best_of(score, RANKED):
                kind: Kind = "completion" if completion[at] > full[at] else "word"
                kind = "correction" if kind == "word" and cost[at] > 0 else kind
                found.append((-float(score[at]), which, lexicon, at, kind))
        found.append((-self._literal(logp, context), 2, None, 0, "literal"))
        found.sort(key=lambda f: f[:2])
        literal = Slot(typed, fold(typed), "literal")
        slots = (self._slot(lexicon, at, context, kind) if lexicon else literal for _, _, lexicon, at, kind in found)
        return _unlike(slots, SHOWN)

    def _costs(self, lexicon: KeyboardLexicon, typed: str, taps: Sequence[Point | None]) -> tuple[Floats, Floats]:
        """Return F and C of the typed letters; a short beginning with mistakes completes nothing."""
        state = lexicon.typing(typed, taps)
        beginning = state.completion
        if len(typed) < self.k.fuzzy_from:
            beginning = np.where(beginning > 0, np.inf, beginning)
        return state.full, beginning

    def _literal(self, logp: Floats, context: Context) -> float:
        """Score of the typed word as it was typed."""
        key = fold(context.typed)
        known = [
            float(scores[lexicon.places[key]].max())
            for lexicon, scores, _ in self._parts(logp, context.previous)
            if key in lexicon.places
        ]
        return max(known, default=self.k.unknown_word - self.k.unknown_letter * len(context.typed))

    def _parts(self, logp: Floats, previous: str) -> tuple[tuple[KeyboardLexicon, Floats, NDArray[np.bool_]], ...]:
        """Return the vocabulary's lexicon and the user's own one, with log p and what may be suggested of each."""
        own = self._own_words()
        at = self._mixed
        held = self.personal.version, self.personal.incognito
        if at is None or at[0] is not logp or at[1:4] != (previous, *held):
            both = mixed(logp, previous, self.lexicon, own.words, self.personal, self.k)
            self._mixed = at = (logp, previous, *held, both)
        if self._allowed is None or self._allowed[:2] != (self.personal.version, self.settings.clean):
            allowed = self.lexicon.outside(self._held_back())
            self._allowed = (self.personal.version, self.settings.clean, allowed)
        main, personal = at[-1]
        parts = (self.lexicon, main, self._allowed[-1])
        if self.personal.incognito or not len(own):
            return (parts,)
        return parts, (own, personal, own.outside(self._held_back()))

    def _held_back(self) -> frozenset[str]:
        return frozenset(self.personal.blocked) | (offensive_words() if self.settings.clean else frozenset())

    def _own_words(self) -> KeyboardLexicon:
        if self._own is None or self._own[0] != self.personal.version:
            counting = self.personal.uses()
            for after in self.personal.pairs.values():
                counting |= {w: n for w, n in after.items() if n >= self.k.learn_after}
            words = sorted(w for w in counting if w not in self.lexicon.places and is_suggestible(w, self.k))
            if self._own is None or self._own[1].words != tuple(words):
                self._own = self.personal.version, KeyboardLexicon(words, range(len(words)), self.layout, self.k)
            self._own = self.personal.version, self._own[1]
        return self._own[1]

    def _slot(self, lexicon: KeyboardLexicon, at: int, context: Context, kind: Kind) -> Slot:
        word = lexicon.words[at]
        forms = self._forms if lexicon is self.lexicon else self.personal.dictionary
        text = display(word, context.typed, starts_sentence(context.text, self.k), forms, self.k)
        return Slot(text, lexicon.keys[at], "literal" if kind != "correction" and text == context.typed else kind)

    def _emoji(self, word: str) -> Slot | None:
        picture = emoji_table().get(word) if self.settings.emoji else None
        if picture is None or not self.personal.blocked.isdisjoint((word, fold(picture))):
            return None
        return Slot(picture, word, "emoji")


def best_of(score: Floats, n: int) -> list[int]:
    """Return the places of the n highest finite scores, best first; ties go to the lower place.

    Example:
      >>> best_of(np.array([1.0, 3.0, -np.inf, 3.0]), 3)
      [1, 3, 0]
    """
    places = np.flatnonzero(score > -np.inf)
    if len(places) > n:
        found = score[places]
        places = places[found >= np.partition(found, len(found) - n)[len(found) - n]]
    order = np.argsort(-score[places], kind="stable")[:n]
    return [int(at) for at in places[order]]


def _unlike(slots: Iterable[Slot], n: int) -> list[Slot]:
    """Return the first n slots, those that read like an earlier one left out."""
    found: dict[str, Slot] = {}
    for slot in slots:
        found.setdefault(slot.text, slot)
        if len(found) == n:
            break
    return list(found.values())


def _three(best: Sequence[Slot], emoji: Slot | None) -> tuple[Slot | None, Slot | None, Slot | None]:
    """Put the best in the middle, the second left, the third or the emoji right."""
    middle, left, right = [*best[:3], None, None, None][:3]
    return left, middle, emoji or right
