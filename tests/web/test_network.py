"""The network's step in JavaScript against PyTorch with the same weights, on whole texts and every preset."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from keyfed.keyboard.graph import torch_steps
from keyfed.model.language_model import PRESETS, ModelSpec, build_spec, init_params, quantise, widen
from keyfed.run.base import load_base
from keyfed.text.vocab import EOS

from .node_cases import answers, needs_node

pytestmark = needs_node

MOST = 1e-4  # nats
EVERYDAY = Path(__file__).parents[2] / "benchmarks" / "keyboard_everyday.json"
ODD = [  # widths that four rows and two columns do not divide, and what no preset has
    ModelSpec("odd", "cifg", vocab=41, embed=7, hidden=5, biases=1),
    ModelSpec("odd", "cifg", vocab=41, embed=7, hidden=9, layers=2, projection=7, tied=True),
    ModelSpec("odd", "gru", vocab=41, embed=7, hidden=7, layers=2, tied=True),
    ModelSpec("odd", "gru", vocab=41, embed=6, hidden=11, biases=1, dense=6, tied=True),
    ModelSpec("odd", "gru-printed", vocab=41, embed=6, hidden=11, layers=2),
    ModelSpec("odd", "lstm", vocab=41, embed=1, hidden=3, layers=3, dense=5),
]


def spec_and_weights(name, vocab, factor=4.0):
    spec = build_spec(name, vocab) if isinstance(name, str) else name
    return spec, {key: factor * p.numpy() for key, p in init_params(spec, 3).items()}


def read(folder, spec, stored, texts):
    """Return log-probabilities [texts, time, V] as node has them: alone, from the middle on, side by side.

    Tokens that come after one row of the states give, in one step, what each gives by itself.
    """
    path = folder / "weights.safetensors"
    path.write_bytes(save(stored))
    manifest = {"model": asdict(spec), "reading": "stream"}
    (found,) = answers([{"op": "network", "manifest": manifest, "path": str(path), "texts": texts.tolist()}])
    flat = {key: np.frombuffer(base64.b64decode(value), np.float32) for key, value in found.items()}
    rows, time = texts.shape
    assert found["forked"] == found["apart"]
    return (
        flat["alone"].reshape(rows, time, -1),
        flat["again"].reshape(rows, time - time // 2, -1),
        flat["together"].reshape(time, rows, -1).swapaxes(0, 1),
    )


def by_torch(spec, stored, texts):
    return np.stack(list(torch_steps(spec, widen(stored), texts)), 1)


@pytest.mark.parametrize(
    "name", [*PRESETS, *ODD], ids=lambda one: one if isinstance(one, str) else f"{one.cell}-{one.layers}"
)
def test_every_preset_says_what_pytorch_says(name, tmp_path):
    spec, weights = spec_and_weights(name, 300)
    texts = np.random.default_rng(1).integers(EOS, spec.vocab, (2, 20)).astype(np.int32)
    for stored in ({k: v.astype(np.float32) for k, v in weights.items()}, quantise(weights)):
        if spec.hidden > 1_000 and stored["embedding.weight"].dtype != np.int8:
            continue  # 55 MB: in eight bits only
        expected = by_torch(spec, stored, texts)
        alone, again, together = read(tmp_path, spec, stored, texts)
        assert np.abs(alone - expected).max() < MOST
        np.testing.assert_array_equal(again, alone[:, texts.shape[1] // 2 :])  # states are not changed by later steps
        np.testing.assert_array_equal(together, alone)
        assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 0.1  # the text matters


@pytest.mark.parametrize("name", ["cifg", "gru", "lstm"])
def test_a_text_is_read_with_the_output_layer_after_its_last_token_alone(name, tmp_path):
    spec, weights = spec_and_weights(name, 40)
    path = tmp_path / "weights"
    path.write_bytes(save({key: value.astype(np.float32) for key, value in weights.items()}))
    manifest = {"model": asdict(spec), "reading": "stream"}
    texts = [[2, 5, 6, 7], [2, 5, 6, 7, 9], [2, 5, 6], [2, 8, 9, 9]]
    (found,) = answers([{"op": "reading", "manifest": manifest, "path": str(path), "texts": texts}])
    assert found["costs"] == [[4, 1], [1, 1], [1, 1], [3, 1]]  # steps, and those with scores
    np.testing.assert_array_equal(found["read"], found["stepped"])


def test_the_base_model_on_everyday_messages(tmp_path):
    base = load_base()
    spec = base.trained.spec
    lines = json.loads(EVERYDAY.read_text("utf-8"))["trial"][::4]
    encoded = [base.trained.vocab.encode_context(line).tolist() for line in lines]
    stored = quantise({name: p.numpy() for name, p in base.trained.params.items()})
    length = max(map(len, encoded))
    texts = np.array([ids + [EOS] * (length - len(ids)) for ids in encoded], np.int32)  # what follows a message is EOS
    expected = by_torch(spec, stored, texts)
    alone, _, _ = read(tmp_path, spec, stored, texts)
    assert np.abs(alone - expected).max() < MOST
    assert (alone.argmax(-1) == expected.argmax(-1)).all()


def test_weights_that_are_not_the_models_are_refused(tmp_path):
    spec, weights = spec_and_weights("cifg", 60)
    manifest = {"model": asdict(spec)}
    ask = {"op": "network", "manifest": manifest, "path": str(tmp_path / "weights"), "texts": [[2]]}
    for wrong, what in (
        ({k: v for k, v in weights.items() if k != "output.bias"}, '"output.bias" is [undefined], expected [60]'),
        ({**weights, "more": np.zeros(2)}, '"more" is [2], expected [undefined]'),
        ({**weights, "rnn.bias_ih_l0": np.zeros(2)}, '"rnn.bias_ih_l0" is [2], expected [2010]'),
    ):
        (tmp_path / "weights").write_bytes(save({k: v.astype(np.float32) for k, v in wrong.items()}))
        assert answers([ask]) == [{"error": f"parameter {what}"}]
