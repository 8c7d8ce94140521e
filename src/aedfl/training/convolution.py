"""The convolution of N small models at once as GPU kernels, written in Triton.

Libraries run a grouped convolution of a few channels model by model, or turn it round in memory first. Here it is one
product of matrices per model, whose operand (the image patches) is gathered on the way and never stored; or, over
narrow images, of whole rows with banded matrices (`bands`). Where the library is faster all the same (see `choice`), it
takes over, pass by pass.
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
from torch.nn import functional as F

from . import bands
from .choice import Bands, Precision, Shape, Tiles, choose

PROGRAMS = 1056
"""Programs that a gradient by the weights is split into: eight for each multiprocessor of a large GPU."""
PADS = ["top", "left"]
"""The padding is a number of the run. As a constant it becomes an addition of pairs of 16-bit numbers, of which ptxas
12.8 loses the constant if it is for one of the pair only: positions are then off by the padding.

All other numbers are compiled for their values (1, multiples of 16, others): without that, loads and stores are
narrower, and a step of 100 LeNets takes a quarter longer."""


@triton.jit(do_not_specialize=PADS)
def _convolve(
    x, w, b, y, models, positions, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[f, m] = sum over k of w[f, k] x[k, m]: m a position of the output, k = (channel, row, column) of a patch."""
    model = tl.program_id(1)
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (OH * OW), m % (OH * OW)
    row, column = place // OW * SH - top, place % OW * SW - left
    start = (sample * models + model) * (C * H * W) + row * W + column
    total = tl.zeros((FB, MB), tl.float32)
    for k0 in range(0, C * KH * KW, KB):
        k = k0 + tl.arange(0, KB)
        channel, inside = k // (KH * KW), k % (KH * KW)
        kr, kc = inside // KW, inside % KW
        there = (k < C * KH * KW)[:, None] & (m < positions)[None, :]
        if PH + PW > 0:
            r, c = row[None, :] + kr[:, None], column[None, :] + kc[:, None]
            there &= (r >= 0) & (r < H) & (c >= 0) & (c < W)
        patch = tl.load(x + start[None, :] + (channel * H * W + kr * W + kc)[:, None], there, 0.0)
        known = (f < F)[:, None] & (k < C * KH * KW)[None, :]
        weight = tl.load(w + (model * F + f)[:, None] * (C * KH * KW) + k[None, :], known, 0.0)
        total = tl.dot(weight.to(patch.dtype), patch, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(b + model * F + f, f < F, 0.0)[:, None]
    target = y + ((sample * models + model) * F)[None, :] * (OH * OW) + f[:, None] * (OH * OW) + place[None, :]
    tl.store(target, total.to(y.dtype.element_ty), (f < F)[:, None] & (m < positions)[None, :])


@triton.jit(do_not_specialize=PADS)
def _input_gradient(
    g, w, dx, models, positions, top, left,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CB: tl.constexpr, MB: tl.constexpr, FB: tl.constexpr, FS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[c, m] = sum over f and t of w[f, c, t] g[f, m - t]: m a position of the input, t one of the kernel.

    One position of the kernel after the other: where its slopes lie, and whether they are there, is the same for all
    filters.
    """
    model = tl.program_id(1)
    ch = tl.program_id(2) * CB + tl.arange(0, CB)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (H * W), m % (H * W)
    row, column = place // W + top, place % W + left
    start = (sample * models + model) * (F * OH * OW)
    total = tl.zeros((CB, MB), tl.float32)
    for i in range(0, KH * KW * FS):
        t, f = i // FS, i % FS * FB + tl.arange(0, FB)
        r, c = row - t // KW, column - t % KW
        there = (m < positions) & (r >= 0) & (c >= 0)
        if SH * SW > 1:
            there &= (r % SH == 0) & (c % SW == 0)
            r, c = r // SH, c // SW
        there &= (r < OH) & (c < OW)
        at = start + r * OW + c
        slope = tl.load(g + at[None, :] + (f * (OH * OW))[:, None], there[None, :] & (f < F)[:, None], 0.0)
        known = (ch < C)[:, None] & (f < F)[None, :]
        offset = (model * F + f)[None, :] * (C * KH * KW) + ch[:, None] * (KH * KW) + t
        weight = tl.load(w + offset, known, 0.0)
        total = tl.dot(weight.to(slope.dtype), slope, total, input_precision=PRECISION)
    target = dx + ((sample * models + model) * C)[None, :] * (H * W) + ch[:, None] * (H * W) + place[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), (ch < C)[:, None] & (m < positions)[None, :])


@triton.jit(do_not_specialize=PADS)
def _weight_gradient(
    x, g, dw, db, models, positions, top, left, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[f, k] = sum over m of g[f, m] x[k, m], over this program's share of the positions m."""
    part, model = tl.program_id(0), tl.program_id(1)
    f = tl.program_id(2) // KS * FB + tl.arange(0, FB)
    k = tl.program_id(2) % KS * KB + tl.arange(0, KB)
    channel, inside = k // (KH * KW), k % (KH * KW)
    kr, kc = inside // KW, inside % KW
    total = tl.zeros((FB, KB), tl.float32)
    slopes = tl.zeros((FB,), tl.float32)
    for m0 in range(part * share, (part + 1) * share, MB):
        m = m0 + tl.arange(0, MB)
        sample, place = m // (OH * OW), m % (OH * OW)
        row, column = place // OW * SH - top, place % OW * SW - left
        start = (sample * models + model) * (C * H * W) + row * W + column
        there = (k < C * KH * KW)[:, None] & (m < positions)[None, :]
        if PH + PW > 0:
            r, c = row[None, :] + kr[:, None], column[None, :] + kc[:, None]
            there &= (r >= 0) & (r < H) & (c >= 0) & (c < W)
        patch = tl.load(x + start[None, :] + (channel * H * W + kr * W + kc)[:, None], there, 0.0)
        source = g + ((sample * models + model) * F)[None, :] * (OH * OW) + f[:, None] * (OH * OW) + place[None, :]
        slope = tl.load(source, (f < F)[:, None] & (m < positions)[None, :], 0.0)
        total = tl.dot(slope.to(patch.dtype), tl.trans(patch), total, input_precision=PRECISION)
        if BIAS:
            slopes += tl.sum(slope.to(tl.float32), 1)
    at = (part * models + model) * F + f
    known = (f < F)[:, None] & (k < C * KH * KW)[None, :]
    tl.store(dw + at[:, None] * (C * KH * KW) + k[None, :], total, known)
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if tl.program_id(2) % KS == 0:
            tl.store(db + at, slopes, f < F)


def _precision(x: Tensor) -> Precision:
    if x.dtype is torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"


def matrix_precision() -> str:
    """How matrix units treat numbers of 32 bits."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def matrix_block(size: int, most: int) -> int:
    """Matrix units want at least 16 rows."""
    return min(most, max(16, int(triton.next_power_of_2(size))))


def forward(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | Bands) -> Tensor:
    if isinstance(tiles, Bands):
        return bands.forward(shape, x, weight, bias, tiles, matrix_precision())
    oh, ow = shape.out
    y = x.new_empty(shape.batch, shape.models * shape.filters, oh, ow)
    positions, block = shape.batch * oh * ow, matrix_block(shape.filters, 64)
    grid = (triton.cdiv(positions, tiles.positions), shape.models, triton.cdiv(shape.filters, block))
    _convolve[grid](
        x, weight, bias, y, shape.models, positions, *shape.padding, **shape.sizes, BIAS=bias is not None,
        FB=block, MB=tiles.positions, KB=tiles.patch, PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def by_input(shape: Shape, g: Tensor, weight: Tensor, tiles: Tiles | Bands) -> Tensor:
    if isinstance(tiles, Bands):
        return bands.by_input(shape, g, weight, tiles, matrix_precision())
    dx = g.new_empty(shape.batch, shape.models * shape.channels, shape.height, shape.width)
    positions, block = shape.batch * shape.height * shape.width, matrix_block(shape.channels, 64)
    filters = matrix_block(shape.filters, tiles.patch)
    grid = (triton.cdiv(positions, tiles.positions), shape.models, triton.cdiv(shape.channels, block))
    _input_gradient[grid](
        g, weight, dx, shape.models, positions, *shape.padding, **shape.sizes,
        CB=block, MB=tiles.positions, FB=filters, FS=triton.cdiv(shape.filters, filters), PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dx


def by_weight(shape: Shape, x: Tensor, g: Tensor, biased: bool, tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in order."""
    oh, ow = shape.out
    width, positions = shape.channels * shape.kernel[0] * shape.kernel[1], shape.batch * oh * ow
    filters, columns, step = matrix_block(shape.filters, 64), matrix_block(width, tiles.patch), tiles.positions
    across = triton.cdiv(width, columns)
    pieces = triton.cdiv(shape.filters, filters) * across
    wanted = max(1, min(PROGRAMS // (shape.models * pieces), positions // (4 * step)))
    share = triton.cdiv(triton.cdiv(positions, wanted), step) * step
    parts = triton.cdiv(positions, share)
    dw = x.new_empty(parts, shape.models * shape.filters, width, dtype=torch.float32)
    db = x.new_empty(parts, shape.models * shape.filters, dtype=torch.float32) if biased else None
    _weight_gradient[(parts, shape.models, pieces)](
        x, g, dw, db, shape.models, positions, *shape.padding, share, **shape.sizes, BIAS=biased,
        FB=filters, MB=step, KB=columns, KS=across, PRECISION=matrix_precision(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dw.sum(0), None if db is None else db.sum(0)


def library_forward(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    filters, biases = _filters(shape, weight).to(x.dtype), None if bias is None else bias.flatten().to(x.dtype)
    return F.conv2d(x, filters, biases, shape.stride, shape.padding, 1, shape.models)


def library_gradients(
    shape: Shape, x: Tensor, g: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those that are wanted of the gradients by input, weights and bias."""
    sizes = [shape.models * shape.filters], shape.stride, shape.padding, (1, 1), False, (0, 0), shape.models
    run = torch.ops.aten.convolution_backward
    return run(g, x, _filters(shape, weight).to(x.dtype), *sizes, wanted)  # type: ignore[no-any-return]


def _filters(shape: Shape, weight: Tensor) -> Tensor:
    return weight.reshape(shape.models * shape.filters, shape.channels, *shape.kernel)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.bias = shape, None if bias is None else bias.shape
        tiles = choose("forward", shape, _precision(x))
        if tiles is None:
            return library_forward(shape, x, weight, bias)
        return forward(shape, x, weight, bias, tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shape, biased, g = ctx.shape, ctx.bias is not None, g.contiguous()
        wants_input, precision = ctx.needs_input_grad[0], _precision(x)
        input_tiles = choose("by_input", shape, precision)
        weight_tiles = choose("by_weight", shape, precision)
        left = wants_input and input_tiles is None, weight_tiles is None, biased and weight_tiles is None
        dx, dw, db = library_gradients(shape, x, g, weight, left) if any(left) else (None, None, None)
        if wants_input and input_tiles is not None:
            dx = by_input(shape, g, weight, input_tiles)
        if weight_tiles is not None:
            assert isinstance(weight_tiles, Tiles), "no rule has bands for it"
            dw, db = by_weight(shape, x, g, biased, weight_tiles)
        assert dw is not None
        return dx, dw.view_as(weight), None if db is None else db.view(ctx.bias), None


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """`F.conv2d(x, weight, bias, …, groups=N)` for weights [N, filters, channels, kernel, kernel]."""
    return _Conv.apply(x, weight, bias, shape)  # type: ignore[no-any-return, no-untyped-call]
