"""The trimmed mean of a round against a slow transcription, what outliers can do to it, and real clients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.engine.sums import plain
from keyfed.engine.sums.plain import RunningSum, TrimmedSum
from keyfed.federated.types import Params, Share
from keyfed.run.loop import train
from keyfed.run.remote.train import train_deployed

from .deployed import QUICK, federation, last_model
from .test_directions import made
from .test_poisoning import bits

LAYERS = {"a": (3,), "b": (2, 4)}
SEEDS = st.integers(0, 2**32 - 1)


def uploads(seed: int, clients: int) -> dict[str, Params]:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"c{k}": {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in LAYERS.items()}
        for k in range(clients)
    }


def summed(accumulator: RunningSum, sent: dict[str, Params], weights: list[float], logs: list[float]) -> Params:
    for (client, upload), weight, log in zip(sent.items(), weights, logs, strict=True):
        share = Share(dict.fromkeys(LAYERS, weight), dict.fromkeys(LAYERS, weight), dict.fromkeys(LAYERS, log))
        accumulator.add(client, upload, share)
    return accumulator.aggregate(()).mean()


def like() -> Params:
    return {name: torch.zeros(*shape, dtype=torch.float64) for name, shape in LAYERS.items()}


def transcription(sent: dict[str, Params], weights: list[float], trim: float, name: str, place: int) -> float:
    """Sort (number, weight) pairs, cut both ends, divide: as one would write it for one number."""
    pairs = [(float(u[name].reshape(-1)[place]), w) for u, w in zip(sent.values(), weights, strict=True) if w > 0]
    pairs.sort()
    out = min(math.floor(trim * len(pairs)), (len(pairs) - 1) // 2)
    pairs = pairs[out : len(pairs) - out]
    return sum(x * w for x, w in pairs) / sum(w for _, w in pairs)


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(1, 9), st.floats(0.01, 0.5), st.data())
def test_a_trimmed_sum_equals_the_transcription(seed, clients, trim, data):
    some = st.lists(st.sampled_from([0.5, 1.0, 7.0]), min_size=clients, max_size=clients)
    weights = data.draw(some)
    logs = data.draw(st.lists(st.floats(-3, 3), min_size=clients, max_size=clients))
    sent = uploads(seed, clients)
    found = summed(TrimmedSum(like(), trim), sent, weights, logs)
    true = [w * math.exp(log) for w, log in zip(weights, logs, strict=True)]
    for name in LAYERS:
        expected = [transcription(sent, true, trim, name, k) for k in range(like()[name].numel())]
        torch.testing.assert_close(found[name].reshape(-1).tolist(), expected, rtol=1e-12, atol=1e-12)


def test_a_layer_is_cut_into_pieces_and_a_client_of_weight_zero_is_not_there(monkeypatch):
    monkeypatch.setattr(plain, "PIECE", 3)
    sent, weights = uploads(5, 6), [1.0, 0.0, 2.0, 1.0, 3.0, 1.0]
    found = summed(TrimmedSum(like(), 0.2), sent, weights, [0.0] * 6)
    for name in LAYERS:
        expected = [transcription(sent, weights, 0.2, name, k) for k in range(like()[name].numel())]
        torch.testing.assert_close(found[name].reshape(-1).tolist(), expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(1, 9))
def test_a_half_is_the_median_and_next_to_nothing_is_the_mean(seed, clients):
    sent, alike = uploads(seed, clients), [1.0] * clients
    median = summed(TrimmedSum(like(), 0.5), sent, alike, [0.0] * clients)
    mean = summed(TrimmedSum(like(), 1e-9), sent, alike, [0.0] * clients)
    for name in LAYERS:
        stacked = torch.stack([u[name] for u in sent.values()])
        torch.testing.assert_close(median[name], stacked.quantile(0.5, dim=0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mean[name], stacked.mean(0), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(3, 10), st.floats(-1e9, 1e9))
def test_as_many_outliers_as_are_trimmed_move_no_number_beyond_the_others(seed, clients, size):
    out = (clients - 1) // 2
    sent = uploads(seed, clients)
    honest = list(sent.values())[out:]
    for upload in list(sent.values())[:out]:
        for layer in upload.values():
            layer.fill_(size)
    found = summed(TrimmedSum(like(), 0.5), sent, [1.0] * clients, [0.0] * clients)
    for name in LAYERS:
        stacked = torch.stack([u[name] for u in honest])
        assert bool((found[name] >= stacked.amin(0) - 1e-9).all())
        assert bool((found[name] <= stacked.amax(0) + 1e-9).all())


def test_a_client_with_all_the_weight_that_is_trimmed_leaves_a_mean_of_the_others():
    total = TrimmedSum({"a": torch.zeros(1)}, 0.2)
    for k, (number, log) in enumerate([(1.0, 0.1), (2.0, 0.2), (3.0, 0.1), (4.0, 0.3), (1e6, 200.0)]):
        total.add(f"c{k}", {"a": torch.tensor([number])}, Share({"a": 1.0}, {"a": 1.0}, {"a": log}))
    found = total.aggregate(())
    mean = float(found.total["a"]) / found.mass["a"]
    assert 2.0 <= mean <= 4.0


def test_nobody_is_no_step():
    found = TrimmedSum(like(), 0.2).aggregate(())
    assert all(not layer.any() for layer in found.mean().values())


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_a_federation_trims_as_the_simulation_does(tmp_path, method):
    config, vocab, paths = made(tmp_path, method, rounds=2, limit=0, token_limit=0, against=0, trim=0.2)
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", paths)
    train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    trimmed = bits(last_model(tmp_path / "simulated"))
    assert trimmed == bits(last_model(tmp_path / "deployed"))
    plain_config, _, _ = made(tmp_path / "plain", method, rounds=2)
    train(plain_config, tmp_path / "mean")
    assert trimmed != bits(last_model(tmp_path / "mean"))
