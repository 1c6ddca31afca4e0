"""The sections of a configuration: one frozen dataclass per concept, every option with its help and its bounds.

An option is declared once, here: files, `--set`, the command line, the checks and docs/options.md read it.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from keyfed.errors import ConfigError

T = TypeVar("T")


def option(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
    **bounds: Any,
) -> T:
    """Declare an option.

    Args:
      flag: its own option on the command line, where it has one; every option can be set with --set.
      short: the help of the flag, where it is not `help`; `metavar` is the word for its value.
      bounds: `least=n`: n or more; `above=n`: more than n; `share="rate"`: 0 ≤ rate < 1; `inside="delta"`:
        0 < delta < 1; `portion="share"`: 0 < share ≤ 1. None is within all of them.
    """
    declared: T = field(
        default=default, metadata={"help": help, "flag": flag, "short": short, "metavar": metavar, **bounds}
    )
    return declared


def out_of_bounds(section: str, values: Any) -> list[str]:
    """Say which values of a section are outside their bounds, in words that name the key."""
    out = []
    for f in fields(values):
        got, bounds = getattr(values, f.name), f.metadata
        if got is None:
            continue
        said = f"{section}.{f.name} is {got}; "
        if "least" in bounds and not got >= bounds["least"]:
            out.append(f"{said}at least {bounds['least']}")
        if "above" in bounds and not got > bounds["above"]:
            out.append(f"{said}expected > {bounds['above']}")
        if "share" in bounds and not 0 <= got < 1:
            out.append(f"{said}expected 0 ≤ {bounds['share']} < 1")
        if "inside" in bounds and not 0 < got < 1:
            out.append(f"{said}expected 0 < {bounds['inside']} < 1")
        if "portion" in bounds and not 0 < got <= 1:
            out.append(f"{said}expected 0 < {bounds['portion']} ≤ 1")
    return out


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which text, whose, and how it is cut."""

    name: str = option(
        "chat",
        "corpus name or path of a folder or file",
        flag="--data",
        short="Corpus name (`keyfed data list`) or a path.",
    )
    dir: str | None = option(
        None,
        "folder that holds the named corpora (else KEYFED_DATA)",
        flag="--data-dir",
        short="Folder of the named corpora; else KEYFED_DATA.",
    )
    partition: str | None = option(None, "natural, iid, contiguous, quantity or dirichlet; none: the corpus's own")
    clients: int | None = option(
        None, "number of shards, where the partition makes shards, or of natural clients; none: its own", least=1
    )
    clients_by: Literal["seed", "text"] = option(
        "seed", "which natural clients data.clients takes: drawn by the seed, or those with most text"
    )
    unseen: float = option(0.1, "share of natural clients never trained on", share="share")
    alpha: float = option(0.5, "concentration of the dirichlet partition", above=0)
    clients_part: str | None = option(
        None, "train on one part of the clients, 1/2 or 2/2, drawn by seed and name; none: on all"
    )
    train_share: float = option(
        1.0,
        "share of every author's training lines that is used, from the first on; held-out text stays whole",
        portion="share",
    )
    vocab: int | None = option(10_000, "words in the vocabulary, four specials included; none: every word", least=5)
    lower: bool = option(True, "lower-case words (a character model keeps its case)")
    min_clients: int | None = option(
        None, "clients that must use a word; none: 2 on natural partitions, else 1", least=1
    )
    vocab_file: str | None = option(
        None,
        "vocab.json to use, of `keyfed vocab` or of another run, whose own lower-casing holds; data.vocab, "
        "data.lower and data.min_clients are then not read. base: that of the base model, which tells of no client; "
        "none: built from the training text",
        flag="--vocab",
        short="vocab.json to use (`keyfed vocab`), or base; else built from the training text.",
    )
    batches: Literal["stream", "sentences", "packed", "pairs"] | None = option(
        None,
        "stream: contiguous text with carried state; sentences: single lines of similar length, padded; "
        "packed: whole lines one after the other, the state reset at each; pairs: single tokens, the state reset at "
        "each, which learns no recurrence (the Pretraining code); none: packed where the corpus is known "
        "to hold messages (chat, irc, reddit), else stream",
    )
    window: int | None = option(None, "tokens of a training window; none: the model's own", least=1)
    max_sentences: int | None = option(None, "lines per client and round; none: all", least=1)
    max_tokens: int | None = option(None, "tokens per client and round; none: all", least=1)
    max_words: int | None = option(
        None, "words of a review (yelp), comment (reddit) or row of a table that are read; none: all", least=1
    )
    author_column: str | None = option(
        None,
        "author column of a table or of rows in JSON: a name, a number, or - for one person's; none: detected",
        flag="--author-column",
        short="Author column of a table: a name, a number, or - for one person's; else detected.",
    )
    text_column: str | None = option(
        None,
        "text column of a table or of rows in JSON: a name or a number; none: detected",
        flag="--text-column",
        short="Text column of a table: a name or a number; else detected.",
    )
    me: str | None = option(
        None,
        "the one author of a chat, mail or table whose text is read, as it spells the name, which is kept as a hash; "
        "none: all",
        flag="--me",
        short="Read one author's text only: the name as the chat, mail or table spells it.",
    )
    folder: Literal["clients", "person"] | None = option(
        None,
        "whose the files of a folder are that name no authors: a client each, or all one person's; none: one person's "
        "where most are notes (.md, .docx), else a client each",
    )

    def __post_init__(self) -> None:
        if self.me is not None:  # files of a run hold no name
            from keyfed.text.corpus import kept_name

            object.__setattr__(self, "me", kept_name(self.me))

    @property
    def batching(self) -> Literal["stream", "sentences", "packed", "pairs"]:
        """`batches`, or what fits the corpus: messages are read one by one, running text goes on from line to line."""
        from keyfed.text.catalogue import NAMED

        known = NAMED.get(self.name)
        return self.batches or ("packed" if known is not None and known.messages else "stream")


class ReadOptions(typing.TypedDict):
    """What may be said of text named by a path."""

    author_column: str | None
    text_column: str | None
    max_words: int | None
    me: str | None
    folder: str | None


def read_options(data: DataConfig) -> ReadOptions:
    """How text named by a path is read: arguments of `keyfed.text.corpus.read_corpus`."""
    return {
        "author_column": data.author_column,
        "text_column": data.text_column,
        "max_words": data.max_words,
        "me": data.me,
        "folder": data.folder,
    }


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A preset and what to change of it."""

    name: str = option(
        "cifg",
        "preset, see `keyfed methods --models`",
        flag="--model",
        short="Model preset (`keyfed methods --models`).",
    )
    dropout: float = option(0.0, "rate after the embedding and every recurrent layer", share="rate")
    tied: bool | None = option(None, "output layer = embedding; none: the preset's")
    embed: int | None = option(None, "width of the embedding; none: the preset's", least=1)
    hidden: int | None = option(None, "recurrent units; none: the preset's", least=1)
    layers: int | None = option(None, "recurrent layers; none: the preset's", least=1)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, with whom, and on what."""

    rounds: int = option(
        20,
        "federated rounds",
        least=0,
        flag="--rounds",
    )
    cohort: int = option(10, "clients drawn each round", least=1)
    seed: int = option(
        1,
        "everything random derives from it",
        flag="--seed",
    )
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "how the local step size falls over the whole run, from lr to lr · final"
    )
    warmup: float = option(
        0.0, "share of the rounds in which the local step size rises to lr", share="share of the rounds"
    )
    final: float = option(0.0, "share of the local step size that is left at the end of a schedule")
    average: float | None = option(
        None,
        "weight of the past in the average of the model over rounds, which is validated, tested and "
        "exported; 0.98 averages about 50 rounds. none: the last round's model",
        share="weight of the past",
    )
    eval_every: int = option(1, "rounds between validations", least=1)
    choose: Literal["perplexity", "accuracy", "last"] = option(
        "perplexity",
        "which model is tested and exported: that with the best validation perplexity or accuracy (top-1, line ends "
        "and unknown words included), or that of the last round",
    )
    patience: int | None = option(
        None, "stop at a validation when the best one is this many rounds old (see choose); none: never", least=1
    )
    eval_start: bool = option(False, "validate the model before the first round too; result.json has it under start")
    valid_tokens: int | None = option(
        20_000, "validation tokens read each time, evenly from the streams; none: all", least=1
    )
    test_tokens: int | None = option(None, "test tokens read at the end, evenly from the streams; none: all", least=2)
    checkpoint_every: int = option(1, "rounds between checkpoints", least=1)
    block: int | None = option(None, "clients stacked in one computation; none: chosen", least=1)
    workers: int | None = option(None, "worker processes on a CPU; none: chosen", least=1)
    device: str = option("auto", "cpu, cuda, or auto")
    precision: Literal["fp32", "bf16"] = option(
        "fp32", "of products on a GPU; bf16 is faster and keeps float32 weights"
    )
    baselines: bool = option(True, "unigram and Kneser–Ney on the same tokens")
    central: bool = option(False, "also train the same model centrally on the same number of tokens")
    until: str | None = option(
        None,
        "stop at a validation result, perplexity=NUMBER or nats=NUMBER; none: never",
        flag="--until",
        short="Stop once validation is that good: perplexity=200 or nats=2.",
    )
    init: str | None = option(
        None,
        "run folder whose weights to start from, carried by word; base: the model that comes along; none: "
        "random (`keyfed train` and `keyfed up` take base where it fits and nothing is said)",
        flag="--init",
        short="Start from this run's weights, carried by word; base: those that come along; none: random.",
        metavar="RUN",
    )
    unmatched: Literal["uniform", "mean"] = option(
        "uniform", "rows of words that the run in init lacks: U(-0.05, 0.05), or the mean of its rows"
    )
    carry: Literal["model", "embedding"] = option(
        "model", "what is taken of the run in init: all of it, or its embedding alone, the rest being random"
    )
    frozen_rounds: int = option(
        0, "first rounds in which the embedding is neither trained nor sent up; train.rounds: always", least=0
    )
    curves: bool = option(
        False,
        "write loss and accuracy of every local batch and epoch to curves.jsonl",
        flag="--curves",
        short="Also write loss and accuracy of every local batch and epoch to curves.jsonl.",
    )
    rollback: float | None = option(
        None,
        "a model is bad when validation perplexity is this many times the least so far: the run goes back "
        "to the last good one and halves the local step size; 0: never. none: 3 with real clients; in a simulation "
        "1000 times a uniform guess. A private run looks at θ only: validation is not noised",
    )
    ngram_order: int = option(5, "order of the Kneser–Ney baseline", least=1)


@dataclass(frozen=True, slots=True)
class VectorsConfig:
    """Pretrained word vectors for the embedding before the first round."""

    file: str | None = option(
        None,
        "word vectors (GloVe, FastText, word2vec, npz, safetensors) or a transformer; none: none",
        flag="--vectors",
        short="Word vectors for the embedding (GloVe, FastText, word2vec, …).",
        metavar="FILE",
    )
    dim: int | None = option(
        None,
        "numbers a word in the end; none: the embedding's width",
        flag="--vectors-dim",
        short="Numbers a word in the end, by PCA; the embedding's width by default.",
    )
    reduce: Literal["pca", "pp-pca-pp"] = option(
        "pca", "how wider ones are reduced: pca, or pp-pca-pp (which is always applied)"
    )
    remove: int = option(7, "components D that pp-pca-pp removes before and after")
    pieces: Literal["mean", "first"] = option(
        "mean", "a word's vector in a transformer: the mean of its pieces, or the first"
    )


@dataclass(frozen=True, slots=True)
class SecureConfig:
    """Secure aggregation: uploads are masked, and the server sees sums only."""

    on: bool = option(
        False,
        "mask every upload; clients weigh themselves by public numbers",
        flag="--secure",
        short="Mask every upload: the server sees sums only.",
    )
    threshold: int | None = option(
        None, "clients that must stay until a sum is opened; none: more than two thirds of those called", least=2
    )
    floor: int = option(3, "clients of a sum below which no client takes part; one may ask for more", least=2)
    clear: bool = option(False, "weigh as a secure run does, without masks: the plain run that one is compared with")


@dataclass(frozen=True, slots=True)
class CountsConfig:
    """Counting n-grams over clients' text, by secure sums after the last round (docs/counts.md)."""

    order: int = option(4, "longest n-gram that is counted", least=1)
    k: int = option(3, "clients that an n-gram needs to be released", least=3)
    cap: int = option(1_000, "how often one client's use of one n-gram counts at most", least=1)
    most: int = option(20_000, "n-grams of one length that a client contributes at most", least=1)
    megabytes: float = option(24.0, "what a client sends for sketches, in all", above=0)
    among: int = option(1_000, "clients of one sum at most", least=3)
    on: bool = option(
        False,
        "count the n-grams of real clients after the last round, and mix them with the network; a finished "
        "simulation is counted by `keyfed counts`",
        flag="--counts",
        short="Then count n-grams over the clients that take part in counts, and mix.",
    )


LIMIT, SUM_LIMIT, TOKEN_LIMIT, AGAINST = 1.5, 3.0, 2.0, 0.25  # of a federation whose configuration sets none


@dataclass(frozen=True, slots=True)
class UploadConfig:
    """How uploads are compressed, and which are refused."""

    keep: float = option(1.0, "share of an upload's entries that is sent, the largest ones; the rest is kept for later")
    quantise: Literal["none", "fp16", "int8"] = option("none", "none, fp16, or int8 with stochastic rounding")
    bound: float | None = option(None, "largest norm of an upload; a larger one is refused. none: no bound", above=0)
    limit: float | None = option(
        None,
        "largest norm of an upload, as a multiple of the run's median one; a longer one is shortened. With "
        "secure sums it is that of the mean upload, and a longer one is not taken. none: in a federation "
        f"{LIMIT:g}, with secure sums {SUM_LIMIT:g}, in a simulation no limit; 0: no limit",
    )
    token_limit: float | None = option(
        None,
        "most tokens that a client counts for, as a multiple of the run's median (plain sums). "
        f"none: {TOKEN_LIMIT:g} in a federation, no limit in a simulation; 0: no limit",
    )
    against: float | None = option(
        None,
        "how far an upload may point against the others of its round, as a share of how much those agree; "
        "one beyond it is left out (plain sums, from four uploads on; memory for the uploads of a round). "
        f"none: {AGAINST:g} in a federation, uncompared in a simulation; 0: uncompared",
    )
    trim: float = option(
        0.0,
        "share of the uploads that is left out at either end of every number before the mean is taken; 0.5 is the "
        "median (plain sums; memory for the uploads of a round). 0: all count",
    )


@dataclass(frozen=True, slots=True)
class PrivacyConfig:
    """Client-level differential privacy: the budget, the clip, and the population it is meant for."""

    epsilon: float | None = option(
        None, "budget of the whole run, which the noise is calibrated to and which ends it; none: none", above=0
    )
    noise: float | None = option(
        None, "noise multiplier z: noise of the sum / clip; none: calibrated to epsilon", above=0
    )
    delta: float | None = option(None, "delta; none: population^-1.1", inside="delta")
    mechanism: Literal["gaussian", "tree"] = option(
        "gaussian", "gaussian: fresh noise, clients drawn (poisson); tree: DP-FTRL, clients wait their turn"
    )
    clip: float = option(20.0, "largest norm S of a client's upload; the first one of many", above=0)
    quantile: float | None = option(
        0.5, "share of clients that the clip moves towards leaving whole; none: fixed clip", inside="quantile"
    )
    clip_rate: float = option(0.2, "how fast the clip moves, as an exponent a round", above=0)
    count_noise: float | None = option(
        None,
        "standard deviation, in clients, of the noise on what is counted besides the update: the clients that the clip "
        "left whole (FedMed: the sum of losses). none: cohort / 20, but at least z; for losses also at most 5z",
        above=0,
    )
    population: int | None = option(
        None,
        "clients of an imagined fleet, for a SIMULATED guarantee; none: the real ones",
        least=1,
        flag="--population",
        short="With --dp: clients of an imagined fleet, for a SIMULATED guarantee.",
    )
    cohort: int | None = option(
        None, "clients a round of that fleet, whose noise is simulated; none: 1/200 of the population", least=1
    )
    separation: int | None = option(None, "tree: rounds a client waits between two; none: population / cohort", least=1)
    weight_cap: float | None = option(
        None, "methods by tokens: a client of n counts min(n/cap, 1); none: all count alike", above=0
    )
    mean_weight: float = option(1.0, "public guess of the clients' mean weight, which the sum is divided by", above=0)
    floor: float = option(
        0.1,
        "attention, top-K: least noisy mass that is divided by, as a share of the cohort (FedMed: of the "
        "least mass it can have; top-K: of the share beta)",
        above=0,
    )
    twin: bool = option(True, "also train the same rounds without clip and noise, for what privacy costs")

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.epsilon is not None or self.noise is not None

    def problems(self) -> list[str]:
        """Say what makes no sense, in words that name the key."""
        if not self.on:
            given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            what = "is set, but neither privacy.epsilon nor privacy.noise is; add --dp epsilon=NUMBER"
            return [f"privacy.{given[0]} {what}"] if given else []
        out = out_of_bounds("privacy", self)
        if self.mean_weight > 1:
            out.append(f"privacy.mean_weight is {self.mean_weight}; weights are at most 1")
        if self.cohort is not None and (self.population is None or self.cohort > self.population):
            out.append(
                f"privacy.cohort is {self.cohort}; it is drawn from privacy.population, which is less or not set"
            )
        if self.mechanism == "tree" and self.quantile is not None:
            out.append("privacy.mechanism=tree adds noise of one size to many rounds: set privacy.quantile=none")
        if self.mechanism == "gaussian" and self.separation is not None:
            out.append("privacy.separation is read by privacy.mechanism=tree")
        return out


LONGEST_SHOWN = 200  # characters of a value that stands in an error


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """Turn a value from TOML or the command line into the annotated type, or say what was expected.

    Example:
      >>> coerce("none", int | None, "data.clients") is None
      True
      >>> coerce("1e-3", float, "method.lr")
      0.001
    """
    options = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        none = value is None or (isinstance(value, str) and value.lower() == "none")
        if none and type(None) in options:
            return None
        annotation = next(t for t in options if t is not type(None))
        options = typing.get_args(annotation)
    try:
        if typing.get_origin(annotation) is Literal:
            if value in options:
                return value
            raise ConfigError(f"{where} is {_shown(value)}; expected one of {', '.join(map(str, options))}")
        if annotation is bool:
            known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
            if isinstance(value, bool):
                return value
            return known[str(value).lower()]
        if annotation is int:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(float(value)) if not str(value).lstrip("-").isdigit() else int(value)
        if annotation is float:
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
        if not isinstance(value, str | int | float | PurePath):
            raise ValueError
        return str(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        names = {float: "a finite number", int: "a whole number", bool: "true or false"}
        name = names.get(annotation) or getattr(annotation, "__name__", str(annotation))
        raise ConfigError(f"{where} is {_shown(value)}; expected {name}") from None


def _shown(value: Any) -> str:
    """A value in an error: as it is if it is short and plain, else its kind. It may be somebody's text."""
    if isinstance(value, str | int | float | PurePath):
        text = str(value)
        return f'"{text}"' if len(text) <= LONGEST_SHOWN and "\n" not in text else f"a text of {len(text):,} characters"
    return f"a {type(value).__name__}"


@functools.cache  # evaluated anew for every key otherwise: most of the time of reading a configuration
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the types of a section's fields, or of a function's arguments."""
    return typing.get_type_hints(annotated)
