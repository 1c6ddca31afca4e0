"""A page's look at a new model against Python's evaluation of the same text."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from safetensors.numpy import save

from keyfed.model.language_model import ModelSpec, init_params
from keyfed.run.evaluate import evaluate_sentences, evaluate_together
from keyfed.text.vocab import EOS, UNK

from .node_cases import answers, needs_node

pytestmark = needs_node

SPEC = ModelSpec("odd", "cifg", vocab=41, embed=7, hidden=9, layers=2, projection=7, tied=True)


def lines_of(seed, count):
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(EOS + 2, 41, rng.integers(1, 9)), EOS).astype(np.int32) for _ in range(count)]


def model(seed, factor=3.0):
    return {name: factor * p for name, p in init_params(SPEC, seed).items()}


def looked(folder, current, following, lines, is_lines=True, is_alike=True):
    paths = []
    for number, params in enumerate((current, following)):
        paths.append(folder / f"{number}.safetensors")
        paths[-1].write_bytes(save({name: p.numpy() for name, p in params.items()}))
    stream = np.concatenate(lines).tolist() if lines else []
    case = {"op": "look", "model": asdict(SPEC), "current": str(paths[0]), "next": str(paths[1]), "isAlike": is_alike}
    return answers([{**case, "stream": stream, "isLines": is_lines}], script="training_cases.mjs")[0]


def test_nats_hits_and_their_spread_are_those_of_python(tmp_path):
    current, following, lines = model(1), model(2), lines_of(3, 30)
    found = looked(tmp_path, current, following, lines)
    sizes = np.array([len(line) for line in lines])
    nats = []
    for params, name in ((current, "before"), (following, "after")):
        score = evaluate_sentences(SPEC, params, {"own": np.concatenate(lines)})
        assert found[name]["nats"] == pytest.approx(score.nats / score.tokens, rel=1e-5)
        assert found[name]["top3"] == pytest.approx(score.words_top3 / (score.words + score.unknown))
        each = [evaluate_sentences(SPEC, params, {"own": line}).nats for line in lines]
        nats.append(np.array(each))
        assert found["tokens"] == score.tokens == sizes.sum()
    moved = nats[1] - nats[0]
    mean = moved.sum() / sizes.sum()
    error = np.sqrt(30 / 29 * ((moved - mean * sizes) ** 2).sum()) / sizes.sum()
    assert found["difference"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert found["error"] == pytest.approx(error, rel=1e-4)
    assert [found["lines"], found["isEnough"]] == [30, True]
    assert found["isWorse"] is bool(mean > 2 * error)


def test_models_of_other_vocabularies_are_compared_by_their_words(tmp_path):
    """Words that a model lacks are missed; the paired differences are those of every line's hits."""
    current, following, lines = model(1), model(2), lines_of(6, 20)
    lines[3][0] = UNK
    found = looked(tmp_path, current, following, lines, is_alike=False)
    words = np.array([len(line) - 1 for line in lines])
    hits = [
        np.array([evaluate_sentences(SPEC, params, {"own": line}).words_top3 for line in lines])
        for params in (current, following)
    ]
    missed = hits[0] - hits[1]
    mean = missed.sum() / words.sum()
    error = np.sqrt(20 / 19 * ((missed - mean * words) ** 2).sum()) / words.sum()
    assert found["difference"] == pytest.approx(mean)
    assert found["error"] == pytest.approx(error)
    assert found["before"]["top3"] == pytest.approx(hits[0].sum() / words.sum())
    assert found["isWorse"] is bool(mean > 2 * error)


def test_a_stream_is_read_as_one(tmp_path):
    current, following, lines = model(1), model(2), lines_of(4, 9)
    found = looked(tmp_path, current, following, lines, is_lines=False)
    for params, name in ((current, "before"), (following, "after")):
        score = evaluate_together(SPEC, params, {"own": np.concatenate(lines)}, "cpu")
        assert found[name]["nats"] == pytest.approx(score.nats / score.tokens, rel=1e-5)
        assert found[name]["top3"] == pytest.approx(score.words_top3 / score.words)
        assert found["tokens"] == score.tokens


def test_a_model_is_worse_only_beyond_the_noise_of_the_text(tmp_path):
    lines = lines_of(5, 25)
    good, wild = model(1, 0.1), model(1, 12.0)
    assert looked(tmp_path, good, wild, lines)["isWorse"] is True
    assert looked(tmp_path, wild, good, lines)["isWorse"] is False
    same = looked(tmp_path, good, good, lines)
    assert [same["difference"], same["error"], same["isWorse"]] == [0, 0, False]
    few = looked(tmp_path, good, wild, lines[:4])
    assert [few["lines"], few["isEnough"], few["isWorse"]] == [4, False, False]
    broken = {**good, "output.bias": good["output.bias"] * float("nan")}
    assert looked(tmp_path, good, broken, lines[:4])["isWorse"] is True  # however little text
    assert "no own text" in looked(tmp_path, good, wild, [])["error"]
