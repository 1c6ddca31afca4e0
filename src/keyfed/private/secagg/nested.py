"""Sums of one text, one after the other: what their members and survivors may be, so that no difference shows a client.

A client's n-grams are summed several times in a count. Where two sums are of the same statistic and their survivors
differ by one client, their difference is that client's. So every client remembers the sums that it was in (`Chain`). It
refuses a later one unless all of this holds.

- *Nested*: cohort and survivors are within the survivors of every earlier sum.
- *Apart*: the survivors are those of an earlier sum, or fewer by as many as a client hides among.
- *Majority*: more than half of the first cohort survive.
- *Quorum*: t + t' > n for the thresholds t and t' of two sums and the cohort n of the earlier one.

Opened sums then form one chain S₁ ⊇ S₂ ⊇ …, of which each step loses no client or `apart` clients or more. A linear
combination of the sums weighs all clients of a step alike. So none is of fewer clients than that, however many sums
there are. The server may send clients different lists. By the quorum two opened sums have an honest client in common
that has both lists as they are. By the majority no two later sums are of disjoint clients. Clients that collude with
the server count as if they were not there, as in every sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keyfed.errors import Refused


def to_leave_out(before: int, stayed: int, apart: int) -> int:
    """Return how many more clients a server leaves out, so that two sums differ by no client or by enough.

    Args:
      before: clients of the sum before; `stayed`: those of them who uploaded.

    Example:
      >>> [to_leave_out(12, stayed, apart=3) for stayed in (12, 11, 10, 9)]
      [0, 2, 1, 0]
    """
    return apart - (before - stayed) if 0 < before - stayed < apart else 0


@dataclass(frozen=True, slots=True)
class Chain:
    """What is remembered of the sums of one text.

    Attributes:
      first: clients of the first cohort.
      spare: the most by which a cohort was larger than its threshold.
      within: who may be in another sum; None before the first.
      opened: the survivors of the last sum that was opened, as far as is known; None for none.
    """

    first: int = 0
    spare: int = 0
    within: frozenset[str] | None = None
    opened: frozenset[str] | None = None

    def joined(self, cohort: Iterable[str], threshold: int, apart: int) -> Chain:
        """Return what is remembered after a sum was joined.

        Raises:
          Refused: the cohort or its threshold do not fit to the sums before.
        """
        members = frozenset(cohort)
        if self.within is None:
            return Chain(len(members), len(members) - threshold, members)
        if strangers := members - self.within:
            raise Refused(
                f"{len(strangers)} of the {len(members)} clients were not in an earlier sum of the same text to its end"
            )
        if threshold <= self.spare:
            raise Refused(
                f"the threshold {threshold} of a later sum of the same text: {self.spare + 1} or more are needed, so "
                "that both sums have a client in common that knows both lists"
            )
        least = max(threshold, self._majority)
        if self.opened is not None and members != self.opened and len(self.opened) - apart < least:
            raise Refused(
                f"a sum of {len(members)} clients after one of {len(self.opened)}, of the same text: they have to be "
                f"the same clients, or {apart} fewer with {least} left: their difference would show what a few wrote"
            )
        return Chain(self.first, max(self.spare, len(members) - threshold), members, self.opened)

    def settled(self, survivors: Iterable[str], apart: int) -> Chain:
        """Return what is remembered where the survivors are known, before a share of them is shown.

        Raises:
          Refused: by the survivors of an earlier sum and these, a few clients stand alone.
        """
        stayed = frozenset(survivors)
        if not stayed <= (stayed if self.within is None else self.within):
            raise Refused("survivors that were not in an earlier sum of the same text to its end")
        if len(stayed) < self._majority:
            raise Refused(
                f"{len(stayed)} survivors of a text of which {self.first} clients began: {self._majority} are needed"
            )
        gone = 0 if self.opened is None else len(self.opened - stayed)
        if 0 < gone < apart:
            raise Refused(
                f"the survivors lack {gone} of the clients of an earlier sum of the same text: the difference of the "
                f"two would show what fewer than {apart} clients wrote"
            )
        return Chain(self.first, self.spare, stayed, stayed)

    @property
    def _majority(self) -> int:
        return self.first // 2 + 1

    def to_json(self) -> dict[str, Any]:
        """Return it as `from_json` reads it."""
        named = {"within": self.within, "opened": self.opened}
        lists = {name: None if found is None else sorted(found) for name, found in named.items()}
        return {"first": self.first, "spare": self.spare, **lists}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Chain:
        """Read what `to_json` wrote; ValueError, TypeError or KeyError for anything else."""
        lists = [found["within"], found["opened"]]
        if not all(one is None or all(isinstance(name, str) for name in one) for one in lists):
            raise ValueError("expected lists of names")
        within, opened = (None if one is None else frozenset(one) for one in lists)
        return cls(int(found["first"]), int(found["spare"]), within, opened)
