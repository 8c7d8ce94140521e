"""What a GPU does for `pixels`, written in Triton: convolutions over images whose channels lie side by side.

Sizes: C channels, H by W; F filters, KH by KW, moved by SH and SW, over PH and PW zeros at the ends; OH by OW results.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .convolution import PADS


@triton.jit
def lay(
    w, along, back, apart,
    C: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
    CB: tl.constexpr, FB: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Weights [F, C, T] of each model as [T, C, F], and as [T, F, C], with the positions T in turned order if asked."""
    one = tl.program_id(0)
    model, t = one // T, one % T
    f, c = tl.program_id(1) * FB + tl.arange(0, FB), tl.program_id(2) * CB + tl.arange(0, CB)
    known = (f < F)[:, None] & (c < C)[None, :]
    tile = tl.load(w + model.to(tl.int64) * apart + (f[:, None] * C + c[None, :]) * T + t, known, 0.0)
    tile = tile.to(along.dtype.element_ty)
    to = (model.to(tl.int64) * T + t) * (F * C)
    tl.store(along + to + c[:, None] * F + f[None, :], tl.trans(tile), tl.trans(known))
    if BACK:
        if TURN:
            to = (model.to(tl.int64) * T + T - 1 - t) * (F * C)
        tl.store(back + to + f[:, None] * C + c[None, :], tile, known)


@triton.jit(do_not_specialize=PADS)
def convolve(
    x, w, b, gate, more, y, positions, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, GATE: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr,
    FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over k of x[m, k] w[k, f]: m a position of the output, k = (row, column, channel) of a patch.

    With GATE, y is zero where `gate` is not above zero; with MORE, those numbers are added to it.
    """
    model = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    sample, place = m // (OH * OW), m % (OH * OW)
    row, column = place // OW * SH - top, place % OW * SW - left
    start = (sample * H + row) * W + column
    x += model * (positions // (OH * OW) * H * W * C)
    w += model * (KH * KW * C * F)
    k = tl.arange(0, KB)
    total = tl.zeros((MB, FB), tl.float32)
    if ROWS:  # one row of the kernel after the other
        t, c = k // C, k % C
        across = column[:, None] + t[None, :]
        known = (m < positions)[:, None] & (t < KW)[None, :] & (across >= 0) & (across < W)
        for kr in range(0, KH):
            there = known & ((row + kr >= 0) & (row + kr < H))[:, None]
            patch = tl.load(x + (start + kr * W)[:, None] * C + k[None, :], there, 0.0)
            weight = tl.load(w + (kr * KW * C + k)[:, None] * F + f[None, :], (t < KW)[:, None] & (f < F)[None, :], 0.0)
            total = tl.dot(patch, weight, total, input_precision=PRECISION)
    elif C % KB == 0:  # one position of the kernel after the other
        for i in range(0, KH * KW * C // KB):
            t, c = i // (C // KB), i % (C // KB) * KB + k
            kr, kc = t // KW, t % KW
            there = m < positions
            if PH + PW > 0:
                r, q = row + kr, column + kc
                there &= (r >= 0) & (r < H) & (q >= 0) & (q < W)
            patch = tl.load(x + (start + kr * W + kc)[:, None] * C + c[None, :], there[:, None], 0.0)
            weight = tl.load(w + (t * C + c)[:, None] * F + f[None, :], (f < F)[None, :], 0.0)
            total = tl.dot(patch, weight, total, input_precision=PRECISION)
    else:
        for k0 in range(0, KH * KW * C, KB):
            t, c = (k0 + k) // C, (k0 + k) % C
            kr, kc = t // KW, t % KW
            known = k0 + k < KH * KW * C
            there = (m < positions)[:, None] & known[None, :]
            if PH + PW > 0:
                r, q = row[:, None] + kr[None, :], column[:, None] + kc[None, :]
                there &= (r >= 0) & (r < H) & (q >= 0) & (q < W)
            patch = tl.load(x + (start[:, None] + (kr * W + kc)[None, :]) * C + c[None, :], there, 0.0)
            weight = tl.load(w + (k0 + k)[:, None] * F + f[None, :], known[:, None] & (f < F)[None, :], 0.0)
            total = tl.dot(patch, weight, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(b + model * F + f, f < F, 0.0)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    at = model * positions * F + m[:, None] * F + f[None, :]
    known = (m < positions)[:, None] & (f < F)[None, :]
    if GATE:
        total = tl.where(tl.load(gate + at, known, 0.0) > 0, total, 0.0)
    if MORE:
        total += tl.load(more + at, known, 0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), known)


@triton.jit(do_not_specialize=PADS)
def input_gradient(
    g, w, gate, more, dx, batch, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    GATE: tl.constexpr, MORE: tl.constexpr,
    CB: tl.constexpr, MB: tl.constexpr, FB: tl.constexpr, CS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[m, c] = sum over f and t of g[m - t, f] w[t, f, c]: m a position of the input, t one of the kernel.

    A program has positions whose rows and columns leave the same rest when divided by the stride: the same positions of
    the kernel, some of all, have a part in them.
    """
    model = tl.program_id(1).to(tl.int64)
    kind, ch = tl.program_id(2) // CS, tl.program_id(2) % CS * CB + tl.arange(0, CB)
    rest_r, rest_c = kind // SW, kind % SW
    across: tl.constexpr = (W + SW - 1) // SW
    down: tl.constexpr = (H + SH - 1) // SH
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (down * across), m % (down * across)
    row, column = place // across * SH + rest_r, place % across * SW + rest_c
    inside = (sample < batch) & (row < H) & (column < W)
    first_r, first_c = (rest_r + top) % SH, (rest_c + left) % SW
    taps_r, taps_c = (KH - first_r + SH - 1) // SH, (KW - first_c + SW - 1) // SW
    g += model * batch * (OH * OW * F)
    w += model * (KH * KW * F * C)
    f = tl.arange(0, FB)
    total = tl.zeros((MB, CB), tl.float32)
    for i in range(0, taps_r * taps_c * (F // FB)):
        t, f0 = i // (F // FB), i % (F // FB) * FB
        kr, kc = first_r + t // taps_c * SH, first_c + t % taps_c * SW
        r, q = (row + top - kr) // SH, (column + left - kc) // SW
        there = inside & (row + top >= kr) & (column + left >= kc) & (r < OH) & (q < OW)
        slope = tl.load(g + ((sample * OH + r) * OW + q)[:, None] * F + (f0 + f)[None, :], there[:, None], 0.0)
        at = ((kr * KW + kc) * F + f0 + f)[:, None] * C + ch[None, :]
        weight = tl.load(w + at, (ch < C)[None, :], 0.0)
        total = tl.dot(slope, weight, total, input_precision=PRECISION)
    at = model * batch * (H * W * C) + ((sample * H + row) * W + column)[:, None] * C + ch[None, :]
    known = inside[:, None] & (ch < C)[None, :]
    if GATE:
        total = tl.where(tl.load(gate + at, known, 0.0) > 0, total, 0.0)
    if MORE:
        total += tl.load(more + at, known, 0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), known)


@triton.jit(do_not_specialize=PADS)
def weight_gradient(
    x, g, dw, size, models, positions, top, left, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, CB: tl.constexpr, CS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[t, c, f] = sum over m of g[m, f] x[m + t, c], over this program's share of the positions m; db[f], that of
    g[m, f], lies behind the last model's dw.

    A program has the positions t of one row of the kernel, three at most: what it reads of g serves them all.
    """
    part, model = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kr, c = tl.program_id(2) // CS % KH, tl.program_id(2) % CS * CB + tl.arange(0, CB)
    f = tl.program_id(2) // (CS * KH) * FB + tl.arange(0, FB)
    x += model * (positions // (OH * OW) * H * W * C)
    g += model * positions * F
    first = tl.zeros((CB, FB), tl.float32)
    second, third = first, first
    slopes = tl.zeros((FB,), tl.float32)
    for m0 in range(part * share, (part + 1) * share, MB):
        m = m0 + tl.arange(0, MB)
        sample, place = m // (OH * OW), m % (OH * OW)
        r, q = place // OW * SH - top + kr, place % OW * SW - left
        there = m < positions
        slope = tl.load(g + m[:, None] * F + f[None, :], there[:, None] & (f < F)[None, :], 0.0)
        there &= (r >= 0) & (r < H)
        at = ((sample * H + r) * W + q)[:, None] * C + c[None, :]
        patch = tl.load(x + at, (there & (q >= 0) & (q < W))[:, None], 0.0)
        first = tl.dot(tl.trans(patch), slope, first, input_precision=PRECISION)
        if KW > 1:
            patch = tl.load(x + at + C, (there & (q >= -1) & (q < W - 1))[:, None], 0.0)
            second = tl.dot(tl.trans(patch), slope, second, input_precision=PRECISION)
        if KW > 2:
            patch = tl.load(x + at + 2 * C, (there & (q >= -2) & (q < W - 2))[:, None], 0.0)
            third = tl.dot(tl.trans(patch), slope, third, input_precision=PRECISION)
        if BIAS:
            slopes += tl.sum(slope.to(tl.float32), 0)
    dw += part.to(tl.int64) * size
    target = dw + (model * (KH * KW * C) + kr * (KW * C) + c[:, None]) * F + f[None, :]
    tl.store(target, first, (f < F)[None, :])
    if KW > 1:
        tl.store(target + C * F, second, (f < F)[None, :])
    if KW > 2:
        tl.store(target + 2 * C * F, third, (f < F)[None, :])
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(2) % (KH * CS) == 0:
            tl.store(dw + models * (F * C * KH * KW) + model * F + f, slopes, f < F)


@triton.jit(do_not_specialize=PADS)
def row_gradient(
    x, g, dw, size, models, positions, top, left, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of few channels: what a row of the kernel meets lies in one piece, so that it is one operand. A program
    has one row or all of them, three at most."""
    part, model = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups: tl.constexpr = KH // ROWS
    kr, f = tl.program_id(2) % groups, tl.program_id(2) // groups * FB + tl.arange(0, FB)
    k = tl.arange(0, KB)
    t = k // C
    x += model * (positions // (OH * OW) * H * W * C)
    g += model * positions * F
    first = tl.zeros((KB, FB), tl.float32)
    second, third = first, first
    slopes = tl.zeros((FB,), tl.float32)
    for m0 in range(part * share, (part + 1) * share, MB):
        m = m0 + tl.arange(0, MB)
        sample, place = m // (OH * OW), m % (OH * OW)
        r, q = place // OW * SH - top + kr, place % OW * SW - left
        there = m < positions
        slope = tl.load(g + m[:, None] * F + f[None, :], there[:, None] & (f < F)[None, :], 0.0)
        across = q[:, None] + t[None, :]
        known = there[:, None] & (t < KW)[None, :] & (across >= 0) & (across < W)
        at = ((sample * H + r) * W + q)[:, None] * C + k[None, :]
        patch = tl.load(x + at, known & ((r >= 0) & (r < H))[:, None], 0.0)
        first = tl.dot(tl.trans(patch), slope, first, input_precision=PRECISION)
        if ROWS > 1:
            patch = tl.load(x + at + W * C, known & ((r >= -1) & (r < H - 1))[:, None], 0.0)
            second = tl.dot(tl.trans(patch), slope, second, input_precision=PRECISION)
        if ROWS > 2:
            patch = tl.load(x + at + 2 * W * C, known & ((r >= -2) & (r < H - 2))[:, None], 0.0)
            third = tl.dot(tl.trans(patch), slope, third, input_precision=PRECISION)
        if BIAS:
            slopes += tl.sum(slope.to(tl.float32), 0)
    dw += part.to(tl.int64) * size
    target = dw + (model * (KH * KW * C) + kr * (KW * C) + k[:, None]) * F + f[None, :]
    known = (t < KW)[:, None] & (f < F)[None, :]
    tl.store(target, first, known)
    if ROWS > 1:
        tl.store(target + KW * C * F, second, known)
    if ROWS > 2:
        tl.store(target + 2 * KW * C * F, third, known)
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if kr == 0:
            tl.store(dw + models * (F * C * KH * KW) + model * F + f, slopes, f < F)


@triton.jit(do_not_specialize=PADS)
def colour_gradient(
    x, g, dw, size, models, positions, top, left, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of images with few channels: k = (row, column, channel) of a patch."""
    part, model = tl.program_id(0), tl.program_id(1).to(tl.int64)
    f = tl.program_id(2) // KS * FB + tl.arange(0, FB)
    k = tl.program_id(2) % KS * KB + tl.arange(0, KB)
    t, c = k // C, k % C
    kr, kc = t // KW, t % KW
    known = k < KH * KW * C
    x += model * (positions // (OH * OW) * H * W * C)
    g += model * positions * F
    total = tl.zeros((KB, FB), tl.float32)
    slopes = tl.zeros((FB,), tl.float32)
    for m0 in range(part * share, (part + 1) * share, MB):
        m = m0 + tl.arange(0, MB)
        sample, place = m // (OH * OW), m % (OH * OW)
        row, column = place // OW * SH - top, place % OW * SW - left
        start = (sample * H + row) * W + column
        there = (m < positions)[:, None] & known[None, :]
        if PH + PW > 0:
            r, q = row[:, None] + kr[None, :], column[:, None] + kc[None, :]
            there &= (r >= 0) & (r < H) & (q >= 0) & (q < W)
        patch = tl.load(x + (start[:, None] + (kr * W + kc)[None, :]) * C + c[None, :], there, 0.0)
        slope = tl.load(g + m[:, None] * F + f[None, :], (m < positions)[:, None] & (f < F)[None, :], 0.0)
        total = tl.dot(tl.trans(patch), slope, total, input_precision=PRECISION)
        if BIAS:
            slopes += tl.sum(slope.to(tl.float32), 0)
    dw += part.to(tl.int64) * size
    target = dw + (model * (KH * KW * C) + k[:, None]) * F + f[None, :]
    tl.store(target, total, known[:, None] & (f < F)[None, :])
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(2) % KS == 0:
            tl.store(dw + models * (F * C * KH * KW) + model * F + f, slopes, f < F)


@triton.jit
def gather(
    parts, dw, db, size, models, count,
    C: tl.constexpr, F: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr,
    CB: tl.constexpr, FB: tl.constexpr, TB: tl.constexpr, TS: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """The sum of the parts [T, C, F] of each model in a fixed order, PB of them at a time, turned to [F, C, T]. A
    program has TB of the positions, a TS-th of all."""
    model = tl.program_id(0).to(tl.int64)
    c, f = tl.program_id(1) // TS * CB + tl.arange(0, CB), tl.program_id(2) * FB + tl.arange(0, FB)
    t, p = tl.program_id(1) % TS * TB + tl.arange(0, TB), tl.arange(0, PB)
    known = (t < T)[:, None, None] & (c < C)[None, :, None] & (f < F)[None, None, :]
    at = model * (T * C * F) + (t[:, None, None] * C + c[None, :, None]) * F + f[None, None, :]
    total = tl.zeros((TB, CB, FB), tl.float32)
    for first in range(0, count, PB):
        there = (first + p < count)[:, None, None, None] & known[None, :, :, :]
        away = (first + p).to(tl.int64) * size
        total += tl.sum(tl.load(parts + away[:, None, None, None] + at[None, :, :, :], there, 0.0), 0)
    known = (f < F)[:, None, None] & (c < C)[None, :, None] & (t < T)[None, None, :]
    at = model * (T * C * F) + (f[:, None, None] * C + c[None, :, None]) * T + t[None, None, :]
    tl.store(dw + at, tl.permute(total, (2, 1, 0)), known)
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(1) == 0:
            slopes = tl.zeros((FB,), tl.float32)
            part = parts + model * F + models * (T * C * F)
            for first in range(0, count, PB):
                there = (first + p < count)[:, None] & (f < F)[None, :]
                away = (first + p).to(tl.int64) * size
                slopes += tl.sum(tl.load(part + away[:, None] + f[None, :], there, 0.0), 0)
            tl.store(db + model * F + f, slopes, f < F)
