"""The benchmarks of counts: a machine that has torch, numpy and safetensors alone, canaries, and the arithmetic."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from keyfed.lab.audit.canaries import judge_controls
from keyfed.lab.experiment.cell import Workspace
from keyfed.model.counts import CountModel, CountTerms
from keyfed.model.ngram import KneserNey, fit_kneser_ney, level_of
from keyfed.model.tables import texts_of
from keyfed.run.counts.levels import CountPlan, count_ngrams
from tests.absent import BEYOND_TRAINING, run_without
from tests.end_to_end.conftest import write_corpus

SCRIPT_FILE = Path(__file__).parents[2] / "benchmarks" / "counts_study.py"

SCRIPT = """
import runpy
from pathlib import Path
from keyfed.config.load import Config, apply_settings
from keyfed.run.loop import train

settings = ["data.name={data}", "data.vocab=100", "model.embed=8", "model.hidden=8", "train.cohort=2", "train.rounds=1",
            "train.workers=1", "data.window=5", "data.unseen=0.2", "train.baselines=false"]
train(apply_settings(Config(), settings), Path("run"))
runpy.run_path({script!r})["main"](["--runs", "run", "--out", "counts.json", "--device", "cpu"])
"""


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPT_FILE.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(SCRIPT_FILE.parent) not in sys.path:
        sys.path.append(str(SCRIPT_FILE.parent))  # where a script finds its neighbours
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study():
    return module_of("counts_study")


def test_a_machine_with_torch_alone_measures_a_run(tmp_path):
    data = write_corpus(tmp_path / "texts")
    script = SCRIPT.format(data=data, script=str(SCRIPT_FILE))
    done = run_without(BEYOND_TRAINING, script, cwd=tmp_path)
    (run,) = json.loads((tmp_path / "counts.json").read_text("utf-8"))["runs"]
    rows = {name: row["test"]["perplexity"] for name, row in run["rows"].items()}
    assert rows["mixture"] < rows["network"]  # which learnt next to nothing in a round
    assert rows["pooled"] < rows["unigram"]
    assert all(row["unseen"]["perplexity"] > 1 for row in run["rows"].values())
    shown = [line for line in done.stdout.splitlines() if "| mixture |" in line]
    assert f"{rows['mixture']:.1f}" in shown[0]
    assert f"{100 * (rows['mixture'] / rows['network'] - 1):+.1f} %" in shown[0]


def test_every_n_gram_of_pooled_text_is_counted_as_it_is_used(study):
    words = np.array([4, 5, 4, 5, 6], np.int32)
    tables = study.pooled_tables(texts_of([words, np.array([4, 5], np.int32)]), 3, 7)
    at = tables[0].find(np.array([4, 5, 6]))
    assert (tables[0].counts[at].tolist(), tables[0].clients[at].tolist()) == ([3, 3, 1], [2, 2, 1])
    pair = tables[1].find(np.array([tables[0].find(np.array([4]))[0] * 7 + 5]))
    assert (tables[1].counts[pair].tolist(), tables[1].clients[pair].tolist()) == ([3], [2])


def test_pooled_counts_are_ranked_by_whole_distributions(study):
    """Counts that back off may lower a word in a longer context: `KneserNey.top` then misses words."""
    size = np.array([3, 0, 0, 0, 0])  # after word 0 came 0, 1 and 2, more rarely than words alone say
    first = level_of(np.arange(5), np.array([0.4, 0.3, 0.15, 0.1, 0.05]), np.ones(2), np.array([5]), 5)
    backoff = np.array([0.97 / 0.15, 1, 1, 1, 1, 1])
    second = level_of(np.array([0, 1, 2]), np.array([0.01, 0.01, 0.01]), backoff, size, 5)
    counts = (np.full(5, 9), np.full(3, 9))
    model = CountModel(KneserNey(2, 5, (first, second), ()), counts, counts, CountTerms(3, 1, 1, 8, ""))
    stream = np.array([0, 3, 0, 4], np.int32)
    assert model.model.top(stream, 3)[0].tolist() == [0, 1, 2]
    score = study.score_alone(model, {"a": stream}, lines=False)
    assert (score.tokens, score.top1, score.top3) == (3, 2, 3)  # 3 and 0 are first, 4 is second
    assert score.nats == pytest.approx(model.model.nats(stream).sum(), rel=1e-6)


def test_the_cells_are_those_of_the_studies(study, tmp_path):
    for name, method, seeds in (("irc", "fednesterov", [31, 32, 33]), ("ptb", "fednesterov", [21, 22, 23])):
        found = list(study.configs(name, Workspace(tmp_path, "cpu")))
        assert [seed for seed, _ in found] == seeds
        assert {config.method for _, config in found} == {method}
    assert {config.train.rounds for _, config in found} == {50}


def test_the_table_has_means_and_deviations_over_seeds(study):
    def run(seed, network, mixture):
        rows = {name: {"test": {"perplexity": network, "top1_words": 0.1, "top3_words": 0.2}} for name in study.ROWS}
        rows["mixture"]["test"] = {"perplexity": mixture, "top1_words": 0.1 + seed / 100, "top3_words": 0.3}
        return {"data": "irc", "seed": seed, "rows": rows}

    lines = study.table([run(1, 50.0, 45.0), run(2, 60.0, 48.0)])
    shown = next(line for line in lines if "| mixture |" in line)
    assert shown == "| irc, 1, 2 | mixture | 46.5 ± 2.1 | -15.0 % | 11.50 ± 0.71 % | 30.00 ± 0.00 % |"


def test_endings_of_canaries_are_read_one_by_one_and_a_phrase_of_the_text_is_exposed():
    canaries = module_of("counts_canaries")
    draw = np.random.default_rng(3)
    lines = [np.append(draw.integers(4, 40, 5), 2) for _ in range(300)]
    said = lines[7][:5]
    model = fit_kneser_ney([np.concatenate([*lines, *[lines[7]] * 20]).astype(np.int32)], 40, 3)
    ends = draw.integers(4, 40, (50, 3))
    alone = [model.nats(np.array([2, *said[:2], *end], np.int32))[2:].sum() for end in ends]
    assert canaries.ending_nats(model, said[:2].tolist(), ends) == pytest.approx(alone, rel=1e-12)
    bits = canaries.exposures(model, np.stack([said, draw.integers(4, 40, 5)]), 40, "candidates")
    assert bits[0] > 10 > bits[1]
    row = canaries.figures("none", [3.0, 6.25], [11.0, 2.0, 1.0], [4, 4, 1], judge_controls([0.5, 1.5]))
    (table,) = canaries.table([row])
    assert table.splitlines()[2].startswith("| none | 3, 6.2 | 1 of 2 (6.5) | 0 of 1 (1.0) | 1.0, ")


def test_a_fleet_sums_every_client_many_times_and_those_with_canaries_once():
    canaries = module_of("counts_canaries")
    own = {"a": np.array([5, 6, 2], np.int32), "b": np.array([5, 7, 2], np.int32)}
    counting = canaries.fleet(own, {"b": np.array([5, 7, 2, 8, 2], np.int32)}, 10)
    assert counting.clients == 21
    assert counting.members == 2
    plan = CountPlan(1, 1, 1, 100, "", ())
    (table,), _ = count_ngrams(counting, plan, 9)
    assert dict(zip(table.keys.tolist(), table.clients.tolist(), strict=True)) == {2: 21, 5: 21, 6: 10, 7: 11, 8: 1}
