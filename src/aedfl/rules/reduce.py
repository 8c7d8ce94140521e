"""Sums over parameters whose order depends on the length alone, not on the batch or the threads.

`Tensor.sum` splits a single long output over threads but not two of them, so a batch of one would
round differently from a batch of two. Blocks of at most `BLOCK` elements are never split.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024


def total(values: Tensor) -> Tensor:
    """Sum over the last dimension: [..., P] -> [...] in float64."""
    while values.shape[-1] != 1:
        values = _blocks(values)
    return values.double().squeeze(-1)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products along the last dimension: [..., P] x [..., P] -> [...] in float64."""
    return total(left * right)


def norm(values: Tensor) -> Tensor:
    """Euclidean norm along the last dimension: [..., P] -> [...] in float64."""
    return dot(values, values).sqrt()


def slot_sum(values: Tensor) -> Tensor:
    """Sum over dimension 1 in its order, so that zeros at the end change nothing: [B, K, ...] -> [B, ...]."""
    summed = values.new_zeros(values.shape[0], *values.shape[2:])
    for slot in values.unbind(1):
        summed += slot
    return summed


def add_slots(values: Tensor) -> Tensor:
    """As `slot_sum`, of values that nobody needs any more. On a GPU, where each step is a launch, by pairs."""
    return pair_sum(values) if values.is_cuda else slot_sum(values)


def pair_sum(values: Tensor) -> Tensor:
    """Sum over dimension 1 of neighbours, then of neighbouring sums, …, in place: log2(K) steps instead of K.

    Zeros at the end change nothing here either.
    """
    while values.shape[1] > 1:
        right = values[:, 1::2]
        values[:, : 2 * right.shape[1] : 2].add_(right)
        values = values[:, ::2]
    return values.sum(1) if values.shape[1] == 0 else values[:, 0]


def _blocks(values: Tensor) -> Tensor:
    whole = values.shape[-1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(values[..., :whole].reshape(*values.shape[:-1], -1, BLOCK).sum(-1))
    if whole < values.shape[-1] or not whole:
        parts.append(values[..., whole:].sum(-1, keepdim=True))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).double()
