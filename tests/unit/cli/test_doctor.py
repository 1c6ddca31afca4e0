"""`keyfed doctor`: what is missing is named with its remedy."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import webbrowser

import pytest
import torch

from keyfed import system
from keyfed.cli import doctor


def findings(keyfed):
    code, out, err = keyfed("doctor", "--json")
    assert err == ""
    return code, {one["what"]: one for one in json.loads(out)}


def test_every_thing_is_looked_at(keyfed, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_MEMORY", 0)
    monkeypatch.setattr(doctor, "LEAST_DISK", 0)
    code, found = findings(keyfed)
    assert code == 0
    kinds = {what.split(" ")[0] for what in found}
    assert kinds == {"cores", "memory", "disk", "GPU", "node", "browser", "port", "clock", "extra"}
    assert {what.removeprefix("extra ") for what in found if what.startswith("extra ")} == set(system.EXTRAS)
    assert all(one["remedy"] or one["state"] == "ok" for one in found.values())
    assert len(keyfed("doctor")[1].splitlines()) == len(found)


def test_what_is_missing_has_its_remedy(keyfed, monkeypatch):
    def no_browser():
        raise webbrowser.Error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "node_program", lambda: None)
    monkeypatch.setattr(webbrowser, "get", no_browser)
    monkeypatch.setattr(doctor, "missing_of", lambda extra: ["flwr"] if extra == "federation" else [])
    monkeypatch.setattr(doctor, "memory_of", lambda text: 1 << 20)
    code, found = findings(keyfed)
    assert code == 1, "memory fails"
    assert "CPU" in found["GPU"]["remedy"]
    assert "keyfed[node]" in found["node"]["remedy"]
    assert "--no-open" in found["browser"]["remedy"]
    assert found["extra federation"]["found"] == "without flwr"
    assert "pip install 'keyfed[federation]'" in found["extra federation"]["remedy"]
    assert (found["memory"]["state"], found["memory"]["found"]) == ("fails", "0.0 GiB free")


def test_programs_are_looked_for_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(system, "find_spec", lambda name: None)
    assert (doctor._node().state, doctor._node().found) == ("missing", "not installed")
    program = tmp_path / "node"
    program.write_text("#!/bin/sh\n", "utf-8")
    program.chmod(0o755)
    assert (doctor._node().state, doctor._node().found) == ("ok", str(program))


def test_a_driver_that_torch_does_not_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "built for CUDA" in doctor._gpu().remedy


def test_a_port_in_use_a_full_disk_and_a_wrong_clock(monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        found = doctor._port(taken.getsockname()[1], "take another")
    assert (found.state, found.found, found.remedy) == ("missing", "in use", "take another")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage._replace(free=1 << 20))
    assert doctor._disk(tmp_path).remedy == "free some space"
    monkeypatch.undo()
    assert doctor._disk(tmp_path / "none").state == "fails"
    assert "certificates" in doctor._clock(0.0).remedy
    assert doctor._clock(2e9).state == "ok"


@pytest.mark.parametrize("text", ["", "MemAvailable:", "MemAvailable: many kB", "MemTotal: 3 kB"])
def test_memory_that_the_system_does_not_tell(text):
    assert doctor.memory_of(text) is None


def test_neither_a_lost_folder_nor_a_missing_pytorch_ends_it(keyfed, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails
    code, found = findings(keyfed)
    assert code == 1
    assert found["disk of this folder"]["remedy"] == "go to one that exists"
    assert "-m pip install torch" in found["PyTorch"]["remedy"]
    monkeypatch.chdir(tmp_path)


def test_node_is_looked_for_without_pytorch():
    program = "import sys; sys.modules['torch'] = None; from keyfed.cli import doctor; print(doctor._node().what)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "node\n"
