"""`keyfed bench`: one FedAvg round on one thread, our engine beside the loop everybody writes, in the same run.

Each measurement is a process of its own (CPU seconds and peak memory are the process's), the two are interleaved, and
medians are printed. Machines are shared: trust the ratio, not the seconds.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keyfed.engine.problem import Problem, make_store
from keyfed.engine.simulate import Simulation
from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.types import MethodSpec
from keyfed.model.language_model import ModelSpec, Params, init_params
from keyfed.model.presets import build_spec, preset
from keyfed.text.batches import Batching, stream_steps

LR, CLIP, BATCH = 1.0, 1.0, 10
CONTENDERS = ("plain", "keyfed")


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


def plain_round(spec: ModelSpec, params: Params, texts: list[Any], window: int) -> Params:
    """FedAvg, one client after the other: deep copies, torch.optim, a list of state dicts, a weighted mean."""
    model = PlainModel(spec, params)
    states, weights = [], []
    for text in texts:
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=LR)
        state: Any = None
        for step in stream_steps(text, BATCH, window):
            logits, state = local(torch.from_numpy(np.ascontiguousarray(step.inputs)), state)
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
            targets = torch.from_numpy(np.ascontiguousarray(step.targets))
            nats = F.cross_entropy(logits.reshape(-1, spec.vocab), targets.reshape(-1), reduction="none")
            mask = torch.from_numpy(np.ascontiguousarray(step.mask)).reshape(-1)
            loss = (nats * mask).sum() / mask.sum()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(local.parameters(), CLIP)
            optimiser.step()
        states.append(local.state_dict())
        weights.append(len(text) - 1)
    return {name: sum(s[name] * (w / sum(weights)) for s, w in zip(states, weights, strict=True)) for name in states[0]}


def keyfed_round(spec: ModelSpec, params: Params, texts: list[Any], window: int) -> Params:
    """The same round through our engine."""
    names = [f"c{k}" for k in range(len(texts))]
    method = build_method(MethodSpec("fedavg", {"optimiser": "sgd", "lr": LR, "clip": CLIP, "batch_size": BATCH}))
    problem = Problem(spec, make_store(texts, names), Batching("stream", BATCH, window), seed=1)
    with Simulation(problem) as federation:
        state, _ = run_round(method, initial_state(method, params), names, federation)
    return state.params


def synthetic_texts(vocab: int, clients: int, tokens: int) -> list[Any]:
    """Word ids with a Zipf-like distribution; timing does not depend on what they say."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocab - 3)
    return [(4 + rng.choice(vocab - 4, tokens, p=weights / weights.sum())).astype(np.int32) for _ in range(clients)]


def measure(who: str, model: str, vocab: int, clients: int, tokens: int) -> dict[str, Any]:
    """Run one round in this process and return its cost; `check` lets the caller compare the results."""
    torch.set_num_threads(1)
    spec = build_spec(model, vocab)
    params = init_params(spec, 1)
    texts = synthetic_texts(vocab, clients, tokens)
    run = {"plain": plain_round, "keyfed": keyfed_round}[who]
    began, wall = time.process_time(), time.perf_counter()
    result = run(spec, params, texts, preset(model).window)
    spent, wall = time.process_time() - began, time.perf_counter() - wall
    moved = sum(float((result[name] - p).double().square().sum()) for name, p in params.items()) ** 0.5
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"cpu_seconds": spent, "wall_seconds": wall, "peak_bytes": peak, "check": moved}


def bench_round(*, model: str, vocab: int, clients: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Measure every contender `repeats` times, interleaved, each in its own process."""
    chosen = preset(model)
    if chosen.cell == "cifg" or chosen.dense or chosen.biases == 1:
        raise ConfigError(f'model "{model}" has no counterpart in torch.nn to compare with; try gru or lstm')
    asked = {"model": model, "vocab": vocab, "clients": clients, "tokens": tokens}
    runs: dict[str, list[dict[str, Any]]] = {who: [] for who in CONTENDERS}
    for _ in range(repeats):
        for who in CONTENDERS:
            runs[who].append(_in_own_process({"who": who, **asked}))
    rows = {who: {key: statistics.median(r[key] for r in runs[who]) for key in runs[who][0]} for who in CONTENDERS}
    for row in rows.values():
        row["tokens_per_cpu_second"] = clients * (tokens - 1) / row["cpu_seconds"]
        row["cpu_ratio"] = row["cpu_seconds"] / rows["plain"]["cpu_seconds"]
        row["memory_ratio"] = row["peak_bytes"] / rows["plain"]["peak_bytes"]
    return {
        **asked,
        "repeats": repeats,
        "rows": rows,
        "runs": runs,
        "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1},
    }


def _in_own_process(asked: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "keyfed.run.bench", json.dumps(asked)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"benchmark process failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def bench_text(result: dict[str, Any]) -> str:
    """Write a benchmark for people."""
    lines = [
        f"one FedAvg round, {result['model']}, V = {result['vocab']:,}, {result['clients']} clients × "
        f"{result['tokens']:,} tokens, one thread, median of {result['repeats']} (torch {result['machine']['torch']})",
        f"{'':<10}{'CPU s':>10}{'tokens/s':>12}{'peak MB':>10}{'CPU ×':>8}{'memory ×':>10}",
    ]
    for who, row in result["rows"].items():
        lines.append(
            f"{who:<10}{row['cpu_seconds']:>10.1f}{row['tokens_per_cpu_second']:>12,.0f}"
            f"{row['peak_bytes'] / 1e6:>10.0f}"
            f"{row['cpu_ratio']:>8.2f}{row['memory_ratio']:>10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))) + "\n")
