"""A keyboard judged as its user would: suggestions, keystrokes, corrections, swipes, milliseconds.

Held-out messages are typed letter by letter. A message begins in an empty field, as on a phone, so the model reads only
what stands before in the same line. What a person wrote is what was meant; upper and lower case count as the same.

- **top-1, top-3**: before the first letter of a word the middle slot, or any of the three, shows it. Words outside the
  vocabulary count as misses.
- **keystrokes saved**: 1 − strokes / characters. The typist picks the word as soon as it stands in the strip (one
  stroke, which also types the blank behind it), and types every other character. A comma or full stop moves such a
  blank behind itself; before anything else that is no blank it has to be taken back, by one more stroke. The *ideal*
  keyboard shows every word of the vocabulary before its first letter.
- **wrong corrections**: words that a separator would replace by another when they are typed to their end, properly.
- **slips, taps, swipes**: words of the vocabulary with one slip, with taps spread around the keys, or swiped:
  what came out in the end; words tapped right and then corrected away are *spoilt*.

Words are what the keyboard takes for one: letters up to a blank or a mark. Numbers, addresses, paths and names with
digits in them are typed as they are and not counted as words.

Slips, taps and swipes are drawn by a seed from simple models, the same for every language model that is compared. No
person's typing was recorded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.errors import ConfigError, DataError
from keyfed.keyboard.compact import counts_source, has_counts, mixture_source, pack, read_counts, read_mixture, unpack
from keyfed.keyboard.dictionary import lists_of
from keyfed.keyboard.export import written_forms
from keyfed.keyboard.keys import KeyLayout, Point, fold, layout_of, table
from keyfed.keyboard.session import Decoder, Source, Strip, ngram_source, source_of
from keyfed.model import counts
from keyfed.model.language_model import ModelSpec, parameter_count, quantise
from keyfed.model.ngram import KneserNey, fit_kneser_ney
from keyfed.reports.document import markdown_table
from keyfed.reports.finished import with_data
from keyfed.run.console import render_table
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared
from keyfed.text.partition import ClientText

TAP_SPREAD = 0.25  # standard deviation of a tap around its key's centre, key widths, in x and in y: 9 % hit another key
SWIPE_SPREAD = 0.25  # of a swipe around the keys it passes
SWIPE_TREMOR = 0.03  # of every point of it
POINTS_A_KEY = 8  # points a key width, as a screen reports them
SLIPS = ("neighbour", "omission", "swap", "doubling", "insertion")
SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
BEGINS = re.compile(r"""(?:^|\s)[(\[{"“„«']*$""")  # what may stand before a word that is one to the keyboard
ENDS = re.compile(r"""[.,;:!?…)\]}"”»]*(?:\s|$)""")  # and behind it
LEAST_LETTERS = 3  # of a word that gets a slip


@dataclass(frozen=True, slots=True)
class Tapped:
    """A word as it came out: the characters of the keys that were hit, and where the finger came down."""

    typed: str
    taps: tuple[Point | None, ...]


def neighbours(c: str, layout: KeyLayout) -> list[str]:
    """Return the letters whose keys touch a letter's key.

    Example:
      >>> neighbours("q", layout_of("qwerty"))
      ['w', 'a']
    """
    return [k for k in layout.keys if k != c and (d := layout.distance(c, k)) is not None and d < 1.3]


def misspell(word: str, layout: KeyLayout, rng: np.random.Generator) -> str:
    """Return a word with one slip: a neighbouring key, a letter left out, two swapped, one doubled, one too many.

    A word in which the drawn slip cannot happen, or changes nothing, comes back as it is.
    """
    slip = rng.choice(SLIPS, p=SHARES)
    at = int(rng.integers(len(word)))
    if slip == "omission":
        return word[:at] + word[at + 1 :]
    if slip == "doubling":
        return word[: at + 1] + word[at:]
    if slip == "swap":
        at = int(rng.integers(max(1, len(word) - 1)))
        return word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]
    near = neighbours(fold(word[at]), layout)
    if not near:
        return word
    other = near[int(rng.integers(len(near)))]
    return word[:at] + other + word[at + (slip == "neighbour") :]


def tap(word: str, layout: KeyLayout, rng: np.random.Generator, spread: float = TAP_SPREAD) -> Tapped:
    """Type a word by taps spread around the keys' centres; each types the key it is nearest to."""
    typed: list[str] = []
    taps: list[Point | None] = []
    letters = list(layout.keys)
    centres = np.array(list(layout.keys.values()))
    for c in word:
        centre = layout.centre(fold(c))
        offset = rng.normal(0.0, spread, 2)  # drawn for every character, so that one more does not move the others
        if centre is None:
            typed.append(c)
            taps.append(None)
            continue
        point = np.array(centre) + offset
        nearest = letters[int(((centres - point) ** 2).sum(1).argmin())]
        meant = letters[int(((centres - np.array(centre)) ** 2).sum(1).argmin())]
        typed.append(c if nearest == meant else nearest)
        taps.append((float(point[0]), float(point[1])))
    return Tapped("".join(typed), tuple(taps))


def swipe(word: str, layout: KeyLayout, rng: np.random.Generator, spread: float = SWIPE_SPREAD) -> list[Point]:
    """Return the points of a swipe over a word's keys: each passed off its centre, straight between, with a tremor."""
    centres = [c for c in (layout.centre(fold(c)) for c in word) if c is not None]
    corners = [np.array(c) + rng.normal(0.0, spread, 2) for n, c in enumerate(centres) if n == 0 or c != centres[n - 1]]
    path = [corners[0]] if corners else []
    for a, b in pairwise(corners):
        steps = max(1, round(float(np.hypot(*(b - a))) * POINTS_A_KEY))
        path += [a + (b - a) * n / steps for n in range(1, steps + 1)]
    return [(float(x), float(y)) for x, y in (p + rng.normal(0.0, SWIPE_TREMOR, 2) for p in path)]


def has_path(word: str, layout: KeyLayout) -> bool:
    """Whether a word can be swiped: two different keys at least."""
    return len({layout.centre(fold(c)) for c in word} - {None}) > 1


@dataclass
class Counts:
    """What happened while messages were typed; sums, so that clients can be added up."""

    words: int = 0
    known: int = 0
    top1: int = 0
    top3: int = 0
    characters: int = 0
    strokes: int = 0
    ideal: int = 0
    picks: int = 0
    wrong_known: int = 0
    wrong_unknown: int = 0
    slips: int = 0
    slips_mended: int = 0
    slips_worse: int = 0
    tapped: int = 0
    taps_right: int = 0
    taps_right_alone: int = 0
    taps_spoilt: int = 0
    swiped: int = 0
    swipes_first: int = 0
    swipes_three: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def summary(self) -> dict[str, float | int | None]:
        """Shares for the table; None where nothing was counted."""
        unknown = self.words - self.known

        def share(of: int, all_: int) -> float | None:
            return of / all_ if all_ else None

        return {
            "words": self.words,
            "unknown_words": share(unknown, self.words),
            "top1": share(self.top1, self.words),
            "top3": share(self.top3, self.words),
            "saved": share(self.characters - self.strokes, self.characters),
            "saved_ideal": share(self.characters - self.ideal, self.characters),
            "picked": share(self.picks, self.words),
            "wrong_corrections": share(self.wrong_known + self.wrong_unknown, self.words),
            "wrong_corrections_known": share(self.wrong_known, self.known),
            "wrong_corrections_unknown": share(self.wrong_unknown, unknown),
            "slips_mended": share(self.slips_mended, self.slips),
            "slips_made_worse": share(self.slips_worse, self.slips),
            "taps_right": share(self.taps_right, self.tapped),
            "taps_right_without_correction": share(self.taps_right_alone, self.tapped),
            "taps_spoilt": share(self.taps_spoilt, self.tapped),
            "swipes_top1": share(self.swipes_first, self.swiped),
            "swipes_top3": share(self.swipes_three, self.swiped),
        }


@dataclass
class KeystrokeClock:
    """Milliseconds of each answer, by the clock, and of the processor: this process and the decoder's.

    A *word* is an answer with nothing typed, for which the model reads; a *keystroke* only ranks.
    """

    words: list[tuple[float, float]] = field(default_factory=list)
    keystrokes: list[tuple[float, float]] = field(default_factory=list)

    def strip(self, keyboard: Decoder, before: str, typed: str, taps: Sequence[Any] = ()) -> Strip:
        """Ask for the strip and note how long it took."""
        began, used = time.perf_counter(), time.process_time()
        found = keyboard.suggest(before + typed, taps)
        took = (time.perf_counter() - began) * 1e3, (time.process_time() - used) * 1e3 + keyboard.cpu_ms
        (self.keystrokes if typed else self.words).append(took)
        return found

    def summary(self) -> dict[str, Any]:
        """p50, p95 and p99 by the clock and the mean of the processor."""
        return {"word": _times(self.words), "keystroke": _times(self.keystrokes)}


def _times(taken: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    if not taken:
        return None
    wall, cpu = np.array(taken).T
    p50, p95, p99 = np.percentile(wall, [50, 95, 99])
    return {"p50_ms": float(p50), "p95_ms": float(p95), "p99_ms": float(p99), "cpu_ms": float(cpu.mean())}


def type_lines(board: Decoder, lines: Iterable[str], rng: np.random.Generator | None, clock: KeystrokeClock) -> Counts:
    """Type messages on a keyboard and count; without `rng` nothing is mistyped or swiped."""
    counts = Counts()
    for line in lines:
        found = words_in(line)
        known = board.knows([word for _, word in found])
        _type_line(board, line, list(zip(found, known, strict=True)), counts, clock)
        for (start, word), is_known in zip(found, known, strict=True):
            if is_known and rng is not None:
                _mistype(board, line[:start], word, counts, rng)
    return counts


def words_in(line: str) -> list[tuple[int, str]]:
    """Return where the words of a message begin, and the words.

    Example:
      >>> words_in("don't run /usr/bin, i386 or me@x.org: it's 2 a_b mp3")
      [(0, "don't"), (6, 'run'), (25, 'or'), (38, "it's")]
    """
    found = []
    for match in WORD.finditer(line):
        if BEGINS.search(line, 0, match.start()) and ENDS.match(line, match.end()):
            found.append((match.start(), match[0]))
    return found


def _type_line(
    keyboard: Decoder,
    line: str,
    words: Sequence[tuple[tuple[int, str], bool]],
    counts: Counts,
    clock: KeystrokeClock,
) -> None:
    """Words and their suggestions; everything between is typed as it is."""
    end = 0
    picked = shown = False  # whether a blank stands behind the word before: on this keyboard, on the ideal one
    for (start, word), known in words:
        between = line[end:start]
        counts.characters += len(between) + len(word)
        counts.strokes += strokes_between(between, picked)
        counts.ideal += strokes_between(between, shown) + (1 if known else len(word))
        strokes, picked = _type_word(keyboard, line[:start], word, known, counts, clock)
        shown = known
        counts.strokes += strokes
        counts.words += 1
        counts.known += known
        end = start + len(word)
    rest = line[end:]
    counts.characters += len(rest) + 1  # with Enter
    counts.strokes += strokes_between(rest, picked, last=True) + 1
    counts.ideal += strokes_between(rest, shown, last=True) + 1


def strokes_between(between: str, blank: bool, *, last: bool = False) -> int:
    """Return the strokes for what stands between two words.

    A mark that closes moves an automatic blank behind itself, what joins words takes its place; where the blank shall
    stay before one of these, it is typed again. Before anything else that is no blank it is taken back.

    Args:
      blank: whether an automatic blank stands there already.
      last: whether no word follows; a blank too many at the end of a message is left.

    Example:
      >>> [strokes_between(text, True) for text in (" ", ", ", "...", "/", "-", " - ")]
      [0, 1, 4, 2, 1, 3]
    """
    if not blank:
        return len(between)
    closing, around = (table("constants")[f"no_blank_{where}"] for where in ("before", "around"))
    strokes = 0
    while between and between[0] in closing:
        strokes, between = strokes + 1, between[1:]
    if between.startswith(" "):
        stays = len(between) == 1 or between[1] not in closing + around
        return strokes + len(between) - stays
    if not between:
        return strokes + (not last)
    return strokes + len(between) + (between[0] not in around)


def _type_word(
    keyboard: Decoder, before: str, word: str, known: bool, counts: Counts, clock: KeystrokeClock
) -> tuple[int, bool]:
    """Return the strokes a word took, and whether it was picked."""
    strip = clock.strip(keyboard, before, "")
    counts.top1 += _shows(strip.slots[1], word)
    counts.top3 += any(_shows(s, word) for s in strip.slots)
    strokes, picked = len(word), False
    for typed in range(len(word)):
        if typed:
            strip = clock.strip(keyboard, before, word[:typed])
        if any(_shows(s, word) for s in strip.slots):
            counts.picks += 1
            strokes, picked = typed + 1, True
            break
    made = clock.strip(keyboard, before, word).correction  # what would happen to someone who does not look at the strip
    if made is not None and fold(made) != fold(word):
        counts.wrong_known += known
        counts.wrong_unknown += not known
    return strokes, picked


def _mistype(keyboard: Decoder, before: str, word: str, counts: Counts, rng: np.random.Generator) -> None:
    """The same word with a slip, by taps, and swiped."""
    layout = layout_of("qwerty")
    slipped = misspell(word, layout, rng)
    tapped = tap(word, layout, rng)
    points = swipe(word, layout, rng)
    if len(word) >= LEAST_LETTERS and fold(slipped) != fold(word):
        made = keyboard.suggest(before + slipped).correction
        counts.slips += 1
        counts.slips_mended += made is not None and fold(made) == fold(word)
        counts.slips_worse += made is not None and fold(made) != fold(word)
    made = keyboard.suggest(before + tapped.typed, tapped.taps).correction
    counts.tapped += 1
    counts.taps_right += fold(made if made is not None else tapped.typed) == fold(word)
    counts.taps_right_alone += fold(tapped.typed) == fold(word)
    counts.taps_spoilt += fold(tapped.typed) == fold(word) and made is not None and fold(made) != fold(word)
    if has_path(word, layout):
        best = [fold(slot.text) for slot in keyboard.gesture(before, points)]
        counts.swiped += 1
        counts.swipes_first += best[:1] == [fold(word)]
        counts.swipes_three += fold(word) in best


def _shows(slot: Any, word: str) -> bool:
    return slot is not None and slot.kind not in ("emoji", "literal") and fold(slot.text) == fold(word)


WORDS = 2_000  # typed of each group
LINES = 5  # typed of a client, so that many clients are heard
ORDER = 5
LEAST_WORDS = 10  # of a client that counts in the spread over clients


@dataclass(frozen=True)
class Candidate:
    """A row: where its scores come from and what a device stores for it."""

    name: str
    source: Source
    size: dict[str, int]  # bytes by precision
    personal: bool = False  # the device has learnt from the client's own training text
    parameters: int | None = None


def evaluate_keyboard(
    folders: Sequence[Path], words: int = WORDS, seed: int = 1, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Type held-out messages of the first run's corpus on every row's keyboard.

    Raises:
      ConfigError: a model of characters.
      DataError: the runs have different corpora or vocabularies, or there is no held-out text.
    """
    runs, prepared = load_runs(folders)
    drawn = {name: list(sampled(clients, words, seed)) for name, clients in held_out(prepared).items()}
    groups = {name: clients for name, clients in drawn.items() if clients}
    if not groups:
        raise DataError(f"{prepared.corpus.name} has no held-out text to type")
    # The keyboard of a private run has no written forms (`export.LEFT_OUT`), and only totals of its clients are shown.
    private = any(run.config.privacy.on for run in runs)
    forms = {} if private else written_forms((c.train for c in prepared.population.trained), prepared.vocab)
    lists = lists_of(prepared.vocab, None if private else prepared, None)
    rows, version = [], ""
    for row in candidates(runs, prepared):
        say(f"typing on {row.name}")
        found: dict[str, Any] = {"name": row.name, "bytes": row.size, "parameters": row.parameters}
        clock = KeystrokeClock()
        with Decoder(prepared.vocab, row.source, forms=forms, settings={"emoji": False}, lists=lists) as keyboard:
            version = f"node {keyboard.version}"
            for group, clients in groups.items():
                if row.personal and not any(client.train for client in clients):
                    continue  # no client's earlier text is known
                counts = type_clients(keyboard, clients, clock, seed, learns=row.personal)
                by_client = None if private else _spread(counts)
                found[group] = {**sum(counts, Counts()).summary(), "clients": len(counts), "by_client": by_client}
        if clock.words:
            rows.append({**found, "latency": clock.summary()})
    typed = {g: {"clients": len(c), "lines": sum(len(t.test) for t in c)} for g, c in groups.items()}
    about = {"data": prepared.corpus.name, "vocabulary": len(prepared.vocab), "seed": seed, "decoder": version}
    return {**about, "typed": typed, "rows": rows}


def load_runs(folders: Sequence[Path]) -> tuple[list[Trained], Prepared]:
    """Read runs that learnt from the same text, and that text."""
    runs: list[Trained] = []
    prepared: Prepared | None = None
    for folder in folders:
        run, text = with_data(folder, None, text=prepared is None)
        if run.vocab.kind != "word":
            raise ConfigError(f"{folder} holds a model of characters; --keyboard types on models of words")
        if runs and run.vocab != runs[0].vocab:
            raise DataError(f"{folder} has another vocabulary than {folders[0]}; compare runs on the same text")
        if runs and _text_of(run) != _text_of(runs[0]):
            raise DataError(
                f"{folder} has other data settings or another seed than {folders[0]}: it may have learnt from what the "
                "other holds out; compare runs on the same text"
            )
        runs.append(run)
        prepared = prepared or text
    assert prepared is not None
    return runs, prepared


def _text_of(run: Trained) -> tuple[Any, ...]:
    """What decides which text a run learns from and which it holds out."""
    data = run.config.data
    clients = (data.clients, data.clients_by, data.clients_part)
    return data.name, data.partition, *clients, data.unseen, data.alpha, run.config.train.seed


def held_out(prepared: Prepared) -> dict[str, Sequence[ClientText]]:
    """Return the clients with text to type, seen and unseen."""
    population = prepared.population
    left_out = set(prepared.excluded)  # too little text to train on
    seen = [c for c in population.trained if c.test and c.name not in left_out]
    if population.test:  # published held-out text belongs to no client
        seen = [ClientText("test", (), (), population.test)]
    return {"seen": seen, "unseen": [c for c in population.unseen if c.test]}


def sampled(clients: Sequence[ClientText], words: int, seed: int) -> Iterator[ClientText]:
    """Draw clients and take each one's first lines until there are enough words; one alone gives all of them."""
    rng = np.random.default_rng([seed, len(clients)])
    left = words
    for at in rng.permutation(len(clients)):
        client = clients[int(at)]
        lines = []
        for line in client.test[: LINES if len(clients) > 1 else None]:
            count = len(words_in(line))
            if left > 0 and count:
                lines.append(line)
                left -= count
        if lines:
            yield ClientText(client.name, client.train, client.valid, tuple(lines))
        if left <= 0:
            return


def candidates(runs: Sequence[Trained], prepared: Prepared) -> Iterator[Candidate]:
    """Yield the rows: n-grams of everybody's text, and each run's models."""
    streams = [prepared.store.stream(k) for k in range(len(prepared.store))]
    whole = fit_kneser_ney(streams, len(prepared.vocab), ORDER)
    yield Candidate(f"n-gram, order {ORDER}", ngram_source(whole), {"fp32": _stored(whole)})
    for run in runs:
        numbers = {name: p.numpy() for name, p in run.params.items()}
        stored = {"fp32": numbers, "int8": quantise(numbers)}
        size = {precision: sum(v.nbytes for v in values.values()) for precision, values in stored.items()}
        count = parameter_count(run.spec) if isinstance(run.spec, ModelSpec) else None
        name = f"{run.spec.name}, {run.method}"
        yield Candidate(name, source_of(run), size, parameters=count)
        if run.method != "central":
            yield Candidate(f"{name} + personal", source_of(run), size, personal=True, parameters=count)
        if has_counts(run.folder):
            yield from _counted(run, name, size, count)


def _counted(run: Trained, name: str, size: Mapping[str, int], parameters: int | None) -> Iterator[Candidate]:
    """Rows of what a run counted: the counts alone, with the network, and with what a device learns."""
    released = read_counts(run.folder, len(run.vocab), private=run.config.privacy.on)
    data = pack(released, read_mixture(run.folder))
    found = unpack(data, len(run.vocab), str(run.folder))
    lines = run.reads_lines
    stored = {"fp32": (run.folder / counts.FILE).stat().st_size, "int8": len(data)}
    yield Candidate(f"counts, k = {found.terms.k}", counts_source(found, lines=lines), stored)
    if found.mixture is None:
        return
    whole = {precision: bytes_ + len(data) for precision, bytes_ in size.items()}
    for personal in (False, True):
        source = mixture_source(source_of(run), found, lines=lines)
        title = f"{name} + counts{' + personal' if personal else ''}"
        yield Candidate(title, source, whole, personal=personal, parameters=parameters)


def _stored(model: KneserNey) -> int:
    """Bytes of the tables a device would need: a word and a probability an n-gram, a weight and a start a context."""
    return sum(8 * level.keys.size + 8 * level.start.size for level in model.levels)


def type_clients(
    keyboard: Decoder, clients: Sequence[ClientText], clock: KeystrokeClock, seed: int | None, *, learns: bool
) -> list[Counts]:
    """Type each client's messages; slips are drawn by (seed, client), the same for every row; without a seed none are.

    Args:
      learns: whether the device has learnt from the client's own earlier text.
    """
    found = []
    for number, client in enumerate(clients):
        if learns:
            lines = (*client.train, *client.valid)
            words = ((line, start, word) for line in lines for start, word in words_in(line))
            keyboard.learn([(word, line[:start]) for line, start, word in words])
        rng = None if seed is None else np.random.default_rng([seed, number])
        found.append(type_lines(keyboard, client.test, rng, clock))
        if learns:
            keyboard.forget_all()
    return found


def _spread(counts: Sequence[Counts]) -> dict[str, Any] | None:
    """Top-3 recall over clients: percentiles of those with enough words."""
    shares = [c.top3 / c.words for c in counts if c.words >= LEAST_WORDS]
    if not shares:
        return None
    low, middle, high = np.percentile(shares, [10, 50, 90])
    return {"clients": len(shares), "top3_p10": float(low), "top3_median": float(middle), "top3_p90": float(high)}


COLUMNS = (
    ("top-1", "top1"),
    ("top-3", "top3"),
    ("strokes saved", "saved"),
    ("ideal", "saved_ideal"),
    ("wrong corr.", "wrong_corrections"),
    ("slips mended", "slips_mended"),
    ("made worse", "slips_made_worse"),
    ("taps right", "taps_right"),
    ("alone", "taps_right_without_correction"),
    ("spoilt", "taps_spoilt"),
    ("swipes top-1", "swipes_top1"),
    ("top-3", "swipes_top3"),
)


def tables(result: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return titles and rows: one table for each group of clients, one for size and time."""
    found = []
    for group, typed in result["typed"].items():
        rows = [r for r in result["rows"] if r.get(group)]
        if not rows:
            continue
        first = rows[0][group]
        title = (
            f"{group.capitalize()} clients: {first['words']:,} words in {typed['lines']:,} messages of "
            f"{typed['clients']:,}, {first['unknown_words']:.1%} outside the vocabulary of {result['vocabulary']:,}"
        )
        head = ["", *(name for name, _ in COLUMNS), "top-3 by client"]
        cells = [[r["name"], *(_percent(r[group][key]) for _, key in COLUMNS), _by_client(r[group])] for r in rows]
        found.append((title, [head, *cells]))
    head = ["", "MB", "int8 MB", "word p50/p95/p99 ms", "CPU ms", "keystroke p50/p95/p99 ms", "CPU ms"]
    where = result.get("decoder", "Python")  # the decoder was in Python before
    return [*found, (f"Size, and time in {where} on one thread", [head, *(_cost(r) for r in result["rows"])])]


def keyboard_text(result: dict[str, Any]) -> str:
    """The tables for a terminal: models side by side, so that they fit."""
    turned = [(title, [list(column) for column in zip(*rows, strict=True)]) for title, rows in tables(result)]
    return "\n".join(f"{title}\n{render_table(rows)}" for title, rows in turned)


def keyboard_markdown(result: dict[str, Any]) -> str:
    """The tables for a page."""
    return "\n\n".join(f"{title}:\n\n{markdown_table(rows, numbers=True)}" for title, rows in tables(result))


def _cost(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], *(f"{row['bytes'][p] / 1e6:.2f}" if p in row["bytes"] else "" for p in ("fp32", "int8"))]
    for what in ("word", "keystroke"):
        t = row["latency"][what]
        cells += [f"{t['p50_ms']:.2f}/{t['p95_ms']:.2f}/{t['p99_ms']:.2f}", f"{t['cpu_ms']:.2f}"] if t else ["", ""]
    return cells


def _by_client(found: dict[str, Any]) -> str:
    """The lowest tenth, the middle and the highest tenth of the clients."""
    by = found["by_client"]
    return " – ".join(f"{100 * by[key]:.0f}" for key in ("top3_p10", "top3_median", "top3_p90")) + " %" if by else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
