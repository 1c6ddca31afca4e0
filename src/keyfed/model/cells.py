r"""Recurrent cells over stacked clients, written as their equations.

Every tensor carries the client axis first: inputs are `[m, time, batch, input]`, weights `[m, rows, columns]`, states
`[m, batch, width]`; m clients advance in lockstep, one client is m = 1. Weights have torch.nn's names, shapes and gate
order, so a cell equals its `torch.nn` counterpart number for number (tests/equivalence/test_cells.py).

Where rows hold several lines, `keep` [m, time, batch, 1] is 0 at the first token of a line and 1 elsewhere. The state
before step t is then keep_t ⊙ (h, c): a line reads nothing of the one before, and no gradient flows back into it.

These functions are the definition and differentiate by autograd. `engine.kernels.step` holds the same recurrences with
a hand-written backward pass; both are tested equal.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

CellName = Literal["gru", "gru-printed", "lstm", "cifg"]
State = tuple[Tensor, ...]  # (h,) for both GRUs, (h, c) for LSTM and CIFG; each [m, batch, width]


class CellWeights(NamedTuple):
    """The named parameters of one recurrent layer, stacked.

    Attributes:
      ih: input to gates, [m, gates·hidden, input].
      hh: recurrent to gates, [m, gates·hidden, width]; width = projection where there is one.
      bias_ih: [m, gates·hidden].
      bias_hh: the second bias torch.nn keeps; None for models with one bias (Keras, Gboard's CIFG).
      hr: recurrent projection [m, projection, hidden]; None without one.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor | None
    hr: Tensor | None


class Recurrence(Protocol):
    """(inputs [m, time, batch, input], weights, state, keep) → (outputs [m, time, batch, width], last state)."""

    def __call__(
        self, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None, /
    ) -> tuple[Tensor, State]: ...


def gates_of(cell: CellName) -> int:
    """Number of gate blocks in `weight_ih`: GRU r, z, n · LSTM i, f, g, o · CIFG i, g, o."""
    return {"gru": 3, "gru-printed": 3, "lstm": 4, "cifg": 3}[cell]


def zero_state(cell: CellName, m: int, batch: int, hidden: int, width: int, like: Tensor) -> State:
    """Return the state before the first token: zeros of `like`'s type and device."""
    h = like.new_zeros(m, batch, width)
    return (h, like.new_zeros(m, batch, hidden)) if has_memory(cell) else (h,)


def has_memory(cell: CellName) -> bool:
    """Whether a cell keeps c beside h; GRUs do not."""
    return cell in ("lstm", "cifg")


def project_inputs(x: Tensor, w: CellWeights) -> Tensor:
    """Return W_ih x + b_ih for all time steps in one product, [m, time, batch, gates·hidden]."""
    m, time, batch, width = x.shape
    flat = torch.baddbmm(w.bias_ih[:, None], x.reshape(m, time * batch, width), w.ih.mT)
    return flat.view(m, time, batch, -1)


def recurrent_gates(h: Tensor, w: CellWeights) -> Tensor:
    """Return W_hh h + b_hh, [m, batch, gates·hidden]."""
    if w.bias_hh is None:
        return torch.bmm(h, w.hh.mT)
    return torch.baddbmm(w.bias_hh[:, None], h, w.hh.mT)


def project_outputs(h: Tensor, w: CellWeights) -> Tensor:
    """Return W_hr h, [m, batch, projection]; without a projection h itself."""
    return h if w.hr is None else torch.bmm(h, w.hr.mT)


def kept(state: State, keep: Tensor | None, t: int) -> State:
    """Return keep_t ⊙ state: zero in rows where a line begins at step t; without `keep` the state itself."""
    return state if keep is None else tuple(s * keep[:, t] for s in state)


def gru(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
    r"""Run a GRU, torch's form (the reset gate acts after the product).

    .. math::
       r = σ(W_{ir}x + b_{ir} + W_{hr}h + b_{hr}),\;
       z = σ(W_{iz}x + b_{iz} + W_{hz}h + b_{hz}),\;
       n = \tanh(W_{in}x + b_{in} + r ⊙ (W_{hn}h + b_{hn})),\;
       h' = (1 − z) ⊙ n + z ⊙ h
    """
    (h,) = state
    inputs = project_inputs(x, w)
    outputs = []
    for t in range(x.shape[1]):
        (h,) = kept((h,), keep, t)
        i_r, i_z, i_n = inputs[:, t].chunk(3, -1)
        h_r, h_z, h_n = recurrent_gates(h, w).chunk(3, -1)
        r = torch.sigmoid(i_r + h_r)
        z = torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + r * h_n)
        h = (1 - z) * n + z * h
        outputs.append(h)
    return torch.stack(outputs, 1), (h,)


def gru_printed(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
    r"""Run a GRU as FedAtt prints it: the reset gate acts inside the product, and z weighs the new state.

    .. math::
       r = σ(W_r x + U_r h + b_r),\;
       z = σ(W_z x + U_z h + b_z),\;
       \tilde h = \tanh(W x + U (r ⊙ h) + b),\;
       h' = (1 − z) ⊙ h + z ⊙ \tilde h

    Reading: the paper writes no biases; there is one a gate here.

    References:
      Ji et al., *Learning Private Neural Language Modeling with Attentive Aggregation*, IJCNN 2019, section III-C; Cho
      et al., *Learning Phrase Representations using RNN Encoder–Decoder*, 2014 (whose z weighs the old state).
    """
    (h,) = state
    inputs = project_inputs(x, w)
    gates, new = (h.shape[-1] * 2, h.shape[-1])
    u_rz, u_n = w.hh.split((gates, new), 1)
    b_rz, b_n = (None, None) if w.bias_hh is None else w.bias_hh.split((gates, new), 1)
    outputs = []
    for t in range(x.shape[1]):
        (h,) = kept((h,), keep, t)
        i_rz, i_n = inputs[:, t].split((gates, new), -1)
        r, z = torch.sigmoid(i_rz + recurrent_gates(h, w._replace(hh=u_rz, bias_hh=b_rz))).chunk(2, -1)
        n = torch.tanh(i_n + recurrent_gates(r * h, w._replace(hh=u_n, bias_hh=b_n)))
        h = (1 - z) * h + z * n
        outputs.append(h)
    return torch.stack(outputs, 1), (h,)


def lstm(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
    r"""Run an LSTM (gates i, f, g, o as in torch), with a recurrent projection where there is one.

    .. math::  c' = f ⊙ c + i ⊙ g,\qquad h' = W_{hr}\,(o ⊙ \tanh(c'))
    """
    h, c = state
    inputs = project_inputs(x, w)
    outputs = []
    for t in range(x.shape[1]):
        h, c = kept((h, c), keep, t)
        i, f, g, o = (inputs[:, t] + recurrent_gates(h, w)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = project_outputs(torch.sigmoid(o) * torch.tanh(c), w)
        outputs.append(h)
    return torch.stack(outputs, 1), (h, c)


def cifg(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
    r"""Run a coupled input–forget gate LSTM with a recurrent projection (Gboard's cell; gates i, g, o).

    .. math::  f = 1 − i,\qquad c' = f ⊙ c + i ⊙ g,\qquad h' = W_{hr}\,(o ⊙ \tanh(c'))

    References:
      Greff et al., *LSTM: A Search Space Odyssey*, 2015 (CIFG); Sak et al., 2014 (projection);
      Hard et al., *Federated Learning for Mobile Keyboard Prediction*, 2018 (the keyboard).
    """
    h, c = state
    inputs = project_inputs(x, w)
    outputs = []
    for t in range(x.shape[1]):
        h, c = kept((h, c), keep, t)
        i, g, o = (inputs[:, t] + recurrent_gates(h, w)).chunk(3, -1)
        i = torch.sigmoid(i)
        c = (1 - i) * c + i * torch.tanh(g)
        h = project_outputs(torch.sigmoid(o) * torch.tanh(c), w)
        outputs.append(h)
    return torch.stack(outputs, 1), (h, c)


CELLS: dict[CellName, Recurrence] = {"gru": gru, "gru-printed": gru_printed, "lstm": lstm, "cifg": cifg}
