"""What travels in a secure sum, byte by byte, and the keys behind it. Everything is bound to the digest of the terms.

    package   commitment to the sender's seed (32) | hashes of both shares (64) | nonce (12) | AES-256-GCM of both
              shares (66 + 16)
    answer    tag of terms, alive and survivors (32) | one share (33) per member alive, by place

The key of a package serves one direction between two clients, the associated data name digest, sender, addressee,
commitment and hashes. The commitment lets the server recognise a seed that was restored from wrong shares. The hashes
let it recognise a wrong share: an addressee that takes a package has checked them, so a share that does not fit its
hash is the addressee's lie, and shares that fit and do not give the secret are the sender's. Seeds and keys are random
numbers of 256 bits, and so is every share as long as fewer than the threshold are known: a hash gives nothing away.

A mask is a vector of 32-bit words from a key, added modulo 2³². It is the keystream of AES-256 in counter mode from an
all-zero counter block, read as little-endian words (NIST SP 800-38A §6.5). Unsigned words of numpy wrap by themselves,
so the ring needs no further arithmetic. A key makes one mask: it must never be used for a second vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from keyfed.errors import SecureSumError
from keyfed.private.secagg.keys import KEY_BYTES, derive, framed
from keyfed.private.secagg.shamir import SHARE_BYTES, is_share

HASH_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
OPEN_BYTES = 3 * HASH_BYTES  # of a package, what the server reads: commitment and hashes
PACKAGE_BYTES = OPEN_BYTES + NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


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
    head = committed + b"".join(_hashes(shares, digest, sender, addressee))
    key, bound = _channel(agreed, digest, sender, addressee, head)
    return head + nonce + AESGCM(key).encrypt(nonce, b"".join(shares), bound)


def unseal(agreed: bytes, digest: bytes, sender: str, addressee: str, package: bytes) -> tuple[bytes, bytes]:
    """Decrypt a package; one that is not exactly as the sender sealed it for this sum is an error."""
    head, nonce = package[:OPEN_BYTES], package[OPEN_BYTES : OPEN_BYTES + NONCE_BYTES]
    try:
        if len(package) != PACKAGE_BYTES:
            raise InvalidTag
        key, bound = _channel(agreed, digest, sender, addressee, head)
        both = AESGCM(key).decrypt(nonce, package[OPEN_BYTES + NONCE_BYTES :], bound)
    except InvalidTag:
        raise SecureSumError(f"the shares from {sender} to {addressee} were altered or belong to other terms") from None
    shares = both[:SHARE_BYTES], both[SHARE_BYTES:]
    if _hashes(shares, digest, sender, addressee) != hashes_in(package) or not all(map(is_share, shares)):
        raise SecureSumError(f"the shares from {sender} to {addressee} are not those that it committed to")
    return shares


def share_hash(share: bytes, which: int, digest: bytes, sender: str, addressee: str) -> bytes:
    """Return the hash by which a share is recognised: of the sender's seed (which = 0) or of its mask key (1)."""
    what = (b"seed", b"mask key")[which]
    return sha256(framed(b"keyfed share", digest, sender.encode(), addressee.encode(), what, share)).digest()


def _hashes(shares: tuple[bytes, bytes], digest: bytes, sender: str, addressee: str) -> tuple[bytes, bytes]:
    return share_hash(shares[0], 0, digest, sender, addressee), share_hash(shares[1], 1, digest, sender, addressee)


def hashes_in(package: bytes) -> tuple[bytes, bytes]:
    """Return the hashes of both shares that a package has in the open."""
    return package[HASH_BYTES : 2 * HASH_BYTES], package[2 * HASH_BYTES : OPEN_BYTES]


def package_text(digest: bytes, sender: str, addressee: str, package: bytes) -> bytes:
    """Return what a sender signs of a package: only what it signed can be held against it."""
    return framed(b"keyfed package 1", digest, sender.encode(), addressee.encode(), package)


def answer_tag(digest: bytes, alive: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return the hash that opens an answer: an answer to another question is recognised."""
    lists = (framed(*(name.encode() for name in names)) for names in (alive, survivors))
    return sha256(framed(b"keyfed unmask", digest, *lists)).digest()


def _channel(agreed: bytes, digest: bytes, sender: str, addressee: str, head: bytes) -> tuple[bytes, bytes]:
    names = (sender.encode(), addressee.encode())
    return derive(agreed, b"keyfed share channel", digest, *names), framed(digest, *names, head)


CHUNK = 1 << 15  # words: the keystream and its part of the vector stay in a core's cache
_ZEROS = bytes(4 * CHUNK)
_SLACK = 15  # `update_into` wants room for one block less a byte beyond its input


def add_mask(vector: NDArray[np.uint32], key: bytes, sign: Literal[1, -1]) -> None:
    """Add (`sign` 1) or take away (-1) a key's mask, in place, modulo 2³².

    Works chunk by chunk: needs no memory beyond two chunks, whatever the vector's length.

    Example:
      >>> mask = np.zeros(2, np.uint32)
      >>> add_mask(mask, bytes(32), 1)
      >>> mask.tolist()
      [2025887196, 2307473570]
    """
    if len(key) != KEY_BYTES:
        raise SecureSumError(f"a mask's key has {KEY_BYTES} bytes, not {len(key)}")
    if vector.dtype != np.uint32 or vector.ndim != 1:
        raise SecureSumError(
            f"masks are added to a vector of uint32, not to {vector.dtype} of {vector.ndim} dimensions"
        )
    if sign not in (1, -1):
        raise SecureSumError(f"a mask's sign is 1 or -1, not {sign}")
    combine = np.add if sign == 1 else np.subtract
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    room = bytearray(4 * min(CHUNK, len(vector)) + _SLACK)
    words = np.frombuffer(room, dtype="<u4", count=min(CHUNK, len(vector)))
    zeros = memoryview(_ZEROS)
    for start in range(0, len(vector), CHUNK):
        chunk = vector[start : start + CHUNK]
        stream.update_into(zeros[: 4 * len(chunk)], room)
        combine(chunk, words[: len(chunk)], out=chunk)
