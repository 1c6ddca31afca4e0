"""Enrolment of pages by one-time links.

The operator makes a link; its token stands behind the "#", which browsers do not send, so it is in no request line and
no log. The page makes its identity, and sends the token once with its public key. Here the SHA-256 of a token is kept,
until when it holds, and for which name; it is spent before the page is enrolled, so that it serves one page. That page
may send its request again: an answer that was lost is repeated.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from urllib.parse import quote

from keyfed.deploy.enrolment import forget, one_at_a_time, read_object, refuse_known, state_of, verify_document
from keyfed.deploy.homes import ServerHome, check_name, home_option
from keyfed.errors import ConfigError, DeployError, RunError
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.wire.pages import Declined
from keyfed.wire.roster import Enrolled, Roster, is_hex, page_key, roster_hash

FORMAT = "keyfed-web-enrol-1"
LINKS = "links.json"
WEB_ADDRESS = "web.json"
TOKEN_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
MOST_LINKS, MOST_HOURS = 10_000, 24 * 366.0
FIELDS = {"format", "token", "name", "identity", "signature"}


@dataclass(frozen=True, slots=True)
class Link:
    """What is kept of a link.

    Attributes:
      expires: in seconds since 1970.
      name: that its page gets; None where the page chooses.
      used: the name of the page that was enrolled with it; None while it is open.
    """

    expires: float
    name: str | None = None
    used: str | None = None

    def open(self, now: float) -> bool:
        """Whether a page can be enrolled with it."""
        return self.used is None and now < self.expires


def read_links(home: ServerHome) -> dict[str, Link]:
    """Return the links of a server by the SHA-256 of their tokens."""
    try:
        links = {str(digest): Link(**link) for digest, link in read_json(home.path / LINKS).items()}
        if not all(isinstance(one.expires, int | float) and is_hex(digest, 64) for digest, one in links.items()):
            raise ValueError("a link without a time or a sum")
        return links
    except FileNotFoundError:
        return {}
    except (OSError, *BROKEN) as e:
        raise RunError(f"{home.path / LINKS} cannot be read ({e}); delete it: open links end with it") from None


class KnownLinks:
    """The links of a server, parsed again only when their file changes: strangers ask for them."""

    def __init__(self, home: ServerHome) -> None:
        self._home = home
        self._state: tuple[int, ...] | None = ()
        self._links: Mapping[str, Link] = {}
        self._until = 0.0

    def __call__(self) -> Mapping[str, Link]:
        """Return the links by the SHA-256 of their tokens.

        Raises:
          RunError: they cannot be read.
        """
        state = state_of(self._home.path / LINKS)
        if state != self._state:  # looked at first: what changes in between is read again
            self._links = read_links(self._home)
            self._until = max((link.expires for link in self._links.values() if link.used is None), default=0.0)
            self._state = state
        return self._links

    def is_enrolling(self, now: float) -> bool:
        """Whether a link is open."""
        self()
        return now < self._until


def _write(home: ServerHome, links: Mapping[str, Link]) -> None:
    write_atomically(home.path / LINKS, json.dumps({d: asdict(one) for d, one in links.items()}, indent=1).encode())


def make_links(
    home: ServerHome, count: int = 1, hours: float = 24.0, name: str | None = None, now: float | None = None
) -> list[str]:
    """Make links and return their tokens; those that have expired are forgotten, used ones also where there are many.

    Raises:
      ConfigError: a name for several pages, or one that is taken.
    """
    now = time.time() if now is None else now
    if name is not None and count != 1:
        raise ConfigError("--name is for one link; leave it out, and each page gets a name of its own")
    if not 0 < hours <= MOST_HOURS:
        raise ConfigError(f"--hours is {hours:g}; expected more than 0, at most {MOST_HOURS:g}")
    tokens = [base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).rstrip(b"=").decode() for _ in range(count)]
    with one_at_a_time(home):
        if name is not None:
            _refuse_taken(Roster(home.roster), check_name(name))
        links = {digest: one for digest, one in read_links(home).items() if now < one.expires}
        used = [digest for digest, one in links.items() if one.used is not None]
        if len(links) - len(used) + count > MOST_LINKS:
            raise ConfigError(f"{len(links) - len(used):,} links are open; at most {MOST_LINKS:,} are kept")
        for digest in used[: max(0, len(links) + count - MOST_LINKS)]:
            del links[digest]
        _write(home, links | {digest_of(token): Link(now + 3600 * hours, name) for token in tokens})
    return tokens


def digest_of(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def enrol_page(
    home: ServerHome, data: bytes, now: float | None = None, known: KnownLinks | None = None
) -> dict[str, str]:
    """Enrol the page that sends this document; return its name and the hash of the roster.

    A page that is enrolled by this link already gets its name again. The token is looked at before anything else: who
    has none waits for no lock and has no signature checked.

    Args:
      known: the links as they were read before.

    Raises:
      Declined: the document is none, its link is not open, or its name or keys cannot be had.
    """
    now = time.time() if now is None else now
    try:
        document = read_object(data, "the request to enrol")
    except DeployError as e:
        raise Declined(400, "malformed", str(e)) from None
    token, wanted = document.get("token"), document.get("name")
    if document.get("format") != FORMAT or set(document) != FIELDS or not isinstance(wanted, str):
        raise Declined(400, "malformed", f"not a request to enrol of the format {FORMAT}; load the page again")
    if not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise Declined(403, "link", "this is not a link of this server; ask for a new one")
    digest = digest_of(token)
    _link(known() if known is not None else read_links(home), digest)
    try:
        identity = verify_document(document, "the request to enrol")
    except DeployError as e:
        raise Declined(400, "malformed", str(e)) from None
    with one_at_a_time(home):
        links, roster = read_links(home), Roster(home.roster)
        link = _link(links, digest)
        if link.used is not None:
            return {"name": _name_again(roster, link.used, identity), "roster": roster_hash(roster.marks())}
        if not link.open(now):
            raise Declined(403, "link", "this link has expired; ask for a new one")
        name = _name_for(link, wanted, roster, identity)
        _write(home, {**links, digest: replace(link, used=name)})  # first: what breaks off here costs a link
        when = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="seconds")
        roster.write({name: Enrolled(identity.hex(), page_key(identity), when)})
        return {"name": name, "roster": roster_hash(roster.marks())}


def _link(links: Mapping[str, Link], digest: str) -> Link:
    if digest not in links:  # of a token's sum, so that the time it takes says nothing
        raise Declined(403, "link", "this is not a link of this server, or it has expired; ask for a new one")
    return links[digest]


def _name_again(roster: Roster, name: str, identity: bytes) -> str:
    """Return the name of the page that was enrolled by a link, to that page alone."""
    entry = roster.get(name)
    if entry is None or entry.revoked or (entry.identity, entry.node_key) != (identity.hex(), page_key(identity)):
        raise Declined(403, "link", "this link was used already; each is for one device: ask for a new one")
    return name


def _name_for(link: Link, wanted: str, roster: Roster, identity: bytes) -> str:
    """Return the name of a page: the link's, whatever the page wants, else the page's own, else a drawn one."""
    name = link.name or wanted or f"page-{secrets.token_hex(4)}"
    try:
        check_name(name)
        _refuse_taken(roster, name)
        refuse_known(roster.entries, name, identity, page_key(identity))
    except (ConfigError, DeployError) as e:
        raise Declined(409, "name", str(e)) from None
    return name


def _refuse_taken(roster: Roster, name: str) -> None:
    entry = roster.get(name)
    if entry is not None and not entry.revoked:
        raise ConfigError(f'the name "{name}" is taken; choose another')


def page_leaves(home: ServerHome, name: str, identity: bytes) -> None:
    """Forget a page that has signed that it leaves."""
    forget(home, name, identity=identity.hex())


def link_of(address: str, token: str, origin: str | None = None) -> str:
    """Return the link of a token.

    Args:
      address: of the server, https://HOST:PORT.
      origin: where the page is installed, where that is not the server.

    Example:
      >>> link_of("https://fl.example.org:9443", "abc", "https://keys.example.net")
      'https://keys.example.net/#join=abc&server=https://fl.example.org:9443'
    """
    if origin is None:
        return f"{address}/#join={token}"
    server = quote(address, safe=":/[]")
    return f"{origin.rstrip('/')}/#join={token}&server={server}"


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where the pages of a server are: its address, and the origin of the page where that is another."""

    address: str
    origin: str | None = None


def web_address(home: ServerHome) -> WebAddress:
    """Return where the pages of a server are.

    Raises:
      DeployError: the server was not started with --web.
    """
    try:
        found = WebAddress(**read_json(home.path / WEB_ADDRESS))
        if not isinstance(found.address, str) or not isinstance(found.origin, str | None):
            raise ValueError("an address that is not a text")
        return found
    except FileNotFoundError:
        raise DeployError(
            f"{home.path}: no page can join, as the server runs without --web; start it: "
            f"keyfed server --web PORT{home_option(home.path)}"
        ) from None
    except (OSError, *BROKEN) as e:
        raise DeployError(f"{home.path / WEB_ADDRESS} cannot be read: {e}; start the server again") from None
