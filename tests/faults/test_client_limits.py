"""What a client gives a run at most, and what it counts of its own: sizes, work, runs kept, privacy over all runs."""

from __future__ import annotations

import json
import math
import os
import re
import tracemalloc
from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import to_document
from keyfed.deploy.consent import words
from keyfed.deploy.homes import REFUSED, ClientHome, Settings
from keyfed.deploy.trainer import noting
from keyfed.engine.network import init_params
from keyfed.engine.task import ClientTask
from keyfed.errors import ConfigError, PrivacyError
from keyfed.model.language_model import build_spec
from keyfed.private.dp.accounting import Release, epsilon, forest_sensitivity
from keyfed.private.dp.own_ledger import DELTA, FILE, HEAD, OwnLedger, Spend
from keyfed.run.folder import read_metrics
from keyfed.run.remote import device
from keyfed.run.remote.device import method_digest, own_text, run_method, told
from keyfed.wire import client as session_module
from keyfed.wire import device_store
from keyfed.wire.client import ClientSession
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.limits import MOST_BEGIN, MOST_STEP_NUMBERS, Limits, check_size, time_limit
from keyfed.wire.messages import BEGIN_HEAD, MAGIC, Rejected, pack, unpack
from keyfed.wire.roster import roster_hash
from tests.examples import examples

from .deployed import small_config, vocabulary, write_texts
from .private import VICTIM, deploy, enrol, private_config, tree_config


def hello(folder, config=None, *, run="run-1", secure=False, **changes):
    """A hello of a server, as a client reads it, with some options of its configuration changed."""
    vocab, path = vocabulary(folder)
    config = config or small_config(folder / "texts", path)
    document = told(to_document(config))
    for key, value in changes.items():
        section, _, name = key.partition("_")
        document.setdefault(section, {})[name] = value
    digest = method_digest(run_method(config, secure=secure))
    return {
        "run": run,
        "nonce": "0" * 32,
        "secure": secure,
        "config": document,
        "vocab": vocab.to_json(),
        "method": digest,
    }


def client(folder, limits=None, text=None):
    own = text or write_texts(folder / "texts", 1)[0]
    make = own_text("client-0", own, limits=limits)
    return ClientSession(folder / "home", "client-0", make, plain=True, limits=limits)


def refused(one, head, kind="hello"):
    with pytest.raises(Rejected) as caught:
        one.handle(kind, pack(head))
    return caught.value


HUGE = {
    "a wide layer": {"model_name": "lstm", "model_hidden": 16_000},
    "a wide layer of Gboard's model": {"model_hidden": 10**9},
    "a wide embedding": {"model_embed": 10**8},
    "many layers": {"model_layers": 10**9},
    "many epochs": {"method_epochs": 10**6},
    "a long window": {"data_window": 10**12},
    "a large batch": {"method_batch_size": 10**9},
}


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_run_is_refused_before_anything_of_its_size_is_allocated(tmp_path, what, monkeypatch, record_property):
    monkeypatch.setattr(torch, "empty", None)  # whatever makes parameters would fail otherwise than by a refusal
    one = client(tmp_path)
    head = hello(tmp_path, **HUGE[what])
    tracemalloc.start()
    found = refused(one, head)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.reason == "over limit"
    assert peak < 8 << 20
    record_property("fault", f"server: {what}")
    record_property("outcome", "refused by arithmetic: over limit")


def test_without_the_check_the_client_would_take_such_a_run(tmp_path, monkeypatch):
    """The mutant: nothing else stands between a server and the memory of a client."""
    monkeypatch.setattr(device, "check_size", lambda *ignored: None)
    one = client(tmp_path)
    with pytest.raises(Rejected, match="other method"):  # it goes on to compare the method, whose epochs were changed
        one.handle("hello", pack(hello(tmp_path, method_epochs=10**6)))
    assert unpack(one.handle("hello", pack(hello(tmp_path, run="run-2", model_hidden=5000)))).head["proof"]
    monkeypatch.undo()
    small = client(tmp_path, Limits(parameters=100_000))
    assert refused(small, hello(tmp_path, run="run-3", model_hidden=5000)).reason == "over limit"


@given(st.sampled_from(["cifg", "lstm", "gru-untied", "nwp-small"]), st.integers(1, 60), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(40))
def test_the_count_is_that_of_the_model_that_would_be_made(name, hidden, layers):
    spec = build_spec(name, 50, hidden=hidden, layers=layers)
    size = sum(p.numel() for p in init_params(spec, 0).values())
    check_size(spec, 1, 1, 1, Limits(parameters=size))
    if size > 1:
        with pytest.raises(Rejected, match=f"a model of {size:,} parameters"):
            check_size(spec, 1, 1, 1, Limits(parameters=size - 1))


def test_the_numbers_of_a_step_are_bounded():
    spec = build_spec("cifg", 50, hidden=64)
    most = MOST_STEP_NUMBERS // (3 * 64 + 2 * spec.embed)
    check_size(spec, 1, 1, most, Limits())
    with pytest.raises(Rejected, match="numbers in its layers"):
        check_size(spec, 1, 1, most + 1, Limits())
    wide = build_spec("lstm", 26, embed=300_000, hidden=1)  # 9 million parameters, and gigabytes in a step
    with pytest.raises(Rejected, match="numbers in its layers"):
        check_size(wide, 1, 200, 20, Limits())


# Minutes


def test_scoring_ends_when_its_minutes_are_over(tmp_path, monkeypatch):
    """A clock that moves by a minute with every look: held-out text is scored under the same limit."""
    ticks = count(0, 61.0)
    texts = write_texts(tmp_path / "texts", 1, lines=900)
    config = small_config(tmp_path / "texts", vocabulary(tmp_path)[1])
    learner = own_text("client-0", texts[0], limits=Limits(minutes=1))(hello(tmp_path, config))
    theta = init_params(learner._spec, 0)  # type: ignore[attr-defined]
    assert learner.evaluate(theta, "valid").tokens > 0
    monkeypatch.setattr(device, "time_limit", lambda given: time_limit(given, lambda: next(ticks)))
    with pytest.raises(Rejected, match="longer than this client's 1 minutes"):
        learner.evaluate(theta, "valid")


def test_vectors_of_a_count_end_when_their_minutes_are_over(tmp_path, monkeypatch):
    """A list may be long, and smoothing and weights are read with the models: under the same limit."""
    ticks = count(0, 61.0)
    texts = write_texts(tmp_path / "texts", 1, lines=40)
    config = small_config(tmp_path / "texts", vocabulary(tmp_path)[1], secure=True)
    config = replace(config, counts=replace(config.counts, on=True))
    learner = own_text("client-0", texts[0], limits=Limits(minutes=1))(hello(tmp_path, config))
    assert len(learner.counts().vector("recount 1", {}, 4)) > 0
    monkeypatch.setattr(device, "time_limit", lambda given: time_limit(given, lambda: next(ticks)))
    with pytest.raises(Rejected, match="longer than this client's 1 minutes"):
        learner.counts().vector("recount 1", {}, 4)


def test_training_ends_when_its_minutes_are_over(tmp_path, monkeypatch, record_property):
    """A clock that moves by ten seconds with every look: the sixth step of a limit of one minute is one too many."""
    looks = []
    ticks = count(0, 10.0)

    def clock():
        looks.append(next(ticks))
        return looks[-1]

    monkeypatch.setattr(device, "time_limit", lambda given: time_limit(given, clock))
    config = small_config(tmp_path / "texts", vocabulary(tmp_path)[1], epochs=20)
    learner = own_text("client-0", write_texts(tmp_path / "texts", 1)[0], limits=Limits(minutes=1))(
        hello(tmp_path, config)
    )
    theta = init_params(learner._spec, 1)
    with pytest.raises(Rejected, match="longer than this client's 1 minutes") as caught:
        learner.solve(theta, 0, ClientTask(0))
    assert caught.value.reason == "over limit"
    assert len(looks) == 8  # the start, six steps within the minute, one beyond
    looks.clear()
    longer = own_text("client-0", tmp_path / "texts" / "client-0.txt", limits=Limits(minutes=1e6))(
        hello(tmp_path, config)
    )
    assert longer.solve(theta, 0, ClientTask(0)).tokens > 0
    assert len(looks) > 8, "without the limit it would have gone on"
    record_property("fault", "server: more work than the owner's minutes")
    record_property("outcome", "training stops: over limit")


def test_a_private_round_that_takes_too_long_adds_zeros_and_tells_nobody(tmp_path, monkeypatch):
    config = private_config(tmp_path, clients=5, rounds=1)
    transport, roster = enrol(tmp_path)

    def over(given):
        raise Rejected("over limit", "the round took longer")

    monkeypatch.setattr(device, "time_limit", over)
    result = deploy(tmp_path, config, transport, roster)
    assert result["rounds"] == 1
    assert (
        "refused" not in read_metrics(tmp_path / "deployed")[0] or not read_metrics(tmp_path / "deployed")[0]["refused"]
    )


# What is kept


def test_a_hello_beyond_what_a_client_keeps_is_refused_unread(tmp_path, monkeypatch):
    one = client(tmp_path)
    body = MAGIC + bytes(BEGIN_HEAD + 8)
    with pytest.raises(Rejected) as caught:
        one.handle("hello", body)
    assert caught.value.reason == "too large"
    monkeypatch.setattr(session_module, "BEGIN_HEAD", 1 << 40)
    with pytest.raises(Rejected) as caught:  # the mutant reads it
        one.handle("hello", body)
    assert caught.value.reason == "malformed"
    with pytest.raises(Rejected, match="this client keeps"):
        DeviceStore(tmp_path / "home").begin("x", {"config": "x" * MOST_BEGIN})


def test_runs_that_never_end_are_ended_the_oldest_first(tmp_path, monkeypatch, record_property):
    store = DeviceStore(tmp_path)
    for k in range(7):
        store.begin(f"run-{k}", {"config": k}, most=5)
        os.utime(store.run(f"run-{k}") / "begin.json", (1000 + k, 1000 + k))
    held = [k for k in range(7) if (store.run(f"run-{k}") / "begin.json").exists()]
    assert held == [2, 3, 4, 5, 6]
    with pytest.raises(Rejected, match="that run is over"):
        store.begin("run-0", {"config": 0}, most=5)  # what it had sent is forgotten, so it cannot go on
    monkeypatch.setattr(device_store, "MOST_ENDED", 3)
    for k in range(7, 20):
        store.begin(f"run-{k}", {"config": k}, most=5)
    assert len(list((tmp_path / "runs").iterdir())) <= 5 + 3 + 1
    record_property("fault", "server: begins runs without end")
    record_property("outcome", "the oldest are ended; a bounded number is kept")


def test_identities_are_remembered_up_to_a_number_and_never_forgotten_for_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(device_store, "MOST_PINS", 4)
    store = DeviceStore(tmp_path)
    store.pin({name: name.encode() * 32 for name in "abcd"})
    with pytest.raises(Rejected, match="remembers 4 identities") as caught:
        store.pin({"e": b"e" * 32})
    assert caught.value.reason == "over limit"
    with pytest.raises(Rejected, match="is not the one seen before"):
        store.pin({"a": b"x" * 32})


def test_limits_are_kept_in_the_home_and_named_in_the_consent(tmp_path):
    given = Limits(parameters=1_234_567, epochs=7, minutes=2.5, runs=9, epsilon=3.0)
    home = ClientHome(tmp_path)
    home.write(Settings("anna", "127.0.0.1:1", hide_among=12, me="Anna", limits=given))
    assert home.settings().limits == given
    (tmp_path / "client.json").write_text(json.dumps({"name": "a", "server": "b:1", "data": "", "when": []}))
    assert home.settings() == Settings("a", "b:1")  # a home from before there were limits
    text = words("anna", "fl:1", "/notes", False, hide_among=12, me="Anna", limits=given)
    for part in (
        "1,234,567 numbers",
        "7 passes",
        "2.5 minutes",
        "9 runs",
        "ε = 3",
        "sums of 12 people",
        "messages of Anna only",
    ):
        assert part in text
    assert "could invent some" in text


@pytest.mark.parametrize("field", ["parameters", "epochs", "minutes", "runs", "epsilon"])
def test_a_limit_that_is_no_number_above_zero_is_refused(field):
    with pytest.raises(ConfigError, match=f"limit of {field}"):
        Limits(**{field: -1})


# The client's own account


def test_the_account_agrees_with_the_accountant_at_rate_one(tmp_path):
    ledger = OwnLedger(tmp_path)
    for _ in range(4):
        ledger.book("run-a", Spend(1.5))
    for _ in range(3):
        ledger.book("run-b", Spend(0.8))
    expected = epsilon([Release(1.5, 1.0, 4), Release(0.8, 1.0, 3)], DELTA)
    assert ledger.read().epsilon() == pytest.approx(expected, rel=1e-3)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 60), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_tree_noise_never_costs_less_than_the_trees_say(rounds, gap, split, before, after):
    """Neither than one tree over all rounds, nor than two, where the server had to begin another after `split`."""
    spend, most = Spend(1.0, gap, rounds), -(-rounds // gap)
    assert 2 * spend.rho(most) >= forest_sensitivity(rounds, gap)
    assert spend.rho(before) < spend.rho(before + 1)
    if split < rounds and before * gap <= split and after * gap <= rounds - split:
        two = forest_sensitivity(split, gap, before) + forest_sensitivity(rounds - split, gap, after)
        assert 2 * spend.rho(before + after) >= two


def test_what_promises_nothing_is_shown_and_refused_under_a_budget(tmp_path, record_property):
    ledger = OwnLedger(tmp_path)
    ledger.allow("run-a", None)
    ledger.book("run-a", None)
    ledger.book("run-a", None)
    assert "1 runs without differential privacy: no guarantee" in ledger.said()
    with pytest.raises(PrivacyError, match="no differential privacy, and this client keeps to ε = 2"):
        OwnLedger(tmp_path, 2.0).allow("run-b", None)
    with pytest.raises(PrivacyError, match="inf"):
        OwnLedger(tmp_path, 2.0).allow("run-b", Spend(0.0))
    one = client(tmp_path, Limits(epsilon=2.0))
    assert refused(one, hello(tmp_path)).reason == "over budget"
    record_property("fault", "server: a run without privacy for a client with a budget")
    record_property("outcome", "refused: over budget")


@pytest.mark.parametrize("mutant", [False, True])
def test_a_budget_holds_over_rounds_runs_and_restarts(tmp_path, monkeypatch, mutant, record_property):
    """z = 1: one part costs about 4.9 at δ = 1e-6, three about 9.3. The victim allows 8, so two in all."""
    if mutant:
        monkeypatch.setattr(OwnLedger, "allow", lambda self, run, spend: None)
    config = private_config(tmp_path, clients=5, rounds=3)
    transport, roster = enrol(tmp_path)
    text = tmp_path / "texts" / f"{VICTIM}.txt"

    def anew():
        make = own_text(VICTIM, text)
        return ClientSession(tmp_path / "clients" / VICTIM, VICTIM, make, plain=True, limits=Limits(epsilon=8.0))

    transport.handlers[VICTIM] = anew()
    deploy(tmp_path, config, transport, roster)
    spent = OwnLedger(tmp_path / "clients" / VICTIM).read()
    assert sum(spent.parts.values()) == (3 if mutant else 2)
    assert (spent.epsilon() <= 8.0) != mutant
    transport.handlers[VICTIM] = anew()  # restarted; another run
    deploy(tmp_path, replace(config, train=replace(config.train, seed=2)), transport, roster, "another")
    assert (OwnLedger(tmp_path / "clients" / VICTIM).read() == spent) != mutant
    other = OwnLedger(tmp_path / "clients" / "client-0").read()
    assert sum(other.parts.values()) == 6, "who has no budget takes part in everything, and counts it"
    record_property("fault", "server: more private rounds, in another run, than a client's budget")
    record_property("outcome", "nothing leaves beyond the budget: over budget")


def test_parts_of_a_noise_tree_are_counted(tmp_path):
    config = tree_config(tmp_path, rounds=3)
    transport, roster = enrol(tmp_path, clients=6)
    deploy(tmp_path, config, transport, roster)
    accounts = [OwnLedger(tmp_path / "clients" / f"client-{k}").read() for k in range(6)]
    assert sum(sum(a.parts.values()) for a in accounts) == 6, "three groups of two, each once"
    assert all(spend.gap is not None for a in accounts for _, spend in a.parts)


def test_a_masked_part_is_counted_before_it_leaves(tmp_path, monkeypatch):
    config = private_config(tmp_path, clients=5, rounds=1, secure=True)
    transport, roster = enrol(tmp_path)
    booked = []
    real = OwnLedger.book
    monkeypatch.setattr(OwnLedger, "book", lambda self, run, spend: (booked.append(run), real(self, run, spend))[1])
    inner = transport.fault

    def watch(client, post, handler):
        before = len(booked)
        answer = inner(client, post, handler)
        if post.kind == "upload":
            assert len(booked) == before + 1
        return answer

    transport.fault = watch
    deploy(tmp_path, config, transport, roster)
    assert len(booked) == 5


def test_a_run_that_ended_since_it_was_trained_gets_no_upload(tmp_path, record_property):
    """Another run's hello may end a run by the owner's limit, between its training and its upload."""
    config = private_config(tmp_path, clients=5, rounds=1, secure=True)
    transport, roster = enrol(tmp_path)
    inner, refusals = transport.fault, []

    def end_first(client, post, handler):
        if post.kind == "upload" and client == VICTIM:
            store = transport.handlers[VICTIM].store
            for folder in (store.home / "runs").iterdir():
                device_store._end(folder)
            with pytest.raises(Rejected) as caught:
                transport.handlers[VICTIM].handle("upload", post.body)
            refusals.append(caught.value.reason)
        return inner(client, post, handler)

    transport.fault = end_first
    deploy(tmp_path, config, transport, roster)
    assert set(refusals) == {"unknown run"}
    assert OwnLedger(tmp_path / "clients" / VICTIM).read().parts == {}
    record_property("fault", "server: asks for an upload of a run that has ended")
    record_property("outcome", "refused: unknown run; nothing is sent or counted")


def damage(path, how):
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "smaller":
        content = json.loads(data)
        content["parts" if "parts" in content else "number"] = [] if "parts" in content else 0
        path.write_bytes(json.dumps(content).encode())
    elif how == "deep":
        path.write_bytes(b"[" * 100_000)
    else:
        path.write_bytes(data.replace(b"1", b"0", 1))


@pytest.mark.parametrize("file", [FILE, HEAD])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "smaller", "flipped", "deep"])
def test_a_damaged_account_is_never_a_smaller_one(tmp_path, file, how, record_property):
    ledger = OwnLedger(tmp_path, 100.0)
    for _ in range(11):
        ledger.book("run-a", Spend(1.0))
    damage(tmp_path / file, how)
    with pytest.raises(PrivacyError, match=r"damaged, missing or older; .* takes no part"):
        ledger.allow("run-a", Spend(1.0))
    with pytest.raises(PrivacyError):
        ledger.book("run-a", Spend(1.0))
    record_property("fault", f"own disk: {file} {how}")
    record_property("outcome", "fails closed: the client takes no part")


def test_an_older_copy_of_the_account_is_refused_and_a_kill_between_its_files_is_not(tmp_path):
    ledger = OwnLedger(tmp_path)
    ledger.book("run-a", Spend(1.0))
    older, head = (tmp_path / FILE).read_bytes(), (tmp_path / HEAD).read_bytes()
    ledger.book("run-a", Spend(1.0))
    (tmp_path / HEAD).write_bytes(head)  # killed after the account and before its head
    assert sum(ledger.read().parts.values()) == 2
    ledger.book("run-a", Spend(1.0))
    (tmp_path / FILE).write_bytes(older)
    with pytest.raises(PrivacyError, match="older"):
        ledger.read()


def test_a_damaged_account_keeps_a_session_out_of_a_round(tmp_path):
    config = private_config(tmp_path, clients=5, rounds=1)
    transport, roster = enrol(tmp_path)
    home = tmp_path / "clients" / VICTIM
    OwnLedger(home).book("earlier", Spend(1.0))
    (home / FILE).write_bytes(b"{}")
    deploy(tmp_path, config, transport, roster)
    assert not (home / "runs").exists() or not list((home / "runs").glob("*/step.json"))
    assert math.isfinite(OwnLedger(tmp_path / "clients" / "client-0").read().epsilon())


def test_the_owner_reads_why_the_client_took_no_part(tmp_path):
    """One line in the client's home, for `keyfed client` and its --status; what others do wrong is not in it."""

    def handle(kind, body):
        raise Rejected(kind, "some more words")

    note = noting(tmp_path, handle)
    for reason in ("over budget", "stale"):
        with pytest.raises(Rejected):
            note(reason, b"")
    assert (tmp_path / REFUSED).read_text() == "over budget: some more words"


def test_status_says_what_was_spent_and_what_is_allowed(keyfed, tmp_path):
    home = ClientHome(tmp_path / "home")
    home.path.mkdir()
    home.write(Settings("anna", "127.0.0.1:1", hide_among=12, limits=Limits(epsilon=9.0)))
    DeviceStore(home.path).meet(["a" * 32, "b" * 32])
    OwnLedger(home.path).book("run-a", Spend(1.0))
    code, out, _ = keyfed("client", "--home", home.path, "--status")
    assert code == 0
    assert "hides among: 12 clients or more" in out
    assert f"roster: {roster_hash(['a' * 32, 'b' * 32])} (2 clients)" in out
    assert re.search(r"privacy spent: ε = 4\.\d+ at δ = 1e-06 for 1 parts of 1 private runs \(budget 9\)", out)
    (home.path / FILE).write_text("{}")
    assert "privacy spent: not known: " in keyfed("client", "--home", home.path, "--status")[1]
