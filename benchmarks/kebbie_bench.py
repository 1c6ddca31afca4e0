"""kebbie, a public benchmark of keyboards, on ours: next word, completion, correction and swipes of held-out messages.

    python benchmarks/kebbie_bench.py [RUN] [--sentences 2000] [--valid] [--write]

RUN is a run with counts, or `base` (the default). Each model types the same messages: the counts alone, the network
alone, both mixed, and both with what the device learnt from its owner's earlier messages. The decoder is the page's, in
node. `--valid` takes validation text, to try things on; without it the test text is read: do that with the models
fixed. `--write` writes docs/results/data/kebbie.json and docs/keyboard-benchmark.md.

kebbie pins old packages, so it lives in a virtual environment of its own, `--venv`, made here at the first run. It
would fetch a table of frequent typos; a small one of ours (kebbie_typos.json) is put in its place.

Upper and lower case count as the same: messages are typed in lower case, and answers compared in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.keyboard import compact
from keyfed.keyboard.dictionary import lists_of
from keyfed.keyboard.export import written_forms
from keyfed.keyboard.keys import layout_of
from keyfed.keyboard.measure import words_in
from keyfed.keyboard.session import Decoder, Slot, Source, source_of
from keyfed.reports.document import markdown_table
from keyfed.reports.finished import corpus_of
from keyfed.run import base
from keyfed.run.folder import Trained, load_model
from keyfed.run.prepare import Prepared

HERE = Path(__file__).parent
TYPOS = HERE / "kebbie_typos.json"
DATA = HERE.parent / "docs" / "results" / "data" / "kebbie.json"
PAGE = HERE.parent / "docs" / "keyboard-benchmark.md"
PACKAGES = ("kebbie==0.5.1", "numpy==1.26.4", "pyarrow==20.0.0", "pandas==2.2.3", "datasets==3.6.0")
SENTENCES, SEED = 2_000, 42
LINES = 5  # of one person
LEAST_WORDS = 3  # of a sentence
TASKS = (
    ("next word, first", "next_word_prediction", "accuracy"),
    ("first three", "next_word_prediction", "top3_accuracy"),
    ("completion, first", "auto_completion", "accuracy"),
    ("first three", "auto_completion", "top3_accuracy"),
    ("correction, F", "auto_correction", "fscore"),
    ("precision", "auto_correction", "precision"),
    ("recall", "auto_correction", "recall"),
    ("swipe, first", "swipe_resolution", "accuracy"),
    ("first three", "swipe_resolution", "top3_accuracy"),
)


@dataclass(frozen=True)
class Message:
    """A held-out message, and what its writer wrote before."""

    text: str
    earlier: tuple[str, ...]


def messages(prepared: Prepared, count: int, *, valid: bool) -> list[Message]:
    """Draw people by a fixed seed and take their first held-out messages of three words or more."""
    people = [c for c in prepared.population.trained if (c.valid if valid else c.test)]
    found: list[Message] = []
    for at in np.random.default_rng([SEED, len(people)]).permutation(len(people)):
        person = people[int(at)]
        lines = [line.lower() for line in (person.valid if valid else person.test)]
        kept = [line for line in lines if len(words_in(line)) >= LEAST_WORDS][:LINES]
        found += [Message(line, (*person.train, *(() if valid else person.valid))) for line in kept]
        if len(found) >= count:
            break
    return found[:count]


def environment(folder: Path) -> Path:
    """Return the python of kebbie's environment, which is made where it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / "made").write_text("\n".join(PACKAGES))
    return python


@dataclass
class Typist:
    """Answers kebbie's questions with the page's decoder."""

    keyboard: Decoder
    messages: Sequence[Message]
    learns: bool
    place: Any = None  # from kebbie's points to key widths
    at: int = -1
    corrected: bool = True  # whether the word at the start of a message was typed already
    slots: list[str] = field(default_factory=list)

    def answer(self, task: str, context: str, points: list[Any], word: str) -> list[str]:
        if task == "layout":
            self.place = _placing(word, points)
            return []
        if not context and self.corrected:
            self._begin()
        taps = [None if point is None else self.place(point) for point in points]
        if task == "swipe":
            return [slot.text.lower() for slot in self.keyboard.gesture(context, [tap for tap in taps if tap])]
        strip = self.keyboard.suggest(context + word, taps)
        left, middle, right = strip.slots
        shown = [slot for slot in (middle, left, right) if slot is not None]
        if task == "correct":
            self.corrected = True
            return _unlike([strip.correction or word, *(slot.text for slot in shown)])
        return _unlike([slot.text for slot in shown if not _is_typed(slot, word)])

    def finished(self) -> None:
        """Check that as many messages were typed as there are: else devices had learnt from other people's."""
        if self.at != len(self.messages) - 1:
            raise SystemExit(f"kebbie typed {self.at + 1} messages of {len(self.messages)}: the figures are of no use")

    def _begin(self) -> None:
        """The next message: the device of another person."""
        self.at, self.corrected = self.at + 1, False
        if not self.learns:
            return
        self.keyboard.forget_all()
        earlier = self.messages[self.at].earlier
        self.keyboard.learn([(word, line[:start]) for line in earlier for start, word in words_in(line)])


def _is_typed(slot: Slot, word: str) -> bool:
    return slot.kind == "literal" or slot.text.lower() == word.lower()


def _unlike(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(word.lower() for word in words))


def _placing(letters: str, centres: list[Any]) -> Any:
    """Return the map from kebbie's points to key widths, by least squares over the letters' centres."""
    layout = layout_of("qwerty")
    mine = np.array([layout.centre(c) for c in letters])
    theirs = np.array(centres)
    fitted = [np.polyfit(theirs[:, axis], mine[:, axis], 1) for axis in (0, 1)]
    return lambda point: tuple(float(np.polyval(line, value)) for line, value in zip(fitted, point, strict=True))


def typed(python: Path, typist: Typist) -> dict[str, Any]:
    """Let kebbie type all messages; return its result."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        cache = home / ".cache" / "common_typos"
        cache.mkdir(parents=True)
        (cache / "en.json").write_bytes(TYPOS.read_bytes())
        (home / "sentences.json").write_text(json.dumps([message.text for message in typist.messages]), "utf-8")
        (asked, requests), (answers, said) = os.pipe(), os.pipe()
        command = [python, HERE / "kebbie_runner.py", requests, answers, home / "sentences.json", home / "result.json"]
        process = subprocess.Popen(
            list(map(str, command)),
            pass_fds=(requests, answers),
            env={**os.environ, "HOME": temporary},
            stderr=subprocess.DEVNULL,
        )
        os.close(requests)
        os.close(answers)
        with open(asked, "rb") as lines, open(said, "wb") as back:
            for line in lines:
                back.write(json.dumps(typist.answer(**json.loads(line))).encode() + b"\n")
                back.flush()
        if process.wait():
            raise SystemExit("kebbie has ended with an error; run kebbie_runner.py by hand to see it")
        typist.finished()
        return dict(json.loads((home / "result.json").read_text("utf-8")))


def models(trained: Trained, packaged: base.Base | None) -> Iterator[tuple[str, Source, bool]]:
    """Yield names, sources of scores, and whether the device learns."""
    lines, size = trained.reads_lines, len(trained.vocab)
    if packaged is not None:
        assert packaged.counts is not None, "the base model of this installation has no counts"
        found = compact.unpack(packaged.counts, size, base.COUNTS)
    else:
        counted = compact.read_counts(trained.folder, size, private=trained.config.privacy.on)
        found = compact.unpack(compact.pack(counted, compact.read_mixture(trained.folder)), size, "counts")
    network = source_of(trained)
    mixture = compact.mixture_source(network, found, lines=lines)
    yield f"counts, k = {found.terms.k}", compact.counts_source(found, lines=lines), False
    yield "network", network, False
    yield "mixture", mixture, False
    yield "mixture + what the device learnt", mixture, True


def page(measured: dict[str, Any]) -> str:
    """Return the page."""
    head = ["", *(name for name, _, _ in TASKS)]
    rows = [
        [name, *(f"{100 * result[task]['score'][figure]:.1f} %" for _, task, figure in TASKS)]
        for name, result in measured["rows"].items()
    ]
    first = next(iter(measured["rows"].values()))
    asked = {task: first[task]["score"]["n"] for _, task, _ in TASKS}
    return "\n\n".join(
        (
            "<!-- Written by benchmarks/kebbie_bench.py --write; do not edit. -->",
            "# A public benchmark of keyboards",
            f"[kebbie](https://pypi.org/project/kebbie) {measured['kebbie']} types {measured['sentences']:,} held-out "
            f"messages of `{measured['data']}` ({measured['split']} text), with slips of its own noise model, and asks "
            f"the page's decoder through a pipe: {asked['next_word_prediction']:,} next words, "
            f"{asked['auto_completion']:,} completions, {asked['auto_correction']:,} corrections, "
            f"{asked['swipe_resolution']:,} swipes. The messages are the same in every row.",
            markdown_table([head, *rows], numbers=True),
            f"Model: `{measured['run']}`. kebbie rounds to two digits. Upper and lower case count as the same. A "
            "message begins in an empty field, and kebbie leaves marks out. The device of the last row has learnt "
            "from its owner's earlier messages.",
            "**kebbie's own published table is of other text**, dialogues and stories that a language model wrote, so "
            "its figures and these cannot be compared. Its table of frequent typos would be fetched; "
            f"{measured['typos']} words with typos of our own (`benchmarks/kebbie_typos.json`) stand in its place. One "
            "seed; kebbie swipes one word in a hundred, so the swipes are few.",
            *([measured["note"]] if "note" in measured else []),
            f"    python benchmarks/kebbie_bench.py {measured['run']} --sentences {measured['sentences']} --write\n",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("base"), help="a run with counts, or base")
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--valid", action="store_true", help="type validation text")
    parser.add_argument("--only", type=int, help="type with this model only, counted from 0")
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "keyfed" / "kebbie", help="for kebbie")
    parser.add_argument(
        "--write", action="store_true", help="write the figures and the page; with --only, next to those of before"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    packaged = base.load_base() if base.is_base(options.run) else None
    trained = load_model(options.run) if packaged is None else packaged.trained
    prepared = corpus_of(trained, text=True)
    forms = written_forms((c.train for c in prepared.population.trained), trained.vocab)
    lists = lists_of(trained.vocab, prepared, packaged)
    chosen = messages(prepared, options.sentences, valid=options.valid)
    python = environment(options.venv)
    rows = {}
    for number, (name, source, learns) in enumerate(models(trained, packaged)):
        if options.only not in (None, number):
            continue
        print(f"typing on {name}", file=sys.stderr)
        settings = {"emoji": False, "learn": False}
        with Decoder(trained.vocab, source, forms=forms, settings=settings, lists=lists) as keyboard:
            rows[name] = typed(python, Typist(keyboard, chosen, learns))
        for task, figure in dict.fromkeys((task, figure) for _, task, figure in TASKS):
            print(f"  {task:<22} {figure:<14} {rows[name][task]['score'][figure]:.3f}")
    measured = {
        "run": str(options.run) if packaged is not None else options.run.name,
        "data": prepared.corpus.name, "split": "validation" if options.valid else "test", "sentences": len(chosen),
        "kebbie": PACKAGES[0].partition("==")[2], "seed": SEED, "typos": len(json.loads(TYPOS.read_text("utf-8"))),
        "rows": {
            name: {task: {"score": result[task]["score"]} for _, task, _ in TASKS} for name, result in rows.items()
        },
    }  # fmt: skip
    if options.write:
        if options.only is not None and DATA.exists():
            before = json.loads(DATA.read_text("utf-8"))
            if {**before, "rows": 0} == {**measured, "rows": 0}:
                merged = {**before["rows"], **measured["rows"]}
                order = [name for name, _, _ in models(trained, packaged)]
                measured["rows"] = {name: merged[name] for name in sorted(merged, key=order.index)}
        DATA.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(measured), "utf-8")


if __name__ == "__main__":
    main()
