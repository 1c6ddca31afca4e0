"""One hostile client of four, live: what it announces and does not send, or sends to cost time, is its own loss."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from keyfed.deploy import consent
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import enrol, read_enrolment, write_enrolment
from keyfed.deploy.homes import ServerHome, open_home
from keyfed.deploy.processes import Processes, free_port
from keyfed.deploy.server_app import build_app, submit
from keyfed.deploy.superlink import start_superlink
from keyfed.deploy.supernode import NODE, Client
from keyfed.deploy.up import run_files, start_clients
from keyfed.wire.flower.commands import environment

from .conftest import Heard
from .test_up import write_texts

pytestmark = pytest.mark.federation

HERE = Path(__file__).parent
HONEST, HOSTILE = ["client-0", "client-2", "client-3"], "client-1"
LATE = 5.0


@dataclass
class HostileClient(Client):
    """A client with the hostile node."""

    def start_node(self):
        arguments = (self.home.path, self.home.settings().server, free_port(), os.getpid())
        command = [sys.executable, str(HERE / "hostile_node.py"), *map(str, arguments)]
        self.processes.start(self.tag + NODE, command, environment(self.home.path))


class Attacked:
    """Three honest clients and a hostile one."""

    def __init__(self, root, processes):
        self.root, self.server = root, ServerHome(root / "server")
        write_texts(root / "text")
        make_certificates(self.server.path, [])
        address = start_superlink(processes, self.server, "127.0.0.1", 0)
        texts = {name: root / "text" / name for name in [*HONEST, HOSTILE]}
        start_clients(processes, self.server, address, {n: root / n for n in HONEST}, texts, plain=True)
        home = open_home(
            root / HOSTILE, name=HOSTILE, server=address, ca=self.server.ca, data=texts[HOSTILE], plain=True,
            agree=consent.asking(root / HOSTILE, yes=True, read=None, say=lambda line: None),
        )  # fmt: skip
        (home.path / "mode").write_text("honest")
        resident = (sys.executable, str(HERE / "hostile_resident.py"), str(home.path), str(os.getpid()))
        client = HostileClient(processes, home, resident=resident, tag=f"{HOSTILE}-")
        client.start_resident()
        enrol(self.server, [read_enrolment(write_enrolment(home).read_bytes())])
        client.wait_resident()
        client.start_node()

    def train(self, mode, secure):
        """Train three rounds under an attack; return exchanges and rounds."""
        from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig
        from keyfed.config.schema import SecureConfig
        from tests.vocabulary import build_vocab

        (self.root / HOSTILE / "mode").write_text(mode)
        lines = [(self.root / "text" / name).read_text().splitlines() for name in HONEST]
        vocab, _ = build_vocab(lines, kind="word", size=None, lower=True, tokenised=False)
        config = Config(
            data=DataConfig(name=str(self.root / "text"), unseen=0.0, window=8),
            model=ModelConfig("cifg", embed=6, hidden=8),
            train=TrainConfig(rounds=3, cohort=4, baselines=False, workers=1, block=1, device="cpu"),
            secure=SecureConfig(on=secure),
            method="fedavg",
        )
        name = f"{mode.replace(' ', '-')}-{secure}"
        files = run_files(config, vocab.to_json(), self.root / name, clients=4, wait=90.0, resume=False)
        build_app(self.root / f"app-{name}", files, (HERE / "timed_server.py").read_text())
        return submit(self.server, self.root / f"app-{name}", Heard())


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    root = tmp_path_factory.mktemp("attacked")
    with Processes(root) as processes:
        yield Attacked(root, processes)


@pytest.mark.parametrize(
    ("mode", "secure", "reason"),
    [
        ("honest", False, None),
        ("bomb train", False, "too large"),
        ("bomblet train", False, "malformed"),
        ("mute hello", False, "not delivered"),
        ("mute train", False, "not delivered"),
        ("drip train", False, "not delivered"),
        ("mute upload", True, "not delivered"),
    ],
)
def test_one_hostile_client_of_four_costs_itself_the_round_and_nobody_anything(
    attacked, record_property, mode, secure, reason
):
    found = attacked.train(mode, secure)
    exchanges, rounds = found["exchanges"], found["rounds"]
    print(f"\n{mode}, secure={secure}")
    for one in exchanges:
        print(f"  {one['kind']:7} {one['took']:5.1f} s of {one['seconds']:.0f} s; lost {one['lost']}")
    for one in rounds:
        print(f"  round {one['round']}: {one['contributors']} refused {one['refused']}")
    assert all(one["took"] <= one["seconds"] + LATE for one in exchanges)
    assert not any(name in one["lost"] for one in exchanges for name in HONEST)
    assert len(rounds) == 3
    for one in rounds:
        assert not one["abandoned"]
        assert set(HONEST) <= set(one["contributors"])
    if reason is None:
        assert all(HOSTILE in one["contributors"] for one in rounds)
        return
    kind = mode.split()[1]
    lost = [one["lost"][HOSTILE][0] for one in exchanges if one["kind"] == kind and HOSTILE in one["lost"]]
    if reason == "not delivered":
        assert set(lost) == {reason}
        assert len(lost) <= 2  # then it is called no more
    else:
        assert set(lost) <= {reason}  # it answers, and what it answers is refused
        assert all(one["refused"] == {HOSTILE: reason} for one in rounds)
        assert all(one["took"] < one["seconds"] for one in exchanges)  # nobody has waited for it
    if kind == "train":
        assert all(HOSTILE not in one["contributors"] for one in rounds)
    record_property("seconds", [round(one["took"], 1) for one in exchanges])
