r"""Who takes part in a round and how far they get: seeds, sampling, over-selection, drop-outs, stragglers, unequal
work.

Seeds derive from (run seed, round, client, purpose) and are never carried over. Everything else is a function of
(seed, round) or (seed, client) and known before anybody trains. So a simulation repeats exactly, resumes exactly, and
does not train clients whose work would be lost. Time is *modelled*, never measured. A client downloads, predicts its
tokens at its own speed, and uploads; a client that top-K leaves out is counted as if it did:

.. math::  t_k = \text{latency} + \frac{\text{down}}{\text{rate}_↓} + \frac{\text{tokens}_k}{\text{speed}_k}
                 + \frac{\text{up}}{\text{rate}_↑}
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from keyfed.errors import ConfigError

LISTED = 10_000  # clients up to which a draw by size gives every one a key


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 62-bit seed from a run's seed and what it is for.

    Example:
      >>> derive_seed(1, "cohort", 3) == derive_seed(1, "cohort", 3)
      True
      >>> derive_seed(1, "cohort", 3) == derive_seed(1, "cohort", 4)
      False
    """
    text = "/".join(f"{type(p).__name__}:{p}" for p in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def sample_cohort(population: int, size: int, seed: int, round: int) -> list[int]:
    """Draw `size` of `population` clients uniformly without replacement, in increasing order.

    The population is never listed: a million clients cost what the cohort costs. Increasing order fixes the order of
    the sum, so that a cohort's result does not depend on who finished first.
    """
    if not 1 <= size <= population:
        raise ConfigError(
            f"a cohort of {size} cannot be drawn from {population} clients; set train.cohort between 1 and {population}"
        )
    draw = random.Random(derive_seed(seed, "cohort", round))
    return sorted(draw.sample(range(population), size))


def poisson_cohort(population: int, chance: float, seed: int, round: int) -> list[int]:
    """Call each client independently with the same chance; the cohort may be empty. In increasing order.

    The gaps between those called are geometric, so the population is never listed.
    """
    if not 0 < chance <= 1:
        raise ConfigError(f"poisson sampling with chance {chance}; expected 0 < chance ≤ 1: set train.cohort lower")
    if chance == 1:
        return list(range(population))
    draw = random.Random(derive_seed(seed, "poisson", round))
    called: list[int] = []
    at = -1
    while True:
        at += 1 + math.floor(math.log(1 - draw.random()) / math.log1p(-chance))
        if at >= population:
            return called
        called.append(at)


def sample_by_size(sizes: Sequence[int], count: int, seed: int, round: int) -> list[int]:
    """Draw `count` clients without replacement, each next one in proportion to its size; in increasing order.

    Efraimidis and Spirakis: the clients with the largest log(u)/size, u uniform, are such a draw.
    """
    if not 1 <= count <= len(sizes):
        raise ConfigError(
            f"a cohort of {count} cannot be drawn from {len(sizes)} clients; "
            f"set train.cohort between 1 and {len(sizes)}"
        )
    draw = random.Random(derive_seed(seed, "by size", round))
    keys = [math.log(1 - draw.random()) / max(size, 1e-9) for size in sizes]
    return sorted(heapq.nlargest(count, range(len(sizes)), key=keys.__getitem__))


def sample_by_place(start_of: Callable[[int], int], population: int, count: int, seed: int, round: int) -> list[int]:
    """Draw as `sample_by_size` does, without listing the population; in increasing order.

    A token drawn uniformly names its client; a client drawn before is drawn again, so that each next one comes in
    proportion to its size among those left. Where a few clients hold nearly all text this takes too many draws, and
    everybody gets a key after all.

    Args:
      start_of: place of client k's first token in the text of all; of `population`, the number of all tokens.
    """
    draw = random.Random(derive_seed(seed, "by place", round))
    chosen: set[int] = set()
    for _ in range(100 * count):
        if len(chosen) == count:
            return sorted(chosen)
        token = draw.randrange(start_of(population))
        chosen.add(bisect.bisect_right(range(population), token, key=start_of) - 1)
    sizes = [start_of(k + 1) - start_of(k) for k in range(population)]
    return sample_by_size(sizes, count, seed, round)


T = TypeVar("T")
Lost = Literal["dropped before report", "dropped before upload", "late", "not needed"]


def _option(default: T, help: str) -> T:
    declared: T = field(default=default, metadata={"help": help})
    return declared


@dataclass(frozen=True, slots=True)
class Participation:
    """Who takes part in a round, how far they get, and how long a modelled round lasts."""

    sampling: Literal["uniform", "poisson", "size"] = _option(
        "uniform", "uniform: that many, drawn alike; poisson: each client independently; size: drawn by their text"
    )
    fraction: float | None = _option(None, "share C of all clients called in a round, instead of train.cohort")
    over_select: float = _option(0.0, "call this share more clients than needed and take the first to finish")
    minimum: int = _option(1, "uploads below which a round is abandoned: counted, nothing learnt")
    drop_before: float = _option(0.0, "chance that a client vanishes before it reports")
    drop_after: float = _option(0.0, "chance that it vanishes between report and upload")
    deadline: float | None = _option(None, "modelled seconds after which the round closes; none: waits for all")
    partial: bool = _option(True, "a straggler stops early and uploads what it has; false: it is left out")
    least_epochs: int | None = _option(
        None, "each client and round draws its epochs from this to the method's; none: all"
    )
    least_work: float = _option(1.0, "each client and round does a share of its steps drawn from this to 1")
    pace_spread: float = _option(0.0, "spread (sigma of the logarithm) of clients' own step sizes")
    speed: float = _option(1000.0, "modelled tokens a second of the median client")
    speed_spread: float = _option(0.0, "spread (sigma of the logarithm) of clients' speeds")
    down_mbit: float = _option(20.0, "modelled link to a client, Mbit/s")
    up_mbit: float = _option(5.0, "modelled link from a client, Mbit/s")
    latency: float = _option(1.0, "modelled seconds to call a client and hear from it")

    def problems(self) -> list[str]:
        """Say what makes no sense, in words that name the key."""
        out = []
        for key in ("drop_before", "drop_after"):
            if not 0 <= getattr(self, key) < 1:
                out.append(f"participation.{key} is {getattr(self, key)}; expected 0 ≤ chance < 1")
        for key in ("speed", "down_mbit", "up_mbit"):
            if not 0 < getattr(self, key) < math.inf:
                out.append(f"participation.{key} is {getattr(self, key)}; expected > 0")
        for key in ("over_select", "pace_spread", "speed_spread", "latency"):
            if not 0 <= getattr(self, key) < math.inf:
                out.append(f"participation.{key} is {getattr(self, key)}; expected ≥ 0")
        for key, value in (("fraction", self.fraction), ("least_work", self.least_work)):
            if value is not None and not 0 < value <= 1:
                out.append(f"participation.{key} is {value}; expected 0 < {key} ≤ 1")
        for key, number in (("minimum", self.minimum), ("least_epochs", self.least_epochs)):
            if number is not None and number < 1:
                out.append(f"participation.{key} is {number}; at least 1")
        if self.deadline is not None and not self.deadline > self.latency:
            out.append(
                f"participation.deadline is {self.deadline}; expected more than the latency of {self.latency} seconds"
            )
        if self.over_select and self.sampling == "poisson":
            out.append("participation.over_select needs a fixed cohort; poisson sampling has none")
        return out


@dataclass(frozen=True, slots=True)
class Work:
    """How much of the local work a client does in a round.

    Attributes:
      epochs: passes over its text; None for the method's.
      share: share of the steps of those passes that it gets through.
      pace: its own factor on the step size.
    """

    epochs: int | None = None
    share: float = 1.0
    pace: float = 1.0


def eased(work: Work, halvings: int) -> Work:
    """Return the same work with the step size halved so often.

    Example:
      >>> eased(Work(pace=0.8), 2).pace
      0.2
    """
    return replace(work, pace=work.pace * 0.5**halvings) if halvings else work


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one client in one round.

    Attributes:
      seconds: modelled time until it is done, or given up.
      lost: why nothing of it is summed; None if its upload arrives.
    """

    client: int
    work: Work
    seconds: float
    lost: Lost | None = None

    @property
    def reports(self) -> bool:
        """Whether its report arrives."""
        return self.lost in (None, "dropped before upload")


@dataclass(frozen=True, slots=True)
class Plan:
    """A round before it happens: everyone called, and the modelled seconds it takes."""

    fates: tuple[Fate, ...]
    seconds: float


def cohort_size(p: Participation, cohort: int, population: int) -> int:
    """Return how many uploads a round wants: train.cohort, or the fraction C of all (at least one)."""
    return cohort if p.fraction is None else max(1, round(p.fraction * population))


def moving_seconds(p: Participation, down: int, up: int) -> float:
    """Modelled seconds to call a client and move these bytes to it and from it."""
    return p.latency + 8 * down / (p.down_mbit * 1e6) + 8 * up / (p.up_mbit * 1e6)


def draw(
    p: Participation, population: int, wanted: int, start_of: Callable[[int], int], seed: int, round: int
) -> list[int]:
    """Draw the clients that are called, in increasing order.

    Args:
      start_of: place of client k's first token in the text of all; of `population`, the number of all tokens.
    """
    if p.sampling == "poisson":
        return poisson_cohort(population, wanted / population, seed, round)
    called = min(population, math.ceil(wanted * (1 + p.over_select)))
    if p.sampling == "size":
        if population > LISTED and called <= population // 2:
            return sample_by_place(start_of, population, called, seed, round)
        sizes = [start_of(k + 1) - start_of(k) for k in range(population)]
        return sample_by_size(sizes, called, seed, round)
    return sample_cohort(population, called, seed, round)


def plan_round(
    p: Participation,
    called: list[int],
    wanted: int,
    *,
    epochs: int,
    tokens_of: Callable[[int], float],
    name_of: Callable[[int], str],
    down: int,
    up: int,
    seed: int,
    round: int,
) -> Plan:
    """Decide what becomes of every client called.

    Args:
      wanted: uploads the round wants; with over-selection the first this many to finish are taken.
      epochs: the method's local epochs.
      tokens_of: tokens client k predicts in one epoch, in expectation.
      down: bytes a client downloads; `up` those it uploads.
    """
    moving = moving_seconds(p, down, up)
    fates = [_fate(p, k, seed, name_of(k), epochs, tokens_of(k), moving, round) for k in called]
    limit = math.inf if p.deadline is None else p.deadline
    arrived = sorted((f.seconds, f.client) for f in fates if f.lost is None)
    if p.sampling != "poisson" and len(fates) > wanted and len(arrived) >= wanted:
        needed = {client for _, client in arrived[:wanted]}
        closes = arrived[wanted - 1][0]
        fates = [
            Fate(f.client, f.work, min(f.seconds, closes), "not needed")
            if f.lost is None and f.client not in needed
            else f
            for f in fates
        ]
        return Plan(tuple(fates), closes)
    # The server does not know that a client has vanished: it waits for the deadline, or (without one) until the last
    # client it called would have come.
    missing = any(f.lost is not None for f in fates)
    last = max((f.seconds for f in fates), default=0.0)
    return Plan(tuple(fates), limit if missing and limit < math.inf else last)


def _fate(
    p: Participation,
    client: int,
    seed: int,
    name: str,
    epochs: int,
    tokens: float,
    moving: float,
    round: int,
) -> Fate:
    """Draw one client's work, speed and luck. Each has its own generator: changing one option leaves the rest alone."""

    def chance(purpose: str, *more: int) -> random.Random:
        return random.Random(derive_seed(seed, "participation", purpose, name, *more))

    passes = epochs
    if p.least_epochs is not None:
        passes = chance("epochs", round).randint(min(p.least_epochs, epochs), epochs)
    share = 1.0 if p.least_work == 1 else chance("work", round).uniform(p.least_work, 1.0)
    pace = math.exp(p.pace_spread * chance("pace").gauss(0, 1)) if p.pace_spread else 1.0
    speed = p.speed * (math.exp(p.speed_spread * chance("speed").gauss(0, 1)) if p.speed_spread else 1.0)
    computing = tokens * passes * share / speed
    lost: Lost | None = None
    if p.deadline is not None and moving + computing > p.deadline:
        left = p.deadline - moving
        if p.partial and left > 0:
            share, computing = share * left / computing, left
        else:
            lost = "late"
    seconds = min(moving + computing, math.inf if p.deadline is None else p.deadline)
    if p.drop_before and chance("before", round).random() < p.drop_before:
        lost = "dropped before report"
    elif lost is None and p.drop_after and chance("after", round).random() < p.drop_after:
        lost = "dropped before upload"
    return Fate(client, Work(None if passes == epochs else passes, share, pace), seconds, lost)
