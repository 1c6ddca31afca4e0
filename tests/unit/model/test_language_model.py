"""The dropout mask is a function of (client seed, step, site, place) and of nothing else.

Eight bits a weight: the bound, the borders, and the file back again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from keyfed.model.language_model import (
    Dropout,
    apply_dropout,
    keep_mask,
    mix,
    quantise,
    quantise_rows,
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
