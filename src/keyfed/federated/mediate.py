"""Mediators: how much each client counts in the sum, from its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keyfed.federated.types import ClientId, Mediator, Memory, Report, Share


def by_tokens() -> Mediator:
    r"""Weigh clients by their number of training tokens, γ_k = n_k / Σ_j n_j (FedAvg).

    Every client knows its own n_k: it scales its upload by n_k and sends n_k along as mass; the server divides by the
    mass that arrived, so the weights of those who vanished are spread over the rest exactly.

    References:
      McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, 2017, algorithm 1.

    Example:
      >>> share = by_tokens().share(Report("a", tokens=30, loss=1.0, worked=30), ["output.bias"])
      >>> share.scale["output.bias"], share.mass["output.bias"]
      (30.0, 30.0)
    """

    def share(report: Report, layers: Sequence[str]) -> Share:
        weights = dict.fromkeys(layers, float(report.tokens))
        return Share(scale=weights, mass=weights)

    return separable(share)


def separable(share: Callable[[Report, Sequence[str]], Share]) -> Mediator:
    """Make a mediator of a rule that a client can apply to itself; it keeps no memory."""

    def weigh(memory: Memory, reports: Mapping[ClientId, Report]) -> tuple[Memory, None]:
        del reports  # every client has weighed itself already
        return memory, None

    return Mediator(init=lambda: None, weigh=weigh, share=share)


def in_two_phases(mediator: Mediator, layers: Sequence[str]) -> Mediator:
    """Turn a separable mediator into one that waits for all reports: the same shares, uploads kept until then."""
    share = mediator.share
    if share is None:
        return mediator

    def weigh(memory: Memory, reports: Mapping[ClientId, Report]) -> tuple[Memory, Mapping[ClientId, Share]]:
        return memory, {client: share(report, layers) for client, report in reports.items()}

    return Mediator(init=mediator.init, weigh=weigh, share=None)
