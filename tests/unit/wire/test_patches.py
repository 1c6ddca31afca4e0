"""A message whose run ended on the way leaves no task behind that would block a node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal

from keyfed.wire.flower.patches import drop_tasks_of_ended_runs


def fetch(run: str) -> str:
    if run == "ended":
        raise RunNotRunningException
    return run


def test_that_a_run_has_ended_is_an_ordinary_error():
    module = SimpleNamespace(pull_objects=fetch)
    drop_tasks_of_ended_runs(module)
    assert module.pull_objects("going on") == "going on"
    with pytest.raises(RuntimeError, match="ended"):
        module.pull_objects("ended")


def test_flower_has_what_is_replaced():
    assert not issubclass(RunNotRunningException, Exception)  # else there is nothing to mend
    assert callable(start_client_internal.pull_objects)
