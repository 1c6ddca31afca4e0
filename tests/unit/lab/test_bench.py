"""`keyfed bench`: every contender trains the same round, the table says what was measured, mistakes are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from keyfed.cli import app
from keyfed.errors import ConfigError
from keyfed.lab.bench import bench as bench_module
from keyfed.lab.bench import measure
from keyfed.lab.bench.bench import agreement, bench, bench_text, compare, main, measure_table, median_row
from keyfed.lab.bench.contenders import BATCH, Task, plain
from keyfed.lab.bench.measure import Contender, measure_here, missing

TINY = Task("gru", vocab=50, clients=3, tokens=371)  # 37 columns a row: a whole window and a short one


def run_cli(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["keyfed", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def plain_check() -> float:
    return float(measure_here("plain", TINY)["check"])


@pytest.mark.parametrize("who", ["keyfed", "keyfed-2"])
def test_our_engine_moves_the_model_as_the_plain_loop_does(who, plain_check):
    cost = measure_here(who, TINY)
    assert cost["check"] == pytest.approx(plain_check, rel=1e-5)
    assert cost["cpu_seconds"] > 0
    assert cost["peak_bytes"] > 5e7
    assert cost["processes"] >= (3 if who == "keyfed-2" else 1)  # Python's resource tracker is one more


def test_central_training_reads_as_many_tokens_and_ends_elsewhere(plain_check):
    cost = measure_here("central", TINY)
    assert cost["check"] > 0
    assert cost["check"] != pytest.approx(plain_check, rel=1e-2)


def test_epochs_move_the_model_further(plain_check):
    twice = Task("gru", vocab=50, clients=3, tokens=371, epochs=2)
    assert twice.predicted == 2 * 3 * 370
    check = measure_here("plain", twice)["check"]
    assert check > 1.5 * plain_check
    assert measure_here("keyfed", twice)["check"] == pytest.approx(check, rel=1e-5)


def test_the_two_layer_lstm_is_compared_too():
    task = Task("lstm", vocab=50, clients=1, tokens=71)
    assert measure_here("keyfed", task)["check"] == pytest.approx(measure_here("plain", task)["check"], rel=1e-5)


def test_a_contender_that_does_something_else_is_named(monkeypatch):
    @contextmanager
    def wrong(task):
        with plain(task) as round:
            yield lambda cohort: {name: 1.01 * p for name, p in round(cohort).items()}

    monkeypatch.setitem(measure.ON_CPU, "keyfed", Contender(wrong))
    monkeypatch.setattr(bench_module, "measure_apart", lambda who, asked: measure_here(who, Task(**asked)))
    table = measure_table(TINY, ["plain", "keyfed"], 1, print)
    assert table["rows"]["plain"]["agrees"] is True
    assert table["rows"]["keyfed"]["agrees"] is False
    assert "NO: moved" in agreement("keyfed", table["rows"]["keyfed"])


def test_ratios_are_to_plain_and_two_workers_to_one():
    cost = {"peak_bytes": 10, "check": 1.0, "precision": "fp32"}
    rows = {
        "plain": {**cost, "cpu_seconds": 10.0, "wall_seconds": 10.0},
        "keyfed": {**cost, "cpu_seconds": 8.0, "wall_seconds": 8.0, "peak_bytes": 6, "check": 1.0009},
        "keyfed-2": {**cost, "cpu_seconds": 8.4, "wall_seconds": 4.0, "check": 1.0011},
        "pfl": {"note": "not installed", "precision": "fp32"},
    }
    compare(rows, ["plain", "keyfed", "keyfed-2", "pfl"])
    assert (rows["keyfed"]["cpu_ratio"], rows["keyfed"]["speedup"], rows["keyfed"]["memory_ratio"]) == (0.8, 1.25, 0.6)
    assert (rows["keyfed"]["agrees"], rows["keyfed-2"]["agrees"]) == (True, False)
    assert rows["keyfed-2"]["speedup_over_one_worker"] == 2.0
    assert set(rows["pfl"]) == {"note", "precision"}


def test_a_row_is_the_median_of_its_runs_part_by_part():
    runs = [{"cpu_seconds": s, "wall_seconds": s, "parts": {"output": s / 2}} for s in (4.0, 1.0, 2.0)]
    row = median_row(runs, 100)
    assert (row["cpu_seconds"], row["parts"], row["tokens_per_second"]) == (2.0, {"output": 1.0}, 50.0)


def test_who_would_keep_more_weights_than_there_is_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1e6)
    assert "keeps" in str(missing(measure.ON_CPU["plain"], TINY))
    assert missing(measure.ON_CPU["keyfed"], TINY) is None
    assert missing(Contender(None, needs="no_such_package"), TINY) == "not installed"


def test_json_is_one_object_with_the_table_and_a_plot_is_drawn(monkeypatch, capsys, tmp_path):
    def ours_apart(who, asked):  # one process is enough to see that its answer comes back
        return measure.measure_apart(who, asked) if who == "keyfed" else measure_here(who, Task(**asked))

    monkeypatch.setattr(bench_module, "measure_apart", ours_apart)
    plot = tmp_path / "bench.png"
    sizes = [
        "--vocab",
        "50",
        "--clients",
        "1",
        "--tokens",
        "71",
        "--repeats",
        "1",
        "--only",
        "plain",
        "--only",
        "keyfed",
    ]
    assert run_cli(monkeypatch, *sizes, "--json", "--plot", str(plot)) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"model", "tokens", "epochs", "repeats", "device", "settings", "machine", "tables"} <= set(result)
    assert result["settings"] == {
        "optimiser": "sgd", "lr": 0.01, "momentum": 0.5, "clip": None, "batch_size": BATCH, "window": 35,
    }  # fmt: skip
    (table,) = result["tables"]
    assert (table["vocab"], table["clients"], list(table["rows"])) == (50, 1, ["plain", "keyfed"])
    keys = "cpu_seconds wall_seconds peak_bytes check tokens_per_second cpu_ratio speedup memory_ratio agrees precision"
    assert set(keys.split()) <= set(table["rows"]["keyfed"])
    assert table["rows"]["keyfed"]["agrees"] is True
    assert len(table["runs"]["keyfed"]) == 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "V = 50, 1 client\n" in bench_text(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "grx"], "did you mean gru?"),
        (["--model", "cifg"], "no counterpart in torch.nn"),
        (["--model", "nwp-small"], "no counterpart in torch.nn"),
        (["--device", "tpu"], "expected cpu or cuda"),
        (["--repeats", "0"], "repeats is 0; expected at least 1"),
        (["--clients", "10", "--clients", "0"], "clients is 0; expected at least 1"),
        (["--vocab", "3"], "vocab is 3; expected at least 8"),
        (["--tokens", "10"], "tokens is 10; expected at least 36"),
        (["--epochs", "0"], "epochs is 0"),
        (["--only", "keyfd"], "did you mean keyfed?"),
        (["--plot", "bench.pdf"], "ends in .png"),
        (["--plot", "no/such/folder/bench.png"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, said):
    assert run_cli(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        bench(device="cuda")


@pytest.mark.parametrize("argument", ["{", '{"vocabulary": [50]}', '{"repeats": 0}', '{"vocab": 50}'])
def test_the_json_entry_says_its_errors_in_one_line(capsys, argument):
    assert main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_json_entry_prints_result_and_table(capsys, monkeypatch):
    monkeypatch.setattr(bench_module, "measure_apart", lambda who, asked: measure_here(who, Task(**asked)))
    assert main(['{"vocab": [50], "clients": [1], "tokens": 71, "repeats": 1, "only": ["plain", "keyfed"]}']) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tables"][0]["rows"]["keyfed"]["agrees"] is True
    assert "memory ×" in captured.err


def test_a_process_that_fails_is_our_defect_unless_it_is_not_ours(monkeypatch):
    broken = {"model": "gru", "vocab": 50, "clients": 1, "tokens": 71, "device": "no such device"}
    real, failed = subprocess.run, {}

    def once(command, **options):  # the very same command is asked for twice: it runs, and fails, once
        if str(command) not in failed:
            failed[str(command)] = real(command, **options)
        return failed[str(command)]

    monkeypatch.setattr(measure.subprocess, "run", once)
    with pytest.raises(RuntimeError, match='"plain" failed'):
        measure.measure_apart("plain", broken)
    monkeypatch.setitem(measure.ON_CPU, "plain", Contender(plain, needs="torch"))
    assert measure.measure_apart("plain", broken)["note"].startswith("failed: ")
    assert len(failed) == 1


def test_memory_and_time_of_child_processes_count(tmp_path):
    ready = tmp_path / "ready"
    work = "import time, sys, pathlib; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass\n"
    others = len(measure.descendants(os.getpid()))
    meter = measure.Meter()
    with (
        meter,
        subprocess.Popen(
            [sys.executable, "-c", work + f"pathlib.Path({str(ready)!r}).touch(); sys.stdin.read()"],
            stdin=subprocess.PIPE,
        ) as child,
    ):
        while not ready.exists():
            assert child.poll() is None
            time.sleep(0.02)  # costs no CPU time: what is counted is the child's
        meter.__exit__()
        found = dict(meter.cost)
        child.communicate()
    assert found["processes"] == others + 2
    assert found["cpu_seconds"] >= 0.45
    assert found["peak_bytes"] > measure.peak_of(os.getpid()) + 1e6
