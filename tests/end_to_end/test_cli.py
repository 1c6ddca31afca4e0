"""The command line as a person uses it, right and wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from keyfed.cli.reference import STATISTICS
from keyfed.run.evaluate import evaluate_sentences
from keyfed.run.folder import load_model, read_metrics
from keyfed.run.prepare import prepare
from tests.end_to_end.conftest import TINY, sentence, write_corpus


def test_train_prints_one_json_object_and_writes_the_run(train_tiny):
    out, result = train_tiny()
    for key in ("run", "method", "rounds", "seconds"):
        assert key in result
    for key in ("perplexity", "top1", "top3", "oov_rate"):
        assert isinstance(result["test"][key], float)
    assert result["traffic"]["down"] > 0
    assert result["traffic"]["up"] > 0
    for name in ("run.toml", "metrics.jsonl", "model.safetensors", "vocab.json", "report.md", "report.html"):
        assert (out / name).stat().st_size > 0, name
    assert list((out / "plots").glob("*.png"))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_trained_model_beats_the_unigram_on_a_regular_language(train_tiny, tmp_path):
    plenty = write_corpus(tmp_path / "plenty", lines=30, more=5)
    _, result = train_tiny("train.cohort=6", "epochs=2", rounds=15, data=plenty)
    assert result["test"]["perplexity"] < 0.6 * result["baselines"]["unigram"]["test"]["perplexity"]


def test_every_method_runs(train_tiny):
    for method in ("fedsgd", "central"):
        _, result = train_tiny(method=method, rounds=1, name=method)
        assert result["method"] == method


def test_central_is_trained_beside_the_federation_on_as_many_tokens(train_tiny):
    out, result = train_tiny("train.central=true", rounds=4)
    central = result["baselines"]["central"]
    assert central["test"]["perplexity"] > 1
    tokens = [
        sum(json.loads(line)["worked"] for line in (folder / "metrics.jsonl").read_text().splitlines())
        for folder in (out, out / "central")
    ]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.25)  # cohorts differ in size


def test_suggest_evaluate_and_conformance_of_a_run(train_tiny, keyfed):
    out, result = train_tiny(rounds=2)
    code, stdout, _ = keyfed("suggest", out, "the president", "--json")
    words = json.loads(stdout)["suggestions"]
    assert code == 0
    assert len(words) == 3
    assert not {"<unk>", "<eos>", "<pad>", "<bos>"} & set(words)
    code, stdout, _ = keyfed("evaluate", out, "--json")
    assert code == 0
    assert json.loads(stdout)["test"]["perplexity"] == pytest.approx(result["test"]["perplexity"])


def test_conformance_passes_a_trained_model_and_catches_a_broken_one(train_tiny, keyfed, corpus):
    for k, path in enumerate(sorted(corpus.iterdir())):
        draw = random.Random(100 + k)
        path.write_text("\n".join(sentence(draw) for _ in range(500)), "utf-8")
    out, _ = train_tiny("train.cohort=6", "batch_size=20", rounds=6)
    code, stdout, stderr = keyfed("conformance", out)
    assert code == 0, stdout + stderr
    assert stdout.count("ok ") == 7
    broken = load_file(out / "model.safetensors")
    for name in broken:  # a network that forgets its past: nothing recurrent, all from the last token
        if name.startswith(("rnn.weight_hh", "rnn.weight_hr")):
            broken[name].zero_()
    save_file(broken, out / "model.safetensors")
    code, stdout, _ = keyfed("conformance", out, "--json")
    assert code == 1
    assert [c["name"] for c in json.loads(stdout)["checks"] if not c["passed"]] == ["context is used"]


def test_conformance_says_when_there_is_too_little_text(train_tiny, keyfed):
    out, _ = train_tiny(rounds=1)
    code, _, stderr = keyfed("conformance", out)
    assert code == 2
    assert "tokens" in one_line(stderr)


def test_dry_run_trains_nothing(keyfed, corpus, tmp_path):
    settings = [item for s in TINY for item in ("--set", s)]
    code, stdout, _ = keyfed("train", "--data", corpus, "--out", tmp_path / "none", "--dry-run", "--json", *settings)
    plan = json.loads(stdout)
    assert code == 0
    assert not (tmp_path / "none").exists()
    assert plan["parameters"] > 0
    assert plan["bytes_per_round"]["down"] == 3 * plan["bytes_per_client"]["down"]


def one_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("train", "fedvag"), "did you mean fedavg?"),
        (("train", "--set", "lrr=1"), "did you mean lr?"),
        (("train", "--set", "cohort=3"), "did you mean train.cohort?"),
        (("train", "--set", "train.cohrot=3"), "did you mean cohort?"),
        (("train", "--set", "trian.cohort=3"), "did you mean train?"),
        (("train", "--set", "lr=abc"), "expected a finite number"),
        (("train", "--set", "lr"), "section.key=value"),
        (("train", "--set", "lr=-1"), "expected > 0"),
        (("train", "--model", "gruu"), "did you mean gru"),
        (("train", "--data", "ptbb"), "did you mean ptb?"),
        (("train", "--data", "./no/such/folder"), "no/such/folder"),
        (("train", "--set", "data.partition=iidd"), "did you mean iid?"),
        (
            ("train", "--data", "SMALL", "--set", "train.cohort=3", "--set", "train.device=tpu"),
            "expected auto, cpu, cuda or cuda:NUMBER",
        ),
        (("train", "--config", "missing.toml"), "missing.toml"),
        (("trian",), "did you mean train?"),
        (("train", "--rounds", "many"), "--help"),
        (("suggest", "no-run", "hello"), "not a run folder"),
        (("evaluate", "no-run"), "not a run folder"),
        (("conformance", "no-run"), "not a run folder"),
        (("methods", "fedat"), "is not known"),
        (("data", "get", "ptbb"), "did you mean ptb?"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(keyfed, arguments, hint, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # SMALL stands for the small corpus where a text is read before the mistake is found.
    code, _, stderr = keyfed(*(corpus if part == "SMALL" else part for part in arguments))
    assert code == 2
    assert hint in one_line(stderr)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("metrics.jsonl"))


def test_a_cohort_larger_than_the_population_is_said_before_training(keyfed, corpus, tmp_path):
    code, _, stderr = keyfed("train", "--data", corpus, "--out", tmp_path / "run", "--set", "train.cohort=100")
    assert code == 2
    assert "fewer than the cohort of 100" in one_line(stderr)
    settings = [item for s in TINY for item in ("--set", s)]
    code, _, stderr = keyfed("train", "--data", corpus, "--out", tmp_path / "run", "--rounds", 1, *settings)
    assert code == 0, stderr  # a refusal before training does not use the folder up


def test_clients_too_small_for_a_window_are_said_before_training(keyfed, corpus, tmp_path):
    code, _, stderr = keyfed("train", "--data", corpus, "--out", tmp_path / "run", "--set", "data.window=100000")
    assert code == 2
    assert "one window" in one_line(stderr)


def test_bad_files_are_skipped_counted_and_named(keyfed, corpus, tmp_path):
    (corpus / "empty.txt").write_text("")
    (corpus / "binary.txt").write_bytes(b"\x00\x01\x02" * 50)
    (corpus / "latin.txt").write_bytes("d\xe9j\xe0 vu ".encode("latin-1") * 50)
    settings = [item for s in TINY for item in ("--set", s)]
    code, _, stderr = keyfed("train", "--data", corpus, "--out", tmp_path / "run", "--rounds", 1, *settings)
    assert code == 0, stderr
    for name in ("empty.txt", "binary.txt", "latin.txt"):
        assert name in stderr


def test_help_does_not_import_torch():
    script = "import sys, keyfed.cli.app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("batches", ["sentences", "packed"])
def test_single_lines_are_trained_on_and_chosen_by(train_tiny, batches):
    folder, words = train_tiny(f"data.batches={batches}", "train.valid_tokens=none", rounds=2, name=batches)
    trained = load_model(folder)
    lines = evaluate_sentences(trained.spec, trained.params, prepare(trained.config).valid)
    best = min(record["valid"]["nats"] for record in read_metrics(folder))
    assert lines.mean_nats == pytest.approx(best, rel=1e-5), "chosen on what it learns from: single lines"
    assert words["test"]["perplexity"] > 1


@pytest.mark.parametrize("batches", ["stream", "packed"])
def test_characters_train_too(train_tiny, batches):
    _, characters = train_tiny(
        "model.name=char-lstm", "data.window=20", f"data.batches={batches}", rounds=2, name=f"characters-{batches}"
    )
    assert characters["vocabulary"] < 60
    assert 1 < characters["test"]["perplexity"] < 60


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        ("fedsgd", ()),
        ("fedavg", ("data.batches=sentences", "data.window=4")),
        ("fedavg", ("data.batches=packed",)),
        ("fedavg", ("epochs=2",)),
    ],
)
def test_central_training_has_the_budget_of_the_federation(train_tiny, method, extra):
    out, _ = train_tiny("train.central=true", "train.cohort=7", *extra, method=method, rounds=2)
    tokens = [
        sum(json.loads(line)["worked"] for line in (folder / "metrics.jsonl").read_text().splitlines())
        for folder in (out, out / "central")
    ]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.2)


def test_a_shortened_metrics_file_does_not_make_a_run_impossible_to_finish(train_tiny, keyfed):
    out, result = train_tiny(rounds=4)
    (out / "result.json").unlink()
    metrics = out / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-10])
    code, stdout, stderr = keyfed("train", "--resume", "--out", out, "--json")
    assert code == 0, stderr
    assert "is damaged" in stderr
    assert json.loads(stdout)["test"] == result["test"]


def test_a_run_can_be_evaluated_from_another_folder(corpus, keyfed, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    settings = [item for s in TINY for item in ("--set", s)]
    code, _, stderr = keyfed("train", "--data", "./corpus", "--out", tmp_path / "run", "--rounds", 1, *settings)
    assert code == 0, stderr
    monkeypatch.chdir("/")
    code, _, stderr = keyfed("evaluate", tmp_path / "run")
    assert code == 0, stderr


@pytest.mark.parametrize("damage", ["made", "device"])
def test_a_damaged_run_toml_is_one_line(train_tiny, keyfed, damage):
    out, _ = train_tiny(rounds=1)
    text = (out / "run.toml").read_text("utf-8")
    broken = text.replace("[made]", "[made_]") if damage == "made" else text.replace('device = "cpu"', "", 2)
    (out / "run.toml").write_text(broken, "utf-8")
    code, _, stderr = keyfed("train", "--resume", "--out", out)
    assert code == 2
    one_line(stderr)


def test_names_that_cannot_be_files_are_one_line(keyfed, corpus):
    code, _, stderr = keyfed("train", "--data", corpus, "--out", "x" * 300)
    assert code == 2
    one_line(stderr)


def test_text_that_cannot_be_held_out_is_said(keyfed, tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    for k in range(4):
        (folder / f"{k}.txt").write_text(" ".join(sentence(random.Random(k)) for _ in range(40)), "utf-8")
    settings = [item for s in TINY for item in ("--set", s)]
    code, _, stderr = keyfed("train", "--data", folder, "--out", tmp_path / "run", "--rounds", 1, *settings)
    assert code == 0, stderr
    assert "no held-out text" in stderr
    code, _, stderr = keyfed("conformance", tmp_path / "run")
    assert code == 2
    assert "no held-out text" in one_line(stderr)


def test_data_describe_prints_what_it_gives_as_json(keyfed, corpus):
    given = ("data", "describe", corpus, "--set", "data.vocab=60")
    code, text, err = keyfed(*given)
    assert code == 0, err
    found = json.loads(keyfed(*given, "--json")[1])
    assert found["clients"] == 7  # one of eight is unseen
    assert all(STATISTICS.get(key, key) in text for key in found)


def test_data_explore_prints_and_draws(keyfed, corpus, tmp_path):
    code, text, err = keyfed("data", "explore", corpus, "--out", tmp_path / "plots")
    assert code == 0, err
    found = json.loads(keyfed("data", "explore", corpus, "--out", tmp_path / "plots", "--json")[1])
    assert all(Path(plot).is_file() for plot in found["plots"])
    assert all(f"{key}: " in text for key in found)
