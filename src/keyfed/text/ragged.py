"""Many lists of unequal length in two arrays, in memory and on disk, so that a million lists cost no Python objects.

A shard is the same on disk, for the encoded streams of many clients. It is a folder of four files:

    tokens.i32       all streams, one after the other
    bounds.i64       stream k is tokens[bounds[k] : bounds[k + 1]]
    names.utf8       all names, one after the other
    names.i64        where each name begins, and the end of the last

Processes that open the same shard share its pages; nothing is copied, and only what is read is in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError

Numbers = NDArray[np.int64]


def bounds_of(counts: NDArray[np.integer[Any]]) -> Numbers:
    """Return where each of several lists begins, and the end of the last.

    Example:
      >>> bounds_of(np.array([2, 0, 3])).tolist()
      [0, 2, 2, 5]
    """
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def ranges(starts: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]]) -> Numbers:
    """Return starts[0], starts[0] + 1, …: counts[k] numbers from each start on, one list after the other.

    Example:
      >>> ranges(np.array([7, 0]), np.array([2, 3])).tolist()
      [7, 8, 0, 1, 2]
    """
    bounds = bounds_of(counts)
    found = np.repeat(starts - bounds[:-1], counts)
    found += np.arange(len(found))
    return found


def blocks(bounds: Numbers, most: int) -> Iterator[slice]:
    """Yield runs of lists that hold about `most` items together, at least one list each.

    Example:
      >>> list(blocks(np.array([0, 2, 3, 9, 10]), 3))
      [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    at, lists = 0, len(bounds) - 1
    while at < lists:
        end = max(at + 1, int(np.searchsorted(bounds, bounds[at] + most, side="right")) - 1)
        yield slice(at, end)
        at = end


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """List k is flat[bounds[k] : bounds[k + 1]].

    Example:
      >>> lists = Ragged.of([[5, 6], [], [7]])
      >>> len(lists), lists[0].tolist(), lists.counts().tolist(), lists.take(np.array([2, 0])).flat.tolist()
      (3, [5, 6], [2, 0, 1], [7, 5, 6])
    """

    flat: Numbers
    bounds: Numbers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int] | Numbers]) -> Ragged:
        """Join lists."""
        flat = np.concatenate([np.asarray(one, np.int64) for one in lists]) if lists else np.empty(0, np.int64)
        return cls(flat, bounds_of(np.array([len(one) for one in lists], np.int64)))

    @classmethod
    def runs(cls, starts: Numbers, counts: Numbers) -> Ragged:
        """Make lists of consecutive numbers."""
        return cls(ranges(starts, counts), bounds_of(counts))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, k: int) -> Numbers:
        return self.flat[self.bounds[k] : self.bounds[k + 1]]

    def counts(self) -> Numbers:
        """Return the length of each list."""
        return np.diff(self.bounds)

    def take(self, which: Numbers) -> Ragged:
        """Return some of the lists."""
        counts = self.counts()[which]
        return Ragged(self.flat[ranges(self.bounds[which], counts)], bounds_of(counts))


TOKENS, BOUNDS, NAMES, NAME_BOUNDS = FILES = ("tokens.i32", "bounds.i64", "names.utf8", "names.i64")
BUFFER = 1 << 20  # bytes gathered before a write


class PackedNames(Sequence[str]):
    """Names that lie on disk as bytes; a string is made when it is read.

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
