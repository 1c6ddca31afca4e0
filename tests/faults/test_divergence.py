"""A run that diverges is noticed within rounds, halves its step and ends with a usable model, in a simulation and with
real clients alike; a run that does not diverge is what it was, bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyfed.federated.round as round_module
import keyfed.run.loop as run_train
from keyfed.config.load import Config, set_value
from keyfed.engine.sums.secure_round import MOST_NATS, counts_of
from keyfed.engine.task import Finished
from keyfed.errors import RunError
from keyfed.federated.soundness import (
    DOUBT,
    MOST_DOUBTS,
    MOST_HALVINGS,
    MOST_RETURNS,
    PATIENCE,
    Watch,
    diverged,
    failed,
    first_good,
    given_up,
    gone_back,
    judge_model,
    suspect,
)
from keyfed.federated.types import Aggregate, Refusal, State
from keyfed.model.output import Score
from keyfed.reports.run_page import report_run
from keyfed.run.folder import load_model, read_metrics
from keyfed.run.loop import train
from keyfed.run.metrics_line import diverged_warning
from keyfed.run.plan import watch_of, with_limits
from keyfed.run.remote import rounds as course
from keyfed.run.remote.train import train_deployed
from keyfed.wire import client as session_module
from keyfed.wire import sums
from keyfed.wire.messages import MOST_LOSS, Rejected, finished_of, pack, report_head, unpack
from keyfed.wire.transport import Answer, Handler, Post, deliver
from tests.listeners import Heard

from .deployed import (
    QUICK,
    bits,
    federation,
    last_checkpoint,
    last_model,
    resigned,
    session,
    small_config,
    vocabulary,
    write_texts,
)

UNIFORM = 26  # words of the vocabulary
STEP_1000 = {"method.lr": 1000.0}


def configured(tmp_path: Path, method: str, settings: dict[str, object], rounds: int = 12, **options) -> Config:
    write_texts(tmp_path / "texts", 4)
    _, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method, rounds=rounds, **options)
    for key, value in settings.items():
        config = set_value(config, key, value)
    return config


# what is decided

MODELS = [State({"w": torch.full((2,), float(k))}, None, {}, k) for k in range(30)]


def looks(validations: list[float], halvings: int = 0) -> list[bool]:
    """Return for a run's validations, in times of a uniform guess, after which it goes back; a roll-back ends it."""
    good, out = first_good(MODELS[0], 50), []
    for n, times in enumerate(validations, 1):
        state = replace(MODELS[n], halvings=halvings)
        good, back = judge_model(good, state, math.log(50) + math.log(times), None, {})
        out.append(back)
    return out


def test_an_overshoot_that_falls_is_waited_for_and_one_that_stays_is_not():
    assert looks([32.0, 8.0, 2.0, 0.9]) == [False] * 4
    assert looks([32.0, 33.0, 34.0]) == [False, False, True]
    assert looks([32.0, 8.0, 9.0]) == [False, False, True]
    slowly = [64.0 * 0.9**n for n in range(MOST_DOUBTS)]
    assert looks(slowly) == [False] * (MOST_DOUBTS - 1) + [True]
    assert looks([1001.0]) == [True]
    assert looks([math.inf]) == looks([math.nan]) == [True]
    assert looks([0.5, 0.1, 1.2, 1.4, 1.2, 1.4, 1.2, 1.4, 1.2]) == [False] * 9


def test_a_run_that_has_diverged_is_not_waited_for():
    assert looks([32.0], halvings=1) == [True]
    good = first_good(MODELS[0], 50)
    eased = replace(MODELS[1], halvings=1)
    after, back = judge_model(good, eased, math.log(50 * 1.2), None, {})
    assert (after, back) == (good, False), "not bad, and nothing to go back to"


@given(st.lists(st.floats(0.01, DOUBT * 0.999), max_size=25))
def test_models_about_as_good_as_a_uniform_guess_are_never_gone_back_from(validations):
    assert not any(looks(validations))


@given(st.lists(st.floats(0.01, 5000.0), min_size=1, max_size=25))
def test_a_run_waits_at_most_so_many_looks(validations):
    backs = looks(validations)
    for end in range(MOST_DOUBTS, len(backs) + 1):
        if all(times > DOUBT * 1.001 for times in validations[end - MOST_DOUBTS : end]):
            assert any(backs[end - MOST_DOUBTS : end])


def aggregate(contributors: int, burst: int, reason: str = "non-finite upload") -> Aggregate:
    refused = tuple(Refusal(f"r{k}", reason) for k in range(burst))  # type: ignore[arg-type]
    return Aggregate({}, {}, {}, {}, tuple(f"c{k}" for k in range(contributors)), refused)


def test_most_of_a_cohort_decides_that_a_round_has_diverged():
    watch = Watch(math.log(50))
    assert diverged(watch, [3.0] * 4, aggregate(4, 4)) is None
    assert diverged(watch, [3.0] * 4, aggregate(4, 5)) is not None
    assert diverged(watch, [3.0] * 4, aggregate(4, 9, "no answer")) is None
    lost = aggregate(0, 2, "no answer")
    one = replace(lost, refused=(*lost.refused, Refusal("liar", "non-finite upload")))
    assert diverged(watch, [], one) is None  # one of three that were called, however few arrived
    assert diverged(watch, [1e6, 3.0], aggregate(2, 0)) is None  # one of two
    assert diverged(watch, [1e9, 1e9, 3.0, 3.0, 3.0], aggregate(5, 0)) is None
    assert diverged(watch, [1e9, 1e9, 1e9, 3.0, 3.0], aggregate(5, 0)) is not None
    assert diverged(watch, [math.log(50 * 2)] * 3, aggregate(3, 0)) is None
    assert diverged(watch, [math.log(50 * 2)] * 3, aggregate(3, 0), eased=True) is not None


@given(st.lists(st.floats(0, 1e12), max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_nothing_that_is_not_noised_decides_in_a_private_run(losses, contributors, burst):
    config = Config()
    private = replace(config, privacy=replace(config.privacy, noise=1.0))
    assert watch_of(private, 50) == Watch(None, None)
    assert diverged(Watch(), losses, aggregate(contributors, burst)) is None


def test_the_first_return_that_a_sum_asks_for_halves_nothing():
    """With secure sums one client can falsify the sum of validations."""
    good = replace(first_good(MODELS[0], 50), returns=1)
    assert gone_back(good, MODELS[5], claimed=True).halvings == 0
    assert gone_back(good, MODELS[5]).halvings == 1
    assert gone_back(replace(good, returns=2), MODELS[5], claimed=True).halvings == 1


def test_each_failure_in_a_row_halves_more_and_their_number_is_bounded():
    state = State({}, None, {}, 3)
    found = []
    for _ in range(MOST_RETURNS):
        assert not given_up(first_good(state, 50), state)
        state = failed(state, server=False)
        found.append(state.halvings)
    assert found[:6] == [1, 3, 6, 10, 15, 21]
    assert found[-1] <= MOST_HALVINGS
    assert given_up(first_good(state, 50), state)
    assert state.server_halvings == 0


def test_going_back_keeps_the_halvings_and_the_round():
    good = replace(first_good(MODELS[2], 50), returns=2)
    state = replace(MODELS[9], halvings=5, server_halvings=1, failed=3)
    assert gone_back(good, state) == replace(MODELS[2], round=9, halvings=7, server_halvings=1)
    assert gone_back(good, state, server=True) == replace(MODELS[2], round=9, halvings=5, server_halvings=3)


def test_a_model_from_which_every_round_diverges_is_gone_back_from():
    good = first_good(MODELS[0], 50)
    bad = replace(MODELS[4], failed=PATIENCE)
    assert suspect(good, replace(bad, failed=PATIENCE - 1)) == (good, False)
    assert suspect(good, bad) == (replace(good, returns=1), True)
    assert suspect(good, replace(MODELS[0], failed=PATIENCE)) == (good, False)


# in a simulation

DIVERGING = {
    "fednesterov": ("fednesterov", STEP_1000),
    "fedavg": ("fedavg", STEP_1000),
    "unclipped": ("fedavg", STEP_1000 | {"method.optimiser": "sgd", "method.clip": None}),
    "fedadam": ("fedadam", STEP_1000),
    "fedsgd": ("fedsgd", STEP_1000),
    "server": ("fedadam", {"method.server_lr": 1000.0}),
    "secure": ("fedavg", STEP_1000 | {"secure.on": True}),
}


QUICKLY = ("fednesterov", "unclipped", "server")


@pytest.mark.parametrize("case", [c if c in QUICKLY else pytest.param(c, marks=pytest.mark.slow) for c in DIVERGING])
def test_a_step_of_1000_ends_with_a_warning_and_a_usable_model(tmp_path, case):
    config, heard = configured(tmp_path, *DIVERGING[case], rounds=14), Heard()
    result = train(config, tmp_path / "run", listener=heard)
    lines = read_metrics(tmp_path / "run")
    assert result["test"]["perplexity"] < 0.9 * UNIFORM
    assert result["halved"] == [[line["round"], *line["halved"]] for line in lines if "halved" in line]
    assert result["halved"][0][0] == 1, "it is noticed in the first round"
    warning = diverged_warning(result)
    assert warning is not None
    assert warning in heard.lines
    said = [line for line in heard.lines if line.startswith(("DIVERGED in round", "ROLL-BACK after round"))]
    assert len(said) == len(result["halved"]), "one line each time"


def test_without_it_the_run_is_lost(tmp_path):
    config = configured(tmp_path, "fednesterov", STEP_1000 | {"train.rollback": 0.0}, rounds=14)
    result = train(config, tmp_path / "run")
    assert (result["test"]["perplexity"] or math.inf) > 1000 * UNIFORM
    assert result["halved"] == []


def test_the_report_says_how_often_and_when(tmp_path):
    config = configured(tmp_path, *DIVERGING["unclipped"], rounds=6)
    result = train(config, tmp_path / "run")
    report_run(tmp_path / "run")
    report = (tmp_path / "run" / "report.md").read_text("utf-8")
    rounds = ", ".join(str(row[0]) for row in result["halved"])
    assert f"times, after rounds {rounds}; 1/{2 ** sum(row[1] for row in result['halved'])} is left" in report
    assert "WARNING: training diverged" in report


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedadam", "fedadmm", "central"])
def test_a_run_that_does_not_diverge_is_the_same_bit_for_bit(tmp_path, method):
    config = configured(tmp_path, method, {}, rounds=2)
    train(config, tmp_path / "watched")
    train(replace(config, train=replace(config.train, rollback=0.0)), tmp_path / "never")
    assert bits(last_model(tmp_path / "watched")) == bits(last_model(tmp_path / "never"))
    assert (tmp_path / "watched" / "model.safetensors").read_bytes() == (
        tmp_path / "never" / "model.safetensors"
    ).read_bytes()


def test_fedatt_overshoots_in_its_first_round_and_is_left_alone(tmp_path):
    config = configured(tmp_path, "fedatt", {"method.lr": 0.2, "method.step": 2.0}, rounds=4)
    train(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert lines[0]["valid"]["perplexity"] > 10 * UNIFORM
    assert lines[-1]["valid"]["perplexity"] < 0.9 * UNIFORM
    assert not [line for line in lines if "halved" in line or "rolled_back" in line]


@pytest.mark.parametrize("method", ["fedavg", "fednesterov", "fedadam", "fedprox", "fedadmm", "fedsgd"])
def test_halved_twice_is_the_run_with_a_quarter_of_the_step(tmp_path, monkeypatch, method):
    """A power of two is exact: every bit is that of a run which began with the smaller step."""
    lr = 0.04
    config = configured(tmp_path, method, {"method.lr": lr}, rounds=2)
    train(set_value(config, "method.lr", lr / 4), tmp_path / "quarter")
    real, halved = run_train.initial_state, {"server_halvings" if method == "fedsgd" else "halvings": 2}
    monkeypatch.setattr(run_train, "initial_state", lambda *given: replace(real(*given), **halved))
    train(config, tmp_path / "halved")
    assert bits(last_model(tmp_path / "halved")) == bits(last_model(tmp_path / "quarter"))
    monkeypatch.setattr(run_train, "initial_state", real)
    train(config, tmp_path / "whole")
    assert bits(last_model(tmp_path / "whole")) != bits(last_model(tmp_path / "quarter"))


@pytest.mark.parametrize("method", ["fedavgm", "fednesterov", "fedadam", "fedyogi", "fedadagrad"])
def test_the_servers_step_halved_is_the_run_with_half_of_it(tmp_path, monkeypatch, method):
    config = configured(tmp_path, method, {"method.server_lr": 0.5}, rounds=2)
    train(set_value(config, "method.server_lr", 0.25), tmp_path / "half")
    real = run_train.initial_state
    monkeypatch.setattr(run_train, "initial_state", lambda *given: replace(real(*given), server_halvings=1))
    train(config, tmp_path / "halved")
    assert bits(last_model(tmp_path / "halved")) == bits(last_model(tmp_path / "half"))


@pytest.mark.slow
def test_worker_processes_take_the_halved_step(tmp_path):
    config = configured(tmp_path, "fedavg", STEP_1000, rounds=6)
    train(config, tmp_path / "alone")
    train(replace(config, train=replace(config.train, workers=2)), tmp_path / "workers")
    assert last_checkpoint(tmp_path / "alone").state.halvings > 0
    assert bits(last_model(tmp_path / "alone")) == bits(last_model(tmp_path / "workers"))


@pytest.mark.parametrize(
    ("case", "eval_every"),
    [
        ("fednesterov", 1),
        ("server", 3),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("server", 1), ("secure", 2))),
    ],
)
def test_a_diverging_run_is_the_same_after_every_resume(tmp_path, case, eval_every):
    config = configured(tmp_path, *DIVERGING[case], rounds=7)
    config = replace(config, train=replace(config.train, eval_every=eval_every))
    train(config, tmp_path / "whole")
    a = last_checkpoint(tmp_path / "whole")
    assert a.state.halvings + a.state.server_halvings > 0
    for after in (1, 3, 5):
        run = tmp_path / f"stopped-{after}"
        with pytest.raises(KeyboardInterrupt):
            train(config, run, listener=Heard(after))
        train(config, run, resume=True)
        b = last_checkpoint(run)
        assert bits(a.state.params) == bits(b.state.params)
        assert bits(a.state.server) == bits(b.state.server)
        assert replace(a.state, params={}, server={}) == replace(b.state, params={}, server={})
        assert replace(a.good, state=MODELS[0]) == replace(b.good, state=MODELS[0])
        halved = [[line.get(key) for line in read_metrics(r)] for r in (tmp_path / "whole", run) for key in ("halved",)]
        assert halved[0] == halved[1]


def test_a_run_that_never_stops_diverging_ends_with_its_last_good_model(tmp_path, monkeypatch):
    monkeypatch.setattr(round_module, "diverged", lambda *given, **named: "every round does")
    heard = Heard()
    result = train(configured(tmp_path, "fedavg", {}, rounds=20), tmp_path / "run", listener=heard)
    assert result["rounds"] == MOST_RETURNS
    assert any("rounds in a row diverged" in line for line in heard.lines)
    assert load_model(tmp_path / "run").params


def test_studies_keep_what_they_measured():
    from keyfed.lab.experiment.cell import Workspace, config_of

    assert config_of({"method.name": "fedavg"}, 1, Workspace(Path(), "cpu")).train.rollback == 0.0
    assert config_of({"train.rollback": 3.0}, 1, Workspace(Path(), "cpu")).train.rollback == 3.0


# with real clients


@pytest.mark.parametrize(
    "case", ["fedavg", "unclipped", *(pytest.param(c, marks=pytest.mark.slow) for c in ("fednesterov", "fedadam"))]
)
def test_a_diverging_federation_equals_the_simulation_bit_for_bit(tmp_path, case):
    method, settings = DIVERGING[case]
    config = with_limits(configured(tmp_path, method, settings, rounds=9))  # as its run.toml will say
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", sorted((tmp_path / "texts").glob("*.txt")))
    vocab, _ = vocabulary(tmp_path)
    result = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    simulated, deployed = last_checkpoint(tmp_path / "simulated").state, last_checkpoint(tmp_path / "deployed").state
    assert simulated.halvings >= 6
    assert bits(simulated.params) == bits(deployed.params)
    assert bits(simulated.server) == bits(deployed.server)
    assert replace(simulated, params={}, server={}) == replace(deployed, params={}, server={})
    assert result["test"]["perplexity"] < 0.9 * UNIFORM


def deployed(tmp_path: Path, name: str, config: Config, fault=None, listener=None):
    vocab, _ = vocabulary(tmp_path)
    texts = sorted((tmp_path / "texts").glob("*.txt"))
    transport, roster = federation(tmp_path / name / "clients", texts, fault=fault)
    return train_deployed(config, vocab, tmp_path / name / "run", transport, roster, listener, patience=QUICK)


@pytest.mark.slow
def test_a_federation_by_secure_sums_comes_back_from_a_step_of_1000(tmp_path):
    config = configured(tmp_path, "fedavg", STEP_1000, rounds=16, secure=True)
    heard = Heard()
    result = deployed(tmp_path, "secure", config, listener=heard)
    assert result["test"]["perplexity"] < 0.9 * UNIFORM
    assert sum(row[1] for row in result["halved"]) >= 10
    assert any(line.startswith("WARNING: training diverged") for line in heard.lines)


def eased_otherwise(client: str, halvings: int):
    """A server that lets one client train with another step size than the others."""

    def fault(name: str, post: Post, handler: Handler) -> Answer:
        if name != client or post.kind != "train":
            return deliver(name, post, handler)
        head, tensors = unpack(post.body)
        changed = pack({**head, "halvings": halvings}) + tensors
        return deliver(name, Post(post.kind, changed, post.most), handler)

    return fault


def test_no_server_can_still_all_clients_but_one_in_a_secure_sum(tmp_path, monkeypatch):
    """Were the step size not bound into the masks, the sum of the others could be made as good as nothing."""
    config = configured(tmp_path, "fedavg", {}, rounds=1, secure=True)
    attack = eased_otherwise("client-1", MOST_HALVINGS)
    with pytest.raises(RunError, match=r"no round of .* was completed"):
        deployed(tmp_path, "attacked", config, attack)
    real = session_module.context_of

    def unbound(theta, method, *rest):
        return real(theta, replace(method, halvings=0), *rest)

    for module in (session_module, sums):
        monkeypatch.setattr(module, "context_of", unbound)
    assert deployed(tmp_path, "unbound", config, attack)["abandoned"] == 0


@pytest.mark.parametrize("halvings", [-1, MOST_HALVINGS + 1, True, 1.5, "3", [1], None])
def test_a_client_refuses_a_step_that_is_no_number_of_halvings(tmp_path, halvings):
    config = configured(tmp_path, "fedavg", {}, rounds=1)
    refused: list[str] = []

    def fault(name: str, post: Post, handler: Handler) -> Answer:
        try:
            return eased_otherwise(name, halvings)(name, post, handler)
        finally:
            if post.kind == "train":
                head, tensors = unpack(post.body)
                body = pack({**head, "halvings": halvings, "round": 5}) + tensors
                with pytest.raises(Rejected, match="halvings"):
                    handler.handle(post.kind, body)
                refused.append(name)

    with pytest.raises(RunError, match=r"no round of .* was completed"):
        deployed(tmp_path, "refused", config, fault)
    assert len(refused) >= 4


def test_one_client_that_claims_a_loss_does_not_halve_anything(tmp_path, monkeypatch):
    config = configured(tmp_path, "fedavg", {}, rounds=3)

    def claiming(name: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(name, post, handler)
        if name != "client-1" or post.kind != "train":
            return answer

        def change(unsigned: bytes) -> bytes:
            told, tensors = unpack(unsigned)
            if "report" not in told:
                return unsigned
            return pack({**told, "report": {**told["report"], "loss": 1e6}}) + tensors

        return resigned(name, post, handler, answer, change)

    assert deployed(tmp_path, "claimed", config, claiming)["halved"] == []
    real = round_module.diverged

    def by_mean(watch, losses, *rest, **named):
        return real(watch, [sum(losses) / len(losses)], *rest, **named)

    monkeypatch.setattr(round_module, "diverged", by_mean)
    with pytest.raises(RunError, match="no round"):  # its claim is in the mean, and stops every round
        deployed(tmp_path, "believed", config, claiming)


def claims_of_explosion(monkeypatch, liars: set[str], rounds: set[int]):
    """Clients that count a validation of 2^31 nats in messages of some rounds (from 0)."""
    real, lying = session_module.countable, [False]

    def count(evaluated: Score) -> Score:
        return replace(evaluated, nats=MOST_NATS) if lying[0] else real(evaluated)

    def fault(name: str, post: Post, handler: Handler) -> Answer:
        lying[0] = post.kind == "train" and name in liars and unpack(post.body).head.get("round") in rounds
        return deliver(name, post, handler)

    monkeypatch.setattr(session_module, "countable", count)
    return fault


def rolled_back(run: Path) -> list[int]:
    return [line["round"] for line in read_metrics(run) if "rolled_back" in line]


def test_one_false_validation_in_a_secure_sum_rolls_back_and_halves_nothing(tmp_path, monkeypatch):
    config = configured(tmp_path, "fedavg", {"train.rollback": 3.0}, rounds=4, secure=True)
    fault = claims_of_explosion(monkeypatch, {"client-1"}, {2})
    heard = Heard()
    assert deployed(tmp_path, "claimed", config, fault, heard)["halved"] == []
    (said,) = [line for line in heard.lines if line.startswith("ROLL-BACK")]
    assert said.endswith("with the same step sizes")
    assert rolled_back(tmp_path / "claimed" / "run") == [2], "the claim was believed that far"
    real = course.gone_back
    monkeypatch.setattr(course, "gone_back", lambda *given, claimed=False, **named: real(*given, **named))
    (halved,) = deployed(tmp_path, "believed", config, fault)["halved"]
    assert sum(halved[1:]) == 1


def test_where_single_validations_are_seen_the_first_return_halves_the_step(tmp_path, monkeypatch):
    """The median of four is judged, so three must say it: that is no one client's claim."""
    config = configured(tmp_path, "fedavg", {"train.rollback": 3.0}, rounds=4)
    fault = claims_of_explosion(monkeypatch, {"client-1", "client-2", "client-3"}, {2})
    (halved,) = deployed(tmp_path, "seen", config, fault)["halved"]
    assert rolled_back(tmp_path / "seen" / "run") == [2]
    assert sum(halved[1:]) == 1


def test_a_server_that_was_killed_goes_on_with_the_halved_step(tmp_path):
    config = with_limits(configured(tmp_path, "fednesterov", STEP_1000, rounds=8))
    deployed(tmp_path, "whole", config)

    def kill(name: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "train" and unpack(post.body).head.get("round") == 4:
            raise KeyboardInterrupt
        return deliver(name, post, handler)

    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path, "killed", config, kill)
    vocab, _ = vocabulary(tmp_path)
    texts, home = sorted((tmp_path / "texts").glob("*.txt")), tmp_path / "killed" / "clients"
    from keyfed.wire.roster import Roster
    from keyfed.wire.transport import InProcess

    transport = InProcess({path.stem: session(home, path) for path in texts})
    roster = Roster(home / "roster.json")
    train_deployed(config, vocab, tmp_path / "killed" / "run", transport, roster, patience=QUICK, resume=True)
    assert bits(last_model(tmp_path / "killed" / "run")) == bits(last_model(tmp_path / "whole" / "run"))


def test_an_older_checkpoint_was_never_eased(tmp_path):
    from keyfed.run.checkpoint import _seal

    config = configured(tmp_path, "fedavg", {}, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(2))
    for path in (tmp_path / "run" / "checkpoint").glob("*.json"):
        manifest = json.loads(path.read_text())
        del manifest["eased"], manifest["seal"], manifest["good"]["doubts"], manifest["good"]["lowest"]
        path.write_text(json.dumps(manifest | {"seal": _seal(manifest)}))
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "whole")
    assert bits(last_model(tmp_path / "run")) == bits(last_model(tmp_path / "whole"))


def test_training_that_diverged_can_be_reported_and_counted():
    """A report that the server refused as malformed, or a count that fits no secure sum, would hide what happened."""
    theta = {"w": torch.zeros(2)}
    far = Finished(0, {"w": torch.ones(2)}, 1e12, 5000, 5000, {})
    assert finished_of(report_head(far), theta, far.upload).loss == MOST_LOSS
    assert diverged(Watch(math.log(1e6)), [MOST_LOSS], aggregate(1, 0)) is not None
    assert counts_of(far)["nats"] == counts_of(far)["loss"] == MOST_NATS < 2**32
    usual = far._replace(loss=7.25)
    assert report_head(usual)["loss"] == counts_of(usual)["loss"] == 7.25
    assert counts_of(usual)["nats"] == 7.25 * 5000
