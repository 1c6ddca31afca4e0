"""Where we reach into flwr 1.41.0 (pinned): its pauses, its SuperNode's loop and tasks, its SuperLink's web server.

Where another version has no such place, its own pauses stay; what keeps strangers or a server's programs out is refused
instead of left out.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from keyfed.errors import DeployError, described

VERSION = "1.41.0"
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
FAST, SLOW, LINGER = 0.3, 2.0, 60.0  # each look costs the SuperLink some 10 ms
HEARTBEAT_SECONDS = 10.0


def need(holds: bool, what: str) -> None:
    """Raise DeployError where this version of flwr has not the inner part that we need."""
    if not holds:
        raise DeployError(f"this version of flwr has {what}; install flwr=={VERSION}")


def quicken(first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> bool:
    """Shorten the pauses before a part of a message is looked for again; return whether that could be done.

    A message is announced before its parts are there. Flower looks for them at once and then pauses 1 s, 2 s, … up to
    10 s: with replies that are looked for several times a second that is most of the time a message takes.
    """
    from flwr.supercore.inflatable import inflatable_utils

    done = False
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(inflatable_utils, name, None), "__kwdefaults__", None) or {}
        if {"initial_backoff", "backoff_cap"} <= set(defaults):
            defaults |= {"initial_backoff": first, "backoff_cap": longest}
            done = True
    return done


class Pace:
    """How long to wait before looking again: short for a minute after something came, then longer."""

    def __init__(self, fast: float = FAST, slow: float = SLOW, linger: float = LINGER) -> None:
        self._fast, self._slow, self._linger = fast, slow, linger
        self._last = time.monotonic()

    def busy(self) -> None:
        """Note that something came."""
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Return the pause to make now."""
        return self._fast if time.monotonic() - self._last < self._linger else self._slow

    def sleep(self, seconds: float) -> None:
        """Pause, at most as long as asked."""
        time.sleep(min(seconds, self.seconds()))


class Executor:
    """Takes tasks from the SuperNode of this process and answers them with our ClientApp."""

    def __init__(self, address: str, secret: bytes, app: Any, pace: Pace) -> None:
        self._address, self._secret, self._app, self._pace = address, secret, app, pace

    def _client(self, *more: Any) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            server_address=self._address,
            insecure=True,  # 127.0.0.1, within this process
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *more],
            retry_invoker=make_simple_http_retry_invoker(),
        )

    def run(self) -> None:
        """Take tasks until the process ends."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
        from flwr.supercore.superexec.run_superexec import _SUPEREXEC_AUTH_METHODS

        client = self._client(
            SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=_SUPEREXEC_AUTH_METHODS)
        )
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        while True:
            try:
                got = client.AcquireTask(request)
                if got.HasField("task") and got.token:
                    self._pace.busy()
                    self._work(got.token)
                    self._pace.busy()
                    continue
            except Exception as e:  # the node must outlive whatever one task does
                _say(f"task failed: {type(e).__name__}: {e}")
            time.sleep(self._pace.seconds())

    def _work(self, token: str) -> None:
        """Answer the message of one task, as flwr's `run_clientapp` does, but with our own program."""
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        client = self._client(RuntimeTokenHttpInterceptor(token))
        done = threading.Event()
        threading.Thread(target=_heartbeat, args=(client, done), daemon=True).start()
        context, status, details = None, SubStatus.FAILED, "not finished"
        try:
            message, context, _, _ = pull_task_input(client)  # the program that the server sent along stays unopened
            began = time.monotonic()
            try:
                reply = self._app(message=message, context=context)
                status, details = SubStatus.COMPLETED, ""
            except Exception as e:
                details = type(e).__name__  # not its text: that might quote the client's own
                _say(f"failed: {described(e)}")
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, details), reply_to=message)
            _say(f"answered in {time.monotonic() - began:.2f} s")
            push_message(client, reply, context)
        finally:
            done.set()
            push_task_output(client, context, status, details)
            client.close()


def drop_tasks_of_ended_runs(module: Any) -> None:
    """Let a SuperNode give up the task of a message whose run has ended while the message was on its way.

    Flower announces the task, then fetches the message. That the run is over is a BaseException, which passes by the
    clause that takes the task back: whoever takes tasks then waits for a message that never comes, and answers no
    other. As an ordinary error it is dealt with as any message that cannot be fetched.
    """
    from flwr.supercore.run import RunNotRunningException

    fetch = module.pull_objects

    def pull_objects(*arguments: Any, **options: Any) -> Any:
        try:
            return fetch(*arguments, **options)
        except RunNotRunningException:
            raise RuntimeError("its run has ended") from None

    module.pull_objects = pull_objects


def _heartbeat(client: Any, done: threading.Event) -> None:
    """Tell the SuperNode that the task is being worked on."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    while not done.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(Exception):  # a missed one is repeated
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def _say(line: str) -> None:
    sys.stderr.write(f"keyfed: {line}\n")
    sys.stderr.flush()


def run_supernode(arguments: Sequence[str], address: str, secret: bytes, app: Any) -> None:
    """Run `flower-supernode` in this process, with its tasks answered by our ClientApp.

    Args:
      address: of the node's own port on this machine.
      secret: what who takes its tasks must know.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pace = Pace()
    quicken()
    if hasattr(start_client_internal, "time"):
        start_client_internal.time = pace  # its loop pauses 3 s whenever nothing has come
    drop_tasks_of_ended_runs(start_client_internal)
    threading.Thread(target=Executor(address, secret, app, pace).run, name="executor", daemon=True).start()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def run_superlink(arguments: Sequence[str], serve: Callable[..., None], gate: Any, **options: Any) -> None:
    """Run `flower-superlink` in this process behind a gate.

    Args:
      serve: what is called as `uvicorn.run`.
      gate: layer around Flower's web application, made with `options`.
    """
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    flower_superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    # Private names: without them no stranger would be kept out.
    place = hasattr(extensions, "get_middleware") and hasattr(flower_superlink, "uvicorn")
    need(place, "no place for our gate")
    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(gate, **options), *before())
    sys.argv = ["flower-superlink", *arguments]
    vars(flower_superlink)["uvicorn"] = SimpleNamespace(run=serve)
    flower_superlink.flower_superlink()
