"""A pass over text that reads every line once: numbers on disk, from which everything else is made.

A part is a folder of flat files. Chunks are what stands between blanks (or characters); they are numbered as they
first appear, and number 0 is the end of a line. Nothing written here depends on a vocabulary, clients or a seed:

    chunks.i32     all lines, one after the other, each with its end
    lengths.i32    chunks of each line, its end included
    sizes.i32      what dealing out counts of each line (`keyfed.text.dealing`)
    text.utf8      all lines, each followed by a line feed (tables only)
    bytes.i32      bytes of each line in it, the line feed included
    authors.i32    of each entry (row of a table), numbered as they first appear
    lines.i32      of each entry
    moments.f64    of each entry, where all have a time
    about.json     chunks and authors by number, rows left out, what is wrong with the times

Memory holds the names and the different chunks, never the text.
"""

from __future__ import annotations

import gc
import json
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.text.corpus import split_lines
from keyfed.text.partition import line_sizes
from keyfed.text.records import Refused, Span, moment, stream_records

# What stands for the end of a line while lines are cut together: something that no text has. Rows with a NUL are
# refused, so that tables have none; other text may, but no half of a character (dearer: it makes the strings wide).
NUL, HALF = "\0", "\ud800"
CHUNKS, TEXT = "chunks.i32", "text.utf8"
TOGETHER = 1 << 13  # lines that are cut at once

Entry = tuple[str, list[str], str | None]  # author, lines, time
Kind = Literal["word", "char"]


@dataclass(frozen=True, slots=True)
class About:
    """What a part says in `about.json`.

    Attributes:
      chunks: the spelling of each number; that of 0 has no meaning.
      late: why the entries cannot be ordered by time, None if they can.
      timed: whether any entry has a time.
    """

    chunks: list[str]
    authors: list[str]
    refused: list[Refused]
    late: str | None
    timed: bool


class Numbered(dict[str, int]):
    """Number strings as they first appear.

    Example:
      >>> numbers = Numbered()
      >>> [numbers[word] for word in ("b", "a", "b")]
      [0, 1, 0]
    """

    def __missing__(self, key: str) -> int:
        number = self[key] = len(self)
        return number


class Cutter:
    """Cut lines into chunks and number them.

    Example:
      >>> cutter = Cutter("word", characters=False)
      >>> [part.tolist() for part in cutter.cut(["a b", "", "b"])]
      [[1, 2, 0, 0, 2, 0], [3, 1, 2], [3, 1, 2]]
      >>> [part.tolist() for part in Cutter("char", characters=False).cut(["ab", "b"])]
      [[1, 2, 0, 2, 0], [3, 2], [2, 2]]
    """

    def __init__(self, kind: Kind, *, characters: bool, end: str = HALF) -> None:
        self._kind = kind
        self._end = end
        self._characters = characters  # whether sizes are characters
        self._numbers = Numbered({end: 0})
        self._letters = np.full(0x110000 if kind == "char" else 0, -1, np.int32)  # number of each code point

    def cut(self, lines: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the chunks of the lines with their ends, and the chunks and the size of each line."""
        numbers = self._words(lines) if self._kind == "word" else self._characters_of(lines)
        ends = np.flatnonzero(numbers == 0)
        if len(ends) != len(lines):
            raise DataError("a line holds half a character (a lone surrogate); expected UTF-8 text")
        lengths = np.diff(ends, prepend=-1).astype(np.int32)
        alike = (self._kind == "char") == self._characters
        return numbers, lengths, lengths if alike else line_sizes(lines, self._characters).astype(np.int32)

    def _words(self, lines: list[str]) -> NDArray[np.int32]:
        chunks = f" {self._end} ".join([*lines, ""]).split()
        return np.fromiter(map(self._numbers.__getitem__, chunks), np.int32, len(chunks))

    def _characters_of(self, lines: list[str]) -> NDArray[np.int32]:
        text = "\n".join([line.replace("\n", " ") for line in lines] + [""])
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        self._letters[ord("\n")] = 0
        for point in np.unique(points[self._letters[points] < 0]).tolist():
            self._letters[point] = self._numbers[chr(point)]
        return self._letters[points]

    def spelt(self) -> list[str]:
        """Return the chunks by number."""
        return ["", *list(self._numbers)[1:]]


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the cycle collector still: rows make no cycles, and it would walk over all there is time and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rows_of(
    path: Path, refused: dict[str, Refused], span: Span | None = None, **columns: str | None
) -> Iterator[Entry]:
    """Yield the rows of a table as entries."""
    for author, text, time in stream_records(path, refused, span=span, **columns):
        if lines := split_lines(text):
            yield author, lines, time


def write_part(
    folder: Path, entries: Iterable[Entry], kind: Kind, *, characters: bool, table: bool, refused: dict[str, Refused]
) -> None:
    """Write a part into a new folder.

    Args:
      kind: whether chunks are words or characters.
      characters: whether the sizes of lines are counted in characters.
      table: whether the entries are rows of one; then the text itself is kept, for a fingerprint.
      refused: what `entries` leaves out while it is read.
    """
    folder.mkdir(parents=True)
    cutter = Cutter(kind, characters=characters, end=NUL if table else HALF)
    authors, counts, moments = array("i"), array("i"), array("d")
    names, late, timed = Numbered(), None, False
    waiting: list[str] = []
    names_of = (CHUNKS, "lengths.i32", "sizes.i32", TEXT, "bytes.i32")
    files = [(folder / name).open("wb") for name in names_of]

    def flush() -> None:
        parts: list[Any] = list(cutter.cut(waiting))
        if table:
            written = "\n".join([*waiting, ""]).encode()
            ends = np.flatnonzero(np.frombuffer(written, np.uint8) == ord("\n"))
            parts += [written, np.diff(ends, prepend=-1).astype(np.int32)]
        for file, part in zip(files, parts, strict=False):
            file.write(part)
        waiting.clear()

    try:
        for author, lines, time in entries:
            authors.append(names[author])
            counts.append(len(lines))
            waiting += lines
            timed = timed or time is not None
            if late is None:
                try:
                    moments.append(moment(time))
                except ValueError as error:
                    late = str(error)
            if len(waiting) >= TOGETHER:
                flush()
        flush()
    finally:
        for file in files:
            file.close()
    for name, numbers in (("authors.i32", authors), ("lines.i32", counts), ("moments.f64", moments)):
        (folder / name).write_bytes(numbers.tobytes())
    rows = [asdict(row) for row in refused.values()]
    about = {"chunks": cutter.spelt(), "authors": list(names), "refused": rows, "late": late, "timed": timed}
    (folder / "about.json").write_text(json.dumps(about), "utf-8")


@no_collection()
def read_span(path: Path, span: Span, folder: Path, kind: Kind, columns: dict[str, str | None]) -> None:
    """Write a part from a piece of a table."""
    refused: dict[str, Refused] = {}
    entries = rows_of(path, refused, span, **columns)
    write_part(folder, entries, kind, characters=False, table=True, refused=refused)


def read_about(folder: Path) -> About:
    """Read what a part says about itself."""
    found = json.loads((folder / "about.json").read_text("utf-8"))
    return About(**{**found, "refused": [Refused(**r) for r in found["refused"]]})


if __name__ == "__main__":  # one of several processes that read a table
    asked = json.loads(sys.argv[1])
    read_span(Path(asked[0]), Span(*asked[1]), Path(asked[2]), asked[3], asked[4])
