"""Every token is predicted once an epoch, from the token before it, and time runs along the last axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config, apply_settings
from keyfed.federated.cohort import sample_cohort
from keyfed.run.encode import window_of
from keyfed.run.prepare import prepare
from keyfed.text.batches import (
    Batching,
    epoch_steps,
    length_order,
    limit_text,
    line_starts,
    lines_of,
    packed_steps,
    pair_steps,
    sentence_steps,
    stacked_width,
    stream_steps,
    sweep_steps,
)
from keyfed.text.vocab import BOS, EOS, PAD, SPECIALS

FIRST = len(SPECIALS)


def ids(values) -> np.ndarray:
    return np.array(list(values), np.int32)


def distinct(n: int) -> np.ndarray:
    """A text in which every token says where it stands."""
    return np.arange(FIRST, FIRST + n, dtype=np.int32)


@st.composite
def texts(draw: st.DrawFn, most: int = 120) -> np.ndarray:
    """Distinct words with line ends strewn in; lines of any length, with or without an end at the end."""
    n = draw(st.integers(0, most))
    out = distinct(n)
    for at in draw(st.lists(st.integers(0, max(0, n - 1)), max_size=20)):
        if n:
            out[at] = EOS
    return out


def joined(steps, part: str) -> np.ndarray:
    """Put the windows of a stream side by side again: [rows, columns]."""
    return np.concatenate([getattr(s, part) for s in steps], axis=1)


def check_shapes(steps) -> None:
    for s in steps:
        assert s.inputs.shape == s.targets.shape == s.mask.shape
        assert s.inputs.dtype == s.targets.dtype == np.int64
        assert s.mask.dtype == np.float32
        assert set(np.unique(s.mask)) <= {0, 1}
        assert s.mask.sum() > 0
        assert (s.inputs[s.mask == 0] == PAD).all()
        assert (s.targets[s.mask == 0] == PAD).all()


sizes = {"rows": st.integers(1, 7), "window": st.integers(1, 12)}


# Stream


@settings(max_examples=80, deadline=None)
@given(n=st.integers(0, 200), **sizes)
def test_stream_predicts_every_token_but_the_first_exactly_once(n, rows, window):
    text = distinct(n)
    steps = stream_steps(text, rows, window)
    check_shapes(steps)
    predicted = sorted(t for s in steps for t in s.targets[s.mask > 0].tolist())
    assert predicted == text[1:].tolist()


@settings(max_examples=80, deadline=None)
@given(n=st.integers(2, 200), **sizes)
def test_stream_targets_are_the_next_token_and_rows_are_contiguous(n, rows, window):
    steps = stream_steps(distinct(n), rows, window)
    assert steps[0].inputs.shape[0] <= rows
    assert all(s.inputs.shape[1] == window for s in steps[:-1])
    assert 1 <= steps[-1].inputs.shape[1] <= window
    assert [s.fresh for s in steps] == [True] + [False] * (len(steps) - 1)
    real = joined(steps, "mask") > 0
    inputs, targets = joined(steps, "inputs"), joined(steps, "targets")
    assert (targets[real] == inputs[real] + 1).all()  # one on in the text
    along = real[:, 1:]
    assert (inputs[:, 1:][along] == inputs[:, :-1][along] + 1).all()  # time is the last axis
    flat = inputs.reshape(-1)[real.reshape(-1)]
    assert flat.tolist() == distinct(n)[:-1].tolist()  # row after row is the text
    assert (np.diff(real.reshape(-1).astype(int)) <= 0).all()  # padding only at the very end


def test_short_text_is_read_in_fewer_rows_of_whole_windows():
    assert stream_steps(distinct(0), 4, 5) == []
    assert stream_steps(distinct(1), 4, 5) == []
    (only,) = stream_steps(distinct(4), 4, 5)
    assert only.inputs.tolist() == [[4, 5, 6]]
    assert only.targets.tolist() == [[5, 6, 7]]
    assert stream_steps(distinct(12), 4, 5)[0].inputs.shape == (2, 5)


def test_a_clients_shapes_depend_on_that_client_alone():
    a = [s.inputs.shape for s in stream_steps(distinct(57), 4, 5)]
    b = [s.inputs.shape for s in stream_steps(distinct(57)[::-1].copy(), 4, 5)]
    assert a == b


# Sentences


@settings(max_examples=80, deadline=None)
@given(text=texts(), seed=st.integers(0, 10**6), shared=st.integers(0, 10**6), **sizes)
def test_every_line_is_read_once_from_its_start(text, rows, window, seed, shared):
    steps = sentence_steps(text, rows, window, seed, shared)
    check_shapes(steps)
    want = Counter(tuple(line[:window].tolist()) for line in lines_of(text))
    found: Counter = Counter()
    for s in steps:
        assert s.fresh
        assert 1 <= s.inputs.shape[0] <= rows
        assert s.inputs.shape[1] == s.mask.sum(axis=1).max() <= window  # padded to its own longest line
        for inputs, targets, mask in zip(s.inputs, s.targets, s.mask, strict=True):
            n = int(mask.sum())
            assert mask[:n].all()  # padding comes after the line
            assert inputs[0] == BOS
            assert inputs[1:n].tolist() == targets[: n - 1].tolist()
            assert EOS not in targets[: n - 1]
            found[tuple(targets[:n].tolist())] += 1
    assert found == want


@settings(max_examples=80, deadline=None)
@given(text=texts(), seed=st.integers(0, 10**6), **sizes)
def test_batches_hold_lines_of_neighbouring_length_and_only_the_shortest_lacks_rows(text, rows, window, seed):
    steps = sentence_steps(text, rows, window, seed, shared=3)
    each = [sorted(s.mask.sum(axis=1).tolist()) for s in steps]
    by_length = sorted(each, key=lambda own: (own[-1], own[0], len(own)))
    assert [n for own in by_length for n in own] == sorted(min(len(line), window) for line in lines_of(text))
    assert all(len(own) == rows for own in by_length[1:])


def first_words(steps) -> list[int]:
    return [first for s in steps for first in s.targets[:, 0].tolist()]


def test_lines_of_one_length_are_dealt_out_by_the_clients_seed():
    text = ids(t for k in range(40) for t in (FIRST + k, EOS))

    def order(seed):
        return first_words(sentence_steps(text, 3, 8, seed, shared=1))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


def test_the_order_of_lengths_is_drawn_by_the_shared_seed_alone():
    text = ids(t for n in range(1, 41) for t in (*[FIRST] * n, EOS))

    def lengths(seed, shared):
        return [s.inputs.shape[1] for s in sentence_steps(text, 2, 64, seed, shared)]

    assert lengths(1, 1) == lengths(2, 1)
    assert lengths(1, 1) != lengths(1, 2)
    assert lengths(1, 1) not in (sorted(lengths(1, 1)), sorted(lengths(1, 1), reverse=True))


@settings(max_examples=80, deadline=None)
@given(batches=st.integers(60, 200), more=st.integers(0, 3), shared=st.integers(0, 10**6))
def test_clients_with_nearly_as_many_batches_are_at_nearly_the_same_quantile(batches, more, shared):
    mine, other = length_order(batches, shared), length_order(batches + more, shared)
    assert sorted(mine) == list(range(batches))
    apart = [abs((a + 0.5) / batches - (b + 0.5) / (batches + more)) for a, b in zip(mine, other, strict=False)]
    if more == 0:
        assert apart == [0] * batches
    # Where a bin ends sooner for one of them they differ by bins. A bin's size differs by one at most, so after b of
    # the eight bins they are min(b, 8 - b) + more steps apart at most: 1 + 2 + 3 + 4 + 3 + 2 + 1 + 7 · more in all.
    assert sum(gap > 1 / 8 for gap in apart) <= 16 + 7 * more


def padding(cohort, rows: int, window: int, bucket: int = 8) -> tuple[float, float]:
    """Return which shares of the tokens that a block in lockstep computes are padding, and idle clients' in particular.

    At step i the i-th batches of all clients are padded to [clients, rows, width]; a client without one is idle.
    """
    computed = idle = 0
    for number in range(max(map(len, cohort))):
        present = [steps[number] for steps in cohort if number < len(steps)]
        area = rows * stacked_width([s.inputs.shape[1] for s in present], window, bucket)
        computed += len(cohort) * area
        idle += (len(cohort) - len(present)) * area
    real = sum(int(s.mask.sum()) for steps in cohort for s in steps)
    return 1 - real / computed, idle / computed


def test_padding_counts_missing_clients_rows_and_columns():
    long, short = (sentence_steps(ids([*range(4, 3 + n), EOS]), 2, 16, 1, 1) for n in (9, 2))
    assert padding([long + long, short], rows=2, window=16) == (1 - 20 / 128, 32 / 128)
    assert padding([long + long, short], rows=2, window=10) == (1 - 20 / 80, 20 / 80)


def test_less_than_a_quarter_of_a_stacked_cohort_on_ptb_is_padding(data_dir):
    config = apply_settings(Config(), [f"data.dir={data_dir}", "data.name=ptb", "model.name=gru"])
    store, window = prepare(config).store, window_of(config)
    assert len(store) == 100

    def cohort(round, shared):
        members = sample_cohort(len(store), 10, 1, round)
        return [sentence_steps(store.stream(k), 10, window, k, shared(k)) for k in members]

    assert max(padding(cohort(r, lambda _, r=r: r), 10, window)[0] for r in range(3)) < 0.25
    assert padding(cohort(0, lambda client: client), 10, window)[0] > 0.3  # it is the shared seed that does it


@settings(max_examples=40, deadline=None)
@given(text=texts())
def test_lines_are_cut_after_their_ends_and_lose_nothing(text):
    lines = lines_of(text)
    assert [t for line in lines for t in line.tolist()] == text.tolist()
    assert all(EOS not in line[:-1] for line in lines)
    assert all(line[-1] == EOS for line in lines[:-1])


# Packed lines


def rows_of(steps) -> list[list[tuple[int, int]]]:
    """What each row reads over all windows: (input, target) of its real places."""
    real, inputs, targets = (joined(steps, part) for part in ("mask", "inputs", "targets"))
    return [
        list(zip(inputs[row][real[row] > 0].tolist(), targets[row][real[row] > 0].tolist(), strict=True))
        for row in range(len(real))
    ]


@settings(max_examples=120, deadline=None)
@given(text=texts(), seed=st.integers(0, 10**6), **sizes)
def test_packed_rows_hold_every_line_whole_and_once_each_from_its_start(text, rows, window, seed):
    steps = packed_steps(text, rows, window, seed)
    check_shapes(steps)
    if not len(text):
        assert steps == []
        return
    found: Counter = Counter()
    for row in rows_of(steps):
        begins = [k for k, (given, _) in enumerate(row) if given == BOS]
        assert begins[0] == 0, "a row begins in the middle of a line"
        for begin, end in pairwise([*begins, len(row)]):
            line = [target for _, target in row[begin:end]]
            assert [given for given, _ in row[begin:end]] == [BOS, *line[:-1]], "an input is not the token before"
            found[tuple(line)] += 1
    assert found == Counter(tuple(line.tolist()) for line in lines_of(text))


@settings(max_examples=120, deadline=None)
@given(text=texts(), seed=st.integers(0, 10**6), **sizes)
def test_packed_rows_are_padded_at_their_ends_only_and_end_near_each_other(text, rows, window, seed):
    steps = packed_steps(text, rows, window, seed)
    if not len(text):
        return
    lines = lines_of(text)
    real = joined(steps, "mask") > 0
    assert (np.diff(real.astype(int), axis=1) <= 0).all(), "padding before a row's end"
    assert len(real) == max(1, min(rows, len(text) // window, len(lines)))
    lengths = real.sum(1)
    assert lengths.min() >= 1
    assert lengths.max() - lengths.min() <= max(map(len, lines))
    assert lengths.max() == real.shape[1]
    assert [s.fresh for s in steps] == [True] + [False] * (len(steps) - 1)
    assert all(s.inputs.shape[1] == window for s in steps[:-1])
    starts = np.concatenate([line_starts(s.inputs) for s in steps], 1)
    assert starts.sum() == len(lines)
    assert not starts[~real].any()
    ends = joined(steps, "targets")[:, :-1] == EOS  # a line begins behind each line end inside a row
    assert (starts[:, 1:] >= ends & real[:, 1:]).all()


def test_packed_lines_are_drawn_anew_by_their_seed_and_by_nothing_else():
    text = ids(t for k in range(40) for t in (*range(FIRST + 10 * k, FIRST + 10 * k + k % 6), EOS))

    def read(seed: int) -> list[list[tuple[int, int]]]:
        return rows_of(packed_steps(text, 3, 8, seed))

    assert read(5) == read(5) != read(6)
    batching = Batching("packed", 3, 8)
    assert rows_of(epoch_steps(text, batching, 5, 1)) == rows_of(epoch_steps(text, batching, 5, 2)) == read(5)


# Limits


@settings(max_examples=80, deadline=None)
@given(
    text=texts(),
    seed=st.integers(0, 10**6),
    sentences=st.none() | st.integers(1, 10),
    tokens=st.none() | st.integers(1, 60),
    kind=st.sampled_from(["stream", "sentences", "packed"]),
)
def test_limits_are_kept(text, seed, sentences, tokens, kind):
    batching = Batching(kind, 3, 7, sentences, tokens)
    limited = limit_text(text, batching, seed)
    assert np.array_equal(limited, limit_text(text, batching, seed))
    steps = epoch_steps(limited, batching, seed, seed)
    predicted = sum(int(s.mask.sum()) for s in steps)
    if tokens is not None:
        assert predicted <= tokens
    if sentences is not None:
        assert len(lines_of(limited)) <= sentences
    if tokens is None and sentences is None:
        assert np.array_equal(limited, text)
    # What is left stands in the order it was written in.
    words = [t for t in limited.tolist() if t != EOS]
    assert words == sorted(words)
    if sentences is None and len(limited):
        start = limited.tolist()
        whole = text.tolist()
        assert any(whole[i : i + len(start)] == start for i in range(len(whole) - len(start) + 1))


@pytest.mark.parametrize("kind", ["stream", "sentences", "packed"])
def test_a_limit_of_tokens_is_used_up(kind):
    text = ids(t for k in range(30) for t in (FIRST + k, FIRST + 100 + k, EOS))
    batching = Batching(kind, 3, 7, max_tokens=20)
    steps = epoch_steps(limit_text(text, batching, 1), batching, 1, 1)
    assert sum(int(s.mask.sum()) for s in steps) == 20


def test_limits_draw_every_part_of_the_text():
    text = ids(t for k in range(12) for t in (FIRST + k, EOS))
    by_lines = Batching("sentences", 3, 7, max_sentences=2)
    by_tokens = Batching("stream", 3, 7, max_tokens=3)
    for batching in (by_lines, by_tokens):
        seen = {t for seed in range(200) for t in limit_text(text, batching, seed).tolist()}
        assert seen == set(text.tolist())


def test_an_epoch_is_cut_as_the_batching_says():
    text = ids([5, 6, EOS, 7, 8, 9, EOS])
    stream, sentences = Batching("stream", 2, 3), Batching("sentences", 2, 3)
    assert [s.fresh for s in epoch_steps(text, stream, 1, 1)] == [True]
    assert all(s.inputs[:, 0].tolist() == [BOS] * len(s.inputs) for s in epoch_steps(text, sentences, 1, 1))
    assert len(epoch_steps(text, replace(stream, rows=1), 1, 1)) == 2


@settings(max_examples=80, deadline=None)
@given(text=texts(), rows=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_pairs_predict_every_token_once_from_the_one_before_it_alone(text, rows, seed):
    steps = pair_steps(text, rows, seed)
    slow = Counter(pair for line in lines_of(text) for pair in pairwise([BOS, *line.tolist()]))
    read = [(int(x), int(y)) for s in steps for x, y in zip(s.inputs.ravel(), s.targets.ravel(), strict=True)]
    assert Counter(read) == slow
    assert all(s.fresh and s.inputs.shape[1] == 1 and s.mask.all() for s in steps)
    assert [len(s.inputs) for s in steps[:-1]] == [rows] * (len(steps) - 1)
    batching = replace(Batching.of("pairs", 20, None, None), rows=rows)
    assert batching.window == 1
    for got in (
        epoch_steps(text, batching, seed, 1),
        sweep_steps(text, batching, len(text), seed) if len(text) else [],
    ):
        assert Counter(int(y) for s in got for y in s.targets.ravel()) == Counter(text.tolist())


# The endless pass of central training


@settings(max_examples=80, deadline=None)
@given(n=st.integers(2, 200), budget=st.integers(1, 500), turns=st.integers(1, 6), **sizes)
def test_a_sweep_goes_on_where_it_stopped_and_starts_over(n, budget, turns, rows, window):
    text, batching = distinct(n), Batching("stream", rows, window)
    used = max(1, min(rows, (n - 1) // window))
    columns = (n - 1) // used  # rows are of equal length: less than one column is left over
    read: list[int] = []  # where the first row stands, step after step
    for turn in range(turns):
        steps = sweep_steps(text, batching, budget, turn)
        check_shapes(steps)
        assert sum(int(s.mask.sum()) for s in steps) == used * max(1, round(budget / used))
        for number, s in enumerate(steps):
            assert s.inputs.shape[1] <= window
            assert (s.targets == s.inputs + 1).all()
            assert (np.diff(s.inputs, axis=1) == 1).all()
            assert (np.diff(s.inputs, axis=0) == columns).all()
            begins = s.inputs[0, 0] == text[0]
            assert s.fresh == (number == 0 or begins)  # a zero state at every turn and where the text begins again
            read += (s.inputs[0] - text[0]).tolist()
    assert read == [k % columns for k in range(len(read))]


def test_a_sweep_of_sentences_mixes_lengths_to_its_end():
    text = ids(t for n in range(1, 161) for t in (*[FIRST] * (n % 40), EOS))
    batching = Batching("sentences", 4, 64)
    turns = [np.array([s.inputs.shape[1] for s in sweep_steps(text, batching, len(text), n)]) for n in range(5)]
    last = np.mean([widths[-5:].std() for widths in turns])
    assert last > 0.5 * turns[0].std(), "the last steps are of one length"


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    budget=st.integers(1, 200),
    window=st.integers(1, 9),
    kind=st.sampled_from(["sentences", "packed", "pairs"]),
)
def test_a_sweep_of_lines_reads_about_its_budget_and_every_line(lengths, budget, window, kind):
    text = ids([token for n in lengths for token in [*range(5, 4 + n), EOS]])
    batching = Batching(kind, 3, window)
    most = window if kind == "sentences" else max(lengths)  # packed lines are never cut
    total, longest = sum(min(n, most) for n in lengths), min(max(lengths), most)
    turns = -(-total // budget)
    read = [sum(int(s.mask.sum()) for s in sweep_steps(text, batching, budget, turn)) for turn in range(turns)]
    passes = budget // total + 2
    assert all(abs(r - budget) <= passes * longest for r in read)
    assert sum(read) >= total
