"""All lines of a corpus as numbers on disk, in the order of authors and time: what a large corpus is encoded from.

A table (.jsonl, .csv, .tsv) is read row by row, never held in memory, a .jsonl by several processes at once. The parts
they write (`keyfed.text.spill`) are joined here; how many there were does not show in the result.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.text.corpus import (
    TABLE_SUFFIXES,
    Corpus,
    Skipped,
    fingerprint_of,
    left_out,
    must_have_text,
    pseudonym,
    read_corpus,
)
from keyfed.text.dealing import Written
from keyfed.text.ragged import Numbers, blocks, bounds_of, ranges
from keyfed.text.records import Refused, Span, lines_before, spans_of, suffix_of
from keyfed.text.spill import CHUNKS, TEXT, About, Kind, Numbered, no_collection, read_about, read_span, write_part

PIECE = 16 << 20  # bytes of a table that are worth a process of their own
MOST_PROCESSES = 8
ENTRIES = 10_000  # whose text is read at once for the fingerprint
READ = 16 << 20  # bytes that are copied at once


@dataclass(frozen=True, slots=True)
class LineTable:
    """The lines of a corpus, author after author.

    Attributes:
      corpus: what is known beside the text; `authors` is empty.
      written: whose the lines are and how long.
      starts: line k is chunks[starts[k] : starts[k] + lengths[k]], its end included.
      chunks: numbers of words or characters, on disk; 0 ends a line.
      spelt: the chunk of each number.
    """

    corpus: Corpus
    written: Written
    starts: Numbers
    lengths: NDArray[np.int32]
    chunks: NDArray[np.int32]
    spelt: Sequence[str]


def tabulate(path: Path, folder: Path, kind: Kind, **columns: str | None) -> LineTable:
    """Read a corpus into a table of its lines.

    Args:
      path: what `read_corpus` reads; only tables are read without being held in memory.
      folder: a new one for the lines, which may go with the table.
      kind: whether chunks are words or characters.
      columns: `author_column` and `text_column` of `read_corpus`.

    Raises:
      DataError: as `read_corpus`.
    """
    if path.is_dir() or not path.exists() or suffix_of(path) not in TABLE_SUFFIXES:
        corpus = read_corpus(path, **columns)
        entries = ((a.name, list(a.lines), None) for a in corpus.authors)
        write_part(folder / "0", entries, kind, characters=corpus.characters, table=False, refused={})
        about = replace(corpus, authors=(), sha256=corpus.fingerprint())
        return _join(about, [folder / "0"], path, table=False)
    spans = spans_of(path, _pieces(path))
    folders = [folder / str(k) for k in range(len(spans))]
    _read_spans(path, spans, folders, kind, columns)
    refused = _refused(path, spans, folders)
    return _join(Corpus(path.name, (), skipped=left_out(path, refused)), folders, path, table=True)


def _pieces(path: Path) -> int:
    """Return in how many pieces a table is worth being read: one for each core, if it is long."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_PROCESSES, path.stat().st_size // PIECE))


def _read_spans(
    path: Path, spans: Sequence[Span], folders: Sequence[Path], kind: Kind, columns: dict[str, str | None]
) -> None:
    """Write a part for each span: the first here, the others in processes of their own.

    They are plain commands and no `multiprocessing`, which would run a caller's script again if it has no main guard.
    """
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    work = [(path, span, folder, kind, columns) for span, folder in zip(spans, folders, strict=True)]
    others: list[tuple[Any, subprocess.Popen[bytes]]] = []
    try:
        for each in work[1:]:
            asked = json.dumps([str(path), each[1], str(each[2]), kind, columns])
            command = [sys.executable, "-m", "keyfed.text.spill", asked]
            others.append((each, subprocess.Popen(command, env=found, stderr=subprocess.DEVNULL)))
        read_span(*work[0])
        for each, process in others:
            if process.wait():  # what went wrong there goes wrong here, with its error
                shutil.rmtree(each[2], ignore_errors=True)
                read_span(*each)
    finally:
        for _, process in others:
            process.kill()
            process.wait()


def _refused(path: Path, spans: Sequence[Span], folders: Sequence[Path]) -> list[Refused]:
    """Add up what the parts left out; lines are numbered in the whole file."""
    found: dict[str, Refused] = {}
    for span, folder in zip(spans, folders, strict=True):
        rows = read_about(folder).refused
        before = lines_before(path, span) if rows else 0
        for r in rows:
            known = found.get(r.why, Refused(r.why, 0, r.line + before))
            found[r.why] = Refused(r.why, known.rows + r.rows, known.line)
    return list(found.values())


@no_collection()
def _join(about: Corpus, folders: Sequence[Path], path: Path, *, table: bool) -> LineTable:
    """Join parts, their entries in the order of authors and time (as `keyfed.text.corpus.authors_from` has them).

    Args:
      about: the corpus without its text.
      path: the corpus's own.
      table: whether it is one: its authors are handles, which are never kept, and its text lies in the parts.
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
    entries = _order(owner, _joined(folders, "moments.f64", np.float64))
    names = list(authors)
    lines = _joined(folders, "lines.i32")
    last = np.flatnonzero(np.diff(owner[entries], append=-1))  # of each author
    first = np.append(0, np.cumsum(lines[entries])[last])
    names = [pseudonym(names[a]) if table else names[a] for a in owner[entries[last]].tolist()]
    if table:
        spans = _byte_bounds(folders, lines)
        bodies = _bodies(folders, spans, entries, np.append(0, last + 1))
        about = replace(about, sha256=fingerprint_of(zip(names, np.diff(first).tolist(), bodies, strict=True)))
    sizes, lengths = _joined(folders, "sizes.i32"), _joined(folders, "lengths.i32")
    starts = bounds_of(lengths)[:-1]
    if (np.diff(entries) < 0).any():  # in many tables the rows lie in this order already
        order = ranges(bounds_of(lines)[entries], lines[entries])
        sizes, lengths, starts = sizes[order], lengths[order], starts[order]
    return LineTable(
        corpus=about,
        written=Written(about.name, names, first, sizes, about.natural),
        starts=starts,
        lengths=lengths,
        chunks=chunks,
        spelt=list(spelt),
    )


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
    """Return the entries in order: authors by their first entry, an author's entries by time, if all have one.

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
    """Return where the text of each entry begins in the parts' texts, one after the other, and the end of the last."""
    return bounds_of(_joined(folders, "bytes.i32"))[bounds_of(lines)]


def _bodies(folders: Sequence[Path], bounds: Numbers, entries: Numbers, first: Numbers) -> Iterator[bytes]:
    """Yield each author's lines, joined by line feeds; in order, author a has the entries from first[a] on."""
    with (folders[0] / TEXT).open("ab") as file:
        for folder in folders[1:]:
            with (folder / TEXT).open("rb") as part:
                shutil.copyfileobj(part, file, READ)
            (folder / TEXT).unlink()
    with (folders[0] / TEXT).open("rb") as file:
        for block in blocks(first, ENTRIES):
            own = first[block.start : block.stop + 1]
            mine = entries[own[0] : own[-1]]
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
