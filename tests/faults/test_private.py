"""A private federation: the same as a private simulation but for its randomness, which nobody can draw again."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from scipy import stats

from keyfed.engine.network import init_params
from keyfed.errors import ConfigError, PrivacyError
from keyfed.federated.cohort import poisson_cohort
from keyfed.lab.audit.audit import audit_run
from keyfed.private.dp import noise
from keyfed.private.dp.accounting import Release, epsilon
from keyfed.private.dp.ledger import read_ledger
from keyfed.reports.run_page import write_report
from keyfed.run import privacy as run_privacy
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.prepare import build_network
from keyfed.run.privacy import account_of_run
from keyfed.run.remote import private as deployed_private
from keyfed.wire import client as session
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver
from tests.listeners import Heard

from .deployed import last_model, vocabulary
from .private import deploy, enrol, models_of, private_config, recorded, without_noise

METHODS = {
    "fedavg": {},
    "fedavg by tokens": {"privacy": {"weight_cap": 300.0, "mean_weight": 0.5}},
    "fedadam": {},
    "fedatt": {"bound": 5.0},
    "fedmed": {"mediation": False},
    "fedadmm": {"server_step": "late"},
    "moving clip": {"privacy": {"quantile": 0.5, "count_noise": 5.0}},
    "moving clip, usual noise": {"privacy": {"quantile": 0.5}},
    "tree": {"privacy": {"mechanism": "tree"}, "clients": 6, "cohort": 3, "rounds": 4},
}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize(  # a clip that nothing reaches is one for all methods: a mean, a ratio and increments show it
    ("name", "clip"), [*((name, 0.3) for name in METHODS), ("fedavg", 50.0), ("fedatt", 50.0), ("fedadmm", 50.0)]
)
def test_without_noise_it_equals_the_private_simulation(tmp_path, monkeypatch, name, clip, secure):
    without_noise(monkeypatch)
    more = dict(METHODS[name])
    method = name if name.startswith("fed") and " " not in name else "fedavg"
    privacy = {**more.pop("privacy", {}), "clip": clip}
    config = private_config(tmp_path, method, secure=secure, privacy=privacy, **{"rounds": 2, **more})
    # Files have an ending that their clients' names lack: by number both take the same turns.
    monkeypatch.setattr(run_privacy, "group_of", lambda client, groups, seed: int(client[7]) % groups)
    train(config, tmp_path / "simulated")
    result = deploy(tmp_path, config, *enrol(tmp_path, 6 if name == "tree" else 5))
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    assert set(simulated) == set(deployed)
    for layer, p in simulated.items():
        if secure:  # the very same integers
            assert torch.equal(p, deployed[layer]), layer
        else:  # a part travels in the precision of the model
            torch.testing.assert_close(deployed[layer], p, rtol=1e-5, atol=1e-6)
    clips = [[r["privacy"]["clip"] for r in read_metrics(tmp_path / run)] for run in ("simulated", "deployed")]
    assert clips[0] == clips[1]
    assert len(set(clips[0])) == (len(clips[0]) if "moving clip" in name else 1)
    assert result["privacy"]["verdict"] == "BOUND ONLY"  # of five clients: δ is large


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_drawn_cohorts_that_coincide_give_the_same_model(tmp_path, monkeypatch, secure):
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=7, cohort=6, rounds=4, secure=secure)
    rounds = itertools.count()

    def as_simulated(names, rate):
        return [names[k] for k in poisson_cohort(len(names), rate, config.train.seed, next(rounds))]

    monkeypatch.setattr(deployed_private, "drawn", as_simulated)
    train(config, tmp_path / "simulated")
    deploy(tmp_path, config, *enrol(tmp_path, 7))
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    for layer, p in simulated.items():
        assert torch.equal(p, deployed[layer]), layer
    assert any(bool((p != 0).any()) for p in deployed.values())


def test_noise_comes_from_the_operating_system_and_from_no_seed(tmp_path, monkeypatch):
    config = private_config(tmp_path, clients=3, rounds=2)
    asked = []

    def entropy(count):
        asked.append(count)
        return noise.os.urandom(count)

    monkeypatch.setattr(deployed_private, "system", lambda: noise.system(entropy))
    for name in ("one", "two"):
        torch.manual_seed(0)
        random.seed(0)
        deploy(tmp_path, config, *enrol(tmp_path, 3, name + "-clients"), name)
    count = sum(p.numel() for p in last_model(tmp_path / "one").values())
    assert sum(asked) == 2 * 2 * 4 * 16 * count  # runs, rounds, normals of a number, bytes of a normal
    one, two = last_model(tmp_path / "one"), last_model(tmp_path / "two")
    assert not any(torch.equal(p, two[layer]) for layer, p in one.items())
    kept = "".join(path.read_text("utf-8", "replace") for path in (tmp_path / "one").glob("*.json*"))
    assert "noise_seed" not in kept


def test_cohorts_are_drawn_from_the_operating_system():
    assert isinstance(deployed_private.SYSTEM, random.SystemRandom)
    names = [f"c{k}" for k in range(20_000)]
    drawn = [set(deployed_private.drawn(names, 0.3)) for _ in range(2)]
    for cohort in drawn:
        assert abs(len(cohort) - 6_000) < 5 * math.sqrt(20_000 * 0.3 * 0.7)
    both = len(drawn[0] & drawn[1])
    assert abs(both - 1_800) < 5 * math.sqrt(20_000 * 0.09 * 0.91)  # rounds know nothing of each other
    assert deployed_private.drawn(names, 1.0) == names


def test_the_noise_that_is_released_has_the_stated_spread(tmp_path, monkeypatch):
    """Empty cohorts release noise alone: the step times the public denominator, in clips."""
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: [])
    config = private_config(tmp_path, clients=3, rounds=3, privacy={"noise": 1.7, "clip": 4.0})
    config = replace(config, model=replace(config.model, embed=64, hidden=240))
    deploy(tmp_path, config, *enrol(tmp_path, 3))
    vocab, _ = vocabulary(tmp_path)
    before = init_params(build_network(config, len(vocab), None), config.train.seed)
    rounds = []
    for after in models_of(tmp_path / "deployed", 3):
        step = torch.cat([((after[n].double() - p.double()) * 3 / 4.0).flatten() for n, p in before.items()])
        rounds.append(step)
        before = after
    count, everything = len(rounds[0]), torch.cat(rounds)
    assert count > 100_000
    assert float(everything.std()) == pytest.approx(1.7, rel=0.01)
    assert abs(float(everything.mean())) < 5 * 1.7 / math.sqrt(len(everything))
    assert stats.kstest(everything.numpy() / 1.7, "norm").pvalue > 1e-7  # the operating system's noise has no seed
    for one, other in itertools.combinations(rounds, 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5.5 / math.sqrt(count)
    assert len(read_ledger(tmp_path / "deployed").entries) == 3


def test_an_empty_cohort_costs_its_row_and_says_nothing(tmp_path, monkeypatch):
    cohorts = iter([[], None, []])
    everybody = [f"client-{k}" for k in range(3)]
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: everybody if next(cohorts) is None else [])
    deploy(tmp_path, private_config(tmp_path, clients=3, cohort=2), *enrol(tmp_path, 3))
    lines = read_metrics(tmp_path / "deployed")
    assert len(read_ledger(tmp_path / "deployed").entries) == 3
    ignored = ("round", "privacy")
    assert len({json.dumps({k: v for k, v in line.items() if k not in ignored}) for line in lines}) == 1


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_everything_says_guarantee_and_nothing_is_said_of_clients(tmp_path, secure):
    config = private_config(tmp_path, "fedatt", bound=5.0, secure=secure, privacy={"noise": 0.7, "delta": 1e-3})
    result = deploy(tmp_path, config, *enrol(tmp_path))
    run = tmp_path / "deployed"
    assert result["privacy"]["verdict"] == "GUARANTEE"
    assert (result["privacy"]["population"], result["privacy"]["randomness"]) == (5, "system")
    found = account_of_run(run)
    assert found["verdict"] == "GUARANTEE"
    assert found["pld"] == pytest.approx(result["privacy"]["pld"], rel=1e-2)
    assert all(line["privacy"]["verdict"] == "GUARANTEE" for line in read_metrics(run))
    written = write_report(run)
    assert "GUARANTEE for the 5 clients of this run." in written[0].read_text("utf-8")
    audited = audit_run(run)
    assert (audited["verdict"], audited["contradicted"]) == ("GUARANTEE", False)
    assert "no attack was made" in (run / "audit.md").read_text("utf-8")
    assert "Clients score nothing" in " ".join(found["statement"])
    said = (run / "metrics.jsonl").read_text() + (run / "result.json").read_text() + (run / "ledger.jsonl").read_text()
    assert "client-" not in said
    for line in read_metrics(run):
        told = {key for key, value in line.items() if value not in (None, [], {}, False)}
        assert told == {"round", "cohort", "traffic", "privacy"}
    assert result["test"]["perplexity"] is None
    assert result["best_round"] == result["rounds"] == 3
    silent = ("refused", "lost", "tokens_trained", "reached", "seconds", "seconds_per_round")
    assert [result[key] for key in silent] == [None] * len(silent)


def test_the_budget_ends_the_run(tmp_path):
    config = private_config(tmp_path, clients=3, rounds=6, privacy={"noise": 1.0, "epsilon": 2.6, "delta": 0.1})
    result = deploy(tmp_path, config, *enrol(tmp_path, 3))
    assert 0 < result["rounds"] < 6
    assert result["privacy"]["pld"] <= 2.6
    spent = [line["privacy"]["epsilon"] for line in read_metrics(tmp_path / "deployed")]
    assert spent == sorted(spent)
    assert len(set(spent)) == result["rounds"]


def test_who_enrols_during_a_run_waits_for_the_next(tmp_path, monkeypatch):
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=4, cohort=3, rounds=2)
    transport, roster = enrol(tmp_path, 3)
    late, entry = enrol(tmp_path, 4, "late")
    transport.handlers |= {"client-3": late.handlers["client-3"]}
    called = []
    inner = transport.fault

    def watch(client, post, handler):
        called.append(client)
        if post.kind == "hello" and client == "client-2":
            roster.write({"client-3": entry.entries["client-3"]})
        return inner(client, post, handler)

    transport.fault = watch
    result = deploy(tmp_path, config, transport, roster)
    assert {"client-0", "client-1", "client-2"} <= set(called)
    assert "client-3" in roster.names()
    assert result["privacy"]["population"] == 3
    assert [len(json.loads(p.read_text())) for p in [tmp_path / "deployed" / "enrolled.json"]] == [3]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_rounds_that_open_by_one_client_are_counted_without_amplification(tmp_path, secure):
    """A row carries the chance of such a round among those who are there, and ε counts with it."""
    config = private_config(tmp_path, clients=12, cohort=8, rounds=2, secure=secure, privacy={"delta": 1e-3})
    transport, roster = enrol(tmp_path, 12)
    del transport.handlers["client-11"]
    result = deploy(tmp_path, config, transport, roster)
    rows = [e.row for e in read_ledger(tmp_path / "deployed").entries]
    met = math.comb(10, 2) * (8 / 12) ** 2 * (4 / 12) ** 8 if secure else 0.0
    assert [row.hinge for row in rows] == pytest.approx([met] * 2)
    amplified = epsilon([Release(1.0, 8 / 12, 2)], 1e-3, grid=1e-3)
    said = " ".join(result["privacy"]["statement"])
    if secure:  # 0.006 rounds in expectation: two at most, but for a chance of 1e-5
        assert result["privacy"]["pld"] == pytest.approx(epsilon([Release(1.0, 1.0, 2)], 1e-3, grid=1e-3))
        assert "2 of 2 releases are counted at rate 1" in said
    else:
        assert result["privacy"]["pld"] == pytest.approx(amplified)
        assert "at rate 1 for them" not in said
    assert result["privacy"]["pld"] >= amplified


@pytest.mark.parametrize("text", ["the cat .\n", "", None], ids=["too little", "empty", "gone"])
def test_a_client_without_enough_text_takes_part_with_zeros(tmp_path, monkeypatch, text):
    """Refused at hello it would close the sum of the others, who are three and must all stay."""
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=3, rounds=1, secure=True)
    given, path = enrol(tmp_path, 3), tmp_path / "texts" / "client-1.txt"
    path.unlink() if text is None else path.write_text(text)
    deploy(tmp_path, config, *given)
    vocab, _ = vocabulary(tmp_path)
    started = init_params(build_network(config, len(vocab), None), config.train.seed)
    assert any(not torch.equal(p, started[name]) for name, p in last_model(tmp_path / "deployed").items())


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_nothing_tells_who_or_how_many_were_drawn(tmp_path, monkeypatch, secure):
    """Neither clients of a plain round, nor the screen; clients of one secure sum know each other, and this is said."""
    everybody = [f"client-{k}" for k in range(8)]
    cohorts = itertools.cycle([everybody[:5], everybody, everybody[2:]])
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: next(cohorts))
    heads = []

    def fault(client, post, handler):
        if post.kind == "train":
            heads.append(unpack(post.body).head)
            if client == "client-3":
                return Lost("no answer")
        return deliver(client, post, handler)

    heard = Heard()
    config = private_config(tmp_path, clients=8, cohort=7, rounds=3, secure=secure)
    result = deploy(tmp_path, config, *enrol(tmp_path, 8, fault=fault), listener=heard)
    assert not any("client-" in line for line in heard.lines)
    assert sum("some of the clients that were called take no part: no answer" in line for line in heard.lines) == 1
    said = " ".join(result["privacy"]["statement"])
    assert ("know each other's names" in said) == secure
    if not secure:
        told = {json.dumps({k: v for k, v in head.items() if k not in ("round", "model", "public")}) for head in heads}
        assert len(told) == 1
        assert not any("members" in head or "cohort" in head for head in heads)
    audited = audit_run(tmp_path / "deployed")
    assert not audited["contradicted"]
    path = tmp_path / "deployed" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds": null', '"seconds": 1.5', 1))
    audited = audit_run(tmp_path / "deployed")
    assert audited["contradicted"]
    assert "seconds" in audited["contradictions"][0]


def test_a_plain_round_has_room_for_everybody_and_refusals_are_heard_of(tmp_path, monkeypatch):
    heard = Heard()
    monkeypatch.setattr(session, "MOST_MEMBERS", 3)
    config = private_config(tmp_path, clients=5, rounds=1)
    deploy(tmp_path, config, *enrol(tmp_path, 5), listener=heard)
    assert not any("WARNING" in line for line in heard.lines)
    config = private_config(tmp_path, clients=5, rounds=2, secure=True)
    deploy(tmp_path, config, *enrol(tmp_path, 5, "others"), "secure", listener=heard)
    assert sum("WARNING: some clients refused what they were asked" in line for line in heard.lines) == 1
    assert sum("a secure sum stayed closed" in line for line in heard.lines) == 1


@pytest.mark.parametrize("raw", [False, True], ids=["given", "from clients"])
def test_a_vocabulary_of_the_clients_own_words_is_named_as_not_covered(tmp_path, raw):
    config = private_config(tmp_path, clients=3, rounds=1)
    result = deploy(tmp_path, config, *enrol(tmp_path, 3), raw_vocabulary=raw)
    named = "The vocabulary was made from these clients' text without noise: no ε covers it."
    assert (named in result["privacy"]["statement"]) == raw
    assert (named in account_of_run(tmp_path / "deployed")["statement"]) == raw
    found = {(f["check"], f["level"]) for f in audit_run(tmp_path / "deployed")["findings"]}
    assert (("vocabulary", "warning") in found) == raw


def test_few_clients_are_said_to_be_few_in_the_statement(tmp_path):
    result = deploy(tmp_path, private_config(tmp_path, clients=3, rounds=1), *enrol(tmp_path, 3))
    said = result["privacy"]["statement"]
    assert any(line.startswith("3 clients are few") for line in said)
    assert result["privacy"]["verdict"] == "BOUND ONLY"
    assert said[0].startswith("BOUND ONLY for the 3 clients of this run, no meaningful guarantee: δ = 0.3 is above")
    assert "GUARANTEE" not in " ".join(said)
    assert audit_run(tmp_path / "deployed")["verdict"] == "BOUND ONLY"


REFUSED = {
    "sums that open by one": (
        {"clients": 12, "cohort": 4, "secure": True},
        {},
        PrivacyError,
        "set train.cohort to 6 or more",
    ),
    "an imagined fleet": ({"privacy": {"population": 1_000_000}}, {}, ConfigError, "privacy.population is 1,000,000"),
    "a target on scores": ({}, {"train": {"until": "perplexity=5"}}, ConfigError, "train.until reads clients' scores"),
    "first to finish": ({}, {"participation": {"over_select": 0.3, "sampling": "uniform"}}, ConfigError, "over_select"),
    "a minimum": ({}, {"participation": {"minimum": 2}}, PrivacyError, "participation.minimum is 2"),
    "a fixed cohort": ({"cohort": 3}, {"participation": {"sampling": "uniform"}}, PrivacyError, "sampling=poisson"),
    "more than are enrolled": ({"cohort": 9}, {}, PrivacyError, "train.cohort is 9, and 5 clients are enrolled"),
    "noise that a count eats": (
        {"privacy": {"quantile": 0.5, "count_noise": 0.25}},
        {},
        PrivacyError,
        "privacy.count_noise 0.25; set that above 0.5, or privacy.quantile=none",
    ),
    "delta for fewer": ({"privacy": {"delta": 0.3}}, {}, PrivacyError, "delta"),
    "a method without a bound": ({"method": "fedatt"}, {}, PrivacyError, "no bound of its own"),
    "a running mean of some": ({"method": "admm", "cohort": 3}, {}, PrivacyError, "3 of 5 clients are called"),
    "losses that were released": ({"method": "fedmed"}, {}, PrivacyError, "told the clip alone"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_break_the_promise_is_refused_by_name(tmp_path, what):
    given, changes, error, words = REFUSED[what]
    config = private_config(tmp_path, **given)
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    with pytest.raises(error, match=words) as caught:
        deploy(tmp_path, config, *enrol(tmp_path, given.get("clients", 5)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "deployed").exists()


def test_a_fleet_of_one_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match="1 clients are enrolled"):
        deploy(tmp_path, private_config(tmp_path, clients=1), *enrol(tmp_path, 1))


def test_rounds_have_noise_of_their_own(tmp_path, monkeypatch):
    drawn = recorded(monkeypatch)
    deploy(tmp_path, private_config(tmp_path, clients=3), *enrol(tmp_path, 3))
    assert len(drawn) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
