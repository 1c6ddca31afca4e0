"""Who is taken in, who is not, and who is forgotten."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from keyfed.deploy import enrolment
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import (
    Enrolment,
    enrol,
    forget,
    leave_statement,
    names_by_key,
    read_enrolment,
    read_leave,
    read_nodes,
    write_enrolment,
)
from keyfed.deploy.homes import ServerHome, open_home
from keyfed.errors import ConfigError, DeployError
from keyfed.wire.flower.commands import NODES as LIST_NODES
from keyfed.wire.roster import Roster


class Flwr:
    """Stands in for `flwr`: numbers nodes, remembers what it was asked."""

    def __init__(self, fails=False):
        self.asked, self.fails = [], fails

    def __call__(self, commands):
        if self.fails:
            raise DeployError("does the server run?")
        self.asked += [list(c) for c in commands]
        return [f"2 keys are registered.\n✅ SuperNode {7000 + len(self.asked)} registered." for _ in commands]


@pytest.fixture
def server(tmp_path):
    make_certificates(tmp_path / "server", [])
    return ServerHome(tmp_path / "server")


def client(tmp_path, server, name):
    return open_home(tmp_path / name, name=name, server="127.0.0.1:9092", ca=server.ca)


def file_of(home):
    return write_enrolment(home).read_bytes()


def test_a_client_is_taken_in_and_sent_away(tmp_path, server):
    flwr = Flwr()
    given = read_enrolment(file_of(client(tmp_path, server, "anna")))
    enrol(server, [given], flwr)
    assert flwr.asked[0][:2] == ["supernode", "register"]
    entry = Roster(server.roster).entries["anna"]
    assert entry.identity == given.identity.hex()
    assert entry.node_key == given.node_sum
    assert entry.revoked is False
    assert names_by_key(server) == {given.node_sum: "anna"}
    assert Roster(server.roster).names() == ["anna"]  # as training reads it
    forget(server, "anna", flwr)
    assert flwr.asked[1][:3] == ["supernode", "unregister", "7001"]
    assert Roster(server.roster).entries["anna"].revoked is True
    assert names_by_key(server) == {}
    assert Roster(server.roster).names() == []
    assert not list(server.path.glob(".*.pub"))


def test_the_file_holds_no_private_key(tmp_path, server):
    home = client(tmp_path, server, "anna")
    data = file_of(home)
    assert home.identity_key.read_bytes().hex().encode() not in data
    assert b"PRIVATE" not in data
    assert home.secret.read_bytes().hex().encode() not in data


def test_one_key_one_name(tmp_path, server):
    home = client(tmp_path, server, "anna")
    enrol(server, [read_enrolment(file_of(home))], Flwr())
    with pytest.raises(DeployError, match="enrolled already") as refused:
        enrol(server, [read_enrolment(file_of(home))], Flwr())
    assert f"`keyfed enroll --forget anna --home {server.path}` first" in str(refused.value)
    home.write(type(home.settings())(**{**as_dict(home), "name": "bert"}))
    with pytest.raises(DeployError, match="one key, one name"):
        enrol(server, [read_enrolment(file_of(home))], Flwr())
    # A new node key does not help: the identity is known.
    other = client(tmp_path, server, "carl")
    other.identity_key.write_bytes(home.identity_key.read_bytes())
    with pytest.raises(DeployError, match="one key, one name"):
        enrol(server, [read_enrolment(file_of(other))], Flwr())
    assert list(Roster(server.roster).entries) == ["anna"]


def test_one_key_in_a_hundred_names_of_one_batch(tmp_path, server):
    home = client(tmp_path, server, "c0")
    files = []
    for k in range(100):
        home.write(type(home.settings())(**{**as_dict(home), "name": f"c{k}"}))
        files.append(read_enrolment(file_of(home)))
    flwr = Flwr()
    with pytest.raises(DeployError, match="one key, one name"):
        enrol(server, files, flwr)
    assert flwr.asked == []
    assert Roster(server.roster).entries == {}


def as_dict(home):
    told = home.settings()
    return {f: getattr(told, f) for f in ("name", "server", "data", "when", "keep_days", "plain")}


def test_a_key_that_was_sent_away_does_not_come_back(tmp_path, server):
    given = read_enrolment(file_of(client(tmp_path, server, "anna")))
    enrol(server, [given], Flwr())
    forget(server, "anna", Flwr())
    with pytest.raises(DeployError, match="needs a new --home"):
        enrol(server, [given], Flwr())


def test_a_server_that_does_not_answer_changes_nothing(tmp_path, server):
    given = read_enrolment(file_of(client(tmp_path, server, "anna")))
    with pytest.raises(DeployError, match="does the server run"):
        enrol(server, [given], Flwr(fails=True))
    assert Roster(server.roster).entries == {}
    enrol(server, [given], Flwr())
    with pytest.raises(DeployError, match="does the server run"):
        forget(server, "anna", Flwr(fails=True))
    assert names_by_key(server) == {}  # takes no part at once; the rest is done when the server answers
    forget(server, "anna", Flwr())
    assert read_nodes(server) == {}
    with pytest.raises(DeployError, match="is not enrolled"):
        forget(server, "anna", Flwr())


class Registry(Flwr):
    """A SuperLink that takes a key once and tells which it has, and stops at the first failure."""

    def __init__(self, limit=99):
        super().__init__()
        self.nodes, self.limit = {}, limit

    def __call__(self, commands):
        said = []
        for command in commands:
            if command[0] == LIST_NODES:
                said.append(json.dumps(self.nodes))
                continue
            key = Enrolment("x", Path(command[2]).read_text().strip(), b"").node_sum
            if key in self.nodes:
                raise DeployError("`flwr supernode` failed: Public key already in use")
            if len(self.nodes) == self.limit:
                raise DeployError("does the server run?")
            self.nodes[key] = 7000 + len(self.nodes)
            said.append(f"SuperNode {self.nodes[key]} registered successfully.")
        return said


def test_an_enrolment_that_broke_off_enrols_nobody_and_is_taken_up_again(tmp_path, server):
    given = [read_enrolment(file_of(client(tmp_path, server, name))) for name in ("anna", "bert", "carl")]
    flwr = Registry(limit=1)
    with pytest.raises(DeployError, match="does the server run"):
        enrol(server, given, flwr)
    assert (Roster(server.roster).entries, read_nodes(server), len(flwr.nodes)) == ({}, {}, 1)
    flwr.limit = 99
    enrol(server, given, flwr)
    assert sorted(Roster(server.roster).entries) == ["anna", "bert", "carl"]
    assert {one.name: flwr.nodes[one.node_sum] for one in given} == read_nodes(server)


def test_a_name_that_only_the_superlink_has_can_be_forgotten(tmp_path, server):
    (server.path / "nodes.json").write_text(json.dumps({"anna": 7001}))  # stopped before the roster was written
    flwr = Flwr()
    forget(server, "anna", flwr)
    assert flwr.asked == [["supernode", "unregister", "7001", "keyfed"]]
    assert read_nodes(server) == {}
    assert Roster(server.roster).entries == {}


def test_enrolments_at_the_same_time_lose_none(tmp_path, server):
    given = [read_enrolment(file_of(client(tmp_path, server, f"c{k}"))) for k in range(4)]

    class Slow(Flwr):
        def __call__(self, commands):
            time.sleep(0.05)  # the others have read the roster by then, if they could
            return super().__call__(commands)

    threads = [threading.Thread(target=enrol, args=(server, [one], Slow())) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(Roster(server.roster).entries) == sorted(read_nodes(server)) == ["c0", "c1", "c2", "c3"]


def test_a_wish_to_leave_does_not_touch_who_has_the_name_by_now(tmp_path, server):
    enrol(server, [read_enrolment(file_of(client(tmp_path, server, "anna")))], Flwr())
    with pytest.raises(DeployError, match="another client by now"):
        forget(server, "anna", Flwr(), identity="ab" * 32)
    assert len(names_by_key(server)) == 1


@pytest.mark.parametrize("field", ["name", "node", "identity", "signature"])
def test_an_altered_file_is_refused(tmp_path, server, field):
    document = json.loads(file_of(client(tmp_path, server, "anna")))
    other = json.loads(file_of(client(tmp_path, server, "bert")))
    document[field] = other[field]
    with pytest.raises(DeployError, match="altered"):
        read_enrolment(json.dumps(document).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"{}", b'{"format": "keyfed-enrol-1"}', b"[" * 100_000, b"x" * 200_000],
    ids=["empty", "binary", "list", "object", "bare", "deep", "large"],
)
def test_what_is_no_enrolment_file_is_said(data):
    with pytest.raises(DeployError):
        read_enrolment(data)


def sign_again(home, **changes):
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from keyfed.deploy.enrolment import _signed

    document = {**json.loads(file_of(home)), **changes}
    private = ed25519.Ed25519PrivateKey.from_private_bytes(home.identity_key.read_bytes())
    document["signature"] = private.sign(_signed(document)).hex()
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../etc/passwd"},
        {"name": 7},
        {"node": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDUX3Vq2Yy3v1dVb8d0g4oJxI3dQ0k0w9m0o5s0n0m0A"},
        {"node": "nonsense"},
        {"more": 1},
    ],
    ids=["path", "number", "other-kind-of-key", "no-key", "more"],
)
def test_a_signed_file_with_wrong_contents_is_refused(tmp_path, server, changes):
    with pytest.raises((DeployError, ConfigError)):
        read_enrolment(sign_again(client(tmp_path, server, "anna"), **changes))


def test_a_client_that_leaves_is_forgotten(tmp_path, server, monkeypatch):
    home, flwr = client(tmp_path, server, "anna"), Flwr()
    enrol(server, [read_enrolment(file_of(home))], flwr)
    monkeypatch.setattr(enrolment, "forget", lambda place, name, **more: forget(place, name, flwr, **more))
    assert enrolment.take_wish(server, leave_statement(home))
    assert enrolment.act_on_wishes(server) == ["anna"]
    assert names_by_key(server) == {}
    assert enrolment.act_on_wishes(server) == []
    assert not enrolment.take_wish(server, leave_statement(home))  # it has left


def test_a_wish_is_tried_again_until_the_server_answers(tmp_path, server, monkeypatch):
    home = client(tmp_path, server, "anna")
    enrol(server, [read_enrolment(file_of(home))], Flwr())
    enrolment.take_wish(server, leave_statement(home))
    monkeypatch.setattr(enrolment, "forget", lambda place, name, **more: forget(place, name, Flwr(fails=True), **more))
    assert enrolment.act_on_wishes(server) == []
    monkeypatch.setattr(enrolment, "forget", lambda place, name, **more: forget(place, name, Flwr(), **more))
    assert enrolment.act_on_wishes(server) == ["anna"]


def test_nobody_can_send_another_away(tmp_path, server):
    anna, bert = client(tmp_path, server, "anna"), client(tmp_path, server, "bert")
    enrol(server, [read_enrolment(file_of(h)) for h in (anna, bert)], Flwr())
    document = json.loads(leave_statement(bert))
    document["name"] = "anna"
    assert not enrolment.take_wish(server, json.dumps(document).encode())
    bert.identity_key.unlink()
    from keyfed.deploy.homes import make_keys

    make_keys(bert)  # a new identity is not the enrolled one
    assert not enrolment.take_wish(server, leave_statement(bert))
    assert not enrolment.take_wish(server, b"{}")
    assert not enrolment.take_wish(server, file_of(anna))
    with pytest.raises(DeployError):
        read_leave(leave_statement(bert), Roster(tmp_path / "none.json"))
