"""The page and a model as a folder, for any host over HTTPS: `write_site` writes it.

All addresses in it are relative, so it works in a subfolder. `service-worker.js` keeps it for when there is no network:
its first line lists every file with its sum, and is the list by which a folder is known as a site. A version is the sum
of that list and of the program below it.

A host of plain files may send no headers. So the index has the policy in a `<meta>`, which covers the page, but not its
worker, nor framing. From the second load on the service worker answers with all headers. `_headers` says them to hosts
that read such a file.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, RunError
from keyfed.files import write_atomically
from keyfed.keyboard import bundle
from keyfed.keyboard.serve import CHECKED, FOLDERS, HEADERS, LEVEL, POLICY, WEB, Finder, page_files, type_of

INDEX, WORKER, HEADER_FILE = "index.html", "service-worker.js", "_headers"
PAGE = "page.json"  # what the page of a federation says of itself
NOT_READ = (bundle.GRAPH, bundle.VECTORS)  # files of an export that are for other programs
LINE = re.compile(r"const SITE = (\{.*\});\n")  # the first of the service worker
CLIENT = ("client", "federated", "secure", "training")  # folders of web/ that the page of a federation reads as well
MODEL = "model"
SUBFOLDERS = (*FOLDERS, *CLIENT, "data", MODEL)
OWN = re.compile(rf"(?:(?:{'|'.join(SUBFOLDERS)})/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")  # paths that a site may have
START = '<meta charset="utf-8">\n'
POLICY_LINE = re.compile(rb'  <meta http-equiv="Content-Security-Policy" content="[^"]*">\n')
MOST_WORKER = 1 << 20  # bytes of a service worker that is read


Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Build:
    """What one build of the page is made of: folders of modules, the policy, and what is changed in the files."""

    folders: tuple[str, ...] = FOLDERS
    policy: str = POLICY
    change: Callable[[Files], Files] = lambda files: files


KEYBOARD = Build()  # nothing that is typed leaves it


@dataclass(frozen=True, slots=True)
class Site:
    """A site that was written."""

    folder: Path
    version: str
    files: int
    bytes: int
    gzipped: int  # bytes as a host sends them
    notes: tuple[str, ...] = ()
    hash: str | None = None  # of the code of a federation's page, which it shows to its owner


def write_site(export: Path, folder: Path, web: Path = WEB, build: Build = KEYBOARD) -> Site:
    """Write the page in `web` and a checked export to a new or empty folder, or over an earlier site.

    The service worker comes last: browsers that have an earlier version go on with it until then. Files of an earlier
    site that this one lacks are removed; what else lies in its folder stays.

    Raises:
      ConfigError: the folder holds something else.
      RunError: the export is damaged, or the folder cannot be written.
    """
    former = files_of_site(folder)
    manifest = bundle.check_bundle(export)
    files = site_files(export, manifest, web, build)
    headers = {**HEADERS, "content-security-policy": build.policy}
    worker = service_worker(files, (web / WORKER).read_text("utf-8"), headers)
    whole = {**files, HEADER_FILE: header_file(headers), WORKER: worker}
    try:
        for path, data in whole.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / path, data, durable=path == WORKER)
        for path in former - whole.keys():
            (folder / path).unlink(missing_ok=True)
    except (OSError, RunError) as e:
        if not former:
            _clear(folder, whole)  # half a site would not be known as one
        if isinstance(e, RunError):
            raise
        raise RunError(f"{folder}: could not be written ({e.strerror or e}); choose another folder") from e
    gzipped = sum(len(gzip.compress(data, LEVEL, mtime=0)) for data in whole.values())
    return Site(
        folder, listed(worker.decode())["version"], len(whole), sum(map(len, whole.values())), gzipped,
        notes_on(manifest), json.loads(whole[PAGE])["hash"] if PAGE in whole else None,
    )  # fmt: skip


def _clear(folder: Path, paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(OSError):
            (folder / path).unlink()
    for name in (*SUBFOLDERS, "."):
        with suppress(OSError):
            (folder / name).rmdir()


def files_of_site(folder: Path) -> set[str]:
    """Return the files of the site in a folder; none where it is not there, or empty.

    Raises:
      ConfigError: it holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return set()
    try:
        with (folder / WORKER).open("rb") as f:
            paths = set(listed(f.read(MOST_WORKER).decode("utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{folder} is there and is neither empty nor a site of `keyfed export --site`; choose another folder"
        ) from None
    return {path for path in paths if isinstance(path, str) and OWN.fullmatch(path)} | {WORKER, HEADER_FILE}


def listed(worker: str) -> Any:
    """Return what the first line of a service worker says; ValueError where it says nothing."""
    found = LINE.match(worker)
    if found is None:
        raise ValueError("not a service worker of a site")
    return json.loads(found[1])


def site_files(export: Path, manifest: Mapping[str, Any], web: Path = WEB, build: Build = KEYBOARD) -> dict[str, bytes]:
    """Return the files that the page reads, by path; the index says which policy and service worker it has."""
    found = page_files(web, build.folders)
    page = {address.removeprefix("/"): path for address, path in found.items() if address != "/"}
    model = [bundle.MANIFEST, *(name for name in manifest["files"] if name not in NOT_READ)]
    page |= {f"{MODEL}/{name}": export / name for name in model}
    files = {name: path.read_bytes() for name, path in sorted(page.items())}
    index = index_of(files[INDEX].decode("utf-8"), build.policy)
    return dict(build.change({**files, INDEX: index.encode()}))


def index_of(text: str, policy: str = POLICY) -> str:
    """Return the page's index with its policy, less what browsers take from a header alone, and the service worker."""
    policy = "; ".join(rule for rule in policy.split("; ") if not rule.startswith("frame-ancestors"))
    if text.count(START) != 1:
        raise ConfigError(f"the page's index lacks {START.strip()}; install keyfed again")
    meta = (
        f'  <meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'  <meta name="service-worker" content="{WORKER}">\n'
    )
    return text.replace(START, START + meta)


def service_worker(files: Files, program: str, headers: Mapping[str, str] = HEADERS) -> bytes:
    """Return the service worker of a site: its list, and the program that keeps what is listed."""
    said = {
        path: {"bytes": len(data), "sha256": bundle.sha256(data), "type": type_of(path)} for path, data in files.items()
    }
    version = bundle.sha256(json.dumps([said, headers, program], sort_keys=True).encode())[:16]
    line = json.dumps({"version": version, "headers": headers, "files": said})
    return LINE.sub(lambda _: f"const SITE = {line};\n", program, count=1).encode()


def header_file(headers: Mapping[str, str] = HEADERS) -> bytes:
    """Return the headers that a host should send, as Netlify and Cloudflare Pages read them."""
    lines = [f"  {name}: {value}" for name, value in {**headers, "cache-control": CHECKED}.items()]
    return "\n".join(["/*", *lines, ""]).encode()


def notes_on(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to know before a model is given to everybody."""
    if "privacy" not in manifest:
        return ()
    return (
        "trained with --dp: whoever opens the site gets the vocabulary, which the run's ε covers only if it was voted "
        "(keyfed vocab --dp) or public before",
    )


def files_served(folder: Path, more: Mapping[str, Path] | None = None) -> Finder:
    """Return what a server of a site answers with: its files, under their paths, and `more`."""
    found = {f"/{path}": folder / path for path in files_of_site(folder) - {HEADER_FILE}}
    found |= {"/": folder / INDEX, **(more or {})}
    return lambda address: (found[address], CHECKED) if address in found else None


def site_text(site: Site) -> str:
    """What the terminal shows: where, how large, what next."""
    return "\n".join(
        [
            f"{site.folder}: {site.files} files, {site.gzipped / 1e6:.2f} MB as a host sends them, "
            f"version {site.version}",
            "  put the folder on any host over HTTPS, in a subfolder too; it can be installed and then works offline",
            f"  headers to add are in {HEADER_FILE} (docs/keyboard.md, On any phone)",
            *([f"  hash {site.hash} of its code; the page shows it to its owner"] if site.hash else []),
            *(f"  {note}" for note in site.notes),
        ]
    )
