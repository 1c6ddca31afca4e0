"""What is gathered from a file of word vectors, and the files that hold one word after the other.

    the 0.418 0.24968 …                  GloVe: a word and its numbers, one word a line
    400000 300⏎the 0.418 0.24968 …       FastText, word2vec text: the same after a line "words dimension"
    3000000 300⏎the ….…,                 word2vec binary: the header line, then word, blank, float32 numbers
    {"dimensions": 100, …, "vectors": {"the": [-0.038194, …], …}, …}    winkNLP's JSON, all in one line

Any of them may lie in a .gz or, alone, in a .zip. What a file is, is recognised by its content. A row of the JSON may
go on after its `dimensions` numbers (winkNLP puts the vector's length and the word's number there).

A word is looked for as it is; where the file does not have it, in lower case. A special (`<unk>`, …) is looked for
under the names that such files give it. Only the rows looked for are kept, whatever the file's size.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Literal, NamedTuple

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


class VectorSource(NamedTuple):
    """Where vectors came from: the file's or folder's name, and how it was read."""

    name: str
    format: str


@dataclass(frozen=True, slots=True)
class VectorReport:
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
    source: VectorSource
    report: VectorReport


def names_of(word: str) -> tuple[str, ...]:
    """Return the names to look for, the best first.

    Example:
      >>> names_of("Paris"), names_of("the"), names_of("<eos>")
      (('Paris', 'paris'), ('the',), ('<eos>', '</s>'))
    """
    if word in _NAMES_OF_SPECIALS:
        return _NAMES_OF_SPECIALS[word]
    return tuple(dict.fromkeys((word, word.lower())))


class VectorRows:
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

    def finish(self, source: VectorSource) -> Vectors:
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
        report = VectorReport(
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


_DIMENSIONS = re.compile(rb'\A\s*\{\s*"(?:[^\n]*?")?dimensions"\s*:\s*(\d{1,9})\b')
_VECTORS = re.compile(rb'"vectors"\s*:\s*\{')
_ROW = re.compile(rb'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*\[([^\[\]]*)\]')
_END = re.compile(rb"\s*\}")


def json_dim(head: bytes) -> int | None:
    """Return the dimension that the beginning of a file of this kind names; None for any other file.

    Example:
      >>> json_dim(b'{"precision":8,"dimensions":100,"words":["the"'), json_dim(b"{ 0.5 0.25\\n}")
      (100, None)
    """
    found = _DIMENSIONS.match(head)
    return int(found[1]) if found else None


def read_json(stream: IO[bytes], dim: int, gathering: VectorRows, tick: Callable[[], None]) -> None:
    """Gather our words' rows; where a row cannot be separated from the next, the rest is left out and reported."""
    buffer, at, inside = b"", 0, False
    while True:
        found = _ROW.match(buffer, at) if inside else _VECTORS.search(buffer)
        if found:
            at = found.end()
            if inside:
                gathering.lines += 1
                _keep(gathering, found[1], found[2], dim)
            inside = True
            continue
        if inside and _END.match(buffer, at):
            return
        # What is left may be the beginning of a row; before the rows, only that of their name.
        left = buffer[at:] if inside else buffer[-64:]
        more = stream.read(_CHUNK) if len(left) < _LONGEST else b""
        if not more:
            gathering.note("broken", f"the file ends or is damaged after row {gathering.lines:,}")
            return
        buffer, at = left + more, 0
        tick()


def _keep(gathering: VectorRows, key: bytes, numbers: bytes, dim: int) -> None:
    where = f"row {gathering.lines}: {shown(key)}"
    try:
        word = key if key.isascii() and b"\\" not in key else json.loads(b'"%b"' % key).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        gathering.note("undecodable", where)
        return
    except ValueError as error:
        gathering.note("broken", f"{where}: {error}")
        return
    have = numbers.count(b",") + 1 if numbers.strip() else 0
    if have < dim:
        gathering.note("wrong_dimension", f"{where}: {have} numbers, expected {dim}")
        return
    slot = gathering.slots.get(word)
    if slot is not None:
        _keep_fields(gathering, slot, numbers.split(b",")[:dim], where)


GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
_BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 18  # bytes in which the layout is recognised: 60 lines of 300 numbers
_LONGEST = 1 << 20  # bytes of a line, or of a row of JSON
_CHUNK = 1 << 20
_OFTEN = 1 << 13  # words between two reports of progress


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """How a file is written: `count` is what its header says, None without one."""

    kind: Literal["text", "binary", "json"]
    dim: int
    count: int | None

    @property
    def name(self) -> str:
        """Return the format in words."""
        if self.kind != "text":
            return "word2vec binary" if self.kind == "binary" else "JSON"
        return "GloVe text" if self.count is None else "word2vec text"


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, a .gz or the only file of a .zip; yield its bytes, and how many bytes of `path` were read.

    Raises:
      DataError: Unreadable, damaged, or a .zip with more or less than one file.
    """
    try:
        with path.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            if magic[:2] == GZIP:
                with gzip.GzipFile(fileobj=raw) as packed:
                    yield io.BufferedReader(packed, _CHUNK), raw.tell
            elif magic == ZIP:
                with zipfile.ZipFile(raw) as archive, archive.open(_only_member(path, archive)) as packed_member:
                    yield io.BufferedReader(packed_member, _CHUNK), raw.tell  # type: ignore[type-var]
            else:
                yield raw, raw.tell
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged ({error}); fetch it again") from error
    except (RuntimeError, NotImplementedError) as error:  # a password, or a method Python does not know
        raise DataError(f"{path}: cannot be unpacked ({error}); unpack it yourself") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _only_member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    members = [m for m in archive.infolist() if not m.filename.endswith("/") and not m.filename.startswith("__MACOSX/")]
    if len(members) != 1:
        names = listed(member.filename for member in members)
        raise DataError(f"{path}: holds {len(members)} files ({names}), expected one; unpack the one you want")
    return members[0]


def layout_of(path: Path) -> VectorLayout:
    """Recognise the layout from the first lines.

    Without a header the dimension is what most of the first lines have, so that one bad line does not decide.

    Raises:
      DataError: Empty, UTF-16, or nothing that looks like words and numbers.
    """
    with unpacked(path) as (stream, _):
        head = stream.read(_HEAD)
    if not head.strip():
        raise DataError(f"{path}: empty; expected word vectors")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: UTF-16; expected UTF-8: iconv -f utf-16 -t utf-8")
    json_width = json_dim(head)
    if json_width is not None:
        _check_width(path, json_width)
        return VectorLayout("json", json_width, None)
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(head) == _HEAD and len(lines) > 1:
        lines.pop()  # cut off
    header = _header(lines[0])
    body = lines if header is None else lines[1:]
    widths = Counter(width for width in map(_width, body) if width)
    if header is not None:
        count, dim = header
        _check_width(path, dim)
        # Numbers in float32 hold bytes that no text has; a text whose first lines are bad has none of them.
        if dim not in widths and any(byte < 9 for byte in head):
            return VectorLayout("binary", dim, count)
        return VectorLayout("text", dim, count)
    if not widths:
        raise DataError(
            f"{path}: no vectors: expected a word and its numbers on each line (GloVe, FastText), word2vec binary, "
            "safetensors, npz, or a folder with a transformer's model.safetensors and tokenizer"
        )
    dim = max(widths, key=lambda width: (widths[width], width))
    _check_width(path, dim)
    return VectorLayout("text", dim, None)


def _check_width(path: Path, dim: int) -> None:
    if not 1 <= dim <= WIDEST:
        raise DataError(f"{path}: {dim:,} numbers a word; expected 1 to {WIDEST:,}")


def _header(line: bytes) -> tuple[int, int] | None:
    fields = line.split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(f.isdigit() for f in fields) else None


def _width(line: bytes) -> int:
    """Return how many numbers end a line after its first field (0: there is something else among them).

    Example:
      >>> _width(b"the 1 -2.5 3e-2 "), _width(b". . . 1 2"), _width(b"\\x00\\x01 a")
      (3, 2, 0)
    """
    numbers = 0
    for field in reversed(line.split()[1:]):
        if not _is_number(field):
            break
        numbers += 1
    return numbers


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def read_file(path: Path, layout: VectorLayout, gathering: VectorRows, progress: Progress | None) -> None:
    """Gather our words' rows from the file, in one pass."""
    total = path.stat().st_size
    gathering.begin(layout.dim)
    with unpacked(path) as (stream, position):

        def tick() -> None:
            if progress is not None:
                progress(min(position(), total), total)

        if layout.kind == "binary":
            _read_binary(stream, layout, gathering, tick)
        elif layout.kind == "json":
            read_json(stream, layout.dim, gathering, tick)
        else:
            _read_text(stream, layout, gathering, tick)
    if progress is not None:
        progress(total, total)


def _read_text(stream: IO[bytes], layout: VectorLayout, gathering: VectorRows, tick: Callable[[], None]) -> None:
    wanted, dim = gathering.slots, layout.dim
    for number, line in enumerate(_lines(stream), 1):
        if number % _OFTEN == 0:
            tick()
        if number == 1:
            line = line.removeprefix(_BOM)
            if layout.count is not None:
                continue
        if len(line) >= _LONGEST:
            gathering.lines += 1
            gathering.note("broken", f"line {number}: {_LONGEST:,} bytes without a line end")
            continue
        line = line.rstrip()
        if not line:
            continue
        gathering.lines += 1
        if b"\t" in line:
            line = line.replace(b"\t", b" ")
        word, _, rest = line.partition(b" ")
        if line.count(b" ") != dim:  # rare: blanks in the word, blanks side by side, or a bad line
            word, rest = _irregular(line, dim)
        slot = wanted.get(word)
        if slot is not None:
            _keep_numbers(gathering, slot, rest, dim, f"line {number}: {shown(word)}")
        elif not word.isascii() and not _is_utf8(word):
            gathering.note("undecodable", f"line {number}: {shown(word)}")
        elif not rest:
            gathering.note("broken", f"line {number}: {shown(line)}")
        elif line.count(b" ") != dim and len(rest.split()) != dim:
            gathering.note("wrong_dimension", f"line {number}: {shown(word)}{_instead(rest, dim)}")


def _irregular(line: bytes, dim: int) -> tuple[bytes, bytes]:
    """Cut a line with too few or too many blanks into its word and the rest.

    A word may hold blanks (". . ." in GloVe 840B). It does where exactly `dim` numbers end the line.

    Example:
      >>> _irregular(b". . . 1 2", 2), _irregular(b"the 1 2 3", 2), _irregular(b"the  1 2", 2)
      ((b'. . .', b'1 2'), (b'the', b'1 2 3'), (b'the', b'1 2'))
    """
    fields = line.split()
    if _width(line) == dim:
        return b" ".join(fields[:-dim]), b" ".join(fields[-dim:])
    return fields[0], b" ".join(fields[1:])


def _keep_numbers(gathering: VectorRows, slot: int, rest: bytes, dim: int, where: str) -> None:
    fields = rest.split()
    if not fields:
        gathering.note("broken", f"{where}: no numbers")
    elif len(fields) != dim:
        gathering.note("wrong_dimension", f"{where}{_instead(rest, dim)}")
    else:
        _keep_fields(gathering, slot, fields, where)


def _keep_fields(gathering: VectorRows, slot: int, fields: Sequence[bytes], where: str) -> None:
    try:
        values: NDArray[np.float64] = np.array([float(field) for field in fields])
    except ValueError as error:
        gathering.note("broken", f"{where}: {error}")
        return
    gathering.keep(slot, values, where)


def _instead(rest: bytes, dim: int) -> str:
    return f": {len(rest.split())} numbers, expected {dim}"


def _is_utf8(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines; one that never ends is cut, and its remainder passed over."""
    while line := stream.readline(_LONGEST):
        yield line
        while len(line) >= _LONGEST and not line.endswith(b"\n"):
            line = stream.readline(_LONGEST)


def _read_binary(stream: IO[bytes], layout: VectorLayout, gathering: VectorRows, tick: Callable[[], None]) -> None:
    size, wanted = 4 * layout.dim, gathering.slots
    stream.readline(_LONGEST)
    buffer, at = b"", 0
    for number in range(1, (layout.count or 0) + 1):
        while (blank := buffer.find(b" ", at)) < 0 or len(buffer) < blank + 1 + size:
            more = b"" if blank < 0 and len(buffer) - at >= _LONGEST else stream.read(_CHUNK)
            if not more:
                where = f"the file ends or is damaged at word {number:,} of {layout.count:,}"
                gathering.note("broken", where)
                return
            buffer, at = buffer[at:] + more, 0
            tick()
        word = buffer[at:blank].lstrip(b"\n")  # some writers end each row with a line end, some do not
        at = blank + 1 + size
        gathering.lines += 1
        slot = wanted.get(word)
        if slot is not None:
            values = np.frombuffer(buffer, "<f4", layout.dim, blank + 1)
            gathering.keep(slot, values, f"word {number}: {shown(word)}")
        elif not word.isascii() and not _is_utf8(word):
            gathering.note("undecodable", f"word {number}: {shown(word)}")
