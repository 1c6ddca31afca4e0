"""The local problem of a block of clients: their text, cut into steps, under the model.

`Problem` is everything a process needs to train any client: numbers and shared tensors only, so that it can be handed
to worker processes. `solve_block` is the one way a client trains in simulation, whatever the process or device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.kernels.capture import GraphSlots, Staged, make_slots, others, stage
from keyfed.engine.kernels.step import Buffers
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import Network, NetworkState, gradient
from keyfed.federated.cohort import Work, derive_seed
from keyfed.federated.descent import ClientBatch, Descent, run_steps
from keyfed.federated.types import Gradient, LayerNumbers, Method, Objective, Params, Solution
from keyfed.model.language_model import Batch, ModelSpec, stack
from keyfed.text.batches import Batching, Step, epoch_steps, limit_text, line_starts, sweep_steps
from keyfed.text.ragged import BOUNDS, TOKENS, PackedNames


@dataclass(frozen=True, slots=True)
class ClientStore:
    """Every client's training tokens in one flat tensor, so that processes share it without copies.

    Attributes:
      flat: int32 tokens of all clients, one after the other; in shared memory, or a mapped file.
      bounds: int64; client k owns flat[bounds[k] : bounds[k + 1]].
      names: client ids.
      folder: the shard that is mapped; None for a store in memory.
    """

    flat: Tensor
    bounds: Tensor
    names: Sequence[str]
    folder: Path | None = None

    def stream(self, client: int) -> NDArray[np.int32]:
        if self.folder is not None:
            # Read, not mapped: a page fault maps sixteen pages around it, and a thousand clients would map them all.
            place = int(self.bounds[client]) * self.flat.itemsize
            return np.fromfile(self.folder / TOKENS, np.int32, self.tokens(client), offset=place)
        return self.flat[int(self.bounds[client]) : int(self.bounds[client + 1])].numpy()

    def tokens(self, client: int) -> int:
        return int(self.bounds[client + 1]) - int(self.bounds[client])

    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.bounds.numpy())

    def __len__(self) -> int:
        return len(self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the same files instead of receiving a copy."""
        if self.folder is not None:
            return map_store, (self.folder,)
        return ClientStore, (self.flat, self.bounds, self.names)


def make_store(streams: Sequence[NDArray[np.int32]], names: Sequence[str]) -> ClientStore:
    """Join client streams into a store in shared memory."""
    flat = torch.from_numpy(np.concatenate(list(streams)) if streams else np.empty(0, np.int32))
    bounds = torch.tensor([0, *np.cumsum([len(s) for s in streams]).tolist()], dtype=torch.int64)
    return ClientStore(flat.share_memory_(), bounds.share_memory_(), tuple(names))


def map_store(folder: Path) -> ClientStore:
    """Open a shard (`keyfed.text.ragged`) as a store; only the pages that are read come into memory."""

    def mapped(file: str, dtype: torch.dtype) -> Tensor:
        size = (folder / file).stat().st_size // dtype.itemsize
        # A private mapping: no one can write through it into the file.
        return torch.from_file(str(folder / file), shared=False, size=size, dtype=dtype) if size else torch.empty(0)

    return ClientStore(mapped(TOKENS, torch.int32), mapped(BOUNDS, torch.int64), PackedNames(folder), folder)


Precision = Literal["fp32", "bf16"]
SlotsKey = tuple[Descent, int, bool, frozenset[str]]  # a step depends on: its rule, rows, duals or none, frozen layers


def _unwatched() -> None:
    """Let training go on."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What it takes to train any client of a run.

    Attributes:
      spec: the model, ours or a user's.
      batching: how text is cut; `rows` is replaced by the method's batch size.
      seed: the run's seed; everything random derives from it.
      sweep: tokens a "round" of central training reads; None for federated methods.
      precision: of the products on a GPU; bf16 keeps float32 weights next to its copies.
      frozen: layers that clients do not train in the first `frozen_rounds` rounds.
      curves: count every step's first guesses, for `Solution.curve`.
      watch: called before every step that is taken on a CPU; what it raises ends the training.
      buffers, slots: what lives from step to step and from round to round, see `engine.kernels.step.gradient` and
        `capture`.
    """

    spec: Network
    store: ClientStore
    batching: Batching
    seed: int
    device: str = "cpu"
    sweep: int | None = None
    precision: Precision = "fp32"
    frozen: frozenset[str] = frozenset()
    frozen_rounds: int = 0
    curves: bool = False
    watch: Callable[[], None] = field(default=_unwatched, repr=False, compare=False)
    buffers: Buffers = field(default_factory=dict, init=False, repr=False, compare=False)
    slots: dict[SlotsKey, GraphSlots] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has buffers of its own."""
        return Problem, (
            self.spec, self.store, self.batching, self.seed, self.device, self.sweep, self.precision, self.frozen,
            self.frozen_rounds, self.curves,
        )  # fmt: skip

    @property
    def names(self) -> Sequence[str]:
        """Client ids, by index."""
        return self.store.names

    def objective(
        self, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None = None, epochs: int = 1
    ) -> TextObjective:
        """Return these clients' text under the model."""
        return TextObjective(self, clients, round, rows, works, epochs)


class LocalProblem(Protocol):
    """What the engine needs of a problem: who the clients are, and the objective of some of them."""

    @property
    def names(self) -> Sequence[str]:
        """Client ids, by index."""
        ...

    @property
    def seed(self) -> int:
        """The run's seed."""
        ...

    @property
    def device(self) -> str:
        """Where clients train."""
        ...

    def objective(
        self, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None, epochs: int
    ) -> Objective:
        """Return the local problem of these clients in this round, stacked; `rows` is the batch size."""
        ...


class TextObjective:
    """m clients' text under the model, step by step in lockstep; state carried inside an epoch."""

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[int],
        round: int,
        rows: int,
        works: Sequence[Work] | None = None,
        epochs: int = 1,
    ) -> None:
        self.clients = len(clients)
        self.whole = torch.zeros(len(clients), dtype=torch.float64)
        self._works = list(works or [Work()] * len(clients))
        self._epochs = epochs
        paces = [w.pace for w in self._works]
        self.pace = None if all(p == 1 for p in paces) else torch.tensor(paces, dtype=torch.float64)
        self._problem = problem
        self._members = list(clients)
        self._round = round
        self._frozen = problem.frozen if round < problem.frozen_rounds else frozenset[str]()
        self._batching = replace(problem.batching, rows=rows)
        self._seeds = torch.tensor([self._seed(k, "dropout") for k in clients], dtype=torch.int64)
        self._taken = torch.zeros(len(clients), dtype=torch.int64)
        self._carried: NetworkState | None = None

    def _seed(self, client: int, purpose: str, *more: int) -> int:
        name = self._problem.store.names[client]
        return derive_seed(self._problem.seed, self._round, name, purpose, *more)

    def _client_steps(self, client: int, epoch: int) -> list[Step]:
        stream = self._problem.store.stream(client)
        if self._problem.sweep is not None:
            return sweep_steps(stream, self._batching, self._problem.sweep, self._round)
        stream = limit_text(stream, self._batching, self._seed(client, "text"))
        shared = derive_seed(self._problem.seed, self._round, "lengths", epoch)  # no client in it: all have the same
        return epoch_steps(stream, self._batching, self._seed(client, "order", epoch), shared)

    def _affordable(self, client: int, steps: list[Step], work: Work, epoch: int) -> list[Step]:
        """Cut an epoch's steps where the client's share of the work ends; every client takes at least one step."""
        passes = work.epochs or self._epochs
        most = max(1, math.ceil(work.share * passes * len(steps) - 1e-9))
        left = max(0, most - epoch * len(steps)) if epoch < passes else 0
        if self._batching.kind != "sentences" or left >= len(steps):
            return steps[:left]
        # All clients of a round visit lengths in the same order: who stops early must not skip the same ones as others.
        drawn = np.random.default_rng(self._seed(client, "share", epoch)).permutation(len(steps))[:left]
        return [steps[i] for i in sorted(drawn.tolist())]

    def epoch(self, epoch: int) -> list[list[Step]]:
        every = [self._client_steps(k, epoch) for k in self._members]
        self.whole = torch.tensor([sum(float(s.mask.sum()) for s in steps) for steps in every], dtype=torch.float64)
        planned = zip(self._members, every, self._works, strict=True)
        return [self._affordable(client, steps, work, epoch) for client, steps, work in planned]

    def steps(self, epoch: int) -> Iterator[Callable[[Params], Gradient]]:
        """Yield the epoch's steps; clients that run out of text are padded with masked batches."""
        own = self.epoch(epoch)
        count = max(len(steps) for steps in own)
        rows = max((s.inputs.shape[0] for steps in own for s in steps), default=1)
        self._carried = None
        for number in range(count):
            present = [steps[number] if number < len(steps) else None for steps in own]
            batch, fresh = stack_steps(present, rows, self._problem.device)
            if self._batching.kind == "packed":
                batch = batch._replace(starts=line_starts(batch.inputs))
            # Each client counts its own steps: what it drops must not depend on who else is in the block.
            self._taken = self._taken + torch.tensor([s is not None for s in present])
            self._problem.watch()
            yield partial(self._gradient, batch, fresh, self._taken)

    def run_steps(self, way: ClientBatch, descent: Descent) -> None:
        """Take every step of a descent: one after the other, or on a GPU captured and replayed."""
        if self._problem.device == "cpu" or isinstance(self._problem.spec, ModuleNetwork):
            run_steps(self, way, descent._replace(move=partial(move_others, descent.move, self._frozen)))
        else:
            self._replay(self._problem.spec, way, descent)

    def _replay(self, spec: ModelSpec, way: ClientBatch, descent: Descent) -> None:
        problem, rows = self._problem, self._batching.rows
        key = (descent, rows, way.dual is None, self._frozen)
        slots = problem.slots.get(key)
        if slots is None or slots.capacity < self.clients:
            slots = None
            problem.slots.clear()  # another method, or a larger cohort than before: the places are given back first
            bf16 = problem.precision == "bf16"
            packed = self._batching.kind == "packed"
            slots = make_slots(spec, way, descent, rows, self.clients, bf16, self._frozen, problem.curves, packed)
            problem.slots[key] = slots
        steps = self.epoch(0)
        ranking = sorted(range(self.clients), key=lambda k: -len(steps[k]))
        order = torch.tensor(ranking, device=problem.device)
        slots.load(way, order, self._seeds.to(problem.device))
        staged: list[Staged] = []
        for epoch in range(descent.epochs):
            slots.way.tally.start_epoch()
            before, steps = steps, self.epoch(epoch) if epoch else steps
            # A stream is cut alike in every epoch: what lies on the device can be read again.
            stream = self._batching.kind == "stream"
            if epoch == 0 or not stream or [len(s) for s in steps] != [len(s) for s in before]:
                staged = stage([steps[k] for k in ranking], self._batching, slots.capacity, problem.device)
            way.tally.steps.append([])
            for step in staged:
                slots.run(step)
                if slots.seen is not None:  # copied on the device: nothing waits
                    way.tally.steps[-1].append(slots.seen.clone())
        slots.unload(way, order)
        if slots.seen is not None:
            back = torch.argsort(order)
            way.tally.steps = [list(torch.stack(seen)[:, :, back]) if seen else [] for seen in way.tally.steps]

    def _gradient(self, batch: Batch, fresh: bool, taken: Tensor, params: Params) -> Gradient:
        before = None if fresh else self._carried
        found, self._carried = gradient(
            self._problem.spec, params, batch, before, self._seeds, taken, self._problem.buffers, self._problem.curves
        )
        for name in self._frozen:
            found.grads[name].zero_()
        return found


def move_others(
    move: Callable[[ClientBatch, Gradient], None], frozen: frozenset[str], way: ClientBatch, gradient: Gradient
) -> None:
    """Take a step with all layers but the frozen ones: no weight decay, no proximal term, no dual moves those."""
    move(way, gradient._replace(grads=others(gradient.grads, frozen)) if frozen else gradient)


def stack_steps(steps: Sequence[Step | None], rows: int, device: str) -> tuple[Batch, bool]:
    """Stack the clients' batches of one step, [m, rows, time]; an absent one is all padding."""
    time = max(s.inputs.shape[1] for s in steps if s is not None)
    m = len(steps)
    if m == 1 and steps[0] is not None and steps[0].inputs.shape[0] == rows:
        only = steps[0]
        parts = [np.ascontiguousarray(a)[None] for a in (only.inputs, only.targets, only.mask)]
    else:
        parts = [np.zeros((m, rows, time), t) for t in (np.int64, np.int64, np.float32)]
        for k, s in enumerate(steps):
            if s is not None:
                height, width = s.inputs.shape
                parts[0][k, :height, :width] = s.inputs
                parts[1][k, :height, :width] = s.targets
                parts[2][k, :height, :width] = s.mask
    inputs, targets, mask = (torch.from_numpy(p).to(device) for p in parts)
    return Batch(inputs, targets, mask), any(s.fresh for s in steps if s is not None)


def solve_block(
    problem: LocalProblem,
    theta: Params,
    clients: Sequence[int],
    method: Method,
    round: int,
    works: Sequence[Work] | None = None,
    state: Params | None = None,
) -> Solution:
    """Train a block of clients from θ and return their stacked uploads.

    Args:
      works: how much of the local work each does; None for all of it.
      state: the clients' stacked state, for methods whose clients keep one; None starts them all anew.
    """
    objective = problem.objective(clients, round, method.batch_size, works, method.epochs)
    if method.solver.start is None:
        return method.solver.solve(theta, objective, round)
    if state is None:
        state = stack(method.solver.start(theta), len(clients))
    return method.solver.solve(theta, objective, round, state)


def measure(method: Method, theta: Params, upload: Params, clients: int) -> list[LayerNumbers]:
    """Return each client's distance from θ per layer, where the method asks for one; scalars only leave the place."""
    if method.distance is None:
        return [{} for _ in range(clients)]
    numbers = {name: d.tolist() for name, d in method.distance(theta, upload).items()}
    return [{name: float(d[k]) for name, d in numbers.items()} for k in range(clients)]
