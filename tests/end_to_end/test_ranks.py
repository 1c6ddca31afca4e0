"""`torchrun -m keyfed train`: the run of one process, told once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyfed import configure
from keyfed.config.load import method_spec
from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.run.checkpoint import load_checkpoint
from keyfed.run.folder import read_metrics
from keyfed.run.metrics_line import read_curves
from keyfed.run.plan import Choice
from keyfed.run.ranks import among

from .conftest import TINY

TIMES = ("seconds", "elapsed", "evaluation_seconds", "baseline_seconds", "run")
DUALS = ["rho=0.01", "participation.drop_after=0.3", "train.baselines=false"]


def command(corpus: Path, out: Path, rounds: int, *extra: str) -> list[str]:
    settings = [item for s in [*TINY, *extra] for item in ("--set", s)]
    return ["train", "admm", "--data", str(corpus), "--rounds", str(rounds), "--out", str(out), *settings]


def start_ranks(*arguments: str) -> list[subprocess.Popen[str]]:
    """Start two ranks by hand, as torchrun would; each says what it has to say on its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "keyfed", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    if isinstance(value, list):
        return [without_times(v) for v in value]
    return pytest.approx(value, rel=1e-5, abs=1e-7) if isinstance(value, float) else value


def test_torchrun_trains_the_run_of_one_process(keyfed, corpus, tmp_path):
    code, alone, stderr = keyfed(*command(corpus, tmp_path / "one", 4, *DUALS), "--curves", "--json")
    assert code == 0, stderr
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launcher, "-m", "keyfed", *command(corpus, tmp_path / "two", 4, *DUALS), "--curves", "--json"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == without_times(json.loads(alone)) | {
        k: v for k, v in json.loads(done.stdout).items() if k in TIMES
    }
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert sum(len(r["lost"]) for r in one) > 0
    assert [without_times(r) for r in one] == [{k: v for k, v in r.items() if k not in TIMES} for r in two]
    curves = [read_curves(tmp_path / name) for name in ("one", "two")]
    assert len(curves[0]) == 4
    assert without_times(curves[0]) == curves[1]
    assert done.stderr.count("round    4") == 1
    assert "2 ranks, each cpu" in done.stderr
    names = [{p.name for p in (tmp_path / run / "clients").iterdir()} for run in ("one", "two")]
    assert names[0] == names[1]
    assert "ranks = 2" in (tmp_path / "two" / "run.toml").read_text()


def test_ctrl_c_stops_all_ranks_after_a_checkpoint(corpus, tmp_path):
    out = tmp_path / "run"
    ranks = start_ranks(*command(corpus, out, 400, *DUALS, "train.checkpoint_every=100", "train.eval_every=100"))
    limit = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    told = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [130, 0], told
    assert "go on with: keyfed train --resume" in told[0][1]
    assert told[1] == ("", "")
    done = len(read_metrics(out))
    assert 0 < done < 400
    saved = load_checkpoint(out / "checkpoint", (out / "metrics.jsonl").stat().st_size, print, out / "clients")
    assert saved is not None
    assert saved.state.round == done
    assert saved.clients


@pytest.mark.parametrize(("rank", "code"), [(0, 2), (1, 0)])
def test_a_mistake_is_one_line_of_rank_0(keyfed, corpus, monkeypatch, rank, code):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which other ranks replace
    for name, value in {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    told = keyfed("compare", "fedavg", "fedsgd", "--data", corpus)
    error = "error: keyfed compare was started as 2 ranks and runs in one process; only training takes several\n"
    assert told == (code, "", error if rank == 0 else "")
    if rank > 0:
        sys.stdout.close()


def test_what_several_ranks_cannot_do_is_refused(corpus):
    config = configure("fedavg", data=str(corpus))
    method, choice = build_method(method_spec(config)), Choice("cpu", 1, 2, 1, "")
    assert among(2, config, method, choice).workers == 1
    with pytest.raises(ConfigError, match=r"train\.workers is 2 beside 3 ranks"):
        among(3, configure("fedavg", train_workers=2), method, choice)
    with pytest.raises(ConfigError, match="each takes the GPU of its own number"):
        among(2, config, method, replace(choice, device="cuda:1"))
    with pytest.raises(ConfigError, match="central trains one client that has all the text"):
        among(2, config, replace(method, name="central", cohort="pooled"), choice)
