r"""One person's text: what a client may train on, and what can be said about it without quoting it.

A client trains on its owner's text only. A table or a LEAF file names its authors; a chat export names who wrote each
message. Where there are several, the owner says which one it is (`keyfed client --me NAME`). Files of a folder are
taken as one person's, except chat exports among them.

Two forms of chat exports are known: `12/03/2024, 21:05 - Anna: hello` (also in brackets, with seconds, am or pm, `T` or
`à` before the time), and `[21:05] <anna> hello` (also with a date). Lines without such a start belong to the message
before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from keyfed.errors import DataError
from keyfed.text.catalogue import load_corpus
from keyfed.text.corpus import Author, Corpus, pseudonym

LEAST_WORDS = 20  # fewer teach a model nothing
LEAST_HEADS, HEAD_SHARE = 3, 0.2  # messages, and (of one person) their share of a file's lines: a chat export
LONGEST_NAME = 64

_STAMPED = re.compile(
    r"[\u200e\u202a]?\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4},?(?:\s(?:[^\W\d_]{1,3}\s)?|T)\d{1,2}[:.]\d\d(?:[:.]\d\d)?(?:\s?[AaPp]\.?\s?[Mm]\.?)?\]?"
    r"\s(?:[-\u2013]\s)?(?P<rest>.*)"
)
_BRACKETED = re.compile(
    r"(?:\d{4}-\d\d-\d\d[\sT])?(?:\[?\d{1,2}:\d\d(?::\d\d)?\]?\s)?<[@+ ]?(?P<who>[^<>\s]{1,64})>\s(?P<said>.*)"
)


@dataclass(frozen=True, slots=True)
class TextSize:
    """How much text there is: counts, and nothing of the text itself.

    Attributes:
      left_out: files and rows that could not be used.
    """

    lines: int
    words: int
    left_out: int = 0

    def __str__(self) -> str:
        more = f"; {self.left_out:,} files or kinds of rows left out" if self.left_out else ""
        return f"{self.lines:,} lines, {self.words:,} words{more}"


def own_corpus(corpus: Corpus, path: Path, me: str | None) -> Corpus:
    """Return a corpus whose only author is its owner.

    Args:
      path: where the corpus was read from; files of a folder are one person's.
      me: the owner, as the file spells it; None where there is one author only.

    Raises:
      DataError: there are several authors and `me` is none of them. The message has no name and no quotation.
    """
    if corpus.natural and not path.is_dir():
        authors = _chosen(corpus.authors, me, path)
        lines = tuple(chain.from_iterable(author.lines for author in authors))
    else:
        lines = tuple(chain.from_iterable(_of_file(author.lines, me, path) for author in corpus.authors))
    if not lines:
        raise DataError(f"{path}: no message of that --me; spell it as the file does")
    return Corpus(
        corpus.name,
        (Author(me or "me", lines),),
        tokenised=corpus.tokenised,
        characters=corpus.characters,
        skipped=corpus.skipped,
    )


def look_at(path: Path, me: str | None = None) -> TextSize:
    """Read a client's text as its training does, and count it.

    Raises:
      DataError: it is missing, unreadable, empty, too short, or of several people.
    """
    corpus = own_corpus(load_corpus(str(path)), path, me)
    lines = corpus.authors[0].lines
    found = TextSize(len(lines), sum(len(line.split()) for line in lines), len(corpus.skipped))
    if found.words < LEAST_WORDS:
        raise DataError(f"{path}: {found}; expected at least {LEAST_WORDS} words to learn from")
    return found


def _chosen(authors: Sequence[Author], me: str | None, path: Path) -> Sequence[Author]:
    if len(authors) == 1 and me is None:
        return authors
    mine = [author for author in authors if me is not None and author.name == pseudonym(me)]
    if not mine:
        raise _several(path, len(authors), me)
    return mine


def _of_file(lines: Sequence[str], me: str | None, path: Path) -> Iterable[str]:
    """Lines of a text file; of a chat export only its owner's messages, without their heads."""
    heads = [_head(line) for line in lines]
    said = [head for head in heads if head is not None and head[0]]
    people = {who for who, _ in said}
    if len(said) < LEAST_HEADS or (len(said) < HEAD_SHARE * len(lines) and len(people) < 2):
        return lines
    if me is None and len(people) == 1:
        (me,) = people
    if me not in people:
        if path.is_dir() and me is not None:
            return ()  # a chat without the owner, among other files
        raise _several(path, len(people), me)
    mine, current = [], ""
    for line, head in zip(lines, heads, strict=True):
        current, words = (current, line) if head is None else head
        if current == me and words.strip():
            mine.append(words.strip())
    return mine


def _head(line: str) -> tuple[str, str] | None:
    """Return who begins a message in this line, and its words; ("", "") for a notice; None for no beginning.

    Example:
      >>> _head("12/03/2024, 21:05 - Anna: see you"), _head("[21:05] <anna> see you"), _head("see you at 21:05")
      (('Anna', 'see you'), ('anna', 'see you'), None)
    """
    if found := _BRACKETED.fullmatch(line):
        return found["who"], found["said"]
    if found := _STAMPED.fullmatch(line):
        who, colon, said = found["rest"].partition(": ")
        return (who.strip(), said) if colon and len(who) <= LONGEST_NAME else ("", "")
    return None


def _several(path: Path, people: int, me: str | None) -> DataError:
    if me is None:
        return DataError(
            f"{path}: messages of {people:,} people, and a client trains on its owner's only; say which are yours with "
            "--me NAME, as the file spells it"
        )
    return DataError(
        f"{path}: messages of {people:,} {'people' if people > 1 else 'person'}, none of that --me; spell it as the "
        "file does"
    )
