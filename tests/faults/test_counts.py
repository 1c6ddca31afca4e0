"""A count with real clients by messages: the simulation's bytes, with drop-outs at every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keyfed.config.schema import CountsConfig
from keyfed.errors import ConfigError
from keyfed.model.counts import FILE
from keyfed.model.mixture import FILE as MIXTURE
from keyfed.private.secagg import collector
from keyfed.reports.finished import corpus_of
from keyfed.run.counts import command
from keyfed.run.counts.command import Counting, count_run, score_counts
from keyfed.run.folder import load_model
from keyfed.run.plan import with_limits
from keyfed.run.remote import counting
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver
from tests.listeners import Heard

from .deployed import QUICK, federation, session, small_config, vocabulary, write_texts

CLIENTS = 8
TERMS = CountsConfig(order=3, k=3, cap=4, most=60, megabytes=0.01, among=4, on=True)


def prepared(tmp_path, batches="stream", clients=CLIENTS, terms=TERMS):
    texts = write_texts(tmp_path / "texts", clients, lines=40)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, rounds=2, secure=True)
    config = replace(config, counts=terms, data=replace(config.data, batches=batches))
    return texts, vocab, with_limits(config)


def simulated(run, config, *, secure, lost=lambda purpose, name: False):
    """Count the run's clients in a simulation; return both files and the figures on test text."""
    trained = load_model(run)
    found = corpus_of(trained)
    terms = {f: getattr(config.counts, f) for f in ("order", "k", "cap", "most", "megabytes", "among")}
    how = Counting(**terms, secure=secure)
    real = command.Gathering
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "Gathering", lambda groups, settings, apart: real(groups, settings, lost, apart=apart))
        report = count_run(trained, found, how)
    files = [(run / name).read_bytes() for name in (FILE, MIXTURE)]
    model, mixture = command.read_counts(trained)
    return report, files, score_counts(trained, found, model, mixture)


@pytest.mark.parametrize("batches", ["stream", "packed"])
def test_a_federation_writes_the_bytes_of_the_simulation(tmp_path, batches):
    texts, vocab, config = prepared(tmp_path, batches)
    transport, roster = federation(tmp_path / "clients", texts, counts=True, named=lambda path: path.name)
    out = tmp_path / "run"
    result = train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    deployed = [(out / name).read_bytes() for name in (FILE, MIXTURE)]
    for secure in (False, True):
        _, files, scores = simulated(out, config, secure=secure)
        assert files == deployed
    for name, score in scores.items():
        assert result["counts"][name]["test"]["perplexity"] == pytest.approx(score["test"].perplexity, rel=1e-5)
        assert result["counts"][name]["test"]["top1"] == pytest.approx(score["test"].summary()["top1"])


MANY = replace(TERMS, among=18)  # one group of 18 clients, of whom 13 must stay; of 15 then 11
LOST = {
    "sketch 2": "client-3.txt",
    "recount 3": "client-7.txt",
    "smoothing 1": "client-3.txt",
    "mixture": "client-5.txt",
}


def dropping(stage, fails=LOST):
    """Return a fault by which one client vanishes in some sums, and who took part in the messages of which sum."""
    purposes, called, gone = {}, {}, []

    def fault(client, post, handler):
        if post.kind == "count":
            purposes[client] = unpack(post.body).head["purpose"]
            called.setdefault(purposes[client], set()).add(client)
        if post.kind == stage and fails.get(purposes.get(client)) == client:
            gone.append((purposes[client], client))
            return Lost("no answer")
        return deliver(client, post, handler)

    return fault, called, gone


@pytest.mark.parametrize("stage", ["count", "upload", "unmask"])
def test_with_drop_outs_at_any_stage_the_bytes_are_those_of_the_simulation(tmp_path, stage):
    """Who is lost before its vector is there is lost in the simulation, too, and with it the last two by name.

    Before the first sum of a text there is none to differ from: nobody is left out with the client that it lost.
    """
    texts, vocab, config = prepared(tmp_path, clients=18, terms=MANY)
    fault, called, gone = dropping(stage)
    home, out = tmp_path / "clients", tmp_path / "run"
    transport, roster = federation(home, texts, fault=fault, counts=True, named=lambda path: path.name)
    result = train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    deployed = [(out / name).read_bytes() for name in (FILE, MIXTURE)]
    assert gone == list(LOST.items())
    lasting = stage != "unmask"
    sizes = {"recount 1": 18, "sketch 2": 18, "recount 2": 15, "sketch 3": 15, "recount 3": 15, "smoothing 1": 18}
    sizes |= {"smoothing 2": 17, "smoothing 3": 17, "mixture": 17, "test": 18}
    assert {purpose: len(clients) for purpose, clients in called.items()} == (
        sizes if lasting else dict.fromkeys(sizes, 18)
    )
    left = {"client-3.txt", "client-8.txt", "client-9.txt"}  # whose texts are counted no more
    assert called["recount 2"] == called["recount 1"] - (left if lasting else set())
    assert result["counts"]["mixture"]["test"]["tokens"] == result["test"]["tokens"]  # another text: all were called

    def lost(purpose, name):
        return lasting and LOST.get(purpose) == name

    for secure in (False, True):
        report, files, _ = simulated(out, config, secure=secure, lost=lost)
        assert files == deployed
        assert report.closed == ()
    if lasting:
        assert simulated(out, config, secure=False)[1] != deployed, "the lost clients make no difference"


def test_a_group_that_loses_too_many_counts_no_more_of_that_text(tmp_path):
    """Of four three must stay, and no later sum of the same text can do with one client less: here half of all end."""
    texts, vocab, config = prepared(tmp_path)
    fault, _, gone = dropping("upload", {"sketch 2": "client-3"})
    transport, roster = federation(tmp_path / "clients", texts, fault=fault, counts=True)
    out, heard = tmp_path / "run", Heard()
    result = train_deployed(config, vocab, out, transport, roster, heard, patience=QUICK)
    assert gone == [("sketch 2", "client-3")]
    assert "no counts: the sum sketch 2 lacks 4 of 8 clients (sketch 2, group 0: 1 of 4 clients uploaded" in str(
        heard.lines
    )
    assert "counts" not in result
    assert not (out / FILE).exists()


@pytest.mark.parametrize(("before", "later"), [("sketch 2", "recount 2"), ("smoothing 3", "mixture")])
def test_clients_do_not_open_two_sums_that_differ_by_one_of_them(tmp_path, monkeypatch, before, later):
    """A server that leaves one client out of the later sum, and nobody with it: it could subtract."""
    texts, vocab, config = prepared(tmp_path, clients=12, terms=replace(TERMS, among=12))
    fault, called, gone = dropping("upload", {later: "client-3"})
    refusals, home = set(), tmp_path / "clients"

    def noted(client, post, handler):
        answer = fault(client, post, handler)
        if isinstance(answer, Lost) and post.kind == "unmask":
            refusals.add(answer)
        return answer

    monkeypatch.setattr(collector, "to_leave_out", lambda before, stayed, apart: 0)
    transport, roster = federation(home, texts, fault=noted, counts=True)
    out, heard = tmp_path / "run", Heard()
    result = train_deployed(config, vocab, out, transport, roster, heard, patience=QUICK)
    assert before in called
    assert gone == [(later, "client-3")]
    assert len(refusals) == 1
    assert next(iter(refusals)).reason == "refused by client"
    assert "lack 1 of the clients of an earlier sum of the same text" in next(iter(refusals)).detail
    assert f"no counts: the sum {later} lacks 12 of 12 clients ({later}, group 0: 0 of 12 clients answered" in str(
        heard.lines
    )
    assert "counts" not in result
    assert not (out / FILE).exists()


def test_a_client_remembers_after_a_restart_who_was_in_an_earlier_sum(tmp_path):
    """All clients are restarted between sketch and recount."""
    texts, vocab, config = prepared(tmp_path, clients=12, terms=replace(TERMS, among=12))
    fault, _, _ = dropping("upload", {"recount 2": "client-3"})
    home, refused = tmp_path / "clients", []

    def fresh(client, post, handler):
        if post.kind == "count" and unpack(post.body).head["purpose"] == "recount 2":
            path = next(path for path in texts if path.stem == client)
            transport.handlers[client] = session(home, path, counts=True)
        answer = fault(client, post, transport.handlers[client])
        refused.extend([client] if post.kind == "unmask" and isinstance(answer, Lost) else [])
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collector, "to_leave_out", lambda before, stayed, apart: 0)
        transport, roster = federation(home, texts, fault=fresh, counts=True)
        train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    assert len(refused) == 11


def test_a_count_of_too_few_clients_is_said_and_the_run_ends_without(tmp_path):
    texts, vocab, config = prepared(tmp_path)
    transport, roster = federation(tmp_path / "clients", texts)
    transport.handlers |= {path.stem: session(tmp_path / "clients", path, counts=True) for path in texts[:2]}
    out, heard = tmp_path / "run", Heard()
    result = train_deployed(config, vocab, out, transport, roster, heard, patience=QUICK)
    few = "2 clients take part in counts (keyfed client --counts), and a sum hides a client among 3"
    early = [n for n, line in enumerate(heard.lines) if few in line and line.startswith("WARNING")]
    assert len(early) == 1, "said once, at the first hello"
    assert early[0] < next(n for n, line in enumerate(heard.lines) if "validation after round 1" in line)
    assert f"no counts: {few}" in str(heard.lines)
    assert "counts" not in result
    assert result["test"]["tokens"] > 0
    assert not (out / FILE).exists()


def test_a_budget_too_small_for_the_vocabulary_is_refused_before_the_first_round(tmp_path):
    texts, vocab, config = prepared(tmp_path, terms=replace(TERMS, megabytes=0.00005))
    called = []

    def fault(client, post, handler):
        called.append(post.kind)
        return deliver(client, post, handler)

    transport, roster = federation(tmp_path / "clients", texts, fault=fault, counts=True)
    with pytest.raises(
        ConfigError, match=r"fewer than the vocabulary has words .*; give counts\.megabytes \S+ or more"
    ):
        train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    assert called == []


@pytest.mark.parametrize("stage", ["make_counts", "_tested"])
def test_whatever_ends_a_count_the_run_is_finished(tmp_path, monkeypatch, stage):
    """An error that the clients' or the server's configuration causes is said in a line."""
    texts, vocab, config = prepared(tmp_path)

    def fail(*given, **named):
        raise ConfigError("no such thing")

    monkeypatch.setattr(counting, stage, fail)
    transport, roster = federation(tmp_path / "clients", texts, counts=True)
    heard = Heard()
    result = train_deployed(config, vocab, tmp_path / "run", transport, roster, heard, patience=QUICK)
    assert "no counts: no such thing" in str(heard.lines) or "the counts were not tested: no such" in str(heard.lines)
    assert "counts" not in result
    assert (tmp_path / "run" / "result.json").exists()


def test_a_server_that_was_killed_while_it_counted_goes_on_and_counts_nothing_twice(tmp_path):
    """What clients have written once they do not write again, whichever the server's attempt."""
    texts, vocab, config = prepared(tmp_path)

    def killed(client, post, handler):
        if post.kind == "count" and unpack(post.body).head["purpose"] == "sketch 2":
            raise KeyboardInterrupt
        return deliver(client, post, handler)

    transport, roster = federation(tmp_path / "clients", texts, fault=killed, counts=True)
    out, heard = tmp_path / "run", Heard()
    with pytest.raises(KeyboardInterrupt):
        train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    transport.fault = deliver
    result = train_deployed(config, vocab, out, transport, roster, heard, patience=QUICK, resume=True)
    assert "no counts: the sum recount 1 lacks" in str(heard.lines)
    assert result["rounds"] == 2
    assert not (out / FILE).exists()


def test_a_plain_federation_counts_nothing(tmp_path):
    """Its server would see which word sequences every client wrote: refused by the server, and by clients."""
    texts, vocab, config = prepared(tmp_path)
    transport, roster = federation(tmp_path / "clients", texts, counts=True)
    plain = replace(config, secure=type(config.secure)())
    with pytest.raises(ConfigError, match="without secure sums would show the server"):
        train_deployed(plain, vocab, tmp_path / "run", transport, roster, patience=QUICK)
