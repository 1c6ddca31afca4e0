"""The simulation: a federation inside this machine.

Uploads are scaled and summed as each client ends, in client order whatever the block or the number of workers, so
memory is O(block × model) for any cohort. A mediator that must see all reports first has the uploads kept until then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from keyfed.engine.problem import Problem, measure, solve_block
from keyfed.engine.workers import WorkerPool
from keyfed.federated.sampling import derive_seed
from keyfed.federated.types import (
    Aggregate,
    ClientId,
    LayerNumbers,
    Method,
    Params,
    Refusal,
    Report,
    Share,
)

LARGEST_CHANGE = 1e6  # of one weight in one round; beyond it lies only divergence


class Finished(NamedTuple):
    """One client's result, not stacked. `upload` is only valid until the next one is asked for."""

    client: int
    upload: Params
    loss: float
    tokens: int
    worked: int
    distance: LayerNumbers


class RunningSum:
    """total^l += scale_k^l · upload_k^l, one client at a time, in the order they come.

    Shares with a logarithm are summed relative to the largest one so far; when a larger one comes, what is there is
    scaled down. The mean is that of a softmax over all, and nothing overflows.
    """

    def __init__(self, like: Params) -> None:
        self.total = {name: torch.zeros_like(p) for name, p in like.items()}
        self.mass = dict.fromkeys(like, 0.0)
        self.squares = dict.fromkeys(like, 0.0)
        self._peak: dict[str, float] = {}
        self.contributors: list[ClientId] = []

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client."""
        for name, total in self.total.items():
            scale, mass = share.scale[name], share.mass[name]
            if scale == 0 and mass == 0:
                continue
            factor = self._relative(name, 0.0 if share.log is None else share.log[name])
            total.add_(upload[name], alpha=scale * factor)
            self.mass[name] += mass * factor
            self.squares[name] += (mass * factor) ** 2
        self.contributors.append(client)

    def _relative(self, name: str, log: float) -> float:
        """Return e^(log − largest so far), having scaled the sum down if `log` is the new largest."""
        peak = self._peak.setdefault(name, log)
        if log > peak:
            fade = math.exp(peak - log)
            self.total[name].mul_(fade)
            self.mass[name] *= fade
            self.squares[name] *= fade**2
            self._peak[name] = log
        return math.exp(min(0.0, log - peak))

    def shift(self, by: Params) -> None:
        """Move the mean of every layer that has one by a given amount."""
        for name, total in self.total.items():
            total.add_(by[name], alpha=self.mass[name])

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum over those added."""
        return Aggregate(self.total, self.mass, self.squares, tuple(self.contributors), tuple(refused))


def refusal(client: ClientId, tokens: int, loss: float, upload: Params) -> Refusal | None:
    """Say why an upload must not enter the sum, or None."""
    if tokens == 0:
        return Refusal(client, "no text")
    if not math.isfinite(loss):
        return Refusal(client, "non-finite loss")
    largest = torch.stack([u.abs().amax() for u in upload.values()])
    if not bool(torch.isfinite(largest).all()):
        return Refusal(client, "non-finite upload")
    return Refusal(client, "exploding upload") if float(largest.max()) > LARGEST_CHANGE else None


class Simulation:
    """`Federation` over the clients of a `Problem`; worker processes on a CPU, stacked blocks on a GPU."""

    def __init__(self, problem: Problem, *, block: int = 1, workers: int = 1) -> None:
        self._problem = problem
        self._block = block
        self._pool = WorkerPool(problem, workers) if workers > 1 else None
        self._index = {name: k for k, name in enumerate(problem.store.names)}
        self._sum: RunningSum | None = None
        self._kept: dict[ClientId, Params] = {}
        self._refused: list[Refusal] = []
        self._noise: Params | None = None  # for the mean, if the method wants it there

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int
    ) -> Mapping[ClientId, Report]:
        """Train the cohort; sum at once where clients weigh themselves, else keep the uploads."""
        self._sum, self._kept, self._refused, self._noise = RunningSum(params), {}, [], None
        noise = method.noise
        if noise is not None and noise.at == "server":
            self._noise = noise.draw(params, self._generator(round, "server noise"))
        reports: dict[ClientId, Report] = {}
        layers = list(params)
        for done in self._solve(params, [self._index[c] for c in cohort], method, round):
            client = self._problem.store.names[done.client]
            refused = refusal(client, done.tokens, done.loss, done.upload)
            if refused is not None:
                self._refused.append(refused)
                continue
            reports[client] = Report(client, done.tokens, done.loss, done.worked, done.distance)
            upload = done.upload
            if noise is not None and noise.at == "client":
                drawn = noise.draw(params, self._generator(round, client, "noise"))
                upload = {name: u + drawn[name] for name, u in upload.items()}
            if method.mediator.share is not None:
                self._sum.add(client, upload, method.mediator.share(reports[client], layers))
            else:
                self._kept[client] = {name: u.clone() for name, u in upload.items()}
        return reports

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the finished sum, or form it now from shares that came after the reports."""
        assert self._sum is not None, "collect() follows train()"
        for client, upload in self._kept.items():
            if shares is not None and client in shares:
                self._sum.add(client, upload, shares[client])
        if self._noise is not None:
            self._sum.shift(self._noise)
        aggregate = self._sum.aggregate(self._refused)
        self._sum, self._kept = None, {}
        return aggregate

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Nothing to tell: these clients keep no state between rounds."""

    def _solve(self, params: Params, cohort: Sequence[int], method: Method, round: int) -> Iterator[Finished]:
        if self._pool is not None and method.spec is not None:
            yield from (Finished(*result) for result in self._pool.solve(params, cohort, method.spec, round))
            return
        on_device = {name: p.to(self._problem.device) for name, p in params.items()}
        for start in range(0, len(cohort), self._block):
            members = cohort[start : start + self._block]
            solution = solve_block(self._problem, on_device, members, method, round)
            scalars = zip(solution.loss.tolist(), solution.tokens.tolist(), solution.worked.tolist(), strict=True)
            distances = measure(method, on_device, solution.upload, len(members))
            for k, (loss, tokens, worked) in enumerate(scalars):
                upload = {name: u[k].to(params[name].device) for name, u in solution.upload.items()}
                yield Finished(members[k], upload, loss, int(tokens), int(worked), distances[k])

    def _generator(self, *purpose: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self._problem.seed, *purpose))

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
