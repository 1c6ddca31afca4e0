"""`keyfed tune`: a small search for a method's numbers on validation text, with a fixed budget, and its report.

`search.py` says what is tried and for how long. A trial is an ordinary run folder of R rounds that is merely stopped
early: one that goes on resumes from its own checkpoint, which gives bitwise what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import PARTS, Config, Value, check, config_from, differences, dump_toml, to_document
from keyfed.engine.launch import refuse_ranks
from keyfed.errors import ConfigError, DataError, RunError
from keyfed.federated.tuned import CHARACTERS
from keyfed.files import write_atomically
from keyfed.lab.experiment.search import (
    Outcome,
    Range,
    Space,
    at_edge,
    budget,
    first_rounds,
    going_on,
    halve,
    judge,
    parse_search,
    sample,
    until_compared,
    winner,
)
from keyfed.reports.document import Block, Code, Heading, Picture, Table, Text, finite, show, write_document
from keyfed.reports.figures import HIGHEST, Theme, both_themes, perplexity_axis, single
from keyfed.run.console import human_bytes, plural, render_table
from keyfed.run.folder import open_folder, read_metrics, refuse_changes, strict
from keyfed.run.loop import Listener, Silent, train
from keyfed.run.plan import plan
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.recipe.pilot import without_test

Record = Mapping[str, Any]
NOTES = (
    "Trial 0 is the configuration as given. A stopped trial was among the worse after a third of the rounds; its "
    "perplexity is that of fewer rounds. Of those that trained all rounds the lowest validation perplexity wins, ties "
    "go to fewer bytes. A diverged trial never guessed better than ten times worse than evenly among all words, or had "
    "a round in which every client was refused; a refused trial has values the method does not take.",
    "Perplexity is that of the best validation round, over all seeds. No trial read the test text. The winner of many "
    "is flattered by the choice: its honest figure is the test perplexity of one run, keyfed train --config best.toml.",
)


def verdict(result: Record) -> str:
    """Say in one sentence what the search found and what it bought.

    Example:
      >>> row = {"trial": 2, "values": {"lr": 0.01}, "perplexity": 90.0}
      >>> verdict({"method": "fedavg", "rounds": 6, "trials": [row, {}], "best": row, "default": {"perplexity": 100.0}})
      'The best of 2 configurations of fedavg, lr=0.01, has a validation perplexity of 90.00 after 6 rounds, the one \
given 100.0: tuning bought 10.0 %.'
    """
    best, default = result["best"], result["default"]
    count = len(result["trials"])
    if best is None:
        return f"None of {count} configurations of {result['method']} trained to a finite validation perplexity."
    if best["trial"] == 0:
        return (
            f"The configuration as given is the best of {count} of {result['method']}, with a validation perplexity of "
            f"{show(best['perplexity'])} after {plural(result['rounds'], 'round')}: tuning bought nothing."
        )
    before = finite((default or {}).get("perplexity"))
    bought = f"tuning bought {1 - best['perplexity'] / before:.1%}".replace("%", " %") if before else "it had none"
    return (
        f"The best of {count} configurations of {result['method']}, {_shown(best['values'])}, has a validation "
        f"perplexity of {show(best['perplexity'])} after {plural(result['rounds'], 'round')}, the one given "
        f"{show(before)}: {bought}."
    )


def _shown(values: Record) -> str:
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in values.items())


def trial_table(result: Record) -> list[list[str]]:
    """Return the trials as rows of text, header first: lowest validation perplexity first, what went wrong last."""
    keys = list(result["settings"]["search"])
    rows = [["trial", *keys, "rounds", "valid perplexity", "top-1", "top-3", "traffic", "seconds", "outcome"]]
    for trial in result["trials"]:
        best = result["best"] is not None and trial["trial"] == result["best"]["trial"]
        name = f"{trial['trial']}" + (" (as given)" if trial["trial"] == 0 else "")
        outcome = ("best" if best else trial["status"]) + (f": {trial['note']}" if trial["note"] else "")
        values = ["none" if trial["values"][k] is None else f"{trial['values'][k]}" for k in keys]
        accuracy = ["–" if trial[k] is None else f"{trial[k]:.1%}" for k in ("top1", "top3")]
        moved, spent = human_bytes(trial["bytes"]), f"{trial['seconds']:.1f}"
        shown = show(trial["perplexity"])
        rows.append([name, *values, str(trial["rounds"]), shown, *accuracy, moved, spent, outcome])
    return rows


def tune_text(result: Record) -> str:
    """Return what the terminal shows of a finished search."""
    lines = [f"{render_table(trial_table(result))}{result['verdict']}", *result["edges"]]
    if result["toml"]:
        best = shlex.quote(f"{result['out']}/best.toml")
        lines += ["", result["toml"].rstrip(), "", f"train it:  keyfed train --config {best}"]
    report = shlex.quote(f"{result['out']}/report.html")
    return "\n".join([*lines, f"report:    {report}"])


def write_tune_report(out: Path, result: Record, space: Space) -> list[Path]:
    """Write report.md, report.html and plots/ of a search; without matplotlib there are no plots."""
    try:
        plots: list[Picture] | None = [p for p in (draw_option(result, key, space) for key in space) if p is not None]
    except ImportError:
        plots = None
    blocks: list[Block] = [
        Heading(f"Tuning {result['method']} on {result['data']}, model {result['model']}", 1),
        Text(result["verdict"], "verdict"),
        *(Text(line) for line in result["edges"]),
        Heading("Trials"),
        Table(trial_table(result)),
        *(Text(line, "note") for line in NOTES),
    ]
    if plots is None:
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    blocks += plots or ()
    if result["toml"]:
        blocks += [Heading("The winner as best.toml"), Code(result["toml"], "toml")]
    blocks += [Heading("Settings"), Code(dump_toml(result["settings"]), "toml")]
    return write_document(out, blocks)


def draw_option(result: Record, key: str, space: Space) -> Picture | None:
    """Draw validation perplexity against one option's value; None where no trial has a number to draw."""
    one = space[key]
    trials = [t for t in result["trials"] if (finite(t["perplexity"]) or HIGHEST) < HIGHEST]
    if isinstance(one, Range):  # an option that is off in the configuration as given has no place on the axis
        trials = [t for t in trials if t["values"][key] is not None]
    if not trials:
        return None
    ticks: list[str] = []
    if isinstance(one, Range):
        places = [float(t["values"][key]) for t in trials]
    else:  # a list is drawn value by value, the given one beside it where it is not in the list
        known = dict.fromkeys([*one.values, *(t["values"][key] for t in trials)])
        ticks = ["none" if value is None else str(value) for value in known]
        places = [float(list(known).index(t["values"][key])) for t in trials]
    values = [t["perplexity"] for t in trials]
    missing = len(result["trials"]) - len(trials)
    best = result["best"]["trial"] if result["best"] else None
    groups: Sequence[tuple[str, str, int, Any]] = (
        (f"trained all {result['rounds']} rounds", "o", 0, lambda t: t["rounds"] >= result["rounds"]),
        ("fewer rounds", "s", 1, lambda t: t["rounds"] < result["rounds"]),
        ("as given", "D", 2, lambda t: t["trial"] == 0),
        ("best", "*", 3, lambda t: t["trial"] == best),
    )

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Validation perplexity by " + key)
        for label, marker, colour, belongs in groups:
            chosen = [i for i, t in enumerate(trials) if belongs(t)]
            if chosen:
                axes.plot(
                    [places[i] for i in chosen], [values[i] for i in chosen], marker, color=theme.colours[colour],
                    markersize=12 if marker == "*" else 7, fillstyle="none" if marker in "sD" else "full", label=label,
                )  # fmt: skip
        if missing:
            axes.plot([], [], linestyle="none", label=f"({missing} trials have no place here)")
        axes.set_xlabel(key)
        if ticks:
            axes.set_xticks(range(len(ticks)), ticks)
            axes.set_xlim(-0.5, len(ticks) - 0.5)
        elif isinstance(one, Range):
            if one.log and min(places) > 0:
                axes.set_xscale("log")
            axes.set_xlim(min(one.low, *places), max(one.high, *places))  # the whole range, tried or not
        perplexity_axis(axes, values)

    low = min(zip(values, (t["values"][key] for t in trials), strict=True), key=lambda pair: pair[0])
    alt = f"Validation perplexity of {len(trials)} trials by {key}; lowest {show(low[0])} at {low[1]}"
    return both_themes(f"search-{key}", alt, single(draw))


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


class _TrialPaused(Exception):
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
            raise _TrialPaused


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
        first_values = {key: document[key] for key in tuning.space}
        first = tuning.config.train.seed
        sampled = sample(tuning.space, tuning.trials - 1, first)
        self.values = [first_values, *(values for values in sampled if values != first_values)]
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
        with suppress(_TrialPaused):
            train(config, folder, resume=True, prepared=prepared, listener=listener)
        done = until_compared(read_metrics(folder), until)
        if done is None:
            raise RunError(f"{folder / 'metrics.jsonl'} lacks round {until}; start again with another --out")
        return done

    def _write(self, finished: bool = False) -> dict[str, Any]:
        """Write tune.json with all that is known, and return it."""
        rows = sorted(self.outcomes.values(), key=lambda o: o.rank)
        best, default = winner(rows, self.rounds), self.outcomes.get(0)
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
            "default": default.row() if default else None,
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
    options, parts = document.pop("method"), {kind: document.pop(kind) for kind in PARTS if kind in document}
    del document["train"]["baselines"], document["train"]["central"]
    kept = {"method": {key: v for key, v in options.items() if key in always or v != usual["method"][key]}, **parts}
    for section, found in document.items():
        kept[section] = {key: v for key, v in found.items() if v != usual[section][key]}
    return dump_toml({section: found for section, found in kept.items() if found})
