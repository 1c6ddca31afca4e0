"""A client's round in JavaScript against Python's on the same text and seed: seeds, batches, dropout, steps."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from keyfed.engine.problem import Problem, TextObjective, make_store
from keyfed.federated.cohort import derive_seed
from keyfed.federated.descent import SgdRule, descend, sgd
from keyfed.model.language_model import ModelSpec, init_params, stack
from keyfed.text.batches import Batching, epoch_steps, limit_text
from keyfed.text.vocab import EOS

from .node_cases import answers, needs_node

pytestmark = needs_node

CASES = "training_cases.mjs"
SPECS = [
    ModelSpec("odd", "cifg", vocab=41, embed=7, hidden=9, projection=7, tied=True, biases=1),
    ModelSpec("odd", "cifg", vocab=41, embed=6, hidden=5, layers=2),
    ModelSpec("odd", "lstm", vocab=41, embed=5, hidden=8, layers=2, dense=6, biases=1),
    ModelSpec("odd", "lstm", vocab=41, embed=7, hidden=9, projection=7, tied=True),
    ModelSpec("odd", "gru", vocab=41, embed=7, hidden=7, layers=2, tied=True),
    ModelSpec("odd", "gru", vocab=41, embed=6, hidden=9, biases=1),
    ModelSpec("odd", "gru-printed", vocab=41, embed=6, hidden=9, layers=2),
    ModelSpec("odd", "gru-printed", vocab=41, embed=6, hidden=6, tied=True, biases=1),
]
CUTS = [Batching("packed", 3, 5), Batching("stream", 3, 5, max_tokens=70)]
TASK = (11, 2, "ann")  # seed of the run, round, client


def text_of(seed, tokens, vocab=41):
    """Return lines of some words each, an EOS behind every one but the last."""
    rng = np.random.default_rng(seed)
    words = rng.integers(EOS + 2, vocab, tokens)
    words[rng.random(tokens) < 0.2] = EOS
    return words.astype(np.int32)


def cut_of(batching):
    return {"kind": batching.kind, "rows": batching.rows, "window": batching.window, "maxTokens": batching.max_tokens}


def test_seeds_and_digests():
    rng = np.random.default_rng(0)
    texts = ["", "a", "ü" * 64, "x" * 128, "y" * 129, *("z" * int(n) for n in rng.integers(0, 700, 20))]
    asked = [{"op": "digest", "text": text, "size": size} for text in texts for size in (1, 8, 64)]
    expected = [list(hashlib.blake2b(c["text"].encode(), digest_size=c["size"]).digest()) for c in asked]
    names = [[0], [3, "ann", "order", 1], ["ann"], ["日本", 2**40, -5]]
    seeds = [0, 1, 2**31, 2**32, 2**61 + 7, *rng.integers(0, 2**62, 5).tolist()]
    drawn = [(one, [("permutation", 9), ("integer", 5), ("permutation", 300), ("integer", 2**31)]) for one in seeds]
    more = [{"op": "seed", "seed": str(one), "parts": some} for one in seeds for some in names]
    most = [{"op": "draws", "seed": str(one), "sizes": sizes} for one, sizes in drawn]
    found = answers([*asked, *more, *most], script=CASES)
    assert found[: len(asked)] == expected
    wanted = [str(derive_seed(one, *some)) for one in seeds for some in names]
    assert found[len(asked) : len(asked) + len(more)] == wanted
    for (one, sizes), mine in zip(drawn, found[len(asked) + len(more) :], strict=True):
        generator = np.random.default_rng(one)
        numpys = [
            int(generator.integers(0, n)) if what == "integer" else generator.permutation(n).tolist()
            for what, n in sizes
        ]
        assert mine == numpys


def test_batches_are_those_of_python():
    cuts = [*CUTS, Batching("packed", 8, 4, max_tokens=50), Batching("stream", 1, 20), Batching("packed", 1, 3)]
    texts = [text_of(n, tokens) for n, tokens in enumerate((0, 1, 2, 9, 80, 301))]
    asked = [(text, cut, 2**40 + n) for n, text in enumerate(texts) for cut in cuts]
    found = answers(
        [{"op": "batches", "stream": t.tolist(), "cut": cut_of(cut), "seed": str(seed)} for t, cut, seed in asked],
        script=CASES,
    )
    for (text, cut, seed), mine in zip(asked, found, strict=True):
        steps = epoch_steps(limit_text(text, cut, seed), cut, seed, 0)
        assert len(mine) == len(steps)
        for step, one in zip(steps, mine, strict=True):
            assert [one["rows"], one["time"]] == list(step.inputs.shape)
            assert one["fresh"] == step.fresh
            for key in ("inputs", "targets", "mask"):
                assert one[key] == getattr(step, key).ravel().astype(int).tolist()


def by_python(spec, params, text, batching, rule, epochs, dtype):
    """Return the weights after the round and the last epoch's loss, from the engine that trains everywhere else."""
    seed, round, name = TASK
    problem = Problem(spec, make_store([text], [name]), batching, seed)
    theta = {key: p.to(dtype) for key, p in params.items()}
    objective = TextObjective(problem, [0], round, batching.rows, epochs=epochs)
    local, tally = descend(sgd(rule, lambda round: 0.5, epochs), stack(theta, 1), theta, objective, round)
    solution = tally.solution({}, objective)
    return {key: w[0].numpy() for key, w in local.items()}, solution


def ask(folder, number, spec, params, text, batching, rule, epochs, dtype):
    path = folder / f"theta-{number}.safetensors"
    path.write_bytes(save({key: p.to(dtype).numpy() for key, p in params.items()}))
    seed, round, name = TASK
    local = {
        **cut_of(batching), "epochs": epochs, "lr": 0.5, "clip": rule.clip, "momentum": rule.momentum,
        "weightDecay": rule.weight_decay, "mu": rule.mu, "dropout": spec.dropout,
    }  # fmt: skip
    task = {"seed": str(seed), "round": round, "client": name}
    return {
        "op": "train",
        "path": str(path),
        "model": asdict(spec),
        "stream": text.tolist(),
        "local": local,
        "task": task,
    }


RULES = [SgdRule(0.0, 0.25, 0.0, 0.0), SgdRule(0.9, None, 0.01, 0.1)]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["float64", "float32"])
def test_a_round_of_every_cell_equals_the_engines(dtype, most, tmp_path):
    rounds = [
        (replace(spec, dropout=dropout), {k: 3 * p for k, p in init_params(spec, 3, torch.float64).items()}, cut, rule)
        for spec in SPECS
        for cut in CUTS
        for rule, dropout in zip(RULES, (0.3, 0.0), strict=True)
    ]
    text = text_of(5, 120)
    asked = [
        ask(tmp_path, n, spec, params, text, cut, rule, 2, dtype) for n, (spec, params, cut, rule) in enumerate(rounds)
    ]
    for (spec, params, cut, rule), mine in zip(rounds, answers(asked, script=CASES), strict=True):
        weights, solution = by_python(spec, params, text, cut, rule, 2, dtype)
        assert mine["isKept"]
        assert mine["seen"][-1][0] == 1
        assert mine["loss"] == pytest.approx(float(solution.loss[0]), rel=most)
        assert [mine["tokens"], mine["worked"]] == [float(solution.tokens[0]), float(solution.worked[0])]
        assert mine["weights"].keys() == weights.keys()
        for name, expected in weights.items():
            found = np.frombuffer(base64.b64decode(mine["weights"][name]), expected.dtype).reshape(expected.shape)
            moved = np.abs(expected - params[name].numpy()).max()
            assert np.abs(found - expected).max() <= most * np.abs(expected).max(), (spec, name)
            assert moved > 10 * most, name  # every parameter learns something


def test_a_cut_that_the_page_does_not_have_is_refused():
    (found,) = answers(
        [{"op": "batches", "stream": [5, 6, 2], "cut": {"kind": "pairs", "rows": 1, "window": 1}, "seed": "1"}],
        script=CASES,
    )
    assert found == {"error": 'text cannot be cut as "pairs" here; expected stream or packed'}
