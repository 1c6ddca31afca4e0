"""A client in a count: what it checks of one sum, and what it holds between its messages.

A sum is three messages: count, upload, unmask. The first says what is summed, by which public numbers, and has the
clients' keys; the others are those of any secure sum (`wire.client`).

The terms of a count are in the run's configuration, so every client has them alike and before anything is counted.
What a client writes of its text for a sum is written once in a run. Which n-grams were released of a length is the same
in all sums of a run, or the client takes no further part. Of the sums of one text it remembers who was in them, and
opens none whose difference to an earlier one would be of a few clients (`private.secagg.nested`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from keyfed.engine.sums.codec import Vector
from keyfed.federated.types import Params
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.member import Member
from keyfed.wire.limits import MOST_COUNT_FILE
from keyfed.wire.messages import Rejected, Shapes, sum_context, whole_number

LARGEST = "largest"
TEXTS = {"recount": "train", "sketch": "train", "smoothing": "valid", "mixture": "valid", "test": "test"}


class CountWriter(Protocol):
    """One client's text under the terms of a run's count."""

    @property
    def least(self) -> int:
        """The fewest clients of a sum, by the terms: an n-gram's k."""
        ...

    def expects(self, purpose: str, sizes: Mapping[str, int]) -> Shapes:
        """Return what the tensors of a sum look like.

        Args:
          sizes: of the public numbers, as the server says.

        Raises:
          Rejected: there is no such sum, or it is larger than this client allows.
        """
        ...

    def vector(self, purpose: str, numbers: Params, largest: int) -> Vector:
        """Write this client's vector.

        Args:
          largest: clients of the largest sum of the count, from which the layout of cells follows.

        Raises:
          Rejected: the public numbers are not those of an honest count.
        """
        ...

    def released(self, numbers: Params) -> Mapping[str, str]:
        """Return a hash of what was released of each length, as these public numbers have it."""
        ...


@dataclass(slots=True)
class CountRound:
    """What a session holds between the messages of a sum of a count.

    Attributes:
      vector: what it writes.
      apart: clients that two sums of its text differ by at least.
    """

    run: str
    round: int
    attempt: int
    purpose: str
    vector: Vector
    member: Member
    apart: int
    sent: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """What every answer of the sum says."""
        return {"run": self.run, "round": self.round, "attempt": self.attempt}


def noted_as(purpose: str) -> tuple[int, str, str]:
    """Return what a client notes of a sum before its vector leaves: each is written once in a run, in any round."""
    return -1, "evaluation", f"count/{purpose}"


def text_of(purpose: str) -> str:
    """Return which text a sum is of, `train`, `valid` or `test`: its sums are of the same statistics.

    Args:
      purpose: of a sum that is known (`CountWriter.expects`).
    """
    return TEXTS[purpose.partition(" ")[0]]


def sizes_of(head: Mapping[str, Any]) -> dict[str, int]:
    """Return how many numbers each of a sum's tensors has, as the server says."""
    sizes = head.get("sizes")
    if not isinstance(sizes, dict):
        raise Rejected("malformed", "a sum of a count without the sizes of its numbers")
    return {str(name): whole_number(sizes, name, 1, MOST_COUNT_FILE) for name in sizes}


def largest_of(head: Mapping[str, Any]) -> int:
    """Return how many clients the largest sum of a count has, as the server says; never fewer than this one's."""
    members = whole_number(head, "members", 1, MOST_MEMBERS)
    return whole_number(head, LARGEST, members, MOST_MEMBERS)


def count_context(run: str, attempt: int, about: str, purpose: str, largest: int, numbers: str) -> bytes:
    """Return what the masks of a sum are bound to.

    Args:
      about: `messages.about_digest` of the run, which has the terms of the count.
      numbers: `messages.digest_of` the public numbers.
    """
    return sum_context(run, attempt, about, f"count/{purpose}/{largest}", bytes.fromhex(numbers))
