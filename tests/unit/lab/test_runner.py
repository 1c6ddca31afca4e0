"""Studies: cells and their identity, time, the rule of verdicts, the broken collation, pages that match their data."""

from __future__ import annotations

import json
import math
import time
import tomllib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keyfed.config.load import to_document
from keyfed.engine.network import init_params
from keyfed.errors import ConfigError
from keyfed.lab import papers as faithful
from keyfed.lab.experiment import cell as studies_cells
from keyfed.lab.experiment import grid, runner
from keyfed.lab.experiment.cell import CellListener, TimeIsUp, Workspace, config_of, rounds_to, run_cell, thin
from keyfed.lab.experiment.claims import (
    FAILS,
    HOLDS,
    NOT_JUDGED,
    UNSURE,
    Spread,
    compare_rows,
    judge,
    of_two,
    pooled_spread,
    quantile,
)
from keyfed.lab.experiment.grid import (
    SCALES,
    cells_of,
    load_study,
    results_folder,
    study_folder,
    study_from,
    study_names,
    with_settings,
)
from keyfed.lab.experiment.page import page_text
from keyfed.lab.experiment.runner import held, run_study
from keyfed.lab.experiment.store import OPEN, Store, compact, main_scale, rows_of, write_row
from keyfed.lab.experiment.summary import front_text
from keyfed.lab.papers import run_toy
from keyfed.model.language_model import build_spec
from keyfed.run.console import Silent
from keyfed.run.folder import open_folder
from keyfed.text.vocab import PAD
from tests.listeners import Heard

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"
DOCUMENT = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity"]
[base]
data.name = "ptb"
method.lr = 1.0
[axis.C]
"0.1" = { participation.fraction = 0.1 }
"0.5" = { participation.fraction = 0.5 }
[axis.method]
FedAvg = { method.name = "fedavg" }
FedAtt = { method.name = "fedatt" }
Lost = { absent = "it is lost" }
[[when]]
where = { method = "FedAtt" }
set = { method.lr = 2.0 }
[[when]]
where = { scale = "smoke", C = "0.1" }
set = { train.rounds = 1 }
[[grid]]
C = ["0.1", "0.5"]
method = ["FedAvg", "FedAtt"]
[[grid]]
C = ["0.1"]
method = ["Lost"]
[scale.smoke]
seeds = [1]
why = "quick"
keep = { C = ["0.1"] }
set = { train.rounds = 3 }
[scale.standard]
seeds = [1, 2]
why = "some"
fewer = [{ where = { C = "0.5" }, seeds = [1] }]
[scale.paper]
seeds = [1, 2, 3]
why = "all"
[published.perplexity]
axes = ["C", "method"]
"0.1 | FedAvg" = 100.0
"0.1 | FedAtt" = 90.0
[[claims]]
says = "FedAtt is better"
kind = "lower"
of = { method = "FedAtt" }
than = { method = "FedAvg" }
[[claims]]
says = "as printed"
kind = "printed"
of = { method = "FedAvg" }
[[claims]]
says = "below 50"
kind = "below"
of = { method = "FedAvg" }
bound = 50
"""


def study_of(text: str = DOCUMENT):
    return study_from(tomllib.loads(text), Path("example.toml"))


def results_of(study, scale, values, measure="perplexity"):
    """Results by cell id: `values` maps (C, method, seed) to a perplexity."""
    return {
        cell.id: {"id": cell.id, "seed": cell.seed, "measures": {measure: values[key]}, "curve": []}
        for cell in cells_of(study, scale)
        if (key := (cell.labels["C"], cell.labels["method"], cell.seed)) in values
    }


def verdicts(study, values, scale="standard", claim=0):
    rows = rows_of(study, scale, results_of(study, scale, values))
    return [c.verdict for c in compare_rows(study, rows, study.claims[claim])]


def test_settings_come_from_base_labels_conditions_scale_and_its_conditions():
    study = study_of()
    [fedavg, fedatt, _] = cells_of(study, "smoke")
    assert fedavg.settings["method.lr"] == 1.0
    assert fedatt.settings["method.lr"] == 2.0
    assert fedavg.settings["train.rounds"] == 1
    standard = {tuple(c.labels.values()): c for c in cells_of(study, "standard")}
    assert "train.rounds" not in standard["0.1", "FedAvg"].settings


def test_a_cell_is_the_same_at_every_scale_and_another_with_other_settings():
    study = study_of()
    standard, paper = cells_of(study, "standard"), cells_of(study, "paper")
    assert {c.id for c in standard} <= {c.id for c in paper}
    assert len({c.id for c in paper}) == len(paper) == 3 * 5
    assert with_settings(standard[0], {"method.lr": 3.0}).id != standard[0].id


def test_seeds_are_the_outer_loop_and_may_be_fewer():
    cells = cells_of(study_of(), "standard")
    assert [c.seed for c in cells] == sorted(c.seed for c in cells)
    assert [c.seed for c in cells if c.labels == {"C": "0.5", "method": "FedAvg"}] == [1]
    assert {c.seed for c in cells_of(study_of(), "standard", [7])} == {7}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('method = ["Lost"]', 'method = ["Last"]', 'method of a grid "Last" is not known (did you mean Lost?)'),
        ("method.lr = 1.0", "method.lrr = 1.0", 'option "lrr" is not known'),
        ('kind = "below"', 'kind = "under"', 'kind of a claim "under"'),
        ('"0.1 | FedAtt"', '"FedAtt"', "has 1 labels; expected C | method"),
        ("[scale.paper]", "[scale.papers]", 'scale "papers" is not known (did you mean paper?)'),
        ('title = "T"', 'tittle = "T"', 'key "tittle" is not known (did you mean title?)'),
    ],
)
def test_a_mistake_in_a_study_is_named(old, new, said):
    assert old in DOCUMENT
    with pytest.raises(ConfigError) as error:
        study_of(DOCUMENT.replace(old, new))
    assert said in str(error.value)


def test_a_missing_key_and_an_unknown_study_are_named(tmp_path):
    with pytest.raises(ConfigError, match="about is missing"):
        study_of(DOCUMENT.replace('about = "A"', ""))
    with pytest.raises(ConfigError, match=r"did you mean fedatt-table2\?"):
        load_study("fedat-table2", STUDIES)
    with pytest.raises(ConfigError, match="did you mean smoke"):
        cells_of(study_of(), "smoky")


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_every_cell_of_every_scale_is_a_configuration(name, tmp_path):
    vectors = tmp_path / "glove-6b-100d" / "glove.6B.100d.txt.gz"
    vectors.parent.mkdir()
    vectors.touch()
    study = load_study(name, STUDIES)
    assert set(study.scales) == set(SCALES)
    for scale in SCALES:
        for cell in {tuple(c.labels.values()): c for c in cells_of(study, scale) if not c.absent}.values():
            if cell.runner in ("train", "code-faithful", "n-gram"):
                document = to_document(config_of(cell.settings, cell.seed, Workspace(tmp_path, "cpu", str(tmp_path))))
                assert document["train"]["seed"] == cell.seed


def test_a_claimed_order_holds_fails_or_cannot_be_told():
    same = {("0.1", "FedAvg", s): 100 + s for s in (1, 2)}
    assert verdicts(study_of(), same | {("0.1", "FedAtt", s): 80 + s for s in (1, 2)}) == [HOLDS, OPEN]
    assert verdicts(study_of(), same | {("0.1", "FedAtt", s): 120 + s for s in (1, 2)}) == [FAILS, OPEN]
    assert verdicts(study_of(), same | {("0.1", "FedAtt", s): 103 - s for s in (1, 2)}) == [UNSURE, OPEN]
    one = {("0.5", "FedAvg", 1): 100.0, ("0.5", "FedAtt", 1): 50.0}
    assert verdicts(study_of(), one) == [OPEN, HOLDS]  # no spread at all: only what is far apart is told
    near = {("0.5", "FedAvg", 1): 100.0, ("0.5", "FedAtt", 1): 70.0}
    assert verdicts(study_of(), near) == [OPEN, UNSURE]
    more = same | {("0.1", "FedAtt", s): 103 - s for s in (1, 2)}
    assert verdicts(study_of(), near | more) == [UNSURE, UNSURE]  # one seed takes no spread from other pairs


def test_the_margin_is_students_quantile_times_the_pooled_spread():
    values = {("0.1", "FedAvg", 1): math.exp(1.0), ("0.1", "FedAvg", 2): math.exp(1.2)}
    rows = rows_of(study_of(), "standard", results_of(study_of(), "standard", values))
    spread = pooled_spread(rows, "perplexity")
    assert spread.sd == pytest.approx(0.2 / math.sqrt(2))
    assert spread.margin(2) == pytest.approx(12.706 * 0.1, rel=1e-4)
    assert of_two(spread, spread).margin(2) == pytest.approx(12.706 * 0.2 / math.sqrt(2), rel=1e-4)
    assert of_two(spread, Spread(None, 0)).margin(1) is None


def test_a_bound_holds_by_more_than_the_spread():
    values = {("0.1", "FedAvg", 1): 40.0, ("0.1", "FedAvg", 2): 40.3, ("0.5", "FedAvg", 1): 49.0}
    assert verdicts(study_of(), values, claim=2) == [HOLDS, UNSURE]
    assert verdicts(study_of(), values | {("0.1", "FedAvg", 2): 40.01}, claim=2) == [HOLDS, HOLDS]
    assert verdicts(study_of(), values | {("0.1", "FedAvg", 2): 40.01, ("0.5", "FedAvg", 1): 51.0}, claim=2)[1] == FAILS


def test_shuffled_evaluations_widen_what_counts_unless_they_are_the_same():
    study = study_of()
    values = {("0.1", "FedAvg", s): 100 + 0.01 * s for s in (1, 2)}
    values |= {("0.1", "FedAtt", s): 98 + 0.01 * s for s in (1, 2)}
    found = results_of(study, "standard", values)

    def first():
        return compare_rows(study, rows_of(study, "standard", found), study.claims[0])[0]

    told = first()
    assert told.verdict == HOLDS
    for number, record in enumerate(found.values()):
        record["shuffles"] = {"count": 20, "sd": 5.0, "lowest": 90.0, "highest": 110.0}
        record["data_sha256"] = str(number)  # of other sentences: other shuffles
    apart = first()
    assert apart.verdict == UNSURE
    seeds = told.margin / 12.7062, 1
    shuffles = [(5.0 / mean / math.sqrt(40), 38) for mean in (98.015, 100.015)]
    total = sum(sd**2 for sd, _ in (seeds, *shuffles))
    freedom = total**2 / sum(sd**4 / freedom for sd, freedom in (seeds, *shuffles))  # Welch and Satterthwaite's
    assert apart.margin == pytest.approx(quantile(freedom) * math.sqrt(total), rel=1e-4)
    for record in found.values():
        record["data_sha256"] = "the same"
    assert (first().verdict, first().margin) == (HOLDS, told.margin)  # what a shuffle adds, it adds to both
    next(iter(found.values()))["shuffles"]["count"] = 10
    assert first().verdict == UNSURE


def test_what_is_far_worse_than_guessing_has_diverged_and_is_not_pooled():
    values = {
        ("0.1", "FedAvg", 1): 100.0,
        ("0.1", "FedAvg", 2): 110.0,
        ("0.1", "FedAtt", 1): 2e3,
        ("0.1", "FedAtt", 2): 9e3,
    }
    found = results_of(study_of(), "standard", values)
    for record in found.values():
        record["vocabulary"] = 1000
    rows = {tuple(r.labels.values()): r for r in rows_of(study_of(), "standard", found)}
    assert write_row(rows["0.1", "FedAtt"], "perplexity").endswith("; diverged")
    assert "diverged" not in write_row(rows["0.1", "FedAvg"], "perplexity")
    assert pooled_spread(rows.values(), "perplexity") == pooled_spread([rows["0.1", "FedAvg"]], "perplexity")


def test_a_printed_figure_holds_if_it_and_chance_are_within_the_tolerance():
    for seeds, verdict in (((104.0, 104.1), HOLDS), ((104.0, 110.0), UNSURE), ((108.0, 108.1), FAILS)):
        values = {("0.1", "FedAvg", seed): value for seed, value in enumerate(seeds, 1)}
        assert verdicts(study_of(), values, claim=1)[0] == verdict
    for value, verdict in ((104.0, UNSURE), (120.0, UNSURE), (157.0, UNSURE), (158.0, FAILS), (None, FAILS)):
        assert verdicts(study_of(), {("0.1", "FedAvg", 1): value}, claim=1)[0] == verdict  # one seed: 1.5 · 1.05
    assert verdicts(study_of(), {("0.1", "FedAvg", 1): 49.0, ("0.5", "FedAvg", 1): 80.0}, claim=2) == [UNSURE, FAILS]


def test_a_printed_figure_is_one_evaluation_where_that_depends_on_a_shuffle():
    study = study_of()
    found = results_of(study, "standard", {("0.1", "FedAvg", 1): 110.0, ("0.1", "FedAvg", 2): 110.1})

    def first():
        return compare_rows(study, rows_of(study, "standard", found), study.claims[1])[0]

    plain = first()
    assert plain.verdict == FAILS
    for record in found.values():
        record["shuffles"] = {"count": 20, "sd": 11.0, "lowest": 90.0, "highest": 140.0}
    row = next(row for row in rows_of(study, "standard", found) if row.records)
    assert write_row(row, "perplexity") == "110.0 ± 0.1; one evaluation ± 11.0"
    near, error = first(), 11.0 / 110.05 / math.sqrt(40)
    assert near.verdict == HOLDS
    assert near.margin == pytest.approx(2.024 * error, rel=0.01)  # seeds hardly differ beside it
    tolerance = math.log(1.05) + 2 * 11.0 / 110.05
    assert near.edge == pytest.approx(tolerance)
    assert near.interval == pytest.approx((near.change - near.margin, near.change + near.margin))
    del found[list(found)[1]]
    next(iter(found.values()))["shuffles"]["sd"] = 40.0  # a tolerance beyond 1.5
    assert (first().verdict, first().interval) == (UNSURE, None)  # one seed has no spread, whatever its shuffles


def test_claims_are_summed_up_and_a_smoke_scale_judges_nothing():
    study = study_of()
    rows = rows_of(study, "paper", results_of(study, "paper", {("0.1", "FedAvg", 1): 30.0, ("0.5", "FedAvg", 1): 80.0}))
    found = compare_rows(study, rows, study.claims[2])
    assert judge(found, "paper") == "1 of 2 holds; C = 0.5 does not"
    assert judge(found[:1], "paper") == HOLDS
    assert judge(found, "smoke") == NOT_JUDGED
    assert judge([], "paper") == OPEN


def test_rows_show_mean_spread_divergence_and_absence():
    study = study_of()
    values = {("0.1", "FedAvg", 1): 100.0, ("0.1", "FedAvg", 2): 102.0, ("0.5", "FedAvg", 1): None}
    rows = {tuple(r.labels.values()): r for r in rows_of(study, "standard", results_of(study, "standard", values))}
    assert write_row(rows["0.1", "FedAvg"], "perplexity") == "101.0 ± 1.4"
    assert write_row(rows["0.5", "FedAvg"], "perplexity") == "diverged"
    assert write_row(rows["0.1", "FedAtt"], "perplexity") == "open"
    assert write_row(rows["0.1", "Lost"], "perplexity") == "absent"
    assert main_scale(study, results_of(study, "standard", values)) == "standard"
    assert main_scale(study, {}) is None


def test_no_minutes_leave_every_cell_open_and_results_merge(tmp_path):
    study = load_study("gboard-toy", STUDIES)
    workspace = Workspace(tmp_path / "work", "cpu")
    more = {"study.samples": 48, "study.rounds": 1}
    none = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, minutes=0, override=more)
    assert (none.done, none.before, len(none.open)) == ((), 0, 4)
    first = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more, most=1)
    rest = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more)
    assert (len(first.done), len(first.open)) == (1, 3)
    assert (rest.before, len(rest.done), rest.open) == (1, 3, ())
    assert len(Store(tmp_path).of(study)) == 4


@pytest.mark.parametrize("minutes", [math.nan, math.inf, -1.0], ids=["nan", "inf", "negative"])
def test_minutes_that_never_end_or_never_begin_are_refused(minutes, tmp_path):
    study = load_study("gboard-toy", STUDIES)
    with pytest.raises(ConfigError, match=r"--minutes is .*; expected a number of minutes, 0 or more"):
        run_study(study, "smoke", store=Store(tmp_path), workspace=Workspace(tmp_path / "work", "cpu"), minutes=minutes)


def test_a_cell_that_another_process_works_on_is_skipped_and_not_failed(tmp_path):
    study, workspace, heard = load_study("gboard-toy", STUDIES), Workspace(tmp_path / "work", "cpu"), Heard()
    more = {"study.samples": 48, "study.rounds": 1}
    taken = with_settings(cells_of(study, "smoke")[1], more)
    with held(workspace.work, taken):
        done = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more, listener=heard)
    assert (len(done.done), done.failed) == (3, ())
    assert done.open == done.skipped == (taken.title,)
    assert done.as_dict()["skipped"] == (taken.title,)
    assert "skipped: another process works on it" in heard.lines
    again = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more)
    assert (again.before, again.done, again.open) == (3, (taken.title,), ())
    assert list((tmp_path / "work" / "locks").iterdir()) == []


def test_a_skipped_cell_that_the_other_process_finishes_in_time_is_not_open(tmp_path, monkeypatch):
    study, workspace = load_study("gboard-toy", STUDIES), Workspace(tmp_path / "work", "cpu")
    more = {"study.samples": 48, "study.rounds": 1}
    first, second = (with_settings(cell, more) for cell in cells_of(study, "smoke")[:2])
    monkeypatch.setattr(runner, "cells_of", lambda *_: cells_of(study, "smoke")[:2])
    with ExitStack() as other:
        other.enter_context(held(workspace.work, first))

        def finish_the_first_too(cell, *rest):
            Store(tmp_path).write(first, run_cell(first, *rest))
            other.close()
            return run_cell(cell, *rest)

        monkeypatch.setattr(runner, "run_cell", finish_the_first_too)
        done = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more)
    assert (done.done, done.before, done.open, done.skipped) == ((second.title,), 1, (), ())


def test_a_cell_that_another_process_finished_meanwhile_is_not_run_again(tmp_path, monkeypatch):
    """The other process is this one, called in the middle of the first cell; both share work and results."""
    study, workspace, heard = load_study("gboard-toy", STUDIES), Workspace(tmp_path / "work", "cpu"), Heard()
    more = {"study.samples": 48, "study.rounds": 1}
    ran = []

    def cell_with_company(cell, *rest):
        ran.append(cell.title)
        if len(ran) == 1:
            other = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more, most=2)
            assert (other.skipped, len(other.done)) == ((ran[0],), 2)
        return run_cell(cell, *rest)

    monkeypatch.setattr(runner, "run_cell", cell_with_company)
    done = run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more, listener=heard)
    assert len(ran) == len(set(ran)) == 4
    assert (len(done.done), done.before, done.open, done.skipped) == (2, 2, (), ())
    assert heard.lines.count("finished by another process") == 2


def test_a_run_that_others_start_from_is_waited_for(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 60)
    settings = {"data.name": str(tmp_path / "text.txt"), "data.clients": 2, "model.name": "gru", "model.embed": 4,
                "model.hidden": 4, "train.rounds": 1, "train.cohort": 2}  # fmt: skip
    workspace, heard = Workspace(tmp_path / "work", "cpu"), Heard()
    folder = studies_cells._first_run(settings, 1, workspace, heard)
    result = (folder / "result.json").read_bytes()
    with ExitStack() as other:
        other.enter_context(open_folder(folder, resume=True))
        waits = []

        def wait(why):
            waits.append(why)
            if len(waits) == 3:
                other.close()

        heard.wait = wait
        assert studies_cells._first_run(settings, 1, workspace, heard) == folder
    assert waits == ["another process trains it; waiting"] * 3
    assert (folder / "result.json").read_bytes() == result


def test_waiting_ends_with_the_minutes_and_is_said_once(monkeypatch):
    monkeypatch.setattr(studies_cells, "MOMENT", 0.0)
    heard = Heard()
    patient = CellListener(heard)
    for _ in range(3):
        patient.wait("waiting")
    assert heard.lines == ["waiting"]
    with pytest.raises(TimeIsUp):
        CellListener(heard, until=time.monotonic()).wait("waiting")


def test_nothing_is_stopped_after_the_last_round():
    clock = CellListener(Silent(), until=time.monotonic())
    clock.start("two rounds", 2, 0)
    with pytest.raises(TimeIsUp):
        clock.round({"round": 1})
    clock.round({"round": 2})


def test_a_cell_without_a_checkpoint_that_is_stopped_says_that_it_starts_anew(tmp_path, monkeypatch):
    def stopped(*_):
        raise TimeIsUp

    study, heard = load_study("gboard-toy", STUDIES), Heard()
    monkeypatch.setattr(runner, "run_cell", stopped)
    done = run_study(
        study, "smoke", store=Store(tmp_path), workspace=Workspace(tmp_path / "work", "cpu"), minutes=5, listener=heard
    )
    assert len(done.open) == 4
    assert "will start anew; give more minutes than it takes" in heard.lines[-2]
    assert heard.lines[-1] == "stopped after 5 minutes; the same call goes on with what is open"


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def pressed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_cell", pressed)
    study, heard = load_study("gboard-toy", STUDIES), Heard()
    with pytest.raises(KeyboardInterrupt):
        run_study(study, "smoke", store=Store(tmp_path), workspace=Workspace(tmp_path / "work", "cpu"), listener=heard)
    assert heard.lines[-1] == "stopped after 0 of 4 open cells; the same call goes on"


def test_studies_lie_here_or_in_the_source_tree_or_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert study_folder() == STUDIES
    assert results_folder(study_folder()) == RESULTS
    installed = tmp_path / "site-packages" / "keyfed"
    (installed / "studies").mkdir(parents=True)
    monkeypatch.setattr(grid, "__file__", str(installed / "lab" / "experiment" / "grid.py"))
    assert study_folder() == installed / "studies"
    assert results_folder(study_folder()) == Path("docs/results")  # not inside the package
    (tmp_path / "studies").mkdir()
    assert study_folder() == Path("studies")
    assert results_folder(study_folder()) == Path("docs/results")


def test_a_cell_that_another_study_has_finished_counts(tmp_path):
    study = load_study("gboard-toy", STUDIES)
    workspace = Workspace(tmp_path / "work", "cpu")
    more = {"study.samples": 48, "study.rounds": 1}
    run_study(study, "smoke", store=Store(tmp_path), workspace=workspace, override=more, most=1)
    other = replace(study, name="another")
    again = run_study(other, "smoke", store=Store(tmp_path), workspace=workspace, override=more, minutes=0)
    assert (again.before, len(again.open)) == (1, 3)


def test_a_page_is_about_smoke_only_where_little_else_is_there():
    study = study_of()
    smoke = results_of(study, "smoke", {("0.1", "FedAvg", 1): 100.0})
    one = {("0.1", "FedAvg", 1): 100.0}  # of six cells
    assert main_scale(study, smoke) == "smoke"
    assert main_scale(study, smoke | results_of(study, "standard", one)) == "smoke"
    more = smoke | results_of(study, "smoke", {("0.1", "FedAtt", 1): 100.0})
    assert main_scale(study, more | results_of(study, "standard", one)) == "smoke"
    two = one | {("0.1", "FedAvg", 2): 100.0}
    assert main_scale(study, more | results_of(study, "standard", two)) == "standard"


def test_curves_are_thinned_and_targets_found():
    records = [{"round": r, "valid": {"perplexity": 100.0 - r}} for r in range(1, 101)]
    assert rounds_to(records, 90) == 10
    assert rounds_to(records, -1) is None
    assert [p[0] for p in thin([[r, 1.0, 2.0, 0.1] for r in range(1, 102)], 3)] == [1, 51, 101]
    assert json.loads(compact(json.dumps({"a": [1, [2, 3]], "b": ["x"]}, indent=1))) == {"a": [1, [2, 3]], "b": ["x"]}


def test_the_broken_collation_reads_across_sentences_and_cuts_to_the_shortest():
    stream = np.array([1, 5, 6, 7, 2, 1, 8, 2, 1, 9, 4, 2], np.int32)
    [step] = faithful.broken_steps(stream, rows=3, seed=1)
    assert step.inputs.shape == (3, 2)  # positions of the shortest sentence × (sentences − 1)
    assert step.inputs[0].tolist() == step.targets[0].tolist() == [1, 1]  # <SOS> predicts <SOS>
    assert set(step.inputs[1].tolist() + step.targets[1].tolist()) == {5, 8, 9}
    assert faithful.broken_steps(stream[:5], rows=3, seed=1) == []  # a lone sentence predicts nothing


def test_the_broken_evaluation_depends_on_the_shuffle_and_is_not_the_honest_one():
    spec = build_spec("gru", 30, embed=8, hidden=8)
    params = {name: p * 5 for name, p in init_params(spec, 1).items()}
    draw = np.random.default_rng(1)
    made = [np.array([1, *draw.integers(3, 30, n), 2], np.int32) for n in draw.integers(1, 20, 300)]
    first, second = (faithful.broken_score(spec, params, made, seed, "cpu").perplexity for seed in (1, 2))
    assert abs(first - second) > 1e-3
    assert faithful.honest_score(spec, params, made, "cpu").tokens == sum(len(s) - 1 for s in made)


def test_no_word_of_the_code_faithful_variant_is_the_engines_padding(tmp_path):
    """The GPU's kernels pass over the embedding's gradient at that number."""
    (tmp_path / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(f" One two . {part} \n\n three \n", "utf-8")
    config = config_of({"data.name": "ptb"}, 1, Workspace(tmp_path, "cpu", str(tmp_path)))
    found = faithful.read_sentences(config)
    assert [s.tolist() for s in found.train] == [[1, 3, 4, 2], [1, 5, 2], [1, 6, 2]]
    assert found.words == 9  # those of all three files, as in the code, and the padding
    scored = faithful.positional_unigram(config, 3)["shuffles"]
    assert 1 < scored["lowest"] <= scored["highest"] < 9  # one batch: <SOS> is certain, the rest is among nine words
    assert min(int(s.min()) for part in (found.train, found.valid, found.test) for s in part) > PAD


def test_faithful_shards_are_equal_and_weights_are_torchs():
    made = [np.array([1, 3 + k, 2], np.int32) for k in range(25)]
    shards = faithful.shards(made, 10, seed=1)
    assert [len(s) for s in shards] == [6] * 10
    params = faithful.initial_params(build_spec("gru", 30), 1)
    assert all(float(p.abs().max()) <= 300**-0.5 for p in params.values())
    assert float(params["output.bias"].abs().max()) > 0  # torch draws the output's bias too


def test_the_toys_clients_differ_unless_the_mean_is_sent_back():
    apart, together = (
        run_toy({"study.sent_back": sent, "study.samples": 96, "study.rounds": 3}, 1) for sent in (False, True)
    )
    first = [found["records"][0]["valid"]["top1"] for found in (apart, together)]
    assert first[0] == first[1]  # the same weights before any training
    assert apart["records"][-1]["loss"] != together["records"][-1]["loss"]


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_a_results_page_matches_its_data(name):
    study = load_study(name, STUDIES)
    page = RESULTS / f"{name}.md"
    assert page.exists(), f"write it with `keyfed study report {name}`"
    assert page.read_text("utf-8") == page_text(study, Store(RESULTS).of(study))


def test_the_front_page_matches_its_data():
    assert (RESULTS / "README.md").read_text("utf-8") == front_text(STUDIES, Store(RESULTS))


def test_a_page_changes_with_its_data():
    study = load_study("fedatt-table2", STUDIES)
    found = {key: json.loads(json.dumps(record)) for key, record in Store(RESULTS).of(study).items()}
    before = page_text(study, found)
    scale = main_scale(study, found)
    shown = next(row for row in rows_of(study, scale, found) if row.records)
    found[shown.records[0]["id"]]["measures"]["perplexity"] *= 2
    assert page_text(study, found) != before


def test_pages_name_every_picture_that_is_there():
    pages = "".join(path.read_text("utf-8") for path in RESULTS.glob("*.md"))
    for picture in (RESULTS / "img").glob("*.png"):
        assert f"img/{picture.name}" in pages
    assert pages.count("](img/") == len(list((RESULTS / "img").glob("*.png")))
