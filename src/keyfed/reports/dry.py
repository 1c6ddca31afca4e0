"""`--dry-run`: what a run would start from, what it would do and what it would cost, before it does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, own_settings, to_document
from keyfed.config.schema import VectorsConfig
from keyfed.engine.network import init_params, parameter_count
from keyfed.engine.task import keeps_state
from keyfed.errors import ConfigError
from keyfed.federated.types import Method, Params
from keyfed.federated.weigh import kept
from keyfed.run.base import match_words
from keyfed.run.compatible import Case
from keyfed.run.console import human_bytes, plural
from keyfed.run.metrics_line import model_bytes
from keyfed.run.pilot import choose, dry_lines
from keyfed.run.plan import cautions, members_of, over_rounds, plan, plan_of_round
from keyfed.run.prepare import Prepared, client_tokens, frozen_line, refuse_frozen, round_tokens
from keyfed.run.privacy import announcement, make_private
from keyfed.run.recipe import Reading
from keyfed.run.secure import secure_line, sizes_in
from keyfed.run.start import LARGE, find_source, make_ready, refuse_overlap, same_shape, start_lines, width_for
from keyfed.text.vectors import recognise

TORCH_ITSELF = 300_000_000  # resident memory of an idle training process


def state_bytes(method: Method, params: Params) -> int:
    """Bytes a client keeps between rounds."""
    if not keeps_state(method):
        return 0
    if method.solver.start is not None:
        return model_bytes(method.solver.start(params))
    return model_bytes(params)  # what compression left out


def describe_plan(config: Config, *, offered: bool = False) -> dict[str, Any]:
    """Return sizes, traffic and expected memory of a run, and the same as text.

    Args:
      offered: the run asks for no start, and takes the base model where that fits.
    """
    settled = choose(config, carried=find_source(config) is not None, offered=offered)
    config, prepared, why_not, recipe = settled.config, settled.prepared, settled.why_not, dry_lines(settled)
    method, choice = plan(config, prepared)
    refuse_frozen(config, prepared.spec, method)
    start, started = preview_start(config, prepared)
    if why_not is not None and start["from"] == "random":
        start = {**start, "why": why_not}
        started = start_lines(start)
    frozen = frozen_line(config, prepared.spec)
    members = members_of(method, prepared, config)
    params = init_params(prepared.spec, config.train.seed)
    masked = secure_line(config, method, params, members)
    sizes = sizes_in(config, method, params, members)
    tensors = 4 * parameter_count(prepared.spec)
    # θ, the sum and the best model in the parent; weights, gradient, one optimiser buffer and the slots per process.
    memory = (TORCH_ITSELF + 5 * tensors) + choice.workers * (
        (TORCH_ITSELF if choice.workers > 1 else 0) + 6 * tensors * choice.block
    )
    private = make_private(config, method, len(prepared.store), members)
    zeros = method.report_free or private is not None  # a masked or noised vector may be all zeros, but is sent
    uploads = members if zeros else kept(method.uploading, members)
    if method.mediator.share is None:
        # Uploads wait until all reports are there; masked ones in the first round, for the first public numbers.
        memory += members * tensors
    kept_bytes = state_bytes(method, params)
    promised: list[str] = []
    if private is not None:
        terms = private[1]
        promised = announcement(terms, terms.count_noise, parameter_count(prepared.spec))
    modelled, called = 0.0, members
    if method.cohort != "pooled":
        first = plan_of_round(config, method, prepared, 0, client_tokens(prepared), sizes.down, sizes.up)
        modelled, called = first.seconds, len(first.fates)
    description: dict[str, Any] = {
        "config": to_document(config),
        "recipe": recipe or None,
        "start": start,
        "parameters": parameter_count(prepared.spec),
        "clients": len(prepared.store),
        "cohort": members,
        "tokens_per_round": round_tokens(prepared, members, method.epochs),
        "bytes_per_round": {
            "down": sizes.down * called,
            "up": sizes.up * uploads,
            "control": sizes.control * called,
        },
        "bytes_per_client": asdict(sizes),
        "client_state_bytes": kept_bytes,
        "participations": Case(config, method, members, len(prepared.store)).participations,
        "modelled_seconds": modelled,
        "expected_memory": memory,
        "choice": choice.reason,
        "privacy": promised or None,
    }
    lines = [
        *(
            f"{key} = {'none' if value is None else json.dumps(value, ensure_ascii=False)}"
            for key, value in own_settings(config)
        ),
        "every other setting has its default (docs/options.md); --json lists them all\n",
        *recipe,
        *prepared.describe(private=config.privacy.on),
        *started,
        *([frozen] if frozen else []),
        f"model {prepared.spec.name}: {description['parameters']:,} parameters, "
        f"{human_bytes(sizes.down)} down and {human_bytes(sizes.up)} up a client",
        f"a round: {plural(called, 'client')} called, about {plural(description['tokens_per_round'], 'token')}, "
        f"{human_bytes(sizes.down * called)} down, {human_bytes(sizes.up * uploads)} up, "
        f"about {modelled:.0f} s on the simulated network (how long it takes here is said when it trains); "
        + (
            f"{human_bytes(kept_bytes)} of state on every client, twice that while an upload is not acknowledged"
            if kept_bytes
            else "no state kept on clients"
        ),
        *([masked] if masked else []),
        *([] if settled.reading or private is not None else [_reading(config, prepared, members, method).line()]),
        *over_rounds(config),
        *cautions(config, method, members, len(prepared.store)),
        *promised,
        f"memory: about {human_bytes(memory)}; {choice.reason}",
        "nothing was trained or written (--dry-run)",
    ]
    return {**description, "text": "\n".join(lines)}


def _reading(config: Config, prepared: Prepared, members: int, method: Method) -> Reading:
    """Return how much of the text a run reads whose settings no recipe chose."""
    tokens = round(config.train.rounds * round_tokens(prepared, members, method.epochs))
    clients = len(prepared.store)
    share = None if method.cohort == "pooled" else 1 - (1 - members / clients) ** config.train.rounds
    return Reading(config.train.rounds, tokens, tokens / int(prepared.store.sizes().sum()), share)


def wide_enough(asked: VectorsConfig, prepared: Prepared) -> tuple[str, int, int]:
    """Return the format of the vectors, how many numbers a word has in the file and how many in the end.

    Raises:
      ConfigError: the file has too few, or the model takes no word vectors.
    """
    assert asked.file is not None
    wanted = width_for(asked, prepared)
    kind, width = recognise(Path(asked.file))[:2]
    if width < wanted:
        raise ConfigError(
            f"{asked.file}: {width} numbers a word, and the embedding of {prepared.spec.name} has {wanted}; take a "
            f"wider file, or set model.embed to at most {width}"
        )
    return kind, width, wanted


def refuse_start(config: Config, prepared: Prepared, seeds: Sequence[int]) -> None:
    """Refuse a start that does not fit, before anything is trained; the vectors themselves are not read yet.

    Raises:
      KeyfedError: no such run or file, another architecture, no common word, or clients that overlap under a seed.
    """
    source = find_source(config)
    if source is not None:
        same_shape(source, prepared)
        match_words(source.trained.vocab, prepared.vocab)
        for seed in seeds:
            refuse_overlap(source.trained, replace(config, train=replace(config.train, seed=seed)))
    if config.vectors.file is not None:
        wide_enough(config.vectors, prepared)


def preview_start(config: Config, prepared: Prepared) -> tuple[dict[str, Any], list[str]]:
    """Return what a run would start from, and the same in words; a large file of vectors is not read to its end.

    Raises:
      KeyfedError: what training would refuse, as far as it is seen without reading a large file.
    """
    source, asked = find_source(config), config.vectors
    if asked.file is None:
        _, about = make_ready(config, prepared, source, lambda line: None)
        return about, start_lines(about)
    kind, width, wanted = wide_enough(asked, prepared)
    path = Path(asked.file)
    if path.is_file() and path.stat().st_size < LARGE:
        _, about = make_ready(config, prepared, source, lambda line: None)
        return about, start_lines(about)
    _, about = make_ready(replace(config, vectors=VectorsConfig()), prepared, source, lambda line: None)
    reduced = asked.reduce if width > wanted or asked.reduce == "pp-pca-pp" else None
    seen = {"file": asked.file, "format": kind, "width": width, "dim": wanted, "reduced": reduced}
    how = f"{width} → {wanted} numbers by {reduced}" if reduced else f"{width} numbers each"
    line = (
        f"word vectors {path.name} ({kind}): {how}; which words it has is seen when it is read, before the first round"
    )
    return {**about, "vectors": seen}, [*start_lines(about), line]
