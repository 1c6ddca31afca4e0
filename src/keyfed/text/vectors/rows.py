"""What is gathered from a file of word vectors: the rows of our words, and a count of all that was wrong.

A word is looked for as it is; where the file does not have it, in lower case. A special (`<unk>`, …) is looked
for under the names that such files give it. Only the rows looked for are kept, whatever the file's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.text.vocab import SPECIALS

Problem = Literal["duplicates", "broken", "wrong_dimension", "not_finite", "undecodable"]
Progress = Callable[[int, int], None]  # bytes read, bytes in all
Matrix = NDArray[np.float32]

PROBLEMS: dict[Problem, str] = {
    "duplicates": "duplicate of one of our words (the first was taken)",
    "broken": "broken",
    "wrong_dimension": "of the wrong dimension",
    "not_finite": "with NaN or an infinite number",
    "undecodable": "with a word that is not UTF-8",
}
WIDEST = 1 << 16  # numbers a word: beyond it a file is not what it seems

# A special has a vector only where the file's makers trained one, under one of these names.
_NAMES_OF_SPECIALS = {
    "<pad>": ("<pad>", "[PAD]"),
    "<bos>": ("<bos>", "<s>"),
    "<eos>": ("<eos>", "</s>"),
    "<unk>": ("<unk>", "[UNK]", "<UNK>", "unk"),
}


class Source(NamedTuple):
    """Where vectors came from: the file's or folder's name, and how it was read."""

    name: str
    format: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was read, what was found, what was wrong.

    The numbers of a line are read only where its word is ours, so `broken` and `not_finite` (and `duplicates`)
    count lines of our words; the dimension and the encoding are checked on every line.

    Attributes:
      lines: Lines (text), words (binary, arrays) or rows (token embedding) of the file.
      matched: Words with a vector, specials among them.
      exact: … found as they are.
      lowered: … found in lower case only.
      specials: … that are specials.
      examples: The first of each problem, in words.
    """

    lines: int
    matched: int
    exact: int
    lowered: int
    specials: int
    duplicates: int
    broken: int
    wrong_dimension: int
    not_finite: int
    undecodable: int
    examples: dict[Problem, str]

    def problems(self) -> list[str]:
        """Return one line for each kind of problem that occurred."""
        counts: dict[Problem, int] = {problem: getattr(self, problem) for problem in PROBLEMS}
        return [f"{n:,} {PROBLEMS[p]}; the first: {self.examples[p]}" for p, n in counts.items() if n]


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Word vectors for a list of words.

    Attributes:
      matrix: float32 [words, dim]; rows of words without a vector are zero.
      matched: bool [words].
      dim: Numbers a word, as in the file.
    """

    matrix: Matrix
    matched: NDArray[np.bool_]
    dim: int
    source: Source
    report: Report


def names_of(word: str) -> tuple[str, ...]:
    """Return the names to look for, the best first.

    Example:
      >>> names_of("Paris"), names_of("the"), names_of("<eos>")
      (('Paris', 'paris'), ('the',), ('<eos>', '</s>'))
    """
    if word in _NAMES_OF_SPECIALS:
        return _NAMES_OF_SPECIALS[word]
    return tuple(dict.fromkeys((word, word.lower())))


class Gathering:
    """Rows as they are found; made into `Vectors` at the end.

    Attributes:
      slots: The place of every name looked for, by its UTF-8 bytes.
      whole: Names of specials: they are never cut into pieces.
      lines: How many lines were read so far.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._names = [[_utf8(name) for name in names_of(word)] for word in words]
        unique = dict.fromkeys(name for names in self._names for name in names)
        self.slots: dict[bytes, int] = {name: k for k, name in enumerate(unique)}
        self.whole = frozenset(name for word in words if word in SPECIALS for name in names_of(word))
        self._found = np.zeros(len(unique), np.bool_)
        self._rows: Matrix = np.zeros((0, 0), np.float32)
        self._counts: dict[Problem, int] = dict.fromkeys(PROBLEMS, 0)
        self._examples: dict[Problem, str] = {}
        self.lines = 0

    def begin(self, dim: int) -> None:
        """Make room, once the file's dimension is known."""
        self._rows = np.zeros((len(self.slots), dim), np.float32)

    def note(self, problem: Problem, example: str) -> None:
        """Count a problem and keep its first example."""
        self._counts[problem] += 1
        self._examples.setdefault(problem, example)

    def keep(self, slot: int, values: NDArray[np.floating], where: str) -> None:
        """Keep a row of our words, unless an earlier one was kept or it is not finite."""
        if self._found[slot]:
            self.note("duplicates", where)
            return
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is noted below
            row = values.astype(np.float32, copy=False)
        if not np.isfinite(row).all():
            self.note("not_finite", where)
            return
        self._rows[slot], self._found[slot] = row, True

    def finish(self, source: Source) -> Vectors:
        """Give every word the row of its first name that was found.

        Raises:
          DataError: No word but the specials has a vector.
        """
        dim = self._rows.shape[1]
        matrix, matched = np.zeros((len(self._words), dim), np.float32), np.zeros(len(self._words), np.bool_)
        counts = {"exact": 0, "lowered": 0, "specials": 0}
        for k, (word, names) in enumerate(zip(self._words, self._names, strict=True)):
            slot = next((s for s in map(self.slots.__getitem__, names) if self._found[s]), None)
            if slot is None:
                continue
            matrix[k], matched[k] = self._rows[slot], True
            counts["specials" if word in SPECIALS else "exact" if slot == self.slots[names[0]] else "lowered"] += 1
        report = Report(
            lines=self.lines, matched=int(matched.sum()), **counts, **self._counts, examples=self._examples
        )  # fmt: skip
        if counts["exact"] + counts["lowered"] == 0:
            wrong = "".join(f"; {line}" for line in report.problems())
            raise DataError(
                f"{source.name} ({source.format}): none of our {len(self._words):,} words has a usable vector "
                f"among {self.lines:,} lines{wrong}; expected vectors of the corpus' language"
            )
        return Vectors(matrix, matched, dim, source, report)


def _utf8(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def listed(names: Iterable[str]) -> str:
    """Return the first names of what a file holds, in one line.

    Example:
      >>> listed(["a", "b\\n"]), listed([])
      ("a, 'b\\\\n'", 'nothing')
    """
    return ", ".join(name if name.isprintable() else repr(name) for name in islice(names, 5)) or "nothing"


def shown(word: bytes, most: int = 40) -> str:
    """Return a word of a file as it can be printed in one line.

    Example:
      >>> shown(b"caf\\xe9"), shown("café".encode())
      ("b'caf\\\\xe9'", "'café'")
    """
    try:
        return repr(word[:most].decode()) if len(word) <= most else f"{word[:most]!r}…"
    except UnicodeDecodeError:
        return repr(word[:most])
