"""A search: what each trial tries, which trials train on, and which one wins.

A study with a table `[search]` is a search of every one of its rows. A trial is a cell of the runner `trial`: values
drawn from declared ranges, one seed, judged on validation text. All rows have the same number of trials and the same
tokens. Trials are halved: all train up to the first rung, the best of them up to the next, and so on; the winner is
the best at the last rung. A rung is a share of the trial's whole run, whose schedule is that of all rounds, so that a
trial that goes on is the same run.

    [search]
    seed = 1
    winners = "runs/winners.toml"
    rungs.standard = [[8, 0.1], [3, 0.25], [2, 1.0]]

    [[search.draws]]
    where = { method = ["fedavg"] }
    trials = 5
    set = { method.optimiser = "sgd" }
    ranges = { method.lr = "5..40:log", method.batch_size = [5, 10] }

A row's draws have as many trials together as the first rung. A draw without `trials` adds its settings and ranges to
all others of the same rows.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from keyfed.config.load import SECTIONS, Value
from keyfed.config.schema import hints_of
from keyfed.errors import ConfigError
from keyfed.federated.cohort import derive_seed
from keyfed.federated.methods import METHODS

EDGE = 0.1  # of a range: a best value this near its end may have a better one beyond it


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, even in the number or (log) in its order of magnitude."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, place: float) -> float | int:
        """Return the value at a place from 0 (low) to 1 (high), to three digits: more would be false precision."""
        span = math.log(self.high / self.low) if self.log else self.high - self.low
        value = self.low * math.exp(span * place) if self.log else self.low + span * place
        if self.whole:
            return min(max(round(value), math.ceil(self.low)), math.floor(self.high))
        return min(max(float(f"{value:.3g}"), self.low), self.high)

    def place(self, value: float) -> float:
        """Return where a value lies, 0 (low) to 1 (high); outside of that when it is not in the range."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else -math.inf
        return (value - self.low) / (self.high - self.low)

    def is_edge(self, value: float) -> bool:
        """Tell whether a value lies in the outer tenth of the range, or beyond."""
        return not EDGE < self.place(value) < 1 - EDGE

    def __str__(self) -> str:
        return f"{self.low:.12g}..{self.high:.12g}" + (":log" if self.log else "")


@dataclass(frozen=True, slots=True)
class Listed:
    """Values one by one."""

    values: tuple[Value, ...]

    def at(self, place: float) -> Value:
        """Return the value at a place from 0 to below 1."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    def is_edge(self, value: Any) -> bool:
        """Tell whether a value is the first or last of three numbers or more: other lists have no inside."""
        numbers = [v for v in self.values if isinstance(v, int | float) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) >= 3 and not min(numbers) < value < max(numbers)

    def __str__(self) -> str:
        return ",".join("none" if v is None else str(v) for v in self.values)


Space = Mapping[str, Range | Listed]


def parse_range(search: str, text: str, hint: Any, where: str = "--search") -> Range:
    """Read `LOW..HIGH` or `LOW..HIGH:log` of an option of this type; `search` and `where` are for what is wrong."""
    kinds = {hint, *typing.get_args(hint)} & {int, float}
    bounds, colon, scale = text.partition(":")
    try:
        low, high = (float(bound) for bound in bounds.split(".."))
    except ValueError:
        raise ConfigError(f'{where} got "{search}"; expected two numbers, key=LOW..HIGH or key=LOW..HIGH:log') from None
    if not kinds:
        raise ConfigError(f'{where} got "{search}", but the option is not a number; list its values: key=a,b,c')
    if colon and scale.strip() != "log":
        raise ConfigError(f'{where} got "{search}" with ":{scale}"; expected :log or nothing after the range')
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f'{where} got "{search}"; expected finite numbers with LOW < HIGH')
    if colon and low <= 0:
        raise ConfigError(f'{where} got "{search}"; a logarithmic range needs LOW > 0')
    whole = kinds == {int}
    if whole and math.ceil(low) >= math.floor(high):
        raise ConfigError(f'{where} got "{search}"; expected at least two whole numbers between LOW and HIGH')
    return Range(low, high, log=bool(colon), whole=whole)


def sample(space: Space, count: int, seed: int) -> list[dict[str, Value]]:
    r"""Return up to `count` different settings, spread evenly over the space; fewer where it holds fewer.

    .. math::  u_i = (s + i·α) \bmod 1,\qquad α_j = φ_d^{-j},\qquad φ_d^{d+1} = φ_d + 1

    An additive recurrence with the generalised golden ratio φ_d of d options (Roberts 2018): any number of points
    covers the space evenly, where independent draws leave holes. The shift s comes from the seed.
    """
    lists = [one.values for one in space.values() if isinstance(one, Listed)]
    if len(lists) == len(space) and math.prod(map(len, lists)) <= count:
        return [dict(zip(space, values, strict=True)) for values in product(*lists)]
    ratio = 2.0
    for _ in range(50):  # a contraction: the fixed point to machine precision
        ratio = (1 + ratio) ** (1 / (len(space) + 1))
    shift = {key: random.Random(derive_seed(seed, "tune", key)).random() for key in space}
    found: dict[tuple[Value, ...], dict[str, Value]] = {}
    for i in range(100 * count):
        places = {key: (shift[key] + i * ratio ** -(j + 1)) % 1 for j, key in enumerate(space)}
        values = {key: one.at(places[key]) for key, one in space.items()}
        found.setdefault(tuple(values.values()), values)
        if len(found) == count:
            break
    return list(found.values())


def at_edge(space: Space, values: Mapping[str, Any]) -> list[str]:
    """Return the options whose value lies at the edge of its range or list; one that is off is in neither."""
    return [key for key, one in space.items() if values[key] is not None and one.is_edge(values[key])]


SEARCH = {"seed": int, "winners": str, "rungs": dict, "draws": [dict]}
DRAW = {"where": dict, "trials": int, "set": dict, "ranges": dict}
TRIAL = "trial"  # the axis of trials, and the runner of their cells
UNKEPT = ("study.", "train.device", "train.precision")  # settings of a trial that are not the winner's


@dataclass(frozen=True, slots=True)
class Rung:
    """How many trials of a row train up to a share of their rounds."""

    trials: int
    share: float


@dataclass(frozen=True, slots=True)
class Draw:
    """Trials of some rows: what they set, and what is drawn for each.

    Attributes:
      trials: of each row; 0: settings and ranges of all other draws of these rows.
    """

    where: Mapping[str, Any]
    trials: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    space: Space = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A study's table [search], checked.

    Attributes:
      seed: of the draw.
      winners: file next to the study that the winners' settings are written to.
      rungs: by scale.
      name: of the study's file, for what is wrong.
    """

    draws: tuple[Draw, ...]
    rungs: Mapping[str, tuple[Rung, ...]]
    seed: int
    winners: str
    name: str

    @property
    def trials(self) -> int:
        """Trials of a row, at the scale that has most."""
        return max(rungs[0].trials for rungs in self.rungs.values())

    def drawn(self, trial: int, draws: Sequence[Draw], scale: str) -> dict[str, Any]:
        """Return what a trial (1, 2, …) of a row sets; the shares of its rungs, too, make it what it is.

        Args:
          draws: those of the row.
        """
        draw, k = self.draw_of(trial, draws)
        values = sample(draw.space, draw.trials, self.seed)
        if len(values) < draw.trials:
            raise ConfigError(
                f"{self.name}: a draw's ranges hold {len(values)} different trials; expected {draw.trials}, widen them"
            )
        return {**draw.settings, **values[k], "study.rungs": [rung.share for rung in self.rungs[scale]]}

    def draw_of(self, trial: int, draws: Sequence[Draw]) -> tuple[Draw, int]:
        """Return the draw that a trial comes from, with what all draws of the row share, and its number there.

        A row's draws take turns.
        """
        shared = [draw for draw in draws if not draw.trials]
        own = [draw for draw in draws if draw.trials]
        turns = [(draw, k) for k in range(self.trials) for draw in own if k < draw.trials]
        if len(turns) != self.trials:
            raise ConfigError(
                f"{self.name}: a row's draws have {len(turns)} trials; expected {self.trials}, those of the first rung"
            )
        draw, k = turns[trial - 1]
        settings, space = dict(draw.settings), dict(draw.space)
        for more in shared:
            settings |= more.settings
            space |= more.space
        return Draw(draw.where, draw.trials, settings, space), k

    def tokens(self, scale: str) -> float:
        """What all trials of a row train on together, in whole runs; trials that went on from their checkpoint."""
        shares = [0.0, *(rung.share for rung in self.rungs[scale])]
        steps = zip(self.rungs[scale], itertools.pairwise(shares), strict=True)
        return sum(rung.trials * (after - before) for rung, (before, after) in steps)


Flat = Callable[[Mapping[str, Any]], dict[str, Any]]  # settings as `section.key`


def with_trials(document: dict[str, Any], name: str, flat: Flat) -> tuple[dict[str, Any], SearchPlan | None]:
    """Return a study's document, its keys and kinds checked, with the axis of trials, and its search.

    Args:
      name: of the study's file, for what is wrong.
    """
    if "search" not in document:
        return document, None
    try:
        plan = _plan(document["search"], list(document["scale"]), name, flat)
    except ConfigError as e:
        raise ConfigError(f"{name}: {e}") from None
    trials: dict[str, Any] = {str(number): {} for number in range(1, plan.trials + 1)}
    grids = [{**grid, TRIAL: [*trials]} for grid in document["grid"]]
    return {**document, "axis": {**document["axis"], TRIAL: trials}, "grid": grids}, plan


def _plan(table: Mapping[str, Any], scales: Iterable[str], name: str, flat: Flat) -> SearchPlan:
    rungs = {}
    for scale in scales:
        try:
            found = tuple(Rung(int(trials), float(share)) for trials, share in table["rungs"][scale])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"rungs.{scale} of [search] is {table['rungs'].get(scale)!r}; {_LADDER}") from None
        numbers, shares = [rung.trials for rung in found], [rung.share for rung in found]
        rises = [0.0, *shares] == sorted({0.0, *shares}) and shares[-1:] == [1.0]
        if not rises or numbers != sorted(numbers, reverse=True) or numbers[-1] < 1 or numbers[0] < 2:
            raise ConfigError(f"rungs.{scale} of [search] is {table['rungs'][scale]}; {_LADDER}")
        rungs[scale] = found
    draws = []
    for entry in table["draws"]:
        space = {key: _space(key, said) for key, said in flat(entry.get("ranges", {})).items()}
        draws.append(Draw(entry["where"], entry.get("trials", 0), flat(entry.get("set", {})), space))
    return SearchPlan(tuple(draws), rungs, table["seed"], table["winners"], name)


_LADDER = "expected [trials, share of the rounds] of each rung, fewer trials and larger shares, the last of them 1"


def _space(key: str, said: Any) -> Range | Listed:
    """What a range of a draw says: text for numbers between two, a list for values one by one."""
    section, _, name = key.partition(".")
    if section == "method":
        hints = {option: hint for method in METHODS.values() for option, hint in typing.get_type_hints(method).items()}
    else:
        hints = hints_of(SECTIONS[section]) if section in SECTIONS else {}
    if name not in hints:
        raise ConfigError(f'a draw of [search] has the range "{key}"; expected an option as section.key')
    if isinstance(said, str):
        return parse_range(f"{key}={said}", said, hints[name], "a draw of [search]")
    if not isinstance(said, list) or len(said) < 2 or len({json.dumps(value) for value in said}) < len(said):
        raise ConfigError(f'a draw of [search] has {key} = {said!r}; expected "LOW..HIGH" or a list of several values')
    return Listed(tuple(said))


@dataclass(frozen=True, slots=True)
class Halving:
    """Where the trials of a row stand.

    Attributes:
      rung: that is being climbed; as many as there are when the search is over.
      going: trials that climb it, by id; `open`: those of them that have not reached it.
      winner: None until the search is over, and where every trial has diverged.
    """

    rung: int
    going: tuple[str, ...]
    open: tuple[str, ...]
    winner: str | None = None


def reached(record: Mapping[str, Any] | None) -> list[list[Any]]:
    """What a trial has reached: [tokens, rounds, best validation perplexity so far] by rung."""
    return [] if record is None else list(record.get("rungs", ()))


def halve_on(rungs: Sequence[Rung], trials: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> Halving:
    """Say who goes on: the best of those that climbed the rung before; one that diverged does not.

    Example:
      >>> one, two = ({"rungs": [[9, 1, ppl]]} for ppl in (30.0, 20.0))
      >>> halve_on([Rung(2, 0.5), Rung(1, 1.0)], ["a", "b"], {"a": one, "b": two}).open
      ('b',)
    """
    going = list(trials)
    for number, rung in enumerate(rungs):
        if number:
            going = _best(going, number - 1, found)[: rung.trials]
        left = [trial for trial in going if len(reached(found.get(trial))) <= number]
        if left:
            return Halving(number, tuple(going), tuple(left))
    return Halving(len(rungs), (), (), next(iter(_best(going, len(rungs) - 1, found)), None))


def _best(trials: Iterable[str], rung: int, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Trials by what they have reached at a rung, the best first; those that diverged are left out."""
    scores = {trial: reached(found[trial])[rung][2] for trial in trials}
    return sorted((t for t, score in scores.items() if score is not None), key=lambda t: float(scores[t]))


def winners_text(name: str, entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the file of winners: for every row what the winner sets, and what its search has cost.

    Args:
      name: of the search.
      entries: `where`, `settings`, `trials`, `tokens` and `record` of each.
    """
    lines = [f"# The winners of the search; written by `keyfed study report {name}`, do not edit."]
    for entry in entries:
        where = _inline(entry["where"])
        kept = {k: v for k, v in entry["settings"].items() if not k.startswith(UNKEPT)}
        budget = {"trials": entry["trials"], "tokens": entry["tokens"], "record": entry["record"]}
        lines += ["", "[[when]]", f"where = {where}", f"set = {_inline({'absent': '', **kept})}"]
        lines += ["[[searched]]", f"where = {where}", *(f"{k} = {json.dumps(v)}" for k, v in budget.items())]
    return "\n".join(lines) + "\n"


def _inline(table: Mapping[str, Any]) -> str:
    """Write plain values as an inline table of TOML; a key stands in quotes, so that its dots stay."""
    said = (f"{json.dumps(k)} = {json.dumps(v, ensure_ascii=False)}" for k, v in table.items())
    return f"{{ {', '.join(said)} }}"


def with_winners(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a study's document with the settings that a search has found for its rows (`winners = FILE`)."""
    if "winners" not in document:
        return dict(document)
    file = path.parent / str(document["winners"])
    try:
        more = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path.name}: winners {document['winners']}: {e}") from None
    own = {key: value for key, value in document.items() if key != "winners"}
    return {**own, **{key: [*own.get(key, ()), *more.get(key, ())] for key in ("when", "searched")}}
