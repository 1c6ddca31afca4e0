"""A line of text under a person's fingers: keys, backspace, picked suggestions, corrections and their undoing."""

from __future__ import annotations

from keyfed.keyboard.casing import Written, pick, put
from keyfed.keyboard.context import belongs
from keyfed.keyboard.predict import Slot, Strip
from keyfed.keyboard.session import Keyboard


class Editor:
    """Text left of the cursor, with what a keyboard does to it.

    A separator finishes the typed word: it is corrected where the strip says so, and learnt. A backspace right after a
    correction brings back what was typed, and learns it at once.

    Attributes:
      keyboard: gives the suggestions.
    """

    def __init__(self, keyboard: Keyboard) -> None:
        self.keyboard = keyboard
        self._written = Written("")
        self._undo: tuple[str, str, str] | None = None  # text after the correction, text as typed, the typed word

    @property
    def text(self) -> str:
        """What was written."""
        return self._written.text

    def strip(self) -> Strip:
        """Return the suggestions for where the cursor is."""
        return self.keyboard.suggest(self.text)

    def type(self, c: str) -> None:
        """Type one character."""
        k = self.keyboard.predictor.k
        typed = self.keyboard.context(self.text).typed
        undo = None
        if typed and not (belongs(c) or (c in k.joints and c != ".")):
            undo = self._finish(typed, c)
        self._written = put(self._written, c, k)
        self._undo = undo

    def _finish(self, typed: str, separator: str) -> tuple[str, str, str] | None:
        """Correct and learn the typed word; return how to undo it."""
        correction = self.strip().correction
        if correction is None:
            self.keyboard.learn(self.text)
            return None
        before = self.text
        after = before[: len(before) - len(typed)] + correction
        self._written = Written(after)
        self.keyboard.learn(after)
        return after + separator, before + separator, typed

    def backspace(self) -> None:
        """Take back the last character, or the correction just made."""
        if self._undo is not None and self._undo[0] == self.text:
            after, before, typed = self._undo
            corrected = self.keyboard.context(after[:-1])
            self._written = Written(before)
            self.keyboard.predictor.personal.unlearn(corrected.typed, corrected.previous)
            self.keyboard.predictor.personal.keep(typed)
        else:
            self._written = Written(self.text[:-1])
        self._undo = None

    def pick(self, slot: Slot) -> None:
        """Take a suggestion: it replaces the typed word, is learnt, and a blank follows."""
        typed = self.keyboard.context(self.text).typed
        if slot.kind == "emoji" and typed:
            typed = ""
            self._written = Written(f"{self.text} ")
        self._written = pick(self.text, typed, slot.text)
        if slot.kind != "emoji":
            self.keyboard.learn(self.text[:-1])
        self._undo = None

    def enter(self) -> str:
        """End the line: finish its last word, go to the next line and return the finished one."""
        self.type("\n")
        return self.text.split("\n")[-2]
