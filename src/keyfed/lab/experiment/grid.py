"""A study as a TOML file: which cells a published table or figure needs, what was printed, and what it claims.

A cell is one configuration with one seed. Its identity is a hash of its runner, its settings and its seed: the same
cell is the same wherever and at whatever scale it is asked for, so results of any number of runs merge. Settings come
from `[base]`, then from the labels of the cell on every axis, then from `[[when]]`, then from the scale, then from a
`[[when]]` that names the scale.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, nearest
from keyfed.lab.experiment.check import SCALES, check_document, check_runner, check_settings, published_labels

Labels = Mapping[str, str]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StudyClaim:
    """A sentence and how it is checked.

    Attributes:
      kind: "lower", "higher": the rows of `of` against the same rows with the labels of `than`; "close": they differ
        by no more than `within`; "costs": they are higher by no more than `bound`, a share of one; "printed": the rows
        of `of` against the printed value, within `within`; "below": the rows of `of` against `bound`.
      about: "budget": judged after the rounds and tokens of its cells, which the page says beside the verdict; "reach":
        about what a method can reach, and judged only where rows have stopped learning (`reach`); "text": about
        what is counted in a text, without training.
      twice: labels that make of a row the one with twice the rounds, where it is about what a method can reach.
      front: whether the front page of the results says it.
      ours: whether it is our own goal or explanation, and not the paper's word.
      some: whether it holds as soon as one comparison does: each is another reading of the same thing.
      name: by which a `cause` names its verdict; empty for most.
      cause: sentences that say why, with numbers of cells in braces (see `causes`).
    """

    says: str
    kind: str
    of: Mapping[str, Any]
    than: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "perplexity"
    within: float = 0.05
    bound: float | None = None
    front: bool = False
    ours: bool = False
    some: bool = False
    name: str = ""
    cause: Sequence[str] = ()
    about: str = "budget"
    twice: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration with one seed.

    Attributes:
      labels: its place on every axis of the grid, in the order of the table's columns.
      settings: `section.key` to value; `study.key` is read by the runner itself, `first.section.key` by the run that
        this one starts from.
      absent: why it cannot be run by anybody here; empty for a cell that can.
    """

    study: str
    runner: str
    labels: Labels
    settings: Settings
    seed: int
    scale: str
    absent: str = ""

    @property
    def id(self) -> str:
        """A hash of what is computed, whatever the study calls it."""
        what = [self.runner, dict(self.settings), self.seed]
        content = json.dumps([*what, dict(self.labels)] if self.absent else what, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def file(self) -> str:
        """Name of the result's file: readable, and never that of another cell."""
        words = "-".join([*self.labels.values(), f"s{self.seed}"]).lower()
        safe = "".join(c if (c.isascii() and c.isalnum()) or c in ".=" else "-" for c in words)
        return f"{'-'.join(filter(None, safe.split('-')))}-{self.id}.json"

    @property
    def title(self) -> str:
        """What a person reads while it runs."""
        return f"{', '.join(f'{axis} {label}' for axis, label in self.labels.items())}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of a study is run: `smoke` in minutes on a CPU, `standard` on a GPU, `paper` the full grid."""

    name: str
    seeds: tuple[int, ...]
    why: str
    settings: Settings
    keep: Mapping[str, tuple[str, ...]]
    fewer: tuple[tuple[Labels, tuple[int, ...]], ...]

    def seeds_of(self, labels: Labels) -> tuple[int, ...]:
        """Seeds of a configuration: the scale's, or those of the first `fewer` that it matches."""
        return next((seeds for where, seeds in self.fewer if matches(labels, where)), self.seeds)


@dataclass(frozen=True, slots=True)
class Searched:
    """How the settings of some rows were found.

    Attributes:
      where: labels of the rows.
      trials: settings that were tried; `tokens`: those that all trials trained on together.
      record: where every trial is listed.
    """

    where: Mapping[str, Any]
    trials: int
    tokens: float
    record: str


@dataclass(frozen=True, slots=True)
class Study:
    """A study file, checked.

    Attributes:
      curves: whether cells that train are run with `--curves`. It changes nothing of what a cell computes, so it is no
        setting and not in a cell's identity: cells that were run without stay what they are, and have no such curves.
    """

    name: str
    title: str
    paper: str
    about: str
    measures: tuple[str, ...]
    notes: tuple[str, ...]
    targets: tuple[float, ...]
    plots: tuple[Mapping[str, Any], ...]
    base: Settings
    axes: Mapping[str, Mapping[str, Settings]]
    when: tuple[tuple[Mapping[str, Any], Settings], ...]
    grids: tuple[Mapping[str, Any], ...]
    scales: Mapping[str, Scale]
    published: Mapping[str, tuple[tuple[Labels, float], ...]]
    claims: tuple[StudyClaim, ...]
    curves: bool = False
    searched: tuple[Searched, ...] = ()

    def printed(self, labels: Labels, measure: str) -> float | None:
        """The published value of a row; the most specific entry that matches."""
        found = [(len(where), value) for where, value in self.published.get(measure, ()) if matches(labels, where)]
        return max(found)[1] if found else None


def matches(labels: Labels, where: Mapping[str, Any]) -> bool:
    """Tell whether labels have all that `where` asks for; a list asks for any of its members.

    Example:
      >>> matches({"data": "PTB", "C": "0.1"}, {"C": ["0.1", "0.5"]})
      True
    """
    return all(
        labels.get(axis) in (want if isinstance(want, list | tuple) else (want,)) for axis, want in where.items()
    )


def cells_of(study: Study, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """Return a study's cells at a scale: seed by seed, so that what is done first covers the whole grid.

    Args:
      seeds: in place of the scale's own.
    """
    if scale not in study.scales:
        raise ConfigError(f'--scale is "{scale}"{nearest(scale, SCALES)}; expected one of {", ".join(study.scales)}')
    chosen = study.scales[scale]
    cells = []
    for grid in study.grids:
        axes = {axis: values for axis, values in grid.items() if axis in study.axes}
        for combination in itertools.product(*axes.values()):
            labels = dict(zip(axes, combination, strict=True))
            if not all(label in chosen.keep.get(axis, (label,)) for axis, label in labels.items()):
                continue
            if scale not in grid.get("scales", SCALES):
                continue
            settings, absent = _settings(study, chosen, labels)
            cells += [
                Cell(study.name, grid.get("runner", "train"), labels, settings, seed, scale, absent)
                for seed in seeds or chosen.seeds_of(labels)
            ]
    unique = {cell.id: cell for cell in cells}
    return sorted(unique.values(), key=lambda cell: cell.seed)


def _settings(study: Study, scale: Scale, labels: Labels) -> tuple[dict[str, Any], str]:
    settings = dict(study.base)
    for axis, label in labels.items():
        settings |= study.axes[axis][label]
    for where, more in study.when:
        if "scale" not in where and matches(labels, where):
            settings |= more
    settings |= scale.settings
    for where, more in study.when:
        if "scale" in where and matches({**labels, "scale": scale.name}, where):
            settings |= more
    absent = str(settings.pop("absent", ""))
    return {key: settings[key] for key in sorted(settings)}, absent


def with_settings(cell: Cell, more: Settings) -> Cell:
    """The cell with other settings: another cell. Those of a first run are for cells that have one."""
    first = any(key.startswith("first.") for key in cell.settings)
    merged = {**cell.settings, **{key: value for key, value in more.items() if first or not key.startswith("first.")}}
    return replace(cell, settings={key: merged[key] for key in sorted(merged)})


def study_folder() -> Path:
    """Where the studies lie: ./studies, else those of the source tree, else those that an installed package brings."""
    package = Path(__file__).resolve().parents[2]
    places = (Path("studies"), package.parents[1] / "studies", package / "studies")
    return next((place for place in places if place.is_dir()), places[-1])


def results_folder(studies: Path) -> Path:
    """Where pages and data lie by default: docs/results beside the studies; here for those of an installed package."""
    installed = studies.resolve() == Path(__file__).resolve().parents[2] / "studies"
    return Path("docs/results") if installed else studies.parent / "docs" / "results"


def study_names(folder: Path) -> list[str]:
    """Names of the studies of a folder, in the order of the alphabet."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_study(name: str, folder: Path) -> Study:
    """Read a study by name from its folder, or by the path of a TOML file."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        known = study_names(folder)
        raise ConfigError(
            f'study "{name}" is not known{nearest(name, known)}. Studies: {", ".join(known) or f"none in {folder}"}.'
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path}: not a study: {e}") from None
    return study_from(document, path)


def study_from(document: Mapping[str, Any], path: Path) -> Study:
    """Check a study's document and return the study; every mistake names the file and what was expected."""
    where = path.name
    check_document(document, where)
    study = Study(
        name=path.stem,
        title=document["title"],
        paper=document["paper"],
        about=document["about"],
        measures=tuple(document["measures"]),
        notes=tuple(document.get("notes", ())),
        targets=tuple(map(float, document.get("targets", ()))),
        plots=tuple(document.get("plots", ())),
        base=_flat(document.get("base", {}), path),
        axes={
            axis: {label: _flat(table, path) for label, table in values.items()}
            for axis, values in document["axis"].items()
        },
        when=tuple((entry["where"], _flat(entry["set"], path)) for entry in document.get("when", ())),
        grids=tuple(document["grid"]),
        scales={name: _scale(name, table, path) for name, table in document["scale"].items()},
        published={m: tuple(_published(table)) for m, table in document.get("published", {}).items()},
        claims=tuple(StudyClaim(**entry) for entry in document.get("claims", ())),
        curves=document.get("curves", False),
        searched=tuple(Searched(**entry) for entry in document.get("searched", ())),
    )
    tables = [study.base, *(s for values in study.axes.values() for s in values.values())]
    tables += [more for _, more in study.when] + [scale.settings for scale in study.scales.values()]
    for table in tables:
        check_settings(table, where)
    for scale in study.scales:
        for cell in cells_of(study, scale):
            if not cell.absent:
                check_runner(cell.runner, cell.settings, cell.labels, where)
    return study


def _flat(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Settings as `section.key`; `run_file` brings those of a run's TOML file beside the study."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if key == "run_file":
            try:
                document = tomllib.loads((path.parent / str(value)).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
                raise ConfigError(f"{path.name}: run_file {value}: {e}") from None
            for section, values in document.items():
                if not isinstance(values, Mapping):
                    raise ConfigError(f"{path.name}: run_file {value}: {section} is {values!r}; expected a section")
                out |= {f"{section}.{name}": v for name, v in values.items()}
        elif isinstance(value, Mapping):
            out |= {f"{key}.{name}": v for name, v in _flat(value, path).items()}
        else:
            out[key] = value
    return out


def _scale(name: str, table: Mapping[str, Any], path: Path) -> Scale:
    keep = {axis: tuple(labels) for axis, labels in table.get("keep", {}).items()}
    fewer = tuple((entry["where"], tuple(entry["seeds"])) for entry in table.get("fewer", ()))
    return Scale(name, tuple(table["seeds"]), table["why"], _flat(table.get("set", {}), path), keep, fewer)


def _published(table: Mapping[str, Any]) -> Iterable[tuple[Labels, float]]:
    """Read `axes = ["data", "C"]` and `"PTB | 0.1" = 138.13`."""
    for key, value in table.items():
        if key != "axes":
            yield dict(zip(table["axes"], published_labels(key), strict=True)), float(value)
