"""Several processes that train one run: rank 0 leads, the others follow.

Orders, reports and shares go as JSON through torch's key-value store. What is summed goes through gloo, whose
operations are entered only when every rank has said that it is there. So no rank waits for one that failed: its last
word is in the store, and one that cannot say anything any more is missed by its heartbeat.

Each rank trains every n-th client of a round, and the sums are added (`RankedSimulation`, `serve`).

    rank 0:  order ──► θ to all ──► train own part ──► exchange reports ──► weigh ──► shares to all ──► add the sums
    others:  hear  ──► θ        ──► train own part ──► exchange reports ──►           shares        ──► add the sums

Rank 0 alone weighs, steps and acknowledges. Reports come in the order of the cohort, so that only the rounding of the
sum tells how many ranks there were. A softmax is summed relative to the largest logarithm of all ranks, agreed on
before the sums are added. Client states are files, which all ranks see in the same folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stubs forget them

from keyfed.engine.client_state import ClientStates
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import CohortCurves, joined_curves, keeps_state
from keyfed.errors import RankError
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.types import (
    Accumulator,
    Aggregate,
    Caps,
    ClientId,
    LayerNumbers,
    Method,
    Params,
    Public,
    Refusal,
    Report,
    Share,
)
from keyfed.system import Place

MEETING = 300.0  # seconds in which all ranks must have come, and in which a sum must be through
SILENCE = 60.0  # seconds without a heartbeat after which a rank counts as dead
BEAT = 1.0
FAREWELL = 3.0  # seconds rank 0 waits for the others to have heard that it is over
_END = "end"
_openings = itertools.count()  # runs trained by this process, one after the other: each has keys of its own


class Ended(RankError):
    """The run is over, by the word of a rank.

    Attributes:
      result: what rank 0 has to show; None if the run failed.
    """

    def __init__(self, rank: int, error: str | None, result: Any = None) -> None:
        super().__init__(f"rank {rank}: {error}" if rank else error or "the run is over")
        self.result = result
        self.failed = error is not None


class Ranks:
    """The ranks of a run, seen from one of them.

    Args:
      store: where all ranks leave what they say.
      silence: seconds without a heartbeat after which a rank counts as dead.
    """

    def __init__(self, store: Store, rank: int, world: int, *, silence: float = SILENCE) -> None:
        self.rank, self.world = rank, world
        self._silence = silence
        prefix = f"keyfed-{next(_openings)}"
        self._store = PrefixStore(prefix, store)
        self._ordered, self._forgotten, self._gathered = 0, 0, 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of each rank, and when it was new here
        self._looked = time.monotonic()
        self._missed = False  # whether somebody was
        self._over = threading.Event()
        self._beating: threading.Thread | None = None
        if world > 1:
            # A connection of its own, which no other call can hold up.
            pulse = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # its stubs forget it
            self._beating = threading.Thread(target=self._beat, args=(pulse,), daemon=True)
            self._beating.start()
            try:
                dist.init_process_group(
                    "gloo", store=PrefixStore("gloo", self._store), rank=rank, world_size=world,
                    timeout=timedelta(seconds=MEETING),
                )  # fmt: skip
            except (RuntimeError, ValueError) as e:  # a ValueError where the caller has a group already
                raise RankError(f"rank {rank} of {world} did not meet the others: {_first_line(e)}") from e

    def tell(self, message: Mapping[str, Any]) -> None:
        """Give an order to all others (rank 0)."""
        self._store.set(f"told/{self._ordered}", json.dumps(message))
        self._ordered += 1

    def hear(self) -> dict[str, Any]:
        """Wait for the next order of rank 0, however long it thinks."""
        message: dict[str, Any] = self._await(f"told/{self._ordered}")
        self._ordered += 1
        return message

    def gather(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange a JSON value with every rank; return all, in the order of ranks."""
        number = self._gathered
        self._store.set(f"part/{number}/{self.rank}", json.dumps(mine))
        parts = [self._await(f"part/{number}/{rank}") for rank in range(self.world)]
        self._gathered += 1
        # A rank that takes part in this exchange has read all of the one before, and every order.
        if number:
            self._store.delete_key(f"part/{number - 1}/{self.rank}")
        if self.rank == 0:
            for order in range(self._forgotten, self._ordered):
                self._store.delete_key(f"told/{order}")
            self._forgotten = self._ordered
        return parts

    def spread(self, params: Params) -> None:
        """Overwrite everybody's tensors by those of rank 0."""
        self._together(lambda: [dist.broadcast(p, src=0) for p in params.values()])

    def add(self, params: Params) -> None:
        """Replace everybody's tensors by their sum over ranks."""
        self._together(lambda: [dist.all_reduce(p, op=dist.ReduceOp.SUM) for p in params.values()])

    def _together(self, operation: Any) -> None:
        if self.world == 1:
            return
        try:
            with _ctrl_c_waits():
                operation()
        except RuntimeError as e:
            self._raise_if_over()
            raise RankError(f"rank {self.rank} lost another rank while summing: {_first_line(e)}") from e

    def end(self, error: str | None = None, result: Any = None) -> None:
        """Say that it is over; the first word counts."""
        try:
            word = json.dumps({"rank": self.rank, "error": error, "result": result})
            self._store.compare_set(_END, "", word)
        except RuntimeError:
            return  # the store is gone, and with it rank 0: there is no rank to tell
        if self.rank == 0:
            self._leave()  # a rank that waits in the middle of a sum is let go, and finds the word
            if not self._missed:
                self._await_farewells()

    def left(self) -> bool:
        return bool(self._store.check([f"bye/{rank}" for rank in range(1, self.world)]))

    def close(self) -> None:
        self._over.set()
        if self._beating is None:
            return
        self._beating.join()
        self._leave()
        if self.rank > 0:
            try:
                self._store.set(f"bye/{self.rank}", "")
            except RuntimeError:
                return  # rank 0 did not wait

    def _leave(self) -> None:
        if self._beating is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _await_farewells(self) -> None:
        """Keep the store up until the others have read the end, for a while."""
        limit = time.monotonic() + FAREWELL
        try:
            while not self.left() and time.monotonic() < limit:
                time.sleep(0.01)
        except RuntimeError:
            return

    def _await(self, key: str) -> Any:
        pause = 0.001
        try:
            while not self._store.check([key]):
                self._raise_if_over()
                self._look_for_silence()
                time.sleep(pause)
                pause = min(0.02, 1.5 * pause)
            return json.loads(self._store.get(key))
        except RuntimeError as e:
            raise RankError(f"rank {self.rank} lost rank 0: {_first_line(e)}; what it checkpointed is whole") from e

    def _raise_if_over(self) -> None:
        if self._store.check([_END]):
            raise Ended(**json.loads(self._store.get(_END)))

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        if now - self._looked < BEAT:
            return
        self._looked = now
        for rank in range(self.world):
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            before, since = self._heard.get(rank, (None, now))
            if beat != before:
                self._heard[rank] = (beat, now)
            elif now - since > self._silence:
                self._missed = True
                raise RankError(
                    f"rank {rank} of {self.world} has not been heard of for {self._silence:.0f} seconds; go on with "
                    "--resume once its machine is back"
                )

    def _beat(self, store: Store) -> None:
        """Count up in the store until it is over, whatever the rank is busy with."""
        for count in itertools.count():
            try:
                store.set(f"beat/{self.rank}", str(count))
            except RuntimeError:
                return
            if self._over.wait(BEAT):
                return


def open_ranks(place: Place) -> Ranks:
    """Meet the other ranks where the environment says."""
    if place.neighbours == place.world and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing listens beyond it
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
    timeout = timedelta(seconds=MEETING)
    try:
        if place.rank == 0 and not hosted:
            # A socket of ours, because torch's would listen on every address of the machine.
            listening = socket.create_server((place.host, place.port))
            store = TCPStore(
                place.host, place.port, None, True, timeout, wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        else:
            store = TCPStore(place.host, place.port, None, False, timeout, wait_for_workers=False)
    except (OSError, RuntimeError) as e:
        raise RankError(
            f"rank {place.rank} of {place.world} cannot meet the others at {place.host}:{place.port}: {_first_line(e)}"
        ) from e
    return Ranks(store, place.rank, place.world)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block.

    An operation that it cuts in two lives on in the traceback, and with it the connections by which the others wait for
    this rank: they would be let go by its exit only, when the store is gone as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *signalled: pressed.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[-1])


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


class RankedSimulation:
    """`Federation` over the simulations of all ranks; this is rank 0's side, `serve` the others'.

    Args:
      local: what trains this rank's part.
      states: where clients keep what they remember, the same folder on all ranks; needed if the method's clients do.
    """

    def __init__(self, local: Simulation, ranks: Ranks, states: ClientStates | None = None) -> None:
        self._local, self._ranks, self._states = local, ranks, states
        self._fates: Mapping[ClientId, Fate] = {}
        self._trained: list[ClientId] = []
        self._round, self._remembering = 0, False
        self.compression_error: float | None = None  # of the last round: mean over the clients that trained
        self.curves: CohortCurves | None = None  # of the last round, see `Simulation`
        self.secure: Mapping[str, Any] | None = None  # ranks form no secure sums

    def expect(self, fates: Mapping[ClientId, Fate]) -> None:
        """Say what becomes of the clients of the next round; who is not named trains and uploads."""
        self._fates = fates

    def limit(self, caps: Caps) -> None:
        """Refuse: the uploads of a round are on several ranks, and none sees the others' norms."""
        raise RankError(f"a limit on uploads ({caps}) needs all of them in one process; train in one")

    def gather_by(self, gather: Callable[[Params], Accumulator], clip: float | None = None) -> None:
        """Refuse: the sums of ranks are added, and only running sums can be."""
        raise RankError("a private sum needs all uploads in one process; train in one")

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int, public: Public | None = None
    ) -> Mapping[ClientId, Report]:
        """Let every rank train its part of the cohort; return the reports of all, in the order of the cohort."""
        if method.report_free or public is not None:
            raise RankError(f"{method.name} hides its reports, and ranks exchange them; train it in one process")
        self._round, self._remembering = round, keeps_state(method)
        self._trained = [c for c in cohort if c not in self._fates or self._fates[c].reports]
        joined: dict[ClientId, int] = {}
        if self._remembering:
            if self._states is None:
                raise RankError(f"{method.name} has clients that remember, and ranks share no folder for their states")
            if method.origin is not None and method.solver.start is not None:
                self._states.begin_from(method.solver.start(method.origin))
            joined = {c: self._states.rounds[c] for c in self._trained if c in self._states.rounds}
        fates = {c: asdict(self._fates[c]) for c in self._trained if c in self._fates}
        self._ranks.tell(
            {
                "do": "train", "round": round, "clients": self._trained, "fates": fates, "joined": joined,
                "halvings": method.halvings,
            }
        )  # fmt: skip
        self._ranks.spread(params)
        self._local.expect(self._fates)
        reports, self.compression_error, self.curves = _train_own(
            self._local, self._ranks, params, self._trained, method, round
        )
        return reports

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the sum over the clients of all ranks."""
        sent = None if shares is None else {client: asdict(share) for client, share in shares.items()}
        self._ranks.tell({"do": "collect", "shares": sent})
        return self._local.noised(_add_up(self._local, self._ranks, shares, self._trained))

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Let the states of those in the sum count, whichever rank trained them."""
        if self._states is not None and self._remembering:
            self._states.acknowledge(self._round, self._trained, contributors)

    def close(self) -> None:
        self._local.close()

    def __enter__(self) -> RankedSimulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(local: Simulation, ranks: Ranks, method: Method, like: Params, states: ClientStates | None = None) -> None:
    """Train this rank's part of every round, as rank 0 orders, until it raises `Ended`.

    Args:
      like: tensors of the model's shapes; they hold θ from the first round on.
    """
    trained: list[ClientId] = []
    while True:
        order = ranks.hear()
        if order["do"] == "train":
            trained = order["clients"]
            ranks.spread(like)
            local.expect({c: Fate(**{**fate, "work": Work(**fate["work"])}) for c, fate in order["fates"].items()})
            if states is not None:
                states.rounds = order["joined"]  # rank 0 acknowledges, and removes what no longer counts
            eased = replace(method, halvings=order["halvings"])
            _train_own(local, ranks, like, trained, eased, order["round"])
        else:
            sent = order["shares"]
            shares = None if sent is None else {client: Share(**share) for client, share in sent.items()}
            _add_up(local, ranks, shares, trained)


def _train_own(
    local: Simulation, ranks: Ranks, params: Params, trained: Sequence[ClientId], method: Method, round: int
) -> tuple[dict[ClientId, Report], float | None, CohortCurves | None]:
    """Train every n-th client; return the reports of all ranks, their mean error of compression and their curves."""
    mine = local.train(params, trained[ranks.rank :: ranks.world], method, round)
    curves = None if local.curves is None else local.curves.numbers()
    parts = ranks.gather(
        {"reports": [asdict(r) for r in mine.values()], "error": local.compression_error, "curves": curves}
    )
    found = {report["client"]: Report(**report) for part in parts for report in part["reports"]}
    errors = [(part["error"], len(part["reports"])) for part in parts if part["error"] is not None]
    counted = sum(count for _, count in errors)
    error = sum(mean * count for mean, count in errors) / counted if counted else None
    reports = {client: found[client] for client in trained if client in found}
    return reports, error, joined_curves([part["curves"] for part in parts], list(reports))


def _add_up(
    local: Simulation, ranks: Ranks, shares: Mapping[ClientId, Share] | None, order: Sequence[ClientId]
) -> Aggregate:
    """Add the sums of all ranks; everybody returns the same aggregate."""
    own = local.summed(shares)
    own.level(_largest([part["peaks"] for part in ranks.gather({"peaks": own.peaks})]))
    mine = own.aggregate(local.refused)
    told: dict[str, Any] = {name: getattr(mine, name) for name in ("mass", "weight", "squares", "weights")}
    parts = ranks.gather({**told, "refused": [asdict(r) for r in mine.refused]})
    ranks.add(mine.total)
    mass, weight, squares = (_sum([part[name] for part in parts]) for name in ("mass", "weight", "squares"))
    weights = {
        client: {name: w * part["weight"][name] / weight[name] if weight[name] > 0 else 0.0 for name, w in own.items()}
        for part in parts
        for client, own in part["weights"].items()
    }
    refused = {r["client"]: Refusal(**r) for part in parts for r in part["refused"]}
    contributors = tuple(client for client in order if client in weights)
    return Aggregate(
        mine.total, mass, weight, squares, contributors,
        tuple(refused[client] for client in order if client in refused),
        {client: weights[client] for client in contributors},
    )  # fmt: skip


def _largest(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    names = dict.fromkeys(name for part in numbers for name in part)
    return {name: max(part[name] for part in numbers if name in part) for name in names}


def _sum(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    return {name: sum(part[name] for part in numbers) for name in numbers[0]}
