"""The privacy of a run: its terms, calibrated from its budget; its ledger; the noise of every round; what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keyfed.config.load import BASE, Config
from keyfed.config.schema import DataConfig
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.plain import SelfWeighedRound
from keyfed.errors import PrivacyError
from keyfed.federated.cohort import Fate
from keyfed.federated.types import ClientId, Method, Params, State
from keyfed.private.dp.accounting import (
    MOST_LOSS_NOISE,
    MOST_MEMBERS,
    Opening,
    Release,
    Row,
    Stayed,
    TreeRelease,
    beside,
    calibrate,
    calibrate_tree,
    chance,
    delta_for,
    noise_to_clip,
    usual_count_noise,
)
from keyfed.private.dp.ledger import (
    LEDGER,
    Ledger,
    Terms,
    begun_terms,
    check_against_metrics,
    open_ledger,
    read_ledger,
    verdict_of,
)
from keyfed.private.dp.noise import Draw, Noising, derived, derived_tree, group_of, update_noise
from keyfed.private.dp.private_method import (
    CLIP,
    WITHIN,
    PrivateMethod,
    refuse_absence,
    refuse_participation,
)
from keyfed.private.dp.private_method import (
    make_private as private_form,
)
from keyfed.private.dp.statement import GIVEN_VOCABULARY, RAW_VOCABULARY, account, no_account
from keyfed.private.secagg.threshold import PRIVATE_RATIO
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.metrics_line import Sizes
from keyfed.run.secure import settings_of
from keyfed.run.start import StartModel
from keyfed.text.partition import parse_part
from keyfed.text.vocab import Vocab

Randomness = Literal["system", "derived"]


def terms_of(
    config: Config,
    bounded: PrivateMethod,
    clients: int,
    called: float,
    randomness: Randomness = "derived",
    hinge: float | None = None,
) -> Terms:
    """Return what a run's ε is about; the noise is calibrated here where a budget is given.

    Args:
      called: clients of a round, in expectation.
      randomness: where noise and cohorts come from; derived from the seed in every simulation.
      hinge: chance of a round in which sampling hides nobody, see `accounting.Release`; None for that of a simulation.

    Raises:
      PrivacyError: what cannot be had, a count noise that leaves nothing for the update among it.
    """
    p = config.privacy
    everybody = bounded.method.cohort == "all" or called == clients
    refuse_participation(config.participation, p.mechanism, everybody)
    refuse_absence(bounded, called, clients)
    population = p.population or clients
    groups = max(1, int(clients // called))
    cohort: float
    if p.mechanism == "tree":
        called = clients / groups  # those whose turn it is, see `members_in_turn`
    if p.population is None:
        cohort = called
    elif everybody:
        cohort = population
    else:
        cohort = p.cohort or max(1, population // 200)
    delta = delta_for(population, p.delta)
    gap = None
    if p.mechanism == "tree":
        most = groups if p.population is None else max(1, int(population // cohort))
        gap = p.separation or most
        if gap > most:
            raise PrivacyError(
                f"privacy.separation is {gap} rounds, but with {cohort:,.6g} of {population:,} clients in every round "
                f"a client has to come again after {most}; set it lower, or the cohort"
            )
    z = p.noise
    hinge = hinge_in(config, population, cohort) if hinge is None else hinge
    if z is None:
        assert p.epsilon is not None
        rounds = max(1, config.train.rounds)
        z = (
            calibrate_tree(p.epsilon, delta, gap, rounds)
            if gap is not None
            else calibrate(p.epsilon, delta, min(1.0, cohort / population), rounds, hinge=hinge)
        )
    return Terms(
        delta=delta, population=population, clients=clients, cohort=cohort, called=called, z=z, mechanism=p.mechanism,
        sensitivity=bounded.sensitivity, randomness=randomness, budget=p.epsilon, gap=gap,
        secure=config.secure.on, count_noise=settle_count_noise(config, bounded, cohort, z),
    )  # fmt: skip


def hinge_in(config: Config, population: int, cohort: float) -> float:
    """Return the chance that one client decides whether a secure sum of the fleet opens (`private.dp.accounting`).

    0 where nothing is masked or nobody is drawn. An imagined fleet has the run's floor, and two thirds must stay;
    cohorts beyond what one sum holds are taken to be summed in parts.
    """
    if not config.secure.on or config.privacy.mechanism == "tree" or cohort >= population or cohort > MOST_MEMBERS:
        return 0.0
    return chance(population, cohort / population, opening_of(config))


def opening_of(config: Config) -> Opening:
    real = config.privacy.population is None  # a number that must stay is one of the clients there are
    return Opening(config.secure.floor, config.secure.threshold if real else None)


def announcement(t: Terms, counted: float | None, parameters: int) -> list[str]:
    """Say what is promised under these terms, and how long the noise of a mean is beside the clip.

    Args:
      counted: noise of counts, in clients; None where nothing is counted.
    """
    z = update_noise(t.z, counted)
    ratio = noise_to_clip(z, parameters, t.cohort)
    parts = "" if counted is None else f" (of the sum {z:.4g}, of counts {counted:.4g} clients)"
    how = f"rate {t.rate:.4g}" if t.gap is None else f"tree aggregation, {t.gap} rounds apart"
    budget = "no budget" if t.budget is None else f"budget epsilon {t.budget:g}"
    lines = [
        f"privacy: {verdict_of(t)}, {budget}, delta {t.delta:.2g}, noise {t.z:.4g}{parts}, {how}, population "
        f"{t.population:,}, cohort {t.cohort:,.6g}; noise of a mean {ratio:.3g} clips"
    ]
    if ratio > 1:
        lines.append(
            f"warning: {t.cohort:,.6g} clients a round are few for this noise: it is {ratio:.3g} times as long as "
            "their longest mean update, so expect little to be learnt, or divergence; `keyfed privacy plan` says how "
            "many clients a budget needs, and --population NUMBER simulates them"
        )
    if t.simulated:
        lines.append(
            f"a SIMULATED guarantee for population {t.population:,}, cohort {t.cohort:,.6g}; not a guarantee of this "
            "run"
        )
    return lines


def make_private(config: Config, method: Method, clients: int, called: float) -> tuple[PrivateMethod, Terms] | None:
    """Return a method's private form and the terms of its ledger; None where nobody asked for one.

    Raises:
      PrivacyError: what cannot be had; nothing is written before.
    """
    if not config.privacy.on:
        return None
    bounded = private_form(method, config.privacy)
    return bounded, terms_of(config, bounded, clients, called)


def settle_count_noise(config: Config, bounded: PrivateMethod, cohort: float, z: float) -> float | None:
    """Return the noise of the half counts of a new run, in clients of the fleet; None where nothing is counted.

    Raises:
      PrivacyError: the user's leaves nothing for the update.
    """
    if not bounded.statistics:
        return None
    found = config.privacy.count_noise
    if found is None:
        found = usual_count_noise(cohort, z, losses=bounded.statistics != (WITHIN,))
    update_noise(z, found)
    return found


def as_begun(config: Config, terms: Terms, out: Path) -> Terms:
    """Return the terms with the count noise of the ledger in `out`, if there is one: a run keeps what it began with.

    One that the user sets is compared with the ledger's like every other term.
    """
    begun = begun_terms(out)
    if begun is None or (begun.count_noise is not None and config.privacy.count_noise is not None):
        return terms
    return replace(terms, count_noise=begun.count_noise)


def count_noise_of(config: Config, bounded: PrivateMethod, terms: Terms) -> float | None:
    """Return the noise of the half counts of a run with these terms, in clients of the fleet; None for no counts.

    Ledgers that do not say it are of runs for which it was a twentieth of the cohort, however few that were.
    """
    if not bounded.statistics or terms.count_noise is not None:
        return terms.count_noise
    if config.privacy.count_noise is not None:
        return config.privacy.count_noise
    usual = terms.cohort / 20
    return usual if bounded.statistics == (WITHIN,) else min(usual, MOST_LOSS_NOISE * terms.z)


class PrivateRun:
    """A run's mechanism: `noising` before every round, `told` after it."""

    def __init__(self, config: Config, bounded: PrivateMethod, out: Path, terms: Terms) -> None:
        self._config = config
        self._out = out
        self._bounded = bounded
        self._seed = config.train.seed
        self.ledger: Ledger = open_ledger(out, as_begun(config, terms, out))
        t = self.ledger.terms
        # The noise of the fleet's mean, on the mean of those who are there in fact.
        self._shrink = t.called / t.cohort
        self._bit_std = count_noise_of(config, bounded, t)
        self._std = update_noise(t.z, self._bit_std)
        self._beside = False  # whether the round that is gathered now opens or stays closed by one client

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuse to go on under a ledger that is older than the rounds of the run."""
        check_against_metrics(self.ledger, records)

    def row(self) -> Row:
        """What a round costs, before its clients are drawn."""
        t = self.ledger.terms
        if t.gap is not None:
            return TreeRelease(t.z, t.gap)
        return Release(t.z, t.rate, hinge=hinge_in(self._config, t.population, t.cohort))

    def allows(self) -> bool:
        """Whether the budget has room for another round."""
        return self.ledger.allows([self.row()])

    def affords(self) -> bool:
        """Whether it has room for the round that is gathered, which may cost more than was known before."""
        return not self._beside or self.ledger.allows([self._row_now()])

    def _row_now(self) -> Row:
        """What the round that is gathered costs: of clients that did not all stay, beside the threshold, rate 1."""
        return Release(self.ledger.terms.z, 1.0) if self._beside else self.row()

    def attempt(self, round: int) -> int:
        """How often a round was released already: another attempt calls other clients, and draws other noise.

        Two releases of one sample are not two sampled releases: k of them cost what one of noise z/√k does. With a
        sample of its own every row of the ledger is an independent mechanism, however many rounds lie between a
        release and the one that is done again (train.checkpoint_every), and plain composition counts them.
        """
        return self.ledger.attempts(round)

    def turn(self) -> int | None:
        """The leaf of the next round's release; None without a tree."""
        return None if self.ledger.terms.gap is None else len(self.ledger.entries)

    def in_turn(self, names: Sequence[str]) -> list[int] | None:
        """Return the clients whose turn it is, with a tree; None where they are drawn."""
        leaf = self.turn()
        t = self.ledger.terms
        return None if leaf is None else members_in_turn(names, leaf, round(t.clients / t.called), self._seed)

    def announce(self, parameters: int) -> list[str]:
        """Say before the first round what is promised, and how long the noise is beside the clip."""
        return announcement(self.ledger.terms, self._bit_std, parameters)

    def noising(self, state: State, frozen: frozenset[str] = frozenset()) -> Noising:
        """Return how the round after `state` is bounded, noised and divided."""
        p, t = self._config.privacy, self.ledger.terms
        clip = float(state.server[CLIP])
        return Noising(
            clip=clip,
            std=self._std * clip * self._shrink,
            bit_std=None if self._bit_std is None else self._bit_std * self._shrink,
            called=t.called,
            denominator=t.called * p.mean_weight,
            floor=p.floor * t.called * self._bounded.least if self._bounded.ratio else None,
            release=lambda: self._release(state.round),
            frozen=frozen,
            statistics=self._bounded.statistics,
        )

    def gather(
        self, state: State, frozen: frozenset[str], fates: Mapping[ClientId, Fate]
    ) -> tuple[Callable[[Params], NoisedSum], float]:
        """Return how the round after `state` is summed, and its clip; `fates` are those of the clients called."""
        noising = self.noising(state, frozen)
        clip = noising.clip
        self._beside = self._opens_by_one(fates)
        if not self._config.secure.on:
            ratio = PRIVATE_RATIO if self._config.secure.clear else None
            return lambda like: NoisedSum(like, noising, ratio), clip
        from keyfed.engine.sums.masked import MaskedNoisedSum

        training = tuple(client for client, fate in fates.items() if fate.reports)
        settings = settings_of(self._config)

        def masked(like: Params) -> NoisedSum:
            hidden = SelfWeighedRound(like, self._bounded.method, {}, state.round, tuple(fates), training)
            return MaskedNoisedSum(like, noising, hidden, settings)

        return masked, clip

    def _opens_by_one(self, fates: Mapping[ClientId, Fate]) -> bool:
        """Whether some do not stay and one client decides if the sum opens; how many *are called* is in every row.

        Of an imagined fleet nobody knows how many stay; it is taken not to be just the threshold.
        """
        t = self.ledger.terms
        drawn = t.gap is None and t.rate < 1 and self._config.privacy.population is None
        if not self._config.secure.on or not drawn:
            return False
        uploads = sum(fate.lost is None for fate in fates.values())
        shared = sum(fate.reports for fate in fates.values())
        return beside(Stayed(len(fates), shared, uploads, uploads), opening_of(self._config))

    def _release(self, round: int) -> Draw:
        """Write the release down, then draw its noise."""
        leaf = self.turn()
        entry = self.ledger.book(self._row_now(), "update", round)
        return derived(self._seed, round, entry.attempt) if leaf is None else derived_tree(self._seed, leaf)

    def told(self, before: State) -> dict[str, Any]:
        """What a round's line of metrics.jsonl says of privacy."""
        found: dict[str, Any] = {
            "epsilon": self.ledger.spent(),
            "verdict": self.ledger.verdict(),
            "clip": float(before.server[CLIP]),
            "ledger": {"rows": len(self.ledger.hashes), "head": self.ledger.head},
        }
        return found

    def account(self, parameters: int) -> dict[str, Any]:
        """What the result of the run says of privacy."""
        t = self.ledger.terms
        ratio = noise_to_clip(self._std, parameters, t.cohort)
        found = account(self.ledger)
        said = [*found["statement"], *vocabulary_lines(self._config, self._out, found), *begun_from(self._out)]
        return {**found, "count_noise": self._bit_std, "noise_to_clip": ratio, "statement": said}


def members_in_turn(names: Sequence[str], leaf: int, groups: int, seed: int) -> list[int]:
    """Return the clients whose turn it is: each belongs to one group, and the groups go round."""
    return [k for k, name in enumerate(names) if group_of(name, groups, seed) == leaf % groups]


def public_record(record: Mapping[str, Any], private: PrivateRun, sizes: Sizes) -> dict[str, Any]:
    """Return a round's line without anything that was not noised: what is left is public or was released.

    Traffic is that of the expected cohort, which everybody knows; who came is not said.
    """
    called = math.ceil(private.ledger.terms.called)
    return {
        "round": record["round"],
        "loss": None,
        "worked": None,
        "cohort": called,
        "contributors": None,
        "refused": None,
        "lost": None,
        "abandoned": False,
        "effective_clients": None,
        "traffic": {"down": sizes.down * called, "up": sizes.up * called, "control": 0},
        # By the losses that rounds before have released (`private_method.still_moves`), not by this round's own.
        **({"adaptive": record["adaptive"]} if "adaptive" in record else {}),
    }


def public_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's result without figures of single clients and of their training text, which were not noised.

    What is left of clients are totals over held-out text, which the statement names as not covered.
    """
    oov = {part: rate for part, rate in result["oov_rate"].items() if part != "train"}
    return {**result, "spread": None, "unseen_spread": None, "clients_perplexity": None, "oov_rate": oov}


def account_of_run(run: Path) -> dict[str, Any]:
    """Return what a run has spent, by its ledger; a run without one promises nothing.

    Raises:
      PrivacyError: the ledger was changed, rolled back, or removed.
    """
    config, _ = read_run_toml(run)
    if not config.privacy.on and not (run / LEDGER).exists():
        noise = config.options.get("noise")
        return no_account(float(noise) if isinstance(noise, int | float) else 0.0)
    ledger = read_ledger(run)
    check_against_metrics(ledger, read_metrics(run))
    found = account(ledger, fine=True)
    return {**found, "statement": [*found["statement"], *vocabulary_lines(config, run, found), *begun_from(run)]}


def vocabulary_lines(config: Config, run: Path, account: Mapping[str, Any]) -> list[str]:
    """Say where the vocabulary of a run comes from, and what it adds: the vote's ε and δ, which its file carries."""
    given, own = config.data.vocab_file, run / "vocab.json"
    path = own if own.exists() or given is None else Path(given)
    vote = Vocab.from_json(path.read_text("utf-8")).privacy if path.exists() else None
    if vote is None:
        if RAW_VOCABULARY in account["statement"]:
            return []
        return [RAW_VOCABULARY if given is None and account["randomness"] == "derived" else GIVEN_VOCABULARY]
    cost = f"(ε, δ) = ({vote.all_epsilon:.4g}, {vote.all_delta:.2g})"
    votes = "a vote" if vote.votes == 1 else f"{vote.votes:,} votes"
    if vote.verdict == "SIMULATED":
        return [f"The vocabulary was elected by {votes} with noise that is SIMULATED, {cost}: no ε covers it in fact."]
    both = "" if account["pld"] is None else (
        f" A client that voted and is trained on has ({account['pld'] + vote.all_epsilon:.4g}, "
        f"{account['delta'] + vote.all_delta:.2g}) in all."
    )  # fmt: skip
    return [f"The vocabulary was elected by {votes} with noise of its own, {vote.verdict}, {cost}, which adds.{both}"]


def begun_from(run: Path) -> list[str]:
    """Say which model or word vectors a run started from: the ledger knows nothing of them."""
    if not (run / "run.toml").exists():  # a ledger alone
        return []
    config, made = read_run_toml(run)
    lines = []
    if config.train.init == BASE:
        lines.append(
            f"Public start, not covered: the base model that comes with keyfed, SHA-256 {made.get('init_sha256')}. It "
            "was made from public text without noise; this ledger does not protect who wrote that."
        )
    given = [name for name in (config.train.init, config.vectors.file) if name not in (None, BASE)]
    if given:
        names = " and ".join(map(str, given))
        lines.append(f"Started from {names}: what went into that is not in this ledger; its ε, if any, adds.")
    return lines


def refuse_start(config: Config, source: StartModel | None) -> None:
    """Refuse a starting model that has the same clients' text in it and no ledger of its own."""
    if not config.privacy.on or source is None:
        return
    old, new = source.trained.config, config
    if (
        old.privacy.on
        or (old.data.name, old.data.dir) != (new.data.name, new.data.dir)
        or _disjoint(old.data, new.data)
    ):
        return
    raise PrivacyError(
        f"train.init is {new.train.init}, which was trained without --dp on {old.data.name}, the text of the same "
        "clients: no ε would hold; start from public text, from a run with --dp, or from another part "
        "(data.clients_part)"
    )


def _disjoint(one: DataConfig, two: DataConfig) -> bool:
    """Whether two runs were given different parts of the same division of clients."""
    if one.clients_part is None or two.clients_part is None:
        return False
    (a, of), (b, of_too) = parse_part(one.clients_part), parse_part(two.clients_part)
    return a != b and of == of_too
