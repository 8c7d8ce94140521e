"""Poolings and norms of N models on images whose channels lie side by side (see `pixels`), written in Triton."""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

NORMED = 8192
"""Numbers of a sample that a norm takes at a time."""
BESIDE = 64
"""Channels of them, at most where groups can be shared out so far: sums over a group cost the square of this."""


@triton.jit
def _larger(a, b):
    """A number that is none is not lost."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _relu_pool(x, y, count, W: tl.constexpr, C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E501
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = i // C
    at = (place // (PH * PW) * (H * W) + place % (PH * PW) // PW * (2 * W) + place % PW * 2) * C + i % C
    here = i < count
    top = _larger(tl.load(x + at, here, 0.0), tl.load(x + at + C, here, 0.0))
    low = _larger(tl.load(x + at + W * C, here, 0.0), tl.load(x + at + (W + 1) * C, here, 0.0))
    tl.store(y + i, _larger(_larger(top, low), 0.0), here)


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
def _sum(x, y, parts, size, PB: tl.constexpr, BLOCK: tl.constexpr):
    outer = tl.program_id(1)
    i, p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PB)
    total = tl.zeros((BLOCK,), tl.float32)
    for p0 in range(0, parts, PB):
        known = (p0 + p < parts)[:, None] & (i < size)[None, :]
        total += tl.sum(tl.load(x + (outer * parts + p0 + p)[:, None] * size + i[None, :], known, 0.0), 0)
    tl.store(y + outer * size + i, total, i < size)


def summed(x: Tensor) -> Tensor:
    """The sums [N, size] of numbers [N, parts, size], in a fixed order: the library is slow where sums are short."""
    outer, parts, size = x.shape
    y, high = x.new_empty(outer, size), min(64, int(triton.next_power_of_2(parts)))
    block = min(32, int(triton.next_power_of_2(size)))
    _sum[triton.cdiv(size, block), outer](x, y, parts, size, high, block, num_warps=4)
    return y


@triton.jit
def _norm(
    x, beside, y, scale, shift, means, spreads, batch, eps,
    C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, PB: tl.constexpr,
    RELU: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """CB channels of one sample, whole groups of G, P pixels each: zero mean, unit variance, scale, shift; then what
    lies beside is added, if anything does, and a ReLU follows.

    PB pixels at a time; where those are not all, they are read twice, and each channel's mean and squares are put
    together from those of its parts (Chan et al., 1979).
    """
    one = tl.program_id(0)
    model = one // batch
    c, p = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, PB)
    start = one.to(tl.int64) * (P * C)
    mean, squares = tl.zeros((CB,), tl.float32), tl.zeros((CB,), tl.float32)
    for p0 in range(0, P, PB):
        known = (p0 + p < P)[:, None] & (c < C)[None, :]
        given = tl.load(x + start + (p0 + p)[:, None] * C + c[None, :], known, 0.0).to(tl.float32)
        count = tl.minimum(P - p0, PB)
        middle = tl.sum(given, 0) / count
        away = tl.where(known, given - middle[None, :], 0.0)
        step = middle - mean
        squares += tl.sum(away * away, 0) + step * step * (p0 * (count / (p0 + count)))
        mean += step * (count / (p0 + count))
    common = _together(mean, c, G) / G
    step = mean - common
    spread = 1 / tl.sqrt(_together(squares + P * step * step, c, G) / (G * P) + eps)
    a, b = tl.load(scale + model * C + c, c < C, 0.0), tl.load(shift + model * C + c, c < C, 0.0)
    a = spread * a
    for p0 in range(0, P, PB):
        known = (p0 + p < P)[:, None] & (c < C)[None, :]
        at = start + (p0 + p)[:, None] * C + c[None, :]
        found = (tl.load(x + at, known, 0.0).to(tl.float32) - common[None, :]) * a[None, :] + b[None, :]
        if JOIN:
            found += tl.load(beside + at, known, 0.0).to(tl.float32)
        if RELU:
            found = _larger(found, 0.0)
        tl.store(y + at, found.to(y.dtype.element_ty), known)
    tl.store(means + one * C + c, common, c < C)
    tl.store(spreads + one * C + c, spread, c < C)


@triton.jit
def _norm_slope(
    x, y, g, at, known, mean, spread, a, b, RELU: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Normalised numbers, and the slopes by what comes before the ReLU. Where something was added, whether the ReLU was
    open is read from its result y, and not computed again."""
    unit = (tl.load(x + at, known, 0.0).to(tl.float32) - mean[None, :]) * spread[None, :]
    unit = tl.where(known, unit, 0.0)
    slope = tl.load(g + at, known, 0.0).to(tl.float32)
    if RELU:
        if JOIN:
            slope = tl.where(tl.load(y + at, known, 0.0) > 0, slope, 0.0)
        else:
            slope = tl.where(unit * a[None, :] + b[None, :] > 0, slope, 0.0)
    return unit, slope


@triton.jit
def _norm_gradient(
    x, y, g, dx, by_beside, scale, shift, means, spreads, slopes, count, batch,
    C: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, PB: tl.constexpr,
    RELU: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """PB pixels at a time, as forward."""
    one = tl.program_id(0)
    model = one // batch
    c, p = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, PB)
    start = one.to(tl.int64) * (P * C)
    mean, spread = tl.load(means + one * C + c, c < C, 0.0), tl.load(spreads + one * C + c, c < C, 0.0)
    a, b = tl.load(scale + model * C + c, c < C, 0.0), tl.load(shift + model * C + c, c < C, 0.0)
    by_scale, by_shift = tl.zeros((CB,), tl.float32), tl.zeros((CB,), tl.float32)
    for p0 in range(0, P, PB):
        known = (p0 + p < P)[:, None] & (c < C)[None, :]
        at = start + (p0 + p)[:, None] * C + c[None, :]
        unit, slope = _norm_slope(x, y, g, at, known, mean, spread, a, b, RELU, JOIN)
        if JOIN:
            tl.store(by_beside + at, slope.to(by_beside.dtype.element_ty), known)
        by_scale += tl.sum(slope * unit, 0)
        by_shift += tl.sum(slope, 0)
    tl.store(slopes + one * C + c, by_scale, c < C)
    tl.store(slopes + count + one * C + c, by_shift, c < C)
    even, along = _together(by_shift * a, c, G) / (G * P), _together(by_scale * a, c, G) / (G * P)
    for p0 in range(0, P, PB):
        known = (p0 + p < P)[:, None] & (c < C)[None, :]
        at = start + (p0 + p)[:, None] * C + c[None, :]
        unit, slope = _norm_slope(x, y, g, at, known, mean, spread, a, b, RELU, JOIN)
        found = (slope * a[None, :] - even[None, :] - unit * along[None, :]) * spread[None, :]
        tl.store(dx + at, found.to(dx.dtype.element_ty), known)


def channels_at_once(channels: int, groups: int) -> int | None:
    """How many of an image's channels one program normalises, whole groups; None where those are too many."""
    block, members = int(triton.next_power_of_2(channels)), channels // groups
    while block > BESIDE and block % (2 * members) == 0:
        block //= 2
    return block if block <= 2 * BESIDE else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, beside: Tensor | None, groups: int, eps: float, relu: bool
    ) -> Tensor:
        x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
        beside = None if beside is None else beside.contiguous()
        models, batch, height, width, channels = x.shape
        block, members = channels_at_once(channels, groups), channels // groups
        assert block is not None, "to be asked before"
        pixels = min(int(triton.next_power_of_2(height * width)), NORMED // block)
        ctx.grid, ctx.batch = (models * batch, triton.cdiv(channels, block)), batch
        ctx.sizes = {"C": channels, "G": members, "P": height * width, "CB": block, "PB": pixels, "RELU": relu}
        ctx.sizes |= {"JOIN": beside is not None, "num_warps": min(16, max(4, block * pixels // 1024))}
        y = torch.empty_like(x)
        means, spreads = x.new_empty(2, models * batch, channels, dtype=torch.float32)
        _norm[ctx.grid](x, beside, y, scale, shift, means, spreads, batch, eps, **ctx.sizes)
        ctx.save_for_backward(x, y if relu and beside is not None else None, scale, shift, means, spreads)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, shift, means, spreads = ctx.saved_tensors
        dx, by_beside = torch.empty_like(x), torch.empty_like(x) if ctx.sizes["JOIN"] else None
        models, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
        slopes = x.new_empty(2 * models, batch, channels, dtype=torch.float32)
        given = (x, y, g.contiguous(), dx, by_beside, scale, shift, means, spreads, slopes, slopes.numel() // 2)
        _norm_gradient[ctx.grid](*given, ctx.batch, **ctx.sizes)
        by_scale, by_shift = summed(slopes).view(2, models, channels)
        return dx, by_scale.view_as(scale), by_shift.view_as(shift), by_beside, None, None, None


def group_norm(
    x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool, beside: Tensor | None = None
) -> Tensor:
    """`F.group_norm` of each model's images [N, batch, height, width, channels] with its own scale and shift
    [N, channels], `groups` groups a model, plus images beside it, and a ReLU after it if asked for. Only where
    `channels_at_once` says so."""
    return _Norm.apply(x, scale, shift, beside, groups, eps, relu)  # type: ignore[no-any-return, no-untyped-call]
