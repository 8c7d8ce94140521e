"""GPU kernels for the small layers of N models at once, written in Triton.

Libraries run a grouped convolution of a few channels model by model, and turn it round in memory first; matrix units
need more channels than there are. Here every lane of a warp has positions of the output of its own and all filters in
registers, and a program is a single warp. Sums run in float32 and in a fixed order, so that results are the same in
every run. `stacked` uses these kernels on CUDA devices; the plain path, PyTorch's own functions, is their oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

POSITIONS = 256
"""Positions that a program computes, eight for each lane."""
LANES = 32
PROGRAMS = 4096
"""Programs that a gradient by the weights is split into: enough to fill a large GPU."""


@dataclass(frozen=True)
class Shape:
    """What a convolution of N models looks like; images are [batch, N * channels, height, width]."""

    models: int
    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        return (self.height + 2 * ph - kh) // sh + 1, (self.width + 2 * pw - kw) // sw + 1

    @property
    def sizes(self) -> dict[str, int]:
        """The compile-time constants of the kernels."""
        oh, ow = self.out
        return {
            "C": self.channels, "H": self.height, "W": self.width, "F": self.filters, "OH": oh, "OW": ow,
            "KH": self.kernel[0], "KW": self.kernel[1], "SH": self.stride[0], "SW": self.stride[1],
            "PH": self.padding[0], "PW": self.padding[1],
        }  # fmt: skip


@triton.jit
def _convolve(
    x, w, b, y, models, positions,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, MB: tl.constexpr,
):  # fmt: skip
    """y[f, m] is the sum over channels and taps of the kernel; m is a position of the output in the whole batch."""
    model = tl.program_id(1)
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (OH * OW), m % (OH * OW)
    row, column = place // OW * SH - PH, place % OW * SW - PW
    image = x + (sample * models + model) * (C * H * W) + row * W + column
    weight = w + (model * F + f) * (C * KH * KW)
    total = tl.zeros((FB, MB), tl.float32)
    for c in range(C):
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                there = m < positions
                if PH + PW > 0:
                    there &= (row + i >= 0) & (row + i < H) & (column + j >= 0) & (column + j < W)
                pixel = tl.load(image + c * (H * W) + i * W + j, there, 0.0).to(tl.float32)
                tap = tl.load(weight + c * (KH * KW) + i * KW + j, f < F, 0.0)
                total += tap[:, None] * pixel[None, :]
    if BIAS:
        total += tl.load(b + model * F + f, f < F, 0.0)[:, None]
    target = y + ((sample * models + model) * F)[None, :] * (OH * OW) + f[:, None] * (OH * OW) + place[None, :]
    tl.store(target, total.to(y.dtype.element_ty), (f < F)[:, None] & (m < positions)[None, :])


@triton.jit
def _input_gradient(
    g, w, dx, models, positions,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CB: tl.constexpr, MB: tl.constexpr,
):  # fmt: skip
    """dx[c, m] is the sum over filters and taps; m is a position of the input in the whole batch."""
    model = tl.program_id(1)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (H * W), m % (H * W)
    row, column = place // W + PH, place % W + PW
    slopes = g + (sample * models + model) * (F * OH * OW)
    weight = w + model * (F * C * KH * KW) + c * (KH * KW)
    total = tl.zeros((CB, MB), tl.float32)
    for f in range(F):
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                there = (m < positions) & (row >= i) & (column >= j)
                if SH * SW > 1:
                    there &= ((row - i) % SH == 0) & ((column - j) % SW == 0)
                r, k = (row - i) // SH, (column - j) // SW
                slope = tl.load(slopes + f * (OH * OW) + r * OW + k, there & (r < OH) & (k < OW), 0.0).to(tl.float32)
                tap = tl.load(weight + f * (C * KH * KW) + i * KW + j, c < C, 0.0)
                total += tap[:, None] * slope[None, :]
    target = dx + ((sample * models + model) * C)[None, :] * (H * W) + c[:, None] * (H * W) + place[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), (c < C)[:, None] & (m < positions)[None, :])


@triton.jit
def _weight_gradient(
    x, g, dw, db, models, positions, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, FB: tl.constexpr, JB: tl.constexpr, MB: tl.constexpr,
):  # fmt: skip
    """dw[f, c, i, :], the sum over this program's share of the positions; lanes are added at the end."""
    part, model = tl.program_id(0), tl.program_id(1)
    line = tl.program_id(2) % (C * KH)
    c, i = line // KH, line % KH
    f = tl.program_id(2) // (C * KH) * FB + tl.arange(0, FB)
    j = tl.arange(0, JB)
    total = tl.zeros((JB, FB, MB), tl.float32)
    plain = tl.zeros((FB, MB), tl.float32)
    for m0 in range(part * share, (part + 1) * share, MB):
        m = m0 + tl.arange(0, MB)
        sample, place = m // (OH * OW), m % (OH * OW)
        row, column = place // OW * SH - PH + i, place % OW * SW - PW
        there = (j < KW)[:, None] & (m < positions)[None, :]
        if PH + PW > 0:
            k = column[None, :] + j[:, None]
            there &= ((row >= 0) & (row < H))[None, :] & (k >= 0) & (k < W)
        start = ((sample * models + model) * C + c) * (H * W) + row * W + column
        pixels = tl.load(x + start[None, :] + j[:, None], there, 0.0).to(tl.float32)
        source = g + ((sample * models + model) * F)[None, :] * (OH * OW) + f[:, None] * (OH * OW) + place[None, :]
        slopes = tl.load(source, (f < F)[:, None] & (m < positions)[None, :], 0.0).to(tl.float32)
        total += pixels[:, None, :] * slopes[None, :, :]
        if BIAS:
            plain += slopes
    at = (part * models + model) * F + f
    target = dw + at[None, :] * (C * KH * KW) + line * KW + j[:, None]
    tl.store(target, tl.sum(total, 2), (j < KW)[:, None] & (f < F)[None, :])
    if BIAS:
        if line == 0:
            tl.store(db + at, tl.sum(plain, 1), f < F)


def _block(size: int) -> int:
    """Filters that a lane holds at a time."""
    return 8 if size <= 8 else 16


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        oh, ow = shape.out
        y = x.new_empty(shape.batch, shape.models * shape.filters, oh, ow)
        positions, block = shape.batch * oh * ow, _block(shape.filters)
        grid = (triton.cdiv(positions, POSITIONS), shape.models, triton.cdiv(shape.filters, block))
        _convolve[grid](
            x, weight, bias, y, shape.models, positions, **shape.sizes,
            BIAS=bias is not None, FB=block, MB=POSITIONS, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.bias = shape, None if bias is None else bias.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        dx = _by_input(ctx.shape, g, weight).view_as(x) if ctx.needs_input_grad[0] else None
        dw, db = _by_weight(ctx.shape, x, g, ctx.bias is not None)
        return dx, dw.view_as(weight), None if db is None else db.view(ctx.bias), None


def _by_input(shape: Shape, g: Tensor, weight: Tensor) -> Tensor:
    dx = g.new_empty(shape.batch, shape.models * shape.channels, shape.height, shape.width)
    positions, block = shape.batch * shape.height * shape.width, _block(shape.channels)
    grid = (triton.cdiv(positions, POSITIONS), shape.models, triton.cdiv(shape.channels, block))
    _input_gradient[grid](
        g, weight, dx, shape.models, positions, **shape.sizes, CB=block, MB=POSITIONS, num_warps=1
    )
    return dx


def _by_weight(shape: Shape, x: Tensor, g: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in order."""
    oh, ow = shape.out
    positions, block = shape.batch * oh * ow, _block(shape.filters)
    lines = shape.channels * shape.kernel[0] * triton.cdiv(shape.filters, block)
    wanted = max(1, min(PROGRAMS // (shape.models * lines), positions // (4 * LANES)))
    share = triton.cdiv(triton.cdiv(positions, wanted), LANES) * LANES
    parts = triton.cdiv(positions, share)
    width = shape.channels * shape.kernel[0] * shape.kernel[1]
    dw = x.new_empty(parts, shape.models * shape.filters, width, dtype=torch.float32)
    db = x.new_empty(parts, shape.models * shape.filters, dtype=torch.float32) if biased else None
    _weight_gradient[(parts, shape.models, lines)](
        x, g, dw, db, shape.models, positions, share, **shape.sizes, BIAS=biased,
        FB=block, JB=triton.next_power_of_2(shape.kernel[1]), MB=LANES, num_warps=1,
    )  # fmt: skip
    return dw.sum(0), None if db is None else db.sum(0)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """`F.conv2d(x, weight, bias, …, groups=N)` for weights [N * filters, channels, kernel, kernel]."""
    return _Conv.apply(x, weight, bias, shape)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _relu_pool(x, y, count, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i // (PH * PW) * (H * W) + i % (PH * PW) // PW * (2 * W) + i % PW * 2
    here = i < count
    top = tl.maximum(tl.load(x + at, here, 0.0), tl.load(x + at + 1, here, 0.0))
    low = tl.maximum(tl.load(x + at + W, here, 0.0), tl.load(x + at + W + 1, here, 0.0))
    tl.store(y + i, tl.maximum(tl.maximum(top, low), 0.0), here)


@triton.jit
def _relu_pool_gradient(
    x, g, dx, count, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    """The slope goes to the first of the largest, if it is above zero."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i // (PH * PW) * (H * W) + i % (PH * PW) // PW * (2 * W) + i % PW * 2
    here = i < count
    a, b = tl.load(x + at, here, 0.0), tl.load(x + at + 1, here, 0.0)
    c, d = tl.load(x + at + W, here, 0.0), tl.load(x + at + W + 1, here, 0.0)
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    slope = tl.where(most > 0, tl.load(g + i, here, 0.0), 0.0)
    is_a = a == most
    is_b = (b == most) & ~is_a
    is_c = (c == most) & ~is_a & ~is_b
    is_d = ~(is_a | is_b | is_c)
    tl.store(dx + at, tl.where(is_a, slope, 0.0), here)
    tl.store(dx + at + 1, tl.where(is_b, slope, 0.0), here)
    tl.store(dx + at + W, tl.where(is_c, slope, 0.0), here)
    tl.store(dx + at + W + 1, tl.where(is_d, slope, 0.0), here)


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        height, width = x.shape[-2:]
        y = x.new_empty(*x.shape[:-2], height // 2, width // 2)
        ctx.save_for_backward(x)
        _relu_pool[(triton.cdiv(y.numel(), 1024),)](x, y, y.numel(), width, height // 2, width // 2, height, 1024)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        height, width = x.shape[-2:]
        dx = torch.empty_like(x) if height % 2 == width % 2 == 0 else torch.zeros_like(x)
        count = g.numel()
        _relu_pool_gradient[(triton.cdiv(count, 1024),)](
            x, g.contiguous(), dx, count, width, height // 2, width // 2, height, 1024
        )
        return dx


def relu_pool(x: Tensor) -> Tensor:
    """`F.max_pool2d(F.relu(x), 2)`."""
    return _ReluPool.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _entropy(
    logits, target, present, losses, slopes, samples, classes, SB: tl.constexpr, KB: tl.constexpr
):
    """The mean loss of a model's mini-batch, and its slope by the logits."""
    model = tl.program_id(0)
    s, k = tl.arange(0, SB), tl.arange(0, KB)
    known = (s < samples)[:, None] & (k < classes)[None, :]
    z = tl.load(logits + (model * samples + s)[:, None] * classes + k[None, :], known, -float("inf")).to(tl.float32)
    z = tl.where((s < samples)[:, None], z, 0.0)
    here = tl.load(present + model * samples + s, s < samples, 0.0)
    label = tl.load(target + model * samples + s, s < samples, 0)
    count = tl.maximum(tl.sum(here, 0), 1.0)
    most = tl.max(z, 1)
    powers = tl.where(known, tl.exp(z - most[:, None]), 0.0)
    total = tl.maximum(tl.sum(powers, 1), 1e-38)
    right = tl.sum(tl.where(k[None, :] == label[:, None], z, 0.0), 1)
    loss = (tl.log(total) + most - right) * here
    tl.store(losses + model, tl.sum(tl.where(s < samples, loss, 0.0), 0) / count)
    slope = (powers / total[:, None] - tl.where(k[None, :] == label[:, None], 1.0, 0.0)) * (here / count)[:, None]
    tl.store(slopes + (model * samples + s)[:, None] * classes + k[None, :], slope, known)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, present: Tensor) -> Tensor:
        models, samples, classes = logits.shape
        losses = logits.new_empty(models, dtype=torch.float32)
        slopes = torch.empty_like(logits, memory_format=torch.contiguous_format, dtype=torch.float32)
        _entropy[(models,)](
            logits.contiguous(), target.contiguous(), present.contiguous(), losses, slopes, samples, classes,
            triton.next_power_of_2(samples), triton.next_power_of_2(classes),
        )  # fmt: skip
        ctx.save_for_backward(slopes)
        ctx.kind = logits.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * g[:, None, None]).to(ctx.kind), None, None


def cross_entropy(logits: Tensor, target: Tensor, present: Tensor) -> Tensor:
    """Mean cross-entropy [N] of logits [N, B, K] over the samples that are present [N, B]."""
    return _Entropy.apply(logits, target, present)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _norm(
    x, y, scale, shift, means, spreads, groups, eps,
    G: tl.constexpr, P: tl.constexpr, GB: tl.constexpr, PB: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """One sample's group of G channels of P pixels each: zero mean, unit variance, scale, shift, ReLU."""
    sample, group = tl.program_id(0), tl.program_id(1)
    c, p = tl.arange(0, GB), tl.arange(0, PB)
    known = (c < G)[:, None] & (p < P)[None, :]
    at = ((sample * groups + group) * G + c)[:, None] * P + p[None, :]
    given = tl.load(x + at, known, 0.0).to(tl.float32)
    mean = tl.sum(given) / (G * P)
    away = tl.where(known, given - mean, 0.0)
    spread = 1 / tl.sqrt(tl.sum(away * away) / (G * P) + eps)
    a, b = tl.load(scale + group * G + c, c < G, 0.0), tl.load(shift + group * G + c, c < G, 0.0)
    found = away * spread * a[:, None] + b[:, None]
    if RELU:
        found = tl.maximum(found, 0.0)
    tl.store(y + at, found.to(y.dtype.element_ty), known)
    tl.store(means + sample * groups + group, mean)
    tl.store(spreads + sample * groups + group, spread)


@triton.jit
def _norm_gradient(
    x, g, dx, scale, shift, means, spreads, da, db, groups,
    G: tl.constexpr, P: tl.constexpr, GB: tl.constexpr, PB: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    sample, group = tl.program_id(0), tl.program_id(1)
    c, p = tl.arange(0, GB), tl.arange(0, PB)
    known = (c < G)[:, None] & (p < P)[None, :]
    at = ((sample * groups + group) * G + c)[:, None] * P + p[None, :]
    mean, spread = tl.load(means + sample * groups + group), tl.load(spreads + sample * groups + group)
    unit = tl.where(known, (tl.load(x + at, known, 0.0).to(tl.float32) - mean) * spread, 0.0)
    a = tl.load(scale + group * G + c, c < G, 0.0)
    slope = tl.load(g + at, known, 0.0).to(tl.float32)
    if RELU:
        b = tl.load(shift + group * G + c, c < G, 0.0)
        slope = tl.where(unit * a[:, None] + b[:, None] > 0, slope, 0.0)
    to = sample * groups * G + group * G + c
    tl.store(da + to, tl.sum(slope * unit, 1), c < G)
    tl.store(db + to, tl.sum(slope, 1), c < G)
    inner = slope * a[:, None]
    pull = tl.sum(inner) / (G * P) + unit * (tl.sum(inner * unit) / (G * P))
    tl.store(dx + at, ((inner - pull) * spread).to(dx.dtype.element_ty), known)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool
    ) -> Tensor:
        x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
        ctx.grid = (len(x), groups)
        size = x.shape[1] // groups, x[0, 0].numel()
        ctx.sizes = {"G": size[0], "P": size[1], "RELU": relu}
        ctx.sizes |= {"GB": triton.next_power_of_2(size[0]), "PB": triton.next_power_of_2(size[1])}
        y = torch.empty_like(x)
        means, spreads = x.new_empty(2, len(x) * groups, dtype=torch.float32)
        _norm[ctx.grid](x, y, scale, shift, means, spreads, groups, eps, **ctx.sizes)
        ctx.save_for_backward(x, scale, shift, means, spreads)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, scale, shift, means, spreads = ctx.saved_tensors
        dx = torch.empty_like(x)
        da, db = x.new_empty(2, len(x), x.shape[1], dtype=torch.float32)
        _norm_gradient[ctx.grid](
            x, g.contiguous(), dx, scale, shift, means, spreads, da, db, ctx.grid[1], **ctx.sizes
        )
        return dx, da.sum(0).view_as(scale), db.sum(0).view_as(shift), None, None, None


def group_norm(x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
    """`F.group_norm(x, groups, scale, shift, eps)`, and a ReLU after it if asked for."""
    return _Norm.apply(x, scale, shift, groups, eps, relu)  # type: ignore[no-any-return, no-untyped-call]
