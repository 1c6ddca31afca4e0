"""From a run's counts to a dictionary for phones: `keyfed export RUN --phone`.

What goes into it is what the federation released: words and pairs of at least k clients, by the sum's estimate, with
their smoothed probabilities (`model.counts`). No text is read but for how words are written, where that is at hand and
the counts claim no ε: how words are written has no noise. The base model's counts come with the package; they are of
its own public chat.

It is written twice: as the text that AOSP's tools read and as the binary dictionary that keyboards import
(`keyboard.aosp`). What the words are of stands in the header that both have.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.errors import ConfigError, RunError
from keyfed.files import write_atomically
from keyfed.keyboard.aosp import WordList, to_binary, to_combined, word_list
from keyfed.keyboard.compact import read_counts, unpack
from keyfed.keyboard.export import text_at_hand, written_forms
from keyfed.model.counts import CountTerms
from keyfed.model.ngram import KneserNey
from keyfed.private.dp.ledger import read_ledger
from keyfed.run import base
from keyfed.run.console import human_bytes, plural
from keyfed.run.counts.noise import FOLDER
from keyfed.run.folder import Trained, load_model, read_result
from keyfed.text.vocab import SPECIALS

LOCALE = re.compile(r"[a-z]{2,3}(_[A-Z]{2})?")
OFFENSIVE = Path(__file__).parent / "web" / "data" / "offensive.json"


@dataclass(frozen=True, slots=True)
class Phone:
    """What was written, and how many words no dictionary can hold, by reason."""

    files: tuple[Path, ...]
    words: WordList
    terms: CountTerms
    unfit: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [str(path) for path in self.files],
            "about": dict(self.words.about),
            "words": len(self.words.words),
            "bigrams": len(self.words.first),
            "unfit": dict(self.unfit),
            "counts": asdict(self.terms),
            "notes": list(self.notes),
        }


def export_phone(run: Path, out: Path | None = None, locale: str = "en") -> Phone:
    """Write `keyfed_LOCALE.combined` and `keyfed_LOCALE.dict` to a folder, RUN/phone by default.

    Args:
      run: the run, or `base`.
      locale: of the words, as `en` or `en_GB`: the keyboard offers the dictionary for that language.

    Raises:
      ConfigError: no locale; the base model without a folder.
      RunError: a run of characters, or without counts.
      PrivacyError: a private run whose counts have no noise.
      DataError: what the dictionary's format cannot hold at all.
    """
    if LOCALE.fullmatch(locale) is None:
        raise ConfigError(f"--locale {locale}: expected a language, as en, or a language and a country, as en_GB")
    packaged = base.load_base() if base.is_base(run) else None
    if packaged is not None and out is None:
        raise ConfigError("the base model has no folder of its own to be exported to; give --out")
    trained = load_model(run) if packaged is None else packaged.trained
    if trained.vocab.kind != "word":
        raise RunError(f"{run} holds a model of characters; a phone's dictionary is of words")
    notes: list[str] = []
    raw_vocabulary = False
    if packaged is not None:
        if packaged.counts is None:
            raise RunError("the base model of this installation has no counts, and a dictionary is made of them")
        model, terms = unpack(packaged.counts, len(trained.vocab), f"the base model's {base.COUNTS}")[:2]
        forms, rounds = packaged.forms, packaged.manifest["training"]["best_round"]
    else:
        found = read_counts(run, len(trained.vocab), private=trained.config.privacy.on)
        model, terms = found.model, found.about
        forms, notes = _forms(trained, terms)
        raw_vocabulary = terms.epsilon is not None and read_ledger(run / FOLDER).terms.raw_vocabulary
        rounds = (read_result(run) or {}).get("best_round", trained.config.train.rounds)
    about = _about(trained.method, rounds, terms, locale, raw_vocabulary=raw_vocabulary)
    listed, unfit = _listed(model, trained.vocab.words, forms, about)
    target = out or run / "phone"
    if target.exists() and not target.is_dir():
        raise RunError(f"{target} is a file; expected a folder for the dictionary")
    files = {f"keyfed_{locale}.combined": to_combined(listed).encode(), f"keyfed_{locale}.dict": to_binary(listed)}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(target / name, data)
    except OSError as e:
        raise RunError(f"{target}: could not be written ({e.strerror or e}); choose another --out") from e
    return Phone(tuple(target / name for name in files), listed, terms, unfit, tuple(notes))


def phone_text(done: Phone) -> str:
    """What the terminal shows: where, how many words, what is left out and why."""
    text, binary = done.files
    lines = [
        f"{binary}: {len(done.words.words):,} words, {len(done.words.first):,} pairs, "
        f"{human_bytes(binary.stat().st_size)}; as text {text.name}",
        f"  {done.words.about['description']}",
    ]
    if done.unfit:
        reasons = ", ".join(f"{n:,} {why}" for why, n in sorted(done.unfit.items(), key=lambda item: -item[1]))
        lines.append(f"  left out, for a dictionary cannot hold them: {reasons}")
    return "\n".join([*lines, *(f"  {note}" for note in done.notes)])


def _forms(trained: Trained, terms: CountTerms) -> tuple[Mapping[str, str], list[str]]:
    """Return how words are written by at least k clients, and what there is to say; nothing of counts with noise."""
    if terms.epsilon is not None:
        return {}, ["words are written as the vocabulary has them: epsilon covers no written forms of the text"]
    text, notes = text_at_hand(trained)
    if text is None:
        return {}, notes
    return written_forms((c.train for c in text.population.trained), trained.vocab, terms.k), notes


def _about(method: str, rounds: int, terms: CountTerms, locale: str, *, raw_vocabulary: bool) -> dict[str, str]:
    epsilon = "none" if terms.epsilon is None else f"{terms.epsilon:.4g}"
    if terms.epsilon is not None and terms.verdict == "SIMULATED":
        epsilon += " SIMULATED"
    said = [f"Keyfed {method}", plural(rounds, "round"), f"{terms.clients} clients", f"k {terms.k}"]
    said += [f"epsilon {epsilon}", *(["vocabulary without noise"] if raw_vocabulary else [])]
    return {
        "date": str(int(time.time())),
        "dictionary": f"keyfed:{locale.lower()}",
        "description": "; ".join(said),
        "locale": locale,
        "version": str(max(1, rounds)),
    }


def _listed(
    model: KneserNey, words: Sequence[str], forms: Mapping[str, str], about: Mapping[str, str]
) -> tuple[WordList, dict[str, int]]:
    """Return the words and pairs of a count model as a dictionary has them."""
    unigrams, bigrams = model.levels[0], model.levels[1] if model.order > 1 else None
    ids = unigrams.keys[unigrams.keys >= len(SPECIALS)]
    place = np.full(len(words), -1, np.int64)
    place[ids] = np.arange(len(ids))
    written = [forms.get(words[i], words[i]) for i in ids.tolist()]
    p = unigrams.prob[unigrams.keys >= len(SPECIALS)]
    pairs, pair_p = np.zeros((0, 2), np.int64), np.zeros(0)
    if bigrams is not None:
        both = np.stack([unigrams.keys[bigrams.keys // model.vocab_size], bigrams.keys % model.vocab_size], 1)
        stays = (place[both] >= 0).all(1)
        pairs, pair_p = place[both[stays]], bigrams.prob[stays]
    offensive = json.loads(OFFENSIVE.read_text("utf-8"))["words"]
    return word_list(about, written, p, pairs, pair_p, offensive)
