"""GPU kernels for the small layers of N models at once, written in Triton.

Sums run in a fixed order, so that results are the same in every run. `stacked` uses these kernels on CUDA devices; the
plain path, PyTorch's own functions, is their oracle.
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

from . import pixel_layers, pixels
from .choice import Shape
from .convolution import conv
from .descent import descend
from .line import line_max

__all__ = [
    "Shape", "conv", "cross_entropy", "descend", "group_norm", "line_max", "pixel_layers", "pixels", "relu_pool",
]  # fmt: skip


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
        rows, columns = triton.next_power_of_2(samples), triton.next_power_of_2(classes)
        _entropy[(models,)](
            logits.contiguous(), target.contiguous(), present.contiguous(), losses, slopes, samples, classes,
            rows, columns, num_warps=min(16, max(4, rows * columns // 1024)),
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
