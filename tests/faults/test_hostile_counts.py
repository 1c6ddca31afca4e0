"""What a client refuses to count: each message that a hostile server could send is one line, and nothing leaves."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load

from keyfed.engine.sums.tallies import Sketch
from keyfed.model.counts import FILE, counts_from_bytes
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run.counts import levels
from keyfed.run.remote.device import own_text
from keyfed.run.remote.train import train_deployed
from keyfed.wire.client import ClientSession
from keyfed.wire.messages import Rejected, digest_of, pack, unpack
from keyfed.wire.transport import deliver

from .deployed import QUICK, federation
from .test_counts import prepared

VICTIM = "client-0"


def read(body):
    """Return the head and the tensors of a message."""
    received = unpack(body)
    return dict(received.head), load(received.tensors)


def forged(body, change):
    """Return a message with another head or other numbers, whole in itself."""
    head, numbers = read(body)
    given = change(head, numbers)
    numbers = numbers if given is None else given
    head["sizes"] = {n: (numbers[n].numel() if isinstance(s, int) and s == t else s) for n, s, t in _sizes(head, body)}
    return pack(head | {"model": digest_of(numbers)}, numbers)


def _sizes(head, body):
    """Yield name, size as it is now and as it was: what was not forged follows the numbers."""
    before = read(body)[0]["sizes"]
    return [(name, size, before.get(name)) for name, size in head["sizes"].items()]


def set_number(name, place, value):
    def change(head, numbers):
        numbers[name][place] = value

    return change


def resized(name, size):
    return lambda head, numbers: head["sizes"].update({name: size})


def fewer(head, numbers):
    """Two clients of which both must stay."""
    names = [VICTIM, next(k["client"] for k in head["cohort"] if k["client"] != VICTIM)]
    head["cohort"] = [k for k in head["cohort"] if k["client"] in names]
    head |= {"members": 2, "threshold": 2}


def without_one(head, numbers):
    """The clients of the sum before but one."""
    other = next(k["client"] for k in head["cohort"] if k["client"] != VICTIM)
    head["cohort"] = [k for k in head["cohort"] if k["client"] != other]
    head |= {"members": 3, "threshold": 3}


def with_another(head, numbers):
    """A client in the place of one that was in the sum before."""
    at = next(n for n, k in enumerate(head["cohort"]) if k["client"] != VICTIM)
    head["identities"]["client-x"] = head["identities"].pop(head["cohort"][at]["client"])
    head["cohort"][at]["client"] = "client-x"


def unreleased(head, numbers):
    """A list of a bigram whose last word was not released."""
    missing = next(w for w in range(60) if w not in set(numbers["n1.keys"].tolist()))
    numbers["list.keys"] = torch.tensor([missing])
    numbers["list.estimates"] = torch.tensor([9.0], dtype=torch.float64)


def without(name):
    def change(head, numbers):
        del head["sizes"][name], numbers[name]

    return change


def without_layer(head, numbers):
    return {name: tensor for name, tensor in numbers.items() if name != "embedding.weight"}


def file_of(change):
    def forge(head, numbers):
        data = numbers["counts"].numpy().tobytes()
        numbers["counts"] = torch.from_numpy(np.frombuffer(change(data), np.uint8).copy())

    return forge


def swap(old, new):
    return lambda data: data.replace(old, new)


def renamed(purpose):
    return lambda head, numbers: head.update(purpose=purpose)


HOSTILE = {
    "a sum of two clients": ("recount 1", fewer, "takes part among 3 or more"),
    "a threshold of half": ("recount 1", lambda h, n: h.update(threshold=2), "has to be more than half"),
    "cells for a giant sum": ("sketch 2", lambda h, n: h.update(largest=1 << 31), '"largest" is 2147483648'),
    "cells too small for this sum": ("sketch 2", lambda h, n: h.update(largest=1), '"largest" is 1'),
    "a recount of all but one": ("recount 2", without_one, "they have to be the same clients"),
    "a sketch of all but one": ("sketch 3", without_one, "they have to be the same clients"),
    "weights of all but one": ("mixture", without_one, "they have to be the same clients"),
    "a recount of another client": ("recount 2", with_another, "1 of the 4 clients were not in an earlier sum"),
    "n-grams of nine words": ("sketch 2", renamed("sketch 9"), "of n-grams of up to 3 words"),
    "a sketch of single words": ("recount 1", renamed("sketch 1"), "of n-grams of up to 3 words"),
    "a sum of its own": ("recount 1", renamed("passwords"), 'no sum "passwords"'),
    "a release of two clients": ("sketch 2", set_number("n1.clients", 0, 2), "was released of 2 clients"),
    "a list of estimates below k": ("recount 2", set_number("list.estimates", 0, 2.0), "of fewer than 3 clients"),
    "a list of words not released": ("recount 2", unreleased, "last words were not released"),
    "a list out of order": ("recount 2", set_number("list.keys", 0, 10**6), "out of order"),
    "a list of other lengths": ("recount 2", resized("list.keys", 1 << 40), "expected a whole number"),
    "a release of giant size": ("sketch 2", resized("n1.keys", 1 << 40), "expected a whole number"),
    "a release of other lengths": ("sketch 2", resized("n1.keys", 3), '"n1.keys" is'),
    "a release without clients": ("sketch 2", without("n1.clients"), "with the numbers"),
    "another release than before": ("sketch 3", set_number("n1.clients", 0, 7), "other n-grams of length 1"),
    "uses beyond the cap": ("smoothing 1", set_number("n1.counts", 0, 10**6), "no 4 uses a client"),
    "probabilities that are none": ("smoothing 2", set_number("n1.prob", 0, 7.0), "is no probability"),
    "all of the validation text": ("smoothing 1", set_number("tokens", 0, 1 << 20), "1 to 4,096 tokens"),
    "counts of another cap": ("mixture", file_of(swap(b'\\"cap\\": 4', b'\\"cap\\": 5')), "counts of other terms"),
    "counts of a damaged file": ("mixture", file_of(lambda data: data[:-8]), "is damaged"),
    "another model than is named": ("mixture", without_layer, "is missing"),
}


def session_at(home, path):
    return ClientSession(home, VICTIM, own_text(VICTIM, path), counts=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What forks of one client said to every forged message, each at its place in a genuine count that goes on."""
    root = tmp_path_factory.mktemp("hostile")
    texts, vocab, config = prepared(root)
    said, earlier = {}, {}

    def fork(body, name):
        home = root / "forks" / name.replace(" ", "-")
        shutil.copytree(root / "clients" / VICTIM, home)
        try:
            session_at(home, texts[0]).handle("count", body)
            said[name] = "answered"
        except Rejected as e:
            said[name] = str(e)

    def fault(client, post, handler):
        if client == VICTIM and post.kind == "count":
            head = unpack(post.body).head
            for name, (purpose, change, _) in HOSTILE.items():
                if purpose == head["purpose"]:
                    fork(forged(post.body, change), name)
            if head["purpose"] == "recount 2":  # what was summed before, in this round, and an older round
                named = {key: head[key] for key in ("round", "cohort", "identities", "threshold", "members")}
                fork(forged(earlier["recount 1"], lambda h, n: h.update(named)), "a recount once more")
                fork(earlier["recount 1"], "an older message")
            fork(post.body, f"genuine {head['purpose']}")
            earlier[head["purpose"]] = post.body
        return deliver(client, post, handler)

    transport, roster = federation(root / "clients", texts, fault=fault, counts=True)
    result = train_deployed(config, vocab, root / "run", transport, roster, patience=QUICK)
    assert "counts" in result, "the genuine count went on"
    return said


def test_genuine_messages_are_answered_by_forks(answers):
    genuine = {name: said for name, said in answers.items() if name.startswith("genuine")}
    assert len(genuine) == 10
    assert set(genuine.values()) == {"answered"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_message_is_refused_in_one_line(answers, name):
    assert HOSTILE[name][2] in answers[name]
    assert "\n" not in answers[name]


def test_what_was_summed_is_not_summed_again(answers):
    assert "its part of the sum count/recount 1 already" in answers["a recount once more"]
    assert "stale" in answers["an older message"]


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """A client that has taken part in a count, its text, and the first hello and sum of that run."""
    root, seen = tmp_path_factory.mktemp("met"), {}
    texts, vocab, config = prepared(root)

    def fault(client, post, handler):
        if client == VICTIM and post.kind in ("hello", "count"):
            seen.setdefault(post.kind, post.body)
        return deliver(client, post, handler)

    transport, roster = federation(root / "clients", texts, fault=fault, counts=True)
    train_deployed(config, vocab, root / "run", transport, roster, patience=QUICK)
    return session_at(root / "clients" / VICTIM, texts[0]), seen


def hello(met, run, changed):
    """Say hello to the client in another run, with other terms."""
    head = dict(unpack(met[1]["hello"]).head)
    config = {**head["config"], "counts": {**head["config"]["counts"], **changed}}
    return unpack(met[0].handle("hello", pack(head | {"run": run, "config": config}))).head


def test_a_client_says_in_its_hello_that_it_counts(met):
    assert hello(met, "of good terms", {})["counts"] is True


def test_terms_that_make_no_sense_are_refused_with_the_run(met):
    with pytest.raises(Rejected, match=r"counts\.k is 1; at least 3") as refused:
        hello(met, "of one client", {"k": 1})
    assert refused.value.reason == "other method"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"order": 9}, "counts.order is 9; the sketches hold n-grams of 1 to 6 words"),
        ({"cap": 5_000}, "counts.cap is 5,000; real clients take 1,000 at most"),
        ({"most": 10**7}, "counts.most is 10,000,000; real clients take 100,000 at most"),
        ({"megabytes": 900.0}, "counts.megabytes is 900.0; real clients take 256 at most"),
        ({"among": 10**6}, "counts.among is 1,000,000; real clients take 4,096 at most"),
        ({"on": False}, "this run counts nothing"),
    ],
)
def test_beyond_what_clients_count_a_client_takes_part_in_the_run_alone(met, changed, said):
    assert "counts" not in hello(met, said, changed)
    with pytest.raises(Rejected) as refused:
        met[0].handle("count", forged(met[1]["count"], lambda head, numbers: head.update(run=said)))
    assert said in str(refused.value)
    assert refused.value.reason == "refused by client"


def test_a_client_whose_owner_has_not_agreed_takes_part_in_the_run_alone(tmp_path):
    """It is in no sum of the count, and in all of training."""
    texts, vocab, config = prepared(tmp_path)
    counted, said = [], set()

    def fault(client, post, handler):
        if post.kind == "count":
            counted.append(client)
            with pytest.raises(Rejected) as refused:
                silent.handle("count", post.body)
            said.add(str(refused.value))
        return deliver(client, post, handler)

    transport, roster = federation(tmp_path / "clients", texts, fault=fault, counts=True)
    silent = transport.handlers[VICTIM] = ClientSession(
        tmp_path / "clients" / VICTIM, VICTIM, own_text(VICTIM, texts[0])
    )
    out = tmp_path / "run"
    result = train_deployed(config, vocab, out, transport, roster, patience=QUICK)
    assert (result["lost"], result["refused"]) == ({}, 0)
    assert VICTIM not in counted
    about = counts_from_bytes((out / FILE).read_bytes(), len(vocab), "the run").about
    assert about.clients == len(texts) - 1
    assert said == {"refused by client: its owner takes no part in counts (keyfed client --counts)"}


def test_clients_refuse_what_a_server_releases_of_fewer_than_k(tmp_path, monkeypatch):
    """Mutants of the server: the count ends, and nothing is written."""
    texts, vocab, config = prepared(tmp_path)
    real = Sketch.admitted
    for number, (place, name, mutant) in enumerate(
        (
            (levels, "released", lambda clients, least: clients >= least - 1),
            (Sketch, "admitted", lambda self, cells, keys, least: real(self, cells, keys, least - 1)),
        )
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, mutant)
            transport, roster = federation(tmp_path / f"clients{number}", texts, counts=True)
            out = tmp_path / f"run{number}"
            result = train_deployed(config, vocab, out, transport, roster, patience=QUICK)
        assert "counts" not in result
        assert not (out / FILE).exists()


def test_the_server_sees_masked_vectors_and_sends_on_what_k_clients_wrote(tmp_path):
    texts, vocab, config = prepared(tmp_path)
    vectors, answered, kinds = [], set(), set()

    def fault(client, post, handler):
        answer = deliver(client, post, handler)
        counting.append(post.kind == "count")
        if any(counting):
            kinds.add(post.kind)
            numbers = read(post.body)[1] if post.kind == "count" else {}
            for name, tensor in numbers.items():
                if name.endswith(".clients") or name == "list.estimates":
                    assert tensor.min() >= 3, name
                if name == "counts":
                    found = counts_from_bytes(tensor.numpy().tobytes(), len(vocab), "sent on")
                    assert min(int(c.min()) for c in found.clients) >= 3
            if post.kind == "count":
                answered.update(unpack(answer[:-SIGNATURE_BYTES]).head)
            if post.kind == "upload":
                vectors.append(load(unpack(answer[:-SIGNATURE_BYTES]).tensors)["masked"].numpy())
        return answer

    counting = []
    transport, roster = federation(tmp_path / "clients", texts, fault=fault, counts=True)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    assert kinds == {"count", "upload", "unmask", "bye"}
    assert answered == {"run", "round", "attempt", "parcels", "keys"}
    wide = [vector for vector in vectors if vector.size > 100]
    assert len(wide) >= 8 * 5
    assert all((vector == 0).mean() < 0.05 for vector in wide)
    assert len({vector.tobytes() for vector in vectors}) == len(vectors)
