"""The folder of a client: its keys, what it was told, and nothing that was not asked for.

    client.json      name, server, text, conditions, days to keep
    node.key, .pub   EC P-384 in OpenSSH's format, proves the node
    identity.key     Ed25519 (32 bytes), signs one-time keys
    secret           for the node's own port on this machine
    ca.crt           the authority the server's certificate is from
    consent.json     when and to what its owner agreed
    text/            text a keyboard leaves here, kept `keep_days`
    keys/, runs/, …  what training keeps between rounds (`engine.device_store`)
    logs/            what the processes wrote
    paused           there while the owner has paused it

Keys are made on the first start and leave the folder never; `node.pub` and the identity's public half go into the
enrolment file. Private files can be read by their owner only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from keyfed.deploy.certificates import check_certificate, write_new, write_private
from keyfed.deploy.conditions import CONDITIONS
from keyfed.errors import ConfigError, DeployError, nearest
from keyfed.files import write_atomically

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was told.

    Attributes:
      data: file or folder of the client's text, read where it is; its own `text/` by default.
      when: conditions under which it trains, see `conditions.CONDITIONS`.
      keep_days: text older than this is not trained on, and deleted where it lies in the home; None keeps it.
      plain: it also takes part in runs without secure aggregation, whose server sees its own update.
    """

    name: str
    server: str
    data: str = ""
    when: tuple[str, ...] = ()
    keep_days: int | None = None
    plain: bool = False


@dataclass(frozen=True, slots=True)
class ClientHome:
    """The folder of a client."""

    path: Path

    @property
    def identity_key(self) -> Path:
        return self.path / "identity.key"

    @property
    def node_key(self) -> Path:
        return self.path / "node.key"

    @property
    def node_public(self) -> Path:
        return self.path / "node.pub"

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @property
    def ca(self) -> Path:
        return self.path / "ca.crt"

    @property
    def text(self) -> Path:
        return self.path / "text"

    def exists(self) -> bool:
        """Whether a client was set up here."""
        return (self.path / "client.json").exists()

    def settings(self) -> Settings:
        """Read what the client was told."""
        try:
            found = json.loads((self.path / "client.json").read_text("utf-8"))
            return Settings(**{**found, "when": tuple(found["when"])})
        except FileNotFoundError:
            raise DeployError(f"{self.path} is not the home of a client; start one: keyfed client --help") from None
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise DeployError(f"{self.path / 'client.json'} cannot be read: {e}") from None

    def write(self, settings: Settings) -> None:
        """Write what the client was told."""
        write_atomically(self.path / "client.json", json.dumps(asdict(settings), indent=1).encode())

    def data(self) -> Path:
        """Return where the client's text is."""
        told = self.settings().data
        return Path(told) if told else self.text

    def paused(self) -> bool:
        """Whether the owner has paused it."""
        return (self.path / "paused").exists()

    def pause(self, on: bool) -> None:
        """Pause or go on; a running client notices with the next message."""
        if on:
            (self.path / "paused").touch()
        else:
            (self.path / "paused").unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete the home and all that is in it; text that lies elsewhere is the owner's and stays."""
        if self.exists():
            shutil.rmtree(self.path)


def default_home() -> Path:
    """Return a client's home: KEYFED_CLIENT_HOME, or ~/.keyfed/client."""
    return Path(os.environ.get("KEYFED_CLIENT_HOME") or Path.home() / ".keyfed" / "client")


def check_name(name: str) -> str:
    """Return a client's name if it can be one."""
    if not NAME.fullmatch(name):
        raise ConfigError(f'"{name}" cannot be a client\'s name; expected 1 to 64 letters, digits, ".", "_" or "-"')
    return name


def check_server(address: str) -> str:
    """Return HOST:PORT if it is one."""
    found = ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[2]) < 65536:
        raise ConfigError(f'"{address}" is not an address; expected HOST:PORT, as example.org:9092')
    return address


def check_when(text: str) -> tuple[str, ...]:
    """Return the conditions in a list like `idle,power`; none for an empty text or `always`."""
    names = [part.strip() for part in text.split(",") if part.strip() and part.strip() != "always"]
    for name in names:
        if name not in CONDITIONS:
            known = ", ".join(CONDITIONS)
            raise ConfigError(
                f'condition "{name}" is not known{nearest(name, CONDITIONS)}. Conditions: {known}, always.'
            )
    return tuple(dict.fromkeys(names))


def open_home(
    path: Path,
    *,
    name: str | None = None,
    server: str | None = None,
    ca: Path | None = None,
    data: Path | None = None,
    when: str | None = None,
    keep_days: int | None = None,
    plain: bool | None = None,
) -> ClientHome:
    """Make a client's home, with new keys, or open the one that is there; what is given replaces what it was told.

    Raises:
      DeployError: something a first start needs is missing, or the authority's certificate is not valid.
      ConfigError: a name, address or condition that cannot be one.
    """
    home = ClientHome(path)
    if home.exists():
        before = home.settings()
        if name is not None and name != before.name:
            raise DeployError(f'this client is enrolled as "{before.name}"; another name needs another --home')
    else:
        missing = [option for option, value in (("--server", server), ("--ca", ca), ("--name", name)) if value is None]
        if missing:
            raise DeployError(f"{path} is new: its first start needs {' and '.join(missing)}")
        before = Settings(check_name(str(name)), check_server(str(server)))
    settings = replace(
        before,
        server=before.server if server is None else check_server(server),
        data=before.data if data is None else str(_text_at(data)),
        when=before.when if when is None else check_when(when),
        keep_days=before.keep_days if keep_days is None else keep_days or None,
        plain=before.plain if plain is None else plain,
    )
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    if ca is not None:
        check_certificate(ca)
        write_atomically(home.ca, ca.read_bytes())
    check_certificate(home.ca)
    home.text.mkdir(exist_ok=True)
    make_keys(home)
    home.write(settings)
    return home


def _text_at(data: Path) -> Path:
    if not data.exists():
        raise ConfigError(f"{data} is not there; --data is a text file or a folder of them")
    return data.resolve()


def make_keys(home: ClientHome) -> None:
    """Make the keys that are missing: all on the first start, none later."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if not home.node_key.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(home.node_key, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    if not home.node_public.exists():
        made = s.load_ssh_private_key(home.node_key.read_bytes(), None)
        write_new(home.node_public, made.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH) + b"\n")
    if not home.identity_key.exists():
        write_private(home.identity_key, ed25519.Ed25519PrivateKey.generate().private_bytes_raw())
    if not home.secret.exists():
        write_private(home.secret, os.urandom(32))


def expire(folder: Path, days: int | None, now: float | None = None) -> list[Path]:
    """Delete the files under a folder of the client's home that are older than `days`; return them."""
    gone = old_files(folder, days, now)
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def old_files(folder: Path, days: int | None, now: float | None = None) -> list[Path]:
    """Return the files under a folder that were last changed more than `days` ago, in order."""
    if days is None or not folder.is_dir():
        return []
    oldest = (time.time() if now is None else now) - days * DAY
    return [p for p in _files(folder) if p.stat().st_mtime < oldest]


def kept_files(data: Path, days: int | None, now: float | None = None) -> list[Path]:
    """Return the files of a client's text that may be trained on, in order."""
    if data.is_file():
        old = days is not None and data.stat().st_mtime < (time.time() if now is None else now) - days * DAY
        return [] if old else [data]
    old_ones = set(old_files(data, days, now))
    return [p for p in _files(data) if p not in old_ones]


def _files(folder: Path) -> Sequence[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and not p.name.startswith("."))
