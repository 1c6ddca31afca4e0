"""Large corpora are encoded once: the tokens are kept on disk and mapped by every run that asks for the same.

A cache folder holds one shard (`keyfed.text.shards`) each of training text, held-out streams and names of clients left
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
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from keyfed.config import Config
from keyfed.engine.problem import map_store
from keyfed.errors import DataError
from keyfed.model.presets import preset
from keyfed.run.encode import Encoded, Ids, Text, encode, held_out, no_window, read_text, unseen_streams, window_of
from keyfed.text.clients import Population
from keyfed.text.corpus import Corpus, Skipped
from keyfed.text.named import is_path
from keyfed.text.shards import PackedNames, ShardWriter, streams_of
from keyfed.text.vocab import UNK, Vocab, VocabSummary

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
    except OSError:
        return None  # reading the corpus will say what is wrong
    options = {
        "version": VERSION,
        "content": content.hexdigest(),
        "seed": config.train.seed,
        "window": window_of(config),
        "characters": preset(config.model.name).characters,
        **{key: getattr(data, key) for key in ("partition", "clients", "unseen", "alpha", "vocab", "lower")},
        **{key: getattr(data, key) for key in ("min_clients", "author_column", "text_column")},
    }
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return root / key[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_cache(config: Config, place: Path) -> None:
    """Encode a corpus into the cache; the streams are written one by one, never held together."""
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
    text, window, seed = read_text(config), window_of(config), config.train.seed
    longest = 0
    unknown = tokens = 0
    with ShardWriter(folder / "train") as train, ShardWriter(folder / "excluded") as excluded:
        for client in text.population.clients:
            ids = text.vocab.encode(client.train)
            longest = max(longest, len(ids))
            if len(ids) > window:
                train.add(client.name, ids)
                unknown, tokens = unknown + int((ids == UNK).sum()), tokens + len(ids)
            else:
                excluded.add(client.name, ids[:0])
    if not tokens:
        raise no_window(text, longest, window)
    oov = {"train": unknown / tokens}
    for part in ("valid", "test"):
        oov[part] = _write_part(folder / part, held_out(text, _held(part), seed))
    _write_part(folder / "unseen", unseen_streams(text, seed))
    (folder / VOCAB).write_text(text.vocab.to_json(), "utf-8")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {**_about(text), "oov": oov, "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")


def _held(part: str) -> Literal["valid", "test"]:
    return "valid" if part == "valid" else "test"


def _write_part(folder: Path, streams: Iterable[tuple[str, Ids]]) -> float:
    """Write held-out streams; return their share of unknown words."""
    unknown = tokens = 0
    with ShardWriter(folder) as shard:
        for name, ids in streams:
            shard.add(name, ids)
            unknown, tokens = unknown + int((ids == UNK).sum()), tokens + len(ids)
    return unknown / tokens if tokens else 0.0


def _about(text: Text) -> dict[str, Any]:
    """What a run says about a corpus without having its text."""
    corpus, population = text.corpus, text.population
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
        "published": [population.valid is not None, population.test is not None],
        "natural": population.natural,
        "partition": population.partition,
        "vocab_summary": asdict(text.summary),
    }


def _whole(place: Path) -> dict[str, Any] | None:
    """Return the manifest if every file is as it was written."""
    try:
        manifest = dict(json.loads((place / MANIFEST).read_text("utf-8")))
        if all(_sha256(place / name) == sha256 for name, sha256 in manifest["files"].items()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
            population=Population((), (), valid, test, found["natural"], found["partition"]),
            vocab=Vocab.from_json((place / VOCAB).read_text("utf-8")),
            vocab_summary=VocabSummary(**found["vocab_summary"]),
            store=map_store(place / "train"),
            **{part: dict(streams_of(place / part)) for part in PARTS},
            excluded=PackedNames(place / "excluded"),
            oov=found["oov"],
        )
    except (OSError, KeyError, TypeError, ValueError, DataError):
        return None  # a manifest that was tampered with: the corpus is encoded again
