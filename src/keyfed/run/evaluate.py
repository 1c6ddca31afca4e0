"""Evaluation: perplexity and accuracy on held-out streams, as mergeable counts (never a mean of means).

Headline: exp(mean nats per predicted token) over each stream in order, state carried, zero at the start, every token
after the first predicted, line ends included, nothing padded counted. Of a model trained on packed lines: over each
line on its own, <bos> first and the state reset (`scorer_of`).

A stream is one chain of time steps: alone, each step is a product with a single row, which costs a CPU five times as
much a token as eight rows and leaves a GPU idle. So a long stream is cut into pieces that are read side by side. The
state a piece starts from is first guessed by reading the `WARM_UP` tokens before it from zero, which a recurrent
network that forgets makes nearly right. Then every piece is read and scored, and whatever state arrives at its end is
compared with the one its successor started from. Where they differ, the successor is read again from the state that
arrived, until it meets what was read before. What is still unsettled after a few such passes is read as one chain.
So the result is that of reading the stream in order, to rounding, however long the network remembers.

`suggest` reads a text in the same way and names the most probable next words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.network import Network, NetworkState, Reader, SpecReader, reader_of
from keyfed.model.language_model import Params
from keyfed.model.output import Score, TokenScores
from keyfed.text.batches import Kind, line_bounds, line_read, lines_of, reads_lines
from keyfed.text.vocab import BOS, EOS, PAD, UNK, Vocab

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


ScoreAt = Callable[[Reader, Tensor, Tensor, Positions], TokenScores]
"""(reader, what it read, the tokens that come next, where they were read) → nats and ranks of these tokens."""


@dataclass(slots=True)
class Sheet:
    """The streams' tokens, one stream behind the other, on the device; and what was found at which of them."""

    tokens: Tensor
    found: list[tuple[Positions, Tensor, Tensor]] = field(default_factory=list)
    score: ScoreAt = lambda reader, x, targets, where: reader.score(x, targets)

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
def score_streams(
    reader: Reader, streams: Sequence[Ids], device: str, score: ScoreAt | None = None
) -> tuple[NDArray[np.float64], Positions]:
    """Nats and rank of every token after the first of each stream, read in order from a zero state.

    Args:
      score: scores in the place of the reader; positions count through all streams, and may be scored twice.

    Returns:
      Both for all streams, one behind the other; a stream of n tokens has n − 1.
    """
    tokens = np.concatenate([*streams, np.zeros(0, np.int32)]).astype(np.int64)
    lengths = np.array([len(s) for s in streams], np.int64)
    ends = np.cumsum(lengths)
    # An empty stream predicts nothing.
    spans = list(zip((ends - lengths).tolist(), np.maximum(ends - 1, ends - lengths).tolist(), strict=True))
    sheet = Sheet(torch.from_numpy(tokens).to(device))
    if score is not None:
        sheet.score = score
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
        scores = sheet.score(reader, x, sheet.at(where + 1), where)
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


NEVER = (PAD, BOS, EOS, UNK)
BEAM = 12
LONGEST_WORD = 24


def suggest(
    spec: Network, params: Params, vocab: Vocab, text: str, k: int = 3, *, lines: bool = False, begins: str = ""
) -> list[str]:
    """Return the k most probable next words after `text`, specials left out.

    A character model completes the word being typed (or starts a new one after a blank) by a beam search over
    characters.

    Args:
      lines: whether the model learnt from single lines (sentences or packed lines); it then reads the last one only.
      begins: letters that the words begin with; fewer words are returned if fewer begin so.
    """
    ids = [EOS, *vocab.encode_context(text).tolist()]  # a text starts where a line starts
    context = torch.tensor([line_read(ids) if lines else ids])
    reader = reader_of(spec, params)
    logits, state = reader.after(context, None)
    logp = logits.log_softmax(-1)
    if vocab.kind == "char":
        typed = text.rsplit(None, 1)[-1] if text and not text[-1].isspace() else ""
        return [typed + rest for rest in _complete(reader, vocab, logp[0], state, k)]
    logp[0, list(NEVER)] = -torch.inf
    begun = [i for i, word in enumerate(vocab.words) if word.startswith(begins) and i not in NEVER]
    best = logp[0, begun].topk(min(k, len(begun))).indices.tolist()
    return [vocab.words[begun[i]] for i in best]


def _complete(reader: Reader, vocab: Vocab, logp: Tensor, state: NetworkState, k: int) -> list[str]:
    """Beam search for the k most probable character strings that end in a blank or a line end."""
    ends = [i for i, w in enumerate(vocab.words) if i == EOS or w.isspace()]
    logp = logp.clone()
    logp[[PAD, BOS, UNK]] = -torch.inf
    if not any(w.strip() for w in vocab.words[len(NEVER) :]):
        return []
    first = logp.clone()
    first[ends] = -torch.inf  # the first character of a suggestion is not a blank
    scores, tokens = first.topk(min(BEAM, int(torch.isfinite(first).sum())))
    beams = [(float(s), [int(t)]) for s, t in zip(scores, tokens, strict=True)]
    state = reader.keep(state, [0] * len(beams))
    finished: list[tuple[float, list[int]]] = []
    for _ in range(LONGEST_WORD):
        logits, state = reader.after(torch.tensor([[b[1][-1]] for b in beams]), state)
        logps = logits.log_softmax(-1)
        logps[:, [PAD, BOS, UNK]] = -torch.inf
        over = logps[:, ends].logsumexp(-1)
        finished += [(s + float(o), t) for (s, t), o in zip(beams, over, strict=True)]
        logps[:, ends] = -torch.inf
        total = torch.tensor([b[0] for b in beams])[:, None] + logps
        best, flat = total.flatten().topk(min(BEAM, total.numel()))
        rows, columns = flat // total.shape[1], flat % total.shape[1]
        beams = [(float(s), [*beams[r][1], int(c)]) for s, r, c in zip(best, rows.tolist(), columns, strict=True)]
        state = reader.keep(state, rows.tolist())
        finished = sorted(finished, reverse=True)[:k]
        if len(finished) == k and finished[-1][0] >= beams[0][0]:
            break
    return [vocab.decode(t) for _, t in finished]
