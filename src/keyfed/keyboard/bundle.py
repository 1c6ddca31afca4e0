r"""An exported keyboard is a folder: a manifest, and files whose sums it knows.

Reading one trusts nothing: names, sizes, sums, and the shapes of the weights against those of the model that the
manifest describes. Whatever is wrong is one line that says which file and what to do.

`ngram.safetensors` is a Kneser–Ney model small enough for a page, pruned. For n = 1 … order it has, with contexts
numbered as rows of the level below (the empty context is row 0):

    n{n}.start     int32 [contexts + 1]   the continuations of context c are the rows start[c] … start[c + 1] − 1
    n{n}.words     int32 [grams]          the last word of each n-gram, ascending within a context
    n{n}.prob      float32 [grams]        p_n(w | h), interpolated already
    n{n}.backoff   float32 [contexts]     γ(h); 1 where a context has no continuation

The next distribution: p ← 1/V; then for each n whose context (the last n − 1 tokens, found as a row of level n − 1) was
seen: p ← γ(h) p everywhere, then p[words] ← prob on its rows; stop at the first context that was not seen.

**Pruning.** N-grams that too few clients wrote go, and the mass they had goes to the level below:

.. math:: γ'(h) = \frac{1 - \sum_{w\ \text{kept}} p_n(w \mid h)}{1 - \sum_{w\ \text{kept}} p_{n-1}(w \mid h')}

References:
  Stolcke, *Entropy-based pruning of backoff language models*, 1998 (the renormalisation).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed.errors import KeyfedError, RunError
from keyfed.keyboard.graph import state_widths
from keyfed.model.language_model import SCALE, ModelSpec, shapes, widen
from keyfed.model.ngram import (
    Ints,
    KneserNey,
    Level,
    Tokens,
    fit_kneser_ney,
    level_of,
    levels_from_arrays,
    levels_to_arrays,
)
from keyfed.run.base import SPEC
from keyfed.text.vocab import Vocab

FORMAT = 1
MANIFEST, GRAPH, WEIGHTS, VOCAB, VECTORS, NGRAM = (
    "manifest.json", "model.onnx", "weights.safetensors", "vocab.json", "vectors.json", "ngram.safetensors",
)  # fmt: skip
RANDOM = "random tokens"  # what a graph is compared on where no text may be read, or none is there
REQUIRED = (GRAPH, WEIGHTS, VOCAB, VECTORS)


def sha256(data: bytes) -> str:
    """The sum of a file, as the manifest has it."""
    return hashlib.sha256(data).hexdigest()


def is_bundle(folder: Path) -> bool:
    """Tell an exported keyboard, damaged or not, from a run folder."""
    return (folder / MANIFEST).is_file()


def holds_only_bundle(folder: Path) -> bool:
    """Whether a folder has nothing but the files of an export, its model among them, so that it may be replaced."""
    names = {p.name for p in folder.iterdir()}
    return MANIFEST in names and bool(names & {GRAPH, WEIGHTS}) and names <= {MANIFEST, *REQUIRED, NGRAM}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export of this format; what it says about the files is not checked."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not an exported keyboard (no {MANIFEST}); `keyfed export RUN` makes one") from None
    except (OSError, ValueError) as e:
        raise _damaged(path, e) from None
    if not isinstance(found, dict) or "format" not in found:
        raise _damaged(path, "not a manifest")
    if found["format"] != FORMAT:
        raise RunError(
            f"{path} has format {found['format']!r}, this version of keyfed reads {FORMAT}; export the run again"
        )
    files = found.get("files")
    if not isinstance(files, dict) or any(name not in (*REQUIRED, NGRAM) for name in files):
        raise _damaged(path, "it lists files that an export does not have")
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        raise _damaged(path, f"it does not list {', '.join(missing)}")
    return found


def check_bundle(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export after checking every file of it.

    Raises:
      RunError: not an export, of another format, or damaged: which file, and what to do.
    """
    manifest, path = read_manifest(folder), folder / MANIFEST
    if not isinstance(manifest.get("run"), dict) or not isinstance(manifest.get("model"), dict):
        raise _damaged(path, "it does not say which model it is of")
    if manifest.get("precision") not in ("fp32", "int8") or not isinstance(manifest.get("ngram"), bool):
        raise _damaged(path, "it does not say in which precision, or whether n-grams come along")
    data = {name: _whole(folder / name, said) for name, said in manifest["files"].items()}
    try:
        spec = spec_of(manifest)
        vocab = Vocab.from_json(data[VOCAB].decode("utf-8"))
        json.loads(data[VECTORS])
        stored = load(data[WEIGHTS])
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise _damaged(folder / MANIFEST, e) from None
    if len(vocab) != spec.vocab:
        raise _damaged(folder / VOCAB, f"{len(vocab)} words, the model has {spec.vocab}")
    if manifest.get("states") != [{"name": name, "width": width} for name, width in state_widths(spec).items()]:
        raise _damaged(folder / MANIFEST, "its states are not those of the model")
    _check_weights(folder / WEIGHTS, stored, spec, manifest)
    if manifest["ngram"] != (NGRAM in data):
        raise _damaged(folder / MANIFEST, f"{NGRAM} is {'not ' if manifest['ngram'] else ''}listed")
    if NGRAM in data:
        ngram_from_bytes(data[NGRAM], spec.vocab, str(folder / NGRAM))
    return manifest


def read_from_text(folder: Path) -> list[str]:
    """Say what an export, damaged or not, holds that was counted on people's text: a private run's must hold nothing.

    The weights are not meant: the ledger of the run covers them.
    """
    found = [NGRAM] if (folder / NGRAM).exists() else []
    manifest, vocab = (_object_in(folder / name) for name in (MANIFEST, VOCAB))
    if vocab.get("forms"):
        found.append(f"{VOCAB} (written forms)")
    parity = manifest.get("parity")
    if isinstance(parity, dict) and parity.get("text") != RANDOM:
        found.append(f"{MANIFEST} (compared on held-out text)")
    return found


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def spec_of(manifest: Mapping[str, Any]) -> ModelSpec:
    """The model that a manifest describes."""
    return ModelSpec(**{key: manifest["model"][key] for key in SPEC})


def load_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a checked export in float32, as the page has them."""
    return widen(load((folder / WEIGHTS).read_bytes()))


def load_vocab(folder: Path) -> tuple[Vocab, dict[str, str]]:
    """Return the vocabulary of a checked export and how its words are written."""
    text = (folder / VOCAB).read_text("utf-8")
    return Vocab.from_json(text), dict(json.loads(text).get("forms", {}))


def _whole(path: Path, said: Any) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path} is missing; export the run again") from None
    except OSError as e:
        raise _damaged(path, e) from None
    if not isinstance(said, dict) or len(data) != said.get("bytes"):
        want = said.get("bytes") if isinstance(said, dict) else said
        raise _damaged(path, f"{len(data)} bytes, the manifest says {want}")
    if sha256(data) != said.get("sha256"):
        raise _damaged(path, "its sum is not the manifest's")
    return data


def _check_weights(
    path: Path, stored: Mapping[str, NDArray[Any]], spec: ModelSpec, manifest: Mapping[str, Any]
) -> None:
    """Names, shapes and types are those of the model, in the precision that the manifest says."""
    int8 = manifest.get("precision") == "int8"
    want: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in shapes(spec).items():
        small = int8 and len(shape) == 2
        want[name] = (shape, "int8" if small else "float32")
        if small:
            want[name + SCALE] = (shape[:1], "float32")
    got = {name: (tuple(value.shape), str(value.dtype)) for name, value in stored.items()}
    for name in [*want, *got]:
        if got.get(name) != want.get(name):
            raise _damaged(path, f'"{name}" is {_say(got.get(name))}, expected {_say(want.get(name))}')


def _say(layer: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if layer is None else f"{layer[1]} {list(layer[0])}"


def _damaged(path: Path, why: object) -> KeyfedError:
    reason = str(why).splitlines()[0] if str(why) else type(why).__name__
    return RunError(f"{path} is damaged ({reason}); export the run again")


ORDER = 3
MOST_BYTES = 4_500_000  # gzip halves it: with eight-bit weights the page stays below 4 MB
# Clients who must have written an n-gram of length 1, 2, 3; the first that fit are taken. Words were chosen when the
# vocabulary was built; of longer ones none that a single client wrote is shipped.
LEAST = ((1, 2, 2), *((1, k, k + extra) for k in range(2, 64) for extra in (1, 2)))


def fit_small(
    streams: Sequence[Tokens], vocab_size: int, most_bytes: int = MOST_BYTES
) -> tuple[KneserNey, tuple[int, ...]]:
    """Fit on all clients' streams and prune until the file fits.

    Returns:
      The model, and how many clients must have written an n-gram of each length.
    """
    whole = fit_kneser_ney(streams, vocab_size, ORDER)
    counts = [_writers(whole, streams, n) for n in range(1, ORDER + 1)]
    for least in LEAST:
        keep = [c >= k for c, k in zip(counts, least, strict=True)]
        if _bytes([int(k.sum()) for k in keep]) <= most_bytes:
            break
    return _pruned(whole, keep), least


def _bytes(grams: Sequence[int]) -> int:
    contexts = [1, *grams[:-1]]
    return sum(8 * g + 8 * c + 4 for g, c in zip(grams, contexts, strict=True))


def _words(model: KneserNey, n: int) -> list[Ints]:
    """The n words of every n-gram, oldest first."""
    rows = np.arange(len(model.levels[n - 1].keys))
    words: list[Ints] = []
    for level in reversed(model.levels[:n]):
        keys = level.keys[rows]
        words.insert(0, keys % model.vocab_size)
        rows = keys // model.vocab_size
    return words


def _rows(levels: Sequence[Level], vocab_size: int, words: Sequence[Ints]) -> Ints:
    """The row of every n-gram in the level of its length, −1 where it is not there."""
    rows = np.zeros(len(words[0]) if words else 1, np.int64)
    for level, word in zip(levels, words, strict=False):
        rows = np.where(rows >= 0, level.find(np.maximum(rows, 0) * vocab_size + word), -1)
    return rows


def _writers(model: KneserNey, streams: Sequence[Tokens], n: int) -> Ints:
    """How many streams every n-gram of a level occurs in."""
    out = np.zeros(len(model.levels[n - 1].keys), np.int64)
    for stream in streams:
        tokens = np.asarray(stream).astype(np.int64)
        if len(tokens) < n:
            continue
        words = [tokens[k : len(tokens) - n + 1 + k] for k in range(n)]
        out[np.unique(_rows(model.levels, model.vocab_size, words))] += 1
    return out


def _pruned(model: KneserNey, keep: Sequence[NDArray[np.bool_]]) -> KneserNey:
    """Drop n-grams, level by level from the shortest, and give their mass to the level below (module docstring).

    Contexts and suffixes of what is kept are kept: as many clients wrote them, and `LEAST` does not fall with n.
    """
    vocab, levels = model.vocab_size, list[Level]()
    contexts = np.ones(1, np.bool_)  # of the level below, which are kept
    for n, (level, stay) in enumerate(zip(model.levels, keep, strict=True), start=1):
        owner = level.keys // vocab
        number = np.cumsum(contexts) - 1  # of a context, among those that are kept
        count, mine = int(contexts.sum()), number[owner[stay]]
        keys, prob = mine * vocab + level.keys[stay] % vocab, level.prob[stay]
        lower = np.full(len(keys), 1.0 / vocab)
        if n > 1:
            lower = levels[-1].prob[_rows(levels, vocab, [w[stay] for w in _words(model, n)[1:]])]
        left = np.maximum(0, 1 - np.bincount(mine, prob, minlength=count))
        below = np.maximum(1e-12, 1 - np.bincount(mine, lower, minlength=count))
        size = np.bincount(mine, minlength=count)
        lost = np.bincount(number[owner[contexts[owner] & ~stay]], minlength=count) > 0
        renewed = np.where(size > 0, left / below, 1.0)
        backoff = np.where(lost, renewed, level.backoff[:-1][contexts])
        levels.append(level_of(keys, prob, np.append(backoff, 1.0), size, vocab))
        contexts = stay
    return replace(model, levels=tuple(levels))


def ngram_to_bytes(model: KneserNey) -> bytes:
    """Write a model as `ngram.safetensors` (module docstring); probabilities are rounded to float32."""
    return bytes(save(levels_to_arrays(model), {"order": str(model.order), "vocab": str(model.vocab_size)}))


def ngram_from_bytes(data: bytes, vocab_size: int, origin: str) -> KneserNey:
    """Read what `ngram_to_bytes` wrote; `next`, `top` and `nats` are those of `keyfed.model.ngram`.

    Raises:
      RunError: the file is damaged or does not fit the vocabulary.
    """
    try:
        tensors: dict[str, NDArray[Any]] = load(data)
        levels = levels_from_arrays(tensors, len(tensors) // 4, vocab_size)
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{origin} is damaged: {e}") from None
    return KneserNey(len(levels), vocab_size, tuple(levels), ())
