"""`keyfed compare` with variants of a method, what `--dry-run` says of a start, and the same from Python."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file

import keyfed as library
from keyfed.cli.app import app
from keyfed.lab.experiment import runner as comparing
from keyfed.lab.experiment.compare import resolve
from keyfed.reports import dry as preview
from keyfed.run import loop as training
from keyfed.run.folder import read_metrics
from keyfed.text.vectors import recognise
from tests.absent import run_without
from tests.end_to_end.conftest import TINY, write_corpus
from tests.end_to_end.test_cli import one_line
from tests.end_to_end.test_vectors import write_vectors

OPTIONS = [part for setting in (*TINY, "train.baselines=false") for part in ("--set", setting)]
OWN: dict[str, Any] = {
    **{setting.partition("=")[0].replace(".", "_"): setting.partition("=")[2] for setting in TINY},
    "train_baselines": False,
}
PAGE = (Path(__file__).parents[2] / "docs" / "starting-smart.md").read_text("utf-8")
LABELS = ["fedavg", "fedavg+vectors", "fedavg+init", "fedavg+init+vectors"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A corpus, word vectors for some of its words, and a run that was pretrained on it from Python."""
    folder = tmp_path_factory.mktemp("made")
    corpus, vectors = write_corpus(folder / "corpus"), folder / "glove.txt"
    write_vectors(vectors, 8)
    result = library.pretrain(library.configure("central", data=str(corpus), rounds=3, **OWN), folder / "public")
    assert result["method"] == "central"
    return corpus, vectors, folder / "public"


@pytest.fixture(scope="module")
def compared(made, tmp_path_factory) -> tuple[Path, dict[str, Any], list[Any]]:
    """All combinations of starts over two seeds, from Python: folder, result, and the weights of each first round."""
    corpus, vectors, public = made
    out, began, real = tmp_path_factory.mktemp("runs") / "out", [], training.run_round

    def spy(method, state, *more, **named):
        if state.round == 0:
            began.append({name: p.clone() for name, p in state.params.items()})
        return real(method, state, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "run_round", spy)
        result = library.compare(
            ["fedavg", "fedavg+vectors", "fedavg+init", "fedavg+vectors+init"], data=str(corpus), rounds=3, seeds=2,
            out=out, vectors_file=str(vectors), vectors_dim=8, train_init=str(public), **OWN,
        )  # fmt: skip
    return out, result, began


def test_every_variant_has_its_own_start_and_is_called_by_its_full_name(made, compared):
    _, _, public = made
    out, result, began = compared
    assert {row["label"] for row in result["rows"]} == set(LABELS)
    assert {path.name for path in out.iterdir() if path.is_dir()} == {*LABELS, "plots"}
    random, vectors, init, both = began[:4]
    trained = load_file(public / "model.safetensors")
    assert all(torch.equal(init[name], trained[name]) for name in trained)  # the same text, so the same vocabulary
    same = (vectors["embedding.weight"] == random["embedding.weight"]).all(1)
    assert (~same).sum() == 12  # words of the file
    assert torch.equal(both["embedding.weight"][~same], vectors["embedding.weight"][~same])
    assert torch.equal(both["embedding.weight"][same], init["embedding.weight"][same])
    assert all(torch.equal(vectors[name], random[name]) for name in random if name != "embedding.weight")
    starts = {row["label"]: row["start"] for row in result["rows"]}
    assert starts["fedavg"] == {"from": "random"}
    assert starts["fedavg+init+vectors"]["from"] == "run"
    assert starts["fedavg+init+vectors"]["vectors"]["matched"] == 12
    assert {row["plain"] for row in result["rows"]} == {"fedavg"}


def test_the_fine_tuning_report_is_a_recount_of_the_metrics(compared):
    out, result, _ = compared
    assert [one["variant"] for one in result["fine_tuning"]] == LABELS[1:]
    for one in result["fine_tuning"]:
        assert one["plain"] == "fedavg"
        for seed in one["seeds"]:
            mine, random = (read_metrics(out / label / f"seed-{seed['seed']}") for label in (one["variant"], "fedavg"))
            best = max(record["valid"]["top1"] for record in random)
            first = next(record["round"] for record in random if record["valid"]["top1"] == best)
            assert (seed["best_top1"], seed["best_round"]) == (best, first)
            reached = next((record["round"] for record in mine if record["valid"]["top1"] >= best), None)
            assert seed["reached_round"] == reached
            if reached is None:
                assert seed["rounds_saved"] is None
                continue
            assert seed["rounds_saved"] == first - reached
            moved = [sum(sum(r["traffic"].values()) for r in runs) for runs in (random[:first], mine[:reached])]
            assert seed["bytes_saved"] == moved[0] - moved[1]
    text = (out / "report.md").read_text("utf-8")
    assert "## What a start saves" in text
    assert "fedavg+vectors: word vectors glove.txt (GloVe text): 12 of" in text
    assert "fedavg+init: starts from" in text
    assert "| fedavg+init+vectors | mean |" in text
    assert "plots/accuracy-rounds.png" in text
    assert json.loads((out / "compare.json").read_text())["fine_tuning"] == result["fine_tuning"]


def test_the_command_line_finds_the_same_runs_and_prints_the_report(keyfed, made, compared):
    corpus, vectors, public = made
    out, result, _ = compared
    given = ("--data", corpus, "--rounds", 3, "--seeds", 2, "--vectors", vectors, "--vectors-dim", 8, "--init", public)
    code, stdout, stderr = keyfed("compare", *LABELS, *given, "--out", out, *OPTIONS)
    assert code == 0, stderr
    assert "round    1" not in stderr  # nothing was trained again
    assert "rounds" in stdout.split("report:")[0]
    assert sum("fedavg's best validation accuracy" in line for line in stdout.splitlines()) == 3
    assert all(f"{label}: " in stdout for label in LABELS[1:])
    assert result["verdict"] in stdout


def test_frozen_rounds_are_for_the_variants_and_said(keyfed, made, tmp_path):
    corpus, vectors, _ = made
    out = tmp_path / "out"
    given = ("--data", corpus, "--rounds", 2, "--vectors", vectors, "--set", "train.frozen_rounds=2", "--out", out)
    code, stdout, stderr = keyfed("compare", "fedavg", "fedavg+vectors", *given, *OPTIONS)
    assert code == 0, stderr
    assert "frozen: train.frozen_rounds=2 is for what has a start, not for fedavg" in stderr
    assert "train.frozen_rounds = 2 is for what has a start; not frozen: fedavg." in stdout
    ups = {
        label: json.loads((out / label / "seed-1" / "metrics.jsonl").read_text().splitlines()[0])["traffic"]["up"]
        for label in LABELS[:2]
    }
    assert ups["fedavg+vectors"] < ups["fedavg"]


@pytest.mark.parametrize(
    ("methods", "starts", "said"),
    [
        (["fedavg+vectors"], (), "add --vectors FILE"),
        (["fedavg", "fedavg+init"], ("vectors",), "add --init RUN"),
        (["fedavg"], ("vectors",), "name one that does: fedavg+vectors"),
        (["fedavg", "fedavg+vectors"], ("vectors", "init"), "name one that does: fedavg+init"),
        (["fedavg+vektors"], ("vectors",), "did you mean vectors?"),
        (["fedavg+init", "--set", "model.hidden=13"], ("init",), "hidden 13"),
        (["fedavg+vectors", "--set", "model.embed=20"], ("vectors",), "8 numbers a word"),
        (["fedavg+vectors", "--vectors", "nothing.txt"], (), "no such file"),
        (["fedavg+init", "--init", "nothing"], (), "has no run.toml; expected a run folder"),
        (["fedadmm+init", "--set", "train.frozen_rounds=1"], ("init",), "send all their layers when they join"),
    ],
)
def test_what_cannot_start_is_one_line_and_trains_nothing(keyfed, made, tmp_path, methods, starts, said):
    corpus, vectors, public = made
    own = [part for s in TINY if "fedadmm+init" not in methods or "." in s.partition("=")[0] for part in ("--set", s)]
    given = {"vectors": ("--vectors", vectors), "init": ("--init", public)}
    named = [part for start in starts for part in given[start]]
    code, _, stderr = keyfed("compare", "--data", corpus, "--out", tmp_path / "out", *own, *methods, *named)
    assert code == 2
    assert said in one_line(stderr)
    assert not (tmp_path / "out").exists()


def test_clients_that_overlap_under_another_seed_are_refused_before_anything_trains(made, tmp_path):
    corpus = made[0]
    own = {**OWN, "train_cohort": 2}
    half = library.configure("central", data=str(corpus), rounds=1, seed=3, data_clients_part="1/2", **own)
    library.pretrain(half, tmp_path / "half")
    given: dict[str, Any] = {"data_clients_part": "2/2", "train_init": str(tmp_path / "half"), **own}
    with pytest.raises(library.KeyfedError, match="is not disjoint from it, use the same seed"):
        library.compare(["fedavg+init"], data=str(corpus), rounds=1, seeds=[3, 2], out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


# What --dry-run says


def test_a_dry_run_says_what_would_be_carried(keyfed, made, monkeypatch):
    corpus, vectors, public = made
    given = ("train", "fedavg", "--data", corpus, "--init", public, "--vectors", vectors, "--dry-run", *OPTIONS)
    code, stdout, stderr = keyfed(*given, "--set", "train.frozen_rounds=2")
    assert code == 0, stderr
    assert f"starts from {public}: 37 of 37 rows matched by word, 100.00% of the training tokens" in stdout
    assert "word vectors glove.txt (GloVe text): 12 of 37 rows matched by word" in stdout
    assert "frozen: the embedding" in stdout
    monkeypatch.setattr(preview, "LARGE", 1)  # as if the file were large: only its beginning is read
    code, stdout, stderr = keyfed(*given)
    assert code == 0, stderr
    assert "word vectors glove.txt (GloVe text): 8 numbers each; which words it has is seen when it is read" in stdout
    assert f"starts from {public}: 37 of 37 rows" in stdout
    code, stdout, _ = keyfed(*given, "--json")
    start = json.loads(stdout)["start"]
    assert (start["from"], start["matched"], start["vectors"]["width"]) == ("run", 37, 8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--init", "nothing"), "has no run.toml; expected a run folder"),
        (("--init", "PUBLIC", "--set", "model.hidden=13"), "hidden 12.*hidden 13"),
        (("--vectors", "nothing.txt"), "no such file"),
        (("--vectors", "VECTORS", "--set", "model.embed=20"), "8 numbers a word, and the embedding of cifg has 20"),
        (("--vectors", "VECTORS", "--vectors-dim", "5"), "vectors.dim is 5, and the embedding of cifg is 8 wide"),
        (("--vectors", "VECTORS", "--model", "char-lstm"), "reads characters"),
        (("--vectors", "EMPTY"), "empty; expected word vectors"),
    ],
)
def test_a_dry_run_refuses_a_start_that_does_not_fit(keyfed, made, tmp_path, settings, said):
    corpus, vectors, public = made
    (tmp_path / "empty.txt").touch()
    real = {"PUBLIC": public, "VECTORS": vectors, "EMPTY": tmp_path / "empty.txt"}
    named = [real.get(part, part) for part in settings]
    code, stdout, stderr = keyfed("train", "fedavg", "--data", corpus, "--dry-run", *OPTIONS, *named)
    assert (code, stdout) == (2, "")
    assert said.split(".*")[-1] in one_line(stderr)


@pytest.mark.parametrize("form", ["npz", "safetensors", "folder"])
def test_the_beginning_of_every_format_tells_its_width(form, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    if form == "npz":
        path = tmp_path / "v.npz"
        np.savez(path, words=np.array(["the", "a"]), vectors=np.ones((2, 5), np.float32))
        assert recognise(path)[:2] == ("npz", 5)
        return
    tokens = {"wte.weight": np.ones((3, 6), np.float32)}
    save_file(tokens, tmp_path / "model.safetensors")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    kind, width = recognise(tmp_path if form == "folder" else tmp_path / "model.safetensors")[:2]
    assert kind.startswith("wte.weight")
    assert width == 6


# From Python


def test_a_vocabulary_is_elected_and_a_run_started_from_python(made, tmp_path):
    corpus, vectors, public = made
    report = library.vocab(library.configure(data=str(corpus), data_vocab=30), tmp_path / "vocab.json")
    assert report["kept"] + 4 == 30
    own = {**OWN, "data_vocab_file": str(tmp_path / "vocab.json"), "train_init": str(public)}
    config = library.configure("fedprox", data=str(corpus), rounds=1, vectors_file=str(vectors), **own)
    result = library.train(config, tmp_path / "run")
    assert result["vocabulary"] == 30
    assert (result["start"]["rows"], result["start"]["matched"]) == (30, 30)
    with pytest.raises(library.KeyfedError, match="pretraining is central"):
        library.pretrain(config, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_given_vocabulary_is_not_called_built_on_the_test_text(keyfed, made, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    for path in corpus.iterdir():
        path.write_text(12 * path.read_text("utf-8") + "plugh\n")  # the last line is held out
    config = library.configure(data=str(corpus), data_unseen=0.0)
    library.vocab(config, tmp_path / "vocab.json")
    document = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    assert "plugh" not in document["words"]
    document["words"] += ["plugh", "never-said"]  # a public list has words that happen to be in the test text
    (tmp_path / "vocab.json").write_text(json.dumps(document), "utf-8")
    own = {**OWN, "data_unseen": 0.0, "data_vocab_file": str(tmp_path / "vocab.json")}
    library.train(library.configure(data=str(corpus), rounds=1, **own), tmp_path / "run")
    (check,) = (c for c in library.conformance(tmp_path / "run") if c["name"].startswith("vocabulary"))
    assert check["name"] == "vocabulary as given"
    assert check["passed"]
    assert (
        "vocab.json was given, not counted here; 1 of 35 words occur in the test text and not in training"
        in (check["detail"])
    )
    assert "(plugh)" in check["detail"]


BARE = """
import sys
import keyfed

if __name__ == "__main__":
    result = keyfed.compare(["fedavg", "fedavg+vectors"], data=sys.argv[1], rounds=2, seeds=2, out=sys.argv[3],
                            vectors_file=sys.argv[2], model_embed=8, model_hidden=12, data_vocab=60, train_cohort=3,
                            train_workers=1, data_window=8, train_valid_tokens=500, train_ngram_order=2)
    print(result["fine_tuning"][0]["variant"], result["failed"])
"""


def test_a_comparison_from_python_needs_no_terminal_and_no_plots(made, tmp_path):
    corpus, vectors, _ = made
    absent = ("typer", "click", "rich", "sklearn", "matplotlib")
    done = run_without(absent, BARE, corpus, vectors, tmp_path / "out")
    assert done.stdout.split() == ["fedavg+vectors", "0"]
    report = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert "matplotlib is not installed" in report
    assert "What a start saves" in report
    assert (tmp_path / "out" / "compare.json").exists()


# The page


@pytest.mark.parametrize("line", re.findall(r"^    keyfed (.*)$", PAGE, re.M))
def test_the_command_line_knows_every_command_of_the_page(line):
    verb, *rest = shlex.split(line, comments=True)
    command = typer.main.get_command(app).commands[verb]
    named = command.make_context(verb, rest).params
    if verb == "compare":
        given = [(key, named[name]) for key, name in (("train.init", "init"), ("vectors.file", "vectors"))]
        assert len(resolve(named["methods"], [("model.name", named["model"]), *given]).entries) == 4


def test_python_knows_every_name_of_the_page(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    called = []
    for verb in ("vocab", "pretrain", "train"):
        monkeypatch.setattr(library, verb, lambda config, out, verb=verb: called.append((verb, config.method, out)))

    def compare(methods, settings, **named):
        assert [entry.label for entry in resolve(methods, settings).entries] == ["fedadam", "fedadam+vectors"]
        called.append(("compare", list(named["seeds"])))
        return {"fine_tuning": [], "out": "runs/compared"}

    monkeypatch.setattr(comparing, "compare", compare)
    exec(compile(code, "starting-smart.md", "exec"), {"__name__": "__main__"})
    assert called == [
        ("vocab", "fednesterov", "vocab.json"),
        ("pretrain", "central", "runs/public"),
        ("train", "fedadam", "runs/started"),
        ("compare", [1, 2, 3]),
    ]
