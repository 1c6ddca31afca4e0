"""A client's turn in a round: read its state, solve, measure, add noise, compress, write the state it proposes.

The one way a client trains in simulation, whatever the process or device; a block of clients takes its turn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from keyfed.engine.client_state import read_state, write_state
from keyfed.engine.curves import Curve, unstack
from keyfed.engine.problem import LocalProblem, measure, solve_block
from keyfed.federated.cohort import Work, derive_seed
from keyfed.federated.types import LayerNumbers, Method, Params
from keyfed.private.dp.noise import clipped, norm_of


class Turn(NamedTuple):
    """Whose turn it is.

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
    """One client's result, not stacked. `upload`, as the server reads it, is only valid until the next is asked for.

    Attributes:
      weight: α_k in a running mean, and `joining`: see `Report`.
      error: ‖what the server reads − what was meant‖ / ‖what was meant‖; 0 without compression.
      clipped: the upload was longer than the turn's clip, and is shortened to it.
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


def keeps_state(method: Method) -> bool:
    """Whether clients must remember something between rounds: duals, or what compression left out."""
    return method.solver.start is not None or (method.codec is not None and method.codec.feedback)


def take_turns(
    problem: LocalProblem, theta: Params, turns: Sequence[Turn], method: Method, round: int
) -> list[Finished]:
    """Let a block of clients solve together; return what each uploads and reports."""
    states = [_state_of(method, theta, turn, problem.device) for turn in turns]
    own = _stack(states) if method.solver.start is not None else None
    members = [t.client for t in turns]
    solution = solve_block(problem, theta, members, method, round, [t.work for t in turns], own)
    distances = measure(method, theta, solution.upload, len(turns))
    loss, tokens, worked = solution.loss.tolist(), solution.tokens.tolist(), solution.worked.tolist()
    standing = solution.standing
    weight = [0.0] * len(turns) if standing is None else standing.weight.tolist()
    joining = [False] * len(turns) if standing is None else standing.joining.tolist()
    curves = unstack(solution.curve, len(turns))
    noisy = method.noise is not None and method.noise.at == "client"
    largest = _largest(solution.upload) if len(turns) > 1 and not noisy else [None] * len(turns)
    out = []
    for k, turn in enumerate(turns):
        meant = {name: u[k] for name, u in solution.upload.items()}
        name = problem.names[turn.client]
        if noisy and method.noise is not None:
            drawn = method.noise.draw(theta, _generator(problem, round, name, "noise"))
            meant = {layer: u + drawn[layer] for layer, u in meant.items()}
        # With a clip everybody stands for θ from the start, and sends what has changed: no clip bounds θ itself.
        member = joining[k] and turn.clip is not None
        if joining[k] and (method.codec is not None or member):
            # All that a joining client stands for would lose its small weights: its change is compressed instead, and
            # the server, which has θ, adds it back.
            change = {layer: u - theta[layer] for layer, u in meant.items()}
            read, proposal, error = _send(problem, method, round, name, change, states[k])
            upload = read if member else {layer: u + theta[layer] for layer, u in read.items()}
        else:
            upload, proposal, error = _send(problem, method, round, name, meant, states[k])
        shortened = turn.clip is not None and norm_of(upload.values()) > turn.clip
        if turn.clip is not None:
            upload = clipped(upload, turn.clip)
        if turn.propose is not None:
            if solution.state is not None:
                proposal |= {key: t[k] for key, t in solution.state.items()}
                for layer, u in upload.items():  # what the server has is what it read, not what was meant
                    proposal[f"sent/{layer}"] = (theta[layer] if member else states[k][f"sent/{layer}"]) + u
            write_state(turn.propose, proposal)
        out.append(
            Finished(
                turn.client, upload, loss[k], int(tokens[k]), int(worked[k]), distances[k],
                float(weight[k]), bool(joining[k]) and not member, error, shortened, curves[k],
                largest[k] if upload is meant else None,
            )
        )  # fmt: skip
    return out


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


def _state_of(method: Method, theta: Params, turn: Turn, device: str) -> Params:
    """Return a client's state, or the one it starts with."""
    if not keeps_state(method):
        return {}
    if turn.state is not None:
        return read_state(turn.state, device)
    if method.solver.start is not None:
        return method.solver.start(theta)
    return {f"residual/{layer}": torch.zeros_like(p) for layer, p in theta.items()}


def _stack(states: Sequence[Params]) -> Params:
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}


def _generator(problem: LocalProblem, *purpose: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(problem.seed, *purpose))
