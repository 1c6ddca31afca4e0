"""Rounds on one process or on several ranks; started as a process (`-m`), it is one of the ranks of all cases."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import TCPStore

from keyfed.engine.client_state import ClientStates
from keyfed.engine.ranks import RankedSimulation, Ranks, serve
from keyfed.engine.simulate import Simulation
from keyfed.errors import RankError
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Method

from .test_methods import problem_of, theta_of

ROUNDS = 3
TROUBLES = ("interrupted", "fails", "dies")
SIZES = [50, 11, 23, 31, 44]


class Case(NamedTuple):
    """A method, who is called in each round, whose upload is lost, and which client fails or dies."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    cohorts: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4),) * ROUNDS
    lost: tuple[tuple[int, ...], ...] = ((),) * ROUNDS
    parts: Mapping[str, Any] = MappingProxyType({})
    bound: float | None = None


CASES = {
    "fedavg": Case("fedavg"),
    "softmax peaks": Case("fedatt", {"temperature": 0.01}),
    "top-K": Case("fedmed", {"beta": 0.5, "threshold": 10.0}),
    "duals, lost uploads": Case("admm", cohorts=((0, 1, 2), (3, 2, 4, 0), (4, 3, 1, 0)), lost=((1,), (2, 0), ())),
    "server noise": Case("fedatt", {"noise": 0.01, "noise_at": "server"}),
    "noise in the sum": Case("fedavg", {"noise": 0.01, "noise_at": "sum"}),
    "compression": Case("fedadam", parts={"keep": 0.2, "quantise": "int8"}, cohorts=((0, 1, 2), (2, 0, 1), (1, 2, 3))),
    "fewer clients than ranks": Case("fedavg", cohorts=((3,), (), (1,))),
    "refused": Case("fedavg", bound=0.86),
}


def method_of(case: Case) -> Method:
    """The case's method with small plain steps."""
    usual = {"lr": 0.5, "batch_size": 2, "epochs": 2, "momentum": 0.5, "optimiser": "sgd"}
    known = method_options(case.name)
    return build_method(
        MethodSpec(case.name, {k: v for k, v in usual.items() if k in known} | dict(case.options), **case.parts)
    )


def simulation_of(case: Case, states: ClientStates) -> Simulation:
    """What trains clients in one process, or a rank's part of them."""
    return Simulation(problem_of(SIZES), bound=case.bound, states=states)


def run_rounds(case: Case, federation: Any, states: ClientStates) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Run the case; return the parameters and what the rounds told."""
    method = method_of(case)
    state, told = initial_state(method, theta_of(dtype=torch.float32)), []
    for cohort, lost in zip(case.cohorts, case.lost, strict=True):
        names = [f"c{k}" for k in cohort]
        federation.expect({f"c{k}": Fate(k, Work(), 0.0, "dropped before upload") for k in lost})
        state, summary = run_round(method, state, names, federation)
        told.append({**asdict(summary), "error": federation.compression_error, "states": dict(states.rounds)})
    return dict(state.params), json.loads(json.dumps(told))


def lead_case(case: Case, ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """Rank 0 of one case; writes what the rounds told."""
    states = ClientStates(folder / "clients")
    with RankedSimulation(simulation_of(case, states), ranks, states) as federation:
        params, told = run_rounds(case, federation, states)
    (folder / "told.json").write_text(json.dumps(told))
    return params


def follow_case(case: Case, ranks: Ranks, folder: Path, trouble: str | None = None) -> None:
    """Another rank of one case; with `trouble` its second round may fail, or kill it."""
    states = ClientStates(folder / "clients")
    with simulation_of(case, states) as local:
        if trouble is not None:
            local.train = _spoilt(local.train, trouble)  # type: ignore[method-assign]
        serve(local, ranks, method_of(case), theta_of(dtype=torch.float32), states)


def _spoilt(train: Any, trouble: str) -> Any:
    def spoilt(params: Any, cohort: Any, method: Any, round: int) -> Any:
        if round == 1 and trouble == "dies":
            os._exit(9)
        if round == 1 and trouble == "fails":
            raise RankError("the disk is full")
        return train(params, cohort, method, round)

    return spoilt


def _interrupting() -> Any:
    """Return a broadcast that presses Ctrl-C once it has sent the first of the second round's tensors."""
    send, layers, sent = dist.broadcast, len(theta_of()), []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        group = dist.group.WORLD  # held while it works, as torch does
        send(tensor, src=src, group=group)
        sent.append(tensor)
        if len(sent) == layers + 1:
            signal.raise_signal(signal.SIGINT)

    return broadcast


def interrupt_case(case: Case, ranks: Ranks, folder: Path) -> None:
    """Rank 0 of a case that Ctrl-C ends; writes who has taken leave when it is through with waiting."""
    send, dist.broadcast = dist.broadcast, _interrupting()
    try:
        lead_case(case, ranks, folder)
    except KeyboardInterrupt:  # here its traceback is alive, as it is in a run
        dist.broadcast = send
        ranks.end("stopped by Ctrl-C")
        (folder / "left").write_text(str(ranks.left()))


def main() -> None:
    """Go through all cases as one rank; then be interrupted, then fail, then die."""
    rank, world, port, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    if rank == 0:
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=int(sys.argv[5]))
    else:
        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for name, trouble in [*((name, None) for name in CASES), *(("fedavg", how) for how in TROUBLES)]:
        folder = out / (trouble or name)
        folder.mkdir(exist_ok=True)
        ranks = Ranks(store, rank, world, silence=2.0)
        try:
            if rank == 0 and trouble == "interrupted":
                interrupt_case(CASES[name], ranks, folder)
            elif rank == 0:
                save_file(lead_case(CASES[name], ranks, folder), folder / "params.safetensors")
            else:
                follow_case(CASES[name], ranks, folder, trouble)
            ranks.end(result={})
        except RankError as e:  # Ended is one: it is how a run is over for those who serve
            ranks.end(str(e))
            (folder / f"error-{rank}").write_text(str(e))
        ranks.close()


if __name__ == "__main__":
    main()
