"""The models of the five sources by name, with exactly their parameter counts."""

from __future__ import annotations

from dataclasses import dataclass

from keyfed.errors import ConfigError, nearest
from keyfed.model.cells import CellName
from keyfed.model.language_model import ModelSpec


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
    """Return the preset `name` for a vocabulary, with the given fields overridden.

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
