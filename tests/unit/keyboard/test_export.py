"""An export appears whole, says what it is, and is refused where it would not say what the network says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import keyfed.keyboard.export as exporting
from keyfed.errors import RunError
from keyfed.keyboard import bundle
from keyfed.keyboard.export import export_run, export_text, model_sum, written_forms
from keyfed.keyboard.graph import MOST, StepRunner
from keyfed.model.language_model import (
    build_spec,
    init_params,
    parameter_count,
    quantise,
)
from keyfed.run.folder import load_model
from keyfed.text.vocab import SPECIALS, Vocab


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["gru", "cifg", "nwp-small", "char-lstm-2"])
def test_the_folder_of_the_contract(make_run, name, int8):
    run = make_run(name)
    done = export_run(run, int8=int8)
    assert done.out == run / "keyboard"
    manifest = json.loads((done.out / "manifest.json").read_text())
    assert manifest == done.manifest == bundle.check_bundle(done.out)
    assert sorted(p.name for p in done.out.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    assert manifest["precision"] == ("int8" if int8 else "fp32")
    assert manifest["run"]["model_sha256"] == model_sum(run)
    assert manifest["run"]["data"] == "gone.txt"  # not the path, which says where somebody's files lie
    assert manifest["ngram"] is False
    assert manifest["parity"]["most"] <= MOST
    assert "random tokens" in export_text(done)
    assert "gone.txt" in done.notes[0]


def test_the_vectors_are_what_the_graph_says(make_run):
    done = export_run(make_run("lstm"), int8=True)
    spec = bundle.spec_of(done.manifest)
    runner = StepRunner((done.out / "model.onnx").read_bytes(), bundle.load_weights(done.out), spec)
    vectors = json.loads((done.out / "vectors.json").read_text())
    for step in vectors["steps"]:
        state = runner.start(1)
        for token in step["tokens"]:
            logp, state = runner.step(np.array([token], np.int32), state)
        assert len(step["ids"]) == 16
        np.testing.assert_allclose(logp[0][step["ids"]], step["logp"], atol=MOST)
        assert step["top"] == step["ids"][:3]
        assert logp[0][step["top"][2]] >= np.sort(logp[0])[-3] - MOST
    vocab, _ = bundle.load_vocab(done.out)
    assert [vocab.encode_context(e["text"]).tolist() for e in vectors["encode"]] == [
        e["ids"] for e in vectors["encode"]
    ]


def test_fp32_weights_are_the_runs_own_bits(make_run):
    run = make_run("gru")
    weights = bundle.load_weights(export_run(run, int8=False).out)
    trained = load_model(run).params
    assert all(np.array_equal(weights[name], value.numpy()) for name, value in trained.items())


def test_an_export_replaces_an_export_and_nothing_else(make_run, tmp_path):
    run, out = make_run(), tmp_path / "out"
    export_run(run, out)
    before = (out / "weights.safetensors").read_bytes()
    make_run(seed=2)
    export_run(run, out)
    assert (out / "weights.safetensors").read_bytes() != before
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for taken in (other, other / "thesis.txt", run):
        with pytest.raises(RunError, match="is not an exported keyboard; choose another --out"):
            export_run(run, taken)
    assert (other / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    export_run(run, tmp_path / "empty")
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_graph_that_says_something_else_is_refused_and_nothing_is_left(make_run, monkeypatch, tmp_path):
    run = make_run("gru")
    export_run(run, tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    honest = exporting.step_graph

    def swapped(spec):  # the update gate the wrong way round
        graph = honest(spec)
        node = next(n for n in graph.graph.node if n.op_type == "Sub")
        node.input[0], node.input[1] = node.input[1], node.input[0]
        return graph

    monkeypatch.setattr(exporting, "step_graph", swapped)
    for target in (tmp_path / "out", tmp_path / "fresh"):
        with pytest.raises(RunError, match=r"^[^\n]*differs from the trained network by [^\n]*nothing was written$"):
            export_run(run, target)
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_a_module_of_the_users_is_refused_by_name(make_run):
    with pytest.raises(RunError, match=r"module their\.Net; only the models of the package can be exported: gru, "):
        export_run(make_run(made={"module": "their.Net"}))


def test_what_cannot_be_exported_is_one_line(make_run, tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        export_run(tmp_path)
    run = make_run()
    weights = load_file(run / "model.safetensors")
    save_file({**weights, "output.bias": torch.full_like(weights["output.bias"], torch.nan)}, run / "model.safetensors")
    with pytest.raises(RunError, match="not finite"):
        export_run(run)
    (run / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has no model\.safetensors: the run is not finished"):
        export_run(run)


def test_the_size_of_gboards_model():
    from safetensors.numpy import save

    spec = build_spec("cifg", 10_000)
    assert parameter_count(spec) == 1_422_250
    stored = save(quantise({name: p.numpy() for name, p in init_params(spec, 1).items()}))
    assert len(stored) <= 1_600_000
    assert len(exporting.step_graph(spec).SerializeToString()) < 5_000


LOOKALIKES = {
    "an extension": {"manifest.json": '{"manifest_version": 3}', "thesis.txt": "years"},
    "a bare manifest": {"manifest.json": "{}"},
}


@pytest.mark.parametrize("what", LOOKALIKES)
def test_a_folder_that_only_looks_like_an_export_is_left_alone(make_run, tmp_path, what):
    target = tmp_path / "extension"
    target.mkdir()
    for name, text in LOOKALIKES[what].items():
        (target / name).write_text(text)
    with pytest.raises(RunError, match="is not an exported keyboard"):
        export_run(make_run(), target)
    assert {p.name: p.read_text() for p in target.iterdir()} == LOOKALIKES[what]


def vocab_of(*words: str, **options) -> Vocab:
    return Vocab("word", (*SPECIALS, *words), **{"lower": True, "tokenised": False} | options)


def test_the_most_frequent_form_that_two_clients_write():
    clients = [["in Paris and PARIS", "in Paris"], ["to Paris, nasa"], ["from NASA"], ["about NASA"]]
    assert written_forms(clients, vocab_of("paris", "nasa", "in")) == {"paris": "Paris", "nasa": "NASA"}


def test_what_one_person_alone_writes_is_not_shipped_however_often():
    clients = [["my LoVe is my LoVe", "oh LoVe oh LoVe"], ["the love"]]
    assert written_forms(clients, vocab_of("love")) == {}
    assert written_forms([*clients, ["this LoVe"]], vocab_of("love")) == {"love": "LoVe"}


@pytest.mark.parametrize("line", ["However it is", "it is. However it is", 'so? "However it is', "(However it is"])
def test_the_start_of_a_sentence_says_nothing(line):
    assert written_forms([[line], [line]], vocab_of("however", "it", "is", "so")) == {}


def test_at_equal_counts_the_word_itself():
    assert written_forms([["a Bank", "a bank"], ["a Bank", "a bank"]], vocab_of("bank", "a")) == {}


def test_only_words_of_a_lower_cased_word_vocabulary():
    lines = [["in Paris"], ["in Paris"]]
    assert written_forms(lines, vocab_of("london")) == {}
    assert written_forms(lines, vocab_of("paris", lower=False)) == {}
    assert written_forms(lines, Vocab("char", (*SPECIALS, "p"), lower=True, tokenised=False)) == {}
    assert written_forms([["in Paris ."], ["in Paris ."]], vocab_of("paris", tokenised=True)) == {"paris": "Paris"}
