"""The next-character report's figures as its notebook made them: defects, kept to show where the numbers come from.

The notebook hands batches of B = 10 rows with 100 characters each to an LSTM that expects time first. So the recurrence
runs over the *batch*: at each of the 100 positions the network reads the characters which the ten rows have there, and
has to say the next character of each row. All it knows of a row is that one character; what it carries is of other
rows. The best it can do is the entropy of character pairs. Its "non-IID" split shuffles the characters of the text as
well: then a character says nothing of the next, and the best is the entropy of single characters.

Nothing but a study uses this. Local steps and the mean are the ordinary engine's; only the batches are peculiar. As in
the notebook, the model is that of the last round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.load import Config, method_spec, to_document
from keyfed.engine.network import gradient, init_params, parameter_count
from keyfed.engine.problem import Problem, TextObjective, make_store, stack_steps
from keyfed.engine.simulate import Simulation
from keyfed.federated.cohort import Work, derive_seed
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.types import Params, State
from keyfed.lab.papers.fedatt_code import Kept, find_kept, go_on
from keyfed.run.checkpoint import Best
from keyfed.run.choose import choose
from keyfed.run.evaluate import evaluate_together, limit_streams
from keyfed.run.loop import Listener
from keyfed.run.prepare import Prepared
from keyfed.text.batches import Batching, Step, stream_steps

Ids = NDArray[np.int32]


def across(steps: Sequence[Step]) -> list[Step]:
    """Turn batches on their side: rows become time, and every batch starts from a zero state.

    Example:
      >>> step = Step(np.array([[1, 2, 3], [7, 8, 9]]), np.array([[2, 3, 4], [8, 9, 5]]), np.ones((2, 3)), False)
      >>> across([step])[0].inputs.tolist(), across([step])[0].targets.tolist()
      ([[1, 7], [2, 8], [3, 9]], [[2, 8], [3, 9], [4, 5]])
    """
    return [Step(step.inputs.T, step.targets.T, step.mask.T, True) for step in steps]


class AcrossObjective(TextObjective):
    """Clients' text, read across the batch."""

    def __init__(
        self, problem: Problem, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None, epochs: int
    ) -> None:
        super().__init__(problem, clients, round, rows, works, epochs)
        # What the engine is told: as many rows as there are positions, as long as there are rows.
        self._upright, window = self._batching, self._batching.window
        self._batching = Batching("sentences", window, rows)

    def _client_steps(self, client: int, epoch: int) -> list[Step]:
        stream, most = self._problem.store.stream(client), self._upright.max_tokens
        text = stream if most is None else stream[: most + 1]
        return across(stream_steps(text, self._upright.rows, self._upright.window))


@dataclass(frozen=True, slots=True)
class AcrossProblem(Problem):
    """The problem whose batches are the notebook's."""

    def objective(
        self, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None = None, epochs: int = 1
    ) -> AcrossObjective:
        """Return these clients' text, read across the batch."""
        return AcrossObjective(self, clients, round, rows, works, epochs)


def across_score(problem: Problem, params: Params, streams: Mapping[str, Ids], rows: int) -> tuple[float, float]:
    """Return nats a character and the share of first guesses, read across the batch as in training."""
    stacked = {name: p[None] for name, p in params.items()}
    steps = [s for stream in streams.values() for s in across(stream_steps(stream, rows, problem.batching.window))]
    none = torch.zeros(1, dtype=torch.int64)
    sums = torch.zeros(3, dtype=torch.float64)
    for step in steps:
        batch, _ = stack_steps([step], step.inputs.shape[0], problem.device)
        found, _ = gradient(problem.spec, stacked, batch, None, none, none, {}, count=True)
        assert found.hits is not None
        sums += torch.stack([found.nats[0].double(), found.hits[0].double(), found.tokens[0].double()]).cpu()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def shuffled(stream: Ids, seed: int, name: str) -> Ids:
    """A stream with its characters in random order."""
    return np.random.default_rng(derive_seed(seed, "shuffled characters", name)).permutation(stream)


def train_across(
    config: Config, prepared: Prepared, shuffle: bool, listen: Listener, folder: Path | None = None
) -> dict[str, Any]:
    """Train and score as the notebook does; return what a cell's result holds.

    Args:
      config: model, method, train.rounds, seed, device and precision are read; everybody takes part in every round.
      shuffle: whether the characters of every text are shuffled, which the report's "non-IID" clients are.
      folder: where it is kept when it is stopped, and found again; None for nowhere.
    """
    seed, store = config.train.seed, prepared.store
    valid, test = limit_streams(prepared.valid, config.train.valid_tokens), dict(prepared.test)
    if shuffle:
        texts = [shuffled(store.stream(k), seed, name) for k, name in enumerate(store.names)]
        store = make_store(texts, list(store.names))
        valid = {name: shuffled(stream, seed, f"valid {name}") for name, stream in valid.items()}
        test = {name: shuffled(stream, seed, name) for name, stream in test.items()}
    method = build_method(method_spec(config))
    rows, window = method.batch_size, prepared.batching.window
    choice = choose(replace(config.train, workers=1), prepared.spec, 1, len(store), window * rows)
    problem = AcrossProblem(
        prepared.spec, store, prepared.batching, seed, choice.device, precision=config.train.precision
    )
    listen.say(f"code-faithful, across the batch{', characters shuffled' if shuffle else ''}; {choice.reason}")
    data_sha256 = prepared.corpus.fingerprint()
    about = {
        "data_sha256": data_sha256, "shuffle": shuffle, "torch": torch.__version__, "device": choice.device,
        "block": choice.block, "config": to_document(replace(config, data=replace(config.data, dir=None))),
    }  # fmt: skip
    params = {name: p.to(choice.device) for name, p in init_params(prepared.spec, seed).items()}
    kept = None if folder is None else find_kept(folder, about, params, listen.say)
    kept = kept or Kept(initial_state(method, params), Best(0, math.inf, params))
    listen.start(f"{method.name}, code-faithful, on {prepared.corpus.name}", config.train.rounds, kept.state.round)
    began = time.monotonic() - kept.seconds
    with Simulation(problem, block=choice.block) as federation:

        def validated(state: State) -> tuple[dict[str, Any], float]:
            nats, top1 = across_score(problem, state.params, valid, rows)
            return {"nats": nats, "perplexity": math.exp(nats), "top1": top1}, nats

        kept = go_on(
            kept, method, config.train.rounds, federation, lambda _: store.names, validated, listen, folder, about,
            chooses=False,
        )  # fmt: skip
    state = kept.state
    nats, top1 = across_score(problem, state.params, test, rows)
    honest = evaluate_together(prepared.spec, state.params, prepared.test, choice.device)
    return {
        "records": list(kept.records),
        "test": {"nats": nats, "perplexity": math.exp(nats), "top1": top1, "honest_nats": honest.mean_nats},
        "best_round": state.round, "rounds": state.round, "clients": len(store), "cohort": len(store),
        "tokens_trained": sum(record["worked"] for record in kept.records),
        "parameters": parameter_count(prepared.spec), "vocabulary": len(prepared.vocab),
        "train_tokens": int(store.sizes().sum()), "seconds": time.monotonic() - began, "data": prepared.corpus.name,
        "data_sha256": data_sha256, "method": method.name, "model": prepared.spec.name,
    }  # fmt: skip
