"""A run's own mechanism: the noise, the count and the denominator that `PrivateRun.gather` hands to a round's sum."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy import stats

from keyfed.config.load import Config, apply_settings, method_spec
from keyfed.engine.sums.noised import NoisedSum
from keyfed.errors import PrivacyError
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.methods import build_method
from keyfed.federated.types import Share, State
from keyfed.private.dp.accounting import Opening, Release, TreeRelease, chance, epsilon
from keyfed.private.dp.ledger import LEDGER, ORIGIN, _line, _write_head, open_ledger
from keyfed.private.dp.noise import system
from keyfed.private.dp.private_method import CLIP
from keyfed.reports.document import Table
from keyfed.reports.run_page import privacy_blocks
from keyfed.run.privacy import PrivateRun, make_private
from keyfed.run.remote.private import DeployedPrivacy, SettledTerms, terms_for

Z, COHORT, CALLED, S, BITS = 2.0, 400, 8, 3.0, 20.0
FLEET = [
    "participation.sampling=poisson", f"privacy.noise={Z}", "privacy.population=100000", f"privacy.cohort={COHORT}",
    "privacy.mean_weight=0.8", "privacy.weight_cap=100", "privacy.floor=0.25", "privacy.clip=7",
]  # fmt: skip


def private_run(out, method="fedavg", *settings):
    config = apply_settings(Config(method=method), [*FLEET, *settings])
    made = make_private(config, build_method(method_spec(config)), 50, CALLED)
    assert made is not None
    out.mkdir(exist_ok=True)
    return PrivateRun(config, made[0], out, made[1])


def state(like, round=0):
    return State(like, {}, {CLIP: torch.tensor(S, dtype=torch.float64)}, round)  # it has moved away from privacy.clip


def fates(count):
    return {f"c{k}": Fate(k, Work(), 1.0) for k in range(count)}


@pytest.mark.parametrize("arrived", [0, 1, 3, 40])
def test_noise_and_denominator_are_public_whoever_is_called(tmp_path, arrived):
    like = {"w": torch.zeros(3)}
    gather, clip = private_run(tmp_path / "run").gather(state(like), frozenset(), fates(arrived))
    given = gather(like)._noising
    update = (Z**-2 - (2 * BITS) ** -2) ** -0.5  # the count of unclipped clients has its part of z
    assert clip == given.clip == S
    assert given.std == pytest.approx(update * S * CALLED / COHORT, rel=1e-12)
    assert given.bit_std == pytest.approx(BITS * CALLED / COHORT, rel=1e-12)  # a twentieth of the fleet's cohort
    assert given.called == CALLED
    assert given.denominator == pytest.approx(CALLED * 0.8, rel=1e-12)
    assert given.floor is None


def test_without_a_moving_clip_all_the_noise_is_the_updates(tmp_path):
    like = {"w": torch.zeros(3)}
    run = private_run(tmp_path / "run", "fedavg", "privacy.quantile=none")
    given = run.gather(state(like), frozenset({"w"}), {})[0](like)._noising
    assert given.std == pytest.approx(Z * S * CALLED / COHORT, rel=1e-12)
    assert given.bit_std is None
    assert given.frozen == {"w"}


@pytest.mark.parametrize(
    ("settings", "told", "bits"),
    [
        (["method.mediation=false"], ("within",), BITS),
        ([], ("within", "loss"), 5 * Z),  # less than a twentieth of the cohort
        (["method.beta=0.8"], ("within", "loss", "below"), 5 * Z),
        (["method.beta=0.8", "privacy.quantile=none"], ("loss", "below"), 5 * Z),
        (["method.beta=0.8", "privacy.count_noise=7"], ("within", "loss", "below"), 7.0),
        (["method.beta=0.8", "privacy.cohort=100"], ("within", "loss", "below"), 5.0),
    ],
)
def test_losses_are_told_with_noise_that_z_pays_for(tmp_path, settings, told, bits):
    like, run = {"w": torch.zeros(3)}, private_run(tmp_path / "run", "fedmed", *settings)
    cohort = run.ledger.terms.cohort
    given = run.gather(state(like), frozenset(), {})[0](like)._noising
    assert given.statistics == told
    assert given.bit_std == pytest.approx(bits * CALLED / cohort, rel=1e-12)
    assert given.std == pytest.approx((Z**-2 - (2 * bits) ** -2) ** -0.5 * S * CALLED / cohort, rel=1e-12)
    assert run.row().z == Z
    assert ("paid for within z" in run.ledger.terms.sensitivity) is (len(told) > 1)


@pytest.mark.parametrize(
    ("method", "settings", "least"),
    [
        ("fedatt", ["method.bound=3"], 1.0),
        ("fedmed", ["method.mediation=false"], 0.5),  # a divergence is at most ln 2, a weight at least 1/2
        ("fedmed", ["method.mediation=false", "method.temperature=0.5"], 0.25),
        ("fedmed", ["method.mediation=false", "method.beta=0.2"], 0.1),
        (
            "fedmed",
            ["privacy.mean_weight=0.3", "method.beta=0.2"],
            0.06,
        ),  # after the switch by tokens, of capped weight
        ("fedmed", ["privacy.weight_cap=none", "privacy.mean_weight=0.3", "method.beta=0.2"], 0.1),
        ("fedmed", ["method.adaptive=false", "method.mediation=false", "method.beta=0.2"], 0.16),
    ],
)
def test_a_ratio_has_a_floor_below_the_least_mass_that_is_expected(tmp_path, method, settings, least):
    like = {"w": torch.zeros(3)}
    run = private_run(tmp_path / "run", method, *settings)
    assert run.gather(state(like), frozenset(), {})[0](like)._noising.floor == pytest.approx(0.25 * CALLED * least)


def test_the_default_floor_does_not_shrink_top_k(tmp_path):
    """One of eight counts, and weighs a half: its mean is its own upload. A tenth of the eight would be more mass."""
    like = {"w": torch.zeros(3)}
    settings = ["method.mediation=false", "method.beta=0.125", "privacy.floor=0.1"]
    run = private_run(tmp_path / "run", "fedmed", *settings)
    given = run.gather(state(like), frozenset(), {})[0](like)._noising
    summed, upload = NoisedSum(like, given._replace(std=0.0)), torch.tensor([0.1, -0.2, 0.3])
    summed.add("c0", {"w": upload}, Share({"w": 0.5}, {"w": 0.5}, statistics={"below": 1.0}))
    torch.testing.assert_close(summed.aggregate(()).mean()["w"], upload)


@pytest.mark.parametrize("given", [0.4, 2.5])
def test_counts_that_take_all_the_noise_are_refused_before_anything_is_written(tmp_path, given):
    settings = ["privacy.noise=5", f"train.cohort={CALLED}", f"privacy.count_noise={given}"]
    config = apply_settings(Config(method="admm"), settings)
    with pytest.raises(PrivacyError, match=rf"privacy\.count_noise {given}; set that above 2\.5"):
        make_private(config, build_method(method_spec(config)), CALLED, CALLED)


def test_what_is_released_through_a_run_has_the_noise_of_its_ledger(tmp_path):
    like = {"w": torch.zeros(100_000, dtype=torch.float64)}
    run = private_run(tmp_path / "run", "fedavg", "privacy.quantile=none")
    summed = run.gather(state(like), frozenset(), fates(1))[0](like)
    upload = torch.full_like(like["w"], 1.0)
    summed.add("c0", {"w": upload}, Share({"w": 1.0}, {"w": 1.0}))
    found = summed.aggregate(())
    noise = (found.total["w"] - upload * S / float(upload.norm())).numpy()
    (entry,) = run.ledger.entries
    std = entry.row.z * S * CALLED / COHORT
    assert entry.row.q == pytest.approx(COHORT / 100_000)
    assert noise.std() == pytest.approx(std, rel=0.01)
    assert abs(noise.mean()) < 4 * std / math.sqrt(noise.size)
    assert stats.kstest(noise / std, "norm").pvalue > 1e-3
    mean = found.mean()["w"].numpy()
    assert mean.std() == pytest.approx(std / (CALLED * 0.8), rel=0.01)


def test_the_count_of_unclipped_clients_is_noised_round_by_round(tmp_path):
    like, run, counts = {"w": torch.zeros(1)}, private_run(tmp_path / "run"), []
    for round in range(200):
        summed = run.gather(state(like, round), frozenset(), {})[0](like)
        counts.append(summed.aggregate(()).facts["within"][0] - 0.5)
    assert torch.tensor(counts).std() == pytest.approx(BITS / COHORT, rel=0.25)
    assert stats.kstest([c * COHORT / BITS for c in counts], "norm").pvalue > 1e-3


# --- few clients ------------------------------------------------------------------------------------------------------

FEW = ["privacy.population=none", "privacy.cohort=none"]  # the eight that are called, of fifty
OF_FEW = 2 * Z / math.sqrt(3)  # noise of their sum: the count takes a quarter of what z pays for


def older(folder, terms):
    """Begin a ledger that does not say its count noise, as they once were."""
    plain = {key: value for key, value in asdict(terms).items() if key != "count_noise"}
    line, digest = _line({"terms": plain}, ORIGIN)
    folder.mkdir()
    (folder / LEDGER).write_bytes(line + b"\n")
    _write_head(folder, [digest])


def noising_of(run):
    like = {"w": torch.zeros(3)}
    return run.gather(state(like), frozenset(), {})[0](like)._noising


def test_the_count_of_few_clients_has_noise_z_and_the_sum_hardly_more(tmp_path):
    run = private_run(tmp_path / "run", "fedavg", *FEW)
    given = noising_of(run)
    assert given.bit_std == Z
    assert given.std == pytest.approx(OF_FEW * S, rel=1e-12)
    assert run.row().z == run.ledger.terms.z == Z


def test_everything_that_speaks_of_the_count_noise_says_the_number(tmp_path):
    run = private_run(tmp_path / "run", "fedavg", *FEW)
    run.ledger.book(run.row(), "update", 0)
    written = json.loads((tmp_path / "run" / LEDGER).read_text().splitlines()[0])
    account = run.account(1000)
    assert written["terms"]["count_noise"] == account["count_noise"] == Z
    assert "noise 2 (of the sum 2.309, of counts 2 clients)" in run.announce(1000)[0]
    assert any("2.309 clips on the sum, 2 clients on a count" in line for line in account["statement"])
    rows = {row[0]: row[1] for block in privacy_blocks(account) if isinstance(block, Table) for row in block.rows}
    assert rows["noise of counts, in clients, within z"] == "2"


def test_nothing_is_said_of_counts_where_nothing_is_counted(tmp_path):
    run = private_run(tmp_path / "run", "fedavg", *FEW, "privacy.quantile=none")
    run.ledger.book(run.row(), "update", 0)
    account = run.account(1000)
    assert account["count_noise"] is None
    assert "counts" not in run.announce(1000)[0]
    assert not any("on a count" in line for line in account["statement"])


@pytest.mark.parametrize("where", ["simulated", "deployed"])
def test_sum_and_count_of_few_clients_have_the_promised_noise(tmp_path, where):
    """A sum of nobody is its noise: simulated from the seed, with real clients from the operating system."""
    clients, like = 4, {"w": torch.zeros(100_000)}
    config = apply_settings(Config(), ["privacy.noise=1.7", f"train.cohort={clients}", "privacy.clip=3"])
    (tmp_path / "run").mkdir()
    if where == "simulated":
        bounded, terms = make_private(config, build_method(method_spec(config)), clients, clients)
        run = PrivateRun(config, bounded, tmp_path / "run", terms)
        release = lambda round: run.noising(state(like, round)).release  # noqa: E731
    else:
        settled = SettledTerms(*terms_for(config, clients), tuple(f"c{k}" for k in range(clients)))
        run = DeployedPrivacy(config, settled, tmp_path / "run", {})
        release = lambda round: system  # noqa: E731
    given = run.noising(state(like))
    assert (given.bit_std, run.ledger.terms.simulated) == (1.7, where == "simulated")
    drawn = NoisedSum(like, given).aggregate(()).total["w"].double().numpy()
    sum_noise = drawn / S
    assert sum_noise.std() == pytest.approx(1.7 * 2 / math.sqrt(3), rel=0.015)
    counts = []
    for round in range(1, 1_001):
        made = NoisedSum({"w": torch.zeros(1)}, given._replace(release=release(round))).aggregate(())
        counts.append((made.facts["within"][0] - 0.5) * clients)
    assert np.std(counts) == pytest.approx(1.7, rel=0.15)
    # Together they cost what 1.7 on the sum alone does, by the noise that was measured.
    assert sum_noise.std() ** -2 + (2 * np.std(counts)) ** -2 == pytest.approx(1.7**-2, rel=0.08)
    for sample, std in ((sum_noise, 1.7 * 2 / math.sqrt(3)), (counts, 1.7)):
        assert stats.kstest(np.asarray(sample) / std, "norm").pvalue > 1e-7  # the operating system's has no seed


@pytest.mark.parametrize(("settings", "kept"), [([], 1.4), (["privacy.count_noise=3"], 3.0)])
def test_a_run_that_began_when_ledgers_did_not_say_it_keeps_its_count_noise(tmp_path, settings, kept):
    few = [*FEW, "privacy.population=1000", "privacy.cohort=28"]  # a twentieth, 1.4, is less than z, more than z/2
    new = private_run(tmp_path / "new", "fedavg", *few, *settings)
    assert noising_of(new).bit_std * 28 / CALLED == pytest.approx(3.0 if settings else Z)
    older(tmp_path / "old", new.ledger.terms)
    before = (tmp_path / "old" / LEDGER).read_bytes()
    run = private_run(tmp_path / "old", "fedavg", *few, *settings)
    given = noising_of(run)
    assert given.bit_std == pytest.approx(kept * CALLED / 28)
    assert given.std == pytest.approx((Z**-2 - (2 * kept) ** -2) ** -0.5 * S * CALLED / 28)
    assert (tmp_path / "old" / LEDGER).read_bytes() == before
    assert run.account(1000)["count_noise"] == pytest.approx(kept)


@pytest.mark.parametrize("settings", [[], ["method.beta=0.8"]])
@pytest.mark.parametrize("cohort", [40, COHORT])
def test_where_a_twentieth_of_the_cohort_is_z_or_more_nothing_has_changed(tmp_path, settings, cohort):
    given = ["fedmed", *settings, f"privacy.cohort={cohort}"]
    new = private_run(tmp_path / "new", *given)
    older(tmp_path / "old", new.ledger.terms)
    old = private_run(tmp_path / "old", *given)
    assert noising_of(new)._replace(release=None) == noising_of(old)._replace(release=None)


def test_a_run_that_goes_on_keeps_the_count_noise_of_its_ledger(tmp_path):
    terms = private_run(tmp_path / "made", "fedavg", *FEW).ledger.terms
    (tmp_path / "run").mkdir()
    open_ledger(tmp_path / "run", replace(terms, count_noise=1.9))  # by another rule than today's
    run = private_run(tmp_path / "run", "fedavg", *FEW)
    assert noising_of(run).bit_std == 1.9
    with pytest.raises(PrivacyError, match=r"other terms \(count_noise\)"):
        private_run(tmp_path / "run", "fedavg", *FEW, "privacy.count_noise=2.1")


# --- secure sums that open by one client ------------------------------------------------------------------------------

REAL = ["privacy.population=none", "privacy.cohort=none", "privacy.delta=1e-7", "privacy.quantile=none"]


@pytest.mark.parametrize(
    ("settings", "met"),
    [
        ([], 0.0),
        (["secure.on=true"], chance(50, CALLED / 50, Opening(3))),
        (["secure.on=true", "secure.floor=8"], chance(50, CALLED / 50, Opening(8))),
        (["secure.on=true", "secure.threshold=6"], chance(50, CALLED / 50, Opening(3, 6))),
        (["secure.on=true", "privacy.mechanism=tree", "participation.sampling=uniform"], None),
        (["secure.on=true", "privacy.population=1000", "privacy.cohort=9"], chance(1000, 0.009, Opening(3))),
        (["secure.on=true", "privacy.population=1000000", "privacy.cohort=5000"], 0.0),
    ],
    ids=["not masked", "floor", "higher floor", "threshold", "tree", "small fleet", "fleet"],
)
def test_a_row_says_how_often_a_sum_opens_by_one_client(tmp_path, settings, met):
    row = private_run(tmp_path / "run", "fedavg", *REAL, *settings).row()
    if met is None:
        assert isinstance(row, TreeRelease)
    else:
        assert row.hinge == met
        assert row.q < 1
    assert met != 0 or epsilon([row], 1e-7) == epsilon([Release(row.z, row.q)], 1e-7)
    assert not met or epsilon([row], 1e-7) > epsilon([Release(row.z, row.q)], 1e-7)


def test_noise_is_calibrated_for_sums_that_open_by_one_client(tmp_path):
    given = [*REAL, "privacy.noise=none", "privacy.epsilon=4", "train.rounds=20"]
    plain, masked = (private_run(tmp_path / k, "fedavg", *given, f"secure.on={k}") for k in ("false", "true"))
    assert masked.ledger.terms.z > plain.ledger.terms.z
    assert masked.ledger.allows([masked.row()] * 20)
    assert not masked.ledger.allows([masked.row()] * 22)


@pytest.mark.parametrize(
    ("reported", "uploaded", "settings", "booked"),
    [
        (9, 9, [], 8 / 50),  # all stayed: the chance of how many are called is in the row
        (9, 8, [], 8 / 50),  # seven must stay: one less would not have closed it
        (9, 7, [], 1.0),
        (9, 6, [], 1.0),  # one more would have opened it
        (6, 6, [], 1.0),
        (9, 5, [], 8 / 50),
        (9, 7, ["secure.on=false"], 8 / 50),
        (9, 7, ["privacy.population=1000", "privacy.cohort=100"], 0.1),  # the fleet's clients are not these
    ],
)
def test_a_round_beside_the_threshold_is_booked_without_amplification(tmp_path, reported, uploaded, settings, booked):
    pytest.importorskip("cryptography")
    like = {"w": torch.zeros(3)}
    run = private_run(tmp_path / "run", "fedavg", *REAL, "secure.on=true", *settings)
    lost = [None] * uploaded + ["dropped before upload"] * (reported - uploaded)
    lost += ["dropped before report"] * (9 - reported)
    called = {f"c{k}": Fate(k, Work(), 1.0, why) for k, why in enumerate(lost)}
    summed = run.gather(state(like), frozenset(), called)[0](like)
    for k in range(uploaded):
        summed.add(f"c{k}", like, Share({"w": 1.0}, {"w": 1.0}))
    summed.aggregate(())
    (entry,) = run.ledger.entries
    assert entry.row.q == pytest.approx(booked)
    assert run.row().q < 1  # the next one is not known yet


def test_a_round_beside_the_threshold_that_the_budget_has_no_room_for_is_not_begun(tmp_path):
    given = [*REAL, "privacy.noise=none", "privacy.epsilon=4", "train.rounds=20", "secure.on=true"]
    run = private_run(tmp_path / "run", "fedavg", *given)
    like = {"w": torch.zeros(3)}
    lost = dict(enumerate([None] * 7 + ["dropped before upload"] * 2))
    run.gather(state(like), frozenset(), {f"c{k}": Fate(k, Work(), 1.0, why) for k, why in lost.items()})
    assert run.affords()  # the first
    for _ in range(19):
        run.ledger.book(run.row(), "update", 0)
    assert run.allows()
    assert not run.affords()
    run.gather(state(like), frozenset(), fates(9))
    assert run.affords()
