"""One-time links: what is kept, what enrols, what is refused and why."""

from __future__ import annotations

import json
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from keyfed.deploy.enrolment import forget
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.links import LINKS, KnownLinks, enrol_page, link_of, make_links, page_leaves, read_links
from keyfed.errors import ConfigError, DeployError, RunError
from keyfed.wire.pages import Declined
from keyfed.wire.roster import Enrolled, Roster, is_page, page_key, roster_hash

NOW = 1_800_000_000.0


@pytest.fixture
def home(tmp_path):
    return ServerHome(tmp_path)


def request(token, name="", private=None, change=None):
    private = private or Ed25519PrivateKey.generate()
    identity = private.public_key().public_bytes_raw().hex()
    said = {"format": "keyfed-web-enrol-1", "token": token, "name": name, "identity": identity}
    text = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(said | {"signature": private.sign(text).hex()} | (change or {})).encode()


def refused(home, data, now=NOW):
    with pytest.raises(Declined) as found:
        enrol_page(home, data, now)
    assert "\n" not in str(found.value)
    return found.value.status, found.value.error


def test_a_link_enrols_one_page_and_is_known_by_its_sum_only(home):
    (token,) = make_links(home, name="anna", now=NOW)
    assert len(token) == 43
    assert token not in (home.path / LINKS).read_text()
    assert KnownLinks(home).is_enrolling(NOW)
    private = Ed25519PrivateKey.generate()
    told = enrol_page(home, request(token, "bert", private), NOW + 1)
    roster = Roster(home.roster)
    assert told == {"name": "anna", "roster": roster_hash(roster.marks())}
    entry = roster.entries["anna"]
    assert is_page(entry)
    assert entry.node_key == page_key(private.public_key().public_bytes_raw())
    assert not KnownLinks(home).is_enrolling(NOW)
    assert refused(home, request(token)) == (403, "link")
    assert list(Roster(home.roster).entries) == ["anna"]


def test_names_are_the_link_s_or_the_page_s_or_drawn(home):
    tokens = make_links(home, 2, now=NOW)
    assert enrol_page(home, request(tokens[0], "carla"), NOW)["name"] == "carla"
    assert enrol_page(home, request(tokens[1]), NOW)["name"].startswith("page-")
    assert len({link.used for link in read_links(home).values()}) == 2


def test_what_is_refused_spends_no_link(home):
    private = Ed25519PrivateKey.generate()
    token, other = make_links(home, 2, hours=1, now=NOW)
    Roster(home.roster).write({"taken": Enrolled("00" * 32, "11" * 32, "")})
    for data, expected in [
        (b"{", (400, "malformed")),
        (b"[" * 100_000, (400, "malformed")),
        (b"x" * 10_000, (400, "malformed")),
        (request(token, change={"name": "someone-else"}), (400, "malformed")),  # the signature covers it
        (request(token, change={"more": 1}), (400, "malformed")),
        (request("short"), (403, "link")),
        (request(7), (403, "link")),
        (request("A" * 43), (403, "link")),
        (request(token, "taken"), (409, "name")),
        (request(token, "no name"), (409, "name")),
        (request(token, "../../x"), (409, "name")),
        (request(token, "n" * 65), (409, "name")),
    ]:
        assert refused(home, data) == expected, data[:200]
    assert refused(home, request(token), NOW + 3601) == (403, "link")
    assert enrol_page(home, request(token, "anna", private), NOW)["name"] == "anna"
    assert refused(home, request(other, "again", private)) == (409, "name")  # one key, one name
    forget(home, "anna")
    assert refused(home, request(other, "anna", private)) == (409, "name")  # its keys were sent away
    assert enrol_page(home, request(other, "anna"), NOW)["name"] == "anna"  # a new page of that person


def test_an_answer_that_was_lost_is_repeated_to_the_same_page_alone(home):
    private = Ed25519PrivateKey.generate()
    (token,) = make_links(home, hours=1, name="anna", now=NOW)
    first = enrol_page(home, request(token, "x", private), NOW)
    before = (home.roster.read_bytes(), (home.path / LINKS).read_bytes())
    make_links(home, now=NOW + 1)  # a link that is used stays known until it expires
    assert enrol_page(home, request(token, "y", private), NOW + 2) == first
    assert home.roster.read_bytes() == before[0]
    assert refused(home, request(token, "x")) == (403, "link")  # another identity
    assert refused(home, request(token, "x", private, {"name": "z"})) == (400, "malformed")  # not signed by it
    forget(home, "anna")
    assert refused(home, request(token, "x", private)) == (403, "link")
    make_links(home, now=NOW + 3601)
    assert len(read_links(home)) == 2
    assert enrol_page(home, request(make_links(home, name="anna", now=NOW)[0]), NOW)["name"] == "anna"  # a new device
    assert refused(home, request(token, "x", private)) == (403, "link")


def test_of_many_used_links_the_latest_stay_known(home, monkeypatch):
    monkeypatch.setattr("keyfed.deploy.links.MOST_LINKS", 3)
    for n in range(4):
        (token,) = make_links(home, now=NOW)
        private = Ed25519PrivateKey.generate()
        enrol_page(home, request(token, f"page-{n}", private), NOW)
    assert [link.used for link in read_links(home).values()] == ["page-1", "page-2", "page-3"]
    make_links(home, 3, now=NOW)
    assert [link.used for link in read_links(home).values()] == [None] * 3
    with pytest.raises(ConfigError, match="3 links are open"):
        make_links(home, now=NOW)


def test_of_many_pages_that_come_at_the_same_time_one_gets_the_link(home):
    (token,) = make_links(home)
    found, ready = [], threading.Barrier(6)

    def come():
        data = request(token)
        ready.wait()
        try:
            found.append(enrol_page(home, data)["name"])
        except Declined as e:
            found.append(e.error)

    comers = [threading.Thread(target=come) for _ in range(6)]
    for one in comers:
        one.start()
    for one in comers:
        one.join()
    assert found.count("link") == 5
    assert len(Roster(home.roster).entries) == 1


def test_a_page_leaves_by_its_own_identity_only(home):
    private = Ed25519PrivateKey.generate()
    enrol_page(home, request(make_links(home)[0], "anna", private))
    with pytest.raises(DeployError, match="another client"):
        page_leaves(home, "anna", b"\0" * 32)
    page_leaves(home, "anna", private.public_key().public_bytes_raw())
    assert Roster(home.roster).names() == []


def test_links_that_expired_are_forgotten_and_what_cannot_be_made_is_said(home):
    make_links(home, 3, hours=1, now=NOW)
    make_links(home, now=NOW + 7200)
    assert len(read_links(home)) == 1
    for count, hours, name, says in [(2, 1, "anna", "one link"), (1, 0, None, "hours"), (1, 1, "no name", "name")]:
        with pytest.raises(ConfigError, match=says):
            make_links(home, count, hours, name, NOW)
    with pytest.raises(ConfigError, match="10,000"):
        make_links(home, 10_000, now=NOW + 7200)
    (home.path / LINKS).write_text('{"x": {"expires": 1}}')
    with pytest.raises(RunError, match="delete it"):
        read_links(home)


def test_a_link_names_the_server_where_the_page_is_from_elsewhere():
    assert link_of("https://a:1", "t") == "https://a:1/#join=t"
    assert link_of("https://[::1]:1", "t", "https://b/") == "https://b/#join=t&server=https://[::1]:1"
