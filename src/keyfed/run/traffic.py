"""Bytes a round would move over the network, from the real serialised size."""

from __future__ import annotations

import json
from collections.abc import Sequence

from safetensors.torch import save

from keyfed.federated.round import RoundSummary
from keyfed.federated.types import Params


def model_bytes(params: Params) -> int:
    """Size of a model (or an upload) as it is sent: safetensors, header included."""
    return len(save(params))


def report_bytes(layers: Sequence[str] = ()) -> int:
    """Size of a client's report: the scalars of `Report` as JSON at full length, a distance for each layer."""
    report: dict[str, object] = {"tokens": 10**9, "loss": -1 / 3, "worked": 10**9}
    if layers:
        report["distance"] = dict.fromkeys(layers, 1 / 3)
    return len(json.dumps(report).encode())


def round_traffic(size: int, cohort: int, summary: RoundSummary, report: int) -> dict[str, int]:
    """Return the bytes of a round.

    Down: the model to the whole cohort. Up: the uploads that arrived, refused ones too; who was not asked to upload
    (top-K) sent none. Control: every report, whether or not an upload followed.

    Args:
      size: bytes of a model or an upload.
      report: bytes of a report.
    """
    arrived = len(summary.contributors) + len(summary.refused)
    return {"down": size * cohort, "up": size * arrived, "control": report * summary.reported}
