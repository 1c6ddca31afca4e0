"""A corpus is authors with their lines, and any text on disk can become one.

`read_corpus` takes what people have lying about:

    folder or .zip                                            a file is a client, or all files are one person's
    *.txt, *.txt.gz, *.md, extension-less files               one pool of text, to be cut into shards
    .jsonl / .csv / .tsv (also .gz) with author and text      an author is a client, rows in order of time
    exports of messengers, mail, .docx (`keyfed.text.exports`)  an author is a client
    LEAF .json (users, user_data: {u: {x, y}})                a user is a client

What cannot be used (empty, binary, broken JSON, a missing field) is left out and counted in `Corpus.skipped` with the
reason. Only a corpus with nothing left is an error. Handles found in an author
column are kept as hashes only: see `pseudonym`.

LEAF (Caldas et al. 2018, arXiv 1812.01097) has three kinds of samples that hold text. `leaf_lines` turns each back into
running lines; anything else (images, tweets with their metadata) is refused:

    shakespeare   x = windows of 80 characters, y = the character after each
    reddit        x = lists (of lists) of tokens with <BOS>, <EOS> and <PAD>
    any other     x = strings

A client trains on its owner's text only (`own_corpus`). A table, an export or a LEAF file names its authors. Where
there are several, the owner says which one it is (`--me NAME`). Files without names of authors are the owner's.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from keyfed.errors import DataError
from keyfed.text.exports import KINDS, REMEDIES, are_notes, lines_of, read_export, read_export_folder
from keyfed.text.exports import load_json as load_export
from keyfed.text.exports.messages import OWNER
from keyfed.text.records import Record, RefusedRows, by_time, form_of, is_broken, read_records
from keyfed.text.sources import File, Packed, Unusable, leaves_of, suffix_of, why_unreadable

TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv")
_PSEUDONYM = re.compile(r"u-[0-9a-f]{12}")
FOLDERS = ("clients", "person")  # whose the files of a folder are

_Found = tuple[tuple["Author", ...], tuple["Skipped", ...]]


@dataclass(frozen=True, slots=True)
class Author:
    """One natural client: a person, a role, an article, a file.

    Attributes:
      name: Never a chat, forum or review handle (see `pseudonym`).
      lines: In order of time; one line is one unit ended by <eos>: a sentence, a message, a paragraph.
      topic: What the author's text is about where that is known (play, decade).
      signed: The text says who wrote it; otherwise its owner did.
    """

    name: str
    lines: tuple[str, ...]
    topic: str | None = None
    signed: bool = True


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
      formats: What its files were taken for.
      files: Files that name no author and count as a client each, because nothing says whose they are.
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
    formats: tuple[str, ...] = ()
    files: int = 0

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


def kept_name(name: str) -> str:
    """Return the pseudonym of a name; one that is a pseudonym stays.

    Example:
      >>> kept_name("crimsun"), kept_name("u-d24fd8f7867d")
      ('u-d24fd8f7867d', 'u-d24fd8f7867d')
    """
    return name if _PSEUDONYM.fullmatch(name) else pseudonym(name)


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
        return lines_of(path)
    except Unusable as error:
        raise DataError(f"{path}: {error}; expected UTF-8 text; replace the file") from None


def read_corpus(
    path: Path,
    *,
    author_column: str | None = None,
    text_column: str | None = None,
    max_words: int | None = None,
    me: str | None = None,
    folder: str | None = None,
) -> Corpus:
    """Read a folder, a .zip or a file as a corpus.

    Args:
      path: See the table at the top of this module.
      author_column: Column (JSON field, or number) of the author; found by itself among `records.AUTHOR_COLUMNS`.
      text_column: Column (JSON field, or number) of the text; found by itself among `records.TEXT_COLUMNS`.
      max_words: Words of a row of a table that are read; None for all.
      me: The one author whose text is wanted, as the text spells the name, or its pseudonym; it becomes one pool.
      folder: One of `FOLDERS`; None: one person's where most files are notes, else clients.

    Raises:
      DataError: The path does not exist, is of a kind unknown here, or holds no usable text.
    """
    suffix = suffix_of(path)
    columns = {"author_column": author_column, "text_column": text_column, "max_words": max_words}
    if folder is not None and folder not in FOLDERS:
        raise DataError(f'data.folder is "{folder}"; expected clients (a file is a client) or person (all are one\'s)')
    try:
        there = path.exists()
    except OSError as error:
        raise DataError(f"{path}: {why_unreadable(error)}; expected text that you may read") from None
    if not there:
        raise DataError(_absent(path))
    if max_words is not None and suffix not in TABLE_SUFFIXES:
        raise DataError(f"{path}: data.max_words cuts the rows of .jsonl, .csv or .tsv; leave it out for other text")
    if path.is_dir() or suffix == ".zip":
        corpus = _read_folder(path, columns, folder)
    elif suffix not in (*TABLE_SUFFIXES, *KINDS):
        known = ", ".join((".txt", ".md", *TABLE_SUFFIXES, ".json", ".mbox", ".eml", ".docx", ".xml", ".zip"))
        remedy = f"; {REMEDIES[suffix]}" if suffix in REMEDIES else ""
        raise DataError(f"{path}: unknown kind of file {suffix!r}; expected {known} (also .gz) or a folder{remedy}")
    elif suffix == ".json" and (leaf := _read_leaf(path)) is not None:
        corpus = leaf
    else:
        found = _read_file(path, path.name, columns)
        authors, skipped = _authors_of([found], path.name, person=True)
        natural = len(authors) > 1
        corpus = Corpus(path.name, authors, natural=natural, skipped=skipped, formats=_formats([found]))
    corpus = must_have_text(corpus, path)
    return corpus if me is None else replace(own_corpus(corpus, path, me), natural=False)


def _absent(path: Path) -> str:
    if any(step in ("http:", "https:", "ftp:") for step in path.parts):
        return f"{path.name}: addresses of the web are not read; fetch the file and name it"
    return f"{path}: no such file or folder; expected text, .jsonl, .csv, .tsv, .json, .zip or a folder"


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was read: messages by author, or lines of its owner."""

    name: str
    form: str
    records: Sequence[Record]
    lines: Sequence[str]
    skipped: tuple[Skipped, ...]


def _read_file(file: File, name: str, columns: Mapping[str, Any]) -> _File:
    """Read one file; what cannot be used of it is in `skipped`."""
    suffix = suffix_of(file)
    try:
        if isinstance(file, Packed) and file.suffix == ".gz":  # nothing bounds the size of what is packed twice
            raise Unusable("not a text file (.gz in a .zip); unpack the .zip, and name the folder")
        if suffix in TABLE_SUFFIXES:
            records, refused = read_records(file, **columns)
            form = file_form(file, columns)
            return _File(name, form, records, (), left_out(name.rpartition("/")[2], refused))
        found = read_export(file, columns)  # messages, or the lines of prose
    except Unusable as error:
        return _File(name, "", (), (), (Skipped(name, str(error)),))
    if isinstance(found, list):
        lines = [line for raw in found if (line := raw.strip())]
        form = {".md": "Markdown", ".markdown": "Markdown", ".docx": "Word"}.get(suffix, "text")
        return _File(name, form, (), lines, () if lines else (Skipped(name, "empty"),))
    skipped = tuple(Skipped(f"{n:,} message{'s' * (n > 1)} of {name}", why) for why, n in found.left_out.items())
    return _File(name, found.format, found.records, (), skipped)


def file_form(file: File, columns: Mapping[str, Any]) -> str:
    """Say how a table is written."""
    if suffix_of(file) == ".jsonl":
        return "rows of JSON"
    return str(form_of(file, columns.get("author_column"), columns.get("text_column")))


def _authors_of(files: Sequence[_File], name: str, *, person: bool) -> _Found:
    """Join the files: who is named in several is one author, and what names none is one person's or a client a file."""
    lines: dict[tuple[str, bool], list[str]] = {}
    skipped: list[Skipped] = []
    for file in files:
        skipped += file.skipped
        owners = [record for record in file.records if record.author == OWNER]
        own = [*file.lines, *(line for record in owners for line in split_lines(record.text))]
        if own:
            lines.setdefault((name if person else file.name, False), []).extend(own)
        authors, late = authors_from([record for record in file.records if record.author != OWNER])
        skipped += late
        for author in authors:
            lines.setdefault((author.name, True), []).extend(author.lines)
    return tuple(Author(name, tuple(own), signed=signed) for (name, signed), own in lines.items()), tuple(skipped)


def _formats(files: Sequence[_File]) -> tuple[str, ...]:
    """Say what files were taken for, with their number.

    Example:
      >>> _formats([_File("a", "text", (), ("x",), ()), _File("b", "text", (), ("y",), ())])
      ('text, 2 files',)
    """
    found = Counter(file.form for file in files if file.lines or file.records)
    return tuple(f"{form}, {n} files" if n > 1 else form for form, n in found.items())


def must_have_text(corpus: Corpus, path: Path) -> Corpus:
    """Return the corpus, or raise `DataError` with what was left out if no text remained."""
    if corpus.authors:
        return corpus
    reasons = "; ".join(f"{s.what}: {s.why}" for s in corpus.skipped[:3]) or "nothing in it"
    more = f" and {len(corpus.skipped) - 3} more" if len(corpus.skipped) > 3 else ""
    raise DataError(f"{path}: no usable text ({reasons}{more}); expected at least one line of text")


def authors_from(records: Sequence[Record]) -> _Found:
    """Group records by pseudonym, in order of time if every record has one, else as they come.

    Example:
      >>> authors_from([Record("ann", "second", "2011-02-01"), Record("ann", "first", "2011-01-31")])[0]
      (Author(name='u-49915e0d7d4b', lines=('first', 'second'), topic=None, signed=True),)
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


def left_out(name: str, refused: Sequence[RefusedRows]) -> tuple[Skipped, ...]:
    """Say which rows of a file were left out.

    Example:
      >>> left_out("chat.csv", [RefusedRows("empty text", 3, 17)])
      (Skipped(what='3 rows of chat.csv from line 17', why='empty text'),)
    """
    return tuple(Skipped(f"{r.rows} row{'s' * (r.rows > 1)} of {name} from line {r.line}", r.why) for r in refused)


def _read_folder(place: Path, columns: Mapping[str, Any], whose: str | None) -> Corpus:
    """Read a folder or .zip; files are named by their path in it, and those that are not shown are passed over."""
    closed: dict[str, str] = {}
    try:
        leaves = leaves_of(place, closed)
        whole = read_export_folder(leaves)
    except Unusable as error:
        raise DataError(f"{place}: {error}") from None
    name = place.resolve().name
    if whole is not None:
        skipped = tuple(Skipped(f"{n:,} message{'s' * (n > 1)}", why) for why, n in whole.left_out.items())
        files = [_File(name, whole.format, whole.records, (), skipped)]
    else:
        files = [_read_file(leaf.file, leaf.name, columns) for leaf in leaves]
    notes = are_notes([file.name for file in files if file.lines])
    person = whose == "person" or (whose is None and (notes or whole is not None))
    authors, skipped = _authors_of(files, name, person=person)
    natural = len(authors) > 1 or not person
    unsaid = 0 if person or whose is not None else sum(not author.signed for author in authors)
    skipped += tuple(Skipped(what, why) for what, why in closed.items())
    return Corpus(name, authors, natural=natural, skipped=_together(skipped), formats=_formats(files), files=unsaid)


def _together(skipped: Sequence[Skipped]) -> tuple[Skipped, ...]:
    """Count files that were left out for one reason, where there are many.

    Example:
      >>> _together([Skipped("a.jpg", "not a text file (.jpg)"), Skipped("b.jpg", "not a text file (.jpg)")])
      (Skipped(what='2 files', why='not a text file (.jpg)'),)
    """
    files = [s for s in skipped if s.why.startswith("not a text file")]
    found = Counter(s.why for s in files)
    few = [s for s in skipped if found[s.why] < 2]
    return (*few, *(Skipped(f"{n:,} files", why) for why, n in found.items() if n > 1))


def _read_leaf(path: Path) -> Corpus | None:
    """Read a LEAF file; None for JSON of another kind."""
    try:
        users = leaf_users(load_export(path))
    except Unusable as error:
        raise DataError(f"{path}: {error}") from None
    if users is None:
        return None
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
        lines = f"{self.lines:,} line{'s' * (self.lines != 1)}"
        return f"{lines}, {self.words:,} word{'s' * (self.words != 1)}{more}"


def own_corpus(corpus: Corpus, path: Path, me: str | None) -> Corpus:
    """Return a corpus whose only author is its owner.

    Args:
      path: where the corpus was read from; files of a folder are one person's.
      me: the owner, as the file spells it; None where there is one author only.

    Raises:
      DataError: there are several authors and `me` is none of them. The message has no name and no quotation.
    """
    signed = [author for author in corpus.authors if author.signed]
    unsigned = [author for author in corpus.authors if not author.signed]
    mine = signed
    if len(signed) > 1 or (signed and me is not None):
        mine = [author for author in signed if me is not None and author.name in (me, pseudonym(me))]
        if not mine and (me is None or not unsigned):  # a chat without the owner, among other files, is no error
            raise _several(path, len(signed), me)
    chosen = {author.name for author in mine}
    authors = [author for author in corpus.authors if not author.signed or author.name in chosen]
    lines = tuple(chain.from_iterable(author.lines for author in authors))
    if not lines:
        raise DataError(f"{path}: no message of that --me; spell it as the file does")
    own = Author("me", lines, signed=any(author.lines for author in mine))
    return replace(corpus, authors=(own,), valid=None, test=None, files=0)


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
