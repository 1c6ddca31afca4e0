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

from keyfed.config.schema import AGAINST, LIMIT, SUM_LIMIT, TOKEN_LIMIT
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.processes import Processes, descendants, running, wait_until
from keyfed.deploy.runs import begun_runs
from keyfed.deploy.superlink import start_superlink
from keyfed.deploy.up import start_clients
from keyfed.reports.seen import read_run
from keyfed.run.base import load_base
from keyfed.run.folder import read_metrics, read_run_toml

pytestmark = pytest.mark.federation

WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then it was small big red .".split()  # noqa: SIM905
SMALL = [
    "--model", "cifg", "--rounds", "2", "--set", "model.embed=6", "--set", "model.hidden=8", "--set", "data.window=8",
    "--set", "train.block=1", "--set", "train.workers=1", "--set", "train.baselines=false", "--set", "train.cohort=4",
]  # fmt: skip


def write_texts(folder):
    folder.mkdir()
    for k in range(4):
        lines = []
        for n in range(60 + 7 * k):
            draw = hashlib.sha256(f"{k}/{n}".encode()).digest()
            lines.append(" ".join(WORDS[(b * (k + 3)) % len(WORDS)] for b in draw[: 5 + draw[-1] % 6]))
        (folder / f"client-{k}").write_text("\n".join(lines) + "\n")


def start(arguments, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)}
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
    simulated = ["--secure", "--set", f"upload.limit={SUM_LIMIT}"]
    if how == "--plain":  # limits that a federation has by default, and a simulation has not
        given = {"limit": LIMIT, "token_limit": TOKEN_LIMIT, "against": AGAINST}
        simulated = [word for key, value in given.items() for word in ("--set", f"upload.{key}={value}")]
    run(["train", "fedatt", "--data", home / "text", *SMALL, "--set", "data.unseen=0", "--out", tmp_path / "simulated",
         *simulated], tmp_path)  # fmt: skip
    real, same = (tmp_path / name / "model.safetensors" for name in ("real", "simulated"))
    assert json.loads((tmp_path / "simulated" / "result.json").read_text())["best_round"] == result["best_round"]
    assert real.read_bytes() == same.read_bytes()


@pytest.mark.parametrize("how", ["--plain", "--secure"])
def test_dp_over_flower_ends_with_a_bound(tmp_path, how):
    write_texts(tmp_path / "text")
    home, out = tmp_path / "home", tmp_path / "private"
    result = json.loads(
        run(["up", "fedavg", "--clients", 4, how, "--dp", "noise=0.8", "--data", tmp_path / "text", *SMALL, "--home",
             home, "--out", out, "--json"], tmp_path)
    )  # fmt: skip
    assert processes_of(home) == []
    private = result["privacy"]
    assert (private["verdict"], private["releases"], private["population"]) == ("BOUND ONLY", 2, 4)
    assert private["randomness"] == "system"
    assert private["count_noise"] == 0.8  # of the clip that moves: four clients are few
    assert [line["privacy"]["verdict"] for line in read_metrics(out)] == ["BOUND ONLY"] * 2
    assert "client-" not in (out / "metrics.jsonl").read_text() + (out / "result.json").read_text()
    assert any("no ε covers it" in line for line in private["statement"])  # the vocabulary is of the clients' own text
    assert result["cost"]["seconds_per_round"] is None
    assert run(["privacy", "ledger", out], tmp_path).startswith("BOUND ONLY: epsilon ")
    assert "BOUND ONLY; see " in run(["privacy", "audit", out], tmp_path)  # after what it found


@pytest.mark.parametrize("kept", [True, False], ids=["home", "temporary"])
def test_ctrl_c_leaves_no_process(tmp_path, kept):
    write_texts(tmp_path / "text")
    home = tmp_path / "home" if kept else tmp_path / "keyfed-up-"
    process = start(
        ["up", "fedavg", "--clients", 4, "--plain", "--data", tmp_path / "text", *SMALL, "--rounds", 500,
         *(["--home", home] if kept else []), "--out", tmp_path / "real"], tmp_path,
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
    assert list(tmp_path.glob("keyfed-up-*")) == []
    assert home.exists() is kept


def test_a_run_goes_on_after_its_server_was_killed(tmp_path):
    write_texts(tmp_path / "text")
    run(["vocab", "--data", tmp_path / "text", "--out", tmp_path / "vocab.json"], tmp_path)
    server, out = ServerHome(tmp_path / "server"), tmp_path / "run"
    make_certificates(server.path, [])
    names = ["client-0", "client-1"]
    with Processes(tmp_path) as processes:
        address = start_superlink(processes, server, "127.0.0.1", 0)
        homes, texts = {n: tmp_path / "homes" / n for n in names}, {n: tmp_path / "text" / n for n in names}
        clients = start_clients(processes, server, address, homes, texts, plain=True)
        process = start(
            ["train", "fedavg", "--federation", server.path, "--plain", "--vocab", tmp_path / "vocab.json", *SMALL,
             "--set", "train.cohort=2", "--rounds", 6, "--out", out, "--json"], tmp_path,
        )  # fmt: skip
        try:
            begun = wait_until(
                lambda: (out / "metrics.jsonl").exists() and len(read_metrics(out)) > 0, 150, alive(process)
            )
            assert begun, process.communicate(timeout=60)[1][-2000:]
            (noted,) = begun_runs(server)
            assert (noted.out, noted.works) == (out, True)
            link = processes._running["superlink"]
            children = descendants(link.pid)
            os.kill(link.pid, signal.SIGKILL)
            link.wait(10)
            assert wait_until(lambda: not any(running(pid) for pid in children), 30, lambda: True)
            assert begun_runs(server) == [noted._replace(works=False)]
            start_superlink(processes, server, "127.0.0.1", int(address.rpartition(":")[2]))

            def ended():
                for client in clients:
                    client.tend()
                return process.poll() is not None

            assert wait_until(ended, 300, lambda: True, 0.5)
            told, err = process.communicate(timeout=30)
            assert wait_until(lambda: not begun_runs(server)[0].works, 30, lambda: True)
        finally:
            process.kill()
            process.wait(10)
    (again,) = begun_runs(server)
    assert (again.out, again.number == noted.number) == (out, False)
    assert (read_run(out, again.works).state, read_run(out, again.works).done) == ("finished", 6)
    assert process.returncode == 0, err[-2000:]
    assert "waiting for the server" in err
    assert json.loads(told)["rounds"] == 6
    assert [record["round"] for record in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


def alive(process):
    return lambda: process.poll() is None


def test_words_of_english_start_from_the_base_model(tmp_path):
    write_texts(tmp_path / "text")
    given = ["up", "fedavg", "--clients", 3, "--data", tmp_path / "text", "--rounds", 1, "--set", "data.window=8"]
    result = json.loads(run([*given, "--out", tmp_path / "real", "--json"], tmp_path))
    base = load_base()
    assert (result["start"]["from"], result["start"]["sha256"]) == ("base", base.sha256)
    config, made = read_run_toml(tmp_path / "real")
    assert (config.train.init, made["init_sha256"]) == ("base", base.sha256)
    result = json.loads(run([*given, "--init", "none", "--out", tmp_path / "closed", "--json"], tmp_path))
    assert result["start"] == {"from": "random"}
