r"""The output layer: linear map to the vocabulary and cross-entropy, fused and chunked.

A cohort of m clients with N tokens each would need `[m, N, V]` logits (10 clients × 350 tokens × 33,278 words: 466 MB)
and as much again for the gradient. Here the tokens go through in chunks; each chunk's softmax becomes its own gradient
in place and is consumed by two products before the next chunk starts.

Predictions on held-out text are scored the same way (`score_tokens`). `Score` is their count, in one form from a
client's message to a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

SURE = 69.0  # nats, a probability of 1e-30, beyond which they are taken from the logits again
CHUNK_ELEMENTS = 6_000_000  # logits alive at a time: 24 MB in float32
SCORED_ELEMENTS = 64_000_000  # the same while scoring on a GPU, where a small product leaves most of it idle


def chunks(tokens: int, clients: int, vocab: int, limit: int | None = None) -> Iterator[slice]:
    """Cut `tokens` positions into slices whose logits hold at most `limit` (default CHUNK_ELEMENTS) numbers.

    Slices are of nearly equal length: a short last product would cost almost as much as a full one.
    """
    limit = CHUNK_ELEMENTS if limit is None else limit
    most = max(1, limit // max(1, clients * vocab))
    pieces = max(1, -(-tokens // most))
    size = -(-tokens // pieces) if tokens else 0
    for start in range(0, tokens, size or 1):
        yield slice(start, min(start + size, tokens))


class OutputGradients(NamedTuple):
    """Loss [m] and the gradients of its sum, with respect to features, weight and bias."""

    loss: Tensor
    features: Tensor
    weight: Tensor
    bias: Tensor


def output_gradients(
    features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: Tensor, buffers: dict[str, Tensor]
) -> OutputGradients:
    r"""Return each client's Σ_n scale_n · (−log softmax(W f_n + b)[y_n]) and its gradients, never holding all logits.

    Args:
      features: [m, tokens, width].
      weight, bias: [m, vocabulary, width] and [m, vocabulary].
      targets: [m, tokens], int64.
      scale: [m, tokens]; 0 for padding, 1/(number of real tokens) for a mean.
      buffers: where logits and the weight's gradient are written; handed in again at the next step, it saves asking
        the system for tens of megabytes, which costs as much as filling them.
    """
    m, tokens, _ = features.shape
    vocab = weight.shape[1]
    loss = features.new_zeros(m)
    d_features = torch.empty_like(features)
    d_weight, d_bias = space(buffers, "weight", weight, weight.shape), torch.zeros_like(bias)
    # The scale multiplies what is small: rows of the features and of their gradient, never the logits.
    scaled = features * scale[:, :, None]
    pieces = list(chunks(tokens, m, vocab))
    for number, chunk in enumerate(pieces):
        free = space(buffers, "logits", weight, (m, chunk.stop - chunk.start, vocab))  # the first is the largest
        logits = torch.baddbmm(bias[:, None], features[:, chunk], weight.mT, out=free)
        index = targets[:, chunk, None]
        share = scale[:, chunk, None]
        if logits.is_cuda:  # nothing is asked of a GPU
            nats = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, index)
            grad = torch.softmax(logits, -1)
        else:
            grad = torch.softmax(logits, -1, out=logits)
            nats = -grad.gather(-1, index).log()
            unsure = (nats > SURE) & (share > 0)  # the logarithm of next to nothing has few digits
            if bool(unsure.any()):
                _look_again(nats, unsure[..., 0], features[:, chunk], weight, bias, index)
        loss += torch.where(share > 0, nats * share, 0).sum((1, 2))
        # d nats/d logits = softmax − onehot
        grad.scatter_add_(-1, index, torch.full_like(nats, -1))
        d_features[:, chunk] = torch.bmm(grad, weight)
        if number == 0:  # the first chunk writes, later ones add
            torch.bmm(grad.mT, scaled[:, chunk], out=d_weight)
        else:
            d_weight.baddbmm_(grad.mT, scaled[:, chunk])
        d_bias += torch.bmm(scale[:, None, chunk], grad)[:, 0]
    if not pieces:  # a batch of no tokens
        d_weight.zero_()
    return OutputGradients(loss, d_features.mul_(scale[:, :, None]), d_weight, d_bias)


def _look_again(nats: Tensor, where: Tensor, features: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> None:
    """Take the nats of some positions from their logits, client by client; no more memory than the logits have."""
    for k in range(len(nats)):
        some = where[k]
        logits = torch.addmm(bias[k], features[k, some], weight[k].T)
        nats[k, some] = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, index[k, some])


def space(buffers: dict[str, Tensor], name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The buffer of that name, made at its first use or when a larger one is needed."""
    found = buffers.get(name)
    size = math.prod(shape)
    if found is None or found.numel() < size or found.dtype != like.dtype or found.device != like.device:
        found = buffers[name] = like.new_empty(size)
    return found[:size].view(*shape)


class TokenScores(NamedTuple):
    """What evaluation keeps of every position: nats and the rank of the true token (0 = first guess)."""

    nats: Tensor  # [m, tokens] float64
    rank: Tensor  # [m, tokens] int64


@torch.no_grad()
def score_tokens(features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> TokenScores:
    r"""Score every position. Of words that tie with the true one, those of lower index come before it.

    With d = logits − logit of the true token: nats = log Σ exp(d), and the rank counts d > 0.
    """
    m, tokens, _ = features.shape
    pieces = [
        _score(torch.baddbmm(bias[:, None], features[:, chunk], weight.mT), targets[:, chunk, None])
        for chunk in _scored_chunks(features, tokens, m, weight.shape[1])
    ]
    return _joined(pieces, features)


@torch.no_grad()
def score_logits(logits: Tensor, targets: Tensor) -> TokenScores:
    """`score_tokens` where the logits are at hand: [m, tokens, vocabulary] and [m, tokens]."""
    m, tokens, vocab = logits.shape
    pieces = [
        _score(logits[:, chunk].clone(), targets[:, chunk, None]) for chunk in _scored_chunks(logits, tokens, m, vocab)
    ]
    return _joined(pieces, logits)


def _scored_chunks(like: Tensor, tokens: int, clients: int, vocab: int) -> Iterator[slice]:
    return chunks(tokens, clients, vocab, SCORED_ELEMENTS if like.is_cuda else None)


def _joined(pieces: list[tuple[Tensor, Tensor]], like: Tensor) -> TokenScores:
    if not pieces:
        empty = like.new_zeros(like.shape[0], 0)
        return TokenScores(empty.double(), empty.long())
    return TokenScores(*(torch.cat(kind, 1) for kind in zip(*pieces, strict=True)))


def _score(d: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Nats and rank of the true tokens, [m, tokens, 1], under logits [m, tokens, vocabulary], which are used up."""
    d.sub_(d.gather(-1, index))
    rank = _rank(d, index) if d.is_cuda else _rank_by_signs(d, index)
    top = d.amax(-1, keepdim=True)
    nats = d.sub_(top).exp_().sum(-1).double().log() + top[..., 0].double()
    # Logits that are not finite guess nothing right.
    return nats, rank.masked_fill_(~torch.isfinite(nats), d.shape[-1])


def _rank(d: Tensor, index: Tensor) -> Tensor:
    """Words above the true one, and those that tie and come before it; never waits for the device."""
    before = torch.arange(d.shape[-1], device=d.device) < index
    return ((d > 0) | ((d == 0) & before)).sum(-1)


def _rank_by_signs(d: Tensor, index: Tensor) -> Tensor:
    """The same where counting booleans is slow, which is on a CPU; looks for ties only where there are any."""
    sign = d.sign()
    balance = sign.sum(-1)  # number above − number below; exact in float32 up to 2^24 words
    differing = sign.abs_().sum(-1)  # number above + number below
    rank = ((differing + balance) / 2).long()
    if bool((differing < d.shape[-1] - 1).any()):  # somebody ties
        before = torch.arange(d.shape[-1], device=d.device) < index
        rank += ((d == 0) & before).sum(-1)
    return rank


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over predicted tokens; scores add. "Words" are targets that are neither <unk> nor <eos>."""

    tokens: int = 0
    nats: float = 0.0
    top1: int = 0
    top3: int = 0
    words: int = 0
    words_top1: int = 0
    words_top3: int = 0
    unknown: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Score)))

    @property
    def mean_nats(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean nats); infinite rather than an overflow."""
        return math.exp(self.mean_nats) if self.mean_nats < 700 else math.inf

    def summary(self) -> dict[str, Any]:
        """Return the figures a report shows."""

        def share(hits: int, of: int) -> float:
            return hits / of if of else math.nan

        return {
            "perplexity": self.perplexity,
            "nats": self.mean_nats,
            "top1": share(self.top1, self.tokens),
            "top3": share(self.top3, self.tokens),
            "top1_words": share(self.words_top1, self.words),
            "top3_words": share(self.words_top3, self.words),
            "oov_rate": share(self.unknown, self.tokens),
            "tokens": self.tokens,
        }
