"""Text on one's own disk that does harm when it is read: packed bombs, half characters, links that lead elsewhere."""

from __future__ import annotations

import gzip
import json
import stat

import pytest

from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import kept_files, open_home, strays
from keyfed.deploy.trainer import text_to_read
from keyfed.errors import DataError
from keyfed.run.folder import open_folder
from keyfed.text import sources
from keyfed.text.corpus import read_corpus
from keyfed.text.sources import MOST_RATIO, open_bytes
from keyfed.text.vocab import Vocab

LINE = b'{"author": "ann", "text": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}\n'


LEAST_UNPACKED = 1 << 20  # so that the tests are short; 16 times as much otherwise


@pytest.fixture
def unpacked(monkeypatch):
    """How many bytes were unpacked."""
    monkeypatch.setattr(sources, "LEAST_UNPACKED", LEAST_UNPACKED)
    counted, real = [0], gzip.GzipFile.read

    def read(self, size=-1):
        data = real(self, size)
        counted[0] += len(data)
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", read)
    return counted


def bomb(path, block, size):
    """Write a file that unpacks to about `size` bytes."""
    with gzip.open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
    assert size > MOST_RATIO * path.stat().st_size
    return path


@pytest.mark.parametrize(
    ("name", "block"), [("a.txt.gz", b"x" * 65_536), ("a.jsonl.gz", LINE * 300), ("a.csv.gz", b"a,b\n" * 5000)]
)
def test_a_bomb_is_refused_after_what_any_text_may_have(tmp_path, unpacked, name, block):
    path = bomb(tmp_path / name, block, 4 * LEAST_UNPACKED)
    with pytest.raises(DataError, match="unpacks to more than"):
        read_corpus(path)
    limit = max(LEAST_UNPACKED, MOST_RATIO * path.stat().st_size)
    read_twice = 2 * sources.SAMPLE  # the beginning, off which encoding and columns are read
    assert limit < unpacked[0] <= limit + read_twice + (1 << 17)


def test_one_bomb_in_a_folder_is_left_out_and_the_rest_is_read(tmp_path, unpacked):
    bomb(tmp_path / "a.txt.gz", b"x" * 65_536, 4 * LEAST_UNPACKED)
    (tmp_path / "b.txt").write_text("good text\n")
    found = read_corpus(tmp_path)
    assert [author.lines for author in found.authors] == [("good text",)]
    assert "unpacks to more than" in found.skipped[0].why


def test_the_mutant_without_a_limit_unpacks_it_all(tmp_path, unpacked, monkeypatch):
    path = bomb(tmp_path / "a.txt.gz", b"x" * 65_536, 4 * LEAST_UNPACKED)
    monkeypatch.setattr(sources, "MOST_RATIO", 10**9)
    assert len(read_corpus(path).authors[0].lines[0]) == 4 * LEAST_UNPACKED
    assert 4 * LEAST_UNPACKED <= unpacked[0] < 5 * LEAST_UNPACKED


def test_packed_text_reads_as_it_is(tmp_path):
    lines = [f"line {k} of some text, café\n" for k in range(20_000)]
    (tmp_path / "a.txt").write_text("".join(lines), "utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("".join(lines).encode()))
    plain, packed = read_corpus(tmp_path / "a.txt"), read_corpus(tmp_path / "a.txt.gz")
    assert plain.authors[0].lines == packed.authors[0].lines
    with open_bytes(tmp_path / "a.txt.gz") as file:
        assert file.read(7) == b"line 0 "


def test_half_characters_in_leaf_leave_their_users_out(tmp_path):
    data = {"ann": {"x": ["good text"]}, "b\ud800": {"x": ["text"]}, "carl": {"x": ["half \udfff of it"]}}
    (tmp_path / "leaf.json").write_text(json.dumps({"users": list(data), "num_samples": [1, 1, 1], "user_data": data}))
    found = read_corpus(tmp_path / "leaf.json")
    assert [author.lines for author in found.authors] == [("good text",)]
    assert sorted(s.why for s in found.skipped) == ["a name that is not UTF-8", "not UTF-8"]
    assert found.fingerprint()
    del data["ann"]
    (tmp_path / "leaf.json").write_text(json.dumps({"users": list(data), "num_samples": [1, 1], "user_data": data}))
    with pytest.raises(DataError, match="no usable text"):
        read_corpus(tmp_path / "leaf.json")


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"words": ['])
def test_a_vocabulary_nested_without_end_is_refused(opening):
    with pytest.raises(DataError, match="nested deeper"):
        Vocab.from_json(opening * 100_000)


def test_links_that_lead_out_of_a_clients_text_are_not_read(tmp_path):
    make_certificates(tmp_path / "server", [])
    notes, secret = tmp_path / "notes", tmp_path / "secret.txt"
    (notes / "deep").mkdir(parents=True)
    (notes / "mine.txt").write_text("mine\n")
    secret.write_text("not for training\n")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "more.txt").write_text("not for training\n")
    (notes / "deep" / "out.txt").symlink_to(secret)
    (notes / "folder").symlink_to(tmp_path / "others")
    (notes / "again.txt").symlink_to(notes / "mine.txt")
    (notes / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (notes / "loop.txt").symlink_to(notes / "loop.txt")
    home = open_home(
        tmp_path / "home", name="anna", server="127.0.0.1:1", ca=tmp_path / "server" / "ca.crt", data=notes,
    )  # fmt: skip
    assert notes / "deep" / "out.txt" in strays(notes)
    assert [p.name for p in kept_files(notes, None)] == ["again.txt", "mine.txt"]
    for days in (None, 30):
        home = open_home(home.path, keep_days=days or 0)
        found = read_corpus(text_to_read(home))
        assert {line for author in found.authors for line in author.lines} == {"mine"}
    # The mutant: the folder as it is, read as a simulation reads it.
    (notes / "loop.txt").unlink()
    assert "not for training" in {line for author in read_corpus(notes).authors for line in author.lines}


def test_a_new_run_folder_is_its_owners_alone(tmp_path):
    with open_folder(tmp_path / "deep" / "run", resume=False) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    with open_folder(tmp_path / "shared", resume=False) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
