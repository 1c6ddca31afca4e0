"""From a run to a folder that a page can type on: graph, weights, vocabulary, test vectors, manifest.

The folder appears whole or not at all: everything is written next to it, read back, compared with the trained network
on held-out text, and only then renamed into place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed import __version__
from keyfed.config.load import Config
from keyfed.errors import ConfigError, DataError, DownloadError, RunError
from keyfed.keyboard import bundle
from keyfed.keyboard.graph import (
    Parity,
    make_vectors,
    measure,
    need,
    refuse_difference,
    sample_tokens,
    state_widths,
    step_graph,
)
from keyfed.model.language_model import PRESETS, ModelSpec, parameter_count, quantise, shapes, widen
from keyfed.run.base import SPEC, Base, is_base, load_base
from keyfed.run.console import human_bytes
from keyfed.run.evaluate import limit_streams
from keyfed.run.folder import Trained, load_model, read_result, read_run_toml, resume_command
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.catalogue import NAMED, at_hand, is_path
from keyfed.text.vocab import Vocab, words_of

GOAL = 0.97  # of the three words shown, as many are the same in eight bits
NGRAM_TOKENS = 10_000_000  # training text that the n-grams are counted on
LEFT_OUT = (
    "n-grams",
    "written forms",
    "a check on held-out text",
)  # of a private run: each would need noise of its own
LEAST_CLIENTS = 2  # who must have written a form
_ENDS = frozenset(".!?…:")  # a colon, too: what follows it may be a sentence of its own
_BETWEEN = re.compile(r"[\W_]+")  # quotes and brackets do not begin a sentence by themselves


def written_forms(clients: Iterable[Iterable[str]], vocab: Vocab, least: int = LEAST_CLIENTS) -> dict[str, str]:
    """Return {word: form} for the words of a lower-cased vocabulary whose usual form is another than the word.

    A vocabulary in lower case cannot tell `london` from `London`. A word at the start of a sentence says nothing about
    it and is not counted. A form enters only if two clients or more write it: what one person alone writes is not
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
    """What was written.

    Attributes:
      manifest: as in manifest.json.
      notes: lines for a person: what was left out and why.
    """

    out: Path
    manifest: dict[str, Any]
    notes: tuple[str, ...]


def export_run(folder: Path, out: Path | None = None, int8: bool = False) -> Exported:
    """Export a finished run's model to `out` (RUN/keyboard by default), in eight bits if `int8`.

    Args:
      folder: the run, or `base` for the base model: its numbers are those of eight bits, in either precision. It has
        its own written forms, and no n-grams.

    Raises:
      RunError: the run is not finished or not of a preset, `out` is something else, or the graph does not say what the
        network says; nothing is left behind.
    """
    need("onnx", "onnxruntime")
    base = load_base() if is_base(folder) else None
    if base is not None and out is None:
        raise ConfigError("the base model has no folder of its own to be exported to; give --out")
    target = out or folder / "keyboard"
    trained, spec = _load(folder) if base is None else _of_base(base)
    params = {name: trained.params[name].float().numpy() for name in shapes(spec)}
    if not all(np.isfinite(value).all() for value in params.values()):
        raise RunError(f"{folder}: the model holds numbers that are not finite; it cannot be exported")
    _refuse_other(target)
    text, notes = _text_at_hand(trained) if base is None else (None, [])
    with _appearing(target) as temporary:
        graph = step_graph(spec).SerializeToString()
        files = {bundle.GRAPH: graph, bundle.WEIGHTS: bytes(save(quantise(params) if int8 else params))}
        shipped = widen(load(files[bundle.WEIGHTS]))
        found = _measure(spec, graph, shipped, params, text, lines=trained.reads_lines)
        refuse_difference(found, str(folder))
        if int8 and found.text != bundle.RANDOM and found.top3_agreement < GOAL:
            notes.append(
                f"in eight bits {found.top3_agreement:.1%} of the words shown are the same, fewer than {GOAL:.0%}"
            )
        files[bundle.VOCAB] = _vocabulary(trained, text, {} if base is None else base.forms)
        files[bundle.VECTORS] = json.dumps(make_vectors(spec, shipped, trained.vocab)).encode()
        if text is not None and trained.vocab.kind == "word":
            files[bundle.NGRAM] = _ngram(text)
        manifest = _manifest(trained, spec, files, found, base, int8=int8)
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


def _load(folder: Path) -> tuple[Trained, ModelSpec]:
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
    return trained, trained.spec


def _of_base(base: Base) -> tuple[Trained, ModelSpec]:
    assert isinstance(base.trained.spec, ModelSpec)
    return base.trained, base.trained.spec


def _text_at_hand(trained: Trained) -> tuple[Prepared | None, list[str]]:
    """The run's corpus if it is here and still the same; nothing is fetched for an export.

    The export of a private run reads no text: what is counted on text would be a release that no ledger has.
    """
    config, vocab = trained.config, trained.vocab
    if config.privacy.on:
        return None, [f"trained with --dp: without {', '.join(LEFT_OUT)}, for no noise covers them"]
    without = "; checked on random tokens, without written forms and n-grams"
    if config.data.name in NAMED and not at_hand(config.data.name, Path(config.data.dir) if config.data.dir else None):
        return None, [f"the corpus {config.data.name} is not at hand{without}"]
    if config.data.vocab_file is not None:  # which may be gone by now; the run has its own copy
        config = replace(config, data=replace(config.data, vocab_file=str(trained.folder / "vocab.json")))
    try:
        prepared = prepare(config, text=vocab.lower and vocab.kind == "word")
    except (DataError, DownloadError) as e:
        return None, [f"{e}{without}"]
    if prepared.vocab != vocab:
        return None, [f"the text of {prepared.corpus.name} has changed since the run{without}"]
    return prepared, []


def _measure(
    spec: ModelSpec,
    graph: bytes,
    shipped: dict[str, NDArray[np.float32]],
    params: dict[str, NDArray[np.float32]],
    text: Prepared | None,
    *,
    lines: bool,
) -> Parity:
    streams = {**text.test, **text.unseen} if text is not None else {}
    tokens, real = sample_tokens(streams, spec.vocab, lines=lines)
    what = f"held-out text of {text.corpus.name}" if real and text is not None else bundle.RANDOM
    return measure(spec, graph, shipped, params, tokens, what)


def _vocabulary(trained: Trained, text: Prepared | None, forms: Mapping[str, str]) -> bytes:
    if text is not None:
        forms = written_forms((c.train for c in text.population.trained), trained.vocab)
    return json.dumps({**json.loads(trained.vocab.to_json()), "forms": dict(forms)}).encode()


def _ngram(text: Prepared) -> bytes:
    streams = {str(k): text.store.stream(k) for k in range(len(text.store))}
    model, _ = bundle.fit_small(list(limit_streams(streams, NGRAM_TOKENS).values()), len(text.vocab))
    return bundle.ngram_to_bytes(model)


def _manifest(
    trained: Trained, spec: ModelSpec, files: dict[str, bytes], found: Parity, base: Base | None, *, int8: bool
) -> dict[str, Any]:
    config = trained.config
    if base is None:
        result, weights = read_result(trained.folder) or {}, model_sum(trained.folder)
    else:
        said = base.manifest["training"]  # one packed by an older version has the chosen round only
        best = said.get("best_round", said["rounds"])
        result, weights = {"best_round": best, "start": {"from": "random"}}, base.sha256
    name = config.data.name
    return {
        "format": bundle.FORMAT,
        "keyfed": __version__,
        "model": {
            **{key: getattr(spec, key) for key in SPEC},
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
        "files": {file: {"bytes": len(data), "sha256": bundle.sha256(data)} for file, data in files.items()},
        "parity": asdict(found),
        "ngram": bundle.NGRAM in files,
        **_privacy(config, result),
    }


def _start(config: Config, start: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run's weights came from before its first round; a folder is named without its path."""
    said = {key: start[key] for key in ("from", "data", "licence", "sha256", "is_own") if key in start}
    if start.get("from") == "run" and config.train.init is not None:
        said["run"] = Path(config.train.init).name
    return said


def _privacy(config: Config, result: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest of a private run says: its (ε, δ), and what an export of such a run does not have."""
    if not config.privacy.on:
        return {}
    account = result.get("privacy") or {}
    said = {key: account.get(key) for key in ("verdict", "delta", "statement")}
    return {"privacy": {**said, "epsilon": account.get("pld"), "left_out": list(LEFT_OUT)}}


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
