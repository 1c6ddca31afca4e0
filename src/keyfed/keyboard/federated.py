"""The page of a federation: the keyboard's modules, those of a client, and a promise of its own.

The keyboard page promises that nothing typed leaves it. This page promises that only masked sums leave it, and those
only with its owner's consent. Its policy lets it speak to the host that it came from, and to one server of another
origin at most. `page.json` has its version, the hash of its code, and that server.

The hash is of everything that runs or shows: modules, styles, index, pictures, tables, the program of the service
worker. It leaves out what differs from place to place: the model, the server's address, and the policy that names it.
So every build of one version has the same hash. The page shows it, `keyfed export` and the server print it, and the
manifest has it: who compares them knows that the same code was built.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from keyfed import __version__
from keyfed.errors import ConfigError
from keyfed.keyboard import bundle
from keyfed.keyboard.serve import FOLDERS, POLICY, WEB
from keyfed.keyboard.site import (
    CLIENT,
    HEADER_FILE,
    INDEX,
    MODEL,
    PAGE,
    POLICY_LINE,
    WORKER,
    Build,
    Files,
    Site,
    write_site,
)

APP = "manifest.webmanifest"
ORIGIN = re.compile(r"https://(?:[a-z0-9-]+(?:\.[a-z0-9-]+)*|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")
LOCAL = re.compile(r"http://(?:127\.0\.0\.1|localhost)(?::[0-9]{1,5})?")  # browsers trust it without TLS
PROMISE = "Your text stays on this device. Only masked sums leave it, and only if you agree."
CHANGES = {  # in the index
    "<title>Keyfed keyboard</title>": "<title>Keyfed federated keyboard</title>",
    "What you write stays on this page.": PROMISE,
    "Write here. Nothing you type leaves this page.": f"Write here. {PROMISE}",
    '  <script type="module" src="page.mjs"></script>\n': (
        '  <meta name="keyboard-worker" content="federated/keyboard.mjs">\n'
        '  <meta name="training-worker" content="federated/trainer.mjs">\n'
        '  <script type="module" src="federated/page.mjs"></script>\n'
    ),
}
SAID = "keyfed"  # member of the manifest that says version and hash
NAMES = {"name": "Keyfed federated keyboard", "short_name": "Keyfed federated"}


def write_federated(export: Path, folder: Path, server: str | None = None, web: Path = WEB) -> Site:
    """Write the page of a federation and a checked export to a folder, as `write_site` does.

    Args:
      server: the origin of the server, where it is not the host of the page.
    """
    return write_site(export, folder, web, federated_build(server, web))


def federated_build(server: str | None = None, web: Path = WEB) -> Build:
    """Return the build of a federation's page.

    Raises:
      ConfigError: the server is not an origin that browsers trust.
    """
    if server is not None and not (ORIGIN.fullmatch(server) or LOCAL.fullmatch(server)):
        raise ConfigError(f'--server is "{server}"; expected https://HOST or https://HOST:PORT, in lower case, no path')
    policy = POLICY if server is None else POLICY.replace("connect-src 'self'", f"connect-src 'self' {server}")
    return Build((*FOLDERS, *CLIENT), policy, lambda files: _changed(files, server, (web / WORKER).read_bytes()))


def _changed(files: Files, server: str | None, program: bytes) -> Files:
    index = files[INDEX].decode("utf-8")
    for old, new in CHANGES.items():
        if index.count(old) != 1:
            raise ConfigError(f"the page's index lacks {old.strip()}; install keyfed again")
        index = index.replace(old, new)
    app = {**json.loads(files[APP]), **NAMES, "description": f"A keyboard on a federated language model. {PROMISE}"}
    page = {**files, INDEX: index.encode(), APP: json.dumps(app).encode()}
    about = {"version": __version__, "hash": hash_of(page, program)}
    app |= {SAID: about}
    return {**page, APP: json.dumps(app, indent=2).encode(), PAGE: json.dumps({**about, "server": server}).encode()}


def hash_of(files: Files, program: bytes) -> str:
    """Return the hash of a page's code, from the sums of its files without model, policy and the hash itself.

    Args:
      program: the service worker as it is before it lists the files.
    """
    app = {key: value for key, value in json.loads(files[APP]).items() if key != SAID}
    other = (PAGE, HEADER_FILE, *(path for path in files if path.startswith(f"{MODEL}/")))
    code = {path: data for path, data in files.items() if path not in other}
    code |= {INDEX: POLICY_LINE.sub(b"", files[INDEX], count=1), APP: json.dumps(app).encode(), WORKER: program}
    return bundle.sha256(
        json.dumps({path: bundle.sha256(data) for path, data in code.items()}, sort_keys=True).encode()
    )
