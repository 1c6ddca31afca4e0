"""A client's home: keys once, settings kept, text no longer than wanted."""

from __future__ import annotations

import os
import stat
import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import (
    DAY,
    ClientHome,
    ClientRuns,
    check_name,
    check_server,
    check_when,
    expire,
    kept_files,
    open_home,
)
from keyfed.errors import ConfigError, DeployError


@pytest.fixture
def ca(tmp_path):
    make_certificates(tmp_path / "server", [])
    return tmp_path / "server" / "ca.crt"


def first(tmp_path, ca, **more):
    return open_home(tmp_path / "home", name="anna", server="127.0.0.1:9092", ca=ca, **more)


def test_the_first_start_makes_keys_that_only_the_owner_reads(tmp_path, ca):
    home = first(tmp_path, ca)
    for path in (home.node_key, home.identity_key, home.secret):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    key = serialization.load_ssh_private_key(home.node_key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert key.public_key() == serialization.load_ssh_public_key(home.node_public.read_bytes())
    assert len(home.identity_key.read_bytes()) == 32


def test_a_later_start_keeps_keys_and_settings(tmp_path, ca):
    (tmp_path / "notes.txt").write_text("hello\n")
    home = first(tmp_path, ca, data=tmp_path / "notes.txt", when="power,idle", keep_days=30, plain=True)
    keys = [p.read_bytes() for p in (home.node_key, home.identity_key, home.secret)]
    again = open_home(tmp_path / "home")
    assert again.settings() == home.settings()
    assert again.settings().when == ("power", "idle")
    assert again.data() == (tmp_path / "notes.txt").resolve()
    assert [p.read_bytes() for p in (again.node_key, again.identity_key, again.secret)] == keys
    changed = open_home(tmp_path / "home", when="always", keep_days=0, server="192.0.2.1:443").settings()
    assert (changed.when, changed.keep_days, changed.server, changed.plain) == ((), None, "192.0.2.1:443", True)


def test_a_first_start_without_what_it_needs_makes_nothing(tmp_path, ca):
    with pytest.raises(DeployError, match="--server and --ca and --name"):
        open_home(tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_another_name_needs_another_home(tmp_path, ca):
    first(tmp_path, ca)
    with pytest.raises(DeployError, match="another --home"):
        open_home(tmp_path / "home", name="bert")


def test_an_expired_authority_is_refused(tmp_path):
    import datetime

    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=5000)
    make_certificates(tmp_path / "old", [], now=long_ago)
    with pytest.raises(DeployError, match="expired"):
        open_home(tmp_path / "home", name="a", server="127.0.0.1:1", ca=tmp_path / "old" / "ca.crt")


@pytest.mark.parametrize("name", ["", ".hidden", "a b", "a/b", "../x", "é", "x" * 65, "a\n", "-x"])
def test_names_that_are_none(name):
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        check_name(name)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "https://h:1", "a b:1", "h:1x"])
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        check_server(address)


@pytest.mark.parametrize("address", ["fl.example.org:9092", "127.0.0.1:1", "[::1]:65535"])
def test_addresses(address):
    assert check_server(address) == address


def test_conditions_are_checked_by_name():
    assert check_when("power, idle,power") == ("power", "idle")
    assert check_when("always") == check_when("") == ()
    with pytest.raises(ConfigError, match="did you mean unmetered"):
        check_when("unmeterd")


def test_text_that_is_not_there_is_said(tmp_path, ca):
    with pytest.raises(ConfigError, match="is not there"):
        first(tmp_path, ca, data=tmp_path / "none")


def test_pause_and_resume(tmp_path, ca):
    home = first(tmp_path, ca)
    home.pause(True)
    assert ClientHome(home.path).paused()
    home.pause(False)
    home.pause(False)
    assert not home.paused()


def test_a_damaged_home_is_said(tmp_path, ca):
    home = first(tmp_path, ca)
    (home.path / "client.json").write_text("{}")
    with pytest.raises(DeployError, match="cannot be read"):
        home.settings()
    with pytest.raises(DeployError, match="not the home of a client"):
        ClientHome(tmp_path / "none").settings()


def old_and_new(folder):
    folder.mkdir(parents=True)
    for name, days in (("new.txt", 1), ("old.txt", 40), ("deep/old.txt", 31), ("deep/new.txt", 29)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text\n")
        os.utime(path, (time.time() - days * DAY,) * 2)
    return folder


def names(folder, paths):
    return sorted(p.relative_to(folder).as_posix() for p in paths)


def test_text_older_than_its_limit_is_deleted_in_the_home(tmp_path):
    folder = old_and_new(tmp_path / "text")
    assert expire(folder, None) == []
    assert names(folder, expire(folder, 30)) == ["deep/old.txt", "old.txt"]
    assert names(folder, (p for p in folder.rglob("*") if p.is_file())) == ["deep/new.txt", "new.txt"]


def test_what_is_hidden_or_in_a_hidden_folder_is_not_text(tmp_path):
    folder = old_and_new(tmp_path / "notes")
    for name in (".git/config", "deep/.cache/x.txt", ".hidden"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret\n")
    assert names(folder, kept_files(folder, 30)) == ["deep/new.txt", "new.txt"]
    assert len(kept_files(folder, None)) == 4


def test_links_have_the_age_of_their_files_and_are_never_deleted(tmp_path):
    elsewhere = old_and_new(tmp_path / "text" / ".elsewhere")  # in the folder: a link that leads out is not read
    for name in ("old.txt", "new.txt"):
        (tmp_path / "text" / name).symlink_to(elsewhere / name)
    assert names(tmp_path / "text", kept_files(tmp_path / "text", 30)) == ["new.txt"]
    assert expire(tmp_path / "text", 30) == []
    assert (tmp_path / "text" / "old.txt").is_symlink()
    assert (elsewhere / "old.txt").exists()


def test_text_elsewhere_is_passed_over_but_stays(tmp_path):
    folder = old_and_new(tmp_path / "notes")
    assert names(folder, kept_files(folder, 30)) == ["deep/new.txt", "new.txt"]
    assert len(kept_files(folder, None)) == 4
    assert kept_files(folder / "old.txt", 30) == []
    assert kept_files(folder / "old.txt", None) == [folder / "old.txt"]
    assert (folder / "old.txt").exists()


def test_leaving_deletes_the_home_and_not_the_text_elsewhere(tmp_path, ca):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine\n")
    home = first(tmp_path, ca, data=tmp_path / "notes")
    home.delete()
    assert not home.path.exists()
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine\n"


@pytest.mark.parametrize("place", ["thesis.tex", "text/letter.txt"])
def test_a_folder_with_other_things_does_not_become_a_home(tmp_path, ca, place):
    mine = tmp_path / "home" / place
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    (tmp_path / "home").chmod(0o755)
    with pytest.raises(DeployError, match="holds other things"):
        first(tmp_path, ca)
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    assert mine.read_text() == "mine\n"


def test_text_in_the_home_is_refused_but_for_its_own_folder(tmp_path, ca):
    home = first(tmp_path, ca)
    (home.path / "notes").mkdir()
    for inside in (home.path, home.path / "notes"):
        with pytest.raises(ConfigError, match="client's own folder"):
            open_home(home.path, data=inside)
    assert open_home(home.path, data=home.text).data() == home.text


def test_without_an_authority_nothing_is_made(tmp_path):
    with pytest.raises(DeployError, match="operator"):
        open_home(tmp_path / "home", name="a", server="127.0.0.1:1", ca=tmp_path / "none.crt")
    assert not (tmp_path / "home").exists()


def test_a_home_behind_a_link_is_deleted_with_its_link(tmp_path, ca):
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    first(tmp_path, ca).delete()
    assert not (tmp_path / "real").exists()
    assert not (tmp_path / "home").is_symlink()


def test_a_client_is_alone_in_its_home(tmp_path, ca):
    home = first(tmp_path, ca)
    with home.alone(), pytest.raises(ClientRuns, match="runs there already"), ClientHome(home.path).alone():
        pass
    with home.alone():
        pass


def test_what_is_no_home_is_not_deleted(tmp_path):
    (tmp_path / "precious").write_text("x")
    ClientHome(tmp_path).delete()
    assert (tmp_path / "precious").exists()
