"""Rows of author and text out of a .jsonl, .csv or .tsv file, packed with gzip or not.

A row that cannot be used is never an exception: it is counted under its reason, with the first line where
that happened. A .csv follows the rules of spreadsheets (quotes, line ends inside quotes); a .tsv has no
quoting at all, for chat text is full of lone quotation marks.

How a .csv is written is read off its beginning (`form_of`): fields by commas, semicolons, tabs or bars, with a first
row of names or without. Columns without names are numbered from 1. Where no row has names, the columns of author and
text are taken where only one reading is possible, and have to be named otherwise.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from keyfed.text.sources import (
    SAMPLE,
    UNREADABLE,
    Bounded,
    File,
    beginning,
    encoding_of,
    open_text,
    suffix_of,
    why_unreadable,
)

AUTHOR_COLUMNS = (
    "author", "user", "user_id", "speaker", "name", "nick", "client", "owner", "sender", "sender_name", "from",
    "username", "user_name", "nickname", "author_name", "display_name",
)  # fmt: skip
TEXT_COLUMNS = (
    "text", "body", "content", "message", "review", "comment", "utterance", "contents", "msg", "post", "comment_text",
    "tweet",
)  # fmt: skip
TIME_COLUMNS = ("timestamp", "created_utc", "date", "time", "timestamp_ms")
NO_AUTHOR = "-"  # as author_column: one person wrote all rows
DELIMITERS = (",", ";", "\t", "|")
LOOKED_AT = 200  # rows from which the form of a table is read off
_DECODE = json.JSONDecoder().raw_decode  # half the time of json.loads, but stops at the first blank
MOST_NAMES = 12  # columns that a message lists
_COMMON = frozenset(
    (
        *AUTHOR_COLUMNS, *TEXT_COLUMNS, *TIME_COLUMNS, "id", "note", "notes", "title", "subject", "label", "category",
        "channel", "room", "group", "type", "url", "link", "lang", "language", "rating", "score", "likes", "entry",
        "description", "summary", "sentence", "line", "words", "who", "day", "to", "reply_to", "attachments",
    )
)  # fmt: skip
_Columns = tuple[str, str, str | None]  # author (or NO_AUTHOR), text, time
_Row = Mapping[str, Any] | str  # a row, or why there is none


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


def read_records(
    file: File, *, author_column: str | None = None, text_column: str | None = None, max_words: int | None = None
) -> tuple[list[Record], list[RefusedRows]]:
    """Read the usable rows in file order, and say what was left out.

    Args:
      file: A .jsonl, .csv or .tsv file, or one of them with .gz.
      author_column: Column (JSON field, or number) of the author; found by itself among `AUTHOR_COLUMNS`.
      text_column: Column (JSON field, or number) of the text; found by itself among `TEXT_COLUMNS`.
      max_words: Words of a text that are read; the rest of it is left out. None for all.
    """
    refused: dict[str, RefusedRows] = {}
    found = stream_records(file, refused, author_column=author_column, text_column=text_column, max_words=max_words)
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
    file: File,
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
    form: Form | None = None
    if suffix_of(file) != ".jsonl":
        form = form_of(file, author_column, text_column)
        columns = form.columns
    elif span is not None and span.start > 0:
        assert isinstance(file, Path)
        earlier = (row for _, row in _rows(file, None, Span(0, span.start)) if not isinstance(row, str))
        columns = next(filter(None, (_columns(row, author_column, text_column) for row in earlier)), None)
    yield from records_of(
        _rows(file, form, span), refused, columns, form,
        author_column=author_column, text_column=text_column, max_words=max_words,
    )  # fmt: skip


def records_of(
    rows: Iterable[tuple[int, _Row]],
    refused: dict[str, RefusedRows],
    columns: _Columns | None = None,
    form: Form | None = None,
    *,
    author_column: str | None = None,
    text_column: str | None = None,
    max_words: int | None = None,
) -> Iterator[Record]:
    """Yield the usable ones of rows that come with their line; the columns are those of the first row that has them."""
    for number, row in rows:
        if columns is None and form is None and not isinstance(row, str):
            columns = _columns(row, author_column, text_column)
        if isinstance(row, str):
            result: Record | str = row
        elif columns is None:
            result = _no_columns(row, author_column, text_column, form)
        else:
            result = _record(row, columns)
        if isinstance(result, Record):
            yield result if max_words is None else result._replace(text=cut_words(result.text, max_words))
        else:
            before = refused.get(result, RefusedRows(result, 0, number))
            refused[result] = RefusedRows(result, before.rows + 1, before.line)


def spans_of(path: Path, pieces: int) -> list[Span]:
    """Cut a .jsonl file at line ends into about equal pieces, fewer where lines are long; other files stay whole."""
    if pieces < 2 or path.suffix.lower() != ".jsonl" or encoding_of(beginning(path), whole=False) != "utf-8-sig":
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


def _rows(file: File, form: Form | None, span: Span | None = None) -> Iterator[tuple[int, _Row]]:
    """Yield (line number, the row or why there is none)."""
    number = 0
    try:
        if form is None:
            with _open_span(file, span) as opened:
                for number, line in enumerate(opened, 1):
                    if not line.isspace():
                        yield number, _json_row(line)
        else:
            csv.field_size_limit(2**31 - 1)
            with open_text(file, newline="") as opened:
                for number, fields in _table_rows(opened, form):
                    yield number, fields
    except (*UNREADABLE, csv.Error) as error:
        yield number + 1, f"unreadable from here on ({why_unreadable(error)})"


def _open_span(path: File, span: Span | None) -> TextIO:
    if span is None or span == (0, None):
        return open_text(path)
    assert isinstance(path, Path)
    file = path.open("rb")
    file.seek(span.start)
    piece = io.BufferedReader(Bounded(file, math.inf if span.end is None else span.end - span.start))
    # A byte-order mark stands at the start of a file, not of a piece.
    encoding = "utf-8" if span.start else "utf-8-sig"
    return io.TextIOWrapper(piece, encoding=encoding, errors="surrogateescape")


# How a table is written


@dataclass(frozen=True, slots=True)
class Form:
    """How a .csv or .tsv is written.

    Attributes:
      header: the first row names the columns; otherwise their names are their numbers, from 1.
      columns: those of author, text and time; None where they are not known.
      names: of all columns.
      before: lines before the first row (`sep=;`, which Excel reads).
      guessed: the columns were found by what is in them.
    """

    delimiter: str
    quoted: bool
    header: bool
    columns: _Columns | None
    names: tuple[str, ...]
    before: int = 0
    guessed: bool = False

    def __str__(self) -> str:
        by = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}.get(self.delimiter, "its own mark")
        if self.columns is None or self.header:
            return f"table by {by}" + ("" if self.header else " without a row of names")
        author, text, _ = self.columns
        who = "one author" if author == NO_AUTHOR else f"author in column {author}"
        seen = ", as what is in them suggests" if self.guessed else ""
        return f"table by {by} without a row of names: {who}, text in column {text}{seen}"


def form_of(file: File, author: str | None = None, text: str | None = None) -> Form:
    """Read off its beginning how a .csv or .tsv is written; of one that cannot be read, what is usual.

    Args:
      author: column of the author, by name or number; `NO_AUTHOR`: one person wrote all. None: to be found.
      text: column of the text, likewise.
    """
    quoted = suffix_of(file) == ".csv"
    known = DELIMITERS if quoted else ("\t",)
    start = beginning(file, SAMPLE)
    sample = start.decode(encoding_of(start, whole=False) or "utf-8-sig", "surrogateescape")
    before = 0
    first = sample[:10].splitlines()[:1]
    if first and len(first[0]) == 5 and first[0].lower().startswith("sep="):
        before, known = 1, (first[0][4],)
        sample = sample.partition("\n")[2]
    tables = {mark: _cut(sample, mark, quoted) for mark in known}
    for mark, rows in tables.items():
        if rows and (columns := _columns(rows[0], author, text)) is not None:
            return Form(mark, quoted, True, columns, tuple(rows[0]), before)
    mark = max(known, key=lambda mark: _evenness(tables[mark]))
    rows = tables[mark]
    if not rows:
        return Form(mark, quoted, True, None, (), before)
    header = _is_header(rows)
    names = tuple(rows[0]) if header else tuple(map(str, range(1, _width(rows) + 1)))
    numbered = dict(zip(map(str, range(1, len(names) + 1)), names, strict=True))
    who, what = numbered.get(author or ""), numbered.get(text or "")
    if author == NO_AUTHOR:
        who, what = NO_AUTHOR, names[0] if text is None and len(names) == 1 else what
    if who is not None and what is not None:
        return Form(mark, quoted, header, (who, what, None), names, before)
    guess = None if header or author or text else _guess(rows, len(names))
    return Form(mark, quoted, header, guess, names, before, guessed=guess is not None)


def _reader(lines: Iterable[str], mark: str, quoted: bool) -> Iterator[list[str]]:
    if quoted:
        return csv.reader(lines, delimiter=mark)
    return csv.reader(lines, delimiter=mark, quoting=csv.QUOTE_NONE)


def _cut(sample: str, mark: str, quoted: bool) -> list[list[str]]:
    """Return the first rows of a table; the last of a sample may be cut short, and is left out of many."""
    try:
        rows = list(islice(_reader(io.StringIO(sample, newline=""), mark, quoted), LOOKED_AT))
    except csv.Error:
        return []
    rows = [row for row in rows if row]
    return rows[:-1] if 2 < len(rows) < LOOKED_AT else rows


def _width(rows: Sequence[Sequence[str]]) -> int:
    return Counter(map(len, rows)).most_common(1)[0][0]


def _evenness(rows: Sequence[Sequence[str]]) -> float:
    """Return the share of rows that have as many fields as most, 0 where that is one."""
    width = _width(rows) if rows else 1
    return 0.0 if width == 1 else sum(len(row) == width for row in rows) / len(rows)


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell names of columns from data: short, different words, none a number, none again in its column."""
    first = rows[0]
    words = all(cell.strip() and len(cell.split()) <= 3 and not cell.strip()[0].isdigit() for cell in first)
    again = any(cell == row[k] for row in rows[1:] for k, cell in enumerate(first) if k < len(row))
    return words and len(set(first)) == len(first) and not again


def _guess(rows: Sequence[Sequence[str]], width: int) -> _Columns | None:
    """Find the column of the text, which has most words, and the only other one that can hold authors."""
    even = [row for row in rows if len(row) == width]
    columns = [[row[k].strip() for row in even] for k in range(width)]
    words = [sum(len(cell.split()) for cell in column) / len(even) for column in columns]
    text = max(range(width), key=words.__getitem__)
    if words[text] < 2 or sum(mean > words[text] / 1.5 for mean in words) > 1:
        return None

    def may_be_authors(k: int) -> bool:
        column, kinds = columns[k], len(set(columns[k]))
        lettered = sum(cell[:1].isalpha() for cell in column) > 0.9 * len(column)
        repeat = width == 2 or len(column) > 3 * kinds or (len(column) >= 4 and kinds <= len(column) // 2)
        return k != text and lettered and repeat and words[k] <= 3 and (kinds > 1 or len(column) == 1)

    found = [k for k in range(width) if may_be_authors(k)]
    return (str(found[0] + 1), str(text + 1), None) if len(found) == 1 else None


class _Quotes:
    """The lines of a table; counts lines and quotation marks."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.marks = file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.marks += line.count('"')
            yield line


def _table_rows(file: TextIO, form: Form) -> Iterator[tuple[int, _Row]]:
    for _ in range(form.before):
        file.readline()
    lines = _Quotes(file)
    names = None if form.header else form.names
    if form.quoted:
        table = csv.DictReader(lines, names, delimiter=form.delimiter)
    else:
        table = csv.DictReader(lines, names, delimiter=form.delimiter, quoting=csv.QUOTE_NONE)
    last: tuple[int, _Row] | None = None
    start = end = 0
    for fields in table:
        if last is not None:
            yield last
        start, end = end, table.line_num
        last = end + form.before, _wide(form) if None in fields else fields
    if last is not None and form.quoted and lines.marks % 2 and end - start > 1:
        last = start + form.before + 1, 'a quotation mark (") that is never closed; what follows it is one field'
    if last is not None:
        yield last


def _wide(form: Form) -> str:
    """Say that a row has too many fields, and what helps."""
    remedy = (
        "a text that holds the mark between fields needs quotation marks" if form.quoted else "no text may hold tabs"
    )
    return f"more fields than the {'header' if form.header else 'other rows'}; {remedy}"


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

    who = NO_AUTHOR if author == NO_AUTHOR else find((author,) if author else AUTHOR_COLUMNS)
    what = find((text,) if text else TEXT_COLUMNS)
    return None if who is None or what is None else (who, what, find(TIME_COLUMNS))


def _no_columns(row: Mapping[str, Any], author: str | None, text: str | None, form: Form | None) -> str:
    """Say which columns are missing, and how to name them. Of those there are only common names are shown: the first
    row of a table without a header is text, and fields of JSON may be people.
    """
    columns = f"{len(row)} column{'s' * (len(row) != 1)}"
    if form is not None and not form.header:
        first = "its first row looks like data, not like names"
        if len(row) == 1:
            return f"{first}; --author-column - reads its one column as one person's text"
        if author == NO_AUTHOR and text is None:
            return f"{first}; say which of the {columns} is the text: --text-column 2"
        return (
            f"{first}; say which of the {columns} are read: --author-column 1 --text-column 2, or --author-column - "
            "--text-column 2 for one person's text"
        )
    spelt = {name.strip().lower() for name in row}
    missing, flags = [], []
    for name, known, flag in ((author, AUTHOR_COLUMNS, "--author-column"), (text, TEXT_COLUMNS, "--text-column")):
        if name != NO_AUTHOR and spelt.isdisjoint((name.lower(),) if name else known):
            missing.append(f'"{name}"' if name else f"{known[0]} (or {known[1]}, …)")
            flags.append(f"{flag} NAME")
    shown = [name.strip() if name.strip().lower() in _COMMON else "…" for name in islice(row, MOST_NAMES)]
    there = f" ({', '.join(shown)}{', …' * (len(row) > MOST_NAMES)})" if set(shown) != {"…"} else ""
    advice = f"name {'it' if len(flags) == 1 else 'them'} with {' '.join(flags)}"
    if flags[:1] == ["--author-column NAME"]:
        advice += ", or --author-column - if one person wrote all"
    return f"its {columns}{there} do{'es' * (len(row) == 1)} not include {' and '.join(missing)}; {advice}"


def _record(row: Mapping[str, Any], columns: _Columns) -> Record | str:
    """Return the record of a row, or why it has none."""
    text, time = row.get(columns[1]), row.get(columns[2]) if columns[2] else None
    author = row.get(columns[0]) if columns[0] != NO_AUTHOR else None
    if columns[0] == NO_AUTHOR:
        author = ""
    elif type(author) not in (str, int) or not (author := str(author).strip()):
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
