"""Many lists of unequal length in two arrays, so that a million lists cost no Python objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
