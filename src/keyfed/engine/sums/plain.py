"""The sum of a round whose reports stay with the clients, in the clear and in this process.

The reference that a masked sum is compared with, and the way to a noised one. `secure_simulation.SecureSum` has the
same verbs and masks what it adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keyfed.engine.sums.gather import Gathering, HiddenRound, kept
from keyfed.engine.sums.secure_round import counts_of, report_of, weighed
from keyfed.engine.task import Finished
from keyfed.federated.public.numbers import USUAL_RATIO
from keyfed.federated.types import Aggregate, ClientId, Facts, Refusal


class HiddenSum:
    """Adds uploads to a plain sum, each weighed by public numbers, and the facts told along beside it.

    Before the first round there are no public numbers: uploads are kept until they have been made of everybody's
    histograms.

    Args:
      ratio: r of the secure sum whose weights these are; by default the largest that any has.
    """

    costs: Mapping[str, Any] | None = None

    def __init__(self, hidden: HiddenRound, inner: Gathering, ratio: float = USUAL_RATIO) -> None:
        rule = hidden.method.mediator.private
        assert rule is not None, "a hidden method has a private rule"
        self._rule, self._hidden, self._inner = rule, hidden, inner
        self._ratio = ratio
        self._layers, self._public = list(hidden.theta), hidden.public
        self._facts: Facts = {}
        self._waiting: dict[ClientId, Finished] = {}

    def add(self, client: ClientId, done: Finished) -> None:
        """Add one client, or keep it until the first public numbers are there."""
        if not self._public["calibrated"]:
            self._waiting[client] = kept(done)
            return
        method = self._hidden.method
        share, told = weighed(
            report_of(client, done), self._layers, method, self._public, self._ratio, silent=method.uploading < 1
        )
        self._inner.add(client, done.upload, share)
        _add_up(self._facts, told | {name: [x] for name, x in counts_of(done).items()})

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum; nobody's weight is in it."""
        if not self._public["calibrated"] and self._waiting:
            sums: Facts = {}
            for client, done in self._waiting.items():
                _add_up(sums, self._rule.first(report_of(client, done), self._layers))
            self._public = self._rule.start(self._public, sums | {"ratio": [self._ratio]})
            for client, done in self._waiting.items():
                self.add(client, done)
        summed = self._inner.aggregate(refused)
        facts = self._facts | {"ratio": [self._ratio]}
        return replace(summed, weights=None, facts=facts, public=self._public)


def _add_up(sums: Facts, told: Facts) -> None:
    for name, numbers in told.items():
        before = sums.get(name, [0.0] * len(numbers))
        sums[name] = [a + b for a, b in zip(before, numbers, strict=True)]
