"""Canaries: random phrases planted in the text of some clients, and looked for in the model that was trained on it.

A canary is five words drawn uniformly from the vocabulary. Its first two are the prefix an attacker knows; the other
three are ranked by their nats behind it among random ones (`keyfed.lab.audit.exposure`), and looked for among the
five likeliest continuations (beam search). Every canary has a cell of a grid: how many clients share it, and how often
each repeats it. Phrases that nobody planted are the controls.

References:
  Ramaswamy et al., *Training Production Language Models without Memorizing User Data*, 2020.
  Thakkar, Ramaswamy, Mathews, Beaufays, *Understanding Unintended Memorization in Federated Learning*, 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import Reader, reader_of
from keyfed.engine.problem import ClientStore, make_store
from keyfed.federated.sampling import derive_seed
from keyfed.lab.audit.exposure import CHANCE_BITS, exposure, judge_controls, rank_of
from keyfed.run.folder import Trained
from keyfed.text.vocab import BOS, EOS, Vocab
from keyfed.text.vocab import SPECIALS as SPECIAL_WORDS

Ids = NDArray[np.int32]
WORDS, PREFIX = 5, 2
USERS, COPIES = (1, 4, 16), (1, 14, 200)
BEAM = 5
SPECIALS = len(SPECIAL_WORDS)  # the first entries of every vocabulary: never in a canary


@dataclass(frozen=True, slots=True)
class Canary:
    """A phrase, and who says it how often.

    Attributes:
      words: five tokens.
      clients: numbers of the clients whose text has it; empty for a control.
      copies: how often each of them says it.
    """

    words: tuple[int, ...]
    clients: tuple[int, ...] = ()
    copies: int = 0


def draw_phrases(vocab: int, count: int, seed: int, purpose: str) -> NDArray[np.int64]:
    """Draw phrases of words uniform over the vocabulary without its specials, [count, WORDS]."""
    rng = np.random.default_rng(derive_seed(seed, "canaries", purpose))
    return rng.integers(SPECIALS, vocab, (count, WORDS))


def draw_canaries(
    vocab: int,
    clients: int,
    seed: int,
    *,
    users: Sequence[int] = USERS,
    copies: Sequence[int] = COPIES,
    each: int = 1,
) -> list[Canary]:
    """Draw `each` canaries for every cell (users, copies); cells of more users than there are clients stay out."""
    cells = [(n_u, n_e) for n_u in users if n_u <= clients for n_e in copies for _ in range(each)]
    phrases = draw_phrases(vocab, len(cells), seed, "planted").tolist()
    rng = np.random.default_rng(derive_seed(seed, "canaries", "clients"))
    return [
        Canary(tuple(phrase), tuple(sorted(rng.choice(clients, n_u, replace=False).tolist())), n_e)
        for phrase, (n_u, n_e) in zip(phrases, cells, strict=True)
    ]


def plant(store: ClientStore, canaries: Sequence[Canary], seed: int) -> ClientStore:
    """Return the clients' text with the canaries in it, each copy a line of its own at a place drawn by the seed."""
    lines: dict[int, list[Ids]] = {}
    for canary in canaries:
        line = np.array([*canary.words, EOS], np.int32)
        for client in canary.clients:
            lines.setdefault(client, []).extend([line] * canary.copies)
    streams = []
    for client in range(len(store)):
        stream = store.stream(client)
        streams.append(_with_lines(stream, lines[client], derive_seed(seed, "plant", client)) if client in lines
                       else stream)  # fmt: skip
    return make_store(streams, store.names)


def _with_lines(stream: Ids, lines: Sequence[Ids], seed: int) -> Ids:
    """Insert lines at random between those of a stream."""
    rng = np.random.default_rng(seed)
    gaps = np.concatenate([[0], np.flatnonzero(stream == EOS) + 1])
    places = rng.choice(gaps, len(lines))
    order = rng.permutation(len(lines))
    where = np.repeat(places, [len(lines[i]) for i in order])
    return np.insert(stream, where, np.concatenate([lines[i] for i in order])).astype(np.int32)


# Looking for them


@dataclass(frozen=True, slots=True)
class Found:
    """What the model knows of one phrase: the rank of its end among `candidates`, the exposure, the beam's verdict."""

    rank: float
    candidates: int
    bits: float
    in_beam: bool | None


@torch.no_grad()
def suffix_nats(reader: Reader, context: Sequence[int], suffixes: NDArray[np.int64], device: str) -> NDArray[Any]:
    """Nats of each of many continuations [n, words] of one context, read from a zero state."""
    tokens = torch.from_numpy(suffixes).to(device)
    logits, state = reader.after(torch.tensor([list(context)], device=device), None)
    nats = torch.logsumexp(logits[0].double(), 0) - logits[0].double()[tokens[:, 0]]
    state = reader.keep(state, [0] * len(suffixes))
    for place in range(1, suffixes.shape[1]):
        read, state = reader.read(tokens[:, place - 1 : place], state)
        nats = nats + reader.score(read[:, 0], tokens[:, place]).nats[0]
    return nats.cpu().numpy()


@torch.no_grad()
def likeliest(reader: Reader, context: Sequence[int], words: int, width: int, device: str) -> list[tuple[int, ...]]:
    """Beam search: the likeliest continuations of so many words, specials left out, the likeliest first."""
    logits, state = reader.after(torch.tensor([list(context)], device=device), None)
    beams: list[tuple[int, ...]] = [()]
    nats = torch.zeros(1, dtype=torch.float64, device=device)
    for place in range(words):
        scores = torch.log_softmax(logits.double(), -1)
        scores[:, :SPECIALS] = -torch.inf
        reached = (nats[:, None] + scores).flatten()
        best = reached.topk(min(width, len(reached)))
        came, word = best.indices // scores.shape[1], best.indices % scores.shape[1]
        beams = [(*beams[b], w) for b, w in zip(came.tolist(), word.tolist(), strict=True)]
        nats = best.values
        if place + 1 < words:
            logits, state = reader.after(word[:, None], reader.keep(state, came.tolist()))
    return beams


def context_of(words: Sequence[int], reads_lines: bool) -> list[int]:
    """What the model has read before it is asked: a line's beginning and the canary's prefix."""
    return [BOS if reads_lines else EOS, *words[:PREFIX]]


def find(
    reader: Reader, phrases: Sequence[Sequence[int]], candidates: NDArray[np.int64], device: str, *,
    reads_lines: bool, beam: bool = True,
) -> list[Found]:  # fmt: skip
    """Rank phrases that share a prefix among random candidates [n, words] for their ends."""
    context = context_of(phrases[0], reads_lines)
    ends = np.array([phrase[PREFIX:] for phrase in phrases], np.int64)
    nats = suffix_nats(reader, context, np.concatenate([ends, candidates]), device)
    others, count = nats[len(ends) :], len(candidates) + 1
    first = set(likeliest(reader, context, WORDS - PREFIX, BEAM, device)) if beam else None
    found = []
    for own, end in zip(nats[: len(ends)].tolist(), ends.tolist(), strict=True):
        rank = rank_of(own, others)
        found.append(Found(rank, count, exposure(rank, count), None if first is None else tuple(end) in first))
    return found


def look_for_canaries(
    trained: Trained, canaries: Sequence[Canary], seed: int, *, candidates: int, controls: int, device: str = "cpu"
) -> dict[str, Any]:
    """Return the exposure of every planted canary, of the controls, and what the controls say about the test.

    Controls come in groups of twenty that share a prefix and its candidates: reading those is nearly all the work.
    """
    reader, vocab = reader_of(trained.spec, trained.params, device), len(trained.vocab)
    lines = trained.reads_lines
    rows = []
    for number, canary in enumerate(canaries):
        # Candidates of its own: a few lucky ones must not stand before every canary.
        fresh = draw_phrases(vocab, candidates, seed, f"candidates of canary {number}")[:, PREFIX:]
        (found,) = find(reader, [canary.words], fresh, device, reads_lines=lines)
        rows.append(
            {
                "users": len(canary.clients), "copies": canary.copies, "rank": found.rank, "exposure": found.bits,
                "in_beam": found.in_beam, "phrase": words_of(canary.words, trained.vocab),
            }
        )  # fmt: skip
    never: list[float] = []
    phrases = draw_phrases(vocab, controls, seed, "controls")
    for first in range(0, controls, 20):
        group = phrases[first : first + 20].copy()
        group[:, :PREFIX] = group[0, :PREFIX]
        fresh = draw_phrases(vocab, candidates, seed, f"candidates {first}")[:, PREFIX:]
        never += [f.bits for f in find(reader, group.tolist(), fresh, device, reads_lines=lines, beam=False)]
    return {
        "candidates": candidates + 1,
        "most_bits": exposure(1, candidates + 1),
        "chance_bits": CHANCE_BITS,
        "planted": rows,
        "cells": cells_of(rows),
        "controls": {**judge_controls(never)._asdict(), "exposures": never},
    }


def times_called(canaries: Sequence[Canary], turns: Sequence[Sequence[int]]) -> list[int]:
    """Return how often clients that say each canary took part, all of them added; `turns` has who came by round."""
    came = [set(turn) for turn in turns]
    return [sum(client in turn for turn in came for client in canary.clients) for canary in canaries]


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the grid: for each (users, copies) the median and largest exposure and how many the beam found."""
    cells: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["users"], row["copies"]), []).append(row)
    return [
        {
            "users": users, "copies": copies, "canaries": len(found),
            "median": float(np.median([r["exposure"] for r in found])),
            "largest": max(r["exposure"] for r in found),
            "in_beam": sum(bool(r["in_beam"]) for r in found),
            "calls": float(np.mean([r["calls"] for r in found])) if all("calls" in r for r in found) else None,
        }
        for (users, copies), found in cells.items()
    ]  # fmt: skip


def words_of(tokens: Sequence[int], vocab: Vocab) -> str:
    """Write a phrase."""
    return " ".join(vocab.words[t] for t in tokens)
