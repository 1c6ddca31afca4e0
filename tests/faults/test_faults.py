"""Faults, one at a time, in the second of three rounds: the culprit is a drop-out with a typed reason, nobody else is
touched, and the model is the one that the others alone would have made. `make test-federation` prints the table."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keyfed.errors import ConfigError, RunError
from keyfed.run.folder import read_metrics
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import MAGIC, Rejected, pack, read_tensors, shapes_of, unpack
from keyfed.wire.roster import Roster
from keyfed.wire.transport import Answer, Handler, InProcess, Lost, Post, deliver

from .deployed import (
    QUICK,
    federation,
    last_checkpoint,
    last_model,
    resigned,
    revoke,
    session,
    small_config,
    vocabulary,
    write_texts,
)

VICTIM, ROUND, CLIENTS, FEW = "client-2", 1, 5, 3


class Injected:
    """Changes the answer of one client to one kind of message in one round; everything else is delivered."""

    def __init__(self, change: Callable[[bytes], bytes | Lost], kind: str = "train", client: str = VICTIM) -> None:
        self.change, self.kind, self.client = change, kind, client
        self.times = 0

    def __call__(self, client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        head = unpack(post.body).head
        if client != self.client or post.kind != self.kind or head.get("round") != ROUND or isinstance(answer, Lost):
            return answer
        if head.get("purpose") == "calibration":
            return answer
        self.times += 1
        return resigned(client, post, handler, answer, self.change)


def on_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[bytes], bytes]:
    def edit(answer: bytes) -> bytes:
        from safetensors.torch import load

        head, tensors = unpack(answer)
        return pack(head, change(load(tensors)))

    return edit


def on_head(**changes: object) -> Callable[[bytes], bytes]:
    def edit(answer: bytes) -> bytes:
        head, tensors = unpack(answer)
        return pack(head | changes) + tensors

    return edit


def on_report(**changes: object) -> Callable[[bytes], bytes]:
    def edit(answer: bytes) -> bytes:
        head, tensors = unpack(answer)
        text = json.dumps(head | {"report": head["report"] | changes}).encode()  # NaN is written, which `pack` refuses
        return MAGIC + struct.pack("<I", len(text)) + text + tensors

    return edit


def first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = sorted(tensors)[0]
        return tensors | {name: change(tensors[name].clone()).contiguous()}

    return on_tensors(edit)


def poisoned(value: float) -> Callable[[bytes], bytes]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.reshape(-1)[0] = value
        return tensor

    return first(edit)


def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


class _Opens:
    """A pickle that would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self.path,))


PLAIN = {
    "one NaN in the upload": (poisoned(float("nan")), "non-finite upload"),
    "infinity in the upload": (poisoned(float("inf")), "non-finite upload"),
    "one huge weight": (poisoned(1e9), "exploding upload"),
    "norm times a million": (on_tensors(lambda ts: {n: 1e6 * t for n, t in ts.items()}), "exploding upload"),
    "wrong shape": (first(lambda t: t.unsqueeze(0)), "wrong shape"),
    "transposed": (first(lambda t: t.T if t.dim() > 1 else t[:-1]), "wrong shape"),
    "float64": (first(lambda t: t.double()), "wrong type"),
    "int64": (first(lambda t: t.long()), "wrong type"),
    "a tensor missing": (on_tensors(without_one), "wrong tensors"),
    "a tensor too many": (on_tensors(lambda ts: ts | {"extra": torch.zeros(3)}), "wrong tensors"),
    "a tensor renamed": (on_tensors(lambda ts: without_one(ts) | {"renamed": torch.zeros(3)}), "wrong tensors"),
    "no tensors": (lambda a: pack(unpack(a).head), "wrong tensors"),
    "wrong round": (on_head(round=7), "wrong round"),
    "another run": (on_head(run="other"), "wrong round"),
    "an old attempt": (on_head(attempt=0), "wrong round"),
    "minus one token": (on_report(tokens=-1), "malformed"),
    "2^63 tokens": (on_report(tokens=2**63), "malformed"),
    "tokens = true": (on_report(tokens=True), "malformed"),
    "no tokens": (on_report(tokens=0), "no text"),
    "loss NaN": (on_report(loss=float("nan")), "malformed"),
    "loss minus one": (on_report(loss=-1.0), "non-finite report"),
    "loss 1e308": (on_report(loss=1e308), "non-finite report"),
    "no report": (on_head(report=None), "malformed"),
    "random bytes": (lambda a: os.urandom(len(a)), "malformed"),
    "cut in half": (lambda a: a[: len(a) // 2], "malformed"),
    "a gigantic head": (lambda a: a[:4] + struct.pack("<I", 2**32 - 1) + a[8:], "malformed"),
    "nested a thousand deep": (lambda a: MAGIC + struct.pack("<I", 2000) + b"[" * 1000 + b"]" * 1000, "malformed"),
    "much too long": (lambda a: a + bytes(80 << 20), "too large"),
    "no answer": (lambda a: Lost("no answer"), "no answer"),
    "the client raises": (lambda a: Lost("client error", "ValueError"), "client error"),
}


def run(
    tmp_path: Path,
    name: str,
    fault,
    method: str = "fedavg",
    secure: bool = False,
    clients: int = CLIENTS,
    rounds: int = 3,
    **more,
):
    texts = write_texts(tmp_path / "texts", clients)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method, rounds=rounds, cohort=clients, secure=secure)
    config = replace(config, upload=replace(config.upload, bound=100.0))
    transport, roster = federation(tmp_path / name / "clients", texts, fault=fault)
    out = tmp_path / name / "run"
    train_deployed(config, vocab, out, transport, roster, patience=QUICK, **more)
    return out


def same_model(a: Path, b: Path) -> None:
    left, right = last_model(a), last_model(b)
    for name, p in left.items():
        assert torch.equal(p, right[name]), name
        assert torch.isfinite(p).all()


@pytest.fixture(scope="module")
def without_victim(tmp_path_factory):
    """Models of runs whose victim said nothing in the second round, by whether sums are secure and where it fell."""
    made: dict[tuple[bool, str], Path] = {}

    def get(secure: bool, kind: str) -> Path:
        if (secure, kind) not in made:
            folder = tmp_path_factory.mktemp("reference")
            silent = Injected(lambda a: Lost("no answer"), kind)
            made[secure, kind] = run(folder, "r", silent, secure=secure, clients=CLIENTS if secure else FEW)
        return made[secure, kind]

    return get


class InTurn:
    """Changes the victim's answers to `train` from the second round on, in each by the next of some changes."""

    def __init__(self, changes: list[Callable[[bytes], bytes | Lost]]) -> None:
        self.changes, self.models = changes, {}

    def __call__(self, client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if post.kind != "train":
            return answer
        head = unpack(post.body).head
        number = head["round"]
        if number <= len(self.changes) + 1:  # later ones are evaluations after the last round
            self.models[number] = head["model"]
        if client != VICTIM or not 1 <= number <= len(self.changes) or isinstance(answer, Lost):
            return answer
        return resigned(client, post, handler, answer, self.changes[number - 1])


@pytest.fixture(scope="module")
def all_plain(tmp_path_factory):
    """One run with every plain fault in a round of its own, and one whose victim is silent in these rounds.

    Lines of the first, and of both the digests of the models that clients were sent, by round.
    """
    rounds, folder = len(PLAIN) + 2, tmp_path_factory.mktemp("plain")
    faulty = InTurn([PLAIN[fault][0] for fault in sorted(PLAIN)])
    silent = InTurn([lambda a: Lost("no answer")] * len(PLAIN))
    out = run(folder, "faulty", faulty, clients=FEW, rounds=rounds)
    same_model(out, run(folder, "silent", silent, clients=FEW, rounds=rounds))
    return read_metrics(out), faulty.models, silent.models


@pytest.mark.parametrize("fault", sorted(PLAIN))
def test_a_plain_fault_costs_its_client_the_round(fault, all_plain, record_property):
    lines, models, silent = all_plain
    _, reason = PLAIN[fault]
    number = 1 + sorted(PLAIN).index(fault)
    assert lines[number]["refused"] == {VICTIM: reason}
    assert len(lines[number]["contributors"]) == FEW - 1
    assert models[number + 1] == silent[number + 1] != models[number]
    for whole in (lines[0], lines[-1]):  # nothing lasts: after all of them it takes part
        assert (whole["refused"], len(whole["contributors"])) == ({}, FEW)
    record_property("fault", f"plain: {fault}")
    record_property("outcome", f"{reason}; round commits without it; model as if it had been silent")


SECURE = {
    "killed in training": ("train", lambda a: Lost("no answer"), "no answer"),
    "killed in upload": ("upload", lambda a: Lost("no answer"), "no answer"),
    "a share too few": ("train", on_head(parcels={}), "malformed"),
    "shares that are no bytes": ("train", on_head(parcels={"client-1": "zz"}), "malformed"),
    "keys of somebody else": ("train", on_head(keys={}), "not enrolled"),
    "a masked vector too short": ("upload", first(lambda t: t[:-1]), "wrong shape"),
    "a masked vector of floats": ("upload", first(lambda t: t.float()), "wrong type"),
    "a masked vector for another round": ("upload", on_head(round=7), "wrong round"),
}


@pytest.mark.parametrize("fault", sorted(SECURE))
def test_a_secure_fault_costs_its_client_the_round(tmp_path, fault, without_victim, record_property):
    kind, change, reason = SECURE[fault]
    out = run(tmp_path, "faulty", Injected(change, kind), secure=True)
    lines = read_metrics(out)
    assert [r["refused"] for r in lines] == [{}, {VICTIM: reason}, {}]
    same_model(out, without_victim(True, kind))
    record_property("fault", f"secure: {fault}")
    record_property("outcome", f"{reason}; exact sum of the others")


def test_a_client_that_does_not_help_to_open_the_sum_is_in_it_all_the_same(tmp_path, record_property):
    quiet = run(tmp_path, "faulty", Injected(lambda a: Lost("no answer"), "unmask"), secure=True)
    same_model(quiet, run(tmp_path, "whole", None, secure=True))
    assert [r["refused"] for r in read_metrics(quiet)] == [{}, {}, {}]
    record_property("fault", "secure: killed before unmasking")
    record_property("outcome", "its vector is in the sum; exact sum of all")


def tampered_share(answer: bytes) -> bytes:
    head, tensors = unpack(answer)
    to = sorted(head["parcels"])[0]
    package = bytearray.fromhex(head["parcels"][to])
    package[150] ^= 1
    return pack(head | {"parcels": head["parcels"] | {to: package.hex()}}) + tensors


def test_a_tampered_share_closes_the_sum_and_its_sender_is_shut_out(tmp_path, record_property):
    out = run(tmp_path, "faulty", Injected(tampered_share), secure=True)
    lines = read_metrics(out)
    assert [r["abandoned"] for r in lines] == [False, True, False]
    assert lines[1]["refused"] == {"client-0": "refused by client", VICTIM: "lied"}
    assert list(lines[1]["shut_out"]) == [VICTIM]
    assert lines[2]["contributors"] == [f"client-{k}" for k in (0, 1, 3, 4)]
    record_property("fault", "secure: tampered share")
    record_property(
        "outcome", "its receiver accuses, the server sees for itself; one round closed, the sender shut out"
    )


def test_another_model_for_one_client_gives_no_sum_at_all(tmp_path, record_property):
    def other_model(client: str, post: Post, handler: Handler) -> Answer:
        if client == VICTIM and post.kind == "train":
            head, tensors = unpack(post.body)
            if head["round"] == ROUND:
                from safetensors.torch import load

                from keyfed.wire.messages import digest_of

                changed = {n: t + 0.5 for n, t in load(tensors).items()}
                return deliver(client, Post("train", pack(head | {"model": digest_of(changed)}, changed)), handler)
        return deliver(client, post, handler)

    out = run(tmp_path, "faulty", other_model, secure=True)
    lines = read_metrics(out)
    assert lines[1]["abandoned"]
    assert lines[1]["contributors"] == []
    assert not lines[2]["abandoned"]
    record_property("fault", "server: different model to one client")
    record_property("outcome", "masks are bound to the model: nothing opens, round abandoned")


def test_below_the_threshold_nothing_is_revealed(tmp_path, record_property):
    def half_gone(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        gone = post.kind == "upload" and unpack(post.body).head["round"] == ROUND and client < VICTIM
        return Lost("no answer") if gone else answer

    out = run(tmp_path, "faulty", half_gone, secure=True)
    lines = read_metrics(out)
    assert [r["abandoned"] for r in lines] == [False, True, False]
    assert "threshold" in lines[1]["secure_failed"]
    record_property("fault", "secure: two of five gone (below the threshold)")
    record_property("outcome", "fails closed: round abandoned, the next one commits")


def test_half_of_the_clients_gone_is_a_smaller_plain_round(tmp_path, record_property):
    def half_gone(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        gone = post.kind == "train" and unpack(post.body).head["round"] == ROUND and client < "client-3"
        return Lost("no answer") if gone else answer

    lines = read_metrics(run(tmp_path, "faulty", half_gone))
    assert [len(r["contributors"]) for r in lines] == [5, 2, 5]
    record_property("fault", "plain: three of five gone")
    record_property("outcome", "round commits with two")


def test_a_replayed_answer_is_of_the_wrong_round(tmp_path, without_victim, record_property):
    kept: list[bytes] = []

    def replay(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if client == VICTIM and post.kind == "train" and isinstance(answer, bytes):
            kept.append(answer)
            return kept[0] if len(kept) == 2 else answer
        return answer

    out = run(tmp_path, "faulty", replay, clients=FEW)
    assert [r["refused"] for r in read_metrics(out)] == [{}, {VICTIM: "wrong round"}, {}]
    same_model(out, without_victim(False, "train"))
    record_property("fault", "plain: last round's valid upload again")
    record_property("outcome", "wrong round; round commits without it")


def test_a_message_that_arrives_twice_counts_once(tmp_path, record_property):
    def twice(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "train":
            deliver(client, post, handler)
        return deliver(client, post, handler)

    same_model(run(tmp_path, "faulty", twice, clients=FEW), run(tmp_path, "whole", None, clients=FEW))
    record_property("fault", "plain: every message delivered twice")
    record_property("outcome", "counted once; the same model")


def test_clients_refuse_old_and_broken_messages(tmp_path, record_property):
    texts = write_texts(tmp_path / "texts", 3)
    bodies: dict[int, bytes] = {}

    def listen(client: str, post: Post, handler: Handler) -> Answer:
        if client == "client-0" and post.kind == "train":
            bodies.setdefault(unpack(post.body).head["round"], post.body)
        return deliver(client, post, handler)

    vocab, path = vocabulary(tmp_path)
    transport, roster = federation(tmp_path / "c", texts, fault=listen)
    transport.handlers["client-0"].handle = _without_bye(transport.handlers["client-0"])
    config = small_config(tmp_path / "texts", path, cohort=3)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    client = transport.handlers["client-0"]

    def reason(body: bytes) -> str:
        with pytest.raises(Rejected) as caught:
            client.handle("train", body)
        return caught.value.reason

    assert reason(bodies[0]) == "stale"
    head, tensors = unpack(bodies[2])
    model = read_tensors(tensors, shapes_of(last_model(tmp_path / "run")))
    broken = {n: torch.full_like(t, float("nan")) for n, t in model.items()}
    from keyfed.wire.messages import digest_of

    later = head | {"round": 9}
    assert reason(pack(later | {"model": digest_of(broken)}, broken)) == "non-finite model"
    assert reason(pack(later, {n: t + 1 for n, t in model.items()})) == "other model"
    assert reason(pack(later | {"run": "unknown"}, model)) == "unknown run"
    assert reason(pack(later, {n: t.double() for n, t in model.items()})) == "wrong type"
    assert reason(pack(later | {"purpose": "steal"}, model)) == "malformed"
    record_property("fault", "server: stale round, other model than named, NaN model, unknown run, wrong type")
    record_property("outcome", "refused by the client, each with its reason")


def _without_bye(client):
    handle = client.handle
    return lambda kind, body: pack({}) if kind == "bye" else handle(kind, body)


def test_a_second_look_at_a_sum_is_refused(tmp_path, record_property):
    seen: list[str] = []

    def again(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if post.kind == "unmask":
            second = deliver(client, post, handler)
            assert isinstance(second, Lost)
            seen.append(second.reason)
        return answer

    run(tmp_path, "r", again, secure=True)
    assert set(seen) == {"restarted"}
    record_property("fault", "server: asks twice for the shares that open a sum")
    record_property("outcome", "refused: the secrets are gone after the first answer")


def test_unknown_revoked_and_impostor_clients_are_not_called(tmp_path, record_property):
    texts = write_texts(tmp_path / "texts", 6)
    vocab, path = vocabulary(tmp_path)
    transport, roster = federation(tmp_path / "c", texts)
    revoke(roster, "client-5")
    impostor = session(tmp_path / "elsewhere", texts[4])  # another lasting key under an enrolled name
    transport.handlers["client-4"] = impostor
    stranger = tmp_path / "texts" / "stranger.txt"
    stranger.write_text(texts[0].read_text())
    transport.handlers["stranger"] = session(tmp_path / "c", stranger)
    config = small_config(tmp_path / "texts", path, cohort=6)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    for line in read_metrics(tmp_path / "run"):
        assert line["contributors"] == [f"client-{k}" for k in range(4)]
    record_property("fault", "unknown key, revoked key, impostor under an enrolled name")
    record_property("outcome", "never called; rounds commit with the others")


def test_a_client_restarted_between_training_and_upload_is_a_drop_out(tmp_path, without_victim, record_property):
    texts = write_texts(tmp_path / "texts", CLIENTS)
    home = tmp_path / "faulty" / "clients"

    def restart(client: str, post: Post, handler: Handler) -> Answer:
        if client == VICTIM and post.kind == "upload" and unpack(post.body).head["round"] == ROUND:
            transport.handlers[VICTIM] = session(home, texts[2])
            return deliver(client, post, transport.handlers[VICTIM])
        return deliver(client, post, handler)

    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, cohort=CLIENTS, secure=True)
    transport, roster = federation(home, texts, fault=restart)
    out = tmp_path / "run"
    train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    assert [r["refused"] for r in read_metrics(out)] == [{}, {VICTIM: "restarted"}, {}]
    assert len(read_metrics(out)[2]["contributors"]) == CLIENTS
    same_model(out, without_victim(True, "upload"))
    record_property("fault", "secure: client restarted between training and upload")
    record_property("outcome", "restarted; back in the next round")


def test_a_client_that_lost_its_duals_is_shut_out(tmp_path, record_property):
    import shutil

    texts = write_texts(tmp_path / "texts", CLIENTS)
    home = tmp_path / "clients"

    def wipe(client: str, post: Post, handler: Handler) -> Answer:
        if client == VICTIM and post.kind == "train" and unpack(post.body).head["round"] == ROUND:
            shutil.rmtree(home / VICTIM / "runs")
            transport.handlers[VICTIM] = session(home, texts[2])
            begun = unpack(post.body).head["run"]
            transport.handlers[VICTIM].store.begin(begun, hello[0])
            return deliver(client, post, transport.handlers[VICTIM])
        if post.kind == "hello":
            hello[:] = [unpack(post.body).head]
        return deliver(client, post, handler)

    hello: list[dict] = []
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, "fedadmm", cohort=CLIENTS)
    transport, roster = federation(home, texts, fault=wipe)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    lines = read_metrics(tmp_path / "run")
    assert lines[1]["refused"] == {VICTIM: "state lost"}
    assert VICTIM not in lines[2]["contributors"]
    assert torch.isfinite(next(iter(last_model(tmp_path / "run").values()))).all()
    record_property("fault", "FedADMM: client's duals deleted")
    record_property("outcome", "state lost; shut out of the run, which would count it twice")


def test_clients_that_restart_after_every_round_keep_their_duals(tmp_path, record_property):
    texts = write_texts(tmp_path / "texts", CLIENTS)
    home = tmp_path / "clients"

    def restart(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "train":
            transport.handlers[client] = handler = session(home, home.parent / "texts" / f"{client}.txt")
        return deliver(client, post, handler)

    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, "fedadmm", cohort=CLIENTS)
    transport, roster = federation(home, texts, fault=restart)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    assert [len(r["contributors"]) for r in read_metrics(tmp_path / "run")] == [CLIENTS] * 3
    whole, roster = federation(tmp_path / "w", texts)
    train_deployed(config, vocab, tmp_path / "whole", whole, roster, patience=QUICK)
    same_model(tmp_path / "run", tmp_path / "whole")
    record_property("fault", "FedADMM: every client restarted before every round")
    record_property("outcome", "state read from its files; the same model")


def test_a_killed_server_goes_on_from_its_checkpoint(tmp_path, record_property):
    class Killed(BaseException):
        pass

    for secure, kind in ((False, "train"), (True, "upload"), (True, "unmask")):
        folder = tmp_path / f"{secure}-{kind}"
        texts = write_texts(folder / "texts", CLIENTS)
        vocab, path = vocabulary(folder)
        config = small_config(folder / "texts", path, "fedadmm", rounds=4, cohort=CLIENTS, secure=secure)
        dying = [True]

        def kill(client: str, post: Post, handler: Handler, kind=kind, dying=dying) -> Answer:
            if dying and client == "client-3" and post.kind == kind and unpack(post.body).head["round"] == 2:
                dying.clear()
                raise Killed
            return deliver(client, post, handler)

        transport, roster = federation(folder / "c", texts, fault=kill)
        out = folder / "run"
        with pytest.raises(Killed):
            train_deployed(config, vocab, out, transport, roster, patience=QUICK)
        again = Roster(roster.path)
        result = train_deployed(
            config, vocab, out, InProcess(transport.handlers, kill), again, patience=QUICK, resume=True
        )
        assert result["rounds"] == 4
        lines = read_metrics(out)
        assert [r["round"] for r in lines] == [1, 2, 3, 4]
        # Whoever has sent its part of a secure round does not send it again, to whatever sum: that round is lost.
        assert [r["abandoned"] for r in lines] == [False, False, secure, False]
        if not secure:
            whole, roster = federation(folder / "w", texts)
            train_deployed(config, vocab, folder / "whole", whole, roster, patience=QUICK)
            same_model(out, folder / "whole")
    record_property("fault", "server killed in training, in upload and in unmasking; started again")
    record_property("outcome", "goes on from its checkpoint: plain the same model, secure that round abandoned")


@pytest.mark.parametrize("kind", ["upload", "unmask"])
def test_messages_of_a_secure_round_that_arrive_twice_do_no_harm(tmp_path, kind, record_property):
    def twice(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if post.kind == kind:
            assert isinstance(deliver(client, post, handler), Lost)
        return answer

    same_model(run(tmp_path, "faulty", twice, secure=True), run(tmp_path, "whole", None, secure=True))
    record_property("fault", f"secure: every {kind} message delivered twice")
    record_property("outcome", "answered once; the same model")


def test_a_client_that_refused_a_secure_round_gives_nothing_away(tmp_path, record_property):
    found: list[Answer] = []

    def greedy(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "train" and client == VICTIM and unpack(post.body).head["round"] == ROUND:
            head, tensors = unpack(post.body)
            assert isinstance(deliver(client, Post("train", pack(head | {"threshold": 1}) + tensors), handler), Lost)
            named = {key: head[key] for key in ("run", "round", "attempt")}
            found.append(deliver(client, Post("upload", pack(named)), handler))
            return Lost("no answer")
        return deliver(client, post, handler)

    run(tmp_path, "faulty", greedy, secure=True)
    assert [type(answer) for answer in found] == [Lost]
    record_property("fault", "server: asks for the upload after the terms of the sum were refused")
    record_property("outcome", "refused: there is nothing to be asked for")


@pytest.mark.parametrize(
    ("attempt", "asks"),
    [(1, {}), (9, {}), (1, {"evaluate": None}), (1, {"evaluate": "valid"}), (9, {"evaluate": "test"}),
     (1, {"purpose": "calibration"}), (1, {"purpose": "evaluation", "evaluate": "valid"})],
    ids=["same attempt", "new attempt", "nothing evaluated", "valid", "test", "calibration", "evaluation alone"],
)  # fmt: skip
def test_a_round_is_summed_once(tmp_path, attempt, asks, record_property):
    """A second sum over one client fewer would show that client's vector by the difference."""
    first: dict[str, bytes] = {}
    second: list[Answer] = []

    def again(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        head = unpack(post.body).head
        if client == VICTIM and head.get("round") == ROUND and isinstance(answer, bytes):
            if post.kind == "train":
                first["train"] = post.body
            if post.kind == "unmask":
                told, model = unpack(first["train"])
                keys = unpack(deliver(client, Post("hello", first["hello"]), handler)).head["keys"]
                cohort = [keys if k["client"] == client else k for k in told["cohort"]]
                body = pack(told | {"cohort": cohort, "attempt": attempt} | asks) + model
                deliver(client, Post("train", body), handler)
                named = {"run": told["run"], "round": ROUND, "attempt": attempt, "alive": [], "parcels": {}}
                second.append(deliver(client, Post("upload", pack(named)), handler))
        if client == VICTIM and post.kind == "hello":
            first["hello"] = post.body
        return answer

    run(tmp_path, "faulty", again, secure=True)
    assert [answer.reason for answer in second if isinstance(answer, Lost)] == ["summed before"]
    record_property("fault", f"server: sums the same round again (attempt {attempt}, {asks or 'the same message'})")
    record_property("outcome", "refused: a client sends its part of a round once")


def test_clients_that_were_told_different_things_share_no_mask(tmp_path, record_property):
    def other_text(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "hello" and client != VICTIM:
            head, tensors = unpack(post.body)
            config = head["config"] | {"data": head["config"]["data"] | {"max_tokens": 9}}
            return deliver(client, Post("hello", pack(head | {"config": config}) + tensors), handler)
        return deliver(client, post, handler)

    # The packages of the others are not signed for what this server holds to be the terms: it shuts them out.
    with pytest.raises(RunError, match="only 1 of at least 3 clients"):
        run(tmp_path, "faulty", other_text, secure=True)
    saved = last_checkpoint(tmp_path / "faulty" / "run")
    assert saved.pending is not None
    assert saved.pending["abandoned"]
    assert saved.pending["contributors"] == []
    record_property("fault", "server: another configuration for all but one client")
    record_property("outcome", "masks are bound to the configuration: nothing opens")


def test_a_run_cannot_be_begun_twice_with_different_words(tmp_path):
    client = session(tmp_path / "c", write_texts(tmp_path / "t", 1)[0])
    client.store.begin("r", {"config": 1, "vocab": "a", "method": "m", "secure": True})
    client.store.begin("r", {"config": 1, "vocab": "a", "method": "m", "secure": True, "nonce": "other"})
    with pytest.raises(Rejected, match="another configuration"):
        client.store.begin("r", {"config": 2, "vocab": "a", "method": "m", "secure": True})
    client.handle("bye", pack({"run": "r"}))
    with pytest.raises(Rejected, match="over"):
        client.store.begin("r", {"config": 1, "vocab": "a", "method": "m", "secure": True})


def spoilt_shares(answer: bytes) -> bytes:
    head, tensors = unpack(answer)
    turned = {to: bytes(b ^ 1 for b in bytes.fromhex(package)).hex() for to, package in head["parcels"].items()}
    return pack(head | {"parcels": turned}) + tensors


def test_who_spoils_every_share_is_shut_out(tmp_path, record_property):
    def spoil(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        bad = client == VICTIM and post.kind == "train" and isinstance(answer, bytes)
        bad = bad and unpack(post.body).head["round"] >= ROUND
        return resigned(client, post, handler, answer, spoilt_shares) if bad else answer

    lines = read_metrics(run(tmp_path, "faulty", spoil, secure=True))
    assert [r["abandoned"] for r in lines] == [False, True, False]
    assert lines[2]["contributors"] == [f"client-{k}" for k in (0, 1, 3, 4)]
    record_property("fault", "secure: a client whose shares open for nobody")
    record_property("outcome", "one round closed; accused by the others and shut out")


def test_somebody_elses_key_is_not_accepted(tmp_path, record_property):
    kept: dict[str, object] = {}

    def copycat(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if post.kind == "train" and isinstance(answer, bytes):
            head = unpack(answer).head
            kept.setdefault(client, head["keys"])
            if client == "client-4":
                twice = on_head(keys=head["keys"] | {"mask": head["keys"]["channel"]})
                return resigned(client, post, handler, answer, twice)
        return answer

    lines = read_metrics(run(tmp_path, "faulty", copycat, secure=True))
    assert all("client-4" in r["refused"] for r in lines)
    assert not any(r["abandoned"] for r in lines)
    record_property("fault", "secure: one-time keys that are not its own")
    record_property("outcome", "not enrolled or malformed; the others go on")


def test_numbers_and_counts_that_nobody_asked_for_do_not_count(tmp_path, record_property):
    def boast(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if client == VICTIM and post.kind == "train" and isinstance(answer, bytes):
            head = unpack(answer).head
            if head["round"] == 0:
                return resigned(client, post, handler, answer, on_head(evaluated=[2**39, 0.0, 0, 0, 0, 0, 0, 0]))
            if head["round"] == 1:
                return resigned(client, post, handler, answer, on_head(evaluated=[1]))
            return resigned(client, post, handler, answer, on_report(loss=10**400)) if "report" in head else answer
        return answer

    out = run(tmp_path, "faulty", boast, clients=FEW)
    lines = read_metrics(out)
    assert [r["refused"] for r in lines] == [{}, {VICTIM: "malformed"}, {VICTIM: "malformed"}]
    assert lines[0]["valid"]["tokens"] < 2**30
    assert json.loads((out / "result.json").read_text())["best_round"] > 0  # nobody had asked when it boasted
    record_property("fault", "plain: counts not asked for, counts of the wrong form, a loss of 400 digits")
    record_property("outcome", "ignored; malformed; malformed")


def test_a_sum_that_cannot_be_right_is_not_used(tmp_path, monkeypatch, record_property):
    import keyfed.wire.client as client_side

    honest = client_side.vector_of

    def lying(client, *arguments):
        vector = honest(client, *arguments)
        return vector + 12345 if client == VICTIM else vector

    monkeypatch.setattr(client_side, "vector_of", lying)
    with pytest.raises(RunError, match="no round"):
        run(tmp_path, "faulty", None, secure=True)
    lines = read_metrics(tmp_path / "faulty" / "run")
    assert all(r["abandoned"] and "cannot be right" in r["secure_failed"] for r in lines)
    record_property("fault", "secure: a client that lies about all of its numbers")
    record_property("outcome", "a sum that no honest clients can have is not used; round abandoned")


def test_top_k_is_refused_where_the_server_could_single_out_a_client(tmp_path):
    texts = write_texts(tmp_path / "texts", 4)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, "fedmed", secure=True, beta=0.5)
    transport, roster = federation(tmp_path / "c", texts)
    with pytest.raises(ConfigError, match=r"method\.beta"):
        train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)


def test_a_pickle_is_never_opened(tmp_path, record_property):
    marker = tmp_path / "opened"
    data = pickle.dumps(_Opens(str(marker)))
    out = run(tmp_path, "faulty", Injected(lambda a: data), clients=FEW)
    assert read_metrics(out)[1]["refused"] == {VICTIM: "malformed"}
    with pytest.raises(Rejected):
        session(tmp_path / "c", write_texts(tmp_path / "t", 1)[0]).handle("train", data)
    assert not marker.exists()
    record_property("fault", "a pickle in the place of an upload, and of a message")
    record_property("outcome", "malformed; nothing is executed")
