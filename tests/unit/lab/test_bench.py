"""`keyfed bench`: every contender trains the same round, the table says what was measured, mistakes are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from keyfed.cli import app
from keyfed.errors import ConfigError
from keyfed.lab.bench import bench as bench_module
from keyfed.lab.bench import contenders
from keyfed.lab.bench.bench import (
    agreement,
    bench,
    bench_text,
    compare,
    main,
    measure_cuda,
    measure_here,
    measure_table,
    measured,
    median_row,
    missing,
    parse,
    plot_bench,
)
from keyfed.lab.bench.contenders import (
    BATCH,
    Contender,
    Task,
    measure_floor,
    movement,
    plain,
    plain_graph,
    products,
    synthetic_texts,
)
from keyfed.model.cells import gates_of
from keyfed.text.vocab import PAD

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

    monkeypatch.setitem(contenders.ON_CPU, "keyfed", Contender(wrong))
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
    monkeypatch.setattr(bench_module, "free_bytes", lambda device: 1e6)
    assert "keeps" in str(missing(contenders.ON_CPU["plain"], TINY))
    assert missing(contenders.ON_CPU["keyfed"], TINY) is None
    assert missing(Contender(None, needs="no_such_package"), TINY) == "not installed"


def test_json_is_one_object_with_the_table_and_a_plot_is_drawn(monkeypatch, capsys, tmp_path):
    apart = bench_module.measure_apart

    def ours_apart(who, asked):  # one process is enough to see that its answer comes back
        return apart(who, asked) if who == "keyfed" else measure_here(who, Task(**asked))

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

    def once(command, **options):  # the very same command is asked for twice: one that fails sooner runs once
        if str(command) not in failed:
            failed[str(command)] = real([sys.executable, "-c", "raise RuntimeError('no such device')"], **options)
        return failed[str(command)]

    monkeypatch.setattr(bench_module.subprocess, "run", once)
    with pytest.raises(RuntimeError, match='"plain" failed'):
        bench_module.measure_apart("plain", broken)
    monkeypatch.setitem(contenders.ON_CPU, "plain", Contender(plain, needs="torch"))
    assert bench_module.measure_apart("plain", broken)["note"].startswith("failed: ")
    assert len(failed) == 1


def test_memory_and_time_of_child_processes_count(tmp_path):
    ready = tmp_path / "ready"
    work = "import time, sys, pathlib; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass\n"
    others = len(bench_module.descendants(os.getpid()))
    meter = bench_module.Meter()
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
    assert found["peak_bytes"] > bench_module.peak_of(os.getpid()) + 1e6


# The contenders, one by one: the captured loop, interleaving, the floor, the plot


@pytest.fixture
def replayed(monkeypatch):
    """Replay a "graph" by running its step again, gradients made anew: what a capture does, without a GPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graphs: list[SimpleNamespace] = []

    def new_graph() -> SimpleNamespace:
        graphs.append(SimpleNamespace(replay=lambda: None))
        return graphs[-1]

    real = contenders.GraphTrainer._step

    def step(self) -> None:
        def again() -> None:
            self._optimiser.zero_grad()
            real(self)

        for graph in graphs:
            graph.replay = again
        real(self)

    monkeypatch.setattr(contenders.GraphTrainer, "_step", step)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda g: nullcontext())


@pytest.mark.parametrize(("model", "epochs"), [("gru", 2), ("lstm", 1)])
def test_the_captured_loop_trains_as_the_plain_one_round_after_round(replayed, model, epochs):
    task = replace(TINY, model=model, clients=2, epochs=epochs)
    with plain(task) as round:
        want = round(task.cohort)
    with plain_graph(task) as round:
        for _ in range(2):  # weights, momentum and state are reset in place
            got = round(task.cohort)
            for name, w in want.items():
                torch.testing.assert_close(got[name], w, rtol=1e-5, atol=1e-6, msg=name)


def test_on_a_gpu_contenders_are_warmed_up_and_interleaved(monkeypatch):
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 130)
    called: list[str] = []

    def opener(who: str):
        @contextmanager
        def opened(task):
            if who == "keyfed-bf16":
                raise ConfigError("no such precision")
            if who == "central":
                raise RuntimeError("a defect")
            yield lambda cohort: called.append(who) or {name: p + 1 for name, p in task.params.items()}

        return opened

    names = ("plain", "central", "keyfed", "keyfed-bf16")
    for who in names:
        monkeypatch.setitem(contenders.ON_CUDA, who, Contender(opener(who)))
    runs = measure_cuda(dict.fromkeys(names, TINY), repeats=2, say=print)
    assert called == ["plain", "plain", "keyfed", "keyfed", "plain", "keyfed", "plain", "keyfed"]
    assert [len(r) for r in runs.values()] == [2, 1, 2, 1]
    assert runs["central"] == [{"note": "failed: RuntimeError"}]
    assert runs["keyfed-bf16"] == [{"note": "no such precision"}]
    assert runs["plain"][0]["peak_bytes"] == 30
    assert runs["plain"][0]["check"] == pytest.approx(sum(p.numel() for p in TINY.params.values()) ** 0.5)


def test_the_floor_counts_every_product_of_a_step_once():
    rows, window = 10, 35
    spec, tokens = TINY.spec, 350
    # Forward, gradient by input and by weight: 6 operations for each token and weight of a matrix.
    matrices = gates_of("gru") * 300 * (300 + 300) + spec.vocab * 300
    assert sum(p.flops for p in products(spec, rows, window)) == 6 * tokens * matrices


def test_the_floor_is_the_sum_of_its_parts():
    cost = measure_floor(TINY, least=0.0)
    assert cost["cpu_seconds"] == pytest.approx(sum(cost["parts"].values()))
    assert set(cost["parts"]) == {"input", "recurrent", "output"}
    assert set(cost["beside"]) == {"softmax", "update"}
    # 37 columns a row, ten rows, three clients
    per_token = 6 * (900 * 600 + 50 * 300) / 1e9
    assert cost["gflops"] == pytest.approx(3 * 10 * 37 * per_token)


def test_synthetic_text_holds_words_only_and_the_same_ones_every_time():
    first, again = synthetic_texts(50, 2, 300), synthetic_texts(50, 2, 300)
    assert min(t.min() for t in first) > PAD + 3
    assert max(t.max() for t in first) < 50
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first[0] == first[1]).all()


def test_movement_is_the_distance_over_all_layers():
    assert movement(TINY, TINY.params) == 0
    moved = {name: p + 0.5 for name, p in TINY.params.items()}
    assert movement(TINY, moved) == pytest.approx(0.5 * sum(p.numel() for p in moved.values()) ** 0.5, rel=1e-6)


def test_the_plot_has_a_panel_for_every_vocabulary_and_leaves_out_who_did_not_run(tmp_path):
    rows = {
        "plain": {"tokens_per_second": 5e3, "tokens_per_cpu_second": 6e3},
        "floor": {"tokens_per_cpu_second": 9e3},
        "pfl": {"note": "not installed"},
    }
    tables = [{"vocab": v, "clients": c, "rows": rows} for v in (50, 60) for c in (2, 4)]
    assert measured(tables[0], "cpu") == {"plain": 6e3, "floor": 9e3}
    assert measured(tables[0], "cuda") == {"plain": 5e3}
    plot_bench({"tables": tables, "device": "cpu"}, tmp_path / "two.png")
    plot_bench({"tables": tables[:1], "device": "cuda"}, tmp_path / "one.png")
    assert (tmp_path / "two.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 1000


@pytest.mark.parametrize("text", ['{"vocab": ["a"]}', '{"only": [["plain"]]}', '{"clients": [true]}'])
def test_lists_of_the_wrong_kind_are_one_line(text):
    with pytest.raises(ConfigError, match="expected a list of"):
        parse(text)
