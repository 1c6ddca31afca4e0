r"""Clients that lie in secure sums: an accusation that a server can check, and the search for a liar by splitting.

Client i received a package from j that does not open, or holds other shares than j committed to. It shows the secret
that the two channel keys agree on, K = a_i A_j, and proves that it is that secret (Chaum and Pedersen, made
non-interactive by a hash):

.. math:: \log_{8B} A_i = \log_{8 A_j} K, \qquad
          R_1 = r·8B,\; R_2 = r·8A_j,\; c = H(\dots, R_1, R_2),\; z = r + c m \bmod ℓ, \quad a_i = 8m

The server computes R₁ = z·8B − cA_i and R₂ = z·8A_j − cK, compares the hash, and opens the package itself. If it opens
to shares that fit their hashes, the accuser lied; otherwise the sender did. No third client can be blamed.

What the server learns. K opens two packages: that of j to i, and that of i to j. A client accuses only if the package
carries the signature of j (`Member.masked`). So an honest j is never accused by an honest i, and a server cannot make
honest clients show keys by altering packages. Nor is a key shown that tells of an honest pair: A_j could be 2 A_k, so
that K is twice the secret of i and k. A client accuses only if j has proved that it knows the private half of A_j
(`keys.is_possessed`); then j can compute K itself. The package of i to a liar j holds shares that j has anyway, of
secrets of a client that sends no vector in this sum. The private key of i is not shown: packages of all others to i
stay closed. So the number of shares that a server and its colluding clients hold of any upload is the same with and
without accusations. Besides, a sum in which a key was shown is not opened.

A vector that spoils its sum proves nothing: the server cannot look at it. What is known is a set of clients, those
whose vectors were in the spoilt sum, and that one of them at least lied. Let F be all such sets. The *explanations* of
F are the smallest sets of clients that meet every set in F,

.. math:: E = \arg\min_{H} \{|H| : H ∩ F_i ≠ ∅ \;\; ∀ i\}

and a client that is in every explanation is shut out. If no more clients lie than the fewest that can explain F, each
client shut out is a liar: the liars among F meet every F_i, so they are an explanation. With one liar that always
holds; no honest client is then ever shut out. Liars that act together can break it: they can blame a client that is in
every sum they spoil (docs/secure.md has numbers). A client that was shut out so is let in again as soon as it is not in
every explanation.

After two spoilt sums that nothing else explains, every round's cohort is split into one group more than the liars that
explain them. A hash of round and name spreads suspects evenly. Each group forms its own sum, so a client's upload of
a round is in one sum at most, and at least one group is without a liar and commits. No group is smaller than what
clients hide among; a cohort of fewer than two such groups is not split. The groups of a round are disjoint and, as one
commits, the next split is of another model: no difference of sums over one model is a sum over fewer clients.

References:
  Chaum and Pedersen, *Wallet Databases with Observers*, CRYPTO 1992.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256, sha512
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from keyfed.errors import SecureSumError
from keyfed.private.secagg.keys import (
    BASE,
    FIELD,
    ORDER,
    ZERO,
    Point,
    Random,
    clamped,
    framed,
    in_group,
    lifted,
    packed,
    plus,
    same,
    times,
    unpacked,
)

EVIDENCE_BYTES = 96  # the agreed point, c, z
_NONCE_BYTES = 64  # reduced modulo the order: within 2⁻²⁵⁹ of uniform


def evidence(private: X25519PrivateKey, accused: bytes, bound: bytes, random: Random = os.urandom) -> bytes:
    """Show what a private key and the public key of the accused agree on, with the proof.

    Args:
      bound: what the proof is for; it proves nothing about another sum or another pair.
    """
    own = lifted(private.public_key().public_bytes_raw())
    other = lifted(accused)
    if own is None or other is None:
        raise SecureSumError(f"the X25519 key {accused.hex()} is not on the curve: there is nothing to prove")
    base, point = times(8, BASE), times(8, other)
    secret = clamped(private.private_bytes_raw()) // 8 % ORDER
    if not same(times(secret, base), own):  # the lifted point is one of ±A: take the sign that fits
        secret = ORDER - secret
    agreed = times(secret, point)
    nonce = int.from_bytes(random(_NONCE_BYTES), "little") % ORDER
    challenge = _challenge(bound, own, point, agreed, times(nonce, base), times(nonce, point))
    answer = (nonce + challenge * secret) % ORDER
    return packed(agreed) + challenge.to_bytes(32, "little") + answer.to_bytes(32, "little")


def shown_key(accuser: bytes, accused: bytes, bound: bytes, shown: bytes) -> bytes:
    """Return the 32 bytes that the pair's channel keys agree on (`keys.agree`), if the proof holds; else raise."""
    own, other = lifted(accuser), lifted(accused)
    agreed = unpacked(shown[:32]) if len(shown) == EVIDENCE_BYTES else None
    if own is None or other is None or agreed is None:
        raise SecureSumError("evidence that is not a point of the curve with its proof")
    challenge, answer = (int.from_bytes(shown[at : at + 32], "little") for at in (32, 64))
    base, point = times(8, BASE), times(8, other)
    if not (in_group(own) and in_group(agreed)) or same(point, ZERO):
        raise SecureSumError("evidence with a point outside the group of the base point")
    first = plus(times(answer, base), times(ORDER - challenge % ORDER, own))
    second = plus(times(answer, point), times(ORDER - challenge % ORDER, agreed))
    if challenge != _challenge(bound, own, point, agreed, first, second):
        raise SecureSumError("evidence whose proof does not hold: the key is not that of the pair")
    _, y, z, _ = agreed
    return ((z + y) * pow(z - y, -1, FIELD) % FIELD).to_bytes(32, "little")


def is_usable(public: bytes) -> bool:
    """Say whether an X25519 public key lies on the curve (not on its twist) and is not of low order.

    Every key that a private key has is usable. Another one only serves to make others refuse.
    """
    point = lifted(public)
    return point is not None and not same(times(8, point), ZERO)


def _challenge(bound: bytes, *points: Point) -> int:
    data = framed(b"keyfed accusation 1", bound, *(packed(p) for p in points))
    return int.from_bytes(sha512(data).digest(), "little") % ORDER


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
        self.proved.setdefault(client, how)

    def spoil(self, among: Iterable[Client]) -> None:
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
          draw: public, and another one every round; it decides who is in which group.
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
