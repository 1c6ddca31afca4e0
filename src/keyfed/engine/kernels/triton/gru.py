r"""Persistent recurrent kernels: one launch for all time steps of all stacked clients, forwards or backwards.

A client's recurrent matrix is cut into slices of hidden units, one program each; a program loads its slice once, keeps
it in registers through the whole window, and meets its client's other programs once a time step (twice with a
projection) at a counter in memory. Programs take their place by a ticket, so that all programs of a client are running
before one of a later client starts: nobody waits for a program that cannot run.

Where rows hold several lines (RESET), `keep` [m, time, rows] is 0 at the first token of each, else 1: it multiplies the
state before a step, and the gradient that the step hands back.

Matrices and what goes into products have the type of the weights (float32 or bf16); gates, cells and sums are float32.
Equal to `engine.kernels.cells.LAYERS` to rounding (tests/equivalence/test_triton.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _arrive(flag):
    """This program's part of a phase is written."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def _meet(flag, arrivals):
    """Wait until so many arrivals were counted."""
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < arrivals:
        pass


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _tile(base, first, first_end, first_stride, second, second_end, second_stride):
    """[first, second] entries of a matrix; 0 beyond its ends."""
    there = (first[:, None] < first_end) & (second[None, :] < second_end)
    return tl.load(base + first[:, None] * first_stride + second[None, :] * second_stride, mask=there, other=0.0)


@triton.jit
def _keep(keep, client, time, t, rows, row):
    """What multiplies each row's state before step t, [ROWS, 1]."""
    return tl.load(keep + (client * time + t) * rows + row, row < rows, 0.0)[:, None]


@triton.jit
def gru_forward(
    gates, weight, bias_ih, bias_hh, state, keep, hidden, saved, flags, time, rows, narrow, slices,
    VEC: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    TWO: tl.constexpr, RESET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gates: W_ih x, [m, time, rows, 3H]; state [m, rows, H], changed in place; hidden [m, time + 1, rows, H]: the
    state before every step (not reset) and after the last; saved [m, time, rows, 4H]: r, z, n and W_hn h + b_hn."""
    H = narrow * VEC
    ticket = tl.atomic_add(flags, 1)
    client, part = (ticket // slices).to(tl.int64), ticket % slices  # offsets may pass 2^31
    flag = flags + 32 * (client + 1)
    row, unit = tl.arange(0, ROWS), part * UNITS + tl.arange(0, UNITS)
    own = (row[:, None] < rows) & (unit[None, :] < H)
    cell = row[:, None] * H + unit[None, :]
    ka, kb = tl.arange(0, KA), KA + tl.arange(0, KB)
    W = weight + client * 3 * H * H
    r_a, r_b = _tile(W, ka, H, 1, unit, H, H), _tile(W, kb, H, 1, unit, H, H)
    z_a, z_b = _tile(W + H * H, ka, H, 1, unit, H, H), _tile(W + H * H, kb, H, 1, unit, H, H)
    n_a, n_b = _tile(W + 2 * H * H, ka, H, 1, unit, H, H), _tile(W + 2 * H * H, kb, H, 1, unit, H, H)
    b = bias_ih + client * 3 * H + unit
    real = unit < H
    b_r, b_z = tl.load(b, real, 0.0), tl.load(b + H, real, 0.0)
    b_n, b_hn = tl.load(b + 2 * H, real, 0.0), tl.zeros([UNITS], tl.float32)
    if TWO:
        c = bias_hh + client * 3 * H + unit
        b_r += tl.load(c, real, 0.0)
        b_z += tl.load(c + H, real, 0.0)
        b_hn += tl.load(c + 2 * H, real, 0.0)
    h = tl.load(state + client * rows * H + cell, own, 0.0)
    slot = hidden + client * (time + 1) * rows * H
    tl.store(slot + cell, h.to(hidden.dtype.element_ty), own)
    _arrive(flag)
    for t in range(time):
        x = gates + ((client * time + t) * rows + row[:, None]) * (3 * H) + unit[None, :]
        x_r, x_z, x_n = tl.load(x, own, 0.0), tl.load(x + H, own, 0.0), tl.load(x + 2 * H, own, 0.0)
        _meet(flag, slices * (t + 1))
        h_a, h_b = _tile(slot, row, rows, H, ka, H, 1), _tile(slot, row, rows, H, kb, H, 1)
        a_r = tl.dot(h_b, r_b, tl.dot(h_a, r_a, input_precision=PRECISION), input_precision=PRECISION)
        a_z = tl.dot(h_b, z_b, tl.dot(h_a, z_a, input_precision=PRECISION), input_precision=PRECISION)
        a_n = tl.dot(h_b, n_b, tl.dot(h_a, n_a, input_precision=PRECISION), input_precision=PRECISION)
        if RESET:  # a row's product with a state of zero is zero
            stays = _keep(keep, client, time, t, rows, row)
            a_r, a_z, a_n, h = a_r * stays, a_z * stays, a_n * stays, h * stays
        r = _sigmoid(x_r + a_r + b_r[None, :])
        z = _sigmoid(x_z + a_z + b_z[None, :])
        h_n = a_n + b_hn[None, :]
        n = _tanh(x_n + b_n[None, :] + r * h_n)
        h = n + z * (h - n)
        slot += rows * H
        tl.store(slot + cell, h.to(hidden.dtype.element_ty), own)
        _arrive(flag)
        kept = saved + ((client * time + t) * rows + row[:, None]) * (4 * H) + unit[None, :]
        tl.store(kept, r, own)
        tl.store(kept + H, z, own)
        tl.store(kept + 2 * H, n, own)
        tl.store(kept + 3 * H, h_n, own)
    tl.store(state + client * rows * H + cell, h, own)


@triton.jit
def _kept(saved, hidden, d_out, client, time, t, rows, row, unit, own, H):
    """What a step's backward pass reads of its own units: r, z, n, W_hn h + b_hn, the state before, and d_out."""
    place = (client * time + t) * rows + row
    kept = saved + place * (4 * H) + unit[None, :]
    before = hidden + ((client * (time + 1) + t) * rows + row) * H + unit[None, :]
    d = tl.load(d_out + place * H + unit[None, :], own, 0.0)
    return (
        tl.load(kept, own, 0.0), tl.load(kept + H, own, 0.0), tl.load(kept + 2 * H, own, 0.0),
        tl.load(kept + 3 * H, own, 0.0), tl.load(before, own, 0.0), d,
    )  # fmt: skip


@triton.jit
def gru_backward(
    d_out, weight, keep, saved, hidden, d_recurrent, d_inputs, d_bias_hh, d_bias_ih, flags, time, rows, narrow, slices,
    VEC: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    RESET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_out [m, time, rows, H]; d_recurrent and d_inputs [m, time, rows, 3H]: gradients of W_hh h and of W_ih x, whose
    sums are those of the biases [m, 3H]."""
    H = narrow * VEC
    ticket = tl.atomic_add(flags, 1)
    client, part = (ticket // slices).to(tl.int64), ticket % slices  # offsets may pass 2^31
    flag = flags + 32 * (client + 1)
    row, unit = tl.arange(0, ROWS), part * UNITS + tl.arange(0, UNITS)
    own = (row[:, None] < rows) & (unit[None, :] < H)
    ka, kb = tl.arange(0, KA), KA + tl.arange(0, KB)
    W = weight + client * 3 * H * H
    r_a, r_b = _tile(W, ka, H, H, unit, H, 1), _tile(W, kb, H, H, unit, H, 1)
    z_a, z_b = _tile(W + H * H, ka, H, H, unit, H, 1), _tile(W + H * H, kb, H, H, unit, H, 1)
    n_a, n_b = _tile(W + 2 * H * H, ka, H, H, unit, H, 1), _tile(W + 2 * H * H, kb, H, H, unit, H, 1)
    dh = tl.zeros([ROWS, UNITS], tl.float32)
    sum_r, sum_z, sum_n, sum_hn = dh, dh, dh, dh
    own_row = row[:, None]
    r, z, n, h_n, before, d_next = _kept(saved, hidden, d_out, client, time, time - 1, rows, own_row, unit, own, H)
    for back in range(time):
        t = time - 1 - back
        d = dh + d_next
        if RESET:
            stays = _keep(keep, client, time, t, rows, row)
            before = before * stays.to(before.dtype)
        a_n = d * (1.0 - z) * (1.0 - n * n)
        a_r = a_n * h_n * r * (1.0 - r)
        a_z = d * (before.to(tl.float32) - n) * z * (1.0 - z)
        a_hn = a_n * r
        dh = d * z
        at = ((client * time + t) * rows + own_row) * (3 * H) + unit[None, :]
        kind = d_recurrent.dtype.element_ty
        tl.store(d_recurrent + at, a_r.to(kind), own)
        tl.store(d_recurrent + at + H, a_z.to(kind), own)
        tl.store(d_recurrent + at + 2 * H, a_hn.to(kind), own)
        _arrive(flag)
        # While the others arrive: what nobody waits for, and what the step before this one will need.
        tl.store(d_inputs + at, a_r.to(kind), own)
        tl.store(d_inputs + at + H, a_z.to(kind), own)
        tl.store(d_inputs + at + 2 * H, a_n.to(kind), own)
        sum_r += a_r
        sum_z += a_z
        sum_n += a_n
        sum_hn += a_hn
        earlier = tl.maximum(t - 1, 0)
        r, z, n, h_n, before, d_next = _kept(saved, hidden, d_out, client, time, earlier, rows, own_row, unit, own, H)
        _meet(flag, slices * (back + 1))
        G = d_recurrent + (client * time + t) * rows * 3 * H
        gr_a, gr_b = _tile(G, row, rows, 3 * H, ka, H, 1), _tile(G, row, rows, 3 * H, kb, H, 1)
        gz_a, gz_b = _tile(G + H, row, rows, 3 * H, ka, H, 1), _tile(G + H, row, rows, 3 * H, kb, H, 1)
        gn_a, gn_b = _tile(G + 2 * H, row, rows, 3 * H, ka, H, 1), _tile(G + 2 * H, row, rows, 3 * H, kb, H, 1)
        dh = tl.dot(gr_b, r_b, tl.dot(gr_a, r_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        dh = tl.dot(gz_b, z_b, tl.dot(gz_a, z_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        dh = tl.dot(gn_b, n_b, tl.dot(gn_a, n_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        if RESET:
            dh = dh * stays
    real = unit < H
    b = client * 3 * H + unit
    tl.store(d_bias_ih + b, tl.sum(sum_r, 0), real)
    tl.store(d_bias_ih + b + H, tl.sum(sum_z, 0), real)
    tl.store(d_bias_ih + b + 2 * H, tl.sum(sum_n, 0), real)
    tl.store(d_bias_hh + b, tl.sum(sum_r, 0), real)
    tl.store(d_bias_hh + b + H, tl.sum(sum_z, 0), real)
    tl.store(d_bias_hh + b + 2 * H, tl.sum(sum_hn, 0), real)
