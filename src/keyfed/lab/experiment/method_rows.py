r"""From finished runs to one row a method: means and spread over seeds, cost of a target, order, what a start saves.

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
from pathlib import Path
from typing import Any

from keyfed.lab.experiment.compare_plan import ComparedMethod
from keyfed.lab.experiment.statistics import joint_margin, pooled
from keyfed.lab.experiment.store import failure_of
from keyfed.reports.document import NONE, finite, show, show_percent
from keyfed.run.console import human_bytes
from keyfed.run.start.weights import start_lines

Record = Mapping[str, Any]
MethodRow = dict[str, Any]
FIGURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One method with one seed: a run folder, and its result or the reason why there is none."""

    entry: ComparedMethod
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


def seed_summary(cell: ComparedRun, target: float | None) -> dict[str, Any]:
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


def row_of(entry: ComparedMethod, cells: Sequence[ComparedRun], target: float | None) -> MethodRow:
    """Return one method's row: the result of its first finished seed, and what all its seeds say together."""
    seeds = [seed_summary(cell, target) for cell in cells]
    done = [seed for seed in seeds if seed["error"] is None]
    first = next((cell.result for cell in cells if cell.result is not None), None)
    row: MethodRow = {
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
      change: ln(second / first) of their mean test perplexities.
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
    """Compare the first two methods as claims of studies are (`claims.RULE`); None where there are no two.

    m = t(ν) · s · √(1/n_1 + 1/n_2), with s pooled over the seeds of all methods of this table. `rows` are in order.
    """
    ranked = contenders(rows)
    if len(ranked) < 2:
        return None
    seeds = {row["label"]: [seed["test"]["perplexity"] for seed in row["seeds"]] for row in ranked}
    learnt = [row for row in ranked if not failure_of((value, row.get("vocabulary")) for value in seeds[row["label"]])]
    spread = pooled(seeds[row["label"]] for row in learnt)
    first, second = ((row["test_mean"]["perplexity"], (spread, len(seeds[row["label"]]))) for row in ranked[:2])
    return Lead(math.log(second[0] / first[0]), joint_margin(first[1], second[1], one_pool=True))


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
            "test": {**tests[0], **mean_scores(tests)},
            "test_spread": spread_scores(tests),
            "unseen": {**unseen[0], **mean_scores(unseen)} if unseen else None,
        }
    return out


SAVED = (
    "best_top1", "best_round", "reached_round", "rounds_saved", "bytes_saved", "plain_perplexity", "perplexity",
    "plain_top1", "top1",
)  # fmt: skip
SAVINGS = (
    "What a start saves: the target is the random start's best validation accuracy (top-1) of the same seed, and the "
    "round in which it first had it. Reached: the variant's first round with at least that accuracy. Saved: the "
    "difference, in rounds and in bytes (downloads, uploads and reports of all clients); negative where the variant "
    "took more. Where the random start's best is its last round it was still improving: more rounds would move the "
    "target. Test scores are written random start → variant; a mean over seeds is given where all of them have a "
    "value.",
)


def _top1(valid: Record) -> float | None:
    return finite(valid.get("top1"))


def best_accuracy(records: Iterable[Record]) -> tuple[float, int] | None:
    """Return the highest validation accuracy of a run and the first round that has it.

    Example:
      >>> best_accuracy([{"round": n, "valid": {"top1": a}} for n, a in ((1, 0.1), (2, 0.3), (3, 0.3))])
      (0.3, 2)
    """
    measured = [(_top1(record.get("valid") or {}), int(record["round"])) for record in records]
    known = [(value, number) for value, number in measured if value is not None]
    return max(known, key=lambda found: (found[0], -found[1]), default=None)


def savings(plain: ComparedRun, variant: ComparedRun) -> dict[str, Any]:
    """Return what a variant saved on the random start of the same seed."""
    out: dict[str, Any] = dict.fromkeys(SAVED)
    out |= {"seed": variant.seed, "error": plain.error or variant.error}
    if plain.result is None or variant.result is None:
        return out
    for prefix, cell in (("plain_", plain), ("", variant)):
        assert cell.result is not None
        out |= {f"{prefix}{key}": cell.result["test"].get(key) for key in ("perplexity", "top1")}
    best = best_accuracy(plain.records)
    if best is None:  # there is no validation text
        return out
    target, first = best

    def met(valid: Record) -> bool:
        measured = _top1(valid)
        return measured is not None and measured >= target

    before, after = spent_until(plain.records, met), spent_until(variant.records, met)
    out |= {"best_top1": target, "best_round": first, "reached_round": after.round}
    if after.round is not None:
        moved = plain.entry.config.method != "central"  # text that lies in one place moves nothing
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
        seeds = [savings(by_label[entry.plain][seed], cell) for seed, cell in runs.items()]
        done = [seed for seed in seeds if seed["error"] is None]
        found.append(
            {
                "variant": label,
                "plain": entry.plain,
                "rounds": entry.config.train.rounds,
                "seeds": seeds,
                "compared": len(done),
                "reached": sum(seed["reached_round"] is not None for seed in done),
                "mean": {key: mean_of([seed[key] for seed in done]) for key in SAVED},
                "spread": {key: spread_of([seed[key] for seed in done]) for key in SAVED},
            }
        )
    return found


def savings_table(found: Sequence[Record]) -> list[list[str]]:
    """Return the report as rows of text, the header first: every seed of every variant, then all seeds together."""
    table = [["variant", "seed", "random start's best top-1", "in round", "reached in round", "rounds saved",
              "bytes saved", "test perplexity", "test top-1"]]  # fmt: skip
    for one in found:
        for seed in one["seeds"]:
            table.append([one["variant"], str(seed["seed"]), *_cells(one, seed, {})])
        if len(one["seeds"]) > 1:
            table.append([one["variant"], "mean", *_cells(one, one["mean"], one["spread"])])
    return table


def _cells(one: Record, values: Record, spread: Record) -> list[str]:
    if values.get("error") is not None:
        return ["failed", *[NONE] * 6]
    return [
        _with(show_percent(values["best_top1"], 2), _points(spread.get("best_top1"))),
        _rounds(values, spread, "best_round"),
        _reached(one, values, spread),
        _rounds(values, spread, "rounds_saved"),
        _with(show_bytes(values["bytes_saved"]), show_bytes(spread.get("bytes_saved"))),
        " → ".join(_with(show(values[key]), show(spread.get(key))) for key in ("plain_perplexity", "perplexity")),
        " → ".join(
            _with(show_percent(values[key], 2), _points(spread.get(key))) for key in ("plain_top1", "top1")
        ),
    ]  # fmt: skip


def _with(value: str, spread: str) -> str:
    return value if NONE in (value, spread) else f"{value} ± {spread}"


def _points(spread: Any) -> str:
    number = finite(spread)
    return NONE if number is None else f"{number * 100:.2f}"


def _rounds(values: Record, spread: Record, key: str) -> str:
    number, around = finite(values[key]), finite(spread.get(key))
    if number is None:
        return NONE
    return f"{number:.1f} ± {around:.1f}" if around is not None else f"{number:.1f}".removesuffix(".0")


def _reached(one: Record, values: Record, spread: Record) -> str:
    """The round, or in how many rounds it was not reached; over seeds: by how many."""
    if finite(values["reached_round"]) is not None:
        return _rounds(values, spread, "reached_round")
    if finite(values["best_top1"]) is None:
        return NONE
    if values is one["mean"] and one["reached"]:
        return f"{one['reached']} of {one['compared']} seeds"
    return f"not reached in {one['rounds']} rounds"


def show_bytes(value: Any) -> str:
    """Write a number of bytes that may be negative.

    Example:
      >>> show_bytes(-2500), show_bytes(2.5e6), show_bytes(None)
      ('-2.5 kB', '2.5 MB', '–')
    """
    number = finite(value)
    return NONE if number is None else ("-" if number < 0 else "") + human_bytes(abs(number))


def savings_lines(found: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a sentence for each variant."""
    for one in found:
        mean, spread, seeds = one["mean"], one["spread"], one["compared"]
        if finite(mean["best_top1"]) is None:
            yield f"{one['variant']}: no validation accuracy to compare with {one['plain']}'s."
            continue
        over = f" (means of {seeds} seeds)" if seeds > 1 else ""
        best = (
            f"{one['plain']}'s best validation accuracy, {show_percent(mean['best_top1'], 2)} in round "
            f"{_rounds(mean, {}, 'best_round')}"
        )
        if one["reached"] < seeds:
            often = f"reached it in {one['reached']} of {seeds} seeds" if one["reached"] else "never reached it"
            yield f"{best}{over}: {one['variant']} {often} within {one['rounds']} rounds."
            continue
        saved, moved = _rounds(mean, spread, "rounds_saved"), show_bytes(mean["bytes_saved"])
        moved = "" if moved == NONE else f" and {_with(moved, show_bytes(spread['bytes_saved']))}"
        yield (
            f"{one['variant']} reached {best}, in round {_rounds(mean, {}, 'reached_round')}{over}: saved {saved} "
            f"rounds{moved}{', that is, it took more' if mean['rounds_saved'] < 0 else ''}."
        )


def start_notes(rows: Sequence[Record]) -> Iterable[str]:
    """Yield what each variant starts from, what is frozen for whom, and which random start is missing."""
    labels = {row["label"] for row in rows}
    for row in rows:
        start = {key: value for key, value in (row.get("start") or {}).items() if (key, value) != ("from", "random")}
        for line in start_lines(start) if row.get("starts") else ():
            yield f"{row['label']}: {line}."
        if row.get("starts") and row["plain"] not in labels:
            yield f"{row['label']} has no random start beside it: compare {row['plain']} too to see what it saves."
    frozen = [row for row in rows if row.get("frozen_rounds")]
    others = [row["label"] for row in rows if not row.get("frozen_rounds")]
    if frozen and others:
        yield (
            f"train.frozen_rounds = {frozen[0]['frozen_rounds']} is for what has a start; not frozen: "
            f"{', '.join(others)}."
        )
