"""A sceptic's baseline on a GPU: the sequential PyTorch loop with its training step captured in a CUDA graph.

One model, one optimiser and one set of input buffers live as long as the contender; every client resets them in place,
because a graph replays the addresses it was captured with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from keyfed.lab.bench.contenders import (
    BATCH,
    PlainModel,
    Round,
    Task,
    autocast,
    detached,
    mean_loss,
    optimiser_of,
    weighted_mean,
)
from keyfed.model.language_model import Params
from keyfed.text.batches import Step, stream_steps
from keyfed.text.vocab import PAD

WARM_STEPS = 3  # before the capture, on a side stream: cuDNN picks its kernels, the optimiser makes its buffers
SOME_WORD = PAD + 1  # targets that count while the graph is captured


class GraphTrainer:
    """A torch.nn model whose training step is one graph; the last window of a text is padded to the others' width."""

    def __init__(self, task: Task, rows: int) -> None:
        self._task = task
        self.model = PlainModel(task.spec, task.params).to(task.device)
        self._start = {name: p.clone() for name, p in self.model.state_dict().items()}
        self._optimiser = optimiser_of(self.model)
        self._inputs = torch.full((rows, task.window), SOME_WORD, device=task.device)
        self._targets = torch.full((rows, task.window), SOME_WORD, device=task.device)
        width = (task.spec.layers, rows, task.spec.hidden)
        self._state = tuple(torch.zeros(width, device=task.device) for _ in range(1 if task.spec.cell == "gru" else 2))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                self._optimiser.zero_grad()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        self._optimiser.zero_grad()  # gradients are made inside the graph's own memory
        with torch.cuda.graph(self._graph):
            self._step()

    def _step(self) -> None:
        with autocast(self._task):
            logits, state = self.model(self._inputs, self._state if len(self._state) > 1 else self._state[0])
        mean_loss(logits, self._targets).backward()
        self._optimiser.step()
        after = detached(state)
        # Only now: the backward pass has read the state that this window started from.
        for old, new in zip(self._state, after if isinstance(after, tuple) else (after,), strict=True):
            old.copy_(new)

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to θ with no momentum, in place: v ← 0 is what torch.optim starts from."""
        for name, p in self.model.state_dict().items():
            p.copy_(self._start[name])
        for kept in self._optimiser.state.values():
            kept["momentum_buffer"].zero_()

    def train(self, steps: Sequence[tuple[Tensor, Tensor, bool]], epochs: int) -> Params:
        """Train one client from θ and return a copy of its weights."""
        self.reset()
        for _ in range(epochs):
            for inputs, targets, fresh in steps:
                if fresh:
                    for s in self._state:
                        s.zero_()
                self._inputs.copy_(inputs)
                self._targets.copy_(targets)
                self._graph.replay()
        return {name: p.clone() for name, p in self.model.state_dict().items()}


def padded(step: Step, task: Task) -> tuple[Tensor, Tensor, bool]:
    """Return inputs and targets of a step on the device, as wide as every other; padding counts for nothing."""
    missing = ((0, 0), (0, task.window - step.inputs.shape[1]))
    inputs, targets = (torch.from_numpy(np.pad(a, missing, constant_values=PAD)).to(task.device) for a in step[:2])
    return inputs, targets, step.fresh


@contextmanager
def plain_graph(task: Task) -> Iterator[Round]:
    """FedAvg, one client after the other, every step the replay of one graph."""
    steps = {k: [padded(s, task) for s in stream_steps(task.texts[k], BATCH, task.window)] for k in task.cohort}
    trainer = GraphTrainer(task, steps[0][0][0].shape[0])

    def round(cohort: Sequence[int]) -> Params:
        states = [trainer.train(steps[k], task.epochs) for k in cohort]
        return weighted_mean(states, [len(task.texts[k]) - 1 for k in cohort])

    yield round
