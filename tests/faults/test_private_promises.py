"""What a client holds a private run to: the clip, the rounds, no scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from keyfed.engine.network import init_params
from keyfed.private.dp.ledger import read_ledger
from keyfed.run import privacy as run_privacy
from keyfed.run.prepare import build_network
from keyfed.wire.device_store import LastPart
from keyfed.wire.messages import Rejected, unpack
from keyfed.wire.promise import Promise
from keyfed.wire.transport import Lost, deliver
from tests.listeners import Heard

from .deployed import session
from .private import (
    VICTIM,
    deploy,
    enrol,
    models_of,
    private_config,
    without_noise,
)
from .test_faults import on_head

CLIPS = {
    "another one": (None, 3, 5.1, False),
    "the same": (None, 3, 5.0, True),
    "grown as far as it can": (0.5, 3, 5.0 * np.exp(0.3), True),
    "grown further": (0.5, 3, 5.0 * np.exp(0.31), False),
    "shrunk as far as it can": (0.9, 10, 5.0 * np.exp(-0.2), True),
    "shrunk further": (0.9, 10, 5.0 * np.exp(-0.21), False),
    "moved before the first round": (0.5, 0, 5.1, False),
    "zero": (0.5, 3, 0.0, False),
    "minus one": (0.5, 3, -1.0, False),
    "none": (0.5, 3, None, False),
    "a text": (0.5, 3, "5", False),
}


@pytest.mark.parametrize("what", CLIPS)
def test_a_client_refuses_a_clip_that_the_promise_cannot_have_led_to(what):
    quantile, round, clip, fine = CLIPS[what]
    promise = Promise(5.0, quantile, 0.2, False, 1.0, 100)
    told = {"clip": clip, "step": round}
    if fine:
        assert promise.check(told, round, None, "upload").clip == clip
        return
    with pytest.raises(Rejected) as caught:
        promise.check(told, round, None, "upload")
    assert caught.value.reason in ("refused by client", "non-finite report")


STEPS = {
    "no faster than one step allows": (0.5, 4, 5.0 * np.exp(0.2), True),
    "faster": (0.5, 4, 5.0 * np.exp(0.21), False),
    "down, and faster": (0.5, 4, 5.0 * np.exp(-0.21), False),
    "over many steps": (0.5, 9, 5.0 * np.exp(1.0), True),
    "one that stays, moved": (None, 9, 5.1, False),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_clip_moves_from_the_last_one_of_this_client_by_the_rate_a_step(what):
    quantile, step, clip, fine = STEPS[what]
    promise, last = Promise(5.0, quantile, 0.2, False, 1.0, 100), LastPart(3, 5.0)
    told = {"clip": clip, "step": step}
    if fine:
        assert promise.check(told, 50, None, "upload", last) == (clip, step)
        return
    with pytest.raises(Rejected, match="a clip of"):
        promise.check(told, 50, None, "upload", last)


def test_a_round_beyond_those_that_were_promised_is_refused():
    promise = Promise(5.0, 0.5, 0.2, False, 1.0, 10)
    assert promise.check({"clip": 5.0, "step": 9}, 9, None, "upload").step == 9
    with pytest.raises(Rejected, match="round 1001 of a run that promised 10"):
        promise.check({"clip": 1e30, "step": 0}, 1000, None, "upload")


def test_a_client_remembers_the_clip_and_hears_of_the_rounds(tmp_path):
    """A clip far from the last one is not answered, whatever round it is said to be, after a restart neither."""
    jumps = []

    def fault(client, post, handler):
        if client == VICTIM and post.kind == "train" and unpack(post.body).head["round"] == 1:
            jumps.append(client)
            public = unpack(post.body).head["public"]
            handler = session(tmp_path / "clients", tmp_path / "texts" / f"{VICTIM}.txt")
            post = post._replace(body=on_head(round=2, public=public | {"clip": 5.0 * np.exp(0.25)})(post.body))
            with pytest.raises(Rejected, match="a clip of"):
                handler.handle(post.kind, post.body)
            return Lost("refused by client")
        return deliver(client, post, handler)

    config = private_config(tmp_path, rounds=3, privacy={"quantile": 0.9, "count_noise": 5.0})
    deploy(tmp_path, config, *enrol(tmp_path, fault=fault))
    assert jumps


@pytest.mark.parametrize(("purpose", "part"), [("upload", "valid"), ("evaluation", "test"), ("calibration", None)])
def test_a_client_scores_nothing_for_a_private_run(purpose, part):
    with pytest.raises(Rejected, match="never for a score"):
        Promise(5.0, None, 0.2, False, 1.0, 100).check({"clip": 5.0, "step": 0}, 0, part, purpose)


def test_another_clip_to_one_client_opens_no_masked_sum(tmp_path, monkeypatch):
    """Masks are bound to the round's public numbers; a moving clip lets a server try."""
    without_noise(monkeypatch)

    def fault(client, post, handler):
        if client == VICTIM and post.kind == "train" and unpack(post.body).head["round"] == 1:
            head = unpack(post.body).head
            post = post._replace(
                body=on_head(public=head["public"] | {"clip": head["public"]["clip"] * 1.01})(post.body)
            )
        return deliver(client, post, handler)

    moving = {"quantile": 0.5, "count_noise": 5.0}
    config = private_config(tmp_path, secure=True, rounds=2, privacy=moving)
    deploy(tmp_path, config, *enrol(tmp_path, fault=fault))
    first, second = models_of(tmp_path / "deployed", 2)
    started = init_params(build_network(config, 26, None), 1)
    assert not any(torch.equal(p, started[name]) for name, p in first.items())  # the sum before it opened
    assert all(torch.equal(p, second[name]) for name, p in first.items())  # nothing but (no) noise was released
    assert len(read_ledger(tmp_path / "deployed").entries) == 2


def told_count_noise(folder):
    """What every client wrote down of the count noise when the run began."""
    begun = [json.loads(path.read_text("utf-8")) for path in folder.rglob("begin.json")]
    return [head["config"]["privacy"].get("count_noise") for head in begun]


@pytest.mark.parametrize(("given", "heard"), [({}, 1.0), ({"count_noise": 5.0}, 5.0)], ids=["usual", "given"])
def test_clients_hear_the_count_noise_that_was_settled(tmp_path, given, heard):
    config = private_config(tmp_path, rounds=3, privacy={"quantile": 0.5, **given})
    transport, roster = enrol(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Heard(1))
    assert told_count_noise(tmp_path / "clients") == [heard] * 5
    result = deploy(tmp_path, config, transport, roster, resume=True)
    assert result["privacy"]["count_noise"] == read_ledger(tmp_path / "deployed").terms.count_noise == heard


def test_a_run_from_before_count_noise_was_written_down_goes_on_with_it(tmp_path, monkeypatch):
    """A twentieth of five clients, which they were not told: they would refuse a run that now says another number."""
    parts = []

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        if post.kind == "train":
            parts.append(isinstance(answer, bytes))
        return answer

    config = private_config(tmp_path, rounds=3, privacy={"quantile": 0.5, "noise": 0.3})
    transport, roster = enrol(tmp_path, fault=fault)
    with monkeypatch.context() as before:
        before.setattr(run_privacy, "settle_count_noise", lambda *given: None)
        with pytest.raises(KeyboardInterrupt):
            deploy(tmp_path, config, transport, roster, listener=Heard(1))
    assert told_count_noise(tmp_path / "clients") == [None] * 5
    result = deploy(tmp_path, config, transport, roster, resume=True)
    assert result["privacy"]["count_noise"] == 0.25
    assert parts == [True] * 15
