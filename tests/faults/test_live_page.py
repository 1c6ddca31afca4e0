"""What the owner of a server sees of real runs, private ones too: their folder's numbers, and nothing of any client.

Folders may be damaged or hostile: a page comes of every one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.runs import begun_runs, noted
from keyfed.reports import seen
from keyfed.reports.document import show, show_duration
from keyfed.reports.live import live_page
from keyfed.reports.seen import LEAST, MOST, WAYS, RunView, read_run
from keyfed.run.console import human_bytes
from keyfed.run.folder import read_metrics, read_result
from keyfed.run.remote.train import train_deployed
from keyfed.wire.transport import Answer, Handler, Lost, Post, deliver

from .deployed import QUICK, federation, small_config, vocabulary, write_texts
from .private import deploy, enrol, private_config

NAMES = ("anna", "bert", "carl", "dora", "emil")


def never_answers(client: str, post: Post, handler: Handler) -> Answer:
    """Dora answers everything but a call to train."""
    if client == "dora" and post.kind == "train":
        return Lost("no answer")
    return deliver(client, post, handler)


def train(folder: Path, fault: Any = None, **more: Any) -> Path:
    """Train a run with real clients, named by people; return its folder."""
    texts = write_texts(folder / "texts", len(NAMES))
    names = dict(zip(texts, NAMES, strict=True))
    transport, roster = federation(folder / "clients", texts, fault=fault, named=lambda path: names[path])
    vocab, path = vocabulary(folder)
    config = small_config(folder / "texts", path, **{"cohort": len(NAMES), **more})
    train_deployed(config, vocab, folder / "run", transport, roster, patience=QUICK)
    return folder / "run"


def page_of(out: Path) -> str:
    """The page of a server with this one run, which its program has left."""
    home = ServerHome(out.parent / "home")
    home.path.mkdir(exist_ok=True)
    with noted(home, "1", out):
        pass
    return live_page(begun_runs(home))


def counted(found: RunView) -> dict[str, Any]:
    """What a page says of a run, in the terms of `from_metrics`."""
    return {
        "rounds": found.done, "called": found.all.called, "reported": found.all.reported,
        "uploaded": found.all.uploaded, "refused": found.all.refused, "moved": dict(found.moved),
        "last": found.last._asdict(), "moved_last": dict(found.moved_last), "abandoned": found.abandoned,
        "loss": [(p.round, p.loss) for p in found.points], "seconds": found.seconds,
        "valid": [(p.round, p.valid, p.perplexity) for p in found.points],
        "epsilon": [p.epsilon for p in found.points],
    }  # fmt: skip


def from_metrics(out: Path) -> dict[str, Any]:
    """The same, by the reader of metrics.jsonl that every other command has."""
    records = read_metrics(out)
    told = [r for r in records if r["refused"] is not None]

    def cohort(rows: list[dict[str, Any]]) -> dict[str, int | None]:
        some = bool(rows) and rows[0]["refused"] is not None
        return {
            "called": sum(r["cohort"] for r in rows),
            "reported": sum(r["reported"] for r in rows) if some else None,
            "uploaded": sum(len(r["contributors"]) for r in rows) if some else None,
            "refused": sum(len(r["refused"]) for r in rows) if some else None,
        }

    return {
        "rounds": records[-1]["round"], **cohort(records), "last": cohort(records[-1:]),
        "moved": {way: sum(r["traffic"][way] for r in records) for way in WAYS},
        "moved_last": dict(records[-1]["traffic"]), "abandoned": sum(r["abandoned"] for r in records),
        "loss": [(r["round"], r["loss"]) for r in records],
        "seconds": statistics.median_high([r["seconds"] for r in told]) if told else None,
        "valid": [(r["round"], (r.get("valid") or {}).get("nats"), (r.get("valid") or {}).get("perplexity"))
                  for r in records],
        "epsilon": [(r.get("privacy") or {}).get("epsilon") for r in records],
    }  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Three rounds of five clients, one of which answers no call to train."""
    return train(tmp_path_factory.mktemp("plain"), never_answers)


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("secure"), secure=True, rounds=2)


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    config = private_config(folder, rounds=2, privacy={"epsilon": 50.0})
    deploy(folder, config, *enrol(folder), name="run")
    return folder / "run"


@pytest.mark.parametrize("kind", ["plain", "secure", "private"])
def test_the_numbers_are_those_of_the_folder(kind, request):
    out = request.getfixturevalue(kind)
    found, result = read_run(out, works=False), read_result(out)
    assert result is not None
    assert counted(found) == from_metrics(out)
    assert (found.state, found.rounds, found.method, found.model) == ("finished", found.done, "fedavg", "cifg")
    assert (found.secure, found.private) == (kind == "secure", kind == "private")
    assert found.withheld == found.damaged == found.unread == 0
    page = page_of(out)
    for way in WAYS:
        assert f"<td>{human_bytes(sum(r['traffic'][way] for r in read_metrics(out)))}</td>" in page
    assert f'<p class="value">{found.done} of {found.rounds}</p>' in page
    if kind == "private":
        assert found.spent is not None
        assert found.spent.epsilon == result["privacy"]["pld"]
        assert (found.spent.delta, found.spent.budget) == (result["privacy"]["delta"], 50.0)
        assert found.spent.releases == result["privacy"]["releases"] == found.done
        assert f'<p class="value">{found.spent.epsilon:.4g}</p>' in page
        assert found.reasons == {}
    else:
        assert found.tested == result["test"]["perplexity"]
        last = read_metrics(out)[-1]
        assert f'<p class="value">{show(last["valid"]["perplexity"])}</p>' in page
        assert f'<p class="value">{last["loss"]:.4g}</p>' in page
        assert found.seconds is not None
        assert f'<p class="value">{show_duration(found.seconds)}</p>' in page
    assert found.all.refused == (3 if kind == "plain" else None if kind == "private" else 0)


def test_the_last_round_is_shown_though_its_line_waits_in_the_checkpoint(plain, tmp_path):
    """A line is written when the next round has validated its model; a stopped run has one that was not."""
    out = tmp_path / "run"
    (out / "checkpoint").mkdir(parents=True)
    lines = (plain / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:2]))
    waiting = {key: value for key, value in json.loads(lines[2]).items() if key != "valid"}
    (out / "checkpoint" / "round-000003.json").write_text(json.dumps({"round": 3, "pending": waiting}))
    found, whole = read_run(out, works=True), read_run(plain, works=False)
    assert (found.state, found.done, found.moved) == ("running", 3, whole.moved)
    assert [p.valid is None for p in found.points] == [False, False, True]
    (out / "metrics.jsonl").write_text("".join(lines))  # it is written, and the checkpoint is still that of before
    assert read_run(out, works=True).points == whole.points


def test_a_run_that_trains_waits_in_the_checkpoint_as_this_page_reads_it(tmp_path):
    """Of a run that goes on, seen after each round: the page is never behind what its program has said."""
    behind = []

    class Looking:
        def say(self, line: str) -> None: ...
        def start(self, what: str, rounds: int, done: int) -> None: ...
        def round(self, record: dict[str, Any]) -> None:
            found = read_run(tmp_path / "run", works=True)
            behind.append(record["round"] - found.done)
            assert found.moved_last == record["traffic"]

    texts = write_texts(tmp_path / "texts", 4)
    transport, roster = federation(tmp_path / "clients", texts)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, rounds=3)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, Looking(), patience=QUICK)
    assert behind == [0, 0, 0]


def named(record: dict[str, Any], *, who: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """A round's line with clients' names in every place that ever had one, and in some that never had."""
    one = who[0]
    return record | {
        "contributors": list(who), "refused": dict.fromkeys(who, "no answer"), "lost": {one: f"lied ({one})"},
        "shut_out": {one: one}, "shortened": [one], "attention": {name: {"bias": 1 / 7} for name in who},
        "secure_failed": f"{one} lied", "unsound": one, "by_client": {one: {"loss": [1.25]}}, one: one,
    }  # fmt: skip


def test_no_client_is_named_whatever_the_folder_says(plain, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    records = [named(record) for record in read_metrics(plain)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (out / "run.toml").write_bytes((plain / "run.toml").read_bytes())
    (out / "enrolled.json").write_text(json.dumps(NAMES))
    (out / "curves.jsonl").write_text(json.dumps({"by_client": dict.fromkeys(NAMES, 1.0)}))
    spread = {"worst": 140.0, "clients_perplexity": dict.fromkeys(NAMES, 1.0)}
    (out / "result.json").write_text(json.dumps({"test": {"perplexity": 9.0}, "lost": {"anna": 1}, "spread": spread}))
    (out / "checkpoint").mkdir()
    pending = named({**records[-1], "round": 4})
    manifest = {"round": 4, "pending": pending, "clients": {name: {} for name in NAMES}, "suspects": {"anna": 1}}
    (out / "checkpoint" / "round-000004.json").write_text(json.dumps(manifest))
    (out / "ledger.jsonl").write_text(json.dumps({"terms": {"delta": 1e-5}, "names": NAMES}) + "\n")
    home = ServerHome(tmp_path / "home")
    home.path.mkdir()
    with noted(home, "1", out):
        page = live_page(begun_runs(home))
    for name in NAMES:
        assert name not in page.lower()
    assert "no answer" in page  # by 5 clients
    assert "140" not in page
    assert "0.142" not in page  # an attention weight
    found = read_run(out, works=True)
    assert found.reasons == {"no answer": 20}
    assert (found.rare, found.all.refused, found.shut_out) == (4, 24, 1)


def lines_of(out: Path, *records: dict[str, Any]) -> RunView:
    out.mkdir(exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_run(out, works=False)


def a_round(number: int, uploads: int, **more: Any) -> dict[str, Any]:
    """A line whose figures are of so many clients."""
    return {
        "round": number, "loss": 1.125, "seconds": 77.25, "cohort": 9, "reported": uploads, "present": 9,
        "contributors": [f"c{k}" for k in range(uploads)], "refused": {}, "lost": {}, "abandoned": False,
        "traffic": {"down": 10, "up": 5, "control": 1}, "valid": {"nats": 3.375, "perplexity": 29.224}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("uploads", range(LEAST + 2))
def test_figures_of_few_clients_are_left_out(tmp_path, uploads):
    found = lines_of(tmp_path / "run", *(a_round(n, uploads) for n in (1, 2)))
    few = uploads < LEAST
    assert [p.loss for p in found.points] == [None if few else 1.125] * 2
    assert found.points[0].valid == (None if few else 3.375)  # scored by those whom the next round called
    assert found.points[1].valid == 3.375  # scored by everybody who was connected
    assert found.seconds == (None if few else 77.25)
    assert found.all.uploaded == 2 * uploads
    page = page_of(tmp_path / "run")
    assert ("1.125" in page, "1 min 17 s" in page, "Left out, for too few clients" in page) == (not few, not few, few)


def test_validation_by_few_is_left_out_by_whom_the_next_round_called(tmp_path):
    found = lines_of(tmp_path / "run", a_round(1, 5), a_round(2, LEAST - 1), a_round(3, 5, present=LEAST - 1))
    assert [p.valid for p in found.points] == [None, 3.375, None]
    assert [p.loss for p in found.points] == [1.125, None, 1.125]


def test_a_reason_counts_by_name_from_so_many_clients_on(tmp_path):
    """By clients, not by refusals: one that is refused in every round has no line of its own."""
    often = [a_round(n, 5, refused={"anna": "malformed"}) for n in range(1, 30)]
    some = [a_round(30, 5, refused={f"c{k}": "no answer" for k in range(LEAST)}, lost={"x": "not now", "y": "not now"})]
    found = lines_of(tmp_path / "run", *often, *some)
    assert found.reasons == {"no answer": LEAST}
    assert (found.rare, found.all.refused) == (31, 31 + LEAST)
    assert "malformed" not in page_of(tmp_path / "run")


def test_a_reason_that_none_of_ours_is_counts_under_no_name(tmp_path):
    who = {f"c{k}": "is called anna" for k in range(9)}
    found = lines_of(tmp_path / "run", a_round(1, 5, refused=who))
    assert (found.reasons, found.rare) == ({}, 9)


def test_a_line_that_is_half_written_waits(tmp_path):
    out = tmp_path / "run"
    lines_of(out, a_round(1, 5))
    with (out / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(a_round(2, 5))[:40])
    found = read_run(out, works=True)
    assert (found.done, found.damaged) == (1, 0)
    with (out / "metrics.jsonl").open("a") as f:
        f.write("\n" + json.dumps(a_round(3, 5)) + "\n")
    found = read_run(out, works=True)
    assert (found.done, found.damaged) == (3, 1)
    assert "1 line that cannot be read" in page_of(out)


def test_of_a_long_log_the_end_is_read(tmp_path, monkeypatch):
    records = [a_round(n, 5) for n in range(1, 101)]
    end = sum(len(json.dumps(record)) + 1 for record in records[-10:])
    monkeypatch.setattr(seen, "MOST_BYTES", end + 5)
    found = lines_of(tmp_path / "run", *records)
    assert [p.round for p in found.points] == list(range(91, 101))
    assert found.unread == (tmp_path / "run" / "metrics.jsonl").stat().st_size - end
    assert "metrics.jsonl is long" in page_of(tmp_path / "run")


def test_a_line_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(seen, "MOST_LINE", 4000)
    found = lines_of(tmp_path / "run", a_round(1, 5), a_round(2, 5, padding="x" * 20_000), a_round(3, 5))
    assert (found.damaged, [p.round for p in found.points]) == (1, [1, 3])


def test_what_is_no_file_keeps_no_reader(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for name in ("metrics.jsonl", "run.toml", "ledger.jsonl"):
        os.mkfifo(out / name)
    (out / "result.json").mkdir()
    (out / "checkpoint").symlink_to("/dev")
    found = read_run(out, works=False)
    assert (found.state, found.done, found.spent) == ("stopped", 0, None)
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").symlink_to("/dev/zero")
    assert "<h1>run</h1>" in page_of(out)


@pytest.mark.parametrize("place", ["gone", "a-file", "x" * 5000, "loop"])
def test_a_folder_that_is_none_has_a_page(tmp_path, place):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    home = ServerHome(tmp_path / "home")
    home.path.mkdir()
    with noted(home, "1", tmp_path / place):
        pass
    assert "its folder is not there" in live_page(begun_runs(home))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.just(10**400)
    | st.just(MOST + 1)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*a_round(1, 5), "privacy", "shut_out", "secure_failed", "rolled_back"})
ODD = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5)
INNER = st.dictionaries(st.sampled_from(["nats", "perplexity", "epsilon", "down", "up", "control", "pld"]), JSON)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ODD, INNER, st.sampled_from(["valid", "privacy", "traffic"])), max_size=4), JSON, st.binary())
def test_any_folder_has_a_page(tmp_path, lines, odd, raw):
    out = tmp_path / "run"
    (out / "checkpoint").mkdir(parents=True, exist_ok=True)
    records = [{**a_round(n, 5), where: inner, **change} for n, (change, inner, where) in enumerate(lines, 1)]
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    (out / "metrics.jsonl").write_bytes(data + raw)
    (out / "result.json").write_text(json.dumps({"test": odd, "privacy": odd}))
    (out / "run.toml").write_bytes(raw)
    (out / "checkpoint" / "round-000009.json").write_text(json.dumps({"pending": odd}))
    (out / "ledger.jsonl").write_text(json.dumps({"terms": odd}) + "\n")
    page = page_of(out)
    assert page.endswith("</html>\n")
    assert "nan" not in page.lower()
    page.encode()


def test_numbers_off_the_scale_are_not_drawn(tmp_path):
    more = [{"loss": value, "valid": {"nats": value}} for value in (math.nan, math.inf, -math.inf, 1e308, -1e308)]
    found = lines_of(tmp_path / "run", *(a_round(n, 5, **change) for n, change in enumerate(more, 1)))
    assert {(p.loss, p.valid) for p in found.points} == {(None, None)}
    assert "<svg role" not in page_of(tmp_path / "run")


def test_a_long_run_is_drawn_with_few_points(tmp_path):
    lines_of(tmp_path / "run", *(a_round(n, 5, loss=5.0 / n) for n in range(1, 3001)))
    page = page_of(tmp_path / "run")
    assert len(page) < 40_000
    assert "100.00 100.00" in page  # the last point, the lowest


def test_counts_of_a_refused_run_are_of_all_lines(plain):
    """The reader counts what `read_metrics` does, reason by reason."""
    reasons = Counter(why for record in read_metrics(plain) for why in record["refused"].values())
    found = read_run(plain, works=False)
    assert reasons == {"no answer": 3}
    assert (found.reasons, found.rare) == ({}, 3)  # of one client
    assert "no answer" not in page_of(plain)
    assert replace(found, state="running") == read_run(plain, works=True)
