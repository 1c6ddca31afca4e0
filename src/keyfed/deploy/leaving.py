"""A client leaves: its signed wish goes to the server, which forgets its key; its home is deleted."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from keyfed.deploy.client_home import ClientHome
from keyfed.deploy.enrolment import forget, leave_statement, read_leave, read_nodes, read_roster
from keyfed.deploy.superlink import ServerHome
from keyfed.errors import DeployError
from keyfed.files import write_atomically
from keyfed.wire.flower.gate import LEAVE

FOLDER = "leaves"
SECONDS = 20.0


def ask_to_be_forgotten(home: ClientHome) -> str | None:
    """Send the wish to the server; return None when it was taken, or why not."""
    try:
        context = ssl.create_default_context(cafile=str(home.ca))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        address = f"https://{home.settings().server}{LEAVE}"
        with opener.open(urllib.request.Request(address, leave_statement(home), method="POST"), timeout=SECONDS):
            return None
    except urllib.error.HTTPError as e:
        return "the server does not know this client" if e.code == 403 else f"the server answered {e.code}"
    except (OSError, urllib.error.URLError) as e:
        return f"the server does not answer ({getattr(e, 'reason', None) or e})"


def take_wish(server: Path, data: bytes) -> bool:
    """Keep a wish for the server to act on, if an enrolled client signed it."""
    home = ServerHome(server)
    try:
        roster = read_roster(home)
        name = read_leave(data, roster)
        if roster[name].get("revoked"):
            return False
        (server / FOLDER).mkdir(exist_ok=True)
        write_atomically(server / FOLDER / f"{name}.json", data)
    except DeployError:
        return False
    return True


def act_on_wishes(home: ServerHome) -> list[str]:
    """Forget every client that has asked for it; return their names."""
    gone = []
    for path in sorted((home.path / FOLDER).glob("*.json")):
        try:
            roster = read_roster(home)
            name = read_leave(path.read_bytes(), roster)
        except (DeployError, OSError):
            path.unlink(missing_ok=True)
            continue
        try:
            forget(home, name, identity=roster[name]["identity"])
        except DeployError:
            if name in read_nodes(home):
                continue  # the SuperLink did not answer: it takes no part any more, and is tried again
        else:
            gone.append(name)
        path.unlink(missing_ok=True)
    return gone
