"""A method as data: what is stored, compared and sent. No tensors here, so that reading a configuration is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """A part as data: its name and its numbers."""

    name: str
    options: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method as data: its name and numbers. This travels and is stored; both sides build the method from it.

    Attributes:
      mediator: a mediator in the place of the method's own, `server` a server rule; None keeps the method's.
      keep: share of the entries of an upload that is sent (top-k sparsification); 1 for all.
      quantise: how an upload's numbers are sent: none (as they are), fp16 or int8.
    """

    name: str
    options: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    mediator: Part | None = None
    server: Part | None = None
    keep: float = 1.0
    quantise: str = "none"
