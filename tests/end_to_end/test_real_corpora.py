"""The published counts and the quality promised, on the real corpora (skipped where they are absent)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from keyfed.config.load import Config, apply_settings
from keyfed.run.loop import train
from keyfed.run.prepare import prepare

DATA = Path(os.environ.get("KEYFED_DATA") or Path(__file__).parents[3] / "shared" / "data")


def needs(folder: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (DATA / folder).is_dir(), reason=f"no {folder} in {DATA} (set KEYFED_DATA)")


def settings(*more: str, method: str = "fedavg") -> Config:
    return apply_settings(Config(method=method), [f"data.dir={DATA}", *more])


@needs("ptb")
@pytest.mark.parametrize(
    ("name", "model", "vocab", "counts"),
    [
        ("ptb", "gru", "10000", (929_589, 73_760, 82_430)),
        ("wikitext-2", "gru", "none", (2_088_628, 217_646, 245_569)),
    ],
)
def test_token_counts_are_the_published_ones(name, model, vocab, counts):
    p = prepare(settings(f"data.name={name}", f"model.name={model}", f"data.vocab={vocab}"))
    assert len(p.store) == 100
    train_tokens = sum(p.store.tokens(k) for k in range(len(p.store)))
    assert (train_tokens, len(p.valid["valid"]), len(p.test["test"])) == counts
    sizes = [p.store.tokens(k) for k in range(len(p.store))]
    assert max(sizes) < 1.5 * np.median(sizes)  # shards of equal line count


@needs("ptb")
def test_federated_gru_on_ptb_prints_the_promised_json(tmp_path, keyfed):
    out = tmp_path / "run"
    code, stdout, stderr = keyfed(
        "train", "fedavg", "--data", "ptb", "--data-dir", DATA, "--model", "gru", "--rounds", 2, "--json", "--out", out,
        "--set", "data.max_tokens=700", "--set", "model.embed=32", "--set", "data.vocab=1000",
        "--set", "train.ngram_order=2",
    )  # fmt: skip
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["rounds"] == 2
    assert (
        result["baselines"]["unigram"]["test"]["perplexity"] > result["baselines"]["kneser_ney"]["test"]["perplexity"]
    )
    assert result["test"]["tokens"] == 82_429


@needs("shakespeare")
@pytest.mark.slow
def test_character_model_on_tiny_shakespeare_reaches_two_nats(tmp_path):
    config = settings("data.name=tiny-shakespeare", "model.name=char-lstm", "train.rounds=8")
    result = train(config, tmp_path / "run")
    assert result["test"]["nats"] < 2.0  # bigram entropy of the text: 2.45
