"""A table of lines says what the corpus in memory says, however many processes read it."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from keyfed.errors import DataError
from keyfed.text import records
from keyfed.text import table as linetable
from keyfed.text.corpus import read_corpus
from keyfed.text.partition import line_sizes, partition, partition_lines
from keyfed.text.records import Span, read_records, spans_of, stream_records
from keyfed.text.table import count_types, encode_lists, table_of, tabulate
from keyfed.text.vocab import VocabRules
from tests.vocabulary import build_vocab

WORDS = ["Don’t", "panic:", "it's", "1,234.5", "well-being", "😀!", "<unk>", "é", "na\u00efve", "a.b", "(x)", "…"]


def rows(times: str = "all", count: int = 120, seed: int = 7) -> list[dict[str, object]]:
    rng = random.Random(seed)
    found: list[dict[str, object]] = []
    for k in range(count):
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 6))]
        lines[0] += f" only{rng.randint(0, 80)}"  # some are used by one author alone
        end = rng.choice(["\n", "\r\n", "\r", "\n\n "])
        row: dict[str, object] = {"author": f"u{rng.randint(0, 14)}", "text": end.join(lines)}
        if times == "all" or (times == "some" and k % 3):
            row["timestamp"] = rng.randint(0, 40)
        found.append(row)
    return found


def write_table(path, found, junk=True) -> None:
    """Write rows with what does not belong among them, CRLF and blank lines too."""
    with path.open("w", encoding="utf-8", newline="") as file:
        for k, row in enumerate(found):
            if junk and k % 17 == 5:
                file.write(
                    random.Random(k).choice(['{"author": "x"\n', '{"author": "x"}\n', "\n", "[1]\n", '{"text": "y"}\n'])
                )
            if junk and k % 29 == 3:
                file.write(json.dumps({"author": "half", "text": "a \ud800 b"}) + "\n")
            file.write(" " * (k % 2) + json.dumps(row, ensure_ascii=k % 2 == 0) + ("\r\n" if k % 5 == 0 else "\n"))


def same(path, folder, kind="word", lower=True) -> None:
    """Compare a table with the corpus in memory: authors, sizes, partition, vocabulary, tokens, fingerprint."""
    shutil.rmtree(folder, ignore_errors=True)
    corpus = read_corpus(path)
    for table in (tabulate(path, folder, kind, lower=lower), table_of(corpus, kind, lower=lower)):
        same_table(corpus, table, kind, lower)


def same_table(corpus, table, kind, lower) -> None:
    assert table.corpus.fingerprint() == corpus.fingerprint()
    assert (table.corpus.name, table.corpus.skipped) == (corpus.name, corpus.skipped)
    assert table.index.names == [a.name for a in corpus.authors]
    lines = [line for a in corpus.authors for line in a.lines]
    assert table.index.first.tolist() == np.cumsum([0, *(len(a.lines) for a in corpus.authors)]).tolist()
    assert table.index.sizes.tolist() == line_sizes(lines, corpus.characters).tolist()
    for partitioned in ("natural", "iid") if corpus.natural else ("iid",):
        clients = 3 if partitioned == "iid" else None
        population = partition(corpus, partitioned, clients=clients, seed=2)
        cut = partition_lines(table.index, partitioned, clients=clients, seed=2)
        assert list(cut.names) == [c.name for c in population.clients]
        rules = {"kind": kind, "size": 60, "lower": lower, "min_clients": 2 if len(cut.names) > 1 else 1}
        train = [c.train for c in population.clients]
        vocab, summary = build_vocab(train, tokenised=corpus.tokenised, **rules)
        counts, holders = count_types(table, cut.train, rules["min_clients"])
        about = {"clients": len(cut.names), "tokenised": corpus.tokenised}
        assert (vocab, summary) == VocabRules(**rules).choose(counts, holders, len(cut.train.flat), **about)
        streams = [
            ids.tolist()
            for found in encode_lists(table, vocab, cut.train)
            for ids in np.split(found.tokens, np.cumsum(found.lengths)[:-1])
        ]
        assert streams == [vocab.encode(lines).tolist() for lines in train]


@pytest.mark.parametrize("times", ["all", "some", "none"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_table_of_lines_is_the_corpus(tmp_path, monkeypatch, times, pieces):
    monkeypatch.setattr(linetable, "_pieces", lambda path: pieces)
    monkeypatch.setattr(linetable, "ROWS", 7)
    monkeypatch.setattr(linetable, "LINES", 20)
    path = tmp_path / "chat.jsonl"
    write_table(path, rows(times))
    same(path, tmp_path / "lines")


@pytest.mark.parametrize("kind", ["word", "char"])
def test_characters_and_case(tmp_path, kind):
    path = tmp_path / "chat.jsonl"
    write_table(path, rows(), junk=False)
    same(path, tmp_path / "lines", kind, lower=False)


def test_other_corpora_are_tabulated_too(tmp_path):
    (tmp_path / "folder").mkdir()
    for k in range(7):
        (tmp_path / "folder" / f"{k}.txt").write_text("\n".join(row["text"] for row in rows(seed=k, count=9)), "utf-8")
    same(tmp_path / "folder", tmp_path / "lines")
    same(tmp_path / "folder" / "0.txt", tmp_path / "lines")
    users = {f"u{k}": {"x": ["one \0 two", "three\u2028four", "five six"] * (k + 2)} for k in range(6)}
    leaf = tmp_path / "leaf.json"
    leaf.write_text(json.dumps({"users": list(users), "user_data": users}))
    same(leaf, tmp_path / "lines")
    tokens = {f"u{k}": {"x": [["<BOS>", "Hello", "a\nb", "<EOS>"]] * (k + 2)} for k in range(6)}
    leaf.write_text(json.dumps({"users": list(tokens), "user_data": tokens}))
    same(leaf, tmp_path / "lines")
    same(leaf, tmp_path / "lines", "char", lower=False)
    with (tmp_path / "t.tsv").open("w") as file:
        file.write(
            "author\ttext\tdate\n" + "".join(f'a{k % 6}\tline "{k} of\t2011-01-{30 - k:02}\n' for k in range(29))
        )
    same(tmp_path / "t.tsv", tmp_path / "lines")


def test_a_process_that_fails_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(linetable, "_pieces", lambda path: 2)
    monkeypatch.setattr(linetable.sys, "executable", shutil.which("false"))
    path = tmp_path / "chat.jsonl"
    write_table(path, rows())
    same(path, tmp_path / "lines")


def test_a_table_without_text_is_refused_as_in_memory(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"author": "a", "text": " "}\n{"author": 1}\n')
    with pytest.raises(DataError) as memory:
        read_corpus(path)
    with pytest.raises(DataError) as table:
        tabulate(path, tmp_path / "lines", "word", lower=True)
    assert str(memory.value) == str(table.value)


@pytest.mark.parametrize("pieces", [1, 2, 5, 1000])
def test_pieces_of_a_file_are_the_file(tmp_path, pieces):
    path = tmp_path / "chat.jsonl"
    write_table(path, rows(count=40))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().rstrip())  # a byte-order mark, no end of the last line
    spans = spans_of(path, pieces)
    assert len(spans) == 1 if pieces == 1 else 1 < len(spans) <= pieces
    whole, refused = read_records(path)
    assert [r for span in spans for r in stream_records(path, {}, span=span)] == whole
    assert spans_of(path.with_suffix(".csv"), 3) == [Span(0, None)]
    lost: dict[str, int] = {}
    for span in spans:
        mine: dict[str, records.RefusedRows] = {}
        list(stream_records(path, mine, span=span))
        for r in mine.values():
            lost.setdefault(r.why, r.line + records.lines_before(path, span))
    assert lost == {r.why: r.line for r in refused}
