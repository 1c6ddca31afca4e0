"""What one client writes of its own text in a run's count, and which public numbers it refuses.

The vectors are made by the functions that a simulation calls for all its clients (`run.counts`). What differs is who
is trusted: a client looks at everything that the server says was released, before it writes a word by it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.config.schema import CountsConfig
from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.secure_round import countable, evaluation_vector_of
from keyfed.engine.sums.tallies import Entries, Fields, recount_fields, vectors
from keyfed.errors import KeyfedError
from keyfed.federated.types import Params
from keyfed.model.counts import CountModel, counts_from_bytes
from keyfed.model.language_model import ModelSpec
from keyfed.model.mixture import Mixture
from keyfed.model.ngram import Ints, Tokens
from keyfed.model.output import Score
from keyfed.model.tables import GramTable, Texts, last_rows, texts_of
from keyfed.run.counts.fit import MOST_TOKENS, SMOOTHING, TOKENS, mixture_histogram, smoothing_cells
from keyfed.run.counts.levels import DEPTH, words_listed, write_list, write_sketch
from keyfed.run.counts.mixing import score_models
from keyfed.run.counts.release import NetworkReader
from keyfed.run.counts.terms import plan_of
from keyfed.text.vocab import EOS
from keyfed.wire.limits import MOST_COUNT_FILE, MOST_LISTED, MOST_SUM_WORDS
from keyfed.wire.messages import Rejected, Shapes

MODELS = ("counts", "mixture", "cache")  # whose figures a client counts on its test text, in this order
LENGTHS = re.compile(r"(recount|sketch|smoothing) ([1-9])")
TABLE = {"keys": torch.int64, "clients": torch.int64, "counts": torch.int64}
FITTED = {"prob": torch.float64, "backoff": torch.float64}
LISTED = {"list.keys": torch.int64, "list.estimates": torch.float64}


class SumKind(NamedTuple):
    """What is summed: `recount`, `sketch` or `smoothing` of n-grams of a length, or `mixture` or `test` of all."""

    kind: str
    n: int


def kind_of(purpose: str, order: int) -> SumKind:
    """Read a sum's purpose."""
    found = LENGTHS.fullmatch(purpose)
    what = SumKind(purpose, 0) if found is None else SumKind(found[1], int(found[2]))
    if (found is None and purpose not in ("mixture", "test")) or what.n > order or what == ("sketch", 1):
        raise Rejected("refused by client", f'no sum "{purpose[:20]}" is in a count of n-grams of up to {order} words')
    return what


@dataclass(frozen=True, eq=False)
class OwnCounts:
    """`CountWriter` over one client's text.

    Attributes:
      shapes: of the run's model, `spec`.
      lines: whether lines are read on their own.
      train, valid, test: streams of its text.
      watched: begins the time of a vector: what it returns raises `Rejected` when that is over.
    """

    terms: CountsConfig
    vocab: int
    vocab_sha256: str
    seed: int
    spec: ModelSpec
    shapes: Shapes
    lines: bool
    train: Tokens
    valid: Tokens
    test: Tokens
    watched: Callable[[], Callable[[], None]] = lambda: lambda: None

    @property
    def least(self) -> int:
        return self.terms.k

    def expects(self, purpose: str, sizes: Mapping[str, int]) -> Shapes:
        """Return what the tensors of a sum look like; see `CountWriter`."""
        what = kind_of(purpose, self.terms.order)
        kinds, most = self._kinds(what, sizes), MOST_COUNT_FILE if what.n == 0 else MOST_LISTED + 1
        if set(sizes) != set(kinds):
            raise Rejected("malformed", f'the sum "{purpose}" with the numbers {", ".join(sizes)[:80]}')
        if sizes and max(sizes.values()) > most:
            raise Rejected("over limit", f"{max(sizes.values()):,} n-grams of one length; this client reads {most:,}")
        expected: dict[str, Any] = {name: ((size,), kinds[name]) for name, size in sizes.items()}
        return {**(self.shapes if what.n == 0 else {}), **expected}

    def _kinds(self, what: SumKind, sizes: Mapping[str, int]) -> dict[str, torch.dtype]:
        """Return the names and types of the public numbers of a sum."""
        if what.kind == "test":
            return {"counts": torch.uint8, "mixture": torch.uint8}
        if what.kind == "mixture":
            return {"counts": torch.uint8, TOKENS: torch.int64}
        smoothing = what.kind == "smoothing"
        tables = (
            max(what.n, sum(f"n{n}.keys" in sizes for n in range(1, self.terms.order + 1)))
            if smoothing
            else (what.n - 1)
        )
        columns = [name for name in TABLE if smoothing or name != "counts"]
        kinds = {f"n{n}.{name}": TABLE[name] for n in range(1, tables + 1) for name in columns}
        if smoothing:
            kinds |= {f"n{n}.{name}": kind for n in range(1, what.n) for name, kind in FITTED.items()}
            kinds[TOKENS] = torch.int64
        return kinds | (LISTED if what.kind == "recount" and what.n > 1 else {})

    def released(self, numbers: Params) -> Mapping[str, str]:
        """Return a hash of what was released of each length; see `CountWriter`."""
        found = {}
        for n in range(1, self.terms.order + 1):
            if f"n{n}.keys" in numbers:
                both = (numbers[f"n{n}.{name}"].numpy().tobytes() for name in ("keys", "clients"))
                found[str(n)] = hashlib.sha256(b"|".join(both)).hexdigest()
        if "counts" in numbers:
            found["file"] = hashlib.sha256(numbers["counts"].numpy().tobytes()).hexdigest()
        return found

    def vector(self, purpose: str, numbers: Params, largest: int) -> Vector:
        """Write this client's vector; see `CountWriter`."""
        what, watch = kind_of(purpose, self.terms.order), self.watched()
        arrays = {name: tensor.numpy() for name, tensor in numbers.items() if name not in self.shapes}
        try:
            if what.kind == "test":
                scores = self._scores(numbers, arrays, watch)
                return np.concatenate([evaluation_vector_of(countable(score), largest) for score in scores])
            written, fields = self._written(what, numbers, arrays, largest, watch)
            watch()
        except Rejected:
            raise
        except (KeyfedError, ValueError, IndexError, OverflowError) as e:
            raise Rejected("malformed", f'public numbers of "{purpose}" that make no sense ({e})') from None
        return vectors(written, fields.words, 1)[0]

    def _written(
        self,
        what: SumKind,
        numbers: Params,
        arrays: Mapping[str, NDArray[Any]],
        largest: int,
        watch: Callable[[], None],
    ) -> tuple[Entries, Fields]:
        """Return what this client writes, and where cells lie."""
        terms, vocab = self.terms, self.vocab
        if what.kind == "mixture":
            model, tokens = self._model(arrays), _tokens(arrays)
            layout = mixture_histogram(model.model.order)
            fields = _small(layout.fields(largest, tokens))
            theta = {name: numbers[name] for name in self.shapes}
            reader = NetworkReader(self.spec, theta, self.lines, watch)
            cells = reader.mixture_cells(model, self._text(self.valid[:tokens]))
            return layout.write(*cells, largest, tokens), fields
        tables = self._tables(arrays)
        watch()
        if what.kind == "smoothing":
            tokens = _tokens(arrays)
            fields = _small(SMOOTHING.fields(largest, tokens))
            fits = [_fit(arrays, tables, n) for n in range(1, what.n)]
            cells = smoothing_cells(self._text(self.valid[:tokens]), tables, fits, vocab)
            return SMOOTHING.write(*cells, largest, tokens), fields
        plan, text = plan_of(terms, self.vocab_sha256, largest, vocab, self.seed, DEPTH), self._text(self.train)
        if what.kind == "sketch":
            fields = _small(plan.sketches[what.n - 2].fields(largest))
            return write_sketch(text, tables, plan, vocab, largest), fields
        keys, estimates = words_listed(vocab)
        if what.n > 1:
            keys, estimates = arrays["list.keys"], arrays["list.estimates"]
            self._check(keys, tables, f"the list of {what.n} words")
            if keys.size != estimates.size or not (estimates >= terms.k).all():
                raise Rejected("refused by client", f"a list with n-grams of fewer than {terms.k} clients")
        fields = _small(recount_fields(keys.size, largest, terms.cap))
        return write_list(text, tables, keys, estimates, plan, vocab, largest), fields

    def _text(self, stream: Tokens) -> Texts:
        return texts_of([stream], EOS if self.lines else None)

    def _tables(self, arrays: Mapping[str, NDArray[Any]]) -> list[GramTable]:
        """Return what was released, as the server says, if it can be that."""
        tables: list[GramTable] = []
        for n in range(1, self.terms.order + 1):
            if f"n{n}.keys" not in arrays:
                break
            keys, clients = arrays[f"n{n}.keys"], arrays[f"n{n}.clients"]
            counts = arrays.get(f"n{n}.counts", clients)
            suffix = self._check(keys, tables, f"what was released of {n} words")
            if not keys.size == clients.size == counts.size:
                raise Rejected("malformed", f"what was released of {n} words, with {clients.size:,} numbers of clients")
            if clients.min() < self.terms.k:
                raise Rejected(
                    "refused by client",
                    f"an n-gram of {n} words was released of {clients.min()} clients, and counts.k is {self.terms.k}",
                )
            if not ((clients <= counts) & (counts <= self.terms.cap * clients)).all():
                raise Rejected("malformed", f"counts of {n} words that no {self.terms.cap} uses a client come to")
            tables.append(GramTable(keys, clients, counts, suffix))
        return tables

    def _check(self, keys: Ints, tables: Sequence[GramTable], what: str) -> Ints:
        """Return the rows of n-grams' last n − 1 words; refuse n-grams that are no candidates."""
        contexts = tables[-1].keys.size if tables else 1
        if keys.min() < 0 or keys.max() >= contexts * self.vocab or (np.diff(keys) <= 0).any():
            raise Rejected("malformed", f"{what} is out of order, or out of the vocabulary")
        suffix = last_rows(keys, tables, self.vocab) if tables else np.zeros(keys.size, np.int64)
        if suffix.min() < 0:
            raise Rejected("refused by client", f"{what} has an n-gram whose last words were not released")
        return suffix

    def _model(self, arrays: Mapping[str, NDArray[Any]]) -> CountModel:
        """Return the counts that the server has made, if they are those of this run's terms."""
        model, terms = counts_from_bytes(arrays["counts"].tobytes(), self.vocab, "the server's counts"), self.terms
        about = model.about
        if (about.k, about.cap, about.most, about.vocab_sha256) != (terms.k, terms.cap, terms.most, self.vocab_sha256):
            said = f"k = {about.k}, cap = {about.cap}, M = {about.most}"
            raise Rejected("refused by client", f"counts of other terms ({said})")
        if not 1 <= model.model.order <= terms.order:
            raise Rejected(
                "refused by client", f"counts of {model.model.order} words, and counts.order is {terms.order}"
            )
        return model

    def _scores(self, numbers: Params, arrays: Mapping[str, NDArray[Any]], watch: Callable[[], None]) -> list[Score]:
        """Return what counts, mixture and own cache come to on the test text, in the order of `MODELS`."""
        model = self._model(arrays)
        mixture = Mixture.from_json(arrays["mixture"].tobytes().decode("utf-8", "replace"), "the server's mixture")
        if mixture.order != model.model.order:
            raise Rejected("malformed", f"a mixture of order {mixture.order} for counts of {model.model.order}")
        if len(self.test) < 2:
            return [Score() for _ in MODELS]
        theta = {name: numbers[name] for name in self.shapes}
        texts = [(np.concatenate([self.train, self.valid]), self.test)]
        found = score_models(self.spec, theta, model, mixture, texts, EOS if self.lines else None, watch=watch)
        return [found[name] for name in MODELS]


def _tokens(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return how many tokens of its validation text a client counts."""
    found = arrays[TOKENS]
    if found.size != 1 or not 1 <= found[0] <= MOST_TOKENS:
        raise Rejected("over limit", f"a histogram of other than 1 to {MOST_TOKENS:,} tokens of a client")
    return int(found[0])


def _fit(arrays: Mapping[str, NDArray[Any]], tables: Sequence[GramTable], n: int) -> tuple[Any, Any]:
    """Return the probabilities and back-offs of a length, as the server has fitted them."""
    prob, backoff = arrays[f"n{n}.prob"], arrays[f"n{n}.backoff"]
    contexts = tables[n - 2].keys.size if n > 1 else 1
    if prob.size != tables[n - 1].keys.size or backoff.size != contexts + 1:
        raise Rejected("malformed", f"{prob.size:,} probabilities of {n} words for {tables[n - 1].keys.size:,}")
    if not ((prob > 0) & (prob <= 1)).all() or not ((backoff >= 0) & np.isfinite(backoff)).all():
        raise Rejected("malformed", f"a number of {n} words is no probability")
    return prob, backoff


def _small(fields: Fields) -> Fields:
    """Return the fields of a vector that a client writes; refuse a giant one before it is made."""
    if fields.words > MOST_SUM_WORDS:
        raise Rejected("over limit", f"a vector of {4 * fields.words:,} bytes; at most {4 * MOST_SUM_WORDS:,}")
    return fields
