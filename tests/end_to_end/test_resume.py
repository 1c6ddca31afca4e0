"""A run that is interrupted, however rudely, ends where it would have ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig, dump_toml, to_document
from keyfed.errors import RunError
from keyfed.model.output import Score
from keyfed.run import checkpoint
from keyfed.run import loop as run_train
from keyfed.run.checkpoint import load_checkpoint, read_checkpoint
from keyfed.run.evaluate import evaluate_together, limit_streams
from keyfed.run.folder import load_model, open_folder, read_metrics
from keyfed.run.loop import train
from keyfed.run.prepare import prepare
from tests.listeners import Heard

ROUNDS = 6
CLIENTS = 8
TIMES = {"seconds", "elapsed"}

# The same run in processes of their own, which say when their rounds begin. torch is imported once for all of them, and
# nothing is computed before a process is made: it has the memory of a fresh one.
SCRIPT = """
import os, sys, tomllib
from pathlib import Path
from keyfed.config.load import config_from
from keyfed.run.console import Silent
from keyfed.run.loop import train

class Speaking(Silent):
    def start(self, what, rounds, done):
        print("rounds begin", done, flush=True)

def run(described, out):
    print(os.getpid(), flush=True)
    config = config_from(tomllib.loads(Path(described).read_text("utf-8")), "test")
    try:
        train(config, Path(out), resume=True, listener=Speaking())
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
    os._exit(0)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(*line.rstrip("\\n").split("\\t"))
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def write_corpus(folder: Path) -> Path:
    """Eight authors, each with words of their own beside those of all; sentences follow simple rules."""
    folder.mkdir()
    rng = random.Random(7)
    words = [f"{a}{b}" for a in "bdfgklm" for b in ("a", "e", "i", "o", "u", "an", "el", "is")]
    for k in range(CLIENTS):
        mine = rng.sample(words, 30)
        lines = []
        for _ in range(20 + 5 * k):
            start = rng.randrange(len(mine))
            lines.append(" ".join(mine[(start + i * (1 + k % 3)) % len(mine)] for i in range(rng.randint(4, 9))))
        (folder / f"author{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def tiny(corpus: Path, rounds: int = ROUNDS, **train_options: Any) -> Config:
    options = {"cohort": 3, "seed": 3, "workers": 1, "device": "cpu", "baselines": False, "valid_tokens": 300}
    return Config(
        data=DataConfig(name=str(corpus), vocab=200, window=10),
        model=ModelConfig(name="cifg", embed=8, hidden=12, dropout=0.2),
        train=TrainConfig(rounds=rounds, **(options | train_options)),
        options={"optimiser": "sgd", "lr": 1.0, "momentum": 0.5, "batch_size": 8},
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """The run nobody interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny(corpus), out)
    return out


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records]


def checkpoints(out: Path) -> dict[str, Any]:
    """What lies in the checkpoint folder, apart from times (and lengths that depend on how times are written)."""
    found: dict[str, Any] = {}
    for manifest in sorted((out / "checkpoint").glob("*.json")):
        content = json.loads(manifest.read_text("utf-8"))
        assert content.pop("seconds") >= 0
        content.pop("seal")  # over the whole manifest, times included
        assert content.pop("metrics_length") <= (out / "metrics.jsonl").stat().st_size
        found[manifest.stem] = (content, manifest.with_suffix(".safetensors").read_bytes())
    return found


def result_of(out: Path) -> dict[str, Any]:
    content = json.loads((out / "result.json").read_text("utf-8"))
    return {k: v for k, v in content.items() if "seconds" not in k and k != "run"}


def assert_same_run(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "vocab.json").read_bytes() == (other / "vocab.json").read_bytes()
    assert without_times(read_metrics(one)) == without_times(read_metrics(other))
    assert checkpoints(one) == checkpoints(other)
    assert result_of(one) == result_of(other)


def test_a_run_writes_what_it_says(whole, corpus):
    records = read_metrics(whole)
    assert [r["round"] for r in records] == list(range(1, ROUNDS + 1))
    assert all(len(r["contributors"]) == 3 and r["refused"] == {} for r in records)
    assert len({tuple(r["contributors"]) for r in records}) > 1
    assert sorted(checkpoints(whole)) == [f"round-{n:06d}" for n in (4, 5, 6)]
    result = result_of(whole)
    best = min(records, key=lambda r: r["valid"]["nats"])
    assert result["best_round"] == best["round"]
    assert result["test"]["perplexity"] < result["vocabulary"]
    assert result["tokens_trained"] == sum(r["worked"] for r in records)
    trained = load_model(whole)
    assert trained.spec.hidden == 12
    assert trained.config.train == tiny(corpus).train


def test_the_same_run_again_is_the_same_bit_for_bit(whole, corpus, tmp_path):
    train(tiny(corpus), tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")
    train(tiny(corpus, seed=4), tmp_path / "other")
    assert (whole / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("after", [1, 3, ROUNDS])
def test_ctrl_c_and_resume_change_nothing(whole, corpus, tmp_path, after):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus), out, listener=Heard(after))
    assert not (out / "model.safetensors").exists()
    assert len(read_metrics(out)) == after
    listener = Heard()
    train(tiny(corpus), out, resume=True, listener=listener)
    assert f"resuming after round {after} of {ROUNDS}" in listener.lines
    assert_same_run(whole, out)


def test_the_average_and_the_schedule_go_on_where_they_were(whole, corpus, tmp_path):
    over = {"average": 0.8, "schedule": "cosine", "warmup": 0.2, "final": 0.1}
    train(tiny(corpus, **over), tmp_path / "through")
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus, **over), tmp_path / "cut", listener=Heard(3))
    train(tiny(corpus, **over), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "through", tmp_path / "cut")
    tested = load_model(tmp_path / "through").params
    last = load_checkpoint(tmp_path / "through" / "checkpoint", 1 << 30, print)
    assert last is not None
    for name, p in tested.items():  # the last round is the best here, and its average is what is exported
        assert torch.equal(p, last.state.server[f"average/{name}"])
        assert not torch.equal(p, last.state.params[name])
    assert result_of(tmp_path / "through")["best_round"] == ROUNDS
    assert result_of(tmp_path / "through")["test"] != result_of(whole)["test"]


def test_the_steps_that_a_servers_bias_correction_counts_go_on(corpus, tmp_path):
    config = replace(tiny(corpus), method="fedadam", options={"bias_correction": True, "server_lr": 0.001})
    train(config, tmp_path / "through")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", listener=Heard(3))
    train(config, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "through", tmp_path / "cut")
    last = load_checkpoint(tmp_path / "cut" / "checkpoint", 1 << 30, print)
    assert last is not None
    counted = {float(t) for key, t in last.state.server.items() if key.startswith("taken/")}
    assert counted == {ROUNDS}


def test_ctrl_c_between_two_checkpoints_loses_no_round(corpus, tmp_path):
    config = tiny(corpus, checkpoint_every=4, eval_every=2)
    train(config, tmp_path / "whole")
    out = tmp_path / "run"
    listener = Heard(3)
    seen = []
    listener.within = lambda what: seen.append((what, sorted(checkpoints(out))))
    with pytest.raises(KeyboardInterrupt):
        train(config, out, listener=listener)
    assert seen[-1] == ("stopping, with a checkpoint", []), "answered before it is written"
    assert sorted(checkpoints(out)) == ["round-000003"]
    train(config, out, resume=True)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert without_times(read_metrics(out)) == without_times(read_metrics(tmp_path / "whole"))
    assert result_of(out) == result_of(tmp_path / "whole")


@pytest.mark.parametrize("written", ["nothing", "half", "all"])
def test_ctrl_c_while_a_rounds_line_is_written_loses_no_round(corpus, tmp_path, monkeypatch, written):
    config = tiny(corpus, checkpoint_every=100, eval_every=2)
    train(config, tmp_path / "whole")
    append, out = checkpoint.append_line, tmp_path / "run"
    pressed = []

    def interrupted(path, record):
        if record["round"] != 3 or pressed:
            return append(path, record)
        pressed.append(True)
        before = path.read_bytes()
        append(path, record)
        line = path.read_bytes()[len(before) :]
        path.write_bytes(before + {"nothing": b"", "half": line[: len(line) // 2], "all": line}[written])
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "append_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, out)
    assert sorted(checkpoints(out)) == ["round-000003"]
    assert [r["round"] for r in read_metrics(out)] == [1, 2, 3]
    train(config, out, resume=True)
    assert without_times(read_metrics(out)) == without_times(read_metrics(tmp_path / "whole"))
    assert result_of(out) == result_of(tmp_path / "whole")


def test_lines_after_the_last_checkpoint_are_written_again(whole, corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus), out, listener=Heard(3))
    with (out / "metrics.jsonl").open("a") as f:
        f.write('{"round": 4, "loss"')  # killed while it wrote a line
    train(tiny(corpus), out, resume=True)
    assert_same_run(whole, out)


def test_a_damaged_checkpoint_costs_a_round(whole, corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus), out, listener=Heard(3))
    newest = out / "checkpoint" / "round-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    listener = Heard()
    train(tiny(corpus), out, resume=True, listener=listener)
    assert any("round 3 is damaged" in line for line in listener.lines)
    assert f"resuming after round 2 of {ROUNDS}" in listener.lines
    assert_same_run(whole, out)


def test_a_finished_run_returns_its_result(whole, corpus):
    before = {p.name: p.stat().st_mtime_ns for p in whole.iterdir() if p.name != "run.lock"}
    listener = Heard()
    result = train(tiny(corpus), whole, resume=True, listener=listener)
    assert result == json.loads((whole / "result.json").read_text("utf-8"))
    assert any("is finished; nothing to do" in line for line in listener.lines)
    assert {p.name: p.stat().st_mtime_ns for p in whole.iterdir() if p.name != "run.lock"} == before


def test_a_changed_configuration_is_refused_with_the_difference(whole, corpus, tmp_path):
    config = tiny(corpus)
    other = replace(config, train=replace(config.train, seed=9), options={**config.options, "lr": 0.5})
    with pytest.raises(RunError, match=r"method\.lr: 1\.0 → 0\.5; train\.seed: 3 → 9; go on as it began"):
        train(other, whole, resume=True)
    with pytest.raises(RunError, match=r"model\.dropout: 0\.2 → 0\.0"):
        train(replace(config, model=replace(config.model, dropout=0.0)), whole, resume=True)
    with pytest.raises(RunError, match=r"method\.name: fedavg → fedsgd"):
        train(replace(config, method="fedsgd", options={}), whole, resume=True)


def test_changed_text_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus), out, listener=Heard(1))
    with (corpus / "author0.txt").open("a") as f:
        f.write("one more line\n")
    with pytest.raises(RunError, match="the text of the corpus"):
        train(tiny(corpus), out, resume=True)


def test_an_existing_folder_is_refused(whole, corpus, tmp_path):
    with pytest.raises(RunError, match="holds a run already; go on with it by --resume"):
        train(tiny(corpus), whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("keep me")
    with pytest.raises(RunError, match="exists and is not empty"):
        train(tiny(corpus), tmp_path / "mine")
    assert (tmp_path / "mine" / "diary.txt").read_text() == "keep me"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        train(tiny(corpus), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with open_folder(tmp_path / "empty", resume=False):
        pass


class Others:
    """Processes that train a run, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.give, self.said = process.stdin, process.stdout

    def start(self, config: Config, out: Path, folder: Path) -> int:
        """Start one that goes on with the run `out`; return its process id."""
        described = folder / "config.toml"
        described.write_text(dump_toml(to_document(config)), "utf-8")
        self.give.write(f"{described}\t{out}\n")
        self.give.flush()
        return int(self.said.readline())

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        *words, code = self.said.readline().split()
        assert words == ["ended", "with"]
        return int(code)


@pytest.fixture(scope="module")
def others() -> Iterator[Others]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Others(process)


def test_a_second_process_is_kept_out(corpus, tmp_path, others):
    out = tmp_path / "run"
    with open_folder(out, resume=False):
        with pytest.raises(RunError, match="in use by another process"):
            train(tiny(corpus), out, resume=True)
        assert others.start(tiny(corpus), out, tmp_path) != os.getpid()
        told = others.said.readline()
        assert told.startswith("FolderInUse ")
        assert "in use by another process" in told
        assert others.end() == 1
    with open_folder(out, resume=True):  # the lock ends with its holder
        pass


def test_kill_9_at_any_moment_changes_nothing(corpus, tmp_path, others):
    config = tiny(corpus, rounds=12)
    began = time.monotonic()
    train(config, tmp_path / "whole")
    takes = time.monotonic() - began
    out = tmp_path / "run"
    rng = random.Random(11)
    codes = []
    for _ in range(3):
        victim = others.start(config, out, tmp_path)
        assert others.said.readline().startswith("rounds begin")
        time.sleep(rng.uniform(0, 0.3) * takes)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(victim, signal.SIGKILL)
        codes.append(others.end())
    assert -signal.SIGKILL in codes
    train(config, out, resume=True)
    assert_same_run(tmp_path / "whole", out)


@pytest.mark.parametrize(("choose", "best"), [("perplexity", 4), ("accuracy", 2), ("last", ROUNDS)])
def test_the_model_is_chosen_as_asked_before_and_after_a_resume(corpus, tmp_path, monkeypatch, choose, best):
    nats = iter([50.0, 40.0, 45.0, 30.0, *[35.0] * ROUNDS])
    right = iter([1, 7, 7, 3, *[2] * ROUNDS])
    scripted = lambda kind: lambda *given: Score(tokens=10, nats=next(nats), top1=next(right))  # noqa: E731
    monkeypatch.setattr(run_train, "validator", scripted)
    config = tiny(corpus, choose=choose)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(3))
    with pytest.raises(RunError, match=r"train\.choose"):
        train(tiny(corpus, choose="accuracy" if choose != "accuracy" else "last"), tmp_path / "run", resume=True)
    result = train(config, tmp_path / "run", resume=True)
    assert result["best_round"] == best
    chosen = load_model(tmp_path / "run").params
    last = read_checkpoint(tmp_path / "run" / "checkpoint", ROUNDS)
    assert last.best is not None
    assert all(torch.equal(chosen[name], last.best.params[name]) for name in chosen)
    if choose == "last":
        assert all(torch.equal(chosen[name], last.state.params[name]) for name in chosen)


def test_the_start_is_validated_where_asked_and_it_changes_nothing_else(whole, corpus, tmp_path):
    config = tiny(corpus, eval_start=True)
    result = train(config, tmp_path / "run")
    before = result["start"].pop("valid")
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert without_times(read_metrics(whole)) == without_times(read_metrics(tmp_path / "run"))
    assert result["start"] == result_of(whole)["start"]
    none = train(tiny(corpus, rounds=0, eval_start=True, valid_tokens=300), tmp_path / "none")
    assert (none["rounds"], none["best_round"]) == (0, 0)
    assert none["start"]["valid"] == before
    text = prepare(config)
    score = evaluate_together(text.spec, load_model(tmp_path / "none").params, limit_streams(text.valid, 300))
    assert before == score.summary()
