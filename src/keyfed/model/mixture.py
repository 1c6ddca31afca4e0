r"""A mixture of a network and a count model, one weight for each bucket of contexts.

.. math:: p(w \mid h) = λ_{b(h)}\, p_\text{network}(w \mid h) + (1 - λ_{b(h)})\, p_\text{counts}(w \mid h)

The bucket of a context h is b(h) = (matched, best, confidence):

    matched      words of the longest end of h that the count model has continuations of: 0 … order − 1
    best         max p_counts(w | h) of these continuations w: how many of `context_edges` it reaches
    confidence   max_w p_network(w | h): how many of `confidence_edges` it reaches

In mixtures of before, in the place of the best continuation stands the count: Σ of the `counts` of the continuations.

λ is fitted by expectation–maximisation. What EM needs of a token is its bucket and the ratio of the two probabilities.
So a client sends a histogram of log₂ ratios for each bucket, and the histograms of all clients are summed. A bucket
that the validation text hardly reaches has the λ of all buckets together.

`mixture.json` of a run folder is the weights and the edges:

    {"format": 2, "order": 4, "by": "best", "context_edges": […], "confidence_edges": […],
     "weights": [matched][best][confidence], "counts_sha256": "…"}

The last is the SHA-256 of the `counts.safetensors` that the weights were fitted for. Files of format 1 have
`count_edges` in the place of `by` and `context_edges`, and not all of them the SHA-256.

References:
  Jelinek and Mercer, *Interpolated estimation of Markov source parameters from sparse data*, 1980.
  Dempster, Laird and Rubin, *Maximum likelihood from incomplete data via the EM algorithm*, 1977.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import RunError
from keyfed.model.counts import CountModel
from keyfed.model.ngram import Floats, Ints, Tokens

FORMAT = 2
FILE = "mixture.json"
CONFIDENCE_EDGES = (0.05, 0.1, 0.2, 0.4, 0.7)
BINS, PER_OCTAVE = 256, 4  # of a histogram of log₂ ratios: from 2^−32 to 2^32 in quarters
FEWEST = 20  # tokens of a bucket that has a λ of its own
DOUBT, BEYOND = 4.0, 10  # standard errors, and octaves: see `gains`


class Contexts(NamedTuple):
    """How contexts of one length are told apart: which number of theirs has these edges.

    Attributes:
      by: `best`, the probability of the best continuation; or `count`, the counts of all continuations.
    """

    by: str
    edges: tuple[float, ...]

    def of_level(self, model: CountModel, n: int) -> Ints:
        """Return the bucket of every context of length n − 1; 0 of those without a continuation."""
        level = model.model.levels[n - 1]
        owner, found = level.keys // model.model.vocab_size, np.zeros(len(level.start))
        if self.by == "count":
            np.add.at(found, owner, model.counts[n - 1])
        else:
            np.maximum.at(found, owner, level.prob)
        return np.searchsorted(np.array(self.edges), found, side="right").astype(np.int64)


COUNTED = Contexts("count", (10, 100, 1_000))  # those of format 1
BEST = Contexts("best", (0.1, 0.3, 0.6))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the network, [matched][context][confidence], and the edges of their buckets.

    Attributes:
      by, context_edges: see `Contexts`.
      counts_sha256: of the counts that the weights were fitted for.
    """

    order: int
    by: str
    context_edges: tuple[float, ...]
    confidence_edges: tuple[float, ...]
    weights: tuple[tuple[tuple[float, ...], ...], ...]
    counts_sha256: str | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.order, len(self.context_edges) + 1, len(self.confidence_edges) + 1

    @property
    def contexts(self) -> Contexts:
        return Contexts(self.by, self.context_edges)

    def weight(self, places: Ints, confidence: Floats) -> Floats:
        """Return λ where the context has a place (`places_of`) and the network a confidence."""
        found: Floats = np.array(self.weights).reshape(-1)[buckets(places, confidence, self.confidence_edges)]
        return found

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, origin: str) -> Mixture:
        """Read `mixture.json`; RunError where it is none."""
        try:
            found = json.loads(text)
            if found["format"] not in (1, FORMAT):
                raise ValueError(f"it is of format {found['format']}, expected {FORMAT}")
            by, key = (COUNTED.by, "count_edges") if found["format"] == 1 else (found["by"], "context_edges")
            if by not in (COUNTED.by, BEST.by):
                raise ValueError(f"its contexts are told apart by {by!r}")
            edges = [tuple(map(float, found[name])) for name in (key, "confidence_edges")]
            weights = np.array(found["weights"], np.float64)
            shape = int(found["order"]), len(edges[0]) + 1, len(edges[1]) + 1
            if weights.shape != shape or not ((weights >= 0) & (weights <= 1)).all():
                raise ValueError(
                    f"its weights are {list(weights.shape)} numbers; expected {list(shape)} within 0 and 1"
                )
            if any(list(e) != sorted(set(e)) for e in edges):
                raise ValueError("its edges are not in order")
            fitted_for = found.get("counts_sha256")
            if not isinstance(fitted_for, str | None):
                raise ValueError(f"counts_sha256 is {fitted_for!r}")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
            raise RunError(f"{origin} is damaged ({e}); `keyfed counts` makes it again") from None
        nested = tuple(tuple(map(tuple, row)) for row in weights.tolist())
        return cls(shape[0], by, edges[0], edges[1], nested, fitted_for)


def read_mixture(path: Path, counts: bytes | None) -> Mixture:
    """Read a run's `mixture.json`.

    Args:
      counts: the `counts.safetensors` next to it.

    Raises:
      RunError: it is damaged, or its weights were fitted for other counts.
    """
    try:
        found = Mixture.from_json(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise RunError(f"{path} cannot be read: {e}") from None
    fitted_for = found.counts_sha256
    if counts is not None and fitted_for is not None and fitted_for != hashlib.sha256(counts).hexdigest():
        raise RunError(
            f"{path} was fitted for other counts than those next to it; `keyfed counts` makes both again, and without "
            "the file the network types alone"
        )
    return found


def places_of(model: CountModel, stream: Tokens, by: Contexts = BEST) -> Ints:
    """Return matched · (edges + 1) + bucket of the context before every token after the first, [n − 1]."""
    tokens = np.asarray(stream).astype(np.int64)
    places = np.zeros(max(tokens.size - 1, 0), np.int64)
    for n, (level, contexts, _) in enumerate(model.model.trace(tokens)):
        here = contexts[1 : tokens.size]
        seen = level.size[here] > 0
        places = np.where(seen, n * (len(by.edges) + 1) + by.of_level(model, n + 1)[here], places)
    return places


def buckets(places: Ints, confidence: Floats, edges: Sequence[float] = CONFIDENCE_EDGES) -> Ints:
    """Return the number of a context's bucket, in the order of the flat weights."""
    found: Ints = places * (len(edges) + 1) + np.searchsorted(np.array(edges), confidence, side="right")
    return found


def histogram(bucket: Ints, log_ratio: Floats, rows: int) -> NDArray[np.int64]:
    """Count tokens by bucket and log₂ of the ratio of two probabilities, [rows, BINS]: what a client sends.

    Example:
      >>> histogram(np.array([0, 0]), np.array([0.0, 1.0]), rows=1).nonzero()[1].tolist()
      [128, 132]
    """
    return np.bincount(bucket * BINS + binned(log_ratio), minlength=rows * BINS).reshape(rows, BINS)


def binned(log_ratio: Floats) -> Ints:
    """Return the bin of each log₂ ratio; both ends hold all that lies beyond."""
    return np.clip(np.round(log_ratio * PER_OCTAVE) + BINS // 2, 0, BINS - 1).astype(np.int64)


def fit_weights(found: NDArray[Any], steps: int = 200) -> Floats:
    r"""Return the weight of the first of two distributions for each row of a summed histogram, by EM.

    .. math:: λ ← \frac{1}{N} \sum_t \frac{λ r_t}{λ r_t + 1 − λ}, \qquad r_t = 2^{\text{log ratio}}

    Rows with fewer than `FEWEST` tokens take the weight of all rows together. Negative numbers (noise) count as none.

    Example:
      >>> even = np.zeros((1, BINS)); even[0, [124, 132]] = 100
      >>> fit_weights(even).round(3).tolist()
      [0.5]
    """
    counts = np.maximum(np.asarray(found, np.float64), 0)
    whole = _em(counts.sum(0, keepdims=True), steps)
    own = _em(counts, steps)
    return np.where(counts.sum(1) >= FEWEST, own, whole)


def gains(noisy: NDArray[Any], std: float, weights: Floats) -> bool:
    r"""Say whether weights explain a text better than the first distribution alone, beyond what noise could be.

    .. math:: \sum_{b, r} n_{b r} \log(λ_b + (1 − λ_b) / r) > 4 σ \sqrt{\sum_{b, r} \log^2(λ_b + (1 − λ_b) / r)}

    The left side is unbiased for given weights: no number of the histogram n is cut off. The right side is four of its
    standard errors, for weights fitted to noise alone reach up to three. Ratios beyond 2^±10 are left out: hardly a
    token has one, and their noise would weigh most.

    Args:
      noisy: [rows, BINS], each number with noise of standard deviation `std`, none of them cut off.
    """
    octaves = (np.arange(BINS) - BINS // 2) / PER_OCTAVE
    some = np.abs(octaves) <= BEYOND
    gain = np.log(weights[:, None] + (1 - weights[:, None]) / 2.0 ** octaves[some])
    return bool((noisy[:, some] * gain).sum() > DOUBT * std * np.sqrt(np.square(gain).sum()))


def _em(counts: Floats, steps: int) -> Floats:
    ratio = 2.0 ** ((np.arange(BINS) - BINS // 2) / PER_OCTAVE)
    total = np.maximum(counts.sum(1), 1)
    weight = np.full(len(counts), 0.5)
    for _ in range(steps):
        first = weight[:, None] * ratio
        weight = (counts * (first / (first + 1 - weight[:, None]))).sum(1) / total
    return np.where(counts.sum(1) > 0, np.clip(weight, 0, 1), 0.5)  # rounding may lift it above 1


def mixture_of(
    weights: Floats,
    order: int,
    contexts: Contexts = BEST,
    confidence_edges: Sequence[float] = CONFIDENCE_EDGES,
) -> Mixture:
    """Return the mixture of fitted weights, flat in the order of `buckets`."""
    shape = order, len(contexts.edges) + 1, len(confidence_edges) + 1
    nested = tuple(tuple(map(tuple, row)) for row in weights.reshape(shape).tolist())
    return Mixture(order, contexts.by, contexts.edges, tuple(confidence_edges), nested)
