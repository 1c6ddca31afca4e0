r"""Persistent kernels of the LSTM and of the CIFG with its projection; see `gru`.

Gates lie in torch's order: i, f, g, o, or i, g, o where f = 1 − i (COUPLED). With a projection (PROJECTED) a step has
two phases: all programs write their slice of o ⊙ tanh c, then each forms its columns of h = W_hr (o ⊙ tanh c).
"""

from __future__ import annotations

import triton
import triton.language as tl

from keyfed.engine.kernels.triton.gru import _arrive, _keep, _meet, _sigmoid, _tanh, _tile


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
def _kept(
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
    i, f, g, o, before, d_next = _kept(
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
        i, f, g, o, before, d_next = _kept(
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
