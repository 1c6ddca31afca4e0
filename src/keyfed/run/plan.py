"""What a run will do before it does it: method, device and workers, cohort, who takes part in each round.

A method of the caller's own cannot be written into run.toml: a run notes its name and asks for it again.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.load import Config, TrainConfig, method_spec
from keyfed.config.schema import AGAINST, LIMIT, SUM_LIMIT, TOKEN_LIMIT
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import Network, init_params, parameter_count
from keyfed.errors import ConfigError, DataError
from keyfed.federated.cohort import Plan, cohort_size, derive_seed, draw, moving_seconds, plan_round
from keyfed.federated.components import exchange, guarded
from keyfed.federated.descent import learning_rate, progress
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.soundness import UploadLimits, Watch, uniform_nats
from keyfed.federated.types import Method
from keyfed.federated.upload import codec
from keyfed.run.compatible import Case, refuse
from keyfed.run.console import plural
from keyfed.run.prepare import Prepared, round_tokens, usual_members
from keyfed.run.secure import alike_line, hidden, sizes_in
from keyfed.system import usable_cores

ROLLBACK = 3.0  # times the least validation perplexity of a federation
FEW_PARTICIPATIONS = 3  # a client, below which duals have hardly begun to work


def members_of(method: Method, prepared: Prepared, config: Config) -> int:
    """Number of uploads a round wants; a cohort larger than the population is said before training starts."""
    clients = len(prepared.store)
    if method.cohort == "pooled":
        return 1
    if method.cohort == "all":
        return clients
    wanted = cohort_size(config.participation, config.train.cohort, clients)
    if wanted > clients:
        shards = f"data.partition=iid and data.clients={wanted} (shards instead of people)"
        more = shards if prepared.population.partition == "natural" else "data.clients higher"
        raise DataError(
            f"{prepared.corpus.name} has {plural(clients, 'client')} with enough text, fewer than the cohort of "
            f"{wanted}; set train.cohort to at most {clients}, or {more}"
        )
    return wanted


def plan(config: Config, prepared: Prepared, own: Method | None = None) -> tuple[Method, Choice]:
    """Build the method, or take the caller's own, and choose where it runs; nonsense is refused with the reason."""
    method = build_method(method_spec(config)) if own is None else accept_method(own, config)
    members = members_of(method, prepared, config)
    names, corpus = prepared.store.names, prepared.corpus.name
    case = Case(config, method, members, len(prepared.store), names, corpus)
    refuse("plan", case)
    said = None if method.spec is None else method.spec.options.get("clients")
    if said not in (None, case.clients):
        raise ConfigError(f"method.clients is {said}, and {corpus} has {case.clients}; set it to {case.clients}")
    if method.cohort == "pooled":  # nothing is uploaded in one place
        spec = None if method.spec is None else replace(method.spec, keep=1.0, quantise="none")
        method = replace(method, codec=None, spec=spec)
    method = hidden(config, method, members)
    trained = usual_members(config, len(prepared.store)) if method.cohort == "pooled" else members
    if config.participation.deadline is not None and method.cohort != "pooled":
        sizes = sizes_in(config, method, init_params(prepared.spec, config.train.seed), members)
        refuse("deadline", replace(case, moving=moving_seconds(config.participation, sizes.down, sizes.up)))
    tokens = round_tokens(prepared, trained, method.epochs)
    step = method.batch_size * prepared.batching.window
    choice = choose(config.train, prepared.spec, tokens, members, step)
    return method, confine(choice, prepared.spec, _only_here(config.method) if own is None else own.name)


def _only_here(name: str) -> str | None:
    """Return a registered method's name if no worker process could import it: it was written in a notebook."""
    main = sys.modules.get("__main__")
    written = getattr(METHODS[name].build, "__module__", "")
    return name if written == "__main__" and not hasattr(main, "__file__") else None


def cautions(config: Config, method: Method, members: int, clients: int) -> list[str]:
    """Lines about what will work, but not as one may expect."""
    alike = alike_line(config, method)
    said = [] if alike is None else [alike]
    if config.secure.on:
        said.append(f"secure: uploads are masked, and only sums of at least {config.secure.floor} clients are opened")
    expected = Case(config, method, members, clients).participations
    if method.solver.start is None or expected >= FEW_PARTICIPATIONS or not config.train.rounds:
        return said
    return [
        *said,
        f"{method.name}: a client takes part about {expected:.1f} times in this run. Its dual is set in its first "
        f"round and corrected from the second on, so with fewer than {FEW_PARTICIPATIONS} participations θ will lie "
        "near twice FedProx's steps and may overshoot; take more rounds or a larger train.cohort",
    ]


def over_rounds(config: Config) -> list[str]:
    """Say what spans the rounds of a run: the schedule of the local step size, and the average that is served."""
    t, said = config.train, []
    if not t.rounds:
        said.append("0 rounds train nothing: the model that is tested is the start as it is; --rounds 20 trains it")
    if warm := int(t.warmup * t.rounds + 0.5):
        said.append(f"the local step size rises over the first {warm} of {t.rounds} rounds")
    if t.schedule != "constant":
        said.append(f"the local step size falls to {t.final:g} of its size by round {t.rounds} ({t.schedule})")
    if t.average:
        said.append(
            f"validated, tested and exported is the average of the model over about {1 / (1 - t.average):.0f} rounds "
            f"(train.average={t.average:g})"
        )
    return said


def extension_line(config: Config, method: Method, has: int, before: Method) -> str:
    """Say that a run of so many rounds is extended, and what becomes of its local step size.

    Args:
      method: the run's method over its new rounds; `before` that over the ones it had.
    """
    t = config.train
    said = f"the run of {plural(has, 'round')} is extended to {t.rounds}"
    first, last = _local_step(method, has), _local_step(method, t.rounds - 1)
    was = _local_step(before, max(0, has - 1))
    if first is None or last is None or was is None:
        return said
    if t.schedule == "constant" and first == last == was:
        return f"{said}; the local step size stays {last:.4g}"
    return (
        f"{said}; the local step size was {was:.4g} in round {has}, is {first:.4g} in round {has + 1} and goes to "
        f"{last:.4g} in round {t.rounds} (train.schedule={t.schedule}, over the new whole)"
    )


def _local_step(method: Method, round: int) -> float | None:
    """Return the local step size of a round (from 0); None for a method without one."""
    options = {} if method.spec is None else method.spec.options
    lr, decay = options.get("lr"), options.get("decay", 1.0)
    if method.solver.still or not isinstance(lr, int | float) or not isinstance(decay, int | float):
        return None
    schedule = None if method.spec is None else method.spec.schedule
    return learning_rate(lr, decay, round) * (1.0 if schedule is None else progress(schedule, round))


def with_limits(config: Config, begun: Config | None = None) -> Config:
    """Return the configuration of a federation with the limits and the roll-back that it gets by default.

    They are written into the run's folder: a simulation with the same numbers limits alike. A private run has its clip,
    and in secure sums clients clamp their own tokens.

    Args:
      begun: what the run began with, if it goes on; one that began without limits has none.
    """
    if config.privacy.on:
        return config
    given = config.upload
    norm, tokens, against = (SUM_LIMIT, 0.0, 0.0) if config.secure.on else (LIMIT, TOKEN_LIMIT, AGAINST)
    usual = replace(given, limit=norm, token_limit=tokens, against=against) if begun is None else begun.upload
    limit = usual.limit if given.limit is None else given.limit
    token_limit = usual.token_limit if given.token_limit is None else given.token_limit
    against_limit = usual.against if given.against is None else given.against
    back = (ROLLBACK if begun is None else begun.train.rollback) if config.train.rollback is None else None
    train = config.train if back is None else replace(config.train, rollback=back)
    upload = replace(given, limit=limit, token_limit=token_limit, against=against_limit)
    return replace(config, upload=upload, train=train)


def watch_of(config: Config, words: int) -> Watch | None:
    """Return how a run notices that it diverges; None for one that never goes back (train.rollback=0).

    A private run looks at nothing but its released θ: losses, refusals and validation are not noised.
    """
    if config.train.rollback == 0:
        return None
    return Watch() if config.privacy.on else Watch(uniform_nats(words), config.train.rollback)


def limits_of(config: Config) -> UploadLimits | None:
    """Return what one client of a run may do at most; None for a run without limits."""
    own = config.upload
    norm, tokens, against, trim = (n or None for n in (own.limit, own.token_limit, own.against, own.trim))
    if config.privacy.on or (norm is None and tokens is None and against is None and trim is None):
        return None
    return UploadLimits(norm, tokens, config.data.max_tokens, against, trim)


def plan_of_round(
    config: Config,
    method: Method,
    prepared: Prepared,
    round: int,
    tokens: NDArray[np.float64],
    down: int,
    up: int,
    turn: list[int] | None = None,
    attempt: int = 0,
) -> Plan:
    """Say who is called in a round and what becomes of them; a function of (seed, round, attempt).

    Args:
      tokens: tokens each client predicts in an epoch, in expectation (`client_tokens`).
      down: bytes of a download; `up` of an upload.
      turn: the clients whose turn it is, where they are not drawn; None where they are.
      attempt: how often this round was released already, in a private run (`PrivateRun.attempt`); it calls others.
    """
    store, p, seed = prepared.store, config.participation, config.train.seed
    if attempt:  # in the place of the round's number: a client's own speed and pace stay what they are
        round = derive_seed(round, "attempt", attempt)
    wanted = members_of(method, prepared, config)
    if turn is not None:
        called, wanted = turn, len(turn)
    elif method.cohort == "all":
        called = list(range(len(store)))
    else:
        called = draw(p, len(store), wanted, lambda k: int(store.bounds[k]), seed, round)
    return plan_round(
        p, called, wanted, epochs=method.epochs, tokens_of=lambda k: float(tokens[k]), name_of=store.names.__getitem__,
        down=down, up=up, seed=seed, round=round,
    )  # fmt: skip


def accept_method(method: Method, config: Config) -> Method:
    """Take in a method from outside; it is never built anew elsewhere, so it carries no specification."""
    if not isinstance(method, Method):
        raise ConfigError(f"method is a {type(method).__name__}; expected a keyfed.Method (or a name, in configure)")
    refuse("own code", Case(config, method))
    exchanged = exchange(method, config.mediator, config.server)
    smaller = codec(config.upload.keep, config.upload.quantise)
    return guarded(replace(exchanged, spec=None, codec=smaller or method.codec))


def names(network: Network, method: Method) -> dict[str, str]:
    """Name what is from outside, for run.toml."""
    out = {"module": network.name} if isinstance(network, ModuleNetwork) else {}
    return out | ({"method": method.name} if method.spec is None else {})


WORTH_A_WORKER = 2e12  # operations below which starting processes costs more than it saves (about 20 s of one core)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where and how clients train."""

    device: str
    block: int
    workers: int
    threads: int  # of each training process
    reason: str


def choose(train: TrainConfig, spec: Network, tokens_per_round: int, members: int, step_tokens: int = 350) -> Choice:
    """Pick device, block and workers where the configuration leaves them open.

    Args:
      tokens_per_round: tokens all clients of a round predict together.
      members: clients of a round.
      step_tokens: tokens of one client's step.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", train.device) is None:
        raise ConfigError(f'train.device is "{train.device}"; expected auto, cpu, cuda or cuda:NUMBER')
    has_gpu = torch.cuda.is_available()
    if train.device.startswith("cuda") and not has_gpu:
        raise ConfigError(f"train.device is {train.device}, but torch sees no GPU; use cpu or auto")
    device = train.device if train.device != "auto" else ("cuda" if has_gpu else "cpu")
    case = Case(Config(train=train), device=device, module=isinstance(spec, ModuleNetwork))
    refuse("device", case)
    if device != "cpu":
        return _on_gpu(train, spec, members, device, step_tokens)
    block = train.block or 1
    work = 6.0 * parameter_count(spec) * tokens_per_round * max(1, train.rounds)
    cores = usable_cores()
    if train.workers:
        workers = min(train.workers, members)  # one more than there are clients in a round would never work
        why = "as set" if workers == train.workers else f"{train.workers} were set, and a round has {members} clients"
    elif members == 1 or cores == 1:
        workers, why = 1, "one client at a time" if members == 1 else "one core"
    elif work < WORTH_A_WORKER:
        workers, why = 1, "too little work to pay for starting processes"
    else:
        workers, why = min(cores, members), f"one process of one thread per core, {cores} cores"
    refuse("device", replace(case, workers=workers))
    # A lone client may use every core; several are summed bitwise alike whatever the workers, one thread each.
    threads = cores if members == 1 else 1
    gpu = "no GPU" if not has_gpu else "as set"
    return Choice("cpu", block, workers, threads, f"cpu ({gpu}), block {block}, workers {workers}: {why}")


def _on_gpu(train: TrainConfig, spec: Network, members: int, device: str, step_tokens: int) -> Choice:
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device is {device}, but torch sees {torch.cuda.device_count()} GPU; they count from 0"
        )
    if ":" in device:
        torch.cuda.set_device(number)  # graphs and kernels run on the current one
    free, _ = torch.cuda.mem_get_info(device)
    # With duals and two moments, a client's weights are there about thirteen times; then a step's logits and gates.
    width = 0 if isinstance(spec, ModuleNetwork) else spec.vocab + 12 * spec.layers * (spec.hidden + spec.embed)
    per_client = 4 * 13 * parameter_count(spec) + 4 * step_tokens * width + 64 * 2**20
    fits = max(1, int(0.8 * free // per_client))
    block = train.block or min(members, fits)
    return Choice(
        device,
        block,
        1,
        usable_cores(),
        f"{device}, {train.precision}, block {block}: {plural(members, 'client')} a round, {fits} fit in memory",
    )


def confine(choice: Choice, spec: Network, own_method: str | None) -> Choice:
    """Keep what comes from outside the package where it can run: in one process, one client at a time; say why."""
    reasons = []
    if choice.workers > 1:
        name = f"the method {own_method} is not in the package" if own_method is not None else None
        alone = name or (spec.unshareable() if isinstance(spec, ModuleNetwork) else None)
        if alone is not None:
            choice = replace(choice, workers=1)
            reasons.append(f"one process: {alone}")
    if choice.block > 1 and isinstance(spec, ModuleNetwork):
        single = spec.unstackable(choice.device)
        if single is not None:
            choice = replace(choice, block=1)
            reasons.append(f"one client at a time: {single}")
    return replace(choice, reason="; ".join([choice.reason, *reasons]))
