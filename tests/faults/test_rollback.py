"""A model that is destroyed is not kept: steps that are not finite are not taken, and an exploded model is gone back
from, bit for bit the same after a resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyfed.federated.round as round_module
import keyfed.run.loop as run_train
from keyfed.config.load import Config
from keyfed.config.schema import UploadConfig
from keyfed.engine.client_state import state_file
from keyfed.errors import RunError
from keyfed.federated.methods import build_method
from keyfed.federated.soundness import MOST_RETURNS, Good, exploded, finite, first_good, gone_back, judge_model
from keyfed.federated.types import Aggregate, Method, Params, State
from keyfed.run.checkpoint import _seal
from keyfed.run.folder import load_model, read_metrics, save_model
from keyfed.run.loop import train
from keyfed.run.plan import with_limits
from keyfed.run.remote import rounds as course
from keyfed.run.remote.train import train_deployed
from keyfed.wire import server
from keyfed.wire.messages import pack, unpack
from keyfed.wire.transport import Answer, Handler, InProcess, Lost, Post, deliver
from tests.listeners import Heard

from .deployed import (
    QUICK,
    bits,
    federation,
    last_checkpoint,
    last_model,
    resigned,
    small_config,
    vocabulary,
    write_texts,
)

UNLIMITED = UploadConfig(limit=0.0, token_limit=0.0, against=0.0)  # so that one upload destroys a model
ROUNDS = 4
BAD = 2  # the number of the round (from 0) whose step destroys the model


def configured(tmp_path: Path, method: str = "fedavg", clients: int = 4, rounds: int = ROUNDS, **options) -> Config:
    write_texts(tmp_path / "texts", clients)
    _, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method, rounds=rounds, cohort=clients, **options)
    return replace(config, train=replace(config.train, rollback=3.0))


def spoiling(config: Config, factor: float, rounds: tuple[int, ...] = (BAD,)) -> Method:
    """The configured method with a server whose step in some rounds is `factor` times what it should be."""
    from keyfed.config.load import method_spec

    method = build_method(method_spec(config))
    taken = {"steps": 0}
    own = method.server.step

    def init(params: Params) -> Params:
        return {**method.server.init(params), "spoiling": torch.zeros(1)}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        after, kept = own(params, aggregate, {n: t for n, t in state.items() if n != "spoiling"})
        if taken["steps"] in rounds:
            after = {name: params[name] + factor * (p - params[name] + 1) for name, p in after.items()}
        taken["steps"] += 1
        return after, {**kept, "spoiling": state["spoiling"] + 1}

    return replace(method, server=method.server._replace(init=init, step=step), spec=None)


# what is decided

MODELS = [State({"w": torch.full((2,), float(k))}, None, {}, k) for k in range(12)]


@given(st.lists(st.floats(0, 40) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=11), st.floats(1.01, 10))
def test_the_model_that_goes_on_is_never_an_exploded_one(validations, factor):
    good, state = replace(first_good(MODELS[0], 50), uniform=math.inf), MODELS[0]  # nothing is doubtful
    for n, nats in enumerate(validations, 1):
        state, least = MODELS[n], good.nats
        good, back = judge_model(good, state, nats, factor, {"a": n})
        assert back == exploded(nats, least, factor)
        assert good.nats <= least
        if back:
            state = gone_back(good, state)
            assert state.round == n
            assert state.params is good.state.params
        else:
            assert good == Good(state, min(least, nats), {"a": n}, 0)


def test_a_model_validated_once_more_is_not_a_new_good_one():
    good = Good(MODELS[3], 4.0, {}, returns=2)
    assert judge_model(good, gone_back(good, MODELS[7]), 4.1, 3.0, {}) == (good, False)
    again, back = judge_model(good, gone_back(good, MODELS[7]), 99.0, 3.0, {})
    assert (again.returns, back) == (3, False)
    assert not again.exhausted
    assert replace(good, returns=MOST_RETURNS).exhausted


def test_finite_sees_every_number():
    assert finite({}, {"a": torch.ones(3), "steps": torch.tensor([1, 2])})
    for bad in (math.nan, math.inf, -math.inf):
        assert not finite({"a": torch.ones(3)}, {"b": torch.tensor([[1.0, bad]])})


# in a simulation


def test_a_step_that_is_not_finite_is_not_taken(tmp_path):
    config = configured(tmp_path)
    result = train(config, tmp_path / "run", method=spoiling(config, math.inf))
    lines = read_metrics(tmp_path / "run")
    assert [line["abandoned"] for line in lines] == [n == BAD for n in range(ROUNDS)]
    assert lines[BAD]["unsound"] == round_module.NOT_FINITE
    assert (result["unsound"], result["rolled_back"]) == (1, 0)
    assert lines[BAD]["valid"] == lines[BAD - 1]["valid"]
    assert lines[-1]["valid"]["perplexity"] < lines[BAD]["valid"]["perplexity"]


def test_without_the_check_the_model_is_gone_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(round_module, "finite", lambda *models: True)
    config = configured(tmp_path)
    config = replace(config, train=replace(config.train, rollback=0.0))
    train(config, tmp_path / "run", method=spoiling(config, math.inf))
    assert not finite(last_model(tmp_path / "run"))


def test_a_model_with_numbers_that_are_not_finite_is_not_written(tmp_path):
    vocab, _ = vocabulary(tmp_path)
    with pytest.raises(RunError, match="not finite"):
        save_model(tmp_path / "run", {"w": torch.tensor([math.nan])}, vocab)
    assert not (tmp_path / "run").exists()


def test_an_exploded_model_is_gone_back_from_and_said(tmp_path):
    config = configured(tmp_path)

    heard = Heard()
    result = train(config, tmp_path / "run", method=spoiling(config, -1000.0), listener=heard)
    lines = read_metrics(tmp_path / "run")
    assert [line.get("rolled_back") for line in lines] == [None, None, BAD, None]
    assert result["rolled_back"] == 1
    assert len([line for line in heard.lines if line.startswith(f"ROLL-BACK after round {BAD + 1}")]) == 1
    assert lines[BAD + 1]["valid"]["nats"] < lines[BAD - 1]["valid"]["nats"] + 0.1
    saved = last_checkpoint(tmp_path / "run")
    assert saved.state.server["spoiling"] == ROUNDS - 1  # the server's state went back, too
    assert result["test"]["perplexity"] < 30


def test_without_roll_back_the_model_stays_destroyed(tmp_path):
    config = configured(tmp_path)
    config = replace(config, train=replace(config.train, rollback=0.0))
    train(config, tmp_path / "run", method=spoiling(config, -1000.0))
    assert read_metrics(tmp_path / "run")[-1]["valid"]["nats"] > 10
    assert last_checkpoint(tmp_path / "run").good is None


def test_a_run_that_explodes_in_its_last_round_ends_with_the_last_good_model(tmp_path):
    config = configured(tmp_path)
    whole = configured(tmp_path, rounds=ROUNDS - 1)
    result = train(config, tmp_path / "run", method=spoiling(config, -1000.0, (ROUNDS - 1,)))
    train(whole, tmp_path / "whole")
    assert result["rolled_back"] == 1
    assert bits(last_model(tmp_path / "run")) == bits(last_model(tmp_path / "whole"))
    assert bits(load_model(tmp_path / "run").params) == bits(load_model(tmp_path / "whole").params)


def test_a_run_that_always_explodes_ends_with_its_last_good_model(tmp_path):
    config = configured(tmp_path, rounds=12)
    result = train(config, tmp_path / "run", method=spoiling(config, -1000.0, tuple(range(BAD, 20))))
    assert result["rounds"] == BAD + MOST_RETURNS
    assert result["rolled_back"] == MOST_RETURNS
    assert last_checkpoint(tmp_path / "run").good.state.round == BAD


def exploding(monkeypatch, module, rounds: set[int]) -> None:
    """Let the models after some rounds be validated as exploded, whatever they are."""
    real = judge_model

    def lying(good, state, nats, factor, clients):
        return real(good, state, 99.0 if state.round in rounds else nats, factor, clients)

    monkeypatch.setattr(module, "judge_model", lying)


@pytest.mark.parametrize(("method", "eval_every"), [("fedavg", 1), ("fedadam", 2), ("fedadmm", 1), ("fedadmm", 2)])
def test_a_roll_back_is_the_same_after_every_resume(tmp_path, monkeypatch, method, eval_every):
    exploding(monkeypatch, run_train, {4})
    config = configured(tmp_path, method, rounds=6)
    config = replace(config, train=replace(config.train, eval_every=eval_every))
    train(config, tmp_path / "whole")
    rolled = [line.get("rolled_back") for line in read_metrics(tmp_path / "whole")]
    assert rolled == [None, None, None, 4 - eval_every, None, None]
    for after in (3, 4, 5):  # before, right after the roll-back, and later
        run = tmp_path / f"stopped-{after}"
        with pytest.raises(KeyboardInterrupt):
            train(config, run, listener=Heard(after))
        train(config, run, resume=True)
        assert [line.get("rolled_back") for line in read_metrics(run)] == rolled
        a, b = last_checkpoint(tmp_path / "whole"), last_checkpoint(run)
        assert bits(a.state.params) == bits(b.state.params)
        assert bits(a.state.server) == bits(b.state.server)
        assert (a.good.nats, a.good.returns, a.good.clients) == (b.good.nats, b.good.returns, b.good.clients)
        assert (a.clients, a.good_clients) == (b.clients, b.good_clients)


@pytest.mark.parametrize("eval_every", [1, 3])
def test_the_states_of_clients_go_back_with_the_model(tmp_path, monkeypatch, eval_every):
    exploding(monkeypatch, run_train, {6})
    config = configured(tmp_path, "fedadmm", rounds=7)
    config = replace(config, train=replace(config.train, eval_every=eval_every))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(6))
    saved, good = last_checkpoint(tmp_path / "run"), 6 - eval_every
    assert read_metrics(tmp_path / "run")[-1]["rolled_back"] == good
    assert {version.round for version in saved.clients.values()} == {good - 1}
    assert saved.clients == saved.good_clients
    for client, version in saved.clients.items():
        assert state_file(tmp_path / "run" / "clients", client, version.round).exists()
    train(config, tmp_path / "run", resume=True)  # every state that it goes on from is there


# with real clients


def liar(changes, client: str = "client-1", first: int = BAD, kind: str = "train"):
    """One client whose answers from a round on are changed."""

    def fault(name: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(name, post, handler)
        head = unpack(post.body).head
        if name != client or post.kind != kind or isinstance(answer, Lost) or head.get("round", -1) < first:
            return answer
        return resigned(name, post, handler, answer, lambda unsigned: changes(unsigned, head))

    return fault


def scaled(by: float):
    from safetensors.torch import load

    def change(answer: bytes, head) -> bytes:
        told, tensors = unpack(answer)
        return pack(told, {name: t * by for name, t in load(tensors).items()}) if tensors else answer

    return change


def claiming(nats: float, tokens: int):
    def change(answer: bytes, head) -> bytes:
        told, tensors = unpack(answer)
        if told.get("evaluated") is None:
            return answer
        return pack(told | {"evaluated": [tokens, nats, 0, 0, 0, 0, 0, 0]}) + tensors

    return change


def deployed(tmp_path: Path, name: str, fault=None, method: str = "fedavg", rounds: int = ROUNDS, **options):
    config = configured(tmp_path, method, rounds=rounds)
    config = replace(config, train=replace(config.train, **options), upload=UNLIMITED)
    vocab, _ = vocabulary(tmp_path)
    texts = sorted((tmp_path / "texts").glob("*.txt"))
    transport, roster = federation(tmp_path / name / "clients", texts, fault=fault)
    return train_deployed(config, vocab, tmp_path / name / "run", transport, roster, patience=QUICK)


def once(changes):
    def change(answer: bytes, head) -> bytes:
        return changes(answer, head) if head["round"] == BAD else answer

    return change


def test_a_federation_goes_back_from_a_model_that_a_client_destroyed(tmp_path):
    result = deployed(tmp_path, "spoilt", liar(once(scaled(-1000.0))))
    lines = read_metrics(tmp_path / "spoilt" / "run")
    # Round 3 destroys the model, clients of round 4 notice.
    assert [line.get("rolled_back") for line in lines] == [None, None, BAD, None]
    assert lines[BAD]["valid"]["nats"] > 20
    assert result["rolled_back"] == 1
    assert result["test"]["perplexity"] < 30
    assert finite(last_model(tmp_path / "spoilt" / "run"))


def test_without_roll_back_a_federation_stays_destroyed(tmp_path):
    deployed(tmp_path, "spoilt", liar(once(scaled(-1000.0))), rollback=0.0)
    assert read_metrics(tmp_path / "spoilt" / "run")[-1]["valid"]["nats"] > 10


def test_a_federation_that_explodes_in_its_last_round_ends_with_the_last_good_model(tmp_path):
    result = deployed(tmp_path, "spoilt", liar(scaled(-1000.0), first=ROUNDS - 1))
    deployed(tmp_path, "whole", rounds=ROUNDS - 1)
    ended = load_model(tmp_path / "spoilt" / "run").params
    assert result["best_round"] == ROUNDS - 1
    assert bits(ended) == bits(load_model(tmp_path / "whole" / "run").params)


@pytest.mark.parametrize("claim", [claiming(2.0**39, 1), once(claiming(0.0, 2**39))], ids=["exploded", "perfect"])
def test_one_client_does_not_decide_that_a_model_exploded(tmp_path, claim, monkeypatch):
    result = deployed(tmp_path, "lied", liar(claim))
    whole = deployed(tmp_path, "whole")
    assert (result["rolled_back"], result["best_round"]) == (0, whole["best_round"])
    assert bits(last_model(tmp_path / "lied" / "run")) == bits(last_model(tmp_path / "whole" / "run"))
    monkeypatch.setattr(server, "_typical", lambda counts: None)  # then its claim is in the mean, and decides
    mistaken = deployed(tmp_path, "believed", liar(claim))
    assert mistaken["rolled_back"] or mistaken["best_round"] != whole["best_round"]


@pytest.mark.parametrize("method", ["fedavg", "fedadmm"])
def test_a_federation_rolls_back_alike_after_a_restart_and_its_clients_keep_the_states(tmp_path, monkeypatch, method):
    exploding(monkeypatch, course, {3})
    whole = deployed(tmp_path, "whole", method=method)
    assert whole["rolled_back"] == 1
    assert whole["lost"] == {}
    assert read_metrics(tmp_path / "whole" / "run")[2]["rolled_back"] == 2
    for killed in (1, 2, 3):  # in which round the server dies, before any answer of it is read

        def kill(name: str, post: Post, handler: Handler, at: int = killed) -> Answer:
            if post.kind == "train" and unpack(post.body).head.get("round") == at:
                raise KeyboardInterrupt
            return deliver(name, post, handler)

        home = tmp_path / f"killed-{killed}"
        config = configured(tmp_path, method)
        vocab, _ = vocabulary(tmp_path)
        texts = sorted((tmp_path / "texts").glob("*.txt"))
        transport, roster = federation(home / "clients", texts, fault=kill)
        with pytest.raises(KeyboardInterrupt):
            train_deployed(config, vocab, home / "run", transport, roster, patience=QUICK)
        transport = InProcess(transport.handlers)
        result = train_deployed(config, vocab, home / "run", transport, roster, patience=QUICK, resume=True)
        assert (result["rolled_back"], result["lost"]) == (1, {})
        assert bits(last_model(home / "run")) == bits(last_model(tmp_path / "whole" / "run"))


def test_a_client_keeps_the_state_of_the_last_good_model(tmp_path):
    from keyfed.wire.device_store import DeviceStore

    store = DeviceStore(tmp_path)
    folder = store.run("ab" * 12)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        store.state_file("ab" * 12, number).write_bytes(b"x")
    assert store.state("ab" * 12, 3, 1) == store.state_file("ab" * 12, 3)
    assert sorted(path.name for path in folder.glob("round-*")) == [
        "round-000001.safetensors",
        "round-000003.safetensors",
    ]
    assert store.state("ab" * 12, 1, 1) == store.state_file("ab" * 12, 1)


def test_an_older_checkpoint_without_a_good_model_is_gone_on_from(tmp_path):
    config = configured(tmp_path, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(2))
    for path in (tmp_path / "run" / "checkpoint").glob("*.json"):
        manifest = json.loads(path.read_text())
        del manifest["good"], manifest["seal"]
        path.write_text(json.dumps(manifest | {"seal": _seal(manifest)}))
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "whole")
    assert bits(last_model(tmp_path / "run")) == bits(last_model(tmp_path / "whole"))


def test_a_checkpoint_that_knows_no_good_model_keeps_the_clients_it_has(tmp_path):
    """Going back to where such a run stands must not let clients join its running mean a second time."""
    from keyfed.engine.client_state import Version
    from keyfed.run.checkpoint import Checkpoint, good_in

    state = State({"a": torch.zeros(2)}, None, {}, 4)
    good = good_in(Checkpoint(state, None, 0, 0.0, {"anna": Version(3, "")}), state, 50)
    assert good.clients == {"anna": 3}
    assert good.state is state


def test_limits_follow_the_schedule_of_the_step_size(tmp_path):
    """In a warm-up uploads grow with the step size; no honest one is shortened for that."""
    config = configured(tmp_path, clients=4, rounds=6)
    config = replace(config, train=replace(config.train, warmup=0.6), upload=replace(config.upload, limit=1.5))
    train(config, tmp_path / "run")
    assert not [line for line in read_metrics(tmp_path / "run") if line.get("shortened")]


def test_a_simulation_goes_back_from_a_model_far_worse_than_a_uniform_guess(tmp_path):
    config = configured(tmp_path)
    config = replace(config, train=replace(config.train, rollback=None))
    train(config, tmp_path / "run", method=spoiling(config, -1000.0))
    lines = read_metrics(tmp_path / "run")
    assert [line.get("rolled_back") for line in lines] == [None, None, BAD, None]
    assert with_limits(config).train.rollback == 3.0
    assert with_limits(replace(config, train=replace(config.train, rollback=0.0))).train.rollback == 0.0
