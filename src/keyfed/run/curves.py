"""`--curves`: the learning curves of local training in RUN/curves.jsonl, one line a round.

A line has, over the clients whose report was taken:

- `batch`: lists by local step, epoch after epoch: the `epoch` it is of (from 1), `loss` (Σ nats / Σ tokens) and
  `accuracy` (Σ right first guesses / Σ tokens) over the `clients` that took this step, and their `tokens`. A client
  with fewer steps an epoch drops out of the later ones.
- `epoch`: the same by local epoch, over all its steps.
- `by_client`: each client's own loss, accuracy and tokens by epoch, in rounds of at most 100 clients.

Central training is one client; its epoch is what a round reads. The figures are those of the forward pass that a
step's gradient is taken from: before the step, with dropout. Counting right guesses costs one more product of the
output layer a step, on a GPU inside the captured step; no weight changes by a bit. Each step's figures stay on the
device until the clients are done.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from keyfed.engine.curves import CohortCurves
from keyfed.errors import RunError
from keyfed.run.folder import append_line

FILE = "curves.jsonl"
LINE = "curves: loss and accuracy of every local batch go to curves.jsonl, for one more output product a step"


def append_curves(folder: Path, round: int, curves: CohortCurves | None) -> None:
    """Write a round's line; a round in which nobody trained has an empty one."""
    append_line(folder / FILE, {"round": round, **(curves or CohortCurves()).line()})


def cut_curves(folder: Path, rounds: int) -> None:
    """Keep the lines of the first rounds; those written after the checkpoint will be written again."""
    path = folder / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if len(lines) < rounds:  # each was on the disk before its checkpoint was
        raise RunError(
            f"{path} has {len(lines)} lines, and the checkpoint is of round {rounds}; start again with another --out"
        )
    if path.exists():
        os.truncate(path, sum(map(len, lines[:rounds])))


def read_curves(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of curves.jsonl; none where the run was not asked for them."""
    path = folder / FILE
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    except ValueError as e:
        raise RunError(f"{path} is damaged: {e}") from None
