"""Who may take part: the server's list of clients, their lasting keys, and who has left or been shut out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keyfed.errors import RunError
from keyfed.files import BROKEN, read_json, write_atomically

if TYPE_CHECKING:
    from keyfed.federated.types import ClientId

HEX = frozenset("0123456789abcdef")


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
    """The clients of a server, in one file that is whole or not there.

    Attributes:
      entries: every client, revoked or not, by its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reread()

    def reread(self) -> None:
        """Read the file again: somebody may have been enrolled or have left."""
        try:
            entries = {str(name): Enrolled(**entry) for name, entry in read_json(self.path).items()}
            if not all(isinstance(e.identity, str) and isinstance(e.node_key, str) for e in entries.values()):
                raise ValueError("a key that is not a text")
        except FileNotFoundError:
            entries = {}
        except (OSError, *BROKEN) as e:
            raise RunError(f"{self.path}: cannot be read as a roster ({e}); restore it from a backup") from None
        self.entries = entries

    def write(self, entries: Mapping[ClientId, Enrolled]) -> None:
        """Write clients down, in the place of what was written of them before."""
        entries = {**self.entries, **entries}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {name: asdict(entry) for name, entry in entries.items()}
        write_atomically(self.path, json.dumps(data, indent=1, sort_keys=True).encode())
        self.entries = entries

    def names(self) -> Sequence[ClientId]:
        """Everybody who may take part, in order."""
        return sorted(name for name, entry in self.entries.items() if not entry.revoked)

    def marks(self) -> list[str]:
        """Marks of everybody who may take part, in order: what clients are shown of the roster."""
        return sorted(mark_of(name, self.entries[name].identity) for name in self.names())

    def get(self, name: ClientId) -> Enrolled | None:
        """A client, whether or not it is revoked; None for an unknown one."""
        return self.entries.get(name)


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


def key_sum(public_key: bytes) -> str:
    """Return what a roster holds of a node's public key."""
    return hashlib.sha256(public_key).hexdigest()


def page_key(identity: bytes) -> str:
    """Return what a roster has as the node key of a page: no node of Flower's has it."""
    return hashlib.sha256(b"keyfed-web-1" + identity).hexdigest()


def is_page(entry: Enrolled) -> bool:
    """Whether a client of a roster is a page."""
    return is_hex(entry.identity, 64) and entry.node_key == page_key(bytes.fromhex(entry.identity))


def is_hex(text: object, characters: int) -> bool:
    """Whether a text is so many lower hexadecimal digits.

    Example:
      >>> is_hex("0f", 2), is_hex("0F", 2), is_hex("0f", 4)
      (True, False, False)
    """
    return isinstance(text, str) and len(text) == characters and HEX.issuperset(text)
