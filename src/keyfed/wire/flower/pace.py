"""How long Flower waits before it looks again for a part of a message that has not arrived.

A message is announced before its parts are there. Who looks for them at once then pauses 1 s, 2 s, … up to 10 s: with
replies that are looked for several times a second that is most of the time a message takes. The pauses are defaults of
a function inside flwr 1.41.0 (pinned); where a version has no such function, its own pauses stay.
"""

from __future__ import annotations

FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0


def quicken(first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> bool:
    """Shorten the pauses in this process; return whether that could be done."""
    from flwr.supercore.inflatable import inflatable_utils

    done = False
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(inflatable_utils, name, None), "__kwdefaults__", None) or {}
        if {"initial_backoff", "backoff_cap"} <= set(defaults):
            defaults |= {"initial_backoff": first, "backoff_cap": longest}
            done = True
    return done
