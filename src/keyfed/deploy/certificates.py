"""Our own certificate authority and the server's certificate.

The authority's key signs server certificates and nothing else; keep it off the server if you can. Clients get `ca.crt`.
ECDSA on P-256, SHA-256. Key files are readable by their owner only, and nothing is overwritten.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keyfed.errors import DeployError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    Issued = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]

CA_DAYS, SERVER_DAYS = 3650, 397
SOON_DAYS = 30
CA_KEY, CA_CERT, SERVER_KEY, SERVER_CERT = "ca.key", "ca.crt", "server.key", "server.crt"


def make_certificates(
    folder: Path,
    hosts: Sequence[str],
    *,
    now: datetime.datetime | None = None,
    days: int = SERVER_DAYS,
) -> None:
    """Make ca.key, ca.crt, server.key and server.crt in a folder.

    An authority that is there already is used again, so that clients keep the `ca.crt` they have.

    Args:
      hosts: names and addresses clients reach the server under; 127.0.0.1, ::1 and localhost are always in.
      days: how long the server's certificate is valid.

    Raises:
      DeployError: the server has a certificate already, or half an authority is there.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    for name in (SERVER_KEY, SERVER_CERT):
        if (folder / name).exists():
            raise DeployError(f"{folder / name} is there already; move it away to make a new one")
    there = [(folder / name).exists() for name in (CA_KEY, CA_CERT)]
    if any(there) and not all(there):
        raise DeployError(f"{folder} has one of {CA_KEY} and {CA_CERT} only; put the other back, or move both away")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = _read_authority(folder) if all(there) else _make_authority(now)
    if not all(there):
        _write(authority, folder / CA_KEY, folder / CA_CERT)
    names = [_san(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])]
    _write(_make_server(authority, names, now, days), folder / SERVER_KEY, folder / SERVER_CERT)


def make_for_one_address(folder: Path, address: str, *, now: datetime.datetime | None = None) -> None:
    """Make ca.crt, server.key and server.crt for one address, replacing those of before.

    The authority's key is never written: a device that trusts `ca.crt` trusts this one certificate and no other.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = _make_authority(now, f"Keyfed keyboard at {address}", SERVER_DAYS)
    server = _make_server(authority, [_san(address)], now, SERVER_DAYS, "Keyfed keyboard")
    for name in (CA_CERT, SERVER_CERT, SERVER_KEY):
        (folder / name).unlink(missing_ok=True)
    write_new(folder / CA_CERT, _pem(authority[1]))
    _write(server, folder / SERVER_KEY, folder / SERVER_CERT)


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a certificate, as phones show it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as e:
        raise DeployError(f"{path} cannot be read as a certificate: {e}") from None
    return found.fingerprint(hashes.SHA256()).hex(":").upper()


def check_certificate(path: Path, now: datetime.datetime | None = None, *, received: bool = False) -> tuple[str, ...]:
    """Raise DeployError unless a certificate can be read and is valid now; return what to say about it otherwise.

    Args:
      received: it is from a server's operator, as a client's ca.crt is; else the server makes it.
    """
    from cryptography import x509

    from keyfed.deploy.homes import home_option

    now = now or datetime.datetime.now(datetime.UTC)
    make = f"keyfed server --make-certificates{home_option(path.parent)}"
    how = "the server's operator has it" if received else f"`{make}` makes it"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise DeployError(f"{path} is not there; {how}") from None
    except OSError as e:
        raise DeployError(f"{path} cannot be read ({e.strerror}); {how}") from None
    except ValueError:
        raise DeployError(f"{path} is no certificate; expected the PEM file of one: {how}") from None
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise DeployError(f"{path} is valid from {start:%Y-%m-%d %H:%M} UTC only; is this machine's clock right?")
    if now >= end:
        how = (
            "ask the server's operator for a new one and give it with --ca"
            if received
            else f"on the server, move it and its key away and run `{make}`"
        )
        raise DeployError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC; {how}")
    left = (end - now).days
    return (f"{path} expires in {left} days, on {end:%Y-%m-%d}",) if left < SOON_DAYS else ()


def hosts_of(path: Path) -> list[str]:
    """Return the names and addresses a certificate is for."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as e:
        raise DeployError(f"{path} cannot be read as a server's certificate: {e}") from None
    return [
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    ]


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read; refuse to overwrite."""
    write_new(path, data, 0o600)


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a new file; refuse to overwrite."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise DeployError(f"{path} is there already; move it away to make a new one") from None
    with os.fdopen(handle, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _make_authority(now: datetime.datetime, name: str = "Keyfed federation authority", days: int = CA_DAYS) -> Issued:
    from cryptography import x509

    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(sign_certificates=True), True)]
    return _issue(name, now, days, extensions)


def _make_server(
    authority: Issued, names: Sequence[x509.GeneralName], now: datetime.datetime, days: int, name: str = "Keyfed server"
) -> Issued:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions = [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(sign_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[0].public_key()), False),
    ]
    return _issue(name, now, days, extensions, authority)


def _issue(
    text: str,
    now: datetime.datetime,
    days: int,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    authority: Issued | None = None,
) -> Issued:
    """Make a key and its certificate, signed by an authority; by itself where there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority[1].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ a little
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return key, builder.sign(key if authority is None else authority[0], hashes.SHA256())


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=sign_certificates, crl_sign=sign_certificates, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _san(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise DeployError(f'"{host}" is neither an address nor a host name (ASCII only)') from None


def _write(issued: Issued, key: Path, certificate: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    write_private(key, issued[0].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_new(certificate, _pem(issued[1]))


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _read_authority(folder: Path) -> Issued:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
    except (OSError, ValueError, TypeError) as e:
        raise DeployError(f"{folder / CA_KEY}: the authority cannot be read ({e})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise DeployError(f"{folder / CA_KEY} is not the key of {CA_CERT}")
    return key, certificate
