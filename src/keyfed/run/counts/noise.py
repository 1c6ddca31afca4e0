r"""Noise on the sums of a count, booked in a ledger of its own before it is drawn.

A client moves the opened sum of cells by a norm that the plan bounds. It is :math:`\sqrt{Md}` for a sketch of depth d,
and :math:`\sqrt{M}` for a recount, which is of clients and not of uses. For a histogram of T tokens it is T. The noise
has standard deviation z times that norm. It is added to the opened sum, so the server sees the sum without it, as in
training under secure aggregation (docs/privacy.md). It protects from a reader of the noised sums. Candidates and
thresholds follow from noised numbers: they cost nothing more.

Noise is derived from the run's seed, so that a count repeats: its ε is SIMULATED. With an imagined population the noise
is that of the population, scaled to the clients that there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.schema import PrivacyConfig
from keyfed.errors import ConfigError, PrivacyError
from keyfed.model.counts import FILE, CountTerms
from keyfed.private.dp.accounting import FINE, Release, calibrate, delta_for, epsilon
from keyfed.private.dp.ledger import HEAD, LEDGER, Terms, open_ledger, read_ledger
from keyfed.private.dp.noise import derived

TOKENS_NOISED = 16  # validation tokens of a client
CLEAR_OF_NOISE = 3.0  # standard deviations below which a histogram's cell counts as empty
FOLDER = "counts.privacy"
ROUNDING = 1e-6  # of ε, between two ways of adding up the same releases


def releases_of(folder: Path) -> int:
    """Return how many noised sums of a run's clients are booked; PrivacyError where the ledger is damaged."""
    home = folder / FOLDER
    if not (home / LEDGER).exists() and not (home / HEAD).exists():
        return 0
    return len(read_ledger(home).entries)


def check_booked(folder: Path, about: CountTerms) -> None:
    """Refuse counts that should have noise and have none, or claim less than the ledger next to them has booked."""
    if about.epsilon is None or about.delta is None:
        raise PrivacyError(
            f"{folder} was trained with --dp, and its counts have no noise: they would tell what the run does not; "
            "count again with --dp"
        )
    if not releases_of(folder):
        raise PrivacyError(
            f"{folder / FILE} claims epsilon {about.epsilon:.4g}, and {folder / FOLDER} has no release: the noise is "
            "not booked; count again with --dp"
        )
    ledger = read_ledger(folder / FOLDER)
    spent, verdict = ledger.epsilon(grid=FINE), ledger.verdict()
    less = about.epsilon < spent * (1 - ROUNDING)
    if less or about.delta != ledger.terms.delta or about.verdict != verdict:
        raise PrivacyError(
            f"{folder / FILE} claims {about.verdict}, epsilon {about.epsilon:.4g} at delta {about.delta:.4g}; its "
            f"ledger has {verdict}, {spent:.4g} at {ledger.terms.delta:.4g}: the file is not that of {FOLDER}"
        )


def clear_of_noise(noisy: NDArray[np.float64], std: float) -> NDArray[np.float64]:
    """Empty the cells of a histogram that may be noise alone."""
    return np.where(noisy > CLEAR_OF_NOISE * std, noisy, 0.0)


class CountNoise:
    """Adds noise to one sum after another, at most as many as were announced."""

    def __init__(
        self,
        privacy: PrivacyConfig,
        folder: Path,
        clients: int,
        releases: int,
        most: int,
        seed: int,
        *,
        secure: bool,
        raw_vocabulary: bool,
    ) -> None:
        """Open the ledger of a count; the last two as in `ledger.Terms`."""
        if privacy.mechanism != "gaussian":
            raise ConfigError("privacy.mechanism=tree is for rounds of training; a count has none")
        if privacy.noise == 0:
            raise ConfigError("privacy.noise is 0: counts without noise have no budget; leave --dp out")
        population = privacy.population or clients
        self.delta = delta_for(population, privacy.delta)
        self.z = privacy.noise if privacy.noise is not None else calibrate(
            float(privacy.epsilon or 0), self.delta, 1.0, releases
        )  # fmt: skip
        self._scale, self._seed, self._releases = clients / population, seed, releases
        terms = Terms(
            delta=self.delta, population=population, clients=clients, cohort=population, called=clients, z=self.z,
            mechanism="gaussian", randomness="derived", budget=privacy.epsilon, secure=secure,
            raw_vocabulary=raw_vocabulary,
            sensitivity=f"Sensitivity: a client contributes at most {most:,} n-grams of one length and {TOKENS_NOISED} "
            "validation tokens to a sum; norms are in keyfed.run.counts.noise.",
        )  # fmt: skip
        home = folder / FOLDER
        home.mkdir(parents=True, exist_ok=True)
        self._ledger = open_ledger(home, terms)
        if self._ledger.entries:
            raise PrivacyError(
                f"{home} has {len(self._ledger.entries)} releases already: another count of these clients adds to what "
                "was spent. Count for another run, or remove the folder and add the epsilons yourself"
            )

    def add(self, what: str, cells: NDArray[Any], norm: float) -> tuple[NDArray[np.float64], float]:
        """Book a release, then return the cells with noise, and its standard deviation."""
        if len(self._ledger.entries) >= self._releases:
            raise PrivacyError(f"the sum {what} is one more than the {self._releases} that the noise was made for")
        entry = self._ledger.book(Release(self.z, 1.0), f"counts {what}", 0)
        std = self.z * norm * self._scale
        draw = derived(self._seed, 0, entry.attempt)(f"counts/{what}", torch.Size((cells.size,)))
        return cells + std * draw.numpy(), std

    def histogram(self, what: str, cells: NDArray[Any], norm: float) -> tuple[NDArray[np.float64], float]:
        """Add noise to a histogram, and empty the cells that may be noise alone."""
        noisy, std = self.add(what, cells, norm)
        return clear_of_noise(noisy, std), std

    @property
    def announced(self) -> float:
        """ε of all sums that the noise was made for, also where a count ends before it has used them."""
        return epsilon([Release(self.z, 1.0, self._releases)], self.delta, grid=FINE)

    @property
    def verdict(self) -> str:
        return self._ledger.verdict()
