"""The Triton kernels behind the interface of a step (`engine.kernels.step.Kernels`), each with its launch shapes.

Where a layer does not fit (too wide for registers, too many rows) the plain kernels run instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from keyfed.engine.kernels import triton_device as device
from keyfed.engine.kernels.step import (
    LAYERS,
    Buffers,
    Kernels,
    Layer,
    PaddedLayer,
    Saved,
    over_time,
    product,
    to_inputs,
)
from keyfed.engine.kernels.step import add_rows as plain_add_rows
from keyfed.engine.kernels.step import move as plain_move
from keyfed.federated.descent import AdamRule, ClientBatch, Descent, SgdRule, adam_sizes, clip_scale, gradient_norm
from keyfed.federated.types import Gradient
from keyfed.model.cells import CellName, CellWeights, State
from keyfed.model.language_model import Params
from keyfed.model.output import OutputGradients, chunks
from keyfed.text.vocab import PAD

MOST_ROWS = 64  # of a batch: more and a slice's sums no longer fit with its weights
MOST_TOKENS = 4096  # of a client's step that one warp looks through for equal ones
SLICE_BYTES = 180 * 1024  # of weights that one program keeps, in shared memory and registers
SHARED_BYTES = 227 * 1024  # shared memory of one program
LOGITS = 1 << 28  # numbers alive at a time
WARPS, WARPS_PROJECTED = 4, 8
MOVE_BLOCK = 1024
PERSISTENT = (torch.bfloat16,)
LINE_BLOCK = 4096  # words a program reads at a time; whole lines of 10,000 in registers took twice as long
LEAST = 16  # the smallest side of a product that the tensor cores take


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _pieces(width: int) -> tuple[int, int]:
    """Two powers of two that together cover `width`, with as little to spare as may be.

    Example:
      >>> _pieces(300), _pieces(256), _pieces(670)
      ((256, 64), (256, 16), (512, 256))
    """
    large = max(LEAST, 1 << (width.bit_length() - 1))
    return large, max(LEAST, _power_of_2(max(1, width - large)))


def _units(clients: int, hidden: int, held: Callable[[int], int], weight: Tensor, more: int = 0) -> int | None:
    """Hidden units of a slice: the fewest with which all programs run at once, else the most that fit; None if none do.

    Args:
      held: units → numbers of the weights that a program keeps.
      more: bytes of shared memory that a program needs with its weights.
    """
    most = min(SLICE_BYTES, SHARED_BYTES - more)
    fitting = [units for units in (32, 64, 128) if held(units) * weight.itemsize <= most]
    if 2 * held(LEAST) * weight.itemsize <= SHARED_BYTES - more:  # so few units are kept in two layouts
        fitting.append(LEAST)
    parallel = [units for units in fitting if units >= 32 and clients * -(-hidden // units) <= _processors(weight)]
    return min(parallel, default=max(fitting, default=None))


def _processors(like: Tensor) -> int:
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 1


def _flags(clients: int, like: Tensor) -> Tensor:
    """A ticket counter and one counter a client, each in a cache line of its own."""
    return torch.zeros(32 * (clients + 1), dtype=torch.int32, device=like.device)


def _precision(weight: Tensor) -> str:
    """How products are taken; float32 as three tf32 products, whose error is that of float32."""
    return "tf32x3" if weight.dtype == torch.float32 else "ieee"


def _project(x: Tensor, weight: Tensor) -> Tensor:
    m, time, batch, width = x.shape
    return product(x.reshape(m, time * batch, width), weight.mT).view(m, time, batch, -1)


def _before(outputs: Tensor, keep: Tensor | None) -> Tensor:
    """The state each step started from, of those before every step and after the last; zero where a line begins."""
    return outputs[:, :-1] if keep is None else outputs[:, :-1] * keep.to(outputs.dtype)


def _resets(keep: Tensor | None, nothing: Tensor) -> Tensor:
    """What a kernel is handed for `keep`; without one it is handed something that it does not read."""
    return nothing if keep is None else keep.contiguous()


def gru_forward(x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None) -> tuple[Tensor, State, Saved]:
    """`engine.kernels.step.gru_forward`; the state is changed in place."""
    m, time, batch, _ = x.shape
    hidden = w.hh.shape[-1]
    units = _units(m, hidden, lambda n: 3 * n * sum(_pieces(hidden)), w.hh)
    if units is None or batch > MOST_ROWS or w.hh.dtype not in PERSISTENT:
        return _by_plain(LAYERS["gru"], x, w, state, keep)
    gates = _project(x, w.ih)
    outputs = w.hh.new_empty(m, time + 1, batch, hidden)
    saved = gates.new_empty(m, time, batch, 4 * hidden)
    slices, (ka, kb), vec = -(-hidden // units), _pieces(hidden), math.gcd(hidden, 8)
    shape = {
        "VEC": vec, "ROWS": _rows(batch), "UNITS": units, "KA": ka, "KB": kb, "RESET": keep is not None,
        "PRECISION": _precision(w.hh),
    }  # fmt: skip
    bias_hh = w.bias_ih if w.bias_hh is None else w.bias_hh
    device.gru_forward[m * slices,](
        gates, w.hh, w.bias_ih, bias_hh, state[0], _resets(keep, gates), outputs, saved, _flags(m, gates),
        time, batch, hidden // vec, slices,
        TWO=w.bias_hh is not None, num_warps=WARPS, num_stages=1, **shape,
    )  # fmt: skip
    return outputs[:, 1:], state, (x, w, outputs, saved, slices, shape, keep)


def gru_backward(saved: Saved, d_out: Tensor, want_inputs: bool) -> tuple[Tensor | None, CellWeights]:
    if isinstance(saved[0], str):  # "plain"
        return LAYERS["gru"].backward(saved[1], d_out, want_inputs)
    x, w, outputs, kept, slices, shape, keep = saved
    m, time, batch, hidden = d_out.shape
    d_recurrent = w.hh.new_empty(m, time, batch, 3 * hidden)
    d_inputs = torch.empty_like(d_recurrent)
    d_bias_hh, d_bias_ih = torch.empty_like(w.bias_ih), torch.empty_like(w.bias_ih)
    device.gru_backward[m * slices,](
        d_out.contiguous(), w.hh, _resets(keep, kept), kept, outputs, d_recurrent, d_inputs, d_bias_hh, d_bias_ih,
        _flags(m, d_out), time, batch, hidden // shape["VEC"], slices, num_warps=WARPS, num_stages=1, **shape,
    )  # fmt: skip
    return (to_inputs(d_inputs, w.ih) if want_inputs else None), CellWeights(
        over_time(d_inputs, x),
        over_time(d_recurrent, _before(outputs, keep)),
        d_bias_ih,
        d_bias_hh if w.bias_hh is not None else None,
        None,
    )


def _columns(hidden: int, width: int, units: int) -> int:
    """Columns of the projected state that a slice forms."""
    return max(LEAST, _power_of_2(-(-width // -(-hidden // units))))


def _held(hidden: int, width: int, gates: int, projected: bool, units: int) -> int:
    """Numbers an LSTM's program keeps: the larger of what its two passes do."""
    if not projected:
        return gates * units * sum(_pieces(hidden))
    columns, outer, inner = _columns(hidden, width, units), sum(_pieces(hidden)), sum(_pieces(width))
    return max(gates * units * inner + outer * columns, gates * outer * columns + inner * units)


def lstm_forward(
    coupled: bool, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None
) -> tuple[Tensor, State, Saved]:
    """`engine.kernels.step.lstm_forward`; the state is changed in place."""
    m, time, batch, _ = x.shape
    h0, c0 = state
    hidden, width, gate_count = c0.shape[-1], w.hh.shape[-1], 3 if coupled else 4
    # A projection reads o ⊙ tanh c of all units, in both precisions.
    more = 0 if w.hr is None else _rows(batch) * sum(_pieces(hidden)) * (4 + w.hh.itemsize)
    units = _units(m, hidden, partial(_held, hidden, width, gate_count, w.hr is not None), w.hh, more)
    if units is None or batch > MOST_ROWS or w.hh.dtype not in PERSISTENT:
        return _by_plain(LAYERS["cifg" if coupled else "lstm"], x, w, state, keep)
    gates = _project(x, w.ih)
    outputs = w.hh.new_empty(m, time + 1, batch, width)
    raw = outputs if w.hr is None else w.hh.new_empty(m, time, batch, hidden)
    kept = torch.empty_like(gates)
    cells = gates.new_empty(m, time + 1, batch, hidden)
    slices, (ka, kb), (ra, rb) = -(-hidden // units), _pieces(width), _pieces(hidden)
    columns = units if w.hr is None else _columns(hidden, width, units)
    shape: dict[str, Any] = {
        "VEC": math.gcd(hidden, 8), "WEC": math.gcd(width, 8), "ROWS": _rows(batch), "UNITS": units,
        "COLUMNS": columns, "KA": ka, "KB": kb, "RA": ra, "RB": rb, "COUPLED": coupled,
        "PROJECTED": w.hr is not None, "RESET": keep is not None, "PRECISION": _precision(w.hh),
    }  # fmt: skip
    bias_hh = w.bias_ih if w.bias_hh is None else w.bias_hh
    project = w.hh if w.hr is None else w.hr
    sizes = (time, batch, hidden // shape["VEC"], width // shape["WEC"], slices)
    device.lstm_forward[m * slices,](
        gates, w.hh, project, w.bias_ih, bias_hh, h0, c0, _resets(keep, gates), outputs, raw, kept, cells,
        _flags(m, gates), *sizes,
        TWO=w.bias_hh is not None, num_warps=WARPS, num_stages=1, **shape,
    )  # fmt: skip
    return outputs[:, 1:], state, (x, w, outputs, raw, kept, cells, sizes, shape, keep)


def lstm_backward(coupled: bool, saved: Saved, d_out: Tensor, want_inputs: bool) -> tuple[Tensor | None, CellWeights]:
    if isinstance(saved[0], str):  # "plain"
        return LAYERS["cifg" if coupled else "lstm"].backward(saved[1], d_out, want_inputs)
    x, w, outputs, raw, kept, cells, sizes, shape, keep = saved
    m = x.shape[0]
    d_gates = torch.empty_like(kept, dtype=w.hh.dtype)
    d_projected = d_gates if w.hr is None else torch.empty_like(d_out, dtype=w.hh.dtype)
    project, d_bias = w.hh if w.hr is None else w.hr, torch.empty_like(w.bias_ih)
    device.lstm_backward[m * sizes[-1],](
        d_out.contiguous(), w.hh, project, _resets(keep, kept), kept, cells, d_gates, d_projected, d_bias,
        _flags(m, d_out), *sizes,
        num_warps=WARPS if w.hr is None else WARPS_PROJECTED, num_stages=1, **shape,
    )  # fmt: skip
    return (to_inputs(d_gates, w.ih) if want_inputs else None), CellWeights(
        over_time(d_gates, x),
        over_time(d_gates, _before(outputs, keep)),
        d_bias,
        d_bias.clone() if w.bias_hh is not None else None,
        over_time(d_projected, raw) if w.hr is not None else None,
    )


def _rows(batch: int) -> int:
    return max(LEAST, _power_of_2(batch))


def _by_plain(
    layer: Layer, x: Tensor, w: CellWeights, state: State, keep: Tensor | None = None
) -> tuple[Tensor, State, Saved]:
    """Run the plain kernels on float32 copies of what is bf16."""

    def full(t: Tensor) -> Tensor:
        return t.to(state[0].dtype)

    bias, hr = None if w.bias_hh is None else full(w.bias_hh), None if w.hr is None else full(w.hr)
    wide = CellWeights(full(w.ih), full(w.hh), full(w.bias_ih), bias, hr)
    outputs, last, saved = layer.forward(full(x), wide, state, keep)
    return outputs.to(w.hh.dtype), last, ("plain", saved)


def output_gradients(
    features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: Tensor, buffers: Buffers
) -> OutputGradients:
    """`output.output_gradients`: products by cuBLAS, softmax and its gradient in one kernel, in place."""
    del buffers  # the memory of a captured step is laid out once
    m, tokens, _ = features.shape
    vocab = weight.shape[1]
    loss = torch.zeros_like(bias[:, 0])
    d_features = torch.empty(features.shape, dtype=bias.dtype, device=bias.device)
    d_weight, d_bias = bias, torch.zeros_like(bias)
    for number, part in enumerate(chunks(tokens, m, vocab, LOGITS)):
        some, true, shares = features[:, part], targets[:, part].contiguous(), scale[:, part].contiguous()
        logits, nats = torch.bmm(some, weight.mT), torch.empty_like(shares)
        device.softmax_gradient[nats.numel(),](
            logits, bias, true, shares, nats, nats.shape[1], vocab,
            BLOCK=min(LINE_BLOCK, _power_of_2(vocab)), num_warps=8 if vocab > 1024 else 1,
        )  # fmt: skip
        loss += nats.sum(1)
        d_features[:, part] = product(logits, weight)
        grad = product(logits.mT, some)
        d_weight = d_weight.add_(grad) if number else grad
        d_bias += logits.sum(1, dtype=bias.dtype)
    return OutputGradients(loss, d_features, d_weight, d_bias)


def add_rows(table: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """`engine.kernels.step.add_rows` in a fixed order."""
    m, vocab, width = table.shape
    count = tokens.shape[1]
    if count > MOST_TOKENS:
        plain_add_rows(table, tokens, rows)
        return
    device.add_rows[count, m](
        table, tokens.contiguous(), rows.contiguous(), count, vocab, width,
        NONE=PAD, COUNT=_power_of_2(count), WIDTH=_power_of_2(width), num_warps=1,
    )  # fmt: skip


def move(
    descent: Descent, way: ClientBatch, found: Gradient, products: Params, places: dict[str, PaddedLayer] | None
) -> None:
    """`engine.kernels.step.move`, a layer's whole step in one pass over its numbers."""
    rule = descent.rule
    if rule is None or way.eta.dtype != torch.float32:
        plain_move(descent, way, found, products, places)
        return
    tokens, scale = found.tokens, way.eta
    if rule.clip is not None:
        scale = clip_scale(gradient_norm(found.grads), rule.clip)
    how: dict[str, Any] = {"PULL": rule.mu != 0, "DUAL": way.dual is not None, "CLIP": rule.clip is not None}
    if isinstance(rule, AdamRule):
        active = (tokens > 0).to(way.eta)
        way.memory["taken"].add_(active)
        steps, floor = adam_sizes(rule, way.memory["taken"], active, way.eta)
    for name, w in way.local.items():
        size, g, copy = w[0].numel(), found.grads[name].contiguous(), products[name]
        theta, dual = way.theta[name], w if way.dual is None else way.dual[name]
        where = PaddedLayer(1, 1, 1, 1, 1) if places is None else places[name]
        how |= {"ROWS": where.rows, "COLUMNS": where.columns, "WIDE": where.wide, "LONG": where.long}
        how |= {"COPY": places is not None, "BLOCK": MOVE_BLOCK, "num_warps": 4}
        grid = (triton.cdiv(size, MOVE_BLOCK), len(w))
        if isinstance(rule, SgdRule):
            velocity = way.memory[name] if rule.momentum else w
            device.sgd[grid](
                w, g, velocity, theta, dual, copy, tokens, way.eta, scale, size, g[0].numel(),
                rule.momentum, rule.weight_decay, rule.mu, MOMENTUM=rule.momentum != 0, **how,
            )  # fmt: skip
        else:
            first, second = way.memory[f"first/{name}"], way.memory[f"second/{name}"]
            device.adam[grid](
                w, g, first, second, theta, dual, copy, tokens, steps, floor, scale, size, g[0].numel(),
                rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.mu, **how,
            )  # fmt: skip


_PRINTED = LAYERS["gru-printed"]
_LAYERS: dict[CellName, Layer] = {
    "gru": Layer(gru_forward, gru_backward),
    "gru-printed": Layer(  # a labelled reading: the plain kernels run it
        partial(_by_plain, _PRINTED), lambda saved, d_out, want: _PRINTED.backward(saved[1], d_out, want)
    ),
    "lstm": Layer(partial(lstm_forward, False), partial(lstm_backward, False)),
    "cifg": Layer(partial(lstm_forward, True), partial(lstm_backward, True)),
}
TRITON = Kernels(_LAYERS, output_gradients, add_rows, move)
