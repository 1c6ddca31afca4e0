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

from keyfed.errors import DataError
from keyfed.text.vectors.load import load_vectors
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
from keyfed.text.vectors.load import load_vectors
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
