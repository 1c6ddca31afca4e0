"""The secure sum a second time, written from its description in plain integers: no library but SHA-256 and HMAC.

Slow, and good for nothing but comparing bytes: AES-256, GCM, X25519, HKDF and Shamir as their standards say.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

P25519, FIELD = 2**255 - 19, 2**256 + 297


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(frame(*parts)).digest()


def frame(*parts: bytes) -> bytes:
    return b"".join(len(p).to_bytes(8, "big") + p for p in parts)


def hkdf(secret: bytes, *info: bytes) -> bytes:
    """RFC 5869, one block, no salt."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, frame(*info) + b"\x01", "sha256")


def x25519(private: bytes, public: bytes) -> bytes:
    """RFC 7748 section 5, the Montgomery ladder."""
    k = int.from_bytes(private, "little") & ~7 & ~(1 << 255) | (1 << 254)
    u = int.from_bytes(public, "little") & ((1 << 255) - 1)
    x2, z2, x3, z3 = 1, 0, u, 1
    for bit in reversed(range(255)):
        if swap := k >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % P25519, u * (da - cb) ** 2 % P25519
        x2, z2 = aa * bb % P25519, e * (aa + 121665 * e) % P25519
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, P25519) % P25519).to_bytes(32, "little")


def _times(a: int, b: int) -> int:
    """Multiply in AES's field of bytes."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = (a << 1) ^ (0x11B if a & 0x80 else 0), b >> 1
    return product


def _sbox() -> list[int]:
    box = []
    for x in range(256):
        inverse = next((y for y in range(256) if _times(x, y) == 1), 0)
        turned = 0x63
        for shift in range(5):
            turned ^= (inverse << shift | inverse >> (8 - shift)) & 0xFF
        box.append(turned)
    return box


SBOX = _sbox()


def aes(key: bytes, block: bytes) -> bytes:
    """FIPS 197, 256-bit key, one block."""
    words, constant = [list(key[i : i + 4]) for i in range(0, 32, 4)], 1
    for i in range(8, 60):
        word = words[-1]
        if i % 8 == 0:
            word = [SBOX[b] for b in word[1:] + word[:1]]
            word[0] ^= constant
            constant = _times(constant, 2)
        elif i % 8 == 4:
            word = [SBOX[b] for b in word]
        words.append([a ^ b for a, b in zip(words[i - 8], word, strict=True)])
    rounds = [[byte for word in words[i : i + 4] for byte in word] for i in range(0, 60, 4)]
    state = [a ^ b for a, b in zip(block, rounds[0], strict=True)]
    for number in range(1, 15):
        state = [SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16)]
        if number < 14:
            columns = [state[i : i + 4] for i in range(0, 16, 4)]
            state = [
                _times(c[r], 2) ^ _times(c[(r + 1) % 4], 3) ^ c[(r + 2) % 4] ^ c[(r + 3) % 4]
                for c in columns
                for r in range(4)
            ]
        state = [a ^ b for a, b in zip(state, rounds[number], strict=True)]
    return bytes(state)


def keystream(key: bytes, start: int, count: int) -> bytes:
    blocks = (aes(key, (start + i).to_bytes(16, "big")) for i in range(-(-count // 16)))
    return b"".join(blocks)[:count]


def gcm(key: bytes, nonce: bytes, plain: bytes, bound: bytes) -> bytes:
    """SP 800-38D with a 12-byte nonce: ciphertext and tag."""
    start = int.from_bytes(nonce + bytes([0, 0, 0, 1]), "big")
    cipher = bytes(a ^ b for a, b in zip(plain, keystream(key, start + 1, len(plain)), strict=True))
    padded = (part + bytes(-len(part) % 16) for part in (bound, cipher))
    lengths = (8 * len(bound)).to_bytes(8, "big") + (8 * len(cipher)).to_bytes(8, "big")
    data, h, y = b"".join(padded) + lengths, int.from_bytes(aes(key, bytes(16)), "big"), 0
    for at in range(0, len(data), 16):
        y, x, v = 0, y ^ int.from_bytes(data[at : at + 16], "big"), h
        for bit in reversed(range(128)):
            y ^= v if x >> bit & 1 else 0
            v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
    return cipher + (y ^ int.from_bytes(keystream(key, start, 16), "big")).to_bytes(16, "big")


def shares_of(secret: bytes, threshold: int, count: int, random: Callable[[int], bytes]) -> list[bytes]:
    """Shamir's shares of places 1 … count; the coefficient of the highest power is drawn first."""
    noise = random(48 * (threshold - 1))
    powers = [int.from_bytes(noise[48 * i : 48 * i + 48], "big") for i in range(threshold - 1)][::-1]
    whole = int.from_bytes(secret, "big")
    values = ((whole + sum(a * x ** (i + 1) for i, a in enumerate(powers))) % FIELD for x in range(1, count + 1))
    return [value.to_bytes(33, "big") for value in values]


class SlowSum:
    """One sum of everybody, from all private keys and everybody's entropy."""

    def __init__(
        self,
        context: bytes,
        threshold: int,
        length: int,
        private: dict[str, tuple[int, bytes, bytes]],
        entropy: Callable[[str], Callable[[int], bytes]],
    ) -> None:
        self.names, self.length, self.private = sorted(private), length, private
        base = (9).to_bytes(32, "little")
        self.public = {n: (x25519(mask, base), x25519(channel, base)) for n, (_, mask, channel) in private.items()}
        members = [p for n in self.names for p in (n.encode(), private[n][0].to_bytes(8, "big"), *self.public[n])]
        ratio = min(16, threshold - 1)
        numbers = [number.to_bytes(8, "big") for number in (threshold, ratio, length, len(self.names))]
        self.digest = sha(b"keyfed secure sum 2", context, *numbers, *members)
        self.seed, self.shares, self.packages = {}, {}, {}
        for name in self.names:
            random = entropy(name)
            self.seed[name] = random(32)
            of_seed = shares_of(self.seed[name], threshold, len(self.names), random)
            of_mask = shares_of(private[name][1], threshold, len(self.names), random)
            self.shares[name] = dict(zip(self.names, zip(of_seed, of_mask, strict=True), strict=True))
            others = [other for other in self.names if other != name]
            self.packages[name] = {other: self._package(name, other, random(12)) for other in others}

    def _package(self, sender: str, to: str, nonce: bytes) -> bytes:
        names = (sender.encode(), to.encode())
        committed = sha(b"keyfed seed commitment", self.digest, names[0], self.seed[sender])
        agreed = x25519(self.private[sender][2], self.public[to][1])
        key = hkdf(agreed, b"keyfed share channel", self.digest, *names)
        pair = zip((b"seed", b"mask key"), self.shares[sender][to], strict=True)
        head = committed + b"".join(sha(b"keyfed share", self.digest, *names, what, share) for what, share in pair)
        plain = b"".join(self.shares[sender][to])
        return head + nonce + gcm(key, nonce, plain, frame(self.digest, *names, head))

    def masked(self, name: str, values: Sequence[int], alive: Sequence[str]) -> list[int]:
        """The values and four ones, own mask added, masks with later names added, with earlier ones taken away."""
        own = hkdf(self.seed[name], b"keyfed self mask", self.digest, name.encode())
        keys = [(own, 1)]
        for other in alive:
            if other != name:
                agreed = x25519(self.private[name][1], self.public[other][0])
                both = sorted((name.encode(), other.encode()))
                keys.append((hkdf(agreed, b"keyfed pair mask", self.digest, *both), 1 if name < other else -1))
        words = [*values, 1, 1, 1, 1]
        for key, sign in keys:
            stream = keystream(key, 0, 4 * len(words))
            words = [
                (w + sign * int.from_bytes(stream[4 * i : 4 * i + 4], "little")) % 2**32 for i, w in enumerate(words)
            ]
        return words

    def answer(self, name: str, alive: Sequence[str], survivors: Sequence[str]) -> bytes:
        lists = [frame(*(n.encode() for n in names)) for names in (alive, survivors)]
        tag = sha(b"keyfed unmask", self.digest, *lists)
        return tag + b"".join(self.shares[of][name][0 if of in survivors else 1] for of in alive)
