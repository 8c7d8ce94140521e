"""The SGD step of N models on a GPU, all that a plan asks of it in one pass over the weights, written in Triton.

With clipping there is a pass before it, over the same numbers, for the length of each model's gradient.
"""

# The arguments of a kernel are pointers and numbers of the GPU; they have no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from .plan import Plan

BLOCK = 1024
Parts = Sequence[Tensor]
"""One tensor [N, …] for each parameter, each in one piece."""


@triton.jit
def _slope(w, g, mask, anchor, at, here, decay, pull, MASK: tl.constexpr, DECAY: tl.constexpr, PULL: tl.constexpr):
    """The gradient with decay and proximal pull, where the mask lets it through."""
    slope = tl.load(g + at, here, 0.0).to(tl.float32)
    if DECAY or PULL:
        weight = tl.load(w + at, here, 0.0)
        if PULL:
            slope += pull * (weight - tl.load(anchor + at, here, 0.0))
        if DECAY:
            slope += decay * weight
    if MASK:
        slope *= tl.load(mask + at, here, 0.0)
    return slope


@triton.jit(do_not_specialize=["blocks", "first"])
def _squares(
    w, g, mask, anchor, sums, size, blocks, first, decay, pull,
    MASK: tl.constexpr, DECAY: tl.constexpr, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the squares of each block of a parameter, at its place among all blocks of its model."""
    model, i = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slope = _slope(w, g, mask, anchor, model.to(tl.int64) * size + i, i < size, decay, pull, MASK, DECAY, PULL)
    tl.store(sums + model * blocks + first + tl.program_id(0), tl.sum(slope * slope, 0))


@triton.jit
def _move(
    w, g, mask, anchor, velocity, rate, shrink, size, decay, pull, momentum,
    MASK: tl.constexpr, DECAY: tl.constexpr, PULL: tl.constexpr, CLIP: tl.constexpr, MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    model, i = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, here = model.to(tl.int64) * size + i, i < size
    slope = _slope(w, g, mask, anchor, at, here, decay, pull, MASK, DECAY, PULL)
    if CLIP:
        slope *= tl.load(shrink + model)
    if MOMENTUM:
        slope += momentum * tl.load(velocity + at, here, 0.0)
        tl.store(velocity + at, slope, here)
    tl.store(w + at, tl.load(w + at, here, 0.0) - tl.load(rate + model) * slope, here)


def descend(
    plan: Plan, weights: Parts, gradients: Parts, masks: Parts | None, anchors: Parts | None, velocity: Parts | None,
    rate: Tensor,
) -> None:  # fmt: skip
    """Moves weights by minus `rate` [N] times their gradients, after pull, decay, mask, clipping and momentum."""
    gradients = [part.contiguous() for part in gradients]
    sizes, nothing = [part[0].numel() for part in weights], [None] * len(weights)
    masked, pulled, moved = masks or nothing, anchors or nothing, velocity or nothing
    given = list(zip(weights, gradients, masked, pulled, strict=True))
    asked = {"MASK": masks is not None, "DECAY": plan.weight_decay > 0, "PULL": anchors is not None, "BLOCK": BLOCK}
    blocks = [triton.cdiv(size, BLOCK) for size in sizes]
    shrink = None
    if plan.clip_norm is not None:
        sums = rate.new_empty(len(rate), sum(blocks))
        for parts, size, count, first in zip(given, sizes, blocks, accumulate(blocks, initial=0), strict=False):
            _squares[count, len(rate)](
                *parts, sums, size, sum(blocks), first, plan.weight_decay, plan.proximal, **asked, num_warps=4
            )
        shrink = (plan.clip_norm / (sums.sum(1).sqrt() + 1e-12)).clamp(max=1.0)
    asked |= {"CLIP": shrink is not None, "MOMENTUM": velocity is not None}
    for parts, speed, size, count in zip(given, moved, sizes, blocks, strict=True):
        _move[count, len(rate)](
            *parts, speed, rate, shrink, size, plan.weight_decay, plan.proximal, plan.momentum, **asked, num_warps=4
        )
