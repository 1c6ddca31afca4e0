"""The keyboard on everyday sentences and words (keyboard_everyday.json): what it knows, guesses, saves, mends, spoils.

    python benchmarks/keyboard_everyday.py [RUN] [--trial | --tuning] [--source network] [--json | --write]

RUN is a run, an exported keyboard, or `base` (the default). The model is the exported one, in eight bits; the decoder
is the page's, in node. `--trial` types the other forty sentences, and their words in place of the kept ones. Try
things on those, and on the kept ones only when a model has been chosen. `--tuning` types more of that kind, from
keyboard_tuning.json, which was written for the choice of the decoder's numbers. The file says how each figure is
counted, and the noise of taps, swipes and slips. `--write` keeps the figures of the base model on that text in
docs/results/data/keyboard-everyday.json and writes the table of docs/keyboard.md; other columns stay as they were.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from keyboard_browser import exported
from stored import Stored, about, load

from keyfed.engine.network import reader_of
from keyfed.keyboard import bundle
from keyfed.keyboard.compact import counts_source, page_source, unpack
from keyfed.keyboard.keys import fold, layout_of
from keyfed.keyboard.measure import KeystrokeClock, has_path, swipe, type_lines, words_in
from keyfed.keyboard.session import Decoder, NetworkSource, Source
from keyfed.reports.document import markdown_table
from keyfed.run.base import is_base

FILE = Path(__file__).with_suffix(".json")
TUNING = FILE.with_name("keyboard_tuning.json")
BARS = {  # what the keyboard is to reach, as shares
    "next word in three": ("at least", 0.25),
    "keys saved": ("at least", 0.45),
    "everyday words known": ("at least", 0.99),
    "proper words replaced": ("at most", 0.005),
    "slips mended": ("at least", 0.80),
    "swipes of known words right at first": ("at least", 0.90),
}


COLUMNS = {  # of the table: what the base model typed
    "before": "trial, before the dictionary",
    "trial": "trial",
    "tuning": "more text to tune on",
    "kept": "kept",
}


def keyboard_on(folder: Path, which: str = "federated") -> Decoder:
    """Return the decoder over an export's model, as the page has it; `network` and `ngram` are its halves."""
    manifest = bundle.check_bundle(folder)
    params = {name: torch.from_numpy(np.array(value)) for name, value in bundle.load_weights(folder).items()}
    vocab, forms = bundle.load_vocab(folder)
    lines = manifest["reading"] == "lines"
    source: Source = NetworkSource(reader_of(bundle.spec_of(manifest), params), lines=lines)
    if manifest["ngram"] and which != "network":
        found = unpack((folder / bundle.NGRAM).read_bytes(), len(vocab), str(folder / bundle.NGRAM))
        source = counts_source(found, lines=lines) if which == "ngram" else page_source(source, found, lines=lines)
    return Decoder(vocab, source, forms=forms, settings={"learn": False}, lists=bundle.load_lists(folder))


def measure(keyboard: Decoder, everyday: dict[str, Any], sentences: list[str], words: list[str]) -> dict[str, Any]:
    """Type all of it; return the counts behind each figure, (of, all)."""
    rng = np.random.default_rng(everyday["noise"]["seed"])
    layout = layout_of(everyday["noise"]["layout"])
    counts = type_lines(keyboard, sentences, rng, KeystrokeClock())
    contexts = everyday["contexts"]
    known = keyboard.knows(words)
    replaced = []
    for context in contexts:
        for word in words:
            made = keyboard.suggest(context + word).correction
            if made is not None and fold(made) != fold(word):
                replaced.append(f"{context}{word} → {made}")
    swiped = [word for word, is_known in zip(words, known, strict=True) if is_known and has_path(word, layout)]
    first = [keyboard.gesture(contexts[0], swipe(word, layout, rng))[:1] for word in swiped]
    right = sum(bool(best) and fold(best[0].text) == fold(word) for word, best in zip(swiped, first, strict=True))
    wrong = counts.wrong_known + counts.wrong_unknown + len(replaced)
    return {
        "figures": {
            "next word in three": (counts.top3, counts.words),
            "keys saved": (counts.characters - counts.strokes, counts.characters),
            "everyday words known": (sum(known), len(words)),
            "proper words replaced": (wrong, counts.words + len(contexts) * len(words)),
            "slips mended": (counts.slips_mended, counts.slips),
            "swipes of known words right at first": (counts.swipes_first + right, counts.swiped + len(swiped)),
            "next word in the middle": (counts.top1, counts.words),
            "taps right": (counts.taps_right, counts.tapped),
        },
        "unknown": [word for word, is_known in zip(words, known, strict=True) if not is_known],
        "replaced": replaced,
    }


def reaches(name: str, share: float) -> bool:
    """Whether a figure is within its bar; one without a bar is."""
    wanted, bar = BARS.get(name, ("at least", 0.0))
    return share >= bar if wanted == "at least" else share <= bar


def share_of(counts: list[float]) -> float:
    """A share from its two counts, or the share alone where the counts are not kept."""
    return counts[0] / counts[1] if len(counts) == 2 else counts[0]


def cell(name: str, counts: list[float], *, judged: bool) -> str:
    """A share in per cent, with its counts where they are kept, and whether it misses its bar."""
    share = share_of(counts)
    both = len(counts) == 2
    text = f"{100 * share:.2f} % ({counts[0]:,} of {counts[1]:,})" if both else f"{100 * share:.1f} %"
    return text if not judged or reaches(name, share) else f"{text}: missed"


def tables(found: dict[str, Any]) -> str:
    """The table for docs/keyboard.md: a column for each text; the kept one is held against the bars."""
    columns = [name for name in COLUMNS if name in found]
    rows = [
        [
            name, *(cell(name, found[of]["figures"][name], judged=of == "kept") for of in columns),
            f"{'≥' if wanted == 'at least' else '≤'} {100 * bar:g} %",
        ]
        for name, (wanted, bar) in BARS.items()
    ]  # fmt: skip
    days = ["measured on", *(found[of]["date"] for of in columns), ""]
    notes = [f"{COLUMNS[of][0].upper()}{COLUMNS[of][1:]}: {found[of]['note']}" for of in columns if "note" in found[of]]
    text = markdown_table([["base model", *(COLUMNS[of] for of in columns), "wanted"], *rows, days], numbers=True)
    return "\n\n".join([text, *notes])


STORED = Stored("keyboard_everyday", "keyboard-everyday.json", "## On everyday sentences", tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("base"), help="a run, an exported keyboard, or base")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--trial", action="store_true", help="type the sentences that are there to try things on")
    text.add_argument("--tuning", action="store_true", help="type the text that the decoder's numbers were chosen on")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="keep the base model's figures; write docs/keyboard.md")
    parser.add_argument(
        "--source", choices=("federated", "network", "ngram"), default="federated", help="as on the page"
    )
    options = parser.parse_args()
    if options.write and (options.source != "federated" or not is_base(options.run)):
        print("error: --write keeps figures of the base model as the page has it: no RUN, no --source", file=sys.stderr)
        sys.exit(2)
    before = load()
    torch.set_num_threads(1)
    everyday = json.loads(FILE.read_text("utf-8"))
    sentences, words = [line for of in everyday["sentences"].values() for line in of], everyday["words"]
    if options.trial:
        sentences = everyday["trial"]
        words = sorted({fold(word) for line in sentences for _, word in words_in(line)})
    if options.tuning:
        more = json.loads(TUNING.read_text("utf-8"))
        sentences, words = [line for of in more["sentences"].values() for line in of], more["words"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = exported(options.run, Path(temporary))
        with keyboard_on(folder, options.source) as keyboard:
            found = measure(keyboard, everyday, sentences, words)
    found |= about(before)
    if options.write:
        kept = "trial" if options.trial else "tuning" if options.tuning else "kept"
        STORED.write({**(STORED.figures() or {}), kept: found})
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for name, (of, whole) in found["figures"].items():
        share = of / whole if whole else float("nan")
        wanted, bar = BARS.get(name, ("", None))
        said = "" if bar is None else f"   {wanted} {bar:.1%}: {'kept' if reaches(name, share) else 'not kept'}"
        print(f"{name:<38} {of:6,} of {whole:6,}  {share:6.1%}{said}")
    print(f"unknown: {' '.join(found['unknown'][:40])}{' …' if len(found['unknown']) > 40 else ''}")


if __name__ == "__main__":
    main()
