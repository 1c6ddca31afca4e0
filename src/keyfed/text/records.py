"""Rows of author and text out of a .jsonl, .csv or .tsv file, packed with gzip or not.

A row that cannot be used is never an exception: it is counted under its reason, with the first line where
that happened. A .csv follows the rules of spreadsheets (quotes, line ends inside quotes); a .tsv has no
quoting at all, for chat text is full of lone quotation marks.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from keyfed.errors import DataError

AUTHOR_COLUMNS = ("author", "user", "user_id", "speaker", "name", "nick", "client", "owner")
TEXT_COLUMNS = ("text", "body", "content", "message", "review", "comment", "utterance")
TIME_COLUMNS = ("timestamp", "created_utc", "date", "time")
UNREADABLE = (OSError, EOFError, zlib.error)  # a damaged .gz raises any of the three

MOST_RATIO = 100  # unpacked to packed; text has 3 to 10, the tables of programs up to 40, a bomb 1,000
LEAST_UNPACKED = 1 << 24  # bytes that any file may unpack to

_DECODE = json.JSONDecoder().raw_decode  # half the time of json.loads, but stops at the first blank
_Columns = tuple[str, str, str | None]  # author, text, time


class Span(NamedTuple):
    """Bytes of a file from `start` to before `end`; None for its end."""

    start: int
    end: int | None


class Record(NamedTuple):
    """One row: who wrote what, and when (a number or an ISO date; None: unknown)."""

    author: str
    text: str
    time: str | None = None


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """How many rows were left out for one reason, and the line of the first."""

    why: str
    rows: int
    line: int


def why_unreadable(error: Exception) -> str:
    """Return what is wrong with a file; never bytes of it, which errors of gzip quote.

    Example:
      >>> why_unreadable(gzip.BadGzipFile("Not a gzipped file (b'my')")), why_unreadable(EOFError("cut"))
      ('no gzip file, or a damaged one', 'cut')
    """
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return "no gzip file, or a damaged one"
    return str(getattr(error, "strerror", None) or error)


def suffix_of(path: Path) -> str:
    """Return the extension in lower case, that of the packed file for a .gz.

    Example:
      >>> suffix_of(Path("Chat.CSV.gz")), suffix_of(Path("notes"))
      ('.csv', '')
    """
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file, packed or not. Bytes that are not UTF-8 become lone surrogates."""
    file = open_bytes(path)
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def open_bytes(path: Path) -> io.BufferedReader:
    """Open a file, packed with gzip or not; what unpacks to far more than text does is a `Bomb` after that much."""
    if path.suffix != ".gz":
        return path.open("rb")
    most = max(LEAST_UNPACKED, MOST_RATIO * path.stat().st_size)
    bomb = Bomb(
        f"{path}: it unpacks to more than {most:,} bytes, {MOST_RATIO} times its size, which text does not; unpack it "
        "yourself if you trust it"
    )
    return io.BufferedReader(_Bounded(gzip.open(path), most, bomb), io.DEFAULT_BUFFER_SIZE * 8)


class Bomb(DataError):
    """A packed file that unpacks to far more than text does."""


class _Bounded(io.RawIOBase):
    """The next `most` bytes of a file. Behind them it ends, or raises `beyond` where the file goes on."""

    def __init__(self, file: gzip.GzipFile | BinaryIO, most: float, beyond: Bomb | None = None) -> None:
        self._file, self._left, self._beyond = file, most, beyond

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(int(min(len(buffer), self._left + (self._beyond is not None))))
        if self._beyond is not None and len(data) > self._left:
            raise self._beyond
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_records(
    path: Path, *, author_column: str | None = None, text_column: str | None = None, max_words: int | None = None
) -> tuple[list[Record], list[RefusedRows]]:
    """Read the usable rows in file order, and say what was left out.

    Args:
      path: A .jsonl, .csv or .tsv file, or one of them with .gz.
      author_column: Column (JSON field) of the author; found by itself among `AUTHOR_COLUMNS`.
      text_column: Column (JSON field) of the text; found by itself among `TEXT_COLUMNS`.
      max_words: Words of a text that are read; the rest of it is left out. None for all.
    """
    refused: dict[str, RefusedRows] = {}
    found = stream_records(path, refused, author_column=author_column, text_column=text_column, max_words=max_words)
    return list(found), list(refused.values())


def cut_words(text: str, most: int | None) -> str:
    r"""Return a text up to its `most`-th word, with the line ends between; None for all of it.

    Example:
      >>> cut_words("one two\nthree four", 3), cut_words("one", 3), cut_words("one two", None)
      ('one two\nthree', 'one', 'one two')
    """
    if most is None:
        return text
    ends = [word.end() for word in islice(re.finditer(r"\S+", text), most)]
    return text[: ends[-1]] if ends else ""


def stream_records(
    path: Path,
    refused: dict[str, RefusedRows],
    *,
    author_column: str | None = None,
    text_column: str | None = None,
    max_words: int | None = None,
    span: Span | None = None,
) -> Iterator[Record]:
    """Yield the usable rows in file order, never holding them together; what was left out is counted in `refused`.

    Args:
      span: a piece of a .jsonl file (`spans_of`); lines are numbered from its start, columns are those of the file.
    """
    columns: _Columns | None = None
    if span is not None and span.start > 0:
        earlier = (row for _, row in _rows(path, Span(0, span.start)) if not isinstance(row, str))
        columns = next(filter(None, (_columns(row, author_column, text_column) for row in earlier)), None)
    for number, row in _rows(path, span):
        if columns is None and not isinstance(row, str):
            columns = _columns(row, author_column, text_column)
        if isinstance(row, str):
            result: Record | str = row
        else:
            result = _no_columns(row, author_column, text_column) if columns is None else _record(row, columns)
        if isinstance(result, Record):
            yield result._replace(text=cut_words(result.text, max_words))
        else:
            before = refused.get(result, RefusedRows(result, 0, number))
            refused[result] = RefusedRows(result, before.rows + 1, before.line)


def spans_of(path: Path, pieces: int) -> list[Span]:
    """Cut a .jsonl file at line ends into about equal pieces, fewer where lines are long; other files stay whole."""
    if pieces < 2 or path.suffix.lower() != ".jsonl":
        return [Span(0, None)]
    size = path.stat().st_size
    cuts = [0]
    with path.open("rb") as file:
        for piece in range(1, pieces):
            file.seek(max(cuts[-1], size * piece // pieces))
            file.readline()
            if cuts[-1] < file.tell() < size:
                cuts.append(file.tell())
    return [Span(start, end) for start, end in zip(cuts, [*cuts[1:], None], strict=True)]


def lines_before(path: Path, span: Span) -> int:
    """Return the number of the line before a piece of a .jsonl file."""
    if span.start == 0:
        return 0
    with _open_span(path, Span(0, span.start)) as file:
        return sum(1 for _ in file)


def by_time(records: Sequence[Record]) -> list[Record]:
    """Sort records by time, those of the same time as they come.

    Raises:
      ValueError: A time is missing, or is neither a number nor an ISO date; the message says which.

    Example:
      >>> [r.text for r in by_time([Record("a", "later", "2011-02-01"), Record("b", "sooner", "2011-01-31")])]
      ['sooner', 'later']
    """
    times = [moment(record.time) for record in records]
    return [records[i] for i in sorted(range(len(records)), key=times.__getitem__)]


def _rows(path: Path, span: Span | None = None) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yield (line number, the row or why there is none)."""
    number = 0
    try:
        if suffix_of(path) == ".jsonl":
            with _open_span(path, span) as file:
                for number, line in enumerate(file, 1):
                    if not line.isspace():
                        yield number, _json_row(line)
        else:
            csv.field_size_limit(2**31 - 1)
            with open_text(path, newline="") as file:
                table = _table(file, quoted=suffix_of(path) == ".csv")
                for fields in table:
                    number = table.line_num
                    yield number, "more fields than the header" if None in fields else fields
    except (*UNREADABLE, csv.Error) as error:
        yield number + 1, f"unreadable from here on ({why_unreadable(error)})"


def _open_span(path: Path, span: Span | None) -> TextIO:
    if span is None or span == (0, None):
        return open_text(path)
    file = path.open("rb")
    file.seek(span.start)
    piece = io.BufferedReader(_Bounded(file, math.inf if span.end is None else span.end - span.start))
    # A byte-order mark stands at the start of a file, not of a piece.
    encoding = "utf-8" if span.start else "utf-8-sig"
    return io.TextIOWrapper(piece, encoding=encoding, errors="surrogateescape")


def _table(file: TextIO, quoted: bool) -> csv.DictReader[str]:
    if quoted:
        return csv.DictReader(file)
    return csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _json_row(line: str) -> Mapping[str, Any] | str:
    try:
        row, end = _DECODE(line)
        if not line[end:].isspace():  # the last line of a file may have no end, and a row may be followed by anything
            row = json.loads(line)
    except (ValueError, RecursionError):
        try:
            row = json.loads(line)  # blanks before the row; or it is broken
        except (ValueError, RecursionError):
            return "broken JSON"
    return row if isinstance(row, dict) else "not a JSON object"


def _columns(row: Iterable[str], author: str | None, text: str | None) -> _Columns | None:
    spelt = {name.strip().lower(): name for name in row}

    def find(known: Sequence[str]) -> str | None:
        return next((spelt[name.lower()] for name in known if name.lower() in spelt), None)

    who = find((author,) if author else AUTHOR_COLUMNS)
    what = find((text,) if text else TEXT_COLUMNS)
    return None if who is None or what is None else (who, what, find(TIME_COLUMNS))


def _no_columns(row: Mapping[str, Any], author: str | None, text: str | None) -> str:
    """Say which columns are missing. What there is is not named: the first row of a table without a header is text."""
    known = [AUTHOR_COLUMNS] * (author is None) + [TEXT_COLUMNS] * (text is None)
    wanted = [f'"{name}"' for name in (author, text) if name] + [f"{names[0]} (or {names[1]}, …)" for names in known]
    advice = "name them with --set data.author_column=NAME --set data.text_column=NAME"
    return f"its {len(row)} columns do not include {' and '.join(wanted)}; {advice}"


def _record(row: Mapping[str, Any], columns: _Columns) -> Record | str:
    """Return the record of a row, or why it has none."""
    author, text, time = row.get(columns[0]), row.get(columns[1]), row.get(columns[2]) if columns[2] else None
    if type(author) not in (str, int) or not (author := str(author).strip()):
        return "missing author"
    if not isinstance(text, str):
        return "missing text"
    if not text.strip():
        return "empty text"
    if "\0" in text:
        return "binary (it has a NUL byte)"
    if is_broken(text) or is_broken(author):
        return "not UTF-8"
    return Record(author, text, None if time is None else str(time))


def is_broken(text: str) -> bool:
    """Tell whether the text has a lone surrogate: bytes that were not UTF-8, or a broken JSON escape."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


@lru_cache(maxsize=1024)  # neighbours often share their time
def moment(time: str | None) -> float:
    """Return the seconds since 1970 of a number or an ISO date, or raise ValueError with what is wrong."""
    if time is None:
        raise ValueError("a row without a time")
    try:
        moment = float(time)
    except ValueError:
        try:
            date = datetime.fromisoformat(time.strip())
        except ValueError:
            raise ValueError("a time is neither a number nor an ISO date") from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(moment):
        raise ValueError("a time is not finite")
    return moment
