"""`python -m keyfed.deploy.trainer HOME PARENT`: the training process of a client.

torch is imported once, and what a round leaves between its messages stays in memory. One process per home (a lock), one
question at a time, over a socket that only the home's owner can open. It holds no connection to anybody else.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfed.deploy.consent import need_consent
from keyfed.deploy.homes import REFUSED, ClientHome, expire, kept_files, strays
from keyfed.deploy.processes import die_with, locked
from keyfed.errors import DeployError, KeyfedError, cut, described
from keyfed.files import write_atomically
from keyfed.run.console import plural
from keyfed.wire.frames import SOCKET, FrameError, listening, read_frame, write_frame

if TYPE_CHECKING:
    from keyfed.wire.client import ClientSession, Learner

KEPT = "kept"
FOUND = "found.txt"  # how much text the last run found; counts only
Handle = Callable[[str, bytes], bytes]
LINK_SECONDS = 60.0  # for one frame to come or go
RETENTION_SECONDS = 3600.0
# Reasons that the owner of a client has set, or can mend: its own limits, its text, a server to look into.
OWNERS = frozenset(
    {"over limit", "over budget", "strangers", "no text", "not secure", "identity changed", "client error"}
)


def make_session(home: ClientHome) -> ClientSession:
    """Return the session of a client, as its owner has set it up."""
    from keyfed.private.secagg.threshold import Floors
    from keyfed.run.remote.device import own_text
    from keyfed.wire.client import ClientSession

    told = home.settings()

    def say(line: str) -> None:
        write_atomically(home.path / FOUND, line.encode(), durable=False)

    def learner(about: Mapping[str, Any]) -> Learner:
        now = home.settings()  # text and its author are looked for anew with every run
        make = own_text(
            told.name, text_to_read(home), limits=told.limits, me=now.me or None, say=say, columns=now.reading()
        )
        return make(about)

    floors = Floors(told.hide_among)
    return ClientSession(
        home.path, told.name, learner, floors=floors, plain=told.plain, counts=told.counts, limits=told.limits
    )


def text_to_read(home: ClientHome) -> Path:
    """Return the file or folder to train on: the owner's, or links to those of its files that may be trained on."""
    data, days = home.data(), home.settings().keep_days
    files = kept_files(data, days)
    if files == [data] or (days is None and not strays(data)):
        return data
    links = home.path / KEPT
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(links)
    links.mkdir()
    for path in files:  # under the names that they have: exports are known by them
        link = links / path.relative_to(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    return links


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Keep a second training process out of a home."""
    with locked(home / "resident.lock", f"{home}: a training process runs already; stop that client first"):
        yield


def serve(home: Path, handle: Handle, idle: Callable[[], None] = lambda: None) -> None:
    """Answer questions one after another until the process is told to end.

    Args:
      handle: the session's.
      idle: called now and then between questions.
    """
    with alone(home), listening(home / SOCKET) as server:  # the lock is ours: what lies there is of a killed process
        server.settimeout(RETENTION_SECONDS)
        while True:
            idle()
            try:
                link, _ = server.accept()
            except TimeoutError:
                continue
            with link:
                link.settimeout(LINK_SECONDS)
                try:
                    _answer(link, handle)
                except (OSError, FrameError) as e:  # who asked has gone, or sent what is no frame
                    _say(cut(f"a question was not answered: {e}"))


def _answer(link: socket.socket, handle: Handle) -> None:
    header, body = read_frame(link)
    kind, deadline = str(header.get("kind", "?")), header.get("deadline", 0)
    if not isinstance(deadline, int | float) or time.time() >= deadline:
        write_frame(link, {"error": "no answer", "reason": f'"{kind[:32]}" was read after its deadline'}, b"")
        return
    try:
        told: dict[str, Any] = {}
        data = handle(kind, body)
    except Exception as e:  # the process lives on, whatever it is
        told, data = _told(e), b""
        _say(f"{kind[:32]}: {described(e)}")
    write_frame(link, told, data)


def noting(home: Path, handle: Handle) -> Handle:
    """Write down, for the owner, why the client took no part where that is the owner's to know or to change."""

    def note(kind: str, body: bytes) -> bytes:
        try:
            return handle(kind, body)
        except KeyfedError as e:
            if getattr(e, "reason", "client error") in OWNERS:
                with contextlib.suppress(KeyfedError):
                    write_atomically(home / REFUSED, cut(str(e)).encode(errors="replace"), durable=False)
            raise

    return note


def _told(error: Exception) -> dict[str, Any]:
    """Return what the server learns of an error: a typed reason; of other errors the type only, as some quote text."""
    if isinstance(error, KeyfedError) and hasattr(error, "reason"):
        return {"error": str(error.reason), "reason": cut(str(getattr(error, "detail", "")))}
    return {"error": "client error", "reason": type(error).__name__}


def keep_limit(home: ClientHome) -> Callable[[], None]:
    """Return what deletes text of the home that is older than its owner wants, at most once an hour."""
    last = -RETENTION_SECONDS

    def check() -> None:
        nonlocal last
        if time.monotonic() - last >= RETENTION_SECONDS:
            last = time.monotonic()
            with contextlib.suppress(DeployError):
                gone = expire(home.text, home.settings().keep_days)
                if gone:
                    _say(f"deleted {plural(len(gone), 'file')} of text older than {home.settings().keep_days} days")

    return check


def _say(line: str) -> None:
    sys.stderr.write(f"keyfed: {line}\n")
    sys.stderr.flush()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def main() -> None:
    """Run the training process of a home."""
    home = ClientHome(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, _leave)
    if int(sys.argv[2]):
        die_with(int(sys.argv[2]))
    need_consent(home)
    serve(home.path, noting(home.path, make_session(home).handle), keep_limit(home))


if __name__ == "__main__":
    try:
        main()
    except KeyfedError as error:
        _say(str(error))
        sys.exit(2)
