"""A keyboard: a source of scores that reads once a word, and the predictor that ranks them at every keystroke."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import NetworkState, Reader, reader_of
from keyfed.errors import ConfigError
from keyfed.keyboard.context import Context, read_context
from keyfed.keyboard.layout import Point, layout_of
from keyfed.keyboard.personal import Personal
from keyfed.keyboard.predict import Predictor, Settings, Slot, Strip
from keyfed.model.ngram import KneserNey
from keyfed.run.folder import Trained
from keyfed.text.batches import line_read

Floats = NDArray[np.float64]
Source = Callable[[Sequence[int]], Floats]  # tokens read, EOS first → log-probabilities of the next, [vocabulary]

REMEMBERED = 64  # positions whose scores and states are kept


class NetworkSource:
    """Scores of a trained network; states are kept by position, so that one more word is one step."""

    def __init__(self, reader: Reader, *, lines: bool = False) -> None:
        self._reader = reader
        self._lines = lines  # whether the model learnt from single lines and reads the last one only
        self._seen: OrderedDict[tuple[int, ...], tuple[Floats, NetworkState]] = OrderedDict()
        self.steps = 0  # tokens read so far, for those who measure

    def __call__(self, tokens: Sequence[int]) -> Floats:
        read = tuple(line_read(tokens) if self._lines else tokens)
        known = next((n for n in range(len(read), 0, -1) if read[:n] in self._seen), 0)
        if known < len(read):
            state = self._seen[read[:known]][1] if known else None
            logits, state = self._reader.after(torch.tensor([read[known:]]), state)
            self.steps += len(read) - known
            self._seen[read] = logits[0].double().log_softmax(-1).numpy(), state
        self._seen.move_to_end(read)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return self._seen[read][0]


def ngram_source(model: KneserNey) -> Source:
    """Return the scores of an n-gram model."""
    last: dict[tuple[int, ...], Floats] = {}

    def source(tokens: Sequence[int]) -> Floats:
        context = tuple(tokens[max(0, len(tokens) - model.order + 1) :])
        if context not in last:
            last.clear()
            last[context] = np.log(model.next(np.array(context, np.int64)))
        return last[context]

    return source


class Keyboard:
    """What a person types on.

    Attributes:
      predictor: ranks; holds the user's counts (`predictor.personal`) and settings.
    """

    def __init__(self, source: Source, predictor: Predictor) -> None:
        self._source = source
        self.predictor = predictor
        self._before = ""
        self._context = read_context("", predictor.vocab, predictor.k)

    def context(self, before: str) -> Context:
        """Return what stands left of the cursor; while a word is being typed only that part is read again."""
        if before != self._before:
            self._context = read_context(before, self.predictor.vocab, self.predictor.k, self._context)
            self._before = before
        return self._context

    def suggest(self, before: str, taps: Sequence[Point | None] = ()) -> Strip:
        """Return the suggestions for a text left of the cursor.

        Args:
          taps: where the finger came down for each character of the word being typed, as far as known.
        """
        context = self.context(before)
        return self.predictor.suggest(self._source(context.ids), context, taps)

    def gesture(self, before: str, points: Sequence[Point], n: int = 3) -> list[Slot]:
        """Return the n best words for a swipe that follows a text."""
        context = self.context(before)
        return self.predictor.gesture(self._source(context.ids), context, points, n)


def keyboard_of(
    trained: Trained,
    personal: Personal | None = None,
    *,
    forms: Mapping[str, str] | None = None,
    layout: str = "qwerty",
    settings: Settings | None = None,
) -> Keyboard:
    """Return a keyboard over a trained run.

    Raises:
      ConfigError: The run's model reads characters, not words.
    """
    if trained.vocab.kind != "word":
        raise ConfigError(f"{trained.folder} holds a model of characters; the keyboard needs one of words")
    predictor = Predictor(trained.vocab, personal, forms=forms, layout=layout_of(layout), settings=settings)
    return Keyboard(NetworkSource(reader_of(trained.spec, trained.params), lines=trained.reads_lines), predictor)
