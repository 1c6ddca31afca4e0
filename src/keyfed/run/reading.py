"""Reading held-out streams in order with the state carried, several places of one long stream side by side.

A stream is one chain of time steps: alone, each step is a product with a single row, which costs a CPU five times as
much a token as eight rows and leaves a GPU idle. So a long stream is cut into pieces that are read side by side. The
state a piece starts from is first guessed by reading the `WARM_UP` tokens before it from zero, which a recurrent
network that forgets makes nearly right. Then every piece is read and scored, and whatever state arrives at its end is
compared with the one its successor started from. Where they differ, the successor is read again from the state that
arrived, until it meets what was read before. What is still unsettled after a few such passes is read as one chain.
So the result is that of reading the stream in order, to rounding, however long the network remembers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.network import NetworkState, Reader, SpecReader

Ids = NDArray[np.int32]
Positions = NDArray[np.int64]

FEW_STREAMS = 8  # side by side, below which a time step is too little work to be worth waking a second thread
WARM_UP = 2048  # tokens before a piece from which its first state is guessed; whole windows of `SpecReader.span`
PASSES = 4  # over the pieces that are not settled, before the rest is read in order
FORGOTTEN = 0.05  # difference left of a state after half the warm-up, from which on guessing is not worth trying
SAME = 32  # units of rounding between states that count as the same; one row and many rows differ by about ten


@dataclass(frozen=True, slots=True)
class Side:
    """How long streams are cut: at most about `rows` pieces side by side, of `least` tokens or more."""

    rows: int
    least: int


CPU, GPU = Side(rows=16, least=2048), Side(rows=128, least=512)


@contextmanager
def one_thread(really: bool) -> Iterator[None]:
    """Compute on one thread inside the block, if `really`."""
    before = torch.get_num_threads()
    if really:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True)
class Sheet:
    """The streams' tokens, one stream behind the other, on the device; and what was found at which of them."""

    tokens: Tensor
    found: list[tuple[Positions, Tensor, Tensor]] = field(default_factory=list)

    def at(self, positions: Positions) -> Tensor:
        return self.tokens[torch.from_numpy(positions).to(self.tokens.device)]

    def fetch(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Nats and ranks by the position of the token that was read; of what was scored twice, the later."""
        nats, ranks = np.full(len(self.tokens), np.nan), np.zeros(len(self.tokens), np.int64)
        if self.found:
            positions, some_nats, some_ranks = zip(*self.found, strict=True)
            where = np.concatenate(positions)
            nats[where] = torch.cat(some_nats).cpu().numpy()
            ranks[where] = torch.cat(some_ranks).cpu().numpy()
        return nats, ranks


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [begin, end) of the sheet, read one by one, the token after each predicted.

    Attributes:
      home: where its stream begins.
      close: where its stream's last piece ends.
    """

    begin: int
    end: int
    home: int
    close: int

    @property
    def opens(self) -> bool:
        """Whether it starts a stream."""
        return self.begin == self.home


def cut(streams: Sequence[tuple[int, int]], side: Side, window: int) -> list[Piece]:
    """Cut streams (begin, end) into pieces in order, all but each stream's last of whole windows."""
    all_tokens = sum(end - begin for begin, end in streams)
    length = max(side.least, -(-all_tokens // side.rows))
    pieces = []
    for begin, end in streams:
        count = max(1, (end - begin) // length)
        step = -(-(end - begin) // (count * window)) * window if count > 1 else max(1, end - begin)
        pieces += [Piece(at, min(at + step, end), begin, end) for at in range(begin, end, step)]
    return pieces


@torch.no_grad()
def score_streams(reader: Reader, streams: Sequence[Ids], device: str) -> tuple[NDArray[np.float64], Positions]:
    """Nats and rank of every token after the first of each stream, read in order from a zero state.

    Returns:
      Both for all streams, one behind the other; a stream of n tokens has n − 1.
    """
    tokens = np.concatenate([*streams, np.zeros(0, np.int32)]).astype(np.int64)
    lengths = np.array([len(s) for s in streams], np.int64)
    ends = np.cumsum(lengths)
    # An empty stream predicts nothing.
    spans = list(zip((ends - lengths).tolist(), np.maximum(ends - 1, ends - lengths).tolist(), strict=True))
    sheet = Sheet(torch.from_numpy(tokens).to(device))
    if not (isinstance(reader, SpecReader) and _in_pieces(reader, sheet, spans)):
        _in_order(reader, sheet, spans, None)
    nats, ranks = sheet.fetch()
    scored = np.ones(len(tokens), np.bool_)
    scored[ends[lengths > 0] - 1] = False
    return nats[scored], ranks[scored]


def _in_order(reader: Reader, sheet: Sheet, spans: Sequence[tuple[int, int]], state: NetworkState | None) -> None:
    """Read and score spans side by side; those that end drop out."""
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    rows = np.arange(len(begins))
    for at in range(0, max(ends - begins, default=0), reader.span):
        rows, state = _without(reader, rows, state, ends[rows] - begins[rows] > at)
        state = _window(reader, sheet, begins[rows] + at, ends[rows], state, scored=True)


def _without(
    reader: Reader, rows: Positions, state: NetworkState | None, going: NDArray[np.bool_]
) -> tuple[Positions, NetworkState | None]:
    """Keep the rows that go on."""
    if going.all():
        return rows, state
    return rows[going], None if state is None else reader.keep(state, np.flatnonzero(going).tolist())


def _window(
    reader: Reader, sheet: Sheet, begins: Positions, ends: Positions, state: NetworkState | None, *, scored: bool
) -> NetworkState:
    """Read one window of every row. A row that ends within it reads on, unscored: its state is of no use after."""
    time = min(reader.span, int((ends - begins).max()))
    positions = begins[:, None] + np.arange(time)
    real = positions < ends[:, None]
    with one_thread(len(begins) <= FEW_STREAMS):
        x, state = reader.read(sheet.at(np.minimum(positions, len(sheet.tokens) - 1)), state)
    if scored:
        # Padded positions are dropped before the output layer, which is where the time goes.
        x, where = x.flatten(0, 1), positions[real]
        if not real.all():
            x = x[torch.from_numpy(np.flatnonzero(real)).to(x.device)]
        scores = reader.score(x, sheet.at(where + 1))
        sheet.found.append((where, scores.nats[0], scores.rank[0]))
    return state


def _in_pieces(reader: SpecReader, sheet: Sheet, spans: Sequence[tuple[int, int]]) -> bool:
    """Read and score spans in pieces, if they are long enough and the network forgets; say whether that was so."""
    side = GPU if sheet.tokens.is_cuda else CPU
    if max((end - begin for begin, end in spans), default=0) < 2 * side.least:
        return False  # no stream makes two pieces, and thousands of short ones are not even looked at
    pieces = cut(spans, side, reader.span)
    later = [i for i, piece in enumerate(pieces) if not piece.opens]
    guessed = _guess(reader, sheet, [pieces[i] for i in later]) if later else None
    if guessed is None:
        return False
    starts = guessed.new_zeros(len(pieces), guessed.shape[1])
    starts[later] = guessed
    longest = max(piece.end - piece.begin for piece in pieces)
    marks = starts.new_zeros(len(pieces), -(-longest // reader.span), starts.shape[1])
    _settle(reader, sheet, pieces, list(range(len(pieces))), starts, marks, first=True)
    for _ in range(PASSES):
        todo = _hand_over(reader, pieces, later, starts, marks)
        if not todo:
            return True
        _settle(reader, sheet, pieces, todo, starts, marks, first=False)
    todo = _hand_over(reader, pieces, later, starts, marks)
    rest = {pieces[i].home: i for i in reversed(todo)}  # the first unsettled piece of each stream
    if rest:
        chains = [(pieces[i].begin, pieces[i].close) for i in rest.values()]
        _in_order(reader, sheet, chains, reader.unpack(starts[list(rest.values())]))
    return True


def _guess(reader: SpecReader, sheet: Sheet, pieces: Sequence[Piece]) -> Tensor | None:
    """States at the beginning of pieces as the tokens just before tell them; None if the network does not forget.

    That is seen by starting later: one piece's state is also guessed from half as many tokens.
    """
    spans = [(max(piece.home, piece.begin - WARM_UP), piece.begin) for piece in pieces]
    trial = len(pieces) - 1
    spans.append((max(spans[trial][0], pieces[trial].begin - WARM_UP // 2), pieces[trial].begin))
    begins, ends = np.array(spans, np.int64).T
    rows, state, arrived = np.arange(len(begins)), None, {}
    for at in range(0, max(ends - begins), reader.span):
        rows, state = _without(reader, rows, state, ends[rows] - begins[rows] > at)
        state = _window(reader, sheet, begins[rows] + at, ends[rows], state, scored=False)
        packed = reader.pack(state)
        arrived.update(
            {int(row): packed[i] for i, row in enumerate(rows) if ends[row] - begins[row] <= at + reader.span}
        )
    guessed = torch.stack([arrived[row] for row in range(len(spans))])
    forgets = torch.isclose(guessed[-1], guessed[trial], rtol=FORGOTTEN, atol=FORGOTTEN, equal_nan=True).all()
    return guessed[:-1] if bool(forgets) else None


def _settle(
    reader: SpecReader,
    sheet: Sheet,
    pieces: Sequence[Piece],
    todo: Sequence[int],
    starts: Tensor,
    marks: Tensor,
    *,
    first: bool,
) -> None:
    """Read and score pieces from their `starts`; after the first time only until they meet their `marks`.

    Args:
      marks: [pieces, windows, numbers], the state after every window, written.
    """
    begins, ends = np.array([(piece.begin, piece.end) for piece in pieces], np.int64).T
    rows, state = np.array(todo, np.int64), reader.unpack(starts[list(todo)])
    for window in range(marks.shape[1]):
        at = window * reader.span
        rows, state = _without(reader, rows, state, ends[rows] - begins[rows] > at)
        if not len(rows):
            return
        state = _window(reader, sheet, begins[rows] + at, ends[rows], state, scored=True)
        packed, here = reader.pack(state), torch.from_numpy(rows).to(marks.device)
        if not first:
            rows, state = _without(reader, rows, state, _differ(packed, marks[here, window]))
        marks[here, window] = packed


def _hand_over(
    reader: SpecReader, pieces: Sequence[Piece], later: Sequence[int], starts: Tensor, marks: Tensor
) -> list[int]:
    """Give pieces the state that arrived from the piece before, and return those for which it is another."""
    last = [(pieces[i - 1].end - pieces[i - 1].begin) // reader.span - 1 for i in later]
    arrived = marks[[i - 1 for i in later], last]
    changed = [i for i, other in zip(later, _differ(arrived, starts[list(later)]), strict=True) if other]
    starts[changed] = arrived[[later.index(i) for i in changed]]
    return changed


def _differ(a: Tensor, b: Tensor) -> NDArray[np.bool_]:
    """Which rows differ by more than rounding, cells that grow without bound relative to their size."""
    same = SAME * torch.finfo(a.dtype).eps
    differing: NDArray[np.bool_] = (~torch.isclose(a, b, rtol=same, atol=same, equal_nan=True).all(-1)).cpu().numpy()
    return differing
