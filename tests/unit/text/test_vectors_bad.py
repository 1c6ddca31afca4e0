"""Bad input: what can be left out is counted with its first example; what cannot is one clear line."""

from __future__ import annotations

import gzip
import struct
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from keyfed.errors import ConfigError, DataError
from keyfed.text.vectors.load import load_vectors

WORDS = ("the", "cat")
GOOD = b"the 1 2 3\ncat 4 5 6\n"


def load(tmp_path, content: bytes, words=WORDS, **more):
    path = tmp_path / "v"
    path.write_bytes(content)
    return load_vectors(path, words, **more)


@pytest.mark.parametrize(
    ("bad", "problem", "example"),
    [
        (b"the 9 9 9\n", "duplicates", "line 3: 'the'"),
        (b"dog\n", "broken", "line 3: 'dog'"),
        (b"dog 1 x 3\n", None, ""),  # nobody asks for the dog
        (b"dog 1 2\n", "wrong_dimension", "line 3: 'dog': 2 numbers, expected 3"),
        (b"dog 1 2 3 4\n", "wrong_dimension", "line 3: 'dog': 4 numbers, expected 3"),
        (b"caf\xe9 1 2 3\n", "undecodable", "line 3: b'caf\\xe9'"),
        (b"\n  \n\r\n\x0b \x0c\n", None, ""),
    ],
)
def test_bad_lines_are_counted_and_passed_over(tmp_path, bad, problem, example):
    got = load(tmp_path, GOOD + bad + b"end 7 8 9\n", words=(*WORDS, "end"))
    assert got.matrix.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    counts = {p: getattr(got.report, p) for p in ("duplicates", "broken", "wrong_dimension", "undecodable")}
    assert counts == {p: int(p == problem) for p in counts}
    assert got.report.examples == ({problem: example} if problem else {})
    assert [example in line for line in got.report.problems()] == [True] * bool(problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"end 1 nan 3", "not_finite"),
        (b"end 1 -inf 3", "not_finite"),
        (b"end 1 1e300 3", "not_finite"),  # more than float32 holds
        (b"end 1 x 3", "broken"),
        (b"end 1 \xff 3", "broken"),
        (b"end", "broken"),
        (b"end 1 2", "wrong_dimension"),
        (b"end 1 2 3 4", "wrong_dimension"),
    ],
)
def test_an_unusable_row_of_ours_is_skipped_and_a_later_good_one_taken(tmp_path, row, problem):
    got = load(tmp_path, GOOD + row + b"\n", words=(*WORDS, "end"))
    assert got.matched.tolist() == [True, True, False]
    assert not got.matrix[2].any()
    assert getattr(got.report, problem) == 1
    assert "line 3: 'end'" in got.report.examples[problem]
    again = load(tmp_path, GOOD + row + b"\nend 7 8 9\n", words=(*WORDS, "end"))
    assert again.matrix[2].tolist() == [7, 8, 9]
    assert again.report.duplicates == 0


def test_one_bad_first_line_does_not_decide_the_dimension(tmp_path):
    got = load(tmp_path, b"odd 1 2\n" + GOOD)
    assert (got.dim, got.report.wrong_dimension) == (3, 1)


def test_a_line_without_an_end_is_broken_not_kept(tmp_path):
    got = load(tmp_path, GOOD + b"x" * 3_000_000 + b"\nend 7 8 9\n", words=(*WORDS, "end"))
    assert got.matched.all()
    assert (got.report.lines, got.report.broken) == (4, 1)


def test_a_binary_file_that_ends_early_is_reported(tmp_path):
    rows = b"".join(w + b" " + struct.pack("<3f", 1, 2, n) for w, n in ((b"the", 3), (b"cat", float("nan"))))
    got = load(tmp_path, b"4 3\n" + rows + b"caf\xe9 " + struct.pack("<3f", 1, 2, 3) + b"dog \0\0")
    assert got.matched.tolist() == [True, False]
    assert (got.report.lines, got.report.broken, got.report.not_finite, got.report.undecodable) == (3, 1, 1, 1)
    assert got.report.examples["broken"] == "the file ends or is damaged at word 4 of 4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (gzip.compress(b"", mtime=0), "empty"),
        (GOOD.decode().encode("utf-16"), "UTF-16; expected UTF-8"),
        (b"no vectors at all\nin this file\n", "no vectors: expected a word and its numbers"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "no vectors"),
        (gzip.compress(GOOD, mtime=0)[:-12], "damaged"),
        (gzip.compress(GOOD, mtime=0)[:10] + b"\xff" * 30, "damaged"),
        (b"PK\x03\x04" + b"\0" * 50, "damaged"),
        (b"1 99999999\nthe 1 2\n", "99,999,999 numbers a word"),
        (b"2 4\n" + GOOD, "wrong dimension; the first: line 2: 'the': 3 numbers, expected 4"),
        (b"dog 1 2 3\n", "none of our 2 words has a usable vector among 1 lines"),
        (b"the 1 nan 3\n", "with NaN"),
    ],
)
def test_what_cannot_be_used_at_all_is_one_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path, content)
    assert "\n" not in str(error.value)


def test_only_specials_matched_is_nothing_matched(tmp_path):
    with pytest.raises(DataError, match="none of our 2 words"):
        load(tmp_path, b"unk 1 2\n", words=("<unk>", "the"))


def test_missing_file_too_wide_and_senseless_options(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_vectors(tmp_path / "missing", WORDS)
    with pytest.raises(ConfigError, match="3 numbers a word, 4 were asked for"):
        load(tmp_path, GOOD, dim=4)
    with pytest.raises(ConfigError, match="expected at least 1"):
        load(tmp_path, GOOD, dim=0)
    with pytest.raises(ConfigError, match="expected mean or first"):
        load(tmp_path, GOOD, pieces="last")
    assert load(tmp_path, GOOD, dim=3).dim == 3


def test_an_archive_of_several_files_names_them(tmp_path):
    with zipfile.ZipFile(tmp_path / "glove.zip", "w") as archive:
        archive.writestr("glove.50d.txt", GOOD)
        archive.writestr("glove.100d.txt", GOOD)
    with pytest.raises(DataError, match=r"holds 2 files \(glove.50d.txt, glove.100d.txt\), expected one"):
        load_vectors(tmp_path / "glove.zip", WORDS)


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": ROWS}, "holds x.npy; expected `vectors`"),
        ({"a\nb": ROWS}, r"holds 'a\\nb.npy'"),
        ({"vectors": ROWS, "words": np.array(WORDS, object)}, "Python objects are not read"),
        ({"vectors": ROWS, "words": np.array(["the"])}, "1 words but 2 vectors"),
        ({"vectors": ROWS[0], "words": np.array(["a", "b", "c"])}, r"vectors have shape \[3\]"),
        ({"vectors": ROWS.astype(int), "words": np.array(WORDS)}, "vectors are int64"),
        ({"vectors": np.asfortranarray(ROWS), "words": np.array(WORDS)}, "np.ascontiguousarray"),
        ({"vectors": ROWS, "words": np.array(["dog", "cow"])}, "none of our 2 words"),
    ],
)
def test_npz_says_what_it_expects(tmp_path, arrays, message):
    np.savez(tmp_path / "v.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_vectors(tmp_path / "v.npz", WORDS)


def letters(*words: str) -> np.ndarray:
    return np.frombuffer("\n".join(words).encode(), np.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": ROWS}, "holds x; expected `vectors`.*or a transformer's wte.weight"),
        ({"vectors": ROWS, "words": letters("the")}, "1 words but 2 vectors"),
        ({"vectors": ROWS.astype(np.int32), "words": letters(*WORDS)}, "vectors are I32"),
        ({"vectors": ROWS, "words": ROWS}, "words F32"),
        ({"vectors": ROWS, "words": letters("dog", "cow")}, "none of our 2 words"),
    ],
)
def test_safetensors_say_what_they_expect(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "v.safetensors")
    with pytest.raises(DataError, match=message):
        load_vectors(tmp_path / "v.safetensors", WORDS)


def test_damaged_safetensors_are_one_line(tmp_path):
    path = tmp_path / "v.safetensors"
    save_file({"vectors": ROWS, "words": letters(*WORDS)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cut off"):
        load_vectors(path, WORDS)
    path.write_bytes(whole[:9] + b"!" * (len(whole) - 9))
    with pytest.raises(DataError, match="damaged safetensors header"):
        load_vectors(path, WORDS)


def test_bad_rows_of_arrays_are_counted(tmp_path):
    words = np.array([b"the", b"cat", b"the", b"caf\xe9", b"end"])
    rows = np.ones((5, 3))
    rows[1, 1], rows[4, 2] = np.nan, 1e300
    np.savez(tmp_path / "v.npz", vectors=rows, words=words)
    got = load_vectors(tmp_path / "v.npz", (*WORDS, "end"))
    assert got.matched.tolist() == [True, False, False]
    assert (got.report.duplicates, got.report.not_finite, got.report.undecodable) == (1, 2, 1)


def test_bad_rows_of_json_are_counted(tmp_path):
    rows = [b'"the": [1, 2, 3]', b'"the": [9, 9, 9]', b'"cat": [1, NaN, 3]', b'"cat": [1, x, 3]', b'"dog": [1, 2]']
    rows += [b'"caf\xe9": [1, 2, 3]', b'"c\\u0061t": [4, 5, 6]', b'"bad\\q": [1, 2, 3]']
    got = load(tmp_path, b'{"dimensions": 3, "vectors": {' + b", ".join(rows) + b"}}")
    assert got.matrix.tolist() == [[1, 2, 3], [4, 5, 6]]
    counts = {p: getattr(got.report, p) for p in got.report.examples}
    assert counts == {"duplicates": 1, "not_finite": 1, "broken": 2, "wrong_dimension": 1, "undecodable": 1}
    assert got.report.lines == len(rows)


def test_json_that_ends_early_is_reported(tmp_path):
    got = load(tmp_path, b'{"dimensions": 3, "vectors": {"the": [1, 2, 3], "cat": [4, 5')
    assert got.matched.tolist() == [True, False]
    assert got.report.examples == {"broken": "the file ends or is damaged after row 1"}
    with pytest.raises(DataError, match="ends or is damaged after row 0"):
        load(tmp_path, b'{"dimensions": 3, "words": ["the"]}')


def test_rows_across_the_borders_of_what_is_read_at_once(tmp_path):
    """Rows of 40 kB: a file of 2 MB is read in parts, and no part ends where a row does."""
    width = 10_000
    words = [f"w{k}" for k in range(60)]
    numbers = np.arange(width) + np.arange(60)[:, None]
    binary = b"".join(w.encode() + b" " + row.astype("<f4").tobytes() for w, row in zip(words, numbers, strict=True))
    rows = ",".join(f'"{w}":{row.tolist()}' for w, row in zip(words, numbers, strict=True))
    for content in (b"60 10000\n" + binary, f'{{"dimensions":{width},"vectors":{{{rows}}}}}'.encode()):
        got = load(tmp_path, content, words=words)
        np.testing.assert_array_equal(got.matrix, numbers)
        assert got.report.problems() == []
