"""A person's text stays out of every message and log, and a client trains on its owner's text only."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyfed
from keyfed.deploy import trainer
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.supernode import Client
from keyfed.errors import DataError, DeployError, KeyfedError, RunError, described
from keyfed.keyboard.session import Decoder, node_program
from keyfed.run.remote.device import own_text
from keyfed.text import published, records
from keyfed.text.catalogue import load_corpus, look_at
from keyfed.text.corpus import Author, Corpus, own_corpus, read_corpus
from keyfed.text.exports import documents
from keyfed.text.sources import suffix_of
from keyfed.text.table import tabulate
from keyfed.text.vocab import SPECIALS, Vocab, read_vocab
from keyfed.wire.messages import Rejected

from .deployed import vocabulary, write_texts
from .test_client_limits import hello

SECRET = "zebraquantum"
LINE = f"my {SECRET} door code"


def packed(text):
    return gzip.compress(text.encode())


# Malformed inputs of every reader, each with the secret where the fault is: name of the file and its bytes.
MALFORMED = {
    "text, UTF-16": ("notes.txt", LINE.encode("utf-16")),
    "text, cp1252": ("notes.txt", f"{LINE} caf\u00e9\n".encode("cp1252")),
    "text with NUL": ("notes.txt", f"{LINE}\0{LINE}".encode()),
    "text that is no gzip": ("notes.txt.gz", f"{SECRET} {LINE}".encode()),
    "text, gzip cut short": ("notes.txt.gz", packed(LINE * 90)[:-20]),
    "an unknown kind": ("notes.docx", LINE.encode()),
    "csv without header": ("a.csv", f"{SECRET},{LINE}\nuser,{LINE}\n".encode()),
    "csv by semicolons": ("a.csv", f"author;text;{SECRET}\nann;{LINE}\n".encode()),
    "csv in UTF-16": ("a.csv", f"author,text,{SECRET}\nann,{LINE}\n".encode("utf-16")),
    "csv in cp1252": ("a.csv", f"author,text\nann,{LINE} caf\u00e9\n".encode("cp1252")),
    "csv with more fields": ("a.csv", f"author,text\nann,{LINE},{SECRET}\n".encode()),
    "csv with NUL": ("a.csv", f"author,text\nann,{LINE}\0\n".encode()),
    "csv with odd times": ("a.csv", f"author,text,date\nann,hello,{LINE}\nben,hi,{SECRET}\n".encode()),
    "csv with infinite times": ("a.csv", b"author,text,date\nann,zebraquantum,inf\n"),
    "csv with an open quote": ("a.csv", f'author,text\nann,"{LINE}\n'.encode()),
    "csv, no gzip": ("a.csv.gz", f"{SECRET}\n".encode()),
    "csv, gzip cut short": ("a.csv.gz", packed(f"author,text\nann,{LINE}\n" * 90)[:-20]),
    "tsv without header": ("a.tsv", f"{SECRET}\t{LINE}\nuser\t{LINE}\n".encode()),
    "tsv with odd times": ("a.tsv", f"user\ttext\ttime\nann\thello\t{LINE}\n".encode()),
    "jsonl, broken": ("a.jsonl", f'{{"author": "ann", "text": "{LINE}\n'.encode()),
    "jsonl, no object": ("a.jsonl", f'["{LINE}"]\n"{SECRET}"\n'.encode()),
    "jsonl, other fields": ("a.jsonl", json.dumps({SECRET: LINE, "who": SECRET}).encode() + b"\n"),
    "jsonl, no text": ("a.jsonl", json.dumps({"author": SECRET, "text": [LINE]}).encode() + b"\n"),
    "jsonl, odd time": ("a.jsonl", json.dumps({"author": "a", "text": "b", "time": LINE}).encode() + b"\n"),
    "jsonl, lone surrogate": ("a.jsonl", f'{{"author": "a", "text": "{LINE} \\ud800"}}\n'.encode()),
    "LEAF, broken": ("a.json", f'{{"users": ["{SECRET}"], "user_data": {{"{LINE}'.encode()),
    "LEAF, an array": ("a.json", json.dumps([LINE]).encode()),
    "LEAF, other fields": ("a.json", json.dumps({SECRET: LINE}).encode()),
    "LEAF, records": ("a.json", json.dumps({"users": [SECRET], "user_data": {SECRET: {"x": [[LINE]]}}}).encode()),
    "LEAF, numbers": ("a.json", json.dumps({"users": [SECRET], "user_data": {SECRET: {"x": [[1, LINE]]}}}).encode()),
    "LEAF, no samples": ("a.json", json.dumps({"users": [SECRET], "user_data": {SECRET: LINE}}).encode()),
}


def messages_of(read):
    """What a reader says: its error, and what it left out with the reasons."""
    try:
        found = read()
    except KeyfedError as e:
        return [str(e)]
    return [f"{s.what}: {s.why}" for s in getattr(found, "skipped", ())]


@pytest.mark.parametrize("what", MALFORMED)
def test_no_reader_quotes_what_it_cannot_read(tmp_path, what, caplog, record_property):
    name, content = MALFORMED[what]
    path = tmp_path / name
    path.write_bytes(content)
    said = messages_of(lambda: read_corpus(path))
    said += messages_of(lambda: look_at(path))
    if suffix_of(path) in (".csv", ".tsv", ".jsonl"):
        said += messages_of(lambda: read_corpus(path, author_column="who", text_column="said"))
        said += messages_of(lambda: tabulate(path, tmp_path / "table", "word", lower=True))
    assert said, "every one of these is wrong somewhere"
    assert not [line for line in said if SECRET in line or "door" in line]
    assert SECRET not in caplog.text
    record_property("fault", f"own disk: {what}")
    record_property("outcome", "a message with counts, and no text")


@pytest.mark.parametrize(
    ("module", "name", "quoting"),
    [
        (
            records,
            "_no_columns",
            lambda row, author, text, form: f"no author and text columns among {', '.join(row)}",
        ),
        (records, "why_unreadable", lambda error: f"unreadable: {SECRET if 'gzip' in str(error) else error}"),
    ],
)
def test_a_reader_that_quotes_is_found(tmp_path, monkeypatch, module, name, quoting):
    """The mutant: what the readers said before, or would say with a library's own words."""
    monkeypatch.setattr(module, name, quoting)
    if name == "why_unreadable":
        monkeypatch.setattr("keyfed.text.sources.why_unreadable", quoting)
    said = []
    for file, content in MALFORMED.values():
        path = tmp_path / file
        path.write_bytes(content)
        said += messages_of(lambda path=path: read_corpus(path))
    assert any(SECRET in line for line in said)


POSTS = {
    "an entity": f'<!DOCTYPE posts SYSTEM "posts.dtd"><posts>&{SECRET};</posts>',
    "no end": f'<posts><row Body="{LINE}"',
    "another mark": f"<posts><{SECRET} & {LINE}></posts>",
    "nothing": SECRET,
}


@pytest.mark.parametrize("what", POSTS)
def test_posts_that_are_not_well_formed_are_not_quoted(tmp_path, what):
    path = tmp_path / "beer.stackexchange.Posts.xml"
    path.write_text(POSTS[what])
    why = documents.read_stack_exchange(path).left_out
    assert why
    assert SECRET not in str(why)
    (said,) = messages_of(lambda: published.read_stackexchange(tmp_path))
    assert SECRET not in said


VOCABULARIES = {
    "not JSON": f'{{"words": ["{SECRET}"',
    "a list": json.dumps([SECRET]),
    "another kind": json.dumps({"kind": SECRET, "lower": True, "tokenised": True, "words": [*SPECIALS, SECRET]}),
    "a type": json.dumps({"kind": "word", "lower": SECRET, "tokenised": True, "words": [SECRET]}),
    "specials": json.dumps({"kind": "word", "lower": True, "tokenised": True, "words": [SECRET] * 5}),
    "twice": json.dumps({"kind": "word", "lower": True, "tokenised": True, "words": [*SPECIALS, SECRET, SECRET]}),
    "blanks": json.dumps({"kind": "word", "lower": True, "tokenised": True, "words": [*SPECIALS, LINE]}),
    "characters": json.dumps({"kind": "char", "lower": True, "tokenised": True, "words": [*SPECIALS, SECRET]}),
    "no string": json.dumps({"kind": "word", "lower": True, "tokenised": True, "words": [*SPECIALS, [SECRET]]}),
}


@pytest.mark.parametrize("what", VOCABULARIES)
def test_a_damaged_vocabulary_is_not_quoted(tmp_path, what):
    with pytest.raises(DataError) as caught:
        Vocab.from_json(VOCABULARIES[what])
    assert SECRET not in str(caught.value)
    (tmp_path / "vocab.json").write_text(VOCABULARIES[what])
    with pytest.raises(DataError) as caught:
        read_vocab(tmp_path / "vocab.json", "word")
    assert SECRET not in str(caught.value)


LEARNT = {"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}


@pytest.mark.skipif(node_program() is None, reason="node is not installed")
def test_learnt_words_that_cannot_be_taken_are_not_quoted():
    changes = (
        {"words": {SECRET: -1}}, {"words": {LINE: 1}}, {"pairs": {SECRET: 3}}, {"pairs": {SECRET: {SECRET: "x"}}},
        {"dictionary": [LINE]}, {"blocked": [[LINE]]},
    )  # fmt: skip
    with Decoder(Vocab("word", (*SPECIALS, "the"), lower=True, tokenised=False), lambda ids: np.zeros(5)) as decoder:
        for document in (*(json.dumps(LEARNT | change) for change in changes), f'{{"words": "{LINE}', f'["{SECRET}"]'):
            with pytest.raises(RunError, match="learnt words: ") as caught:
                decoder._call("personal", action="importJSON", value=document)
            assert SECRET not in str(caught.value)
            assert "door" not in str(caught.value)


def test_text_given_in_the_place_of_a_name_is_not_quoted():
    for given_data in (Corpus("x", (Author("a", (LINE,)),)), [LINE], {"ann": LINE}, f"{LINE}\n{LINE}", LINE * 20):
        with pytest.raises(KeyfedError) as caught:
            keyfed.train(keyfed.configure(data=given_data, rounds=1), "/nowhere/run")
        assert SECRET not in str(caught.value)
        with pytest.raises(KeyfedError) as caught:
            load_corpus(given_data)
        assert SECRET not in str(caught.value)


def test_an_error_of_another_kind_is_logged_by_its_type_and_place(capsys, tmp_path):
    def broken(kind, body):
        raise KeyError(LINE)

    class Link:
        """A link that takes whatever is written."""

    frames = []
    original = trainer.read_frame, trainer.write_frame
    trainer.read_frame = lambda link: ({"kind": "train", "deadline": 1e12}, b"")
    trainer.write_frame = lambda link, told, data: frames.append(told)
    try:
        trainer._answer(Link(), broken)
    finally:
        trainer.read_frame, trainer.write_frame = original
    assert frames == [{"error": "client error", "reason": "KeyError"}]
    said = capsys.readouterr().err
    assert re.search(r"train: KeyError in broken, line \d+", said)
    assert SECRET not in said
    assert described(DataError("ours")) == "DataError: ours"


# One person's text


CHATS = {
    "Android": "12/03/2024, 21:0{k} - {who}: {said}",
    "iOS": "[12.03.24, 21:0{k}:33] {who}: {said}",
    "American": "3/12/24, 9:0{k}\u202fPM - {who}: {said}",
    "IRC": "[21:0{k}] <{who}> {said}",
}


def chat(form, people=("Anna", "Ben")):
    lines = [
        CHATS[form].format(k=k, who=people[k % len(people)], said=f"message {k} of {people[k % len(people)]} here")
        for k in range(8)
    ]
    lines.insert(3, "and a second line of it")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", CHATS)
def test_a_chat_of_several_people_is_not_trained_on_under_one_name(tmp_path, form, record_property):
    path = tmp_path / "chat.txt"
    path.write_text(chat(form), "utf-8")
    with pytest.raises(DataError, match="messages of 2 people, and a client trains on its owner's only") as caught:
        look_at(path)
    assert "Anna" not in str(caught.value)
    (own,) = own_corpus(load_corpus(str(path)), path, "Anna").authors
    assert own.lines == (
        "message 0 of Anna here", "message 2 of Anna here", "and a second line of it", "message 4 of Anna here",
        "message 6 of Anna here",
    )  # fmt: skip
    with pytest.raises(DataError, match="none of that --me"):
        look_at(path, "Zoe")
    path.write_text(chat(form, ("Anna",)), "utf-8")
    assert look_at(path).lines == 9, "one person's own messages need no name"
    record_property("fault", f"own disk: a chat export of two people ({form})")
    record_property("outcome", "asked for the author; only that author's messages are read")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json"])
def test_a_table_of_several_authors_asks_for_the_owner(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    rows = [(who, f"message {k} of {who} with some more words") for k in range(6) for who in ("ann", "ben", "cat")]
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"author": who, "text": said}) for who, said in rows))
    elif suffix == ".json":
        users = {who: {"x": [said for w, said in rows if w == who]} for who in ("ann", "ben", "cat")}
        path.write_text(json.dumps({"users": list(users), "user_data": users}))
    else:
        mark = {".csv": ",", ".tsv": "\t"}[suffix]
        path.write_text("\n".join(mark.join(row) for row in [("author", "text"), *rows]))
    with pytest.raises(DataError, match=r"messages of 3 people.*--me NAME"):
        look_at(path)
    found = look_at(path, "ben")
    assert (found.lines, found.words) == (6, 48)
    assert str(found) == "6 lines, 48 words"
    with pytest.raises(DataError, match="none of that --me"):
        look_at(path, "dan")


@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1), min_size=1, max_size=12)
)
@settings(deadline=None)
def test_prose_is_read_whole(tmp_path_factory, lines):
    """Whatever is no chat export is the owner's: nothing of it is lost."""
    lines = [line.strip() for line in lines if line.strip()]
    if not lines or any(re.match(r"[\u200e\u202a]?\[?\d|<", line) for line in lines):
        return
    corpus = Corpus("x", (Author("x", tuple(lines)),), natural=False)
    assert own_corpus(corpus, tmp_path_factory.getbasetemp() / "x.txt", None).authors[0].lines == tuple(lines)


def test_dates_in_notes_are_not_a_chat(tmp_path):
    path = tmp_path / "diary.txt"
    path.write_text("12/03/2024, 21:05 went home\n" + "and then there was a lot to write about the day\n" * 20)
    assert look_at(path).lines == 21


def test_files_of_a_folder_are_one_persons_and_a_chat_among_them_is_looked_at(tmp_path):
    write_texts(tmp_path, 3)
    whole = look_at(tmp_path).lines
    (tmp_path / "chat.txt").write_text(chat("Android"))
    with pytest.raises(DataError, match="messages of 2 people"):
        look_at(tmp_path)
    assert look_at(tmp_path, "Anna").lines == whole + 5
    assert look_at(tmp_path, "Zoe").lines == whole


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "no usable text"),
        ("blank.txt", b"\n \n", "no usable text"),
        ("short.txt", LINE.encode(), "1 line, 4 words; expected at least 20"),
        ("notes.docx", b"x", "no .docx, or a damaged one"),
        ("book.pdf", b"x", "unknown kind of file '.pdf'"),
        ("odd.csv", b"foo,bar\n1,2\n", "do not include author"),
        ("result.json", b'{"chats": []}', "JSON of an unknown form; expected an export"),
    ],
)
def test_a_client_looks_at_its_text_before_it_says_that_it_takes_part(
    request, monkeypatch, tmp_path, name, content, said
):
    """Nothing is agreed to, made or started with text that cannot be used."""

    def start(self):
        raise DeployError("it takes part")

    monkeypatch.setattr(Client, "start", start)
    make_certificates(tmp_path / "server", [])
    (tmp_path / name).write_bytes(content)
    code, out, err = request.getfixturevalue("keyfed")(
        "client", "--home", tmp_path / "home", "--server", "127.0.0.1:1", "--ca", tmp_path / "server" / "ca.crt",
        "--name", "anna", "--data", tmp_path / name, "--yes",
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert SECRET not in err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("mutant", [False, True])
def test_a_run_reads_the_owners_messages_only(tmp_path, monkeypatch, mutant):
    """Under one name only one person's text is trained on, also where nobody looked before."""
    path = tmp_path / "chat.csv"
    rows = "".join(f'{who},"the cat sat on the mat and then it ran"\n' for _ in range(40) for who in ("ann", "ben"))
    path.write_text("author,text\n" + rows)
    write_texts(tmp_path / "texts", 1)
    if mutant:
        everything = lambda corpus, path, me: Corpus(  # noqa: E731
            corpus.name, (Author("me", tuple(line for a in corpus.authors for line in a.lines)),)
        )
        monkeypatch.setattr("keyfed.run.remote.device.own_corpus", everything)
        assert tokens_of(tmp_path, path, None) > 1.9 * 40 * 8 * 0.8
        return
    with pytest.raises(DataError, match="messages of 2 people"):
        tokens_of(tmp_path, path, None)
    assert tokens_of(tmp_path, path, "ann") == tokens_of(tmp_path, path, "ben") < 40 * 11


def tokens_of(folder, path, me):
    said = []
    own_text("client-0", path, me=me, say=said.append)(hello(folder))
    (line,) = said
    found = re.fullmatch(r"[\d,]+ lines, ([\d,]+) tokens to learn from, 0\.0% of them unknown words", line)
    return int(found[1].replace(",", ""))


def test_how_much_text_there_is_stays_with_the_client(tmp_path):
    """A refusal for too little text does not say how little."""
    path = tmp_path / "short.txt"
    path.write_text("the cat\n")
    write_texts(tmp_path / "texts", 1)
    vocabulary(tmp_path)
    with pytest.raises(Rejected) as caught:
        own_text("client-0", path)(hello(tmp_path))
    assert caught.value.reason == "no text"
    assert caught.value.detail == "too little text to learn from: a window has 8 tokens"


@pytest.mark.parametrize(
    "head",
    [
        "12/03/2024, 21:05 - {}: ",
        "[12/03/2024 \u00e0 21:05:11] {}: ",
        "2024-03-12T21:05:11 {}: ",
        "2024-03-12 21:05 <{}> ",
    ],
)
def test_long_messages_of_several_people_are_still_a_chat(tmp_path, head):
    """Six lines a message: the heads are a sixth of the lines, and there are two people all the same."""
    lines = []
    for k in range(12):
        lines += [head.format("Anna" if k % 2 else "Ben") + "hello there"] + [
            f"more words of line {n}" for n in range(5)
        ]
    path = tmp_path / "chat.txt"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(DataError, match="messages of 2 people"):
        look_at(path)
    found = own_corpus(load_corpus(str(path)), path, "Anna")
    assert len(found.authors[0].lines) == 36
    assert not [line for line in found.authors[0].lines if "Anna" in line or "2024" in line]


def test_what_a_server_wrote_into_a_message_does_not_fill_the_log():
    assert len(described(DataError("x" * 10**6))) < 600
    assert described(DataError("short")) == "DataError: short"
