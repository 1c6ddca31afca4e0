"""Automatic choices: device, block and workers, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from keyfed.config.load import TrainConfig
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import Network, parameter_count
from keyfed.errors import ConfigError
from keyfed.run.console import plural
from keyfed.system import usable_cores

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
    if device != "cpu":
        return _on_gpu(train, spec, members, device, step_tokens)
    if train.precision != "fp32":
        raise ConfigError(f"train.precision is {train.precision}, which is for GPUs; a CPU computes in fp32")
    block = train.block or 1
    work = 6.0 * parameter_count(spec) * tokens_per_round * max(1, train.rounds)
    cores = usable_cores()
    if train.workers:
        workers, why = train.workers, "as set"
    elif members == 1 or cores == 1:
        workers, why = 1, "one client at a time" if members == 1 else "one core"
    elif work < WORTH_A_WORKER:
        workers, why = 1, "too little work to pay for starting processes"
    else:
        workers, why = min(cores, members), f"one process of one thread per core, {cores} cores"
    if block > 1 and workers > 1:
        raise ConfigError(f"train.block={block} stacks clients in one process; set train.workers=1 with it")
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
    if train.precision != "fp32" and isinstance(spec, ModuleNetwork):
        raise ConfigError(f"train.precision={train.precision} is for our own models; a module chooses its types itself")
    if train.workers and train.workers > 1:
        raise ConfigError("train.workers is for CPUs; on a GPU clients are stacked (train.block)")
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
