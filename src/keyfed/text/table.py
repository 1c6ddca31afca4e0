"""All lines of a corpus as numbers, and their tokens: what every corpus is encoded from.

Chunks are what stands between blanks (or characters); they are numbered as they first appear, and number 0 is the end
of a line. Every different chunk is cut into words once. Counting words and encoding text is then a matter of looking
numbers up in arrays. A corpus in memory becomes a table in memory (`table_of`).

A large .jsonl, .csv or .tsv is read row by row, never held in memory, a .jsonl by several processes at once
(`tabulate`). Each process reads its rows once and writes a part, a folder of flat files. Nothing in a part depends on a
vocabulary, clients or a seed:

    chunks.i32     all lines, one after the other, each with its end
    lengths.i32    chunks of each line, its end included
    sizes.i32      the size of each line (`keyfed.text.partition`)
    text.utf8      all lines, each followed by a line feed
    bytes.i32      bytes of each line in it, the line feed included
    authors.i32    of each row, numbered as they first appear
    lines.i32      of each row
    moments.f64    of each row, where all have a time
    about.json     chunks and authors by number, rows left out, what is wrong with the times

The parts are joined in the order of authors and time; how many there were does not show in the result. Memory holds the
names and the different chunks, never the text.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.text.corpus import (
    TABLE_SUFFIXES,
    Corpus,
    Skipped,
    file_form,
    fingerprint_of,
    left_out,
    must_have_text,
    pseudonym,
    read_corpus,
    split_lines,
)
from keyfed.text.partition import LineIndex, line_index, line_sizes, lines_in
from keyfed.text.ragged import Numbers, Ragged, blocks, bounds_of, ranges
from keyfed.text.records import RefusedRows, Span, lines_before, moment, spans_of, stream_records
from keyfed.text.sources import suffix_of
from keyfed.text.vocab import EOS, UNK, TokenKind, Vocab, words_of

PIECE = 16 << 20  # bytes of a table that are worth a process of their own
MOST_PROCESSES = 8
ROWS = 10_000  # whose text is read at once for the fingerprint
READ = 16 << 20  # bytes that are copied at once
# What stands for the end of a line while lines are cut together: something that no text has. Rows with a NUL are
# refused, so that tables have none; other text may, but no half of a character (slower: it makes the strings wide).
NUL, HALF = "\0", "\ud800"
CHUNKS, TEXT = "chunks.i32", "text.utf8"
TOGETHER = 1 << 13  # lines that are cut at once
LINES = 1 << 16  # that are looked up at once

Ids = NDArray[np.int32]


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

    def __init__(self, kind: TokenKind, *, characters: bool, end: str = HALF) -> None:
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


@dataclass(frozen=True, slots=True)
class LineTable:
    """The lines of a corpus, author after author, and the published lines behind them.

    Attributes:
      corpus: what is known apart from the text; `authors` is empty where the text is not in memory.
      index: whose the lines are and how long.
      starts: line k is chunks[starts[k] : starts[k] + lengths[k]], its end included.
      chunks: numbers of words or characters; 0 ends a line.
      types: different tokens; the first is the end of a line.
      tokens: chunk c is the types tokens[c].
    """

    corpus: Corpus
    index: LineIndex
    starts: Numbers
    lengths: Ids
    chunks: Ids
    types: list[str]
    tokens: Ragged


class StreamBlock(NamedTuple):
    """The tokens of several lists of lines, one after the other: which lists, and how many tokens each has."""

    lists: slice
    lengths: Numbers
    tokens: Ids


def table_of(corpus: Corpus, kind: TokenKind, *, lower: bool) -> LineTable:
    """Return the table of a corpus in memory."""
    cutter, lines = Cutter(kind, characters=corpus.characters), lines_in(corpus)
    found = [cutter.cut(lines[at : at + TOGETHER]) for at in range(0, len(lines), TOGETHER)]
    empty = [np.empty(0, np.int32)]
    chunks, lengths, sizes = (np.concatenate([*empty, *(piece[k] for piece in found)]) for k in range(3))
    starts, types = bounds_of(lengths)[:-1], _types(cutter.spelt(), kind, corpus, lower=lower)
    return LineTable(corpus, line_index(corpus, sizes), starts, lengths, chunks, *types)


def _types(spelt: Sequence[str], kind: TokenKind, corpus: Corpus, *, lower: bool) -> tuple[list[str], Ragged]:
    """Cut each chunk into words (a character is what it is); return the different ones, and those of each chunk."""
    types = Numbered({"\n": 0})
    counts, flat = [1], [0]
    for chunk in spelt[1:]:
        words = words_of(chunk, tokenised=corpus.tokenised, lower=lower) if kind == "word" else [chunk]
        counts.append(len(words))
        flat += map(types.__getitem__, words)
    return list(types), Ragged(np.array(flat, np.int64), bounds_of(np.array(counts)))


def types_of(table: LineTable, lists: Ragged) -> Iterator[StreamBlock]:
    """Yield the types of lists of lines, some lists at a time; every line is followed by its end."""
    chunk_tokens = table.tokens.counts()
    flat = table.tokens.flat.astype(np.int32)
    plain = bool((chunk_tokens == 1).all())
    for block in blocks(lists.bounds, LINES):
        bounds = lists.bounds[block.start : block.stop + 1]
        lines = lists.flat[bounds[0] : bounds[-1]]
        lengths = table.lengths[lines]
        chunks = table.chunks[ranges(table.starts[lines], lengths)]
        ends = bounds_of(lengths)[bounds - bounds[0]]  # of each list, in chunks
        if plain:
            yield StreamBlock(block, np.diff(ends), flat[chunks])
        else:
            counts = chunk_tokens[chunks]
            tokens = flat[ranges(table.tokens.bounds[chunks], counts)]
            yield StreamBlock(block, np.diff(bounds_of(counts)[ends]), tokens)


def count_types(table: LineTable, lists: Ragged, min_clients: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often each type occurs, and with how many clients (`min_clients` or more where more have it)."""
    size = len(table.types)
    counts, holders = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for found in types_of(table, lists):
        counts += np.bincount(found.tokens, minlength=size)
        # Only types that are not known to have enough holders are looked at: after some clients hardly any.
        few = np.flatnonzero(holders[found.tokens] < min_clients)
        client = np.repeat(np.arange(len(found.lengths)), found.lengths)[few]
        pairs = np.unique(client * size + found.tokens[few])
        holders += np.bincount(pairs % size, minlength=size)
    present = np.flatnonzero(counts[1:]) + 1
    words = [table.types[t] for t in present.tolist()]
    return (
        dict(zip(words, counts[present].tolist(), strict=True)),
        dict(zip(words, holders[present].tolist(), strict=True)),
    )


def encode_lists(table: LineTable, vocab: Vocab, lists: Ragged) -> Iterator[StreamBlock]:
    """Yield the streams of lists of lines, some lists at a time: `Vocab.encode` on a table."""
    number = vocab.index.get
    numbers = np.array([EOS, *(number(word, UNK) for word in table.types[1:])], np.int32)
    for found in types_of(table, lists):
        yield StreamBlock(found.lists, found.lengths, numbers[found.tokens])


# Tables that are not held in memory


@dataclass(frozen=True, slots=True)
class About:
    """What a part says in `about.json`.

    Attributes:
      chunks: the spelling of each number; that of 0 has no meaning.
      late: why the rows cannot be ordered by time, None if they can.
      timed: whether any row has a time.
    """

    chunks: list[str]
    authors: list[str]
    refused: list[RefusedRows]
    late: str | None
    timed: bool


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the cycle collector still: rows make no cycles, and it would visit all objects time and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@no_collection()
def write_part(path: Path, span: Span, folder: Path, kind: TokenKind, columns: dict[str, Any]) -> None:
    """Write a part from a piece of a table into a new folder."""
    folder.mkdir(parents=True)
    cutter = Cutter(kind, characters=False, end=NUL)
    refused: dict[str, RefusedRows] = {}
    authors, counts, moments = array("i"), array("i"), array("d")
    names, late, timed = Numbered(), None, False
    waiting: list[str] = []
    files = [(folder / name).open("wb") for name in (CHUNKS, "lengths.i32", "sizes.i32", TEXT, "bytes.i32")]

    def flush() -> None:
        written = "\n".join([*waiting, ""]).encode()
        ends = np.flatnonzero(np.frombuffer(written, np.uint8) == ord("\n"))
        parts: list[Any] = [*cutter.cut(waiting), written, np.diff(ends, prepend=-1).astype(np.int32)]
        for file, part in zip(files, parts, strict=True):
            file.write(part)
        waiting.clear()

    try:
        for author, text, time in stream_records(path, refused, span=span, **columns):
            if not (lines := split_lines(text)):
                continue
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


def read_about(folder: Path) -> About:
    """Read what a part says about itself."""
    found = json.loads((folder / "about.json").read_text("utf-8"))
    return About(**{**found, "refused": [RefusedRows(**r) for r in found["refused"]]})


def tabulate(path: Path, into: Path, kind: TokenKind, *, lower: bool, **columns: Any) -> LineTable:
    """Read a corpus into a table of its lines; memory does not hold the lines of a .jsonl, .csv or .tsv.

    Args:
      path: what `read_corpus` reads.
      into: a new folder for the lines of such a file, which may go with the table.
      kind: whether chunks are words or characters.
      lower: whether words are written in lower case.
      columns: `author_column`, `text_column`, `max_words`, `me` and `folder` of `read_corpus`.

    Raises:
      DataError: as `read_corpus`.
    """
    in_memory = columns.get("me") is not None or path.is_dir() or not path.exists()
    if in_memory or suffix_of(path) not in TABLE_SUFFIXES:
        table = table_of(read_corpus(path, **columns), kind, lower=lower)
        return replace(table, corpus=replace(table.corpus, authors=(), sha256=table.corpus.fingerprint()))
    columns = {key: value for key, value in columns.items() if key not in ("me", "folder")}
    spans = spans_of(path, _pieces(path))
    folders = [into / str(k) for k in range(len(spans))]
    _read_spans(path, spans, folders, kind, columns)
    form = file_form(path, columns)
    about = Corpus(path.name, (), skipped=left_out(path.name, _refused(path, spans, folders)), formats=(form,))
    return _join(about, folders, path, kind, lower=lower)


def _pieces(path: Path) -> int:
    """Return in how many pieces a table is worth being read: one for each core, if it is long."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_PROCESSES, path.stat().st_size // PIECE))


def _read_spans(
    path: Path, spans: Sequence[Span], folders: Sequence[Path], kind: TokenKind, columns: dict[str, Any]
) -> None:
    """Write a part for each span: the first here, the others in processes of their own.

    They are plain commands and no `multiprocessing`, which would run a caller's script again if it has no main guard.
    """
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    work = [(path, span, folder, kind, columns) for span, folder in zip(spans, folders, strict=True)]
    others: list[tuple[Any, subprocess.Popen[bytes]]] = []
    try:
        for each in work[1:]:
            task = json.dumps([str(path), each[1], str(each[2]), kind, columns])
            command = [sys.executable, "-m", "keyfed.text.table", task]
            others.append((each, subprocess.Popen(command, env=found, stderr=subprocess.DEVNULL)))
        write_part(*work[0])
        for each, process in others:
            if process.wait():  # what went wrong there goes wrong here, with its error
                shutil.rmtree(each[2], ignore_errors=True)
                write_part(*each)
    finally:
        for _, process in others:
            process.kill()
            process.wait()


def _refused(path: Path, spans: Sequence[Span], folders: Sequence[Path]) -> list[RefusedRows]:
    """Add up what the parts left out; lines are numbered in the whole file."""
    found: dict[str, RefusedRows] = {}
    for span, folder in zip(spans, folders, strict=True):
        rows = read_about(folder).refused
        before = lines_before(path, span) if rows else 0
        for r in rows:
            known = found.get(r.why, RefusedRows(r.why, 0, r.line + before))
            found[r.why] = RefusedRows(r.why, known.rows + r.rows, known.line)
    return list(found.values())


@no_collection()
def _join(about: Corpus, folders: Sequence[Path], path: Path, kind: TokenKind, *, lower: bool) -> LineTable:
    """Join parts, their rows in the order of authors and time (as `keyfed.text.corpus.authors_from` has them).

    Args:
      about: the corpus without its text.
      path: the corpus's own; its authors are handles, which are never kept.
    """
    parts = [read_about(folder) for folder in folders]
    spelt, authors = Numbered(), Numbered()
    chunks = _join_chunks(folders, [_renumber(part.chunks, spelt) for part in parts])
    owner = np.concatenate(
        [
            _renumber(part.authors, authors)[np.fromfile(folder / "authors.i32", np.int32)]
            for part, folder in zip(parts, folders, strict=True)
        ]
    )
    about = replace(about, skipped=about.skipped + _out_of_time(parts))
    if not len(owner):
        must_have_text(about, path)
    rows = _order(owner, _joined(folders, "moments.f64", np.float64))
    handles = list(authors)
    lines = _joined(folders, "lines.i32")
    last = np.flatnonzero(np.diff(owner[rows], append=-1))  # of each author
    first = np.append(0, np.cumsum(lines[rows])[last])
    names = [pseudonym(handles[a]) if handles[a] else path.name for a in owner[rows[last]].tolist()]
    about = replace(about, natural=len(names) > 1)
    bodies = _bodies(folders, _byte_bounds(folders, lines), rows, np.append(0, last + 1))
    about = replace(about, sha256=fingerprint_of(zip(names, np.diff(first).tolist(), bodies, strict=True)))
    sizes, lengths = _joined(folders, "sizes.i32"), _joined(folders, "lengths.i32")
    starts = bounds_of(lengths)[:-1]
    if (np.diff(rows) < 0).any():  # in many tables the rows lie in this order already
        order = ranges(bounds_of(lines)[rows], lines[rows])
        sizes, lengths, starts = sizes[order], lengths[order], starts[order]
    index = LineIndex(about.name, names, first, sizes, about.natural)
    return LineTable(about, index, starts, lengths, chunks, *_types(list(spelt), kind, about, lower=lower))


def _renumber(names: Sequence[str], numbers: Numbered) -> NDArray[np.int32]:
    """Return the number that each of a part's names has among all."""
    return np.fromiter(map(numbers.__getitem__, names), np.int32, len(names))


def _joined(folders: Sequence[Path], file: str, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    return np.concatenate([np.fromfile(folder / file, dtype) for folder in folders])


def _join_chunks(folders: Sequence[Path], numbers: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Append the chunks of the later parts to those of the first, whose numbers are those of all, and map them."""
    path = folders[0] / CHUNKS
    with path.open("ab") as file:
        for folder, number in zip(folders[1:], numbers[1:], strict=True):
            with (folder / CHUNKS).open("rb") as part:
                while len(some := np.frombuffer(part.read(READ), np.int32)):
                    file.write(number[some].tobytes())
            (folder / CHUNKS).unlink()
    return np.memmap(path, np.int32, "r") if path.stat().st_size else np.empty(0, np.int32)


def _out_of_time(parts: Sequence[About]) -> tuple[Skipped, ...]:
    late = next((part.late for part in parts if part.late is not None), None)
    if late is None or not any(part.timed for part in parts):
        return ()
    return (Skipped("order of time", f"{late}; rows kept in file order"),)


def _order(owner: NDArray[np.int32], moments: NDArray[np.float64]) -> Numbers:
    """Return the rows in order: authors by their first row, an author's rows by time, if all have one.

    Example:
      >>> _order(np.array([0, 1, 0]), np.array([5.0, 2.0, 3.0])).tolist()
      [1, 2, 0]
      >>> _order(np.array([0, 1, 0]), np.array([5.0])).tolist()
      [0, 2, 1]
    """
    timed = len(moments) == len(owner)
    by_time = np.argsort(moments, kind="stable") if timed else np.arange(len(owner))
    authors, seen = np.unique(owner[by_time], return_index=True)
    rank = np.empty(len(authors), np.int64)
    rank[np.argsort(seen)] = np.arange(len(authors))
    order: Numbers = by_time[np.argsort(rank[owner[by_time]], kind="stable")]
    return order


def _byte_bounds(folders: Sequence[Path], lines: NDArray[np.int32]) -> Numbers:
    """Return where the text of each row begins in the parts' texts, one after the other, and the end of the last."""
    return bounds_of(_joined(folders, "bytes.i32"))[bounds_of(lines)]


def _bodies(folders: Sequence[Path], bounds: Numbers, rows: Numbers, first: Numbers) -> Iterator[bytes]:
    """Yield each author's lines, joined by line feeds; in order, author a has the rows from first[a] on."""
    with (folders[0] / TEXT).open("ab") as file:
        for folder in folders[1:]:
            with (folder / TEXT).open("rb") as part:
                shutil.copyfileobj(part, file, READ)
            (folder / TEXT).unlink()
    with (folders[0] / TEXT).open("rb") as file:
        for block in blocks(first, ROWS):
            own = first[block.start : block.stop + 1]
            mine = rows[own[0] : own[-1]]
            starts, stops = bounds[mine], bounds[mine + 1]
            runs = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))  # neighbours are read together
            text = bytearray()
            for start, stop in zip(
                starts[runs].tolist(), stops[np.append(runs[1:], len(mine)) - 1].tolist(), strict=True
            ):
                file.seek(start)
                text += file.read(stop - start)
            cuts = bounds_of(stops - starts)[own - own[0]].tolist()
            yield from (bytes(text[start : stop - 1]) for start, stop in pairwise(cuts))
    (folders[0] / TEXT).unlink()


if __name__ == "__main__":  # one of several processes that read a table
    source, place, into, chunk_kind, found_columns = json.loads(sys.argv[1])
    write_part(Path(source), Span(*place), Path(into), chunk_kind, found_columns)
