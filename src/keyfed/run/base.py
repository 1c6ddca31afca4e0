"""The base model that comes with the package: what it is, whether it is whole, and whether it fits a corpus.

It is a small model of English words, trained in one place on public chat. `train` and `up` start from it where it fits
(`offer`); `train.init = "base"` asks for it, and `none` starts from random weights. Its folder keyfed/model/base holds

    manifest.json         what it is and how it was made; the sizes and SHA-256 of the other files
    weights.safetensors   matrices in eight bits, a scale a row (`keyfed.model.language_model`); vectors in float32
    vocab.json            its words, how they are written, how often and by how many clients
    lines.bin             hashes of lines of its own text, 32 bits each, ascending
    CARD.md               the same for people (`keyfed.keyboard.export`)
    ngram.safetensors     n-grams that three authors or more wrote (`keyfed.keyboard.compact`); may be missing

**Own text.** A corpus that the base has read is not a fair test of it. Lines of `LEAST_WORDS` words or more are
compared in lower case by their hash h, 64 bits; lines.bin has the upper half of those with h mod `every` = 0. The share

.. math:: s = |L ∩ B| / |L|

of the different lines L of the corpus with h mod `every` = 0, where B are those of the base, is an estimate of the
share of all lines, because the hash picks lines without regard to what they say.

**Carried by word.** Row i of the embedding, of the output matrix and of the output bias belongs to word i of *its*
vocabulary. Copying rows by their number would give every word some other word's vector; `carry` moves a row to where
its word went. All other layers know nothing of words and are copied as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load
from torch import Tensor

from keyfed.config.load import BASE, Config, config_from
from keyfed.errors import ConfigError, DataError, PrivacyError, RunError, ShapeMismatch
from keyfed.federated.cohort import derive_seed
from keyfed.files import BROKEN, parse_json
from keyfed.model.language_model import PRESETS, ModelSpec, Params, check_shapes, preset, shapes, widen
from keyfed.run.folder import Trained, load_model
from keyfed.run.prepare import Prepared
from keyfed.text.vocab import EOS, SPECIALS, UNK, Vocab, words_of

FOLDER = Path(__file__).parents[1] / "model" / "base"
FORMAT = 1
SAME_SOURCE = {"chat": ("irc",)}  # named corpora that are made of the same text
MANIFEST, WEIGHTS, VOCAB, LINES, CARD = "manifest.json", "weights.safetensors", "vocab.json", "lines.bin", "CARD.md"
COUNTS = "ngram.safetensors"
FILES = (WEIGHTS, VOCAB, LINES)
SPEC = ("name", "cell", "vocab", "embed", "hidden", "layers", "dense", "projection", "tied", "biases")
PRESET = "cifg"  # of the base
MOST_BYTES = 3_000_000  # of all files
LEAST_WORDS = 5  # words of a line that is compared: shorter ones are everybody's
LEAST_KNOWN = 0.6  # share of a text's words that the base must know to be offered or taken
OWN_SHARE = 0.01  # share of a text's lines from which on it counts as the base's own
MOST_LINES, SLICES = 20_000, 200  # lines of a corpus that are compared, and places of a large one they are read from
TOKENS_A_SLICE = 4_000
ANEW = "install keyfed again"


@dataclass(frozen=True, slots=True)
class Base:
    """The base model, read and checked.

    Attributes:
      sha256: of its weights file.
      manifest: as in manifest.json.
      forms: how words of the vocabulary are written, where not in lower case.
      uses: of each word, in its own text: tokens, and the clients who wrote them; empty where an older one has none.
      lines: hashes of lines of its own text, ascending.
      counts: the file of n-grams that comes along, None without one.
    """

    trained: Trained
    sha256: str
    manifest: Mapping[str, Any]
    forms: Mapping[str, str]
    uses: tuple[tuple[int, int], ...]
    lines: NDArray[np.uint32]
    counts: bytes | None = None

    @property
    def origin(self) -> str:
        """Its text and the licence of that, for people."""
        data = self.manifest["data"]
        return f"{data['name']}, {data['licence']}"


def dump_manifest(found: Mapping[str, Any]) -> bytes:
    """Return a manifest as its file has it; `seal` is the SHA-256 of the rest, so that damage to it is seen."""
    rest = {key: value for key, value in found.items() if key != "seal"}
    seal = hashlib.sha256(json.dumps(rest, ensure_ascii=False).encode()).hexdigest()
    return (json.dumps({**rest, "seal": seal}, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def load_base(folder: Path | None = None) -> Base:
    """Read the base model of this installation and check all of it.

    Raises:
      RunError: missing, damaged or of another format; says what to do.
    """
    folder = folder or FOLDER
    data = _bytes(folder / MANIFEST)
    try:
        found = parse_json(data)
        whole = isinstance(found, dict) and dump_manifest(found) == data
    except BROKEN as e:
        raise _damaged(folder / MANIFEST, e) from None
    if not whole:
        raise _damaged(folder / MANIFEST, "its seal is not that of its content")
    if found.get("format") != FORMAT:
        raise RunError(f"the base model has format {found.get('format')!r}, this keyfed reads {FORMAT}; {ANEW}")
    try:
        names = (*FILES, COUNTS) if COUNTS in found["files"] else FILES
        files = {name: _checked(folder / name, found["files"][name]) for name in names}
        vocab = Vocab.from_json(files[VOCAB].decode("utf-8"))
        spec = ModelSpec(**{key: found["model"][key] for key in SPEC})
        stored = widen(load(files[WEIGHTS]))
        config = config_from(found["settings"], str(folder / MANIFEST))
        words = parse_json(files[VOCAB])
        forms, uses = dict(words["forms"]), tuple((int(n), int(who)) for n, who in words.get("uses", ()))
        lines = np.frombuffer(files[LINES], "<u4").astype(np.uint32)
        every, licence = found["lines"]["every"], str(found["data"]["licence"])
        params = {name: torch.from_numpy(value) for name, value in stored.items()}
        expected = shapes(spec)
        sound = all(bool(torch.isfinite(p).all()) for p in params.values())
    except RunError:
        raise
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise _damaged(folder / MANIFEST, e) from None
    if (
        len(vocab) != spec.vocab
        or len(uses) not in (0, len(vocab))
        or type(every) is not int
        or every < 1
        or not licence
    ):
        raise _damaged(folder / MANIFEST, "model, vocabulary and lines do not go together")
    if not sound:
        raise _damaged(folder / WEIGHTS, "it holds numbers that are not finite")
    check_shapes(expected, params, spec.name, str(folder / WEIGHTS))
    trained = Trained(Path(BASE), config, config.method, spec, {name: params[name] for name in expected}, vocab)
    return Base(trained, found["files"][WEIGHTS]["sha256"], found, forms, uses, lines, files.get(COUNTS))


def load_start() -> Base:
    """Read the base model for a run that could start without it: the error says so, where `load_base` has no choice."""
    try:
        return load_base()
    except RunError as e:
        raise RunError(f"{e}, or start from random weights with --init none") from None


def is_base(run: Path) -> bool:
    """Tell whether a RUN of the command line means the base model: a run folder of that name comes first."""
    return run == Path(BASE) and not run.exists()


def load_run(run: Path) -> Trained:
    """Load a finished run's model, or the base model where RUN is `base`."""
    return load_base().trained if is_base(run) else load_model(run)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"the base model is not in this installation: {path} is missing; {ANEW}") from None
    except OSError as e:
        raise _damaged(path, e.strerror or e) from None


def _checked(path: Path, said: Mapping[str, Any]) -> bytes:
    data = _bytes(path)
    if len(data) != said["bytes"]:
        raise _damaged(path, f"{len(data):,} bytes, the manifest says {said['bytes']:,}")
    if hashlib.sha256(data).hexdigest() != said["sha256"]:
        raise _damaged(path, "its SHA-256 is not the manifest's")
    return data


def _damaged(path: Path, why: object) -> RunError:
    reason = str(why).splitlines()[0] if str(why) else type(why).__name__
    return RunError(f"the base model is damaged: {path}: {reason}; {ANEW}")


def line_hash(words: Sequence[str]) -> int | None:
    """Return the 64 bits by which a line is compared; None for a line too short to be anybody's.

    Example:
      >>> line_hash(["Nobody", "knows", "what", "that", "means"]) == line_hash("nobody knows what that means".split())
      True
      >>> line_hash("no idea , sorry !".split()) is None
      True
    """
    if sum(any(map(str.isalpha, word)) for word in words) < LEAST_WORDS:
        return None
    return int.from_bytes(hashlib.blake2b(" ".join(words).lower().encode(), digest_size=8).digest(), "big")


def line_hashes(lines: Iterable[Sequence[str]]) -> NDArray[np.uint64]:
    """Return the hash of every line that is long enough."""
    return np.fromiter((h for h in map(line_hash, lines) if h is not None), np.uint64)


def kept_hashes(hashes: NDArray[np.uint64], every: int) -> NDArray[np.uint32]:
    """Return what is compared: the upper halves of the hashes that are 0 mod `every`, each once, ascending."""
    return np.unique((hashes[hashes % np.uint64(every) == 0] >> np.uint64(32)).astype(np.uint32))


def shared_lines(base: Base, lines: Iterable[Sequence[str]]) -> float:
    """Return the share s of different lines, cut into words, that are in the base's own text; 0 for no lines."""
    mine = kept_hashes(line_hashes(lines), base.manifest["lines"]["every"])
    return float(np.isin(mine, base.lines).mean()) if len(mine) else 0.0


def lines_of(prepared: Prepared, most: int = MOST_LINES) -> Iterator[list[str]]:
    """Yield lines of a corpus, cut into words: training and held-out text, at most so many, evenly.

    A corpus that is kept encoded has no text; lines in which all words are in its vocabulary are read from its tokens.
    """
    people = prepared.population
    texts = [part for c in (*people.clients, *people.unseen) for part in (c.train, c.valid, c.test) if part]
    texts += [part for part in (people.valid, people.test) if part]
    total = sum(map(len, texts))
    if not total:
        yield from _lines_in_tokens(prepared)
        return
    every, place = -(-total // most), 0
    for text in texts:
        for line in text[-place % every :: every]:
            yield words_of(line, tokenised=prepared.corpus.tokenised, lower=True)
        place += len(text)


def _lines_in_tokens(prepared: Prepared) -> Iterator[list[str]]:
    flat, words = prepared.store.flat, prepared.vocab.words
    starts = np.unique(np.linspace(0, max(0, len(flat) - TOKENS_A_SLICE), SLICES).astype(np.int64))
    for start in starts.tolist():
        piece = flat[start : start + TOKENS_A_SLICE].numpy()
        ends = np.flatnonzero(piece == EOS)
        for first, end in zip(ends[:-1] + 1, ends[1:], strict=True):  # the first and the last line may be cut
            line = piece[first:end]
            if not (line == UNK).any():
                yield [words[i] for i in line.tolist()]


def known_share(base: Base, vocab: Vocab, counts: NDArray[np.int64] | None) -> float:
    """Return the share of a text's words that the base knows; numbers and marks, which are everybody's, do not count.

    Args:
      counts: training tokens of each entry of the vocabulary. None where nothing may be counted: entries then weigh
        as Zipf's law says, 1/rank, because vocabularies are written by falling frequency.
    """
    number = base.trained.vocab.index
    weights = 1.0 / np.arange(1, len(vocab) + 1) if counts is None else counts.astype(np.float64)
    lettered = np.array([i >= len(SPECIALS) and any(map(str.isalpha, w)) for i, w in enumerate(vocab.words)], np.bool_)
    known = np.array([word in number for word in vocab.words], np.bool_)
    total = weights[lettered].sum()
    return float(weights[lettered & known].sum() / total) if total else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """How the base model fits a corpus.

    Attributes:
      known: share of its words that the base knows.
      own: share of its lines that are in the base's own text; None where the text is not here to be compared.
    """

    known: float
    own: float | None

    @property
    def is_own(self) -> bool:
        """Whether the corpus counts as the base's own text."""
        return self.own is not None and self.own >= OWN_SHARE


def fit_of(base: Base, prepared: Prepared, counts: NDArray[np.int64] | None) -> Fit:
    """Measure how the base fits a corpus that is here."""
    return Fit(known_share(base, prepared.vocab, counts), shared_lines(base, lines_of(prepared)))


def describe_base(
    base: Base, spec: ModelSpec, vocab: Vocab, fit: Fit, matched: Mapping[str, Any], *, private: bool
) -> dict[str, Any]:
    """Return what result.json says of a start from the base; refuse one that does not fit.

    Args:
      private: nothing that was counted on clients' text is said.

    Raises:
      KeyfedError: another shape, characters, a text of which the base knows too little, or one that it has read and
        whose writers are to be protected.
    """
    match_words(base.trained.vocab, vocab)
    assert isinstance(base.trained.spec, ModelSpec)
    refuse_other_architecture(base.trained.spec, spec, "the base model")
    if fit.known < LEAST_KNOWN:
        raise ConfigError(f"{knows_line(fit, private=private)} Start from random weights with --init none")
    if private and fit.is_own:
        raise PrivacyError(
            "lines of this corpus are in the base model's own text, which was read without noise: no ε would hold for "
            "their writers; start from random weights with --init none"
        )
    shares = {"known": None, "own": None} if private else asdict(fit)
    return {
        "from": "base", "sha256": base.sha256, "data": base.manifest["data"]["name"],
        "licence": base.manifest["data"]["licence"], **matched, **shares, "is_own": fit.is_own,
    }  # fmt: skip


def knows_line(fit: Fit, *, private: bool) -> str:
    """Say how much of a text the base knows."""
    share = "too few" if private else f"{fit.known:.0%}"
    return (
        f"the base model is of English chat and knows {share} of the words of this text, fewer than "
        f"{LEAST_KNOWN:.0%}; is it of another language?"
    )


def own_warning(own: float | None) -> str:
    """Say that a run is judged on text that its start has read."""
    share = "lines" if own is None else f"{own:.1%} of the lines"
    return (
        f"WARNING: {share} of this corpus are in the base model's own text: the run does not show how well it learns "
        "from other people's; --init none starts from random weights"
    )


def not_offered(config: Config) -> str | None:
    """Say why a run that asks for no start is not offered the base, as far as its configuration shows it.

    An empty line is a run that begins at random by its nature: central training, which is how starts are made, and one
    with word vectors.
    """
    model, name = config.model, config.model.name
    if config.method == "central" or config.vectors.file is not None:
        return ""
    if name in PRESETS and preset(name).characters:
        return f"it reads words, and {name} characters"
    if name != PRESET or any(getattr(model, side) is not None for side in ("embed", "hidden", "layers", "tied")):
        return f"it has the shape of the preset {PRESET}, and this run trains {name} of another shape"
    return None


def offer(config: Config, prepared: Prepared, counts: NDArray[np.int64] | None) -> tuple[Config, str | None]:
    """Return a run that asks for no start and is `not_offered` for no reason: from the base where it fits, or why not.

    Args:
      prepared: its corpus.
      counts: training tokens of each entry of its vocabulary, None in a private run.

    Raises:
      RunError: the base model is missing or damaged.
    """
    base = load_start()
    if config.privacy.on:  # a choice by clients' lines would be un-noised: the corpus's name and the words decide
        name = base.manifest["data"]["name"]
        if config.data.name in (name, *SAME_SOURCE.get(name, ())):
            return config, "it was trained on this corpus"
        fit = Fit(known_share(base, prepared.vocab, None), None)
    else:
        fit = fit_of(base, prepared, counts)
    if fit.known < LEAST_KNOWN:
        return config, knows_line(fit, private=config.privacy.on)
    if fit.is_own:
        share = f"{OWN_SHARE:.0%} or more" if fit.own is None else f"{fit.own:.1%}"
        return config, f"{share} of the lines of this corpus are in its own text; --init base takes it all the same"
    return replace(config, train=replace(config.train, init=BASE)), None


Unmatched = Literal["uniform", "mean"]
BOUND = 0.05  # words without a row to carry start from U(−BOUND, BOUND)
BY_WORD = ("embedding.weight", "output.weight", "output.bias")
NOT_ARCHITECTURE = ("name", "vocab", "dropout")  # fields of a model that no shape and no arithmetic depends on


@dataclass(frozen=True, slots=True)
class Matched:
    """How much of a vocabulary had a row to carry.

    Attributes:
      rows: entries of the new vocabulary, specials included.
      matched: those that the old one has too.
      tokens: share of the new text's training tokens that are matched entries, line ends and unknown words (whose rows
        are carried as well) included; None where nobody counted.
    """

    rows: int
    matched: int
    tokens: float | None

    def as_dict(self) -> dict[str, Any]:
        """For result.json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Carried:
    """Initial parameters and how many of their rows were carried."""

    params: Params
    report: Matched


def match_words(vocab: Vocab, target: Vocab) -> NDArray[np.int64]:
    """Return for each entry of `target` its number in `vocab`, −1 where it has none; specials match by name.

    Raises:
      ConfigError: one holds words and the other characters.
      DataError: they share no word.

    Example:
      >>> old = Vocab("word", (*SPECIALS, "the", "cat"), lower=True, tokenised=True)
      >>> new = Vocab("word", (*SPECIALS, "cat", "dog"), lower=True, tokenised=True)
      >>> match_words(old, new).tolist()
      [0, 1, 2, 3, 5, -1]
    """
    if vocab.kind != target.kind:
        raise ConfigError(
            f"the model to start from reads {vocab.kind}s and this one {target.kind}s; start from one that reads "
            f"{target.kind}s"
        )
    number = {word: i for i, word in enumerate(vocab.words)}  # `Vocab.index` leaves the specials out
    rows = np.array([number.get(word, -1) for word in target.words], np.int64)
    if not (rows[len(SPECIALS) :] >= 0).any():
        raise DataError(
            f"none of the {len(target) - len(SPECIALS):,} {target.kind}s of this vocabulary is among the "
            f"{len(vocab) - len(SPECIALS):,} of the model to start from; is it of another language?"
        )
    return rows


def report_match(rows: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> Matched:
    """Say how much `match_words` found; `counts` are the training tokens of each entry."""
    found = rows >= 0
    tokens = None if counts is None else float(counts[found].sum() / max(1, counts.sum()))
    return Matched(len(rows), int(found.sum()), tokens)


def refuse_other_architecture(old: ModelSpec, new: ModelSpec, origin: str) -> None:
    """Raise ShapeMismatch unless two models differ in nothing but vocabulary, dropout and name."""
    sides = [f.name for f in fields(ModelSpec) if f.name not in NOT_ARCHITECTURE]
    if any(getattr(old, side) != getattr(new, side) for side in sides):
        raise ShapeMismatch(
            f"{origin} has the model {old.name} ({_in_words(old, sides)}), and this run trains {new.name} "
            f"({_in_words(new, sides)}); start from a model of the same shape, or at random (--init none)"
        )


def _in_words(spec: ModelSpec, sides: list[str]) -> str:
    return ", ".join(f"{side} {getattr(spec, side)}" for side in sides if getattr(spec, side) is not None)


def carry(
    params: Params,
    vocab: Vocab,
    target_spec: ModelSpec,
    target_vocab: Vocab,
    seed: int,
    unmatched: Unmatched = "uniform",
    counts: NDArray[np.int64] | None = None,
) -> Carried:
    r"""Return initial parameters of `target_spec` from those of the same architecture over another vocabulary.

    .. math::  θ'[i] = θ[j]\ \text{where}\ \mathrm{word}'_i = \mathrm{word}_j,\ \text{else}\ U(−0.05, 0.05)
               \ \text{or}\ \tfrac1V \sum_j θ[j]

    Args:
      seed: with the layer's name it seeds the rows of words that `vocab` lacks.
      unmatched: how these start: drawn, or as the mean over the words of `vocab` (specials aside).
      counts: training tokens of each entry of `target_vocab`, for the report.

    Raises:
      ShapeMismatch: another architecture, by the shapes of its layers.
    """
    rows = match_words(vocab, target_vocab)
    have = {name: tuple(p.shape) for name, p in params.items()}
    # Everything but the number of words must agree.
    want = {name: (len(vocab), *shape[1:]) if name in BY_WORD else shape for name, shape in shapes(target_spec).items()}
    if have != want:
        check_shapes(want, params, target_spec.name, "the model to start from")
    found, places = torch.from_numpy(rows >= 0), torch.from_numpy(rows[rows >= 0])
    carried: Params = {}
    for name in want:
        if name in BY_WORD:
            carried[name] = _filler(params[name], name, len(target_vocab), seed, unmatched)
            carried[name][found] = params[name][places]
        else:
            carried[name] = params[name].clone()
    return Carried(carried, report_match(rows, counts))


def _filler(old: Tensor, name: str, rows: int, seed: int, unmatched: Unmatched) -> Tensor:
    """Rows for words that have none."""
    if unmatched == "mean":
        return old[len(SPECIALS) :].mean(0).expand(rows, *old.shape[1:]).clone()
    generator = torch.Generator().manual_seed(derive_seed(seed, "carry", name))
    return torch.empty(rows, *old.shape[1:], dtype=old.dtype).uniform_(-BOUND, BOUND, generator=generator)
