"""The same FedAvg round through pfl-research's simulated backend and Flower's simulation, where they are installed.

Both train the `torch.nn` model of `keyfed.lab.bench.contenders` on the same text with the same settings. Neither is a
dependency: their modules are looked up by name when a round is asked for. Evaluation, which both do by default, is off.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyfed.lab.bench.contenders import (
    BATCH,
    LR,
    MOMENTUM,
    PlainModel,
    Round,
    Task,
    detached,
    mean_loss,
    train_plain,
)
from keyfed.model.language_model import Params
from keyfed.text.batches import stream_steps

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
    part = {
        name: import_module(f"pfl.{name}") for name in ("model.pytorch", "aggregate.simulate", "context", "hyperparam")
    }
    averaging, data = import_module("pfl.algorithm.federated_averaging"), import_module("pfl.data.federated_dataset")
    weighting, types = import_module("pfl.aggregate.weighting"), import_module("pfl.common_types")
    network = PflModel(task.spec, task.params)
    model = part["model.pytorch"].PyTorchModel(
        model=network,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=MOMENTUM),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    training = part["hyperparam"].NNTrainHyperParams(
        local_batch_size=None, local_num_epochs=task.epochs, local_learning_rate=LR
    )
    algorithm = averaging.FederatedAveraging()

    def round(cohort: Sequence[int]) -> Params:
        network.load_state_dict(task.params, strict=False)
        users = itertools.cycle(cohort)
        clients = data.FederatedDataset(lambda k: PflText(task.texts[k], task.window, k), lambda: next(users))
        backend = part["aggregate.simulate"].SimulatedBackend(
            training_data=clients, val_data=clients, postprocessors=[weighting.WeightByDatapoints()]
        )
        context = part["context"].CentralContext(
            current_central_iteration=0, do_evaluation=False, cohort_size=len(cohort),
            population=types.Population.TRAIN, algorithm_params=None, model_train_params=training, seed=1,
        )  # fmt: skip
        statistics, metrics = backend.gather_results(model, algorithm, central_context=context)
        algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        return {name: p.clone() for name, p in network.state_dict().items()}

    yield round


@functools.lru_cache(maxsize=1)
def _task(asked: tuple[tuple[str, Any], ...]) -> Task:
    """A task made again inside one of Flower's processes, once."""
    torch.set_num_threads(1)
    return Task(**dict(asked))


def flower_round(task: Task, meter: AbstractContextManager[Any]) -> Params:
    """FedAvg by Flower's simulation on Ray: a short round so that the actors are up, then the one that is measured."""
    os.environ.update(PRIVATE)
    app, clientapp = import_module("flwr.app"), import_module("flwr.clientapp")
    serverapp, simulation = import_module("flwr.serverapp"), import_module("flwr.simulation")
    strategies = import_module("flwr.serverapp.strategy")
    asked = tuple(asdict(task).items())
    client, server = clientapp.ClientApp(), serverapp.ServerApp()
    results: list[Params] = []

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        here = _task(asked)
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
