"""Enrolment: a client hands over its public keys in a file, the server's operator takes it in, or sends it away.

The file holds nothing secret. It is signed with the client's identity, so that keys of others cannot be enrolled under
that identity. That it comes from the person it names is for the operator to know.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.deploy.homes import ClientHome, ServerHome, check_name, home_option
from keyfed.deploy.processes import locked, opener, python
from keyfed.errors import DeployError, KeyfedError
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.wire.flower.commands import CONNECTION, environment
from keyfed.wire.flower.commands import NODES as LIST_NODES
from keyfed.wire.flower.gate import LEAVE as LEAVE_PATH
from keyfed.wire.roster import Enrolled, Roster, is_page, key_sum

FORMAT = "keyfed-enrol-1"
LEAVE = "keyfed-leave-1"
FILE_CAP = 8 * 1024  # bytes of an enrolment file or a wish to leave; both have under one thousand
NODES = "nodes.json"
FLWR_SECONDS, LEAVE_SECONDS = 60.0, 20.0
WISHES = "leaves"  # folder of signed requests to be forgotten
KEY_IS_THERE = "already in use"

Command = Callable[[Sequence[Sequence[str]]], list[str]]


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a client hands over: its name, the node's public key (OpenSSH), its identity."""

    name: str
    node: str
    identity: bytes

    @property
    def node_sum(self) -> str:
        """The SHA-256 of the node's key as the SuperLink will tell it."""
        return key_sum(_node_bytes(self.node))


def write_enrolment(home: ClientHome) -> Path:
    """Write enrol-NAME.json into a client's home and return its path."""
    document = _signed_by(home, FORMAT, {"node": home.node_public.read_text("ascii").strip()})
    path = home.path / f"enrol-{document['name']}.json"
    write_atomically(path, json.dumps(document, indent=1).encode())
    return path


def read_enrolment(data: bytes, where: str = "the enrolment file") -> Enrolment:
    """Read and check an enrolment file.

    Raises:
      DeployError: it is too large, not one, altered, or its keys are not what they must be.
    """
    document = read_object(data, where)
    if document.get("format") != FORMAT:
        raise DeployError(f"{where} is not an enrolment file (`keyfed client` writes enrol-NAME.json)")
    if set(document) != {"format", "name", "node", "identity", "signature"}:
        raise DeployError(f"{where} has other fields than an enrolment file")
    identity = verify_document(document, where)
    if not isinstance(document["name"], str) or not isinstance(document["node"], str):
        raise DeployError(f"{where}: name and node are texts")
    found = Enrolment(check_name(document["name"]), document["node"], identity)
    _node_bytes(found.node)
    return found


def enrol(
    home: ServerHome,
    given: Sequence[Enrolment],
    run: Command | None = None,
    now: datetime.datetime | None = None,
) -> None:
    """Take clients in: their node keys into the SuperLink, their identities into the roster; all of them or none.

    One key, one name: a node key or identity that is enrolled under another name is refused, so that nobody counts
    twice in a round by going under many names. Who is not in the roster takes no part: node keys that the SuperLink
    has from an enrolment that broke off do no harm, and are taken over by the next.
    """
    when = (now or datetime.datetime.now(datetime.UTC)).isoformat(timespec="seconds")
    with one_at_a_time(home):
        roster = Roster(home.roster)
        enrolled: dict[str, Enrolled] = {}
        for one in given:
            refuse_known({**roster.entries, **enrolled}, one.name, one.identity, one.node_sum, home_option(home.path))
            enrolled[one.name] = Enrolled(one.identity.hex(), one.node_sum, when)
        nodes = _register(home, given, run or flwr(home))
        _write_nodes(home, {**read_nodes(home), **nodes})
        roster.write(enrolled)


def one_at_a_time(home: ServerHome) -> AbstractContextManager[None]:
    """Wait until nobody else changes who is enrolled."""
    home.path.mkdir(parents=True, exist_ok=True)
    return locked(home.path / "roster.lock")


def refuse_known(entries: Mapping[str, Enrolled], name: str, identity: bytes, node_key: str, where: str = "") -> None:
    """Raise DeployError for a name or a key that somebody else has, or that was sent away.

    Args:
      where: the option --home of the command that mends it (`home_option`), if it needs one.
    """
    for other, entry in entries.items():
        same = other == name
        if same and not entry.revoked:
            raise DeployError(f'"{name}" is enrolled already; `keyfed enroll --forget {name}{where}` first')
        if entry.node_key == node_key:
            anew = "new keys" if is_page(entry) else "a new --home"
            why = f"was sent away; it needs {anew}" if entry.revoked else f'is enrolled as "{other}"'
            raise DeployError(f"the node key of {name} {why}: one key, one name")
        if not same and entry.identity == identity.hex():
            raise DeployError(f'the identity of {name} is enrolled as "{other}": one key, one name')


def forget(home: ServerHome, name: str, run: Command | None = None, *, identity: str | None = None) -> None:
    """Send a client away: its node key out of the SuperLink, its roster entry revoked.

    Args:
      identity: only if the name is still that of this public key.
    """
    with one_at_a_time(home):
        roster, nodes = Roster(home.roster), read_nodes(home)
        entry = roster.get(name)
        if (entry is None or entry.revoked) and name not in nodes:
            raise DeployError(f'"{name}" is not enrolled. Enrolled: {", ".join(roster.names()) or "none"}.')
        if identity is not None and (entry is None or entry.identity != identity):
            raise DeployError(f'"{name}" is another client by now')
        if entry is not None and not entry.revoked:
            roster.write({name: replace(entry, revoked=True)})  # first: a client that is half forgotten takes no part
        if name in nodes:
            (run or flwr(home))([["supernode", "unregister", str(nodes.pop(name)), CONNECTION]])
            _write_nodes(home, nodes)


def enrolled_in(home: ServerHome) -> dict[str, Enrolled]:
    """Return everybody who may take part, by name."""
    return {name: entry for name, entry in Roster(home.roster).entries.items() if not entry.revoked}


def names_by_key(home: ServerHome) -> dict[str, str]:
    """Return the names of enrolled clients by the sum of their node keys."""
    return {entry.node_key: name for name, entry in enrolled_in(home).items()}


def state_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes with a file that is replaced as a whole; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class KnownKeys:
    """The enrolled clients, by name and by the sum of their node keys; parsed again only when the roster changes."""

    def __init__(self, home: ServerHome) -> None:
        self._home = home
        self._state: tuple[int, ...] | None = ()
        self._entries: Mapping[str, Enrolled] = {}
        self._names: Mapping[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Return the names by the sums of the node keys.

        Raises:
          RunError: the roster cannot be read.
        """
        self._look()
        return self._names

    def page(self, name: str) -> bytes | None:
        """Return the identity of an enrolled page; None for every other name."""
        self._look()
        entry = self._entries.get(name)
        return bytes.fromhex(entry.identity) if entry is not None and is_page(entry) else None

    def _look(self) -> None:
        state = state_of(self._home.roster)
        if state != self._state:  # looked at first: what changes in between is read again
            self._names, self._entries = names_by_key(self._home), enrolled_in(self._home)
            self._state = state


def read_nodes(home: ServerHome) -> dict[str, int]:
    """Return the number that the SuperLink gave each client's node."""
    try:
        return {str(k): int(v) for k, v in read_json(home.path / NODES).items()}
    except FileNotFoundError:
        return {}
    except (OSError, *BROKEN) as e:
        raise DeployError(f"{home.path / NODES} cannot be read: {e}") from None


def _write_nodes(home: ServerHome, nodes: Mapping[str, int]) -> None:
    write_atomically(home.path / NODES, json.dumps(nodes, indent=1).encode())


def leave_statement(home: ClientHome) -> bytes:
    """Return a client's signed wish to be forgotten."""
    return json.dumps(_signed_by(home, LEAVE, {})).encode()


def read_leave(data: bytes, roster: Roster) -> str:
    """Return the name of the enrolled client that wishes to be forgotten; its own identity must have signed."""
    document = read_object(data, "the wish to leave")
    name = document.get("name")
    entry = roster.get(name) if isinstance(name, str) and document.get("format") == LEAVE else None
    if entry is None or verify_document(document, "the wish to leave").hex() != entry.identity:
        raise DeployError("the wish to leave is not from an enrolled client")
    return str(name)


def flwr(home: ServerHome) -> Command:
    """Return what runs `flwr` commands against this home's SuperLink, in one process: its start takes seconds."""

    def run(commands: Sequence[Sequence[str]]) -> list[str]:
        try:
            done = subprocess.run(
                python("keyfed.wire.flower.commands"), env=environment(home.path), capture_output=True, text=True,
                timeout=FLWR_SECONDS, check=False, input=json.dumps([list(c) for c in commands]),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise DeployError(f"`flwr {commands[0][0]}` took over {FLWR_SECONDS:.0f} s; does the server run?") from None
        try:
            return [str(said) for said in json.loads(done.stdout.splitlines()[-1])]
        except (ValueError, IndexError):
            said = " ".join((done.stderr or done.stdout).split())[-300:]
            raise DeployError(f"`flwr {commands[0][0]}` failed; does the server run? It said: {said}") from None

    return run


def _register(home: ServerHome, given: Sequence[Enrolment], run: Command) -> dict[str, int]:
    try:
        return _register_new(home, given, run)
    except DeployError as e:
        if KEY_IS_THERE not in str(e):
            raise
    # An enrolment that broke off has left some there; the SuperLink takes a key once, so they are taken over.
    (told,) = run([[LIST_NODES, CONNECTION]])
    known = {str(key): int(node) for key, node in json.loads(told).items()}
    there = {one.name: known[one.node_sum] for one in given if one.node_sum in known}
    if not there:
        raise DeployError("the SuperLink had one of these keys and has unregistered it; that client needs a new --home")
    return there | _register_new(home, [one for one in given if one.name not in there], run)


def _register_new(home: ServerHome, given: Sequence[Enrolment], run: Command) -> dict[str, int]:
    keys = {one.name: home.path / f".{one.name}.pub" for one in given}
    try:
        for one in given:
            write_atomically(keys[one.name], f"{one.node}\n".encode(), durable=False)
        commands = [["supernode", "register", str(key), CONNECTION, "--name", name] for name, key in keys.items()]
        said = run(commands) if commands else []
    finally:
        for key in keys.values():
            key.unlink(missing_ok=True)
    nodes = {}
    for name, text in zip(keys, said, strict=True):
        numbers = (said_before.rpartition("SuperNode ")[2] for said_before in text.split(" registered")[:-1])
        number = next((number for number in numbers if number.isdecimal()), None)
        if number is None:
            raise DeployError(f"the SuperLink did not take the key of {name}: {' '.join(text.split())[-300:]}")
        nodes[name] = int(number)
    return nodes


def _node_bytes(node: str) -> bytes:
    """Return a node's public key as Flower keeps it; anything but an EC key on P-384 is refused."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = s.load_ssh_public_key(node.encode("ascii"))
    except (ValueError, UnicodeEncodeError, UnsupportedAlgorithm) as e:
        raise DeployError(f"the node's public key cannot be read: {e}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DeployError("the node's public key is not an EC key on P-384")
    return key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)


def read_object(data: bytes, where: str) -> dict[str, Any]:
    """Read what a client sends in JSON: a short object."""
    if len(data) > FILE_CAP:
        raise DeployError(f"{where} has {len(data):,} bytes; at most {FILE_CAP:,} are read")
    try:
        document = json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise DeployError(f"{where} is not JSON; expected the enrol-NAME.json that a client wrote") from None
    if not isinstance(document, dict):
        raise DeployError(f"{where} is not an object; expected the enrol-NAME.json that a client wrote")
    return document


def _signed_by(home: ClientHome, kind: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return a document of this kind with a client's name and identity, signed by that."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    private = ed25519.Ed25519PrivateKey.from_private_bytes(home.identity_key.read_bytes())
    identity = private.public_key().public_bytes_raw().hex()
    document = {"format": kind, "name": home.settings().name, **more, "identity": identity}
    return {**document, "signature": private.sign(_signed(document)).hex()}


def _signed(document: Mapping[str, Any]) -> bytes:
    rest = {k: v for k, v in document.items() if k != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def verify_document(document: Mapping[str, Any], where: str) -> bytes:
    """Return the identity that signed a document."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ed25519

    try:
        identity, signature = bytes.fromhex(document["identity"]), bytes.fromhex(document["signature"])
        ed25519.Ed25519PublicKey.from_public_bytes(identity).verify(signature, _signed(document))
    except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError):
        raise DeployError(f"{where} is not signed by the identity it names: it was altered") from None
    return identity


def ask_to_be_forgotten(home: ClientHome) -> str | None:
    """Send the wish to the server; return None when it was taken, or why not."""
    try:
        address = f"https://{home.settings().server}{LEAVE_PATH}"
        request = urllib.request.Request(address, leave_statement(home), method="POST")
        with opener(home.ca).open(request, timeout=LEAVE_SECONDS):
            return None
    except urllib.error.HTTPError as e:
        return "the server does not know this client" if e.code == 403 else f"the server answered {e.code}"
    except (OSError, urllib.error.URLError) as e:
        return f"the server does not answer ({getattr(e, 'reason', None) or e})"


def take_wish(home: ServerHome, data: bytes) -> bool:
    """Keep a wish for the server to act on, if an enrolled client signed it."""
    try:
        roster = Roster(home.roster)
        name = read_leave(data, roster)
        if roster.entries[name].revoked:
            return False
        (home.path / WISHES).mkdir(exist_ok=True)
        write_atomically(home.path / WISHES / f"{name}.json", data)
    except KeyfedError:
        return False
    return True


def act_on_wishes(home: ServerHome) -> list[str]:
    """Forget every client that has asked for it; return their names."""
    gone = []
    for path in sorted((home.path / WISHES).glob("*.json")):
        try:
            roster = Roster(home.roster)
            name = read_leave(path.read_bytes(), roster)
        except (KeyfedError, OSError):
            path.unlink(missing_ok=True)
            continue
        try:
            forget(home, name, identity=roster.entries[name].identity)
        except KeyfedError:
            if name in read_nodes(home):
                continue  # the SuperLink did not answer: it takes no part any more, and is tried again
        else:
            gone.append(name)
        path.unlink(missing_ok=True)
    return gone
