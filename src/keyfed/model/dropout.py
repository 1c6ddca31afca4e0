"""Dropout whose mask is a function of (client seed, step, place), not of a generator's history.

The same client drops the same units whether it trains alone, in a block of ten, on a CPU or on a GPU, today or after a
resume. The mask is a stateless integer hash (the finaliser of MurmurHash3) of the unit's position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROW_STRIDE = 1 << 16  # positions do not depend on how far a batch was padded in time


class Dropout(NamedTuple):
    """What a forward pass needs to drop units: rate, one seed a client, and the number of the local step.

    Attributes:
      widths: real units at each site, where tensors are wider than the model.
    """

    rate: float
    seeds: Tensor  # [m] int64
    step: int | Tensor  # a client's own local step: one number, or [m] of them
    widths: tuple[int, ...] | None = None


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (MurmurHash3's fmix32, a bijection).

    Example:
      >>> mix(torch.tensor([0, 1, 2])).tolist()
      [0, 1364076727, 821347078]
    """
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def keep_mask(drop: Dropout, site: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Return a bool mask [m, time, batch, width]: True keeps the unit, with probability 1 − rate.

    Args:
      site: number of the place in the network (0 = embedding, 1… = after each layer).
    """
    _, time, batch, width = shape
    seeds = drop.seeds.to(device)
    step = torch.as_tensor(drop.step, device=device)
    key = mix(mix(mix(seeds & _MASK) ^ ((seeds >> 32) & _MASK)) ^ (step * 64 + site))
    rows = torch.arange(batch, device=device)[None, :] * _ROW_STRIDE
    place = (rows + torch.arange(time, device=device)[:, None])[:, :, None] * (
        drop.widths[site] if drop.widths else width
    )
    place = place + torch.arange(width, device=device)
    bits = mix(mix((place & _MASK) ^ key[:, None, None, None]) ^ (place >> 32))
    return bits >= int(drop.rate * 2**32)


def apply_dropout(x: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """Drop units of x [m, time, batch, width] and scale the rest by 1/(1 − rate); None leaves x alone."""
    if drop is None or drop.rate == 0:
        return x
    return x * (keep_mask(drop, site, x.shape, x.device).to(x.dtype) * (1 / (1 - drop.rate)))
