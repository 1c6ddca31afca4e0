"""The first calls of a user's module: made, tried out, and refused in one line where it cannot be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from keyfed.errors import ConfigError, KeyfedError
from keyfed.model.conformance import logits_of

MakeModule = Callable[[int], nn.Module]
"""Size of the vocabulary → a new module, its parameters drawn from torch's global generator."""
NestedState = Any  # a nest of tensors; () for a module that keeps none, None at the start of a text
TRIAL_TIME = 5  # tokens of a row in the trial calls, where the window allows; rows are one and two more


@dataclass(frozen=True, slots=True)
class Habits:
    """What the trial calls showed.

    Attributes:
      axes: the axis of each tensor of the state that counts rows (None: rows share it); None for no state at all.
      random: it draws random numbers while it trains.
    """

    axes: tuple[int | None, ...] | None
    random: bool


def qualified_name(make: object) -> str:
    """Name a factory as Python finds it: module and name; of a partial, that of its function."""
    inner = getattr(make, "func", make)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's global generator, the only one a module knows, start at this seed; put it back afterwards."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield


def build_module(make: MakeModule, vocab: int, seed: int, name: str) -> nn.Module:
    """Make a module whose random numbers are those of a seed, on the CPU."""
    if isinstance(make, nn.Module) or not callable(make):
        raise ConfigError(
            f"module is a {type(make).__name__}; expected a function that takes the vocabulary's size and returns a "
            "new nn.Module, e.g. module=lambda vocab_size: MyModel(vocab_size)"
        )
    with seeded(seed, torch.device("cpu")):
        try:
            module = make(vocab)
        except KeyfedError:
            raise
        except Exception as e:
            raise ConfigError(f'module "{name}" could not be made for a vocabulary of {vocab}: {first_line(e)}') from e
    if not isinstance(module, nn.Module):
        raise ConfigError(f'module "{name}" returned a {type(module).__name__}; expected a torch.nn.Module')
    return module.to("cpu")


def trial_tokens(vocab: int, time: int, rows: int) -> Tensor:
    """Tokens to try a module with, [rows, time]."""
    return torch.arange(rows * time).remainder(vocab).view(rows, time)


@torch.no_grad()
def try_out(module: nn.Module, vocab: int, window: int, name: str) -> Habits:
    """Call the module as training will, and refuse what cannot be trained."""
    time = min(window, TRIAL_TIME)

    def call(rows: int, state: NestedState = None) -> Any:
        tokens = trial_tokens(vocab, time, rows)
        try:
            out = module(tokens) if state is None else module(tokens, state)
            logits = logits_of(out, tokens, vocab)
        except KeyfedError as e:
            raise ConfigError(f'module "{name}": {e}') from e
        except Exception as e:
            raise ConfigError(
                f'module "{name}" failed on tokens {list(tokens.shape)}: {first_line(e)}; it is called '
                "module(tokens) at the start of a text and module(tokens, state) afterwards"
            ) from e
        if not bool(torch.isfinite(logits).all()):
            raise ConfigError(
                f'module "{name}" gives logits that are not finite before any training; look at its start'
            )
        return out

    before = {key: b.clone() for key, b in module.named_buffers()}
    drawn = torch.get_rng_state()
    module.train()
    out = call(time + 1)
    random = not torch.equal(drawn, torch.get_rng_state())
    for key, b in module.named_buffers():
        if key not in before or not torch.equal(b, before[key]):
            raise ConfigError(
                f'module "{name}": buffer "{key}" changes while training, and no method averages buffers; use a layer '
                "without running statistics (LayerNorm for BatchNorm)"
            )
    if isinstance(out, Tensor):
        return Habits(None, random)
    if len(out) != 2:
        raise ConfigError(f'module "{name}" returned {len(out)} values; expected logits, or a pair (logits, state)')
    module.eval()
    state, more = _tensors(call(time + 1)[1], name), _tensors(call(time + 2)[1], name)
    again = call(time + 1, out[1])
    if isinstance(again, Tensor) or tree_flatten(again[1])[1] != tree_flatten(out[1])[1]:
        raise ConfigError(f'module "{name}" returns a state of another form once it is given one; keep its form')
    return Habits(tuple(_row_axis(a, b, name) for a, b in zip(state, more, strict=True)), random)


def _tensors(state: Any, name: str) -> list[Tensor]:
    leaves, _ = tree_flatten(state)
    if not leaves or any(not isinstance(leaf, Tensor) for leaf in leaves):
        got = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})) or "nothing"
        raise ConfigError(
            f'module "{name}" returned a state of {got}; expected tensors (in tuples, lists or dictionaries), or '
            "logits alone from a module that keeps no state"
        )
    return leaves


def _row_axis(few: Tensor, more: Tensor, name: str) -> int | None:
    """The axis that grew with the number of rows, by which a state is cut; None where rows share a tensor."""
    grew = [axis for axis, (a, b) in enumerate(zip(few.shape, more.shape, strict=False)) if a != b]
    if len(grew) > 1 or few.dim() != more.dim():
        raise ConfigError(
            f'module "{name}": a state of {list(few.shape)} became {list(more.shape)} with one row more; expected one '
            "axis that counts rows"
        )
    return grew[0] if grew else None


def first_line(error: Exception) -> str:
    """Say an error of somebody else's code in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
