"""Verdicts on claims: the rule at its limits, what waits for rows that stopped learning, the claims of the studies."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError
from keyfed.lab.experiment import claims
from keyfed.lab.experiment.claims import (
    ABSENT,
    FAILS,
    HOLDS,
    LEARNING,
    NOT_JUDGED,
    UNSURE,
    Spread,
    beyond_chance,
    compare_rows,
    judge,
    of_two,
    pooled_spread,
    quantile,
    said_verdict,
    spreads_of,
    verdict_on,
)
from keyfed.lab.experiment.grid import cells_of, load_study, study_from, study_names
from keyfed.lab.experiment.page import LEFT_OUT, MORE_SEEDS, page_text, result_table
from keyfed.lab.experiment.store import OPEN, Store, counted, rows_of, write_printed, write_row
from keyfed.lab.experiment.summary import judged, numbers

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"
DOCUMENT = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity", "rounds_to_90"]
[axis.C]
"0.1" = { participation.fraction = 0.1 }
"0.5" = { participation.fraction = 0.5 }
"0.9" = { participation.fraction = 0.9 }
[axis.method]
FedAvg = { method.name = "fedavg" }
FedAtt = { method.name = "fedatt" }
Lost = { absent = "it is lost" }
[[grid]]
C = ["0.1", "0.5", "0.9"]
method = ["FedAvg", "FedAtt", "Lost"]
[scale.smoke]
seeds = [1]
why = "quick"
set = { train.rounds = 3 }
[scale.standard]
seeds = [1, 2, 3]
why = "some"
[scale.paper]
seeds = [1, 2, 3]
why = "all"
[published.perplexity]
axes = ["method"]
FedAvg = 100.0
[[claims]]
says = "as said"
"""
ORDER = 'of = { method = "FedAtt" }\nthan = { method = "FedAvg" }\n'


def study_of(claim: str = 'kind = "lower"', of: str = ORDER, text: str = DOCUMENT):
    return study_from(tomllib.loads(text + of + claim), Path("example.toml"))


def results_of(study, values, measure="perplexity", **more):
    """Results by cell id: `values` maps (C, method) to one value a seed."""
    return {
        cell.id: {
            "id": cell.id, "seed": cell.seed, "measures": {measure: values[key][cell.seed - 1]}, "curve": [],
            "made": dict.fromkeys(("keyfed", "torch", "python", "hardware"), "1"), **more,
        }
        for cell in cells_of(study, "standard")
        if (key := tuple(cell.labels.values())) in values and cell.seed <= len(values[key])
    }  # fmt: skip


def compared(study, values, measure="perplexity", **more):
    rows = rows_of(study, "standard", results_of(study, values, measure, **more))
    return compare_rows(study, rows, study.claims[0])


def pair(fedatt, fedavg, C="0.1"):
    return {(C, "FedAtt"): fedatt, (C, "FedAvg"): fedavg}


def told(comparisons):
    return {c.where: c.verdict for c in comparisons}


EXPLORED = """
title = "T"
paper = "P"
about = "A"
measures = ["bigram_entropy"]
[axis.data]
one = { data.name = "a" }
two = { data.name = "b" }
[[grid]]
runner = "explore"
data = ["one", "two"]
[scale.smoke]
seeds = [1]
why = "w"
[scale.standard]
seeds = [1]
why = "w"
[published.bigram_entropy]
axes = []
"" = 2.5
[[claims]]
says = "a reading fits"
kind = "printed"
of = {}
measure = "bigram_entropy"
within = 0.01
some = true
"""


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((2.51, 2.6), "holds (1 of 2)"), ((2.4, 2.6), "does not hold (none of 2)"), ((2.51, 2.49), "holds (2 of 2)")],
    ids=["one", "none", "both"],
)
def test_what_has_nothing_random_in_it_is_told_without_a_spread(values, verdict):
    study = study_of("", "", EXPLORED)
    found = {
        cell.id: {"id": cell.id, "seed": 1, "measures": {"bigram_entropy": value}, "curve": [], "data": "d",
                  "made": dict.fromkeys(("keyfed", "torch", "python", "hardware"), "1")}
        for cell, value in zip(cells_of(study, "standard"), values, strict=True)
    }  # fmt: skip
    rows = rows_of(study, "standard", found)
    assert [c.verdict for c in compare_rows(study, rows, study.claims[0])] == [
        HOLDS if abs(value / 2.5 - 1) < 0.01 else FAILS for value in values
    ]
    assert verdict_on(study, rows, study.claims[0], "standard") == verdict
    page = page_text(study, found)
    assert "spread" not in page.lower()
    assert "Nothing here is random. Tolerance 1 %." in page


def test_nothing_random_adds_nothing_to_a_margin():
    study = study_of()
    rows = rows_of(study, "standard", results_of(study, pair([100.0, 110.0], [100.0])))
    spread = spreads_of(rows, "perplexity")["train"]
    fixed = spreads_of(rows_of(study_of("", "", EXPLORED), "standard", {}), "bigram_entropy")["explore"]
    assert of_two(spread, fixed).margin(2) == pytest.approx(spread.margin(2))
    assert of_two(fixed, fixed).margin(1) == 0


def test_counts_come_first_where_comparisons_differ():
    near = pair([80.0, 81.0], [100.0, 101.0])
    other = pair([120.0, 121.0], [100.0, 101.0], "0.5")
    third = pair([100.0, 101.0], [100.0, 101.0], "0.9")
    assert judge(compared(study_of(), near | other), "standard") == "1 of 2 holds, 1 open; C = 0.5 does not"
    assert judge(compared(study_of(), near | third), "standard") == "1 of 2 holds, 1 open; 1 cannot be told"
    assert (
        judge(compared(study_of(), other | third), "standard")
        == "none of 2 holds, 1 open; C = 0.5 does not; 1 cannot be told"
    )
    everywhere = near | {("0.5", m): near["0.1", m] for m in ("FedAtt", "FedAvg")}
    assert judge(compared(study_of(), everywhere | other), "standard").startswith("1 of 2 holds, 1 open")
    assert judge(compared(study_of(), everywhere | third), "standard") == "2 of 3 hold; 1 cannot be told"


def test_what_is_open_lets_nothing_hold_for_good():
    near = pair([80.0, 81.0], [100.0, 101.0])
    assert judge(compared(study_of(), near), "standard") == "holds so far (1 of 1, 2 open)"
    assert judge(compared(study_of(), near)[:1], "standard") == HOLDS
    worse = pair([120.0, 121.0], [100.0, 101.0])
    assert judge(compared(study_of(), worse), "standard") == "does not hold (none of 1, 2 open)"
    every = {(C, m): near["0.1", m] for C in ("0.1", "0.5", "0.9") for m in ("FedAtt", "FedAvg")}
    assert judge(compared(study_of(), every), "standard") == "holds (all 3)"
    assert judge(compared(study_of(), {}), "standard") == OPEN


def test_a_claim_about_absent_rows_says_so():
    lost = '[[claims]]\nsays = "x"\nkind = "lower"\nof = { method = "Lost" }\nthan = { method = "FedAvg" }'
    study = study_of(f'kind = "higher"\n{lost}')
    rows = rows_of(study, "standard", {})
    assert verdict_on(study, rows, study.claims[1], "standard") == ABSENT
    assert verdict_on(study, rows, study.claims[0], "standard") == OPEN


def test_a_bound_is_judged_by_the_rows_own_seeds():
    """Rows of other recipes with a small spread made three wide seeds look certain."""
    study = study_of('kind = "below"\nbound = 115.43', 'of = { method = "FedAtt" }\n')
    tight = {(C, "FedAvg"): [99.0, 99.1, 98.9] for C in ("0.1", "0.5", "0.9")}
    (mine, *_) = compared(study, tight | {("0.1", "FedAtt"): [115.1, 114.6, 114.1]})
    assert mine.verdict == UNSURE
    own = pooled_spread([mine.row], "perplexity")
    assert own.freedom == 2
    assert mine.margin == pytest.approx(4.3027 * own.sd / math.sqrt(3), rel=1e-4)
    (one, *_) = compared(study, tight | {("0.1", "FedAtt"): [114.6]})
    assert one.verdict == HOLDS  # one seed has no spread of its own: that of the study
    (lone, *_) = compared(study, {("0.1", "FedAtt"): [114.6]})
    assert lone.verdict == UNSURE  # and no spread at all tells only what is far off


@pytest.mark.parametrize(
    ("fedatt", "fedavg", "lower", "higher", "close"),
    [
        (8, None, HOLDS, FAILS, FAILS),
        (None, 8, FAILS, HOLDS, FAILS),
        (48, None, UNSURE, UNSURE, UNSURE),
        (None, None, UNSURE, UNSURE, UNSURE),
        (8, 30, HOLDS, FAILS, FAILS),
    ],
    ids=["reached", "not reached", "hardly", "neither", "both"],
)
def test_a_target_that_was_not_reached_is_more_rounds_than_were_run(fedatt, fedavg, lower, higher, close):
    values = pair([fedatt], [fedavg])
    for kind, verdict in (("lower", lower), ("higher", higher), ("close", close)):
        study = study_of(f'kind = "{kind}"\nmeasure = "rounds_to_90"')
        found = compared(study, values, "rounds_to_90", rounds=50)[0]
        assert found.verdict == verdict
        assert found.beyond == (fedatt is None, fedavg is None)
        assert (found.ours, found.other) == (fedatt or 50, fedavg or 50)
    page = page_text(study, results_of(study, values, "rounds_to_90", rounds=50))
    assert ("\\> 50" in page) == (None in (fedatt, fedavg))
    assert ("| 8 | \\> 50 | – | \\< -84.0 % |" in page) == ((fedatt, fedavg) == (8, None))


def test_seeds_that_missed_a_target_make_a_mean_that_is_a_lower_bound():
    study = study_of('kind = "lower"\nmeasure = "rounds_to_90"')
    found = compared(study, pair([10, 11], [40, None]), "rounds_to_90", rounds=50)[0]
    assert (found.other, found.beyond) == (45, (False, True))
    assert found.verdict == HOLDS
    found = compared(study, pair([40, None], [43, 44]), "rounds_to_90", rounds=50)[0]
    assert found.verdict == UNSURE  # FedAtt needs 45 rounds or more


def test_close_needs_the_difference_and_chance_within_the_tolerance():
    study = study_of('kind = "close"\nwithin = 0.05')
    for fedatt, verdict in (([101.0, 101.1], HOLDS), ([105.0, 105.1], UNSURE), ([120.0, 120.1], FAILS)):
        found = compared(study, pair(fedatt, [100.0, 100.1]))[0]
        assert found.verdict == verdict
        low, high = found.interval
        told = HOLDS if max(-low, high) < math.log(1.05) else FAILS if low > math.log(1.05) else UNSURE
        assert found.verdict == told
    assert compared(study, pair([101.0], [100.0]))[0].verdict == UNSURE
    assert compared(study, pair([101.0], [100.0]))[0].interval is None


def test_a_cost_is_told_from_its_bound_on():
    study = study_of('kind = "costs"\nbound = 0.0193')
    for fedatt, verdict in (([101.0, 101.01], HOLDS), ([101.9, 102.0], UNSURE), ([112.5, 112.6], FAILS)):
        found = compared(study, pair(fedatt, [100.0, 100.01]))[0]
        assert found.verdict == verdict
        assert found.edge == pytest.approx(math.log(1.0193))
    assert compared(study, pair([97.0, 97.1], [100.0, 100.1]))[0].verdict == HOLDS


@pytest.mark.parametrize("kind", ["below", "costs"])
def test_a_bound_is_asked_for(kind):
    with pytest.raises(ConfigError, match=f'bound is missing in a claim of kind {kind}: "as said"'):
        study_of(f'kind = "{kind}"')


def test_pages_show_the_limits_that_were_applied():
    study = study_of('kind = "printed"', 'of = { method = "FedAvg" }\n')
    found = results_of(study, {("0.1", "FedAvg"): [95.4, 95.4]})
    (first, *_) = compare_rows(study, rows_of(study, "standard", found), study.claims[0])
    assert first.verdict == HOLDS  # 1/1.05 is 95.24
    page = page_text(study, found)
    assert "Tolerance 5 %." in page
    assert "| difference | interval | verdict |" in page
    assert "| -4.6 % | -4.6 % to -4.6 % | holds |" in page
    for record in found.values():
        record["shuffles"] = {"count": 20, "sd": 1.0, "lowest": 90.0, "highest": 99.0}
    assert "Tolerance 5 % and two standard deviations of one evaluation." in page_text(study, found)
    lower = study_of()
    both = page_text(lower, results_of(lower, pair([80.0, 90.0], [100.0, 100.0])))
    low, high = compared(lower, pair([80.0, 90.0], [100.0, 100.0]))[0].interval
    assert f"{100 * math.expm1(low):+.1f} % to {100 * math.expm1(high):+.1f} %" in both


def test_comparisons_of_one_claim_are_corrected_for_their_number():
    """Holm's rule: the clearest of three is held against 5 %/3, and only what is told makes the next one easier."""
    near, clear = ([100.0, 100.4, 99.8], [100.6, 100.9, 100.5]), ([90.0, 90.3, 89.8], [100.0, 100.4, 99.8])
    (alone, *_) = compared(study_of(), pair(*near))
    assert alone.verdict == HOLDS
    first, second, third = compared(study_of(), pair(*near) | pair(*clear, "0.5") | pair(*clear, "0.9"))
    levels = sorted(c.margin / c.error.sd for c in (first, second, third))
    assert levels == pytest.approx([quantile(6, 0.05 / k) for k in (1, 2, 3)])
    assert first.margin == min(c.margin for c in (first, second, third))
    none = compared(
        study_of(), {(C, m): near[k] for C in ("0.1", "0.5", "0.9") for k, m in enumerate(("FedAtt", "FedAvg"))}
    )
    assert len({c.margin for c in none}) == (3 if all(c.verdict == HOLDS for c in none) else 1)


def test_the_chance_of_a_distance_is_that_of_its_quantile():
    for freedom in (1, 2.5, 8, 1e6):
        for chance in (0.05, 0.01):
            assert beyond_chance(3 * quantile(freedom, chance), Spread(3.0, freedom)) == pytest.approx(chance, rel=1e-6)
    assert beyond_chance(1.0, Spread(0.0, 1)) == 0
    assert beyond_chance(0.0, Spread(0.0, 1)) == 1


def test_an_untrained_model_has_not_diverged():
    study = study_of()
    for value, words in ((10_004.0, "10,004.0; untrained"), (9_000.0, "9,000.0"), (16_000.0, "16,000.0; diverged")):
        found = results_of(study, {("0.1", "FedAvg"): [value]}, vocabulary=10_002)
        row = next(row for row in rows_of(study, "standard", found) if row.records)
        assert write_row(row, "perplexity") == words


def test_seeds_beyond_a_scales_own_are_not_counted_as_finished():
    study = study_of()
    extra = {cell.id: {"seed": 9} for cell in cells_of(study, "standard", [9])}
    done = results_of(study, {("0.1", "FedAvg"): [100.0]})
    assert counted(study, "standard", done | extra) == (1, 17)  # absent rows are neither


def test_tables_have_the_tokens_that_clients_trained_on():
    study = study_of()
    found = results_of(study, {("0.1", "FedAvg"): [100.0, 101.0]}, tokens_trained=27_885_000)
    table = result_table(study, rows_of(study, "standard", found))
    assert dict(zip(table[0], table[1], strict=True))["local tokens"] == "27.9 M"
    assert "local tokens" not in result_table(study, rows_of(study, "standard", {}))[0]


@pytest.mark.parametrize(
    ("freedom", "known"),
    [(1, 12.706), (2, 4.303), (2.006, 4.290), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (38, 2.024),
     (1000, 1.962), (1e5, 1.960), (1e9, 1.960)],
)  # fmt: skip
def test_students_quantile_is_that_of_the_tables(freedom, known):
    assert quantile(freedom) == pytest.approx(known, abs=6e-4)


def test_a_side_that_hardly_varies_takes_no_degrees_of_freedom():
    tight, wide = Spread(0.0012, 1), Spread(0.0293, 2)
    assert of_two(tight, wide).margin(2) == pytest.approx(4.303 * 0.0293 / math.sqrt(2), rel=0.01)
    alike = Spread(0.02, 3)
    apart = of_two(alike, Spread(0.02, 3)).margin(2)
    assert apart == pytest.approx(2.447 * 0.02, rel=1e-3)  # two pools of three degrees each: six
    assert of_two(alike, alike).margin(2) == pytest.approx(3.182 * 0.02, rel=1e-3)


def test_more_noise_never_makes_a_printed_figure_hold():
    study = study_of('kind = "printed"', 'of = { method = "FedAvg" }\n')
    for seeds, verdict in (
        ([100.0, 112.0, 124.0], UNSURE),
        ([112.0, 112.2, 111.8], FAILS),
        ([101.0, 101.2, 100.8], HOLDS),
        ([91.0, 101.0, 111.0], UNSURE),
    ):
        assert compared(study, {("0.1", "FedAvg"): seeds})[0].verdict == verdict


def test_rounds_that_nobody_counted_are_unknown_and_not_more_than_were_run():
    """A cell that a study without targets has run says nothing of them."""
    study = study_of('kind = "lower"\nmeasure = "rounds_to_90"')
    found = results_of(study, pair([10, 12], [30, 40]), "rounds_to_90", rounds=50)
    for cell, record in found.items():
        if record["seed"] == 2:
            found[cell] = record | {"measures": {"perplexity": 80.0}}
    (first, *_) = compare_rows(study, rows_of(study, "standard", found), study.claims[0])
    assert (first.ours, first.other, first.beyond) == (10, 30, (False, False))
    row = next(row for row in rows_of(study, "standard", found) if row.records)
    assert write_row(row, "rounds_to_90") == "30"  # and not "not reached by 1 of 2 seeds"
    for cell, record in found.items():
        found[cell] = record | {"measures": {"perplexity": 80.0}}
    (first, *_) = compare_rows(study, rows_of(study, "standard", found), study.claims[0])
    assert (first.ours, first.other, first.verdict) == (None, None, OPEN)
    assert "\\> 50" not in page_text(study, found)


def test_two_rows_are_compared_on_the_seeds_that_both_have():
    study = study_of()
    found = compared(study, pair([100.0, 101.0, 130.0], [99.0, 100.0]))[0]
    assert (found.ours, found.other) == (100.5, 99.5)
    assert [len(row.records) for row in (found.row, found.against)] == [2, 2]
    assert found.change == pytest.approx((math.log(100 / 99) + math.log(101 / 100)) / 2)
    assert "100.5 ± 0.7 against 99.50 ± 0.71" in numbers([found], study.claims[0])[0]
    lone = compared(study, pair([100.0, 101.0, 130.0], [99.0]))[0]
    assert (lone.ours, lone.other) == (100.0, 99.0)


def test_seeds_that_agree_at_validations_may_differ_between_them():
    study = study_of('kind = "lower"\nmeasure = "rounds_to_90"')
    for every, verdict in ((1, HOLDS), (20, UNSURE)):
        settings = {"train.eval_every": every}
        found = compared(study, pair([40, 40], [60, 60]), "rounds_to_90", rounds=100, settings=settings)[0]
        step = every / math.sqrt(12)
        assert found.verdict == verdict
        assert found.margin == pytest.approx(12.7062 * math.hypot(step / 40, step / 60) / math.sqrt(2), rel=1e-4)
    plain = compared(study_of(), pair([40.0, 40.0], [60.0, 60.0]))[0]
    assert plain.margin == 0  # a perplexity is not told in steps


def test_further_scales_show_only_what_is_not_above_and_seeds_from_elsewhere_are_named():
    few = DOCUMENT.replace("seeds = [1, 2, 3]", "seeds = [1]", 1).replace(
        'why = "some"', 'why = "some"\nkeep = { C = ["0.1"] }'
    )
    study = study_of(text=few)
    cells = {(*cell.labels.values(), cell.seed): cell for cell in cells_of(study, "paper")}

    def page(*keys):
        found = results_of(study, pair([80.0], [100.0]))
        for key in keys:
            cell = cells[key]
            found[cell.id] = next(iter(found.values())) | {"id": cell.id, "seed": cell.seed}
        return page_text(study, found)

    assert MORE_SEEDS not in page()
    assert "At scale paper" not in page(("0.1", "FedAvg", 2))
    assert f"Scale standard: some. {MORE_SEEDS}" in page(("0.1", "FedAvg", 2))
    after = page(("0.5", "FedAvg", 1)).partition("## At scale paper")[2]
    assert "| 0.5 | FedAvg |" in after
    assert "| 0.1 |" not in after
    assert LEFT_OUT in after


def test_printed_figures_keep_their_decimals():
    assert [write_printed(v, "perplexity") for v in (115.43, 2.5131, None)] == ["115.43", "2.5131", "–"]
    assert write_printed(0.2692, "top1") == "26.92 %"


def test_the_papers_claims_and_ours_stand_apart():
    study = study_of('kind = "lower"\n[[claims]]\nours = true\nsays = "mine"\nkind = "below"\nof = {}\nbound = 1')
    page = page_text(study, results_of(study, pair([80.0], [100.0])))
    said, goals = page.index("## What the paper says"), page.index("## Our own goals and checks")
    assert said < page.index("As said: ", said) < goals < page.index("Mine: ", goals)
    assert "**Ours. Mine: " in page
    for name in ("ptb-50", "wikitext2-50"):  # no paper has a recipe
        assert all(claim.ours for claim in load_study(name, STUDIES).claims)


DOCUMENT_REACH = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity", "top1"]
[axis.model]
counts = { study.order = 5 }
server = { method.name = "central" }
devices = { method.name = "fedavg" }
[axis.recipe]
short = { train.rounds = 10 }
long = { train.rounds = 40, train.schedule = "cosine" }
[axis.rounds]
once = {}
twice = { train.rounds = 80 }
[[grid]]
runner = "n-gram"
model = ["counts"]
[[grid]]
model = ["server", "devices"]
recipe = ["short"]
[[grid]]
model = ["server", "devices"]
recipe = ["long"]
rounds = ["once", "twice"]
[scale.smoke]
seeds = [1]
why = "quick"
[scale.standard]
seeds = [1, 2, 3]
why = "some"
[[searched]]
where = { model = "server", recipe = "long" }
trials = 10
tokens = 1_000_000
record = "r"
[[searched]]
where = { model = "devices", recipe = "long" }
trials = 12
tokens = 1_050_000
record = "r"
[[claims]]
says = "the network wins"
about = "reach"
kind = "lower"
of = { model = "devices" }
than = { model = "counts" }
twice = { rounds = "twice" }
[[claims]]
says = "devices win"
about = "reach"
kind = "lower"
of = { model = "devices" }
than = { model = "server" }
twice = { rounds = "twice" }
[[claims]]
says = "at ten rounds the counts win"
about = "budget"
kind = "higher"
of = { model = "devices", recipe = "short" }
than = { model = "server" }
"""
STUDY = study_from(tomllib.loads(DOCUMENT_REACH), Path("example.toml"))
COUNTS, BUDGET = STUDY.claims[0], STUDY.claims[2]
SHORT = {("counts",): 100.0, ("devices", "short"): 200.0, ("server", "short"): 150.0}
LONG = {("devices", "long", "once"): 80.0, ("server", "long", "once"): 70.0}
DOUBLED = {("devices", "long", "twice"): 79.9, ("server", "long", "twice"): 69.9}


def results(values, study=STUDY, scale="standard", spread=0.1, measure="perplexity"):
    """Results by cell id: `values` maps labels to the mean over seeds."""
    return {
        cell.id: {
            "id": cell.id, "seed": cell.seed, "curve": [],
            "measures": {measure: values[key] + spread * (cell.seed - 2)},
            "made": dict.fromkeys(("keyfed", "torch", "python", "hardware"), "1"),
            "rounds": None if cell.runner == "n-gram" else cell.settings["train.rounds"],
        }
        for cell in cells_of(study, scale)
        if (key := tuple(cell.labels.values())) in values
    }  # fmt: skip


def told_reach(values, study=STUDY, claim=0, **more):
    return verdict_on(
        study, rows_of(study, "standard", results(values, study, **more)), study.claims[claim], "standard"
    )


def reasons(values, study=STUDY, claim=0, **more):
    rows = rows_of(study, "standard", results(values, study, **more))
    return "; ".join(c.waits for c in compare_rows(study, rows, study.claims[claim]) if c.waits)


def test_a_row_without_a_doubled_run_is_told_neither_way():
    for devices in (50.0, 100.0, 200.0):  # ahead, level and behind
        assert told_reach(SHORT | {("devices", "short"): devices}) == LEARNING
    assert "devices, short has no run of twice the rounds" in reasons(SHORT)
    assert told_reach({}) == OPEN


def test_settled_rows_are_told_and_those_that_still_learn_are_passed_over():
    assert told_reach(SHORT | LONG) == LEARNING
    assert "devices, long, once: the run of twice the rounds is open" in reasons(SHORT | LONG)
    assert told_reach(SHORT | LONG | DOUBLED) == HOLDS
    assert told_reach(SHORT | LONG | DOUBLED, claim=1) == FAILS
    behind = {("devices", "long", "once"): 120.0, ("devices", "long", "twice"): 119.9}
    assert told_reach(SHORT | LONG | DOUBLED | behind) == FAILS  # either way
    rows = rows_of(STUDY, "standard", results(SHORT | LONG | DOUBLED))
    assert [c.verdict for c in compare_rows(STUDY, rows, COUNTS)] == [LEARNING, HOLDS]  # a doubled run is no row


def test_both_sides_must_have_stopped():
    gaining = {("server", "long", "twice"): 60.0}
    assert told_reach(SHORT | LONG | DOUBLED | gaining) == HOLDS  # the server is no side of it
    assert told_reach(SHORT | LONG | DOUBLED | gaining, claim=1) == LEARNING
    assert "server, long, once: twice the rounds gain 16.7 %, of at most 1.0 %" in reasons(
        SHORT | LONG | DOUBLED | gaining, claim=1
    )


@pytest.mark.parametrize(
    ("twice", "spread", "verdict"),
    [(79.3, 0.1, HOLDS), (79.1, 0.1, LEARNING), (85.0, 0.1, HOLDS), (77.0, 4.0, HOLDS), (75.0, 4.0, LEARNING)],
    ids=["under-1", "over-1", "worse", "under-sd", "over-sd"],
)
def test_the_gain_is_held_against_a_hundredth_and_one_seeds_spread(twice, spread, verdict):
    assert told_reach(SHORT | LONG | {("devices", "long", "twice"): twice}, spread=spread) == verdict


def test_more_is_better_of_shares():
    study = study_from(
        tomllib.loads(DOCUMENT_REACH.replace('kind = "lower"', 'kind = "higher"\nmeasure = "top1"')), Path("e.toml")
    )
    values = {
        ("counts",): 0.20,
        ("devices", "short"): 0.1,
        ("devices", "long", "once"): 0.25,
        ("devices", "long", "twice"): 0.26,
    }
    assert told_reach(values, study, spread=0.0001, measure="top1") == LEARNING
    values["devices", "long", "twice"] = 0.24  # worse: nothing is gained
    assert told_reach(values, study, spread=0.0001, measure="top1") == HOLDS


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens = 1_050_000", "tokens = 1_200_000", "searched with unequal tokens: devices, long, once with 1 M"),
        ('where = { model = "server", recipe = "long" }', 'where = { model = "server", recipe = "short" }',
         "the settings of server, long, once were not searched"),
        ("twice = { train.rounds = 80 }", "twice = { train.rounds = 60 }", "not twice the rounds"),
        ("twice = { train.rounds = 80 }", "twice = { train.rounds = 80, method.lr = 9.0 }", "has other settings"),
        ('train.schedule = "cosine" }', "method.decay = 0.9 }", "a schedule that does not fit them"),
    ],
    ids=["unequal", "not-searched", "rounds", "settings", "schedule"],
)  # fmt: skip
def test_a_search_and_a_schedule_must_fit(old, new, said):
    assert DOCUMENT_REACH.count(old) == 1
    study = study_from(tomllib.loads(DOCUMENT_REACH.replace(old, new)), Path("example.toml"))
    assert told_reach(SHORT | LONG | DOUBLED, claim=1) == FAILS
    assert told_reach(SHORT | LONG | DOUBLED, study, claim=1) == LEARNING
    assert said in reasons(SHORT | LONG | DOUBLED, study, claim=1)


def test_a_decay_that_was_refitted_fits():
    text = DOCUMENT_REACH.replace('train.schedule = "cosine" }', "method.decay = 0.9 }")
    text = text.replace("twice = { train.rounds = 80 }", "twice = { train.rounds = 80, method.decay = 0.94868 }")
    study = study_from(tomllib.loads(text), Path("example.toml"))
    assert told_reach(SHORT | LONG | DOUBLED, study, claim=1) == FAILS


def test_a_claim_at_a_budget_is_judged_at_once_and_says_its_rounds():
    rows = rows_of(STUDY, "standard", results(SHORT))
    assert said_verdict(STUDY, rows, BUDGET, "standard") == "holds, at 10 rounds"
    assert said_verdict(STUDY, rows, COUNTS, "standard") == LEARNING
    assert verdict_on(STUDY, rows, COUNTS, "smoke") == said_verdict(STUDY, rows, BUDGET, "smoke") == NOT_JUDGED
    found = results(SHORT)
    assert f"The network wins: {LEARNING}." in page_text(STUDY, found)
    assert "At ten rounds the counts win: holds, at 10 rounds." in page_text(STUDY, found)
    assert "What keeps rows from being judged: devices, short has no run of twice the rounds" in page_text(STUDY, found)
    line = judged(STUDY, found, COUNTS).line
    assert f"**{LEARNING}**. short: 200.0 ± 0.1 against 100.0 ± 0.1 (+100.0 %)." in line
    assert f"“{LEARNING}”" in (RESULTS / "studies.md").read_text("utf-8")


@given(st.floats(20.0, 500.0), st.floats(20.0, 500.0), st.floats(20.0, 500.0))
def test_no_figures_of_a_row_that_gains_make_a_verdict(once, gain, counts):
    """Property: where twice the rounds gain, whatever the numbers, nothing is told_reach either way."""
    twice = once / (1.02 + gain / 1000)
    values = {("counts",): counts, ("devices", "long", "once"): once, ("devices", "long", "twice"): twice}
    assert told_reach(values, spread=0.01) == LEARNING


def test_without_the_rule_an_undertrained_row_is_told(monkeypatch):
    monkeypatch.setattr(claims, "waits", lambda *_: "")
    assert told_reach(SHORT).startswith(FAILS)


def claims_of(name):
    return load_study(name, STUDIES).claims


def test_next_characters_claims_are_the_reports():
    """§6.2 and §7: FedAvg does better than FedProx, all are close, central training is best."""
    study = load_study("next-character", STUDIES)
    values = {"central": 1.0, "FedAvg": 1.1, "FedProx, mu 0.5": 1.13, "FedProx, mu 0.0001": 1.13, "ADMM": 1.12,
              "FedADMM": 1.12, "LIADMM": 1.3}  # fmt: skip
    skew, longer = {"LIADMM": 1.2}, {"FedAvg": 1.1, "FedProx, mu 0.0001": 1.05, "FedProx, mu 0.5": 1.05}

    def value(cell):
        method = cell.labels["method"]
        if cell.labels["setup"] == "one state, 40 rounds":
            return longer[method]
        return skew.get(method, values[method] + 0.02) if cell.labels["split"] == "quantity skew" else values[method]

    found = {
        cell.id: {"id": cell.id, "seed": cell.seed, "curve": [],
                  "measures": dict.fromkeys(("nats", "train_nats"), value(cell) + cell.seed * 1e-4)}
        for cell in cells_of(study, "standard", [1, 2])
        if cell.labels["split"] != "roles" and cell.labels["method"] in values
    }  # fmt: skip
    study = replace(study, scales={"standard": replace(study.scales["standard"], seeds=(1, 2), fewer=())})
    rows = rows_of(study, "standard", found)
    told = {c.says: verdict_on(study, rows, c, "standard") for c in study.claims if not c.ours and c.kind != "printed"}
    assert len(told) >= 6
    assert {says: word for says, word in told.items() if not word.startswith("holds")} == {}


def test_pretrainings_and_fedmeds_claims_are_the_papers():
    small, large, wider = claims_of("pretraining-table2")
    assert (small.kind, small.of["network"]) == ("close", "small")  # "little to no improvement"
    assert (large.kind, large.of["network"]) == ("higher", "large")
    assert (wider.kind, wider.of["network"], wider.than) == ("higher", "large", {"network": "small"})
    bounds = {c.of["data"]: c.bound for c in claims_of("fedmed-fig5") if c.kind == "costs"}
    assert bounds == {"PTB": 0.0193, "WikiText-2": 0.0053, "Yelp (stand-in)": 0.0054}
    assert {c.kind for c in claims_of("fedatt-fig3") if "E" not in c.of or "B" not in c.of} == {"close"}
    order = {(c.of["model"], c.than["model"]) for c in claims_of("gboard")}
    assert ("server-trained CIFG", "5-gram") in order


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_every_claim_says_what_it_is_about(name):
    tables = tomllib.loads((STUDIES / f"{name}.toml").read_text("utf-8")).get("claims", [])
    assert [table["says"] for table in tables if "about" not in table] == []
    trained = {cell.runner for cell in cells_of(load_study(name, STUDIES), "paper")} != {"explore"}
    assert {table["about"] for table in tables} <= ({"budget", "reach"} if trained else {"text"})


def test_gboards_order_waits_until_doubled_runs_gain_nothing():
    """Of the recipe whose figures were there first nothing is told, and no page says that the order does not hold.

    What is told of the long recipe is told at its rounds; what it can reach waits, since twice the rounds still gain.
    """
    study = load_study("gboard", STUDIES)
    first = {cell.id for cell in cells_of(study, "standard") if cell.labels.get("recipe") != "long recipe"}
    found = {cell: record for cell, record in Store(RESULTS).of(study).items() if cell in first}
    rows = rows_of(study, "standard", found)
    assert {row.labels["model"]: len(row.records) for row in rows if row.records}.keys() == study.axes["model"].keys()
    assert {verdict_on(study, rows, claim, "standard") for claim in study.claims} == {OPEN}
    assert "does not hold" not in page_text(study, found)
    every = Store(RESULTS).of(study)
    rows = rows_of(study, "standard", every)
    told = {claim.says: verdict_on(study, rows, claim, "standard") for claim in study.claims if claim.about == "reach"}
    assert set(told.values()) == {LEARNING}
    assert "the federated CIFG recalls more words than the server-trained one" in told
    page = page_text(study, every)
    assert "does not hold" not in page
    assert "federated CIFG, long recipe, once: twice the rounds gain" in page
    assert "server-trained CIFG, long recipe, once has no run of twice the rounds" in page


def test_a_network_is_compared_with_a_count_model_that_has_fewer_axes_at_its_budget_too():
    study = load_study("gboard", STUDIES)
    rows = rows_of(study, "standard", Store(RESULTS).of(study))
    claim = next(c for c in study.claims if c.about == "budget" and c.than == {"model": "5-gram"})
    found = claims.compare_rows(study, rows, claim)
    assert [c.row.labels["rounds"] for c in found] == ["once", "twice"]
    assert {c.against.labels["model"] for c in found} == {"5-gram"}
    other = claims.Rows(study, replace(claim, than={"model": "server-trained CIFG"}), rows)
    assert other.against(found[1].row) is None  # what has rounds must have every label


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_no_page_calls_the_codes_step_size_printed_or_shows_escaped_code(name):
    study = load_study(name, STUDIES)
    words = " ".join([study.about, *study.notes, *(claim.says for claim in study.claims)])
    assert "printed step size" not in words
    assert "printed SGD" not in words
    assert "\\`" not in page_text(study, Store(RESULTS).of(study))


BLAMES = ("n-gram model wins", "order does not hold", "which no federation can", "which no federation could",
          "no federation can", "not Gboard's order")  # fmt: skip


def test_no_sentence_blames_a_federation_for_a_step_size_or_denies_it_counts():
    """The count model was ahead of undertrained networks; and counts are sums, which a federation can have."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "LOG.md"]  # a log keeps what was thought
    pages += [ROOT / "README.md"]
    pages += [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.mjs"), *(ROOT / "src").rglob("*.html")]
    assert len(pages) > 200
    texts = {page: " ".join(page.read_text("utf-8").split()) for page in pages}
    found = [(page.name, words) for page, text in texts.items() for words in BLAMES if words in text]
    assert found == []


def test_pairs_that_share_a_row_have_fewer_degrees_of_freedom():
    values = [0.1, 0.3, 0.2]
    shared = {frozenset((0, k)): values for k in range(1, 6)}
    apart = {frozenset((2 * k, 2 * k + 1)): values for k in range(5)}
    assert claims.pooled_pairs(apart) == claims.pooled(apart.values())
    assert claims.pooled_pairs(shared).sd == claims.pooled(shared.values()).sd
    assert claims.pooled_pairs(shared).freedom == pytest.approx(4 * 5 / 8 * 2)
    assert claims.pooled_pairs({frozenset((0, 1)): [0.5]}).sd is None


@pytest.mark.parametrize("rows", [[(10, 20, 30)], [(10, 20, 30), (None, None, None), (None, None, None)]])
def test_rows_that_missed_a_target_say_nothing_of_the_spread(rows):
    found = claims.pooled_spread([_Rounds(row) for row in rows], "rounds_to")
    assert found == claims.pooled([[math.log(value) for value in (10, 20, 30)]])


class _Rounds:
    """A row of rounds to a target; None where it was missed after 100."""

    failure = ""

    def __init__(self, values):
        self.values = values

    def logs(self, measure):
        return {seed: math.log(value or 100) for seed, value in enumerate(self.values)}

    def at_least(self, measure):
        return None, None in self.values
