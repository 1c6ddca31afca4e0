"""Two small secure sums from beginning to end, with fixed entropy: what Python's members and the page's must both say.

`transcript.json` holds every key, package, masked vector and answer. Of the four clients one is lost after its shares.
One sum is of an ordinary round, one of a private round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.secure_round import vector_of
from keyfed.engine.task import Finished
from keyfed.federated.methods import build_method
from keyfed.federated.public.rules import privately
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Share
from keyfed.model.output import Score
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors
from keyfed.wire.promise import Promise
from tests.unit.private.conftest import counter

TRANSCRIPT = Path(__file__).with_name("transcript.json")
NAMES, LOST, THRESHOLD, SERIAL = ["ann", "bøb", "c0", "\U0001f600"], "c0", 3, 7
LAYERS = {"rnn.weight": (3, 4), "output.bias": (5,)}
PUBLIC = {"calibrated": True, "rule": {"most": 64.0}, "ranges": {"rnn.weight": 0, "output.bias": -1}}
SCORE = [70, 123.456789, 9, 20, 50, 6, 14, 3]
CLIP = 0.7  # some uploads are longer


def done_of(k: int) -> dict[str, Any]:
    """What client k did, as numbers that JSON keeps exactly."""
    uploads = {
        name: [((i * 37 + k * 11 + len(name)) % 29 - 14) / 64 for i in range(int(np.prod(shape)))]
        for name, shape in LAYERS.items()
    }
    return {"upload": uploads, "tokens": 20 + 30 * k, "worked": 60, "loss": 4.25 + k}


def vectors(done: dict[str, Any]) -> dict[str, Vector]:
    """A client's vector of either sum."""
    upload = {name: torch.tensor(done["upload"][name]).reshape(shape) for name, shape in LAYERS.items()}
    finished = Finished(0, upload, done["loss"], done["tokens"], done["worked"], {})
    theta = {name: torch.zeros(shape) for name, shape in LAYERS.items()}
    method, score = privately(build_method(MethodSpec("fedavg", {}))), Score(*SCORE)
    private = Promise(CLIP, None, 0.2, True, 1.0, 5)
    return {
        "ordinary": vector_of("", finished, theta, method, PUBLIC, len(NAMES), THRESHOLD - 1, score),
        "private": private.vector(upload, Share(scales_of(done), scales_of(done)), CLIP),
    }


def scales_of(done: dict[str, Any]) -> dict[str, float]:
    """A client's weight in the private sum; the second one is below the least."""
    return dict.fromkeys(LAYERS, done["tokens"] / 128)


def make() -> dict[str, Any]:
    """Both sums as Python's clients write them."""
    clients = {name: done_of(k) for k, name in enumerate(NAMES)}
    return {"clients": clients, **{kind: _sum(kind, clients) for kind in ("ordinary", "private")}}


def _sum(kind: str, clients: dict[str, Any]) -> dict[str, Any]:
    identities = {name: Identity.make(counter(f"identity {name}")) for name in NAMES}
    drawn = {name: make_keys(identities[name], name, SERIAL, counter(f"keys {kind} {name}")) for name in NAMES}
    values = {name: vectors(done)[kind] for name, done in clients.items()}
    length = len(values[NAMES[0]])
    terms = SumTerms(kind.encode(), tuple(keys for _, keys in drawn.values()), THRESHOLD, length)
    known = {name: identity.public for name, identity in identities.items()}
    members = {
        name: Member(name, drawn[name][0], terms, known, Floors(3), counter(f"sum {kind} {name}")) for name in NAMES
    }
    collector = Collector(terms)
    packages = {name: member.shares() for name, member in members.items()}
    for name, sealed in packages.items():
        collector.take_shares(name, sealed)
    alive, parcels = collector.forward()
    masked = {name: members[name].masked(values[name], alive, parcels[name]) for name in NAMES}
    for name in NAMES:
        if name != LOST:
            collector.take_masked(name, masked[name])
    answers = {name: members[name].unmask(collector.survivors) for name in collector.survivors}
    for name, answer in answers.items():
        collector.take_unmask(name, answer)
    return {
        "posted": {name: keys.to_json() for name, (_, keys) in drawn.items()},
        "digest": terms.digest().hex(),
        "vectors": {name: _hex(vector) for name, vector in values.items()},
        "packages": {name: {to: p.hex() for to, p in sealed.items()} for name, sealed in packages.items()},
        "masked": {name: _hex(vector) for name, vector in masked.items()},
        "answers": {name: answer.hex() for name, answer in answers.items()},
        "total": _hex(collector.total()),
    }


def _hex(vector: Vector) -> str:
    return vector.astype("<u4").tobytes().hex()
