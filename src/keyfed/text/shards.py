"""Encoded text on disk: the streams of many clients as one file of tokens, to be mapped rather than read.

A shard is a folder of four files, so that a million clients cost no Python objects:

    tokens.i32       all streams, one after the other
    bounds.i64       stream k is tokens[bounds[k] : bounds[k + 1]]
    names.utf8       all names, one after the other
    names.i64        where each name begins, and the end of the last

Processes that open the same shard share its pages; nothing is copied, and only what is read is in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, overload

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError

TOKENS, BOUNDS, NAMES, NAME_BOUNDS = FILES = ("tokens.i32", "bounds.i64", "names.utf8", "names.i64")
BUFFER = 1 << 20  # bytes gathered before a write


class PackedNames(Sequence[str]):
    """Names that lie on disk as bytes; a string exists only while somebody looks at it.

    Args:
      folder: of a shard.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAMES
        self._bytes = _mapped(folder / NAMES, np.dtype(np.uint8))
        self._bounds = _bounds_of(folder / NAME_BOUNDS, len(self._bytes))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        if isinstance(at, slice):
            return tuple(self[k] for k in range(*at.indices(len(self))))
        k = at + len(self) if at < 0 else at
        if not 0 <= k < len(self):
            raise IndexError(f"name {at} of {len(self)}")
        try:
            return self._bytes[int(self._bounds[k]) : int(self._bounds[k + 1])].tobytes().decode()
        except UnicodeDecodeError as error:
            raise _not_whole(self._file, error) from None


class ShardWriter:
    """Write streams one after the other into a new folder; memory does not grow with the text.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ShardWriter(Path(folder) / "train") as shard:
      ...         shard.add("ann", np.array([5, 2], np.int32))
      ...     {name: ids.tolist() for name, ids in streams_of(Path(folder) / "train")}
      {'ann': [5, 2]}
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._tokens: IO[bytes] = (folder / TOKENS).open("wb", buffering=BUFFER)
        self._names: IO[bytes] = (folder / NAMES).open("wb", buffering=BUFFER)
        self._bounds = array("q", [0])
        self._name_bounds = array("q", [0])

    def add(self, name: str, stream: NDArray[np.int32]) -> None:
        """Write one client's stream."""
        self.extend([name], [len(stream)], stream)

    def extend(self, names: Sequence[str], lengths: Sequence[int], streams: NDArray[np.int32]) -> None:
        """Write the streams of several clients, which lie one after the other."""
        self._tokens.write(np.ascontiguousarray(streams, "<i4").tobytes())
        encoded = [name.encode() for name in names]
        self._names.write(b"".join(encoded))
        self._bounds.extend(accumulate(lengths, initial=self._bounds.pop()))
        self._name_bounds.extend(accumulate(map(len, encoded), initial=self._name_bounds.pop()))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._names.close()
        if error is None:
            for file, bounds in ((BOUNDS, self._bounds), (NAME_BOUNDS, self._name_bounds)):
                (self._folder / file).write_bytes(np.frombuffer(bounds, np.int64).astype("<i8").tobytes())


def _mapped(path: Path, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Map a file; an empty one, which cannot be mapped, is an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")
    except (OSError, ValueError) as error:
        raise _not_whole(path, error) from None


def _bounds_of(path: Path, length: int) -> NDArray[np.int64]:
    """Map bounds, which must rise from 0 to the length of what they cut."""
    bounds: NDArray[np.int64] = _mapped(path, np.dtype("<i8")).view(np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != length or (bounds[1:] < bounds[:-1]).any():
        raise _not_whole(path, "its bounds are not those of a shard")
    return bounds


def _not_whole(path: Path, why: object) -> DataError:
    return DataError(f"{path}: not a whole shard ({why}); remove the folder, it will be made again")


def streams_of(folder: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield (name, stream) of every client in a shard; streams are mapped, not read."""
    names = PackedNames(folder)
    tokens: NDArray[np.int32] = _mapped(folder / TOKENS, np.dtype("<i4")).view(np.int32)
    bounds = _bounds_of(folder / BOUNDS, len(tokens)).tolist()
    if len(bounds) != len(names) + 1:
        raise _not_whole(folder, f"{len(bounds) - 1} streams of {len(names)} names")
    for k, name in enumerate(names):
        yield name, tokens[bounds[k] : bounds[k + 1]]
