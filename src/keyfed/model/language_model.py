r"""Language models over stacked clients: embedding → recurrent layers → (dense) → tied or free output layer.

A model is a value (`ModelSpec`) and functions of it. Parameters are `dict[str, Tensor]` with torch.nn's names; a
cohort's parameters carry a leading client axis. A tied matrix occurs once, as `embedding.weight`.

**Dropout.** The mask is a function of (client seed, step, place), not of a generator's history: a stateless integer
hash (the finaliser of MurmurHash3) of the unit's position. The same client drops the same units whether it trains
alone, in a block of ten, on a CPU or on a GPU, today or after a resume.

**Eight bits.** Stored weights have one symmetric scale a row:

.. math:: s_r = \max_c |w_{rc}| / 127, \qquad q_{rc} = \mathrm{round}(w_{rc} / s_r), \qquad ŵ_{rc} = s_r\, q_{rc}

so :math:`|ŵ - w| \le s_r / 2`. The page widens the weights when it loads them and the graph stays that of float32: the
download shrinks, the arithmetic does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keyfed.errors import ConfigError, ShapeMismatch, nearest
from keyfed.model.cells import CELLS, CellName, CellWeights, Recurrence, State, gates_of, zero_state

Params = dict[str, Tensor]
ModelState = tuple[State, ...]  # one cell state a layer
Floats = NDArray[np.float32]
SCALE = ".scale"  # behind the name of a matrix: its scales
LARGEST = 127  # number in eight bits

_MASK = 0xFFFFFFFF
_ROW_STRIDE = 1 << 16  # positions do not depend on how far a batch was padded in time


class Dropout(NamedTuple):
    """What a forward pass needs to drop units: rate, one seed a client, and the number of the local step.

    Attributes:
      widths: real units at each site, where tensors are wider than the model.
    """

    rate: float
    seeds: Tensor  # [m] int64
    step: int | Tensor  # a client's own local step: one number, or [m] of them
    widths: tuple[int, ...] | None = None


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (MurmurHash3's fmix32, a bijection).

    Example:
      >>> mix(torch.tensor([0, 1, 2])).tolist()
      [0, 1364076727, 821347078]
    """
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def keep_mask(drop: Dropout, site: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Return a bool mask [m, time, batch, width]: True keeps the unit, with probability 1 − rate.

    Args:
      site: number of the place in the network (0 = embedding, 1… = after each layer).
    """
    _, time, batch, width = shape
    seeds = drop.seeds.to(device)
    step = torch.as_tensor(drop.step, device=device)
    key = mix(mix(mix(seeds & _MASK) ^ ((seeds >> 32) & _MASK)) ^ (step * 64 + site))
    rows = torch.arange(batch, device=device)[None, :] * _ROW_STRIDE
    place = (rows + torch.arange(time, device=device)[:, None])[:, :, None] * (
        drop.widths[site] if drop.widths else width
    )
    place = place + torch.arange(width, device=device)
    bits = mix(mix((place & _MASK) ^ key[:, None, None, None]) ^ (place >> 32))
    return bits >= int(drop.rate * 2**32)


def apply_dropout(x: Tensor, drop: Dropout | None, site: int) -> Tensor:
    """Drop units of x [m, time, batch, width] and scale the rest by 1/(1 − rate); None leaves x alone."""
    if drop is None or drop.rate == 0:
        return x
    return x * (keep_mask(drop, site, x.shape, x.device).to(x.dtype) * (1 / (1 - drop.rate)))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that fixes a model's parameters and arithmetic.

    Attributes:
      name: preset it came from.
      cell: recurrent cell.
      vocab: size of the vocabulary, specials included.
      embed: width of the embedding.
      hidden: units of each recurrent layer.
      layers: number of recurrent layers.
      dense: width of a linear layer after the recurrence, or None.
      projection: width of the recurrent projection of a CIFG or an LSTM, or None.
      tied: the output layer is the transposed embedding.
      biases: bias vectors per gate: 2 as torch.nn, 1 as Keras.
      dropout: rate after the embedding and after every recurrent layer while training.
    """

    name: str
    cell: CellName
    vocab: int
    embed: int
    hidden: int
    layers: int = 1
    dense: int | None = None
    projection: int | None = None
    tied: bool = False
    biases: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.tied and self.output_width != self.embed:
            raise ShapeMismatch(
                f'model "{self.name}": a tied output needs width {self.embed} (the embedding), '
                f"the last layer has {self.output_width}; set tied=false or the same width"
            )

    @property
    def width(self) -> int:
        """Width of a recurrent layer's output."""
        return self.projection or self.hidden

    @property
    def output_width(self) -> int:
        """Width of what the output layer reads."""
        return self.dense or self.width


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter, in the order they are stored and sent.

    Example:
      >>> spec = ModelSpec("gru", "gru", vocab=10_001, embed=300, hidden=300, tied=True)
      >>> sum(torch.Size(s).numel() for s in shapes(spec).values())
      3552101
    """
    rows = gates_of(spec.cell) * spec.hidden
    out: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab, spec.embed)}
    for layer in range(spec.layers):
        out[f"rnn.weight_ih_l{layer}"] = (rows, spec.embed if layer == 0 else spec.width)
        out[f"rnn.weight_hh_l{layer}"] = (rows, spec.width)
        out[f"rnn.bias_ih_l{layer}"] = (rows,)
        if spec.biases == 2:
            out[f"rnn.bias_hh_l{layer}"] = (rows,)
        if spec.projection:
            out[f"rnn.weight_hr_l{layer}"] = (spec.projection, spec.hidden)
    if spec.dense:
        out["dense.weight"] = (spec.dense, spec.width)
        out["dense.bias"] = (spec.dense,)
    if not spec.tied:
        out["output.weight"] = (spec.vocab, spec.output_width)
    out["output.bias"] = (spec.vocab,)
    return out


def parameter_count(spec: ModelSpec) -> int:
    """Number of parameters, a tied matrix counted once."""
    return sum(torch.Size(shape).numel() for shape in shapes(spec).values())


def init_params(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> Params:
    """Draw initial parameters: U(−0.1, 0.1) for embedding and output, U(±1/√fan) elsewhere, output bias 0.

    Each tensor has its own generator seeded by (seed, name): adding a layer does not change the others.
    """
    params: Params = {}
    for name, shape in shapes(spec).items():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        if name == "output.bias":
            params[name] = torch.zeros(shape, dtype=dtype)
            continue
        bound = 0.1 if name in ("embedding.weight", "output.weight") else spec.hidden**-0.5
        params[name] = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
    return params


def check_params(spec: ModelSpec, params: Params, origin: str) -> None:
    """Raise ShapeMismatch unless `params` (not stacked) has exactly the model's names and shapes."""
    check_shapes(shapes(spec), params, spec.name, origin)


def check_shapes(want: Mapping[str, tuple[int, ...]], params: Params, model: str, origin: str) -> None:
    """Raise ShapeMismatch unless `params` has exactly the names and shapes of `want`, those of `model`."""
    for name in [*want, *params]:
        got = tuple(params[name].shape) if name in params else None
        if got != want.get(name):
            raise ShapeMismatch(
                f'{origin}: "{name}" is {"missing" if got is None else list(got)}, model "{model}" '
                f"has {list(want[name]) if name in want else 'no such layer'}"
            )


class Batch(NamedTuple):
    """One step's tokens for m clients; positions with mask 0 are padding.

    Where rows hold several lines, `starts` is true at the first token of each: the state before it is zero.
    """

    inputs: Tensor  # [m, batch, time] int64
    targets: Tensor  # [m, batch, time] int64
    mask: Tensor  # [m, batch, time] float
    starts: Tensor | None = None  # [m, batch, time] bool; None: a row is one text


def initial_state(spec: ModelSpec, params: Params, batch: int) -> ModelState:
    """Return zero states of every layer for m clients × `batch` rows."""
    like = params["embedding.weight"]
    one = zero_state(spec.cell, like.shape[0], batch, spec.hidden, spec.width, like)
    return tuple(tuple(s.clone() for s in one) for _ in range(spec.layers))


def layer_weights(params: Params, layer: int) -> CellWeights:
    """Pick the named tensors of one recurrent layer."""
    return CellWeights(
        ih=params[f"rnn.weight_ih_l{layer}"],
        hh=params[f"rnn.weight_hh_l{layer}"],
        bias_ih=params[f"rnn.bias_ih_l{layer}"],
        bias_hh=params.get(f"rnn.bias_hh_l{layer}"),
        hr=params.get(f"rnn.weight_hr_l{layer}"),
    )


def features(
    spec: ModelSpec,
    params: Params,
    tokens: Tensor,
    state: ModelState,
    drop: Dropout | None = None,
    recurrence: Recurrence | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, ModelState]:
    """Run the network up to the output layer.

    Args:
      params: stacked, [m, …].
      tokens: [m, batch, time].
      state: carried state, see `initial_state`.
      recurrence: the cell to run; None takes the definition in `cells`.
      starts: where lines begin, see `Batch`.

    Returns:
      ([m, time, batch, width], new state). Time comes before batch so that a step is contiguous.
    """
    run = recurrence or CELLS[spec.cell]
    table = params["embedding.weight"]
    m, vocab, width = table.shape
    offsets = torch.arange(m, device=tokens.device)[:, None, None] * vocab
    x = F.embedding(tokens.transpose(1, 2) + offsets, table.reshape(m * vocab, width))
    x = apply_dropout(x, drop, 0)
    last, keep = [], keep_of(starts, x.dtype)
    for layer in range(spec.layers):
        x, s = run(x, layer_weights(params, layer), state[layer], keep)
        last.append(s)
        x = apply_dropout(x, drop, layer + 1)
    if spec.dense:
        flat = x.reshape(m, -1, x.shape[-1])
        flat = torch.baddbmm(params["dense.bias"][:, None], flat, params["dense.weight"].mT)
        x = flat.view(*x.shape[:-1], spec.dense)
    return x, tuple(last)


def keep_of(starts: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what multiplies the state before each step (see `cells`), [m, time, batch, 1]: 0 where a line begins."""
    return None if starts is None else (~starts).transpose(1, 2)[..., None].to(dtype)


def output_layer(spec: ModelSpec, params: Params) -> tuple[Tensor, Tensor]:
    """Return the output layer's weight [m, V, width] (the embedding when tied) and bias [m, V]."""
    return params["embedding.weight" if spec.tied else "output.weight"], params["output.bias"]


def loss_weights(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return real tokens [m], each position's share of its client's mean [m, time·batch], and its target."""
    m = batch.inputs.shape[0]
    mask = batch.mask.to(dtype)
    counts = mask.sum((1, 2))
    scale = (mask / counts.clamp(min=1)[:, None, None]).transpose(1, 2).reshape(m, -1)
    return counts, scale, batch.targets.transpose(1, 2).reshape(m, -1)


def stack(params: Params, m: int) -> Params:
    """Give every client of a cohort its own copy of the parameters, [m, …]."""
    return {name: p.unsqueeze(0).repeat(m, *([1] * p.dim())) for name, p in params.items()}


def quantise_rows(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return q int8 [rows, columns] and s float32 [rows]; a row of zeros has scale 0.

    Example:
      >>> q, scale = quantise_rows(np.array([[0.5, -1.27], [0.0, 0.0]], np.float32))
      >>> q.tolist(), [round(float(s), 4) for s in scale]
      ([[50, -127], [0, 0]], [0.01, 0.0])
    """
    scale = (np.abs(matrix).max(axis=1, initial=0.0) / LARGEST).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)[:, None].astype(np.float64)
    return np.rint(matrix / safe).clip(-LARGEST, LARGEST).astype(np.int8), scale


def widen_rows(q: NDArray[np.int8], scale: Floats) -> Floats:
    """Return ŵ = s q in float32, the same bits in every language: one product a number."""
    return q.astype(np.float32) * scale[:, None].astype(np.float32)


def quantise(params: Mapping[str, Floats]) -> dict[str, NDArray[np.generic]]:
    """Return what the weights file holds: matrices as NAME and NAME.scale, vectors as they are."""
    out: dict[str, NDArray[np.generic]] = {}
    for name, value in params.items():
        if value.ndim == 2:
            out[name], out[name + SCALE] = quantise_rows(value)
        else:
            out[name] = value
    return out


def widen(stored: Mapping[str, NDArray[np.generic]]) -> dict[str, Floats]:
    """Return the weights of a weights file in float32, whichever precision it has."""
    out: dict[str, Floats] = {}
    for name, value in stored.items():
        if value.dtype == np.int8:
            out[name] = widen_rows(value.astype(np.int8), stored[name + SCALE].astype(np.float32))
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in stored):
            out[name] = value.astype(np.float32)
    return out


# The models of the five sources by name, with exactly their parameter counts


@dataclass(frozen=True, slots=True)
class Preset:
    """A published architecture; the vocabulary size comes with the data.

    Attributes:
      characters: reads characters, not words.
      window: tokens of a training window.
      about: where it comes from.
    """

    cell: CellName
    embed: int
    hidden: int
    layers: int = 1
    dense: int | None = None
    projection: int | None = None
    tied: bool = False
    biases: int = 2
    characters: bool = False
    window: int = 35
    about: str = ""


PRESETS: dict[str, Preset] = {
    "gru": Preset("gru", 300, 300, tied=True, about="FedAtt, small, tied"),
    "gru-printed": Preset(
        "gru-printed", 300, 300, tied=True, biases=1, about="FedAtt, small, tied; r ⊙ h in the product, as printed"
    ),
    "gru-untied": Preset("gru", 300, 300, about="FedAtt, small, untied"),
    "gru-medium": Preset("gru", 650, 650, tied=True, about="FedAtt, medium, tied"),
    "gru-medium-untied": Preset("gru", 650, 650, about="FedAtt, medium, untied"),
    "gru-large": Preset("gru", 1500, 1500, tied=True, about="FedAtt, large, tied"),
    "gru-large-untied": Preset("gru", 1500, 1500, about="FedAtt, large, untied"),
    "lstm": Preset("lstm", 300, 400, layers=2, about="FedMed"),
    "char-lstm": Preset("lstm", 64, 256, characters=True, window=100, about="next-character (its code: one layer)"),
    "char-lstm-2": Preset(
        "lstm", 64, 256, layers=2, characters=True, window=100, about="next-character (its text: two layers)"
    ),
    "nwp-small": Preset("lstm", 100, 256, dense=100, biases=1, window=20, about="pretraining, small"),
    "nwp-large": Preset("lstm", 300, 512, dense=300, biases=1, window=20, about="pretraining, large"),
    "nwp-reddi": Preset("lstm", 96, 670, dense=96, biases=1, window=20, about="pretraining §9 (Reddi et al.)"),
    "cifg": Preset("cifg", 96, 670, projection=96, tied=True, biases=1, window=20, about="Gboard's keyboard"),
    "lstm-projected": Preset(
        "lstm",
        96,
        670,
        projection=96,
        tied=True,
        biases=1,
        window=20,
        about="Gboard's keyboard with an LSTM of its width",
    ),
    "leaf-char": Preset("lstm", 8, 256, layers=2, characters=True, window=80, about="LEAF, Shakespeare"),
}


def preset(name: str) -> Preset:
    """Look a preset up; an unknown name is an error that says the nearest."""
    if name not in PRESETS:
        raise ConfigError(f'model "{name}" is not known{nearest(name, PRESETS)}. Models: {", ".join(PRESETS)}.')
    return PRESETS[name]


def build_spec(
    name: str,
    vocab: int,
    *,
    dropout: float = 0.0,
    tied: bool | None = None,
    embed: int | None = None,
    hidden: int | None = None,
    layers: int | None = None,
) -> ModelSpec:
    """Return the preset `name` for a vocabulary; arguments that are not None replace its own.

    Changing `embed` of a model whose recurrence, projection or dense layer has the embedding's width (so that it can be
    tied) changes that width too.
    """
    p = preset(name)
    width = embed or p.embed
    follow = (p.tied if tied is None else tied) and embed is not None
    return ModelSpec(
        name=name,
        cell=p.cell,
        vocab=vocab,
        embed=width,
        hidden=hidden or (width if follow and p.projection is None and p.dense is None else p.hidden),
        layers=layers or p.layers,
        dense=width if follow and p.dense else p.dense,
        projection=width if follow and p.projection else p.projection,
        tied=p.tied if tied is None else tied,
        biases=p.biases,
        dropout=dropout,
    )
