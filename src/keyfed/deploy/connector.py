"""`python -m keyfed.deploy.connector HOME SERVER PORT PARENT`: a SuperNode that runs this machine's own program only.

Flower would unpack a program that the server sends and run it, in a new process for each message. Here the messages of
its tasks go to the ClientApp of the installed package instead: what comes from the server is data, never code, and no
process is started. The node's own port answers only to who knows the secret in the client's home.

This uses inner parts of flwr 1.41.0 (pinned): `pull_task_input` and its neighbours, and the pause of the node's loop.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from keyfed.deploy.client_home import ClientHome
from keyfed.deploy.conditions import unmet
from keyfed.deploy.consent import need_consent
from keyfed.deploy.processes import die_with
from keyfed.errors import described
from keyfed.wire.flower.client import make_app
from keyfed.wire.flower.pace import quicken

FAST, SLOW, LINGER = 0.3, 2.0, 60.0  # each look costs the SuperLink some 10 ms
HEARTBEAT_SECONDS = 10.0
BEGINNINGS = ("hello", "train")  # what has begun is finished: others wait for it


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


def refusal(home: ClientHome, kind: str) -> str | None:
    """Return why a client takes no part now: it is paused, or (for training) a condition of its owner's is not met."""
    if kind in BEGINNINGS and home.paused():
        return "the client's owner has paused it"
    if kind == "train":
        missing = unmet(home.settings().when)
        if missing:
            return f"not {' and not '.join(missing)}"
    return None


def main() -> None:
    """Run the node of a home."""
    home, server, port = ClientHome(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    if int(sys.argv[4]):
        die_with(int(sys.argv[4]))
    need_consent(home)
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pace = Pace()
    quicken()
    if hasattr(start_client_internal, "time"):
        start_client_internal.time = pace  # its loop pauses 3 s whenever nothing has come
    drop_tasks_of_ended_runs(start_client_internal)
    address = f"127.0.0.1:{port}"
    app = make_app(home.path, lambda kind: refusal(home, kind))
    executor = Executor(address, home.secret.read_bytes(), app, pace)
    threading.Thread(target=executor.run, name="executor", daemon=True).start()
    sys.argv = [
        "flower-supernode", "--superlink", server, "--root-certificates", str(home.ca),
        "--auth-supernode-private-key", str(home.node_key), "--isolation", "process", "--host", "127.0.0.1",
        "--port", str(port), "--superexec-auth-secret-file", str(home.secret),
    ]  # fmt: skip
    flower_supernode()


if __name__ == "__main__":
    main()
