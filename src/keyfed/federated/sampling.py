"""Seeds and cohorts: derived from (run seed, round, client, purpose), never carried along.

A restart at round t draws exactly what an uninterrupted run would have drawn.
"""

from __future__ import annotations

import hashlib
import random

from keyfed.errors import ConfigError


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
