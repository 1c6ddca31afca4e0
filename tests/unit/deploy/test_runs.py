"""Runs that were submitted to a server: noted in its home, the newest first, and whether their programs work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.runs import MOST_BYTES, MOST_RUNS, PAGE, RUNS, begun_runs, note_page, noted

HOLDS = """
import sys, time
from pathlib import Path
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.runs import noted
with noted(ServerHome(Path(sys.argv[1])), "7", Path("/runs/a")):
    print("holds", flush=True)
    time.sleep(60)
"""


def note(home: ServerHome, number: str, **said: object) -> Path:
    folder = home.path / RUNS
    folder.mkdir(exist_ok=True)
    path = folder / f"{number}.json"
    path.write_text(json.dumps(said))
    return path


def test_a_run_works_as_long_as_its_program(tmp_path):
    home = ServerHome(tmp_path)
    assert begun_runs(home) == []
    with noted(home, "12", Path("/runs/a")):
        (one,) = begun_runs(home)
        assert (one.number, one.out, one.works) == ("12", Path("/runs/a"), True)
        assert begun_runs(home) == [one]  # looking leaves it as it was
    (after,) = begun_runs(home)
    assert after == one._replace(works=False)
    assert (tmp_path / RUNS).stat().st_mode & 0o777 == 0o700


def test_a_run_that_was_killed_works_no_more(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        assert [run.works for run in begun_runs(ServerHome(tmp_path))] == [True]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
        assert [run.works for run in begun_runs(ServerHome(tmp_path))] == [False]
    finally:
        process.kill()
        process.communicate()


def test_the_newest_is_first_and_a_folder_that_goes_on_is_listed_once(tmp_path):
    home = ServerHome(tmp_path)
    for number, out, began in (("3", "/a", 30.0), ("20", "/b", 20.0), ("1", "/c", 10.0), ("9", "/c", 40.0)):
        note(home, number, out=out, began=began)
    assert [run.number for run in begun_runs(home)] == ["9", "3", "20"]


def test_at_most_so_many_are_listed(tmp_path):
    home = ServerHome(tmp_path)
    for number in range(MOST_RUNS + 5):
        note(home, str(number), out=f"/{number}", began=float(number))
    found = begun_runs(home)
    assert len(found) == MOST_RUNS
    assert found[0].number == str(MOST_RUNS + 4)


@pytest.mark.parametrize(
    "said",
    [
        b"", b"{", b"[]", b'{"out": 3, "began": 1}', b'{"out": "/a"}', b'{"out": "/a", "began": "x"}',
        b'{"out": "/a", "began": NaN}', b'{"out": "/a", "began": 1e99}', b'{"out": "a\\u0000b", "began": 1}',
        b"[" * 5000, b'{"out": "/a", "began": 1}' + b" " * MOST_BYTES, b"\xff",
    ],
)  # fmt: skip
def test_a_damaged_note_is_left_out(tmp_path, said):
    home = ServerHome(tmp_path)
    note(home, "1", out="/whole", began=1.0)
    (tmp_path / RUNS / "2.json").write_bytes(said)
    (tmp_path / RUNS / "other.json").write_text('{"out": "/a", "began": 1}')
    (tmp_path / RUNS / "3.json").mkdir()
    assert [run.number for run in begun_runs(home)] == ["1"]


def test_the_address_of_the_page_is_kept_for_the_owner(tmp_path):
    home = ServerHome(tmp_path / "home")
    note_page(home, "http://127.0.0.1:1/x/")
    assert (home.path / PAGE).read_text() == "http://127.0.0.1:1/x/\n"
    assert home.path.stat().st_mode & 0o777 == 0o700
