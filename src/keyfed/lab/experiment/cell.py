"""One cell of a study: the configuration that its settings make, its run, and its result.

A cell's defaults are not the program's but those of `defaults.toml`, which do not change: a better default of
`keyfed train` neither opens a finished cell nor changes what an open one computes. A runner is an ordinary run, the
code-faithful variant, a count model, the slides' toy or a first look at a text. The result is a small JSON object: what
was measured, the curve by round (thinned), and what made it. No path of the machine is in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import statistics
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from keyfed import __version__
from keyfed.config.load import PARTS, SECTIONS, Config, check, set_value, to_document
from keyfed.config.schema import coerce, hints_of
from keyfed.engine.module import MakeModule
from keyfed.errors import DataError, FolderInUse
from keyfed.federated.components import KINDS, part_options
from keyfed.federated.methods import METHODS, method_options, tuned_options, unread_options
from keyfed.federated.types import Method
from keyfed.lab.experiment.grid import BLANKS, MEASURES, Cell, Settings, target_measure
from keyfed.lab.experiment.search import TRIAL
from keyfed.lab.papers import positional_unigram, run_toy, train_across, train_faithfully
from keyfed.model.language_model import PRESETS
from keyfed.reports.finished import personal_figures
from keyfed.run.console import Listener, within
from keyfed.run.folder import open_folder, read_metrics, read_result, read_run_toml, refuse_changes, strict
from keyfed.run.loop import train
from keyfed.run.metrics_line import attention_of, read_curves, training_curves
from keyfed.run.prepare import Prepared, prepare, round_tokens, usual_members
from keyfed.run.result import score_baselines
from keyfed.text.catalogue import load_corpus
from keyfed.text.explore import character_statistics, explore
from keyfed.text.vocab import Vocab

LATE = 100  # rounds at the end of a run whose validations are averaged
OWN = ("study.", "first.")  # settings that are not the run's
WITH_METHOD = ("train", "code-faithful", TRIAL)  # runners that train with a method
DEFAULTS = Path(__file__).with_name("defaults.toml")
MOMENT = 1.0  # seconds between two looks at what another process does
ASLEEP = ("vectors", "privacy", "secure")  # sections that nothing reads unless a cell sets something of them


class TimeIsUp(KeyboardInterrupt):
    """The minutes are spent: a run ends as at Ctrl-C, with its checkpoint written."""


class Paused(Exception):
    """A run has trained as long as it should for now; its folder can be resumed from its last checkpoint."""


class PausedThere(KeyboardInterrupt):
    """The same, and the run ends as at Ctrl-C: with a checkpoint of its last round."""


class CellListener:
    """Passes a cell's progress on, and ends the cell when its time is up or its rounds are enough for now.

    After the last round nothing is stopped: what is left, the test, takes less than the rounds that would be lost where
    there is no checkpoint.

    Args:
      title: what is shown in place of a run's own title, which stands where it has `{}`.
      known: lines that are not said again; None: no line is passed on.
      until: `time.monotonic()` at which to end; None for never.
      rounds: after which to pause, at the first validation; None for all.
      pause: what is raised then.
    """

    def __init__(
        self,
        listener: Listener,
        title: str = "{}",
        known: Iterable[str] | None = (),
        *,
        until: float | None = None,
        rounds: int | None = None,
        pause: type[BaseException] = Paused,
    ) -> None:
        self._listener, self._title, self._until, self._pause = listener, title, until, rounds
        self._pausing = pause
        self._known = None if known is None else frozenset(known)
        self._rounds, self._why = 0, ""

    def say(self, line: str) -> None:
        """Pass a line on."""
        if self._known is not None and line not in self._known:
            self._listener.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Pass a beginning on, under the cell's title."""
        self._rounds = rounds
        self._listener.start(self._title.replace("{}", what), min(rounds, self._pause or rounds), done)

    def within(self, what: str) -> None:
        """Pass on what a round is doing."""
        within(self._listener, what)

    def round(self, record: dict[str, Any]) -> None:
        """Pass a round on; raise if another one is to come and it is time to end or to pause."""
        self._listener.round(record)
        if record["round"] < self._rounds:
            self.check()
            if self._pause is not None and record["round"] >= self._pause and record.get("valid"):
                raise self._pausing

    def check(self) -> None:
        """Raise if the time is up."""
        if self._until is not None and time.monotonic() >= self._until:
            raise TimeIsUp

    def wait(self, why: str) -> None:
        """Say why, unless that was said last, and let a moment pass; raise if the time is up."""
        self.check()
        if why != self._why:
            self._why = why
            self.say(why)
        time.sleep(MOMENT)


@dataclass(slots=True)
class Workspace:
    """Where cells run, and the text that was prepared last: cells of one data set share it.

    Attributes:
      data_dir: folder of the corpora known by name; None for KEYFED_DATA.
      work: folder for the runs while they train.
      precision: of products on a GPU, bf16 where it is None and the study has none.
    """

    work: Path
    device: str = "auto"
    data_dir: str | None = None
    precision: str | None = None
    _key: str = ""
    _prepared: Prepared | None = field(default=None, repr=False)

    def prepared(self, config: Config) -> Prepared:
        """The corpus for a configuration; the last one again where data, model and seed are the same."""
        parts = (config.data, config.model, config.train.seed, config.train.test_tokens)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key != self._key or self._prepared is None:
            self._prepared, self._key = None, ""  # the old one goes before the new one comes
            self._prepared, self._key = prepare(config), key
        return self._prepared

    def where(self) -> str:
        """The device that `auto` stands for."""
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def pinned() -> Mapping[str, Mapping[str, Any]]:
    """The defaults that cells are made with, as their file has them."""
    return tomllib.loads(DEFAULTS.read_text("utf-8"))


def pinned_section(section: str) -> dict[str, Any]:
    """The pinned values of a section, of those options that the program has."""
    return {key: value for key, value in pinned().get(section, {}).items() if key in hints_of(SECTIONS[section])}


def pinned_options(settings: Settings) -> dict[str, Any]:
    """The pinned options of a cell's method, as `method.key`, and of the parts that it exchanges, as `mediator.key`."""
    method, model = str(settings.get("method.name", "fedavg")), str(settings.get("model.name", "cifg"))
    own = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("method.")}
    characters = model in PRESETS and PRESETS[model].characters
    tuned = tuned_options(method, own, characters=characters, table=pinned().get("characters", {}))
    options = {**pinned().get("method", {}).get(method, {}), **tuned}
    out = {f"method.{key}": value for key, value in options.items() if key in method_options(method)}
    for kind in PARTS:
        part = str(settings.get(f"{kind}.name"))
        if part in KINDS[kind]:
            defaults = pinned().get(kind, {}).get(part, {})
            out |= {f"{kind}.{key}": value for key, value in defaults.items() if key in part_options(kind, part)}
    return {**out, **{key: value for key, value in settings.items() if key in out}}


def _unread(settings: Settings) -> set[str]:
    """Options that an exchanged part reads in the method's place."""
    method = str(settings.get("method.name", "fedavg"))
    kinds = [kind for kind in PARTS if settings.get(f"{kind}.name") in KINDS[kind]]
    return {f"method.{key}" for kind in kinds for key in unread_options(method, kind)} - settings.keys()


def config_of(settings: Settings, seed: int, workspace: Workspace) -> Config:
    """Build a run's configuration; options of `method` that the cell's method does not have are others'."""
    method = str(settings.get("method.name", "fedavg"))
    options = method_options(method)
    config = Config(method=method)
    wanted = {key: value for key, value in settings.items() if not key.startswith(OWN) and key != "method.name"}
    awake = [name for name in SECTIONS if name not in ASLEEP or any(key.startswith(f"{name}.") for key in wanted)]
    before = {f"{name}.{key}": value for name in awake for key, value in pinned_section(name).items()}
    if "train.init" not in wanted:
        before.pop("train.unmatched", None)
    unread = _unread(settings)
    before |= {key: value for key, value in pinned_options(settings).items() if key not in unread}
    wanted = {**before, **wanted}
    for key in sorted(wanted, key=lambda key: (not key.endswith(".name"), key)):
        section, _, name = key.partition(".")
        if section != "method" or name in options:
            config = set_value(config, key, wanted[key])
    changed: dict[str, Any] = {"seed": seed, "device": workspace.device}
    if workspace.where() != "cpu" and "train.precision" not in settings:
        changed["precision"] = workspace.precision or "bf16"
    config = replace(config, train=replace(config.train, **changed))
    if "data.batches" not in settings:  # cells were measured with streams, of chat too
        config = replace(config, data=replace(config.data, batches="stream"))
    if workspace.data_dir is not None:
        config = replace(config, data=replace(config.data, dir=workspace.data_dir))
    return check(_with_vectors(config, workspace))


def options_of(runner: str, settings: Settings) -> dict[str, Any]:
    """Every option that a cell's method has, defaults too: they are no settings, and change what is computed.

    An option that is newer than the pinned defaults is left out, unless a setting of the cell is about it. Options of
    an exchanged part are `mediator.…` and `server.…`, those of the run that this one starts from `first.…`; nothing for
    a runner without a method.
    """
    if runner not in WITH_METHOD or settings.get("study.positional"):
        return {}
    first = {k.removeprefix("first."): v for k, v in settings.items() if k.startswith("first.")}
    of_first = {f"first.{key}": value for key, value in _resolved(first).items()} if first else {}
    return {**_resolved(settings), **of_first}


def _resolved(settings: Settings) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key.split(".")[0] in ("method", "model", *PARTS)}
    return dict(_resolve(json.dumps(kept, sort_keys=True)))


@functools.cache  # the same few for hundreds of cells
def _resolve(text: str) -> Mapping[str, Any]:
    settings = json.loads(text)
    document = to_document(config_of(settings, 1, Workspace(Path(), "cpu")))
    own = {f"method.{key}": value for key, value in document["method"].items() if key != "name"}
    own |= {f"{kind}.{key}": v for kind in PARTS for key, v in document.get(kind, {}).items()}
    known, hints = pinned_options(settings), hints_of(METHODS[str(document["method"]["name"])])
    for key in _unread(settings) & known.keys():
        own[key] = coerce(known[key], hints[key.removeprefix("method.")], key)
    own = {key: value for key, value in own.items() if key in known or key in settings or not _is_newer(key, document)}
    return {key.removeprefix("method."): value for key, value in own.items()}


def _is_newer(key: str, document: Mapping[str, Any]) -> bool:
    """Tell whether an option was added to a method, or to a part, after its defaults were pinned."""
    kind, _, name = key.partition(".")
    return name != "name" and document[kind]["name"] in pinned().get(kind, {})


def _with_vectors(config: Config, workspace: Workspace) -> Config:
    """Look for a file of word vectors in the data folder, where the study names it relative to that."""
    file = config.vectors.file
    if file is None or Path(file).is_absolute():
        return config
    root = Path(workspace.data_dir or os.environ.get("KEYFED_DATA") or "~/.cache/keyfed").expanduser()
    if not (root / file).exists():
        raise DataError(f"word vectors {file} are not in the data folder; put them there")
    return replace(config, vectors=replace(config.vectors, file=str(root / file)))


ENTROPIES = ("unigram_entropy", "bigram_entropy", "unigram_accuracy", "bigram_accuracy", "characters", "types", "lines")


def explore_cell(settings: Settings, data_dir: str | None) -> dict[str, Any]:
    """Count the top words, word pairs and characters of `data.name`; `study.top` of each are kept."""
    began = time.monotonic()
    name, top = str(settings["data.name"]), int(settings.get("study.top", 20))
    corpus = load_corpus(name, data_dir=None if data_dir is None else Path(data_dir))
    made: dict[str, Any] = {"records": [], "data": name, "data_sha256": corpus.fingerprint()}
    if "study.blanks" in settings:  # other readings of the same text: the entropies alone
        lines = (line for author in corpus.authors for line in author.lines)
        counted: Any = character_statistics(BLANKS[str(settings["study.blanks"])](lines))
    else:
        tables, _ = explore(corpus, top=top)
        found: Any = tables
        counted = found.get("characters", {})
        made["facts"] = {key: found[key] for key in ("lines", "tokens", "types")} | {
            key: [[row["term"], row["count"]] for row in found[key]] for key in ("unigrams", "bigrams")
        }
    measures = {key: counted[key] for key in ENTROPIES if key in counted}
    return {**made, "measures": measures, "seconds": time.monotonic() - began}


POINTS = 25  # of a curve that are kept


def run_cell(
    cell: Cell, workspace: Workspace, targets: Sequence[float], listen: CellListener, curves: bool = False
) -> dict[str, Any]:
    """Run a cell and return its result; with `curves` one that trains keeps those of its local batches and epochs.

    Raises:
      KeyfedError: its data or files are not at hand, or it makes no sense.
      KeyboardInterrupt: what was checkpointed is kept; the same cell goes on from there.
    """
    match cell.runner:
        case "train":
            found = _trained(cell, workspace, listen, curves)
        case "code-faithful":
            config = config_of(cell.settings, cell.seed, workspace)
            share = float(cell.settings.get("study.share", 1.0))
            shuffles = int(cell.settings.get("study.shuffles", 10))
            folder = workspace.work / cell.study / Path(cell.file).stem
            if cell.settings.get("study.positional"):
                found = positional_unigram(config, shuffles, share)
            elif cell.settings.get("study.across"):
                mixed = bool(cell.settings.get("study.shuffled"))
                found = train_across(config, workspace.prepared(config), mixed, listen, folder)
                found["precision"] = config.train.precision
            else:
                found = train_faithfully(config, shuffles, listen, share, folder)
                found["precision"] = config.train.precision
            shutil.rmtree(folder, ignore_errors=True)
        case "n-gram":
            found = _counted(cell, workspace)
        case "toy":
            found = run_toy(cell.settings, cell.seed)
        case _:
            found = explore_cell(cell.settings, workspace.data_dir)
    return dict(strict(result_of(cell, workspace, found, targets)))


def train_cell(
    config: Config,
    folder: Path,
    prepared: Prepared,
    listen: Listener,
    budget: int | None = None,
    *,
    module: MakeModule | None = None,
    method: Method | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train in a folder, go on there, or read what is finished: what cells of all experiments do.

    Returns:
      The run's result and its rounds.
    """
    result = train(
        config, folder, resume=True, listener=listen, prepared=prepared, budget=budget, module=module, method=method
    )
    return result, read_metrics(folder)


def _trained(cell: Cell, workspace: Workspace, listen: CellListener, curves: bool) -> dict[str, Any]:
    """An ordinary run in a folder that goes again once its result is known."""
    config = config_of(cell.settings, cell.seed, workspace)
    if curves:
        config = replace(config, train=replace(config.train, curves=True))
    first = {k.removeprefix("first."): v for k, v in cell.settings.items() if k.startswith("first.")}
    hashes: dict[str, Any] = {}
    before = _first_run(first, cell.seed, workspace, listen) if first else None
    renamed = None
    prepared = workspace.prepared(config)
    if before is not None:
        hashes["first_data_sha256"] = read_run_toml(before)[1]["data_sha256"]
        hashes |= {f"first_{key}": (read_result(before) or {}).get(key) for key in ("tokens_trained", "best_round")}
        if cell.settings.get("study.rows") == "by number":
            before = renamed = _renamed(before, prepared.vocab, workspace.work / "first" / f"{before.name}-{cell.id}")
        unmatched = pinned_section("train").get("unmatched", config.train.unmatched)
        carried = {"carry": cell.settings.get("study.carry", config.train.carry), "unmatched": unmatched}
        config = replace(config, train=replace(config.train, init=str(before), **carried))
    budget, passes = None, 1
    if "study.central_epochs" in cell.settings:  # central training reads what a cohort reads in so many epochs
        members, passes = usual_members(config, len(prepared.store)), int(cell.settings["study.central_epochs"])
        budget = round_tokens(prepared, members, passes)
    folder = workspace.work / cell.study / Path(cell.file).stem
    result, records = train_cell(config, folder, prepared, listen, budget)
    _, made = read_run_toml(folder)
    if config.vectors.file is not None:
        hashes["vectors_sha256"] = _sha256(Path(config.vectors.file), made["vectors_sha256"])
    if "train.init" in cell.settings and "init_sha256" in made:  # a name, behind which other weights may lie one day
        hashes["init_sha256"] = made["init_sha256"]
    training = training_curves(read_curves(folder), passes) if curves else None
    personal = personal_figures(folder, cell.settings.get("study.personal"), prepared)
    shutil.rmtree(folder)
    if renamed is not None:
        shutil.rmtree(renamed)  # this cell's own copy; the run itself stays for others
    return {
        **result, **hashes, "records": records, "data_sha256": made["data_sha256"],
        "precision": config.train.precision, "measures": personal,
        "train_tokens": int(prepared.store.sizes().sum()), "training": training,
    }  # fmt: skip


def _sha256(path: Path, folder: str) -> str:
    """Of a file as any tool says it; of a folder the run's own, over the names too."""
    if path.is_dir():
        return folder
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_run(settings: Settings, seed: int, workspace: Workspace, listen: CellListener) -> Path:
    """Train the run that others start from, once for all of them; it stays. If another process does, wait for it.

    Its seed is the cell's, unless `first.train.seed` is one for all: seeds then differ in what comes after it.
    """
    seed = int(settings.get("train.seed", seed))
    name = hashlib.sha256(json.dumps([dict(settings), seed], sort_keys=True).encode()).hexdigest()[:12]
    folder = workspace.work / "first" / name
    config = config_of(settings, seed, workspace)
    prepared = None
    while True:
        try:
            if _is_trained(folder, config):
                return folder
            if prepared is None:
                listen.say("first, the run that this one starts from")
                prepared = prepare(config)
            train(config, folder, resume=True, listener=listen, prepared=prepared)
            return folder
        except FolderInUse:
            listen.wait("another process trains it; waiting")


def _is_trained(folder: Path, config: Config) -> bool:
    """Tell whether a run is finished, without its corpus; refuse one of another configuration.

    Raises:
      FolderInUse: another process works on it.
    """
    if not (folder / "result.json").exists():
        return False
    with open_folder(folder, resume=True):
        refuse_changes(folder, config, str(read_run_toml(folder)[1].get("data_sha256", "")))
        return read_result(folder) is not None


def _renamed(run: Path, words: Vocab, folder: Path) -> Path:
    """Copy a run and give every row of its vocabulary the word of the same number in another one.

    Rows carried by these words are rows copied by their number: a defect, kept to show what it does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = Vocab.from_json((run / "vocab.json").read_text("utf-8"))
    rest = [f"<{number}>" for number in range(len(words), len(old))]  # rows without a word there
    renamed = replace(old, words=(*words.words[: len(old)], *rest))
    for file in ("run.toml", "model.safetensors"):
        shutil.copyfile(run / file, folder / file)
    (folder / "vocab.json").write_text(renamed.to_json(), "utf-8")
    return folder


def _counted(cell: Cell, workspace: Workspace) -> dict[str, Any]:
    """Count models of everybody's text: `study.order` 1 is the unigram, else Kneser–Ney."""
    config = config_of(cell.settings, cell.seed, workspace)
    prepared = workspace.prepared(config)
    order = int(cell.settings.get("study.order", 5))
    scores = score_baselines(prepared, max(2, order))
    chosen = scores["unigram" if order == 1 else "kneser_ney"]
    return {
        **chosen, "records": [], "data": prepared.corpus.name, "data_sha256": prepared.corpus.fingerprint(),
        "vocabulary": len(prepared.vocab), "clients": len(prepared.store), "method": f"{order}-gram",
        "tokens_trained": int(prepared.store.sizes().sum()),
    }  # fmt: skip


FACTS = ("data", "data_sha256", "vectors_sha256", "first_data_sha256", "first_tokens_trained", "first_best_round",
         "init_sha256", "method", "model", "clients",
         "cohort", "parameters", "vocabulary", "rounds", "best_round", "tokens_trained", "train_tokens", "precision",
         "shuffles", "facts", "rungs", "whole")  # fmt: skip


def result_of(cell: Cell, workspace: Workspace, found: Mapping[str, Any], targets: Sequence[float]) -> dict[str, Any]:
    """A cell's result as its file has it, made of what its runner has found."""
    test = found.get("test") or {}
    records = found["records"]
    measures = {key: test[key] for key in MEASURES if key in test}
    if found.get("unseen"):
        measures["unseen_perplexity"] = found["unseen"]["perplexity"]
    for target in targets if records else ():
        measures[target_measure(target)] = rounds_to(records, target)
    if records and "loss" in records[-1]:
        measures["train_nats"] = records[-1]["loss"]
    measures |= late_accuracy(records) | attention_of(records)
    measures |= found.get("measures", {})
    options = options_of(cell.runner, cell.settings)
    return {
        "study": cell.study,
        "id": cell.id,
        "scale": cell.scale,
        "runner": cell.runner,
        "labels": dict(cell.labels),
        "seed": cell.seed,
        "settings": dict(cell.settings),
        **({"options": options} if options else {}),
        "measures": measures,
        **{key: found[key] for key in FACTS if key in found},
        "curve": thin([point(r) for r in _with_start(found)]),
        **({"training": found["training"]} if found.get("training") else {}),
        "seconds": found.get("seconds"),
        "made": made_on(workspace.where()),
    }


def _with_start(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rounds, and the model before the first as round 0 where it was validated (`train.eval_start`)."""
    before = (found.get("start") or {}).get("valid")
    return [*([{"round": 0, "valid": before}] if before else ()), *found["records"]]


def point(record: Mapping[str, Any]) -> list[Any]:
    """A round as [round, training nats, validation perplexity, validation top-1], to five digits."""
    valid = record.get("valid") or {}
    numbers = (record.get("loss"), valid.get("perplexity"), valid.get("top1"))
    return [record["round"], *(None if n is None else float(f"{n:.5g}") for n in numbers)]


def thin(points: Sequence[list[Any]], most: int = POINTS) -> list[list[Any]]:
    """Keep the first, the last and evenly spaced points between; those with a validation figure where there are any.

    Example:
      >>> [p[0] for p in thin([[r, 1.0, 2.0, 0.1] for r in range(1, 101)], 4)]
      [1, 34, 67, 100]
    """
    points = [p for p in points if p[2] is not None] or list(points)
    if len(points) <= most:
        return list(points)
    chosen = sorted({round(k * (len(points) - 1) / (most - 1)) for k in range(most)})
    return [points[k] for k in chosen]


def rounds_to(records: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """The first round whose validation perplexity is at most the target."""
    for record in records:
        value = (record.get("valid") or {}).get("perplexity")
        if value is not None and value <= target:
            return int(record["round"])
    return None


def made_on(device: str) -> dict[str, str]:
    """Versions and hardware, without a name of the machine."""
    gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "keyfed": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})",
    }


def late_accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return mean validation accuracies of the last 100 rounds (Pretraining, Table 3); of all where fewer were run.

    Example:
      >>> late_accuracy([{"round": r, "valid": {"top1": r / 800, "top1_words": 0.0}} for r in (100, 150, 250)])
      {'late_top1': 0.3125, 'late_top1_words': 0.0}
    """
    last = max((r["round"] for r in records), default=0)
    found = [r["valid"] for r in records if r.get("valid") and r["round"] > last - LATE]
    keys = [key for key in ("top1", "top1_words") if found and all(v.get(key) is not None for v in found)]
    return {f"late_{key}": statistics.fmean(v[key] for v in found) for key in keys}
