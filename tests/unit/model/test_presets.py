"""Published architectures have exactly their published numbers of parameters."""

from __future__ import annotations

import pytest
import torch

from keyfed.errors import ConfigError, ShapeMismatch
from keyfed.model.language_model import check_params, init_params, parameter_count, shapes
from keyfed.model.presets import PRESETS, build_spec, preset


def count(name: str, vocab: int, **changes) -> int:
    return parameter_count(build_spec(name, vocab, **changes))


@pytest.mark.parametrize(
    ("name", "vocab", "want"),
    [
        ("gru", 10_001, 3_552_101),
        ("gru-untied", 10_001, 6_552_401),
        ("lstm", 10_001, 9_417_101),
        ("nwp-small", 10_004, 2_402_072),
        ("nwp-large", 10_004, 7_831_328),
        ("nwp-reddi", 10_004, 4_050_748),
        ("cifg", 10_000, 1_422_250),
    ],
)
def test_published_counts(name, vocab, want):
    assert count(name, vocab) == want


@pytest.mark.parametrize(("name", "width"), [("gru", 300), ("gru-medium", 650), ("gru-large", 1500)])
def test_fedatt_sizes(name, width):
    gates = 3 * width * (width + width) + 2 * 3 * width
    assert count(name, 10_001) == 10_001 * width + gates + 10_001
    assert count(f"{name}-untied", 10_001) == 2 * 10_001 * width + gates + 10_001


def test_character_models():
    # embedding, four gates with two biases, output
    assert count("char-lstm", 100) == 100 * 64 + 4 * 256 * (64 + 256 + 2) + 100 * 257
    assert round(count("char-lstm", 100) / 1e6, 2) == 0.36
    assert count("char-lstm-2", 100) - count("char-lstm", 100) == 4 * 256 * (256 + 256 + 2)
    assert count("leaf-char", 80) == 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 80 * 257
    assert preset("char-lstm").window == 100
    assert preset("leaf-char").window == 80
    assert {name for name, p in PRESETS.items() if p.characters} == {"char-lstm", "char-lstm-2", "leaf-char"}


def test_a_cifg_has_a_quarter_fewer_gate_weights_than_an_lstm():
    ours = shapes(build_spec("cifg", 10_000))
    assert ours["rnn.weight_ih_l0"] == (3 * 670, 96)
    assert ours["rnn.weight_hh_l0"] == (3 * 670, 96)
    assert ours["rnn.weight_hr_l0"] == (96, 670)
    assert "rnn.bias_hh_l0" not in ours
    assert "output.weight" not in ours


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("vocab", [50, 500])
def test_counts_are_those_of_the_tensors_drawn(name, vocab):
    spec = build_spec(name, vocab, hidden=16, embed=16)
    params = init_params(spec, seed=1)
    assert list(params) == list(shapes(spec))
    assert sum(p.numel() for p in params.values()) == parameter_count(spec)
    check_params(spec, params, "test")
    assert ("output.weight" in params) != spec.tied
    assert all(torch.isfinite(p).all() for p in params.values())


def test_tied_and_untied_differ_by_one_matrix():
    assert count("gru", 1000, tied=False) - count("gru", 1000) == 1000 * 300
    assert count("gru-untied", 1000, tied=True) == count("gru", 1000)
    assert count("cifg", 1000, tied=False) - count("cifg", 1000) == 1000 * 96
    assert count("nwp-small", 1000) - count("nwp-small", 1000, tied=True) == 1000 * 100


def test_the_embeddings_width_is_followed_by_what_must_have_it():
    assert build_spec("gru", 100, embed=8).hidden == 8
    cifg = build_spec("cifg", 100, embed=8, hidden=12)
    assert (cifg.embed, cifg.projection, cifg.hidden) == (8, 8, 12)
    assert build_spec("cifg", 100, embed=8).hidden == 670
    assert build_spec("cifg", 100, hidden=12).projection == 96
    lstm = build_spec("lstm", 100, embed=8, layers=3)
    assert (lstm.embed, lstm.hidden, lstm.layers) == (8, 400, 3)


def test_a_dense_layer_follows_the_embedding_when_the_output_is_tied():
    spec = build_spec("nwp-small", 100, tied=True, embed=8)
    assert (spec.embed, spec.dense, spec.hidden) == (8, 8, 256)


def test_overrides_are_taken_over():
    spec = build_spec("lstm", 100, dropout=0.3, hidden=12, layers=1, embed=12, tied=True)
    assert (spec.dropout, spec.hidden, spec.layers, spec.embed, spec.tied) == (0.3, 12, 1, 12, True)
    assert spec.name == "lstm"
    assert spec.vocab == 100


def test_a_tied_output_of_another_width_is_refused_in_words():
    with pytest.raises(ShapeMismatch, match=r"tied output needs width 300.*the last layer has 400"):
        build_spec("lstm", 100, tied=True)
    with pytest.raises(ShapeMismatch, match="needs width 8"):
        build_spec("gru", 100, embed=8, hidden=12)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r'model "nwp-smal" is not known \(did you mean nwp-small\?\)'):
        build_spec("nwp-smal", 100)


def test_each_tensor_has_its_own_generator():
    one = init_params(build_spec("lstm", 50, hidden=8, embed=8), seed=1)
    other = init_params(build_spec("lstm", 50, hidden=8, embed=8, layers=3), seed=1)
    for name, p in one.items():
        assert torch.equal(p, other[name])
    again = init_params(build_spec("lstm", 50, hidden=8, embed=8), seed=2)
    assert all(not torch.equal(p, again[name]) for name, p in one.items() if name != "output.bias")
    assert not one["output.bias"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("output.bias"), '"output.bias" is missing'),
        (lambda p: p.update(extra=torch.zeros(2)), '"extra" is .*no such layer'),
        (lambda p: p.update({"output.bias": torch.zeros(3)}), r'"output.bias" is \[3\], model "gru" has \[50\]'),
    ],
)
def test_foreign_parameters_are_refused_by_name(change, message):
    spec = build_spec("gru", 50, embed=8)
    params = init_params(spec, seed=1)
    change(params)
    with pytest.raises(ShapeMismatch, match=message):
        check_params(spec, params, "file.safetensors")
