"""What both sides of a session write and read alike: proofs, what masks are bound to, reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from keyfed.engine.task import Finished
from keyfed.federated.types import Params, Report
from keyfed.wire.messages import Rejected, number, whole_number

MOST_LOSS = 1e6  # nats per token that a report may say; a uniform guess over a million words has 14


def hello_text(name: str, run: str, nonce: str, hide_among: int) -> bytes:
    """Return what a client signs to prove who it is; the nonce is the server's, so that no old proof will do.

    Args:
      hide_among: the fewest clients of a secure sum that this client takes part in.
    """
    return json.dumps(["keyfed hello", name, run, nonce, hide_among]).encode()


def sum_context(run: str, attempt: int, about: str, part: str | None, round_context: bytes) -> bytes:
    """Return what a secure sum's masks are bound to.

    Clients that were told another configuration, vocabulary, attempt, text to evaluate, model, round or public number
    share no mask.

    Args:
      about: `device_store.about_digest` of what the run is about.
      part: the held-out text that is evaluated along; None for none.
      round_context: of `engine.sums.secure_round.context_of`.
    """
    return hashlib.sha256(json.dumps([run, attempt, about, part]).encode() + round_context).digest()


def report_head(done: Finished | Report) -> dict[str, Any]:
    """Return a report as it is sent; of training that diverged it says `MOST_LOSS`."""
    return {
        "tokens": done.tokens, "loss": min(done.loss, MOST_LOSS), "worked": done.worked,
        "distance": dict(done.distance), "weight": done.weight, "joining": done.joining,
    }  # fmt: skip


def finished_of(report: Any, layers: Mapping[str, object], upload: Params) -> Finished:
    """Read a report that came from outside; the inverse of `report_head`."""
    if not isinstance(report, dict):
        raise Rejected("malformed", "an answer without a report")
    distance = report.get("distance")
    if not isinstance(distance, dict) or not set(distance) <= set(layers):
        raise Rejected("malformed", "a report whose distances are not those of the model's layers")
    joining = report.get("joining")
    if not isinstance(joining, bool):
        raise Rejected("malformed", "a report that does not say whether its client joins")
    return Finished(
        0,
        upload,
        number(report, "loss", 0.0, MOST_LOSS),
        whole_number(report, "tokens", 0, 1 << 40),
        whole_number(report, "worked", 0, 1 << 40),
        {name: number(distance, name, 0.0) for name in distance},
        number(report, "weight", 0.0, float(1 << 40)),
        joining,
    )
