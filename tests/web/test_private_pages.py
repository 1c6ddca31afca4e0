"""Pages in private runs: their clipped vectors, their own account, and rounds with Python clients."""

from __future__ import annotations

import base64
import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from keyfed.engine.sums.codec import words_of
from keyfed.federated.types import Share
from keyfed.private.dp.accounting import rho_to_eps
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.noise import derived
from keyfed.private.dp.own_ledger import DELTA, OwnLedger, Spend
from keyfed.run import privacy as run_privacy
from keyfed.run.folder import read_metrics
from keyfed.run.remote import private as deployed_private
from keyfed.wire.promise import Promise
from keyfed.wire.transport import deliver
from tests.faults.deployed import last_model, vocabulary
from tests.faults.private import deploy, enrol, private_config

from .node_cases import Browser, answers, needs_node
from .test_session import with_pages

pytestmark = needs_node

CASES = "training_cases.mjs"
SGD = {"optimiser": "sgd", "lr": 0.5, "clip": 0.5, "epochs": 2, "batch_size": 3}
LAYERS = {"embedding.weight": (23, 6), "rnn.weight_hh_l0": (12, 12), "rnn.bias_ih_l0": (12,), "output.bias": (23,)}


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


# words


def uploads(rng):
    """Uploads of many sizes; some lie at the clip to the last bit, where a norm's last bit decides."""
    for n in range(40):
        size = 10.0 ** rng.uniform(-6, 6)
        yield {name: (size * rng.standard_normal(shape)).astype(np.float32) for name, shape in LAYERS.items()}, n
    zeros = {name: np.zeros(shape, np.float32) for name, shape in LAYERS.items()}
    yield zeros, 0
    for x in (3.0, 2.5, 1e-30, -7.0, 1e15):
        yield {**zeros, "output.bias": np.full(23, x, np.float32)}, 1
        one = zeros["output.bias"].copy()
        one[5] = x
        yield {**zeros, "output.bias": one}, 2


def test_a_clipped_vector_is_pythons_word_for_word(tmp_path):
    rng = np.random.default_rng(8)
    cases, expected = [], []
    for number, (upload, n) in enumerate(uploads(rng)):
        tensors = {name: torch.from_numpy(u) for name, u in upload.items()}
        norm = math.sqrt(math.fsum(float(x) ** 2 for u in upload.values() for x in u.ravel()))
        clip = (norm or 1.0, 3.0, math.nextafter(norm, 0) or 1.0, 20.0, 0.7 * norm or 0.3)[n % 5]
        scales = dict.fromkeys(LAYERS, 1.0) if n % 2 else {name: float(rng.uniform(0, 1)) for name in LAYERS}
        promise = Promise(clip, None, 0.2, n % 3 == 0, 1.0, 5)
        expected.append(promise.vector(tensors, Share(scales, scales), clip))
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(save(upload))
        cases.append(
            {"op": "clipped", "path": str(path), "layers": list(LAYERS), "scales": scales, "clip": clip,
             "isRatio": promise.ratio}
        )  # fmt: skip
        assert words_of(tensors) == len(expected[-1])
    for page, mine in zip(answers(cases, script=CASES), expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(page["words"]), np.uint32), mine)
        assert page["expected"] == len(mine)


def test_sums_round_as_fsum_does():
    rng = np.random.default_rng(9)
    lists = [[], [0.1] * 10, [1e16, 1.0, 1e-16], [1.0, 2.0**-53, 2.0**-106], [1e300, 1.0, -1e300]]
    lists += [(rng.standard_normal(50) * 10.0 ** rng.integers(-20, 20, 50)).tolist() for _ in range(60)]
    (found,) = answers([{"op": "sums", "lists": lists}], script=CASES)
    assert [float(x) for x in found] == [math.fsum(one) for one in lists]


# the own account


def test_the_own_epsilon_is_that_of_python(browser):
    rng = np.random.default_rng(10)
    rhos = [0.0, 1e-12, *(10.0 ** rng.uniform(-6, 3, 60)).tolist()]
    mine = [0.0, *(rho_to_eps(rho, DELTA) for rho in rhos[1:])]
    for page, python in zip(browser("epsilons", rhos=rhos, delta=DELTA), mine, strict=True):
        assert page == pytest.approx(python, rel=1e-9, abs=1e-10)
    spends = [(float(rng.uniform(0.3, 9)), None, int(rng.integers(1, 99)), int(rng.integers(0, 40))) for _ in range(20)]
    spends += [(2.0, gap, rounds, n) for gap, rounds, n in itertools.product((1, 3, 100), (1, 40, 2000), (1, 2, 7))]
    costs = [{"z": z, "gap": gap, "rounds": rounds, "uploads": n} for z, gap, rounds, n in spends]
    found = browser("costs", spends=costs)
    assert found == [Spend(z, gap, rounds).rho(n) for z, gap, rounds, n in spends]


# rounds


METHODS = {
    "fedavg": {},
    "fedavg by tokens": {"privacy": {"weight_cap": 300.0, "mean_weight": 0.5}},
    "fedatt, moving clip": {"bound": 5.0, "privacy": {"quantile": 0.5, "count_noise": 5.0}},
    "fedavg, tree": {"privacy": {"mechanism": "tree"}, "clients": 6, "cohort": 3, "rounds": 4},
}
PAGES = ["client-1.txt", "client-2.txt", "client-4.txt"]


def settings(tmp_path, name, **changed):
    more = {**METHODS[name], **changed}
    # Another order of sums in training may move a number by a step of the fixed point, S/2^18.
    privacy = {"clip": 0.1, **more.pop("privacy", {})}
    method = name.partition(" ")[0].strip(",")
    return private_config(tmp_path, method, secure=True, privacy=privacy, **{"rounds": 2, **SGD, **more})


def federate(browser, tmp_path, monkeypatch, config, pages, name, fault=None, kept=None, **how):
    """Train with pages in the place of some clients; the noise of every run is the same."""
    number = itertools.count()
    monkeypatch.setattr(deployed_private, "system", lambda: derived(5, next(number), 0))
    monkeypatch.setattr(run_privacy, "group_of", lambda client, groups, seed: int(client[7]) % groups)
    vocab, _ = vocabulary(tmp_path)
    files = sorted((tmp_path / "texts").iterdir())
    transport, roster = enrol(tmp_path, len(files), f"{name}-clients", fault=fault, named=lambda path: path.name)
    with_pages(browser, transport, roster, config, vocab, files, pages, {} if kept is None else kept, **how)
    return deploy(tmp_path, config, transport, roster, name), transport


@pytest.mark.parametrize("name", METHODS)
def test_a_private_round_with_pages_is_that_of_python_clients(browser, tmp_path, monkeypatch, name):
    config = settings(tmp_path, name)
    mixed, transport = federate(browser, tmp_path, monkeypatch, config, PAGES, "mixed")
    assert not any(transport.handlers[page].refused for page in PAGES)
    assert any(transport.handlers[page].kinds.count("upload") for page in PAGES)
    python, _ = federate(browser, tmp_path, monkeypatch, config, [], "python")
    one, other = last_model(tmp_path / "mixed"), last_model(tmp_path / "python")
    for layer, p in other.items():
        assert float((p - one[layer]).abs().max()) <= 1e-6, layer
    assert mixed["privacy"] == python["privacy"]  # what is claimed, and why
    rows = [[(e.row, e.what, e.round) for e in read_ledger(tmp_path / run).entries] for run in ("mixed", "python")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == config.train.rounds
    clips = [[r["privacy"]["clip"] for r in read_metrics(tmp_path / run)] for run in ("mixed", "python")]
    assert clips[0] == clips[1]
    for page in PAGES:
        account = OwnLedger(tmp_path / "python-clients" / page).read()
        shown = browser("account", name=page)
        assert shown["epsilon"] == pytest.approx(account.epsilon(), rel=1e-9)
        assert [shown["uploads"], shown["runs"], shown["open"]] == [sum(account.parts.values()), 1, 0]
        assert shown["uploads"] == transport.handlers[page].kinds.count("upload") > 0


def test_a_page_without_text_or_whose_training_fails_sends_zeros_and_the_round_counts_it(
    browser, tmp_path, monkeypatch
):
    """What is opened is the sum of the others; no server sees that a page had nothing."""
    config = settings(tmp_path, "fedavg", rounds=1)
    federate(browser, tmp_path, monkeypatch, config, PAGES, "whole")
    kept = {}

    def fault(client, post, handler):
        if post.kind == "hello" and client in PAGES[:2]:
            none = {key: [] for key in ("train", "valid", "test")}
            more = {"text": none} if client == PAGES[0] else {"text": kept[client], "limits": {"minutes": 0}}
            browser("open", name=client, floor=3, again=True, **more)
        return deliver(client, post, handler)

    result, transport = federate(browser, tmp_path, monkeypatch, config, PAGES, "zeros", fault, kept)
    assert not any(transport.handlers[page].refused for page in PAGES)
    assert result["rounds"] == 1
    assert browser("account", name=PAGES[0])["uploads"] == 1  # it left, and is booked
    whole, zeros = last_model(tmp_path / "whole"), last_model(tmp_path / "zeros")
    assert any(not torch.equal(p, zeros[layer]) for layer, p in whole.items())
