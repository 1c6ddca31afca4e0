"""A code-faithful cell that is stopped goes on exactly where it was, or starts anew and says so."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from keyfed.lab.experiment.cell import Workspace, config_of
from keyfed.lab.experiment.grid import cells_of, load_study, with_settings
from keyfed.lab.experiment.runner import run_study
from keyfed.lab.experiment.store import Store
from keyfed.lab.papers.fedatt_code import train_faithfully
from keyfed.run.loop import Silent

WORDS = "the king and queen of a small green island saw two ships come home with news".split()  # noqa: SIM905
SETTINGS = {
    "data.name": "ptb", "data.clients": 10, "model.name": "gru", "model.embed": 8, "model.hidden": 8,
    "method.epochs": 1, "method.lr": 0.01, "participation.fraction": 0.3, "train.rounds": 3,
}  # fmt: skip


class Stop(Silent):
    """Keeps what is said, and stops after a round."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.lines, self.rounds = after, [], []

    def say(self, line):
        self.lines.append(line)

    def round(self, record):
        self.rounds.append(record["round"])
        if record["round"] == self.after:
            raise KeyboardInterrupt


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
            run(corpus, method, tmp_path / "cell", Stop(after))
    listen = Stop()
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
        run_study(study, "smoke", store=Store(results), workspace=workspace, override=small, listener=Stop(2))
    assert list((tmp_path / "work" / study.name).iterdir())
    listen = Stop()
    done = run_study(study, "smoke", store=Store(results), workspace=workspace, override=small, listener=listen)
    assert (done.done, done.open) == ((with_settings(cells[0], small).title,), ())
    assert listen.rounds == [3]
    assert list((tmp_path / "work" / study.name).iterdir()) == []


@pytest.mark.parametrize("change", ["settings", "damage", "lines", "checkpoint"])
def test_what_cannot_be_gone_on_with_starts_anew_and_says_so(change, corpus, tmp_path):
    folder, more = tmp_path / "cell", {}
    with pytest.raises(KeyboardInterrupt):
        run(corpus, "fedavg", folder, Stop(2))
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
    listen = Stop()
    found = run(corpus, "fedavg", folder, listen, **more)
    assert listen.rounds == [1, 2, 3]
    assert any("it starts anew" in line for line in listen.lines)
    assert told(found) == told(run(corpus, "fedavg", **more))
