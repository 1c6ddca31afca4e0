"""Stacked cells against torch.nn, and hand-written backward passes against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keyfed.engine.kernels.step import KERNELS, LAYERS
from keyfed.model.cells import CELLS, CellWeights, gates_of, has_memory

CASES = [
    ("gru", 2, False),
    ("gru", 1, False),
    ("gru-printed", 1, False),
    ("gru-printed", 2, False),
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
    state = (draw(m, batch, out), draw(m, batch, hidden)) if has_memory(cell) else (draw(m, batch, out),)
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


@torch.no_grad()
def test_the_printed_gru_is_the_equations_of_the_paper_unit_by_unit():
    """z = σ(w_z·[h, x]), r = σ(w_r·[h, x]), h~ = tanh(w·[r * h, x]), h' = (1 − z) * h + z * h~, FedAtt III-C."""
    hidden, width, time = 3, 2, 4
    x, w, state = make("gru-printed", 1, False, m=1, batch=1, time=time, width=width, hidden=hidden, seed=4)
    zero = w._replace(bias_ih=torch.zeros_like(w.bias_ih))  # the paper writes none
    got, _ = CELLS["gru-printed"](x, zero, state)
    fast, _ = KERNELS["gru-printed"](x, zero, state)
    other, _ = CELLS["gru"](x, zero, state)
    w_in, w_h, h = w.ih[0].tolist(), w.hh[0].tolist(), state[0][0, 0].tolist()

    def gate(number, unit, before, word):
        row = number * hidden + unit
        return sum(a * b for a, b in zip(w_h[row], before, strict=True)) + sum(
            a * b for a, b in zip(w_in[row], word, strict=True)
        )

    for t in range(time):
        word = x[0, t, 0].tolist()
        r = [1 / (1 + math.exp(-gate(0, u, h, word))) for u in range(hidden)]
        z = [1 / (1 + math.exp(-gate(1, u, h, word))) for u in range(hidden)]
        reset = [a * b for a, b in zip(r, h, strict=True)]
        new = [math.tanh(gate(2, u, reset, word)) for u in range(hidden)]
        h = [(1 - z[u]) * h[u] + z[u] * new[u] for u in range(hidden)]
        assert got[0, t, 0].tolist() == pytest.approx(h, abs=1e-14)
        assert fast[0, t, 0].tolist() == pytest.approx(h, abs=1e-14)
    assert float((got - other).abs().max()) > 0.1  # torch's form is another function


@torch.no_grad()
def test_both_grus_agree_where_nothing_is_reset():
    """r = 1 everywhere: the gate's place does not matter, and σ(−a) = 1 − σ(a) turns one z into the other."""
    x, w, state = make("gru", 1, False, m=2, batch=2, time=5, width=4, hidden=5, seed=7)
    open_gate = w._replace(bias_ih=torch.cat([torch.full((2, 5), 60.0), w.bias_ih[:, 5:]], 1))
    turned = CellWeights(
        *(torch.cat([t[:, :5], -t[:, 5:10], t[:, 10:]], 1) for t in (open_gate.ih, open_gate.hh, open_gate.bias_ih)),
        None,
        None,
    )
    for family in (CELLS, KERNELS):
        one, _ = family["gru"](x, open_gate, state)
        two, _ = family["gru-printed"](x, turned, state)
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


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
