r"""What happens to an upload before it is summed: white noise, or fewer and smaller numbers.

Compressed uploads hold the largest entries only (top-k, with error feedback), half precision, or eight bits. They are
sent as a dictionary of tensors, so the size on the wire is that of the serialised file, header included. A client that
leaves entries out keeps them and adds them to its next upload (error feedback). Clients with an ADMM state do so by
themselves, since they upload the increment over what the server has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Generator, Tensor

from keyfed.errors import ConfigError
from keyfed.federated.spec import positive
from keyfed.federated.types import Aggregate, Codec, Noise, Params

Where = Literal["client", "client-first", "sum", "server"]


def noise_on(beta: float, sigma: float = 1.0, at: Where = "client") -> Noise | None:
    r"""Add white noise of standard deviation βσ, as FedAtt does; None for β = 0.

    `client` is equation 6: every client adds its own β·N(0, σ²) to its upload after its distance was measured. So the
    noise is inside the weighted sum and m clients average it. `client-first` adds the same noise before the distance is
    measured: the text has clients add it before they send, so the server's attention would see it. `sum` is equation 5
    as printed: one N(0, σ²) beside the m uploads, θ' = θ + (Σ Δ_k + N)/m. `server` is the authors' code: once, on the
    mean.

    Nothing is clipped, so however large β is this carries **no** (ε, δ) guarantee of privacy.

    References:
      Ji et al., *Learning Private Neural Language Modeling with Attentive Aggregation*, 2019, equations 5 and 6.
    """
    positive("noise", beta, or_zero=True)
    if beta == 0:
        return None

    def draw(like: Params, generator: torch.Generator) -> Params:
        drawn = {}
        for name, p in like.items():
            fresh = torch.empty(p.shape, dtype=p.dtype).normal_(0, 1, generator=generator)
            drawn[name] = fresh.mul_(beta * sigma).to(p.device)
        return drawn

    return Noise(at, draw)


def noised(aggregate: Aggregate, noise: Noise | None, generator: Generator) -> Aggregate:
    """Add the noise of a method whose server adds it: once to the mean, or N/m, m being those whose uploads came."""
    if noise is None or noise.at not in ("sum", "server") or not aggregate.contributors:
        return aggregate
    clients = len(aggregate.contributors) if noise.at == "sum" else 1
    drawn = noise.draw(aggregate.total, generator)
    total = {n: torch.add(t, drawn[n], alpha=aggregate.mass[n] / clients) for n, t in aggregate.total.items()}
    return replace(aggregate, total=total)


QUANTISE = ("none", "fp16", "int8")


def codec(keep: float = 1.0, quantise: str = "none") -> Codec | None:
    """Return how uploads are compressed; None where they are sent as they are.

    Args:
      keep: share of the entries of each layer that is sent, the largest in absolute value (at least one).
      quantise: none, fp16 (rounded to nearest) or int8 (one scale a row, rounded stochastically: unbiased).

    Example:
      >>> small = codec(keep=0.5)
      >>> sent = small.pack({"bias": torch.tensor([0.1, -3.0, 2.0, 0.0])}, Generator())
      >>> small.unpack(sent, {"bias": torch.zeros(4)})["bias"].tolist()
      [0.0, -3.0, 2.0, 0.0]
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"upload.keep is {keep}; expected 0 < keep ≤ 1, the share of entries that is sent")
    if quantise not in QUANTISE:
        raise ConfigError(f'upload.quantise is "{quantise}"; expected one of {", ".join(QUANTISE)}')
    if keep == 1 and quantise == "none":
        return None

    def pack(upload: Params, generator: Generator) -> Params:
        sent: Params = {}
        for name, u in upload.items():
            values = u
            if keep < 1:
                chosen = largest(u, keep)
                sent[f"{name}/index"] = chosen.to(torch.int32)
                values = u.reshape(-1)[chosen]
            if quantise == "int8":
                sent[f"{name}/int8"], sent[f"{name}/scale"] = to_int8(values, generator)
            else:
                sent[f"{name}/value"] = values.half() if quantise == "fp16" else values
        return sent

    def unpack(sent: Params, like: Params) -> Params:
        upload: Params = {}
        for name, p in like.items():
            if quantise == "int8":
                values = from_int8(sent[f"{name}/int8"], sent[f"{name}/scale"], p.dtype)
            else:
                values = sent[f"{name}/value"].to(p.dtype)
            if keep < 1:
                flat = torch.zeros(p.numel(), dtype=p.dtype, device=values.device)
                upload[name] = flat.index_copy_(0, sent[f"{name}/index"].long(), values).view(p.shape)
            else:
                upload[name] = values
        return upload

    return Codec(pack, unpack, feedback=keep < 1)


def largest(u: Tensor, keep: float) -> Tensor:
    """Return the flat places of the ⌈keep · n⌉ entries of largest absolute value, in increasing order."""
    count = max(1, math.ceil(keep * u.numel()))
    return torch.topk(u.reshape(-1).abs(), count, sorted=False).indices.sort().values


def to_int8(values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    r"""Write numbers as q · s with |q| ≤ 127, one scale s = max|v|/127 a row (a vector is one row).

    .. math::  q = ⌊v/s + U⌋,\; U \sim \mathrm{uniform}[0, 1) \;⇒\; E[q s] = v
    """
    rows = values.reshape(values.shape[0], -1) if values.dim() > 1 else values.reshape(1, -1)
    scale = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(rows.dtype).tiny)
    dither = torch.empty(rows.shape, dtype=torch.float32).uniform_(0, 1, generator=generator).to(values)
    q = torch.floor(rows / scale + dither)
    return q.clamp(-127, 127).to(torch.int8).view(values.shape), scale.reshape(-1).float()


def from_int8(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Read what `to_int8` wrote."""
    rows = q.reshape(scale.shape[0], -1).to(dtype)
    return (rows * scale.to(dtype)[:, None]).view(q.shape)
