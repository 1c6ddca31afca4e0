"""The step graph in onnxruntime is the network in torch; they are compared on text as the model reads it."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.keyboard.graph import (
    LINE,
    OPSET,
    ROWS,
    STEPS,
    StepRunner,
    sample_tokens,
    state_widths,
    step_graph,
    torch_steps,
)
from keyfed.model.language_model import PRESETS, ModelSpec, build_spec, init_params, shapes
from keyfed.text.vocab import BOS, EOS
from tests.unit.keyboard.conftest import needs_onnx

VOCAB = 41


def small(name: str) -> ModelSpec:
    tied = PRESETS[name].tied
    square = tied and PRESETS[name].projection is None and PRESETS[name].dense is None
    return build_spec(name, VOCAB, embed=10, hidden=10 if square else 14)


OTHERS = {
    "gru, one bias": ModelSpec("gru", "gru", VOCAB, 10, 14, biases=1),
    "gru, three layers, dense": ModelSpec("gru", "gru", VOCAB, 10, 14, layers=3, dense=10, tied=True),
    "cifg, no projection": ModelSpec("cifg", "cifg", VOCAB, 10, 14, biases=1),
    "cifg, two layers, two biases": ModelSpec("cifg", "cifg", VOCAB, 10, 14, layers=2, projection=10, tied=True),
    "lstm, tied": ModelSpec("lstm", "lstm", VOCAB, 14, 14, tied=True),
}


@needs_onnx
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("spec", [*map(small, PRESETS), *OTHERS.values()], ids=[*PRESETS, *OTHERS])
def test_a_rollout_equals_torch(spec, rows):
    weights = {name: 4 * p.numpy() for name, p in init_params(spec, 1).items()}  # large enough for gates to saturate
    weights["output.bias"] = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (rows, 30)).astype(np.int32)
    runner = StepRunner(step_graph(spec).SerializeToString(), weights, spec)
    state = runner.start(rows)
    for t, expected in enumerate(torch_steps(spec, weights, tokens)):
        logp, state = runner.step(tokens[:, t], state)
        assert logp.shape == (rows, VOCAB)
        np.testing.assert_allclose(logp, expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(np.exp(logp.astype(np.float64)).sum(1), 1, atol=1e-5)


@needs_onnx
def test_the_context_is_used_and_rows_do_not_mix():
    spec = small("cifg")
    weights = {name: 4 * p.numpy() for name, p in init_params(spec, 1).items()}
    runner = StepRunner(step_graph(spec).SerializeToString(), weights, spec)
    _, state = runner.step(np.array([5, 6], np.int32), runner.start(2))
    logp, _ = runner.step(np.array([7, 7], np.int32), state)
    assert np.abs(logp[0] - logp[1]).max() > 1e-3
    _, alone = runner.step(np.array([5], np.int32), runner.start(1))
    np.testing.assert_allclose(runner.step(np.array([7], np.int32), alone)[0][0], logp[0], atol=1e-6)


@needs_onnx
def test_inputs_and_outputs_are_those_of_the_contract():
    spec = build_spec("lstm", VOCAB, embed=10, hidden=14)
    graph = step_graph(spec)
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", OPSET)]
    assert state_widths(spec) == {"h0": 14, "c0": 14, "h1": 14, "c1": 14}
    assert [i.name for i in graph.graph.input] == ["token", "h0", "c0", "h1", "c1", *shapes(spec)]
    assert [o.name for o in graph.graph.output] == ["logp", "h0_next", "c0_next", "h1_next", "c1_next"]
    assert not any(node.op_type in ("Transpose", "MatMul") for node in graph.graph.node)
    assert len(graph.SerializeToString()) < 10_000  # no weights inside


def people(count: int, lines: int, length: int) -> dict[str, np.ndarray]:
    """Streams in which every token follows its neighbour."""
    draw = np.random.default_rng(0)
    return {
        f"{n}": np.concatenate([[*(10 + draw.integers(900) + np.arange(length - 1)), EOS] for _ in range(lines)])
        for n in range(count)
    }


def test_running_text_of_thousands_is_text_and_not_their_first_words():
    tokens, real = sample_tokens(people(3000, 4, 20), 1000)
    assert real
    assert tokens.shape == (ROWS, STEPS)
    follows = (np.diff(tokens, axis=1) == 1) | (tokens[:, 1:] == EOS)
    assert follows.mean() > 0.9


def test_a_model_of_lines_is_compared_on_lines():
    tokens, real = sample_tokens(people(3000, 4, 20), 1000, lines=True)
    assert real
    assert tokens.shape == (ROWS * STEPS // (LINE + 1), LINE + 1)
    assert (tokens[:, 0] == BOS).all()
    assert (np.diff(tokens[:, 1:], axis=1) == 1).all()


def test_too_little_text_is_made_up_and_said():
    for lines in (False, True):
        for streams in ({}, {"a": np.array([5, EOS])}):
            tokens, real = sample_tokens(streams, 50, lines=lines)
            assert not real
            assert tokens.min() >= EOS
            assert tokens.max() < 50
