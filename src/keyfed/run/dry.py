"""`--dry-run`: what a run would do and what it would cost, before it does it."""

from __future__ import annotations

from typing import Any

from keyfed.config import Config, dump_toml, to_document
from keyfed.engine.network import init_params, parameter_count, shapes
from keyfed.federated.mediate import kept
from keyfed.run.console import human_bytes
from keyfed.run.prepare import prepare, round_tokens
from keyfed.run.traffic import model_bytes, report_bytes
from keyfed.run.train import members_of, plan

TORCH_ITSELF = 300_000_000  # resident memory of an idle training process


def describe_plan(config: Config) -> dict[str, Any]:
    """Return sizes, traffic and expected memory of a run, and the same as text."""
    prepared = prepare(config)
    method, choice = plan(config, prepared)
    members = members_of(method, prepared, config)
    size = model_bytes(init_params(prepared.spec, config.train.seed))
    tensors = 4 * parameter_count(prepared.spec)
    # θ, the sum and the best model in the parent; weights, gradient, one optimiser buffer and the slots per process.
    memory = (TORCH_ITSELF + 5 * tensors) + choice.workers * (
        (TORCH_ITSELF if choice.workers > 1 else 0) + 6 * tensors * choice.block
    )
    uploads = kept(method.uploading, members)
    if method.mediator.share is None:
        memory += members * tensors  # uploads wait until all reports are there
    report = report_bytes(list(shapes(prepared.spec)) if method.distance is not None else ())
    description: dict[str, Any] = {
        "config": to_document(config),
        "parameters": parameter_count(prepared.spec),
        "clients": len(prepared.store),
        "cohort": members,
        "tokens_per_round": round_tokens(prepared, members, method.epochs),
        "bytes_per_round": {
            "down": size * members,
            "up": size * uploads,
            "control": report * members,
        },
        "bytes_per_client": size,
        "client_state_bytes": 0,
        "expected_memory": memory,
        "choice": choice.reason,
    }
    lines = [
        dump_toml(to_document(config)),
        *prepared.describe(),
        f"model {prepared.spec.name}: {description['parameters']:,} parameters, "
        f"{human_bytes(size)} down and up a client",
        f"a round: {members} clients, about {description['tokens_per_round']:,} tokens, "
        f"{human_bytes(size * members)} down, {human_bytes(size * uploads)} up; no state kept on clients",
        f"memory: about {human_bytes(memory)}; {choice.reason}",
        "nothing was trained or written (--dry-run)",
    ]
    return {**description, "text": "\n".join(lines)}
