"""Whole rounds on one GPU, with evaluation, against the loops everybody writes (`--help` says how).

FedAtt's settings: 100 clients, ten a round, E = 5, B = 10, tied GRU-300, SGD 0.01 with momentum 0.5; FedAvg's mean.
Contenders in one call: the sequential `nn.GRU` loop, the same with its step captured in a CUDA graph (where all clients
have the same rows), and our engine in float32 and bf16. Sequential rounds are few and averaged; ours are as many as
asked, after a warm-up in which shapes are captured. A round is trained, averaged and validated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig, check
from keyfed.engine.problem import Problem, TextObjective
from keyfed.engine.simulate import Simulation
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.soundness import Good
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Method, Params
from keyfed.lab.bench.contenders import PlainModel, Task, detached, mean_loss, plain_graph, weighted_mean
from keyfed.model.language_model import init_params
from keyfed.run import loop
from keyfed.run.checkpoint import Cohort, RunProgress
from keyfed.run.evaluate import evaluate_together, limit_streams
from keyfed.run.prepare import Prepared, make_problem, prepare
from keyfed.text.batches import stream_steps

MOMENTUM, EPOCHS, BATCH, COHORT = 0.5, 5, 10, 10
STUDIES: dict[str, dict[str, Any]] = {
    "ptb": {"name": "ptb"},
    "wikitext-2": {"name": "wikitext-2", "vocab": None, "lower": False},
    "ptb-sentences": {"name": "ptb", "batches": "sentences"},
    "irc": {"name": "irc"},
}


@dataclass(frozen=True)
class Study:
    """A corpus ready to train on."""

    config: Config
    prepared: Prepared
    valid: dict[str, Any]

    def method(self, lr: float, name: str = "fedavg") -> Method:
        """A method with FedAtt's local settings."""
        options = {"optimiser": "sgd", "lr": lr, "momentum": MOMENTUM, "clip": None}
        return build_method(MethodSpec(name, {**options, "epochs": EPOCHS, "batch_size": BATCH}))

    def problem(self, method: Method, precision: str) -> Problem:
        """The local problems on the GPU."""
        return replace(make_problem(self.prepared, self.config, method, "cuda"), precision=precision)

    def cohort(self, round: int) -> list[int]:
        """Ten clients, the same for every contender."""
        clients = len(self.prepared.store)
        return np.sort(np.random.default_rng(round).choice(clients, COHORT, replace=False)).tolist()


def open_study(name: str, data: str) -> Study:
    """Prepare a corpus."""
    config = check(Config(DataConfig(dir=data, **STUDIES[name]), ModelConfig("gru"), TrainConfig()))
    prepared = prepare(config, None)
    return Study(config, prepared, limit_streams(prepared.valid, config.train.valid_tokens))


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Synchronised wall-clock time."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def ours(
    study: Study, precision: str, rounds: int, warm: int, lr: float = 0.01, name: str = "fedavg"
) -> dict[str, Any]:
    """Train rounds through our engine, validating after each."""
    method, spec = study.method(lr, name), study.prepared.spec
    params = {name: p.cuda() for name, p in init_params(spec, 1).items()}
    names, perplexities, spent = study.prepared.store.names, [], []
    state = initial_state(method, params)
    run = RunProgress(method, state, warm + rounds, Good(state, math.inf))
    with Simulation(study.problem(method, precision), block=COHORT) as federation:
        outcomes = loop.rounds(run, federation, lambda s: Cohort([names[k] for k in study.cohort(s.round)]))
        for _ in range(warm + rounds):
            train, outcome = seconds(lambda: next(outcomes))
            found = outcome.state.params
            judge, score = seconds(lambda: evaluate_together(spec, found, study.valid, "cuda"))  # noqa: B023
            perplexities.append(score.perplexity)
            spent.append((train, judge, outcome.summary.worked))
    timed = np.array(spent[warm:])
    return {
        "rounds": rounds,
        "round_s": float(timed[:, :2].sum(1).mean()),
        "train_s": float(timed[:, 0].mean()),
        "evaluate_s": float(timed[:, 1].mean()),
        "tokens_per_s": float(timed[:, 2].sum() / timed[:, 0].sum()),
        "warm_up_s": float(sum(t + j for t, j, _ in spent[:warm])),
        "perplexities": perplexities,
        "memory_GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def plain_client(study: Study, problem: Problem, params: Params, client: int, round: int) -> tuple[Params, int]:
    """One client as everybody trains it."""
    model = PlainModel(study.prepared.spec, params).cuda()
    model.rnn.flatten_parameters()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
    objective = TextObjective(problem, [client], round, BATCH, None, EPOCHS)
    for epoch in range(EPOCHS):
        state: Any = None
        for step in objective.epoch(epoch)[0]:
            inputs, targets = (torch.from_numpy(np.ascontiguousarray(a)).cuda() for a in step[:2])
            optimiser.zero_grad()
            logits, state = model(inputs, None if step.fresh else state)
            state = detached(state)
            mean_loss(logits, targets).backward()
            optimiser.step()
    return dict(model.state_dict()), int(objective.whole[0])


@torch.no_grad()
def plain_evaluation(study: Study, params: Params) -> float:
    """Validate as everybody does: the text cut into ten rows, windows of 35."""
    model = PlainModel(study.prepared.spec, params).cuda().eval()
    text = np.concatenate(list(study.valid.values()))
    state, nats = None, torch.zeros((), device="cuda")
    for step in stream_steps(text, BATCH, 35):
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(a)).cuda() for a in step[:2])
        logits, state = model(inputs, state)
        nats += mean_loss(logits, targets) * int(step.mask.sum())
    return float(nats)


def sequential(study: Study, rounds: Sequence[int], params: Params) -> tuple[dict[str, Any], Params]:
    """Some rounds of the sequential loop, each from `params`; the last round's model too."""
    problem = study.problem(study.method(0.01), "fp32")
    plain_client(study, problem, params, study.cohort(rounds[0])[0], rounds[0])  # libraries load, cuDNN chooses
    train, judge, mean = [], [], params
    for number in rounds:

        def work(number: int = number) -> Params:
            found = [plain_client(study, problem, params, k, number) for k in study.cohort(number)]
            return weighted_mean([p for p, _ in found], [n for _, n in found])

        spent, mean = seconds(work)
        train.append(spent)
        judge.append(seconds(lambda: plain_evaluation(study, mean))[0])  # noqa: B023
    times = {"train_s": float(np.mean(train)), "evaluate_s": float(np.mean(judge)), "rounds": len(train)}
    return times | {"round_s": times["train_s"] + times["evaluate_s"]}, mean


def graph(study: Study, precision: str) -> dict[str, Any]:
    """A round of the sequential loop whose step is one captured graph; a stream's clients of equal rows only."""

    task = Task("gru", study.prepared.spec.vocab, COHORT, 0, EPOCHS, "cuda", precision)
    task.__dict__["texts"] = [study.prepared.store.stream(k) for k in study.cohort(0)]  # real ones for synthetic
    with plain_graph(task) as round:
        round(task.cohort)
        spent, _ = seconds(lambda: round(task.cohort))
    return {"train_s": spent, "rounds": 1}


def agreement(study: Study, params: Params) -> dict[str, float]:
    """Our round in float32 against the sequential one, both without tf32: relative to how far the round moved."""
    torch.backends.cudnn.allow_tf32 = False
    _, theirs = sequential(study, [0], params)
    torch.backends.cudnn.allow_tf32 = True
    method, names = study.method(0.01), study.prepared.store.names
    there = {name: p.cuda() for name, p in params.items()}
    with Simulation(study.problem(method, "fp32"), block=COHORT) as federation:
        cohort = Cohort([names[k] for k in study.cohort(0)])
        mine, again = (
            loop.run_rounds(method, initial_state(method, there), 1, federation, lambda _: cohort).params
            for _ in range(2)
        )
    moved = {name: theirs[name] - p for name, p in there.items()}
    apart = {name: mine[name] - theirs[name] for name in there}

    def norm(tensors: Params) -> float:
        return float(sum(t.double().square().sum() for t in tensors.values()) ** 0.5)

    return {
        "relative_to_weights": norm(apart) / norm(theirs),
        "relative_to_movement": norm(apart) / norm(moved),
        "worst_layer_to_weights": max(
            float(a.norm() / theirs[name].norm().clamp(min=1e-9)) for name, a in apart.items()
        ),
        "worst_layer_to_movement": max(float(a.norm() / moved[name].norm()) for name, a in apart.items()),
        "same_bits_twice": float(all(torch.equal(again[name], p) for name, p in mine.items())),
    }


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Everything about one corpus."""
    study = open_study(name, asked.data)
    params = init_params(study.prepared.spec, 1)
    out: dict[str, Any] = {"vocabulary": len(study.prepared.vocab), "clients": len(study.prepared.store)}

    def add(row: str, found: dict[str, Any]) -> None:
        out[row] = found
        shown = {k: v for k, v in found.items() if k != "perplexities"}
        print(name, row, json.dumps(shown), flush=True)

    first, _ = sequential(study, range(asked.sequential if name != "irc" else 10), params)
    add("sequential", first)
    if name in ("ptb", "wikitext-2"):
        for precision in ("fp32", "bf16"):
            add(f"sequential-graph-{precision}", graph(study, precision))
    torch.cuda.reset_peak_memory_stats()
    warm = 5 if name in ("irc", "ptb-sentences") else 2
    for precision, rounds in (("bf16", asked.rounds), ("fp32", max(2, asked.rounds // 10))):
        found = ours(study, precision, rounds, warm)
        found |= {"times_sequential": first["round_s"] / found["round_s"]}
        for row in ("sequential-graph-fp32", "sequential-graph-bf16"):
            if row in out:
                found[f"times_{row}"] = out[row]["train_s"] / found["train_s"]
        add(f"keyfed-{precision}", found)
    if name == "ptb":
        add("keyfed-bf16 fedatt", ours(study, "bf16", 10, 2, name="fedatt"))
        add("agreement", agreement(study, params))
        ends = {p: ours(study, p, 10, 0, lr=1.0)["perplexities"][-1] for p in ("fp32", "bf16")}
        add("perplexity after 10 rounds at lr 1", ends | {"ratio": ends["bf16"] / ends["fp32"]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", default=list(STUDIES), help=f"of {', '.join(STUDIES)}; all by default")
    parser.add_argument("--data", required=True, help="folder that holds the named corpora")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of ours in bf16; a tenth in float32")
    parser.add_argument("--sequential", type=int, default=1, help="rounds of the sequential loop")
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    asked = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    result: dict[str, Any] = {"machine": machine}
    for name in asked.studies:
        result[name] = measure(name, asked)
        if asked.out is not None:
            asked.out.write_text(json.dumps(result, indent=1), "utf-8")


if __name__ == "__main__":
    main()
