r"""Triton kernels of a step: recurrences, softmax and its gradient, rows of the embedding, SGD and Adam.

A recurrence is persistent: one launch for all time steps of all stacked clients, forwards or backwards. A client's
recurrent matrix is cut into slices of hidden units, one program each. A program loads its slice once and keeps it in
registers through the whole window. It meets its client's other programs once a time step (twice with a projection) at
a counter in memory. Programs take their place by a ticket, so that all programs of a client are running before one of a
later client starts: no program waits for one that cannot run.

Where rows hold several lines (RESET), `keep` [m, time, rows] is 0 at the first token of each, else 1. It multiplies the
state before a step, and the gradient that the step hands back.

Gates of the LSTM and of the CIFG lie in torch's order: i, f, g, o, or i, g, o where f = 1 − i (COUPLED). With a
projection (PROJECTED) a step has two phases: all programs write their slice of o ⊙ tanh c, then each forms its columns
of h = W_hr (o ⊙ tanh c).

Matrices and what goes into products have the type of the weights (float32 or bf16); gates, cells and sums are float32.
All sums are taken in a fixed order: the same step gives the same bits. Equal to the plain kernels
(`engine.kernels.step.PLAIN`) to rounding (tests/equivalence/test_triton.py).
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
def _gru_at(saved, hidden, d_out, client, time, t, rows, row, unit, own, H):
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
    r, z, n, h_n, before, d_next = _gru_at(saved, hidden, d_out, client, time, time - 1, rows, own_row, unit, own, H)
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
        # While the others arrive: what no program waits for, and what the step before this one will need.
        tl.store(d_inputs + at, a_r.to(kind), own)
        tl.store(d_inputs + at + H, a_z.to(kind), own)
        tl.store(d_inputs + at + 2 * H, a_n.to(kind), own)
        sum_r += a_r
        sum_z += a_z
        sum_n += a_n
        sum_hn += a_hn
        earlier = tl.maximum(t - 1, 0)
        r, z, n, h_n, before, d_next = _gru_at(saved, hidden, d_out, client, time, earlier, rows, own_row, unit, own, H)
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


@triton.jit
def _matvec(base, row, rows, stride, ka, kb, end, w_a, w_b, start, PRECISION: tl.constexpr):
    """start + X W over the two pieces of the inner axis."""
    x_a, x_b = _tile(base, row, rows, stride, ka, end, 1), _tile(base, row, rows, stride, kb, end, 1)
    return tl.dot(x_b, w_b, tl.dot(x_a, w_a, start, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def lstm_forward(
    gates, weight, project, bias_ih, bias_hh, h_state, c_state, keep, hidden, raw, saved, cells, flags,
    time, rows, narrow, slim, slices,
    VEC: tl.constexpr, WEC: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, RA: tl.constexpr, RB: tl.constexpr,
    COUPLED: tl.constexpr, PROJECTED: tl.constexpr, TWO: tl.constexpr, RESET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gates [m, time, rows, G·H] (W_ih x); h_state [m, rows, W] and c_state [m, rows, H], changed in place; hidden
    [m, time + 1, rows, W]; raw [m, time, rows, H]: o ⊙ tanh c; saved [m, time, rows, G·H]: activated gates; cells
    [m, time + 1, rows, H]."""
    H, W = narrow * VEC, slim * WEC
    G: tl.constexpr = 3 if COUPLED else 4
    ticket = tl.atomic_add(flags, 1)
    client, part = (ticket // slices).to(tl.int64), ticket % slices  # offsets may pass 2^31
    flag = flags + 32 * (client + 1)
    row, unit = tl.arange(0, ROWS), part * UNITS + tl.arange(0, UNITS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    own = (row[:, None] < rows) & (unit[None, :] < H)
    mine = (row[:, None] < rows) & (column[None, :] < W)
    ka, kb = tl.arange(0, KA), KA + tl.arange(0, KB)
    ra, rb = tl.arange(0, RA), RA + tl.arange(0, RB)
    M = weight + client * G * H * W
    i_a, i_b = _tile(M, ka, W, 1, unit, H, W), _tile(M, kb, W, 1, unit, H, W)
    g_at = M + (G - 2) * H * W
    g_a, g_b = _tile(g_at, ka, W, 1, unit, H, W), _tile(g_at, kb, W, 1, unit, H, W)
    o_at = M + (G - 1) * H * W
    o_a, o_b = _tile(o_at, ka, W, 1, unit, H, W), _tile(o_at, kb, W, 1, unit, H, W)
    real = unit < H
    b = bias_ih + client * G * H + unit
    b_i, b_g, b_o = tl.load(b, real, 0.0), tl.load(b + (G - 2) * H, real, 0.0), tl.load(b + (G - 1) * H, real, 0.0)
    if TWO:
        e = bias_hh + client * G * H + unit
        b_i += tl.load(e, real, 0.0)
        b_g += tl.load(e + (G - 2) * H, real, 0.0)
        b_o += tl.load(e + (G - 1) * H, real, 0.0)
    if not COUPLED:
        f_a, f_b = _tile(M + H * W, ka, W, 1, unit, H, W), _tile(M + H * W, kb, W, 1, unit, H, W)
        b_f = tl.load(b + H, real, 0.0)
        if TWO:
            b_f += tl.load(bias_hh + client * G * H + H + unit, real, 0.0)
    if PROJECTED:
        P = project + client * W * H
        p_a, p_b = _tile(P, ra, H, 1, column, W, H), _tile(P, rb, H, 1, column, W, H)
    narrowed = hidden.dtype.element_ty
    c_at = client * rows * H + row[:, None] * H + unit[None, :]
    h_at = client * rows * W + row[:, None] * W + column[None, :]
    c = tl.load(c_state + c_at, own, 0.0)
    tl.store(cells + client * (time + 1) * rows * H + row[:, None] * H + unit[None, :], c, own)
    slot = hidden + client * (time + 1) * rows * W
    h = tl.load(h_state + h_at, mine, 0.0)
    tl.store(slot + row[:, None] * W + column[None, :], h.to(narrowed), mine)
    _arrive(flag)
    phase = 1
    nothing = tl.zeros([ROWS, UNITS], tl.float32)
    for t in range(time):
        place = (client * time + t) * rows + row[:, None]
        x = gates + place * (G * H) + unit[None, :]
        x_i, x_g = tl.load(x, own, 0.0), tl.load(x + (G - 2) * H, own, 0.0)
        x_o = tl.load(x + (G - 1) * H, own, 0.0)
        kept = saved + place * (G * H) + unit[None, :]
        if not COUPLED:
            x_f = tl.load(x + H, own, 0.0)
        _meet(flag, slices * phase)
        a_i = _matvec(slot, row, rows, W, ka, kb, W, i_a, i_b, nothing, PRECISION)
        a_g = _matvec(slot, row, rows, W, ka, kb, W, g_a, g_b, nothing, PRECISION)
        a_o = _matvec(slot, row, rows, W, ka, kb, W, o_a, o_b, nothing, PRECISION)
        if RESET:  # a row's product with a state of zero is zero
            stays = _keep(keep, client, time, t, rows, row)
            a_i, a_g, a_o, c = a_i * stays, a_g * stays, a_o * stays, c * stays
        i = _sigmoid(a_i + x_i + b_i[None, :])
        g = _tanh(a_g + x_g + b_g[None, :])
        o = _sigmoid(a_o + x_o + b_o[None, :])
        if COUPLED:
            c = c + i * (g - c)
        else:
            a_f = _matvec(slot, row, rows, W, ka, kb, W, f_a, f_b, nothing, PRECISION)
            if RESET:
                a_f = a_f * stays
            f = _sigmoid(a_f + x_f + b_f[None, :])
            c = f * c + i * g
            tl.store(kept + H, f, own)
        out = o * _tanh(c)
        slot += rows * W
        if PROJECTED:
            tl.store(raw + place * H + unit[None, :], out.to(narrowed), own)
            _arrive(flag)
            phase += 1
            _meet(flag, slices * phase)
            all_raw = raw + (client * time + t) * rows * H
            h = _matvec(all_raw, row, rows, H, ra, rb, H, p_a, p_b, tl.zeros([ROWS, COLUMNS], tl.float32), PRECISION)
        else:
            h = out
        tl.store(slot + row[:, None] * W + column[None, :], h.to(narrowed), mine)
        _arrive(flag)
        phase += 1
        tl.store(kept, i, own)
        tl.store(kept + (G - 2) * H, g, own)
        tl.store(kept + (G - 1) * H, o, own)
        tl.store(cells + ((client * (time + 1) + t + 1) * rows + row[:, None]) * H + unit[None, :], c, own)
    tl.store(c_state + c_at, c, own)
    tl.store(h_state + h_at, h, mine)


@triton.jit
def _lstm_at(
    saved, cells, d_out, client, time, t, rows, row, unit, own, column, mine, H, W, G: tl.constexpr
):  # fmt: skip
    """What a step's backward pass reads of its own: gates i, f, g, o (f = i without one), the cell before, d_out."""
    place = (client * time + t) * rows + row
    kept = saved + place * (G * H) + unit[None, :]
    before = cells + ((client * (time + 1) + t) * rows + row) * H + unit[None, :]
    d = tl.load(d_out + place * W + column[None, :], mine, 0.0)
    return (
        tl.load(kept, own, 0.0), tl.load(kept + (G - 3) * H, own, 0.0), tl.load(kept + (G - 2) * H, own, 0.0),
        tl.load(kept + (G - 1) * H, own, 0.0), tl.load(before, own, 0.0), d,
    )  # fmt: skip


@triton.jit
def lstm_backward(
    d_out, weight, project, keep, saved, cells, d_gates, d_projected, d_bias, flags, time, rows, narrow, slim, slices,
    VEC: tl.constexpr, WEC: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, RA: tl.constexpr, RB: tl.constexpr,
    COUPLED: tl.constexpr, PROJECTED: tl.constexpr, RESET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_out [m, time, rows, W]; d_gates [m, time, rows, G·H]; d_projected [m, time, rows, W]: the whole gradient of h,
    with a projection only; d_bias [m, G·H]."""
    H, W = narrow * VEC, slim * WEC
    G: tl.constexpr = 3 if COUPLED else 4
    ticket = tl.atomic_add(flags, 1)
    client, part = (ticket // slices).to(tl.int64), ticket % slices  # offsets may pass 2^31
    flag = flags + 32 * (client + 1)
    row, unit = tl.arange(0, ROWS), part * UNITS + tl.arange(0, UNITS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    own = (row[:, None] < rows) & (unit[None, :] < H)
    mine = (row[:, None] < rows) & (column[None, :] < W)
    ka, kb = tl.arange(0, KA), KA + tl.arange(0, KB)
    ra, rb = tl.arange(0, RA), RA + tl.arange(0, RB)
    M = weight + client * G * H * W
    i_a, i_b = _tile(M, ra, H, W, column, W, 1), _tile(M, rb, H, W, column, W, 1)
    g_at = M + (G - 2) * H * W
    g_a, g_b = _tile(g_at, ra, H, W, column, W, 1), _tile(g_at, rb, H, W, column, W, 1)
    o_at = M + (G - 1) * H * W
    o_a, o_b = _tile(o_at, ra, H, W, column, W, 1), _tile(o_at, rb, H, W, column, W, 1)
    if not COUPLED:
        f_a, f_b = _tile(M + H * W, ra, H, W, column, W, 1), _tile(M + H * W, rb, H, W, column, W, 1)
    if PROJECTED:
        P = project + client * W * H
        p_a, p_b = _tile(P, ka, W, H, unit, H, 1), _tile(P, kb, W, H, unit, H, 1)
    kind = d_gates.dtype.element_ty
    dh = tl.zeros([ROWS, COLUMNS], tl.float32)
    dc = tl.zeros([ROWS, UNITS], tl.float32)
    sum_i, sum_f, sum_g, sum_o = dc, dc, dc, dc
    phase = 0
    own_row = row[:, None]
    start = ((client * (time + 1) + time) * rows + own_row) * H + unit[None, :]
    after = _tanh(tl.load(cells + start, own, 0.0))
    i, f, g, o, before, d_next = _lstm_at(
        saved, cells, d_out, client, time, time - 1, rows, own_row, unit, own, column, mine, H, W, G
    )
    for back in range(time):
        t = time - 1 - back
        base = (client * time + t) * rows
        place = base + own_row
        dh += d_next
        if PROJECTED:
            tl.store(d_projected + place * W + column[None, :], dh.to(kind), mine)
            _arrive(flag)
            phase += 1
            _meet(flag, slices * phase)
            d = _matvec(
                d_projected + base * W, row, rows, W, ka, kb, W, p_a, p_b, tl.zeros([ROWS, UNITS], tl.float32),
                PRECISION,
            )  # fmt: skip
        else:
            d = dh
        dc += d * o * (1.0 - after * after)
        earlier = before  # the cell that the step before this one left
        if RESET:
            stays = _keep(keep, client, time, t, rows, row)
            before = before * stays
        at = d_gates + place * (G * H) + unit[None, :]
        if COUPLED:
            a_i = dc * (g - before) * i * (1.0 - i)
            forget = 1.0 - i
        else:
            a_i = dc * g * i * (1.0 - i)
            a_f = dc * before * f * (1.0 - f)
            sum_f += a_f
            tl.store(at + H, a_f.to(kind), own)
            forget = f
        a_g, a_o = dc * i * (1.0 - g * g), d * after * o * (1.0 - o)
        tl.store(at, a_i.to(kind), own)
        tl.store(at + (G - 2) * H, a_g.to(kind), own)
        tl.store(at + (G - 1) * H, a_o.to(kind), own)
        _arrive(flag)
        phase += 1
        # While the others arrive: sums, and what the step before this one will need.
        dc = dc * forget
        if RESET:
            dc = dc * stays
        sum_i += a_i
        sum_g += a_g
        sum_o += a_o
        after = _tanh(earlier)
        i, f, g, o, before, d_next = _lstm_at(
            saved, cells, d_out, client, time, tl.maximum(t - 1, 0), rows, own_row, unit, own, column, mine, H, W, G
        )
        _meet(flag, slices * phase)
        D = d_gates + base * G * H
        di_a, di_b = _tile(D, row, rows, G * H, ra, H, 1), _tile(D, row, rows, G * H, rb, H, 1)
        D_g, D_o = D + (G - 2) * H, D + (G - 1) * H
        dg_a, dg_b = _tile(D_g, row, rows, G * H, ra, H, 1), _tile(D_g, row, rows, G * H, rb, H, 1)
        do_a, do_b = _tile(D_o, row, rows, G * H, ra, H, 1), _tile(D_o, row, rows, G * H, rb, H, 1)
        dh = tl.zeros([ROWS, COLUMNS], tl.float32)
        if not COUPLED:
            df_a, df_b = _tile(D + H, row, rows, G * H, ra, H, 1), _tile(D + H, row, rows, G * H, rb, H, 1)
            dh = tl.dot(df_b, f_b, tl.dot(df_a, f_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        dh = tl.dot(di_b, i_b, tl.dot(di_a, i_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        dh = tl.dot(dg_b, g_b, tl.dot(dg_a, g_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        dh = tl.dot(do_b, o_b, tl.dot(do_a, o_a, dh, input_precision=PRECISION), input_precision=PRECISION)
        if RESET:
            dh = dh * stays
    real = unit < H
    b = d_bias + client * G * H + unit
    tl.store(b, tl.sum(sum_i, 0), real)
    tl.store(b + (G - 2) * H, tl.sum(sum_g, 0), real)
    tl.store(b + (G - 1) * H, tl.sum(sum_o, 0), real)
    if not COUPLED:
        tl.store(b + H, tl.sum(sum_f, 0), real)


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
    """Where numbers of a layer lie in its padded copy, see `step.PaddedLayer`; `spread` is the copy's size."""
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
