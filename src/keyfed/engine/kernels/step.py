r"""One training step of one of our models, forwards and backwards by hand, over stacked clients.

The same network as `language_model.mean_nats`, which defines it and differentiates by autograd; here every gradient is
written out, so that nothing is computed twice and nothing large is made anew: the input embedding's gradient is a few
rows added to the output layer's where they are tied, weight gradients go into buffers that live as long as the
training, and kernels may be exchanged (`Kernels`). Equal to the definition to rounding (tests/equivalence).

On a GPU the products may read copies of the weights: bf16, every side filled up with zeros to a multiple of eight. A
matrix whose rows are not a multiple of 16 bytes (300 numbers of bf16, or 33,278 words) takes products at a third of
their speed. The copies belong to a wider model whose additional units have weights of zero and stay at zero, and whose
additional words have a bias of −∞: the same function, the same gradients. Gates are filled up one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keyfed.engine.kernels.cells import LAYERS, Layer, Saved
from keyfed.federated.descent import Descent, Way
from keyfed.federated.types import Gradient
from keyfed.model import language_model as lm
from keyfed.model.cells import CellName, CellWeights, gates_of
from keyfed.model.language_model import Batch, Dropout, ModelSpec, ModelState, Params, keep_mask, shapes
from keyfed.model.output import OutputGradients, chunks, output_gradients, space

Buffers = dict[str, Tensor]  # tensors that are written anew every step and never freed between


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
    move: Callable[[Descent, Way, Gradient, Params, dict[str, PaddedLayer] | None], None]


def add_rows(table: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """table[k, tokens[k, i]] += rows[k, i]: the gradient of looking words up touches the words that occurred."""
    m, vocab, width = table.shape
    offsets = torch.arange(m, device=tokens.device)[:, None] * vocab
    flat, where = table.view(m * vocab, width), (tokens + offsets).reshape(-1)
    if table.is_cuda:  # `index_add_` adds in any order there, this one sorts: the same round gives the same bits
        flat.index_put_((where,), rows.reshape(-1, width), accumulate=True)
    else:
        flat.index_add_(0, where, rows.reshape(-1, width))


def move(descent: Descent, way: Way, found: Gradient, products: Params, places: dict[str, PaddedLayer] | None) -> None:
    """Take a descent's own step; copies of the weights are made anew."""
    if places is None:
        descent.move(way, found)
    else:
        descent.move(way, found._replace(grads=own_gradients(places, found.grads, way.local)))
        fill_copies(places, products, way.local)


PLAIN = Kernels(LAYERS, output_gradients, add_rows, move)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a · b, stacked. Where b is bf16, a is rounded to it too; the sum is float32 all the same."""
    if b.dtype != torch.bfloat16:
        return torch.bmm(a, b)
    a = a.to(b.dtype)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


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
    """Copy stacked weights into their copies."""
    for name, copy in copies.items():
        there = places[name].real(copy)
        there.copy_(local[name].view(there.shape))


def own_gradients(places: dict[str, PaddedLayer], grads: Params, local: Params) -> Params:
    """The gradients of the model itself among those of its copies."""
    return {name: places[name].real(g).reshape(local[name].shape) for name, g in grads.items()}
