"""Weights carried from a trained model to one with another vocabulary, by word.

Row i of the embedding, of the output matrix and of the output bias belongs to word i of *its* vocabulary. Copying rows
by their number between two vocabularies gives every word some other word's vector; here a row goes where its word went.
All other layers know nothing of words and are copied as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.errors import ConfigError, DataError, ShapeMismatch
from keyfed.federated.cohort import derive_seed
from keyfed.model.language_model import ModelSpec, Params, check_shapes, shapes
from keyfed.text.vocab import SPECIALS, Vocab

Unmatched = Literal["uniform", "mean"]
BOUND = 0.05  # words without a row to carry start from U(−BOUND, BOUND)
BY_WORD = ("embedding.weight", "output.weight", "output.bias")
NOT_ARCHITECTURE = ("name", "vocab", "dropout")  # fields of a model that no shape and no arithmetic depends on


@dataclass(frozen=True, slots=True)
class Matched:
    """How much of a vocabulary had a row to carry.

    Attributes:
      rows: entries of the new vocabulary, specials included.
      matched: those that the old one has too.
      tokens: share of the new text's training tokens that are matched entries, line ends and unknown words (whose rows
        are carried as well) included; None where nobody counted.
    """

    rows: int
    matched: int
    tokens: float | None

    def as_dict(self) -> dict[str, Any]:
        """For result.json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Carried:
    """Initial parameters and how many of their rows were carried."""

    params: Params
    report: Matched


def match_words(vocab: Vocab, target: Vocab) -> NDArray[np.int64]:
    """Return for each entry of `target` its number in `vocab`, −1 where it has none; specials match by name.

    Raises:
      ConfigError: one holds words and the other characters.
      DataError: they share no word.

    Example:
      >>> old = Vocab("word", (*SPECIALS, "the", "cat"), lower=True, tokenised=True)
      >>> new = Vocab("word", (*SPECIALS, "cat", "dog"), lower=True, tokenised=True)
      >>> match_words(old, new).tolist()
      [0, 1, 2, 3, 5, -1]
    """
    if vocab.kind != target.kind:
        raise ConfigError(
            f"the model to start from reads {vocab.kind}s and this one {target.kind}s; start from one that reads "
            f"{target.kind}s"
        )
    number = {word: i for i, word in enumerate(vocab.words)}  # `Vocab.index` leaves the specials out
    rows = np.array([number.get(word, -1) for word in target.words], np.int64)
    if not (rows[len(SPECIALS) :] >= 0).any():
        raise DataError(
            f"none of the {len(target) - len(SPECIALS):,} {target.kind}s of this vocabulary is among the "
            f"{len(vocab) - len(SPECIALS):,} of the model to start from; is it of another language?"
        )
    return rows


def report_match(rows: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> Matched:
    """Say how much `match_words` found; `counts` are the training tokens of each entry."""
    found = rows >= 0
    tokens = None if counts is None else float(counts[found].sum() / max(1, counts.sum()))
    return Matched(len(rows), int(found.sum()), tokens)


def refuse_other_architecture(old: ModelSpec, new: ModelSpec, origin: str) -> None:
    """Raise ShapeMismatch unless two models differ in nothing but vocabulary, dropout and name."""
    sides = [f.name for f in fields(ModelSpec) if f.name not in NOT_ARCHITECTURE]
    if any(getattr(old, side) != getattr(new, side) for side in sides):
        raise ShapeMismatch(
            f"{origin} has the model {old.name} ({_in_words(old, sides)}), and this run trains {new.name} "
            f"({_in_words(new, sides)}); start from a model of the same shape, or at random (--init none)"
        )


def _in_words(spec: ModelSpec, sides: list[str]) -> str:
    return ", ".join(f"{side} {getattr(spec, side)}" for side in sides if getattr(spec, side) is not None)


def carry(
    params: Params,
    vocab: Vocab,
    target_spec: ModelSpec,
    target_vocab: Vocab,
    seed: int,
    unmatched: Unmatched = "uniform",
    counts: NDArray[np.int64] | None = None,
) -> Carried:
    r"""Return initial parameters of `target_spec` from those of the same architecture over another vocabulary.

    .. math::  θ'[i] = θ[j]\ \text{where}\ \mathrm{word}'_i = \mathrm{word}_j,\ \text{else}\ U(−0.05, 0.05)
               \ \text{or}\ \tfrac1V \sum_j θ[j]

    Args:
      seed: with the layer's name it seeds the rows of words that `vocab` lacks.
      unmatched: how these start: drawn, or as the mean over the words of `vocab` (specials aside).
      counts: training tokens of each entry of `target_vocab`, for the report.

    Raises:
      ShapeMismatch: another architecture, by the shapes of its layers.
    """
    rows = match_words(vocab, target_vocab)
    have = {name: tuple(p.shape) for name, p in params.items()}
    # Everything but the number of words must agree.
    want = {name: (len(vocab), *shape[1:]) if name in BY_WORD else shape for name, shape in shapes(target_spec).items()}
    if have != want:
        check_shapes(want, params, target_spec.name, "the model to start from")
    found, places = torch.from_numpy(rows >= 0), torch.from_numpy(rows[rows >= 0])
    carried: Params = {}
    for name in want:
        if name in BY_WORD:
            carried[name] = _filler(params[name], name, len(target_vocab), seed, unmatched)
            carried[name][found] = params[name][places]
        else:
            carried[name] = params[name].clone()
    return Carried(carried, report_match(rows, counts))


def _filler(old: Tensor, name: str, rows: int, seed: int, unmatched: Unmatched) -> Tensor:
    """Rows for words that have none."""
    if unmatched == "mean":
        return old[len(SPECIALS) :].mean(0).expand(rows, *old.shape[1:]).clone()
    generator = torch.Generator().manual_seed(derive_seed(seed, "carry", name))
    return torch.empty(rows, *old.shape[1:], dtype=old.dtype).uniform_(-BOUND, BOUND, generator=generator)
