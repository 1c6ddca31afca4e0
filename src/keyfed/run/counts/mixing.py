"""A network and a count model read the same text: what the mixture's weights are fitted on, and what a test counts.

Text is laid out as the network reads it: streams in order with the state carried, or every line on its own behind
<bos> (`run.evaluate`). The count model reads the same tokens; a line's n-grams begin with the line end before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.network import Network, Reader, reader_of
from keyfed.federated.types import Params
from keyfed.model.counts import CountModel
from keyfed.model.mixture import BINS as BINS
from keyfed.model.mixture import Contexts, Mixture, binned, buckets
from keyfed.model.ngram import Floats, Ints, Tokens
from keyfed.model.output import Score, TokenScores
from keyfed.model.tables import Texts, texts_of
from keyfed.run.counts.cache import PersonalCache
from keyfed.run.evaluate import Positions, one_thread, score_of, score_streams
from keyfed.system import usable_cores
from keyfed.text.batches import line_bounds
from keyfed.text.vocab import BOS

ROWS = 128  # positions whose distributions are held at a time: they stay in a core's cache
TOGETHER, TOGETHER_GPU = 1 << 14, 1 << 18  # tokens read side by side


Piece = tuple[NDArray[np.int32], Ints]
"""What the network reads on its own, and where in the text the tokens that it predicts lie."""


@dataclass(frozen=True, eq=False)
class Laid:
    """Text laid out for both models.

    Attributes:
      text: as the count model reads it.
      contexts: for each length n, the row of the context before each token, −1 where it was not seen.
      places: of each token's context among the mixture's buckets (`mixture.places_of`).
      pieces: what the network reads on its own.
    """

    text: Texts
    contexts: list[Ints]
    places: Ints
    pieces: list[Piece]


def laid_out(model: CountModel, text: Texts, by: Contexts, lines: bool) -> Laid:
    """Lay out text; `lines` says whether it was read as lines (`texts_of`)."""
    vocab, n_tokens = model.model.vocab_size, text.tokens.size
    rows: Ints | None = None
    contexts: list[Ints] = []
    places = np.zeros(n_tokens, np.int64)
    for n, level in enumerate(model.model.levels, 1):
        before = np.zeros(n_tokens, np.int64) if rows is None else np.append(np.array([-1]), rows[:-1])
        before = np.where(text.reach >= n, before, -1)
        seen = (before >= 0) & (level.size[before] > 0)
        place = (n - 1) * (len(by.edges) + 1) + by.of_level(model, n)[before]
        places = np.where(seen, place, places)
        contexts.append(np.where(seen, before, -1))
        rows = np.where(before >= 0, level.find(before * vocab + text.tokens), -1)
    return Laid(text, contexts, places, list(_pieces(text, lines)))


def _pieces(text: Texts, lines: bool) -> Iterator[Piece]:
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


class Dense:
    """Writes a count model's whole distributions, float32."""

    def __init__(self, model: CountModel) -> None:
        first, *self._levels = model.model.levels
        self.vocab = model.model.vocab_size
        self._base = np.full(self.vocab, first.backoff[0] / self.vocab, np.float32)
        self._base[first.keys] = first.prob
        self._words = [level.keys % self.vocab for level in self._levels]
        self._prob = [level.prob.astype(np.float32) for level in self._levels]
        self._backoff = [level.backoff.astype(np.float32) for level in self._levels]

    def write(self, contexts: Sequence[Ints], places: Ints, out: NDArray[np.float32]) -> None:
        """Write the distribution of the token at each place.

        Args:
          contexts: of a text, by length (`Laid`).
          out: [places, V].
        """
        out[:] = self._base
        flat = out.reshape(-1)
        tables = zip(self._levels, self._words, self._prob, self._backoff, contexts[1:], strict=True)
        for level, words, prob, backoff, rows_of in tables:
            here = rows_of[places]
            seen = np.flatnonzero(here >= 0)
            if not seen.size:
                break
            context = here[seen]
            out[seen] *= backoff[context][:, None]
            size = level.size[context]
            ends = np.cumsum(size)
            rows = np.repeat(level.start[context] - ends + size, size) + np.arange(ends[-1])
            flat[np.repeat(seen * self.vocab, size) + words[rows]] = prob[rows]


@dataclass(frozen=True, eq=False)
class Both:
    """What is found at every token of a text; NaN and 0 where none is predicted.

    Attributes:
      network, counts: probability of the token. `confidence` is the network's highest of any word.
      above: how many words counts and mixture find more probable, exact up to 2; 0 where nothing was tested.
    """

    network: Floats
    counts: Floats
    confidence: Floats
    above: dict[str, Ints]


def read_both(
    spec: Network,
    params: Params,
    model: CountModel,
    laid: Laid,
    device: str,
    test: tuple[Mixture, PersonalCache] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Both:
    """Read a text with both models.

    Args:
      test: also rank what the mixture says, and fill its numbers into every client's own cache. Without it no whole
        distribution of counts is formed, and no batch has texts of two clients. The last bits of a product depend on
        its shape, and a client that reads alone has to find the same.
      watch: is called before every block of positions; what it raises ends the reading.
    """
    size = laid.text.tokens.size
    above = {name: np.zeros(size, np.int64) for name in ("counts", "mixture")}
    both = Both(np.full(size, np.nan), _true(model, laid), np.zeros(size), above)
    dense = Dense(model)
    cpu = torch.device(device).type == "cpu"
    pieces = sorted((piece for piece in laid.pieces if piece[1].size), key=lambda piece: -len(piece[0]))
    alone: dict[int, list[Piece]] = {}
    for piece in pieces:
        alone.setdefault(int(laid.text.client[piece[1][0]]) if test is None else 0, []).append(piece)

    def look(places: Ints, logits: Tensor, room: NDArray[np.float32]) -> None:
        """Score some positions; `places` are those of the tokens in the text."""
        targets = torch.from_numpy(laid.text.tokens[places]).to(logits.device)[:, None]
        p = logits.softmax(-1)
        both.network[places] = p.gather(1, targets)[:, 0].double().cpu().numpy()
        both.confidence[places] = p.amax(1).double().cpu().numpy()
        if test is None:
            return
        mixture, cache = test
        dense.write(laid.contexts, places, room[: places.size])
        q = torch.from_numpy(room[: places.size]).to(logits.device)
        above["counts"][places] = (q > q.gather(1, targets)).sum(1).cpu().numpy()
        weight = mixture.weight(laid.places[places], both.confidence[places])
        w = torch.from_numpy(weight.astype(np.float32)).to(logits.device)[:, None]
        mixed = p.mul_(w).add_(q.mul_(1 - w))
        above["mixture"][places] = cache.take(places, mixed, mixed.gather(1, targets))

    def read(group: Sequence[Piece]) -> None:
        """Read some pieces side by side."""
        to_text = np.concatenate([np.append(np.array([-1]), where) for _, where in group])
        room = np.empty((0 if test is None else ROWS, dense.vocab), np.float32)

        def score(reader: Reader, x: Tensor, targets: Tensor, where: Positions) -> TokenScores:
            places = to_text[where + 1]
            for a in range(0, len(where), ROWS):
                watch()
                look(places[a : a + ROWS], reader.logits(x[a : a + ROWS]), room)
            return TokenScores(torch.zeros(1, len(where)), torch.zeros(1, len(where), dtype=torch.int64))

        with one_thread(cpu):  # small products: a second thread of PyTorch waits more than it works
            reader = reader_of(spec, params, device)
            score_streams(reader, [ids for ids, _ in group], device, score)

    with one_thread(cpu), ThreadPoolExecutor(usable_cores() if cpu else 1) as threads:
        most = TOGETHER if cpu else TOGETHER_GPU
        list(threads.map(read, (group for own in alone.values() for group in _grouped(own, most))))
    return both


def _grouped(pieces: Sequence[Piece], most: int) -> Iterator[Sequence[Piece]]:
    """Cut pieces, the longest first, into groups that are read side by side."""
    at = 0
    while at < len(pieces):
        group = pieces[at : at + max(1, most // max(1, len(pieces[at][0])))]
        at += len(group)
        yield group


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


def score_text(text: Texts, nats: Floats, rank: Ints) -> Score:
    """Return the score of all predicted tokens."""
    return score_of(text.tokens[text.predicted], nats[text.predicted], rank[text.predicted])


def score_models(
    spec: Network,
    params: Params,
    model: CountModel,
    mixture: Mixture,
    texts: Sequence[tuple[Tokens, Tokens]],
    line_end: int | None,
    device: str = "cpu",
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Test counts, mixture, and mixture with each client's own cache.

    Args:
      texts: what each client wrote before, and its test text.
      line_end: id of the token that ends a line where lines are read on their own, else None.
      watch: see `read_both`.
    """
    text = texts_of([tested for _, tested in texts], line_end)
    cache = PersonalCache(text, [before for before, _ in texts])
    laid = laid_out(model, text, mixture.contexts, line_end is not None)
    both = read_both(spec, params, model, laid, device, (mixture, cache), watch)
    weight = mixture.weight(laid.places, both.confidence)
    mixed = -np.log(weight * both.network + (1 - weight) * both.counts)
    found = {
        "counts": (-np.log(both.counts), both.above["counts"]),
        "mixture": (mixed, both.above["mixture"]),
        "cache": cache.weighed(mixed),
    }
    return {name: score_text(text, nats, rank) for name, (nats, rank) in found.items()}
