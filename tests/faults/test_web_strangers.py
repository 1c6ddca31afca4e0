"""The endpoint for pages under requests of strangers: whatever they send, one typed line comes back, none is logged."""

from __future__ import annotations

import asyncio
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.links import LINKS, KnownLinks, make_links, read_links
from keyfed.deploy.web import Endpoint, Page
from keyfed.keyboard.serve import app_of
from keyfed.wire.pages import Mailboxes
from tests.examples import examples

from .test_web import NOW, Ask, clock

KEY = Ed25519PrivateKey.generate()
SURROGATE = st.characters(categories=["Cs"])
TEXT = st.text(max_size=50) | st.text(SURROGATE, max_size=50) | st.just("\ud800" * 43)
NUMBER = st.integers() | st.floats() | st.sampled_from([10**400, -(10**4000), 10**308, 0])
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
DEEP = st.builds(
    lambda depth, pair: (pair[0] * depth + "1" + pair[1] * depth).encode(),
    st.integers(1, 1_500),
    st.sampled_from([("[", "]"), ('{"a":', "}")]),
)
PATHS = ["about", "enrol", "next", "answer", "leave", "", "other", "../x", "enrol/", "\x00", "é\ufffd", "a" * 5_000]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"authorization", b"keyfed-id", b"keyfed-sum", b"keyfed-error", b"content-length", b"origin",
                         b"host", b"Host", b"content-type", b"\xff", b"x"]),
        st.binary(max_size=80) | st.sampled_from([b"-1", b"9" * 30, b"1" * 20, b"Keyfed a.1." + b"0" * 128, b"0" * 64]),
    ),
    max_size=5,
)  # fmt: skip


def signed(said, change=None):
    """A request to enrol that this key has signed, whatever its values are."""
    said = {"format": "keyfed-web-enrol-1", "identity": KEY.public_key().public_bytes_raw().hex(), **said}
    text = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**said, "signature": KEY.sign(text).hex(), **(change or {})}).encode()


@pytest.fixture
def home(tmp_path):
    return ServerHome(tmp_path)


@pytest.fixture
def endpoint(home, tmp_path, caplog):
    """An endpoint with an open link and a page of one file; no line may be logged by it."""
    (token,) = make_links(home, now=NOW)
    (tmp_path / "index.html").write_text("<p>a page")
    site = app_of({"/": (tmp_path / "index.html", "no-cache")}.get, ["fl"], 1, 1)
    made = Endpoint(home, site, Page("1", "h"), Mailboxes(clock=clock), clock=clock)
    made.token = token
    yield made
    assert [record.getMessage() for record in caplog.records] == []


def request(endpoint, method, path, body=b"", headers=()):
    """Play one request; return its status and what its answer says."""
    ask = Ask(endpoint, "", body, signed=False)
    ask.scope |= {"method": method, "path": path, "query_string": b"", "raw_path": path.encode("latin-1", "replace")}
    ask.scope["headers"] = [(b"host", b"fl:1"), *headers]
    asyncio.run(ask.go())  # in real time: what reads files is in a thread
    return ask


def is_typed(ask):
    """Whether an answer is one typed line in JSON, or an answer to a request that is served."""
    if ask.status < 400:
        return True
    said = json.loads(ask.body)
    assert set(said) == {"error", "reason"}
    assert "\n" not in said["reason"]
    return 400 <= ask.status < 500


@given(st.sampled_from(PATHS), st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "x\ud800"]),
       st.binary(max_size=200) | DEEP | VALUE.map(lambda value: json.dumps(value).encode()), HEADERS)  # fmt: skip
@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_request_of_a_stranger_is_answered_in_one_typed_line(endpoint, path, method, body, headers):
    assert is_typed(request(endpoint, method, f"/federation/{path}", body, headers))


OPEN = "the token of an open link"
TOKENS = st.just(OPEN) | st.text(min_size=43, max_size=43) | st.text(SURROGATE, min_size=43, max_size=43) | VALUE


@given(TOKENS, VALUE, st.dictionaries(st.sampled_from(["format", "identity", "more"]), VALUE, max_size=1),
       st.dictionaries(st.sampled_from(["signature", "identity", "name"]), VALUE, max_size=1))  # fmt: skip
@settings(max_examples=examples(1_000), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_in_a_signed_request_to_enrol_are_answered_in_one_typed_line(endpoint, token, name, more, change):
    try:
        body = signed({"token": endpoint.token if token == OPEN else token, "name": name, **more}, change)
    except (ValueError, RecursionError):  # numbers that Python does not write
        return
    ask = request(endpoint, "POST", "/federation/enrol", body)
    assert is_typed(ask)
    assert ask.status >= 400 or token == OPEN


WRONG = ["\ud800" * 43, "é" * 43, "A" * 42 + "\n", "A" * 42 + "=", "A" * 44, 7, None, ["A" * 43]]


@pytest.mark.parametrize("token", WRONG, ids=range(len(WRONG)))
def test_a_token_is_43_letters_of_its_alphabet(endpoint, token):
    ask = request(endpoint, "POST", "/federation/enrol", signed({"token": token, "name": "x"}))
    assert ask.error == (403, "link")


@pytest.mark.parametrize("depth", [900, 950, 990, 1_000, 4_000])
def test_deep_values_in_a_signed_request_are_malformed(endpoint, depth):
    deep = b"[" * depth + b"]" * depth
    body = signed({"token": "A" * 43, "name": "x"})[:-1] + b', "more": ' + deep + b"}"
    assert request(endpoint, "POST", "/federation/enrol", body).error[0] in (400, 413)


@given(st.text(max_size=30), st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]), HEADERS)
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_files_of_the_page_are_served_or_refused(endpoint, path, method, headers):
    ask = request(endpoint, method, f"/{path}", headers=headers)
    assert ask.status in (200, 304, 400, 404, 405)


# ---------------------------------------------------------------- what is not foreseen


def broken(*given):
    raise ZeroDivisionError("words of a stranger")


def test_a_defect_is_one_typed_answer_and_a_line_without_words_of_the_request(home, caplog):
    endpoint = Endpoint(home, broken, Page("1", "h"), Mailboxes(clock=clock), clock=clock)
    endpoint._routes = {("GET", "about"): broken}
    for path in ("/federation/about", "/index.html"):
        ask = request(endpoint, "GET", path)
        assert ask.error == (500, "defect")
        assert "words" not in ask.body.decode()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(line.startswith("ZeroDivisionError in broken") and "words" not in line for line in lines)
    assert [record.exc_info for record in caplog.records] == [None, None]


def test_an_answer_that_has_begun_is_not_begun_again(home, caplog):
    async def half(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        broken()

    ask = request(Endpoint(home, half, Page("1", "h"), Mailboxes(clock=clock), clock=clock), "GET", "/")
    assert (ask.status, ask.body) == (200, b"")
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- what a stranger's request costs


def test_links_are_parsed_once_for_many_strangers_and_again_after_a_change(home, monkeypatch):
    make_links(home, 50, now=NOW)
    links = KnownLinks(home)
    read = []
    monkeypatch.setattr("keyfed.deploy.links.read_links", lambda home: read.append(1) or read_links(home))
    endpoint = Endpoint(home, None, Page("1", "h"), Mailboxes(clock=clock), clock=clock)
    for _ in range(20):
        assert json.loads(request(endpoint, "GET", "/federation/about").body)["enrolling"] is True
    assert len(read) == 1
    assert links.is_enrolling(NOW)
    assert not links.is_enrolling(NOW + 24 * 3600)
    (home.path / LINKS).unlink()
    assert not links.is_enrolling(NOW)
    assert json.loads(request(endpoint, "GET", "/federation/about").body)["enrolling"] is False


def test_a_token_that_nobody_made_waits_for_no_lock_and_checks_no_signature(endpoint, monkeypatch):
    monkeypatch.setattr("keyfed.deploy.links.one_at_a_time", broken)
    monkeypatch.setattr("keyfed.deploy.links.verify_document", broken)
    ask = request(endpoint, "POST", "/federation/enrol", signed({"token": "A" * 43, "name": "x"}))
    assert ask.error == (403, "link")
