"""What `keyfed bench` compares: one FedAvg round as everybody writes it, through our engine, and trained in one place.

A contender is opened for a task and then runs rounds, each from the same initial weights; whatever can be made ready
beforehand (worker processes, captured graphs) is ready after its first round, which is not timed.
Settings are FedAtt's: SGD with momentum, no clipping, B rows, text read as a stream with the state carried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from keyfed.engine.problem import Problem, make_store
from keyfed.engine.simulate import Simulation
from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.types import MethodSpec
from keyfed.model.language_model import ModelSpec, Params, init_params
from keyfed.model.presets import build_spec, preset
from keyfed.run.checkpoint import Cohort
from keyfed.run.loop import run_rounds
from keyfed.text.batches import Batching, Step, stream_steps
from keyfed.text.vocab import PAD

LR, MOMENTUM, BATCH = 0.01, 0.5, 10
SPECIALS = 4  # ids below are not words: synthetic text has none of them, so PAD marks padding and nothing else
WARM_CLIENTS = 2  # of one step each: enough to start two workers

Round = Callable[[Sequence[int]], Params]  # which of the task's clients → the new weights
Open = Callable[["Task"], AbstractContextManager[Round]]


@dataclass(frozen=True)
class Task:
    """One FedAvg round to measure.

    Attributes:
      clients: size of the cohort.
      tokens: tokens of each client.
      precision: "fp32" as torch does it by default, or "bf16" (autocast, or the engine's own).
    """

    model: str
    vocab: int
    clients: int
    tokens: int
    epochs: int = 1
    device: str = "cpu"
    precision: str = "fp32"

    @property
    def window(self) -> int:
        """Tokens of a training window."""
        return preset(self.model).window

    @cached_property
    def spec(self) -> ModelSpec:
        """The model."""
        return build_spec(self.model, self.vocab)

    @cached_property
    def params(self) -> Params:
        """Weights before the round, on the CPU."""
        return init_params(self.spec, 1)

    @cached_property
    def texts(self) -> list[NDArray[np.int32]]:
        """Every client's text, those of the warm-up last."""
        texts = synthetic_texts(self.vocab, self.clients, self.tokens)
        return texts + [text[: BATCH * self.window + 1] for text in (texts * WARM_CLIENTS)[:WARM_CLIENTS]]

    @property
    def cohort(self) -> range:
        """The clients of the round."""
        return range(self.clients)

    @property
    def warm_up(self) -> range:
        """Who trains before the clock starts: two short texts on a CPU, the whole cohort where shapes are captured."""
        return range(self.clients, len(self.texts)) if self.device == "cpu" else self.cohort

    @property
    def predicted(self) -> int:
        """Tokens predicted in the round, all epochs."""
        return self.epochs * self.clients * (self.tokens - 1)


def synthetic_texts(vocab: int, clients: int, tokens: int) -> list[NDArray[np.int32]]:
    """Word ids with a Zipf-like distribution; timing does not depend on what they say."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocab - SPECIALS + 1)
    shares = weights / weights.sum()
    words = [rng.choice(vocab - SPECIALS, tokens, p=shares) for _ in range(clients)]
    return [(SPECIALS + w).astype(np.int32) for w in words]


class PlainModel(nn.Module):
    """The model as everybody writes it: nn.Embedding, nn.GRU or nn.LSTM, nn.Linear, tied if asked."""

    def __init__(self, spec: ModelSpec, params: Params) -> None:
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[spec.cell]
        self.embedding = nn.Embedding(spec.vocab, spec.embed)
        self.rnn = kind(spec.embed, spec.hidden, spec.layers, batch_first=True)
        self.output = nn.Linear(spec.hidden, spec.vocab)
        if spec.tied:
            self.output.weight = self.embedding.weight
        self.load_state_dict(params, strict=False)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """[batch, time] tokens → [batch, time, V] logits."""
        x, state = self.rnn(self.embedding(tokens), state)
        return self.output(x), state


def detached(state: Any) -> Any:
    """Cut the graph between windows."""
    return tuple(s.detach().float() for s in state) if isinstance(state, tuple) else state.detach().float()


def autocast(task: Task) -> AbstractContextManager[Any]:
    """Return the context a forward pass runs in."""
    if task.precision == "fp32":
        return nullcontext()
    # Weights change with every step: a cached bf16 copy would never be read again, and a graph must not hold one.
    return torch.autocast(torch.device(task.device).type, torch.bfloat16, cache_enabled=False)


def optimiser_of(model: nn.Module) -> torch.optim.SGD:
    """Return the optimiser of a client."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token; padding does not count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD)


def train_plain(model: PlainModel, steps: Sequence[Step], task: Task) -> None:
    """Train a torch.nn model for the task's epochs, window by window."""
    optimiser = optimiser_of(model)
    for _ in range(task.epochs):
        state: Any = None
        for step in steps:
            inputs, targets = (torch.from_numpy(np.ascontiguousarray(a)).to(task.device) for a in step[:2])
            optimiser.zero_grad()
            with autocast(task):
                logits, state = model(inputs, state)
            state = detached(state)
            mean_loss(logits, targets).backward()
            optimiser.step()


def weighted_mean(states: Sequence[Params], weights: Sequence[int]) -> Params:
    """θ' = Σ (n_k / Σ n_j) w_k, from a list of state dicts."""
    total = sum(weights)
    return {
        name: sum((s[name] * (w / total) for s, w in zip(states, weights, strict=True)), torch.zeros_like(first))
        for name, first in states[0].items()
    }


@contextmanager
def plain(task: Task) -> Iterator[Round]:
    """FedAvg, one client after the other: deep copies, torch.optim, a list of state dicts, a weighted mean."""
    model = PlainModel(task.spec, task.params).to(task.device)

    def round(cohort: Sequence[int]) -> Params:
        states, weights = [], []
        for k in cohort:
            local = copy.deepcopy(model)
            local.rnn.flatten_parameters()  # cuDNN would do it again at every call
            train_plain(local, stream_steps(task.texts[k], BATCH, task.window), task)
            states.append(local.state_dict())
            weights.append(len(task.texts[k]) - 1)
        return weighted_mean(states, weights)

    yield round


@contextmanager
def central(task: Task) -> Iterator[Round]:
    """The same tokens trained in one place: the limit. At the same batch on a CPU, at clients × B rows on a GPU."""

    def round(cohort: Sequence[int]) -> Params:
        rows = BATCH if task.device == "cpu" else BATCH * len(cohort)
        model = PlainModel(task.spec, task.params).to(task.device)
        text = np.concatenate([task.texts[k] for k in cohort])
        train_plain(model, stream_steps(text, rows, task.window), task)
        return dict(model.state_dict())

    yield round


def with_precision(problem: Problem, precision: str) -> Problem:
    """Return the problem in another precision, where the engine has one to choose."""
    if precision == "fp32":
        return problem
    if "precision" not in {f.name for f in fields(problem)}:
        raise ConfigError(f"this engine has no precision but fp32; {precision} was asked for")
    changed: dict[str, Any] = {"precision": precision}
    return replace(problem, **changed)


@contextmanager
def keyfed(task: Task, workers: int = 1) -> Iterator[Round]:
    """The same round through our engine: one client at a time on a CPU, the whole cohort stacked on a GPU."""
    names = [f"c{k}" for k in range(len(task.texts))]
    settings: dict[str, float | int | str | bool | None] = {
        "optimiser": "sgd", "lr": LR, "momentum": MOMENTUM, "clip": None, "batch_size": BATCH, "epochs": task.epochs,
    }  # fmt: skip
    method = build_method(MethodSpec("fedavg", settings))
    batching = Batching("stream", BATCH, task.window)
    problem = Problem(task.spec, make_store(task.texts, names), batching, seed=1, device=task.device)
    params = {name: p.to(task.device) for name, p in task.params.items()}
    block = 1 if task.device == "cpu" else task.clients
    with Simulation(with_precision(problem, task.precision), block=block, workers=workers) as federation:

        def round(cohort: Sequence[int]) -> Params:
            called = Cohort([names[k] for k in cohort])
            return run_rounds(method, initial_state(method, params), 1, federation, lambda _: called).params

        yield round


def movement(task: Task, result: Params) -> float:
    """Return ‖θ' − θ‖ over all layers: equal for contenders that did the same."""
    moved = (result[name].detach().cpu().double() - p.double() for name, p in task.params.items())
    return float(sum(float(m.square().sum()) for m in moved) ** 0.5)
