"""Cells of studies: their configuration and pinned defaults, their runs, what is kept of curves, how they go on."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from keyfed.config.load import (
    PARTS,
    SECTIONS,
    DataConfig,
    PrivacyConfig,
    TrainConfig,
    VectorsConfig,
    method_spec,
    set_value,
)
from keyfed.errors import ConfigError, RunError
from keyfed.federated.components import KINDS, part_options
from keyfed.federated.methods import METHODS, build_method, method_options
from keyfed.lab.experiment import cell as studies_cells
from keyfed.lab.experiment.cell import (
    Workspace,
    config_of,
    options_of,
    pinned,
    run_cell,
)
from keyfed.lab.experiment.grid import BLANKS, Cell, cells_of, load_study, study_from, study_names, with_settings
from keyfed.lab.experiment.page import facts, page_text
from keyfed.lab.experiment.plots import draw_plots, drawn, seed_curves, terms_of
from keyfed.lab.experiment.runner import run_study
from keyfed.lab.experiment.store import Row, Store, counted, rows_of
from keyfed.lab.papers import train_faithfully
from keyfed.model.language_model import preset
from keyfed.reports.finished import Personalisation, personalise_run
from keyfed.run.base import load_base
from keyfed.run.console import Silent
from keyfed.run.folder import read_metrics, read_result, read_run_toml
from keyfed.run.loop import train
from keyfed.run.metrics_line import STRETCHES, stretches, training_curves
from keyfed.run.prepare import client_tokens, prepare
from tests.listeners import Heard

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"


def small(folder: Path, name: str = "text.txt") -> dict[str, object]:
    """Settings of a run of one round on a small text."""
    if not (folder / name).exists():
        (folder / name).write_text(f"one two three four five {Path(name).stem} seven\n" * 60)
    return {"data.name": str(folder / name), "data.clients": 2, "model.name": "gru", "model.embed": 4,
            "model.hidden": 4, "train.rounds": 1, "train.cohort": 2}  # fmt: skip


class WaitingListener(Silent):
    def wait(self, why: str) -> None:
        raise AssertionError(why)


@pytest.fixture
def prepared(monkeypatch):
    """Names of the corpora that were prepared."""
    names = []
    prepare = studies_cells.prepare
    monkeypatch.setattr(studies_cells, "prepare", lambda c: names.append(Path(c.data.name).name) or prepare(c))
    return names


def test_a_first_run_that_is_finished_is_not_prepared_again(tmp_path, prepared):
    settings, workspace = small(tmp_path), Workspace(tmp_path / "work", "cpu")
    folder = studies_cells._first_run(settings, 1, workspace, WaitingListener())
    assert prepared == ["text.txt"]
    assert studies_cells._first_run(settings, 1, workspace, WaitingListener()) == folder
    assert prepared == ["text.txt"]
    assert studies_cells._first_run(settings, 2, workspace, WaitingListener()) != folder
    assert prepared == ["text.txt"] * 2


def test_a_first_run_with_another_configuration_is_refused_unprepared(tmp_path, prepared):
    settings, workspace = small(tmp_path), Workspace(tmp_path / "work", "cpu")
    folder = studies_cells._first_run(settings, 1, workspace, WaitingListener())
    text = (folder / "run.toml").read_text("utf-8")
    assert text.count("rounds = 1\n") == 1
    (folder / "run.toml").write_text(text.replace("rounds = 1\n", "rounds = 2\n"), "utf-8")
    with pytest.raises(RunError, match=r"was started with another configuration: .*rounds"):
        studies_cells._first_run(settings, 1, workspace, WaitingListener())
    assert len(prepared) == 1


PASSES = {"method.name": "central", "participation.fraction": 1.0, "train.rounds": 3, "train.seed": 1}


def test_pretraining_passes_over_all_text_and_serves_every_seed(tmp_path, prepared):
    """A round of central training with all clients is one pass; `first.train.seed` makes one run for all seeds."""
    own = {**small(tmp_path), **PASSES, "data.batches": "sentences"}
    settings = {**small(tmp_path, "other.txt"), **{f"first.{key}": value for key, value in own.items()}}
    workspace = Workspace(tmp_path / "work", "cpu")
    records = [
        run_cell(Cell("s", "train", {}, settings, seed, "smoke"), workspace, (), WaitingListener()) for seed in (1, 2)
    ]
    (kept,) = (workspace.work / "first").iterdir()
    text = client_tokens(prepare(config_of(own, 1, workspace))).sum()
    assert [r["worked"] for r in read_metrics(kept)] == [text] * 3
    assert {r["first_tokens_trained"] for r in records} == {3 * text}
    assert {r["first_best_round"] for r in records} == {read_result(kept)["best_round"]}
    assert records[0]["measures"] != records[1]["measures"]
    told = dict(facts([Row({}, "train", (), tuple(records))]))
    chosen = read_result(kept)["best_round"]
    assert told[f"pretraining on {own['data.name']}"] == f"{int(3 * text):,} tokens; round {chosen} of 3 chosen"


@pytest.mark.parametrize("name", ["pretraining-fig1", "pretraining-fig3", "pretraining-future"])
def test_pretrainings_rounds_are_passes_over_the_whole_text(name):
    """The paper fits a Keras model for 50 epochs; a round of ten clients' text is none of them."""
    study = load_study(name, STUDIES)
    cells = [(scale, c.settings) for scale in ("standard", "paper") for c in cells_of(study, scale)]
    central = [(scale, s) for scale, s in cells if s.get("first.method.name") == "central"]
    assert central
    assert {s["first.participation.fraction"] for _, s in central} == {1.0}
    if name != "pretraining-future":
        paper = {(s["first.train.rounds"], s.get("first.train.choose")) for scale, s in central if scale == "paper"}
        assert paper == {(50, "last")}


def test_a_cell_keeps_the_mean_of_its_late_validations_and_its_start(tmp_path, monkeypatch):
    settings = {**small(tmp_path), "train.rounds": 4, "train.eval_every": 2, "train.eval_start": True}
    monkeypatch.setattr(studies_cells, "LATE", 2)
    workspace, records = Workspace(tmp_path / "work", "cpu"), []
    train = studies_cells.train_cell
    monkeypatch.setattr(studies_cells, "train_cell", lambda *given: records.append(train(*given)) or records[-1])
    found = run_cell(Cell("s", "train", {}, settings, 1, "smoke"), workspace, (), WaitingListener())
    result, rounds = records[0]
    assert [point[0] for point in found["curve"]] == [0, 2, 4]
    assert found["curve"][0][1:] == [
        None,
        *(float(f"{result['start']['valid'][k]:.5g}") for k in ("perplexity", "top1")),
    ]
    for key in ("top1", "top1_words"):
        assert found["measures"][f"late_{key}"] == rounds[3]["valid"][key]  # of rounds 3 and 4 the last is validated
    Store(tmp_path / "results").write(Cell("s", "train", {}, settings, 1, "smoke"), found)
    study = replace(load_study("models", STUDIES), name="s")
    assert Store(tmp_path / "results").of(study) == {found["id"]: found}


def test_a_cell_can_start_from_the_embedding_of_its_first_run_alone(tmp_path):
    own = small(tmp_path)
    settings = {
        **small(tmp_path, "other.txt"),
        **{f"first.{key}": value for key, value in own.items()},
        "train.rounds": 0,
    }
    workspace, measured = Workspace(tmp_path / "work", "cpu"), []
    for more in ({}, {"study.carry": "embedding"}):
        cell = Cell("s", "train", {}, settings | more, 1, "smoke")
        measured.append(run_cell(cell, workspace, (), WaitingListener())["measures"]["perplexity"])
    assert measured[0] != measured[1]


def test_the_renamed_copy_goes_with_its_cell_and_the_first_run_stays(tmp_path, prepared):
    first = {f"first.{key}": value for key, value in small(tmp_path).items()}
    settings = {**small(tmp_path, "other.txt"), **first, "study.rows": "by number"}
    workspace = Workspace(tmp_path / "work", "cpu")
    cells = [Cell("s", "train", {}, {**settings, "method.name": name}, 1, "smoke") for name in ("fedavg", "fedsgd")]
    records = [run_cell(cell, workspace, (), WaitingListener()) for cell in cells]
    (kept,) = (workspace.work / "first").iterdir()
    assert (kept / "model.safetensors").exists()
    assert {r["first_data_sha256"] for r in records} == {read_run_toml(kept)[1]["data_sha256"]}
    assert prepared.count("text.txt") == 1


def test_a_cell_that_starts_from_the_base_model_says_which_one(tmp_path):
    """Its name is the same when the package has another one; an older cell without the hash counts as before."""
    settings = {key: value for key, value in small(tmp_path).items() if not key.startswith("model.")}
    workspace = Workspace(tmp_path / "work", "cpu")
    study = replace(load_study("models", STUDIES), name="s")
    starts = ({"train.init": "base", "model.name": "cifg"}, {"model.name": "cifg"})
    based, random = (Cell("s", "train", {}, settings | start, 1, "smoke") for start in starts)
    found = {
        "base": run_cell(based, workspace, (), WaitingListener()),
        "none": run_cell(random, workspace, (), WaitingListener()),
    }
    for cell, record in zip((based, random), found.values(), strict=True):
        Store(tmp_path / "results").write(cell, record)
    assert found["base"]["init_sha256"] == load_base().sha256
    assert "init_sha256" not in found["none"]
    assert Store(tmp_path / "results").of(study) == {record["id"]: record for record in found.values()}
    told = dict(facts([Row({}, "train", (based,), (found["base"],))]))
    assert told["SHA-256 of the starting weights, base"] == load_base().sha256
    older = {key: value for key, value in found["base"].items() if key != "init_sha256"}
    Store(tmp_path / "results").write(based, older)
    assert Store(tmp_path / "results").of(study)[older["id"]] == older


def test_a_study_with_targets_reads_them_off_a_cell_that_another_ran_without(tmp_path):
    results, workspace = tmp_path / "results", Workspace(tmp_path / "work", "cpu")
    one = replace(load_study("gboard-toy", STUDIES), name="one")
    more = {"study.samples": 48, "study.rounds": 1}
    run_study(one, "smoke", store=Store(results), workspace=workspace, override=more, most=1)
    (record,) = Store(results).of(one).values()
    path = next((results / "data").glob("*/*.json"))
    path.write_text(json.dumps({**record, "curve": [[1, 5.0, 80.0, 0.1], [3, 4.0, 20.0, 0.2]]}), "utf-8")
    other = replace(one, name="other", targets=(40.0, 10.0))
    again = run_study(other, "smoke", store=Store(results), workspace=workspace, override=more, minutes=0)
    assert (again.before, len(again.open)) == (1, 3)
    (found,) = Store(results).of(other).values()
    assert found["measures"]["rounds_to_40"] == 2.0  # half-way in the logarithm
    assert found["measures"]["rounds_to_10"] is None
    assert "rounds_to_40" not in next(iter(Store(results).of(one).values()))["measures"]
    assert len(list((results / "data").glob("*/*.json"))) == 1


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
        federated = {c.labels["split"] for c in cells if c.labels["method"] == "FedAvg"}
        assert federated == {"IID", "IID, lines shuffled", "quantity skew", "roles"}


def test_methods_of_next_character_are_ranked_in_one_state():
    """The same local optimiser, step size, epochs and weights; central training too, with as many seeds."""
    of_rank = [
        c for c in cells_of(load_study("next-character", STUDIES), "standard") if c.labels.get("setup") == "one state"
    ]
    made = {c.labels["method"]: options_of(c.runner, c.settings) for c in of_rank}
    for key in ("optimiser", "lr", "momentum", "clip", "batch_size"):
        assert len({options[key] for options in made.values()}) == 1, key
    assert (
        {c.settings["method.epochs"] for c in of_rank} == {c.settings["study.central_epochs"] for c in of_rank} == {2}
    )
    assert made["ADMM"]["weights"] == "uniform"
    assert not made["FedProx, mu 0.0001"]["by_tokens"]
    assert {c.settings["mediator.name"] for c in of_rank if c.labels["method"] == "FedAvg"} == {"uniform"}
    rows = {tuple(c.labels.values()): {o.seed for o in of_rank if o.labels == c.labels} for c in of_rank}
    assert set(map(frozenset, rows.values())) == {frozenset({1, 2, 3})}


def test_the_reports_own_settings_are_rows_of_next_character():
    """10 clients, E = 10, two layers, windows of 100, B = 10, Adam with 0.001, 10 rounds, mu = 0.5, no clipping."""
    cells = [
        c for c in cells_of(load_study("next-character", STUDIES), "paper") if c.labels.get("setup") == "as printed"
    ]
    assert {(c.labels["split"], c.labels["method"]) for c in cells} == {("IID", "central")} | {
        (split, method) for split in ("IID", "quantity skew")
        for method in ("FedAvg", "FedProx, mu 0.5", "ADMM", "LIADMM", "FedADMM")
    }  # fmt: skip
    for c in cells:
        config = config_of(c.settings, 1, Workspace(Path(), "cpu"))
        local = build_method(method_spec(config))
        assert (config.data.clients, config.train.cohort, config.train.rounds, local.batch_size) == (10, 10, 10, 10)
        assert (preset(config.model.name).layers, preset(config.model.name).window) == (2, 100)
        own = options_of(c.runner, c.settings)
        assert own["clip"] is None
        assert (own["lr"] if "lr" in own else 1 / (own["rho"] + own["r"])) == pytest.approx(0.001)
        assert c.labels["method"] == "central" or local.epochs == 10


@pytest.mark.parametrize(
    ("reading", "read"),
    [
        ("as they are", ["   To  be,", "", "or not "]),
        ("runs as one", [" To be,", "", "or not "]),
        ("stripped", ["To  be,", "", "or not"]),
        ("no blank lines", ["To  be,", "or not"]),
        ("collapsed", ["To be,", "or not"]),
        ("joined", ["To  be, or not"]),
    ],
)
def test_readings_of_blanks(reading, read):
    assert list(BLANKS[reading](["   To  be,", "", "or not "])) == read


def test_words_and_pairs_are_drawn_in_the_order_of_their_counts():
    study = load_study("next-character-text", STUDIES)
    rows = rows_of(study, "paper", Store(RESULTS).of(study))
    words, pairs = study.plots
    for plot in (words, pairs):
        terms = next(filter(None, (terms_of(row, plot) for row in rows)))
        assert len(terms) == 20
        assert [count for _, count in terms] == sorted((count for _, count in terms), reverse=True)
        assert all(len(term.split()) == (1 if plot is words else 2) for term, _ in terms)
    drawn = draw_plots(study, rows, "paper")
    assert set(drawn) == {"words", "pairs"}
    assert all(image.startswith(b"\x89PNG") for image in drawn.values())
    assert drawn["words"] != drawn["pairs"]


def test_a_plot_of_terms_counts_words_or_pairs(tmp_path):
    text = (STUDIES / "next-character-text.toml").read_text("utf-8")
    (tmp_path / "odd.toml").write_text(text.replace('measure = "bigrams"', 'measure = "trigrams"'), "utf-8")
    with pytest.raises(ConfigError, match='measure of a plot of terms "trigrams" is not known'):
        load_study("odd", tmp_path)


WORDS = "the king and queen of a small green island saw two ships come home with news".split()  # noqa: SIM905
SETTINGS = {
    "data.name": "ptb", "data.clients": 10, "model.name": "gru", "model.embed": 8, "model.hidden": 8,
    "method.epochs": 1, "method.lr": 0.01, "participation.fraction": 0.3, "train.rounds": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("data"), random.Random(1)
    (root / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) for _ in range(150)]
        (root / "ptb" / f"ptb.{part}.txt").write_text("\n".join(f" {line} " for line in lines), "utf-8")
    return root


def run(corpus, method, folder=None, listen=None, seed=1, **settings):
    config = config_of(SETTINGS | {"method.name": method} | settings, seed, Workspace(corpus, "cpu", str(corpus)))
    return train_faithfully(config, 2, listen or Silent(), folder=folder)


def told(found):
    """All but the seconds."""
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in found["records"]]
    return {**found, "records": records, "seconds": None}


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedmed", "fedadam"])
def test_resumed_is_uninterrupted(method, corpus, tmp_path):
    whole = run(corpus, method)
    for after in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(corpus, method, tmp_path / "cell", Heard(after))
    listen = Heard()
    assert told(run(corpus, method, tmp_path / "cell", listen)) == told(whole)
    assert listen.rounds == [3]
    assert "going on after round 2" in listen.lines


def test_a_cell_of_a_study_goes_on(corpus, tmp_path, monkeypatch):
    study = load_study("fedatt-table2", Path(__file__).parents[3] / "studies")
    cells = [cell for cell in cells_of(study, "smoke") if cell.runner == "code-faithful"][:1]
    monkeypatch.setattr("keyfed.lab.experiment.runner.cells_of", lambda *_: cells)
    small = {key: value for key, value in SETTINGS.items() if not key.startswith("method")}
    workspace, results = Workspace(tmp_path / "work", "cpu", str(corpus)), tmp_path / "results"
    with pytest.raises(KeyboardInterrupt):
        run_study(study, "smoke", store=Store(results), workspace=workspace, override=small, listener=Heard(2))
    assert list((tmp_path / "work" / study.name).iterdir())
    listen = Heard()
    done = run_study(study, "smoke", store=Store(results), workspace=workspace, override=small, listener=listen)
    assert (done.done, done.open) == ((with_settings(cells[0], small).title,), ())
    assert listen.rounds == [3]
    assert list((tmp_path / "work" / study.name).iterdir()) == []


@pytest.mark.parametrize("change", ["settings", "damage", "lines", "checkpoint"])
def test_what_cannot_be_gone_on_with_starts_anew_and_says_so(change, corpus, tmp_path):
    folder, more = tmp_path / "cell", {}
    with pytest.raises(KeyboardInterrupt):
        run(corpus, "fedavg", folder, Heard(2))
    match change:
        case "settings":
            more = {"method.lr": 0.02}
        case "damage":
            (folder / "kept.json").write_text("{")
        case "lines":
            (folder / "kept.json").write_text(json.dumps({"about": {}}))
        case "checkpoint":
            for path in (folder / "checkpoint").glob("*.safetensors"):
                path.write_bytes(b"x")
    listen = Heard()
    found = run(corpus, "fedavg", folder, listen, **more)
    assert listen.rounds == [1, 2, 3]
    assert any("it starts anew" in line for line in listen.lines)
    assert told(found) == told(run(corpus, "fedavg", **more))


SETTLED = 182  # cells at standard scale that were finished on the day the defaults were pinned
CHANGED = {
    DataConfig: {"name": "chat", "batches": "packed", "vocab": 500, "lower": False, "unseen": 0.3},
    TrainConfig: {"rounds": 3, "cohort": 1, "schedule": "cosine", "final": 0.1, "average": 0.5, "rollback": 3.0,
                  "unmatched": "mean", "valid_tokens": 50, "baselines": True},
    VectorsConfig: {"reduce": "pp-pca-pp"},
    PrivacyConfig: {"clip": 1.0},
}  # fmt: skip
OPTIONS = {"fedavg": {"lr": 5.0, "optimiser": "sgd", "clip": 0.25}, "fednesterov": {"beta": 0.7},
           "fedatt": {"step": 2.0, "bound": 3.0}, "central": {"lr": 10.0}, "fedprox": {"mu": 0.5}}  # fmt: skip


@pytest.fixture
def changed(monkeypatch):
    """A program with other defaults."""

    def change():
        for section, values in CHANGED.items():
            usual = {f.name: values.get(f.name, f.default) for f in fields(section)}
            monkeypatch.setattr(section.__init__, "__defaults__", tuple(usual.values()))
            for f in fields(section):
                monkeypatch.setattr(f, "default", usual[f.name])
        for name, values in OPTIONS.items():
            options = METHODS[name].options
            for key, value in values.items():
                monkeypatch.setitem(options, key, options[key].replace(default=value))
        monkeypatch.setitem(METHODS["fedavg"].characters, "lr", 0.5)
        studies_cells._resolve.cache_clear()
        assert TrainConfig().average == 0.5
        assert method_options("fedavg")["lr"].default == 5.0

    yield change
    monkeypatch.undo()
    studies_cells._resolve.cache_clear()


def is_old(cell: Cell) -> bool:
    """Tell whether a cell was planned on the day the defaults were pinned; those added later may be open."""
    later = cell.study == "models" or cell.labels.get("recipe") == "long recipe"
    return not later and not (cell.study == "gboard" and cell.seed > 20)


def standing(*names: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Finished cells by study and scale, as `keyfed study list` counts them, and the files that are left out."""
    lines: list[str] = []
    out = {}
    for name in names or study_names(STUDIES):
        study = load_study(name, STUDIES)
        there = Store(RESULTS, lines.append).of(study)
        out[name] = {scale: counted(study, scale, there)[0] for scale in study.scales}
        old = [cell for cell in cells_of(study, "standard") if is_old(cell)]
        out[name]["old"] = sum(cell.id in there for cell in old)
    return out, lines


def test_other_defaults_open_no_finished_cell(changed, monkeypatch):
    before, left_out = standing()
    assert left_out == []
    assert sum(done["old"] for done in before.values()) >= SETTLED
    changed()
    assert standing() == (before, [])
    monkeypatch.setattr(studies_cells, "pinned", dict)  # without the table
    studies_cells._resolve.cache_clear()
    after, left_out = standing("fedatt-table2", "ptb-50")
    assert len(left_out) > 40
    assert after["fedatt-table2"]["old"] < before["fedatt-table2"]["old"]


def test_other_defaults_change_no_cells_configuration(changed):
    cells = [cell for name in study_names(STUDIES) for cell in cells_of(load_study(name, STUDIES), "standard", [1])]
    runs = [
        c.settings
        for c in cells
        if c.runner in ("train", "n-gram") and not c.absent and "vectors.file" not in c.settings
    ]
    workspace = Workspace(Path(), "cpu")
    before = [(config_of(s, 1, workspace), options_of("train", s)) for s in runs]
    changed()
    after = [(config_of(s, 1, workspace), options_of("train", s)) for s in runs]
    asleep = ("vectors", "privacy", "secure")
    for (one, its), (other, others) in zip(before, after, strict=True):
        assert its == others
        for section in set(SECTIONS) - set(asleep):
            was, now = getattr(one, section), getattr(other, section)
            differ = {f.name for f in fields(was) if getattr(was, f.name) != getattr(now, f.name)}
            assert differ <= {"unmatched"}, section  # pinned where weights are carried
        assert (one.method, one.mediator, one.server) == (other.method, other.mediator, other.server)


def test_a_cell_measures_personal_copies_as_evaluate_does(tmp_path):
    folder = tmp_path / "people"
    folder.mkdir()
    for k in range(6):
        (folder / f"p{k}.txt").write_text(f"one two word{k} four five word{k + 1} seven\n" * 30)
    settings = {**small(tmp_path), "data.name": str(folder), "data.clients": "none", "data.window": 5}
    workspace = Workspace(tmp_path / "work", "cpu")
    plain = run_cell(Cell("s", "train", {}, settings, 1, "smoke"), workspace, (), WaitingListener())["measures"]
    asked = {**settings, "study.personal": "epochs=2,lr=0.01"}
    found = run_cell(Cell("s", "train", {}, asked, 1, "smoke"), workspace, (), WaitingListener())["measures"]
    train(config_of(settings, 1, workspace), tmp_path / "run")
    block = personalise_run(tmp_path / "run", Personalisation(epochs=2, lr=0.01))
    assert {key: found[key] for key in plain} == plain  # the run is the same
    assert found["general_perplexity"] == block["before"]["perplexity"]
    assert found["personal_perplexity"] == block["after"]["perplexity"] < block["before"]["perplexity"]
    assert found["personal_ratio"] == found["personal_perplexity"] / found["general_perplexity"]
    assert found["personal_top1_words"] == block["after"]["top1_words"]
    assert found["gaining"] == block["gaining"] > 0


def thetas(cell: Cell, workspace: Workspace, monkeypatch) -> list[str]:
    """Train a cell; the hash of every model that it made, and of what it measured."""
    hashes = []
    train = studies_cells.train

    def kept(config, folder, **more):
        result = train(config, folder, **more)
        theta = load_file(folder / "model.safetensors")
        hashes.append(hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(theta.items()))).hexdigest())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(studies_cells, "train", kept)
        record = run_cell(cell, workspace, (), WaitingListener())
    return [*hashes, json.dumps(record["measures"], sort_keys=True)]


def test_a_cell_trains_the_same_weights_under_other_defaults(tmp_path, changed, monkeypatch):
    """Also where it starts from a run of another vocabulary, whose weights are carried."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} Two three word{k % 7} five\n" for k in range(120)))
    small = {"data.clients": 12, "model.embed": 4, "model.hidden": 4, "train.test_tokens": 100}
    first = {f"first.{k}": v for k, v in {**small, "data.name": str(tmp_path / "one.txt"), "train.rounds": 1}.items()}
    cell = Cell(
        "s", "train", {}, {**small, "data.name": str(tmp_path / "other.txt"), "train.rounds": 2, **first}, 1, "smoke"
    )
    before = thetas(cell, Workspace(tmp_path / "a", "cpu"), monkeypatch)
    changed()
    assert thetas(cell, Workspace(tmp_path / "b", "cpu"), monkeypatch) == before
    monkeypatch.setattr(studies_cells, "pinned", dict)
    without = thetas(cell, Workspace(tmp_path / "c", "cpu"), monkeypatch)
    assert all(one != other for one, other in zip(without, before, strict=True))


def test_an_exchanged_part_and_an_option_that_is_newer_than_the_table(changed, monkeypatch):
    settings = {"method.name": "fedatt", "mediator.name": "uniform", "server.name": "momentum"}
    then = options_of("train", settings)
    assert (then["step"], then["bound"], then["server.beta"]) == (1.2, None, 0.9)
    changed()
    assert options_of("train", settings) == then

    parameter = inspect.Parameter("newer", inspect.Parameter.KEYWORD_ONLY, default=0.25)
    real = studies_cells.method_options
    monkeypatch.setattr(studies_cells, "method_options", lambda name: {**real(name), "newer": parameter})
    document = studies_cells.to_document
    monkeypatch.setattr(
        studies_cells, "to_document", lambda c: {**document(c), "method": {**document(c)["method"], "newer": 0.25}}
    )
    studies_cells._resolve.cache_clear()
    assert options_of("train", settings) == then
    monkeypatch.setattr(studies_cells, "pinned", dict)
    studies_cells._resolve.cache_clear()
    assert options_of("train", settings)["newer"] == 0.25


def test_the_table_has_every_option_of_the_program_and_no_other():
    """A new option is added to defaults.toml with the value that computes what was computed without it."""
    table = pinned()
    own = {section: {f.name for f in fields(kind)} for section, kind in SECTIONS.items()}
    assert {section: set(table[section]) for section in SECTIONS} == own
    assert {m: set(table["method"][m]) for m in METHODS} == {m: set(method_options(m)) for m in METHODS}
    for kind in PARTS:
        assert set(table[kind]) == set(KINDS[kind])
        for name, given in table[kind].items():
            assert set(given) == {k for k, p in part_options(kind, name).items() if p.default is not p.empty}
    config = config_of({}, 1, Workspace(Path(), "cpu"))
    for section in SECTIONS:
        for key, value in table[section].items():
            set_value(config, f"{section}.{key}", value)  # raises for a value that is none of the option
