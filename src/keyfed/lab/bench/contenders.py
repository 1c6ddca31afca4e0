"""What `keyfed bench` compares: one FedAvg round as everybody writes it, through our engine, and trained in one place.

A contender is opened for a task and then runs rounds, each from the same initial weights. Its first round is not timed:
after it, worker processes and captured graphs are ready. Settings are FedAtt's: SGD with momentum, no clipping, B rows,
text read as a stream with the state carried.

`plain_graph` is a sceptic's baseline on a GPU: the sequential loop with its training step captured in a CUDA graph. A
graph replays the addresses it was captured with, so every client resets one model and one optimiser in place.

pfl-research's simulated backend and Flower's simulation run where they are installed, with the same `torch.nn` model,
text and settings. Neither is a dependency: their modules are looked up by name. Their evaluation is off.

`measure_floor` is the roofline of a CPU: what a round's matrix products cost at the rate this machine multiplies such
shapes. Nothing exact is faster than its products; what a contender takes beyond them is softmax, gates and updates.
Products are measured alone, into memory that exists already, with the shapes and layouts of a training step.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from keyfed.engine.problem import Precision, Problem, make_store
from keyfed.engine.simulate import Simulation
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.spec import MethodSpec
from keyfed.model.cells import gates_of
from keyfed.model.language_model import ModelSpec, Params, build_spec, init_params, parameter_count, preset
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
    """One FedAvg round to measure."""

    model: str
    vocab: int
    clients: int  # of the cohort
    tokens: int  # of each client
    epochs: int = 1
    device: str = "cpu"
    precision: str = "fp32"  # as torch does it by default, or "bf16" (autocast, or the engine's own)

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
    """The model as everybody writes it: nn.Embedding, nn.GRU or nn.LSTM, nn.Linear, tied where the preset is."""

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


client_sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token; padding does not count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD)


def train_plain(model: PlainModel, steps: Sequence[Step], task: Task) -> None:
    """Train a torch.nn model for the task's epochs, window by window."""
    optimiser = client_sgd(model.parameters())
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


@contextmanager
def keyfed(task: Task, workers: int = 1) -> Iterator[Round]:
    """The same round through our engine: one client at a time on a CPU, the whole cohort stacked on a GPU."""
    names = [f"c{k}" for k in range(len(task.texts))]
    settings: dict[str, float | int | str | bool | None] = {
        "optimiser": "sgd", "lr": LR, "momentum": MOMENTUM, "clip": None, "batch_size": BATCH, "epochs": task.epochs,
    }  # fmt: skip
    method = build_method(MethodSpec("fedavg", settings))
    batching = Batching("stream", BATCH, task.window)
    precision: Precision = "bf16" if task.precision == "bf16" else "fp32"
    store = make_store(task.texts, names)
    problem = Problem(task.spec, store, batching, seed=1, device=task.device, precision=precision)
    params = {name: p.to(task.device) for name, p in task.params.items()}
    block = 1 if task.device == "cpu" else task.clients
    with Simulation(problem, block=block, workers=workers) as federation:

        def round(cohort: Sequence[int]) -> Params:
            called = Cohort([names[k] for k in cohort])
            return run_rounds(method, initial_state(method, params), 1, federation, lambda _: called).params

        yield round


def movement(task: Task, result: Params) -> float:
    """Return ‖θ' − θ‖ over all layers: equal for contenders that did the same."""
    moved = (result[name].detach().cpu().double() - p.double() for name, p in task.params.items())
    return float(sum(float(m.square().sum()) for m in moved) ** 0.5)


WARM_STEPS = 3  # before the capture, on a side stream: cuDNN picks its kernels, the optimiser makes its buffers
SOME_WORD = PAD + 1  # targets that count while the graph is captured


class GraphTrainer:
    """A torch.nn model whose training step is one graph; the last window of a text is padded to the others' width."""

    def __init__(self, task: Task, rows: int) -> None:
        self._task = task
        self.model = PlainModel(task.spec, task.params).to(task.device)
        self._start = {name: p.clone() for name, p in self.model.state_dict().items()}
        self._optimiser = client_sgd(self.model.parameters())
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


PRIVATE = {  # neither may call home while it is measured
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


class PflModel(PlainModel):
    """The model with the two verbs pfl asks for; it carries the state from window to window itself."""

    _carried: Any = None

    def loss(self, inputs: Tensor, targets: Tensor, fresh: Tensor) -> Tensor:
        """Mean nats per token of one window."""
        logits, state = self(inputs, None if bool(fresh) else self._carried)
        self._carried = detached(state)
        return mean_loss(logits, targets)

    def metrics(self, inputs: Tensor, targets: Tensor, fresh: Tensor) -> dict[str, Any]:
        """Nothing is evaluated here."""
        return {}


class PflText:
    """A client's text as pfl reads it: a dataset whose batches are the windows of a stream."""

    def __init__(self, text: Any, window: int, client: int) -> None:
        self._steps = stream_steps(text, BATCH, window)
        self._predicted = len(text) - 1
        self.user_id = str(client)
        self.train_kwargs: dict[str, Any] = {}
        self.eval_kwargs: dict[str, Any] = {}

    def __len__(self) -> int:
        """Data points, by which clients are weighted."""
        return self._predicted

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, ...]]:
        """Yield inputs, targets and whether the state starts anew; the batch size is the rows' already."""
        for step in self._steps:
            inputs, targets = (torch.from_numpy(np.ascontiguousarray(a)) for a in step[:2])
            yield inputs, targets, torch.tensor(step.fresh)


@contextmanager
def pfl(task: Task) -> Iterator[Round]:
    """FedAvg by pfl-research: FederatedAveraging on a SimulatedBackend, weighted by data points."""
    models, simulate = import_module("pfl.model.pytorch"), import_module("pfl.aggregate.simulate")
    contexts, hyperparam = import_module("pfl.context"), import_module("pfl.hyperparam")
    averaging, data = import_module("pfl.algorithm.federated_averaging"), import_module("pfl.data.federated_dataset")
    weighting, kinds = import_module("pfl.aggregate.weighting"), import_module("pfl.common_types")
    network = PflModel(task.spec, task.params)
    model = models.PyTorchModel(
        model=network,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=MOMENTUM),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    training = hyperparam.NNTrainHyperParams(
        local_batch_size=None, local_num_epochs=task.epochs, local_learning_rate=LR
    )
    algorithm = averaging.FederatedAveraging()

    def round(cohort: Sequence[int]) -> Params:
        network.load_state_dict(task.params, strict=False)
        users = itertools.cycle(cohort)
        clients = data.FederatedDataset(lambda k: PflText(task.texts[k], task.window, k), lambda: next(users))
        backend = simulate.SimulatedBackend(
            training_data=clients, val_data=clients, postprocessors=[weighting.WeightByDatapoints()]
        )
        context = contexts.CentralContext(
            current_central_iteration=0, do_evaluation=False, cohort_size=len(cohort),
            population=kinds.Population.TRAIN, algorithm_params=None, model_train_params=training, seed=1,
        )  # fmt: skip
        statistics, metrics = backend.gather_results(model, algorithm, central_context=context)
        algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        return {name: p.clone() for name, p in network.state_dict().items()}

    yield round


@functools.lru_cache(maxsize=1)
def _task(settings: tuple[tuple[str, Any], ...]) -> Task:
    """A task made again inside one of Flower's processes, once."""
    torch.set_num_threads(1)
    return Task(**dict(settings))


def flower_round(task: Task, meter: AbstractContextManager[Any]) -> Params:
    """FedAvg by Flower's simulation on Ray: a short round so that the actors are up, then the one that is measured."""
    os.environ.update(PRIVATE)
    app, clientapp = import_module("flwr.app"), import_module("flwr.clientapp")
    serverapp, simulation = import_module("flwr.serverapp"), import_module("flwr.simulation")
    strategies = import_module("flwr.serverapp.strategy")
    settings = tuple(asdict(task).items())
    client, server = clientapp.ClientApp(), serverapp.ServerApp()
    results: list[Params] = []

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        here = _task(settings)
        number = int(context.node_config["partition-id"])
        warm = bool(message.content["config"]["warm"])
        text = here.texts[here.warm_up[number % len(here.warm_up)] if warm else number]
        model = PlainModel(here.spec, here.params)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_plain(model, stream_steps(text, BATCH, here.window), here)
        weight = app.MetricRecord({"num-examples": len(text) - 1})
        content = app.RecordDict({"arrays": app.ArrayRecord(model.state_dict()), "metrics": weight})
        return app.Message(content, reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Any, context: Any) -> None:
        everybody = {"min_train_nodes": task.clients, "min_available_nodes": task.clients}
        strategy = strategies.FedAvg(fraction_evaluate=0.0, **everybody)
        arrays = app.ArrayRecord(PlainModel(task.spec, task.params).state_dict())
        strategy.start(grid, arrays, num_rounds=1, train_config=app.ConfigRecord({"warm": True}))
        with meter:
            done = strategy.start(grid, arrays, num_rounds=1, train_config=app.ConfigRecord({"warm": False}))
        results.append(dict(done.arrays.to_torch_state_dict()))

    simulation.run_simulation(
        server, client, task.clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    return results[0]


SECONDS = 0.2  # each shape is repeated for at least so long


class Product(NamedTuple):
    """[rows, inner] × [inner, columns], `times` in a step."""

    layer: str
    pass_: Literal["forward", "to input", "to weight"]  # decides how the operands lie in memory
    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's products of this shape."""
        return 2 * self.rows * self.inner * self.columns * self.times


def three_passes(layer: str, tokens: int, width: int, columns: int) -> list[Product]:
    """Products of x W^T, of its gradient by x and of its gradient by W."""
    return [
        Product(layer, "forward", tokens, width, columns),
        Product(layer, "to input", tokens, columns, width),
        Product(layer, "to weight", columns, tokens, width),
    ]


def products(spec: ModelSpec, rows: int, window: int) -> list[Product]:
    """Return the products of one training step."""
    tokens, gates, out = rows * window, gates_of(spec.cell) * spec.hidden, []
    for layer in range(spec.layers):
        out += three_passes("input", tokens, spec.embed if layer == 0 else spec.width, gates)
        # One product a token each way; the weight's gradient is one product over all tokens.
        out += [p._replace(times=window) for p in three_passes("recurrent", rows, spec.width, gates)[:2]]
        out.append(Product("recurrent", "to weight", gates, tokens, spec.width))
    return out + three_passes("output", tokens, spec.output_width, spec.vocab)


def seconds_of(work: Callable[[], object], least: float) -> float:
    """CPU seconds of one call: the mean over at least `least` seconds, after a first call that is not counted."""
    work()
    calls, began = 0, time.process_time()
    while True:
        work()
        calls += 1
        spent = time.process_time() - began
        if spent >= least:
            return spent / calls


def measure_product(product: Product, least: float) -> float:
    """CPU seconds of a step's products of this shape, operands laid out as the step has them."""
    rows, inner, columns = product.rows, product.inner, product.columns
    left = torch.rand(inner, rows).T if product.pass_ == "to weight" else torch.rand(rows, inner)
    right = torch.rand(columns, inner).T if product.pass_ == "forward" else torch.rand(inner, columns)
    out = torch.empty(rows, columns)
    return product.times * seconds_of(lambda: torch.mm(left, right, out=out), least)


def passes(spec: ModelSpec, tokens: int) -> dict[str, Callable[[], object]]:
    """Return what every exact method needs in addition to the products: softmax in place, the update with momentum."""
    logits = torch.rand(tokens, spec.vocab)
    w, v, g = (torch.zeros(parameter_count(spec)) for _ in range(3))

    def update() -> Tensor:
        return w.add_(v.mul_(MOMENTUM).add_(g), alpha=-LR)

    return {"softmax": lambda: torch.softmax(logits, 1, out=logits), "update": update}


def measure_floor(task: Task, least: float = SECONDS) -> dict[str, Any]:
    """Return the CPU seconds of the round's products, by kind, and of the other passes, which are not in the floor."""
    steps = stream_steps(task.texts[0], BATCH, task.window)
    count = task.epochs * task.clients * sum(s.inputs.shape[1] for s in steps) / task.window
    rows = steps[0].inputs.shape[0]
    shapes = products(task.spec, rows, task.window)
    parts: dict[str, float] = {}
    for product in shapes:
        parts[product.layer] = parts.get(product.layer, 0.0) + count * measure_product(product, least)
    total = sum(parts.values())
    others = {name: count * seconds_of(work, least) for name, work in passes(task.spec, rows * task.window).items()}
    flops = count * sum(p.flops for p in shapes)
    rates = {"gflops": flops / 1e9, "gflops_rate": flops / 1e9 / total}
    return {"cpu_seconds": total, "parts": parts, "beside": others, **rates}


class Contender(NamedTuple):
    """One row of the table."""

    open: Open | None  # makes it ready; None for those that are measured their own way
    precision: str = "fp32"
    fedavg: bool = True  # does what `plain` does, so that the results must agree
    needs: str | None = None  # package it takes, if it is not ours
    hoards: bool = False  # keeps every client's weights until the end of the round


ON_CPU: dict[str, Contender] = {
    "plain": Contender(plain, hoards=True),
    "keyfed": Contender(keyfed),
    "keyfed-2": Contender(functools.partial(keyfed, workers=2)),
    "pfl": Contender(pfl, needs="pfl"),
    "flower": Contender(None, needs="flwr", hoards=True),
    "central": Contender(central, fedavg=False),
    "floor": Contender(None, fedavg=False),
}
ON_CUDA: dict[str, Contender] = {
    "plain": Contender(plain, hoards=True),
    "plain-graph": Contender(plain_graph, hoards=True),
    "plain-graph-bf16": Contender(plain_graph, "bf16", hoards=True),
    "keyfed": Contender(keyfed),
    "keyfed-bf16": Contender(keyfed, "bf16"),
    "central": Contender(central, fedavg=False),
    "central-bf16": Contender(central, "bf16", fedavg=False),
}


CONTENDERS = {"cpu": ON_CPU, "cuda": ON_CUDA}
