"""Every format gives the same vectors, whatever the file is called; matching; streaming and progress."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from keyfed.errors import ConfigError, DataError
from keyfed.text.vectors import load_vectors
from keyfed.text.vocab import SPECIALS

WORDS = ("the", "cat", "naïve", "absent")
TABLE = {"the": [1.0, -2.5, 0.125], "dog": [4.0, 5.0, 6.0], "naïve": [-0.5, 0.25, 3.0], "cat": [7.0, 8.0, -9.0]}
EXPECTED = np.array([TABLE["the"], TABLE["cat"], TABLE["naïve"], [0, 0, 0]], np.float32)


def text_of(table: dict[str, list[float]], end: str = "\n", blank: str = " ") -> bytes:
    return "".join(blank.join([word, *map(repr, row)]) + end for word, row in table.items()).encode()


def binary_of(table: dict[str, list[float]], end: bytes = b"\n") -> bytes:
    head = f"{len(table)} {len(next(iter(table.values())))}\n".encode()
    return head + b"".join(w.encode() + b" " + struct.pack(f"<{len(v)}f", *v) + end for w, v in table.items())


def plain_text(path: Path) -> None:
    path.write_bytes(text_of(TABLE))


def windows_text(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + text_of(TABLE, end="\r\n", blank="\t"))


def last_line_without_end(path: Path) -> None:
    path.write_bytes(text_of(TABLE).rstrip(b"\n"))


def header_text(path: Path) -> None:
    path.write_bytes(b"4 3\n" + text_of(TABLE, end=" \n"))  # FastText writes a blank before each line end


def gzipped_text(path: Path) -> None:
    path.write_bytes(gzip.compress(text_of(TABLE)))


def gzipped_header_text(path: Path) -> None:
    path.write_bytes(gzip.compress(b"4 3\n" + text_of(TABLE)))


def zipped_text(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr("folder/vectors.txt", text_of(TABLE))
        archive.writestr("__MACOSX/._vectors.txt", b"\0")


def word2vec_binary(path: Path) -> None:
    path.write_bytes(binary_of(TABLE))


def word2vec_binary_without_line_ends(path: Path) -> None:
    path.write_bytes(binary_of(TABLE, end=b""))


def gzipped_binary(path: Path) -> None:
    path.write_bytes(gzip.compress(binary_of(TABLE)))


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, vectors=np.array(list(TABLE.values())), words=np.array(list(TABLE)))


def compressed_npz_of_bytes(path: Path) -> None:
    words = np.array([word.encode() for word in TABLE])
    with path.open("wb") as file:
        np.savez_compressed(file, vectors=np.array(list(TABLE.values()), np.float16), words=words)


def safetensors(path: Path) -> None:
    letters = np.frombuffer("\n".join(TABLE).encode(), np.uint8)
    save_file({"words": letters, "vectors": np.array(list(TABLE.values()), np.float32)}, path)


def bfloat16_safetensors(path: Path) -> None:
    rows = (np.array(list(TABLE.values()), np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    letters = "\n".join(TABLE).encode()
    header = {
        "vectors": {"dtype": "BF16", "shape": [4, 3], "data_offsets": [0, len(rows)]},
        "words": {"dtype": "U8", "shape": [len(letters)], "data_offsets": [len(rows), len(rows) + len(letters)]},
    }
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + rows + letters)


def wink_json(path: Path) -> None:
    rows = {word: [*row, 9.5, k] for k, (word, row) in enumerate(TABLE.items())}
    path.write_text(
        json.dumps({"precision": 8, "dimensions": 3, "words": [*TABLE, "vectors"], "vectors": rows, "x": [0]})
    )


def gzipped_indented_json(path: Path) -> None:
    content = {"dimensions": 3, "vectors": TABLE}
    path.write_bytes(gzip.compress(json.dumps(content, indent=1, ensure_ascii=False).encode()))


FORMATS = {
    plain_text: "GloVe text", windows_text: "GloVe text", last_line_without_end: "GloVe text",
    header_text: "word2vec text", gzipped_text: "GloVe text", gzipped_header_text: "word2vec text",
    zipped_text: "GloVe text", word2vec_binary: "word2vec binary",
    word2vec_binary_without_line_ends: "word2vec binary", gzipped_binary: "word2vec binary",
    npz: "npz", compressed_npz_of_bytes: "npz", safetensors: "safetensors", bfloat16_safetensors: "safetensors",
    wink_json: "JSON", gzipped_indented_json: "JSON",
}  # fmt: skip


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_every_format_is_told_by_its_content(tmp_path, write):
    path = tmp_path / "file.with-no-known-ending"
    write(path)
    calls: list[tuple[int, int]] = []
    got = load_vectors(path, WORDS, dim=2, progress=lambda *call: calls.append(call))
    np.testing.assert_array_equal(got.matrix, EXPECTED)
    assert got.matrix.dtype == np.float32
    assert got.matched.tolist() == [True, True, True, False]
    assert (got.dim, got.source) == (3, (path.name, FORMATS[write]))
    assert (got.report.lines, got.report.matched, got.report.problems()) == (4, 3, [])
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)


def test_a_word_is_matched_as_it_is_and_else_in_lower_case(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("paris 1 1\nApple 2 2\napple 3 3\nbush 4 4\n")
    got = load_vectors(path, ("Paris", "Apple", "apple", "Bush", "bush", "PEAR"))
    assert got.matrix[:, 0].tolist() == [1, 2, 3, 4, 4, 0]
    assert (got.report.exact, got.report.lowered, got.report.matched) == (3, 2, 5)


def test_an_upper_case_row_does_not_serve_a_lower_case_word(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("US 1 1\nthe 2 2\n")
    assert load_vectors(path, ("us", "the")).matched.tolist() == [False, True]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), [0, 0, 0, 0]),
        (("unk",), [0, 0, 0, 5]),
        (("unk", "<unk>"), [0, 0, 0, 6]),
        (("</s>", "<s>"), [0, 6, 5, 0]),
        (("<pad>", "<eos>", "<bos>"), [5, 7, 6, 0]),
    ],
)
def test_specials_are_matched_only_where_the_file_has_them(tmp_path, names, expected):
    path = tmp_path / "v.txt"
    path.write_text("".join(f"{name} {k} 1\n" for k, name in enumerate(("pad", "bos", "eos", "the", "a", *names))))
    got = load_vectors(path, (*SPECIALS, "the"))
    assert got.matrix[:4, 0].tolist() == expected
    assert got.report.specials == len([e for e in expected if e])
    assert got.matrix[4, 0] == 3


def test_words_with_blanks_are_no_bad_lines(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text(". . . 1 2\nat name@domain.com 3 4\nthe  5 6\ncat 7 8\n")  # the first two: GloVe 840B
    got = load_vectors(path, ("the", "cat", "."))
    assert got.matrix.tolist() == [[5, 6], [7, 8], [0, 0]]
    assert got.report.problems() == []


LETTERS = st.text("abcdé", min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), table=st.dictionaries(LETTERS, st.integers(-9, 9), min_size=1, max_size=8))
def test_neither_order_matters(tmp_path_factory, data, table):
    """Lines in another order give the same rows; words in another order give the rows in that order."""
    bad = data.draw(st.lists(st.sampled_from(["caf\xe9 1 2 3", "x 1 2", "y", "z 1 2 3 4"]), max_size=2))
    lines = [f"{word} {n} {n + 1} {n + 2}".encode() for word, n in table.items()]
    lines += [b"w%d 1 2 3" % k for k in range(3)] + [line.encode("latin-1") for line in bad]
    words = [*table, "missing"]
    shuffled, order = data.draw(st.permutations(lines)), data.draw(st.permutations(range(len(words))))
    folder = tmp_path_factory.mktemp("order")
    (folder / "one").write_bytes(b"\n".join(lines))
    (folder / "two").write_bytes(b"\n".join(shuffled))
    one = load_vectors(folder / "one", words)
    two = load_vectors(folder / "two", [words[k] for k in order])
    assert one.matched.tolist() == [True] * len(table) + [False]
    np.testing.assert_array_equal(one.matrix[list(order)], two.matrix)
    np.testing.assert_array_equal(one.matched[list(order)], two.matched)
    assert len(one.report.problems()) == len(two.report.problems())


MEASURE = """
import re, sys
from pathlib import Path
from keyfed.text.vectors import load_vectors
def peak():  # of this process alone; getrusage would count the parent's, from before exec
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
calls = []
words = [f"w{k}" for k in range(0, 100_000, 20)]
before = peak()
got = load_vectors(Path(sys.argv[1]), words, progress=lambda *call: calls.append(call))
print(got.report.matched, got.report.lines, len(calls), calls[-1][0] == calls[-1][1], (peak() - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_only_our_rows_are_kept_in_memory(tmp_path):
    path = tmp_path / "big.txt.gz"
    numbers = b" 0.12345" * 100
    with gzip.open(path, "wb", compresslevel=1) as file:
        for k in range(100_000):
            file.write(b"w%d%b\n" % (k, numbers))
    found = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    matched, lines, calls, complete, megabytes = found.stdout.split()
    assert (matched, lines, complete) == ("5000", "100000", "True")
    assert int(calls) > 10
    assert int(megabytes) < 20  # all rows would be 40 MB of float32, the text 80 MB; ours are 2 MB, twice


def test_the_glove_subset_covers_penn_treebank(data_dir):
    if not (data_dir / "glove-6b-100d").is_dir() or not (data_dir / "ptb").is_dir():
        pytest.skip(f"no glove-6b-100d and ptb in {data_dir} (set KEYFED_DATA)")
    types = sorted(set((data_dir / "ptb" / "ptb.train.txt").read_text("utf-8").split()) - {"<unk>"})
    got = load_vectors(data_dir / "glove-6b-100d" / "glove.6B.100d.txt.gz", types, dim=100)
    assert len(types) == 9_998
    assert got.report.lines == 21_230
    assert got.report.problems() == []
    assert got.matched.mean() >= 0.96


def test_unreadable_files_are_one_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "v.txt"
    path.write_text("the 1 2\n")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read"):
        load_vectors(path, ("the",))


OURS = ("the", "cat")
GOOD = b"the 1 2 3\ncat 4 5 6\n"


def load(tmp_path, content: bytes, words=OURS, **more):
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
    got = load(tmp_path, GOOD + bad + b"end 7 8 9\n", words=(*OURS, "end"))
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
    got = load(tmp_path, GOOD + row + b"\n", words=(*OURS, "end"))
    assert got.matched.tolist() == [True, True, False]
    assert not got.matrix[2].any()
    assert getattr(got.report, problem) == 1
    assert "line 3: 'end'" in got.report.examples[problem]
    again = load(tmp_path, GOOD + row + b"\nend 7 8 9\n", words=(*OURS, "end"))
    assert again.matrix[2].tolist() == [7, 8, 9]
    assert again.report.duplicates == 0


def test_one_bad_first_line_does_not_decide_the_dimension(tmp_path):
    got = load(tmp_path, b"odd 1 2\n" + GOOD)
    assert (got.dim, got.report.wrong_dimension) == (3, 1)


def test_a_line_without_an_end_is_broken_not_kept(tmp_path):
    got = load(tmp_path, GOOD + b"x" * 3_000_000 + b"\nend 7 8 9\n", words=(*OURS, "end"))
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
        load_vectors(tmp_path / "missing", OURS)
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
        load_vectors(tmp_path / "glove.zip", OURS)


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": ROWS}, "holds x.npy; expected `vectors`"),
        ({"a\nb": ROWS}, r"holds 'a\\nb.npy'"),
        ({"vectors": ROWS, "words": np.array(OURS, object)}, "Python objects are not read"),
        ({"vectors": ROWS, "words": np.array(["the"])}, "1 words but 2 vectors"),
        ({"vectors": ROWS[0], "words": np.array(["a", "b", "c"])}, r"vectors have shape \[3\]"),
        ({"vectors": ROWS.astype(int), "words": np.array(OURS)}, "vectors are int64"),
        ({"vectors": np.asfortranarray(ROWS), "words": np.array(OURS)}, "np.ascontiguousarray"),
        ({"vectors": ROWS, "words": np.array(["dog", "cow"])}, "none of our 2 words"),
    ],
)
def test_npz_says_what_it_expects(tmp_path, arrays, message):
    np.savez(tmp_path / "v.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_vectors(tmp_path / "v.npz", OURS)


def letters(*words: str) -> np.ndarray:
    return np.frombuffer("\n".join(words).encode(), np.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": ROWS}, "holds x; expected `vectors`.*or a transformer's wte.weight"),
        ({"vectors": ROWS, "words": letters("the")}, "1 words but 2 vectors"),
        ({"vectors": ROWS.astype(np.int32), "words": letters(*OURS)}, "vectors are I32"),
        ({"vectors": ROWS, "words": ROWS}, "words F32"),
        ({"vectors": ROWS, "words": letters("dog", "cow")}, "none of our 2 words"),
    ],
)
def test_safetensors_say_what_they_expect(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "v.safetensors")
    with pytest.raises(DataError, match=message):
        load_vectors(tmp_path / "v.safetensors", OURS)


def test_damaged_safetensors_are_one_line(tmp_path):
    path = tmp_path / "v.safetensors"
    save_file({"vectors": ROWS, "words": letters(*OURS)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cut off"):
        load_vectors(path, OURS)
    path.write_bytes(whole[:9] + b"!" * (len(whole) - 9))
    with pytest.raises(DataError, match="damaged safetensors header"):
        load_vectors(path, OURS)


def test_bad_rows_of_arrays_are_counted(tmp_path):
    words = np.array([b"the", b"cat", b"the", b"caf\xe9", b"end"])
    rows = np.ones((5, 3))
    rows[1, 1], rows[4, 2] = np.nan, 1e300
    np.savez(tmp_path / "v.npz", vectors=rows, words=words)
    got = load_vectors(tmp_path / "v.npz", (*OURS, "end"))
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
