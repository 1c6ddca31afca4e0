"""A keyboard judged as its user would: suggestions, keystrokes, corrections, swipes, milliseconds.

Held-out messages are typed letter by letter. A message begins in an empty field, as on a phone, so the model reads only
what stands before in the same line. What a person wrote is what was meant; upper and lower case count as the same.

- **top-1, top-3**: before the first letter of a word the middle slot, or any of the three, shows it. Words outside the
  vocabulary count as misses.
- **keystrokes saved**: 1 − strokes / characters. The typist picks the word as soon as it stands in the strip (one
  stroke, which also types the blank behind it), and types every other character. A comma or full stop moves such a
  blank behind itself; before anything else that is no blank it has to be taken back, by one more stroke. The *ideal*
  keyboard shows every word of the vocabulary before its first letter.
- **wrong corrections**: words that a separator would replace by another when they are typed to their end, properly.
- **slips, taps, swipes**: words of the vocabulary with one slip, with taps spread around the keys, or swiped
  (`keyfed.keyboard.typist`): what came out in the end; words tapped right and then corrected away are *spoilt*.

Words are what the keyboard takes for one: letters up to a blank or a mark. Numbers, addresses, paths and names with
digits in them are typed as they are and not counted as words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from keyfed.keyboard import typist
from keyfed.keyboard.context import typed_part
from keyfed.keyboard.layout import fold
from keyfed.keyboard.predict import Strip
from keyfed.keyboard.session import Keyboard
from keyfed.keyboard.tables import Constants

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
BEGINS = re.compile(r"""(?:^|\s)[(\[{"“„«']*$""")  # what may stand before a word that is one to the keyboard
ENDS = re.compile(r"""[.,;:!?…)\]}"”»]*(?:\s|$)""")  # and behind it
LEAST_LETTERS = 3  # of a word that gets a slip


@dataclass
class Counts:
    """What happened while messages were typed; sums, so that clients can be added up."""

    words: int = 0
    known: int = 0
    top1: int = 0
    top3: int = 0
    characters: int = 0
    strokes: int = 0
    ideal: int = 0
    picks: int = 0
    wrong_known: int = 0
    wrong_unknown: int = 0
    slips: int = 0
    slips_mended: int = 0
    slips_worse: int = 0
    tapped: int = 0
    taps_right: int = 0
    taps_right_alone: int = 0
    taps_spoilt: int = 0
    swiped: int = 0
    swipes_first: int = 0
    swipes_three: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def summary(self) -> dict[str, float | int | None]:
        """Shares for the table; None where nothing was counted."""
        unknown = self.words - self.known

        def part(of: int, all_: int) -> float | None:
            return of / all_ if all_ else None

        return {
            "words": self.words,
            "unknown_words": part(unknown, self.words),
            "top1": part(self.top1, self.words),
            "top3": part(self.top3, self.words),
            "saved": part(self.characters - self.strokes, self.characters),
            "saved_ideal": part(self.characters - self.ideal, self.characters),
            "picked": part(self.picks, self.words),
            "wrong_corrections": part(self.wrong_known + self.wrong_unknown, self.words),
            "wrong_corrections_known": part(self.wrong_known, self.known),
            "wrong_corrections_unknown": part(self.wrong_unknown, unknown),
            "slips_mended": part(self.slips_mended, self.slips),
            "slips_made_worse": part(self.slips_worse, self.slips),
            "taps_right": part(self.taps_right, self.tapped),
            "taps_right_without_correction": part(self.taps_right_alone, self.tapped),
            "taps_spoilt": part(self.taps_spoilt, self.tapped),
            "swipes_top1": part(self.swipes_first, self.swiped),
            "swipes_top3": part(self.swipes_three, self.swiped),
        }


@dataclass
class Clock:
    """Milliseconds of each answer, by the clock and of this process's processor.

    A *word* is an answer with nothing typed, for which the model reads; a *keystroke* only ranks.
    """

    words: list[tuple[float, float]] = field(default_factory=list)
    keystrokes: list[tuple[float, float]] = field(default_factory=list)

    def strip(self, keyboard: Keyboard, before: str, typed: str, taps: Sequence[Any] = ()) -> Strip:
        """Ask for the strip and note how long it took."""
        began, used = time.perf_counter(), time.process_time()
        found = keyboard.suggest(before + typed, taps)
        took = (time.perf_counter() - began) * 1e3, (time.process_time() - used) * 1e3
        (self.keystrokes if typed else self.words).append(took)
        return found

    def summary(self) -> dict[str, Any]:
        """p50, p95 and p99 by the clock and the mean of the processor."""
        return {"word": _times(self.words), "keystroke": _times(self.keystrokes)}


def _times(taken: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    if not taken:
        return None
    wall, cpu = np.array(taken).T
    p50, p95, p99 = np.percentile(wall, [50, 95, 99])
    return {"p50_ms": float(p50), "p95_ms": float(p95), "p99_ms": float(p99), "cpu_ms": float(cpu.mean())}


def type_lines(keyboard: Keyboard, lines: Iterable[str], rng: np.random.Generator, clock: Clock) -> Counts:
    """Type messages on a keyboard and count."""
    counts = Counts()
    for line in lines:
        _type_line(keyboard, line, counts, clock)
        for start, word in words_in(line, keyboard.predictor.k):
            if fold(word) in keyboard.predictor.lexicon.places:
                _mistype(keyboard, line[:start], word, counts, rng)
    return counts


def words_in(line: str, k: Constants) -> list[tuple[int, str]]:
    """Return where the words of a message begin, and the words.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> words_in("don't run /usr/bin, i386 or me@x.org: it's 2 a_b mp3", constants())
      [(0, "don't"), (6, 'run'), (25, 'or'), (38, "it's")]
    """
    found = []
    for match in WORD.finditer(line):
        alone = BEGINS.search(line, 0, match.start()) and ENDS.match(line, match.end())
        if alone and typed_part(line[: match.end()], k) == match[0]:
            found.append((match.start(), match[0]))
    return found


def _type_line(keyboard: Keyboard, line: str, counts: Counts, clock: Clock) -> None:
    """Words and their suggestions; everything between is typed as it is."""
    k = keyboard.predictor.k
    end = 0
    picked = shown = False  # whether a blank stands behind the word before: on this keyboard, on the ideal one
    for start, word in words_in(line, k):
        between = line[end:start]
        known = fold(word) in keyboard.predictor.lexicon.places
        counts.characters += len(between) + len(word)
        counts.strokes += strokes_between(between, picked, k)
        counts.ideal += strokes_between(between, shown, k) + (1 if known else len(word))
        strokes, picked = _type_word(keyboard, line[:start], word, known, counts, clock)
        shown = known
        counts.strokes += strokes
        counts.words += 1
        counts.known += known
        end = start + len(word)
    rest = line[end:]
    counts.characters += len(rest) + 1  # with Enter
    counts.strokes += strokes_between(rest, picked, k, last=True) + 1
    counts.ideal += strokes_between(rest, shown, k, last=True) + 1


def strokes_between(between: str, blank: bool, k: Constants, *, last: bool = False) -> int:
    """Return the strokes for what stands between two words.

    Args:
      blank: whether an automatic blank stands there already.
      last: whether no word follows; a blank too many at the end of a message is left.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> [strokes_between(text, True, constants()) for text in (" ", ", ", "...", "/", "  ")]
      [0, 1, 4, 2, 1]
    """
    strokes = 0
    while blank and between and between[0] in k.no_blank_before:
        strokes, between = strokes + 1, between[1:]
    if not blank:
        return strokes + len(between)
    if between.startswith(" "):
        return strokes + len(between) - 1
    return strokes + len(between) + (0 if last and not between else 1)


def _type_word(
    keyboard: Keyboard, before: str, word: str, known: bool, counts: Counts, clock: Clock
) -> tuple[int, bool]:
    """Return the strokes a word took, and whether it was picked."""
    strip = clock.strip(keyboard, before, "")
    counts.top1 += _shows(strip.slots[1], word)
    counts.top3 += any(_shows(s, word) for s in strip.slots)
    strokes, picked = len(word), False
    for typed in range(len(word)):
        if typed:
            strip = clock.strip(keyboard, before, word[:typed])
        if any(_shows(s, word) for s in strip.slots):
            counts.picks += 1
            strokes, picked = typed + 1, True
            break
    made = clock.strip(keyboard, before, word).correction  # what would happen to someone who does not look at the strip
    if made is not None and fold(made) != fold(word):
        counts.wrong_known += known
        counts.wrong_unknown += not known
    return strokes, picked


def _mistype(keyboard: Keyboard, before: str, word: str, counts: Counts, rng: np.random.Generator) -> None:
    """The same word with a slip, by taps, and swiped."""
    layout = keyboard.predictor.layout
    slipped = typist.misspell(word, layout, rng)
    tapped = typist.tap(word, layout, rng)
    points = typist.swipe(word, layout, rng)
    if len(word) >= LEAST_LETTERS and fold(slipped) != fold(word):
        made = keyboard.suggest(before + slipped).correction
        counts.slips += 1
        counts.slips_mended += made is not None and fold(made) == fold(word)
        counts.slips_worse += made is not None and fold(made) != fold(word)
    made = keyboard.suggest(before + tapped.typed, tapped.taps).correction
    counts.tapped += 1
    counts.taps_right += fold(made if made is not None else tapped.typed) == fold(word)
    counts.taps_right_alone += fold(tapped.typed) == fold(word)
    counts.taps_spoilt += fold(tapped.typed) == fold(word) and made is not None and fold(made) != fold(word)
    if typist.has_path(word, layout):
        best = [fold(slot.text) for slot in keyboard.gesture(before, points)]
        counts.swiped += 1
        counts.swipes_first += best[:1] == [fold(word)]
        counts.swipes_three += fold(word) in best


def _shows(slot: Any, word: str) -> bool:
    return slot is not None and slot.kind not in ("emoji", "literal") and fold(slot.text) == fold(word)
