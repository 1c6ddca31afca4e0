"""Values from TOML and the command line, as what their places are annotated with."""

from __future__ import annotations

import functools
import math
import types
import typing
from pathlib import PurePath
from typing import Any, Literal

from keyfed.errors import ConfigError

LONGEST_SHOWN = 200  # characters of a value that stands in an error


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """Turn a value from TOML or the command line into the annotated type, or say what was expected.

    Example:
      >>> coerce("none", int | None, "data.clients") is None
      True
      >>> coerce("1e-3", float, "method.lr")
      0.001
    """
    options = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        none = value is None or (isinstance(value, str) and value.lower() == "none")
        if none and type(None) in options:
            return None
        annotation = next(t for t in options if t is not type(None))
        options = typing.get_args(annotation)
    try:
        if typing.get_origin(annotation) is Literal:
            if value in options:
                return value
            raise ConfigError(f"{where} is {_shown(value)}; expected one of {', '.join(map(str, options))}")
        if annotation is bool:
            known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
            if isinstance(value, bool):
                return value
            return known[str(value).lower()]
        if annotation is int:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(float(value)) if not str(value).lstrip("-").isdigit() else int(value)
        if annotation is float:
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
        if not isinstance(value, str | int | float | PurePath):
            raise ValueError
        return str(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        name = getattr(annotation, "__name__", str(annotation))
        raise ConfigError(f"{where} is {_shown(value)}; expected {name}") from None


def _shown(value: Any) -> str:
    """A value in an error: as it is if it is short and plain, else its kind. It may be somebody's text."""
    if isinstance(value, str | int | float | PurePath):
        text = str(value)
        return f'"{text}"' if len(text) <= LONGEST_SHOWN and "\n" not in text else f"a text of {len(text):,} characters"
    return f"a {type(value).__name__}"


@functools.cache  # evaluated anew for every key otherwise: most of the time of reading a configuration
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the types of a section's fields, or of a function's arguments."""
    return typing.get_type_hints(annotated)
