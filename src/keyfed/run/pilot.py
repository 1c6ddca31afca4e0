"""Settling what a configuration leaves open when a run begins: the recipe's settings, the step, the number of rounds.

The recipe (`keyfed.run.recipe`) reads facts of the corpus. A pilot then trains the recipe's step, half and
twice of it for a few rounds each, from the same start. A trial is the run itself, ended early: a small run with a
schedule of its own does not show that a step is too large (docs/LOG.md). The best on validation is taken, and the run
begins from scratch. With `--minutes` the pilot also measures how long a round takes, and the number of rounds is fixed
once. What came of it all is in run.toml: a run that goes on settles nothing.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.config.load import Config, Open, Value, check, set_value, to_document
from keyfed.engine.module import MakeModule
from keyfed.engine.ranks import Ranks
from keyfed.errors import ConfigError
from keyfed.federated.types import Method
from keyfed.model.language_model import preset
from keyfed.run.compatible import Case, refuse
from keyfed.run.console import Listener, plural, within
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.plan import plan
from keyfed.run.prepare import Prepared, prepare, prepare_again
from keyfed.run.recipe import (
    CARRIED,
    CENTRAL,
    VALIDATION_SHARE,
    Facts,
    Reading,
    Setting,
    facts_of,
    known_messages,
    read_corpus_for,
    recipe,
    steps_to_try,
)
from keyfed.run.start import offer_start

SETTLED = "recipe", "pilot", "pilot_tokens", "minutes"  # keys of run.toml's [made]
BETWEEN = " | "  # settings, and trials, in one line of run.toml
FOLDER = "pilot"  # in the run's folder, while the pilot runs
SHARE = 0.04  # of the rounds that each trial trains
PILOT_LEAST, PILOT_MOST = 6, 60  # rounds of a trial, even numbers: one is judged in its middle and at its end
GAIN = 0.01  # relative: the recipe's own step stays unless another's validation perplexity is lower by more
HOPELESS = 2.0  # times the best perplexity at the middle of a trial: it is ended there
WARM_UP = 3  # rounds that are timed; the first is not counted
PILOT_RUN = 60  # rounds of a run from which on a pilot is trained
BY_ROUNDS = ("train.average", "train.eval_every", "train.checkpoint_every", "train.rounds")  # follow from the rounds


@dataclass(frozen=True, slots=True)
class Tried:
    """One step that a pilot tried: validation perplexity (None: it diverged), rounds, tokens."""

    lr: float
    perplexity: float | None
    rounds: int
    tokens: int

    def line(self) -> str:
        """Say it in a few words."""
        found = "diverged" if self.perplexity is None else f"perplexity {self.perplexity:.1f}"
        return f"{self.lr:g}: {found} after {plural(self.rounds, 'round')}"


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration in which nothing is open, and how it came about.

    Attributes:
      settings: what the recipe chose; empty where a method was named.
      tried: what the pilot tried, the recipe's own step first.
      minutes: time that the number of rounds was fixed for; None: it was not timed.
      before: the same from run.toml, in a run that goes on.
      why_not: why it was not given the base model, if that is worth a word.
    """

    config: Config
    prepared: Prepared
    settings: tuple[Setting, ...] = ()
    reading: Reading | None = None
    tried: tuple[Tried, ...] = ()
    minutes: float | None = None
    before: Mapping[str, Any] = field(default_factory=dict)
    why_not: str | None = None

    def made(self) -> dict[str, Any]:
        """Return what run.toml says of it, flat."""
        out: dict[str, Any] = {}
        if self.settings:
            out["recipe"] = BETWEEN.join(setting.line() for setting in self.settings)
        if self.tried:
            out["pilot"] = BETWEEN.join(tried.line() for tried in self.tried)
            out["pilot_tokens"] = sum(tried.tokens for tried in self.tried)
        if self.minutes is not None:
            out["minutes"] = self.minutes
        return out

    def about(self) -> dict[str, Any] | None:
        """Return what the result says of it; None where nothing was settled."""
        found: dict[str, Any] = {**self.before, **self.made()}
        told = {key: found[key] for key in SETTLED if key in found}
        return told or None

    def central_options(self) -> Mapping[str, Value]:
        """Return the options of central training for comparison: the recipe's where it chose SGD, else the defaults."""
        lines = str((self.about() or {}).get("recipe", "")).split(BETWEEN)
        return CENTRAL if any(line.startswith("method.optimiser = sgd: ") for line in lines) else {}


def settle(
    config: Config,
    out: Path,
    *,
    resume: bool,
    listen: Listener,
    carried: bool,
    prepared: Prepared | None = None,
    module: MakeModule | None = None,
    own: Method | None = None,
    ranks: Ranks | None = None,
    offered: bool = False,
) -> Settled:
    """Settle what a run leaves open, by facts, a pilot and a clock; one that goes on takes what it began with.

    Args:
      out: the run's folder, open and locked.
      carried: whether it starts from trained weights.
      prepared: the corpus, if it was prepared already.
      offered: the run asks for no start, and takes the base model where that fits.

    Raises:
      ConfigError: the minutes are too few for two rounds, or cannot be kept here.
    """
    opened = config.open
    if own is not None and opened is not None and opened.given is not None:  # a method of the caller's own
        config = replace(config, method=Config().method, open=replace(opened, given=None))
        opened = config.open
    if resume and (out / "run.toml").exists():
        _, made = read_run_toml(out)
        return Settled(replace(config, open=None), prepared or prepare(config, module), before=made)
    if opened is None or (opened.given is None and opened.minutes is None):
        return choose(config, carried=carried, prepared=prepared, module=module, offered=offered)
    if opened.minutes is not None:
        if ranks is not None:
            refuse("ranks", Case(config, own, ranks=ranks.world))
        shutil.rmtree(out / FOLDER, ignore_errors=True)  # trials of a stopped pilot were chosen for another time left
    chosen = choose(config, carried=carried, prepared=prepared, module=module, offered=offered)
    carried = chosen.config.train.init is not None
    plan(chosen.config, chosen.prepared, own)  # what cannot be trained is said before anything else
    for setting in chosen.settings:
        listen.say(f"recipe: {setting.line()}")
    if ranks is not None:
        listen.say("no pilot: several ranks train together; the recipe's own step is taken")
        return chosen
    try:
        settled = _Pilot(chosen, opened, out / FOLDER, listen, carried, module, own).run()
    except KeyboardInterrupt:
        raise  # its trials are gone on with
    except BaseException:
        shutil.rmtree(out / FOLDER, ignore_errors=True)
        raise
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    return settled


def as_it_began(config: Config, out: Path, *, offered: bool) -> Config:
    """Return the configuration of a run that goes on: what it settled when it began, its start among it."""
    begun, _ = read_run_toml(out)
    if config.open is not None:
        config = as_begun(config, begun, config.open)
    return replace(config, train=replace(config.train, init=begun.train.init)) if offered else config


def as_begun(config: Config, begun: Config, opened: Open) -> Config:
    """Return what a run began with, and what the caller says now: a difference is refused with the others."""
    now, merged = to_document(config), replace(begun, open=None)
    if opened.given is None:  # a named method: only the rounds were open
        return replace(config, open=None, train=replace(config.train, rounds=begun.train.rounds))
    for key in sorted(opened.given, key=lambda key: not key.endswith(".name")):
        section, _, name = key.partition(".")
        if (section, name) != ("train", "rounds") or opened.minutes is None:
            merged = set_value(merged, key, now[section][name])
    return check(merged)


def with_more_rounds(made: Mapping[str, Any], rounds: int, has: int) -> dict[str, Any]:
    """Return run.toml's [made] of a run that is extended: what the recipe said of its rounds holds no longer.

    Args:
      has: rounds that the run had.

    Example:
      >>> with_more_rounds({"recipe": "train.cohort = 5: few | train.rounds = 200: a few minutes"}, 300, 200)
      {'recipe': 'train.cohort = 5: few | train.rounds = 300: extended from 200 rounds by --rounds'}
    """
    if "recipe" not in made:
        return dict(made)
    now = Setting("train.rounds", rounds, f"extended from {plural(has, 'round')} by --rounds").line()
    lines = str(made["recipe"]).split(BETWEEN)
    said = BETWEEN.join(now if line.startswith("train.rounds = ") else line for line in lines)
    return {**made, "recipe": said}


def choose(
    config: Config,
    *,
    carried: bool,
    prepared: Prepared | None = None,
    module: MakeModule | None = None,
    offered: bool = False,
) -> Settled:
    """Read the corpus and let the recipe choose; nothing is trained. Without a recipe the configuration stays.

    Args:
      offered: the run asks for no start, and takes the base model where that fits.
    """
    opened = config.open or Open()
    given, said, why_not = given_values(config), list[Setting](), None
    if opened.given is None:
        prepared = prepared or prepare(config, module)
    elif prepared is None:
        config, prepared, said = read_corpus_for(config, given, module)
    if offered:
        config, _, why_not = offer_start(config, prepared)
        carried = carried or config.train.init is not None
    if opened.given is None:
        return Settled(replace(config, open=None), prepared, minutes=opened.minutes, why_not=why_not)
    facts = facts_of(config, prepared, carried=carried, own_model=module is not None)
    found = _apply(config, prepared, facts, given, module, opened.minutes)
    return replace(found, settings=(*said, *found.settings), why_not=why_not)


def dry_lines(chosen: Settled) -> list[str]:
    """Say what was chosen and why, one line a setting, what the pilot would try, and how much would be read."""
    lines = [f"recipe: {setting.line()}" for setting in chosen.settings]
    lr = next((s.value for s in chosen.settings if s.key == "method.lr"), None)
    rounds = chosen.config.train.rounds
    if isinstance(lr, float) and rounds >= PILOT_RUN and chosen.prepared.valid:
        steps = ", ".join(f"{step:g}" for step in steps_to_try(lr))
        lines.append(f"pilot: local steps {steps}, {pilot_rounds(rounds)} rounds each, before the run")
    if chosen.minutes is not None:
        lines.append(f"the number of rounds is fixed after measuring, for {plural(chosen.minutes, 'minute')}")
    return lines if chosen.reading is None else [*lines, chosen.reading.line()]


def choose_for_federation(config: Config, clients: int | None) -> tuple[Config, tuple[Setting, ...]]:
    """Choose for real clients, of whose text nothing is known but what the corpus's name says.

    There is no pilot: it would cost rounds of people's devices.
    """
    if config.open is not None and config.open.minutes is not None:
        refuse("command line", Case(flags=frozenset({"--minutes", "--federation"})))
    if config.open is None or config.open.given is None:
        return replace(config, open=None), ()
    facts = Facts(
        clients, messages=known_messages(config), characters=preset(config.model.name).characters,
        carried=config.train.init is not None, private=config.privacy.on,
    )  # fmt: skip
    settings, _ = recipe(facts, given_values(config))
    return _with(config, settings), settings


def with_carried_step(config: Config, chosen: Sequence[Setting], *, offered: bool) -> tuple[Config, list[str]]:
    """Say what the recipe chose for real clients; with the step of a trained start, where the base was taken since.

    Args:
      offered: the recipe chose before the base model was offered.
    """
    said = list(chosen)
    for at, setting in enumerate(said):
        taken = offered and config.train.init is not None
        if taken and setting.key == "method.lr" and isinstance(setting.value, float):
            step = setting.value * CARRIED
            said[at] = replace(setting, value=step, why=f"{setting.why} × {CARRIED:g}, because the start is trained")
            config = check(set_value(config, setting.key, step))
    return config, [f"recipe: {setting.line()}" for setting in said]


def given_values(config: Config) -> dict[str, Value]:
    """Return what the user has set, by key; rounds are not where a time was."""
    opened = config.open or Open()
    document = to_document(config)
    found = {}
    for key in opened.given or ():
        section, _, name = key.partition(".")
        if name in document.get(section, {}) and not (key == "train.rounds" and opened.minutes is not None):
            found[key] = document[section][name]
    return found


def _apply(
    config: Config,
    prepared: Prepared,
    facts: Facts,
    given: Mapping[str, Value],
    module: MakeModule | None,
    minutes: float | None,
) -> Settled:
    settings, reading = recipe(facts, given)
    chosen = _with(config, settings)
    return Settled(chosen, prepare_again(prepared, chosen, module), settings, reading, minutes=minutes)


def _with(config: Config, settings: Sequence[Setting]) -> Config:
    for setting in settings:
        config = set_value(config, setting.key, setting.value)
    return check(replace(config, open=None))


# The pilot


class _TrialEnds(Exception):
    """A trial has trained long enough."""


class _TrialListener:
    """Follows a trial: ends it after its rounds or where it is clearly worse, and refuses a time that is too short."""

    def __init__(self, listen: Listener, label: str, rounds: int, middle: float | None, most: float | None) -> None:
        self._listen, self._label, self._rounds, self._middle, self._most = listen, label, rounds, middle, most

    def say(self, line: str) -> None: ...

    def start(self, what: str, rounds: int, done: int) -> None:
        self._listen.start(f"{self._label}, {what}", rounds, done)

    def within(self, what: str) -> None:
        within(self._listen, what)

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == 1 and self._most is not None and 2 * record["seconds"] > self._most:
            raise ConfigError(
                f"--minutes: a round takes {record['seconds']:.1f} s here, and {max(0.0, self._most):.1f} s are left "
                "for training, too few for two rounds; give more minutes, or a smaller train.cohort or data.max_tokens"
            )
        if is_over([record], self._rounds, self._middle):
            raise _TrialEnds


def is_over(records: Sequence[Mapping[str, Any]], rounds: int, middle: float | None) -> bool:
    """Whether a trial has trained its rounds, or is clearly worse than another one was at its first validation."""
    scores = [(r["valid"]["perplexity"] or math.inf) for r in records if r.get("valid")]
    hopeless = middle is not None and any(not score < HOPELESS * middle for score in scores)
    return hopeless or any(r["round"] >= rounds for r in records)


@dataclass(frozen=True, slots=True)
class TrialPace:
    """How long things take, in seconds: a round, a validation, and what comes once before the first round."""

    round: float
    validation: float
    once: float

    def rounds(self, seconds: float, every: int) -> int:
        """Rounds that fit into a time, one validation in `every`.

        Example:
          >>> TrialPace(1.0, 2.0, 4.0).rounds(64.0, 4)
          40
        """
        return int((seconds - self.once) / max(1e-9, self.round + self.validation / every))


def pace_of(records: Sequence[Mapping[str, Any]]) -> TrialPace:
    """Read off a trial's lines how long its rounds and validations took; the first round is not counted in either.

    Example:
      >>> lines = [(5.0, 4.0, None), (6.0, 1.0, None), (9.0, 1.0, {})]
      >>> pace_of([{"elapsed": e, "seconds": s, "valid": v} for e, s, v in lines])
      TrialPace(round=1.0, validation=2.0, once=4.0)
    """
    spent = np.diff([r["elapsed"] for r in records], prepend=0.0).tolist()
    plain = [t for t, r in zip(spent[1:], records[1:], strict=True) if r.get("valid") is None]
    each = float(np.median(plain or [r["seconds"] for r in records[1:]] or spent))
    read = [t - r["seconds"] for t, r in zip(spent, records, strict=True) if r.get("valid") is not None]
    more = max(0.0, float(np.median(read)) - (each - float(np.median([r["seconds"] for r in records[1:] or records]))))
    once = max(0.0, spent[0] - each - (more if records[0].get("valid") is not None else 0.0))
    return TrialPace(each, more if read else 0.0, once)


class _Pilot:
    """The trials before a run: which step is best, and how many rounds there is time for."""

    def __init__(
        self, chosen: Settled, opened: Open, folder: Path, listen: Listener, carried: bool,
        module: MakeModule | None, own: Method | None,
    ) -> None:  # fmt: skip
        self.chosen, self.folder, self.listen, self.carried = chosen, folder, listen, carried
        self.module, self.own = module, own
        self.minutes = opened.minutes
        self.given = frozenset(opened.given or ())
        self.began = time.monotonic()

    def run(self) -> Settled:
        chosen, pace = self.chosen, None
        if self.minutes is not None:
            pace, tokens = self._measure()
            if chosen.settings:
                chosen = self.chosen = self._refit(pace, tokens)
        steps = self._steps()
        tried: list[Tried] = []
        if steps:
            rounds = pilot_rounds(chosen.config.train.rounds)
            self.listen.say(
                f"pilot: local steps {', '.join(f'{lr:g}' for lr in steps)}, {rounds} rounds each from the same start, "
                "judged on validation text"
            )
            middle: float | None = None
            for at, lr in enumerate(steps):
                records = self._trial(f"step-{at}", rounds, max(1, rounds // 2), {"lr": lr}, middle)
                tried.append(tried_of(lr, records, len(chosen.prepared.vocab)))
                self.listen.say(f"pilot: step {tried[-1].line()}")
                if at == 0 and self.minutes is not None:
                    pace = pace_of(records)
                first = next((r["valid"]["perplexity"] for r in records if r.get("valid")), None)
                middle = min(filter(None, (middle, first)), default=None)
            best = best_step(tried)
            self.listen.say(f"pilot: the local step is {best:g}; the run begins from scratch")
            config = check(set_value(chosen.config, "method.lr", best))
            chosen = replace(chosen, config=config, tried=tuple(tried))
        if pace is not None:
            chosen = self._fix_rounds(chosen, pace)
        return replace(chosen, minutes=self.minutes)

    def _steps(self) -> tuple[float, ...]:
        """Which steps are tried; none where the step is given, or validation cannot judge."""
        if self.chosen.config.privacy.on and self.chosen.settings:
            self.listen.say("no pilot with --dp: validation is not noised, and a choice by it would not be covered")
            return ()
        lr = next((s.value for s in self.chosen.settings if s.key == "method.lr"), None)
        if not isinstance(lr, float):
            return ()
        if not self.chosen.prepared.valid:
            self.listen.say("no pilot: there is no validation text")
            return ()
        if self.chosen.config.train.rounds < PILOT_RUN:
            self.listen.say(f"no pilot: it pays from {PILOT_RUN} rounds on; the recipe's own step is taken")
            return ()
        return steps_to_try(lr)

    def _trial(
        self, name: str, rounds: int, every: int, options: Mapping[str, Value], middle: float | None = None,
        most: float | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Train a few rounds in a folder of their own and return their lines."""
        from keyfed.run.loop import train

        config = self.chosen.config
        short = replace(  # without roll-back: a step that diverges shows that it does
            config.train, rounds=max(rounds, config.train.rounds), eval_every=every, checkpoint_every=every,
            baselines=False, central=False, until=None, patience=None, curves=False, rollback=0.0,
        )  # fmt: skip
        config = check(replace(config, train=short, options={**config.options, **options}))
        folder, watch = self.folder / name, _TrialListener(self.listen, f"pilot ({name})", rounds, middle, most)
        if not is_over(read_metrics(folder), rounds, middle):  # a pilot that was stopped goes on with its trials
            with suppress(_TrialEnds):
                train(
                    config, folder, resume=True, listener=watch, prepared=without_test(self.chosen.prepared),
                    module=self.module, method=self.own,
                )  # fmt: skip
        return read_metrics(folder)

    # The clock

    def _time(self) -> str:
        assert self.minutes is not None
        return plural(self.minutes, "minute")

    def _left(self) -> float:
        assert self.minutes is not None
        return 60 * self.minutes - (time.monotonic() - self.began)

    def _measure(self) -> tuple[TrialPace, float]:
        """Train a few rounds and return how long they took, and how many tokens a round read."""
        self.listen.say(f"measuring: {WARM_UP} rounds, to find how many fit into {self._time()}")
        records = self._trial("pace", WARM_UP, WARM_UP, {}, most=self._left())
        worked = [r["worked"] or 0 for r in records]
        return pace_of(records), float(np.mean(worked))

    def _refit(self, pace: TrialPace, tokens: float) -> Settled:
        """Let the recipe choose again for the tokens that there is time for, the pilot's own taken off."""
        trials = len(self._steps()) if self.chosen.config.train.rounds >= PILOT_RUN else 0
        share = 1 + trials * SHARE + VALIDATION_SHARE
        seconds = self._left() - self._testing(pace) - (1 + trials) * pace.once
        budget = max(1, round(tokens / max(1e-9, pace.round) * seconds / share))
        facts = facts_of(
            self.chosen.config, self.chosen.prepared, carried=self.carried, own_model=self.module is not None,
            budget=budget,
        )  # fmt: skip
        before = self.chosen
        found = _apply(before.config, before.prepared, facts, self._fixed(()), self.module, self.minutes)
        settings = {setting.key: setting for setting in (*before.settings, *found.settings)}
        was = {setting.key: setting.value for setting in before.settings}
        for setting in found.settings:
            if was.get(setting.key, setting.value) != setting.value:
                self.listen.say(f"recipe: for {self._time()} {setting.line()}")
        return replace(found, settings=tuple(settings.values()), why_not=before.why_not)

    def _fixed(self, keys: Sequence[str]) -> dict[str, Value]:
        """What stays when the recipe chooses again: what the user has set, and these keys of what it chose."""
        document = to_document(self.chosen.config)
        user = self.given - {"train.rounds"}
        return {
            key: document[section][name]
            for key in {*user, *keys}
            for section, _, name in [key.partition(".")]
            if name in document.get(section, {})
        }

    def _testing(self, pace: TrialPace) -> float:
        """Seconds that the test at the end will take: its text is read as validation's is, streams twice."""
        prepared, most = self.chosen.prepared, self.chosen.config.train.valid_tokens
        held = sum(map(len, prepared.valid.values()))
        read = min(held, most or held)
        test = sum(map(len, prepared.test.values())) * (1 if prepared.batching.kind == "packed" else 2)
        unseen = sum(map(len, prepared.unseen.values()))
        return pace.validation * (test + unseen) / max(1, read)

    def _fix_rounds(self, chosen: Settled, pace: TrialPace) -> Settled:
        """Fix the number of rounds by what is left of the time; what follows from it is chosen again."""
        seconds = self._left() - self._testing(pace)
        every = chosen.config.train.eval_every
        rounds = pace.rounds(seconds, every)
        if rounds < 2:
            raise ConfigError(
                f"--minutes is {self.minutes:g}: {max(0.0, seconds):.0f} s are left, too few for two rounds of "
                f"{pace.round:.1f} s and a validation of {pace.validation:.1f} s; give more minutes"
            )
        self.listen.say(
            f"{rounds:,} rounds fit into {self._time()}: {pace.round:.2f} s a round, {pace.validation:.2f} s "
            "a validation; their number is fixed now"
        )
        train = replace(chosen.config.train, rounds=rounds)
        if not chosen.settings:
            return replace(chosen, config=check(replace(chosen.config, train=train)))
        self.chosen = replace(chosen, config=replace(chosen.config, train=train))
        stay = [s.key for s in chosen.settings if s.key not in BY_ROUNDS]
        facts = facts_of(chosen.config, chosen.prepared, carried=self.carried, own_model=self.module is not None)
        settings, reading = recipe(facts, self._fixed(["train.rounds", "method.lr", *stay]))
        new = {s.key: s for s in settings}
        timed = Setting("train.rounds", rounds, f"what fits into {self._time()}, measured")
        merged = tuple(timed if s.key == "train.rounds" else new.get(s.key, s) for s in chosen.settings)
        return replace(chosen, config=_with(self.chosen.config, settings), settings=merged, reading=reading)


def pilot_rounds(rounds: int) -> int:
    """Rounds of a trial.

    Example:
      >>> pilot_rounds(100), pilot_rounds(1_000), pilot_rounds(10_000)
      (6, 40, 60)
    """
    return max(PILOT_LEAST, min(PILOT_MOST, 2 * math.ceil(SHARE * rounds / 2)))


def tried_of(lr: float, records: Sequence[Mapping[str, Any]], vocab: int) -> Tried:
    """Sum up a trial: its last validation, or nothing where it is worse than guessing evenly among the words."""
    scores = [r["valid"]["perplexity"] for r in records if r.get("valid")]
    last = scores[-1] if scores else None
    usable = last is not None and math.isfinite(last) and last < vocab
    return Tried(lr, last if usable else None, len(records), sum(r["worked"] or 0 for r in records))


def best_step(tried: Sequence[Tried]) -> float:
    """Return the step to take: the recipe's own, the first, unless another one is better by more than GAIN.

    A trial that was ended early is worse, whatever its figure.

    Example:
      >>> best_step([Tried(10, 300.0, 8, 1), Tried(5, 299.0, 8, 1), Tried(20, 200.0, 4, 1)])
      10
    """
    whole = max(one.rounds for one in tried)
    usable = [one for one in tried if one.perplexity is not None and one.rounds == whole]
    if not usable:
        return min(one.lr for one in tried)
    best = min(usable, key=lambda one: one.perplexity or math.inf)
    own = tried[0]
    if own in usable and (own.perplexity or math.inf) <= (1 + GAIN) * (best.perplexity or 0.0):
        return own.lr
    return best.lr


def without_test(prepared: Prepared) -> Prepared:
    """Take the test text away: what is chosen by looking at it could not be judged by it afterwards."""
    oov = {part: rate for part, rate in prepared.oov.items() if part != "test"}
    return replace(prepared, test={}, unseen={}, oov=oov)
