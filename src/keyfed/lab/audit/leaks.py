"""What one transmitted update tells about the words of the client that sent it, in each form it may travel in.

    raw      the client's own upload, as a plain server receives it
    sum      the sum of ten clients' uploads, which hides one among ten
    masked   what a server of secure aggregation receives of one client: uniform ring elements
    noised   the sum of ten clipped uploads with Gaussian noise

The attack has a few lines and needs no optimisation:

- **Input rows.** Without tied weights the embedding's row of a word changes only if the client read that word: the
  rows that changed are its words.
- **Output bias.** With tied weights every row changes, but ∂loss/∂b = softmax − counts: the bias of a word rises only
  if the client wrote it. The sign gives the words, and sorting by it the likeliest first.

On what a secure sum shows of a client (uniform integers), and on a sum with noise, the same attack must do no better
than drawing words by chance.

References:
  Melis, Song, De Cristofaro, Shmatikov, *Exploiting Unintended Feature Leakage in Collaborative Learning*, S&P 2019.
  Suliman, Leith, *Two Models are Better than One: Federated Learning Is Not Private For Google GBoard*, 2022.
"""

from __future__ import annotations

import math
from os import urandom
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.problem import Problem
from keyfed.engine.task import Turn, take_turns
from keyfed.federated.cohort import derive_seed
from keyfed.federated.types import Method, Params
from keyfed.lab.audit.canaries import SPECIALS
from keyfed.model.language_model import ModelSpec
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors, usual_threshold

Words = NDArray[np.int64]
RECOVERED = 0.9  # share of a client's words above which an update gives it away
SIGNS = 4.0  # standard errors above chance from which on an attack is better than chance


class Leak(NamedTuple):
    """What an attack on one view of an update found.

    Attributes:
      recovered: share of the client's words among the |words| best guesses; precision and recall are the same there.
      chance: what guessing at random recovers.
      precision, recall: of the plain rule (rows that changed; a positive sign), which needs no knowledge of |words|.
      frequent: share of the client's 100 most frequent words (or all, if fewer) among as many first guesses.
      better_than_chance: recovered exceeds chance by four standard errors.
    """

    recovered: float
    chance: float
    precision: float
    recall: float
    frequent: float
    better_than_chance: bool


def scores_of_rows(change: Tensor) -> Tensor:
    """Score words by how far their input rows moved."""
    return change.double().square().sum(1).sqrt()


def scores_of_bias(change: Tensor) -> Tensor:
    """Score words by how much their output bias rose."""
    return change.double()


def judge_guesses(scores: Tensor, counts: NDArray[np.int64], first: int) -> Leak:
    """Compare an attack's scores with the words a client has.

    Args:
      scores: one a word of the vocabulary, larger where the attacker believes that the client has it.
      counts: how often the client has each word.
      first: entries before this one are no words (specials) and are never guessed.
    """
    guessed = torch.argsort(scores[first:], descending=True).numpy() + first
    words = np.flatnonzero(counts[first:]) + first
    have = np.zeros(len(counts), np.bool_)
    have[words] = True
    if not len(words):
        raise ValueError("the client has no words")
    k, vocabulary = len(words), len(counts) - first
    recovered = float(have[guessed[:k]].mean())
    chance = k / vocabulary
    positive = (scores > 0).numpy().copy()
    positive[:first] = False
    hits = int(have[positive].sum())
    top = min(100, k)
    frequent = set((np.argsort(-counts[first:], kind="stable")[:top] + first).tolist())
    # Hypergeometric: k guesses without replacement among `vocabulary` words of which k are right.
    error = math.sqrt(chance * (1 - chance) / k * (vocabulary - k) / max(1, vocabulary - 1))
    return Leak(
        recovered,
        chance,
        hits / max(1, int(positive.sum())),
        hits / k,
        len(frequent & set(guessed[:top].tolist())) / top,
        recovered > chance + SIGNS * error,
    )


def masked_view(words: NDArray[np.uint32]) -> Tensor:
    """Read ring elements as the signed numbers an attacker would take them for, centred at 0."""
    return torch.from_numpy(words.view(np.int32).astype(np.float64))


TOGETHER = 10  # clients of the sum
SCALE = 2.0**16  # fixed point of a masked upload: the same for every value, so it changes no ranking


def measure_leaks(
    problem: Problem,
    method: Method,
    theta: Params,
    seed: int,
    *,
    clip: float | None = None,
    noise: float | None = None,
) -> dict[str, Any]:
    """Let clients train from θ once, look at what one of them sends in each form, and guess its words.

    Args:
      clip: S that uploads are clipped to in the noised form; None takes the median norm of the ten (a demonstration).
      noise: standard deviation of the noise on the sum; None takes S, which is a noise multiplier of 1.
    """
    spec = problem.spec
    assert isinstance(spec, ModelSpec)  # a user's module is refused before
    sizes = problem.store.sizes()
    victim = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])  # of the median size: neither a gift nor a riddle
    rng = np.random.default_rng(derive_seed(seed, "audit", "leaks"))
    company = [k for k in rng.permutation(len(sizes)).tolist() if k != victim][: TOGETHER - 1]
    uploads = [_upload(problem, method, theta, k) for k in (victim, *company)]
    norms = [_norm(u) for u in uploads]
    bound = float(np.median(norms)) if clip is None else clip
    spread = bound if noise is None else noise
    clipped = [{n: u * min(1.0, bound / norm if norm > 0 else 1.0) for n, u in upload.items()}
               for upload, norm in zip(uploads, norms, strict=True)]  # fmt: skip
    drawn = torch.Generator().manual_seed(derive_seed(seed, "audit", "noise"))
    layer = "output.bias" if spec.tied else "embedding.weight"
    noised = _sum(clipped, layer)
    noised = noised + torch.empty(noised.shape, dtype=noised.dtype).normal_(0, spread, generator=drawn)
    views = {
        "raw": uploads[0][layer],
        "sum": _sum(uploads, layer),
        "masked": masked(uploads[0][layer]),
        "noised": noised,
    }
    counts = words_read(problem, method, victim, spec)
    score = scores_of_bias if spec.tied else scores_of_rows
    return {
        "attack": "sign and order of the output bias" if spec.tied else "rows of the input layer that changed",
        "client_words": int((counts[SPECIALS:] > 0).sum()),
        "vocabulary": spec.vocab - SPECIALS,
        "clients_in_sum": len(uploads),
        "norm": norms[0],
        "clip": bound,
        "noise": spread,
        "demonstration": clip is None or noise is None,
        "views": {name: judge_guesses(score(view), counts, SPECIALS)._asdict() for name, view in views.items()},
    }


def _upload(problem: Problem, method: Method, theta: Params, client: int) -> Params:
    (done,) = take_turns(problem, theta, [Turn(client)], method, 0)
    moved = ({n: u - theta[n] for n, u in done.upload.items()} if done.joining else done.upload)  # fmt: skip
    return {name: u.detach().double().cpu() for name, u in moved.items()}


def _norm(upload: Params) -> float:
    return math.sqrt(sum(float(u.square().sum()) for u in upload.values()))


def _sum(uploads: list[Params], layer: str) -> Tensor:
    return torch.stack([u[layer] for u in uploads]).sum(0)


def masked(change: Tensor, members: int = TOGETHER) -> Tensor:
    """Write a tensor in fixed point, let a member of a real secure sum mask it, and read what it sends as numbers.

    Keys are made and signed, shares dealt and forwarded as in every secure round (`keyfed.private.secagg`);
    only the others' vectors are left out, which nobody needs for what this one sends.
    """
    words = change.mul(SCALE).round().long().flatten().numpy().astype(np.uint32)
    identities = {f"client {k}": Identity.make(urandom) for k in range(members)}
    made = {name: make_keys(identity, name, 0, urandom) for name, identity in identities.items()}
    cohort = tuple(signed for _, signed in made.values())
    terms = SumTerms(b"audit", cohort, usual_threshold(members), len(words))
    public = {name: identity.public for name, identity in identities.items()}
    collector = Collector(terms)
    everybody = {name: Member(name, own, terms, public, Floors(), urandom) for name, (own, _) in made.items()}
    for name, member in everybody.items():
        collector.take_shares(name, member.shares())
    alive, parcels = collector.forward()
    victim = next(iter(everybody))
    sent = everybody[victim].masked(words, alive, parcels[victim])
    return masked_view(sent[: len(words)]).view(change.shape)


def words_read(problem: Problem, method: Method, client: int, spec: ModelSpec) -> NDArray[np.int64]:
    """Count what a client's first round gives away: words it predicts (tied weights), or words it reads."""
    counts = np.zeros(spec.vocab, np.int64)
    for step in problem.objective([client], 0, method.batch_size).epoch(0)[0]:
        tokens = (step.targets if spec.tied else step.inputs)[step.mask > 0]
        counts += np.bincount(tokens, minlength=len(counts))
    return counts
