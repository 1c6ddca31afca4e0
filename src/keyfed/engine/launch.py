"""How this process was started: alone, or as one rank of several under `torchrun`. Read without importing torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from keyfed.errors import ConfigError

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """This process among those of a run.

    Attributes:
      local: number of this rank among those of its machine, and `neighbours` how many those are.
      host: where rank 0 is to be found, with `port`.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    neighbours: int = 1
    host: str = "127.0.0.1"
    port: int = 0


def place() -> Place:
    """Return this process's place; alone unless `torchrun` (or what else sets its variables) says otherwise.

    Raises:
      ConfigError: there are several ranks, but it is not said which this is or where the others are.
    """
    world = _number("WORLD_SIZE", 1)
    if world <= 1:
        return Place()
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but {', '.join(missing)} not set; start with torchrun, or unset WORLD_SIZE"
        )
    rank = _number("RANK", 0)
    if not 0 <= rank < world:
        raise ConfigError(f"RANK is {rank}; expected 0 to {world - 1}, below WORLD_SIZE")
    local, neighbours = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    return Place(rank, world, local, neighbours, os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))


def leads() -> bool:
    """Whether this process speaks for the run: it is alone or rank 0. Never raises, since errors are to be said too."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def refuse_ranks(what: str) -> None:
    """Raise ConfigError for what runs in one process only."""
    world = place().world
    if world > 1:
        raise ConfigError(f"{what} was started as {world} ranks and runs in one process; only training takes several")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'{name} is "{text}"; expected a whole number, as torchrun sets it') from None
