"""Flower's messages can be made only within a task."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def task(request):
    if "flower" not in request.module.__name__:
        yield
        return
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 5, 1, 3
    yield
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = None
