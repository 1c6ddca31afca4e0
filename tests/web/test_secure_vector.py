"""A client's numbers in a secure sum, in JavaScript against Python's: words, distances, JSON."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from keyfed.engine.sums.secure_round import calibration_vector_of, evaluation_vector_of, vector_of
from keyfed.engine.task import Finished
from keyfed.errors import DoesNotFit, SecureSumOverflow
from keyfed.federated.distance import frobenius, spectral
from keyfed.federated.methods import build_method
from keyfed.federated.public.rules import privately
from keyfed.federated.spec import MethodSpec
from keyfed.model.output import Score

from .node_cases import answers, needs_node

pytestmark = needs_node

CASES = "training_cases.mjs"
LAYERS = {"embedding.weight": (23, 6), "rnn.weight_hh_l0": (12, 12), "rnn.bias_ih_l0": (12,), "output.bias": (23,)}
SCORE = Score(70, 123.456789, 9, 20, 50, 6, 14, 3)
METHODS = {  # a method's options, and how a page is told to weigh itself
    "fedavg": ({}, {"name": "tokens"}),
    "fedprox": ({}, {"name": "uniform"}),
    "fedatt": ({"temperature": 0.5, "bound": 30.0}, {"name": "distance", "temperature": 0.5, "bound": 30.0}),
}


def method_of(name):
    return privately(build_method(MethodSpec(name, METHODS[name][0])))


def done_of(rng, factor=0.02):
    upload = {
        name: torch.from_numpy((factor * rng.standard_normal(shape)).astype(np.float32))
        for name, shape in LAYERS.items()
    }
    upload["rnn.bias_ih_l0"].zero_()  # a layer that did not move
    distance = {name: float(d[0]) for name, d in spectral()({}, {n: u[None] for n, u in upload.items()}).items()}
    tokens = int(rng.integers(1, 400))
    return Finished(0, upload, float(rng.uniform(2, 9)), tokens, 3 * tokens, distance)


def public_of(method, rng):
    """Return public numbers as a run has them; ranges wide enough, sizes and caps where clients may be clamped."""
    rule = {"most": 2.0 ** rng.integers(3, 9)} if method.name == "fedavg" else {}
    if method.name == "fedatt":
        rule = {"caps": {name: float(rng.uniform(0, 2)) for name in LAYERS}}
    ranges = {name: int(rng.integers(-3, 2)) for name in LAYERS}
    return {"calibrated": True, "rule": rule, "ranges": ranges, "first": dict(ranges), "outside": 0}


def ask(folder, number, done, mediator, public, members, ratio, score=SCORE):
    path = folder / f"upload-{number}.safetensors"
    path.write_bytes(save({name: u.numpy() for name, u in done.upload.items()}))
    own = {"tokens": done.tokens, "worked": done.worked, "loss": done.loss, "layers": list(LAYERS)}
    return {
        "op": "vector", "path": str(path), "mediator": mediator, "public": public, "members": members, "ratio": ratio,
        "score": None if score is None else asdict(score), "done": {**own, "distance": done.distance},
    }  # fmt: skip


def words(text):
    return np.frombuffer(base64.b64decode(text), np.uint32)


def test_vectors_are_pythons_word_for_word(tmp_path):
    rng = np.random.default_rng(3)
    rounds = []
    for name in METHODS:
        method = method_of(name)
        for members, ratio in ((3, 2), (4, 3), (5, 16), (1, 1), (64, 16), (32768, 16)):
            score = None if members == 4 else SCORE
            rounds.append((method, done_of(rng), public_of(method, rng), members, ratio, score))
    asked = [
        ask(tmp_path, n, done, METHODS[method.name][1], public, members, ratio, score)
        for n, (method, done, public, members, ratio, score) in enumerate(rounds)
    ]
    found = answers(asked, script=CASES)
    clamps = 0
    for (method, done, public, members, ratio, score), page in zip(rounds, found, strict=True):
        theta = {name: torch.zeros_like(u) for name, u in done.upload.items()}
        expected = vector_of("a", done, theta, method, public, members, ratio, score)
        np.testing.assert_array_equal(words(page["upload"]), expected)
        first = calibration_vector_of("a", done, theta, method, members)
        np.testing.assert_array_equal(words(page["calibration"]), first)
        if score is not None:
            np.testing.assert_array_equal(words(page["evaluation"]), evaluation_vector_of(score, members))
        stacked = {name: u[None] for name, u in done.upload.items()}
        for norm, mine in ((spectral(), page["distance"]), (frobenius(), page["frobenius"])):
            for name, d in norm(theta, stacked).items():
                assert mine[name] == pytest.approx(float(d[0]), rel=1e-6, abs=1e-300)
        clamps += int(expected[-1])
    assert 0 < clamps < len(rounds) * 2**15  # some clients are clamped, and some are not


def test_what_does_not_fit_is_not_written(tmp_path):
    rng = np.random.default_rng(4)
    method = method_of("fedavg")
    public = public_of(method, rng) | {"ranges": dict.fromkeys(LAYERS, -20)}
    broken = public_of(method, rng)
    wide, odd, weightless = done_of(rng), done_of(rng), done_of(rng)._replace(tokens=0)
    odd.upload["output.bias"][3] = math.nan
    tokens = {"name": "tokens"}
    asked = [
        ask(tmp_path, 0, wide, tokens, public, 4, 3), ask(tmp_path, 1, odd, tokens, broken, 4, 3),
        ask(tmp_path, 2, weightless, tokens, broken, 4, 3), ask(tmp_path, 3, wide, {"name": "fixed"}, broken, 4, 3),
        ask(tmp_path, 4, wide, tokens, broken, 40_000, 3),
        ask(tmp_path, 5, wide._replace(loss=math.inf, tokens=2**33), tokens, broken, 4, 3),
    ]  # fmt: skip
    asked[5]["done"]["loss"] = 1e300  # what JSON has of an infinite loss
    said = [answer["error"] for answer in answers(asked, script=CASES)]
    assert "beyond the public range 2**-20" in said[0]
    assert "not finite" in said[1]
    assert "scale of 0" in said[2]
    assert 'weigh itself by "fixed"' in said[3]
    assert "sum of 40000 clients" in said[4]
    assert "tokens is 8589934592" in said[5]
    theta = {name: torch.zeros_like(u) for name, u in wide.upload.items()}
    for done, numbers, error in (
        (wide, public, SecureSumOverflow),
        (odd, broken, DoesNotFit),
        (weightless, broken, DoesNotFit),
    ):
        with pytest.raises(error):
            vector_of("a", done, theta, method, numbers, 4, 3)


def test_json_is_read_with_its_numbers_as_written_and_written_as_python_writes_it():
    values = [
        {"b": [1.0, 2, 1e-7, -0.0, 1e22, 2**53 - 1], "a": {"é": "\u2028\U0001f600\x7f\"\\/\n", "": None}},
        {"public": {"rule": {"most": 64.0}, "ranges": {"x": -3}}, "calibrated": True},
        [], {}, "x", [[[]]], {"\uffee": 1, "\U0001f600": 2},
    ]  # fmt: skip
    texts = [json.dumps(value) for value in values] + [json.dumps(v, ensure_ascii=False, indent=1) for v in values]
    (found,) = answers([{"op": "json", "texts": texts}], script=CASES)
    for value, page in zip([*values, *values], found, strict=True):
        assert page["written"] == json.dumps(value, sort_keys=True)
        assert page["plain"] == value


def test_json_that_is_none_or_too_much_is_refused():
    texts = [
        "", "{", "[1,]", '{"a":1,}', '{"a":1,"a":2}', "NaN", "Infinity", "01", "1.", "+1", "'a'", '"\n"', '"a', "1 2",
        "1" * 41, "1e999", "[" * 14 + "]" * 14, "[" + "0," * 1000 + "0]", '{"a" 1}', "tru", '"\\x"', "{1:2}",
    ]  # fmt: skip
    (found,) = answers([{"op": "json", "texts": texts}], script=CASES)
    for text, page in zip(texts, found, strict=True):
        assert "no JSON of ours" in page.get("error", ""), text
