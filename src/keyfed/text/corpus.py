"""A corpus is authors with their lines, and any text on disk can become one.

`read_corpus` takes what people have lying about:

    folder of *.txt, *.txt.gz, *.md, extension-less files     a file is a client, its lines are the lines
    one such file                                             one pool of text, to be cut into shards
    .jsonl / .csv / .tsv (also .gz) with author and text      an author is a client, rows in order of time
    LEAF .json (users, user_data: {u: {x, y}})                a user is a client

What cannot be used (empty, binary, not UTF-8, broken JSON, a missing field) is left out and counted in
`Corpus.skipped` with the reason; only a corpus with nothing left is an error. Handles found in an author
column are kept as hashes only: see `pseudonym`.

LEAF (Caldas et al. 2018, arXiv 1812.01097) has three kinds of samples that hold text. `leaf_lines` turns each back into
running lines; anything else (images, tweets with their metadata) is refused:

    shakespeare   x = windows of 80 characters, y = the character after each
    reddit        x = lists (of lists) of tokens with <BOS>, <EOS> and <PAD>
    any other     x = strings

A client trains on its owner's text only (`own_corpus`). A table or a LEAF file names its authors; a chat export names
who wrote each message. Where there are several, the owner says which one it is (`keyfed client --me NAME`). Files of a
folder are taken as one person's, except chat exports among them. Two forms of chat exports are known:
`12/03/2024, 21:05 - Anna: hello` (also in brackets, with seconds, am or pm, `T` or `à` before the time), and
`[21:05] <anna> hello` (also with a date). Lines without such a start belong to the message before them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from keyfed.errors import DataError
from keyfed.text.records import (
    UNREADABLE,
    Bomb,
    Record,
    RefusedRows,
    by_time,
    is_broken,
    open_bytes,
    read_records,
    suffix_of,
    why_unreadable,
)

TEXT_SUFFIXES = ("", ".txt", ".md")
TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv")

_Found = tuple[tuple["Author", ...], tuple["Skipped", ...]]


@dataclass(frozen=True, slots=True)
class Author:
    """One natural client: a person, a role, an article, a file.

    Attributes:
      name: Never a chat, forum or review handle (see `pseudonym`).
      lines: In order of time; one line is one unit ended by <eos>: a sentence, a message, a paragraph.
      topic: What the author's text is about where that is known (play, decade).
    """

    name: str
    lines: tuple[str, ...]
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or record that was left out, and the reason."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text by author, with the published validation and test lines where there are any.

    Attributes:
      tokenised: Words are what stands between blanks (PTB, WikiText-2).
      natural: The authors are natural clients; otherwise they are one pool of text to be sharded.
      characters: Meant for character models: blank lines and indentation are part of the text.
      about: One line: origin, licence.
      sha256: The fingerprint of text that is encoded already and no longer at hand (`authors` is empty).
    """

    name: str
    authors: tuple[Author, ...]
    valid: tuple[str, ...] | None = None
    test: tuple[str, ...] | None = None
    tokenised: bool = False
    natural: bool = True
    characters: bool = False
    skipped: tuple[Skipped, ...] = ()
    about: str = ""
    sha256: str | None = None

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of the authors' names and all text, whatever the corpus is called.

        Example:
          >>> one, two = Author("a", ("x", "y")), Author("a", ("x y",))
          >>> Corpus("c", (one,)).fingerprint() == Corpus("d", (one,)).fingerprint()
          True
          >>> Corpus("c", (one,)).fingerprint() == Corpus("c", (two,)).fingerprint()
          False
        """
        if self.sha256 is not None:
            return self.sha256
        parts = ((a.name, len(a.lines), "\n".join(a.lines).encode()) for a in self.authors)
        return fingerprint_of(parts, self.valid, self.test)


def fingerprint_of(
    parts: Iterable[tuple[str, int, bytes]],
    valid: tuple[str, ...] | None = None,
    test: tuple[str, ...] | None = None,
) -> str:
    """Return the fingerprint of a corpus whose authors come one by one: name, number of lines, lines joined."""
    digest = hashlib.sha256()
    published = (
        (name, -1 if lines is None else len(lines), "\n".join(lines or ()).encode())
        for name, lines in (("valid", valid), ("test", test))
    )
    for name, lines, body in chain(parts, published):
        head = name.encode()
        # Lengths first: nothing runs together.
        digest.update(b"%d %d %d\n%b%b" % (len(head), lines, len(body), head, body))
    return digest.hexdigest()


def pseudonym(name: str) -> str:
    """Return the name under which a handle is kept: stable, and not the handle itself.

    The hash has no salt, on purpose: names are part of a corpus's fingerprint and of which client gets which text, so
    that results repeat on every machine. It keeps handles out of files and plots. It does not keep them secret: with a
    list of handles anyone can hash each and compare.

    Example:
      >>> pseudonym("crimsun")
      'u-d24fd8f7867d'
    """
    return "u-" + hashlib.sha256(name.encode()).hexdigest()[:12]


def split_lines(text: str) -> list[str]:
    r"""Cut a comment, review or post into its lines, without blank ones.

    Example:
      >>> split_lines("Good beer.\r\n\r\n  Would come again. ")
      ['Good beer.', 'Would come again.']
    """
    pieces = re.split(r"\r\n?|\n", text) if "\r" in text else text.split("\n")
    return [line for piece in pieces if (line := piece.strip())]


def raw_lines(path: Path) -> list[str]:
    """Return every line of a text file as it is, blank ones too, without the line ends.

    Raises:
      DataError: The file is unreadable, binary or not UTF-8.
    """
    try:
        return _lines_of(path)
    except _Unusable as error:
        raise DataError(f"{path}: {error}; expected UTF-8 text; replace the file") from None


def read_corpus(
    path: Path, *, author_column: str | None = None, text_column: str | None = None, max_words: int | None = None
) -> Corpus:
    """Read a folder, a text file, a table or a LEAF file as a corpus.

    Args:
      path: See the table at the top of this module.
      author_column: Column (JSON field) of the author; found by itself among `records.AUTHOR_COLUMNS`.
      text_column: Column (JSON field) of the text; found by itself among `records.TEXT_COLUMNS`.
      max_words: Words of a row of a table that are read; None for all.

    Raises:
      DataError: The path does not exist, is of a kind unknown here, or holds no usable text.
    """
    suffix = suffix_of(path)
    if max_words is not None and suffix not in TABLE_SUFFIXES and path.exists():
        raise DataError(f"{path}: data.max_words cuts the rows of .jsonl, .csv or .tsv; leave it out for other text")
    if path.is_dir():
        authors, skipped = _read_folder(path)
        corpus = Corpus(path.resolve().name, authors, skipped=skipped)
    elif not path.exists():
        raise DataError(f"{path}: no such file or folder; expected text, .jsonl, .csv, .tsv or LEAF .json")
    elif suffix in TABLE_SUFFIXES:
        records, refused = read_records(path, author_column=author_column, text_column=text_column, max_words=max_words)
        authors, skipped = authors_from(records)
        corpus = Corpus(path.name, authors, skipped=left_out(path, refused) + skipped)
    elif suffix == ".json":
        corpus = _read_leaf(path)
    elif suffix in TEXT_SUFFIXES:
        author, skipped = _read_author(path, path.name)
        corpus = Corpus(path.name, author, natural=False, skipped=skipped)
    else:
        known = ", ".join((*TEXT_SUFFIXES[1:], *TABLE_SUFFIXES, ".json"))
        raise DataError(f"{path}: unknown kind of file {suffix!r}; expected {known} (also .gz) or a folder")
    return must_have_text(corpus, path)


def must_have_text(corpus: Corpus, path: Path) -> Corpus:
    """Return the corpus, or raise `DataError` with what was left out if no text remained."""
    if corpus.authors:
        return corpus
    reasons = "; ".join(f"{s.what}: {s.why}" for s in corpus.skipped[:3]) or "nothing in it"
    more = f" and {len(corpus.skipped) - 3} more" if len(corpus.skipped) > 3 else ""
    raise DataError(f"{path}: no usable text ({reasons}{more}); expected UTF-8 text with at least one line")


def authors_from(records: Sequence[Record]) -> _Found:
    """Group records by pseudonym, in order of time if every record has one, else as they come.

    Example:
      >>> authors_from([Record("ann", "second", "2011-02-01"), Record("ann", "first", "2011-01-31")])[0]
      (Author(name='u-49915e0d7d4b', lines=('first', 'second'), topic=None),)
    """
    skipped: tuple[Skipped, ...] = ()
    try:
        records = by_time(records)
    except ValueError as error:
        if any(record.time is not None for record in records):
            skipped = (Skipped("order of time", f"{error}; rows kept in file order"),)
    lines: dict[str, list[str]] = {}
    for record in records:
        if found := split_lines(record.text):
            lines.setdefault(record.author, []).extend(found)
    return tuple(Author(pseudonym(name), tuple(own)) for name, own in lines.items()), skipped


def left_out(path: Path, refused: Sequence[RefusedRows]) -> tuple[Skipped, ...]:
    """Say which rows of a file were left out.

    Example:
      >>> left_out(Path("chat.csv"), [RefusedRows("empty text", 3, 17)])
      (Skipped(what='3 rows of chat.csv from line 17', why='empty text'),)
    """
    return tuple(Skipped(f"{r.rows} row{'s' * (r.rows > 1)} of {path.name} from line {r.line}", r.why) for r in refused)


class _Unusable(ValueError):
    """Why a file cannot be used."""


def _lines_of(path: Path) -> list[str]:
    try:
        with open_bytes(path) as file:
            data = file.read()
    except Bomb as error:
        raise _Unusable(str(error).removeprefix(f"{path}: ")) from None
    except UNREADABLE as error:
        raise _Unusable(f"unreadable ({why_unreadable(error)})") from None
    if b"\0" in data:
        raise _Unusable("binary (it has a NUL byte)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Unusable(f"not UTF-8 (byte {error.start})") from None
    lines = re.split(r"\r\n?|\n", text)
    return lines if lines[-1] else lines[:-1]


def _read_author(path: Path, name: str) -> _Found:
    try:
        lines = tuple(line for raw in _lines_of(path) if (line := raw.strip()))
    except _Unusable as error:
        return (), (Skipped(name, str(error)),)
    return ((Author(name, lines),), ()) if lines else ((), (Skipped(name, "empty"),))


def _read_folder(folder: Path) -> _Found:
    """A file is a client, by its path in the folder; hidden files are passed over."""
    authors: list[Author] = []
    skipped: list[Skipped] = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        name = inside.as_posix().encode(errors="backslashreplace").decode()
        if not path.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        if suffix_of(path) in TEXT_SUFFIXES:
            author, why_not = _read_author(path, name)
            authors.extend(author)
            skipped.extend(why_not)
        else:
            skipped.append(Skipped(name, f"not a text file ({suffix_of(path)})"))
    return tuple(authors), tuple(skipped)


def _read_leaf(path: Path) -> Corpus:
    try:
        users = leaf_users(json.loads("\n".join(_lines_of(path))))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}; expected a LEAF file: one JSON object") from None
    if users is None:
        raise DataError(f"{path}: no users and user_data; expected a LEAF file; rows of JSON go in a .jsonl")
    authors: list[Author] = []
    skipped: list[Skipped] = []
    kind = None
    for user, samples in users.items():
        if is_broken(user):
            skipped.append(Skipped("a user", "a name that is not UTF-8"))
            continue
        name = pseudonym(user)
        try:
            own, lines = leaf_lines(samples)
            if any(map(is_broken, lines)):
                raise ValueError("not UTF-8")
        except ValueError as error:
            skipped.append(Skipped(name, str(error)))
            continue
        kind = kind or own
        if own == kind and lines:
            authors.append(Author(name, tuple(lines)))
        else:
            skipped.append(Skipped(name, f"holds {own}, others {kind}" if lines else "empty"))
    return Corpus(
        path.name,
        tuple(authors),
        tokenised=kind == "tokens",
        characters=kind == "characters",
        skipped=tuple(skipped),
    )


_MARKS = frozenset({"<BOS>", "<EOS>", "<PAD>"})


def leaf_users(data: object) -> dict[str, Any] | None:
    """Return the samples by user in the order of `users`, or None if this is not a LEAF object."""
    if not isinstance(data, dict):
        return None
    users, user_data = data.get("users"), data.get("user_data")
    if not isinstance(users, list) or not isinstance(user_data, dict):
        return None
    return {str(user): user_data.get(str(user)) for user in users}


def leaf_lines(samples: object) -> tuple[str, list[str]]:
    """Return what one user's samples are (`characters`, `tokens` or `text`) and their lines.

    Raises:
      ValueError: They are none of these; the message says why.

    Example:
      >>> leaf_lines({"x": ["abc", "bcd", "xyz"], "y": ["d", "e", "!"]})
      ('characters', ['abcde', 'xyz!'])
      >>> leaf_lines({"x": [[["<BOS>", "hello"], ["world", "<PAD>"]]], "y": []})
      ('tokens', ['hello world'])
      >>> leaf_lines({"x": ["Two lines", "of text"]})
      ('text', ['Two lines', 'of text'])
    """
    x = samples.get("x") if isinstance(samples, dict) else None
    y = samples.get("y") if isinstance(samples, dict) else None
    if not isinstance(x, list) or not x:
        raise ValueError("no samples x")
    if all(isinstance(sample, str) for sample in x):
        if isinstance(y, list) and _are_windows(x, y):
            return "characters", [line for text in running_text(x, y) for line in split_lines(text)]
        return "text", [line for sample in x for line in split_lines(sample)]
    tokens = [list(_tokens(sample)) for sample in x]
    if any(" " in token for sample in tokens for token in sample):
        raise ValueError("samples x are records with fields, not lists of tokens")
    return "tokens", [" ".join(sample) for sample in tokens if sample]


def running_text(x: list[str], y: list[str]) -> list[str]:
    """Join windows that each lie one character after the one before; a gap starts a new text.

    Example:
      >>> running_text(["to b", "o be", " be "], ["e", " ", "o"])
      ['to be o']
    """
    texts: list[list[str]] = []
    due = None
    for window, following in zip(x, y, strict=True):
        if window == due:
            texts[-1].append(following)
        else:
            texts.append([window, following])
        due = window[1:] + following
    return ["".join(parts) for parts in texts]


def _are_windows(x: list[str], y: list[Any]) -> bool:
    return (
        len(y) == len(x)
        and all(isinstance(following, str) and len(following) == 1 for following in y)
        and len({len(window) for window in x}) == 1
        and len(x[0]) > 1
    )


def _tokens(sample: object) -> Iterator[str]:
    if isinstance(sample, str):
        if sample.strip() and sample not in _MARKS:
            yield sample
    elif isinstance(sample, list):
        for part in sample:
            yield from _tokens(part)
    else:
        raise ValueError(f"samples x hold {type(sample).__name__}, not text")


# One person's text


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
