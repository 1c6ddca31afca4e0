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
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from keyfed.errors import ConfigError, nearest
from keyfed.federated.methods import METHODS, method_options
from keyfed.lab.experiment.search import DRAW, SEARCH, TRIAL, SearchPlan, with_trials, with_winners

Labels = Mapping[str, str]
Settings = Mapping[str, Any]
SCALES = ("smoke", "standard", "paper")
RUNNERS = ("train", "code-faithful", "n-gram", "toy", "explore", TRIAL)
CLAIMS = ("lower", "higher", "close", "costs", "printed", "below")
AGAINST = ("lower", "higher", "close", "costs")  # kinds of claims that compare rows with rows
BOUNDED = ("below", "costs")  # kinds of claims that need a bound
ABOUT = ("budget", "reach", "text")
MEASURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words", "sentence_perplexity",
            "sentence_top1", "sentence_top1_words", "sentence_top3_words", "honest_sentence_perplexity",
            "honest_nats", "oov_rate")  # fmt: skip
OF_RUN = ("unseen_perplexity", "train_nats", "late_top1", "late_top1_words", "adaptive_rounds",
          "effective_clients")  # of a run, not of the test  # fmt: skip
CURVE = {"train_nats": 1, "perplexity": 2, "nats": 2, "top1": 3, "accuracy": 3}  # places in a point of a curve by round
BY = ("batch", "epoch")  # what curves of training are drawn by, beside the round
PLACES = {"train_nats": 1, "train_top1": 2}  # measures of training in a point by batch or epoch
PLOTS = ("bars", "lines", "curves", "terms")
TERMS = ("unigrams", "bigrams")  # what a plot of terms counts
BLANKS: dict[str, Callable[[Iterable[str]], Iterable[str]]] = {  # readings of a text's white space
    "as they are": lambda lines: lines,
    "runs as one": lambda lines: (re.sub(" +", " ", line) for line in lines),
    "stripped": lambda lines: (line.strip() for line in lines),
    "no blank lines": lambda lines: (line.strip() for line in lines if line.strip()),
    "collapsed": lambda lines: (" ".join(line.split()) for line in lines if line.strip()),
    "joined": lambda lines: [" ".join(line.strip() for line in lines if line.strip())],
}
OWN: dict[str, type] = {  # settings that a runner reads itself; others are the run's and checked with it
    "study.sent_back": bool, "study.positional": bool, "study.share": float, "study.shuffles": int, "study.order": int,
    "study.central_epochs": int, "study.samples": int, "study.rounds": int, "study.top": int, "study.blanks": str,
    "study.across": bool, "study.shuffled": bool, "study.rows": str, "study.carry": str, "study.personal": str,
    "study.tokens": float, "study.rungs": list,
}  # fmt: skip
RUNNER_NEEDS = {"toy": ("study.sent_back",), "explore": ("data.name",), TRIAL: ("study.tokens",)}
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
HEAD: dict[str, Any] = {  # of a study's file; [kind] is a list of that kind
    "title": str, "paper": str, "about": str, "measures": [str], "axis": dict, "grid": [dict], "scale": dict,
    "notes": [str], "targets": [float], "curves": bool, "plots": [dict], "base": dict, "when": [dict],
    "published": dict, "searched": [dict], "claims": [dict], "search": dict,
}  # fmt: skip
WHEN = {"where": dict, "set": dict}
SCALE = {"seeds": [int], "why": str, "set": dict, "keep": dict, "fewer": [dict]}
FEWER = {"where": dict, "seeds": [int]}
SEARCHED = {"where": dict, "trials": int, "tokens": float, "record": str}
CLAIM = {
    "says": str, "kind": str, "of": dict, "than": dict, "measure": str, "within": float, "bound": float, "front": bool,
    "ours": bool, "some": bool, "name": str, "cause": [str], "about": str, "twice": dict,
}  # fmt: skip
PLOT = {"name": str, "kind": str, "measure": str, "title": str, "series": [str], "panel": [str], "where": dict}


def target_measure(target: float) -> str:
    """What the rounds to a validation perplexity are called."""
    return f"rounds_to_{target:g}"


def published_labels(key: str) -> list[str]:
    """The labels of a printed row; none for a value that is printed for every row.

    Example:
      >>> published_labels("PTB | 0.1")
      ['PTB', '0.1']
    """
    return [part.strip() for part in key.split("|")] if key else []


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
      front: whether the front page of the results says it although it is ours; a paper's claims all stand there.
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
      rung: of a search, up to which a trial is to train; no part of what it is.
    """

    study: str
    runner: str
    labels: Labels
    settings: Settings
    seed: int
    scale: str
    absent: str = ""
    rung: int = 0

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
    search: SearchPlan | None = None

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
            if study.search is not None and int(labels[TRIAL]) > study.search.rungs[scale][0].trials:
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
    if study.search is not None:
        draws = [draw for draw in study.search.draws if matches(labels, draw.where)]
        settings |= study.search.drawn(int(labels[TRIAL]), draws, scale.name)
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


class StudyCheck:
    """The check of a study's file: a mistake is one line that names the file and what was expected."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.axes: Mapping[str, Any] = {}

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {why}")

    def known(self, keys: Iterable[Any], names: Iterable[str], what: str) -> None:
        """Refuse a name that is not among those there are."""
        names = list(names)
        for key in keys:
            if key not in names:
                self.refuse(f'{what} "{key}" is not known{nearest(str(key), names)}; one of {", ".join(names)}')

    def expect(self, value: Any, kind: Any, what: str) -> None:
        """Refuse a value of another kind; a whole number is a number, true, false, inf and nan are none."""
        if isinstance(kind, list):
            self.expect(value, list, what)
            for number, member in enumerate(value, 1):
                self.expect(member, kind[0], f"entry {number} of {what}")
            return
        fits = isinstance(value, (int, float) if kind is float else kind) and (
            not isinstance(value, bool) or kind is bool
        )
        if not fits or (kind is float and not abs(value) <= sys.float_info.max):
            self.refuse(f"{what} is {value!r}; expected {WORDS[kind]}")

    def above(self, value: float, least: float, what: str) -> None:
        if value <= least:
            self.refuse(f"{what} is {value}; expected a number above {least}")

    def table(self, table: Any, kinds: Mapping[str, Any], needed: int, what: str, *, dotted: bool = False) -> None:
        """Check a table's keys, of which the first `needed` must be there, and the kinds of their values."""
        self.expect(table, dict, what)
        self.known(table, kinds, f"key of {what}")
        first = list(kinds)[:needed]
        for key in first:
            if key not in table:
                self.refuse(f"{key} is missing in {what}; it needs {', '.join(first)}")
        for key, value in table.items():
            self.expect(value, kinds[key], f"{what}.{key}" if dotted else f"{key} of {what}")

    def labels(self, labels: Mapping[str, Any], what: str, axes: Mapping[str, Any] | None = None) -> None:
        """Labels by axis, one or several on each."""
        axes = self.axes if axes is None else axes
        self.known(labels, axes, f"axis of {what}")
        for axis, label in labels.items():
            self.known(label if isinstance(label, list) else [label], axes[axis], f"{axis} of {what}")

    def document(self, document: Mapping[str, Any]) -> None:
        """Refuse a document that is not of a study's shape, or names what it does not have."""
        self.known(document, HEAD, "key")
        for key in list(HEAD)[:7]:
            if key not in document:
                self.refuse(f"{key} is missing; a study needs {', '.join(list(HEAD)[:7])}")
        for key, value in document.items():
            self.expect(value, HEAD[key], key)
        self.axes = document["axis"]
        for axis, labels in self.axes.items():
            self.expect(labels, dict, f"axis.{axis}")
            for label, settings in labels.items():
                self.expect(settings, dict, f"axis.{axis}.{label}")
        for entry in document.get("when", ()):
            self.table(entry, WHEN, 2, "a [[when]]")
            self.labels(entry["where"], "a [[when]]", {**self.axes, "scale": SCALES})
        for grid in document["grid"]:
            self.known(grid, (*self.axes, "runner", "scales"), "axis of a grid")
            self.known([grid.get("runner", "train")], RUNNERS, "runner")
            for axis, names in {"scales": SCALES, **self.axes}.items():
                self.expect(grid.get(axis, []), [str], f"{axis} of a grid")
                self.known(grid.get(axis, []), names, "scale of a grid" if axis == "scales" else f"{axis} of a grid")
        self.known(document["scale"], SCALES, "scale")
        for name, table in document["scale"].items():
            self._scale(table, f"scale.{name}")
        for measure, table in document.get("published", {}).items():
            self._published(table, f"published.{measure}")
        for entry in document.get("searched", ()):
            self.table(entry, SEARCHED, 4, "a [[searched]]")
            self.labels(entry["where"], "a [[searched]]")
            for key in ("trials", "tokens"):
                self.above(entry[key], 0, f"{key} of a [[searched]]")
        if "search" in document:
            self.table(document["search"], SEARCH, 4, "search", dotted=True)
            for entry in document["search"]["draws"]:
                self.table(entry, DRAW, 1, "a draw of [search]")
                self.labels(entry["where"], "a draw of [search]")
        targets = map(target_measure, document.get("targets", ()))
        measured = dict.fromkeys((*document["measures"], *document.get("published", {}), *targets, *MEASURES, *OF_RUN))
        for claim in document.get("claims", ()):
            self._claim(claim)
            self.known([claim.get("measure", "perplexity")], measured, "measure of a claim")
        for plot in document.get("plots", ()):
            self._plot(plot)

    def _scale(self, table: Any, what: str) -> None:
        self.table(table, SCALE, 2, what, dotted=True)
        self._seeds(table["seeds"], f"{what}.seeds")
        for axis, labels in table.get("keep", {}).items():
            self.expect(labels, [str], f"{what}.keep.{axis}")
        self.labels(table.get("keep", {}), f"{what}.keep")
        for entry in table.get("fewer", ()):
            self.table(entry, FEWER, 2, f"{what}.fewer")
            self.labels(entry["where"], f"{what}.fewer")
            self._seeds(entry["seeds"], f"seeds of {what}.fewer")

    def _seeds(self, seeds: Sequence[int], what: str) -> None:
        if not seeds:
            self.refuse(f"{what} is empty; expected at least one seed")

    def _published(self, table: Any, what: str) -> None:
        """Check `axes = ["data", "C"]` and `"PTB | 0.1" = 138.13`."""
        self.expect(table, dict, what)
        if "axes" not in table:
            self.refuse(f'axes is missing in {what}; it needs axes = ["…"] and a number for each row')
        own = table["axes"]
        self.expect(own, [str], f"axes of {what}")
        self.known(own, self.axes, f"axis of {what}")
        for key, value in table.items():
            if key != "axes":
                self.expect(value, float, f'"{key}" of {what}')
                self.above(value, 0, f'"{key}" of {what}')
                labels = published_labels(key)
                if len(labels) != len(own):
                    self.refuse(f'published "{key}" has {len(labels)} labels; expected {" | ".join(own)}')
                self.labels(dict(zip(own, labels, strict=True)), "a published value")

    def _claim(self, table: Any) -> None:
        self.table(table, CLAIM, 3, "a claim")
        kind = table["kind"]
        self.known([kind], CLAIMS, "kind of a claim")
        self.known([table.get("about", "budget")], ABOUT, "about of a claim")
        if not table["says"].strip():
            self.refuse("says of a claim is empty; expected a sentence")
        for key in ("of", "than", "twice"):
            self.labels(table.get(key, {}), "a claim")
            for axis, label in table.get(key, {}).items() if key != "of" else ():  # one row is compared with one
                self.expect(label, str, f"{axis} of {key} of a claim")
        claim = f'a claim of kind {kind}: "{table["says"]}"'
        if kind in AGAINST and not table.get("than"):
            self.refuse(f"than is missing in {claim}; give it the labels to compare with")
        if (table.get("about") == "reach") != bool(table.get("twice")):
            self.refuse(
                f'about = "reach" and twice go together in {claim}; give twice the labels of the runs with twice the '
                "rounds, or leave both out"
            )
        if kind in BOUNDED:
            if "bound" not in table:
                self.refuse(f"bound is missing in {claim}; give it one")
            self.above(table["bound"], -1 if kind == "costs" else 0, f"bound of {claim}")
        if table.get("within", 0) < 0:
            self.refuse(f"within is {table['within']} in {claim}; expected 0 or more, a share of one")

    def _plot(self, table: Any) -> None:
        kind = table.get("kind")
        by_axes = kind not in ("terms", "curves")
        self.table(table, {**PLOT, "x": [str] if by_axes else str}, 3, "a plot")
        self.known([kind], PLOTS, "kind of a plot")
        for key in ("series", "panel"):
            self.known(table.get(key, []), self.axes, "axis of a plot")
        self.labels(table.get("where", {}), "a plot")
        if kind == "terms":
            self.known([table["measure"]], TERMS, "measure of a plot of terms")
        elif kind == "curves":
            by = table.get("x", "round")
            self.known([by], ("round", *BY), "x of a plot of curves")
            self.known([table["measure"]], PLACES if by in BY else CURVE, f"measure of a plot by {by}")
        else:
            if not table.get("x"):
                self.refuse(f'x is missing in a plot of kind {kind}; name axes, x = ["…"]')
            self.known(table["x"], self.axes, "axis of a plot")

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that a runner reads itself and could not, and options that no method has."""
        options = {option for method in METHODS for option in method_options(method)} | {"name"}
        own = [key.removeprefix("method.") for key in settings if key.startswith("method.")]
        self.known(own, options, "option")
        for key in OWN.keys() & settings.keys():
            self.expect(settings[key], OWN[key], key)
            if OWN[key] in (int, float):
                self.above(settings[key], 0, key)
        self.known([settings.get("study.rows", "by number")], ["by number"], "study.rows")
        self.known([settings.get("study.carry", "embedding")], ["embedding"], "study.carry")
        self.known([settings.get("study.blanks", "stripped")], BLANKS, "study.blanks")

    def cell(self, cell: Cell) -> None:
        """Refuse a cell without a setting that its runner cannot do without."""
        for key in RUNNER_NEEDS.get(cell.runner, ()):
            if key not in cell.settings and not cell.absent:
                labels = ", ".join(cell.labels.values())
                self.refuse(f"{labels} has no {key}; cells of runner {cell.runner} need it")


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
    checked = StudyCheck(path.name)
    document = with_winners(document, path)
    checked.document(document)
    document, search = with_trials(document, path.name, lambda settings: _flat(settings, path))
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
        search=search,
    )
    tables = [study.base, *(s for values in study.axes.values() for s in values.values())]
    tables += [more for _, more in study.when] + [scale.settings for scale in study.scales.values()]
    for table in tables:
        checked.settings(table)
    for scale in study.scales:
        for cell in cells_of(study, scale):
            checked.cell(cell)
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
