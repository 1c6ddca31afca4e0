"""LEAF's JSON (Caldas et al. 2018, arXiv 1812.01097): users, num_samples, user_data: {user: {x, y}}.

Three kinds of samples hold text:

    shakespeare   x = windows of 80 characters, y = the character after each
    reddit        x = lists (of lists) of tokens with <BOS>, <EOS> and <PAD>
    any other     x = strings

`lines_of` turns each back into running lines; anything else (images, tweets with their metadata) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_MARKS = frozenset({"<BOS>", "<EOS>", "<PAD>"})


def users_of(data: object) -> dict[str, Any] | None:
    """Return the samples by user in the order of `users`, or None if this is not a LEAF object."""
    if not isinstance(data, dict):
        return None
    users, user_data = data.get("users"), data.get("user_data")
    if not isinstance(users, list) or not isinstance(user_data, dict):
        return None
    return {str(user): user_data.get(str(user)) for user in users}


def lines_of(samples: object) -> tuple[str, list[str]]:
    """Return what one user's samples are (`characters`, `tokens` or `text`) and their lines.

    Raises:
      ValueError: They are none of these; the message says why.

    Example:
      >>> lines_of({"x": ["abc", "bcd", "xyz"], "y": ["d", "e", "!"]})
      ('characters', ['abcde', 'xyz!'])
      >>> lines_of({"x": [[["<BOS>", "hello"], ["world", "<PAD>"]]], "y": []})
      ('tokens', ['hello world'])
      >>> lines_of({"x": ["Two lines", "of text"]})
      ('text', ['Two lines', 'of text'])
    """
    x = samples.get("x") if isinstance(samples, dict) else None
    y = samples.get("y") if isinstance(samples, dict) else None
    if not isinstance(x, list) or not x:
        raise ValueError("no samples x")
    if all(isinstance(sample, str) for sample in x):
        if isinstance(y, list) and _are_windows(x, y):
            return "characters", [line for text in running_text(x, y) for line in _split(text)]
        return "text", [line for sample in x for line in _split(sample)]
    tokens = [list(_tokens(sample)) for sample in x]
    if any(" " in token for sample in tokens for token in sample):
        raise ValueError("samples x are records with fields, not lists of tokens")
    return "tokens", [" ".join(sample) for sample in tokens if sample]


def running_text(x: list[str], y: list[str]) -> list[str]:
    """Join windows that each lie one character after the one before; a gap starts a new text.

    Example:
      >>> running_text(["to b", "o be", " be "], ["e", " ", "o"])
      ['to be o']
    """
    texts: list[list[str]] = []
    due = None
    for window, following in zip(x, y, strict=True):
        if window == due:
            texts[-1].append(following)
        else:
            texts.append([window, following])
        due = window[1:] + following
    return ["".join(parts) for parts in texts]


def _are_windows(x: list[str], y: list[Any]) -> bool:
    return (
        len(y) == len(x)
        and all(isinstance(following, str) and len(following) == 1 for following in y)
        and len({len(window) for window in x}) == 1
        and len(x[0]) > 1
    )


def _split(text: str) -> list[str]:
    return [line for piece in re.split(r"\r\n?|\n", text) if (line := piece.strip())]


def _tokens(sample: object) -> Iterator[str]:
    if isinstance(sample, str):
        if sample.strip() and sample not in _MARKS:
            yield sample
    elif isinstance(sample, list):
        for part in sample:
            yield from _tokens(part)
    else:
        raise ValueError(f"samples x hold {type(sample).__name__}, not text")
