"""What a trained model says about its training text, and what one transmitted update says about its client's words.

**Membership inference.** Was this piece of text in the training data, and was this client? Members are pieces of
training text, or training clients. The others are pieces of held-out text, or clients that were held out whole. The
score is the final model's loss, or how much the loss fell between the oldest and the newest checkpoint that are left.
AUC is the probability that a member scores above a non-member, ½ for a coin. The true positive rate at 1 % false
positives says whether an attacker is ever sure, which AUC hides.

**Words from an update**, in each form it may travel in:

    raw      the client's own upload, as a plain server receives it
    sum      the sum of ten clients' uploads, which hides one among ten
    masked   what a server of secure aggregation receives of one client: uniform ring elements
    noised   the sum of ten clipped uploads with Gaussian noise

The attack has a few lines and needs no optimisation. Without tied weights the embedding's row of a word changes only if
the client read that word: the rows that changed are its words. With tied weights every row changes, but
∂loss/∂b = softmax − counts: the output bias of a word rises only if the client wrote it. The sign gives the words, and
sorting by it the likeliest first. On a masked upload and on a noised sum the attack must do no better than chance.

References:
  Carlini et al., *Membership Inference Attacks From First Principles*, S&P 2022 (why the low false positive rate).
  Zanella-Béguelin et al., *Analyzing Information Leakage of Updates to Natural Language Models*, CCS 2020 (snapshots).
  Melis, Song, De Cristofaro, Shmatikov, *Exploiting Unintended Feature Leakage in Collaborative Learning*, S&P 2019.
  Suliman, Leith, *Two Models are Better than One: Federated Learning Is Not Private For Google GBoard*, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import urandom
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.engine.problem import Problem
from keyfed.engine.task import ClientTask, run_tasks
from keyfed.errors import RunError
from keyfed.federated.cohort import derive_seed
from keyfed.federated.types import Method, Params
from keyfed.files import BROKEN
from keyfed.lab.audit.canaries import SPECIALS
from keyfed.model.language_model import ModelSpec
from keyfed.private.dp.noise import norm_of
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors, usual_threshold
from keyfed.run.checkpoint import read_checkpoint, rounds_in
from keyfed.run.evaluate import scorer_of
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared

Numbers = NDArray[np.float64]
Ids = NDArray[np.int32]
FALSE_POSITIVES = 0.01
RESAMPLES = 200
PIECE, FEWEST_TOKENS = 100, 20  # tokens of a piece of text; shorter ones than the second say nothing
OF_A_CLIENT = 2_000  # tokens from which a client is judged
FEWEST = 5  # clients or pieces on either side, below which there is no attack to speak of
RECOVERED = 0.9  # share of a client's words above which an update gives it away
SIGNS = 4.0  # standard errors above chance from which on an attack is better than chance
TOGETHER = 10  # clients of the sum
SCALE = 2.0**16  # fixed point of a masked upload: the same for every value, so it changes no ranking


# Membership


class Attack(NamedTuple):
    """How well a score tells members from others, each figure with its 95 % bootstrap interval."""

    members: int
    others: int
    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]


def auc(members: Numbers, others: Numbers) -> float:
    """Return P(member's score > other's), ties half (Mann–Whitney).

    Example:
      >>> auc(np.array([3.0, 4.0]), np.array([1.0, 2.0])), auc(np.array([1.0, 1.0]), np.array([1.0]))
      (1.0, 0.5)
    """
    ranked = np.sort(others)
    below = np.searchsorted(ranked, members, side="left")
    within = np.searchsorted(ranked, members, side="right")
    return float((below + within).mean() / (2 * len(others)))


def true_positives(members: Numbers, others: Numbers) -> float:
    """Return the share of members above a threshold that at most 1 % of the others exceed.

    Example:
      >>> true_positives(np.array([0.5, 2.0]), np.linspace(0, 1, 100))
      0.5
    """
    allowed = int(FALSE_POSITIVES * len(others) + 1e-9)
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


def attack(members: Numbers, others: Numbers, seed: int) -> Attack:
    """Judge a score, larger for members, with bootstrap intervals."""
    if len(members) < 2 or len(others) < 2:
        raise ValueError(f"{len(members)} members and {len(others)} others; at least 2 of each")
    rng = np.random.default_rng(seed)
    drawn = [(rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(RESAMPLES)]

    def interval(values: list[float]) -> tuple[float, float]:
        low, high = np.quantile(values, [0.025, 0.975])
        return float(low), float(high)

    aucs, rates = [auc(m, o) for m, o in drawn], [true_positives(m, o) for m, o in drawn]
    return Attack(
        len(members), len(others), auc(members, others), interval(aucs), true_positives(members, others),
        interval(rates),
    )  # fmt: skip


def infer_membership(trained: Trained, prepared: Prepared, seed: int, *, most: int, device: str) -> dict[str, Any]:
    """Return the attacks that this run allows: AUC and true positive rate at 1 % false positives, with intervals."""
    store, score = prepared.store, scorer_of(trained.config.data.batching)
    rng = np.random.default_rng(derive_seed(seed, "audit", "members"))
    chosen = np.sort(rng.permutation(len(store))[:most]).tolist()
    streams = [store.stream(k) for k in chosen]
    members = {"text": draw_pieces(streams, most, rng), "clients": [s[:OF_A_CLIENT] for s in streams]}
    others = {
        "text": draw_pieces(list(prepared.test.values()), most, rng),
        "clients": [s[:OF_A_CLIENT] for s in prepared.unseen.values() if len(s) >= FEWEST_TOKENS][:most],
    }
    models = [trained.params, *snapshots(trained.folder / "checkpoint")]
    found: dict[str, Any] = {}
    for what, inside in members.items():
        if min(len(inside), len(others[what])) < FEWEST:
            continue
        named = {str(n): piece for n, piece in enumerate([*inside, *others[what]])}
        # Mean nats of each piece, read from a zero state as the model's test text is; members first.
        losses = [
            np.array([s.mean_nats for s in score(trained.spec, params, named, device).values()]) for params in models
        ]
        scores = {"loss": -losses[0]} | ({"fall of the loss": losses[1] - losses[2]} if len(models) == 3 else {})
        for how, values in scores.items():
            found[f"{what}, {how}"] = attack(values[: len(inside)], values[len(inside) :], seed)._asdict()
    return found


def draw_pieces(streams: Sequence[Ids], most: int, rng: np.random.Generator) -> list[Ids]:
    """Cut streams into pieces and draw at most so many."""
    pieces = [s[at : at + PIECE] for s in streams for at in range(0, len(s), PIECE)]
    pieces = [piece for piece in pieces if len(piece) >= FEWEST_TOKENS]
    chosen = np.sort(rng.permutation(len(pieces))[:most])
    return [pieces[k] for k in chosen.tolist()]


def snapshots(folder: Path) -> list[Params]:
    """Return the models of the oldest and the newest checkpoint that are left; none where there are not two."""
    numbers, found = sorted(rounds_in(folder)), []
    for number in (numbers[0], numbers[-1]) if len(numbers) > 1 else ():
        try:
            found.append(read_checkpoint(folder, number).state.params)
        except (OSError, *BROKEN, RunError) as e:
            file = folder / f"round-{number:06d}.safetensors"
            raise RunError(f"{file} is damaged ({e}); the audit needs whole checkpoints, or none") from None
    return found


# Words from an update


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


def score_words(change: Tensor) -> Tensor:
    """Score words by how far their input rows moved, [words, width], or by how much their output bias rose, [words]."""
    return change.double() if change.ndim == 1 else change.double().square().sum(1).sqrt()


def judge_guesses(scores: Tensor, counts: NDArray[np.int64], first: int) -> Leak:
    """Compare an attack's scores with the words a client has.

    Args:
      scores: one a word of the vocabulary, larger where the attacker believes that the client has it.
      counts: how often the client has each word.
      first: entries before this one are no words (specials) and are never guessed.
    """
    guessed = torch.argsort(scores[first:], descending=True).numpy() + first
    have = counts > 0
    have[:first] = False
    k, vocabulary = int(have.sum()), len(counts) - first
    if not k:
        raise ValueError("the client has no words")
    recovered, chance = float(have[guessed[:k]].mean()), k / vocabulary
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
    victim = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])  # of the median size: neither easy nor hard
    rng = np.random.default_rng(derive_seed(seed, "audit", "leaks"))
    company = [k for k in rng.permutation(len(sizes)).tolist() if k != victim][: TOGETHER - 1]
    uploads = [_upload(problem, method, theta, k) for k in (victim, *company)]
    norms = [norm_of(upload.values()) for upload in uploads]
    bound = float(np.median(norms)) if clip is None else clip
    spread = bound if noise is None else noise
    layer = "output.bias" if spec.tied else "embedding.weight"
    sent = torch.stack([upload[layer] for upload in uploads])
    factors = torch.tensor([min(1.0, bound / norm if norm > 0 else 1.0) for norm in norms], dtype=torch.float64)
    noised = torch.tensordot(factors, sent, 1)
    drawn = torch.Generator().manual_seed(derive_seed(seed, "audit", "noise"))
    noised += torch.empty_like(noised).normal_(0, spread, generator=drawn)
    views = {"raw": sent[0], "sum": sent.sum(0), "masked": masked(sent[0]), "noised": noised}
    counts = words_read(problem, method, victim, spec)
    return {
        "attack": "sign and order of the output bias" if spec.tied else "rows of the input layer that changed",
        "client_words": int((counts[SPECIALS:] > 0).sum()),
        "vocabulary": spec.vocab - SPECIALS,
        "clients_in_sum": len(uploads),
        "norm": norms[0],
        "clip": bound,
        "noise": spread,
        "demonstration": clip is None or noise is None,
        "views": {name: judge_guesses(score_words(view), counts, SPECIALS)._asdict() for name, view in views.items()},
    }


def _upload(problem: Problem, method: Method, theta: Params, client: int) -> Params:
    (done,) = run_tasks(problem, theta, [ClientTask(client)], method, 0)
    moved = {n: u - theta[n] for n, u in done.upload.items()} if done.joining else done.upload
    return {name: u.detach().double().cpu() for name, u in moved.items()}


def masked(change: Tensor, members: int = TOGETHER) -> Tensor:
    """Write a tensor in fixed point, let a member of a real secure sum mask it, and read what it sends as numbers.

    Keys are made and signed, shares made and forwarded as in every secure round (`keyfed.private.secagg`); only the
    others' vectors are left out, which do not change what this one sends. An attacker reads ring elements as signed
    numbers, centred at 0.
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
    sent = everybody[victim].masked(words, alive, parcels[victim])[: len(words)]
    return torch.from_numpy(sent.view(np.int32).astype(np.float64)).view(change.shape)


def words_read(problem: Problem, method: Method, client: int, spec: ModelSpec) -> NDArray[np.int64]:
    """Count what a client's first round gives away: words it predicts (tied weights), or words it reads."""
    counts = np.zeros(spec.vocab, np.int64)
    for step in problem.objective([client], 0, method.batch_size).epoch(0)[0]:
        tokens = (step.targets if spec.tied else step.inputs)[step.mask > 0]
        counts += np.bincount(tokens, minlength=len(counts))
    return counts
