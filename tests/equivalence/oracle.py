"""The slow, obvious reference: one client, one `torch.nn` module, one plain loop.

Nothing here is shared with the engine but the batches a client reads, the seeds they are drawn with and the hash that
says which units are dropped. Parameters go in and come out under the package's names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from keyfed.engine.problem import Problem
from keyfed.federated.cohort import derive_seed
from keyfed.model.language_model import Dropout, ModelSpec, keep_mask
from keyfed.text.batches import Step, epoch_steps, limit_text
from keyfed.text.vocab import BOS

Params = dict[str, Tensor]


class Cifg(nn.Module):
    """A coupled-gate LSTM (f = 1 − i) with an optional projection, called like `nn.LSTM(batch_first=True)`."""

    def __init__(self, width: int, hidden: int, projection: int | None) -> None:
        super().__init__()
        out = projection or hidden
        self.hidden, self.out = hidden, out
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, out))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * hidden))
        self.weight_hr_l0 = nn.Parameter(torch.empty(projection, hidden)) if projection else None

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = x.shape[0]
        h, c = state or (x.new_zeros(1, rows, self.out), x.new_zeros(1, rows, self.hidden))
        h, c, outputs = h[0], c[0], []
        for t in range(x.shape[1]):
            gates = F.linear(x[:, t], self.weight_ih_l0, self.bias_ih_l0)
            gates = gates + F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            i, g, o = gates.split(self.hidden, dim=1)
            forget = 1 - torch.sigmoid(i)
            c = forget * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            if self.weight_hr_l0 is not None:
                h = F.linear(h, self.weight_hr_l0)
            outputs.append(h)
        return torch.stack(outputs, dim=1), (h[None], c[None])


class Oracle(nn.Module):
    """Embedding, recurrent layers, (dense), output, as anybody would write them; batch first."""

    def __init__(self, spec: ModelSpec, theta: Params) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.embed)
        layers: list[nn.Module] = []
        for number in range(spec.layers):
            width = spec.embed if number == 0 else spec.width
            if spec.cell == "cifg":
                layers.append(Cifg(width, spec.hidden, spec.projection))
            else:
                kind, more = (nn.GRU, {}) if spec.cell == "gru" else (nn.LSTM, {"proj_size": spec.projection or 0})
                layers.append(kind(width, spec.hidden, batch_first=True, **more))
        self.layers = nn.ModuleList(layers)
        self.dense = nn.Linear(spec.width, spec.dense) if spec.dense else None
        self.output = nn.Linear(spec.output_width, spec.vocab)
        if spec.tied:
            self.output.weight = self.embedding.weight
        if spec.biases == 1:  # one bias: the second one is zero and stays so
            for layer in self.layers:
                nn.init.zeros_(layer.bias_hh_l0)
                layer.bias_hh_l0.requires_grad_(False)
        self.to(next(iter(theta.values())).dtype)
        named = self.named()
        assert set(named) == set(theta), set(named) ^ set(theta)
        with torch.no_grad():
            for name, p in named.items():
                assert p.shape == theta[name].shape, name
                p.copy_(theta[name])

    def named(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters under the package's names."""
        out = {}
        for name, p in self.named_parameters():
            if name.startswith("layers."):
                _, number, inner = name.split(".")
                name = f"rnn.{inner.removesuffix('_l0')}_l{number}"
            if p.requires_grad:
                out[name] = p
        return out

    def drop(self, x: Tensor, site: int, seed: int, step: int) -> Tensor:
        """Zero the units the hash names, scale the others; x is [rows, time, width]."""
        rate = self.spec.dropout
        if not rate or not self.training:
            return x
        rows, time, width = x.shape
        shape = torch.Size((1, time, rows, width))
        keep = keep_mask(Dropout(rate, torch.tensor([seed]), step), site, shape, x.device)
        return x * keep[0].transpose(0, 1).to(x.dtype) / (1 - rate)

    def forward(
        self, tokens: Tensor, state: list | None, seed: int = 0, step: int = 0, packed: bool = False
    ) -> tuple[Tensor, list]:
        """[rows, time] tokens → [rows, time, vocabulary] logits and every layer's state.

        With `packed` every line is a call of its own, from a zero state.
        """
        x = self.drop(self.embedding(tokens), 0, seed, step)
        after = []
        for number, layer in enumerate(self.layers):
            before = None if state is None else state[number]
            x, s = line_by_line(layer, x, before, tokens == BOS) if packed else layer(x, before)
            after.append(s)
            x = self.drop(x, number + 1, seed, step)
        if self.dense is not None:
            x = self.dense(x)
        return self.output(x), after


def line_by_line(layer: nn.Module, x: Tensor, state, starts: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """Call a recurrent layer row by row and line by line; only what a window begins with goes on from the state."""
    outputs, ends = [], []
    for row in range(len(x)):
        own = state if state is None else tree_map(lambda s, row=row: s[:, row : row + 1].contiguous(), state)
        cuts = [0, *[t for t in torch.nonzero(starts[row])[:, 0].tolist() if t], x.shape[1]]
        pieces = []
        for begin, end in pairwise(cuts):
            out, own = layer(x[row : row + 1, begin:end], None if starts[row, begin] else own)
            pieces.append(out)
        outputs.append(torch.cat(pieces, 1))
        ends.append(own)
    return torch.cat(outputs), tree_map(lambda *parts: torch.cat(parts, 1), *ends)


@dataclass(frozen=True)
class Local:
    """How the oracle's client trains."""

    optimiser: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    epochs: int = 1
    rows: int = 2


@dataclass(frozen=True)
class Trained:
    """What came of it: w − θ, mean nats per token and tokens of the last epoch, tokens of all epochs.

    `curve` has nats, right first guesses and tokens of every step, epoch by epoch.
    """

    upload: Params
    loss: float
    tokens: int
    worked: int
    clipped: int
    curve: list[list[tuple[float, int, int]]]


def detach(state: list) -> list:
    return [tuple(s.detach() for s in part) if isinstance(part, tuple) else part.detach() for part in state]


def train_client(
    spec: ModelSpec, theta: Params, epochs: list[list[Step]], local: Local, seed: int = 0, packed: bool = False
) -> Trained:
    """Train one client from θ on its steps, one after the other."""
    model = Oracle(spec, theta).train()
    named = model.named()
    if local.optimiser == "adam":
        optimiser: torch.optim.Optimizer = torch.optim.Adam(named.values(), lr=local.lr)
    else:
        optimiser = torch.optim.SGD(
            named.values(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
    taken = worked = clipped = 0
    curve: list[list[tuple[float, int, int]]] = []
    for steps in epochs:
        state, nats, tokens = None, 0.0, 0
        curve.append([])
        for step in steps:
            taken += 1
            if step.fresh:
                state = None
            real = torch.from_numpy(step.mask.copy()) > 0
            targets = torch.from_numpy(step.targets.copy())
            logits, state = model(torch.from_numpy(step.inputs.copy()), state, seed, taken, packed)
            loss = F.cross_entropy(logits[real], targets[real], reduction="mean")
            optimiser.zero_grad()
            loss.backward()
            if local.clip is not None:
                grads = [p.grad for p in named.values()]
                norm = torch.nn.utils.get_total_norm(grads)
                clipped += bool(norm > local.clip)
                # torch divides by norm + 1e-6; the package by the norm itself.
                torch.nn.utils.clip_grads_with_norm_(named.values(), local.clip, norm - 1e-6)
            optimiser.step()
            state = detach(state)
            nats += loss.item() * int(real.sum())
            tokens += int(real.sum())
            hits = int((logits[real].argmax(-1) == targets[real]).sum())
            curve[-1].append((loss.item() * int(real.sum()), hits, int(real.sum())))
        worked += tokens
    upload = {name: (p.detach() - theta[name]) for name, p in named.items()}
    return Trained(upload, nats / max(1, tokens), tokens, worked, clipped, curve)


def client_epochs(problem: Problem, client: int, rows: int, epochs: int, round: int) -> list[list[Step]]:
    """Return the steps a client of the package reads in a round, epoch by epoch."""
    name = problem.store.names[client]
    batching = replace(problem.batching, rows=rows)
    text = limit_text(problem.store.stream(client), batching, derive_seed(problem.seed, round, name, "text"))
    return [
        epoch_steps(
            text,
            batching,
            derive_seed(problem.seed, round, name, "order", epoch),
            derive_seed(problem.seed, round, "lengths", epoch),
        )
        for epoch in range(epochs)
    ]


def solve_one(problem: Problem, theta: Params, client: int, local: Local, round: int) -> Trained:
    """The reference for `solve_block`, one client."""
    seed = derive_seed(problem.seed, round, problem.store.names[client], "dropout")
    epochs = client_epochs(problem, client, local.rows, local.epochs, round)
    return train_client(problem.spec, theta, epochs, local, seed, problem.batching.kind == "packed")
