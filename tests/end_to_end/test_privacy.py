"""Private runs from the command line: a budget that is kept, a ledger that is whole, and nothing logged that tells."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from keyfed.config.load import Config, apply_settings
from keyfed.config.schema import PrivacyConfig
from keyfed.errors import ConfigError, PrivacyError
from keyfed.private.dp import accounting
from keyfed.private.dp.accounting import COARSE, Opening, Release, chance, epsilon
from keyfed.private.dp.ledger import HEAD, LEDGER, read_ledger
from keyfed.run.folder import load_model, read_metrics, read_result
from keyfed.run.loop import train
from keyfed.run.prepare import prepare
from keyfed.run.privacy import account_of_run
from keyfed.run.start import token_counts
from keyfed.text.vocab import SPECIALS, Vocab
from tests.listeners import Heard

TINY = [
    "model.embed=8", "model.hidden=12", "data.vocab=60", "train.cohort=3", "train.workers=1", "data.window=8",
    "train.valid_tokens=500", "train.baselines=false",
]  # fmt: skip
FLEET = ["participation.sampling=poisson", "privacy.noise=1", "privacy.population=1000000", "privacy.twin=false"]
EVERYBODY = ["privacy.noise=20", "privacy.delta=1e-7"]  # a rate of 1, and no amplification by it
OF_SEVEN = ["privacy.population=none", "privacy.delta=0.01", "privacy.clip=0.05"]  # whose noise is long beside any step
TURNS = ["participation.sampling=uniform", "privacy.noise=4"]
TELLING = ("attention", "effective_by_layer", "tokens", "reported", "modelled_seconds", "compression_error")


def configured(corpus, method="fedavg", rounds=3, *settings):
    config = Config(method=method)
    return apply_settings(config, [f"data.name={corpus}", f"train.rounds={rounds}", *TINY, *FLEET, *settings])


@pytest.mark.usefixtures("built_in_in_short")
def test_a_private_run_on_the_built_in_corpus_keeps_its_budget_and_says_what_it_cost(keyfed, tmp_path):
    run = tmp_path / "run"
    small = ["--set", "data.max_tokens=200", "--set", "train.test_tokens=500", "--set", "train.cohort=5"]
    settings = [x for s in TINY[:3] + TINY[4:] for x in ("--set", s)] + small
    code, out, err = keyfed(
        "train", "fedavg", "--dp", "epsilon=2", "--population", 1_000_000, "--rounds", 4, "--out", run, *settings
    )
    assert code == 0, err
    printed = [line for line in err.splitlines() if line.startswith("round") and "epsilon" in line]
    spent = [float(line.split("epsilon")[1].split()[0]) for line in printed]
    assert len(spent) == 4
    assert spent == sorted(spent)
    assert 1.8 < spent[-1] <= 2
    assert all("SIMULATED" in line for line in printed)
    assert "privacy cost: test perplexity" in out
    report = (run / "report.md").read_text("utf-8")
    for words in ("SIMULATED guarantee for a population of 1,000,000", "without clip and noise", "Unit: one client",
                  "Not covered: validation", "Amplification:"):  # fmt: skip
        assert words in report
    code, out, err = keyfed("privacy", "ledger", run, "--json")
    assert code == 0, err
    account = json.loads(out)
    assert account["verdict"] == "SIMULATED"
    assert account["pld"] == pytest.approx(spent[-1], abs=2e-3)
    assert account["pld"] <= 2
    code, out, err = keyfed("privacy", "plan", "--run", run, "--epsilon", 1, "--cohort", 1000, "--rounds", 10, "--json")
    assert code == 0, err
    (measured,) = json.loads(out)["measured"]
    assert measured["noiseless"] > 0
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    (run / LEDGER).write_text("".join(lines).replace('"round": 1', '"round": 0'))
    code, out, err = keyfed("privacy", "ledger", run)
    assert (code, out) == (2, "")
    assert "changed or rolled back" in err


def test_nothing_that_was_not_noised_is_in_the_metrics(corpus, tmp_path):
    train(configured(corpus, "fedatt", 2, "method.bound=3", "train.cohort=4"), tmp_path / "run")
    for record in read_metrics(tmp_path / "run"):
        assert not set(TELLING) & set(record)
        assert all(record[key] is None for key in ("loss", "worked", "contributors", "refused", "lost"))
        assert math.isfinite(record["privacy"]["epsilon"])
    result = read_result(tmp_path / "run")
    assert all(result[key] is None for key in ("clients_perplexity", "spread", "unseen_spread", "tokens_trained"))
    assert "train" not in result["oov_rate"]
    assert "test" in result["oov_rate"]
    texts = [p.read_text("utf-8") for p in (tmp_path / "run").rglob("*.json*")]
    assert not any(f"writer{k}" in text for text in texts for k in range(8))


@pytest.mark.parametrize(
    "more", [(), ("privacy.mechanism=tree", "privacy.quantile=none", "participation.sampling=uniform")]
)
def test_a_run_that_was_stopped_between_rounds_ends_as_if_it_had_not(corpus, tmp_path, more):
    config = configured(corpus, "fedavg", 4, *more)
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", listener=Heard(2))
    result = train(config, tmp_path / "stopped", resume=True)
    assert (tmp_path / "stopped" / LEDGER).read_bytes() == (tmp_path / "whole" / LEDGER).read_bytes()
    one, two = (load_model(tmp_path / name).params for name in ("whole", "stopped"))
    assert all((one[name] == two[name]).all() for name in one)
    assert result["privacy"]["retried"] == 0


def test_a_round_that_is_done_again_costs_again_and_has_other_noise(corpus, tmp_path):
    config = configured(corpus, "fedavg", 3, "train.checkpoint_every=5", "privacy.epsilon=1", "privacy.noise=none")
    once = train(config, tmp_path / "once")

    with pytest.raises(OSError, match="gone"):
        train(config, tmp_path / "again", listener=Heard(1, by=OSError("the machine is gone")))
    result = train(config, tmp_path / "again", resume=True)
    assert [(e.round, e.attempt) for e in read_ledger(tmp_path / "again").entries][:2] == [(0, 0), (0, 1)]
    assert result["privacy"]["retried"] == 1
    assert result["rounds"] == 2  # the budget was for three releases, and one of them is lost
    assert result["privacy"]["pld"] <= 1
    assert once["rounds"] == 3
    one, two = (read_metrics(tmp_path / name)[0]["valid"]["nats"] for name in ("once", "again"))
    assert one != two


def test_a_round_that_is_done_again_calls_other_clients(corpus, tmp_path, monkeypatch):
    """Two releases of one sample would cost ε of noise z/√2, and the ledger has two rows of noise z."""
    from keyfed.run import loop as training

    called = []

    def planned(*given):
        made = plan_of_round(*given)
        called.append((given[3], [f.client for f in made.fates]))
        return made

    plan_of_round = training.plan_of_round
    monkeypatch.setattr(training, "plan_of_round", planned)
    config = configured(corpus, "fedavg", 3, "train.checkpoint_every=5", "train.seed=4")

    with pytest.raises(OSError, match="gone"):
        train(
            config, tmp_path / "run", listener=Heard(2, by=OSError("the machine is gone"))
        )  # two rounds are released, and none is in a checkpoint
    train(config, tmp_path / "run", resume=True)
    assert [round for round, _ in called] == [0, 1, 0, 1, 2]
    first, again = called[:2], called[2:4]
    assert all(one[1] != two[1] for one, two in zip(first, again, strict=True))
    called.clear()
    train(config, tmp_path / "whole")
    assert called[:2] == first  # what was never lost is drawn as it always was
    assert [e.attempt for e in read_ledger(tmp_path / "run").entries] == [0, 0, 1, 1, 0]


def test_a_ledger_older_than_the_run_ends_it(corpus, tmp_path):
    config, run = configured(corpus, "fedavg", 3), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, run, listener=Heard(1))
    older = {name: (run / name).read_bytes() for name in (LEDGER, HEAD)}
    with pytest.raises(KeyboardInterrupt):
        train(config, run, resume=True, listener=Heard(2))
    for name, data in older.items():
        (run / name).write_bytes(data)
    with pytest.raises(PrivacyError, match="rolled back"):
        train(config, run, resume=True)


def test_a_budget_ends_the_run_in_time(corpus, tmp_path):
    heard = Heard()
    limit = epsilon([Release(1.0, 0.005, 2)], 1e6**-1.1, population=10**6, grid=COARSE) + 1e-9
    config = configured(corpus, "fedavg", 5, f"privacy.epsilon={limit}", "train.eval_every=5")
    result = train(config, tmp_path / "run", listener=heard)
    assert result["rounds"] == 2
    assert result["privacy"]["pld"] <= limit
    assert any("budget is spent after round 2" in line for line in heard.lines)
    assert "valid" in read_metrics(tmp_path / "run")[-1]


def test_an_empty_cohort_releases_noise_and_costs_its_row(corpus, tmp_path):
    config = configured(corpus, "fedavg", 6, "train.cohort=1", "privacy.quantile=none")
    result = train(
        config, tmp_path / "run"
    )  # of eight clients, each called with chance 1/8: e⁻¹ of the rounds are empty
    assert result["privacy"]["releases"] == result["rounds"] == 6


def test_a_real_population_is_accounted_by_its_own_rate(corpus, tmp_path):
    config = configured(corpus, "fedavg", 2, "privacy.population=none", "privacy.delta=0.01", "privacy.quantile=none")
    private = train(config, tmp_path / "run")["privacy"]
    assert private["rate"] == pytest.approx(3 / private["clients"])
    assert private["verdict"] == "SIMULATED"  # the noise derives from the run's seed
    with pytest.raises(PrivacyError, match="delta"):
        train(apply_settings(config, ["privacy.delta=0.5"]), tmp_path / "other")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedsgd", ["privacy.cohort=none"]),
        ("fedmed", ["method.mediation=false", "train.cohort=4"]),
        ("fedmed", ["method.beta=0.8", "train.cohort=4"]),
        ("fedmed", ["method.beta=0.8", "privacy.mechanism=tree", "privacy.quantile=none", *TURNS]),
        ("admm", ["train.cohort=7", "method.lr=0.003", *EVERYBODY]),
        ("liadmm", ["train.cohort=7", *EVERYBODY]),
        ("fedadmm", ["train.cohort=7", "method.lr=0.5", *EVERYBODY]),
        ("fedadam", ["privacy.weight_cap=300", "privacy.mean_weight=0.8", "method.bias_correction=true"]),
        ("fedadmm", ["method.server_step=published", "method.lr=0.5", "train.cohort=6"]),
        ("fedavg", ["train.frozen_rounds=1"]),
        ("fedavg", ["train.cohort=7", *EVERYBODY, *OF_SEVEN]),
        ("fedavg", ["upload.keep=0.2"]),
    ],
)
def test_methods_that_claim_a_bound_train(corpus, tmp_path, method, settings):
    result = train(configured(corpus, method, 2, *settings), tmp_path / "run")
    assert result["privacy"]["pld"] <= 8
    assert math.isfinite(result["test"]["perplexity"])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedadmm", ["method.server_step=published", "method.lr=0.5"]),
        ("fedadmm", ["method.lr=0.5", *EVERYBODY]),
        ("admm", EVERYBODY),
        ("liadmm", EVERYBODY),
    ],
)
def test_clients_that_remember_book_what_they_sent(corpus, tmp_path, method, settings):
    """With a clip this small, what clients with duals have sent can only be as far from θ as the clip allows."""
    from keyfed.engine.client_state import read_state

    settings = [*settings, "train.cohort=7", "privacy.clip=0.01"]
    config = configured(corpus, method, 2, *settings, "privacy.quantile=none")
    train(config, tmp_path / "run")
    from keyfed.engine.network import init_params

    start = init_params(load_model(tmp_path / "run").spec, config.train.seed)
    files = list((tmp_path / "run" / "clients").rglob("*.safetensors"))
    assert files
    for path in files:
        state = read_state(path, "cpu")
        sent = [(state[f"sent/{name}"] - p).double().square().sum() for name, p in start.items()]
        meant = [(state[f"w/{name}"] - p).double().square().sum() for name, p in start.items()]
        assert 0 < float(sum(sent)) ** 0.5 <= 2 * 0.01 + 1e-5  # two rounds, float32 sums
        assert float(sum(meant)) ** 0.5 > 0.05


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedadmm", ["method.server_step=published", "method.lr=0.5"]), ("fedavg", ["upload.keep=0.5"])],
)
def test_a_clip_below_the_norms_rises_also_where_clients_clip_themselves(corpus, tmp_path, method, settings):
    """Counted after its own clip, a client that keeps state would always be within, and the clip would only fall."""
    given = ["train.cohort=7", "privacy.clip=0.01", "privacy.quantile=0.5", "privacy.population=100000000"]
    train(configured(corpus, method, 3, *settings, *given, "privacy.cohort=1000000"), tmp_path / "run")
    clips = [record["privacy"]["clip"] for record in read_metrics(tmp_path / "run")]
    assert clips[0] == 0.01
    assert clips == sorted(clips)
    assert clips[-1] > 0.01 * 1.1


def test_refusals_are_one_line(keyfed, corpus, tmp_path):
    def fails(*arguments):
        code, out, err = keyfed(
            "train", *arguments, "--data", corpus, "--set", "train.cohort=3", "--out", tmp_path / "run"
        )
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        return err

    assert "epsilon=NUMBER" in fails("fedavg", "--dp", "8")
    assert "3 of 7 clients are called, so set train.cohort=7" in fails("admm", "--dp", "epsilon=8",
                                                                     "--set", "train.rounds=50")  # fmt: skip
    assert "over_select" in fails("fedavg", "--dp", "epsilon=8", "--set", "participation.over_select=0.3",
                                  "--set", "participation.sampling=uniform")  # fmt: skip
    assert "poisson" in fails("fedavg", "--dp", "epsilon=8", "--set", "participation.sampling=uniform")
    assert "neither privacy.epsilon nor privacy.noise" in fails("fedavg", "--population", 1000)


def test_counts_that_take_all_the_noise_are_refused_before_anything_is_written(keyfed, corpus, tmp_path):
    settings = [x for s in [*TINY, "train.cohort=7"] for x in ("--set", s)]
    given = ["train", "admm", "--data", corpus, "--dp", "noise=5", *settings, "--out", tmp_path / "run"]
    code, out, err = keyfed(*given, "--set", "privacy.count_noise=0.35")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "privacy.count_noise 0.35; set that above 2.5" in err
    assert not (tmp_path / "run" / "run.toml").exists()
    assert not (tmp_path / "run" / LEDGER).exists()
    code, out, err = keyfed(*given, "--dry-run")  # without one it is that of the noise: seven clients are few
    assert code == 0, err
    assert "noise 5 (of the sum 5.774, of counts 5 clients)" in out


def test_a_dry_run_says_what_would_be_promised(keyfed, corpus, tmp_path):
    settings = [x for s in TINY for x in ("--set", s)]
    code, out, err = keyfed(
        "train", "--data", corpus, "--dp", "noise=1", "--population", 10_000, "--dry-run", *settings
    )
    assert code == 0, err
    assert "privacy: SIMULATED, no budget" in out
    assert "rate 0.005, population 10,000, cohort 50" in out
    assert "training tokens" not in out


def test_fedatts_own_noise_is_said_to_promise_nothing(keyfed, corpus, tmp_path):
    settings = [x for s in TINY for x in ("--set", s)]
    code, _, err = keyfed("train", "fedatt", "--data", corpus, "--rounds", 1, "--set", "noise=0.001",
                          "--out", tmp_path / "run", *settings)  # fmt: skip
    assert code == 0, err
    assert "ε is ∞ whatever the noise" in (tmp_path / "run" / "report.md").read_text("utf-8")
    code, out, _ = keyfed("privacy", "ledger", tmp_path / "run", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "NONE"
    assert json.loads(out)["pld"] is None


def test_a_removed_ledger_is_an_error_and_not_a_run_without_one(corpus, tmp_path, keyfed):
    train(configured(corpus, "fedavg", 1), tmp_path / "run")
    for name in (LEDGER, HEAD):
        (tmp_path / "run" / name).unlink()
    code, out, err = keyfed("privacy", "ledger", tmp_path / "run")
    assert (code, out) == (2, "")
    assert LEDGER in err


def test_a_start_that_knows_the_same_clients_is_refused_or_named(corpus, tmp_path):
    half = ["train.seed=5", "train.cohort=2"]  # a seed by which both halves have clients
    plain = apply_settings(
        Config(method="fedavg"),
        [f"data.name={corpus}", "train.rounds=1", *TINY, "data.clients_part=1/2", *half],
    )
    train(plain, tmp_path / "plain")
    begun = [*half, "data.clients_part=1/2", f"train.init={tmp_path / 'plain'}"]
    with pytest.raises(PrivacyError, match=r"train\.init is .* the same clients"):
        train(configured(corpus, "fedavg", 1, *begun), tmp_path / "refused")
    others = train(configured(corpus, "fedavg", 1, *begun, "data.clients_part=2/2"), tmp_path / "others")
    assert f"Started from {tmp_path / 'plain'}" in others["privacy"]["statement"][-1]
    train(configured(corpus, "fedavg", 1, *half, "data.clients_part=1/2"), tmp_path / "private")
    train(configured(corpus, "fedavg", 1, *begun, f"train.init={tmp_path / 'private'}"), tmp_path / "again")


def test_the_statement_says_what_it_does_not_say(corpus, tmp_path):
    private = train(configured(corpus, "fedavg", 1), tmp_path / "run")["privacy"]
    text = "\n".join(private["statement"])
    alone = epsilon([Release(1.0, 1.0)], private["delta"], grid=1e-3)
    assert f"somebody who knows who took part but sees only models: ε = {alone:.4g}." in text
    assert "Not against the server itself: it sees every upload, or with secure aggregation un-noised sums" in text
    for words in (
        "n-gram baselines",
        "noiseless twin",
        "folder clients/",
        "training starts from",
        "then its own ε and δ add",
    ):
        assert words in text


def test_central_training_beside_a_private_run_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.central"):
        train(configured(corpus, "fedavg", 1, "train.central=true"), tmp_path / "run")


def test_an_audit_says_what_it_does(keyfed, tmp_path, monkeypatch):
    def audit_run(run, *, quick, listener):
        listener.say("audit: something that takes long")
        findings = [{"check": "delta", "level": "warning", "text": "it is large"}, {"check": "weights", "level": "ok"}]
        against = ["ledger: two releases are missing"]
        cell = {"users": 4, "copies": 200, "canaries": 3, "in_beam": 2, "median": 11.04}
        attacks = {"canaries": {"cells": [cell]}, "membership": {"text": {"auc": 0.61, "auc_interval": (0.5, 0.71)}}}
        return {"verdict": "NONE", "contradicted": True, "contradictions": against, "findings": findings, **attacks}

    monkeypatch.setattr("keyfed.lab.audit.audit.audit_run", audit_run)
    code, out, err = keyfed("privacy", "audit", tmp_path, "--quick")
    assert code == 1  # a claim is contradicted
    lines = out.splitlines()
    assert lines[:2] == ["contradicted: ledger: two releases are missing", "warning: delta: it is large"]
    assert lines[2].startswith("canaries of 4 clients, 200 times in each: 2 of 3 found by a search, 11.0 bits")
    assert lines[3] == "membership of a text: AUC 0.61 (0.50 to 0.71; chance: 0.5)"
    assert lines[4].startswith("NONE: the claim is contradicted; see ")
    assert "audit: something that takes long" in err


def test_the_numbers_of_the_command_line(keyfed, monkeypatch, losses_on_a_coarse_grid):
    monkeypatch.setattr(accounting, "_epsilon", losses_on_a_coarse_grid)  # to all digits
    accounting.calibrate.cache_clear()
    code, out, _ = keyfed(
        "privacy", "epsilon", "--noise", 1, "--rate", 0.01, "--rounds", 1000, "--delta", 1e-5, "--json"
    )
    assert code == 0
    found = json.loads(out)
    assert found["pld"] == pytest.approx(1.828244, rel=1e-3)
    assert found["rdp"] == pytest.approx(2.101367, rel=1e-3)
    code, out, _ = keyfed("privacy", "calibrate", "--epsilon", 1, "--rate", 0.01, "--rounds", 1000, "--json")
    assert code == 0
    assert json.loads(out)["pld"] == pytest.approx(1.41584, rel=1e-3)
    code, out, _ = keyfed("privacy", "epsilon", "--noise", 7, "--separation", 314, "--rounds", 2000, "--delta", 1e-10)
    assert code == 0
    assert "epsilon" in out
    code, out, err = keyfed("privacy", "epsilon", "--noise", 1, "--delta", 1e-3, "--population", 1000)
    assert (code, out) == (2, "")
    assert "delta" in err


def test_the_plan_never_invents_a_perplexity(keyfed, corpus, tmp_path):
    asked = ["privacy", "plan", "--epsilon", 1, "--cohort", 1000, "--population", 100_000, "--rounds", 10]
    code, out, _ = keyfed(*asked)
    assert code == 0
    assert "perplexity: not estimated" in out
    train(configured(corpus, "fedavg", 1), tmp_path / "run")
    code, _, err = keyfed(*asked, "--run", tmp_path / "run")
    assert code == 2
    assert "measured no cost" in err


def test_a_run_adds_what_the_vote_on_its_vocabulary_cost(keyfed, corpus, tmp_path):
    """Noise of the operating system: two votes differ, the file says what it cost, and every statement adds it."""
    out = [tmp_path / name / "vocab.json" for name in ("one", "two", "seeded", "again")]
    more = [f"{word}-{k}" for k in range(20) for word in ("pear", "plum", "fig")]
    for path in sorted(corpus.iterdir()):
        path.write_text(f"{' '.join(more)}\n" * 2 + path.read_text())
    given = ["vocab", "--data", corpus, "--dp", "noise=0.12", "--most-words", 100, "--set", "data.unseen=0", "--json"]
    reports = []
    for path, seeded in zip(out, ([], [], ["--seeded"], ["--seeded"]), strict=True):
        code, stdout, err = keyfed(*given, "--out", path, *seeded)
        assert code == 0, err
        reports.append(json.loads(stdout))
    votes = [Vocab.from_json(path.read_text("utf-8")).privacy for path in out]
    # Everybody says most words, so noisy votes decide the order; two drawn orders of 60 words are never the same.
    words = [Vocab.from_json(path.read_text("utf-8")).words for path in out]
    assert words[0] != words[1]
    assert words[2] == words[3]
    assert [v.verdict for v in votes] == ["BOUND ONLY"] * 2 + ["SIMULATED"] * 2
    assert [v.votes for v in votes] == [1, 2, 3, 4]
    assert votes[1].all_epsilon == pytest.approx(votes[0].epsilon + votes[1].epsilon)
    assert votes[1].all_delta == pytest.approx(2 * 8**-1.1)
    assert any("With 1 earlier vote of these clients" in line for line in reports[1]["privacy"]["statement"])
    assert not any("validation" in line for line in reports[0]["privacy"]["statement"])  # a vote has none
    for name, path, said in (("a", out[1], "BOUND ONLY, (ε, δ) = ("), ("b", out[2], "no ε covers it in fact")):
        train(configured(corpus, "fedavg", 1, f"data.vocab_file={path}", "data.unseen=0"), tmp_path / name)
        result = json.loads((tmp_path / name / "result.json").read_text("utf-8"))
        for lines in (result["privacy"]["statement"], account_of_run(tmp_path / name)["statement"]):
            line = next(line for line in lines if line.startswith("The vocabulary was elected by"))
            assert said in line
        assert Vocab.from_json((tmp_path / name / "vocab.json").read_text("utf-8")).privacy is not None
    both = result["privacy"]["pld"] + votes[1].all_epsilon
    first = json.loads((tmp_path / "a" / "result.json").read_text("utf-8"))["privacy"]["statement"]
    assert any(f"has ({both:.4g}, " in line for line in first)
    train(configured(corpus, "fedavg", 1, "data.unseen=0"), tmp_path / "raw")
    raw = json.loads((tmp_path / "raw" / "result.json").read_text("utf-8"))["privacy"]["statement"]
    assert any(line.startswith("The vocabulary was made from these clients' text without noise") for line in raw)
    code, _, err = keyfed("vocab", "--data", corpus, "--seeded", "--out", tmp_path / "plain.json")
    assert code == 2
    assert "--seeded is for the noise of a vote under a budget" in err


def test_a_vocabulary_with_a_guarantee(keyfed, corpus, tmp_path):
    out, phrases = tmp_path / "vocab.json", tmp_path / "pairs.json"
    given = ["vocab", "--data", corpus, "--dp", "epsilon=4", "--most-words", 60, "--out", out, "--phrases", phrases]
    code, stdout, err = keyfed(*given, "--population", 1_000_000, "--json")
    assert code == 0, err
    report = json.loads(stdout)
    private = report["privacy"]
    assert private["verdict"] == "SIMULATED"
    assert private["pld"] <= 4
    assert private["delta"] == 1e6**-1.1  # the whole, of which the ledger's noise has half
    assert read_ledger(tmp_path / "vocab.privacy").terms.delta == private["delta"] / 2
    assert f"{1e6**-1.1:g})" in private["statement"][1]
    assert private["threshold"] == 3  # --min-clients, above what the noise of so large a fleet asks for
    assert private["releases"] == 2
    assert [e.what for e in read_ledger(tmp_path / "vocab.privacy").entries] == ["words", "pairs"]
    assert not {"clients", "types", "unknown", "dropped_too_few"} & set(report)
    assert json.loads(phrases.read_text("utf-8"))
    code, _, err = keyfed(*given)
    assert code == 2  # not twice under one budget
    assert "not repeated" in err
    train(configured(corpus, "fedavg", 1, f"data.vocab_file={out}"), tmp_path / "run")
    code, _, err = keyfed("vocab", "--data", corpus, "--dp", "epsilon=1", "--set", "privacy.delta=0.01", "--out",
                          tmp_path / "other.json")  # fmt: skip
    assert code == 2  # eight clients are too few for any word
    assert "more clients" in err


# Noise of a fleet so large that nothing of it is left, and a clip that nobody reaches.
UNHEARD = ["privacy.noise=1", "privacy.population=1000000000000", "privacy.quantile=none", "privacy.clip=1000"]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("admm", ["method.lr=0.003", "method.weights=uniform"]),
        ("liadmm", ["method.weights=uniform"]),
        ("fedadmm", ["method.lr=0.5", "method.weights=uniform"]),
        ("fedmed", ["method.threshold=1e-9", "privacy.cohort=1000000000000"]),  # the loss never settles
    ],
)
def test_without_noise_and_clip_and_with_everybody_it_is_the_plain_method(corpus, tmp_path, method, settings):
    private = configured(corpus, method, 3, "train.cohort=7", *UNHEARD, *settings)
    plain = replace(private, privacy=PrivacyConfig())
    plain = apply_settings(plain, ["participation.sampling=uniform"])
    train(private, tmp_path / "private")
    train(plain, tmp_path / "plain")
    one, two = (load_model(tmp_path / name).params for name in ("private", "plain"))
    moved = max(float((one[name] - p).abs().max()) for name, p in first_model(private, tmp_path / "plain").items())
    assert moved > 0.01
    for name in one:
        assert float((one[name] - two[name]).abs().max()) < 1e-4 * max(1.0, moved), name


def first_model(config, run):
    from keyfed.engine.network import init_params

    return init_params(load_model(run).spec, config.train.seed)


def test_what_a_round_goes_by_is_in_the_checkpoint(corpus, tmp_path):
    """FedMed's switch and limit are part of the state: a run that was stopped goes on with them."""
    config = configured(corpus, "fedmed", 4, "method.beta=0.5", "train.cohort=6")
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", listener=Heard(2))
    train(config, tmp_path / "stopped", resume=True)
    one, two = (load_model(tmp_path / name).params for name in ("whole", "stopped"))
    assert all((one[name] == two[name]).all() for name in one)
    rows = read_ledger(tmp_path / "whole").entries
    assert [(e.row.z, e.row.q) for e in rows] == [(1.0, 0.005)] * 4  # a row is (z, q), whatever travels along
    assert all(record["loss"] is None for record in read_metrics(tmp_path / "whole"))


def test_words_beyond_a_public_vocabulary_with_a_guarantee(keyfed, corpus, tmp_path):
    for k, path in enumerate(sorted(corpus.iterdir())):
        more = ["qwyjibo"] * (k != 3) + ["zork"] * (k == 3)
        path.write_text("".join(f"{word} again\n" for word in more) + path.read_text())
    public, out = tmp_path / "public.json", tmp_path / "wider.json"
    words = [*SPECIALS, "the", "again", "president"]
    public.write_text(Vocab("word", tuple(words), lower=True, tokenised=False).to_json())
    given = ["vocab", "--data", corpus, "--dp", "epsilon=4", "--population", 1_000_000, "--most-words", 60]
    given += ["--beyond", public, "--out", out, "--set", "data.unseen=0", "--json"]
    code, stdout, err = keyfed(*given)
    assert code == 0, err
    report, wider = json.loads(stdout), Vocab.from_json(out.read_text())
    assert list(wider.words[: len(words)]) == words
    assert set(report["new"]) == set(wider.words[len(words) :])
    assert "qwyjibo" in report["new"]
    assert not {"zork", "the", "again", "president"} & set(report["new"])
    private = report["privacy"]
    assert (private["verdict"], private["releases"]) == ("SIMULATED", 1)
    assert private["pld"] <= 4
    assert any("public.json is taken to be public" in line for line in private["statement"])
    assert not {"clients", "types", "unknown", "dropped_too_few"} & set(report)
    out.unlink()
    code, _, err = keyfed(*given)
    assert code == 2  # the ledger remembers, whatever became of the file
    assert "a vote is not repeated" in err
    assert len(read_ledger(tmp_path / "wider.privacy").entries) == 1


def test_a_private_run_with_a_start_of_its_own_tells_nothing_of_training_text(keyfed, corpus, tmp_path):
    """Token counts, shares of matched tokens, unknown words: nothing noised them, so no file and no line has them."""
    vectors, run, first = tmp_path / "vectors.txt", tmp_path / "run", tmp_path / "first"
    numbers = " ".join(["0.1"] * 8)
    vectors.write_text("".join(f"{word} {numbers}\n" for word in ("the", "president", "again", "river")))
    settings = [x for s in (*TINY, "privacy.twin=false") for x in ("--set", s)]
    given = ["train", "fedavg", "--data", corpus, "--rounds", 2, "--dp", "noise=1"]
    given += ["--population", 1_000_000, *settings]
    assert keyfed(*given, "--out", first)[0] == 0
    code, out, err = keyfed(*given, "--out", run, "--init", first, "--vectors", vectors)
    assert code == 0, err
    prepared = prepare(load_model(run).config)
    counts, sizes = token_counts(prepared), prepared.store.sizes()
    matched = [prepared.vocab.index[word] for word in ("the", "president", "again", "river")]
    share, unknown = counts[matched].sum() / counts.sum(), prepared.oov["train"]
    assert 0.05 < share < 0.95
    secrets = {f"{n:,}" for n in (sizes.sum(), sizes.min(), sizes.max(), int(np.median(sizes)))}
    secrets |= {str(sizes.sum()), f"{share:.2%}", f"{100 * share:.2f}", f"{share:.4f}", f"{share:.6f}"}
    secrets |= {f"{unknown:.6f}"} if unknown else set()
    texts = {p.name: p.read_text("utf-8") for p in run.rglob("*") if p.suffix in (".json", ".jsonl", ".md", ".toml")}
    texts |= {"stdout": out, "stderr": err}
    assert {"result.json", "metrics.jsonl", "report.md", "run.toml"} <= set(texts)
    found = {(name, secret) for name, text in texts.items() for secret in secrets if says(secret, text)}
    assert not found
    assert "rows matched by word" in err
    assert "training tokens" not in out + err + texts["report.md"]
    code, out, err = keyfed("evaluate", run, "--json")
    assert code == 0, err
    assert json.loads(out)["spread"] is json.loads(out)["unseen_spread"] is None
    start = read_result(run)["start"]
    assert start["tokens"] is None
    assert start["vectors"]["tokens"] is None
    assert start["vectors"]["matched"] == 4


def says(number, text):
    """Whether a text has a number, not as a part of a longer one."""
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", text) is not None


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedatt", ["method.bound=3", "train.cohort=5", "privacy.clip=3"]),
        ("fedmed", ["method.beta=0.8", "train.cohort=5", "privacy.clip=3"]),
        ("admm", ["train.rounds=2", "method.optimiser=sgd", "method.lr=0.1", "train.cohort=7", "privacy.clip=3"]),
    ],
)
def test_secure_and_private_together(corpus, tmp_path, method, settings):
    """Masked sums and those of the same weights differ by the fixed point's rounding alone; nothing else is told.

    One round, or two by sgd: the second one trains from models that differ by the rounding, and Adam makes more of it.
    """
    pytest.importorskip("cryptography")
    config = configured(corpus, method, 1, *settings)
    train(apply_settings(config, ["secure.clear=true"]), tmp_path / "plain")
    secure = train(apply_settings(config, ["secure.on=true"]), tmp_path / "secure")
    assert secure["privacy"]["releases"] == (2 if method == "admm" else 1)
    one, two = (load_model(tmp_path / name).params for name in ("plain", "secure"))
    assert any((one[name] != two[name]).any() for name in one)
    for name in one:
        assert float((one[name] - two[name]).abs().max()) < 1e-4
    assert all("secure" not in record for record in read_metrics(tmp_path / "secure"))


def test_a_secure_run_books_rounds_that_open_by_one_client_without_amplification(corpus, tmp_path, monkeypatch):
    """Nine rounds of seven clients, some of whom vanish: a row has the chance of the floor, or a rate of 1."""
    pytest.importorskip("cryptography")
    given = [
        "privacy.population=none", "privacy.delta=1e-3", "privacy.quantile=none", "secure.on=true", "train.cohort=5",
        "participation.drop_before=0.2", "train.eval_every=9", "train.checkpoint_every=4",
    ]  # fmt: skip
    config = configured(corpus, "fedavg", 9, *given)
    result = train(config, tmp_path / "run")
    rows = [entry.row for entry in read_ledger(tmp_path / "run").entries]
    assert {row.q for row in rows} == {5 / 7, 1.0}
    assert all(row.hinge == (chance(7, 5 / 7, Opening(3)) if row.q < 1 else 0.0) for row in rows)
    assert result["privacy"]["pld"] > epsilon([Release(1.0, 5 / 7, 9)], 1e-3, grid=COARSE)
    first = next(k for k, row in enumerate(rows) if row.q == 1)
    assert first > 0
    # Were the floor far, a budget with room for the round as it was expected, and not as it is, ends the run before it.
    monkeypatch.setattr("keyfed.run.privacy.chance", lambda *given: 0.0)
    budget = epsilon([Release(1.0, 5 / 7, first + 1)], 1e-3, grid=COARSE) + 1e-6
    config = apply_settings(config, [f"privacy.epsilon={budget}"])
    short = train(config, tmp_path / "short")
    assert short["rounds"] == short["privacy"]["releases"] == first
    assert short["privacy"]["pld"] <= budget
    assert len(read_metrics(tmp_path / "short")) == first
    assert train(config, tmp_path / "short", resume=True)["privacy"] == short["privacy"]
