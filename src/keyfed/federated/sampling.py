"""Seeds and cohorts: derived from (run seed, round, client, purpose), never carried along.

A restart at round t draws exactly what an uninterrupted run would have drawn.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
import random
from collections.abc import Callable, Sequence

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
