"""Word vectors in arrays: .npz and .safetensors with `vectors` [words, dim] and `words`.

    npz            `words`: strings [words]                np.savez(file, vectors=vectors, words=np.array(words))
    safetensors    `words`: UTF-8 bytes, uint8 [bytes],    save_file({"vectors": vectors, "words": np.frombuffer(
                   a line end between two words                "\\n".join(words).encode(), np.uint8)}, file)

Both are read by chunks of rows, never as a whole, and never with pickle.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError
from keyfed.text.vectors.files import ZIP
from keyfed.text.vectors.rows import WIDEST, Gathering, Progress, listed, shown

EXPECTED = "expected `vectors` [words, dim] in float32, float16 or float64, and `words`"
_ROWS = 1 << 12  # rows read at a time
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in a safetensors file: `start` counts from the file's first byte."""

    type: str
    shape: tuple[int, ...]
    start: int

    def read(self, file: IO[bytes], first: int, count: int) -> NDArray[Any]:
        """Return rows `first`, …, `first + count - 1`; bfloat16 as float32."""
        dtype = np.dtype(_TYPES[self.type])
        numbers = math.prod(self.shape[1:])
        file.seek(self.start + first * numbers * dtype.itemsize)
        data = file.read(count * numbers * dtype.itemsize)
        rows = np.frombuffer(data, dtype).reshape(count, *self.shape[1:])
        if self.type == "BF16":  # the upper half of a float32
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows


def is_npz(path: Path) -> bool:
    """Tell a .npz from other .zip files: it holds .npy files."""
    with _readable(path), path.open("rb") as file:
        if file.read(4) != ZIP:
            return False
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())


def is_safetensors(path: Path) -> bool:
    """Tell whether a file begins as safetensors do: the length of a JSON header, then the header."""
    with _readable(path), path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        return len(start) == 9 and start[8:] == b"{" and 2 <= length <= path.stat().st_size - 8


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file.

    Raises:
      DataError: The header is damaged, or a tensor would lie outside the file.
    """
    with _readable(path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST_HEADER, path.stat().st_size - 8):
            raise DataError(f"{path}: no safetensors file: its header would have {length:,} bytes")
        try:
            entries = json.loads(file.read(length))
            found = {name: _tensor(e, 8 + length) for name, e in entries.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: damaged safetensors header ({error}); fetch it again") from error
        for name, tensor in found.items():
            if tensor.type in _TYPES:
                end = tensor.start + math.prod(tensor.shape) * np.dtype(_TYPES[tensor.type]).itemsize
                if end > path.stat().st_size:
                    raise DataError(f"{path}: cut off: {name} ends at byte {end:,} of {path.stat().st_size:,}")
    return found


def _tensor(entry: dict[str, Any], base: int) -> Tensor:
    shape = tuple(int(n) for n in entry["shape"])
    if any(n < 0 for n in shape) or int(entry["data_offsets"][0]) < 0:
        raise ValueError("negative size")
    return Tensor(str(entry["dtype"]), shape, base + int(entry["data_offsets"][0]))


def read_safetensors(path: Path, gathering: Gathering, dim: int, progress: Progress | None) -> None:
    """Gather our words' rows from `vectors` and `words`."""
    tensors = tensors_of(path)
    table, letters = tensors["vectors"], tensors["words"]
    with _readable(path), path.open("rb") as file:
        words = letters.read(file, 0, letters.shape[0]).tobytes().split(b"\n")
        if len(words) != table.shape[0]:
            raise _unequal(path, len(words), table.shape[0])
        chunks = (
            (words[first : first + _ROWS], table.read(file, first, min(_ROWS, len(words) - first)))
            for first in range(0, len(words), _ROWS)
        )
        _gather(chunks, gathering, dim, path.stat().st_size, len(words), progress)


def safetensors_dim(path: Path, tensors: dict[str, Tensor]) -> int:
    """Return the dimension of `vectors`.

    Raises:
      DataError: There are no such tensors, or not of these shapes.
    """
    table, letters = tensors.get("vectors"), tensors.get("words")
    if table is None or letters is None:
        raise DataError(
            f"{path}: holds {listed(sorted(tensors))}; {EXPECTED} (uint8, UTF-8, a line end between words), "
            "or a transformer's wte.weight or word_embeddings.weight beside its tokenizer"
        )
    if table.type not in ("F64", "F32", "F16", "BF16") or letters.type != "U8" or len(letters.shape) != 1:
        raise DataError(
            f"{path}: vectors are {table.type}, words {letters.type} {list(letters.shape)}; {EXPECTED} in uint8 [bytes]"
        )
    return _dim(path, table.shape)


def npz_dim(path: Path) -> int:
    """Return the dimension of `vectors`.

    Raises:
      DataError: There are no such arrays, or not of these shapes and types.
    """
    with _npz(path) as (_, _, vectors, words):
        if words[0] != vectors[0][:1]:
            raise _unequal(path, math.prod(words[0]), vectors[0][0])
        return _dim(path, vectors[0])


def read_npz(path: Path, gathering: Gathering, dim: int, progress: Progress | None) -> None:
    """Gather our words' rows from `vectors` and `words`."""
    with _npz(path) as (table, names, (shape, numbers), (_, letters)):

        def chunks() -> Iterator[tuple[list[bytes], NDArray[Any]]]:
            for first in range(0, shape[0], _ROWS):
                count = min(_ROWS, shape[0] - first)
                rows = np.frombuffer(table.read(count * dim * numbers.itemsize), numbers).reshape(count, dim)
                cells = np.frombuffer(names.read(count * letters.itemsize), letters)
                yield [_bytes(cell) for cell in cells.tolist()], rows

        _gather(chunks(), gathering, dim, shape[0] * dim * numbers.itemsize, shape[0], progress)


def _bytes(cell: str | bytes) -> bytes:
    return cell if isinstance(cell, bytes) else cell.encode("utf-8", "surrogatepass")


_Header = tuple[tuple[int, ...], np.dtype[Any]]


@contextmanager
def _npz(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes], _Header, _Header]]:
    """Open both arrays behind their headers: streams of `vectors` and `words`, then shape and type of each."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        held = sorted(archive.namelist())
        if not {"vectors.npy", "words.npy"} <= set(held):
            raise DataError(f"{path}: holds {listed(held)}; {EXPECTED} (strings)")
        with archive.open("vectors.npy") as table, archive.open("words.npy") as names:
            vectors, words = _npy_header(path, table), _npy_header(path, names)
            if vectors[1].kind != "f" or words[1].kind not in "US" or len(words[0]) != 1:
                raise DataError(
                    f"{path}: vectors are {vectors[1]}, words {words[1]} {list(words[0])}; {EXPECTED} (strings "
                    "[words]; Python objects are not read)"
                )
            yield table, names, vectors, words


def _npy_header(path: Path, stream: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(stream)
    if by_columns and len(shape) > 1:
        raise DataError(f"{path}: vectors lie by columns; save np.ascontiguousarray(vectors)")
    return shape, dtype


def _gather(
    chunks: Iterator[tuple[list[bytes], NDArray[Any]]],
    gathering: Gathering,
    dim: int,
    size: int,
    total: int,
    progress: Progress | None,
) -> None:
    gathering.begin(dim)
    for words, rows in chunks:
        for word, row in zip(words, rows, strict=True):
            gathering.lines += 1
            slot = gathering.slots.get(word)
            if slot is not None:
                gathering.keep(slot, row, f"row {gathering.lines}: {shown(word)}")
            elif not word.isascii() and shown(word).startswith("b'"):
                gathering.note("undecodable", f"row {gathering.lines}: {shown(word)}")
        if progress is not None:
            progress(size * gathering.lines // total, size)


def _dim(path: Path, shape: tuple[int, ...]) -> int:
    if len(shape) != 2 or 0 in shape or shape[1] > WIDEST:
        raise DataError(f"{path}: vectors have shape {list(shape)}; {EXPECTED}")
    return shape[1]


def _unequal(path: Path, words: int, vectors: int) -> DataError:
    return DataError(f"{path}: {words:,} words but {vectors:,} vectors; {EXPECTED}, one for each")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what reading can raise into one line."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
