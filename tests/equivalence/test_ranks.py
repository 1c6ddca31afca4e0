"""Several ranks are one process: the same rounds to rounding, and nobody waits for a rank that is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed import HashStore

from keyfed.engine.client_state import ClientStates
from keyfed.engine.ranks import Ranks
from keyfed.errors import ConfigError
from keyfed.system import Place, place

from .ranked_rounds import CASES, lead_case, run_rounds, simulation_of
from .test_methods import assert_equal

ROOT = Path(__file__).parents[2]
WORLD = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Two ranks have gone through all cases and the three troubles; their folders."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        port, descriptor = listening.getsockname()[1], listening.fileno()
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.equivalence.ranked_rounds", str(r), str(WORLD), str(port), str(out),
                 str(descriptor)],
                cwd=ROOT, env=environment, pass_fds=[descriptor] if r == 0 else [], stderr=subprocess.PIPE, text=True,
            )
            for r in range(WORLD)
        ]  # fmt: skip
    try:
        started = time.monotonic()
        errors = [p.communicate(timeout=120 - (time.monotonic() - started))[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 9], errors  # the second was told to die in the last case
    return out


def assert_close(a, b, where: str = "") -> None:
    """The same numbers to rounding, the same everything else."""
    if isinstance(a, float) and isinstance(b, float):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7, nan_ok=True), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key, value in a.items():
            assert_close(value, b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for k, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_close(one, two, f"{where}/{k}")
    else:
        assert a == b, where


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(finished, tmp_path, name):
    case, states = CASES[name], ClientStates(tmp_path / "clients")
    with simulation_of(case, states) as federation:
        params, told = run_rounds(case, federation, states)
    assert_equal(load_file(finished / name / "params.safetensors"), dict(sorted(params.items())), 1e-6)
    assert_close(told, json.loads((finished / name / "told.json").read_text()))
    alone, together = ({p.name for p in (f / "clients").iterdir()} for f in (tmp_path, finished / name))
    assert alone == together


def test_the_cases_are_what_they_say(finished):
    told = {name: json.loads((finished / name / "told.json").read_text()) for name in CASES}
    assert any(r["refused"] for r in told["refused"])
    assert any(r["contributors"] for r in told["refused"])
    assert all(len(r["contributors"]) == 3 for r in told["top-K"])
    assert [len(r["contributors"]) for r in told["duals, lost uploads"]] == [2, 2, 4]
    assert [len(r["contributors"]) for r in told["fewer clients than ranks"]] == [1, 0, 1]
    assert min(min(r["effective_clients"].values()) for r in told["softmax peaks"]) < 3
    assert all(r["error"] > 0 for r in told["compression"])


@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_one_process_bitwise(tmp_path, name):
    case, states = CASES[name], ClientStates(tmp_path / "clients")
    with simulation_of(case, states) as federation:
        params, told = run_rounds(case, federation, states)
    alone = lead_case(case, Ranks(HashStore(), 0, 1), tmp_path)
    assert_equal(alone, params, 0)
    assert told == json.loads((tmp_path / "told.json").read_text())


def test_ctrl_c_in_the_middle_of_a_sum_lets_the_others_go_before_rank_0_leaves(finished):
    assert (finished / "interrupted" / "left").read_text() == "True"
    assert (finished / "interrupted" / "error-1").read_text() == "stopped by Ctrl-C"


def test_a_rank_that_fails_ends_the_others_by_its_word(finished):
    assert (finished / "fails" / "error-0").read_text() == "rank 1: the disk is full"


def test_a_rank_that_dies_is_missed(finished):
    error = (finished / "dies" / "error-0").read_text()
    assert error.startswith(("rank 1 of 2 has not been heard of for 2 seconds", "rank 0 lost another rank"))


def test_places_are_read_from_the_environment(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert place() == Place()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="RANK, MASTER_ADDR, MASTER_PORT not set; start with torchrun"):
        place()
    for name, value in {"RANK": "2", "MASTER_ADDR": "here", "MASTER_PORT": "7", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert place() == Place(2, 3, 0, 3, "here", 7)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is 3; expected 0 to 2"):
        place()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match='RANK is "first"'):
        place()
