"""The chunked output layer against `F.cross_entropy` and a slow ranking."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.model import output
from keyfed.model.output import chunks, output_gradients, score_tokens


def draw(m: int, tokens: int, vocab: int, width: int, seed: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    features, weight, bias = (
        torch.randn(*shape, generator=g, dtype=dtype) for shape in ((m, tokens, width), (m, vocab, width), (m, vocab))
    )
    targets = torch.randint(vocab, (m, tokens), generator=g)
    mask = (torch.rand(m, tokens, generator=g) < 0.7).to(dtype)
    return features, weight, bias, targets, mask


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 3),
    tokens=st.integers(1, 12),
    vocab=st.integers(1, 9),
    width=st.integers(1, 5),
    limit=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_loss_and_gradients_equal_cross_entropy(m, tokens, vocab, width, limit, seed):
    features, weight, bias, targets, mask = draw(m, tokens, vocab, width, seed)
    scale = mask / mask.sum(1, keepdim=True).clamp(min=1)
    leaves = [t.requires_grad_() for t in (features, weight, bias)]
    with patch.object(output, "CHUNK_ELEMENTS", limit), torch.no_grad():
        loss, *grads = output_gradients(features, weight, bias, targets, scale, {})
    for k in range(m):
        logits = features[k] @ weight[k].T + bias[k]
        real = mask[k] > 0
        want = F.cross_entropy(logits[real], targets[k][real]) if real.any() else logits.sum() * 0
        torch.testing.assert_close(loss[k], want, rtol=0, atol=1e-10)
        slow = torch.autograd.grad(want, leaves)
        for a, b in zip(grads, slow, strict=True):
            torch.testing.assert_close(a[k], b[k], rtol=0, atol=1e-10)


def test_float32_and_large_logits_do_not_overflow():
    features, weight, bias, targets, _ = draw(2, 7, 11, 4, seed=1, dtype=torch.float32)
    features, scale = features * 1e4, torch.full((2, 7), 1 / 7)
    loss, grad, *_ = output_gradients(features, weight, bias, targets, scale, {})
    logits = torch.baddbmm(bias[:, None], features, weight.mT).double()
    want = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-3)
    assert torch.isfinite(grad).all()


def test_a_batch_of_no_tokens_costs_nothing():
    features, weight, bias, targets, scale = draw(2, 0, 5, 3, seed=1)
    loss, *grads = output_gradients(features, weight, bias, targets, scale, {})
    assert loss.tolist() == [0, 0]
    for leaf, grad in zip((features, weight, bias), grads, strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(1, 20), st.integers(1, 300), st.integers(1, 5000))
def test_chunks_cover_every_token_once_in_order_and_fit(tokens, clients, vocab, limit):
    parts = list(chunks(tokens, clients, vocab, limit))
    assert [i for part in parts for i in range(tokens)[part]] == list(range(tokens))
    sizes = [part.stop - part.start for part in parts]
    assert all(size >= 1 for size in sizes)
    assert all(size == 1 or size * clients * vocab <= limit for size in sizes)
    if sizes:
        assert len(sizes) == -(-tokens // sizes[0])  # all but the last are alike


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 2),
    tokens=st.integers(1, 8),
    vocab=st.integers(1, 12),
    limit=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_ranks_with_ties_equal_a_stable_sort(m, tokens, vocab, limit, seed, dtype):
    g = torch.Generator().manual_seed(seed)
    # Small whole numbers: logits are exact, and many of them are equal.
    features, weight, bias = (
        torch.randint(-1, 2, shape, generator=g).to(dtype) for shape in ((m, tokens, 2), (m, vocab, 2), (m, vocab))
    )
    targets = torch.randint(vocab, (m, tokens), generator=g)
    with patch.object(output, "CHUNK_ELEMENTS", limit):
        scores = score_tokens(features, weight, bias, targets)
    assert scores.nats.dtype == torch.float64
    for k in range(m):
        logits = features[k] @ weight[k].T + bias[k]
        for n in range(tokens):
            best_first = torch.argsort(logits[n], descending=True, stable=True).tolist()
            assert int(scores.rank[k, n]) == best_first.index(int(targets[k, n]))
        nats = F.cross_entropy(logits.double(), targets[k], reduction="none")
        torch.testing.assert_close(scores.nats[k], nats, rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 10), vocab=st.integers(1, 20), limit=st.integers(1, 100), seed=st.integers(0, 10**6))
def test_scores_in_float64_equal_cross_entropy(tokens, vocab, limit, seed):
    features, weight, bias, targets, _ = draw(1, tokens, vocab, 3, seed)
    with patch.object(output, "CHUNK_ELEMENTS", limit):
        scores = score_tokens(features, weight, bias, targets)
    logits = features[0] @ weight[0].T + bias[0]
    want = F.cross_entropy(logits, targets[0], reduction="none")
    torch.testing.assert_close(scores.nats[0], want, rtol=0, atol=1e-10)
    above = (logits > logits.gather(1, targets[0][:, None])).sum(1)
    assert scores.rank[0].tolist() == above.tolist()


def test_scoring_nothing_gives_nothing():
    features, weight, bias, targets, _ = draw(2, 0, 5, 3, seed=1)
    scores = score_tokens(features, weight, bias, targets)
    assert scores.nats.shape == scores.rank.shape == (2, 0)
    assert scores.nats.dtype == torch.float64
    assert scores.rank.dtype == torch.int64


def test_a_model_that_says_all_words_are_alike_ranks_by_number():
    zeros = torch.zeros(1, 4, 3), torch.zeros(1, 5, 3), torch.zeros(1, 5)
    scores = score_tokens(*zeros, torch.tensor([[0, 1, 4, 2]]))
    assert scores.rank.tolist() == [[0, 1, 4, 2]]
    assert scores.nats.tolist() == [[pytest.approx(torch.log(torch.tensor(5.0)).item())] * 4]


def test_logits_that_are_not_finite_guess_nothing_right():
    features = torch.full((1, 3, 4), float("nan"))
    scores = score_tokens(features, torch.ones(1, 6, 4), torch.zeros(1, 6), torch.tensor([[0, 1, 5]]))
    assert (scores.rank == 6).all()
    assert not torch.isfinite(scores.nats).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_of_ranking_agree_with_and_without_ties(dtype):
    g = torch.Generator().manual_seed(1)
    index = torch.randint(9, (2, 50, 1), generator=g)
    tied = torch.randint(-1, 2, (2, 50, 9), generator=g).to(dtype)
    untied = torch.rand(2, 50, 9, generator=g).to(dtype)
    for logits in (tied, untied):
        d = logits - logits.gather(-1, index)
        ranks = output._rank(d, index)
        assert torch.equal(ranks, output._rank_by_signs(d, index))
        best_first = logits.argsort(dim=-1, descending=True, stable=True)
        assert torch.equal(ranks, (best_first == index).long().argmax(-1))


def test_scores_of_logits_at_hand_are_those_of_the_layer():
    features, weight, bias, targets, _ = draw(2, 7, 5, 3, seed=4)
    want = score_tokens(features, weight, bias, targets)
    logits = torch.baddbmm(bias[:, None], features, weight.mT)
    kept = logits.clone()
    got = output.score_logits(logits, targets)
    torch.testing.assert_close(got.nats, want.nats)
    assert torch.equal(got.rank, want.rank)
    assert torch.equal(logits, kept)  # a caller's logits are not used up
    assert output.score_logits(logits[:, :0], targets[:, :0]).nats.shape == (2, 0)
