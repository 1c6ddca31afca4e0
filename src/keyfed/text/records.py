"""Rows of author and text out of a .jsonl, .csv or .tsv file, packed with gzip or not.

A row that cannot be used is never an exception: it is counted under its reason, with the first line where
that happened. A .csv follows the rules of spreadsheets (quotes, line ends inside quotes); a .tsv has no
quoting at all, for chat text is full of lone quotation marks.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, cast

AUTHOR_COLUMNS = ("author", "user", "user_id", "speaker", "name", "nick", "client", "owner")
TEXT_COLUMNS = ("text", "body", "content", "message", "review", "comment", "utterance")
TIME_COLUMNS = ("timestamp", "created_utc", "date", "time")
UNREADABLE = (OSError, EOFError, zlib.error)  # a damaged .gz raises any of the three

_Columns = tuple[str, str, str | None]  # author, text, time


@dataclass(frozen=True, slots=True)
class Record:
    """One row: who wrote what, and when (a number or an ISO date; None: unknown)."""

    author: str
    text: str
    time: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """How many rows were left out for one reason, and the line of the first."""

    why: str
    rows: int
    line: int


def suffix_of(path: Path) -> str:
    """Return the extension in lower case, that of the packed file for a .gz.

    Example:
      >>> suffix_of(Path("Chat.CSV.gz")), suffix_of(Path("notes"))
      ('.csv', '')
    """
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file, packed or not. Bytes that are not UTF-8 become lone surrogates."""
    opener = gzip.open if path.suffix == ".gz" else open
    file = opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    return cast(TextIO, file)


def read_records(
    path: Path, *, author_column: str | None = None, text_column: str | None = None
) -> tuple[list[Record], list[Refused]]:
    """Read the usable rows in file order, and say what was left out.

    Args:
      path: A .jsonl, .csv or .tsv file, or one of them with .gz.
      author_column: Column (JSON field) of the author; found by itself among `AUTHOR_COLUMNS`.
      text_column: Column (JSON field) of the text; found by itself among `TEXT_COLUMNS`.
    """
    records: list[Record] = []
    refused: dict[str, Refused] = {}
    columns: _Columns | None = None
    for number, row in _rows(path):
        if columns is None and not isinstance(row, str):
            columns = _columns(row, author_column, text_column)
        result = row if isinstance(row, str) else _record(row, columns)
        if isinstance(result, Record):
            records.append(result)
        else:
            before = refused.get(result, Refused(result, 0, number))
            refused[result] = Refused(result, before.rows + 1, before.line)
    return records, list(refused.values())


def by_time(records: Sequence[Record]) -> list[Record]:
    """Sort records by time, those of the same time as they come.

    Raises:
      ValueError: A time is missing, or is neither a number nor an ISO date; the message says which.

    Example:
      >>> [r.text for r in by_time([Record("a", "later", "2011-02-01"), Record("b", "sooner", "2011-01-31")])]
      ['sooner', 'later']
    """
    times = [_moment(record.time) for record in records]
    return [records[i] for i in sorted(range(len(records)), key=times.__getitem__)]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yield (line number, the row or why there is none)."""
    number = 0
    try:
        if suffix_of(path) == ".jsonl":
            with open_text(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, _json_row(line)
        else:
            csv.field_size_limit(2**31 - 1)
            with open_text(path, newline="") as file:
                table = _table(file, quoted=suffix_of(path) == ".csv")
                for fields in table:
                    number = table.line_num
                    yield number, "more fields than the header" if None in fields else fields
    except (*UNREADABLE, csv.Error) as error:
        yield number + 1, f"unreadable from here on ({error})"


def _table(file: TextIO, quoted: bool) -> csv.DictReader[str]:
    if quoted:
        return csv.DictReader(file)
    return csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _json_row(line: str) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line)
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


def _record(row: Mapping[str, Any], columns: _Columns | None) -> Record | str:
    """Return the record of a row, or why it has none."""
    if columns is None:
        got = ", ".join(list(row)[:8])
        return f"no author and text columns among {got} (name them with author_column and text_column)"
    author, text, time = (row.get(name) if name else None for name in columns)
    if isinstance(author, bool) or not isinstance(author, str | int) or not str(author).strip():
        return "missing author"
    if not isinstance(text, str):
        return "missing text"
    if not text.strip():
        return "empty text"
    if "\0" in text:
        return "binary (it has a NUL byte)"
    if is_broken(text) or is_broken(str(author)):
        return "not UTF-8"
    return Record(str(author).strip(), text, None if time is None else str(time))


def is_broken(text: str) -> bool:
    """Tell whether the text has a lone surrogate: bytes that were not UTF-8, or a broken JSON escape."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


@lru_cache(maxsize=1024)  # neighbours often share their time
def _moment(time: str | None) -> float:
    if time is None:
        raise ValueError("a row without a time")
    try:
        moment = float(time)
    except ValueError:
        try:
            date = datetime.fromisoformat(time.strip())
        except ValueError:
            raise ValueError(f"{time!r} is neither a number nor an ISO date") from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(moment):
        raise ValueError(f"{time!r} is not a time")
    return moment
