"""Word vectors in the JSON of winkNLP's embeddings, row by row: such a file is one line of hundreds of megabytes.

    {"dimensions": 100, …, "vectors": {"the": [-0.038194, …], …}, …}

A row may go on after its `dimensions` numbers (winkNLP puts the vector's length and the word's number there).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import IO

import numpy as np

from keyfed.text.vectors.rows import Gathering, shown

_DIMENSIONS = re.compile(rb'\A\s*\{\s*"(?:[^\n]*?")?dimensions"\s*:\s*(\d{1,9})\b')
_VECTORS = re.compile(rb'"vectors"\s*:\s*\{')
_ROW = re.compile(rb'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*\[([^\[\]]*)\]')
_END = re.compile(rb"\s*\}")
_CHUNK = 1 << 20
_LONGEST = 1 << 20  # bytes of a row


def json_dim(head: bytes) -> int | None:
    """Return the dimension that the beginning of a file of this kind names; None for any other file.

    Example:
      >>> json_dim(b'{"precision":8,"dimensions":100,"words":["the"'), json_dim(b"{ 0.5 0.25\\n}")
      (100, None)
    """
    found = _DIMENSIONS.match(head)
    return int(found[1]) if found else None


def read_json(stream: IO[bytes], dim: int, gathering: Gathering, tick: Callable[[], None]) -> None:
    """Gather our words' rows; where a row cannot be told from the next, the rest is given up and reported."""
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


def _keep(gathering: Gathering, key: bytes, numbers: bytes, dim: int) -> None:
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
    if slot is None:
        return
    try:
        values = np.array([float(number) for number in numbers.split(b",")[:dim]])
    except ValueError as error:
        gathering.note("broken", f"{where}: {error}")
        return
    gathering.keep(slot, values, where)
