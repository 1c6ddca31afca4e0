"""Rounds of tiny made-up clients, and the checks that a private sum must pass; mutants run the same checks."""

from __future__ import annotations

import math
import random
from functools import partial

import torch

from keyfed.config.schema import PrivacyConfig
from keyfed.engine.sums.noised import NoisedSum
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Report
from keyfed.private.dp.noise import Noising, derived, update_noise
from keyfed.private.dp.private_method import BELOW, LOSS, TRACKED, make_private

LIKE = {"a": torch.zeros(2), "b": torch.zeros(1)}
CLIP, CALLED = 1.5, 4.0
PRIVACY = PrivacyConfig(noise=1.0, quantile=None, clip=CLIP)

# Every method that claims a bound, with the options that its claim needs.
CLAIMING = {
    "fedavg": {},
    "fedavg, capped tokens": {"weight_cap": 50.0},
    "fedsgd": {},
    "fedprox": {},
    "fedprox by tokens": {"by_tokens": True},
    "fedatt": {"bound": 2.0},
    "fedatt frobenius": {"bound": 0.5, "norm": "frobenius"},
    "fedmed": {"mediation": False},
    "fedmed tokens": {"mediation": False, "adaptive": False},
    "fedmed, the switch": {},
    "fedmed, the switch with capped tokens": {"weight_cap": 50.0},
    "fedmed, top-K": {"mediation": False, "beta": 0.8},
    "fedmed tokens, top-K": {"mediation": False, "adaptive": False, "beta": 0.5},
    "fedmed, both": {"beta": 0.8},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "fedavgm": {},
    "fednesterov": {},
    "fedadmm": {"server_step": "published"},
    "fedadmm, the running mean": {},
    "admm": {},
    "admm, capped tokens": {"weight_cap": 50.0},
    "liadmm": {"weights": "uniform"},
}
FOLLOWING = [label for label in CLAIMING if "switch" in label or "top-K" in label or "both" in label]


def bounded(label, quantile=None):
    options = dict(CLAIMING[label])
    privacy = PrivacyConfig(noise=1.0, quantile=quantile, clip=CLIP, weight_cap=options.pop("weight_cap", None))
    return make_private(build_method(MethodSpec(label.split(",")[0].split()[0], options)), privacy)


def share_of(made, rng):
    """How clients weigh themselves in some round: by any public numbers that earlier ones may have released."""
    mediator = made.method.mediator
    if mediator.released is None:
        return mediator.share
    state = made.method.server.init(LIKE)
    if TRACKED + LOSS in state:
        mean, reach = rng.uniform(0, 10), rng.choice([1.0, 2.0, 8.0])
        state[TRACKED + LOSS] = torch.tensor([mean, reach, rng.choice([math.inf, 1.0, 0.01]), 3.0]).double()
    if TRACKED + BELOW in state:
        state[TRACKED + BELOW] = torch.tensor([rng.uniform(0, 12), 0.1, 0.0]).double()
    return mediator.released(state)


def silent():
    """A release without noise, so that the sum itself can be looked at."""
    return lambda name, shape: torch.zeros(shape, dtype=torch.float64)


def noising(ratio=False, std=0.0, release=silent, **changes):
    floor = 0.01 if ratio else None
    given = Noising(CLIP, std, None, CALLED, CALLED, floor, release)
    return given._replace(**changes)


def client(rng, name):
    """A client with any upload: tiny, usual or enormous, and any report of its own."""
    size = 10 ** rng.uniform(-3, 4)
    upload = {layer: torch.tensor([rng.gauss(0, size) for _ in range(p.numel())]) for layer, p in LIKE.items()}
    if rng.random() < 0.1:
        upload = {layer: torch.zeros_like(u) for layer, u in upload.items()}
    distance = {layer: min(math.log(2), abs(rng.gauss(0, 1))) * (5 if rng.random() < 0.2 else 1) for layer in LIKE}
    tokens, loss = rng.randint(1, 10_000), rng.uniform(0, 10) * (1000 if rng.random() < 0.1 else 1)
    return upload, Report(name, tokens, loss, 1, distance, weight=float(rng.randint(1, 10_000)))


def vector(total, ratio):
    """What a round releases before its noise, coordinate by coordinate."""
    parts = [t.flatten() for t in total._total.values()]
    if ratio:
        parts.append(torch.tensor(list(total._mass.values()), dtype=torch.float64))
    return torch.cat(parts)


def largest_move(made, tries, sum_of=NoisedSum, seed=0):
    """Search neighbouring cohorts: the largest change of the released vector by one client more or less."""
    rng = random.Random(seed)
    worst = 0.0
    for _ in range(tries):
        share = share_of(made, rng)
        total = sum_of(LIKE, noising(made.ratio))
        for k in range(rng.randint(0, 2)):
            upload, report = client(rng, f"c{k}")
            total.add(report.client, upload, share(report, list(LIKE)))
        without = vector(total, made.ratio)
        upload, report = client(rng, "x")
        total.add("x", upload, share(report, list(LIKE)))
        worst = max(worst, float((vector(total, made.ratio) - without).norm()))
    return worst


def largest_step(made, tries, sum_of=NoisedSum, seed=0):
    """The same for the mean that the server steps by, times the public denominator."""
    rng = random.Random(seed)
    worst = 0.0

    def mean(clients):
        total = sum_of(LIKE, noising(made.ratio))
        for upload, report in clients:
            total.add(report.client, upload, made.method.mediator.share(report, list(LIKE)))
        return torch.cat([t.double().flatten() for t in total.aggregate(()).mean().values()])

    for _ in range(tries):
        cohort = [client(rng, f"c{k}") for k in range(rng.randint(0, 3))]
        worst = max(worst, float((mean([*cohort, client(rng, "x")]) - mean(cohort)).norm()))
    return worst * CALLED


def largest_cost(made, tries, sum_of=NoisedSum, seed=0, z=1.0, bit_std=0.8):
    """Search neighbours for what they cost: the change of all that is released, each number beside its own noise.

    A round that is to cost no more than noise z on a sum of sensitivity 1 has at most 1/z; what is returned is z times
    the largest found.
    """
    rng, std, worst = random.Random(seed), update_noise(z, bit_std) * CLIP, 0.0
    given = noising(made.ratio, bit_std=bit_std, statistics=made.statistics)
    for _ in range(tries):
        share, total = share_of(made, rng), sum_of(LIKE, given)
        for k in range(rng.randint(0, 2)):
            upload, report = client(rng, f"c{k}")
            total.add(report.client, upload, share(report, list(LIKE)))
        update, told = vector(total, made.ratio), dict(total._counts)
        upload, report = client(rng, "x")
        total.add("x", upload, share(report, list(LIKE)))
        moved = float((vector(total, made.ratio) - update).norm()) / std
        halves = [(count - told[name]) / (bit_std * math.sqrt(len(told))) for name, count in total._counts.items()]
        worst = max(worst, z * math.hypot(moved, *halves))
    return worst


def told_noise(sum_of, name, count, told=("within", "loss", "below"), bit_std=3.0):
    """The noise that many rounds add to one half count, in clients."""
    out = []
    for round in range(count):
        release = partial(derived, 7, round, 0)
        made = sum_of(LIKE, noising(bit_std=bit_std, statistics=told, release=release)).aggregate(())
        out.append((made.facts[name][0] - 0.5) * CALLED)
    return torch.tensor(out).double()


def draws(sum_of, count, std=2.0, seed=7, round=0, attempt=0):
    """Coordinates of the noise that a release adds, from one large layer."""
    like = {"w": torch.zeros(count, dtype=torch.float64)}
    given = noising(std=std, release=lambda: derived(seed, round, attempt), denominator=1.0)
    return sum_of(like, given).aggregate(()).total["w"]


def mass_draws(sum_of, count, std=2.0, seed=7, round=0, attempt=0):
    """The noise that a ratio's masses and its sums get: an empty round of many layers of one number, each by itself."""
    like = {f"layer {k}": torch.zeros(1, dtype=torch.float64) for k in range(count)}
    given = noising(std=std, release=lambda: derived(seed, round, attempt), floor=-1e9)  # low: it cuts nothing off
    made = sum_of(like, given).aggregate(())
    kappa = CLIP / (2 * math.sqrt(count))
    masses = torch.tensor([made.mass[name] * kappa for name in like], dtype=torch.float64)
    return masses, torch.cat(list(made.total.values()))
