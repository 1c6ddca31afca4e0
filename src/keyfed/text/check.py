"""What was understood of a text, in numbers, before anything is trained on it; no line and no name is quoted.

What a model would learn by mistake is noticed, each with a remedy. Such are lines that begin with a time, markup, and
sentences in the place of words. So is a language that the base model does not know, and too little text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from keyfed.text.corpus import Corpus
from keyfed.text.language import language_of, unspaced
from keyfed.text.vocab import words_of

LOOKED_AT = 20_000  # lines that are looked at closely, from all over the text
TIMED_LINES, MARKED_LINES, LINKED_LINES = 0.1, 0.1, 0.2  # shares of lines from which on it is said
LITTLE = 2_000  # words; fewer teach little
UNKNOWN = 0.3  # share of words that a start does not know
LETTERED = 0.5  # share of words with letters; fewer are no text
LONGEST_LINE = 2_000  # words of a line that is no message, sentence or paragraph
LEAST_LINES = 20  # fewer are no sample

_TIMED = re.compile(
    r"[\[(<\u200e]{0,2}(?:\d{1,4}[./-]\s?\d{1,2}[./-]\s?\d{1,4}|\d{4}\s?[\u5e74\ub144]\s?\d|\d{1,2}:\d\d(?::\d\d)?|\d{10,13}\b)"
)
_CLOCK = re.compile(r"(?<![\d:.])\d{1,2}:\d\d(?!\d)")
_WORD = re.compile(r"[^\W\d_]+")
_PREFIX = re.compile(r"[^{}\"]{0,58}?[:\uff1a\])>](?=\s|$)")
CLOCK_WITHIN, CLOCK_WORDS = 40, 2  # characters before the end of a clock time, and words there, of a line that is timed
PREFIX_WORDS, SAME_PREFIX = 3, 0.5  # words of a prefix without a number; share of lines that begin with one shape
_MARKED = re.compile(r"</?[a-zA-Z][^<>]{0,200}>|&(?:amp|lt|gt|quot|nbsp|#\d{1,6});|^\s*[{\[]\"|\":\s?[\"{\[]")
_LINK = re.compile(r"https?://|www\.")


@dataclass(frozen=True, slots=True)
class Checked:
    """A text in numbers.

    Attributes:
      formats: what its files were taken for.
      authors: named in the text.
      pools: files or whole texts that name no author.
      longest: words of the longest line.
      unknown: share of the words that the base model does not know; None where they are not looked up.
      skipped: what was left out, and why.
      notices: what may be wrong, each with a remedy.
    """

    formats: tuple[str, ...]
    authors: int
    pools: int
    lines: int
    words: int
    longest: int
    language: str
    unknown: float | None
    skipped: tuple[str, ...]
    notices: tuple[str, ...]


def check_corpus(corpus: Corpus, known: Container[str] | None = None) -> Checked:
    """Count a text and notice what may be wrong with it.

    Args:
      known: words of the base model, in lower case.
    """
    lines = [line for author in corpus.authors for line in author.lines]
    sizes = [len(line.split()) for line in lines]
    sample = lines[:: max(1, len(lines) // LOOKED_AT)]
    words = Counter(word for line in sample for word in words_of(line[:10_000], tokenised=corpus.tokenised, lower=True))
    lettered = {word: count for word, count in words.items() if any(map(str.isalpha, word))}
    missing = sum(count for word, count in lettered.items() if known is not None and word not in known)
    unknown = missing / sum(lettered.values()) if known is not None and lettered else None
    language = unspaced(words) or language_of(lettered)
    signed = sum(author.signed for author in corpus.authors)
    return Checked(
        formats=corpus.formats,
        authors=signed,
        pools=len(corpus.authors) - signed,
        lines=len(lines),
        words=sum(sizes),
        longest=max(sizes, default=0),
        language=language,
        unknown=unknown,
        skipped=tuple(f"{skipped.what}: {skipped.why}" for skipped in corpus.skipped),
        notices=(*notices(corpus), *_advice(sum(sizes), unknown)),
    )


def notices(corpus: Corpus) -> tuple[str, ...]:
    """Say what a model would learn by mistake, each with a remedy; of a sample of the lines.

    Example:
      >>> from keyfed.text.corpus import Author
      >>> notices(Corpus("c", (Author("a", ("plain words",) * 30),)))
      ()
    """
    found = []
    if corpus.files > 1:
        found.append(
            f"{corpus.files:,} files count as {corpus.files:,} people, and words of one file alone are not learnt; if "
            "all are yours: --set data.folder=person (--set data.folder=clients: they are not)"
        )
    if not corpus.characters and not corpus.tokenised:
        long = (line for author in corpus.authors for line in author.lines if len(line) > 2 * LONGEST_LINE)
        found += _long_line(max((len(line.split()) for line in long), default=0))
    number = sum(len(author.lines) for author in corpus.authors)
    if number < LEAST_LINES or corpus.tokenised:
        return tuple(found)
    every = chain.from_iterable(author.lines for author in corpus.authors)
    sample = [line[:1_000] for line in islice(every, 0, None, max(1, number // LOOKED_AT))]
    remedy = (
        "which would be learnt: export the chat in a form that is read (docs/own-data.md), or make a table with "
        "columns author and text"
    )
    marked = _share(sample, _MARKED.search)
    timed = _share(sample, _timed)
    if timed >= TIMED_LINES:
        found.append(f"{timed:.0%} of the lines begin with a date or time, {remedy}")
    elif marked < MARKED_LINES and (share := _same_prefix(sample)) >= SAME_PREFIX:
        found.append(f"{share:.0%} of the lines begin alike (a name or number, and a colon or bracket), {remedy}")
    if marked >= MARKED_LINES:
        found.append(
            f"{marked:.0%} of the lines hold markup (tags, entities or JSON), which would be learnt: save plain text"
        )
    if (share := _share(sample, _LINK.search)) >= LINKED_LINES:
        found.append(f"{share:.0%} of the lines hold addresses of the web, which would be learnt: take them out")
    spoken = [word for line in sample[:2_000] for word in line.split()]
    lettered = sum(any(map(str.isalpha, word)) for word in spoken) / max(1, len(spoken))
    if spoken and timed < TIMED_LINES and lettered < LETTERED:
        found.append(f"{lettered:.0%} of the words have letters: numbers teach no language; name a file of text")
    words = set(spoken)
    if not corpus.characters and (language := unspaced(words)) is not None:
        found.append(
            f"{language} is written without blanks between words: train a model of characters (--model char-lstm)"
        )
    return tuple(found)


def _timed(line: str) -> object:
    """Find a time at the beginning of a line: a date, or a clock time after few words.

    Example:
      >>> [_timed(line) is not None for line in ("[Ann] [9:05] hi", "Ann (1.2.24 9:05): hi", "let us meet at 9:05")]
      [True, True, False]
    """
    if (found := _TIMED.match(line)) is not None:
        return found
    clock = _CLOCK.search(line[:CLOCK_WITHIN])
    return clock if clock is not None and len(_WORD.findall(line[: clock.start()])) <= CLOCK_WORDS else None


def _same_prefix(lines: Sequence[str]) -> float:
    """Return the share of lines whose prefixes, up to a colon or bracket, have the most frequent shape.

    Example:
      >>> _same_prefix(["Ann: hi", "Ben: oh", "and so on"])
      0.6666666666666666
    """
    shapes: Counter[str] = Counter()
    for line in lines:
        found = _PREFIX.match(line)
        if found is None or (found.end() == len(line.rstrip()) and not any(map(str.isdigit, found[0]))):
            continue  # none, or a heading
        if any(map(str.isdigit, found[0])) or len(found[0].split()) <= PREFIX_WORDS:
            words = re.sub(r"[^\W\d_]+(?:[\s.'-]+[^\W\d_]+)*", "a", re.sub(r"\d+", "0", found[0]))
            shapes[words] += 1
    return max(shapes.values(), default=0) / len(lines)


def _share(lines: Sequence[str], finds: Callable[[str], object]) -> float:
    return sum(finds(line) is not None for line in lines) / len(lines)


def _long_line(longest: int) -> list[str]:
    if longest <= LONGEST_LINE:
        return []
    return [f"a line of {longest:,} words: put line ends between sentences or paragraphs"]


def _advice(words: int, unknown: float | None) -> list[str]:
    found = []
    if words < LITTLE:
        found.append(f"{words:,} words teach a model little: add more text (about {LITTLE:,} words or more)")
    if unknown is not None and unknown > UNKNOWN:
        found.append(
            f"{unknown:.0%} of the words are not known to the base model of English chat: start with --init none"
        )
    return found


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def describe_check(found: Checked, name: str, train: str) -> str:
    """Return what was understood as lines for a person.

    Args:
      train: the command that trains on it.
    """
    one = " (one by one with --me NAME)" if found.authors > 1 and found.formats else ""  # not of a known corpus
    who = [f"{found.authors:,} named in the text{one}"] if found.authors else []
    if found.pools:
        who.append("one person's" if found.pools == 1 else f"{found.pools:,} files, each a client's")
    rows = [
        ("text", name),
        ("read as", "; ".join(found.formats) or "a known corpus"),
        ("authors", "; ".join(who)),
        (
            "size",
            f"{_number(found.lines, 'line')}, {_number(found.words, 'word')}, the longest line has {found.longest:,}",
        ),
        ("language", found.language),
    ]
    if found.unknown is not None:
        rows.append(("unknown words", f"{found.unknown:.1%} (to the base model)"))
    rows += [("left out", line) for line in found.skipped[:10]]
    if len(found.skipped) > 10:
        rows.append(("left out", f"and {len(found.skipped) - 10:,} more"))
    rows += [("notice", line) for line in found.notices]
    rows.append(("train", train))
    return "\n".join(f"{key + ':':<15}{value}" for key, value in rows)
