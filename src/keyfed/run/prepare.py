"""From a corpus's name to everything a run needs: clients, vocabulary, model, training tokens, held-out streams."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.load import Config
from keyfed.engine.module import MakeModule, ModuleNetwork, qualified_name
from keyfed.engine.network import Network, shapes
from keyfed.engine.problem import ClientStore, Problem
from keyfed.errors import ConfigError
from keyfed.federated.cohort import cohort_size
from keyfed.federated.types import Method
from keyfed.model.language_model import build_spec, preset
from keyfed.run.compatible import EMBEDDING, Case, refuse
from keyfed.run.console import plural
from keyfed.run.encode import MOST_STREAMS, Encoded, Streams, encode, window_of
from keyfed.run.evaluate import limit_streams
from keyfed.text.batches import Batching
from keyfed.text.check import notices
from keyfed.text.vocab import EOS

POOLED = "pooled"
MOST_DROPPED = 0.1  # share of training tokens that the vocabulary leaves out, above which it is noticed
CHUNK = 10_000  # clients whose lines are counted at once


@dataclass(frozen=True, slots=True)
class Prepared(Encoded):
    """An encoded corpus made ready for training: with the model, and how it reads the text."""

    spec: Network
    batching: Batching

    def describe(self, *, private: bool = False) -> list[str]:
        """Lines for a person: what was read, dropped and left out; of a private run's training text nothing."""
        s, v = self.store, self.vocab_summary
        sizes = s.sizes()
        whose = self.population.partition + (f", part {self.population.part}" if self.population.part else "")
        about = [
            f"{self.corpus.name}: {plural(len(s), 'client')} ({whose})",
            f"vocabulary: {len(self.vocab):,} entries",
        ]
        read_as = [f"read as: {'; '.join(self.corpus.formats)}"] if self.corpus.formats else []
        if not private:
            about = [
                f"{about[0]}, {int(sizes.sum()):,} training tokens "
                f"(smallest client {sizes.min():,}, median {int(np.median(sizes)):,}, largest {sizes.max():,})",
                f"vocabulary: {v.kept:,} of {v.types:,} {self.vocab.kind} types and 4 specials; dropped ones make "
                f"{v.dropped_tokens / max(1, v.tokens):.2%} of the training tokens"
                + (f" ({v.rare_clients_types:,} used by too few clients)" if v.rare_clients_types else ""),
            ]
        others = f", {plural(len(self.unseen), 'unseen client')} with {_count(self.unseen):,} tokens"
        lines = [
            *read_as,
            *about,
            f"held out: validation {_count(self.valid):,} tokens, test {_count(self.test):,} tokens"
            + (others if self.unseen else ""),
        ]
        if self.batching.kind == "packed":
            lines.append("packed lines: every line is read from its own start, in training, validation and test")
        if self.batching.kind == "pairs":
            lines.append("pairs: every token is read alone in training, in validation and test every line as a whole")
        if not self.valid or not self.test:
            lines.append("no held-out text: clients have too few lines to cut; the last round's model will be taken")
        if max(len(self.valid), len(self.test), len(self.unseen)) == MOST_STREAMS:
            lines.append(f"held-out text is that of at most {MOST_STREAMS:,} clients, drawn by the seed")
        if self.excluded and not private:
            lines.append(
                f"left out: {plural(len(self.excluded), 'client')} with less text than one window "
                f"of {self.batching.window} tokens"
            )
        if not private:
            lines += [f"notice: {line}" for line in (*notices(self.corpus), *self._dropped())]
        if self.corpus.skipped and not private:
            shown = "; ".join(f"{s.what}: {s.why}" for s in self.corpus.skipped[:3])
            more = len(self.corpus.skipped) - 3
            lines.append(f"skipped: {shown}" + (f"; and {more} more" if more > 0 else ""))
        return lines

    def _dropped(self) -> list[str]:
        """Notice where the vocabulary leaves out much of the training text."""
        v = self.vocab_summary
        share = v.dropped_tokens / max(1, v.tokens)
        if share <= MOST_DROPPED:
            return []
        if v.rare_clients_types:
            why = f"{v.rare_clients_types:,} words are used by too few clients; --set data.min_clients=1 keeps them"
        else:
            why = "--set data.vocab=N for a larger vocabulary, or another --vocab"
        return [f"{share:.0%} of the training tokens are not in the vocabulary and would not be learnt: {why}"]


def _count(streams: Streams) -> int:
    return sum(len(s) for s in streams.values())


def prepare(config: Config, module: MakeModule | None = None, *, text: bool = False) -> Prepared:
    """Load, partition, build the vocabulary from training text only, encode; or open what was encoded before.

    Args:
      module: makes the model in place of the preset, which then only says the window and whether to read characters.
      text: whether the lines themselves are wanted in `population`; a large corpus has only tokens otherwise.

    Raises:
      DataError: nothing to train on, before any training starts.
    """
    if module is not None:
        refuse("own code", Case(config, module=True, model=qualified_name(module)))
    most = config.train.test_tokens
    found = encode(config, text=text)
    spec = build_network(config, len(found.vocab), module)
    if config.data.batching == "packed" and isinstance(spec, ModuleNetwork) and (why := spec.unpackable()) is not None:
        raise ConfigError(f"data.batches=packed: {why}; use stream or sentences")
    whole = {field.name: getattr(found, field.name) for field in fields(found)}
    limited = {"test": limit_streams(found.test, most), "unseen": limit_streams(found.unseen, most)}
    return Prepared(**{**whole, **limited}, spec=spec, batching=batching_of(config))


def batching_of(config: Config) -> Batching:
    """How clients' text is cut into batches; the method says how many rows."""
    data = config.data
    return Batching.of(data.batching, window_of(config), data.max_sentences, data.max_tokens)


def prepare_again(prepared: Prepared, config: Config, module: MakeModule | None = None) -> Prepared:
    """Return a prepared corpus for a configuration that differs in dropout, batches or limits: no text is read."""
    return replace(prepared, spec=build_network(config, len(prepared.vocab), module), batching=batching_of(config))


def pooled_store(store: ClientStore) -> ClientStore:
    """One client that holds everybody's text, for central training."""
    return ClientStore(store.flat, torch.stack([store.bounds[0], store.bounds[-1]]), (POOLED,))


def client_tokens(prepared: Prepared) -> NDArray[np.float64]:
    """Tokens every client predicts in one epoch, in expectation: its text, limits respected."""
    s, limits = prepared.store, prepared.batching
    tokens = s.sizes().astype(np.float64) - (limits.kind == "stream")  # a stream's first token is not predicted
    if limits.kind == "sentences" or limits.max_sentences is not None:
        lines, within = _count_lines(s, limits.window)
        if limits.kind == "sentences":
            tokens = within
        if limits.max_sentences is not None:
            tokens *= np.minimum(1.0, limits.max_sentences / lines)
    if limits.max_tokens is not None:
        np.minimum(tokens, limits.max_tokens, out=tokens)
    return tokens


def _count_lines(store: ClientStore, window: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return every client's lines, and its tokens when lines are cut to the window."""
    lines, within = np.empty(len(store)), np.empty(len(store))
    for first in range(0, len(store), CHUNK):
        part = slice(first, min(first + CHUNK, len(store)))
        bounds = store.bounds[part.start : part.stop + 1].numpy()
        ends = store.flat[int(bounds[0]) : int(bounds[-1])].numpy() == EOS
        ends[bounds[1:] - bounds[0] - 1] = True  # a rest without line end is a line too
        after = np.flatnonzero(ends) + 1
        lengths = np.diff(after, prepend=0)
        owner = np.searchsorted(bounds[1:] - bounds[0], after)
        lines[part] = np.bincount(owner, minlength=part.stop - part.start)
        within[part] = np.bincount(owner, np.minimum(lengths, window), minlength=part.stop - part.start)
    return lines, within


def round_tokens(prepared: Prepared, members: int, epochs: int) -> int:
    """Tokens a round of `members` clients predicts in expectation: members × mean client × epochs."""
    tokens = client_tokens(prepared)
    return max(1, round(members * float(sum(tokens.tolist())) / len(tokens) * epochs))


def usual_members(config: Config, clients: int) -> int:
    """Clients of a round that draws a cohort, at most all."""
    return min(cohort_size(config.participation, config.train.cohort, clients), clients)


def make_problem(prepared: Prepared, config: Config, method: Method, device: str, budget: int | None = None) -> Problem:
    """Join text and model into the problem the engine solves; central training pools the text.

    Args:
      budget: tokens a round of central training reads; None for those of a cohort that trains one epoch.
    """
    problem = Problem(
        prepared.spec, prepared.store, prepared.batching, config.train.seed, device, precision=config.train.precision,
        frozen=FROZEN, frozen_rounds=min(config.train.frozen_rounds, config.train.rounds), curves=config.train.curves,
    )  # fmt: skip
    if method.cohort != "pooled":
        return problem
    members = usual_members(config, len(prepared.store))
    sweep = budget or round_tokens(prepared, members, 1)
    return replace(problem, store=pooled_store(prepared.store), sweep=sweep)


def build_network(config: Config, vocab: int, module: MakeModule | None) -> Network:
    """Return the configuration's preset for a vocabulary, or the caller's module in its place."""
    m = config.model
    if module is not None:
        return ModuleNetwork(module, vocab, config.data.window or preset(m.name).window, config.train.seed)
    return build_spec(m.name, vocab, dropout=m.dropout, tied=m.tied, embed=m.embed, hidden=m.hidden, layers=m.layers)


FROZEN = frozenset({EMBEDDING})


def refuse_frozen(config: Config, network: Network, method: Method) -> None:
    """Raise ConfigError where a frozen embedding could not stay as it is."""
    refuse("frozen embedding", Case(config, method, model=network.name, layers=tuple(shapes(network))))


def frozen_line(config: Config, network: Network) -> str | None:
    """Say what is frozen and for how long; None if nothing is."""
    rounds, t = config.train.frozen_rounds, config.train
    if not rounds:
        return None
    tied = not isinstance(network, ModuleNetwork) and network.tied
    what = "embedding, which is the output matrix too," if tied else "embedding"
    until = "never trained" if rounds >= t.rounds else f"not trained in the first {rounds} of {t.rounds} rounds"
    return f"frozen: the {what} is {until}, and is not sent up while it is frozen"
