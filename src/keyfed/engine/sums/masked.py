"""The sum of a private round under secure aggregation: clipped parts travel masked, noise is added to their sum.

A clipped part has no number beyond the clip S, so its fixed point is known without asking anybody: steps of S/2^18,
with which 4,096 clients fit, rounded towards zero, so that rounding never lengthens it. The step is the same however
many are drawn: else one client more could round all the others anew. Half counts lie within ±½ and are written the
same way, with 1 for S. No other number of a client is in the vector: nothing is calibrated.

Weights are held within [1/r, 1] as in every secure sum (`private_shares.held`), before the part is clipped: the noise
is added to the sum once it is open, so the server sees the sum without it. r is 2 here, that of the smallest sum that
opens: were it that of the round's own threshold, one client more could weigh all the others anew. Clients without text
add zeros.

A sum that cannot be opened (too few were called, or stayed) is released as noise alone, and costs its row. Whether it
opens depends on who plays the protocol, not on what they send: the guarantee is about a client that sends zeros
instead. So a client whose training is refused sends zeros, too; were it a drop-out, its text could close the sum of
everybody.

It does depend on who is *drawn*, which amplification by sampling asks to be hidden: where one client more opens the
sum, being drawn shows. What that costs is in the rows of the ledger (`private.dp.accounting`, `PrivateRun.row`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.gather import HiddenRound
from keyfed.engine.sums.noised import MOST_TOLD, NoisedSum, words_of
from keyfed.engine.sums.secure_round import context_of
from keyfed.engine.sums.secure_simulation import Costs, MaskedSum
from keyfed.errors import SecureSumError
from keyfed.federated.types import Aggregate, ClientId, Params, Refusal, Share
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.dp.noise import Noising
from keyfed.private.secagg.threshold import PRIVATE_RATIO, SecureSettings

_MOST_WORD = 2**30  # of a sum; beyond it a word may be a liar's (`wire.server_private.folded`)


def fixed_point(clip: float) -> float:
    """Return the step with which sums of up to 4,096 clipped parts fit into 32 bits, however many are drawn.

    Example:
      >>> fixed_point(1.0) == 2.0**-18
      True
    """
    return clip * MOST_MEMBERS / _MOST_WORD


class FixedPointSum(NoisedSum):
    """`NoisedSum` whose clients write vectors of integers.

    Attributes:
      written: the last client's vector; what becomes of it is for whoever sums vectors.
    """

    def __init__(self, like: Params, noising: Noising) -> None:
        super().__init__(like, noising, PRIVATE_RATIO)
        self._step, self._told_step = fixed_point(noising.clip), fixed_point(1.0)
        self._words = words_of({name: like[name] for name in self._total})
        self._silent: set[ClientId] = set()
        self.written: Vector = np.zeros(0, np.uint32)

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Clip and round one client's part, and send it."""
        parts, masses, told = self._part(upload, share)
        numbers = torch.cat([part.flatten().cpu() for part in parts.values()]).numpy()
        weights = np.array([masses.get(name, 0.0) for name in self._total])
        halves = np.zeros(MOST_TOLD)
        halves[: len(told)] = list(told.values())
        pieces = [np.concatenate([numbers, weights]) / self._step, halves / self._told_step]
        if share.silent:
            self._silent.add(client)
        self._send(client, np.trunc(np.concatenate(pieces)).astype(np.int64).astype(np.uint32))

    def refuse(self, client: ClientId) -> None:
        """Add zeros for a client whose training is refused: it stays in the protocol, and is no contributor."""
        self._silent.add(client)
        self._send(client, np.zeros(self._words, np.uint32))

    def _send(self, client: ClientId, vector: Vector) -> None:
        self.written = vector

    def _read(self, numbers: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        place = 0
        for total in self._total.values():
            part = numbers[place : place + total.numel()] * self._step
            total.copy_(torch.from_numpy(part).reshape(total.shape))
            place += total.numel()
        for name in self._mass:
            self._mass[name] = float(numbers[place]) * self._step
            place += 1
        for name in self._told:
            self._told[name] = float(numbers[place]) * self._told_step
            place += 1


class MaskedNoisedSum(FixedPointSum):
    """`NoisedSum` whose clients are added through a secure sum, in the real protocol."""

    def __init__(self, like: Params, noising: Noising, hidden: HiddenRound, settings: SecureSettings) -> None:
        super().__init__(like, noising)
        agreed = {"clip": noising.clip, "told": list(self._told)}
        context = context_of(like, hidden.method, agreed, hidden.round, "upload")
        self._masked: MaskedSum | None = None
        if len(hidden.called) > MOST_MEMBERS:  # clients refuse so many, and their sum could go round
            return
        try:
            self._masked = MaskedSum(context, self._words, hidden, settings, Costs())
        except SecureSumError:  # too few were called: everybody declines
            self._masked = None

    def _send(self, client: ClientId, vector: Vector) -> None:
        if self._masked is None:
            return
        try:
            self._masked.add(client, vector)
        except SecureSumError:
            self._masked = None

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Open the sum and release it with noise; noise alone if it stays closed."""
        if self._masked is not None:
            try:
                total, survivors = self._masked.total()
            except SecureSumError:
                pass
            else:
                self._read(total.astype(np.int32).astype(np.float64))
                self._contributors = [client for client in survivors if client not in self._silent]
        return super().aggregate(refused)
