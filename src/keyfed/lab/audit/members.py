"""Membership inference on a run: losses of text it was trained on against text of the same kind that it was not.

Two questions: was this *piece of text* in the training data (pieces of training text against pieces of held-out text),
and was this *client* (training clients against clients that were held out whole, where the partition has some)? Each is
asked of the final model's loss, and of how much it fell between the oldest and the newest checkpoint that are left.

The score is a loss (members' is lower), or how much it fell between two models (members' fell more). AUC is the
probability that a member scores above a non-member, ½ for a coin; the true positive rate at 1 % false positives says
whether an attacker is ever sure, which AUC hides.

References:
  Carlini et al., *Membership Inference Attacks From First Principles*, S&P 2022 (why the low false positive rate).
  Zanella-Béguelin et al., *Analyzing Information Leakage of Updates to Natural Language Models*, CCS 2020 (snapshots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load

from keyfed.engine.network import Network, shapes
from keyfed.errors import RunError
from keyfed.federated.cohort import derive_seed
from keyfed.model.language_model import Params
from keyfed.run.evaluate import scorer_of
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared

Numbers = NDArray[np.float64]
FALSE_POSITIVES = 0.01
RESAMPLES = 200


class Attack(NamedTuple):
    """How well a score tells members from others, each figure with its 95 % bootstrap interval."""

    members: int
    others: int
    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]

    @property
    def succeeds(self) -> bool:
        """Whether members are told apart better than by a coin."""
        return self.auc_interval[0] > 0.5


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


def true_positives(members: Numbers, others: Numbers, false_positives: float = FALSE_POSITIVES) -> float:
    """Return the share of members above a threshold that at most so large a share of the others exceeds.

    Example:
      >>> true_positives(np.array([0.5, 2.0]), np.linspace(0, 1, 100))
      0.5
    """
    allowed = int(false_positives * len(others) + 1e-9)
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


def attack(members: Numbers, others: Numbers, seed: int) -> Attack:
    """Judge a score, larger for members, with bootstrap intervals."""
    if len(members) < 2 or len(others) < 2:
        raise ValueError(f"{len(members)} members and {len(others)} others; at least 2 of each")
    rng = np.random.default_rng(seed)
    drawn = [
        (rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(RESAMPLES)
    ]  # fmt: skip
    return Attack(
        len(members),
        len(others),
        auc(members, others),
        _interval([auc(m, o) for m, o in drawn]),
        true_positives(members, others),
        _interval([true_positives(m, o) for m, o in drawn]),
    )


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


Ids = NDArray[np.int32]
PIECE, FEWEST_TOKENS = 100, 20  # tokens of a piece of text; shorter ones than the second say nothing
OF_A_CLIENT = 2_000  # tokens from which a client is judged
FEWEST = 5  # clients or pieces on either side, below which there is no attack to speak of


def infer_membership(trained: Trained, prepared: Prepared, seed: int, *, most: int, device: str) -> dict[str, Any]:
    """Return the attacks that this run allows: AUC and true positive rate at 1 % false positives, with intervals."""
    store = prepared.store
    rng = np.random.default_rng(derive_seed(seed, "audit", "members"))
    chosen = np.sort(rng.permutation(len(store))[:most]).tolist()
    streams = [store.stream(k) for k in chosen]
    inside = {
        "text": draw_pieces(streams, most, rng),
        "clients": [s[:OF_A_CLIENT] for s in streams],
    }
    outside = {
        "text": draw_pieces(list(prepared.test.values()), most, rng),
        "clients": [s[:OF_A_CLIENT] for s in prepared.unseen.values() if len(s) >= FEWEST_TOKENS][:most],
    }
    old, new = snapshots(trained.folder, trained.spec)
    found: dict[str, Any] = {}
    for what in ("text", "clients"):
        members, others = inside[what], outside[what]
        if min(len(members), len(others)) < FEWEST:
            continue
        last = _losses(trained, trained.params, members, others, device)
        found[f"{what}, loss"] = attack(-last[0], -last[1], seed)._asdict()
        if old is not None and new is not None:
            before, after = (_losses(trained, p, members, others, device) for p in (old, new))
            found[f"{what}, fall of the loss"] = attack(before[0] - after[0], before[1] - after[1], seed)._asdict()
    return found


def draw_pieces(streams: Sequence[Ids], most: int, rng: np.random.Generator) -> list[Ids]:
    """Cut streams into pieces and draw at most so many."""
    pieces = [s[at : at + PIECE] for s in streams for at in range(0, len(s), PIECE)]
    pieces = [piece for piece in pieces if len(piece) >= FEWEST_TOKENS]
    chosen = np.sort(rng.permutation(len(pieces))[:most])
    return [pieces[k] for k in chosen.tolist()]


def _losses(
    trained: Trained, params: Params, members: Sequence[Ids], others: Sequence[Ids], device: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean nats of each piece, read from a zero state as the model's test text is."""
    named: Mapping[str, Ids] = {str(n): piece for n, piece in enumerate([*members, *others])}
    scores = scorer_of(trained.config.data.batching)(trained.spec, params, named, device)
    nats = np.array([score.mean_nats for score in scores.values()])
    return nats[: len(members)], nats[len(members) :]


def snapshots(folder: Path, spec: Network) -> tuple[Params | None, Params | None]:
    """Return the models of the oldest and the newest checkpoint that are left; None where there are not two."""
    files = sorted((folder / "checkpoint").glob("round-*.safetensors"))
    if len(files) < 2:
        return None, None
    return _read(files[0], spec), _read(files[-1], spec)


def _read(file: Path, spec: Network) -> Params:
    try:
        tensors = load(file.read_bytes())
        return {name: tensors[f"params/{name}"] for name in shapes(spec)}
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{file} is damaged ({e}); the audit needs whole checkpoints, or none") from None
