"""`keyfed up`: a whole federation in one command, equal to the simulation, with nothing left afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keyfed.deploy.processes import wait_until

pytestmark = pytest.mark.federation

WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then it was small big red .".split()  # noqa: SIM905
SMALL = [
    "--model", "cifg", "--rounds", "2", "--set", "model.embed=6", "--set", "model.hidden=8", "--set", "data.window=8",
    "--set", "train.block=1", "--set", "train.workers=1", "--set", "train.baselines=false", "--set", "train.cohort=4",
]  # fmt: skip


def write_texts(folder, clients=4):
    folder.mkdir()
    for k in range(clients):
        lines = []
        for n in range(60 + 7 * k):
            draw = hashlib.sha256(f"{k}/{n}".encode()).digest()
            lines.append(" ".join(WORDS[(b * (k + 3)) % len(WORDS)] for b in draw[: 5 + draw[-1] % 6]))
        (folder / f"client-{k}").write_text("\n".join(lines) + "\n")


def start(arguments, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "keyfed", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(arguments, cwd, seconds=400):
    process = start(arguments, cwd)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"over {seconds} s: {process.communicate()[1][-2000:]}")
    assert process.returncode == 0, err[-2000:]
    return out


def processes_of(folder):
    """Processes that have a path in this folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and int(entry.parent.name) != os.getpid():
            found.append(" ".join(words))
    return found


@pytest.mark.parametrize("how", ["--plain", "--secure"])
def test_fedatt_over_flower_equals_the_simulation(tmp_path, how):
    write_texts(tmp_path / "text")
    home = tmp_path / "home"
    result = json.loads(
        run(["up", "fedatt", "--clients", 4, how, "--data", tmp_path / "text", *SMALL, "--home", home, "--out",
             tmp_path / "real", "--json"], tmp_path)
    )  # fmt: skip
    assert processes_of(home) == []
    assert result["rounds"] == 2
    assert result["secure"] is (how == "--secure")
    assert result["cost"]["seconds_per_round"] > 0
    assert result["cost"]["bytes_per_client_and_round"]["up"] > 0
    simulated = [] if how == "--plain" else ["--secure"]
    run(["train", "fedatt", "--data", home / "text", *SMALL, "--set", "data.unseen=0", "--out", tmp_path / "simulated",
         *simulated], tmp_path)  # fmt: skip
    real, same = (tmp_path / name / "model.safetensors" for name in ("real", "simulated"))
    assert json.loads((tmp_path / "simulated" / "result.json").read_text())["best_round"] == result["best_round"]
    assert real.read_bytes() == same.read_bytes()


def test_ctrl_c_leaves_no_process(tmp_path):
    write_texts(tmp_path / "text")
    home = tmp_path / "home"
    process = start(
        ["up", "fedavg", "--clients", 4, "--plain", "--data", tmp_path / "text", *SMALL, "--rounds", 500, "--home",
         home, "--out", tmp_path / "real"], tmp_path,
    )  # fmt: skip
    try:
        began = wait_until((tmp_path / "real" / "run.toml").exists, 200, lambda: process.poll() is None)
        assert began, process.communicate(timeout=60)[1][-2000:]
        assert len(processes_of(home)) >= 9  # SuperLink, four nodes, four training processes
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # impatience does not break off the tidying up
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 130, err[-2000:]
    assert wait_until(lambda: processes_of(home) == [], 10, lambda: True), processes_of(home)
