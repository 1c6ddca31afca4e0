"""Running one cell of a study: an ordinary run, the code-faithful variant, count models, the slides' toy, a first look.

A cell's result is a small JSON object: what was measured, the curve by round (thinned), and what made it. No path of
the machine is in it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import keyfed
from keyfed.config.load import Config
from keyfed.errors import FolderInUse
from keyfed.lab.experiment.curves import training_curves
from keyfed.lab.experiment.grid import Cell, Settings
from keyfed.lab.experiment.workspace import Bench, Patient, config_of, options_of, pinned_section
from keyfed.lab.papers.fedatt_code import positional_unigram, train_faithfully
from keyfed.lab.papers.nextchar_notebook import train_across
from keyfed.run.folder import open_folder, read_metrics, read_result, read_run_toml, refuse_changes, strict
from keyfed.run.loop import train
from keyfed.run.metrics_line import read_curves
from keyfed.run.prepare import prepare, round_tokens, usual_members
from keyfed.run.result import score_baselines
from keyfed.text.vocab import Vocab

POINTS = 25  # of a curve that are kept


def run_cell(
    cell: Cell, bench: Bench, targets: Sequence[float], listen: Patient, curves: bool = False
) -> dict[str, Any]:
    """Run a cell and return its result; with `curves` one that trains keeps those of its local batches and epochs.

    Raises:
      KeyfedError: its data or files are not at hand, or it makes no sense.
      KeyboardInterrupt: what was checkpointed is kept; the same cell goes on from there.
    """
    match cell.runner:
        case "train":
            found = _trained(cell, bench, listen, curves)
        case "code-faithful":
            config = config_of(cell.settings, cell.seed, bench)
            share = float(cell.settings.get("study.share", 1.0))
            shuffles = int(cell.settings.get("study.shuffles", 10))
            folder = bench.work / cell.study / Path(cell.file).stem
            if cell.settings.get("study.positional"):
                found = positional_unigram(config, shuffles, share)
            elif cell.settings.get("study.across"):
                mixed = bool(cell.settings.get("study.shuffled"))
                found = train_across(config, bench.prepared(config), mixed, listen, folder)
                found["precision"] = config.train.precision
            else:
                found = train_faithfully(config, shuffles, listen, share, folder)
                found["precision"] = config.train.precision
            shutil.rmtree(folder, ignore_errors=True)
        case "n-gram":
            found = _counted(cell, bench)
        case "toy":
            from keyfed.lab.papers.gboard_toy import run_toy

            found = run_toy(cell.settings, cell.seed)
        case _:
            from keyfed.lab.experiment.explore import explore_cell

            found = explore_cell(cell.settings, bench.data_dir)
    return dict(strict(_result(cell, bench, found, targets)))


def _trained(cell: Cell, bench: Bench, listen: Patient, curves: bool) -> dict[str, Any]:
    """An ordinary run in a folder that goes again once its result is known."""
    config = config_of(cell.settings, cell.seed, bench)
    if curves:
        config = replace(config, train=replace(config.train, curves=True))
    first = {k.removeprefix("first."): v for k, v in cell.settings.items() if k.startswith("first.")}
    hashes: dict[str, Any] = {}
    before = _first_run(first, cell.seed, bench, listen) if first else None
    renamed = None
    prepared = bench.prepared(config)
    if before is not None:
        hashes["first_data_sha256"] = read_run_toml(before)[1]["data_sha256"]
        if cell.settings.get("study.rows") == "by number":
            before = renamed = _renamed(before, prepared.vocab, bench.work / "first" / f"{before.name}-{cell.id}")
        unmatched = pinned_section("train").get("unmatched", config.train.unmatched)
        config = replace(config, train=replace(config.train, init=str(before), unmatched=unmatched))
    budget, passes = None, 1
    if "study.central_epochs" in cell.settings:  # central training reads what a cohort reads in so many epochs
        members, passes = usual_members(config, len(prepared.store)), int(cell.settings["study.central_epochs"])
        budget = round_tokens(prepared, members, passes)
    folder = bench.work / cell.study / Path(cell.file).stem
    result = train(config, folder, resume=True, listener=listen, prepared=prepared, budget=budget)
    _, made = read_run_toml(folder)
    records = read_metrics(folder)
    if config.vectors.file is not None:
        hashes["vectors_sha256"] = _sha256(Path(config.vectors.file), made["vectors_sha256"])
    if "train.init" in cell.settings and "init_sha256" in made:  # a name, behind which other weights may lie one day
        hashes["init_sha256"] = made["init_sha256"]
    training = training_curves(read_curves(folder), passes) if curves else None
    shutil.rmtree(folder)
    if renamed is not None:
        shutil.rmtree(renamed)  # this cell's own copy; the run itself stays for others
    return {
        **result, **hashes, "records": records, "data_sha256": made["data_sha256"],
        "precision": config.train.precision,
        "train_tokens": int(prepared.store.sizes().sum()), "training": training,
    }  # fmt: skip


def _sha256(path: Path, folder: str) -> str:
    """Of a file as any tool says it; of a folder the run's own, over the names too."""
    if path.is_dir():
        return folder
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_run(settings: Settings, seed: int, bench: Bench, listen: Patient) -> Path:
    """Train the run that others start from, once for all of them; it stays. If another process does, wait for it."""
    name = hashlib.sha256(json.dumps([dict(settings), seed], sort_keys=True).encode()).hexdigest()[:12]
    folder = bench.work / "first" / name
    config = config_of(settings, seed, bench)
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


def _counted(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Count models of everybody's text: `study.order` 1 is the unigram, else Kneser–Ney."""
    config = config_of(cell.settings, cell.seed, bench)
    prepared = bench.prepared(config)
    order = int(cell.settings.get("study.order", 5))
    scores = score_baselines(prepared, max(2, order))
    chosen = scores["unigram" if order == 1 else "kneser_ney"]
    return {
        **chosen, "records": [], "data": prepared.corpus.name, "data_sha256": prepared.corpus.fingerprint(),
        "vocabulary": len(prepared.vocab), "clients": len(prepared.store), "method": f"{order}-gram",
        "tokens_trained": int(prepared.store.sizes().sum()),
    }  # fmt: skip


MEASURES = ("perplexity", "nats", "top1", "top3", "top1_words", "top3_words", "sentence_perplexity",
            "sentence_top1", "sentence_top1_words", "sentence_top3_words", "honest_sentence_perplexity",
            "honest_nats", "oov_rate")  # fmt: skip
OF_RUN = ("unseen_perplexity", "train_nats")  # measures beside those of the test
FACTS = ("data", "data_sha256", "vectors_sha256", "first_data_sha256", "init_sha256", "method", "model", "clients",
         "cohort", "parameters", "vocabulary", "rounds", "best_round", "tokens_trained", "train_tokens", "precision",
         "shuffles", "facts")  # fmt: skip


def _result(cell: Cell, bench: Bench, found: Mapping[str, Any], targets: Sequence[float]) -> dict[str, Any]:
    test = found.get("test") or {}
    records = found["records"]
    measures = {key: test[key] for key in MEASURES if key in test}
    if found.get("unseen"):
        measures["unseen_perplexity"] = found["unseen"]["perplexity"]
    for target in targets if records else ():
        measures[target_measure(target)] = rounds_to(records, target)
    if records and "loss" in records[-1]:
        measures["train_nats"] = records[-1]["loss"]
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
        "curve": thin([point(r) for r in records]),
        **({"training": found["training"]} if found.get("training") else {}),
        "seconds": found.get("seconds"),
        "made": made_on(bench.where()),
    }


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


def target_measure(target: float) -> str:
    """What the rounds to a validation perplexity are called."""
    return f"rounds_to_{target:g}"


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
        "keyfed": keyfed.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})",
    }
