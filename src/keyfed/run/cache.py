"""Large corpora are encoded once: the tokens are kept on disk and mapped by every run that asks for the same.

A cache folder holds one shard (`keyfed.text.ragged`) each of training text, held-out streams and names of clients left
out, the vocabulary, and a manifest with the SHA-256 of every file. It is named after the bytes of the corpus and every
option that the tokens depend on, appears whole or not at all, and is made again when a file of it has changed. Corpora
below `LARGE` bytes are encoded in memory each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keyfed.config.load import Config
from keyfed.engine.problem import map_store
from keyfed.errors import DataError
from keyfed.files import BROKEN, read_json
from keyfed.model.presets import preset
from keyfed.run.encode import (
    Encoded,
    default_partition,
    draw_streams,
    encode,
    given_vocab,
    no_window,
    stream_keys,
    vocab_rules,
    window_of,
)
from keyfed.text.catalogue import is_path
from keyfed.text.corpus import Corpus, Skipped
from keyfed.text.partition import LinePartition, Population, in_part, partition_lines
from keyfed.text.ragged import PackedNames, Ragged, ShardWriter, streams_of
from keyfed.text.table import Lexicon, LineTable, Streams, count_types, encode_lists, lexicon_of, tabulate, vocab_of
from keyfed.text.vocab import UNK, Vocab, VocabSummary, summarise, vocab_sha256

VERSION = 1  # of the folder's layout and of what encoding means; another one makes every corpus be encoded again
LARGE = 32 << 20  # bytes of a corpus, from which on it is worth keeping
MANIFEST, VOCAB = "manifest.json", "vocab.json"
PARTS = ("valid", "test", "unseen")


def encoded(config: Config, *, text: bool = False) -> Encoded:
    """Return the corpus as tokens, from the cache where it is large; the result is the same.

    Args:
      text: whether the lines are wanted too, which the cache does not have.

    Raises:
      DataError: nothing to train on, or the cache cannot be written.
    """
    place = None if text else cache_folder(config)
    if place is None:
        return encode(config)
    found = open_cache(place)
    if found is None:
        write_cache(config, place)
        found = open_cache(place)
    if found is None:
        raise DataError(f"{place}: changed while it was read; start again")
    return found


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
        "characters": preset(config.model.name).characters,
        **{key: getattr(data, key) for key in ("partition", "clients", "unseen", "alpha", "vocab", "lower")},
        **{key: getattr(data, key) for key in ("min_clients", "author_column", "text_column", "clients_part")},
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
    data, seed, given = config.data, config.train.seed, given_vocab(config)
    kind: Literal["word", "char"] = "char" if preset(config.model.name).characters else "word"
    table = tabulate(
        Path(data.name).expanduser(),
        folder / "lines",
        kind,
        author_column=data.author_column,
        text_column=data.text_column,
    )
    partition, clients = default_partition(config, table.corpus)
    cut = partition_lines(table.index, partition, clients=clients, seed=seed, unseen=data.unseen, alpha=data.alpha)
    ours = _trained(cut, data.clients_part, seed)
    natural = partition == "natural"
    rules = vocab_rules(config, natural=natural, clients=len(ours.names))
    lexicon = lexicon_of(table, kind, lower=rules["lower"] if given is None else given.lower)
    if given is None:
        vocab, summary = vocab_of(table, lexicon, ours.train, **rules)
    else:
        vocab = replace(given, tokenised=table.corpus.tokenised)
        counts, _ = count_types(table, lexicon, ours.train, 0)
        summary = summarise(vocab, counts, len(ours.train.flat))
    reader = _Reader(table, lexicon, vocab)
    oov = {"train": _write_train(folder, reader, ours, window_of(config))}
    keys = stream_keys(cut.names, seed) if natural else None
    for part, number, lists in (("valid", 0, cut.valid), ("test", 1, cut.test)):
        if cut.pooled is None:
            oov[part] = _write_part(folder / part, reader, cut.names, lists, keys)
        else:
            oov[part] = _write_part(folder / part, reader, [part], Ragged.of([cut.pooled[number]]))
    _write_part(folder / "unseen", reader, cut.unseen_names, cut.unseen, stream_keys(cut.unseen_names, seed))
    shutil.rmtree(folder / "lines")
    (folder / VOCAB).write_text(vocab.to_json(), "utf-8")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {
        **_about(table.corpus, partition, summary),
        "part": data.clients_part,
        "oov": oov,
        "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")


def _trained(cut: LinePartition, part: str | None, seed: int) -> LinePartition:
    """Names and training lines of the clients of a part; held-out text stays everybody's."""
    if part is None:
        return cut
    mine = in_part(cut.names, part, seed)
    return replace(cut, names=list(compress(cut.names, mine)), train=cut.train.take(np.flatnonzero(mine)))


@dataclass(frozen=True, slots=True)
class _Reader:
    table: LineTable
    lexicon: Lexicon
    vocab: Vocab

    def streams(self, lists: Ragged) -> Iterator[Streams]:
        return encode_lists(self.table, self.lexicon, self.vocab, lists)


def _write_train(folder: Path, reader: _Reader, cut: LinePartition, window: int) -> float:
    """Write training text of those who have a window of it, and the names of the others; return the unknown share."""
    longest = unknown = tokens = 0
    with ShardWriter(folder / "train") as train, ShardWriter(folder / "excluded") as excluded:
        for found in reader.streams(cut.train):
            names = cut.names[found.lists]
            kept = found.lengths > window
            ids = found.tokens[np.repeat(kept, found.lengths)]
            train.extend(list(compress(names, kept)), found.lengths[kept].tolist(), ids)
            short = list(compress(names, ~kept))
            excluded.extend(short, [0] * len(short), ids[:0])
            longest = max(longest, int(found.lengths.max()))
            unknown, tokens = unknown + int((ids == UNK).sum()), tokens + len(ids)
    if not tokens:
        raise no_window(reader.table.corpus.name, len(cut.names), longest, window)
    return unknown / tokens


def _write_part(
    folder: Path, reader: _Reader, names: Sequence[str], lists: Ragged, keys: NDArray[np.int64] | None = None
) -> float:
    """Write held-out streams of more than a token; return their share of unknown words."""
    drawn = draw_streams(np.flatnonzero(lists.counts()), keys)
    unknown = tokens = 0
    with ShardWriter(folder) as shard:
        for found in reader.streams(lists.take(np.array(drawn, np.int64))):
            own = [names[k] for k in drawn[found.lists]]
            kept = found.lengths > 1
            ids = found.tokens[np.repeat(kept, found.lengths)]
            shard.extend(list(compress(own, kept)), found.lengths[kept].tolist(), ids)
            unknown, tokens = unknown + int((ids == UNK).sum()), tokens + len(ids)
    return unknown / tokens if tokens else 0.0


def _about(corpus: Corpus, partition: str, summary: VocabSummary) -> dict[str, Any]:
    """What a run says about a corpus without having its text."""
    natural = partition == "natural"
    return {
        "corpus": {
            "name": corpus.name,
            "about": corpus.about,
            "tokenised": corpus.tokenised,
            "natural": corpus.natural,
            "characters": corpus.characters,
            "sha256": corpus.fingerprint(),
        },
        "skipped": [asdict(s) for s in corpus.skipped],
        "published": [not natural, not natural],  # pooled, rather; a path has no published text
        "natural": natural,
        "partition": partition,
        "vocab_summary": asdict(summary),
    }


def _whole(place: Path) -> dict[str, Any] | None:
    """Return the manifest if every file is as it was written."""
    try:
        manifest = dict(read_json(place / MANIFEST))
        if all(_sha256(place / name) == sha256 for name, sha256 in manifest["files"].items()):
            return manifest
    except (OSError, *BROKEN):
        pass
    return None


def open_cache(place: Path) -> Encoded | None:
    """Map an encoded corpus; None if it is not there or damaged."""
    found = _whole(place)
    if found is None:
        return None
    try:
        valid, test = (() if published else None for published in found["published"])
        return Encoded(
            corpus=Corpus(authors=(), skipped=tuple(Skipped(**s) for s in found["skipped"]), **found["corpus"]),
            population=Population((), (), valid, test, found["natural"], found["partition"], found["part"]),
            vocab=Vocab.from_json((place / VOCAB).read_text("utf-8")),
            vocab_summary=VocabSummary(**found["vocab_summary"]),
            store=map_store(place / "train"),
            **{part: dict(streams_of(place / part)) for part in PARTS},
            excluded=PackedNames(place / "excluded"),
            oov=found["oov"],
        )
    except (OSError, *BROKEN, DataError):
        return None  # a manifest that was tampered with: the corpus is encoded again
