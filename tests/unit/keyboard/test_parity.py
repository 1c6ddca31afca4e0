"""What an export is compared on: text as the model reads it."""

from __future__ import annotations

import numpy as np

from keyfed.keyboard.graph import LINE, ROWS, STEPS, sample_tokens
from keyfed.text.vocab import BOS, EOS


def people(count: int, lines: int, length: int) -> dict[str, np.ndarray]:
    """Streams in which every token follows its neighbour."""
    draw = np.random.default_rng(0)
    return {
        f"{n}": np.concatenate([[*(10 + draw.integers(900) + np.arange(length - 1)), EOS] for _ in range(lines)])
        for n in range(count)
    }


def test_running_text_of_thousands_is_text_and_not_their_first_words():
    tokens, real = sample_tokens(people(3000, 4, 20), 1000)
    assert real
    assert tokens.shape == (ROWS, STEPS)
    follows = (np.diff(tokens, axis=1) == 1) | (tokens[:, 1:] == EOS)
    assert follows.mean() > 0.9


def test_a_model_of_lines_is_compared_on_lines():
    tokens, real = sample_tokens(people(3000, 4, 20), 1000, lines=True)
    assert real
    assert tokens.shape == (ROWS * STEPS // (LINE + 1), LINE + 1)
    assert (tokens[:, 0] == BOS).all()
    assert (np.diff(tokens[:, 1:], axis=1) == 1).all()


def test_too_little_text_is_made_up_and_said():
    for lines in (False, True):
        for streams in ({}, {"a": np.array([5, EOS])}):
            tokens, real = sample_tokens(streams, 50, lines=lines)
            assert not real
            assert tokens.min() >= EOS
            assert tokens.max() < 50
