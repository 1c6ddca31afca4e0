"""What a language model must be to be trained or checked here, whoever wrote it.

    module(tokens)         → logits, or (logits, state)     at the start of a text
    module(tokens, state)  → (logits, state)                going on from there

`tokens` is [batch, time] int64; `logits` is [batch, time, vocabulary], where position t may use tokens up to and
including t and predicts token t + 1; `state` is any nest of tuples, lists and dictionaries of tensors. A module that
returns logits alone has no memory: its context ends where a window ends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from keyfed.errors import ShapeMismatch


def logits_of(out: Any, tokens: Tensor, vocab_size: int) -> Tensor:
    """Take the logits out of what a module returned and check their shape.

    Example:
      >>> import torch
      >>> list(logits_of((torch.zeros(2, 5, 9), "a state"), torch.zeros(2, 5), 9).shape)
      [2, 5, 9]
    """
    logits = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(logits, Tensor):
        raise ShapeMismatch(
            f"tokens {list(tokens.shape)} gave {type(out).__name__}, expected logits [batch, time, vocabulary] or a "
            "pair (logits, state)"
        )
    got, want = list(logits.shape), [*tokens.shape, vocab_size]
    if got != want:
        swapped = got[:2] == [want[1], want[0]]
        hint = "set batch_first, or transpose" if swapped else "every token read gives a row of logits"
        raise ShapeMismatch(f"tokens {want[:2]} gave logits {got}, expected {want}: {hint}")
    return logits
