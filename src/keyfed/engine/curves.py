"""Learning curves of local training: what every local step saw, per client and summed over a cohort.

A step is known by its epoch and its number in it. Nats, first guesses that were right (hits) and tokens add, so every
mean is Σ nats / Σ tokens or Σ hits / Σ tokens, never a mean of means; a client that has run out of steps is in neither
sum. Losses and accuracies are those of the forward pass that the step's gradient was taken from: before the step, with
dropout where the model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from keyfed.federated.types import ClientId

Curve = tuple[NDArray[np.float64], ...]  # nats, hits and tokens of one client's steps, [steps, 3] an epoch
MOST_NAMED = 100  # clients of a round whose epochs are told one by one


def unstack(stacked: Sequence[Tensor] | None, clients: int) -> list[Curve] | list[None]:
    """Cut `Solution.curve` into one curve a client: one copy from the device an epoch."""
    if stacked is None:
        return [None] * clients
    epochs = [epoch.cpu().numpy() for epoch in stacked]
    return [tuple(np.ascontiguousarray(epoch[:, :, k]) for epoch in epochs) for k in range(clients)]


class CohortCurves:
    """The curves of a round's clients: sums by step, and each client's sums by epoch."""

    def __init__(self) -> None:
        self._steps: list[NDArray[np.float64]] = []  # [steps, 4] an epoch: nats, hits, tokens, clients
        self._clients: dict[ClientId, NDArray[np.float64]] = {}  # [epochs, 3]

    def add(self, client: ClientId, curve: Curve) -> None:
        """Add a client."""
        self._clients[client] = np.stack([epoch.sum(0) for epoch in curve])
        for number, epoch in enumerate(curve):
            self._join(number, np.concatenate([epoch, epoch[:, 2:] > 0], 1))

    def _join(self, number: int, steps: NDArray[np.float64]) -> None:
        """Add steps to those of an epoch."""
        while len(self._steps) <= number:
            self._steps.append(np.zeros((0, 4)))
        there = self._steps[number]
        if len(there) < len(steps):
            there = self._steps[number] = np.concatenate([there, np.zeros((len(steps) - len(there), 4))])
        there[: len(steps)] += steps

    def numbers(self) -> dict[str, Any]:
        """As plain lists, for `joined_curves` in another process."""
        clients = {client: sums.tolist() for client, sums in self._clients.items()}
        return {"steps": [epoch.tolist() for epoch in self._steps], "clients": clients}

    def line(self) -> dict[str, Any]:
        """The round as a line of curves.jsonl.

        Example:
          >>> curves = CohortCurves()
          >>> curves.add("ann", (np.array([[6.0, 1.0, 2.0], [4.0, 2.0, 2.0]]),))
          >>> curves.add("bob", (np.array([[2.0, 2.0, 2.0]]),))
          >>> line = curves.line()
          >>> line["batch"]["loss"], line["batch"]["accuracy"], line["batch"]["clients"]
          ([2.0, 2.0], [0.75, 1.0], [2, 1])
          >>> line["epoch"]["loss"], line["epoch"]["tokens"], line["by_client"]["ann"]["loss"]
          ([2.0], [6], [2.5])
        """
        # Where nobody took a step there is no mean: clients may have been given fewer epochs, or fewer steps of one.
        taken = [epoch[epoch[:, 2] > 0] for epoch in self._steps]
        steps = [epoch for epoch in taken if len(epoch)]
        flat = np.concatenate([*steps, np.zeros((0, 4))])
        epochs = np.array([epoch.sum(0)[:3] for epoch in steps]).reshape(-1, 3)
        taking_part = [sum(len(c) > e and c[e, 2] > 0 for c in self._clients.values()) for e in range(len(steps))]
        named = self._clients if len(self._clients) <= MOST_NAMED else {}
        return {
            "clients": len(self._clients),
            "batch": {
                "epoch": [number for number, epoch in enumerate(steps, 1) for _ in epoch],
                **_means(flat),
                "clients": [int(count) for count in flat[:, 3]],
            },
            "epoch": {**_means(epochs), "clients": [int(count) for count in taking_part]},
            "by_client": {client: _means(sums[sums[:, 2] > 0]) for client, sums in named.items()},
        }


def _means(sums: NDArray[np.float64]) -> dict[str, Any]:
    """Loss (nats per token), accuracy and tokens of sums [n, 3 or 4] of tokens that are there."""
    nats, hits, tokens = sums[:, 0], sums[:, 1], sums[:, 2]
    return {
        "loss": (nats / tokens).tolist(),
        "accuracy": (hits / tokens).tolist(),
        "tokens": [int(count) for count in tokens],
    }


def joined_curves(parts: Iterable[Mapping[str, Any] | None], order: Sequence[ClientId]) -> CohortCurves | None:
    """Add up the `numbers` of several processes, clients in a given order; None where there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    out = CohortCurves()
    found = {client: np.array(sums).reshape(-1, 3) for part in given for client, sums in part["clients"].items()}
    out._clients = {client: found[client] for client in order if client in found}
    for part in given:
        for number, steps in enumerate(part["steps"]):
            out._join(number, np.array(steps).reshape(-1, 4))
    return out
