r"""Audits that train again: one round of the run as its ledger says, and the whole run with canary clients in the sum.

**The replayed round.** The other attacks train with this package's code: a run whose own training forgot its noise
would pass them. In a simulation the noise derives from the seed, so the step between two checkpoints can be computed:
clip, sum, the ledger's noise, server rule. It must be the step that was taken, to a tenth of what the noise does to it;
another machine rounds differently, but not by that much.

**The one-shot estimate of ε.** Every canary client is picked with the run's own sampling rate, independently in each
round, and sends a random direction ten times as long as the clip S. The run's own `NoisedSum` has to shorten it to S: a
missing clip shows as an ε̂ far too large. The result is added to the sum in front of the server rule. Where ε is that
of an imagined fleet, a canary is scaled like the noise and called at the fleet's rate.

ε is measured from the final model. In d dimensions the cosine between the model's change and a vector that was not sent
is N(0, 1/d), whatever the model. The cosines with the vectors that were sent are fitted by a Gaussian; its distance
from the null says how well an attacker who has the model and a client's vector can tell whether that client took part:

.. math::  μ = \sqrt d\,\bar c,\qquad δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

It is an estimate by one attack, which sees only the final model, and no upper bound. A claimed ε below its interval is
contradicted; one above it is consistent with it, not proven.

References:
  Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, *One-shot Empirical Privacy Estimation for Federated Learning*,
  2023, algorithm 2.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.config.load import Config
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.task import keeps_state
from keyfed.errors import RunError
from keyfed.federated.cohort import derive_seed
from keyfed.federated.round import initial_state
from keyfed.federated.types import Aggregate, Method, Params, Share, State
from keyfed.lab.audit.lint import PrivacyClaim, read_claim
from keyfed.private.dp.accounting import rho_to_eps
from keyfed.private.dp.ledger import Ledger, Terms, read_ledger
from keyfed.private.dp.noise import Draw, Noising, norm_of
from keyfed.private.dp.private_method import CLIP, PrivateMethod
from keyfed.run.checkpoint import Cohort, read_checkpoint, rounds_in
from keyfed.run.console import Listener, Silent
from keyfed.run.folder import Trained, load_model
from keyfed.run.loop import run_rounds, simulated_cohorts
from keyfed.run.plan import Choice, members_of, plan
from keyfed.run.prepare import FROZEN, Prepared, make_problem, prepare
from keyfed.run.privacy import PrivateRun, make_private
from keyfed.run.ranks import federate
from keyfed.run.start import find_source, initial_params, make_ready

Numbers = NDArray[np.float64]
NORMAL = NormalDist()
CLOSE = 0.1  # of the noise's effect on the step, by which a replayed step may differ from the one that was taken
CONFIDENCE = 0.95  # of the interval that is shown
CERTAIN = 0.999  # of the interval that contradicts a claim: twenty sound runs in a row must pass
NUMBERS = 1 << 30  # random numbers an audit draws for canaries; a hundred million take about a second
FEWEST_CANARIES, MOST_CANARIES = 50, 1000
LONG = 10.0  # length of what a canary sends, in clips: a sum that does not clip gives it away
FEW_CALLS = 0.5  # mean calls of a canary over the run, below which the attack has no power
CROWDED = 0.02  # canaries of a round to dimensions, above which they hide each other


@dataclass(frozen=True, slots=True)
class Subject:
    """The run under audit, made ready.

    Attributes:
      theta: the model before the first round.
      private: the mechanism and its terms; None for a run without noise.
    """

    trained: Trained
    prepared: Prepared
    method: Method
    choice: Choice
    claim: PrivacyClaim
    theta: Params
    private: tuple[PrivateMethod, Terms] | None

    @property
    def config(self) -> Config:
        return self.trained.config

    def folder(self, name: str) -> Path:
        """Return the folder of one of the audit's own runs."""
        return self.trained.folder / "audit" / name

    def fresh_folder(self, name: str) -> Path:
        """Return it empty."""
        shutil.rmtree(self.folder(name), ignore_errors=True)
        self.folder(name).mkdir(parents=True)
        return self.folder(name)


def open_subject(run: Path) -> Subject:
    """Load a finished run and prepare its corpus again.

    Raises:
      RunError: the folder holds no finished run, or one of a user's own module or method.
    """
    trained = load_model(run)
    config = trained.config
    if isinstance(trained.spec, ModuleNetwork) or trained.method != config.method:
        raise RunError(f"{run} has a module or method from outside the package; an audit trains again, and cannot")
    prepared = prepare(config)
    method, choice = plan(config, prepared)
    start, _ = make_ready(config, prepared, find_source(config), Silent().say)
    private = make_private(config, method, len(prepared.store), members_of(method, prepared, config))
    claim = read_claim(run, promised=config.privacy.on)
    return Subject(trained, prepared, method, choice, claim, initial_params(config, prepared, start), private)


def train_again(
    subject: Subject,
    guard: PrivateRun,
    state: State,
    until: int,
    changed: Callable[[State, Cohort], Cohort] = lambda state, cohort: cohort,
) -> Params:
    """Train the rounds of a private run from a state on; return the model after them.

    Args:
      changed: (state, the cohort of its round) → the cohort that is trained.
    """
    assert subject.private is not None
    method, config, prepared = subject.private[0].method, subject.config, subject.prepared
    problem = make_problem(prepared, config, method, subject.choice.device)
    with federate(config, problem, subject.choice, None, None) as federation:
        cohorts = simulated_cohorts(config, prepared, method, federation, state.params, guard)
        return run_rounds(method, state, until, federation, lambda state: changed(state, cohorts(state))).params


# One round replayed


class Noiseless(PrivateRun):
    """The same mechanism without its noise: what is left says what the noise does."""

    def _release(self, round: int) -> Draw:
        super()._release(round)
        return lambda name, shape: torch.zeros(shape, dtype=torch.float64)


def replay(subject: Subject, listen: Listener) -> dict[str, Any] | None:
    """Do the last round again whose checkpoint, and the one before, are there; None where no noisy sum is claimed.

    Returns:
      round, difference (of the two steps, in lengths of what the noise does to them) and contradicted; or `skipped`,
      the reason why nothing was replayed.
    """
    if subject.private is None or subject.claim.terms is None:
        return None
    listen.say("audit: doing one of the run's own rounds again")
    bounded, ledger = subject.private[0], read_ledger(subject.trained.folder)
    if ledger.terms.randomness != "derived":
        return {"skipped": "the noise is the operating system's, and nobody can draw it again"}
    if keeps_state(bounded.method):
        return {"skipped": f"clients of {bounded.method.name} keep state, which only they have"}
    step = last_step(subject.trained.folder / "checkpoint", bounded, subject.theta)
    if step is None:
        return {"skipped": "no two checkpoints of rounds next to each other are there (train.checkpoint_every=1)"}
    before, after = step
    difference = math.inf
    releases = [k for k, e in enumerate(ledger.entries) if e.what == "update" and e.round == before.round]
    if releases:
        noised, silent = (_replayed(kind, subject, ledger, releases[-1], before) for kind in (PrivateRun, Noiseless))
        effect = _apart(noised, silent)
        difference = _apart(noised, after) / effect if effect > 0 else math.inf
    return {"round": before.round + 1, "difference": difference, "contradicted": not difference <= CLOSE}


def last_step(folder: Path, bounded: PrivateMethod, theta: Params) -> tuple[State, Params] | None:
    """Return the state before and the model after the last round of which both are there and whole."""
    for number in sorted(rounds_in(folder), reverse=True):
        try:
            after = read_checkpoint(folder, number).state.params
            if number == 1:
                return initial_state(bounded.method, theta), after
            if number - 1 in rounds_in(folder):
                return read_checkpoint(folder, number - 1).state, after
        except (OSError, ValueError, KeyError, TypeError, RunError):
            continue  # a damaged checkpoint: an earlier pair may be whole
    return None


def _replayed(kind: type[PrivateRun], subject: Subject, ledger: Ledger, number: int, before: State) -> Params:
    """Return the model after the release `number` of the ledger, from the state before it."""
    assert subject.private is not None
    guard = kind(subject.config, subject.private[0], subject.fresh_folder("replay"), ledger.terms)
    for entry in ledger.entries[:number]:  # so that attempt and leaf are those of the release
        guard.ledger.book(entry.row, entry.what, entry.round)
    device = subject.choice.device
    params = {name: before.params[name].to(device) for name in subject.theta}
    server = {name: t.to(device) for name, t in before.server.items()}
    return train_again(subject, guard, replace(before, params=params, server=server), before.round + 1)


def _apart(one: Params, two: Params) -> float:
    return norm_of(p.double().cpu() - two[name].double().cpu() for name, p in one.items())


# The one-shot estimate


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε at which N(0, 1) and N(μ, 1) are (ε, δ)-indistinguishable.

    Example:
      >>> round(gaussian_epsilon(1.0, 1e-5), 4), gaussian_epsilon(0.0, 1e-5)
      (4.3772, 0.0)
    """
    with np.errstate(divide="ignore"):
        return rho_to_eps(mu**2 / 2, delta) if mu > 0 else 0.0


class Estimate(NamedTuple):
    """What one model says about those who sent it vectors.

    Attributes:
      low, high: the 95 % interval of ε̂; `certain` is the 99.9 % lower end, which a claim is compared with.
      floor: ε̂ of as many vectors that were not sent: what the method says of nothing.
      mean, spread: of √d · cosine; 0 and 1 if the model says nothing.
      canaries, dimensions: k and d.
    """

    epsilon: float
    low: float
    high: float
    certain: float
    floor: float
    mean: float
    spread: float
    canaries: int
    dimensions: int
    delta: float


def estimate_epsilon(seen: Numbers, unseen: Numbers, dimensions: int, delta: float) -> Estimate:
    r"""Estimate ε from cosines with vectors that were sent, and with others that were not.

    The variance is pooled: half that of the cosines, half the null's 1/d. With the fitted variance alone a few hundred
    canaries overestimate small ε. The interval is that of the mean over k canaries, carried through ε(μ), which rises
    with μ.
    """
    if len(seen) < 2:
        raise ValueError(f"{len(seen)} canaries; at least 2")
    scaled = np.sqrt(dimensions) * np.asarray(seen, np.float64)
    mean, spread = float(scaled.mean()), float(scaled.std(ddof=1))
    pooled = math.sqrt((spread**2 + 1.0) / 2)
    error = spread / math.sqrt(len(scaled))

    def at(shift: float) -> float:
        return gaussian_epsilon(max(0.0, mean + shift * error) / pooled, delta)

    shown, certain = NORMAL.inv_cdf(0.5 + CONFIDENCE / 2), NORMAL.inv_cdf(0.5 + CERTAIN / 2)
    floor = gaussian_epsilon(max(0.0, float(np.sqrt(dimensions) * np.mean(unseen))) / pooled, delta)
    return Estimate(at(0.0), at(-shown), at(shown), at(-certain), floor, mean, spread, len(scaled), dimensions, delta)


def unit_vector(dimensions: int, seed: int) -> Tensor:
    """Return a random direction, float32; it needs no memory, as it can be drawn again from its seed."""
    drawn = torch.empty(dimensions).normal_(0, 1, generator=torch.Generator().manual_seed(seed))
    return drawn.div_(drawn.double().norm().float())


def cosines(change: Tensor, seeds: Iterable[int]) -> Numbers:
    """Return the cosine of a flat vector with the random direction of each seed."""
    flat = change.double()
    size = float(flat.norm())
    if size == 0 or not math.isfinite(size):
        raise ValueError(f"the model's change has norm {size}: there is nothing to compare with")
    found = (float(flat @ unit_vector(len(flat), seed).double()) / size for seed in seeds)
    return np.fromiter(found, np.float64)


def how_many(dimensions: int, rate: float, rounds: int) -> int:
    """Canary clients of an audit: as many as can be drawn in time, and do not hide each other.

    As many vectors again are drawn that are not sent. A round's canaries are nearly orthogonal, but each still has the
    others' sum as noise of variance rate·k/d, in addition to the mechanism's z².
    """
    affordable = NUMBERS / dimensions / (2 + rate * rounds)
    return max(FEWEST_CANARIES, int(min(MOST_CANARIES, affordable, CROWDED * dimensions / rate)))


def canary_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the canaries' directions, and as many of directions that are not sent."""
    return [derive_seed(seed, "one-shot", k) for k in range(2 * count)]


def picked(terms: Terms, canaries: int, seed: int, round: int) -> list[int]:
    """Return the canary clients of a round: each by chance, or, where clients take turns, those whose turn it is."""
    if terms.gap is not None:
        return list(range(round % terms.gap, canaries, terms.gap))
    rng = np.random.default_rng(derive_seed(seed, "one-shot", "picked", round))
    return np.flatnonzero(rng.random(canaries) < terms.rate).tolist()


def also_sending(method: Method, sent: Params) -> Method:
    """Return the method whose next sum has these tensors in it, too."""
    own = method.server

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        total = {name: t + sent[name].to(t) if name in sent else t for name, t in aggregate.total.items()}
        return own.step(params, replace(aggregate, total=total), state)

    return replace(method, server=own._replace(step=step))


def sent_by(seeds: Iterable[int], like: Params, clip: float) -> Params:
    """Return the sum of what the canaries of these seeds send, each clipped by the sum that clips every client."""
    sizes = [p.numel() for p in like.values()]
    silent = Noising(clip, 0.0, None, 1.0, 1.0, None, lambda: lambda name, shape: torch.zeros(shape).double())
    summed, whole = NoisedSum(like, silent), dict.fromkeys(like, 1.0)
    for number, seed in enumerate(seeds):
        layers = unit_vector(sum(sizes), seed).mul_(LONG * clip).split(sizes)
        upload = {name: own.view(p.shape) for (name, p), own in zip(like.items(), layers, strict=True)}
        summed.add(f"canary {number}", upload, Share(whole, whole))
    return summed.aggregate(()).total


def one_shot(subject: Subject, rounds: int, listen: Listener) -> dict[str, Any] | None:
    """Train as the run did, with canary clients in the sums, and estimate ε; None where no noisy sum is claimed."""
    claim, config = subject.claim, subject.config
    if subject.private is None or claim.terms is None or claim.delta is None:
        return None
    (bounded, terms), method = subject.private, subject.private[0].method
    # Canaries send every layer but those that are frozen for a while.
    layers = {name: p for name, p in subject.theta.items() if name not in FROZEN or not config.train.frozen_rounds}
    count = how_many(sum(p.numel() for p in layers.values()), claim.terms.rate, rounds)
    listen.say(f"audit: training again with {count} canary clients in the sums")
    seeds, calls = canary_seeds(config.train.seed, count), 0

    def with_canaries(state: State, cohort: Cohort) -> Cohort:
        nonlocal calls
        own = [seeds[k] for k in picked(terms, count, config.train.seed, state.round)]
        calls += len(own)
        clipped = sent_by(own, layers, float(state.server[CLIP]))
        sent = {name: t * (terms.called / terms.cohort) for name, t in clipped.items()}
        return replace(cohort, method=also_sending(method, sent))

    guard = PrivateRun(config, bounded, subject.fresh_folder("one-shot"), terms)
    after = train_again(subject, guard, initial_state(method, subject.theta), rounds, with_canaries)
    return judge(layers, after, seeds, claim.delta, claim.epsilon, calls / count)


def judge(
    before: Params, after: Params, seeds: Sequence[int], delta: float, claimed: float | None, calls: float
) -> dict[str, Any]:
    """Compare the model's change with the canaries' directions; the second half of `seeds` was never sent.

    Args:
      calls: how often a canary took part, in the mean; one that never did is like one that is not there.
    """
    change = torch.cat([(after[name].double().cpu() - p.double().cpu()).flatten() for name, p in before.items()])
    sent, not_sent = seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]
    estimate = estimate_epsilon(cosines(change, sent), cosines(change, not_sent), len(change), delta)
    return {
        **estimate._asdict(),
        "claimed": claimed,
        "calls": calls,
        "power": calls >= FEW_CALLS,
        "contradicted": claimed is not None and estimate.certain > claimed,
    }
