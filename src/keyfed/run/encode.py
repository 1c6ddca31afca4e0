"""From a corpus's name to token streams: read, deal out to clients, build the vocabulary, encode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from keyfed.config.load import Config
from keyfed.engine.problem import ClientStore, make_store
from keyfed.errors import TooLittleText
from keyfed.model.presets import preset
from keyfed.text.catalogue import NAMED, load_corpus
from keyfed.text.corpus import Corpus
from keyfed.text.partition import ClientText, Population, partition
from keyfed.text.vocab import UNK, Vocab, VocabSummary, build_vocab, count_words, read_vocab, summarise

Ids = NDArray[np.int32]
Streams = dict[str, Ids]  # one held-out stream a client, or one named after the published file
MOST_STREAMS = 10_000  # clients whose held-out text is read; more would take longer to judge than to train


@dataclass(frozen=True, slots=True)
class Text:
    """A corpus with its clients and its vocabulary, not encoded yet."""

    corpus: Corpus
    population: Population
    vocab: Vocab
    summary: VocabSummary


@dataclass(frozen=True, slots=True)
class Encoded:
    """A corpus as tokens; the attributes are those of `Prepared`."""

    corpus: Corpus
    population: Population
    vocab: Vocab
    vocab_summary: VocabSummary
    store: ClientStore
    valid: Streams
    test: Streams
    unseen: Streams
    excluded: Sequence[str]
    oov: dict[str, float]


def window_of(config: Config) -> int:
    """Tokens of a training window: the configuration's, or the model's own."""
    return config.data.window or preset(config.model.name).window


def default_partition(config: Config, corpus: Corpus) -> tuple[str, int | None]:
    """Return the partition asked for, or the corpus's own."""
    known = NAMED.get(config.data.name)
    kind = config.data.partition or (known.partition if known else ("natural" if corpus.natural else "iid"))
    clients = config.data.clients
    if clients is None and known is not None and kind != "natural" and kind != "quantity":
        clients = known.clients
    return kind, clients


class VocabRules(TypedDict):
    """How a vocabulary is chosen: arguments of `build_vocab`."""

    kind: Literal["word", "char"]
    size: int | None
    lower: bool
    min_clients: int


def vocab_rules(config: Config, *, natural: bool, clients: int) -> VocabRules:
    """Say how the vocabulary is chosen; on natural clients a word that only one of them used stays out."""
    data, characters = config.data, preset(config.model.name).characters
    return {
        "kind": "char" if characters else "word",
        "size": None if characters else data.vocab,
        "lower": data.lower and not characters,
        "min_clients": data.min_clients or (2 if natural and not characters and clients > 1 else 1),
    }


def given_vocab(config: Config) -> Vocab | None:
    """Read the vocabulary that was asked for by file; None where it is to be built."""
    if config.data.vocab_file is None:
        return None
    return read_vocab(Path(config.data.vocab_file), "char" if preset(config.model.name).characters else "word")


def read_people(config: Config) -> tuple[Corpus, Population]:
    """Load a corpus and deal it out to clients."""
    data = config.data
    corpus = load_corpus(
        data.name,
        data_dir=Path(data.dir) if data.dir else None,
        author_column=data.author_column,
        text_column=data.text_column,
    )
    kind, clients = default_partition(config, corpus)
    return corpus, partition(
        corpus, kind, clients=clients, seed=config.train.seed, unseen=data.unseen, alpha=data.alpha,
        part=data.clients_part,
    )  # fmt: skip


def read_text(config: Config) -> Text:
    """Load and partition a corpus; its vocabulary is the given one, or built from training text only."""
    given = given_vocab(config)  # what is wrong with it is said before a long reading
    corpus, population = read_people(config)
    if given is not None:
        vocab = replace(given, tokenised=corpus.tokenised)  # how text is cut is a matter of the text
        lines = list(chain.from_iterable(c.train for c in population.trained))
        return Text(corpus, population, vocab, summarise(vocab, count_words(lines, vocab), len(lines)))
    rules = vocab_rules(config, natural=population.natural, clients=len(population.trained))
    vocab, summary = build_vocab([c.train for c in population.trained], tokenised=corpus.tokenised, **rules)
    return Text(corpus, population, vocab, summary)


def held_out(text: Text, part: Literal["valid", "test"], seed: int) -> Iterator[tuple[str, Ids]]:
    """Yield the streams the model is chosen or judged on: the published one, or at most MOST_STREAMS clients' own."""
    if text.population.test is not None:
        ids = text.vocab.encode((text.population.valid if part == "valid" else text.population.test) or ())
        if len(ids) > 1:
            yield part, ids
        return
    yield from _streams(text.population.clients, part, text.vocab, seed)


def unseen_streams(text: Text, seed: int) -> Iterator[tuple[str, Ids]]:
    """Yield the text of at most MOST_STREAMS clients never trained on."""
    return _streams(text.population.unseen, "test", text.vocab, seed)


def _streams(
    texts: Sequence[ClientText], part: Literal["valid", "test"], vocab: Vocab, seed: int
) -> Iterator[tuple[str, Ids]]:
    having = np.flatnonzero([bool(text.valid if part == "valid" else text.test) for text in texts])
    for k in draw_streams(having, stream_keys([text.name for text in texts], seed)):
        ids = vocab.encode(texts[k].valid if part == "valid" else texts[k].test)
        if len(ids) > 1:
            yield texts[k].name, ids


def stream_keys(names: Sequence[str], seed: int) -> NDArray[np.int64] | None:
    """Return by what clients' held-out text is drawn, where there are too many to read all: a hash of their names.

    So a client's validation and test text are drawn together.
    """
    if len(names) <= MOST_STREAMS:
        return None
    # derive_seed(seed, "held out", name) for a million names: what they have in common is hashed once.
    common = hashlib.blake2b(f"int:{seed}/str:held out/str:".encode(), digest_size=8)

    def digest(name: str) -> bytes:
        mine = common.copy()
        mine.update(name.encode())
        return mine.digest()

    return (np.frombuffer(b"".join(map(digest, names)), ">u8") >> 2).astype(np.int64)


def draw_streams(having: NDArray[np.int64], keys: NDArray[np.int64] | None) -> list[int]:
    """Return at most MOST_STREAMS of the clients who have held-out text, in order."""
    if keys is None or len(having) <= MOST_STREAMS:
        return [int(k) for k in having]
    return sorted(having[np.argsort(keys[having], kind="stable")[:MOST_STREAMS]].tolist())


def no_window(corpus: str, clients: int, longest: int, window: int) -> TooLittleText:
    """Say that no client has enough text."""
    return TooLittleText(
        f"{corpus}: no client has the {window + 1} tokens of one window (the largest of "
        f"{clients} has {longest}); lower data.window or give more text"
    )


def unknown_rate(streams: Sequence[Ids]) -> float:
    """Share of unknown words."""
    tokens = sum(len(s) for s in streams)
    return sum(int((s == UNK).sum()) for s in streams) / tokens if tokens else 0.0


def encode(config: Config) -> Encoded:
    """Read a corpus and encode it in memory.

    Raises:
      DataError: nothing to train on.
    """
    text, window, seed = read_text(config), window_of(config), config.train.seed
    streams = {c.name: text.vocab.encode(c.train) for c in text.population.trained}
    kept = {name: ids for name, ids in streams.items() if len(ids) > window}
    if not kept:
        raise no_window(text.corpus.name, len(streams), max(map(len, streams.values()), default=0), window)
    valid, test = dict(held_out(text, "valid", seed)), dict(held_out(text, "test", seed))
    return Encoded(
        corpus=text.corpus,
        population=text.population,
        vocab=text.vocab,
        vocab_summary=text.summary,
        store=make_store(list(kept.values()), list(kept)),
        valid=valid,
        test=test,
        unseen=dict(unseen_streams(text, seed)),
        excluded=tuple(name for name in streams if name not in kept),
        oov={
            "train": unknown_rate(list(kept.values())),
            "valid": unknown_rate(list(valid.values())),
            "test": unknown_rate(list(test.values())),
        },
    )
