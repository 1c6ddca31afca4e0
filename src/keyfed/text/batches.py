"""Batches: from a client's stream of tokens to the steps of one local epoch.

Four ways of cutting, all with the time axis last and every predicted token counted once:

- **stream**: the text is one stream, cut into `rows` contiguous pieces read side by side in windows; the network's
  state is carried from window to window. Nothing is lost: n tokens give n − 1 predictions.
- **sentences**: every line is its own sequence, `<bos> w₁ … wₙ → w₁ … wₙ <eos>`. Lines of neighbouring length make a
  batch, padded to its longest line and masked. A line longer than the window loses what lies beyond it.
- **packed**: lines as in sentences, laid one after the other into `rows` rows that are read in windows as a stream's.
  Where a line begins, `<bos>` is the input and the network's state is zero (`line_starts`). Only the ends of rows are
  padded. A line longer than the window goes on in the next one, its state carried.
- **pairs**: every token is a sequence of its own, read from a zero state, and the next token of its line is predicted:
  what the Pretraining paper's code trains its first model on. The network learns pairs of words and no recurrence.

A client's batches depend on that client and the run's seeds alone, never on other clients. Yet clients that
advance in lockstep are padded to the longest of them, so the order in which batches of sentences are read follows one
shuffle of lengths that all clients of a round share (`length_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.text.ragged import Numbers, Ragged
from keyfed.text.vocab import BOS, EOS, PAD

Ids = NDArray[np.int32]
BUCKET = 8  # a stacked step is padded to a multiple of this: few shapes for a GPU to compile and remember
Kind = Literal["stream", "sentences", "packed", "pairs"]
BINS = 8  # quantiles of length that are shuffled; on PTB more bins pad more (19 % with 8, 22 with 16, 26 with 64)


class Step(NamedTuple):
    """One batch: inputs, targets and mask are [rows, time]; `fresh` starts from a zero state."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    mask: NDArray[np.float32]
    fresh: bool


@dataclass(frozen=True, slots=True)
class Batching:
    """How a client's text is cut.

    Attributes:
      kind: "stream", "sentences", "packed" or "pairs".
      rows: batch size B.
      window: tokens a window predicts; sentences are cut to it. That of pairs is 1 (`Batching.of`).
      max_sentences: lines drawn per client and round, None for all.
      max_tokens: tokens used per client and round, None for all.
    """

    kind: Kind
    rows: int
    window: int
    max_sentences: int | None = None
    max_tokens: int | None = None

    @staticmethod
    def of(kind: Kind, window: int, max_sentences: int | None, max_tokens: int | None) -> Batching:
        """Return how text is cut by a configuration; the method says how many rows."""
        return Batching(kind, 1, 1 if kind == "pairs" else window, max_sentences, max_tokens)


def reads_lines(kind: Kind) -> bool:
    """Whether a model trained on such batches reads single lines, each from a zero state behind <bos>."""
    return kind != "stream"


def lines_of(stream: Ids) -> list[Ids]:
    """Cut a stream after every <eos>; a rest without one is a line too.

    Example:
      >>> [line.tolist() for line in lines_of(np.array([7, 8, 2, 9, 2, 5], dtype=np.int32))]
      [[7, 8, 2], [9, 2], [5]]
    """
    return [piece for piece in np.split(stream, np.flatnonzero(stream == EOS) + 1) if len(piece)]


def line_bounds(stream: Ids) -> Numbers:
    """Return where the lines of a stream begin, and its end; see `lines_of`.

    Example:
      >>> line_bounds(np.array([7, 8, 2, 9, 2, 5], dtype=np.int32)).tolist()
      [0, 3, 5, 6]
    """
    ends = np.flatnonzero(stream == EOS) + 1
    return np.unique(np.concatenate([[0], ends, [len(stream)]])).astype(np.int64)


def limit_text(stream: Ids, batching: Batching, seed: int) -> Ids:
    """Draw what a client reads this round: at most `max_sentences` lines (kept in order), then `max_tokens` tokens.

    The tokens are one contiguous piece whose start is drawn by the seed, one more than are predicted.
    """
    rng = np.random.default_rng(seed)
    if batching.max_sentences is not None:
        lines = lines_of(stream)
        if len(lines) > batching.max_sentences:
            chosen = np.sort(rng.choice(len(lines), batching.max_sentences, replace=False))
            stream = np.concatenate([lines[i] for i in chosen])
    if batching.max_tokens is not None:
        most = batching.max_tokens + (batching.kind == "stream")  # a stream's first token is not predicted
        if len(stream) > most:
            start = int(rng.integers(0, len(stream) - most + 1))
            stream = stream[start : start + most]
    return stream


def _windows(
    inputs: NDArray[np.int64], targets: NDArray[np.int64], mask: NDArray[np.float32], window: int
) -> list[Step]:
    """Cut [rows, columns] side-by-side streams into windows; the last one may be shorter."""
    return [
        Step(inputs[:, at : at + window], targets[:, at : at + window], mask[:, at : at + window], at == 0)
        for at in range(0, inputs.shape[1], window)
    ]


def stream_steps(stream: Ids, rows: int, window: int) -> list[Step]:
    """Read a stream in `rows` contiguous pieces side by side (fewer where the text is short), state carried.

    Example:
      >>> steps = stream_steps(np.arange(10, 17, dtype=np.int32), rows=2, window=2)
      >>> steps[0].inputs.tolist(), steps[0].targets.tolist()
      ([[10, 11], [13, 14]], [[11, 12], [14, 15]])
      >>> steps[1].inputs.tolist(), steps[1].targets.tolist(), steps[1].fresh
      ([[12], [15]], [[13], [16]], False)
    """
    predicted = len(stream) - 1
    if predicted < 1:
        return []
    rows = max(1, min(rows, predicted // window))
    columns = -(-predicted // rows)
    spare = rows * columns - predicted
    inputs = np.concatenate([stream[:-1], np.full(spare, PAD)]).astype(np.int64).reshape(rows, columns)
    targets = np.concatenate([stream[1:], np.full(spare, PAD)]).astype(np.int64).reshape(rows, columns)
    mask = np.ones(rows * columns, np.float32)
    mask[predicted:] = 0
    return _windows(inputs, targets, mask.reshape(rows, columns), window)


def length_order(batches: int, shared: int) -> list[int]:
    """Return the order in which a client reads its batches, which lie in order of length.

    Batch j of n has the quantile q = (j + ½)/n. The bins of [0, 1) are visited in an order drawn by `shared`, a seed
    that all clients of a round have, and a bin's batches in order of length. So clients whose lengths are distributed
    alike are at similar lengths at the same step, even where one has a few batches more than another.

    Example:
      >>> [j // 2 for j in length_order(16, shared=1)][::2] == length_order(8, shared=1)
      True
    """
    visit = np.random.default_rng(shared).permutation(BINS)
    bins = (2 * np.arange(batches) + 1) * BINS // (2 * batches)
    return [int(j) for j in np.argsort(visit[bins], kind="stable")]


def sentence_steps(stream: Ids, rows: int, window: int, seed: int, shared: int) -> list[Step]:
    """Batch lines of neighbouring length; every line starts from a zero state.

    Args:
      seed: the client's; lines of one length are taken in an order drawn by it.
      shared: draws the order of lengths (`length_order`), the same for all clients of a round.

    Example:
      >>> text = np.array([6, 7, 2, 5, 2, 8, 9, 10, 11, 2], dtype=np.int32)
      >>> sorted(step.targets.tolist() for step in sentence_steps(text, rows=2, window=4, seed=1, shared=1))
      [[[5, 2]], [[6, 7, 2, 0], [8, 9, 10, 11]]]
    """
    lines = [line[:window] for line in lines_of(stream)]
    if not lines:
        return []
    mixed = np.random.default_rng(seed).permutation(len(lines))
    by_length = mixed[np.argsort([len(lines[i]) for i in mixed], kind="stable")].tolist()
    # Cut from the long end: rows that are missing from the last batch are then missing where they cost least.
    batches = [by_length[max(0, end - rows) : end] for end in range(len(lines), 0, -rows)][::-1]
    return [_pad([lines[i] for i in batches[j]]) for j in length_order(len(batches), shared)]


def packed_steps(stream: Ids, rows: int, window: int, seed: int) -> list[Step]:
    """Lay whole lines one after the other into `rows` rows, in an order drawn by the seed; state carried.

    Each line, the longest first, goes to the row that is shortest so far: rows end together but for a few tokens.
    Within a row lines lie in the drawn order, each begins with <bos>, and the network's state is reset there
    (`line_starts`). There are fewer rows where the text is short.

    Example:
      >>> steps = packed_steps(np.array([6, 7, 2, 5, 2, 8, 9, 2], dtype=np.int32), rows=2, window=4, seed=0)
      >>> steps[0].inputs.tolist(), steps[0].targets.tolist()
      ([[1, 8, 9, 1], [1, 6, 7, 0]], [[8, 9, 2, 5], [6, 7, 2, 0]])
      >>> steps[1].inputs.tolist(), steps[1].targets.tolist(), steps[1].fresh
      ([[5], [0]], [[2], [0]], False)
    """
    if not len(stream):
        return []
    own = Ragged(stream.astype(np.int64), line_bounds(stream))
    mixed = np.random.default_rng(seed).permutation(len(own))
    row_of = _spread(own.counts()[mixed], max(1, min(rows, len(stream) // window, len(own))))
    lines = own.take(mixed[np.argsort(row_of, kind="stable")])
    shifted = np.concatenate([[BOS], lines.flat[:-1]])
    shifted[lines.bounds[:-1]] = BOS
    lengths = np.bincount(row_of, own.counts()[mixed])
    inside = np.arange(lengths.max()) < lengths[:, None]
    inputs, targets = np.full((2, *inside.shape), PAD, np.int64)
    inputs[inside], targets[inside] = shifted, lines.flat
    return _windows(inputs, targets, inside.astype(np.float32), window)


def pair_steps(stream: Ids, rows: int, seed: int) -> list[Step]:
    """Predict every token from the one before it in its line, <bos> before the first, in an order drawn by the seed.

    Example:
      >>> steps = pair_steps(np.array([6, 7, 2, 5, 2], dtype=np.int32), rows=5, seed=1)
      >>> sorted(zip(steps[0].inputs.ravel().tolist(), steps[0].targets.ravel().tolist(), strict=True))
      [(1, 5), (1, 6), (5, 2), (6, 7), (7, 2)]
      >>> steps[0].inputs.shape, steps[0].fresh
      ((5, 1), True)
    """
    if not len(stream):
        return []
    before = np.concatenate([[BOS], stream[:-1]]).astype(np.int64)
    before[line_bounds(stream)[:-1]] = BOS
    order = np.random.default_rng(seed).permutation(len(stream))
    parts = [order[at : at + rows, None] for at in range(0, len(stream), rows)]
    return [Step(before[p], stream[p].astype(np.int64), np.ones(p.shape, np.float32), True) for p in parts]


def _spread(counts: Numbers, rows: int) -> Numbers:
    """Return the row of each of several lines: longest first, each to the row that is shortest so far.

    Example:
      >>> _spread(np.array([2, 5, 3, 4]), 2).tolist()
      [0, 0, 1, 1]
    """
    row_of = np.empty(len(counts), np.int64)
    filled = [(0, row) for row in range(rows)]  # a heap
    for line in np.argsort(-counts, kind="stable").tolist():
        length, row = filled[0]
        row_of[line] = row
        heapreplace(filled, (length + int(counts[line]), row))
    return row_of


def line_starts(inputs: Any) -> Any:
    """Return where packed rows (an array or a tensor) begin a line: at <bos>, which no text contains."""
    return inputs == BOS


def stacked_width(widths: Iterable[int], window: int, bucket: int = BUCKET) -> int:
    """Return the columns of a stacked step: those of the longest, rounded up, but never beyond the window.

    Example:
      >>> stacked_width([9, 13], 35), stacked_width([9, 34], 35)
      (16, 35)
    """
    return min(-(-max(widths) // bucket) * bucket, window)


def _pad(lines: list[Ids]) -> Step:
    length = len(lines[-1])  # the longest
    inputs = np.full((len(lines), length), PAD, np.int64)
    targets = np.full((len(lines), length), PAD, np.int64)
    mask = np.zeros((len(lines), length), np.float32)
    for row, line in enumerate(lines):
        n = len(line)
        inputs[row, 0], inputs[row, 1:n] = BOS, line[:-1]
        targets[row, :n] = line
        mask[row, :n] = 1
    return Step(inputs, targets, mask, True)


def line_read(tokens: Sequence[int]) -> list[int]:
    """Return what a model of sentences reads of a text: <bos> and what stands behind its last <eos>.

    Example:
      >>> line_read([EOS, 5, 6, EOS, 7]), line_read([EOS])
      ([1, 7], [1])
    """
    behind = next((n for n in range(len(tokens), 0, -1) if tokens[n - 1] == EOS), 0)
    return [BOS, *tokens[behind:]]


def epoch_steps(stream: Ids, batching: Batching, seed: int, shared: int) -> list[Step]:
    """Return one epoch's steps of a client whose text was limited already (`limit_text`).

    Args:
      seed: the client's, for this round and epoch.
      shared: that of all clients, for this round and epoch.
    """
    if batching.kind == "stream":
        return stream_steps(stream, batching.rows, batching.window)
    if batching.kind == "packed":
        return packed_steps(stream, batching.rows, batching.window, seed)
    if batching.kind == "pairs":
        return pair_steps(stream, batching.rows, seed)
    return sentence_steps(stream, batching.rows, batching.window, seed, shared)


def sweep_steps(stream: Ids, batching: Batching, budget: int, number: int) -> list[Step]:
    """Return piece `number`, of about `budget` tokens, of an endless pass over pooled text (central training).

    The whole text lies in `rows` contiguous pieces side by side, as in ordinary language-model training; each
    piece is the next columns and starts over at the end. Lines are read in one shuffled order, piece by piece.
    """
    if batching.kind != "stream":
        return _sweep_lines(stream, batching, budget, number)
    rows = max(1, min(batching.rows, (len(stream) - 1) // batching.window))
    columns = (len(stream) - 1) // rows
    inputs = stream[: rows * columns].astype(np.int64).reshape(rows, columns)
    targets = stream[1 : rows * columns + 1].astype(np.int64).reshape(rows, columns)
    left = max(1, round(budget / rows))  # columns of this piece, more than there are where the budget is several passes
    at = number * left % columns
    steps: list[Step] = []
    while left > 0:
        piece = slice(at, min(at + left, columns))
        width = piece.stop - piece.start
        steps += _windows(inputs[:, piece], targets[:, piece], np.ones((rows, width), np.float32), batching.window)
        left, at = left - width, 0
    return steps


def _sweep_lines(stream: Ids, batching: Batching, budget: int, number: int) -> list[Step]:
    bounds = line_bounds(stream)
    order = np.random.default_rng(0).permutation(len(bounds) - 1)
    lines = Ragged(stream.astype(np.int64), bounds).take(order)
    whole = batching.kind != "sentences"  # which are cut to the window
    ends = np.cumsum(lines.counts() if whole else np.minimum(lines.counts(), batching.window))
    start, left = number * budget % int(ends[-1]), budget
    chosen: list[Numbers] = []
    while left > 0:
        first, last = np.searchsorted(ends, [start, min(start + left, int(ends[-1]))], side="right")
        chosen.append(lines.flat[lines.bounds[first] : lines.bounds[max(last, first + 1)]])
        left, start = left - (int(ends[-1]) - start), 0
    text = np.concatenate(chosen).astype(np.int32)
    if batching.kind == "packed":
        return packed_steps(text, batching.rows, batching.window, number)
    if batching.kind == "pairs":
        return pair_steps(text, batching.rows, number)
    steps = sentence_steps(text, batching.rows, batching.window, number, number)
    # No clients advance in lockstep here, so lengths need no common order: a piece that ends with short lines leaves
    # a model that expects every line to end.
    return [steps[j] for j in np.random.default_rng(number).permutation(len(steps))]
