"""The page for a phone in the same network: one address of this machine, over TLS, with a certificate of its own.

A service worker and the sums of files need HTTPS anywhere but on 127.0.0.1, and no authority gives certificates for
addresses at home. So each address has a certificate that its own authority signed; the authority's key was thrown away.
Until a phone trusts `ca.crt` its browser warns; then the page works, but has no service worker.
"""

from __future__ import annotations

import io
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keyfed.deploy.certificates import (
    CA_CERT,
    SERVER_CERT,
    SERVER_KEY,
    check_certificate,
    fingerprint,
    hosts_of,
    make_for_one_address,
)
from keyfed.errors import ConfigError, DeployError
from keyfed.keyboard import serve
from keyfed.keyboard.site import Site, files_served, write_site

if TYPE_CHECKING:
    import uvicorn

HOME = "KEYFED_KEYBOARD_HOME"
CERTIFICATE = "/keyfed.crt"  # where a phone gets it
OUTSIDE = ("192.0.2.1", 9)  # an address for documents: it says by which of ours others are reached, and gets nothing


def chosen_address(wanted: str | None) -> str:
    """Return the IPv4 address to serve on: the one that was chosen, else the one by which others are reached.

    Raises:
      ConfigError: none is found; it is not an address, or one of the internet or of all networks.
    """
    found = wanted or _address_outside()
    try:
        address = ipaddress.IPv4Address(found)
    except ValueError:
        raise ConfigError(f'--address is "{found}"; expected an IPv4 address of this machine, as 192.168.1.5') from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"--address {found} is no single network; give the address that the phone can reach")
    if address.is_global:
        raise ConfigError(
            f"{found} is an address of the internet: everybody could open the page; give one of a local network with "
            "--address, or put a site on a host (`keyfed export RUN --site FOLDER`)"
        )
    return str(address)


def _address_outside() -> str:
    """Return the address that the system would send from; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(OUTSIDE)
            found = str(probe.getsockname()[0])
        except OSError:
            found = "0.0.0.0"
    if ipaddress.IPv4Address(found).is_unspecified or ipaddress.IPv4Address(found).is_loopback:
        raise ConfigError("this machine is in no network; connect it, or give its address with --address")
    return found


def kept_certificate(address: str, home: Path | None = None) -> Path:
    """Return the folder of an address's certificate, made where it is missing or has expired.

    Raises:
      DeployError: it cannot be read or is of another address: which file, and what to do.
    """
    root = home or Path(os.environ.get(HOME) or Path.home() / ".keyfed" / "keyboard")
    folder = root / address
    names = (CA_CERT, SERVER_CERT, SERVER_KEY)
    try:
        there = [name for name in names if (folder / name).exists()]
        if there and not _expired(folder):
            _check(folder, address)
            (folder / SERVER_KEY).chmod(0o600)
            return folder
        make_for_one_address(folder, address)
    except OSError as e:
        raise DeployError(f"{folder}: the certificate cannot be kept there ({e.strerror or e}); set {HOME}") from None
    return folder


def _expired(folder: Path) -> bool:
    try:
        check_certificate(folder / SERVER_CERT)
    except DeployError as e:
        return "expired" in str(e)
    return False


def _check(folder: Path, address: str) -> None:
    """Raise DeployError unless the three files are there, belong together and are of the address."""
    again = f"move {folder} away to make a new one"
    try:
        fingerprint(folder / CA_CERT)
        if hosts_of(folder / SERVER_CERT) != [address]:
            raise DeployError(f"{folder / SERVER_CERT} is not for {address}")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / SERVER_CERT, folder / SERVER_KEY)
    except DeployError as e:
        raise DeployError(f"{e}; {again}") from None
    except (OSError, ssl.SSLError) as e:
        raise DeployError(f"{folder / SERVER_KEY} cannot be read as the key of {SERVER_CERT} ({e}); {again}") from None


@dataclass(frozen=True, slots=True)
class LanServer:
    """A site at one address of a local network."""

    export: Path
    folder: Path  # of the site, written for it
    host: str
    port: int
    certificate: Path

    @property
    def address(self) -> str:
        return f"https://{self.host}:{self.port}/"

    def write(self) -> Site:
        """Write the site."""
        return write_site(self.export, self.folder)

    def make(self) -> uvicorn.Server:
        """Return the server of the site, which was written."""
        find = files_served(self.folder, {CERTIFICATE: self.certificate / CA_CERT})
        app = serve.app_of(find, (self.host,), self.port, 443)
        return serve.make_server(app, (self.certificate / SERVER_CERT, self.certificate / SERVER_KEY))

    def text(self, name: str, encoding: str = "utf-8", notes: Sequence[str] = ()) -> str:
        """What the terminal shows: the address, also for a camera, notes, and how to trust the certificate."""
        code = drawn(self.address, encoding)
        return "\n".join(
            [
                f"{self.address}  types on {name}; Ctrl-C ends it",
                *([code] if code else []),
                "Everybody in this network can open it. What is typed stays on the phone.",
                *notes,
                "The browser warns of the certificate: go on to the page. Until the phone trusts the certificate, the",
                "page types and suggests, but it cannot be installed, and a reload needs this machine.",
                "To trust it:",
                f"  1. On the phone open {self.address.removesuffix('/')}{CERTIFICATE}",
                f"  2. Compare its SHA-256: {fingerprint(self.certificate / CA_CERT)}",
                "  3. Android: Settings, Security, Encryption and credentials, Install a certificate, CA certificate",
                "     iPhone: Settings, Profile Downloaded, Install; then General, About, Certificate Trust Settings",
                "  The key of its authority was not kept: it is good for this address alone. Remove it afterwards.",
            ]
        )


def drawn(address: str, encoding: str) -> str:
    """Return a QR code for a terminal of light letters on dark, or nothing where the terminal lacks the characters.

    Example:
      >>> drawn("https://192.168.1.5:8017/", "ascii")
      ''
    """
    import segno

    out = io.StringIO()
    segno.make(address, micro=False, error="m").terminal(out, compact=True)
    try:
        out.getvalue().encode(encoding)
    except UnicodeEncodeError:
        return ""
    return out.getvalue()
