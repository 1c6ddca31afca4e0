"""The sections of a configuration: one frozen dataclass per concept, every option with its help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which text, whose, and how it is cut."""

    name: str = field(default="chat", metadata={"help": "corpus name or path of a folder or file"})
    dir: str | None = field(default=None, metadata={"help": "folder that holds the named corpora (else KEYFED_DATA)"})
    partition: str | None = field(
        default=None, metadata={"help": "natural, iid, contiguous, quantity or dirichlet; none: the corpus's own"}
    )
    clients: int | None = field(default=None, metadata={"help": "number of shards, where the partition makes shards"})
    unseen: float = field(default=0.1, metadata={"help": "share of natural clients never trained on"})
    alpha: float = field(default=0.5, metadata={"help": "concentration of the dirichlet partition"})
    clients_part: str | None = field(
        default=None,
        metadata={"help": "train on one part of the clients, 1/2 or 2/2, drawn by seed and name; none: on all"},
    )
    vocab: int | None = field(
        default=10_000, metadata={"help": "words in the vocabulary, four specials included; none: every word"}
    )
    lower: bool = field(default=True, metadata={"help": "lower-case words (a character model keeps its case)"})
    min_clients: int | None = field(
        default=None, metadata={"help": "clients that must use a word; none: 2 on natural partitions, else 1"}
    )
    vocab_file: str | None = field(
        default=None,
        metadata={
            "help": "vocab.json to use, of `keyfed vocab` or of another run, whose own lower-casing holds; data.vocab, "
            "data.lower and data.min_clients are then not read. none: built from the training text"
        },
    )
    batches: Literal["stream", "sentences", "packed"] | None = field(
        default=None,
        metadata={
            "help": "stream: contiguous text with carried state; sentences: single lines of similar length, padded; "
            "packed: whole lines one after the other, the state reset at each; none: packed where the corpus is known "
            "to hold messages (chat, irc, reddit), else stream"
        },
    )
    window: int | None = field(default=None, metadata={"help": "tokens of a training window; none: the model's own"})
    max_sentences: int | None = field(default=None, metadata={"help": "lines per client and round; none: all"})
    max_tokens: int | None = field(default=None, metadata={"help": "tokens per client and round; none: all"})
    author_column: str | None = field(default=None, metadata={"help": "author column of a CSV/JSONL; none: detected"})
    text_column: str | None = field(default=None, metadata={"help": "text column of a CSV/JSONL; none: detected"})

    @property
    def batching(self) -> Literal["stream", "sentences", "packed"]:
        """`batches`, or what fits the corpus: messages are read one by one, running text goes on from line to line."""
        from keyfed.text.catalogue import NAMED

        known = NAMED.get(self.name)
        return self.batches or ("packed" if known is not None and known.messages else "stream")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A preset and what to change of it."""

    name: str = field(default="cifg", metadata={"help": "preset, see `keyfed methods --models`"})
    dropout: float = field(default=0.0, metadata={"help": "rate after the embedding and every recurrent layer"})
    tied: bool | None = field(default=None, metadata={"help": "output layer = embedding; none: the preset's"})
    embed: int | None = field(default=None, metadata={"help": "width of the embedding; none: the preset's"})
    hidden: int | None = field(default=None, metadata={"help": "recurrent units; none: the preset's"})
    layers: int | None = field(default=None, metadata={"help": "recurrent layers; none: the preset's"})


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, with whom, and on what."""

    rounds: int = field(default=20, metadata={"help": "federated rounds"})
    cohort: int = field(default=10, metadata={"help": "clients drawn each round"})
    seed: int = field(default=1, metadata={"help": "everything random derives from it"})
    schedule: Literal["constant", "linear", "cosine"] = field(
        default="constant", metadata={"help": "how the local step size falls over the whole run, from lr to lr · final"}
    )
    warmup: float = field(
        default=0.0, metadata={"help": "share of the rounds in which the local step size rises to lr"}
    )
    final: float = field(
        default=0.0, metadata={"help": "share of the local step size that is left at the end of a schedule"}
    )
    average: float | None = field(
        default=None,
        metadata={
            "help": "weight of the past in the average of the model over rounds, which is validated, tested and "
            "exported; 0.98 averages about 50 rounds. none: the last round's model"
        },
    )
    eval_every: int = field(default=1, metadata={"help": "rounds between validations"})
    valid_tokens: int | None = field(
        default=20_000, metadata={"help": "validation tokens read each time, evenly from the streams; none: all"}
    )
    test_tokens: int | None = field(
        default=None, metadata={"help": "test tokens read at the end, evenly from the streams; none: all"}
    )
    checkpoint_every: int = field(default=1, metadata={"help": "rounds between checkpoints"})
    block: int | None = field(default=None, metadata={"help": "clients stacked in one computation; none: chosen"})
    workers: int | None = field(default=None, metadata={"help": "worker processes on a CPU; none: chosen"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    precision: Literal["fp32", "bf16"] = field(
        default="fp32", metadata={"help": "of products on a GPU; bf16 is faster and keeps float32 weights"}
    )
    baselines: bool = field(default=True, metadata={"help": "unigram and Kneser–Ney on the same tokens"})
    central: bool = field(
        default=False, metadata={"help": "also train the same model centrally on the same number of tokens"}
    )
    until: str | None = field(
        default=None, metadata={"help": "stop at a validation result, perplexity=NUMBER or nats=NUMBER; none: never"}
    )
    init: str | None = field(
        default=None,
        metadata={
            "help": "run folder whose weights to start from, carried by word; base: the model that comes along; none: "
            "random (`keyfed train` and `keyfed up` take base where it fits and nothing is said)"
        },
    )
    unmatched: Literal["uniform", "mean"] = field(
        default="uniform",
        metadata={"help": "rows of words that the run in init lacks: U(-0.05, 0.05), or the mean of its rows"},
    )
    frozen_rounds: int = field(
        default=0,
        metadata={"help": "first rounds in which the embedding is neither trained nor sent up; train.rounds: always"},
    )
    curves: bool = field(
        default=False, metadata={"help": "write loss and accuracy of every local batch and epoch to curves.jsonl"}
    )
    rollback: float | None = field(
        default=None,
        metadata={
            "help": "a model is bad when validation perplexity is this many times the least so far: the run goes back "
            "to the last good one and halves the local step size; 0: never. none: 3 with real clients; in a simulation "
            "1000 times a uniform guess. A private run looks at θ only: validation is not noised"
        },
    )
    ngram_order: int = field(default=5, metadata={"help": "order of the Kneser–Ney baseline"})


@dataclass(frozen=True, slots=True)
class VectorsConfig:
    """Pretrained word vectors for the embedding before the first round."""

    file: str | None = field(
        default=None,
        metadata={"help": "word vectors (GloVe, FastText, word2vec, npz, safetensors) or a transformer; none: none"},
    )
    dim: int | None = field(default=None, metadata={"help": "numbers a word in the end; none: the embedding's width"})
    reduce: Literal["pca", "pp-pca-pp"] = field(
        default="pca", metadata={"help": "how wider ones are reduced: pca, or pp-pca-pp (which is always applied)"}
    )
    remove: int = field(default=7, metadata={"help": "components D that pp-pca-pp removes before and after"})
    pieces: Literal["mean", "first"] = field(
        default="mean", metadata={"help": "a word's vector in a transformer: the mean of its pieces, or the first"}
    )


@dataclass(frozen=True, slots=True)
class SecureConfig:
    """Secure aggregation: uploads are masked, and the server sees sums only."""

    on: bool = field(default=False, metadata={"help": "mask every upload; clients weigh themselves by public numbers"})
    threshold: int | None = field(
        default=None,
        metadata={"help": "clients that must stay until a sum is opened; none: more than two thirds of those called"},
    )
    floor: int = field(
        default=3, metadata={"help": "clients of a sum below which no client takes part; one may ask for more"}
    )
    clear: bool = field(
        default=False,
        metadata={"help": "weigh as a secure run does, without masks: the plain run that one is compared with"},
    )


LIMIT, SUM_LIMIT, TOKEN_LIMIT, AGAINST = 1.5, 3.0, 2.0, 0.25  # of a federation whose configuration sets none


@dataclass(frozen=True, slots=True)
class UploadConfig:
    """How uploads are compressed, and which are refused."""

    keep: float = field(
        default=1.0,
        metadata={"help": "share of an upload's entries that is sent, the largest ones; the rest is kept for later"},
    )
    quantise: Literal["none", "fp16", "int8"] = field(
        default="none", metadata={"help": "none, fp16, or int8 with stochastic rounding"}
    )
    bound: float | None = field(
        default=None, metadata={"help": "largest norm of an upload; a larger one is refused. none: no bound"}
    )
    limit: float | None = field(
        default=None,
        metadata={
            "help": "largest norm of an upload, as a multiple of the run's median one; a longer one is shortened. With "
            "secure sums it is that of the mean upload, and a longer one is not taken. none: in a federation "
            f"{LIMIT:g}, with secure sums {SUM_LIMIT:g}, in a simulation no limit; 0: no limit"
        },
    )
    token_limit: float | None = field(
        default=None,
        metadata={
            "help": "most tokens that a client counts for, as a multiple of the run's median (plain sums). "
            f"none: {TOKEN_LIMIT:g} in a federation, no limit in a simulation; 0: no limit"
        },
    )
    against: float | None = field(
        default=None,
        metadata={
            "help": "how far an upload may point against the others of its round, as a share of how much those agree; "
            "one beyond it is left out (plain sums, from four uploads on; memory for the uploads of a round). "
            f"none: {AGAINST:g} in a federation, uncompared in a simulation; 0: uncompared"
        },
    )


@dataclass(frozen=True, slots=True)
class PrivacyConfig:
    """Client-level differential privacy: the budget, the clip, and the population it is meant for."""

    epsilon: float | None = field(
        default=None,
        metadata={"help": "budget of the whole run, which the noise is calibrated to and which ends it; none: none"},
    )
    noise: float | None = field(
        default=None, metadata={"help": "noise multiplier z: noise of the sum / clip; none: calibrated to epsilon"}
    )
    delta: float | None = field(default=None, metadata={"help": "delta; none: population^-1.1"})
    mechanism: Literal["gaussian", "tree"] = field(
        default="gaussian",
        metadata={"help": "gaussian: fresh noise, clients drawn (poisson); tree: DP-FTRL, clients wait their turn"},
    )
    clip: float = field(default=20.0, metadata={"help": "largest norm S of a client's upload; the first one of many"})
    quantile: float | None = field(
        default=0.5, metadata={"help": "share of clients that the clip moves towards leaving whole; none: fixed clip"}
    )
    clip_rate: float = field(default=0.2, metadata={"help": "how fast the clip moves, as an exponent a round"})
    count_noise: float | None = field(
        default=None,
        metadata={
            "help": "noise of counts (of unclipped clients; FedMed: of losses), in clients; none: a twentieth of the "
            "cohort, at least z, of losses at most 5z"
        },
    )
    population: int | None = field(
        default=None, metadata={"help": "clients of an imagined fleet, for a SIMULATED guarantee; none: the real ones"}
    )
    cohort: int | None = field(
        default=None,
        metadata={"help": "clients a round of that fleet, whose noise is simulated; none: 1/200 of the population"},
    )
    separation: int | None = field(
        default=None, metadata={"help": "tree: rounds a client waits between two; none: population / cohort"}
    )
    weight_cap: float | None = field(
        default=None, metadata={"help": "methods by tokens: a client of n counts min(n/cap, 1); none: all count alike"}
    )
    mean_weight: float = field(
        default=1.0, metadata={"help": "public guess of the clients' mean weight, which the sum is divided by"}
    )
    floor: float = field(
        default=0.1,
        metadata={
            "help": "attention, top-K: least noisy mass that is divided by, as a share of the cohort (FedMed: of the "
            "least mass it can have; top-K: of the share beta)"
        },
    )
    twin: bool = field(
        default=True, metadata={"help": "also train the same rounds without clip and noise, for what privacy costs"}
    )

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.epsilon is not None or self.noise is not None

    def problems(self) -> list[str]:
        """Say what makes no sense, in words that name the key."""
        if not self.on:
            given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            return [f"privacy.{given[0]} is set, but neither privacy.epsilon nor privacy.noise is"] if given else []
        out = []
        for key in ("epsilon", "noise", "clip", "clip_rate", "count_noise", "weight_cap", "mean_weight", "floor"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                out.append(f"privacy.{key} is {value}; expected > 0")
        for key in ("delta", "quantile"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                out.append(f"privacy.{key} is {value}; expected 0 < {key} < 1")
        for key in ("population", "cohort", "separation"):
            value = getattr(self, key)
            if value is not None and value < 1:
                out.append(f"privacy.{key} is {value}; at least 1")
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
