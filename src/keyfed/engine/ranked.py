"""A federation over several ranks: each trains every n-th client of a round, and the sums are added.

    rank 0:  order ──► θ to all ──► train own part ──► exchange reports ──► weigh ──► shares to all ──► add the sums
    others:  hear  ──► θ        ──► train own part ──► exchange reports ──►           shares        ──► add the sums

Rank 0 alone weighs, steps and acknowledges. Reports come in the order of the cohort, so that only the rounding of the
sum tells how many ranks there were. A softmax is summed relative to the largest logarithm of all ranks, agreed on
before the sums are added. Client states are files, which all ranks see in the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from keyfed.engine.client_state import ClientStates
from keyfed.engine.curves import CohortCurves, joined_curves
from keyfed.engine.ranks import Ranks
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import keeps_state
from keyfed.errors import RankError
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.types import (
    Aggregate,
    Caps,
    ClientId,
    LayerNumbers,
    Method,
    Params,
    Public,
    Refusal,
    Report,
    Share,
)


class RankedSimulation:
    """`Federation` over the simulations of all ranks; this is rank 0's side, `serve` the others'.

    Args:
      local: what trains this rank's part.
      states: where clients keep what they remember, the same folder on all ranks; needed if the method's clients do.
    """

    def __init__(self, local: Simulation, ranks: Ranks, states: ClientStates | None = None) -> None:
        self._local, self._ranks, self._states = local, ranks, states
        self._fates: Mapping[ClientId, Fate] = {}
        self._trained: list[ClientId] = []
        self._round, self._remembering = 0, False
        self.compression_error: float | None = None  # of the last round: mean over the clients that trained
        self.curves: CohortCurves | None = None  # of the last round, see `Simulation`
        self.secure: Mapping[str, Any] | None = None  # ranks form no secure sums

    def expect(self, fates: Mapping[ClientId, Fate]) -> None:
        """Say what becomes of the clients of the next round; who is not named trains and uploads."""
        self._fates = fates

    def limit(self, caps: Caps) -> None:
        """Refuse: the uploads of a round are on several ranks, and none sees the others' norms."""
        raise RankError(f"a limit on uploads ({caps}) needs all of them in one process; train in one")

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int, public: Public | None = None
    ) -> Mapping[ClientId, Report]:
        """Let every rank train its part of the cohort; return the reports of all, in the order of the cohort."""
        if method.hidden or public is not None:
            raise RankError(f"{method.name} hides its reports, and ranks exchange them; train it in one process")
        self._round, self._remembering = round, keeps_state(method)
        self._trained = [c for c in cohort if c not in self._fates or self._fates[c].reports]
        joined: dict[ClientId, int] = {}
        if self._remembering:
            if self._states is None:
                raise RankError(f"{method.name} has clients that remember, and ranks share no folder for their states")
            joined = {c: self._states.rounds[c] for c in self._trained if c in self._states.rounds}
        fates = {c: asdict(self._fates[c]) for c in self._trained if c in self._fates}
        self._ranks.tell(
            {
                "do": "train", "round": round, "clients": self._trained, "fates": fates, "joined": joined,
                "halvings": method.halvings,
            }
        )  # fmt: skip
        self._ranks.spread(params)
        self._local.expect(self._fates)
        reports, self.compression_error, self.curves = _train_part(
            self._local, self._ranks, params, self._trained, method, round
        )
        return reports

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the sum over the clients of all ranks."""
        told = None if shares is None else {client: asdict(share) for client, share in shares.items()}
        self._ranks.tell({"do": "collect", "shares": told})
        return _add_up(self._local, self._ranks, shares, self._trained)

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Let the states of those in the sum count, whichever rank trained them."""
        if self._states is not None and self._remembering:
            self._states.acknowledge(self._round, self._trained, contributors)

    def close(self) -> None:
        """Close this rank's simulation."""
        self._local.close()

    def __enter__(self) -> RankedSimulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(local: Simulation, ranks: Ranks, method: Method, like: Params, states: ClientStates | None = None) -> None:
    """Train this rank's part of every round, as rank 0 orders, until it raises `Ended`.

    Args:
      like: tensors of the model's shapes; they hold θ from the first round on.
    """
    trained: list[ClientId] = []
    while True:
        order = ranks.hear()
        if order["do"] == "train":
            trained = order["clients"]
            ranks.spread(like)
            local.expect({c: Fate(**{**fate, "work": Work(**fate["work"])}) for c, fate in order["fates"].items()})
            if states is not None:
                states.rounds = order["joined"]  # rank 0 acknowledges, and removes what no longer counts
            eased = replace(method, halvings=order["halvings"])
            _train_part(local, ranks, like, trained, eased, order["round"])
        else:
            told = order["shares"]
            shares = None if told is None else {client: Share(**share) for client, share in told.items()}
            _add_up(local, ranks, shares, trained)


def _train_part(
    local: Simulation, ranks: Ranks, params: Params, trained: Sequence[ClientId], method: Method, round: int
) -> tuple[dict[ClientId, Report], float | None, CohortCurves | None]:
    """Train every n-th client; return the reports of all ranks, their mean error of compression and their curves."""
    mine = local.train(params, trained[ranks.rank :: ranks.world], method, round)
    curves = None if local.curves is None else local.curves.numbers()
    parts = ranks.gather(
        {"reports": [asdict(r) for r in mine.values()], "error": local.compression_error, "curves": curves}
    )
    found = {report["client"]: Report(**report) for part in parts for report in part["reports"]}
    errors = [(part["error"], len(part["reports"])) for part in parts if part["error"] is not None]
    counted = sum(count for _, count in errors)
    error = sum(mean * count for mean, count in errors) / counted if counted else None
    reports = {client: found[client] for client in trained if client in found}
    return reports, error, joined_curves([part["curves"] for part in parts], list(reports))


def _add_up(
    local: Simulation, ranks: Ranks, shares: Mapping[ClientId, Share] | None, order: Sequence[ClientId]
) -> Aggregate:
    """Add the sums of all ranks; everybody returns the same aggregate."""
    own = local.summed(shares)
    own.level(_largest([part["peaks"] for part in ranks.gather({"peaks": own.peaks})]))
    mine = own.aggregate(local.refused)
    told: dict[str, Any] = {name: getattr(mine, name) for name in ("mass", "weight", "squares", "weights")}
    parts = ranks.gather({**told, "refused": [asdict(r) for r in mine.refused]})
    ranks.add(mine.total)
    mass, weight, squares = (_sum([part[name] for part in parts]) for name in ("mass", "weight", "squares"))
    weights = {
        client: {name: w * part["weight"][name] / weight[name] if weight[name] > 0 else 0.0 for name, w in own.items()}
        for part in parts
        for client, own in part["weights"].items()
    }
    refused = {r["client"]: Refusal(**r) for part in parts for r in part["refused"]}
    contributors = tuple(client for client in order if client in weights)
    return Aggregate(
        mine.total, mass, weight, squares, contributors,
        tuple(refused[client] for client in order if client in refused),
        {client: weights[client] for client in contributors},
    )  # fmt: skip


def _largest(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    names = dict.fromkeys(name for part in numbers for name in part)
    return {name: max(part[name] for part in numbers if name in part) for name in names}


def _sum(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    return {name: sum(part[name] for part in numbers) for name in numbers[0]}
