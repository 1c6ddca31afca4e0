"""Curves of a study by local batch and epoch: what a cell keeps of them, and who is drawn."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keyfed.errors import ConfigError
from keyfed.lab.experiment.cell import STRETCHES, stretches, training_curves
from keyfed.lab.experiment.grid import cells_of, load_study, study_from
from keyfed.lab.experiment.page import page_text
from keyfed.lab.experiment.plots import draw_plots, drawn, seed_curves
from keyfed.lab.experiment.table import rows_of

STUDIES = Path(__file__).parents[3] / "studies"


def a_line(losses: list[list[float]], tokens: int = 100) -> dict:
    """A line of curves.jsonl: losses by epoch and batch, accuracies a tenth of them."""
    flat = [loss for epoch in losses for loss in epoch]
    means = [sum(epoch) / len(epoch) for epoch in losses]
    return {
        "batch": {"loss": flat, "accuracy": [x / 10 for x in flat], "tokens": [tokens] * len(flat)},
        "epoch": {
            "loss": means, "accuracy": [x / 10 for x in means], "tokens": [tokens * len(epoch) for epoch in losses]
        },
    }  # fmt: skip


def test_batches_and_epochs_are_counted_on_from_round_to_round():
    kept = training_curves([a_line([[4.0, 3.0], [2.0]]), a_line([[3.0], [1.0]])])
    assert [p[0] for p in kept["batch"]] == [1, 2, 3, 4, 5]
    assert [p[1] for p in kept["batch"]] == [4, 3, 2, 3, 1]
    assert kept["epoch"] == [[1, 3.5, 0.35], [2, 2.0, 0.2], [3, 3.0, 0.3], [4, 1.0, 0.1]]


def test_a_round_of_central_training_is_cut_into_its_epochs():
    kept = training_curves([a_line([[4.0, 2.0, 1.0, 1.0]]), a_line([[1.0, 0.5]])], passes=2)
    assert [p[:2] for p in kept["epoch"]] == [[1, 3.0], [2, 1.0], [3, 1.0], [4, 0.5]]


def test_a_round_without_numbers_leaves_no_point():
    lost = a_line([[4.0, 3.0]])
    lost["batch"]["loss"][0] = None
    lost["epoch"]["loss"][0] = None
    kept = training_curves([lost, a_line([])])
    assert kept == {"batch": [[1, 3.0, 0.3]], "epoch": []}


@pytest.mark.parametrize("count", [1, 2, STRETCHES - 1, STRETCHES, STRETCHES + 1, 997])
def test_stretches_are_few_begin_with_the_first_and_keep_the_mean(count):
    rng = np.random.default_rng(count)
    rows = [(rng.random(), rng.random(), int(rng.integers(1, 99))) for _ in range(count)]
    points = stretches(rows)
    assert len(points) == min(count, STRETCHES)
    assert points[0] == [1, pytest.approx(rows[0][0], rel=1e-4), pytest.approx(rows[0][1], rel=1e-4)]
    ends = [p[0] for p in points]
    assert ends == sorted(set(ends))
    assert ends[-1] == count
    tokens = [sum(r[2] for r in rows[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    for key in (0, 1):
        every = np.average([r[key] for r in rows], weights=[r[2] for r in rows])
        assert np.average([p[key + 1] for p in points], weights=tokens) == pytest.approx(every, rel=1e-4)


def test_seeds_stand_side_by_side_point_by_point_and_cells_without_curves_are_left_out():
    one, two = (
        {"training": {"batch": [[1, 4.0, 0.1], [end, 2.0, accuracy]]}} for end, accuracy in ((10, 0.3), (12, 0.4))
    )
    assert seed_curves([one, {"curve": []}, two], "batch", "train_top1") == {1: [0.1, 0.1], 11: [0.3, 0.4]}
    assert seed_curves([{"curve": []}], "batch", "train_nats") == {}


def result(cell, training) -> dict:
    return {
        "id": cell.id, "seed": cell.seed, "measures": {"nats": 2.0, "top1": 0.3}, "data": "d", "data_sha256": "0",
        "curve": [[1, 2.0, 8.0, 0.3], [2, 1.9, 7.0, 0.3]], "made": dict.fromkeys(("keyfed", "torch", "python"), "1") | {
            "hardware": "CPU"
        }, **({"training": training} if training else {}),
    }  # fmt: skip


def test_the_page_shows_curves_where_cells_have_them_and_stands_without():
    study = load_study("next-character", STUDIES)
    assert study.curves
    kept = training_curves([a_line([[4.0, 3.0], [2.0]]), a_line([[3.0], [1.0]])])
    cells = cells_of(study, "standard", [1])
    fedavg, central = (next(c for c in cells if c.labels["method"] == m) for m in ("FedAvg", "central"))
    old = {fedavg.id: result(fedavg, None)}
    new = {fedavg.id: result(fedavg, kept), central.id: result(central, None)}
    by_round = ["loss", "accuracy"]
    shown = [plot["name"] for plot in drawn(study, rows_of(study, "standard", old))]
    assert [name for name in shown if name.startswith(("batch", "epoch"))] == []
    assert set(by_round) <= set(shown)
    rows = rows_of(study, "standard", new)
    plots = ["batch-loss", "batch-accuracy", "epoch-loss", "epoch-accuracy"]
    assert [plot["name"] for plot in drawn(study, rows)][:4] == plots
    assert set(plots) <= set(draw_plots(replace(study, plots=study.plots[:4]), rows, "standard"))
    for name in plots:
        assert f"img/next-character-{name}.png" in page_text(study, new)
        assert f"img/next-character-{name}.png" not in page_text(study, old)


def test_curves_are_no_part_of_a_cells_identity():
    document = tomllib.loads((STUDIES / "next-character.toml").read_text("utf-8"))
    path = Path("next-character.toml")
    ids = [[c.id for c in cells_of(study_from(document | {"curves": on}, path), "standard")] for on in (True, False)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": "epochs"}, 'x of a plot of curves "epochs" is not known (did you mean epoch?)'),
        ({"measure": "nats"}, 'measure of a plot by batch "nats" is not known'),
        ({"x": "round", "measure": "train_top1"}, 'measure of a plot by round "train_top1" is not known'),
    ],
    ids=["x", "measure by batch", "measure by round"],
)
def test_a_mistake_in_a_plot_is_named(change, says):
    document = tomllib.loads((STUDIES / "next-character.toml").read_text("utf-8"))
    document["plots"] = [document["plots"][0] | change]
    with pytest.raises(ConfigError) as e:
        study_from(document, Path("next-character.toml"))
    assert says in str(e.value)


def test_central_training_is_run_once_for_iid_and_quantity_skew():
    for scale in ("standard", "paper"):
        cells = cells_of(load_study("next-character", STUDIES), scale)
        assert {c.labels["split"] for c in cells if c.labels["method"] == "central"} == {"IID", "roles"}
        assert {c.labels["split"] for c in cells if c.labels["method"] == "FedAvg"} == {"IID", "quantity skew", "roles"}
