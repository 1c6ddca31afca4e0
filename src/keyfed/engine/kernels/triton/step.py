"""Kernels of a step outside the recurrence: softmax and its gradient, rows of the embedding, SGD and Adam.

All sums are taken in a fixed order: the same step gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(line, bias, word, vocab):
    return tl.load(line + word, word < vocab, -float("inf")).to(tl.float32) + tl.load(bias + word, word < vocab, 0.0)


@triton.jit
def softmax_gradient(logits, bias, targets, scale, nats, tokens, vocab, BLOCK: tl.constexpr):
    """One position: nats = scale · (log Σ e^x − x_y), and x becomes scale · (softmax(x) − onehot(y)), in place.

    logits [m, tokens, vocab] without their bias [m, vocab]; targets, scale and nats [m, tokens]. Padding has scale 0.
    The line is read three times, twice of them from the cache; lanes meet only at the end of a pass.
    """
    place = tl.program_id(0).to(tl.int64)
    share = tl.load(scale + place)
    line = logits + place * vocab
    lane = tl.arange(0, BLOCK)
    if share == 0.0:
        for start in range(0, vocab, BLOCK):
            tl.store(line + start + lane, tl.zeros([BLOCK], line.dtype.element_ty), start + lane < vocab)
        tl.store(nats + place, 0.0)
    else:
        own = bias + (place // tokens) * vocab
        true = tl.load(targets + place)
        # Read before anybody writes: the reductions below hold all threads together.
        picked = tl.load(line + true).to(tl.float32) + tl.load(own + true)
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            highest = tl.maximum(highest, _logits(line, own, start + lane, vocab))
        top = tl.max(highest, 0)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            sums += tl.exp(_logits(line, own, start + lane, vocab) - top)
        log_total = top + tl.log(tl.sum(sums, 0))
        tl.store(nats + place, share * (log_total - picked))
        for start in range(0, vocab, BLOCK):
            word = start + lane
            x = _logits(line, own, word, vocab)
            grad = share * (tl.exp(x - log_total) - tl.where(word == true, 1.0, 0.0))
            tl.store(line + word, grad.to(line.dtype.element_ty), word < vocab)


@triton.jit
def add_rows(table, tokens, rows, count, vocab, width, NONE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """table[k, tokens[k, i]] += Σ rows[k, j] over all j with the same token, by the program of the first of them.

    NONE: a token that only fills up; its rows are zero.
    """
    at, client = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, COUNT)
    mine = tl.load(tokens + client * count + at)
    every = tl.load(tokens + client * count + index, index < count, -1)
    same = every == mine
    first = tl.min(tl.where(same, index, COUNT), 0)
    if (mine != NONE) & (first == at):
        column = tl.arange(0, WIDTH)
        source = rows + client.to(tl.int64) * count * width + column
        total = tl.zeros([WIDTH], tl.float32)
        following = first
        while following < COUNT:
            total += tl.load(source + following * width, column < width, 0.0)
            following = tl.min(tl.where(same & (index > following), index, COUNT), 0)
        place = table + (client.to(tl.int64) * vocab + mine) * width + column
        tl.store(place, tl.load(place, column < width, 0.0) + total, column < width)


@triton.jit
def _in_copy(client, part, spread, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr):
    """Where numbers of a layer lie in its padded copy, see `kernels.padding.Layout`; `spread` is the copy's size."""
    row, column = part // COLUMNS, part % COLUMNS
    return client.to(tl.int64) * spread + ((row // ROWS) * WIDE + row % ROWS) * LONG + column


@triton.jit
def sgd(
    local, grad, velocity, theta, dual, copy, tokens, eta, scale, size, spread, momentum, weight_decay, mu,
    MOMENTUM: tl.constexpr, PULL: tl.constexpr, DUAL: tl.constexpr, COPY: tl.constexpr, CLIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`descent.sgd_move` of one layer [m, size]; a client without tokens keeps everything.

    With COPY the gradient lies as the padded copy of the weights does, and the copy follows.
    """
    client = tl.program_id(1)
    if tl.load(tokens + client) > 0:
        part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = part < size
        at = client.to(tl.int64) * size + part
        there = at
        if COPY:
            there = _in_copy(client, part, spread, ROWS, COLUMNS, WIDE, LONG)
        w, g = tl.load(local + at, real, 0.0), tl.load(grad + there, real, 0.0)
        if CLIP:
            g *= tl.load(scale + client)
        if PULL:
            g += mu * (w - tl.load(theta + part, real, 0.0))
        if DUAL:
            g += tl.load(dual + at, real, 0.0)
        g += weight_decay * w
        if MOMENTUM:
            g += momentum * tl.load(velocity + at, real, 0.0)
            tl.store(velocity + at, g, real)
        w -= tl.load(eta + client) * g
        tl.store(local + at, w, real)
        if COPY:
            tl.store(copy + there, w.to(copy.dtype.element_ty), real)


@triton.jit
def adam(
    local, grad, first, second, theta, dual, copy, tokens, steps, floor, scale, size, spread,
    beta1, gain1, beta2, gain2, mu,
    PULL: tl.constexpr, DUAL: tl.constexpr, COPY: tl.constexpr, CLIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`descent.adam_move` of one layer [m, size]; `steps` and `floor` are those of `adam_sizes`, gain = 1 − β."""
    client = tl.program_id(1)
    if tl.load(tokens + client) > 0:
        part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = part < size
        at = client.to(tl.int64) * size + part
        there = at
        if COPY:
            there = _in_copy(client, part, spread, ROWS, COLUMNS, WIDE, LONG)
        w, g = tl.load(local + at, real, 0.0), tl.load(grad + there, real, 0.0)
        if CLIP:
            g *= tl.load(scale + client)
        if PULL:
            g += mu * (w - tl.load(theta + part, real, 0.0))
        if DUAL:
            g += tl.load(dual + at, real, 0.0)
        m = beta1 * tl.load(first + at, real, 0.0) + gain1 * g
        v = beta2 * tl.load(second + at, real, 0.0) + gain2 * g * g
        tl.store(first + at, m, real)
        tl.store(second + at, v, real)
        w -= tl.load(steps + client) * m / (tl.sqrt(v) + tl.load(floor + client))
        tl.store(local + at, w, real)
        if COPY:
            tl.store(copy + there, w.to(copy.dtype.element_ty), real)
