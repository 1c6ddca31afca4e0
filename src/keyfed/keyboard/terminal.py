"""The keyboard in a terminal: suggestions that follow every keystroke, for people without a browser.

The text is on one line, the strip on the next: `1 left   2 MIDDLE   3 right`. Alt with 1, 2 or 3 takes one of them, Tab
the middle one; digits alone are text. `→` marks what a blank will correct the word to. Nothing that a vocabulary or a
user holds reaches the terminal as a control character.
"""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from keyfed.keyboard.predict import Slot, Strip
from keyfed.system import raw_terminal

Write = Callable[[str], object]

PROMPT = "> "
CLEAR, BOLD, DIM, PLAIN = "\r\x1b[J", "\x1b[1m", "\x1b[2m", "\x1b[0m"
LEAVE, ENTER, BACKSPACE, TAKE = "\x03\x04", "\r\n", "\x7f\b", "\t"
_PICK = {f"\x1b{n}": chr(0xF0000 + n) for n in (1, 2, 3)}  # Alt with a digit, as one character nobody types
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?", re.DOTALL)  # arrows, function keys, Alt + key


class Line(Protocol):
    """A text that is being written (`keyfed.keyboard.session.Editor`)."""

    @property
    def text(self) -> str: ...
    def strip(self) -> Strip: ...
    def type(self, c: str) -> None: ...
    def backspace(self) -> None: ...
    def pick(self, slot: Slot) -> None: ...
    def enter(self) -> str: ...


class PlainLine:
    """A text with the suggestions of some function of it, nothing corrected and nothing learnt."""

    def __init__(self, suggest: Callable[[str], list[str]]) -> None:
        self.text = ""
        self._suggest = suggest

    def strip(self) -> Strip:
        middle, left, right = [*(Slot(w, w, "next") for w in self._suggest(self.text)[:3]), None, None, None][:3]
        return Strip((left, middle, right))

    def type(self, c: str) -> None:
        self.text += c

    def backspace(self) -> None:
        self.text = self.text[:-1]

    def pick(self, slot: Slot) -> None:
        typed = re.search(r"\S*\Z", self.text)
        self.text = f"{self.text[: typed.start() if typed else None]}{slot.text} "

    def enter(self) -> str:
        self.text += "\n"
        return self.text.split("\n")[-2]


def harmless(text: str) -> str:
    """Return a text as a terminal can be given it: control and direction characters are spelt out.

    Example:
      >>> harmless("a\\x1b[31mb\\u202ec")
      'a\\\\x1b[31mb\\\\u202ec'
    """
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in text)


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and c not in "\u200c\u200d"


def width_of(text: str) -> int:
    """Return how many columns a text takes: two for wide characters, none for marks."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def tail(text: str, columns: int) -> str:
    """Return the end of a text that fits into some columns, with `…` before it where something is cut off."""
    if width_of(text[-columns - 1 :]) <= columns and len(text) <= columns:
        return text
    kept = text[-columns + 1 :]
    while width_of(kept) > columns - 1:
        kept = kept[1:]
    return f"…{kept}"


def strip_line(strip: Strip, columns: int) -> str:
    """Return the suggestions as one line with their numbers, the middle one bold."""
    room = max(4, (columns - 16) // 3)
    parts = []
    for number, slot in enumerate(strip.slots, 1):
        if slot is not None:
            arrow = "→" if number == 2 and strip.correction is not None else ""
            shown = tail(harmless(slot.text), room)
            parts.append(f"{DIM}{number}{PLAIN} {arrow}{BOLD if number == 2 else ''}{shown}{PLAIN}")
    return "   ".join(parts)


def render(line: Line, columns: int) -> str:
    """Return what puts the current line and its strip on the screen, the cursor behind the text."""
    text = tail(harmless(line.text.rsplit("\n", 1)[-1]), columns - len(PROMPT) - 1)
    right = len(PROMPT) + width_of(text)
    return f"{CLEAR}{PROMPT}{text}\r\n{strip_line(line.strip(), columns)}\x1b[1A\r\x1b[{right}C"


def press(line: Line, keys: str) -> Iterator[str]:
    """Apply keys to a line; yield every line that was finished.

    Raises:
      EOFError: Ctrl-C or Ctrl-D was pressed.
    """
    for c in _SEQUENCE.sub(lambda found: _PICK.get(found[0], ""), keys):
        if c in LEAVE:
            raise EOFError
        if c in ENTER:
            yield line.enter()
        elif c in BACKSPACE:
            line.backspace()
        elif c in TAKE or c in _PICK.values():
            slot = line.strip().slots[1 if c in TAKE else ord(c) - 0xF0001]
            if slot is not None:
                line.pick(slot)
        elif not _is_control(c):
            line.type(c)


def converse(line: Line, chunks: Iterable[bytes], write: Write, columns: Callable[[], int]) -> None:
    """Show a line and its strip after every chunk of keys until the input ends or the user leaves.

    Keys that came while a strip was being made are taken together: fast typing skips strips, it does not wait for them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    write(render(line, columns()))
    for chunk in chunks:
        try:
            for finished in press(line, decoder.decode(chunk)):
                write(f"{CLEAR}{PROMPT}{harmless(finished)}\r\n")
        except EOFError:
            break
        write(render(line, columns()))
    write(CLEAR)


def run_terminal(line: Line, fd: int, write: Write) -> None:
    """Converse on a real terminal: raw while it lasts, as it was afterwards."""

    def columns() -> int:
        try:
            return max(20, os.get_terminal_size(fd).columns or 80)  # a terminal may not know its size
        except OSError:
            return 80

    with raw_terminal(fd):
        converse(line, iter(lambda: os.read(fd, 1 << 16), b""), write, columns)


def suggestions_of(strip: Strip) -> list[str]:
    """Return the texts of a strip, best first."""
    left, middle, right = strip.slots
    return [slot.text for slot in (middle, left, right) if slot is not None]
