"""How vectors of counts are summed over clients: in groups, in the clear or by the real protocol, to the same integers.

Clients form groups of nearly equal size, and every group has a secure sum of its own. The server adds what was opened.
In the clear only the words that clients write are added, so a simulation of thousands of clients takes seconds. Masked,
every client and the server play their role (`engine.sums.masked.MaskedSum`). Real clients write what a simulated one
writes, of the same public numbers (`run.remote.counting`). All three give the same words, bit for bit.

A group below the floor would hide too few clients. So groups are never smaller, in the clear neither, and a few clients
more than `among` form one group. A count of which a sum lacks half of the clients ends.

The sums of one text are of the same statistics. So who is lost in one of them is in no later sum of that text, and
where fewer than `apart` are lost, others are left out with them. Clients would not open another sum
(`private.secagg.nested`). A group whose sum stays closed is in no later sum of that text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.tallies import Entries, added, vectors
from keyfed.errors import BelowThreshold, RunError, SecureSumError
from keyfed.model.ngram import Tokens
from keyfed.model.tables import Texts, texts_of
from keyfed.private.secagg.nested import Chain, to_leave_out
from keyfed.private.secagg.threshold import SecureSettings

Write = Callable[[Texts], Entries]  # of a block of clients: the words that they add to
Lost = Callable[[str, str], bool]  # (what is summed, client): whether it vanishes before its vector is there
RealSum = Callable[["PublicSum", int, "Called"], "Opened"]  # (sum, words of a vector, clients): their opened sum


class PublicSum(NamedTuple):
    """One sum: what is summed, and the public numbers that all its clients must have alike.

    Attributes:
      purpose: it names the sum in the report: `recount 2`.
      numbers: what a client needs to write its vector, besides the terms of the count and its own text.
    """

    purpose: str
    numbers: Mapping[str, NDArray[Any]]

    def digest(self) -> bytes:
        """Return the SHA-256 that masks are bound to."""
        total = hashlib.sha256(b"keyfed counts 1" + self.purpose.encode())
        for name, array in sorted(self.numbers.items()):
            total.update(f"|{name}|{array.dtype.str}|{array.size}|".encode())
            total.update(np.ascontiguousarray(array).tobytes())
        return total.digest()


class Group(NamedTuple):
    """The clients of one sum."""

    names: tuple[str, ...]
    texts: Texts


def groups_of(
    names: Sequence[str], streams: Sequence[Tokens], line_end: int | None, among: int, least: int
) -> list[Group]:
    """Cut clients into groups of nearly equal size: `among` at most, but never below `least`.

    Example:
      >>> [len(group.names) for group in groups_of("abcdefg", [np.array([1])] * 7, None, 3, 2)]
      [2, 2, 3]
      >>> [len(group.names) for group in groups_of("abcdefg", [np.array([1])] * 7, None, 3, 3)]
      [3, 4]
    """
    count = max(1, min(-(-len(names) // among), len(names) // least))
    bounds = [len(names) * at // count for at in range(count + 1)]
    return [Group(tuple(names[a:b]), texts_of(streams[a:b], line_end)) for a, b in pairwise(bounds)]


class Called(NamedTuple):
    """The clients of a group that are called for a sum.

    Attributes:
      largest: clients of the largest group.
      before: clients of the last sum of this text, who are all of these; None before the first sum.
      apart: clients who are lost together at least, see `private.secagg.nested`.
    """

    names: tuple[str, ...]
    largest: int
    before: int | None
    apart: int


class Opened(NamedTuple):
    """One group's opened sum, and whose vectors are in it."""

    total: Vector
    survivors: tuple[str, ...]

    @property
    def clients(self) -> int:
        return len(self.survivors)


@dataclass(slots=True)
class Gathering:
    """Sums of one text over the clients of groups.

    Attributes:
      settings: of secure sums; None adds in the clear.
      lost: which clients drop out of which sum.
      real: forms a group's sum with real clients, who have the text; None where clients are simulated.
      apart: clients that two sums of a group differ by at least, if they differ.
      chains: of groups, by their clients: what follows from their sums so far; None where one stayed closed.
      words: of the vectors that one client sent, by what was summed.
      closed: groups that were left out, and why.
      missing: clients that are in no opened sum, by what was summed.
    """

    groups: Sequence[Group]
    settings: SecureSettings | None = None
    lost: Lost = lambda purpose, name: False
    real: RealSum | None = None
    apart: int = 3
    chains: dict[tuple[str, ...], Chain | None] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)

    @property
    def members(self) -> int:
        """Clients of the largest sum, a public number."""
        return max(len(group.names) for group in self.groups)

    @property
    def clients(self) -> int:
        return sum(len(group.names) for group in self.groups)

    def after(self, earlier: Gathering, groups: int | None = None) -> Gathering:
        """Return this gathering where `earlier` had sums of the same text.

        Args:
          groups: how many of the groups at most, evenly spaced, and none that stayed closed; None for all.
        """
        chains, chosen = earlier.chains, self.groups
        if groups is not None:
            still = [group for group in self.groups if chains.get(group.names, Chain()) is not None]
            chosen = [still[n * len(still) // groups] for n in range(groups)] if groups < len(still) else still
        return replace(self, groups=chosen, chains=chains)

    def sums(self, public: PublicSum, words: int, write: Write) -> Iterator[Opened]:
        """Yield every group's opened sum.

        Args:
          words: of a client's vector.
          write: what simulated clients write.

        Raises:
          RunError: half of the clients are missing.
        """
        purpose = public.purpose
        self.words[purpose] = words
        for number, group in enumerate(self.groups):
            if self.chains.get(group.names, Chain()) is None:
                self.leave_out(purpose, len(group.names))
                continue
            try:
                opened = self._sum(public, words, group, write)
            except SecureSumError as e:
                self.chains[group.names] = None
                self.leave_out(purpose, len(group.names), f"{purpose}, group {number}: {e}")
                continue
            self.leave_out(purpose, len(group.names) - opened.clients)
            yield opened

    def leave_out(self, purpose: str, clients: int, why: str | None = None) -> None:
        """Note clients that a sum lacks, and why; RunError where half of the clients are missing."""
        if why is not None:
            self.closed.append(why)
        missing = self.missing[purpose] = self.missing.get(purpose, 0) + clients
        if 2 * missing >= self.clients:
            last = f" ({self.closed[-1]})" if self.closed else ""
            raise RunError(
                f"the sum {purpose} lacks {missing:,} of {self.clients:,} clients{last}; expected more than half of "
                "them. Nothing was written: count again"
            )

    def _sum(self, public: PublicSum, words: int, group: Group, write: Write) -> Opened:
        """Form a group's sum over those of its clients that no sum of this text has lost."""
        chain = self.chains.get(group.names) or Chain()
        names = group.names if chain.opened is None else tuple(n for n in group.names if n in chain.opened)
        threshold = (self.settings or SecureSettings()).threshold_of(len(names))
        joined = chain.joined(names, threshold, self.apart)
        called = Called(names, self.members, None if chain.opened is None else len(chain.opened), self.apart)
        if self.real is not None:
            opened = self.real(public, words, called)
        else:
            stays = {name for name in names if not self.lost(public.purpose, name)}
            opened = self._simulated(public, words, group, write(group.texts), called, stays, threshold)
        self.chains[group.names] = joined.settled(opened.survivors, self.apart)
        return opened

    def _simulated(
        self,
        public: PublicSum,
        words: int,
        group: Group,
        written: Entries,
        called: Called,
        stays: set[str],
        threshold: int,
    ) -> Opened:
        """Form the sum of those who stay, less those who are left out with the lost."""
        if self.settings is None:
            more = 0 if called.before is None else to_leave_out(called.before, len(stays), self.apart)
            survivors = tuple(sorted(stays)[: max(0, len(stays) - more)])
            if len(survivors) < threshold:
                raise BelowThreshold(f"{len(survivors)} of {len(called.names)} clients are left of {threshold} needed")
            return Opened(added(written, words, np.isin(group.names, survivors)), survivors)
        from keyfed.engine.sums.masked import Attendance, Costs, MaskedSum  # needs a package of its own

        attendance = Attendance(called.names, called.names)
        summed = MaskedSum(public.digest(), words, attendance, self.settings, Costs(), self.apart - 1)
        for name, vector in zip(group.names, vectors(written, words, len(group.names)), strict=True):
            if name in stays:
                summed.add(name, vector)
        if called.before is not None:
            summed.keep_apart(called.before, self.apart)
        return Opened(*summed.total())

    def moved(self) -> dict[str, int]:
        """Return the bytes one client sent, by what was summed."""
        return {purpose: 4 * words for purpose, words in self.words.items()}
