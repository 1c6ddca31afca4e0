from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DataError
from keyfed.reports.figures import draw_exploration
from keyfed.text.corpus import Author, Corpus
from keyfed.text.explore import character_statistics
from keyfed.text.explore import explore as explore_corpus

DATA = Path(os.environ.get("KEYFED_DATA", Path(__file__).parents[4] / "shared" / "data"))
PNG = b"\x89PNG\r\n\x1a\n"


def explore(corpus: Corpus, *, out: Path, **options: Any) -> dict[str, Any]:
    """Count a corpus and draw what was counted, as `keyfed data explore` does."""
    found, lengths = explore_corpus(corpus, **options)
    return {**found, "plots": draw_exploration(found, lengths, out)}


def pool(*lines: str, **options: bool) -> Corpus:
    kinds = {"tokenised": False, "natural": False, "characters": False} | options
    return Corpus("toy", (Author("all", lines),), valid=None, test=None, skipped=(), about="", **kinds)


def people(**lines: tuple[str, ...]) -> Corpus:
    authors = tuple(Author(name, text) for name, text in lines.items())
    return Corpus("toy", authors, None, None, False, True, False, (), "")


def terms(table: object) -> list[tuple[str, int]]:
    return [(row["term"], row["count"]) for row in table]


def test_stop_words_go_out_before_pairs_are_counted(tmp_path: Path) -> None:
    found = explore(pool("The King of France, it's the king of France!", "A king."), out=tmp_path)
    assert terms(found["unigrams"]) == [("king", 3), ("france", 2)]
    assert terms(found["bigrams"]) == [("king france", 2), ("france king", 1)]
    kept = explore(pool("The king of the king."), stop_words=False, out=tmp_path)
    assert terms(kept["unigrams"]) == [("king", 2), ("the", 2), ("of", 1)]
    assert ("the king", 2) in terms(kept["bigrams"])


def test_numbers_of_tokens_types_and_lengths(tmp_path: Path) -> None:
    found = explore(pool("one , <unk> two", "", "one", tokenised=True), out=tmp_path)
    assert (found["lines"], found["tokens"], found["types"]) == (3, 5, 4)
    assert found["line_length"]["max"] == 4
    assert found["line_length"]["median"] == 1
    assert "<unk>" not in dict(terms(found["unigrams"]))


def test_result_is_json_and_plots_are_there(tmp_path: Path) -> None:
    lines = [f"royal king{i} loves castle{i % 3} 50 $ 😀 नमस्ते" for i in range(40)]
    found = explore(pool(*lines, characters=True), top=5, out=tmp_path / "deep" / "plots")
    assert json.loads(json.dumps(found)) == found
    assert {Path(path).stem for path in found["plots"]} == {
        *("unigrams", "bigrams", "tfidf", "bag_of_words", "line_lengths", "characters")
    }
    for path in found["plots"]:
        assert Path(path).read_bytes().startswith(PNG)
    assert all(len(found[table]) == 5 for table in ("unigrams", "bigrams", "tfidf"))
    assert len(found["characters"]["frequencies"]) == 5


def test_bag_of_words_and_tfidf_over_authors(tmp_path: Path) -> None:
    corpus = people(ada=("engine engine poem",), bob=("beer poem",), eve=("poem poem poem poem",), mute=())
    found = explore(corpus, out=tmp_path)
    assert found["documents"] == 3
    assert found["bag_of_words"] == {
        "shape": [3, 3],
        "nonzero": 5,
        "terms": ["poem", "engine", "beer"],
        "counts": [[4, 0, 0], [1, 2, 0], [1, 0, 1]],
    }
    rare, common = 1 + math.log(4 / 2), 1 + math.log(4 / 4)
    scores = {row["term"]: row["score"] for row in found["tfidf"]}
    ada, bob = math.hypot(2 * rare, common), math.hypot(rare, common)
    assert scores["engine"] == pytest.approx(2 * rare / ada / 3)
    assert scores["beer"] == pytest.approx(rare / bob / 3)
    assert scores["poem"] == pytest.approx((common / ada + common / bob + 1) / 3)


def test_a_pool_is_seen_in_tenths(tmp_path: Path) -> None:
    found = explore(pool(*(f"word{i // 3}" for i in range(30))), out=tmp_path)
    assert found["documents"] == 10
    assert sorted(map(max, found["bag_of_words"]["counts"])) == [3] * 10
    assert explore(pool("king", "queen"), out=tmp_path)["documents"] == 2


def test_people_are_not_named(tmp_path: Path) -> None:
    text = "robin42: ask @jenny or /u/some_body, see https://example.org/~jenny about kernels"
    found = explore(people(robin42=(text,), jenny=("kernels panic, robin42",)), out=tmp_path)
    assert dict(terms(found["unigrams"])) == {"kernels": 2, "ask": 1, "panic": 1}
    for name in ("robin", "jenny", "some_body"):
        assert name not in json.dumps(found | {"plots": [Path(p).name for p in found["plots"]]})


def test_text_without_content_words_still_has_counts(tmp_path: Path) -> None:
    found = explore(pool("the , 1 2"), out=tmp_path)
    assert found["tokens"] == 4
    assert found["unigrams"] == found["bigrams"] == found["tfidf"] == []
    assert [Path(path).name for path in found["plots"]] == ["line_lengths.png"]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="top"):
        explore(pool("king"), top=0, out=tmp_path)
    for corpus in (pool(), pool("", " ")):
        with pytest.raises(DataError, match="no words"):
            explore(corpus, out=tmp_path)
    with pytest.raises(DataError, match="two characters"):
        character_statistics([])


@given(st.lists(st.text("abc \n\U0001f600", max_size=12), min_size=2, max_size=6))
def test_character_statistics_agree_with_their_definition(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    single, pairs, firsts = Counter(text), Counter(pairwise(text)), Counter(text[:-1])
    found = character_statistics(lines)
    n = len(text)
    assert found["characters"] == n
    assert found["p_space"] == text.count(" ") / n
    assert found["unigram_entropy"] == pytest.approx(-sum(c / n * math.log(c / n) for c in single.values()))
    conditional = -sum(c / (n - 1) * math.log(c / firsts[a]) for (a, _), c in pairs.items())
    assert found["bigram_entropy"] == pytest.approx(conditional, abs=1e-12)
    guesses = {a: max(c for (x, _), c in pairs.items() if x == a) for a in firsts}
    assert found["bigram_accuracy"] == pytest.approx(sum(guesses.values()) / (n - 1))
    assert found["bigram_entropy"] <= math.log(len(single)) + 1e-12


def test_plotting_libraries_are_imported_late() -> None:
    code = "import sys, keyfed.text.explore; sys.exit(bool({'matplotlib', 'sklearn', 'torch'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tiny_shakespeare(tmp_path: Path) -> None:
    path = DATA / "shakespeare" / "tiny_shakespeare.txt"
    if not path.is_file():
        pytest.skip(f"no tiny-shakespeare at {path}")
    lines = path.read_text().split("\n")[:-1]
    found = explore(pool(*lines, characters=True), out=tmp_path)
    characters = found["characters"]
    assert characters["characters"] == 1_115_394
    assert characters["types"] == 65
    assert characters["p_space"] == pytest.approx(169_892 / 1_115_394)
    # What frequencies and pairs alone are worth on this text; an LSTM has to do better.
    assert characters["unigram_entropy"] == pytest.approx(3.3128, abs=1e-4)
    assert characters["bigram_entropy"] == pytest.approx(2.4526, abs=1e-4)
    assert terms(found["bigrams"])[0] == ("king richard", 250)
