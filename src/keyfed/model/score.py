"""What is counted of predictions on held-out text, in one form from a client's message to a report."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over predicted tokens; scores add. "Words" are targets that are neither <unk> nor <eos>."""

    tokens: int = 0
    nats: float = 0.0
    top1: int = 0
    top3: int = 0
    words: int = 0
    words_top1: int = 0
    words_top3: int = 0
    unknown: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Score)))

    @property
    def mean_nats(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean nats); infinite rather than an overflow."""
        return math.exp(self.mean_nats) if self.mean_nats < 700 else math.inf

    def summary(self) -> dict[str, Any]:
        """Return the figures a report shows."""

        def share(hits: int, of: int) -> float:
            return hits / of if of else math.nan

        return {
            "perplexity": self.perplexity,
            "nats": self.mean_nats,
            "top1": share(self.top1, self.tokens),
            "top3": share(self.top3, self.tokens),
            "top1_words": share(self.words_top1, self.words),
            "top3_words": share(self.words_top3, self.words),
            "oov_rate": share(self.unknown, self.tokens),
            "tokens": self.tokens,
        }
