"""Compressed uploads: what is sent, what the server reads, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec
from keyfed.federated.upload import codec, from_int8, largest, to_int8
from keyfed.run.metrics_line import model_bytes, sizes_of, upload_bytes


def upload(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(40, 30, generator=random), "b": torch.randn(17, generator=random)}


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_nothing_to_compress_is_no_codec():
    assert codec() is None
    for wrong in (0.0, -1.0, 1.1):
        with pytest.raises(ConfigError, match=r"upload\.keep"):
            codec(keep=wrong)
    with pytest.raises(ConfigError, match=r'upload\.quantise is "int4"'):
        codec(quantise="int4")


@pytest.mark.parametrize(
    ("keep", "quantise"), [(1.0, "fp16"), (1.0, "int8"), (0.1, "none"), (0.1, "fp16"), (0.1, "int8")]
)
def test_what_is_read_has_the_same_shapes_and_is_near(keep, quantise):
    made, sent = codec(keep, quantise), upload()
    packed = made.pack(sent, dice())
    read = made.unpack(packed, sent)
    assert {n: (t.shape, t.dtype) for n, t in read.items()} == {n: (t.shape, t.dtype) for n, t in sent.items()}
    for name, u in sent.items():
        kept = read[name] != 0
        step = u.abs().max() / 127 if quantise == "int8" else 1e-3 * u.abs().max()
        assert float((read[name] - u)[kept].abs().max()) <= float(step)
        if keep < 1:
            assert int(kept.sum()) <= -(-int(keep * 1000) * u.numel() // 1000)
            assert float(u[kept].abs().min()) >= float(u[~kept].abs().max()) - float(step)


def test_top_k_sends_the_largest_and_the_rest_is_zero():
    u = torch.tensor([[0.0, -5.0, 1.0], [2.0, -0.5, 0.25]])
    assert largest(u, 0.5).tolist() == [1, 2, 3]
    assert largest(u, 0.01).tolist() == [1]
    made = codec(keep=0.5)
    assert made.feedback
    assert made.unpack(made.pack({"u": u}, dice()), {"u": u})["u"].tolist() == [[0.0, -5.0, 1.0], [2.0, 0.0, 0.0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.integers(0, 1000))
def test_eight_bits_are_never_off_by_more_than_a_step(numbers, seed):
    values = torch.tensor(numbers)
    q, scale = to_int8(values, dice(seed))
    assert q.dtype == torch.int8
    back = from_int8(q, scale, torch.float32)
    assert float((back - values).abs().max()) <= float(scale) * (1 + 1e-4)


def test_stochastic_rounding_is_unbiased_row_by_row():
    values = torch.tensor([[0.3, -1.0, 0.004], [300.0, -1000.0, 4.0]])
    mean = sum(from_int8(*to_int8(values, dice(seed)), torch.float32) for seed in range(4000)) / 4000
    step = values.abs().amax(1, keepdim=True) / 127
    assert bool(((mean - values).abs() < 0.05 * step).all())
    zero = torch.zeros(3, 2)
    assert torch.equal(from_int8(*to_int8(zero, dice()), torch.float32), zero)


def test_bytes_are_those_of_the_serialised_file():
    theta = {n: t * 0.1 for n, t in upload().items()}
    numbers = 40 * 30 + 17
    plain = build_method(MethodSpec("fedavg"))
    assert upload_bytes(plain, theta) == model_bytes(theta)
    half = sizes_of(build_method(MethodSpec("fedavg", quantise="fp16")), theta)
    assert half.down == model_bytes(theta)
    assert 2 * numbers < half.up < 2 * numbers + 300
    eight = sizes_of(build_method(MethodSpec("fedavg", quantise="int8")), theta)
    assert numbers + 4 * 41 < eight.up < numbers + 4 * 41 + 500
    sparse = sizes_of(build_method(MethodSpec("fedavg", keep=0.1)), theta)
    assert 8 * (120 + 2) <= sparse.up < 8 * (120 + 2) + 500
    for method in (half, eight, sparse):
        assert method.control == sizes_of(plain, theta).control
