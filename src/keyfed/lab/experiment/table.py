"""What a study found: one row a configuration, mean and spread over seeds, written as the pages show it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keyfed.lab.experiment.check import SCALES
from keyfed.lab.experiment.grid import Cell, Labels, Study, cells_of
from keyfed.reports.document import NONE, finite, show

OPEN = "open"
ENOUGH = 0.25  # share of a scale's cells that makes a page of them
UNTRAINED, DIVERGED = 0.98, 1.5  # perplexities from these shares of the vocabulary's size on


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration of a study at a scale: its cells, and the results of those that are finished."""

    labels: Labels
    runner: str
    cells: tuple[Cell, ...]
    records: tuple[Mapping[str, Any], ...]

    @property
    def absent(self) -> str:
        """Why it is not run here; empty where it is."""
        return self.cells[0].absent

    def values(self, measure: str) -> list[float]:
        """The finite values of a measure, one a seed."""
        found = (finite(record["measures"].get(measure)) for record in self.records)
        return [value for value in found if value is not None]

    def mean(self, measure: str) -> float | None:
        """Mean over the finished seeds (`known`); None if there is none, or one of them has no finite value."""
        values = self.values(measure)
        return statistics.fmean(values) if values and len(values) == len(self.known(measure).records) else None

    def known(self, measure: str) -> Row:
        """The row of those seeds that a measure was taken of; one without a value has it too: it diverged or missed.

        A cell that another study has run has no rounds to targets which that study does not have.
        """
        return replace(self, records=tuple(record for record in self.records if measure in record["measures"]))

    def of_seeds(self, seeds: Container[int]) -> Row:
        """The row of some of its seeds."""
        return replace(self, records=tuple(record for record in self.records if record["seed"] in seeds))

    @property
    def seeds(self) -> set[int]:
        """Seeds that are finished."""
        return {int(record["seed"]) for record in self.records}

    def at_least(self, measure: str) -> tuple[float | None, bool]:
        """The mean, and whether it is only a lower bound: rounds to a target that was not reached are more than all.

        Of seeds that the measure was taken of (`known`).
        """
        records = self.known(measure).records
        if not measure.startswith("rounds_to") or not records:
            return self.mean(measure), False
        found = [finite(record["measures"][measure]) for record in records]
        limits = [finite(record.get("rounds")) for record in records]
        known = [limit if value is None else value for value, limit in zip(found, limits, strict=True)]
        values = [value for value in known if value is not None]
        return (statistics.fmean(values) if len(values) == len(known) else None), None in found

    @property
    def failure(self) -> str:
        """ "diverged" or "untrained" by the worst seed; else empty."""
        return failure_of((r["measures"].get("perplexity"), r.get("vocabulary")) for r in self.records)

    @property
    def tokens(self) -> str:
        """Tokens that the clients trained on in all rounds, the mean over seeds; empty where nothing was trained."""
        found = [int(r["tokens_trained"]) for r in self.records if r.get("tokens_trained")]
        mean = statistics.fmean(found) if found else 0.0
        return "" if not found else f"{mean / 1e6:,.1f} M" if mean >= 1e6 else f"{mean:,.0f}"

    @property
    def chosen(self) -> str:
        """The rounds whose models were chosen on validation: `8`, or `8–12`; empty where there is none."""
        found = sorted(int(r["best_round"]) for r in self.records if r.get("best_round"))
        return "" if not found else "–".join(map(str, dict.fromkeys((found[0], found[-1]))))

    @property
    def eval_every(self) -> int:
        """Rounds between two validations, the most of all seeds."""
        return max((int(r.get("settings", {}).get("train.eval_every", 1)) for r in self.records), default=1)

    @property
    def shuffle_keys(self) -> set[tuple[Any, ...]]:
        """What the shuffles of the test hang on, seed by seed; empty where a seed has none."""
        keys = {
            (r["seed"], r.get("data_sha256"), r.get("settings", {}).get("study.share"), r["shuffles"]["count"])
            for r in self.records
            if r.get("shuffles")
        }
        return keys if len(keys) == len(self.records) else set()

    def evaluation(self) -> tuple[float, int] | None:
        """Standard deviation of one evaluation and its degrees of freedom, where it depends on a shuffle."""
        shuffles = [record["shuffles"] for record in self.records if record.get("shuffles")]
        freedom = sum(int(s["count"]) - 1 for s in shuffles if s["sd"] is not None)
        if not freedom:
            return None
        squares = sum((int(s["count"]) - 1) * float(s["sd"]) ** 2 for s in shuffles if s["sd"] is not None)
        return math.sqrt(squares / freedom), freedom


def failure_of(runs: Iterable[tuple[Any, Any]]) -> str:
    """ "diverged" far above the perplexity of guessing all words alike, "untrained" about there; else empty.

    Args:
      runs: perplexity and size of the vocabulary of each; one without both says nothing.

    Example:
      >>> failure_of([(120.0, 10_000), (9_990.0, 10_000)]), failure_of([(120.0, 10_000), (None, 10_000)])
      ('untrained', '')
    """
    found = [(finite(value), finite(size)) for value, size in runs]
    worst = max((value / size for value, size in found if value is not None and size), default=0.0)
    return "diverged" if worst > DIVERGED else "untrained" if worst > UNTRAINED else ""


def rows_of(study: Study, scale: str, results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Group a study's cells by configuration, in the order of the grid; seeds beyond the scale's count too."""
    planned = cells_of(study, scale)
    more = sorted({int(r["seed"]) for r in results.values()} - {cell.seed for cell in planned})
    extra = cells_of(study, scale, more) if more else []
    grouped: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in planned:
        grouped.setdefault((cell.runner, *cell.labels.items()), []).append(cell)
    for cell in extra:
        if cell.id in results:
            grouped[cell.runner, *cell.labels.items()].append(cell)
    return [
        Row(cells[0].labels, cells[0].runner, tuple(cells), tuple(results[c.id] for c in cells if c.id in results))
        for cells in grouped.values()
    ]


def main_scale(study: Study, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The scale that a page is about; None if nothing is finished.

    Of those above `smoke`, at which nothing is judged, the one with the largest share of its cells finished, unless
    that is less than `ENOUGH`; then the one with most finished cells.
    """
    counts = {scale: counted(study, scale, results) for scale in study.scales}
    found = {scale: (done, left) for scale, (done, left) in counts.items() if done}
    shares = {s: done / (done + left) for s, (done, left) in found.items() if s != "smoke"}
    enough = {s: share for s, share in shares.items() if share >= ENOUGH}
    if enough:
        return max(enough, key=lambda s: (enough[s], SCALES.index(s)))
    return max(found, key=lambda s: (found[s][0], -found[s][1], SCALES.index(s))) if found else None


def counted(study: Study, scale: str, results: Mapping[str, Any]) -> tuple[int, int]:
    """Count the finished and the open cells of a scale; seeds beyond its own are neither."""
    cells = [cell for cell in cells_of(study, scale) if not cell.absent]
    done = sum(cell.id in results for cell in cells)
    return done, len(cells) - done


def place(row: Row, without: Iterable[str] = ()) -> str:
    """A row in words."""
    left_out = set(without)
    return ", ".join(
        label if not label.replace(".", "").isdigit() else f"{axis} = {label}"
        for axis, label in row.labels.items()
        if axis not in left_out
    )


def write_value(value: float | None, measure: str) -> str:
    """Write a measure: perplexities as everywhere, shares as percentages, nats with three decimals, rounds whole."""
    if value is None:
        return NONE
    if measure.removeprefix("sentence_").startswith(("top", "accuracy", "oov")) or measure.endswith("_accuracy"):
        return f"{100 * value:.2f} %"
    if measure.endswith(("nats", "_entropy")):
        return f"{value:.3f}"
    if measure.startswith("rounds_to"):
        return f"{value:.1f}".removesuffix(".0")
    return show(value)


def write_printed(value: float | None, measure: str) -> str:
    """Write a printed figure with all its digits, up to six, or four of a percentage; zeros at the end are lost.

    Example:
      >>> write_printed(115.43, "perplexity"), write_printed(123.00, "perplexity"), write_printed(0.1640, "top1")
      ('115.43', '123', '16.4 %')
    """
    if value is None:
        return NONE
    return f"{100 * value:.4g} %" if write_value(value, measure).endswith("%") else f"{value:.6g}"


def write_seeds(row: Row, measure: str) -> str:
    """Write every seed's value."""
    return ", ".join(write_value(value, measure) for value in row.values(measure))


def write_row(row: Row, measure: str) -> str:
    """Write mean ± standard deviation over seeds (number of seeds)."""
    if row.absent:
        return "absent"
    if not row.records:
        return OPEN
    row = row.known(measure)
    if not row.records:
        return NONE
    mean, values = row.mean(measure), row.values(measure)
    one = row.evaluation() if measure == "perplexity" and mean is not None else None
    after = "" if one is None else f"; one evaluation ± {one[0]:.1f}"
    after += f"; {row.failure}" if measure == "perplexity" and row.failure else ""
    if mean is None:
        missing = len(row.records) - len(values)
        if measure.startswith("rounds_to"):
            return "not reached" if not values else f"not reached by {missing} of {len(row.records)} seeds"
        return "diverged" if not values else f"diverged with {missing} of {len(row.records)} seeds"
    if len(values) == 1:
        return write_value(mean, measure) + after
    scale = 100 if write_value(mean, measure).endswith("%") else 1
    digits = {"nats": 3, "train_nats": 3}.get(measure, 1 if mean >= 100 else 2)
    return f"{write_value(mean, measure).removesuffix(' %')} ± {scale * statistics.stdev(values):.{digits}f}" + (
        " %" if scale == 100 else after
    )
