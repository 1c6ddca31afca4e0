"""The ledger: written before, never under-counting, and silent once it was touched."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import PrivacyError
from keyfed.private.dp import ledger as budget
from keyfed.private.dp.accounting import Release, TreeRelease, epsilon
from keyfed.private.dp.ledger import HEAD, LEDGER, MOST_DELTA, Terms, check_against_metrics, open_ledger, read_ledger

TERMS = Terms(
    delta=1e-6, population=10_000, clients=10_000, cohort=100, called=100, z=1.0, mechanism="gaussian", sensitivity="S",
    randomness="system",
)  # fmt: skip
ROW = Release(1.0, 0.01)


def made(folder, rounds=5, terms=TERMS):
    ledger = open_ledger(folder, terms)
    for r in range(rounds):
        ledger.book(ROW, "update", r)
    return ledger


def test_a_ledger_read_again_gives_the_same_epsilon(tmp_path):
    ledger = made(tmp_path, 7)
    again = read_ledger(tmp_path)
    assert again.entries == ledger.entries
    assert again.epsilon("rdp") == epsilon([Release(1.0, 0.01, 7)], 1e-6, "rdp")
    assert again.epsilon() == ledger.epsilon()


@settings(max_examples=10, deadline=None)
@given(first=st.integers(0, 6), second=st.integers(1, 6))
def test_going_on_is_as_if_never_stopped(tmp_path_factory, first, second):
    stopped, whole = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    made(stopped, first)
    ledger = open_ledger(stopped, TERMS)
    for r in range(first, first + second):
        ledger.book(ROW, "update", r)
    assert (stopped / LEDGER).read_bytes() == (made(whole, first + second)._folder / LEDGER).read_bytes()
    assert read_ledger(stopped).epsilon("rdp") == read_ledger(whole).epsilon("rdp")


def test_a_row_is_on_the_disk_before_book_returns(tmp_path, monkeypatch):
    events = []
    fsync = os.fsync

    def watch(handle):
        events.append((tmp_path / LEDGER).read_bytes().count(b"\n"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    ledger = open_ledger(tmp_path, TERMS)
    ledger.book(ROW, "update", 0)
    assert 2 in events  # the row was in the file when it was synchronised
    assert (tmp_path / LEDGER).read_bytes().count(b"\n") == 2


def test_a_retried_round_has_a_row_of_its_own(tmp_path):
    ledger = made(tmp_path, 3)
    assert ledger.attempts(2) == 1
    assert ledger.book(ROW, "update", 2).attempt == 1
    assert len(read_ledger(tmp_path).rows()) == 4


def cuts(data):
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    return [last + 1, (last + len(data)) // 2, len(data) - 1]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_torn_last_line_is_counted(tmp_path, which):
    made(tmp_path, 4)
    path = tmp_path / LEDGER
    data, head = path.read_bytes(), json.loads((tmp_path / HEAD).read_text())
    path.write_bytes(data[: cuts(data)[which]])  # killed while the row was written: the head had not moved yet
    hashes = [json.loads(line)["hash"] for line in data.splitlines()[:-1]]
    (tmp_path / HEAD).write_text(json.dumps({"rows": head["rows"] - 1, "hash": hashes[-1]}))
    four = epsilon([Release(1.0, 0.01, 4)], 1e-6, "rdp")
    assert read_ledger(tmp_path).epsilon("rdp") == four
    assert open_ledger(tmp_path, TERMS).epsilon("rdp") == four
    assert read_ledger(tmp_path).entries[-1].what == "torn"
    assert open_ledger(tmp_path, TERMS).epsilon("rdp") == four  # mended once, not again and again


def test_killed_between_row_and_head(tmp_path):
    ledger = made(tmp_path, 3)
    head = (tmp_path / HEAD).read_bytes()
    ledger.book(ROW, "update", 3)
    (tmp_path / HEAD).write_bytes(head)
    assert len(open_ledger(tmp_path, TERMS).rows()) == 4
    assert json.loads((tmp_path / HEAD).read_text())["rows"] == 5


def test_killed_while_the_terms_were_written(tmp_path):
    (tmp_path / LEDGER).write_bytes(b'{"terms": {"del')
    with pytest.raises(PrivacyError, match="no whole line"):
        read_ledger(tmp_path)
    assert open_ledger(tmp_path, TERMS).rows() == []


def tamper_value(path):
    path.write_bytes(path.read_bytes().replace(b'"z": 1.0', b'"z": 9.0', 3))


def tamper_hashes(path):
    """Change the noise of a row and make the chain fit again: only the head can know."""
    lines, before = [json.loads(line) for line in path.read_bytes().splitlines()], budget.ORIGIN
    lines[2]["z"] = 50.0
    out = b""
    for line in lines:
        del line["hash"], line["before"]
        row, before = budget._line(line, before)
        out += row
    path.write_bytes(out)


def drop(index):
    def act(path):
        lines = path.read_bytes().splitlines(keepends=True)
        del lines[index]
        path.write_bytes(b"".join(lines))

    return act


def tear_the_last(path):
    path.write_bytes(path.read_bytes()[:-5])


def swap(path):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))


def lose_the_head(path):
    (path.parent / HEAD).unlink()


def spoil_the_head(path):
    (path.parent / HEAD).write_text("[]")


@pytest.mark.parametrize(
    "act",
    [tamper_value, tamper_hashes, drop(0), drop(2), drop(-1), tear_the_last, swap, lose_the_head, spoil_the_head],
    ids=[
        "value",
        "hashes",
        "no terms",
        "no middle",
        "rolled back",
        "torn on purpose",
        "swapped",
        "no head",
        "bad head",
    ],
)
def test_a_touched_ledger_prints_nothing(tmp_path, act):
    made(tmp_path, 5)
    act(tmp_path / LEDGER)
    for read in (read_ledger, lambda folder: open_ledger(folder, TERMS)):
        with pytest.raises(PrivacyError, match="changed or rolled back"):
            read(tmp_path)


def test_an_older_copy_of_both_files_is_known_from_the_metrics(tmp_path):
    ledger = made(tmp_path, 2)
    older = {name: (tmp_path / name).read_bytes() for name in (LEDGER, HEAD)}
    ledger.book(ROW, "update", 2)
    metrics = [{"round": 3, "privacy": {"ledger": {"rows": len(ledger.hashes), "head": ledger.head}}}]
    check_against_metrics(read_ledger(tmp_path), metrics)
    for name, data in older.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(PrivacyError, match="rolled back"):
        check_against_metrics(read_ledger(tmp_path), metrics)
    with pytest.raises(PrivacyError, match="names no row"):
        check_against_metrics(ledger, [{"round": 1}])


def test_other_terms_are_refused(tmp_path):
    made(tmp_path, 1)
    with pytest.raises(PrivacyError, match="other terms \\(z\\)"):
        open_ledger(tmp_path, replace(TERMS, z=2.0))


def test_a_removed_ledger_is_not_begun_again(tmp_path):
    made(tmp_path, 1)
    (tmp_path / LEDGER).unlink()
    with pytest.raises(PrivacyError, match="is gone"):
        open_ledger(tmp_path, TERMS)


def test_no_ledger_says_how_to_get_one(tmp_path):
    with pytest.raises(PrivacyError, match="keyfed train --dp"):
        read_ledger(tmp_path)


def test_delta_of_one_client_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PrivacyError, match="delta"):
        open_ledger(tmp_path, replace(TERMS, delta=1e-4))
    assert list(tmp_path.iterdir()) == []


def test_the_budget_stops_in_time(tmp_path):
    limit = epsilon([Release(1.0, 0.01, 3)], 1e-6)
    ledger = open_ledger(tmp_path, replace(TERMS, budget=limit + 1e-9))
    done = 0
    while ledger.allows([ROW]):
        ledger.book(ROW, "update", done)
        done += 1
    assert done == 3
    assert open_ledger(tmp_path, ledger.terms).allows([ROW]) is False


def test_verdicts(tmp_path):
    def verdict(name, row=ROW, **changes):
        (tmp_path / name).mkdir()
        ledger = open_ledger(tmp_path / name, replace(TERMS, **changes))
        ledger.book(row, "update", 0)
        return ledger.verdict()

    assert verdict("real") == "GUARANTEE"
    assert verdict("just", delta=MOST_DELTA, population=500, clients=500, cohort=5, called=5) == "GUARANTEE"
    beyond = math.nextafter(MOST_DELTA, 1)
    assert verdict("few", delta=beyond, population=500, clients=500, cohort=5, called=5) == "BOUND ONLY"
    assert verdict("few in a simulation", delta=beyond, population=500, randomness="derived") == "SIMULATED"
    assert verdict("seed", randomness="derived") == "SIMULATED"
    assert verdict("imagined", clients=40) == "SIMULATED"
    assert verdict("scaled", called=5) == "SIMULATED"
    assert verdict("none", z=0.0, row=Release(0.0, 0.01)) == "NONE"


def test_rows_of_a_tree_are_one_tree(tmp_path):
    ledger = open_ledger(tmp_path, replace(TERMS, mechanism="tree", gap=4))
    for r in range(8):
        ledger.book(TreeRelease(1.0, 4), "update", r)
    assert read_ledger(tmp_path).epsilon("rdp") == epsilon([TreeRelease(1.0, 4, 8)], 1e-6, "rdp")
