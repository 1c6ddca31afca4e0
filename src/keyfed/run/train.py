"""Training a run from its configuration to its result: prepare, rounds, checkpoints, choice on validation, test."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from keyfed.config import Config, check
from keyfed.engine.network import init_params, parameter_count, shapes
from keyfed.engine.simulate import Simulation
from keyfed.engine.trial import MakeModule
from keyfed.errors import ConfigError, DataError
from keyfed.federated.methods import build_method
from keyfed.federated.round import RoundSummary, initial_state, run_round
from keyfed.federated.sampling import sample_cohort
from keyfed.federated.types import Method, MethodSpec, Params
from keyfed.run.baselines import score_baselines
from keyfed.run.checkpoint import Best, Checkpoint, load_checkpoint, save_checkpoint, write_atomically
from keyfed.run.choose import Choice, choose, confine, usable_cores
from keyfed.run.evaluate import evaluate, evaluate_sentences, limit_streams, spread, total
from keyfed.run.folder import (
    append_line,
    as_before,
    made_by,
    open_folder,
    read_metrics,
    read_result,
    refuse_changes,
    save_model,
    strict,
    write_run_toml,
)
from keyfed.run.outside import accept_method, names
from keyfed.run.prepare import POOLED, Prepared, make_problem, prepare, round_tokens
from keyfed.run.traffic import model_bytes, report_bytes, round_traffic


class Listener(Protocol):
    """Who follows a run: a progress bar, a log, nobody."""

    def say(self, line: str) -> None:
        """A line of explanation."""
        ...

    def start(self, what: str, rounds: int, done: int) -> None:
        """Rounds begin; `done` of them lie in a checkpoint."""
        ...

    def round(self, record: dict[str, Any]) -> None:
        """A round is over; `record` is its line of metrics.jsonl."""
        ...


class Silent:
    """A listener that does not listen."""

    def say(self, line: str) -> None: ...

    def start(self, what: str, rounds: int, done: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...


def members_of(method: Method, prepared: Prepared, config: Config) -> int:
    """Number of clients of a round; a cohort larger than the population is said before training starts."""
    clients = len(prepared.store)
    if method.cohort == "pooled":
        return 1
    if method.cohort == "all":
        return clients
    if config.train.cohort > clients:
        raise DataError(
            f"{prepared.corpus.name} has {clients} clients with enough text, fewer than the cohort of "
            f"{config.train.cohort}; set train.cohort to at most {clients}, or data.clients higher"
        )
    return config.train.cohort


def cohort_of(method: Method, prepared: Prepared, config: Config, round: int) -> list[str]:
    """The clients of one round, a function of (seed, round)."""
    if method.cohort == "pooled":
        return [POOLED]
    names = prepared.store.names
    if method.cohort == "all":
        return list(names)
    return [names[k] for k in sample_cohort(len(names), config.train.cohort, config.train.seed, round)]


def plan(config: Config, prepared: Prepared, own: Method | None = None) -> tuple[Method, Choice]:
    """Build the method, or take the caller's own, and choose where it runs."""
    method = accept_method(own, config) if own is not None else build_method(MethodSpec(config.method, config.options))
    members = members_of(method, prepared, config)
    if method.distance is not None and members < 2:
        raise ConfigError(
            f"{method.name} weighs the clients of a round against each other, and a cohort of {members} has "
            "nothing to weigh; set train.cohort to at least 2, or use fedavg"
        )
    trained = min(config.train.cohort, len(prepared.store)) if method.cohort == "pooled" else members
    tokens = round_tokens(prepared, trained, method.epochs)
    choice = choose(config.train, prepared.spec, tokens, members)
    return method, confine(choice, prepared.spec, None if own is None else own.name)


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    prepared: Prepared | None = None,
    budget: int | None = None,
    module: MakeModule | None = None,
    method: Method | None = None,
) -> dict[str, Any]:
    """Train a run in folder `out` and return its result (also in out/result.json).

    Args:
      resume: go on with the run in `out` from its last whole checkpoint; a finished run only returns its result.
      prepared: the corpus, if it was prepared with this configuration already.
      budget: tokens of a round of central training, see `make_problem`.
      module: makes the model, in place of the configuration's preset.
      method: a method from outside the package, in place of the configuration's.

    Raises:
      KeyfedError: anything the caller can mend; nothing that was checkpointed is lost.
      KeyboardInterrupt: after the last finished round has been written.
    """
    listen = listener or Silent()
    config = check(config)
    with open_folder(out, resume):
        prepared = prepared or prepare(config, module)
        method, choice = plan(config, prepared, method)
        fingerprint, outside = prepared.corpus.fingerprint(), names(prepared.spec, method)
        if resume and (out / "run.toml").exists():
            made = refuse_changes(out, config, fingerprint, outside)
            choice = as_before(made, choice, listen.say)
            finished = read_result(out)
            if finished is not None:
                listen.say(f"{out} is finished; nothing to do")
                return finished
        else:
            write_run_toml(out, config, made_by(choice, fingerprint) | outside)
        for line in prepared.describe():
            listen.say(line)
        count = parameter_count(prepared.spec)
        listen.say(f"model {prepared.spec.name}: {count:,} parameters; {choice.reason}")
        best, seconds = _rounds(config, out, prepared, method, choice, listen, budget)
        result = _finish(config, out, prepared, method, choice, best, seconds, listen)
        if config.train.central and method.cohort != "pooled":
            tokens = round_tokens(prepared, members_of(method, prepared, config), method.epochs)
            result["baselines"]["central"] = _central(config, out, prepared, listen, tokens)
        result = dict(strict(result))
        write_atomically(out / "result.json", json.dumps(result, indent=1, allow_nan=False).encode())
        return result


def _central(config: Config, out: Path, prepared: Prepared, listen: Listener, budget: int) -> dict[str, Any]:
    """Train the same model on the pooled text with the same token budget, as a run of its own beside this one.

    It has the central method's own defaults: a step size that suits ten averaged clients is too large for one.
    """
    settings = replace(config.train, central=False, baselines=False)
    central = replace(config, method="central", options={}, train=settings)
    result = train(central, out / "central", resume=True, listener=listen, prepared=prepared, budget=budget)
    return {"test": result["test"], "unseen": result["unseen"], "seconds": result["seconds"]}


def _rounds(
    config: Config,
    out: Path,
    prepared: Prepared,
    method: Method,
    choice: Choice,
    listen: Listener,
    budget: int | None,
) -> tuple[Best, float]:
    """Run all rounds that are still to do; return the model chosen on validation and the seconds spent."""
    metrics = out / "metrics.jsonl"
    logged = metrics.stat().st_size if metrics.exists() else 0
    saved = load_checkpoint(out / "checkpoint", logged, listen.say)
    if saved is None:
        params = init_params(prepared.spec, config.train.seed)
        state, best, length, before = initial_state(method, params), None, 0, 0.0
    else:
        # Layers in the model's own order: sums over layers must round alike before and after a resume.
        params = {name: saved.state.params[name] for name in shapes(prepared.spec)}
        state, best, length, before = (
            replace(saved.state, params=params),
            saved.best,
            saved.metrics_length,
            saved.seconds,
        )
        listen.say(f"resuming after round {state.round} of {config.train.rounds}")
    if metrics.exists():
        os.truncate(metrics, length)  # lines written after the last checkpoint will be written again
    size = model_bytes(state.params)
    valid = limit_streams(prepared.valid, config.train.valid_tokens)
    problem = make_problem(prepared, config, method, choice.device, budget)
    started = time.monotonic() - before
    written = state.round
    threads = torch.get_num_threads()
    said: set[str] = set()
    listen.start(f"{method.name} on {prepared.corpus.name}", config.train.rounds, state.round)
    with Simulation(problem, block=choice.block, workers=choice.workers) as federation:
        try:
            while state.round < config.train.rounds:
                cohort = cohort_of(method, prepared, config, state.round)
                began = time.monotonic()
                torch.set_num_threads(choice.threads)
                after, summary = run_round(method, state, cohort, federation)
                torch.set_num_threads(usable_cores())
                judged = judge_attention(summary) if method.distance is not None else None
                if judged is not None and judged[0] not in said:
                    said.add(judged[0])
                    listen.say(judged[1])
                record = _record(method, summary, size, len(cohort), time.monotonic() - began)
                last = after.round == config.train.rounds
                if last or after.round % config.train.eval_every == 0:
                    score = total(evaluate(prepared.spec, after.params, valid, choice.device))
                    record["valid"] = score.summary()
                    if best is None or score.mean_nats < best.nats or not math.isfinite(best.nats):
                        best = Best(after.round, score.mean_nats, after.params)
                record["elapsed"] = time.monotonic() - started
                state, length = after, append_line(metrics, record)
                if last or state.round % config.train.checkpoint_every == 0:
                    save_checkpoint(out / "checkpoint", Checkpoint(state, best, length, record["elapsed"]))
                    written = state.round
                listen.round(record)
        except KeyboardInterrupt:
            if state.round > written:
                save_checkpoint(out / "checkpoint", Checkpoint(state, best, length, time.monotonic() - started))
            raise
        finally:
            torch.set_num_threads(threads)
    if best is None:
        best = Best(state.round, math.nan, state.params)
    return best, time.monotonic() - started


def judge_attention(summary: RoundSummary) -> tuple[str, str] | None:
    """Say when attention does too much (one client is nearly everything) or nothing: what, and a line about it."""
    effective, clients = summary.effective_clients, len(summary.contributors)
    if clients < 3:
        return None
    layer = min(effective, key=lambda name: effective[name])
    if effective[layer] < 2:
        return "sharp", (
            f"round {summary.round + 1}: attention counts {effective[layer]:.2f} of {clients} clients in {layer}; "
            "a higher method.temperature spreads it"
        )
    if effective[layer] > clients * (1 - 1e-3):
        return "flat", (
            f"round {summary.round + 1}: attention is a uniform mean of {clients} clients to 1e-3; "
            "a lower method.temperature sharpens it"
        )
    return None


def _record(method: Method, summary: RoundSummary, size: int, cohort: int, seconds: float) -> dict[str, Any]:
    effective = summary.effective_clients
    attentive = method.distance is not None
    record = {
        "round": summary.round + 1,
        "loss": summary.loss,
        "tokens": summary.tokens,
        "worked": summary.worked,
        "cohort": cohort,
        "contributors": list(summary.contributors),
        "refused": {r.client: r.reason for r in summary.refused},
        "effective_clients": sum(effective.values()) / max(1, len(effective)),
        "traffic": round_traffic(size, cohort, summary, report_bytes(list(effective) if attentive else ())),
        "seconds": seconds,
    }
    if attentive:
        record["effective_by_layer"] = dict(effective)
    return record


def _finish(
    config: Config,
    out: Path,
    prepared: Prepared,
    method: Method,
    choice: Choice,
    best: Best,
    seconds: float,
    listen: Listener,
) -> dict[str, Any]:
    """Test the chosen model once, score the baselines on the same tokens, write the model."""
    chosen = "chosen on validation" if prepared.valid else "the last: there is no validation text"
    listen.say(f"testing the model of round {best.round} ({chosen})")
    params: Params = {name: best.params[name] for name in shapes(prepared.spec)}
    save_model(out, params, prepared.vocab)
    began = time.monotonic()
    tested = evaluate(prepared.spec, params, prepared.test, choice.device)
    unseen = evaluate(prepared.spec, params, prepared.unseen, choice.device)
    sentences = evaluate_sentences(prepared.spec, params, prepared.test, choice.device)
    evaluated = time.monotonic() - began
    began = time.monotonic()
    baselines = score_baselines(prepared, config.train.ngram_order) if config.train.baselines else {}
    records = read_metrics(out)
    return {
        "run": str(out),
        "method": method.name,
        "model": prepared.spec.name,
        "data": prepared.corpus.name,
        "parameters": parameter_count(prepared.spec),
        "vocabulary": len(prepared.vocab),
        "clients": len(prepared.store),
        "cohort": members_of(method, prepared, config),
        "rounds": config.train.rounds,
        "seed": config.train.seed,
        "best_round": best.round,
        "test": {**total(tested).summary(), "sentence_perplexity": sentences.perplexity},
        "unseen": total(unseen).summary() if unseen else None,
        "spread": spread(tested),
        "unseen_spread": spread(unseen),
        "clients_perplexity": {
            "seen": sorted(s.perplexity for s in tested.values()),
            "unseen": sorted(s.perplexity for s in unseen.values()),
        },
        "baselines": baselines,
        "traffic": {k: sum(r["traffic"][k] for r in records) for k in ("down", "up", "control")},
        "refused": sum(len(r["refused"]) for r in records),
        "tokens_trained": sum(r["worked"] for r in records),
        "oov_rate": prepared.oov,
        "seconds": seconds,
        "evaluation_seconds": evaluated,
        "baseline_seconds": time.monotonic() - began,
    }
