"""The simulation: a federation inside this machine.

Uploads are scaled and summed as each client ends, in client order whatever the block or the number of workers, so
memory is O(block × model) for any cohort. A mediator that must see all reports first has the uploads kept until then,
and so has a run that compares their directions (`upload.against`) or trims their mean (`upload.trim`): O(cohort ×
model).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keyfed.engine.client_state import ClientStates
from keyfed.engine.problem import LocalProblem, measure
from keyfed.engine.sums.plain import (
    MakeSelfWeighed,
    RunningSum,
    SelfWeighedAccumulator,
    SelfWeighedRound,
    SelfWeighedSum,
    sum_for,
)
from keyfed.engine.task import ClientTask, CohortCurves, Finished, keeps_state, kept, report_of, run_tasks
from keyfed.engine.workers import WorkerPool
from keyfed.errors import SecureSumOverflow
from keyfed.federated.cohort import Fate, Work, derive_seed, eased
from keyfed.federated.soundness import against_others, norm_of
from keyfed.federated.types import (
    Accumulator,
    Aggregate,
    Caps,
    ClientId,
    Method,
    Params,
    Public,
    Refusal,
    Report,
    Share,
)
from keyfed.federated.upload import noised

STATEFUL = 4.0  # times the cap of an upload, beyond which that of a client that keeps state is refused
LARGEST_CHANGE = 1e6  # of one weight in one round; beyond it lies only divergence


def refusal(client: ClientId, done: Finished, theta: Params, bound: float | None = None) -> Refusal | None:
    """Say why a client must not enter the sum, or None.

    Args:
      bound: largest norm of a client's change and of a claimed distance; None for no bound but LARGEST_CHANGE.
    """
    if done.tokens <= 0:
        return Refusal(client, "no text")
    if not all(math.isfinite(x) for x in (done.loss, done.weight, *done.distance.values())):
        return Refusal(client, "non-finite report")
    shapes = {name: (u.shape, u.dtype) for name, u in done.upload.items()}
    if shapes != {name: (p.shape, p.dtype) for name, p in theta.items()}:
        return Refusal(client, "wrong shape")
    largest = done.largest
    if largest is None:
        largest = float(torch.stack([u.abs().amax() for u in done.upload.values()]).amax())
    if not math.isfinite(largest):
        return Refusal(client, "non-finite upload")
    if largest > LARGEST_CHANGE:
        return Refusal(client, "exploding upload")
    if bound is not None and max(change_norm(done, theta), *done.distance.values(), 0.0) > bound:
        return Refusal(client, "exploding upload")
    return None


def change_norm(done: Finished, theta: Params) -> float:
    """Return the norm of what a client changed; one that joins sends all it stands for, which lies that far from θ."""
    return norm_of({name: u - theta[name] if done.joining else u for name, u in done.upload.items()})


class Limited(NamedTuple):
    """An upload within its cap: the norm it came with, and whether it was shortened."""

    done: Finished
    norm: float
    shortened: bool


def limited(client: ClientId, done: Finished, theta: Params, method: Method, caps: Caps) -> Limited | Refusal:
    """Shorten an upload that is longer than its cap.

    A client that keeps state would not know what became of its upload: it is refused beyond `STATEFUL` times the cap.
    So is one whose weight in a running mean is beyond that of the tokens.
    """
    norm, stateful = change_norm(done, theta), keeps_state(method)
    if stateful and caps.tokens is not None and done.weight > STATEFUL * caps.tokens:
        return Refusal(client, "does not fit")
    if caps.norm is None or norm <= caps.norm * (STATEFUL if stateful else 1.0):
        return Limited(done, norm, shortened=False)
    if stateful:
        return Refusal(client, "exploding upload")
    upload = {name: u * (caps.norm / norm) for name, u in done.upload.items()}
    stacked = {name: u[None] for name, u in upload.items()}
    done = done._replace(upload=upload, distance=measure(method, theta, stacked, 1)[0])
    return Limited(done, norm, shortened=True)


def capped(done: Finished, caps: Caps | None) -> Finished:
    """Let a client count for no more tokens than its cap."""
    if caps is None or caps.tokens is None or done.tokens <= caps.tokens:
        return done
    return done._replace(tokens=caps.tokens)


class Simulation:
    """`Federation` over the clients of a problem; worker processes on a CPU, stacked blocks on a GPU.

    Args:
      bound: largest norm of an upload, see `refusal`.
      states: where clients keep what they remember; None for a folder that lives as long as the simulation.
      gather: makes what a round's uploads are added to, from tensors like θ.
      hide: makes what uploads of clients that weigh themselves are added to (a secure sum); None adds them to
        `gather`'s in the clear.
    """

    def __init__(
        self,
        problem: LocalProblem,
        *,
        block: int = 1,
        workers: int = 1,
        bound: float | None = None,
        states: ClientStates | None = None,
        gather: Callable[[Params], Accumulator] = RunningSum,
        hide: MakeSelfWeighed | None = None,
    ) -> None:
        self._problem = problem
        self._block = block
        self._bound = bound
        self._pool = WorkerPool(problem, workers) if workers > 1 else None
        self._index: dict[ClientId, int] | None = None  # made when somebody is called whose fate does not say who it is
        self._fates: Mapping[ClientId, Fate] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._states = states
        self._round, self._remembering = 0, False  # the round in progress, and whether its clients keep state
        self._trained: list[ClientId] = []
        self._gather, self._hide = gather, hide
        self._clip: float | None = None  # of uploads that clients which keep state book as sent
        self._sum: Accumulator | None = None
        self._self_weighed: SelfWeighedAccumulator | None = None  # of a round whose reports stay with the clients
        self._kept: dict[ClientId, Finished] = {}
        self._shares: dict[ClientId, Share] = {}  # of kept uploads that are within their caps already
        self._caps: Caps | None = None  # of the uploads of a round; None in a run without limits
        self._theta: Params = {}
        self._method: Method | None = None
        self._norms: dict[ClientId, float] = {}
        self._shortened: list[ClientId] = []
        self._refused: list[Refusal] = []
        self.compression_error: float | None = None  # of the last round: mean over the clients that trained
        self.curves: CohortCurves | None = None  # of the last round, where the problem counts its steps
        self.progress: Callable[[int, int], None] = lambda done, all: None  # called as each client of a round ends
        self.secure: Mapping[str, Any] | None = None  # what the last round's secure sum cost; None for a plain one

    def expect(self, fates: Mapping[ClientId, Fate]) -> None:
        """Say what becomes of the clients of the next round; who is not named trains and uploads."""
        self._fates = fates

    def limit(self, caps: Caps) -> None:
        """Say what uploads of the next round may be at most."""
        self._caps = caps

    def gather_by(self, gather: Callable[[Params], Accumulator], clip: float | None = None) -> None:
        """Say how the next rounds are summed.

        Args:
          clip: largest norm of an upload that a client which keeps state books as sent; None for no clip.
        """
        self._gather, self._clip = gather, clip

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int, public: Public | None = None
    ) -> Mapping[ClientId, Report]:
        """Train the cohort; sum at once where clients weigh themselves, else keep the uploads."""
        trims = self._caps is not None and self._caps.trim
        self._sum = sum_for(params, self._caps) if trims else self._gather(params)
        self._kept, self._refused = {}, []
        self._theta, self._method, self._norms, self._shortened = params, method, {}, []
        self._self_weighed, self.secure, self.curves, self._shares = None, None, None, {}
        self._round, self._remembering = round, keeps_state(method)
        self._trained = [c for c in cohort if c not in self._fates or self._fates[c].reports]
        if method.report_free:
            assert public is not None, "clients of a hidden method weigh themselves by public numbers"
            current = SelfWeighedRound(params, method, public, round, tuple(cohort), tuple(self._trained))
            self._self_weighed = SelfWeighedSum(current, self._sum) if self._hide is None else self._hide(current)
        reports: dict[ClientId, Report] = {}
        errors: list[float] = []
        layers = list(params)
        solved = self._solve(params, [self._task(c, method, round) for c in self._trained], method, round)
        for number, done in enumerate(solved, 1):
            self.progress(number, len(self._trained))
            client = self._problem.names[done.client]
            done = capped(done, self._caps)
            refused = refusal(client, done, params, self._bound)
            if refused is None and method.mediator.share is not None and not self._vanishes(client):
                found = self._limited(client, done)
                done, refused = (done, found) if isinstance(found, Refusal) else (found, None)
            if refused is not None:
                self._refused.append(refused)
                if not self._vanishes(client):
                    self._sum.refuse(client)
                continue
            errors.append(done.error)
            if done.curve is not None:
                self.curves = self.curves or CohortCurves()
                self.curves.add(client, done.curve)
            reports[client] = report_of(client, done)
            if self._vanishes(client):
                continue
            if self._self_weighed is not None:
                try:
                    self._self_weighed.add(client, done)
                except SecureSumOverflow as e:
                    self._refused.append(Refusal(client, e.reason))
            elif method.mediator.share is not None:
                share = method.mediator.share(reports[client], layers)
                share = replace(share, clipped=True) if done.clipped else share
                if self._caps is None or not self._caps.against:
                    self._sum.add(client, done.upload, share)
                else:
                    self._kept[client], self._shares[client] = kept(done), share
            else:
                self._kept[client] = kept(done)
        self.compression_error = sum(errors) / len(errors) if errors and method.codec is not None else None
        return reports if self._self_weighed is None else {}

    def _vanishes(self, client: ClientId) -> bool:
        """Whether a client that trains is gone between report and upload."""
        return client in self._fates and self._fates[client].lost is not None

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the finished sum, or form it now from shares that came after the reports."""
        if self._self_weighed is not None:
            return self._collect_self_weighed(self._self_weighed)
        gathered = self.noised(self._gathered(shares).aggregate(self._refused))
        return replace(gathered, norms=tuple(self._norms.values()), shortened=tuple(self._shortened))

    def _collect_self_weighed(self, summed: SelfWeighedAccumulator) -> Aggregate:
        aggregate, self.secure = summed.aggregate(self._refused), summed.costs
        self._self_weighed, self._sum = None, None
        return self.noised(aggregate)

    def noised(self, aggregate: Aggregate) -> Aggregate:
        """Add the noise of a method whose server adds it, for a round's whole sum."""
        assert self._method is not None, "a sum follows train()"
        seed = derive_seed(self._problem.seed, self._round, "server noise")
        return noised(aggregate, self._method.noise, torch.Generator().manual_seed(seed))

    def summed(self, shares: Mapping[ClientId, Share] | None) -> RunningSum:
        """Return what `collect` makes an aggregate of, for those who add up the sums of several simulations."""
        gathered = self._gathered(shares)
        assert isinstance(gathered, RunningSum), "only running sums can be added to each other"
        return gathered

    def _gathered(self, shares: Mapping[ClientId, Share] | None) -> Accumulator:
        assert self._sum is not None, "collect() follows train()"
        own, held = self._shares, dict[ClientId, Params]()
        for client, done in self._kept.items():
            if client in own:
                held[client] = done.upload
            elif shares is not None and client in shares:
                found = self._limited(client, done)
                if isinstance(found, Refusal):
                    self._refused.append(found)
                else:
                    held[client] = found.upload
        for client in against_others(held, self._caps):
            del held[client]
            self._refused.append(Refusal(client, "against the others"))
            self._sum.refuse(client)
        for client, upload in held.items():
            self._sum.add(client, upload, own[client] if shares is None else shares[client])
        summed, self._sum, self._kept, self._shares = self._sum, None, {}, {}
        return summed

    def _limited(self, client: ClientId, done: Finished) -> Finished | Refusal:
        """Hold an upload to its cap, where the run has limits."""
        if self._caps is None or self._self_weighed is not None:
            return done
        assert self._method is not None, "uploads follow train()"
        found = limited(client, done, self._theta, self._method, self._caps)
        if isinstance(found, Refusal):
            return found
        self._norms[client] = found.norm
        self._shortened += [client] * found.shortened
        return found.done

    @property
    def refused(self) -> Sequence[Refusal]:
        """Clients of the last round whose report or upload was refused, in their order."""
        return self._refused

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Let the states of those in the sum count; the others go back to what was acknowledged before."""
        if self._states is not None and self._remembering:
            self._states.acknowledge(self._round, self._trained, contributors)

    def _task(self, client: ClientId, method: Method, round: int) -> ClientTask:
        fate = self._fates.get(client)
        task = ClientTask(self._place(client), Work()) if fate is None else ClientTask(fate.client, fate.work)
        task = task._replace(work=eased(task.work, method.halvings))
        if not keeps_state(method):
            return task
        if self._states is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="keyfed-clients-")
            self._states = ClientStates(Path(self._temporary.name))
        if method.origin is not None and method.solver.start is not None:
            self._states.begin_from(method.solver.start(method.origin))
        state = self._states.acknowledged(client) or self._states.first
        propose = self._states.proposed(client, round)
        return task._replace(state=state, propose=propose, clip=self._clip)

    def _place(self, client: ClientId) -> int:
        """A client's number, from a table of everybody; rounds with a plan never need it."""
        if self._index is None:
            self._index = {name: k for k, name in enumerate(self._problem.names)}
        return self._index[client]

    def _solve(self, params: Params, tasks: Sequence[ClientTask], method: Method, round: int) -> Iterator[Finished]:
        if self._pool is not None and method.spec is not None:
            yield from self._pool.solve(params, tasks, method.spec, round)
            return
        on_device = {name: p.to(self._problem.device) for name, p in params.items()}
        for start in range(0, len(tasks), self._block):
            for done in run_tasks(self._problem, on_device, tasks[start : start + self._block], method, round):
                yield done._replace(upload={name: u.to(params[name].device) for name, u in done.upload.items()})

    def close(self) -> None:
        """End the worker processes and forget what clients kept in a folder of this simulation's own."""
        if self._pool is not None:
            self._pool.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
