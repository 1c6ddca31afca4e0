"""What a study's file may name, and its check: a mistake is one line that names the file and what was expected."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keyfed.errors import ConfigError, nearest
from keyfed.federated.methods import METHODS, method_options

Table = Mapping[str, Any]
SCALES = ("smoke", "standard", "paper")
RUNNERS = ("train", "code-faithful", "n-gram", "toy", "explore")
CLAIMS = ("lower", "higher", "close", "costs", "printed", "below")
BOUNDED = ("below", "costs")  # kinds of claims that need a bound
ABOUT = ("budget", "reach", "text")
MEASURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words", "sentence_perplexity",
            "sentence_top1", "sentence_top1_words", "sentence_top3_words", "honest_sentence_perplexity",
            "honest_nats", "oov_rate")  # fmt: skip
OF_RUN = ("unseen_perplexity", "train_nats")  # measures beside those of the test
BY = ("batch", "epoch")  # what curves of training are drawn by, beside the round
PLACES = {"train_nats": 1, "train_top1": 2}  # measures of training in a point by batch or epoch
BLANKS: dict[str, Callable[[Iterable[str]], Iterable[str]]] = {  # readings of a text's white space
    "runs as one": lambda lines: (re.sub(" +", " ", line) for line in lines),
    "stripped": lambda lines: (line.strip() for line in lines),
    "no blank lines": lambda lines: (line.strip() for line in lines if line.strip()),
    "collapsed": lambda lines: (" ".join(line.split()) for line in lines if line.strip()),
}
HEAD = ("title", "paper", "about", "measures", "notes", "targets", "curves", "plots", "base", "axis", "when", "grid",
        "scale", "published", "searched", "claims")  # fmt: skip
NEEDED = ("title", "paper", "about", "measures", "axis", "grid", "scale")
CURVE = {"train_nats": 1, "perplexity": 2, "nats": 2, "top1": 3, "accuracy": 3}  # places in a point of a curve by round
PLOTS = ("bars", "lines", "curves", "terms")
TERMS = ("unigrams", "bigrams")  # what a plot of terms counts
OWN: dict[str, type] = {  # settings that a runner reads itself; others are the run's and checked with it
    "study.sent_back": bool, "study.positional": bool, "study.share": float, "study.shuffles": int, "study.order": int,
    "study.central_epochs": int, "study.samples": int, "study.rounds": int, "study.top": int, "study.blanks": str,
    "study.across": bool, "study.shuffled": bool, "study.rows": str,
}  # fmt: skip
RUNNER_NEEDS = {"toy": ("study.sent_back",), "explore": ("data.name",)}
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}


def target_measure(target: float) -> str:
    """What the rounds to a validation perplexity are called."""
    return f"rounds_to_{target:g}"


def check_document(document: Table, where: str) -> None:
    """Refuse a document that is not of a study's shape, or names what it does not have."""
    known(document, HEAD, where, "key")
    for key in NEEDED:
        if key not in document:
            raise ConfigError(f"{where}: {key} is missing; a study needs {', '.join(NEEDED)}")
    for key in ("title", "paper", "about"):
        expect(document[key], str, where, key)
    _list(document["measures"], str, where, "measures")
    _list(document.get("notes", []), str, where, "notes")
    _list(document.get("targets", []), float, where, "targets")
    expect(document.get("curves", False), bool, where, "curves")
    expect(document.get("base", {}), dict, where, "base")
    axes = expect(document["axis"], dict, where, "axis")
    for axis, labels in axes.items():
        for label, settings in expect(labels, dict, where, f"axis.{axis}").items():
            expect(settings, dict, where, f"axis.{axis}.{label}")
    for entry in _list(document.get("when", []), dict, where, "when"):
        _keys(entry, ("where", "set"), (), where, "a [[when]]")
        expect(entry["set"], dict, where, "set of a [[when]]")
        _labels(_table(entry, "where", where), {**axes, "scale": SCALES}, where, "a [[when]]")
    for grid in _list(document["grid"], dict, where, "grid"):
        known(grid, (*axes, "runner", "scales"), where, "axis of a grid")
        known([grid.get("runner", "train")], RUNNERS, where, "runner")
        known(_list(grid.get("scales", []), str, where, "scales of a grid"), SCALES, where, "scale of a grid")
        for axis in grid.keys() & axes.keys():
            known(_list(grid[axis], str, where, f"{axis} of a grid"), axes[axis], where, f"{axis} of a grid")
    known(expect(document["scale"], dict, where, "scale"), SCALES, where, "scale")
    for name, table in document["scale"].items():
        _scale(expect(table, dict, where, f"scale.{name}"), axes, where, f"scale.{name}")
    for measure, table in expect(document.get("published", {}), dict, where, "published").items():
        _published(expect(table, dict, where, f"published.{measure}"), axes, where, f"published.{measure}")
    for entry in _list(document.get("searched", []), dict, where, "searched"):
        _searched(entry, axes, where)
    for claim in _list(document.get("claims", []), dict, where, "claims"):
        _claim(claim, axes, where)
        _claimed_measure(claim.get("measure", "perplexity"), document, where)
    for plot in _list(document.get("plots", []), dict, where, "plots"):
        _plot(plot, axes, where)


def check_settings(settings: Table, where: str) -> None:
    """Refuse settings that a runner reads itself and could not, and options that no method has."""
    options = {option for method in METHODS for option in method_options(method)} | {"name"}
    known([key.removeprefix("method.") for key in settings if key.startswith("method.")], options, where, "option")
    for key, kind in OWN.items():
        if key in settings:
            value = expect(settings[key], kind, where, key)
            if kind in (int, float):
                _above(value, 0, where, key)
    known([settings.get("study.rows", "by number")], ["by number"], where, "study.rows")
    if "study.blanks" in settings:
        known([settings["study.blanks"]], BLANKS, where, "study.blanks")


def check_runner(runner: str, settings: Table, labels: Table, where: str) -> None:
    """Refuse a cell without a setting that its runner cannot do without."""
    for key in RUNNER_NEEDS.get(runner, ()):
        if key not in settings:
            raise ConfigError(f"{where}: {', '.join(labels.values())} has no {key}; cells of runner {runner} need it")


def known(keys: Iterable[Any], names: Iterable[str], where: str, what: str) -> None:
    """Refuse a name that is not among those there are."""
    names = list(names)
    for key in keys:
        if key not in names:
            raise ConfigError(
                f'{where}: {what} "{key}" is not known{nearest(str(key), names)}; one of {", ".join(names)}'
            )


def expect(value: Any, kind: type, where: str, what: str) -> Any:
    """Return a value of the kind that is expected; a whole number is a number, true, false, inf and nan are none."""
    kinds = (int, float) if kind is float else (kind,)
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or kind is bool)
    if not fits or (kind is float and not abs(value) <= sys.float_info.max):
        raise ConfigError(f"{where}: {what} is {value!r}; expected {WORDS[kind]}")
    return value


def _above(value: float, least: float, where: str, what: str) -> None:
    if value <= least:
        raise ConfigError(f"{where}: {what} is {value}; expected a number above {least}")


def _list(value: Any, kind: type, where: str, what: str) -> list[Any]:
    expect(value, list, where, what)
    for number, member in enumerate(value, 1):
        expect(member, kind, where, f"entry {number} of {what}")
    return list(value)


def _table(table: Table, key: str, where: str) -> dict[str, Any]:
    return dict(expect(table.get(key, {}), dict, where, key))


def _keys(table: Table, needed: Sequence[str], more: Sequence[str], where: str, what: str) -> None:
    known(table, (*needed, *more), where, f"key of {what}")
    for key in needed:
        if key not in table:
            raise ConfigError(f"{where}: {key} is missing in {what}; it needs {', '.join(needed)}")


def _labels(labels: Table, axes: Table, where: str, what: str) -> None:
    """Labels by axis, one or several on each."""
    known(labels, axes, where, f"axis of {what}")
    for axis, label in labels.items():
        known(label if isinstance(label, list) else [label], axes[axis], where, f"{axis} of {what}")


def _seeds(value: Any, where: str, what: str) -> None:
    if not _list(value, int, where, what):
        raise ConfigError(f"{where}: {what} is empty; expected at least one seed")


def _scale(table: Table, axes: Table, where: str, what: str) -> None:
    _keys(table, ("seeds", "why"), ("set", "keep", "fewer"), where, what)
    _seeds(table["seeds"], where, f"{what}.seeds")
    expect(table["why"], str, where, f"{what}.why")
    expect(table.get("set", {}), dict, where, f"{what}.set")
    keep = _table(table, "keep", where)
    for axis, labels in keep.items():
        _list(labels, str, where, f"{what}.keep.{axis}")
    _labels(keep, axes, where, f"{what}.keep")
    for entry in _list(table.get("fewer", []), dict, where, f"{what}.fewer"):
        _keys(entry, ("where", "seeds"), (), where, f"{what}.fewer")
        _labels(_table(entry, "where", where), axes, where, f"{what}.fewer")
        _seeds(entry["seeds"], where, f"seeds of {what}.fewer")


def _published(table: Table, axes: Table, where: str, what: str) -> None:
    """Check `axes = ["data", "C"]` and `"PTB | 0.1" = 138.13`."""
    if "axes" not in table:
        raise ConfigError(f'{where}: axes is missing in {what}; it needs axes = ["…"] and a number for each row')
    own = _list(table["axes"], str, where, f"axes of {what}")
    known(own, axes, where, f"axis of {what}")
    for key, value in table.items():
        if key != "axes":
            _above(expect(value, float, where, f'"{key}" of {what}'), 0, where, f'"{key}" of {what}')
            labels = published_labels(key)
            if len(labels) != len(own):
                raise ConfigError(f'{where}: published "{key}" has {len(labels)} labels; expected {" | ".join(own)}')
            _labels(dict(zip(own, labels, strict=True)), axes, where, "a published value")


def published_labels(key: str) -> list[str]:
    """The labels of a printed row; none for a value that is printed for every row.

    Example:
      >>> published_labels("PTB | 0.1")
      ['PTB', '0.1']
    """
    return [part.strip() for part in key.split("|")] if key else []


CLAIM: dict[str, type] = {
    "says": str, "kind": str, "of": dict, "than": dict, "measure": str, "within": float, "bound": float, "front": bool,
    "ours": bool, "some": bool, "name": str, "cause": list, "about": str, "twice": dict,
}  # fmt: skip

AGAINST = ("lower", "higher", "close", "costs")  # kinds that compare rows with rows


def _claim(table: Table, axes: Table, where: str) -> None:
    _keys(table, ("says", "kind", "of"), tuple(CLAIM), where, "a claim")
    known([table["kind"]], CLAIMS, where, "kind of a claim")
    for key, value in table.items():
        expect(value, CLAIM[key], where, f"{key} of a claim")
    _list(table.get("cause", []), str, where, "cause of a claim")
    if not table["says"].strip():
        raise ConfigError(f"{where}: says of a claim is empty; expected a sentence")
    for key in ("of", "than", "twice"):
        _labels(_table(table, key, where), axes, where, "a claim")
    for key in ("than", "twice"):  # one row is compared with one
        for axis, label in _table(table, key, where).items():
            expect(label, str, where, f"{axis} of {key} of a claim")
    known([table.get("about", "budget")], ABOUT, where, "about of a claim")
    kind, claim = table["kind"], f'a claim of kind {table["kind"]}: "{table["says"]}"'
    if kind in AGAINST and not table.get("than"):
        raise ConfigError(f"{where}: than is missing in {claim}; give it the labels to compare with")
    if (table.get("about") == "reach") != bool(table.get("twice")):
        raise ConfigError(
            f'{where}: about = "reach" and twice go together in {claim}; give twice the labels of the runs with twice '
            "the rounds, or leave both out"
        )
    if kind in BOUNDED:
        if "bound" not in table:
            raise ConfigError(f"{where}: bound is missing in {claim}; give it one")
        _above(table["bound"], -1 if kind == "costs" else 0, where, f"bound of {claim}")
    if table.get("within", 0) < 0:
        raise ConfigError(f"{where}: within is {table['within']} in {claim}; expected 0 or more, a share of one")


SEARCHED: dict[str, type] = {"where": dict, "trials": int, "tokens": float, "record": str}


def _searched(table: Table, axes: Table, where: str) -> None:
    _keys(table, tuple(SEARCHED), (), where, "a [[searched]]")
    for key, kind in SEARCHED.items():
        expect(table[key], kind, where, f"{key} of a [[searched]]")
    _labels(_table(table, "where", where), axes, where, "a [[searched]]")
    for key in ("trials", "tokens"):
        _above(table[key], 0, where, f"{key} of a [[searched]]")


def _claimed_measure(measure: str, document: Table, where: str) -> None:
    """Refuse a claim about what no cell of the study measures: it would stay open for ever."""
    of_study = (
        *document["measures"],
        *document.get("published", {}),
        *map(target_measure, document.get("targets", ())),
    )
    known([measure], dict.fromkeys((*of_study, *MEASURES, *OF_RUN)), where, "measure of a claim")


def _plot(table: Table, axes: Table, where: str) -> None:
    _keys(table, ("name", "kind", "measure"), ("x", "series", "panel", "where", "title"), where, "a plot")
    for key in ("name", "kind", "measure", "title"):
        expect(table.get(key, ""), str, where, f"{key} of a plot")
    known([table["kind"]], PLOTS, where, "kind of a plot")
    for key in ("series", "panel"):
        known(_list(table.get(key, []), str, where, f"{key} of a plot"), axes, where, "axis of a plot")
    _labels(_table(table, "where", where), axes, where, "a plot")
    if table["kind"] == "terms":
        known([table["measure"]], TERMS, where, "measure of a plot of terms")
    elif table["kind"] == "curves":
        by = table.get("x", "round")
        known([by], ("round", *BY), where, "x of a plot of curves")
        known([table["measure"]], PLACES if by in BY else CURVE, where, f"measure of a plot by {by}")
    else:
        if not table.get("x"):
            raise ConfigError(f'{where}: x is missing in a plot of kind {table["kind"]}; name axes, x = ["…"]')
        known(_list(table["x"], str, where, "x of a plot"), axes, where, "axis of a plot")
