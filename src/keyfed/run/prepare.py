"""From a corpus's name to everything a run needs: clients, vocabulary, model, training tokens, held-out streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keyfed.config import Config
from keyfed.engine.network import Network
from keyfed.engine.problem import ClientStore, Problem, make_store
from keyfed.engine.trial import MakeModule
from keyfed.errors import DataError
from keyfed.federated.participation import cohort_size
from keyfed.federated.types import Method
from keyfed.model.presets import preset
from keyfed.run.evaluate import limit_streams
from keyfed.run.outside import build_network, refuse_model_options
from keyfed.text.batches import Batching, lines_of
from keyfed.text.clients import ClientText, Population, partition
from keyfed.text.corpus import Corpus
from keyfed.text.named import NAMED, load_corpus
from keyfed.text.vocab import UNK, Vocab, VocabSummary, build_vocab

Ids = NDArray[np.int32]
Streams = dict[str, Ids]  # one held-out stream a client, or one named after the published file
POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A corpus made ready for training.

    Attributes:
      valid: streams the model is chosen on; `test` those it is judged on; each is read from a zero state.
      unseen: streams of clients never trained on (natural partitions).
      excluded: clients with less text than one window, left out of training.
      oov: share of unknown words in train, valid and test.
    """

    corpus: Corpus
    population: Population
    vocab: Vocab
    vocab_summary: VocabSummary
    spec: Network
    store: ClientStore
    batching: Batching
    valid: Streams
    test: Streams
    unseen: Streams
    excluded: tuple[str, ...]
    oov: dict[str, float]

    def describe(self) -> list[str]:
        """Lines for a person: what was read, dropped and left out."""
        s, v = self.store, self.vocab_summary
        sizes = [s.tokens(k) for k in range(len(s))]
        lines = [
            f"{self.corpus.name}: {len(s)} clients ({self.population.partition}), {sum(sizes):,} training tokens "
            f"(smallest client {min(sizes):,}, median {int(np.median(sizes)):,}, largest {max(sizes):,})",
            f"vocabulary: {v.kept:,} of {v.types:,} {self.vocab.kind} types and 4 specials; dropped ones make "
            f"{v.dropped_tokens / max(1, v.tokens):.2%} of the training tokens"
            + (f" ({v.rare_clients_types:,} used by too few clients)" if v.rare_clients_types else ""),
            f"held out: validation {_count(self.valid):,} tokens, test {_count(self.test):,} tokens"
            + (f", {len(self.unseen)} unseen clients with {_count(self.unseen):,} tokens" if self.unseen else ""),
        ]
        if not self.valid or not self.test:
            lines.append("no held-out text: clients have too few lines to cut; the last round's model will be taken")
        if self.excluded:
            lines.append(
                f"left out: {len(self.excluded)} clients with less text than one window "
                f"of {self.batching.window} tokens"
            )
        if self.corpus.skipped:
            shown = "; ".join(f"{s.what}: {s.why}" for s in self.corpus.skipped[:3])
            more = len(self.corpus.skipped) - 3
            lines.append(f"skipped: {shown}" + (f"; and {more} more" if more > 0 else ""))
        return lines


def _count(streams: Streams) -> int:
    return sum(len(s) for s in streams.values())


def _unknown_rate(streams: Sequence[Ids]) -> float:
    tokens = sum(len(s) for s in streams)
    return sum(int((s == UNK).sum()) for s in streams) / tokens if tokens else 0.0


def default_partition(config: Config, corpus: Corpus) -> tuple[str, int | None]:
    """Return the partition asked for, or the corpus's own."""
    known = NAMED.get(config.data.name)
    kind = config.data.partition or (known.partition if known else ("natural" if corpus.natural else "iid"))
    clients = config.data.clients
    if clients is None and known is not None and kind != "natural" and kind != "quantity":
        clients = known.clients
    return kind, clients


def _streams(texts: Sequence[ClientText], part: str, vocab: Vocab) -> Streams:
    out = {}
    for text in texts:
        ids = vocab.encode(getattr(text, part))
        if len(ids) > 1:
            out[text.name] = ids
    return out


def prepare(config: Config, module: MakeModule | None = None) -> Prepared:
    """Load, partition, build the vocabulary from training text only, encode.

    Args:
      module: makes the model in place of the preset, which then only says the window and whether to read characters.

    Raises:
      DataError: nothing to train on, before any training starts.
    """
    if module is not None:
        refuse_model_options(config, module)
    data = config.data
    corpus = load_corpus(
        data.name,
        data_dir=Path(data.dir) if data.dir else None,
        author_column=data.author_column,
        text_column=data.text_column,
    )
    kind, clients = default_partition(config, corpus)
    population = partition(corpus, kind, clients=clients, seed=config.train.seed, unseen=data.unseen, alpha=data.alpha)
    chosen = preset(config.model.name)
    characters = chosen.characters
    min_clients = data.min_clients or (
        2 if population.natural and not characters and len(population.clients) > 1 else 1
    )
    vocab, summary = build_vocab(
        [c.train for c in population.clients],
        kind="char" if characters else "word",
        size=None if characters else data.vocab,
        lower=data.lower and not characters,
        tokenised=corpus.tokenised,
        min_clients=min_clients,
    )
    window = data.window or chosen.window
    streams = {c.name: vocab.encode(c.train) for c in population.clients}
    kept = {name: ids for name, ids in streams.items() if len(ids) > window}
    if not kept:
        longest = max((len(ids) for ids in streams.values()), default=0)
        raise DataError(
            f"{corpus.name}: no client has the {window + 1} tokens of one window (the largest of {len(streams)} has "
            f"{longest}); lower data.window or give more text"
        )
    if population.test is not None:
        valid: Streams = {"valid": vocab.encode(population.valid or ())}
        test: Streams = {"test": vocab.encode(population.test)}
    else:
        valid = _streams(population.clients, "valid", vocab)
        test = _streams(population.clients, "test", vocab)
    most = config.train.test_tokens
    return Prepared(
        corpus=corpus,
        population=population,
        vocab=vocab,
        vocab_summary=summary,
        spec=build_network(config, len(vocab), module),
        store=make_store(list(kept.values()), list(kept)),
        batching=Batching(data.batches, 1, window, data.max_sentences, data.max_tokens),
        valid={name: ids for name, ids in valid.items() if len(ids) > 1},
        test=limit_streams({name: ids for name, ids in test.items() if len(ids) > 1}, most),
        unseen=limit_streams(_streams(population.unseen, "test", vocab), most),
        excluded=tuple(name for name in streams if name not in kept),
        oov={
            "train": _unknown_rate(list(kept.values())),
            "valid": _unknown_rate(list(valid.values())),
            "test": _unknown_rate(list(test.values())),
        },
    )


def pooled_store(store: ClientStore) -> ClientStore:
    """One client that holds everybody's text, for central training."""
    return ClientStore(store.flat, (0, store.bounds[-1]), (POOLED,))


def client_tokens(prepared: Prepared) -> list[float]:
    """Tokens every client predicts in one epoch, in expectation: its text, limits respected."""
    s, limits = prepared.store, prepared.batching
    out = []
    for k in range(len(s)):
        tokens = s.tokens(k) - 1.0
        if limits.kind == "sentences" or limits.max_sentences is not None:
            lines = lines_of(s.stream(k))
            if limits.kind == "sentences":
                tokens = float(sum(min(len(line), limits.window) for line in lines))
            tokens *= min(1.0, (limits.max_sentences or len(lines)) / len(lines))
        out.append(min(tokens, limits.max_tokens or tokens))
    return out


def round_tokens(prepared: Prepared, members: int, epochs: int) -> int:
    """Tokens a round of `members` clients predicts in expectation: members × mean client × epochs."""
    tokens = client_tokens(prepared)
    return max(1, round(members * sum(tokens) / len(tokens) * epochs))


def usual_members(config: Config, clients: int) -> int:
    """Clients of a round that draws a cohort, at most all."""
    return min(cohort_size(config.participation, config.train.cohort, clients), clients)


def make_problem(prepared: Prepared, config: Config, method: Method, device: str, budget: int | None = None) -> Problem:
    """Join text and model into the problem the engine solves; central training pools the text.

    Args:
      budget: tokens a round of central training reads; None for those of a cohort that trains one epoch.
    """
    problem = Problem(prepared.spec, prepared.store, prepared.batching, config.train.seed, device)
    if method.cohort != "pooled":
        return problem
    members = usual_members(config, len(prepared.store))
    sweep = budget or round_tokens(prepared, members, 1)
    return replace(problem, store=pooled_store(prepared.store), sweep=sweep)
