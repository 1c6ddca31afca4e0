"""Three sources whose published code is wrong: the defects, kept to show where the numbers come from.

**FedAtt** (github.com/shaoxiongji/fed-att). The code hands lists of unequal length to a data loader, whose collation
zips them. A batch of B sentences becomes T sequences of B words, T being the length of the *shortest* sentence, and
sequence t holds word t of every sentence. So the network predicts the word at the same position of another, unrelated
sentence. All text behind the shortest sentence is lost. The first position is <SOS> in every sentence, the easiest
prediction there is. Evaluation collates batches of 128, so its value depends on the shuffle. Sentences are split at
" . " and lower-cased, and the vocabulary is built on all three files. Three details differ here. A batch keeps at most
`MOST` positions: the shortest of ten sentences is hardly ever longer. The code's default noise of 0.001 is left out, as
the paper's table has none. The vocabulary has the engine's padding as one more word, which never occurs.

**The next-character report.** Its notebook hands batches of B = 10 rows with 100 characters each to an LSTM that
expects time first, so the recurrence runs over the *batch*. At each position the network reads the ten rows' characters
and predicts the next character of each row. It knows one character of a row: the best it can reach is the entropy of
character pairs. The "non-IID" split also shuffles the characters of the text: then the best is the entropy of single
characters. As in the notebook, the model is that of the last round.

**The toy of the Gboard slides.** The two local models are drawn independently and never receive the mean. Each trains
on by itself, and the "global model" that is evaluated is a mean of two unrelated networks. Repaired, both start every
round from the mean. The slides do not name their data; this is a synthetic task of the same shape: a sequence of
numbers, one bit to predict.

Only studies use this. Local steps and aggregation are the ordinary engine's; only the batches differ.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keyfed.config.load import Config, check, method_spec, to_document
from keyfed.engine.network import gradient, init_params, parameter_count
from keyfed.engine.problem import Problem, TextObjective, make_store, stack_steps
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import keeps_state
from keyfed.errors import RunError
from keyfed.federated.cohort import Work, derive_seed, sample_cohort
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state
from keyfed.federated.soundness import Good
from keyfed.federated.types import ClientId, Method, Params, State
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.model.language_model import ModelSpec, build_spec, shapes
from keyfed.model.output import Score
from keyfed.run.checkpoint import Best, Checkpoint, Cohort, RunProgress, load_checkpoint, save_checkpoint
from keyfed.run.console import Listener
from keyfed.run.evaluate import evaluate_together, limit_streams
from keyfed.run.loop import rounds
from keyfed.run.plan import Choice, choose
from keyfed.run.prepare import Prepared
from keyfed.text.batches import Batching, Step, stream_steps
from keyfed.text.catalogue import load_corpus
from keyfed.text.vocab import BOS, EOS, PAD

Ids = NDArray[np.int32]
START, END = BOS, EOS  # <SOS> and EOS; number 0 is the engine's padding and no word
MOST = 32  # positions of a batch that are kept
EVALUATED = 128  # sentences of a batch in evaluation, as in the code
CLIENTS = 100
SMOOTHING = 1000.0  # S: words' worth of overall frequency behind the counts of a position


class BrokenObjective(TextObjective):
    """Clients' text, cut into batches by a `BrokenProblem`."""

    def __init__(
        self, problem: BrokenProblem, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None,
        epochs: int,
    ) -> None:  # fmt: skip
        super().__init__(problem, clients, round, rows, works, epochs)
        self._cut, self._rows, self._batching = problem.cut, rows, problem.shape

    def _client_steps(self, client: int, epoch: int) -> list[Step]:
        return self._cut(self._problem.store.stream(client), self._rows, self._seed(client, "order", epoch))


@dataclass(frozen=True, slots=True)
class BrokenProblem(Problem):
    """A problem whose batches are cut as published code cuts them.

    Attributes:
      cut: (a client's tokens, batch size, seed) → its steps of an epoch.
      shape: of these steps, as the engine sees them.
    """

    cut: Callable[[Ids, int, int], list[Step]] = field(kw_only=True)
    shape: Batching = field(kw_only=True)

    def objective(
        self, clients: Sequence[int], round: int, rows: int, works: Sequence[Work] | None = None, epochs: int = 1
    ) -> BrokenObjective:
        """Return these clients' text in broken batches."""
        return BrokenObjective(self, clients, round, rows, works, epochs)


# A replica's rounds, which may be stopped and resumed


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a replica needs to resume, whole after every round.

    Attributes:
      best: the model chosen on validation so far; that of round 0 before there was one.
      records: a line for each round.
    """

    state: State
    best: Best
    records: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0


def find_kept(folder: Path, about: Mapping[str, Any], params: Params, say: Callable[[str], None]) -> Kept | None:
    """Return the replica as it was stopped; None if it never was, or what made it has changed or is damaged.

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


def _like(params: Params, saved: Params) -> Params:
    return {name: saved[name].to(tensor.device) for name, tensor in params.items()}


@dataclass(frozen=True, slots=True)
class Replica:
    """What the rounds of a replica are made of.

    Attributes:
      about: what it was made with; a stopped replica that was made with something else starts anew.
      theta: the model before the first round.
      called: who is called in a round, counted from 0.
      score: validates the model of a state: what its line says, and mean nats.
      chooses: whether the best model by that is kept; else the last one.
    """

    config: Config
    problem: BrokenProblem
    method: Method
    choice: Choice
    data: str
    data_sha256: str
    about: Mapping[str, Any]
    theta: Params
    called: Callable[[int], Sequence[ClientId]]
    score: Callable[[State], tuple[dict[str, Any], float]]
    chooses: bool

    def train(
        self, listen: Listener, folder: Path | None, test: Callable[[Params], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Train all rounds and test the model that is kept; return what a cell's result holds.

        Seeds are derived from the round, so a resumed replica equals an uninterrupted one.

        Args:
          folder: where it is kept when it is stopped, and found again; None for nowhere.
          test: parameters → what the result says of them.
        """
        params = {name: p.to(self.choice.device) for name, p in self.theta.items()}
        document = to_document(replace(self.config, data=replace(self.config.data, dir=None)))
        about = {
            **self.about, "data_sha256": self.data_sha256, "torch": torch.__version__, "device": self.choice.device,
            "block": self.choice.block, "config": document,
        }  # fmt: skip
        kept = None if folder is None else find_kept(folder, about, params, listen.say)
        kept = kept or Kept(initial_state(self.method, params), Best(0, math.inf, params))
        until, spec = self.config.train.rounds, self.problem.spec
        listen.start(f"{self.method.name}, code-faithful, on {self.data}", until, kept.state.round)
        began = time.monotonic() - kept.seconds
        try:
            for after in self._rounds(kept, until):
                kept = replace(after, seconds=time.monotonic() - began)
                listen.round(kept.records[-1])
        except KeyboardInterrupt:
            if folder is not None and kept.records:
                folder.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"about": about, "records": kept.records})
                write_atomically(folder / "kept.json", text.encode())
                # Last: it makes the lines count.
                save_checkpoint(folder / "checkpoint", Checkpoint(kept.state, kept.best, 0, kept.seconds))
            raise
        return {
            "records": list(kept.records),
            **test(kept.best.params),
            "best_round": kept.best.round, "rounds": kept.state.round, "clients": len(self.problem.store),
            "cohort": len(self.called(0)), "tokens_trained": sum(record["worked"] for record in kept.records),
            "parameters": parameter_count(spec), "seconds": time.monotonic() - began,
            "data": self.data, "data_sha256": self.data_sha256, "method": self.method.name, "model": spec.name,
        }  # fmt: skip

    def _rounds(self, kept: Kept, until: int) -> Iterator[Kept]:
        run = RunProgress(self.method, kept.state, until, Good(kept.state, math.inf))
        best, records, started = kept.best, kept.records, time.monotonic()
        with Simulation(self.problem, block=self.choice.block) as federation:
            for outcome in rounds(run, federation, lambda state: Cohort(self.called(state.round))):
                state, summary = outcome.state, outcome.summary
                valid, nats = self.score(state)
                record = {
                    "round": state.round, "loss": summary.loss, "valid": valid, "cohort": len(outcome.cohort.clients),
                    "contributors": list(summary.contributors), "worked": summary.worked,
                    "refused": {r.client: r.reason for r in summary.refused}, "seconds": time.monotonic() - started,
                }  # fmt: skip
                if not self.chooses or nats < best.cost:
                    best = Best(state.round, nats, state.params)
                records = (*records, record)
                yield Kept(state, best, records)
                started = time.monotonic()


# FedAtt


@dataclass(frozen=True, slots=True)
class Sentences:
    """A corpus as FedAtt's code reads it."""

    train: tuple[Ids, ...]
    valid: tuple[Ids, ...]
    test: tuple[Ids, ...]
    words: int
    sha256: str


def read_sentences(config: Config, share: float = 1.0) -> Sentences:
    """Split lines at " . ", lower-case, number words in the order they occur in train, valid and test.

    Args:
      share: part of each file's sentences that is returned, for a quick look.
    """
    corpus = load_corpus(config.data.name, data_dir=None if config.data.dir is None else Path(config.data.dir))
    numbers: dict[str, int] = {"<PAD>": PAD, "<SOS>": START, "EOS": END}
    files = []
    for lines in ([line for a in corpus.authors for line in a.lines], corpus.valid or (), corpus.test or ()):
        found = []
        # The reader has taken the blanks around a line away; the code splits the line with its blank and line end.
        for words in (piece.split() for line in lines for piece in f" {line} \n".split(" . ")):
            if words:
                known = [numbers.setdefault(word.lower(), len(numbers)) for word in words]
                found.append(np.array([START, *known, END], np.int32))
        files.append(tuple(found[: max(EVALUATED, round(share * len(found)))]))
    return Sentences(files[0], files[1], files[2], len(numbers), corpus.fingerprint())


def collate(batch: Sequence[Ids], most: int | None = None) -> NDArray[np.int64]:
    """Zip sentences as torch 0.4.1's collation does: [positions of the shortest, sentences].

    Example:
      >>> collate([np.array([0, 5, 6, 1]), np.array([0, 7, 1]), np.array([0, 8, 9, 4, 1])]).tolist()
      [[0, 0, 0], [5, 7, 8], [6, 1, 9]]
    """
    shortest = min(len(sentence) for sentence in batch)
    kept = shortest if most is None else min(shortest, most)
    return np.stack([sentence[:kept] for sentence in batch], axis=1).astype(np.int64)


def collated(sentences: Sequence[Ids], rows: int, seed: int, most: int | None = None) -> list[NDArray[np.int64]]:
    """Return sentences in shuffled batches of `rows`, collated."""
    order = np.random.default_rng(seed).permutation(len(sentences))
    return [collate([sentences[i] for i in order[at : at + rows]], most) for at in range(0, len(order), rows)]


def broken_steps(stream: Ids, rows: int, seed: int) -> list[Step]:
    """Cut a client's text into one epoch's steps: shuffled batches of `rows` sentences, collated; time is the batch."""
    sentences = [s for s in np.split(stream, np.flatnonzero(stream == END) + 1) if len(s)]
    return [
        Step(zipped[:, :-1], zipped[:, 1:], np.ones(zipped[:, 1:].shape, np.float32), True)
        for zipped in collated(sentences, rows, seed, MOST)
        if zipped.shape[1] > 1  # a lone sentence predicts nothing
    ]


def broken_score(spec: ModelSpec, params: Params, sentences: Sequence[Ids], seed: int, device: str) -> Score:
    """Score sentences in shuffled batches of 128, collated: what the code calls perplexity."""
    batches = enumerate(collated(sentences, EVALUATED, seed))
    streams = {f"{n}/{place}": row.astype(np.int32) for n, batch in batches for place, row in enumerate(batch)}
    return evaluate_together(spec, params, streams, device)


def honest_score(spec: ModelSpec, params: Params, sentences: Sequence[Ids], device: str) -> Score:
    """Score the same model on the same sentences, each read from its first word to its last."""
    return evaluate_together(spec, params, {str(k): s for k, s in enumerate(sentences)}, device)


def positional_unigram(config: Config, shuffles: int, share: float = 1.0) -> dict[str, Any]:
    """Score word frequencies by position, which know no context at all, under the broken evaluation.

    p_t(w) = (c_t(w) + S p(w)) / (N_t + S): counts c_t of the t-th words, smoothed by the frequencies p of all
    words plus one. This score is what the collation gives away for nothing.
    """
    began = time.monotonic()
    found = read_sentences(config, share)
    every = np.bincount(np.concatenate(found.train), minlength=found.words) + 1.0
    tables: dict[int, NDArray[np.float64]] = {}

    def nats(position: int, words: NDArray[np.int64]) -> float:
        if position not in tables:
            own = np.array([s[position] for s in found.train if len(s) > position], np.int64)
            counts = np.bincount(own, minlength=found.words) + SMOOTHING * every / every.sum()
            tables[position] = np.log(counts / counts.sum())
        return -float(tables[position][words].sum())

    values = []
    for k in range(shuffles):
        batches = [b[:, 1:] for b in collated(found.test, EVALUATED, derive_seed(config.train.seed, "test", k))]
        total = sum(sum(nats(position, row) for position, row in enumerate(batch)) for batch in batches)
        values.append(math.exp(total / sum(batch.size for batch in batches)))
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


def shards(sentences: Sequence[Ids], clients: int, seed: int) -> list[Ids]:
    """Give every client the same number of sentences, at random; the rest is left out, as in the code."""
    each = len(sentences) // clients
    order = np.random.default_rng(derive_seed(seed, "code-faithful shards")).permutation(len(sentences))
    return [np.concatenate([sentences[i] for i in order[k * each : (k + 1) * each]]) for k in range(clients)]


def train_faithfully(
    config: Config, shuffles: int, listen: Listener, share: float = 1.0, folder: Path | None = None
) -> dict[str, Any]:
    """Train and evaluate as FedAtt's public code does; return what a cell's result holds.

    Args:
      config: data.name, model, method, participation.fraction, train.rounds, seed, device and precision are read.
      shuffles: shuffles of the test sentences that are evaluated; their standard deviation is the figure's own spread.
      share: see `read_sentences`; `folder` see `Replica.train`.
    """
    config = check(config)
    found = read_sentences(config, share)
    seed, clients = config.train.seed, config.data.clients or CLIENTS
    spec = build_spec(config.model.name, found.words, embed=config.model.embed, hidden=config.model.hidden)
    method = build_method(method_spec(config))
    members = clients if method.cohort == "all" else max(1, round((config.participation.fraction or 0.1) * clients))
    choice = choose(replace(config.train, workers=1), spec, 1, members, MOST * method.batch_size)
    store = make_store(shards(found.train, clients, seed), [str(k) for k in range(clients)])
    shape = Batching("sentences", MOST, method.batch_size - 1)  # rows are positions, time runs over sentences
    problem = BrokenProblem(
        spec, store, shape, seed, choice.device, precision=config.train.precision, cut=broken_steps, shape=shape
    )
    read = f"{len(found.train):,} sentences, {found.words:,} words"
    listen.say(f"code-faithful {config.data.name}: {read}; {choice.reason}")

    def called(round: int) -> list[str]:
        drawn = range(clients) if members == clients else sample_cohort(clients, members, seed, round)
        return [store.names[k] for k in drawn]

    def validated(state: State) -> tuple[dict[str, Any], float]:
        score = broken_score(spec, state.params, found.valid, derive_seed(seed, "valid", state.round), choice.device)
        return score.summary(), score.mean_nats

    def tested(params: Params) -> dict[str, Any]:
        order = [derive_seed(seed, "test", k) for k in range(shuffles)]
        scores = [broken_score(spec, params, found.test, own, choice.device) for own in order]
        values = [score.perplexity for score in scores]
        honest = honest_score(spec, params, found.test, choice.device).perplexity
        mean = {"perplexity": statistics.fmean(values), "honest_sentence_perplexity": honest}
        test = {**sum(scores, Score()).summary(), **mean}
        return {"test": test, "shuffles": _spread(values), "vocabulary": found.words}

    replica = Replica(
        config, problem, method, choice, config.data.name, found.sha256, {"share": share}, initial_params(spec, seed),
        called, validated, chooses=True,
    )  # fmt: skip
    return replica.train(listen, None if keeps_state(method) else folder, tested)


# The next-character report


def across(steps: Sequence[Step]) -> list[Step]:
    """Transpose batches: rows become time, and every batch starts from a zero state.

    Example:
      >>> step = Step(np.array([[1, 2, 3], [7, 8, 9]]), np.array([[2, 3, 4], [8, 9, 5]]), np.ones((2, 3)), False)
      >>> across([step])[0].inputs.tolist(), across([step])[0].targets.tolist()
      ([[1, 7], [2, 8], [3, 9]], [[2, 8], [3, 9], [4, 5]])
    """
    return [Step(step.inputs.T, step.targets.T, step.mask.T, True) for step in steps]


def across_score(problem: Problem, params: Params, streams: Mapping[str, Ids], rows: int) -> tuple[float, float]:
    """Return nats a character and the share of first guesses, read across the batch as in training."""
    stacked = {name: p[None] for name, p in params.items()}
    steps = [s for stream in streams.values() for s in across(stream_steps(stream, rows, problem.batching.window))]
    none = torch.zeros(1, dtype=torch.int64)
    sums = torch.zeros(3, dtype=torch.float64)
    for step in steps:
        batch, _ = stack_steps([step], step.inputs.shape[0], problem.device)
        found, _ = gradient(problem.spec, stacked, batch, None, none, none, {}, count=True)
        assert found.hits is not None
        sums += torch.stack([found.nats[0].double(), found.hits[0].double(), found.tokens[0].double()]).cpu()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def shuffled(stream: Ids, seed: int, name: str) -> Ids:
    """A stream with its characters in random order."""
    return np.random.default_rng(derive_seed(seed, "shuffled characters", name)).permutation(stream)


def train_across(
    config: Config, prepared: Prepared, shuffle: bool, listen: Listener, folder: Path | None = None
) -> dict[str, Any]:
    """Train and score as the notebook does; return what a cell's result holds.

    Args:
      config: model, method, train.rounds, seed, device and precision are read; every client is in every round.
      shuffle: whether the characters of every text are shuffled, as those of the report's "non-IID" clients are.
      folder: see `Replica.train`.
    """
    seed, store = config.train.seed, prepared.store
    valid, test = limit_streams(prepared.valid, config.train.valid_tokens), dict(prepared.test)
    if shuffle:
        texts = [shuffled(store.stream(k), seed, name) for k, name in enumerate(store.names)]
        store = make_store(texts, list(store.names))
        valid = {name: shuffled(stream, seed, f"valid {name}") for name, stream in valid.items()}
        test = {name: shuffled(stream, seed, name) for name, stream in test.items()}
    method, batching = build_method(method_spec(config)), prepared.batching
    batch_size, window, most = method.batch_size, batching.window, batching.max_tokens
    choice = choose(replace(config.train, workers=1), prepared.spec, 1, len(store), window * batch_size)

    def cut(stream: Ids, rows: int, seed: int) -> list[Step]:
        return across(stream_steps(stream if most is None else stream[: most + 1], rows, window))

    # As the engine sees it: as many rows as there are positions, as long as there are rows.
    shape = Batching("sentences", window, batch_size)
    problem = BrokenProblem(
        prepared.spec, store, batching, seed, choice.device, precision=config.train.precision, cut=cut, shape=shape
    )
    listen.say(f"code-faithful, across the batch{', characters shuffled' if shuffle else ''}; {choice.reason}")

    def scored(params: Params, streams: Mapping[str, Ids]) -> dict[str, float]:
        nats, top1 = across_score(problem, params, streams, batch_size)
        return {"nats": nats, "perplexity": math.exp(nats), "top1": top1}

    def validated(state: State) -> tuple[dict[str, Any], float]:
        found = scored(state.params, valid)
        return found, found["nats"]

    def tested(params: Params) -> dict[str, Any]:
        honest = evaluate_together(prepared.spec, params, prepared.test, choice.device).mean_nats
        sizes = {"train_tokens": int(store.sizes().sum()), "vocabulary": len(prepared.vocab)}
        return {"test": {**scored(params, test), "honest_nats": honest}, **sizes}

    replica = Replica(
        config, problem, method, choice, prepared.corpus.name, prepared.corpus.fingerprint(), {"shuffle": shuffle},
        init_params(prepared.spec, seed), lambda _: store.names, validated, chooses=False,
    )  # fmt: skip
    return replica.train(listen, folder, tested)


Weights = dict[str, Tensor]
UNITS, BATCH, EPOCHS, STEP = 32, 32, 3, 0.01  # of the slides
SHARES = (0.4, 0.6)  # the slides' weights of the two clients


class Toy(nn.Module):
    """LSTM(32) and one sigmoid unit, as in the slides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, UNITS, batch_first=True)
        self.dense = nn.Linear(UNITS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit of every sequence, [batch]."""
        _, (last, _) = self.lstm(x)
        out: Tensor = self.dense(last[0]).squeeze(1)
        return out


def run_toy(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Run the slides' loop; `study.sent_back` says whether the mean goes back to the clients."""
    sent_back = bool(settings["study.sent_back"])
    rounds, size = int(settings.get("study.rounds", 10)), int(settings.get("study.samples", 3000))
    began = time.monotonic()
    x, y = task(size, seed)
    third = size // 3
    clients = [(x[:third], y[:third]), (x[third : 2 * third], y[third : 2 * third])]
    test_x, test_y = x[2 * third :], y[2 * third :]
    locals_ = [draw(seed, "local", k) for k in range(2)]
    records: list[dict[str, Any]] = []
    accuracies = []
    model = Toy()
    for number in range(1, rounds + 1):
        mean = {
            name: sum((s * w[name] for s, w in zip(SHARES, locals_, strict=True)), torch.zeros(()))
            for name in locals_[0]
        }
        with torch.no_grad():
            model.load_state_dict(mean)
            hits = float(((model(test_x) > 0).float() == test_y).float().mean())
        accuracies.append(hits)
        trained = [fit(mean if sent_back else own, *data, derive_seed(seed, number, str(k)))
                   for k, (own, data) in enumerate(zip(locals_, clients, strict=True))]  # fmt: skip
        locals_ = [weights for weights, _ in trained]
        loss = sum(s * found for s, (_, found) in zip(SHARES, trained, strict=True))
        records.append({"round": number, "loss": loss, "valid": {"perplexity": None, "top1": hits}})
    return {
        "records": records,
        "measures": {"accuracy": accuracies[-1], "first_accuracy": accuracies[0]},
        "data": f"synthetic, {size:,} sequences", "method": "mean of two", "model": "LSTM 32", "clients": 2,
        "rounds": rounds, "seconds": time.monotonic() - began,
    }  # fmt: skip


def task(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of eight standard normal numbers; the bit says whether the last half's sum is positive."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "toy task"))
    x = torch.randn(size, 8, generator=generator)
    return x.unsqueeze(2), (x[:, 4:].sum(1) > 0).float()


def draw(seed: int, *purpose: int | str) -> Weights:
    """Draw a model's weights, U(±1/√32), from a generator of their own."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "toy weights", *purpose))
    bound = UNITS**-0.5
    return {
        name: torch.empty(w.shape).uniform_(-bound, bound, generator=generator)
        for name, w in Toy().state_dict().items()
    }


def fit(start: Weights, x: Tensor, y: Tensor, seed: int) -> tuple[Weights, float]:
    """Train for three epochs of SGD 0.01 from given weights; return the weights and the last epoch's loss."""
    model = Toy()
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(model.parameters(), lr=STEP)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach()) * len(rows)
    return {name: w.detach().clone() for name, w in model.state_dict().items()}, total / len(x)
