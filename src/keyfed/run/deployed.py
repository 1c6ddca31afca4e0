"""Training with real clients: the same rounds, run folder and report as a simulation, and no text on the server.

The run carries a vocabulary from elsewhere. Clients evaluate a model on their held-out text when they are called to
train from it, so that no message is spent on it: validation of the model after round t is known after round t + 1, and
the line of round t waits in the checkpoint until then. A checkpoint is written every round; a server that was killed is
started again with `resume` and goes on from the last whole one. Clients send their part of a secure round once: a round
in which the server was killed after that is abandoned.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.config import Config, check, parse_target, to_document
from keyfed.engine.calls import Calls, RemoteRun
from keyfed.engine.client_state import Version
from keyfed.engine.network import Network, init_params, parameter_count, shapes
from keyfed.engine.remote import RemoteFederation
from keyfed.engine.roster import Roster
from keyfed.engine.secure_round import Evaluated
from keyfed.engine.secure_simulation import SecureSettings
from keyfed.engine.transport import Transport
from keyfed.errors import ConfigError, RunError
from keyfed.federated.participation import Participation, cohort_size, draw
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.types import ClientId, Method, Params, State
from keyfed.files import write_atomically
from keyfed.run.checkpoint import Best, Checkpoint, load_checkpoint, save_checkpoint
from keyfed.run.choose import Choice
from keyfed.run.evaluate import Score
from keyfed.run.folder import (
    append_line,
    made_by,
    open_folder,
    read_metrics,
    read_result,
    refuse_changes,
    save_model,
    strict,
    write_run_toml,
)
from keyfed.run.on_device import method_digest, run_method, told
from keyfed.run.outside import build_network
from keyfed.run.record import reached, record_of
from keyfed.run.traffic import sizes_of
from keyfed.run.train import Listener, Silent
from keyfed.text.vocab import Vocab

HERE = Choice("cpu", 1, 1, 1, "clients train on their own devices")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server waits.

    Attributes:
      answer: seconds for the answers to one message.
      quorum: seconds for enough clients to be reachable before a round is abandoned.
      look: seconds between two looks.
    """

    answer: float = 600.0
    quorum: float = 600.0
    look: float = 1.0


def train_deployed(
    config: Config,
    vocab: Vocab,
    out: Path,
    transport: Transport,
    roster: Roster,
    listener: Listener | None = None,
    *,
    resume: bool = False,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Train a run with the clients of a roster and return its result (also in out/result.json).

    Args:
      config: what to train; without `secure.on` the server sees every upload.
      vocab: the run's vocabulary, from public text or from `keyfed vocab`.

    Raises:
      KeyfedError: anything the caller can mend; nothing that was checkpointed is lost.
    """
    listen, patience = listener or Silent(), patience or Patience()
    config = check(config)
    secure = SecureSettings(config.secure.threshold, config.secure.floor) if config.secure.on else None
    method = run_method(config, secure=secure is not None)
    refuse_simulated(config, method)
    spec = build_network(config, len(vocab), None)
    with open_folder(out, resume):
        fingerprint = hashlib.sha256(vocab.to_json().encode()).hexdigest()  # the only text a server has
        if resume and (out / "run.toml").exists():
            refuse_changes(out, config, fingerprint)
            finished = read_result(out)
            if finished is not None:
                listen.say(f"{out} is finished; nothing to do")
                return finished
        else:
            write_run_toml(out, config, made_by(HERE, fingerprint))
            write_atomically(out / "vocab.json", vocab.to_json().encode())
        about = {
            "config": told(to_document(config)),
            "vocab": vocab.to_json(),
            "method": method_digest(method),
        }
        run = RemoteRun(
            _run_name(out), about, _next_attempt(out), patience.answer, secure, config.upload.bound, config.train.seed
        )
        listen.say(f"model {spec.name}: {parameter_count(spec):,} parameters; {HERE.reason}")
        listen.say("secure sums: the server sees no upload" if secure else "PLAIN: the server sees every upload")
        course = _Course(config, out, spec, method, transport, roster, run, listen, patience)
        result = course.train(vocab)
        result = dict(strict(result))
        write_atomically(out / "result.json", json.dumps(result, indent=1, allow_nan=False).encode())
        course.part()
        return result


def refuse_simulated(config: Config, method: Method) -> None:
    """Refuse what only a simulation can do."""
    usual, given = Participation(), config.participation
    modelled = [
        key
        for key in ("over_select", "drop_before", "drop_after", "deadline", "least_epochs", "least_work", "pace_spread")
        if getattr(given, key) != getattr(usual, key)
    ]
    if modelled:
        raise ConfigError(f"participation.{modelled[0]} models clients; real ones do as they do: leave it out")
    if given.sampling == "size":
        raise ConfigError("participation.sampling=size needs to know how much text clients have; take uniform")
    if method.cohort == "pooled":
        raise ConfigError("central training needs everybody's text in one place; choose a federated method")
    if config.secure.on and config.participation.fraction is None and config.train.cohort < config.secure.floor:
        raise ConfigError(
            f"train.cohort is {config.train.cohort}, and clients hide among {config.secure.floor} or more "
            "(secure.floor): each would refuse; set train.cohort higher"
        )
    if method.codec is not None:
        raise ConfigError("upload.keep and upload.quantise work in simulation only; leave them out of a federation")
    if config.privacy.epsilon is not None or config.privacy.noise is not None:
        raise ConfigError(
            "differential privacy is there in simulation only so far, and a federation must not claim what it does not "
            "do; leave [privacy] out"
        )
    if config.train.curves:
        raise ConfigError("train.curves (--curves) works in simulation only; leave it out of a federation")
    if config.train.init is not None or config.vectors.file is not None or config.train.frozen_rounds:
        raise ConfigError("a federation starts from random weights: leave out init, vectors and frozen_rounds")


def _run_name(out: Path) -> str:
    """Return the run's id, the same after a restart; drawn, so that no two runs have the same."""
    path = out / "run.id"
    if not path.exists():
        write_atomically(path, os.urandom(12).hex().encode())
    return path.read_text("utf-8")


def _next_attempt(out: Path) -> int:
    path = out / "attempt"
    attempt = (int(path.read_text("utf-8")) if path.exists() else 0) + 1
    write_atomically(path, str(attempt).encode())
    return attempt


class _Course:
    """The rounds of one run: where it stands, and what is still to be written down."""

    def __init__(
        self,
        config: Config,
        out: Path,
        spec: Network,
        method: Method,
        transport: Transport,
        roster: Roster,
        run: RemoteRun,
        listen: Listener,
        patience: Patience,
    ) -> None:
        self.config, self.out, self.spec, self.method = config, out, spec, method
        self.listen, self.patience, self.secure = listen, patience, run.secure
        self.metrics = out / "metrics.jsonl"
        logged = self.metrics.stat().st_size if self.metrics.exists() else 0
        saved = load_checkpoint(out / "checkpoint", logged, listen.say)
        if saved is None:
            self.state = initial_state(method, init_params(spec, config.train.seed))
            self.best: Best | None = None
            self.length, before = 0, 0.0
        else:
            params = {name: saved.state.params[name] for name in shapes(spec)}
            self.state = replace(saved.state, params=params)
            self.best, self.length, before = saved.best, saved.metrics_length, saved.seconds
            listen.say(f"resuming after round {self.state.round} of {config.train.rounds}")
        if self.metrics.exists():
            os.truncate(self.metrics, self.length)
        counted = {client: version.round for client, version in (saved.clients if saved else {}).items()}
        self.calls = Calls(transport, roster, run, counted)
        self.federation = RemoteFederation(self.calls)
        self.started = time.monotonic() - before
        self.pending: dict[str, Any] | None = dict(saved.pending) if saved is not None and saved.pending else None
        self.done = False

    def train(self, vocab: Vocab) -> dict[str, Any]:
        """Run all rounds that are still to do, choose on validation, test once."""
        config, federation = self.config, self.federation
        target = parse_target(config.train.until, "train.until")
        self.listen.start(f"{self.method.name} with the clients of this server", config.train.rounds, self.state.round)
        while self.state.round < config.train.rounds and not self.done:
            self._round()
            self.done = reached(read_metrics(self.out), target) is not None
        # Numbers that no round of this run, nor an earlier attempt, has: clients answer for each once.
        after = config.train.rounds + 2 * self.calls.run.attempt
        if self.pending is not None:  # the last model's validation: no training follows that would bring it along
            self._validated(
                self.state, federation.evaluate(self.state.params, "valid", self._everyone(), self.method, after)
            )
        self._flush()
        if self.state.round and all(r["abandoned"] for r in read_metrics(self.out)):
            raise RunError(f"no round of {self.out} was completed: nothing was learnt, and there is no model to test")
        best = self.best or Best(self.state.round, math.nan, self.state.params)
        self.listen.say(f"testing the model of round {best.round} on the clients' test text")
        params: Params = {name: best.params[name] for name in shapes(self.spec)}
        save_model(self.out, params, vocab)
        tested = federation.evaluate(params, "test", self._everyone(), self.method, after + 1)
        return self._result(params, vocab, best, score(tested))

    def _round(self) -> None:
        federation, method, config, state = self.federation, self.method, self.config, self.state
        began = time.monotonic()
        present = self._quorum()
        cohort = self._draw(present)
        moved = dict(self.calls.moved)
        federation.asks_evaluation = state.round > 0 and self._due(state.round)
        after, summary = run_round(method, state, cohort, federation, config.participation.minimum)
        counts, clients = federation.evaluated or (None, 0)
        if counts is not None and clients:
            self._validated(state, counts)
        self._flush()
        sizes = sizes_of(method, state.params)
        record = record_of(method, summary, sizes, None, {})
        record |= {
            "cohort": len(cohort),
            "present": len(present),
            "traffic": {
                "down": self.calls.moved["down"] - moved["down"],
                "up": self.calls.moved["up"] - moved["up"],
                "control": 0,
            },
            "seconds": time.monotonic() - began,
            "elapsed": time.monotonic() - self.started,
        }
        if federation.failed is not None:
            record["secure_failed"] = federation.failed
        for client, reason in self.calls.lost.items():
            detail = self.calls.details.get(client, "")
            self.listen.say(
                f"round {state.round + 1}: {client} is left out: {reason}" + (f" ({detail})" * bool(detail))
            )
        self.state = after
        self.pending = dict(strict(record))
        versions = {client: Version(round, "") for client, round in self.calls.counted.items()}
        seconds = time.monotonic() - self.started
        saved = Checkpoint(after, self.best, self.length, seconds, versions, self.pending)
        save_checkpoint(self.out / "checkpoint", saved)
        self.listen.round(record)

    def _quorum(self) -> Sequence[ClientId]:
        """Wait until enough clients can be called; return all who can."""
        needed = max(1, self.config.participation.minimum)
        if self.secure is not None:
            needed = max(needed, self.secure.floor)
        until = time.monotonic() + self.patience.quorum
        told = False
        while True:
            present = self.calls.greet()
            if len(present) >= needed:
                return present
            if not told:
                told = True
                why = "; ".join(f"{c}: {reason}" for c, reason in self.calls.lost.items())
                self.listen.say(f"{len(present)} clients are there, {needed} are needed; waiting {why}".rstrip())
            if time.monotonic() > until:
                raise RunError(
                    f"only {len(present)} of at least {needed} clients came within {self.patience.quorum:.0f} seconds; "
                    f"start more clients and go on with --resume (run folder {self.out})"
                )
            time.sleep(self.patience.look)

    def _draw(self, present: Sequence[ClientId]) -> list[ClientId]:
        p = self.config.participation
        if self.method.cohort == "all":
            return list(present)
        floor = 1 if self.secure is None else self.secure.floor
        wanted = min(max(floor, cohort_size(p, self.config.train.cohort, len(present))), len(present))
        drawn = draw(p, len(present), wanted, lambda k: k, self.config.train.seed, self.state.round)
        return [present[k] for k in drawn]

    def _everyone(self) -> Sequence[ClientId]:
        return self.calls.greet()

    def _due(self, round: int) -> bool:
        """Whether the model after this round is validated."""
        return round % self.config.train.eval_every == 0 or round == self.config.train.rounds

    def _validated(self, state: State, counts: Evaluated) -> None:
        found = score(counts)
        if not found.tokens:
            return
        if self.pending is not None and self.pending["round"] == state.round:
            self.pending["valid"] = found.summary()
        self.listen.say(f"validation after round {state.round}: perplexity {found.perplexity:.1f}")
        if self.best is None or found.mean_nats < self.best.nats or not math.isfinite(self.best.nats):
            self.best = Best(state.round, found.mean_nats, state.params)

    def _flush(self) -> None:
        """Write the line of the round before, whose validation is known now if it ever will be."""
        if self.pending is not None:
            self.length = append_line(self.metrics, self.pending)
            self.pending = None

    def part(self) -> None:
        """Say goodbye: clients delete what they kept of the run."""
        self.federation.part()

    def _result(self, params: Params, vocab: Vocab, best: Best, tested: Score) -> dict[str, Any]:
        records = read_metrics(self.out)
        return {
            "run": str(self.out),
            "method": self.method.name,
            "model": self.spec.name,
            "data": "the clients' own text",
            "parameters": parameter_count(self.spec),
            "vocabulary": len(vocab),
            "clients": len(self.calls.roster.names()),
            "cohort": max((r["cohort"] for r in records), default=0),
            "rounds": len(records),
            "seed": self.config.train.seed,
            "secure": self.secure is not None,
            "best_round": best.round,
            "test": tested.summary(),
            "unseen": None,
            "baselines": {},
            "traffic": {k: sum(r["traffic"][k] for r in records) for k in ("down", "up", "control")},
            "bytes_per_client": asdict(sizes_of(self.method, params)),
            "reached": reached(records, parse_target(self.config.train.until, "train.until")),
            "refused": sum(len(r["refused"]) for r in records),
            "lost": dict(Counter(reason for r in records for reason in r["lost"].values())),
            "abandoned": sum(r["abandoned"] for r in records),
            "tokens_trained": sum(r["worked"] for r in records),
            "seconds": time.monotonic() - self.started,
            "seconds_per_round": _median([r["seconds"] for r in records]),
        }


def score(counts: Evaluated) -> Score:
    """Return what clients counted as a score."""
    return Score(*counts)


def _median(numbers: Sequence[float]) -> float | None:
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2] if ordered else None
