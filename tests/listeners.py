"""A listener that keeps what it hears, and ends a run where a test wants it."""

from __future__ import annotations

from typing import Any

from keyfed.run.console import Silent


class Heard(Silent):
    """Keeps every line, where rounds began and which ended.

    Args:
      stop: the round after which the run ends.
      count: the same, as a number of rounds of all runs together.
      by: what ends it; Ctrl-C unless said otherwise.
    """

    def __init__(self, stop: int | None = None, *, count: int | None = None, by: BaseException | None = None) -> None:
        self.stop, self.count, self.by = stop, count, by or KeyboardInterrupt()
        self.lines: list[str] = []
        self.begun: list[int] = []
        self.rounds: list[int] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        self.begun.append(done)

    def round(self, record: dict[str, Any]) -> None:
        self.rounds.append(record["round"])
        if record["round"] == self.stop or len(self.rounds) == self.count:
            raise self.by
