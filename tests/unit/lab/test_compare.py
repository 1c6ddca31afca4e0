"""The parts of a comparison that compute: arguments, budget, target, order, who is best, curves, report."""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.config.load import dump_toml
from keyfed.errors import ConfigError
from keyfed.federated.spec import Part
from keyfed.lab.experiment.claims import Comparison, compare_rows
from keyfed.lab.experiment.compare import (
    QUICK,
    ComparedMethod,
    ComparedRun,
    file_settings,
    folder_of,
    parse_seeds,
    parse_target,
    read_variant,
    resolve,
    rounds_within,
)
from keyfed.lab.experiment.grid import cells_of as study_cells
from keyfed.lab.experiment.grid import study_from
from keyfed.lab.experiment.plots import BYTES, ROUNDS, TOKENS, attention_grid, draw_comparison, series_of
from keyfed.lab.experiment.report import (
    comparison_table,
    differing,
    document,
    notes,
    savings_lines,
    savings_table,
    start_notes,
    verdict,
)
from keyfed.lab.experiment.rows import (
    Lead,
    best_accuracy,
    best_of,
    common_target,
    fine_tuning,
    in_order,
    lead_of,
    mean_baselines,
    reach,
    row_of,
)
from keyfed.lab.experiment.store import rows_of
from keyfed.reports.document import Links, to_html, to_markdown
from keyfed.run.console import render_table

# Arguments


def test_settings_reach_every_method_that_has_them_and_own_ones_win():
    plan = resolve(
        ["fedavg", "fedatt:temperature=0.1,lr=0.5", "fedsgd"],
        [("optimiser", "sgd"), ("method.lr", "2"), ("train.cohort", "5"), ("temperature", "0.7")],
    )
    fedavg, fedatt, fedsgd = (entry.config for entry in plan.entries)
    assert fedavg.options == {"optimiser": "sgd", "lr": 2.0}
    assert fedatt.options == {"optimiser": "sgd", "lr": 0.5, "temperature": 0.1}
    assert fedsgd.options == {"lr": 2.0}
    assert {c.train.cohort for c in (fedavg, fedatt, fedsgd)} == {5}
    assert [entry.label for entry in plan.entries] == ["fedavg", "fedatt:temperature=0.1,lr=0.5", "fedsgd"]


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        ([], [], "no method to compare"),
        (["fedavg", "fedat"], [], r'method "fedat" is not known \(did you mean fedatt\?\)'),
        (["fedavg", "fedavg"], [], r'"fedavg" is given twice'),
        (["fedatt:step=1", " fedatt:step=1"], [], "is given twice"),
        (["fedatt:stepp=1"], [], r"fedatt:stepp=1: method\.stepp is not an option.*did you mean step\?"),
        (["fedatt:step=x"], [], "fedatt:step=x: method.step is .*expected a finite number"),
        (["fedatt:step"], [], "expected key=value"),
        (["fedatt:"], [], "expected key=value"),
        (["fedatt:train.cohort=3"], [], r"give it as --set train\.cohort=3"),
        (["fedavg", "fedsgd"], [("temperature", "1")], "method.temperature is an option of none of fedavg, fedsgd"),
        (["fedavg"], [("cohort", "3")], r"did you mean train\.cohort\?"),
        (["fedavg"], [("method.lrr", "3")], r"did you mean lr\?"),
        (["fedavg"], [("trian.cohort", "3")], r"did you mean train\?"),
        (["fedavg", "fedprox"], [("lr", "-1")], r"fedavg: method\.lr is -1"),
        (["fedavg"], [("train.rounds", "0")], "at least 1"),
        (["fedavg"], [("train.central", "true")], "name central as a method"),
        (["fedavg"], [("model.name", "gruu")], "did you mean gru"),
    ],
)
def test_what_makes_no_sense_is_refused(methods, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(methods, settings)


def test_quick_reduces_what_the_user_did_not_set():
    words = resolve(["fedavg"])
    assert (words.entries[0].config.data.max_tokens, words.entries[0].config.train.test_tokens) == (4_000, 100_000)
    characters = resolve(["fedavg"], [("model.name", "char-lstm"), ("train.test_tokens", "none")])
    assert (characters.entries[0].config.data.max_tokens, characters.entries[0].config.train.test_tokens) == (
        20_000,
        None,
    )
    assert characters.quick == {"data.max_tokens": 20_000, "data.window": 50, "train.valid_tokens": 10_000}
    assert "data.max_tokens=20000" in next(iter(characters.lines()))
    full = resolve(["fedavg"], full=True)
    assert full.entries[0].config.data.max_tokens is None
    assert list(full.lines()) == []
    assert {q.key for q in QUICK if q.words is not None} == set(words.quick)


def test_a_file_sets_what_all_share_and_its_method_is_not_compared(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        dump_toml({"method": {"name": "fedatt", "step": 1.5}, "data": {"max_tokens": 70}, "made": {"x": 1}})
    )
    settings = file_settings(path)
    assert settings == [("fedatt:step", 1.5), ("data.max_tokens", 70)]
    plan = resolve(["fedavg", "fedatt", "fedmed"], settings)
    assert [entry.config.options for entry in plan.entries] == [{}, {"step": 1.5}, {}]  # FedMed has a step of its own
    path.write_text('[server]\nlr = 0.1\nname = "adam"\n', "utf-8")
    assert resolve(["fedavg"], file_settings(path)).entries[0].config.server == Part("adam", {"lr": 0.1})
    assert plan.entries[0].config.data.max_tokens == 70
    with pytest.raises(ConfigError, match="expected a TOML file"):
        file_settings(tmp_path / "missing.toml")


def test_seeds():
    assert parse_seeds("3") == (1, 2, 3)
    assert parse_seeds("5, 2") == (5, 2)
    assert parse_seeds("7,") == (7,)
    for wrong in ("", ",", "x", "1,x", "-1", "1.5", "9" * 5000):
        with pytest.raises(ConfigError, match="expected a number of seeds"):
            parse_seeds(wrong)
    for count in ("0", "1001", "9" * 18):  # the last is one who forgot the comma after a seed
        with pytest.raises(ConfigError, match="expected 1 to 1000"):
            parse_seeds(count)
    with pytest.raises(ConfigError, match="names 2 twice"):
        parse_seeds("2,1,2")
    assert resolve(["fedavg"], [("train.seed", "9")]).seeds == (9,)
    with pytest.raises(ConfigError, match="both given"):
        resolve(["fedavg"], [("train.seed", "9")], seeds=[1])


def test_targets():
    assert parse_target("perplexity=200") == 200
    assert parse_target("nats=2") == pytest.approx(math.exp(2))
    for wrong in ("200", "perplexity", "perplexity=", "perplexity=0.5", "nats=-1", "nats=800", "perplexity=nan",
                  "perplexity=inf", "bits=2"):  # fmt: skip
        with pytest.raises(ConfigError, match="--target"):
            parse_target(wrong)


@given(st.lists(st.text(max_size=150), min_size=2, max_size=6, unique=True))
def test_folders_are_safe_and_keep_labels_apart(values):
    names = [folder_of(f"fedatt:step={value}") for value in values]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name.encode()) <= 255
        assert Path(name).name == name
        assert name not in (".", "..")


# Budget and target


def test_tokens_pay_for_rounds():
    assert rounds_within(10, [100, 100, 430, 5_000, 30]) == [10, 10, 2, 1, 33]


def rounds_of(*perplexities: float | None, moved: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "round": at,
            "worked": 50 * at,
            "traffic": {"down": moved, "up": moved // 2, "control": 7},
            "effective_clients": 2.0 + at,
            **({} if value is None else {"valid": {"perplexity": value, "top1": 0.1 * at}}),
            **more,
        }
        for at, value in enumerate(perplexities, 1)
    ]


def test_reaching_a_target():
    records = rounds_of(300.0, None, 200.0, 210.0, math.inf)
    assert (reach(records, 200.0).round, reach(records, 200.0).bytes) == (3, 471)
    assert reach(records, 1000.0).round == 1
    never = reach(records, 199.0)
    assert (never.round, never.bytes, never.modelled_seconds) == (None, 785, None)
    assert reach(rounds_of(3.0, 2.0, modelled_seconds=1.5), 2.0).modelled_seconds == 3.0
    assert reach([], 5.0).round is None


def test_the_default_target_is_what_all_but_fedsgd_reached():
    assert common_target([("fedavg", 10.0), ("fedsgd", 99.0), ("fedatt", 12.0)]) == 12.0
    assert common_target([("fedsgd", 99.0), ("fedavg", None)]) == 99.0
    assert common_target([("fedavg", None)]) is None


# Rows


def cells_of(label: str, *perplexities: float | None, error: str | None = None) -> list[ComparedRun]:
    """One seed for each test perplexity; `error` is one more seed, which failed."""
    entry = resolve([label]).entries[0]
    cells = []
    for seed, value in enumerate(perplexities, 1):
        test = {"perplexity": value, "nats": None if value is None else math.log(value), "top1": 0.1, "top3": 0.2}
        result = {
            "method": entry.config.method, "run": "x", "test": {**test, "tokens": 10}, "unseen": None, "best_round": 2,
            "traffic": {"down": 200, "up": 100}, "tokens_trained": 150, "seconds": 2.0, "clients": 4, "rounds": 20,
        }  # fmt: skip
        records = rounds_of(value and value + 20, value, None)
        cells.append(ComparedRun(entry, seed, Path("out") / entry.folder / f"seed-{seed}", result, records))
    if error is not None:
        cells.append(ComparedRun(entry, len(cells) + 1, Path("out/x"), None, error=error))
    return cells


def summary_of(*methods: list[ComparedRun], target: float | None = None, **changes: Any) -> dict[str, Any]:
    rows = in_order(row_of(cells[0].entry, cells, target) for cells in methods)
    summary = {
        "data": "corpus", "model": "cifg", "characters": False, "budget": "rounds", "rounds": 20, "seeds": [1, 2],
        "target": None if target is None else {"perplexity": target, "nats": math.log(target), "given": True},
        "quick": {}, "baselines": {}, "rows": rows, "best": best_of(rows), "failed": 0, "out": "out", **changes,
    }  # fmt: skip
    return {**summary, "verdict": verdict(summary)}


def test_means_and_spread_over_seeds():
    row = row_of(resolve(["fedavg"]).entries[0], cells_of("fedavg", 100.0, 110.0, 120.0), 110.0)
    assert row["test_mean"]["perplexity"] == pytest.approx(110.0)
    assert row["test_spread"]["perplexity"] == pytest.approx(statistics.stdev([100.0, 110.0, 120.0]))
    assert row["reached"] == 2
    assert row["rounds_to_target"] is None
    assert [seed["rounds_to_target"] for seed in row["seeds"]] == [2, 2, None]
    assert [seed["bytes_to_target"] for seed in row["seeds"]] == [314, 314, None]
    assert row["effective_clients"] == pytest.approx(4.0)
    assert row["test"]["perplexity"] == 100.0  # shaped like the first seed's result
    assert "modelled_seconds_to_target" not in row


def test_rows_are_sorted_and_what_is_not_finite_or_failed_comes_last():
    rows = in_order(
        row_of(cells[0].entry, cells, 100.0)
        for cells in (
            cells_of("fedprox", 50.0, error="broke"),
            cells_of("fedadam", 90.0, None),
            cells_of("fedavg", 100.0, 104.0),
            cells_of("fedatt", 80.0, 81.0),
            cells_of("fedmed", error="broke at once"),
        )
    )
    assert [row["label"] for row in rows] == ["fedatt", "fedavg", "fedadam", "fedprox", "fedmed"]
    assert len({tuple(row) for row in rows}) == 1
    assert rows[2]["test_mean"]["perplexity"] is None
    table = comparison_table(summary_of(*(cells_of(m, error="broke") for m in ("fedmed", "fedatt"))))
    assert table[1][1] == "failed"


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        ((100.0, 102.0), (110.0, 112.0), "fedavg"),
        ((100.0, 102.0), (103.0, 101.0), None),  # one seed each way
        ((100.0, 102.0), (90.0, 120.0), None),  # the second's spread counts as well
        ((100.0,), (200.0,), None),  # one seed cannot tell
        ((100.0, 100.0), (100.0, 100.0), None),
        ((100.0, 102.0), (None, 110.0), None),  # nobody to compare with
    ],
)
def test_the_best_is_marked_only_where_seeds_can_tell(first, second, best):
    summary = summary_of(cells_of("fedavg", *first), cells_of("fedatt", *second), seeds=list(range(len(first))))
    assert summary["best"] == best
    assert any("(best)" in row[0] for row in comparison_table(summary)) == (best is not None)
    if best is None and None not in second:
        assert "cannot tell" in summary["verdict"]
    elif best is not None:
        assert summary["verdict"].endswith("is 9.9 % higher (8.7 % to 11.2 % at 95 % confidence): fedavg is better.")


def test_a_comparison_and_a_study_have_one_rule_of_what_is_better():
    """The same perplexities as a claim of a study: the same interval, and the same verdict, at the limit too."""
    first, third = (100.0, 102.0, 101.0), (150.0, 158.0, 149.0)
    verdicts = []
    for factor in (1.02, 1.05, 1.06, 1.07, 1.08, 1.2):
        second = tuple(factor * value for value in first)
        summary = summary_of(*(cells_of(m, *v) for m, v in (("fedavg", first), ("fedatt", second), ("fedprox", third))))
        lead = lead_of(summary["rows"])
        claim = judged_claim({"a": first, "b": second, "c": third})
        assert lead.change == pytest.approx(-claim.change, abs=1e-12)
        assert lead.margin == pytest.approx(claim.margin, abs=1e-12)
        assert (summary["best"] == "fedavg") == (claim.verdict == "holds")
        verdicts.append(claim.verdict)
    assert verdicts == sorted(verdicts)  # "cannot be told" up to the limit, "holds" from there on
    assert len(set(verdicts)) == 2


def judged_claim(perplexities: dict[str, tuple[float, ...]]) -> Comparison:
    """The claim of a study that a is lower than b, on rows with these values."""
    axis = {label: {"train": {"rounds": place}} for place, label in enumerate(perplexities, 1)}
    study = study_from(
        {
            "title": "t", "paper": "p", "about": "a", "measures": ["perplexity"], "axis": {"method": axis},
            "grid": [{"method": list(axis)}], "scale": {"standard": {"seeds": [1, 2, 3], "why": "w"}},
            "claims": [
                {"says": "s", "kind": "lower", "of": {"method": "a"}, "than": {"method": other}} for other in ("b", "c")
            ],
        },
        Path("s.toml"),
    )  # fmt: skip
    found = {
        cell.id: {"id": cell.id, "seed": cell.seed, "measures": {"perplexity": values[cell.seed - 1]}}
        for cell in study_cells(study, "standard")
        if (values := perplexities[cell.labels["method"]])
    }
    (comparison,) = compare_rows(study, rows_of(study, "standard", found), study.claims[0])
    return comparison


def test_a_method_that_learnt_is_better_than_one_that_did_not():
    """No other method learnt, so the pair itself says what seeds differ by."""
    cells = cells_of("fedavg", 100.0, 101.0, 102.0), cells_of("fedsgd", 9_000.0, 9_100.0, 8_900.0)
    for cell in (*cells[0], *cells[1]):
        cell.result["vocabulary"] = 8_000
    summary = summary_of(*cells)
    assert lead_of(summary["rows"]).margin is not None
    assert summary["best"] == "fedavg"


def test_methods_that_learnt_nothing_do_not_widen_the_spread():
    good = cells_of("fedavg", 100.0, 102.0), cells_of("fedatt", 110.0, 112.0)
    wild = cells_of("fedsgd", 9_000.0, 30_000.0)
    for cell in (*good[0], *good[1], *wild):
        cell.result["vocabulary"] = 10_000
    assert lead_of(summary_of(*good, wild)["rows"]) == lead_of(summary_of(*good)["rows"])
    for cell in wild:
        cell.result["vocabulary"] = 100_000  # with which it has learnt
    assert summary_of(*good, wild)["best"] is None


def test_a_method_of_which_a_seed_failed_is_not_the_best():
    summary = summary_of(cells_of("fedavg", 10.0, 10.1, error="a worker died"), cells_of("fedatt", 100.0, 101.0, 102.0))
    assert summary["best"] is None
    assert comparison_table(summary)[2][1].endswith("(2 of 3 seeds)")
    assert "Failed: fedavg, seed 3: a worker died" in list(notes(summary))


def test_nothing_finite():
    assert "No method has a finite" in summary_of(cells_of("fedavg", None, None))["verdict"]
    assert "no other method" in summary_of(cells_of("fedavg", 5.0, 6.0))["verdict"]


@pytest.mark.parametrize(
    ("unigram", "kneser_ney", "first"),
    [
        (60.0, 50.0, "No method beats plain word frequencies (unigram, 60.00). "),
        (400.0, 90.0, "No method beats counts of word sequences (Kneser–Ney-5, 90.00). "),
        (400.0, 150.0, ""),
    ],
)
def test_that_nothing_beats_the_counts_is_said_before_a_winner_is_named(unigram, kneser_ney, first):
    scores = {"unigram": {"test": {"perplexity": unigram}}, "kneser_ney": {"test": {"perplexity": kneser_ney}}}
    scores["kneser_ney"]["order"] = 5
    for methods in ([cells_of("fedavg", 100.0, 102.0), cells_of("fedatt", 130.0, 130.0)], [cells_of("fedavg", 100.0)]):
        assert summary_of(*methods, baselines=scores)["verdict"].startswith(f"{first}fedavg has ")


def test_the_table_says_what_was_not_reached_and_shows_the_references():
    score = {"perplexity": 60.0, "nats": math.log(60), "top1": 0.3, "top3": 0.4}
    baselines = mean_baselines([{"unigram": {"test": score, "unseen": None}}] * 2)
    summary = summary_of(
        cells_of("fedavg", 100.0, 102.0), cells_of("fedatt", 130.0, 130.0), cells_of("central", 90.0, 90.0),
        target=105.0, baselines=baselines, characters=True,
    )  # fmt: skip
    table = [dict(zip(comparison_table(summary)[0], row, strict=True)) for row in comparison_table(summary)[1:]]
    assert [row["method"] for row in table] == ["central (best)", "fedavg", "fedatt", "unigram (reference)"]
    assert table[0]["bytes to target"] == table[0]["effective clients"] == "–"
    assert table[1]["rounds to target"] == "2"
    assert table[1]["bytes to target"] == "314 B"
    assert table[1]["nats"] == "4.615 ± 0.014"
    assert table[2]["rounds to target"] == "not reached"
    assert table[2]["bytes to target"] == "not reached (300 B)"
    assert table[3]["test perplexity"] == "60.00 ± 0.00"


def test_a_private_comparison_shows_epsilon_and_what_it_is_worth():
    private, plain = cells_of("fedavg", 90.0, 92.0), cells_of("fedatt", 80.0, 81.0)
    assert "ε" not in comparison_table(summary_of(private, plain))[0]
    worth = {"verdict": "SIMULATED", "statement": ["SIMULATED guarantee for a population of 9."]}
    told = [{"pld": 1.25, **worth}, {"pld": 1.5, **worth}]
    private = [
        replace(cell, result={**cell.result, "privacy": account}) for cell, account in zip(private, told, strict=True)
    ]
    summary = summary_of(private, plain)
    table = comparison_table(summary)
    column = table[0].index("ε")
    assert {row[0]: row[column] for row in table[1:]} == {"fedavg": "1.5, SIMULATED", "fedatt (best)": "NONE"}
    assert all(len(row) == len(table[0]) for row in table)
    lines = list(notes(summary))
    assert sum(line == "SIMULATED guarantee for a population of 9." for line in lines) == 1
    assert any("adds up" in line for line in lines)


def test_in_a_terminal_labels_are_not_cut_and_numbers_not_broken():
    label = "fedatt:temperature=0.1,step=1.0,norm=frobenius,bound=3.0"
    columns = [f"column number {k}" for k in range(7)]
    text = render_table([["method", *columns], [label, *["1,234.5±67.8"] * 7]], narrow=True)
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("1,234.5±67.8") == 7
    first_column = "".join(line.split()[0] for line in text.splitlines() if line[:2].strip())
    assert label in first_column


# Curves and report


def test_a_curve_is_the_mean_of_seeds_between_the_lowest_and_the_highest():
    runs = [rounds_of(10.0, None, 6.0, moved=1_000_000), rounds_of(12.0, None, math.inf, moved=2_000_000)]
    curve = series_of("x", 0, runs, ROUNDS, "perplexity")
    assert (curve.points, curve.means, curve.lost) == ({1: [10, 12], 3: [6]}, [11, 6], 1)
    assert list(series_of("x", 0, runs[:1], TOKENS, "perplexity").points) == [50, 300]
    assert list(series_of("x", 0, runs, BYTES, "perplexity").points) == pytest.approx([2.250007, 4.500014], abs=1e-4)


def test_attention_is_a_grid_of_clients_and_rounds():
    records = [
        {"round": 1, "attention": {"b": {"in": 0.4, "out": 0.5}, "a": {"in": 0.6, "out": 0.5}}},
        {"round": 2},
        {"round": 3, "attention": {"a": {"in": 1.0, "out": 1.0}}},
    ]
    rounds, layers = attention_grid(records)
    assert rounds == [1, 2, 3]
    assert list(layers) == ["in", "out"]
    assert [[None if math.isnan(w) else w for w in row] for row in layers["in"]] == [
        [0.4, None, None],
        [0.6, None, 1.0],
    ]


def test_plots_and_report_of_many_methods_hide_nobody_and_name_no_client():
    labels = ["fedavg", "fedsgd", "central", *(f"fedatt:temperature={t}" for t in range(1, 10))]
    many = [cells_of(label, 100.0 + k, 101.0 + 2 * k) for k, label in enumerate(labels)]
    attention = {"attention": {"Ann $x_": {"out": 0.3}, "Bob": {"out": 0.7}}}
    many[3][0] = ComparedRun(many[3][0].entry, 1, Path("x"), many[3][0].result, [{"round": 1, **attention}])
    summary = summary_of(*many, target=104.0)
    cells = [cell for runs in many for cell in runs]
    plots = draw_comparison(summary, cells)
    assert [plot.name for plot in plots] == [
        "perplexity-rounds", "perplexity-tokens", "perplexity-bytes", "accuracy-rounds",
        "attention-fedatt-temperature=1",
    ]  # fmt: skip
    assert all(plot.light != plot.dark and plot.light.startswith(b"\x89PNG") for plot in plots)
    assert all(label in plots[0].alt for label in labels)
    assert "central" not in plots[2].alt
    blocks = document(summary, cells)
    markdown, page = to_markdown(blocks), to_html(blocks)
    assert "Ann $" not in markdown + page
    assert all(label in page for label in labels)
    links = next(block for block in blocks if isinstance(block, Links))
    assert ("fedsgd, seed 2", "fedsgd/seed-2/") in links.items
    assert "| fedatt:temperature=2 | 20 | step=1.2, temperature=2.0, norm=spectral, bound=none, lr=0.003 |" in markdown


def test_what_differs_names_parts_and_compression():
    entries = resolve(["fedprox", "fedprox:server.name=adam,server.lr=0.1", "fedprox:upload.keep=0.1"]).entries
    plain, parts, packed = (row[2] for row in differing(entries))
    assert plain == "none"
    assert "server.name=adam, server.lr=0.1" in parts
    assert packed == "upload.keep=0.1"


def test_a_report_of_failures_alone_can_be_written(monkeypatch):
    cells = cells_of("fedavg", error="x <b>")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        "keyfed.lab.experiment.report.draw_comparison", lambda *_: importlib.import_module("matplotlib")
    )
    text = to_markdown(document(summary_of(cells), cells))
    assert "matplotlib is not installed" in text
    assert "Failed: fedavg, seed 1: x" in text


LABELS = ["fedadam", "fedadam+init", "fedadam+vectors"]
SETTINGS = [("train.init", "/runs/public"), ("vectors.file", "/v/glove.txt"), ("train.rounds", "4")]


def entries(*labels: str) -> dict[str, ComparedMethod]:
    plan = resolve(labels, SETTINGS if len(labels) == 3 else [s for s in SETTINGS if "init" not in s[0]])
    return {entry.label: entry for entry in plan.entries}


def cell(
    entry: ComparedMethod, seed: int, *accuracies: float | None, moved: int = 100, perplexity: float = 50.0
) -> ComparedRun:
    """A run whose rounds have these validation accuracies and move `moved` bytes down, half of it up, 1 control."""
    records: list[dict[str, Any]] = [
        {
            "round": at,
            "traffic": {"down": moved, "up": moved // 2, "control": 1},
            **({} if value is None else {"valid": {"top1": value, "perplexity": 100.0 / (1 + value)}}),
        }
        for at, value in enumerate(accuracies, 1)
    ]
    test = {"perplexity": perplexity, "nats": 1.0, "top1": 0.25, "top3": 0.4, "tokens": 9}
    result = {
        "method": entry.config.method, "test": test, "unseen": None, "best_round": 1, "tokens_trained": 5,
        "traffic": {"down": 1, "up": 1}, "seconds": 1.0, "start": {"from": "random"},
    }  # fmt: skip
    return ComparedRun(entry, seed, Path("out") / entry.folder, result, records)


def test_the_best_accuracy_is_the_highest_and_its_round_the_first():
    run = cell(entries(*LABELS)["fedadam"], 1, 0.1, None, 0.3, 0.3)
    assert best_accuracy(run.records) == (0.3, 3)
    assert best_accuracy([{"round": 1}]) is None


def test_rounds_and_bytes_saved_by_seed_and_over_seeds():
    made = entries(*LABELS)
    plain, variant = made["fedadam"], made["fedadam+vectors"]
    cells = [
        cell(plain, 1, 0.1, 0.2, 0.30, 0.25, perplexity=60.0),
        cell(variant, 1, 0.31, 0.4, 0.4, 0.4, moved=80),  # two rounds earlier
        cell(plain, 2, 0.1, 0.2, 0.2, 0.1, perplexity=64.0),
        cell(variant, 2, 0.1, 0.1, 0.1, 0.2, moved=80),  # exactly as good, two rounds later
    ]
    (one,) = fine_tuning(cells)
    assert (one["variant"], one["plain"], one["rounds"], one["reached"], one["compared"]) == (
        "fedadam+vectors", "fedadam", 4, 2, 2,
    )  # fmt: skip
    first, second = one["seeds"]
    assert (first["best_top1"], first["best_round"], first["reached_round"]) == (0.30, 3, 1)
    assert (first["rounds_saved"], first["bytes_saved"]) == (2, 3 * 151 - 121)
    assert (second["best_top1"], second["best_round"], second["reached_round"]) == (0.2, 2, 4)
    assert (second["rounds_saved"], second["bytes_saved"]) == (-2, 2 * 151 - 4 * 121)
    assert (first["plain_perplexity"], first["perplexity"]) == (60.0, 50.0)
    assert one["mean"]["rounds_saved"] == 0
    assert one["spread"]["rounds_saved"] == pytest.approx(statistics.stdev([2, -2]))
    assert one["mean"]["bytes_saved"] == pytest.approx((332 - 182) / 2)
    table = savings_table([one])
    assert table[1][:7] == ["fedadam+vectors", "1", "30.00 %", "3", "1", "2", "332 B"]
    assert table[2][5:8] == ["-2", "-182 B", "64.00 → 50.00"]
    assert table[3][1:7] == ["mean", "25.00 % ± 7.07", "2.5 ± 0.7", "2.5 ± 2.1", "0.0 ± 2.8", "75 B ± 363 B"]
    (line,) = savings_lines([one])
    assert "saved 0.0 ± 2.8 rounds and 75 B ± 363 B." in line


def test_a_variant_that_is_slower_says_so():
    made = entries(*LABELS)
    cells = [cell(made["fedadam"], 1, 0.3, 0.2), cell(made["fedadam+init"], 1, 0.1, 0.2, 0.3)]
    (one,) = fine_tuning(cells)
    assert one["seeds"][0]["rounds_saved"] == -2
    (line,) = savings_lines([one])
    assert line.endswith("saved -2 rounds and -302 B, that is, it took more.")
    assert [row[1] for row in savings_table([one])] == ["seed", "1"]  # one seed has no mean


def test_what_is_not_reached_is_said_and_makes_no_mean():
    made = entries(*LABELS)
    plain, variant = made["fedadam"], made["fedadam+init"]
    seeds = [cell(plain, 1, 0.1, 0.3), cell(variant, 1, 0.2, 0.29), cell(plain, 2, 0.1, 0.2), cell(variant, 2, 0.2)]
    (one,) = fine_tuning(seeds[:2])
    assert one["seeds"][0]["reached_round"] is one["seeds"][0]["rounds_saved"] is one["seeds"][0]["bytes_saved"] is None
    assert savings_table([one])[1][4:7] == ["not reached in 4 rounds", "–", "–"]
    assert "fedadam+init never reached it within 4 rounds" in next(iter(savings_lines([one])))
    (one,) = fine_tuning(seeds)
    assert (one["reached"], one["mean"]["rounds_saved"]) == (1, None)
    assert savings_table([one])[3][4:7] == ["1 of 2 seeds", "–", "–"]
    assert "reached it in 1 of 2 seeds within 4 rounds" in next(iter(savings_lines([one])))


def test_a_failed_seed_is_left_out_of_the_mean():
    made = entries(*LABELS)
    plain, variant = made["fedadam"], made["fedadam+init"]
    failed = ComparedRun(variant, 2, Path("x"), None, error="no memory")
    (one,) = fine_tuning([cell(plain, 1, 0.1, 0.3), cell(variant, 1, 0.3), cell(plain, 2, 0.2), failed])
    assert (one["compared"], one["mean"]["rounds_saved"], one["spread"]["rounds_saved"]) == (1, 1, None)
    assert savings_table([one])[2][1:4] == ["2", "failed", "–"]
    (none,) = fine_tuning([cell(plain, 1, None), cell(variant, 1, None)])
    assert "no validation accuracy" in next(iter(savings_lines([none])))
    assert savings_table([none])[1][2:5] == ["–", "–", "–"]


def test_without_its_random_start_a_variant_has_no_report_but_a_note():
    made = entries("fedadam+vectors")
    cells = [cell(made["fedadam+vectors"], 1, 0.3)]
    assert fine_tuning(cells) == []
    (note,) = start_notes([row_of(cells[0].entry, cells, None)])
    assert note.endswith("compare fedadam too to see what it saves.")


def test_central_training_saves_rounds_and_no_bytes():
    plan = resolve(["central", "central+vectors"], [s for s in SETTINGS if s[0] == "vectors.file"])
    plain, variant = plan.entries
    (one,) = fine_tuning([cell(plain, 1, 0.1, 0.2), cell(variant, 1, 0.2, 0.2)])
    assert (one["mean"]["rounds_saved"], one["mean"]["bytes_saved"]) == (1, None)
    assert next(iter(savings_lines([one]))).endswith("saved 1 rounds.")


def test_the_learning_curves_of_all_variants_are_one_plot():
    made = entries(*LABELS)
    cells = [cell(entry, seed, 0.1, 0.1 + 0.1 * seed) for entry in made.values() for seed in (1, 2)]
    summary = {"baselines": {}, "target": None, "fine_tuning": fine_tuning(cells)}
    plots = {plot.name: plot for plot in draw_comparison(summary, cells)}
    assert all(label in plots["accuracy-rounds"].alt for label in LABELS)


GIVEN = [("train.init", "/runs/public"), ("vectors.file", "/v/glove.txt"), ("vectors.dim", "96")]


@pytest.mark.parametrize(
    ("text", "label", "plain"),
    [
        ("fedadam", "fedadam", "fedadam"),
        ("fedadam+vectors", "fedadam+vectors", "fedadam"),
        ("fedadam+vectors+init", "fedadam+init+vectors", "fedadam"),
        ("fedadam + init", "fedadam+init", "fedadam"),
        (
            "fedatt+init:step=1e+0,temperature=2",
            "fedatt+init:step=1e+0,temperature=2",
            "fedatt:step=1e+0,temperature=2",
        ),
    ],
)
def test_a_variant_has_its_starts_in_one_order_and_a_plain_method(text, label, plain):
    variant = read_variant(text)
    assert (variant.label, variant.plain) == (label, plain)
    assert read_variant(label) == variant


def test_a_folder_is_called_as_its_variant_in_full():
    assert folder_of("fedadam+init+vectors") == "fedadam+init+vectors"
    assert folder_of("fedatt+init:step=1") == "fedatt+init-step=1"


def test_each_variant_keeps_its_own_start_and_nothing_else_differs():
    labels = ["fedadam", "fedadam+vectors", "fedadam+init", "fedadam+vectors+init"]
    settings = [*GIVEN, ("train.unmatched", "mean"), ("train.frozen_rounds", "3"), ("train.cohort", "7"), ("lr", "0.5")]
    plan = resolve(labels, settings)
    configs = [entry.config for entry in plan.entries]
    assert [entry.label for entry in plan.entries] == [*labels[:3], "fedadam+init+vectors"]
    assert {entry.plain for entry in plan.entries} == {"fedadam"}
    assert [c.vectors.file for c in configs] == [None, "/v/glove.txt", None, "/v/glove.txt"]
    assert [c.vectors.dim for c in configs] == [None, 96, None, 96]
    assert [c.train.init for c in configs] == [None, None, "/runs/public", "/runs/public"]
    assert [c.train.unmatched for c in configs] == ["uniform", "uniform", "mean", "mean"]
    assert [c.train.frozen_rounds for c in configs] == [0, 3, 3, 3]
    assert {c.train.cohort for c in configs} == {7}
    assert all(c.options == configs[0].options for c in configs)
    assert "frozen: train.frozen_rounds=3 is for what has a start, not for fedadam" in plan.lines()
    told = {row[0]: row[2] for row in differing(plan.entries)}
    assert told["fedadam"] == "none"
    assert told["fedadam+vectors"] == "vectors.file=/v/glove.txt, vectors.dim=96, train.frozen_rounds=3"


def test_without_any_start_frozen_rounds_are_for_all_as_in_training():
    plan = resolve(["fedavg", "fedprox"], [("train.frozen_rounds", "3")])
    assert [entry.config.train.frozen_rounds for entry in plan.entries] == [3, 3]
    assert not any(line.startswith("frozen") for line in plan.lines())


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["fedadam+vector"], GIVEN, r'"\+vector" is no start \(did you mean vectors\?\); expected \+init or \+vectors'),
        (["fedadam+int"], GIVEN, r"did you mean init\?"),
        (["fedadam+"], GIVEN, r"expected \+init or \+vectors"),
        (["fedavgg+init"], GIVEN, r'method "fedavgg" is not known \(did you mean fedavg\?\)'),
        (["fedadam+init+init"], GIVEN, r"names the start \+init twice"),
        (["fedadam:lr=1+vectors"], GIVEN, r"write fedadam\+vectors:lr=1"),
        (["fedadam+vectors+init", "fedadam+init+vectors"], GIVEN, "given twice"),
        (["fedadam", "fedadam+vectors"], [], r"fedadam\+vectors starts from word vectors.*add --vectors FILE"),
        (["fedadam+init"], GIVEN[1:], r"fedadam\+init starts from another run's weights.*add --init RUN"),
        (["fedadam", "fedadam+init"], GIVEN, r"vectors\.file, vectors\.dim is set \(--vectors FILE\), but no compared"),
        (["fedadam"], GIVEN[:1], r"train\.init is set \(--init RUN\), but no compared.*: fedadam\+init"),
        (["fedadam"], [("train.unmatched", "mean")], r"train\.unmatched is set"),
        (["fedadam"], [("vectors.dim", "50")], r"vectors\.dim is set"),
        (["fedadam+vectors"], [*GIVEN[1:], ("vectors.remove", "3")], r"fedadam\+vectors: vectors\.remove is 3"),
    ],
)
def test_starts_that_make_no_sense_are_refused(methods, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(methods, settings)


@pytest.mark.parametrize(
    ("lead", "said"),
    [
        (Lead(0.1, 0.05), "10.5 % higher (5.1 % to 16.2 % at 95 % confidence)"),
        (Lead(0.1, None), "10.5 % higher"),
        (Lead(0.1, 800.0), "10.5 % higher (-100.0 % to more than 10,000 % at 95 % confidence)"),
        (Lead(800.0, 0.1), "more than 10,000 % higher"),  # it diverged: the others' spread says nothing of it
    ],
)
def test_a_method_that_diverged_is_far_behind_and_has_no_interval(lead, said):
    assert lead.in_words == said
