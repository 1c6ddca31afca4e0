"""The benchmark's parts, one by one: the captured loop, interleaving, precision, the floor, the plot."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from keyfed.errors import ConfigError
from keyfed.lab.bench import contenders, measure
from keyfed.lab.bench.bench import measured, parse, plot_bench
from keyfed.lab.bench.contenders import Task, movement, plain, plain_graph, synthetic_texts, with_precision
from keyfed.lab.bench.floor import measure_floor, products
from keyfed.lab.bench.measure import measure_cuda
from keyfed.model.cells import gates_of
from keyfed.text.vocab import PAD

TINY = Task("gru", vocab=50, clients=3, tokens=371)


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


@pytest.mark.parametrize("model", ["gru", "lstm"])
def test_the_captured_loop_trains_as_the_plain_one_round_after_round(replayed, model):
    task = replace(TINY, model=model, clients=2, epochs=2)
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
        monkeypatch.setitem(measure.ON_CUDA, who, measure.Contender(opener(who)))
    runs = measure_cuda(dict.fromkeys(names, TINY), repeats=2, say=print)
    assert called == ["plain", "plain", "keyfed", "keyfed", "plain", "keyfed", "plain", "keyfed"]
    assert [len(r) for r in runs.values()] == [2, 1, 2, 1]
    assert runs["central"] == [{"note": "failed: RuntimeError"}]
    assert runs["keyfed-bf16"] == [{"note": "no such precision"}]
    assert runs["plain"][0]["peak_bytes"] == 30
    assert runs["plain"][0]["check"] == pytest.approx(sum(p.numel() for p in TINY.params.values()) ** 0.5)


def test_precision_is_handed_on_where_the_engine_has_it_and_refused_where_not():
    @dataclass(frozen=True)
    class Old:
        seed: int = 1

    @dataclass(frozen=True)
    class New:
        precision: str = "fp32"

    assert with_precision(Old(), "fp32") == Old()  # type: ignore[arg-type]
    assert with_precision(New(), "bf16") == New("bf16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bf16 was asked for"):
        with_precision(Old(), "bf16")  # type: ignore[arg-type]


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
