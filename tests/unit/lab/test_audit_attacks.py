"""The audit's attacks on small models: canaries are planted, found and ranked; words are read from real updates."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from keyfed.engine.network import init_params, reader_of
from keyfed.engine.problem import Problem, make_store
from keyfed.federated.methods import fedavg
from keyfed.lab.audit import canaries
from keyfed.lab.audit.canaries import judge_controls
from keyfed.lab.audit.inference import draw_pieces, masked, measure_leaks
from keyfed.model.language_model import build_spec
from keyfed.text.batches import Batching, lines_of
from keyfed.text.vocab import EOS

VOCAB = 400


def text(words: int, tokens: int, seed: int) -> np.ndarray:
    """Lines of eight words, out of some of the vocabulary, frequent ones first."""
    rng = np.random.default_rng(seed)
    own = 4 + rng.permutation(VOCAB - 4)[:words]
    stream = own[np.minimum((rng.pareto(1.0, tokens) * 4).astype(int), words - 1)]
    stream[:words] = own  # each at least once
    stream[8::9] = EOS
    return stream.astype(np.int32)


@pytest.fixture(autouse=True)
def masks_repeat(monkeypatch):
    """A mask of the system's is another one each time; one test in ten thousand would find it better than chance."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("keyfed.lab.audit.inference.urandom", lambda size: draw.bytes(size))


@pytest.fixture
def store():
    return make_store([text(80, 900, k) for k in range(12)], [f"c{k}" for k in range(12)])


# Canaries


def test_canaries_fill_the_grid_as_far_as_there_are_clients():
    drawn = canaries.draw_canaries(VOCAB, 5, seed=1, each=2)
    assert [(len(c.clients), c.copies) for c in drawn] == [(u, e) for u in (1, 4) for e in (1, 14, 200) for _ in "ab"]
    assert all(len(c.words) == 5 and min(c.words) >= 4 for c in drawn)
    assert len({c.words for c in drawn}) == len(drawn)
    assert drawn == canaries.draw_canaries(VOCAB, 5, seed=1, each=2)
    assert drawn != canaries.draw_canaries(VOCAB, 5, seed=2, each=2)


def test_planted_lines_are_there_as_often_as_asked_and_nothing_else_changes(store):
    drawn = canaries.draw_canaries(VOCAB, len(store), seed=3, users=(1, 4), copies=(1, 14))
    planted = canaries.plant(store, drawn, seed=3)
    wanted = {(c.words, k): c.copies for c in drawn for k in c.clients}
    for client in range(len(store)):
        lines = [tuple(line.tolist()) for line in lines_of(planted.stream(client))]
        for canary in drawn:
            assert lines.count((*canary.words, EOS)) == wanted.get((canary.words, client), 0)
        secret = {(*c.words, EOS) for c in drawn}
        kept = [line for line in lines if line not in secret]
        assert kept == [tuple(line.tolist()) for line in lines_of(store.stream(client))]
    assert list(planted.names) == list(store.names)


def small(tied: bool = True, vocab: int = VOCAB):
    spec = build_spec("gru", vocab, embed=16, hidden=16, tied=tied)
    return spec, init_params(spec, 1)


def test_nats_of_many_ends_are_those_of_reading_each_alone():
    spec, params = small()
    reader = reader_of(spec, params)
    ends = np.random.default_rng(0).integers(4, VOCAB, (7, 3))
    got = canaries.suffix_nats(reader, [EOS, 9, 10], ends, "cpu")
    for own, end in zip(got, ends, strict=True):
        nats, tokens = 0.0, [EOS, 9, 10]
        for word in end.tolist():
            logits, _ = reader.after(torch.tensor([tokens]), None)
            nats -= float(torch.log_softmax(logits[0].double(), 0)[word])
            tokens.append(word)
        assert own == pytest.approx(nats, abs=1e-5)


def test_a_wide_beam_finds_the_likeliest_of_all_ends():
    spec, params = small(vocab=12)
    params = {name: 8 * p for name, p in params.items()}  # sharp enough that the order is clear
    reader = reader_of(spec, params)
    every = np.array(list(product(range(4, 12), repeat=3)))
    nats = canaries.suffix_nats(reader, [EOS, 5, 6], every, "cpu")
    best = [tuple(row) for row in every[np.argsort(nats)[:5]].tolist()]
    assert canaries.likeliest(reader, [EOS, 5, 6], 3, 64, "cpu")[:5] == best


def test_an_untrained_model_exposes_nothing_and_one_that_learnt_the_phrase_exposes_it_all():
    spec, params = small()
    reader = reader_of(spec, params)
    phrases = canaries.draw_phrases(VOCAB, 60, 1, "controls")
    ends = canaries.draw_phrases(VOCAB, 255, 1, "candidates")[:, 2:]
    bits = [canaries.find(reader, p[None], ends, "cpu", reads_lines=False, beam=False)[0].bits for p in phrases]
    assert judge_controls(bits).behave
    secret = phrases[0].tolist()
    taught = {**params, "output.bias": params["output.bias"].clone()}
    taught["output.bias"][secret[2:]] += 20.0  # only these three words are ever likely
    (found,) = canaries.find(reader_of(spec, taught), phrases[:1], ends, "cpu", reads_lines=True)
    assert found.bits == math.log2(256)


# Words from an update


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_raw_update_gives_the_words_away_and_a_masked_or_noised_one_does_not(store, tied, optimiser):
    spec, params = small(tied)
    method = fedavg(optimiser=optimiser, lr=1.0 if optimiser == "sgd" else 0.006, batch_size=4)
    problem = Problem(spec, store, Batching("stream", 4, 8), seed=1)
    found = measure_leaks(problem, method, params, seed=1)
    views = found["views"]
    stream = store.stream(6)  # all clients are of one size: the median is the middle one
    assert found["client_words"] == len(set((stream[1:] if tied else stream[:-1]).tolist()) - {EOS})
    assert views["raw"]["recovered"] > 0.9
    assert views["raw"]["precision"] > 0.9
    assert views["raw"]["chance"] == pytest.approx(found["client_words"] / (VOCAB - 4))
    for view in ("masked", "noised"):
        assert not views[view]["better_than_chance"], views[view]
        assert views[view]["recovered"] < 0.5
    assert views["raw"]["recovered"] > views["sum"]["recovered"] > views["masked"]["recovered"]


def test_a_mask_is_another_one_each_time_and_hides_even_zeros():
    nothing = torch.zeros(4096, dtype=torch.float64)
    first, second = masked(nothing), masked(nothing)
    assert not torch.equal(first, second)
    assert float(first.abs().mean()) == pytest.approx(2.0**30, rel=0.1)  # uniform over the signed 32-bit numbers


def test_the_masked_view_is_what_a_member_of_a_secure_sum_sends(monkeypatch):
    """Were the protocol's masks left out, the audit would show the upload as it is."""
    change = torch.linspace(-3, 3, 512, dtype=torch.float64)
    hidden = float(torch.corrcoef(torch.stack([masked(change), change]))[0, 1])
    assert abs(hidden) < 5 / 512**0.5
    monkeypatch.setattr("keyfed.private.secagg.member.add_mask", lambda words, key, sign: None)
    assert torch.equal(masked(change), change.mul(2.0**16).round())


# Membership


def test_pieces_are_cut_without_overlap_and_short_ends_left_out():
    pieces = draw_pieces([np.arange(215), np.arange(1000, 1015)], 10, np.random.default_rng(1))
    assert [len(p) for p in pieces] == [100, 100]
    assert pieces[1][0] == 100
