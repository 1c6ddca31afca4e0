r"""Every method, as a composition of solver, mediator and server rule.

A method is a function of its hyper-parameters that returns a `Method`. Its keyword arguments *are* its options: the
command line, configuration files and `keyfed methods NAME` read them from the signature, and the docstring documents
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from keyfed.errors import ConfigError, nearest
from keyfed.federated import components as parts
from keyfed.federated import distance, dual_methods, local, server, server_methods, upload, weigh
from keyfed.federated import upload as compress
from keyfed.federated.options import Optimiser, local_solver, positive, with_local_options
from keyfed.federated.types import Method, MethodSpec


@with_local_options
def fedavg(
    *,
    optimiser: Optimiser = "adam",
    lr: float = 0.006,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
    noise: float = 0.0,
    noise_at: upload.Where = "client",
) -> Method:
    r"""Federated averaging: clients train for E epochs, the server takes the mean weighted by tokens.

    .. math::  w_k = \mathrm{solve}_E(f_k, θ),\qquad θ' = θ + \sum_k \frac{n_k}{\sum_j n_j}(w_k − θ)

    Options:
      noise: standard deviation β of FedAtt's white noise; no guarantee of privacy comes with it. 0 is none.
      noise_at: who adds it: client (every upload, FedAtt equation 6) or server (the new θ once, the authors' code).
      {local}

    References:
      McMahan, Moore, Ramage, Hampson, Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
      Decentralized Data*, AISTATS 2017, algorithm 1.
    """
    return Method(
        name="fedavg",
        solver=local_solver(optimiser, lr, momentum, clip, decay, epochs),
        mediator=weigh.by_tokens(),
        server=server.sgd(1.0),
        batch_size=batch_size,
        epochs=epochs,
        noise=upload.noise(noise, at=noise_at),
    )


def fedsgd(*, lr: float = 1.0, batch_size: int = 10) -> Method:
    r"""Federated SGD: every client sends one full-batch gradient, the server takes one step. C = 1.

    .. math::  θ' = θ − η \sum_k \frac{n_k}{\sum_j n_j} ∇f_k(θ)

    Reading: *one gradient step* a round, as FedMed writes it.

    Options:
      lr: the server's step size η; there is no local one.
      batch_size: rows that go through the network together; the gradient is that of all of them.

    References:
      McMahan et al. 2017, section 2; Wu, Liang, Wang, *FedMed*, Sensors 2020, section 3.
    """
    return Method(
        name="fedsgd",
        solver=local.full_gradient(),
        mediator=weigh.by_tokens(),
        server=server.sgd(lr),
        batch_size=batch_size,
        epochs=1,
        cohort="all",
    )


@with_local_options
def fedprox(
    *,
    mu: float = 0.0003,
    by_tokens: bool = False,
    optimiser: Optimiser = "adam",
    lr: float = 0.01,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedProx: federated averaging whose clients are held near θ by a proximal term.

    .. math::  w_k ≈ \arg\min_w f_k(w) + \frac{μ}{2}‖w − θ‖^2,\qquad θ' = θ + \frac1m \sum_k (w_k − θ)

    Reading: the minimiser is inexact, E epochs from θ; the term's gradient μ(w − θ) is added after clipping that of the
    loss. The mean is uniform as published (where clients are drawn in proportion to their text); μ = 0 is FedAvg with
    that mean.

    Options:
      mu: strength μ of the proximal term; the published 0.5 hardly lets a language model move (3.2 nats per character
        after five rounds, where 0.0001 reaches 1.76).
      by_tokens: weigh clients by n_k as FedAvg does instead of uniformly.
      {local}

    References:
      Sahu, Li et al., *Federated Optimization in Heterogeneous Networks*, 2018, algorithm 2; next-character report,
      section 6.2 (μ = 0.5).
    """
    positive("mu", mu, or_zero=True)
    return Method(
        name="fedprox",
        solver=local_solver(optimiser, lr, momentum, clip, decay, epochs, mu=mu),
        mediator=weigh.by_tokens() if by_tokens else weigh.uniform(),
        server=server.sgd(1.0),
        batch_size=batch_size,
        epochs=epochs,
    )


@with_local_options
def fedatt(
    *,
    step: float = 1.2,
    temperature: float = 1.0,
    norm: Literal["spectral", "frobenius"] = "spectral",
    bound: float | None = None,
    noise: float = 0.0,
    noise_at: upload.Where = "client",
    optimiser: Optimiser = "adam",
    lr: float = 0.003,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedAtt: attentive aggregation, where a client counts the more in a layer the farther that layer moved.

    .. math::  s_k^l = ‖w_k^l − θ^l‖_p,\qquad γ_k^l = \frac{e^{s_k^l/T}}{\sum_j e^{s_j^l/T}},\qquad
               θ' = θ + ε \sum_k γ_k (w_k − θ)

    Reading: the text leaves p open; the default is the *spectral* norm of matrices and the Euclidean norm of vectors,
    as the authors' code has it. The softmax may collapse onto one client, with the Frobenius norm above all: of ten
    clients of an LSTM we measured 7.1 effective ones on average at T = 1, but 1.1 to 2.5 in the recurrent matrix in
    the first four rounds (docs/LOG.md; effective_by_layer in metrics.jsonl). A layer is one named parameter
    tensor. Published: sgd, lr 0.01, momentum 0.5, E = 5, B = 10.

    Options:
      step: the server's step size ε.
      temperature: T of the softmax; 1 is published.
      norm: spectral or frobenius.
      bound: largest score s/T that counts, against clients that move far on purpose; none is published.
      noise: standard deviation β of FedAtt's white noise; no guarantee of privacy comes with it. 0 is none.
      noise_at: who adds it: client (every upload, FedAtt equation 6) or server (the new θ once, the authors' code).
      {local}

    References:
      Ji, Pan, Long, Li, Jiang, Huang, *Learning Private Neural Language Modeling with Attentive Aggregation*, IJCNN
      2019, equations 2 to 4, algorithm 3.
    """
    positive("step", step)
    return Method(
        name="fedatt",
        solver=local_solver(optimiser, lr, momentum, clip, decay, epochs),
        mediator=weigh.softmax_of_distance(temperature, bound),
        server=server.sgd(step),
        batch_size=batch_size,
        epochs=epochs,
        # On the server the noise is added to θ' itself: divided here by the step that the mean is multiplied with.
        noise=upload.noise(noise if noise_at == "client" else noise / step, at=noise_at),
        distance=distance.spectral() if norm == "spectral" else distance.frobenius(),
    )


@with_local_options
def fedmed(
    *,
    step: float = 1.0,
    temperature: float = 1.0,
    reading: distance.Reading = "absolute",
    adaptive: bool = True,
    mediation: bool = True,
    threshold: float = 0.1,
    beta: float = 1.0,
    bound: float | None = None,
    optimiser: Optimiser = "adam",
    lr: float = 0.006,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedMed: attention by Jensen–Shannon divergence while the loss moves, FedAvg once it settles, top-K uploads.

    .. math::  d_k^l = JS(θ^l ‖ w_k^l),\qquad γ_k^l = \frac{e^{d_k^l/T}}{\sum_j e^{d_j^l/T}},\qquad
               θ' = θ + η \sum_k γ_k (w_k − θ)

    In a round whose mean training loss L differs from the last by less than ε the weights are n_k / Σn instead
    (mediation); of m clients only the K = max(1, ⌊βm + ½⌋) of lowest loss upload (top-K).

    Reading: equation 5 prints ∇L(w_t) for every client, read as θ − w_k. Equation 2 needs distributions and weights are
    signed: |w| / Σ|w| unless `reading` says otherwise. L is the unweighted mean over *all* reports, top-K or not; the
    first round is adaptive. JS is at most ln 2, so with T = 1 no client counts more than twice another. Plain FedMed is
    a uniform mean: of ten clients we measured 9.9995 effective ones or more in every layer (docs/LOG.md). A smaller T
    makes it do something. Published tables are without top-K (β = 1).

    With --dp both go by what the rounds before have released of the losses, with noise: the switch by
    |L(t−1) − L(t−2)|, one round later, and instead of the K lowest losses those below a public limit count, which
    follows the β-quantile (docs/privacy.md).

    Options:
      step: the server's step size η.
      temperature: T of the softmax; 1 is published.
      reading: how weights become a distribution: absolute, softmax or histogram.
      adaptive: weigh by divergence; false weighs by tokens throughout (FedAvg under top-K) and needs mediation=false.
      mediation: switch between divergence and tokens by the loss; false stays with the one that `adaptive` says.
      threshold: ε, the change of the mean loss (nats per token) from which a round is adaptive.
      beta: share β of the cohort that uploads; 1 is everybody.
      bound: largest score d/T that counts; none is published.
      {local}

    References:
      Wu, Liang, Wang, *FedMed: A Federated Learning Framework for Language Modeling*, Sensors 2020, equations 2 to 5
      (adaptive), 6 and 7 (mediation), 8 and 9 (top-K), algorithm 1.
    """
    attention = weigh.softmax_of_distance(temperature, bound)
    switch = weigh.switch_on_loss(attention, weigh.by_tokens(), threshold)
    if mediation and not adaptive:
        raise ConfigError(
            "method.mediation switches to attention, which method.adaptive=false turns off; set both false"
        )
    inner = switch if mediation else attention if adaptive else weigh.by_tokens()
    return Method(
        name="fedmed",
        solver=local_solver(optimiser, lr, momentum, clip, decay, epochs),
        mediator=inner if beta == 1 else weigh.top_k(beta, inner),
        server=server.sgd(positive("step", step)),
        batch_size=batch_size,
        epochs=epochs,
        distance=distance.jensen_shannon(reading) if adaptive else None,
        uploading=beta,
    )


def central(
    *,
    optimiser: Optimiser = "adam",
    lr: float = 0.002,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    batch_size: int = 20,
) -> Method:
    r"""Central training: the same model on everybody's text in one place, with the token budget of the federation.

    Not a federated method but the limit one is measured against: one client that holds the pooled text. A "round"
    reads as many tokens as a federated round's cohort would train on, going on where the last one stopped.

    Options:
      optimiser: sgd or adam.
      lr: step size η (with sgd about 1 to 5).
      momentum: sgd only; starts at zero every round.
      clip: largest norm of a gradient; none turns clipping off.
      decay: factor on the step size every round.
      batch_size: rows B of a step.
    """
    return Method(
        name="central",
        solver=local_solver(optimiser, lr, momentum, clip, decay, epochs=1),
        mediator=weigh.by_tokens(),
        server=server.sgd(1.0),
        batch_size=batch_size,
        epochs=1,
        cohort="pooled",
    )


METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "fedsgd": fedsgd,
    "fedprox": fedprox,
    "fedatt": fedatt,
    "fedmed": fedmed,
    "fedadam": server_methods.fedadam,
    "fedyogi": server_methods.fedyogi,
    "fedadagrad": server_methods.fedadagrad,
    "fedavgm": server_methods.fedavgm,
    "fednesterov": server_methods.fednesterov,
    "admm": dual_methods.admm,
    "liadmm": dual_methods.liadmm,
    "fedadmm": dual_methods.fedadmm,
    "central": central,
}


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return a method's options (its keyword arguments); an unknown name is an error that says the nearest."""
    if name not in METHODS:
        raise ConfigError(f'method "{name}" is not known{nearest(name, METHODS)}. Methods: {", ".join(METHODS)}.')
    return dict(inspect.signature(METHODS[name]).parameters)


def build_method(spec: MethodSpec) -> Method:
    """Build a method from its specification; unknown options are errors that say the nearest."""
    options = method_options(spec.name)
    for key in spec.options:
        if key not in options:
            raise ConfigError(
                f'method.{key} is not an option of "{spec.name}"{nearest(key, options)}. Options: {", ".join(options)}.'
            )
    values: Mapping[str, object] = {
        name: spec.options.get(name, parameter.default) for name, parameter in options.items()
    }
    method = parts.exchange(METHODS[spec.name](**values), spec.mediator, spec.server)
    if spec.schedule is not None:
        if spec.name == "fedsgd":
            raise ConfigError(
                f"train.schedule is {spec.schedule.shape}: it changes the clients' step size, and fedsgd's clients "
                "take no step; leave it out, or take fedavg"
            )
        method = replace(method, solver=local.scheduled(method.solver, spec.schedule))
    if spec.average is not None:
        method = replace(method, server=server.averaged(method.server, spec.average))
    # Every option is in it, defaults too: clients and server compare and mask by the specification.
    mediator, rule = parts.resolved_part("mediator", spec.mediator), parts.resolved_part("server", spec.server)
    resolved = replace(spec, options=dict(values), mediator=mediator, server=rule)  # type: ignore[arg-type]
    return replace(method, spec=resolved, codec=compress.codec(spec.keep, spec.quantise))
