"""A federation by messages equals the simulation: bit for bit, plain and by secure sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyfed.run import loop
from keyfed.run.checkpoint import load_checkpoint
from keyfed.run.folder import load_model, read_metrics
from keyfed.run.loop import train
from keyfed.run.plan import with_limits
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver

from .deployed import QUICK, federation, last_model, small_config, vocabulary, write_texts


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize(
    ("method", "options"),
    [(name, {}) for name in ("fedavg", "fedatt", "fedmed", "fedadam", "fedadmm", "fedprox", "fedsgd")]
    + [("fedavg", {"noise": 0.1, "noise_at": "sum"}), ("fedatt", {"noise": 0.1, "noise_at": "server"})],
)
def test_a_federation_equals_the_simulation_bit_for_bit(tmp_path, method, options, secure):
    texts = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = with_limits(
        small_config(tmp_path / "texts", path, method, secure=secure, rounds=2, **options)
    )  # as its run.toml will say
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", texts)
    result = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    assert set(simulated) == set(deployed)
    for name, p in simulated.items():
        assert torch.equal(p, deployed[name]), name
    assert result["rounds"] == 2
    assert result["refused"] == 0


def test_packed_lines_and_dropout_of_a_federation_are_those_of_the_simulation(tmp_path):
    texts = write_texts(tmp_path / "texts", 3)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, "fedavg", secure=True, rounds=1, cohort=3)
    config = with_limits(
        replace(config, data=replace(config.data, batches="packed"), model=replace(config.model, dropout=0.3))
    )
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", texts, named=lambda path: path.name)
    train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    assert all(torch.equal(p, deployed[name]) for name, p in simulated.items())


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_average_and_the_schedule_of_a_federation_are_those_of_the_simulation(tmp_path, secure):
    texts = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = with_limits(small_config(tmp_path / "texts", path, "fednesterov", secure=secure, rounds=4))
    over = {"average": 0.05, "schedule": "cosine", "warmup": 0.25, "final": 0.5}
    config = replace(config, train=replace(config.train, **over))
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", texts)
    result = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    found = [load_checkpoint(tmp_path / run / "checkpoint", 1 << 40, print) for run in ("simulated", "deployed")]
    assert found[0] is not None
    assert found[1] is not None
    for key, t in found[0].state.server.items():
        assert torch.equal(t, found[1].state.server[key]), key
    assert result["best_round"] == 4, "the average of the last round is the best model here"
    exported = load_model(tmp_path / "deployed").params
    for name, p in found[1].state.params.items():
        assert torch.equal(exported[name], found[1].state.server[f"average/{name}"]), name
        assert not torch.equal(exported[name], p), name


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_a_client_that_vanishes_before_an_upload_is_one_that_the_simulation_does_not_call(
    tmp_path, monkeypatch, method
):
    """A tab that closes is compared with such a client in tests/federation/test_tabs.py."""
    texts = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = with_limits(small_config(tmp_path / "texts", path, method, secure=True, rounds=3, cohort=5))
    victim, asked, gone = "client-2", {}, []

    def fault(client, post, handler):
        if client != victim:
            return deliver(client, post, handler)
        if post.kind == "train":
            asked.update(unpack(post.body).head)
        if gone or (post.kind == "upload" and (asked["round"], asked["purpose"]) == (1, "upload")):
            gone.append(post.kind)
            return Lost("closed", "the tab was closed")
        return deliver(client, post, handler)

    transport, roster = federation(tmp_path / "clients", texts, fault=fault)
    train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    usual = loop.simulated_cohorts

    def without(*given):
        draw = usual(*given)

        def cohort(state):
            found = draw(state)
            left = [client for client in found.clients if state.round < 1 or client != f"{victim}.txt"]
            return replace(found, clients=left)

        return cohort

    monkeypatch.setattr(loop, "simulated_cohorts", without)
    train(config, tmp_path / "simulated")
    assert [victim in line["contributors"] for line in read_metrics(tmp_path / "deployed")] == [True, False, False]
    assert [len(line["contributors"]) for line in read_metrics(tmp_path / "simulated")] == [5, 4, 4]
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    for name, p in simulated.items():
        assert float((p - deployed[name]).abs().max()) <= 1e-6, name  # the step of the sum is that of five
