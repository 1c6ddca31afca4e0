"""A real SuperLink and real SuperNodes on 127.0.0.1, with clients that echo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from keyfed.deploy import consent
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import ServerHome, open_home
from keyfed.deploy.processes import Processes, wait_until
from keyfed.deploy.server_app import build_app, submit
from keyfed.deploy.superlink import start_superlink
from keyfed.deploy.supernode import Client
from keyfed.deploy.up import start_clients

HERE = Path(__file__).parent


class Heard:
    """A listener that remembers, and calls back."""

    def __init__(self, on_say=lambda line: None):
        self.lines, self._on_say = [], on_say

    def say(self, line):
        self.lines.append(line)
        self._on_say(line)

    def start(self, what, rounds, done):
        self.lines.append(what)

    def round(self, record):
        self.lines.append(record)


class Federation:
    """Server and echo clients under one folder."""

    def __init__(self, root, processes):
        self.root, self.processes = root, processes
        self.server = ServerHome(root / "server")
        self.clients = {}
        self._runs = 0

    def open(self, names):
        make_certificates(self.server.path, [])
        self.address = start_superlink(self.processes, self.server, "127.0.0.1", 0)
        (self.root / "text").write_text("nothing\n")
        made = start_clients(
            self.processes, self.server, self.address, {n: self.root / n for n in names},
            dict.fromkeys(names, self.root / "text"), plain=True, resident=resident_command,
        )  # fmt: skip
        self.clients = dict(zip(names, made, strict=True))
        return self

    def stranger(self, name, server=None, ca=None):
        """A client whose key nobody has enrolled."""
        home = open_home(
            self.root / name, name=name, server=server or self.address, ca=ca or self.server.ca,
            data=self.root / "text",
            agree=consent.asking(self.root / name, yes=True, read=None, say=lambda line: None),
        )  # fmt: skip
        said = []
        one = Client(self.processes, home, resident=resident_command(home.path), tag=f"{name}-", say=said.append)
        return one, said

    def play(self, *steps, clients=None, on_say=lambda line: None):
        """Submit the echo server with these steps; return what it found."""
        self._runs += 1
        app = self.root / f"app{self._runs}"
        told = {"steps": list(steps), "clients": len(self.clients) if clients is None else clients}
        build_app(app, {"steps.json": json.dumps(told).encode()}, (HERE / "echo_server.py").read_text())
        return submit(self.server, app, Heard(on_say))

    def eventually(self, what, seconds=60.0):
        return wait_until(what, seconds, lambda: True, 0.2)

    def log(self, name):
        return self.processes.log_tail(name, 200_000)


def resident_command(home):
    return [sys.executable, str(HERE / "echo_resident.py"), str(home), str(os.getpid())]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    root = tmp_path_factory.mktemp("federation")
    with Processes(root) as processes:
        yield Federation(root, processes).open(["anna", "bert"])
