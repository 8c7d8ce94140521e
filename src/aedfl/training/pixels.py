"""Convolutions of N models on images whose channels lie side by side, on a GPU; the kernels are in `pixel_passes`.

An activation is [N, batch, height, width, channels]. So the numbers of a patch that belong to one position of the
kernel follow each other in memory, those of a row of the kernel too, and are read sixteen bytes at a time; where
channels lie apart (`convolution`), that is two or four. What a convolution multiplies is gathered on the way and never
stored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import pixel_passes as passes
from .choice import PixelTiles, Shape, pixel_tiles
from .convolution import matrix_block, matrix_precision

PROGRAMS = 528
"""Programs that a gradient by the weights is split into: four for each multiprocessor of a large GPU."""
FEW_PARTS, PARTS = 4, 16
"""Up to so many parts are added up one by one; of more, so many at a time, by more programs."""
FEW = 16
"""Fewer channels than this are a few colours: their patches are one operand, whatever the tiles."""


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
    passes.lay[shape.models * taps, triton.cdiv(shape.filters, fb), triton.cdiv(shape.channels, cb)](
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
    passes.convolve[grid](
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
    passes.input_gradient[triton.cdiv(positions, tiles.positions), shape.models, sh * sw * across](
        g, weight, gate, more, dx, shape.batch, *shape.padding, **shape.sizes,
        GATE=gate is not None, MORE=more is not None,
        CB=block, MB=tiles.positions, FB=inner, CS=across,
        PRECISION=matrix_precision(), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dx


def by_weight(
    shape: Shape, x: Tensor, g: Tensor, biased: bool, tiles: PixelTiles
) -> tuple[Tensor, Tensor | None]:
    """Each part of the positions has a sum of its own; the parts are added in a fixed order. The kernel has three rows
    and columns at most."""
    (oh, ow), (kh, kw) = shape.out, shape.kernel
    positions, filters = shape.batch * oh * ow, matrix_block(shape.filters, tiles.others)
    if shape.channels < FEW:
        columns = numbers = matrix_block(shape.channels * kh * kw, tiles.inner)
        run, across = passes.colour_gradient, triton.cdiv(shape.channels * kh * kw, columns)
        split = {"KB": columns, "KS": across}
    elif tiles.rows:
        rows = kh if tiles.rows >= kh else 1
        run, across, numbers = passes.row_gradient, kh // rows, rows * _row(shape)
        split = {"KB": _row(shape), "ROWS": rows}
    else:
        columns = _block(shape.channels, tiles.inner)
        run, across, numbers = passes.weight_gradient, kh * (shape.channels // columns), kw * columns
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
    few = parts <= FEW_PARTS
    together, apart = (int(triton.next_power_of_2(kh * kw)), 1) if few else (1, kh * kw)
    passes.gather[shape.models, triton.cdiv(shape.channels, cb) * apart, triton.cdiv(shape.filters, fb)](
        found, dw, db, size, shape.models, parts, C=shape.channels, F=shape.filters, T=kh * kw, BIAS=biased,
        CB=cb, FB=fb, TB=together, TS=apart, PB=1 if few else PARTS, num_warps=4,
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
