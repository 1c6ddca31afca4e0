"""What everybody who takes part in one secure sum has to agree on, and when a client refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from keyfed.errors import Refused, SecureSumError
from keyfed.private.secagg.keys import SERIAL_BYTES, OneTime, SignedKeys, framed, verify
from keyfed.private.secagg.threshold import Floors, most_ratio

PROTOCOL = b"keyfed secure sum 2"
CHECK_WORDS = 4  # words behind the values; every client puts a one into each, so 128 bits say whether the masks cancel


@dataclass(frozen=True, slots=True)
class SumTerms:
    """One secure sum: who takes part with which keys, over how many words, and how many have to stay.

    `context` stands for everything else the clients must agree on: the hash of the model, the round, the configuration.
    The cohort is kept sorted by name; a client's place in it, counted from 1, is the place of its shares.
    """

    context: bytes
    cohort: tuple[SignedKeys, ...]
    threshold: int
    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cohort", tuple(sorted(self.cohort, key=lambda keys: keys.client)))
        _distinct("client", self.names)
        _distinct("public key", [key.hex() for keys in self.cohort for key in (keys.mask, keys.channel)])
        if not 1 <= self.threshold <= len(self.cohort):
            raise SecureSumError(f"a threshold of {self.threshold} in a cohort of {len(self.cohort)} clients")
        if not 1 <= self.length < 1 << 48:
            raise SecureSumError(f"a secure sum over {self.length} words; at least one is needed")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(keys.client for keys in self.cohort)

    @property
    def ratio(self) -> int:
        """How many times the least scale of a layer the largest may be: from the threshold, never from the server."""
        return most_ratio(self.threshold)

    @property
    def sent_length(self) -> int:
        """Words of a masked vector: the values and the words that show whether the masks cancel."""
        return self.length + CHECK_WORDS

    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names, 1)}

    def keys_of(self) -> dict[str, SignedKeys]:
        return {keys.client: keys for keys in self.cohort}

    def digest(self) -> bytes:
        """Return the SHA-256 of protocol, context, threshold, ratio, length and every member's name and public keys.

        Every mask, package and answer is bound to it: clients that got different terms share no mask.
        """
        numbers = (number.to_bytes(8, "big") for number in (self.threshold, self.ratio, self.length, len(self.cohort)))
        members = (
            part
            for keys in self.cohort
            for part in (keys.client.encode(), keys.serial.to_bytes(SERIAL_BYTES, "big"), keys.mask, keys.channel)
        )
        return sha256(framed(PROTOCOL, self.context, *numbers, *members)).digest()


def check_terms(me: str, keys: OneTime, terms: SumTerms, identities: Mapping[str, bytes], floors: Floors) -> None:
    """Raise `Refused` unless a client can safely take part in a sum on these terms."""
    members = len(terms.cohort)
    if members < floors.cohort:
        raise Refused(f"{me} refuses a cohort of {members}: it takes part among {floors.cohort} or more")
    if 2 * terms.threshold <= members:
        raise Refused(f"{me} refuses the threshold {terms.threshold} of {members}: it has to be more than half")
    if terms.threshold < floors.cohort:
        raise Refused(
            f"{me} refuses the threshold {terms.threshold}: so many could open a sum, and it takes part among "
            f"{floors.cohort} or more"
        )
    own = terms.keys_of().get(me)
    if own is None or (own.serial, own.mask, own.channel) != (keys.serial, keys.mask_public, keys.channel_public):
        what = "are missing" if own is None else "were altered"
        raise Refused(f"{me} refuses the cohort: its own one-time keys (serial {keys.serial}) {what}")
    for member in terms.cohort:
        if member.client not in identities:
            raise Refused(f"{me} refuses {member.client}: no identity of that client is known here")
        try:
            verify(member, identities[member.client])
        except SecureSumError as error:
            raise Refused(f"{me} refuses the cohort: {error}") from error
    if len({identities[name] for name in terms.names}) != members:
        raise Refused(f"{me} refuses the cohort: two of its clients have the same identity")


def _distinct(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise SecureSumError(f"the {what} {value} stands twice in one cohort")
        seen.add(value)
