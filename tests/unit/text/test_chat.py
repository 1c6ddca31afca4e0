"""The built-in chat: what is in the package, what is not in it, and the script that made it."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import DataError
from keyfed.keyboard.keys import table
from keyfed.text.catalogue import NAMED, at_hand, load_corpus
from keyfed.text.corpus import Corpus, pseudonym
from keyfed.text.published import packaged_chat, read_chat
from keyfed.text.vocab import SPECIALS, UNK
from tests.vocabulary import build_vocab

ROOT = Path(__file__).parents[3]
MAKE = ROOT / "corpora" / "chat" / "make.py"
SOURCE = Path(os.environ.get("KEYFED_DATA") or ROOT.parent / "shared" / "data") / "ubuntu-irc" / "messages.tsv.gz"
SHA256 = "c9954d963fd809e9dc47f210a283aa29003a852bd31e9ea32ed7b949e9e74e0f"
AUTHORS, LINES = 7_546, 180_950
OFFENSIVE = ROOT / "src" / "keyfed" / "keyboard" / "web" / "data" / "offensive.json"
SLURS = frozenset(json.loads(OFFENSIVE.read_text("utf-8"))["slurs"])
MARKS = ("<link>", "<email>", "<address>", "<phone>", "<key>", "<name>")

# Written without a look at make.py's rules: wider where that costs nothing, a range where a rule may be right.
PERSONAL = {
    "e-mail address": r"[\w.+-]+@[\w-]+\.\w",
    "user at a machine": r"(?<![\w@])[a-z][\w.-]*@[a-z][\w-]+",
    "IPv4 address": r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])",
    "IPv6 address": r"(?<![\w:])(?:[0-9a-f]{1,4}:){4,}[0-9a-f]|\bfe80::\w",
    "MAC address": r"(?:\b[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b",
    "link": r"[a-z]://\w|\bwww\.\w|\b(?:pastebin|youtube|github|imgur|facebook)\.com",
    "telephone number": r"\+\d{8}|(?<![\w.])\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\w)|(?<![\w./=:-])\d{9,}(?!\w|\.\w)",
    # Names of software, packages (openoffice.org-base) and D-Bus (org.gnome.x) have the shape and are none.
    "host name": r"(?<![\w])(?!(?:x\.org|(?:asp|paint|vb|ado)\.net)\b)[a-z0-9][\w-]*\."
    r"(?:com|org|net|edu|gov|info|biz|(?:com|co|net|org|ac)\.[a-z]{2}|de|uk|eu|ca|fr|nl|ru|se|au|us|lan)"
    r"(?!\w|-\w|\.\w)|\.(?:com|org|net)_",
    "home folder": r"/home/\w|\\users\\\w",
    "name": r"\bmy name is \w",
}


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str]]:
    """The packaged file as it is."""
    body = gzip.decompress((packaged_chat() / "chat.tsv.gz").read_bytes()).decode()
    return [(name, text) for name, _, text in (line.partition("\t") for line in body.splitlines())]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus("chat")


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_chat", MAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


class TestPackaged:
    def test_it_is_the_file_of_the_card(self, rows: list[tuple[str, str]]) -> None:
        data = (packaged_chat() / "chat.tsv.gz").read_bytes()
        assert hashlib.sha256(data).hexdigest() == SHA256
        assert len(data) <= 5_000_000
        card = (ROOT / "docs" / "chat.md").read_text("utf-8")
        for fact in (SHA256, f"{AUTHORS:,}", f"{LINES:,}", f"{len(data):,}"):
            assert fact in card
        assert len(rows) == LINES

    def test_licence_and_attribution_are_in_its_folder(self) -> None:
        assert (packaged_chat() / "LICENSE").read_text("utf-8").startswith("Attribution 4.0 International")
        assert "CC BY 4.0" in (packaged_chat() / "ATTRIBUTION.md").read_text("utf-8")
        assert "CC BY 4.0" in NAMED["chat"].about

    def test_it_is_read_without_network_or_data_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the network was used")

        monkeypatch.delenv("KEYFED_DATA", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(socket, "socket", refuse)
        assert at_hand("chat")
        corpus = load_corpus("chat")
        assert (len(corpus.authors), sum(len(a.lines) for a in corpus.authors)) == (AUTHORS, LINES)
        assert not corpus.skipped
        assert list(tmp_path.iterdir()) == []

    def test_authors_are_pseudonyms_in_their_own_order(self, rows: list[tuple[str, str]]) -> None:
        names = [name for name, _ in rows]
        assert all(re.fullmatch(r"u-[0-9a-f]{12}", name) for name in set(names))
        assert names == sorted(names)  # the order of the source does not show
        assert min(names.count(name) for name in set(names[:500])) >= 5

    @pytest.mark.parametrize("kind", PERSONAL)
    def test_nothing_personal_has_its_shape(self, kind: str, rows: list[tuple[str, str]]) -> None:
        every = "\n".join(text for _, text in rows)  # no pattern matches a line end
        found = [every.count("\n", 0, match.start()) + 1 for match in re.finditer(PERSONAL[kind], every, re.IGNORECASE)]
        assert not found, f"{kind} in lines {found[:5]} of chat.tsv.gz"

    def test_no_slur_is_left(self, rows: list[tuple[str, str]]) -> None:
        every = {word for _, text in rows for word in letters(text)}  # a vocabulary of any size is a part of it
        assert len(every) > 30_000
        assert not [word for word in every if is_slur(word)]
        assert 20 <= len(SLURS) < len(table("offensive")["words"])
        assert set(table("offensive")["words"]) >= SLURS  # one list: the keyboard does not suggest them either

    def test_no_flood_is_left(self, rows: list[tuple[str, str]]) -> None:
        writers: defaultdict[str, list[str]] = defaultdict(list)
        repeated: Counter[tuple[str, str]] = Counter()
        for number, (name, text) in enumerate(rows, 1):
            own, words = letters(text), text.lower().split()
            if len(words) >= 8:
                ((word, times),) = Counter(words).most_common(1)
                assert 2 * times < len(words) or not letters(word), f"one word: line {number}"
            if len(text) >= 2 * 20:
                assert not re.search(r"([^\W\d_]{2,10})\1{19}", text), f"the same characters: line {number}"
            assert text.count("<name>") < 5, f"a list of nicks: line {number}"
            if len(words) >= 5:
                repeated[name, " ".join(own) or text.lower()] += 1
            if len(own) >= 8:
                writers[" ".join(own)].append(name)
        assert not [names for names in writers.values() if len(set(names)) > 1]  # copied
        assert max(repeated.values()) == 1  # a long line of an author

    @pytest.mark.skipif(not SOURCE.exists(), reason="the source, ubuntu-irc/messages.tsv.gz, is not in the data folder")
    def test_no_nick_is_left_that_the_word_list_has_not(self, rows: list[tuple[str, str]], make: ModuleType) -> None:
        nicks = {message.nick.lower() for message in make.read_rows(SOURCE)}
        words = make.read_words()
        secret = {nick for nick in nicks if len(nick) >= 3} - words
        assert len(secret) > 14_000
        whole = bare("\n".join(text for _, text in rows))
        typed = {*re.findall(r"[a-z0-9_\[\]\\^{}|`-]+", whole), *re.findall(r"[a-z0-9]+", whole)}
        assert len(typed & secret) == 0
        assert len(typed & nicks & words) > 400  # those that are words stay
        # Nor do the names say who is who: the salt is not the empty one.
        names = {name for name, _ in rows}
        assert not names & {pseudonym(nick) for nick in nicks}
        assert not names & set(make.pseudonyms(map(make.person, nicks), b"").values())
        assert not {name.removeprefix("u-") for name in names} & nicks


def letters(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def is_slur(word: str) -> bool:
    return word in SLURS or any(len(slur) >= 6 and word.startswith(slur) for slur in SLURS)


def bare(text: str) -> str:
    return re.sub("|".join(MARKS), " ", text).lower()


class TestPlaceholders:
    def test_they_are_unknown_words_in_every_vocabulary(self, corpus: Corpus, rows: list[tuple[str, str]]) -> None:
        written = "\n".join(text for _, text in rows)
        marked = sum(written.count(mark) for mark in MARKS)
        read = "\n".join(line for author in corpus.authors for line in author.lines)
        assert marked > 15_000
        assert read.count("<unk>") >= marked
        assert not any(mark in read for mark in MARKS)
        some = [author.lines for author in corpus.authors[:500]]
        vocab, _ = build_vocab(some, kind="word", size=None, lower=True, tokenised=False, min_clients=1)
        assert [word for word in vocab.words if "<" in word and len(word) > 1] == list(SPECIALS)

    def test_the_words_around_stay(self, tmp_path: Path) -> None:
        (tmp_path / "chat.tsv.gz").write_bytes(gzip.compress(b"u-1\tsee <link>, <name>!\nu-1\ta <b> c\n"))
        (author,) = read_chat(tmp_path).authors
        assert author.lines == ("see <unk>, <unk>!", "a <b> c")
        vocab, _ = build_vocab([author.lines], kind="word", size=None, lower=True, tokenised=False, min_clients=1)
        assert [int(i) == UNK for i in vocab.encode(["see <unk>, <unk>!"])[:5]] == [False, True, False, True, False]

    @pytest.mark.parametrize("row", [b"no tab", b"\ttext", b"u-1\t"])
    def test_a_damaged_file_is_said_without_its_text(self, row: bytes, tmp_path: Path) -> None:
        (tmp_path / "chat.tsv.gz").write_bytes(gzip.compress(b"u-1\tfine\n" + row + b"\n"))
        with pytest.raises(DataError, match=r"line 2: not a name and a text .*install Keyfed again") as error:
            read_chat(tmp_path)
        assert "no tab" not in str(error.value)


SLUR = next(word for word in sorted(SLURS) if len(word) >= 6)
FLOOD = "does anybody know why my sound is gone ?"
# The text that a person types; what is left of it, None for nothing.
LINES_OF_RULES = [
    ("zorbax: is it plugged in?", "is it plugged in?"),
    ("Zorbax, quuxly_: both of you are wrong", "both of you are wrong"),
    ("@zorbax: an at sign before", "an at sign before"),
    ("never-seen[away]: he wrote nothing himself", "he wrote nothing himself"),
    ("digital: a nick that is a word goes where it leads", "a nick that is a word goes where it leads"),
    ("digital cameras stay what they are", "digital cameras stay what they are"),
    ("question: this is no nick", "question: this is no nick"),
    ("ask zorbax about sound", "ask <name> about sound"),
    ("it is Quuxly's fault", "it is <name>'s fault"),
    ("[x] nullo: a blank inside of a nick", "a blank inside of a nick"),
    ("is [x] nullo still there", "is <name> still there"),
    ("<zorbax> i said so yesterday", "<name> i said so yesterday"),
    ("zorbax|laptop is another machine", "<name> is another machine"),
    ("see http://paste.example.com/abc?x=1#y, please", "see <link>, please"),
    ("try www.example.org/some/path today", "try <link> today"),
    ("look on example.co.uk/forum for it", "look on <link> for it"),
    ("the mirror at de.archive.example.com is slow", "the mirror at <address> is slow"),
    ("block *.example.net.ar and .example.com for me", "block <address> and <address> for me"),
    ("nothing works but example.com--then again it may", "nothing works but <address>--then again it may"),
    ("hm...example.org or irc.***-example.net is down", "hm...<address> or <address> is down"),
    ("see /var/lib/apt/lists/ppa.example.net_annb_tools_Packages there", "see /var/lib/apt/lists/<address> there"),
    ("64 bytes from host-192.0.2.7.example.net.in arrived", "64 bytes from <address> arrived"),
    ("X.org, asp.net and openoffice.org-base stay names", "X.org, asp.net and openoffice.org-base stay names"),
    ("org.gnome.desktop and net.ipv4.ip_forward stay, too", "org.gnome.desktop and net.ipv4.ip_forward stay, too"),
    ("netstat has 192.0.2.17.43651 in its list", "netstat has <address> in its list"),
    ("edit /etc/rc.local and xorg.conf with care", "edit /etc/rc.local and xorg.conf with care"),
    ("mail me: ann.b+c@example.org thanks", "mail me: <email> thanks"),
    ("write to ann at example dot com now", "write to <email> now"),
    ("i ran root@annbox:~# and it failed", "i ran <address>:~# and it failed"),
    ("ping 192.168.0.17 works", "ping <address> works"),
    ("ping6 fe80::213:77ff:fe38:4972 works too", "ping6 <address> works too"),
    ("its mac is 00:13:77:38:49:72 i think", "its mac is <address> i think"),
    ("it is 12:59:58 here and 10.04 is out", "it is 12:59:58 here and 10.04 is out"),
    ("Jul 3 16:24:46 ann-pc kernel: usb 6-3", "Jul 3 16:24:46 <address> kernel: usb 6-3"),
    ("call +49 175 208 8077 or 555-867-5309 tonight", "call <phone> or <phone> tonight"),
    ("ports 6881-6999 stay open for it", "ports 6881-6999 stay open for it"),
    ("gpg key 40976EAF437D05B5 is missing again", "gpg key <key> is missing again"),
    ("chown -R me /home/annb/music please", "chown -R me /home/<name>/music please"),
    ("add ppa:annb/tools to your sources", "add ppa:<name>/tools to your sources"),
    ("hello my name is Annabel and i am new", "hello my name is <name> and i am new"),
    ("two  blanks and a \x02bold\x02 word here", "two blanks and a bold word here"),
    ("broken <unconvertable> text of another code", None),
    ("* waves at everyone in the room", None),
    ("http://example.com/only-a-link", None),
    (f"what {SLUR} wrote this here", None),
    (f"{SLUR.upper()}ology is no subject", None),
    ("lag lag lag , lag lag and lag lag !", None),
    (":)" * 25 + " bye", None),
    ("tttthhhheeee wwwwiiiinnnnnnneeeerrrr", None),
    ("zorbax quuxly zorbax nullo: Quuxly zorbax unheard", None),
    ("we snigger at this --------------------------------", "we snigger at this --------------------------------"),
    (":)", ":)"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The lines of each author that the script, run as a program, makes of a small source."""
    folder = tmp_path_factory.mktemp("chat")
    source: list[tuple[str, str]] = [("Wrytir", text) for text, _ in LINES_OF_RULES]
    source += [("Wrytir_", FLOOD)] * 4 + [("Wrytir", FLOOD.upper() + "!!1")] + [("wrytir|away", "ok")] * 6
    for part, nick in enumerate(("zorbax", "Quuxly", "digital", "Quuxly_", "Quuxly")):
        source += [(nick, f"line {'abcde'[part]} {'uvwxyz'[n]} of mine") for n in range(2 if nick[0] == "Q" else 6)]
    source += [("FloodBot1", "Please don't flood")] * 9 + [("ubottu", "sound is <unknown>")] * 9
    source += [("metronome", f"tick {n}") for n in range(30)]  # one line but for its number
    source += [("rarely", "i was here once"), ("[x] nullo", "and i was too")]
    source += [
        ("zorbax", "never gonna give you up , never gonna let"),
        ("digital", "Never gonna give you up never gonna let 2"),
    ]
    source += [("hater", f"word {n} and {'uvwxyz'[n]} too") for n in range(6)] + [("hater", f"these {SLUR}")] * 2
    source += [("rude", f"a word {n} and {'uvwxyz'[n]} too") for n in range(6)] + [("rude", f"this {SLUR}")]
    source += [("flooder", f"my {'uvwxyz'[n]}") for n in range(6)] + [
        ("flooder", f"i said it {n} times over") for n in range(9)
    ]
    text = "".join(f"train\t2010-01-02\t{n // 60:02}:{n % 60:02}\t{who}\t{t}\n" for n, (who, t) in enumerate(source))
    (folder / "messages.tsv.gz").write_bytes(gzip.compress(text.encode()))
    command = [sys.executable, str(MAKE), str(folder / "messages.tsv.gz"), str(folder / "chat.tsv.gz")]
    first = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert '"authors": 5' in first.stdout
    one = read_chat(folder)
    marked = gzip.decompress((folder / "chat.tsv.gz").read_bytes()).decode().splitlines()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    two = read_chat(folder)
    assert {a.name for a in one.authors}.isdisjoint(a.name for a in two.authors)  # the salt is drawn anew
    assert sorted(a.lines for a in one.authors) == sorted(a.lines for a in two.authors)  # nothing else is
    return [[line.split("\t")[1] for line in marked if line.startswith(a.name)] for a in one.authors]


@pytest.fixture(scope="module")
def written(made: list[list[str]]) -> list[str]:
    (own,) = (lines for lines in made if "is it plugged in?" in lines)
    return own


class TestScript:
    @pytest.mark.parametrize(("typed", "left"), LINES_OF_RULES)
    def test_each_rule(self, typed: str, left: str | None, written: list[str]) -> None:
        if left is None:
            assert typed not in written
            assert not any("broken" in line or "waves" in line or line == "<link>" for line in written)
            assert not any("lag" in line or "bye" in line or "unheard" in line or "tttt" in line for line in written)
            assert not any(is_slur(word) for line in written for word in letters(line))
        else:
            assert left in written

    def test_lines_keep_their_order(self, written: list[str]) -> None:
        expected = [left for _, left in LINES_OF_RULES if left is not None]
        assert written == [*expected, FLOOD, "ok", "ok", "ok"]  # floods once, short lines three times

    def test_programs_and_authors_of_few_lines_go(self, made: list[list[str]]) -> None:
        every = [line for lines in made for line in lines]
        assert not any("flood" in line or "sound is <" in line or "tick" in line for line in every)
        assert "i was here once" not in every
        assert not any("never gonna" in line.lower() for line in every)  # copied by two
        assert sorted(map(len, made))[:4] == [6, 6, 6, 6]  # zorbax, digital, rude, and both spellings of Quuxly as one

    def test_authors_who_insult_or_flood_go(self, made: list[list[str]]) -> None:
        every = [line for lines in made for line in lines]
        assert not any(line.startswith(("word", "my ")) or "i said it" in line for line in every)
        (rude,) = (lines for lines in made if lines[0].startswith("a word"))  # one line with a slur: the line goes
        assert len(rude) == 6

    @settings(deadline=None)
    @given(
        st.lists(st.text("ab1! ", min_size=1, max_size=30).map(lambda text: " ".join(text.split()) or "a"), max_size=12)
    )
    def test_what_floods_leave_is_in_order_and_no_flood(self, make: ModuleType, lines: list[str]) -> None:
        kept = make.without_floods(lines)
        left = iter(lines)
        assert all(line in left for line in kept)  # in order
        assert make.without_floods(kept) == kept
        long = [make.shape(line) for line in kept if len(line.split()) >= make.SHORT_LINE]
        assert len(set(long)) == len(long)
        assert {make.shape(line) for line in kept} == {make.shape(line) for line in lines}  # at most repeats went

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True), min_size=1, max_size=4),
        st.sampled_from(["com", "org", "net", "de", "co.uk", "net.in", "com.au", "lan"]),
        st.sampled_from([("see ", " now"), ("(", ")"), ("*.", "."), ("so...", "--then"), ('"', '"'), ("at ", ", ok")]),
    )
    def test_every_host_name_becomes_a_placeholder(
        self, make: ModuleType, labels: list[str], end: str, around: tuple[str, str]
    ) -> None:
        host = ".".join([*labels, end])
        text = make.scrub(around[0] + host + around[1], Counter())
        if host not in ("x.org",):
            assert re.search(r"<address>|<link>", text)
            assert end not in text
        assert make.scrub(text, Counter()) == text

    @pytest.mark.slow
    @pytest.mark.skipif(not SOURCE.exists(), reason="the source, ubuntu-irc/messages.tsv.gz, is not in the data folder")
    def test_the_packaged_file_is_what_it_makes(self, make: ModuleType, rows: list[tuple[str, str]]) -> None:
        packaged: dict[str, list[str]] = {}
        for name, text in rows:
            packaged.setdefault(name, []).append(text)
        again = make.make(make.read_rows(SOURCE), make.read_words(), make.read_slurs(), b"another salt")
        assert sorted(own for _, own in again.authors) == sorted(packaged.values())
        assert again.counts["result"]["authors"] == AUTHORS

    def test_a_source_of_other_columns_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "m.gz").write_bytes(gzip.compress(b"train\t2010-01-02\tann\thello\n"))
        command = [sys.executable, str(MAKE), str(tmp_path / "m.gz"), str(tmp_path / "out.gz")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode != 0
        assert "line 1: not five columns" in ran.stderr
        assert not (tmp_path / "out.gz").exists()
