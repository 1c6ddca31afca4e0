"""Our own authority and the server's certificate."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import threading

import pytest

from keyfed.deploy.certificates import check_certificate, hosts_of, make_certificates
from keyfed.errors import DeployError

NOW = datetime.datetime.now(datetime.UTC)


def day(number):
    return NOW + datetime.timedelta(days=number)


def test_four_files_whose_keys_only_the_owner_reads(tmp_path):
    tmp_path.chmod(0o755)
    make_certificates(tmp_path, ["fl.example.org", "192.0.2.7"])
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ca.crt", "ca.key", "server.crt", "server.key"]
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert set(hosts_of(tmp_path / "server.crt")) == {"fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"}


def test_nothing_is_overwritten(tmp_path):
    make_certificates(tmp_path, [])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(DeployError, match="is there already"):
        make_certificates(tmp_path, [])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_new_server_certificate_is_from_the_authority_that_clients_have(tmp_path):
    make_certificates(tmp_path, [])
    authority = (tmp_path / "ca.crt").read_bytes()
    for name in ("server.key", "server.crt"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    make_certificates(tmp_path, ["new.example.org"])
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert handshake(tmp_path, tmp_path / "ca.crt") == "ok"


def test_half_an_authority_is_an_error(tmp_path):
    make_certificates(tmp_path, [])
    for name in ("ca.key", "server.key", "server.crt"):
        (tmp_path / name).unlink()
    with pytest.raises(DeployError, match=r"one of ca\.key and ca\.crt only"):
        make_certificates(tmp_path, [])


def test_an_authority_whose_key_is_another_is_an_error(tmp_path):
    make_certificates(tmp_path / "a", [])
    make_certificates(tmp_path / "b", [])
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    for name in ("server.key", "server.crt"):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(DeployError, match=r"not the key of ca\.crt"):
        make_certificates(tmp_path / "a", [])


@pytest.mark.parametrize(
    ("when", "says"), [(-2, "valid from"), (8, "expired on"), (400, "expired on")], ids=["early", "late", "much-later"]
)
def test_a_certificate_outside_its_dates_is_said(tmp_path, when, says):
    make_certificates(tmp_path, [], days=7)
    with pytest.raises(DeployError, match=says):
        check_certificate(tmp_path / "server.crt", day(when))


def test_a_certificate_that_expires_soon_is_noted(tmp_path):
    make_certificates(tmp_path, [], days=40)
    assert check_certificate(tmp_path / "server.crt", day(1)) == ()
    (line,) = check_certificate(tmp_path / "server.crt", day(20))
    assert "expires in 19 days" in line or "expires in 20 days" in line


def test_what_is_no_certificate_is_said(tmp_path):
    with pytest.raises(DeployError, match="--make-certificates"):
        check_certificate(tmp_path / "server.crt")
    (tmp_path / "server.crt").write_text("hello")
    with pytest.raises(DeployError, match="is no certificate"):
        check_certificate(tmp_path / "server.crt")


def test_a_client_is_told_to_ask_the_operator(tmp_path):
    with pytest.raises(DeployError, match="the server's operator has it"):
        check_certificate(tmp_path / "ca.crt", received=True)
    make_certificates(tmp_path, [], days=7)
    with pytest.raises(DeployError, match=r"ask the server's operator.*--ca"):
        check_certificate(tmp_path / "server.crt", day(8), received=True)


def test_a_host_that_is_none_is_refused(tmp_path):
    with pytest.raises(DeployError, match="neither an address nor a host name"):
        make_certificates(tmp_path, ["bücher.example"])


def handshake(folder, ca):
    """One TLS connection over loopback; "ok" or the client's error."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def answer():
            try:
                link, _ = listening.accept()
                with link, server.wrap_socket(link, server_side=True) as tls:
                    tls.sendall(b"ok")
            except OSError:
                pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            context = ssl.create_default_context(cafile=str(ca))
            with (
                socket.create_connection(listening.getsockname(), 5) as link,
                context.wrap_socket(link, server_hostname="127.0.0.1") as tls,
            ):
                return tls.recv(2).decode()
        except ssl.SSLError as e:
            return e.verify_message if isinstance(e, ssl.SSLCertVerificationError) else str(e)
        finally:
            thread.join(5)


def test_a_client_trusts_the_server_through_our_authority_only(tmp_path):
    make_certificates(tmp_path / "ours", [])
    make_certificates(tmp_path / "others", [])
    assert handshake(tmp_path / "ours", tmp_path / "ours" / "ca.crt") == "ok"
    assert handshake(tmp_path / "ours", tmp_path / "others" / "ca.crt") != "ok"


def test_an_expired_certificate_is_refused_by_tls_itself(tmp_path):
    make_certificates(tmp_path, [], now=day(-10), days=5)
    assert "expired" in handshake(tmp_path, tmp_path / "ca.crt")
