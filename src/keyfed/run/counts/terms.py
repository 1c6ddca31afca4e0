"""The terms of a count: what can be counted at all, and the plan that follows from public numbers."""

from __future__ import annotations

from keyfed.config.schema import CountsConfig
from keyfed.errors import ConfigError
from keyfed.model.counts import LEAST_K
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.run.counts.levels import DEPTH, MOST_ORDER, CountPlan, sketches_of

MOST_MEGABYTES = 1_000  # of a client's sketches; a machine that plays the sums needs eight times as much
REMOTE_CAP, REMOTE_MOST, REMOTE_MEGABYTES = 1_000, 100_000, 256  # that a real client takes at most


def refuse_terms(how: CountsConfig, said: str = "--") -> None:
    """Raise ConfigError where the numbers of a count make no sense.

    Args:
      said: what stands before the name of an option.
    """
    if how.k < LEAST_K:
        raise ConfigError(
            f"{said}k is {how.k}; expected {LEAST_K} or more: with two, a client that writes an n-gram learns whether "
            "another one did"
        )
    if not 1 <= how.order <= MOST_ORDER:
        raise ConfigError(f"{said}order is {how.order}; the sketches hold n-grams of 1 to {MOST_ORDER} words")
    if how.cap < 1 or how.most < 1:
        raise ConfigError(f"{said}cap is {how.cap} and {said}most is {how.most}; expected 1 or more")
    if not 0 < how.megabytes <= MOST_MEGABYTES:
        raise ConfigError(
            f"{said}megabytes is {how.megabytes:g}; expected a number above 0, {MOST_MEGABYTES:,} at most"
        )


def refuse_remote_terms(how: CountsConfig) -> None:
    """Raise ConfigError for a count that no real client takes part in; client and server both look."""
    refuse_terms(how, "counts.")
    for name, got, most in (
        ("cap", how.cap, REMOTE_CAP),
        ("most", how.most, REMOTE_MOST),
        ("megabytes", how.megabytes, REMOTE_MEGABYTES),
        ("among", how.among, MOST_MEMBERS),
    ):
        if got > most:
            raise ConfigError(f"counts.{name} is {got:,}; real clients take {most:,} at most")


def refuse_small_sketches(how: CountsConfig, vocab: int, least: int) -> None:
    """Raise ConfigError where the budget has no room for one sketch, however many clients come to be counted.

    Args:
      least: the fewest clients of a sum: a few more than `among` can form one (`gather.groups_of`).
    """
    sketches_of(how.megabytes * 1e6, how.order, max(how.among, 2 * least - 1), vocab, 0, DEPTH, said="counts.")


def plan_of(how: CountsConfig, vocab_sha256: str, members: int, vocab: int, seed: int, depth: int) -> CountPlan:
    """Return the plan of a count whose largest sum has so many members."""
    sketches = sketches_of(how.megabytes * 1e6, how.order, members, vocab, seed, depth)
    return CountPlan(how.order, how.k, how.cap, how.most, vocab_sha256, sketches)
