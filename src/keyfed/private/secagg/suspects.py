r"""Who spoils secure sums: liars that are proved, and liars that are found by splitting the cohort.

Some lies are proved by what was sent (`Lied.by`). A vector that spoils its sum is not: the server cannot look at it.
What is known is a set of clients, those whose vectors were in the spoilt sum, and that one of them at least lied. Let F
be all such sets. The *explanations* of F are the smallest sets of clients that meet every set in F,

.. math:: E = \arg\min_{H} \{|H| : H ∩ F_i ≠ ∅ \;\; ∀ i\}

and a client that is in every explanation is shut out. If no more clients lie than the fewest that can explain F, each
client shut out is a liar: the liars among F meet every F_i, so they are an explanation. With one liar that always
holds, whatever it does and when; no honest client is then ever shut out. Liars that act together can break it: they
can blame a client that is in every sum they spoil (docs/secure.md has numbers). A client that was shut out so is let in
again as soon as it is not in every explanation.

After two spoilt sums that nothing else explains, every round's cohort is split into one group more than the liars that
explain them, suspects spread evenly, by a hash of round and name. Each group forms its own sum, so a client's upload of
a round is in one sum at most, and at least one group is without a liar and commits. No group is smaller than what
clients hide among; a cohort of fewer than two such groups is not split. The groups of a round are disjoint and, as one
commits, the next split is of another model: no difference of sums over one model is a sum over fewer clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

Client = str
Group = frozenset[Client]

BEFORE_SPLIT = 2  # spoilt sums before a cohort is split
MOST_LIARS = 3  # that an explanation may have
MOST_SPOILT = 64  # sums remembered
MOST_WORK = 100_000  # sets looked at to explain them


@dataclass(slots=True)
class Suspects:
    """What a run knows of liars; part of its checkpoint.

    Attributes:
      proved: clients that were proved to lie, and how.
      spoilt: the clients of every sum that one of them spoilt, the oldest first.
    """

    proved: dict[Client, str] = field(default_factory=dict)
    spoilt: list[Group] = field(default_factory=list)

    def prove(self, client: Client, how: str) -> None:
        """Remember a lie that is proved; the first one counts."""
        self.proved.setdefault(client, how)

    def spoil(self, among: Iterable[Client]) -> None:
        """Remember a sum that one of these clients spoilt."""
        self.spoilt = [*self.spoilt, frozenset(among)][-MOST_SPOILT:]

    def unexplained(self) -> tuple[Group, ...]:
        """Return the spoilt sums without a client that is proved to lie."""
        return tuple(group for group in self.spoilt if group and not group & set(self.proved))

    def shut_out(self) -> dict[Client, str]:
        """Return who is called no more, and why."""
        every = explanations(self.unexplained())
        found = frozenset.intersection(*every) if every else frozenset()
        return {**{name: f"in every sum that was spoilt ({len(self.spoilt)})" for name in sorted(found)}, **self.proved}

    def groups(self, cohort: Sequence[Client], least: int, draw: str) -> list[list[Client]]:
        """Split a round's cohort where there is a liar to find; else return it whole.

        Args:
          least: clients in the smallest group.
          draw: public, and another one every round; who meets whom follows from it.
        """
        count = min(self.sums_wanted(), len(cohort) // least)
        if count < 2:
            return [list(cohort)]
        suspects = frozenset.union(*explanations(self.unexplained()))
        ordered = sorted(cohort, key=lambda name: (name not in suspects, sha256(f"{draw}/{name}".encode()).digest()))
        parted = [set(ordered[at::count]) for at in range(count)]
        return [[name for name in cohort if name in group] for group in parted]

    def sums_wanted(self) -> int:
        """Return how many disjoint groups of a cohort are wanted: one more than there are liars, or one."""
        spoilt = self.unexplained()
        every = explanations(spoilt)
        return 1 if len(spoilt) < BEFORE_SPLIT or len(every) < 2 else 1 + len(every[0])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; empty where no client is suspected."""
        if not self.proved and not self.spoilt:
            return {}
        return {"proved": dict(self.proved), "spoilt": [sorted(group) for group in self.spoilt]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Suspects:
        """Read what `to_json` gave."""
        proved = {str(name): str(how) for name, how in data.get("proved", {}).items()}
        return cls(proved, [frozenset(map(str, group)) for group in data.get("spoilt", [])])


@lru_cache(maxsize=16)
def explanations(spoilt: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return all smallest sets of clients that meet every spoilt sum; the oldest sums are let go if there are none.

    At most `MOST_LIARS` clients explain, found with at most `MOST_WORK` sets looked at.

    Example:
      >>> groups = frozenset("abcd"), frozenset("ab"), frozenset("ac")
      >>> [sorted(e) for e in explanations(groups)]
      [['a']]
      >>> sorted(sorted(e) for e in explanations((frozenset("ab"), frozenset("cd"))))
      [['a', 'c'], ['a', 'd'], ['b', 'c'], ['b', 'd']]
    """
    while spoilt:
        distinct = sorted(set(spoilt), key=lambda group: (len(group), sorted(group)))
        work = 1
        for size, group in enumerate(distinct[:MOST_LIARS], 1):
            if work > MOST_WORK:
                break
            found = _meeting(distinct, size)
            if found:
                return tuple(sorted(found, key=sorted))
            work *= len(group)
        spoilt = spoilt[1:]
    return ()


def _meeting(groups: Sequence[Group], size: int) -> set[Group]:
    """Return the sets of at most so many clients that meet every group."""
    if not groups:
        return {frozenset()}
    if size == 1:
        return {frozenset([name]) for name in frozenset.intersection(*groups)}
    return {
        rest | {name}
        for name in groups[0]
        for rest in _meeting([group for group in groups if name not in group], size - 1)
    }
