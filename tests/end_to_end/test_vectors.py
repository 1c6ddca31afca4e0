"""A run whose embedding starts from word vectors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import TINY

OPTIONS = [part for setting in (*TINY, "train.baselines=false") for part in ("--set", setting)]
KNOWN = ("the", "president", "farmer", "river", "helps", "calls", "road", "union", "again", "fear", "every", "day")


def write_vectors(path: Path, width: int, *more: str) -> np.ndarray:
    rows = np.random.default_rng(1).normal(size=(len(KNOWN), width)).astype(np.float32)
    lines = [f"{word} {' '.join(repr(float(x)) for x in row)}" for word, row in zip(KNOWN, rows, strict=True)]
    path.write_text("\n".join([*lines, *more]) + "\n", "utf-8")
    return rows


def test_vectors_fill_the_rows_of_their_words_and_are_said(keyfed, corpus, tmp_path):
    file, out = tmp_path / "glove.txt", tmp_path / "run"
    rows = write_vectors(file, 8, "again 1 2 3 4 5 6 7 8", "broken 1 2")
    code, _, err = keyfed("train", "fedavg", "--data", corpus, "--rounds", 0, "--vectors", file, "--out", out, *OPTIONS)
    assert code == 0, err
    assert "12 of" in err
    assert "matched by word" in err
    assert "1 duplicates, 1 wrong dimension" in err
    words = json.loads((out / "vocab.json").read_text("utf-8"))["words"]
    table = load_file(out / "model.safetensors")["embedding.weight"]
    for word, row in zip(KNOWN, rows, strict=True):
        assert torch.equal(table[words.index(word)], torch.from_numpy(row)), word
    start = json.loads((out / "result.json").read_text("utf-8"))["start"]
    assert start["from"] == "random"
    assert (start["vectors"]["matched"], start["vectors"]["reduced"]) == (12, None)
    assert 0 < start["vectors"]["tokens"] < 1
    assert "word vectors glove.txt" in (out / "report.md").read_text("utf-8")


def test_wider_vectors_are_reduced_and_the_variance_is_plotted(keyfed, corpus, tmp_path):
    file = tmp_path / "wide.txt"
    write_vectors(file, 11)
    for number, how in enumerate((["vectors.reduce=pca"], ["vectors.reduce=pp-pca-pp", "vectors.remove=2"])):
        out = tmp_path / f"run{number}"
        settings = [part for setting in how for part in ("--set", setting)]
        given = ("--data", corpus, "--rounds", 1, "--vectors", file, "--vectors-dim", 8, "--out", out)
        code, _, err = keyfed("train", "fedavg", *given, *OPTIONS, *settings)
        assert code == 0, err
        assert "11 → 8 numbers by" in err
        assert (out / "plots" / "vectors.png").exists()
        about = json.loads((out / "result.json").read_text("utf-8"))["start"]["vectors"]
        assert len(about["explained"]) == 8
        assert len(about["removed"]) == 2 * number


def test_a_run_with_vectors_resumes_and_refuses_others(keyfed, corpus, tmp_path):
    file, out = tmp_path / "glove.txt", tmp_path / "run"
    write_vectors(file, 8)
    given = ("train", "fedavg", "--data", corpus, "--rounds", 2, "--vectors", file, "--out", out, *OPTIONS)
    assert keyfed(*given)[0] == 0
    assert len(tomllib.loads((out / "run.toml").read_text("utf-8"))["made"]["vectors_sha256"]) == 64
    (out / "result.json").unlink()
    code, _, err = keyfed("train", "--resume", "--out", out)
    assert code == 0, err
    (out / "result.json").unlink()
    write_vectors(file, 8, "house 1 2 3 4 5 6 7 8")
    code, _, err = keyfed("train", "--resume", "--out", out)
    assert code == 2
    assert "was started from other word vectors" in err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--vectors-dim", "9"], "vectors.dim is 9, and the embedding of cifg is 8 wide"),
        (["--set", "model.embed=20", "--set", "model.tied=false"], "20"),
        (["--set", "vectors.remove=3"], "which pp-pca-pp reads"),
        (["--model", "char-lstm"], "reads characters"),
    ],
)
def test_what_makes_no_sense_is_one_line(keyfed, corpus, tmp_path, settings, said):
    file = tmp_path / "glove.txt"
    write_vectors(file, 8)
    given = ("--data", corpus, "--rounds", 1, "--vectors", file, "--out", tmp_path / "run")
    code, _, err = keyfed("train", "fedavg", *given, *OPTIONS, *settings)
    assert code == 2, err
    assert said in err
    assert "Traceback" not in err


def test_options_of_vectors_without_a_file_are_refused(keyfed, corpus, tmp_path):
    given = ("--data", corpus, "--rounds", 1, "--vectors-dim", 8, "--out", tmp_path / "run")
    code, _, err = keyfed("train", "fedavg", *given, *OPTIONS)
    assert code == 2
    assert "set vectors.file too" in err


def test_a_run_that_is_refused_leaves_no_folder(keyfed, corpus, tmp_path):
    out = tmp_path / "run"
    code, _, err = keyfed("train", "--data", corpus, "--vectors", tmp_path / "nothing.txt", "--out", out, *OPTIONS)
    assert code == 2
    assert "no such file" in err
    assert not out.exists()
