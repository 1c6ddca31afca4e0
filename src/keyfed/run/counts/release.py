"""From sums over clients to the two files of a count: `counts.safetensors` and `mixture.json`.

Simulated and real clients differ in how a sum is formed (`gather.Gathering`). All that is made of the opened sums is
made here, so both write the same bytes.

The mixture's weights are fitted on the text of some whole groups. Smoothing sums the same text of the same groups, and
two sums over other clients each would tell of a few (`private.secagg.nested`). Which groups, and how much of their
text, follows from the number of clients alone: how much text a client has is not known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from keyfed.engine.network import Network
from keyfed.errors import DataError
from keyfed.federated.types import Params
from keyfed.files import write_atomically
from keyfed.model.counts import FILE, CountModel, CountTerms, counts_from_bytes, counts_to_bytes
from keyfed.model.mixture import BEST, CONFIDENCE_EDGES, Mixture
from keyfed.model.mixture import FILE as MIXTURE
from keyfed.model.ngram import Ints
from keyfed.model.tables import Texts
from keyfed.run.counts.fit import MOST_TOKENS, fit_levels, fit_mixture
from keyfed.run.counts.gather import Gathering
from keyfed.run.counts.levels import CountPlan, LevelFound, count_ngrams
from keyfed.run.counts.mixing import laid_out, mixture_cells, read_both
from keyfed.run.counts.noise import TOKENS_NOISED, CountNoise

MIXTURE_TOKENS = 60_000  # validation tokens on which the mixture's weights are fitted, at most or thereabouts
MIXTURE_CLIENTS = 2_000  # whose text they are, at most; one group at least
LEAST_TOKENS = 64  # of a client: the first few words of a text say little


class Validation(Protocol):
    """Sums over the first tokens of clients' validation text."""

    def __call__(self, tokens: int) -> Gathering:
        """Return them."""
        ...


@dataclass(frozen=True, slots=True)
class NetworkReader:
    """Who reads a text next to the counts: the run's network, and whether it reads lines on their own.

    Attributes:
      watch: is called again and again while it reads; what it raises ends the reading.
    """

    spec: Network
    params: Params
    lines: bool
    watch: Callable[[], None] = lambda: None

    def mixture_cells(self, model: CountModel, text: Texts) -> tuple[Ints, Ints]:
        """Return the client and the cell of every token in the mixture's histogram."""
        laid = laid_out(model, text, BEST, self.lines)
        both = read_both(self.spec, self.params, model, laid, "cpu", watch=self.watch)
        return mixture_cells(both, laid, CONFIDENCE_EDGES)


@dataclass(frozen=True, slots=True)
class Made:
    """What a count came to: the two files, the levels, and what was summed.

    Attributes:
      sent: bytes that one client sent, by what was summed.
      closed: sums that were left out, and why; `note` of buckets without data.
    """

    model: CountModel
    data: bytes
    mixture: Mixture
    levels: Sequence[LevelFound]
    sent: dict[str, int]
    closed: list[str]
    note: str

    def write(self, folder: Path) -> None:
        """Write both files into a run's folder."""
        write_atomically(folder / FILE, self.data)
        write_atomically(folder / MIXTURE, self.mixture.to_json().encode())


def weights_text(clients: int, groups: int) -> tuple[int, int]:
    """Return how many of the groups the mixture's weights are fitted on, and how many tokens of each client.

    Example:
      >>> weights_text(100, 1), weights_text(50_000, 50)
      ((1, 600), (2, 64))
    """
    chosen = min(groups, max(1, MIXTURE_CLIENTS * groups // clients))
    return chosen, min(MOST_TOKENS, max(LEAST_TOKENS, -(-MIXTURE_TOKENS * groups // (chosen * clients))))


def longest(gathering: Gathering) -> int:
    """Return the tokens of the longest text among those summed."""
    return max(int(np.bincount(group.texts.client).max(initial=1)) for group in gathering.groups)


def make_counts(
    reader: NetworkReader,
    vocab: int,
    plan: CountPlan,
    counting: Gathering,
    validation: Validation,
    noise: CountNoise | None = None,
    published: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Made:
    """Count level by level, smooth, and fit the mixture.

    Args:
      published: the validation text is no client's: all of it is read as it is, and gets no noise.

    Raises:
      RunError: half of the clients of a sum are missing.
      DataError: no word is released.
    """
    say(
        f"counting n-grams of 1 to {plan.order} words of {counting.clients:,} clients, in {len(counting.groups):,} "
        f"sums of up to {counting.members:,} clients, k = {plan.k}"
    )
    tables, found = count_ngrams(counting, plan, vocab, None if noise is None else noise.add)
    if not tables:
        raise DataError(f"no word is released: none has {plan.k} of the {counting.clients:,} clients")
    for n, level in enumerate(found, 1):
        say(f"  {n}: {level.candidates:,} candidates, {level.admitted:,} admitted, {level.released:,} released")
    clear = noise is None or published
    each = MOST_TOKENS if clear else TOKENS_NOISED
    blurred, raw = (None, None) if noise is None or published else (noise.histogram, noise.add)
    fitting = validation(each)
    if published:
        each = longest(fitting)
    least = plan.k if clear and not published else 0
    fitted = fit_levels(fitting, tables, vocab, blurred, each, least)
    terms = CountTerms(plan.k, plan.cap, plan.most, counting.clients, plan.vocab_sha256)
    if noise is not None:  # that of all sums that the noise was made for
        terms = replace(terms, epsilon=noise.announced, delta=noise.delta, verdict=noise.verdict)
    written = CountModel(fitted, tuple(t.clients for t in tables), tuple(t.counts for t in tables), terms)
    data = counts_to_bytes(written)
    model = counts_from_bytes(data, vocab, FILE)  # what is tested is what is in the file
    say("fitting the mixture")
    chosen: int | None = None
    if clear and not published:  # where a budget is kept, everybody reads a few tokens
        chosen, each = weights_text(fitting.clients, len(fitting.groups))
    some = validation(each).after(fitting, chosen)
    mixture, note = fit_mixture(
        some, data, len(tables), lambda text: reader.mixture_cells(model, text), raw, each, least
    )
    if note:
        say(note)
    return Made(
        model, data, replace(mixture, counts_sha256=hashlib.sha256(data).hexdigest()), found,
        {**counting.moved(), **fitting.moved(), **some.moved()}, [*counting.closed, *fitting.closed, *some.closed],
        note,
    )  # fmt: skip
