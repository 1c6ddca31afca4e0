"""TensorBoard's event files say what metrics.jsonl says, every round once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import keyfed as library
from keyfed.reports.figures import EventWriter
from keyfed.run.console import Silent
from tests.end_to_end.conftest import TINY
from tests.listeners import Heard


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from the run's log, written independently."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    out: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        sofar = [r["traffic"] for r in records if r["round"] <= record["round"]]
        values = {
            "train/loss": record["loss"],
            "clients/effective": record["effective_clients"],
            "bytes/down": sum(t["down"] for t in sofar),
            "bytes/up": sum(t["up"] for t in sofar),
            "time/seconds": record["seconds"],
        }
        values |= {f"valid/{key}": record["valid"][key] for key in ("nats", "perplexity", "top1", "top3")}
        for tag, value in values.items():
            out.setdefault(tag, []).append((record["round"], pytest.approx(value, rel=1e-6)))
    return out


def test_events_are_the_log(keyfed, corpus, tmp_path):
    out = tmp_path / "run"
    settings = [item for s in [*TINY, "train.central=true", "train.baselines=false"] for item in ("--set", s)]
    common = ["train", "--data", corpus, "--rounds", 2, "--out", out, *settings]
    code, _, stderr = keyfed(*common, "--tensorboard")
    assert code == 0, stderr
    assert len(expected(out)["train/loss"]) == 2
    assert read_events(out / "tensorboard") == expected(out)
    assert read_events(out / "tensorboard" / "central") == expected(out / "central")


def test_no_round_is_missing_or_twice_after_a_resume(corpus, tmp_path):
    config = library.configure(
        "fedavg", data=str(corpus), rounds=7, model_embed=8, model_hidden=12, data_vocab=60, train_cohort=3,
        train_workers=1, data_window=8, train_checkpoint_every=2, train_baselines=False,
    )  # fmt: skip
    out = tmp_path / "run"
    with EventWriter(out, Heard(3, by=RuntimeError("power cut"))) as events, pytest.raises(RuntimeError):
        library.train(config, out, listener=events)  # round 3 is in the events, not in a checkpoint
    with pytest.raises(RuntimeError):
        library.train(
            config, out, resume=True, listener=Heard(6, by=RuntimeError("power cut"))
        )  # three rounds without events
    with EventWriter(out, Silent()) as events:
        library.train(config, out, resume=True, listener=events)
    found = read_events(out / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == list(range(1, 8))
    assert found == expected(out)


def test_absence_is_one_line_that_names_the_extra(keyfed, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    settings = [item for s in TINY for item in ("--set", s)]
    code, _, stderr = keyfed("train", "--data", corpus, "--out", tmp_path / "run", "--tensorboard", *settings)
    assert code == 2
    assert "pip install 'keyfed[tensorboard]'" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
