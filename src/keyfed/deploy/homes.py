"""The folders of a client and of a server: keys, settings, and nothing that was not asked for.

A client's:

    client.json      name, server, text, conditions, days to keep, limits
    node.key, .pub   EC P-384 in OpenSSH's format, proves the node
    identity.key     Ed25519 (32 bytes), signs one-time keys
    secret           for the node's own port on this machine
    ca.crt           the authority the server's certificate is from
    consent.json     when and to what its owner agreed
    text/            text a keyboard leaves here, kept `keep_days`
    keys/, runs/, …  what training keeps between rounds (`wire.device_store`)
    spent.json       what left this client cost in privacy, over all runs (`private.dp.own_ledger`)
    refused.txt      why the client last took no part, in one line
    logs/            what the processes wrote
    paused           there while the owner has paused it

Keys are made on the first start and leave the folder never; `node.pub` and the identity's public half go into the
enrolment file. Private files can be read by their owner only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from keyfed.deploy.certificates import CA_CERT, check_certificate, write_new, write_private
from keyfed.deploy.processes import locked, private_folder
from keyfed.errors import ConfigError, DeployError, nearest
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.wire.limits import Limits

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
DAY = 86_400.0
SERVER_VARIABLE, SERVER_ADDRESS = "KEYFED_SERVER_HOME", "address.json"
REFUSED = "refused.txt"  # why the client last took no part
# What a first start that was broken off may have left: it goes on from there.
BEGUN = {"consent.json", "ca.crt", "node.key", "node.pub", "identity.key", "secret", "text", "client.lock"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was told.

    Attributes:
      data: file or folder of the client's text, read where it is; its own `text/` by default.
      when: conditions under which it trains, see `conditions.CONDITIONS`.
      keep_days: text older than this is not trained on, and deleted where it lies in the home; None keeps it.
      plain: it also takes part in runs without secure aggregation, whose server sees its own update.
      counts: it also takes part in counts of n-grams, by secure sums.
      hide_among: the fewest clients of a secure sum that it takes part in, itself included.
      me: its owner among several authors of the text; "" where there is one.
      limits: what it gives a run at most.
      author_column, text_column: of a table, by name or number; "" where they are found.
    """

    name: str
    server: str
    data: str = ""
    when: tuple[str, ...] = ()
    keep_days: int | None = None
    plain: bool = False
    hide_among: int = 3
    me: str = ""
    limits: Limits = field(default_factory=Limits)
    author_column: str = ""
    text_column: str = ""
    counts: bool = False

    def reading(self) -> dict[str, str | None]:
        """The columns of a table: arguments of `keyfed.text.corpus.read_corpus`."""
        return {"author_column": self.author_column or None, "text_column": self.text_column or None}


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
            found = read_json(self.path / "client.json")
            limits = Limits(**found.get("limits", {}))
            settings = Settings(**{**found, "when": tuple(found["when"]), "limits": limits})
            texts = (settings.name, settings.server, settings.data, *settings.when)
            texts += (settings.author_column, settings.text_column)
            if not all(isinstance(text, str) for text in texts) or not isinstance(settings.keep_days, int | None):
                raise ValueError("a value of another type than was written")
            return settings
        except FileNotFoundError:
            raise DeployError(f"{self.path} is not the home of a client; start one: keyfed client --help") from None
        except (OSError, *BROKEN, ConfigError) as e:
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
            shutil.rmtree(self.path.resolve())
            self.path.unlink(missing_ok=True)  # a link to it

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second client out of the home, from its first process to its last.

        Raises:
          ClientRuns: one is there.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / "client.lock", "taken"))
            except DeployError:
                raise ClientRuns(f"{self.path}: a client runs there already; end it first (Ctrl-C)") from None
            yield


class ClientRuns(DeployError):
    """A client runs in a home already."""


def default_client_home() -> Path:
    """Return a client's home: KEYFED_CLIENT_HOME, or ~/.keyfed/client."""
    return Path(os.environ.get("KEYFED_CLIENT_HOME") or Path.home() / ".keyfed" / "client")


def home_option(path: Path) -> str:
    """Return what the commands of a client or server end in where its home is not the usual one; else nothing.

    Example:
      >>> home_option(Path("/my home")), home_option(default_client_home().absolute())
      (" --home '/my home'", '')
    """
    usual = (default_client_home().absolute(), default_server_home().absolute())
    return "" if path.absolute() in usual else f" --home {shlex.quote(str(path))}"


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
    counts: bool | None = None,
    hide_among: int | None = None,
    me: str | None = None,
    author_column: str | None = None,
    text_column: str | None = None,
    limits: Mapping[str, Any] | None = None,
    agree: Callable[[Settings], None] = lambda told: None,
) -> ClientHome:
    """Make a client's home, with new keys, or open the one that is there; what is given replaces what it was told.

    Args:
      limits: fields of `Limits` that are given; an `epsilon` of 0 takes the budget away.
      agree: asks the owner; where it raises, nothing is changed.

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
        _refuse_strange(path)
        before = Settings(check_name(str(name)), check_server(str(server)))
    settings = replace(
        before,
        server=before.server if server is None else check_server(server),
        data=before.data if data is None else _text_at(data, home),
        when=before.when if when is None else check_when(when),
        keep_days=before.keep_days if keep_days is None else keep_days or None,
        plain=before.plain if plain is None else plain,
        counts=before.counts if counts is None else counts,
        hide_among=before.hide_among if hide_among is None else _at_least_three(hide_among),
        me=before.me if me is None else me,
        author_column=before.author_column if author_column is None else author_column,
        text_column=before.text_column if text_column is None else text_column,
        limits=_limited(before.limits, dict(limits or {})),
    )
    check_certificate(home.ca if ca is None else ca, received=True)
    agree(settings)
    private_folder(path)
    if ca is not None:
        write_atomically(home.ca, ca.read_bytes())
    home.text.mkdir(exist_ok=True)
    make_keys(home)
    home.write(settings)
    return home


def _limited(before: Limits, given: dict[str, Any]) -> Limits:
    if "epsilon" in given:
        given["epsilon"] = given["epsilon"] or None
    return replace(before, **given)


def _at_least_three(clients: int) -> int:
    if not 3 <= clients <= 4096:
        raise ConfigError(f"--hide-among is {clients}; expected 3 to 4096 clients of a secure sum")
    return clients


def _refuse_strange(path: Path) -> None:
    """Raise DeployError for a folder that holds what is not a client's: leaving would delete it."""
    if not path.exists():
        return
    strange = not path.is_dir() or any(p.name not in BEGUN for p in path.iterdir())
    if strange or next((path / "text").rglob("*"), None) is not None:
        raise DeployError(
            f"{path} is there and holds other things; choose another --home (a client's is deleted whole)"
        )


def _text_at(data: Path, home: ClientHome) -> str:
    """Return the place of the owner's text; "" for the home's own folder for it."""
    if not data.exists():
        raise ConfigError(f"{data} is not there; --data is a text file or a folder of them")
    found, inside = data.resolve(), home.path.resolve()
    if found == home.text.resolve():
        return ""
    if found == inside or inside in found.parents:
        raise ConfigError(f"{data} lies in the client's own folder, which --leave deletes; move your text elsewhere")
    return str(found)


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
    """Delete the files under a folder of the client's home that are older than `days`; return them. Links stay."""
    gone = [path for path in old_files(folder, days, now) if not path.is_symlink()]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def old_files(folder: Path, days: int | None, now: float | None = None) -> list[Path]:
    """Return the files under a folder that were last changed more than `days` ago, in order; links by their files."""
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


def strays(folder: Path) -> list[Path]:
    """Return the links in a folder of text that lead out of it: what they lead to is not the client's text."""
    home = folder.resolve()
    # `realpath`, since `resolve` raises on a loop of links.
    return [p for p in folder.rglob("*") if p.is_symlink() and home not in Path(os.path.realpath(p)).parents]


def _files(folder: Path) -> Sequence[Path]:
    """Files to train on: no link that leads out of the folder, nothing hidden, nothing in a hidden folder."""
    elsewhere = set(strays(folder))

    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    return sorted(p for p in folder.rglob("*") if not hidden(p) and p.is_file() and p not in elsewhere)


@dataclass(frozen=True, slots=True)
class ServerHome:
    """The folder of a server: certificates, roster, database, logs."""

    path: Path

    @property
    def ca(self) -> Path:
        """The certificate that clients get."""
        return self.path / CA_CERT

    @property
    def roster(self) -> Path:
        """Who is enrolled."""
        return self.path / "roster.json"

    def used(self) -> ServerHome:
        """Return this home where a server was started in it, or clients enrolled.

        Raises:
          DeployError: neither; most often the server has another folder.
        """
        if any(path.exists() for path in (self.ca, self.roster, self.path / SERVER_ADDRESS)):
            return self
        raise DeployError(
            f"no server was ever started in {self.path}; if yours has another folder: --home FOLDER, "
            f"else start one: keyfed server --make-certificates{home_option(self.path)}"
        )

    def address(self) -> str:
        """Return where the SuperLink of this home listens, seen from this machine."""
        try:
            found = read_json(self.path / SERVER_ADDRESS)
            return str(found["address"])
        except FileNotFoundError:
            raise DeployError(f"{self.path}: no server was started there yet; `keyfed server` does") from None
        except (OSError, *BROKEN) as e:
            raise DeployError(f"{self.path / SERVER_ADDRESS} cannot be read: {e}") from None


def default_server_home() -> Path:
    """Return the server's home: KEYFED_SERVER_HOME, or ~/.keyfed/server."""
    return Path(os.environ.get(SERVER_VARIABLE) or Path.home() / ".keyfed" / "server")


# When a client trains: on power, idle, on a network that is not metered. Each question has three answers: True, False
# and None for "the system does not tell". Where it does not tell, the client does not train under that condition, and
# `keyfed client --status` says so.

POWER = Path("/sys/class/power_supply")
LOAD = Path("/proc/loadavg")
IDLE_LOAD = 0.5  # processes that want to run, per core
NMCLI = ("nmcli", "-t", "-f", "GENERAL.METERED,GENERAL.STATE", "device", "show")


def on_power(folder: Path = POWER) -> bool | None:
    """Whether the machine runs on mains: no battery is discharging, or a supply is online.

    A machine without a battery is on mains if the system lists its supplies at all.
    """
    if not folder.is_dir():
        return None
    mains, batteries = [], []
    for supply in sorted(folder.iterdir()):
        kind = _word(supply / "type")
        if kind == "Battery" and _word(supply / "scope") != "Device":  # a mouse has a battery too
            batteries.append(_word(supply / "status"))
        elif kind in ("Mains", "USB", "Wireless"):
            mains.append(_word(supply / "online"))
    if "1" in mains:
        return True
    if not batteries:
        return None if not mains else False
    known = [status for status in batteries if status not in ("", "Unknown")]
    return not any(status == "Discharging" for status in known) if known else None


def idle(path: Path = LOAD, cores: int | None = None) -> bool | None:
    """Whether at most half a process per core wanted to run over the last minute."""
    cores = cores or os.cpu_count() or 1
    try:
        load = float(path.read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return load <= IDLE_LOAD * cores


def parse_metered(text: str) -> bool | None:
    """Read `nmcli -t -f GENERAL.METERED,GENERAL.STATE device show`: whether a connected device is metered.

    Example:
      >>> parse_metered("GENERAL.METERED:no (guessed)\\nGENERAL.STATE:100 (connected)\\n")
      False
      >>> parse_metered("GENERAL.METERED:yes\\nGENERAL.STATE:100 (connected)\\n")
      True
      >>> parse_metered("GENERAL.METERED:unknown\\nGENERAL.STATE:100 (connected)\\n") is None
      True
    """
    answers: list[str] = []
    for block in text.strip().split("\n\n"):
        values = dict(line.partition(":")[::2] for line in block.splitlines())
        if values.get("GENERAL.STATE", "").startswith("100"):
            answers.append(values.get("GENERAL.METERED", "unknown").split(" ")[0])
    if "yes" in answers:
        return True
    return False if answers and set(answers) == {"no"} else None


def unmetered() -> bool | None:
    """Whether no connected network is metered, where NetworkManager tells."""
    if shutil.which(NMCLI[0]) is None:
        return None
    try:
        told = subprocess.run(NMCLI, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    metered = parse_metered(told.stdout) if told.returncode == 0 else None
    return None if metered is None else not metered


CONDITIONS: dict[str, tuple[str, Callable[[], bool | None]]] = {
    "idle": ("idle", idle),
    "power": ("on power", on_power),
    "unmetered": ("on an unmetered network", unmetered),
}


def unmet(names: Sequence[str]) -> list[str]:
    """Return, in words, the conditions that are not met or of which the system does not tell."""
    return [words for words, ask in (CONDITIONS[name] for name in names) if ask() is not True]


def describe() -> list[tuple[str, str]]:
    """Return each condition and what the system tells of it."""
    said = {True: "yes", False: "no", None: "the system does not tell"}
    return [(words, said[ask()]) for words, ask in CONDITIONS.values()]


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return ""
