r"""Canaries: random phrases planted in the text of some clients, and looked for in the model that was trained on it.

A canary is five words drawn uniformly from the vocabulary. Its first two are the prefix that an attacker knows. The
other three are ranked by their nats among random ones, and looked for among the five likeliest continuations (beam
search). The canaries form a grid: how many clients share one, and how often each repeats it. Phrases that were not
planted are the controls.

Exposure says how much likelier a secret r has become than random candidates R of its form, itself included:

.. math::  \mathrm{exposure}(r) = \log_2 |R| − \log_2 \mathrm{rank}(r)

log₂|R| bits means that it is the likeliest of all: an attacker who knows the form can read it out. A secret that was
never planted has a uniform rank, so P(E ≥ x) = 2^−x: its median is 1 bit and its mean 1/ln 2 = 1.44.

References:
  Ramaswamy et al., *Training Production Language Models without Memorizing User Data*, 2020.
  Thakkar, Ramaswamy, Mathews, Beaufays, *Understanding Unintended Memorization in Federated Learning*, 2020.
  Carlini, Liu, Erlingsson, Kos, Song, *The Secret Sharer*, USENIX Security 2019, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import Reader, reader_of
from keyfed.engine.problem import ClientStore, make_store
from keyfed.federated.cohort import derive_seed
from keyfed.run.folder import Trained
from keyfed.text.vocab import BOS, EOS
from keyfed.text.vocab import SPECIALS as SPECIAL_WORDS

Numbers = NDArray[np.float64]
Ids = NDArray[np.int32]
WORDS, PREFIX = 5, 2
USERS, COPIES = (1, 4, 16), (1, 14, 200)
BEAM = 5
SPECIALS = len(SPECIAL_WORDS)  # the first entries of every vocabulary: never in a canary
CHANCE_BITS = math.log2(20)  # an exposure that one in twenty secrets reaches without having been planted
LEAST_P = 0.01  # of the Kolmogorov–Smirnov test, below which controls do not behave as controls must


def rank_of(nats: float, others: Numbers) -> float:
    """Return the rank of a secret among random candidates, 1 for the likeliest; ties count half.

    Example:
      >>> rank_of(2.0, np.array([1.0, 3.0, 4.0])), rank_of(2.0, np.array([2.0, 2.0]))
      (2.0, 2.0)
    """
    return 1.0 + float((others < nats).sum()) + 0.5 * float((others == nats).sum())


def exposure(rank: float, candidates: int) -> float:
    """Return log₂|R| − log₂ rank, in bits.

    Example:
      >>> exposure(1, 1024), exposure(512, 1024)
      (10.0, 1.0)
    """
    if not 1 <= rank <= candidates:
        raise ValueError(f"a rank of {rank} among {candidates} candidates")
    return math.log2(candidates) - math.log2(rank)


def chance_under(bits: float, users: int, epsilon: float, delta: float) -> float:
    r"""Return the largest chance that (ε, δ) for one client leaves to an exposure of so many bits.

    Without the canary P(E ≥ x) = 2^−x; with it, planted by u clients, group privacy allows
    e^{uε} 2^−x + δ (e^{uε} − 1)/(e^ε − 1). A tiny value contradicts the guarantee.

    Example:
      >>> round(chance_under(10, 1, 1.0, 1e-6), 5), chance_under(10, 16, 8.0, 1e-6)
      (0.00266, 1.0)
    """
    if users * epsilon > 700:
        return 1.0
    group = math.exp(users * epsilon)
    added = delta * (users if epsilon == 0 else (group - 1) / math.expm1(epsilon))
    return float(min(1.0, group * 2.0**-bits + added))


class Controls(NamedTuple):
    """How secrets that were never planted fare.

    Attributes:
      p: of the Kolmogorov–Smirnov test against P(E ≥ x) = 2^−x.
      behave: whether p > LEAST_P; if not, exposures of this audit mean nothing.
    """

    number: int
    median: float
    mean: float
    p: float
    behave: bool


def judge_controls(exposures: Sequence[float]) -> Controls:
    """Test the exposures of secrets that were never planted."""
    bits = np.asarray(exposures, np.float64)
    p = uniform_p(2.0**-bits)
    return Controls(len(bits), float(np.median(bits)), float(bits.mean()), p, p > LEAST_P)


def uniform_p(values: Numbers) -> float:
    r"""Return the p-value of the Kolmogorov–Smirnov test that values are uniform on (0, 1].

    D is the largest distance between the distribution functions, and
    P(D ≥ d) ≈ 2 Σ_j (−1)^{j−1} exp(−2 j² λ²) with Stephens' λ = (√n + 0.12 + 0.11/√n) d.

    Example:
      >>> round(uniform_p(np.linspace(0.005, 0.995, 100)), 3), uniform_p(np.full(50, 0.01)) < 1e-9
      (1.0, True)
    """
    x, n = np.sort(values), len(values)
    if n == 0:
        return math.nan
    steps = np.arange(n + 1) / n
    d = float(max((steps[1:] - x).max(), (x - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if scaled < 0.2:  # the series needs many terms there, and its value is 1 to 1e-12
        return 1.0
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101))
    return float(min(1.0, max(0.0, sum(terms))))


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
    streams = [store.stream(client) for client in range(len(store))]
    for client, own in lines.items():
        streams[client] = _with_lines(streams[client], own, derive_seed(seed, "plant", client))
    return make_store(streams, store.names)


def _with_lines(stream: Ids, lines: Sequence[Ids], seed: int) -> Ids:
    """Insert lines at random between those of a stream."""
    rng = np.random.default_rng(seed)
    gaps = np.concatenate([[0], np.flatnonzero(stream == EOS) + 1])
    places = rng.choice(gaps, len(lines))
    order = rng.permutation(len(lines))
    where = np.repeat(places, [len(lines[i]) for i in order])
    return np.insert(stream, where, np.concatenate([lines[i] for i in order])).astype(np.int32)


class FoundCanary(NamedTuple):
    """What the model knows of one phrase: rank of its end among the candidates, exposure, whether the beam has it."""

    rank: float
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


def find(
    reader: Reader, phrases: NDArray[np.int64], candidates: NDArray[np.int64], device: str, *, reads_lines: bool,
    beam: bool = True,
) -> list[FoundCanary]:  # fmt: skip
    """Rank phrases [m, words] that share a prefix among random candidates [n, words] for their ends."""
    context = [BOS if reads_lines else EOS, *phrases[0, :PREFIX].tolist()]  # a line's beginning and the prefix
    ends = phrases[:, PREFIX:]
    nats = suffix_nats(reader, context, np.concatenate([ends, candidates]), device)
    others, count = nats[len(ends) :], len(candidates) + 1
    first = set(likeliest(reader, context, WORDS - PREFIX, BEAM, device)) if beam else None
    ranks = [rank_of(own, others) for own in nats[: len(ends)].tolist()]
    return [
        FoundCanary(rank, exposure(rank, count), None if first is None else tuple(end) in first)
        for rank, end in zip(ranks, ends.tolist(), strict=True)
    ]


def look_for_canaries(
    trained: Trained, canaries: Sequence[Canary], seed: int, *, candidates: int, controls: int, device: str = "cpu"
) -> dict[str, Any]:
    """Return the exposure of every planted canary, of the controls, and what the controls say about the test.

    Controls come in groups of twenty that share a prefix and its candidates: reading those is nearly all the work.
    """
    reader, vocab = reader_of(trained.spec, trained.params, device), len(trained.vocab)
    rows = []
    for number, canary in enumerate(canaries):
        # Candidates of its own: a few lucky ones must not stand before every canary.
        fresh = draw_phrases(vocab, candidates, seed, f"candidates of canary {number}")[:, PREFIX:]
        (found,) = find(reader, np.array([canary.words]), fresh, device, reads_lines=trained.reads_lines)
        row = {"users": len(canary.clients), "copies": canary.copies, "rank": found.rank, "exposure": found.bits}
        phrase = " ".join(trained.vocab.words[t] for t in canary.words)
        rows.append({**row, "in_beam": found.in_beam, "phrase": phrase})
    never: list[float] = []
    phrases = draw_phrases(vocab, controls, seed, "controls")
    for first in range(0, controls, 20):
        group = phrases[first : first + 20].copy()
        group[:, :PREFIX] = group[0, :PREFIX]
        fresh = draw_phrases(vocab, candidates, seed, f"candidates {first}")[:, PREFIX:]
        found_group = find(reader, group, fresh, device, reads_lines=trained.reads_lines, beam=False)
        never += [f.bits for f in found_group]
    return {
        "candidates": candidates + 1,
        "most_bits": exposure(1, candidates + 1),
        "chance_bits": CHANCE_BITS,
        "planted": rows,
        "controls": {**judge_controls(never)._asdict(), "exposures": never},
    }


def times_called(canaries: Sequence[Canary], contributors: Sequence[Sequence[int]]) -> list[int]:
    """Return how often clients with each canary contributed, all of them added, over the rounds' contributors."""
    rounds = [set(clients) for clients in contributors]
    return [sum(client in round for round in rounds for client in canary.clients) for canary in canaries]


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
            "calls": float(np.mean([r["calls"] for r in found])),
        }
        for (users, copies), found in cells.items()
    ]  # fmt: skip
