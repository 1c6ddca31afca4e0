"""What happens to an upload on its way into the sum."""

from __future__ import annotations

from typing import Literal

import torch

from keyfed.federated.options import positive
from keyfed.federated.types import Noise, Params

Where = Literal["client", "server"]


def noise(beta: float, sigma: float = 1.0, at: Where = "client") -> Noise | None:
    r"""Add white noise of standard deviation βσ, as FedAtt does; None for β = 0.

    `client` is equation 6: every client adds its own β·N(0, σ²) to its upload after its distance was measured, so the
    noise is inside the weighted sum and m clients average it. `server` is the authors' code: once, on the mean.

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
