"""The cache of what a person typed: that of the page (`decoder/cache.mjs`) against `run/counts/cache.py`."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from keyfed.model.tables import texts_of
from keyfed.run.counts.cache import DECAY, PRIOR, SUPPORT, Followers, PersonalCache, _cache_before
from keyfed.text.vocab import EOS, SPECIALS, Vocab

from .node_cases import K, answers, needs_node

pytestmark = needs_node

FIRST, SIZE = len(SPECIALS), 150
WORDS = [a + b + c for a in "abcdef" for b in "uvxyz" for c in "lmnop"]  # no two spelt like words of the tables
VOCAB = {"words": [*SPECIALS, *WORDS]}
NEVER = "42"  # not kept as the word before


def drawn(n: int, seed: int) -> np.ndarray:
    """Words of which few are frequent, so that the heaviest are well apart."""
    return FIRST + np.minimum(np.random.default_rng(seed).zipf(1.3, n) - 1, SIZE - 1)


def scores(rows: int) -> np.ndarray:
    p = np.random.default_rng(3).dirichlet(np.full(SIZE, 0.1), rows) + 1e-9
    logp = np.full((rows, FIRST + SIZE), -700.0)  # of the specials nothing: the page leaves them out
    logp[:, FIRST:] = np.log(p / p.sum(1, keepdims=True))
    return logp


def word_of(token: int) -> str:
    return WORDS[token - FIRST]


def chain(tokens: np.ndarray, before: str) -> list[tuple[str, str]]:
    """Each word with the one before it."""
    words = [word_of(token) for token in tokens]
    return list(zip(words, [before, *words], strict=False))


def cached(**case: Any) -> dict[str, Any]:
    (found,) = answers([{"op": "cached", "vocab": VOCAB, **case}])
    return dict(found)


def test_the_page_has_the_constants_of_the_evaluation() -> None:
    assert (K.cache_decay, K.cache_support, tuple(K.cache_prior)) == (DECAY, SUPPORT, PRIOR)


@pytest.mark.parametrize(("history", "text"), [(0, 40), (700, 600), (60, 2300)])
def test_the_same_line_has_the_same_probabilities_in_the_evaluation(history: int, text: int) -> None:
    """Counts, support, both κ: of every word before every word, over several epochs of the page's weights."""
    earlier, line, rows = drawn(history, 1), drawn(text, 2), scores(7)
    laid = texts_of([line], EOS)
    cache = PersonalCache(laid, [earlier])
    cache.p = cache.p.astype(np.float64)  # the evaluation keeps float32
    cache._read(earlier.astype(np.int64), 0, len(laid.tokens))
    model = np.exp(rows)[np.arange(text) % 7]
    own = np.append(1.0, model[np.arange(text), line])
    kappa = cache._kappa(own, np.where(cache.ids == laid.tokens[:, None], cache.p, 0).sum(1))[1:, None]
    expected = (1 - kappa) * model
    at, place = np.nonzero(cache.ids[1:] >= 0)
    expected[at, cache.ids[1:][at, place]] += (kappa * cache.p[1:])[at, place]
    typed = [*chain(earlier, NEVER), *chain(line, "")]
    found = cached(typed=typed, history=history, logps=rows.tolist())
    np.testing.assert_allclose(np.array(found["seen"]), expected[:, FIRST:], rtol=0, atol=1e-9)
    assert kappa.max() > 0.15
    assert (cache.ids >= 0).all(1).any() == (history + text > 200)


def test_lines_of_their_own_have_the_same_cache_as_in_the_evaluation() -> None:
    """The first word of a line follows the line start, the one behind a mark or a number follows nothing."""
    lines = [drawn(n, n) for n in (9, 1, 30, 4, 12)]
    tokens = np.concatenate(lines)
    before = np.concatenate([np.append(EOS, line[:-1]) for line in lines])
    before[[3, 20]] = -1
    name = {EOS: "", -1: NEVER} | {FIRST + n: word for n, word in enumerate(WORDS)}
    typed = [(name[t], name[b]) for t, b in zip(tokens.tolist(), before.tolist(), strict=True)]
    said = cached(typed=typed, history=len(typed), logps=[], befores=list(name.values()))["said"]
    local, word = np.unique(tokens, return_inverse=True)
    for number, one in zip(name, said, strict=True):
        follow = Followers(np.append(before, number))
        p, paired = _cache_before(np.append(word, 0), follow, tokens.size, tokens.size + 1, local.size)
        expected = np.zeros(SIZE)
        expected[local - FIRST] = p[0] / p[0].sum()
        np.testing.assert_allclose(one["p"], expected, rtol=0, atol=1e-9)
        assert one["paired"] == paired[0]
        assert one["kappa"] == PRIOR[0] / PRIOR[1]


LEXICON = Vocab("word", (*SPECIALS, "hat", "hut", "hit"), lower=True, tokenised=False)
LOGP = np.log([1e-9, 1e-9, 1e-9, 1e-9, 0.5, 0.3, 0.2])


def explained(text: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    case = {"op": "explained", "text": text, "logp": LOGP.tolist(), "settings": settings}
    (found,) = answers([case], vocab=json.loads(LEXICON.to_json()))
    return found["seen"], json.loads(found["held"])


def test_typing_weighs_the_cache_by_what_it_explained() -> None:
    """By hand: the first word meets an empty cache; then words that came before are explained in part."""
    seen, held = explained("hit hit hut ")
    assert seen[3] == [[1, 10], [1, 10]]
    share = 0.1 / (0.1 + 0.9 * 0.2)  # "hit" after "hit", which nothing has followed yet
    np.testing.assert_allclose(seen[7], np.array([[1 + share, 11], [1, 10]]))
    # "hit" was followed by a word: by "hit" alone
    np.testing.assert_allclose(seen[11], np.array([[1 + share, 11], [1, 11]]))
    assert held["cache"] == {
        "words": {"hit": 40, "hut": 20}, "pairs": {"": {"hit": 20}, "hit": {"hit": 20, "hut": 20}},
        "age": 3, "weighed": seen[-1],
    }  # fmt: skip


@pytest.mark.parametrize("settings", [{"incognito": True}, {"learn": False}])
def test_nothing_is_weighed_or_cached_incognito_or_with_learning_off(settings: dict[str, bool]) -> None:
    seen, held = explained("hit hit hut ", **settings)
    assert seen[-1] == [[1, 10], [1, 10]]
    assert "cache" not in held


def test_a_correction_that_is_undone_leaves_no_trace_in_the_cache() -> None:
    """The typed word was used; the one in its place was not."""
    seen, held = explained("hit hat hhit ⌫")
    assert seen[-2] != seen[7]
    np.testing.assert_allclose(seen[-1], seen[7])
    assert held["cache"]["words"] == {"hit": 20, "hat": 20, "hhit": 20}
    assert held["cache"]["age"] == 3


# ------------------------------------------------------------------------------------------------- documents


def personal(*actions: Any) -> dict[str, Any]:
    (found,) = answers([{"op": "personal", "actions": list(actions)}])
    errors = [answer for answer in found["answered"] if isinstance(answer, dict) and "error" in answer]
    return {"errors": errors, **json.loads(found["held"])}


def learn(tokens: np.ndarray) -> list[list[str]]:
    return [["learn", word, before] for word, before in chain(tokens, "")]


def test_a_document_carries_the_cache() -> None:
    document = personal(*learn(drawn(1300, 4)))
    document.pop("errors")
    assert document["cache"]["age"] == 300
    again = personal(["importJSON", json.dumps(document)])
    again.pop("errors")
    assert again == document


def test_old_words_fade_and_a_document_does_not_grow_without_bound() -> None:
    """Only once used, a word is gone after 4,000 others."""
    every = [a + b + c + d for a in "bcdfghklmn" for b in "aeiou" for c in "prstvwxz" for d in "aeioujklmn"]
    words = [*every, *(word + "s" for word in every)]  # 8,000
    document = personal(*([["learn", after, before] for before, after in pairwise(words)] * 2))
    cache = document["cache"]
    assert len(document["words"]) == len(words) - 1
    assert 3000 < len(cache["words"]) < 5000
    assert sum(map(len, cache["pairs"].values())) < 5000
    assert words[-1] in cache["words"]
    assert words[5] not in cache["words"]


def test_documents_of_before_begin_the_cache_with_their_counts() -> None:
    """Each use weighs as much as one of uses in any order weighs on average."""
    old = {
        "format": 1,
        "words": {"hat": 300, "hut": 700},
        "pairs": {"hat": {"hut": 250}},
        "dictionary": [],
        "blocked": [],
    }
    found = personal(["importJSON", json.dumps(old)])
    weight = (1 - DECAY**1000) / 1000 / (1 - DECAY) * 20
    assert found["cache"]["words"] == {"hat": round(300 * weight), "hut": round(700 * weight)}
    assert found["cache"]["pairs"] == {"hat": {"hut": round(250 * weight)}}
    assert found["cache"]["age"] == 0


def test_a_word_whose_correction_was_undone_was_used() -> None:
    cache = personal(["keep", "hut"])["cache"]
    assert (cache["words"], cache["pairs"]) == ({"hut": 20}, {})


def test_what_is_forgotten_is_gone_from_the_cache() -> None:
    typed = [["learn", "hat", "hut"], ["learn", "hut", "hat"], ["learn", "hit", "hat"]]
    cache = personal(*typed, ["forget", "hut"])["cache"]
    assert (cache["words"], cache["pairs"]) == ({"hat": 20, "hit": 20}, {"hat": {"hit": 20}})
    assert "cache" not in personal(*typed, ["forgetAll"])


def test_a_file_that_is_added_twice_is_as_added_once() -> None:
    mine, other = learn(drawn(400, 5)), personal(*learn(drawn(500, 6)))
    merge = ["mergeJSON", json.dumps(other)]
    once, twice = personal(*mine, merge), personal(*mine, merge, merge)
    assert once == twice
    assert set(once["cache"]["words"]) == set(once["words"])


GOOD = {"words": {"a": 3}, "pairs": {"": {"a": 3}}, "age": 3, "weighed": [[1, 10], [2.5, 20]]}
BAD: list[Any] = [
    None, [], {}, {**GOOD, "words": []}, {**GOOD, "words": {"a": 0}}, {**GOOD, "words": {"a": 1.5}},
    {**GOOD, "words": {"two words": 1}}, {**GOOD, "pairs": {"a": 3}}, {**GOOD, "pairs": {"a b": {"a": 3}}},
    {**GOOD, "pairs": {"a": {"a": -1}}}, {**GOOD, "age": -1}, {**GOOD, "age": 1001}, {**GOOD, "age": "1"},
    {**GOOD, "weighed": [[1, 10]]}, {**GOOD, "weighed": [[1, 10], [20, 10]]}, {**GOOD, "weighed": [[0, 10], [1, 10]]},
    {**GOOD, "weighed": [["1", "9"], [1, 10]]}, {**GOOD, "words": {f"w{i}": 1 for i in range(100_001)}},
]  # fmt: skip


def test_a_damaged_cache_is_refused_with_its_document() -> None:
    document = {"format": 1, "words": {"a": 3}, "pairs": {"": {"a": 3}}, "dictionary": [], "blocked": []}
    kept = personal(["importJSON", json.dumps({**document, "cache": GOOD})])
    assert (kept["errors"], kept["cache"]) == ([], GOOD)
    before = personal(["learn", "own", ""])
    for cache in BAD:
        found = personal(["learn", "own", ""], ["importJSON", json.dumps({**document, "cache": cache})])
        assert found["errors"][0]["error"].startswith("learnt words: "), cache
        assert {**found, "errors": []} == before


def test_of_a_cache_only_what_is_counted_is_taken() -> None:
    """What the list of learnt words cannot show and forget is not used either."""
    document = {"format": 1, "words": {"a": 3}, "pairs": {}, "dictionary": [], "blocked": []}
    cache = {**GOOD, "words": {"a": 3, "unseen": 5}, "pairs": {"": {"a": 3}, "a": {"unseen": 4}}}
    found = personal(["importJSON", json.dumps({**document, "cache": cache})])
    assert (found["cache"]["words"], found["cache"]["pairs"]) == ({"a": 3}, {})
