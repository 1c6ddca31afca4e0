"""Verdicts of studies: nothing random, own seeds, lower bounds, limits, and the sum in words."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from keyfed.errors import ConfigError
from keyfed.lab.experiment.claims import (
    ABSENT,
    FAILS,
    HOLDS,
    RULE,
    UNSURE,
    compare_rows,
    judge,
    verdict_on,
)
from keyfed.lab.experiment.grid import cells_of, load_study, study_from
from keyfed.lab.experiment.page import LEFT_OUT, MORE_SEEDS, numbers, page_text, result_table
from keyfed.lab.experiment.statistics import Spread, joint_margin, pooled_spread, quantile, spreads_of
from keyfed.lab.experiment.table import OPEN, counted, rows_of, write_printed, write_row

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
    assert joint_margin((spread, 2), (fixed, 1)) == pytest.approx(spread.margin(2))
    assert joint_margin((fixed, 1), (fixed, 1)) == 0


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
    assert ("| 8 | \\> 50 | \\< -84.0 % |" in page) == ((fedatt, fedavg) == (8, None))


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
        reach = found.margin
        assert found.limits == pytest.approx((reach - math.log(1.05), math.log(1.05) - reach))
    assert compared(study, pair([101.0], [100.0]))[0].verdict == UNSURE
    assert compared(study, pair([101.0], [100.0]))[0].limits is None


def test_a_cost_is_told_from_its_bound_on():
    study = study_of('kind = "costs"\nbound = 0.0193')
    for fedatt, verdict in (([101.0, 101.01], HOLDS), ([101.9, 102.0], UNSURE), ([112.5, 112.6], FAILS)):
        found = compared(study, pair(fedatt, [100.0, 100.01]))[0]
        assert found.verdict == verdict
        assert sum(found.limits) == pytest.approx(2 * math.log(1.0193))
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
    assert "| holds between | does not hold beyond |" in page
    assert "| -4.6 % | -4.8 % to +5.0 % | -4.8 % to +5.0 % | holds |" in page
    for record in found.values():
        record["shuffles"] = {"count": 20, "sd": 1.0, "lowest": 90.0, "highest": 99.0}
    assert "Tolerance 5 % and two standard deviations of one evaluation." in page_text(study, found)
    lower = study_of()
    both = page_text(lower, results_of(lower, pair([80.0, 90.0], [100.0, 100.0])))
    limits = compared(lower, pair([80.0, 90.0], [100.0, 100.0]))[0].limits
    assert limits[0] == -limits[1]
    assert f"{100 * math.expm1(limits[0]):+.1f} % to {100 * math.expm1(limits[1]):+.1f} %" in both
    assert "The tolerance is 5 %" in " ".join(RULE)


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
    assert joint_margin((tight, 2), (wide, 2)) == pytest.approx(4.303 * 0.0293 / math.sqrt(2), rel=0.01)
    alike = Spread(0.02, 3)
    apart = joint_margin((alike, 2), (Spread(0.02, 3), 2))
    assert apart == pytest.approx(2.447 * 0.02, rel=1e-3)  # two pools of three degrees each: six
    assert joint_margin((alike, 2), (alike, 2), one_pool=True) == pytest.approx(3.182 * 0.02, rel=1e-3)


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
    assert "100.5 ± 0.7 against 99.50 ± 0.71" in numbers([found], study.claims[0])
    lone = compared(study, pair([100.0, 101.0, 130.0], [99.0]))[0]
    assert lone.ours == pytest.approx(331 / 3)  # one seed in common is too few to be a mean


def test_seeds_that_agree_at_validations_may_differ_between_them():
    study = study_of('kind = "lower"\nmeasure = "rounds_to_90"')
    for every, verdict in ((1, HOLDS), (20, UNSURE)):
        settings = {"train.eval_every": every}
        found = compared(study, pair([40, 40], [60, 60]), "rounds_to_90", rounds=100, settings=settings)[0]
        step = every / math.sqrt(12)
        assert found.verdict == verdict
        assert found.margin == pytest.approx(4.3027 * math.hypot(step / 40, step / 60) / math.sqrt(2), rel=1e-4)
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
