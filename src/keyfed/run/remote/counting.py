"""A count with real clients, after a run's last round: the sums of a simulated count, formed by messages.

Who takes part said so in its hello. Clients write their vectors themselves (`run.remote.own_counts`), and all that is
made of the opened sums is made as in a simulation (`run.counts.release`). A client that is lost in one sum is in no
later one of the same text (`run.counts.gather`).

Every vector of a client is written once in a run. So a server that was killed while it counted ends the run without.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.config.load import Config
from keyfed.engine.network import Network
from keyfed.engine.sums.secure_round import evaluation_of, evaluation_vector_of
from keyfed.errors import DataError, KeyfedError, Lied, RunError
from keyfed.federated.types import Params
from keyfed.model.output import Score
from keyfed.run.console import plural
from keyfed.run.counts.command import counts_text, report_of
from keyfed.run.counts.gather import Called, Gathering, Opened, PublicSum, groups_of
from keyfed.run.counts.levels import DEPTH
from keyfed.run.counts.release import NetworkReader, make_counts
from keyfed.run.counts.terms import plan_of
from keyfed.run.remote.own_counts import MODELS
from keyfed.run.secure import settings_of
from keyfed.text.batches import reads_lines
from keyfed.text.vocab import Vocab
from keyfed.wire.limits import MOST_LISTED
from keyfed.wire.sums import CountSum, count_sum
from keyfed.wire.transport import Calls


class CountedClients:
    """The clients of a run that take part in its count, called for one sum after another.

    Args:
      theta: the model that clients read with, where they read with one.
      round: a number that no round of the run had, nor has after this; every sum has one of its own.
    """

    def __init__(self, calls: Calls, config: Config, theta: Params, round: int) -> None:
        self.calls, self._theta, self._round = calls, theta, round
        self._among, self._settings = config.counts.among, settings_of(config)
        self.least = least_counting(config)
        self._apart = max(config.counts.k, self._settings.floor)
        self.names = sorted(calls.counting & set(calls.greet()))

    def gathering(self) -> Gathering:
        """Return sums over the clients, of a text that was not summed before."""
        groups = groups_of(self.names, [np.zeros(0, np.int32)] * len(self.names), None, self._among, self.least)
        return Gathering(groups, self._settings, real=self._summed, apart=self._apart)

    def _summed(self, public: PublicSum, words: int, called: Called) -> Opened:
        """Form a sum over those of a group's clients who are there."""
        long = max((array.size for array in public.numbers.values() if array.dtype != np.uint8), default=0)
        if long > MOST_LISTED:
            raise RunError(
                f"the sum {public.purpose} has {long:,} n-grams, and clients read {MOST_LISTED:,}; raise counts.k"
            )
        calls = self.calls
        calls.start_round()
        there = set(calls.greet())
        self._round += 1
        # A copy: these arrays may be views of a file in memory, which PyTorch will not have.
        numbers = {name: torch.from_numpy(np.array(array)) for name, array in public.numbers.items()}
        theta = self._theta if "counts" in numbers else {}
        clients = [name for name in called.names if name in there]
        about = CountSum(public.purpose, called.largest, words, called.before, called.apart)
        found = count_sum(calls, clients, numbers, theta, self._round, about)
        return Opened(found.total, found.survivors)


def least_counting(config: Config) -> int:
    """Return the fewest clients that can be counted."""
    return max(config.counts.k, settings_of(config).least_group)


def too_few(clients: int, least: int) -> str:
    """Say that too few clients take part in a count."""
    return (
        f"{plural(clients, 'client')} {'takes' if clients == 1 else 'take'} part in counts (keyfed client --counts), "
        f"and a sum hides a client among {least}"
    )


def count_deployed(
    calls: Calls, config: Config, spec: Network, params: Params, vocab: Vocab, folder: Path, round: int,
    say: Callable[[str], None],
) -> dict[str, Any] | None:  # fmt: skip
    """Count, smooth, mix and test with a run's clients; write both files; return the rows of the report.

    A count that cannot be finished is said in one line, and the run ends without one.
    """
    began = time.monotonic()
    try:
        clients = CountedClients(calls, config, params, round)
        if len(clients.names) < clients.least:
            raise DataError(too_few(len(clients.names), clients.least))
        counting = clients.gathering()
        name = hashlib.sha256(vocab.to_json().encode()).hexdigest()
        plan = plan_of(config.counts, name, counting.members, len(vocab), config.train.seed, DEPTH)

        def validation(tokens: int) -> Gathering:
            del tokens  # it is among the public numbers of the sum
            return clients.gathering()

        reader = NetworkReader(spec, params, reads_lines(config.data.batching))
        made = make_counts(reader, len(vocab), plan, counting, validation, say=say)
    except KeyfedError as e:  # whatever it is, the run is finished without
        say(f"no counts: {e}")
        return None
    made.write(folder)
    for line in counts_text(report_of(made, folder, counting, "", began)).splitlines():
        say(line)
    say("testing counts, the mixture, and the mixture with every client's own cache, by sums")
    try:
        tested = _tested(clients.gathering(), made.data, made.mixture.to_json().encode())
    except KeyfedError as e:
        say(f"the counts were not tested: {e}")
        return None
    return {model: {"test": score.summary(), "unseen": None} for model, score in tested.items()}


def _tested(gathering: Gathering, counts: bytes, mixture: bytes) -> dict[str, Score]:
    """Return what the models come to on the clients' test text."""
    numbers = {"counts": np.frombuffer(counts, np.uint8), "mixture": np.frombuffer(mixture, np.uint8)}
    words, members = len(evaluation_vector_of(Score(), 1)), gathering.members
    found = dict.fromkeys(MODELS, Score())
    for opened in gathering.sums(PublicSum("test", numbers), words * len(MODELS), _no_text):
        totals = {model: opened.total[at * words : (at + 1) * words] for at, model in enumerate(MODELS)}
        try:
            scores = {model: evaluation_of(total, members, opened.clients)[0] for model, total in totals.items()}
        except Lied as e:
            gathering.leave_out("test", opened.clients, f"test: {e}")
            continue
        found = {model: found[model] + score for model, score in scores.items()}
    return found


def _no_text(text: object) -> Any:
    raise AssertionError("real clients write their vectors themselves")
