"""A convolution over a line, a ReLU and the maximum over all places, in one kernel, for N models at once.

What a text network keeps of a filter's answers is the largest one. So the answers need not be written down, and a slope
goes to one place of each sample and filter only: gradients are gathered there instead of convolved. Of equal answers
the first gets the slope, where PyTorch shares it out; equal answers come from equal words, whose slopes are added up.
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

from .convolution import matrix_block, matrix_precision

PLACES, CHANNELS, FILTERS, SAMPLES = 64, 64, 64, 64
"""Most of each that a program takes at once."""


@triton.jit
def _most(
    x, w, bias, y, where, samples, by_model, by_sample, by_channel, by_place,
    C: tl.constexpr, L: tl.constexpr, F: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    PB: tl.constexpr, CB: tl.constexpr, CS: tl.constexpr, FB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample of one model: the largest answer of each filter at the L places, and where it is; -1: none above 0."""
    sample, model = (tl.program_id(0) % samples).to(tl.int64), (tl.program_id(0) // samples).to(tl.int64)
    f = tl.program_id(1) * FB + tl.arange(0, FB)
    start = x + model * by_model + sample * by_sample
    most = tl.full((FB,), -float("inf"), tl.float32)
    place = tl.zeros((FB,), tl.int32)
    broken = tl.zeros((FB,), tl.int32)
    for p0 in range(0, L, PB):
        p = p0 + tl.arange(0, PB)
        total = tl.zeros((PB, FB), tl.float32)
        for i in range(0, K * CS):
            t, c = i // CS, i % CS * CB + tl.arange(0, CB)
            at = (p + t)[:, None] * by_place + c[None, :] * by_channel
            words = tl.load(start + at, (p < L)[:, None] & (c < C)[None, :], 0.0)
            factors = ((model * K + t) * C + c)[:, None] * F + f[None, :]
            weight = tl.load(w + factors, (c < C)[:, None] & (f < F)[None, :], 0.0)
            total = tl.dot(words, weight.to(words.dtype), total, input_precision=PRECISION)
        total = tl.where((p < L)[:, None], total, -float("inf"))
        broken = tl.maximum(broken, tl.max((total != total).to(tl.int32), 0))
        highest = tl.max(total, 0)
        here = tl.argmax(total, 0) + p0
        place = tl.where(highest > most, here, place)
        most = tl.maximum(most, highest)
    if BIAS:
        most += tl.load(bias + model * F + f, f < F, 0.0)
    found = tl.where((broken > 0) | (most != most), float("nan"), tl.maximum(most, 0.0))
    to = (model * samples + sample) * F + f
    tl.store(y + to, found.to(y.dtype.element_ty), f < F)
    tl.store(where + to, tl.where(most > 0, place, -1), f < F)


@triton.jit
def _by_weight(
    x, g, where, dw, db, samples, by_model, by_sample, by_channel, by_place,
    C: tl.constexpr, F: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """dw[f, c, t] = sum over samples of g[f] x[c, where[f] + t]."""
    model, f, t = tl.program_id(1).to(tl.int64), tl.program_id(0) // K, tl.program_id(0) % K
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    total = tl.zeros((CB,), tl.float32)
    slopes = 0.0
    for s0 in range(0, samples, SB):
        s = (s0 + tl.arange(0, SB)).to(tl.int64)
        at = (model * samples + s) * F + f
        place = tl.load(where + at, s < samples, -1)
        slope = tl.where(place >= 0, tl.load(g + at, s < samples, 0.0).to(tl.float32), 0.0)
        source = model * by_model + s * by_sample + (place + t) * by_place
        words = tl.load(x + source[:, None] + c[None, :] * by_channel, (place >= 0)[:, None] & (c < C)[None, :], 0.0)
        total += tl.sum(words.to(tl.float32) * slope[:, None], 0)
        slopes += tl.sum(slope, 0)
    tl.store(dw + ((model * F + f) * C + c) * K + t, total, c < C)
    if BIAS:  # noqa: SIM102, a constant and a number of the run do not mix in Triton
        if (t == 0) & (tl.program_id(2) == 0):
            tl.store(db + model * F + f, slopes)


@triton.jit
def _by_input(
    g, w, where, dx, samples,
    C: tl.constexpr, LENGTH: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    PB: tl.constexpr, CB: tl.constexpr, FB: tl.constexpr, FS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[p, c] = sum over f and t with where[f] + t = p of g[f] w[f, c, t]."""
    row, model = tl.program_id(0).to(tl.int64), (tl.program_id(0) // samples).to(tl.int64)
    p = tl.program_id(1) * PB + tl.arange(0, PB)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    total = tl.zeros((PB, CB), tl.float32)
    for i in range(0, K * FS):
        t, f = i // FS, i % FS * FB + tl.arange(0, FB)
        place = tl.load(where + row * F + f, f < F, -1)
        slope = tl.load(g + row * F + f, f < F, 0.0)
        hit = (place >= 0)[None, :] & (p[:, None] == (place + t)[None, :])
        factors = ((model * K + t) * C + c)[None, :] * F + f[:, None]
        weight = tl.load(w + factors, (f < F)[:, None] & (c < C)[None, :], 0.0)
        picked = tl.where(hit, slope[None, :], 0.0).to(dx.dtype.element_ty)
        total = tl.dot(picked, weight.to(dx.dtype.element_ty), total, input_precision=PRECISION)
    at = (row * LENGTH + p)[:, None] * C + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), (p < LENGTH)[:, None] & (c < C)[None, :])


class _LineMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        models, samples, channels, length = x.shape
        filters, width = weight.shape[1], weight.shape[3]
        if length < width:
            raise ValueError(f"a line of {length} places is shorter than a filter of {width}")
        turned = weight.permute(0, 3, 2, 1).contiguous()
        bias = None if bias is None else bias.contiguous()
        y = x.new_empty(models, samples, filters)
        where = torch.empty_like(y, dtype=torch.int32)
        many, block = matrix_block(channels, CHANNELS), matrix_block(filters, FILTERS)
        _most[(models * samples, triton.cdiv(filters, block))](
            x, turned, bias, y, where, samples, *x.stride(), C=channels, L=length - width + 1, F=filters, K=width,
            BIAS=bias is not None, PB=PLACES, CB=many, CS=triton.cdiv(channels, many), FB=block,
            PRECISION=matrix_precision(),
        )  # fmt: skip
        ctx.save_for_backward(x, turned, where)
        ctx.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, turned, where = ctx.saved_tensors
        g = g.contiguous()
        models, samples, channels, length = x.shape
        filters, width = turned.shape[3], turned.shape[1]
        many = matrix_block(channels, CHANNELS)
        across = triton.cdiv(channels, many)
        dw = x.new_empty(models, filters, channels, width, dtype=torch.float32)
        db = x.new_empty(models, filters, dtype=torch.float32) if ctx.biased else None
        _by_weight[(filters * width, models, across)](
            x, g, where, dw, db, samples, *x.stride(), C=channels, F=filters, K=width, BIAS=ctx.biased,
            SB=matrix_block(samples, SAMPLES), CB=many,
        )  # fmt: skip
        dx = None
        if ctx.needs_input_grad[0]:
            dx = x.new_empty(models, samples, length, channels)
            block = matrix_block(filters, FILTERS)
            _by_input[(models * samples, triton.cdiv(length, PLACES), across)](
                g, turned, where, dx, samples, C=channels, LENGTH=length, F=filters, K=width,
                PB=PLACES, CB=many, FB=block, FS=triton.cdiv(filters, block), PRECISION=matrix_precision(),
            )  # fmt: skip
            dx = dx.transpose(2, 3)
        return dx, dw, db


def line_max(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.relu(F.conv1d(x, weight, bias)).amax(-1)` of N models: [N, B, F] from x [N, B, C, L], weights [N, F, C, K]."""
    return _LineMax.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
