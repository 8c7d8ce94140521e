"""Convolutions of N models on images whose channels lie side by side, as GPU kernels written in Triton.

An activation is [N, batch, height, width, channels]. So the numbers of a patch that belong to one position of the
kernel follow each other in memory, those of a row of the kernel too, and are read sixteen bytes at a time; where
channels lie apart (`convolution`), that is two or four. What a convolution multiplies is gathered on the way and never
stored.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .choice import PixelTiles, Shape, pixel_tiles
from .convolution import PADS, matrix_block, matrix_precision

PROGRAMS = 528
"""Programs that a gradient by the weights is split into: four for each multiprocessor of a large GPU."""
FEW = 16
"""Fewer channels than this are a few colours: their patches are one operand, whatever the tiles."""


@triton.jit
def _lay(
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
def _convolve(
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
def _input_gradient(
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
def _weight_gradient(
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
def _row_gradient(
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
def _colour_gradient(
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
def _gather(
    parts, dw, db, size, models, count,
    C: tl.constexpr, F: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr,
    CB: tl.constexpr, FB: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """The sum of the parts [T, C, F] of each model in their order, turned to [F, C, T]."""
    model = tl.program_id(0).to(tl.int64)
    c, f = tl.program_id(1) * CB + tl.arange(0, CB), tl.program_id(2) * FB + tl.arange(0, FB)
    t = tl.arange(0, TB)
    known = (t < T)[:, None, None] & (c < C)[None, :, None] & (f < F)[None, None, :]
    at = model * (T * C * F) + (t[:, None, None] * C + c[None, :, None]) * F + f[None, None, :]
    total = tl.zeros((TB, CB, FB), tl.float32)
    part = parts
    for _ in range(0, count):
        total += tl.load(part + at, known, 0.0)
        part += size
    known = (f < F)[:, None, None] & (c < C)[None, :, None] & (t < T)[None, None, :]
    at = model * (T * C * F) + (f[:, None, None] * C + c[None, :, None]) * T + t[None, None, :]
    tl.store(dw + at, tl.permute(total, (2, 1, 0)), known)
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(1) == 0:
            slopes = tl.zeros((FB,), tl.float32)
            part = parts + model * F + models * (T * C * F)
            for _ in range(0, count):
                slopes += tl.load(part + f, f < F, 0.0)
                part += size
            tl.store(db + model * F + f, slopes, f < F)


@cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; Triton's interpreter has no bound."""
    if device.type != "cuda":
        return 1 << 40
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _block(size: int, most: int) -> int:
    """The largest power of two that goes into the size, a multiple of 16."""
    return min(most, size & -size)


def _row(shape: Shape) -> int:
    """Numbers of a row of the kernel, as a power of two."""
    return int(triton.next_power_of_2(shape.channels * shape.kernel[1]))


def turned(shape: Shape) -> Shape | None:
    """The convolution of the slopes, with the weights turned round, that is the gradient by the input; None with
    strides, where it is no convolution."""
    padding = shape.kernel[0] - 1 - shape.padding[0], shape.kernel[1] - 1 - shape.padding[1]
    if shape.stride != (1, 1) or min(padding) < 0:
        return None
    oh, ow = shape.out
    return replace(shape, channels=shape.filters, height=oh, width=ow, filters=shape.channels, padding=padding)


def laid(shape: Shape, weight: Tensor, dtype: torch.dtype, back: bool) -> tuple[Tensor, Tensor | None]:
    """Weights [N, F, C, …] as the passes read them: one for the values and, if asked for, one for the slopes."""
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    taps = shape.kernel[0] * shape.kernel[1]
    sizes = shape.models, taps, shape.channels, shape.filters
    along = torch.empty(sizes, dtype=dtype, device=weight.device)
    other = torch.empty(sizes, dtype=dtype, device=weight.device) if back else None
    cb, fb = (min(32, int(triton.next_power_of_2(side))) for side in (shape.channels, shape.filters))
    _lay[shape.models * taps, triton.cdiv(shape.filters, fb), triton.cdiv(shape.channels, cb)](
        weight, along, other, weight.stride(0), C=shape.channels, F=shape.filters, T=taps, CB=cb, FB=fb, BACK=back,
        TURN=turned(shape) is not None, num_warps=1 if cb * fb < 1024 else 4,
    )  # fmt: skip
    return along, other


def forward(
    shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: PixelTiles, relu: bool = False,
    gate: Tensor | None = None, more: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of images [N, batch, height, width, channels] and weights as they are laid for the values."""
    oh, ow = shape.out
    y = x.new_empty(shape.models, shape.batch, oh, ow, shape.filters)
    positions, block = shape.batch * oh * ow, matrix_block(shape.filters, tiles.others)
    rows = bool(tiles.rows) and shape.channels >= FEW
    width = _row(shape) if rows else _block(shape.channels, tiles.inner) if shape.channels >= FEW else 32
    size = x.element_size()
    tiles = tiles.within(_shared(x.device), each=width * size, besides=width * block * size)
    grid = (triton.cdiv(positions, tiles.positions), shape.models, triton.cdiv(shape.filters, block))
    _convolve[grid](
        x, weight, bias, gate, more, y, positions, *shape.padding, **shape.sizes,
        BIAS=bias is not None, RELU=relu, GATE=gate is not None, MORE=more is not None, ROWS=rows,
        FB=block, MB=tiles.positions, KB=width, PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def by_input(
    shape: Shape, g: Tensor, weight: Tensor, tiles: PixelTiles, gate: Tensor | None = None, more: Tensor | None = None
) -> Tensor:
    """With weights as they are laid for the slopes; zero where the gate, of the input's size, is not above zero; plus
    more slopes by the same input."""
    other = turned(shape)
    if other is not None:
        return forward(other, g, weight, None, tiles, gate=gate, more=more)
    dx = g.new_empty(shape.models, shape.batch, shape.height, shape.width, shape.channels)
    (sh, sw), block = shape.stride, matrix_block(shape.channels, tiles.others)
    across, inner, size = triton.cdiv(shape.channels, block), _block(shape.filters, tiles.inner), g.element_size()
    tiles = tiles.within(_shared(g.device), each=inner * size, besides=inner * block * size)
    positions = shape.batch * triton.cdiv(shape.height, sh) * triton.cdiv(shape.width, sw)
    _input_gradient[triton.cdiv(positions, tiles.positions), shape.models, sh * sw * across](
        g, weight, gate, more, dx, shape.batch, *shape.padding, **shape.sizes,
        GATE=gate is not None, MORE=more is not None,
        CB=block, MB=tiles.positions, FB=inner, CS=across,
        PRECISION=matrix_precision(), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dx


def by_weight(
    shape: Shape, x: Tensor, g: Tensor, biased: bool, tiles: PixelTiles
) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in order. The kernel has three rows and
    columns at most."""
    (oh, ow), (kh, kw) = shape.out, shape.kernel
    positions, filters = shape.batch * oh * ow, matrix_block(shape.filters, tiles.others)
    if shape.channels < FEW:
        columns = numbers = matrix_block(shape.channels * kh * kw, tiles.inner)
        run, across = _colour_gradient, triton.cdiv(shape.channels * kh * kw, columns)
        split = {"KB": columns, "KS": across}
    elif tiles.rows:
        rows = kh if tiles.rows >= kh else 1
        run, across, numbers = _row_gradient, kh // rows, rows * _row(shape)
        split = {"KB": _row(shape), "ROWS": rows}
    else:
        columns = _block(shape.channels, tiles.inner)
        run, across, numbers = _weight_gradient, kh * (shape.channels // columns), kw * columns
        split = {"CB": columns, "CS": across // kh}
    tiles = tiles.within(_shared(x.device), each=(numbers + filters) * x.element_size())
    step = tiles.positions
    pieces = triton.cdiv(shape.filters, filters) * across
    wanted = max(1, min(PROGRAMS // (shape.models * pieces), positions // (4 * step)))
    share = triton.cdiv(triton.cdiv(positions, wanted), step) * step
    parts = triton.cdiv(positions, share)
    weights, biases = (shape.models, shape.filters, shape.channels, kh, kw), (shape.models, shape.filters)
    size = shape.models * shape.filters * (shape.channels * kh * kw + biased)
    found = x.new_empty(parts, size, dtype=torch.float32)
    run[parts, shape.models, pieces](
        x, g, found, size, shape.models, positions, *shape.padding, share, **shape.sizes, BIAS=biased,
        FB=filters, MB=step, **split, PRECISION=matrix_precision(), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    dw, db = (x.new_empty(sides, dtype=torch.float32) for sides in (weights, biases))
    cb, fb = min(16, int(triton.next_power_of_2(shape.channels))), 16
    tiles_across = triton.cdiv(shape.channels, cb), triton.cdiv(shape.filters, fb)
    _gather[shape.models, *tiles_across](
        found, dw, db, size, shape.models, parts, C=shape.channels, F=shape.filters, T=kh * kw, BIAS=biased,
        CB=cb, FB=fb, TB=int(triton.next_power_of_2(kh * kw)), num_warps=4,
    )  # fmt: skip
    return dw, db if biased else None


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, relu: bool, gated: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        along, back = laid(shape, weight, x.dtype, ctx.needs_input_grad[0])
        ctx.save_for_backward(x, back)
        ctx.shape, ctx.biased, ctx.gated = shape, bias is not None, gated
        bias = None if bias is None else bias.contiguous()
        return forward(shape, x, along, bias, pixel_tiles("forward", shape), relu), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:  # nobody uses what this convolution makes
            return more, None, None, None, None, None
        x, back = ctx.saved_tensors
        shape, g = ctx.shape, g.contiguous()
        gate, more = x if ctx.gated else None, None if more is None else more.contiguous()
        dx = None if back is None else by_input(shape, g, back, pixel_tiles("by_input", shape), gate, more)
        return dx, *by_weight(shape, x, g, ctx.biased, pixel_tiles("by_weight", shape)), None, None, None


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, relu: bool = False, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The convolution of images [N, batch, height, width, channels] with weights [N, filters, channels, kernel, kernel]
    and biases [N, filters], and a ReLU after it if asked for; and the images, for another use of them, whose slopes are
    then added on the way.

    That ReLU lets all slopes through: whoever uses the result closes them, as a convolution does whose images are
    `gated`, that is, come out of a ReLU.
    """
    return _Conv.apply(x, weight, bias, shape, relu, gated)  # type: ignore[no-any-return, no-untyped-call]
