"""A first look at a corpus: frequent words and word pairs, bag of words, TF-IDF, lengths of lines.

The exploration of *Next-character prediction* (§4, figures 1 and 2): stop words go out first, then the top
unigrams and bigrams of what is left are counted, so that a bigram may span a stop word. Documents are the
authors, or ten contiguous pieces of a text that has none; they are numbered by size, never named. For
character corpora the entropies say what a model that has learnt nothing but frequencies would score.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError
from keyfed.text.vocab import SPECIALS, words_of

if TYPE_CHECKING:
    from keyfed.text.corpus import Corpus

TENTHS = 10
SHOWN_DOCUMENTS = 10

# Web addresses, @name and /u/name; the "name:" that a message to somebody begins with.
NO_WORDS = re.compile(r"https?://\S+|www\.\S+|(?<![\w/])(?:@|/?u/)[\w.-]+")
ADDRESSED = re.compile(r"\s*(\S+):\s")

Table = list[dict[str, object]]


def explore(corpus: Corpus, *, top: int = 20, stop_words: bool = True) -> tuple[dict[str, object], NDArray[np.int64]]:
    """Describe a corpus in tables.

    Args:
      corpus: The text by author. Published validation and test lines are not looked at.
      top: Rows of each table.
      stop_words: Leave scikit-learn's English stop words (and contractions of them) out.

    Returns:
      A dict that can be written as JSON (`lines`, `tokens`, `types`, `line_length`, `unigrams`, `bigrams`,
      `bag_of_words`, `tfidf`, and `characters` for character corpora), and the words of each line.

    Raises:
      ConfigError: `top` is below 1, or scikit-learn is missing.
      DataError: The corpus has no words.
    """
    if top < 1:
        raise ConfigError(f"top must be at least 1, got {top}")
    stop = frozenset(_scikit_learn().ENGLISH_STOP_WORDS) if stop_words else frozenset[str]()
    documents = _documents(corpus)
    words = [words_of(line, tokenised=corpus.tokenised, lower=True) for lines in documents for line in lines]
    counts = Counter(chain.from_iterable(words))
    if not counts:
        raise DataError(f"{corpus.name} has no words to explore")
    lengths = np.array([len(line) for line in words])
    handles = _handles(documents) if corpus.natural else frozenset[str]()
    content = [[_content(line, corpus, stop, handles) for line in lines] for lines in documents]
    unigrams = Counter(chain.from_iterable(chain.from_iterable(content)))
    bigrams = Counter(" ".join(pair) for lines in content for line in lines for pair in pairwise(line))
    found: dict[str, object] = {
        "corpus": corpus.name,
        "documents": len(documents),
        "lines": len(lengths),
        "tokens": counts.total(),
        "types": len(counts),
        "line_length": _spread(lengths),
        "unigrams": _ranked(unigrams, top),
        "bigrams": _ranked(bigrams, top),
        "stop_words": stop_words,
    }
    found |= _bag_of_words([[*chain.from_iterable(lines)] for lines in content], top)
    if corpus.characters:
        found["characters"] = character_statistics(chain.from_iterable(a.lines for a in corpus.authors), top)
    return found, lengths


# Words


def _documents(corpus: Corpus) -> list[tuple[str, ...]]:
    """Return the lines of each author, or tenths of a pool."""
    if corpus.natural and len(corpus.authors) > 1:
        return [author.lines for author in corpus.authors if author.lines]
    lines = tuple(chain.from_iterable(author.lines for author in corpus.authors))
    bounds = np.linspace(0, len(lines), TENTHS + 1).astype(int).tolist()
    return [lines[start:end] for start, end in pairwise(bounds) if end > start]


def _handles(documents: Iterable[Iterable[str]]) -> frozenset[str]:
    """Return what looks like names of people: at least every fourth use begins a line and has a colon.

    Example:
      >>> sorted(_handles([["Dr_Who: hi", "ask dr_who", "Ubuntu: yes", *["ubuntu"] * 9]]))
      ['dr_who']
    """
    lines = [line.lower() for document in documents for line in document]
    addressed = Counter(match[1] for match in map(ADDRESSED.match, lines) if match)
    used = Counter(chunk.strip(":,") for line in lines for chunk in line.split())
    return frozenset(name for name, times in addressed.items() if 4 * times >= used[name.strip(":,")])


def _content(line: str, corpus: Corpus, stop: frozenset[str], handles: frozenset[str]) -> list[str]:
    """Return the words worth counting, in lower case; handles and web addresses are not."""
    if corpus.natural:
        chunks = NO_WORDS.sub(" ", line.lower()).split()
        line = " ".join(chunk for chunk in chunks if chunk.strip(":,?!") not in handles)
    words = words_of(line, tokenised=corpus.tokenised, lower=True)
    return [word for word in words if word not in SPECIALS and _is_content(word, stop)]


def _scikit_learn() -> Any:
    try:
        from sklearn.feature_extraction import text
    except ImportError:
        raise ConfigError("explore needs scikit-learn: pip install scikit-learn") from None
    return text


def _is_content(word: str, stop: frozenset[str]) -> bool:
    """Tell words of two letters and more from marks, numbers, stop words and their contractions.

    Example:
      >>> stop = frozenset({"it", "the", "not"})
      >>> [w for w in ["it's", "don't", "the", "'ll", "o'clock", "1999", ",", "king"] if _is_content(w, stop)]
      ["o'clock", 'king']
      >>> _is_content("don't", frozenset())
      True
    """
    if sum(map(str.isalpha, word)) < 2:
        return False
    if not stop:
        return True
    head, apostrophe, _ = word.partition("'")
    contracted = bool(apostrophe) and (not head or head in stop or word.endswith("n't"))
    return not contracted and word not in stop


def _ranked(counts: dict[str, int], top: int) -> Table:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:top]
    return [{"term": term, "count": count} for term, count in ranked]


def _spread(values: NDArray[np.int64]) -> dict[str, float]:
    marks = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    spread = dict(zip(("min", "q1", "median", "q3", "max"), marks, strict=True))
    return spread | {"mean": float(values.mean())}


# Documents and terms


def _bag_of_words(documents: Sequence[list[str]], top: int) -> dict[str, object]:
    """Return the bag of words and the mean TF-IDF of its terms.

    TF-IDF is scikit-learn's: count · (1 + ln((1 + D) / (1 + D_w))), each document scaled to length 1.
    """
    if not any(documents):
        empty: dict[str, object] = {"shape": [len(documents), 0], "nonzero": 0, "terms": [], "counts": []}
        return {"bag_of_words": empty, "tfidf": []}
    counter = _scikit_learn().CountVectorizer(analyzer=list)
    bag = counter.fit_transform(documents)  # [document, term], sparse
    terms: list[str] = counter.get_feature_names_out().tolist()
    total = np.asarray(bag.sum(axis=0)).ravel()
    score = np.asarray(_scikit_learn().TfidfTransformer().fit_transform(bag).mean(axis=0)).ravel()
    frequent = sorted(range(len(terms)), key=lambda i: (-total[i], terms[i]))[:top]
    telling = sorted(range(len(terms)), key=lambda i: (-score[i], terms[i]))[:top]
    biggest = sorted(range(len(documents)), key=lambda i: -len(documents[i]))[:SHOWN_DOCUMENTS]
    return {
        "bag_of_words": {
            "shape": [int(n) for n in bag.shape],
            "nonzero": int(bag.nnz),
            "terms": [terms[i] for i in frequent],
            "counts": bag[biggest][:, frequent].toarray().tolist(),  # [shown document, shown term]
        },
        "tfidf": [{"term": terms[i], "score": float(score[i])} for i in telling],
    }


# Characters


def character_statistics(lines: Iterable[str], top: int = 20) -> dict[str, object]:
    r"""Count characters and pairs, a line end counting as one character.

    `unigram_entropy` is :math:`H(X)` and `bigram_entropy` the conditional :math:`H(X_2 \mid X_1)`, in
    nats per character: the loss of a model that knows nothing, or only the last character. The accuracies
    are those of the best guess under either.

    Example:
      >>> found = character_statistics(["ab"] * 100)
      >>> round(found["unigram_entropy"], 4), round(found["bigram_entropy"], 4)
      (1.0986, 0.0)
    """
    text = "".join(f"{line}\n" for line in lines)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    if len(codes) < 2:
        raise DataError("fewer than two characters to count")
    kinds, numbers = np.unique(codes, return_inverse=True)
    size = len(kinds)
    single = np.bincount(numbers)
    pair_kinds, pairs = np.unique(numbers[:-1].astype(np.int64) * size + numbers[1:], return_counts=True)
    first = np.bincount(numbers[:-1], minlength=size)
    best = np.zeros(size, np.int64)
    np.maximum.at(best, pair_kinds // size, pairs)
    characters = {chr(c): int(n) for c, n in zip(kinds.tolist(), single.tolist(), strict=True)}
    return {
        "characters": len(codes),
        "types": size,
        "lines": text.count("\n"),
        "frequencies": _ranked(characters, top),
        "p_space": characters.get(" ", 0) / len(codes),
        "unigram_entropy": _entropy(single),
        "bigram_entropy": max(0.0, _entropy(pairs) - _entropy(first)),
        "unigram_accuracy": int(single.max()) / len(codes),
        "bigram_accuracy": int(best.sum()) / (len(codes) - 1),
    }


def _entropy(counts: NDArray[np.int64]) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
