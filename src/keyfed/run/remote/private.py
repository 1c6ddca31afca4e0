"""Differential privacy with real clients: what a run promises, and noise and cohorts from the operating system.

The population are the clients enrolled when the run began: a public list, kept in the run's folder. A client that
enrols later takes part in later runs. One that has left, is switched off or answers too late sends zeros; neither noise
nor denominator notices. Every round is released, whoever came. Clients score nothing: there is no validation, the model
of the last round is the run's.

Nothing random is derived from the seed here, logged, or in a checkpoint, but for one thing: tree noise has to be taken
off again later, so the blocks that are still in the model lie in the checkpoint until the run ends. Whoever reads them
can take the noise off; the server could anyway, which saw the sum without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

import torch

from keyfed.config.load import Config
from keyfed.engine.network import parameter_count, shapes
from keyfed.errors import PrivacyError, RunError
from keyfed.federated.cohort import cohort_size
from keyfed.federated.types import ClientId, Params, Reason, State
from keyfed.files import write_atomically
from keyfed.model.output import Score
from keyfed.private.dp.accounting import Opening, Release, Row, TreeRelease, chance
from keyfed.private.dp.ledger import LEDGER, Terms
from keyfed.private.dp.noise import Draw, KeptTree, system
from keyfed.private.dp.private_method import PrivateMethod
from keyfed.private.dp.statement import RAW_VOCABULARY, few_clients
from keyfed.run.checkpoint import Best, Checkpoint, rounds_in, save_checkpoint
from keyfed.run.folder import read_metrics
from keyfed.run.privacy import PrivateRun, as_begun, public_record, public_result, terms_of
from keyfed.run.remote.device import run_bounded
from keyfed.run.remote.rounds import RemoteRunLoop
from keyfed.run.secure import sizes_in
from keyfed.text.vocab import Vocab
from keyfed.wire.promise import Asked
from keyfed.wire.roster import Roster

ENROLLED = "enrolled.json"
MOST_AT_HINGE = 0.05  # chance of a round that opens by one client, above which a run is refused


class SettledTerms(NamedTuple):
    """What a private run has settled on before its first round."""

    bounded: PrivateMethod
    terms: Terms
    names: tuple[ClientId, ...]

    def promised(self, config: Config) -> Config:
        """Return the configuration as clients hear it, with the numbers that were calibrated."""
        t, p = self.terms, config.privacy
        counted = p.count_noise if t.count_noise is None else t.count_noise  # as it was said when the run began
        return replace(config, privacy=replace(p, noise=t.z, delta=t.delta, separation=t.gap, count_noise=counted))


def settle(config: Config, out: Path, roster: Roster, *, raw_vocabulary: bool = False) -> SettledTerms | None:
    """Return the method's private form, the terms of the ledger and whom they are about; None without privacy.

    Args:
      raw_vocabulary: the vocabulary was made from the clients' text, without noise.
    """
    if not config.privacy.on:
        return None
    path = out / ENROLLED
    if not path.exists() and (out / LEDGER).exists():
        raise PrivacyError(
            f"{path} is gone, and the ledger beside it speaks of the clients listed there; restore it, or start "
            "another run"
        )
    names = json.loads(path.read_text("utf-8")) if path.exists() else list(roster.names())
    bounded, terms = terms_for(config, len(names))
    digest = hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()
    terms = as_begun(config, replace(terms, raw_vocabulary=raw_vocabulary, enrolled=digest), out)
    return SettledTerms(bounded, terms, tuple(names))


def terms_for(config: Config, clients: int) -> tuple[PrivateMethod, Terms]:
    """Return the method's private form and what its ε is about with so many clients enrolled, or refuse."""
    if clients < 2:
        raise PrivacyError(
            f"{clients} clients are enrolled: with fewer than two no delta is below one in the number of clients; "
            "enrol more, or leave --dp out"
        )
    bounded = run_bounded(config)
    if bounded.method.mediator.released is not None:
        raise PrivacyError(
            f"{bounded.method.name} weighs clients by losses that earlier rounds released (the switch, top-K), and "
            "deployed clients are told the clip alone; set method.mediation=false and beta=1"
        )
    called = (
        clients if bounded.method.cohort == "all" else cohort_size(config.participation, config.train.cohort, clients)
    )
    if called > clients:
        raise PrivacyError(
            f"train.cohort is {called:,}, and {clients:,} clients are enrolled; set it to at most {clients:,}"
        )
    hinge = hinge_of(config, clients, called)
    return bounded, terms_of(config, bounded, clients, called, "system", hinge)


def hinge_of(config: Config, clients: int, called: int) -> float:
    """Return the chance that a client decides whether a round's secure sum opens, or refuse one that is large.

    Such a round costs as one without amplification (`private.dp.accounting`).
    """
    if not config.secure.on or config.privacy.mechanism == "tree" or called >= clients:
        return 0.0
    opening = Opening(config.secure.floor, config.secure.threshold)
    if called + 5 * math.sqrt(called) > opening.edges[1]:
        raise PrivacyError(
            f"train.cohort is {called:,}: rounds would call more than {opening.edges[1]:,} clients at times, and no "
            f"secure sum opens for so many; set it to at most {_fits(opening.edges[1]):,}"
        )
    found = chance(clients, called / clients, opening)
    if found > MOST_AT_HINGE:
        better = next(
            (m for m in range(called + 1, clients) if chance(clients, m / clients, opening) <= MOST_AT_HINGE), clients
        )
        raise PrivacyError(
            f"train.cohort is {called:,} of {clients:,}, and sums of fewer than {opening.edges[0]} stay closed: "
            f"with chance {found:.2g} a round opens by a single client, whom sampling then does not hide; set "
            f"train.cohort to {better:,} or more"
        )
    return found


def _fits(most: int) -> int:
    """The largest mean from which five standard deviations do not lead beyond `most`."""
    return math.floor(((math.sqrt(25 + 4 * most) - 5) / 2) ** 2)


def keep_enrolled(out: Path, settled: SettledTerms) -> None:
    """Write down whom the run's guarantee is about; a run that goes on speaks of the same."""
    if not (out / ENROLLED).exists():
        write_atomically(out / ENROLLED, json.dumps(list(settled.names), indent=0).encode())


TREE = "privacy/tree/"  # of what a checkpoint keeps of the noise tree
PLACE = f"{TREE}place"  # number of the tree, and its leaves so far
# Why a client takes no part that has nothing to do with its text: the operator may hear of these.
OF_PROTOCOL: frozenset[Reason] = frozenset(
    {"not enrolled", "no answer", "not delivered", "unreachable", "not now", "not secure", "identity changed", "stale",
     "other method", "other protocol", "unknown run", "restarted", "summed before", "too soon", "over limit",
     "over budget", "hides among more", "strangers"}
)  # fmt: skip
ODD: frozenset[Reason] = frozenset(
    {
        "malformed",
        "refused by client",
        "other model",
        "non-finite model",
        "wrong round",
        "client error",
        "too large",
        "not signed",
    }
)
REFUSING = (
    "WARNING: some clients refused what they were asked, or answered what makes no sense; they add zeros. Their logs "
    "say why: another version of the package, or a server that does not keep its promise"
)
CLOSED = (
    "a secure sum stayed closed, for too few were called or stayed: such a round releases noise alone, and costs it"
)
SYSTEM = SystemRandom()


def drawn(names: Sequence[ClientId], rate: float) -> list[ClientId]:
    """Draw a cohort: every client independently, by the operating system's randomness."""
    return [name for name in names if SYSTEM.random() < rate]


class BudgetSpent(Exception):
    """A round that was made must not be released."""


class DeployedPrivacy(PrivateRun):
    """A federation's mechanism: as a simulation's, with noise that nobody can draw again."""

    def __init__(self, config: Config, settled: SettledTerms, out: Path, kept: Params) -> None:
        super().__init__(config, settled.bounded, out, settled.terms)
        self._names = settled.names
        self._opening = Opening(config.secure.floor, config.secure.threshold) if config.secure.on else None
        self._there = len(settled.names)
        self._kept = KeptTree(system)
        self._tree = self._place(kept)

    def _place(self, kept: Params) -> int:
        """Return the tree that goes on: that of the checkpoint, or another if its releases are not all in the model.

        A row beyond the checkpoint may have been released, and its noise is lost. The blocks cannot be drawn a second
        time, so the next release is the first leaf of a new tree, which costs as an independent mechanism.
        """
        trees = [e.row.tree for e in self.ledger.entries if isinstance(e.row, TreeRelease)]
        if not trees:
            return 0
        if PLACE in kept:
            tree, leaves = (int(n) for n in kept[PLACE])
            if tree == max(trees) and leaves == trees.count(tree):
                self._kept.load({key.removeprefix(TREE): t for key, t in kept.items() if key != PLACE})
                return tree
        return max(trees) + 1

    @property
    def leaves(self) -> int:
        """Releases of the tree in progress."""
        return sum(isinstance(e.row, TreeRelease) and e.row.tree == self._tree for e in self.ledger.entries)

    @property
    def kept(self) -> Params:
        """What the checkpoint must hold of a noise tree; nothing of independent noise."""
        if self.ledger.terms.gap is None:
            return {}
        place = torch.tensor([self._tree, self.leaves])
        return {PLACE: place, **{f"{TREE}{key}": t for key, t in self._kept.state.items()}}

    def row(self) -> Row:
        """What a round costs."""
        t = self.ledger.terms
        if t.gap is not None:
            return TreeRelease(t.z, t.gap, tree=self._tree)
        hinge = 0.0 if self._opening is None or t.rate == 1 else chance(self._there, t.rate, self._opening)
        return Release(t.z, t.rate, hinge=hinge)

    def cohort(self, there: Collection[ClientId]) -> list[ClientId]:
        """Draw the clients of the next round from everybody, or say whose turn it is; return those who are there."""
        self._there = sum(name in there for name in self._names)
        return [client for client in self._drawn() if client in there]

    def _drawn(self) -> list[ClientId]:
        turn = self.in_turn(self._names)
        return drawn(self._names, self.ledger.terms.rate) if turn is None else [self._names[k] for k in turn]

    def asked(self, state: State) -> Asked:
        """What clients are told of the next round: its clip, and the releases before it."""
        return Asked(self.noising(state).clip, len(self.ledger.entries))

    def hear(self, steps: Mapping[ClientId, int], round: int) -> None:
        """Compare the steps that clients took part in with the ledger.

        One step beyond it is a round in which the server was killed before its row was written, or a ledger that lost
        its last row: nobody can tell which, so a row is booked for it.

        Raises:
          PrivacyError: a client took part in more; the folder is an older copy, and what came after it is not counted.
        """
        client = max(steps, key=lambda c: steps[c], default=None)
        if client is None:
            return
        booked = len(self.ledger.entries)
        if steps[client] > booked:
            raise PrivacyError(
                f"{client} took part in step {steps[client] + 1} of this run, and the ledger has {booked} rows: its "
                "folder is an older copy, and releases since then would go uncounted; go on with the newest one, or "
                f"start another run (if {client} is mistaken: keyfed enroll --forget {client})"
            )
        if steps[client] == booked:
            self.ledger.book(self.row(), "heard", round)
            if self.ledger.terms.gap is not None:
                self._tree, self._kept = self._tree + 1, KeptTree(system)

    def _release(self, round: int) -> Draw:
        return self.release(round, amplified=True)

    def release(self, round: int, *, amplified: bool) -> Draw:
        """Write a release down, then draw its noise.

        Args:
          amplified: whether sampling hides who took part; else the row has rate 1.

        Raises:
          BudgetSpent: the row does not fit into the budget; nothing was written and nothing may be released.
        """
        leaf, row = self.leaves, self.row()
        if isinstance(row, Release) and not amplified:
            row = Release(row.z, 1.0)
        if not self.ledger.allows([row]):
            raise BudgetSpent
        self.ledger.book(row, "update", round)
        return system() if self.ledger.terms.gap is None else self._kept.leaf(leaf)


class PrivateRunLoop(RemoteRunLoop):
    """The rounds of a private run: drawn from everybody enrolled, released whoever came, silent about clients."""

    def __init__(self, *given: Any, settled: SettledTerms) -> None:
        self._settled = settled
        self._told: set[str] = set()
        super().__init__(*given)

    def _apart(self, server: Params) -> tuple[Params, Params]:
        kept = {name: t for name, t in server.items() if name.startswith(TREE)}
        return {name: t for name, t in server.items() if name not in kept}, kept

    def _begin(self, kept: Params) -> None:
        self.guard = DeployedPrivacy(self.config, self._settled, self.out, kept)
        self.guard.check([*read_metrics(self.out), *([self.pending] if self.pending else [])])
        for line in (*self.guard.announce(parameter_count(self.spec)), *self._cautions()):
            self.listen.say(line)

    def _kept(self) -> Params:
        return self.guard.kept

    def _cautions(self) -> list[str]:
        t = self._settled.terms
        return [*few_clients(t), *([RAW_VOCABULARY] if t.raw_vocabulary else [])]

    def _may_go_on(self) -> bool:
        if self.guard.allows():
            return True
        self._say_spent()
        return False

    def _say_spent(self) -> None:
        self.listen.say(f"the privacy budget is spent after round {self.run.state.round}: another would exceed it")

    def _quorum(self) -> Sequence[ClientId]:
        """Wait until enough are connected for any sum at all; who is there then does not decide about the round."""
        needed = 1 if self.secure is None else self.secure.floor
        until = time.monotonic() + self.patience.quorum
        while len(self.calls.reachable()) < needed:
            if time.monotonic() > until:
                raise RunError(
                    f"fewer than {needed} clients are connected after {self.patience.quorum:.0f} seconds; start more "
                    f"and go on with --resume (run folder {self.out}). The waiting released nothing and cost nothing"
                )
            time.sleep(self.patience.look)
        self.calls.start_round()
        present = self.calls.greet()
        for client, why in self.calls.lost.items():  # everybody new was asked, whoever is drawn
            if why in OF_PROTOCOL | ODD:
                self._say_once(f"{client} is left out: {why}")
        self.guard.hear(self.calls.steps, self.run.state.round)
        return present if self.secure is None else [client for client in present if self._hides(client)]

    def _hides(self, client: ClientId) -> bool:
        """Whether every sum of this run that opens has as many clients as this one wants to hide among.

        Who is drawn must not decide who takes part, so a private run goes by `secure.floor` alone.
        """
        assert self.secure is not None
        least = self.calls.hide_among[client]
        if least > self.secure.floor:
            self._say_once(f"{client} is left out: hides among more ({least}; secure.floor is {self.secure.floor})")
        return least <= self.secure.floor

    def _draw(self, present: Sequence[ClientId]) -> list[ClientId]:
        return self.guard.cohort(set(present))

    def _rounds(self) -> None:
        try:
            super()._rounds()
        except BudgetSpent:  # the last round was made, and is not released
            self._say_spent()

    def _prepare(self, state: State) -> None:
        guard, federation = self.guard, self.federation
        noising = guard.noising(state)._replace(
            release=lambda: guard.release(state.round, amplified=not federation.beside)
        )
        federation.noise_by(noising, guard.asked(state))

    def _line(self, record: dict[str, Any], before: State) -> dict[str, Any]:
        if self.federation.failed is not None:
            self._say_once(CLOSED)
        members = math.ceil(self._settled.terms.called)
        sizes = sizes_in(self.config, self.method, before.params, members)
        public = public_record(record, self.guard, sizes)
        return {**public, "seconds": None, "elapsed": None, "privacy": self.guard.told(before)}

    def _tell_lost(self) -> None:
        """Say once each why some took no part, for reasons of the protocol; who was drawn, and when, is not said."""
        for why in sorted(set(self.calls.lost.values())):
            if why in OF_PROTOCOL:
                self._say_once(f"some of the clients that were called take no part: {why}")
            elif why in ODD:
                self._say_once(REFUSING)

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.listen.say(line)

    def _chosen(self) -> Params:
        """Return the last model: to choose a better one would take scores of clients."""
        self._flush()
        self.run.best = Best(self.run.state.round, math.nan, self.run.state.served(self.method))
        self._forget_noise()
        return {name: self.run.best.params[name] for name in shapes(self.spec)}

    def _forget_noise(self) -> None:
        """Take the noise tree out of the checkpoints: no round follows that needs it."""
        if self._settled.terms.gap is None or not self.run.state.round:
            return
        folder = self.out / "checkpoint"
        save_checkpoint(folder, Checkpoint(self.run.state, None, self.length, time.monotonic() - self.started))
        for older in rounds_in(folder):
            if older != self.run.state.round:
                (folder / f"round-{older:06d}.json").unlink()
                (folder / f"round-{older:06d}.safetensors").unlink()

    def _tested(self, params: Params) -> Score:
        self.listen.say("clients score nothing in a private run: test the model on public text (`keyfed evaluate`)")
        return Score(0, 0.0, 0, 0, 0, 0, 0, 0)

    def _result(self, params: Params, vocab: Vocab, tested: Score) -> dict[str, Any]:
        found: Mapping[str, Any] = super()._result(params, vocab, tested)
        silent: dict[str, Any] = {"refused": None, "lost": None, "tokens_trained": None, "oov_rate": {}}
        silent |= {"clients": self._settled.terms.clients, "seconds": None, "seconds_per_round": None}
        return {**public_result({**found, **silent}), "privacy": self.guard.account(parameter_count(self.spec))}
