"""How many examples Hypothesis draws: few by default, all with KEYFED_EXAMPLES=deep."""

from __future__ import annotations

import os

DEEP = os.environ.get("KEYFED_EXAMPLES") == "deep"
MOST = 25


def examples(count: int) -> int:
    """Return `count` if all are asked for, else 25 at most.

    >>> examples(3)
    3
    """
    return count if DEEP else min(count, MOST)
