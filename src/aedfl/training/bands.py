"""Convolutions over narrow images as products of whole image rows with banded matrices, written in Triton.

A row of the output depends on KH rows of the input, and that linearly: with the kernel written out as a matrix of
(channel, column) by (filter, column), zero but for a band, the convolution is KH products of matrices. Rows are read
once for each of the KH, not KH * KW times, and lie in memory as they are needed. The price is zeros that are
multiplied too, which is why images must be narrow. Only for strides of 1. The gradient by the weights was no faster
this way than by patches.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .choice import Bands, Shape


@triton.jit(do_not_specialize=["left"])
def _band(
    w, band, left, count,
    A: tl.constexpr, AW: tl.constexpr, B: tl.constexpr, BW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """band[t, (a, i), (b, j)]: what column i of channel a adds to column j of channel b, t rows below.

    Turned: for the way back, from slopes of the output (a is a filter) to slopes of the input.
    """
    model = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, b = at % BW, at // BW % B
    i, a = at // (BW * B) % AW, at // (BW * B * AW) % A
    t = at // (BW * B * AW * A)
    if TURNED:
        column = j - i + left
        place = ((model * A + a) * B + b) * (KH * KW) + (KH - 1 - t) * KW + column
    else:
        column = i - j + left
        place = ((model * B + b) * A + a) * (KH * KW) + t * KW + column
    inside = (at < count) & (column >= 0) & (column < KW)
    tl.store(band + model * count + at, tl.load(w + place, inside, 0.0).to(band.dtype.element_ty), at < count)


@triton.jit(do_not_specialize=["top"])
def _rows_by_band(
    x, band, bias, y, models, rows, top,
    A: tl.constexpr, AH: tl.constexpr, AW: tl.constexpr, B: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    KH: tl.constexpr, BIAS: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, NB: tl.constexpr, KS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[row m, n] = sum over t and k of x[row m + t - top, k] band[t, k, n]."""
    model = tl.program_id(1)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    n = tl.program_id(2) * NB + tl.arange(0, NB)
    sample, row = m // BH, m % BH
    start = (sample * models + model) * (A * AH * AW)
    total = tl.zeros((MB, NB), tl.float32)
    for step in range(0, KH * KS):
        t, k = step // KS, step % KS * KB + tl.arange(0, KB)
        r = row + t - top
        there = (m < rows) & (r >= 0) & (r < AH)
        at = (start + r * AW)[:, None] + (k // AW * (AH * AW) + k % AW)[None, :]
        pixels = tl.load(x + at, there[:, None] & (k < A * AW)[None, :], 0.0)
        places = ((model * KH + t) * (A * AW) + k)[:, None] * (B * BW) + n[None, :]
        factors = tl.load(band + places, (k < A * AW)[:, None] & (n < B * BW)[None, :], 0.0)
        total = tl.dot(pixels, factors, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + model * B + n // BW, n < B * BW, 0.0)[None, :]
    target = ((sample * models + model) * (B * BH * BW) + row * BW)[:, None] + (n // BW * (BH * BW) + n % BW)[None, :]
    tl.store(y + target, total.to(y.dtype.element_ty), (m < rows)[:, None] & (n < B * BW)[None, :])


def forward(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Bands, dot: str) -> Tensor:
    ends = (shape.channels, shape.height, shape.width), (shape.filters, *shape.out)
    return _product(shape, x, weight, bias, ends, shape.padding, tiles, dot)


def by_input(shape: Shape, g: Tensor, weight: Tensor, tiles: Bands, dot: str) -> Tensor:
    """The slope by the input is a convolution, too: of the slopes, with the kernel turned round."""
    ends = (shape.filters, *shape.out), (shape.channels, shape.height, shape.width)
    padding = shape.kernel[0] - 1 - shape.padding[0], shape.padding[1]
    return _product(shape, g, weight, None, ends, padding, tiles, dot, turned=True)


def _product(
    shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, ends: tuple[tuple[int, int, int], ...],
    padding: tuple[int, int], tiles: Bands, dot: str, turned: bool = False,
) -> Tensor:  # fmt: skip
    (a, ah, aw), (b, bh, bw) = ends
    kh, kw = shape.kernel
    count = kh * a * aw * b * bw
    band = torch.empty(shape.models, count, device=x.device, dtype=x.dtype)
    _band[(triton.cdiv(count, 1024), shape.models)](
        weight, band, padding[1], count, A=a, AW=aw, B=b, BW=bw, KH=kh, KW=kw, TURNED=turned, BLOCK=1024
    )
    y = x.new_empty(shape.batch, shape.models * b, bh, bw)
    rows, steps = shape.batch * bh, triton.cdiv(a * aw, tiles.patch)
    _rows_by_band[(triton.cdiv(rows, tiles.rows), shape.models, triton.cdiv(b * bw, tiles.columns))](
        x, band, bias, y, shape.models, rows, padding[0], A=a, AH=ah, AW=aw, B=b, BH=bh, BW=bw, KH=kh,
        BIAS=bias is not None, MB=tiles.rows, KB=tiles.patch, NB=tiles.columns, KS=steps, PRECISION=dot,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y
