"""An exported folder is whole or refused; its n-gram file is the model, and pruned it is still a distribution."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from keyfed.errors import RunError
from keyfed.keyboard import bundle
from keyfed.keyboard.bundle import fit_small, ngram_from_bytes, ngram_to_bytes
from keyfed.model.ngram import fit_kneser_ney


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
    tamper(exported, lambda m: m.update(ngram=True))
    with pytest.raises(RunError, match=r"ngram\.safetensors is damaged"):
        bundle.check_bundle(exported)


VOCAB = 30


def streams(seed: int = 0, count: int = 4, length: int = 400) -> list[np.ndarray]:
    """Text of a chain in which some words follow others far more often."""
    draw = np.random.default_rng(seed)
    table = draw.dirichlet(np.full(VOCAB - 2, 0.15), VOCAB - 2)
    out = []
    for _ in range(count):
        words = [0]
        for _ in range(length):
            words.append(int(draw.choice(VOCAB - 2, p=table[words[-1]])))
        out.append(np.array(words, np.int32))
    return out


CONTEXTS = [[], [3], [29], [29, 4], [4, 29], [0, 1], [5, 5], [1, 2, 3, 4]]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_what_is_read_back_is_the_model_exactly(order):
    text = streams()
    model = fit_kneser_ney(text, VOCAB, order)
    single = lambda x: x.astype(np.float32).astype(np.float64)  # noqa: E731  # as it is stored
    rounded = replace(
        model,
        levels=tuple(replace(at, prob=single(at.prob), backoff=single(at.backoff)) for at in model.levels),
    )
    back = ngram_from_bytes(ngram_to_bytes(model), VOCAB, "here")
    for context in [*CONTEXTS, *(text[0][k : k + 2].tolist() for k in range(100))]:
        tokens = np.array(context, np.int64)
        assert np.array_equal(back.next(tokens), rounded.next(tokens))
        np.testing.assert_allclose(back.next(tokens), model.next(tokens), rtol=1e-6)
    assert np.array_equal(back.top(text[1], 3), rounded.top(text[1], 3))


def test_what_one_client_alone_wrote_is_not_in_the_file_however_often():
    text = [*streams(), np.array([28, 27, 28, 27, 28, 27, 28], np.int32)]  # the last one's own words
    small, least = fit_small(text, VOCAB)
    assert least == (1, 2, 2)
    for n in (2, 3):
        written: dict[tuple[int, ...], set[int]] = {}
        for who, stream in enumerate(text):
            for k in range(len(stream) - n + 1):
                written.setdefault(tuple(stream[k : k + n].tolist()), set()).add(who)
        assert len(small.levels[n - 1].keys) == sum(len(who) > 1 for who in written.values()) < len(written)


@pytest.mark.parametrize("most_bytes", [6_000_000, 5_000, 1_500])
def test_pruned_it_is_still_a_distribution_and_close_to_the_whole(most_bytes):
    text = streams()
    whole = fit_kneser_ney(text, VOCAB, 3)
    small, least = fit_small(text, VOCAB, most_bytes=most_bytes)
    data = ngram_to_bytes(small)
    assert len(data) <= most_bytes + 1_500  # and the header
    back = ngram_from_bytes(data, VOCAB, "here")
    held_out = streams(seed=0, count=5)[4]
    for context in [*CONTEXTS, *([a, b] for a in range(VOCAB) for b in range(VOCAB))]:
        p = back.next(np.array(context, np.int64))
        assert p.sum() == pytest.approx(1, abs=1e-5)
        assert p.min() > 0
    lost = back.nats(held_out).mean() - whole.nats(held_out).mean()
    assert abs(lost) < (0.2 if sum(least) < 5 else 1.5)


def test_a_context_of_a_trigram_that_stays_stays():
    small, _ = fit_small(streams(), VOCAB, most_bytes=1_500)
    for n in (1, 2):
        contexts = small.levels[n].keys // VOCAB
        assert not len(contexts) or contexts.max() < len(small.levels[n - 1].keys)


def test_no_text_is_uniform():
    model, _ = fit_small([], VOCAB)
    assert np.allclose(ngram_from_bytes(ngram_to_bytes(model), VOCAB, "here").next(np.array([1, 2])), 1 / VOCAB)


def test_damage_is_one_line():
    data = ngram_to_bytes(fit_small(streams(), VOCAB)[0])
    for bad, vocab in ((data[: len(data) // 2], VOCAB), (b"nonsense", VOCAB), (data, VOCAB // 2)):
        with pytest.raises(RunError, match=r"^here is damaged: [^\n]+$"):
            ngram_from_bytes(bad, vocab, "here")
