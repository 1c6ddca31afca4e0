"""Commands start where what only Unix has is missing: its modules, its signals, its sockets in folders."""

import subprocess
import sys

SCRIPT = """
import asyncio, io, multiprocessing.connection, os, signal, socket, subprocess, sys, types

import torch

MISSING = {"fcntl", "resource", "pwd", "grp", "termios", "tty"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in MISSING & set(sys.modules):
    del sys.modules[name]
for place, names in {os: ("killpg", "sched_getaffinity"), signal: ("SIGHUP", "SIGKILL"), socket: ("AF_UNIX",)}.items():
    for name in names:
        delattr(place, name)

from keyfed.cli.app import main

def command(*words):
    sys.argv = ["keyfed", *words]
    try:
        main()
    except SystemExit as e:
        return e.code

sets = ["data.vocab=100", "model.embed=8", "model.hidden=8", "train.cohort=2", "train.workers=1", "data.window=5",
        "data.unseen=0", "train.central=false"]
assert command("train", "fedavg", "--data", "texts", "--rounds", "1", "--out", "run", "--init", "none",
               *(word for one in sets for word in ("--set", one))) == 0
assert command("suggest", "run", "the cat") == 0
assert command("client", "--home", "nowhere", "--status") == 2
import keyfed.deploy.supernode, keyfed.deploy.trainer, keyfed.wire.frames
from keyfed.errors import DeployError
try:
    keyfed.wire.frames.ask(__import__("pathlib").Path("socket"), "train", b"", 1e12)
except DeployError as e:
    print(e)
from keyfed.keyboard import serve
serve.make_server = lambda app: types.SimpleNamespace(run=lambda sockets: print("served", app is not None))
assert command("keyboard", "base", "--port", "0", "--no-open") == 0
"""


def test_commands_start_without_what_only_unix_has(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    for name in "abc":
        (data / f"{name}.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 20, "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "use WSL" in done.stdout
    assert "nowhere" in done.stderr
    assert "served True" in done.stdout


def test_no_other_file_imports_what_only_unix_has():
    from tests.contract.test_layers import whole

    words = ("import fcntl", "import resource", "import pwd", "import grp", "import termios", "import tty")
    found = {path for path, text in whole().items() for line in text.splitlines() if line.strip() in words}
    assert found == {"system.py"}
