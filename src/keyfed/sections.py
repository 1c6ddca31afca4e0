"""The sections of a configuration: one frozen dataclass per concept, every option with its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which text, whose, and how it is cut."""

    name: str = field(default="sotu", metadata={"help": "corpus name or path of a folder or file"})
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
    batches: Literal["stream", "sentences"] = field(
        default="stream", metadata={"help": "contiguous text with carried state, or one line at a time"}
    )
    window: int | None = field(default=None, metadata={"help": "tokens of a training window; none: the model's own"})
    max_sentences: int | None = field(default=None, metadata={"help": "lines per client and round; none: all"})
    max_tokens: int | None = field(default=None, metadata={"help": "tokens per client and round; none: all"})
    author_column: str | None = field(default=None, metadata={"help": "author column of a CSV/JSONL; none: detected"})
    text_column: str | None = field(default=None, metadata={"help": "text column of a CSV/JSONL; none: detected"})


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
        default=None, metadata={"help": "run folder whose weights to start from, carried by word; none: random"}
    )
    unmatched: Literal["uniform", "mean"] = field(
        default="uniform",
        metadata={"help": "rows of words that the run in init lacks: U(-0.05, 0.05), or the mean of its rows"},
    )
    frozen_rounds: int = field(
        default=0,
        metadata={"help": "first rounds in which the embedding is neither trained nor sent up; train.rounds: always"},
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
    floor: int = field(default=3, metadata={"help": "cohort below which a client takes no part"})


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
