"""The server's side of a secure sum: it learns who stayed, and the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from keyfed.errors import BelowThreshold, Lied, SecureSumError
from keyfed.private.secagg import shamir
from keyfed.private.secagg.accusation import shown_key
from keyfed.private.secagg.keys import agree, framed
from keyfed.private.secagg.nested import to_leave_out
from keyfed.private.secagg.terms import CHECK_WORDS, SumTerms
from keyfed.private.secagg.threshold import least_alive
from keyfed.private.secagg.wire import (
    HASH_BYTES,
    PACKAGE_BYTES,
    add_mask,
    answer_tag,
    commitment,
    hashes_in,
    pair_key,
    self_key,
    share_hash,
    unseal,
)


class Collector:
    """One secure sum at the server: `take_shares`…, `forward`, `take_masked`…, `survivors`, `take_unmask`…, `total`.

    A message that does not fit (unknown client, second one, late, wrong size) is an error and leaves the sum as it was:
    the client counts as lost. Uploads are added as they come, so memory is one vector. Signatures are not looked at:
    the server checks them (`keys.verify`) when the keys are posted.

    Args:
      reserve: uploads that are held back, those of the last clients by name: as many can still be left out
        (`keep_apart`). Memory is one vector more for each.
    """

    def __init__(self, terms: SumTerms, reserve: int = 0) -> None:
        self.terms = terms
        self._reserve, self._waiting = reserve, dict[str, NDArray[np.uint32]]()
        self._digest, self._places, self._keys = terms.digest(), terms.places(), terms.keys_of()
        self._packages: dict[str, dict[str, bytes]] = {}
        self._commitments: dict[str, bytes] = {}
        self._alive: tuple[str, ...] | None = None
        self._uploaded: set[str] = set()
        self._sum: NDArray[np.uint32] | None = None
        self._survivors: tuple[str, ...] | None = None
        self._answers: dict[str, dict[str, bytes]] = {}
        self._total: NDArray[np.uint32] | None = None

    def take_shares(self, client: str, packages: Mapping[str, bytes]) -> None:
        self._check_known(client)
        if self._alive is not None:
            raise SecureSumError(f"the shares of {client} came after those of the others were sent on: it is left out")
        if client in self._packages:
            raise SecureSumError(f"{client} sent its shares twice; the first ones count")
        if set(packages) != set(self._places) - {client}:
            raise SecureSumError(f"{client} sent shares for {len(packages)} clients, not for exactly all the others")
        if any(len(package) != PACKAGE_BYTES for package in packages.values()):
            raise SecureSumError(f"{client} sent a package of shares that is not {PACKAGE_BYTES} bytes long")
        commitments = {package[:HASH_BYTES] for package in packages.values()}
        if len(commitments) > 1:
            raise SecureSumError(f"{client} sent different commitments to different clients")
        self._packages[client] = dict(packages)
        self._commitments[client] = next(iter(commitments), b"")

    def forward(self) -> tuple[tuple[str, ...], dict[str, dict[str, bytes]]]:
        """Settle who is alive; return them and, for each, the packages of the others to it."""
        if self._alive is None:
            least = least_alive(len(self._places), self.terms.threshold)  # with fewer every client would refuse
            self._check_enough(len(self._packages), "sent their shares", least)
            self._alive = tuple(sorted(self._packages))
        alive = self._alive
        return alive, {to: {by: self._packages[by][to] for by in alive if by != to} for to in alive}

    def take_masked(self, client: str, vector: NDArray[np.uint32]) -> None:
        self._check_known(client)
        if self._alive is None or client not in self._alive:
            raise SecureSumError(f"{client} uploaded without being among the clients alive: it is left out")
        if self._survivors is not None:
            raise SecureSumError(f"the upload of {client} came after the survivors were settled: it is left out")
        if client in self._uploaded:
            raise SecureSumError(f"{client} uploaded twice; the first upload counts")
        if vector.dtype != np.uint32 or vector.shape != (self.terms.sent_length,):
            got = f"{vector.dtype} {list(vector.shape)}"
            raise SecureSumError(f"{client} uploaded {got}; a masked vector is uint32 [{self.terms.sent_length}]")
        self._sum = np.zeros(self.terms.sent_length, dtype=np.uint32) if self._sum is None else self._sum
        self._waiting[client] = vector
        if len(self._waiting) > self._reserve:
            self._sum += self._waiting.pop(min(self._waiting))
        self._uploaded.add(client)

    def keep_apart(self, before: int, apart: int) -> None:
        """Leave out the last of those who uploaded, by name, where fewer than `apart` are gone since an earlier sum.

        Args:
          before: clients of the earlier sum; all members of this one are among them (`private.secagg.nested`).
        """
        for name in sorted(self._uploaded, reverse=True)[: to_leave_out(before, len(self._uploaded), apart)]:
            del self._waiting[name]
            self._uploaded.remove(name)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Everybody whose vector is in the sum. Reading it settles them: later uploads are left out."""
        if self._survivors is None:
            self._check_enough(len(self._uploaded), "uploaded", self.terms.threshold)
            self._survivors = tuple(sorted(self._uploaded))
            for name in sorted(self._waiting):
                assert self._sum is not None, "somebody uploaded"
                self._sum += self._waiting.pop(name)
        return self._survivors

    @property
    def stayed(self) -> tuple[int, int | None, int | None]:
        """How many shared their keys, uploaded and helped to open so far; None for a message that was not sent yet."""
        uploaded = None if self._alive is None else len(self._uploaded)
        return len(self._packages), uploaded, None if self._survivors is None else len(self._answers)

    def take_unmask(self, client: str, data: bytes) -> None:
        self._check_known(client)
        if self._survivors is None or self._alive is None or client not in self._survivors:
            raise SecureSumError(f"{client} answered without being asked to help to open the sum")
        if client in self._answers:
            raise SecureSumError(f"{client} answered twice; the first answer counts")
        size = HASH_BYTES + shamir.SHARE_BYTES * len(self._alive)
        if len(data) != size:
            raise SecureSumError(f"{client} answered {len(data)} bytes; the shares of this sum are {size}")
        if data[:HASH_BYTES] != answer_tag(self._digest, self._alive, self._survivors):
            raise SecureSumError(f"{client} answered for other terms or other survivors")
        starts = range(HASH_BYTES, size, shamir.SHARE_BYTES)
        shares = (data[start : start + shamir.SHARE_BYTES] for start in starts)
        answered = dict(zip(self._alive, shares, strict=True))
        wrong = [of for of, share in answered.items() if of != client and not self._fits(share, of, client)]
        if wrong:
            raise Lied(f"{client} answered another share of {wrong[0]} than it was sent and took", by=[client])
        self._answers[client] = answered

    def package(self, sender: str, addressee: str) -> bytes | None:
        """Return a package that was sent on; None if there is no such package."""
        alive = self._alive or ()
        return self._packages[sender].get(addressee) if sender in alive and addressee in alive else None

    def judge(self, accuser: str, accused: str, shown: bytes) -> tuple[str, str]:
        """Return who lied, and how, where one client accuses another of a package that does not open.

        Args:
          shown: the pair's key and its proof, see `private.secagg.accusation`.
        """
        package = self.package(accused, accuser)
        if package is None:
            return accuser, f"it accuses {accused[:80]}, of which it was sent nothing"
        bound = framed(self._digest, accuser.encode(), accused.encode())
        try:
            agreed = shown_key(self._keys[accuser].channel, self._keys[accused].channel, bound, shown)
        except SecureSumError as error:
            return accuser, f"it accuses {accused} with {error}"
        try:
            unseal(agreed, self._digest, accused, accuser, package)
        except SecureSumError as error:
            return accused, str(error)
        return accuser, f"it accuses {accused} of shares that are in order"

    def _fits(self, share: bytes, of: str, client: str) -> bool:
        """Say whether a share is the one whose hash its dealer gave with the package to this client."""
        assert self._survivors is not None, "answers follow the survivors"
        which = 0 if of in self._survivors else 1
        return share_hash(share, which, self._digest, of, client) == hashes_in(self._packages[of][client])[which]

    def total(self) -> NDArray[np.uint32]:
        r"""Return the sum of the survivors' values modulo 2³², or raise and reveal nothing.

        .. math:: \sum_{k \in S} x_k = \sum_{k \in S} y_k - \sum_{k \in S} G(b_k)
                  - \sum_{k \in S, j \in L} \pm G(s_{kj})

        with S the survivors and L the members alive but lost. Every restored seed is compared with its commitment and
        every restored key with its public half, so wrong shares give an error, never a wrong sum. As long as it fails
        for want of answers, more of them may be taken and it may be called again.

        Raises:
          Lied: a member sent shares of another secret (it is named), or the masks of the survivors do not cancel.
        """
        if self._total is None:
            if self._survivors is None or self._alive is None:
                raise SecureSumError("the sum cannot be opened before its survivors are settled")
            self._check_enough(len(self._answers), "answered to open the sum", self.terms.threshold)
            lost = [name for name in self._alive if name not in self._survivors]
            seeds = {name: self._seed(name) for name in self._survivors}
            masks = {name: self._mask(name) for name in lost}
            self._total = self._opened(seeds, masks)
        return self._total

    def _opened(self, seeds: Mapping[str, bytes], masks: Mapping[str, X25519PrivateKey]) -> NDArray[np.uint32]:
        if self._sum is None:
            raise SecureSumError("this sum failed before and was thrown away")
        opened, self._sum = self._sum, None
        for name, seed in seeds.items():
            add_mask(opened, self_key(seed, self._digest, name), -1)
        for gone, private in masks.items():
            for name in seeds:
                key = pair_key(agree(private, self._keys[name].mask), self._digest, name, gone)
                add_mask(opened, key, -1 if name < gone else 1)
        if (opened[-CHECK_WORDS:] != len(seeds)).any():
            raise Lied(
                f"the masks of {', '.join(seeds)} do not cancel: one of them was told other terms or another list of "
                "clients, or sent a vector of another sum; nothing was opened",
                among=seeds,
            )
        return opened[:-CHECK_WORDS]

    def _seed(self, name: str) -> bytes:
        right = self._commitments[name]
        return self._restored(name, "seed", lambda seed: commitment(seed, self._digest, name) == right)

    def _mask(self, name: str) -> X25519PrivateKey:
        right, private = self._keys[name].mask, X25519PrivateKey.from_private_bytes
        return private(
            self._restored(name, "mask key", lambda key: private(key).public_key().public_bytes_raw() == right)
        )

    def _restored(self, name: str, what: str, right: Callable[[bytes], bool]) -> bytes:
        """Join the first shares of a member's secret; all are as that member sent them, or its own.

        So if they do not give the secret it committed to, it sent shares of something else, or lied about its own.
        One set of shares is joined for each secret, the same for all: its weights are computed once.
        """
        shares = {self._places[one]: self._answers[one][name] for one in sorted(self._answers)}
        try:
            secret = shamir.join(shares, self.terms.threshold)
        except SecureSumError:
            secret = b""
        if not secret or not right(secret):
            raise Lied(
                f"the {what} of {name} does not follow from the answers of {', '.join(sorted(self._answers))}: "
                f"{name} shared it wrongly; nothing was opened",
                by=[name],
            )
        return secret

    def _check_known(self, client: str) -> None:
        if client not in self._places:
            raise SecureSumError(f"{client} is not in the cohort of this sum")

    def _check_enough(self, count: int, what: str, least: int) -> None:
        if count < least:
            raise BelowThreshold(
                f"{count} of {len(self._places)} clients {what}; {least} are needed at the threshold "
                f"{self.terms.threshold}: the sum stays hidden; try again with a new cohort"
            )
