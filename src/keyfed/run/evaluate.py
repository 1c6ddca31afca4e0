"""Evaluation: perplexity and accuracy on held-out streams, as mergeable counts (never a mean of means).

Headline: exp(mean nats per predicted token) over each stream in order, state carried, zero at the start, every token
after the first predicted, line ends included, nothing padded counted. Of a model trained on packed lines: over each
line on its own, <bos> first and the state reset (`scorer_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import Network, Reader, SpecReader, reader_of
from keyfed.model.language_model import Params
from keyfed.model.score import Score
from keyfed.run.reading import Ids, score_streams
from keyfed.text.batches import Kind, line_bounds, lines_of, reads_lines
from keyfed.text.vocab import BOS, EOS, PAD, UNK

SIDE_BY_SIDE, SIDE_BY_SIDE_GPU = 32, 128  # streams read in one batch
LEAST_TOKENS = 64  # of a stream that is read in part
LINES_SIDE_BY_SIDE, LINES_SIDE_BY_SIDE_GPU = 128, 512  # lines, which are short
POSITIONS_GPU = 1 << 18  # tokens of short streams in one batch on a GPU


def score_of(targets: NDArray[Any], nats: NDArray[Any], rank: NDArray[Any]) -> Score:
    """Count one stream's positions; `rank` 0 means the true token was the first guess."""
    word = (targets != UNK) & (targets != EOS)
    return Score(
        tokens=len(targets),
        nats=float(nats.sum()),
        top1=int((rank < 1).sum()),
        top3=int((rank < 3).sum()),
        words=int(word.sum()),
        words_top1=int((word & (rank < 1)).sum()),
        words_top3=int((word & (rank < 3)).sum()),
        unknown=int((targets == UNK).sum()),
    )


def limit_streams(streams: Mapping[str, Ids], most: int | None) -> dict[str, Ids]:
    """Keep about `most` tokens in all: the same share from the start of every stream.

    Where that would leave less than `LEAST_TOKENS` of a stream, evenly spaced streams are taken and the others left:
    the first three tokens of every one of ten thousand clients say little about a model.
    """
    total = sum(len(s) for s in streams.values())
    if most is None or total <= most:
        return dict(streams)
    wanted = {name: max(LEAST_TOKENS, round(len(s) * most / total)) for name, s in streams.items()}
    cost = sum(min(len(s), wanted[name]) for name, s in streams.items())
    count = min(len(streams), max(1, round(len(streams) * most / cost)))
    names = list(streams)
    return {name: streams[name][: wanted[name]] for name in (names[n * len(names) // count] for n in range(count))}


def _counted(reader: Reader, group: Sequence[Ids], device: str) -> list[NDArray[Any]]:
    """What `Score` counts, at every predicted position of streams that are read side by side; in its order."""
    nats, rank = score_streams(reader, group, device)
    true = np.concatenate([s[1:] for s in group])
    word = (true != UNK) & (true != EOS)
    top1, top3 = rank < 1, rank < 3
    return [np.ones_like(word), nats, top1, top3, word, word & top1, word & top3, true == UNK]


def _score_group(reader: Reader, group: Sequence[Ids], device: str) -> list[Score]:
    """Score streams that are read side by side."""
    sizes = np.array([max(0, len(s) - 1) for s in group])
    begins = (np.cumsum(sizes) - sizes)[sizes > 0]
    found = iter(zip(*(_sums(kind, begins) for kind in _counted(reader, group, device)), strict=True))
    return [Score(*next(found)) if size else Score() for size in sizes.tolist()]


def _sums(numbers: NDArray[Any], begins: NDArray[np.int64]) -> list[Any]:
    """Sums from each place to the next; no stream's reaches into another's, not even when it is not a number."""
    wide = numbers if numbers.dtype == np.float64 else numbers.astype(np.int64)
    return np.add.reduceat(wide, begins).tolist() if len(begins) else []


def _groups(reader: Reader, lengths: Sequence[int], device: str, rows: int, rows_gpu: int) -> Iterator[slice]:
    """Cut streams, longest first, into groups to be read side by side: so many, on a GPU as many short ones as fit."""
    at = 0
    while at < len(lengths):
        most = rows if torch.device(device).type == "cpu" else rows_gpu
        if torch.device(device).type != "cpu" and isinstance(reader, SpecReader):  # a module may return whole logits
            most = max(most, POSITIONS_GPU // max(1, lengths[at]))
        yield slice(at, at + most)
        at += most


def evaluate(spec: Network, params: Params, streams: Mapping[str, Ids], device: str = "cpu") -> dict[str, Score]:
    """Score every stream from a zero state; `params` is one model, not stacked."""
    reader = reader_of(spec, params, device)
    names = sorted(streams, key=lambda name: -len(streams[name]))
    out: dict[str, Score] = {}
    for part in _groups(reader, [len(streams[name]) for name in names], device, SIDE_BY_SIDE, SIDE_BY_SIDE_GPU):
        group = names[part]
        out.update(zip(group, _score_group(reader, [streams[name] for name in group], device), strict=True))
    return {name: out[name] for name in streams}


Look = Callable[[], None]  # called now and then while text is read; it may raise


def _looking(reader: Reader, look: Look) -> Reader:
    """Return a reader that looks before every window."""
    own = reader.read

    def read(*given: Any) -> Any:
        look()
        return own(*given)

    setattr(reader, "read", read)  # noqa: B010
    return reader


def evaluate_together(
    spec: Network, params: Params, streams: Mapping[str, Ids], device: str = "cpu", look: Look = lambda: None
) -> Score:
    """The total of `evaluate`, without a score for each of thousands of streams.

    Args:
      look: called before every window that is read.
    """
    reader = _looking(reader_of(spec, params, device), look)
    return _score_all(reader, list(streams.values()), device, SIDE_BY_SIDE, SIDE_BY_SIDE_GPU)


def _score_all(reader: Reader, streams: Sequence[Ids], device: str, rows: int, rows_gpu: int) -> Score:
    streams = sorted(streams, key=len, reverse=True)
    all_sums = Score()
    for part in _groups(reader, [len(s) for s in streams], device, rows, rows_gpu):
        kinds = _counted(reader, streams[part], device)
        all_sums += Score(*(kind.sum().item() for kind in kinds))
    return all_sums


def evaluate_sentences(
    spec: Network, params: Params, streams: Mapping[str, Ids], device: str = "cpu", look: Look = lambda: None
) -> Score:
    """Score every line on its own, <bos> first and the state reset: the `sentence` perplexity."""
    lines = [np.concatenate([np.array([BOS], np.int32), line]) for s in streams.values() for line in lines_of(s)]
    reader = _looking(reader_of(spec, params, device), look)
    return _score_all(reader, lines, device, LINES_SIDE_BY_SIDE, LINES_SIDE_BY_SIDE_GPU)


def evaluate_lines(spec: Network, params: Params, streams: Mapping[str, Ids], device: str = "cpu") -> dict[str, Score]:
    """Score every stream line by line, as `evaluate_sentences` does with all of them together."""
    reader = reader_of(spec, params, device)
    bounds = [line_bounds(s) for s in streams.values()]
    owner = np.repeat(np.arange(len(streams)), [len(b) - 1 for b in bounds])
    lines = [line for s in streams.values() for line in lines_of(s)]
    order = np.argsort([-len(line) for line in lines], kind="stable")
    sums = np.zeros((len(fields(Score)), len(streams)))
    lengths = [len(lines[k]) + 1 for k in order]
    for part in _groups(reader, lengths, device, LINES_SIDE_BY_SIDE, LINES_SIDE_BY_SIDE_GPU):
        group = [np.concatenate([np.array([BOS], np.int32), lines[k]]) for k in order[part]]
        whose = np.repeat(owner[order[part]], [len(line) - 1 for line in group])
        for kind, counted in enumerate(_counted(reader, group, device)):
            sums[kind] += np.bincount(whose, counted, minlength=len(streams))
    kinds = [
        row.tolist() if f.name == "nats" else row.astype(int).tolist()
        for row, f in zip(sums, fields(Score), strict=True)
    ]
    return {name: Score(*counted) for name, counted in zip(streams, zip(*kinds, strict=True), strict=True)}


class Scorer(Protocol):
    """Scores every stream of a model's test text."""

    def __call__(
        self, spec: Network, params: Params, streams: Mapping[str, Ids], device: str = "cpu"
    ) -> dict[str, Score]: ...


def scorer_of(kind: Kind) -> Scorer:
    """Return what the headline is counted by: lines on their own for packed lines, else whole streams."""
    return evaluate_lines if kind == "packed" else evaluate


def validator(kind: Kind) -> Callable[..., Score]:
    """Return what a model is chosen by: a model of single lines has never seen a state that is carried on."""
    return evaluate_sentences if reads_lines(kind) else evaluate_together


def by_line(score: Score) -> dict[str, float]:
    """Return the figures of `evaluate_sentences` that stand beside those of whole streams."""
    found = score.summary()
    return {f"sentence_{name}": found[name] for name in ("perplexity", "top1", "top1_words", "top3_words")}


def headline(
    spec: Network, params: Params, streams: Mapping[str, Ids], kind: Kind, device: str = "cpu"
) -> tuple[dict[str, Score], dict[str, Any]]:
    """Return every stream's score by the model's scorer, and the figures of a test: the total, and line by line."""
    scores = scorer_of(kind)(spec, params, streams, device)
    every = total(scores)
    lines = every if kind == "packed" else evaluate_sentences(spec, params, streams, device)
    return scores, {**every.summary(), **by_line(lines)}


def total(scores: Mapping[str, Score]) -> Score:
    """Add the scores of all streams."""
    columns = zip(*map(attrgetter(*(f.name for f in fields(Score))), scores.values()), strict=True)
    return Score(*map(sum, columns))


def spread(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return how unequal clients fare: quantiles of perplexity over clients and the worst decile's mean accuracy."""
    per_client = sorted(s.perplexity for s in scores.values() if s.tokens and math.isfinite(s.perplexity))
    if len(per_client) < 2:
        return {}
    worst = sorted((s for s in scores.values() if s.tokens), key=lambda s: -s.perplexity)
    worst = worst[: max(1, len(worst) // 10)]
    q = np.quantile(per_client, [0.0, 0.1, 0.5, 0.9, 1.0])
    return {
        "clients": len(per_client),
        **dict(zip(("best", "p10", "median", "p90", "worst"), map(float, q), strict=True)),
        "worst_decile": sum(worst, Score()).summary(),
    }


def evaluate_ngram(
    nats: Callable[[Ids], NDArray[Any]], top: Callable[[Ids, int], NDArray[Any]], streams: Mapping[str, Ids]
) -> dict[str, Score]:
    """Score a count-based model on the same positions as the network."""
    out = {}
    for name, stream in streams.items():
        guesses = top(stream, 3)
        hit = guesses == stream[1:, None]
        rank = np.where(hit.any(1), hit.argmax(1), 3)
        out[name] = score_of(stream[1:], nats(stream), rank)
    return out


def evaluate_ngram_sentences(
    nats: Callable[[Ids], NDArray[Any]], top: Callable[[Ids, int], NDArray[Any]], streams: Mapping[str, Ids]
) -> Score:
    """Score a count-based model on every line on its own, as `evaluate_sentences` does with a network.

    A line follows a line end, as it did when the model was counted. Before that stands padding, which was never
    counted: a context that reaches into it was never seen, so nothing is remembered from one line to the next.
    """
    before = np.array([PAD, EOS], np.int32)
    lines = [line for s in streams.values() for line in lines_of(s)]
    if not lines:
        return Score()
    joined = np.concatenate([part for line in lines for part in (before, line)])
    begins = np.cumsum([len(before) + len(line) for line in lines]) - [len(line) for line in lines]
    kept = np.ones(len(joined), bool)
    kept[begins - 1] = kept[begins - 2] = False
    hit = top(joined, 3) == joined[1:, None]
    rank = np.where(hit.any(1), hit.argmax(1), 3)
    return score_of(joined[1:][kept[1:]], nats(joined)[kept[1:]], rank[kept[1:]])
