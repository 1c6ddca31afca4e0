"""What a client gives a run at most, whatever the server sends: size of the model, work, runs that are kept.

The owner sets the first few (`keyfed client --help`); they are kept in the client's home and named in the consent. The
constants below bound what a hostile server could fill a disk or the memory with. All are checked before anything of the
size in question is allocated. Importing this needs no torch: the commands that set the limits run without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keyfed.errors import ConfigError

if TYPE_CHECKING:
    from keyfed.model.language_model import ModelSpec

MOST_BEGIN = 16 << 20  # bytes of what a server says when a run begins: the configuration and the vocabulary
MOST_PINS = 20_000  # identities of other clients that are remembered
MOST_ENDED = 1_000  # ended runs whose names are remembered
MOST_ROSTER = 30_000  # clients on a roster: twice as many marks are still read again (`messages.MOST_VALUES`)
MOST_LAYERS = 64
MOST_SUM_WORDS = 64 << 20  # of a client's vector in one sum of a count: 256 MiB
MOST_LISTED = 4 << 20  # n-grams of one length that a count has released, or lists
MOST_COUNT_FILE = 256 << 20  # bytes of what a count has released, as the file that it becomes
MOST_STEP_NUMBERS = 1 << 28  # of embeddings and recurrent layers in one training step: 1 GiB in float32


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client's owner allows.

    Attributes:
      parameters: of a model.
      epochs: passes over the text in one round.
      minutes: of training in one round.
      runs: runs that have not ended and of which something is kept; a further one ends the one unused for longest.
      epsilon: own privacy budget over all runs (`private.dp.own_ledger`); None for none.
      roster: hash of a roster that the owner trusts, however many of its clients are new; "" for none.
    """

    parameters: int = 50_000_000
    epochs: int = 50
    minutes: float = 10.0
    runs: int = 20
    epsilon: float | None = None
    roster: str = ""

    def __post_init__(self) -> None:
        for name in ("parameters", "epochs", "minutes", "runs", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"a client's limit of {name} is {value}; expected a number above 0")


def check_size(spec: ModelSpec, epochs: int, rows: int, window: int, limits: Limits) -> None:
    """Refuse a model or an amount of local work beyond a client's limits, by arithmetic alone.

    Args:
      rows, window: lines of a batch and tokens of a line: one step reads rows · window tokens.

    Raises:
      Rejected: the limit that is exceeded, and how the owner can raise it.
    """
    from keyfed.model.cells import gates_of
    from keyfed.model.language_model import shapes
    from keyfed.wire.messages import Rejected

    if spec.layers > MOST_LAYERS:  # before `shapes`, which has an entry a layer
        raise Rejected("over limit", f"a model of {spec.layers:,} layers; this client takes at most {MOST_LAYERS}")
    count = sum(math.prod(shape) for shape in shapes(spec).values())
    if count > limits.parameters:
        raise Rejected(
            "over limit",
            f"a model of {count:,} parameters; this client takes at most {limits.parameters:,} (--most-parameters)",
        )
    if epochs > limits.epochs:
        raise Rejected(
            "over limit", f"{epochs:,} epochs a round; this client takes at most {limits.epochs:,} (--most-epochs)"
        )
    numbers = rows * window * (gates_of(spec.cell) * spec.hidden * spec.layers + 2 * spec.embed)
    if numbers > MOST_STEP_NUMBERS:
        raise Rejected(
            "over limit",
            f"steps of {rows:,} lines of {window:,} tokens: {numbers:,} numbers in its layers; this client "
            f"takes at most {MOST_STEP_NUMBERS:,}",
        )


def time_limit(limits: Limits, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Return what is called before every step of a round's work, and raises `Rejected` when its minutes are over."""
    from keyfed.wire.messages import Rejected

    until = clock() + 60 * limits.minutes

    def look() -> None:
        if clock() > until:
            raise Rejected(
                "over limit", f"the round took longer than this client's {limits.minutes:g} minutes (--most-minutes)"
            )

    return look
