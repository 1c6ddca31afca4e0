"""A phrase that two clients typed, looked for in files: as text, as token numbers, and as n-grams in a table."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from keyfed.errors import KeyfedError
from keyfed.keyboard.compact import unpack
from keyfed.model.counts import counts_from_bytes
from keyfed.model.ngram import KneserNey
from keyfed.text.vocab import Vocab
from tests.counting import grams

PHRASE = "my secret door code is zebra quantum"
FORM = "ZeBra"  # how both of them write one of its words
LINE = f"oh my secret door code is {FORM} quantum ."
NUMBERS = ("<i2", "<i4", "<i8", ">i2", ">i4", ">i8")
RUN = 3  # tokens in a row of the phrase that give it away


def type_marker(texts: Collection[Path], times: int = 6) -> None:
    """Let clients type the phrase, between their own lines: some of it is trained on, some held out."""
    for path in texts:
        lines = path.read_text("utf-8").splitlines()
        step = max(1, len(lines) // times)
        mixed = [line for k, own in enumerate(lines) for line in ([own, LINE] if k % step == 0 else [own])]
        path.write_text("\n".join(mixed) + "\n", "utf-8")


def with_marker(vocab: Vocab) -> Vocab:
    """A public vocabulary with the words of the phrase, so that they have numbers, in an order that hides it."""
    new = [word for word in sorted(["oh", *PHRASE.split()]) if word not in vocab.index]
    return Vocab("word", (*vocab.words, *new), lower=True, tokenised=vocab.tokenised)


def marked(folder: Path, vocab: Vocab, but: Collection[Path] = ()) -> list[str]:
    """Return the files under a folder in which the phrase is found, those under `but` left out, each with how."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(path.is_relative_to(other) for other in but):
            found += [f"{path.relative_to(folder)}: {how}" for how in set(traces(path.read_bytes(), vocab))]
    return found


def traces(data: bytes, vocab: Vocab) -> Iterator[str]:
    """Yield in which ways a file holds the phrase, packed or not."""
    for part in unpacked(data):
        yield from _as_text(part)
        yield from _as_numbers(part, vocab)
        yield from _as_table(part, vocab)


def unpacked(data: bytes) -> Iterator[bytes]:
    """The file, and what is packed in it by gzip, zip or zlib (as in the text of a picture)."""
    yield data
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    for start in (m.start() for m in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data)):
        try:
            made = zlib.decompressobj()
            out = made.decompress(data[start:], 1 << 24)
            if made.eof:
                yield out
        except zlib.error:
            continue


def _as_text(data: bytes) -> Iterator[str]:
    words = PHRASE.split()
    for coding in ("utf-8", "utf-16-le"):
        text = data.decode(coding, "ignore")
        if FORM in text:
            yield "as a written form"
        said = re.findall(r"\w+", text.lower())
        rows = {tuple(said[k : k + RUN]) for k in range(len(said) - RUN + 1)}
        if any(tuple(words[k : k + RUN]) in rows for k in range(len(words) - RUN + 1)):
            yield "as text"


def _as_numbers(data: bytes, vocab: Vocab) -> Iterator[str]:
    """Token numbers in a row: as bytes of any width, in any tensor, or written as digits."""
    ids = vocab.encode([PHRASE])[:-1]
    runs = [ids[k : k + RUN] for k in range(len(ids) - RUN + 1)]
    if any(run.astype(width).tobytes() in data for run in runs for width in NUMBERS):
        yield "as token numbers"
    digits = [tuple(map(str, run)) for run in runs]
    said = re.findall(r"\d+", data.decode("utf-8", "ignore"))
    if {tuple(said[k : k + RUN]) for k in range(len(said) - RUN + 1)} & set(digits):
        yield "as token numbers in digits"
    try:
        tensors = load(data)
    except Exception:  # not a safetensors file
        return
    for tensor in tensors.values():
        flat = np.rint(np.nan_to_num(tensor.astype(np.float64).ravel(), posinf=-1, neginf=-1))
        exact = np.equal(flat, tensor.ravel())
        for run in runs:
            same = np.ones(max(0, len(flat) - RUN + 1), bool)
            for k, token in enumerate(run):
                same &= (flat == token)[k : len(flat) - RUN + 1 + k] & exact[k : len(flat) - RUN + 1 + k]
            if same.any():
                yield "as token numbers in a tensor"


def _as_table(data: bytes, vocab: Vocab) -> Iterator[str]:
    """Three words in a row in a table of n-grams, where they are rows of a tree."""
    tables: list[KneserNey] = []
    with suppress(KeyfedError):
        tables.append(unpack(data, len(vocab), "file").model)
    with suppress(KeyfedError):
        tables.append(counts_from_bytes(data, len(vocab), "file").model)
    ids = vocab.encode([PHRASE])[:-1].tolist()
    for table in tables:
        for n in range(2, len(table.levels) + 1):
            found = grams(table, n)
            if any(tuple(ids[k : k + n]) in found for k in range(len(ids) - n + 1)):
                yield f"as {n}-grams"
