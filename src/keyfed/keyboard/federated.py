"""The page of a federation: the keyboard's modules, those of a client, and a promise of its own.

The keyboard page promises that nothing typed leaves it. This page promises that only masked sums leave it, and those
only with its owner's consent. Its policy lets it speak to the host that it came from, and to one server of another
origin at most. `page.json` has its version, the hash of all its other files, and that server. The page shows the hash,
`keyfed export` and the server print it: who compares them knows that the same code runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from keyfed import __version__
from keyfed.errors import ConfigError
from keyfed.keyboard import bundle
from keyfed.keyboard.serve import FOLDERS, POLICY, WEB
from keyfed.keyboard.site import CLIENT, INDEX, PAGE, Build, Files, Site, write_site

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
NAMES = {"name": "Keyfed federated keyboard", "short_name": "Keyfed federated"}


def write_federated(export: Path, folder: Path, server: str | None = None, web: Path = WEB) -> Site:
    """Write the page of a federation and a checked export to a folder, as `write_site` does.

    Args:
      server: the origin of the server, where it is not the host of the page.
    """
    return write_site(export, folder, web, federated_build(server))


def federated_build(server: str | None = None) -> Build:
    """Return the build of a federation's page.

    Raises:
      ConfigError: the server is not an origin that browsers trust.
    """
    if server is not None and not (ORIGIN.fullmatch(server) or LOCAL.fullmatch(server)):
        raise ConfigError(f'--server is "{server}"; expected https://HOST or https://HOST:PORT, in lower case, no path')
    policy = POLICY if server is None else POLICY.replace("connect-src 'self'", f"connect-src 'self' {server}")
    return Build((*FOLDERS, *CLIENT), policy, lambda files: _changed(files, server))


def _changed(files: Files, server: str | None) -> Files:
    index = files[INDEX].decode("utf-8")
    for old, new in CHANGES.items():
        if index.count(old) != 1:
            raise ConfigError(f"the page's index lacks {old.strip()}; install keyfed again")
        index = index.replace(old, new)
    app = {**json.loads(files[APP]), **NAMES, "description": f"A keyboard on a federated language model. {PROMISE}"}
    page = {**files, INDEX: index.encode(), APP: json.dumps(app, indent=2).encode()}
    about = {"version": __version__, "hash": hash_of(page), "server": server}
    return {**page, PAGE: json.dumps(about).encode()}


def hash_of(files: Files) -> str:
    """Return the hash of a page: of the sums of all its files but the one that says it."""
    sums = {path: bundle.sha256(data) for path, data in files.items() if path != PAGE}
    return bundle.sha256(json.dumps(sums, sort_keys=True).encode())
