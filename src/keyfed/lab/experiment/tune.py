"""`keyfed tune`: a small search for a method's numbers on validation text, with a fixed budget.

`search.py` says what is tried, `halving.py` how long. A trial is an ordinary run folder of R rounds that is merely
stopped early: one that goes on resumes from its own checkpoint, which gives bitwise what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import PARTS, Config, Value, check, config_from, differences, dump_toml, to_document
from keyfed.engine.launch import refuse_ranks
from keyfed.errors import ConfigError, DataError, RunError
from keyfed.federated.tuned import CHARACTERS
from keyfed.files import write_atomically
from keyfed.lab.experiment.halving import Outcome, budget, first_rounds, going_on, halve, judge, until_compared, winner
from keyfed.lab.experiment.search import Space, at_edge, parse_search, sample
from keyfed.lab.experiment.tune_report import verdict, write_tune_report
from keyfed.run.console import plural
from keyfed.run.folder import open_folder, read_metrics, refuse_changes, strict
from keyfed.run.loop import Listener, Silent, train
from keyfed.run.plan import plan
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.recipe.pilot import without_test

TRIALS, SEEDS = 10, 1  # unless said otherwise


@dataclass(frozen=True, slots=True)
class Tuning:
    """A search, resolved: the configuration to start from, what is varied, how many trials of how many seeds each."""

    config: Config
    space: Space
    trials: int = TRIALS
    seeds: int = SEEDS

    def document(self) -> dict[str, dict[str, Any]]:
        """Return it as plain values, as tune.json holds it."""
        return {
            **to_document(self.config),
            "search": {key: str(one) for key, one in self.space.items()},
            "tune": {"trials": self.trials, "seeds": self.seeds},
        }


def read_tuning(out: Path) -> Tuning:
    """Return the search that was started in a folder."""
    path = out / "tune.json"
    try:
        settings = dict(json.loads(path.read_text("utf-8"))["settings"])
        search, numbers = settings.pop("search"), settings.pop("tune")
        config = config_from(settings, str(path))
        space = parse_search(config, [f"{key}={one}" for key, one in search.items()])
        return Tuning(config, space, int(numbers["trials"]), int(numbers["seeds"]))
    except FileNotFoundError:
        raise RunError(f"{out} holds no tuning (it has no tune.json); `keyfed tune` makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{path} is damaged ({e!r}); start again with another --out") from None


class _Enough(Exception):
    """A trial has trained as long as it should for now; its folder can be resumed."""


class _Stopwatch:
    """A listener that ends a run after so many rounds; the lines every trial would repeat are left out."""

    def __init__(self, inner: Listener, label: str, until: int, rounds: int) -> None:
        self._inner, self._label, self._until, self._rounds = inner, label, until, rounds

    def say(self, line: str) -> None: ...

    def start(self, what: str, rounds: int, done: int) -> None:
        self._inner.start(f"{self._label}, {what}", min(rounds, self._until), done)

    def round(self, record: dict[str, Any]) -> None:
        self._inner.round(record)
        if self._until <= record["round"] < self._rounds and record.get("valid"):
            raise _Enough


def untested(prepared: Prepared) -> Prepared:
    """Take the test text away; refuse a corpus without validation text, on which nothing can be tuned."""
    if not prepared.valid:
        raise DataError(
            f"{prepared.corpus.name} has no validation text to tune on: its clients have too few lines to cut; "
            "give longer texts"
        )
    return without_test(prepared)


def tune(tuning: Tuning, out: Path, *, resume: bool = False, listener: Listener | None = None) -> dict[str, Any]:
    """Search in folder `out` and return the result (also in out/tune.json, report.md, report.html, best.toml).

    Args:
      resume: go on with the search in `out`; trials that are trained already are not trained again.
    """
    refuse_ranks("keyfed tune")
    listen = listener or Silent()
    if tuning.trials < 2 or tuning.seeds < 1:
        raise ConfigError(
            f"got {tuning.trials} trials of {tuning.seeds} seeds; expected at least 2 trials (the configuration as "
            "given is one) and 1 seed"
        )
    if tuning.config.open is not None:
        raise ConfigError("a search is of one method's numbers, and the configuration names none; name one (fedavg)")
    if tuning.config.train.until is not None:
        raise ConfigError(
            "train.until ends runs at different rounds, and a search compares them at the same; leave it out"
        )
    # Baselines and central training are judged on test text, which a search must not read.
    config = check(replace(tuning.config, train=replace(tuning.config.train, baselines=False, central=False)))
    if config.train.rounds < 1:
        raise ConfigError("train.rounds is 0; a trial trains at least 1 round")
    tuning = replace(tuning, config=config)
    if (out / "run.toml").exists():
        raise RunError(f"{out} holds a training run; choose another --out for the search")
    if (out / "tune.json").exists() and not resume:
        raise RunError(f"{out} holds a search already; go on with it by --resume, or choose another --out")
    with open_folder(out, resume):
        if (out / "tune.json").exists():
            changed = differences(read_tuning(out).document(), tuning.document())
            if changed:
                raise RunError(f"{out} was started with other settings: {'; '.join(changed)}")
        return _Search(tuning, out, listen).run()


class _Search:
    """The trials of one search, and what is known of them so far."""

    def __init__(self, tuning: Tuning, out: Path, listen: Listener) -> None:
        self.tuning, self.out, self.listen = tuning, out, listen
        self.rounds = tuning.config.train.rounds
        document = to_document(tuning.config)["method"]
        given = {key: document[key] for key in tuning.space}
        first = tuning.config.train.seed
        sampled = sample(tuning.space, tuning.trials - 1, first)
        self.values = [given, *(values for values in sampled if values != given)]
        self.seeds = range(first, first + tuning.seeds)
        self.outcomes: dict[int, Outcome] = {}

    def run(self) -> dict[str, Any]:
        count = len(self.values)
        searched = ", ".join(f"{key} in {one}" for key, one in self.tuning.space.items())
        self.listen.say(f"searching {searched}, judged on validation text; the test text is not read")
        self.listen.say(
            f"{count} trials: the configuration as given and at most {going_on(count)} more train {self.rounds} "
            f"rounds, the others {first_rounds(self.rounds)}; at most "
            f"{budget(count, self.rounds) * len(self.seeds):,} rounds in all"
        )
        # A seed decides who is held out, so each has its own text.
        configs = {seed: replace(self.tuning.config.train, seed=seed) for seed in self.seeds}
        self.prepared = {seed: prepare(replace(self.tuning.config, train=t)) for seed, t in configs.items()}
        for line in next(iter(self.prepared.values())).describe(private=self.tuning.config.privacy.on):
            self.listen.say(line)
        self.prepared = {seed: untested(found) for seed, found in self.prepared.items()}
        self._write()
        halve(count, self.rounds, self._trial)
        result = self._write(finished=True)
        write_tune_report(self.out, result, self.tuning.space)
        if result["toml"]:
            write_atomically(self.out / "best.toml", result["toml"].encode())
        return result

    def _trial(self, trial: int, until: int) -> Outcome:
        values = self.values[trial]
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        try:
            runs = [self._run(trial, seed, until, shown) for seed in self.seeds]
            vocab = max(len(p.vocab) for p in self.prepared.values())
            outcome = judge(trial, values, runs, self.rounds, vocab)
        except ConfigError as e:
            if trial == 0:
                raise  # nothing can be tuned of what cannot be trained
            outcome = Outcome(trial, values, "refused", note=str(e))
        said = outcome.note or f"validation perplexity {outcome.row()['perplexity'] or math.inf:.2f}"
        self.listen.say(f"trial {trial} ({shown}): {outcome.status} after {plural(outcome.rounds, 'round')}, {said}")
        self.outcomes[trial] = outcome
        self._write()
        return outcome

    def _run(self, trial: int, seed: int, until: int, shown: str) -> list[Mapping[str, Any]]:
        """Train one seed of a trial up to `until` rounds, unless that is done already; return these rounds."""
        base, prepared = self.tuning.config, self.prepared[seed]
        options = {**base.options, **self.values[trial]}
        config = check(replace(base, options=options, train=replace(base.train, seed=seed)))
        plan(config, prepared)
        folder = self.out / (f"trial-{trial:02}" + (f"-seed-{seed}" if len(self.seeds) > 1 else ""))
        done = until_compared(read_metrics(folder), until)
        if done is not None and until < self.rounds:
            refuse_changes(folder, config, prepared.corpus.fingerprint())
            return done
        listener = _Stopwatch(self.listen, f"trial {trial} of {len(self.values) - 1} ({shown})", until, self.rounds)
        with suppress(_Enough):
            train(config, folder, resume=True, prepared=prepared, listener=listener)
        done = until_compared(read_metrics(folder), until)
        if done is None:
            raise RunError(f"{folder / 'metrics.jsonl'} lacks round {until}; start again with another --out")
        return done

    def _write(self, finished: bool = False) -> dict[str, Any]:
        """Write tune.json with all that is known, and return it."""
        rows = sorted(self.outcomes.values(), key=lambda o: o.rank)
        best, given = winner(rows, self.rounds), self.outcomes.get(0)
        edges = at_edge(self.tuning.space, best.values) if best else []
        result = {
            "out": str(self.out),
            "method": self.tuning.config.method,
            "model": self.tuning.config.model.name,
            "data": next(iter(self.prepared.values())).corpus.name,
            "settings": self.tuning.document(),
            "finished": finished,
            "rounds": self.rounds,
            "trials": [o.row() for o in rows],
            "best": best.row() if best else None,
            "default": given.row() if given else None,
            "edges": [f"the best value of {key} lies at the edge of its range: widen it" for key in edges],
            "toml": winning_toml(self.tuning.config, best.values) if best else None,
        }
        result = dict(strict({**result, "verdict": verdict(result) if finished else None}))
        write_atomically(self.out / "tune.json", json.dumps(result, indent=1, allow_nan=False).encode())
        return result


def winning_toml(config: Config, values: Mapping[str, Value]) -> str:
    """Return all that `train --config` needs to train the winner: its values, and what else differs from the defaults.

    Baselines and central training are left to their defaults: a search has none, which says nothing about a run.
    """
    document = to_document(replace(config, options={**config.options, **values}))
    usual = to_document(Config(method=config.method))
    always = {"name", *values, *CHARACTERS.get(config.method, {})}  # the last have other defaults for characters
    given, parts = document.pop("method"), {kind: document.pop(kind) for kind in PARTS if kind in document}
    del document["train"]["baselines"], document["train"]["central"]
    kept = {"method": {key: v for key, v in given.items() if key in always or v != usual["method"][key]}, **parts}
    for section, found in document.items():
        kept[section] = {key: v for key, v in found.items() if v != usual[section][key]}
    return dump_toml({section: found for section, found in kept.items() if found})
