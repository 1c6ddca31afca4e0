"""Rounds of tiny made-up clients, and the checks that a private sum must pass; mutants run the same checks."""

from __future__ import annotations

import math
import random

import torch

from keyfed.engine.noised_sum import NoisedSum
from keyfed.federated.methods import build_method
from keyfed.federated.types import MethodSpec, Report
from keyfed.private.mechanism import bound
from keyfed.private.noise import Noising, derived
from keyfed.sections import PrivacyConfig

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
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "fedavgm": {},
    "fednesterov": {},
    "fedadmm": {"server_step": "published"},
}


def bounded(label):
    options = dict(CLAIMING[label])
    privacy = PrivacyConfig(noise=1.0, quantile=None, clip=CLIP, weight_cap=options.pop("weight_cap", None))
    return bound(build_method(MethodSpec(label.split(",")[0].split()[0], options)), privacy)


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
    return upload, Report(name, rng.randint(1, 10_000), rng.uniform(0, 10), 1, distance, weight=1.0)


def vector(total, ratio):
    """What a round releases before its noise, coordinate by coordinate."""
    parts = [t.flatten() for t in total._total.values()]
    if ratio:
        parts.append(torch.tensor(list(total._mass.values()), dtype=torch.float64))
    return torch.cat(parts)


def largest_move(made, tries, sum_of=NoisedSum, seed=0):
    """Search neighbouring cohorts: the largest change of the released vector by one client more or less."""
    rng = random.Random(seed)
    share = made.method.mediator.share
    worst = 0.0
    for _ in range(tries):
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


def draws(sum_of, count, std=2.0, seed=7, round=0, attempt=0):
    """Coordinates of the noise that a release adds, from one large layer."""
    like = {"w": torch.zeros(count, dtype=torch.float64)}
    given = noising(std=std, release=lambda: derived(seed, round, attempt), denominator=1.0)
    return sum_of(like, given).aggregate(()).total["w"]
