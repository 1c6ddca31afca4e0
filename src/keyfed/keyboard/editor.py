"""A line of text under a person's fingers: keys, backspace, picked suggestions, corrections and their undoing."""

from __future__ import annotations

from typing import NamedTuple

from keyfed.keyboard.casing import Written, pick, put
from keyfed.keyboard.context import belongs, previous_word
from keyfed.keyboard.predict import Slot, Strip
from keyfed.keyboard.session import Keyboard


class _Undo(NamedTuple):
    """A correction: the text with it and as it was typed, the typed word, the pair that was learnt."""

    after: str
    before: str
    typed: str
    learnt: tuple[str, str] | None


class Editor:
    """Text left of the cursor, with what a keyboard does to it.

    A separator finishes the typed word: it is corrected where the strip says so, and learnt. A backspace right after a
    correction brings back what was typed, and learns it at once. Of what was written before learning was last switched
    (incognito, learning) nothing is learnt, not even as the word before a new one.

    Attributes:
      keyboard: gives the suggestions.
    """

    def __init__(self, keyboard: Keyboard) -> None:
        self.keyboard = keyboard
        self._written = Written("")
        self._undo: _Undo | None = None
        self._mode = self._switches()
        self._sealed = 0  # characters of the text of which nothing is learnt

    @property
    def text(self) -> str:
        """What was written."""
        return self._written.text

    def strip(self) -> Strip:
        """Return the suggestions for where the cursor is."""
        return self.keyboard.suggest(self.text)

    def type(self, c: str) -> None:
        """Type one character."""
        self._watch()
        k = self.keyboard.predictor.k
        typed = self.keyboard.context(self.text).typed
        undo = None
        if typed and not (belongs(c) or (c in k.joints and c != ".")):
            undo = self._finish(typed, c)
        self._written = put(self._written, c, k)
        self._undo = undo

    def _finish(self, typed: str, separator: str) -> _Undo | None:
        """Correct and learn the typed word; return how to undo it."""
        correction = self.strip().correction
        if correction is None:
            self._learn(self.text)
            return None
        before = self.text
        after = before[: len(before) - len(typed)] + correction
        self._written = Written(after)
        return _Undo(after + separator, before + separator, typed, self._learn(after))

    def backspace(self) -> None:
        """Take back the last character, or the correction just made."""
        self._watch()
        undo, personal = self._undo, self.keyboard.predictor.personal
        if undo is not None and undo.after == self.text:
            self._written = Written(undo.before)
            if undo.learnt:
                personal.unlearn(*undo.learnt)
            if len(undo.before) - len(undo.typed) - 1 >= self._sealed:
                personal.keep(undo.typed)
        else:
            self._written = Written(self.text[:-1])
        self._undo = None

    def pick(self, slot: Slot) -> None:
        """Take a suggestion: it replaces the typed word, is learnt, and a blank follows."""
        self._watch()
        typed = self.keyboard.context(self.text).typed
        if slot.kind == "emoji" and typed:
            typed = ""
            self._written = Written(f"{self.text} ")
        self._written = pick(self.text, typed, slot.text)
        if slot.kind != "emoji":
            self._learn(self.text[:-1])
        self._undo = None

    def _switches(self) -> tuple[bool, bool]:
        personal = self.keyboard.predictor.personal
        return personal.incognito, personal.learning

    def _watch(self) -> None:
        """Seal the text if learning was switched since the last key; a text that got shorter has less to seal."""
        if self._mode != self._switches():
            self._mode, self._sealed = self._switches(), len(self.text)
        self._sealed = min(self._sealed, len(self.text))

    def _learn(self, text: str) -> tuple[str, str] | None:
        """Learn the word a text ends in, which was just finished; return it and the word before, if it was learnt."""
        context, sealed = self.keyboard.context(text), self._sealed
        start = len(text) - len(context.typed)
        if not context.typed or start < sealed:
            return None
        if sealed and not text[sealed - 1].isspace():  # the rest of a word that was begun before
            sealed = next((at for at in range(sealed, start) if text[at].isspace()), start)
        previous = previous_word(text[sealed:start]) if sealed else context.previous
        is_learnt = self.keyboard.predictor.personal.learn(context.typed, previous)
        return (context.typed, previous) if is_learnt else None

    def enter(self) -> str:
        """End the line: finish its last word, go to the next line and return the finished one."""
        self.type("\n")
        return self.text.split("\n")[-2]
