"""What travels in a secure sum, byte by byte, and the keys behind it. Everything is bound to the digest of the terms.

    package   commitment to the sender's seed (32) | nonce (12) | AES-256-GCM of both shares (66 + 16)
    answer    tag of terms, alive and survivors (32) | one share (33) per member alive, by place

The key of a package serves one direction between two clients, the associated data name digest, sender, addressee and
commitment. The commitment lets the server recognise a seed that was restored from wrong shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyfed.errors import SecureSumError
from keyfed.private.keys import derive, framed
from keyfed.private.shamir import SHARE_BYTES

HASH_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
PACKAGE_BYTES = HASH_BYTES + NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


def pair_key(agreed: bytes, digest: bytes, one: str, other: str) -> bytes:
    """Return the key of the mask between two clients from what their mask keys agree on; the order does not matter."""
    return derive(agreed, b"keyfed pair mask", digest, *(name.encode() for name in sorted((one, other))))


def self_key(seed: bytes, digest: bytes, name: str) -> bytes:
    """Return the key of a client's own mask from its fresh 32-byte seed."""
    return derive(seed, b"keyfed self mask", digest, name.encode())


def commitment(seed: bytes, digest: bytes, name: str) -> bytes:
    """Return the hash by which a client's seed is recognised in this sum only; 256 random bits stay hidden in it."""
    return sha256(framed(b"keyfed seed commitment", digest, name.encode(), seed)).digest()


def seal(
    agreed: bytes,
    digest: bytes,
    sender: str,
    addressee: str,
    committed: bytes,
    shares: tuple[bytes, bytes],
    nonce: bytes,
) -> bytes:
    """Encrypt (share of the seed, share of the mask key) for one other client."""
    key, bound = _channel(agreed, digest, sender, addressee, committed)
    return committed + nonce + AESGCM(key).encrypt(nonce, b"".join(shares), bound)


def unseal(agreed: bytes, digest: bytes, sender: str, addressee: str, package: bytes) -> tuple[bytes, bytes]:
    """Decrypt a package; one that is not exactly as the sender sealed it for this sum is an error."""
    committed, nonce = package[:HASH_BYTES], package[HASH_BYTES : HASH_BYTES + NONCE_BYTES]
    try:
        if len(package) != PACKAGE_BYTES:
            raise InvalidTag
        key, bound = _channel(agreed, digest, sender, addressee, committed)
        shares = AESGCM(key).decrypt(nonce, package[HASH_BYTES + NONCE_BYTES :], bound)
    except InvalidTag:
        raise SecureSumError(f"the shares from {sender} to {addressee} were altered or belong to other terms") from None
    return shares[:SHARE_BYTES], shares[SHARE_BYTES:]


def answer_tag(digest: bytes, alive: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return the hash that opens an answer: an answer to another question is recognised."""
    lists = (framed(*(name.encode() for name in names)) for names in (alive, survivors))
    return sha256(framed(b"keyfed unmask", digest, *lists)).digest()


def _channel(agreed: bytes, digest: bytes, sender: str, addressee: str, committed: bytes) -> tuple[bytes, bytes]:
    names = (sender.encode(), addressee.encode())
    return derive(agreed, b"keyfed share channel", digest, *names), framed(digest, *names, committed)
