"""The convolution of N small models at once as GPU kernels, written in Triton.

Libraries run a grouped convolution of a few channels model by model, or turn it round in memory first. Here it is one
product of matrices per model, whose operand (the image patches) is gathered on the way and never stored.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PATCH = 64
"""Positions that one program computes."""
REDUCTION = 32
"""Products that are summed in one go."""
PROGRAMS = 1056
"""Programs that a gradient by the weights is split into: eight for each multiprocessor of a large GPU."""
PADS = ["top", "left"]
"""The padding is a number of the run. As a constant it becomes an addition of pairs of 16-bit numbers, of which ptxas
12.8 loses the constant if it is for one of the pair only: positions are then off by the padding."""


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
    CB: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[c, m] = sum over k of w[k, c] g[k, m]: m a position of the input, k = (filter, row, column) of the kernel."""
    model = tl.program_id(1)
    ch = tl.program_id(2) * CB + tl.arange(0, CB)
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    sample, place = m // (H * W), m % (H * W)
    row, column = place // W + top, place % W + left
    start = (sample * models + model) * (F * OH * OW)
    total = tl.zeros((CB, MB), tl.float32)
    for k0 in range(0, F * KH * KW, KB):
        k = k0 + tl.arange(0, KB)
        filter, inside = k // (KH * KW), k % (KH * KW)
        r, c = row[None, :] - (inside // KW)[:, None], column[None, :] - (inside % KW)[:, None]
        there = (k < F * KH * KW)[:, None] & (m < positions)[None, :] & (r >= 0) & (c >= 0)
        if SH * SW > 1:
            there &= (r % SH == 0) & (c % SW == 0)
            r, c = r // SH, c // SW
        there &= (r < OH) & (c < OW)
        slope = tl.load(g + start[None, :] + (filter * (OH * OW))[:, None] + r * OW + c, there, 0.0)
        known = (ch < C)[:, None] & (k < F * KH * KW)[None, :]
        offset = (model * F + filter)[None, :] * (C * KH * KW) + ch[:, None] * (KH * KW) + inside[None, :]
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


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _block(size: int, most: int) -> int:
    """Matrix units want at least 16 rows."""
    return min(most, max(16, int(triton.next_power_of_2(size))))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        oh, ow = shape.out
        y = x.new_empty(shape.batch, shape.models * shape.filters, oh, ow)
        positions, block = shape.batch * oh * ow, _block(shape.filters, 64)
        grid = (triton.cdiv(positions, PATCH), shape.models, triton.cdiv(shape.filters, block))
        _convolve[grid](
            x, weight, bias, y, shape.models, positions, *shape.padding, **shape.sizes, BIAS=bias is not None,
            FB=block, MB=PATCH, KB=REDUCTION, PRECISION=_precision(), num_warps=2 if block <= 16 else 4,
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
    positions, block = shape.batch * shape.height * shape.width, _block(shape.channels, 64)
    grid = (triton.cdiv(positions, PATCH), shape.models, triton.cdiv(shape.channels, block))
    _input_gradient[grid](
        g, weight, dx, shape.models, positions, *shape.padding, **shape.sizes,
        CB=block, MB=PATCH, KB=REDUCTION, PRECISION=_precision(), num_warps=4,
    )  # fmt: skip
    return dx


def _by_weight(shape: Shape, x: Tensor, g: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in order."""
    oh, ow = shape.out
    width, positions = shape.channels * shape.kernel[0] * shape.kernel[1], shape.batch * oh * ow
    filters, columns, step = _block(shape.filters, 64), _block(width, 128), PATCH // 2
    tiles = triton.cdiv(shape.filters, filters) * triton.cdiv(width, columns)
    wanted = max(1, min(PROGRAMS // (shape.models * tiles), positions // (4 * step)))
    share = triton.cdiv(triton.cdiv(positions, wanted), step) * step
    parts = triton.cdiv(positions, share)
    dw = x.new_empty(parts, shape.models * shape.filters, width, dtype=torch.float32)
    db = x.new_empty(parts, shape.models * shape.filters, dtype=torch.float32) if biased else None
    _weight_gradient[(parts, shape.models, tiles)](
        x, g, dw, db, shape.models, positions, *shape.padding, share, **shape.sizes, BIAS=biased,
        FB=filters, MB=step, KB=columns, KS=triton.cdiv(width, columns), PRECISION=_precision(),
        num_warps=2 if filters <= 16 else 4,
    )  # fmt: skip
    return dw.sum(0), None if db is None else db.sum(0)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """`F.conv2d(x, weight, bias, …, groups=N)` for weights [N * filters, channels, kernel, kernel]."""
    return _Conv.apply(x, weight, bias, shape)  # type: ignore[no-any-return, no-untyped-call]
