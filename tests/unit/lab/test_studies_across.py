"""Code-faithful variants: the recurrence over the batch, shuffled characters, rows copied by their number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from keyfed.config.load import Config, apply_settings
from keyfed.engine.network import init_params
from keyfed.engine.problem import Problem, make_store
from keyfed.lab.experiment.cell import _renamed
from keyfed.lab.papers import across, across_score, shuffled, train_across
from keyfed.run.base import match_words
from keyfed.run.console import Silent
from keyfed.run.loop import train
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.batches import Batching, stream_steps
from keyfed.text.vocab import SPECIALS, Vocab
from tests.listeners import Heard

BITS = "ab"


def two_back(count: int, seed: int) -> str:
    """Characters that nearly always are the exclusive or of the two before them: one alone says next to nothing."""
    rng = np.random.default_rng(seed)
    found, flips = [0, 1], rng.random(count) < 0.1
    for flip in flips[2:]:
        found.append(found[-1] ^ found[-2] ^ int(flip))
    return "".join(BITS[bit] for bit in found)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Prepared]:
    folder = tmp_path_factory.mktemp("texts")
    for client in range(2):
        text = two_back(3000, client)
        (folder / f"{client}.txt").write_text("".join(f"{text[k : k + 60]}\n" for k in range(0, 3000, 60)), "utf-8")
    settings = [
        f"data.name={folder}", "data.unseen=0", "data.window=30", "model.name=char-lstm", "model.embed=8",
        "model.hidden=16", "train.cohort=2", "train.rounds=10", "train.workers=1", "train.baselines=false",
        "method.lr=0.03", "method.batch_size=5", "data.min_clients=1",
    ]  # fmt: skip
    config = apply_settings(Config(), settings)
    return config, prepare(config)


def test_a_recurrence_over_the_batch_is_what_an_lstm_with_time_first_does(prepared):
    _, ready = prepared
    torch.manual_seed(3)
    spec, window = ready.spec, 12
    params = {name: torch.randn_like(p) * 0.4 for name, p in init_params(spec, 1).items()}
    stream = np.random.default_rng(1).integers(4, len(ready.vocab), 5 * 40 + 1).astype(np.int32)
    problem = Problem(spec, make_store([stream], ["a"]), Batching("stream", 5, window), 1)
    layer = nn.LSTM(spec.embed, spec.hidden)  # time first, as torch has it by default
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(params[f"rnn.{name}"])
    nats = hits = tokens = 0.0
    for step in stream_steps(stream, 5, window):  # the notebook hands it [rows, time, …]
        hidden, _ = layer(params["embedding.weight"][torch.from_numpy(step.inputs)])
        logits = hidden @ params["output.weight"].T + params["output.bias"]
        flat, true = logits.reshape(-1, spec.vocab), torch.from_numpy(step.targets).reshape(-1)
        nats += F.cross_entropy(flat, true, reduction="sum").item()
        hits += (flat.argmax(1) == true).sum().item()
        tokens += len(true)
    assert across_score(problem, params, {"a": stream}, 5) == pytest.approx((nats / tokens, hits / tokens), rel=1e-5)


def test_across_the_batch_a_network_knows_one_character_and_in_order_it_knows_more(prepared, tmp_path):
    config, ready = prepared
    honest = train(config, tmp_path / "run", prepared=ready)["test"]["nats"]
    broken = train_across(config, ready, False, Silent())
    # Two characters back tell all but a flip in ten; one alone tells next to nothing.
    assert honest < 0.55
    assert 0.62 < broken["test"]["nats"] < 0.85
    assert broken["test"]["honest_nats"] > 0.6
    assert broken["rounds"] == broken["best_round"] == 10
    assert broken["tokens_trained"] == 10 * sum(ready.store.tokens(k) - 1 for k in range(2))


def test_a_stopped_cell_goes_on_as_if_it_had_not_been(prepared, tmp_path):
    config, ready = prepared
    config = apply_settings(config, ["train.rounds=3"])
    whole = train_across(config, ready, True, Silent())
    with pytest.raises(KeyboardInterrupt):
        train_across(config, ready, True, Heard(2), tmp_path / "cell")
    listener = Heard()
    resumed = train_across(config, ready, True, listener, tmp_path / "cell")
    assert listener.begun == [2]
    assert [r["round"] for r in resumed["records"]] == [1, 2, 3]
    assert resumed["test"] == whole["test"]
    assert [r["loss"] for r in resumed["records"]] == [r["loss"] for r in whole["records"]]


def test_the_text_of_a_client_is_limited_before_it_is_turned(prepared):
    config, ready = prepared
    few = replace(ready, batching=replace(ready.batching, max_tokens=300))
    found = train_across(apply_settings(config, ["train.rounds=1"]), few, False, Silent())
    assert found["tokens_trained"] == 2 * 300


def test_shuffling_keeps_the_characters_and_loses_their_order(prepared):
    config, ready = prepared
    stream = ready.store.stream(0)
    mixed = shuffled(stream, 1, "a")
    assert sorted(mixed) == sorted(stream)
    assert (mixed != stream).any()
    assert (shuffled(stream, 1, "a") == mixed).all()
    assert (shuffled(stream, 1, "b") != mixed).any()
    found = train_across(apply_settings(config, ["train.rounds=2"]), ready, True, Silent())
    assert found["test"]["nats"] > 0.65


def test_turning_twice_gives_the_batch_again():
    steps = stream_steps(np.arange(4, 71, dtype=np.int32), 3, 7)
    for before, after in zip(steps, across(across(steps)), strict=True):
        for kind in ("inputs", "targets", "mask"):
            assert (getattr(before, kind) == getattr(after, kind)).all()
        assert after.fresh


@pytest.mark.parametrize("old", [3, 5, 8])
def test_rows_by_number_go_to_the_word_with_that_number(tmp_path: Path, old: int):
    run = tmp_path / "run"
    run.mkdir()
    for file in ("run.toml", "model.safetensors"):
        (run / file).write_bytes(b"x")
    made = Vocab("word", (*SPECIALS, *(f"old{k}" for k in range(old))), lower=True, tokenised=True)
    here = Vocab("word", (*SPECIALS, "new", *(f"old{k}" for k in range(4))), lower=True, tokenised=True)
    (run / "vocab.json").write_text(made.to_json(), "utf-8")
    folder = _renamed(run, here, tmp_path / "copy")
    renamed = Vocab.from_json((folder / "vocab.json").read_text("utf-8"))
    assert len(renamed) == len(made)
    both = min(len(made), len(here))
    assert match_words(renamed, here).tolist() == [*range(both), *[-1] * (len(here) - both)]
    assert (folder / "model.safetensors").read_bytes() == b"x"
