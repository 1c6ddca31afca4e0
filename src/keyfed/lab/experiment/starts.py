r"""What a start saves: the fine-tuning report of a comparison.

For a seed, with a(r) the validation accuracy (top-1) after round r of the random start and b(r) that of the variant,

    target  A = max_r a(r), first reached in round r₀        reached  r₁ = min {r : b(r) ≥ A}
    rounds saved  r₀ − r₁                                    bytes saved  B(r₀) − B′(r₁)

where B(r) is the traffic of all clients up to and including round r. Both are negative where the variant was slower,
and unknown where it never got there. Over seeds: mean ± sample standard deviation, or nothing where a seed has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keyfed.lab.experiment.compare_rows import Cell, Record, mean_of, spent_until, spread_of
from keyfed.reports.document import NONE, finite, show, show_percent
from keyfed.run.console import human_bytes
from keyfed.run.start.weights import start_lines

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


def savings(plain: Cell, variant: Cell) -> dict[str, Any]:
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


def fine_tuning(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return for each variant whose random start was compared too: what it saved, by seed and over all seeds."""
    by_label: dict[str, dict[int, Cell]] = {}
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
