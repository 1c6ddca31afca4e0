"""Mistakes of newcomers: each is one line that says what to do, exit code 2, without a word of anybody's text."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfed.deploy.up import run_vocab
from keyfed.errors import DataError
from keyfed.run.console import Silent
from keyfed.run.encode import vocab_from_file
from keyfed.run.folder import read_run_toml
from keyfed.text.vectors import recognise
from keyfed.text.vocab import BASE_WORDS, Vocab

SECRET = "zebraquantum"
LINE = f"my {SECRET} door code"
Make = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Make:
    data = content if isinstance(content, bytes) else content.encode()

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def archive(name: str, members: dict[str, str]) -> Make:
    def make(folder: Path) -> None:
        with zipfile.ZipFile(folder / name, "w") as file:
            for member, content in members.items():
                file.writestr(member, content)

    return make


CHAT = "".join(f"12/03/2024, 21:0{k} - {who}: {LINE}\n" for k in range(4) for who in ("Anna", "Ben"))
TABLE = f"k;who;said\n1;anna;{LINE}\n"
RESULT = json.dumps({"about": SECRET, "personal_information": {"name": SECRET}})

# What lies there, what is typed, what is said.
MISTAKES: dict[str, tuple[Make, list[str], str]] = {
    "an option of a method": (
        write("a.txt", LINE),
        ["train", "fedavg", "--lr", "0.1"],
        "--lr is no option of its own; write --set lr=VALUE",
    ),
    "an option of a section": (write("a.txt", LINE), ["train", "--cohort", "5"], "write --set train.cohort=VALUE"),
    "text for a method": (write("a.txt", LINE), ["train", "a.txt"], "did you mean --data a.txt?"),
    "a corpus for a method": (write("a.txt", LINE), ["train", "sotu"], "did you mean --data sotu?"),
    "a page": (write("a.html", f"<p>{LINE}</p>"), ["data", "check", "a.html"], "export the messages as JSON or text"),
    "a workbook": (write("a.xlsx", LINE), ["train", "--data", "a.xlsx"], "save the sheet as CSV"),
    "a backup": (write("m.db.crypt15", LINE), ["data", "check", "m.db.crypt15"], "export the chat from the app"),
    "a broken archive": (write("a.zip", LINE), ["data", "check", "a.zip"], "a damaged archive"),
    "an empty archive": (archive("a.zip", {}), ["data", "check", "a.zip"], "no usable text (nothing in it)"),
    "pictures only": (archive("a.zip", {"a.jpg": LINE}), ["data", "check", "a.zip"], "not a text file (.jpg)"),
    "a broken document": (write("a.docx", LINE), ["data", "check", "a.docx"], "no .docx, or a damaged one"),
    "a table of other columns": (write("a.csv", TABLE), ["data", "check", "a.csv"], "--author-column NAME"),
    "a column that is not there": (
        write("a.csv", TABLE),
        ["train", "--data", "a.csv", "--author-column", "whom", "--text-column", "said"],
        'do not include "whom"',
    ),
    "a number beyond the columns": (
        write("a.csv", TABLE),
        ["data", "check", "a.csv", "--author-column", "9", "--text-column", "3"],
        'do not include "9"',
    ),
    "somebody else": (write("c.txt", CHAT), ["train", "--data", "c.txt", "--me", "Zoe"], "none of that --me"),
    "me in a known corpus": (write("c.txt", CHAT), ["train", "--data", "chat", "--me", "anna"], "for text of your own"),
    "an account without chats": (
        write("result.json", RESULT),
        ["data", "check", "result.json"],
        "JSON of an unknown form; expected an export",
    ),
    "rows in lines called .json": (
        write("a.json", '{"a": 1}\n{"a": 2}\n'),
        ["data", "check", "a.json"],
        "objects in lines go in a .jsonl",
    ),
    "JSON cut short": (write("a.json", f'[{{"user": "{SECRET}'), ["data", "check", "a.json"], "broken JSON (line 1"),
    "other XML": (write("a.xml", f"<rss>{LINE}</rss>"), ["data", "check", "a.xml"], "expected Posts.xml"),
    "Cyrillic as Excel writes it": (
        write("a.txt", "привет как дела сегодня".encode("cp1251")),
        ["data", "check", "a.txt"],
        "save it as UTF-8",
    ),
    "a picture called .txt": (write("a.txt", b"\x89PNG\0\0" + LINE.encode()), ["data", "check", "a.txt"], "binary"),
    "a .gz that is none": (write("a.txt.gz", LINE), ["data", "check", "a.txt.gz"], "no gzip file"),
    "a .gz cut short": (
        write("a.txt.gz", gzip.compress(LINE.encode() * 90)[:-9]),
        ["data", "check", "a.txt.gz"],
        "unreadable",
    ),
    "an address of the web": (
        write("a", ""),
        ["train", "--data", "https://example.org/a.csv"],
        "addresses of the web are not read",
    ),
    "stdin": (write("a", ""), ["train", "--data", "-"], "not read from stdin"),
    "no name": (write("a", ""), ["train", "--data", ""], "not read from stdin"),
    "an empty file": (write("a.txt", ""), ["train", "--data", "a.txt"], "a.txt: empty"),
    "an empty folder": (write("a/.keep", ""), ["train", "--data", "a"], "nothing in it"),
    "one long line": (
        write("a.txt", "word " * 3000),
        ["train", "fedavg", "--data", "a.txt"],
        "put line ends between sentences",
    ),
    "whose the files are": (
        write("a/b.txt", LINE),
        ["train", "--data", "a", "--set", "data.folder=mine"],
        "expected one of clients, person",
    ),
    "a step of nan": (write("a", ""), ["train", "fedavg", "--set", "lr=nan"], "expected a finite number"),
    "half a round": (write("a", ""), ["train", "fedavg", "--set", "train.rounds=1.5"], "expected a whole number"),
    "a file for a run": (write("a.csv", TABLE), ["suggest", "a.csv", "hello"], "a.csv is a file; expected the folder"),
    "no run": (write("a", ""), ["suggest", "nowhere", "hello"], "there is nothing of that name"),
    "a folder that is no run": (write("a/b.txt", ""), ["evaluate", "a"], "it has no run.toml"),
    "a run that is there": (write("a/run.toml", ""), ["train", "--out", "a"], "a holds a run already"),
    "a preview into a file": (write("a.txt", LINE), ["client", "--preview", "--data", "a.txt"], "on a terminal only"),
    "two wishes": (write("a", ""), ["client", "--preview", "--status"], "give one of --pause"),
}


PROSE = f"the state of the {SECRET} is good and the people are well today\n" * 8
NOTES = ("text/w0.txt", "text/w1.txt", "text/w2.txt", "text/w3.txt", "text/w4.txt", "text/w5.txt")
SMALL = ("model.embed=6", "model.hidden=6", "data.window=4", "train.workers=1", "train.cohort=3")
FEDAVG = "train fedavg"


def written(**files: str) -> Make:
    """Make files; `t_txt` is t.txt."""

    def make(folder: Path) -> None:
        for name, content in files.items():
            write(name.replace("_", "."), content)(folder)

    return make


def notes(count: int) -> Make:
    def make(folder: Path) -> None:
        for name in NOTES[:count]:
            write(name, PROSE)(folder)

    return make


def small(*settings: str) -> list[str]:
    return ["--data", "text", *(word for setting in (*SMALL, *settings) for word in ("--set", setting))]


NOTHING = written()
CA = written(t_txt=PROSE, ca_crt="no certificate")
JOIN = "client --home h --server 127.0.0.1:9 --ca ca.crt --yes"

# What is typed in an empty folder, and what is said.
TYPED: dict[str, str] = {
    "trian": "(did you mean train?)",
    "train --roundz 3": "--rounds",
    "train fedavgg": "(did you mean fedavg?)",
    "train fedavg fedprox": "extra argument (fedprox)",
    "train --model ciffg": "(did you mean cifg?)",
    "train --data chatt": "(did you mean chat?)",
    "train --data": "requires an argument",
    f"{FEDAVG} --set trian.cohort=3": "(did you mean train?)",
    f"{FEDAVG} --set train.cohrt=3": "(did you mean cohort?)",
    f"{FEDAVG} --set learning_rate=3": 'not an option of "fedavg"',
    f"{FEDAVG} --set author_column=3": "(did you mean data.author_column?)",
    f"{FEDAVG} --author_column 3": "--author-column",
    f"{FEDAVG} --set lr": "expected section.key=value",
    f"{FEDAVG} --set lr=": "expected a finite number",
    f"{FEDAVG} --set lr=0": "expected > 0",
    f"{FEDAVG} --set lr=-1": "expected > 0",
    f"{FEDAVG} --set train.cohort=three": "expected a whole number",
    f"{FEDAVG} --set train.cohort=0": "at least 1",
    f"{FEDAVG} --set train.cohort=-1": "at least 1",
    f"{FEDAVG} --set train.baselines=maybe": "expected true or false",
    f"{FEDAVG} --set train.schedule=cosin": "expected one of constant, linear, cosine",
    f"{FEDAVG} --set participation.sampling=poison": "expected one of uniform, poisson, size",
    f"{FEDAVG} --set mediator.name=atention": "(did you mean attention?)",
    f"{FEDAVG} --set server.name=adm": "(did you mean adam?)",
    f"{FEDAVG} --set model.dropout=1.5": "expected 0 ≤ rate < 1",
    f"{FEDAVG} --set data.unseen=2": "expected 0 ≤ share < 1",
    f"{FEDAVG} --set data.window=0": "at least 1",
    f"{FEDAVG} --rounds many": "'many' is not a valid integer",
    f"{FEDAVG} --rounds -3": "at least 0",
    f"{FEDAVG} --seed x": "'x' is not a valid integer",
    "train --minutes 0": "expected a number of minutes > 0",
    "train --minutes nan": "expected a number of minutes > 0",
    "train --minutes 3 --rounds 3": "leave one of the two out",
    "train --config no.toml": "expected a TOML file",
    f"{FEDAVG} --dp 8": "expected epsilon=NUMBER or noise=NUMBER",
    f"{FEDAVG} --dp epsilon=x": "expected a finite number",
    f"{FEDAVG} --dp epsilon=0": "expected > 0",
    f"{FEDAVG} --population 100": "add --dp epsilon=NUMBER",
    f"{FEDAVG} --until ppl=3": "expected perplexity=NUMBER or nats=NUMBER",
    f"{FEDAVG} --init no/run": "expected a run folder, base or none",
    f"{FEDAVG} --vocab no.json": "`keyfed vocab --out FILE` makes one",
    "train --plain": "leave it out",
    "train --plain --secure": "leave one of the two out",
    "train --federation here": "expected HOST:PORT",
    "train --federation 127.0.0.1:9 --vocab base": "start it: keyfed server",
    "train --federation 127.0.0.1:9 --curves": "leave it out of a federation",
    "compare": "Missing argument 'METHOD",
    "compare fedavg fedadm": "(did you mean fedadmm?)",
    "compare fedavg fedavg": "give it other settings",
    "compare fedavg:lr": "expected key=value",
    "compare fedavg --seeds 0": "expected 1 to 1000",
    "compare fedavg --seeds x": "expected a number of seeds (3) or a list",
    "tune fedavgg": "(did you mean fedavg?)",
    "tune fedavg --search foo=1:2": "not an option of fedavg",
    "study nosuchstudy": "Studies: ",
    "study methods --scale huge": "expected one of smoke, standard, paper",
    "methods fedat": "(did you mean fedatt?)",
    "bench --only foo": "Contenders: ",
    "bench --model foo": "Models: ",
    "up --clients 2": "take at least 3, or --plain",
    "up --clients 1 --web 1": "2 clients cannot hide in each other's sum; take at least 3",
    "up --clients 2 --web 2 --plain": "pages of a browser take part in secure sums only",
    "up --web 21": "is not in the range",
    "up --clients 0": "is not in the range x>=1",
    "up central": "choose a federated method",
    "up --dp 8": "expected epsilon=NUMBER or noise=NUMBER",
    "client --home h": "its first start needs --server and --ca",
    "client --home h --status": "start one: keyfed client --help",
    "client --home h --hide-among 2": "is not in the range x>=3",
    f"{JOIN} --data no": "--data is a text file or a folder of them",
    "server --home h": "`keyfed server --make-certificates --home ",
    "server --home h --port 99999": "is not in the range 1<=x<=65535",
    "server --home h --name x": "--name goes with --make-certificates",
    "enroll --home h": "give one of: a client's enrol-NAME.json",
    "enroll no.json --home h": "expected the enrol-NAME.json that a client wrote",
    "enroll --forget anna --home h": "if yours has another folder: --home FOLDER",
    "keyboard nowhere": "`keyfed train` makes one",
    "keyboard base --address 1.2.3.4": "--address is for --lan",
    "export base --base --phone": "give one of them",
    "export base --phone --locale english": "as en_GB",
    "evaluate nowhere": "`keyfed train` makes one",
    "evaluate nowhere --personalise epoch=1": "(did you mean epochs?)",
    "counts nowhere --population 100": "add --dp epsilon=NUMBER",
    "conformance nowhere": "`keyfed train` makes one",
    "privacy epsilon": "Missing option '--noise'",
    "privacy epsilon --noise 1 --rate 2": "expected 0 < rate ≤ 1",
    "privacy calibrate --epsilon -1": "expected a number above 0",
    "privacy plan --population 100 --cohort 1000": "expected 1 to 100",
    "data lits": "(did you mean list?)",
    "data get ptbb": "(did you mean ptb?)",
    "data list --data-dir nowhere": "which is not a folder",
}

# What lies there, what is typed, what is said.
FILES: dict[str, tuple[Make, list[str], str]] = {
    "TOML cut short": (written(a_toml="[train\n"), ["train", "--config", "a.toml"], "not valid TOML"),
    "TOML with another section": (written(a_toml="[trian]\nx=3"), ["train", "--config", "a.toml"], "mean train?"),
    "TOML without sections": (written(a_toml="train=3"), ["train", "--config", "a.toml"], "expected a section [train]"),
    "TOML of Windows": (write("a.toml", b"[train]\nx='\xe9'"), ["train", "--config", "a.toml"], "save it as UTF-8"),
    "a folder as TOML": (write("a/b", "x"), ["train", "--config", "a"], "expected a TOML file"),
    "files in the run folder": (write("a/x.txt", LINE), ["train", "--out", "a"], "choose another --out"),
    "a file as run folder": (written(a=LINE), ["train", "--out", "a"], "expected a folder for the run"),
    "a vocabulary cut short": (written(v_json="{"), ["train", "fedavg", "--vocab", "v.json"], "cut short?"),
    "words for a model of characters": (
        notes(6), ["train", "fedavg", *small("train.rounds=1"), "--vocab", "base", "--model", "char-lstm"],
        "take a model or a vocabulary of the other kind",
    ),
    "two people": (notes(2), ["train", "fedavg", *small()], "set train.cohort to at most 2"),
    "a cohort of more than there are": (notes(6), ["train", "fedavg", *small("train.cohort=9")], "to at most 5"),
    "sums of two": (notes(6), ["train", "fedavg", "--secure", *small("train.cohort=2")], "set train.cohort higher"),
    "no GPU": (notes(6), ["train", "fedavg", *small("train.device=cuda")], "use cpu or auto"),
    "another device": (notes(6), ["train", "fedavg", *small("train.device=gpu")], "expected auto, cpu, cuda or cuda:"),
    "bf16 on a CPU": (notes(6), ["train", "fedavg", *small("train.precision=bf16")], "a CPU computes in fp32"),
    "no vectors": (notes(6), ["train", "fedavg", *small(), "--vectors", "glove.txt"], "expected word vectors"),
    "no such partition": (notes(6), ["train", "fedavg", *small("data.partition=iidd")], "did you mean iid?"),
    "more shards than lines": (
        written(n_txt=f"{LINE}\n" * 5), ["train", "fedavg", "--data", "n.txt", "--set", "data.clients=100"],
        "set data.clients to at most 4",
    ),
    "a certificate that is none": (CA, [*JOIN.split(), "--data", "t.txt"], "is no certificate"),
    "a name with a slash": (CA, [*JOIN.split(), "--data", "t.txt", "--name", "a/b"], "letters, digits"),
    "a condition that is not known": (CA, [*JOIN.split(), "--data", "t.txt", "--when", "rain"], "Conditions: idle"),
    "an enrolment that is none": (written(e_json="{"), ["enroll", "e.json", "--home", "h"], "expected the enrol-NAME"),
    "a home that is full": (write("h/x", LINE), ["up", "--home", "h"], "choose another --home"),
    "a database": (written(m_db=LINE), ["data", "check", "m.db"], "export its messages as .csv"),
    "an archive of another kind": (written(m_rar=LINE), ["data", "check", "m.rar"], "pack it as .zip"),
    "a folder of pictures of text": (write("d/m.pdf", LINE), ["data", "check", "d"], "save it as .docx or as text"),
    "a quotation mark that stays open": (
        written(q_csv=f'author,text\nanna,"{LINE}\nben,hello\n'), ["data", "check", "q.csv"], "that is never closed",
    ),
    "a chat without messages": (
        written(r_json=json.dumps({"name": SECRET, "type": "personal_chat", "messages": []})),
        ["data", "check", "r.json"], "expected an export of Telegram",
    ),
    "a mailbox without mail": (written(m_mbox=SECRET), ["data", "check", "m.mbox"], "expected at least one line"),
}  # fmt: skip
MISTAKES |= FILES | {typed: (NOTHING, typed.split(), said) for typed, said in TYPED.items()}


def test_there_are_those_that_newcomers_made_and_twenty_more():
    assert len(MISTAKES) > 86 + 20


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(keyfed, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    make, arguments, said = MISTAKES[what]
    make(tmp_path)
    code, out, err = keyfed(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert said in err
    assert SECRET not in err


def test_resume_of_a_folder_that_is_not_there_says_that_it_begins(keyfed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words of a line\n" * 400)
    _, _, err = keyfed("train", "fedavg", "--data", "a.txt", "--resume", "--out", "typo", "--dry-run")
    assert "typo holds no run yet: a new one starts there" in err


# What is read, though with a loss that is noticed.
NOTICED: dict[str, tuple[bytes, str]] = {
    "c.txt": ("今天天气很好我们去公园玩吧\n".encode() * 60, "written without blanks between words"),
    "h.txt": (f"<div><p>{LINE}</p></div>\n".encode() * 60, "hold markup"),
    "n.txt": (f"{LINE}\n".encode() * 50, "teach a model little"),
}


@pytest.mark.parametrize("name", NOTICED)
def test_text_that_teaches_what_nobody_wants_is_noticed(keyfed, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, said = NOTICED[name]
    (tmp_path / name).write_bytes(content)
    code, out, err = keyfed("data", "check", name)
    assert code == 0, err
    assert said in out
    assert SECRET not in out


def test_laptops_agree_on_the_words_of_the_base_model(keyfed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notes(6)(tmp_path)
    code, _, err = keyfed("train", "fedavg", *small(), "--vocab", "base", "--rounds", 1, "--out", "run")
    assert code == 0, err
    written, base = (Vocab.from_json(path.read_text("utf-8")) for path in (tmp_path / "run" / "vocab.json", BASE_WORDS))
    assert written.words == base.words
    assert SECRET not in written.index
    config = read_run_toml(tmp_path / "run")[0]
    assert config.data.vocab_file == "base", "holds on any machine"
    assert Vocab.from_json(run_vocab(config, vocab_from_file(config), Silent())) == base, "what a federation is sent"


def test_a_file_of_settings_as_notepad_saves_it_is_read(keyfed, tmp_path):
    (tmp_path / "a.txt").write_text("some words of a line\n" * 400)
    settings = tmp_path / "mine.toml"
    settings.write_bytes(b"\xef\xbb\xbf[train]\r\nrounds = 3\r\ncohort = 2\r\n[data]\r\nclients = 4\r\n")
    run = ("train", "--data", tmp_path / "a.txt", "--config", settings, "--dry-run")
    code, out, err = keyfed(*run)
    assert (code, err) == (0, "")
    assert "train.rounds = 3" in out
    settings.write_text('[train]\nrounds = "three"\n')
    code, _, err = keyfed(*run)
    assert code == 2
    assert f'{settings}: train.rounds is "three"; expected a whole number' in err


def test_vectors_that_are_no_file_are_not_called_empty(keyfed, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="no regular file; expected word vectors"):
        recognise(pipe)

    def refused(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(tmp_path), "exists", refused)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
        recognise(tmp_path / "a.txt")
