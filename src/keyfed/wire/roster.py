"""Who may take part: the server's list of clients, their lasting keys, and who has left or been shut out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyfed.errors import ConfigError, RunError
from keyfed.files import BROKEN, read_json, write_atomically

if TYPE_CHECKING:
    from keyfed.federated.types import ClientId

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Enrolled:
    """One client.

    Attributes:
      identity: public Ed25519 key that signs its one-time keys, hexadecimal.
      node_key: SHA-256 of the public key that it logs in with, hexadecimal.
      enrolled: when, ISO 8601.
      revoked: it has left, or was shut out.
    """

    identity: str
    node_key: str
    enrolled: str
    revoked: bool = False


class Roster:
    """The clients of a server, in one file that is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clients = _read(path)

    def reread(self) -> None:
        """Read the file again: somebody may have been enrolled or have left."""
        self._clients = _read(self.path)

    def names(self) -> Sequence[ClientId]:
        """Everybody who may take part, in order."""
        return sorted(name for name, entry in self._clients.items() if not entry.revoked)

    def marks(self) -> list[str]:
        """Marks of everybody who may take part, in order: what clients are shown of the roster."""
        return sorted(mark_of(name, self._clients[name].identity) for name in self.names())

    def get(self, name: ClientId) -> Enrolled | None:
        """A client, whether or not it is revoked; None for an unknown one."""
        return self._clients.get(name)

    def add(self, name: ClientId, entry: Enrolled) -> None:
        """Enrol a client; a name or a key that is taken is refused, so nobody takes part twice."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f'a client\'s name is "{name[:80]}"; expected letters, digits, ".", "_" and "-", at most 64, and a '
                "letter or digit first"
            )
        known = self._clients.get(name)
        if known is not None and known.revoked and known.identity != entry.identity:
            raise ConfigError(
                f'there was a client "{name}" with another key, and the others remember that key: choose another name'
            )
        if known is not None and not known.revoked and known != replace(entry, enrolled=known.enrolled):
            raise ConfigError(
                f'there is a client "{name}" with other keys; `keyfed enroll --forget {name}` first, or choose another '
                "name"
            )
        for other, its in self._clients.items():
            taken = {its.identity, its.node_key} & {entry.identity, entry.node_key}
            if other != name and taken:
                raise ConfigError(f'"{name}" has a key of the client "{other}"; a key enrols one client only')
        self._write({**self._clients, name: entry})

    def revoke(self, name: ClientId) -> None:
        """Let a client take part no more; its name stays its own."""
        entry = self._clients.get(name)
        if entry is None:
            raise ConfigError(f'there is no client "{name}"; enrolled: {", ".join(sorted(self._clients)) or "nobody"}')
        self._write({**self._clients, name: replace(entry, revoked=True)})

    def _write(self, clients: dict[ClientId, Enrolled]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {name: asdict(entry) for name, entry in sorted(clients.items())}
        write_atomically(self.path, json.dumps(data, indent=1).encode())
        self._clients = clients


def mark_of(name: ClientId, identity: str) -> str:
    """Return a client's mark on a published roster: half of the SHA-256 of its name and its identity (hexadecimal)."""
    return hashlib.sha256(json.dumps(["keyfed roster", name, identity]).encode()).hexdigest()[:32]


def roster_hash(marks: Iterable[str]) -> str:
    """Return the hash by which people compare the roster that each of them was shown.

    Example:
      >>> roster_hash(["b" * 32, "a" * 32]) == roster_hash(["a" * 32, "b" * 32])
      True
    """
    return hashlib.sha256("".join(sorted(set(marks))).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[ClientId, Enrolled]:
    try:
        found = {str(name): Enrolled(**entry) for name, entry in read_json(path).items()}
        if not all(isinstance(e.identity, str) and isinstance(e.node_key, str) for e in found.values()):
            raise ValueError("a key that is not a text")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, *BROKEN) as e:
        raise RunError(f"{path}: cannot be read as a roster ({e}); restore it from a backup") from None


def key_sum(public_key: bytes) -> str:
    """Return what a roster holds of a node's public key."""
    return hashlib.sha256(public_key).hexdigest()
