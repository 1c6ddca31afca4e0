"""Word vectors in text (GloVe; FastText and word2vec with a header line), word2vec's binary format, and JSON.

    the 0.418 0.24968 …                  GloVe: a word and its numbers, one word a line
    400000 300⏎the 0.418 0.24968 …       FastText, word2vec text: the same after a line "words dimension"
    3000000 300⏎the ….…,                 word2vec binary: the header line, then word, blank, float32 numbers
    {"dimensions": 100, …                winkNLP's JSON, see `json_file`

Any of them may lie in a .gz or, alone, in a .zip. What a file is, is told by its content.
"""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.text.vectors.json_file import json_dim, read_json
from keyfed.text.vectors.rows import WIDEST, Gathering, Progress, listed, shown

GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
_BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 18  # bytes in which the layout is recognised: 60 lines of 300 numbers
_LONGEST = 1 << 20  # bytes of a line
_CHUNK = 1 << 20
_OFTEN = 1 << 13  # words between two reports of progress


@dataclass(frozen=True, slots=True)
class Layout:
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


def layout_of(path: Path) -> Layout:
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
        return Layout("json", json_width, None)
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
            return Layout("binary", dim, count)
        return Layout("text", dim, count)
    if not widths:
        raise DataError(
            f"{path}: no vectors: expected a word and its numbers on each line (GloVe, FastText), word2vec binary, "
            "safetensors, npz, or a folder with a transformer's model.safetensors and tokenizer"
        )
    dim = max(widths, key=lambda width: (widths[width], width))
    _check_width(path, dim)
    return Layout("text", dim, None)


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


def read_file(path: Path, layout: Layout, gathering: Gathering, progress: Progress | None) -> None:
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


def _read_text(stream: IO[bytes], layout: Layout, gathering: Gathering, tick: Callable[[], None]) -> None:
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


def _keep_numbers(gathering: Gathering, slot: int, rest: bytes, dim: int, where: str) -> None:
    fields = rest.split()
    if not fields:
        gathering.note("broken", f"{where}: no numbers")
    elif len(fields) != dim:
        gathering.note("wrong_dimension", f"{where}{_instead(rest, dim)}")
    else:
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


def _read_binary(stream: IO[bytes], layout: Layout, gathering: Gathering, tick: Callable[[], None]) -> None:
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
