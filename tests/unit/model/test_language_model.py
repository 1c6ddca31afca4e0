"""Published architectures have exactly their published numbers of parameters.

The dropout mask is a function of (client seed, step, site, place) and of nothing else.

Eight bits a weight: the bound, the borders, and the file back again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from keyfed.errors import ConfigError, ShapeMismatch
from keyfed.model.language_model import (
    PRESETS,
    Dropout,
    apply_dropout,
    build_spec,
    check_params,
    init_params,
    keep_mask,
    mix,
    parameter_count,
    preset,
    quantise,
    quantise_rows,
    shapes,
    widen,
    widen_rows,
)

CPU = torch.device("cpu")


def mask(rate: float, seeds: list[int], step: int, site: int, time: int, batch: int, width: int) -> torch.Tensor:
    shape = torch.Size((len(seeds), time, batch, width))
    return keep_mask(Dropout(rate, torch.tensor(seeds), step), site, shape, CPU)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("site", [0, 1, 2])
def test_the_rate_is_the_nominal_one_everywhere(rate, site):
    dropped = 1 - mask(rate, [1, 2**61 + 7], 3, site, 20, 10, 250).double()
    sigma = (rate * (1 - rate)) ** 0.5
    assert dropped.mean().item() == pytest.approx(rate, abs=4 * sigma / dropped.numel() ** 0.5)
    for dims in [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:  # by client, time, row, unit
        means = dropped.mean(dims)
        assert (means - rate).abs().max() < 6 * sigma / (dropped.numel() / means.numel()) ** 0.5


def test_neighbours_are_not_correlated():
    first = mask(0.5, [9, 10], 1, 0, 30, 20, 100).double() - 0.5
    bound = 5 * 0.25 / first.numel() ** 0.5
    for dim in range(4):
        last = first.shape[dim] - 1
        near = (first.narrow(dim, 0, last) * first.narrow(dim, 1, last)).mean()
        assert abs(near) < 2 * bound
    later = mask(0.5, [9, 10], 2, 0, 30, 20, 100).double() - 0.5
    other = mask(0.5, [9, 10], 1, 1, 30, 20, 100).double() - 0.5
    assert abs((first * later).mean()) < bound
    assert abs((first * other).mean()) < bound


@settings(max_examples=30, deadline=None)
@given(
    time=st.integers(1, 9),
    batch=st.integers(1, 5),
    width=st.integers(1, 7),
    more_time=st.integers(0, 9),
    more_rows=st.integers(0, 5),
    seed=st.integers(0, 2**62 - 1),
    step=st.integers(0, 10**6),
    site=st.integers(0, 5),
)
def test_padding_in_time_and_batch_changes_nothing(time, batch, width, more_time, more_rows, seed, step, site):
    small = mask(0.4, [seed], step, site, time, batch, width)
    large = mask(0.4, [seed], step, site, time + more_time, batch + more_rows, width)
    assert torch.equal(small, large[:, :time, :batch])


@settings(max_examples=30, deadline=None)
@given(seeds=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=5), step=st.integers(0, 10**6))
def test_a_client_drops_the_same_units_in_any_block(seeds, step):
    together = mask(0.4, seeds, step, 1, 4, 3, 5)
    for k, seed in enumerate(seeds):
        assert torch.equal(together[k], mask(0.4, [seed], step, 1, 4, 3, 5)[0])


@pytest.mark.parametrize("other", [([5], 2, 0), ([5], 1, 1), ([6], 1, 0), ([5 + 2**32], 1, 0), ([5 + 2**61], 1, 0)])
def test_steps_sites_and_seeds_have_masks_of_their_own(other):
    one = mask(0.5, [5], 1, 0, 10, 4, 16)
    two = mask(0.5, *other, 10, 4, 16)
    assert 0.4 < (one != two).double().mean().item() < 0.6


def fmix32(h: int) -> int:
    """MurmurHash3's finaliser, in whole numbers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def kept(seed: int, step: int, site: int, t: int, row: int, unit: int, width: int, rate: float) -> bool:
    """One unit's fate, written without tensors: the same on every machine."""
    key = fmix32(fmix32(fmix32(seed & 0xFFFFFFFF) ^ (seed >> 32)) ^ (step * 64 + site))
    place = (row * 65536 + t) * width + unit
    return fmix32(fmix32((place & 0xFFFFFFFF) ^ key) ^ (place >> 32)) >= int(rate * 2**32)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**62 - 1),
    step=st.integers(0, 10**6),
    site=st.integers(0, 5),
    width=st.sampled_from([1, 3, 50_000]),
    rate=st.floats(0.01, 0.99),
)
def test_the_mask_is_the_hash_of_the_place(seed, step, site, width, rate):
    found = mask(rate, [seed], step, site, 3, 4, width)[0]  # the widest has places beyond 32 bits
    for t, row, unit in [(0, 0, 0), (2, 3, width - 1), (1, 2, width // 2), (2, 0, 0), (0, 3, 0)]:
        assert bool(found[t, row, unit]) == kept(seed, step, site, t, row, unit, width, rate)


def test_mix_is_murmurs_finaliser_and_a_bijection():
    values = [0, 1, 2, 12345, 2**16, 2**31, 2**32 - 1]
    assert mix(torch.tensor(values)).tolist() == [fmix32(v) for v in values]
    some = torch.arange(0, 2**32, 65_521)
    assert mix(some).unique().numel() == some.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_are_dropped_or_scaled(dtype):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    drop = Dropout(0.3, torch.tensor([1, 2]), 1)
    keep = keep_mask(drop, 1, x.shape, CPU)
    y = apply_dropout(x, drop, 1)
    assert y.dtype == dtype
    torch.testing.assert_close(y, torch.where(keep, x / (1 - 0.3), 0.0), rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert apply_dropout(x, None, 1) is x
    assert apply_dropout(x, drop._replace(rate=0.0), 1) is x


matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-1e3, 1e3, width=32))


@settings(deadline=None, max_examples=60)
@given(matrices)
def test_the_error_is_at_most_half_a_step_of_the_row(matrix):
    q, scale = quantise_rows(matrix)
    assert q.dtype == np.int8
    assert np.abs(q.astype(int)).max() <= 127
    error = np.abs(widen_rows(q, scale).astype(np.float64) - matrix)
    bound = scale[:, None] / 2 + 1e-5 * np.abs(matrix) + 1e-37
    assert (error <= bound).all()


def test_a_row_uses_its_whole_range_and_zeros_stay_zero():
    matrix = np.array([[0.1, -0.2], [1000.0, 1.0], [0.0, 0.0]], np.float32)
    q, scale = quantise_rows(matrix)
    assert np.abs(q.astype(int)).max(1).tolist() == [127, 127, 0]
    assert scale[2] == 0
    assert widen_rows(q, scale)[2].tolist() == [0, 0]


def test_vectors_stay_as_they_are_and_widening_knows_both_precisions():
    params = {"a.weight": np.eye(3, dtype=np.float32), "a.bias": np.array([0.123, 4, 5], np.float32)}
    stored = quantise(params)
    assert sorted(stored) == ["a.bias", "a.weight", "a.weight.scale"]
    assert stored["a.bias"].tolist() == params["a.bias"].tolist()
    wide = widen(stored)
    assert sorted(wide) == ["a.bias", "a.weight"]
    np.testing.assert_allclose(wide["a.weight"], np.eye(3), atol=1e-6)
    assert all(np.array_equal(widen(params)[name], params[name]) for name in params)


def test_widening_what_was_quantised_and_quantising_again_changes_nothing():
    matrix = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    q, scale = quantise_rows(matrix)
    again, _ = quantise_rows(widen_rows(q, scale))
    assert np.array_equal(q, again)


def count(name: str, vocab: int, **changes) -> int:
    return parameter_count(build_spec(name, vocab, **changes))


@pytest.mark.parametrize(
    ("name", "vocab", "want"),
    [
        ("gru", 10_001, 3_552_101),
        ("gru-untied", 10_001, 6_552_401),
        ("gru-printed", 10_001, 3_551_201),
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
    lstm = shapes(build_spec("lstm-projected", 10_000))
    assert list(lstm) == list(ours)
    for name, shape in ours.items():  # a quarter of the gates, and nothing else
        gate = name.startswith(("rnn.weight_ih", "rnn.weight_hh", "rnn.bias"))
        assert lstm[name] == ((shape[0] // 3 * 4, *shape[1:]) if gate else shape)
    assert count("lstm-projected", 10_000) == 1_422_250 + 670 * (96 + 96 + 1)


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
