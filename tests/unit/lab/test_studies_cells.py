"""The run that cells of a study start from: trained once, read once, and the copies of it gone with their cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keyfed.errors import RunError
from keyfed.lab.experiment import cell as studies_cells
from keyfed.lab.experiment.cell import Workspace, run_cell
from keyfed.lab.experiment.grid import Cell, load_study
from keyfed.lab.experiment.page import facts
from keyfed.lab.experiment.runner import run_study
from keyfed.lab.experiment.store import Store
from keyfed.lab.experiment.table import Row
from keyfed.run.folder import read_run_toml
from keyfed.run.loop import Silent
from keyfed.run.start.base import load_base

STUDIES = Path(__file__).parents[3] / "studies"


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
    told = dict(facts(study, [Row({}, "train", (based,), (found["base"],))]))
    assert told["SHA-256 of the starting weights, base"] == load_base().sha256
    older = {key: value for key, value in found["base"].items() if key != "init_sha256"}
    Store(tmp_path / "results").write(based, older)
    assert Store(tmp_path / "results").of(study)[older["id"]] == older


def test_a_study_with_targets_runs_a_cell_that_another_ran_without(tmp_path):
    results, workspace = tmp_path / "results", Workspace(tmp_path / "work", "cpu")
    one = replace(load_study("gboard-toy", STUDIES), name="one")
    other = replace(one, name="other", targets=(40.0,))
    more = {"study.samples": 48, "study.rounds": 1}
    first = run_study(one, "smoke", store=Store(results), workspace=workspace, override=more, most=1)
    second = run_study(other, "smoke", store=Store(results), workspace=workspace, override=more, most=1)
    assert (second.done, second.before) == (first.done, 0)
    third = run_study(other, "smoke", store=Store(results), workspace=workspace, override=more, minutes=0)
    assert (third.before, len(third.open)) == (1, 3)
    (record,) = Store(results).of(other).values()
    assert "rounds_to_40" in record["measures"]
    assert Store(results).of(one) == {record["id"]: record}
    assert len(list((results / "data").glob("*/*.json"))) == 2
