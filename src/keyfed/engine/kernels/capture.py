"""Steps on a GPU: captured once per shape as a CUDA graph, replayed for every step of every round.

A stacked step is some hundred kernels of a few microseconds; started one by one, the GPU waits for Python. Here the
weights, the optimiser's memory, the carried state and the batch have fixed places in the device's memory
(`GraphSlots`). The step from batch to moved weights is captured once, and a round is: copy θ in, replay, copy the
result out. Nothing is read back between. An epoch's text goes over in one transfer while the GPU still works on the
last.

Clients lie in the order of how many steps they take, so those still at work are always the first p. For large, half,
quarter… p there is a graph of its own. The tail of a round of unequal clients does not pay for those that are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.kernels.step import PLAIN, Kernels, PaddedLayer, fill_copies, gradient, layouts, make_copies, widened
from keyfed.errors import ConfigError
from keyfed.federated.descent import ClientBatch, Descent
from keyfed.model import language_model as lm
from keyfed.model.language_model import Batch, Dropout, ModelSpec, ModelState, Params
from keyfed.text.batches import Batching, Step, line_starts, stacked_width
from keyfed.text.vocab import PAD

WARM_UP = 2  # runs before a capture: kernels are compiled and libraries make their workspaces


@lru_cache(maxsize=2)
def kernels_for(gpu: bool) -> Kernels:
    """The kernels to run: on a GPU Triton's where it is installed, else the plain ones."""
    if not gpu:
        return PLAIN
    try:
        from keyfed.engine.kernels.triton_launch import TRITON
    except ImportError:
        return PLAIN
    return TRITON


class Staged(NamedTuple):
    """One step's text on the device, in the order of the slots.

    Attributes:
      tokens: inputs and targets, int32 [2, p, rows, time]; a target of −1 is padding.
      fresh: starts from a zero state.
    """

    tokens: Tensor
    fresh: bool


def stage(steps: Sequence[Sequence[Step]], batching: Batching, capacity: int, device: str) -> list[Staged]:
    """Send one epoch's steps of all clients over at once; [client][step] → one `Staged` a step.

    Args:
      steps: in the order of the slots; those with none left are at the end.
      batching: sentences are padded to a multiple of eight, windows of a stream or of packed lines to the same width.
      capacity: slots, of which the first p take the step.
    """
    count = max((len(s) for s in steps), default=0)
    shapes = []
    for number in range(count):
        present = [s[number].inputs.shape[1] for s in steps if number < len(s)]
        last = max(k for k, s in enumerate(steps) if number < len(s))
        time = stacked_width(present, batching.window) if batching.kind == "sentences" else batching.window
        shapes.append((2, _prefix(last + 1, capacity), batching.rows, time))
    sizes = [int(np.prod(shape)) for shape in shapes]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device != "cpu")
    flat: NDArray[np.int32] = host.numpy()
    flat.fill(PAD)
    views: list[NDArray[np.int32]] = []
    for at, size, shape in zip(np.cumsum(sizes) - sizes, sizes, shapes, strict=True):
        views.append(flat[at : at + size].reshape(shape))
        views[-1][1].fill(-1)
    for k, own in enumerate(steps):
        for view, step in zip(views, own, strict=False):
            height, width = step.inputs.shape
            view[0, k, :height, :width] = step.inputs
            view[1, k, :height, :width] = np.where(step.mask > 0, step.targets, -1)
    sent = host.to(device, non_blocking=True)
    fresh = [any(s[number].fresh for s in steps if number < len(s)) for number in range(count)]
    pieces = sent.split(sizes)
    return [Staged(piece.view(shape), f) for piece, shape, f in zip(pieces, shapes, fresh, strict=True)]


def _prefix(active: int, clients: int) -> int:
    """The smallest of m, ⌈m/2⌉, ⌈m/4⌉, …, 1 that holds all active clients: so few graphs are needed.

    Example:
      >>> [_prefix(a, 10) for a in (10, 6, 5, 3, 2, 1)]
      [10, 10, 5, 3, 2, 1]
    """
    best = clients
    while (best + 1) // 2 >= active and best > 1:
        best = (best + 1) // 2
    return best


@dataclass(slots=True)
class GraphSlots:
    """The fixed places of m stacked clients on a device, and the graphs over them.

    Attributes:
      way: weights, memory, step sizes and counts, [m, …].
      products: the weights as the products read them: those of `way`, or their bf16 copies (`padding`).
      places: where the copies hold the weights; None where there are none.
      widths: the model's own width at every site of dropout.
      carried: the recurrent state, changed in place.
      seeds, taken: for dropout: each client's seed of the round and its number of steps so far.
      frozen: layers that no step moves.
      seen: nats, hits and tokens of the last step, [3, m]; None where hits are not counted.
      packed: the state is reset where a line begins.
    """

    spec: ModelSpec
    descent: Descent
    kernels: Kernels
    rows: int
    way: ClientBatch
    products: Params
    places: dict[str, PaddedLayer] | None
    widths: tuple[int, ...]
    carried: ModelState
    seeds: Tensor
    taken: Tensor
    graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]]
    pool: Any
    frozen: frozenset[str] = frozenset()
    seen: Tensor | None = None
    packed: bool = False

    @property
    def capacity(self) -> int:
        return len(self.seeds)

    def load(self, way: ClientBatch, order: Tensor, seeds: Tensor) -> None:
        """Put a round's clients in the first places, in the given order."""
        mine = self.way.first(len(order))
        for there, here in _pairs(mine, way):
            there.copy_(here[order] if len(order) > 1 else here)
        for name, p in way.theta.items():
            self.way.theta[name].copy_(p)
        self.way.tally.clear()
        self.seeds[: len(order)].copy_(seeds[order])
        self.taken.zero_()
        if self.places is not None:
            fill_copies(self.places, self.products, self.way.local)

    def unload(self, way: ClientBatch, order: Tensor) -> None:
        """Copy what the round made of them back into the caller's tensors."""
        back = torch.argsort(order)
        mine = self.way.first(len(order))
        for here, there in _pairs(mine, way):
            there.copy_(here[back] if len(order) > 1 else here)
        way.tally.take(mine.tally, back)

    def run(self, staged: Staged) -> None:
        """Take one step: replayed on a GPU, computed elsewhere."""
        if staged.fresh:
            for layer in self.carried:
                for s in layer:
                    s.zero_()
        if not staged.tokens.is_cuda:
            self.body(staged.tokens)
            return
        shape = tuple(staged.tokens.shape)
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(shape)
        graph, place = self.graphs[shape]
        place.copy_(staged.tokens)
        graph.replay()

    def _capture(self, shape: tuple[int, ...]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture the step of a shape. It is warmed up on a batch of padding, which moves no client."""
        place = torch.zeros(shape, dtype=torch.int32, device=self.seeds.device)
        place[1] = -1
        kept = [s.clone() for layer in self.carried for s in layer]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.body(place)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.body(place)
        self.pool = self.pool or graph.pool()
        for there, here in zip([s for layer in self.carried for s in layer], kept, strict=True):
            there.copy_(here)
        return graph, place

    def body(self, place: Tensor) -> None:
        """One step of the first p clients, from text to moved weights; all in place."""
        clients = place.shape[1]
        inputs, raw = place[0].long(), place[1].long()
        mask = (raw >= 0).to(torch.float32)
        batch = Batch(inputs, raw.clamp(min=0), mask, line_starts(inputs) if self.packed else None)
        taken = self.taken[:clients].add_(mask.amax((1, 2)).long())
        drop = Dropout(self.spec.dropout, self.seeds[:clients], taken, self.widths) if self.spec.dropout else None
        products = {name: p[:clients] for name, p in self.products.items()}
        state = tuple(tuple(s[:clients] for s in layer) for layer in self.carried)
        found, after = gradient(self.spec, products, batch, state, drop, {}, self.kernels, self.seen is not None)
        for there, here in zip(state, after, strict=True):
            for s, new in zip(there, here, strict=True):
                if new is not s:  # a kernel may have changed it in place
                    s.copy_(new)
        way = self.way.first(clients)
        way.tally.add(found.nats, found.tokens)
        if self.seen is not None and found.hits is not None:
            self.seen.zero_()  # clients behind the first p take no step
            self.seen[:, :clients].copy_(torch.stack([found.nats, found.hits, found.tokens]))
        if self.frozen:  # they stay as they were loaded, and so do their copies
            way, products = replace(way, local=others(way.local, self.frozen)), others(products, self.frozen)
            found = found._replace(grads=others(found.grads, self.frozen))
        self.kernels.move(self.descent, way, found, products, self.places)


def others(params: Params, frozen: frozenset[str]) -> Params:
    return {name: p for name, p in params.items() if name not in frozen}


def _pairs(one: ClientBatch, other: ClientBatch) -> list[tuple[Tensor, Tensor]]:
    """The stacked tensors of two ways side by side."""
    pairs = [(one.eta, other.eta)]
    for a, b in ((one.local, other.local), (one.memory, other.memory), (one.dual or {}, other.dual or {})):
        pairs += [(a[name], b[name]) for name in a]
    return pairs


def make_slots(
    spec: ModelSpec,
    way: ClientBatch,
    descent: Descent,
    rows: int,
    capacity: int,
    bf16: bool,
    frozen: frozenset[str] = frozenset(),
    count: bool = False,
    packed: bool = False,
) -> GraphSlots:
    """Make slots for so many clients like these; empty until it is loaded. With `count` its steps count hits."""
    own, kernels = way.like(capacity), kernels_for(way.eta.is_cuda and way.eta.dtype == torch.float32)
    if bf16 and kernels is PLAIN:
        raise ConfigError("train.precision=bf16 needs Triton, which is not installed; use fp32")
    places = layouts(spec) if bf16 else None
    products = make_copies(spec, own.local) if bf16 else own.local
    inner = widened(spec) if bf16 else spec
    numbers = torch.zeros(2, capacity, dtype=torch.int64, device=own.eta.device)
    carried = lm.initial_state(inner, own.local, rows)
    widths = (spec.embed, *[spec.width] * spec.layers)
    seen = torch.zeros(3, capacity, dtype=torch.float64, device=own.eta.device) if count else None
    return GraphSlots(
        inner, descent, kernels, rows, own, products, places, widths, carried, numbers[0], numbers[1], {}, None, frozen,
        seen, packed,
    )  # fmt: skip
