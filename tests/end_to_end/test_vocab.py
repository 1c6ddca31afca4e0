"""`keyfed vocab`, and runs that train with what it wrote."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig, check, dump_toml, to_document
from keyfed.errors import RankError, RunError
from keyfed.run import encode, ranks
from keyfed.run.encode import read_people
from keyfed.run.loop import train
from keyfed.run.prepare import prepare
from keyfed.text.vocab import SPECIALS, Vocab, words_of

from .conftest import TINY, write_corpus


@pytest.fixture
def corpus(tmp_path):
    """The small corpus, long enough that everybody has words for a whole ballot."""
    return write_corpus(tmp_path / "corpus", lines=30, more=5)


@pytest.fixture
def elected(keyfed, corpus, tmp_path):
    """Elect a vocabulary of the small corpus, in which one writer has a word of their own; return its file."""
    first = corpus / "writer0.txt"
    first.write_text("xyzzy " * 500 + "\n" + first.read_text())
    code, _, stderr = keyfed("vocab", "--data", corpus, "--out", tmp_path / "vocab.json", "--set", "data.unseen=0")
    assert code == 0, stderr
    return tmp_path / "vocab.json"


def small(corpus: Path, vocab_file: Path | None, **data) -> Config:
    own = {"window": 8, "unseen": 0.0, "vocab_file": None if vocab_file is None else str(vocab_file)}
    return check(
        Config(
            data=DataConfig(name=str(corpus), **own | data),
            model=ModelConfig(embed=4, hidden=6),
            train=TrainConfig(rounds=1, cohort=3, workers=1, device="cpu", baselines=False, valid_tokens=200),
            options={"optimiser": "sgd", "lr": 1.0},
        )
    )


@pytest.mark.usefixtures("built_in_in_short")
def test_the_built_in_corpus_elects_a_vocabulary_and_trains_with_it(keyfed, tmp_path):
    vocab_file, run, few = (
        tmp_path / "new" / "vocab.json",
        tmp_path / "run",
        ("--data", "sotu", "--set", "data.clients=8"),
    )
    code, stdout, stderr = keyfed("vocab", "--size", 300, "--min-clients", 5, "--out", vocab_file, "--json", *few)
    assert code == 0, stderr
    report = json.loads(stdout)
    vocab = Vocab.from_json(vocab_file.read_text())
    assert len(vocab) == 300 == report["kept"] + 4
    assert report["types"] == report["kept"] + report["dropped_too_few"] + report["dropped_no_room"]
    assert report["sha256"] == hashlib.sha256(vocab_file.read_bytes()).hexdigest()
    settings = [item for s in TINY for item in ("--set", s)]
    settings += ["--set", "train.baselines=false", "--set", "data.max_tokens=200", "--set", "train.test_tokens=500"]
    code, stdout, stderr = keyfed(
        "train", "--vocab", vocab_file, "--rounds", 1, "--out", run, "--json", *few, *settings
    )
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["vocabulary"] == 300  # data.vocab of TINY is not read
    assert result["oov_rate"]["train"] == pytest.approx(report["unknown"]["train"], abs=1e-9)
    assert (run / "vocab.json").read_bytes() == vocab_file.read_bytes()
    assert tomllib.loads((run / "run.toml").read_text())["made"]["vocab_sha256"] == report["sha256"]


def test_the_report_is_a_recount_and_no_word_of_one_client_enters(keyfed, corpus, elected, tmp_path):
    options = ["--data", corpus, "--set", "data.unseen=0", "--size", 20, "--most-words", 25, "--json"]
    code, stdout, _ = keyfed("vocab", "--out", tmp_path / "again.json", *options)
    assert code == 0
    report, vocab = json.loads(stdout), Vocab.from_json((tmp_path / "again.json").read_text())
    _, population = read_people(small(corpus, None))
    known = set(vocab.words[4:])

    def unknown(texts) -> float:
        words = [w for lines in texts for line in lines for w in words_of(line, tokenised=False, lower=True)]
        return sum(w not in known for w in words) / (len(words) + sum(map(len, texts)))

    people = population.clients
    assert report["unknown"]["train"] == pytest.approx(unknown([c.train for c in people]))
    assert report["unknown"]["valid"] == pytest.approx(unknown([c.valid for c in people]))
    assert report["unknown"]["test"] == pytest.approx(unknown([c.test for c in people]))
    assert report["unknown"]["unseen"] is None
    assert report["clients"] == 8 == report["full_ballots"]
    assert report["clients_losing_words"] == 1.0
    everything = Vocab.from_json(elected.read_text())
    assert "xyzzy" not in everything.index
    assert any("xyzzy" in line for line in people[0].train)
    assert {"president", "the"} <= set(everything.words)


def test_held_out_text_has_no_vote(keyfed, corpus, tmp_path):
    for path in corpus.iterdir():
        path.write_text(path.read_text() + "plugh\n")
    code, _, _ = keyfed("vocab", "--data", corpus, "--out", tmp_path / "vocab.json")
    assert code == 0
    assert "plugh" not in (tmp_path / "vocab.json").read_text()


def test_clients_that_lose_words_are_counted(keyfed, corpus, elected, tmp_path):
    options = ["--data", corpus, "--set", "data.unseen=0", "--json"]
    code, stdout, _ = keyfed("vocab", "--out", tmp_path / "again.json", *options)
    assert code == 0
    assert json.loads(stdout)["clients_losing_words"] == 1 / 8
    assert json.loads(stdout)["dropped_too_few"] == 1
    assert (tmp_path / "again.json").read_bytes() == elected.read_bytes()


def test_a_single_client_is_refused_or_warned_about(keyfed, corpus, elected, tmp_path):
    out = tmp_path / "single.json"
    options = ["--data", corpus, "--set", "data.unseen=0", "--min-clients", 1, "--out", out]
    code, stdout, stderr = keyfed("vocab", *options)
    assert (code, stdout) == (2, "")
    assert "single person" in stderr
    assert stderr.count("\n") == 1
    assert not out.exists()
    code, _, stderr = keyfed("vocab", *options, "--allow-single")
    assert code == 0
    assert stderr.startswith("warning:")
    assert "xyzzy" in out.read_text()


def test_clients_vote_for_words_beyond_a_vocabulary(keyfed, corpus, elected, tmp_path):
    """Three more writers say a new word, one says another: only the first is found, and old words keep their rows."""
    for k, path in enumerate(sorted(corpus.iterdir())):
        more = ["qwyjibo"] * (k in (2, 4, 6)) + ["zork"] * (k == 3)
        path.write_text("".join(f"{word} again\n" for word in more) + path.read_text())
    before, out = Vocab.from_json(elected.read_text()), tmp_path / "wider.json"
    given = ["vocab", "--data", corpus, "--set", "data.unseen=0", "--beyond", elected]
    code, stdout, stderr = keyfed(*given, "--out", out, "--json")
    assert code == 0, stderr
    report, after = json.loads(stdout), Vocab.from_json(out.read_text())
    assert report["new"] == {"qwyjibo": 3}
    assert report["entries"] == len(after) == len(before) + 1
    assert after.words == (*before.words, "qwyjibo")
    assert report["dropped_too_few"] == 2  # zork and xyzzy, of one client each
    result = train(small(corpus, out), tmp_path / "run")
    assert result["vocabulary"] == len(after)
    code, stdout, stderr = keyfed(*given[:-1], tmp_path / "run", "--out", tmp_path / "more.json")
    assert code == 2  # a run's folder will do; it has all words of three clients
    assert "no word is on the ballots of 3 or more" in stderr
    code, stdout, _ = keyfed(*given, "--out", tmp_path / "told.json", "--size", len(before) + 5)
    assert code == 0
    assert f"new: qwyjibo; with those of {elected} {len(after)} entries" in stdout


def test_a_vocabulary_that_leaves_no_room_or_is_of_another_kind_is_refused(keyfed, corpus, elected, tmp_path):
    given = ["vocab", "--data", corpus, "--beyond", elected, "--out", tmp_path / "wider.json"]
    for wrong, said in ((["--size", 20], "no room for new words"), (["--model", "char-lstm"], "reads characters"),
                        (["--beyond", tmp_path / "none.json"], "no such vocabulary")):  # fmt: skip
        code, stdout, stderr = keyfed(*given, *wrong)
        assert (code, stdout) == (2, ""), wrong
        assert said in stderr
        assert stderr.count("\n") == 1
    assert not (tmp_path / "wider.json").exists()


def test_bad_options_are_one_line_and_a_file_in_the_way_stays(keyfed, corpus, elected, tmp_path):
    before = elected.read_bytes()
    for wrong, said in (
        (["--size", 4], "'--size': 4 is not in the range x>=5"),
        (["--min-clients", 0], "data.min_clients is 0"),
        (["--min-clients", 99], "99 or more of the"),
        (["--least-uses", 0], "least_uses"),
        (["--most-words", 0], "most_words"),
        (["--size", 10], "exists and is another file"),
        (["--out", tmp_path], "is a folder"),
        (["--out", corpus / "writer0.txt" / "vocab.json"], "choose another --out"),
        (["--set", f"data.vocab_file={elected}"], "leave it out"),
        (["--model", "nonsense"], "nonsense"),
    ):
        code, stdout, stderr = keyfed("vocab", "--data", corpus, "--out", elected, *wrong)
        assert (code, stdout) == (2, ""), wrong
        assert said in stderr
        assert stderr.count("\n") == 1
    assert elected.read_bytes() == before


def test_characters_are_elected_and_trained_with(keyfed, corpus, tmp_path):
    code, _, stderr = keyfed("vocab", "--data", corpus, "--model", "char-lstm", "--out", tmp_path / "chars.json")
    assert code == 0, stderr
    config = small(corpus, tmp_path / "chars.json")
    characters = replace(config, model=replace(config.model, name="char-lstm"))
    assert prepare(characters).oov["train"] == 0
    code, _, stderr = keyfed("train", "--data", corpus, "--vocab", tmp_path / "chars.json", "--out", tmp_path / "run")
    assert code == 2
    assert "the model reads words" in stderr
    assert stderr.count("\n") == 1


def test_resume_refuses_another_vocabulary_and_evaluation_needs_only_the_runs_own(keyfed, corpus, elected, tmp_path):
    config, run = small(corpus, elected), tmp_path / "run"
    result = train(config, run)
    assert train(config, run, resume=True) == result
    vocab = Vocab.from_json(elected.read_text())
    elected.write_text(replace(vocab, words=(*SPECIALS, *reversed(vocab.words[4:]))).to_json())
    with pytest.raises(RunError, match=r"vocab\.json: "):
        train(config, run, resume=True)
    elected.unlink()
    code, stdout, stderr = keyfed("evaluate", run, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["test"]["perplexity"] == pytest.approx(result["test"]["perplexity"])
    code, _, stderr = keyfed("train", "--data", corpus, "--vocab", elected, "--out", tmp_path / "other")
    assert code == 2
    assert "no such vocabulary" in stderr
    assert stderr.count("\n") == 1


def test_a_rank_with_another_vocabulary_of_the_same_name_is_refused(corpus, elected, monkeypatch):
    config = small(corpus, elected)

    class Ordered:
        def hear(self):
            data_sha256 = prepare(config).corpus.fingerprint()
            return {"config": dump_toml(to_document(config)), "data_sha256": data_sha256, "vocab_sha256": "0" * 64}

    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    with pytest.raises(RankError, match="not the vocabulary rank 0 has"):
        ranks.follow(Ordered())


def test_lower_case_is_the_files_and_the_cut_is_the_texts(corpus, tmp_path):
    vocab = Vocab("word", (*SPECIALS, "The", "the"), lower=False, tokenised=True)
    (tmp_path / "v.json").write_text(vocab.to_json())
    found = prepare(small(corpus, tmp_path / "v.json")).vocab
    assert (found.words, found.lower, found.tokenised) == (vocab.words, False, False)


@pytest.mark.parametrize("lower", [True, False])
def test_a_mapped_corpus_has_the_given_vocabulary_and_is_kept_apart_from_others(corpus, tmp_path, monkeypatch, lower):
    for path in corpus.iterdir():
        path.write_text(path.read_text().replace("the people", "The people"))
    vocab = Vocab("word", (*SPECIALS, "people", "The", "the", "never-heard"), lower=lower, tokenised=True)
    (tmp_path / "v.json").write_text(vocab.to_json())
    config = small(corpus, tmp_path / "v.json")
    monkeypatch.setenv("KEYFED_CACHE", "")
    plain = prepare(config)
    monkeypatch.setenv("KEYFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encode, "LARGE", 0)
    mapped = prepare(config)
    assert mapped.store.folder != plain.store.folder
    assert mapped.store.flat.tolist() == plain.store.flat.tolist()
    assert (mapped.vocab, mapped.vocab_summary, mapped.oov) == (plain.vocab, plain.vocab_summary, plain.oov)
    assert plain.vocab_summary.kept == (2 if lower else 3)
    folders = {encode.cache_folder(config), encode.cache_folder(small(corpus, None))}
    (tmp_path / "v.json").write_text(replace(vocab, words=(*SPECIALS, "the")).to_json())
    folders.add(encode.cache_folder(config))
    assert len(folders) == 3
    assert None not in folders
