"""What goes wrong in a private federation: servers that are killed, clients that lie, calls that come too soon."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load

from keyfed.engine.device_store import LastPart
from keyfed.engine.messages import Rejected, unpack
from keyfed.engine.network import init_params
from keyfed.engine.noised_sum import words_of
from keyfed.engine.private_part import Promise
from keyfed.engine.remote_private import OpenedSum
from keyfed.engine.remote_secure import Summed
from keyfed.engine.transport import Lost, deliver
from keyfed.errors import PrivacyError, RunError
from keyfed.federated.types import Share
from keyfed.private.accounting import Release, TreeRelease, epsilon
from keyfed.private.budget import Ledger, read_ledger
from keyfed.private.noise import Noising, norm_of
from keyfed.run import course, deployed_private
from keyfed.run import privacy as run_privacy
from keyfed.run.checkpoint import read_checkpoint
from keyfed.run.folder import read_metrics
from keyfed.run.outside import build_network

from .deployed import last_model, session, vocabulary
from .private import Stops, deploy, enrol, models_of, private_config, recorded, silence, without_noise
from .test_faults import on_head, on_tensors, poisoned

VICTIM = "client-2"


class Killed(Exception):
    """Somebody pulled the plug."""


def once(number):
    """Raise `Killed` at the call of this number, and never again."""
    numbers = itertools.count(1)

    def maybe(*ignored):
        if next(numbers) == number:
            raise Killed

    return maybe


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_killed_between_the_ledger_and_the_checkpoint(tmp_path, monkeypatch, secure):
    """The round is done again: a row of its own, other noise, a cohort of its own."""
    cohorts, drawn, save = [], recorded(monkeypatch), course.save_checkpoint
    draw, kill = deployed_private.drawn, once(2)

    def note(names, rate):
        cohorts.append(draw(names, rate))
        return cohorts[-1]

    def saves(*given):
        kill()
        save(*given)

    monkeypatch.setattr(deployed_private, "drawn", note)
    monkeypatch.setattr(course, "save_checkpoint", saves)
    config = private_config(tmp_path, secure=secure)
    transport, roster = enrol(tmp_path)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    assert [e.round for e in read_ledger(tmp_path / "deployed").entries] == [0, 1]
    result = deploy(tmp_path, config, transport, roster, resume=True)
    entries = read_ledger(tmp_path / "deployed").entries
    assert [(e.round, e.attempt) for e in entries] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert len(drawn) == len(cohorts) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert (result["rounds"], result["privacy"]["releases"], result["privacy"]["retried"]) == (3, 4, 1)
    assert result["privacy"]["verdict"] == "GUARANTEE"


def test_killed_after_the_row_and_before_the_noise(tmp_path, monkeypatch):
    recorded(monkeypatch, once(2))
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    assert len(read_ledger(tmp_path / "deployed").entries) == 2
    result = deploy(tmp_path, config, transport, roster, resume=True)
    assert (result["rounds"], result["privacy"]["releases"]) == (3, 4)


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedadmm"])
def test_what_leaves_a_client_is_its_clipped_part_and_nothing_else(tmp_path, method):
    more = {"fedatt": {"bound": 0.5}, "fedadmm": {"server_step": "published"}}.get(method, {})
    sent = []

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        if post.kind == "train":
            sent.append(unpack(answer))
        return answer

    clip = 0.02
    config = private_config(tmp_path, method, clients=3, privacy={"clip": clip, "noise": 0.5}, **more)
    deploy(tmp_path, config, *enrol(tmp_path, 3, fault=fault))
    assert len(sent) == 9
    clipped = 0
    for head, tensors in sent:
        assert set(head) == {"run", "round", "attempt", "part"}
        assert set(head["part"]) == {"masses", "whole"}
        layers = load(tensors)
        assert set(head["part"]["masses"]) == (set(layers) if method == "fedatt" else set())
        kappa = clip / (2 * len(layers) ** 0.5)
        norm = norm_of(layers.values(), (kappa * mass for mass in head["part"]["masses"].values()))
        assert norm <= clip * (1 + 1e-6)
        clipped += not head["part"]["whole"]
    assert clipped


def one_round(tmp_path, name, change, method="fedavg", **more):
    """The model after one round in which the victim's answer is changed."""

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        return change(answer) if client == VICTIM and post.kind == "train" else answer

    config = private_config(tmp_path, method, rounds=1, privacy={"clip": 0.5}, **more)
    deploy(tmp_path, config, *enrol(tmp_path, name=f"{name}-clients", fault=fault), name)
    return last_model(tmp_path / name)


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_a_hostile_upload_moves_the_sum_by_the_clip_at_most(tmp_path, monkeypatch, method):
    without_noise(monkeypatch)
    more = {"bound": 5.0} if method == "fedatt" else {}
    sums = []
    inner = deployed_private.PrivateCourse._line

    def keep(self, record, before):
        sums.append(captured.pop())
        return inner(self, record, before)

    captured = []
    from keyfed.engine.noised_sum import NoisedSum

    aggregate = NoisedSum.aggregate

    def seen(self, refused):
        captured.append(({n: t.clone() for n, t in self._total.items()}, dict(self._mass)))
        return aggregate(self, refused)

    monkeypatch.setattr(NoisedSum, "aggregate", seen)
    monkeypatch.setattr(deployed_private.PrivateCourse, "_line", keep)
    one_round(tmp_path, "silent", lambda a: Lost("no answer"), method, **more)
    huge = on_tensors(lambda ts: {n: 1e6 * 0.5 * torch.ones_like(t) for n, t in ts.items()})
    one_round(tmp_path, "hostile", lambda a: on_head(part=part_of(a) | {"whole": True})(huge(a)), method, **more)
    (silent, light), (hostile, heavy) = sums
    moved = norm_of((hostile[n] - t for n, t in silent.items()), (heavy[n] - m for n, m in light.items()))
    assert 0.4 < moved <= 0.5 * (1 + 1e-9)


def part_of(answer):
    return unpack(answer).head["part"]


SPOILT = {
    "one NaN": poisoned(float("nan")),
    "infinity": poisoned(float("inf")),
    "no part": on_head(part=None),
    "no word of the clip": on_head(part={"masses": {}}),
    "masses of a method that has none": on_head(part={"masses": {"output.bias": 1.0}, "whole": True}),
    "a tensor missing": on_tensors(lambda ts: {n: ts[n] for n in sorted(ts)[1:]}),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_part_counts_as_nothing(tmp_path, monkeypatch, fault):
    without_noise(monkeypatch)
    silent = one_round(tmp_path, "silent", lambda a: Lost("no answer"))
    spoilt = one_round(tmp_path, "spoilt", SPOILT[fault])
    assert all(torch.equal(p, spoilt[name]) for name, p in silent.items())


def test_a_sum_of_liars_is_brought_within_what_clients_may_sum_up_to():
    like = {"w": torch.zeros(40), "b": torch.zeros(3)}
    noising = Noising(2.0, 0.0, 0.0, 3.0, 3.0, 0.1, silence)
    wild = np.random.default_rng(0).integers(0, 2**32, words_of(like), dtype=np.uint32)
    opened = OpenedSum(like, noising, Summed(wild, 3, ("a", "b", "c")))
    assert norm_of(opened._total.values(), opened._mass.values()) == pytest.approx(6.0)
    assert abs(opened._told["within"]) <= 1.5
    promise = Promise(2.0, None, 0.2, True, 1.0, 100)
    share = Share({"w": 1.0, "b": 0.5}, {"w": 1.0, "b": 0.5})
    vectors = [promise.vector({"w": torch.full((40,), 0.1 * k), "b": torch.ones(3)}, share, 2.0, 3) for k in (1, 2, 9)]
    honest = OpenedSum(like, noising, Summed(sum(vectors), 3, ("a", "b", "c")))
    plain = [promise.part({"w": torch.full((40,), 0.1 * k), "b": torch.ones(3)}, share, 2.0) for k in (1, 2, 9)]
    for name in like:
        torch.testing.assert_close(
            honest._total[name], sum(p.layers[name].double() for p in plain), rtol=0, atol=3 * 2.0**-27
        )
    assert honest._told["within"] == pytest.approx(sum(0.5 if p.whole else -0.5 for p in plain))


@pytest.mark.parametrize("ratio", [False, True], ids=["sum", "ratio"])
def test_whatever_liars_send_an_honest_client_moves_a_masked_sum_by_the_clip_at_most(ratio):
    """Also where they put numbers beside the seams of 32 bits, at which a sum would change its sign."""
    like, clip, members = {"w": torch.zeros(40), "b": torch.zeros(3)}, 2.0, 20
    noising = Noising(clip, 0.0, 0.0, 20.0, 20.0, 0.1 if ratio else None, silence)
    promise = Promise(clip, None, 0.2, ratio, 1.0, 100)
    names, rng = tuple(map(str, range(members))), np.random.default_rng(0)
    seams = np.array([0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 1], np.uint32)

    def opened(lie, part, scale):
        share = Share({"w": 1.0, "b": scale}, {"w": scale, "b": 1.0}) if part is not None else None
        vector = promise.vector(like if part is None else part, share, clip, members)
        found = OpenedSum(like, noising, Summed(lie + vector, members, names))
        return [*found._total.values(), torch.tensor([*found._mass.values()], dtype=torch.float64)], found._told

    worst = 0.0
    for trial in range(2_000):
        lie = rng.choice(seams, words_of(like)) if trial % 2 else rng.integers(0, 2**32, words_of(like), np.uint32)
        if trial % 3 == 0:
            lie[rng.random(len(lie)) < 0.95] = 0  # within what clients may sum up to: nothing is shortened after
        size = 10.0 ** rng.uniform(-8, 1)
        part = {name: torch.from_numpy(size * rng.normal(size=len(p))) for name, p in like.items()}
        (one, told), (other, untold) = opened(lie, part, rng.random()), opened(lie, None, 0.0)
        moved = norm_of(a - b for a, b in zip(one, other, strict=True))
        worst = max(worst, moved)
        assert moved <= clip * (1 + 1e-9)
        assert abs(told["within"] - untold["within"]) <= 0.5 + 1e-9
        least = norm_of(part.values()) < 1e-4 and not ratio
        assert not least or moved < 1e-3  # the smallest change is the smallest in the sum
    assert worst > 0.5 * clip


CLIPS = {
    "another one": (None, 3, 5.1, False),
    "the same": (None, 3, 5.0, True),
    "grown as far as it can": (0.5, 3, 5.0 * np.exp(0.3), True),
    "grown further": (0.5, 3, 5.0 * np.exp(0.31), False),
    "shrunk as far as it can": (0.9, 10, 5.0 * np.exp(-0.2), True),
    "shrunk further": (0.9, 10, 5.0 * np.exp(-0.21), False),
    "moved before the first round": (0.5, 0, 5.1, False),
    "zero": (0.5, 3, 0.0, False),
    "minus one": (0.5, 3, -1.0, False),
    "none": (0.5, 3, None, False),
    "a text": (0.5, 3, "5", False),
}


@pytest.mark.parametrize("what", CLIPS)
def test_a_client_refuses_a_clip_that_the_promise_cannot_have_led_to(what):
    quantile, round, clip, fine = CLIPS[what]
    promise = Promise(5.0, quantile, 0.2, False, 1.0, 100)
    told = {"clip": clip, "step": round}
    if fine:
        assert promise.check(told, round, None, "upload").clip == clip
        return
    with pytest.raises(Rejected) as caught:
        promise.check(told, round, None, "upload")
    assert caught.value.reason in ("refused by client", "non-finite report")


STEPS = {
    "no faster than one step allows": (0.5, 4, 5.0 * np.exp(0.2), True),
    "faster": (0.5, 4, 5.0 * np.exp(0.21), False),
    "down, and faster": (0.5, 4, 5.0 * np.exp(-0.21), False),
    "over many steps": (0.5, 9, 5.0 * np.exp(1.0), True),
    "one that stays, moved": (None, 9, 5.1, False),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_clip_moves_from_the_last_one_of_this_client_by_the_rate_a_step(what):
    quantile, step, clip, fine = STEPS[what]
    promise, last = Promise(5.0, quantile, 0.2, False, 1.0, 100), LastPart(3, 5.0)
    told = {"clip": clip, "step": step}
    if fine:
        assert promise.check(told, 50, None, "upload", last) == (clip, step)
        return
    with pytest.raises(Rejected, match="a clip of"):
        promise.check(told, 50, None, "upload", last)


def test_a_round_beyond_those_that_were_promised_is_refused():
    promise = Promise(5.0, 0.5, 0.2, False, 1.0, 10)
    assert promise.check({"clip": 5.0, "step": 9}, 9, None, "upload").step == 9
    with pytest.raises(Rejected, match="round 1001 of a run that promised 10"):
        promise.check({"clip": 1e30, "step": 0}, 1000, None, "upload")


def test_a_client_remembers_the_clip_and_hears_of_the_rounds(tmp_path):
    """A clip far from the last one is not answered, whatever round it is said to be, after a restart neither."""
    jumps = []

    def fault(client, post, handler):
        if client == VICTIM and post.kind == "train" and unpack(post.body).head["round"] == 1:
            jumps.append(client)
            public = unpack(post.body).head["public"]
            handler = session(tmp_path / "clients", tmp_path / "texts" / f"{VICTIM}.txt")
            post = post._replace(body=on_head(round=2, public=public | {"clip": 5.0 * np.exp(0.25)})(post.body))
            with pytest.raises(Rejected, match="a clip of"):
                handler.handle(post.kind, post.body)
            return Lost("refused by client")
        return deliver(client, post, handler)

    config = private_config(tmp_path, rounds=3, privacy={"quantile": 0.9, "count_noise": 5.0})
    deploy(tmp_path, config, *enrol(tmp_path, fault=fault))
    assert jumps


@pytest.mark.parametrize(("purpose", "part"), [("upload", "valid"), ("evaluation", "test"), ("calibration", None)])
def test_a_client_scores_nothing_for_a_private_run(purpose, part):
    with pytest.raises(Rejected, match="never for a score"):
        Promise(5.0, None, 0.2, False, 1.0, 100).check({"clip": 5.0, "step": 0}, 0, part, purpose)


def test_another_clip_to_one_client_opens_no_masked_sum(tmp_path, monkeypatch):
    """Masks are bound to the round's public numbers; a moving clip lets a server try."""
    without_noise(monkeypatch)

    def fault(client, post, handler):
        if client == VICTIM and post.kind == "train" and unpack(post.body).head["round"] == 1:
            head = unpack(post.body).head
            post = post._replace(
                body=on_head(public=head["public"] | {"clip": head["public"]["clip"] * 1.01})(post.body)
            )
        return deliver(client, post, handler)

    moving = {"quantile": 0.5, "count_noise": 5.0}
    config = private_config(tmp_path, secure=True, rounds=2, privacy=moving)
    deploy(tmp_path, config, *enrol(tmp_path, fault=fault))
    first, second = models_of(tmp_path / "deployed", 2)
    started = init_params(build_network(config, 26, None), 1)
    assert not any(torch.equal(p, started[name]) for name, p in first.items())  # the sum before it opened
    assert all(torch.equal(p, second[name]) for name, p in first.items())  # nothing but (no) noise was released
    assert len(read_ledger(tmp_path / "deployed").entries) == 2


def test_a_client_whose_training_is_refused_sends_zeros_into_a_masked_sum(tmp_path, monkeypatch):
    """It does not drop out: its text must not decide whether the others' sum opens."""
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=3, rounds=1, secure=True)  # three of three must stay
    transport, roster = enrol(tmp_path, 3)
    make = transport.handlers[VICTIM]._make

    def spoilt(about):
        learner = make(about)
        inner = learner.solve

        def solve(theta, round, turn):
            done = inner(theta, round, turn)
            return done._replace(loss=float("nan"))

        learner.solve = solve
        return learner

    transport.handlers[VICTIM]._make = spoilt
    deploy(tmp_path, config, transport, roster)
    started = init_params(build_network(config, 26, None), 1)
    assert any(not torch.equal(p, started[name]) for name, p in last_model(tmp_path / "deployed").items())


def test_a_client_whose_training_fails_sends_zeros_into_a_masked_sum(tmp_path, monkeypatch):
    without_noise(monkeypatch)
    config = private_config(tmp_path, clients=3, rounds=1, secure=True)
    transport, roster = enrol(tmp_path, 3)
    make = transport.handlers[VICTIM]._make

    def spoilt(about):
        learner = make(about)

        def solve(theta, round, turn):
            raise RuntimeError("out of memory")

        learner.solve = solve
        return learner

    transport.handlers[VICTIM]._make = spoilt
    deploy(tmp_path, config, transport, roster)
    started = init_params(build_network(config, 26, None), 1)
    assert any(not torch.equal(p, started[name]) for name, p in last_model(tmp_path / "deployed").items())


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["train", "upload", "unmask"])
def test_a_round_in_which_one_who_stays_would_decide_is_booked_without_amplification(tmp_path, monkeypatch, kind, lost):
    everybody = [f"client-{k}" for k in range(10)]
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: everybody[:9])

    def fault(client, post, handler):
        gone = post.kind == kind and int(client[-1]) < lost
        return Lost("unreachable") if gone else deliver(client, post, handler)

    config = private_config(tmp_path, clients=10, cohort=9, rounds=1, secure=True)
    result = deploy(tmp_path, config, *enrol(tmp_path, 10, fault=fault))
    (entry,) = read_ledger(tmp_path / "deployed").entries
    # Seven of nine are needed: with two lost one fewer closes it, with three lost one more opens it.
    assert entry.row.q == (1.0 if lost in (2, 3) else 0.9)
    assert ("1 releases are booked at rate 1" in " ".join(result["privacy"]["statement"])) == (lost in (2, 3))


def test_a_row_at_rate_one_that_exceeds_the_budget_ends_the_run_unreleased(tmp_path, monkeypatch):
    everybody = [f"client-{k}" for k in range(9)]
    monkeypatch.setattr(deployed_private, "drawn", lambda names, rate: everybody)

    def fault(client, post, handler):
        late = post.kind == "train" and unpack(post.body).head["round"] == 1
        return Lost("unreachable") if late and client < "client-2" else deliver(client, post, handler)

    drawn = recorded(monkeypatch)
    fits = epsilon([Release(1.0, 0.8, 2, 2e-10)], 1e-3)
    exceeds = epsilon([Release(1.0, 0.8), Release(1.0, 1.0)], 1e-3)
    assert fits * 1.01 < exceeds
    config = private_config(tmp_path, clients=20, cohort=16, rounds=3, secure=True)
    config = replace(config, privacy=replace(config.privacy, epsilon=(fits + exceeds) / 2, delta=1e-3))
    result = deploy(tmp_path, config, *enrol(tmp_path, 20, fault=fault))
    assert (result["rounds"], result["privacy"]["releases"], len(drawn)) == (1, 1, 1)
    assert result["privacy"]["pld"] < fits


class Copies(Stops):
    """Ends the run after a round, and copies its folder after another."""

    def __init__(self, run, after, stop):
        super().__init__(stop)
        self.run, self.copied = run, after

    def round(self, record):
        if record["round"] == self.copied:
            shutil.copytree(self.run, self.run.with_name("backup"), ignore=shutil.ignore_patterns("*lock"))
        super().round(record)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("method", ["fedavg", "tree"])
def test_a_folder_from_an_older_copy_is_refused(tmp_path, secure, method):
    tree = {"mechanism": "tree", "separation": 1} if method == "tree" else {}
    config = private_config(tmp_path, clients=4, rounds=5, secure=secure, privacy=tree)
    transport, roster = enrol(tmp_path, 4)
    run = tmp_path / "deployed"
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Copies(run, 1, 3))
    shutil.rmtree(run)
    shutil.copytree(run.with_name("backup"), run)
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(PrivacyError, match="took part in step 3 of this run, and the ledger has 1 rows") as caught:
        deploy(tmp_path, config, transport, roster, resume=True)
    assert "\n" not in str(caught.value)
    assert (run / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("method", ["fedavg", "tree"])
def test_a_step_that_the_ledger_does_not_know_is_booked(tmp_path, monkeypatch, method):
    """Killed before the row, or the last row lost: clients that took part do not do so again for the same step."""
    tree = {"mechanism": "tree", "separation": 1} if method == "tree" else {}
    config = private_config(tmp_path, clients=4, rounds=3, privacy=tree)
    transport, roster = enrol(tmp_path, 4)
    book, kill = Ledger.book, once(2)

    def books(*given):
        kill()
        return book(*given)

    monkeypatch.setattr(Ledger, "book", books)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    sent = counting(transport)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    entries = read_ledger(tmp_path / "deployed").entries
    assert [(e.what, e.round) for e in entries] == [("update", 0), ("heard", 1), ("update", 1), ("update", 2)]
    assert set(sent.values()) == {2}
    assert (result["rounds"], result["privacy"]["retried"]) == (3, 1)
    if method == "tree":
        assert [e.row.tree for e in entries] == [0, 0, 1, 1]


# tree noise


def tree_config(folder, **more):
    """Three groups of clients, one after the other, or as many as their size makes."""
    return private_config(
        folder, clients=6, privacy={"mechanism": "tree", **more.pop("privacy", {})}, **{"cohort": 2, **more}
    )  # fmt: skip


def counting(transport, kind="train"):
    """Count the parts that leave each client, with its answers to messages of a kind."""
    sent, inner = Counter(), transport.fault

    def watch(client, post, handler):
        answer = inner(client, post, handler)
        if post.kind == kind and isinstance(answer, bytes) and unpack(answer).tensors:
            sent[client] += 1
        return answer

    transport.fault = watch
    return sent


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_client_refuses_a_call_before_its_turn_whatever_the_server_says(tmp_path, monkeypatch, secure):
    everybody = [f"client-{k}" for k in range(6)]
    monkeypatch.setattr(deployed_private.DeployedPrivacy, "cohort", lambda self, there: everybody)
    config = tree_config(tmp_path, rounds=4, cohort=3 if secure else 2, secure=secure)
    transport, roster = enrol(tmp_path, 6)
    sent = counting(transport, "upload" if secure else "train")
    lines = []

    class Hears(Stops):
        def say(self, line):
            lines.append(line)

    deploy(tmp_path, config, transport, roster, listener=Hears(99))
    assert sent == dict.fromkeys(everybody, 2)  # steps 0 and 3 of four; 0 and 2 where two groups take turns
    assert sum("too soon" in line for line in lines) == 1


def test_a_client_remembers_its_last_step_when_it_is_restarted(tmp_path, monkeypatch):
    everybody = [f"client-{k}" for k in range(6)]
    monkeypatch.setattr(deployed_private.DeployedPrivacy, "cohort", lambda self, there: everybody)
    config = tree_config(tmp_path, rounds=3)
    transport, roster = enrol(tmp_path, 6)
    sent = counting(transport)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Stops(1))
    text = tmp_path / "texts" / "client-0.txt"
    transport.handlers["client-0"] = session(tmp_path / "clients", text)
    deploy(tmp_path, config, transport, roster, resume=True)
    assert sent == dict.fromkeys(everybody, 1)


def prefix_noise(run, number):
    """The blocks whose noise is in the model after a round, by layer."""
    found = {}
    for key, t in read_checkpoint(run / "checkpoint", number).state.server.items():
        if key.startswith(deployed_private.TREE) and key != deployed_private.PLACE:
            layer = key.split("/", 4)[4]
            found[layer] = found.get(layer, 0) + t
    return found


def test_the_noise_in_the_model_is_that_of_the_blocks_in_the_checkpoint(tmp_path, monkeypatch):
    """Also after a server was ended and went on: the tree goes on with it, and its blocks are gone in the end."""
    monkeypatch.setattr(run_privacy, "group_of", lambda client, groups, seed: -1)  # nobody's turn ever comes
    config = tree_config(tmp_path, rounds=7)
    transport, roster = enrol(tmp_path, 6)
    vocab, _ = vocabulary(tmp_path)
    started = init_params(build_network(config, len(vocab), None), config.train.seed)
    run = tmp_path / "deployed"
    for stop in (1, 3, 4, 6):
        with pytest.raises(KeyboardInterrupt):
            deploy(tmp_path, config, transport, roster, listener=Stops(stop), resume=stop > 1)
        blocks, model = prefix_noise(run, stop), last_model(run)
        assert set(blocks) == set(model)
        for name, p in model.items():
            noise = (p.double() - started[name].double()) * 2 / 5.0
            torch.testing.assert_close(noise, blocks[name], rtol=1e-4, atol=1e-4)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    rows = [e.row for e in read_ledger(run).entries]
    assert rows == [TreeRelease(1.0, 3)] * 7
    assert result["privacy"]["verdict"] == "GUARANTEE"
    assert prefix_noise(run, 7) == {}
    assert len(list((run / "checkpoint").glob("*.safetensors"))) == 1


def test_a_release_that_is_not_in_the_checkpoint_begins_another_tree(tmp_path, monkeypatch):
    save, kill = course.save_checkpoint, once(3)

    def saves(*given):
        kill()
        save(*given)

    monkeypatch.setattr(course, "save_checkpoint", saves)
    config = tree_config(tmp_path, rounds=4)
    transport, roster = enrol(tmp_path, 6)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    rows = [e.row.tree for e in read_ledger(tmp_path / "deployed").entries]
    assert rows == [0, 0, 0, 1, 1]
    assert (result["rounds"], result["privacy"]["releases"]) == (4, 5)
    with_one = tree_config(tmp_path, rounds=5)
    deploy(tmp_path, with_one, *enrol(tmp_path, 6, "others"), "whole")
    assert read_ledger(tmp_path / "whole").epsilon() != read_ledger(tmp_path / "deployed").epsilon()


def test_nobody_connected_releases_nothing(tmp_path):
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    transport.handlers.clear()
    with pytest.raises(RunError, match="cost nothing"):
        deploy(tmp_path, config, transport, roster)
    assert read_ledger(tmp_path / "deployed").entries == []
    assert read_metrics(tmp_path / "deployed") == []


def test_a_torn_row_is_of_the_tree_in_progress(tmp_path, monkeypatch):
    save, kill = course.save_checkpoint, once(2)

    def saves(*given):
        kill()
        save(*given)

    monkeypatch.setattr(course, "save_checkpoint", saves)
    config = tree_config(tmp_path, rounds=4)
    transport, roster = enrol(tmp_path, 6)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, resume=True, listener=Stops(3))
    run = tmp_path / "deployed"
    with (run / "ledger.jsonl").open("ab") as f:
        f.write(b'{"what": "upd')
    deploy(tmp_path, config, transport, roster, resume=True)
    found = [(e.what, e.row.tree) for e in read_ledger(run).entries]
    assert found == [("update", 0), ("update", 0), ("update", 1), ("update", 1), ("torn", 1), ("update", 2)]


def test_the_clients_that_a_ledger_is_about_cannot_be_exchanged(tmp_path):
    config = private_config(tmp_path, clients=4, cohort=3, rounds=3)
    transport, roster = enrol(tmp_path, 4)
    roster.revoke("client-3")
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Stops(1))
    path = tmp_path / "deployed" / "enrolled.json"
    names = path.read_text()
    path.unlink()
    with pytest.raises(PrivacyError, match="the ledger beside it speaks of the clients listed there"):
        deploy(tmp_path, config, transport, roster, resume=True)
    path.write_text(names.replace("client-2", "client-3"))
    with pytest.raises(PrivacyError, match=r"begun under other terms \(enrolled\)"):
        deploy(tmp_path, config, transport, roster, resume=True)
    path.write_text(names)
    assert deploy(tmp_path, config, transport, roster, resume=True)["rounds"] == 3


def test_a_run_that_goes_on_under_other_terms_is_refused(tmp_path):
    config = private_config(tmp_path, clients=3)
    transport, roster = enrol(tmp_path, 3)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Stops(1))
    louder = replace(config, privacy=replace(config.privacy, noise=0.5))
    with pytest.raises(RunError):
        deploy(tmp_path, louder, transport, roster, resume=True)
