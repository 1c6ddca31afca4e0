"""Rounds in which the embedding stays as it is: word vectors that were trained elsewhere, on far more text, are kept.

Clients do not move it (no gradient, no weight decay, no proximal term) and do not send it up.
"""

from __future__ import annotations

from keyfed.config.load import Config
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import Network, shapes
from keyfed.errors import ConfigError
from keyfed.federated.types import Method

EMBEDDING = "embedding.weight"
FROZEN = frozenset({EMBEDDING})


def refuse_frozen(config: Config, network: Network, method: Method) -> None:
    """Raise ConfigError where a frozen embedding could not stay as it is."""
    rounds = config.train.frozen_rounds
    if not rounds:
        return
    if EMBEDDING not in shapes(network):
        raise ConfigError(
            f"train.frozen_rounds is {rounds}, but the model {network.name} has no layer {EMBEDDING}: it has "
            f"{', '.join(shapes(network))}"
        )
    if method.noise is not None:
        raise ConfigError(f"train.frozen_rounds is {rounds}, but {method.name}'s noise moves every layer; set noise=0")
    if method.solver.start is not None:
        raise ConfigError(
            f"train.frozen_rounds is {rounds}, but clients of {method.name} send all their layers when they join; "
            "use a method without duals, fedprox say"
        )


def frozen_line(config: Config, network: Network) -> str | None:
    """Say what is frozen and for how long; None if nothing is."""
    rounds, t = config.train.frozen_rounds, config.train
    if not rounds:
        return None
    tied = not isinstance(network, ModuleNetwork) and network.tied
    what = "embedding, which is the output matrix too," if tied else "embedding"
    until = "never trained" if rounds >= t.rounds else f"not trained in the first {rounds} of {t.rounds} rounds"
    return f"frozen: the {what} is {until}, and is not sent up while it is frozen"
