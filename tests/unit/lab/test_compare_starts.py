"""What a start saves: the arithmetic of the fine-tuning report and its words."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from keyfed.lab.experiment.compare_plan import ComparedMethod, resolve
from keyfed.lab.experiment.compare_report import draw_comparison
from keyfed.lab.experiment.method_rows import (
    ComparedRun,
    best_accuracy,
    fine_tuning,
    row_of,
    savings_lines,
    savings_table,
    start_notes,
)

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
