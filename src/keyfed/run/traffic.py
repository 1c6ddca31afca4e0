"""Bytes a round would move over the network, from the real serialised size."""

from __future__ import annotations

import json

from safetensors.torch import save

from keyfed.federated.round import RoundSummary
from keyfed.federated.types import Params


def model_bytes(params: Params) -> int:
    """Size of a model (or an upload) as it is sent: safetensors, header included."""
    return len(save(params))


def report_bytes() -> int:
    """Size of a client's report: the scalars of `Report` as JSON with full-length numbers."""
    return len(json.dumps({"tokens": 10**9, "loss": -1 / 3, "worked": 10**9}).encode())


def round_traffic(size: int, cohort: int, summary: RoundSummary) -> dict[str, int]:
    """Return bytes down (model to the whole cohort), up (uploads that arrived, refused ones too) and control."""
    arrived = len(summary.contributors) + len(summary.refused)
    return {"down": size * cohort, "up": size * arrived, "control": report_bytes() * arrived}
