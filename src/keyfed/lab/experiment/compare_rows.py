"""From finished runs to rows: means and spread over seeds, what it took to reach a target, order, who is best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.lab.experiment.compare_plan import Entry
from keyfed.reports.document import finite

Record = Mapping[str, Any]
Row = dict[str, Any]
FIGURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words")


@dataclass(frozen=True, slots=True)
class Cell:
    """One method with one seed: a run folder, and its result or the reason why there is none."""

    entry: Entry
    seed: int
    folder: Path
    result: dict[str, Any] | None
    records: Sequence[Record] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """What a run spent until its validation met a target, or in all where it never did.

    Attributes:
      round: the first round that met it; None: not reached.
      bytes: uploads and downloads of all clients.
      modelled_seconds: time on the modelled network; None where rounds do not have it.
    """

    round: int | None
    bytes: int
    modelled_seconds: float | None


def reach(records: Iterable[Record], target: float) -> Reached:
    """Add a run's costs up to the first round whose validation perplexity is at most `target`.

    Example:
      >>> rounds = [{"round": n, "traffic": {"down": 10, "up": 5}, "valid": {"perplexity": 100 / n}} for n in (1, 2, 3)]
      >>> reach(rounds, 60)
      Reached(round=2, bytes=30, modelled_seconds=None)
      >>> reach(rounds, 1)
      Reached(round=None, bytes=45, modelled_seconds=None)
    """

    def met(valid: Record) -> bool:
        measured = finite(valid.get("perplexity"))
        return measured is not None and measured <= target

    return spent_until(records, met)


def spent_until(records: Iterable[Record], met: Callable[[Record], bool]) -> Reached:
    """Add a run's costs up to the first round whose validation scores are as wanted."""
    moved, seconds = 0, None
    for record in records:
        traffic = record.get("traffic") or {}
        moved += sum(traffic.values())
        if "modelled_seconds" in record:
            seconds = (seconds or 0.0) + record["modelled_seconds"]
        if met(record.get("valid") or {}):
            return Reached(int(record["round"]), moved, seconds)
    return Reached(None, moved, seconds)


def best_validation(records: Iterable[Record]) -> float | None:
    """Return the lowest finite validation perplexity of a run."""
    measured = (finite((record.get("valid") or {}).get("perplexity")) for record in records)
    return min((value for value in measured if value is not None), default=None)


def common_target(bests: Iterable[tuple[str, float | None]]) -> float | None:
    """Return the perplexity that every run reached: the highest of the runs' best.

    FedSGD takes one step a round and lies so far behind that its best would be reached by all others at once; it counts
    only if nothing else is there. A run that has no finite value does not count.

    Example:
      >>> common_target([("fedavg", 210.0), ("fedatt", 230.0), ("fedsgd", 900.0), ("fedadam", None)])
      230.0
      >>> common_target([("fedsgd", 900.0), ("fedsgd", 800.0)])
      900.0
    """
    finished = [(method, value) for method, value in bests if value is not None]
    others = [value for method, value in finished if method != "fedsgd"]
    return max(others or [value for _, value in finished], default=None)


def mean_of(values: Sequence[Any]) -> float | None:
    """Return the mean, or None where there is no value or one is not finite: half a mean would flatter."""
    numbers = [finite(value) for value in values]
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known and len(known) == len(numbers) else None


def spread_of(values: Sequence[Any]) -> float | None:
    """Return the sample standard deviation of at least two finite values.

    Example:
      >>> spread_of([1.0, 3.0]), spread_of([1.0]), spread_of([1.0, None])
      (1.4142135623730951, None, None)
    """
    return statistics.stdev(values) if len(values) > 1 and mean_of(values) is not None else None


def mean_scores(scores: Sequence[Record]) -> dict[str, float | None]:
    """Return the mean of every figure over seeds."""
    return {key: mean_of([score.get(key) for score in scores]) for key in FIGURES}


def spread_scores(scores: Sequence[Record]) -> dict[str, float | None]:
    """Return the sample standard deviation of every figure over seeds."""
    return {key: spread_of([score.get(key) for score in scores]) for key in FIGURES}


def seed_summary(cell: Cell, target: float | None) -> dict[str, Any]:
    """Return what one seed of a method gave."""
    out: dict[str, Any] = {"seed": cell.seed, "run": str(cell.folder), "error": cell.error}
    if cell.result is None:
        return out
    reached = Reached(None, reach(cell.records, -1.0).bytes, None) if target is None else reach(cell.records, target)
    traffic = cell.result["traffic"]
    out |= {
        "test": cell.result["test"],
        "unseen": cell.result["unseen"],
        "privacy": cell.result.get("privacy"),
        "best_round": cell.result["best_round"],
        "best_valid": best_validation(cell.records),
        "rounds_to_target": reached.round,
        "bytes_to_target": None if reached.round is None else reached.bytes,
        "bytes": sum(traffic.values()),
        "tokens_trained": cell.result["tokens_trained"],
        "seconds": cell.result["seconds"],
        # A record's number is the mean over layers, so that this one is over rounds and layers.
        "effective_clients": mean_of([record.get("effective_clients") for record in cell.records]),
    }
    if reached.modelled_seconds is not None:
        out["modelled_seconds_to_target"] = None if reached.round is None else reached.modelled_seconds
    return out


def row_of(entry: Entry, cells: Sequence[Cell], target: float | None) -> Row:
    """Return one method's row: the result of its first finished seed, and what all its seeds say together."""
    seeds = [seed_summary(cell, target) for cell in cells]
    done = [seed for seed in seeds if seed["error"] is None]
    first = next((cell.result for cell in cells if cell.result is not None), None)
    row: Row = {
        **(first or {"method": entry.config.method}),
        "label": entry.label,
        "folder": entry.folder,
        "starts": list(entry.starts),
        "plain": entry.plain,
        "frozen_rounds": entry.config.train.frozen_rounds,
        "rounds": entry.config.train.rounds,
        "failed": {str(seed["seed"]): seed["error"] for seed in seeds if seed["error"] is not None},
        "test_mean": mean_scores([seed["test"] for seed in done]),
        "test_spread": spread_scores([seed["test"] for seed in done]),
        "unseen_mean": mean_scores([seed["unseen"] for seed in done if seed["unseen"]]),
        "reached": sum(seed["rounds_to_target"] is not None for seed in done),
        "seeds": seeds,
    }
    averaged = ["rounds_to_target", "bytes_to_target", "bytes", "tokens", "seconds", "effective_clients"]
    if any("modelled_seconds_to_target" in seed for seed in done):
        averaged.append("modelled_seconds_to_target")
    for key in averaged:
        row[key] = mean_of([seed.get("tokens_trained" if key == "tokens" else key) for seed in done])
    return row


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by mean test perplexity; those that are not finite, then those with a failed run, come last.

    All rows get the same keys, so that one that failed is read like any other.
    """
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row)

    def place(row: Row) -> tuple[bool, bool, float]:
        mean = row["test_mean"]["perplexity"]
        return bool(row["failed"]), mean is None, mean or 0.0

    return [{key: row.get(key) for key in keys} for row in sorted(rows, key=place)]


def contenders(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that can be ranked: no run failed, the mean is finite."""
    return [row for row in rows if not row["failed"] and row["test_mean"]["perplexity"] is not None]


def best_of(rows: Sequence[Row]) -> str | None:
    """Return the label of the best method, if seeds can tell.

    At least two seeds, and its mean test perplexity differs from the second's by more than the larger of their two
    spreads. `rows` are in order.
    """
    ranked = contenders(rows)
    if len(ranked) < 2:
        return None
    first, second = ranked[:2]
    spreads = [row["test_spread"]["perplexity"] for row in (first, second)]
    if any(spread is None for spread in spreads):
        return None
    gap = second["test_mean"]["perplexity"] - first["test_mean"]["perplexity"]
    return str(first["label"]) if gap > max(spreads) else None


def mean_baselines(by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the baselines' scores averaged over seeds, shaped as a run's own."""
    out: dict[str, Any] = {}
    for key in by_seed[0] if by_seed else ():
        found = [baselines[key] for baselines in by_seed]
        tests, unseen = [b["test"] for b in found], [b["unseen"] for b in found if b["unseen"]]
        out[key] = {
            **found[0],
            "test": {**tests[0], **mean_scores(tests)},
            "test_spread": spread_scores(tests),
            "unseen": {**unseen[0], **mean_scores(unseen)} if unseen else None,
        }
    return out
