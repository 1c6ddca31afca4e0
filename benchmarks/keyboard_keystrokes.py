"""What a keystroke and a new word cost the keyboard without a browser (`--help` says how).

The model is a CIFG of Gboard's size (96/670, tied, 10,000 words) with random weights, or that of a run or of `base`. It
runs in PyTorch on one thread; the page's decoder runs in node behind a pipe, with the dictionary that an export has.
Text is typed character by character: a keystroke inside a word ranks scores that are there, one that ends a word reads
one token. Wall and CPU milliseconds (of both processes) go from the text left of the cursor to the finished strip;
swipes, too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from keyfed.config.load import Config, ModelConfig
from keyfed.engine.network import init_params, parameter_count
from keyfed.keyboard.dictionary import Lists, english, lists_of
from keyfed.keyboard.keys import layout_of
from keyfed.keyboard.measure import swipe
from keyfed.keyboard.session import Decoder, keyboard_of
from keyfed.run import base
from keyfed.run.folder import Trained, load_model
from keyfed.run.prepare import build_network
from keyfed.text.vocab import SPECIALS, Vocab

WORDS, TYPED, SWIPES = 10_000, 400, 100
ONSETS = (*"bcdfghlmnprstvw", "st", "tr", "pl", "ch", "sh", "th", "br", "cr", "fl", "gr")
VOWELS = (*"aeiou", "ea", "ou", "ai")


def made_up_words(n: int, seed: int = 1) -> list[str]:
    """Return n different words of one to four syllables, so that the trie is about as bushy as English."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < n:
        syllables = [draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(draw.choice((1, 2, 2, 3, 3, 4)))]
        found["".join(syllables) + draw.choice(("", "n", "s", "r", "t", "d", "ng"))] = None
    return list(found)


def random_model(folder: Path) -> Trained:
    """Return the CIFG of the sources with random weights over made-up words."""
    config = Config(model=ModelConfig("cifg"))
    vocab = Vocab("word", (*SPECIALS, *made_up_words(WORDS - len(SPECIALS))), lower=True, tokenised=False)
    spec = build_network(config, len(vocab), None)
    return Trained(folder, config, "none", spec, init_params(spec, 1), vocab)


def timed(board: Decoder, act: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3 + board.cpu_ms


def type_text(board: Decoder, text: str) -> dict[str, list[tuple[float, float]]]:
    """Type a text and return the times of keystrokes inside words and of those that begin a new word."""
    times: dict[str, list[tuple[float, float]]] = {"keystroke": [], "new word": []}
    for end in range(1, len(text) + 1):
        before = text[:end]
        kind = "new word" if before[-1] == " " else "keystroke"
        times[kind].append(timed(board, lambda shown=before: board.suggest(shown)))
    return times


def swipe_words(board: Decoder, words: list[str]) -> list[tuple[float, float]]:
    """Return the times of decoding swipes that follow the words' keys."""
    board.gesture("", [(0.5, 0.5), (3.5, 0.5)])  # the paths of all words are made once
    draw = np.random.default_rng(3)
    swipes = [swipe(w, layout_of("qwerty"), draw) for w in words]
    return [timed(board, lambda points=points: board.gesture("", points)) for points in swipes]


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    """Return the percentiles of wall times and the median and mean of CPU times."""
    wall, cpu = np.array(times).T
    at = {f"p{q}_ms": float(np.percentile(wall, q)) for q in (50, 95, 99)}
    return {**at, "cpu_p50_ms": float(np.median(cpu)), "cpu_mean_ms": float(cpu.mean()), "n": len(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", nargs="?", type=Path, help="run folder, or base; without it random weights and made-up words"
    )
    parser.add_argument("--words", type=int, default=TYPED, help="words typed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    packaged = base.load_base() if options.run and base.is_base(options.run) else None
    if options.run is None:
        trained, lists = random_model(Path(".")), Lists(english()[0])
    else:
        trained = load_model(options.run) if packaged is None else packaged.trained
        lists = lists_of(trained.vocab, None, packaged)
    board = keyboard_of(trained, lists=lists)
    draw = random.Random(2)
    known = [w for w in trained.vocab.words[len(SPECIALS) :] if w.isalpha() and len(set(w)) > 1]
    text = " ".join(draw.choice(known) for _ in range(options.words)) + " "
    type_text(board, text[:40])  # warm-up
    times = {**type_text(board, text), "swipe": swipe_words(board, known[:SWIPES])}
    found = {
        "parameters": parameter_count(trained.spec),
        "vocabulary": len(trained.vocab),
        "dictionary": len(lists.dictionary),
        "decoder": f"node {board.version}",
        **{what: summary(of) for what, of in times.items()},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
