"""A keyboard without a browser: a source of scores that reads once a word, and the page's decoder that ranks them.

`Decoder` runs the page's engine (`web/decoder/engine.mjs`) in node, over a pipe (`web/node`): what is measured and what
a terminal shows is what the page does. Scores come from here, so any model can be put behind it.

`TypedLine` is a line of text on it: keys, backspace, picked suggestions, corrections and their undoing. `run_terminal`
shows it to people without a browser, with suggestions that follow every keystroke. The text is on one line, the strip
on the next: `1 left   2 MIDDLE   3 right`. Alt with 1, 2 or 3 takes one of them, Tab the middle one; digits alone are
text. `→` marks what a blank will correct the word to. Left, right, Home and End move the cursor. Nothing that a
vocabulary or a user holds reaches the terminal as a control character.
"""

from __future__ import annotations

import base64
import codecs
import json
import math
import os
import re
import subprocess
import unicodedata
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import NetworkState, Reader, reader_of
from keyfed.errors import ConfigError, RunError
from keyfed.keyboard.compact import page_source, unpack
from keyfed.keyboard.dictionary import NO_LISTS, Lists
from keyfed.keyboard.keys import Point
from keyfed.model.ngram import KneserNey
from keyfed.run.folder import Trained
from keyfed.system import node_program, pip_line, raw_terminal
from keyfed.text.batches import line_read
from keyfed.text.vocab import Vocab

Floats = NDArray[np.float64]
Source = Callable[[Sequence[int]], Floats]  # tokens read, EOS first → log-probabilities of the next, [vocabulary]

REMEMBERED = 64  # positions whose scores and states are kept
LAST_SAID = 4000  # bytes of what node said last that are looked at when it has ended
DECODER = Path(__file__).parent / "web" / "node" / "decoder.mjs"
Kind = Literal["word", "literal", "completion", "correction", "emoji", "next"]


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


class NetworkSource:
    """Scores of a trained network; states are kept by position, so that one more word is one step."""

    def __init__(self, reader: Reader, *, lines: bool = False) -> None:
        self._reader = reader
        self._lines = lines  # whether the model learnt from single lines and reads the last one only
        self._seen: OrderedDict[tuple[int, ...], tuple[Floats, NetworkState]] = OrderedDict()
        self.steps = 0  # tokens read so far, for those who measure

    def __call__(self, tokens: Sequence[int]) -> Floats:
        read = tuple(line_read(tokens) if self._lines else tokens)
        known = next((n for n in range(len(read), 0, -1) if read[:n] in self._seen), 0)
        if known < len(read):
            state = self._seen[read[:known]][1] if known else None
            logits, state = self._reader.after(torch.tensor([read[known:]]), state)
            self.steps += len(read) - known
            self._seen[read] = logits[0].double().log_softmax(-1).numpy(), state
        self._seen.move_to_end(read)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return self._seen[read][0]


def ngram_source(model: KneserNey) -> Source:
    """Return the scores of an n-gram model."""
    last: dict[tuple[int, ...], Floats] = {}

    def source(tokens: Sequence[int]) -> Floats:
        context = tuple(tokens[max(0, len(tokens) - model.order + 1) :])
        if context not in last:
            last.clear()
            last[context] = np.log(model.next(np.array(context, np.int64)))
        return last[context]

    return source


def source_of(trained: Trained) -> NetworkSource:
    """Return the scores of a run's model."""
    return NetworkSource(reader_of(trained.spec, trained.params), lines=trained.reads_lines)


class Decoder:
    """The page's engine in a node process, over the scores of any source.

    Attributes:
      version: of node.
      cpu_ms: milliseconds of node's processor that the last answer took.
    """

    def __init__(
        self,
        vocab: Vocab,
        source: Source,
        *,
        forms: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        lists: Lists = NO_LISTS,
    ) -> None:
        """Start node.

        Args:
          forms: how words are usually written, where that is not as in the vocabulary.
          lists: the dictionary of an export, and what it says of the vocabulary.
          settings: those of the page that differ from its own (`SETTINGS` in engine.mjs).

        Raises:
          ConfigError: there is no node.
        """
        program = node_program()
        if program is None:
            raise ConfigError(f"the keyboard's decoder needs node, which is not installed: {pip_line('node')}")
        self._source = source
        self._settings = dict(settings or {})
        # A pipe that is not read would stop node when it is full.
        self._said = TemporaryFile()  # noqa: SIM115 – `close` closes it
        self._node = subprocess.Popen(
            [program, str(DECODER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        self.close = weakref.finalize(self, _end, self._node, self._said)
        self.cpu_ms = 0.0
        words = {key: getattr(vocab, key) for key in ("kind", "words", "lower", "tokenised")}
        words |= {"doubted": list(lists.doubted), "tilt": None if lists.tilt is None else list(lists.tilt)}
        dictionary = base64.b64encode(lists.dictionary).decode()
        self.version = str(self._call("open", vocab=words, forms=dict(forms or {}), dictionary=dictionary)["node"])

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, op: str, **request: Any) -> Any:
        """Return what the engine answers; give it the scores that it asks for meanwhile."""
        self._send({"op": op, **request})
        while True:
            message = self._receive()
            if "ids" not in message:
                break
            logp = np.ascontiguousarray(self._source(message["ids"]), np.float64)
            self._send({"logp": base64.b64encode(logp.tobytes()).decode()})
        if "error" in message:
            raise RunError(f"the keyboard's decoder cannot {op}: {message['error']}")
        self.cpu_ms = message["cpu"]
        return message["answer"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._node.stdin is not None
        with suppress(BrokenPipeError):  # node has ended: `_receive` says so
            self._node.stdin.write(json.dumps(message, allow_nan=False).encode() + b"\n")
            self._node.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._node.stdout is not None
        line = self._node.stdout.readline()
        if not line:
            self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, self._said.tell() - LAST_SAID))
            said = self._said.read().decode("utf-8", "replace").strip().splitlines()
            raise RunError(f"the keyboard's decoder has ended ({said[-1] if said else 'without a word'})")
        return dict(json.loads(line))

    def suggest(self, before: str, taps: Sequence[Point | None] = (), *, corrects: bool = True) -> Strip:
        """Return the suggestions for a text left of the cursor.

        Args:
          taps: where the finger came down for each character of the word being typed, as far as known; what is no
            number is not known.
          corrects: whether a separator would correct here.
        """
        known = [point if point is not None and _is_finite(point) else None for point in taps]
        found = self._call("strip", before=before, taps=known, settings=self._with(corrects))
        left, middle, right = (slot and Slot(**slot) for slot in found["slots"])
        return Strip((left, middle, right), found["correction"])

    def gesture(self, before: str, points: Sequence[Point]) -> list[Slot]:
        """Return the three best words for a swipe that follows a text."""
        known = [point for point in points if _is_finite(point)]
        found = self._call("gesture", before=before, points=known, settings=self._settings)
        return [Slot(**slot) for slot in found]

    def finish(
        self, before: str, *, separator: str | None = None, picked: Slot | None = None, corrects: bool = True
    ) -> str:
        """Return the text after a character was typed behind it, or a suggestion was taken."""
        what = {"separator": separator} if picked is None else {"picked": asdict(picked)}
        return _edited(before, self._call("finish", before=before, settings=self._with(corrects), **what))

    def undo(self, before: str, *, keep: bool = True) -> str | None:
        """Return the text without the correction that was just made in it; None: there is none.

        Args:
          keep: whether the typed word is known from now on.
        """
        edit = self._call("undo", before=before, keep=keep, settings=self._settings)
        return edit and _edited(before, edit)

    def _with(self, corrects: bool) -> dict[str, Any]:
        return self._settings if corrects else {**self._settings, "autocorrect": False}

    def knows(self, words: Sequence[str]) -> list[bool]:
        """Say which words the model can suggest, without what was learnt."""
        return list(self._call("knows", words=list(words)))

    def learn(self, words: Sequence[tuple[str, str]]) -> None:
        """Count words that the user wrote, each with the text of its line before it."""
        self._call("learn", words=list(words))

    def learnt(self) -> dict[str, Any]:
        """Return what was learnt, as the page exports it."""
        return dict(json.loads(self._call("personal", action="exportJSON")))

    def forget_all(self) -> None:
        """Forget all that was learnt."""
        self._call("personal", action="forgetAll")


def _is_finite(point: Point) -> bool:
    return all(map(math.isfinite, point))  # JSON has no other numbers


def _end(node: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """Close the pipe, at which node ends, and wait for it."""
    for pipe in (node.stdin, node.stdout, said):
        if pipe is not None:
            with suppress(OSError):  # it has ended already
                pipe.close()
    try:
        node.wait(5)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


def _edited(before: str, edit: Mapping[str, Any]) -> str:
    """Apply an edit of the engine, which counts in units of UTF-16."""
    kept = before.encode("utf-16-le", "surrogatepass")[: 2 * edit["start"]]
    return kept.decode("utf-16-le", "surrogatepass") + str(edit["text"])


def keyboard_of(
    trained: Trained,
    forms: Mapping[str, str] | None = None,
    lists: Lists = NO_LISTS,
    counts: bytes | None = None,
) -> Decoder:
    """Return a keyboard over a trained run.

    Args:
      forms: how words are usually written, where that is not as in the vocabulary.
      lists: the dictionary of an export, and what it says of the vocabulary.
      counts: the n-grams of an export: the keyboard types on the network mixed with these, as the page does.

    Raises:
      ConfigError: the run's model reads characters, not words, or there is no node.
    """
    if trained.vocab.kind != "word":
        raise ConfigError(f"{trained.folder} holds a model of characters; the keyboard needs one of words")
    source: Source = source_of(trained)
    if counts is not None:
        found = unpack(counts, len(trained.vocab), f"the counts of {trained.folder}")
        source = page_source(source, found, lines=trained.reads_lines)
    return Decoder(trained.vocab, source, forms=forms, lists=lists)


INSIDE_ADDRESS = ".:=&?~+"  # marks that end a word, or stand inside an address
_REST = re.compile(r"(?:['’‐‑-]?\w)+")  # of a word
_WORD_BEFORE = re.compile(r"\w['’‐‑-]?\Z")


def goes_on(c: str) -> bool:
    """Whether a mark before this character ended no word: it was the inside of an address or a number."""
    return c in "/\\_@" or unicodedata.category(c) in ("Ll", "Lo", "Nd", "Nl", "No")


class TypedLine:
    """Text left of the cursor, with what the page's keyboard does to it, and what stands right of it in its line."""

    about = "A blank corrects (→); backspace right after it brings back what was typed."

    def __init__(self, keyboard: Decoder) -> None:
        self.keyboard = keyboard
        self.text = self.right = ""

    def strip(self) -> Strip:
        """Return the suggestions for where the cursor is: inside a word those for all of it."""
        rest = self._rest()
        return self.keyboard.suggest(self.text + rest, corrects=not rest)

    def type(self, c: str) -> None:
        """Type one character. One that ends a word corrects and learns it, one that cuts a word in two does not.

        A letter right behind a mark shows that the mark stands inside an address: its correction is taken back.
        """
        if self.text.endswith(tuple(INSIDE_ADDRESS)) and goes_on(c):
            undone = self.keyboard.undo(self.text, keep=False)
            self.text = self.text if undone is None else undone
        self.text = self.keyboard.finish(self.text, separator=c, corrects=not _REST.match(self.right))

    def backspace(self) -> None:
        """Take back the last character, or the correction just made."""
        undone = self.keyboard.undo(self.text)
        self.text = self.text[:-1] if undone is None else undone

    def pick(self, slot: Slot) -> None:
        """Take a suggestion: it replaces the word around the cursor, is learnt, and a blank follows."""
        rest = self._rest()
        self.right = self.right[len(rest) :].removeprefix(" ")  # a suggestion brings its own blank
        self.text = self.keyboard.finish(self.text + (rest if slot.kind == "emoji" else ""), picked=slot)

    def _rest(self) -> str:
        """Return what the word around the cursor goes on with."""
        found = _REST.match(self.right) if _WORD_BEFORE.search(self.text[-2:]) else None
        return found[0] if found else ""

    def enter(self) -> str:
        """End the line: finish its last word, go to the next line and return the finished one."""
        self.type("\n")
        return self.text.split("\n")[-2]


Write = Callable[[str], object]

PROMPT = "> "
KEYS = "Tab takes the middle word, Alt+1, 2 or 3 one of the three. Ctrl-D leaves."
CLEAR, BOLD, DIM, PLAIN = "\r\x1b[J", "\x1b[1m", "\x1b[2m", "\x1b[0m"
LEAVE, ENTER, BACKSPACE, TAKE = "\x03\x04", "\r\n", "\x7f\b", "\t"
PICK = {chr(0xF0000 + n): n for n in range(3)}  # a key of several characters, as one that no keyboard types → the slot
FAR = 1 << 30
MOVE = {"\U000f0010": -1, "\U000f0011": 1, "\U000f0012": -FAR, "\U000f0013": FAR}  # the same → characters to move by
DELETE = "\U000f0014"
_KEYS = {f"\x1b{n + 1}": c for c, n in PICK.items()} | {"\x1b[3~": DELETE}  # Alt with a digit; Delete
_KEYS |= {f"\x1b{mode}{letter}": c for mode in "[O" for letter, c in zip("DCHF", MOVE, strict=True)}
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?", re.DOTALL)  # arrows, function keys, Alt + key


class PlainLine:
    """A text with the suggestions of some function of it, nothing corrected and nothing learnt."""

    about = "Nothing is corrected."

    def __init__(self, suggest: Callable[[str], list[str]]) -> None:
        self.text = self.right = ""
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
        self.right = self.right.removeprefix(" ")  # a suggestion brings its own blank

    def enter(self) -> str:
        self.text += "\n"
        return self.text.split("\n")[-2]


Line = PlainLine | TypedLine  # a text that is being written


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
    """Return what puts the current line and its strip on the screen, the cursor behind the text left of it."""
    text = tail(harmless(line.text.rsplit("\n", 1)[-1]), columns - len(PROMPT) - 1)
    left = len(PROMPT) + width_of(text)
    rest = harmless(line.right)[: columns - left - 1]
    while width_of(rest) > columns - left - 1:
        rest = rest[:-1]
    return f"{CLEAR}{PROMPT}{text}{rest}\r\n{strip_line(line.strip(), columns)}\x1b[1A\r\x1b[{left}C"


def move(line: Line, by: int) -> None:
    """Move the cursor over the characters of its line, to the left where `by` is negative."""
    start = line.text.rfind("\n") + 1
    whole = line.text[start:] + line.right
    at = start + min(max(0, len(line.text) - start + by), len(whole))
    line.text, line.right = line.text[:start] + whole[: at - start], whole[at - start :]


def press(line: Line, keys: str) -> Iterator[str]:
    """Apply keys to a line; yield every line that was finished.

    Raises:
      EOFError: Ctrl-C or Ctrl-D was pressed.
    """
    for c in _SEQUENCE.sub(lambda found: _KEYS.get(found[0], ""), keys):
        if c in LEAVE:
            raise EOFError
        if c in ENTER:
            move(line, FAR)
            yield line.enter()
        elif c in BACKSPACE:
            line.backspace()
        elif c in TAKE or c in PICK:
            slot = line.strip().slots[PICK.get(c, 1)]
            if slot is not None:
                line.pick(slot)
        elif c in MOVE:
            move(line, MOVE[c])
        elif c == DELETE:
            line.right = line.right[1:]
        elif not _is_control(c):
            line.type(c)


def converse(line: Line, chunks: Iterable[bytes], write: Write, columns: Callable[[], int]) -> None:
    """Say the keys, then show a line and its strip after every chunk of keys until the input ends or the user leaves.

    Keys that came while a strip was being made are taken together: fast typing skips strips, it does not wait for them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    write(f"{DIM}{KEYS}\r\n{line.about}{PLAIN}\r\n")
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
