"""A private sum under secure aggregation: the same sum but for rounding, and noise alone where it stays closed."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("cryptography")

from keyfed.engine.sums.codec import fixed_point
from keyfed.engine.sums.masked import MaskedNoisedSum
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.plain import SelfWeighedRound
from keyfed.federated.public.rules import held
from keyfed.federated.types import Share
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.threshold import PRIVATE_RATIO, SecureSettings

from .neighbours import CLIP, LIKE, bounded, client, noising, share_of, vector


def masked(made, called, training=None, **changes):
    hidden = SelfWeighedRound(LIKE, made.method, {}, 0, tuple(called), tuple(training or called))
    return MaskedNoisedSum(LIKE, noising(made.ratio, **changes), hidden, SecureSettings())


@pytest.mark.parametrize("label", ["fedavg", "fedatt", "fedmed, both"])
@pytest.mark.parametrize("seed", range(5))
def test_the_masked_sum_is_the_plain_one_rounded_towards_zero(label, seed):
    made, rng = bounded(label, quantile=0.5), random.Random(seed)
    names = [f"c{k}" for k in range(5)]
    counted = {"bit_std": 0.0, "statistics": made.statistics}
    one, two = NoisedSum(LIKE, noising(made.ratio, **counted)), masked(made, names, **counted)
    assert len(one._counts) == {"fedavg": 1, "fedatt": 1, "fedmed, both": 3}[label]
    weigh = share_of(made, rng)
    for name in names:
        upload, report = client(rng, name)
        share = weigh(report, list(LIKE))
        one.add(name, upload, held(share, PRIVATE_RATIO))
        two.add(name, upload, share)
    assert two.aggregate(()).contributors == one.aggregate(()).contributors
    gap = (vector(one, made.ratio) - vector(two, made.ratio)).abs().max()
    assert float(gap) <= 5 * fixed_point(CLIP) * (1 + 1e-9)
    assert two._counts == pytest.approx(one._counts, abs=5 * fixed_point(1.0))


def test_rounding_never_lengthens_a_part():
    made, rng = bounded("fedavg"), random.Random(3)
    for _ in range(5):
        upload, report = client(rng, "c0")
        total = masked(made, ["c0", "c1", "c2"])
        total.add("c0", upload, made.method.mediator.share(report, list(LIKE)))
        for other in ("c1", "c2"):
            total.add(other, LIKE, made.method.mediator.share(report, list(LIKE)))
        total.aggregate(())
        assert float(vector(total, False).norm()) <= CLIP


def test_the_largest_sum_fits():
    assert MOST_MEMBERS * CLIP / fixed_point(CLIP) == 2**30


@pytest.mark.parametrize(("called", "training"), [(["a"], ["a"]), (["a", "b", "c", "d"], ["a"])], ids=["few", "lost"])
def test_a_closed_sum_is_released_as_noise_and_booked(called, training):
    made, booked = bounded("fedavg"), []

    def release():
        booked.append(1)
        return lambda name, shape: torch.ones(shape, dtype=torch.float64)

    total = masked(made, called, training, std=2.0, release=release)
    upload, report = client(random.Random(1), "a")
    total.add("a", upload, made.method.mediator.share(report, list(LIKE)))
    found = total.aggregate(())
    assert booked == [1]
    assert torch.equal(found.total["a"], torch.full((2,), 2.0))
    assert found.contributors == ()


def largest_masked_move(made, tries, refuse, seed=0):
    """Search neighbours under secure aggregation: a client x with any text, its training refused or not, or zeros.

    Of the others some are refused, too; `refuse` says what becomes of them.
    """
    rng, worst = random.Random(seed), 0.0
    for _ in range(tries):
        share = share_of(made, rng)
        others = [client(rng, f"c{k}") for k in range(3)]
        refused = [rng.random() < 0.3 for _ in others]
        upload, report = client(rng, "x")
        found = []
        for sends in ("zeros", rng.choice(["upload", "refused"])):
            total = masked(made, ["c0", "c1", "c2", "x"])
            for (theirs, said), out in zip(others, refused, strict=True):
                refuse(total, said.client) if out else total.add(said.client, theirs, share(said, list(LIKE)))
            if sends == "upload":
                total.add("x", upload, share(report, list(LIKE)))
            elif sends == "refused":
                refuse(total, "x")
            else:
                nothing = dict.fromkeys(LIKE, 0.0)
                total.add("x", LIKE, Share(nothing, nothing))
            total.aggregate(())
            found.append(vector(total, made.ratio))
        worst = max(worst, float((found[0] - found[1]).norm()))
    return worst


@pytest.mark.parametrize("label", ["fedavg", "fedatt", "fedmed, both", "admm"])
def test_a_refused_client_moves_a_masked_sum_by_the_clip_at_most(label):
    worst = largest_masked_move(bounded(label), 40, MaskedNoisedSum.refuse)
    assert 0.9 * CLIP < worst <= CLIP * (1 + 1e-9)


def test_the_mutant_in_which_a_refused_client_drops_out_is_caught():
    assert largest_masked_move(bounded("fedavg"), 100, lambda total, client: None) > CLIP * 1.5


def test_a_refused_client_is_no_contributor_and_counts_neither_way():
    made = bounded("fedavg")
    total = masked(made, ["a", "b", "c"], bit_std=0.0)
    for name in ("a", "b"):
        total.add(name, LIKE, made.method.mediator.share(client(random.Random(1), name)[1], list(LIKE)))
    total.refuse("c")
    assert total.aggregate(()).contributors == ("a", "b")
    assert total._counts == {"within": 1.0}


@pytest.mark.parametrize("lost", [None, "dropped before upload"])
def test_a_simulation_hands_a_refused_client_to_the_sum_unless_it_vanishes(lost, monkeypatch):
    from keyfed.engine import simulate
    from keyfed.engine.task import Finished
    from keyfed.federated.cohort import Fate, Work

    made, refused = bounded("fedavg"), []

    class Heard(NoisedSum):
        def refuse(self, client):
            refused.append(client)

    class Alone:
        names, seed, device = ("a",), 1, "cpu"

    never = Finished(0, {name: torch.full_like(p, math.nan) for name, p in LIKE.items()}, 1.0, 5, 5, {})
    monkeypatch.setattr(simulate, "run_tasks", lambda *given: [never])
    with simulate.Simulation(Alone(), gather=lambda like: Heard(like, noising())) as federation:
        federation.expect({"a": Fate(0, Work(), 1.0, lost)})
        federation.train(LIKE, ["a"], made.method, 0)
        assert [r.reason for r in federation.refused] == ["non-finite upload"]
    assert refused == ([] if lost else ["a"])
