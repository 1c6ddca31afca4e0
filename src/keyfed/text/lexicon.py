"""From the chunks of a table of lines to tokens: counting words and encoding text without looking at it again.

Every different chunk is cut into words once. A stream of tokens is then a matter of looking numbers up in arrays, and
so is counting; the words that are kept are chosen by the same rule as in memory (`keyfed.text.vocab.choose_vocab`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyfed.text.ragged import Numbers, Ragged, blocks, bounds_of, ranges
from keyfed.text.spill import Numbered
from keyfed.text.table import LineTable
from keyfed.text.vocab import EOS, UNK, Vocab, VocabSummary, choose_vocab, words_of

LINES = 1 << 16  # that are looked up at once

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Streams:
    """The tokens of several lists of lines, one after the other.

    Attributes:
      lists: which lists, by number.
      lengths: tokens of each.
    """

    lists: slice
    lengths: Numbers
    tokens: Ids


@dataclass(frozen=True, slots=True)
class Lexicon:
    """What the chunks of a table consist of.

    Attributes:
      types: different words or characters; the first is the end of a line.
      tokens: chunk c is the types tokens[c].
    """

    types: list[str]
    tokens: Ragged


def lexicon_of(table: LineTable, kind: Literal["word", "char"], *, lower: bool) -> Lexicon:
    """Cut each chunk of a table into words; characters are what they are."""
    types = Numbered({"\n": 0})
    tokenised = table.corpus.tokenised
    counts, flat = [1], [0]
    for chunk in table.spelt[1:]:
        words = words_of(chunk, tokenised=tokenised, lower=lower) if kind == "word" else [chunk]
        counts.append(len(words))
        flat += map(types.__getitem__, words)
    return Lexicon(list(types), Ragged(np.array(flat, np.int64), bounds_of(np.array(counts))))


def types_of(table: LineTable, lexicon: Lexicon, lists: Ragged) -> Iterator[Streams]:
    """Yield the types of lists of lines, some lists at a time; every line is followed by its end."""
    chunk_tokens = lexicon.tokens.counts()
    flat = lexicon.tokens.flat.astype(np.int32)
    plain = bool((chunk_tokens == 1).all())
    for block in blocks(lists.bounds, LINES):
        bounds = lists.bounds[block.start : block.stop + 1]
        lines = lists.flat[bounds[0] : bounds[-1]]
        lengths = table.lengths[lines]
        chunks = table.chunks[ranges(table.starts[lines], lengths)]
        ends = bounds_of(lengths)[bounds - bounds[0]]  # of each list, in chunks
        if plain:
            yield Streams(block, np.diff(ends), flat[chunks])
        else:
            counts = chunk_tokens[chunks]
            tokens = flat[ranges(lexicon.tokens.bounds[chunks], counts)]
            yield Streams(block, np.diff(bounds_of(counts)[ends]), tokens)


def count_types(
    table: LineTable, lexicon: Lexicon, lists: Ragged, min_clients: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often each type occurs, and with how many clients (`min_clients` or more where more have it)."""
    size = len(lexicon.types)
    counts, holders = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for found in types_of(table, lexicon, lists):
        counts += np.bincount(found.tokens, minlength=size)
        # Only types that are not known to have enough holders are looked at: after some clients hardly any.
        few = np.flatnonzero(holders[found.tokens] < min_clients)
        client = np.repeat(np.arange(len(found.lengths)), found.lengths)[few]
        pairs = np.unique(client * size + found.tokens[few])
        holders += np.bincount(pairs % size, minlength=size)
    present = np.flatnonzero(counts[1:]) + 1
    words = [lexicon.types[t] for t in present.tolist()]
    return (
        dict(zip(words, counts[present].tolist(), strict=True)),
        dict(zip(words, holders[present].tolist(), strict=True)),
    )


def vocab_of(
    table: LineTable,
    lexicon: Lexicon,
    train: Ragged,
    *,
    kind: Literal["word", "char"],
    size: int | None,
    lower: bool,
    min_clients: int,
) -> tuple[Vocab, VocabSummary]:
    """Choose the vocabulary of the clients' training lines: `build_vocab` on a table."""
    counts, holders = count_types(table, lexicon, train, min_clients)
    return choose_vocab(
        counts,
        holders,
        len(train.flat),
        clients=len(train),
        kind=kind,
        size=size,
        lower=lower,
        tokenised=table.corpus.tokenised,
        min_clients=min_clients,
    )


def encode_lists(table: LineTable, lexicon: Lexicon, vocab: Vocab, lists: Ragged) -> Iterator[Streams]:
    """Yield the streams of lists of lines, some lists at a time: `Vocab.encode` on a table."""
    number = vocab.index.get
    numbers = np.array([EOS, *(number(word, UNK) for word in lexicon.types[1:])], np.int32)
    for found in types_of(table, lexicon, lists):
        yield Streams(found.lists, found.lengths, numbers[found.tokens])
