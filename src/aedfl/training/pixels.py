"""Layers of N models on images whose channels lie side by side, as GPU kernels written in Triton.

An activation is [N, batch, height, width, channels]. So the numbers of a patch that belong to one position of the
kernel follow each other in memory, and are read sixteen bytes at a time; where channels lie apart (`convolution`), that
is two or four. What a convolution multiplies is gathered on the way and never stored.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .choice import PixelTiles, Shape, pixel_tiles
from .convolution import PADS, matrix_block, matrix_precision

PROGRAMS = 1056
"""Programs that a gradient by the weights is split into: eight for each multiprocessor of a large GPU."""
NORMED = 16384
"""Most numbers of a sample that are normalised by one program."""


@triton.jit(do_not_specialize=PADS)
def _convolve(
    x, w, b, y, positions, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over k of x[m, k] w[k, f]: m a position of the output, k = (row, column, channel) of a patch."""
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
    if C % KB == 0:  # one position of the kernel after the other
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
    target = y + model * positions * F + m[:, None] * F + f[None, :]
    tl.store(target, total.to(y.dtype.element_ty), (m < positions)[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=PADS)
def _input_gradient(
    g, w, dx, batch, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
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
    target = dx + model * batch * (H * W * C) + ((sample * H + row) * W + column)[:, None] * C + ch[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), inside[:, None] & (ch < C)[None, :])


@triton.jit(do_not_specialize=PADS)
def _weight_gradient(
    x, g, dw, db, models, positions, top, left, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[f, k] = sum over m of g[m, f] x[m, k], over this program's share of the positions m."""
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
    at = (part * models + model) * F + f
    target = dw + (at[None, :] * C + c[:, None]) * (KH * KW) + t[:, None]
    tl.store(target, total, known[:, None] & (f < F)[None, :])
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(2) % KS == 0:
            tl.store(db + at, slopes, f < F)


def _block(size: int, most: int) -> int:
    """The largest power of two that goes into the size, a multiple of 16."""
    return min(most, size & -size)


def forward(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: PixelTiles) -> Tensor:
    """Of images [N, batch, height, width, channels] and weights [N, filters, channels, kernel, kernel]."""
    oh, ow = shape.out
    y = x.new_empty(shape.models, shape.batch, oh, ow, shape.filters)
    positions, block = shape.batch * oh * ow, matrix_block(shape.filters, tiles.others)
    width = _block(shape.channels, tiles.inner) if shape.channels % 16 == 0 else 32
    grid = (triton.cdiv(positions, tiles.positions), shape.models, triton.cdiv(shape.filters, block))
    _convolve[grid](
        x, weight.permute(0, 3, 4, 2, 1).to(x.dtype).contiguous(), bias, y, positions, *shape.padding, **shape.sizes,
        BIAS=bias is not None, FB=block, MB=tiles.positions, KB=width, PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def by_input(shape: Shape, g: Tensor, weight: Tensor, tiles: PixelTiles) -> Tensor:
    dx = g.new_empty(shape.models, shape.batch, shape.height, shape.width, shape.channels)
    (sh, sw), block = shape.stride, matrix_block(shape.channels, tiles.others)
    across = triton.cdiv(shape.channels, block)
    positions = shape.batch * triton.cdiv(shape.height, sh) * triton.cdiv(shape.width, sw)
    _input_gradient[triton.cdiv(positions, tiles.positions), shape.models, sh * sw * across](
        g, weight.permute(0, 3, 4, 1, 2).to(g.dtype).contiguous(), dx, shape.batch, *shape.padding, **shape.sizes,
        CB=block, MB=tiles.positions, FB=_block(shape.filters, tiles.inner), CS=across,
        PRECISION=matrix_precision(), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dx


def by_weight(
    shape: Shape, x: Tensor, g: Tensor, biased: bool, tiles: PixelTiles
) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in order."""
    oh, ow = shape.out
    width, positions = shape.channels * shape.kernel[0] * shape.kernel[1], shape.batch * oh * ow
    filters, columns = matrix_block(shape.filters, tiles.others), matrix_block(width, tiles.inner)
    step = tiles.positions
    across = triton.cdiv(width, columns)
    pieces = triton.cdiv(shape.filters, filters) * across
    wanted = max(1, min(PROGRAMS // (shape.models * pieces), positions // (4 * step)))
    share = triton.cdiv(triton.cdiv(positions, wanted), step) * step
    parts = triton.cdiv(positions, share)
    sizes = parts, shape.models, shape.filters, shape.channels, *shape.kernel
    dw = x.new_empty(sizes, dtype=torch.float32)
    db = x.new_empty(sizes[:3], dtype=torch.float32) if biased else None
    _weight_gradient[parts, shape.models, pieces](
        x, g, dw, db, shape.models, positions, *shape.padding, share, **shape.sizes, BIAS=biased,
        FB=filters, MB=step, KB=columns, KS=across, PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if parts == 1:
        return dw[0], None if db is None else db[0]
    return dw.sum(0), None if db is None else db.sum(0)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.biased = shape, bias is not None
        return forward(shape, x, weight, bias, pixel_tiles("forward", shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shape, g = ctx.shape, g.contiguous()
        dx = by_input(shape, g, weight, pixel_tiles("by_input", shape)) if ctx.needs_input_grad[0] else None
        return dx, *by_weight(shape, x, g, ctx.biased, pixel_tiles("by_weight", shape)), None


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """The convolution of images [N, batch, height, width, channels] with weights [N, filters, channels, kernel, kernel]
    and biases [N, filters]."""
    return _Conv.apply(x, weight, bias, shape)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _relu_pool(x, y, count, W: tl.constexpr, C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E501
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = i // C
    at = (place // (PH * PW) * (H * W) + place % (PH * PW) // PW * (2 * W) + place % PW * 2) * C + i % C
    here = i < count
    top = tl.maximum(tl.load(x + at, here, 0.0), tl.load(x + at + C, here, 0.0))
    low = tl.maximum(tl.load(x + at + W * C, here, 0.0), tl.load(x + at + (W + 1) * C, here, 0.0))
    tl.store(y + i, tl.maximum(tl.maximum(top, low), 0.0), here)


@triton.jit
def _relu_pool_gradient(x, g, dx, count, W: tl.constexpr, C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E501
    """The slope goes to the first of the largest, if it is above zero."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = i // C
    at = (place // (PH * PW) * (H * W) + place % (PH * PW) // PW * (2 * W) + place % PW * 2) * C + i % C
    here = i < count
    a, b = tl.load(x + at, here, 0.0), tl.load(x + at + C, here, 0.0)
    c, d = tl.load(x + at + W * C, here, 0.0), tl.load(x + at + (W + 1) * C, here, 0.0)
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    slope = tl.where(most > 0, tl.load(g + i, here, 0.0), 0.0)
    is_a = a == most
    is_b = (b == most) & ~is_a
    is_c = (c == most) & ~is_a & ~is_b
    is_d = ~(is_a | is_b | is_c)
    tl.store(dx + at, tl.where(is_a, slope, 0.0), here)
    tl.store(dx + at + C, tl.where(is_b, slope, 0.0), here)
    tl.store(dx + at + W * C, tl.where(is_c, slope, 0.0), here)
    tl.store(dx + at + (W + 1) * C, tl.where(is_d, slope, 0.0), here)


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        models, batch, height, width, channels = x.shape
        y = x.new_empty(models, batch, height // 2, width // 2, channels)
        ctx.save_for_backward(x)
        sizes = width, channels, height // 2, width // 2, height
        _relu_pool[(triton.cdiv(y.numel(), 1024),)](x, y, y.numel(), *sizes, 1024)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        height, width, channels = x.shape[2:]
        dx = torch.empty_like(x) if height % 2 == width % 2 == 0 else torch.zeros_like(x)
        sizes = width, channels, height // 2, width // 2, height
        _relu_pool_gradient[(triton.cdiv(g.numel(), 1024),)](x, g.contiguous(), dx, g.numel(), *sizes, 1024)
        return dx


def relu_pool(x: Tensor) -> Tensor:
    """`F.max_pool2d(F.relu(x), 2)` of images [N, batch, height, width, channels]."""
    return _ReluPool.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _together(by_channel, c, G: tl.constexpr):
    """The sum over a channel's group, for each channel."""
    same = c[:, None] // G == c[None, :] // G
    return tl.sum(tl.where(same, by_channel[None, :], 0.0), 1)


@triton.jit
def _norm(
    x, y, scale, shift, means, spreads, batch, eps,
    C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, PB: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """CB channels of one sample, whole groups of G, P pixels each: zero mean, unit variance, scale, shift, ReLU."""
    one = tl.program_id(0)
    model = one // batch
    c, p = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, PB)
    known = (p < P)[:, None] & (c < C)[None, :]
    at = one.to(tl.int64) * (P * C) + p[:, None] * C + c[None, :]
    given = tl.load(x + at, known, 0.0).to(tl.float32)
    mean = _together(tl.sum(given, 0), c, G) / (G * P)
    away = tl.where(known, given - mean[None, :], 0.0)
    spread = 1 / tl.sqrt(_together(tl.sum(away * away, 0), c, G) / (G * P) + eps)
    a, b = tl.load(scale + model * C + c, c < C, 0.0), tl.load(shift + model * C + c, c < C, 0.0)
    found = away * (spread * a)[None, :] + b[None, :]
    if RELU:
        found = tl.maximum(found, 0.0)
    tl.store(y + at, found.to(y.dtype.element_ty), known)
    tl.store(means + one * C + c, mean, c < C)
    tl.store(spreads + one * C + c, spread, c < C)


@triton.jit
def _norm_gradient(
    x, g, dx, scale, shift, means, spreads, da, db, batch,
    C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, PB: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0)
    model = one // batch
    c, p = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, PB)
    known = (p < P)[:, None] & (c < C)[None, :]
    at = one.to(tl.int64) * (P * C) + p[:, None] * C + c[None, :]
    mean, spread = tl.load(means + one * C + c, c < C, 0.0), tl.load(spreads + one * C + c, c < C, 0.0)
    a = tl.load(scale + model * C + c, c < C, 0.0)
    unit = tl.where(known, (tl.load(x + at, known, 0.0).to(tl.float32) - mean[None, :]) * spread[None, :], 0.0)
    slope = tl.load(g + at, known, 0.0).to(tl.float32)
    if RELU:
        b = tl.load(shift + model * C + c, c < C, 0.0)
        slope = tl.where(unit * a[None, :] + b[None, :] > 0, slope, 0.0)
    by_scale, by_shift = tl.sum(slope * unit, 0), tl.sum(slope, 0)
    tl.store(da + one * C + c, by_scale, c < C)
    tl.store(db + one * C + c, by_shift, c < C)
    even, along = _together(by_shift * a, c, G) / (G * P), _together(by_scale * a, c, G) / (G * P)
    found = (slope * a[None, :] - even[None, :] - unit * along[None, :]) * spread[None, :]
    tl.store(dx + at, found.to(dx.dtype.element_ty), known)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
        x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
        models, batch, height, width, channels = x.shape
        pixels, members = triton.next_power_of_2(height * width), channels // groups
        block = triton.next_power_of_2(channels)
        while block * pixels > NORMED and block % (2 * members) == 0:
            block //= 2
        ctx.grid, ctx.batch = (models * batch, triton.cdiv(channels, block)), batch
        ctx.sizes = {"C": channels, "G": members, "P": height * width, "CB": block, "PB": pixels, "RELU": relu}
        ctx.sizes["num_warps"] = 8 if block * pixels >= 8192 else 4
        y = torch.empty_like(x)
        means, spreads = x.new_empty(2, models * batch, channels, dtype=torch.float32)
        _norm[ctx.grid](x, y, scale, shift, means, spreads, batch, eps, **ctx.sizes)
        ctx.save_for_backward(x, scale, shift, means, spreads)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, scale, shift, means, spreads = ctx.saved_tensors
        dx = torch.empty_like(x)
        da, db = x.new_empty(2, *x.shape[:2], x.shape[-1], dtype=torch.float32)
        _norm_gradient[ctx.grid](x, g.contiguous(), dx, scale, shift, means, spreads, da, db, ctx.batch, **ctx.sizes)
        return dx, da.sum(1).view_as(scale), db.sum(1).view_as(shift), None, None, None


def group_norm(x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
    """`F.group_norm` of each model's images [N, batch, height, width, channels] with its own scale and shift
    [N, channels], `groups` groups a model, and a ReLU after it if asked for."""
    return _Norm.apply(x, scale, shift, groups, eps, relu)  # type: ignore[no-any-return, no-untyped-call]
