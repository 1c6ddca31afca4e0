"""Downloads from a local server or a fake one: whole and right, or not there at all."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import threading
import urllib.error
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from keyfed.errors import DownloadError
from keyfed.text import catalogue
from keyfed.text.catalogue import RemoteFile, fetch

TEXT = b"some text\n" * 20_000


def remote(url: str | None = "http://example.invalid/a.txt", data: bytes = TEXT, path: str = "a.txt") -> RemoteFile:
    return RemoteFile(path, url, hashlib.sha256(data).hexdigest())


class Answer(io.BytesIO):
    """What `urlopen` returns, of a stated length."""

    def __init__(self, data: bytes, length: int | None = None) -> None:
        super().__init__(data)
        self.headers = Message()
        self.headers["Content-Length"] = str(len(data) if length is None else length)


class Opener:
    """Gives each answer in turn; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.timeouts: list[float] = []

    def __call__(self, url: str, *, timeout: float) -> Any:
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def http_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", code, "reason", Message(), io.BytesIO())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "PAUSE", 0.0)


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a.txt" else 404)
            self.send_header("Content-Length", str(len(TEXT)))
            self.end_headers()
            self.wfile.write(TEXT)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_a_file_comes_whole_from_a_server(server: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    assert fetch(remote(f"{server}/a.txt"), target) == target
    assert target.read_bytes() == TEXT
    assert list(target.parent.iterdir()) == [target]


def test_an_absent_file_is_an_error_at_once(server: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="HTTP 404"):
        fetch(remote(f"{server}/b.txt"), tmp_path / "b.txt")
    assert not list(tmp_path.iterdir())


def test_a_wrong_checksum_keeps_nothing_and_gives_both_sums(tmp_path: Path) -> None:
    wrong = b"another text"
    with pytest.raises(DownloadError) as caught:
        fetch(remote(), tmp_path / "a.txt", opener=Opener(Answer(wrong)))
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert hashlib.sha256(TEXT).hexdigest() in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_survives_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"old")
    with pytest.raises(DownloadError):
        fetch(remote(), tmp_path / "a.txt", opener=Opener(Answer(b"wrong")))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_failures_of_the_network_are_tried_again(tmp_path: Path) -> None:
    opener = Opener(urllib.error.URLError("no route"), Answer(TEXT[:99], len(TEXT)), Answer(TEXT))
    fetch(remote(), tmp_path / "a.txt", opener=opener)
    assert (tmp_path / "a.txt").read_bytes() == TEXT
    assert opener.timeouts == [20.0] * 3


@pytest.mark.parametrize("failure", [TimeoutError("timed out"), ConnectionResetError("reset"), http_error(503)])
def test_tries_are_bounded(tmp_path: Path, failure: Exception) -> None:
    opener = Opener(*[failure] * 5)
    with pytest.raises(DownloadError, match="3 tries") as caught:
        fetch(remote(), tmp_path / "a.txt", opener=opener)
    assert len(opener.answers) == 2
    assert str(tmp_path / "a.txt") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_connection_that_breaks_midway_is_tried_again(tmp_path: Path) -> None:
    class Breaking(Answer):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("reset")

    fetch(remote(), tmp_path / "a.txt", opener=Opener(Breaking(TEXT), Answer(TEXT)))
    assert (tmp_path / "a.txt").read_bytes() == TEXT


def test_a_packed_address_is_unpacked_under_a_plain_name(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT)
    fetch(remote("http://x/y.gz"), tmp_path / "a.txt", opener=Opener(Answer(packed)))
    assert (tmp_path / "a.txt").read_bytes() == TEXT
    fetch(remote("http://x/y.gz", packed, "a.gz"), tmp_path / "a.gz", opener=Opener(Answer(packed)))
    assert (tmp_path / "a.gz").read_bytes() == packed
    with pytest.raises(DownloadError, match="damaged gzip"):
        fetch(remote("http://x/y.gz"), tmp_path / "b.txt", opener=Opener(Answer(b"not packed")))


def test_no_address(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no stable address"):
        fetch(remote(None), tmp_path / "a.txt")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DownloadError, match="cannot be written"):
        fetch(remote(), tmp_path / "file" / "a.txt", opener=Opener(Answer(TEXT)))


def test_a_bar_is_drawn_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(remote(), tmp_path / "a.txt", opener=Opener(Answer(TEXT)))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    fetch(remote(), tmp_path / "a.txt", opener=Opener(Answer(TEXT)))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "a.txt" in shown.err
