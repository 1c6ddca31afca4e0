"""Noise on the sums of a count: it is as large as its ledger says, and no client moves a sum by more than its norm."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.config.schema import PrivacyConfig
from keyfed.engine.sums.tallies import Sketch
from keyfed.model.mixture import BINS, binned
from keyfed.model.tables import texts_of
from keyfed.private.dp.accounting import FINE, Release, epsilon
from keyfed.private.dp.ledger import read_ledger
from keyfed.run.counts import levels
from keyfed.run.counts.fit import Histogram, fit_mixture, summed_cells
from keyfed.run.counts.gather import Gathering, Group, PublicSum, groups_of
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


def test_weights_depart_from_the_network_only_where_the_gain_is_clear_of_the_noise():
    """Half of 4,000 tokens are of each distribution: a weight of one half gains 0.19 nats a token."""
    draw = np.random.default_rng(4)
    p, q = np.array([0.8, 0.2]), np.array([0.2, 0.8])
    words = np.concatenate([draw.choice(2, 2_000, p=p), draw.choice(2, 2_000, p=q)])
    cells = draw.integers(0, 72, words.size) * BINS + binned(np.log2(p / q)[words])
    text = texts_of([np.full(4_001, 5, np.int32)])
    clients = Gathering([Group(("one",), text)])

    def mixture_under(std, seed):
        def noised(what, sums, norm):
            assert (what, norm) == ("mixture", 4_096.0)
            return sums + std * np.random.default_rng(seed).normal(size=sums.size), std

        return fit_mixture(clients, b"", 3, lambda text: (text.client[1:], cells), noised)

    clear, _ = fit_mixture(clients, b"", 3, lambda text: (text.client[1:], cells))
    assert np.mean(clear.weights) == pytest.approx(0.5, abs=0.05)
    for seed in range(10):
        some, _ = mixture_under(0.5, seed)
        assert np.mean(some.weights) == pytest.approx(0.5, abs=0.1)
        none, note = mixture_under(30.0, seed)
        assert np.min(none.weights) == 1.0
        assert note == "the mixture is its network: under this noise counts gain nothing"


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
