"""Why a client is left out of a round; who only reads a log of rounds needs no tensors for it."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    # what a client sends cannot be right
    "non-finite report", "non-finite upload", "exploding upload", "wrong shape", "wrong type", "wrong tensors",
    "malformed", "too large", "wrong round", "no text", "out of range",
    "does not fit", "against the others",
    # who sends it
    "not enrolled", "not signed",
    # it sent what no honest client sends, and is shut out of the run
    "lied",
    # no answer came
    "no answer", "not delivered", "unreachable", "client error",
    # the client does not want to, or cannot
    "not now", "not secure", "refused by client", "identity changed", "stale", "other model", "other method",
    "non-finite model", "unknown run", "restarted", "state lost", "summed before", "too soon",
    "other protocol",
    # a limit that the client's owner has set
    "over limit", "over budget", "hides among more", "strangers",
]  # fmt: skip
