"""What `keyfed tune` tries and for how long: ranges and lists of options, an even sample of them, successive halving.

Trial 0 is the configuration as given and trains all R rounds, so that the result says what tuning bought. The other
trials train R/3 rounds; the best third of them go on to R. The winner is the one of lowest validation perplexity among
those that trained R rounds.
"""

from __future__ import annotations

import math
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from keyfed.config.load import PARTS, Config, Value, coerce
from keyfed.errors import ConfigError, nearest
from keyfed.federated.cohort import derive_seed
from keyfed.federated.components import READ_BY
from keyfed.federated.methods import METHODS, build_method, method_options
from keyfed.federated.types import MethodSpec

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

    def __str__(self) -> str:
        return f"{self.low:.12g}..{self.high:.12g}" + (":log" if self.log else "")


@dataclass(frozen=True, slots=True)
class Listed:
    """Values one by one."""

    values: tuple[Value, ...]

    def at(self, place: float) -> Value:
        """Return the value at a place from 0 to below 1."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    def __str__(self) -> str:
        return ",".join("none" if v is None else str(v) for v in self.values)


Space = Mapping[str, Range | Listed]

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
    unread = {key for kind in PARTS if getattr(config, kind) for key in READ_BY[kind].get(config.method, ())}
    if config.method == "fedadmm" and spec.options["server_step"] == "running":
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
        return name, _parse_range(search, text, hint)
    values = tuple(coerce(value.strip(), hint, f"--search {name}") for value in text.split(","))
    if len(set(values)) < 2:
        raise ConfigError(f'--search got "{search}", one value; expected at least two, or fix it by --set {search}')
    return name, Listed(tuple(dict.fromkeys(values)))


def _parse_range(search: str, text: str, hint: Any) -> Range:
    kinds = {hint, *typing.get_args(hint)} & {int, float}
    bounds, colon, scale = text.partition(":")
    try:
        low, high = (float(bound) for bound in bounds.split(".."))
    except ValueError:
        raise ConfigError(
            f'--search got "{search}"; expected two numbers, key=LOW..HIGH or key=LOW..HIGH:log'
        ) from None
    if not kinds:
        raise ConfigError(f'--search got "{search}", but the option is not a number; list its values: key=a,b,c')
    if colon and scale.strip() != "log":
        raise ConfigError(f'--search got "{search}" with ":{scale}"; expected :log or nothing after the range')
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f'--search got "{search}"; expected finite numbers with LOW < HIGH')
    if colon and low <= 0:
        raise ConfigError(f'--search got "{search}"; a logarithmic range needs LOW > 0')
    whole = kinds == {int}
    if whole and math.ceil(low) >= math.floor(high):
        raise ConfigError(f'--search got "{search}"; expected at least two whole numbers between LOW and HIGH')
    return Range(low, high, log=bool(colon), whole=whole)


def sample(space: Space, count: int, seed: int) -> list[dict[str, Value]]:
    r"""Return up to `count` different settings, spread evenly over the space; fewer where it holds fewer.

    .. math::  u_i = (s + i·α) \bmod 1,\qquad α_j = φ_d^{-j},\qquad φ_d^{d+1} = φ_d + 1

    An additive recurrence with the generalised golden ratio φ_d of d options (Roberts 2018): any number of points
    covers the space evenly, where independent draws leave holes. The shift s comes from the seed.
    """
    if all(isinstance(one, Listed) for one in space.values()):
        grid = [dict(zip(space, values, strict=True)) for values in product(*(_values(one) for one in space.values()))]
        if len(grid) <= count:
            return grid
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


def _values(one: Range | Listed) -> tuple[Value, ...]:
    return one.values if isinstance(one, Listed) else ()


def at_edge(space: Space, values: Mapping[str, Any]) -> list[str]:
    """Return the options whose value lies in the outer tenth of its range (or beyond), or first or last in its list."""
    out = []
    for key, one in space.items():
        value = values[key]
        if value is None:
            continue  # off, as given: not in the range at all
        if isinstance(one, Range):
            if not EDGE < one.place(value) < 1 - EDGE:
                out.append(key)
        elif _ordered(one.values) and not min(one.values) < value < max(one.values):  # type: ignore[type-var]
            out.append(key)
    return out


def _ordered(values: Sequence[Value]) -> bool:
    """Whether a list has an inside: three numbers or more."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) == len(values) >= 3


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
