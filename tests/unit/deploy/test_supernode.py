"""A client's processes are watched and started again; a server is alone in its folder."""

from __future__ import annotations

import socket
import stat

import pytest

from keyfed.deploy import supernode
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.consent import ask, words_for
from keyfed.deploy.homes import ServerHome, open_home
from keyfed.deploy.processes import unreachable
from keyfed.deploy.superlink import answers, only_one, start_superlink
from keyfed.deploy.supernode import LONGEST_PAUSE, NODE, RESIDENT, Client
from keyfed.errors import DeployError
from keyfed.wire.frames import SOCKET


class Fake:
    """Processes that are alive until a test says otherwise."""

    def __init__(self, home=None):
        self.running, self.started, self.log, self.home = set(), [], "", home

    def start(self, name, command, env):
        self.running.add(name)
        self.started.append(name)
        if name == RESIDENT and self.home is not None:
            assert not (self.home / SOCKET).exists()
            (self.home / SOCKET).touch()
        assert env["FLWR_TELEMETRY_ENABLED"] == "0"

    def alive(self, name):
        return name in self.running

    def log_tail(self, name, size):
        return self.log


@pytest.fixture
def client(tmp_path, monkeypatch):
    make_certificates(tmp_path / "server", [])
    home = open_home(tmp_path / "home", name="anna", server="127.0.0.1:9", ca=tmp_path / "server" / "ca.crt")
    said, clock = [], [0.0]
    monkeypatch.setattr(supernode.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(supernode, "unreachable", lambda server: None)
    made = Client(Fake(home.path), home, say=said.append)
    made.said, made.clock = said, clock
    return made


def agree(client):
    ask(client.home.path, words_for(client.home.path, client.home.settings()), yes=True, read=None, say=print)


def test_nothing_starts_without_consent(client):
    with pytest.raises(DeployError, match="no consent"):
        client.start()
    assert client.processes.started == []


def test_the_training_process_comes_first(client):
    agree(client)
    client.start()
    assert client.processes.started == [RESIDENT, NODE]


def test_the_socket_of_a_killed_process_is_not_taken_for_one_that_listens(client):
    agree(client)
    (client.home.path / SOCKET).touch()
    client.start()  # the stand-in finds it gone
    assert client.processes.started == [RESIDENT, NODE]


def test_a_training_process_that_does_not_come_up_is_said(client, monkeypatch):
    monkeypatch.setattr(supernode, "wait_until", lambda ready, seconds, alive: False)
    agree(client)
    client.processes.log = "no space left"
    with pytest.raises(DeployError, match="no space left"):
        client.start()


def test_what_ends_is_started_again_after_growing_pauses(client):
    agree(client)
    client.start()
    pauses = []
    for _ in range(8):
        client.processes.running.discard(NODE)
        client.tend()
        began = client.clock[0]
        while NODE not in client.processes.running and client.clock[0] < began + 100:
            client.clock[0] += 0.5
            client.tend()
        pauses.append(client.clock[0] - began)
    assert pauses == [1, 2, 4, 8, 15, 15, 15, 15]
    assert max(pauses) == LONGEST_PAUSE
    assert len(client.said) == 1  # the same line is not said again
    client.clock[0] += 100  # it ran for a while: the next failure is a first one
    client.tend()
    client.processes.running.discard(NODE)
    client.tend()
    client.clock[0] += 1
    client.tend()
    assert NODE in client.processes.running


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("[code: 1] FLEET_NODE_ACTIVATION_FAILED", "enrol-anna.json"),
        ("ssl: CERTIFICATE_VERIFY_FAILED: certificate has expired", "certificate is not from the authority"),
        ("Segmentation fault", "starting it again"),
    ],
    ids=["key", "certificate", "other"],
)
def test_why_a_node_ended_is_said(client, log, says):
    agree(client)
    client.start()
    client.processes.running.discard(NODE)
    client.processes.log = log
    client.tend()
    assert says in client.said[0]


def test_a_server_that_cannot_be_reached_is_said_until_it_can(client, monkeypatch):
    agree(client)
    client.start()
    answers = ["connection refused", "connection refused", None]
    asked = []
    monkeypatch.setattr(supernode, "unreachable", lambda server: asked.append(server) or answers[len(asked) - 1])
    for _ in range(200):
        client.clock[0] += 0.5
        client.tend()
    assert asked == ["127.0.0.1:9"] * 3, "every 15 seconds, and never again"
    assert client.said == [
        "cannot reach 127.0.0.1:9 (connection refused): is the server running, and its port open? Trying again",
        "127.0.0.1:9 can be reached now",
    ]


def test_why_nothing_can_be_reached():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = "{}:{}".format(*free.getsockname())
        assert "refused" in unreachable(place)
        free.listen(1)
        assert unreachable(place) is None
    assert unreachable("nowhere") is not None


def test_a_server_is_alone_in_its_folder(tmp_path):
    tmp_path.chmod(0o755)
    with only_one(tmp_path), pytest.raises(DeployError, match="runs there already"), only_one(tmp_path):
        pass
    with only_one(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_server_without_certificates_does_not_start(tmp_path):
    with pytest.raises(DeployError, match="--make-certificates"):
        start_superlink(Fake(), ServerHome(tmp_path), "127.0.0.1", 0)


def test_a_server_that_was_never_started_has_no_address(tmp_path):
    with pytest.raises(DeployError, match="no server was started there"):
        ServerHome(tmp_path).address()
    (tmp_path / "address.json").write_text("[]")
    with pytest.raises(DeployError, match="cannot be read"):
        ServerHome(tmp_path).address()


def test_nobody_answers_at_a_free_port(tmp_path):
    make_certificates(tmp_path, [])
    assert not answers("127.0.0.1:1", tmp_path / "ca.crt", 1.0)
    assert not answers("127.0.0.1:1", tmp_path / "none.crt", 1.0)
