"""A client's own text under a run's model: what `wire.client` asks for, from what the server says of the run.

Of the server's configuration only what the training itself depends on is taken: the model, the method, how text is cut,
the seed. Paths, files and everything else that could reach further into the device are this client's own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.config.load import Config, DataConfig, check, config_from, method_spec
from keyfed.config.schema import read_options
from keyfed.engine.network import shapes
from keyfed.engine.problem import Problem, make_store
from keyfed.engine.task import ClientTask, Finished, run_tasks
from keyfed.errors import KeyfedError
from keyfed.federated.methods import build_method
from keyfed.federated.public.rules import privately, refuse_isolating
from keyfed.federated.types import Method, Params
from keyfed.model.language_model import ModelSpec
from keyfed.model.output import Score
from keyfed.private.dp.private_method import PrivateMethod, make_private, refuse_sized_duals
from keyfed.run.counts.terms import refuse_remote_terms
from keyfed.run.encode import window_of
from keyfed.run.evaluate import limit_streams, validator
from keyfed.run.prepare import build_network
from keyfed.run.remote.own_counts import OwnCounts
from keyfed.text.batches import Batching, reads_lines
from keyfed.text.catalogue import load_corpus
from keyfed.text.corpus import Author, own_corpus
from keyfed.text.partition import ClientText, partition
from keyfed.text.vocab import UNK, Tokens, Vocab
from keyfed.wire.client import Learner
from keyfed.wire.counting import CountWriter
from keyfed.wire.limits import Limits, check_size, time_limit
from keyfed.wire.messages import Rejected, Shapes, check_structure, text_digest
from keyfed.wire.promise import Promise

MOST_TREE_ROUNDS = 50_000
MOST_WORDS = 1 << 20  # of a vocabulary that a client reads
MOST_FIELDS = 64  # of a vocabulary: its own, and those of a vote
TOLD: dict[str, tuple[str, ...] | None] = {  # what clients hear of a configuration: sections, and which of their keys
    "data": ("batches", "window", "max_sentences", "max_tokens"),
    "model": None,
    "train": ("rounds", "schedule", "warmup", "final", "average", "seed", "valid_tokens", "test_tokens"),
    "secure": ("on", "floor"),
    "counts": None,
    "upload": ("keep", "quantise", "bound", "limit", "token_limit"),  # what is left out by direction, the server sees
    "privacy": (
        "epsilon", "noise", "delta", "mechanism", "clip", "quantile", "clip_rate", "count_noise", "separation",
        "weight_cap", "mean_weight", "floor",
    ),
    "method": None,
    "mediator": None,
    "server": None,
}  # fmt: skip


def told(document: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a client is told of a configuration: what its training depends on, and no path of the server's.

    The terms of a count are in it where the run counts.
    """
    return {
        section: {key: value for key, value in document[section].items() if keys is None or key in keys}
        for section, keys in TOLD.items()
        if section in document and (section != "counts" or document[section].get("on") is not False)
    }


def page_terms(config: Config, method: Method, model: ModelSpec) -> dict[str, Any]:
    """Return what pages of a browser are told besides: they have no package that builds model and method from a name.

    The specification is that of `method_digest` and is bound into the masks of every sum, so a server cannot tell pages
    another method than the other clients.
    """
    assert method.spec is not None
    batches = {"kind": config.data.batching, "window": window_of(config), "max_tokens": config.data.max_tokens}
    return {"spec": asdict(method.spec), "model": asdict(model), "batches": batches, "floor": config.secure.floor}


def run_method(config: Config, *, secure: bool) -> Method:
    """Build a run's method as both sides do; with secure sums none by which the server can read a single upload."""
    method = build_method(method_spec(config))
    if secure:
        refuse_isolating(method)
        refuse_sized_duals(method, config.privacy)
    if config.privacy.on:
        return run_bounded(config).method
    return privately(method) if secure else method


def run_bounded(config: Config) -> PrivateMethod:
    """Build the private form of a run's method as both sides do."""
    return make_private(build_method(method_spec(config)), config.privacy)


def promise_of(config: Config) -> Promise | None:
    """Return what a client holds a private run to; None for a run that promises nothing.

    Raises:
      Rejected: the run says that it is private, and leaves out what a client needs to know.
    """
    p = config.privacy
    if not p.on:
        return None
    if p.noise is None or p.delta is None:
        raise Rejected("malformed", "a private run that does not say how much noise it adds, and for which delta")
    if p.mechanism == "tree" and p.separation is None:
        raise Rejected("malformed", "a private run by tree noise that does not say how long clients wait")
    ratio, rounds = run_bounded(config).ratio, config.train.rounds
    if p.mechanism == "tree" and rounds > MOST_TREE_ROUNDS:  # its account is looked at before every part
        raise Rejected("over limit", f"tree noise over {rounds:,} rounds; this client counts {MOST_TREE_ROUNDS:,}")
    return Promise(p.clip, p.quantile, p.clip_rate, ratio, p.noise, rounds, p.separation)


def method_digest(method: Method) -> str:
    """Hash of a method as this package understands its specification."""
    assert method.spec is not None
    return text_digest([asdict(method.spec), method.report_free])


class OwnText:
    """`Learner` over one client's text."""

    def __init__(
        self,
        config: Config,
        method: Method,
        name: str,
        vocab: Vocab,
        *,
        limits: Limits | None = None,
        me: str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        limits, vocab_sha256 = limits or Limits(), hashlib.sha256(vocab.to_json().encode()).hexdigest()
        spec, window = build_network(config, len(vocab), None), window_of(config)
        assert isinstance(spec, ModelSpec), "a run with real clients has a model of this package"
        check_size(spec, method.epochs, method.batch_size, window, limits)  # before anything of that size is made
        person, vocab = _person(config, name, vocab, me)
        stream = vocab.encode(person.train)
        say(_counted(person, vocab, stream))
        enough = len(stream) > window
        if not enough and not config.privacy.on:  # a private run must not notice: its client takes part with zeros
            raise Rejected("no text", f"too little text to learn from: a window has {window} tokens")
        data = config.data
        batching = Batching.of(data.batching, window, data.max_sentences, data.max_tokens)
        self.method = method
        self.digest = method_digest(method)
        self.floor = config.secure.floor
        # In a private run who is refused sends zeros: a bound would let the server choose who is left in the sum.
        self.bound = None if config.privacy.on else config.upload.bound
        self.promise = promise_of(config)
        self._spec = spec
        self._limits_of_owner = limits
        self._look: Callable[[], None] = lambda: None
        store = make_store([stream], [name])
        watched = Problem(spec, store, batching, config.train.seed, watch=lambda: self._look())
        self._problem = watched if enough else None
        held_out = {"valid": vocab.encode(person.valid), "test": vocab.encode(person.test)}
        self._held_out = {part: {name: ids} if len(ids) > 1 else {} for part, ids in held_out.items()}
        self._limits = {"valid": config.train.valid_tokens, "test": config.train.test_tokens}
        self._score = validator(data.batching)
        self.shapes: Shapes = {layer: (shape, torch.float32) for layer, shape in shapes(spec).items()}
        tested = limit_streams(self._held_out["test"], config.train.test_tokens)
        nothing = np.zeros(0, np.int32)
        self._counts = OwnCounts(
            config.counts, len(vocab), vocab_sha256, config.train.seed, spec, self.shapes, reads_lines(data.batching),
            stream, self._held_out["valid"].get(name, nothing), tested.get(name, nothing),
            watched=lambda: time_limit(limits),
        )  # fmt: skip

    def solve(self, theta: Params, round: int, turn: ClientTask) -> Finished:
        """Train for a round, with one thread: the same bits as in a simulation. Without text: zeros, of no token.

        Raises:
          Rejected: it takes longer than the client's owner allows.
        """
        if self._problem is None:
            return Finished(0, {name: torch.zeros_like(p) for name, p in theta.items()}, 0.0, 0, 0, {})
        self._look = time_limit(self._limits_of_owner)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run_tasks(self._problem, theta, [turn], self.method, round)[0]
        finally:
            torch.set_num_threads(threads)

    def evaluate(self, theta: Params, part: str) -> Score:
        """Count nats and hits on this client's held-out text.

        Raises:
          Rejected: it takes longer than the client's owner allows.
        """
        streams = limit_streams(self._held_out[part], self._limits[part])
        look = time_limit(self._limits_of_owner)
        return self._score(self._spec, theta, streams, "cpu", look)

    def counts(self) -> CountWriter:
        """Return what takes part in the run's count, if there is one on terms that any client takes.

        Raises:
          Rejected: there is none, or the run is private: its noise is that of training.
        """
        if not self._counts.terms.on:
            raise Rejected("refused by client", "this run counts nothing")
        if self.promise is not None:
            raise Rejected("refused by client", "a private run asks for clipped uploads only, and never for counts")
        try:
            refuse_remote_terms(self._counts.terms)
        except KeyfedError as e:
            raise Rejected("refused by client", str(e)) from None
        return self._counts


def _person(config: Config, name: str, vocab: Vocab, me: str | None) -> tuple[ClientText, Vocab]:
    """Read a client's text; for a private run none, where it cannot be read: its client takes part with zeros."""
    try:
        return read_person(config, name, vocab, me)
    except KeyfedError as e:
        if not config.privacy.on:
            raise
        logging.getLogger(__name__).error("the text cannot be read (%s); zeros are sent", e)
        return ClientText(name, (), (), ()), vocab


def read_person(config: Config, name: str, vocab: Vocab, me: str | None = None) -> tuple[ClientText, Vocab]:
    """Read a client's text, all files of its folder one after the other, and cut it as a simulation cuts a client's.

    Args:
      me: the client's owner among several authors of one file (`text.corpus`).
    """
    data = config.data
    corpus = load_corpus(data.name, **read_options(replace(data, me=None)))
    (own,) = own_corpus(corpus, Path(data.name), me).authors
    one = replace(corpus, authors=(Author(name, own.lines),), valid=None, test=None, natural=True)
    people = partition(one, "natural", clients=None, seed=config.train.seed, unseen=0.0, share=data.train_share)
    return people.clients[0], replace(vocab, tokenised=corpus.tokenised)


def _counted(person: ClientText, vocab: Vocab, stream: Tokens) -> str:
    """Say how much text a run found, and how much of it is in the run's vocabulary; quote nothing."""
    lines = len(person.train) + len(person.valid) + len(person.test)
    unknown = float((stream == UNK).sum()) / max(1, len(stream))
    return f"{lines:,} lines, {len(stream):,} tokens to learn from, {unknown:.1%} of them unknown words"


def own_text(
    name: str,
    data: Path,
    *,
    limits: Limits | None = None,
    me: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    columns: Mapping[str, str | None] | None = None,
) -> Callable[[Mapping[str, Any]], Learner]:
    """Return what makes a client's text ready for a run.

    Args:
      name: the client's.
      data: its text: a file, or a folder of files.
      limits: what the client gives a run at most.
      me: its owner among several authors of one file.
      say: gets how much text was found.
      columns: `author_column` and `text_column` of a table.
    """

    def make(about: Mapping[str, Any]) -> Learner:
        vocab = _vocab_of(about)
        config = own_config(about, data)
        found = columns or {}
        named = replace(config.data, author_column=found.get("author_column"), text_column=found.get("text_column"))
        config = replace(config, data=named)
        try:
            method = run_method(config, secure=about.get("secure") is True)
        except KeyfedError as e:
            raise Rejected("refused by client", str(e)) from None
        return OwnText(config, method, name, vocab, limits=limits, me=me, say=say)

    return make


def own_config(about: Mapping[str, Any], data: Path) -> Config:
    """Return the run's configuration with this client's text in the place of the server's."""
    document = about.get("config")
    if not isinstance(document, dict):
        raise Rejected("malformed", "a run without a configuration")
    try:
        given = config_from(told(document), "the server's configuration")
        own = DataConfig(
            name=str(data),
            batches=given.data.batches, window=given.data.window, max_sentences=given.data.max_sentences,
            max_tokens=given.data.max_tokens,
        )  # fmt: skip
        train = replace(given.train, init=None, device="cpu", workers=1, block=1, central=False, baselines=False)
        return check(replace(given, data=own, train=train))
    except (KeyfedError, AttributeError, TypeError) as e:
        raise Rejected("other method", f"a configuration that this package does not understand: {e}") from None


def _vocab_of(about: Mapping[str, Any]) -> Vocab:
    given = about.get("vocab")
    if not isinstance(given, str):
        raise Rejected("malformed", "a run without a vocabulary")
    check_structure(given.encode("utf-8", "surrogatepass"), deepest=2, values=MOST_WORDS, keys=MOST_FIELDS)
    try:
        return Vocab.from_json(given)
    except KeyfedError as e:
        raise Rejected("malformed", f"a vocabulary that cannot be read: {e}") from None
