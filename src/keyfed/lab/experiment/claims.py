"""A claim of a study's file: what a paper says, or what we set out to show, in a form that can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLAIMS = ("lower", "higher", "close", "costs", "printed", "below")
BOUNDED = ("below", "costs")  # kinds that need a bound
ABOUT = ("budget", "reach", "text")


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence and how it is checked.

    Attributes:
      kind: "lower", "higher": the rows of `of` against the same rows with the labels of `than`; "close": they differ
        by no more than `within`; "costs": they are higher by no more than `bound`, a share of one; "printed": the rows
        of `of` against the printed value, within `within`; "below": the rows of `of` against `bound`.
      about: "budget": judged after the rounds and tokens of its cells, which the page says beside the verdict; "reach":
        about what a method can reach, and judged only where rows have stopped learning (`reach`); "text": about
        what is counted in a text, without training.
      twice: labels that make of a row the one with twice the rounds, where it is about what a method can reach.
      front: whether the front page of the results says it.
      ours: whether it is our own goal or explanation, and not the paper's word.
      some: whether it holds as soon as one comparison does: each is another reading of the same thing.
      name: by which a `cause` names its verdict; empty for most.
      cause: sentences that say why, with numbers of cells in braces (see `causes`).
    """

    says: str
    kind: str
    of: Mapping[str, Any]
    than: Mapping[str, Any]
    measure: str
    within: float
    bound: float | None
    front: bool
    ours: bool
    some: bool
    name: str
    cause: tuple[str, ...]
    about: str = "budget"
    twice: Mapping[str, str] = field(default_factory=dict)


def read_claim(table: Mapping[str, Any]) -> Claim:
    """Read a `[[claims]]` table that was checked (`check`)."""
    bound = table.get("bound")
    return Claim(
        table["says"], table["kind"], table["of"], table.get("than", {}), table.get("measure", "perplexity"),
        float(table.get("within", 0.05)), None if bound is None else float(bound), bool(table.get("front", False)),
        bool(table.get("ours", False)), bool(table.get("some", False)), str(table.get("name", "")),
        tuple(table.get("cause", ())), str(table.get("about", "budget")), table.get("twice", {}),
    )  # fmt: skip
