r"""The recurrences of `model.cells` with hand-written backward passes.

Autograd keeps a graph node and several tensors for every operation of every time step, and forms the weight gradient of
each step separately. Written by hand, a layer keeps only its gates, and each weight gradient is *one* product over all
time steps. Equal to the definition to rounding (tests/equivalence/test_cells.py). No gradient flows into the state a
window starts from: it is carried, not differentiated. With `keep` (see `cells`) the state before step t is
keep_t ⊙ h_{t−1}, and the gradient that step t hands back is multiplied by keep_t as well.

Notation: a_· are pre-activations, d· a gradient of the loss; saved tensors are [m, time, batch, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from keyfed.model.cells import CellName, CellWeights, Recurrence, State, project_inputs

Saved = tuple[Any, ...]  # what a forward pass keeps for its backward pass


class Forward(Protocol):
    """The forward pass of a layer, see `Layer`."""

    def __call__(
        self, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None, /
    ) -> tuple[Tensor, State, Saved]: ...


class Layer(NamedTuple):
    """A recurrent layer both ways.

    Attributes:
      forward: (inputs [m, time, batch, input], weights, state, keep) → (outputs, last state, what backward needs).
      backward: (saved, gradient of the outputs, whether that of the inputs is wanted) → (it or None, of the weights).
    """

    forward: Forward
    backward: Callable[[Saved, Tensor, bool], tuple[Tensor | None, CellWeights]]


def _over_time(grad: Tensor, values: Tensor) -> Tensor:
    """Σ_t grad_tᵀ values_t in one product: [m, time, batch, rows], [m, time, batch, cols] → [m, rows, cols]."""
    m = grad.shape[0]
    return torch.bmm(grad.reshape(m, -1, grad.shape[-1]).mT, values.reshape(m, -1, values.shape[-1]))


def _to_inputs(d_gates: Tensor, weight: Tensor) -> Tensor:
    """Gradient with respect to the layer's inputs, for all time steps at once."""
    m, time, batch, rows = d_gates.shape
    return torch.bmm(d_gates.reshape(m, -1, rows), weight).view(m, time, batch, -1)


def _steps(*tensors: Tensor, backwards: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors' slices of each time step, cut all at once: cheaper than indexing step by step."""
    cut = [t.unbind(1) for t in tensors]
    return zip(*([reversed(c) for c in cut] if backwards else cut), strict=True)


def _recurrent(h: Tensor, hh_t: Tensor, bias: Tensor | None) -> Tensor:
    """W_hh h + b_hh. `hh_t` is W_hhᵀ laid out once per window: a product of few rows with a transposed view costs 1.6
    times as much on one thread and 5 times on two."""
    return torch.bmm(h, hh_t) if bias is None else torch.baddbmm(bias, h, hh_t)


def _previous(first: Tensor, outputs: Tensor, keep: Tensor | None) -> Tensor:
    """The state each step started from: `first`, then all outputs but the last; zero where a line begins."""
    before = torch.cat([first[:, None], outputs[:, :-1]], 1)
    return before if keep is None else before.mul_(keep)


def _each(keep: Tensor | None, time: int, backwards: bool = False) -> Iterator[Tensor | None]:
    """Yield `keep` of each time step, None without it."""
    if keep is None:
        return repeat(None, time)
    cut = keep.unbind(1)
    return iter(reversed(cut) if backwards else cut)


def gru_forward(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State, Saved]:
    """`cells.gru`."""
    (h0,) = state
    gates = project_inputs(x, w)  # becomes r, z, n in place
    m, time, batch, rows = gates.shape
    hidden = rows // 3
    outputs = x.new_empty(m, time, batch, hidden)
    recurrent_n = x.new_empty(m, time, batch, hidden)
    hh_t, bias = w.hh.mT.contiguous(), None if w.bias_hh is None else w.bias_hh[:, None]
    h = h0
    steps = _steps(gates[..., : 2 * hidden], *gates.chunk(3, -1), recurrent_n, outputs)
    for (rz, r, z, n, h_n, out), keep_t in zip(steps, _each(keep, time), strict=True):
        if keep_t is not None:
            h = h * keep_t
        a_rz, a_n = _recurrent(h, hh_t, bias).split((2 * hidden, hidden), -1)
        rz.add_(a_rz).sigmoid_()
        h_n.copy_(a_n)
        n.addcmul_(r, h_n).tanh_()
        h = torch.lerp(n, h, z, out=out)  # n + z (h − n)
    return outputs, (h.clone(),), (x, w, h0, gates, recurrent_n, outputs, keep)


def gru_backward(saved: Saved, d_out: Tensor, want_inputs: bool) -> tuple[Tensor | None, CellWeights]:
    """Gradients of `gru_forward`."""
    x, w, h0, gates, recurrent_n, outputs, keep = saved
    before = _previous(h0, outputs, keep)
    r, z, n = gates.chunk(3, -1)
    # Everything that does not depend on dh, for all time steps at once.
    to_n = (1 - z) * (1 - n * n)
    to_z = (before - n) * z * (1 - z)
    to_r = recurrent_n * r * (1 - r)
    d_recurrent = torch.empty_like(gates)
    d_n = torch.empty_like(n)
    dh = torch.zeros_like(h0)
    steps = _steps(d_out, to_n, to_z, to_r, r, z, d_n, d_recurrent, *d_recurrent.chunk(3, -1), backwards=True)
    for (d, to_n_t, to_z_t, to_r_t, r_t, z_t, a_n, a, a_r, a_z, a_hn), keep_t in zip(
        steps, _each(keep, x.shape[1], backwards=True), strict=True
    ):
        dh = dh + d
        torch.mul(dh, to_n_t, out=a_n)
        torch.mul(a_n, to_r_t, out=a_r)
        torch.mul(dh, to_z_t, out=a_z)
        torch.mul(a_n, r_t, out=a_hn)
        dh = torch.baddbmm(dh * z_t, a, w.hh)
        if keep_t is not None:
            dh = dh.mul_(keep_t)
    d_hh = _over_time(d_recurrent, before)
    d_b_hh = d_recurrent.sum((1, 2)) if w.bias_hh is not None else None
    d_inputs = d_recurrent
    d_inputs[..., -n.shape[-1] :] = d_n
    d_x = _to_inputs(d_inputs, w.ih) if want_inputs else None
    return d_x, CellWeights(_over_time(d_inputs, x), d_hh, d_inputs.sum((1, 2)), d_b_hh, None)


def lstm_forward(
    coupled: bool, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None
) -> tuple[Tensor, State, Saved]:
    """LSTM (gates i, f, g, o), or CIFG (gates i, g, o with f = 1 − i, optional projection) if `coupled`."""
    h0, c0 = state
    gates = project_inputs(x, w)  # becomes the activated gates in place
    m, time, batch, rows = gates.shape
    hidden = rows // (3 if coupled else 4)
    cells = x.new_empty(m, time, batch, hidden)
    tanh_c = torch.empty_like(cells)
    raw = torch.empty_like(cells)  # o ⊙ tanh c, before the projection
    outputs = raw if w.hr is None else x.new_empty(m, time, batch, w.hr.shape[1])
    hh_t, bias = w.hh.mT.contiguous(), None if w.bias_hh is None else w.bias_hh[:, None]
    hr_t = None if w.hr is None else w.hr.mT.contiguous()
    first, g, o = gates.split((rows - 2 * hidden, hidden, hidden), -1)  # first = i, or i and f
    h, c = h0, c0
    steps = _steps(gates, first, first[..., :hidden], first[..., -hidden:], g, o, cells, tanh_c, raw, outputs)
    for (a, first_t, i_t, f_t, g_t, o_t, c_t, tanh_t, raw_t, out), keep_t in zip(steps, _each(keep, time), strict=True):
        if keep_t is not None:
            h, c = h * keep_t, c * keep_t
        a.add_(_recurrent(h, hh_t, bias))
        first_t.sigmoid_()
        g_t.tanh_()
        o_t.sigmoid_()
        # CIFG: c + i (g − c); LSTM: f c + i g
        c = torch.lerp(c, g_t, i_t, out=c_t) if coupled else torch.mul(f_t, c, out=c_t).addcmul_(i_t, g_t)
        h = torch.mul(o_t, torch.tanh(c, out=tanh_t), out=raw_t)
        if hr_t is not None:
            h = out.copy_(torch.bmm(h, hr_t))
    return outputs, (h.clone(), c.clone()), (x, w, h0, c0, gates, cells, tanh_c, raw, outputs, keep)


def lstm_backward(coupled: bool, saved: Saved, d_out: Tensor, want_inputs: bool) -> tuple[Tensor | None, CellWeights]:
    """Gradients of `lstm_forward`."""
    x, w, h0, c0, gates, cells, tanh_c, raw, outputs, keep = saved
    hidden = cells.shape[-1]
    before = _previous(c0, cells, keep)
    if coupled:
        i, g, o = gates.chunk(3, -1)
        forget = 1 - i
        to_first = (g - before) * i * forget
    else:
        i, forget, g, o = gates.chunk(4, -1)
        to_first = torch.cat([g * i * (1 - i), before * forget * (1 - forget)], -1)
    to_g = i * (1 - g * g)
    to_o = tanh_c * o * (1 - o)
    to_c = o * (1 - tanh_c * tanh_c)
    d_gates = torch.empty_like(gates)
    d_outputs = d_out if w.hr is None else torch.empty_like(outputs)
    # dc reaches i, (f) and g through the same product: (dc, dc) ⊙ (to_i, to_f).
    d_first, d_g, d_o = d_gates.split((to_first.shape[-1], hidden, hidden), -1)
    dh, dc = torch.zeros_like(h0), torch.zeros_like(c0)
    steps = _steps(
        d_out, d_outputs, d_gates, to_first, to_g, to_o, to_c, forget, d_first, d_g, d_o, backwards=True
    )  # fmt: skip
    for (d, d_total, a, to_first_t, to_g_t, to_o_t, to_c_t, forget_t, a_first, a_g, a_o), keep_t in zip(
        steps, _each(keep, x.shape[1], backwards=True), strict=True
    ):
        dh = dh + d
        if w.hr is not None:
            dh = torch.bmm(d_total.copy_(dh), w.hr)
        dc = torch.addcmul(dc, dh, to_c_t)
        torch.mul(dc if coupled else dc.repeat(1, 1, 2), to_first_t, out=a_first)
        torch.mul(dc, to_g_t, out=a_g)
        torch.mul(dh, to_o_t, out=a_o)
        dc = dc * forget_t
        dh = torch.bmm(a, w.hh)
        if keep_t is not None:
            dh, dc = dh.mul_(keep_t), dc.mul_(keep_t)
    d_bias = d_gates.sum((1, 2))
    d_x = _to_inputs(d_gates, w.ih) if want_inputs else None
    return d_x, CellWeights(
        _over_time(d_gates, x),
        _over_time(d_gates, _previous(h0, outputs, keep)),
        d_bias,
        d_bias.clone() if w.bias_hh is not None else None,
        _over_time(d_outputs, raw) if w.hr is not None else None,
    )


LAYERS: dict[CellName, Layer] = {
    "gru": Layer(gru_forward, gru_backward),
    "lstm": Layer(partial(lstm_forward, False), partial(lstm_backward, False)),
    "cifg": Layer(partial(lstm_forward, True), partial(lstm_backward, True)),
}


def _reading(layer: Layer) -> Recurrence:
    def run(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
        outputs, last, _ = layer.forward(x, w, state, keep)
        return outputs, last

    return run


KERNELS: dict[CellName, Recurrence] = {cell: _reading(layer) for cell, layer in LAYERS.items()}  # forward only
