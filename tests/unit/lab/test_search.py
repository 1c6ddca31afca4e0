"""A search of several methods: equal trials and tokens, validation text only, who goes on, going on, sharing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError
from keyfed.lab.experiment.cell import Workspace, config_of
from keyfed.lab.experiment.grid import MEASURES, cells_of, load_study, study_from
from keyfed.lab.experiment.page import BEGIN, END, methods_block, page_text, with_block
from keyfed.lab.experiment.runner import parse_where, run_study
from keyfed.lab.experiment.search import Rung, halve_on
from keyfed.lab.experiment.store import Store, counted, races
from keyfed.lab.experiment.tune import write_winners
from keyfed.run.prepare import prepare
from tests.listeners import Heard

ROOT = Path(__file__).parents[3]
STUDY = """
title = "A search"
paper = "Search"
about = "Two methods."
measures = ["valid_perplexity"]

[base]
study.tokens = 400
data.name = "DATA"
data.vocab = 40
data.unseen = 0.2
data.window = 5
data.max_tokens = 40
model.name = "cifg"
model.embed = 8
model.hidden = 8
train.cohort = 2
train.schedule = "cosine"
train.valid_tokens = 200
train.checkpoint_every = 1000
method.batch_size = 2

[axis.method]
fedavg = { method.name = "fedavg" }
admm = { method.name = "admm" }

[[grid]]
runner = "trial"
method = ["fedavg", "admm"]

[search]
seed = 3
winners = "winners.toml"
rungs.smoke = [[4, 0.5], [2, 1.0]]
rungs.standard = [[4, 0.3], [2, 0.6], [1, 1.0]]
rungs.paper = [[4, 0.3], [2, 0.6], [1, 1.0]]

[[search.draws]]
where = { method = ["fedavg", "admm"] }
trials = 3
set = { method.optimiser = "sgd", method.clip = 0.25 }
ranges = { method.lr = "0.5..50:log", train.average = ["none", 0.5] }

[[search.draws]]
where = { method = ["fedavg", "admm"] }
trials = 1
set = { method.optimiser = "adam" }
ranges = { method.lr = "0.001..0.1:log" }

[[search.draws]]
where = { method = "admm" }
ranges = { method.rho = "0.0001..0.01:log" }

[scale.smoke]
seeds = [1]
why = "a test"

[scale.standard]
seeds = [1]
why = "a test"

[scale.paper]
seeds = [1]
why = "a test"
"""
JUDGED = """
title = "Judged"
paper = "Methods"
about = "Two methods."
measures = ["perplexity"]
winners = "winners.toml"

[base]
absent = "its search is open"

[axis.method]
fedavg = {}
admm = {}

[[grid]]
method = ["fedavg", "admm"]

[scale.standard]
seeds = [31]
why = "a test"
"""


def write_corpus(path: Path) -> None:
    draw = random.Random(2)
    words = [f"w{k}" for k in range(20)]
    with path.open("w") as file:
        for author in range(5):
            for _ in range(30):
                text = " ".join(draw.choices(words, k=draw.randint(4, 8)))
                file.write(json.dumps({"author": f"a{author}", "text": text}) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "said.jsonl")
    (tmp_path / "search.toml").write_text(STUDY.replace("DATA", str(tmp_path / "said.jsonl")), "utf-8")
    (tmp_path / "methods.toml").write_text(JUDGED, "utf-8")
    (tmp_path / "winners.toml").write_text("", "utf-8")
    return tmp_path


def search(folder: Path, name: str = "r", scale: str = "standard", listener=None, **more):
    study = load_study("search", folder)
    workspace = Workspace(folder / f"work-{name}", "cpu")
    progress = run_study(study, scale, store=Store(folder / name), workspace=workspace, listener=listener, **more)
    return study, progress, Store(folder / name).of(study)


def told(found) -> dict[str, object]:
    """All that a search has found, but how long it took."""
    return {key: {k: v for k, v in record.items() if k != "seconds"} for key, record in found.items()}


def test_every_method_has_the_same_trials_and_tokens_and_the_best_go_on(folder):
    study, progress, found = search(folder)
    assert (progress.failed, progress.open, len(progress.done)) == ((), (), 2 * (4 + 2 + 1))
    one, two = races(study, cells_of(study, "standard"), found)
    assert len(one.trials) == len(two.trials) == 4

    def spent(race, rung):
        return sorted(record["rungs"][rung][0] for record in race.records.values() if len(record["rungs"]) > rung)

    for rung, trials in enumerate((4, 2, 1)):
        assert len(spent(one, rung)) == trials
        assert spent(one, rung) == spent(two, rung)
    assert spent(one, 2)[0] == pytest.approx(400, rel=0.2)
    for race in (one, two):
        first = {cell.id: race.records[cell.id]["rungs"][0][2] for cell in race.trials}
        on = {key for key, record in race.records.items() if len(record["rungs"]) > 1}
        assert on == set(sorted(first, key=first.__getitem__)[:2])
        assert race.winner is not None
        best = min((race.records[key]["rungs"][1][2], key) for key in on)[1]
        assert race.winner.id == best
    for record in found.values():
        assert {"valid_perplexity", "valid_nats"} <= set(record["measures"])
        assert set(record["measures"]).isdisjoint({*MEASURES, "unseen_perplexity"})  # which are of the test
        assert record["made"]["hardware"]
        assert record["seconds"] > 0
        assert str(folder / "work-r") not in json.dumps(record)
    assert not list((folder / "work-r" / "search").glob("*"))  # what will not train on is not kept
    assert counted(study, "standard", found) == (14, 0)


def test_the_test_text_is_not_read(folder):
    """Other words in every test line change nothing that a search says."""
    study, _, found = search(folder, "before", "smoke")
    config = config_of(cells_of(study, "smoke")[0].settings, 1, Workspace(folder, "cpu"))
    before = prepare(config)
    held = {line for c in before.population.clients for line in c.test}
    held |= {line for c in before.population.unseen for line in c.test}
    kept = {line for c in before.population.clients for line in (*c.train, *c.valid)}
    assert len(held - kept) > 30
    path = folder / "said.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["text"] in held - kept:
            record["text"] = " ".join(["w0"] * len(record["text"].split()))
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    after = prepare(config)
    assert any((after.test[name] != stream).any() for name, stream in before.test.items())
    assert all((after.valid[name] == stream).all() for name, stream in before.valid.items())
    _, _, again = search(folder, "after", "smoke")
    sha = {record.pop("data_sha256") for record in again.values()}
    assert sha.isdisjoint({record.pop("data_sha256") for record in found.values()})
    assert told(again) == told(found)


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(folder):
    _, _, whole = search(folder)
    for after in (2, 5, 7):
        with pytest.raises(KeyboardInterrupt):
            search(folder, "cut", listener=Heard(count=after))
    assert search(folder, "cut", minutes=0)[1].open
    search(folder, "cut", most=3)
    shutil.rmtree(folder / "work-cut")  # another machine, without the runs: trials that go on begin anew
    _, progress, found = search(folder, "cut")
    assert progress.open == ()
    assert told(found) == told(whole)


def test_a_trial_that_goes_on_trains_only_the_rounds_that_are_left(folder):
    heard = Heard()
    _, _, found = search(folder, listener=heard, where={"method": ["fedavg"]})
    assert len(heard.rounds) == sum(record["rungs"][-1][1] for record in found.values())


def test_processes_share_a_search(folder):
    _, _, alone = search(folder, "alone", "smoke")
    command = [sys.executable, "-m", "keyfed.lab.experiment.runner", "search", "--scale", "smoke", "--device", "cpu"]
    command += ["--studies", str(folder), "--results", str(folder / "both"), "--work", str(folder / "work-both")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pair = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    told_by = [json.loads(process.communicate(timeout=300)[0]) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum(len(one["done"]) for one in told_by) == 12  # each step once, whoever takes it
    assert all(one["open"] == [] for one in told_by)
    assert told(Store(folder / "both").of(load_study("search", folder))) == told(alone)


def test_the_command_searches_by_a_plan(keyfed, folder, monkeypatch):
    (folder / "studies").mkdir()
    for name in ("search.toml", "methods.toml", "winners.toml"):
        (folder / name).rename(folder / "studies" / name)
    (folder / "studies" / "winners.toml").rename(folder / "winners.toml")  # no study
    text = (folder / "studies" / "search.toml").read_text("utf-8")
    (folder / "studies" / "search.toml").write_text(text.replace('"winners.toml"', '"../winners.toml"'), "utf-8")
    (folder / "studies" / "methods.toml").unlink()
    monkeypatch.chdir(folder)
    code, out, err = keyfed("tune", "--plan", "search", "--device", "cpu", "--where", "method=fedavg", "--json")
    assert code == 0, err
    assert json.loads(out)["open"] == []
    assert "Every trial" in (folder / "docs" / "results" / "search.md").read_text("utf-8")
    code, _, err = keyfed("tune", "fedavg", "--plan", "search")
    assert (code, "--plan has its own methods" in err) == (2, True)


@given(st.lists(st.none() | st.floats(1, 1000), min_size=4, max_size=8), st.integers(1, 3), st.randoms())
def test_who_goes_on_is_who_sorting_finds(scores, on, draw):
    trials = [f"t{k}" for k in range(len(scores))]
    rungs = [Rung(len(scores), 0.5), Rung(on, 1.0)]
    found = {t: {"rungs": [[1, 1, score]]} for t, score in zip(trials, scores, strict=True)}
    usable = [(score, k) for k, score in enumerate(scores) if score is not None]
    expected = {f"t{k}" for _, k in sorted(usable)[:on]}
    now = halve_on(rungs, trials, found)
    assert set(now.open) == expected
    if not expected:
        assert (now.winner, now.rung) == (None, 2)  # every trial has diverged
        return
    late = draw.choice(sorted(expected))
    found[late]["rungs"].append([2, 2, 0.5])
    assert set(halve_on(rungs, trials, found).open) == expected - {late}
    for trial in expected - {late}:
        found[trial]["rungs"].append([2, 2, 7.0])
    assert halve_on(rungs, trials, found).winner == late
    missing = {key: record for key, record in found.items() if key != trials[0]}
    assert trials[0] in halve_on(rungs, trials, missing).open  # nothing is decided before all are there


MISTAKES = {
    "trials": ("trials = 1\n", "trials = 2\n", "search.toml: a row's draws have 5 trials; expected 4"),
    "share": (
        "[1, 1.0]]\nrungs.paper",
        "[1, 0.9]]\nrungs.paper",
        "rungs.standard of [search] is [[4, 0.3], [2, 0.6], [1, 0.9]]; expected",
    ),
    "order": ("standard = [[4, 0.3], [2", "standard = [[4, 0.3], [5", "rungs.standard of [search]"),
    "scale": ("rungs.smoke = [[4, 0.5], [2, 1.0]]\n", "", "rungs.smoke of [search] is None; expected"),
    "option": ("method.rho", "method.rh0", 'search.toml: a draw of [search] has the range "method.rh0"'),
    "range": ('"0.0001..0.01:log"', '"0.01"', 'a draw of [search] got "method.rho=0.01"; expected two numbers'),
    "one": ('["none", 0.5]', "[0.5]", "train.average = [0.5]; expected"),
    "label": ('where = { method = "admm" }', 'where = { method = "adm" }', 'method of a draw of [search] "adm" is not'),
    "key": ("seed = 3", "sed = 3", 'key of search "sed" is not known'),
    "tokens": ("study.tokens = 400\n", "", "has no study.tokens; cells of runner trial need it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_search_is_named(mistake, tmp_path):
    old, new, said = MISTAKES[mistake]
    assert old in STUDY
    with pytest.raises(ConfigError) as e:
        study_from(tomllib.loads(STUDY.replace(old, new)), tmp_path / "search.toml")
    assert said in str(e.value)
    assert str(e.value).startswith("search.toml: ")


def test_rows_are_chosen_by_label_and_a_row_keeps_all_its_trials(folder):
    study, progress, found = search(
        folder, scale="smoke", where=parse_where(load_study("search", folder), ["method=admm"])
    )
    assert {record["labels"]["method"] for record in found.values()} == {"admm"}
    assert len(progress.done) == 6
    for said in ("trial=1", "method=fedavgg", "corpus=irc"):
        with pytest.raises(ConfigError, match="--where: "):
            parse_where(study, [said])


def test_winners_become_the_settings_of_the_judged(folder):
    judged = load_study("methods", folder)
    assert {cell.absent for cell in cells_of(judged, "standard")} == {"its search is open"}
    study, _, found = search(folder, where={"method": ["fedavg"]})
    write_winners(study, Store(folder / "r"), folder)
    cells = {cell.labels["method"]: cell for cell in cells_of(load_study("methods", folder), "standard")}
    (race, _) = races(study, cells_of(study, "standard"), found)
    record = found[race.winner.id]
    kept = {key: value for key, value in record["settings"].items() if not key.startswith("study.")}
    rounds = record["whole"]
    assert cells["fedavg"].settings == kept | {"train.rounds": rounds, "train.eval_every": max(1, rounds // 20)}
    assert (cells["fedavg"].absent, cells["admm"].absent) == ("", "its search is open")
    (searched,) = load_study("methods", folder).searched
    assert (searched.trials, searched.where) == (4, {"method": "fedavg"})
    assert searched.tokens == sum(r["rungs"][-1][0] for r in found.values())


def test_the_page_has_every_trial_and_says_what_is_open(folder):
    study, _, found = search(folder, scale="smoke", where={"method": ["fedavg"]})
    text = page_text(study, found)
    assert "6 steps of trials are **open**" in text
    assert "| admm | 0 of 4 | – | open |" in text
    best = min(r["rungs"][-1][2] for r in found.values() if len(r["rungs"]) == 2)
    assert text.count("optimiser adam") >= 1
    assert f"{best:.1f}" in text


def test_the_files_that_the_search_writes_match_its_data(tmp_path):
    study = load_study("search", ROOT / "studies")
    store = Store(ROOT / "docs" / "results")
    (tmp_path / "runs").mkdir()
    written = write_winners(study, store, tmp_path)
    assert written.read_text("utf-8") == (ROOT / "studies" / study.search.winners).read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    methods = load_study("methods", ROOT / "studies")
    assert readme.count(BEGIN) == readme.count(END) == 1
    assert with_block(readme, methods_block(methods, store.of(methods))) == readme


def test_the_readmes_table_is_made_of_cells(tmp_path):
    study = load_study("methods", ROOT / "studies")
    winner = (
        '[[when]]\nwhere = { corpus = "roles", method = "METHOD" }\nset = { absent = "", "method.name" = "METHOD" }\n'
    )
    winner += '[[searched]]\nwhere = { corpus = "roles", method = "METHOD" }\ntrials = 8\ntokens = 55e6\nrecord = "r"\n'
    (tmp_path / "runs").mkdir()
    text = "".join(winner.replace("METHOD", method) for method in ("fedavg", "fedatt"))
    (tmp_path / "runs" / "winners.toml").write_text(text, "utf-8")
    shutil.copy(ROOT / "studies" / "methods.toml", tmp_path)
    study = load_study("methods", tmp_path)
    cells = [cell for cell in cells_of(study, "standard") if not cell.absent]
    assert len(cells) == 6
    found = {
        cell.id: {"id": cell.id, "seed": cell.seed, "runner": "train", "settings": {}, "curve": [],
                  "measures": {"perplexity": 4.0 + (cell.labels["method"] == "fedavg") + cell.seed / 1000}}
        for cell in cells
    }  # fmt: skip
    lines = methods_block(study, found).splitlines()
    assert lines[2:4] == [
        "| `fedatt` | 4.03 ± 0.00 | 8 | 55–55 M | 3 |",
        "| `fedavg` | 5.03 ± 0.00 | 8 | 55–55 M | 3 |",
    ]
