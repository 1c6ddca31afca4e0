"""Studies pin the defaults of their cells: other defaults of the program neither open a cell nor change one."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import load_file

from keyfed.config.load import PARTS, SECTIONS, DataConfig, PrivacyConfig, TrainConfig, VectorsConfig, set_value
from keyfed.federated import tuned
from keyfed.federated.methods import METHODS, method_options
from keyfed.federated.parts import KINDS, part_options
from keyfed.lab.experiment import cell as studies_cells
from keyfed.lab.experiment.cell import Workspace, config_of, options_of, pinned, run_cell
from keyfed.lab.experiment.grid import Cell, cells_of, load_study, study_names
from keyfed.lab.experiment.store import Store
from keyfed.lab.experiment.table import counted
from keyfed.run.loop import Silent

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"
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
            monkeypatch.setattr(METHODS[name], "__kwdefaults__", {**METHODS[name].__kwdefaults__, **values})
        monkeypatch.setitem(tuned.CHARACTERS, "fedavg", {"lr": 0.5})
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


def standing() -> tuple[dict[str, dict[str, int]], list[str]]:
    """Finished cells by study and scale, as `keyfed study list` counts them, and the files that are left out."""
    lines: list[str] = []
    out = {}
    for name in study_names(STUDIES):
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
    after, left_out = standing()
    assert len(left_out) > 100
    assert sum(done["old"] for done in after.values()) < SETTLED


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


class WaitingListener(Silent):
    def wait(self, why: str) -> None:
        raise AssertionError(why)


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
