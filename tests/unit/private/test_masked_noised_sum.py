"""A private sum under secure aggregation: the same sum but for rounding, and noise alone where it stays closed."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("cryptography")

from keyfed.engine.gather import HiddenRound
from keyfed.engine.masked_noised_sum import MaskedNoisedSum, fixed_point
from keyfed.engine.noised_sum import NoisedSum
from keyfed.engine.secure_simulation import SecureSettings

from .neighbours import CLIP, LIKE, bounded, client, noising, vector


def masked(made, called, training=None, **changes):
    hidden = HiddenRound(LIKE, made.method, {}, 0, tuple(called), tuple(training or called))
    return MaskedNoisedSum(LIKE, noising(made.ratio, **changes), hidden, SecureSettings())


@pytest.mark.parametrize("label", ["fedavg", "fedatt"])
@pytest.mark.parametrize("seed", range(5))
def test_the_masked_sum_is_the_plain_one_rounded_towards_zero(label, seed):
    made, rng = bounded(label), random.Random(seed)
    names = [f"c{k}" for k in range(5)]
    one, two = NoisedSum(LIKE, noising(made.ratio)), masked(made, names)
    for name in names:
        upload, report = client(rng, name)
        share = made.method.mediator.share(report, list(LIKE))
        one.add(name, upload, share)
        two.add(name, upload, share)
    assert two.aggregate(()).contributors == tuple(names)
    gap = (vector(one, made.ratio) - vector(two, made.ratio)).abs().max()
    assert float(gap) <= 5 * fixed_point(CLIP, 5) * (1 + 1e-9)
    assert two._within == one._within


def test_rounding_never_lengthens_a_part():
    made, rng = bounded("fedavg"), random.Random(3)
    for _ in range(20):
        upload, report = client(rng, "c0")
        total = masked(made, ["c0", "c1", "c2"])
        total.add("c0", upload, made.method.mediator.share(report, list(LIKE)))
        for other in ("c1", "c2"):
            total.add(other, LIKE, made.method.mediator.share(report, list(LIKE)))
        total.aggregate(())
        assert float(vector(total, False).norm()) <= CLIP


@pytest.mark.parametrize("called", [1, 2, 1000])
def test_the_largest_sum_fits(called):
    assert called * CLIP / fixed_point(CLIP, called) < 2**31
    assert math.isclose(fixed_point(2.0, 4), 2.0 / 2**28)


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
