"""What goes wrong in a private federation: servers that are killed, clients that lie or fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load

from keyfed.engine.network import init_params
from keyfed.engine.sums.codec import fixed_point, words_of
from keyfed.engine.sums.noised import NoisedSum, most_called
from keyfed.errors import RunError
from keyfed.federated.types import Share
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.noise import Noising, norm_of
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run.folder import read_metrics
from keyfed.run.prepare import build_network
from keyfed.run.remote import private as deployed_private
from keyfed.wire.messages import unpack
from keyfed.wire.promise import Promise
from keyfed.wire.transport import Lost, deliver

from .deployed import last_model, resigned
from .private import (
    VICTIM,
    Killed,
    deploy,
    enrol,
    killed_before_checkpoint,
    once,
    private_config,
    recorded,
    silence,
    without_noise,
)
from .test_faults import on_head, on_tensors, poisoned


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_killed_between_the_ledger_and_the_checkpoint(tmp_path, monkeypatch, secure):
    """The round is done again: a row of its own, other noise, a cohort of its own."""
    cohorts, drawn, draw = [], recorded(monkeypatch), deployed_private.drawn

    def note(names, rate):
        cohorts.append(draw(names, rate))
        return cohorts[-1]

    monkeypatch.setattr(deployed_private, "drawn", note)
    killed_before_checkpoint(monkeypatch, 2)
    config = private_config(tmp_path, secure=secure)
    transport, roster = enrol(tmp_path)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    assert [e.round for e in read_ledger(tmp_path / "deployed").entries] == [0, 1]
    result = deploy(tmp_path, config, transport, roster, resume=True)
    entries = read_ledger(tmp_path / "deployed").entries
    assert [(e.round, e.attempt) for e in entries] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert len(drawn) == len(cohorts) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert (result["rounds"], result["privacy"]["releases"], result["privacy"]["retried"]) == (3, 4, 1)
    assert result["privacy"]["verdict"] == "BOUND ONLY"


def test_killed_after_the_row_and_before_the_noise(tmp_path, monkeypatch):
    recorded(monkeypatch, once(2))
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    assert len(read_ledger(tmp_path / "deployed").entries) == 2
    result = deploy(tmp_path, config, transport, roster, resume=True)
    assert (result["rounds"], result["privacy"]["releases"]) == (3, 4)


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedadmm"])
def test_what_leaves_a_client_is_its_clipped_part_and_nothing_else(tmp_path, method):
    more = {"fedatt": {"bound": 0.5}, "fedadmm": {"server_step": "late"}}.get(method, {})
    sent = []

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        if post.kind == "train":
            sent.append(unpack(answer[:-SIGNATURE_BYTES]))
        return answer

    clip = 0.02
    config = private_config(tmp_path, method, clients=3, privacy={"clip": clip, "noise": 0.5}, **more)
    deploy(tmp_path, config, *enrol(tmp_path, 3, fault=fault))
    assert len(sent) == 9
    clipped = 0
    for head, tensors in sent:
        assert set(head) == {"run", "round", "attempt", "part"}
        assert set(head["part"]) == {"masses", "whole"}
        layers = load(tensors)
        assert set(head["part"]["masses"]) == (set(layers) if method == "fedatt" else set())
        kappa = clip / (2 * len(layers) ** 0.5)
        norm = norm_of(layers.values(), (kappa * mass for mass in head["part"]["masses"].values()))
        assert norm <= clip * (1 + 1e-6)
        clipped += not head["part"]["whole"]
    assert clipped


def one_round(tmp_path, name, change, method="fedavg", **more):
    """The model after one round in which the victim's answer is changed."""

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        lies = client == VICTIM and post.kind == "train"
        return resigned(client, post, handler, answer, change) if lies else answer

    config = private_config(tmp_path, method, rounds=1, privacy={"clip": 0.5}, **more)
    deploy(tmp_path, config, *enrol(tmp_path, name=f"{name}-clients", fault=fault), name)
    return last_model(tmp_path / name)


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_a_hostile_upload_moves_the_sum_by_the_clip_at_most(tmp_path, monkeypatch, method):
    without_noise(monkeypatch)
    more = {"bound": 5.0} if method == "fedatt" else {}
    sums = []
    inner = deployed_private.PrivateRunLoop._line

    def keep(self, record, before):
        sums.append(captured.pop())
        return inner(self, record, before)

    captured = []
    from keyfed.engine.sums.noised import NoisedSum

    aggregate = NoisedSum.aggregate

    def seen(self, refused):
        captured.append(({n: t.clone() for n, t in self._total.items()}, dict(self._mass)))
        return aggregate(self, refused)

    monkeypatch.setattr(NoisedSum, "aggregate", seen)
    monkeypatch.setattr(deployed_private.PrivateRunLoop, "_line", keep)
    one_round(tmp_path, "silent", lambda a: Lost("no answer"), method, **more)
    huge = on_tensors(lambda ts: {n: 1e6 * 0.5 * torch.ones_like(t) for n, t in ts.items()})
    one_round(tmp_path, "hostile", lambda a: on_head(part=part_of(a) | {"whole": True})(huge(a)), method, **more)
    (silent, light), (hostile, heavy) = sums
    moved = norm_of((hostile[n] - t for n, t in silent.items()), (heavy[n] - m for n, m in light.items()))
    assert 0.4 < moved <= 0.5 * (1 + 1e-9)


def part_of(answer):
    return unpack(answer).head["part"]


SPOILT = {
    "one NaN": poisoned(float("nan")),
    "infinity": poisoned(float("inf")),
    "no part": on_head(part=None),
    "no word of the clip": on_head(part={"masses": {}}),
    "masses of a method that has none": on_head(part={"masses": {"output.bias": 1.0}, "whole": True}),
    "a tensor missing": on_tensors(lambda ts: {n: ts[n] for n in sorted(ts)[1:]}),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_part_counts_as_nothing(tmp_path, monkeypatch, fault):
    without_noise(monkeypatch)
    silent = one_round(tmp_path, "silent", lambda a: Lost("no answer"))
    spoilt = one_round(tmp_path, "spoilt", SPOILT[fault])
    assert all(torch.equal(p, spoilt[name]) for name, p in silent.items())


def test_a_sum_of_liars_is_brought_within_what_clients_may_sum_up_to():
    like = {"w": torch.zeros(40), "b": torch.zeros(3)}
    noising = Noising(2.0, 0.0, 0.0, 3.0, 3.0, 0.1, silence)
    wild = np.random.default_rng(0).integers(0, 2**32, words_of(like), dtype=np.uint32)
    opened = NoisedSum(like, noising)
    opened.take(wild, ("a", "b", "c"))
    assert norm_of(opened._total.values(), opened._mass.values()) == pytest.approx(2.0 * most_called(3.0))
    assert abs(opened._counts["within"]) <= most_called(3.0) / 2
    promise = Promise(2.0, None, 0.2, True, 1.0, 100)
    share = Share({"w": 1.0, "b": 0.5}, {"w": 1.0, "b": 0.5})
    vectors = [promise.vector({"w": torch.full((40,), 0.1 * k), "b": torch.ones(3)}, share, 2.0) for k in (1, 2, 9)]
    honest = NoisedSum(like, noising)
    honest.take(sum(vectors), ("a", "b", "c"))
    plain = [promise.upload({"w": torch.full((40,), 0.1 * k), "b": torch.ones(3)}, share, 2.0) for k in (1, 2, 9)]
    for name in like:
        torch.testing.assert_close(
            honest._total[name], sum(layers[name].double() for layers, _ in plain), rtol=0, atol=3 * fixed_point(2.0)
        )
    assert honest._counts["within"] == pytest.approx(sum(0.5 if numbers["whole"] else -0.5 for _, numbers in plain))


@pytest.mark.parametrize("ratio", [False, True], ids=["sum", "ratio"])
def test_whatever_liars_send_an_honest_client_moves_a_masked_sum_by_the_clip_at_most(ratio):
    """Also where they put numbers beside the seams of 32 bits, at which a sum would change its sign."""
    like, clip, members = {"w": torch.zeros(40), "b": torch.zeros(3)}, 2.0, 20
    noising = Noising(clip, 0.0, 0.0, 20.0, 20.0, 0.1 if ratio else None, silence)
    promise = Promise(clip, None, 0.2, ratio, 1.0, 100)
    names, rng = tuple(map(str, range(members))), np.random.default_rng(0)
    seams = np.array([0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 1], np.uint32)

    def opened(lie, part, scale):
        share = Share({"w": 1.0, "b": scale}, {"w": scale, "b": 1.0}) if part is not None else None
        vector = promise.vector(like if part is None else part, share, clip)
        found = NoisedSum(like, noising)
        found.take(lie + vector, names)
        return [*found._total.values(), torch.tensor([*found._mass.values()], dtype=torch.float64)], found._counts

    worst = 0.0
    for trial in range(2_000):
        lie = rng.choice(seams, words_of(like)) if trial % 2 else rng.integers(0, 2**32, words_of(like), np.uint32)
        if trial % 3 == 0:
            lie[rng.random(len(lie)) < 0.95] = 0  # within what clients may sum up to: nothing is shortened after
        size = 10.0 ** rng.uniform(-8, 1)
        part = {name: torch.from_numpy(size * rng.normal(size=len(p))) for name, p in like.items()}
        (one, told), (other, untold) = opened(lie, part, rng.random()), opened(lie, None, 0.0)
        moved = norm_of(a - b for a, b in zip(one, other, strict=True))
        worst = max(worst, moved)
        assert moved <= clip * (1 + 1e-9)
        assert abs(told["within"] - untold["within"]) <= 0.5 + 1e-9
        least = norm_of(part.values()) < 1e-4 and not ratio
        assert not least or moved < 1e-3  # the smallest change is the smallest in the sum
    assert worst > 0.5 * clip


def test_a_client_whose_training_is_refused_sends_zeros_into_a_masked_sum(tmp_path, monkeypatch):
    """It does not drop out: its text must not decide whether the others' sum opens."""
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=3, rounds=1, secure=True)  # three of three must stay
    transport, roster = enrol(tmp_path, 3)
    make = transport.handlers[VICTIM]._make

    def spoilt(about):
        learner = make(about)
        inner = learner.solve

        def solve(theta, round, turn):
            done = inner(theta, round, turn)
            return done._replace(loss=float("nan"))

        learner.solve = solve
        return learner

    transport.handlers[VICTIM]._make = spoilt
    deploy(tmp_path, config, transport, roster)
    started = init_params(build_network(config, 26, None), 1)
    assert any(not torch.equal(p, started[name]) for name, p in last_model(tmp_path / "deployed").items())


def test_a_client_whose_training_fails_sends_zeros_into_a_masked_sum(tmp_path, monkeypatch):
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=3, rounds=1, secure=True)
    transport, roster = enrol(tmp_path, 3)
    make = transport.handlers[VICTIM]._make

    def spoilt(about):
        learner = make(about)

        def solve(theta, round, turn):
            raise RuntimeError("out of memory")

        learner.solve = solve
        return learner

    transport.handlers[VICTIM]._make = spoilt
    deploy(tmp_path, config, transport, roster)
    started = init_params(build_network(config, 26, None), 1)
    assert any(not torch.equal(p, started[name]) for name, p in last_model(tmp_path / "deployed").items())


def test_nobody_connected_releases_nothing(tmp_path):
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    transport.handlers.clear()
    with pytest.raises(RunError, match="cost nothing"):
        deploy(tmp_path, config, transport, roster)
    assert read_ledger(tmp_path / "deployed").entries == []
    assert read_metrics(tmp_path / "deployed") == []
