"""Cohorts of clients for the tests of secure sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

import numpy as np
import pytest

from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, OneTime, SignedKeys, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors, usual_threshold

PAIR = Floors(2)


def counter(seed: str) -> Callable[[int], bytes]:
    """Return fixed test entropy: SHA-256 of the seed and a counter, byte after byte."""
    blocks, left = iter(range(1 << 40)), bytearray()

    def random(count: int) -> bytes:
        while len(left) < count:
            left.extend(sha256(f"{seed}/{next(blocks)}".encode()).digest())
        taken = bytes(left[:count])
        del left[:count]
        return taken

    return random


@cache
def identity_of(name: str) -> Identity:
    return Identity.make(counter(f"identity {name}"))


@cache
def pooled_keys(pool: str, name: str) -> tuple[bytes, SignedKeys]:
    """Make keys once for all cohorts of a pool: a test of thousands of sums would make little else."""
    one_time, signed = make_keys(identity_of(name), name, 7, counter(f"{pool} keys {name}"))
    return one_time.to_bytes(), signed


@dataclass
class Cohort:
    """Clients with keys, before a sum; the sum's parts are made on demand."""

    size: int
    threshold: int
    length: int
    context: bytes = b"model, round 1"
    pool: str | None = None  # where keys are reused from; fresh ones otherwise
    seed: str | None = None  # of the entropy within the sum; the system's otherwise
    private: dict[str, bytes] = field(default_factory=dict)
    signed: dict[str, SignedKeys] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (f"c{at}" for at in range(self.size)):
            if self.pool is not None:
                self.private[name], self.signed[name] = pooled_keys(self.pool, name)
            else:
                one_time, self.signed[name] = make_keys(identity_of(name), name, 7)
                self.private[name] = one_time.to_bytes()

    @property
    def names(self) -> list[str]:
        return list(self.signed)

    @property
    def known(self) -> dict[str, bytes]:
        return {name: identity_of(name).public for name in self.signed}

    def terms(self, **changed: object) -> SumTerms:
        settings = {"context": self.context, "threshold": self.threshold, "length": self.length, **changed}
        return SumTerms(cohort=tuple(self.signed.values()), **settings)

    def member(self, name: str, terms: SumTerms | None = None, floors: Floors = PAIR) -> Member:
        entropy = {} if self.seed is None else {"random": counter(f"{self.seed} sum {name}")}
        keys = OneTime.from_bytes(self.private[name])
        return Member(name, keys, terms or self.terms(), self.known, floors, **entropy)

    def members(self) -> dict[str, Member]:
        return {name: self.member(name) for name in self.signed}


@dataclass
class Shared:
    """A sum whose shares have been sent on."""

    members: dict[str, Member]
    collector: Collector
    alive: tuple[str, ...]
    parcels: dict[str, dict[str, bytes]]

    def upload(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sent = {name: self.members[name].masked(values[name], self.alive, self.parcels[name]) for name in values}
        for name, vector in sent.items():
            self.collector.take_masked(name, vector)
        return sent

    def answer(self, names: Iterable[str]) -> None:
        survivors = self.collector.survivors
        for name in names:
            self.collector.take_unmask(name, self.members[name].unmask(survivors))


def shared(cohort: Cohort, silent: Iterable[str] = ()) -> Shared:
    """Let everybody but the silent ones share, and send the shares on."""
    members, collector = cohort.members(), Collector(cohort.terms())
    for name in cohort.names:
        if name not in silent:
            collector.take_shares(name, members[name].shares())
    return Shared(members, collector, *collector.forward())


@pytest.fixture
def make_cohort() -> Callable[..., Cohort]:
    def make(size: int = 4, threshold: int | None = None, length: int = 8, **settings: object) -> Cohort:
        return Cohort(size, usual_threshold(size) if threshold is None else threshold, length, **settings)

    return make


@pytest.fixture
def share() -> Callable[..., Shared]:
    return shared


@pytest.fixture
def entropy() -> Callable[[str], Callable[[int], bytes]]:
    return counter
