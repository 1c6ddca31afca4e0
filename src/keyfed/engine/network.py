"""A model as the engine sees it: one of ours (`ModelSpec`) or a user's module (`ModuleNetwork`), behind the same verbs.

Ours run through the hand-written kernels and the fused output layer; a module runs as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keyfed.engine.kernels import step
from keyfed.engine.kernels.step import KERNELS, Buffers
from keyfed.engine.module import ModuleNetwork, ModuleReader
from keyfed.federated.types import Gradient
from keyfed.model import language_model as lm
from keyfed.model.conformance import Predictor, predictor_of
from keyfed.model.language_model import Batch, Dropout, ModelSpec, Params
from keyfed.model.output import TokenScores, score_tokens

Network = ModelSpec | ModuleNetwork
NetworkState = Any  # what the network carries from window to window; only the network looks into it


def shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every layer, in the order they are stored and sent."""
    return dict(network.shapes) if isinstance(network, ModuleNetwork) else lm.shapes(network)


def parameter_count(network: Network) -> int:
    """Number of parameters, a tied one counted once."""
    return sum(torch.Size(shape).numel() for shape in shapes(network).values())


def init_params(network: Network, seed: int) -> Params:
    return network.init_params(seed) if isinstance(network, ModuleNetwork) else lm.init_params(network, seed)


def check_params(network: Network, params: Params, origin: str) -> None:
    """Raise ShapeMismatch unless `params` (not stacked) has exactly the network's names and shapes."""
    lm.check_shapes(shapes(network), params, network.name, origin)


def gradient(
    network: Network,
    params: Params,
    batch: Batch,
    state: NetworkState | None,
    seeds: Tensor,
    taken: Tensor,
    buffers: Buffers,
    count: bool = False,
) -> tuple[Gradient, NetworkState]:
    """Return one training step's nats, tokens and gradients, and the state after it.

    Args:
      params: stacked, [m, …].
      state: as returned by the step before; None at the start of a text.
      seeds, taken: each client's seed of the round and its number of this step, for dropout.
      buffers, count: see `engine.kernels.step.gradient`.
    """
    if not isinstance(network, ModuleNetwork):
        before = lm.initial_state(network, params, batch.inputs.shape[1]) if state is None else state
        drop = Dropout(network.dropout, seeds, taken) if network.dropout else None
        return step.gradient(network, params, batch, before, drop, buffers, count=count)
    leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
    loss, tokens, hits, after = network.step(leaves, batch, state, seeds, taken, count)
    # A layer that a step does not use (a learnt first state, say) has a gradient of zero.
    ones = torch.ones_like(loss)
    grads = torch.autograd.grad(loss, list(leaves.values()), grad_outputs=ones, materialize_grads=True)
    return Gradient(loss.detach() * tokens, tokens, dict(zip(leaves, grads, strict=True)), hits), after


class Reader(Protocol):
    """A trained network that reads text; a state of None is the start of a text.

    Attributes:
      span: tokens it is best given at a time.
    """

    span: int

    def read(self, tokens: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        """[rows, time] tokens → what `score` takes of every position, [rows, time, …], and the state."""
        ...

    def score(self, read: Tensor, targets: Tensor) -> TokenScores:
        """Nats and rank of the true tokens [n] at positions that were read, [n, …] → [1, n]."""
        ...

    def logits(self, read: Tensor) -> Tensor:
        """Logits at positions that were read, [n, …] → [n, vocabulary]."""
        ...

    def after(self, tokens: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        """Logits after the last token, [rows, vocabulary], and the state."""
        ...

    def keep(self, state: NetworkState, rows: slice | Sequence[int]) -> NetworkState:
        """Pick rows of a state."""
        ...


def whole_recurrence(spec: ModelSpec, params: Params) -> nn.RNNBase | None:
    """The recurrent layers as one `torch.nn` module on a GPU, whose library runs them at once; None elsewhere."""
    like = params["embedding.weight"]
    if not like.is_cuda or spec.cell not in ("gru", "lstm") or spec.projection or like.dtype != torch.float32:
        return None
    kind = nn.GRU if spec.cell == "gru" else nn.LSTM
    module = kind(spec.embed, spec.hidden, spec.layers, batch_first=True, device=like.device)
    for name, p in module.named_parameters():
        own = params.get(f"rnn.{name}")
        p.data.copy_(torch.zeros_like(p) if own is None else own)  # a model of one bias has a second of zeros
    return module.requires_grad_(False)


class SpecReader:
    """`Reader` of one of our models, whose state can also be had as a matrix: one row a text."""

    span = 512  # tokens a stream advances between two output products

    def __init__(self, spec: ModelSpec, params: Params) -> None:
        self._spec = spec
        self._params = lm.stack(params, 1)
        self._weight, self._bias = lm.output_layer(spec, self._params)
        self._whole = whole_recurrence(spec, params)

    @torch.no_grad()
    def read(self, tokens: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        """Features before the output layer, which only positions that count go through."""
        if state is None:
            state = lm.initial_state(self._spec, self._params, tokens.shape[0])
        if self._whole is not None:
            return self._read_whole(self._whole, tokens, state)
        kernel = KERNELS[self._spec.cell]
        x, after = lm.features(self._spec, self._params, tokens[None], state, recurrence=kernel)
        return x[0].transpose(0, 1), after

    def _read_whole(self, whole: nn.RNNBase, tokens: Tensor, state: NetworkState) -> tuple[Tensor, NetworkState]:
        """All layers and time steps in one call, where the GPU's library has them."""
        parts = [torch.cat(part) for part in zip(*state, strict=True)]  # [layers, rows, width] each
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            x, after = whole(self._params["embedding.weight"][0][tokens], tuple(parts) if len(parts) > 1 else parts[0])
        if self._spec.dense:
            x = F.linear(x, self._params["dense.weight"][0], self._params["dense.bias"][0])
        ends = after if isinstance(after, tuple) else (after,)
        return x, tuple(tuple(part[layer][None] for part in ends) for layer in range(self._spec.layers))

    def score(self, read: Tensor, targets: Tensor) -> TokenScores:
        return score_tokens(read[None], self._weight, self._bias, targets[None])

    def logits(self, read: Tensor) -> Tensor:
        return torch.baddbmm(self._bias[:, None], read[None], self._weight.mT)[0]

    @torch.no_grad()
    def after(self, tokens: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        x, state = self.read(tokens, state)
        return self.logits(x[:, -1]), state

    def keep(self, state: NetworkState, rows: slice | Sequence[int]) -> NetworkState:
        return tuple(tuple(part[:, rows] for part in layer) for layer in state)

    def pack(self, state: NetworkState) -> Tensor:
        """[rows, numbers]: all parts of a state, one behind the other."""
        return torch.cat([part[0] for layer in state for part in layer], -1)

    def unpack(self, packed: Tensor) -> NetworkState:
        """The state that `pack` made a matrix of."""
        like = lm.initial_state(self._spec, self._params, 0)
        parts = iter(packed[None].split([part.shape[-1] for layer in like for part in layer], -1))
        return tuple(tuple(next(parts).contiguous() for _ in layer) for layer in like)


def reader_of(network: Network, params: Params, device: str = "cpu") -> Reader:
    """Return a network with its parameters (not stacked) as something that reads text on a device."""
    there = {name: p.to(device) for name, p in params.items()}
    return ModuleReader(network, there) if isinstance(network, ModuleNetwork) else SpecReader(network, there)


def predictor(network: Network, params: Params) -> Predictor:
    """Return a network with its parameters as the conformance suite takes it, every row from the start of a text."""
    if isinstance(network, ModelSpec):
        return predictor_of(network, params)
    reader = ModuleReader(network, params)
    return lambda tokens: reader.read(tokens, None)[0]
