"""Sums in the clear: of weighed uploads (`RunningSum`), trimmed (`TrimmedSum`), of clients that weigh themselves
(`SelfWeighedSum`).

`SelfWeighedSum` is the reference that a masked sum is compared with. `masked.SecureSum` has the same verbs and masks
what it adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from keyfed.engine.sums.secure_round import counts_of, weighed
from keyfed.engine.task import Finished, kept, report_of
from keyfed.federated.public.numbers import USUAL_RATIO
from keyfed.federated.soundness import PIECE
from keyfed.federated.types import (
    Accumulator,
    Aggregate,
    Caps,
    ClientId,
    Facts,
    LayerNumbers,
    Method,
    Params,
    Public,
    Refusal,
    Share,
)


class RunningSum:
    """total^l += scale_k^l · upload_k^l, one client at a time, in the order they come.

    Shares with a logarithm are summed relative to the largest one so far; when a larger one comes, what is there is
    scaled down. The mean is that of a softmax over all, and nothing overflows.
    """

    def __init__(self, like: Params) -> None:
        self.total = {name: torch.zeros_like(p) for name, p in like.items()}
        self.mass = dict.fromkeys(like, 0.0)
        self.weight = dict.fromkeys(like, 0.0)
        self.squares = dict.fromkeys(like, 0.0)
        self._peak: dict[str, float] = {}
        self._shares: dict[ClientId, Share] = {}

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client."""
        alike: dict[float, list[str]] = {}  # layers by their factor: a GPU adds those of one factor in one kernel
        for name in self.total:
            scale, mass = share.scale[name], share.mass[name]
            if scale == 0 and mass == 0:
                continue
            factor = self._relative(name, 0.0 if share.log is None else share.log[name])
            alike.setdefault(scale * factor, []).append(name)
            self.mass[name] += mass * factor
            self.weight[name] += scale * factor
            self.squares[name] += (scale * factor) ** 2
        for by, names in alike.items():
            torch._foreach_add_([self.total[n] for n in names], [upload[n] for n in names], alpha=by)
        self._shares[client] = share

    def refuse(self, client: ClientId) -> None:
        """Do nothing: who is refused is not in the sum."""

    def _relative(self, name: str, log: float) -> float:
        """Return e^(log − largest so far), having scaled the sum down if `log` is the new largest."""
        peak = self._peak.setdefault(name, log)
        if log > peak:
            fade = math.exp(peak - log)
            self.total[name].mul_(fade)
            self.mass[name] *= fade
            self.weight[name] *= fade
            self.squares[name] *= fade**2
            self._peak[name] = log
        return math.exp(min(0.0, log - peak))

    @property
    def peaks(self) -> LayerNumbers:
        """The largest logarithm so far of every layer that has one."""
        return dict(self._peak)

    def level(self, peaks: LayerNumbers) -> None:
        """Count relative to these logarithms, none below the largest so far: then sums can be added to each other."""
        for name, peak in peaks.items():
            self._relative(name, peak)

    def _fraction(self, share: Share, name: str) -> float:
        """How much of a layer's sum is one client's."""
        if self.weight[name] <= 0:
            return 0.0
        log = 0.0 if share.log is None else share.log[name] - self._peak[name]
        return share.scale[name] * math.exp(log) / self.weight[name]

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum over those added."""
        weights = {c: {name: self._fraction(share, name) for name in self.total} for c, share in self._shares.items()}
        return Aggregate(self.total, self.mass, self.weight, self.squares, tuple(self._shares), tuple(refused), weights)


class TrimmedSum(RunningSum):
    r"""A sum whose mean is trimmed: of every number the b smallest and the b largest uploads are left out.

    .. math::
       \frac{\text{total}_i}{\text{mass}} = \frac{\sum_{k ∈ K_i} γ_k u_{k,i}}{\sum_{k ∈ K_i} γ_k},\qquad
       b = ⌊\text{trim} · m⌋

    K_i are the other m − 2b clients of number i, at least one of m; γ is the method's weight. Where all count alike it
    is the trimmed mean of Yin et al., with trim = 0.5 the median. What at most b clients send moves no number beyond
    those of the others. Uploads are held until the round ends: O(cohort × model). `Aggregate.weights` are those before
    trimming.

    References:
      Yin et al., *Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates*, 2018, definitions 1 and 2.
    """

    def __init__(self, like: Params, trim: float) -> None:
        super().__init__(like)
        self._trim = trim
        self._held: dict[ClientId, Params] = {}

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Count one client, and hold its upload."""
        super().add(client, upload, share)
        self._held[client] = {name: u.clone() for name, u in upload.items()}

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return mass · trimmed mean in the place of the sum."""
        summed = super().aggregate(refused)
        assert summed.weights is not None, "a plain sum knows every weight"
        for name, total in summed.total.items():
            inside = [c for c in self._held if summed.weights[c][name] > 0]
            weights = total.new_tensor([summed.weights[c][name] for c in inside], dtype=torch.float64)
            out = min(int(self._trim * len(inside)), (len(inside) - 1) // 2) if inside else 0
            pieces = zip(*(self._held[c][name].reshape(-1).split(PIECE) for c in inside), strict=True)
            means = [trimmed_mean(torch.stack(piece), weights, out) for piece in pieces]
            if means:
                total.copy_(self.mass[name] * torch.cat(means).view_as(total))
        return summed


def trimmed_mean(numbers: Tensor, weights: Tensor, out: int) -> Tensor:
    """Return the weighted mean of every column of [m, n], its `out` smallest and `out` largest entries left out.

    Entries that have no weight count alike where only such are left.

    Example:
      >>> trimmed_mean(torch.tensor([[1.0], [2.0], [90.0], [-80.0], [3.0]]), torch.ones(5), 1).tolist()
      [2.0]
    """
    ordered, order = numbers.sort(0)
    inside = slice(out, len(numbers) - out)
    kept = weights[order[inside]]
    kept = torch.where(kept.sum(0) > 0, kept, torch.ones_like(kept))  # the client with all the weight is left out
    return ((ordered[inside] * kept).sum(0) / kept.sum(0)).to(numbers.dtype)


def sum_for(like: Params, caps: Caps | None) -> RunningSum:
    """The plain sum of a round: trimmed where its limits say so."""
    return TrimmedSum(like, caps.trim) if caps is not None and caps.trim else RunningSum(like)


class SelfWeighedRound(NamedTuple):
    """What is known of a round whose reports stay with the clients, before anybody trains.

    Attributes:
      called: the members of its sums.
      training: those of them whose training will come to an end.
    """

    theta: Params
    method: Method
    public: Public
    round: int
    called: tuple[ClientId, ...]
    training: tuple[ClientId, ...]


class SelfWeighedAccumulator(Protocol):
    """Where clients that weigh themselves by public numbers go as each ends."""

    @property
    def costs(self) -> Mapping[str, Any] | None:
        """What the sum cost, for the log, once it is there; None where that is nothing."""
        ...

    def add(self, client: ClientId, done: Finished) -> None:
        """Add one client; its upload is only valid until this returns.

        Raises:
          SecureSumOverflow: its numbers do not fit; it takes no part.
        """
        ...

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum, with `facts` and the `public` numbers it was formed with; empty if it failed closed."""
        ...


MakeSelfWeighed = Callable[[SelfWeighedRound], SelfWeighedAccumulator]


class SelfWeighedSum:
    """Adds uploads to a plain sum, each weighed by public numbers, and the clients' facts.

    Before the first round there are no public numbers: uploads are kept until they have been made of everybody's
    histograms.

    Args:
      ratio: r of the secure sum whose weights these are; by default the largest that any has.
    """

    costs: Mapping[str, Any] | None = None

    def __init__(self, current: SelfWeighedRound, inner: Accumulator, ratio: float = USUAL_RATIO) -> None:
        rule = current.method.mediator.private
        assert rule is not None, "a hidden method has a private rule"
        self._rule, self._round, self._inner = rule, current, inner
        self._ratio = ratio
        self._layers, self._public = list(current.theta), current.public
        self._facts: Facts = {}
        self._waiting: dict[ClientId, Finished] = {}

    def add(self, client: ClientId, done: Finished) -> None:
        """Add one client, or keep it until the first public numbers are there."""
        if not self._public["calibrated"]:
            self._waiting[client] = kept(done)
            return
        method = self._round.method
        share, facts = weighed(
            report_of(client, done), self._layers, method, self._public, self._ratio, silent=method.uploading < 1
        )
        self._inner.add(client, done.upload, share)
        _add_up(self._facts, facts | {name: [x] for name, x in counts_of(done).items()})

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum; no client's weight is in it."""
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


def _add_up(sums: Facts, facts: Facts) -> None:
    for name, numbers in facts.items():
        before = sums.get(name, [0.0] * len(numbers))
        sums[name] = [a + b for a, b in zip(before, numbers, strict=True)]
