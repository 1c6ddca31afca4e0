"""Masks: vectors of 32-bit words from a key, added modulo 2³².

A mask is the keystream of AES-256 in counter mode from an all-zero counter block, read as little-endian words (NIST
SP 800-38A §6.5). Unsigned words of numpy wrap by themselves, so the ring needs no further arithmetic. A key makes one
mask: whoever calls must never use it for a second vector.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from keyfed.errors import SecureSumError

KEY_BYTES = 32
CHUNK = 1 << 15  # words: the keystream and its part of the vector stay in a core's cache
_ZEROS = bytes(4 * CHUNK)
_SLACK = 15  # `update_into` wants room for one block less a byte beyond its input


def expand(key: bytes, count: int) -> NDArray[np.uint32]:
    """Return the first `count` words of a key's mask.

    Example:
      >>> expand(bytes(32), 2).tolist()
      [2025887196, 2307473570]
    """
    if count < 0:
        raise SecureSumError(f"a mask of {count} words was asked for; it has 0 or more")
    mask = np.zeros(count, dtype=np.uint32)
    add_mask(mask, key, 1)
    return mask


def add_mask(vector: NDArray[np.uint32], key: bytes, sign: Literal[1, -1]) -> None:
    """Add (`sign` 1) or take away (-1) a key's mask, in place, modulo 2³².

    Works chunk by chunk: needs no memory beyond two chunks, whatever the vector's length.
    """
    if len(key) != KEY_BYTES:
        raise SecureSumError(f"a mask's key has {KEY_BYTES} bytes, not {len(key)}")
    if vector.dtype != np.uint32 or vector.ndim != 1:
        raise SecureSumError(
            f"masks are added to a vector of uint32, not to {vector.dtype} of {vector.ndim} dimensions"
        )
    if sign not in (1, -1):
        raise SecureSumError(f"a mask's sign is 1 or -1, not {sign}")
    turn = np.add if sign == 1 else np.subtract
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    room = bytearray(4 * min(CHUNK, len(vector)) + _SLACK)
    words = np.frombuffer(room, dtype="<u4", count=min(CHUNK, len(vector)))
    zeros = memoryview(_ZEROS)
    for start in range(0, len(vector), CHUNK):
        part = vector[start : start + CHUNK]
        stream.update_into(zeros[: 4 * len(part)], room)
        turn(part, words[: len(part)], out=part)
