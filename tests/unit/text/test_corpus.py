"""Reading text by path: folders, pools, tables, LEAF; what is left out, and what is an error."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyfed.errors import DataError
from keyfed.text.corpus import Author, Corpus, pseudonym, read_corpus, running_text, split_lines
from keyfed.text.records import Record, by_time

# Any text that is one line: no line ends, no NUL, no lone surrogate, not blank at its ends.
one_line = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), min_size=1, max_size=40)
    .map(str.strip)
    .filter(bool)
)
rows = st.lists(st.tuples(st.sampled_from(["ann", "bob", "Zoë"]), one_line), min_size=1, max_size=12)
in_tmp = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def by_author(corpus: Corpus) -> dict[str, tuple[str, ...]]:
    return {author.name: author.lines for author in corpus.authors}


def expected(pairs: list[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for name, _ in pairs)
    return {pseudonym(name): tuple(text for who, text in pairs if who == name) for name in names}


class TestFolder:
    def test_a_file_is_a_client_and_its_lines_are_the_lines(self, tmp_path: Path) -> None:
        write(tmp_path / "ann.txt", "\ufeffFirst.\r\n\r\n  Second. \n")
        write(tmp_path / "deep" / "bob.txt.gz", "Packed.")
        write(tmp_path / "carl", "No extension.\n")
        write(tmp_path / "dora.md", "# Title\n")
        assert by_author(read_corpus(tmp_path)) == {
            "ann.txt": ("First.", "Second."),
            "carl": ("No extension.",),
            "deep/bob.txt.gz": ("Packed.",),
            "dora.md": ("Title",),
        }

    def test_what_cannot_be_used_is_counted_with_its_reason(self, tmp_path: Path) -> None:
        write(tmp_path / "good.txt", "Good.")
        write(tmp_path / "blank.txt", "\n \n")
        (tmp_path / "greek.txt").write_bytes("Ζωή είναι".encode("cp1253"))
        (tmp_path / "binary.txt").write_bytes(b"text\0more")
        (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 500)[:-12])
        write(tmp_path / "photo.png", "no")
        write(tmp_path / ".hidden", "no")
        corpus = read_corpus(tmp_path)
        assert list(by_author(corpus)) == ["good.txt"]
        reasons = {skipped.what: skipped.why.split(" (")[0] for skipped in corpus.skipped}
        assert reasons == {
            "blank.txt": "empty",
            "greek.txt": "not UTF-8, UTF-16 or cp1252; save it as UTF-8",
            "binary.txt": "binary",
            "cut.txt.gz": "unreadable",
            "photo.png": "not a text file",
        }

    def test_nothing_left_is_an_error_that_says_why(self, tmp_path: Path) -> None:
        write(tmp_path / "blank.txt", "")
        with pytest.raises(DataError, match=r"no usable text \(blank.txt: empty\)"):
            read_corpus(tmp_path)
        with pytest.raises(DataError, match="nothing in it"):
            read_corpus(write(tmp_path / "empty" / ".keep", "").parent)


def test_one_file_is_one_pool(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path / "book.txt", "One.\n\nTwo.\n"))
    assert corpus.authors == (Author("book.txt", ("One.", "Two."), signed=False),)
    assert not corpus.natural


@pytest.mark.parametrize("name", ["absent.txt", "absent"])
def test_a_missing_path_is_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no such file") as caught:
        read_corpus(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape("'.pdf'; expected .txt, .md, .jsonl")):
        read_corpus(write(tmp_path / "paper.pdf", "x"))


class TestTables:
    @given(rows)
    @in_tmp
    def test_jsonl_gives_the_text_back(self, tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
        text = "".join(json.dumps({"user": name, "body": line}) + "\n" for name, line in pairs)
        assert by_author(read_corpus(write(tmp_path / "chat.jsonl.gz", text))) == expected(pairs)

    @given(rows)
    @in_tmp
    def test_csv_gives_the_text_back(self, tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
        file = io.StringIO()
        csv.writer(file).writerows([("nick", "message"), *pairs])
        assert by_author(read_corpus(write(tmp_path / "chat.csv", file.getvalue()))) == expected(pairs)

    def test_tsv_has_no_quoting(self, tmp_path: Path) -> None:
        text = 'author\ttext\nann\t"lone quote\nbob\tnext\n'
        assert by_author(read_corpus(write(tmp_path / "chat.tsv", text))) == expected(
            [("ann", '"lone quote'), ("bob", "next")]
        )

    def test_handles_are_never_kept(self, tmp_path: Path) -> None:
        corpus = read_corpus(write(tmp_path / "a.csv", "author,text\nmoon_river,hello\n"))
        assert corpus.authors[0].name == pseudonym("moon_river")
        assert re.fullmatch("u-[0-9a-f]{12}", corpus.authors[0].name)
        assert "moon_river" not in repr(corpus)

    def test_named_columns_win_over_found_ones(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "author,text,Screen,Note\nann,one,bob,two\n")
        corpus = read_corpus(path, author_column="screen", text_column="Note")
        assert by_author(corpus) == expected([("bob", "two")])

    @pytest.mark.parametrize(
        "times",
        [
            ("10", "9"),
            ("2011-10-02", "2011-10-01T23:00:00"),
            ("2011-01-01T00:30:00Z", "2011-01-01T01:00+01:00"),
        ],
    )
    def test_rows_are_put_in_order_of_time(self, tmp_path: Path, times: tuple[str, str]) -> None:
        text = f"date,user,text\n{times[0]},ann,late\n{times[1]},ann,soon\n"
        assert by_author(read_corpus(write(tmp_path / "a.csv", text))) == {pseudonym("ann"): ("soon", "late")}

    def test_times_that_cannot_be_compared_leave_the_file_order_and_say_so(self, tmp_path: Path) -> None:
        corpus = read_corpus(write(tmp_path / "a.csv", "date,user,text\n2/1/11,ann,a\n1/1/11,ann,b\n"))
        assert by_author(corpus) == {pseudonym("ann"): ("a", "b")}
        assert "a time is neither a number nor an ISO date" in corpus.skipped[0].why

    def test_bad_rows_are_counted_by_reason(self, tmp_path: Path) -> None:
        good = {"author": "ann", "text": "Hello\nthere"}
        bad = [
            {**good, "author": None},
            {"author": "ann"},
            {**good, "text": " "},
            {**good, "text": "a\0"},
            [1],
        ]
        lines = [
            json.dumps(good),
            "{broken",
            *map(json.dumps, bad),
            '{"author": "ann", "text": "\\ud800"}',
            "{",
        ]
        corpus = read_corpus(write(tmp_path / "a.jsonl", "\n".join(lines)))
        assert by_author(corpus) == {pseudonym("ann"): ("Hello", "there")}
        assert {(skipped.what.split(" of ")[0], skipped.why) for skipped in corpus.skipped} == {
            ("2 rows", "broken JSON"),
            ("1 row", "missing author"),
            ("1 row", "missing text"),
            ("1 row", "empty text"),
            ("1 row", "binary (it has a NUL byte)"),
            ("1 row", "not a JSON object"),
            ("1 row", "not UTF-8"),
        }
        assert corpus.skipped[0].what == "2 rows of a.jsonl from line 2"

    def test_csv_rows_that_do_not_fit_the_header_or_the_encoding(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes("user,text\nann,café\nann,too,many\nann\n".encode() + b"ann,caf\xe9\n")
        corpus = read_corpus(path)
        assert by_author(corpus) == {pseudonym("ann"): ("café",)}
        assert [s.why.partition(";")[0] for s in corpus.skipped] == [
            "more fields than the header",
            "missing text",
            "not UTF-8",
        ]
        assert corpus.skipped[0].why.endswith("needs quotation marks")

    def test_a_table_cut_short_keeps_what_could_be_read(self, tmp_path: Path) -> None:
        lines = "".join(json.dumps({"user": f"u{i * i}", "text": f"text {i**3}"}) + "\n" for i in range(4000))
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode())[:-2000])
        corpus = read_corpus(path)
        assert 0 < len(corpus.authors) < 4000
        assert corpus.skipped[-1].why.startswith("unreadable from here on")

    def test_no_columns_is_an_error_that_lists_what_was_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"its 2 columns do not include author \(or user, …\) and text"):
            read_corpus(write(tmp_path / "a.csv", "a,b\n1,2\n"))

    def test_a_field_may_be_long(self, tmp_path: Path) -> None:
        corpus = read_corpus(write(tmp_path / "a.csv", f"user,text\nann,{'x' * 300_000}\n"))
        assert len(corpus.authors[0].lines[0]) == 300_000


class TestLeaf:
    def write(self, path: Path, **user_data: object) -> Path:
        users = list(user_data)
        return write(path, json.dumps({"users": users, "num_samples": [1] * len(users), "user_data": user_data}))

    @given(st.text("abc ", min_size=6, max_size=60))
    def test_windows_give_the_running_text_back(self, text: str) -> None:
        windows = [text[i : i + 5] for i in range(len(text) - 5)]
        assert running_text(windows, list(text[5:])) == [text]

    def test_character_windows(self, tmp_path: Path) -> None:
        corpus = read_corpus(self.write(tmp_path / "a.json", HAMLET={"x": ["to b", "o be"], "y": ["e", ","]}))
        assert corpus.authors == (Author(pseudonym("HAMLET"), ("to be,",)),)
        assert corpus.characters

    def test_token_lists_and_what_is_not_text(self, tmp_path: Path) -> None:
        x = [[["<BOS>", "good", "<PAD>"]], [["beer", "<EOS>"]]]
        path = self.write(
            tmp_path / "a.json",
            ann={"x": x, "y": {}},
            image={"x": [[0.5]]},
            tweet={"x": [["1", "Mon Apr", "me"]]},
            no=1,
        )
        corpus = read_corpus(path)
        assert by_author(corpus) == {pseudonym("ann"): ("good", "beer")}
        assert corpus.tokenised
        assert [skipped.why for skipped in corpus.skipped] == [
            "samples x hold float, not text",
            "samples x are records with fields, not lists of tokens",
            "no samples x",
        ]

    def test_strings(self, tmp_path: Path) -> None:
        corpus = read_corpus(self.write(tmp_path / "a.json.gz", ann={"x": ["One.\nTwo.", "Three."], "y": [0, 1]}))
        assert by_author(corpus) == {pseudonym("ann"): ("One.", "Two.", "Three.")}
        assert not corpus.tokenised
        assert not corpus.characters

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[]", "JSON without messages"),
            ("{", r"broken JSON \(line 1, column 2\)"),
            ('{"users": 3}', "JSON of an unknown form; expected an export"),
            ("\0", "binary"),
        ],
    )
    def test_other_json_is_an_error(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(DataError, match=said):
            read_corpus(write(tmp_path / "a.json", text))


class TestFingerprint:
    @given(st.lists(one_line, min_size=1, max_size=4), st.lists(one_line, min_size=1, max_size=4))
    def test_equal_only_for_equal_text(self, left: list[str], right: list[str]) -> None:
        def of(lines: list[str]) -> str:
            return Corpus("c", (Author("a", tuple(lines)),)).fingerprint()

        assert (of(left) == of(right)) == (left == right)

    def test_every_part_counts_and_the_name_of_the_corpus_does_not(self) -> None:
        base = Corpus("c", (Author("a", ("x", "y")),))
        others = [
            Corpus("c", (Author("b", ("x", "y")),)),
            Corpus("c", (Author("a", ("x",)), Author("a", ("y",)))),
            Corpus("c", base.authors, valid=()),
            Corpus("c", base.authors, test=()),
            Corpus("c", base.authors, valid=("x",)),
        ]
        assert len({corpus.fingerprint() for corpus in [base, *others]}) == 6
        assert Corpus("d", base.authors, about="z").fingerprint() == base.fingerprint()
        assert len(base.fingerprint()) == 64


@given(st.lists(one_line, max_size=5), st.sampled_from(["\n", "\r\n", "\n\n", "\r"]))
def test_split_lines_undoes_join(lines: list[str], end: str) -> None:
    assert split_lines(end.join(lines)) == lines


@given(st.lists(st.integers(0, 5), max_size=20))
def test_by_time_is_stable(times: list[int]) -> None:
    ordered = by_time([Record("a", str(i), str(time)) for i, time in enumerate(times)])
    assert [int(record.text) for record in ordered] == sorted(range(len(times)), key=times.__getitem__)
