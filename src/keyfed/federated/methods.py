r"""Every method, as a composition of solver, mediator and server rule.

A method is a function of its options that returns a `Method`. Its keyword arguments *are* its options: the command
line, configuration files and `keyfed methods NAME` read them from the signature, and the docstring documents them.
Options of local training are one object, `LocalOptions`; on the command line its fields are options of the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from keyfed.errors import ConfigError, nearest
from keyfed.federated import components, distance, duals, server, weigh
from keyfed.federated.components import MethodFactory
from keyfed.federated.descent import scheduled
from keyfed.federated.local import LocalOptions, full_gradient, local_solver
from keyfed.federated.spec import MethodSpec, positive
from keyfed.federated.types import Method, ServerRule
from keyfed.federated.upload import Where, codec, noise_on

Weights = Literal["tokens", "uniform"]
METHODS: dict[str, MethodFactory] = {}  # by name, in the order of this file


def method(**known: Any) -> Callable[[Callable[..., Method]], MethodFactory]:
    """Register the function below as a method, with what `MethodFactory` says of its options."""

    def register(build: Callable[..., Method]) -> MethodFactory:
        METHODS[build.__name__] = factory = MethodFactory(build, **known)
        return factory

    return register


@method(characters={"lr": 0.02})
def fedavg(*, local: LocalOptions = LocalOptions(lr=0.006), noise: float = 0.0, noise_at: Where = "client") -> Method:
    r"""Federated averaging: clients train for E epochs, the server takes the mean weighted by tokens.

    .. math::  w_k = \mathrm{solve}_E(f_k, θ),\qquad θ' = θ + \sum_k \frac{n_k}{\sum_j n_j}(w_k − θ)

    Options:
      noise: standard deviation β of FedAtt's white noise; no guarantee of privacy comes with it. 0 is none.
      noise_at: client (every upload, equation 6; client-first: before its distance is measured). Or sum (once, with the
        m uploads and divided by m, equation 5 as printed) or server (the new θ once, the authors' code).
      {local}

    References:
      McMahan, Moore, Ramage, Hampson, Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
      Decentralized Data*, AISTATS 2017, algorithm 1.
    """
    return Method(
        "fedavg",
        local_solver(local),
        weigh.by_tokens(),
        server.sgd(1.0),
        local.batch_size,
        local.epochs,
        noise=noise_on(noise, at=noise_at),
    )


@method(server=("lr",), characters={"lr": 2.0})
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
    return Method("fedsgd", full_gradient(), weigh.by_tokens(), server.sgd(lr), batch_size, epochs=1, cohort="all")


@method(mediator=("by_tokens",), characters={"lr": 0.015, "mu": 0.0001})
def fedprox(*, mu: float = 0.0003, by_tokens: bool = False, local: LocalOptions = LocalOptions(lr=0.01)) -> Method:
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
    solver = local_solver(local, positive("mu", mu, or_zero=True))
    mediator = weigh.by_tokens() if by_tokens else weigh.uniform()
    return Method("fedprox", solver, mediator, server.sgd(1.0), local.batch_size, local.epochs)


@method(mediator=("temperature", "norm", "bound"), server=("step",), characters={"lr": 0.02})
def fedatt(
    *,
    step: float = 1.2,
    temperature: float = 1.0,
    norm: distance.Norm = "spectral",
    bound: float | None = None,
    noise: float = 0.0,
    noise_at: Where = "client",
    local: LocalOptions = LocalOptions(lr=0.003),
) -> Method:
    r"""FedAtt: attentive aggregation, where a client counts the more in a layer the farther that layer moved.

    .. math::  s_k^l = ‖w_k^l − θ^l‖_p,\qquad γ_k^l = \frac{e^{s_k^l/T}}{\sum_j e^{s_j^l/T}},\qquad
               θ' = θ + ε \sum_k γ_k (w_k − θ)

    Reading: the text leaves p open; the default is the *spectral* norm of matrices and the Euclidean norm of vectors,
    as the authors' code has it. The softmax may collapse onto one client, with the Frobenius norm above all. Of ten
    clients of an LSTM we measured 7.1 effective ones on average at T = 1. In the recurrent matrix they were 1.1 to 2.5
    in the first four rounds (docs/LOG.md; effective_by_layer in metrics.jsonl). A layer is one named parameter
    tensor. Published: sgd, lr 0.01, momentum 0.5, E = 5, B = 10.

    Options:
      step: the server's step size ε.
      temperature: T of the softmax; 1 is published.
      norm: spectral or frobenius.
      bound: largest score s/T that counts, against clients that move far on purpose; none is published.
      noise: standard deviation β of FedAtt's white noise; no guarantee of privacy comes with it. 0 is none.
      noise_at: client (every upload, after its distance is measured), client-first (before it: the attention sees the
        noise). Or sum (once, with the m uploads, divided by m) or server (the new θ once, the authors' code).
      {local}

    References:
      Ji, Pan, Long, Li, Jiang, Huang, *Learning Private Neural Language Modeling with Attentive Aggregation*, IJCNN
      2019, equations 2 to 4, algorithm 3.
    """
    return Method(
        "fedatt",
        local_solver(local),
        weigh.softmax_of_distance(temperature, bound),
        server.sgd(positive("step", step)),
        local.batch_size,
        local.epochs,
        # On the server the noise is added to θ' itself: divided here by the step that the mean is multiplied with.
        noise=noise_on(noise / step if noise_at == "server" else noise, at=noise_at),
        distance=distance.norm(norm),
    )


@method(
    mediator=("temperature", "reading", "adaptive", "mediation", "threshold", "beta", "bound"),
    server=("step",),
    characters={"lr": 0.02},
)
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
    loss: Literal["trained", "tail"] = "trained",
    local: LocalOptions = LocalOptions(lr=0.006),
) -> Method:
    r"""FedMed: attention by Jensen–Shannon divergence while the loss moves, FedAvg once it settles, top-K uploads.

    .. math::  d_k^l = JS(θ^l ‖ w_k^l),\qquad γ_k^l = \frac{e^{d_k^l/T}}{\sum_j e^{d_j^l/T}},\qquad
               θ' = θ + η \sum_k γ_k (w_k − θ)

    In a round whose mean training loss L differs from the last by less than ε it is FedAvg instead (mediation). The
    weights are then n_k / Σn, and no η scales the step. Which it was is `adaptive` in metrics.jsonl. Of m clients
    only the K = max(1, ⌊βm + ½⌋) of lowest loss upload (top-K).

    Reading: equation 5 prints ∇L(w_t) for every client, read as θ − w_k. Equation 2 needs distributions and weights are
    signed: |w| / Σ|w| unless `reading` says otherwise. L is the unweighted mean over *all* reports, top-K or not; the
    first round is adaptive. JS is at most ln 2 (`raw` has no limit), so with T = 1 no client counts more than twice
    another. In one run with ten alike clients 9.9995 or more were effective in every layer, nearly a uniform mean
    (docs/LOG.md). A smaller T makes it do more. Published tables are without top-K (β = 1).

    With --dp both go by what the rounds before have released of the losses, with noise: the switch by
    |L(t−1) − L(t−2)|, one round later, and instead of the K lowest losses those below a public limit count, which
    follows the β-quantile (docs/privacy.md).

    Options:
      step: the server's step size η in adaptive rounds; FedAvg's branch has none.
      temperature: T of the softmax; 1 is published.
      reading: how weights become a distribution: absolute, softmax, histogram, or raw (they do not).
      adaptive: weigh by divergence; false weighs by tokens throughout (FedAvg under top-K) and needs mediation=false.
      mediation: switch between divergence and tokens by the loss; false stays with the one that `adaptive` says.
      threshold: ε, the change of the mean loss (nats per token) from which a round is adaptive.
      beta: share β of the cohort that uploads; 1 is everybody.
      bound: largest score d/T that counts; none is published.
      loss: what clients report: their last epoch's as trained, or by one more pass at the tail of local training.
      {local}

    References:
      Wu, Liang, Wang, *FedMed: A Federated Learning Framework for Language Modeling*, Sensors 2020, equations 2 to 5
      (adaptive), 6 and 7 (mediation), 8 and 9 (top-K), algorithm 1.
    """
    if mediation and not adaptive:
        raise ConfigError(
            "method.mediation switches to attention, which method.adaptive=false turns off; set both false"
        )
    if step != 1 and not adaptive:
        raise ConfigError(f"method.step={step} is of adaptive rounds, which method.adaptive=false leaves out; so is it")
    inner = (
        weigh.softmax_of_distance(temperature, bound, distance.most_divergence(reading))
        if adaptive
        else weigh.by_tokens()
    )
    if mediation:
        inner = weigh.switch_on_loss(inner, weigh.by_tokens(), threshold)
    return Method(
        "fedmed",
        local_solver(local, tail=loss == "tail"),
        inner if beta == 1 else weigh.top_k(beta, inner),
        server.mediated(positive("step", step)),
        local.batch_size,
        local.epochs,
        distance=distance.jensen_shannon(reading) if adaptive else None,
        uploading=beta,
    )


def _with_server(name: str, local: LocalOptions, rule: ServerRule) -> Method:
    """FedAvg's clients and weights; the mean upload Δ is the negative of a pseudo-gradient for the server."""
    return Method(name, local_solver(local), weigh.by_tokens(), rule, local.batch_size, local.epochs)


@method(server=("server_lr", "beta1", "beta2", "tau", "bias_correction"), characters={"lr": 0.02, "server_lr": 0.2})
def fedadam(
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
    bias_correction: bool = False,
    local: LocalOptions = LocalOptions(lr=0.01),
) -> Method:
    r"""FedAdam: the server moves by Adam in the direction of the mean upload.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← β_2 v + (1−β_2)Δ^2,\quad θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².
    Adam itself is `bias_correction`: v starts at 0, and the step of round t is η (m/(1−β₁^t)) / (√(v/(1−β₂^t)) + τ).
    A source that gives its server "Adam(0.001)", as the pretraining paper's code in Keras does, means that step with
    server_lr=0.001, beta2=0.999 and tau=1e-7. Without the correction the same numbers make other steps.

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      beta2: how much of the second moment survives a round, β₂.
      tau: floor τ of the denominator; the larger, the less adaptive.
      bias_correction: take Adam's step with both moments corrected for their start at 0, not Reddi's.
      {local}

    References:
      Reddi et al., *Adaptive Federated Optimization*, 2020 (ICLR 2021), algorithm 2; Kingma, Ba, *Adam*, 2014 (ICLR
      2015), algorithm 1.
    """
    rule = server.adam(positive("server_lr", server_lr), beta1, beta2, tau, bias_correction)
    return _with_server("fedadam", local, rule)


@method(server=("server_lr", "beta1", "beta2", "tau"), characters={"lr": 0.02, "server_lr": 0.2})
def fedyogi(
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
    local: LocalOptions = LocalOptions(lr=0.01),
) -> Method:
    r"""FedYogi: the server moves by Yogi, whose second moment changes slowly in both directions.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← v − (1−β_2)Δ^2\,\mathrm{sign}(v − Δ^2),\quad
               θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      beta2: how much of the second moment survives a round, β₂.
      tau: floor τ of the denominator; the larger, the less adaptive.
      {local}

    References:
      Reddi et al., *Adaptive Federated Optimization*, 2020 (ICLR 2021), algorithm 2.
    """
    return _with_server("fedyogi", local, server.yogi(positive("server_lr", server_lr), beta1, beta2, tau))


@method(server=("server_lr", "beta1", "tau"), characters={"lr": 0.02, "server_lr": 0.15})
def fedadagrad(
    *, server_lr: float = 0.1, beta1: float = 0.0, tau: float = 0.01, local: LocalOptions = LocalOptions(lr=0.01)
) -> Method:
    r"""FedAdagrad: the server moves by Adagrad; a weight that has moved much moves less from then on.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← v + Δ^2,\quad θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      tau: floor τ of the denominator; the larger, the less adaptive.
      {local}

    References:
      Reddi et al., *Adaptive Federated Optimization*, 2020 (ICLR 2021), algorithm 2.
    """
    return _with_server("fedadagrad", local, server.adagrad(positive("server_lr", server_lr), beta1, tau))


@method(server=("server_lr", "beta"), characters={"lr": 0.02})
def fedavgm(*, server_lr: float = 1.0, beta: float = 0.3, local: LocalOptions = LocalOptions(lr=0.006)) -> Method:
    r"""FedAvgM: federated averaging with momentum on the server.

    .. math::  v ← βv + Δ,\qquad θ' = θ + ηv

    Options:
      server_lr: the server's step size η; with β = 0 and η = 1 this is FedAvg.
      beta: how much of the velocity survives a round, β.
      {local}

    References:
      Hsu, Qi, Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*,
      2019.
    """
    return _with_server("fedavgm", local, server.momentum(positive("server_lr", server_lr), beta))


@method(server=("server_lr", "beta"), characters={"lr": 0.02})
def fednesterov(*, server_lr: float = 1.0, beta: float = 0.3, local: LocalOptions = LocalOptions(lr=0.006)) -> Method:
    r"""Outer Nesterov: federated averaging with Nesterov momentum on the server.

    .. math::  v ← βv + Δ,\qquad θ' = θ + η(Δ + βv)

    Options:
      server_lr: the server's step size η.
      beta: how much of the velocity survives a round, β.
      {local}

    References:
      Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models*, 2023 (η = 0.7, β = 0.9
      for many more local steps; a round here is a short epoch, where less momentum was measured to be better).
    """
    return _with_server("fednesterov", local, server.nesterov(positive("server_lr", server_lr), beta))


def _with_duals(
    name: str,
    local: LocalOptions,
    rho: float,
    weights: Weights,
    start_from: duals.StartFrom,
    clients: int | None = None,
    joining: duals.Joining = "whole",
    server_lr: float = 1.0,
) -> Method:
    """Clients with duals, under the running mean over all that joined or the cohort's step (`duals`).

    Clients need to come back: with fewer than about three participations each, the duals have nothing to say.
    """
    if clients is not None and joining == "whole":
        if weights != "uniform":
            raise ConfigError(f"method.clients={clients} makes all of them members, each alike; set weights=uniform")
        joining = "first"
    if clients is not None and clients < 1:
        raise ConfigError(f"method.clients is {clients}; expected the number of all clients, or none")
    solver = duals.admm(local, positive("rho", rho), start_from, joining)
    if joining != "whole":
        rule = server.sgd(server_lr) if joining == "late" else duals.cohort_step(server_lr, clients)
        return Method(name, solver, weigh.uniform(), rule, local.batch_size, local.epochs)
    mediator = weigh.by_join_weight(uniform=weights == "uniform")
    return Method(name, solver, mediator, duals.running_mean(), local.batch_size, local.epochs)


@method(characters={"lr": 0.02, "rho": 0.0003})
def admm(
    *,
    rho: float = 0.0001,
    weights: Weights = "tokens",
    start_from: duals.StartFrom = "stored",
    clients: int | None = None,
    local: LocalOptions = LocalOptions(lr=0.01),
) -> Method:
    r"""ADMM: clients solve their augmented problem by local epochs; θ is the mean over all clients that ever joined.

    .. math::  w_k ≈ \arg\min_w f_k(w) + ⟨y_k, w − θ⟩ + \frac{ρ}{2}‖w − θ‖^2,\quad y_k ← y_k + ρ(w_k − θ),\quad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: the source gives every client a weight w_i and its own ρ_i. With ρ_i = α_i ρ and scaled duals the local
    steps are unweighted and the mean is weighted by α. The minimiser is inexact: E epochs. The first round is twice
    FedProx's step with μ = ρ. The source's mean is over all m clients, with x_i⁰ = θ⁰ for who was not called yet: that
    is `clients`. The default leaves those out until they join.

    With --dp every client is a member from the start and must be called in every round; it sends clipped increments,
    and the denominator is public (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ.
      weights: α_k: the client's tokens when it joined, or uniform; secure sums weigh all alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      clients: the number m of all clients, each a member from the start that stands for the first θ; none: who joined.
      {local}

    References:
      Zhou, Li, *Communication-Efficient ADMM-based Federated Learning*, 2021; next-character report, section 6.3,
      algorithm 2; Boyd et al. 2011.
    """
    return _with_duals("admm", local, rho, weights, start_from, clients)


@method(without=("lr", "momentum"), characters={"rho": 0.001, "r": 0.15})
def liadmm(
    *,
    rho: float = 0.0001,
    r: float = 0.25,
    weights: Weights = "tokens",
    start_from: duals.StartFrom = "stored",
    step: float | None = None,
    clients: int | None = None,
    local: LocalOptions = LocalOptions("sgd"),
) -> Method:
    r"""LIADMM: ADMM whose local problem is linearised, so that every local step has a closed form.

    .. math::  w_k ← w_k − \frac{ρ(w_k − θ) + ∇f_k(w_k) + y_k}{ρ + r},\qquad y_k ← y_k + ρ(w_k − θ),\qquad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: "a few such steps" is one for every local batch of E epochs, with that batch's gradient. The published
    method takes the gradient of the whole local loss (batch_size large enough gives that). The report's runs had Adam
    and a step size of 0.001: `optimiser=adam` with `step=0.001` takes Adam's steps by the same gradient, without r.

    With --dp every client is a member from the start and must be called in every round; it sends clipped increments,
    and the denominator is public (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ.
      r: r, the curvature assumed of f_k; the local step size is 1/(ρ + r).
      weights: α_k: the client's tokens when it joined, or uniform; secure sums weigh all alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      step: local step size in the place of 1/(ρ + r); none takes that.
      clients: the number m of all clients, each a member from the start that stands for the first θ; none: who joined.
      optimiser: sgd takes the closed form, adam its own steps by the same gradient, of size `step`.
      {local}

    References:
      Zhou, Li, *Communication-Efficient ADMM-based Federated Learning*, 2021; next-character report, section 6.3.
    """
    if step is None and local.optimiser == "adam":
        raise ConfigError("method.optimiser=adam needs a step size of its own; set method.step, the report has 0.001")
    closed = 1 / (positive("rho", rho) + positive("r", r, or_zero=True))
    lr = closed if step is None else positive("step", step)
    return _with_duals("liadmm", replace(local, lr=lr), rho, weights, start_from, clients)


@method(without=("optimiser",), characters={"lr": 6.0, "rho": 0.001})
def fedadmm(
    *,
    rho: float = 0.0001,
    weights: Weights = "tokens",
    start_from: duals.StartFrom = "stored",
    server_step: Literal["running", "published", "late"] = "running",
    server_lr: float = 1.0,
    clients: int | None = None,
    local: LocalOptions = LocalOptions("sgd", lr=4.0),
) -> Method:
    r"""FedADMM: ADMM by local SGD with as many epochs as a client can afford; increments of w + y/ρ are uploaded.

    .. math::  w_k ← w_k − η(∇f_k(w_k) + y_k + ρ(w_k − θ)),\quad y_k ← y_k + ρ(w_k − θ),\quad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: `server_step=published` is θ' = θ + (η_s/|S|) Σ_k Δ_k over the round's cohort S, Δ_k the increments, with
    w_k = θ⁰ and y_k = 0 before a client's first round. With η_s = |S|/m, which is `clients` = m, it is exact: θ is the
    mean of w_k + y_k/ρ over all clients. With η_s = 1 it is biased, or diverges, under partial participation even on
    quadratics. `late` lets a client that joins later start from the θ that it finds, which is biased for any η_s; it
    needs no first θ on a device. The default is the running mean, which is exact. Clients' own numbers of epochs E_k
    come from participation.least_epochs.

    With --dp `server_step=published` and `late` allow cohorts of some clients. With the running mean every client is a
    member from the start and must be called in every round (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ; the report's runs have 0.1, which hardly lets a language model move.
      weights: α_k: the client's tokens when it joined, or uniform (server_step=running only); secure sums weigh all
        alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      server_step: running (mean over all joined clients), published or late (uniform over the cohort).
      server_lr: η_s of server_step=published and late.
      clients: the number m of all clients, for η_s = |S|/m (server_step=published only); none takes server_lr.
      lr: local step size η.
      momentum: local momentum; starts at zero every round.
      {local}

    References:
      Gong, Li, Freris, *FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity*,
      2022 (arXiv 2204.03529), algorithm 1; next-character report, section 6.4.
    """
    positive("server_lr", server_lr)
    if server_lr != 1 and (server_step == "running" or clients is not None):
        raise ConfigError(
            f"method.server_lr={server_lr} is the step of server_step=published; the running mean and clients have none"
        )
    if clients is not None and server_step != "published":
        raise ConfigError(f"method.clients={clients} is of server_step=published; {server_step} does not read it")
    joins: dict[str, duals.Joining] = {"running": "whole", "published": "first", "late": "late"}
    return _with_duals("fedadmm", local, rho, weights, start_from, clients, joins[server_step], server_lr)


@method(without=("epochs",))
def central(*, local: LocalOptions = LocalOptions(lr=0.002, batch_size=20)) -> Method:
    r"""Central training: the same model on everybody's text in one place, with the token budget of the federation.

    Not a federated method but one to compare with: one client that holds the pooled text. A "round"
    reads as many tokens as a federated round's cohort would train on, going on where the last one stopped.

    Options:
      {local}
    """
    solver, rule = local_solver(local), server.sgd(1.0)
    return Method("central", solver, weigh.by_tokens(), rule, local.batch_size, epochs=1, cohort="pooled")


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return a method's options (its keyword arguments); an unknown name is an error that says the nearest."""
    if name not in METHODS:
        raise ConfigError(f'method "{name}" is not known{nearest(name, METHODS)}. Methods: {", ".join(METHODS)}.')
    return dict(METHODS[name].options)


def unread_options(name: str, kind: str) -> tuple[str, ...]:
    """Return the options of a method that nothing reads where another mediator or server rule (`kind`) is set."""
    known = METHODS.get(name)
    return () if known is None else known.mediator if kind == "mediator" else known.server


def tuned_options(
    name: str, options: Mapping[str, Any], *, characters: bool, table: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, Any]:
    """Return a method's options with the tuned defaults of a character model where the caller has set none.

    Defaults were found on validation text alone, one seed, over the grids in docs/LOG.md. Characters: Shakespeare's
    complete works (char-lstm, 10 IID clients, 40,000 characters a client and round, 5 rounds). Words, in the methods'
    signatures: PTB (GRU-300, 10 of 100 IID clients a round, 10 to 20 rounds). A step size tuned for Adam says nothing
    about SGD: with `optimiser=sgd` it is left alone.

    Args:
      table: tuned defaults by method; None for the methods' own (a study may pin older ones).

    Example:
      >>> tuned_options("fedprox", {"mu": 0.5}, characters=True)
      {'lr': 0.015, 'mu': 0.5}
      >>> tuned_options("fedprox", {"mu": 0.5}, characters=False)
      {'mu': 0.5}
    """
    own = METHODS[name].characters if name in METHODS else {}
    found = dict(own if table is None else table.get(name, {})) if characters else {}
    if options.get("optimiser", "adam") != "adam":
        found.pop("lr", None)
    return {**found, **options}


def build_method(spec: MethodSpec) -> Method:
    """Build a method from its specification; unknown options are errors that say the nearest."""
    options = method_options(spec.name)
    for key in spec.options:
        if key not in options:
            raise ConfigError(
                f'method.{key} is not an option of "{spec.name}"{nearest(key, options)}. Options: {", ".join(options)}.'
            )
    values = {name: spec.options.get(name, parameter.default) for name, parameter in options.items()}
    made = components.exchange(METHODS[spec.name](**values), spec.mediator, spec.server)
    if spec.schedule is not None:
        if made.solver.still:
            raise ConfigError(
                f"train.schedule is {spec.schedule.shape}: it changes the clients' step size, and {spec.name}'s "
                "clients take no step; leave it out, or take fedavg"
            )
        made = replace(made, solver=scheduled(made.solver, spec.schedule))
    if spec.average is not None:
        made = replace(made, server=components.averaged(made.server, spec.average))
    # Every option is in it, defaults too: clients and server compare and mask by the specification.
    mediator = components.resolved_part("mediator", spec.mediator)
    rule = components.resolved_part("server", spec.server)
    resolved = replace(spec, options=values, mediator=mediator, server=rule)
    return replace(made, spec=resolved, codec=codec(spec.keep, spec.quantise))
