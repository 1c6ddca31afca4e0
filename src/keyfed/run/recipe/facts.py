"""The facts that the recipe chooses from: what a corpus is like, read so that little text is not lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from keyfed.config.load import Config, Value
from keyfed.engine.module import MakeModule
from keyfed.errors import TooLittleText
from keyfed.model.language_model import preset
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.recipe.settings import Facts, Setting, are_messages
from keyfed.text.catalogue import NAMED, is_path, load_corpus
from keyfed.text.partition import DEFAULT_CLIENTS
from keyfed.text.vocab import EOS

SHARD_TOKENS, LINES_OF_SHARD = 2_000, 3  # of a shard, at least, where one small file is cut
SAMPLE, SAMPLE_TOKENS = 1_000, 10_000  # clients, and tokens of each, whose lines are looked at
QUANTILES = 200  # of clients' sizes, where there are more clients
LEAST_WINDOWS = (16, 8)  # tokens of a window where clients have less than the model's own
FEW_CLIENTS = 10  # who should not be lost for having less than a window


def read_corpus_for(
    config: Config, given: Mapping[str, Value], module: MakeModule | None
) -> tuple[Config, Prepared, list[Setting]]:
    """Read a corpus so that little text is not lost: a small file in fewer shards, short notes in smaller windows."""
    said = []
    by_text = "data.clients" not in given and not config.privacy.on  # of a private run's text nothing is read off
    if by_text and (shards := few_shards(config)) is not None:
        config = replace(config, data=replace(config.data, clients=shards))
        said.append(Setting("data.clients", shards, f"the file is small: shards of about {SHARD_TOKENS:,} words"))
    windows = () if "data.window" in given or config.privacy.on else LEAST_WINDOWS
    for at, window in enumerate((config.data.window, *windows)):
        tried = replace(config, data=replace(config.data, window=window))
        try:
            prepared = prepare(tried, module)
        except TooLittleText:
            if at == len(windows):
                raise
            continue
        if at == len(windows) or not prepared.excluded or len(prepared.store) >= FEW_CLIENTS:
            break
    if at:
        said.append(Setting("data.window", window, "clients have little text, and none is lost for being short"))
    return tried, prepared, said


def few_shards(config: Config) -> int | None:
    """Return into how many shards a small text file without authors is cut; None where the usual number will do."""
    path = Path(config.data.name)
    if not is_path(config.data.name) or config.data.partition not in (None, "iid") or not path.is_file():
        return None
    if path.stat().st_size > DEFAULT_CLIENTS["iid"] * SHARD_TOKENS * 4:
        return None
    corpus = load_corpus(config.data.name, author_column=config.data.author_column, text_column=config.data.text_column)
    if corpus.natural:
        return None
    lines = [line for author in corpus.authors for line in author.lines]
    words = sum(len(line.split()) + 1 for line in lines)
    most = min(DEFAULT_CLIENTS["iid"], words // SHARD_TOKENS, len(lines) // LINES_OF_SHARD)
    return max(1, most) if most < DEFAULT_CLIENTS["iid"] else None


def facts_of(
    config: Config, prepared: Prepared, *, carried: bool, own_model: bool = False, budget: int | None = None
) -> Facts:
    """Read the facts of a corpus; of a private run's text nothing but how many clients there are."""
    store, t = prepared.store, config.train
    common = Facts(
        clients=len(store), characters=preset(config.model.name).characters, carried=carried, own_model=own_model,
        private=config.privacy.on, gpu=t.device != "cpu" and torch.cuda.is_available(), budget=budget,
    )  # fmt: skip
    if config.privacy.on:
        return common
    sizes = np.sort(store.sizes())
    if len(sizes) > QUANTILES:  # the middle of each of equal parts; the largest is the largest
        at = ((np.arange(QUANTILES) + 0.5) / QUANTILES * len(sizes)).astype(int)
        sizes = np.append(sizes[at[:-1]], sizes[-1])
    held = sum(map(len, prepared.valid.values()))
    return replace(
        common,
        sizes=tuple(sizes.tolist()),
        tokens=int(store.sizes().sum()),
        messages=known_messages(config) if config.data.name in NAMED else _looks_like_messages(prepared),
        valid_tokens=min(held, t.valid_tokens or held),
    )


def known_messages(config: Config) -> bool:
    known = NAMED.get(config.data.name)
    return known is not None and known.messages


def _looks_like_messages(prepared: Prepared) -> bool:
    """Look at the lengths of lines in a sample of the clients."""
    store = prepared.store
    lengths = []
    for k in range(0, len(store), max(1, len(store) // SAMPLE)):
        ids = store.flat[int(store.bounds[k]) : int(store.bounds[k + 1])].numpy()[:SAMPLE_TOKENS]
        lengths.append(np.diff(np.flatnonzero(ids == EOS), prepend=-1))
    found = np.concatenate(lengths)
    return len(found) > 1 and are_messages(float(found.mean()), float(found.std() / found.mean()))
