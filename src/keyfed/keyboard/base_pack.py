"""From a finished run to the folder of the base model: weights in eight bits, vocabulary, hashes of its text, card.

`keyfed export RUN --base --out FOLDER` is this, and `make base` trains the run first. The folder appears whole or not
at all. What rounding costs is measured on the run's own validation and test text, and is in the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save

from keyfed import __version__
from keyfed.config.load import BASE, Config, to_document
from keyfed.errors import RunError
from keyfed.files import write_atomically
from keyfed.keyboard.bundle import sha256
from keyfed.keyboard.export import written_forms
from keyfed.model.language_model import ModelSpec, Params, parameter_count, quantise, shapes, widen
from keyfed.reports.document import render
from keyfed.reports.finished import with_data
from keyfed.run import base
from keyfed.run.evaluate import headline
from keyfed.run.folder import Trained, load_model, read_result, read_run_toml
from keyfed.run.prepare import Prepared
from keyfed.text.vocab import SPECIALS, UNK, words_of

LINES_BYTES = 300_000  # of the hashes of its lines
# Licences under which a model of the text may be shipped, as a corpus's own line names them.
LICENCE = re.compile(r"CC BY(?:-SA)? \d\.\d|CC0|public domain|MIT", re.IGNORECASE)
PATHS = {"data": ("dir", "vocab_file"), "train": ("init", "device"), "vectors": ("file",)}  # of the machine it was on
FIGURES = ("perplexity", "top1_words", "top3_words", "tokens")


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written: where, and the manifest."""

    out: Path
    manifest: dict[str, Any]


def pack_base(run: Path, out: Path) -> Packed:
    """Write a run's model to `out` in the format of the base model; the run may come from another machine.

    Raises:
      RunError: the run is not finished, reads characters, is private, started from another model, has a text whose
        licence is not known to permit it, or its files are too large; nothing is written then.
    """
    if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {base.MANIFEST, base.CARD, *base.FILES}):
        raise RunError(f"{out} holds something else than a base model; choose another --out")
    trained, prepared = with_data(run, None, text=True)
    result = read_result(run)
    spec = _fitting(trained, result)
    before = _before(trained)
    licence = _licence(prepared)
    whole = {name: trained.params[name].float().numpy() for name in shapes(spec)}
    stored = quantise(whole)
    rounded = {name: torch.from_numpy(value) for name, value in widen(stored).items()}
    forms = written_forms((c.train for c in prepared.population.trained), trained.vocab)
    every, hashes = own_lines(prepared)
    files = {
        base.WEIGHTS: bytes(save(stored)),
        base.VOCAB: json.dumps({**json.loads(trained.vocab.to_json()), "forms": forms}, ensure_ascii=False).encode(),
        base.LINES: hashes,
    }
    assert result is not None
    manifest = {
        "format": base.FORMAT,
        "keyfed": __version__,
        "model": {**{key: getattr(spec, key) for key in base.SPEC}, "parameters": parameter_count(spec)},
        "precision": "int8",
        "data": _about(prepared, licence),
        "lines": {"least_words": base.LEAST_WORDS, "every": every, "kept": len(hashes) // 4},
        "training": {"method": trained.method, **_rounds(trained.config, result, run), "before": before},
        "figures": _figures(spec, trained.params, rounded, prepared, again=before is not None),
        "settings": _settings(trained.config),
        "files": {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in files.items()},
    }  # fmt: skip
    files[base.MANIFEST] = base.dump_manifest(manifest)
    files[base.CARD] = card_text(json.loads(files[base.MANIFEST])).encode()
    size = sum(map(len, files.values()))
    if size > base.MOST_BYTES:
        raise RunError(f"the base model takes {size:,} bytes, at most {base.MOST_BYTES:,}; train a smaller vocabulary")
    out.mkdir(parents=True, exist_ok=True)
    for name in (*base.FILES, base.CARD, base.MANIFEST):  # the manifest last: until then the old one refuses the rest
        write_atomically(out / name, files[name])
    base.load_base(out)
    return Packed(out, manifest)


def _fitting(trained: Trained, result: Mapping[str, Any] | None) -> ModelSpec:
    folder, config = trained.folder, trained.config
    if result is None:
        raise RunError(f"{folder} has no result yet; a base model is packed from a finished run")
    if not isinstance(trained.spec, ModelSpec) or trained.vocab.kind != "word":
        raise RunError(f"{folder} holds a model of characters or of a module; a base model is a preset of words")
    if config.vectors.file is not None:
        raise RunError(f"{folder} started from {config.vectors.file}: the card could not say what is in it")
    if config.privacy.on:
        raise RunError(f"{folder} was trained with differential privacy: the card would say that no noise was added")
    return trained.spec


def _before(trained: Trained) -> dict[str, Any] | None:
    """Say which run the run started from: one on an earlier text of the same corpus, from scratch; None for random.

    A corpus may be mended after a model was trained on it. Its weights are then carried into the new vocabulary.
    """
    if trained.config.train.init is None:
        return None
    folder = Path(trained.config.train.init)
    if trained.config.train.init == BASE:
        raise RunError(f"{trained.folder} started from the base model; train one from scratch")
    old, (_, made), result = load_model(folder), read_run_toml(folder), read_result(folder)
    same = old.config.data.name == trained.config.data.name
    if not same or old.config.train.init is not None or old.config.vectors.file is not None or result is None:
        raise RunError(
            f"{trained.folder} started from {folder}, which is no finished run from scratch on the same corpus: the "
            "card could not say what is in it; train one from scratch"
        )
    rounds = _rounds(old.config, result, folder)
    return {"data_sha256": made.get("data_sha256"), **rounds, "settings": _settings(old.config)}


def _rounds(config: Config, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return how long a run trained, what it read in all its rounds, and which round's model was chosen."""
    return {
        "rounds": result["rounds"],
        "best_round": result["best_round"],
        "tokens": result["tokens_trained"],
        "seed": config.train.seed,
        "model_sha256": sha256((folder / "model.safetensors").read_bytes()),
    }


def _licence(prepared: Prepared) -> str:
    corpus = prepared.corpus
    found = LICENCE.search(corpus.about)
    if found is None:
        raise RunError(
            f"{corpus.name} names no licence under which a model of it may come along ({corpus.about or 'nothing'}); "
            "train the base on a text with CC BY, CC0 or in the public domain"
        )
    return found[0]


def own_lines(prepared: Prepared) -> tuple[int, bytes]:
    """Return of how many lines one is kept, and the hashes of these: as many as fit into `LINES_BYTES`."""
    hashes, every = base.line_hashes(base.lines_of(prepared, most=1 << 62)), 1
    while (kept := base.kept_hashes(hashes, every)).nbytes > LINES_BYTES:
        every *= 2
    return every, kept.astype("<u4").tobytes()


def _about(prepared: Prepared, licence: str) -> dict[str, Any]:
    corpus, people = prepared.corpus, prepared.population
    return {
        "name": corpus.name,
        "about": corpus.about,
        "licence": licence,
        "sha256": corpus.fingerprint(),
        "clients": len(people.clients) + len(people.unseen),
        "trained_clients": len(prepared.store),
        "unseen_clients": len(people.unseen),
        "training_tokens": len(prepared.store.flat),
        "held_out": "clients" if people.valid is None and people.test is None else "corpus",
        "parts": count_parts(prepared),
    }


def count_parts(prepared: Prepared) -> dict[str, dict[str, int]]:
    """Count in the training text and in each held-out text.

    Returns:
      for each: `placeholders`, tokens that the text itself has as `<unk>`; `lines`, different lines of
      `run.start.base.LEAST_WORDS` words or more; `shared`, how many of these are in the training text.
    """
    people, names = prepared.population, frozenset(prepared.store.names)
    texts = {
        "train": [c.train for c in people.clients if c.name in names],
        "valid": [*(c.valid for c in people.clients), people.valid or ()],
        "test": [*(c.test for c in people.clients), people.test or ()],
        "unseen": [c.test for c in people.unseen],
    }
    found, trained = {}, frozenset[int]()
    for part, lines in texts.items():
        cut = [words_of(line, tokenised=prepared.corpus.tokenised, lower=True) for text in lines for line in text]
        hashes = frozenset(base.line_hashes(cut).tolist())
        trained = trained or hashes
        placeholders = sum(words.count(SPECIALS[UNK]) for words in cut)
        found[part] = {"placeholders": placeholders, "lines": len(hashes), "shared": len(hashes & trained)}
    return found


def _figures(spec: ModelSpec, whole: Params, rounded: Params, prepared: Prepared, *, again: bool) -> dict[str, Any]:
    """Test both precisions on the same held-out text, read as the run is read.

    Args:
      again: the run started from one on an earlier text. Clients held out now may have been trained on then: they are
        left out. The ends of the clients' own text are held out in both.
    """
    found: dict[str, Any] = {}
    parts = (("valid", prepared.valid), ("test", prepared.test), ("unseen", {} if again else prepared.unseen))
    for part, streams in parts:
        if streams:
            scores = [headline(spec, params, streams, prepared.batching.kind)[1] for params in (whole, rounded)]
            found[part] = {
                precision: {key: score[key] for key in FIGURES}
                for precision, score in zip(("fp32", "int8"), scores, strict=True)
            }
    return found


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the run's configuration without what belongs to the machine that it was trained on."""
    document = {section: dict(values) for section, values in to_document(config).items()}
    for section, keys in PATHS.items():
        for key in keys:
            del document[section][key]
    return document


def card_text(manifest: Mapping[str, Any]) -> str:
    """Return the card of a base model, all of it from the manifest."""
    return render("base_card.md", **manifest, least_known=base.LEAST_KNOWN, own_share=base.OWN_SHARE)


def packed_text(done: Packed) -> str:
    """What the terminal shows: where, how large, how close."""
    m = done.manifest
    size = sum(entry["bytes"] for entry in m["files"].values())
    shown = [
        f"  {part}: perplexity {f['int8']['perplexity']:.2f} in eight bits, {f['fp32']['perplexity']:.2f} in float32"
        for part, f in m["figures"].items()
    ]
    return "\n".join(
        [
            f"{done.out}: {m['model']['name']}, {m['model']['parameters']:,} parameters, {size / 1e6:.2f} MB",
            f"  {m['data']['name']}, {m['data']['licence']}; weights SHA-256 {m['files'][base.WEIGHTS]['sha256'][:12]}",
            *shown,
        ]
    )
