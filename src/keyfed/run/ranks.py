"""A run on several ranks: rank 0 trains as if it were alone and owns the folder; the others follow what it orders."""

from __future__ import annotations

import hashlib
import signal
import threading
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config, config_from, dump_toml, to_document
from keyfed.engine.client_state import ClientStates
from keyfed.engine.module import MakeModule
from keyfed.engine.network import init_params
from keyfed.engine.problem import LocalProblem
from keyfed.engine.ranks import Ended, RankedSimulation, Ranks, open_ranks, serve
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import keeps_state
from keyfed.errors import KeyfedError, RankError
from keyfed.federated.types import Method
from keyfed.run.compatible import Case, refuse
from keyfed.run.console import within
from keyfed.run.plan import Choice, plan
from keyfed.run.prepare import make_problem, prepare
from keyfed.run.secure import sums_of
from keyfed.system import Place, place
from keyfed.text.vocab import vocab_sha256


def together(where: Place, work: Callable[[Ranks], dict[str, Any]]) -> dict[str, Any]:
    """Meet the other ranks and work; whatever ends one rank ends all, and everybody returns rank 0's result."""
    ranks = open_ranks(where)
    try:
        result = work(ranks)
        ranks.end(result=result)
        return result
    except KeyboardInterrupt:
        ranks.end("stopped by Ctrl-C")
        raise
    except KeyfedError as e:
        ranks.end(str(e))
        raise
    except Exception as e:
        ranks.end(f"{type(e).__name__}: {e}")
        if where.rank == 0:
            raise
        if not isinstance(e, OSError):  # a full disk and the like need no more than rank 0's line
            traceback.print_exc()  # the one thing a follower ever prints: where a defect of ours is
        raise RankError(f"rank {where.rank}: {type(e).__name__}: {e}") from e
    finally:
        ranks.close()


def among(ranks: int, config: Config, method: Method, choice: Choice) -> Choice:
    """Return a choice for a rank, which is itself a worker; refuse what several ranks cannot do."""
    refuse("ranks", Case(config, method, ranks=ranks, device=choice.device))
    reason = f"{ranks} ranks, each {choice.device}, block {choice.block}"
    return replace(choice, workers=1, threads=choice.threads if choice.device != "cpu" else 1, reason=reason)


def lead(ranks: Ranks, config: Config, out: Path, method: Method, choice: Choice, fingerprint: str) -> None:
    """Tell the others what is trained, and wait until they are ready."""
    document = to_document(config)
    if method.spec is None:  # the caller's own, which every rank was given
        del document["method"]
    ranks.tell(
        {
            "config": dump_toml(document),
            "method": method.name,
            "folder": str(out.resolve()),
            "run": _sum_of(out / "run.toml"),
            "data_sha256": fingerprint,
            "vocab_sha256": vocab_sha256(config.data.vocab_file),
            "device": choice.device,
            "block": choice.block,
            "threads": choice.threads,
        }
    )
    ranks.gather({})


def federate(
    config: Config,
    problem: LocalProblem,
    choice: Choice,
    states: ClientStates | None,
    ranks: Ranks | None,
    listen: object = None,
) -> Simulation | RankedSimulation:
    """Return the simulation a run trains in, over all ranks where there are several.

    Args:
      listen: who is shown how far a round is (`console.within`).
    """
    hide = None if config.privacy.on else sums_of(config)
    bound = bound_of(config)
    local = Simulation(problem, block=choice.block, workers=choice.workers, bound=bound, states=states, hide=hide)
    local.progress = lambda number, all: within(listen, f"client {number:,} of {all:,}")
    return local if ranks is None else RankedSimulation(local, ranks, states)


def bound_of(config: Config) -> float | None:
    """Return the largest norm of an upload; none in a private run, where the clip bounds it and clients ignore it."""
    return None if config.privacy.on else config.upload.bound


def follow(ranks: Ranks, module: MakeModule | None = None, own: Method | None = None) -> dict[str, Any]:
    """Prepare what rank 0 says and train this rank's part of every round; return rank 0's result.

    Args:
      module: the caller's own model, and `own` method: neither can be sent, so every rank is given them.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears Ctrl-C too, ends its round and then the run
    try:
        order = ranks.hear()
        config = config_from(tomllib.loads(order["config"]), "rank 0's configuration")
        prepared = prepare(config, module)
        if prepared.corpus.fingerprint() != order["data_sha256"]:
            raise RankError(
                f"the text of {prepared.corpus.name} is not the one rank 0 has; bring the same files to both machines"
            )
        if vocab_sha256(config.data.vocab_file) != order["vocab_sha256"]:
            raise RankError(f"{config.data.vocab_file} is not the vocabulary rank 0 has; bring the same file to both")
        method, _ = plan(config, prepared, own)
        if method.name != order["method"]:
            raise RankError(
                f"this rank was given the method {method.name}, rank 0 {order['method']}; give both the same"
            )
        problem = make_problem(prepared, config, method, _device(order["device"], place()))
        states = _states(Path(order["folder"]), order["run"], method) if keeps_state(method) else None
        torch.set_num_threads(order["threads"])
        like = init_params(prepared.spec, config.train.seed)
        ranks.gather({})
        with Simulation(problem, block=order["block"], bound=bound_of(config), states=states) as local:
            serve(local, ranks, method, like, states)
    except Ended as end:
        if end.failed:
            raise
        return dict(end.result)
    raise AssertionError("serve() ends by raising")


def _device(leaders: str, where: Place) -> str:
    """Return this rank's device: a GPU of its own where rank 0 has one."""
    if not leaders.startswith("cuda"):
        return leaders
    found = torch.cuda.device_count()
    if where.local >= found:
        raise RankError(f"{where.neighbours} ranks on a machine with {found} GPUs; start at most one rank for each")
    torch.cuda.set_device(where.local)
    return f"cuda:{where.local}"


def _states(folder: Path, run: str, method: Method) -> ClientStates:
    """Return the clients' states, having made sure that this rank sees rank 0's folder."""
    if _sum_of(folder / "run.toml") != run:
        raise RankError(
            f"{folder} is not rank 0's run folder on this machine, and clients of {method.name} keep their state "
            "there; put --out on a disk that all machines share"
        )
    return ClientStates(folder / "clients")


def _sum_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"
