"""Fetch a file of a known corpus: checked by SHA-256, and either whole or not there at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keyfed.errors import DownloadError

TIMEOUT = 20.0  # seconds without a byte
RETRIES = 2
PAUSE = 0.5  # seconds before the first retry, doubled for the next
_CHUNK = 1 << 16
_BUSY = (408, 429, 500, 502, 503, 504)  # HTTP answers worth another try

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says so


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a corpus.

    Attributes:
      path: Its path inside the corpus folder.
      url: Its canonical address; None where there is no stable one. An address that ends in .gz under a path
        that does not is unpacked on the way.
      sha256: Checksum (hex) of the file as it is kept.
    """

    path: str
    url: str | None
    sha256: str


class Opener(Protocol):
    """`urllib.request.urlopen`, or what stands in for it."""

    def __call__(self, url: str, *, timeout: float) -> Any: ...


class _Transient(Exception):
    """A failure of the network that another try may mend."""


def fetch(
    remote: RemoteFile,
    target: Path,
    *,
    opener: Opener = urllib.request.urlopen,
    progress: Progress | None = None,
) -> Path:
    """Download `remote` to `target`; return `target`.

    The bytes go to a hidden name in the same folder, are checked, flushed to disk and renamed, so that
    `target` never holds half a file.

    Args:
      remote: What to fetch.
      target: The file to write; its folder is made.
      opener: Opens an address, as `urllib.request.urlopen` does.
      progress: Called with (bytes so far, bytes in all); None: a bar on stderr if that is a terminal.

    Raises:
      DownloadError: No address, no network, an answer that is no file, a wrong checksum, or no room on disk.
    """
    if remote.url is None:
        raise DownloadError(f"{remote.path} has no stable address; put it at {target}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _bar(target.name, progress) as report:
            got = _with_retries(remote, part, opener, report)
        if got != remote.sha256:
            raise DownloadError(
                f"{remote.url}: checksum is {got}, expected {remote.sha256}; nothing was kept; "
                f"try again, or put the right file at {target}"
            )
        os.replace(part, target)
    except OSError as error:
        raise DownloadError(f"{target}: cannot be written ({error}); choose another data folder") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return target


def _with_retries(remote: RemoteFile, part: Path, opener: Opener, report: Progress) -> str:
    for attempt in range(RETRIES + 1):
        try:
            return _stream(remote, part, opener, report)
        except _Transient as error:
            if attempt == RETRIES:
                raise DownloadError(
                    f"{remote.url}: {error} ({attempt + 1} tries); is there a network? "
                    f"Otherwise put the file at {part.parent / remote.path.rsplit('/', 1)[-1]}"
                ) from error
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError("unreachable: the last try returns or raises")


def _stream(remote: RemoteFile, part: Path, opener: Opener, report: Progress) -> str:
    """Write the body to `part` and return its SHA-256."""
    unpack = str(remote.url).endswith(".gz") and not remote.path.endswith(".gz")
    digest, unpacker = hashlib.sha256(), zlib.decompressobj(wbits=31)
    with _answer(remote, opener) as response, part.open("wb") as file:
        length = response.headers.get("Content-Length") if response.headers else None
        total = int(length) if length and length.isdigit() else None
        done = 0
        for chunk in _chunks(response):
            done += len(chunk)
            try:
                data = unpacker.decompress(chunk) if unpack else chunk
            except zlib.error as error:
                raise DownloadError(f"{remote.url}: damaged gzip ({error}); nothing was kept") from error
            digest.update(data)
            file.write(data)
            report(done, total)
        if total is not None and done < total:
            raise _Transient(f"the connection ended after {done} of {total} bytes")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _answer(remote: RemoteFile, opener: Opener) -> Any:
    assert remote.url is not None
    try:
        return opener(remote.url, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _BUSY:
            raise _Transient(f"HTTP {error.code} {error.reason}") from error
        raise DownloadError(f"{remote.url}: HTTP {error.code} {error.reason}; nothing was kept") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Transient(str(getattr(error, "reason", error)) or type(error).__name__) from error


def _chunks(response: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk: bytes = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _Transient(str(error) or type(error).__name__) from error
        if not chunk:
            return
        yield chunk


@contextmanager
def _bar(name: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield `progress`, or else a bar on stderr where that is a terminal and rich is there."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
