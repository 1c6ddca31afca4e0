"""Training a run from its configuration to its result: prepare, rounds, checkpoints, choice on validation, test."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from keyfed.config.load import Config, PrivacyConfig, Value, check, method_spec, parse_target
from keyfed.engine.client_state import ClientStates
from keyfed.engine.launch import place
from keyfed.engine.network import parameter_count, shapes
from keyfed.engine.ranks import Ranks
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import keeps_state
from keyfed.engine.trial import MakeModule
from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.soundness import Good, by_server, first_good, given_up, gone_back, judge_model, same, suspect
from keyfed.federated.types import Method, Params, State
from keyfed.files import write_atomically
from keyfed.run.checkpoint import Best, Checkpoint, good_in, load_checkpoint, named_states, save_checkpoint
from keyfed.run.choose import Choice, usable_cores
from keyfed.run.curves import LINE, append_curves, cut_curves
from keyfed.run.custom import names
from keyfed.run.evaluate import limit_streams, validator
from keyfed.run.folder import (
    append_line,
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
    diverged_warning,
    halvings_of,
    judge_attention,
    judged_line,
    reached,
    record_of,
    stopped_line,
    unsound_line,
)
from keyfed.run.plan import (
    cautions,
    extension_line,
    limits_of,
    members_of,
    over_rounds,
    plan,
    plan_of_round,
    watch_of,
)
from keyfed.run.prepare import POOLED, Prepared, client_tokens, make_problem
from keyfed.run.privacy import PrivateRun, public_record, public_result, refuse_start
from keyfed.run.privacy_terms import make_private
from keyfed.run.ranks import among, federate, follow, lead, together
from keyfed.run.recipe.pilot import as_it_began, settle, with_more_rounds
from keyfed.run.result import finish
from keyfed.run.secure import secure_record, sizes_in
from keyfed.run.start.freeze import FROZEN, frozen_line, refuse_frozen
from keyfed.run.start.weights import Start, find_source, initial_params, make_ready, refuse_other_start, start_lines


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
    where = place()
    if where.world == 1:
        return _train(*given, None)
    return together(where, lambda r: follow(r, module, method) if where.rank else _train(*given, r))


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
        going = resume and (out / "run.toml").exists()
        if going:
            config = as_it_began(config, out, offered=offered)
        config, begun_with = extended(out, config) if going else (config, config)
        source = find_source(config)  # said before a corpus is read, if it is no run
        settled = settle(
            config, out, resume=resume, listen=listen, carried=source is not None, prepared=prepared, module=module,
            own=method, ranks=ranks, offered=offered,
        )  # fmt: skip
        config, prepared = settled.config, settled.prepared
        source = find_source(config)
        method, choice = plan(config, prepared, method)
        refuse_frozen(config, prepared.spec, method)
        members = members_of(method, prepared, config)
        refuse_start(config, source)
        private = make_private(config, method, len(prepared.store), members)
        if private is not None:
            method = private[0].method
        if ranks is not None:
            if private is not None:
                raise ConfigError(f"--dp forms one sum in one process; start it in one, not {ranks.world}")
            choice = among(ranks.world, config, method, choice)
        start, begun = make_ready(config, prepared, source, listen.say)
        if settled.why_not and source is None:
            begun["why"] = settled.why_not
        fingerprint, outside = prepared.corpus.fingerprint(), names(prepared.spec, method)
        if resume and (out / "run.toml").exists():
            made = refuse_changes(out, begun_with, fingerprint, outside)
            refuse_other_start(out, made, start)
            choice = as_before(made, choice, listen.say, ranks.world if ranks else 1)
            has = begun_with.train.rounds
            if config.train.rounds > has:
                earlier = method if method.spec is None else build_method(method_spec(begun_with))
                listen.say(extension_line(config, method, has, earlier))
                made = with_more_rounds(made, config.train.rounds, has)
                settled = replace(settled, before=made)
                note_extension(out, config, made, has)
            finished = read_result(out)
            if finished is not None:
                listen.say(f"{out} is finished; nothing to do")
                return finished
        else:
            made = made_by(choice, fingerprint, ranks.world if ranks else 1) | outside
            write_run_toml(out, config, made | start.made() | settled.made())
        about = prepared.describe(private=private is not None)
        for line in (*about, *start_lines(begun), frozen_line(config, prepared.spec)):
            if line:
                listen.say(line)
        count = parameter_count(prepared.spec)
        listen.say(f"model {prepared.spec.name}: {count:,} parameters; {choice.reason}")
        for line in (*over_rounds(config), *cautions(config, method, members, len(prepared.store))):
            listen.say(line)
        if config.train.curves:
            listen.say(LINE)
        guard = None if private is None else PrivateRun(config, private[0], out, private[1])
        if guard is not None:
            for line in guard.announce(count):
                listen.say(line)
        if ranks is not None:
            lead(ranks, config, out, method, choice, fingerprint)
        best, seconds = _rounds(config, out, prepared, method, choice, listen, budget, ranks, start, guard)
        result = finish(config, out, prepared, method, choice, best, seconds, begun, listen)
        result["recipe"] = settled.about()
        if (warning := diverged_warning(result)) is not None:
            listen.say(warning)
        if guard is not None:
            result = public_result(result)
            result["privacy"] = {**guard.account(count), "perplexity": result["test"]["perplexity"]}
            if config.privacy.twin:
                result["privacy"]["twin"] = _twin(config, out, prepared, listen, result["rounds"])
        if config.train.central and method.cohort != "pooled":
            result["baselines"]["central"] = _central(config, out, prepared, listen, result, settled.central_options())
        result = dict(strict(result))
        write_atomically(out / "result.json", json.dumps(result, indent=1, allow_nan=False).encode())
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
    rounds = federated["rounds"]
    budget = max(1, round(federated["tokens_trained"] / max(1, rounds)))
    settings = replace(config.train, central=False, baselines=False, until=None, rounds=rounds)
    central = Config(config.data, config.model, settings, method="central", options=options)
    result = _train(central, out / "central", True, listen, prepared, budget, None, None, False, None)
    return {"test": result["test"], "unseen": result["unseen"], "seconds": result["seconds"]}


def _twin(config: Config, out: Path, prepared: Prepared, listen: Listener, rounds: int) -> dict[str, Any]:
    """Train the same rounds without clip and noise, as a run of its own beside this one: what privacy costs."""
    settings = replace(config.train, central=False, baselines=False, until=None, rounds=rounds)
    plain = replace(config, train=settings, privacy=PrivacyConfig())
    result = _train(plain, out / "noiseless", True, listen, prepared, None, None, None, False, None)
    return {"test": result["test"], "unseen": result["unseen"], "seconds": result["seconds"]}


def _rounds(
    config: Config,
    out: Path,
    prepared: Prepared,
    method: Method,
    choice: Choice,
    listen: Listener,
    budget: int | None,
    ranks: Ranks | None,
    start: Start,
    guard: PrivateRun | None,
) -> tuple[Best, float]:
    """Run all rounds that are still to do; return the model chosen on validation and the seconds spent."""
    metrics, clients = out / "metrics.jsonl", out / "clients"
    logged = metrics.stat().st_size if metrics.exists() else 0
    saved = load_checkpoint(out / "checkpoint", logged, listen.say, clients)
    home = choice.device if ranks is None else "cpu"  # where θ lives: ranks add up their sums in main memory
    if saved is None:
        params = _moved(initial_params(config, prepared, start), home)
        state, best, length, before = initial_state(method, params), None, 0, 0.0
        good = first_good(state, len(prepared.vocab))
    else:
        # Layers in the model's own order: sums over layers must round alike before and after a resume.
        params = _moved({name: saved.state.params[name] for name in shapes(prepared.spec)}, home)
        state = replace(saved.state, params=params, server=_moved(saved.state.server, home))
        best, length, before = saved.best, saved.metrics_length, saved.seconds
        good = good_in(saved, state, len(prepared.vocab), home)
        listen.say(f"resuming after round {state.round} of {config.train.rounds}")
    if metrics.exists():
        os.truncate(metrics, length)  # lines written after the last checkpoint will be written again
    if config.train.curves:
        cut_curves(out, state.round)
    states = ClientStates(clients, saved.clients if saved else None) if keeps_state(method) else None
    if states is not None:
        states.keep_good(good.clients)
    members = members_of(method, prepared, config)
    every, fewer = (sizes_in(config, method, state.params, members, frozen) for frozen in ((), FROZEN))
    tokens = client_tokens(prepared)
    valid = limit_streams(prepared.valid, config.train.valid_tokens)
    validate = validator(config.data.batching)
    problem = make_problem(prepared, config, method, choice.device, budget)
    target = parse_target(config.train.until, "train.until")
    minimum = 1 if method.cohort == "pooled" else config.participation.minimum
    if guard is not None:
        guard.check(read_metrics(out))
        minimum = 0  # an empty cohort is released too: its noise is what hides that it was empty
    done = reached(read_metrics(out), target) is not None
    watch = watch_of(config, len(prepared.vocab))
    looks = watch is not None and guard is None  # a private run's validation is not noised: it must not decide
    limits = None if method.cohort == "pooled" else limits_of(config)
    spent = guard is not None and not guard.allows()
    started = time.monotonic() - before
    written = state.round
    threads = torch.get_num_threads()
    said: set[str] = set()
    ended: tuple[State, dict[str, Any], Good] | None = None  # the last round that was trained, its line, what is good

    def save(seconds: float) -> None:
        counted = states.versions() if states is not None else {}
        kept = states.versions(good.clients) if states is not None else {}
        save_checkpoint(
            out / "checkpoint",
            Checkpoint(
                state, best, length, seconds, counted,
                good=good if looks else None, good_clients=kept,
            ),
        )  # fmt: skip
        if states is not None:
            states.hold(named_states(out / "checkpoint"))

    listen.start(f"{method.name} on {prepared.corpus.name}", config.train.rounds, state.round)
    with federate(config, problem, choice, states, ranks) as federation:
        try:
            while state.round < config.train.rounds and not done and not spent and not given_up(good, state):
                cohort, lost, called, fates = [POOLED], {}, None, {}
                sizes = fewer if state.round < config.train.frozen_rounds else every
                if method.cohort != "pooled":
                    turn = None if guard is None else guard.in_turn(prepared.store.names)
                    attempt = 0 if guard is None else guard.attempt(state.round)
                    called = plan_of_round(
                        config, method, prepared, state.round, tokens, sizes.down, sizes.up, turn, attempt
                    )
                    fates = {prepared.store.names[f.client]: f for f in called.fates}
                    federation.expect(fates)
                    cohort = list(fates)
                    lost = {client: fate.lost for client, fate in fates.items() if fate.lost is not None}
                if guard is not None:
                    assert isinstance(federation, Simulation), "several ranks are refused with --dp"
                    frozen = FROZEN if state.round < config.train.frozen_rounds else ()
                    federation.gather_by(*guard.gather(state, frozenset(frozen), fates))
                    if not guard.affords():  # not known before its clients were drawn
                        spent = True
                        if state.round > written:
                            save(time.monotonic() - started)
                        break
                began = time.monotonic()
                torch.set_num_threads(choice.threads)
                after, summary = run_round(method, state, cohort, federation, minimum, limits, watch)
                torch.set_num_threads(usable_cores())
                judged = judge_attention(summary) if method.distance is not None and guard is None else None
                if judged is not None and judged[0] not in said:
                    said.add(judged[0])
                    listen.say(judged[1])
                record = record_of(method, summary, sizes, called, lost)
                if federation.secure is not None:
                    record = secure_record(record, federation.secure, summary.saturated)
                    if record["secure"]["failed"] is not None:
                        listen.say(f"round {record['round']} is abandoned: {record['secure']['failed']}")
                if federation.compression_error is not None:
                    record["compression_error"] = federation.compression_error
                if guard is not None:
                    record = {**public_record(record, guard, sizes), "privacy": guard.told(state)}
                    spent = not guard.allows()
                found, back = suspect(good, after) if looks else (good, False)
                if summary.unsound is not None:
                    record["unsound"] = summary.unsound
                record["seconds"] = time.monotonic() - began
                last = after.round == config.train.rounds or spent or given_up(found, after)
                if last or after.round % config.train.eval_every == 0:
                    score = validate(prepared.spec, after.served(method), valid, choice.device)
                    record["valid"] = score.summary()
                    if watch is not None and looks and not back and score.tokens:
                        counting = states.rounds if states is not None else {}
                        found, back = judge_model(good, after, score.mean_nats, watch.factor, counting)
                    if back:
                        after = gone_back(found, after, server=by_server(method, summary.loss, found.uniform))
                        if summary.unsound is None:
                            listen.say(judged_line(score.perplexity, found, after))
                    elif best is None or score.mean_nats < best.nats or not math.isfinite(best.nats):
                        best = Best(after.round, score.mean_nats, after.served(method))
                    last = last or given_up(found, after)
                    done = reached([record], target) is not None
                elif back:
                    after = gone_back(found, after, server=method.solver.still)
                if back:
                    record["rolled_back"] = found.state.round
                if (halvings := halvings_of(state, after)) is not None:
                    record["halved"] = halvings
                if summary.unsound is not None:
                    listen.say(unsound_line(summary, state, after, found))
                if config.train.curves:
                    append_curves(out, after.round, federation.curves)
                record["elapsed"] = time.monotonic() - started
                ended = after, record, found
                state, good, length = after, found, append_line(metrics, record)
                _settle_clients(states, good, back)
                if last or done or state.round % config.train.checkpoint_every == 0:
                    save(record["elapsed"])
                    written = state.round
                listen.round(record)
        except KeyboardInterrupt:
            if ended is not None and ended[0].round > state.round:  # stopped while its line was written: it is done
                if metrics.exists():
                    os.truncate(metrics, length)
                state, good, length = ended[0], ended[2], append_line(metrics, ended[1])
            if ended is not None and ended[0] is state:
                _settle_clients(states, good, "rolled_back" in ended[1])
            # Clients that were acknowledged in a round which is not in `state` yet would be ahead of the server: then
            # the last checkpoint, whose files are all there, is what to go on from.
            ahead = states is not None and any(r >= state.round for r in states.rounds.values())
            if state.round > written and not ahead:
                save(time.monotonic() - started)
            raise
        finally:
            torch.set_num_threads(threads)
    if given_up(good, state):
        listen.say(stopped_line(good, state))
    if done:
        listen.say(f"the target {config.train.until} is reached after round {state.round}")
    if spent and state.round < config.train.rounds:
        listen.say(f"the privacy budget is spent after round {state.round}: another would exceed it")
    if best is None:
        stands = good.state.round if same(state.params, good.state.params) else state.round
        best = Best(stands, math.nan, state.served(method))
    return best, time.monotonic() - started


def _settle_clients(states: ClientStates | None, good: Good, back: bool) -> None:
    """Keep the clients' states of the last good model, and let them count again where the run has gone back to it."""
    if states is None:
        return
    if back:
        states.go_back(good.clients)
    states.keep_good(good.clients)


def _moved(params: Params, device: str) -> Params:
    return {name: p.to(device) for name, p in params.items()}
