"""Training a run from its configuration to its result: prepare, rounds, checkpoints, choice on validation, test."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config, PrivacyConfig, Value, check, method_spec
from keyfed.engine.client_state import ClientStates
from keyfed.engine.module import MakeModule
from keyfed.engine.network import parameter_count, shapes
from keyfed.engine.ranks import Ranks
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.soundness import (
    Good,
    Watch,
    by_server,
    first_good,
    given_up,
    gone_back,
    judge_model,
    suspect,
)
from keyfed.federated.types import Federation, Method, Params, SimulatedFederation, State
from keyfed.files import write_atomically
from keyfed.model.output import Score
from keyfed.private.dp.ledger import Terms
from keyfed.private.dp.private_method import PrivateMethod
from keyfed.run.checkpoint import (
    Best,
    Checkpoint,
    Cohort,
    RoundOutcome,
    RunLog,
    RunProgress,
    better,
    cost_of,
    good_in,
    load_checkpoint,
    round_of,
)
from keyfed.run.console import Listener, Silent, within
from keyfed.run.evaluate import limit_streams, validator
from keyfed.run.folder import (
    as_before,
    extended,
    made_by,
    note_extension,
    open_folder,
    read_metrics,
    read_result,
    read_run_toml,
    refuse_changes,
    strict,
    write_run_toml,
)
from keyfed.run.metrics_line import (
    CURVES_LINE,
    append_curves,
    diverged_warning,
    early_end,
    halvings_of,
    judge_attention,
    judged_line,
    record_of,
    stopped_line,
    unsound_line,
)
from keyfed.run.pilot import Settled, as_it_began, settle, with_more_rounds
from keyfed.run.plan import (
    Choice,
    cautions,
    extension_line,
    limits_of,
    members_of,
    names,
    over_rounds,
    plan,
    plan_of_round,
    watch_of,
)
from keyfed.run.prepare import FROZEN, POOLED, Prepared, client_tokens, frozen_line, make_problem, refuse_frozen
from keyfed.run.privacy import PrivateRun, make_private, public_record, public_result, refuse_start
from keyfed.run.ranks import among, federate, follow, lead, together
from keyfed.run.result import finish
from keyfed.run.secure import secure_record, sizes_in
from keyfed.run.start import (
    Start,
    find_source,
    initial_params,
    make_ready,
    refuse_other_start,
    start_lines,
    validate_start,
)
from keyfed.system import place, usable_cores


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
    offered: bool = False,
) -> dict[str, Any]:
    """Train a run in folder `out` and return its result (also in out/result.json).

    Under `torchrun` every rank calls this; rank 0 owns the folder and listens, the others help and return its result.

    Args:
      resume: go on with the run in `out` from its last whole checkpoint; a finished run only returns its result,
        unless `config.train.rounds` is more than it has, which extends it.
      prepared: the corpus, if it was prepared with this configuration already.
      budget: tokens of a round of central training, see `make_problem`.
      module: makes the model, in place of the configuration's preset.
      method: a method from outside the package, in place of the configuration's.
      offered: the run asks for no start, and takes the base model where that fits.

    Raises:
      KeyfedError: anything the caller can mend; nothing that was checkpointed is lost.
      KeyboardInterrupt: after the last finished round has been written.
    """
    given = (config, out, resume, listener or Silent(), prepared, budget, module, method, offered)
    if (where := place()).world == 1:
        return _train(*given, None)
    return together(where, lambda r: follow(r, module, method) if where.rank else _train(*given, r))


@dataclass(slots=True)
class _Planned:
    """A run before its first round: all that its steps need.

    Attributes:
      begun: what it starts from, for its result.
      private: its private method and terms; None without --dp.
      budget: tokens of a round of central training.
    """

    out: Path
    listen: Listener
    ranks: Ranks | None
    settled: Settled
    config: Config
    prepared: Prepared
    method: Method
    choice: Choice
    members: int
    start: Start
    begun: dict[str, Any]
    private: tuple[PrivateMethod, Terms] | None
    budget: int | None

    @property
    def world(self) -> int:
        """Ranks that train together."""
        return self.ranks.world if self.ranks else 1


def _train(
    config: Config,
    out: Path,
    resume: bool,
    listen: Listener,
    prepared: Prepared | None,
    budget: int | None,
    module: MakeModule | None,
    method: Method | None,
    offered: bool,
    ranks: Ranks | None,
) -> dict[str, Any]:
    """Train a run in this process, the followers of `ranks` helping."""
    config = check(config)
    with open_folder(out, resume):
        going, begun_with = resume and (out / "run.toml").exists(), config
        if going:
            config, begun_with = extended(out, as_it_began(config, out, offered=offered))
        carried = find_source(config) is not None  # said before a corpus is read, if it is no run
        settled = settle(
            config, out, resume=resume, listen=listen, carried=carried, prepared=prepared, module=module, own=method,
            ranks=ranks, offered=offered,
        )  # fmt: skip
        run = _planned(out, listen, ranks, settled, method, budget)
        outside, fingerprint = names(run.prepared.spec, run.method), run.prepared.corpus.fingerprint()
        if not going:
            made = made_by(run.choice, fingerprint, run.world) | outside
            write_run_toml(out, run.config, made | run.start.made() | settled.made())
        elif (finished := _go_on(run, begun_with, refuse_changes(out, begun_with, fingerprint, outside))) is not None:
            return finished
        result = dict(strict(_trained(run)))
        write_atomically(out / "result.json", json.dumps(result, indent=1, allow_nan=False).encode())
        return result


def _planned(
    out: Path, listen: Listener, ranks: Ranks | None, settled: Settled, own: Method | None, budget: int | None
) -> _Planned:
    """Plan a settled run; what it cannot do is refused."""
    config, prepared = settled.config, settled.prepared
    source = find_source(config)
    method, choice = plan(config, prepared, own)
    refuse_frozen(config, prepared.spec, method)
    members = members_of(method, prepared, config)
    refuse_start(config, source)
    private = make_private(config, method, len(prepared.store), members)
    if private is not None:
        method = private[0].method
    if ranks is not None:
        choice = among(ranks.world, config, method, choice)
    start, begun = make_ready(config, prepared, source, listen.say)
    if settled.why_not and source is None:
        begun["why"] = settled.why_not
    return _Planned(
        out, listen, ranks, settled, config, prepared, method, choice, members, start, begun, private, budget
    )


def _go_on(run: _Planned, begun_with: Config, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make a run ready that goes on; return its result if it is finished.

    Args:
      begun_with: its configuration so far, without the rounds that extend it.
      made: how it was made, as run.toml says.
    """
    refuse_other_start(run.out, made, run.start)
    run.choice = as_before(made, run.choice, run.listen.say, run.world)
    has, rounds = begun_with.train.rounds, run.config.train.rounds
    if rounds > has:
        earlier = run.method if run.method.spec is None else build_method(method_spec(begun_with))
        run.listen.say(extension_line(run.config, run.method, has, earlier))
        made = with_more_rounds(made, rounds, has)
        run.settled = replace(run.settled, before=made)
        note_extension(run.out, run.config, made, has)
    finished = read_result(run.out)
    if finished is not None:
        run.listen.say(f"{run.out} is finished; nothing to do")
    return finished


def _announce(run: _Planned) -> None:
    """Say what is trained, on what, from what."""
    config, prepared = run.config, run.prepared
    for line in (
        *prepared.describe(private=run.private is not None),
        *start_lines(run.begun),
        frozen_line(config, prepared.spec),
        f"model {prepared.spec.name}: {parameter_count(prepared.spec):,} parameters; {run.choice.reason}",
        *over_rounds(config),
        *cautions(config, run.method, run.members, len(prepared.store)),
        CURVES_LINE if config.train.curves else None,
    ):
        if line:
            run.listen.say(line)


def _trained(run: _Planned) -> dict[str, Any]:
    """Train the rounds of a run, test its model, and train what it is compared with; return its result."""
    config, out, prepared, method, listen = run.config, run.out, run.prepared, run.method, run.listen
    _announce(run)
    count = parameter_count(prepared.spec)
    guard = None if run.private is None else PrivateRun(config, run.private[0], out, run.private[1])
    if guard is not None:
        for line in guard.announce(count):
            listen.say(line)
    if run.ranks is not None:
        lead(run.ranks, config, out, method, run.choice, prepared.corpus.fingerprint())
    best, seconds = _Rounds(run, guard).train()
    result = finish(config, out, prepared, method, run.choice, best, seconds, run.begun, listen)
    result["recipe"] = run.settled.about()
    if config.train.eval_start:
        result["start"]["valid"] = validate_start(config, prepared, run.start, run.choice.device)
    if (warning := diverged_warning(result)) is not None:
        listen.say(warning)
    if guard is not None:
        result = public_result(result)
        result["privacy"] = {**guard.account(count), "perplexity": result["test"]["perplexity"]}
        if config.privacy.twin:
            listen.say("now the same rounds without clip and noise, to compare with (privacy.twin)")
            result["privacy"]["twin"] = _compared(config, out / "noiseless", prepared, listen, result["rounds"])
    if config.train.central and method.cohort != "pooled":
        options = run.settled.central_options()
        result["baselines"]["central"] = _central(config, out, prepared, listen, result, options)
    return result


def _central(
    config: Config,
    out: Path,
    prepared: Prepared,
    listen: Listener,
    federated: Mapping[str, Any],
    options: Mapping[str, Value],
) -> dict[str, Any]:
    """Train the same model on the pooled text with as many tokens, as a run of its own in this one's folder.

    Args:
      options: of the method `central`. The federation's own are not taken: a step size that suits ten averaged clients
        is too large for one. A central run that has begun goes on with the options it has.
    """
    if (out / "central" / "run.toml").exists():
        options = read_run_toml(out / "central")[0].options
    budget = max(1, round(federated["tokens_trained"] / max(1, federated["rounds"])))
    listen.say("now the same model on the pooled text, to compare with (train.central)")
    central = Config(config.data, config.model, config.train, method="central", options=options)
    return _compared(central, out / "central", prepared, listen, federated["rounds"], budget)


def _compared(
    config: Config, out: Path, prepared: Prepared, listen: Listener, rounds: int, budget: int | None = None
) -> dict[str, Any]:
    """Train what a run is compared with, as a run of its own in its folder."""
    settings = replace(config.train, central=False, baselines=False, until=None, patience=None, rounds=rounds)
    other = replace(config, train=settings, privacy=PrivacyConfig())
    result = _train(other, out, True, listen, prepared, budget, None, None, False, None)
    return {key: result[key] for key in ("test", "unseen", "seconds")}


def rounds(
    run: RunProgress,
    federation: Federation,
    cohorts: Callable[[State], Cohort | None],
    judge: Callable[[RoundOutcome], RoundOutcome] | None = None,
) -> Iterator[RoundOutcome]:
    """Run the rounds that are still to do, and yield each: whatever trains in rounds does it here.

    A run moves on when the next round is wanted, or when the caller has moved it itself.

    Args:
      cohorts: says who is called after a state, having made the federation ready; None ends the run.
      judge: says which model a round goes on from and which is best; None takes every round's own.
    """
    while run.state.round < run.until and not given_up(run.good, run.state):
        cohort = cohorts(run.state)
        if cohort is None:
            return
        federation.expect(cohort.fates)
        before, method, began = run.state, cohort.method or run.method, time.monotonic()
        after, summary = run_round(method, before, cohort.clients, federation, run.minimum, run.limits, run.watch)
        outcome = RoundOutcome(before, after, summary, cohort, time.monotonic() - began, run.good, run.best)
        if judge is not None:
            outcome = judge(outcome)
        yield outcome
        run.state, run.good, run.best = outcome.state, outcome.good, outcome.best
        outcome.before = outcome.state  # callers keep the outcome until the next one: the model before must not stay
        del before, after


def run_rounds(
    method: Method, state: State, until: int, federation: Federation, cohorts: Callable[[State], Cohort | None]
) -> State:
    """Return the state after all rounds of a run that neither validates nor goes back."""
    run = RunProgress(method, state, until, Good(state, math.inf))
    for _ in rounds(run, federation, cohorts):
        pass
    return run.state


def simulated_cohorts(
    config: Config,
    prepared: Prepared,
    method: Method,
    federation: SimulatedFederation,
    params: Params,
    guard: PrivateRun | None,
) -> Callable[[State], Cohort]:
    """Return who is called after a state of a simulated run, by its configuration; a private round is made ready.

    Args:
      params: tensors like θ.
      guard: the mechanism of a private run.
    """
    members, names, tokens = members_of(method, prepared, config), prepared.store.names, client_tokens(prepared)
    whole, partly = (sizes_in(config, method, params, members, frozen) for frozen in (frozenset[str](), FROZEN))

    def cohort(state: State) -> Cohort:
        frozen, sizes = (FROZEN, partly) if state.round < config.train.frozen_rounds else (frozenset[str](), whole)
        if method.cohort == "pooled":
            return Cohort([POOLED], sizes=sizes)
        scheduled = None if guard is None else guard.in_turn(names)
        attempt = 0 if guard is None else guard.attempt(state.round)
        plan = plan_of_round(config, method, prepared, state.round, tokens, sizes.down, sizes.up, scheduled, attempt)
        fates = {names[fate.client]: fate for fate in plan.fates}
        if guard is not None:
            federation.gather_by(*guard.gather(state, frozen, fates))
        return Cohort(list(fates), fates, plan, sizes)

    return cohort


def judged(
    outcome: RoundOutcome,
    method: Method,
    watch: Watch | None,
    look: Callable[[State, Good], Score | None],
    states: ClientStates | None,
    choose: str = "perplexity",
) -> RoundOutcome:
    """Return a round with the model that its run goes on from, and the best one so far.

    Args:
      watch: when a run goes back; None for one that never does.
      look: validates the model of a state; None where no validation is due.
      states: of clients that keep any.
      choose: what the best model is chosen by (`cost_of`).
    """
    after, good, best = outcome.state, outcome.good, outcome.best
    found, back = (good, False) if watch is None else suspect(good, after)
    score = look(after, found)
    if score is None:
        if back:
            after = gone_back(found, after, server=method.solver.still)
        return replace(outcome, state=after, good=found, back=back)
    if watch is not None and not back and score.tokens:
        counting = {} if states is None else states.rounds
        found, back = judge_model(good, after, score.mean_nats, watch.factor, counting)
    if back:
        after = gone_back(found, after, server=by_server(method, outcome.summary.loss, found.uniform))
    else:
        best = better(best, Best(after.round, cost_of(choose, score, after.round), after.served(method)))
    return replace(outcome, state=after, good=found, best=best, back=back, score=score)


def _begun(
    config: Config, prepared: Prepared, method: Method, start: Start, saved: Checkpoint | None, home: str
) -> RunProgress:
    """Return where a run begins, or goes on from its checkpoint.

    Args:
      home: the device on which θ lives.
    """
    words = len(prepared.vocab)
    if saved is None:
        state = initial_state(method, _moved(initial_params(config, prepared, start), home))
        return RunProgress(method, state, config.train.rounds, first_good(state, words))
    # Layers in the model's own order: sums over layers must round alike before and after a resume.
    params = _moved({name: saved.state.params[name] for name in shapes(prepared.spec)}, home)
    state = replace(saved.state, params=params, server=_moved(saved.state.server, home))
    return RunProgress(method, state, config.train.rounds, good_in(saved, state, words, home), saved.best)


class _Rounds:
    """The rounds of a simulated run: who is called, what is validated, when it ends."""

    def __init__(self, planned: _Planned, guard: PrivateRun | None) -> None:
        """Go on from the last whole checkpoint, or begin."""
        self.planned, self.guard = planned, guard
        config, out, prepared, method = planned.config, planned.out, planned.prepared, planned.method
        metrics = out / "metrics.jsonl"
        logged = metrics.stat().st_size if metrics.exists() else 0
        saved = load_checkpoint(out / "checkpoint", logged, planned.listen.say, out / "clients")
        # Where θ lives: ranks add up their sums in main memory.
        home = planned.choice.device if planned.ranks is None else "cpu"
        run = self.run = _begun(config, prepared, method, planned.start, saved, home)
        if saved is not None:
            planned.listen.say(f"resuming after round {run.state.round} of {config.train.rounds}")
        run.watch, run.minimum = watch_of(config, len(prepared.vocab)), 1
        if method.cohort != "pooled":
            run.limits, run.minimum = limits_of(config), config.participation.minimum
        if guard is not None:
            run.minimum = 0  # an empty cohort is released too: its noise is what hides that it was empty
        # A private run's validation is not noised: it must not decide.
        self.watch = run.watch if guard is None else None
        self.log = RunLog(config, out, run, saved, keeps_good=self.watch is not None)
        self.valid = limit_streams(prepared.valid, config.train.valid_tokens)
        if guard is not None:
            guard.check(read_metrics(out))
        self.ending = early_end(read_metrics(out), config.train, round_of(run.best))  # why its rounds are over, or None
        self.spent = guard is not None and not guard.allows()

    def next_cohort(self, state: State, cohorts: Callable[[State], Cohort]) -> Cohort | None:
        """Return who is called after a state; None ends the run."""
        if self.ending or self.spent:
            return None
        cohort = cohorts(state)
        if self.guard is not None and not self.guard.affords():  # not known before its clients were drawn
            self.spent = True
            self.log.save_new()
            return None
        torch.set_num_threads(self.planned.choice.threads)
        return cohort

    def look(self, state: State, good: Good) -> Score | None:
        """Validate the model of a state, if that is due."""
        run, t = self.planned, self.planned.config.train
        torch.set_num_threads(usable_cores())
        self.spent = self.guard is not None and not self.guard.allows()
        last = state.round == t.rounds or self.spent or given_up(good, state)
        if not last and state.round % t.eval_every:
            return None
        within(run.listen, "validating")
        validate = validator(run.config.data.batching)
        return validate(run.prepared.spec, state.served(run.method), self.valid, run.choice.device)

    def train(self) -> tuple[Best, float]:
        """Run all rounds that are still to do; return the model chosen on validation and the seconds spent."""
        planned, run, log = self.planned, self.run, self.log
        config, prepared, method, listen = planned.config, planned.prepared, planned.method, planned.listen
        threads, said, choice, by = torch.get_num_threads(), set[str](), planned.choice, config.train.choose
        listen.start(f"{method.name} on {prepared.corpus.name}", config.train.rounds, run.state.round)
        problem = make_problem(prepared, config, method, choice.device, planned.budget)
        with federate(config, problem, choice, log.states, planned.ranks, listen) as federation:
            cohorts = simulated_cohorts(config, prepared, method, federation, run.state.params, self.guard)
            judge = partial(judged, method=method, watch=self.watch, look=self.look, states=log.states, choose=by)
            try:
                for outcome in rounds(run, federation, partial(self.next_cohort, cohorts=cohorts), judge):
                    record = _record(outcome, method, federation, self.guard)
                    if method.distance is not None and self.guard is None:
                        _say_once(judge_attention(outcome.summary), said, listen)
                    for line in _remarks(outcome, federation.secure):
                        listen.say(line)
                    self.ending = early_end([record], config.train, round_of(outcome.best))
                    if config.train.curves:
                        append_curves(planned.out, outcome.state.round, federation.curves)
                    last = bool(self.ending) or self.spent or given_up(outcome.good, outcome.state)
                    log.write(outcome, record, last=last)
                    listen.round(record)
            except KeyboardInterrupt:
                within(listen, "stopping, with a checkpoint")
                log.stopped()
                raise
            finally:
                torch.set_num_threads(threads)
        for line in self.endings():
            listen.say(line)
        return run.chosen(), log.seconds()

    def endings(self) -> Iterator[str]:
        """Say why the run ended, if not by its rounds."""
        run, t = self.run, self.planned.config.train
        if given_up(run.good, run.state):
            yield stopped_line(run.good, run.state)
        if self.ending:
            yield self.ending
        if self.spent and run.state.round < t.rounds:
            yield f"the privacy budget is spent after round {run.state.round}: another would exceed it"


def _record(
    outcome: RoundOutcome, method: Method, federation: SimulatedFederation, guard: PrivateRun | None
) -> dict[str, Any]:
    """Return a round's line of metrics.jsonl."""
    summary, sizes = outcome.summary, outcome.cohort.sizes
    assert sizes is not None, "simulated clients move so many bytes"
    record = record_of(method, summary, sizes, outcome.cohort.plan, outcome.cohort.lost)
    if federation.secure is not None:
        record = secure_record(record, federation.secure, summary.saturated)
    if federation.compression_error is not None:
        record["compression_error"] = federation.compression_error
    if guard is not None:
        record = {**public_record(record, guard, sizes), "privacy": guard.told(outcome.before)}
    if summary.unsound is not None:
        record["unsound"] = summary.unsound
    record["seconds"] = outcome.seconds
    if outcome.score is not None:
        record["valid"] = outcome.score.summary()
    if outcome.back:
        record["rolled_back"] = outcome.good.state.round
    if (halvings := halvings_of(outcome.before, outcome.state)) is not None:
        record["halved"] = halvings
    return record


def _say_once(remark: tuple[str, str] | None, said: set[str], listen: Listener) -> None:
    """Say a remark whose kind was not said before."""
    if remark is not None and remark[0] not in said:
        said.add(remark[0])
        listen.say(remark[1])


def _remarks(outcome: RoundOutcome, secure: Mapping[str, Any] | None) -> list[str]:
    """Say what went wrong in a round.

    Args:
      secure: what the round's secure sum cost; None for a plain one.
    """
    summary, lines = outcome.summary, list[str]()
    if secure is not None and secure["failed"] is not None:
        lines.append(f"round {summary.round + 1} is abandoned: {secure['failed']}")
    if summary.unsound is not None:
        lines.append(unsound_line(summary, outcome.before, outcome.state, outcome.good))
    elif outcome.back and outcome.score is not None:
        lines.append(judged_line(outcome.score.perplexity, outcome.good, outcome.state))
    return lines


def _moved(params: Params, device: str) -> Params:
    return {name: p.to(device) for name, p in params.items()}
