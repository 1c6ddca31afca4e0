"""Where a run is, and checkpoints of that which survive kill -9 and a full disk.

A checkpoint is two files, `round-000012.safetensors` and the manifest `round-000012.json`. Each is written under a
temporary name, fsynced and renamed; the manifest comes last, so a manifest means a whole checkpoint. It holds the
SHA-256 of the tensors and the length of metrics.jsonl at that moment. Loading walks back to the newest one whose sum
is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from keyfed.config.load import Config
from keyfed.engine.client_state import ClientStates, Version, check_versions, parse_tensors
from keyfed.engine.task import keeps_state
from keyfed.errors import RunError
from keyfed.federated.cohort import Fate, Plan
from keyfed.federated.round import RoundSummary
from keyfed.federated.soundness import Good, UploadLimits, Watch, first_good, same, uniform_nats
from keyfed.federated.types import ClientId, Method, Params, Seen, State
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.model.output import Score
from keyfed.run.folder import append_line
from keyfed.run.metrics_line import Sizes, cut_curves

KEEP = 3
_NAME = re.compile(r"round-(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class Best:
    """The model chosen so far.

    Attributes:
      cost: what it was chosen by, the least of all (`cost_of`); not finite where no validation was good.
    """

    round: int
    cost: float
    params: Params


def better(best: Best | None, other: Best) -> Best:
    """Return the later model if it costs less than the best so far, or none was good."""
    return other if best is None or other.cost < best.cost or not math.isfinite(best.cost) else best


def round_of(best: Best | None) -> int | None:
    """Return the round of a chosen model; None where none is chosen yet."""
    return None if best is None else best.round


def cost_of(choose: str, score: Score, round: int) -> float:
    """Return what a validated model is chosen by (`train.choose`): less is better.

    Example:
      >>> [cost_of(choose, Score(tokens=4, nats=8.0, top1=1), 7) for choose in ("perplexity", "accuracy", "last")]
      [2.0, -0.25, -7.0]
    """
    if choose == "last":
        return float(-round)
    return -score.top1 / score.tokens if choose == "accuracy" and score.tokens else score.mean_nats


@dataclass(frozen=True, slots=True)
class Cohort:
    """Who is called in a round.

    Attributes:
      fates: what becomes of simulated clients; who is not named trains and uploads.
      plan: how a simulated round was planned, and `sizes` what its clients move; None where nothing is modelled.
      method: that of this round, where it is not the run's.
    """

    clients: Sequence[ClientId]
    fates: Mapping[ClientId, Fate] = field(default_factory=dict)
    plan: Plan | None = None
    sizes: Sizes | None = None
    method: Method | None = None

    @property
    def lost(self) -> dict[ClientId, str]:
        """Clients whose upload never arrives, with the reason."""
        return {client: fate.lost for client, fate in self.fates.items() if fate.lost is not None}


@dataclass(slots=True)
class RunProgress:
    """Where a run is; `rounds` moves it on.

    Attributes:
      until: rounds of the whole run.
      good: the last good model (`federated.soundness`); `best` is the one chosen on validation so far.
      minimum: uploads below which a round is abandoned.
      limits: what one client may do at most; `watch` is how a round that diverged is noticed.
    """

    method: Method
    state: State
    until: int
    good: Good
    best: Best | None = None
    minimum: int = 0
    limits: UploadLimits | None = None
    watch: Watch | None = None

    def chosen(self) -> Best:
        """Return the model chosen on validation; that of the last round, where none was validated."""
        if self.best is not None:
            return self.best
        good, state = self.good.state, self.state
        number = good.round if same(state.params, good.params) else state.round
        return Best(number, math.nan, state.served(self.method))


@dataclass(slots=True)
class RoundOutcome:
    """A round that is over.

    Attributes:
      before: the state it began from; once the run has moved on it is `state`, so that no model outlives its round.
      state: the one that the run goes on from.
      seconds: of the round itself.
      good: the last good model now; `best` is the one chosen on validation.
      back: the run goes on from the last good model, not from what the round made.
      score: validation of what the round made; None where it was not validated.
    """

    before: State
    state: State
    summary: RoundSummary
    cohort: Cohort
    seconds: float
    good: Good
    best: Best | None
    back: bool = False
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on."""

    state: State
    best: Best | None
    metrics_length: int
    seconds: float
    clients: Mapping[ClientId, Version] = field(default_factory=dict)  # the states of clients that count
    pending: Mapping[str, Any] | None = None  # a round's line that waits for its validation
    good: Good | None = None  # the last good model; None in a run that never goes back
    good_clients: Mapping[ClientId, Version] = field(default_factory=dict)  # the states of clients that counted then
    suspects: Mapping[str, Any] = field(default_factory=dict)  # `accusation.Suspects`, as JSON


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and drop all but the last three."""
    folder.mkdir(parents=True, exist_ok=True)
    state, best = checkpoint.state, checkpoint.best
    tensors = {f"params/{n}": t for n, t in state.params.items()}
    tensors |= {f"server/{n}": t for n, t in state.server.items()}
    if best is not None:
        # A tensor may not occur twice in a file; the best model is often the current one.
        tensors |= {f"best/{n}": t.clone() for n, t in best.params.items()}
    good, kept = _good_tensors(checkpoint)
    tensors |= kept
    data = save({name: t.contiguous() for name, t in tensors.items()})
    name = f"round-{state.round:06d}"
    manifest: dict[str, Any] = {
        "round": state.round,
        "sha256": hashlib.sha256(data).hexdigest(),
        "metrics_length": checkpoint.metrics_length,
        "seconds": checkpoint.seconds,
        "mediator": state.mediator,
        "seen": asdict(state.seen),
        "eased": [state.halvings, state.server_halvings, state.failed],
        "best": None if best is None else {"round": best.round, "nats": best.cost},
        "clients": {client: asdict(version) for client, version in checkpoint.clients.items()},
        "pending": None if checkpoint.pending is None else dict(checkpoint.pending),
        "good": good,
    }
    if checkpoint.suspects:
        manifest["suspects"] = dict(checkpoint.suspects)
    manifest["seal"] = _seal(manifest)
    write_atomically(folder / f"{name}.safetensors", data)
    write_atomically(folder / f"{name}.json", json.dumps(manifest, indent=1).encode())
    for old in sorted(rounds_in(folder))[:-KEEP]:
        (folder / f"round-{old:06d}.json").unlink(missing_ok=True)
        (folder / f"round-{old:06d}.safetensors").unlink(missing_ok=True)


def _good_tensors(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, Params]:
    """Return what the manifest says of the last good model, and those of its tensors that are in no other part."""
    good, state, best = checkpoint.good, checkpoint.state, checkpoint.best
    if good is None:
        return None, {}
    tensors: Params = {}
    models = {"params/": state.params} | ({} if best is None else {"best/": best.params})
    params = next((where for where, model in models.items() if same(model, good.state.params)), "good/params/")
    if params == "good/params/":
        tensors |= {f"{params}{n}": t.clone() for n, t in good.state.params.items()}
    server = "server/" if same(state.server, good.state.server) else "good/server/"
    if server == "good/server/":
        tensors |= {f"{server}{n}": t.clone() for n, t in good.state.server.items()}
    told = {
        "round": good.state.round, "nats": good.nats, "returns": good.returns, "mediator": good.state.mediator,
        "seen": asdict(good.state.seen), "doubts": good.doubts,
        "lowest": good.lowest if math.isfinite(good.lowest) else None,
        "params": params, "server": server, "joined": dict(good.clients),
        "clients": {client: asdict(version) for client, version in checkpoint.good_clients.items()},
    }  # fmt: skip
    return told, tensors


def _seal(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything else in the manifest."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds that checkpoints in a folder stand after, in any order."""
    return [int(m[1]) for p in folder.glob("round-*.json") if (m := _NAME.fullmatch(p.name))]


def named_states(folder: Path) -> list[Mapping[ClientId, Version]]:
    """Return the clients' states that the checkpoints in a folder name; damaged checkpoints name none."""
    out: list[Mapping[ClientId, Version]] = []
    for number in rounds_in(folder):
        with contextlib.suppress(OSError, *BROKEN):
            manifest = read_json(folder / f"round-{number:06d}.json")
            out.append({client: Version(**version) for client, version in manifest["clients"].items()})
            good = manifest.get("good") or {}
            out.append({client: Version(**version) for client, version in good.get("clients", {}).items()})
    return out


def load_checkpoint(
    folder: Path, logged: int, warn: Callable[[str], None], clients: Path | None = None
) -> Checkpoint | None:
    """Return the newest whole checkpoint, saying which damaged ones were passed over; None if there never was one.

    Args:
      logged: bytes of metrics.jsonl; a checkpoint that knows of more cannot be gone on from.
      clients: folder of the clients' states; those that a checkpoint names must be whole.
    """
    rounds = sorted(rounds_in(folder), reverse=True)
    for number in rounds:
        try:
            found = read_checkpoint(folder, number)
            if found.metrics_length > logged:
                raise RunError(f"metrics.jsonl has {logged} bytes, {found.metrics_length} belong to it")
            if clients is not None:
                check_versions(clients, found.clients)
                check_versions(clients, found.good_clients)
            return found
        except (OSError, *BROKEN, RunError) as e:
            warn(f"checkpoint of round {number} is damaged ({e}); falling back to the one before")
    if rounds:
        raise RunError(f"{folder}: none of the {len(rounds)} checkpoints is whole; start again with another --out")
    return None


def read_checkpoint(folder: Path, number: int) -> Checkpoint:
    """Return the checkpoint after a round; OSError, RunError or one of `BROKEN` where it is not whole."""
    manifest: dict[str, Any] = read_json(folder / f"round-{number:06d}.json")
    data = (folder / f"round-{number:06d}.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise RunError("checksum does not match")
    if manifest["seal"] != _seal(manifest):
        raise RunError("the manifest was changed")
    tensors = parse_tensors(data)

    def part(prefix: str) -> Params:
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    best, good = manifest["best"], manifest.get("good")  # older checkpoints know of no good model
    pending = manifest.get("pending")
    if manifest["round"] != number or not isinstance(pending, dict | None):
        raise RunError("the manifest is not that of this round")
    parts = {prefix: part(prefix) for prefix in ("params/", "server/", "best/", "good/params/", "good/server/")}
    eased = [int(number) for number in manifest.get("eased", (0, 0, 0))]  # older checkpoints do not say
    return Checkpoint(
        state=State(parts["params/"], manifest["mediator"], parts["server/"], number, _seen_of(manifest), *eased),
        best=None if best is None else Best(int(best["round"]), float(best["nats"]), parts["best/"]),
        metrics_length=int(manifest["metrics_length"]),
        seconds=float(manifest["seconds"]),
        clients={client: Version(**version) for client, version in manifest.get("clients", {}).items()},
        pending=pending,
        good=None if good is None else _good_of(good, parts),
        good_clients={} if good is None else {c: Version(**version) for c, version in good["clients"].items()},
        suspects=dict(manifest.get("suspects", {})),
    )


def good_in(saved: Checkpoint, state: State, words: int, device: str = "cpu") -> Good:
    """Return the last good model of a checkpoint; that of an older one, which knows of none, is the one it is at.

    Args:
      state: that of the checkpoint, its tensors where the run computes (`device`).
      words: of the vocabulary.
    """
    found = saved.good
    if found is None:
        return replace(first_good(state, words), clients={client: v.round for client, v in saved.clients.items()})
    params, server = state.params, state.server
    if not same(found.state.params, saved.state.params):
        params = {name: found.state.params[name].to(device) for name in state.params}
    if not same(found.state.server, saved.state.server):
        server = {name: t.to(device) for name, t in found.state.server.items()}
    return replace(found, state=replace(found.state, params=params, server=server), uniform=uniform_nats(words))


def _good_of(told: Mapping[str, Any], parts: Mapping[str, Params]) -> Good:
    """Read the last good model; tensors that it shares with another part of the checkpoint are that part's."""
    params, server = parts[told["params"]], parts[told["server"]]
    state = State(params, told["mediator"], server, int(told["round"]), _seen_of(told))
    joined = {str(client): int(round) for client, round in told["joined"].items()}
    lowest = told.get("lowest")  # older checkpoints know of no doubts
    lowest = math.inf if lowest is None else float(lowest)
    return Good(
        state, float(told["nats"]), joined, int(told["returns"]), doubts=int(told.get("doubts", 0)), lowest=lowest
    )


def _seen_of(told: Mapping[str, Any]) -> Seen:
    """Read what the last rounds were like; older checkpoints do not say."""
    seen = told.get("seen") or {}
    return Seen(*(tuple(map(float, seen.get(key, ()))) for key in ("norms", "tokens")))


class RunLog:
    """What a simulated run writes as its rounds end: lines of metrics.jsonl, checkpoints, the states of clients.

    Args:
      keeps_good: whether the run may go back, and its checkpoints have the last good model.
    """

    def __init__(self, config: Config, out: Path, run: RunProgress, saved: Checkpoint | None, keeps_good: bool) -> None:
        self._config, self._out, self._run, self._keeps_good = config, out, run, keeps_good
        self._length = 0 if saved is None else saved.metrics_length
        self._written = run.state.round
        self._started = time.monotonic() - (0.0 if saved is None else saved.seconds)
        self._ended: tuple[RoundOutcome, dict[str, Any]] | None = None  # the last round that was trained, and its line
        self.states: ClientStates | None = None
        if keeps_state(run.method):
            self.states = ClientStates(out / "clients", saved.clients if saved else None)
            self.states.keep_good(run.good.clients)
        self._cut()  # lines written after the last checkpoint will be written again
        if config.train.curves:
            cut_curves(out, run.state.round)

    def seconds(self) -> float:
        """Seconds that the run has taken, before it was resumed too."""
        return time.monotonic() - self._started

    def write(self, outcome: RoundOutcome, record: dict[str, Any], *, last: bool) -> None:
        """Write the line of a round and move the run on; save it where a checkpoint is due, or no round follows."""
        record["elapsed"] = self.seconds()
        self._ended = outcome, record
        self._append(outcome, record)
        self._settle_clients(outcome)
        number = outcome.state.round
        if last or number == self._run.until or number % self._config.train.checkpoint_every == 0:
            self._save(record["elapsed"])

    def save_new(self) -> None:
        """Save the run unless the last checkpoint has all its rounds."""
        if self._run.state.round > self._written:
            self._save(self.seconds())

    def stopped(self) -> None:
        """Save what is whole of a run that is stopped."""
        if self._ended is not None:
            outcome, record = self._ended
            if outcome.state.round > self._run.state.round:  # stopped while its line was written: it is done
                self._cut()
                self._append(outcome, record)
            if outcome.state is self._run.state:
                self._settle_clients(outcome)
        # Clients that were acknowledged in a round which is not in the state yet would be ahead of the server: then
        # the last checkpoint, whose files are all there, is what to go on from.
        states, number = self.states, self._run.state.round
        if states is None or not any(r >= number for r in states.rounds.values()):
            self.save_new()

    def _cut(self) -> None:
        metrics = self._out / "metrics.jsonl"
        if metrics.exists():
            os.truncate(metrics, self._length)

    def _append(self, outcome: RoundOutcome, record: Mapping[str, Any]) -> None:
        run = self._run  # in one statement: a line counts when the run has moved on, and the other way round
        run.state, run.good, run.best, self._length = (
            outcome.state, outcome.good, outcome.best, append_line(self._out / "metrics.jsonl", record),
        )  # fmt: skip

    def _settle_clients(self, outcome: RoundOutcome) -> None:
        """Keep the clients' states of the last good model; let them count again where the run has gone back to it."""
        if self.states is None:
            return
        if outcome.back:
            self.states.go_back(outcome.good.clients)
        self.states.keep_good(outcome.good.clients)

    def _save(self, seconds: float) -> None:
        run, states, folder = self._run, self.states, self._out / "checkpoint"
        counted = {} if states is None else states.versions()
        kept = {} if states is None else states.versions(run.good.clients)
        good = run.good if self._keeps_good else None
        save_checkpoint(
            folder, Checkpoint(run.state, run.best, self._length, seconds, counted, good=good, good_clients=kept)
        )
        if states is not None:
            states.hold(named_states(folder))
        self._written = run.state.round
