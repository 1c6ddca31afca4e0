"""The recipe: what `keyfed train` sets where no method is named, from facts of the corpus, each with its reason.

`facts_of` reads a corpus. `recipe` is a pure function of these facts and of what the user has set, which always wins.
It chooses federated averaging with Nesterov momentum on the server, clipped SGD on clients, a step size that falls over
the whole run and an average over rounds; how much of each follows from how many clients there are, how much they wrote
and how much can be read. The step is settled by a short pilot afterwards (`keyfed.run.pilot`). Every constant of the
recipe stands here, at the top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch

from keyfed.config.load import RECIPE, Config, Value
from keyfed.config.schema import read_options
from keyfed.engine.module import MakeModule
from keyfed.errors import DataError, TooLittleText
from keyfed.model.language_model import preset
from keyfed.run.console import plural
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.catalogue import NAMED, is_path, load_corpus
from keyfed.text.partition import DEFAULT_CLIENTS
from keyfed.text.sources import UNREADABLE, open_bytes
from keyfed.text.vocab import EOS

V = TypeVar("V", int, float, str, int | None, float | None)

# Local training: batch rows, local step size, clip of the gradient's norm. Measured on validation (docs/LOG.md).
WORDS = (5, 10.0, 0.25)  # irc and sotu, 1 M to 32 M tokens; with small cohorts smaller batches gain nothing
CARRIED = 0.5  # of the step, where the run starts from trained weights
CHARACTERS = (10, 0.02, 1.0)  # local Adam, found for characters (docs/LOG.md); clipped SGD was not measured there
# The server.
SERVER_STEP, BETA, BETA_CHARACTERS = 1.0, 0.7, 0.3  # Nesterov: step 1; β 0.85 with half the step is as good
# Central training for comparison (`train.central`): irc, 2 M tokens: SGD 20 73.5, 10 84.3, Adam 0.003 131.6.
CENTRAL: Mapping[str, Value] = {"optimiser": "sgd", "lr": 20.0, "clip": 0.25, "batch_size": 20}
# Over the whole run.
SCHEDULE, FINAL = "cosine", 0.02  # the local step falls to this share of itself
AVERAGE_ROUNDS, AVERAGE_SHARE = 100, 0.05  # the average's horizon: so many rounds (weight 0.99), at most this share
# The cohort leaves time for many rounds: irc, 1 M tokens: 10 clients 94.8, 50 128.8, 200 247.8; 15 M: 20 62.1, 50 63.7.
ROUNDS_WANTED = 1_000
COHORT_LEAST, COHORT_MOST = 5, 20
ROUND_TOKENS, COHORT_SMALL = 2_000, 10  # small clients: more of them, until a round has so many tokens
# The cap of heavy clients, in tokens of a client and round.
CAP_MOST = 8_000  # sotu, 32 M tokens
CAP_LEAST = 1_000  # below it rounds cost more than they teach
# Times the mean client: one that has more may outweigh its cohort. The cap alone was not measured: irc has 54.8 with
# 1,000 tokens and 66.8 with no cap, but cohort, rounds and β differ between those two runs, too (docs/LOG.md).
CAP_HEAVY = 4
# How much is read.
TOKENS_CPU, TOKENS_GPU = 1_000_000, 30_000_000  # about 3 minutes of two cores, or of one H200
PASSES = 20  # times the text at most
ROUNDS_LEAST, ROUNDS_MOST = 10, 20_000
# Dropout by how often the text is read: below so many passes this rate. irc: 6 to 9 passes 0.1; sotu: 19 passes 0.2.
DROPOUT = ((2.0, 0.0), (10.0, 0.1), (30.0, 0.2), (math.inf, 0.3))
DROPOUT_UNKNOWN = 0.1
# Validations of a run, and the share of its time that they may take (a token costs a third of a trained one).
VALIDATIONS, VALIDATIONS_LEAST, VALIDATION_SHARE, READ_COST = 20, 4, 0.1, 1 / 3
# Lines are messages, each written on its own, if they are short and of very different lengths. Wrapped prose is not.
MESSAGE_TOKENS, MESSAGE_SPREAD = 25, 0.6
# Where clients' sizes are not known (a federation): tokens a client and round on average, their cap, cohort, rounds.
UNKNOWN_CLIENT, UNKNOWN_CAP, UNKNOWN_COHORT, UNKNOWN_ROUNDS = 1_000, 2_000, 10, 100


@dataclass(frozen=True, slots=True)
class Facts:
    """What a recipe is chosen from.

    Attributes:
      clients: who can be trained on; None where that is not known.
      sizes: training tokens of clients, in rising order; of many clients their quantiles. Empty: not known.
      tokens: of all clients; None: not known.
      messages: whether lines are messages, each written on its own.
      characters: whether the model reads characters.
      carried: whether the run starts from trained weights.
      own_model: whether the model is the caller's own module, whose dropout and state nobody here knows.
      private: whether the run is differentially private.
      gpu: whether clients train on a GPU.
      valid_tokens: validation tokens read each time.
      budget: tokens that there is time for; None: the usual number.
    """

    clients: int | None
    sizes: tuple[int, ...] = ()
    tokens: int | None = None
    messages: bool = False
    characters: bool = False
    carried: bool = False
    own_model: bool = False
    private: bool = False
    gpu: bool = False
    valid_tokens: int = 20_000
    budget: int | None = None

    def mean(self, cap: int | None = None) -> float:
        """Tokens of a client and round, on average."""
        if not self.sizes:
            return min(UNKNOWN_CLIENT, cap or UNKNOWN_CLIENT)
        return max(1.0, sum(min(size, cap or size) for size in self.sizes) / len(self.sizes))


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that was chosen, and why."""

    key: str
    value: Value
    why: str

    def line(self) -> str:
        """Say it in one line.

        Example:
          >>> Setting("train.cohort", 50, "clients are small").line()
          'train.cohort = 50: clients are small'
        """
        return f"{self.key} = {'none' if self.value is None else self.value}: {self.why}"


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of the text a run reads: tokens, times the text (None: not known), share of the clients called."""

    rounds: int
    tokens: int
    passes: float | None
    clients: float | None

    def line(self) -> str:
        """Say it in one line."""
        times = "" if self.passes is None else f", {self.passes:.1f} times the training text"
        share = "" if self.clients is None else f"; about {self.clients:.0%} of the clients are called at least once"
        return f"to be read: about {plural(self.tokens, 'token')} in {plural(self.rounds, 'round')}{times}{share}"


class _Chosen:
    """Settings as they are chosen; what the user has set is taken instead and not listed."""

    def __init__(self, given: Mapping[str, Value]) -> None:
        self.given, self.settings = given, dict[str, Setting]()

    def __call__(self, key: str, value: V, why: str) -> V:
        if key in self.given:
            return cast(V, self.given[key])  # its type was checked when it was set
        self.settings[key] = Setting(key, value, why)
        return value


def recipe(facts: Facts, given: Mapping[str, Value] | None = None) -> tuple[tuple[Setting, ...], Reading | None]:
    """Choose what the user has left open; return the settings, each with its reason, and how much will be read.

    How much a private run reads is not returned: nothing is read off its text.

    Args:
      given: `section.key` and value of what the user has set; it stays, and the others follow from it.

    Example:
      >>> settings, reading = recipe(Facts(9_443, (40, 90, 200, 500), 2_000_000, messages=True))
      >>> [s.value for s in settings if s.key in ("train.cohort", "data.batches", "method.lr")]
      [10, 10.0, 'packed']
    """
    choose = _Chosen(given or {})
    if facts.private:
        few = min(UNKNOWN_COHORT, facts.clients or UNKNOWN_COHORT)
        choose("train.cohort", few, "the method keeps its own settings: the recipe was not measured with noise")
        return tuple(choose.settings.values()), None
    usual = _budget(facts)
    cohort = choose("train.cohort", *_cohort(facts, usual[0]))
    asked = choose.given.get("train.rounds")
    cap = choose("data.max_tokens", *_cap(facts, cohort, usual, int(asked) if asked else None))
    each = cohort * facts.mean(cap)
    rounds = choose("train.rounds", *_rounds(facts, each, usual))
    read = reading_of(facts, cohort, cap, rounds)
    _locally(choose, facts)
    if not facts.own_model:
        choose("data.batches", *_batches(facts))
        choose("model.dropout", *_dropout(read))
    choose("train.schedule", SCHEDULE, "the local step falls smoothly over the whole run")
    if choose.given.get("train.schedule") != "constant":
        choose("train.final", FINAL, "nearly nothing is left of the step in the last round")
    horizon = min(AVERAGE_ROUNDS, rounds * AVERAGE_SHARE)
    weight = math.floor(1000 * (1 - 1 / horizon)) / 1000 if horizon >= 2 else None
    why = f"the model served is the average of about {horizon:.0f} rounds" if weight else "too few rounds to average"
    choose("train.average", weight, why)
    if not facts.sizes:  # real clients validate when they are called, at no message of its own
        return tuple(choose.settings.values()), read
    times = _validations(read.tokens, facts.valid_tokens)
    every = choose("train.eval_every", max(1, math.ceil(rounds / times)), f"about {times} validations")
    choose("train.checkpoint_every", every, "a checkpoint with every validation; Ctrl-C writes one, too")
    return tuple(choose.settings.values()), read


def reading_of(facts: Facts, cohort: int, cap: int | None, rounds: int) -> Reading:
    """Return how much a run reads: R rounds of c clients, and of n clients the share 1 − (1 − c/n)^R is called."""
    tokens = round(rounds * cohort * facts.mean(cap))
    passes = tokens / facts.tokens if facts.tokens else None
    seen = 1 - (1 - min(1.0, cohort / facts.clients)) ** rounds if facts.clients else None
    return Reading(rounds, tokens, passes, seen)


def steps_to_try(lr: float) -> tuple[float, ...]:
    """Return the local steps that a pilot compares, the recipe's own first.

    Example:
      >>> steps_to_try(10.0)
      (10.0, 5.0, 20.0)
    """
    return lr, lr / 2, lr * 2


def _cohort(facts: Facts, budget: int) -> tuple[int, str]:
    """As many clients as leave time for ROUNDS_WANTED rounds; never more than there are."""
    n = facts.clients
    if n is None:
        return UNKNOWN_COHORT, "the number of clients is not known"
    if n <= COHORT_LEAST:
        return n, f"there are {n}: all take part in every round" if n > 1 else "there is one client"
    if not facts.sizes:
        return min(n, UNKNOWN_COHORT), "the clients' sizes are not known"
    typical = facts.mean(CAP_LEAST)
    least = max(COHORT_LEAST, min(COHORT_SMALL, round(ROUND_TOKENS / typical)))
    wanted = min(n, max(least, min(COHORT_MOST, round(budget / (ROUNDS_WANTED * typical)))))
    size = f"a client brings about {typical:,.0f} tokens (counted up to {CAP_LEAST:,})"
    return wanted, f"many rounds of few clients learn more than few rounds of many; {size}"


def _budget(facts: Facts) -> tuple[int, str]:
    """Tokens of the run, and what limits them."""
    if facts.budget is not None:
        return max(1, facts.budget), "what there is time for"
    most, why = (TOKENS_GPU, "minutes of one GPU") if facts.gpu else (TOKENS_CPU, "minutes of two cores")
    if facts.tokens is not None and PASSES * facts.tokens < most:
        return max(1, PASSES * facts.tokens), f"the text is read {PASSES} times"
    return most, f"{most:,} tokens, a few {why} (--rounds or --minutes change it)"


def _cap(facts: Facts, cohort: int, usual: tuple[int, str], rounds: int | None) -> tuple[int | None, str]:
    """Cut clients who have much: to a multiple of the mean one, and so that there are enough rounds."""
    if not facts.sizes:
        return UNKNOWN_CAP, "the clients' sizes are not known, and one with much text must not outweigh the others"
    enough = usual[0] / (cohort * (rounds or ROUNDS_WANTED))
    cap = min(CAP_MOST, round(max(CAP_LEAST, min(CAP_HEAVY * facts.mean(), enough))))
    if facts.sizes[-1] <= cap:
        return None, f"no client has more than {cap:,} tokens"
    return cap, f"the largest client has {facts.sizes[-1]:,} tokens; {cap:,} a round are enough of it"


def _rounds(facts: Facts, each: float, usual: tuple[int, str]) -> tuple[int, str]:
    if facts.clients is None or not facts.sizes:
        return UNKNOWN_ROUNDS, "the clients' sizes are not known"
    rounds = max(ROUNDS_LEAST, min(ROUNDS_MOST, round(usual[0] / each)))
    return rounds, f"{usual[1]}; a round reads about {each:,.0f} tokens"


def _locally(choose: _Chosen, facts: Facts) -> None:
    """Choose what clients do in a round and what the server makes of it."""
    batch, lr, clip = CHARACTERS if facts.characters else WORDS
    if facts.characters:
        optimiser, why = "adam", "found by search for characters"
    else:
        optimiser, why = "sgd", "local Adam pushes down the words that a client lacks"
    if choose("method.optimiser", optimiser, why) == optimiser:  # another optimiser has steps of its own
        less = f" × {CARRIED:g}, because the start is trained" if facts.carried else ""
        scale = CARRIED if facts.carried else 1.0
        found = "20 was best with 1 to 2 million tokens, 10 with 15 million read as streams"
        choose("method.lr", lr * scale, f"{'found by search for characters' if facts.characters else found}{less}")
        choose("method.clip", clip, "clipping makes it nearly normalised descent")
    choose("method.batch_size", batch, "rows of a local step")
    choose("method.epochs", 1, "more local passes over-fit a client")
    if "server.name" not in choose.given:
        choose("method.server_lr", SERVER_STEP, f"{RECIPE}: the server takes the whole mean step")
        choose("method.beta", BETA_CHARACTERS if facts.characters else BETA, f"{RECIPE}: momentum over rounds")


def _batches(facts: Facts) -> tuple[str, str]:
    if facts.messages and not facts.characters:
        return "packed", "lines are messages: each is read from its own start"
    return "stream", "running text: the state is carried over lines"


def _dropout(read: Reading) -> tuple[float, str]:
    if read.passes is None:
        return DROPOUT_UNKNOWN, "how often the text is read is not known"
    passes = read.passes
    return next(rate for most, rate in DROPOUT if passes < most), f"the text is read {passes:.1f} times"


def _validations(tokens: int, valid_tokens: int) -> int:
    """How often to validate: so that reading costs at most VALIDATION_SHARE of training."""
    affordable = VALIDATION_SHARE * tokens / max(1.0, READ_COST * valid_tokens)
    return max(VALIDATIONS_LEAST, min(VALIDATIONS, int(affordable)))


def are_messages(tokens_per_line: float, spread: float) -> bool:
    """Tell messages from running text by the lengths of lines: their mean, and standard deviation / mean.

    Example:
      >>> are_messages(9, 0.9), are_messages(12, 0.2), are_messages(90, 0.8)  # chat, wrapped prose, paragraphs
      (True, False, False)
    """
    return tokens_per_line <= MESSAGE_TOKENS and spread >= MESSAGE_SPREAD


SHARD_TOKENS, LINES_OF_SHARD = 2_000, 3  # of a shard, at least, where one small file is cut
SAMPLE, SAMPLE_TOKENS = 1_000, 10_000  # clients, and tokens of each, whose lines are looked at
QUANTILES = 200  # of clients' sizes, where there are more clients
LEAST_WINDOWS = (16, 8)  # tokens of a window where clients have less than the model's own
FEW_CLIENTS = 10  # who should not be lost for having less than a window


def read_corpus_for(
    config: Config, given: Mapping[str, Value], module: MakeModule | None
) -> tuple[Config, Prepared, list[Setting]]:
    """Read a corpus so that little text is not lost: a small file in fewer shards, short notes in smaller windows."""
    said = []
    by_text = "data.clients" not in given and not config.privacy.on  # of a private run's text nothing is read off
    if by_text and (shards := few_shards(config)) is not None:
        config = replace(config, data=replace(config.data, clients=shards))
        said.append(Setting("data.clients", shards, f"the file is small: shards of about {SHARD_TOKENS:,} words"))
    windows = () if "data.window" in given or config.privacy.on else LEAST_WINDOWS
    for at, window in enumerate((config.data.window, *windows)):
        tried = replace(config, data=replace(config.data, window=window))
        try:
            prepared = prepare(tried, module)
        except TooLittleText:
            if at == len(windows):
                raise
            continue
        if at == len(windows) or not prepared.excluded or len(prepared.store) >= FEW_CLIENTS:
            break
    if at:
        said.append(Setting("data.window", window, "clients have little text, and none is lost for being short"))
    return tried, prepared, said


def few_shards(config: Config) -> int | None:
    """Return into how many shards a small text file without authors is cut; None where the usual number will do."""
    path = Path(config.data.name)
    if not is_path(config.data.name) or config.data.partition not in (None, "iid") or not path.exists():
        return None
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    large = sum(file.stat().st_size for file in files) > DEFAULT_CLIENTS["iid"] * SHARD_TOKENS * 4
    if large and not _few_lines(files):
        return None
    corpus = load_corpus(config.data.name, **read_options(config.data))
    if corpus.natural:
        return None
    lines = [line for author in corpus.authors for line in author.lines]
    words = sum(len(line.split()) + 1 for line in lines)
    most = min(DEFAULT_CLIENTS["iid"], words // SHARD_TOKENS, len(lines) // LINES_OF_SHARD)
    return max(1, most) if most < DEFAULT_CLIENTS["iid"] else None


def _few_lines(files: Sequence[Path]) -> bool:
    """Tell text of so few lines that the usual shards would not get `LINES_OF_SHARD` each; most text is not read on."""
    left = DEFAULT_CLIENTS["iid"] * LINES_OF_SHARD
    for file in files:
        try:
            with open_bytes(file) as opened:
                while piece := opened.read(1 << 16):
                    left -= max(piece.count(b"\n"), piece.count(b"\r"))
                    if left <= 0:
                        return False
        except (*UNREADABLE, DataError):  # said where it is read
            pass
    return True


def facts_of(
    config: Config, prepared: Prepared, *, carried: bool, own_model: bool = False, budget: int | None = None
) -> Facts:
    """Read the facts of a corpus; of a private run's text nothing but how many clients there are."""
    store, t = prepared.store, config.train
    common = Facts(
        clients=len(store), characters=preset(config.model.name).characters, carried=carried, own_model=own_model,
        private=config.privacy.on, gpu=t.device != "cpu" and torch.cuda.is_available(), budget=budget,
    )  # fmt: skip
    if config.privacy.on:
        return common
    sizes = np.sort(store.sizes())
    if len(sizes) > QUANTILES:  # the middle of each of equal parts; the largest is the largest
        at = ((np.arange(QUANTILES) + 0.5) / QUANTILES * len(sizes)).astype(int)
        sizes = np.append(sizes[at[:-1]], sizes[-1])
    held = sum(map(len, prepared.valid.values()))
    return replace(
        common,
        sizes=tuple(sizes.tolist()),
        tokens=int(store.sizes().sum()),
        messages=known_messages(config) if config.data.name in NAMED else _looks_like_messages(prepared),
        valid_tokens=min(held, t.valid_tokens or held),
    )


def known_messages(config: Config) -> bool:
    known = NAMED.get(config.data.name)
    return known is not None and known.messages


def _looks_like_messages(prepared: Prepared) -> bool:
    """Look at the lengths of lines in a sample of the clients."""
    store = prepared.store
    lengths = []
    for k in range(0, len(store), max(1, len(store) // SAMPLE)):
        ids = store.flat[int(store.bounds[k]) : int(store.bounds[k + 1])].numpy()[:SAMPLE_TOKENS]
        lengths.append(np.diff(np.flatnonzero(ids == EOS), prepend=-1))
    found = np.concatenate(lengths)
    return len(found) > 1 and are_messages(float(found.mean()), float(found.std() / found.mean()))
