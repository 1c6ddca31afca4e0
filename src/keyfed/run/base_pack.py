"""From a finished run to the folder of the base model: weights in eight bits, vocabulary, hashes of its text, card.

`keyfed export RUN --base --out FOLDER` is this, and `make base` trains the run first. The folder appears whole or not
at all. What rounding costs is measured on the run's own validation and test text, and is in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save

import keyfed
from keyfed.config import BASE, Config, to_document
from keyfed.errors import RunError
from keyfed.files import write_atomically
from keyfed.keyboard.forms import written_forms
from keyfed.keyboard.quantise import quantise, widen
from keyfed.model.language_model import ModelSpec, Params, parameter_count, shapes
from keyfed.run import base
from keyfed.run.evaluate import headline
from keyfed.run.folder import Trained, load_model, read_result, read_run_toml
from keyfed.run.prepare import Prepared
from keyfed.run.results import with_data

LINES_BYTES = 300_000  # of the hashes of its lines
# Licences under which a model of the text may come along, as a corpus's own line names them.
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
      RunError: the run is not finished, reads characters, started from another model, has a text whose licence is not
        known to permit it, or its files are too large; nothing is written then.
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
        "keyfed": keyfed.__version__,
        "model": {**{key: getattr(spec, key) for key in base.SPEC}, "parameters": parameter_count(spec)},
        "precision": "int8",
        "data": _about(prepared, licence),
        "lines": {"least_words": base.LEAST_WORDS, "every": every, "kept": len(hashes) // 4},
        "training": {
            "method": trained.method, "rounds": result["best_round"], "tokens": result["tokens_trained"],
            "seed": trained.config.train.seed, "model_sha256": _sha256((run / "model.safetensors").read_bytes()),
            "before": before,
        },
        "figures": _figures(spec, trained.params, rounded, prepared, again=before is not None),
        "settings": _settings(trained.config),
        "files": {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()},
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
    return {
        "data_sha256": made.get("data_sha256"), "rounds": result["best_round"], "tokens": result["tokens_trained"],
        "seed": old.config.train.seed, "model_sha256": _sha256((folder / "model.safetensors").read_bytes()),
        "settings": _settings(old.config),
    }  # fmt: skip


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
        "training_tokens": len(prepared.store.flat),
    }


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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def card_text(manifest: Mapping[str, Any]) -> str:
    """Return the card of a base model, all of it from the manifest."""
    return "\n".join(_card(manifest)) + "\n"


def _card(m: Mapping[str, Any]) -> Iterator[str]:
    model, data, training, size = m["model"], m["data"], m["training"], sum(f["bytes"] for f in m["files"].values())
    yield from (
        "# The base model",
        "",
        f"A next-word model of English chat: {model['name']}, {model['vocab']:,} entries, {model['parameters']:,} "
        f"parameters in eight bits, {size / 1e6:.2f} MB. `keyfed train` and `keyfed up` start from it where it fits; "
        "`--init none` does not. `keyfed keyboard base` types on it.",
        "",
        "## Text and licence",
        "",
        f"Trained in one place, without differential privacy, on the corpus `{data['name']}`: {data['about']}.",
        f"{data['clients']:,} authors, {data['training_tokens']:,} training tokens. SHA-256 of the text:",
        f"`{data['sha256']}`.",
        "",
        f"Licence of the text: {data['licence']}. Who passes the model on names that text and its licence, as here.",
        "",
        "## Figures",
        "",
        "On the corpus's own held-out text, which the model has not been trained on:",
        "",
        "| text | tokens | perplexity | top-1 of words | top-3 of words | perplexity before rounding |",
        "|---|---:|---:|---:|---:|---:|",
    )
    names = {"valid": "validation", "test": "test", "unseen": "authors never trained on"}
    for part, found in m["figures"].items():
        own, before = found["int8"], found["fp32"]
        yield (
            f"| {names[part]} | {own['tokens']:,} | {own['perplexity']:.2f} | {own['top1_words']:.2%} | "
            f"{own['top3_words']:.2%} | {before['perplexity']:.2f} |"
        )
    yield from ("", "## How it was made", "")
    before = training["before"]
    if before is None:
        yield f"`make base` with keyfed {m['keyfed']}: {_trained(training)}. All settings are in `manifest.json`."
    else:
        yield from (
            f"{_trained({**training, **before}).capitalize()}, on an earlier text of the same corpus, SHA-256",
            f"`{before['data_sha256']}`. That text was mended afterwards.",
            "The weights were carried by word into the vocabulary of the mended text; words that are no longer in it",
            f"went. After that: {training['rounds']:,} rounds. All settings are in `manifest.json`; `make base` trains",
            "from scratch on the mended text.",
        )
    yield from (
        "",
        "## Limits",
        "",
        "- It is a start for training on other text. By itself it knows one channel's subject and manner.",
        "- People wrote the text, as they are. The model may suggest what is wrong, rude or unfair.",
        "- No noise was added: that somebody's public line was in the text can be guessed from the model. A run with",
        "  `--dp` that starts here protects its own clients; its statement names the start as public and not covered.",
        "- It is of English. Of a text of which it knows less than 60 % of the words it is not taken.",
        "- A corpus that shares 1 % or more of its lines with this text does not get it unless it is named: what is",
        f"  tested there has been read. `lines.bin` has hashes of one in {m['lines']['every']} of the lines of "
        f"{m['lines']['least_words']} words or more.",
        "",
        "## Checksums (SHA-256)",
        "",
        *(f"- `{name}` `{entry['sha256']}`" for name, entry in m["files"].items()),
    )


def _trained(training: Mapping[str, Any]) -> str:
    tokens = f", {training['tokens']:,} tokens read" if training["tokens"] else ""
    return f"method {training['method']}, {training['rounds']:,} rounds{tokens}, seed {training['seed']}"


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
