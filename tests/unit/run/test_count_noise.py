"""Noise on the sums of a count: it is as large as its ledger says, and no client moves a sum by more than its norm."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.config.schema import PrivacyConfig
from keyfed.engine.sums.tallies import Sketch
from keyfed.private.dp.accounting import FINE, Release, epsilon
from keyfed.private.dp.ledger import read_ledger
from keyfed.run.counts import levels
from keyfed.run.counts.fit import Histogram, summed_cells
from keyfed.run.counts.gather import Gathering, PublicSum, groups_of
from keyfed.run.counts.levels import CountPlan, count_ngrams
from keyfed.run.counts.noise import FOLDER, CountNoise

V, END, MOST, DEPTH = 14, 2, 5, 2


def noise_of(folder, budget, clients=1_000, releases=6):
    return CountNoise(budget, folder, clients, releases, MOST, 3, secure=False, raw_vocabulary=False)


@pytest.mark.parametrize(("population", "share"), [(None, 1.0), (4_000, 0.25)], ids=["real", "imagined"])
def test_noise_is_as_large_as_the_ledger_says(tmp_path, population, share):
    noise = noise_of(tmp_path, PrivacyConfig(noise=2.0, population=population))
    drawn, std = noise.add("sums", np.full(20_000, 7.0), 3.0)
    assert std == pytest.approx(2.0 * 3.0 * share)
    assert drawn.mean() == pytest.approx(7.0, abs=5 * std / 20_000**0.5)
    assert drawn.std() == pytest.approx(std, rel=0.03)
    assert [entry.row.z for entry in read_ledger(tmp_path / FOLDER).entries] == [2.0]
    other = noise.add("other sums", np.zeros(20_000), 3.0)[0]
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.05


def test_noise_of_a_budget_covers_all_announced_releases(tmp_path):
    pytest.importorskip("dp_accounting")
    noise = noise_of(tmp_path, PrivacyConfig(epsilon=2.0))
    assert 1.9 < epsilon([Release(noise.z, 1.0, 6)], noise.delta, grid=FINE) <= 2.0
    assert noise.announced <= 2.0
    assert epsilon([Release(noise.z, 1.0, 7)], noise.delta, grid=FINE) > 2.0


def of_one(text):
    """A gathering of one client, whose sum is what that client moves a sum by."""
    return Gathering(groups_of(["one"], [text], END, 1, 1))


def test_a_client_moves_no_sum_by_more_than_the_norm_that_its_noise_is_made_for():
    random = np.random.default_rng(2)
    texts = [random.integers(2, V, 200).astype(np.int32) for _ in range(6)]
    names = [f"client{n}" for n in range(6)]
    plan = CountPlan(2, 3, 1, MOST, "ab" * 32, (Sketch(DEPTH, 400, 2),))
    many = CountPlan(2, 3, 1, 10_000, "ab" * 32, plan.sketches)
    tables, _ = count_ngrams(Gathering(groups_of(names, texts, END, 6, 3)), many, V)
    moved = {}

    def seen(what, cells, norm):
        moved[what] = np.linalg.norm(cells), norm
        return cells.astype(np.float64), 0.0

    keys, estimates = tables[1].keys, tables[1].clients.astype(np.float64)
    levels._recounted(of_one(texts[0]), plan, [], np.arange(V), -np.arange(V, dtype=np.float64), V, seen)
    levels._admitted(of_one(texts[0]), plan, tables[:1], V, seen)
    levels._recounted(of_one(texts[0]), plan, tables[:1], keys, estimates, V, seen)
    line = np.full(16, 5, np.int32)  # all of a client's tokens in one cell
    layout = Histogram(3, 3)
    summed_cells(of_one(line), PublicSum("histogram", {}), layout, lambda t: (t.client[1:], t.tokens[1:]), seen, 16)
    assert set(moved) == {"recount 1", "sketch 2", "recount 2", "histogram"}
    for what, (norm, allowed) in moved.items():
        assert 0.9 * allowed < norm <= allowed * (1 + 1e-9), what
