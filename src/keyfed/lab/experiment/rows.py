r"""From the finished runs of a comparison to one row a method: means over seeds, cost of a target, what a start saves.

For a seed, with a(r) the validation accuracy (top-1) after round r of the random start and b(r) that of the variant,

    target  A = max_r a(r), first reached in round r₀        reached  r₁ = min {r : b(r) ≥ A}
    rounds saved  r₀ − r₁                                    bytes saved  B(r₀) − B′(r₁)

where B(r) is the traffic of all clients up to and including round r. Both are negative where the variant was slower,
and unknown where it never got there. Over seeds: mean ± sample standard deviation, or nothing where a seed has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.lab.experiment.claims import pooled_pairs
from keyfed.lab.experiment.compare import ComparedMethod, ComparedRun
from keyfed.lab.experiment.store import failure_of, mean_of, spread_of
from keyfed.reports.document import finite

Record = Mapping[str, Any]
MethodRow = dict[str, Any]
FIGURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words")
AVERAGED = ("rounds_to_target", "bytes_to_target", "bytes", "tokens_trained", "seconds", "effective_clients",
            "modelled_seconds_to_target")  # fmt: skip
SAVED = ("best_top1", "best_round", "reached_round", "rounds_saved", "bytes_saved", "plain_perplexity", "perplexity",
         "plain_top1", "top1")  # fmt: skip


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
    return _spent_until(records, "perplexity", lambda measured: measured <= target)


def _spent_until(records: Iterable[Record], key: str, met: Callable[[float], bool]) -> Reached:
    """Add a run's costs up to the first round whose validation figure is as wanted."""
    moved, seconds = 0, None
    for record in records:
        moved += sum((record.get("traffic") or {}).values())
        if "modelled_seconds" in record:
            seconds = (seconds or 0.0) + record["modelled_seconds"]
        measured = _valid(record, key)
        if measured is not None and met(measured):
            return Reached(int(record["round"]), moved, seconds)
    return Reached(None, moved, seconds)


def _valid(record: Record, key: str) -> float | None:
    return finite((record.get("valid") or {}).get(key))


def best_validation(records: Iterable[Record]) -> float | None:
    """Return the lowest finite validation perplexity of a run."""
    return min((value for r in records if (value := _valid(r, "perplexity")) is not None), default=None)


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


def over_seeds(
    of_seeds: Sequence[Record], keys: Iterable[str], how: Callable[[Sequence[Any]], float | None] = mean_of
) -> dict[str, float | None]:
    """Return the mean, or what else `how` says, of figures over seeds."""
    return {key: how([one.get(key) for one in of_seeds]) for key in keys}


def _seed_summary(cell: ComparedRun, target: float | None) -> dict[str, Any]:
    """Return what one seed of a method gave."""
    out: dict[str, Any] = {"seed": cell.seed, "run": str(cell.folder), "error": cell.error}
    if cell.result is None:
        return out
    reached = Reached(None, 0, None) if target is None else reach(cell.records, target)
    found = reached.round is not None
    out |= {
        **{key: cell.result.get(key) for key in ("test", "unseen", "privacy", "best_round")},
        "best_valid": best_validation(cell.records),
        "rounds_to_target": reached.round,
        "bytes_to_target": reached.bytes if found else None,
        "bytes": sum(cell.result["traffic"].values()),
        **{key: cell.result[key] for key in ("tokens_trained", "seconds")},
        # A record's number is the mean over layers, so that this one is over rounds and layers.
        "effective_clients": mean_of([record.get("effective_clients") for record in cell.records]),
    }
    if reached.modelled_seconds is not None:
        out["modelled_seconds_to_target"] = reached.modelled_seconds if found else None
    return out


def row_of(entry: ComparedMethod, cells: Sequence[ComparedRun], target: float | None) -> MethodRow:
    """Return one method's row: the result of its first finished seed, and what all its seeds say together."""
    seeds = [_seed_summary(cell, target) for cell in cells]
    done = [seed for seed in seeds if seed["error"] is None]
    tests = [seed["test"] for seed in done]
    means = over_seeds(done, AVERAGED)
    means["tokens"] = means.pop("tokens_trained")
    if not any("modelled_seconds_to_target" in seed for seed in done):
        del means["modelled_seconds_to_target"]
    return {
        **next((cell.result for cell in cells if cell.result is not None), {"method": entry.method}),
        "label": entry.label,
        "folder": entry.folder,
        "starts": list(entry.starts),
        "plain": entry.plain,
        "frozen_rounds": entry.config.train.frozen_rounds,
        "rounds": entry.config.train.rounds,
        "failed": {str(seed["seed"]): seed["error"] for seed in seeds if seed["error"] is not None},
        "test_mean": over_seeds(tests, FIGURES),
        "test_spread": over_seeds(tests, FIGURES, spread_of),
        "unseen_mean": over_seeds([seed["unseen"] for seed in done if seed["unseen"]], FIGURES),
        "reached": sum(seed["rounds_to_target"] is not None for seed in done),
        "seeds": seeds,
        **means,
    }


def in_order(rows: Iterable[MethodRow]) -> list[MethodRow]:
    """Sort rows by mean test perplexity; those that are not finite, then those with a failed run, come last.

    All rows get the same keys, so that one that failed is read like any other.
    """
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row)

    def place(row: MethodRow) -> tuple[bool, bool, float]:
        mean = row["test_mean"]["perplexity"]
        return bool(row["failed"]), mean is None, mean or 0.0

    return [{key: row.get(key) for key in keys} for row in sorted(rows, key=place)]


def contenders(rows: Iterable[MethodRow]) -> list[MethodRow]:
    """Return the rows that can be ranked: no run failed, the mean is finite."""
    return [row for row in rows if not row["failed"] and row["test_mean"]["perplexity"] is not None]


@dataclass(frozen=True, slots=True)
class Lead:
    """How far the second method lies behind the first.

    Attributes:
      change: mean over seeds of ln(second / first) of their test perplexities.
      margin: how far that may be from 0 by chance; None where no method has two seeds.
    """

    change: float
    margin: float | None

    @property
    def is_sure(self) -> bool:
        """Whether it is more than chance."""
        return self.margin is not None and self.change > self.margin

    @property
    def in_words(self) -> str:
        """By how much the second is higher, and the interval of that where there is one that means something."""
        low, high = (_percent(self.change + off * (self.margin or 0.0)) for off in (-1, 1))
        interval = f" ({low} to {high} at 95 % confidence)"
        return f"{_percent(self.change)} higher" + interval * (self.margin is not None and self.change <= FAR)


FAR = math.log(101)  # one method learnt nothing: its spread is not that of the others


def _percent(change: float) -> str:
    """A difference of logarithms as a share; of one that diverged only that it is large."""
    return f"{100 * math.expm1(change):.1f} %" if change <= FAR else "more than 10,000 %"


def lead_of(rows: Sequence[MethodRow]) -> Lead | None:
    """Compare the first two methods as claims of studies are (`claims.py`); None where there are no two.

    The change is the mean over seeds of ln(second / first), m = t(ν) · s / √n. s is the standard deviation over seeds
    of the logarithms of every method over the first, pooled over the methods of this table. `rows` are in order.
    """
    ranked = contenders(rows)
    if len(ranked) < 2:
        return None
    first, *others = ([math.log(seed["test"]["perplexity"]) for seed in row["seeds"]] for row in ranked)
    behind = [[b - a for a, b in zip(first, other, strict=True)] for other in others]
    pairs = [(frozenset((0, place)), change) for place, change in enumerate(behind, start=1)]
    learnt = [
        pair
        for row, pair in zip(ranked[1:], pairs, strict=True)
        if not failure_of((seed["test"]["perplexity"], row.get("vocabulary")) for seed in row["seeds"])
    ]
    # Where no other method learnt, the pair itself has to do.
    return Lead(statistics.fmean(behind[0]), pooled_pairs(dict(learnt or [pairs[0]])).margin(len(first)))


def best_of(rows: Sequence[MethodRow]) -> str | None:
    """Return the label of the best method, if seeds can tell. `rows` are in order."""
    lead = lead_of(rows)
    return str(contenders(rows)[0]["label"]) if lead is not None and lead.is_sure else None


def mean_baselines(by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the baselines' scores averaged over seeds, shaped as a run's own."""
    out: dict[str, Any] = {}
    for key in by_seed[0] if by_seed else ():
        found = [baselines[key] for baselines in by_seed]
        tests, unseen = [b["test"] for b in found], [b["unseen"] for b in found if b["unseen"]]
        out[key] = {
            **found[0],
            "test": {**tests[0], **over_seeds(tests, FIGURES)},
            "test_spread": over_seeds(tests, FIGURES, spread_of),
            "unseen": {**unseen[0], **over_seeds(unseen, FIGURES)} if unseen else None,
        }
    return out


def best_accuracy(records: Iterable[Record]) -> tuple[float, int] | None:
    """Return the highest validation accuracy of a run and the first round that has it.

    Example:
      >>> best_accuracy([{"round": n, "valid": {"top1": a}} for n, a in ((1, 0.1), (2, 0.3), (3, 0.3))])
      (0.3, 2)
    """
    known = [(value, int(r["round"])) for r in records if (value := _valid(r, "top1")) is not None]
    return max(known, key=lambda found: (found[0], -found[1]), default=None)


def _savings(plain: ComparedRun, variant: ComparedRun) -> dict[str, Any]:
    """Return what a variant saved on the random start of the same seed."""
    out: dict[str, Any] = dict.fromkeys(SAVED)
    out |= {"seed": variant.seed, "error": plain.error or variant.error}
    if plain.result is None or variant.result is None:
        return out
    for prefix, result in (("plain_", plain.result), ("", variant.result)):
        out |= {f"{prefix}{key}": result["test"].get(key) for key in ("perplexity", "top1")}
    best = best_accuracy(plain.records)
    if best is None:  # there is no validation text
        return out
    target, first = best
    before, after = (_spent_until(run.records, "top1", lambda found: found >= target) for run in (plain, variant))
    out |= {"best_top1": target, "best_round": first, "reached_round": after.round}
    if after.round is not None:
        moved = plain.entry.method != "central"  # text that lies in one place moves nothing
        out |= {"rounds_saved": first - after.round, "bytes_saved": before.bytes - after.bytes if moved else None}
    return out


def fine_tuning(cells: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return for each variant whose random start was compared too: what it saved, by seed and over all seeds."""
    by_label: dict[str, dict[int, ComparedRun]] = {}
    for cell in cells:
        by_label.setdefault(cell.entry.label, {})[cell.seed] = cell
    found = []
    for label, runs in by_label.items():
        entry = next(iter(runs.values())).entry
        if not entry.starts or entry.plain not in by_label:
            continue
        seeds = [_savings(by_label[entry.plain][seed], cell) for seed, cell in runs.items()]
        done = [seed for seed in seeds if seed["error"] is None]
        found.append(
            {
                "variant": label,
                "plain": entry.plain,
                "rounds": entry.config.train.rounds,
                "seeds": seeds,
                "compared": len(done),
                "reached": sum(seed["reached_round"] is not None for seed in done),
                "mean": over_seeds(done, SAVED),
                "spread": over_seeds(done, SAVED, spread_of),
            }
        )
    return found
