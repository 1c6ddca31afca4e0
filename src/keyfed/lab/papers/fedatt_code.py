"""FedAtt's published figures as its public code made them: a defect, kept here to show where the numbers come from.

The code (github.com/shaoxiongji/fed-att) hands lists of unequal length to a data loader. The loader's collation zips
them: a batch of B sentences becomes T sequences of B words, T being the length of the *shortest* sentence, and
sequence t holds word t of every sentence. So the network reads across unrelated sentences, one position at a time, and
what it predicts is the word at the same position of another sentence. All text behind the shortest sentence is lost.
The first position is <SOS> in every sentence, the easiest prediction there is.

Evaluation has the same collation with batches of 128, where the shortest sentence is a few words long: the value
depends on the shuffle. Sentences are split at " . ", lower-cased, and the vocabulary is built on all three files.

Nothing but a study uses this. The local steps, the mean and attention are the ordinary engine's; only the batches are
peculiar. Three details differ: a batch keeps at most `MOST` positions (the shortest of ten sentences is hardly ever
longer), the code's default noise of 0.001 is left out, as the paper's table has none, and the vocabulary has one word
more, the engine's padding, which never occurs.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.load import Config, check, method_spec, to_document
from keyfed.engine.problem import Problem, TextObjective, make_store
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import keeps_state
from keyfed.errors import RunError
from keyfed.federated.cohort import Work, derive_seed, sample_cohort
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.soundness import Good
from keyfed.federated.types import ClientId, Federation, Method, Params, State
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.model.language_model import ModelSpec, build_spec, parameter_count, shapes
from keyfed.model.output import Score
from keyfed.run.checkpoint import Best, Checkpoint, Cohort, RunProgress, load_checkpoint, save_checkpoint
from keyfed.run.choose import choose
from keyfed.run.evaluate import evaluate_together
from keyfed.run.loop import Listener, rounds
from keyfed.text.batches import Batching, Step
from keyfed.text.catalogue import load_corpus
from keyfed.text.vocab import BOS, EOS, PAD

Ids = NDArray[np.int32]
START, END = BOS, EOS  # <SOS> and EOS; number 0 is the engine's padding and no word
MOST = 32  # positions of a batch that are kept
EVALUATED = 128  # sentences of a batch in evaluation, as in the code
CLIENTS = 100
SMOOTHING = 1000.0  # S: words' worth of overall frequency behind the counts of a position


@dataclass(frozen=True, slots=True)
class Sentences:
    """A corpus as FedAtt's code reads it."""

    train: tuple[Ids, ...]
    valid: tuple[Ids, ...]
    test: tuple[Ids, ...]
    words: int
    sha256: str


def read_sentences(name: str, data_dir: Path | None) -> Sentences:
    """Split lines at " . ", lower-case, number words in the order they occur in train, valid and test."""
    corpus = load_corpus(name, data_dir=data_dir)
    numbers: dict[str, int] = {"<PAD>": PAD, "<SOS>": START, "EOS": END}
    parts = []
    for lines in ([line for a in corpus.authors for line in a.lines], corpus.valid or (), corpus.test or ()):
        # The reader has taken the blanks around a line away; the code splits the line with its blank and line end.
        pieces = (piece.split() for line in lines for piece in f" {line} \n".split(" . "))
        parts.append(tuple(number(words, numbers) for words in pieces if words))
    return Sentences(parts[0], parts[1], parts[2], len(numbers), corpus.fingerprint())


def number(words: Sequence[str], numbers: dict[str, int]) -> Ids:
    """Return <SOS>, the words' numbers (new words get the next one), EOS."""
    known = [numbers.setdefault(word.lower(), len(numbers)) for word in words]
    return np.array([START, *known, END], np.int32)


def collate(batch: Sequence[Ids], most: int | None = None) -> NDArray[np.int64]:
    """Zip sentences as torch 0.4.1's collation does: [positions of the shortest, sentences].

    Example:
      >>> collate([np.array([0, 5, 6, 1]), np.array([0, 7, 1]), np.array([0, 8, 9, 4, 1])]).tolist()
      [[0, 0, 0], [5, 7, 8], [6, 1, 9]]
    """
    shortest = min(len(sentence) for sentence in batch)
    kept = shortest if most is None else min(shortest, most)
    return np.stack([sentence[:kept] for sentence in batch], axis=1).astype(np.int64)


def broken_steps(stream: Ids, rows: int, seed: int) -> list[Step]:
    """Cut a client's text into one epoch's steps: shuffled batches of `rows` sentences, collated; time is the batch."""
    ends = np.flatnonzero(stream == END) + 1
    sentences = [s for s in np.split(stream, ends) if len(s)]
    order = np.random.default_rng(seed).permutation(len(sentences))
    steps = []
    for at in range(0, len(order), rows):
        zipped = collate([sentences[i] for i in order[at : at + rows]], MOST)
        if zipped.shape[1] > 1:  # a lone sentence predicts nothing
            steps.append(Step(zipped[:, :-1], zipped[:, 1:], np.ones(zipped[:, 1:].shape, np.float32), True))
    return steps


class BrokenObjective(TextObjective):
    """Clients' text under the broken collation."""

    def __init__(
        self, problem: Problem, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None, epochs: int
    ) -> None:
        super().__init__(problem, clients, round, rows, works, epochs)
        self._sentences = rows
        self._batching = Batching("sentences", MOST, rows - 1)  # rows are positions, time runs over sentences

    def _client_steps(self, client: int, epoch: int) -> list[Step]:
        return broken_steps(self._problem.store.stream(client), self._sentences, self._seed(client, "order", epoch))


@dataclass(frozen=True, slots=True)
class BrokenProblem(Problem):
    """The problem whose batches are the code's."""

    def objective(
        self, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None = None, epochs: int = 1
    ) -> BrokenObjective:
        """Return these clients' text under the broken collation."""
        return BrokenObjective(self, clients, round, rows, works, epochs)


def broken_score(spec: ModelSpec, params: Params, sentences: Sequence[Ids], seed: int, device: str) -> Score:
    """Score sentences in shuffled batches of 128, collated: what the code calls perplexity."""
    order = np.random.default_rng(seed).permutation(len(sentences))
    streams: dict[str, Ids] = {}
    for at in range(0, len(order), EVALUATED):
        for position, row in enumerate(collate([sentences[i] for i in order[at : at + EVALUATED]])):
            streams[f"{at}/{position}"] = row.astype(np.int32)
    return evaluate_together(spec, params, streams, device)


def honest_score(spec: ModelSpec, params: Params, sentences: Sequence[Ids], device: str) -> Score:
    """Score the same model on the same sentences, each read from its first word to its last."""
    return evaluate_together(spec, params, {str(k): s for k, s in enumerate(sentences)}, device)


def positional_unigram(config: Config, shuffles: int, share: float = 1.0) -> dict[str, Any]:
    """Score word frequencies by position, which know no context at all, under the broken evaluation.

    p_t(w) = (c_t(w) + S p(w)) / (N_t + S): counts c_t of the t-th words, smoothed by the frequencies p of all
    words plus one. What this scores is what the collation gives away for nothing.
    """
    began = time.monotonic()
    found = read_sentences(config.data.name, None if config.data.dir is None else Path(config.data.dir))
    train, test = (part[: max(EVALUATED, round(share * len(part)))] for part in (found.train, found.test))
    every = np.bincount(np.concatenate(train), minlength=found.words) + 1.0
    tables: dict[int, NDArray[np.float64]] = {}

    def nats(position: int, words: NDArray[np.int64]) -> float:
        if position not in tables:
            own = np.array([s[position] for s in train if len(s) > position], np.int64)
            counts = np.bincount(own, minlength=found.words) + SMOOTHING * every / every.sum()
            tables[position] = np.log(counts / counts.sum())
        return -float(tables[position][words].sum())

    values = []
    for k in range(shuffles):
        order = np.random.default_rng(derive_seed(config.train.seed, "test", k)).permutation(len(test))
        total, tokens = 0.0, 0
        for at in range(0, len(order), EVALUATED):
            zipped = collate([test[i] for i in order[at : at + EVALUATED]])[:, 1:]
            total += sum(nats(position, row) for position, row in enumerate(zipped))
            tokens += zipped.size
        values.append(math.exp(total / tokens))
    return {
        "records": [], "test": {"perplexity": statistics.fmean(values)}, "shuffles": _spread(values),
        "seconds": time.monotonic() - began, "data": config.data.name, "data_sha256": found.sha256,
        "vocabulary": found.words, "method": "positional unigram",
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """How far one evaluation may lie from the next."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"count": len(values), "sd": sd, "lowest": min(values), "highest": max(values)}


def initial_params(spec: ModelSpec, seed: int) -> Params:
    """Draw weights as torch's own layers do: U(±1/√width) for every tensor of a tied GRU."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "code-faithful weights"))
    bound = 1 / math.sqrt(spec.hidden)
    return {name: torch.empty(s).uniform_(-bound, bound, generator=generator) for name, s in shapes(spec).items()}


def deal(sentences: Sequence[Ids], clients: int, seed: int) -> list[Ids]:
    """Deal sentences to clients at random, the same number to each; the rest is left out, as in the code."""
    each = len(sentences) // clients
    order = np.random.default_rng(derive_seed(seed, "code-faithful shards")).permutation(len(sentences))
    return [np.concatenate([sentences[i] for i in order[k * each : (k + 1) * each]]) for k in range(clients)]


def train_faithfully(
    config: Config, shuffles: int, listen: Listener, share: float = 1.0, folder: Path | None = None
) -> dict[str, Any]:
    """Train and evaluate as the public code does; return what a cell's result holds.

    Seeds are derived from the round, so a run that goes on from what was kept is the uninterrupted one.

    Args:
      config: data.name, model, method, participation.fraction, train.rounds, seed, device and precision are read.
      shuffles: shuffles of the test sentences that are evaluated; their standard deviation is the figure's own spread.
      share: part of each file's sentences that is read, for a quick look.
      folder: where it is kept when it is stopped, and found again; None for nowhere.
    """
    config = check(config)
    found = read_sentences(config.data.name, None if config.data.dir is None else Path(config.data.dir))
    train, valid, test = (
        part[: max(EVALUATED, round(share * len(part)))] for part in (found.train, found.valid, found.test)
    )
    seed, clients = config.train.seed, config.data.clients or CLIENTS
    spec = build_spec(config.model.name, found.words, embed=config.model.embed, hidden=config.model.hidden)
    method = build_method(method_spec(config))
    members = clients if method.cohort == "all" else max(1, round((config.participation.fraction or 0.1) * clients))
    choice = choose(replace(config.train, workers=1), spec, 1, members, MOST * method.batch_size)
    store = make_store(deal(train, clients, seed), [str(k) for k in range(clients)])
    problem = BrokenProblem(
        spec, store, Batching("sentences", method.batch_size, method.batch_size - 1), seed, choice.device,
        precision=config.train.precision,
    )  # fmt: skip
    listen.say(f"code-faithful {config.data.name}: {len(train):,} sentences, {found.words:,} words; {choice.reason}")
    document = to_document(replace(config, data=replace(config.data, dir=None)))
    about = {
        "data_sha256": found.sha256, "share": share, "torch": torch.__version__, "device": choice.device,
        "block": choice.block, "config": document,
    }  # fmt: skip
    folder = None if keeps_state(method) else folder
    params = {n: p.to(choice.device) for n, p in initial_params(spec, seed).items()}
    kept = None if folder is None else find_kept(folder, about, params, listen.say)
    kept = kept or Kept(initial_state(method, params), Best(0, math.inf, params))
    listen.start(f"{method.name}, code-faithful, on {config.data.name}", config.train.rounds, kept.state.round)
    began = time.monotonic() - kept.seconds
    with Simulation(problem, block=choice.block) as federation:

        def called(round: int) -> list[str]:
            drawn = range(clients) if members == clients else sample_cohort(clients, members, seed, round)
            return [store.names[k] for k in drawn]

        def validated(state: State) -> tuple[dict[str, Any], float]:
            score = broken_score(spec, state.params, valid, derive_seed(seed, "valid", state.round), choice.device)
            return score.summary(), score.mean_nats

        kept = go_on(
            kept, method, config.train.rounds, federation, called, validated, listen, folder, about, chooses=True
        )
    best = kept.best
    scores = [
        broken_score(spec, best.params, test, derive_seed(seed, "test", k), choice.device) for k in range(shuffles)
    ]
    values = [score.perplexity for score in scores]
    return {
        "records": list(kept.records),
        "test": {
            **sum(scores, Score()).summary(),
            "perplexity": statistics.fmean(values),
            "honest_sentence_perplexity": honest_score(spec, best.params, test, choice.device).perplexity,
        },
        "shuffles": _spread(values),
        "best_round": best.round, "rounds": kept.state.round, "clients": clients,
        "tokens_trained": sum(record["worked"] for record in kept.records),
        "cohort": members, "parameters": parameter_count(spec), "vocabulary": found.words,
        "seconds": time.monotonic() - began, "data": config.data.name, "data_sha256": found.sha256,
        "method": method.name, "model": spec.name,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a cell needs to go on, whole after every round.

    Attributes:
      best: the model chosen on validation so far; that of round 0 before there was one.
      records: a line for each round.
    """

    state: State
    best: Best
    records: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0


def keep(folder: Path, about: Mapping[str, Any], kept: Kept) -> None:
    """Write a cell that is stopped: what made it and its lines, then the checkpoint that makes them count."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": dict(about), "records": kept.records})
    write_atomically(folder / "kept.json", text.encode())
    save_checkpoint(folder / "checkpoint", Checkpoint(kept.state, kept.best, 0, kept.seconds))


def find_kept(folder: Path, about: Mapping[str, Any], params: Params, say: Callable[[str], None]) -> Kept | None:
    """Return the cell as it was stopped; None if it never was, or what made it has changed or is damaged.

    Args:
      params: layers in the model's order, in which sums over them round alike, and where they live.
    """
    if not (folder / "kept.json").exists():
        return None
    try:
        found = read_json(folder / "kept.json")
        saved = load_checkpoint(folder / "checkpoint", 0, say)
        same = found["about"] == json.loads(json.dumps(dict(about)))
        if same and saved is not None and saved.best is not None:
            say(f"going on after round {saved.state.round}")
            server = {name: t.to(next(iter(params.values())).device) for name, t in saved.state.server.items()}
            state = replace(saved.state, params=_like(params, saved.state.params), server=server)
            best = replace(saved.best, params=_like(params, saved.best.params))
            return Kept(state, best, tuple(found["records"][: state.round]), saved.seconds)
        why = "it has no checkpoint" if same else "text, settings or machine were others"
    except (OSError, *BROKEN, RunError) as e:
        why = f"it is damaged: {e}"
    say(f"what was begun of this cell cannot be gone on with ({why}); it starts anew")
    shutil.rmtree(folder)
    return None


def go_on(
    kept: Kept,
    method: Method,
    until: int,
    federation: Federation,
    called: Callable[[int], Sequence[ClientId]],
    score: Callable[[State], tuple[dict[str, Any], float]],
    listen: Listener,
    folder: Path | None,
    about: Mapping[str, Any],
    *,
    chooses: bool,
) -> Kept:
    """Run a cell up to so many rounds, one line each; a cell that is stopped is kept in its folder, if it has one.

    Args:
      called: who is called in a round, counted from 0.
      score: validates the model of a state: what its line says, and mean nats.
      chooses: whether the best model by that is kept; else the last one.
    """
    began = time.monotonic() - kept.seconds
    run = RunProgress(method, kept.state, until, Good(kept.state, math.inf))
    started = time.monotonic()
    try:
        for outcome in rounds(run, federation, lambda state: Cohort(called(state.round))):
            state, summary = outcome.state, outcome.summary
            valid, nats = score(state)
            better = not chooses or nats < kept.best.nats
            record = {
                "round": state.round, "loss": summary.loss, "valid": valid, "cohort": len(outcome.cohort.clients),
                "contributors": list(summary.contributors), "refused": {r.client: r.reason for r in summary.refused},
                "worked": summary.worked, "seconds": time.monotonic() - started,
            }  # fmt: skip
            best = Best(state.round, nats, state.params) if better else kept.best
            kept = Kept(state, best, (*kept.records, record), time.monotonic() - began)
            listen.round(record)
            started = time.monotonic()
    except KeyboardInterrupt:
        if folder is not None and kept.records:
            keep(folder, about, kept)
        raise
    return kept


def _like(params: Params, saved: Params) -> Params:
    return {name: saved[name].to(tensor.device) for name, tensor in params.items()}
