"""Every release is counted, and about the same clients: at the hinge, after older copies, under other terms."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from keyfed.errors import PrivacyError, RunError
from keyfed.private.dp.accounting import COARSE, Release, epsilon
from keyfed.private.dp.ledger import Ledger, read_ledger
from keyfed.run.remote import private as deployed_private
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver
from tests.listeners import Heard

from .deployed import revoke
from .private import (
    Killed,
    counting,
    deploy,
    enrol,
    once,
    private_config,
    recorded,
)


# Every number of lost clients, every step in which they are lost, and at each step both sides of the hinge.
@pytest.mark.parametrize(
    ("kind", "lost"),
    [("train", 0), ("train", 1), ("train", 2), ("upload", 2), ("upload", 3), ("upload", 4), ("unmask", 1),
     ("unmask", 3), ("unmask", 4)],
)  # fmt: skip
def test_a_round_in_which_one_who_stays_would_decide_is_booked_without_amplification(tmp_path, monkeypatch, kind, lost):
    everybody = [f"client-{k}" for k in range(10)]
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: everybody[:9])

    def fault(client, post, handler):
        gone = post.kind == kind and int(client[-1]) < lost
        return Lost("unreachable") if gone else deliver(client, post, handler)

    config = private_config(tmp_path, clients=10, cohort=9, rounds=1, secure=True)
    result = deploy(tmp_path, config, *enrol(tmp_path, 10, fault=fault))
    (entry,) = read_ledger(tmp_path / "deployed").entries
    # Seven of nine are needed: with two lost one fewer closes it, with three lost one more opens it.
    assert entry.row.q == (1.0 if lost in (2, 3) else 0.9)
    assert ("1 releases are booked at rate 1" in " ".join(result["privacy"]["statement"])) == (lost in (2, 3))


def test_a_row_at_rate_one_that_exceeds_the_budget_ends_the_run_unreleased(tmp_path, monkeypatch):
    everybody = [f"client-{k}" for k in range(9)]
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: everybody)

    def fault(client, post, handler):
        late = post.kind == "train" and unpack(post.body).head["round"] == 1
        return Lost("unreachable") if late and client < "client-2" else deliver(client, post, handler)

    drawn = recorded(monkeypatch)
    fits = epsilon([Release(1.0, 0.8, 2, 2e-10)], 1e-3, grid=COARSE)
    exceeds = epsilon([Release(1.0, 0.8), Release(1.0, 1.0)], 1e-3, grid=COARSE)
    assert fits * 1.01 < exceeds
    config = private_config(tmp_path, clients=20, cohort=16, rounds=2, secure=True)
    config = replace(config, privacy=replace(config.privacy, epsilon=(fits + exceeds) / 2, delta=1e-3))
    result = deploy(tmp_path, config, *enrol(tmp_path, 20, fault=fault))
    assert (result["rounds"], result["privacy"]["releases"], len(drawn)) == (1, 1, 1)
    assert result["privacy"]["pld"] < fits


class Copies(Heard):
    """Ends the run after a round, and copies its folder after another."""

    def __init__(self, run, after, stop):
        super().__init__(stop)
        self.run, self.copied = run, after

    def round(self, record):
        if record["round"] == self.copied:
            shutil.copytree(self.run, self.run.with_name("backup"), ignore=shutil.ignore_patterns("*lock"))
        super().round(record)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("method", ["fedavg", "tree"])
def test_a_folder_from_an_older_copy_is_refused(tmp_path, secure, method):
    tree = {"mechanism": "tree", "separation": 1} if method == "tree" else {}
    config = private_config(tmp_path, clients=4, rounds=5, secure=secure, privacy=tree)
    transport, roster = enrol(tmp_path, 4)
    run = tmp_path / "deployed"
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Copies(run, 1, 3))
    shutil.rmtree(run)
    shutil.copytree(run.with_name("backup"), run)
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(PrivacyError, match="took part in step 3 of this run, and the ledger has 1 rows") as caught:
        deploy(tmp_path, config, transport, roster, resume=True)
    assert "\n" not in str(caught.value)
    assert (run / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("method", ["fedavg", "tree"])
def test_a_step_that_the_ledger_does_not_know_is_booked(tmp_path, monkeypatch, method):
    """Killed before the row, or the last row lost: clients that took part do not do so again for the same step."""
    tree = {"mechanism": "tree", "separation": 1} if method == "tree" else {}
    config = private_config(tmp_path, clients=4, rounds=3, privacy=tree)
    transport, roster = enrol(tmp_path, 4)
    book, kill = Ledger.book, once(2)

    def books(*given):
        kill()
        return book(*given)

    monkeypatch.setattr(Ledger, "book", books)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    sent = counting(transport)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    entries = read_ledger(tmp_path / "deployed").entries
    assert [(e.what, e.round) for e in entries] == [("update", 0), ("heard", 1), ("update", 1), ("update", 2)]
    assert set(sent.values()) == {2}
    assert (result["rounds"], result["privacy"]["retried"]) == (3, 1)
    if method == "tree":
        assert [e.row.tree for e in entries] == [0, 0, 1, 1]


def test_the_clients_that_a_ledger_is_about_cannot_be_exchanged(tmp_path):
    config = private_config(tmp_path, clients=4, cohort=3, rounds=3)
    transport, roster = enrol(tmp_path, 4)
    revoke(roster, "client-3")
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Heard(1))
    path = tmp_path / "deployed" / "enrolled.json"
    names = path.read_text()
    path.unlink()
    with pytest.raises(PrivacyError, match="the ledger beside it speaks of the clients listed there"):
        deploy(tmp_path, config, transport, roster, resume=True)
    path.write_text(names.replace("client-2", "client-3"))
    with pytest.raises(PrivacyError, match=r"begun under other terms \(enrolled\)"):
        deploy(tmp_path, config, transport, roster, resume=True)
    path.write_text(names)
    assert deploy(tmp_path, config, transport, roster, resume=True)["rounds"] == 3


def test_a_run_that_goes_on_under_other_terms_is_refused(tmp_path):
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Heard(1))
    louder = replace(config, privacy=replace(config.privacy, noise=0.5))
    with pytest.raises(RunError):
        deploy(tmp_path, louder, transport, roster, resume=True)
