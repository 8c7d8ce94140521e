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
    while values.shape[-1] > 1:
        values = _blocks(values)
    return values.double().sum(-1)


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


def _blocks(values: Tensor) -> Tensor:
    whole = values.shape[-1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(values[..., :whole].reshape(*values.shape[:-1], -1, BLOCK).sum(-1))
    if whole < values.shape[-1]:
        parts.append(values[..., whole:].sum(-1, keepdim=True))
    return torch.cat(parts, -1).double()
