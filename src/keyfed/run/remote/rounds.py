"""The rounds of a run with real clients: whom to call, what to write down, when to go on from where."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from keyfed.config.load import Config, parse_target
from keyfed.engine.client_state import Version
from keyfed.engine.network import Network, parameter_count, shapes
from keyfed.errors import RunError
from keyfed.federated.cohort import cohort_size, draw
from keyfed.federated.round import initial_state
from keyfed.federated.soundness import by_server, first_good, given_up, gone_back, judge_model, suspect
from keyfed.federated.types import ClientId, Method, Params, State
from keyfed.model.output import Score
from keyfed.private.secagg.accusation import Suspects
from keyfed.run.checkpoint import (
    Best,
    Checkpoint,
    Cohort,
    RoundOutcome,
    RunProgress,
    better,
    cost_of,
    good_in,
    load_checkpoint,
    round_of,
    save_checkpoint,
)
from keyfed.run.console import Listener, plural
from keyfed.run.folder import OWN_TEXT, append_line, read_metrics, save_model, strict
from keyfed.run.loop import rounds
from keyfed.run.metrics_line import (
    diverged_warning,
    early_end,
    halvings_of,
    judged_line,
    reached,
    record_of,
    sizes_of,
    soundness_counts,
    stopped_line,
    unsound_line,
)
from keyfed.run.plan import limits_of, watch_of
from keyfed.run.remote.counting import count_deployed, least_counting, too_few
from keyfed.run.secure import clamped_result
from keyfed.text.vocab import Vocab
from keyfed.wire.roster import Roster
from keyfed.wire.server import RemoteFederation
from keyfed.wire.transport import Calls, RemoteRun, Transport


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


class _Begun(NamedTuple):
    """A round as it began: when, how many clients were there, bytes moved and clients' states counted until then."""

    began: float
    present: int
    moved: dict[str, int]
    counted: dict[ClientId, int]


class RemoteRunLoop:
    """The rounds of one run with real clients: where it is, and what is still to be written down."""

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
        words: int,
        first: Params,
        start: Mapping[str, Any],
    ) -> None:
        self.config, self.out, self.spec, self.method = config, out, spec, method
        self.listen, self.patience, self.secure = listen, patience, run.secure
        self.start = start  # where the weights come from, for result.json
        self.metrics = out / "metrics.jsonl"
        logged = self.metrics.stat().st_size if self.metrics.exists() else 0
        saved = load_checkpoint(out / "checkpoint", logged, listen.say)
        kept: Params = {}
        self.length, before = 0, 0.0
        if saved is None:
            state = initial_state(method, first)
            self.run = RunProgress(method, state, config.train.rounds, first_good(state, words))
        else:
            params = {name: saved.state.params[name] for name in shapes(spec)}
            server, kept = self._apart(saved.state.server)
            state = replace(saved.state, params=params, server=server)
            good = good_in(saved, state, words)
            self.run = RunProgress(method, state, config.train.rounds, good, saved.best)
            self.length, before = saved.metrics_length, saved.seconds
            listen.say(f"resuming after round {state.round} of {config.train.rounds}")
        self.run.limits, self.run.watch = limits_of(config), watch_of(config, words)
        # An empty private cohort is released too: its noise is what hides that it was empty.
        self.run.minimum = 0 if config.privacy.on else config.participation.minimum
        if self.metrics.exists():
            os.truncate(self.metrics, self.length)
        counted = {client: version.round for client, version in (saved.clients if saved else {}).items()}
        suspects = Suspects.from_json(saved.suspects if saved is not None else {})
        self.calls = Calls(transport, roster, run, counted, suspects)
        self._shut_out, self._said_few, self._said_counting = suspects.shut_out(), False, False
        self.calls.good = dict(self.run.good.clients)
        self.federation = RemoteFederation(self.calls)
        self.started = time.monotonic() - before
        self.pending: dict[str, Any] | None = dict(saved.pending) if saved is not None and saved.pending else None
        self.done = False
        self._begin(kept)

    @property
    def _looks(self) -> bool:
        """Whether validation decides where the run goes on."""
        return self.run.watch is not None and not self.config.privacy.on

    @property
    def _by_server(self) -> bool:
        """Whether the round that made the present model was sound at its clients: then its server's step was not."""
        loss = None if self.pending is None else self.pending["loss"]
        return by_server(self.method, math.inf if loss is None else loss, self.run.good.uniform)

    def _apart(self, server: Params) -> tuple[Params, Params]:
        """Part what a checkpoint has under the server rule's state: the rule's own, and what a run keeps there."""
        return server, {}

    def _begin(self, kept: Params) -> None:
        """Go on from what `_kept` put into the checkpoint; empty at the start of a run."""

    def _kept(self) -> Params:
        """Return what must be in the checkpoint, whole with the model, beside what every run has."""
        return {}

    def train(self, vocab: Vocab) -> dict[str, Any]:
        """Run all rounds that are still to do, choose on validation, test once."""
        config = self.config
        self.listen.start(
            f"{self.method.name} with the clients of this server", config.train.rounds, self.run.state.round
        )
        self._rounds()
        if given_up(self.run.good, self.run.state):
            self.listen.say(stopped_line(self.run.good, self.run.state))
        params = self._chosen()
        save_model(self.out, params, vocab)
        result = self._result(params, vocab, self._tested(params))
        if self.config.counts.on:
            after = self._after() + 1  # the test's
            found = count_deployed(self.calls, self.config, self.spec, params, vocab, self.out, after, self.listen.say)
            result |= {} if found is None else {"counts": found}
        if (warning := diverged_warning(result)) is not None:
            self.listen.say(warning)
        return result

    def _rounds(self) -> None:
        for outcome in rounds(self.run, self.federation, self._cohort, self._judge):
            self._write(outcome)
            self.done = early_end(read_metrics(self.out), self.config.train, round_of(self.run.best)) is not None

    def _may_go_on(self) -> bool:
        """Whether another round may be begun."""
        return True

    def _after(self) -> int:
        """Return the number under which clients evaluate when all rounds are over."""
        # Numbers that no round of this run, nor an earlier attempt, has: clients answer for each once.
        return self.config.train.rounds + 2 * self.calls.run.attempt

    def _chosen(self) -> Params:
        """Return the model of the best validation.

        During the rounds clients score the θ that they train from. An average over rounds (`train.average`) is scored
        once, after the last round, so that no second model has to travel in every round.
        """
        if self.pending is not None:  # the last model's validation: no training follows that would bring it along
            model = self.run.state.served(self.method)
            served = None if model is self.run.state.params else model
            found = self.federation.evaluate(model, "valid", self._everyone(), self.method, self._after())
            if self._validated(self.run.state, found, self.federation.typical, self.calls.counted, served):
                self.run.state = gone_back(self.run.good, self.run.state)
        self._flush()
        if self.run.state.round and all(r["abandoned"] for r in read_metrics(self.out)):
            raise RunError(f"no round of {self.out} was completed: nothing was learnt, and there is no model to test")
        self.run.best = self.run.chosen()
        return {name: self.run.best.params[name] for name in shapes(self.spec)}

    def _tested(self, params: Params) -> Score:
        assert self.run.best is not None
        self.listen.say(f"testing the model of round {self.run.best.round} on the clients' test text")
        return self.federation.evaluate(params, "test", self._everyone(), self.method, self._after() + 1)

    def _cohort(self, state: State) -> Cohort | None:
        """Wait for enough clients and draw those of the next round; None where the run is over."""
        if self.done or not self._may_go_on():
            return None
        began, present = time.monotonic(), self._quorum()
        cohort = self._draw(present)
        self._begun = _Begun(began, len(present), dict(self.calls.moved), dict(self.calls.counted))
        self._prepare(state)
        return Cohort(cohort)

    def _judge(self, outcome: RoundOutcome) -> RoundOutcome:
        """Judge the model that the round began from, by what its clients counted; go back where that is bad."""
        run, federation, before, after = self.run, self.federation, outcome.before, outcome.state
        counts, clients = federation.evaluated or (None, 0)
        back = False
        if counts is not None and clients:
            back = self._validated(before, counts, federation.typical, self._begun.counted)
        if back and outcome.summary.diverged:  # from a model that was bad already: a step is halved for that alone
            after = replace(after, halvings=before.halvings, server_halvings=before.server_halvings)
        server = self._by_server
        suspected = False
        if self._looks and not back:
            run.good, suspected = suspect(run.good, after)
            back = suspected
        if back:  # what was trained in this round began at a model that had exploded
            after = gone_back(run.good, after, server=server, claimed=federation.typical is None and not suspected)
            self.calls.counted = dict(run.good.clients)
        self.calls.good = dict(run.good.clients)
        return replace(outcome, state=after, good=run.good, best=run.best, back=suspected)

    def _write(self, outcome: RoundOutcome) -> None:
        """Write the line of the round before, and a checkpoint in which this one's waits for its validation."""
        self._flush()
        federation, summary, before, after = self.federation, outcome.summary, outcome.before, outcome.state
        record = record_of(self.method, summary, sizes_of(self.method, before.params), None, {})
        moved = {way: self.calls.moved[way] - self._begun.moved[way] for way in ("down", "up")}
        record |= {
            "cohort": len(outcome.cohort.clients),
            "present": self._begun.present,
            "traffic": {**moved, "control": 0},
        }
        if federation.failed is not None:
            record["secure_failed"] = federation.failed
        for client in summary.shortened:
            self.listen.say(f"round {record['round']}: the upload of {client} is shortened (upload.limit)")
        self._tell_liars()
        if self._shut_out:
            record["shut_out"] = dict(self._shut_out)
        record |= {"seconds": time.monotonic() - self._begun.began, "elapsed": time.monotonic() - self.started}
        record = self._line(record, before)
        if outcome.back:
            record["rolled_back"] = outcome.good.state.round
        if (halvings := halvings_of(before, after)) is not None:
            record["halved"] = halvings
        if summary.unsound is not None:
            record["unsound"] = summary.unsound
            self.listen.say(unsound_line(summary, before, after, outcome.good))
        self._tell_lost()
        self.run.state = after
        self.pending = dict(strict(record))
        versions = {client: Version(round, "") for client, round in self.calls.counted.items()}
        seconds = time.monotonic() - self.started
        whole = replace(after, server={**after.server, **self._kept()})
        good = outcome.good if self._looks else None
        suspects = self.calls.suspects.to_json()
        saved = Checkpoint(whole, outcome.best, self.length, seconds, versions, self.pending, good, suspects=suspects)
        save_checkpoint(self.out / "checkpoint", saved)
        self.listen.round(record)

    def _prepare(self, state: State) -> None:
        """Make the federation ready for the round after a state."""
        self.federation.asks_evaluation = state.round > 0 and self._due(state.round)

    def _line(self, record: dict[str, Any], before: State) -> dict[str, Any]:
        """Return a round's line of metrics.jsonl."""
        del before
        return record

    def _tell_lost(self) -> None:
        for client, reason in self.calls.lost.items():
            detail = self.calls.details.get(client, "")
            self.listen.say(
                f"round {self.run.state.round + 1}: {client} is left out: {reason}" + (f" ({detail})" * bool(detail))
            )

    def _tell_liars(self) -> None:
        """Say who is shut out since the round before, and who is let in again."""
        before, now = self._shut_out, self.calls.suspects.shut_out()
        number = self.run.state.round + 1
        for client in sorted(set(now) - set(before)):
            self.listen.say(f"round {number}: {client} is shut out of this run: lied ({now[client]})")
        for client in sorted(set(before) - set(now)):
            self.listen.say(f"round {number}: {client} is let in again: other clients explain the spoilt sums")
        self._shut_out = now
        few = self.secure is not None and len(self.calls.keys) < 2 * self.secure.least_group
        if few and self.secure is not None and self.calls.suspects.sums_wanted() > 1 and not self._said_few:
            self._said_few = True
            self.listen.say(
                f"WARNING: a client spoils the secure sums. To find it a cohort is split into two groups of at least "
                f"{self.secure.least_group}; {len(self.calls.keys)} clients are too few: enrol more, or look for it "
                "yourself among the clients of the spoilt rounds"
            )

    def _quorum(self) -> Sequence[ClientId]:
        """Wait until enough clients can be called; return all who can."""
        needed = max(1, self.config.participation.minimum)
        if self.secure is not None:
            needed = max(needed, self.secure.floor)
        until = time.monotonic() + self.patience.quorum
        said = False
        while True:
            present = self.calls.greet()
            alone = set(present) - set(self.calls.able_to_hide(present) if self.secure is not None else present)
            if len(present) - len(alone) >= needed:
                self._tell_few_counting(present)
                return present
            if not said:
                said = True
                lost = {c: f"hides among {self.calls.hide_among[c]} or more" for c in sorted(alone)} | self.calls.lost
                why = "; ".join(f"{c}: {reason}" for c, reason in lost.items())
                there = f"{plural(len(present), 'client')} {'is' if len(present) == 1 else 'are'} there"
                self.listen.say(f"{there}, {needed} {'is' if needed == 1 else 'are'} needed; waiting {why}".rstrip())
            if time.monotonic() > until:
                raise RunError(
                    f"only {len(present)} of at least {needed} clients came within {self.patience.quorum:.0f} seconds; "
                    f"start more clients and go on with --resume (run folder {self.out})"
                )
            time.sleep(self.patience.look)

    def _tell_few_counting(self, present: Sequence[ClientId]) -> None:
        """Say before the first round that too few of the clients who are there will be counted."""
        counting, least = len(self.calls.counting & set(present)), least_counting(self.config)
        if self.config.counts.on and not self._said_counting and counting < least:
            self.listen.say(f"WARNING: {too_few(counting, least)}; without more of them this run has no counts")
        self._said_counting = True

    def _draw(self, present: Sequence[ClientId]) -> list[ClientId]:
        p = self.config.participation
        if self.method.cohort == "all":
            return list(present)
        groups = self.calls.suspects.sums_wanted()  # where a liar is to be found, enough are called for so many
        floor = 1 if self.secure is None else max(self.secure.floor, (groups > 1) * groups * self.secure.least_group)
        wanted = min(max(floor, cohort_size(p, self.config.train.cohort, len(present))), len(present))
        drawn = draw(p, len(present), wanted, lambda k: k, self.config.train.seed, self.run.state.round)
        return [present[k] for k in drawn]

    def _everyone(self) -> Sequence[ClientId]:
        return self.calls.greet()

    def _due(self, round: int) -> bool:
        """Whether the model after this round is validated."""
        return round % self.config.train.eval_every == 0 or round == self.config.train.rounds

    def _validated(
        self,
        state: State,
        found: Score,
        typical: float | None,
        clients: Mapping[ClientId, int],
        served: Params | None = None,
    ) -> bool:
        """Write down what clients counted with a model; return whether to go back to the last good one.

        Args:
          typical: nats per token of the median client, which one client's claim does not move; None where only sums
            are seen.
          clients: the rounds of the clients' states that count beside this model.
          served: the model that was scored, where it is not θ.
        """
        if not found.tokens:
            return False
        if self.pending is not None and self.pending["round"] == state.round:
            self.pending["valid"] = found.summary()
        self.listen.say(f"validation after round {state.round}: perplexity {found.perplexity:.1f}")
        nats = found.mean_nats if typical is None else typical
        averaged = self.config.train.average is not None
        # An average is not compared with the models that it is made of.
        if self.run.watch is not None and self._looks and served is None:
            self.run.good, back = judge_model(self.run.good, state, nats, self.run.watch.factor, clients)
            if back:
                if self.pending is not None and self.pending["round"] == state.round:
                    self.pending["rolled_back"] = self.run.good.state.round
                after = gone_back(self.run.good, state, server=self._by_server, claimed=typical is None)
                self.listen.say(judged_line(math.exp(min(nats, 700.0)), self.run.good, after))
                return True
        if averaged and served is None:
            return False  # what is exported is the average of the last round
        choose = self.config.train.choose
        cost = nats if choose == "perplexity" else cost_of(choose, found, state.round)
        self.run.best = better(self.run.best, Best(state.round, cost, state.params if served is None else served))
        return False

    def _flush(self) -> None:
        """Write the line of the round before, whose validation is known now if it ever will be."""
        if self.pending is not None:
            self.length = append_line(self.metrics, self.pending)
            self.pending = None

    def part(self) -> None:
        """Say goodbye: clients delete what they kept of the run."""
        self.federation.part()

    def _result(self, params: Params, vocab: Vocab, tested: Score) -> dict[str, Any]:
        records = read_metrics(self.out)
        times = [r["seconds"] for r in records if r["seconds"] is not None]
        assert self.run.best is not None
        return {
            "run": str(self.out),
            "method": self.method.name,
            "model": self.spec.name,
            "data": OWN_TEXT,
            "parameters": parameter_count(self.spec),
            "vocabulary": len(vocab),
            "clients": len(self.calls.roster.names()),
            "cohort": max((r["cohort"] for r in records), default=0),
            "rounds": len(records),
            "seed": self.config.train.seed,
            "start": dict(self.start),
            "secure": self.secure is not None,
            "clamped": clamped_result(records),
            "best_round": self.run.best.round,
            "test": tested.summary(),
            "unseen": None,
            "baselines": {},
            "traffic": {k: sum(r["traffic"][k] for r in records) for k in ("down", "up", "control")},
            "bytes_per_client": asdict(sizes_of(self.method, params)),
            "reached": reached(records, parse_target(self.config.train.until, "train.until")),
            "refused": sum(len(r["refused"] or ()) for r in records),
            "lost": dict(Counter(reason for r in records for reason in (r["lost"] or {}).values())),
            "abandoned": sum(r["abandoned"] for r in records),
            **soundness_counts(records),
            "tokens_trained": sum(r["worked"] or 0 for r in records),
            "seconds": time.monotonic() - self.started,
            "seconds_per_round": statistics.median_high(times) if times else None,
        }
