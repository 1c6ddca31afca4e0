"""The client's side of a secure sum."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from keyfed.errors import Refused, SecureSumError
from keyfed.private.secagg import shamir
from keyfed.private.secagg.accusation import evidence
from keyfed.private.secagg.keys import OneTime, Random, agree, framed, is_possessed, is_signature
from keyfed.private.secagg.terms import CHECK_WORDS, SumTerms, check_terms
from keyfed.private.secagg.threshold import Floors, least_alive
from keyfed.private.secagg.wire import (
    NONCE_BYTES,
    add_mask,
    answer_tag,
    commitment,
    package_text,
    pair_key,
    seal,
    self_key,
    unseal,
)

Stage = Literal["new", "shared", "masked", "over"]
SEED_BYTES = 32
USUAL_FLOORS = Floors()


@dataclass(slots=True, repr=False)
class _Secrets:
    """What a member holds between its shares and its upload."""

    mask: X25519PrivateKey
    seed: bytes
    own: tuple[bytes, bytes]
    agreed: dict[str, bytes]
    channel: X25519PrivateKey


class Member:
    """One client in one secure sum: `shares`, then `masked`, then `unmask`, each once.

    Refuses (`Refused`, one line) whatever could show its values: terms below its floors, keys that are not signed by
    the identities it knows, a package that does not open, lists that do not fit, every second call. Where a package
    does not open, it names the sender and sends no vector. If the sender signed that package, it gives the evidence of
    `private.secagg.accusation`. A call at the wrong time is refused and changes nothing, so a duplicated message does
    no harm; a call with wrong content ends the sum for this client. Secrets are forgotten as soon as they are not
    needed: seed and keys after the upload, held shares after `unmask`, everything on failure. Python cannot promise
    that their memory is overwritten.
    """

    def __init__(
        self,
        me: str,
        keys: OneTime,
        terms: SumTerms,
        identities: Mapping[str, bytes],
        floors: Floors = USUAL_FLOORS,
        random: Random = os.urandom,
    ) -> None:
        check_terms(me, keys, terms, identities, floors)
        self.me, self.terms = me, terms
        self._digest, self._places, self._keys = terms.digest(), terms.places(), terms.keys_of()
        self._identities = {name: identities[name] for name in terms.names}
        self._least = max(terms.threshold, floors.cohort)
        self._random = random
        self._stage: Stage = "new"
        self._pair: tuple[X25519PrivateKey, X25519PrivateKey] | None = self._take(keys)
        self._secrets: _Secrets | None = None
        self._held: dict[str, tuple[bytes, bytes]] = {}

    def shares(self) -> dict[str, bytes]:
        """Return an encrypted package for every other member: shares of a fresh seed and of the mask key."""
        self._step("new", "shared")
        with self._ending_on_failure():
            assert self._pair is not None
            (mask, channel), self._pair = self._pair, None
            seed, places = self._random(SEED_BYTES), list(self._places.values())
            of_seed = shamir.split(seed, self.terms.threshold, places, self._random)
            of_mask = shamir.split(mask.private_bytes_raw(), self.terms.threshold, places, self._random)
            pairs = {name: (of_seed[place], of_mask[place]) for name, place in self._places.items()}
            agreed = {
                name: self._agree(channel, name, keys.channel) for name, keys in self._keys.items() if name != self.me
            }
            committed = commitment(seed, self._digest, self.me)
            self._secrets = _Secrets(mask, seed, pairs[self.me], agreed, channel)
            return {
                name: seal(key, self._digest, self.me, name, committed, pairs[name], self._random(NONCE_BYTES))
                for name, key in agreed.items()
            }

    def masked(
        self,
        values: NDArray[np.uint32],
        alive: Sequence[str],
        received: Mapping[str, bytes],
        signatures: Mapping[str, bytes] | None = None,
    ) -> NDArray[np.uint32]:
        r"""Return the values hidden under the masks, `CHECK_WORDS` longer than they are.

        .. math:: y_k = x_k + G(b_k) + \sum_{j > k} G(s_{kj}) - \sum_{j < k} G(s_{kj}) \bmod 2^{32}

        over the members alive, with b the seed, s the pair's key and G the mask of a key.

        Args:
          signatures: of the senders under their packages (`wire.package_text`). They are looked at where a package does
            not open: no key is shown of a pair whose sender did not sign.
        """
        self._step("shared", "masked")
        with self._ending_on_failure():
            assert self._secrets is not None
            secrets, self._secrets = self._secrets, None
            self._check_values(values)
            others = [name for name in self._checked_list("alive", alive, self._places) if name != self.me]
            self._check_lists_cannot_open(len(alive))
            if set(received) != set(others):
                wrong = sorted(set(received) ^ set(others))
                raise Refused(f"{self.me} refuses to upload: shares missing from, or not due from, {', '.join(wrong)}")
            signed = signatures or {}
            self._held = {name: self._open(secrets, name, received[name], signed.get(name, b"")) for name in others}
            self._held[self.me] = secrets.own
            sent = np.ones(self.terms.sent_length, dtype=np.uint32)
            sent[:-CHECK_WORDS] = values
            add_mask(sent, self_key(secrets.seed, self._digest, self.me), 1)
            for name in others:
                agreed = self._agree(secrets.mask, name, self._keys[name].mask)
                add_mask(sent, pair_key(agreed, self._digest, self.me, name), 1 if self.me < name else -1)
            return sent

    def unmask(self, survivors: Sequence[str]) -> bytes:
        """Return one share per member alive: of a survivor's seed, of a lost member's mask key, never of both."""
        self._step("masked", "over")
        with self._ending_on_failure():
            held, self._held = self._held, {}
            alive = sorted(held)
            stayed = self._checked_list("survivors", survivors, held)
            shares = (held[name][0 if name in stayed else 1] for name in alive)
            return answer_tag(self._digest, alive, stayed) + b"".join(shares)

    def forget(self) -> None:
        """Drop every secret: the sum is over for this client."""
        self._stage = "over"
        self._pair, self._secrets, self._held = None, None, {}

    def _take(self, keys: OneTime) -> tuple[X25519PrivateKey, X25519PrivateKey]:
        try:
            return keys.take()
        except SecureSumError as error:
            raise Refused(f"{self.me} refuses a second sum: {error}") from error

    def _step(self, due: Stage, then: Stage) -> None:
        if self._stage != due:
            raise Refused(f"{self.me} refuses a call out of turn: this sum is {self._stage}, the call wants it {due}")
        self._stage = then

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def _agree(self, private: X25519PrivateKey, name: str, public: bytes) -> bytes:
        try:
            return agree(private, public)
        except SecureSumError as error:
            raise Refused(f"{self.me} refuses {name}: {error}", accused=name) from error

    def _open(self, secrets: _Secrets, sender: str, package: bytes, signature: bytes) -> tuple[bytes, bytes]:
        try:
            return unseal(secrets.agreed[sender], self._digest, sender, self.me, package)
        except SecureSumError as error:
            shown = None
            text = package_text(self._digest, sender, self.me, package)
            own = is_signature(signature, text, self._identities[sender])
            if own and is_possessed(self._keys[sender]):  # else the key may be made from an honest client's
                bound = framed(self._digest, self.me.encode(), sender.encode())
                shown = evidence(secrets.channel, self._keys[sender].channel, bound, self._random)
            raise Refused(f"{self.me} refuses to upload: {error}", sender, shown) from error

    def _checked_list(self, what: str, names: Sequence[str], known: Mapping[str, object]) -> list[str]:
        """Return the names sorted, if they are distinct, known, enough, and this client is among them."""
        if len(set(names)) != len(names):
            raise Refused(f"{self.me} refuses a list of {what} that names a client twice: {', '.join(sorted(names))}")
        if strangers := sorted(set(names) - set(known)):
            raise Refused(f"{self.me} refuses {what} it does not know from before: {', '.join(strangers)}")
        if len(names) < self._least:
            raise Refused(f"{self.me} refuses {len(names)} {what}: its floor and the threshold want {self._least}")
        if self.me not in names:
            raise Refused(f"{self.me} refuses a list of {what} without itself")
        return sorted(names)

    def _check_lists_cannot_open(self, alive: int) -> None:
        members, threshold = len(self._places), self.terms.threshold
        if alive < (least := least_alive(members, threshold)):
            raise Refused(
                f"{self.me} refuses to upload among {alive} alive of {members}: at the threshold {threshold} a server "
                f"that tells clients different lists could open its values; it wants {least}, or a higher threshold"
            )

    def _check_values(self, values: NDArray[np.uint32]) -> None:
        if values.dtype != np.uint32 or values.shape != (self.terms.length,):
            got = f"{values.dtype} {list(values.shape)}"
            raise SecureSumError(f"{self.me}: the values to hide are {got}, the terms say uint32 [{self.terms.length}]")
