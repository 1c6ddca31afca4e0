"""`python -m keyfed.keyboard.endpoint PARENT HOST PORT SITE ADDRESS ORIGIN`: the endpoint for pages and its page.

The files of the page are a site (`keyboard.federated`) in the server's home, served as the keyboard serves one. What
is below /federation/ is `deploy.web`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from keyfed.deploy.certificates import CA_CERT, SERVER_CERT, hosts_of
from keyfed.deploy.homes import SERVER_VARIABLE, ServerHome
from keyfed.deploy.processes import die_with, private_folder
from keyfed.deploy.web import Page, run_endpoint
from keyfed.errors import KeyfedError, RunError
from keyfed.files import BROKEN, read_json
from keyfed.keyboard.bundle import is_bundle
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.lan import CERTIFICATE
from keyfed.keyboard.serve import app_of
from keyfed.keyboard.site import PAGE, files_served

MODULE = "keyfed.keyboard.endpoint"
SITE = "site"  # folder of a server's home


def page_of(site: Path, origin: str | None = None) -> Page:
    """Return what is said of the page in a folder: the version and the hash that its own file says.

    Raises:
      RunError: it is no page of a federation.
    """
    try:
        said = read_json(site / PAGE)
        return Page(str(said["version"]), str(said["hash"]), origin)
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
        return write_federated(export, home.path / SITE).folder


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
