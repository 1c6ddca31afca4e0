"""An exported keyboard is a folder: a manifest, and files whose sums it knows.

Reading one trusts nothing: names, sizes, sums, and the shapes of the weights against those of the model that the
manifest describes. Whatever is wrong is one line that says which file and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from keyfed.errors import KeyfedError, RunError
from keyfed.keyboard.compact import terms_in, unpack
from keyfed.keyboard.dictionary import Lists, from_bytes
from keyfed.keyboard.graph import state_widths
from keyfed.model.language_model import SCALE, ModelSpec, shapes, widen
from keyfed.run.base import SPEC
from keyfed.text.vocab import Vocab

FORMAT = 1
MANIFEST, GRAPH, WEIGHTS, VOCAB, VECTORS, NGRAM, DICTIONARY = (
    "manifest.json", "model.onnx", "weights.safetensors", "vocab.json", "vectors.json", "ngram.safetensors",
    "dictionary.safetensors",
)  # fmt: skip
RANDOM = "random tokens"  # what a graph is compared on where no text may be read, or none is there
MOST = 100.0  # nats that a word is tilted by
REQUIRED = (GRAPH, WEIGHTS, VOCAB, VECTORS)
OPTIONAL = (NGRAM, DICTIONARY)


def sha256(data: bytes) -> str:
    """The sum of a file, as the manifest has it."""
    return hashlib.sha256(data).hexdigest()


def is_bundle(folder: Path) -> bool:
    """Tell an exported keyboard, damaged or not, from a run folder."""
    return (folder / MANIFEST).is_file()


def holds_only_bundle(folder: Path) -> bool:
    """Whether a folder has nothing but the files of an export, its model among them, so that it may be replaced."""
    names = {p.name for p in folder.iterdir()}
    return MANIFEST in names and bool(names & {GRAPH, WEIGHTS}) and names <= {MANIFEST, *REQUIRED, *OPTIONAL}


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
    if not isinstance(files, dict) or any(name not in (*REQUIRED, *OPTIONAL) for name in files):
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
    if DICTIONARY in data:
        from_bytes(data[DICTIONARY], str(folder / DICTIONARY))
    _check_lists(folder / VOCAB, json.loads(data[VOCAB]), len(vocab))
    if NGRAM in data and "counts" in manifest:  # else an older version's, counted in one place: read by no page
        unpack(data[NGRAM], spec.vocab, str(folder / NGRAM))
    return manifest


def read_from_text(folder: Path) -> list[str]:
    """Say what an export, damaged or not, holds that was counted on people's text: a private run's must hold nothing.

    The weights are not meant, nor are n-grams with noise: ledgers cover them.
    """
    manifest, vocab = (_object_in(folder / name) for name in (MANIFEST, VOCAB))
    terms = terms_in(folder / NGRAM) if (folder / NGRAM).exists() else None
    found = [NGRAM] if (folder / NGRAM).exists() and (terms is None or terms.epsilon is None) else []
    if vocab.get("forms"):
        found.append(f"{VOCAB} (written forms)")
    if vocab.get("counted"):
        found.append(f"{VOCAB} (doubted words, counted on text)")
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


def load_lists(folder: Path) -> Lists:
    """Return the dictionary of a checked export, and what it says of the vocabulary."""
    found = json.loads((folder / VOCAB).read_text("utf-8"))
    path, tilt = folder / DICTIONARY, found.get("tilt")
    return Lists(
        path.read_bytes() if path.exists() else b"",
        tuple(found.get("doubted", ())),
        None if tilt is None else tuple(tilt),
        bool(found.get("counted")),
    )


def _check_lists(path: Path, found: dict[str, Any], vocab: int) -> None:
    doubted, tilt = found.get("doubted", []), found.get("tilt")
    if not isinstance(doubted, list) or not all(isinstance(word, str) for word in doubted):
        raise _damaged(path, '"doubted" is no list of words')
    if tilt is not None and not (
        isinstance(tilt, list) and len(tilt) == vocab and all(type(t) in (int, float) and abs(t) < MOST for t in tilt)
    ):
        raise _damaged(path, f'"tilt" is no list of {vocab} numbers')


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
