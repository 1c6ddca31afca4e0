"""Make the built-in corpus `chat` from the #ubuntu chat of Kummerfeld et al. (2019), CC BY 4.0.

    python corpora/chat/make.py messages.tsv.gz src/keyfed/text/chat/chat.tsv.gz

The source has five columns (split, day, minute, nick, text), the result two (pseudonym, text). The steps, in order:

    1. rows     bots, actions and unreadable lines go; nicks of one person (`ann`, `ann_`, `Ann|away`) are one author
    2. scrub    links, addresses, telephone numbers and keys become placeholders (`RULES`)
    3. names    a leading `nick:` goes; a nick elsewhere becomes <name> unless `words.txt` has it
    4. lines    lines with slurs, lists of nicks, floods and what several authors copied go
    5. authors  those with fewer than `LEAST_LINES` lines and those who flood or insult (`unwanted_authors`) go; the
                others get pseudonyms under a salt that is not kept

Everything but the salt is deterministic. Days and minutes are not kept; the lines of an author keep their order.
The slurs are those of the keyboard's list of offensive words (`SLURS`). Nothing here is imported by the package, which
reads the result only.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SLURS = HERE.parents[1] / "src" / "keyfed" / "keyboard" / "web" / "data" / "offensive.json"
LEAST_LINES = 5  # of an author who is kept
LEAST_NAME = 3  # characters of a nick that is looked for: xD and :P are no names
SHORT_LINE = 5  # words; an author may repeat shorter lines ("yes", "thank you")
MOST_IN_A_ROW = 3  # of the same short line
COPIED_WORDS, COPIED_BY = 8, 2  # a line this long by so many authors is pasted, not typed
FLOOD_WORDS, FLOOD_SHARE = 8, 0.5  # a line this long of which one word is this share is no message
FLOOD_TIMES = 20  # nor is one with the same characters so many times in a row
SAME_START = 12  # words; long lines of one author that begin with the same are one line, sent again
MOST_NAMES = 4  # of a line; one with more is a list of nicks, and not all of them are known
COMPOUND = 6  # letters of a slur that is looked for at the start of longer words, too
SLUR_LINES, SLUR_SHARE = 2, 0.1  # an author of so many lines with slurs, this share of all, goes
UNWANTED_SHARE = 0.5  # an author goes of whose lines more than this share went
REPEATING, REPEATING_LINES = 0.5, 20  # an author of so many lines who repeats this share of them is a program

PLACEHOLDERS = ("<link>", "<email>", "<address>", "<phone>", "<key>", "<name>")

# Nicks of the channel's programs. FloodBot warns who writes too fast; ubotu, ubottu and ubot3 answer with stored facts.
BOT = re.compile(r"l?ubot(?:tu|u)?\d*|floodbot\d*|.*bot\d*", re.IGNORECASE)

# `ambiguous` endings are words or file types, too (rc.local, look.at, script.pl): they need a path or three labels.
_LABEL = r"[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?"
_PLAIN_TLD = (
    "com|org|net|edu|gov|mil|info|biz|name|mobi|aero|asia|arpa|local|lan|localdomain|localnet|internal|"
    "ac|ar|au|br|ca|cl|cn|cz|de|dk|ee|es|eu|fi|fr|gr|hk|hr|hu|ie|il|io|jp|kr|lt|lv|mx|nl|nu|nz|pt|ro|rs|ru|se|si|sk|"
    "th|tk|tr|tv|tw|ua|uk|us|za|ws|fm|cc|ly"
)
_ANY_TLD = rf"{_PLAIN_TLD}|at|be|ch|id|in|is|it|me|my|no|pl|sh|so|to|la|gd|gl|st|vu|li|am|im|as|cx|ph|sg|py|md|bg|by"
_SECOND = "com|co|net|org|ac|edu|gov"  # before a country's ending of any kind (net.in)
_END = r"(?!\w|-\w|\.\w)"  # openoffice.org-base is a package
_FRONT = r"(?:(?<![\w@.-])(?:[\w.-]*\*+[.-]|\.)?|(?<=\.\.))"  # also "*.example.com", ".example.com", "so...example.com"
_NOT_HOSTS = r"(?!(?:x\.org|rc\.local|asp\.net|paint\.net|vb\.net|ado\.net|node\.io|socket\.io)\b)"
_PATH = r"(?:(?::\d+)?(?:/\S*|[?#]\w\S*))"
_HEX = r"[0-9a-f]{1,4}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"


class Rule(NamedTuple):
    """What a pattern finds becomes `put`."""

    name: str
    pattern: re.Pattern[str]
    put: str


def _rule(name: str, pattern: str, put: str) -> Rule:
    return Rule(name, re.compile(pattern, re.IGNORECASE), put)


# In this order: a link may hold an address, an address may hold a number.
RULES = (
    _rule("link", r"[\w+.-]+://\S+|\b(?:https?|ftp|hxxp)[:;/]+\S+|\bmailto:\S+|\bwww\d?\.\S+", "<link>"),
    _rule("email", r"[\w.+=!~%-]+@(?:[a-z0-9_-]+\.)+[a-z]{2,}", "<email>"),
    _rule(
        "email",
        r"\S+\s*(?:[\[({<]at[\])}>]|\sat\s)\s*\S+\s*(?:[\[({<]dot[\])}>]|\sdot\s)\s*(?:com|org|net|edu|de|uk|fr)\b",
        "<email>",
    ),
    _rule("email", r"\S+\s?@\s?(?:gmail|hotmail|yahoo|googlemail|msn|aol)\b\S*", "<email>"),
    _rule("address", r"(?<![\w@])(?!\d+x\d+@)[\w.+=!~%-]+@[\w.\[\]-]+", "<address>"),
    _rule("link", rf"(?<![\w@./-]){_NOT_HOSTS}(?:{_LABEL}\.)+(?:{_ANY_TLD}){_PATH}", "<link>"),
    _rule("address", rf"(?<![\w@.-])(?:{_LABEL}\.)+(?:com|org|net)_\S+", "<address>"),  # lists of apt
    _rule("address", rf"{_FRONT}{_NOT_HOSTS}(?:{_LABEL}\.)+(?:{_PLAIN_TLD}){_END}", "<address>"),
    _rule("address", rf"{_FRONT}{_NOT_HOSTS}(?:{_LABEL}\.)+(?:{_SECOND})\.[a-z]{{2}}{_END}", "<address>"),
    _rule("address", rf"@(?:{_LABEL}\.)+(?:{_PLAIN_TLD}){_END}", "<address>"),
    _rule(
        "address",
        r"(?<=\d\d:\d\d:\d\d )[\w.-]+(?= [\w./-]+(?:\[\d+\])?:)|(?<=\blinux )[\w-]+(?= [2-6]\.\d)",
        "<address>",
    ),
    _rule("address", r"(?<![\w-])(?!sub-|non-|net-)[a-z]\w*-(?:laptop|notebook|netbook)(?![\w-])", "<address>"),
    _rule("address", rf"(?<![\w@./-])(?:{_LABEL}\.){{2,}}(?:at|be|ch|it|no|pl|me)(?![\w-]|\.\w)", "<address>"),
    _rule("address", rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?:\.\d{{5}})?(?![\w]|\.\d)", "<address>"),
    _rule("address", rf"(?:[\w-]+[.-])?<address>(?:\.{_LABEL})*\.(?:{_ANY_TLD}){_END}", "<address>"),
    _rule("address", r"(?<![\w:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5,}(?![\w:-])", "<address>"),
    _rule("address", rf"(?<![\w:])(?:{_HEX}:){{4,}}(?:{_HEX}|:)+(?:/\d+)?(?!\w)", "<address>"),
    _rule("address", rf"(?<![\w:])(?:{_HEX}(?::{_HEX})*)?::{_HEX}(?::{_HEX})*(?:/\d+)?(?![\w:])", "<address>"),
    _rule("key", r"(?<![\w-])(?:0x)?(?:[0-9a-f]{4}[:-]?){4,}[0-9a-f]*(?![\w-])", "<key>"),
    _rule("key", r"(?<![\w-])(?:[0-9a-f]{4} {1,2}){9}[0-9a-f]{4}(?![\w-])", "<key>"),
    _rule("phone", r"(?<![\w.+-])\+\d[\d ().-]{6,}\d(?![\w-])", "<phone>"),
    _rule("phone", r"(?<![\w.-])(?:1[ .-])?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?![\w-])", "<phone>"),
    _rule("phone", r"(?<![\w.-])(?:\d{3}-\d{4}|0\d{2,4}[ /-]\d{5,8}|1-8\d\d-[\w-]{7,})(?![\w.-])", "<phone>"),
    _rule("phone", r"(?<![\w.])\d{9,}(?!\w|\.\d)", "<phone>"),
    _rule("home", r"(?<=/home/)[\w.-]*\w|(?<=/users/)[\w.-]*\w|(?<=\\users\\)[\w.-]+", "<name>"),
    _rule("home", r"(?<=documents and settings[\\/])[\w.-]+|(?<=/media/)[\w.-]+(?=/)|(?<=ppa:)[\w.+-]+", "<name>"),
    _rule("my name", r"(?<=my name is )[\w^`|-]+|(?<=my name's )[\w^`|-]+|(?<=my username is )[\w^`|-]+", "<name>"),
)
_PUNCTUATION = re.compile(r"[.,;:!?)\]}>'\"]+$")

RUN = re.compile(r"[A-Za-z0-9_\[\]\\^{}|`-]+")  # characters of nicks (RFC 2812, 2.3.1)
_EDGES = "_`^|[]{}\\-"
_LEAD = re.compile(r"\s*@?(?P<who>[A-Za-z0-9_\[\]\\^{}|`-]+)(?P<mark>\s?[:,;>]+)(?P<rest>\s+|$|(?=<))")
_GLUED = re.compile(r"\s*@?(?P<who>[A-Za-z0-9_\[\]\\^{}|`-]+)(?P<mark>[:,])(?P<rest>)(?=[^\W\d_]{2})")
_STATE = re.compile(r"[|_-](?:away|afk|zzz+|sleep|sleeping|work|laptop|home|bbl|brb|gone|busy|off|out)$")
_BROKEN = re.compile(r"<unconvertable>|�")
_CONTROL = re.compile(r"\x03\d{0,2}(?:,\d{1,2})?|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]")
_WRAPPED = re.compile(r"[<(\[{|`^_\\-]*(<name>)[>\]}|`^_\\-]*")
_MARK = re.compile(rf"({'|'.join(PLACEHOLDERS)})")
_TOKEN = re.compile(r"<[a-z]+>|\w+(?:['-]\w+)*|[^\w\s]")
_LETTERS = re.compile(r"[^\W\d_]+")
_AROUND = ".,;:!?()'\"*"
_STRETCHED = re.compile(r"(?:([^\W\d_])\1{3,}(?!\1)){4}")
_AGAIN = re.compile(rf"(.{{1,20}}?)\1{{{FLOOD_TIMES - 1},}}")


class Message(NamedTuple):
    """One row of the source; `text` is what is left of it so far."""

    day: str
    nick: str
    text: str


class Made(NamedTuple):
    """The corpus: authors in order of their pseudonyms, their lines in order of time; and what was counted."""

    authors: list[tuple[str, list[str]]]
    counts: dict[str, dict[str, int]]


def read_rows(path: Path) -> list[Message]:
    """Read the source; a row that has not five columns is an error."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != 5), None)
    if wrong is not None:
        raise SystemExit(f"{path}, line {wrong}: not five columns (split, day, minute, nick, text)")
    rows.sort(key=lambda row: (row[1], row[2]))  # stable: the order of one minute stays
    return [Message(day, "".join(nick.split()), text) for _, day, _, nick, text in rows]  # see `joined`


def read_words(path: Path = HERE / "words.txt") -> frozenset[str]:
    """Read the words that stay though a nick is spelt so; lines that begin with # are comments."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return frozenset(line for line in lines if line and not line.startswith("#"))


def person(nick: str) -> str:
    """Return what the nicks of one person have in common.

    Example:
      >>> {person(nick) for nick in ("Ann", "ann_", "ann`", "Ann|away")}
      {'ann'}
    """
    low = nick.lower()
    return _STATE.sub("", low.rstrip(_EDGES)).rstrip(_EDGES) or low


def programs(messages: Iterable[Message]) -> dict[str, str]:
    """Return the nicks that are programs, each with the reason: the name, or lines that repeat but for numbers."""
    texts: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        shape = re.sub(r"\d+|\S+://\S+", "#", _LEAD.sub("", message.text, count=1))
        texts[message.nick].append(shape)
    found = {}
    for nick, shapes in texts.items():
        if BOT.fullmatch(nick):
            found[nick] = "name"
        elif len(shapes) >= REPEATING_LINES and 1 - len(set(shapes)) / len(shapes) >= REPEATING:
            found[nick] = "repeats"
    return found


def scrub(text: str, touched: Counter[str]) -> str:
    """Put placeholders for links, addresses, numbers and home folders; punctuation behind them stays.

    Example:
      >>> scrub("see http://paste.example.com/1234, or mail ann@example.org", Counter())
      'see <link>, or mail <email>'
    """
    for rule in RULES:

        def put(match: re.Match[str], rule: Rule = rule) -> str:
            touched[rule.name] += len(_TOKEN.findall(match[0]))
            end = _PUNCTUATION.search(match[0])
            return rule.put + (end[0] if end else "")

        text = rule.pattern.sub(put, text)
    return text


def addressed(texts: Sequence[str], words: frozenset[str]) -> set[str]:
    """Return names written `name:` or `name,` at the start of at least half the lines that have them; no listed words.

    These are people of the channel who wrote nothing in the days of the source.
    """
    leading: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for text in texts:
        lead = _LEAD.match(text)
        if lead and lead["mark"].strip() in (":", ","):
            leading[lead["who"].lower()] += 1
        every.update({run.lower() for run in RUN.findall(text)})
    return {
        name
        for name, times in leading.items()
        if len(name) >= LEAST_NAME
        and 2 * times >= every[name]
        and name not in words
        and any(letter.isalpha() for letter in name)
    }


def joined(nicks: Iterable[str]) -> Callable[[str], str]:
    """Return what writes a nick like `[x]ann` in one piece: the source has a blank behind the bracket."""
    cut = sorted({nick for nick in nicks if "]" in nick.rstrip("]")}, key=len, reverse=True)
    if not cut:
        return lambda text: text
    either = "|".join(re.escape(nick).replace(r"\]", r"\]\s?") for nick in cut)
    pattern = re.compile(rf"(?<![\w\[])(?:{either})", re.IGNORECASE)
    return lambda text: pattern.sub(lambda match: "".join(match[0].split()) + match[0][len(match[0].rstrip()) :], text)


def is_name(run: str, names: set[str], words: frozenset[str]) -> bool:
    """Tell whether a run of nick characters is a name: whole, without its edges, or in one of its pieces."""
    low = run.lower()
    if low in words:
        return False
    bare = low.strip(_EDGES)
    pieces = {low, bare, *re.split(r"[^a-z0-9]+", low)}
    return any(len(piece) >= LEAST_NAME and piece in names and piece not in words for piece in pieces)


def drop_lead(text: str, there: set[str], names: set[str], words: frozenset[str]) -> tuple[str, int]:
    """Drop `nick:` and `nick,` at the start, also several; return the rest and how many went.

    A word of the list goes where a person of that nick wrote on the same day (`there`), or on any day if a colon is
    behind it. An unlisted word with a colon is a name, known or not.
    """
    dropped = 0
    while dropped < 4:
        lead = _LEAD.match(text) or _GLUED.match(text)
        if lead is None or len(lead["who"]) < 2:
            break
        who = lead["who"].lower()
        colon = ":" in lead["mark"] and len(who) >= LEAST_NAME and not who.isdecimal()
        listed = who in words or who.strip(_EDGES) in words
        if not (
            who in there
            or person(who) in there
            or is_name(who, names, words)
            or (colon and (not listed or who in names or person(who) in names))
        ):
            break
        text = text[lead.end() :]
        dropped += 1
    return text, dropped


def put_names(text: str, names: set[str], words: frozenset[str]) -> tuple[str, int]:
    """Put <name> for nicks that are no words; return the text and how many there were."""
    pieces = _MARK.split(text)
    count = 0

    def put(match: re.Match[str]) -> str:
        nonlocal count
        if not is_name(match[0], names, words):
            return match[0]
        count += 1
        return "<name>"

    pieces[::2] = [RUN.sub(put, piece) for piece in pieces[::2]]
    return _WRAPPED.sub(r"\1", "".join(pieces)), count


def read_slurs(path: Path = SLURS) -> re.Pattern[str]:
    """Return what finds a slur: a whole word of the list, or a word that begins with one of `COMPOUND` letters."""
    words: list[str] = json.loads(path.read_text(encoding="utf-8"))["slurs"]
    either = "|".join(re.escape(word) + (r"\w*" if len(word) >= COMPOUND else "") for word in sorted(words))
    return re.compile(rf"(?<![^\W_])(?:{either})(?![^\W_])", re.IGNORECASE)


def shape(line: str) -> str:
    """Return a line's letters: lines that differ in case, numbers and marks have the same.

    Example:
      >>> shape("Why won't 10.04 boot?!") == shape("why won't 10.10 boot")
      True
    """
    return " ".join(_LETTERS.findall(line.lower())) or line.lower()


def is_flood(line: str) -> bool:
    """Tell whether a line is one word, or the same characters, again and again, or spells with each letter fourfold.

    A ruler of one sign is no flood.

    Example:
      >>> [is_flood(line) for line in ("buy buy buy now and buy buy buy", ":)" * 30, "bbbbuuuuyyyyiiiitttt", "-" * 60)]
      [True, True, True, False]
    """
    words = [word.strip(_AROUND) for word in line.lower().split()]
    if len(words) >= FLOOD_WORDS:
        word, times = Counter(words).most_common(1)[0]
        if times >= FLOOD_SHARE * len(words) and _LETTERS.search(_MARK.sub("", word)):
            return True
    if _STRETCHED.search(line):
        return True
    return any(len(set(found[1])) > 1 or found[1].isalpha() for found in _AGAIN.finditer(line))


def without_floods(lines: Sequence[str]) -> list[str]:
    """Keep an author's long lines once, by `shape` and start, and a short line at most three times in a row.

    Example:
      >>> without_floods(["ok", "why does it not boot ?", "Why does it not boot", "ok", "ok", "ok", "ok"])
      ['ok', 'why does it not boot ?', 'ok', 'ok', 'ok']
    """
    kept: list[str] = []
    seen: set[str] = set()
    for line in lines:
        low = line.lower()
        if len(line.split()) >= SHORT_LINE:
            letters = shape(line)
            forms = {letters, " ".join(letters.split()[:SAME_START])}
            if forms & seen:
                continue
            seen |= forms
        elif [k.lower() for k in kept[-MOST_IN_A_ROW:]] == [low] * MOST_IN_A_ROW:
            continue
        kept.append(line)
    return kept


def unwanted_authors(written: Mapping[str, int], left: Mapping[str, int], slurs: Mapping[str, int]) -> set[str]:
    """Return the authors who go as a whole, from how many lines each wrote, how many are left, how many had slurs."""
    return {
        who
        for who, lines in written.items()
        if lines - left.get(who, 0) > UNWANTED_SHARE * lines
        or (slurs.get(who, 0) >= SLUR_LINES and slurs[who] >= SLUR_SHARE * lines)
    }


def pseudonyms(people: Iterable[str], salt: bytes) -> dict[str, str]:
    """Return a name for everyone: BLAKE2b of the nick under a secret salt, 48 bits, all different."""
    found = {who: "u-" + hashlib.blake2b(who.encode(), key=salt, digest_size=6).hexdigest() for who in people}
    if len(set(found.values())) < len(found):
        raise SystemExit("two authors got the same pseudonym; run it again")
    return found


def make(messages: Sequence[Message], words: frozenset[str], slurs: re.Pattern[str], salt: bytes) -> Made:
    """Make the corpus: all five steps."""
    lost: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    source = sum(len(_TOKEN.findall(message.text)) for message in messages)
    bots = programs(messages)
    names = {form for message in messages for form in (message.nick.lower(), person(message.nick))}
    there: dict[str, set[str]] = defaultdict(set)
    for message in messages:
        there[message.day] |= {message.nick.lower(), person(message.nick)}

    def keep(messages: Iterable[Message], why: str, wanted: Callable[[Message], bool]) -> list[Message]:
        kept = []
        for message in messages:
            if wanted(message):
                kept.append(message)
            else:
                lost[why] += 1
        return kept

    rows = keep(messages, "bots", lambda m: m.nick not in bots)
    rows = keep(rows, "unreadable", lambda m: not _BROKEN.search(m.text))
    rows = [m._replace(text=_CONTROL.sub("", m.text).strip()) for m in rows]
    rows = keep(rows, "actions", lambda m: not m.text.startswith("* "))
    rows = [m._replace(text=scrub(m.text, touched)) for m in rows]
    join = joined({message.nick for message in messages})
    rows = [m._replace(text=join(m.text)) if "]" in m.text else m for m in rows]
    names |= addressed([m.text for m in rows], words)
    cleaned = []
    for message in rows:
        text, leads = drop_lead(message.text, there[message.day], names, words)
        text, others = put_names(text, names, words)
        touched["leading nick"] += leads
        touched["nick elsewhere"] += others
        cleaned.append(message._replace(text=" ".join(text.split())))
    rows = keep(cleaned, "empty", lambda m: bool(_MARK.sub("", m.text).strip()))
    written = Counter(person(m.nick) for m in rows)
    insults = Counter(person(m.nick) for m in rows if slurs.search(m.text))
    rows = keep(rows, "slurs", lambda m: not slurs.search(m.text))
    rows = keep(rows, "lists of nicks", lambda m: m.text.count("<name>") <= MOST_NAMES)
    rows = keep(rows, "floods", lambda m: not is_flood(m.text))
    writers: dict[str, set[str]] = defaultdict(set)
    for message in rows:
        if len(shape(message.text).split()) >= COPIED_WORDS:
            writers[shape(message.text)].add(person(message.nick))
    rows = keep(rows, "copied", lambda m: len(writers.get(shape(m.text), ())) < COPIED_BY)

    lines: dict[str, list[str]] = defaultdict(list)
    for message in rows:
        lines[person(message.nick)].append(message.text)
    before = sum(map(len, lines.values()))
    lines = defaultdict(list, {who: without_floods(own) for who, own in lines.items()})
    lost["floods"] += before - sum(map(len, lines.values()))
    few = [who for who, own in lines.items() if len(own) < LEAST_LINES]
    lost["authors of few lines"] = sum(len(lines.pop(who)) for who in few)
    unwanted = unwanted_authors(written, {who: len(own) for who, own in lines.items()}, insults) & lines.keys()
    lost["unwanted authors"] = sum(len(lines.pop(who)) for who in sorted(unwanted))
    known = pseudonyms(lines, salt)
    authors = sorted((known[who], own) for who, own in lines.items())
    tokens = Counter(token for _, own in authors for line in own for token in _TOKEN.findall(line))
    return Made(
        authors,
        {
            "source": {"lines": len(messages), "tokens": source, "nicks": len({m.nick for m in messages})},
            "lines dropped": dict(lost),
            "authors dropped": {"few lines": len(few), "unwanted": len(unwanted)},
            "bots": dict(Counter(why for why in bots.values())),
            "tokens touched": dict(touched),
            "result": {
                "authors": len(authors),
                "lines": sum(len(own) for _, own in authors),
                "tokens": sum(tokens.values()),
                **{mark: tokens[mark] for mark in PLACEHOLDERS},
            },
        },
    )


def write(made: Made, path: Path) -> None:
    """Write the corpus, packed; the same corpus gives the same bytes."""
    body = "".join(f"{name}\t{line}\n" for name, own in made.authors for line in own)
    path.write_bytes(gzip.compress(body.encode(), compresslevel=9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="messages.tsv.gz")
    parser.add_argument("out", type=Path, help="chat.tsv.gz to write")
    args = parser.parse_args()
    made = make(read_rows(args.source), read_words(), read_slurs(), secrets.token_bytes(32))
    write(made, args.out)
    sha256 = hashlib.sha256(args.out.read_bytes()).hexdigest()
    print(json.dumps({**made.counts, "file": {"bytes": args.out.stat().st_size, "sha256": sha256}}, indent=2))


if __name__ == "__main__":
    main()
