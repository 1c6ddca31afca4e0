"""Runs in which clients vanish, lag, remember and compress: what is logged, counted, refused and resumed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from keyfed.config.load import Participation, UploadConfig, check
from keyfed.config.schema import SecureConfig
from keyfed.engine.network import init_params
from keyfed.engine.simulate import Simulation
from keyfed.errors import ConfigError
from keyfed.federated.spec import Part
from keyfed.run import evaluate as evaluation
from keyfed.run import plan
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.prepare import client_tokens, make_problem, prepare
from tests.listeners import Heard

from .conftest import write_corpus
from .test_methods import with_method
from .test_resume import checkpoints, tiny, without_times


def dual(config, name="admm", **options):
    """The tiny configuration under a method with duals, with the options it has."""
    own = {"batch_size": 8, **({"optimiser": "sgd", "lr": 0.5} if name == "admm" else {}), **options}
    return replace(config, method=name, options=own)


# Duals and residuals over an interruption


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The small corpus; no test here writes to it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    """Clients of five steps an epoch and more, so that a part of their work is a part."""
    return write_corpus(tmp_path_factory.mktemp("data") / "long", lines=30, more=5)


def remembering(corpus, **train_options):
    config = dual(tiny(corpus, rounds=4, cohort=6, **train_options), rho=0.01)
    return replace(config, participation=Participation(drop_after=0.3), upload=UploadConfig(quantise="int8"))


@pytest.fixture(scope="module")
def remembered(corpus, tmp_path_factory):
    """The run of clients with duals that nobody interrupted, in one process."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(remembering(corpus), out)
    return out


@pytest.mark.usefixtures("workers_are_forked")
@pytest.mark.parametrize(("workers", "every"), [(1, 1), (1, 3), (2, 1)])
def test_clients_that_remember_go_on_where_they_were(corpus, remembered, tmp_path, workers, every):
    config, runs = remembering(corpus, checkpoint_every=every, workers=workers), (remembered, tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again", listener=Heard(2))
    again = train(config, tmp_path / "again", resume=True)
    assert json.loads((remembered / "result.json").read_text("utf-8"))["test"] == again["test"]
    one, two = (read_metrics(run) for run in runs)
    assert without_times(one) == without_times(two)
    assert sum(len(r["lost"]) for r in one) > 0
    ends = [checkpoints(run)["round-000004"] for run in runs]
    assert ends[0] == ends[1]
    states = [{p.name: p.read_bytes() for p in (run / "clients").iterdir()} for run in runs]
    named = json.loads((remembered / "checkpoint" / "round-000004.json").read_text())["clients"]
    assert named
    current = {name for name, data in states[0].items() if states[1].get(name) == data}
    assert len(current) >= len(named)


@pytest.mark.parametrize("stateful", ["duals", "residuals"])
def test_ctrl_c_while_a_round_is_judged_leaves_clients_and_server_together(corpus, tmp_path, monkeypatch, stateful):
    config = tiny(corpus, rounds=5, checkpoint_every=4, cohort=5)
    config = dual(config) if stateful == "duals" else replace(config, upload=UploadConfig(keep=0.1))
    whole = train(config, tmp_path / "whole")
    judged = evaluation.evaluate_together
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judged(*arguments)

    monkeypatch.setattr(evaluation, "evaluate_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again")
    again = train(config, tmp_path / "again", resume=True)
    assert again["test"] == whole["test"]
    assert without_times(read_metrics(tmp_path / "whole")) == without_times(read_metrics(tmp_path / "again"))


def test_a_client_weighs_what_it_has_wherever_it_stops(long_corpus, tmp_path):
    plain = with_method(tiny(long_corpus, rounds=1, cohort=7), "fedatt", epochs=2)
    weighed = replace(plain, mediator=Part("tokens"), participation=Participation(least_work=0.1))
    prepared = prepare(check(weighed))
    method, _ = plan.plan(check(weighed), prepared)
    called = plan.plan_of_round(weighed, method, prepared, 0, client_tokens(prepared), 1, 1)
    assert min(f.work.share for f in called.fates) < 0.6
    with Simulation(make_problem(prepared, weighed, method, "cpu")) as federation:
        federation.expect({prepared.store.names[f.client]: f for f in called.fates})
        reports = federation.train(
            init_params(prepared.spec, 1), [prepared.store.names[f.client] for f in called.fates], method, 0
        )
    for k, name in enumerate(prepared.store.names):
        assert reports[name].tokens == prepared.store.tokens(k) - 1
    assert sum(r.worked for r in reports.values()) < 1.6 * sum(r.tokens for r in reports.values())


def test_files_of_clients_do_not_pile_up_and_a_damaged_one_is_noticed(corpus, tmp_path):
    config = dual(tiny(corpus, rounds=6, cohort=4))
    train(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    named = {
        (client, version["round"])
        for manifest in folder.glob("round-*.json")
        for client, version in json.loads(manifest.read_text())["clients"].items()
    }
    assert len(list((tmp_path / "run" / "clients").glob("*.safetensors"))) == len(named)
    # The newest checkpoint's own file is damaged: the run goes back one and does the round again, to the same end.
    wanted = checkpoints(tmp_path / "run")["round-000006"]
    newest = sorted((tmp_path / "run" / "clients").glob("*-000005.safetensors"))[0]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x00")
    (tmp_path / "run" / "result.json").unlink()
    heard = Heard()
    train(config, tmp_path / "run", resume=True, listener=heard)
    assert any("round 6 is damaged" in line and "state of client" in line for line in heard.lines)
    assert checkpoints(tmp_path / "run")["round-000006"] == wanted


def test_error_feedback_is_resumed_too(corpus, tmp_path):
    config = replace(tiny(corpus, rounds=4, cohort=5), upload=UploadConfig(keep=0.1))
    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again", listener=Heard(2))
    assert train(config, tmp_path / "again", resume=True)["test"] == whole["test"]
    forgetful = replace(config, upload=UploadConfig(keep=1.0))
    assert train(forgetful, tmp_path / "all")["test"] != whole["test"]
    assert whole["traffic"]["up"] < train(forgetful, tmp_path / "all", resume=True)["traffic"]["up"] / 2
    assert 0.3 < whole["compression_error"] < 1


# Participation


def test_the_ledger_counts_who_was_called_who_reported_and_who_uploaded(corpus, tmp_path):
    config = replace(tiny(corpus, rounds=6, cohort=6), participation=Participation(drop_before=0.3, drop_after=0.3))
    result = train(config, tmp_path / "run")
    size = result["bytes_per_client"]
    records = read_metrics(tmp_path / "run")
    for r in records:
        before = sum(why == "dropped before report" for why in r["lost"].values())
        after = sum(why == "dropped before upload" for why in r["lost"].values())
        assert r["cohort"] == 6
        assert r["reported"] == 6 - before
        assert len(r["contributors"]) == 6 - before - after
        assert r["traffic"] == {
            "down": 6 * size["down"],
            "up": len(r["contributors"]) * size["up"],
            "control": r["reported"] * size["control"],
        }
    assert set(result["lost"]) == {"dropped before report", "dropped before upload"}
    assert result["traffic"]["up"] == sum(r["traffic"]["up"] for r in records)
    assert result["modelled_seconds"] == pytest.approx(sum(r["modelled_seconds"] for r in records))


def test_a_round_below_the_minimum_is_abandoned_and_counted(corpus, tmp_path):
    p = Participation(drop_after=0.6, minimum=3)
    config = dual(replace(tiny(corpus, rounds=8, cohort=4), participation=p), "fedadmm", lr=0.5)
    result = train(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    abandoned = [r for r in records if r["abandoned"]]
    assert 0 < len(abandoned) == result["abandoned"] < 8
    assert all(len(r["contributors"]) < 3 for r in abandoned)
    for before, r in itertools.pairwise(records):
        if r["abandoned"]:
            assert r["valid"] == before["valid"]  # nothing was learnt


def test_poisson_cohorts_differ_in_size_and_may_be_empty(corpus, tmp_path):
    config = replace(tiny(corpus, rounds=12, cohort=1), participation=Participation(sampling="poisson"))
    train(config, tmp_path / "run")
    sizes = [r["cohort"] for r in read_metrics(tmp_path / "run")]
    assert min(sizes) == 0
    assert max(sizes) > 1


def test_over_selection_takes_the_first_and_a_fraction_sets_the_cohort(corpus, tmp_path):
    p = Participation(fraction=0.5, over_select=0.5, speed=100.0, speed_spread=1.0)
    config = replace(tiny(corpus, rounds=3, cohort=1), participation=p)
    train(config, tmp_path / "run")
    for r in read_metrics(tmp_path / "run"):
        assert r["cohort"] == 6
        assert len(r["contributors"]) == 4
        assert set(r["lost"].values()) == {"not needed"}


def test_partial_work_is_used(long_corpus, tmp_path):
    plain = tiny(long_corpus, rounds=2, cohort=7)
    everything = train(plain, tmp_path / "all")["tokens_trained"]
    half = replace(plain, participation=Participation(least_work=0.25))
    assert 0.4 < train(half, tmp_path / "half")["tokens_trained"] / everything < 0.85
    hurried = replace(plain, participation=Participation(speed=100.0, deadline=4.0, latency=0.5))
    result = train(hurried, tmp_path / "hurried")
    assert result["tokens_trained"] < everything
    assert all(len(r["contributors"]) == 7 for r in read_metrics(tmp_path / "hurried"))
    assert all(r["modelled_seconds"] <= 4.0 for r in read_metrics(tmp_path / "hurried"))
    slow = replace(plain, participation=Participation(speed=100.0, deadline=4.0, latency=0.5, partial=False))
    train(slow, tmp_path / "slow")
    assert {why for r in read_metrics(tmp_path / "slow") for why in r["lost"].values()} == {"late"}


def test_each_client_may_do_its_own_number_of_epochs_at_its_own_pace(long_corpus, tmp_path):
    config = with_method(tiny(long_corpus, rounds=2, cohort=7), "fedavg", epochs=3)
    same = train(config, tmp_path / "same")
    p = Participation(least_epochs=1, pace_spread=0.3)
    unequal = train(replace(config, participation=p), tmp_path / "unequal")
    assert 0.4 < unequal["tokens_trained"] / same["tokens_trained"] < 0.95
    blocked = replace(config, participation=p, train=replace(config.train, block=3))
    assert train(blocked, tmp_path / "blocked")["test"]["nats"] == pytest.approx(unequal["test"]["nats"], abs=1e-4)


# Targets and hygiene


def test_a_run_stops_at_its_target_and_says_what_it_cost(corpus, tmp_path):
    whole = train(tiny(corpus, rounds=6), tmp_path / "whole")
    records = read_metrics(tmp_path / "whole")
    target = records[2]["valid"]["perplexity"] * 1.0001
    heard = Heard()
    config = tiny(corpus, rounds=6, until=f"perplexity={target}")
    result = train(config, tmp_path / "run", listener=heard)
    first = next(n for n, r in enumerate(records, 1) if r["valid"]["perplexity"] <= target)
    assert result["rounds"] == result["reached"]["round"] == first < 6
    assert result["reached"]["bytes"] == sum(sum(r["traffic"].values()) for r in records[:first])
    assert any("target" in line for line in heard.lines)
    again = train(config, tmp_path / "run", resume=True)
    assert again == result
    assert whole["reached"] is None


def test_a_run_stops_when_its_best_validation_is_older_than_its_patience(corpus, tmp_path):
    """The same rounds as without patience, up to the validation that ends it; stopped in between, the same again."""
    options = {"decay": 1e-9}  # after two rounds nothing moves, and no validation is better
    whole = tiny(corpus, rounds=9, eval_every=2)
    whole = replace(whole, options={**whole.options, **options})
    train(whole, tmp_path / "whole")
    records = read_metrics(tmp_path / "whole")
    costs = {r["round"]: r["valid"]["nats"] for r in records if r.get("valid")}
    ends = [n for n in costs if n - min((m for m in costs if m <= n), key=costs.__getitem__) >= 3]
    assert ends, costs
    assert ends[0] < 9, costs
    config, heard = replace(whole, train=replace(whole.train, patience=3)), Heard()
    result = train(config, tmp_path / "run", listener=heard)
    assert result["rounds"] == ends[0]
    assert ends[0] % 2 == 0  # at a validation
    assert [r.get("valid") for r in read_metrics(tmp_path / "run")] == [r.get("valid") for r in records[: ends[0]]]
    assert result["best_round"] == min((m for m in costs if m <= ends[0]), key=costs.__getitem__)
    assert any("train.patience" in line for line in heard.lines)
    assert train(config, tmp_path / "run", resume=True) == result

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", listener=Heard(ends[0] - 1))
    again = train(config, tmp_path / "stopped", resume=True)
    assert (again["rounds"], again["best_round"], again["test"]) == (ends[0], result["best_round"], result["test"])


def test_uploads_beyond_the_bound_are_refused_by_name(corpus, tmp_path):
    config = replace(tiny(corpus, rounds=1), upload=UploadConfig(bound=1e-6))
    train(config, tmp_path / "run")
    (record,) = read_metrics(tmp_path / "run")
    assert set(record["refused"].values()) == {"exploding upload"}
    assert record["abandoned"]
    generous = replace(dual(tiny(corpus, rounds=2, cohort=7)), upload=UploadConfig(bound=50.0))
    train(generous, tmp_path / "joining")  # a joining client sends its whole model: only its change is bounded
    assert all(not r["refused"] for r in read_metrics(tmp_path / "joining"))
    published = dual(tiny(corpus, rounds=2, cohort=7), "fedadmm", lr=0.5, server_step="published")
    train(replace(published, upload=UploadConfig(bound=50.0)), tmp_path / "published")
    assert all(not r["refused"] for r in read_metrics(tmp_path / "published"))


def test_parts_exchanged_by_name_are_trained_stored_and_resumed(corpus, tmp_path):
    config = replace(
        tiny(corpus, rounds=4, cohort=4),
        mediator=Part("attention", {"temperature": 0.5}),
        server=Part("adam", {"lr": 0.05}),
    )
    whole = train(config, tmp_path / "whole")
    assert "attention" in read_metrics(tmp_path / "whole")[0]
    weights = read_metrics(tmp_path / "whole")[0]["attention"]
    for layer in next(iter(weights.values())):
        assert sum(w[layer] for w in weights.values()) == pytest.approx(1, abs=1e-5)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again", listener=Heard(2))
    assert train(config, tmp_path / "again", resume=True)["test"] == whole["test"]


@pytest.mark.parametrize("name", ["admm", "liadmm", "fedadmm"])
def test_duals_of_clients_that_come_once_are_refused_and_few_returns_are_said(corpus, tmp_path, name):
    with pytest.raises(ConfigError, match="a dual is never used"):
        train(dual(tiny(corpus, rounds=2, cohort=2), name), tmp_path / "once")
    if name != "admm":  # what is said of returns does not ask for the method
        return
    heard = Heard()
    train(dual(tiny(corpus, rounds=4, cohort=4), name), tmp_path / "twice", listener=heard)
    assert any("takes part about 2.3 times" in line for line in heard.lines)
    quiet = Heard()
    train(dual(tiny(corpus, rounds=3, cohort=7), name), tmp_path / "often", listener=quiet)
    assert not any("takes part about" in line for line in quiet.lines)


def test_central_training_reads_what_a_cohort_would_and_uploads_nothing_smaller(corpus, tmp_path):
    fraction = replace(tiny(corpus, rounds=1, cohort=2), participation=Participation(fraction=1.0))
    federated = train(fraction, tmp_path / "federated")
    squeezed = replace(fraction, method="central", options={}, upload=UploadConfig(keep=0.1))
    central = train(squeezed, tmp_path / "central")
    assert central["tokens_trained"] == pytest.approx(federated["tokens_trained"], rel=0.05)
    assert central["bytes_per_client"]["up"] == central["bytes_per_client"]["down"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"participation": Participation(deadline=1.001)}, "nobody could finish"),
        ({"participation": Participation(least_epochs=1)}, "nothing to draw between"),
        ({"mediator": Part("fixed", {"weights": "writer=3"})}, r'names "writer", which is no client'),
        (
            {"mediator": Part("attention", {"beta": 0.2}), "secure": SecureConfig(on=True)},
            "top-K leaves 1 upload of 4",
        ),
        ({"method": "fedsgd", "options": {}, "participation": Participation(pace_spread=1.0)}, "take no step"),
        (
            {"method": "fedatt", "options": {"noise": 0.1, "noise_at": "server"}, "server": Part("sgd")},
            "adds its noise to the step",
        ),
        ({"method": "fedadam", "options": {"server_lr": 0.5}, "server": Part("sgd")}, "own server reads it"),
        ({"method": "fedatt", "options": {"temperature": 0.5}, "mediator": Part("tokens")}, "own mediator reads it"),
        ({"method": "fedadmm", "options": {"server_lr": 0.5}}, "the running mean and clients have none"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(corpus, tmp_path, changed, message):
    with pytest.raises(ConfigError, match=message):
        train(replace(tiny(corpus, rounds=9, cohort=4), **changed), tmp_path / "run")


def test_poisson_may_reach_a_minimum_above_its_expected_cohort(corpus, tmp_path):
    p = Participation(sampling="poisson", minimum=4)
    result = train(replace(tiny(corpus, rounds=6, cohort=3), participation=p), tmp_path / "run")
    assert 0 < result["abandoned"] < 6


def test_a_minimum_nobody_can_reach_is_refused(corpus, tmp_path):
    config = replace(tiny(corpus, rounds=1, cohort=4), participation=Participation(minimum=3))
    with pytest.raises(ConfigError, match="every round would be abandoned"):
        train(with_method(config, "fedmed", beta=0.5), tmp_path / "run")
