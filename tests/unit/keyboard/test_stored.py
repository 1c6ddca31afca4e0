"""Tables of the keyboard's page are those of the kept figures, between marks that stand where they belong."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from keyfed.keyboard.graph import state_widths, step_graph
from keyfed.keyboard.measure import keyboard_markdown
from keyfed.model.language_model import ModelSpec, init_params

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "keyboard.md"


def benchmark(name):
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


stored = benchmark("stored")
STORED = {one.script: one for one in stored.all_stored()}


@pytest.mark.parametrize("name", STORED)
def test_a_table_is_that_of_the_kept_figures_in_its_section(name):
    text = PAGE.read_text("utf-8")
    assert STORED[name].page == PAGE
    assert STORED[name].placed(text) == text, "python benchmarks/stored.py"


def test_every_generated_block_of_the_page_is_known_and_closed():
    text = PAGE.read_text("utf-8")
    measured = json.loads((PAGE.parent / "results" / "data" / "keyboard-irc.json").read_text("utf-8"))
    gboard = "<!-- made from docs/results/data/keyboard-irc.json by keyfed.keyboard.measure.keyboard_markdown -->"
    blocks = {gboard: "<!-- end -->", **dict(one.marks for one in STORED.values())}
    found = re.findall(r"^<!-- .* -->$", text, re.M)
    assert list(zip(found[::2], found[1::2], strict=True)) == sorted(blocks.items(), key=lambda b: text.index(b[0]))
    assert text.partition(gboard)[2].partition("<!-- end -->")[0].strip() == keyboard_markdown(measured).strip()
    before = text.partition(gboard)[0]
    assert stored.HEADING.findall(before)[-1] == "## Measured like Gboard"


@pytest.fixture
def kept(tmp_path):
    """A benchmark with a page and figures of its own."""
    (tmp_path / "results" / "data").mkdir(parents=True)
    one = stored.Stored("some", "some.json", "## Here", lambda found: f"| {found['n']} |", tmp_path)
    one.page.write_text("\n\n".join(["# Page", "## Here", *one.marks, "## There"]), "utf-8")
    return one


def test_figures_and_their_table_are_written_together(kept):
    kept.write_page()
    assert "No figures are kept yet." in kept.page.read_text("utf-8")
    kept.write({"n": 3})
    begin, end = kept.marks
    assert kept.page.read_text("utf-8") == f"# Page\n\n## Here\n\n{begin}\n\n| 3 |\n\n{end}\n\n## There"
    assert kept.figures() == {"n": 3}


@pytest.mark.parametrize(
    "change",
    [
        lambda text, begin, end: text.replace(begin, ""),
        lambda text, begin, end: text.replace(end, ""),
        lambda text, begin, end: f"{text}\n{begin}\n{end}",
        lambda text, begin, end: f"## Here\n{end}\n{begin}\n",
        lambda text, begin, end: text.replace(end, f"## There\n{end}"),
        lambda text, begin, end: text.replace("## Here", "## Here\n\n### More"),
    ],
)
def test_marks_that_are_missing_or_misplaced_are_refused_before_anything_is_written(kept, change):
    kept.page.write_text(changed := change(kept.page.read_text("utf-8"), *kept.marks), "utf-8")
    with pytest.raises(ValueError, match=r"has to have these marks|stands below"):
        kept.write({"n": 3})
    assert kept.page.read_text("utf-8") == changed
    assert not kept.path.exists()


def run(name, monkeypatch, *arguments):
    """Call a benchmark's main; what measures ends the test."""
    module = benchmark(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    for one in ("fetch_runtime", "exported", "chromium", "own_lines"):
        monkeypatch.setattr(module, one, lambda *_: pytest.fail("it has begun"), raising=False)
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("keyboard_network", ["gru", "cigf"], 'model "cigf" is not known (did you mean cifg?)'),
        ("keyboard_network", ["gru", "--write"], "leave the names out"),
        ("keyboard_everyday", ["runs/mine", "--trial", "--write"], "no RUN, no --source"),
        ("keyboard_everyday", ["--trial", "--source", "network", "--write"], "no RUN, no --source"),
        ("keyboard_browser", ["runs/mine", "--write"], "leave RUN out"),
        ("keyboard_training", ["runs/mine", "--write"], "leave RUN out"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_one_line_before_anything_runs(name, arguments, said, monkeypatch, capsys):
    assert run(name, monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err


def network_row(**changed):
    times = {"p50": 1.0, "p95": 2.0}
    row = {"preset": "gru", "row": "token", "beam_rows": None, "parameters": 9, "most_nats": 1e-6, "range_nats": 9.0}
    return row | {"javascript": times, "inputs": times, "baked": times} | changed


def test_a_preset_is_held_against_15_ms_and_the_cifg_against_the_quicker_column():
    missed = benchmark("keyboard_network").missed
    slow = {"p50": 15.1, "p95": 16.0}
    assert missed(network_row()) == missed(network_row(baked={"p50": 0.1, "p95": 0.1})) == []
    assert missed(network_row(javascript=slow)) == ["more than 15.00 ms"]
    assert missed(network_row(preset="cifg", baked={"p50": 0.4, "p95": 9.0})) == ["more than 0.40 ms"]
    assert missed(network_row(preset="cifg")) == []
    assert missed(network_row(most_nats=2e-4)) == ["more than 1e-04 nats"]


def test_the_tables_of_the_network_and_of_training_show_what_was_measured():
    where = {"date": "2026-11-19", "machine": "CPU, 2 cores", "load_per_core": {"before": 0.04, "after": 1.0},
             "versions": {"python": "3.11", "Chromium": "156"}}  # fmt: skip
    word = network_row(row="word", beam_rows=36.4, javascript={"p50": 20.0, "p95": 30.0})
    text = STORED["keyboard_network"].tables({**where, "runs": 3, "tokens": 300, "rows": [network_row(), word]})
    assert "CPU, 2 cores, load before 0.0 and after 1.0 a core; Chromium 156; 2026-11-19" in text
    assert (
        "| gru | 9 | word, 36 rows | 20.00 / 30.00 | 1.00 / 2.00 | 1.00 / 2.00 | 1e-06 | more than 15.00 ms |" in text
    )
    training = benchmark("keyboard_training")
    row = {"training": {"p50": 9.0, "p95": 31.0}, "quiet": {"p50": 5.0, "p95": 8.0}, "epoch_s": 12.5,
           "memory": {"private_mb": 120.0, "anonymous_mb": 132.0}}  # fmt: skip
    text = training.tables({**where, "tokens": 2000, "runs": 3, "bars": training.bars(row), **row})
    assert "| key to strip while it trains, physical, p95, ms | 31.0 | ≤ 30 | missed |" in text
    assert "| seconds of an epoch | 12.5 | ≤ 60 |  |" in text
    assert "120 MB of private pages, 132 of anonymous ones" in text


def test_either_form_of_memory_has_the_bar():
    browser = benchmark("keyboard_browser")
    written = {"p50": 1.0, "p95": 2.0}
    memory = {"private_mb": 90.0, "anonymous_mb": 102.0}
    rows = [
        {"source": browser.DEFAULT, "keys": keys, "slower": slower, "written": written, "memory": memory}
        for keys in ("physical", "screen") for slower in (1, browser.SLOWER)
    ]  # fmt: skip
    visits = {"cold_bytes": 2.4e6, "cold_ms": 700, "reload_ms": 400}
    found = {bar["what"]: bar for bar in browser.bars(visits, rows)}
    assert found["memory of the page's process, private pages, MB"]["holds"]
    assert not found["the same, anonymous pages (task manager), MB"]["holds"]
    assert "102 | ≤ 100 | missed |" in browser.bar_markdown(list(found.values()))


def test_everyday_figures_are_held_against_the_bars_in_the_kept_column_alone():
    everyday = benchmark("keyboard_everyday")
    figures = {name: [1, 1] for name in everyday.BARS} | {"keys saved": [44, 100], "proper words replaced": [0.001]}
    text = everyday.tables({"kept": {"date": "b", "figures": figures}, "trial": {"date": "a", "figures": figures}})
    assert "| keys saved | 44.00 % (44 of 100) | 44.00 % (44 of 100): missed | ≥ 45 % |" in text
    assert "| proper words replaced | 0.1 % | 0.1 % | ≤ 0.5 % |" in text
    assert "| measured on | a | b |  |" in text


def test_a_graph_with_weights_baked_in_is_the_graph_of_the_export():
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    spec = ModelSpec("odd", "cifg", vocab=41, embed=7, hidden=9, layers=2, projection=7, tied=True)
    weights = {name: 4 * value.numpy() for name, value in init_params(spec, 1).items()}
    graph = step_graph(spec)
    baked = benchmark("keyboard_network").baked(graph, weights)
    states = {name: np.full((2, width), 0.3, np.float32) for name, width in state_widths(spec).items()}
    assert [value.name for value in baked.graph.input] == ["token", *states]
    feeds = {"token": np.array([5, 9], np.int32), **states}
    one, two = (
        runtime.InferenceSession(of.SerializeToString(), providers=["CPUExecutionProvider"]) for of in (graph, baked)
    )
    for mine, theirs in zip(one.run(None, feeds | weights), two.run(None, feeds), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
