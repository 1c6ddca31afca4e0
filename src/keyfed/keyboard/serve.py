"""The server of the keyboard page: files on 127.0.0.1, or over TLS on one address of a local network, and nothing else.

It never receives text: there is no route that takes any, only GET and HEAD are answered, and no request is logged. What
may be read is a list made beforehand (the page's own files, the files an export's manifest names), so no path can lead
out of it. A request with another Host is refused: a web site that makes its name point to 127.0.0.1 gets nothing.

A file is sent gzipped where the browser takes that, and not at all (304) where the browser has it already. What is not
gzipped is read piece by piece as it is sent, and at most `MOST_CONNECTIONS` are answered at a time. One whose whole
request does not come in `REQUEST_SECONDS` is closed, so that mute ones keep no place.

The page can be installed from 127.0.0.1, but has no service worker there. One address serves many runs, and a service
worker would answer with the model of the one before. A site (`site`) has one.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keyfed.errors import ConfigError, RunError
from keyfed.keyboard import bundle
from keyfed.keyboard.graph import need
from keyfed.wire.doors import HOST as HOST
from keyfed.wire.doors import Guard
from keyfed.wire.doors import listen as listen

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

WEB = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webmanifest": "application/manifest+json",
    ".crt": "application/x-x509-ca-cert",
    ".onnx": "application/octet-stream",
    ".safetensors": "application/octet-stream",
}
PAGE = (".html", ".mjs", ".css", ".svg", ".png", ".ico", ".webmanifest")  # kinds of files at the top of web/
FOLDERS = ("decoder", "page")  # of web/ whose modules the page reads; the others are read by clients and by node
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "worker-src 'self'",
        "connect-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types keyfed",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
FRESH, CHECKED = "no-store", "no-cache"  # the manifest is never kept; other files are requested again
LEVEL = 6  # of gzip
PIECE = 1 << 16  # bytes of a file that are read at a time
MOST_CONNECTIONS = 64  # others get 503 until one of them ends
REQUEST_SECONDS = 10.0  # from a connection, or its next bytes, to the end of a request's head
WORTH = 0.9  # of a file's bytes that gzip may need, or the file is sent as it is


def page_files(web: Path, folders: Sequence[str] = FOLDERS) -> dict[str, Path]:
    """Return what the page may read, by its address: top files of web/, its modules, and data/*.json.

    Raises:
      ConfigError: the page is missing.
    """
    found = {f"/{p.name}": p for p in web.iterdir() if p.suffix in PAGE}
    found |= {f"/{folder}/{p.name}": p for folder in folders for p in (web / folder).glob("*.mjs")}
    found |= {f"/data/{p.name}": p for p in (web / "data").glob("*.json")}
    found = {address: p for address, p in found.items() if p.is_file() and not p.is_symlink()}
    if "/index.html" not in found:
        raise ConfigError(f"{web} has no index.html: this installation lacks the keyboard page; install keyfed again")
    found["/"] = found["/index.html"]
    return found


class Sent(NamedTuple):
    """What is known of a file that was sent."""

    version: tuple[int, int]  # its time and size: a new export is read again
    tag: str
    packed: bytes | None  # gzipped; empty where that saves little, None where no browser wanted it yet


def _sent(held: dict[Path, Sent], path: Path, *, small: bool) -> Sent:
    """Return a file's tag, and its gzipped bytes if they are wanted; of each file the last version alone is held."""
    about = path.stat()
    version = about.st_mtime_ns, about.st_size
    known = held.get(path)
    if known is None or known.version != version or (small and known.packed is None):
        data = path.read_bytes()
        packed = gzip.compress(data, LEVEL, mtime=0) if small else None
        if packed is not None and len(packed) > WORTH * len(data):
            packed = b""
        known = held[path] = Sent(version, hashlib.sha256(data).hexdigest()[:32], packed)
    return known


Found = tuple[Path, str]  # a file, and how long a browser may keep it
Finder = Callable[[str], Found | None]  # what is served at an address; None where nothing is


def files_of_export(folder: Path, web: Path = WEB) -> Finder:
    """Return what the page of this machine reads: the page in `web`, and the export in `folder` as it is by then."""
    page = page_files(web)

    def find(address: str) -> Found | None:
        where, _, name = address.removeprefix("/").partition("/")
        if where != "model":
            return (page[address], CHECKED) if address in page else None
        try:
            known = name == bundle.MANIFEST or name in bundle.read_manifest(folder)["files"]
        except RunError:
            known = False  # the export is gone, or being replaced
        return (folder / name, FRESH if name == bundle.MANIFEST else CHECKED) if known else None

    return find


def make_app(folder: Path, port: int, web: Path = WEB) -> ASGIApp:
    """Return the application that serves the page and the export in `folder` at a port of 127.0.0.1."""
    return app_of(files_of_export(folder, web), (HOST, "localhost"), port, 80)


def app_of(find: Finder, names: Sequence[str], port: int, left_out: int) -> ASGIApp:
    """Return an application that answers with what is found, under some names of this machine.

    Args:
      left_out: the port that browsers do not name.
    """
    need("starlette")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    held: dict[Path, Sent] = {}
    locks: dict[Path, threading.Lock] = {}

    def file(request: Request) -> Response:
        found = find(request.scope["path"])
        if found is None or found[0].is_symlink() or not found[0].is_file():
            return PlainTextResponse("not found", 404)
        path, caching = found
        wanted = "gzip" in request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
        with locks.setdefault(path, threading.Lock()):  # many requests at a time hash and pack a file no more than one
            known = _sent(held, path, small=wanted)
        small = known.packed if wanted else None
        tag = f'"{known.tag}{"-gzip" if small else ""}"'  # one tag is one sequence of bytes
        headers = {"cache-control": caching, "etag": tag, "vary": "accept-encoding"}
        seen = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if tag in (one.strip() for one in seen):
            return Response(status_code=304, headers=headers)
        headers["content-type"] = type_of(path.name)
        if small:
            headers["content-encoding"] = "gzip"
            return Response(small, headers=headers)
        headers["content-length"] = str(known.version[1])
        if request.method == "HEAD":
            return Response(headers=headers)
        return StreamingResponse(_pieces(path), headers=headers)

    hosts = {f"{name}:{port}" for name in names}
    hosts |= set(names) if port == left_out else set()
    return Guard(Starlette(routes=[Route("/{path:path}", file)]), hosts, HEADERS)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def type_of(name: str) -> str:
    """Return the content type of a file by its name."""
    return TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")


def make_server(app: ASGIApp, certificate: tuple[Path, Path] | None = None) -> uvicorn.Server:
    """Return the server; `run(sockets=[…])` answers until Ctrl-C (KeyboardInterrupt, as every verb) or SIGTERM.

    Args:
      certificate: and its key, for TLS.
    """
    need("uvicorn")
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """A connection that is closed where it keeps the server waiting for a request."""

        due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch()

        def watch(self) -> None:
            waits = self.cycle is None or self.cycle.response_complete
            if waits and self.due is None:
                self.due = self.loop.call_later(REQUEST_SECONDS, self.transport.close)
            elif not waits and self.due is not None:
                self.due.cancel()
                self.due = None

    chain, key = certificate or (None, None)
    config = uvicorn.Config(
        app, access_log=False, log_config=None, log_level="error", server_header=False, lifespan="off", ws="none",
        http=Impatient,
        loop="asyncio", limit_concurrency=MOST_CONNECTIONS + 1, timeout_graceful_shutdown=1,  # it refuses at its limit
        ssl_certfile=chain, ssl_keyfile=key,
    )  # fmt: skip
    return uvicorn.Server(config)


def open_browser(address: str) -> bool:
    """Show the page where there is a display; tell whether it was tried."""
    shown = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if shown:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    return shown
