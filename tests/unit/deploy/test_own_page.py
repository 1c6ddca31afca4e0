"""`keyfed server` shows its owner a page, says where it is, and shows none where it is told to."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from keyfed.cli.app import app
from keyfed.deploy import superlink
from keyfed.errors import ConfigError
from keyfed.wire.doors import listen


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The command, whose server says its lines and ends; it returns the command's result and what was served."""
    got = {}

    def served(home, host, port, *, more, say, **ignored):
        for line in more(None):
            say(line)
            address = line.rpartition(" ")[2]
            with urllib.request.urlopen(address, timeout=20) as reply:
                got[address] = reply.read().decode()

    monkeypatch.setattr(superlink, "serve", served)

    def call(*arguments):
        got.clear()
        return CliRunner().invoke(app, ["server", "--home", str(tmp_path / "home"), *arguments]), dict(got)

    return call


def test_the_page_is_there_from_the_start_and_gone_with_the_server(server, tmp_path):
    result, got = server()
    assert result.exit_code == 0, result.output
    ((address, page),) = got.items()
    assert "No run yet" in page
    assert address.startswith("http://127.0.0.1:")
    assert f"your page, on this machine only: {address}" in result.output
    assert (tmp_path / "home" / "page.txt").read_text() == f"{address}\n"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)


def test_the_log_of_others_stays_open(server):
    class Other(logging.Handler):
        closed = False

        def close(self):
            self.closed = True
            super().close()

    other = Other()
    server()
    assert not other.closed


def test_its_port_can_be_chosen(server):
    with listen(0) as free:
        port = free.getsockname()[1]
    ((address, _),) = server("--page", str(port))[1].items()
    assert address.startswith(f"http://127.0.0.1:{port}/")
    with listen(0) as taken:
        result, got = server("--page", str(taken.getsockname()[1]))
    assert isinstance(result.exception, ConfigError)
    assert "choose another with --page" in str(result.exception)
    assert got == {}


def test_there_need_be_none(server, tmp_path):
    result, got = server("--no-page")
    assert (result.exit_code, got) == (0, {})
    assert "page" not in result.output
    assert not (tmp_path / "home").exists()
    assert "leave one of them out" in str(server("--no-page", "--page", "0")[0].exception)
