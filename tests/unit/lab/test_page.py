"""The front page of the results, a line a claim with causes from cells; where studies stand; what pictures say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from keyfed.cli.experiment import _list, _report
from keyfed.errors import ConfigError
from keyfed.lab.experiment.grid import cells_of, load_study, study_from, study_names
from keyfed.lab.experiment.page import causes, fill, write_page
from keyfed.lab.experiment.plots import SMOKE, _paint, _panels, curves_of, describe, error_bar, looks
from keyfed.lab.experiment.store import Store, rows_of
from keyfed.lab.experiment.summary import (
    PARTS,
    PROGRESS,
    front_text,
    judged,
    judged_claims,
    progress_text,
    typed_claims,
    write_front,
)
from keyfed.reports.figures import LIGHT

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"
DOCUMENT = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity", "top1"]
[axis.data]
PTB = { data.name = "ptb" }
"plays, all" = { data.name = "shakespeare" }
[axis.method]
FedAvg = { method.name = "fedavg" }
FedAtt = { method.name = "fedatt" }
[[grid]]
data = ["PTB", "plays, all"]
method = ["FedAvg", "FedAtt"]
[scale.smoke]
seeds = [1]
why = "quick"
set = { train.rounds = 3 }
[scale.standard]
seeds = [1, 2]
why = "some"
[scale.paper]
seeds = [1, 2, 3]
why = "all"
[published.perplexity]
axes = ["data", "method"]
"PTB | FedAvg" = 138.13
"PTB | FedAtt" = 115.43
[[claims]]
front = true
name = "order"
says = "FedAtt is better"
kind = "lower"
of = { data = "PTB", method = "FedAtt" }
than = { method = "FedAvg" }
cause = [
  "Plays have {mean.perplexity | data = plays, all | method = FedAvg}.",
  "PTB has {seeds.perplexity | data = PTB | method = FedAvg}.",
]
[[plots]]
name = "rounds"
kind = "curves"
measure = "perplexity"
panel = ["data"]
series = ["method"]
title = "Perplexity by round"
"""
VALUES = {("PTB", "FedAvg"): (100.0, 102.0), ("PTB", "FedAtt"): (80.0, 81.0)}


def study_of(text: str = DOCUMENT):
    return study_from(tomllib.loads(text), Path("example.toml"))


OTHER = {"runner": "train", "made": dict.fromkeys(("keyfed", "torch", "python", "hardware"), "1")}


def results_of(study, values=VALUES, scale="standard"):
    return {
        cell.id: {"id": cell.id, "seed": cell.seed, "settings": dict(cell.settings), **OTHER,
                  "measures": {"perplexity": values[key][cell.seed - 1]},
                  "curve": [[r, 1.0, values[key][cell.seed - 1] + 50 / r, 0.1] for r in (1, 2, 3)]}
        for cell in cells_of(study, scale)
        if (key := tuple(cell.labels.values())) in values and cell.seed <= len(values[key])
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "filled"),
    [
        ("{mean.perplexity | data = PTB | method = FedAvg}", "101.0"),
        ("{spread.perplexity | data = PTB | method = FedAvg}", "101.0 ± 1.4"),
        ("{seeds.perplexity|data=PTB|method=FedAvg}", "100.0, 102.0"),
        ("{range.perplexity | data = PTB} nats", "80.50 to 101.0 nats"),
        ("{range.perplexity | method = FedAtt}", "80.50"),
        ("{printed.perplexity | data = PTB | method = FedAtt} beside", "115.43 beside"),
        ("{verdict.order}: {example/mean.perplexity | data = PTB | method = FedAtt}", "holds: 80.50"),
        ("no number", "no number"),
        ("{mean.perplexity | data = plays, all | method = FedAtt}", None),
    ],
    ids=["mean", "spread", "seeds", "range", "one of a range", "printed", "verdict and study", "none", "open"],
)
def test_numbers_of_a_cause_are_read_from_cells(sentence, filled, tmp_path):
    (tmp_path / "example.toml").write_text(DOCUMENT, "utf-8")
    study = study_of()
    assert fill(sentence, study, results_of(study), tmp_path) == filled


def test_a_sentence_without_its_number_is_left_out_and_smoke_tells_none():
    study = study_of()
    assert causes(study.claims[0], study, results_of(study)) == ["PTB has 100.0, 102.0."]
    assert causes(study.claims[0], study, results_of(study, scale="smoke")) == []
    assert causes(study.claims[0], study, {}) == []


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("{men.perplexity | data = PTB | method = FedAvg}", "begins with men (did you mean mean?)"),
        ("{mean.loss | data = PTB | method = FedAvg}", "asks for loss; expected one of perplexity, top1"),
        ("{mean.perplexity | data = PTP | method = FedAvg}", 'has "data = PTP" (did you mean PTB?)'),
        ("{mean.perplexity | method = FedAvg}", "fits 2 rows; expected one, add labels"),
        ("{verdict.ordre}", "names no claim"),
    ],
    ids=["what", "measure", "label", "several", "claim"],
)
def test_a_mistake_in_a_cause_is_named(sentence, said):
    study = study_of()
    with pytest.raises(ConfigError) as e:
        fill(sentence, study, results_of(study))
    assert said in str(e.value)


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_every_cause_can_be_filled(name):
    """With cells everywhere: no sentence names a row that no scale has."""
    study = load_study(name, STUDIES)
    every = {s: load_study(s, STUDIES) for s in study_names(STUDIES)}
    for claim in study.claims:
        named = [study, *(every[s] for s in every if any(f"{s}/" in sentence for sentence in claim.cause))]
        found = {
            cell.id: {
                "id": cell.id,
                "seed": cell.seed,
                **OTHER,
                "measures": dict.fromkeys(one.measures, 1.5),
                "curve": [],
            }
            for one in named
            for cell in cells_of(one, "paper")
            if not cell.absent
        }
        told = causes(claim, study, found, STUDIES)
        for sentence in told:
            assert "{" not in sentence
        absent = [s for s in claim.cause if "verdict.large" in s]  # what no vectors at hand can tell
        assert len(told) >= len(claim.cause) - len(absent)


def test_a_front_line_has_what_is_said_the_verdict_the_numbers_and_why():
    study = study_of()
    line = judged(study, results_of(study), study.claims[0]).line
    assert line == (
        "- FedAtt is better ([example](example.md)): **holds**. PTB, FedAtt: 80.50 ± 0.71 against 101.0 ± 1.4 "
        "(-20.3 %; -23.9 % to -16.5 %; printed 115.43 and 138.13). PTB has 100.0, 102.0."
    )
    smoke = judged(study, results_of(study, scale="smoke"), study.claims[0])
    assert (smoke.part, smoke.verdict) == (PARTS[-1], "not judged at smoke scale")
    assert smoke.more == ("Of 2 cells at scale standard that it is about 0 are finished.",)
    assert judged(study, {}, study.claims[0]).line.endswith(
        ": **open**. Of 2 cells at scale standard that it is about 0 are finished."
    )


ALL_DATA = DOCUMENT.replace('of = { data = "PTB", method = "FedAtt" }', 'of = { method = "FedAtt" }')
PLAYS = {(("plays, all", method)): values for method, values in (("FedAvg", (50.0, 51.0)), ("FedAtt", (60.0, 61.0)))}


@pytest.mark.parametrize(
    ("factor", "part", "verdict", "ends"),
    [
        (0.5, "What holds", "holds (all 2)", "-40.1 % to -20.3 %"),
        (1.0, "What holds in some comparisons", "1 of 2 holds; plays, all does not", "-20.3 % to +19.8 %"),
    ],
)
def test_no_comparison_is_picked_for_its_verdict(factor, part, verdict, ends):
    """The first in the study's order is quoted whatever it says, with the range over all."""
    study = study_of(ALL_DATA)
    plays = {key: [v * (factor if key[1] == "FedAtt" else 1) for v in values] for key, values in PLAYS.items()}
    found = judged(study, results_of(study, {**VALUES, **plays}), study.claims[0])
    assert (found.part, found.verdict) == (part, verdict)
    assert found.more[0].startswith("PTB: 80.50 ± 0.71 against 101.0 ± 1.4 (-20.3 %; ")
    assert found.more[1] == f"Both differences: {ends}."


def test_where_nothing_holds_and_something_does_not_it_does_not():
    study = study_of(ALL_DATA)
    found = judged(
        study,
        results_of(study, {("PTB", "FedAvg"): (100.0, 101.0), ("PTB", "FedAtt"): (100.2, 100.9), **PLAYS}),
        study.claims[0],
    )
    assert (found.part, found.verdict) == (PARTS[2], "none of 2 holds; plays, all does not; 1 cannot be told")


def test_a_single_seed_says_why_it_tells_nothing():
    study = study_of()
    found = judged(study, results_of(study, {key: values[:1] for key, values in VALUES.items()}), study.claims[0])
    assert found.part == PARTS[-1]
    assert found.more[-1] == "One seed has no spread: only a ratio above 1.5 would decide."


def test_a_bound_on_the_front_page_has_its_seeds_and_how_far_chance_reaches():
    below = 'kind = "below"\nof = { data = "PTB", method = "FedAvg" }\nbound = 103'
    text = re.sub(r'kind = "lower".*?(?=cause)', below + "\n", DOCUMENT, flags=re.DOTALL)
    study = study_of(text)
    line = judged(study, results_of(study), study.claims[0]).line
    assert "**cannot be told at this spread**. 101.0 ± 1.4 (100.0, 102.0): 1.9 % below the bound (" in line


def test_every_claim_of_a_paper_is_on_the_front_page_and_what_holds_comes_first():
    text = front_text(STUDIES, Store(RESULTS))
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == [part for part in PARTS if part in heads]
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    for study in (load_study(name, STUDIES) for name in study_names(STUDIES)):
        for claim in study.claims:
            says = f"- {claim.says[0].upper()}{claim.says[1:]} ([{study.name}]"
            assert sum(line.startswith(says) for line in lines) == int(claim.front or not claim.ours), says
    for jargon in ("raised lr", "published lr", "code-faithful"):
        assert jargon not in text
    assert f"]({PROGRESS})" in text


def test_the_verdict_of_a_line_is_that_of_its_heading():
    for claim in judged_claims(STUDIES, Store(RESULTS)):
        if claim.part == "What holds":
            assert claim.verdict.startswith("holds"), claim.says
        if claim.part == "What does not hold":
            assert claim.verdict.startswith(("does not hold", "none of")), claim.says
        if claim.part == "What cannot be told":
            assert not claim.verdict.startswith(("holds", "does not hold")), claim.says
            assert claim.more, f"why? {claim.says}"


@pytest.mark.parametrize(
    ("ngram", "network", "part"),
    [([0.4, 0.5], [2.0, 3.0], PARTS[2]), ([4.0], [2.0, 2.5], PARTS[0]), ([1.0], [1.2], PARTS[3]), ([1.0], [], None)],
    ids=["quicker", "slower", "near", "nothing beside it"],
)
def test_the_slides_word_on_the_n_gram_models_cost_is_judged_by_what_was_typed(tmp_path, ngram, network, part):
    rows = [(f"n-gram, {value}", value) for value in ngram] + [(f"cifg, {value}", value) for value in network]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "keyboard-irc.json").write_text(
        json.dumps({"rows": [{"name": name, "latency": {"word": {"p50_ms": v, "cpu_ms": v}}} for name, v in rows]})
    )
    assert [claim.part for claim in typed_claims(tmp_path)] == ([part] * 2 if part else [])


def test_the_n_gram_model_is_the_quicker_one_where_it_was_measured():
    assert [claim.part for claim in typed_claims(RESULTS)] == [PARTS[2], PARTS[2]]


def test_the_page_of_where_studies_stand_matches_its_data():
    assert (RESULTS / PROGRESS).read_text("utf-8") == progress_text(STUDIES, Store(RESULTS))


def test_the_front_page_changes_with_its_data(tmp_path):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "example.toml").write_text(DOCUMENT, "utf-8")
    folder = tmp_path / "data" / "example"
    folder.mkdir(parents=True)
    texts = []
    for factor in (1.0, 2.0):
        for number, record in enumerate(results_of(study_of()).values()):
            record["measures"]["perplexity"] *= factor
            (folder / f"{number}.json").write_text(json.dumps(record), "utf-8")
        page = write_front(tmp_path / "studies", Store(tmp_path))
        assert page.read_text("utf-8") == front_text(tmp_path / "studies", Store(tmp_path))
        assert (tmp_path / PROGRESS).read_text("utf-8") == progress_text(tmp_path / "studies", Store(tmp_path))
        texts.append(page.read_text("utf-8"))
    assert "101.0 ± 1.4" in texts[0]
    assert "202.0 ± 2.8" in texts[1]


def test_the_list_and_the_page_count_alike(capsys):
    """Seeds that only another study asks for made them differ; and a page of smoke hid what is open above it."""
    _list(STUDIES, RESULTS, as_json=True)
    listed = {row["study"]: row for row in json.loads(capsys.readouterr().out)}
    for line in progress_text(STUDIES, Store(RESULTS)).splitlines():
        name, _, _, *counts, why = ([cell.strip() for cell in line.split("|")[1:8]] + [""] * 7)[:7]
        if name in listed:
            row = listed.pop(name)
            assert counts == [row[scale] for scale in ("smoke", "standard", "paper")]
            open_ = [scale for scale in ("standard", "paper") if len(set(row[scale].split(" of "))) > 1]
            assert [scale for scale in ("standard", "paper") if f"{scale}: " in why] == open_
    assert not listed


def test_what_is_open_has_its_reason_or_the_missing_file():
    text = progress_text(STUDIES, Store(RESULTS))
    assert "cells cannot be run: GPT-2's embedding is not at hand" in text


def test_a_report_on_an_empty_folder_counts_what_is_open(capsys, tmp_path):
    _report(STUDIES, tmp_path, "gboard-toy", as_json=False)
    cells = cells_of(load_study("gboard-toy", STUDIES), "smoke")
    assert capsys.readouterr().out.startswith(f"gboard-toy: scale smoke, 0 cells finished, {len(cells)} open;")


def test_a_plot_that_a_page_shows_no_more_is_removed(tmp_path):
    study, store = study_of(), Store(tmp_path)
    stale, others = tmp_path / "img" / "example-rounds.png", tmp_path / "img" / "example-rounds-2.png"
    stale.parent.mkdir()
    for path in (stale, others):
        path.write_bytes(b"old")
    write_page(study, store)  # nothing is finished: no curves
    assert not stale.exists()
    assert others.exists()


def painted(study, found, scale):
    from matplotlib.figure import Figure

    rows = rows_of(study, scale, found)
    figure = Figure()
    _paint(study, study.plots[0], _panels(rows, study.plots[0]), scale)(figure, LIGHT)
    return figure


def test_a_picture_of_smoke_scale_says_so():
    study = study_of()
    for scale in ("smoke", "standard"):
        found = results_of(study, scale=scale)
        title = painted(study, found, scale).get_suptitle().replace("\n", " ")
        assert title.startswith("Perplexity by round")
        assert (SMOKE in title) == (scale == "smoke")
        assert (SMOKE in describe(study, study.plots[0], rows_of(study, scale, found), scale)) == (scale == "smoke")


def test_curves_show_every_seed_and_lines_are_told_apart():
    study = study_of()
    found = results_of(study)
    row = next(row for row in rows_of(study, "standard", found) if row.records)
    assert curves_of(row, study.plots[0]) == {r: [100 + 50 / r, 102 + 50 / r] for r in (1, 2, 3)}
    (axes,) = painted(study, found, "standard").axes
    assert len(axes.collections) == 2  # a band a method
    assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines}) == 2
    (alone,) = painted(study, results_of(study, {key: values[:1] for key, values in VALUES.items()}), "standard").axes
    assert len(alone.collections) == 0


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_a_label_looks_alike_in_every_plot_and_like_no_other(name):
    study = load_study(name, STUDIES)
    for plot in study.plots:
        drawn_as = looks(study, plot.get("series", ()))
        for other in ("marker", "style"):  # lines of one colour differ in both
            assert len({(look.colour(LIGHT), getattr(look, other)) for look in drawn_as.values()}) == len(drawn_as)
        assert len({(look.colour(LIGHT), look.hatch(LIGHT)) for look in drawn_as.values()}) == len(drawn_as)
    if name == "next-character":
        assert len(looks(study, ["method"])) == 9


def test_a_label_keeps_its_look_where_others_are_missing():
    study = study_of()
    (both,) = painted(study, results_of(study), "standard").axes
    (alone,) = painted(study, results_of(study, {("PTB", "FedAtt"): VALUES["PTB", "FedAtt"]}), "standard").axes

    def look(line):
        return line.get_color(), line.get_marker(), line.get_linestyle()

    assert {line.get_label(): look(line) for line in both.lines}["FedAtt"] == look(alone.lines[0])


def test_error_bars_are_of_one_evaluation_where_that_depends_on_a_shuffle():
    plot = 'kind = "bars"\nx = ["method"]\nmeasure = "perplexity"'
    study = study_of(DOCUMENT.replace('kind = "curves"\nmeasure = "perplexity"', plot))
    found = results_of(study)
    rows = rows_of(study, "standard", found)
    row = next(row for row in rows if row.records)
    assert error_bar(row, study.plots[0]) == pytest.approx(2**0.5)
    assert describe(study, study.plots[0], rows, "standard").endswith(
        "error bars are the standard deviation over seeds"
    )
    for record in found.values():
        record["shuffles"] = {"count": 20, "sd": 7.0, "lowest": 90.0, "highest": 120.0}
    rows = rows_of(study, "standard", found)
    assert error_bar(next(row for row in rows if row.records), study.plots[0]) == 7.0
    words = "the standard deviation over seeds, of one evaluation for code-faithful rows"
    assert describe(study, study.plots[0], rows, "standard").endswith(f"error bars are {words}")
    (legend,) = painted(study, found, "standard").legends
    assert legend.get_title().get_text() == f"Error bars: {words}"
    lone = results_of(study, {key: values[:1] for key, values in VALUES.items()})
    assert "error bars" not in describe(study, study.plots[0], rows_of(study, "standard", lone), "standard")


def test_numbers_under_a_curve_stay_apart():
    study = study_of()
    found = results_of(study)
    for record in found.values():
        record["curve"] = [[r, 1.0, 100.0, 0.1] for r in range(1, 17_000, 400)]
    (axes,) = painted(study, found, "standard").axes
    assert len([tick for tick in axes.get_xticks() if 0 <= tick <= 17_000]) <= 6
