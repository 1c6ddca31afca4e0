"""Readers of the published corpora: each takes the folder of its files and returns a `Corpus`.

Every file may be packed with gzip or not. Nothing here touches the network (see `catalogue`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from keyfed.errors import DataError
from keyfed.text.corpus import Author, Corpus, Skipped, authors_from, left_out, must_have_text, raw_lines
from keyfed.text.posts import read_posts
from keyfed.text.records import UNREADABLE, Record, is_broken, open_text, read_records, why_unreadable

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


def read_reddit(folder: Path) -> Corpus:
    """Comments of one subreddit by speaker, without deleted speakers and removed texts."""
    path = _existing(folder, "utterances.jsonl")
    records, refused = read_records(path, author_column="speaker", text_column="text")
    tests: _Tests = {
        "author deleted": lambda r: r.author in _GONE,
        "text deleted or removed": lambda r: r.text.strip() in _GONE,
    }
    return _by_author("reddit", records, folder, tests, left_out(path, refused))


def read_yelp(folder: Path) -> Corpus:
    """Yelp reviews by user, in order of date."""
    path = _existing(folder, "yelp.csv.gz")
    records, refused = read_records(path, author_column="user_id", text_column="text")
    return _by_author("yelp", records, folder, {}, left_out(path, refused))


def read_stackexchange(folder: Path) -> Corpus:
    """Questions and answers of one Stack Exchange site by owner; a paragraph is a line."""
    path = _existing(folder, "beer.stackexchange.Posts.xml")
    records, why = read_posts(path)
    return _by_author("stackexchange", records, folder, {}, tuple(Skipped(f"{n} posts", w) for w, n in why.items()))


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
