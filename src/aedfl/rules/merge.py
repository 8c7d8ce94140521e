"""Heterogeneous model aggregation on flat vectors, and the consensus distance between models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from . import direct
from .reduce import add_slots, slot_sum, total

TOGETHER = 1 << 22
"""Numbers in a stack of vectors that are summed up one after the other."""


@torch.no_grad()
def merge(vectors: Tensor, masks: Tensor | None, weights: Tensor, own: int = 0) -> Tensor:
    """Formula parameterAggregation: per parameter `sum_j w_j o_j x_j / sum_j w_j o_j`.

    vectors [B, M+1, P], masks bool [B, M+1, P] or None (everyone holds everything), weights [B, M+1]
    -> [B, P]. Where no model with weight holds a parameter, the stored value of slot `own` stays. A slot
    of weight 0 has no influence, whatever it contains: padding may be garbage, a diverged model is left out.
    """
    shares = weights.to(vectors.dtype).unsqueeze(-1)
    held = shares > 0 if masks is None else (shares > 0) & masks
    zero = vectors.new_zeros(())
    summed = add_slots(torch.where(held, vectors, zero).mul_(shares))
    holders = add_slots(torch.where(held, shares, zero))
    return torch.where(holders > 0, summed.div_(holders), vectors[:, own])


@torch.no_grad()
def weighted_mean(
    vectors: Sequence[Tensor],
    weights: Sequence[float] | Tensor,
    masks: Sequence[Tensor] | None = None,
    fallback: Tensor | None = None,
) -> Tensor:
    """The same (masked) mean over a list of vectors [..., P], accumulated in order, a few stacked at a time.

    `weights` are n numbers (samples, for FedAvg) or a tensor whose rows broadcast against the vectors;
    they need not sum to 1. Where nobody holds a parameter, it is that of `fallback` (default: the first).
    """
    first = vectors[0]
    slots = torch.as_tensor(weights, dtype=first.dtype).to(first.device, non_blocking=True)
    if len(slots) != len(vectors):
        raise ValueError(f"{len(slots)} weights were given for {len(vectors)} vectors")
    if masks is not None and len(masks) != len(vectors):
        raise ValueError(f"{len(masks)} masks were given for {len(vectors)} vectors")
    fallback = first if fallback is None else fallback
    held = [None] * len(vectors) if masks is None else masks
    plain = slots.dim() == first.dim() == 1 and bool((slots >= 0).all())
    if plain and direct.possible([[*vectors, fallback]], [held]):
        return direct.merge_one(vectors, held, slots, fallback)
    return _mean(vectors, slots, masks, fallback)


def pairwise_average(left: Tensor, right: Tensor) -> Tensor:
    """AD-PSGD's atomic average of two models; both sides get the same bits."""
    return left * 0.5 + right * 0.5


def merge_flops(models: int, parameters: int) -> int:
    """Floating-point operations of one merge of `models` models."""
    return 2 * models * parameters


def consensus_distance(stack: Tensor, chunk: int = 1 << 22) -> Tensor:
    """Root of the mean over pairs of `||m_i - m_j||^2` for models [n, P], in O(n P): a float64 scalar.

    It is `sqrt(2n / (n-1))` times the root-mean-square distance to the mean model. At most `chunk`
    numbers (n times a stretch of the vectors) are converted to float64 at a time.
    """
    width = max(1, chunk // stack.shape[0])
    squares = [_squares_around_mean(stack[:, at : at + width]) for at in range(0, stack.shape[1], width)]
    return _distance(torch.stack(squares).sum(), stack.shape[0])


def streamed_consensus_distance(vectors: Iterable[Tensor]) -> Tensor:
    """`consensus_distance` of vectors [P] that are walked through twice and never held all together."""
    return distance_by_squares(squares_to_mean(vectors).cpu())


def squares_to_mean(vectors: Iterable[Tensor]) -> Tensor:
    """The squared distance of each of n vectors to their mean, [n] where they lie; walks through them twice."""
    if iter(vectors) is vectors:
        raise TypeError("vectors must be an iterable that can be walked through twice, not an iterator")
    mean, count = _running_mean(vectors)
    walk = iter(vectors)
    groups = (list(islice(walk, part.stop - part.start)) for part in _groups(count, mean.numel()))
    return torch.cat([total((torch.stack(group).double() - mean) ** 2) for group in groups])


def distance_by_squares(squares: Tensor) -> Tensor:
    """The consensus distance of n models from their squared distances to the mean [n], in host memory."""
    return _distance(slot_sum(squares.unsqueeze(0))[0], len(squares))


def _mean(vectors: Sequence[Tensor], weights: Tensor, masks: Sequence[Tensor] | None, fallback: Tensor) -> Tensor:
    """Vector after vector, multiplying and adding apart: no fused rounding, no order that depends on shape."""
    summed, zero = torch.zeros_like(fallback), fallback.new_zeros(())
    holders = torch.zeros_like(weights[0]) if masks is None else torch.zeros_like(fallback)
    beside = [1] * (fallback.dim() - weights[0].dim())
    for part in _groups(len(vectors), fallback.numel()):
        shares = weights[part].reshape(-1, *beside, *weights.shape[1:])
        held = shares > 0 if masks is None else (shares > 0) & torch.stack(list(masks[part]))
        for term in torch.where(held, torch.stack(list(vectors[part])), zero).mul_(shares).unbind():
            summed += term
        for share in torch.where(held, shares, zero).unbind():
            holders += share.view_as(holders)
    return torch.where(holders > 0, summed.div_(holders), fallback)


def _groups(count: int, size: int) -> list[slice]:
    """Slices of so many tensors whose stacks hold at most `TOGETHER` numbers."""
    width = max(1, TOGETHER // size)
    return [slice(begin, begin + width) for begin in range(0, count, width)]


def _squares_around_mean(part: Tensor) -> Tensor:
    part = part.double()
    return total(((part - part.mean(0)) ** 2).flatten())


def _running_mean(vectors: Iterable[Tensor]) -> tuple[Tensor, int]:
    summed: Tensor | None = None
    count = 0
    for vector in vectors:
        summed = vector.double() if summed is None else summed + vector
        count += 1
    if summed is None:
        raise ValueError("the consensus distance of no models is not defined")
    return summed / count, count


def _distance(squares: Tensor, count: int) -> Tensor:
    """From the summed squared distances to the mean; a single model is in consensus with itself."""
    return (2 * squares / max(count - 1, 1)).sqrt()
