"""A network and a count model read the same text: what the mixture's weights are fitted on, and what a test counts.

Text is laid out as the network reads it: streams in order with the state carried, or every line on its own behind
<bos> (`run.evaluate`). The count model reads the same tokens; a line's n-grams begin with the line end before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.network import Reader, reader_of
from keyfed.model.counts import CountModel
from keyfed.model.mixture import BINS as BINS
from keyfed.model.mixture import Mixture, binned, buckets
from keyfed.model.ngram import Floats, Ints
from keyfed.model.output import Score, TokenScores
from keyfed.model.tables import Texts
from keyfed.run.counts.cache import PersonalCache
from keyfed.run.evaluate import Positions, one_thread, score_of, score_streams
from keyfed.run.folder import Trained
from keyfed.text.batches import line_bounds
from keyfed.text.vocab import BOS

ROWS = 128  # positions whose distributions are held at a time: they stay in a core's cache
TOGETHER, TOGETHER_GPU = 1 << 14, 1 << 18  # tokens read side by side


@dataclass(frozen=True, eq=False)
class Laid:
    """Text laid out for both models.

    Attributes:
      text: as the count model reads it.
      contexts: for each length n, the row of the context before each token, −1 where it was not seen.
      places: of each token's context among the mixture's buckets (`mixture.places_of`).
      pieces: what the network reads on its own, and where in `text` the tokens that it predicts lie.
    """

    text: Texts
    contexts: list[Ints]
    places: Ints
    pieces: list[tuple[NDArray[np.int32], Ints]]


def laid_out(model: CountModel, text: Texts, edges: Sequence[float], lines: bool) -> Laid:
    """Lay out text; `lines` says whether it was read as lines (`texts_of`)."""
    vocab, n_tokens = model.model.vocab_size, text.tokens.size
    rows: Ints | None = None
    contexts: list[Ints] = []
    places = np.zeros(n_tokens, np.int64)
    for n, level in enumerate(model.model.levels, 1):
        before = np.zeros(n_tokens, np.int64) if rows is None else np.append(np.array([-1]), rows[:-1])
        before = np.where(text.reach >= n, before, -1)
        totals = np.zeros(len(level.start), np.int64)
        np.add.at(totals, level.keys // vocab, model.counts[n - 1])
        seen = (before >= 0) & (level.size[before] > 0)
        place = (n - 1) * (len(edges) + 1) + np.searchsorted(np.array(edges), totals[before], "right")
        places = np.where(seen, place, places)
        contexts.append(np.where(seen, before, -1))
        rows = np.where(before >= 0, level.find(before * vocab + text.tokens), -1)
    return Laid(text, contexts, places, list(_pieces(text, lines)))


def _pieces(text: Texts, lines: bool) -> Iterator[tuple[NDArray[np.int32], Ints]]:
    """Yield what the network reads on its own."""
    for begin, end in pairwise([*np.flatnonzero(~text.predicted).tolist(), text.tokens.size]):
        if not lines:
            yield text.tokens[begin:end].astype(np.int32), np.arange(begin + 1, end)
            continue
        stream = text.tokens[begin + 1 : end]
        cuts = line_bounds(stream.astype(np.int32))
        for a, b in pairwise(cuts):
            at = np.arange(begin + 1 + a, begin + 1 + b)
            yield np.append(np.array([BOS], np.int32), stream[a:b].astype(np.int32)), at


def dense(model: CountModel, laid: Laid, at: Ints) -> NDArray[np.float32]:
    """Return the count model's whole distribution of the token at each place, [places, V]."""
    first, *longer = model.model.levels
    vocab = model.model.vocab_size
    base = np.full(vocab, first.backoff[0] / vocab, np.float32)
    base[first.keys] = first.prob
    found = np.tile(base, (at.size, 1))
    for level, contexts in zip(longer, laid.contexts[1:], strict=True):
        here = contexts[at]
        seen = np.flatnonzero(here >= 0)
        if not seen.size:
            break
        context = here[seen]
        found[seen] *= level.backoff[context].astype(np.float32)[:, None]
        size = level.size[context]
        offset = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        rows = np.repeat(level.start[context], size) + offset
        found[np.repeat(seen, size), level.keys[rows] % vocab] = level.prob[rows]
    return found


@dataclass(frozen=True, eq=False)
class Both:
    """What is found at every token of a text; NaN and 0 where none is predicted.

    Attributes:
      network, counts: probability of the token. `confidence` is the network's highest of any word.
      nats, rank: of the mixture and, by a second name, of the single models.
    """

    network: Floats
    counts: Floats
    confidence: Floats
    nats: dict[str, Floats]
    rank: dict[str, Ints]


def read_both(
    trained: Trained,
    model: CountModel,
    laid: Laid,
    device: str,
    mixture: Mixture | None = None,
    cache: PersonalCache | None = None,
) -> Both:
    """Read a text with both models.

    Args:
      mixture: also score the mixture; without it nothing is ranked, and no whole distribution of counts is formed.
      cache: also score the mixture with every client's own cache.
    """
    size = laid.text.tokens.size
    network, counts, confidence = np.full(size, np.nan), np.full(size, np.nan), np.zeros(size)
    names = [] if mixture is None else ["mixture", "counts"]
    nats = {name: np.full(size, np.nan) for name in [*names, "network"]}
    rank = {name: np.zeros(size, np.int64) for name in [*names, "network"]}
    p_counts = _true(model, laid)
    reader = reader_of(trained.spec, trained.params, device)
    pieces = sorted(laid.pieces, key=lambda piece: -len(piece[0]))

    def look(places: Ints, logits: Tensor) -> TokenScores:
        """Score some positions; `places` are those of the tokens in the text."""
        targets = torch.from_numpy(laid.text.tokens[places]).to(logits.device)[:, None]
        p = logits.softmax(-1)
        true = p.gather(1, targets)
        own = (p > true).sum(1)
        sure = p.amax(1)
        network[places], confidence[places] = true[:, 0].double().cpu().numpy(), sure.double().cpu().numpy()
        counts[places] = p_counts[places]
        rank["network"][places] = own.cpu().numpy()
        nats["network"][places] = -np.log(np.maximum(network[places], 1e-45))
        if mixture is not None:
            q = torch.from_numpy(dense(model, laid, places)).to(logits.device)
            rank["counts"][places] = (q > q.gather(1, targets)).sum(1).cpu().numpy()
            nats["counts"][places] = -np.log(counts[places])
            weight = mixture.weight(laid.places[places], confidence[places])
            w = torch.from_numpy(weight.astype(np.float32)).to(logits.device)[:, None]
            mixed = p.mul_(w).add_(q.mul_(1 - w))
            rank["mixture"][places] = (mixed > mixed.gather(1, targets)).sum(1).cpu().numpy()
            nats["mixture"][places] = -np.log(weight * network[places] + (1 - weight) * counts[places])
            if cache is not None:
                cache.take(places, mixed.cpu())
        scores = torch.from_numpy(nats["network"][places]), torch.from_numpy(rank["network"][places])
        return TokenScores(scores[0][None], scores[1][None])

    at = 0
    while at < len(pieces):
        most = TOGETHER if torch.device(device).type == "cpu" else TOGETHER_GPU
        group = pieces[at : at + max(1, most // max(1, len(pieces[at][0])))]
        at += len(group)
        to_text = np.concatenate([np.append(np.array([-1]), where) for _, where in group])

        def score(reader: Reader, x: Tensor, targets: Tensor, where: Positions, to_text: Ints = to_text) -> TokenScores:
            places = to_text[where + 1]
            found = [look(places[a : a + ROWS], reader.logits(x[a : a + ROWS])) for a in range(0, len(where), ROWS)]
            return TokenScores(*(torch.cat(kind, 1) for kind in zip(*found, strict=True)))

        with one_thread(torch.device(device).type == "cpu"):  # small products: a second thread waits more than it works
            score_streams(reader, [ids for ids, _ in group], device, score)
    return Both(network, counts, confidence, nats, rank)


def _true(model: CountModel, laid: Laid) -> Floats:
    """Return the count model's probability of every token of the text."""
    vocab = model.model.vocab_size
    p = np.full(laid.text.tokens.size, 1 / vocab)
    for level, contexts in zip(model.model.levels, laid.contexts, strict=True):
        seen = contexts >= 0
        p[seen] *= level.backoff[contexts[seen]]
        rows = level.find(np.where(seen, contexts * vocab + laid.text.tokens, -1))
        p = np.where(rows >= 0, level.prob[np.maximum(rows, 0)], p)
    return p


def mixture_cells(both: Both, laid: Laid, edges: Sequence[float]) -> tuple[Ints, Ints]:
    """Return the client and the cell of every predicted token in the mixture's histogram."""
    chosen = np.flatnonzero(laid.text.predicted)
    ratio = np.log2(np.maximum(both.network[chosen], 1e-45) / both.counts[chosen])
    bucket = buckets(laid.places[chosen], both.confidence[chosen], edges)
    return laid.text.client[chosen], bucket * BINS + binned(ratio)


def scores_of(text: Texts, names: Sequence[str], nats: Floats, rank: Ints) -> dict[str, Score]:
    """Return every client's score."""
    out = {}
    bounds = np.searchsorted(text.client, np.arange(len(names) + 1))
    for name, a, b in zip(names, bounds[:-1], bounds[1:], strict=True):
        chosen = np.flatnonzero(text.predicted[a:b]) + a
        out[name] = score_of(text.tokens[chosen], nats[chosen], rank[chosen])
    return out
