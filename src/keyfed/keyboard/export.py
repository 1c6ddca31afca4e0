"""From a run to a folder: `export_run` writes what a page can type on, `pack_base` the base model of the package.

An export is graph, weights, vocabulary, test vectors and manifest. It appears whole or not at all: all is written next
to it, read back, compared with the trained network on held-out text, and only then renamed into place.

`keyfed export RUN --base --out FOLDER` packs a base model, and `make base` trains the run first: weights in eight bits,
vocabulary, hashes of its text, card. What rounding costs is measured on the run's own validation and test text, and is
in the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from keyfed import __version__
from keyfed.config.load import BASE, Config, to_document
from keyfed.errors import ConfigError, DataError, DownloadError, RunError
from keyfed.files import write_atomically
from keyfed.keyboard import bundle
from keyfed.keyboard.compact import (
    counts_for_page,
    has_counts,
    pack,
    read_counts,
    read_mixture,
    said_of,
    said_of_counts,
)
from keyfed.keyboard.dictionary import LICENCES, Lists, count_uses, lists_of
from keyfed.keyboard.graph import (
    MOST,
    Parity,
    make_vectors,
    measure,
    need,
    sample_tokens,
    state_widths,
    step_graph,
)
from keyfed.model.language_model import PRESETS, ModelSpec, Params, parameter_count, quantise, shapes, widen
from keyfed.reports.document import render
from keyfed.reports.finished import corpus_of, with_data
from keyfed.run import base
from keyfed.run.console import human_bytes
from keyfed.run.evaluate import headline
from keyfed.run.folder import Trained, load_model, read_result, read_run_toml, resume_command
from keyfed.run.prepare import Prepared
from keyfed.text.catalogue import NAMED, at_hand, is_path
from keyfed.text.vocab import SPECIALS, UNK, Vocab, words_of

GOAL = 0.97  # of the three words shown, as many are the same in eight bits
# What the export of a private run does not have: each would need noise of its own.
LEFT_OUT = ("n-grams", "written forms", "a check on held-out text")  # the first only where they have none
LEAST_CLIENTS = 2  # who must have written a form
_ENDS = frozenset(".!?…:")  # a colon, too: what follows it may be a sentence of its own
_BETWEEN = re.compile(r"[\W_]+")  # quotes and brackets do not begin a sentence by themselves


def written_forms(clients: Iterable[Iterable[str]], vocab: Vocab, least: int = LEAST_CLIENTS) -> dict[str, str]:
    """Return {word: form} for the words of a lower-cased vocabulary whose usual form is another than the word.

    A vocabulary in lower case cannot tell `london` from `London`. A word at the start of a sentence says nothing about
    it and is not counted. A form enters only if `least` clients or more write it: what one person alone writes is not
    shipped.

    Args:
      clients: the training lines of each client.
      least: clients who must have written a form.

    Example:
      >>> vocab = Vocab("word", ("<pad>", "<bos>", "<eos>", "<unk>", "to", "london"), lower=True, tokenised=False)
      >>> written_forms([["Go to London."], ["To London"], ["to LONDON"]], vocab)
      {'london': 'London'}
    """
    if not vocab.lower or vocab.kind != "word":
        return {}
    uses: dict[str, Counter[str]] = defaultdict(Counter)
    writers: Counter[str] = Counter()
    for lines in clients:
        mine = Counter(form for line in lines for form in _inside(line, vocab.tokenised))
        for form, count in mine.items():
            word = form.lower()
            if word in vocab.index:
                uses[word][form] += count
                writers[form] += 1
    found = {word: _usual(word, forms, writers, least) for word, forms in uses.items()}
    return {word: found[word] for word in vocab.words if found.get(word, word) != word}


def _usual(word: str, forms: Counter[str], writers: Counter[str], least: int) -> str:
    """The most frequent form that enough clients write; the word itself at equal counts."""
    shared = {form: count for form, count in forms.items() if form == word or writers[form] >= least}
    return min(shared, key=lambda form: (-shared[form], form != word, form), default=word)


def _inside(line: str, tokenised: bool) -> Iterator[str]:
    """Yield the words of a line as they are written, less those that begin a sentence."""
    begins = True
    for token in words_of(line, tokenised=tokenised, lower=False):
        if _BETWEEN.fullmatch(token):
            begins = begins or token in _ENDS
            continue
        if not begins:
            yield token
        begins = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    out: Path
    manifest: dict[str, Any]  # as in manifest.json
    notes: tuple[str, ...] = ()  # lines for a person: what was left out and why


def export_run(folder: Path, out: Path | None = None, int8: bool = True) -> Exported:
    """Export a finished run's model to `out` (RUN/keyboard by default), in eight bits unless `int8` is false.

    Args:
      folder: the run, or `base` for the base model: its numbers are those of eight bits, in either precision. It has
        its own written forms and its own counts.

    Raises:
      RunError: the run is not finished or not of a preset, `out` is something else, or the graph does not say what the
        network says; nothing is left behind.
    """
    need("onnx", "onnxruntime")
    packaged = base.load_base() if base.is_base(folder) else None
    if packaged is not None and out is None:
        raise ConfigError("the base model has no folder of its own to be exported to; give --out")
    target = out or folder / "keyboard"
    trained = _load(folder) if packaged is None else packaged.trained
    spec = trained.spec
    assert isinstance(spec, ModelSpec)
    params = {name: trained.params[name].float().numpy() for name in shapes(spec)}
    if not all(np.isfinite(value).all() for value in params.values()):
        raise RunError(f"{folder}: the model holds numbers that are not finite; it cannot be exported")
    _refuse_other(target)
    text, notes = text_at_hand(trained) if packaged is None else (None, [])
    with _appearing(target) as temporary:
        graph = step_graph(spec).SerializeToString()
        files = {bundle.GRAPH: graph, bundle.WEIGHTS: bytes(save(quantise(params) if int8 else params))}
        shipped = widen(load(files[bundle.WEIGHTS]))
        streams = {} if text is None else {**text.test, **text.unseen}
        tokens, real = sample_tokens(streams, spec.vocab, lines=trained.reads_lines)
        what = f"held-out text of {text.corpus.name}" if real and text is not None else bundle.RANDOM
        found = measure(spec, graph, shipped, params, tokens, what)
        if not found.most <= MOST:
            raise RunError(
                f"{folder}: the exported graph differs from the trained network by {found.most:.1e} nats on "
                f"{found.text} (allowed {MOST:g}); nothing was written"
            )
        if int8 and found.text != bundle.RANDOM and found.top3_agreement < GOAL:
            notes.append(
                f"in eight bits {found.top3_agreement:.1%} of the words shown are the same, fewer than {GOAL:.0%}"
            )
        lists = lists_of(trained.vocab, text, packaged)
        files[bundle.VOCAB] = _vocabulary(trained, text, {} if packaged is None else packaged.forms, lists)
        if lists.dictionary:
            files[bundle.DICTIONARY] = lists.dictionary
        files[bundle.VECTORS] = json.dumps(make_vectors(spec, shipped, trained.vocab)).encode()
        counted: bytes | None = None if packaged is None else packaged.counts
        if packaged is None and trained.vocab.kind == "word":
            counted, said = counts_for_page(trained.folder, len(trained.vocab), private=trained.config.privacy.on)
            notes += said
        if counted is not None:
            files[bundle.NGRAM] = counted
        manifest = _manifest(trained, spec, files, found, packaged, int8=int8)
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        (temporary / bundle.MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        bundle.check_bundle(temporary)
    return Exported(target, manifest, tuple(notes))


def model_sum(folder: Path) -> str:
    """The sum of a run's model, by which an export knows whether it is of this model."""
    try:
        return bundle.sha256((folder / "model.safetensors").read_bytes())
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no model.safetensors: not a finished run; go on with `{resume_command(folder)}`"
        ) from None


def export_text(done: Exported) -> str:
    """What the terminal shows: where, how large, how close."""
    m, found = done.manifest, Parity(**done.manifest["parity"])
    sizes = [f"{name} {human_bytes(entry['bytes'])}" for name, entry in m["files"].items()]
    lines = [
        f"{done.out}: {m['model']['name']}, {m['model']['parameters']:,} parameters, {m['precision']}",
        "  " + ", ".join(sizes),
        f"  equal to the trained network within {found.most:.1e} nats at {found.positions:,} places of {found.text}",
    ]
    if m["precision"] == "int8":
        lines.append(f"  of the three words shown {found.top3_agreement:.2%} are the same as in fp32")
    return "\n".join([*lines, *(f"  {note}" for note in done.notes)])


def _load(folder: Path) -> Trained:
    _, made = read_run_toml(folder)
    if "module" in made:
        raise RunError(
            f"{folder} was trained with the module {made['module']}; only the models of the package can be exported: "
            f"{', '.join(PRESETS)}"
        )
    trained = load_model(folder)
    if not isinstance(trained.spec, ModelSpec):
        raise RunError(
            f"{folder}: the model {trained.spec.name} cannot be exported; it is none of {', '.join(PRESETS)}"
        )
    return trained


def text_at_hand(trained: Trained) -> tuple[Prepared | None, list[str]]:
    """The run's corpus if it is here and still the same; nothing is fetched for an export.

    The export of a private run reads no text: what is counted on text would be a release that no ledger has.
    """
    config, vocab = trained.config, trained.vocab
    if config.privacy.on:
        return None, [f"trained with --dp: without {', '.join(LEFT_OUT)}, for no noise covers them"]
    without = "; checked on random tokens, without written forms"
    if config.data.name in NAMED and not at_hand(config.data.name, Path(config.data.dir) if config.data.dir else None):
        return None, [f"the corpus {config.data.name} is not at hand{without}"]
    try:
        prepared = corpus_of(trained, text=vocab.lower and vocab.kind == "word")
    except (DataError, DownloadError) as e:
        return None, [f"{e}{without}"]
    if prepared.vocab != vocab:
        return None, [f"the text of {prepared.corpus.name} has changed since the run{without}"]
    return prepared, []


def spelling_of(trained: Trained, packaged: base.Base | None = None) -> tuple[Mapping[str, str], Lists]:
    """Return how a run's words are written, and its lists, as the page has them: as its export says, else by its text.

    Args:
      packaged: the base model, if that is what runs.
    """
    folder = trained.folder / "keyboard"
    if packaged is None and bundle.is_bundle(folder) and not trained.config.privacy.on:
        with suppress(RunError):  # a damaged one says nothing
            bundle.check_bundle(folder)
            vocab, forms = bundle.load_vocab(folder)
            if vocab == trained.vocab:
                return forms, bundle.load_lists(folder)
    text = text_at_hand(trained)[0] if packaged is None else None
    lists = lists_of(trained.vocab, text, packaged)
    if packaged is not None:
        return packaged.forms, lists
    return {} if text is None else written_forms((c.train for c in text.population.trained), trained.vocab), lists


def _vocabulary(trained: Trained, text: Prepared | None, forms: Mapping[str, str], lists: Lists) -> bytes:
    if text is not None:
        forms = written_forms((c.train for c in text.population.trained), trained.vocab)
    said = {"doubted": lists.doubted, "tilt": lists.tilt, "counted": lists.counted} if lists.dictionary else {}
    return json.dumps({**json.loads(trained.vocab.to_json()), "forms": dict(forms), **said}).encode()


def _manifest(
    trained: Trained,
    spec: ModelSpec,
    files: dict[str, bytes],
    found: Parity,
    packaged: base.Base | None,
    *,
    int8: bool,
) -> dict[str, Any]:
    config = trained.config
    if packaged is None:
        result, weights = read_result(trained.folder) or {}, model_sum(trained.folder)
    else:
        said = packaged.manifest["training"]  # one packed by an older version has the chosen round only
        best = said.get("best_round", said["rounds"])
        result, weights = {"best_round": best, "start": {"from": "random"}}, packaged.sha256
    name = config.data.name
    return {
        "format": bundle.FORMAT,
        "keyfed": __version__,
        "model": {
            **{key: getattr(spec, key) for key in base.SPEC},
            "kind": trained.vocab.kind,
            "width": spec.width,
            "parameters": parameter_count(spec),
        },
        "run": {
            "method": trained.method,
            "data": Path(name).name if is_path(name) else name,
            "rounds": result.get("best_round", config.train.rounds),
            "seed": config.train.seed,
            "model_sha256": weights,
            "start": _start(config, result.get("start") or {}),
        },
        "precision": "int8" if int8 else "fp32",
        "states": [{"name": state, "width": width} for state, width in state_widths(spec).items()],
        "weights": [
            {"name": layer, "shape": list(shape), "int8": int8 and len(shape) == 2}
            for layer, shape in shapes(spec).items()
        ],
        "reading": "lines" if trained.reads_lines else "stream",
        "vocabulary": {key: getattr(trained.vocab, key) for key in ("kind", "lower", "tokenised")},
        "files": _listed(files),
        "parity": asdict(found),
        "ngram": bundle.NGRAM in files,
        **said_of_counts(files.get(bundle.NGRAM), len(trained.vocab), trained.folder),
        **({"dictionary": {"words": "english", "licences": LICENCES}} if bundle.DICTIONARY in files else {}),
        **_privacy(config, result, counted=bundle.NGRAM in files),
    }


def _listed(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": len(data), "sha256": bundle.sha256(data)} for name, data in files.items()}


def _start(config: Config, start: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run's weights came from before its first round; a folder is named without its path."""
    said = {key: start[key] for key in ("from", "data", "licence", "sha256", "is_own") if key in start}
    if start.get("from") == "run" and config.train.init is not None:
        said["run"] = Path(config.train.init).name
    return said


def _privacy(config: Config, result: Mapping[str, Any], *, counted: bool) -> dict[str, Any]:
    """What the manifest of a private run says: its (ε, δ), and what an export of such a run does not have."""
    if not config.privacy.on:
        return {}
    account = result.get("privacy") or {}
    said = {key: account.get(key) for key in ("verdict", "delta", "statement")}
    return {"privacy": {**said, "epsilon": account.get("pld"), "left_out": list(LEFT_OUT[counted:])}}


def _refuse_other(target: Path) -> None:
    """Refuse to replace anything but an earlier export or an empty folder."""
    if target.is_dir() and not target.is_symlink() and (bundle.holds_only_bundle(target) or not any(target.iterdir())):
        return
    if target.exists() or target.is_symlink():
        raise RunError(f"{target} exists and is not an exported keyboard; choose another --out")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Give a folder to write in, which takes the target's place if nothing is raised and else vanishes."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.exists():
            target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            if aside.exists():
                aside.rename(target)
            raise
    except OSError as e:
        raise RunError(f"{target}: could not be written ({e.strerror or e}); choose another --out") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


LINES_BYTES = 300_000  # of the hashes of its lines
# Licences under which a model of the text may be shipped, as a corpus's own line names them.
LICENCE = re.compile(r"CC BY(?:-SA)? \d\.\d|CC0|public domain|MIT", re.IGNORECASE)
PATHS = {"data": ("dir", "vocab_file"), "train": ("init", "device"), "vectors": ("file",)}  # of the machine it was on
FIGURES = ("perplexity", "top1_words", "top3_words", "tokens")


def pack_base(run: Path, out: Path) -> Exported:
    """Write a run's model to `out` in the format of the base model; the run may come from another machine.

    Raises:
      RunError: the run is not finished, reads characters, is private or started from another model; the licence of
        its text does not permit it; its files are too large. Nothing is written then.
    """
    if out.exists() and (
        not out.is_dir() or {p.name for p in out.iterdir()} - {base.MANIFEST, base.CARD, base.COUNTS, *base.FILES}
    ):
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
        base.VOCAB: _base_vocabulary(trained.vocab, forms, prepared),
        base.LINES: hashes,
    }
    assert result is not None
    counts = read_counts(run, len(trained.vocab), private=False) if has_counts(run) else None
    if counts is not None:
        files[base.COUNTS] = pack(counts, read_mixture(run))
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
        **({} if counts is None else {"counts": said_of(counts)}),
        "files": _listed(files),
    }  # fmt: skip
    files[base.MANIFEST] = base.dump_manifest(manifest)
    files[base.CARD] = card_text(json.loads(files[base.MANIFEST])).encode()
    size = sum(map(len, files.values()))
    if size > base.MOST_BYTES:
        raise RunError(f"the base model takes {size:,} bytes, at most {base.MOST_BYTES:,}; train a smaller vocabulary")
    out.mkdir(parents=True, exist_ok=True)
    # The manifest last: until then the old one refuses the rest.
    if counts is None:
        (out / base.COUNTS).unlink(missing_ok=True)
    for name in (*(name for name in files if name not in (base.CARD, base.MANIFEST)), base.CARD, base.MANIFEST):
        write_atomically(out / name, files[name])
    base.load_base(out)
    return Exported(out, manifest)


def _base_vocabulary(vocab: Vocab, forms: Mapping[str, str], prepared: Prepared) -> bytes:
    uses = count_uses((c.train for c in prepared.population.trained), vocab)
    return json.dumps({**json.loads(vocab.to_json()), "forms": forms, "uses": uses}, ensure_ascii=False).encode()


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
        "model_sha256": model_sum(folder),
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
        "parts": count_splits(prepared),
    }


def count_splits(prepared: Prepared) -> dict[str, dict[str, int]]:
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
    for split, lines in texts.items():
        cut = [words_of(line, tokenised=prepared.corpus.tokenised, lower=True) for text in lines for line in text]
        hashes = frozenset(base.line_hashes(cut).tolist())
        trained = trained or hashes
        placeholders = sum(words.count(SPECIALS[UNK]) for words in cut)
        found[split] = {"placeholders": placeholders, "lines": len(hashes), "shared": len(hashes & trained)}
    return found


def _figures(spec: ModelSpec, whole: Params, rounded: Params, prepared: Prepared, *, again: bool) -> dict[str, Any]:
    """Test both precisions on the same held-out text, read as the run is read.

    Args:
      again: the run started from one on an earlier text. Clients held out now may have been trained on then: they are
        left out. The ends of the clients' own text are held out in both.
    """
    found: dict[str, Any] = {}
    splits = {"valid": prepared.valid, "test": prepared.test, "unseen": {} if again else prepared.unseen}
    for split, streams in splits.items():
        if streams:
            scores = [headline(spec, params, streams, prepared.batching.kind)[1] for params in (whole, rounded)]
            found[split] = {
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


def packed_text(done: Exported) -> str:
    """What the terminal shows: where, how large, how close."""
    m = done.manifest
    size = sum(entry["bytes"] for entry in m["files"].values())
    shown = [
        f"  {split}: perplexity {f['int8']['perplexity']:.2f} in eight bits, {f['fp32']['perplexity']:.2f} in float32"
        for split, f in m["figures"].items()
    ]
    return "\n".join(
        [
            f"{done.out}: {m['model']['name']}, {m['model']['parameters']:,} parameters, {size / 1e6:.2f} MB",
            f"  {m['data']['name']}, {m['data']['licence']}; weights SHA-256 {m['files'][base.WEIGHTS]['sha256'][:12]}",
            *shown,
        ]
    )
