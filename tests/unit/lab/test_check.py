"""A study's document: what is not of its shape, or names what it does not have, is one line with the file's name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from keyfed.errors import ConfigError
from keyfed.lab.experiment.grid import load_study, study_from

DOCUMENT = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity"]
targets = [120]
[base]
data.name = "ptb"
[axis.C]
"0.1" = { participation.fraction = 0.1 }
"0.5" = { participation.fraction = 0.5 }
[axis.method]
FedAvg = { method.name = "fedavg" }
FedAtt = { method.name = "fedatt" }
[[when]]
where = { method = "FedAtt", scale = "smoke" }
set = { method.lr = 2.0 }
[[grid]]
C = ["0.1", "0.5"]
method = ["FedAvg", "FedAtt"]
[scale.smoke]
seeds = [1]
why = "quick"
keep = { C = ["0.1"] }
[scale.standard]
seeds = [1, 2]
why = "some"
fewer = [{ where = { C = "0.5" }, seeds = [3] }]
[published.perplexity]
axes = ["C", "method"]
"0.1 | FedAvg" = 100.0
[[plots]]
name = "p"
kind = "bars"
measure = "perplexity"
x = ["C"]
series = ["method"]
[[claims]]
says = "FedAtt is better"
kind = "lower"
of = { method = "FedAtt" }
than = { method = "FedAvg" }
"""
MISTAKES = {
    "measures": ('measures = ["perplexity"]', "measures = 3", "measures is 3; expected a list"),
    "measure": ('measures = ["perplexity"]', "measures = [3]", "entry 1 of measures is 3; expected text"),
    "no-measures": ('measures = ["perplexity"]', "", "measures is missing; a study needs title"),
    "title": ('title = "T"', "title = 1", "title is 1; expected text"),
    "targets": ("targets = [120]", 'targets = ["x"]', "entry 1 of targets is 'x'; expected a number"),
    "published": ("= 100.0", '= "100.0"', """"0.1 | FedAvg" of published.perplexity is '100.0'; expected a number"""),
    "published-true": ("= 100.0", "= true", '"0.1 | FedAvg" of published.perplexity is True; expected a number'),
    "published-axis": (
        'axes = ["C", "method"]', 'axes = ["C", "methods"]',
        'axis of published.perplexity "methods" is not known (did you mean method?)',
    ),
    "published-label": ('"0.1 | FedAvg"', '"0.2 | FedAvg"', 'C of a published value "0.2" is not known'),
    "published-no-axes": ('axes = ["C", "method"]', "", "axes is missing in published.perplexity"),
    "published-number": ("[published.perplexity]", "[published]", "published.axes is ['C', 'method']; expected"),
    "plot-kind": ('kind = "bars"', "", "kind is missing in a plot; it needs name, kind, measure"),
    "plot-x": ('x = ["C"]', "", "x is missing in a plot of kind bars"),
    "plot-series": ('series = ["method"]', 'series = "method"', "series of a plot is 'method'; expected a list"),
    "seeds": ("seeds = [1]", 'seeds = "x"', "scale.smoke.seeds is 'x'; expected a list"),
    "seed": ("seeds = [1]", 'seeds = ["x"]', "entry 1 of scale.smoke.seeds is 'x'; expected a whole number"),
    "no-seeds": ("seeds = [1]", "seeds = []", "scale.smoke.seeds is empty; expected at least one seed"),
    "fewer": ("seeds = [3]", "seeds = 3", "seeds of scale.standard.fewer is 3; expected a list"),
    "fewer-axis": ('where = { C = "0.5" }', 'where = { K = "0.5" }', 'axis of scale.standard.fewer "K" is not known'),
    "why": ('why = "quick"', "", "why is missing in scale.smoke; it needs seeds, why"),
    "keep": ('keep = { C = ["0.1"] }', 'keep = { C = "0.1" }', "scale.smoke.keep.C is '0.1'; expected a list"),
    "axis": ('FedAvg = { method.name = "fedavg" }', 'FedAvg = "fedavg"', "axis.method.FedAvg is 'fedavg'; expected a"),
    "grid": ('C = ["0.1", "0.5"]', 'C = "0.1"', "C of a grid is '0.1'; expected a list"),
    "when-axis": ('where = { method = "FedAtt", scale', 'where = { metod = "FedAtt", scale', '(did you mean method?)'),
    "when-scale": ('scale = "smoke" }', 'scale = "smoky" }', 'scale of a [[when]] "smoky" is not known'),
    "when-set": ("set = { method.lr = 2.0 }", "", "set is missing in a [[when]]"),
    "claim-of": ('of = { method = "FedAtt" }', "of = 1", "of of a claim is 1; expected a table"),
    "claim-bound": ('kind = "lower"', 'kind = "below"', "bound is missing in a claim of kind below"),
    "claim-says": ('says = "FedAtt is better"', 'says = " "', "says of a claim is empty; expected a sentence"),
    "claim-than-list": (
        'than = { method = "FedAvg" }', 'than = { method = ["FedAvg"] }',
        "method of than of a claim is ['FedAvg']; expected text",
    ),
    "claim-no-than": ('than = { method = "FedAvg" }', "", 'than is missing in a claim of kind lower: "FedAtt is'),
    "claim-empty-than": ('than = { method = "FedAvg" }', "than = {}", "than is missing in a claim of kind lower"),
    "claim-below-nothing": (
        'kind = "lower"', 'kind = "below"\nbound = 0',
        'bound of a claim of kind below: "FedAtt is better" is 0; expected a number above 0',
    ),
    "claim-costs-all": (
        'kind = "lower"', 'kind = "costs"\nbound = -1.0',
        'bound of a claim of kind costs: "FedAtt is better" is -1.0; expected a number above -1',
    ),
    "claim-bound-nan": ('kind = "lower"', 'kind = "below"\nbound = nan', "bound of a claim is nan; expected a number"),
    "claim-within": (
        'kind = "lower"', 'kind = "close"\nwithin = -0.1',
        'within is -0.1 in a claim of kind close: "FedAtt is better"; expected 0 or more',
    ),
    "claim-measure": (
        'kind = "lower"', 'kind = "lower"\nmeasure = "perplexty"',
        'measure of a claim "perplexty" is not known (did you mean perplexity?); one of perplexity, rounds_to_120, ',
    ),
    "claim-target": ('kind = "lower"', 'kind = "lower"\nmeasure = "rounds_to_90"', '"rounds_to_90" is not known'),
    "claim-about": ('kind = "lower"', 'kind = "lower"\nabout = "rich"', 'about of a claim "rich" is not known'),
    "claim-reach": ('kind = "lower"', 'kind = "lower"\nabout = "reach"', 'about = "reach" and twice go together in a'),
    "claim-twice": (
        'kind = "lower"', 'kind = "lower"\ntwice = { C = "0.5" }', 'about = "reach" and twice go together in a claim',
    ),
    "claim-twice-label": (
        'kind = "lower"', 'kind = "lower"\nabout = "reach"\ntwice = { C = "0.9" }', 'C of a claim "0.9" is not known',
    ),
    "claim-twice-list": (
        'kind = "lower"', 'kind = "lower"\nabout = "reach"\ntwice = { C = ["0.5"] }',
        "C of twice of a claim is ['0.5']; expected text",
    ),
    "searched": ("[[claims]]", '[[searched]]\ntrials = 3\n[[claims]]', "where is missing in a [[searched]]; it needs"),
    "searched-tokens": (
        "[[claims]]", '[[searched]]\nwhere = {}\ntrials = 3\ntokens = 0\nrecord = "r"\n[[claims]]',
        "tokens of a [[searched]] is 0; expected a number above 0",
    ),
    "searched-label": (
        "[[claims]]", '[[searched]]\nwhere = { C = "1" }\ntrials = 3\ntokens = 9\nrecord = "r"\n[[claims]]',
        'C of a [[searched]] "1" is not known',
    ),
    "published-zero": ("= 100.0", "= 0", '"0.1 | FedAvg" of published.perplexity is 0; expected a number above 0'),
    "published-infinite": ("= 100.0", "= inf", '"0.1 | FedAvg" of published.perplexity is inf; expected a number'),
    "runner-setting": ('data.name = "ptb"', 'study.shuffles = "x"', "study.shuffles is 'x'; expected a whole number"),
    "runner-range": ('data.name = "ptb"', "study.share = -1", "study.share is -1; expected a number above 0"),
    "runner-blanks": ('data.name = "ptb"', 'study.blanks = "striped"', "(did you mean stripped?)"),
    "toy": ("[[grid]]", '[[grid]]\nrunner = "toy"', "0.1, FedAvg has no study.sent_back; cells of runner toy need it"),
}  # fmt: skip


@pytest.mark.parametrize("which", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_was_expected(which):
    old, new, said = MISTAKES[which]
    assert DOCUMENT.count(old) == 1
    study_from(tomllib.loads(DOCUMENT), Path("example.toml"))
    with pytest.raises(ConfigError) as error:
        study_from(tomllib.loads(DOCUMENT.replace(old, new)), Path("example.toml"))
    assert str(error.value).startswith("example.toml: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "claim",
    ["measure = 'rounds_to_120'", "measure = 'top1'", "measure = 'train_nats'", "measure = 'nats'", "within = 0"],
)
def test_a_claim_may_be_about_what_a_run_measures(claim):
    study_from(tomllib.loads(DOCUMENT.replace('kind = "lower"', f'kind = "lower"\n{claim}')), Path("example.toml"))


def test_a_run_file_without_sections_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("rounds = 3\n")
    (tmp_path / "s.toml").write_text(DOCUMENT.replace('data.name = "ptb"', 'run_file = "run.toml"'))
    with pytest.raises(ConfigError, match=r"s.toml: run_file run.toml: rounds is 3; expected a section"):
        load_study(str(tmp_path / "s.toml"), tmp_path)
