"""What earlier versions left on the disk still works: runs, checkpoints, exports, cells of studies, homes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import keyfed
from keyfed.deploy.enrolment import names_by_key, read_enrolment, read_nodes
from keyfed.deploy.homes import ServerHome, open_home
from keyfed.keyboard import bundle
from keyfed.lab.experiment.grid import SCALES, Cell, cells_of, load_study
from keyfed.lab.experiment.store import Store
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.own_ledger import OwnLedger
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.roster import Roster

from . import runs, samples
from .test_theta import COMPARED, SAME_MACHINE

VERSIONS = sorted(p.name for p in samples.SAMPLES.iterdir())
INTERRUPTED = [name for name in samples.RUNS if name != "finished"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("samples") / "corpus")


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    return str(request.param)


def about(version: str) -> dict:
    return json.loads((samples.SAMPLES / version / "about.json").read_text("utf-8"))


def refuse_other_theta(version: str, name: str, folder: Path) -> None:
    """Compare a run's model with that of the same run without an interruption."""
    now, frozen = ({**values, "nats": 0.0} for values in
                   (runs.digest(keyfed.load_model(folder).params), about(version)["theta"][name]))  # fmt: skip
    wrong = runs.differences(now, frozen, bits=SAME_MACHINE)
    assert not wrong, f"{name} of {version}: {'; '.join(wrong)} (compared {COMPARED})"


def test_samples_are_small_and_name_no_folder_of_the_machine_that_made_them(version, tmp_path):
    folder = samples.SAMPLES / version
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 300_000
    for archive in folder.glob("*.tar.xz"):
        samples.unpack(version, archive.name.removesuffix(".tar.xz"), tmp_path)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 40
    places = (b"/tmp/", b"/home/", b"/root/", str(samples.SAMPLES.parents[2]).encode())
    assert not [p for p in files if any(place in p.read_bytes() for place in places)]


def test_a_finished_run_loads_suggests_evaluates_reports_and_is_not_trained_again(version, corpus, tmp_path):
    run = samples.unpack(version, "finished", tmp_path, corpus)
    refuse_other_theta(version, "finished", run)
    assert keyfed.suggest(keyfed.load_model(run), "the old") == about(version)["suggested"]
    result = json.loads((run / "result.json").read_text("utf-8"))
    before = (run / "metrics.jsonl").read_bytes()
    assert keyfed.train(samples.configure("finished", corpus), run, resume=True) == result
    assert (run / "metrics.jsonl").read_bytes() == before
    with runs.one_thread():
        again = keyfed.evaluate(run)
    assert again["test"]["nats"] == pytest.approx(result["test"]["nats"], rel=1e-6)
    assert f"{result['test']['perplexity']:.4g}" in keyfed.report(run)
    assert (run / "report.md").exists()
    assert (run / "report.html").exists()


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_goes_on_to_the_model_it_would_have_had(version, name, corpus, tmp_path):
    run = samples.unpack(version, name, tmp_path, corpus)
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == samples.STOP_AFTER
    assert not (run / "model.safetensors").exists()
    with runs.one_thread():
        keyfed.train(samples.configure(name, corpus), run, resume=True)
    assert (run / "metrics.jsonl").read_text("utf-8").splitlines()[: samples.STOP_AFTER] == lines
    refuse_other_theta(version, name, run)
    if "private" in name:
        assert [e.round for e in read_ledger(run).entries] == list(range(samples.ROUNDS))


def test_an_interrupted_run_that_lost_its_checkpoints_is_another_run(version, corpus, tmp_path):
    """The test above can fail: the checkpoint's numbers matter, not only that there is one."""
    run = samples.unpack(version, "interrupted", tmp_path, corpus)
    newest = max((run / "checkpoint").glob("*.json"))
    told = json.loads(newest.read_text("utf-8"))
    newest.write_text(json.dumps(told | {"round_": told["round"]}), "utf-8")  # its seal does not fit any more
    said: list[str] = []

    class Heard(samples.Stop):
        def say(self, line: str) -> None:
            said.append(line)

        def round(self, record: dict) -> None: ...

    keyfed.train(samples.configure("interrupted", corpus), run, resume=True, listener=Heard())
    assert any("falling back" in line for line in said)


def test_an_export_is_whole_and_has_the_model_of_its_run(version, corpus, tmp_path):
    export = samples.unpack(version, "export", tmp_path)
    manifest = bundle.check_bundle(export)
    assert set(manifest) >= set(about(version)["exported"])
    params = keyfed.load_model(samples.unpack(version, "finished", tmp_path, corpus)).params
    weights = bundle.load_weights(export)
    assert set(weights) == set(params)
    assert all((weights[name] == p.numpy()).all() for name, p in params.items())
    assert bundle.load_vocab(export)[0].words == keyfed.load_model(tmp_path / "finished").vocab.words


def test_a_cell_of_a_study_counts_as_finished(version, tmp_path):
    study = load_study(samples.STUDY, samples.ROOT / "studies")
    (path,) = (samples.SAMPLES / version / samples.STUDY).glob("*.json")
    (tmp_path / "data").mkdir()
    shutil.copytree(path.parent, tmp_path / "data" / samples.STUDY)
    said: list[str] = []
    ((found, record),) = Store(tmp_path, said.append).of(study).items()
    made = (record[key] for key in ("study", "runner", "labels", "settings", "seed", "scale"))
    cell = Cell(*made)  # as its version made it; today's study need not name it
    assert not said
    assert cell.id == found
    assert Store(tmp_path).has(cell)
    assert path.name == cell.file


def test_every_cell_in_the_repository_counts_as_finished():
    """Four are of cells that their study does not have any more."""
    results, said = samples.ROOT / "docs" / "results", []
    folders = sorted(p for p in (results / "data").iterdir() if p.is_dir())
    plans = samples.ROOT / "studies"
    own = {path.stem for path in plans.glob("*.toml")}  # a search of steps is in studies/runs
    studies = [load_study(f.name, plans if f.name in own else plans / "runs") for f in folders]
    planned = {c.id for study in studies for scale in SCALES if scale in study.scales for c in cells_of(study, scale)}
    cells = {json.loads(p.read_text("utf-8"))["id"] for folder in folders for p in folder.glob("*.json")}
    store = Store(results, said.append)
    there = set().union(*(store.of(study) for study in studies))
    assert not said
    assert cells == there
    assert len(cells) > 200
    assert len(cells - planned) <= 4


def test_the_home_of_a_client_opens_with_its_keys_settings_and_account(version, tmp_path):
    home = open_home(samples.unpack(version, "client", tmp_path))
    settings = home.settings()
    assert (settings.name, settings.server) == ("client-1", "127.0.0.1:9092")
    assert (settings.when, settings.keep_days, settings.limits.epsilon) == (("idle", "power"), 30, 500.0)
    told = about(version)["homes"]
    store = DeviceStore(home.path)
    assert store.identity().public.hex() == told["identity"]
    given = read_enrolment((home.path / "enrol-client-1.json").read_bytes())
    assert (given.identity.hex(), given.node_sum) == (told["identity"], told["node_key"])
    (run,) = os.listdir(home.path / "runs")
    begun = json.loads((home.path / "runs" / run / "begin.json").read_text("utf-8"))["run"]
    assert store.begun(begun)["run"] == begun
    assert store.last_part(begun) is not None
    account = OwnLedger(home.path, settings.limits.epsilon).read()
    assert sum(account.parts.values()) == 1
    assert 0 < account.epsilon() < settings.limits.epsilon


def test_the_home_of_a_server_knows_who_is_enrolled(version, tmp_path):
    server = ServerHome(samples.unpack(version, "server", tmp_path))
    told = about(version)["homes"]
    assert names_by_key(server) == {told["node_key"]: "client-1"}
    assert read_nodes(server) == {"client-1": 7001}
    roster = Roster(server.roster)
    assert roster.names() == ["client-1"]
    assert roster.get("client-1").identity == told["identity"]
