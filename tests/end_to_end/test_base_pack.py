"""From a run to the folder of the base model: what is rounded, what manifest and card say, what is not packed."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import keyfed as library
from keyfed.errors import RunError
from keyfed.keyboard import export
from keyfed.model.language_model import quantise, widen
from keyfed.run import base as base_module
from keyfed.run.base import CARD, FILES, MANIFEST, MOST_BYTES, load_base
from keyfed.run.folder import read_result
from keyfed.run.prepare import prepare
from tests.base_model import LICENCE, NAME, SETTINGS, make_base, write_lines

pytestmark = pytest.mark.usefixtures("made")  # a small base stands for that of the package


def result_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text("utf-8"))


def test_packing_rounds_once_and_loses_nothing_else(made):
    base, trained = load_base(), library.load_model(made / "run")
    whole = {name: value.numpy() for name, value in trained.params.items()}
    for name, value in widen(quantise(whole)).items():
        assert np.array_equal(base.trained.params[name].numpy(), value), name
        if value.ndim == 2:
            step = np.abs(whole[name]).max(axis=1, keepdims=True) / 127
            assert (np.abs(value - whole[name]) <= step / 2 + 1e-6).all()
        else:
            assert np.array_equal(value, whole[name])
    assert base.trained.vocab == trained.vocab
    assert base.trained.spec == replace(trained.spec, dropout=0.0)
    assert base.trained.reads_lines
    assert sum((made / "base" / name).stat().st_size for name in (MANIFEST, CARD, *FILES)) <= MOST_BYTES
    for found in base.manifest["figures"].values():
        assert found["int8"]["perplexity"] == pytest.approx(found["fp32"]["perplexity"], rel=0.01)
    assert base.manifest["figures"]["test"]["fp32"]["perplexity"] == pytest.approx(
        result_of(made / "run")["test"]["perplexity"], rel=1e-5
    )


def test_manifest_and_card_say_what_it_is_and_nothing_of_the_machine(made):
    base = load_base()
    card = (made / "base" / CARD).read_text("utf-8")
    assert card == export.card_text(base.manifest)
    corpus = prepare(library.configure("central", data=str(made / "corpus"), **SETTINGS)).corpus
    assert base.manifest["data"]["sha256"] == corpus.fingerprint()
    for said in (NAME, LICENCE, base.sha256, corpus.fingerprint()):
        assert said in card
    everything = b"".join((made / "base" / name).read_bytes() for name in (MANIFEST, CARD, *FILES))
    assert str(made).encode() not in everything
    assert base.manifest["data"]["licence"] == LICENCE
    weights = (made / "run" / "model.safetensors").read_bytes()
    assert base.manifest["training"]["model_sha256"] == hashlib.sha256(weights).hexdigest()


def test_what_cannot_be_a_base_is_not_packed(made, corpus, tmp_path):
    other = tmp_path / "other"
    library.train(library.configure("central", data=str(corpus), rounds=0, **SETTINGS), other)
    for about, extra, said in (
        ("text of a friend (all rights reserved)", {}, "names no licence"),
        ("", {}, "names no licence"),
        (f"text ({LICENCE})", {"model": "char-lstm", "model_hidden": 8, "model_embed": 8}, "preset of words"),
        (f"text ({LICENCE})", {"train_init": str(other)}, "no finished run from scratch on the same corpus"),
        (f"text ({LICENCE})", {"train_init": "base"}, "started from the base model"),
    ):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        with pytest.raises(RunError, match=said):
            make_base(root, about, **extra)
        assert not (root / "base").exists()


def test_a_run_on_the_mended_text_of_the_same_corpus_says_what_was_before(made, tmp_path):
    folder = make_base(tmp_path, rounds=0, train_init=str(made / "run"), train_unmatched="mean")
    base, first = load_base(folder), load_base(made / "base")
    before = base.manifest["training"]["before"]
    assert before["model_sha256"] == first.manifest["training"]["model_sha256"]
    assert before["data_sha256"] == first.manifest["data"]["sha256"]
    assert str(made) not in (folder / MANIFEST).read_text("utf-8")
    assert set(base.manifest["figures"]) == {"valid", "test"}
    assert set(first.manifest["figures"]) == {"valid", "test", "unseen"}
    assert "an earlier text of the same corpus" in (folder / CARD).read_text("utf-8")
    assert "an earlier text" not in (made / "base" / CARD).read_text("utf-8")
    for name, value in first.trained.params.items():  # the same text: the same words
        assert torch.allclose(base.trained.params[name], value, atol=1e-6), name


def test_the_command_wants_a_folder_of_its_own(keyfed, made, tmp_path, monkeypatch):
    code, _, err = keyfed("export", made / "run", "--base")
    assert (code, "give --out" in err) == (2, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", "utf-8")
    monkeypatch.setattr(export, "with_data", lambda run, module, text: pytest.fail("asked before the folder"))
    code, _, err = keyfed("export", made / "run", "--base", "--out", tmp_path / "mine")
    assert (code, "holds something else" in err) == (2, True)


def test_a_private_run_is_not_packed_under_a_card_that_says_otherwise(made, tmp_path, monkeypatch):
    trained = library.load_model(made / "run")
    noised = replace(trained.config, privacy=replace(trained.config.privacy, noise=1.0))
    monkeypatch.setattr(export, "with_data", lambda *given, **more: (replace(trained, config=noised), None))
    with pytest.raises(RunError, match="trained with differential privacy"):
        export.pack_base(made / "run", tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_file_too_large_is_not_written(made, tmp_path, monkeypatch):
    monkeypatch.setattr(base_module, "MOST_BYTES", 100_000)
    with pytest.raises(RunError, match="bytes, at most 100,000"):
        make_base(tmp_path)
    assert not (tmp_path / "base").exists()


def test_more_lines_than_fit_are_thinned_evenly(made, monkeypatch):
    prepared = prepare(library.configure("central", data=str(made / "corpus"), **SETTINGS))
    every, whole = export.own_lines(prepared)
    assert every == 1
    monkeypatch.setattr(export, "LINES_BYTES", len(whole) // 3)
    every, fewer = export.own_lines(prepared)
    assert every >= 4
    assert 0 < len(fewer) <= len(whole) // 3
    assert set(np.frombuffer(fewer, "<u4")) < set(np.frombuffer(whole, "<u4"))


def test_the_rounds_trained_and_the_round_chosen_are_told_apart(made, monkeypatch, tmp_path):
    assert read_result(made / "run")["rounds"] == load_base().manifest["training"]["rounds"] == 2
    ended = {**read_result(made / "run"), "rounds": 450, "best_round": 325, "tokens_trained": 20_864_233}
    monkeypatch.setattr(export, "read_result", lambda run: ended)
    folder = make_base(tmp_path)
    said = load_base(folder).manifest["training"]
    assert (said["rounds"], said["best_round"], said["tokens"]) == (450, 325, 20_864_233)
    card = (folder / CARD).read_text("utf-8")
    assert "450 rounds trained, 20,864,233 tokens read in them" in card
    assert "the model of round 325 was chosen on validation text" in card
    assert "325 rounds" not in card


def test_authors_and_tokens_are_those_that_were_trained_on(made):
    data, card = load_base().manifest["data"], (made / "base" / CARD).read_text("utf-8")
    prepared = prepare(library.configure("central", data=str(made / "corpus"), **SETTINGS))
    trained, unseen = len(prepared.store), len(prepared.population.unseen)
    assert (data["clients"], data["trained_clients"], data["unseen_clients"]) == (8, trained, unseen)
    assert trained + unseen <= 8
    assert unseen > 0
    assert data["training_tokens"] == sum(prepared.store.tokens(k) for k in range(trained))
    assert f"{data['training_tokens']:,} tokens of {trained} of them" in card
    assert f"{unseen} authors were held out" in card
    assert "Validation and test text are the ends of the authors' own texts." in card


def long_lines(texts) -> set[str]:
    return {line.lower() for text in texts for line in text if sum(map(str.isalpha, line.split())) >= 5}


def test_placeholders_and_held_out_lines_that_were_read_are_counted(made, tmp_path):
    ours = [f"{a} likes the {b} in the morning" for a in "abcdefgh" for b in "ijklm"]
    lines = [*ours, "see <unk> or ask <unk> at noon please", "SHARED lines are read by all of us", "short one <unk>"]
    folder = write_lines(tmp_path / "same", [*lines, *(f"{n} only the {n} writer" for n in "nopq"), *ours[:9]])
    prepared = prepare(library.configure("central", data=str(folder), **SETTINGS), text=True)
    found, people = export.count_splits(prepared), prepared.population
    texts = {
        "train": [c.train for c in people.clients],
        "valid": [c.valid for c in people.clients],
        "test": [c.test for c in people.clients],
        "unseen": [c.test for c in people.unseen],
    }
    assert not prepared.excluded
    trained = long_lines(texts["train"])
    for part, own in texts.items():
        count = Counter(word for text in own for line in text for word in line.split())
        mine = long_lines(own)
        assert found[part] == {"placeholders": count["<unk>"], "lines": len(mine), "shared": len(mine & trained)}, part
    assert found["train"]["placeholders"] > 0
    assert found["test"]["shared"] > 0


def test_the_card_says_of_placeholders_and_shared_lines_what_the_manifest_has(made):
    manifest = load_base().manifest
    parts = {part: {"placeholders": 1_000 + k, "lines": 2_000 + k, "shared": 3_000 + k}
             for k, part in enumerate(("train", "valid", "test", "unseen"))}  # fmt: skip
    card = export.card_text({**manifest, "data": {**manifest["data"], "parts": parts}})
    for row in ("| validation | 1,001 | 2,001 | 3,001 |", "| authors never trained on | 1,003 | 2,003 | 3,003 |"):
        assert row in card
    assert re.search(
        r"read as `<unk>`: it is never suggested, figures of words leave it out, and\s+perplexity counts", card
    )
    assert "has not been trained on" not in card
    assert "English" not in card  # nothing that the manifest does not say
