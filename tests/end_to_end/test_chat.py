"""The built-in chat is what is trained on when nothing is said, and its placeholders go nowhere."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from keyfed.run.evaluate import suggest
from keyfed.run.folder import load_model
from keyfed.text.vocab import SPECIALS

SMALL = [
    "model.embed=8", "model.hidden=12", "data.vocab=300", "data.max_tokens=60", "train.cohort=2", "train.workers=1",
    "train.valid_tokens=300", "train.test_tokens=300", "train.baselines=false",
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyfed, built_in_in_short) -> Path:
    """A run without --data, where no corpus is at hand but what comes along."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KEYFED_DATA", raising=False)
    settings = [part for setting in SMALL for part in ("--set", setting)]
    code, _, err = keyfed("train", "fedavg", "--rounds", 1, "--out", tmp_path / "run", *settings)
    assert code == 0, err
    return tmp_path / "run"


def test_what_is_trained_without_a_word(run: Path, keyfed) -> None:
    made = tomllib.loads((run / "run.toml").read_text("utf-8"))
    assert (made["data"]["name"], made["data"]["batches"]) == ("chat", "packed")
    trained = load_model(run)
    assert trained.reads_lines
    # Every word of this vocabulary may be suggested; none is a placeholder, and <unk>, which they are read as, is not.
    assert [word for word in trained.vocab.words if word.startswith("<") and len(word) > 1] == list(SPECIALS)
    every = suggest(trained.spec, trained.params, trained.vocab, "see <link> or", len(trained.vocab), lines=True)
    assert len(every) == len(trained.vocab) - len(SPECIALS)
    assert not set(every) & {"<link>", "<email>", "<address>", "<phone>", "<key>", "<name>", *SPECIALS}
    code, out, err = keyfed("suggest", run, "ask <name> about")
    assert code == 0, err
    assert "<" not in out.replace("ask <name> about", "")
