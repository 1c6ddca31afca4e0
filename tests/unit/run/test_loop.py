"""The one loop of rounds: who is called, which model it goes on from, when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from keyfed.federated.cohort import Fate, Work
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.soundness import MOST_RETURNS, Good
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Aggregate, Caps, ClientId, Method, Params, Public, Report, Share, State
from keyfed.run.checkpoint import Best, Cohort, RoundOutcome, RunProgress
from keyfed.run.loop import rounds, run_rounds

METHOD = build_method(MethodSpec("fedavg", {}))


class Counting:
    """A federation whose every client moves θ by one; it notes in which order it is spoken to."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._cohort: Sequence[ClientId] = ()

    def expect(self, fates: Mapping[ClientId, Fate]) -> None:
        self.heard.append(f"expect {' '.join(fates)}")

    def limit(self, caps: Caps) -> None:
        raise AssertionError(f"no run here has limits: {caps}")

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int, public: Public | None = None
    ) -> Mapping[ClientId, Report]:
        self.heard.append(f"train {round} {' '.join(cohort)}")
        self._cohort = cohort
        return {client: Report(client, 10, 1.0, 10) for client in cohort}

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        ones = {"w": float(len(self._cohort))}
        return Aggregate({"w": torch.full((1,), ones["w"])}, ones, ones, ones, tuple(self._cohort))

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        self.heard.append(f"acknowledge {' '.join(contributors)}")


def begun(until: int) -> RunProgress:
    state = initial_state(METHOD, {"w": torch.zeros(1)})
    return RunProgress(METHOD, state, until, Good(state, math.inf))


def everybody(state: State) -> Cohort:
    return Cohort(("anna", "ben"))


def where(run: RunProgress) -> tuple[int, float]:
    return run.state.round, float(run.state.params["w"])


def test_a_round_expects_trains_and_moves_on():
    run, federation = begun(2), Counting()
    fates = {"ben": Fate(1, Work(), 0.0, "dropped before upload")}
    outcomes = [
        (o.before.round, o.state.round, o.cohort.lost)
        for o in rounds(run, federation, lambda state: Cohort(("anna", "ben"), fates))
    ]
    assert federation.heard == [
        "expect ben", "train 0 anna ben", "acknowledge anna ben", "expect ben", "train 1 anna ben",
        "acknowledge anna ben",
    ]  # fmt: skip
    assert outcomes == [
        (0, 1, {"ben": "dropped before upload"}), (1, 2, {"ben": "dropped before upload"}),
    ]  # fmt: skip
    assert where(run) == (2, 2.0)
    assert float(run_rounds(METHOD, begun(0).state, 3, Counting(), everybody).params["w"]) == 3.0


def test_a_run_moves_on_only_when_the_next_round_is_wanted():
    run = begun(5)
    loop = rounds(run, Counting(), everybody)
    first = next(loop)
    assert where(run) == (0, 0.0)  # what is written of the round may still fail
    next(loop)
    assert run.state is first.state


def test_no_cohort_ends_a_run_and_an_interrupt_leaves_it_where_it_was():
    run = begun(9)
    assert len(list(rounds(run, Counting(), lambda state: everybody(state) if state.round < 3 else None))) == 3
    assert where(run) == (3, 3.0)

    def interrupted(state: State) -> Cohort:
        if state.round == 5:
            raise KeyboardInterrupt
        return everybody(state)

    with pytest.raises(KeyboardInterrupt):
        list(rounds(run, Counting(), interrupted))
    assert where(run) == (5, 5.0)


def test_a_run_goes_on_from_what_its_judge_says_and_ends_where_that_gives_up():
    run = begun(50)
    first = run.state

    def back(outcome: RoundOutcome) -> RoundOutcome:
        good = replace(outcome.good, returns=outcome.good.returns + 1)
        state = replace(first, round=outcome.state.round)
        return replace(outcome, state=state, good=good, best=Best(7, 1.0, first.params), back=True)

    assert len(list(rounds(run, Counting(), everybody, back))) == MOST_RETURNS
    assert where(run) == (MOST_RETURNS, 0.0)
    assert run.chosen().round == 7


def test_a_cohort_may_bring_the_method_of_its_round():
    run = begun(2)

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        return {"w": params["w"] + 100}, state

    other = replace(METHOD, server=METHOD.server._replace(step=step))
    for _ in rounds(run, Counting(), lambda state: replace(everybody(state), method=None if state.round else other)):
        pass
    assert where(run) == (2, 101.0)


def test_without_validation_the_last_model_is_chosen_under_the_round_it_is_of():
    run = begun(2)
    list(rounds(run, Counting(), everybody))
    assert run.chosen().round == 2
    run.state = replace(run.good.state, round=9)  # gone back, and no round since was good
    assert run.chosen().round == 0


def test_the_model_before_a_round_is_let_go_when_the_run_moves_on():
    kept = list(rounds(begun(3), Counting(), everybody))
    assert [o.before is o.state for o in kept] == [True] * 3
