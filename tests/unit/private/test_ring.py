"""Masks against published vectors."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import SecureSumError
from keyfed.private.secagg import wire as masks

# NIST CAVP, AESAVS appendix: ECB of a zero block is the first block of our keystream (variable key, 256 bits).
VARIABLE_KEY = [
    ("8000000000000000000000000000000000000000000000000000000000000000", "e35a6dcb19b201a01ebcfa8aa22b5759"),
    ("c000000000000000000000000000000000000000000000000000000000000000", "b29169cdcf2d83e838125a12ee6aa400"),
    ("ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "4bf85f1b5d54adbc307b0a048389adcb"),
]
# NIST SP 800-38A F.5.5, CTR-AES256: counter block, plaintext, ciphertext.
SP_KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
SP_COUNTER = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
SP_PLAIN = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
SP_CIPHER = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"


def expanded(key: bytes, count: int) -> np.ndarray:
    """The first words of a key's mask."""
    mask = np.zeros(count, np.uint32)
    masks.add_mask(mask, key, 1)
    return mask


@pytest.mark.parametrize(("key", "block"), VARIABLE_KEY, ids=["one bit", "two bits", "all bits"])
def test_the_first_block_is_aes_of_the_zero_counter(key, block):
    assert expanded(bytes.fromhex(key), 4).astype("<u4").tobytes().hex() == block


def test_the_cipher_underneath_counts_as_sp_800_38a_says():
    stream = Cipher(algorithms.AES256(bytes.fromhex(SP_KEY)), modes.CTR(bytes.fromhex(SP_COUNTER))).encryptor()
    assert stream.update(bytes.fromhex(SP_PLAIN)).hex() == SP_CIPHER


def test_block_i_is_aes_of_the_counter_i():
    key = bytes(range(32))
    blocks = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    counters = b"".join(i.to_bytes(16, "big") for i in range(300))
    assert expanded(key, 1200).astype("<u4").tobytes() == blocks.update(counters)


@pytest.mark.parametrize("count", [0, 1, 3, masks.CHUNK - 1, masks.CHUNK, masks.CHUNK + 1, 2 * masks.CHUNK + 5])
def test_chunks_change_nothing(count):
    stream = Cipher(algorithms.AES256(bytes(32)), modes.CTR(bytes(16))).encryptor()
    assert expanded(bytes(32), count).astype("<u4").tobytes() == stream.update(bytes(4 * count))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_adding_and_taking_away_cancel_modulo_two_to_the_32(key, words):
    vector = np.array(words, dtype=np.uint32)
    masks.add_mask(vector, key, 1)
    wrapped = [(word + int(mask)) % 2**32 for word, mask in zip(words, expanded(key, len(words)), strict=True)]
    assert vector.tolist() == wrapped
    masks.add_mask(vector, key, -1)
    assert vector.tolist() == words


def test_a_part_of_a_larger_vector_is_masked_in_place():
    whole = np.zeros(10, np.uint32)
    masks.add_mask(whole[2:6], bytes(32), 1)
    assert whole.tolist() == [0, 0, *expanded(bytes(32), 4).tolist(), 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("vector", "key", "sign", "says"),
    [
        (np.zeros(2, np.uint32), bytes(16), 1, "32 bytes, not 16"),
        (np.zeros(2, np.int64), bytes(32), 1, "int64"),
        (np.zeros((2, 2), np.uint32), bytes(32), 1, "2 dimensions"),
        (np.zeros(2, np.uint32), bytes(32), 0, "not 0"),
    ],
    ids=["key", "dtype", "shape", "sign"],
)
def test_what_is_no_mask_is_an_error(vector, key, sign, says):
    with pytest.raises(SecureSumError, match=says):
        masks.add_mask(vector, key, sign)
