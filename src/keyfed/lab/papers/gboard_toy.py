"""The toy of the Gboard slides: two local LSTMs, a weighted mean of their weights; with its defect and repaired.

In the slides the two local models are drawn independently and never receive the mean. Each trains on by itself, and
the "global model" that is evaluated is a mean of two unrelated networks. Repaired, both start every round from the
mean, as federated averaging says. The slides do not name their data; this is a synthetic task of the same shape: a
sequence of numbers, one bit to predict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from keyfed.federated.cohort import derive_seed

Weights = dict[str, Tensor]
UNITS, BATCH, EPOCHS, STEP = 32, 32, 3, 0.01  # of the slides
SHARES = (0.4, 0.6)  # the slides' weights of the two clients


class Toy(nn.Module):
    """LSTM(32) and one sigmoid unit, as in the slides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, UNITS, batch_first=True)
        self.dense = nn.Linear(UNITS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit of every sequence, [batch]."""
        _, (last, _) = self.lstm(x)
        out: Tensor = self.dense(last[0]).squeeze(1)
        return out


def run_toy(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Run the slides' loop; `study.sent_back` says whether the mean goes back to the clients."""
    sent_back = bool(settings["study.sent_back"])
    rounds, size = int(settings.get("study.rounds", 10)), int(settings.get("study.samples", 3000))
    began = time.monotonic()
    x, y = task(size, seed)
    third = size // 3
    clients = [(x[:third], y[:third]), (x[third : 2 * third], y[third : 2 * third])]
    test_x, test_y = x[2 * third :], y[2 * third :]
    locals_ = [draw(seed, "local", k) for k in range(2)]
    records: list[dict[str, Any]] = []
    accuracies = []
    model = Toy()
    for number in range(1, rounds + 1):
        mean = {
            name: sum((s * w[name] for s, w in zip(SHARES, locals_, strict=True)), torch.zeros(()))
            for name in locals_[0]
        }
        with torch.no_grad():
            model.load_state_dict(mean)
            hits = float(((model(test_x) > 0).float() == test_y).float().mean())
        accuracies.append(hits)
        trained = [fit(mean if sent_back else own, *data, derive_seed(seed, number, str(k)))
                   for k, (own, data) in enumerate(zip(locals_, clients, strict=True))]  # fmt: skip
        locals_ = [weights for weights, _ in trained]
        loss = sum(s * found for s, (_, found) in zip(SHARES, trained, strict=True))
        records.append({"round": number, "loss": loss, "valid": {"perplexity": None, "top1": hits}})
    return {
        "records": records,
        "measures": {"accuracy": accuracies[-1], "first_accuracy": accuracies[0]},
        "data": f"synthetic, {size:,} sequences", "method": "mean of two", "model": "LSTM 32", "clients": 2,
        "rounds": rounds, "seconds": time.monotonic() - began,
    }  # fmt: skip


def task(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of eight standard normal numbers; the bit says whether the last half's sum is positive."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "toy task"))
    x = torch.randn(size, 8, generator=generator)
    return x.unsqueeze(2), (x[:, 4:].sum(1) > 0).float()


def draw(seed: int, *purpose: int | str) -> Weights:
    """Draw a model's weights, U(±1/√32), from a generator of their own."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "toy weights", *purpose))
    bound = UNITS**-0.5
    return {
        name: torch.empty(w.shape).uniform_(-bound, bound, generator=generator)
        for name, w in Toy().state_dict().items()
    }


def fit(start: Weights, x: Tensor, y: Tensor, seed: int) -> tuple[Weights, float]:
    """Train for three epochs of SGD 0.01 from given weights; return the weights and the last epoch's loss."""
    model = Toy()
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(model.parameters(), lr=STEP)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach()) * len(rows)
    return {name: w.detach().clone() for name, w in model.state_dict().items()}, total / len(x)
