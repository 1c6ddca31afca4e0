"""`python -m keyfed.keyboard.endpoint PARENT HOST PORT SITE ADDRESS ORIGIN`: the endpoint for pages and its page.

The files of the page are a site (`keyboard.site`) in the server's home, served as the keyboard serves one. What is
below /federation/ is `deploy.web`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from keyfed import __version__
from keyfed.deploy.certificates import CA_CERT, SERVER_CERT, hosts_of
from keyfed.deploy.homes import SERVER_VARIABLE, ServerHome
from keyfed.deploy.processes import die_with, private_folder
from keyfed.deploy.web import Page, run_endpoint
from keyfed.errors import KeyfedError, RunError
from keyfed.files import BROKEN, read_json
from keyfed.keyboard.bundle import is_bundle, sha256
from keyfed.keyboard.lan import CERTIFICATE
from keyfed.keyboard.serve import app_of
from keyfed.keyboard.site import WORKER, files_served, listed, write_site

MODULE = "keyfed.keyboard.endpoint"
SITE = "site"  # folder of a server's home
ABOUT = "page.json"  # version and hash of a federation's page


def page_of(site: Path, origin: str | None = None) -> Page:
    """Return what is said of the page in a folder: its version, and the hash that its own file says.

    Raises:
      RunError: it is no site.
    """
    try:
        if (site / ABOUT).exists():
            said = read_json(site / ABOUT)
            return Page(str(said["version"]), str(said["hash"]), origin)
        files = listed((site / WORKER).read_text("utf-8"))["files"]
        return Page(__version__, sha256(json.dumps(files, sort_keys=True).encode()), origin)
    except (OSError, *BROKEN) as e:
        raise RunError(f"{site} is no page that can be served ({e}); start the server again to write it") from None


def write_page(page: Path, home: ServerHome) -> Path:
    """Write the page that a server shows, into its home; return the folder.

    Args:
      page: the model in it: a run, an export, or `base`.
    """
    from keyfed.keyboard.export import export_run  # torch, which the endpoint itself does without

    private_folder(home.path)
    with TemporaryDirectory(prefix="keyfed-page-") as temporary:
        export = page if is_bundle(page) else export_run(page, Path(temporary) / "export").out
        return write_site(export, home.path / SITE).folder


def main() -> None:
    """Serve the page and the endpoint until the parent ends."""
    os.umask(0o077)
    parent, host, port, site, address, origin = sys.argv[1:]
    if int(parent):
        die_with(int(parent))
    home = ServerHome(Path(os.environ[SERVER_VARIABLE]))
    shown = urlsplit(address).hostname or host
    hosts = dict.fromkeys([shown, *hosts_of(home.path / SERVER_CERT)])
    names = [f"[{name}]" if ":" in name else name for name in hosts]
    files = app_of(files_served(Path(site), {CERTIFICATE: home.path / CA_CERT}), names, int(port), 443)
    run_endpoint(home, files, page_of(Path(site), origin or None), host, int(port))


if __name__ == "__main__":
    try:
        main()
    except KeyfedError as error:
        sys.stderr.write(f"keyfed: {error}\n")
        sys.exit(2)
