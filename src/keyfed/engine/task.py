"""A client's task in a round: read its state, solve, measure, add noise, compress, write the state it proposes.

The one way a client trains, whatever the process or device; the tasks of a block of clients are run together.

Learning curves say what every local step saw, per client and summed over a cohort. A step is known by its epoch and its
number in it. Nats, first guesses that were right (hits) and tokens add. So every mean is Σ nats / Σ tokens or Σ hits /
Σ tokens, never a mean of means. A client that has run out of steps is in neither sum. Losses and accuracies are those
of the forward pass that the step's gradient was taken from: before the step, with dropout where the model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.client_state import read_state, write_state
from keyfed.engine.problem import LocalProblem, measure, solve_block
from keyfed.federated.cohort import Work, derive_seed
from keyfed.federated.types import ClientId, LayerNumbers, Method, Params, Report
from keyfed.private.dp.noise import clipped, norm_of


class ClientTask(NamedTuple):
    """What one client does in a round.

    Attributes:
      state: the state file to go on from; None for a client that has none.
      propose: where to write the new state; None where the method's clients keep nothing.
      clip: largest norm of the upload, for clients that book what they sent; None for no clip.
    """

    client: int
    work: Work = Work()
    state: Path | None = None
    propose: Path | None = None
    clip: float | None = None


class Finished(NamedTuple):
    """One client's result, not stacked. `upload`, as the server reads it, is only valid until the next result.

    Attributes:
      weight: α_k in a running mean, and `joining`: see `Report`.
      error: ‖what the server reads − what was meant‖ / ‖what was meant‖; 0 without compression.
      clipped: the upload was longer than the task's clip, and is shortened to it.
      curve: what its steps saw, where they were counted.
      largest: largest magnitude in the upload, where the block was looked at as a whole; None: not looked at.
    """

    client: int
    upload: Params
    loss: float
    tokens: int
    worked: int
    distance: LayerNumbers
    weight: float = 0.0
    joining: bool = False
    error: float = 0.0
    clipped: bool = False
    curve: Curve | None = None
    largest: float | None = None


def report_of(client: ClientId, done: Finished) -> Report:
    """Return a client's report; in a round of public weights it stays with the client."""
    return Report(client, done.tokens, done.loss, done.worked, done.distance, done.weight, done.joining)


def kept(done: Finished) -> Finished:
    """Return a copy that stays valid."""
    return done._replace(upload={name: u.clone() for name, u in done.upload.items()})


def keeps_state(method: Method) -> bool:
    """Whether clients must remember something between rounds: duals, or what compression left out."""
    return method.solver.start is not None or (method.codec is not None and method.codec.feedback)


def run_tasks(
    problem: LocalProblem, theta: Params, tasks: Sequence[ClientTask], method: Method, round: int
) -> list[Finished]:
    """Let a block of clients solve together; return what each uploads and reports."""
    states = [_state_of(method, theta, task, problem.device) for task in tasks]
    own = _stack(states) if method.solver.start is not None else None
    members = [t.client for t in tasks]
    solution = solve_block(problem, theta, members, method, round, [t.work for t in tasks], own)
    uploads, at = solution.upload, None if method.noise is None else method.noise.at
    if at == "client-first":
        uploads = _noised(problem, method, theta, tasks, round, uploads)
    distances = measure(method, theta, uploads, len(tasks))
    if at == "client":
        uploads = _noised(problem, method, theta, tasks, round, uploads)
    loss, tokens, worked = solution.loss.tolist(), solution.tokens.tolist(), solution.worked.tolist()
    joined = solution.join_weight
    weight = [0.0] * len(tasks) if joined is None else joined.weight.tolist()
    joining = [False] * len(tasks) if joined is None else joined.joining.tolist()
    curves = unstack(solution.curve, len(tasks))
    largest = _largest(uploads) if len(tasks) > 1 else [None] * len(tasks)
    out = []
    for k, task in enumerate(tasks):
        meant = {name: u[k] for name, u in uploads.items()}
        name = problem.names[task.client]
        # With a clip everybody stands for θ from the start, and sends what has changed: no clip bounds θ itself.
        member = joining[k] and task.clip is not None
        if joining[k] and (method.codec is not None or member):
            # All that a joining client stands for would lose its small weights: its change is compressed instead, and
            # the server, which has θ, adds it back.
            change = {layer: u - theta[layer] for layer, u in meant.items()}
            read, proposal, error = _send(problem, method, round, name, change, states[k])
            upload = read if member else {layer: u + theta[layer] for layer, u in read.items()}
        else:
            upload, proposal, error = _send(problem, method, round, name, meant, states[k])
        shortened = task.clip is not None and norm_of(upload.values()) > task.clip
        if task.clip is not None:
            upload = clipped(upload, task.clip)
        if task.propose is not None:
            if solution.state is not None:
                proposal |= {key: t[k] for key, t in solution.state.items()}
                for layer, u in upload.items():  # what the server has is what it read, not what was meant
                    proposal[f"sent/{layer}"] = (theta[layer] if member else states[k][f"sent/{layer}"]) + u
            write_state(task.propose, proposal)
        out.append(
            Finished(
                task.client, upload, loss[k], int(tokens[k]), int(worked[k]), distances[k],
                float(weight[k]), bool(joining[k]) and not member, error, shortened, curves[k],
                largest[k] if upload is meant else None,
            )
        )  # fmt: skip
    return out


def _noised(
    problem: LocalProblem, method: Method, theta: Params, tasks: Sequence[ClientTask], round: int, uploads: Params
) -> Params:
    """Add to each client's stacked upload the noise that it draws itself."""
    assert method.noise is not None, "a method whose clients add noise"
    draw, names = method.noise.draw, [problem.names[task.client] for task in tasks]
    drawn = [draw(theta, _generator(problem, round, name, "noise")) for name in names]
    return {layer: u + torch.stack([noise[layer] for noise in drawn]) for layer, u in uploads.items()}


def _largest(uploads: Params) -> list[float | None]:
    """Largest magnitude of every client's stacked upload, read once: a GPU waits each time. Not a number stays so."""
    layers = [u.reshape(len(u), -1).abs().amax(1) for u in uploads.values()]
    return list(torch.stack(layers).amax(0).tolist())


def _send(
    problem: LocalProblem, method: Method, round: int, client: str, meant: Params, state: Params
) -> tuple[Params, Params, float]:
    """Compress an upload; return what the server reads, the residual to keep, and the relative error."""
    codec = method.codec
    if codec is None:
        return meant, {}, 0.0
    # Clients with duals upload the increment over what the server has: whatever is left out stays in it by itself.
    feedback = codec.feedback and method.solver.start is None
    if feedback:
        meant = {layer: u + state[f"residual/{layer}"] for layer, u in meant.items()}
    read = codec.unpack(codec.pack(meant, _generator(problem, round, client, "rounding")), meant)
    left = {layer: u - read[layer] for layer, u in meant.items()}
    size = sum(float(u.double().square().sum()) for u in meant.values())
    error = (sum(float(e.double().square().sum()) for e in left.values()) / size) ** 0.5 if size > 0 else 0.0
    return read, {f"residual/{layer}": e for layer, e in left.items()} if feedback else {}, error


def _state_of(method: Method, theta: Params, task: ClientTask, device: str) -> Params:
    """Return a client's state, or the one it starts with."""
    if not keeps_state(method):
        return {}
    if task.state is not None:
        return read_state(task.state, device)
    if method.solver.start is not None:
        return method.solver.start(theta)
    return {f"residual/{layer}": torch.zeros_like(p) for layer, p in theta.items()}


def _stack(states: Sequence[Params]) -> Params:
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}


def _generator(problem: LocalProblem, *purpose: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(problem.seed, *purpose))


Curve = tuple[NDArray[np.float64], ...]  # nats, hits and tokens of one client's steps, [steps, 3] an epoch
MOST_NAMED = 100  # clients of a round whose epochs are listed one by one


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
        self._clients[client] = np.stack([epoch.sum(0) for epoch in curve])
        for number, epoch in enumerate(curve):
            self._join(number, np.concatenate([epoch, epoch[:, 2:] > 0], 1))

    def _join(self, number: int, steps: NDArray[np.float64]) -> None:
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
        # Where no client took a step there is no mean: clients may have been given fewer epochs, or fewer steps of one.
        taken = [epoch[epoch[:, 2] > 0] for epoch in self._steps]
        steps = [epoch for epoch in taken if len(epoch)]
        flat = np.concatenate([*steps, np.zeros((0, 4))])
        epochs = np.array([epoch.sum(0)[:3] for epoch in steps]).reshape(-1, 3)
        clients = [sum(len(c) > e and c[e, 2] > 0 for c in self._clients.values()) for e in range(len(steps))]
        named = self._clients if len(self._clients) <= MOST_NAMED else {}
        return {
            "clients": len(self._clients),
            "batch": {
                "epoch": [number for number, epoch in enumerate(steps, 1) for _ in epoch],
                **_means(flat),
                "clients": [int(count) for count in flat[:, 3]],
            },
            "epoch": {**_means(epochs), "clients": [int(count) for count in clients]},
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
    found = [numbers for numbers in parts if numbers is not None]
    if not found:
        return None
    out = CohortCurves()
    rows = {client: np.array(sums).reshape(-1, 3) for numbers in found for client, sums in numbers["clients"].items()}
    out._clients = {client: rows[client] for client in order if client in rows}
    for numbers in found:
        for number, steps in enumerate(numbers["steps"]):
            out._join(number, np.array(steps).reshape(-1, 4))
    return out
