r"""A client's own account: what all parts that ever left it cost together, whichever run they were for.

A client knows in which rounds it took part, and cannot check how it was drawn. So every part counts at rate 1, without
amplification by sampling. Given who was drawn, the releases are Gaussian mechanisms one after the other, and their
zero-concentrated costs add up:

.. math::  ρ = \sum_r \frac{s_r}{2 z_r^2}, \qquad ε = ε_{Gauss}(ρ, δ)

with z the noise multiplier that the server of run r said it adds, and s_r the parts that left for it. For tree noise
s_r is the squared sensitivity of a whole noise tree to that many parts, wherever they lay
(`accounting.forest_sensitivity`). One δ is for everything. That the noise is added at all, a client cannot see.

The account lies in two files of the client's home: all entries with their checksum, and the number and checksum of the
last state. A damaged, older or missing file is an error and never a smaller ε; the client then takes no part. Who
deletes both files begins anew: an account is no proof against its owner.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.errors import PrivacyError
from keyfed.files import write_atomically
from keyfed.private.dp.accounting import forest_sensitivity, rho_to_eps

FILE, HEAD = "spent.json", "spent.head.json"
DELTA = 1e-6
MOST_ENTRIES = 5_000
DAMAGED = "restore the client's folder from a backup, or leave (--leave) and enrol anew; until then it takes no part"


@dataclass(frozen=True, slots=True)
class Spend:
    """What a part of a private run costs.

    Attributes:
      z: noise multiplier that the server promised.
      gap: steps between two parts of one client under tree noise; None for independent noise.
      rounds: of the run, as promised.
    """

    z: float
    gap: int | None = None
    rounds: int = 1

    def rho(self, parts: int) -> float:
        """Return the zero-concentrated cost of so many parts; ∞ without noise.

        Example:
          >>> Spend(2.0).rho(3), Spend(2.0, gap=4, rounds=4).rho(1)
          (0.375, 0.625)
        """
        if not parts:
            return 0.0
        if not 0 < self.z < math.inf:
            return math.inf
        if self.gap is None:
            return parts / (2 * self.z**2)
        # A whole tree of twice the rounds or more, as the server may release some again; all parts have room in it.
        leaves = 2 << max(self.rounds, parts * self.gap).bit_length()
        return forest_sensitivity(leaves, self.gap, parts) / (2 * self.z**2)


@dataclass(frozen=True, slots=True)
class Account:
    """What was written down.

    Attributes:
      parts: parts that left, by run and by what one costs.
      open_runs: runs without differential privacy that the client took part in.
      number: how often the account was written.
    """

    parts: Mapping[tuple[str, Spend], int]
    open_runs: frozenset[str]
    number: int

    def rho(self) -> float:
        """The cost of everything that left for private runs."""
        return math.fsum(spend.rho(count) for (_, spend), count in self.parts.items())

    def epsilon(self) -> float:
        """ε of everything that left for private runs, at `DELTA`."""
        rho = self.rho()
        return 0.0 if rho == 0 else math.inf if rho == math.inf else rho_to_eps(rho, DELTA)

    def with_part(self, run: str, spend: Spend | None) -> Account:
        """Return the account after another part of a run; None for one that promises nothing."""
        if spend is None:
            return Account(self.parts, self.open_runs | {run}, self.number + 1)
        key = (run, spend)
        return Account({**self.parts, key: self.parts.get(key, 0) + 1}, self.open_runs, self.number + 1)


class OwnLedger:
    """The account in a client's home, and the budget of its owner.

    Args:
      budget: ε that nothing may lead beyond; None for none.
    """

    def __init__(self, home: Path, budget: float | None = None) -> None:
        self._home, self._budget = home, budget

    def read(self) -> Account:
        """Read the account.

        Raises:
          PrivacyError: it is not the one that was written last.
        """
        path, head = self._home / FILE, self._home / HEAD
        if not path.exists() and not head.exists():
            return Account({}, frozenset(), 0)
        try:
            content = json.loads(path.read_text("utf-8"))
            digest = content.pop("sum")
            fits = digest == _sum(content)
            entries = {
                (str(run), Spend(float(z), gap, int(rounds))): int(n) for run, z, gap, rounds, n in content["parts"]
            }
            found = Account(entries, frozenset(map(str, content["open"])), int(content["number"]))
            last: dict[str, Any] = json.loads(head.read_text("utf-8")) if head.exists() else {"number": 0, "sum": ""}
            newest = found.number == last["number"] and digest == last["sum"]
            fits = fits and (newest or found.number == last["number"] + 1)  # killed between the two files
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fits = False
        if not fits:
            raise PrivacyError(f"{path}: the account of what left this client is damaged, missing or older; {DAMAGED}")
        return found

    def allow(self, run: str, spend: Spend | None) -> None:
        """Refuse another part of a run that the budget does not cover.

        Raises:
          PrivacyError: it does not, or the account cannot be trusted.
        """
        before = self.read()
        if self._budget is None:
            return
        if spend is None:
            raise PrivacyError(
                f"this run has no differential privacy, and this client keeps to ε = {self._budget:g} over all its runs"
            )
        after = before.with_part(run, spend).epsilon()
        if not after <= self._budget:
            raise PrivacyError(
                f"another part would make this client's own ε {after:.3g} (δ = {DELTA:g}, all runs); its budget is "
                f"{self._budget:g}"
            )

    def book(self, run: str, spend: Spend | None) -> None:
        """Write a part down, durably; only then may it leave."""
        before = self.read()
        if spend is None and run in before.open_runs:
            return
        after = before.with_part(run, spend)
        if len(after.parts) + len(after.open_runs) > MOST_ENTRIES:
            raise PrivacyError(f"{self._home / FILE}: {MOST_ENTRIES:,} runs are counted, and no more fit; {DAMAGED}")
        content: dict[str, Any] = {
            "parts": [[mark, s.z, s.gap, s.rounds, count] for (mark, s), count in after.parts.items()],
            "open": sorted(after.open_runs),
            "number": after.number,
        }
        digest = _sum(content)
        write_atomically(self._home / FILE, json.dumps({**content, "sum": digest}).encode())
        write_atomically(self._home / HEAD, json.dumps({"number": after.number, "sum": digest}).encode())

    def said(self) -> str:
        """Return the account in words."""
        account = self.read()
        runs, parts = len({run for run, _ in account.parts}), sum(account.parts.values())
        budget = "no budget" if self._budget is None else f"budget {self._budget:g}"
        line = f"ε = {account.epsilon():.3g} at δ = {DELTA:g} for {parts:,} parts of {runs:,} private runs ({budget})"
        if account.open_runs:
            line += (
                f"; {len(account.open_runs):,} runs without differential privacy: no guarantee for what left in those"
            )
        return line


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
