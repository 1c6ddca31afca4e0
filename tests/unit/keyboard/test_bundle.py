"""An exported folder is whole or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from keyfed.errors import RunError
from keyfed.keyboard import bundle


def tamper(folder, change):
    """Change the manifest as somebody who knows its format would."""
    path = folder / bundle.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def write(folder, name, data):
    """Change a file and its sum in the manifest."""
    (folder / name).write_bytes(data)
    tamper(folder, lambda m: m["files"].update({name: {"bytes": len(data), "sha256": bundle.sha256(data)}}))


def test_a_whole_export_is_accepted_and_its_weights_are_the_models(exported):
    manifest = bundle.check_bundle(exported)
    weights = bundle.load_weights(exported)
    assert {n: list(w.shape) for n, w in weights.items()} == {w["name"]: w["shape"] for w in manifest["weights"]}
    assert all(w.dtype == np.float32 for w in weights.values())
    vocab, forms = bundle.load_vocab(exported)
    assert len(vocab) == manifest["model"]["vocab"]
    assert forms == {}


@pytest.mark.parametrize("name", bundle.REQUIRED)
def test_a_missing_cut_or_changed_file(exported, name):
    path = exported / name
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(RunError, match=f"{name} is missing; export the run again"):
        bundle.check_bundle(exported)
    path.write_bytes(whole[:-1])
    with pytest.raises(RunError, match=f"{name} is damaged .*bytes, the manifest says"):
        bundle.check_bundle(exported)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RunError, match=f"{name} is damaged .*its sum"):
        bundle.check_bundle(exported)
    path.write_bytes(whole)
    bundle.check_bundle(exported)


def test_another_format_is_said(exported):
    tamper(exported, lambda m: m.update(format=2))
    with pytest.raises(RunError, match="format 2, this version of keyfed reads 1"):
        bundle.check_bundle(exported)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', "\x00"])
def test_a_damaged_manifest(exported, text):
    (exported / bundle.MANIFEST).write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        bundle.check_bundle(exported)


def test_no_export_at_all(tmp_path):
    with pytest.raises(RunError, match="is not an exported keyboard"):
        bundle.check_bundle(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "other.bin", ""])
def test_a_manifest_that_names_other_files_is_refused(exported, name):
    tamper(exported, lambda m: m["files"].update({name: m["files"][bundle.GRAPH]}))
    with pytest.raises(RunError, match="lists files that an export does not have"):
        bundle.check_bundle(exported)


def test_a_manifest_that_leaves_a_file_out_is_refused(exported):
    tamper(exported, lambda m: m["files"].pop(bundle.WEIGHTS))
    with pytest.raises(RunError, match=r"does not list weights\.safetensors"):
        bundle.check_bundle(exported)


@pytest.mark.parametrize("change", [{"hidden": 13}, {"cell": "gru"}, {"layers": 2}, {"vocab": 5}, {"hidden": "x"}])
def test_weights_that_do_not_fit_the_model(exported, change):
    tamper(exported, lambda m: m["model"].update(change))
    with pytest.raises(RunError, match="is damaged"):
        bundle.check_bundle(exported)


def test_a_layer_too_many_too_few_or_of_another_type(exported):
    whole = load((exported / bundle.WEIGHTS).read_bytes())
    wide = {name: value.astype(np.float32) for name, value in whole.items()}
    for wrong in (whole | {"more": np.zeros(1, np.float32)}, dict(list(whole.items())[1:]), wide):
        write(exported, bundle.WEIGHTS, save(wrong))
        with pytest.raises(RunError, match=r"weights\.safetensors is damaged"):
            bundle.check_bundle(exported)
    write(exported, bundle.WEIGHTS, b"nonsense")
    with pytest.raises(RunError, match="is damaged"):
        bundle.check_bundle(exported)


@pytest.mark.parametrize("key", ["run", "model", "precision", "ngram"])
def test_a_manifest_that_says_too_little(exported, key):
    tamper(exported, lambda m: m.pop(key))
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        bundle.check_bundle(exported)


def test_n_grams_that_are_none(exported):
    write(exported, bundle.NGRAM, b"nonsense")
    with pytest.raises(RunError, match="is listed"):
        bundle.check_bundle(exported)
    tamper(exported, lambda m: m.update(ngram=True, counts={}))
    with pytest.raises(RunError, match=r"ngram\.safetensors is damaged"):
        bundle.check_bundle(exported)
