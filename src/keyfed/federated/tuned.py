"""Defaults found by search, for character models; those of word models stand in the methods' signatures.

Both were found on validation text alone, one seed, over the grids in docs/LOG.md: characters on Shakespeare's complete
works (char-lstm, 10 IID clients, 40,000 characters a client and round, 5 rounds), words on PTB (GRU-300, 10 of 100 IID
clients a round, 10 to 20 rounds). On IID clients whatever holds a client back costs: the best μ and ρ lie at the lower
edge of their grids. `keyfed tune METHOD` searches for other data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS: dict[str, dict[str, float]] = {
    "fedavg": {"lr": 0.02},
    "fedsgd": {"lr": 2.0},
    "fedprox": {"lr": 0.015, "mu": 0.0001},
    "fedatt": {"lr": 0.02},
    "fedmed": {"lr": 0.02},
    "fedadam": {"lr": 0.02, "server_lr": 0.2},
    "fedyogi": {"lr": 0.02, "server_lr": 0.2},
    "fedadagrad": {"lr": 0.02, "server_lr": 0.15},
    "fedavgm": {"lr": 0.02},
    "fednesterov": {"lr": 0.02},
    "admm": {"lr": 0.02, "rho": 0.0003},
    "liadmm": {"rho": 0.001, "r": 0.15},
    "fedadmm": {"lr": 6.0, "rho": 0.001},
}


def tuned_options(
    method: str,
    options: Mapping[str, Any],
    *,
    characters: bool,
    table: Mapping[str, Mapping[str, float]] = CHARACTERS,
) -> dict[str, Any]:
    """Return a method's options with the tuned defaults of a character model where the caller has set none.

    A step size tuned for Adam says nothing about SGD: with `optimiser=sgd` it is left alone.

    Args:
      table: the tuned defaults by method; those of another day where a study asks.

    Example:
      >>> tuned_options("fedprox", {"mu": 0.5}, characters=True)
      {'lr': 0.015, 'mu': 0.5}
      >>> tuned_options("fedprox", {"mu": 0.5}, characters=False)
      {'mu': 0.5}
    """
    found = dict(table.get(method, {})) if characters else {}
    if options.get("optimiser", "adam") != "adam":
        found.pop("lr", None)
    return {**found, **options}
