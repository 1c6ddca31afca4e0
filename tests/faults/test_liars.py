"""One liar among clients: it is proved or found, and shut out; it costs a round or two, and no honest client."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keyfed.wire.client as client_side
from keyfed.config.load import Config
from keyfed.errors import RunError, SecureSumError
from keyfed.federated.spec import Part
from keyfed.private.secagg import member as member_side
from keyfed.private.secagg import shamir
from keyfed.private.secagg.accusation import Suspects
from keyfed.private.secagg.keys import SIGNATURE_BYTES, Identity, check_answer, signed_answer
from keyfed.private.secagg.threshold import Floors
from keyfed.private.secagg.wire import package_text
from keyfed.run.folder import read_metrics
from keyfed.run.remote.train import train_deployed
from keyfed.text.vocab import Vocab
from keyfed.wire import transport as calls_side
from keyfed.wire.messages import pack, unpack
from keyfed.wire.roster import Roster
from keyfed.wire.transport import Answer, Fault, Handler, InProcess, Lost, Post, deliver
from tests.examples import examples
from tests.listeners import Heard

from .deployed import QUICK, federation, last_checkpoint, last_model, resigned, small_config, vocabulary, write_texts
from .private import deploy, enrol, private_config

TEN, CLIENTS, LIAR = 10, 6, "client-3"  # ten where a liar is searched for; a lie that is proved needs fewer
Lie = Callable[[str, Post, Handler], Answer]


def garbled(*, signed: bool) -> Lie:
    """Garble the packages of three clients, under a good signature or under none, and drop out."""

    def lie(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind == "upload":
            return Lost("no answer")
        made: list[Any] = []
        honest = client_side.signed_packages

        def keep(member: Any, identity: Identity) -> dict[str, bytes]:
            made.append(member)
            return honest(member, identity)

        with patch.object(client_side, "signed_packages", keep):
            answer = deliver(client, post, handler)
        if post.kind != "train" or not isinstance(answer, bytes):
            return answer

        def change(body: bytes) -> bytes:
            head, tensors = unpack(body)
            parcels = dict(head["parcels"])
            for to in sorted(parcels)[:3]:
                package = bytearray.fromhex(parcels[to])[:-SIGNATURE_BYTES]
                package[-1] ^= 1
                text = package_text(made[-1].terms.digest(), client, to, bytes(package))
                signature = handler.store.identity().sign(text)  # type: ignore[attr-defined]
                parcels[to] = (bytes(package) + (signature if signed else bytes(SIGNATURE_BYTES))).hex()
            return pack(head | {"parcels": parcels}) + tensors

        return resigned(client, post, handler, answer, change)

    return lie


@contextmanager
def dealing_another_secret() -> Iterator[None]:
    split = shamir.split
    with patch.object(shamir, "split", lambda secret, *rest: split(os.urandom(32), *rest)):
        yield


def another_secret(client: str, post: Post, handler: Handler) -> Answer:
    """Deal shares of another secret than the one in use."""
    with dealing_another_secret():
        return deliver(client, post, handler)


def another_secret_then_gone(client: str, post: Post, handler: Handler) -> Answer:
    """Deal shares of another mask key and drop out, so that the mask key is needed."""
    return Lost("no answer") if post.kind == "upload" else another_secret(client, post, handler)


def out_of_range(client: str, post: Post, handler: Handler) -> Answer:
    """Write a word beyond its range into every vector."""

    def spoilt(honest: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def write(*given: Any) -> np.ndarray:
            vector = honest(*given).copy()
            vector[: len(vector) // 2] += np.uint32(1 << 31)
            return vector

        return write

    names = ("vector_of", "calibration_vector_of", "evaluation_vector_of")
    with (
        patch.object(client_side, names[0], spoilt(client_side.vector_of)),
        patch.object(client_side, names[1], spoilt(client_side.calibration_vector_of)),
        patch.object(client_side, names[2], spoilt(client_side.evaluation_vector_of)),
    ):
        return deliver(client, post, handler)


def other_masks(client: str, post: Post, handler: Handler) -> Answer:
    """Send a vector whose masks do not cancel."""
    if post.kind != "upload":
        return deliver(client, post, handler)
    honest = member_side.add_mask
    with patch.object(member_side, "add_mask", lambda vector, key, sign: honest(vector, bytes(32), sign)):
        return deliver(client, post, handler)


def blaming(victim: str, *, proved: bool) -> Lie:
    """Accuse an honest client of a package that is in order, with the right key or with a made-up one."""

    def lie(client: str, post: Post, handler: Handler) -> Answer:
        if post.kind != "upload":
            return deliver(client, post, handler)
        honest = member_side.unseal

        def unseal(agreed: bytes, digest: bytes, sender: str, addressee: str, package: bytes) -> tuple[bytes, bytes]:
            if sender == victim:
                raise SecureSumError("made up")
            return honest(agreed, digest, sender, addressee, package)

        with patch.object(member_side, "unseal", unseal):
            answer = deliver(client, post, handler)
        if proved or not isinstance(answer, bytes):
            return answer

        def change(body: bytes) -> bytes:
            head, tensors = unpack(body)
            return pack(head | {"evidence": os.urandom(96).hex()}) + tensors

        return resigned(client, post, handler, answer, change)

    return lie


def wrong_shares(client: str, post: Post, handler: Handler) -> Answer:
    """Answer other shares than were received when the sum is to be opened."""
    answer = deliver(client, post, handler)
    if post.kind != "unmask" or not isinstance(answer, bytes):
        return answer

    def change(body: bytes) -> bytes:
        head, _ = unpack(body)
        data = bytearray.fromhex(head["shares"])
        data[-20] ^= 1
        return pack(head | {"shares": data.hex()})

    return resigned(client, post, handler, answer, change)


def gone(client: str, post: Post, handler: Handler) -> Answer:
    """Drop out of every upload: no lie, and no client that drops out is shut out."""
    return Lost("no answer") if post.kind == "upload" else deliver(client, post, handler)


# What a liar does, how many rounds it can cost, and how many a quick test runs.
SEARCHED = ("a word out of range", "masks that do not cancel")
LIES: dict[str, tuple[Lie, int, int]] = {
    "garbles three packages and drops out": (garbled(signed=True), 1, 3),
    "garbles three packages, unsigned, and drops out": (garbled(signed=False), 1, 3),
    "deals shares of another secret": (another_secret, 1, 3),
    "deals shares of another mask key and drops out": (another_secret_then_gone, 1, 3),
    "a word out of range": (out_of_range, 2, 12),
    "masks that do not cancel": (other_masks, 2, 7),
    "accuses an honest client with the right key": (blaming("client-4", proved=True), 1, 3),
    "accuses an honest client with a made-up key": (blaming("client-4", proved=False), 1, 3),
    "answers wrong shares": (wrong_shares, 0, 3),
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Nothing here is about files that survive a crash of the machine."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def prepared(folder: Path, fault: Fault, rounds: int, clients: int) -> tuple[Config, Vocab, InProcess, Roster]:
    texts = write_texts(folder / "texts", clients, lines=4)
    vocab, path = vocabulary(folder)
    config = small_config(folder / "texts", path, rounds=rounds, cohort=clients, secure=True)
    return config, vocab, *federation(folder / "clients", texts, fault=fault)


def acting(lies: Callable[[int], Lie | None]) -> Fault:
    """One liar, which in every round does as `lies` says."""

    def fault(client: str, post: Post, handler: Handler) -> Answer:
        can = client == LIAR and post.kind in ("train", "upload", "unmask")
        lie = lies(unpack(post.body).head["round"]) if can else None
        return (lie or deliver)(client, post, handler)

    return fault


def soak(
    folder: Path, lies: Callable[[int], Lie | None], rounds: int, clients: int = CLIENTS, **more: Any
) -> list[dict[str, Any]]:
    """Train with one liar, which in every round does as `lies` says; return the lines of all rounds."""
    config, vocab, transport, roster = prepared(folder, acting(lies), rounds, clients)
    train_deployed(config, vocab, folder / "run", transport, roster, patience=QUICK, **more)
    return read_metrics(folder / "run")


def check(lines: list[dict[str, Any]], most: int) -> None:
    """No honest client was ever shut out, and at most so many rounds were lost."""
    assert {client for line in lines for client in line.get("shut_out", {})} <= {LIAR}
    assert sum(line["abandoned"] for line in lines) <= most


@pytest.mark.parametrize("kind", sorted(LIES))
def test_a_liar_is_shut_out_and_costs_a_round_or_two(tmp_path, kind, record_property):
    lie, most, rounds = LIES[kind]
    clients = TEN if kind in SEARCHED else CLIENTS
    lines = soak(tmp_path, lambda round: lie, rounds, clients)
    check(lines, most)
    assert list(lines[-1]["shut_out"]) == [LIAR]
    assert lines[-1]["contributors"] == [f"client-{k}" for k in range(clients) if f"client-{k}" != LIAR]
    record_property("fault", f"secure, one of {clients}: {kind}")
    record_property("outcome", f"{sum(r['abandoned'] for r in lines)} rounds abandoned; shut out, nobody else")


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LIES))
def test_of_two_hundred_rounds_with_a_liar_all_but_two_commit(tmp_path, kind):
    lie, most, _ = LIES[kind]
    lines = soak(tmp_path, lambda round: lie, 200, clients=TEN)
    check(lines, most)
    assert sum(not line["abandoned"] for line in lines[5:]) >= 0.99 * len(lines[5:])


@pytest.mark.parametrize("kind", ["deals shares of another secret", "garbles three packages and drops out"])
def test_without_shutting_out_one_client_stops_every_round(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(Suspects, "shut_out", lambda self: {})
    with pytest.raises(RunError, match=r"no round of .* was completed"):
        soak(tmp_path, lambda round: LIES[kind][0], 2)  # one is what a liar may cost
    assert all(line["abandoned"] for line in read_metrics(tmp_path / "run"))


def test_without_splitting_one_client_spoils_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(Suspects, "groups", lambda self, cohort, least, draw: [list(cohort)])
    with pytest.raises(RunError, match=r"no round of .* was completed"):
        soak(tmp_path, lambda round: out_of_range, 3)  # two are what a liar may cost


def test_a_client_that_only_drops_out_is_not_shut_out(tmp_path):
    lines = soak(tmp_path, lambda round: gone, 2)
    check(lines, 0)
    assert "shut_out" not in lines[-1]


def test_too_few_clients_to_split_are_not_split_and_that_is_said(tmp_path):
    heard = Heard()
    with pytest.raises(RunError, match=r"no round of .* was completed"):
        soak(tmp_path, lambda round: out_of_range, 4, clients=5, listener=heard)
    assert sum("two groups of at least 3; 5 clients are too few" in line for line in heard.lines) == 1


def test_a_run_that_is_resumed_remembers_its_suspects(tmp_path):
    def fault(client: str, post: Post, handler: Handler) -> Answer:
        return (out_of_range if client == LIAR else deliver)(client, post, handler)

    config, vocab, transport, roster = prepared(tmp_path, fault, 8, TEN)
    with pytest.raises(KeyboardInterrupt):
        train_deployed(config, vocab, tmp_path / "run", transport, roster, Heard(4), patience=QUICK)
    before = last_checkpoint(tmp_path / "run")
    assert len(before.suspects["spoilt"]) == 4
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK, resume=True)
    lines = read_metrics(tmp_path / "run")
    check(lines, 2)
    assert list(lines[-1]["shut_out"]) == [LIAR]


def test_clients_that_hide_among_more_than_a_group_has_are_not_split(tmp_path):
    """A liar that lied twice does not end a run whose clients want to hide among more than half of them."""
    fault = acting(lambda round: out_of_range if round < 2 else None)
    config, vocab, transport, roster = prepared(tmp_path, fault, 4, 6)
    for session in transport.handlers.values():
        session._floors = Floors(4)  # type: ignore[attr-defined]
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    lines = read_metrics(tmp_path / "run")
    assert [line["abandoned"] for line in lines] == [True, True, False, False]
    assert [len(line["contributors"]) for line in lines[2:]] == [6, 6]


@pytest.mark.parametrize("method", ["fedavg", "fedadmm"])
def test_a_round_of_groups_is_the_round_of_the_whole_cohort(tmp_path, method, monkeypatch):
    """Two sums of half the clients each, added up, make the model of one sum, but for the rounding of fixed point.

    Clients weigh alike here: a smaller sum holds weights within a smaller ratio.
    """

    def halves(self: Suspects, cohort: Sequence[str], least: int, draw: str) -> list[list[str]]:
        first = draw.endswith("/0")  # calibrated by everybody
        return [list(cohort)] if first else [list(cohort[::2]), list(cohort[1::2])]

    models = []
    for name in ("whole", "split"):
        config, vocab, transport, roster = prepared(tmp_path / name, deliver, 2, 6)
        if name == "split":
            monkeypatch.setattr(Suspects, "groups", halves)
        alike = Part("uniform") if method == "fedavg" else None
        run = replace(config, method=method, mediator=alike)
        train_deployed(run, vocab, tmp_path / name / "run", transport, roster, patience=QUICK)
        assert [len(line["contributors"]) for line in read_metrics(tmp_path / name / "run")] == [6] * 2
        models.append(last_model(tmp_path / name / "run"))
    for layer, whole in models[0].items():
        torch.testing.assert_close(models[1][layer], whole, rtol=0, atol=1e-5)


def test_a_private_run_shuts_out_a_liar_that_is_proved_and_splits_no_cohort(tmp_path):
    def fault(client: str, post: Post, handler: Handler) -> Answer:
        lies = {LIAR: another_secret, "client-1": out_of_range}  # the second one is folded back into the sum's ball
        return lies.get(client, deliver)(client, post, handler)

    heard = Heard()
    config = private_config(tmp_path, clients=6, secure=True, rounds=3)
    transport, roster = enrol(tmp_path, 6, fault=fault)
    deploy(tmp_path, config, transport, roster, listener=heard)
    saved = last_checkpoint(tmp_path / "deployed")
    assert list(saved.suspects["proved"]) == [LIAR]
    assert saved.suspects["spoilt"] == []
    assert sum(f"{LIAR} is shut out of this run: lied" in line for line in heard.lines) == 1
    assert all("shut_out" not in line for line in read_metrics(tmp_path / "deployed"))


STRATEGIES = st.lists(st.sampled_from([None, "gone", *sorted(LIES)]), min_size=4, max_size=4)


def any_strategy(strategy: list[str | None]) -> None:
    known: dict[str | None, Lie | None] = {None: None, "gone": gone, **{kind: lie for kind, (lie, *_) in LIES.items()}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            lines = soak(Path(folder), lambda round: known[strategy[round]] if round < 4 else None, 4, clients=7)
        except RunError:  # nothing to test: every round was lost
            lines = read_metrics(Path(folder) / "run")
        check(lines, 2)  # two sums spoilt, or one and then a lie that is proved


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STRATEGIES)
def test_no_honest_client_is_shut_out_whatever_one_liar_does(strategy):
    any_strategy(strategy)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(STRATEGIES)
def test_no_honest_client_is_shut_out_whatever_one_liar_does_often(strategy):
    any_strategy(strategy)


# The search alone, without training: many clients, many rounds, any strategy.


def search(
    names: list[str], liars: set[str], spoils: Callable[[set[str]], bool], least: int, rounds: int
) -> tuple[Suspects, int, set[str]]:
    """Play rounds; a group with a liar is spoilt where `spoils` says. Return suspects, rounds lost, all shut out."""
    suspects, lost, out = Suspects(), 0, set()
    for round in range(rounds):
        shut = set(suspects.shut_out())
        out |= shut
        cohort = [name for name in names if name not in shut]
        groups = suspects.groups(cohort, least, f"run/{round}")
        assert sorted(name for group in groups for name in group) == sorted(cohort)  # an upload is in one sum
        assert len(groups) == 1 or min(map(len, groups)) >= least
        spoilt = [group for group in groups if liars & set(group) and spoils(set(group))]
        lost += len(spoilt) == len(groups)
        for group in spoilt:
            suspects.spoil(group)
    return suspects, lost, out | set(suspects.shut_out())


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(6, 60), st.integers(3, 10), st.data())
def test_one_liar_costs_two_rounds_whatever_it_spoils_and_honest_clients_stay(clients, least, data):
    names = [f"c{k}" for k in range(max(clients, 2 * least))]
    liar = data.draw(st.sampled_from(names))
    moods = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    at = iter(range(10**6))
    suspects, lost, out = search(names, {liar}, lambda group: moods[next(at) % len(moods)], least, 30)
    assert out <= {liar}
    assert lost <= 2
    if all(moods):
        assert out == {liar}
        assert len(suspects.spoilt) <= 2 + math.ceil(math.log2(len(names))) + 1


@pytest.mark.parametrize("clients", [10, 30])
def test_two_liars_that_spoil_all_they_can_are_both_found(clients):
    names = [f"c{k:02d}" for k in range(clients)]
    for second in range(1, 6):
        liars = {names[0], names[second]}
        suspects, lost, _ = search(names, liars, lambda group: True, 3, 60)
        assert set(suspects.shut_out()) == liars
        assert lost <= 6
    assert Suspects.from_json(suspects.to_json()) == suspects
    assert Suspects.from_json({}).to_json() == {}


@pytest.mark.parametrize("clients", [10, 30])
def test_two_liars_can_blame_one_honest_client_at_a_time_and_no_more(clients):
    """They spoil the sums of one honest client until it is shut out, then those of the next one; see docs/secure.md."""
    names = [f"c{k:02d}" for k in range(clients)]
    for second in range(1, 6):
        liars = {names[0], names[second]}
        honest = [name for name in names if name not in liars]
        suspects, lost, most = Suspects(), 0, 0
        for round in range(60):
            shut = set(suspects.shut_out())
            most = max(most, len(shut - liars))
            cohort = [name for name in names if name not in shut]
            victim = next(name for name in honest if name in cohort)
            groups = suspects.groups(cohort, 3, f"{second}/{round}")
            spoilt = [group for group in groups if victim in group and liars & set(group)]
            lost += len(spoilt) == len(groups)
            for group in spoilt:
                suspects.spoil(group)
        assert most == 1
        assert not set(suspects.shut_out()) - liars
        assert lost <= 3


# Signed answers.


def test_an_answer_without_its_clients_signature_does_not_count(tmp_path, monkeypatch, record_property):
    """An answer in the name of another client is refused; with the check away it counts."""
    other = Identity.make()

    def forged(client: str, post: Post, handler: Handler) -> Answer:
        answer = deliver(client, post, handler)
        if client != LIAR or post.kind != "train" or not isinstance(answer, bytes):
            return answer
        return signed_answer(other, client, post.kind, answer[:-SIGNATURE_BYTES])

    lines = soak(tmp_path / "checked", lambda round: forged, 2, clients=4)
    assert [line["refused"] for line in lines] == [{LIAR: "not signed"}] * 2
    monkeypatch.setattr(calls_side, "check_answer", lambda identity, name, kind, message: message[:-SIGNATURE_BYTES])
    lines = soak(tmp_path / "unchecked", lambda round: forged, 2, clients=4)
    assert [line["refused"] for line in lines] == [{}] * 2
    record_property("fault", "an answer in another client's name")
    record_property("outcome", "not signed; the round goes on without it")


def test_a_signature_binds_client_kind_and_every_byte():
    identity = Identity.make()
    message = signed_answer(identity, "a", "train", b"answer")
    assert check_answer(identity.public, "a", "train", message) == b"answer"
    for name, kind, data in [("b", "train", message), ("a", "upload", message), ("a", "train", b"x" + message[1:])]:
        with pytest.raises(SecureSumError, match="without the signature of"):
            check_answer(identity.public, name, kind, data)
    with pytest.raises(SecureSumError, match="without the signature of"):
        check_answer(identity.public, "a", "train", b"short")
