r"""A count model made of sums over clients: the n-grams of at least k clients, their counts, and how they are smoothed.

`counts.safetensors` has what the federation released. Contexts are numbered as rows of the level below (the empty
context is row 0), as in `ngram.safetensors` of an exported keyboard, whose four arrays are here under the same names:

    `n{n}.start`    int32 [contexts + 1]   the continuations of context c are the rows start[c] … start[c + 1] − 1.
    `n{n}.words`    int32 [grams]          the last word of each n-gram, ascending within a context.
    `n{n}.prob`     float32 [grams]        p_n(w | h), interpolated already.
    `n{n}.backoff`  float32 [contexts]     γ(h), the mass for the order below; 1 where a context has no continuation.
    `n{n}.clients`  int32 [grams]          how many clients wrote the n-gram, as the sum says (noisy under ε); ≥ k.
    `n{n}.counts`   int32 [grams]          how often they wrote it, each client counted at most `cap` times

for n = 1 … order. Every n-gram has its first and its last n − 1 words in the level below. A word of fewer than k
clients has no row, not even as a unigram. The metadata has one JSON object, `about`: format, order,
vocab and `CountTerms`.

The next distribution: p ← 1/V; then for each n whose context (the last n − 1 tokens, found as a row of level n − 1) was
seen: p ← γ(h) p everywhere, then p[words] ← prob on its rows; stop at the first context that was not seen. So it is
`ngram.KneserNey` that computes with it, whatever smoothed it (`smoothing`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed.errors import RunError
from keyfed.model.ngram import Ints, KneserNey, levels_from_arrays, levels_to_arrays

FORMAT = 1
FILE = "counts.safetensors"
LEAST_K = 3  # with two, a client that writes an n-gram learns whether another one did
VERDICTS = ("GUARANTEE", "BOUND ONLY", "SIMULATED")  # of counts with noise; NONE is of those without


@dataclass(frozen=True, slots=True)
class CountTerms:
    """How counts were made.

    Attributes:
      k: clients that an n-gram needs to be released, by the sum's estimate.
      cap: how often one client's use of one n-gram is counted at most.
      most: n-grams of one length that a client contributes at most (M).
      clients: clients that were called.
      epsilon: ε of the release, None without noise; `delta` its δ, `verdict` what it is worth (`private.dp.ledger`).
      vocab_sha256: of the vocabulary's file, whose ids the words are.
    """

    k: int
    cap: int
    most: int
    clients: int
    vocab_sha256: str
    epsilon: float | None = None
    delta: float | None = None
    verdict: str = "NONE"


@dataclass(frozen=True, eq=False)
class CountModel:
    """What `counts.safetensors` holds.

    Attributes:
      model: computes probabilities (`nats`, `top`, `next`), levels of length 1 … order.
      clients: of each level's n-grams, in the order of its keys.
      counts: likewise.
    """

    model: KneserNey
    clients: tuple[Ints, ...]
    counts: tuple[Ints, ...]
    about: CountTerms

    def grams(self, n: int) -> Ints:
        """Return the word ids of all n-grams of a length, oldest first, in the order of the rows: [grams, n]."""
        return grams_of([level.keys for level in self.model.levels[:n]], self.model.vocab_size)


def grams_of(keys: Sequence[Ints], vocab: int) -> Ints:
    """Return the words of the n-grams of the last level: [grams, n]; keys are context · V + word of every level."""
    rows = np.arange(len(keys[-1]))
    words: list[Ints] = []
    for level in reversed(keys):
        words.insert(0, level[rows] % vocab)
        rows = level[rows] // vocab
    return np.stack(words, 1)


def counts_to_bytes(found: CountModel) -> bytes:
    """Write a model as `counts.safetensors`; probabilities are rounded to float32.

    Raises:
      RunError: an n-gram has fewer than k clients; nothing of the kind is ever written.
    """
    for n, clients in enumerate(found.clients, 1):
        if clients.size and clients.min() < found.about.k:
            raise RunError(
                f"an n-gram of length {n} has {clients.min()} clients, and k is {found.about.k}: not written"
            )
    arrays: dict[str, NDArray[Any]] = levels_to_arrays(found.model)
    for n, (clients, counts) in enumerate(zip(found.clients, found.counts, strict=True), 1):
        arrays[f"n{n}.clients"], arrays[f"n{n}.counts"] = clients.astype(np.int32), counts.astype(np.int32)
    head = {"format": FORMAT, "order": found.model.order, "vocab": found.model.vocab_size}
    about = json.dumps({**head, **asdict(found.about)}, sort_keys=True)
    return bytes(save(arrays, {"about": about}))  # one entry: several would be written in any order


def counts_from_bytes(data: bytes, vocab_size: int, origin: str) -> CountModel:
    """Read what `counts_to_bytes` wrote.

    Raises:
      RunError: the file is damaged, does not fit the vocabulary, or has an n-gram of fewer than k clients.
    """
    try:
        text = metadata_of(data)["about"]
        head = json.loads(text)
        if head.get("format") != FORMAT:
            raise ValueError(f"it is of format {head.get('format')}, expected {FORMAT}")
        about = terms_of(text)
        arrays = load(data)
        levels = levels_from_arrays(arrays, int(head["order"]), vocab_size)
        clients, counts = (
            tuple(arrays[f"n{n}.{what}"].astype(np.int64) for n in range(1, len(levels) + 1))
            for what in ("clients", "counts")
        )
        for n, level in enumerate(levels):
            if not len(level.keys) == len(clients[n]) == len(counts[n]):
                raise ValueError(f"the counts of length {n + 1} do not fit its n-grams")
            if len(clients[n]) and clients[n].min() < about.k:
                raise ValueError(f"an n-gram of length {n + 1} has {clients[n].min()} clients, and k is {about.k}")
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{origin} is damaged ({e}); `keyfed counts` makes it again") from None
    return CountModel(KneserNey(len(levels), vocab_size, tuple(levels), ()), clients, counts, about)


def metadata_of(data: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file in memory."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("its header is cut off")
    found = json.loads(data[8 : 8 + size])["__metadata__"]
    return {str(k): str(v) for k, v in found.items()}


def terms_of(text: str) -> CountTerms:
    """Read `CountTerms` from its JSON; an error where it is none."""
    found = json.loads(text)
    about = CountTerms(**{f.name: found[f.name] for f in fields(CountTerms)})
    for name, least in (("k", LEAST_K), ("cap", 1), ("most", 1), ("clients", LEAST_K)):
        number = getattr(about, name)
        if type(number) is not int or number < least:
            raise ValueError(f"{name} is {number!r}, expected {least} or more")
    if about.clients < about.k:
        raise ValueError(f"it is of {about.clients} clients, and k is {about.k}")
    if not isinstance(about.vocab_sha256, str):
        raise ValueError("vocab_sha256 is no text")
    _check_claim(about)
    return about


def _check_claim(about: CountTerms) -> None:
    """Raise ValueError unless ε, δ and verdict are those of counts with noise, or all of counts without."""
    epsilon, delta = about.epsilon, about.delta
    if epsilon is None and delta is None:
        if about.verdict != "NONE":
            raise ValueError(f"its verdict is {about.verdict!r} without epsilon, expected 'NONE'")
        return
    if epsilon is None or type(epsilon) not in (int, float) or not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon!r}, expected a number above 0")
    if delta is None or type(delta) not in (int, float) or not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}, expected a number between 0 and 1")
    if about.verdict not in VERDICTS:
        raise ValueError(f"its verdict is {about.verdict!r}, expected one of {', '.join(VERDICTS)}")
