"""`--tensorboard`: the rounds of a run as TensorBoard event files, in RUN/tensorboard.

The event files say what metrics.jsonl says, and nothing else: whenever a run starts or goes on, the rounds already in
its log are written anew and older events of the same folder are declared void, so that no round is missing or shown
twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, RunError
from keyfed.files import BROKEN
from keyfed.run.folder import read_metrics, strict
from keyfed.run.loop import Listener

FOLDER = "tensorboard"


def scalars(record: Mapping[str, Any], moved: Mapping[str, float]) -> dict[str, float]:
    """Return what TensorBoard shows of a round; `moved` are all bytes up to and including it.

    A number that metrics.jsonl cannot hold (NaN, ∞) is null there and NaN here, which TensorBoard marks on the curve.
    """
    found: dict[str, Any] = {"train/loss": record["loss"]}
    for key in ("nats", "perplexity", "top1", "top3"):
        if record.get("valid"):
            found[f"valid/{key}"] = record["valid"][key]
    if record.get("privacy"):  # a private run tells neither its training loss nor who came
        found = {tag: value for tag, value in found.items() if tag != "train/loss"}
        found["privacy/epsilon"] = record["privacy"]["epsilon"]
    else:
        found["clients/effective"] = record["effective_clients"]
    found |= {f"bytes/{direction}": total for direction, total in moved.items()}
    if record["seconds"] is not None:  # a private federation does not tell how long its clients took
        found["time/seconds"] = record["seconds"]
    return {tag: math.nan if value is None else float(value) for tag, value in found.items()}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds in a run's log, of which TensorBoard shows all that it can."""
    records = read_metrics(folder)
    try:
        for record in records:
            scalars(record, {d: float(record["traffic"][d]) for d in ("down", "up")})
            float(record["elapsed"] or 0.0)
    except BROKEN as e:
        raise RunError(f"{folder / 'metrics.jsonl'} is damaged: a round's line has no {e}") from None
    return records


class EventWriter:
    """A listener that writes event files and hands everything on to another listener.

    A run that trains another one (`train.central`) starts a second time: that one is shown as a run of its
    own, RUN/tensorboard/central.
    """

    def __init__(self, run: Path, inner: Listener) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise ConfigError(
                f"--tensorboard needs the package tensorboard ({e}); install it with: pip install 'keyfed[tensorboard]'"
            ) from None
        self._open = SummaryWriter
        self._run = run
        self._inner = inner
        self._writer: Any = None
        self._moved = {"down": 0.0, "up": 0.0}
        self._began = 0.0
        self._starts = 0

    def say(self, line: str) -> None:
        """Hand a line of explanation on."""
        self._inner.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Open the event file and write what the log holds already."""
        # Only now: before its first round a run refuses a folder that is not empty.
        self.close()
        folder = "central" if self._starts else ""
        self._starts += 1
        logged = read_log(self._run / folder)[:done]
        self._moved = {"down": 0.0, "up": 0.0}
        # The time axis is the time trained, whatever lay between two sittings.
        self._began = time.time() - ((logged[-1]["elapsed"] or 0.0) if logged else 0.0)
        self._writer = self._open(str(self._run / FOLDER / folder), purge_step=1)
        for record in logged:
            self._write(record)
        self._writer.flush()
        self._inner.start(what, rounds, done)

    def round(self, record: dict[str, Any]) -> None:
        """Write a round's scalars, at once on the disk."""
        self._write(strict(record))
        self._writer.flush()
        self._inner.round(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        for direction in self._moved:
            self._moved[direction] += record["traffic"][direction]
        for tag, value in scalars(record, self._moved).items():
            self._writer.add_scalar(tag, value, record["round"], walltime=self._began + (record["elapsed"] or 0.0))

    def close(self) -> None:
        """Close the event file; what was written stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
