"""The owner's page of a server: who gets it, under which policy, and that it is read anew for every request."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
from contextlib import ExitStack
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn")

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.runs import begun_runs, noted
from keyfed.errors import ConfigError
from keyfed.reports import live
from keyfed.reports.live import SECONDS
from keyfed.wire.doors import LOCAL, listen


def line(round: int, clients: int = 5, **more: Any) -> dict[str, Any]:
    """A round's line as a run with real clients writes it."""
    return {
        "round": round, "loss": 5.0 - round / 10, "cohort": clients, "present": clients + 2, "reported": clients,
        "contributors": [f"c{k}" for k in range(clients)], "refused": {}, "lost": {}, "abandoned": False,
        "traffic": {"down": 1000 * clients, "up": 900 * clients, "control": 0}, "seconds": 10.0 + round,
        "valid": {"nats": 4.5, "perplexity": 90.017}, **more,
    }  # fmt: skip


def owner_page(home, port):
    return live.owner_page(lambda: begun_runs(home), port)


def live_page(home, *more, **options):
    return live.live_page(begun_runs(home), *more, **options)


def write_lines(folder, *lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture
def home(tmp_path):
    """A home with one run that works."""
    write_lines(tmp_path / "run", line(1), line(2))
    found = ServerHome(tmp_path / "home")
    found.path.mkdir()
    with noted(found, "11", tmp_path / "run"):
        yield found


def ask(address, path=None, method="GET", hosts=None):
    """Return status, headers and body of a request."""
    parts = urlsplit(address)
    talk = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        talk.putrequest(method, parts.path if path is None else path, skip_host=True)
        for host in [f"127.0.0.1:{parts.port}"] if hosts is None else hosts:
            talk.putheader("Host", host.replace("PORT", str(parts.port)))
        talk.endheaders()
        answer = talk.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        talk.close()


def test_only_who_has_the_address_gets_the_page(home):
    with owner_page(home, 0) as address:
        status, headers, body = ask(address)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "<h1>run</h1>" in body
        assert ask(address, hosts=["localhost:PORT"])[0] == 200
        key = urlsplit(address).path.strip("/")
        assert len(key) >= 32
        for path in ("/", f"/{key}", f"/{key}x/", f"/{key[:-1]}/", "//", f"/{key}/x", f"/{key.swapcase()}/", "/%FF/"):
            status, _, body = ask(address, path)
            assert (status, body) == (404, "not found"), path
    with owner_page(home, 0) as again:
        assert urlsplit(again).path.strip("/") != key, "a key is of one start"


@pytest.mark.parametrize("hosts", [["evil.example:PORT"], ["127.0.0.1"], ["[::1]:PORT"], [], ["127.0.0.1:PORT"] * 2])
def test_another_host_gets_nothing(home, hosts):
    with owner_page(home, 0) as address:
        status, headers, body = ask(address, hosts=hosts)
        assert status == 400
        assert "run" not in body.replace("runs", "")
        assert headers.get("access-control-allow-origin") is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_reading(home, method):
    with owner_page(home, 0) as address:
        status, headers, body = ask(address, method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert "<html" not in body
        assert ask(address, method="HEAD")[::2] == (200, "")


def test_the_policy_allows_the_page_its_own_style_and_nothing_else(home):
    with owner_page(home, 0) as address:
        _, headers, body = ask(address)
        refused = ask(address, "/")[1]
    (style,) = re.findall(r"<style>(.*?)</style>", body, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "style-src": f"'sha256-{digest}'", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'",
    }  # fmt: skip
    for found in (headers, refused):
        assert found["content-security-policy"] == headers["content-security-policy"]
        assert (found["cache-control"], found["referrer-policy"]) == ("no-store", "no-referrer")
        assert (found["x-content-type-options"], found["cross-origin-resource-policy"]) == ("nosniff", "same-origin")
        assert "server" not in found
        assert "set-cookie" not in found
    assert Tags(body).names.isdisjoint({"script", "iframe", "img", "link", "object", "form", "base"})
    assert all(href.startswith("?") for href in Tags(body).links)


class Tags(HTMLParser):
    """The names of a page's elements, where its links lead, and the attributes that it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        self.attributes |= {name for name, _ in attrs}


def test_it_is_read_anew_for_every_request(home, tmp_path):
    with owner_page(home, 0) as address:
        assert ">2</p>" in ask(address)[2]
        write_lines(tmp_path / "run", line(1), line(2), line(3))
        assert ">3</p>" in ask(address)[2]
        (tmp_path / "run" / "metrics.jsonl").unlink()
        assert ">0</p>" in ask(address)[2]


def test_it_listens_on_this_machine_alone(home):
    with owner_page(home, 0) as address, socket.socket() as other:
        port = urlsplit(address).port
        assert urlsplit(address).hostname == "127.0.0.1"
        other.bind(("127.0.0.2", port))  # free: the page has one address, not all


def test_mute_connections_keep_no_place(home):
    """One more than there is room for closes the one that waits longest."""
    with owner_page(home, 0) as address, ExitStack() as stack:
        port = urlsplit(address).port
        mute = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(LOCAL.total + 6)]
        assert ask(address)[0] == 200
        mute[0].settimeout(20)
        assert mute[0].recv(1) == b""


def test_nothing_listens_afterwards(home):
    with owner_page(home, 0) as address:
        port = urlsplit(address).port
    with socket.socket() as talk:
        assert talk.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_that_is_taken_is_said_with_its_option(home):
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} is taken; choose another with --page"),
            owner_page(home, port),
        ):
            pass


def test_a_page_reads_itself_again_unless_it_is_held(home):
    again = f'<meta http-equiv="refresh" content="{SECONDS}">'
    assert again in live_page(home)
    assert again not in live_page(home, hold=True)
    with owner_page(home, 0) as address:
        path = urlsplit(address).path
        assert again in ask(address)[2]
        assert again not in ask(address, f"{path}?run=11&hold=1")[2]


def test_each_run_has_a_page_and_an_unknown_one_is_the_newest(home, tmp_path):
    write_lines(tmp_path / "other", line(1))
    (tmp_path / "other" / "result.json").write_text('{"test": {"perplexity": 77.7}}')
    with noted(home, "9", tmp_path / "other"):
        pass
    page = live_page(home)
    assert "<h1>other</h1>" in page
    assert '<span class="state finished">finished</span>' in page
    assert {"?run=9", "?run=11"} <= set(Tags(page).links)
    assert "<h1>run</h1>" in live_page(home, "11")
    assert '<span class="state running">running</span>' in live_page(home, "11")
    for unknown in ("12", "../../etc", "<b>", "9" * 5000):
        assert "<h1>other</h1>" in live_page(home, unknown)


def test_a_server_without_runs_has_a_page(tmp_path):
    page = live_page(ServerHome(tmp_path / "nowhere"))
    assert "No run yet" in page
    assert "keyfed train --federation" in page


def test_names_of_folders_are_text(tmp_path):
    home = ServerHome(tmp_path)
    out = tmp_path / "<script>alert(1)<" / '"><img src=x onerror=y>'
    out.mkdir(parents=True)
    (out / "run.toml").write_text('[method]\nname = "<script>x"\n[model]\nname = "\'><svg onload=y>"\n')
    write_lines(out, line(1, refused={"<i>anna": "<b>no answer"}, traffic={"down": "<u>", "up": [], "control": None}))
    with noted(home, "1", out), noted(home, "2", tmp_path / "a\nb\x07\u202e"):
        for page in (live_page(home, "1"), live_page(home, "2")):
            found = Tags(page)
            assert found.names.isdisjoint({"script", "img", "b", "i", "u"})
            assert not [name for name in found.attributes if name.startswith("on")]
            assert "\u202e" not in page
            assert "\x07" not in page
