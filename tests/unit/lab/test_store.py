"""Results of cells on disk: what counts, what is left out and said, and that options are those of the run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from keyfed.config.load import to_document
from keyfed.errors import ConfigError, RunError
from keyfed.federated.methods import METHODS
from keyfed.lab.experiment import cell as studies_cells
from keyfed.lab.experiment.cell import Workspace, config_of, options_of
from keyfed.lab.experiment.grid import cells_of, load_study, study_names
from keyfed.lab.experiment.page import write_page
from keyfed.lab.experiment.store import Store, interpolated_rounds, make_folder, read_cell, refuse_file

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"
STUDY = load_study("next-character", STUDIES)
NEWER = {
    "loss",
    "bias_correction",
    "clients",
    "optimiser",
    "step",
}  # options that methods got after cells of theirs were run
LIADMM = {"method.name": "liadmm", "model.name": "char-lstm"}


def cell_and_record():
    wanted = {"setup": "E 2, own steps", "split": "quantity skew", "method": "LIADMM"}  # sets few options of its method
    cell = next(c for c in cells_of(STUDY, "standard") if c.labels == wanted)
    made = {"keyfed": "1", "torch": "2", "python": "3", "hardware": "CPU"}
    return cell, {
        "id": cell.id, "study": cell.study, "runner": cell.runner, "seed": 1, "settings": dict(cell.settings),
        "options": options_of(cell.runner, cell.settings), "measures": {"nats": 2.0}, "curve": [], "made": made,
    }  # fmt: skip


@pytest.fixture
def fresh_options():
    """Resolved options are kept; a test that changes a default starts and leaves without them."""
    studies_cells._resolve.cache_clear()
    yield
    studies_cells._resolve.cache_clear()


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_options_are_those_of_the_run(name, tmp_path):
    vectors = tmp_path / "glove-6b-100d" / "glove.6B.100d.txt.gz"
    vectors.parent.mkdir()
    vectors.touch()
    for cell in {tuple(c.labels.values()): c for c in cells_of(load_study(name, STUDIES), "smoke")}.values():
        found = options_of(cell.runner, cell.settings)
        if cell.absent or cell.runner not in ("train", "code-faithful") or "study.positional" in cell.settings:
            continue
        document = to_document(config_of(cell.settings, cell.seed, Workspace(tmp_path, "cpu", str(tmp_path))))
        name_of_method = document["method"].pop("name")
        assert name_of_method == cell.settings["method.name"]
        assert document["method"].items() <= found.items()
        rest = found.keys() - document["method"].keys()
        parts = {key.split(".")[0] for key in cell.settings} & {"first", "mediator", "server"}
        assert {key.split(".")[0] for key in rest} == parts


def test_options_have_the_defaults_and_only_runners_with_a_method_have_any():
    assert options_of("train", LIADMM) == options_of("train", LIADMM | {"method.rho": 0.001})
    assert options_of("train", LIADMM)["rho"] == 0.001  # the tuned default of a character model
    assert options_of("n-gram", {"data.name": "ptb"}) == options_of("toy", {"study.sent_back": True}) == {}
    began = options_of("train", LIADMM | {"first.method.name": "central"})
    assert began["first.lr"] == options_of("train", {"method.name": "central"})["lr"]


def test_a_cell_made_with_another_default_is_open_and_said(tmp_path, monkeypatch, fresh_options):
    cell, record = cell_and_record()
    path = Store(tmp_path).write(cell, record)
    lines = []
    assert list(Store(tmp_path, lines.append).of(STUDY)) == [cell.id]
    assert (lines, Store(tmp_path).has(cell)) == ([], True)
    other = {"liadmm": {"rho": 0.5, "r": 0.15}}
    monkeypatch.setitem(METHODS["liadmm"].characters, "rho", 0.5)  # the program's default is not the cells'
    studies_cells._resolve.cache_clear()
    assert list(Store(tmp_path, lines.append).of(STUDY)) == [cell.id]
    table = {**studies_cells.pinned(), "characters": other}
    monkeypatch.setattr(studies_cells, "pinned", lambda: table)
    studies_cells._resolve.cache_clear()
    assert Store(tmp_path, lines.append).of(STUDY) == {}
    assert not Store(tmp_path).has(cell)
    assert lines == [f"{path} is left out: it was made with other defaults (rho 0.001 → 0.5); its cell is open"]


def test_a_cell_counts_that_is_older_than_an_option_that_it_does_not_set(tmp_path):
    cell, record = cell_and_record()
    unset, given = "clip", next(k.removeprefix("method.") for k in cell.settings if k[7:] in record["options"])
    assert f"method.{unset}" not in cell.settings
    del record["options"][unset]
    path = Store(tmp_path).write(cell, record)
    assert list(Store(tmp_path).of(STUDY)) == [cell.id]
    lost = record["options"].pop(given)
    Store(tmp_path).write(cell, record)
    lines = []
    assert Store(tmp_path, lines.append).of(STUDY) == {}
    assert lines == [f"{path} is left out: it was made with other defaults ({given} None → {lost}); its cell is open"]


def test_a_cell_from_before_options_were_kept_counts(tmp_path):
    cell, record = cell_and_record()
    del record["options"]
    Store(tmp_path).write(cell, record)
    assert list(Store(tmp_path).of(replace(STUDY, name="another"))) == [cell.id]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": None}, "seed is None"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": True}, "seed is True"),
        ({"measures": [1]}, "measures is [1]"),
        ({"made": {}}, "made.keyfed is missing"),
        ({"options": 3}, "options is 3"),
        ({"settings": {"method.name": "gone"}}, "its settings are none any more"),
        (("seed",), "seed is missing"),
        (("measures",), "measures is missing"),
        (("id",), "id is missing"),
        ("{", "it is damaged"),
        ("[]", "it is no object"),
    ],
    ids=["none", "text", "true", "list", "made", "options", "method", "seed", "measures", "id", "cut", "array"],
)
def test_a_damaged_cell_is_left_out_and_the_others_stay(change, said, tmp_path):
    cell, record = cell_and_record()
    Store(tmp_path).write(cell, record)
    (tmp_path / "data" / "x").mkdir()
    bad = tmp_path / "data" / "x" / "bad.json"
    match change:
        case str():
            bad.write_text(change)
        case dict():
            damaged = {**record, **change}
            if "settings" in change:  # an id that fits: what is wrong is something else
                damaged["id"] = replace(cell, settings=change["settings"]).id
            bad.write_text(json.dumps(damaged))
        case _:
            bad.write_text(json.dumps({key: value for key, value in record.items() if key not in change}))
    lines = []
    assert list(Store(tmp_path, lines.append).of(STUDY)) == [cell.id]
    assert len(lines) == 1
    assert lines[0].startswith(f"{bad} is left out: ")
    assert said in lines[0]
    assert "\n" not in lines[0]
    write_page(STUDY, Store(tmp_path))
    assert bad.exists()  # nothing is lost


DAMAGE = {
    "id": ({"id": "0" * 12}, "id is '000000000000'; runner, settings and seed make "),
    "other-seed": ({"seed": 2}, "runner, settings and seed make "),
    "curve-number": ({"curve": [3]}, "curve is [3]; expected points of 4 numbers"),
    "curve-short": ({"curve": [[1, 2.0, 3.0]]}, "curve is [[1, 2.0, 3.0]]; expected points of 4 numbers"),
    "curve-text": ({"curve": [[1, 2.0, "x", 0.1]]}, "expected points of 4 numbers"),
    "curve-no-round": ({"curve": [[None, 2.0, 3.0, 0.1]]}, "expected points of 4 numbers"),
    "training": ({"training": {"batch": [[1, 2.0, 0.1]]}}, "expected points of 3 numbers"),
    "tokens": ({"tokens_trained": "many"}, "tokens_trained is 'many'; expected a number or null"),
    "best-round": ({"best_round": [1]}, "best_round is [1]; expected a number or null"),
    "seconds": ({"seconds": "3"}, "seconds is '3'; expected a number or null"),
    "parameters": ({"parameters": {}, "model": "gru"}, "parameters is {}; expected a number or null"),
    "parameters-of-no-model": ({"parameters": 3}, "model is missing"),
    "hash-of-no-data": ({"data_sha256": "00"}, "data is missing"),
    "hash-of-no-vectors": ({"vectors_sha256": "00"}, "setting vectors.file is missing"),
    "hash-of-no-start": ({"init_sha256": "00"}, "setting train.init is missing"),
    "hash-no-text": ({"init_sha256": 7}, "init_sha256 is 7; expected text"),
    "shuffles": ({"shuffles": {"count": 3, "sd": 1.0, "lowest": 2.0}}, "expected count, sd, lowest and highest"),
    "shuffles-list": ({"shuffles": [1]}, "shuffles is [1]; expected count, sd, lowest and highest"),
    "facts": ({"facts": "none", "data": "x"}, "facts is 'none'; expected a table with unigrams and bigrams"),
    "facts-words": ({"facts": {"unigrams": ["a"], "bigrams": []}, "data": "x"}, "expected a table with unigrams"),
    "measure": ({"measures": {"nats": "2.0"}}, "measures is {'nats': '2.0'}; expected a number or null for each"),
    "measure-true": ({"measures": {"nats": True}}, "expected a number or null for each"),
    "measure-infinite": ({"measures": {"nats": float("inf")}}, "expected a number or null for each"),
}  # fmt: skip


@pytest.mark.parametrize("which", DAMAGE)
def test_what_a_page_could_not_show_is_left_out_with_one_line(which, tmp_path):
    change, said = DAMAGE[which]
    cell, record = cell_and_record()
    path = Store(tmp_path).write(cell, record)
    path.write_text(json.dumps({**record, **change}))
    lines = []
    assert Store(tmp_path, lines.append).of(STUDY) == {}
    assert not Store(tmp_path).has(cell)
    assert len(lines) == 1
    assert lines[0].startswith(f"{path} is left out: it is damaged (")
    assert said in lines[0]
    assert "\n" not in lines[0]
    write_page(STUDY, Store(tmp_path))
    assert path.exists()


def test_what_a_cell_may_lack_or_have_is_counted(tmp_path):
    cell, record = cell_and_record()
    record |= {
        "curve": [[1, 2.0, None, 0.1], [2, None, 90, None]], "seconds": None, "best_round": None, "tokens_trained": 5,
        "measures": {"nats": 2.0, "perplexity": None, "top1": 1}, "data": "x", "data_sha256": "00",
        "shuffles": {"count": 1, "sd": None, "lowest": 2.0, "highest": 2},
        "facts": {"unigrams": [["a", 3]], "bigrams": []},
        "training": {"batch": [[1, 2.0, 0.1]], "epoch": []},
    }  # fmt: skip
    lines = []
    assert read_cell(Store(tmp_path).write(cell, record), lines.append) == record
    assert lines == []


def test_a_deeply_nested_file_is_left_out(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    lines = []
    assert read_cell(path, lines.append) is None
    assert len(lines) == 1


def test_a_cell_of_another_study_says_by_its_curve_when_it_reached_a_target(tmp_path):
    cell, record = cell_and_record()
    record["curve"] = [[2, 2.0, 400.0, 0.1], [4, 2.0, None, None], [6, 1.9, 225.0, 0.1], [8, 1.9, 350.0, 0.1]]
    Store(tmp_path).write(cell, record)
    hurried = replace(STUDY, name="hurried", targets=(500.0, 300.0, 200.0))
    assert Store(tmp_path).of(STUDY) == {cell.id: record}
    found = Store(tmp_path).of(hurried)[cell.id]["measures"]
    assert found["rounds_to_300"] == pytest.approx(4.0)  # ln 300 lies half-way between ln 400 and ln 225
    assert found["rounds_to_500"] == 2  # at the first validation; what was before it is not known
    assert found["rounds_to_200"] is None
    richer = {**record, "measures": {**record["measures"], "rounds_to_300": 5}}
    Store(tmp_path).write(replace(cell, study="hurried"), richer)
    assert Store(tmp_path).of(STUDY) == {cell.id: richer}  # what measured more counts everywhere


@pytest.mark.parametrize(
    ("first", "every", "want"), [(None, 1, 4.0), (5, 2, 4.0), (6, 1, 5.0), (3, 1, 3.0)],
    ids=["curve", "within", "after", "a point that the curve left out"],
)  # fmt: skip
def test_interpolated_rounds_lie_before_the_validation_that_has_the_target(first, every, want):
    curve = [[2, 2.0, 400.0, 0.1], [6, 1.9, 225.0, 0.1]]
    assert interpolated_rounds(curve, 300.0, first, every) == pytest.approx(want)
    assert interpolated_rounds(curve, 100.0, first, every) == first
    exact = [[r, 1.0, 1000 * 0.9**r, 0.1] for r in range(1, 40, 3)]
    for target in (700.0, 300.0, 50.0):  # a perplexity that falls by the same share each round
        assert interpolated_rounds(exact, target) == pytest.approx(math.log(target / 1000) / math.log(0.9))


def test_a_cell_without_rounds_needs_no_targets(tmp_path):
    cell, record = cell_and_record()
    Store(tmp_path).write(cell, record)
    assert list(Store(tmp_path).of(replace(STUDY, targets=(300.0,)))) == [cell.id]


def test_results_that_cannot_be_written_are_one_line(tmp_path, monkeypatch):
    for folder in (Path("/proc/x"), Path("/proc/x/data/y")):
        with pytest.raises(RunError, match=r"^--results /proc/x: .*; choose a folder that can be written$"):
            make_folder(Path("/proc/x"), folder)
    make_folder(tmp_path / "new", tmp_path / "new" / "data")
    assert list((tmp_path / "new" / "data").iterdir()) == []
    cell, record = cell_and_record()
    with pytest.raises(RunError, match=r"^--results /proc/x: .*; choose a folder that can be written$"):
        Store(Path("/proc/x")).write(cell, record)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(ConfigError, match=r"--results .*file is a file; expected a folder"):
            refuse_file(folder, "--results")
    refuse_file(tmp_path / "not" / "there", "--results")
    with pytest.raises(ConfigError, match="is a file"):
        Store(tmp_path / "file").of(STUDY)


def test_every_cell_of_the_repository_counts_and_says_its_options():
    lines = []
    found = Store(RESULTS, lines.append).of(load_study("ptb-50", STUDIES))
    assert lines == []
    paths = list((RESULTS / "data").glob("*/*.json"))
    assert {json.loads(path.read_text("utf-8"))["id"] for path in paths} == set(found)
    for record in found.values():
        then, now = record.get("options", {}), options_of(record["runner"], record["settings"])
        assert then.items() <= now.items(), record["id"]
        assert {key.rpartition(".")[2] for key in now.keys() - then.keys()} <= NEWER, record["id"]
