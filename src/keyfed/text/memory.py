"""Text that a Python program holds becomes a corpus with a name, which a configuration can carry.

A dictionary of author and texts, pairs (author, text) and a frame with an author and a text column make an author a
client. Lines alone are one pool, to be cut into shards. A `Corpus` (`keyfed.load_corpus`) is itself.

The corpus stays in memory, under a name made from its SHA-256: nothing is written, and the same text has the same name
in the next program. Errors say types and positions, never text. A frame is known by its columns; no library of frames
is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from keyfed.errors import DataError, nearest
from keyfed.text.corpus import Author, Corpus, Skipped, authors_from, split_lines
from keyfed.text.records import AUTHOR_COLUMNS, TEXT_COLUMNS, TIME_COLUMNS, Record, is_broken

PREFIX = "in-memory-"
SHAPES = (
    "expected a name or path, a dictionary of author and texts, pairs (author, text), lines, or a frame with an author "
    "and a text column"
)
_HELD: dict[str, Corpus] = {}


def hold(data: object, author_column: str | None = None, text_column: str | None = None) -> str:
    """Keep a corpus made from a program's data as long as the program runs; return the name that loads it.

    Args:
      author_column: of a frame; found by itself among `records.AUTHOR_COLUMNS`. `text_column` likewise.

    Raises:
      DataError: it is of another shape, or holds no text.

    Example:
      >>> hold({"ann": ["good morning", "see you"]}) == hold([("ann", "good morning"), ("ann", "see you")])
      True
    """
    corpus = corpus_of(data, author_column, text_column)
    name = PREFIX + corpus.fingerprint()[:12]
    _HELD[name] = replace(corpus, name=name)
    return name


def held(name: str) -> Corpus | None:
    """Return the corpus of a name that `hold` made; None for other names.

    Raises:
      DataError: it was made by another program.
    """
    if name.startswith(PREFIX) and name not in _HELD:
        raise DataError(
            f"{name} is text that a Python program held, and it is not here any more; give the same data to "
            "keyfed.configure(data=…) in this program first"
        )
    return _HELD.get(name)


def corpus_of(data: object, author_column: str | None = None, text_column: str | None = None) -> Corpus:
    """Return a program's data as a corpus; see the top of this module.

    Raises:
      DataError: it is of another shape, or holds no text.

    Example:
      >>> [(a.name, a.lines) for a in corpus_of(["good morning", "", "see you"]).authors]
      [('in memory', ('good morning', 'see you'))]
    """
    if isinstance(data, Corpus):
        return data
    if isinstance(data, str | bytes):
        raise DataError(f"data is {type(data).__name__}; {SHAPES}")
    if hasattr(data, "columns"):
        found = _people(_of_frame(data, author_column, text_column))
    elif author_column or text_column:
        raise DataError("author_column and text_column are for frames and tables; leave them out for this data")
    elif isinstance(data, Mapping):
        found = _people(_of_mapping(data))
    elif isinstance(data, Iterable):
        found = _of_items(iter(data))
    else:
        raise DataError(f"data is of type {type(data).__name__}; {SHAPES}")
    if not found.authors:
        why = "; ".join(f"{s.what}: {s.why}" for s in found.skipped[:3]) or "nothing in it"
        raise DataError(f"data holds no usable text ({why}); {SHAPES}")
    return found


Row = tuple[str, Any, Any, Any]  # where it stands, author, text, time


def _of_mapping(data: Mapping[Any, Any]) -> Iterator[Row]:
    for number, (author, texts) in enumerate(data.items()):
        if isinstance(texts, str) or _is_missing(texts):
            yield f"author {number}", author, texts, None
        elif isinstance(texts, Iterable) and not isinstance(texts, bytes):
            for at, text in enumerate(texts):
                yield f"text {at} of author {number}", author, text, None
        else:
            raise DataError(f"author {number} has a {type(texts).__name__}; expected a text or a list of texts")


def _of_frame(frame: Any, author: str | None, text: str | None) -> Iterator[Row]:
    names = [str(name) for name in frame.columns]
    who, what = _column(names, author, AUTHOR_COLUMNS, "author"), _column(names, text, TEXT_COLUMNS, "text")
    when = next((name for name in names if name.lower() in TIME_COLUMNS), None)
    actual = {str(name): name for name in frame.columns}
    times: Iterable[Any] = frame[actual[when]] if when is not None else (None for _ in frame[actual[what]])
    for number, (a, t, moment) in enumerate(zip(frame[actual[who]], frame[actual[what]], times, strict=True)):
        yield f"row {number}", a, t, moment


def _column(names: Sequence[str], wanted: str | None, known: Sequence[str], what: str) -> str:
    """Return the column of authors or texts."""
    key = f"data_{what}_column"
    if wanted is not None:
        if wanted not in names:
            raise DataError(f"the frame has no column {wanted!r}{nearest(wanted, names)}; there are: {_few(names)}")
        return wanted
    for name in known:
        for column in names:
            if column.lower() == name:
                return column
    raise DataError(f"the frame has no {what} column that is known; name it: {key}=…, one of {_few(names)}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:12]) + (", …" if len(names) > 12 else "")


def _of_items(items: Iterator[Any]) -> Corpus:
    """Read lines of one pool, or pairs."""
    first = next(items, None)
    if first is None:
        return Corpus(PREFIX, ())
    if isinstance(first, str):
        return _pool(chain([first], items))
    return _people(_pairs(chain([first], items)))


def _pairs(items: Iterable[Any]) -> Iterator[Row]:
    for number, item in enumerate(items):
        if not isinstance(item, Sequence) or isinstance(item, str | bytes) or len(item) != 2:
            raise DataError(f"item {number} is a {type(item).__name__}; expected pairs (author, text), or lines alone")
        yield f"pair {number}", item[0], item[1], None


def _pool(items: Iterable[Any]) -> Corpus:
    lines: list[str] = []
    broken = 0
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise DataError(f"item {number} is a {type(item).__name__}; expected text like the items before it")
        broken += is_broken(item)
        lines += () if is_broken(item) else split_lines(item)
    authors = (Author("in memory", tuple(lines)),) if lines else ()
    return Corpus(PREFIX, authors, natural=False, skipped=_counted({"not UTF-8": broken}))


def _people(rows: Iterable[Row]) -> Corpus:
    records: list[Record] = []
    left = {"no author": 0, "no text": 0, "not UTF-8": 0}
    for place, author, text, time in rows:
        if _is_missing(author) or not str(author).strip():
            left["no author"] += 1
        elif _is_missing(text):
            left["no text"] += 1
        elif not isinstance(text, str):
            raise DataError(f"{place} has a text of type {type(text).__name__}; expected str")
        elif is_broken(text) or is_broken(str(author)):
            left["not UTF-8"] += 1
        else:
            records.append(Record(str(author), text, None if _is_missing(time) else str(time)))
    authors, skipped = authors_from(records)
    return Corpus(PREFIX, authors, skipped=skipped + _counted(left))


def _counted(left: Mapping[str, int]) -> tuple[Skipped, ...]:
    return tuple(Skipped(f"{count:,} texts", why) for why, count in left.items() if count)


def _is_missing(value: object) -> bool:
    """Tell whether a cell is empty: None, or what frames write for it, which is not equal to itself.

    Example:
      >>> _is_missing(None), _is_missing(float("nan")), _is_missing("")
      (True, True, False)
    """
    if value is None:
        return True
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
