"""What a study's cell keeps of curves.jsonl: training loss and accuracy by local batch and by epoch, a few points each.

Batches and epochs are counted on from round to round. A point is the mean per token over a stretch of them and stands
at the last one; stretches are equally long, but the first point is the very first batch or epoch.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

POINTS = 40  # of a curve that are kept
BY = ("batch", "epoch")  # what training is told by, beside the round
PLACES = {"train_nats": 1, "train_top1": 2}  # measures of training in a point


def training_curves(lines: Sequence[Mapping[str, Any]], passes: int = 1) -> dict[str, list[list[Any]]]:
    """Return {"batch": points, "epoch": points} of a run, a point being [number, nats per token, accuracy].

    Args:
      lines: those of curves.jsonl.
      passes: equal parts that a round's batches are cut into, for central training whose round reads as much as that
        many epochs of a cohort; its epochs are these parts.
    """
    batches: list[tuple[float, float, float]] = []
    epochs: list[tuple[float, float, float]] = []
    for line in lines:
        rows = _rows(line["batch"])
        batches += rows
        if passes > 1:
            cuts = [round(k * len(rows) / passes) for k in range(passes + 1)]
            epochs += [_mean(rows[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
        else:
            epochs += _rows(line["epoch"])
    return {"batch": stretches(batches), "epoch": stretches(epochs)}


def _rows(lists: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    """(loss, accuracy, tokens) of every batch or epoch whose loss is a number."""
    rows = zip(*(lists[key] for key in ("loss", "accuracy", "tokens")), strict=True)
    return [row for row in rows if row[0] is not None]


def stretches(rows: Sequence[Sequence[float]], most: int = POINTS) -> list[list[Any]]:
    """Return at most so many points of (loss, accuracy, tokens) rows, as [number of the last row, loss, accuracy].

    Example:
      >>> stretches([(4.0, 0.1, 10), (3.0, 0.2, 10), (1.0, 0.4, 10), (2.0, 0.3, 30), (2.0, 0.3, 10)], 3)
      [[1, 4.0, 0.1], [3, 2.0, 0.3], [5, 2.0, 0.3]]
    """
    if not rows:
        return []
    count = min(most, len(rows))
    cuts = [0, *(1 + round(k * (len(rows) - 1) / max(1, count - 1)) for k in range(count))]
    means = [(end, _mean(rows[start:end])) for start, end in itertools.pairwise(cuts)]
    return [[end, float(f"{loss:.5g}"), float(f"{accuracy:.5g}")] for end, (loss, accuracy, _) in means]


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean of (loss, accuracy, tokens) rows per token."""
    tokens = sum(row[2] for row in rows)
    return sum(row[0] * row[2] for row in rows) / tokens, sum(row[1] * row[2] for row in rows) / tokens, tokens


def seed_curves(records: Sequence[Mapping[str, Any]], by: str, measure: str) -> dict[float, list[float]]:
    """Every seed's value of a curve of training, point by point; cells that were run without curves have none."""
    curves = [record["training"][by] for record in records if record.get("training")]
    place = PLACES[measure]
    together = zip(*curves, strict=False)  # a seed may have a batch more than another
    return {
        statistics.fmean(p[0] for p in points): [p[place] for p in points]
        for points in together
        if all(p[place] is not None for p in points)
    }
