"""Copies of the weights for the tensor cores: bf16, every side filled up with zeros to a multiple of eight.

A matrix whose rows are not a multiple of 16 bytes (300 numbers of bf16, or 33,278 words) takes products at a third of
their speed. The copies belong to a wider model whose additional units have weights of zero and stay at zero, and whose
additional words have a bias of −∞: the same function, the same gradients. Gates are filled up one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyfed.model.cells import gates_of
from keyfed.model.language_model import ModelSpec, Params, shapes

MULTIPLE = 8


def widened(spec: ModelSpec) -> ModelSpec:
    """The model with every side a multiple of eight."""

    def up(n: int | None) -> int | None:
        return None if n is None else -(-n // MULTIPLE) * MULTIPLE

    sides = {side: up(getattr(spec, side)) for side in ("vocab", "embed", "hidden", "dense", "projection")}
    return replace(spec, **sides)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Layout:
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


def layouts(spec: ModelSpec) -> dict[str, Layout]:
    """Every layer's place in the copies of `widened(spec)`."""
    wide = shapes(widened(spec))
    out = {}
    for name, shape in shapes(spec).items():
        blocks = gates_of(spec.cell) if name.startswith(("rnn.weight_ih", "rnn.weight_hh", "rnn.bias")) else 1
        columns, long = (shape[1], wide[name][1]) if len(shape) == 2 else (1, 1)
        out[name] = Layout(blocks, shape[0] // blocks, columns, wide[name][0] // blocks, long)
    return out


def make_copies(spec: ModelSpec, local: Params) -> Params:
    """Empty copies for stacked weights: matrices bf16, vectors as they are; words that do not exist have bias −∞."""
    copies = {}
    for name, shape in shapes(widened(spec)).items():
        like = local[name]
        copies[name] = like.new_zeros(len(like), *shape, dtype=torch.bfloat16 if len(shape) == 2 else like.dtype)
    copies["output.bias"][:, spec.vocab :] = -math.inf
    return copies


def fill_copies(places: dict[str, Layout], copies: Params, local: Params) -> None:
    """Copy stacked weights into their copies."""
    for name, copy in copies.items():
        there = places[name].real(copy)
        there.copy_(local[name].view(there.shape))


def own_gradients(places: dict[str, Layout], grads: Params, local: Params) -> Params:
    """The gradients of the model itself among those of its copies."""
    return {name: places[name].real(g).reshape(local[name].shape) for name, g in grads.items()}
