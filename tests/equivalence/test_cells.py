"""Stacked cells against torch.nn, and hand-written backward passes against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keyfed.engine.kernels.step import KERNELS, LAYERS
from keyfed.model.cells import CELLS, CellWeights, gates_of

CASES = [
    ("gru", 2, False),
    ("gru", 1, False),
    ("lstm", 2, False),
    ("lstm", 1, False),
    ("lstm", 1, True),
    ("cifg", 1, True),
    ("cifg", 2, False),
]


def make(cell: str, biases: int, projected: bool, m: int, batch: int, time: int, width: int, hidden: int, seed: int):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * 0.5).requires_grad_()

    rows, out = gates_of(cell) * hidden, (3 if projected else hidden)
    w = CellWeights(
        draw(m, rows, width),
        draw(m, rows, out),
        draw(m, rows),
        draw(m, rows) if biases == 2 else None,
        draw(m, out, hidden) if projected else None,
    )
    state = (draw(m, batch, out),) if cell == "gru" else (draw(m, batch, out), draw(m, batch, hidden))
    return draw(m, time, batch, width), w, state


def weights_of(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)


def by_autograd(cell, x, w, state):
    out, last = cell(x, w, tuple(s.detach() for s in state))
    leaves = [x, *[t for t in w if t is not None]]
    return [out, *last, *torch.autograd.grad((out * weights_of(out)).sum(), leaves)]


@torch.no_grad()
def by_hand(layer, x, w, state):
    out, last, saved = layer.forward(x, w, state)
    out, last = out.clone(), [s.clone() for s in last]
    d_x, d_w = layer.backward(saved, weights_of(out), True)
    return [out, *last, d_x, *[t for t in d_w if t is not None]]


@pytest.mark.parametrize(("cell", "biases", "projected"), CASES)
@settings(max_examples=15, deadline=None)
@given(m=st.integers(1, 3), batch=st.integers(1, 3), time=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_hand_written_backward_equals_autograd(cell, biases, projected, m, batch, time, seed):
    x, w, state = make(cell, biases, projected, m, batch, time, width=4, hidden=5, seed=seed)
    slow = by_autograd(CELLS[cell], x, w, state)
    fast = by_hand(LAYERS[cell], x, w, state)
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("cell", "projected"), [("gru", False), ("lstm", False), ("lstm", True)])
@pytest.mark.parametrize("family", [CELLS, KERNELS], ids=["definition", "kernel"])
def test_stacked_cell_equals_torch_nn_client_by_client(cell, projected, family):
    x, w, state = make(cell, 2, projected, m=3, batch=2, time=6, width=4, hidden=5, seed=1)
    with torch.no_grad():
        out, last = family[cell](x, w, state)
    for k in range(3):
        layer = (nn.GRU(4, 5) if cell == "gru" else nn.LSTM(4, 5, proj_size=3 if projected else 0)).double()
        own = {
            "weight_ih_l0": w.ih[k],
            "weight_hh_l0": w.hh[k],
            "bias_ih_l0": w.bias_ih[k],
            "bias_hh_l0": w.bias_hh[k],
            **({"weight_hr_l0": w.hr[k]} if projected else {}),
        }
        start = tuple(s[k][None] for s in state)
        expected, ends = torch.func.functional_call(layer, own, (x[k], start[0] if cell == "gru" else start))
        torch.testing.assert_close(out[k], expected, rtol=1e-12, atol=1e-12)
        for got, want in zip(last, (ends,) if cell == "gru" else ends, strict=True):
            torch.testing.assert_close(got[k], want[0], rtol=1e-12, atol=1e-12)


def test_cifg_is_an_lstm_whose_forget_gate_is_one_minus_input():
    x, w, state = make("cifg", 1, False, m=2, batch=2, time=5, width=4, hidden=5, seed=3)
    out, (h, c) = CELLS["cifg"](x, w, state)
    i, g, o = w.ih.chunk(3, 1)
    hi, hg, ho = w.hh.chunk(3, 1)
    bi, bg, bo = w.bias_ih.chunk(3, 1)
    # σ(−a) = 1 − σ(a): negating the input gate's rows gives the coupled forget gate.
    as_lstm = CellWeights(
        torch.cat([i, -i, g, o], 1), torch.cat([hi, -hi, hg, ho], 1), torch.cat([bi, -bi, bg, bo], 1), None, None
    )
    expected, (eh, ec) = CELLS["lstm"](x, as_lstm, state)
    for a, b in [(out, expected), (h, eh), (c, ec)]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_projection_shrinks_the_recurrent_state():
    x, w, state = make("cifg", 1, True, m=1, batch=2, time=4, width=4, hidden=5, seed=5)
    out, (h, c) = CELLS["cifg"](x, w, state)
    assert out.shape == (1, 4, 2, 3)
    assert h.shape == (1, 2, 3)
    assert c.shape == (1, 2, 5)
