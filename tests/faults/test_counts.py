"""A count with real clients by messages: the simulation's bytes, with drop-outs at every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keyfed.config.schema import CountsConfig
from keyfed.errors import ConfigError
from keyfed.model.counts import FILE
from keyfed.model.mixture import FILE as MIXTURE
from keyfed.reports.finished import corpus_of
from keyfed.run.counts import command
from keyfed.run.counts.command import Counting, count_run, score_counts
from keyfed.run.folder import load_model
from keyfed.run.plan import with_limits
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver
from tests.listeners import Heard

from .deployed import QUICK, federation, session, small_config, vocabulary, write_texts

CLIENTS = 8
TERMS = CountsConfig(order=3, k=3, cap=4, most=60, megabytes=0.01, among=4, on=True)


def prepared(tmp_path, batches="stream"):
    texts = write_texts(tmp_path / "texts", CLIENTS, lines=40)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, rounds=2, secure=True)
    config = replace(config, counts=TERMS, data=replace(config.data, batches=batches))
    return texts, vocab, with_limits(config)


def simulated(run, config, *, secure, lost=lambda purpose, name: False):
    """Count the run's clients in a simulation; return both files and the figures on test text."""
    trained = load_model(run)
    found = corpus_of(trained)
    how = Counting(**{f: getattr(TERMS, f) for f in ("order", "k", "cap", "most", "megabytes", "among")}, secure=secure)
    real = command.Gathering
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "Gathering", lambda groups, settings: real(groups, settings, lost))
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


def dropping(stage):
    """Return a fault by which one client of each group of four vanishes, never the same in two sums; and who did."""
    purposes, gone = {}, set()

    def fault(client, post, handler):
        if post.kind == "count":
            purposes[client] = unpack(post.body).head["purpose"]
        if post.kind == stage and absent(purposes.get(client, ""), client):
            gone.add((purposes[client], client))
            return Lost("no answer")
        return deliver(client, post, handler)

    return fault, gone


def absent(purpose, client):
    """Whether a client is lost in a sum of a count; the first of four in one, the second in the next, …"""
    number = int(client.removeprefix("client-").removesuffix(".txt"))
    return bool(purpose) and number % 4 == len(purpose + purpose[-1:]) % 4


@pytest.mark.parametrize("stage", ["count", "upload", "unmask"])
def test_with_drop_outs_at_any_stage_the_bytes_are_those_of_the_simulation(tmp_path, stage):
    """Of four clients three must stay. Who is lost before its vector is there is lost in the simulation, too."""
    texts, vocab, config = prepared(tmp_path)
    fault, gone = dropping(stage)
    home, out = tmp_path / "clients", tmp_path / "run"
    transport, roster = federation(home, texts, fault=fault, counts=True, named=lambda path: path.name)
    train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    deployed = [(out / name).read_bytes() for name in (FILE, MIXTURE)]
    purposes = {purpose for purpose, _ in gone}
    assert {"recount 1", "sketch 2", "recount 2", "smoothing 1", "mixture"} <= purposes
    assert len({client for _, client in gone}) > 4, "the same clients are always lost"
    lost = (lambda purpose, name: False) if stage == "unmask" else absent
    for secure in (False, True):
        report, files, _ = simulated(out, config, secure=secure, lost=lost)
        assert files == deployed
        assert report.closed == ()
    if stage != "unmask":
        assert simulated(out, config, secure=False)[1] != deployed, "the lost clients make no difference"


def test_a_count_of_too_few_clients_is_said_and_the_run_ends_without(tmp_path):
    texts, vocab, config = prepared(tmp_path)
    transport, roster = federation(tmp_path / "clients", texts)
    transport.handlers |= {path.stem: session(tmp_path / "clients", path, counts=True) for path in texts[:2]}
    out, heard = tmp_path / "run", Heard()
    result = train_deployed(config, vocab, out, transport, roster, heard, patience=QUICK)
    assert "no counts: 2 clients take part in counts (keyfed client --counts), and a sum hides a client among 3" in str(
        heard.lines
    )
    assert "counts" not in result
    assert result["test"]["tokens"] > 0
    assert not (out / FILE).exists()


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
