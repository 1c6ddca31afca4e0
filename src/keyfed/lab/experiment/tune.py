"""`keyfed tune`: a small search for a method's numbers on validation text, with a fixed budget.

Trial 0 is the configuration as given and trains all R rounds, so that the result says what tuning bought. The other
trials train R/3 rounds; the best third of them go on to R. The winner is the one of lowest validation perplexity among
those that trained R rounds. A trial is an ordinary run folder of R rounds that is merely stopped early: one that goes
on resumes from its own checkpoint, which gives bitwise what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import math
import shutil
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from keyfed.config.load import (
    PARTS,
    Config,
    Value,
    check,
    coerce,
    config_from,
    differences,
    dump_toml,
    method_spec,
    to_document,
)
from keyfed.engine.module import MakeModule
from keyfed.engine.network import parameter_count
from keyfed.engine.task import keeps_state
from keyfed.errors import ConfigError, DataError, RunError, nearest
from keyfed.federated.methods import METHODS, build_method, method_options, unread_options
from keyfed.federated.spec import MethodSpec
from keyfed.files import write_atomically
from keyfed.lab.experiment.cell import (
    CellListener,
    Paused,
    PausedThere,
    Workspace,
    config_of,
    result_of,
    train_cell,
)
from keyfed.lab.experiment.compare import tokens_a_round
from keyfed.lab.experiment.grid import Cell, Study, cells_of
from keyfed.lab.experiment.report import search_document, search_verdict
from keyfed.lab.experiment.search import Listed, Range, Space, at_edge, parse_range, sample, winners_text
from keyfed.lab.experiment.store import Store, races
from keyfed.reports.document import write_document
from keyfed.run.console import Listener, Silent, plural
from keyfed.run.folder import open_folder, read_metrics, refuse_changes, strict
from keyfed.run.pilot import without_test
from keyfed.run.plan import names, plan
from keyfed.run.prepare import Prepared, prepare
from keyfed.system import refuse_ranks

# What is searched by default, by the name of the option; --search replaces it all. Orders of magnitude, since that is
# what is unknown on a new corpus; the published values and our defaults lie inside or at the end.
DEFAULTS: dict[str, Range] = {
    "server_lr": Range(1e-3, 1.0, log=True),  # an adaptive server moves every weight by about this; 1 is a plain mean
    "mu": Range(1e-5, 1.0, log=True),  # up to the values FedProx's authors tried; language models wanted 1e-4
    "rho": Range(1e-5, 1.0, log=True),  # a penalty on the distance to θ, as μ is
    "r": Range(0.05, 2.0, log=True),  # LIADMM's local step size is 1/(ρ + r)
    "temperature": Range(1e-2, 10.0, log=True),  # from one client taking all to a uniform mean
    "step": Range(0.5, 2.0),  # 1 is a plain mean, FedAtt has 1.2
}
LOCAL_LR: dict[str, Range] = {
    "adam": Range(1e-3, 1e-1, log=True),  # Adam's usual 0.001 and upwards: the mean over a cohort tames larger steps
    "sgd": Range(0.1, 10.0, log=True),  # with gradients clipped to norm 1 a step of 1 to 5 trains
}


def default_space(config: Config) -> dict[str, Range | Listed]:
    """Return what is searched unless said otherwise: the step size and the method's own main numbers."""
    spec = build_method(MethodSpec(config.method, config.options)).spec
    assert spec is not None
    space: dict[str, Range | Listed] = {}
    if "lr" in spec.options:
        # A method without local optimiser (FedSGD) takes plain gradient steps.
        space["lr"] = LOCAL_LR[str(spec.options.get("optimiser", "sgd"))]
    space |= {key: one for key, one in DEFAULTS.items() if key in spec.options}
    unread = {key for kind in PARTS if getattr(config, kind) for key in unread_options(config.method, kind)}
    if config.method == "fedadmm" and (spec.options["server_step"] == "running" or spec.options["clients"] is not None):
        unread.add("server_lr")
    space = {key: one for key, one in space.items() if key not in unread}
    if not space:
        raise ConfigError(
            f"{config.method} has no option with a default range; say what to search by --search KEY=LOW..HIGH"
        )
    return space


def parse_search(config: Config, searches: Iterable[str]) -> dict[str, Range | Listed]:
    """Read `lr=0.001..0.1:log` and `epochs=1,2,5`; without any, the default ranges of the method."""
    space: dict[str, Range | Listed] = {}
    for search in searches:
        key, space_of_key = _parse_one(config.method, search)
        if key in space:
            raise ConfigError(f"--search got {key} twice; give one range or list")
        space[key] = space_of_key
    return space or default_space(config)


def _parse_one(method: str, search: str) -> tuple[str, Range | Listed]:
    key, equals, text = (part.strip() for part in search.partition("="))
    if not equals or not key or not text:
        raise ConfigError(f'--search got "{search}"; expected key=LOW..HIGH, key=LOW..HIGH:log or key=a,b,c')
    section, _, name = key.rpartition(".")
    options = method_options(method)
    if section not in ("", "method") or name not in options:
        raise ConfigError(
            f'--search got "{key}", which is not an option of {method}{nearest(name, options)}; other sections would '
            f"change the text or model the trials are judged on. Options: {', '.join(options)}."
        )
    hint = typing.get_type_hints(METHODS[method])[name]
    if ".." in text:
        return name, parse_range(search, text, hint)
    values = tuple(coerce(value.strip(), hint, f"--search {name}") for value in text.split(","))
    if len(set(values)) < 2:
        raise ConfigError(f'--search got "{search}", one value; expected at least two, or fix it by --set {search}')
    return name, Listed(tuple(dict.fromkeys(values)))


THIRD = 3

Status = Literal["finished", "stopped", "diverged", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has come to.

    Attributes:
      rounds: trained so far; `stopped` trials did not go on after these.
      nats: validation nats per token of the best round so far, over all seeds; None where there is none.
      bytes: moved down, up and in reports.
      note: why a trial was refused.
    """

    trial: int
    values: Mapping[str, Value]
    status: Status
    rounds: int = 0
    nats: float | None = None
    top1: float | None = None
    top3: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Lowest first: validation nats, then bytes; a trial that went wrong comes last."""
        usable = self.nats is not None and self.status in ("finished", "stopped")
        return (self.nats if usable and self.nats is not None else math.inf, self.bytes, self.trial)

    def row(self) -> dict[str, Any]:
        """Return it as plain values with its perplexity."""
        perplexity = math.exp(self.nats) if self.nats is not None and self.nats < 700 else None
        return {**asdict(self), "perplexity": perplexity}


def first_rounds(rounds: int) -> int:
    """Rounds after which the trials are compared for the first time.

    Example:
      >>> first_rounds(20), first_rounds(2)
      (6, 1)
    """
    return max(1, rounds // THIRD)


def halve(trials: int, rounds: int, run: Callable[[int, int], Outcome]) -> list[Outcome]:
    """Train trial 0 to the end, the others for a third of the rounds, the best third of those to the end.

    Args:
      trials: how many there are.
      run: (trial, rounds) trains a trial up to so many rounds, from where it stands, and says what came of it.
    """
    outcomes = [run(0, rounds)]
    outcomes += [run(k, first_rounds(rounds)) for k in range(1, trials)]
    best = sorted((o for o in outcomes[1:] if math.isfinite(o.rank[0])), key=lambda o: o.rank)
    for outcome in best[: going_on(trials)]:
        if outcome.rounds < rounds:
            outcomes[outcome.trial] = run(outcome.trial, rounds)
    return outcomes


def going_on(trials: int) -> int:
    """How many trials besides the first train all rounds."""
    return math.ceil((trials - 1) / THIRD)


def budget(trials: int, rounds: int) -> int:
    """Rounds that all trials train together.

    Example:
      >>> budget(10, 9)  # the default 9, nine others 3 each, three of them 6 more
      54
    """
    first = first_rounds(rounds)
    return rounds + (trials - 1) * first + going_on(trials) * (rounds - first)


def winner(outcomes: Sequence[Outcome], rounds: int) -> Outcome | None:
    """Return the best of those that trained all rounds; ties go to fewer bytes."""
    full = [o for o in outcomes if o.rounds >= rounds and math.isfinite(o.rank[0])]
    return min(full, key=lambda o: o.rank, default=None)


def until_compared(records: Sequence[Mapping[str, Any]], rounds: int) -> list[Mapping[str, Any]] | None:
    """Return a run's rounds up to its first validation at or after `rounds`; None if it has not got there."""
    for at, record in enumerate(records):
        if record["round"] >= rounds and record.get("valid"):
            return list(records[: at + 1])
    return None


def judge(
    trial: int, values: Mapping[str, Value], runs: Sequence[Sequence[Mapping[str, Any]]], rounds: int, vocab: int
) -> Outcome:
    """Add up the runs of a trial, one a seed: each is judged by its best validation, as `train` chooses its model.

    Args:
      rounds: those of a whole run.
      vocab: size of the vocabulary: who guesses ten times worse than evenly among its words has diverged.
    """
    best = [min((r["valid"] for r in run if r.get("valid")), key=_nats_or_inf) for run in runs]
    tokens = sum(b["tokens"] for b in best)

    def mean(key: str) -> float | None:
        numbers = [b[key] for b in best]
        return None if None in numbers else sum(n * b["tokens"] for n, b in zip(numbers, best, strict=True)) / tokens

    nats = mean("nats")
    reached = min(run[-1]["round"] for run in runs)
    # A model that never left its start because every client was thrown out has a finite perplexity, but did not train.
    thrown_out = any(r["refused"] and not r["contributors"] for run in runs for r in run)
    failed = nats is None or not nats < math.log(10 * vocab) or thrown_out
    status: Status = "diverged" if failed else "finished" if reached >= rounds else "stopped"
    return Outcome(
        trial, values, status, reached, nats, mean("top1"), mean("top3"),
        bytes=sum(sum(r["traffic"].values()) for run in runs for r in run),
        seconds=sum(run[-1]["elapsed"] for run in runs),
        note="every client of a round was refused" if thrown_out else "",
    )  # fmt: skip


def _nats_or_inf(valid: Mapping[str, Any]) -> float:
    return math.inf if valid["nats"] is None else float(valid["nats"])


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


def untested(prepared: Prepared) -> Prepared:
    """Take the test text away; refuse a corpus without validation text, on which nothing can be tuned."""
    if not prepared.valid:
        raise DataError(
            f"{prepared.corpus.name} has no validation text to tune on: its clients have too few lines to cut; "
            "give longer texts"
        )
    return without_test(prepared)


def tune(
    tuning: Tuning,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    module: MakeModule | None = None,
) -> dict[str, Any]:
    """Search in folder `out` and return the result (also in out/tune.json, report.md, report.html, best.toml).

    Args:
      resume: go on with the search in `out`; trials that are trained already are not trained again.
      module: makes the model that is trained, in place of the configuration's preset.
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
    for name in ("until", "patience"):
        if getattr(tuning.config.train, name) is not None:
            raise ConfigError(
                f"train.{name} ends runs at different rounds, and a search compares them at the same; leave it out"
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
        return _Search(tuning, out, listen, module).run()


class _Search:
    """The trials of one search, and what is known of them so far."""

    def __init__(self, tuning: Tuning, out: Path, listen: Listener, module: MakeModule | None) -> None:
        self.tuning, self.out, self.listen, self.module = tuning, out, listen, module
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
        self.prepared = {
            seed: prepare(replace(self.tuning.config, train=t), module=self.module) for seed, t in configs.items()
        }
        for line in next(iter(self.prepared.values())).describe(private=self.tuning.config.privacy.on):
            self.listen.say(line)
        self.prepared = {seed: untested(found) for seed, found in self.prepared.items()}
        self._write()
        halve(count, self.rounds, self._trial)
        result = self._write(finished=True)
        write_document(self.out, search_document(result, self.tuning.space))
        if result["toml"]:
            write_atomically(self.out / "best.toml", result["toml"].encode())
        return result

    def _trial(self, trial: int, until: int) -> Outcome:
        values = self.values[trial]
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        self.listen.say(f"trial {trial} ({shown}), to round {until}:")
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
        method, _ = plan(config, prepared)
        folder = self.out / (f"trial-{trial:02}" + (f"-seed-{seed}" if len(self.seeds) > 1 else ""))
        done = until_compared(read_metrics(folder), until)
        if done is not None and until < self.rounds:
            refuse_changes(folder, config, prepared.corpus.fingerprint(), names(prepared.spec, method))
            return done
        title = f"trial {trial} of {len(self.values) - 1} ({shown}), {{}}"
        with suppress(Paused):
            listener = CellListener(self.listen, title, None, rounds=until)
            train_cell(config, folder, prepared, listener, module=self.module)
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
        result = dict(strict({**result, "verdict": search_verdict(result) if finished else None}))
        write_atomically(self.out / "tune.json", json.dumps(result, indent=1, allow_nan=False).encode())
        return result


def winning_toml(config: Config, values: Mapping[str, Value]) -> str:
    """Return all that `train --config` needs to train the winner: its values, and what else differs from the defaults.

    Baselines and central training are left to their defaults: a search has none, which says nothing about a run.
    """
    document = to_document(replace(config, options={**config.options, **values}))
    usual = to_document(Config(method=config.method))
    always = {"name", *values, *METHODS[config.method].characters}  # the last have other defaults for characters
    options, parts = document.pop("method"), {kind: document.pop(kind) for kind in PARTS if kind in document}
    del document["train"]["baselines"], document["train"]["central"]
    kept = {"method": {key: v for key, v in options.items() if key in always or v != usual["method"][key]}, **parts}
    for section, found in document.items():
        kept[section] = {key: v for key, v in found.items() if v != usual[section][key]}
    return dump_toml({section: found for section, found in kept.items() if found})


# A trial of a study's search

LOOKS = 20  # validations of a whole run; a rung is reached at one of them


def whole_run(config: Config, prepared: Prepared, tokens: float) -> Config:
    """Give a configuration as many rounds as so many tokens pay for; the schedule is over all of them."""
    rounds = max(1, round(tokens / tokens_a_round(config, prepared)))
    return check(replace(config, train=replace(config.train, rounds=rounds, eval_every=every_of(rounds))))


def every_of(rounds: int) -> int:
    """Rounds between two validations of a trial."""
    return max(1, rounds // LOOKS)


def run_trial(study: Study, cell: Cell, workspace: Workspace, listen: CellListener) -> dict[str, Any]:
    """Train a trial up to its rung, from where it stands; return its result so far. The test text is not there.

    A run whose clients keep states is not kept from rung to rung, since states fill a disk: it begins anew, and is the
    same run.

    Raises:
      KeyfedError, KeyboardInterrupt: as `run_cell`.
    """
    assert study.search is not None
    config = config_of(cell.settings, cell.seed, workspace)
    prepared = untested(workspace.prepared(config))
    config = whole_run(config, prepared, float(cell.settings["study.tokens"]))
    rungs = study.search.rungs[cell.scale][: cell.rung + 1]
    ends = [max(1, round(rung.share * config.train.rounds)) for rung in rungs]
    folder = run_folder(cell, workspace)
    stateful = keeps_state(build_method(method_spec(config)))
    if until_compared(read_metrics(folder), ends[-1]) is None:
        with suppress(Paused, PausedThere):
            pause = Paused if stateful else PausedThere
            train_cell(config, folder, prepared, CellListener(listen, known=None, rounds=ends[-1], pause=pause))
    records = read_metrics(folder)
    reached = [_rung(records, end, config.train.rounds, len(prepared.vocab)) for end in ends]
    best = reached[-1][2]
    found = {
        "records": records[: reached[-1][1]],
        "measures": {"valid_perplexity": best, "valid_nats": None if best is None else math.log(best)},
        "data": prepared.corpus.name, "data_sha256": prepared.corpus.fingerprint(), "method": config.method,
        "model": prepared.spec.name, "clients": len(prepared.store), "cohort": config.train.cohort,
        "parameters": parameter_count(prepared.spec), "vocabulary": len(prepared.vocab), "rounds": reached[-1][1],
        "tokens_trained": reached[-1][0], "train_tokens": int(prepared.store.sizes().sum()),
        "precision": config.train.precision, "rungs": reached, "whole": config.train.rounds,
        "seconds": records[-1]["elapsed"],
    }  # fmt: skip
    if stateful:
        shutil.rmtree(folder)
    return dict(strict(result_of(cell, workspace, found, ())))


def run_folder(cell: Cell, workspace: Workspace) -> Path:
    """Where a cell's run lies while it trains."""
    return workspace.work / cell.study / Path(cell.file).stem


def _rung(records: Sequence[Mapping[str, Any]], end: int, rounds: int, vocab: int) -> list[Any]:
    """[tokens, rounds, best validation perplexity] of a run up to a rung; one that ended before it has diverged."""
    whole = until_compared(records, end)
    part = list(records) if whole is None else whole
    outcome = judge(0, {}, [part], rounds, vocab)
    perplexity = outcome.row()["perplexity"] if outcome.status != "diverged" and whole is not None else None
    return [sum(r["worked"] or 0 for r in part), part[-1]["round"], perplexity]


def write_winners(study: Study, store: Store, folder: Path) -> Path | None:
    """Write the settings that a search has found, at scale standard, to its file; None for a study without a search.

    Args:
      folder: of the studies.
    """
    if study.search is None:
        return None
    entries = []
    for race in races(study, cells_of(study, "standard"), store.of(study)):
        if race.winner is not None:
            record = race.records[race.winner.id]
            length = {"train.rounds": record["whole"], "train.eval_every": every_of(record["whole"])}
            spent = sum(rungs[-1][0] for r in race.records.values() if (rungs := r["rungs"]))
            entries.append({
                "where": race.labels, "settings": {**race.winner.settings, **length}, "trials": len(race.trials),
                "tokens": spent, "record": f"docs/results/data/{study.name}",
            })  # fmt: skip
    path = folder / study.search.winners
    write_atomically(path, winners_text(study.name, entries).encode())
    return path
