r"""One training step of one of our models, forwards and backwards by hand, over stacked clients.

The same network as `language_model.mean_nats`, which defines it and differentiates by autograd; here every gradient is
written out, so that nothing is computed twice and nothing large is made anew. The input embedding's gradient is a few
rows added to the output layer's where they are tied. Weight gradients go into buffers that live as long as the
training. Kernels may be exchanged (`Kernels`). Equal to the definition to rounding (tests/equivalence).

In a recurrence autograd keeps a graph node and several tensors for every operation of every time step, and forms the
weight gradient of each step separately. Written by hand, a layer keeps only its gates, and each weight gradient is
*one* product over all time steps. No gradient flows into the state a window starts from: it is carried, not
differentiated. With `keep` (see `model.cells`) the state before step t is keep_t ⊙ h_{t−1}, and the gradient that step
t hands back is multiplied by keep_t as well. Notation: a_· are pre-activations, d· a gradient of the loss; saved
tensors are [m, time, batch, …].

On a GPU the products may read copies of the weights: bf16, every side filled up with zeros to a multiple of eight. A
matrix whose rows are not a multiple of 16 bytes (300 numbers of bf16, or 33,278 words) takes products at a third of
their speed. The copies belong to a wider model: its additional units have weights of zero and stay at zero, its
additional words have a bias of −∞. It has the same function and the same gradients. Gates are filled up one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from keyfed.federated.descent import ClientBatch, Descent
from keyfed.federated.types import Gradient
from keyfed.model import language_model as lm
from keyfed.model.cells import CellName, CellWeights, Recurrence, State, gates_of, project_inputs
from keyfed.model.language_model import Batch, Dropout, ModelSpec, ModelState, Params, keep_mask, shapes
from keyfed.model.output import OutputGradients, chunks, output_gradients, space

Buffers = dict[str, Tensor]  # tensors that are written anew every step and never freed between


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


def product(a: Tensor, b: Tensor) -> Tensor:
    """a · b, stacked. Where b is bf16, a is rounded to it too; the sum is float32 all the same."""
    if b.dtype != torch.bfloat16:
        return torch.bmm(a, b)
    a = a.to(b.dtype)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def over_time(grad: Tensor, values: Tensor) -> Tensor:
    """Σ_t grad_tᵀ values_t in one product: [m, time, batch, rows], [m, time, batch, cols] → [m, rows, cols]."""
    m = grad.shape[0]
    return product(grad.reshape(m, -1, grad.shape[-1]).mT, values.reshape(m, -1, values.shape[-1]))


def to_inputs(d_gates: Tensor, weight: Tensor) -> Tensor:
    """Gradient with respect to the layer's inputs, for all time steps at once."""
    m, time, batch, rows = d_gates.shape
    return product(d_gates.reshape(m, -1, rows), weight).view(m, time, batch, -1)


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
    d_hh = over_time(d_recurrent, before)
    d_b_hh = d_recurrent.sum((1, 2)) if w.bias_hh is not None else None
    d_inputs = d_recurrent
    d_inputs[..., -n.shape[-1] :] = d_n
    d_x = to_inputs(d_inputs, w.ih) if want_inputs else None
    return d_x, CellWeights(over_time(d_inputs, x), d_hh, d_inputs.sum((1, 2)), d_b_hh, None)


def printed_gru_forward(
    x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None
) -> tuple[Tensor, State, Saved]:
    """GRU whose reset gate acts inside the product (`cells.gru_printed`): two products a step."""
    (h0,) = state
    gates = project_inputs(x, w)  # becomes r, z, n in place
    m, time, batch, rows = gates.shape
    hidden = rows // 3
    cut = (2 * hidden, hidden)
    outputs, reset = x.new_empty(m, time, batch, hidden), x.new_empty(m, time, batch, hidden)  # reset: r ⊙ h
    rz_t, n_t = (u.mT.contiguous() for u in w.hh.split(cut, 1))
    b_rz, b_n = (None, None) if w.bias_hh is None else w.bias_hh[:, None].split(cut, -1)
    h = h0
    steps = _steps(*gates.split(cut, -1), *gates[..., : 2 * hidden].chunk(2, -1), reset, outputs)
    for (rz, n, r, z, s, out), keep_t in zip(steps, _each(keep, time), strict=True):
        if keep_t is not None:
            h = h * keep_t
        rz.add_(_recurrent(h, rz_t, b_rz)).sigmoid_()
        n.add_(_recurrent(torch.mul(r, h, out=s), n_t, b_n)).tanh_()
        h = torch.lerp(h, n, z, out=out)  # h + z (n − h)
    return outputs, (h.clone(),), (x, w, h0, gates, reset, outputs, keep)


def printed_gru_backward(saved: Saved, d_out: Tensor, want_inputs: bool) -> tuple[Tensor | None, CellWeights]:
    x, w, h0, gates, reset, outputs, keep = saved
    before = _previous(h0, outputs, keep)
    r, z, n = gates.chunk(3, -1)
    to_n = z * (1 - n * n)
    to_z = (n - before) * z * (1 - z)
    to_r = before * r * (1 - r)
    u_rz, u_n = w.hh.split((2 * n.shape[-1], n.shape[-1]), 1)
    d_gates = torch.empty_like(gates)
    d_rz, d_n = d_gates.split((2 * n.shape[-1], n.shape[-1]), -1)
    dh = torch.zeros_like(h0)
    steps = _steps(d_out, to_n, to_z, to_r, r, z, d_n, d_rz, *d_rz.chunk(2, -1), backwards=True)
    for (d, to_n_t, to_z_t, to_r_t, r_t, z_t, a_n, a_rz, a_r, a_z), keep_t in zip(
        steps, _each(keep, x.shape[1], backwards=True), strict=True
    ):
        dh = dh + d
        ds = torch.bmm(torch.mul(dh, to_n_t, out=a_n), u_n)  # of r ⊙ h
        torch.mul(ds, to_r_t, out=a_r)
        torch.mul(dh, to_z_t, out=a_z)
        dh = torch.baddbmm(dh * (1 - z_t) + ds * r_t, a_rz, u_rz)
        if keep_t is not None:
            dh = dh.mul_(keep_t)
    d_bias = d_gates.sum((1, 2))
    d_hh = torch.cat([over_time(d_rz, before), over_time(d_n, reset)], 1)
    d_x = to_inputs(d_gates, w.ih) if want_inputs else None
    return d_x, CellWeights(
        over_time(d_gates, x), d_hh, d_bias, d_bias.clone() if w.bias_hh is not None else None, None
    )


def lstm_forward(
    coupled: bool, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None
) -> tuple[Tensor, State, Saved]:
    """LSTM (gates i, f, g, o), or CIFG (gates i, g, o with f = 1 − i) if `coupled`; the projection is optional."""
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
    d_x = to_inputs(d_gates, w.ih) if want_inputs else None
    return d_x, CellWeights(
        over_time(d_gates, x),
        over_time(d_gates, _previous(h0, outputs, keep)),
        d_bias,
        d_bias.clone() if w.bias_hh is not None else None,
        over_time(d_outputs, raw) if w.hr is not None else None,
    )


LAYERS: dict[CellName, Layer] = {
    "gru": Layer(gru_forward, gru_backward),
    "gru-printed": Layer(printed_gru_forward, printed_gru_backward),
    "lstm": Layer(partial(lstm_forward, False), partial(lstm_backward, False)),
    "cifg": Layer(partial(lstm_forward, True), partial(lstm_backward, True)),
}


def _reading(layer: Layer) -> Recurrence:
    def run(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State]:
        outputs, last, _ = layer.forward(x, w, state, keep)
        return outputs, last

    return run


KERNELS: dict[CellName, Recurrence] = {cell: _reading(layer) for cell, layer in LAYERS.items()}  # forward only


class Kernels(NamedTuple):
    """What a step is made of; `PLAIN` runs anywhere.

    Attributes:
      layers: each cell's recurrence both ways.
      output: (features [m, n, width], weight, bias, targets [m, n], scale, buffers) → loss and gradients.
      add_rows: (gradient of the table [m, V, width], tokens [m, n], rows [m, n, width]) → nothing; adds in place.
      move: (descent, way, gradient, weights as the products read them, where they hold them) → nothing;
        `Descent.move`, and the copies of the weights follow.
    """

    layers: Mapping[CellName, Layer]
    output: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Buffers], OutputGradients]
    add_rows: Callable[[Tensor, Tensor, Tensor], None]
    move: Callable[[Descent, ClientBatch, Gradient, Params, dict[str, PaddedLayer] | None], None]


def add_rows(table: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """table[k, tokens[k, i]] += rows[k, i]: the gradient of looking words up touches the words that occurred."""
    m, vocab, width = table.shape
    offsets = torch.arange(m, device=tokens.device)[:, None] * vocab
    flat, where = table.view(m * vocab, width), (tokens + offsets).reshape(-1)
    if table.is_cuda:  # `index_add_` adds in any order there, this one sorts: the same round gives the same bits
        flat.index_put_((where,), rows.reshape(-1, width), accumulate=True)
    else:
        flat.index_add_(0, where, rows.reshape(-1, width))


def move(
    descent: Descent, way: ClientBatch, found: Gradient, products: Params, places: dict[str, PaddedLayer] | None
) -> None:
    """Take a descent's own step; copies of the weights are made anew."""
    if places is None:
        descent.move(way, found)
    else:
        descent.move(way, found._replace(grads=own_gradients(places, found.grads, way.local)))
        fill_copies(places, products, way.local)


PLAIN = Kernels(LAYERS, output_gradients, add_rows, move)


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of stacked tables [m, V, width] for tokens [m, …]."""
    m, vocab, width = table.shape
    offsets = torch.arange(m, device=tokens.device).reshape([-1] + [1] * (tokens.dim() - 1)) * vocab
    return table.reshape(m * vocab, width)[tokens + offsets]


@torch.no_grad()
def count_hits(features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Return how many real tokens were the first guess, [m]; of words that tie, the first is guessed.

    The logits are made once more, chunk by chunk: the kernels that train are not touched, so nothing of what they
    compute changes by a bit. Nothing is read back from a GPU, so that it may be captured.
    """
    hits = torch.zeros_like(bias[:, 0])
    for part in chunks(features.shape[1], features.shape[0], weight.shape[1]):
        logits = product(features[:, part], weight.mT).add_(bias[:, None])
        true = targets[:, part]
        sure = torch.isfinite(logits.gather(-1, true[..., None])[..., 0])  # logits that are NaN guess nothing
        hits += ((logits.argmax(-1) == true) & sure & (scale[:, part] > 0)).sum(1)
    return hits


class _Dropped:
    """Dropout at the places of the network, forwards and backwards with the same mask."""

    def __init__(self, drop: Dropout | None) -> None:
        self._drop = drop if drop is not None and drop.rate else None
        self._masks: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, site: int) -> Tensor:
        if self._drop is None:
            return x
        mask = keep_mask(self._drop, site, x.shape, x.device)
        self._masks[site] = mask.to(x.dtype) * (1 / (1 - self._drop.rate))
        return x * self._masks[site]

    def back(self, grad: Tensor, site: int) -> Tensor:
        """The gradient before the place, of that after it."""
        return grad if self._drop is None else grad * self._masks[site]


def gradient(
    spec: ModelSpec,
    params: Params,
    batch: Batch,
    state: ModelState,
    drop: Dropout | None,
    buffers: Buffers,
    kernels: Kernels = PLAIN,
    count: bool = False,
) -> tuple[Gradient, ModelState]:
    """Return nats, tokens and gradients of one step, and the state after it.

    Args:
      params: stacked, [m, …].
      state: carried state, see `language_model.initial_state`.
      buffers: a dictionary to be handed in again at the next step; the gradients live in it until then.
      kernels: what to run.
      count: also count the tokens that were the first guess, for one more product of the output layer.
    """
    m = batch.inputs.shape[0]
    layer = kernels.layers[spec.cell]
    dropped = _Dropped(drop)
    tokens = batch.inputs.transpose(1, 2)
    x = dropped(look_up(params["embedding.weight"], tokens), 0)
    saved: list[Saved] = []
    last, keep = [], lm.keep_of(batch.starts, params["output.bias"].dtype)
    for number in range(spec.layers):
        x, after, kept = layer.forward(x, lm.layer_weights(params, number), state[number], keep)
        saved.append(kept)
        last.append(after)
        x = dropped(x, number + 1)
    recurrent = x
    if spec.dense:
        flat, dense = x.reshape(m, -1, x.shape[-1]), params["dense.weight"]
        x = product(flat, dense.mT).add_(params["dense.bias"][:, None]).to(dense.dtype)
    features = x.reshape(m, -1, x.shape[-1])

    counts, scale, targets = lm.loss_weights(batch, params["output.bias"].dtype)
    weight, bias = lm.output_layer(spec, params)
    hits = count_hits(features, weight, bias, targets, scale) if count else None
    out = kernels.output(features, weight, bias, targets, scale, buffers)
    grads: Params = {"output.bias": out.bias}
    d = out.features
    if spec.dense:
        grads["dense.weight"] = product(d.mT, recurrent.reshape(m, -1, recurrent.shape[-1]))
        grads["dense.bias"] = d.sum(1)
        d = product(d, params["dense.weight"])
    d_x: Tensor | None = d.view(recurrent.shape)
    for number in reversed(range(spec.layers)):
        assert d_x is not None
        d_x, d_w = layer.backward(saved.pop(), dropped.back(d_x, number + 1), True)
        grads |= _named(d_w, number)
    assert d_x is not None
    d_rows = dropped.back(d_x, 0).reshape(m, -1, spec.embed)
    if spec.tied:
        table = out.weight
    else:
        grads["output.weight"] = out.weight
        table = space(buffers, "embedding", out.weight, params["embedding.weight"].shape).zero_()
    kernels.add_rows(table, tokens.reshape(m, -1), d_rows)
    grads["embedding.weight"] = table
    return Gradient(out.loss * counts, counts, {name: grads[name] for name in params}, hits), tuple(last)


def _named(w: CellWeights, number: int) -> Params:
    named = {"weight_ih": w.ih, "weight_hh": w.hh, "bias_ih": w.bias_ih, "bias_hh": w.bias_hh, "weight_hr": w.hr}
    return {f"rnn.{name}_l{number}": g for name, g in named.items() if g is not None}


MULTIPLE = 8


def widened(spec: ModelSpec) -> ModelSpec:
    """The model with every side a multiple of eight."""

    def up(n: int | None) -> int | None:
        return None if n is None else -(-n // MULTIPLE) * MULTIPLE

    sides = {side: up(getattr(spec, side)) for side in ("vocab", "embed", "hidden", "dense", "projection")}
    return replace(spec, **sides)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PaddedLayer:
    """Where a layer's numbers lie in its copy: `blocks` blocks (gates) of rows × columns inside wide × long.

    A vector has one column.
    """

    blocks: int
    rows: int
    columns: int
    wide: int
    long: int

    def real(self, copy: Tensor) -> Tensor:
        """The part of a stacked copy that holds the layer's numbers, [m, blocks, rows, columns]."""
        return copy.view(len(copy), self.blocks, self.wide, self.long)[:, :, : self.rows, : self.columns]


def layouts(spec: ModelSpec) -> dict[str, PaddedLayer]:
    """Every layer's place in the copies of `widened(spec)`."""
    wide = shapes(widened(spec))
    out = {}
    for name, shape in shapes(spec).items():
        blocks = gates_of(spec.cell) if name.startswith(("rnn.weight_ih", "rnn.weight_hh", "rnn.bias")) else 1
        columns, long = (shape[1], wide[name][1]) if len(shape) == 2 else (1, 1)
        out[name] = PaddedLayer(blocks, shape[0] // blocks, columns, wide[name][0] // blocks, long)
    return out


def make_copies(spec: ModelSpec, local: Params) -> Params:
    """Empty copies for stacked weights: matrices bf16, vectors as they are; words that do not exist have bias −∞."""
    copies = {}
    for name, shape in shapes(widened(spec)).items():
        like = local[name]
        copies[name] = like.new_zeros(len(like), *shape, dtype=torch.bfloat16 if len(shape) == 2 else like.dtype)
    copies["output.bias"][:, spec.vocab :] = -math.inf
    return copies


def fill_copies(places: dict[str, PaddedLayer], copies: Params, local: Params) -> None:
    for name, copy in copies.items():
        there = places[name].real(copy)
        there.copy_(local[name].view(there.shape))


def own_gradients(places: dict[str, PaddedLayer], grads: Params, local: Params) -> Params:
    """The gradients of the model itself among those of its copies."""
    return {name: places[name].real(g).reshape(local[name].shape) for name, g in grads.items()}
