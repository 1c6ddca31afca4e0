"""Bytes a round would move over the network, from the real serialised size."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from safetensors.torch import save
from torch import Generator

from keyfed.federated.round import RoundSummary
from keyfed.federated.types import Method, Params


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what one client receives (down), uploads (up) and reports (control) in a round."""

    down: int
    up: int
    control: int


def model_bytes(params: Params) -> int:
    """Size of a model (or an upload) as it is sent: safetensors, header included."""
    return len(save(params))


def upload_bytes(method: Method, params: Params) -> int:
    """Size of an upload as the method sends it; compressed, it depends on shapes alone."""
    if method.codec is None:
        return model_bytes(params)
    packed = method.codec.pack({name: p.detach().clone() for name, p in params.items()}, Generator())
    return model_bytes({name: t.contiguous() for name, t in packed.items()})


def report_bytes(layers: Sequence[str] = (), *, joining: bool = False) -> int:
    """Size of a client's report: the scalars of `Report` as JSON at full length, a distance for each layer.

    Args:
      joining: the clients keep state, and say whether they join and with which weight.
    """
    report: dict[str, object] = {"tokens": 10**9, "loss": -1 / 3, "worked": 10**9}
    if layers:
        report["distance"] = dict.fromkeys(layers, 1 / 3)
    if joining:
        report |= {"weight": 10**9, "joining": False}
    return len(json.dumps(report).encode())


def sizes_of(method: Method, params: Params, frozen: Collection[str] = ()) -> Sizes:
    """Return the bytes one client moves in a round of a method.

    Args:
      frozen: layers that are not trained: they go down with the model, and neither they nor their distance come up.
    """
    sent = {name: p for name, p in params.items() if name not in frozen}
    layers = list(sent) if method.distance is not None else ()
    control = report_bytes(layers, joining=method.solver.start is not None)
    return Sizes(model_bytes(params), upload_bytes(method, sent), control)


def round_traffic(sizes: Sizes, called: int, summary: RoundSummary) -> dict[str, int]:
    """Return the bytes of a round.

    Down: the model to everyone called. Up: the uploads that arrived, refused ones too; who was not asked to upload
    (top-K) or vanished sent none. Control: every report, whether or not an upload followed.
    """
    arrived = len(summary.contributors) + len(summary.refused)
    return {"down": sizes.down * called, "up": sizes.up * arrived, "control": sizes.control * summary.reported}
