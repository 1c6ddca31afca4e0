"""From a corpus's name to token streams: read, give to clients, build the vocabulary, encode (`encode_table`).

Large corpora are encoded once. The tokens are kept on disk and mapped by every run that wants the same. A cache folder
holds one shard (`keyfed.text.ragged`) each of training text, held-out streams and names of clients left out, the
vocabulary, and a manifest with the SHA-256 of every file. It is named after the bytes of the corpus and every option
that the tokens depend on, appears whole or not at all, and is made again when a file of it has changed. Corpora below
`LARGE` bytes are encoded in memory each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keyfed.config.load import Config
from keyfed.config.schema import read_options
from keyfed.engine.problem import ClientStore, make_store, map_store
from keyfed.errors import DataError, TooLittleText
from keyfed.files import BROKEN, read_json
from keyfed.model.language_model import preset
from keyfed.text.catalogue import NAMED, is_path, load_corpus
from keyfed.text.corpus import Corpus, Skipped
from keyfed.text.language import need_blanks
from keyfed.text.partition import LineIndex, LinePartition, Population, line_index, partition_lines, texts_of
from keyfed.text.ragged import PackedNames, Ragged, ShardWriter, streams_of
from keyfed.text.table import LineTable, StreamBlock, count_types, encode_lists, table_of, tabulate
from keyfed.text.vocab import UNK, TokenKind, Vocab, VocabRules, VocabSummary, read_vocab, vocab_sha256

Ids = NDArray[np.int32]
Streams = dict[str, Ids]  # one held-out stream a client, or one named after the published file

VERSION = 2  # of the folder's layout and of what encoding means; another one makes every corpus be encoded again
LARGE = 32 << 20  # bytes of a corpus, from which on it is worth keeping
MANIFEST, VOCAB = "manifest.json", "vocab.json"
HELD_OUT = ("valid", "test")
MOST_STREAMS = 10_000  # clients whose held-out text is read; more would take longer to judge than to train


@dataclass(frozen=True, slots=True)
class Encoded:
    """A corpus as tokens.

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
    store: ClientStore
    valid: Streams
    test: Streams
    unseen: Streams
    excluded: Sequence[str]
    oov: dict[str, float]


def window_of(config: Config) -> int:
    """Tokens of a training window: the configuration's, or the model's own."""
    return config.data.window or preset(config.model.name).window


def kind_of(config: Config) -> TokenKind:
    """What the model reads: words or characters."""
    return "char" if preset(config.model.name).characters else "word"


def _lower(config: Config, known: Vocab | None) -> bool:
    return known.lower if known is not None else config.data.lower and kind_of(config) == "word"


def vocab_from_file(config: Config) -> Vocab | None:
    """Read the vocabulary that the configuration names; None where it is to be built."""
    return None if config.data.vocab_file is None else read_vocab(Path(config.data.vocab_file), kind_of(config))


def read_people(config: Config) -> tuple[Corpus, Population]:
    """Load a corpus and give its text to clients."""
    corpus = _load(config)
    return corpus, texts_of(corpus, _partition(config, line_index(corpus)))


def _load(config: Config) -> Corpus:
    data = config.data
    folder = Path(data.dir) if data.dir else None
    return load_corpus(data.name, data_dir=folder, **read_options(data))


def _partition(config: Config, index: LineIndex) -> LinePartition:
    """Give lines to clients by the configured partition, or the corpus's own."""
    data, known = config.data, NAMED.get(config.data.name)
    kind = data.partition or (known.partition if known else ("natural" if index.natural else "iid"))
    clients = data.clients
    if clients is None and known is not None and kind != "natural" and kind != "quantity":
        clients = known.clients
    return partition_lines(
        index,
        kind,
        clients=clients,
        seed=config.train.seed,
        unseen=data.unseen,
        alpha=data.alpha,
        part=data.clients_part,
        clients_by=data.clients_by,
        share=data.train_share,
    )


def stream_keys(names: Sequence[str], seed: int) -> NDArray[np.int64] | None:
    """Return by what clients' held-out text is drawn, where there are too many to read all: a hash of their names.

    So a client's validation and test text are drawn together.
    """
    if len(names) <= MOST_STREAMS:
        return None
    # derive_seed(seed, "held out", name) for a million names: what they have in common is hashed once.
    common = hashlib.blake2b(f"int:{seed}/str:held out/str:".encode(), digest_size=8)

    def digest(name: str) -> bytes:
        mine = common.copy()
        mine.update(name.encode())
        return mine.digest()

    return (np.frombuffer(b"".join(map(digest, names)), ">u8") >> 2).astype(np.int64)


def draw_streams(having: NDArray[np.int64], keys: NDArray[np.int64] | None) -> list[int]:
    """Return at most MOST_STREAMS of the clients who have held-out text, in order."""
    if keys is None or len(having) <= MOST_STREAMS:
        return [int(k) for k in having]
    return sorted(having[np.argsort(keys[having], kind="stable")[:MOST_STREAMS]].tolist())


@dataclass(slots=True)
class MemoryShard:
    """What `ShardWriter` writes, in memory."""

    names: list[str] = field(default_factory=list)
    streams: list[Ids] = field(default_factory=list)

    def extend(self, names: Sequence[str], lengths: Sequence[int], streams: Ids) -> None:
        """Take the streams of several clients, which lie one after the other."""
        self.names += names
        self.streams += np.split(streams, np.cumsum(lengths)[:-1]) if len(names) else []

    def __enter__(self) -> MemoryShard:
        return self

    def __exit__(self, *error: object) -> None:
        pass


Shard = MemoryShard | ShardWriter


def encode_table(
    config: Config, table: LineTable, known: Vocab | None, shard: Callable[[str], Shard]
) -> tuple[LinePartition, Vocab, VocabSummary, dict[str, float]]:
    """Give the lines of a corpus to clients, choose the vocabulary and write the streams.

    Args:
      known: the vocabulary of a file; None builds one, from training text only.
      shard: opens what is written to, by name: `train`, `excluded` (names only), `valid`, `test` and `unseen`.

    Returns:
      The partition, the vocabulary, what it keeps, and the share of unknown words in train, valid and test.

    Raises:
      DataError: nothing to train on.
    """
    window, seed = window_of(config), config.train.seed
    cut = _partition(config, table.index)
    names, train = cut.trained()
    if kind_of(config) == "word" and not table.corpus.tokenised and is_path(config.data.name):
        need_blanks(table.types, config.data.name)
    # On natural clients a word that only one of them used stays out.
    words = kind_of(config) == "word"
    rules = VocabRules(
        kind=kind_of(config),
        size=config.data.vocab if words else None,
        lower=_lower(config, known),
        min_clients=config.data.min_clients or (2 if cut.kind == "natural" and words and len(names) > 1 else 1),
        known=known,
    )
    counts, holders = count_types(table, train, rules.min_clients)
    vocab, summary = rules.choose(
        counts, holders, len(train.flat), clients=len(names), tokenised=table.corpus.tokenised
    )
    with shard("train") as streams, shard("excluded") as excluded:
        rate, longest = _write_streams(streams, encode_lists(table, vocab, train), names, window, excluded)
    if rate is None:
        raise TooLittleText(
            f"{table.corpus.name}: no client has the {window + 1} tokens of one window (the largest of "
            f"{len(names)} has {longest}); lower data.window or give more text"
        )
    unknown = {"train": rate}
    held_out: list[tuple[str, Sequence[str], Ragged]]
    if cut.outside[1] is None:
        held_out = [("valid", cut.names, cut.valid), ("test", cut.names, cut.test)]
    else:
        held_out = [
            (split, [split], Ragged.of([() if lines is None else lines]))
            for split, lines in zip(HELD_OUT, cut.outside, strict=True)
        ]
    for split, whose, lists in (*held_out, ("unseen", cut.unseen_names, cut.unseen)):
        drawn = draw_streams(np.flatnonzero(lists.counts()), stream_keys(whose, seed))
        blocks = encode_lists(table, vocab, lists.take(np.array(drawn, np.int64)))
        with shard(split) as streams:
            unknown[split] = _write_streams(streams, blocks, [whose[k] for k in drawn], 1)[0] or 0.0
    return cut, vocab, summary, {split: unknown[split] for split in ("train", *HELD_OUT)}


def _write_streams(
    shard: Shard, streams: Iterable[StreamBlock], names: Sequence[str], least: int, excluded: Shard | None = None
) -> tuple[float | None, int]:
    """Write the streams of more than `least` tokens, and the names of the others to `excluded`.

    Returns the share of unknown words, None where nothing was written, and the tokens of the longest stream.
    """
    longest = unknown = tokens = 0
    for block in streams:
        own, kept = names[block.lists], block.lengths > least
        ids = block.tokens[np.repeat(kept, block.lengths)]
        shard.extend(list(compress(own, kept)), block.lengths[kept].tolist(), ids)
        if excluded is not None:
            short = list(compress(own, ~kept))
            excluded.extend(short, [0] * len(short), ids[:0])
        longest = max(longest, int(block.lengths.max()))
        unknown, tokens = unknown + int((ids == UNK).sum()), tokens + len(ids)
    return unknown / tokens if tokens else None, longest


def encode(config: Config, *, text: bool = False) -> Encoded:
    """Return a corpus as tokens, from the cache where it is large; the result is the same.

    Args:
      text: whether the lines are wanted too, which the cache does not have.

    Raises:
      DataError: nothing to train on, or the cache cannot be written.
    """
    place = None if text else cache_folder(config)
    if place is not None:
        found = open_cache(place)
        if found is None:
            write_cache(config, place)
            found = open_cache(place)
        if found is None:
            raise DataError(f"{place}: changed while it was read; start again")
        return found
    known = vocab_from_file(config)  # what is wrong with it is said before a long reading
    corpus = _load(config)
    shards = {name: MemoryShard() for name in ("train", "excluded", *HELD_OUT, "unseen")}
    table = table_of(corpus, kind_of(config), lower=_lower(config, known))
    cut, vocab, summary, oov = encode_table(config, table, known, shards.__getitem__)
    valid, test, unseen = (
        dict(zip(shards[name].names, shards[name].streams, strict=True)) for name in (*HELD_OUT, "unseen")
    )
    return Encoded(
        corpus=corpus,
        population=texts_of(corpus, cut),
        vocab=vocab,
        vocab_summary=summary,
        store=make_store(shards["train"].streams, shards["train"].names),
        valid=valid,
        test=test,
        unseen=unseen,
        excluded=tuple(shards["excluded"].names),
        oov=oov,
    )


# The cache


def cache_root() -> Path | None:
    """Where encoded corpora lie: KEYFED_CACHE, else keyfed/encoded in the user's cache; None if KEYFED_CACHE is ""."""
    chosen = os.environ.get("KEYFED_CACHE")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keyfed" / "encoded"


def cache_folder(config: Config) -> Path | None:
    """Where this corpus, encoded by these options, lies or would lie; None for one that is not kept."""
    root, data = cache_root(), config.data
    if root is None or not is_path(data.name):
        return None
    source = Path(data.name).expanduser()
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    try:
        if sum(p.stat().st_size for p in files) < LARGE:
            return None
        content = hashlib.sha256()
        for path in files:
            inside = path.relative_to(source.parent).as_posix()
            content.update(f"{inside}\0{_sha256(path)}\0".encode(errors="surrogateescape"))
        vocabulary = vocab_sha256(data.vocab_file)
    except (OSError, DataError):
        return None  # reading the corpus will say what is wrong
    options = {
        "version": VERSION,
        "content": content.hexdigest(),
        "seed": config.train.seed,
        "window": window_of(config),
        "characters": kind_of(config) == "char",
        **{key: getattr(data, key) for key in ("partition", "clients", "unseen", "alpha", "vocab", "lower")},
        **{key: getattr(data, key) for key in ("min_clients", "author_column", "text_column", "clients_part")},
        **({} if data.clients_by == "seed" else {"clients_by": data.clients_by}),
        **({} if data.train_share == 1 else {"train_share": data.train_share}),
        **{key: value for key in ("max_words", "me", "folder") if (value := getattr(data, key)) is not None},
        **({} if vocabulary is None else {"vocabulary": vocabulary}),
    }
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return root / key[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_cache(config: Config, place: Path) -> None:
    """Encode a corpus into the cache; neither text nor streams are held together."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)  # people's text
        _write(config, temporary)
        _put(temporary, place)
    except OSError as error:
        raise DataError(
            f"{place.parent}: the encoded corpus could not be written ({error.strerror or error}); set KEYFED_CACHE to "
            'a folder with space, or to "" to encode in memory'
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, place: Path) -> None:
    """Rename a whole folder into place; a damaged one goes, one that another process just made stays."""
    if place.exists() and open_cache(place) is None:
        aside = temporary.with_name(temporary.name + ".old")
        with contextlib.suppress(FileNotFoundError):
            place.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileExistsError):
        try:
            temporary.rename(place)
        except OSError:
            if not place.exists():
                raise


def _write(config: Config, folder: Path) -> None:
    data, known = config.data, vocab_from_file(config)
    table = tabulate(
        Path(data.name).expanduser(),
        folder / "lines",
        kind_of(config),
        lower=_lower(config, known),
        **read_options(data),
    )
    cut, vocab, summary, oov = encode_table(config, table, known, lambda name: ShardWriter(folder / name))
    shutil.rmtree(folder / "lines", ignore_errors=True)
    (folder / VOCAB).write_text(vocab.to_json(), "utf-8")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    kept = ("name", "about", "tokenised", "natural", "characters", "formats", "files")
    natural = cut.kind == "natural"
    manifest = {
        "corpus": {**{key: getattr(table.corpus, key) for key in kept}, "sha256": table.corpus.fingerprint()},
        "skipped": [asdict(s) for s in table.corpus.skipped],
        "published": [not natural, not natural],  # pooled, rather; a path has no published text
        "natural": natural,
        "partition": cut.kind,
        "vocab_summary": asdict(summary),
        "part": data.clients_part,
        "oov": oov,
        "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")


def open_cache(place: Path) -> Encoded | None:
    """Map an encoded corpus; None if it is not there, or a file of it is not as it was written."""
    try:
        found = dict(read_json(place / MANIFEST))
        if any(_sha256(place / name) != sha256 for name, sha256 in found["files"].items()):
            return None
        valid, test = (() if published else None for published in found["published"])
        return Encoded(
            corpus=Corpus(
                authors=(),
                skipped=tuple(Skipped(**s) for s in found["skipped"]),
                **{**found["corpus"], "formats": tuple(map(str, found["corpus"]["formats"]))},
            ),
            population=Population((), (), valid, test, found["natural"], found["partition"], found["part"]),
            vocab=Vocab.from_json((place / VOCAB).read_text("utf-8")),
            vocab_summary=VocabSummary(**found["vocab_summary"]),
            store=map_store(place / "train"),
            **{part: dict(streams_of(place / part)) for part in (*HELD_OUT, "unseen")},
            excluded=PackedNames(place / "excluded"),
            oov=found["oov"],
        )
    except (OSError, *BROKEN, DataError):
        return None  # the corpus is encoded again
