"""A run that starts from another one."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import keyfed as library
from tests.end_to_end.conftest import TINY, write_corpus

OPTIONS = [part for setting in (*TINY, "train.baselines=false") for part in ("--set", setting)]
OWN: dict[str, Any] = {
    **{setting.partition("=")[0].replace(".", "_"): setting.partition("=")[2] for setting in TINY},
    "train_baselines": False,
}


def small_corpus(folder: Path) -> Path:
    """Another, smaller text with some of the same words in another order."""
    folder.mkdir()
    for k in range(4):
        lines = [f"the union remembers our {['house', 'garden', 'people'][(k + n) % 3]} again" for n in range(60)]
        (folder / f"poet{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The small corpus; no test here writes to it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory) -> Path:
    """A finished run on the large corpus; who changes it takes a copy."""
    out = tmp_path_factory.mktemp("runs") / "first"
    library.train(library.configure("fedavg", data=str(corpus), rounds=2, **OWN), out)
    return out


def test_weights_are_carried_by_word_and_said(keyfed, first, tmp_path):
    data, out = small_corpus(tmp_path / "poems"), tmp_path / "second"
    given = ("--data", data, "--rounds", 0, "--init", first, "--out", out)
    code, _, err = keyfed("train", "fedavg", *given, *OPTIONS)
    assert code == 0, err
    assert "matched by word" in err
    result = json.loads((out / "result.json").read_text("utf-8"))
    start = result["start"]
    here, there = (json.loads((f / "vocab.json").read_text("utf-8"))["words"] for f in (first, out))
    common = [w for w in there if w in here]
    assert (start["rows"], start["matched"]) == (len(there), len(common))
    assert len(common) < len(there)
    assert 0.5 < start["tokens"] < 1
    old, new = load_file(first / "model.safetensors"), load_file(out / "model.safetensors")
    for word in common:
        assert torch.equal(new["embedding.weight"][there.index(word)], old["embedding.weight"][here.index(word)]), word
    assert torch.equal(new["rnn.weight_hh_l0"], old["rnn.weight_hh_l0"])
    made = tomllib.loads((out / "run.toml").read_text("utf-8"))
    assert made["train"]["init"] == str(first.resolve())
    assert made["made"]["init_sha256"] == start["sha256"]


def test_the_embedding_alone_is_carried_where_asked(keyfed, first, tmp_path):
    """The rows of the embedding are those of a start from the whole run, all other layers those of a random start."""
    data = small_corpus(tmp_path / "poems")
    starts = {
        "alone": ("--init", first, "--set", "train.carry=embedding"),
        "whole": ("--init", first),
        "random": ("--init", "none"),
    }
    found = {}
    for name, given in starts.items():
        code, _, err = keyfed(
            "train", "fedavg", "--data", data, "--rounds", 0, "--out", tmp_path / name, *given, *OPTIONS
        )
        assert code == 0, err
        assert ("the embedding alone" in err) == (name == "alone")
        found[name] = load_file(tmp_path / name / "model.safetensors")
    for layer, weights in found["alone"].items():
        source = "whole" if layer == "embedding.weight" else "random"
        assert torch.equal(weights, found[source][layer]), layer
        assert layer.startswith("output") or not torch.equal(found["whole"][layer], found["random"][layer]), layer
    start = json.loads((tmp_path / "alone" / "result.json").read_text("utf-8"))["start"]
    assert start["carried"] == "embedding"


def test_on_the_same_text_the_start_is_the_model_itself(keyfed, first, corpus, tmp_path):
    out = tmp_path / "out"
    given = ("--data", corpus, "--rounds", 0, "--init", first, "--out", out)
    assert keyfed("train", "fedprox", *given, *OPTIONS)[0] == 0
    before, after = (json.loads((f / "result.json").read_text("utf-8")) for f in (first, out))
    assert after["start"]["tokens"] == 1
    assert after["test"]["perplexity"] == before["test"]["perplexity"]


def test_resume_goes_on_from_the_same_start_and_refuses_a_changed_one(keyfed, first, corpus, tmp_path):
    first, out = Path(shutil.copytree(first, tmp_path / "first")), tmp_path / "out"
    given = ("--data", corpus, "--rounds", 2, "--init", first, "--out", out)
    assert keyfed("train", "fedavg", *given, *OPTIONS)[0] == 0
    before = json.loads((out / "result.json").read_text("utf-8"))["start"]
    (out / "result.json").unlink()
    assert keyfed("train", "--resume", "--out", out)[0] == 0
    assert json.loads((out / "result.json").read_text("utf-8"))["start"] == before
    (out / "result.json").unlink()
    params = load_file(first / "model.safetensors")
    params["output.bias"] += 1
    save_file(params, first / "model.safetensors")
    code, _, err = keyfed("train", "--resume", "--out", out)
    assert code == 2
    assert "was started from another model: SHA-256" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--set", "model.hidden=13"), "hidden 12.*hidden 13"),
        (("--set", "model.tied=false"), "tied True.*tied False"),
        (("--set", "model.embed=9"), "embed 8.*embed 9"),
        (("--model", "gru-untied"), "cell cifg.*cell gru"),
        (("--model", "char-lstm"), "cell cifg.*cell lstm"),
    ],
)
def test_another_architecture_is_refused_in_one_line(keyfed, first, corpus, tmp_path, given, said):
    out = tmp_path / "out"
    code, _, err = keyfed("train", "fedavg", "--data", corpus, "--init", first, "--out", out, *OPTIONS, *given)
    assert code == 2
    assert re.search(said, err), err
    assert len(err.strip().splitlines()) == 1
    assert not (out / "run.toml").exists()


def test_what_is_no_run_or_is_not_read_is_refused(keyfed, corpus, tmp_path):
    code, _, err = keyfed("train", "fedavg", "--data", corpus, "--init", tmp_path / "none", "--out", tmp_path / "o")
    assert code == 2
    assert "expected a run folder, base or none" in err
    code, _, err = keyfed("train", "fedavg", "--data", corpus, "--set", "train.unmatched=mean", "--out", tmp_path / "p")
    assert code == 2
    assert "train.unmatched is mean, but no weights are carried; set train.init too" in err


def test_a_frozen_embedding_is_not_sent_up_and_starts_to_move_when_it_thaws(keyfed, first, corpus, tmp_path):
    given = ("--data", corpus, "--rounds", 3, "--init", first, "--set", "train.eval_every=3")
    models, ups, downs = {}, {}, {}
    for rounds in (0, 2, 3):
        out = tmp_path / f"frozen{rounds}"
        frozen = ("--set", f"train.frozen_rounds={rounds}")
        code, _, err = keyfed("train", "fedavg", *given, "--out", out, *OPTIONS, *frozen)
        assert code == 0, err
        said = [line for line in err.splitlines() if "frozen: the embedding, which is the output matrix too" in line]
        assert len(said) == (rounds > 0)
        models[rounds] = load_file(out / "model.safetensors")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
        ups[rounds], downs[rounds] = ([line["traffic"][way] for line in lines] for way in ("up", "down"))
    start = load_file(first / "model.safetensors")["embedding.weight"]
    assert torch.equal(models[3]["embedding.weight"], start)
    assert not torch.equal(models[2]["embedding.weight"], start)
    assert not torch.equal(models[3]["rnn.weight_hh_l0"], load_file(first / "model.safetensors")["rnn.weight_hh_l0"])
    rest = {name: p for name, p in models[3].items() if name != "embedding.weight"}
    assert ups[3] == [3 * len(save(rest))] * 3  # three clients a round
    assert ups[2] == [*ups[3][:2], ups[0][2]]
    assert downs[0] == downs[2] == downs[3]


def test_what_cannot_stay_frozen_is_refused(keyfed, corpus, tmp_path):
    given = ("--data", corpus, "--out", tmp_path / "out", *OPTIONS, "--set", "train.frozen_rounds=2")
    code, _, err = keyfed("train", "fedatt", *given, "--set", "noise=0.1")
    assert code == 2
    assert "fedatt's noise moves every layer" in err
    tiny = [part for setting in TINY if "." in setting.split("=")[0] for part in ("--set", setting)]
    given = ("--data", corpus, "--out", tmp_path / "out", *tiny, "--set", "train.frozen_rounds=2")
    code, _, err = keyfed("train", "fedadmm", *given)
    assert code == 2
    assert "clients of fedadmm send all their layers when they join" in err


def test_pretraining_on_half_of_the_clients_and_training_on_the_other(keyfed, corpus, tmp_path):
    half, rest = tmp_path / "half", tmp_path / "rest"
    tiny = [part for setting in TINY for part in ("--set", setting) if "train.cohort" not in setting]
    given = (
        "--data",
        corpus,
        "--rounds",
        1,
        "--seed",
        3,
        *tiny,
        "--set",
        "train.baselines=false",
        "--set",
        "train.cohort=2",
    )
    code, out, err = keyfed("pretrain", *given, "--out", half, "--set", "data.clients_part=1/2")
    assert code == 0, err
    assert f"keyfed train --init {half}" in out
    assert "part 1/2" in err
    code, _, err = keyfed("train", *given, "--out", rest, "--set", "data.clients_part=2/2", "--init", half)
    assert code == 0, err
    first, second = (json.loads((f / "result.json").read_text("utf-8")) for f in (half, rest))
    assert (first["method"], second["method"]) == ("central", "fednesterov")
    assert first["clients"] + second["clients"] == 7  # one of the eight is never trained on
    assert first["test"]["tokens"] == second["test"]["tokens"]
    assert second["start"]["run"] == str(half.resolve())
    other = ("--set", "data.clients_part=2/2", "--init", half, "--seed", 2)
    code, _, err = keyfed("train", *given, "--out", tmp_path / "other", *other)
    assert code == 2
    assert "is not disjoint from it, use the same seed" in err
    code, _, err = keyfed("train", *given, "--out", tmp_path / "other", "--set", "data.clients_part=3/2")
    assert code == 2
    assert 'data.clients_part is "3/2"' in err
