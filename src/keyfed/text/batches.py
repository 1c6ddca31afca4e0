"""Batches: from a client's stream of tokens to the steps of one local epoch.

Two ways of cutting, both with the time axis last and every predicted token counted once:

- **stream**: the text is one stream, cut into `rows` contiguous pieces read side by side in windows; the network's
  state is carried from window to window. Nothing is lost: n tokens give n − 1 predictions.
- **sentences**: every line is its own sequence, `<bos> w₁ … wₙ → w₁ … wₙ <eos>`. Lines of neighbouring length make a
  batch, padded to its longest line and masked. A line longer than the window loses what lies beyond it.

A client's batches depend on that client and the run's seeds alone, never on who trains beside it. Yet clients that
advance in lockstep are padded to the longest of them, so the order in which batches of sentences are read follows one
shuffle of lengths that all clients of a round share (`length_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.text.vocab import BOS, EOS, PAD

Ids = NDArray[np.int32]
BUCKET = 8  # a stacked step is padded to a multiple of this: few shapes for a GPU to compile and remember
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
      kind: "stream" or "sentences".
      rows: batch size B.
      window: tokens a window predicts; sentences are cut to it.
      max_sentences: lines drawn per client and round, None for all.
      max_tokens: tokens used per client and round, None for all.
    """

    kind: Literal["stream", "sentences"]
    rows: int
    window: int
    max_sentences: int | None = None
    max_tokens: int | None = None


def lines_of(stream: Ids) -> list[Ids]:
    """Cut a stream after every <eos>; a rest without one is a line too.

    Example:
      >>> [line.tolist() for line in lines_of(np.array([7, 8, 2, 9, 2, 5], dtype=np.int32))]
      [[7, 8, 2], [9, 2], [5]]
    """
    ends = np.flatnonzero(stream == EOS) + 1
    return [piece for piece in np.split(stream, ends) if len(piece)]


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
    turn = np.random.default_rng(shared).permutation(BINS)
    bins = (2 * np.arange(batches) + 1) * BINS // (2 * batches)
    return [int(j) for j in np.argsort(turn[bins], kind="stable")]


def sentence_steps(stream: Ids, rows: int, window: int, seed: int, shared: int) -> list[Step]:
    """Batch lines of neighbouring length; every line starts from a zero state.

    Args:
      seed: the client's; lines of one length are dealt out in an order drawn by it.
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
    return sentence_steps(stream, batching.rows, batching.window, seed, shared)


def sweep_steps(stream: Ids, batching: Batching, budget: int, turn: int) -> list[Step]:
    """Return the `turn`-th piece of about `budget` tokens of an endless pass over pooled text (central training).

    The whole text lies in `rows` contiguous pieces side by side, as in ordinary language-model training; each turn
    reads the next columns and starts over at the end. Sentences are read in one shuffled order, turn by turn.
    """
    if batching.kind == "sentences":
        return _sweep_sentences(stream, batching, budget, turn)
    rows = max(1, min(batching.rows, (len(stream) - 1) // batching.window))
    columns = (len(stream) - 1) // rows
    inputs = stream[: rows * columns].astype(np.int64).reshape(rows, columns)
    targets = stream[1 : rows * columns + 1].astype(np.int64).reshape(rows, columns)
    left = max(1, round(budget / rows))  # columns of this turn, more than there are where the budget is several passes
    at = turn * left % columns
    steps: list[Step] = []
    while left > 0:
        piece = slice(at, min(at + left, columns))
        width = piece.stop - piece.start
        steps += _windows(inputs[:, piece], targets[:, piece], np.ones((rows, width), np.float32), batching.window)
        left, at = left - width, 0
    return steps


def _sweep_sentences(stream: Ids, batching: Batching, budget: int, turn: int) -> list[Step]:
    lines = lines_of(stream)
    order = np.random.default_rng(0).permutation(len(lines))
    ends = np.cumsum([min(len(lines[i]), batching.window) for i in order])
    start, left = turn * budget % int(ends[-1]), budget
    chosen: list[Ids] = []
    while left > 0:
        first, last = np.searchsorted(ends, [start, min(start + left, int(ends[-1]))], side="right")
        chosen += [lines[i] for i in order[first : max(last, first + 1)]]
        left, start = left - (int(ends[-1]) - start), 0
    steps = sentence_steps(np.concatenate(chosen), batching.rows, batching.window, turn, turn)
    # Nobody walks in lockstep here, so lengths need no common order: a turn that ended with its short lines would leave
    # a model that expects every line to end.
    return [steps[j] for j in np.random.default_rng(turn).permutation(len(steps))]
