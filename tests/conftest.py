"""Shared by all tests."""

from __future__ import annotations

import functools
import gc
import os
import sys
import uuid
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from keyfed.cli import app
from keyfed.run import folder
from tests.examples import DEEP, MOST

# A collection of garbage looks through all that lives: that was a third of the 21 seconds in which all tests are read.
# What has been read by then lives to the end, and is not looked through again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# Few examples by default; KEYFED_EXAMPLES=deep draws all (tests/examples.py).
hypothesis.settings.register_profile("ci", max_examples=MOST)
hypothesis.settings.register_profile("deep", max_examples=100)
hypothesis.settings.load_profile("deep" if DEEP else "ci")

# A run asks git for the commit of the package: once is enough.
folder._commit = functools.cache(folder._commit)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: its kernels then run on a CPU

# Tests run tiny models: a second thread costs more than it gives, and on a busy machine far more. One it stays: a run
# asks for all cores when it judges a round or trains one client, and then every tanh of a few hundred numbers costs
# milliseconds, because threads wait for each other.
torch.set_num_threads(1)
torch.set_num_threads = lambda threads: None

# Nor does a test wait for the disk: the suite asks tens of thousands of times, for milliseconds each, and what is lost
# when the power goes no test can see. That it is asked, when, and what becomes of its failures is looked at in
# tests/unit/test_files.py, run/test_checkpoint.py and private/test_budget.py; processes that a test starts do wait.
os.fsync = lambda handle: os.fstat(handle) and None


@pytest.fixture(autouse=True)
def votes_are_registered_apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The register of private votes is one of each test, never that of the person who runs them."""
    monkeypatch.setenv("KEYFED_VOTES", str(tmp_path_factory.getbasetemp() / "votes" / uuid.uuid4().hex))


@pytest.fixture(scope="module")
def workers_are_forked() -> Iterator[None]:
    """Worker processes come from one that has imported torch, which takes seconds, and has computed nothing.

    What they are given is pickled as before. That a run can start its own is seen by the benchmark of two workers, in
    tests/unit/lab/test_bench.py.
    """
    from keyfed.engine import workers

    context = workers.mp.get_context("forkserver")
    context.set_forkserver_preload(["keyfed.engine.workers"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.mp, "get_context", lambda method=None: context)
        yield


@pytest.fixture(scope="module")
def losses_on_a_coarse_grid() -> Iterator[Callable[..., float]]:
    """Privacy losses in steps of 1e-2, not 1e-4: an ε that is a little higher, a hundredth of the numbers to compose.

    For files whose private runs ask after a budget and not after its digits; those are looked at, on the program's own
    grid, in tests/unit/private/test_accounting.py. Yields the function that takes that grid.
    """
    from keyfed.private.dp import accounting

    real = accounting._epsilon
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "_epsilon", lambda rows, delta, kind, grid: real(rows, delta, kind, max(grid, 1e-2)))
        accounting.calibrate.cache_clear()
        yield real
    accounting.calibrate.cache_clear()


LATE = "keyfed: a question was not answered"


@pytest.fixture
def keyfed(monkeypatch, capfd):
    """Run a command in this process; return (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keyfed", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = capfd.readouterr()
        lines = err.splitlines(keepends=True)  # without what a trainer's thread of an earlier test still says
        return int(stop.value.code or 0), out, "".join(line for line in lines if not line.startswith(LATE))

    return call
